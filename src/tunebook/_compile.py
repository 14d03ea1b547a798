"""Compiling candidates in threads, while others already run."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from tunebook._digest import blake2b

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from concurrent.futures import Future

Cfg = TypeVar("Cfg")


class Compiled(NamedTuple):
    """What compiling took, and a digest of what it made; None if that is not known.

    `on_disk` says that other processes find it too.
    """

    seconds: float
    program: str | None
    on_disk: bool


class Compiling(Generic[Cfg]):
    """Compiles candidates, which have names, in the order in which they are asked for."""

    def __init__(
        self,
        compile_one: Callable[[Cfg], object],
        candidates: Mapping[str, Cfg],
        threads: int,
        clock_s: Callable[[], float],
    ) -> None:
        self._compile_one, self._candidates, self._clock_s = compile_one, candidates, clock_s
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="tunebook-compile")
        self._futures: dict[str, Future[Compiled]] = {}
        self._changed = threading.Condition()
        self._busy = 0
        self._held = False

    def start(self, names: Sequence[str]) -> None:
        """Compile these, after those that were started before."""
        for name in names:
            if name not in self._futures:
                self._futures[name] = self._pool.submit(self._compile, name)

    def result(self, name: str, timeout_s: float | None) -> Compiled | Exception | None:
        """Return what came of a candidate that was started, or None if that is not known in time."""
        future = self._futures[name]
        try:
            error = future.exception(timeout_s)
        except TimeoutError:  # which is what concurrent.futures raises
            return None
        if error is None:
            return future.result()
        if not isinstance(error, Exception):
            raise error
        return error

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
