"""Candidates that are not worth their compilation, by the resources that their programs need.

The first stages of a compilation take a tenth to a quarter of its time, and end with the program in Triton's dialect
for GPUs. It says which buffers in shared memory exist at the same time, and which values a loop carries from step to
step. Where the buffers are larger than the device's shared memory, the program cannot be loaded. Where the values of a
thread are more than its registers hold, the program moves some of them to memory and back in every step. Both numbers
are the least that the program needs, so no candidate is refused that would have fitted.

Which other candidates spill many registers is learnt from programs that ran. A block has a fixed amount of values,
which its threads share. If a program used all registers that a thread can have, and kept further values in memory, then
the same blocks with half the threads need twice the registers per thread. Such programs keep kilobytes per thread in
memory and are slow to run. They are also the slowest to compile, because their code is unrolled further: of the 36
candidates of two kernels of gated linear attention, nine took half of the time of the compilers, and kept 1.5 to 10 kB
per thread in memory, where others kept nothing.
"""

from __future__ import annotations

import math
import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from triton.compiler.compiler import make_backend
from triton.runtime import driver

from tunebook._base.errors import CompileError, LeftOut

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tunebook._base.vocabulary import Failure
    from tunebook.adapters._triton.candidate import LaunchConfig

# A thread of an NVIDIA GPU has at most 255. With more than 8 warps it has fewer, and with half the warps more again.
ALL_REGISTERS: Final = 255
_REGISTER_BYTES: Final = 4
_NUMBERS: Final = re.compile(r'"ttg\.(num-warps|threads-per-warp|num-ctas)" = (\d+)')
_ALLOCATED: Final = re.compile(r"(%\S+) = ttg\.local_alloc\b.*-> !ttg\.memdesc<((?:\d+x)+)[a-z]+(\d+)")
_FREED: Final = re.compile(r"ttg\.local_dealloc (%\S+) ")
_LOOP: Final = re.compile(r"scf\.for\b.*\biter_args\(.*\) -> \(([^)]*)\)")
# Pointers and integers of a loop may be worked out anew in each step; sums of products cannot.
_FLOATS: Final = re.compile(r"tensor<((?:\d+x)+)b?f(\d+)\b")


class TooLarge(CompileError):  # noqa: N818 - it says what is wrong, like the others
    """A program needs more shared memory than the device has."""


class Resources(NamedTuple):
    """The bytes that a program needs at least: of a block's shared memory, and of a thread's registers."""

    shared_bytes: int
    carried_bytes: int

    def check(self, max_shared_bytes: int) -> None:
        """Raise `TooLarge` or `LeftOut` if the program is not worth compiling."""
        if self.shared_bytes > max_shared_bytes:
            raise TooLarge(
                f"not compiled: it needs {self.shared_bytes} bytes of shared memory, the device has {max_shared_bytes}"
            )
        most = ALL_REGISTERS * _REGISTER_BYTES
        if self.carried_bytes > most:
            raise LeftOut(
                f"not compiled: a loop carries {self.carried_bytes} bytes per thread, registers hold {most}: "
                "it would spill in every step"
            )


def resources_of(program: str) -> Resources:
    """Return the resources of a program in the text of Triton's dialect for GPUs."""
    numbers = {name: int(value) for name, value in _NUMBERS.findall(program)}
    freed = set(_FREED.findall(program))
    live: dict[str, int] = {}
    shared = carried = 0
    for line in program.splitlines():
        if allocated := _ALLOCATED.search(line):
            name, shape, bits = allocated.groups()
            if name in freed:  # others exist until their last use, which the text does not say
                live[name] = _size_of(shape, bits)
                shared = max(shared, sum(live.values()))
        elif ended := _FREED.search(line):
            live.pop(ended[1], None)
        elif loop := _LOOP.search(line):
            carried = max(carried, sum(_size_of(shape, bits) for shape, bits in _FLOATS.findall(loop[1])))
    threads = math.prod(numbers.get(name, 1) for name in ("num-warps", "threads-per-warp", "num-ctas"))
    # The parts of a specialised program have other numbers of warps than the whole.
    return Resources(shared, 0 if "warp_specialize" in program else carried // threads)


def _size_of(shape: str, bits: str) -> int:
    return math.prod(map(int, shape.split("x")[:-1])) * int(bits) // 8


class _Enough(Exception):  # noqa: N818 - it is not an error: the first stages are done
    """Ends a compilation after its first stages."""


@contextmanager
def checked_compilation(max_shared_bytes: int, *, whole: bool) -> Iterator[None]:
    """End a compilation inside the block after its first stages if the program is not worth more, or if not `whole`.

    It replaces a method of Triton's compiler, so it is for processes in which nothing else is compiled.
    """
    backend: Any = type(make_backend(driver.active.get_current_target()))
    original = backend.add_stages

    def add_stages(compiler: Any, stages: dict[str, Any], *more: Any) -> None:
        original(compiler, stages, *more)
        make = stages["ttgir"]

        def made(source: Any, metadata: Any) -> Any:
            module = make(source, metadata)
            resources_of(str(module)).check(max_shared_bytes)
            if not whole:
                raise _Enough
            return module

        stages["ttgir"] = made

    backend.add_stages = add_stages
    try:
        yield
    except _Enough:
        pass
    finally:
        backend.add_stages = original


def refusal_in(failure: Failure | None) -> CompileError | None:
    """Return the error that a checked compilation in another process ended with; None if it was none of these."""
    name, _, text = ("" if failure is None else failure.message).partition(": ")
    error = {each.__name__: each for each in (TooLarge, LeftOut)}.get(name)
    return None if error is None else error(text)


class Spills:
    """Remembers which blocks made programs spill registers, and with how many warps."""

    def __init__(self) -> None:
        self._warps: dict[str, int] = {}

    def note(self, candidate: LaunchConfig, program: Any) -> None:
        """Note the registers of a program that has been loaded onto the GPU."""
        if getattr(program, "n_spills", 0) and program.n_regs >= ALL_REGISTERS:
            blocks, warps = _blocks(candidate), candidate.config.num_warps or 0  # None: given by the call
            self._warps[blocks] = max(self._warps.get(blocks, 0), warps)

    def reason_against(self, candidate: LaunchConfig) -> str | None:
        """Return why a candidate is not worth its compilation, or None."""
        warps = self._warps.get(_blocks(candidate), 0)
        if not candidate.config.num_warps or 2 * candidate.config.num_warps > warps:
            return None
        return f"the same blocks with {warps} warps spill registers already, so {candidate!r} would spill many more"


def _blocks(candidate: LaunchConfig) -> str:
    """Return everything in a configuration but the warps and the stages."""
    rest = {name: value for name, value in candidate.meta.items() if name not in ("num_warps", "num_stages")}
    return repr(sorted(rest.items(), key=str))
