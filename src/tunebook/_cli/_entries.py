"""Find entries by id or kernel, and show them."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tunebook._base.config_codec import decode, fingerprint_of, readable
from tunebook._base.errors import CodecError
from tunebook._cli._filters import FILTERS, Filters, add_options, filters_of
from tunebook._cli._terminal import Cell, TextColumn, clean
from tunebook._cli._verb import ArgumentParser, Namespace, NotFound, Terminal, UsageError
from tunebook._keys.call_key import spell_out
from tunebook._selection.trusted_entries import verdict_of
from tunebook._tuning.progress import seconds_text
from tunebook.stores import problem_id
from tunebook.stores._listing import newest

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from tunebook._base.record_format import Record
    from tunebook._base.vocabulary import Json, Problem
    from tunebook.stores._listing import Catalogue, EntryGroup, Listed

SHORT_ID: Final = 8
ID: Final = TextColumn("id", style="cyan")
KERNEL: Final = TextColumn("kernel", give=2, style="bold", keeps_end=True)
_NAMED: Final = 10  # entries that a message names before "and 12 more"
_ID_PATTERN: Final = re.compile(r"[0-9a-f]{4,32}")


# ------------------------------------------------------------------------------------------------------ find entries


def add_entry(parser: ArgumentParser, text: str = "first digits of an id, or a kernel with one entry") -> None:
    """Add the argument that names an entry, and the filters."""
    parser.add_argument("what", metavar="ID_OR_KERNEL", help=text)
    add_options(parser, *FILTERS)


class NamedEntries(NamedTuple):
    """The entries that match a word: some by their id, or all entries of a kernel."""

    groups: tuple[EntryGroup, ...] = ()
    listed: tuple[Listed, ...] = ()

    @property
    def total(self) -> int:
        """The number of entries."""
        return len(self.listed) or sum(len(group.ids) for group in self.groups)

    def newest(self, count: int) -> list[Listed]:
        """Return the entries that were written last."""
        return list(self.listed[:count]) or newest(self.groups, count)


def find(catalogue: Catalogue, word: str, filters: Filters) -> NamedEntries:
    """Return the entries that match a word: the first digits of an id, else the name of a kernel."""
    if _ID_PATTERN.fullmatch(word):
        by_id = [listed for listed in catalogue.find(word) if filters.takes(listed)]
        if by_id:
            return NamedEntries(listed=tuple(sorted(by_id, key=lambda listed: listed.id)))
    groups = filters._replace(kernel=word).groups(catalogue)
    if not groups:
        raise NotFound(_not_found(catalogue, word, filters))
    return NamedEntries(groups=tuple(groups))


def find_one(catalogue: Catalogue, options: Namespace, word: str | None = None) -> tuple[Listed, Record]:
    """Return the entry that matches a word, with its record; `UsageError` lists the entries if several match."""
    word = word or options.what
    found = find(catalogue, word, filters_of(options))
    listed = found.newest(_NAMED)
    if found.total > 1:
        shown = "".join(f"\n  {entry.id[:SHORT_ID]}  {clean(entry.op)}  {_call_of(entry)}" for entry in listed)
        more = f"\n  and {found.total - _NAMED:,} more" if found.total > _NAMED else ""
        raise UsageError(f"{word!r} matches {found.total:,} entries; give an id, or --device:{shown}{more}")
    return listed[0], _record_of(listed[0])


def _call_of(entry: Listed) -> str:
    record = entry.record()
    return f"{'unreadable' if record is None else key_text(record.problem.call_key)}  on {clean(entry.device)}"


def find_newest(catalogue: Catalogue, options: Namespace, terminal: Terminal) -> tuple[Listed, Record]:
    """Return the newest entry that matches, with its record; a note tells if there are more."""
    word = options.what
    found = find(catalogue, word, filters_of(options))
    (listed,) = found.newest(1)
    if found.total > 1:
        others = f"the newest of {found.total:,} entries of {word!r}; `tunebook ls --kernel {word}` lists them"
        terminal.note(f"this is {listed.id[:SHORT_ID]}, {others}")
    return listed, _record_of(listed)


def _record_of(listed: Listed) -> Record:
    record = listed.record()
    if record is None:
        raise NotFound(f"the entry {listed.id} cannot be read; run `tunebook doctor` for details")
    return record


def _not_found(catalogue: Catalogue, word: str, filters: Filters) -> str:
    from difflib import get_close_matches  # noqa: PLC0415 - loaded late: 3 ms

    kernels = sorted({group.op for group in filters._replace(kernel=None).groups(catalogue)})
    if not kernels:
        return f"no matching entry in {catalogue.store.where}"
    near = get_close_matches(word, kernels, n=1, cutoff=0.4)
    hint = f"Did you mean {near[0]}?" if near else f"The kernels are: {', '.join(kernels[:8])}."
    return f"no entry of {word!r} in {catalogue.store.where}. {hint}"


# ------------------------------------------------------------------------------------------------------ show entries


def config_text(config: Json) -> str:
    """Return a stored configuration as people write it."""
    if config is None:
        return "none: all failed"
    try:
        return clean(readable(config))
    except CodecError as error:
        return f"unreadable: {error}"


def key_text(call_key: str) -> str:
    """Return a call key on one line, without libraries, layouts and platforms, which are the same in nearly all keys.

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


def results_table(
    results: Iterable[tuple[Problem, str, float, str]], styles: Mapping[str, str], terminal: Terminal
) -> None:
    """Write a table of problems with their status, seconds and detail; `styles` has a style for each status."""
    rows = [
        (
            problem_id(problem)[:SHORT_ID],
            clean(problem.op),
            key_text(problem.call_key),
            Cell(status, styles[status]),
            seconds_text(seconds) if seconds else "",
            clean(detail.partition("\n")[0]),
        )
        for problem, status, seconds, detail in results
    ]
    columns = (
        ID,
        KERNEL,
        TextColumn("call", give=2, from_width=70),
        TextColumn("result"),
        TextColumn("took", "right", from_width=60),
        TextColumn("", give=2),
    )
    terminal.table(columns, rows)
    terminal.line()


def seconds_of(record: Record) -> float | None:
    """Return the time of the configuration in a record, or None if it was not measured."""
    verdict = verdict_of(record)
    if verdict is None:
        return None
    wanted = fingerprint_of(record.head.config)
    return next((r.value_s for r in verdict.ranking if r.measurement.fingerprint == wanted), None)


def plain(config: Json) -> Any:
    """Return a stored configuration as plain JSON: tuples as lists, classes as their fields."""
    try:
        return _jsonable(decode(config))
    except CodecError:
        return config


def _jsonable(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): _jsonable(item) for name, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_jsonable(item) for item in value]
    return value if isinstance(value, (str, int, float, bool)) or value is None else str(value)
