"""The launches of a race in the calls of a running program: rounds that compare them, and looks at the winner."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

# Sizes whose latest times are kept: calls of ever new sizes must not grow this for ever.
MOST_SIZES: Final = 64


class Round:
    """Launches in neighbouring calls of equal sizes that are compared with each other."""

    __slots__ = ("expected", "is_duel", "late", "names", "seconds", "sizes", "strangers")

    def __init__(self, names: Sequence[str], sizes: Hashable, expected: Sequence[float], *, is_duel: bool) -> None:
        self.names, self.sizes, self.is_duel = list(names), sizes, is_duel
        self.expected = list(expected)  # the extra time that is reserved for each launch
        self.seconds: dict[int, float | None] = {}  # None: failed, or its time was lost
        self.late: set[bool] = set()
        self.strangers = 0  # calls of other sizes in a row

    @property
    def is_complete(self) -> bool:
        return len(self.seconds) == len(self.names)


class Turn:
    """The candidate that a call launches. `round` has the launches to compare it with; None: it is not compared."""

    __slots__ = ("is_timed", "name", "place", "round")

    def __init__(self, name: str, found_in: Round | None = None, place: int = 0) -> None:
        self.name, self.round, self.place = name, found_in, place
        self.is_timed = found_in is not None


class WinnerLook(Turn):
    """A call of the winner that is timed, and compared with its own earlier times."""

    __slots__ = ("sizes",)

    def __init__(self, name: str, sizes: Hashable) -> None:
        super().__init__(name)
        self.sizes, self.is_timed = sizes, True
