"""Votes, log entries, and how votes are counted: pure functions, so that every rank would count the same.

Each rank votes once per problem: with a configuration that it knows, or with whether it could tune. The rank that
opened the vote counts: a known configuration wins, else the lowest rank that can tune becomes the leader. If the
counting rank dies, another rank takes over after a lease (see `round`).
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeAlias

from tunebook._base.record_format import canonical_json
from tunebook._statistics.race import typical_s, valid_samples_s

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from tunebook._base.vocabulary import Json, Measurement

Share: TypeAlias = Literal["leader", "split"]
Kind: TypeAlias = Literal["open", "lead", "left", "decided", "nothing"]
Origin: TypeAlias = Literal["cache", "tuned", "heuristics", ""]

# Ranks of a job run on machines of the same kind, whose times differ by less than this. A candidate further behind the
# fastest of all parts could not win on any of them, and does not race again.
_COULD_WIN: Final = 1.25


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
    """Return the entry that follows from the votes; `parts` is among how many ranks the work can be split.

    A known configuration wins over tuning, and the lowest rank over the others. Ranks with different candidates cannot
    share a configuration.
    """
    in_order = [votes[rank] for rank in sorted(votes)]
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
    times = [typical_s(valid_samples_s(m)) for m in measured if m.failure is None and valid_samples_s(m)]
    limit_s = min(times, default=0.0) * _COULD_WIN
    return tuple(
        m._replace(dropped=m.dropped or not valid_samples_s(m) or typical_s(valid_samples_s(m)) > limit_s)
        if m.failure is None
        else m
        for m in measured
    )
