"""Answers for sizes that were never tuned, by models of times that learn from entries by degrees of trust."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Generic, NamedTuple, TypeVar, get_args

from tunebook._arrays.device_families import family_of
from tunebook._arrays.device_properties import likeness
from tunebook._base.config_codec import fingerprint_of
from tunebook._base.errors import CodecError, MissingDependency, warn_once
from tunebook._base.vocabulary import Trust
from tunebook._selection.recorded_decision import has_code
from tunebook._space.space import Space
from tunebook._tuning.plan import RACED_WHOLE
from tunebook.search._prediction import Prediction, predict
from tunebook.search._size_model import FEWEST

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from tunebook._base.record_format import Record
    from tunebook._base.vocabulary import Json
    from tunebook._selection.trusted_entries import EntryGuard
    from tunebook._tuning.job import Call

C = TypeVar("C")

_ORDER: Final[tuple[Trust, ...]] = get_args(Trust)
# Candidates that are worth trying are measured before one is chosen, so that entries of other versions and devices may
# name them. Other code may be another algorithm.
_ALIKE: Final[frozenset[Trust]] = frozenset({"exact", "versions", "family"})


class TrustedPrediction(NamedTuple, Generic[C]):
    """Candidates that are worth trying, the likeliest first; the prediction, and the trust that it takes."""

    candidates: list[C]
    prediction: Prediction
    rung: Trust
    reason: str


def sure_prediction(
    book: EntryGuard[C], call: Call[C], reach: Trust, regret_limit: float
) -> TrustedPrediction[C] | None:
    """Return the prediction of the most trusted entries whose regret has a bound within the limit."""
    found = _predictions(book, call, _ORDER[: _ORDER.index(reach) + 1])
    return next((each for each in found if each.prediction.bound <= regret_limit), None)


def why_unsure(book: EntryGuard[C], call: Call[C], reach: Trust, regret_limit: float) -> str:
    """Return why no prediction answers a call, as the end of a sentence; "" if one does, or none is asked for."""
    found = list(_predictions(book, call, _ORDER[: _ORDER.index(reach) + 1]))
    if call.kernel.table is not None or any(each.prediction.bound <= regret_limit for each in found):
        return ""
    if not found:
        return "; predict: no other size of such a call is tuned"
    said = found[0].prediction
    limit = f"; policy.regret_limit is {regret_limit:g}" if math.isfinite(said.bound) else ""
    return f"; predict: {said}{limit}"


def worth_trying(book: EntryGuard[C], call: Call[C], candidates: Sequence[C]) -> Sequence[C]:
    """Return the candidates that a model of times calls worth trying, and those that it knows too little about.

    All candidates while there is no model.
    """
    most: TrustedPrediction[C] | None = None
    for each in _predictions(book, call, _ALIKE):
        if most is None or each.prediction.problems > most.prediction.problems:
            most = each
        if most.prediction.problems >= FEWEST:
            break
    if most is None:
        return candidates
    own = _by_fingerprint(book, candidates)
    likeliest = _by_fingerprint(book, most.candidates)
    return [own[key] for key in dict.fromkeys([*likeliest, *most.prediction.also]) if key in own]


def _predictions(book: EntryGuard[C], call: Call[C], rungs: Collection[Trust]) -> Iterator[TrustedPrediction[C]]:
    """Yield predictions for a call, by the most trusted entries first; none for a table of the author's."""
    listed: dict[str, C] = {}
    before: list[Record] = []
    for rung, device, reason, records in _groups(book, call) if call.kernel.table is None else ():
        if rung not in rungs or not records or records == before:
            continue
        before, listed, members = records, listed or _listed(book, call), dict[str, C]()

        def among(
            configs: Mapping[str, Json], members: dict[str, C] = members, own: dict[str, C] = listed
        ) -> dict[str, C]:
            members.update(own or book.members(call, configs))
            return members

        try:
            found = predict(records, call.problem._replace(device=device), among, listed)
        except MissingDependency as error:
            warn_once("predict", call.problem.op, f"{call.problem.op}: {error}. Its calls are tuned instead")
            return
        except (ArithmeticError, LookupError, ValueError) as error:  # a singular matrix is a ValueError
            failed = f"{call.problem.op}: the model of its times failed ({type(error).__name__}: {error})"
            warn_once("predict", call.problem.op, f"{failed}. Its calls are tuned instead")
            return
        if found is not None:
            chosen = [members[fingerprint_of(config)] for config in found.worth_trying]
            yield TrustedPrediction(chosen, found, rung, reason)


def _listed(book: EntryGuard[C], call: Call[C]) -> dict[str, C]:
    """Return all candidates by fingerprint; empty if they are searched."""
    candidates, heuristic = call.kernel.candidates(call.inv), call.kernel.heuristic(call.inv)
    if isinstance(candidates, Space) and candidates.size > RACED_WHOLE:
        return {}
    return _by_fingerprint(book, [*candidates, *([] if heuristic is None else [heuristic])])


def _by_fingerprint(book: EntryGuard[C], configs: Iterable[C]) -> dict[str, C]:
    found = {}
    for config in configs:
        with suppress(CodecError):  # it cannot be in the book
            found[fingerprint_of(book.persistent.encode(config))] = config
    return found


def _groups(book: EntryGuard[C], call: Call[C]) -> Iterator[tuple[Trust, str, str, list[Record]]]:
    """Yield entries that a model may learn from: how far to trust it, their device, the reason, and the entries."""
    here, environment = call.problem.device, call.kernel.environment(call.inv)
    listed = [r for r in book.records(call.problem.op) if r.head.decided]
    same_code = [r for r in listed if has_code(r.head, call.kernel.code_checksum)]
    own = [r for r in same_code if r.problem.device == here]
    yield "exact", here, "", [r for r in own if r.head.environment == environment]
    yield "versions", here, "it is learnt from entries that were made under other versions", own
    changed = "it is learnt from entries that were made when the kernel had other code"
    yield "code", here, changed, [r for r in listed if r.problem.device == here]
    family = family_of(here)
    others = {r.problem.device for r in same_code} - {here}
    for device in sorted(others, key=lambda device: (-(likeness(device, here) or 0.0), device)):
        if family_of(device) == family:
            on_it = [r for r in same_code if r.problem.device == device]
            yield "family", device, f"it is learnt from entries that were made on {device}", on_it
