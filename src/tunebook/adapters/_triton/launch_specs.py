"""A launch as plain values, from which another process makes a launch like it; no tensor is kept.

A tensor is its dtype, shape, strides and place in a storage, so that tensors that share memory share it again. Integers
often say which work a kernel does (offsets of sequences, indices of blocks), so a small tensor of integers is kept with
its values, and a large one with its range and whether it is sorted. Of floats nothing else is kept.
"""

from __future__ import annotations

import math
import sys
import zlib
from binascii import a2b_base64, b2a_base64
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, final

import torch
import triton.language as tl
from triton.runtime import JITFunction
from triton.runtime.jit import TensorWrapper

from tunebook._base.errors import CodecError, Unsupported
from tunebook.adapters._triton.candidate import OF_AUTHORS, Launch

try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # not for every vendor
    TensorDescriptor = None

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    Plain = Any  # numbers, texts, None, and lists and dicts of these

# Integers with more elements are kept as their range.
SAMPLED: Final = 1 << 16
# Triton compiles other code for an address that this divides.
_ALIGNMENT: Final = 16
_AT_ONCE: Final = 1 << 24  # elements that are filled at once: random floats take four bytes each until they are copied
_IS: Final = "is"  # the key that says what a dict stands for
_SCALARS: Final = (bool, int, float, str, type(None))


# ---------------------------------------------------------------------------------------------------- describing


def describe_launch(launch: Launch, grid: Plain, *, samples: bool) -> Plain:
    """Return a launch as plain values. `samples` reads integers, which waits for the device."""
    describer = _LaunchDescriber(samples=samples)
    return {
        "grid": grid,
        "args": [describer.plain(value) for value in launch.args],
        "kwargs": {name: describer.plain(value) for name, value in launch.kwargs.items()},
        "storages": describer.storages,
    }


@final
class _LaunchDescriber:
    """Describes the arguments of one launch. `storages` are size, place and remainder of the address of each."""

    def __init__(self, *, samples: bool) -> None:
        self._samples = samples
        self._known: dict[int, int] = {}
        self.storages: list[list[Plain]] = []

    def plain(self, value: Any) -> Plain:  # noqa: PLR0911 - one for each kind of value
        """Return a value as plain values; for an object of an unknown class, the name of the class."""
        if type(value) in _SCALARS:
            return value
        if isinstance(value, (tuple, list)):
            items = [self.plain(item) for item in value]
            return {_IS: "list" if type(value) is list else "tuple", "items": items}
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, TensorWrapper):  # of `triton.reinterpret`
            return {_IS: "reinterpreted", "base": self.plain(value.base), "dtype": self.plain(value.dtype)}
        if isinstance(value, tl.constexpr):
            return {_IS: "constexpr", "value": self.plain(value.value)}
        if isinstance(value, tl.dtype):
            return {_IS: "dtype", "name": f"tl.{value.name}"}
        if isinstance(value, torch.dtype):
            return {_IS: "dtype", "name": str(value)}
        if TensorDescriptor is not None and type(value) is TensorDescriptor:
            return {_IS: "descriptor", **{name: self.plain(part) for name, part in vars(value).items()}}
        place = place_of(value.fn if isinstance(value, JITFunction) else value)
        return {_IS: "opaque", "class": _class_name(value)} if place is None else {_IS: "object", "at": place}

    def _tensor(self, x: torch.Tensor) -> Plain:
        try:
            storage = x.untyped_storage()
            at = storage.data_ptr() % _ALIGNMENT
        except (RuntimeError, NotImplementedError):  # a sparse tensor, or one without memory
            return {_IS: "opaque", "class": f"{_class_name(x)} ({x.layout}, {x.device})"}
        index = self._known.setdefault(storage._cdata, len(self.storages))  # noqa: SLF001 - its identity
        if index == len(self.storages):
            self.storages.append([storage.nbytes(), "cpu" if x.device.type == "cpu" else "gpu", at])
        spec = {
            _IS: "tensor",
            "dtype": str(x.dtype),
            "shape": list(x.shape),
            "strides": list(x.stride()),
            "storage": index,
            "offset": x.storage_offset(),
        }
        integers = not x.dtype.is_floating_point and not x.dtype.is_complex and x.numel() > 0
        return {**spec, **_integers(x)} if integers and self._samples else spec


def _integers(x: torch.Tensor) -> dict[str, Plain]:
    """Return the values of a tensor of integers as text, or of a large one its range, and whether it is sorted."""
    if x.numel() <= SAMPLED:
        raw = x.detach().cpu().numpy().tobytes()  # in the order of the indices
        return {"values": b2a_base64(zlib.compress(raw, 1), newline=False).decode()}
    flat = x.detach().reshape(-1).to(torch.int64)
    low, high = flat.aminmax()
    ascending = bool((flat[1:] >= flat[:-1]).all())
    return {"range": [int(low), int(high)], "sorted": ascending}


def describe_grid(grid: Any, names: Sequence[str], metas: Iterable[Mapping[str, Any]]) -> Plain:
    """Return a grid as plain values: of a function, its results for configurations, by the values of `names` in each.

    `metas` are the arguments of the function. A recording holds no code: of the function itself, only the place to
    import it from is kept.
    """
    if not callable(grid):
        return [int(n) for n in grid]
    results: dict[tuple[int, ...], set[str]] = {}
    for meta in metas:
        try:
            found = tuple(int(n) for n in grid(meta))
        except OF_AUTHORS:  # on a configuration that pruning would drop
            continue
        results.setdefault(found, set()).add(_settings(meta, names))
    table = [[list(found), sorted(settings)] for found, settings in results.items()]
    return {"names": list(names), "table": table, "function": place_of(grid)}


def _settings(meta: Mapping[str, Any], names: Sequence[str]) -> str:
    """Return the text of some values; a text, because True, 1 and 1.0 are equal as keys of a dict."""
    describer = _LaunchDescriber(samples=False)
    values = ((name, meta.get(name)) for name in names)
    return ", ".join(f"{name}={describer.plain(getattr(value, 'value', value))!r}" for name, value in values)


def place_of(value: Any) -> str | None:
    """Return where a value can be imported from, as "module:name"; None for others, for example closures."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str):
        return None
    found = _look_up(sys.modules.get(module), name)
    return f"{module}:{name}" if found is value or getattr(found, "fn", None) is value else None


def _look_up(where: Any, name: str) -> Any:
    for part in name.split("."):
        where = getattr(where, part, None)
    return where


def _class_name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


# -------------------------------------------------------------------------------------------------------- making


@final
class RecordedGrid:
    """The function that returns the grid of a recorded launch, for configurations that its kernel had then."""

    def __init__(self, spec: Plain) -> None:
        self._names: list[str] = spec["names"]
        self._grids = {text: tuple(grid) for grid, texts in spec["table"] for text in texts}
        self._place: str | None = spec["function"]

    def __call__(self, meta: Mapping[str, Any]) -> tuple[int, ...]:
        text = _settings(meta, self._names)
        found = self._grids.get(text)
        if found is not None:
            return found
        if self._place is not None:
            return tuple(_import(self._place)(meta))
        raise Unsupported(f"the recording does not have the grid for {text}, which was not a candidate then")


class DescribedTensor(torch.Tensor):  # type: ignore[misc] # torch is not checked
    """A tensor without memory, for all questions but its values. It knows how its address would be aligned."""

    remainder = 0

    def data_ptr(self) -> int:
        """Return the remainder of the address; Triton asks only whether 16 divides it."""
        return self.remainder


def without_memory(spec: Plain) -> Launch:
    """Return a recorded launch on tensors without memory: it can be keyed, pruned and compiled."""

    def tensor(of: Plain) -> Any:
        dtype = _dtype(of["dtype"])
        flat = torch.empty(0, dtype=dtype, device="meta")
        made = flat.as_strided(of["shape"], of["strides"], of["offset"]).as_subclass(DescribedTensor)
        start = spec["storages"][of["storage"]][2]
        made.remainder = (start + of["offset"] * dtype.itemsize) % _ALIGNMENT
        return made

    return _made(spec, tensor)


def make_launch(spec: Plain, gpu: Any, seed: int = 0) -> Launch:
    """Return a recorded launch on new tensors: recorded integers, and random floats. `gpu` is the torch device."""
    storages = [_make_storage(size, where, start, gpu) for size, where, start in spec["storages"]]
    generators: dict[Any, torch.Generator] = {}

    def view(of: Plain, shape: Sequence[int], strides: Sequence[int]) -> torch.Tensor:
        storage = storages[of["storage"]]
        empty = torch.empty(0, dtype=_dtype(of["dtype"]), device=storage.device)
        return empty.set_(storage, of["offset"], shape, strides)

    def flat(of: Plain) -> torch.Tensor:
        reach = sum((n - 1) * stride for n, stride in zip(of["shape"], of["strides"], strict=True))
        return view(of, [0 if 0 in of["shape"] else reach + 1], [1])

    tensors = list(_tensors_in([spec["args"], spec["kwargs"]]))
    # Integers last, because in memory that is shared, they decide what a kernel does.
    for of in sorted(tensors, key=lambda of: "values" in of):
        target = flat(of)
        generator = generators.setdefault(target.device, torch.Generator(target.device).manual_seed(seed))
        if "values" not in of:
            _fill(target, of, generator)
            continue
        # One element of each broadcast dimension: torch does not write to one place several times.
        shape = [n if stride else min(n, 1) for n, stride in zip(of["shape"], of["strides"], strict=True)]
        values = _read_values(of)
        view(of, shape, of["strides"]).copy_(values[tuple(slice(n) for n in shape)])
    return _made(spec, lambda of: view(of, of["shape"], of["strides"]))


def _make_storage(size: int, where: str, remainder: int, gpu: Any) -> torch.UntypedStorage:
    device = torch.device("cpu") if where == "cpu" else gpu
    try:
        whole = torch.zeros(size + remainder, dtype=torch.uint8, device=device).untyped_storage()
    except RuntimeError as error:
        raise Unsupported(f"cannot make up {size / 2**30:.3g} GiB of arguments on {device}: {error}") from error
    return whole[remainder:] if remainder else whole


def _read_values(of: Plain) -> torch.Tensor:
    dtype = _dtype(of["dtype"])
    size = math.prod(of["shape"]) * dtype.itemsize
    try:
        # At most one byte more than the tensor takes: a planted text must not fill the memory.
        raw = zlib.decompressobj().decompress(a2b_base64(of["values"]), size + 1)
        return torch.frombuffer(bytearray(raw), dtype=dtype).reshape(of["shape"])
    except (ValueError, RuntimeError, zlib.error) as error:
        kind = f"{of['dtype']}{of['shape']}"
        raise CodecError(f"the recorded values of a tensor {kind} cannot be read: {error}") from error


def _fill(target: torch.Tensor, of: Plain, generator: torch.Generator) -> None:
    """Fill a flat tensor with random values: floats away from zero, and integers of the recorded range."""
    if target.dtype.is_complex:
        target = torch.view_as_real(target).flatten()
    low, high = of.get("range", (1, 3))  # 1 to 3: fit to divide by, and an index into nearly anything
    for part in target.split(_AT_ONCE):
        if target.dtype.is_floating_point:
            values = torch.randn(part.shape, generator=generator, device=part.device)
            part.copy_(values + torch.copysign(torch.tensor(0.25, device=part.device), values))
        else:
            values = torch.rand(part.shape, generator=generator, device=part.device, dtype=torch.float64)
            part.copy_((values * (high - low + 1) + low).floor().clamp_(low, high))
    if of.get("sorted"):
        target.copy_(target.to(torch.int64).sort().values)


def _made(spec: Plain, tensor: Callable[[Plain], Any]) -> Launch:
    def made(value: Plain) -> Any:
        return value if not isinstance(value, dict) else _MAKERS[value[_IS]](value, made, tensor)

    grid = spec["grid"]
    args = tuple(made(value) for value in spec["args"])
    kwargs = {name: made(value) for name, value in spec["kwargs"].items()}
    return Launch(tuple(grid) if isinstance(grid, list) else RecordedGrid(grid), args, kwargs, spec)


def _refuse(value: Plain, _made: object, _tensor: object) -> Any:
    raise Unsupported(f"an argument is a {value['class']}, which a recording cannot hold; tune it in a launch")


def _descriptor(value: Plain, made: Callable[[Plain], Any], _tensor: object) -> Any:
    return TensorDescriptor(**{name: made(part) for name, part in value.items() if name != _IS})


def _wrapper(value: Plain, made: Callable[[Plain], Any], _tensor: object) -> Any:
    return TensorWrapper(made(value["base"]), made(value["dtype"]))


_MAKERS: Final[dict[str, Callable[[Plain, Callable[[Plain], Any], Callable[[Plain], Any]], Any]]] = {
    "tensor": lambda value, _made, tensor: tensor(value),
    "list": lambda value, made, _tensor: [made(item) for item in value["items"]],
    "tuple": lambda value, made, _tensor: tuple(made(item) for item in value["items"]),
    "constexpr": lambda value, made, _tensor: tl.constexpr(made(value["value"])),
    "dtype": lambda value, _made, _tensor: _dtype(value["name"]),
    "object": lambda value, _made, _tensor: _import(value["at"]),
    "reinterpreted": _wrapper,
    "descriptor": _descriptor,
    "opaque": _refuse,
}


def keeps_values(spec: Plain) -> bool:
    """Return whether a recorded launch has integers of its program."""
    return any("values" in of or "range" in of for of in _tensors_in([spec["args"], spec["kwargs"]]))


def _tensors_in(value: Plain) -> Iterator[Plain]:
    if isinstance(value, dict) and value.get(_IS) == "tensor":
        yield value
    elif isinstance(value, (dict, list)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(part)


def _dtype(name: str) -> Any:
    library, _, short = name.partition(".")
    if library == "tl":
        return tl.dtype(short)
    found = getattr(torch, short, None)
    if not isinstance(found, torch.dtype):
        raise CodecError(f"{name!r} is not a dtype of this torch")
    return found


def _import(place: str) -> Any:
    module, _, name = place.partition(":")
    try:
        found = _look_up(import_module(module), name)
    except ImportError as error:
        raise Unsupported(f"the launch needs {place}, which cannot be imported: {error}") from error
    if found is None:
        raise Unsupported(f"{module} does not define {name}: was it renamed after the recording?")
    return found
