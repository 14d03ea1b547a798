"""The switch that keeps a running program's calls free of candidates."""

from __future__ import annotations

from typing import Final, Self, final

_pauses: Final[set[object]] = set()  # adding and discarding are atomic


@final
class pause_tuning:  # noqa: N801 - it is used like a function
    """Try no candidate in the calls of this process until `resume`, or inside a with-block; for all threads.

    Calls run with the best configuration so far, and nothing is timed or loaded. Tuning goes on afterwards where it
    stopped. Pauses may overlap: the last one that ends counts.

    >>> with pause_tuning():
    ...     is_paused()
    True
    >>> is_paused()
    False
    """

    __slots__ = ("_mark",)

    def __init__(self) -> None:
        self._mark = object()
        _pauses.add(self._mark)

    def resume(self) -> None:
        """End this pause; safe to call again."""
        _pauses.discard(self._mark)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.resume()


def is_paused() -> bool:
    """Return whether a pause is on."""
    return bool(_pauses)
