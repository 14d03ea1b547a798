"""The decision that a record holds: its winner, its rule, and the data that it was measured on."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

from tunebook._base.config_codec import fingerprint, fingerprint_of, readable
from tunebook._base.durations import ratio_text, seconds_text
from tunebook._base.errors import CodecError
from tunebook._base.record_format import CHECKED_BY, Body, Head, Record, from_whole_tuning, identity
from tunebook._base.vocabulary import INTERRUPTED
from tunebook._measure.stopwatch import Attempt
from tunebook._statistics.decide import OBJECTIVES, Ranked, Verdict, decide
from tunebook._tuning.job import REJECTED

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from tunebook._base.vocabulary import Json, Measurement
    from tunebook._tuning.job import Call, Tuned


REJECTED_SOME: Final = "rejected"  # in a head: the tuning rejected outputs
OF_CHECKS: Final = frozenset({CHECKED_BY, REJECTED_SOME})
CHECKED_OTHERWISE: Final = "outputs were checked in another way when the entry was made"
HEURISTIC_WAS_REJECTED: Final = (
    "the heuristic, whose output is the expected one, has changed to a rejected configuration"
)


def winner_of(body: Body) -> str | None:
    """Return the fingerprint of the configuration that was chosen on these measurements, if that was written down."""
    winner = body.provenance.get("winner")
    return winner if isinstance(winner, str) else None


def names_in(record: Record) -> tuple[str, ...]:
    """Return the names of the configurations in the order of their space; empty if that is the alphabet's."""
    names = record.provenance.get("names")
    return tuple(map(str, names)) if isinstance(names, list) else ()


def is_live(body: Body) -> bool:
    """Return whether the decision was found in the calls of a running program."""
    return body.provenance.get("live") is True


def values_of(body: Body) -> str | None:
    """Return where the arguments of the tuning that chose were from; None if that was not written down."""
    values_from = body.provenance.get("values_from")
    return values_from if isinstance(values_from, str) else None


def is_interrupted(record: Record) -> bool:
    """Return whether a record holds the measurements of a tuning that was interrupted before it could choose."""
    return not record.head.decided and record.body.provenance.get(INTERRUPTED) is True


def marked_unfinished(m: Measurement) -> Measurement:
    """Return a measurement of a tuning that was interrupted, to be kept beside the choice of an earlier one."""
    return m._replace(extra={**m.extra, INTERRUPTED: True})


def unmarked(m: Measurement) -> Measurement:
    """Return a measurement as a tuning took it."""
    if from_whole_tuning(m):
        return m
    return m._replace(extra={name: m.extra[name] for name in m.extra if name != INTERRUPTED})


def measured_so_far(record: Record, code: str | None = None, environment: str | None = None) -> list[Measurement]:
    """Return the measurements that the next tuning goes on from, of some code in some environment, or of any."""
    whole = is_interrupted(record)
    return [
        m
        for m in record.body.measurements
        if (whole or not from_whole_tuning(m)) and code in (None, m.code) and environment in (None, m.environment)
    ]


def origin_of(record: Record) -> str:
    """Return where the configuration of a record is from; "interrupted" if a tuning could not choose one yet."""
    return "interrupted" if is_interrupted(record) else record.head.origin


def eliminated_after(m: Measurement) -> str:
    """Return the words for a candidate that left the race: its few samples are of another moment than the winner's."""
    count = len(m.valid_samples_s)
    return f"eliminated after {count} sample{'' if count == 1 else 's'}"


def heuristic_among(record: Record, measured: Iterable[Measurement]) -> Measurement | None:
    """Return the measurement of the heuristic's configuration, the one of a call that is not tuned."""
    return next((m for m in measured if m.fingerprint == record.provenance.get("default")), None)


def gain_of(record: Record, verdict: Verdict) -> float | None:
    """Return how many times faster than the heuristic's configuration the winner is; None if nothing says that."""
    times_s = {r.measurement.fingerprint: r.value_s for r in verdict.ranking}
    default_s, best_s = times_s.get(str(record.provenance.get("default"))), verdict.winner.value_s
    gain = default_s / best_s if default_s and best_s else math.nan
    heuristic = heuristic_among(record, (r.measurement for r in verdict.ranking))
    # No rule lets a slower candidate win a race: a heuristic that left with a lower time left a faster machine.
    early = heuristic is not None and heuristic.dropped and gain < 1
    return gain if math.isfinite(gain) and not early else None


def beside_heuristic(record: Record, verdict: Verdict, failures: Sequence[Measurement] = ()) -> str | None:
    """Return the heuristic's configuration and what tuning gains over it, in words; None if it was not measured."""
    heuristic = heuristic_among(record, (*(r.measurement for r in verdict.ranking), *failures))
    if heuristic is None:
        return None
    try:
        own = readable(heuristic.config, names_in(record))
    except CodecError as error:  # a newer release may have tags that this one does not know
        own = f"<{error}>"
    if heuristic.fingerprint == verdict.winner.measurement.fingerprint:
        return f"{own}, the winner itself"
    if heuristic.failure is not None:
        return f"{own}, which failed"
    if (gain := gain_of(record, verdict)) is None:
        return f"{own}, {eliminated_after(heuristic)}, before the machine became slower: its time does not compare"
    time = seconds_text(gain * verdict.winner.value_s)
    return f"{own}  {time}: the winner is {f'{ratio_text(gain)} faster' if gain >= 1.005 else 'as fast'}"


def tune_again(head: Head) -> str:
    """Return the code that measures all candidates of an entry anew, as its program writes it."""
    name = head.problem.op.partition("@")[0].rpartition(".")[2]
    triton = "triton" in head.environment  # of its kernels alone
    return f"{name}.tune(..., grid=..., again=True)" if triton else f"tunebook.tune({name}, ..., again=True)"


def has_code(head: Head, code: str) -> bool:
    """Return whether an entry was made by this code of the kernel, whatever its candidates were."""
    return head.checksum.startswith(f"{code}-")


def is_checked_otherwise(head: Head, check: str) -> bool:
    """Return whether a choice passed another check of outputs than the one with this digest."""
    tuned = head.origin == "tuned" and head.checksum  # others never passed a check
    return bool(tuned) and head.extra.get(CHECKED_BY, "") != check


def heuristic_was_rejected(record: Record, call: Call[Any]) -> bool:
    """Return whether the heuristic, whose output is the expected one, has changed to a rejected configuration."""
    kernel = call.kernel
    if not record.head.extra.get(REJECTED_SOME) or not kernel.checks or getattr(kernel, "reference", call) is not None:
        return False
    with Attempt():  # an author's heuristic may raise
        now = fingerprint(kernel.baseline(call.inv))
        own = [m.failure for m in record.body.measurements if (m.fingerprint, m.code) == (now, kernel.code_checksum)]
        return bool(own) and all(failure is not None and failure.kind in REJECTED for failure in own)
    return False


def goes_on(count: int) -> str:
    """Return the words for a tuning that was interrupted after so many measurements."""
    return f"a tuning was interrupted after {count} measurement{'' if count == 1 else 's'}, and the next one goes on"


def why_tuned_anew(head: Head, checksum: str, code: str, so_far: int) -> str:
    """Return why an entry does not answer a kernel that has another checksum now; `code` is that of its code.

    `so_far` measurements of an interrupted tuning are of the kernel as it is now.
    """
    same_code = has_code(head, code) and checksum.startswith(f"{code}-")  # a kernel may make checksums of its own
    edited = "by other code (the kernel, or a function that it uses, was edited)"
    reason = f"the entry was made {'with other candidates' if same_code else edited}"
    return f"{reason}; {goes_on(so_far)}" if so_far else reason


def why_undecided(record: Record) -> str:
    """Return why a record holds no configuration."""
    failed = record.body.measurements
    if is_interrupted(record):
        return f"no decision yet: {goes_on(len(failed))}"
    made_up = failed and all(m.values_from != "call" for m in failed)
    return f"no decision, because every candidate failed{' on made-up arguments' if made_up else ''}"


def former_candidates(body: Body) -> frozenset[str]:
    """Return the fingerprints of measured configurations that were not candidates in the last tuning."""
    former = body.provenance.get("former")
    return frozenset(map(str, former)) if isinstance(former, list) else frozenset()


def has_valid_pin(record: Record) -> bool:
    """Return whether a record is pinned by hand to a configuration that is still a candidate, as far as it knows."""
    is_former = fingerprint_of(record.head.config) in former_candidates(record.body)
    return record.head.origin == "pinned" and not is_former


def pin_beside(record: Record, verdict: Verdict) -> str:
    """Return how a pinned configuration compares with the measured winner, as the end of a sentence."""
    if not has_valid_pin(record):
        return ", which is not a candidate any more, so the pin has no effect"
    own = [r.value_s for r in verdict.ranking if r.measurement.config == record.head.config]
    return f", measured at {ratio_text(own[0] / verdict.winner.value_s)} of the winner" if own else ""


def of_candidates(body: Body) -> list[Measurement]:
    """Return the measurements of whole tunings, without those of former candidates."""
    former = former_candidates(body)
    return [m for m in body.measurements if from_whole_tuning(m) and m.fingerprint not in former]


def measured_for_choice(body: Body, measured: Sequence[Measurement] | None = None) -> list[Measurement]:
    """Return the measurements under the conditions of the winner, or else of the latest measurement.

    `measured` are the measurements to look at, if not all.
    """
    measured = of_candidates(body) if measured is None else measured
    winner, values_from = winner_of(body), values_of(body) or "call"
    code, check = body.provenance.get("code"), body.provenance.get(CHECKED_BY, "")

    def rank(m: Measurement) -> tuple[bool, bool, bool, float]:
        # After an edit was undone, the measurements of the edited code, or of the other check, are the newer ones.
        same = m.code == code and m.extra.get(CHECKED_BY, "") == check
        return m.fingerprint == winner and m.failure is None, same, m.values_from == values_from, m.when

    newest = max(measured, key=rank, default=None)
    return [] if newest is None else [m for m in measured if identity(m)[1:] == identity(newest)[1:]]


def verdict_of(record: Record, measured: Sequence[Measurement] | None = None) -> Verdict | None:
    """Return the decision over a record's measurements, by the objective that the record names.

    Explanations, listings and reports take the winner from here. `measured` replaces the measurements of the choice.
    """
    body = record.body
    facts, winner = body.provenance, winner_of(body)
    measured = measured_for_choice(body) if measured is None else measured
    objective = OBJECTIVES.get(str(facts.get("objective", "typical")))
    if objective is None:
        return _verdict_as_written(facts, measured)
    default, rule = facts.get("default"), facts.get("rule")
    heuristic = default if isinstance(default, str) else None
    verdict = decide(measured, incumbent=winner, heuristic=heuristic, objective=objective)
    if verdict is None or not isinstance(rule, str) or verdict.winner.measurement.fingerprint != winner:
        return verdict
    return verdict._replace(rule=rule)  # the winner is the incumbent of this decision, and was not of the first


def _verdict_as_written(facts: Mapping[str, Json], measured: Sequence[Measurement]) -> Verdict | None:
    """Return the decision by the author's own objective: the function is not in the record, its values are."""
    values, band = facts.get("values"), facts.get("band")
    values = values if isinstance(values, dict) else {}
    valid = [m for m in measured if m.failure is None and m.valid_samples_s]
    numbers = {name: float(value) for name, value in values.items() if isinstance(value, (int, float))}
    ranked = [Ranked(m, numbers.get(m.fingerprint, math.inf)) for m in valid]
    ranked.sort(key=lambda r: (r.measurement.fingerprint != facts.get("winner"), r.measurement.dropped, r.value_s))
    if not ranked:
        return None
    winner, alike = ranked[0], float(band) if isinstance(band, (int, float)) else 0.0
    limit_s = winner.value_s * (1 + alike)
    tied = [r for r in ranked if r is winner or (not r.measurement.dropped and r.value_s <= limit_s)]
    ranked.sort(key=lambda r: (r.measurement.dropped, r.value_s))
    return Verdict(winner, str(facts.get("rule", "")), alike, tuple(tied), tuple(ranked), str(facts["objective"]))


def disturbances_of(body: Body) -> tuple[str, ...]:
    """Return the disturbances of the tuning that chose; empty if it was quiet."""
    reasons = body.provenance.get("disturbances")
    return tuple(map(str, reasons)) if isinstance(reasons, list) else ()


def is_finished(body: Body) -> bool:
    """Return whether no budget cut the tuning that chose short, and nothing disturbed it."""
    return body.provenance.get("complete") is not False and not disturbances_of(body)


def environments_verified(body: Body) -> tuple[str, ...]:
    """Return the environments whose choice was found to hold in the record's own."""
    verified = body.provenance.get("verified")
    earlier = verified.get("environments") if isinstance(verified, dict) else None
    return tuple(map(str, earlier)) if isinstance(earlier, list) else ()


def restamped(record: Record, tuned: Tuned[Any], now_s: float) -> dict[str, Json]:
    """Return the facts of a choice that was found to hold. Other candidates were measured before, or never."""
    facts = record.body.provenance
    environments = list(dict.fromkeys([*environments_verified(record.body), record.head.environment]))
    return {
        "verified": {
            "when": now_s,
            "tuned": facts.get("when"),
            "environments": [*environments],
            "values_from": tuned.values_from,
        },
        "complete": tuned.complete and facts.get("complete") is not False,
    }


def carried_over(known: Sequence[Measurement], verified: Sequence[str], environment: str) -> Iterable[Measurement]:
    """Yield measurements of environments whose choice was found to hold here, as if dropped from a race here."""
    # Else a candidate that is added after a driver update would be raced against everything, and not the winner alone.
    here = {identity(m) for m in known}
    latest = {
        (m.fingerprint, m.code, m.policy): m
        for m in sorted(known, key=lambda m: m.when)
        if m.environment in verified and m.failure is None
    }
    for m in latest.values():
        carried = m._replace(environment=environment, dropped=True, extra={**m.extra, "measured_under": m.environment})
        if identity(carried) not in here:
            yield carried
