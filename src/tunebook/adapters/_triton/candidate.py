"""A `triton.Config` as a candidate of the core, and one launch of a kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, final

import triton
import triton.language as tl
from triton.runtime import JITFunction

from tunebook._base.config_codec import register_codec
from tunebook._code.checksum import source_digest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

_HOOK: Final = "pre_hook"
_OPTIONS: Final = frozenset({"num_warps", "num_stages", "num_ctas", "maxnreg", "ir_override"})


@final
class LaunchConfig:
    """A `triton.Config` with its launch arguments worked out once: asking a `triton.Config` takes 1 us each time."""

    __slots__ = ("config", "meta", "pre_hook")

    def __init__(self, config: triton.Config) -> None:
        self.config: Final = config
        self.meta: Final[dict[str, Any]] = config.all_kwargs()
        self.pre_hook: Final[Callable[[dict[str, Any]], object] | None] = config.pre_hook

    def __repr__(self) -> str:
        return f"triton.Config({self.config})"


def _encode(candidate: LaunchConfig) -> dict[str, object]:
    plain = {name: _plain(value) for name, value in candidate.meta.items()}
    # Two configurations may differ in nothing but the hook, which changes the effect of a launch.
    return plain if candidate.pre_hook is None else {**plain, _HOOK: source_digest(candidate.pre_hook)}


def _plain(value: object) -> object:
    if isinstance(value, tl.constexpr):
        return _plain(value.value)
    if isinstance(value, tl.dtype):
        return f"tl.{value.name}"
    if isinstance(value, JITFunction):  # an activation, say, as a constexpr
        return f"{value.fn.__qualname__}:{source_digest(value.fn)}"
    return value


def _decode(encoded: dict[str, Any]) -> LaunchConfig:
    """Return a configuration from the book, without its hook: a hook is code, and a book holds no code."""
    options = {name: value for name, value in encoded.items() if name in _OPTIONS}
    kwargs = {name: value for name, value in encoded.items() if name not in {*_OPTIONS, _HOOK}}
    return LaunchConfig(triton.Config(kwargs, **options))


register_codec(LaunchConfig, _encode, _decode)
# Constants in a kernel's module: without these codecs, editing a constant would leave the kernel's checksum unchanged.
register_codec(tl.constexpr, lambda constant: constant.value, tl.constexpr)
register_codec(tl.dtype, lambda dtype: dtype.name, tl.dtype)


@final
class Launch:
    """One call of a kernel; unpacks to grid, positional arguments and keyword arguments.

    A class of its own, so that the core finds no arrays in it: Triton's keys have less in them than arrays.
    """

    __slots__ = ("args", "grid", "kwargs")

    def __init__(self, grid: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.grid, self.args, self.kwargs = grid, args, dict(kwargs)

    def __iter__(self) -> Iterator[Any]:
        return iter((self.grid, self.args, self.kwargs))

    def positional(self, names: Sequence[str]) -> dict[str, Any]:
        """Return the positional arguments by name."""
        return dict(zip(names, self.args, strict=False))

    @property
    def keywords(self) -> dict[str, Any]:
        """The keyword arguments as Triton's hooks get them."""
        return {**self.kwargs, "grid": self.grid, "warmup": False}

    def named(self, names: Sequence[str]) -> dict[str, Any]:
        """Return all arguments by name, as Triton's hooks get them."""
        return {**self.positional(names), **self.keywords}
