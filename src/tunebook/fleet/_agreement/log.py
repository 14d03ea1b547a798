"""A problem's log on the board: votes, and numbered places that can each be written once, in one order for all ranks.

Each rank votes once per problem: with a configuration that it knows, or with whether it could tune. The rank that
opened the vote counts: a known configuration wins, else the lowest rank that can tune becomes the leader. If the
counting rank dies, another rank takes over after a lease (see `round`).

A rank writes a place only after it has read all places before it. So all ranks see the same entries, and the first
entry that ends the log ends it for all: a late leader, or a rank whose deadline has passed, finds the end and uses it.
The rank that an entry puts to work counts up a heartbeat; when that stops, another rank writes the next place.
"""

from __future__ import annotations

import json
import threading
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeAlias

from tunebook._base.errors import StoreError
from tunebook._base.record_format import Body, Head, Record, canonical_json
from tunebook._statistics.race import typical_s

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from tunebook._base.vocabulary import Json, Measurement, Problem
    from tunebook.fleet._agreement.board import Board

Share: TypeAlias = Literal["leader", "split"]
Kind: TypeAlias = Literal["open", "lead", "left", "decided", "nothing"]
Origin: TypeAlias = Literal["cache", "tuned", "heuristics", ""]

# Ranks of a job run on machines of the same kind, whose times differ by less than this. A candidate further behind the
# fastest of all parts could not win on any of them, and does not race again.
_COULD_WIN: Final = 1.25
_BEATS: Final = 4  # per lease: three may be late or lost before another rank takes over
# In characters. A thousand ranks read the record; the measurements of a few hundred candidates take a tenth of this.
_LONGEST_RECORD: Final = 1 << 20


class Vote(NamedTuple):
    """A rank's known configuration (`hit`) or None, whether it could tune now, and the digest of its candidates."""

    rank: int
    hit: Json
    able: bool
    candidates: str

    def text(self) -> str:
        return canonical_json([*self])


def vote_from(text: str) -> Vote:
    return Vote(*json.loads(text))


class LogEntry(NamedTuple):
    """One place of a problem's log. `by` is the call that wrote it, because a rank may be started again.

    "open" begins the vote. "lead" makes `rank` tune, after the ranks of `split` have measured a part each. "left" says
    that the leader failed. "decided" and "nothing" end the log.
    """

    kind: Kind
    rank: int
    by: str
    config: Json = None
    origin: Origin = ""
    why: str = ""
    split: tuple[int, ...] = ()

    @property
    def is_last(self) -> bool:
        return self.kind in ("decided", "nothing")

    def text(self) -> str:
        return canonical_json([*self[:-1], list(self.split)])


def entry_from(text: str) -> LogEntry:
    entry = LogEntry(*json.loads(text))
    return entry._replace(split=tuple(entry.split))


class NoDecision(NamedTuple):
    """The reason why the votes decide nothing; `warn` if the programs of the job seem to differ."""

    why: str
    warn: bool = False


def count_votes(votes: Mapping[int, Vote], *, by: str, parts: int = 1) -> LogEntry | NoDecision:
    """Return the entry that follows from the votes; `parts` is among how many ranks the work can be split."""
    in_order = [votes[rank] for rank in sorted(votes)]
    # Ranks with different candidates cannot share a configuration.
    different = [vote.rank for vote in in_order if vote.candidates != in_order[0].candidates]
    if different:
        return NoDecision(f"{list_ranks(different)} and rank {in_order[0].rank} have different candidates", warn=True)
    hit = next((vote for vote in in_order if vote.hit is not None), None)
    if hit is not None:
        return LogEntry("decided", hit.rank, by, hit.hit, "cache")
    able = tuple(vote.rank for vote in in_order if vote.able)
    if not able:
        return NoDecision(f"{list_ranks(votes)} may not tune")
    split = able[:parts]
    return LogEntry("lead", able[0], by, split=split if len(split) > 1 else ())


def list_ranks(ranks: Iterable[int]) -> str:
    """Return some ranks in words.

    >>> list_ranks([2]), list_ranks([3, 1, 2]), list_ranks(range(40))
    ('rank 2', 'ranks 1, 2, 3', 'ranks 0, 1, 2, 3, 4, 5, 6, 7 and 32 more')
    """
    known = sorted(ranks)
    more = f" and {len(known) - 8} more" if len(known) > 8 else ""
    return f"rank{'s' * (len(known) > 1)} {', '.join(map(str, known[:8]))}{more}"


def contenders(parts: Iterable[Sequence[Measurement]]) -> tuple[Measurement, ...]:
    """Return the measurements of all parts; candidates that are clearly behind the fastest are marked as dropped."""
    measured = [m for part in parts for m in part]
    times = [typical_s(m.valid_samples_s) for m in measured if m.failure is None and m.valid_samples_s]
    limit_s = min(times, default=0.0) * _COULD_WIN
    return tuple(
        m._replace(dropped=m.dropped or not m.valid_samples_s or typical_s(m.valid_samples_s) > limit_s)
        if m.failure is None
        else m
        for m in measured
    )


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
        record = Record(head, Body(measurements=measurements))
        self.board.post(f"{self._name}/parts", f"{self.board.rank} {canonical_json([*record.to_fields()])}")

    def parts(self) -> dict[int, tuple[Measurement, ...]]:
        """Return the measurements so far by rank."""
        texts = (text.partition(" ") for text in self.board.posted(f"{self._name}/parts"))
        return {int(rank): Record.from_fields(*json.loads(text)).body.measurements for rank, _, text in texts}

    def publish_record(self, record: Record) -> None:
        """Send the leader's record to the other ranks, for their books."""
        text = canonical_json([*record.to_fields()])
        if len(text) <= _LONGEST_RECORD:
            self.board.first(f"{self._name}/record", text)

    def published_record(self) -> Record | None:
        text = self.board.wait(f"{self._name}/record", 0.0)
        return None if text is None else Record.from_fields(*json.loads(text))

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
