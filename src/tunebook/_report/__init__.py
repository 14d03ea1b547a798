"""Reports: what a tuning found, or a whole book, as one page or one picture."""

from __future__ import annotations

import time
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, final

from tunebook._report.gather import subject_of
from tunebook._report.model import model_of

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable

    from tunebook._base.record_format import Record
    from tunebook._report.model import ReportModel

_NOTEBOOK_HEIGHT: Final = 720


@final
class Report:
    """What a report shows; drawn when it is asked for. In a notebook it shows itself."""

    def __init__(self, model: ReportModel) -> None:
        self.model: Final = model

    @cached_property
    def html(self) -> str:
        """One page that needs nothing but itself."""
        from tunebook._report.page import page_of  # noqa: PLC0415 - a picture does not need it

        return page_of(self.model)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the page to a file, and return its path; a name that ends in .png gives a picture."""
        target = Path(path)
        if target.suffix.lower() == ".png":
            return self.png(target)
        target.write_text(self.html, encoding="utf-8")
        return target

    def png(self, path: str | os.PathLike[str]) -> Path:
        """Draw the main charts with matplotlib into a file, and return its path."""
        from tunebook._report.png import draw  # noqa: PLC0415 - only pictures need matplotlib

        draw(self.model, Path(path))
        return Path(path)

    def _repr_html_(self) -> str:
        from tunebook._report.page import framed  # noqa: PLC0415 - as above

        return framed(self.html, _NOTEBOOK_HEIGHT)

    def __repr__(self) -> str:
        return f"Report({self.model.title!r}, {len(self.model.entries)} entries)"


def report(what: Any = None, path: str | os.PathLike[str] | None = None, *, title: str | None = None) -> Report:
    """Return a report on a tuning or a book, and write it to `path` if that is given (.html or .png).

    `what` is what `tune`, `tune_all`, `verify` or `explain` returned, records, a store, the path of one, or None for
    the user's own book.
    """
    subject = subject_of(what)
    made = report_on(subject.records, subject.where, title)
    if path is not None:
        made.save(path)
    return made


def report_on(records: Iterable[Record], where: str, title: str | None = None) -> Report:
    """Return a report on records from a place; without a title it is named after its kernel, if that is one."""
    model = model_of(records, title=title or "", where=where, made=time.time())
    operations = {group.op for group in model.groups}
    named = next(iter(operations)) if len(operations) == 1 else "Tuned kernels"
    return Report(model._replace(title=title or named))
