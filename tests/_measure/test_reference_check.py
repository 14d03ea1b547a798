"""References that write to arguments: these are put back, and compared with the arguments that candidates change."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest

import tunebook as tb

RIGHT = {"factor": 2, "way": 1}
SPACE = [RIGHT, {"factor": 2, "way": 2}, {"factor": 3, "way": 1}]


def tuned(function, reference, *args, **options):
    """Return the factors of the configurations that passed."""
    call = tb.tunable(
        function, space=SPACE, heuristic=RIGHT, reference=reference, store=False, name="writer", **options
    )
    result = tb.tune(call, *args, progress=False)
    return {result.configs[m.fingerprint].factor for m in result.measurements if m.failure is None}


def in_array(x, out, *, config):
    out += x * config.factor


def in_list(x, out, *, config):
    out.extend((x * config.factor).tolist())


def in_dict(x, out, *, config):
    out["y"] = x * config.factor


def and_returned(x, out, *, config):
    out += x * config.factor
    return out


def with_scratch(x, out, scratch=np.zeros(3), *, config):  # noqa: B008 - its values are not the matter
    scratch[:] = config.way
    out += x * config.factor


WRITERS = {
    in_array: lambda: np.zeros(3),
    in_list: lambda: [1.0],
    in_dict: dict,
    and_returned: lambda: np.zeros(3),
}


def as_reference(function):
    return lambda x, out: function(x, out, config=SimpleNamespace(factor=2, way=0))


@pytest.mark.promise("arguments-left-alone")
@pytest.mark.parametrize("function", WRITERS)
def test_a_reference_that_writes_to_arguments_does_not_show_in_the_callers(function):
    x, out, expected = np.ones(3), WRITERS[function](), WRITERS[function]()
    call = tb.tunable(function, space=SPACE, heuristic=RIGHT, reference=as_reference(function), store=False)
    call(x, out)
    function(x, expected, config=SimpleNamespace(**RIGHT))
    np.testing.assert_equal(out, expected)


@pytest.mark.promise("wrong-never-wins")
@pytest.mark.parametrize("isolate", ["never", "always"])
@pytest.mark.parametrize("function", WRITERS)
def test_arguments_are_compared_with_those_that_the_reference_changed(function, isolate):
    policy = tb.AutotunePolicy(isolate=isolate)
    out = WRITERS[function]()
    assert tuned(function, as_reference(function), np.ones(3), out, policy=policy) == {2}
    np.testing.assert_equal(out, WRITERS[function]())


@pytest.mark.promise("wrong-never-wins")
def test_tensors_are_compared_with_those_that_the_reference_changed():
    torch = pytest.importorskip("torch")
    out = torch.zeros(3)
    assert tuned(in_array, as_reference(in_array), torch.ones(3), out) == {2}
    assert not out.any()


@pytest.mark.promise("wrong-never-wins")
def test_a_candidate_may_not_change_arguments_that_the_reference_leaves_as_they_are():
    def sort(x, *, config):
        x[:] = np.sort(x) * (config.factor - 1)

    assert tuned(sort, lambda x: x.sort(), np.arange(3.0)) == {2}


def test_a_candidate_may_return_the_argument_that_the_reference_changes():
    assert tuned(and_returned, as_reference(in_array), np.ones(3), np.zeros(3)) == {2}
    assert tuned(in_array, as_reference(and_returned), np.ones(3), np.zeros(3)) == {2}


def test_other_arguments_may_be_scratch_space():
    scratch = np.zeros(3)
    reference = lambda x, out, scratch: as_reference(in_array)(x, out)
    assert tuned(with_scratch, reference, np.ones(3), np.zeros(3), scratch) == {2}


def test_a_kernel_that_returns_nothing_is_told_how_its_reference_shows_the_right_output():
    call = tb.tunable(in_array, space=SPACE, heuristic=RIGHT, reference=lambda x, out: out + 2 * x, store=False)
    with pytest.warns(tb.TunebookWarning, match="returned nothing") as warned:
        call(np.ones(3), np.zeros(3))
    assert "let the reference write to the same arguments" in str(warned[0].message)


def test_a_reference_that_writes_something_else_each_time_is_named_and_leaves_the_arguments_alone():
    factors = iter(range(5, 100))
    out = np.zeros(3)

    def reference(x, out):
        out += x * next(factors)

    with pytest.raises(tb.TuningFailed, match="the reference returns another output each time"):
        tuned(in_array, reference, np.ones(3), out)
    with pytest.raises(tb.TuningFailed, match="the reference returns another output each time") as failed:
        tuned(and_returned, lambda x, out: x * next(factors), np.ones(3), out)
    assert str(failed.value.exceptions[0]).startswith("output is off by up to")
    assert not out.any()


def test_a_reference_whose_output_cannot_be_compared_is_not_called_random():
    eye = pytest.importorskip("scipy.sparse").eye
    with pytest.raises(tb.TuningFailed, match="all 3 candidates failed") as failed:
        tuned(lambda n, *, config: eye(n) * (config.way > 0), eye, 3)
    assert "give check=" in str(failed.value.exceptions[0])


class Named(NamedTuple):
    y: object


@dataclass
class Data:
    y: object


CONTAINERS = [
    tuple,
    Named,
    Data,
    lambda y: OrderedDict(y=y),
    lambda y: [Named((y,))],
    lambda y: MappingProxyType({0: y}),
]


@pytest.mark.promise("wrong-never-wins")
@pytest.mark.parametrize("wrap", CONTAINERS)
def test_a_view_of_an_argument_in_the_references_output_is_not_spoiled_by_candidates(wrap):
    def scaled(x, *, config):
        x *= config.factor - 1
        return wrap(x)

    assert tuned(scaled, wrap, np.arange(4.0)) == {2}


@pytest.mark.promise("arguments-left-alone")
def test_a_reference_does_not_use_up_an_iterator():
    def total(items, *, config):
        return sum(items) * config.factor // 2

    call = tb.tunable(total, space=SPACE, heuristic=RIGHT, reference=sum, ignore=("items",), store=False)
    with pytest.warns(tb.TunebookWarning, match="used up by the first run"):
        assert call(iter([1, 2, 3])) == 6
