"""Arrays made up from their specs, for tuning without a caller's arrays."""

from __future__ import annotations

import importlib
import math
import re
import zlib
from binascii import a2b_base64, b2a_base64
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from tunebook._arrays.describe import describe
from tunebook._arrays.library import library_named, library_of, loaded_libraries
from tunebook._base.errors import CodecError, DefinitionError, Unsupported

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tunebook._arrays.library import ArraySpec

# Arrays of integers with more elements are not sampled: a recording of 10,000 calls must stay small.
SAMPLED: Final = 4096


def sampled(x: Any, spec: ArraySpec) -> ArraySpec:
    """Return the spec of an array with its values, if it is a small array of integers that can be read and written."""
    library = library_of(x)
    size = math.prod(spec.shape)
    whole_numbers = spec.dtype.lstrip("<>").startswith(("i", "u", "bool"))
    if not whole_numbers or not 0 < size <= SAMPLED or library.with_values is None or "*" in spec.layout:
        return spec
    values = library.values(x)
    if values is None:
        return spec
    packed = zlib.compress(values.tobytes(), 1)  # in the order of the indices, whatever the layout
    return replace(spec, values=b2a_base64(packed, newline=False).decode())


def duplicate(x: Any) -> Any:
    """Return another array with the values and the layout of an array, in memory of its own."""
    library, spec = library_of(x), describe(x)
    with suppress(Unsupported):
        made = (library.duplicate or library.copy)(x)
        if made is not x and describe(made) == spec:
            return made
        # The library's copy has another layout, or lost the gradient: the values go into an array that is made alike.
        made = materialise(spec)
        library.put_back(made, x)
        return made
    raise DefinitionError(
        f"cannot copy a {type(x).__qualname__} for Measure(inputs=...): leave inputs out, or give the record of its "
        "array library a duplicate"
    )


def resized(x: Any, shape: tuple[int, ...]) -> Any:
    """Return an array of another shape that repeats the values of an array; `Unsupported` if it cannot be made."""
    library, spec = library_of(x), describe(x)
    if spec.shape == shape:
        return x
    if (placeholder := library.placeholder(x, shape)) is not None:
        return placeholder
    if 0 in spec.shape or "*" in spec.platform or library.with_values is None:
        raise Unsupported(f"an array of {library.name} cannot be made from the caller's")
    np = importlib.import_module("numpy")
    values = np.asarray(library.to_numpy(x))
    for axis, n in enumerate(shape):
        values = np.take(values, np.arange(n) % values.shape[axis], axis)
    return library.with_values(materialise(replace(spec, shape=shape)), values)


def materialise(spec: ArraySpec, rng_seed: int = 0) -> Any:
    """Return a concrete array for a spec, filled with its values or harmless ones; equal for the same seed."""
    library = library_named(spec.library)
    make = library.make
    if make is None:
        makers = sorted(library.name for library in loaded_libraries() if library.make is not None)
        raise Unsupported(
            f"cannot make an array of {spec.library!r} from its description; there are makers for {makers}. Pass live "
            "arrays, or give the library's ArrayLibrary record a make function"
        )
    made = make(spec, rng_seed)
    if not spec.values or library.with_values is None:
        return made
    np = importlib.import_module("numpy")
    like = np.asarray(library.to_numpy(made))
    try:
        # At most one byte more than the array takes: a planted text must not fill the memory.
        raw = zlib.decompressobj().decompress(a2b_base64(spec.values), like.nbytes + 1)
        values = np.frombuffer(raw, like.dtype).reshape(like.shape)
    except (ValueError, zlib.error) as error:
        kind = f"{spec.dtype}{list(spec.shape)}"
        raise CodecError(f"the recorded values of an array {kind} cannot be read: {error}") from error
    return library.with_values(made, values)


def refuse_variant(spec: ArraySpec) -> None:
    """Raise `Unsupported` for the spec of an array with a class of its own."""
    if spec.variant:
        raise Unsupported(f"cannot make up values of a {spec.variant}; pass a live array instead of a description")


def fill(np: Any, dtype: Any, n: int, rng: Any) -> Any:
    """Return `n` harmless values of a numpy dtype."""
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
    stride, pitch = 2 if layout.endswith("g") else 1, 8 if layout.startswith("S") else 0  # 8: so that it is not dense
    strides, offset, last = [1] * len(shape), 0, 0
    for mark, i in reversed(_dimension_order(layout, shape)):
        if mark == "*":
            strides[i] = 0
            continue
        reach = (shape[i] - 1) * stride
        strides[i] = -stride if mark == "-" else stride
        offset += reach if mark == "-" else 0
        last += max(reach, 0)
        stride = stride * max(shape[i], 1) + pitch
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
