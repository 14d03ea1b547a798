"""A problem's log on the board: places that can each be written once, read by all ranks in the same order.

Whoever writes a place has read all before it, so all ranks see the same entries, and the first that is an end is the
end for all: a leader that comes late, or a rank whose patience ran out, writes behind it or not at all.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Self

from tunebook._base.errors import StoreError
from tunebook.fleet._agreement.ballot import LogEntry, Vote, entry_from, vote_from
from tunebook.fleet._agreement.wire import part_from, part_text, record_from, record_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from tunebook._base.record_format import Record
    from tunebook._base.vocabulary import Measurement, Problem
    from tunebook.fleet._agreement.board import Board

_BEATS: Final = 4  # per lease: three may be late or lost before anyone takes over
# In characters. A thousand ranks read it, and what was measured of a few hundred candidates takes a tenth of it.
_HANDED_OUT: Final = 1 << 20


class Log:
    """One problem's log, its votes, and the measurements that ranks share about it."""

    def __init__(self, board: Board, problem: str) -> None:
        self._board, self._name = board, f"agree/{problem}"

    def write(self, turn: int, entry: LogEntry) -> LogEntry:
        """Write an entry at a place unless there is one, and return the one that stands."""
        return entry_from(self._board.first(f"{self._name}/{turn}", entry.text()))

    def read(self, turn: int, timeout_s: float) -> LogEntry | None:
        """Return the entry at a place as soon as there is one; None if there is none in time."""
        text = self._board.wait(f"{self._name}/{turn}", timeout_s)
        return None if text is None else entry_from(text)

    def vote(self, vote: Vote) -> None:
        self._board.post(f"{self._name}/votes", vote.text())

    def votes(self) -> dict[int, Vote]:
        """Return the votes so far by rank."""
        return {vote.rank: vote for vote in map(vote_from, self._board.posted(f"{self._name}/votes"))}

    def share(self, problem: Problem, measurements: tuple[Measurement, ...]) -> None:
        """Let the one who leads have what this rank measured."""
        self._board.post(f"{self._name}/parts", part_text(self._board.rank, problem, measurements))

    def shared(self) -> dict[int, tuple[Measurement, ...]]:
        """Return what was measured so far by rank."""
        return dict(map(part_from, self._board.posted(f"{self._name}/parts")))

    def hand_out(self, record: Record) -> None:
        """Let the other ranks write down what this one found."""
        text = record_text(record)
        if len(text) <= _HANDED_OUT:
            self._board.first(f"{self._name}/record", text)

    def handed_out(self) -> Record | None:
        text = self._board.wait(f"{self._name}/record", 0.0)
        return None if text is None else record_from(text)

    def pulse(self, turn: int, lease_s: float) -> Pulse:
        """Return what shows that the rank of an entry is alive, while it is entered."""
        return Pulse(self._board, f"{self._name}/{turn}/beats", lease_s / _BEATS)

    def watch(self, turn: int, clock_s: Callable[[], float]) -> PulseWatch:
        """Return what tells for how long the rank of an entry has shown nothing."""
        return PulseWatch(self._board, f"{self._name}/{turn}/beats", clock_s)


class Pulse:
    """Counts up in a thread of its own, so that the others see that this process is at work."""

    def __init__(self, board: Board, key: str, every_s: float) -> None:
        self._board, self._key, self._every_s = board, key, every_s
        self._over = threading.Event()

    def __enter__(self) -> Self:
        # At interpreter exit no thread can be started. Another may then tune too, which does no harm.
        with suppress(RuntimeError):
            threading.Thread(target=self._beat, name=f"tunebook {self._key}", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def _beat(self) -> None:
        while not self._over.wait(self._every_s):
            # A beat that fails is not worth a warning: the next may succeed, and who takes over does no harm.
            with suppress(StoreError):
                self._board.add(self._key, 1)


class PulseWatch:
    """Another rank's pulse, by this process's own clock."""

    def __init__(self, board: Board, key: str, clock_s: Callable[[], float]) -> None:
        self._board, self._key, self._clock_s = board, key, clock_s
        self._beats = -1
        self._seen_s = clock_s()

    def silent_s(self) -> float:
        """Return for how long its count has not changed."""
        beats = self._board.add(self._key, 0)
        if beats != self._beats:
            # The first look finds some count, and is no sign of life: the wait before it counts.
            self._seen_s = self._clock_s() if self._beats >= 0 else self._seen_s
            self._beats = beats
        return self._clock_s() - self._seen_s
