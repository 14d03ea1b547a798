"""A worker process for work that may crash a GPU's context. It answers one request at a time, and restarts when lost.

The process is started afresh, not forked, because a CUDA context does not survive a fork. `_measure.forked_worker` is
the counterpart for work on the CPU, and says how a lost process is reported.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from importlib import import_module
from multiprocessing.connection import Connection, Pipe
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self, final

from tunebook._base.vocabulary import Failure
from tunebook._measure.forked_worker import Reply, exit_failure

if TYPE_CHECKING:
    from collections.abc import Callable

_START_S: Final = 120.0  # importing a framework and waking a GPU takes seconds, and more on a busy machine
_TAIL: Final = 2048  # bytes of output that are kept: a device-side assert prints there which check failed
# -P: the child must not find modules beside this file, where one is called torch.
_START: Final = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from tunebook.adapters._cuda.spawned_worker import serve
serve(int(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4]))
"""


class FinalAnswer(NamedTuple):
    """An answer after which the process is of no more use."""

    answer: Any


@final
class SpawnedWorker:
    """Calls `handler(*given)` in a worker process, and sends requests to the function that it returns.

    `handler` is named as "module:function". The function's result is the answer; a `FinalAnswer` also ends the process.
    A context manager.
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

    def __exit__(self, *_error: object) -> None:
        self._end()
        self._printed.close()

    def start(self) -> None:
        """Start the process unless it runs, without waiting; it takes seconds until it answers."""
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
        """Return the answer to a request, or a `Reply` with a failure if the process was lost over it."""
        self.start()
        keep = False
        try:
            answer = self._ask(request)
            keep = not isinstance(answer, (FinalAnswer, Reply))
        finally:  # also when Ctrl-C comes while waiting: the next request must not read this answer
            if not keep:
                self._end()
        return answer.answer if isinstance(answer, FinalAnswer) else answer

    def _ask(self, request: object) -> Any:
        connection, process = self._connection, self._process
        if connection is None or process is None:
            raise RuntimeError("the worker was not started")
        try:
            if not self._ready and not connection.poll(_START_S):
                return self._lose(Failure(kind="timeout", message=f"the worker did not start within {_START_S:g} s"))
            self._ready = self._ready or connection.recv()
            connection.send(request)
            if not connection.poll(self._timeout_s):
                return self._lose(Failure(kind="timeout", message=f"no answer within {self._timeout_s:g} s"))
            return connection.recv()
        except (EOFError, ConnectionError):
            return self._lose(exit_failure(process.wait(), 0)._replace(kind="crash"))

    def _lose(self, failure: Failure) -> Reply:
        self._end()
        size = self._printed.seek(0, os.SEEK_END)
        self._printed.seek(max(0, size - _TAIL))
        return Reply(failure=failure, remote=self._printed.read().decode(errors="replace"))

    def _end(self) -> None:
        process, self._process = self._process, None
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
        if process is not None:
            process.kill()
            process.wait()


def serve(descriptor: int, handler: str, given: list[Any]) -> None:
    """Answer requests until the other end of the pipe is closed. Runs in the worker process."""
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
