"""The ladder of trust: which entries may answer, although they were not made for this very call in this environment.

A miss climbs the ladder as far as it is allowed to, and takes the first entry whose configuration the kernel still has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, TypeVar, get_args

from tunebook._arrays.device_families import family_of
from tunebook._base.errors import CodecError, warn_once
from tunebook._base.vocabulary import Trust
from tunebook._selection.recorded_decision import CHECKED_OTHERWISE, HEURISTIC_WAS_REJECTED, has_code
from tunebook._selection.trusted_entries import Trusted

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from tunebook._base.record_format import Record
    from tunebook._selection.trusted_entries import EntryGuard, Refused
    from tunebook._tuning.job import Call
    from tunebook.search import Nearest

C = TypeVar("C")

_ORDER: Final[tuple[Trust, ...]] = get_args(Trust)
_REASONS: Final[dict[Trust, str]] = {
    "versions": "{made}",
    "candidates": "the kernel had other candidates then",
    "code": "the kernel had other code then",
    "family": "it was made on {device}",
    "near": "it was made for another size: {guess}",
    "any": "it was made for another size or device: {guess}",
}


class Climbed(NamedTuple, Generic[C]):
    """An answer of the ladder: its rung, why it is not on a lower one, and the nearest problem if that is guessed."""

    config: C
    rung: Trust
    reason: str
    guess: Nearest | None


def climb(
    book: EntryGuard[C], call: Call[C], entry: Refused[C], reach: Trust, declared: Sequence[Trust] = ()
) -> Climbed[C] | None:
    """Return the answer of the first rung after "exact" that has one; None if no rung up to `reach` has one.

    `declared` rungs may answer too. Of these, "near" is for calls without an entry of their own, which is tuned anew.
    """
    rungs = {*_ORDER[: _ORDER.index(reach) + 1]}
    has_own = entry.record is not None and entry.record.head.decided
    rungs |= {rung for rung in declared if rung != "near" or not has_own}
    for rung, config, facts in _answers(book, call, entry, rungs):
        if rung in rungs:
            return Climbed(config, rung, _REASONS[rung].format(**facts), facts.get("guess"))
    return None


def warn_of_trust(op: str, rung: Trust, reason: str, *, behind: bool) -> None:
    """Warn once for each kernel and rung that an entry answers which was not made for this very call here."""
    here = "To measure it here, run `tunebook verify` or `tunebook tune`"
    warn_once(
        "trust",
        f"{op}:{rung}",
        f"{op}: the answer is from an entry that was not made for exactly this call, trusted as {rung!r}: {reason}. "
        f"{'It is measured behind this call' if behind else here}; to refuse such entries, set "
        "TUNEBOOK_TRUST=exact",
    )


def _answers(
    book: EntryGuard[C], call: Call[C], entry: Refused[C], rungs: Collection[Trust]
) -> Iterator[tuple[Trust, C, dict[str, Any]]]:
    """Yield the answers of the rungs in their order. Other entries are read only for rungs that need them."""
    own = entry.record
    if own is not None and own.head.decided and (found := _valid(book, call, own)) is not None:
        outdated = entry.outdated is not None or entry.reason == HEURISTIC_WAS_REJECTED
        same_code = has_code(own.head, call.kernel.code_checksum)
        rung: Trust = "versions" if outdated else "candidates" if same_code else "code"
        same = own.head.environment in ("", call.kernel.environment(call.inv))
        checked = entry.reason if entry.reason == HEURISTIC_WAS_REJECTED else CHECKED_OTHERWISE
        yield rung, found, {"made": checked if same else f"it was made under {own.head.environment}"}
    if "family" not in rungs and "near" not in rungs:
        return
    records = [r for r in book.records(call.problem.op) if r.head.decided]
    family_in_reach: Callable[[str], str] = family_of if "family" in rungs else str
    family = family_in_reach(call.problem.device)
    devices = {device for device in {r.problem.device for r in records} if family_in_reach(device) == family}
    relatives = [r for r in records if r.problem.device in devices]
    here = call.problem
    same_call = [r for r in relatives if r.problem.call_key == here.call_key and r.problem.device != here.device]
    for record in sorted(same_call, key=lambda r: _fitness(call, r), reverse=True):
        if (found := _valid(book, call, record)) is not None:
            yield "family", found, {"device": record.problem.device}
    nearby: tuple[tuple[Trust, list[Record]], ...] = ("near", relatives), ("any", records)
    for rung, those in nearby:
        if rung in rungs and (near := book.nearest(call, those)) is not None:
            yield rung, near[0], {"guess": near[1]}


def _fitness(call: Call[Any], record: Record) -> tuple[bool, bool, float]:
    """Return how well an entry of another device fits: the same code first, then the same versions, then the newest."""
    head, when = record.head, record.body.provenance.get("when")
    here = call.kernel.environment(call.inv)
    when_s = float(when) if isinstance(when, (int, float)) else 0.0
    return has_code(head, call.kernel.code_checksum), head.environment == here, when_s


def _valid(book: EntryGuard[C], call: Call[C], record: Record) -> C | None:
    """Return a record's configuration as a live candidate; None if the kernel does not have it any more."""
    try:
        found = book.match(call, record, call.kernel.checksum(call.inv))
    except CodecError:
        return None
    return found.config if isinstance(found, Trusted) else None
