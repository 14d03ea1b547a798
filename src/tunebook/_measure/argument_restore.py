"""Arguments that a kernel writes to: noticed, and put back between its runs.

Candidates run on the arguments of the user's own call. A kernel that scales its input in place would otherwise scale it
once per sample, be timed on infinities, and leave the user with them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from tunebook._arrays.operations import ArrayOps, ops_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# Comparing is as fast as reading memory. Above this, arguments are compared after the first candidate only, and not
# after each: 66 candidates on a gigabyte would take longer to compare than to run.
_COMPARED_BYTES: Final = 256 << 20


class Restorer:
    """Holds copies of the arrays among some arguments that can be written to.

    `declared` are the arguments that runs write to: then there is nothing to find out, and only those are copied.
    """

    def __init__(self, arguments: object, declared: Sequence[object] | None = None) -> None:
        self._arrays = list(_writable_arrays(arguments if declared is None else tuple(declared), 0))
        self._copies = [access.copy(array) for array, access in self._arrays]
        self._bytes = sum(copy.nbytes for copy in self._copies)
        self._declared = declared is not None
        self._changed: set[int] = set(range(len(self._arrays))) if self._declared else set()
        self._compared = False

    @property
    def has_changes(self) -> bool:
        """Whether a run was seen to write to an argument."""
        return bool(self._changed)

    def notice(self) -> None:
        """Find out which arguments were written to, and put them back."""
        self._look()
        self.restore()

    def written(self) -> list[Any]:
        """Return copies of the arguments that were written to, as the last run left them."""
        self._look()
        written = [self._arrays[index] for index in sorted(self._changed)]
        return [access.copy(array) for array, access in written]

    def _look(self) -> None:
        if self._declared or (self._compared and self._bytes > _COMPARED_BYTES):
            return
        self._compared = True
        for index, ((array, access), copy) in enumerate(zip(self._arrays, self._copies, strict=True)):
            if index not in self._changed and not access.is_same(array, copy):
                self._changed.add(index)

    def restore(self) -> None:
        """Put back what is known to be written to."""
        for index in self._changed:
            array, access = self._arrays[index]
            access.put_back(array, self._copies[index])


def _writable_arrays(value: object, depth: int) -> Iterator[tuple[Any, ArrayOps]]:
    access = ops_of(value)
    if access is not None:
        if access.is_writable(value):
            yield value, access
    elif isinstance(value, (tuple, list)) and depth < 8:
        for item in value:
            yield from _writable_arrays(item, depth + 1)
    elif isinstance(value, dict) and depth < 8:
        for item in value.values():
            yield from _writable_arrays(item, depth + 1)
