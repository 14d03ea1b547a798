"""Tensors that runs write to: put back between runs, so that every candidate meets what the user's call brought."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final, final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

# Copies of everything are kept until it is known what is written to; they may take this part of the free memory.
_PART_OF_FREE: Final = 0.25


@final
class SavedTensors:
    """Holds copies of a launch's tensors.

    Those named `zeroed` are set to zero before every run, and those named `restored` put back. Which of the others are
    written to is found out in the first run, if there is memory for their copies; these are put back too.
    """

    def __init__(
        self,
        arguments: Mapping[str, Any],
        zeroed: Iterable[str],
        restored: Iterable[str],
        free_bytes: Callable[[], float],
    ) -> None:
        # Not the tensors themselves: writing to them would count as a change that a backward pass must not survive.
        tensors = {name: value.data for name, value in arguments.items() if _is_writable(value)}
        self._zeroed = [tensors[name] for name in zeroed if name in tensors]
        self._copies = {name: (tensors[name], tensors[name].clone()) for name in restored if name in tensors}
        others = {name: x for name, x in tensors.items() if name not in {*zeroed, *restored}}
        affordable = sum(x.numel() * x.element_size() for x in others.values()) <= _PART_OF_FREE * free_bytes()
        self._unsure = {name: (x, x.clone()) for name, x in others.items()} if affordable else {}

    def restore(self) -> None:
        """Put back what is known to be written to."""
        for tensor in self._zeroed:
            tensor.zero_()
        for tensor, copy in self._copies.values():
            tensor.copy_(copy)

    def notice(self) -> None:
        """Find out which tensors the run before has written to, and put them back; later calls do nothing."""
        if not self._unsure:
            return
        equal = sys.modules["torch"].equal
        self._copies |= {name: pair for name, pair in self._unsure.items() if not equal(*pair)}
        self._unsure = {}
        self.restore()


def _is_writable(value: object) -> bool:
    """Whether this is a tensor of torch's whose elements have a place of their own each."""
    kind = type(value)
    if kind.__module__.partition(".")[0] != "torch" or getattr(value, "data_ptr", None) is None:
        return False
    tensor: Any = value
    return all(stride or size <= 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
