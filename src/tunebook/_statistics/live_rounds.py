"""The launches of a race in the calls of a running program: rounds that compare them, and looks at the winner."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

# The sizes of a call, and whether the device waited for the host.
Conditions: TypeAlias = "tuple[Hashable, bool]"
# The names of a round, its sizes, and whether the device waited.
_Key: TypeAlias = "tuple[tuple[str, ...], Hashable, bool]"
# Sizes whose latest times are kept: calls of ever new sizes must not grow this for ever.
MOST_SIZES: Final = 64
# Parts of rounds that are so many calls apart are not put together: the speed of the device may have changed.
_NEIGHBOURS: Final = 256
# After so many rounds that completed nothing, because one candidate alone always finds the device waiting, mixed rounds
# count as they are, so that the race ends.
_MOST_BARREN: Final = 24


class Round:
    """Launches in neighbouring calls of equal sizes that are compared with each other."""

    __slots__ = ("expected", "is_duel", "late", "names", "seconds", "sizes", "strangers")

    def __init__(self, names: Sequence[str], sizes: Hashable, expected: Sequence[float], *, is_duel: bool) -> None:
        self.names, self.sizes, self.is_duel = list(names), sizes, is_duel
        self.expected = list(expected)  # the extra time that is reserved for each launch
        self.seconds: dict[int, float | None] = {}  # None: failed, or its time was lost
        self.late: set[int] = set()  # the launches within which the device waited for the host
        self.strangers = 0  # calls of other sizes in a row

    @property
    def is_complete(self) -> bool:
        return len(self.seconds) == len(self.names)


class ComparableTimes:
    """Picks the times of rounds that compare: all of them with a busy device, or all with one that waited for the host.

    A window in which the device waited contains the wait. So of a round with both, each part is kept until launches of
    the next rounds complete it. Without it, a kernel that a program calls twice in a step, first on an idle device and
    then on a busy one, was not decided within 70,000 calls.
    """

    def __init__(self) -> None:
        # With the calls until the latest time.
        self._parts: dict[_Key, tuple[int, dict[str, float]]] = {}
        self._barren = 0  # rounds in a row that completed nothing

    def of(self, closed: Round, calls: int) -> list[tuple[Conditions, dict[str, float]]]:
        """Return the comparable times that a round completes, after so many calls."""
        times = {name: closed.seconds[place] for place, name in enumerate(closed.names)}
        known = {name: seconds for name, seconds in times.items() if seconds is not None}
        if closed.sizes is None or len(known) < len(times):
            return []
        late = {closed.names[place] for place in closed.late}
        is_whole = not late or len(late) == len(known)
        if is_whole or self._barren >= _MOST_BARREN:
            self._barren = 0 if is_whole else self._barren
            return [((closed.sizes, bool(late)), known)]
        found = []
        for waited in (False, True):
            part = {name: seconds for name, seconds in known.items() if (name in late) == waited}
            whole = self._with_earlier((tuple(sorted(known)), closed.sizes, waited), part, calls)
            if len(whole) == len(known):
                found.append(((closed.sizes, waited), whole))
        self._barren = 0 if found else self._barren + 1
        return found

    def _with_earlier(self, key: _Key, part: dict[str, float], calls: int) -> dict[str, float]:
        """Return a part of a round with times of earlier rounds beside it, and keep it if some are missing."""
        at, earlier = self._parts.pop(key, (calls, {}))
        joined = {**(earlier if calls - at <= _NEIGHBOURS else {}), **part}
        if len(joined) < len(key[0]):
            if len(self._parts) >= MOST_SIZES:
                self._parts.clear()
            self._parts[key] = calls, joined
        return joined


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
