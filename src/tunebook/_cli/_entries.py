"""Find entries by id or kernel, and show them."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tunebook._base.config_codec import decode, fingerprint_of, readable
from tunebook._base.errors import CodecError, clean
from tunebook._base.record_format import decode_json
from tunebook._cli._filters import Filters, filters_of
from tunebook._cli._terminal import TextColumn
from tunebook._cli._verb import Namespace, NotFound, Terminal, UsageError
from tunebook._keys.call_key import in_short
from tunebook._selection.recorded_decision import is_interrupted, names_in, origin_of, verdict_of
from tunebook.stores import problem_id
from tunebook.stores._listing import newest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tunebook._base.record_format import Record
    from tunebook._base.vocabulary import Json, Problem
    from tunebook.stores._listing import Catalogue, EntryGroup, Listed

SHORT_ID: Final = 8
ID: Final = TextColumn("id", style="cyan")
KERNEL: Final = TextColumn("kernel", give=2, style="bold", keeps_end=True)
_FEWEST_DIGITS: Final = 3  # of an id on the command line
_NAMED: Final = 10  # entries or kernels that a message names before "and 12 more"


class NamedEntries(NamedTuple):
    """The entries that match a word: some by their id, or all entries of a kernel."""

    groups: tuple[EntryGroup, ...] = ()
    listed: tuple[Listed, ...] = ()

    @property
    def total(self) -> int:
        return len(self.listed) or sum(len(group.ids) for group in self.groups)

    def newest(self, count: int) -> list[Listed]:
        """Return the entries that were written last."""
        return list(self.listed[:count]) or newest(self.groups, count)

    def all(self) -> list[Listed]:
        """Return all entries."""
        return self.newest(self.total)


def find(catalogue: Catalogue, word: str, filters: Filters) -> NamedEntries:
    """Return the entries that match a word: the first digits of an id, else the name of a kernel."""
    if re.fullmatch(rf"[0-9a-f]{{{_FEWEST_DIGITS},32}}", word):
        by_id = [listed for listed in catalogue.find(word) if filters.takes(listed)]
        if by_id:
            return NamedEntries(listed=tuple(sorted(by_id, key=lambda listed: listed.id)))
    if groups := filters._replace(kernel=(word,)).groups(catalogue):
        return NamedEntries(groups=tuple(groups))
    from difflib import get_close_matches  # noqa: PLC0415 - loaded late: 3 ms

    kernels = sorted({group.op for group in filters._replace(kernel=()).groups(catalogue)})
    if not kernels:
        raise NotFound(f"no matching entry in {catalogue.store.where}")
    near = get_close_matches(word, kernels, n=1, cutoff=0.4)
    more = f" and {len(kernels) - _NAMED} more" if len(kernels) > _NAMED else ""
    hint = f"Did you mean {near[0]}?" if near else f"The kernels are: {', '.join(kernels[:_NAMED])}{more}."
    if re.fullmatch(r"[0-9a-f]+", word) and len(word) < _FEWEST_DIGITS:
        hint = f"To name an entry by its id, give at least {_FEWEST_DIGITS} digits. {hint}"
    raise NotFound(f"no entry of {word!r} in {catalogue.store.where}. {hint}")


def find_one(
    catalogue: Catalogue, options: Namespace, word: str | None = None, *, otherwise: str = ""
) -> tuple[Listed, Record]:
    """Return the entry that matches a word, with its record; `UsageError` lists the entries if several match.

    `otherwise` is added to the advice to give an id.
    """
    word = word or options.what
    found = find(catalogue, word, filters_of(options))
    listed = found.newest(_NAMED)
    if found.total > 1:
        shown = ""
        for entry in listed:
            call = "unreadable" if (record := entry.record()) is None else key_text(record.problem.call_key)
            shown += f"\n  {entry.id[:SHORT_ID]}  {clean(entry.op)}  {call}  on {clean(entry.device)}"
        more = f"\n  and {found.total - _NAMED:,} more" if found.total > _NAMED else ""
        devices = {each.device for each in found.listed or found.groups}
        give = f"give an id{', or --device' if len(devices) > 1 else ''}{otherwise}"
        raise UsageError(f"{word!r} matches {found.total:,} entries; {give}:{shown}{more}")
    return listed[0], record_of(listed[0])


def find_newest(catalogue: Catalogue, options: Namespace, terminal: Terminal) -> tuple[Listed, Record]:
    """Return the newest entry that matches, with its record; a note tells if there are more."""
    word = options.what
    found = find(catalogue, word, filters_of(options))
    (listed,) = found.newest(1)
    if found.total > 1:
        others = f"the newest of {found.total:,} entries of {word!r}; `tunebook ls {word}` lists them"
        terminal.note(f"this is {listed.id[:SHORT_ID]}, {others}")
    return listed, record_of(listed)


def record_of(listed: Listed) -> Record:
    """Return the record of an entry; `NotFound` if it cannot be read."""
    record = listed.record()
    if record is None:
        raise NotFound(f"the entry {listed.id} cannot be read; run `tunebook doctor` for details")
    return record


def config_text(config: Json, names: Sequence[str] = ()) -> str:
    """Return a stored configuration as people write it, in the order of `names` if it has just these."""
    if config is None:
        return "no winner"
    try:
        return clean(readable(config, names))
    except CodecError as error:
        return f"unreadable: {error}"


def origin_text(record: Record) -> str:
    """Return the origin of an entry; "failed" if all its candidates did."""
    return origin_of(record) if record.head.decided or is_interrupted(record) else "failed"


def decision_text(record: Record) -> str:
    """Return the configuration of a record as people write it, or why it has none."""
    return origin_of(record) if is_interrupted(record) else config_text(record.head.config, names_in(record))


def key_text(call_key: str) -> str:
    """Return a call key on one line, safe to print."""
    return clean(in_short(call_key))


def named(problem: Problem) -> dict[str, Any]:
    """Return the fields that name a problem, for JSON."""
    names = {"kernel": problem.op, "device": problem.device, "call_key": parsed(problem.call_key)}
    return {"id": problem_id(problem), **names}


def parsed(text: str) -> Any:
    """Return the value of a text that is JSON, else the text: a kernel's own key builder may make keys of any form."""
    try:
        return decode_json(text)  # strict: JSON for programs has no NaN
    except (ValueError, RecursionError):
        return text


def entry_json(listed: Listed, record: Record | None) -> dict[str, Any]:
    """Return an entry as plain JSON: the one form of `ls --json` and `show --json`."""
    found = {"id": listed.id, "kernel": listed.op, "device": listed.device, "written": listed.written_s or None}
    found |= {"bytes": listed.size_bytes, "where": listed.where}
    if record is not None:
        head = record.head
        found |= {"call_key": parsed(head.problem.call_key), "config": plain(head.config)}
        found |= {"origin": origin_text(record), "environment": parsed(head.environment), "seconds": seconds_of(record)}
        found |= {"complete": head.decided and not record.is_unfinished}
    return found


def seconds_of(record: Record) -> float | None:
    """Return the time of the configuration in a record, or None if it was not measured."""
    # A tuning writes a summary: to rank all measurements of 10,000 records takes 20 s.
    summary = record.provenance.get("found") if record.head.origin == "tuned" else None
    if isinstance(summary, dict) and isinstance(best_s := summary.get("best_s"), float) and 0 < best_s < math.inf:
        return best_s
    verdict = verdict_of(record)
    if verdict is None:
        return None
    wanted = fingerprint_of(record.head.config)
    values_s = (r.value_s for r in verdict.ranking if r.measurement.fingerprint == wanted and math.isfinite(r.value_s))
    return next(values_s, None)


def plain(config: Json) -> Any:
    """Return a stored configuration as plain JSON: tuples as lists, classes as their fields."""

    def jsonable(value: Any) -> Any:
        if isinstance(value, dict):
            return {str(name): jsonable(item) for name, item in value.items()}
        if isinstance(value, (list, tuple, set, frozenset)):
            return [jsonable(item) for item in value]
        return value if isinstance(value, (str, int, float, bool)) or value is None else str(value)

    try:
        return jsonable(decode(config))
    except CodecError:
        return config
