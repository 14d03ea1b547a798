"""The record of a tuning: what it tells of the decision, beside the measurements."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Any

from tunebook._arrays.device_properties import NOTED, noted_properties
from tunebook._base.config_codec import encode
from tunebook._base.errors import CodecError
from tunebook._base.record_format import Body, Head, Record, from_whole_tuning, identity
from tunebook._base.vocabulary import LIVE, Problem
from tunebook._selection.recorded_decision import environments_verified
from tunebook._space.space import Config
from tunebook._statistics.decide import OBJECTIVES
from tunebook._tuning.job import host_name

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tunebook._base.vocabulary import Json, Measurement
    from tunebook._tuning.job import Tuned


def was_live(tuned: Tuned[Any]) -> bool:
    return tuned.verdict is not None and LIVE in tuned.verdict.winner.measurement.policy


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


def when_and_where(now_s: float) -> dict[str, Json]:
    return {"when": now_s, "host": host_name()}


def provenance_of(tuned: Tuned[Any], now_s: float) -> dict[str, Json]:
    facts = when_and_where(now_s)
    facts |= {"seconds": tuned.seconds, "ran": tuned.ran, "complete": tuned.complete, "waiting_s": tuned.waiting_s}
    facts |= {"values_from": tuned.values_from, **({"at": dict(tuned.at)} if tuned.at else {})}
    # Encoded configurations have their names sorted. The last one is the space's own; the heuristic is the first.
    last = next(reversed(list(tuned.configs.values())), None)
    names = list(map(str, last)) if isinstance(last, Config) else []
    facts |= {"names": [*names]} if names != sorted(names) else {}
    if (roofline := tuned.roofline) is not None:
        amounts = {"flops": roofline.flops, "bytes": roofline.bytes_moved, **roofline.peak._asdict()}
        known = {name: amount for name, amount in amounts.items() if amount is not None and math.isfinite(amount)}
        facts["roofline"] = {name: float(amount) for name, amount in known.items()}  # it may be a number of numpy's
    facts |= {"live": True} if was_live(tuned) else {}
    if tuned.problem is not None and tuned.problem.device in NOTED:
        facts["device"] = noted_properties(tuned.problem.device)
    if tuned.left_out:
        facts["not_tried"] = [encode(tuned.configs[name]) for name in tuned.left_out]
        facts["why_not_tried"] = next(iter(tuned.left_out.values()))
    if not tuned.disturbances.quiet:
        facts["disturbances"] = list(tuned.disturbances.reasons)
    return facts | decision_of(tuned)


def decision_of(tuned: Tuned[Any]) -> dict[str, Json]:
    """Return all that `verdict_of` needs beside the measurements, and its numbers."""
    facts: dict[str, Json] = {"found": numbers_of(tuned)}
    facts |= {} if tuned.default is None else {"default": tuned.default}
    if (verdict := tuned.verdict) is None:
        return facts
    facts |= {"winner": verdict.winner.measurement.fingerprint, "rule": verdict.rule, "objective": verdict.objective}
    if verdict.objective not in OBJECTIVES:  # the author's own function: others cannot call it
        finite = (r for r in verdict.ranking if math.isfinite(r.value_s))
        facts |= {"band": verdict.band, "values": {r.measurement.fingerprint: r.value_s for r in finite}}
    return facts


def numbers_of(tuned: Tuned[Any], earlier: Iterable[Measurement] = ()) -> dict[str, Json]:
    """Return a tuning in a few numbers, so that a list of many need not read their measurements.

    Of `earlier` measurements those count that were taken under the same conditions, and not again.
    """
    fresh = {identity(m) for m in tuned.measurements}
    conditions = {each[1:] for each in fresh}
    before = [m for m in earlier if from_whole_tuning(m) and identity(m)[1:] in conditions and identity(m) not in fresh]
    measured = [*tuned.measurements, *before]
    kinds = Counter(m.failure.kind for m in measured if m.failure is not None)
    failed: dict[str, Json] = {str(kind): count for kind, count in kinds.items()}
    compile_s = math.fsum(m.compile_s for m in measured if m.compile_s)
    found: dict[str, Json] = {"tried": len(measured), "failed": failed, "compile_s": compile_s}
    if tuned.verdict is not None:
        values = {ranked.measurement.fingerprint: ranked.value_s for ranked in tuned.verdict.ranking}
        found["best_s"] = tuned.verdict.winner.value_s
        if (default_s := values.get(tuned.default or "")) is not None:
            found["default_s"] = default_s
    return found


def record_of_tuning(tuned: Tuned[Any]) -> Record:
    """Return the result of a tuning as a record, to be shown; it is not for a store."""
    best = None if tuned.verdict is None else tuned.verdict.winner.measurement
    try:
        config = encode(tuned.config) if best is None else best.config
    except CodecError:
        config = repr(tuned.config)
    head = Head(
        problem=tuned.problem or Problem("", "several calls", ""),
        config=config,
        checksum="",
        origin="tuned",
        environment="" if best is None else best.environment,
    )
    return Record(head, Body(measurements=tuned.measurements, provenance=provenance_of(tuned, tuned.when)))
