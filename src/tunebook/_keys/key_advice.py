"""Warnings about keys that a kernel's author hardly wants: a new key for each value of a number, and very long keys."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final

from tunebook._base.errors import warn_once
from tunebook._base.record_format import canonical_json
from tunebook._keys.key_text import parsed

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from tunebook._base.vocabulary import Json

MANY_VALUES: Final = 8
MANY_ITEMS: Final = 1000
# The tags of values that a program may compute anew for each call; an enum or a dtype has few.
_OPEN_ENDED: Final = frozenset({"$scalar", "$int", "$float", "$complex", "$str", "$bytes"})


def warn_of_many_values(op: str, keys: Iterable[str]) -> None:
    """Warn if calls that were tuned one by one differ in the values of plain arguments alone."""
    seen: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for key in keys:
        arguments = parsed(key) or {}
        plain = {name: value for name, value in arguments.items() if _is_open_ended(value)}
        rest = canonical_json({name: value for name, value in arguments.items() if name not in plain})
        for name, value in plain.items():
            seen[rest][name].add(canonical_json(value))
    for values in seen.values():
        for name, found in values.items():
            if len(found) >= MANY_VALUES:
                _warn_of_values(op, name, sorted(found, key=lambda text: (len(text), text)))


def _warn_of_values(op: str, name: str, values: list[str]) -> None:
    of_sizes = all(value.lstrip("-").isdigit() for value in values)
    nearby = f", or let nearby values share one entry: bucket={{{name!r}: tunebook.pow2}}" if of_sizes else ""
    warn_once(
        "many values",
        op,
        f"{op} was tuned for {len(values)} values of its argument {name!r} ({', '.join(values[:3])}, ...), and is "
        f"tuned again for each new value. If it does not matter for speed, leave it out: ignore=({name!r},){nearby}",
    )


def _is_open_ended(value: Json) -> bool:
    if isinstance(value, dict):
        return len(value) == 1 and not _OPEN_ENDED.isdisjoint(value)
    return isinstance(value, (int, float, str)) and not isinstance(value, bool)


def warn_of_a_long_key(op: str, key: str) -> None:
    """Warn if an argument is a container of very many plain values."""
    counts: Mapping[str, int] = {name: sum(1 for _ in _items(value)) for name, value in (parsed(key) or {}).items()}
    name = max(counts, key=counts.__getitem__, default="")
    if counts.get(name, 0) >= MANY_ITEMS:
        warn_once(
            "long key",
            op,
            f"{op}: the {counts[name]} values in its argument {name!r} are all part of the key, which every call makes "
            f"anew. Pass an array, which is keyed by its shape, or leave it out: ignore=({name!r},)",
        )


def _items(value: Any) -> Iterator[object]:
    """Yield the plain values in a part of a key; an array is not a plain value."""
    if isinstance(value, dict):
        for name, part in value.items():
            if name != "$array":
                yield from _items(part)
    elif isinstance(value, list):
        for part in value:
            yield from _items(part)
    else:
        yield value
