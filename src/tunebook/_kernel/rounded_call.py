"""A call at the representative sizes of its buckets, so that a bucket's choice does not depend on its first call.

Arrays grow by repeating their values, and shrink by leaving some out. Arguments outside of the key follow the sizes of
the others.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tunebook._arrays.describe import describe, is_array, map_leaves, walk
from tunebook._arrays.made_up import resized
from tunebook._base.errors import Unsupported
from tunebook._base.record_format import blake2b

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from tunebook._keys.buckets import Buckets

# A bucket is tuned at the caller's size if its arrays would take more than this, and so many times the caller's.
_MUCH_BYTES: Final = 1 << 30
_MUCH_MORE: Final = 4
_LONG: Final = 200  # characters


class RoundedCall(NamedTuple):
    """The arguments of a call at the representative sizes, which `sizes` names; `changed` if these are not its own.

    `reason`: why the sizes are its own, though they are not the representatives.
    """

    arguments: Mapping[str, Any]
    sizes: str
    reason: str = ""
    changed: bool = False


class _BucketSizes:
    """The sizes in the arguments of a call that have a bucket, and the representatives of their buckets."""

    def __init__(self, arguments: Mapping[str, Any], keyed: Collection[str], buckets: Buckets) -> None:
        self._buckets = buckets
        self.named = [
            name for name in arguments if name in keyed and (name in buckets.whole or name in buckets.by_dimension)
        ]
        self.becomes: dict[int, set[int]] = {}
        for name in self.named:
            for leaf in walk(arguments[name]):
                for old, new in zip(*self.of(name, leaf, top=leaf is arguments[name]), strict=True):
                    self.becomes.setdefault(old, set()).add(new)
        self.is_round = all({old} == new for old, new in self.becomes.items())

    def of(self, name: str, leaf: Any, *, top: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the sizes of an array or an integer, and the sizes that it gets."""
        if is_array(leaf):
            shape = tuple(describe(leaf).shape)
            return shape, tuple(int(str(n).lstrip("~")) for n in self._buckets.shape(name, shape))
        if type(leaf) is int:
            return (leaf,), (self._buckets.scalar(name, leaf, top=top) or leaf,)
        return (), ()

    def followed(self, name: str, leaf: Any) -> Any:
        """Return an argument outside of the key at the new sizes; `Unsupported` if its role is ambiguous."""
        if type(leaf) is int and self.becomes.get(leaf, {leaf}) != {leaf}:
            raise Unsupported(f"{name} has the same value as a size, and is not in the key")
        if not is_array(leaf):
            return leaf
        shape = tuple(describe(leaf).shape)
        if any(len(self.becomes.get(n, {n})) > 1 for n in shape):
            raise Unsupported(f"{name} is not in the key, and may follow one of several sizes")
        return resized(leaf, tuple(next(iter(self.becomes.get(n, {n}))) for n in shape))


def rounded_call(
    arguments: Mapping[str, Any], keyed: Collection[str], buckets: Buckets, refused: str = ""
) -> RoundedCall | None:
    """Return a call at the representative sizes of its buckets, or at its own with the reason; None without buckets.

    `refused` is a reason for its own sizes.
    """
    sizes = _BucketSizes(arguments, keyed, buckets)
    if not sizes.named:
        return None
    own = _text(sizes, arguments, 0)
    if sizes.is_round or refused:
        return RoundedCall(arguments, own, "" if sizes.is_round else refused)
    try:
        _refuse_the_unsafe(sizes, arguments)
        return RoundedCall(_resized(sizes, arguments, keyed), _text(sizes, arguments, 1), changed=True)
    except Unsupported as error:
        return RoundedCall(arguments, own, str(error))


def _text(sizes: _BucketSizes, arguments: Mapping[str, Any], which: int) -> str:
    """Return the sizes of the arguments with buckets: their own (0), or the representatives (1)."""
    found = []
    for name in sizes.named:
        each = [sizes.of(name, leaf, top=leaf is arguments[name])[which] for leaf in walk(arguments[name])]
        found.append(f"{name}={'+'.join('x'.join(map(str, one)) for one in each if one)}")
    text = ",".join(found)
    # A container of a thousand arrays must not make a long text of every measurement.
    return text if len(text) <= _LONG else f"{text[:_LONG]}...{blake2b(text.encode(), digest_size=8).hexdigest()}"


def _refuse_the_unsafe(sizes: _BucketSizes, arguments: Mapping[str, Any]) -> None:
    """Raise `Unsupported` for a call that would get too large, or whose integers may point outside of its arrays."""
    shrinks = any(min(new) < old for old, new in sizes.becomes.items())
    before = after = 0
    for name, argument in arguments.items():
        for leaf in walk(argument):
            if not is_array(leaf):
                continue
            spec = describe(leaf)
            if shrinks and spec.dtype.lstrip("<>").startswith(("i", "u")):
                raise Unsupported(f"{name} holds integers, which may be indices, and a size shrinks")
            old, new = sizes.of(name, leaf, top=True) if name in sizes.named else ((spec.shape), (spec.shape))
            before, after = before + 8 * math.prod(old), after + 8 * math.prod(new)
    if after > max(_MUCH_BYTES, _MUCH_MORE * before):
        raise Unsupported(f"the arrays would take {after >> 20} MiB")


def _resized(sizes: _BucketSizes, arguments: Mapping[str, Any], keyed: Collection[str]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for name, argument in arguments.items():

        def change(leaf: Any, name: str = name, argument: Any = argument) -> Any:
            if name in sizes.named:
                _, new = sizes.of(name, leaf, top=leaf is argument)
                return resized(leaf, new) if is_array(leaf) else new[0] if new else leaf
            return leaf if name in keyed else sizes.followed(name, leaf)

        made[name] = map_leaves(change, argument)
    return made
