"""Puts a launch's tensors back between runs, so that every candidate meets the arguments of the user's call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, final

from tunebook._arrays.describe import framework_of
from tunebook._measure.argument_restore import Restorer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

# All tensors are copied until it is known which of them are written to. The copies may take this part of free memory.
_PART_OF_FREE: Final = 0.25


@final
class SavedTensors:
    """Holds copies of a launch's tensors.

    Tensors named in `zeroed` are set to zero before every run, and tensors named in `restored` are put back. The first
    run shows which of the others are written to, if there is memory for their copies; these are put back too.
    """

    def __init__(
        self,
        arguments: Mapping[str, Any],
        zeroed: Sequence[str],
        restored: Sequence[str],
        free_bytes: Callable[[], float],
    ) -> None:
        # `data`, because a write to the tensor itself would count as a change that forbids a backward pass.
        tensors = {name: value.data for name, value in arguments.items() if _is_writable(value)}
        framework_of((*tensors.values(),))  # loads the adapter, which knows how to copy tensors
        self._zeroed = [tensors[name] for name in zeroed if name in tensors]
        self._declared = Restorer((), declared=[tensors[name] for name in restored if name in tensors])
        others = [x for name, x in tensors.items() if name not in {*zeroed, *restored}]
        affordable = sum(x.numel() * x.element_size() for x in others) <= _PART_OF_FREE * free_bytes()
        self._others = Restorer(others if affordable else ())
        self._compared = False

    def restore(self) -> None:
        """Put back the tensors that are known to be written to."""
        for tensor in self._zeroed:
            tensor.zero_()
        self._declared.restore()
        self._others.restore()

    def notice(self) -> None:
        """Find out which tensors the first run has written to, and put them back; later calls do nothing."""
        if not self._compared:
            self._compared = True
            self._others.notice()
            self.restore()


def _is_writable(value: Any) -> bool:
    """Return whether the value is a torch tensor in which no two elements share a place in memory."""
    if type(value).__module__.partition(".")[0] != "torch" or getattr(value, "data_ptr", None) is None:
        return False
    return all(stride or size <= 1 for size, stride in zip(value.shape, value.stride(), strict=True))
