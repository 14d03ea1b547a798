"""Why a call gets the configuration that it gets."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tunebook._book import body_of, environments_verified, ground_of, winner_of
from tunebook._codec import readable
from tunebook._decide import Ranked, Verdict, decide
from tunebook._errors import StoreError
from tunebook._keys import explain_difference, spell_out
from tunebook._progress import seconds_text
from tunebook._record import Body
from tunebook._selection import NoSelection, Selection

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tunebook._kernel import Invocation, Kernel
    from tunebook._record import Record
    from tunebook._selection import ConfigSelectorChain
    from tunebook._types import Failure, Measurement, Problem

_NEAREST: Final = 3


class NearMiss(NamedTuple):
    """An entry of the same kernel for another call or device, and in what it differs from this one."""

    problem: Problem
    differences: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What `explain` found. Print it, or read its fields."""

    problem: Problem
    selection: Selection[Any] | NoSelection
    record: Record | None = None
    verdict: Verdict | None = None
    failures: tuple[Measurement, ...] = ()
    near_misses: tuple[NearMiss, ...] = ()

    def __str__(self) -> str:
        return "\n".join([*self._call(), *self._answer(), *self._measured(), *self._near()])

    def _call(self) -> Iterable[str]:
        yield f"{self.problem.op} on {self.problem.device}"
        yield from (f"  {line}" for line in spell_out(self.problem.call_key))

    def _answer(self) -> Iterable[str]:
        selection = self.selection
        if isinstance(selection, Selection):
            yield f"answer: {selection.config} from {selection.source}"
        else:
            yield "answer: none"
        yield from (f"  {tier:<11} {said}" for tier, said in selection.tried)

    def _measured(self) -> Iterable[str]:
        if self.record is not None and self.verdict is not None:
            yield from self._chosen(self.record, self.verdict)
        for failed in self.failures:
            yield f"  failed     {readable(failed.config)}  {_reason(failed.failure)}"

    def _chosen(self, record: Record, verdict: Verdict) -> Iterable[str]:
        body = body_of(record)
        facts = body.provenance
        where = f"{facts.get('host', '?')} under {_versions(record.head.environment)}"
        yield f"measured {_day(facts.get('when'))} on {where}"
        yield f"  winner     {_ranked(verdict.winner)}"
        others = [r for r in verdict.ranking if r is not verdict.winner]
        if others:
            yield f"  runner-up  {_ranked(others[0])}  {others[0].value_s / verdict.winner.value_s:.2f} x"
            yield f"  slowest    {_ranked(others[-1])}  {others[-1].value_s / verdict.winner.value_s:.1f} x"
        tied = (
            "" if len(verdict.tied) == 1 else f"; {len(verdict.tied)} cannot be told apart, within {verdict.band:.1%}"
        )
        yield f"  chosen as  {facts.get('rule', verdict.rule)}{tied}"
        for environment in environments_verified(body):
            yield f"  verified   only finalists were measured again; all were, under {_versions(environment)}"
        if facts.get("complete") is False:
            yield "  the budget ended this tuning: the best so far stands"
        if ground := ground_of(body):
            yield f"  disturbed  {'; '.join(ground)}. A tuning on quiet ground replaces it: tunebook.tune(...)"

    def _near(self) -> Iterable[str]:
        if self.near_misses:
            yield "near misses:"
        for miss in self.near_misses:
            yield f"  {'; '.join(miss.differences)}"


def _reason(failure: Failure | None) -> str:
    if failure is None:
        return ""
    reason = f"{failure.kind}: {failure.message}".splitlines()[0][:160]
    return reason if failure.expires is None else f"{reason} (remembered until {_day(failure.expires)})"


def _day(when: object) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(when)) if isinstance(when, (int, float)) else "unknown"


def _versions(environment: str) -> str:
    """Return an environment, which is a JSON object of names and versions, as people write it."""
    try:
        return ", ".join(f"{name} {version}" for name, version in json.loads(environment).items())
    except (ValueError, AttributeError):
        return environment or "unknown versions"


def _ranked(ranked: Ranked) -> str:
    samples = sorted(ranked.measurement.valid_samples_s)
    more = f" (to {seconds_text(samples[-1])} in {len(samples)} samples)" if len(samples) > 1 else " (1 sample)"
    return f"{seconds_text(ranked.value_s)}{more}  {readable(ranked.measurement.config)}"


def explain_call(
    selector: ConfigSelectorChain[Any], inv: Invocation[Any, Any], kernel: Kernel[Any, Any]
) -> Explanation:
    """Explain a call without running or tuning anything."""
    selection = selector.preview(inv, kernel)
    problem = selection.problem
    record = None if selector.persistent is None else selector.persistent.read(problem)
    here = (kernel.code_checksum, kernel.environment(inv))
    body = Body() if record is None else body_of(record)
    measured = [m for m in body.measurements if (m.code, m.environment) == here]
    return Explanation(
        problem=problem,
        selection=selection,
        record=record,
        verdict=decide(measured, incumbent=winner_of(body)),
        failures=tuple(m for m in measured if m.failure is not None),
        near_misses=_near_misses(selector, problem),
    )


def _near_misses(selector: ConfigSelectorChain[Any], problem: Problem) -> tuple[NearMiss, ...]:
    if selector.persistent is None:
        return ()
    others: set[Problem] = set(selector.cache.keys())
    with suppress(StoreError):  # what cannot be read was warned about when it was looked up
        others.update(r.problem for r in selector.persistent.store.items(problem.op) if r.head.decided)
    misses = [
        NearMiss(problem=other, differences=_differences(other, problem))
        for other in others
        if other.op == problem.op and other != problem
    ]
    return tuple(sorted(misses, key=lambda miss: (len(miss.differences), miss.problem))[:_NEAREST])


def _differences(there: Problem, here: Problem) -> tuple[str, ...]:
    device = [] if there.device == here.device else [f"device {there.device} here {here.device}"]
    return (*device, *explain_difference(there.call_key, here.call_key))
