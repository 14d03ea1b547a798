"""Arguments that a kernel writes to: noticed, and put back between its runs.

Candidates run on the arguments of the user's own call. A kernel that scales its input in place would otherwise scale it
once per sample, be timed on infinities, and leave the user with them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from tunebook._arrays.describe import arrays_in
from tunebook._arrays.library import library_of

if TYPE_CHECKING:
    from collections.abc import Sequence

# Comparing is as fast as reading memory. Above this, arguments are compared after the first candidate only, and not
# after each: 66 candidates on a gigabyte would take longer to compare than to run.
_COMPARED_BYTES: Final = 256 << 20


class Restorer:
    """Holds copies of the arrays among some arguments that can be written to.

    `declared` are the arguments that runs write to: only these are copied, and they are not compared.
    """

    def __init__(self, arguments: object, declared: Sequence[object] | None = None) -> None:
        # By id: an array that is passed twice is copied once.
        found = {id(x): x for x in arrays_in(arguments if declared is None else tuple(declared))}
        self._arrays = [(x, library_of(x)) for x in found.values() if library_of(x).is_writable(x)]
        self._copies = [library.copy(x) for x, library in self._arrays]
        self._bytes = sum(getattr(copy, "nbytes", 0) for copy in self._copies)
        self._declared, self._compared = declared is not None, False
        self._changed: set[int] = set(range(len(self._arrays))) if self._declared else set()

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
        return [library.copy(array) for array, library in (self._arrays[index] for index in sorted(self._changed))]

    def _look(self) -> None:
        if self._declared or (self._compared and self._bytes > _COMPARED_BYTES):
            return
        self._compared = True
        for index, ((array, library), copy) in enumerate(zip(self._arrays, self._copies, strict=True)):
            if index not in self._changed and not library.is_same(array, copy):
                self._changed.add(index)

    def restore(self) -> None:
        """Put back the arrays that runs write to."""
        for index in self._changed:
            array, library = self._arrays[index]
            library.put_back(array, self._copies[index])
