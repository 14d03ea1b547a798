"""Markup that cannot be injected into: whatever is not markup already is escaped on its way in."""

from __future__ import annotations

from html import escape
from typing import Final

_VOID: Final = frozenset({"meta", "input", "line", "rect", "circle", "path", "polyline"})


class Markup(str):
    """Text that is markup. A plain string never is: a kernel may be named `<script>`."""

    __slots__ = ()


def tag(name: str, /, *children: str, **attributes: object) -> Markup:
    """Return an element; `class_` is class, other underscores are hyphens, and attributes of None are left out.

    >>> tag("p", "1 < 2", class_="note", aria_label='"')
    '<p class="note" aria-label="&quot;">1 &lt; 2</p>'
    """
    given = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items() if value is not None}
    opening = "".join(f' {key}="{escape(_text(value))}"' for key, value in given.items())
    if name in _VOID and not children:
        return Markup(f"<{name}{opening}/>")
    return Markup(f"<{name}{opening}>{join(*children)}</{name}>")


def join(*children: str) -> Markup:
    """Return markup one after another."""
    return Markup("".join(child if isinstance(child, Markup) else escape(child) for child in children))


def _text(value: object) -> str:
    # Half a tenth of a pixel is not seen, and 17 digits per number would be most of the page.
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else str(value)
