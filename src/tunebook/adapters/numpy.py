"""Kernels in Python: on numpy arrays, and compiled by Numba.

`@tunable` needs no adapter for these. To choose among whole functions, plain or jitted, keep them in a dict; the
functions, and the functions that they call, count as the kernel's code::

    ways = {"einsum": by_einsum, "loops": numba.njit(by_loops)}

    @tunable(space=Space(way=list(ways)), reference=by_einsum)
    def contract(a, b, *, config):
        return ways[config.way](a, b)
"""

from __future__ import annotations

import ast
import sys
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, TypeVar

from tunebook._arrays.library import ArgumentReader, ArrayLibrary, class_name, register_array_library
from tunebook._arrays.made_up import fill, refuse_variant, strides_for
from tunebook._base.errors import Unsupported, require

if TYPE_CHECKING:
    from collections.abc import Callable

    from tunebook._arrays.library import ArraySpec
    from tunebook.adapters._source.build_cache import PerConfig

__all__ = ["specialised"]

F = TypeVar("F")


def specialised(factory: Callable[[Any], F]) -> PerConfig[F]:
    """Call a factory once per configuration, also under threads; equal configurations share the result.

    For factories that compile: Numba turns the variables that a function closes over into constants. The result is
    found again in 0.1 us. Pass the returned object to `@tunable(compile=...)`, and compiling happens ahead and is timed
    apart.

    >>> @specialised
    ... def repeat(config):
    ...     return lambda text: text * config["times"]
    >>> repeat({"times": 2})("ab"), repeat({"times": 2}) is repeat({"times": 2})
    ('abab', True)
    """
    from tunebook.adapters._source.build_cache import PerConfig  # noqa: PLC0415 - few programs need it

    return PerConfig(factory)


# ----------------------------------------------------------------------------------------------------------- arrays

_READER: Final = ArgumentReader("{0}.__class__ is {1}", "{0}.shape, {0}.dtype", "{0}.__class__, {0}.shape, {0}.dtype")
# Reading `strides` for every array would cost half of the whole lookup; asking whether they are C-contiguous costs a
# third, and the other layouts take the longer way.
_READER_WITH_LAYOUT: Final = ArgumentReader(
    "{0}.__class__ is {1} and {0}.flags.c_contiguous",
    "{0}.shape, {0}.dtype",
    "{0}.__class__, {0}.shape, {0}.dtype, {0}.strides",
)


def _reader(kind: type, layout: bool) -> ArgumentReader | None:  # noqa: FBT001 - a field of the record
    if kind.__name__ != "ndarray":
        return None  # a subclass may compute its attributes
    return _READER_WITH_LAYOUT if layout else _READER


def _is_writable(x: Any) -> bool:
    """Return whether an array, or an array that it is a view of, can be written to."""
    while x.size and isinstance(x, sys.modules["numpy"].ndarray):
        if x.flags.writeable:
            return True
        x = x.base
        if x is None:
            break
    return False


class _Window:
    """The memory of a read-only view, to write to: a kernel may have written to it through the view's base."""

    def __init__(self, view: Any) -> None:
        place, _ = view.__array_interface__["data"]
        self.view, self.__array_interface__ = view, {**view.__array_interface__, "data": (place, False)}


def _put_back(x: Any, copy: Any) -> None:
    numpy = sys.modules["numpy"]
    # As plain arrays: a subclass may refuse, round or mask the items that it is given.
    target = numpy.asarray(x if x.flags.writeable else _Window(x)).view(x.dtype)
    target[...] = numpy.asarray(copy)


_BLOCK: Final = 1 << 24  # bytes compared at once: a copy of a gigabyte may be more than the memory holds


def _is_same(x: Any, copy: Any) -> bool:
    """Return whether two arrays are equal to the byte, because a NaN is not equal to itself; objects by identity."""
    numpy = sys.modules["numpy"]
    x, copy = numpy.asarray(x), numpy.asarray(copy)
    if x.dtype.kind == "T":  # its bytes refer to texts elsewhere
        return bool(x.tolist() == copy.tolist())
    if not (x.flags.c_contiguous and copy.flags.c_contiguous) or x.dtype.hasobject:
        return bool(x.tobytes() == copy.tobytes())
    x, copy = (each.reshape(-1).view("uint8") for each in (x, copy))
    return all(numpy.array_equal(x[i : i + _BLOCK], copy[i : i + _BLOCK]) for i in range(0, x.size, _BLOCK))


def _with_values(x: Any, values: Any) -> Any:
    x[...] = values
    return x


def _packed() -> tuple[object, ...] | None:
    """Return the class whose structs the accelerator reads; they change only with numpy's major version."""
    numpy = sys.modules["numpy"]
    return (numpy.ndarray,) if str(numpy.__version__).partition(".")[0] in ("1", "2") else None


def _variant(x: Any) -> str:
    # Not a memory map: it differs by the place of its values alone.
    numpy = sys.modules["numpy"]
    return class_name(x, (numpy.ndarray, getattr(numpy, "memmap", None)))  # a stand-in for numpy may have less


def _make(spec: ArraySpec, rng_seed: int) -> Any:
    refuse_variant(spec)
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


def _numba_device(_x: Any) -> str:
    # Numba's arrays do not say which GPU they are on. By name: the device is a weak proxy, which has no hash.
    name = sys.modules["numba.cuda"].get_current_device().name
    return f"gpu:{name.decode() if isinstance(name, bytes) else name}"


register_array_library(
    ArrayLibrary(
        name="numpy",
        device=lambda x: getattr(x, "device", "cpu"),  # `.device` came with numpy 2.0
        variant=_variant,
        is_writable=_is_writable,
        copy=lambda x: x.copy(),
        is_same=_is_same,
        put_back=_put_back,
        fast_key=attrgetter("shape", "dtype", "strides"),
        reader=_reader,
        packed=_packed,
        make=_make,
        values=lambda x: None if x.dtype.hasobject or _variant(x) else x,
        with_values=_with_values,
    )
)
register_array_library(ArrayLibrary(name="numba", device=_numba_device, platform=lambda _device: "gpu"))


def __dir__() -> list[str]:
    return sorted(__all__)
