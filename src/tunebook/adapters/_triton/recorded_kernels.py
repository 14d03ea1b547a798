"""Finds the kernels of recorded launches, and compiles the candidates of many launches at once, on all cores.

Compiling needs no GPU: tensors without memory say all that Triton's compiler asks. It fills Triton's cache on disk, in
which the process that measures finds the programs.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import sys
import threading
import time
import warnings
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, ProcessPoolExecutor, wait
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from triton.backends import backends
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import KernelInterface

from tunebook._base.errors import DefinitionError, TunebookError
from tunebook.adapters._triton.candidate import OF_AUTHORS
from tunebook.adapters._triton.engine import engine_of
from tunebook.fleet._farm.clusters import exit_with_parent

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tunebook._kernel.kernel import Invocation
    from tunebook._selection.recording import RecordedCall
    from tunebook.adapters._triton.candidate import LaunchConfig
    from tunebook.adapters._triton.kernel import TritonKernel

# A fork hangs if a library's thread held a lock when it was made. So long without a program, the forks are given up.
_PATIENCE_S: Final = 300.0


def find_kernel(op_id_v: str, _module: str = "") -> TritonKernel | None:
    """Return the kernel of a name, in a module that has been imported; None without one.

    The module need not know of tunebook: kernels that `triton.autotune` decorates are found too.
    """
    path = op_id_v.rpartition("@")[0].split(".")
    for at in range(len(path) - 1, 0, -1):
        module = sys.modules.get(".".join(path[:at]))
        for autotuner in () if module is None else _autotuners(module, path[at:]):
            kernel = engine_of(autotuner).kernel
            if kernel.op_id_v == op_id_v:
                return kernel
    return None


def _autotuners(module: Any, path: Sequence[str]) -> Iterator[Autotuner]:
    """Yield the autotuner at a place in a module, then all others there whose function has this name."""
    found = module
    for name in path:
        found = getattr(found, name, None)
    for value in [found, *list(vars(module).values())]:
        autotuner, function = None, value
        while isinstance(function, KernelInterface):
            autotuner = function if isinstance(function, Autotuner) else autotuner
            function = function.fn
        if autotuner is not None and getattr(function, "__qualname__", "") == ".".join(path):
            yield autotuner


class CompiledCall(NamedTuple):
    """How many candidates of a recorded launch were compiled, how many of them failed, and the first error."""

    compiled: int
    failed: int = 0
    error: str = ""


def parse_target(text: str) -> GPUTarget:
    """Return the target that a text names: "cuda:90" for an H100 or H200, "hip:gfx942" for an MI300."""
    backend, _, arch = text.partition(":")
    if backend not in ("cuda", "hip") or not arch or (backend == "cuda" and not arch.isdigit()):
        raise DefinitionError(f"target {text!r}: write the backend and the architecture, e.g. cuda:90 or hip:gfx942")
    target = GPUTarget("cuda", int(arch), 32) if backend == "cuda" else GPUTarget("hip", arch, _hip_warp(arch))
    if not any(each.compiler.supports_target(target) for each in backends.values()):
        raise DefinitionError(f"target {text!r}: this Triton compiles for {', '.join(sorted(backends))}")
    return target


def _hip_warp(arch: str) -> int:
    return 64 if arch.startswith("gfx9") else 32


class _Work(NamedTuple):
    """One program to compile: a candidate of the launch with this number."""

    number: int
    kernel: TritonKernel
    inv: Invocation[LaunchConfig, Any]
    candidate: LaunchConfig


_work: list[_Work] = []  # read by forks


def compile_calls(
    calls: Sequence[RecordedCall], target: str | None = None, *, limit_s: float | None = None
) -> list[CompiledCall]:
    """Compile the candidates of launches, in forks of this process, for a target, or for the GPU here.

    Call it in a process of its own: it replaces Triton's driver. After `limit_s` nothing more is started.
    """
    results = [CompiledCall(0)] * len(calls)
    try:
        wanted = driver.active.get_current_target() if target is None else parse_target(target)
    except RuntimeError as error:  # the interpreter needs no GPU; other launches say that they need one when measured
        return [CompiledCall(0, 0, str(error))] * len(calls)
    if target is not None:
        driver.set_active(_without_gpu(wanted))
    _work.clear()
    for number, call in enumerate(calls):
        try:
            _work.extend(_work_of(number, call))
        except TunebookError as error:
            results[number] = CompiledCall(0, 0, str(error))
    driver.set_active(_without_gpu(wanted))  # a GPU's context does not survive a fork
    for work, problem in zip(_work, _compile_all(limit_s), strict=True):
        compiled, failed, first = results[work.number]
        if problem is None:
            results[work.number] = CompiledCall(compiled, failed, first or "time was up, or a process was lost")
        else:
            results[work.number] = CompiledCall(compiled + (not problem), failed + bool(problem), first or problem)
    return results


def _work_of(number: int, call: RecordedCall) -> list[_Work]:
    kernel: Any = call.kernel
    if kernel.interpreted:
        return []
    inv = call.invocation(kernel)
    try:
        candidates = kernel.candidate_cfgs(inv)
    except OF_AUTHORS:  # a function that prunes may ask the GPU
        candidates = kernel.all_candidates()
    return [_Work(number, kernel, inv, candidate) for candidate in candidates]


def _compile_all(limit_s: float | None) -> list[str | None]:
    """Return the error of each program, "" where it was compiled, and None where time was up or a fork was lost."""
    if not _work:
        return []
    ends_s = math.inf if limit_s is None else time.monotonic() + limit_s
    # Processes, because the largest part of Triton's work is Python, which runs one thread at a time.
    count = min(os.cpu_count() or 1, len(_work))
    pool = ProcessPoolExecutor(count, multiprocessing.get_context("fork"), _start_fork)
    with warnings.catch_warnings():
        # Python 3.12 warns of other threads, and JAX of its own; forks that hang are given up.
        warnings.simplefilter("ignore")
        futures = [pool.submit(_compile, number) for number in range(len(_work))]
    pending = {*futures}
    while pending and (left_s := min(_PATIENCE_S, ends_s - time.monotonic())) > 0:
        done, pending = wait(pending, left_s, FIRST_COMPLETED)
        if not done:
            break
    forks = list((pool._processes or {}).values()) if pending else []  # noqa: SLF001 - public only since Python 3.14
    pool.shutdown(wait=not pending, cancel_futures=True)
    for fork in forks:
        fork.kill()
    return [future.result() if future.done() and not _was_lost(future) else None for future in futures]


def _was_lost(future: Future[str]) -> bool:
    return future.cancelled() or isinstance(future.exception(), BrokenExecutor)


def _start_fork() -> None:
    threading.Thread(target=exit_with_parent, name="tunebook-parent", daemon=True).start()


def _compile(number: int) -> str:
    """Compile a program in a fork; return the error, or an empty text."""
    _, kernel, inv, candidate = _work[number]
    try:
        kernel.compile_cfg(inv, candidate)
    except (TunebookError, *OF_AUTHORS) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _without_gpu(target: GPUTarget) -> Any:
    """Return a driver that knows the target to compile for, and cannot touch a GPU."""
    return SimpleNamespace(
        get_current_device=lambda: 0, get_current_stream=lambda _device: 0, get_current_target=lambda: target
    )
