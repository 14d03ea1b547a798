"""Runs a launch's candidates in a worker process: the requests sent there, and the code that answers them.

This process compiles the programs. The worker launches them by Triton's own launcher, and imports none of the user's
modules.
"""

from __future__ import annotations

import tempfile
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, Self, final

import torch
from triton.compiler import CompiledKernel

from tunebook._measure.stopwatch import Stopwatch, Trial, first_trial, sample
from tunebook.adapters._cuda.spawned_worker import FinalAnswer, SpawnedWorker
from tunebook.adapters._cuda.timer import EventTimer
from tunebook.adapters._triton.device import cold_cache, free_bytes, interface, tensor_device, use_device
from tunebook.adapters._triton.kernel import SCALARS
from tunebook.adapters._triton.saved_tensors import SavedTensors

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tunebook._measure.forked_worker import Reply
    from tunebook.adapters._triton.candidate import Launch, LaunchConfig
    from tunebook.adapters._triton.kernel import TritonKernel


class Arguments(NamedTuple):
    """The file with the arguments of a launch by name, the names that are set to zero or put back, and the device."""

    file: str
    zeroed: tuple[str, ...]
    restored: tuple[str, ...]
    device: int


class CompiledCandidate(NamedTuple):
    """A compiled candidate: its files in Triton's cache, and how it is launched. `rest` has no constants in it."""

    files: dict[str, str]
    digest: str
    signature: dict[str, Any]
    names: tuple[str, ...]
    grid: tuple[int, ...]
    rest: dict[str, Any]


class RunRequest(NamedTuple):
    """A run of a candidate: its first one if `runs` is 0. The worker keeps the last two: None in later requests."""

    candidate: int
    runs: int
    arguments: Arguments | None
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
        self._worker = SpawnedWorker("tunebook.adapters._triton.remote_runs:handler", (setup,), timeout_s)
        self._sent: set[int] = set()
        self._starts = 0

    def __enter__(self) -> Self:
        self._worker.__enter__()
        self._arguments = self._write_arguments()
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
        arguments: Arguments | None = None
        if self._worker.starts != self._starts:
            self._starts, self._sent, arguments = self._worker.starts, set(), self._arguments
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

    def _write_arguments(self) -> Arguments:
        """Save the arguments. torch saves a storage once, so tensors that share memory share it in the worker too."""
        file = f"{self._folder.name}/arguments"
        plain = {n: value if isinstance(value, SCALARS) else value.detach() for n, value in self._values.items()}
        torch.save(plain, file)
        return Arguments(file, self._kernel.reset_to_zero, self._kernel.restore_value, self._device)


# ---- The rest of this file runs in the worker process.


def handler(setup: str) -> Callable[[RunRequest], Trial | FinalAnswer]:
    """Return the function that answers requests."""
    if setup:
        module, _, name = setup.partition(":")
        getattr(import_module(module), name)()
    return _RemoteSide()


@final
class _RemoteSide:
    """Runs candidates on copies of the arguments."""

    def __init__(self) -> None:
        self._runs: dict[int, Callable[[], None]] = {}

    def __call__(self, request: RunRequest) -> Trial | FinalAnswer:
        if request.arguments is not None:
            self._begin(request.arguments)
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

    def _begin(self, arguments: Arguments) -> None:
        use_device(arguments.device)
        self._values = torch.load(arguments.file, map_location=tensor_device())
        self._timer = EventTimer(interface, cold_cache, windows=True)
        self._stopwatch = Stopwatch().by(self._timer)
        self._saved = SavedTensors(self._values, arguments.zeroed, arguments.restored, free_bytes)

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
