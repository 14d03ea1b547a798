"""A problem's log on the board: numbered places that can each be written once, in the same order for all ranks.

A rank writes a place only after it has read all places before it. So all ranks see the same entries, and the first
entry that ends the log ends it for all: a late leader, or a rank whose deadline has passed, finds the end and uses it.
The rank that an entry puts to work counts up a heartbeat; when that stops, another rank writes the next place.
"""

from __future__ import annotations

import json
import threading
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

from tunebook._base.errors import StoreError
from tunebook._base.record_format import Body, Head, Record, canonical_json
from tunebook.fleet._agreement.ballot import LogEntry, Vote, entry_from, vote_from

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tunebook._base.vocabulary import Measurement, Problem
    from tunebook.fleet._agreement.board import Board

_BEATS: Final = 4  # per lease: three may be late or lost before another rank takes over
# In characters. A thousand ranks read the record; the measurements of a few hundred candidates take a tenth of this.
_LONGEST_RECORD: Final = 1 << 20


class Log:
    """One problem's log and votes, and the measurements and the record that ranks share about it."""

    def __init__(self, board: Board, problem: str) -> None:
        self.board, self._name = board, f"agree/{problem}"

    def write(self, turn: int, entry: LogEntry) -> LogEntry:
        """Write an entry at a place unless it has one, and return the entry of the place."""
        return entry_from(self.board.first(f"{self._name}/{turn}", entry.text()))

    def read(self, turn: int, timeout_s: float) -> LogEntry | None:
        """Return the entry of a place as soon as it has one; None after the timeout."""
        text = self.board.wait(f"{self._name}/{turn}", timeout_s)
        return None if text is None else entry_from(text)

    def vote(self, vote: Vote) -> None:
        self.board.post(f"{self._name}/votes", vote.text())

    def votes(self) -> dict[int, Vote]:
        """Return the votes so far by rank."""
        return {vote.rank: vote for vote in map(vote_from, self.board.posted(f"{self._name}/votes"))}

    def post_part(self, problem: Problem, measurements: tuple[Measurement, ...]) -> None:
        """Send this rank's measurements to the leader."""
        head = Head(problem=problem, config=None, checksum="", origin="tuned")
        record = _record_text(Record(head, Body(measurements=measurements)))
        self.board.post(f"{self._name}/parts", f"{self.board.rank} {record}")

    def parts(self) -> dict[int, tuple[Measurement, ...]]:
        """Return the measurements so far by rank."""
        texts = (text.partition(" ") for text in self.board.posted(f"{self._name}/parts"))
        return {int(rank): _record_from(record).body.measurements for rank, _, record in texts}

    def publish_record(self, record: Record) -> None:
        """Send the leader's record to the other ranks, for their books."""
        text = _record_text(record)
        if len(text) <= _LONGEST_RECORD:
            self.board.first(f"{self._name}/record", text)

    def published_record(self) -> Record | None:
        text = self.board.wait(f"{self._name}/record", 0.0)
        return None if text is None else _record_from(text)

    @contextmanager
    def heartbeat(self, turn: int, lease_s: float) -> Iterator[None]:
        """Count up in a thread while the block runs, so that other ranks see that this rank works on an entry."""
        key, over = f"{self._name}/{turn}/beats", threading.Event()

        def beat() -> None:
            while not over.wait(lease_s / _BEATS):
                # A failed beat is not worth a warning: the next may succeed, and a takeover does no harm.
                with suppress(StoreError):
                    self.board.add(key, 1)

        # At interpreter exit no thread can be started. Another rank may then tune too, which does no harm.
        with suppress(RuntimeError):
            threading.Thread(target=beat, name=f"tunebook {key}", daemon=True).start()
        try:
            yield
        finally:
            over.set()

    def watch(self, turn: int) -> Callable[[], float]:
        """Return a function that tells for how long the heartbeat of an entry has stood still, by this rank's clock."""
        seen_s, beats = time.monotonic(), -1

        def silent_s() -> float:
            nonlocal seen_s, beats
            count = self.board.add(f"{self._name}/{turn}/beats", 0)
            if count != beats:
                # The first look finds some count, which proves no life: the wait before it counts.
                seen_s = time.monotonic() if beats >= 0 else seen_s
                beats = count
            return time.monotonic() - seen_s

        return silent_s


def _record_text(record: Record) -> str:
    return canonical_json([*record.to_fields()])


def _record_from(text: str) -> Record:
    return Record.from_fields(*json.loads(text))
