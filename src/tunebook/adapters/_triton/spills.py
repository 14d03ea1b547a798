"""Finds candidates that are not worth their compilation, from the registers of programs that ran.

A block has a fixed amount of values, which its threads share. If a program used all registers that a thread can have,
and kept further values in memory, then the same blocks with half the threads need twice the registers per thread. Such
programs keep kilobytes per thread in memory and are slow to run. They are also the slowest to compile, because their
code is unrolled further: of the 36 candidates of two kernels of gated linear attention, nine took half of the time of
the compilers, and kept 1.5 to 10 kB per thread in memory, where others kept nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from tunebook.adapters._triton.candidate import LaunchConfig

# A thread of an NVIDIA GPU has at most 255. With more than 8 warps it has fewer, and with half the warps more again.
ALL_REGISTERS: Final = 255


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
