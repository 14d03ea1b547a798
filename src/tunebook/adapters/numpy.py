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

from tunebook._arrays.library import ArgumentReader, ArrayLibrary, fill, register_array_library, strides_for
from tunebook._base.errors import Unsupported, require

if TYPE_CHECKING:
    from collections.abc import Callable

    from tunebook._arrays.library import ArraySpec
    from tunebook.adapters._source.build_cache import PerConfig

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


def _is_plain(x: Any) -> bool:
    # Not a subclass: the record does not know its data beside the values.
    return type(x).__name__ == "ndarray" and not x.dtype.hasobject


def _put_back(x: Any, copy: Any) -> None:
    x[...] = copy


def _with_values(x: Any, values: Any) -> Any:
    x[...] = values
    return x


def _packed() -> tuple[object, ...] | None:
    """Return the class whose structs the accelerator reads; they change only with numpy's major version."""
    numpy = sys.modules["numpy"]
    return (numpy.ndarray,) if str(numpy.__version__).partition(".")[0] in ("1", "2") else None


def _make(spec: ArraySpec, rng_seed: int) -> Any:

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
        is_writable=lambda x: bool(_is_plain(x) and x.flags.writeable and x.size),
        copy=lambda x: x.copy(),
        is_same=lambda x, copy: bool(x.tobytes() == copy.tobytes()),  # bytes: a NaN is not equal to itself
        put_back=_put_back,
        is_restorable=_is_plain,
        fast_key=attrgetter("shape", "dtype", "strides"),
        reader=_reader,
        packed=_packed,
        make=_make,
        values=lambda x: x if _is_plain(x) else None,
        with_values=_with_values,
    )
)
register_array_library(ArrayLibrary(name="numba", device=_numba_device, platform=lambda _device: "gpu"))
