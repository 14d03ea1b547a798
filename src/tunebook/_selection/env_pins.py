"""Configurations that the environment pins, for a comparison of two runs: `TUNEBOOK_PIN="matmul:block_m=64; ..."`."""

from __future__ import annotations

import atexit
import re
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import cache, partial
from heapq import nsmallest
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from tunebook._base.config_codec import decode, encode
from tunebook._base.environment_variables import pins_text
from tunebook._base.errors import CodecError, DefinitionError, did_you_mean, warn_once
from tunebook._kernel.kernel import LIVE
from tunebook._space.space import Space

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from tunebook._base.vocabulary import Json
    from tunebook._kernel.kernel import Invocation, Kernel

_FORM: Final = 'TUNEBOOK_PIN="kernel:name=value,name=value; kernel:..."'
# Commas and semicolons inside brackets or quotes belong to a value: order=(0, 1), or layout='a;b'.
_PART: Final = r"""(?:[^{0}()\[\]'"]|\([^()]*\)|\[[^\[\]]*\]|'[^']*'|"[^"]*")+"""
_KERNELS: Final = re.compile(_PART.format(";"))
_VALUES: Final = re.compile(_PART.format(","))


_NUMBER: Final = re.compile(r"-?\d+(?:\.\d+)?")
_SHOWN: Final = 8  # values of an axis
_LISTED: Final = 1000  # candidates that are looked at for a message

_used: Final[set[str]] = set()  # the pins that kernels of this process were called under; empty before the first call


@cache
def parse_pins(text: str) -> Mapping[str, Mapping[str, str]]:
    """Return `{kernel: {name: value}}`, values as they were written.

    >>> parse_pins("matmul:block_m=64,order=0,1; softmax@v2:rows=4")
    {'matmul': {'block_m': '64', 'order': '0,1'}, 'softmax@v2': {'rows': '4'}}
    """
    pins: dict[str, dict[str, str]] = {}
    for part in filter(str.strip, _KERNELS.findall(text)):
        kernel, colon, values = (piece.strip() for piece in part.partition(":"))
        named = parse_values(values)
        if not (kernel and colon and named):
            raise DefinitionError(f"TUNEBOOK_PIN has {part.strip()!r}, which pins nothing; write {_FORM}")
        if kernel in pins:
            raise DefinitionError(f"TUNEBOOK_PIN pins {kernel!r} twice; write all its values after one name")
        pins[kernel] = dict(named)
        if len(pins[kernel]) < len(named):
            raise DefinitionError(f"TUNEBOOK_PIN gives {kernel!r} a value twice, in {values!r}; name each once")
    return pins


def parse_values(text: str) -> list[tuple[str, str]]:
    """Return the names and values of `name=value,name=value`; empty if it is malformed.

    A part without a name goes on with the value before it, so that a tuple needs no brackets.

    >>> parse_values("tile=4,4, unroll=2")
    [('tile', '4,4'), ('unroll', '2')]
    """
    found: list[tuple[str, str]] = []
    for part in _VALUES.findall(text):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if equals and (name.isidentifier() or not found):
            found.append((name, value))
        elif found and part.strip():
            name, value = found.pop()
            found.append((name, f"{value},{part.strip()}"))
    return found if all(name and value for name, value in found) else []


def written(fields: Mapping[str, object]) -> list[str]:
    """Return the values of a configuration as `parse_values` reads them; a dict inside it counts by its own values.

    >>> written({"tile": (4, 4), "way": "i,j"})
    ['tile=4,4', "way='i,j'"]
    """
    return [f"{name}={_spelled(value)}" for name, value in fields.items() if not isinstance(value, dict)]


def _spelled(value: object) -> str:
    if isinstance(value, (tuple, list)) and value:
        return str(value) if any(isinstance(item, (tuple, list)) for item in value) else ",".join(map(_spelled, value))
    return repr(value) if isinstance(value, str) and not re.fullmatch(r"[\w.+-]+", value) else str(value)


def nearest(configs: Iterable[Json], wanted: Mapping[str, str], count: int) -> list[Json]:
    """Return the encoded configurations whose values are nearest to the wanted ones, the nearest first."""
    return nsmallest(count, configs, key=lambda config: _distance(fields_of(config), wanted))


def respelled(wanted: Mapping[str, str], axes: Iterable[str]) -> dict[str, str]:
    """Return the wanted values under the axes' names: a misspelt name becomes the nearest one that is not given.

    >>> respelled({"chnk": "32", "how": "sum"}, ["chunk", "how"])
    {'chunk': '32', 'how': 'sum'}
    """
    from difflib import get_close_matches  # noqa: PLC0415 - 3 ms, for a mistake only

    known = list(axes)
    free = [name for name in known if name not in wanted]
    near = {name: get_close_matches(name, free, n=1) for name in wanted if name not in known}
    return {(near.get(name) or [name])[0]: text for name, text in wanted.items()}


def _distance(fields: Mapping[str, object], wanted: Mapping[str, str]) -> float:
    from difflib import SequenceMatcher  # noqa: PLC0415 - 3 ms, for a mistake only

    total = 0.0
    for name, text in wanted.items():
        found = fields.get(name, "")
        value = _spelled(int(found) if isinstance(found, bool) and _NUMBER.fullmatch(text) else found)
        if name in fields and _is_written(fields[name], text):
            continue
        there, asked = ([float(number) for number in _NUMBER.findall(each)] for each in (value, text))
        if there and len(there) == len(asked):
            total += sum(abs(a - b) / (abs(a) + abs(b) or 1.0) for a, b in zip(there, asked, strict=True)) / len(there)
        else:
            total += 2.0 - SequenceMatcher(None, value, text).ratio()
    return total


@cache
def names_of(op: str) -> tuple[str, ...]:
    """Return the names that people have for a kernel, the most exact first: its version and its module may be left out.

    >>> names_of("mylib.matmul@v0")
    ('mylib.matmul@v0', 'mylib.matmul', 'matmul@v0', 'matmul')
    """
    name, _, version = op.rpartition("@") if "@" in op else (op, "", "")
    plain = name.rpartition(".")[2]
    return (op, name, f"{plain}@{version}" if version else plain, plain)


def fits_kernel(op: str, patterns: Iterable[str]) -> bool:
    """Return whether a kernel matches one of the patterns under one of its names."""
    return any(fnmatchcase(name, pattern) for pattern in patterns for name in names_of(op))


def fits_device(device: str, patterns: Iterable[str]) -> bool:
    """Return whether a part of a device's name matches one of the patterns, in any case of letters."""
    return any(fnmatchcase(device.lower(), f"*{pattern.lower()}*") for pattern in patterns)


def pinned(text: str, kernel: Kernel[Any, Any], inv: Invocation[Any, Any]) -> Any | None:
    """Return the candidate that is pinned under the most exact name of a kernel, or None."""
    pins = parse_pins(text)
    if not _used:
        atexit.register(_tell_of_unused)
        _used.add("")
    named = next((name for name in names_of(kernel.op_id_v) if name in pins), None)
    _used.add(named or "")
    if named is None:
        import difflib  # noqa: PLC0415 - loaded late: few processes pin

        # A pin may be nearly the name of this kernel; kernels that are not called are unknown.
        for name in names_of(kernel.op_id_v):
            for pin in difflib.get_close_matches(name, pins, n=1, cutoff=0.8):
                said = f"TUNEBOOK_PIN pins {pin!r}, and not {name!r}, so it has no effect on this kernel"
                warn_once("pin", pin, f"{said}. Correct the name if you mean this kernel")
        return None
    wanted = pins[named]
    found = list(islice(_fitting(kernel, inv, wanted), 2))
    if len(found) == 1:
        return found[0]
    asked = ",".join(f"{name}={value}" for name, value in wanted.items())
    if found:
        named_so = " or ".join(_typed(named, encode(config)) for config in found)
        what = f"several candidates; name one exactly, for example {named_so}"
    else:
        axes, listed = _axes_of(kernel.candidates(inv)), islice(kernel.candidates(inv), _LISTED)
        near = nearest(map(_encoded, listed), respelled(wanted, axes), 1)
        what = f"no candidate: {reason_against(wanted, axes)}"
        what += "".join(f". The nearest is {_typed(named, config)}" for config in near)
    raise DefinitionError(f"TUNEBOOK_PIN pins {kernel.op_id!r} to {asked}, which fits {what}")


def _typed(kernel: str, config: Json) -> str:
    """Return the setting that pins a configuration, quoted for a shell."""
    from shlex import quote  # noqa: PLC0415 - for a mistake only

    return f"TUNEBOOK_PIN={quote(f'{kernel}:' + ','.join(written(fields_of(config))))}"


def _axes_of(candidates: Iterable[Any]) -> dict[str, Sequence[object]]:
    """Return the values of each axis."""
    if isinstance(candidates, Space):
        return dict(candidates.axes)
    return values_in(_encoded(config) for config in islice(candidates, _LISTED))


def values_in(encoded: Iterable[Json]) -> dict[str, Sequence[object]]:
    """Return the values that each name has in encoded configurations, in order."""
    axes: dict[str, list[object]] = {}
    for config in encoded:
        for name, value in fields_of(config).items():
            if value not in (values := axes.setdefault(name, [])):
                values.append(value)
    return dict(axes)


def reason_against(wanted: Mapping[str, str], axes: Mapping[str, Sequence[object]]) -> str:
    """Return which part of a configuration, as people write it, no candidate has."""
    for name, text in wanted.items():
        if name not in axes:
            return did_you_mean("axis", name, axes)
        if not any(_is_written(value, text) for value in axes[name]):
            some = ", ".join(map(str, axes[name][:_SHOWN])) + (", ..." if len(axes[name]) > _SHOWN else "")
            return f"{name}={text} is not in the space; it has {some}"
    return "no candidate has these values together"


def _tell_of_unused() -> None:
    """Warn, when the process ends, of pins that were for none of the kernels it called."""
    for pin in parse_pins(pins_text()):
        if pin not in _used:
            called = dict.fromkeys(names_of(op)[-1] for op in list(LIVE))
            near = did_you_mean("kernel", pin, called) if called else f"unknown kernel {pin!r}"
            warn_once("pin", pin, f"TUNEBOOK_PIN had no effect, because no kernel of that name was called: {near}")


def _encoded(config: object) -> Json:
    try:
        return encode(config)
    except CodecError:
        return None


def _fitting(kernel: Kernel[Any, Any], inv: Invocation[Any, Any], wanted: Mapping[str, str]) -> Iterable[Any]:
    candidates: Iterable[Any] = kernel.candidates(inv)
    if isinstance(candidates, Space) and wanted.keys() <= candidates.axes.keys():
        for name, value in wanted.items():  # one by one, so that a space of any size is cut down axis by axis
            candidates = candidates.where(partial(_has, name, value))
    heuristic = kernel.heuristic(inv)
    seen: list[Any] = []
    for config in (*(() if heuristic is None else (heuristic,)), *candidates):
        with suppress(CodecError):
            if config not in seen and fits(encode(config), wanted):
                seen.append(config)
                yield config


def _has(name: str, value: str, config: Any) -> bool:
    return _is_written(config[name], value)


def fits(encoded: Json, wanted: Mapping[str, str]) -> bool:
    """Return whether an encoded configuration has these values, as people write them."""
    fields = fields_of(encoded)
    return all(name in fields and _is_written(fields[name], value) for name, value in wanted.items())


def fields_of(encoded: Json) -> dict[str, object]:
    """Return a configuration's fields, and beside them the fields of a dict inside it, as in triton.Config."""
    try:
        plain = decode(encoded)
    except CodecError:
        return {}
    if not isinstance(plain, dict):
        return {"config": plain}
    inside = [value for value in plain.values() if isinstance(value, dict)]
    return {name: value for fields in (*inside, plain) for name, value in fields.items()}


def _is_written(value: object, text: str) -> bool:
    if isinstance(value, bool):
        return text.strip().lower() == str(value).lower()
    forms = [str(value), repr(value), _spelled(value)]
    if isinstance(value, (tuple, list)):
        forms += [str(value)[1:-1], ",".join(map(str, value))]
    return text.replace(" ", "") in (form.replace(" ", "") for form in forms)
