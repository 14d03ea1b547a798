"""Call keys for people: the text of a key, and the differences between two keys."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Final

from tunebook._base.record_format import canonical_json

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tunebook._base.vocabulary import Json

_ARRAY_PARTS: Final = ("library", "dtype", "shape", "layout", "device")


def spell_out(key: str, names: Sequence[str] = ()) -> list[str]:
    """Return the text of a call key, one line per argument; the key of a kernel's own key builder stands as it is.

    Arguments come in the order of `names`, and after these in that of the key, which is alphabetical.

    >>> spell_out('{"a":{"$array":["numpy","float32",[512,"~64"],"C","cpu"]},"window":{"$tuple":[128,0]}}')
    ['a: numpy float32[512, ~64] C on cpu', 'window: (128, 0)']
    """
    arguments = parsed(key)
    if arguments is None:
        return [key]
    ordered = [name for name in dict.fromkeys((*names, *arguments)) if name in arguments]
    return [f"{name}: {_spell(arguments[name])}" for name in ordered]


def in_short(key: str) -> str:
    """Return a call key on one line, without libraries and platforms, which are the same in nearly all keys.

    A layout is shown unless it is C, the usual one.

    >>> in_short('{"a":{"$array":["numpy","float32",[512,"~64"],"C","cpu"]},"causal":true}')
    'a=float32[512,~64] causal=True'
    >>> in_short('{"a":{"$array":["numpy","float32",[512,64],"F","cpu"]}}')
    'a=float32[512,64]:F'
    """
    arguments = parsed(key)
    if arguments is None:
        return key
    parts = []
    for name, value in arguments.items():
        match value:
            case {"$array": [_, dtype, list(shape), layout, *_]}:
                laid_out = "" if layout in ("", "C") else f":{layout}"
                parts.append(f"{name}={dtype}[{','.join(map(str, shape))}]{laid_out}")
            case _:
                parts.append(f"{name}={_spell(value)}")
    return " ".join(parts)


def size_of(key: str) -> float | None:
    """Return the size of a call: the elements of all its arrays, else the product of its numbers; None without any.

    >>> size_of('{"a":{"$array":["numpy","float32",[512,"~64"],"C","cpu"]},"n":3}'), size_of('{"n":3,"causal":true}')
    (32768.0, 3.0)
    """
    elements, numbers, arrays = 0.0, list[float](), False
    for value in (parsed(key) or {}).values():
        tag, content = _tagged(value)
        if tag == "array" and isinstance(content, list) and len(content) > 2 and isinstance(content[2], list):
            sizes = [str(size).lstrip("~") for size in content[2]]
            arrays = True
            elements += math.prod(float(size) if size.isdecimal() else 1.0 for size in sizes)
        elif isinstance(content, (int, float)) and not isinstance(content, bool):
            numbers.append(abs(float(content)))
    size = elements if arrays else math.prod(numbers) if numbers else 0.0
    return size if 0 < size < 1e30 else None


def explain_difference(there: str, here: str) -> list[str]:
    """Return the differences between a key from elsewhere and the key at hand, one line per part.

    >>> explain_difference('{"n":3,"causal":true}', '{"n":4,"causal":true}')
    ['n: 3 there, 4 here']
    """
    if there == here:
        return []
    old, new = parsed(there), parsed(here)
    if old is None or new is None:
        return [f"key: {there} there, {here} here"]
    return list(_fields_differ(old, new, ""))


def parsed(key: str) -> dict[str, Json] | None:
    """Return the arguments in a call key by name; None for the key of a kernel's own key builder."""
    try:
        arguments = json.loads(key)
    except (ValueError, RecursionError):
        return None  # a key_builder may make keys of any form
    return arguments if isinstance(arguments, dict) else None


def _fields_differ(old: dict[str, Json], new: dict[str, Json], prefix: str) -> Iterator[str]:
    for name in sorted(old.keys() | new.keys()):
        path = f"{prefix}{name}"
        if name not in new:
            yield f"{path}: {_spell(old[name])} there, not given here"
        elif name not in old:
            yield f"{path}: not given there, {_spell(new[name])} here"
        else:
            yield from _differ(old[name], new[name], path)


def _differ(old: Json, new: Json, path: str) -> Iterator[str]:
    if canonical_json(old) == canonical_json(new):  # True == 1 == 1.0 are three keys
        return
    (tag, before), (other, after) = _tagged(old), _tagged(new)
    if tag != other:
        yield f"{path}: {_spell(old)} there, {_spell(new)} here"
    elif tag == "array" and isinstance(before, list) and isinstance(after, list):
        yield from _arrays_differ(before, after, path)
    elif tag == "object" and isinstance(before, list) and isinstance(after, list) and before[0] == after[0]:
        yield from _differ(before[1], after[1], path)
    elif tag in ("", "tuple") and isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for i, (one, two) in enumerate(zip(before, after, strict=True)):
            yield from _differ(one, two, f"{path}[{i}]")
    elif tag == "" and isinstance(before, dict) and isinstance(after, dict):
        yield from _fields_differ(before, after, f"{path}.")
    else:
        yield f"{path}: {_spell(old)} there, {_spell(new)} here"


def _arrays_differ(old: list[Json], new: list[Json], path: str) -> Iterator[str]:
    for part, before, after in zip(_ARRAY_PARTS, old, new, strict=True):
        if before == after:
            continue
        if not isinstance(before, list) or not isinstance(after, list):
            yield f"{path}: {part} {before} there, {after} here"
        elif len(before) != len(after):
            yield f"{path}: rank {len(before)} there, {len(after)} here"
        else:
            pairs = enumerate(zip(before, after, strict=True))
            yield from (f"{path}: dim {i} is {one} there, {two} here" for i, (one, two) in pairs if one != two)


def _tagged(value: Json) -> tuple[str, Json]:
    """Return the tag of a value and its content; the tag of a plain value is ""."""
    if isinstance(value, dict) and len(value) == 1:
        ((name, content),) = value.items()
        if name.startswith("$"):
            return name[1:], content
    return "", value


def _spell(value: Json) -> str:
    tag, content = _tagged(value)
    if isinstance(content, list):
        return _spell_list(tag, content) if tag else f"[{', '.join(map(_spell, content))}]"
    if tag:
        return f"~{_spell(content)}" if tag == "bucket" else str(content)
    if isinstance(content, dict):
        return "{" + ", ".join(f"{name}: {_spell(item)}" for name, item in content.items()) + "}"
    return repr(content)


def _spell_list(tag: str, content: list[Json]) -> str:  # noqa: PLR0911 - one per tag
    match tag, content:
        case "array", [library, dtype, list(shape), layout, device]:
            at = f" on {device}" if device else ""
            return f"{library} {dtype}[{', '.join(map(str, shape))}]" + (f" {layout}" if layout else "") + at
        case "tuple", _:
            return f"({', '.join(map(_spell, content))}{',' if len(content) == 1 else ''})"
        case (("set" | "frozenset"), _):
            return "{" + ", ".join(map(_spell, content)) + "}"
        case "enum", [str(name), member]:
            return f"{name.rpartition('.')[2]}.{member if isinstance(member, str) else _spell(member)}"
        case "object", [str(name), dict(fields)]:
            return f"{name.rpartition('.')[2]}({', '.join(f'{key}={_spell(item)}' for key, item in fields.items())})"
        case "scalar", [dtype, number]:
            return f"{dtype}({_spell(number)})"
        case "function", [name, str(digest)]:
            return f"function {name} ({digest[:8]})"
        case "closure", [function, values]:
            return f"{_spell(function)} with {_spell(values)}"
        case _:
            return f"{tag}({', '.join(map(_spell, content))})"
