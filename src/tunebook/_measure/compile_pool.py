"""Compiling candidates in threads, while others already run."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from tunebook._base.config_codec import encode, fingerprint_of
from tunebook._base.errors import CodecError
from tunebook._base.record_format import blake2b

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from concurrent.futures import Future

Cfg = TypeVar("Cfg")


class Compiled(NamedTuple):
    """What compiling took, and a digest of what it made; None if that is not known.

    `on_disk` says that other processes find it too.
    """

    seconds: float
    program: str | None
    on_disk: bool


class ProgramDigest(NamedTuple):
    """Digests of what of a configuration is compiled in, and of what is set only when that is launched."""

    compiled: str
    launched: str


def program_of(config: object, launch_axes: frozenset[str]) -> ProgramDigest | None:
    """Return which program a configuration needs; None if it cannot be told from others."""
    fields = config if isinstance(config, Mapping) else {"": config}
    try:
        encoded = {name: encode(value) for name, value in fields.items()}
    except CodecError:
        return None
    launched = {name: value for name, value in encoded.items() if name in launch_axes}
    compiled = {name: value for name, value in encoded.items() if name not in launched}
    return ProgramDigest(fingerprint_of(compiled), fingerprint_of(launched) if launched else "")


class Compiling(Generic[Cfg]):
    """Compiles candidates, which have names, in the order in which they are asked for.

    Those that differ only on the axes that are set at launch are compiled once, and an error is theirs together.
    """

    def __init__(
        self,
        compile_one: Callable[[Cfg], object],
        candidates: Mapping[str, Cfg],
        threads: int,
        clock_s: Callable[[], float],
        launch_axes: frozenset[str] = frozenset(),
    ) -> None:
        self._compile_one, self._candidates, self._clock_s = compile_one, candidates, clock_s
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="tunebook-compile")
        self._launch_axes = launch_axes
        self._futures: dict[str, Future[Compiled]] = {}
        self._programs: dict[str, tuple[str, Future[Compiled]]] = {}
        self._changed = threading.Condition()
        self._busy = 0
        self._held = False

    def start(self, names: Sequence[str]) -> None:
        """Compile these, after those that were started before."""
        for name in names:
            if name not in self._futures:
                self._futures[name] = self._submitted(name)

    def _submitted(self, name: str) -> Future[Compiled]:
        if self._launch_axes and (program := self._program(name)) is not None:
            if program.compiled not in self._programs:
                self._programs[program.compiled] = name, self._pool.submit(self._compile, name)
            return self._programs[program.compiled][1]
        return self._pool.submit(self._compile, name)

    def _program(self, name: str) -> ProgramDigest | None:
        return program_of(self._candidates[name], self._launch_axes)

    def result(self, name: str, timeout_s: float | None) -> Compiled | Exception | None:
        """Return what came of a candidate that was started, or None if that is not known in time."""
        future = self._futures[name]
        try:
            error = future.exception(timeout_s)
        except TimeoutError:  # which is what concurrent.futures raises
            return None
        if error is None:
            return self._as_its_own(name, future.result())
        if not isinstance(error, Exception):
            raise error
        return error

    def _as_its_own(self, name: str, compiled: Compiled) -> Compiled:
        """Return what was made, as that of one who shares it: told apart by how it is launched, and compiled by one."""
        program = self._program(name) if self._launch_axes else None
        if program is None or program.compiled not in self._programs:
            return compiled
        seconds = compiled.seconds if self._programs[program.compiled][0] == name else 0.0
        digest = None if compiled.program is None else compiled.program + program.launched
        return compiled._replace(seconds=seconds, program=digest)

    def close(self) -> None:
        """Finish what is being compiled, and drop the rest."""
        self._pool.shutdown(cancel_futures=True)

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Compile nothing inside the block, which waits for what is being compiled.

        For forks: what a thread has locked at that moment is locked for ever in the child.
        """
        with self._changed:
            self._held = True
            self._changed.wait_for(lambda: not self._busy)
        try:
            yield
        finally:
            with self._changed:
                self._held = False
                self._changed.notify_all()

    def _compile(self, name: str) -> Compiled:
        with self._changed:
            self._changed.wait_for(lambda: not self._held)
            self._busy += 1
        try:
            start = self._clock_s()
            made = self._compile_one(self._candidates[name])
            return Compiled(self._clock_s() - start, _digest(made), isinstance(made, Path))
        finally:
            with self._changed:
                self._busy -= 1
                self._changed.notify_all()


def _digest(made: object) -> str | None:
    if not isinstance(made, (Path, bytes)):
        return None
    content = made if isinstance(made, bytes) else made.read_bytes()
    return blake2b(content, digest_size=16).hexdigest()
