"""One walk over arguments, and the facts that it finds: arrays, their specs, devices, libraries, timers, settings.

`parts_of` alone decides which values are containers. Keys, devices, restoring, comparing and recording all use it, so
an array that has a key is also restored after tuning, however deep it lies.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import operator
import sys
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import nullcontext
from types import NoneType
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from tunebook._arrays.library import (
    ArraySpec,
    TuningSite,
    is_registered_class,
    library_named,
    library_of,
    load_adapters,
    loaded_libraries,
    root_module,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from tunebook._arrays.library import Framework, Timer

T = TypeVar("T")

MAX_DEPTH: Final = 64
_MANY: Final = 10_000
KEY_FUNCTIONS: Final[dict[type, Callable[[Any], object]]] = {}  # of `register_key`
_CONTAINERS: Final = frozenset({list, tuple, dict})  # never arrays, whatever their subclasses are
ATOMS: Final = frozenset({bool, int, float, complex, str, bytes, NoneType, type})

_SAME_PLATFORM: Final = {"cuda": "gpu", "rocm": "gpu", "hip": "gpu", "mps": "gpu", "metal": "gpu", "xpu": "gpu"}


def is_array(x: object) -> bool:
    """Return whether this has a shape and a dtype, or is of a registered class; numpy's scalars are not arrays."""
    # A tuple: the module numpy has a `shape` and a `dtype` too.
    if isinstance(x, type) or not isinstance(getattr(x, "shape", None), tuple) or getattr(x, "dtype", None) is None:
        return is_registered_class(type(x))
    numpy = sys.modules.get("numpy")
    return numpy is None or not isinstance(x, numpy.generic)


def field_names(value: Any) -> tuple[str, ...] | None:
    """Return the fields of a dataclass, NamedTuple or pydantic object; None for any other value."""
    kind = type(value)
    if dataclasses.is_dataclass(kind):
        return tuple(field.name for field in dataclasses.fields(kind))
    if isinstance(value, tuple):
        return cast("tuple[str, ...] | None", getattr(kind, "_fields", None))
    models = getattr(kind, "model_fields", None)
    return tuple(models) + tuple(value.model_extra or ()) if isinstance(models, dict) else None


def parts_of(value: Any) -> dict[Any, Any] | None:
    """Return the parts of a container by index, key or field name; None for a leaf. An array is a leaf.

    >>> parts_of(("a", "b")), parts_of({"x": 1}), parts_of("text")
    ({0: 'a', 1: 'b'}, {'x': 1}, None)
    """
    kind: Any = type(value)
    read = _reader_of_parts(kind)
    return None if read is None or (kind not in _CONTAINERS and is_array(value)) else read(value)


@functools.lru_cache(1000)
def _reader_of_parts(kind: type) -> Callable[[Any], dict[Any, Any]] | None:
    """Return how to read the parts of a container; None for the class of a leaf."""
    if issubclass(kind, (list, tuple)):
        return lambda value: dict(enumerate(value))
    if issubclass(kind, Mapping):
        return dict
    if issubclass(kind, (set, frozenset)):
        return lambda value: {item: item for item in value}
    if issubclass(kind, functools.partial):
        return lambda value: {"func": value.func, "args": value.args, "keywords": value.keywords}
    if dataclasses.is_dataclass(kind) or isinstance(getattr(kind, "model_fields", None), dict):
        # A field without a default may be unset while an object is being made.
        return lambda value: {name: getattr(value, name, None) for name in field_names(value) or ()}
    return None


def walk(value: object) -> Iterator[Any]:
    """Yield the leaves of a value, in order.

    A container inside itself, or 65 deep, is left out: it has no key. After 10,000 containers each is visited once,
    because an object graph that is ignored in the key may have more paths than nodes.
    """
    seen: set[int] = set()
    visits = 0
    stack: list[tuple[Any, tuple[int, ...]]] = [(value, ())]
    while stack:
        value, inside = stack.pop()
        parts = parts_of(value)
        if parts is None:
            yield value
        elif id(value) not in inside and len(inside) <= MAX_DEPTH and (visits < _MANY or id(value) not in seen):
            visits += 1
            seen.add(id(value))
            inside = (*inside, id(value))
            stack.extend((part, inside) for part in reversed(parts.values()))


def map_leaves(change: Callable[[Any], Any], value: Any, _made: dict[int, tuple[Any, Any]] | None = None) -> Any:
    """Return a value with each leaf replaced by `change(leaf)`; a container inside itself stays as it is.

    Lists, tuples and dicts are made anew. Other containers are copied only if one of their leaves has changed.
    """
    made = {} if _made is None else _made  # by id, with the value itself: an id is unique only while it lives
    parts = parts_of(value)
    if parts is None:
        return change(value)
    if id(value) not in made:
        made[id(value)] = value, value
        new = {step: map_leaves(change, part, made) for step, part in parts.items()}
        made[id(value)] = value, _rebuild(value, new, same=all(new[step] is part for step, part in parts.items()))
    return made[id(value)][1]


def _rebuild(value: Any, parts: dict[Any, Any], *, same: bool) -> Any:  # noqa: PLR0911 - one for each kind
    """Return a copy of a container with these parts; the container itself if its class cannot be made again."""
    kind = type(value)
    if kind in (list, tuple):
        return kind(parts.values())
    if kind is dict:
        return parts
    if same:
        return value
    try:
        if isinstance(value, functools.partial):
            return kind(parts["func"], *parts["args"], **parts["keywords"])
        if isinstance(value, (tuple, set, frozenset)):
            return kind(*parts.values()) if hasattr(kind, "_fields") else kind(parts.values())
        if isinstance(value, Mapping) and not isinstance(value, MutableMapping):
            return kind(parts)
        copied = copy.copy(value)
        for step, part in parts.items():
            if isinstance(value, (list, MutableMapping)):
                copied[step] = part
            else:
                object.__setattr__(copied, step, part)  # frozen, or its __init__ does not take every field
    except (TypeError, AttributeError, ValueError):
        return value
    return copied


def key_function(kind: type) -> Callable[[Any], object] | None:
    """Return the function that `register_key` was given for a class or one of its bases, or None."""
    return next((KEY_FUNCTIONS[base] for base in kind.__mro__ if base in KEY_FUNCTIONS), None)


def arrays_in(value: object, _depth: int = 0) -> Iterator[Any]:
    """Yield the arrays in a value, however deep in containers, also the arrays that a registered key refers to."""
    for leaf in walk(value):
        if type(leaf) in ATOMS:
            continue
        if is_array(leaf):
            yield leaf
        elif KEY_FUNCTIONS and _depth <= MAX_DEPTH and (read := key_function(type(leaf))) is not None:
            yield from arrays_in(read(leaf), _depth + 1)


# ------------------------------------------------------------------------------------------------------- describing


class DeviceOrdinals:
    """Numbers the devices of a call by first appearance: the second GPU of any call is "gpu#1"."""

    __slots__ = ("_seen",)

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str], dict[str, int]] = {}

    def label(self, library: str, device: object) -> str:
        """Return the platform of a device, with its number if the call has met another device of that platform."""
        platform = platform_of(device)
        seen = self._seen.setdefault((library, platform), {})
        ordinal = seen.setdefault(str(device), len(seen))
        return f"{platform}#{ordinal}" if ordinal else platform


def describe(x: Any, devices: DeviceOrdinals | None = None) -> ArraySpec:
    """Return the spec of an array; pass one `devices` for all arrays of a call that may span several."""
    if isinstance(x, ArraySpec):
        return x
    library = library_of(x)
    shape = library.shape(x)
    device = library.device(x)
    members = members_of(device)
    if len(members) > 1:
        platform = f"{platform_of(members[0])}*{len(members)}"
    elif device is None:
        platform = ""
    else:
        platform = (devices or DeviceOrdinals()).label(library.name, members[0] if members else device)
    layout, grad, variant = library.layout(x, shape), library.grad(x), library.variant(x)
    return ArraySpec(library.name, library.dtype(x), shape, layout, platform, grad, variant=variant)


def platform_of(device: object) -> str:
    """Return "cpu", "gpu", "tpu" or the library's own word for a device object of any library; "" if unknown."""
    if device is None:
        return ""
    members = () if isinstance(device, str) else members_of(device)
    if members:
        return platform_of(members[0])
    named = device.partition(":")[0] if isinstance(device, str) else None
    for word in (named, getattr(device, "platform", None), getattr(device, "type", None)):  # jax, torch
        if isinstance(word, str):
            return _SAME_PLATFORM.get(word.lower(), word.lower())
    return library_named(root_module(device.__class__)).platform(device)  # a weak proxy has its referent's __class__


def members_of(device: object) -> list[Any]:
    """Return the devices of a jax sharding, which an array has in place of a device when it is spread over several."""
    members = getattr(device, "members", None)  # a mesh whose devices are not known, only their number
    if isinstance(members, list):
        return members
    return sorted(getattr(device, "device_set", None) or (), key=lambda member: int(member.id))


def devices_in(args: object) -> Iterator[object]:
    """Yield the devices of all arrays in `args`, and each device that an array is spread over."""
    for x in arrays_in(args):
        device = x.platform.partition("#")[0] if isinstance(x, ArraySpec) else library_of(x).device(x)
        if device:
            yield from members_of(device) or [device]


def device_of(args: object) -> object | None:
    """Return the device of the first array in `args`, an accelerator before the host; None if no array has a device."""
    # A kernel that gets its lengths from numpy and its data on a GPU runs on the GPU.
    host: object | None = None
    for device in devices_in(args):
        if platform_of(device) != "cpu":
            return device
        host = device if host is None else host
    return host


def accelerator() -> object | None:
    """Return the accelerator of the libraries that this process has loaded; None if there is only the host."""
    load_adapters()
    # jax last: to ask it may take most of the memory of its device.
    asked = sorted(loaded_libraries(), key=lambda library: library.name == "jax")
    return next((device for library in asked if (device := library.accelerator()) is not None), None)


def libraries_of(args: object) -> frozenset[str]:
    """Return the libraries whose arrays are in `args`, however deep in containers."""
    return frozenset(x.library if isinstance(x, ArraySpec) else library_of(x).name for x in arrays_in(args))


# ------------------------------------------------------------------------------------------------- a library is asked


def timer_for(arguments: object) -> Timer | None:
    """Return the timer of calls with these arguments; None is the host's clock."""
    timers = (library_named(name).timer(arguments) for name in sorted(libraries_of(arguments)))
    return next(filter(None, timers), None)


def framework_of(arguments: object) -> Framework | None:
    """Return the framework whose arrays are among some arguments."""
    frameworks = (library_named(name).framework for name in sorted(libraries_of(arguments)))
    return next(filter(None, frameworks), None)


def surroundings_of(arguments: object) -> Mapping[str, Any]:
    """Return the settings that a call depends on beside its arguments, for its key."""
    framework = framework_of(arguments)
    return {} if framework is None else framework.surroundings(arguments)


def obstacle_to(inv: Any, *, unseen: bool = False) -> str | None:
    """Return the reason why a call cannot be tuned at all, or None; `unseen`: its arrays are yet to be made."""
    arguments = inv.args, inv.kwargs
    asked = [library.framework for library in loaded_libraries()] if unseen else [framework_of(arguments)]
    return next(filter(None, (framework.obstacle(arguments) for framework in asked if framework is not None)), None)


def is_traced(inv: Any) -> bool:
    """Return whether a compiler traces the caller of a call, so that its arrays have no values."""
    framework = framework_of((inv.args, inv.kwargs))
    return framework is not None and framework.is_traced((inv.args, inv.kwargs))


def tuning_site(inv: Any) -> AbstractContextManager[tuple[TuningSite | None, Callable[..., Any]]]:
    """Give the place where candidates of a call may run, and `there(function, *args)`, which calls a function in it.

    Without a framework the place is None, and functions are called right here, in the caller's thread.
    """
    framework = framework_of((inv.args, inv.kwargs))
    return nullcontext((None, operator.call)) if framework is None else framework.capture(inv).site()


def at_tuning_site(inv: Any, work: Callable[[TuningSite | None], T]) -> T:
    """Call `work` with the place where candidates of a call may run, in that place."""
    with tuning_site(inv) as (site, there):
        return there(work, site)  # type: ignore[no-any-return] # a function of any kind


def is_compiling() -> bool:
    """Return whether torch's compiler reads the running code to make a program of it, instead of running it."""
    # Not by the record: the compiler reads a first call before the adapter is loaded.
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.compiler.is_dynamo_compiling())


def outside_of_traces() -> AbstractContextManager[object]:
    """Return a block in which functions of jax return values, though the caller is being traced."""
    jax = sys.modules.get("jax")
    return nullcontext() if jax is None else jax.ensure_compile_time_eval()


def mesh_classes() -> tuple[type, ...]:
    """Return the classes by which calls of this process's libraries are spread over devices."""
    load_adapters()
    return tuple(kind for library in loaded_libraries() for kind in library.mesh_classes())
