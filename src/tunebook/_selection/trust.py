"""The ladder of trust: which entries may answer, although they were not made for this very call in this environment.

A miss climbs the ladder as far as it is allowed to, and takes the first entry whose configuration the kernel still has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, TypeVar, get_args

from tunebook._arrays.device_families import family_of
from tunebook._base.errors import CodecError
from tunebook._base.vocabulary import Trust
from tunebook._selection.trusted_entries import Trusted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tunebook._base.record_format import Record
    from tunebook._selection.trusted_entries import EntryGuard, Refused
    from tunebook._tuning.job import Call
    from tunebook.search import Nearest

C = TypeVar("C")

_ORDER: Final[tuple[Trust, ...]] = get_args(Trust)
_REASONS: Final[dict[Trust, str]] = {
    "versions": "it was made under {environment}",
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


def climb(book: EntryGuard[C], call: Call[C], entry: Refused[C], reach: Trust) -> Climbed[C] | None:
    """Return the answer of the lowest rung above "exact" that has one, up to `reach`; None if there is no such."""
    highest = _ORDER.index(reach)
    for rung, config, facts in _answers(book, call, entry, highest):
        if _ORDER.index(rung) <= highest:
            return Climbed(config, rung, _REASONS[rung].format(**facts), facts.get("guess"))
    return None


def _answers(
    book: EntryGuard[C], call: Call[C], entry: Refused[C], highest: int
) -> Iterator[tuple[Trust, C, dict[str, Any]]]:
    """Yield the answers of the rungs in their order; each is looked for only when it is asked for."""
    own = entry.record
    if own is not None and own.head.decided and (found := _valid(book, call, own)) is not None:
        yield _rung_of(call, entry), found, {"environment": own.head.environment}
    if highest < _ORDER.index("family"):
        return
    records = [r for r in book.records(call.problem.op) if r.head.decided]
    family = family_of(call.problem.device)
    relatives = [r for r in records if family_of(r.head.problem.device) == family]
    for record in sorted(relatives, key=lambda r: _fitness(call, r), reverse=True):
        there = record.head.problem
        elsewhere = there.call_key == call.problem.call_key and there.device != call.problem.device
        if elsewhere and (found := _valid(book, call, record)) is not None:
            yield "family", found, {"device": there.device}
    for rung, those in (("near", relatives), ("any", records)):
        if (near := book.nearest(call, those)) is not None:
            yield rung, near[0], {"guess": near[1]}  # type: ignore[misc] # both are rungs


def _rung_of(call: Call[Any], entry: Refused[Any]) -> Trust:
    if entry.outdated is not None:
        return "versions"
    assert entry.record is not None  # noqa: S101 - for the type checker: the caller has looked
    return "candidates" if entry.record.head.checksum.startswith(f"{call.kernel.code_checksum}-") else "code"


def _fitness(call: Call[Any], record: Record) -> tuple[bool, bool, float]:
    """Return how well an entry of another device fits: the same code first, then the same versions, then the newest."""
    head, when = record.head, record.body.provenance.get("when")
    same_code = head.checksum.startswith(f"{call.kernel.code_checksum}-")
    here = call.kernel.environment(call.inv)
    return same_code, head.environment == here, float(when) if isinstance(when, (int, float)) else 0.0


def _valid(book: EntryGuard[C], call: Call[C], record: Record) -> C | None:
    """Return a record's configuration as a live candidate; None if the kernel does not have it any more."""
    try:
        found = book.match(call, record, call.kernel.checksum(call.inv))
    except CodecError:
        return None
    return found.config if isinstance(found, Trusted) else None
