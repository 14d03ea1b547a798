"""Arguments that a kernel writes to: noticed, and put back between its runs.

Candidates run on the arguments of the user's own call. A kernel that scales its input in place would otherwise scale it
once per sample, be timed on infinities, and leave the user with them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

# Comparing is as fast as reading memory. Above this, arguments are compared after the first candidate only, and not
# after each: 66 candidates on a gigabyte would take longer to compare than to run.
_COMPARED_BYTES: Final = 256 << 20


class Restorer:
    """Holds copies of the numpy arrays among some arguments that can be written to."""

    def __init__(self, arguments: object) -> None:
        self._arrays = list(_writable_arrays(arguments, 0))
        self._copies = [array.copy() for array in self._arrays]
        self._bytes = sum(copy.nbytes for copy in self._copies)
        self._changed: set[int] = set()
        self._compared = False

    @property
    def has_changes(self) -> bool:
        """Whether a run was seen to write to an argument."""
        return bool(self._changed)

    def notice(self) -> None:
        """Find out which arguments were written to, and put them back."""
        if self._compared and self._bytes > _COMPARED_BYTES:
            self.restore()
            return
        self._compared = True
        for index, (array, copy) in enumerate(zip(self._arrays, self._copies, strict=True)):
            if index not in self._changed and array.tobytes() != copy.tobytes():
                self._changed.add(index)
        self.restore()

    def restore(self) -> None:
        """Put back what is known to be written to."""
        for index in self._changed:
            self._arrays[index][...] = self._copies[index]


def _writable_arrays(value: object, depth: int) -> Iterator[Any]:
    kind = type(value)
    if kind.__module__ == "numpy" and kind.__name__ == "ndarray":
        array: Any = value
        if array.flags.writeable and array.size and not array.dtype.hasobject:
            yield array
    elif isinstance(value, (tuple, list)) and depth < 8:
        for item in value:
            yield from _writable_arrays(item, depth + 1)
    elif isinstance(value, dict) and depth < 8:
        for item in value.values():
            yield from _writable_arrays(item, depth + 1)
