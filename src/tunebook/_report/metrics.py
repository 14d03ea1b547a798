"""Numbers for services: how often the book had an answer, what was tuned, how long that took, and what failed.

Nothing is counted until it is switched on, and until then a tuned call costs what it always costs. Switched on, every
call tells one listener: see docs/metrics.md for what that takes.
"""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias, final

from tunebook._base.errors import DefinitionError
from tunebook._base.optional import require
from tunebook._selection.selector import EVERYWHERE
from tunebook.stores._files import replace_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from http.server import ThreadingHTTPServer

    from tunebook._tuning.job import Step

Labels: TypeAlias = tuple[str, ...]


class Family(NamedTuple):
    """One metric: its name and kind as Prometheus has them, what it counts, and the names of its labels."""

    name: str
    kind: str
    help: str
    labels: Labels
    unit: str = "1"


_BY: Final = ("kernel", "device")
HITS: Final = Family(
    "tunebook_hits", "counter", "Calls that memory or the book had an answer for.", (*_BY, "level"), "{call}"
)
MISSES: Final = Family(
    "tunebook_misses", "counter", "Calls that neither had an answer for, by what answered.", (*_BY, "answer"), "{call}"
)
OVERRIDES: Final = Family(
    "tunebook_overrides", "counter", "Calls that were given their configuration.", (*_BY, "by"), "{call}"
)
TUNINGS: Final = Family("tunebook_tunings", "counter", "Tunings that ended.", (*_BY, "outcome"), "{tuning}")
SECONDS: Final = Family("tunebook_tuning_seconds", "counter", "Seconds from their beginning to their end.", _BY, "s")
FAILURES: Final = Family(
    "tunebook_candidate_failures", "counter", "Candidates that failed when tried.", (*_BY, "kind"), "{candidate}"
)
RUNNING: Final = Family("tunebook_tunings_running", "gauge", "Tunings that have begun and not ended.", _BY, "{tuning}")
FAMILIES: Final = (HITS, MISSES, OVERRIDES, TUNINGS, SECONDS, FAILURES, RUNNING)

_GIVEN: Final = {"override": "override", "overlay_hit": "overlay", "pinned": "pin"}
_ANSWERED: Final = {"autotune_finish": "autotune", "heuristics": "heuristic", "error": "none"}


@final
class Counts:
    """Counts events, exactly, from any number of threads."""

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        # Re-entrant: a finaliser that runs a kernel may come while this thread holds it.
        self._lock = threading.RLock()
        self._clock_s = clock_s
        self._cells: dict[tuple[Family, Labels], list[float]] = defaultdict(lambda: [0])
        self._hits: dict[tuple[str, str, str], list[float]] = {}
        self._began: dict[Labels, float] = {}
        self._watchers: tuple[Callable[..., None], ...] = ()

    def renew_lock(self) -> None:
        """Take a new lock, in a forked child."""
        self._lock = threading.RLock()

    def watch(self, watcher: Callable[..., None]) -> None:
        """Tell `watcher(event, **data)` of every event but hits, after it was counted."""
        self._watchers = (*self._watchers, watcher)

    def hear(
        self, event: str, *, device: str, op_id: str, call_key: str, cfg: object = None, level: str = "", **told: Any
    ) -> None:
        """Count an event; a listener of selectors."""
        if event == "cache_hit" and not told:
            # Nearly all events are hits, and a hit must cost little: one lookup and one addition.
            cell = self._hits.get((op_id, device, level)) or self._hit_cell((op_id, device, level))
            with self._lock:
                cell[0] += 1
            return
        told |= {"device": device, "op_id": op_id, "call_key": call_key, "cfg": cfg}
        self._count(event, told)
        for watcher in self._watchers:
            watcher(event, **told)

    def _hit_cell(self, labels: tuple[str, str, str]) -> list[float]:
        with self._lock:
            return self._hits.setdefault(labels, self._cells[HITS, labels])

    def _count(self, event: str, told: dict[str, Any]) -> None:
        by = (told["op_id"], told["device"])
        problem = (*by, told["call_key"])
        if event == "autotune_progress":
            self._failed(by, told["step"])
        elif event == "autotune_start":
            self._start(by, problem)
        elif event == "autotune_finish":
            self._finish(by, problem, "failed" if told.get("error") is not None else "decided")
        if event in _GIVEN:
            self.add(OVERRIDES, (*by, _GIVEN[event]))
        # A tuning that failed has no answer; what is asked next tells its own event.
        elif event in _ANSWERED and told.get("called", True) and not (event == "autotune_finish" and "error" in told):
            self.add(MISSES, (*by, _ANSWERED[event]))

    def _failed(self, by: Labels, step: Step) -> None:
        if step.latest is not None and step.latest.failure is not None:
            self.add(FAILURES, (*by, step.latest.failure.kind))

    def _start(self, by: Labels, problem: Labels) -> None:
        with self._lock:
            # A verification that does not hold begins a tuning of the same problem: together they are one.
            if problem not in self._began:
                self._began[problem] = self._clock_s()
                self._cells[RUNNING, by][0] += 1

    def _finish(self, by: Labels, problem: Labels, outcome: str) -> None:
        with self._lock:
            began_s = self._began.pop(problem, None)
            if began_s is None:
                return  # told by whoever waited for it, or asked for a tuning that another process did
            self._cells[RUNNING, by][0] -= 1
            self._cells[SECONDS, by][0] += max(self._clock_s() - began_s, 0.0)
            self._cells[TUNINGS, (*by, outcome)][0] += 1

    def add(self, family: Family, labels: Labels, amount: float = 1) -> None:
        """Add to a count."""
        with self._lock:
            self._cells[family, labels][0] += amount

    def values(self, family: Family) -> dict[Labels, float]:
        """Return the counts of one family by their labels."""
        with self._lock:
            return {labels: cell[0] for (each, labels), cell in self._cells.items() if each is family}

    def reset(self) -> None:
        """Begin at zero."""
        with self._lock:
            self._cells.clear()
            self._hits.clear()
            self._began.clear()


_counts: Final = Counts()
os.register_at_fork(after_in_child=_counts.renew_lock)


def on() -> None:
    """Count from now on, for every tunable function and selector of the process. Safe to call again."""
    EVERYWHERE.listen(_counts.hear)


def off() -> None:
    """Count no more; what was counted stays."""
    EVERYWHERE.unlisten(_counts.hear)


def reset() -> None:
    """Begin at zero."""
    _counts.reset()


def counts() -> dict[str, dict[Labels, float]]:
    """Return what was counted, by the metric's name and its labels (kernel, device, and one more of most)."""
    return {family.name: _counts.values(family) for family in FAMILIES}


# ------------------------------------------------------------------------------------------------------- Prometheus


def text() -> str:
    """Return what was counted in Prometheus' text format (0.0.4)."""
    return "".join(_exposed(family, _counts.values(family)) for family in FAMILIES)


def _exposed(family: Family, values: dict[Labels, float]) -> str:
    name = family.name + ("_total" if family.kind == "counter" else "")
    lines = [f"# HELP {name} {family.help}", f"# TYPE {name} {family.kind}"]
    for labels, value in sorted(values.items()):
        pairs = ",".join(f'{key}="{_escaped(label)}"' for key, label in zip(family.labels, labels, strict=True))
        lines.append(f"{name}{{{pairs}}} {value!r}")
    return "\n".join(lines) + "\n"


def _escaped(label: str) -> str:
    return label.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def write(path: str | os.PathLike[str]) -> Path:
    """Switch counting on, and write the text to a file at once, for a collector that reads files."""
    on()
    target = Path(path)
    # Replaced whole: a collector that reads half a file drops all of it.
    replace_file(target, text().encode())
    return target


@final
class Server:
    """Answers every GET with the text, from a thread of its own, until it is closed. Also a context manager."""

    def __init__(self, server: ThreadingHTTPServer) -> None:
        self._server = server
        self._thread = threading.Thread(target=server.serve_forever, name="tunebook-metrics", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """Where it answers."""
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
    """Switch counting on, and answer on a port, of this machine alone unless `host` says otherwise; 0 is any port."""
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer  # noqa: PLC0415 - 20 ms that only servers pay

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            content = text().encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            """Say nothing: the standard handler writes every request to standard error."""

    try:
        server = ThreadingHTTPServer((host, port), Handler)
    except OSError as error:
        raise DefinitionError(f"cannot serve metrics on {host}:{port}: {error}. Give another port, or 0.") from error
    server.daemon_threads = True
    on()
    return Server(server)


# --------------------------------------------------------------------------------------------------- OpenTelemetry


def opentelemetry(meter_provider: Any = None, tracer_provider: Any = None) -> None:
    """Switch counting on, and hand the counts to OpenTelemetry; each tuning is a span, with its failures as events.

    The providers are those of the process unless they are given. Call it once.
    """
    metrics = require("opentelemetry.metrics", extra="otel", feature="exporting")
    trace = require("opentelemetry.trace", extra="otel", feature="exporting")
    meter = metrics.get_meter("tunebook", meter_provider=meter_provider)
    for family in FAMILIES:
        make = meter.create_observable_counter if family.kind == "counter" else meter.create_observable_up_down_counter
        name = family.name.replace("tunebook_", "tunebook.")
        make(name, callbacks=[_observer(family, metrics.Observation)], unit=family.unit, description=family.help)
    _counts.watch(_Spans(trace.get_tracer("tunebook", tracer_provider=tracer_provider)))
    on()


def _observer(family: Family, observation: Callable[..., Any]) -> Callable[[object], Iterable[Any]]:
    def observe(_options: object) -> Iterable[Any]:
        for labels, value in _counts.values(family).items():
            yield observation(value, dict(zip(family.labels, labels, strict=True)))

    return observe


class _Spans:
    """Makes a span of each tuning."""

    def __init__(self, tracer: Any) -> None:
        self._tracer = tracer
        self._open: dict[tuple[str, str, str], Any] = {}

    def __call__(self, event: str, **told: Any) -> None:
        key = (told["op_id"], told["device"], told["call_key"])
        if event == "autotune_start" and key not in self._open:
            attributes = {"tunebook.kernel": key[0], "tunebook.device": key[1], "tunebook.call": key[2]}
            self._open[key] = self._tracer.start_span("tunebook.tune", attributes=attributes)
        elif event == "autotune_progress":
            self._note(self._open.get(key), told["step"])
        elif event == "autotune_finish" and (span := self._open.pop(key, None)) is not None:
            span.set_attribute("tunebook.config", repr(told["cfg"]))
            if (error := told.get("error")) is not None:
                span.record_exception(error)
            span.end()

    def _note(self, span: Any, step: Step) -> None:
        failure = None if step.latest is None else step.latest.failure
        if span is not None and failure is not None:
            span.add_event("candidate failed", {"kind": failure.kind, "message": failure.message[:1000]})
