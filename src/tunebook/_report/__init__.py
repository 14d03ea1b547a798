"""Reports: a tuning, or a whole book, as a page or a picture."""

from __future__ import annotations

import os
import time
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, final

from tunebook._api.explain import Explanation
from tunebook._api.tunable import Outcome
from tunebook._base.errors import DefinitionError
from tunebook._base.record_format import Record
from tunebook._base.vocabulary import TUNE_CACHES
from tunebook._report.comparison import before_of, compared_since, compared_with
from tunebook._report.model import model_of
from tunebook._selection.persistent_cache import PersistentCache, default_book
from tunebook._selection.trusted_entries import record_of_tuning
from tunebook._tuning.job import Tuned
from tunebook._tuning.reverify import Verified
from tunebook.stores import open_store
from tunebook.stores._files import replace_file

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tunebook._base.vocabulary import Problem
    from tunebook._report.comparison import Before
    from tunebook._report.model import ReportModel


@final
class Report:
    """A report, drawn on demand. In a notebook it shows itself."""

    def __init__(self, model: ReportModel) -> None:
        self.model: Final = model

    @cached_property
    def html(self) -> str:
        """The report, a self-contained page."""
        from tunebook._report.page import page_of  # noqa: PLC0415 - a picture does not need it

        return page_of(self.model)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the page to a file, and return its path; for a name that ends in .png, write a picture."""
        target = Path(path)
        if target.suffix.lower() == ".png":
            return self.png(target)
        # A full disk leaves no half a page. A record may hold half a surrogate pair.
        replace_file(target, self.html.encode("utf-8", errors="replace"))
        return target

    def png(self, path: str | os.PathLike[str]) -> Path:
        """Draw the main charts with matplotlib into a file, and return its path."""
        from tunebook._report.png import draw  # noqa: PLC0415 - only pictures need matplotlib

        draw(self.model, Path(path))
        return Path(path)

    def _repr_html_(self) -> str:
        from tunebook._report.page import tag  # noqa: PLC0415 - only notebooks

        # A frame: the page and the notebook do not touch each other's style and scripts.
        return tag("iframe", srcdoc=self.html, style="width:100%;height:720px;border:0", title="tunebook report")

    def __repr__(self) -> str:
        many = len(self.model.entries)
        return f"Report({self.model.title!r}, {many} {'entry' if many == 1 else 'entries'})"


def report(
    what: Any = None,
    path: str | os.PathLike[str] | None = None,
    *,
    title: str | None = None,
    compare: Any = None,
    since: float | None = None,
) -> Report:
    """Return a report on a tuning or a book; with `path`, also write it to that file (.html or .png).

    `what` is a result of `tune`, `tune_all`, `verify` or `explain`, a list of results or records, a store, the path of
    a book, or None for your own book. `compare` is another of these, to stand beside it; `since` is a Unix time, to
    show what changed after it.
    """
    records, where = _source_of(default_book() if what is None else what)
    other = None if compare is None else _source_of(compare)
    made = report_on(records, where, title, compare=other, since=since)
    if path is not None:
        made.save(path)
    return made


def _source_of(what: Any) -> tuple[Iterable[Record], str]:
    """Return the records of a book or of results, and the name of their place."""
    if isinstance(what, (str, os.PathLike)):
        if not Path(what).exists():
            raise DefinitionError(f"no book at {what}; give the path of a directory, a .json file or a .db pack")
        what = open_store(Path(what))
    if isinstance(what, PersistentCache):
        what = what.store
    # Stores have no common class.
    items, where = getattr(what, "items", None), getattr(what, "where", None)
    if callable(items) and isinstance(where, str):
        return items(), where
    several = isinstance(what, (list, tuple, set, frozenset)) or hasattr(what, "__next__")
    results = what if several and not isinstance(what, (Tuned, Verified, Outcome)) else [what]
    return (record for result in results for record in _records_in(result)), "this process"


def _records_in(result: Any) -> Iterable[Record]:
    match result:
        case Record():
            return (result,)
        case Tuned():
            return (record_of_tuning(result),)
        case Explanation(record=record):
            return () if record is None else (record,)
        case Verified(tuned=tuned) | Outcome(tuned=tuned):
            return () if tuned is None else (record_of_tuning(tuned),)
    raise DefinitionError(
        f"cannot report on {type(result).__name__}; give the result of tunebook.tune(...), tunebook.tune_all(...) or "
        "explain(...), a store, a path, records, or nothing for your own book"
    )


def report_on(
    records: Iterable[Record],
    where: str,
    title: str | None = None,
    *,
    compare: tuple[Iterable[Record], str] | None = None,
    since: float | None = None,
) -> Report:
    """Return a report on records from a place; the default title is the kernel, if there is only one.

    `compare` has the records of another place, and its name; `since` is a time, to compare with the records before.
    """
    if compare is not None and since is not None:
        raise DefinitionError("compare= and since= are two comparisons; give one of them")
    earlier: dict[Problem, Before | None] = {}
    records = _of_kernels(records)
    if since is not None:
        records = _noting(records, since, earlier)
    model = model_of(records, title=title or "", where=where, made=time.time())
    if compare is not None:
        model = model._replace(comparison=compared_with(model.entries, _of_kernels(compare[0]), compare[1]))
    elif since is not None:
        day = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(since))
        model = model._replace(comparison=compared_since(model.entries, earlier, f"the time before {day}"))
    kernels = {group.op for group in model.groups}
    return Report(model._replace(title=title or (kernels.pop() if len(kernels) == 1 else "Tuned kernels")))


def _of_kernels(records: Iterable[Record]) -> Iterator[Record]:
    """Yield the records of kernels: those of a `TuneCache` have no times that could be shown."""
    return (record for record in records if not record.problem.op.startswith(TUNE_CACHES))


def _noting(records: Iterable[Record], since: float, earlier: dict[Problem, Before | None]) -> Iterator[Record]:
    """Yield records, and note the earlier selves of those that were decided after a time."""
    for record in records:
        when = record.provenance.get("when")
        if isinstance(when, (int, float)) and when >= since:
            earlier[record.problem] = before_of(record, since)
        yield record
