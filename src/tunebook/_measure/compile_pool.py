"""Compiling candidates in threads, while others already run."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from tunebook._base.config_codec import encode, fingerprint_of
from tunebook._base.errors import CALLED_FROM, CodecError, line_of_caller
from tunebook._base.locks import InterruptSafeLock
from tunebook._base.record_format import blake2b

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from concurrent.futures import Future

Cfg = TypeVar("Cfg")


class Compiled(NamedTuple):
    """The seconds of a build and the digest of its product, if known. All processes find a product `on_disk`."""

    seconds: float
    program: str | None
    on_disk: bool


def program_of(config: object, launch_axes: frozenset[str]) -> tuple[str, str] | None:
    """Return digests of the part of a configuration that is compiled in, and of the part that is set at launch.

    None if the configuration cannot be encoded.
    """
    fields = config if isinstance(config, Mapping) else {"": config}
    try:
        encoded = {name: encode(value) for name, value in fields.items()}
    except CodecError:
        return None
    launched = {name: value for name, value in encoded.items() if name in launch_axes}
    compiled = {name: value for name, value in encoded.items() if name not in launched}
    return fingerprint_of(compiled), fingerprint_of(launched) if launched else ""


class Compiling(Generic[Cfg]):
    """Compiles named candidates in threads, in order; those that differ only on the axes set at launch together."""

    def __init__(
        self,
        compile_one: Callable[[Cfg], object],
        candidates: Mapping[str, Cfg],
        threads: int,
        clock_s: Callable[[], float],
        launch_axes: frozenset[str] = frozenset(),
    ) -> None:
        self._compile_one, self._candidates, self._clock_s = compile_one, candidates, clock_s
        line = line_of_caller()
        self._pool = ThreadPoolExecutor(threads, "tunebook-compile", lambda: CALLED_FROM.set(line))
        self._launch_axes = launch_axes
        self._futures: dict[str, Future[Compiled]] = {}
        self._builders: dict[str, str] = {}  # the first candidate of each program
        self._shares: dict[str, tuple[str, str]] = {}  # the builder, and the digest of the part set at launch
        self._lock = InterruptSafeLock()
        self._changed = threading.Condition(self._lock)
        self._busy, self._held = 0, False
        self.waiting_s = 0.0  # for builds, of the thread that asks for them
        self.left_out: dict[str, str] = {}  # why, by name

    def start(self, names: Sequence[str]) -> None:
        """Compile candidates, after all that were started before."""
        for name in names:
            if name in self._futures:
                continue
            builder, launched = name, ""
            program = program_of(self._candidates[name], self._launch_axes) if self._launch_axes else None
            if program is not None:
                compiled, launched = program
                builder = self._builders.setdefault(compiled, name)
            self._shares[name] = builder, launched
            self._futures[name] = self._futures.get(builder) or self._pool.submit(self._compile, name)

    def result(self, name: str, timeout_s: float | None) -> Compiled | Exception | None:
        """Return the outcome of a started build, or None if it takes longer than the timeout."""
        future = self._futures[name]
        try:
            with self._waiting():
                error = future.exception(timeout_s)
        except TimeoutError:  # of concurrent.futures
            return None
        if isinstance(error, Exception):
            return error
        (seconds, digest, on_disk), (builder, launched) = future.result(), self._shares[name]
        # Only the candidate that triggered a shared build is charged the time.
        return Compiled(seconds if builder == name else 0.0, digest and digest + launched, on_disk)

    def in_turn(
        self, names: Iterable[str], patience_s: Callable[[], float | None], reason_against: Callable[[str], str | None]
    ) -> Iterator[str]:
        """Yield candidates as their builds end, in order if several have; one that is still built if that takes longer.

        After each, the candidates with a reason against them are left out. They are not waited for any more.
        """
        left = list(names)
        while left:
            with self._waiting():
                wait([self._futures[name] for name in left], patience_s(), FIRST_COMPLETED)
            name = next((name for name in left if self._futures[name].done()), left[0])
            yield name
            reasons = {other: reason_against(other) for other in left if other != name}
            self.left_out |= {other: reason for other, reason in reasons.items() if reason is not None}
            left = [other for other, reason in reasons.items() if reason is None]

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        began_s = self._clock_s()
        try:
            yield
        finally:
            self.waiting_s += self._clock_s() - began_s

    def close(self) -> None:
        """Finish the running builds, and drop the rest."""
        self._pool.shutdown(cancel_futures=True)

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Wait for the running builds, and start none inside the block."""
        # For forks: a lock that a thread holds at that moment stays locked for ever in the child.
        with self._lock:
            self._held = True
            self._changed.wait_for(lambda: not self._busy)
        try:
            yield
        finally:
            with self._lock:
                self._held = False
                self._changed.notify_all()

    def _compile(self, name: str) -> Compiled:
        with self._lock:
            self._changed.wait_for(lambda: not self._held)
            self._busy += 1
        try:
            start = self._clock_s()
            made = self._compile_one(self._candidates[name])
            seconds = self._clock_s() - start
            content = made.read_bytes() if isinstance(made, Path) else made
            digest = blake2b(content, digest_size=16).hexdigest() if isinstance(content, bytes) else None
            return Compiled(seconds, digest, isinstance(made, Path))
        finally:
            with self._lock:
                self._busy -= 1
                self._changed.notify_all()
