"""Metrics for services: how often the book had an answer, which tunings ran, how long they took, and how many failed.

Counting is off by default and then costs nothing. Switched on, every call notifies one listener: docs/metrics.md has
the cost.
"""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias, final

from tunebook._base.errors import DefinitionError, require
from tunebook._base.locks import InterruptSafeLock
from tunebook._selection.listeners import EVERYWHERE
from tunebook.stores._files import replace_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from http.server import ThreadingHTTPServer

    from tunebook._base.vocabulary import Failure

__all__ = ["Server", "counts", "off", "on", "opentelemetry", "reset", "serve", "text", "write"]

Labels: TypeAlias = tuple[str, ...]


class Family(NamedTuple):
    """One metric, in the words of Prometheus. Every metric has the labels kernel and device; most have one more."""

    name: str
    help: str
    label: str = ""
    unit: str = "1"
    kind: str = "counter"

    def named(self, labels: Labels) -> dict[str, str]:
        """Return the values of the labels by their names."""
        return dict(zip(("kernel", "device", self.label), labels, strict=False))


HITS: Final = Family("tunebook_hits", "Calls answered by memory or by the book.", "level", "{call}")
MISSES: Final = Family("tunebook_misses", "Other calls, by the tier that answered.", "answer", "{call}")
OVERRIDES: Final = Family("tunebook_overrides", "Calls with a given configuration.", "by", "{call}")
TRUSTED: Final = Family("tunebook_trusted", "Hits by entries that are not exact.", "rung", "{call}")
TUNINGS: Final = Family("tunebook_tunings", "Tunings that ended.", "outcome", "{tuning}")
SECONDS: Final = Family("tunebook_tuning_seconds", "Seconds spent in tunings that ended.", "", "s")
FAILURES: Final = Family("tunebook_candidate_failures", "Candidates that failed.", "kind", "{candidate}")
RUNNING: Final = Family("tunebook_tunings_running", "Tunings that run now.", "", "{tuning}", "gauge")
LIVE_CALLS: Final = Family("tunebook_live_calls", "Calls by which candidates were compared or watched.", "", "{call}")
LIVE_SECONDS: Final = Family(
    "tunebook_live_extra_seconds", "Seconds that these calls took longer than with the first choice.", "", "s", "gauge"
)
ROLLBACKS: Final = Family("tunebook_rollbacks", "Winners that became slower and lost their place.", "", "{rollback}")
FAMILIES: Final = (
    HITS, MISSES, OVERRIDES, TRUSTED, TUNINGS, SECONDS, FAILURES, RUNNING, LIVE_CALLS, LIVE_SECONDS, ROLLBACKS
)  # fmt: skip

_GIVEN: Final = {"override": "override", "overlay_hit": "overlay", "pinned": "pin"}
_LIVE: Final = frozenset({"live_progress", "rolled_back"})
_ANSWERED: Final = {"autotune_finish": "autotune", "heuristics": "heuristic", "error": "none"}


@final
class Counts:
    """Counts events exactly, from any number of threads."""

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        # Re-entrant: a finaliser may run a kernel while this thread holds the lock.
        self._lock = InterruptSafeLock()
        self._clock_s = clock_s
        self._cells: dict[tuple[Family, Labels], list[float]] = defaultdict(lambda: [0])
        self._hits: dict[tuple[str, str, str], list[float]] = {}
        self._began: dict[Labels, float] = {}
        self._watchers: tuple[Callable[..., None], ...] = ()

    def renew_lock(self) -> None:
        """Make a new lock, in a forked child."""
        self._lock = InterruptSafeLock()

    def watch(self, watcher: Callable[..., None]) -> None:
        """Call `watcher(event, **data)` for every event except hits, after it was counted."""
        self._watchers = (*self._watchers, watcher)

    def hear(
        self,
        event: str,
        *,
        device: str,
        op_id: str,
        call_key: str,
        cfg: object = None,
        level: str = "",
        trust: str = "",
        **data: Any,
    ) -> None:
        """Count an event; selectors call this as a listener."""
        if trust:
            with self._lock:
                self._cells[TRUSTED, (op_id, device, trust)][0] += 1
        if event == "cache_hit" and not data:
            # Nearly all events are hits, and a hit must cost little: one lookup and one addition.
            cell = self._hits.get((op_id, device, level))
            with self._lock:
                if cell is None:
                    cell = self._hits[op_id, device, level] = self._cells[HITS, (op_id, device, level)]
                cell[0] += 1
            return
        data |= {"device": device, "op_id": op_id, "call_key": call_key, "cfg": cfg}
        self._count(event, data)
        for watcher in self._watchers:
            watcher(event, **data)

    def _count(self, event: str, data: dict[str, Any]) -> None:
        by = (data["op_id"], data["device"])
        problem, cells = (*by, data["call_key"]), self._cells
        failed = event == "autotune_finish" and "error" in data
        with self._lock:
            if event == "autotune_progress" and (failure := _failure(data)) is not None:
                cells[FAILURES, (*by, failure.kind)][0] += 1
            # A verification that does not hold begins a tuning of the same problem: together they are one.
            elif event == "autotune_start" and problem not in self._began:
                self._began[problem] = self._clock_s()
                cells[RUNNING, by] = [0]  # see `values`
            # Without a beginning here, a caller that waited sent the event, or another process did the tuning.
            elif event == "autotune_finish" and (began_s := self._began.pop(problem, None)) is not None:
                cells[SECONDS, by][0] += max(self._clock_s() - began_s, 0.0)
                cells[TUNINGS, (*by, "failed" if failed else "decided")][0] += 1
            if event in _LIVE:
                self._count_live(event, by, problem, data)
            elif event in _GIVEN:
                cells[OVERRIDES, (*by, _GIVEN[event])][0] += 1
            # A failed tuning has no answer; the next tier sends an event of its own.
            elif event in _ANSWERED and data.get("called", True) and not failed:
                cells[MISSES, (*by, _ANSWERED[event])][0] += 1

    def _count_live(self, event: str, by: Labels, problem: Labels, data: dict[str, Any]) -> None:
        if event == "rolled_back":
            self._cells[ROLLBACKS, by][0] += 1
            return
        self._cells[LIVE_CALLS, by][0] += data["calls"]
        self._cells[LIVE_SECONDS, by][0] += data["extra_s"]
        if problem in self._began:  # calls go on meanwhile: no time is spent on tuning alone
            self._began[problem] = self._clock_s()

    def values(self, family: Family) -> dict[Labels, float]:
        """Return the counts of a family by their labels."""
        with self._lock:
            found = {labels: cell[0] for (each, labels), cell in self._cells.items() if each is family}
            if family is RUNNING:  # not a count of its own, which an interrupt could leave wrong for good
                found = {labels: sum(problem[:2] == labels for problem in self._began) for labels in found}
            return found

    def text(self) -> str:
        """Return the counts in Prometheus' text format."""
        lines = []
        for family in FAMILIES:
            name = family.name + ("_total" if family.kind == "counter" else "")
            lines += [f"# HELP {name} {family.help}", f"# TYPE {name} {family.kind}"]
            for labels, value in sorted(self.values(family).items()):
                escaped = (label.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"') for label in labels)
                pairs = ",".join(f'{key}="{label}"' for key, label in family.named(tuple(escaped)).items())
                lines.append(f"{name}{{{pairs}}} {value!r}")
        return "\n".join(lines) + "\n"

    def reset(self) -> None:
        """Set every count to zero."""
        with self._lock:
            self._cells.clear()
            self._hits.clear()
            self._began.clear()


def _failure(data: dict[str, Any]) -> Failure | None:
    """Return the failure that an "autotune_progress" event reports, if any."""
    latest = data["step"].latest
    return None if latest is None else latest.failure


_counts: Final = Counts()
os.register_at_fork(after_in_child=_counts.renew_lock)


def on() -> None:
    """Count from now on, for every tunable function and selector of the process. Safe to call again."""
    EVERYWHERE.listen(_counts.hear)


def off() -> None:
    """Stop counting and keep the counts."""
    EVERYWHERE.unlisten(_counts.hear)


def reset() -> None:
    """Set every count to zero."""
    _counts.reset()


def counts() -> dict[str, dict[Labels, float]]:
    """Return the counts by the metric's name and its labels (kernel, device, and for most metrics one more)."""
    return {family.name: _counts.values(family) for family in FAMILIES}


def text() -> str:
    """Return the counts in Prometheus' text format (0.0.4)."""
    return _counts.text()


def write(path: str | os.PathLike[str]) -> Path:
    """Switch counting on, and write the counts to a file now, for a collector that reads files."""
    on()
    target = Path(path)
    # In one step: a collector that reads half a file drops all of it.
    replace_file(target, text().encode())
    return target


@final
class Server:
    """Answers every GET with the text, in a thread, until it is closed. Also a context manager."""

    def __init__(self, server: ThreadingHTTPServer) -> None:
        self._server = server
        self._thread = threading.Thread(target=server.serve_forever, name="tunebook-metrics", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """The address of the server."""
        host, port = self._server.server_address[:2]
        return f"http://{host!s}:{port}/metrics"

    def close(self) -> None:
        """Stop answering."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def serve(port: int = 9464, host: str = "127.0.0.1") -> Server:
    """Switch counting on, and serve the counts; port 0 is any free port. Only this machine can connect by default."""
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer  # noqa: PLC0415 - loaded late: 20 ms

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            content = text().encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            """Do nothing: the standard handler writes every request to standard error."""

    try:
        server = ThreadingHTTPServer((host, port), Handler)
    except OSError as error:
        raise DefinitionError(f"cannot serve metrics on {host}:{port}: {error}. Give another port, or 0.") from error
    on()
    return Server(server)


def opentelemetry(meter_provider: Any = None, tracer_provider: Any = None) -> None:
    """Switch counting on, and export to OpenTelemetry; each tuning is a span, with its failures as events.

    Without arguments it uses the providers of the process. Call it once.
    """
    metrics = require("opentelemetry.metrics", extra="otel", feature="exporting")
    trace = require("opentelemetry.trace", extra="otel", feature="exporting")
    meter = metrics.get_meter("tunebook", meter_provider=meter_provider)
    for family in FAMILIES:
        make = meter.create_observable_counter if family.kind == "counter" else meter.create_observable_up_down_counter

        def observe(_options: object, family: Family = family) -> Iterable[Any]:
            values = _counts.values(family).items()
            return [metrics.Observation(value, family.named(labels)) for labels, value in values]

        name = family.name.replace("tunebook_", "tunebook.")
        make(name, callbacks=[observe], unit=family.unit, description=family.help)
    _counts.watch(_Spans(trace.get_tracer("tunebook", tracer_provider=tracer_provider)))
    on()


class _Spans:
    """Makes a span of each tuning."""

    def __init__(self, tracer: Any) -> None:
        self._tracer = tracer
        self._open: dict[tuple[str, str, str], Any] = {}

    def __call__(self, event: str, **data: Any) -> None:
        key = (data["op_id"], data["device"], data["call_key"])
        if event == "autotune_start" and key not in self._open:
            attributes = {"tunebook.kernel": key[0], "tunebook.device": key[1], "tunebook.call": key[2]}
            self._open[key] = self._tracer.start_span("tunebook.tune", attributes=attributes)
        elif event == "autotune_progress" and key in self._open and (failure := _failure(data)) is not None:
            about = {"kind": failure.kind, "message": failure.message[:1000]}
            self._open[key].add_event("candidate failed", about)
        elif event == "autotune_finish" and (span := self._open.pop(key, None)) is not None:
            span.set_attribute("tunebook.config", repr(data["cfg"]))
            if (error := data.get("error")) is not None:
                span.record_exception(error)
            span.end()


def __dir__() -> list[str]:
    return sorted(__all__)
