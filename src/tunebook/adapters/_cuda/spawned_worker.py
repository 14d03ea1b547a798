"""A process of its own for what may crash a GPU's context, asked one thing at a time and started anew when it is lost.

It is started afresh and not forked, because a context does not survive a fork.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from importlib import import_module
from multiprocessing.connection import Connection, Pipe
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self, final

from tunebook._base.vocabulary import Failure

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

_START_S: Final = 120.0  # importing a framework and waking a GPU takes seconds, and more on a busy machine
_TAIL: Final = 2048  # bytes of what it printed that are kept: a device-side assert says there what failed
# -P: the child must not find modules beside this file, where one is called torch.
_START: Final = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from tunebook.adapters._cuda.spawned_worker import serve
serve(int(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4]))
"""


class WorkerLost(NamedTuple):
    """What became of a request that has no answer, and what the process printed last."""

    failure: Failure
    printed: str


@final
class SpawnedWorker:
    """Runs `module.handler(*given)` in a process of its own, and asks what that returns. A context manager.

    `handler` is named as "module:function"; what it returns is called with each request, and its result is the answer.
    It may end the process after an answer by returning a `FinalAnswer`.
    """

    def __init__(self, handler: str, given: tuple[Any, ...], timeout_s: float) -> None:
        self._handler, self._given, self._timeout_s = handler, given, timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the worker
        self._ready = False
        self.starts = 0

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()
        self._printed.close()

    def start(self) -> None:
        """Start the process if there is none; it takes seconds until it answers, and this does not wait for it."""
        if self._process is not None:
            return
        self.starts += 1
        self._ready = False
        self._connection, theirs = Pipe()
        self._printed.truncate(0)
        command = [sys.executable, "-P", "-c", _START, json.dumps(sys.path), str(theirs.fileno()), self._handler]
        self._process = subprocess.Popen(  # noqa: S603 - our own code
            [*command, json.dumps(self._given)],
            stdin=subprocess.DEVNULL,
            stdout=self._printed,
            stderr=self._printed,
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # Ctrl-C is not for it
        )
        theirs.close()

    def ask(self, request: object) -> Any:
        """Return the answer to a request, or how the process was lost over it."""
        self.start()
        keep = False
        try:
            answer = self._answer(request)
            keep = not isinstance(answer, FinalAnswer)
        finally:  # also when Ctrl-C comes while waiting: the answer must not be read as the next one's
            if not keep:
                self._end()
        return answer.answer if isinstance(answer, FinalAnswer) else answer

    def _answer(self, request: object) -> Any:
        connection, process = self._connection, self._process
        if connection is None or process is None:
            raise RuntimeError("the worker was not started")
        try:
            if not self._ready and not connection.poll(_START_S):
                return self._lost(Failure(kind="timeout", message=f"the worker did not start within {_START_S:g} s"))
            self._ready = self._ready or connection.recv()
            connection.send(request)
            if not connection.poll(self._timeout_s):
                return self._lost(Failure(kind="timeout", message=f"no answer within {self._timeout_s:g} s"))
            return connection.recv()
        except (EOFError, ConnectionError):
            status = process.wait()
            words = signal.Signals(-status).name if status < 0 else f"status {status}"
            return self._lost(Failure(kind="crash", message=f"the worker process ended with {words}"))

    def _lost(self, failure: Failure) -> WorkerLost:
        self._end()
        size = self._printed.seek(0, os.SEEK_END)
        self._printed.seek(max(0, size - _TAIL))
        return WorkerLost(failure, self._printed.read().decode(errors="replace"))

    def _end(self) -> None:
        process, self._process = self._process, None
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
        if process is not None:
            process.kill()
            process.wait()


class FinalAnswer(NamedTuple):
    """An answer after which the process is of no more use."""

    answer: Any


# ---- What follows runs in the process of its own.


def serve(descriptor: int, handler: str, given: list[Any]) -> None:
    """Answer requests until there is nobody to ask them."""
    connection = Connection(descriptor)
    module, _, name = handler.partition(":")
    handle: Callable[[Any], Any] = getattr(import_module(module), name)(*given)
    connection.send(True)  # noqa: FBT003 - it is ready
    while True:
        try:
            request = connection.recv()
        except EOFError:
            return
        connection.send(handle(request))
