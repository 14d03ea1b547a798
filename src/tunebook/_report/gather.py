"""What a report can be about, as records."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tunebook._api.explain import Explanation
from tunebook._api.tunable import Outcome
from tunebook._base.errors import DefinitionError
from tunebook._base.record_format import Record
from tunebook._selection.persistent_cache import PersistentCache, default_book
from tunebook._selection.trusted_entries import record_of_tuning
from tunebook._tuning.job import Tuned
from tunebook._tuning.reverify import Verified
from tunebook.stores import open_store

if TYPE_CHECKING:
    from collections.abc import Iterable


class Subject(NamedTuple):
    """What a report is about: records, and what a person calls the place they are from."""

    records: Iterable[Record]
    where: str


def subject_of(what: Any) -> Subject:
    """Return what a report is about; `DefinitionError` says what it can be.

    None is the user's own book, and a path is a book, a `.json` file or a pack.
    """
    if what is None:
        what = default_book()
    if isinstance(what, (str, os.PathLike)):
        what = _opened(Path(what))
    if isinstance(what, PersistentCache):
        what = what.store
    if isinstance(what, (Tuned, Verified, Outcome, Explanation, Record)):
        return Subject(list(_records_in(what)), "this process")
    # A store has no class of its own, and neither has an iterable of records.
    items, where = getattr(what, "items", None), getattr(what, "where", None)
    if callable(items) and isinstance(where, str):
        return Subject(items(), where)
    if isinstance(what, (list, tuple, set, frozenset)) or hasattr(what, "__next__"):
        return Subject((record for each in what for record in _records_in(each)), "this process")
    raise _unfit(what)


def _opened(path: Path) -> Any:
    if not path.exists():
        raise DefinitionError(f"there is no book at {path}; give the path of a directory, a .json file or a .db pack")
    return open_store(path)


def _records_in(what: Any) -> Iterable[Record]:
    match what:
        case Record():
            yield what
        case Tuned():
            yield record_of_tuning(what)
        case Verified():
            yield record_of_tuning(what.tuned)
        case Outcome():
            yield from () if what.tuned is None else (record_of_tuning(what.tuned),)
        case Explanation():
            yield from () if what.record is None else (what.record,)
        case _:
            raise _unfit(what)


def _unfit(what: object) -> DefinitionError:
    return DefinitionError(
        f"a report cannot be made of {type(what).__name__}; give what tunebook.tune(...), tunebook.tune_all(...) or "
        "explain(...) returned, a store, a path, records, or nothing for your own book"
    )
