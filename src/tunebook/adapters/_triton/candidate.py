"""A `triton.Config` as a candidate of the core, one launch of a kernel, and its tensors, put back between runs."""

from __future__ import annotations

import inspect
from copy import copy
from typing import TYPE_CHECKING, Any, Final, final

import triton
import triton.language as tl
from triton.runtime import JITFunction

from tunebook._arrays.describe import framework_of
from tunebook._base.config_codec import register_codec
from tunebook._code.checksum import source_digest
from tunebook._measure.argument_restore import Restorer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

# All tensors are copied until it is known which of them are written to. The copies may take this part of free memory.
_PART_OF_FREE: Final = 0.25
# The errors that functions of a kernel's author may raise on values which the author did not think of.
OF_AUTHORS: Final = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
# The fields that the installed version has: they differ from version to version.
_OPTIONS: Final = frozenset(inspect.signature(triton.Config).parameters) - {"kwargs", "pre_hook"}


@final
class LaunchConfig:
    """A `triton.Config` with its launch arguments worked out once: asking a `triton.Config` takes 1 us each time."""

    __slots__ = ("config", "meta", "names", "pre_hook")

    def __init__(self, config: triton.Config) -> None:
        self.config: Final = config
        self.meta: Final[dict[str, Any]] = config.all_kwargs()
        self.names: Final = tuple(self.meta)
        self.pre_hook: Final[Callable[[dict[str, Any]], object] | None] = config.pre_hook

    def __repr__(self) -> str:
        return f"triton.Config({self.config})"

    def is_current(self) -> bool:
        """Return whether the configuration is as it was: a program may write to its fields."""
        return self.meta == self.config.all_kwargs() and self.pre_hook is self.config.pre_hook


@final
class LiveConfig:
    """Stands for the configuration of launches that a session runs; it has the fields that a launch reads first."""

    __slots__ = ("pre_hook", "session")

    def __init__(self, session: Any) -> None:
        self.session: Final = session
        self.pre_hook: Final = session  # anything but None: a launch without a hook looks at nothing else

    @property
    def config(self) -> triton.Config:
        """The configuration that leads now."""
        found: triton.Config = self.session.config.config
        return found


def _encode(candidate: LaunchConfig) -> dict[str, object]:
    plain = {name: _plain(value) for name, value in candidate.meta.items()}
    # Two configurations may differ in nothing but the hook, which changes the effect of a launch.
    return plain if candidate.pre_hook is None else {**plain, "pre_hook": source_digest(candidate.pre_hook)}


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
    options = {name: encoded.get(name) for name in _OPTIONS}  # a field that is None is left out when it is encoded
    kwargs = {name: value for name, value in encoded.items() if name not in {*_OPTIONS, "pre_hook"}}
    return LaunchConfig(triton.Config(kwargs, **options))


def from_values(values: Mapping[str, Any]) -> triton.Config:
    """Return the configuration with these values by name; Triton's own options may be among them."""
    kwargs = {name: value for name, value in values.items() if name not in _OPTIONS}
    return triton.Config(kwargs, **{name: value for name, value in values.items() if name in _OPTIONS})


register_codec(LaunchConfig, _encode, _decode)
# Constants in a kernel's module: without these codecs, editing a constant would leave the kernel's checksum unchanged.
register_codec(tl.constexpr, lambda constant: constant.value, tl.constexpr)
register_codec(tl.dtype, lambda dtype: dtype.name, tl.dtype)


@final
class Launch:
    """One call of a kernel; unpacks to grid, positional arguments and keyword arguments."""

    # Not a tuple, so that the core finds no arrays in it: Triton's keys have less in them than arrays.

    __slots__ = ("args", "candidates", "grid", "heuristic", "kwargs", "spec", "stand_in")

    def __init__(self, grid: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], spec: Any = None) -> None:
        self.grid, self.args, self.kwargs = grid, args, dict(kwargs)
        self.spec = spec  # of a launch that was made from a recording: see `launch_specs`
        self.candidates: list[LaunchConfig] | None = None  # those that pruning left: it is asked once per launch
        self.heuristic: LaunchConfig | None = None  # the heuristic's answer, of a launch without its arguments
        self.stand_in: Launch | None = None  # the launch that is measured in place of this one (see `buckets`)

    @property
    def measured(self) -> Launch:
        """The launch that is compiled and measured to tune this one."""
        return self.stand_in or self

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


def after_hook(launch: Launch, cfg: LaunchConfig, names: Sequence[str]) -> Launch | None:
    """Return a launch as it is compiled: hooks set the blocks of tensor descriptors, and a program depends on them.

    The hook gets copies of the descriptors, and tensors without data, so that nothing happens on the device. None if it
    needs the data: only a real launch shows what it sets.
    """
    given = {} if cfg.pre_hook is None else launch.named(names)
    if cfg.pre_hook is None or not any(map(_is_descriptor, given.values())):
        return launch
    copies = {id(value): copy(value) for value in given.values() if _is_descriptor(value)}
    bases = {key: each.base for key, each in copies.items()}
    for each in copies.values():
        each.base = _without_data(each.base)
    try:
        cfg.pre_hook({**{n: copies.get(id(v), _without_data(v)) for n, v in given.items()}, **cfg.meta})
    except OF_AUTHORS:
        return None
    for key, each in copies.items():
        each.base = bases[key]
    args = tuple(copies.get(id(value), value) for value in launch.args)
    return Launch(launch.grid, args, {name: copies.get(id(value), value) for name, value in launch.kwargs.items()})


def _is_descriptor(value: object) -> bool:
    return hasattr(value, "block_shape") and hasattr(value, "base")


def _without_data(value: Any) -> Any:
    return value.to("meta") if hasattr(value, "data_ptr") and hasattr(value, "to") else value


@final
class SavedTensors:
    """Before every run, sets the tensors named in `zeroed` to zero, and puts back those named in `restored`.

    The first run shows which of the others are written to, if there is memory for their copies; these are put back too.
    """

    def __init__(
        self, arguments: Mapping[str, Any], zeroed: Sequence[str], restored: Sequence[str], free_bytes: float
    ) -> None:
        tensors = {
            # `data`, because a write to the tensor itself would count as a change that forbids a backward pass.
            name: value.data
            for name, value in arguments.items()
            if type(value).__module__.partition(".")[0] == "torch"
            and getattr(value, "data_ptr", None) is not None
            # Not where two elements share a place in memory.
            and all(stride or size <= 1 for size, stride in zip(value.shape, value.stride(), strict=True))
        }
        self.tensors: Final = tensors
        self.declared: Final = frozenset({*zeroed, *restored} & tensors.keys())
        framework_of((*tensors.values(),))  # loads the adapter, which knows how to copy tensors
        self._zeroed = [tensors[name] for name in zeroed if name in tensors]
        self._declared = Restorer((), declared=[tensors[name] for name in restored if name in tensors])
        others = [x for name, x in tensors.items() if name not in {*zeroed, *restored}]
        affordable = sum(x.numel() * x.element_size() for x in others) <= _PART_OF_FREE * free_bytes
        self._others = Restorer(others if affordable else ())
        self._compared = False

    def written(self) -> list[str]:
        """Return the names of the tensors that the last run has written to, and of all that are declared."""
        changed = set(map(id, self._others.changed()))
        return [name for name, tensor in self.tensors.items() if id(tensor) in changed or name in self.declared]

    def restore(self) -> None:
        """Put back the tensors that are known to be written to."""
        for tensor in self._zeroed:
            tensor.zero_()
        self._declared.restore()
        self._others.restore()

    def notice(self) -> None:
        """Find out which tensors the first run has written to, and put them back; later calls do nothing."""
        if not self._compared:
            self._compared = True
            self._others.notice()
            self.restore()
