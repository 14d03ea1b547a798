"""Records with a configuration chosen by hand, and the way back."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, cast

from tunebook._base.config_codec import encode
from tunebook._base.errors import StoreError
from tunebook._base.record_format import Head, Record
from tunebook._cli._entries import config_text
from tunebook._cli._verb import UsageError
from tunebook._selection.env_pins import fields_of, fits
from tunebook._selection.single_flight import Lease, acquire
from tunebook._selection.trusted_entries import body_of, verdict_of
from tunebook.stores import problem_id

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tunebook._base.vocabulary import Json, Origin, Problem
    from tunebook.stores import Store

# How long to wait for whoever is tuning the problem right now.
_WAIT_S: Final = 10.0
# Of a choice whose kernel is not known here. It matches none, so that the next call decides anew: on what is measured
# already, which costs it nothing.
_NO_CHECKSUM: Final = "unpinned"


@contextmanager
def held(store: Store, problem: Problem) -> Iterator[Record | None]:
    """Keep other processes from tuning a problem meanwhile; gives the record as it is now."""
    lease: object = acquire(store.leases(), problem_id(problem), look=_nothing, deadline_s=_WAIT_S)
    if not isinstance(lease, Lease):
        message = f"{problem.op} is being tuned by another process; try again when that is done"
        raise StoreError("busy", store.where, message)
    with lease:
        yield store.get(problem)


def _nothing() -> None:
    """Find nothing: what others find meanwhile is no reason not to go on."""


def chosen(record: Record, wanted: Mapping[str, str], *, force: bool) -> Json:
    """Return the known candidate that has these values; with `force`, else one that is made of them as written."""
    latest = {m.fingerprint: m for m in sorted(body_of(record).measurements, key=lambda m: m.when)}
    # One that failed would fail every call that gets it.
    known = {fingerprint: m.config for fingerprint, m in latest.items() if force or m.failure is None}
    fitting = [config for config in known.values() if fits(config, wanted)]
    exact = [config for config in fitting if _is_whole(config, wanted)]
    if len(exact or fitting) == 1:
        return (exact or fitting)[0]
    if fitting:
        shown = "".join(f"\n  {config_text(config)}" for config in islice(fitting, 8))
        raise UsageError(f"{len(fitting)} candidates have these values; name more of them:{shown}")
    if force or not latest:
        return encode({name: _literal(value) for name, value in wanted.items()})
    asked = ", ".join(f"{name}={value}" for name, value in wanted.items())
    shown = "".join(f"\n  {config_text(config)}" for config in islice(known.values(), 8))
    more = f"\n  and {len(known) - 8} more" if len(known) > 8 else ""
    raise UsageError(f"no candidate that ran has {asked}. There are:{shown}{more}\nUse --force to pin it anyway.")


def _is_whole(config: Json, wanted: Mapping[str, str]) -> bool:
    """Whether nothing of a configuration was left unsaid."""
    return len([value for value in fields_of(config).values() if not isinstance(value, dict)]) == len(wanted)


def _literal(text: str) -> Any:
    from ast import literal_eval  # noqa: PLC0415 - for values that nothing known has

    try:
        return literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def pinned(record: Record, config: Json) -> Record:
    """Return a record with a configuration chosen by hand; it holds for any code and version."""
    head, body = record.head, body_of(record)
    facts = dict(body.provenance)
    if head.origin != "pinned" and head.decided:
        facts["instead_of"] = {
            "config": head.config,
            "origin": head.origin,
            "checksum": head.checksum,
            "environment": head.environment,
        }
    # Merging prefers the later of two pins by this.
    facts |= {"when": time.time(), "measured": facts.get("measured", facts.get("when"))}
    new = replace(head, config=config, origin="pinned", checksum="", environment="")
    return Record(new, replace(body, provenance=facts))


def unpinned(record: Record) -> Record | None:
    """Return a record with the winner of its measurements, else with what was pinned over; None if there is neither."""
    head, body = record.head, body_of(record)
    facts = dict(body.provenance)
    before = facts.pop("instead_of", None)
    earlier = before if isinstance(before, dict) else {}
    measured = facts.pop("measured", None)
    if measured is not None:
        facts["when"] = measured
    verdict = verdict_of(record)
    if verdict is None:
        back = _as_before(head, earlier)
    else:
        winner = verdict.winner.measurement
        same = winner.config == earlier.get("config") and winner.environment == earlier.get("environment")
        checksum = str(earlier.get("checksum")) if same else _NO_CHECKSUM
        back = replace(head, config=winner.config, origin="tuned", checksum=checksum, environment=winner.environment)
    return None if back is None else Record(back, replace(body, provenance=facts))


def _as_before(head: Head, earlier: Mapping[str, Json]) -> Head | None:
    if "config" not in earlier:
        return None
    origin = cast("Origin", earlier.get("origin"))
    checksum, environment = str(earlier.get("checksum", "")), str(earlier.get("environment", ""))
    return replace(head, config=earlier["config"], origin=origin, checksum=checksum, environment=environment)
