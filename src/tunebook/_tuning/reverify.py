"""Verification: measures only the finalists again, instead of all candidates.

After an update of a driver or a library the old times are void, but the order among candidates mostly holds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, TypeVar

from tunebook._base.config_codec import fingerprint
from tunebook._base.errors import CodecError, TuningFailed
from tunebook._base.vocabulary import MADE_UP
from tunebook._measure.disturbance import Disturbances
from tunebook._statistics.race import typical_s
from tunebook._tuning.job import REJECTED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tunebook._base.vocabulary import Failure, Measurement
    from tunebook._tuning.job import Job, Tuned

C = TypeVar("C")

# A lone finalist is measured against the closest of the others, until they are so many.
FEWEST: Final = 3


class Verified(NamedTuple, Generic[C]):
    """The result of a verification. `held` says that the earlier choice stands on fresh measurements.

    `tuned` has the measurements: of the finalists, or of all candidates if the choice did not hold or was missing.
    `kept` says that the choice was beaten, and stands: it is pinned, or was decided on a caller's arguments and this
    was measured on made-up ones.
    """

    held: bool
    reason: str
    tuned: Tuned[C]
    kept: bool = False

    @property
    def config(self) -> C:
        """The configuration that is used from now on."""
        return self.tuned.config


def finalists(known: Iterable[Measurement], *, code: str, environment: str, winner: str) -> frozenset[str]:
    """Return the fingerprints of the finalists of a race under some conditions, or of the `FEWEST` fastest if fewer."""
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


def verify(job: Job[C], tune: Callable[..., Tuned[C]], among: frozenset[str], *, keep: bool = False) -> Verified[C]:
    """Measure the candidates `among` and the heuristic's again; tune all if the job's incumbent does not win or tie.

    `tune` runs a job; its keyword `verifying` is for the listeners of its start. With `keep`, the incumbent stands in
    any case, so no other candidate runs.
    """
    failures = tuple(m for m in job.known if m.failure is not None)
    finished = job.history._replace(complete=True)
    few = job._replace(
        candidates=[config for config in job.candidates if _fingerprint(config) in among],
        history=finished._replace(measurements=failures),
        search=None,
    )
    try:
        fresh = tune(few, verifying=True)
    except TuningFailed as error:
        if keep:
            raise
        whole = job._replace(history=finished._replace(measurements=error.measurements, winner=None))
        return Verified(held=False, reason=f"all finalists failed: {error}", tuned=tune(whole))
    winner = None if fresh.verdict is None else fresh.verdict.winner.measurement.fingerprint
    if not fresh.complete:
        return Verified(held=False, reason="the budget ended before all finalists were measured", tuned=fresh)
    if winner == job.incumbent:
        many = len(fresh.measurements)
        reason = f"{many} {'finalist was' if many == 1 else 'finalists were'} measured again"
        return Verified(held=True, reason=reason, tuned=fresh)
    if keep:
        reason = _why_beaten(fresh, job.incumbent, f"on {MADE_UP[job.conditions.values_from]}")
        reason = f"{reason}; it stands, because it was made on a caller's arguments"
        if _failure_of(fresh, job.incumbent) is not None and job.conditions.values_from != "inputs":
            reason = f"{reason}. To verify it, give the kernel inputs=, a function that makes valid ones"
        return Verified(held=False, reason=reason, tuned=fresh, kept=True)
    # The newcomers race against the new winner; the finalists that lost to it need not run a third time.
    reason = _why_beaten(fresh, job.incumbent, "now")
    left = job.budget.less(fresh)
    if left.is_spent:
        return Verified(held=False, reason=reason, tuned=fresh._replace(complete=False))
    known = (*failures, *fresh.measurements)
    tuned = tune(job._replace(history=finished._replace(measurements=known, winner=winner), budget=left))
    both = tuned._replace(
        ran=fresh.ran + tuned.ran,
        seconds=fresh.seconds + tuned.seconds,
        disturbances=Disturbances(tuple(dict.fromkeys((*fresh.disturbances.reasons, *tuned.disturbances.reasons)))),
    )
    return Verified(held=False, reason=reason, tuned=both)


def _failure_of(fresh: Tuned[Any], incumbent: str | None) -> Failure | None:
    return next((m.failure for m in fresh.measurements if m.fingerprint == incumbent), None)


def _why_beaten(fresh: Tuned[Any], incumbent: str | None, where: str) -> str:
    """Return why the choice did not win: it failed, or the winner is faster."""
    if (failure := _failure_of(fresh, incumbent)) is None:
        return f"{fresh.config!r} is faster {where} than the choice"
    verb = "gave a wrong output" if failure.kind in REJECTED else "failed"
    return f"the choice {verb} {where}: {failure.message.partition(chr(10))[0]}"


def _fingerprint(config: object) -> str | None:
    try:
        return fingerprint(config)
    except CodecError:
        return None  # it cannot be stored, so it was not a stored finalist
