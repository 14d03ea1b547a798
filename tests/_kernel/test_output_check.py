"""Comparing outputs: what counts as right."""

from __future__ import annotations

import re
from collections import OrderedDict
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tunebook as tb
from tunebook._base.errors import DefinitionError
from tunebook._kernel.output_check import Comparison, as_mismatch, comparison, difference

ONES = np.ones(4, np.float32)


@dataclass
class Output:
    x: Any


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (ONES, ONES * (1 + 1e-6)),
        (27095.49303258, 27095.49303190),
        (np.array([np.nan, np.inf]), np.array([np.nan, np.inf])),
        (np.zeros(0), np.zeros(0)),
        ((ONES, [ONES]), (ONES, [ONES])),
        ({"a": ONES}, {"a": ONES}),
        (Output(ONES), Output(ONES * (1 + 1e-6))),
        (OrderedDict(a=[Output(ONES)]), MappingProxyType({"a": (Output(ONES),)})),
        ({1, 2}, {2, 1}),
        (np.array([1e-9, 1.0]), np.array([0.0, 1.0])),
        (ONES.astype(ml_dtypes.bfloat16), ONES),
        (None, None),
        ("x", "x"),
        (np.array([True, False]), np.array([True, False])),
    ],
    ids=repr,
)
def test_an_output_close_enough_to_the_expected_one_is_right(output, expected):
    assert difference(output, expected) is None


@pytest.mark.parametrize(
    ("output", "expected", "says"),
    [
        (ONES * 1.1, ONES, r"off by up to 0\.1 in 4 of 4"),
        (np.full(4, np.nan, np.float32), ONES, "4 NaN of 4"),
        (np.full(4, np.inf, np.float32), ONES, "off by up to inf"),
        (ONES[:2], ONES, r"shape \(2,\), expected \(4,\)"),
        (np.arange(3), np.arange(3) + 1, "differs in 3 of 3"),
        ((ONES,), (ONES, ONES), "2 parts"),
        ((ONES, ONES * 2), (ONES, ONES), r"output\[1\] is off"),
        ({"a": 1}, {"b": 1}, "keys"),
        (1, 2, "is 1, expected 2"),
        (1.5, 1.0, "off by up to"),
        (float("nan"), 1.0, "NaN"),
        (None, ONES, "shape"),
    ],
    ids=repr,
)
def test_the_message_for_a_wrong_output_says_how_far_off_it_is(output, expected, says):
    assert re.search(says, difference(output, expected).message)


@pytest.mark.parametrize(
    ("output", "expected", "message"),
    [
        (
            Output(ONES),
            Output(ONES * 2),
            "output['x'] is off by up to 1 in 4 of 4 values (50 % of the largest value; {}",
        ),
        (ONES, Output(ONES), "output should have the keys ['x']"),
        (
            MappingProxyType({"a": [ONES]}),
            {"a": [ONES * 2]},
            "output['a'][0] is off by up to 1 in 4 of 4 values (50 % of the largest value; {}",
        ),
        ({1}, {2}, "output should have the keys ['2']"),
    ],
    ids=repr,
)
def test_parts_of_any_container_are_compared(output, expected, message):
    assert difference(output, expected).message == message.format("the tolerance is 0.001)")


CLOSE = [
    (np.float64(1.0000000000000002), np.float64(1.0)),
    (np.float32(1.00001), np.float32(1.0)),
    (np.float16(1.001), np.float16(1.0)),
    (ml_dtypes.bfloat16(1.01), ml_dtypes.bfloat16(1.0)),
    (np.complex64(1.00001 + 1j), np.complex64(1 + 1j)),
    (np.array(1.00001, np.float32), np.array(1.0, np.float32)),
    (1.00001, np.float32(1.0)),
    (1.000000001 + 0j, 1 + 0j),
    (np.array([1.00001], ">f4"), np.array([1.0], ">f4")),
    (np.array([1.000000001], np.longdouble), np.array([1.0], np.longdouble)),
    (np.float64("nan"), np.float64("nan")),
]
CONTAINERS = {
    "bare": lambda x: x,
    "tuple": lambda x: (0, x),
    "dict": lambda x: {"loss": x},
    "dataclass": Output,
    "nested": lambda x: [{"a": (x,)}],
    "set": lambda x: {x, x * 4},
}


@pytest.mark.promise("scalars-compared")
@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize(("output", "expected"), CLOSE, ids=repr)
def test_scalars_are_compared_with_the_tolerance_of_arrays(output, expected, container):
    if container == "set" and (isinstance(output, np.ndarray) or np.isnan(output)):
        pytest.skip("neither an array nor a NaN is found again in a set")
    wrap = CONTAINERS[container]
    assert difference(wrap(output), wrap(expected)) is None
    assert difference(wrap(expected * 3), wrap(expected)) is not None or np.any(np.isnan(expected))


@pytest.mark.promise("scalars-compared")
@pytest.mark.parametrize(
    "output", [np.float32(1.01), 1.01, np.array(1.01), ONES * np.float32(1.01), np.complex64(1.01)]
)
def test_a_given_tolerance_counts_for_every_kind_of_number(output):
    expected = output / 1.01
    assert comparison(True, 0.1)(output, expected) is None
    assert comparison(True, 1e-4)(output, expected) is not None
    assert comparison("exact")(output, expected) is not None


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (np.int64(4), np.int64(3)),
        (np.bool_(True), np.bool_(False)),
        (2, 3),
        (np.str_("a"), np.str_("b")),
        (3, 3.5),
        (1.000000001, 1),
        (np.float32(1.0001), np.int64(1)),
    ],
)
def test_other_scalars_must_be_equal(output, expected):
    assert comparison(True, 10.0)(expected, expected) is None
    assert difference(output, expected).message == f"output is {output!r}, expected {expected!r}"


def error_allowed(output, *arguments, given=None):
    """Return the relative error that is allowed for an output of a call."""
    rule = Comparison(given).on(arguments)
    errors = [e for e in np.logspace(-17, 0, 1000) if rule(output * (1 + e), output) is None]
    return max(errors, default=0.0) / 2  # relative and absolute tolerances add up


def f32(*shape):
    return np.ones(shape, np.float32)


@pytest.mark.promise("scalars-compared")
@pytest.mark.parametrize(
    ("output", "arguments", "tolerance"),
    [
        (1.0, [], 1e-8),
        (1.0, [f32(8)], 1e-3),
        (1.0, [np.ones(8)], 1e-8),
        (1.0, [np.ones(8), f32(8), np.arange(3)], 1e-3),
        (1.0, [np.ones(4, np.float16)], 2e-2),
        (np.ones(3), [[{"x": f32(3)}]], 1e-3),
        (1.0, [f32(10_000_000)], 1e-3 + 4 * 2**-23 * 10_000_000**0.5),
        (np.ones(4), [f32(4, 2_500_000)], 1e-3 + 4 * 2**-23 * 2_500_000**0.5),
        (np.ones((100, 100)), [f32(100, 50), f32(50, 100)], 1e-3 + 4 * 2**-23 * 10),
        (1.0, [np.ones(1_000_000)], 1e-8 + 4 * 2**-52 * 1000),
        (1.0, [np.zeros(1_000_000, np.float16)], 2e-2 + 4 * 2**-23 * 1000),
    ],
)
def test_the_default_tolerance_follows_the_dtypes_and_the_longest_reduction(output, arguments, tolerance):
    assert error_allowed(output, *arguments) == pytest.approx(tolerance, rel=0.06)


NARROW = {"bf16": ml_dtypes.bfloat16, "fp8": ml_dtypes.float8_e4m3fn}


def made(kind):
    """Return an array of a dtype; for "float" and "f4()", a number of Python and of numpy."""
    return (
        {"float": 1.0, "f4()": np.float32(1)}[kind] if kind in ("float", "f4()") else np.ones(4, NARROW.get(kind, kind))
    )


@pytest.mark.promise("wrong-never-wins")
@pytest.mark.parametrize(
    ("output", "model", "arguments", "tolerance"),
    [
        ("f4", "f8", ["f8"], 1e-8),
        ("f2", "f8", ["f8", "f8"], 1e-8),
        ("f4", "f8", ["f4"], 1e-3),  # a reference that computes in float64
        ("f8", "f8", ["f4"], 1e-3),
        ("f8", "f4", ["f8"], 1e-3),  # the model itself is coarse
        ("f8", "f4", ["i4"], 1e-3),
        ("f4", "f8", ["i4"], 1e-8),
        ("f4", "f4", ["u1"], 1e-3),
        ("bf16", "f4", ["f4"], 1e-3),
        ("bf16", "f4", ["bf16"], 5e-2),
        ("f4", "bf16", ["f4"], 5e-2),
        ("c8", "c16", ["f8"], 1e-8),
        ("c8", "c16", ["c8"], 1e-3),
        ("bf16", "f8", ["fp8"], 5e-2),
        ("f4()", "float", [], 1e-8),
        ("f4()", "float", ["f8"], 1e-8),
        ("f4()", "float", ["f4"], 1e-3),
        ("f4()", "float", ["f4()"], 1e-3),
        ("float", "f4()", ["i4"], 1e-3),
        ("f4", "f8", ["f8", "f4()"], 1e-8),  # a scalar of numpy does not make an array coarser
    ],
)
def test_the_tolerance_follows_the_model_and_the_arguments_not_the_outputs_own_dtype(
    output, model, arguments, tolerance
):
    rule = Comparison().on([made(kind) for kind in arguments])
    expected = made(model)
    # The expected value moves, because the output's dtype may be too coarse for such steps.
    moved = {e: np.asarray(1 + e).astype(np.result_type(expected)) for e in np.logspace(-12, -0.5, 1000)}
    allowed = [e for e, right in moved.items() if rule(made(output), expected * 0 + right) is None]
    assert max(allowed) / 2 == pytest.approx(tolerance, rel=0.15)


@pytest.mark.promise("wrong-never-wins")
@pytest.mark.parametrize(("model", "integer"), [("i4", True), ("i8", True), ("?", True), ("f4", False)])
def test_a_number_with_rounding_errors_where_the_model_gives_integers_must_be_equal(model, integer):
    expected = np.ones(4, model)
    assert difference(np.ones(4, np.float32), expected) is None
    assert (difference(np.full(4, 1.0001, np.float32), expected) is not None) == integer
    assert comparison(True, 1e-3)(np.full(4, 1.0001, np.float32), expected) is None


def test_small_values_beside_large_ones_need_a_check_of_each_value():
    ones = np.ones(1_000_000, np.float32)
    right = np.cumsum(ones)
    wrong = np.concatenate([np.full(100, 7, np.float32), right[100:]])
    assert comparison(True).on(ones)(wrong, right) is None
    each = comparison(lambda output, right: np.allclose(output, right, rtol=1e-4))
    assert each(wrong, right).message == "the check rejected the output"
    assert each(right * np.float32(1.00001), right) is None


def test_the_message_says_that_an_output_is_coarser_than_the_expected_one():
    message = difference(np.full(4, 1.0001, np.float32), np.ones(4)).message
    assert "the tolerance is 1e-08 for float64, and this is float32; if the error is rounding" in message


@pytest.mark.parametrize(
    ("given", "output", "model", "tolerance"),
    [
        ({"float32": 1e-5}, "f4", "f8", 1e-8),
        ({"float32": 1e-5, "float64": 1e-10}, "f4", "f8", 1e-10),
        ({"float32": 1e-5, "float64": 1e-10}, "f8", "f4", 1e-10),
        ({"float32": 1e-5}, "f8", "f4", 1e-5),
        (1e-4, "f4", "f8", 1e-4),
    ],
)
def test_a_tolerance_per_dtype_is_not_chosen_by_a_coarser_output(given, output, model, tolerance):
    assert Comparison(given).tolerance(output, model, 4) == pytest.approx(tolerance, rel=0.06)


@pytest.mark.parametrize(
    ("given", "output", "tolerance"),
    [
        (1e-5, 1.0, 1e-5),
        ({"float32": 1e-5}, 1.0, 1e-5),
        ({"float64": 1e-6, "float32": 1e-5}, 1.0, 1e-6),
        ({"float16": 1e-2}, 1.0, 1e-3),
    ],
)
def test_a_given_tolerance_goes_before_the_default(given, output, tolerance):
    assert error_allowed(output, f32(8), given=given) == pytest.approx(tolerance, rel=0.06)


def test_the_message_has_the_relative_error_the_tolerance_and_the_option():
    message = difference(33600.0117, 33600.0).message
    assert message == (
        "output is off by up to 0.0117 in 1 of 1 values (3.5e-07 of the largest value; the tolerance is 1e-08; "
        "if the error is rounding and not a bug, give tolerance=1e-06)"
    )
    assert difference(33600.0117, 33600.0, rule=comparison(True, 1e-6)) is None


@pytest.mark.parametrize(
    ("dtype", "error", "hinted"), [("f4", 0.005, True), ("f4", 0.06, False), ("f8", 0.06, False), ("f2", 0.06, True)]
)
def test_no_tolerance_is_proposed_for_an_error_that_is_no_rounding(dtype, error, hinted):
    message = difference(np.full(4, 1 + error, dtype), np.ones(4, dtype)).message
    assert ("if the error is rounding and not a bug" in message) == hinted


@pytest.mark.parametrize("tolerance", ["1e-3", -1.0, float("nan"), {"float32": None}, True])
def test_an_invalid_tolerance_is_an_error_where_it_is_given(tolerance):
    with pytest.raises(DefinitionError, match="write a number, as 1e-3, or one per dtype"):
        comparison(True, tolerance)


@pytest.mark.parametrize("name", ["flaot32", "float23", "f4", np.float32])
def test_a_tolerance_for_an_unknown_dtype_is_an_error_where_it_is_given(name):
    with pytest.raises(DefinitionError, match=r"tolerance=.*: unknown dtype .* Valid: float64, complex128, float32"):
        comparison(True, {name: 1e-3})
    with pytest.raises(DefinitionError, match=r"unknown dtype 'flaot32'; did you mean 'float32'\?"):
        comparison(True, {"flaot32": 1e-3})
    assert comparison(True, dict.fromkeys(("float32", "bfloat16", "complex64", "float8_e4m3fn", "float4_e2m1fn"), 1e-3))


RECORD = [("x", "f8"), ("n", "i4")]
MASKED = np.ma.masked_array([1.0, 2.0, 3.0], mask=[False, True, False])


def unmasked(values):
    return np.ma.masked_array(values, mask=[False, True, False])


@pytest.mark.parametrize(
    ("expected", "right", "wrong", "says"),
    [
        (MASKED, unmasked([1 + 1e-12, 99.0, 3.0]), MASKED.filled(2.0), r"output\['mask'\] differs in 1 of 3"),
        (MASKED, unmasked([1.0, np.nan, 3.0]), unmasked([1.0, 2.0, 4.0]), r"output\['values'\] is off by up to 1"),
        (MASKED.filled(2.0), MASKED.filled(2.0), MASKED, r"output\['mask'\] differs in 1 of 3"),
        (
            np.array([(1.0, 2), (3.0, 4)], RECORD),
            np.array([(1 + 1e-12, 2), (3.0, 4)], RECORD),
            np.array([(1.0, 2), (3.0, 5)], RECORD),
            r"output\['n'\] differs in 1 of 2",
        ),
        (
            np.array([1.0, None, "a"], object),
            np.array([1 + 1e-12, None, "a"], object),
            np.array([1.0, 2, "a"], object),
            r"output\[1\] is 2, expected None",
        ),
        (
            np.array(["2020-01-01", "NaT"], "M8[D]"),
            np.array(["2020-01-01", "NaT"], "M8[D]"),
            np.array(["NaT", "2020-01-01"], "M8[D]"),
            "differs in 2 of 2",
        ),
    ],
    ids=["masked", "values", "plain", "record", "object", "time"],
)
def test_arrays_are_compared_by_all_that_they_hold(expected, right, wrong, says):
    assert difference(right, expected) is None
    assert re.search(says, difference(wrong, expected).message)
    assert comparison("exact")(expected.copy(), expected) is None
    assert comparison("exact")(wrong, expected) is not None


class Odd:
    """Equal to nothing: a comparison raises an error."""

    def __eq__(self, _other):
        raise ValueError("ambiguous")

    __hash__ = None


@pytest.mark.parametrize("odd", ["object", "sparse"])
def test_an_output_that_cannot_be_compared_asks_for_a_check(odd):
    output = Odd() if odd == "object" else pytest.importorskip("scipy.sparse").eye(3)
    message = difference(output, output.copy() if odd == "sparse" else Odd()).message
    assert message.startswith("output cannot be compared (")
    assert message.endswith("give check=, a function of the output and the expected output")


LIBRARIES = {
    "numpy": lambda: np,
    "jax": lambda: pytest.importorskip("jax.numpy"),
    "torch": lambda: pytest.importorskip("torch"),
}


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_truth_of_a_comparison_in_any_library_is_the_result_of_a_check(library):
    ones = LIBRARIES[library]().ones(3)
    assert as_mismatch((ones == 1).all()) is None
    assert as_mismatch((ones == 2).all()).message == "the check rejected the output"
    with pytest.raises(DefinitionError, match=f"the check returned a value of type {type(ones).__name__}; return True"):
        as_mismatch(ones == 1)


@pytest.mark.parametrize("result", ["bare", "float", "tuple"])
@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("isolate", ["never", "always"])
@pytest.mark.parametrize("reference", [True, False], ids=["reference", "heuristic"])
def test_a_reduction_to_a_scalar_is_tuned_and_a_wrong_one_is_not(result, library, isolate, reference):
    if isolate == "always" and library != "numpy":
        pytest.skip("a fork does not suit a process with the threads of a framework")
    xp = LIBRARIES[library]()
    wrap = {"bare": lambda s: s, "float": float, "tuple": lambda s: (s, {"norm": s})}[result]
    if result == "float" and library == "jax":
        pytest.skip("a jitted function returns arrays")

    def total(x, *, config):
        sums = [x[i :: config.ways].sum() for i in range(config.ways)]
        return wrap(sum(sums[1:], sums[0]) * config.factor)

    x = xp.asarray(np.random.default_rng(0).random(4000).astype(np.float32))
    options = {"reference": lambda x: wrap(x.sum())} if reference else {}
    call = tb.tunable(
        total,
        name=f"total_{library}",
        space=[{"ways": ways, "factor": factor} for ways in (1, 3, 7) for factor in (1.0, 1.01)],
        heuristic={"ways": 1, "factor": 1.0},
        policy=tb.AutotunePolicy(isolate=isolate),
        store=False,
        **options,
    )
    tuned = tb.tune(call, x, progress=False)
    failed = {tuned.configs[m.fingerprint].factor for m in tuned.measurements if m.failure is not None}
    assert failed == {1.01}
    assert len(tuned.ranking) == 3


# A dtype, a coarser one, an error within the tolerance of the second alone, and one within both.
COARSE = {
    "numpy": ("float64", "float32", 1e-4, 1e-10),
    "torch": ("float64", "float32", 1e-4, 1e-10),
    "jax": ("float32", "bfloat16", 0.02, 1e-5),
}


def as_dtype(array, name):
    if hasattr(array, "astype"):
        return array.astype(name)
    return array.to(getattr(LIBRARIES["torch"](), name))


@pytest.mark.promise("wrong-never-wins")
@pytest.mark.parametrize("result", ["bare", "tuple", "written"])
@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("model", ["reference", "heuristic", "most"])
def test_a_candidate_of_a_coarser_dtype_does_not_hide_its_error_behind_it(result, library, model):
    if result == "written" and library == "jax":
        pytest.skip("arrays of jax cannot be written to")
    xp = LIBRARIES[library]()
    fine, coarse, error, rounding = COARSE[library]

    def scale(x, out, *, config):
        found = as_dtype(x * 3 * (1 + config.error), config.dtype)
        if result == "written":
            out["y"] = found
            return None
        return found if result == "bare" else (0, {"y": found})

    right, options = {"error": 0.0, "dtype": fine}, {}
    if model == "heuristic":
        options["heuristic"] = right
    elif model == "reference":
        options["reference"] = lambda x, out: scale(x, out, config=SimpleNamespace(**right))
    coarsely = {"error": error, "dtype": coarse}
    space = [coarsely, right, {"error": error, "dtype": fine}, {"error": rounding, "dtype": fine}]
    call = tb.tunable(scale, name=f"scale_{library}", space=space, store=False, **options)
    x = as_dtype(xp.asarray(np.random.default_rng(0).random(100)), fine)
    tuned = tb.tune(call, x, {}, progress=False)
    passed = [tuned.configs[m.fingerprint] for m in tuned.measurements if m.failure is None]
    assert {config.dtype for config in passed} == {fine}
    assert len(passed) == 2
