"""Is a candidate's output right? A fast wrong answer is not a candidate."""

from __future__ import annotations

from typing import Any, Final

from tunebook._arrays import is_array

# Relative tolerance by dtype: a blocked sum of a few thousand terms in another order differs by this much. Integers
# and booleans must be equal.
_TOLERANCE: Final = {"float64": 1e-8, "float32": 1e-3, "float16": 2e-2, "bfloat16": 5e-2}


def difference(output: Any, expected: Any, where: str = "output") -> str | None:
    """Return how `output` differs from `expected`, or None if it does not. A NaN that was not expected differs."""
    if isinstance(expected, (tuple, list)):
        if not isinstance(output, (tuple, list)) or len(output) != len(expected):
            return f"{where} should have {len(expected)} parts"
        parts = (difference(o, e, f"{where}[{i}]") for i, (o, e) in enumerate(zip(output, expected, strict=True)))
        return next((found for found in parts if found is not None), None)
    if isinstance(expected, dict):
        if not isinstance(output, dict) or output.keys() != expected.keys():
            return f"{where} should have the keys {sorted(map(str, expected))}"
        parts = (difference(output[k], e, f"{where}[{k!r}]") for k, e in expected.items())
        return next((found for found in parts if found is not None), None)
    if is_array(expected) or is_array(output) or type(expected) is float:
        return _array_difference(output, expected, where)
    return None if output == expected else f"{where} is {output!r}, expected {expected!r}"


def _array_difference(output: Any, expected: Any, where: str) -> str | None:
    import numpy as np  # noqa: PLC0415 - arrays of other libraries convert to numpy's; without arrays it is not needed

    have, want = np.asarray(output), np.asarray(expected)
    if have.shape != want.shape:
        return f"{where} has shape {have.shape}, expected {want.shape}"
    if np.array_equal(have, want):
        return None  # nearly always, and ten times as fast as what follows
    tolerance = _TOLERANCE.get(have.dtype.name)
    if tolerance is None:
        return f"{where} differs in {int(np.sum(have != want))} of {have.size} values"
    have, want = have.astype(np.float64), want.astype(np.float64)
    if bool(np.any(np.isnan(have) & ~np.isnan(want))):
        return f"{where} has {int(np.sum(np.isnan(have)))} NaN of {have.size} values"
    # Relative to the size of the whole result: a sum that cancels to nearly zero has no small relative error.
    scale = float(np.nanmax(np.abs(np.where(np.isfinite(want), want, 0.0)))) or 1.0
    close = np.isclose(have, want, rtol=tolerance, atol=tolerance * scale, equal_nan=True)
    if bool(np.all(close)):
        return None
    worst = float(np.nanmax(np.abs(np.where(close, 0.0, have - want))))
    return f"{where} is off by up to {worst:.3g} in {int(np.sum(~close))} of {have.size} values"
