"""Candidates of one launch in a process of their own: what is sent there, and what is done there with it.

The programs are compiled here and launched there by Triton's own launcher; nothing of the user's is imported there.
"""

from __future__ import annotations

import shutil
import tempfile
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, Self, final

import torch
from triton.compiler import CompiledKernel

from tunebook._measure.stopwatch import Stopwatch, Trial, first_trial, sample
from tunebook.adapters._cuda.spawned_worker import FinalAnswer, SpawnedWorker, WorkerLost
from tunebook.adapters._cuda.timer import EventTimer
from tunebook.adapters._triton.device import cold_cache, free_bytes, interface, tensor_device, use_device
from tunebook.adapters._triton.kernel import SCALARS
from tunebook.adapters._triton.saved_tensors import SavedTensors

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import TracebackType

    from tunebook.adapters._triton.candidate import Launch, LaunchConfig
    from tunebook.adapters._triton.kernel import TritonKernel


class Tensor(NamedTuple):
    """A tensor as a part of a file, which holds a whole storage: views of one another stay views of one another."""

    file: str
    nbytes: int
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class Arguments(NamedTuple):
    """The arguments of a launch by name, which of them are put back how, and the device."""

    values: dict[str, Any]
    zeroed: tuple[str, ...]
    restored: tuple[str, ...]
    device: int


class CompiledCandidate(NamedTuple):
    """A compiled candidate: its files in Triton's cache, and how it is launched. Constants are left out of `rest`."""

    files: dict[str, str]
    digest: str
    signature: dict[str, Any]
    names: tuple[str, ...]
    grid: tuple[int, ...]
    rest: dict[str, Any]


class RunRequest(NamedTuple):
    """A run of a candidate: its first one if `runs` is 0. The two others are None where they are known there."""

    candidate: int
    runs: int
    arguments: Arguments | None
    program: CompiledCandidate | None


# ------------------------------------------------------------------------------------------------------ on this side


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
        self._folder = Path(tempfile.mkdtemp(prefix="tunebook-", dir=_memory_folder()))
        self._worker = SpawnedWorker("tunebook.adapters._triton.remote_runs:handler", (setup,), timeout_s)
        self._sent: set[int] = set()
        self._starts = 0

    def __enter__(self) -> Self:
        self._worker.__enter__()
        self._arguments = self._written()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._worker.__exit__(kind, error, trace)
        shutil.rmtree(self._folder, ignore_errors=True)

    def first(self, index: int) -> Trial:
        """Run a candidate for the first time, and warm it up."""
        return self._asked(index, 0)

    def sample(self, index: int, runs: int) -> Trial:
        """Take one sample of a candidate that has run."""
        return self._asked(index, runs)

    def _asked(self, index: int, runs: int) -> Trial:
        self._worker.start()
        if self._worker.starts != self._starts:
            self._starts, self._sent = self._worker.starts, set()
            arguments: Arguments | None = self._arguments
        else:
            arguments = None
        program = None if index in self._sent else self._program(self._candidates[index])
        answer = self._worker.ask(RunRequest(index, runs, arguments, program))
        self._sent.add(index)
        if not isinstance(answer, WorkerLost):
            trial: Trial = answer
            return trial
        error = RuntimeError(answer.failure.message)
        error.add_note(answer.printed)
        return Trial(failure=answer.failure, error=error)

    def _program(self, candidate: LaunchConfig) -> CompiledCandidate:
        grid, args, kwargs = self._launch
        compiled = self._kernel.fn.warmup(*args, grid=grid, **kwargs, **candidate.meta)
        signature = dict(compiled.src.signature)
        values = self._kernel.variables(self._launch, candidate)
        rest = {name: value for name, value in values.items() if name not in self._values}
        files = {name: str(path) for name, path in compiled.metadata_group.items()}
        return CompiledCandidate(
            files, compiled.hash, signature, self._kernel.names, self._kernel.grid_of(self._launch, candidate), rest
        )

    def _written(self) -> Arguments:
        """Write the tensors to files, each storage once."""
        written: dict[int, str] = {}
        values: dict[str, Any] = {}
        for name, value in self._values.items():
            values[name] = value if isinstance(value, SCALARS) else self._file_of(value, written)
        hooked = self._kernel.reset_to_zero, self._kernel.restore_value
        return Arguments(values, *hooked, self._device)

    def _file_of(self, tensor: Any, written: dict[int, str]) -> Tensor:
        storage = tensor.untyped_storage()
        place = storage.data_ptr()
        if place not in written:
            written[place] = str(self._folder / str(len(written)))
            shared = torch.UntypedStorage.from_file(written[place], shared=True, nbytes=storage.nbytes())
            shared.copy_(storage)
        dtype = str(tensor.dtype).removeprefix("torch.")
        return Tensor(
            written[place], storage.nbytes(), dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
        )


def _memory_folder() -> str | None:
    """Return where files are memory, or None for the usual place."""
    shared = Path("/dev/shm")  # noqa: S108 - the folder in it gets a name of its own
    return str(shared) if shared.is_dir() else None


# ---- What follows runs in the process of its own.


def handler(setup: str) -> Callable[[RunRequest], Trial | FinalAnswer]:
    """Return what answers requests there."""
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
            self._runs[request.candidate] = self._run_of(request.program)
        run = self._runs[request.candidate]
        trial = Trial()
        if request.program is not None or not request.runs:
            trial = first_trial(run, self._stopwatch)
        if request.runs and trial.failure is None:
            trial = sample(run, self._stopwatch, request.runs)
        if trial.failure is None:
            return trial
        # Exceptions may hold anything; their words are in the failure.
        answer = trial._replace(error=RuntimeError(trial.failure.message))
        if not _is_poisoned(interface()):
            return answer
        return FinalAnswer(answer._replace(failure=trial.failure._replace(kind="crash")))

    def _begin(self, arguments: Arguments) -> None:
        use_device(arguments.device)
        self._tensors = _read(arguments.values)
        self._timer = EventTimer(interface, cold_cache, windows=True)
        self._stopwatch = Stopwatch().by(self._timer)
        self._kept = SavedTensors(self._tensors, arguments.zeroed, arguments.restored, free_bytes)

    def _run_of(self, program: CompiledCandidate) -> Callable[[], None]:
        # All that a launcher reads of the source is how its arguments are passed.
        source = SimpleNamespace(
            constants={}, signature=program.signature, fn=SimpleNamespace(arg_names=list(program.names))
        )
        compiled = CompiledKernel(source, program.files, program.digest)
        values = {**self._tensors, **program.rest}
        args = [values.get(name) for name in program.names]
        grid = (*program.grid, 1, 1)[:3]

        def run() -> None:
            self._kept.restore()
            launch = compiled[grid]
            self._timer.begin()
            launch(*args)
            self._timer.end()
            self._kept.notice()

        return run


def _read(values: Mapping[str, Any]) -> dict[str, Any]:
    where = tensor_device()
    storages: dict[str, Any] = {}
    found: dict[str, Any] = {}
    for name, value in values.items():
        if not isinstance(value, Tensor):
            found[name] = value
            continue
        if value.file not in storages:
            here = torch.UntypedStorage.from_file(value.file, shared=True, nbytes=value.nbytes)
            whole = torch.empty(0, dtype=torch.uint8).set_(here)
            storages[value.file] = whole.to(where, copy=True).untyped_storage()
        empty = torch.empty(0, dtype=getattr(torch, value.dtype), device=where)
        found[name] = empty.set_(storages[value.file], value.offset, value.shape, value.stride)
    return found


def _is_poisoned(interface: Any) -> bool:
    """Whether the device takes no more work from this process: after an illegal access, say."""
    try:
        interface.synchronize()
    except RuntimeError:
        return True
    return False
