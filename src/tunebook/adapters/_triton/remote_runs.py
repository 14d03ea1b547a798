"""Runs a launch's candidates in a worker process, because a candidate may crash the GPU's context.

This process compiles the programs. The worker launches them by Triton's own launcher, and imports none of the user's
modules. It is started afresh, not forked, because a CUDA context does not survive a fork. `_measure.forked_worker` is
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
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self, final

import torch
from triton.compiler import CompiledKernel
from triton.runtime import driver

from tunebook._base.vocabulary import Failure
from tunebook._measure.forked_worker import Reply, exit_failure
from tunebook._measure.stopwatch import Stopwatch, Trial, first_trial, sample
from tunebook.adapters._triton.candidate import Launch, LaunchConfig, SavedTensors
from tunebook.adapters._triton.device import event_timer, interface, use_device
from tunebook.adapters._triton.kernel import SCALARS, TritonKernel

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


_START_S: Final = 120.0  # importing a framework and waking a GPU takes seconds, and more on a busy machine
_TAIL: Final = 2048  # bytes of output that are kept: a device-side assert prints there which check failed
# -P: the child must not find modules beside this file, where one is called torch.
_START: Final = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from tunebook.adapters._triton.remote_runs import serve
serve(int(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4]))
"""


class FinalAnswer(NamedTuple):
    """An answer after which the process is of no more use."""

    answer: Any


@final
class SpawnedWorker:
    """Calls `handler(*given)`, named as "module:function", in a worker process, and sends requests to its result.

    The result returns the answer; a `FinalAnswer` also ends the process. A context manager.
    """

    def __init__(self, handler: str, given: tuple[Any, ...], timeout_s: float) -> None:
        self._handler, self._given, self._timeout_s = handler, given, timeout_s
        self._process: Any = None
        self._connection: Any = None
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
        if process is not None:
            self._connection.close()
            process.kill()
            process.wait()


class CompiledCandidate(NamedTuple):
    """A compiled candidate: its files in Triton's cache, and how it is launched. `rest` has no constants in it."""

    files: dict[str, str]
    digest: str
    signature: dict[str, Any]
    names: tuple[str, ...]
    grid: tuple[int, ...]
    rest: dict[str, Any]


class RunRequest(NamedTuple):
    """A run of a candidate: its first one if `runs` is 0. The worker keeps the last two: None in later requests.

    `arguments` has the file with the arguments by name, the names that are set to zero or put back, and the device.
    """

    candidate: int
    runs: int
    arguments: tuple[str, tuple[str, ...], tuple[str, ...], int] | None
    program: CompiledCandidate | None


@final
class Remote:
    """A runner whose candidates run in a worker process. `setup` is a "module:function" called there first."""

    def __init__(
        self,
        kernel: TritonKernel,
        launch: Launch,
        candidates: Sequence[LaunchConfig],
        *,
        device: int,
        timeout_s: float,
        setup: str = "",
    ) -> None:
        self._kernel, self._launch, self._candidates = kernel, launch, candidates
        self._values = kernel.variables(launch)
        self._device = device
        memory = Path("/dev/shm")  # noqa: S108 - files there are memory; the folder in it gets a name of its own
        self._folder = tempfile.TemporaryDirectory(prefix="tunebook-", dir=memory if memory.is_dir() else None)
        self._worker = SpawnedWorker("tunebook.adapters._triton.remote_runs:RemoteSide", (setup,), timeout_s)
        self._sent: set[int] = set()
        self._starts = 0

    def __enter__(self) -> Self:
        self._worker.__enter__()
        file = f"{self._folder.name}/arguments"
        # torch saves a storage once, so tensors that share memory share it in the worker too.
        torch.save({n: x if isinstance(x, SCALARS) else x.detach() for n, x in self._values.items()}, file)
        self._arguments = file, self._kernel.reset_to_zero, self._kernel.restore_value, self._device
        return self

    def __exit__(self, *error: object) -> None:
        self._worker.__exit__(*error)
        self._folder.cleanup()

    def first(self, index: int) -> Trial:
        """Run a candidate for the first time, and warm it up."""
        return self.sample(index, 0)

    def sample(self, index: int, runs: int) -> Trial:
        """Take one sample of a candidate that has run."""
        self._worker.start()
        arguments = None if self._worker.starts == self._starts else self._arguments
        if arguments is not None:  # the process is new
            self._starts, self._sent = self._worker.starts, set()
        program = None if index in self._sent else self._compile(self._candidates[index])
        answer: Trial | Reply = self._worker.ask(RunRequest(index, runs, arguments, program))
        self._sent.add(index)
        if isinstance(answer, Trial):
            return answer
        error = RuntimeError(answer.failure and answer.failure.message)
        error.add_note(answer.remote)
        return Trial(failure=answer.failure, error=error)

    def _compile(self, candidate: LaunchConfig) -> CompiledCandidate:
        kernel, (grid, args, kwargs) = self._kernel, self._launch
        compiled = kernel.fn.warmup(*args, grid=grid, **kwargs, **candidate.meta)
        values = kernel.variables(self._launch, candidate)
        return CompiledCandidate(
            files={name: str(path) for name, path in compiled.metadata_group.items()},
            digest=compiled.hash,
            signature=dict(compiled.src.signature),
            names=kernel.names,
            grid=kernel.grid_of(self._launch, candidate),
            rest={name: value for name, value in values.items() if name not in self._values},
        )


# ---- The rest of this file runs in the worker process.


@final
class RemoteSide:
    """Answers requests: runs candidates on copies of the arguments. `setup` is a "module:function" called first."""

    def __init__(self, setup: str) -> None:
        if setup:
            module, _, name = setup.partition(":")
            getattr(import_module(module), name)()
        self._runs: dict[int, Callable[[], None]] = {}

    def __call__(self, request: RunRequest) -> Trial | FinalAnswer:
        if request.arguments is not None:
            file, zeroed, restored, device = request.arguments
            use_device(device)
            self._values = torch.load(file, map_location=driver.active.get_active_torch_device())
            self._timer = event_timer()
            self._stopwatch = Stopwatch().by(self._timer)
            self._saved = SavedTensors(self._values, zeroed, restored, interface().mem_get_info()[0])
        if request.program is not None:
            self._runs[request.candidate] = self._make_run(request.program)
        run = self._runs[request.candidate]
        trial = Trial()
        if request.program is not None or not request.runs:
            trial = first_trial(run, self._stopwatch)
        if request.runs and trial.failure is None:
            trial = sample(run, self._stopwatch, request.runs)
        if trial.failure is None:
            return trial
        # An exception may hold anything, also objects that cannot be sent; its text is in the failure.
        answer = trial._replace(error=RuntimeError(trial.failure.message))
        try:
            interface().synchronize()
        except RuntimeError:  # the device takes no more work from this process: after an illegal access, say
            return FinalAnswer(answer._replace(failure=trial.failure._replace(kind="crash")))
        return answer

    def _make_run(self, program: CompiledCandidate) -> Callable[[], None]:
        # A launcher reads nothing of the source but how its arguments are passed.
        source = SimpleNamespace(
            constants={}, signature=program.signature, fn=SimpleNamespace(arg_names=list(program.names))
        )
        compiled = CompiledKernel(source, program.files, program.digest)
        values = {**self._values, **program.rest}
        args = [values.get(name) for name in program.names]
        grid = (*program.grid, 1, 1)[:3]

        def run() -> None:
            self._saved.restore()
            launch = compiled[grid]
            self._timer.begin()
            launch(*args)
            self._timer.end()
            self._saved.notice()

        return run


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
