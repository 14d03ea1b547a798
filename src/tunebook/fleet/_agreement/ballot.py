"""The vote of ranks on a problem, and what comes of it: pure functions, so that every rank would count the same."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeAlias

from tunebook._base.record_format import canonical_json
from tunebook._statistics.race import typical_s

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from tunebook._base.vocabulary import Json, Measurement

Share: TypeAlias = Literal["leader", "split"]
Kind: TypeAlias = Literal["open", "lead", "left", "decided", "nothing"]
Origin: TypeAlias = Literal["cache", "tuned", "heuristics", ""]

# Processes of one job run on machines of one kind, whose times differ by less than this. What is further behind the
# fastest of all parts could not have won on any of them, and is not raced again.
_COULD_WIN: Final = 1.25


class Vote(NamedTuple):
    """What a rank knows about a problem: a configuration, or whether it could tune now; and its candidates' digest."""

    rank: int
    hit: Json
    able: bool
    candidates: str

    def text(self) -> str:
        """Return it in one line."""
        return canonical_json([self.rank, self.hit, self.able, self.candidates])


def vote_from(text: str) -> Vote:
    """Return a vote from its line."""
    rank, hit, able, candidates = json.loads(text)
    return Vote(rank, hit, able, candidates)


class LogEntry(NamedTuple):
    """What stands at one place of a problem's log. `by` is the process that wrote it: a rank may be started again.

    "open" begins the vote; "lead" makes `rank` tune, after the ranks of `split` have measured a part each; "left" says
    that the one who led has failed; "decided" and "nothing" are the end.
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
        """Whether the problem is settled by it."""
        return self.kind in ("decided", "nothing")

    def text(self) -> str:
        """Return it as the board keeps it."""
        return canonical_json([*self[:-1], list(self.split)])


def entry_from(text: str) -> LogEntry:
    """Return an entry as the board had it."""
    kind, rank, by, config, origin, why, split = json.loads(text)
    return LogEntry(kind, rank, by, config, origin, why, tuple(split))


class Guess(NamedTuple):
    """Why nothing follows from the votes; `odd` if the job's programs seem to differ."""

    why: str
    odd: bool = False


def count(votes: Mapping[int, Vote], *, by: str, parts: int = 1) -> LogEntry | Guess:
    """Return what follows from the votes, or why all must guess; `parts` is among how many the work can be split.

    A configuration that a rank knows goes before tuning, and that of the lowest rank before others'. Ranks with
    different candidates have none in common that one of them could choose.
    """
    in_order = [votes[rank] for rank in sorted(votes)]
    hit = next((vote for vote in in_order if vote.hit is not None), None)
    able = tuple(vote.rank for vote in in_order if vote.able)
    if different := _with_other_candidates(in_order):
        return Guess(f"{named(different)} and rank {in_order[0].rank} have different candidates", odd=True)
    if hit is not None:
        return LogEntry("decided", hit.rank, by, hit.hit, "cache")
    if not able:
        return Guess(f"{named(votes)} may not tune")
    split = able[:parts] if parts > 1 else ()
    return LogEntry("lead", able[0], by, split=split if len(split) > 1 else ())


def _with_other_candidates(votes: Sequence[Vote]) -> list[int]:
    return [vote.rank for vote in votes if vote.candidates != votes[0].candidates]


def named(ranks: Iterable[int]) -> str:
    """Return some ranks in words.

    >>> named([2]), named([3, 1, 2]), named(range(40))
    ('rank 2', 'ranks 1, 2, 3', 'ranks 0, 1, 2, 3, 4, 5, 6, 7 and 32 more')
    """
    known = sorted(ranks)
    listed = ", ".join(map(str, known[:8]))
    more = f" and {len(known) - 8} more" if len(known) > 8 else ""
    return f"rank{'s' * (len(known) > 1)} {listed}{more}"


def contenders(parts: Iterable[Sequence[Measurement]]) -> tuple[Measurement, ...]:
    """Return the measurements of all parts, with those marked as dropped that are clearly behind the best of any."""
    measured = [m for part in parts for m in part]
    times = [typical_s(m.valid_samples_s) for m in measured if m.failure is None and m.valid_samples_s]
    limit_s = min(times, default=0.0) * _COULD_WIN
    return tuple(
        m._replace(dropped=m.dropped or not m.valid_samples_s or typical_s(m.valid_samples_s) > limit_s)
        if m.failure is None
        else m
        for m in measured
    )
