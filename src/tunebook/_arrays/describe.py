"""Arrays of any library, read by what they have in common; describing one imports nothing."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from tunebook._base.errors import DefinitionError, UnkeyableError, Unsupported
from tunebook._base.optional import require

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

_SAME_LIBRARY: Final = {"jaxlib": "jax"}  # an array's class lives in jaxlib, its tracer's in jax

_SAME_PLATFORM: Final = {"cuda": "gpu", "rocm": "gpu", "hip": "gpu", "mps": "gpu", "metal": "gpu", "xpu": "gpu"}

_OPENCL_KINDS: Final = ((2, "cpu"), (4, "gpu"), (8, "accelerator"))  # cl_device_type, a bit field


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """What tells arrays apart in a key. It has `.shape` and `.dtype` itself, and gives the key of the live array."""

    library: str
    dtype: str
    shape: tuple[int, ...]
    layout: str = "C"
    platform: str = ""
    grad: bool = False  # whether torch will ask for its gradient: then a call keeps more than its result


# ------------------------------------------------------------------------------------------------------- describing


def is_array(x: object) -> bool:
    """Return whether this has a shape and a dtype; numpy's scalars do too, but are values and not arrays."""
    # A tuple: the module numpy has a `shape` and a `dtype` too.
    if isinstance(x, type) or not isinstance(getattr(x, "shape", None), tuple) or getattr(x, "dtype", None) is None:
        return False
    numpy = sys.modules.get("numpy")
    return numpy is None or not isinstance(x, numpy.generic)


class DeviceOrdinals:
    """Numbers the devices of one call by first appearance: the second GPU of a call is "gpu#1", whichever it is."""

    __slots__ = ("_seen",)

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str], list[str]] = {}

    def label(self, library: str, device: object) -> str:
        """Return the platform of a device, with its number if the call has met another one of that platform."""
        platform = platform_of(device)
        seen = self._seen.setdefault((library, platform), [])
        name = str(device)
        if name not in seen:
            seen.append(name)
        ordinal = seen.index(name)
        return f"{platform}#{ordinal}" if ordinal else platform


def describe(x: Any, devices: DeviceOrdinals | None = None) -> ArraySpec:
    """Return what tells this array apart; pass one `devices` for all arrays of a call that may span several."""
    if isinstance(x, ArraySpec):
        return x
    library = root_module(type(x))
    shape = _symbols_named(x) if library == "jax" else concrete_shape(x)
    return ArraySpec(
        library=library,
        dtype=dtype_name(x.dtype),
        shape=shape,
        layout=_layout(x, library, shape),
        platform=_platform_label(x, library, devices or DeviceOrdinals()),
        grad=library == "torch" and x.requires_grad and sys.modules["torch"].is_grad_enabled(),
    )


def root_module(kind: type) -> str:
    """Return the name of the library that a class belongs to."""
    root = kind.__module__.partition(".")[0]
    return _SAME_LIBRARY.get(root, root)


def concrete_shape(x: Any) -> tuple[int, ...]:
    """Return the shape as integers; `UnkeyableError` if a dimension is a symbol."""
    for dimension in x.shape:
        # Not `operator.index`: torch's SymInt would answer it, and specialise the program that is being traced.
        if not isinstance(dimension, Integral):
            raise UnkeyableError(
                f"the shape ({', '.join(map(str, x.shape))}) has a dimension that is not a number. Symbolic shapes "
                "cannot be tuned: pass a configuration with the call, or let the heuristic answer"
            )
    return tuple(int(dimension) for dimension in x.shape)


def _symbols_named(x: Any) -> Any:
    """Return a shape of jax's, in which a symbol stands under its name: the heuristic may well answer such a call."""
    return tuple(int(n) if isinstance(n, Integral) else str(n) for n in x.shape)


def dtype_name(dtype: Any) -> str:
    """Return the name of a dtype of any library, without the library's name.

    >>> import numpy as np
    >>> dtype_name(np.dtype("float32")), dtype_name(np.dtype(">f4")), dtype_name("torch.float32")
    ('float32', '>f4', 'float32')
    """
    if getattr(dtype, "names", None) is not None or getattr(dtype, "subdtype", None) is not None:
        return str(dtype)  # numpy calls every record of 8 bytes "void64", whatever its fields are
    if getattr(dtype, "isnative", True) is False:
        return str(dtype.str)  # numpy calls both byte orders "float32"
    name = getattr(dtype, "name", None)
    return name if isinstance(name, str) else str(dtype).rpartition(".")[2]


def _layout(x: Any, library: str, shape: tuple[int, ...]) -> str:
    if library == "torch" and str(x.layout) != "torch.strided":
        return str(x.layout).removeprefix("torch.")  # a sparse tensor raises when asked for its strides
    strides = getattr(x, "strides", None)
    if isinstance(strides, tuple):
        return layout_class(shape, strides, x.dtype.itemsize)
    stride = getattr(x, "stride", None)
    return layout_class(shape, tuple(stride()), 1) if callable(stride) else "C"


def layout_class(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> str:
    """Return the class of a memory layout: what a kernel's speed depends on, and no exact stride.

    "C" and "F" are dense. "P021" is dense too, its dimensions listed from the outermost to the innermost. Whatever
    else there is starts with "S": `-` stands before a dimension that runs backwards, `*` before one that is broadcast,
    and a `g` at the end says that there are gaps between neighbours in the innermost dimension. Dimensions of size 1
    have no layout and are left out.

    >>> layout_class((4, 8), (32, 4), 4), layout_class((4, 8), (4, 16), 4), layout_class((4, 8), (64, 8), 4)
    ('C', 'F', 'S01g')
    """
    real = [i for i, n in enumerate(shape) if n > 1]
    if 0 in shape or not real:
        return "C"
    order = sorted(real, key=lambda i: (-abs(strides[i]), i))
    if _is_dense(order, shape, strides, itemsize):
        if order == real:
            return "C"
        return "F" if order == real[::-1] else "P" + _joined(map(str, order), len(shape))
    marks = {i: "*" if strides[i] == 0 else "-" if strides[i] < 0 else "" for i in order}
    smallest = min((abs(strides[i]) for i in order if strides[i]), default=itemsize)
    gaps = "g" if smallest > itemsize else ""
    return "S" + _joined((f"{marks[i]}{i}" for i in order), len(shape)) + gaps


def _joined(dimensions: Iterable[str], rank: int) -> str:
    return ("" if rank <= 10 else ".").join(dimensions)  # "P0.10.1": beyond ten dimensions they have two digits


def _is_dense(order: Sequence[int], shape: Sequence[int], strides: Sequence[int], itemsize: int) -> bool:
    expected = itemsize
    for i in reversed(order):
        if strides[i] != expected:
            return False
        expected *= shape[i]
    return True


# ---------------------------------------------------------------------------------------------------------- devices


def platform_of(device: object) -> str:
    """Return "cpu", "gpu", "tpu" or the library's own word for a device object of any library; "" if unknown."""
    if device is None:
        return ""
    if isinstance(device, str):
        return _platform_name(device.partition(":")[0])
    members = members_of(device)
    if members:
        return platform_of(members[0])
    for attribute in ("platform", "type"):  # jax, torch
        word = getattr(device, attribute, None)
        if isinstance(word, str):
            return _platform_name(word)
        if isinstance(word, int):
            return next((name for bit, name in _OPENCL_KINDS if word & bit), "")
    return "gpu" if root_module(device.__class__) in ("cupy", "numba") else ""  # a proxy has its referent's __class__


def _platform_name(word: str) -> str:
    word = word.lower()
    return _SAME_PLATFORM.get(word, word)


class MeshOf(NamedTuple):
    """Stands for several devices like one, where it is not known which."""

    device: Any
    size: int


def members_of(device: object) -> list[Any]:
    """Return the devices of a jax sharding, which an array has in place of a device when it is spread over several."""
    if isinstance(device, MeshOf):
        return [device.device] * device.size
    return sorted(getattr(device, "device_set", None) or (), key=lambda member: int(member.id))


def _platform_label(x: Any, library: str, devices: DeviceOrdinals) -> str:
    device = _device(x, library)
    members = members_of(device)
    if len(members) > 1:
        return f"{platform_of(members[0])}*{len(members)}"
    return "" if device is None else devices.label(library, members[0] if members else device)


def _device(x: Any, library: str) -> object | None:
    device: object | None = getattr(x, "device", None)
    if device is None and library == "numpy":
        device = "cpu"  # `.device` came with numpy 2.0
    elif device is None and library == "jax":
        device = _jax_device(x)
    elif library == "pyopencl":
        device = x.context.devices[0] if x.queue is None else x.queue.device
    elif device is None and library == "numba":
        # Its arrays do not say which, but are on a GPU. By name: the device is a weak proxy, which has no hash.
        name = sys.modules["numba.cuda"].get_current_device().name
        device = f"gpu:{name.decode() if isinstance(name, bytes) else name}"
    return device


def _jax_device(x: Any) -> object | None:
    """Return where an array will be that a trace, or a description, stands for: the default device, as far as is known.

    In place of several it is a sharding, or what has a `size` and a `platform` as one.
    """
    jax = sys.modules.get("jax")
    if jax is None:
        return None
    sharding = getattr(getattr(x, "aval", x), "sharding", None)
    mesh = getattr(sharding, "mesh", None)
    device: object = jax.config.jax_default_device or jax.local_devices()[0]
    if mesh is None:
        return device if sharding is None else sharding
    local = mesh.empty or all(kind.name == "Manual" for kind in mesh.axis_types)  # inside shard_map: one device's part
    return device if local or mesh.size == 1 else MeshOf(device, mesh.size)


def device_of(args: object) -> object | None:
    """Return the device of the first array in `args`, however deep in containers; an accelerator before the host.

    A kernel that gets its lengths from numpy and its data on a GPU runs on the GPU. None: no array has a device.
    """
    host: object | None = None
    for x in arrays_in(args):
        device = x.platform.partition("#")[0] if isinstance(x, ArraySpec) else _device(x, root_module(type(x)))
        if not device:
            continue
        members = members_of(device)
        device = members[0] if members else device
        if platform_of(device) != "cpu":
            return device
        host = device if host is None else host
    return host


def devices_in(args: object) -> Iterator[object]:
    """Yield the devices of all arrays in `args`; each of those that an array is spread over."""
    for x in arrays_in(args):
        device = x.platform or None if isinstance(x, ArraySpec) else _device(x, root_module(type(x)))
        if device is not None:
            yield from members_of(device) or [device]


def libraries_of(args: object) -> frozenset[str]:
    """Return the libraries whose arrays are in `args`, however deep in containers."""
    return frozenset(x.library if isinstance(x, ArraySpec) else root_module(type(x)) for x in arrays_in(args))


def arrays_in(value: object, depth: int = 0) -> Iterator[Any]:
    """Yield the arrays in a value, however deep in containers."""
    if is_array(value):
        yield value
    elif depth > _MAX_DEPTH:
        return  # the key of such a call is an error already, and a better one
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from arrays_in(item, depth + 1)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from arrays_in(item, depth + 1)


_MAX_DEPTH: Final = 64


# ---------------------------------------------------------------------------------------------------- making arrays

Maker: TypeAlias = Callable[[ArraySpec, int], Any]

_makers: Final[dict[str, Maker]] = {}


def register_library(name: str, make: Maker) -> None:
    """Let `materialise` make arrays of a library: `make(spec, rng_seed)` returns one that `describe`s as `spec`."""
    _makers[name] = make


def materialise(spec: ArraySpec, rng_seed: int = 0) -> Any:
    """Return a concrete array for a spec, filled with values that no kernel trips over; the same for the same seed."""
    make = _makers.get(spec.library)
    if make is None:
        raise Unsupported(
            f"cannot make an array of {spec.library!r} from its description; there are makers for "
            f"{sorted(_makers)}. Pass live arrays, or import the adapter of that library first."
        )
    return make(spec, rng_seed)


def _make_numpy(spec: ArraySpec, rng_seed: int) -> Any:
    np = require("numpy", feature=f"making an array of {spec.dtype}")
    dtype = _numpy_dtype(np, spec.dtype)
    strides, offset, extent = strides_for(spec.layout, spec.shape)
    buffer = fill(np, dtype, extent, np.random.default_rng(rng_seed)).view("uint8")
    in_bytes = [stride * dtype.itemsize for stride in strides]
    return np.ndarray(spec.shape, dtype, buffer, offset * dtype.itemsize, in_bytes)


def _numpy_dtype(np: Any, name: str) -> Any:
    if name[:1] in "[({":  # a record: its name is the list of its fields
        return np.dtype(ast.literal_eval(name))
    try:
        return np.dtype(name)
    except TypeError:
        found = getattr(require("ml_dtypes", feature=f"making an array of {name}"), name, None)
    if found is None:
        raise Unsupported(f"cannot make up values of dtype {name}; pass a live array instead of a description")
    return np.dtype(found)


def fill(np: Any, dtype: Any, n: int, rng: Any) -> Any:
    """Return `n` values of a numpy dtype that no kernel trips over."""
    if dtype.names is not None:
        records = np.zeros(n, dtype)
        for name in dtype.names:
            records[name] = fill(np, dtype[name].base, records[name].size, rng).reshape(records[name].shape)
        return records
    if dtype.kind == "b":
        return rng.integers(0, 2, n).astype(dtype)
    if dtype.kind in "iu":
        return rng.integers(1, 4, n).astype(dtype)  # 1 to 3: fit to divide by, and an index into nearly anything
    if dtype.kind == "c":
        return (_floats(np, n, rng) + 1j * _floats(np, n, rng)).astype(dtype)
    if dtype.kind == "f" or dtype.type.__module__ == "ml_dtypes":
        return _floats(np, n, rng).astype(dtype)
    raise Unsupported(f"cannot make up values of dtype {dtype}; pass a live array instead of a description")


def _floats(np: Any, n: int, rng: Any) -> Any:
    # Away from zero, where kernels divide, and where sparse or denormal fast paths would flatter a candidate.
    values = rng.standard_normal(n)
    return values + np.copysign(0.25, values)


def strides_for(layout: str, shape: Sequence[int]) -> tuple[list[int], int, int]:
    """Return strides, offset of the first element and buffer size, in elements, for an array of a layout class.

    >>> strides_for("F", (4, 8))
    ([1, 4], 0, 32)
    """
    strided = layout.startswith("S")
    gaps = layout.endswith("g")
    stride = 2 if gaps else 1
    strides, offset, last = [1] * len(shape), 0, 0
    for mark, i in reversed(_dimension_order(layout, shape)):
        if mark == "*":
            strides[i] = 0
            continue
        reach = (shape[i] - 1) * stride
        strides[i] = -stride if mark == "-" else stride
        offset += reach if mark == "-" else 0
        last += max(reach, 0)
        stride = stride * max(shape[i], 1) + (8 if strided else 0)  # 8: a pitch, so that it does not come out dense
    return strides, offset, last + 1


def _dimension_order(layout: str, shape: Sequence[int]) -> list[tuple[str, int]]:
    real = [i for i, n in enumerate(shape) if n > 1]
    if layout == "C":
        return [("", i) for i in real]
    if layout == "F":
        return [("", i) for i in reversed(real)]
    digits = r"\d" if len(shape) <= 10 else r"\d+"
    order = [(mark, int(i)) for mark, i in re.findall(rf"([*-]?)({digits})", layout)]
    if layout[:1] not in ("P", "S") or sorted(i for _, i in order) != real:
        raise DefinitionError(f"layout {layout!r} does not describe an array of shape {tuple(shape)}")
    return order


register_library("numpy", _make_numpy)
