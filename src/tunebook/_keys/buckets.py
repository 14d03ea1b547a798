"""Buckets: which sizes share one tuning."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from tunebook._base.errors import DefinitionError, UnkeyableError, warn_once

if TYPE_CHECKING:
    from collections.abc import Iterable

Bucket: TypeAlias = Callable[[int], int]
"""Maps a size to the representative of its bucket."""


def exact(x: int) -> int:
    """Every size is its own bucket, as for a dimension without a bucket."""
    return x


def pow2(x: int) -> int:
    """Return the smallest power of two that is at least x; 0 and 1 stand for themselves.

    >>> [pow2(n) for n in (0, 1, 3, 64, 65)]
    [0, 1, 4, 64, 128]
    """
    # Integers only: math.log2(2**49 + 1) is exactly 49.0, and the size would fall into the bucket below.
    return x if x <= 1 else 1 << (x - 1).bit_length()


def multiple(of: int) -> Bucket:
    """Return a bucket that rounds up to multiples of `of`.

    >>> multiple(64)(65)
    128
    """
    if isinstance(of, bool) or not isinstance(of, int) or of < 1:
        raise DefinitionError(f"multiple({of!r}): the step must be an integer of at least 1, for example multiple(64)")
    return _Multiple(of)


def anchor(x: int, max: int | None = None, min: int | None = None, base: int = 2) -> int:  # noqa: A002 - the names CubeCL's users know
    """Return the smallest power of `base` that is at least x, but no less than `min` and no more than `max`.

    As a bucket: `functools.partial(anchor, max=4096, min=16)`.

    >>> anchor(100), anchor(100, max=64), anchor(3, min=16), anchor(10, base=3)
    (128, 64, 16, 27)
    """
    if base < 2:
        raise DefinitionError(f"anchor(base={base!r}): the base must be at least 2")
    power = 1
    while power < x:
        power *= base
    power = power if min is None or power >= min else min
    return power if max is None or power <= max else max


@dataclass(frozen=True, slots=True)
class _Multiple:
    step: int

    def __call__(self, x: int) -> int:
        return -(-x // self.step) * self.step


@dataclass(frozen=True, slots=True)
class _Sizes:
    """The smallest size that is at least x; beyond the largest, the largest."""

    sizes: tuple[int, ...]

    def __call__(self, x: int) -> int:
        return self.sizes[min(bisect_left(self.sizes, x), len(self.sizes) - 1)]


@dataclass(frozen=True, slots=True)
class Buckets:
    """The buckets of a kernel: per argument one for all its sizes, or one per dimension. Made by `as_buckets`."""

    whole: Mapping[str, Bucket] = field(default_factory=dict)
    by_dimension: Mapping[str, Mapping[int, Bucket]] = field(default_factory=dict)

    def shape(self, name: str, shape: tuple[int, ...]) -> list[int | str]:
        """Return the dimensions of an array as they stand in a key: "~64" is a bucket, 64 is exactly 64."""
        whole = self.whole.get(name)
        chosen = self._dimensions(name, len(shape)) if whole is None else dict.fromkeys(range(len(shape)), whole)
        return [
            f"~{_apply(chosen[i], n, f'{name}.shape[{i}]')}"
            if chosen.get(i, exact) is not exact and not isinstance(n, str)
            else n
            for i, n in enumerate(shape)  # a string is a symbol: it is in no bucket
        ]

    def scalar(self, name: str, value: int, *, top: bool = True) -> int | None:
        """Return the bucket of an integer, or None if it has none; `top` is False for one inside the argument."""
        if top and name in self.by_dimension:
            raise UnkeyableError(
                f"argument {name!r} is the number {value}, but bucket= names its dimensions "
                f"{sorted(self.by_dimension[name])}; for a number write bucket={{{name!r}: pow2}}"
            )
        bucket = self.whole.get(name, exact)
        return None if bucket is exact else _apply(bucket, value, name)

    def _dimensions(self, name: str, rank: int) -> dict[int, Bucket]:
        chosen: dict[int, Bucket] = {}
        for dimension, bucket in self.by_dimension.get(name, {}).items():
            place = dimension + rank if dimension < 0 else dimension
            if not 0 <= place < rank:
                raise UnkeyableError(
                    f"bucket= names dimension {dimension} of argument {name!r}, which has rank {rank} in this call"
                )
            if place in chosen:
                raise UnkeyableError(f"bucket= names dimension {place} of argument {name!r} twice, as {dimension} too")
            chosen[place] = bucket
        return chosen


def _apply(bucket: Bucket, x: int, where: str) -> int:
    found: Any = bucket(x)
    if isinstance(found, bool) or not isinstance(found, int):
        raise UnkeyableError(
            f"the bucket of {where} gave {found!r} for {x}; a bucket takes an int and returns the int that stands "
            "for all sizes of the bucket"
        )
    if isinstance(bucket, _Sizes) and x > bucket.sizes[-1]:
        warn_once(
            "bucket",
            f"{where} {bucket.sizes}",
            f"{where} is {x}, above the largest bucket {bucket.sizes[-1]}, and is treated as that. "
            "Add a larger size to bucket= if these calls matter.",
        )
    return found


# ------------------------------------------------------------------------------------------------ reading `bucket=`

_EXAMPLE: Final = 'bucket={"a": {0: pow2, -1: [64, 128]}, "n": multiple(16)}'


def as_buckets(spec: Mapping[str, object] | None, parameter_names: Iterable[str]) -> Buckets:
    """Read a kernel's `bucket=`; `DefinitionError` for whatever could never apply."""
    if spec is None:
        return Buckets()
    if not isinstance(spec, Mapping):
        raise DefinitionError(f"bucket={spec!r} must say which argument it is for, as in {_EXAMPLE}")
    names = list(parameter_names)
    whole: dict[str, Bucket] = {}
    by_dimension: dict[str, Mapping[int, Bucket]] = {}
    for name, entry in spec.items():
        if name not in names:
            raise DefinitionError(f"bucket= names {name!r}, but {unknown_name(name, names)}")
        if not isinstance(entry, Mapping):
            whole[name] = _bucket(name, entry)
            continue
        wrong = [each for each in entry if isinstance(each, bool) or not isinstance(each, int)]
        if wrong:
            raise DefinitionError(f"bucket= of {name!r}: a dimension is an int, not {wrong[0]!r}; write {_EXAMPLE}")
        by_dimension[name] = {dimension: _bucket(name, bucket) for dimension, bucket in entry.items()}
    return Buckets(whole, by_dimension)


def unknown_name(name: object, valid: Sequence[str]) -> str:
    """Return the end of a sentence about an unknown argument: the arguments, and the probable meaning.

    >>> unknown_name("mm", ["m", "n"])
    "the arguments are 'm', 'n'; did you mean 'm'?"
    """
    import difflib  # noqa: PLC0415 - 3 ms to import, for the error message alone

    close = difflib.get_close_matches(str(name), valid, n=1, cutoff=0.5)
    listed = ", ".join(map(repr, valid)) or "none"
    return f"the arguments are {listed}" + (f"; did you mean {close[0]!r}?" if close else "")


def _bucket(name: str, entry: Any) -> Bucket:
    if callable(entry):
        return entry  # type: ignore[no-any-return]
    if isinstance(entry, (list, tuple)) and entry and all(type(size) is int and size >= 0 for size in entry):
        return _Sizes(tuple(sorted(set(entry))))
    raise DefinitionError(
        f"bucket= of {name!r} is {entry!r}; give exact, pow2, multiple(of), a function of the size, or a list of "
        f"sizes, as in {_EXAMPLE}"
    )
