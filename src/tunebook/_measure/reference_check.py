"""Checks outputs against a reference, which runs once and leaves the caller's arguments as they were."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tunebook._kernel.output_check import Mismatch, with_own_arrays
from tunebook._measure.argument_restore import Restorer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tunebook._kernel.output_check import Compare

_NOTHING_RETURNED = Mismatch(
    "wrong-result",
    "the candidate returned nothing, and the reference returned its output; let the reference write to the same "
    "arguments, or the kernel return its output",
)


class ReferenceCheck:
    """Compares a candidate's output with the reference's, or the arguments that a reference without an output changed.

    A reference that returns and changes nothing had nothing to do: candidates may then change no argument either.
    """

    def __init__(
        self, run: Callable[[], object], arguments: object, declared: Sequence[object] | None, compare: Compare
    ) -> None:
        self._compare = compare
        saved = Restorer(arguments, declared)
        try:
            self._output = with_own_arrays(run())
            # The arguments as candidates leave them, and as the reference has left them.
            self._live, self._written = saved.outcome(everything=self._output is None)
        finally:
            saved.put_back_all()

    def __call__(self, output: Any) -> Any:
        """Return how the output of a candidate that has just run differs from the reference's."""
        if self._live and (output is None or self._output is None):
            return self._compare(self._live, self._written)
        if output is None and self._output is not None:
            return _NOTHING_RETURNED
        return self._compare(output, self._output)

    def difference(self, other: ReferenceCheck) -> Any:
        """Return how another run of the reference differs from this one."""
        if self._output is None and self._live:
            return self._compare(other._written, self._written)
        return self._compare(other._output, self._output)
