"""Why a call gets its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tunebook._api.explanation_text import ExplanationLine, item, on_screen, spread_of
from tunebook._api.failure_groups import failure_groups, notes_beside
from tunebook._api.versions import environment_here, versions_differ, versions_of
from tunebook._base.config_codec import decode, fingerprint, readable
from tunebook._base.durations import ratio_text
from tunebook._base.errors import CodecError, StoreError, clean, clean_lines
from tunebook._base.record_format import Body
from tunebook._base.vocabulary import MADE_UP
from tunebook._keys.call_key import explain_difference, spell_out
from tunebook._measure.stopwatch import Attempt
from tunebook._selection.bucket_tuning import measured_at
from tunebook._selection.recorded_decision import (
    beside_heuristic,
    disturbances_of,
    eliminated_after,
    environments_verified,
    gain_of,
    has_valid_pin,
    heuristic_among,
    is_interrupted,
    measured_for_choice,
    measured_so_far,
    names_in,
    of_candidates,
    pin_beside,
    tune_again,
    values_of,
    verdict_of,
)
from tunebook._selection.selector import NoSelection, Selection, select_offline
from tunebook._selection.tiers import OfflineEntry
from tunebook._selection.trusted_entries import EntryGuard, record_of_tuning
from tunebook._statistics.decide import OBJECTIVES
from tunebook._tuning.job import PROGRAM
from tunebook._tuning.progress import day_text, seconds_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from tunebook._api.failure_groups import FailureGroup
    from tunebook._base.record_format import Record
    from tunebook._base.vocabulary import Json, Measurement, Problem
    from tunebook._kernel.kernel import Invocation, Kernel
    from tunebook._selection.selector import ConfigSelectorChain
    from tunebook._statistics.decide import Ranked, Verdict
    from tunebook.stores._listing import Catalogue

_NEAREST: Final = 3
# Near misses are looked for among so many entries of the kernel: 0.1 s, however large the book is.
_COMPARED: Final = 1000
_LISTED: Final = 4  # configurations that are named before "and 12 more"


class NearMiss(NamedTuple):
    """An entry of the same kernel for another call or device, with the differences."""

    problem: Problem
    differences: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """The answer of `explain`. Print it, or read its fields. On a terminal, its text is wrapped to the width of it.

    `environment` is the environment of this process or machine; `differences` are its differences from the environment
    of the verdict's measurements, and says so if the kernel was edited after them. `so_far` are the measurements of a
    tuning that was interrupted. `shipped_in` is the pack that the record is from, or empty. `offline` says that the
    program was not asked, whose code may have changed since. `arguments` are the names of the kernel's parameters, if
    the program was asked, and `former` the fingerprints of measured configurations that it does not have any more.
    `unwritten`: the record is of a tuning in this process that no book has.
    """

    problem: Problem
    selection: Selection[Any] | NoSelection
    record: Record | None = None
    verdict: Verdict | None = None
    failures: tuple[Measurement, ...] = ()
    near_misses: tuple[NearMiss, ...] = ()
    environment: str = ""
    differences: tuple[str, ...] = ()
    shipped_in: str = ""
    so_far: tuple[Measurement, ...] = ()
    offline: bool = False
    arguments: tuple[str, ...] = ()
    former: frozenset[str] = frozenset()
    unwritten: bool = False

    @property
    def config(self) -> Any:
        """The configuration that the call gets; None without an answer."""
        return self.selection.config if isinstance(self.selection, Selection) else None

    def __repr__(self) -> str:
        found = self.selection
        answer = f"{found.config!r} from {found.source}" if isinstance(found, Selection) else "no configuration"
        return clean(f"<Explanation of {self.problem.op}: {answer}; print it for the reasons>")

    def __str__(self) -> str:
        return on_screen(self.lines())

    def lines(self) -> list[ExplanationLine]:
        """Return the explanation line by line."""
        title = ExplanationLine("title", f"{self.problem.op} on {self.problem.device}")
        call = [ExplanationLine("item", line) for line in spell_out(self.problem.call_key, self.arguments)]
        near = [ExplanationLine("item", "; ".join(miss.differences)) for miss in self.near_misses]
        heading = [ExplanationLine("section", "near misses:")] if near else []
        lines = [title, *call, *self._answer(), *self._measured(), *heading, *near]
        # Anybody may have written the texts of a shared book, and people print them on terminals.
        return [line._replace(text=clean_lines(line.text), label=clean(line.label)) for line in lines]

    def _repr_html_(self) -> str:
        from html import escape  # noqa: PLC0415 - 1.5 ms that only notebooks need to pay

        return f"<pre>{escape(str(self))}</pre>"

    @property
    def _names(self) -> tuple[str, ...]:
        """The names of the answer in the order of the space: an encoded configuration has them sorted."""
        if isinstance(self.config, Mapping):
            return tuple(self.config)
        return () if self.record is None else names_in(self.record)

    @property
    def heuristic(self) -> Measurement | None:
        """The measurement of the heuristic's configuration, the one of a call that is not tuned."""
        ranking = () if self.verdict is None else self.verdict.ranking
        measured = (*(ranked.measurement for ranked in ranking), *self.failures)
        return None if self.record is None else heuristic_among(self.record, measured)

    @property
    def gain(self) -> float | None:
        """How many times faster the winner is than the heuristic's configuration; None if that was not measured."""
        return None if self.record is None or self.verdict is None else gain_of(self.record, self.verdict)

    @property
    def failed(self) -> tuple[FailureGroup, ...]:
        """The failures by reason, the most frequent first, and failures on made-up arguments last."""
        return failure_groups(self.failures, partial(_readable, names=self._names))

    def _answer(self) -> Iterable[ExplanationLine]:
        selection, by_hand = self.selection, self.record is not None and has_valid_pin(self.record)
        if isinstance(selection, Selection):
            pin = " (pinned by hand)" if by_hand and selection.event == "cache_hit" else ""
            if self.offline and self.record is not None and self.record.head.origin == "pinned" and not by_hand:
                pin = ", if it is a candidate again; until then the measured winner"
            yield ExplanationLine("answer", f"answer: {selection.config} {_origin(selection)}{pin}")
            if self.offline and self.record is not None and self.record.head.checksum:
                yield item("code", "this is the record in the book; a program whose code has changed tunes anew", 12)
            if selection.trust is not None:
                yield item("trusted", f"as {selection.trust[0]!r}: {selection.trust[1]}", 12)
            if _is_predicted(selection):
                yield item("predicted", str(selection.guess), 12)
            elif selection.guess is not None and selection.trust is None:
                yield item("a guess", str(selection.guess), 12)
            if selection.exploration is not None and "autotune" not in dict(selection.tried):
                yield item("live", str(selection.exploration), 12)
        else:
            yield ExplanationLine("answer", "answer: none")
        if self.shipped_in:
            yield item("shipped in", self.shipped_in, 12)
        for tier, said in selection.tried:
            yield item(tier, f"{said}; the entry is pinned by hand" if by_hand and tier == "pinned" else said, 12)

    def _measured(self) -> Iterable[ExplanationLine]:
        if self.record is not None and self.verdict is not None:
            yield from self._where_and_how(self.record, self.verdict)
            yield from self._chosen(self.record, self.verdict)
        if self.record is not None and self.so_far:
            yield from _so_far(self.record, self.so_far, self._names)
        for failed in self.failed:
            label = "note" if failed.made_up else "failed"
            if len(failed.configs) == 1:
                yield item(label, f"{failed.configs[0]}  {failed.reason}")
            else:
                yield item(label, f"{failed.counted}: {_some(failed.configs)}")

    def _where_and_how(self, record: Record, verdict: Verdict) -> Iterable[ExplanationLine]:
        facts = record.body.provenance
        winner = verdict.winner.measurement
        where = f"{facts.get('host', '?')} under {_versions(winner.environment)}"
        yield ExplanationLine("section", f"measured {day_text(winner.when or facts.get('when'))} on {where}")
        if self.differences:
            yield item("changed", "; ".join(self.differences))
        ran, seconds = facts.get("ran"), facts.get("seconds")
        failed = sum(m.values_from == winner.values_from for m in self.failures)
        count = f"; {ran} {'tried' if failed else 'measured'}" if isinstance(ran, int) else ""
        took = f" in {seconds_text(seconds)}" if count and isinstance(seconds, (int, float)) else ""
        before = len(verdict.ranking) + failed - ran if isinstance(ran, int) else 0
        took += f"; {before} known from before" if before > 0 else ""
        lost = f"; {failed} failed" if failed else ""
        yield item("how", f"{winner.policy or 'unknown'}{count}{took}{lost}")
        values_from = values_of(record.body)
        if values_from is not None or winner.values_from != "call":  # older records do not say
            yield item("on", MADE_UP.get(winner.values_from, winner.values_from))
        if (at := measured_at(facts)) is not None:
            yield item("at", str(at))
        if self.unwritten:
            yield item("kept", "in this process only: no book has this tuning")
        if isinstance(left_out := facts.get("not_tried"), list):
            configs = tuple(_readable(config, self._names) for config in left_out)
            named, why = f": {_some(configs)}", f"; {facts.get('why_not_tried')}"
            named = f" that the times of others called slower{named}" if facts.get("live") else named + why
            yield item("not tried", f"{len(configs)}{named}")

    def _ranked(self, ranked: Ranked) -> str:
        m, samples = ranked.measurement, sorted(ranked.measurement.valid_samples_s)
        more = f" (to {seconds_text(samples[-1])} in {len(samples)} samples)" if len(samples) > 1 else " (1 sample)"
        former = ", not a candidate any more" if m.fingerprint in self.former else ""
        return f"{seconds_text(ranked.value_s)}{more}  {_readable(m.config, self._names)}{former}"

    def _chosen(self, record: Record, verdict: Verdict) -> Iterable[ExplanationLine]:
        body = record.body
        facts = body.provenance
        yield item("winner", self._ranked(verdict.winner))
        same = [r for r in verdict.ranking if r is not verdict.winner and _is_same_program(r, verdict.winner)]
        # By their times alone: the ranking puts candidates that were eliminated behind the others.
        others = [r for r in verdict.ranking if r is not verdict.winner and r not in same]
        others.sort(key=lambda ranked: ranked.value_s)
        if others:
            yield item("runner-up", f"{self._ranked(others[0])}  {_beside(others, verdict.winner)}")
            if others[1:]:
                slowest = ratio_text(others[-1].value_s / verdict.winner.value_s)
                yield item("slowest", f"{self._ranked(others[-1])}  {slowest}")
            yield from spread_of(verdict.winner, others[0])
        if (heuristic := beside_heuristic(record, verdict, self.failures)) is not None:
            yield item("heuristic", heuristic)
        if record.head.origin == "pinned":
            beside = pin_beside(record, verdict)
            yield item("pinned", f"by hand: {_readable(record.head.config, self._names)}{beside}")
        else:
            name = verdict.objective
            by = "" if name == "typical" else f" by {name}" if name in OBJECTIVES else " by the kernel's own objective"
            yield item("chosen as", _rule(verdict, by, len(same)))
        alike = [r for r in verdict.tied if r is not verdict.winner and r not in same]
        for label, ranked in (("identical", same), ("as good", alike)):
            if ranked:
                about = "compiled to the same program: " if ranked is same else ""
                yield item(label, about + _some([_readable(r.measurement.config, self._names) for r in ranked]))
        for environment in environments_verified(body):
            there = verdict.winner.measurement.environment
            under = "with the same versions" if environment == there else f"under {_versions(environment)}"
            yield item("verified", f"the finalists were measured again; the other times are from before, {under}")
        if facts.get("complete") is False:
            yield ExplanationLine("item", "the budget ended this tuning: the best so far stands")
        if disturbances := "; ".join(disturbances_of(body)):
            yield item("disturbed", f"{disturbances}. On a quiet machine, measure anew: {tune_again(record.head)}")


def _is_predicted(selection: Selection[Any]) -> bool:
    from tunebook.search._prediction import Prediction  # noqa: PLC0415 - loaded late: few policies ask

    return isinstance(selection.guess, Prediction)


def _origin(selection: Selection[Any]) -> str:
    """Return where an answer is from."""
    if selection.would_tune:
        return f"from {selection.source}, but the call would be tuned now"
    return "from a prediction" if _is_predicted(selection) else f"from {selection.source}"


def _so_far(record: Record, measured: Sequence[Measurement], names: Sequence[str]) -> Iterator[ExplanationLine]:
    """Yield the measurements of a tuning that was interrupted: nothing is chosen, and the fastest may yet lose."""
    host = f" on {record.body.provenance.get('host', '?')}" if is_interrupted(record) else ""
    yield ExplanationLine("section", f"interrupted {day_text(max(m.when for m in measured))}{host}")
    valid = sorted((min(m.valid_samples_s), _readable(m.config, names)) for m in measured if m.valid_samples_s)
    yield item("so far", f"{len(measured)} candidates measured, {len(measured) - len(valid)} failed")
    if valid:
        yield item("fastest", f"{seconds_text(valid[0][0])}  {valid[0][1]}; the next call decides")


def _versions(environment: str) -> str:
    """Return an environment, which is a JSON object of names and versions, as people write it."""
    versions = versions_of(environment)
    return ", ".join(f"{name} {version}" for name, version in versions.items()) or environment or "unknown versions"


def _readable(config: Json, names: Sequence[str] = ()) -> str:
    """Return an encoded configuration as people write it, in the order of `names` if it has just these."""
    try:
        return readable(config, names)
    except CodecError as error:  # a newer release may have tags that this one does not know
        return f"<{error}>"


def _some(names: Sequence[str]) -> str:
    more = len(names) - _LISTED
    return "; ".join(names[:_LISTED]) + (f"; and {more} more" if more > 0 else "")


def _is_same_program(one: Ranked, other: Ranked) -> bool:
    """Return whether two candidates were compiled to the same program, which was measured once."""
    program = one.measurement.extra.get(PROGRAM)
    return program is not None and program == other.measurement.extra.get(PROGRAM)


def _rule(verdict: Verdict, by: str, same: int) -> str:
    """Return why the winner won, in words; `by` names the objective, if it is not the usual one.

    `same` candidates beside the winner are the same program.
    """
    many, rule, among = len(verdict.tied), f"{verdict.rule}{by}", f"within {verdict.band:.1%}"
    if same and many == same + 1 and rule.startswith("tie, "):
        return f"fastest{by}; of the {many} configurations of this program: {verdict.rule.removeprefix('tie, ')}"
    if many > 1 and rule.startswith("tie, "):
        return f"one of {many} that are equally fast, {among}: {rule.removeprefix('tie, ')}"
    return rule if many == 1 else f"{rule}; {many - 1} more {'is' if many == 2 else 'are'} as fast, {among}"


def _beside(others: Sequence[Ranked], winner: Ranked) -> str:
    """Return the time of the runner-up, the first of the others, as a multiple of the winner's.

    If it left the race before another did, it says so: rankings put that one first.
    """
    factor, m = others[0].value_s / winner.value_s, others[0].measurement
    stayed = any(not other.measurement.dropped for other in others)
    early = f", {eliminated_after(m)}" if m.dropped and (stayed or factor < 1) else ""
    since = ": the best was faster then, and the machine has become slower since" if early and factor < 1 else ""
    return f"{ratio_text(factor)}{early}{since}"


# ------------------------------------------------------------------------------------------------------ explanations


def explain_call(
    selector: ConfigSelectorChain[Any], inv: Invocation[Any, Any], kernel: Kernel[Any, Any]
) -> Explanation:
    """Explain a call without running or tuning anything."""
    selection = selector.preview(inv, kernel)
    problem = selection.problem
    here = kernel.environment(inv)
    others: list[tuple[Problem, str]] = []
    record, shipped = None, ""
    if selector.persistent is not None:
        from tunebook.stores._listing import Catalogue  # noqa: PLC0415 - only explanations list a book

        record, shipped = selector.persistent.read(problem), selector.persistent.shipped_in(problem)
        others = _entries(Catalogue(selector.persistent.store), problem.op)
        others += [(known, "") for known in selector.cache.keys()]  # noqa: SIM118 - no dict
    if (unwritten := selector.unwritten(problem)) is not None:
        record, shipped = record_of_tuning(unwritten), ""
    record = None if record is None else _beside_heuristic_of_now(record, inv, kernel)
    body, code = Body() if record is None else record.body, kernel.code_checksum
    conditions = () if record is None or is_interrupted(record) else (code, here)
    so_far = [] if record is None else measured_so_far(record, *conditions)
    measured = [m for m in of_candidates(body) if (m.code, m.environment) == (code, here)]
    chosen = [] if so_far and not measured else measured_for_choice(body, measured or None)
    explained = _explained(selection, record, chosen, here, others, so_far)
    winner = None if explained.verdict is None else explained.verdict.winner.measurement
    since = "the kernel, or a function that it uses, was edited since"
    edited = (since,) if winner and winner.code not in ("", code) else ()
    return replace(
        explained,
        shipped_in=shipped,
        differences=(*explained.differences, *edited),
        arguments=tuple(getattr(kernel, "parameters", ())),
        former=_former(selector, inv, kernel, explained),
        unwritten=unwritten is not None,
    )


def _beside_heuristic_of_now(record: Record, inv: Invocation[Any, Any], kernel: Kernel[Any, Any]) -> Record:
    """Return the record, whose gain is over the heuristic's present configuration, if that was measured."""
    body = record.body
    with Attempt():  # an author's heuristic may raise; then the heuristic of the tuning is named
        default = fingerprint(kernel.baseline(inv))
        if default != body.provenance.get("default") and any(m.fingerprint == default for m in body.measurements):
            return record.replace(body=replace(body, provenance={**body.provenance, "default": default}))
    return record


def _former(
    selector: ConfigSelectorChain[Any], inv: Invocation[Any, Any], kernel: Kernel[Any, Any], explained: Explanation
) -> frozenset[str]:
    """Return the measured configurations that are not candidates any more."""
    record, verdict = explained.record, explained.verdict
    if record is None or verdict is None or record.head.checksum in ("", kernel.checksum(inv)):
        return frozenset()
    measured = {r.measurement.fingerprint: r.measurement.config for r in verdict.ranking}
    call = selector.request(inv, kernel, explained.problem, silent=True)
    return frozenset(measured) - EntryGuard(selector.persistent).members(call, measured).keys()


def explain_entry(catalogue: Catalogue, problem: Problem, record: Record | None, shipped_in: str = "") -> Explanation:
    """Explain a problem and its record in a book without the program: the answer that a new process would find."""
    body = Body() if record is None else record.body
    here = "" if record is None else environment_here(record.head.environment)
    outdated = () if record is None else versions_differ(record.head.environment, here)
    selection = select_offline(OfflineEntry(problem, record, catalogue.store.where, outdated))
    if isinstance(selection, Selection) and record is not None and selection.source != "pinned":
        selection = selection._replace(config=_named(record.head.config, names_in(record)))
    so_far = [] if record is None else measured_so_far(record)
    others = _entries(catalogue, problem.op)
    explained = _explained(selection, record, measured_for_choice(body), here, others, so_far)
    return replace(explained, shipped_in=shipped_in, offline=True)


def _explained(
    selection: Selection[Any] | NoSelection,
    record: Record | None,
    measured: Sequence[Measurement],
    here: str,
    others: Iterable[tuple[Problem, str]],
    so_far: Sequence[Measurement],
) -> Explanation:
    verdict = None if record is None or is_interrupted(record) else verdict_of(record, measured)
    there = "" if verdict is None else verdict.winner.measurement.environment
    shown = [*measured, *(m for m in so_far if m not in measured)]
    noted = () if record is None else notes_beside(shown, record.body.measurements)
    problem, misses = selection.problem, dict[object, NearMiss]()
    for other, environment in others:
        if other.op == problem.op and other != problem and other not in misses:
            device = [] if other.device == problem.device else [f"device {other.device} here {problem.device}"]
            keys = explain_difference(other.call_key, problem.call_key)
            misses[other] = NearMiss(other, (*device, *keys, *versions_differ(environment, here)))
    here_key = problem.call_key
    known = isinstance(selection, Selection) and selection.event == "cache_hit"
    nearest = [] if known else sorted(misses.values(), key=lambda miss: _nearness(miss, here_key))[:_NEAREST]
    return Explanation(
        problem=problem,
        selection=selection,
        record=record,
        verdict=verdict,
        failures=tuple(m for m in (*shown, *noted) if m.failure is not None),
        near_misses=tuple(nearest),
        environment=here,
        differences=versions_differ(there, here),
        so_far=tuple(so_far),
    )


def _nearness(miss: NearMiss, call_key: str) -> tuple[int, float, Problem]:
    from tunebook.search._warm_start import distance  # noqa: PLC0415 - for near misses alone

    return len(miss.differences), distance(miss.problem.call_key, call_key), miss.problem


def _named(config: Json, names: Sequence[str]) -> object:
    from tunebook._space.space import Config  # noqa: PLC0415 - loaded late: without the program only

    try:
        plain = decode(config)
    except CodecError:
        return _readable(config)
    named = isinstance(plain, dict) and all(isinstance(name, str) and name.isidentifier() for name in plain)
    if not named:
        return plain
    return Config(**{name: plain[name] for name in names} if plain.keys() == set(names) else plain)


def _entries(catalogue: Catalogue, op: str) -> list[tuple[Problem, str]]:
    """Return problems of a kernel that have a configuration, with the environment of each; of very many, some."""
    try:
        listed = list(catalogue.some(op, _COMPARED))
    except StoreError:
        return []  # the lookup has warned about it
    heads = [record.head for entry in listed if (record := entry.record()) is not None]
    return [(head.problem, head.environment) for head in heads if head.decided]
