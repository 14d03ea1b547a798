"""Tunable functions that are methods, and functions that cannot be tuned because their calls run nothing."""

from __future__ import annotations

import asyncio
import inspect
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest

import tunebook as tb
from tunebook._base.errors import DefinitionError, UnkeyableError
from tunebook._keys.call_key import call_key

OPTIONS = {"space": tb.Space(b=[1, 2]), "heuristic": {"b": 1}, "store": False}
X = np.arange(4.0)


class Layer:
    def __init__(self, by):
        self.by = by

    @tb.tunable(**OPTIONS, ignore=("self",))
    def forward(self, x, scale=1.0, *, config):
        """Multiply."""
        return x * self.by * scale

    @tb.tunable(**OPTIONS)
    def keyed(self, x, *, config):
        return x * self.by

    @staticmethod
    @tb.tunable(**OPTIONS)
    def static(x, *, config):
        return x


@dataclass
class Keyed:
    by: float

    @tb.tunable(**OPTIONS)
    def forward(self, x, *, config):
        return x * self.by


@pytest.mark.promise("methods-work")
@pytest.mark.parametrize("layer", [Layer(3), Keyed(3)], ids=["ignored", "keyed"])
def test_everything_about_a_call_takes_the_arguments_of_the_bound_call(layer):
    kind = type(layer)
    assert layer.forward.problem(X) == kind.forward.problem(layer, X)
    assert layer.forward.explain(X).selection == kind.forward.explain(layer, X).selection
    assert tb.tune(layer.forward, X, progress=False).problem == kind.forward.problem(layer, X)
    assert tb.tune_together(layer.forward, [(X,)], progress=False).config in [{"b": 1}, {"b": 2}]
    assert tb.verify(layer.forward, X, progress=False).tuned.problem == kind.forward.problem(layer, X)
    assert layer.forward.explain(X).selection.source == "memory"
    assert layer.forward(X).tolist() == (3 * X).tolist()
    assert layer.forward(x=X, config={"b": 2}).tolist() == (3 * X).tolist()


def test_a_bound_method_has_the_other_attributes_of_the_function():
    layer = Layer(2)
    assert layer.forward.kernel is Layer.forward.kernel
    assert layer.forward.selector is Layer.forward.selector
    with layer.forward.overlay(b=2):
        assert layer.forward.explain(X).selection.source == "overlay"
    assert str(inspect.signature(layer.forward)) == "(x, scale=1.0, *, config=None)"
    assert str(inspect.signature(Layer.forward)) == "(self, x, scale=1.0, *, config=None)"
    assert (layer.forward.__name__, layer.forward.__doc__) == ("forward", "Multiply.")
    assert (layer.forward.__self__, layer.forward.__func__) == (layer, Layer.forward)
    assert layer.forward == layer.forward != Layer(2).forward
    assert len({layer.forward, layer.forward, Layer(2).forward}) == 2
    with pytest.raises(AttributeError, match="no_such"):
        layer.forward.no_such  # noqa: B018 - for the error


def test_an_object_with_a_key_has_an_entry_for_each_key():
    assert Keyed(1).forward.problem(X) != Keyed(2).forward.problem(X)
    assert Layer(1).forward.problem(X) == Layer(2).forward.problem(X)


def test_an_object_without_a_key_is_an_error_that_says_what_to_type():
    with pytest.raises(UnkeyableError, match=r"ignore=\('self',\)"):
        Layer(1).keyed(X)


def test_static_methods_subclasses_and_super_work():
    class Child(Layer):
        def forward(self, x):
            return super().forward(x) + 1

    class Plain(Layer):
        pass

    assert Layer.static(X) is X
    assert Layer(1).static.explain(X).selection.source == "memory"
    assert Child(2).forward(X).tolist() == (2 * X + 1).tolist()
    assert Plain(2).forward.problem(X) == Layer(2).forward.problem(X)


def test_a_bound_method_as_an_argument_is_keyed_by_its_object():
    assert call_key({"f": Keyed(1).forward}) == call_key({"f": Keyed(1).forward}) != call_key({"f": Keyed(2).forward})


def test_an_object_may_replace_its_method():
    layer = Layer(1)
    layer.forward = lambda x: "mine"
    assert layer.forward(X) == "mine"


# -------------------------------------------------------------------------------------------- calls that run nothing


async def coroutine(x, *, config):
    return x


def generator(x, *, config):
    yield x


async def async_generator(x, *, config):
    yield x


class AsyncCall:
    async def __call__(self, x, *, config):
        return x


@pytest.mark.promise("async-refused")
@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (coroutine, "an async function"),
        (generator, "a generator"),
        (async_generator, "an async generator"),
        (AsyncCall(), "an async function"),
        (AsyncCall().__call__, "an async function"),
        (partial(coroutine, 1), "an async function"),
        (partial(partial(generator, 1)), "a generator"),
        (partial(AsyncCall(), 1), "an async function"),
    ],
)
def test_a_function_whose_call_runs_nothing_is_refused_where_it_is_decorated(function, kind):
    with pytest.raises(DefinitionError, match=f"is {kind}: a call of it returns before it has run.*Decorate the plain"):
        tb.tunable(function, **OPTIONS)
    with pytest.raises(DefinitionError, match=f"'slow' is {kind}"):
        tb.choice(fast=len, slow=function)


def test_a_kernel_with_an_async_run_is_refused():
    class Later(tb.Kernel):
        async def run(self, x, *, cfg):
            return x

    with pytest.raises(DefinitionError, match="'later' is an async function"):
        Later("later")


def test_a_coroutine_that_only_its_return_value_shows_is_not_tuned_and_still_runs():
    kernel = tb.tunable(lambda x, *, config: coroutine(x, config=config), **OPTIONS, name="hidden")
    with pytest.warns(tb.TunebookWarning, match="hidden@v0 is not tuned: .*it returns a coroutine, which has not run"):
        pending = kernel(3)
    assert asyncio.run(pending) == 3
    with pytest.raises(tb.TuningFailed, match="all 2 candidates failed"):
        tb.tune(kernel, 3, progress=False)
