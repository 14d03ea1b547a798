"""Entries as verbs find and show them."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tunebook._base.config_codec import decode, readable
from tunebook._base.errors import CodecError
from tunebook._cli._terminal import clean
from tunebook._cli._verb import NotFound, UsageError
from tunebook._keys.call_key import spell_out
from tunebook.stores._listing import newest

if TYPE_CHECKING:
    from tunebook._base.record_format import Record
    from tunebook._base.vocabulary import Json
    from tunebook._cli._filters import Filters
    from tunebook._cli._terminal import Terminal
    from tunebook.stores._listing import Catalogue, EntryGroup, Listed

SHORT_ID: Final = 8
_NAMED: Final = 10  # entries that a message names before "and 12 more"
_ID: Final = re.compile(r"[0-9a-f]{4,32}")


class NamedEntries(NamedTuple):
    """What a word means: some entries by id, or all of a kernel's."""

    groups: tuple[EntryGroup, ...] = ()
    listed: tuple[Listed, ...] = ()

    @property
    def total(self) -> int:
        """How many entries there are."""
        return len(self.listed) or sum(len(group.ids) for group in self.groups)

    def newest(self, count: int) -> list[Listed]:
        """Return the last written of them."""
        return list(self.listed[:count]) or newest(self.groups, count)


def find(catalogue: Catalogue, what: str, filters: Filters) -> NamedEntries:
    """Return the entries that a word means: the beginning of an id, else the name of a kernel."""
    if _ID.fullmatch(what):
        by_id = [listed for listed in catalogue.find(what) if filters.takes(listed)]
        if by_id:
            return NamedEntries(listed=tuple(sorted(by_id, key=lambda listed: listed.id)))
    groups = filters._replace(kernel=what).groups(catalogue)
    if not groups:
        raise NotFound(_nothing_like(catalogue, what, filters))
    return NamedEntries(groups=tuple(groups))


def find_one(catalogue: Catalogue, what: str, filters: Filters) -> tuple[Listed, Record]:
    """Return the one entry that a word means, with its record; of several, `UsageError` lists them."""
    found = find(catalogue, what, filters)
    listed = found.newest(_NAMED)
    if found.total > 1:
        shown = "".join(f"\n  {entry.id[:SHORT_ID]}  {_which(entry)}" for entry in listed)
        more = f"\n  and {found.total - _NAMED:,} more" if found.total > _NAMED else ""
        raise UsageError(f"{what!r} means {found.total:,} entries; say which by its id, or with --device:{shown}{more}")
    return listed[0], record_of(listed[0])


def _which(entry: Listed) -> str:
    """Return what tells an entry from the others of its kernel."""
    record = entry.record()
    call = "unreadable" if record is None else key_text(record.problem.call_key)
    return f"{clean(entry.op)}  {call}  on {clean(entry.device)}"


def find_newest(catalogue: Catalogue, what: str, filters: Filters, terminal: Terminal) -> tuple[Listed, Record]:
    """Return the newest entry that a word means, and say so if there are more."""
    found = find(catalogue, what, filters)
    (listed,) = found.newest(1)
    if found.total > 1:
        others = f"the newest of {found.total:,} entries of {what!r}; `tunebook ls --kernel {what}` lists them"
        terminal.note(f"this is {listed.id[:SHORT_ID]}, {others}")
    return listed, record_of(listed)


def record_of(listed: Listed) -> Record:
    """Return the record of an entry that must be readable."""
    record = listed.record()
    if record is None:
        raise NotFound(f"the entry {listed.id} cannot be read; `tunebook doctor` says more")
    return record


def _nothing_like(catalogue: Catalogue, what: str, filters: Filters) -> str:
    from difflib import get_close_matches  # noqa: PLC0415 - 3 ms for a mistake only

    kernels = sorted({group.op for group in filters._replace(kernel=None).groups(catalogue)})
    if not kernels:
        return f"nothing is tuned yet in {catalogue.store.where}, or nothing that fits"
    near = get_close_matches(what, kernels, n=1, cutoff=0.4)
    hint = f"Did you mean {near[0]}?" if near else f"There are: {', '.join(kernels[:8])}."
    return f"no entry of {what!r} in {catalogue.store.where}. {hint}"


def config_text(config: Json) -> str:
    """Return a stored configuration as people write it."""
    if config is None:
        return "none: all failed"
    try:
        return clean(readable(config))
    except CodecError as error:
        return f"unreadable: {error}"


def key_text(call_key: str) -> str:
    """Return a call key on one line, without what is the same in nearly all: libraries, layouts, platforms.

    >>> key_text('{"a":{"$array":["numpy","float32",[512,"~64"],"C","cpu"]},"causal":true}')
    'a=float32[512,~64] causal=True'
    """
    try:
        arguments = json.loads(call_key)
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        return clean(call_key)  # a kernel's own key builder may make keys of any form
    spelt = dict(zip(arguments, spell_out(call_key), strict=True))
    return clean(" ".join(f"{name}={_brief(value, spelt[name])}" for name, value in arguments.items()))


def _brief(value: Any, spelt: str) -> str:
    match value:
        case {"$array": [_, dtype, list(shape), *_]}:
            return f"{dtype}[{','.join(map(str, shape))}]"
        case _:
            return spelt.partition(": ")[2]


class EntryRow(NamedTuple):
    """What a listing shows of an entry."""

    id: str
    kernel: str
    device: str
    key: str
    config: str
    origin: str
    seconds: float | None


def row_of(listed: Listed) -> EntryRow:
    """Return what a listing shows; what cannot be read says so."""
    record = listed.record()
    if record is None:
        return EntryRow(listed.id, clean(listed.op), clean(listed.device), "unreadable", "", "", None)
    return EntryRow(
        listed.id,
        clean(listed.op),
        clean(listed.device),
        key_text(record.problem.call_key),
        config_text(record.head.config),
        record.head.origin,
        seconds_of(record),
    )


def seconds_of(record: Record) -> float | None:
    """Return the time of the configuration in a record, where it was measured."""
    from tunebook._base.config_codec import fingerprint_of  # noqa: PLC0415 - as above
    from tunebook._selection.trusted_entries import verdict_of  # noqa: PLC0415 - listings of names need no decision

    verdict = verdict_of(record)
    if verdict is None:
        return None
    wanted = fingerprint_of(record.head.config)
    return next((r.value_s for r in verdict.ranking if r.measurement.fingerprint == wanted), None)


def as_json(listed: Listed, record: Record | None) -> dict[str, Any]:
    """Return an entry for programs; `config` is plain where it can be."""
    found: dict[str, Any] = {
        "id": listed.id,
        "kernel": listed.op,
        "device": listed.device,
        "written": listed.written_s or None,
        "bytes": listed.size_bytes,
        "where": listed.where,
    }
    if record is not None:
        head = record.head
        found |= {"call_key": head.problem.call_key, "config": plain(head.config), "origin": head.origin}
        found |= {"environment": head.environment, "seconds": seconds_of(record)}
    return found


def plain(config: Json) -> Any:
    """Return a stored configuration as plain JSON: tuples as lists, classes as their fields."""
    try:
        return jsonable(decode(config))
    except CodecError:
        return config


def jsonable(value: Any) -> Any:
    """Return a value as JSON has it; what JSON has not, as text."""
    if isinstance(value, dict):
        return {str(name): jsonable(item) for name, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [jsonable(item) for item in value]
    return value if isinstance(value, (str, int, float, bool)) or value is None else str(value)
