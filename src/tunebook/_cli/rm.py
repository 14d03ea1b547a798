"""Remove entries that you name, by id or kernel.

The next call of such a problem is tuned anew. Asks if there is more than one entry; exits with 1 if you say no. Entries
in packs stay. `tunebook prune` removes by age, use, size or version.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tunebook._cli._entries import SHORT_ID, find, record_of
from tunebook._cli._filters import FILTERS, book_to_read, filters_of
from tunebook._cli._verb import ArgumentParser, Namespace, NotFound, Terminal, UsageError, Verb
from tunebook._cli.prune import add_removal, remove
from tunebook.stores._listing import Catalogue

if TYPE_CHECKING:
    from tunebook.stores._listing import Listed


def _arguments(parser: ArgumentParser) -> None:
    parser.add_argument("what", metavar="ID_OR_KERNEL", nargs="+", help="first digits of an id, or a kernel")
    add_removal(parser)


def _run(options: Namespace, terminal: Terminal) -> int:
    store = book_to_read(options)
    doomed: dict[str, tuple[Listed, str]] = {}
    for word in options.what:
        found = find(Catalogue(store), word, filters_of(options)).all()
        own = [listed for listed in found if listed.where == store.where]
        if not own:
            raise NotFound(f"{word!r} is in a pack, which stays as it was shipped: {found[0].where}")
        doomed = {listed.id: (listed, f"named {word}") for listed in own} | doomed
    pinned = [name[:SHORT_ID] for name, (listed, _) in doomed.items() if record_of(listed).head.origin == "pinned"]
    if pinned and not options.pinned:
        raise UsageError(f"pinned: {', '.join(pinned)}; add --pinned to remove pinned entries too")
    return remove(store, dict(doomed.values()), options, terminal, ask=len(doomed) > 1)


VERB = Verb("tunebook rm matmul --dry-run", _run, (*FILTERS, "dry-run", "json"), _arguments, __doc__)
