"""Checks a candidate's output: a fast wrong answer is not a candidate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from tunebook._arrays.describe import is_array, parts_of
from tunebook._arrays.library import library_of
from tunebook._base.errors import DefinitionError

Compare: TypeAlias = "Callable[[Any, Any], Mismatch | str | bool | None]"
"""Called with an output and the right output; returns None or True if they agree, else the difference."""

Tolerance: TypeAlias = "float | Mapping[str, float]"

# Relative tolerance by dtype: a blocked sum of a few thousand terms in another order differs by this much. Integers
# and booleans must be equal.
TOLERANCE: Final[Mapping[str, float]] = {
    "float64": 1e-8, "complex128": 1e-8, "float32": 1e-3, "complex64": 1e-3, "float16": 2e-2, "bfloat16": 5e-2,
}  # fmt: skip


class Mismatch(NamedTuple):
    """The way in which an output is wrong."""

    kind: Literal["wrong-result", "nan"]
    message: str


def as_mismatch(said: Mismatch | str | bool | None, remark: str = "") -> Mismatch | None:  # noqa: FBT001 - a check's
    """Return the result of a check in one form; a text of the check is kept."""
    if said is None or said is True:
        return None
    if not isinstance(said, Mismatch):
        said = Mismatch("wrong-result", said if isinstance(said, str) else "the check rejected the output")
    return said._replace(message=f"{said.message}, {remark}") if remark else said


def comparison(check: bool | str | Compare, tolerance: Tolerance | None = None) -> Compare | None:  # noqa: FBT001
    """Return how outputs are compared: by dtype, within a tolerance, "exact" to the bit, or as a function says.

    False is not at all. A tolerance is relative to the largest value, and may be given by the name of a dtype.
    """
    if tolerance is not None and check is not True:
        raise DefinitionError(f"tolerance={tolerance!r} is for check=True, and check={check!r}; leave one of them out")
    if check is True:
        by_dtype = tolerance if isinstance(tolerance, Mapping) else dict.fromkeys(TOLERANCE, tolerance or 0.0)
        return difference if tolerance is None else partial(difference, tolerance={**TOLERANCE, **by_dtype})
    if check is False:
        return None
    if check == "exact":
        return partial(difference, tolerance={})
    if callable(check):
        return check
    raise DefinitionError(f'check={check!r}: write True, False, "exact", or a function of an output and the right one')


def difference(
    output: Any, expected: Any, where: str = "output", tolerance: Mapping[str, float] = TOLERANCE
) -> Mismatch | None:
    """Return how `output` differs from `expected`, or None if it does not. A NaN that was not expected differs.

    Values of a dtype without a tolerance must be equal; with no tolerance for any, to the bit and of the same dtype.
    """
    wanted, found = parts_of(expected), parts_of(output)
    if wanted is None:
        if is_array(expected) or is_array(output) or type(expected) in (float, complex):
            return _array_difference(output, expected, where, tolerance)
        return None if output == expected else _wrong(f"{where} is {output!r}, expected {expected!r}")
    if found is None or found.keys() != wanted.keys():
        listed = isinstance(expected, (tuple, list))
        form = f"{len(wanted)} parts" if listed else f"the keys {sorted(map(str, wanted))}"
        return _wrong(f"{where} should have {form}")
    differences = (difference(found[step], part, f"{where}[{step!r}]", tolerance) for step, part in wanted.items())
    return next(filter(None, differences), None)


def _wrong(message: str) -> Mismatch:
    return Mismatch("wrong-result", message)


def _array_difference(  # noqa: PLR0911 - one return for each way to differ
    output: Any, expected: Any, where: str, tolerances: Mapping[str, float]
) -> Mismatch | None:
    if _is_close(output, expected, tolerances):
        return None
    import numpy as np  # noqa: PLC0415 - arrays of other libraries convert to numpy's; without arrays it is not needed

    have, want = np.asarray(_in_numpy(output)), np.asarray(_in_numpy(expected))
    if have.shape != want.shape:
        return _wrong(f"{where} has shape {have.shape}, expected {want.shape}")
    if not tolerances:
        return _bitwise_difference(have, want, where)
    if np.array_equal(have, want):
        return None  # nearly always, and ten times as fast as the rest
    # By the output's own dtype: numpy may have had to take a wider one.
    tolerance = tolerances.get(library_of(output).dtype(output) if is_array(output) else have.dtype.name)
    if tolerance is None:
        return _wrong(f"{where} differs in {int(np.sum(have != want))} of {have.size} values")
    wide = np.complex128 if np.iscomplexobj(have) or np.iscomplexobj(want) else np.float64
    have, want = have.astype(wide), want.astype(wide)
    nans = np.isnan(have) & ~np.isnan(want)
    if bool(np.any(nans)):
        return Mismatch("nan", f"{where} has {int(np.sum(nans))} NaN of {have.size} values")
    # Relative to the size of the whole result: a sum that cancels to nearly zero has no small relative error.
    scale = float(np.nanmax(np.abs(np.where(np.isfinite(want), want, 0.0)))) or 1.0
    close = np.isclose(have, want, rtol=tolerance, atol=tolerance * scale, equal_nan=True)
    if bool(np.all(close)):
        return None
    with np.errstate(invalid="ignore", over="ignore"):  # infinities, and values next to them
        worst = float(np.fmax.reduce(np.abs(have[~close] - want[~close])))
    return _wrong(f"{where} is off by up to {worst:.3g} in {int(np.sum(~close))} of {have.size} values")


def _is_close(output: Any, expected: Any, tolerances: Mapping[str, float]) -> bool:
    """Return whether the arrays' own library says that they agree: on a GPU, 100 times as fast as moving them."""
    if not tolerances or not is_array(output) or not is_array(expected):
        return False
    library = library_of(output)
    tolerance = tolerances.get(library.dtype(output), 0.0)
    return library is library_of(expected) and library.is_close(output, expected, tolerance)


def _in_numpy(x: Any) -> Any:
    """Return an array in a form that numpy can read, also from an accelerator or with gradients."""
    return library_of(x).to_numpy(x) if is_array(x) else x


def _bitwise_difference(have: Any, want: Any, where: str) -> Mismatch | None:
    if have.dtype != want.dtype:
        return _wrong(f"{where} has dtype {have.dtype}, expected {want.dtype}")
    # Bits, not values: -0.0 == 0.0, and a NaN is not equal to itself.
    rows = [array.reshape(-1).copy().view("u1").reshape(have.size, -1) for array in (have, want)]
    differing = int((rows[0] != rows[1]).any(axis=1).sum()) if have.size else 0
    return _wrong(f"{where} differs in {differing} of {have.size} values") if differing else None
