"""Verification: measure the few that could have won again, instead of everything.

After an update of a driver or a library the old times are worth nothing, but the order among candidates mostly holds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, Protocol, TypeVar

from tunebook._base.config_codec import encode, fingerprint_of
from tunebook._base.errors import CodecError, TuningFailed
from tunebook._measure.disturbance import Disturbances
from tunebook._statistics.race import typical_s

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tunebook._base.vocabulary import Measurement
    from tunebook._tuning.job import Job, Tuned

C = TypeVar("C")

# A choice that was made alone is measured against so many all the same: those that came closest to it.
FEWEST: Final = 3


class Verified(NamedTuple, Generic[C]):
    """What a verification found. `held` says that the earlier choice stands, on fresh measurements; else `reason`.

    `tuned` is what was measured for it: the finalists, or everything if the choice did not hold or there was none.
    """

    held: bool
    reason: str
    tuned: Tuned[C]

    @property
    def config(self) -> C:
        """The configuration that is used from now on."""
        return self.tuned.config


def finalists(known: Iterable[Measurement], *, code: str, environment: str, winner: str) -> frozenset[str]:
    """Return the fingerprints of those that could have won under these conditions: the last ones in the race.

    The winner is among them; if they are fewer than `FEWEST`, so are the fastest of the others.
    """
    measured = [m for m in known if (m.code, m.environment) == (code, environment) and m.failure is None]
    closest = sorted(
        (m for m in measured if m.valid_samples_s), key=lambda m: (m.dropped, typical_s(m.valid_samples_s))
    )
    chosen = {winner: None, **{m.fingerprint: None for m in closest if not m.dropped}}
    for m in closest:
        if len(chosen) >= FEWEST:
            break
        chosen[m.fingerprint] = None
    return frozenset(chosen)


class TuneOrVerify(Protocol[C]):
    """Runs a job; `verifying` is for whoever is told that it begins."""

    def __call__(self, job: Job[C], *, verifying: bool = False) -> Tuned[C]:
        """Return what was found; `TuningFailed` if every candidate fails."""


def verify(job: Job[C], tune: TuneOrVerify[C], among: frozenset[str]) -> Verified[C]:
    """Measure `among` and the heuristic's again; if the job's incumbent does not win or tie, tune everything.

    Ties go to the incumbent, as in every decision.
    """
    few = job._replace(
        candidates=_with_fingerprints(job.candidates, among), known=_failures(job), unfinished=False, search=None
    )
    try:
        fresh = tune(few, verifying=True)
    except TuningFailed as error:
        whole = job._replace(known=error.measurements, incumbent=None, unfinished=False)
        return Verified(held=False, reason=f"all finalists failed: {error}", tuned=tune(whole))
    winner = None if fresh.verdict is None else fresh.verdict.winner.measurement.fingerprint
    if not fresh.complete:
        return Verified(held=False, reason="the budget ended before all finalists were measured", tuned=fresh)
    if winner == job.incumbent:
        return Verified(held=True, reason=f"{len(fresh.measurements)} finalists were measured again", tuned=fresh)
    # The newcomers are raced against the one that won just now; those that lost to it need not run a third time.
    reason = f"{fresh.config!r} is faster now"
    left = job.budget.less(fresh)
    if left.is_spent:
        return Verified(held=False, reason=reason, tuned=fresh._replace(complete=False))
    known = (*_failures(job), *fresh.measurements)
    whole = job._replace(known=known, incumbent=winner, unfinished=False, budget=left)
    tuned = tune(whole)
    both = tuned._replace(
        ran=fresh.ran + tuned.ran,
        seconds=fresh.seconds + tuned.seconds,
        disturbances=Disturbances(tuple(dict.fromkeys((*fresh.disturbances.reasons, *tuned.disturbances.reasons)))),
    )
    return Verified(held=False, reason=reason, tuned=both)


def _with_fingerprints(candidates: Sequence[C], wanted: frozenset[str]) -> list[C]:
    return [config for config in candidates if _fingerprint(config) in wanted]


def _fingerprint(config: object) -> str | None:
    try:
        return fingerprint_of(encode(config))
    except CodecError:
        return None  # what cannot be written is not in the book, so it was no finalist there


def _failures(job: Job[Any]) -> tuple[Measurement, ...]:
    return tuple(m for m in job.known if m.failure is not None)
