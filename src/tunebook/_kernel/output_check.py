"""Checks a candidate's output: a fast wrong answer is not a candidate."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from tunebook._arrays.describe import ATOMS, arrays_in, is_array, map_leaves, parts_of, walk
from tunebook._arrays.library import dtype_name, library_of
from tunebook._base.errors import DefinitionError, did_you_mean, hide_own_frames, text_of

Compare: TypeAlias = "Callable[[Any, Any], Any]"
"""Called with an output and the right output; returns None or True if they agree, else False, a reason, a `Mismatch`.

Any: the truth of a comparison has a type of its own in each array library."""

Tolerance: TypeAlias = "float | Mapping[str, float]"

# Relative tolerance by dtype: candidates use other instructions and other orders of summation. Integers and booleans
# must be equal.
TOLERANCE: Final[Mapping[str, float]] = {
    "float64": 1e-8, "complex128": 1e-8, "float32": 1e-3, "complex64": 1e-3, "float16": 2e-2, "bfloat16": 5e-2,
}  # fmt: skip
# Names of numpy for the same formats: other byte orders, and wider ones, which a double can stand in for.
_SAME_FORMAT: Final[Mapping[str, str]] = {
    "f2": "float16", "f4": "float32", "f8": "float64", "c8": "complex64", "c16": "complex128", "longdouble": "float64",
    "float128": "float64", "clongdouble": "complex128", "complex256": "complex128",
}  # fmt: skip
# Arguments of 8 bits and less count as this.
_NARROW: Final = "bfloat16"
_NARROW_NAMES: Final = ("float4", "float6", "float8")  # how their names begin: each format has one, as float8_e4m3fn
# A sum of n terms in another order differs by about sqrt(n) roundings of the accumulator, four times that at most.
# Kernels sum 16-bit numbers in 32 bits.
_ROUNDING: Final = {True: 4 * 2.0**-52, False: 4 * 2.0**-23}
_SMALL, _LARGE = 0.01, 10.0  # relative errors between these are written in per cent


class Mismatch(NamedTuple):
    """The way in which an output is wrong."""

    kind: Literal["wrong-result", "nan"]
    message: str


class CheckError(DefinitionError):
    """A check of outputs failed itself, so it says nothing about the output, and the tuning ends."""


_ANSWERS: Final = "return True for a right output, and False or a text with the reason for a wrong one"
_REJECTED: Final = Mismatch("wrong-result", "the check rejected the output")


def as_mismatch(result: Any, remark: str = "", check: str = "the check") -> Mismatch | None:
    """Return the result of a check in one form; `CheckError` if it is not the result of a check.

    >>> as_mismatch(True), as_mismatch("too far off", "unlike the reference").message
    (None, 'too far off, unlike the reference')
    """
    if _dtype_of(result) == "bool" and result.shape == ():  # a comparison in any array library
        result = bool(result)
    if result is None or result is True:
        return None
    if result is False:
        wrong = _REJECTED
    elif isinstance(result, str) and result:
        wrong = _wrong(result)
    elif isinstance(result, Mismatch):
        wrong = result
    else:
        value = f" ({result!r:.60})" if is_scalar(result) and not is_array(result) else ""
        raise CheckError(f"{check} returned a value of type {type(result).__name__}{value}; {_ANSWERS}")
    return wrong._replace(message=f"{wrong.message}, {remark}") if remark else wrong


class OwnCheck:
    """A check of the author's. An `AssertionError` says that the output is wrong, any other error is a `CheckError`."""

    def __init__(self, check: Callable[[Any, Any], Any], name: str) -> None:
        self._check, self._name = check, name

    def __call__(self, output: Any, expected: Any) -> Mismatch | None:
        try:
            with self:
                said = self._check(output, expected)
        except AssertionError as error:
            reason = str(error).strip().partition("\n")[0]  # of numpy.testing it begins with an empty line
            return _wrong(reason) if reason else _REJECTED
        return as_mismatch(said, check=self._name)

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, AssertionError):
            hide_own_frames(error)
            raised = f"{self._name} raised {type(error).__name__}: {text_of(error)}"
            raise CheckError(f"{raised}; it is called with (output, right output); {_ANSWERS}") from error


class Comparison:
    """How outputs are compared: the same for every library, in this process and in a worker.

    `given` is the author's tolerance, or None for the default, which follows from the least precise dtype among the
    arguments and the expected output, and from the length of the longest reduction: the longest dimension of an
    argument, or the elements of the largest argument per element of the output, if that is more. The dtype of the
    output itself does not count: a candidate that returns float32 would widen its own tolerance.
    """

    def __init__(self, given: Tolerance | None = None, *, exact: bool = False, arguments: object = ()) -> None:
        self._given, self.exact = given, exact
        self._by_dtype = given if isinstance(given, Mapping) else {}
        found = [(library_of(x).shape(x), library_of(x).dtype(x)) for x in arrays_in(arguments)]
        # A scalar of numpy beside arrays does not decide how precisely these are computed.
        dtypes = _inexact(dtype for _, dtype in found) or _inexact(map(_dtype_of, walk(arguments)))
        self._dtypes = frozenset(name if name in TOLERANCE else _NARROW for name in dtypes)
        self._longest = max((max(shape, default=1) for shape, _ in found), default=1)
        self._largest = max((math.prod(shape) for shape, _ in found), default=1)

    def on(self, arguments: object) -> Comparison:
        """Return the comparison for the output of a call with these arguments."""
        return Comparison(self._given, exact=self.exact, arguments=arguments)

    def __call__(self, output: Any, expected: Any) -> Mismatch | None:
        return difference(output, expected, rule=self)

    def tolerance(self, own: str, expected: str, size: int) -> float | None:
        """Return the relative tolerance for an output of so many elements, by its own and the expected dtype.

        None for a dtype whose values must be equal.
        """
        own, expected, given = _format(own), _format(expected), self._by_dtype
        if not own.startswith(_INEXACT):
            return None
        if isinstance(self._given, Real):
            return float(self._given)
        if expected not in TOLERANCE:
            return given.get(expected)
        least = max((expected, *self._dtypes), key=TOLERANCE.__getitem__)
        for name in (own, least):  # a more precise output has the tolerance that was given for its own dtype
            if name in given and TOLERANCE.get(name, math.inf) <= TOLERANCE[least]:
                return given[name]
        terms = max(self._longest, self._largest // max(size, 1))
        return TOLERANCE[least] + _ROUNDING[least in {"float64", "complex128"}] * math.sqrt(terms)


_INEXACT: Final = ("float", "bfloat", "complex")
_TIMES: Final = "mM"  # the kinds of numpy that have a NaT


def _inexact(dtypes: Iterable[str | None]) -> list[str]:
    return [name for name in map(_format, filter(None, dtypes)) if name.startswith(_INEXACT)]


def _format(dtype: str) -> str:
    name = dtype.lstrip("<>")
    return _SAME_FORMAT.get(name, name)


def comparison(
    check: bool | str | Compare,  # noqa: FBT001 - as the user wrote it
    tolerance: Tolerance | None = None,
    of: str = "",
) -> Compare | None:
    """Return how outputs are compared: by dtype, within a tolerance, "exact" to the bit, or as a function says.

    False is not at all. A tolerance is relative to the largest value, and may be given by the name of a dtype. `of` is
    the kernel, for errors.
    """
    if tolerance is not None and check is not True:
        raise DefinitionError(f"tolerance={tolerance!r} is for check=True, and check={check!r}; leave one of them out")
    if check is True:
        numbers = tolerance.values() if isinstance(tolerance, Mapping) else [0.0 if tolerance is None else tolerance]
        if not all(isinstance(number, Real) and not isinstance(number, bool) and number >= 0 for number in numbers):
            raise DefinitionError(
                f'tolerance={tolerance!r}: write a number, as 1e-3, or one per dtype: {{"float32": 1e-3}}'
            )
        for name in tolerance if isinstance(tolerance, Mapping) else ():
            if name not in TOLERANCE and not str(name).startswith(_NARROW_NAMES):
                raise DefinitionError(f"tolerance={tolerance!r}: {did_you_mean('dtype', str(name), TOLERANCE)}")
        return Comparison(tolerance)
    if check is False:
        return None
    if check == "exact":
        return Comparison(exact=True)
    if callable(check):
        return OwnCheck(check, f"check= of {of!r}" if of else "check=")
    raise DefinitionError(f'check={check!r}: write True, False, "exact", or a function of an output and the right one')


def is_scalar(x: object) -> bool:
    """Return whether this is a plain value, or a scalar of numpy, which no run can write to."""
    return isinstance(x, (bool, int, float, complex, str, bytes)) or _is_inexact(x) or _dtype_of(x) is not None


def _is_inexact(x: object) -> bool:
    """Return whether this is a number with rounding errors, of Python or of numpy."""
    return isinstance(x, (float, complex)) or (_format(_dtype_of(x) or "").startswith(_INEXACT) and not is_array(x))


def _dtype_of(x: Any) -> str | None:
    """Return the name of the dtype of an array, or of a scalar of numpy; None for any other value."""
    if type(x) in ATOMS:
        return None
    if is_array(x):
        return library_of(x).dtype(x)
    return dtype_name(x.dtype) if getattr(x, "shape", None) == () and getattr(x, "dtype", None) is not None else None


def difference(output: Any, expected: Any, where: str = "output", rule: Comparison = Comparison()) -> Mismatch | None:  # noqa: B008 - immutable
    """Return how `output` differs from `expected`, or None if it does not. A NaN that was not expected differs.

    Values of a dtype without a tolerance must be equal; if the rule is exact, to the bit and of the same dtype.
    """
    if isinstance(expected, (set, frozenset)) and isinstance(output, (set, frozenset)):
        members = [*output, *expected]
        if any(map(_is_inexact, members)) and all(hasattr(number, "real") for number in members):
            # A number with a rounding error is not found in a set.
            output, expected = (sorted(numbers, key=lambda z: (z.real, z.imag)) for numbers in (output, expected))
    output, expected = _opened(output, expected, rule), _opened(expected, output, rule)
    wanted, found = parts_of(expected), parts_of(output)
    if wanted is None:
        if is_array(expected) or is_array(output) or _is_inexact(expected) or _is_inexact(output):
            return _array_difference(output, expected, where, rule)
        return _value_difference(output, expected, where)
    if found is None or found.keys() != wanted.keys():
        listed = isinstance(expected, (tuple, list))
        form = f"{len(wanted)} parts" if listed else f"the keys {sorted(map(str, wanted))}"
        return _wrong(f"{where} should have {form}")
    differences = (difference(found[step], part, f"{where}[{step!r}]", rule) for step, part in wanted.items())
    return next(filter(None, differences), None)


def _opened(x: Any, other: Any, rule: Comparison) -> Any:
    """Return the parts of an array of numpy that numpy cannot compare as a whole, else the value itself."""
    numpy, masked = sys.modules.get("numpy"), sys.modules.get("numpy.ma")
    if numpy is None or not (isinstance(x, numpy.ndarray) and isinstance(other, numpy.ndarray)):
        return x
    if masked is not None and any(isinstance(array, masked.MaskedArray) for array in (x, other)):
        return {"mask": masked.getmaskarray(x), "values": masked.compressed(x)}
    if object in (x.dtype, other.dtype):
        return x.tolist()
    return x if x.dtype.names is None or rule.exact else {name: x[name] for name in x.dtype.names}


def _value_difference(output: Any, expected: Any, where: str) -> Mismatch | None:
    try:
        equal = bool(output == expected)
    except (TypeError, ValueError, RuntimeError) as error:  # a frame of pandas, for example, is neither true nor false
        return _incomparable(where, f"{type(error).__name__}: {error}")
    return None if equal else _wrong(f"{where} is {output!r}, expected {expected!r}")


def _incomparable(where: str, why: str) -> Mismatch:
    return _wrong(f"{where} cannot be compared ({why}); give check=, a function of the output and the expected output")


def with_own_arrays(output: Any) -> Any:
    """Return an output with copies of its arrays: a reference may return views of arguments, which candidates spoil.

    A copy is also contiguous, and compared in an eighth of the time of a transposed view.
    """
    return map_leaves(lambda leaf: library_of(leaf).copy(leaf) if is_array(leaf) else leaf, output)


def _wrong(message: str) -> Mismatch:
    return Mismatch("wrong-result", message)


def _array_difference(  # noqa: PLR0911 - one return for each way to differ
    output: Any, expected: Any, where: str, rule: Comparison
) -> Mismatch | None:
    if _is_close(output, expected, rule):
        return None
    import numpy as np  # noqa: PLC0415 - arrays of other libraries convert to numpy's; without arrays it is not needed

    have, want = np.asarray(_in_numpy(output)), np.asarray(_in_numpy(expected))
    if have.shape != want.shape:
        return _wrong(f"{where} has shape {have.shape}, expected {want.shape}")
    if have.dtype == want.dtype == object:
        return _incomparable(where, f"numpy cannot read a {type(output).__qualname__}")
    if rule.exact:
        return _bitwise_difference(have, want, where)
    if np.array_equal(have, want, equal_nan=have.dtype.kind in _TIMES and want.dtype.kind in _TIMES):
        return None  # nearly always, and ten times as fast as the rest
    # By the libraries' dtypes: numpy may have had to take wider ones.
    own, model = _dtype_of(output) or have.dtype.name, _dtype_of(expected) or want.dtype.name
    tolerance = rule.tolerance(own, model, have.size)
    if tolerance is None:
        if not have.shape:
            return _wrong(f"{where} is {output!r}, expected {expected!r}")
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
    count = f"{int(np.sum(~close))} of {have.size} values"
    coarser = TOLERANCE.get(_format(own), math.inf) > TOLERANCE.get(_format(model), math.inf)
    why = f" for {model}, and this is {own}" if coarser else ""
    narrow = any(TOLERANCE.get(_format(name), math.inf) >= TOLERANCE["float16"] for name in (own, model))
    rounds = 0.1 if narrow else 0.01
    return _wrong(
        f"{where} is off by up to {worst:.3g} in {count} ({_compared(worst / scale, tolerance, why, rounds=rounds)})"
    )


def _compared(error: float, tolerance: float, why: str, *, rounds: float) -> str:
    """Return a relative error beside its tolerance, and the option to give if it is rounding, as it may be."""
    said = f"{_share(error)} the largest value; the tolerance is {tolerance:.2g}{why}"
    if not 0 < error < rounds:
        return said
    return f"{said}; if the error is rounding and not a bug, give tolerance={10.0 ** math.ceil(math.log10(error)):.0e}"


def _share(error: float) -> str:
    """Return a relative error in words: "1 of" would read as a count, and a small error is compared with a tolerance.

    >>> _share(3.5e-07), _share(0.5), _share(1.0), _share(40.0)
    ('3.5e-07 of', '50 % of', '100 % of', '40 times')
    """
    if error < _SMALL:
        return f"{error:.2g} of"
    return f"{100 * error:.3g} % of" if error < _LARGE else f"{error:.3g} times"


def _is_close(output: Any, expected: Any, rule: Comparison) -> bool:
    """Return whether the arrays' own library says that they agree: on a GPU, 100 times as fast as moving them."""
    if rule.exact or not is_array(output) or not is_array(expected):
        return False
    library = library_of(output)
    if library is not library_of(expected):
        return False
    size = math.prod(library.shape(output))
    return library.is_close(
        output, expected, rule.tolerance(library.dtype(output), library.dtype(expected), size) or 0.0
    )


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
