"""Kernels in Python: functions made from configurations, and Numba's."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import tunebook as tb
from tunebook._code.checksum import code_checksum
from tunebook.adapters.numpy import specialised


def test_a_factory_is_called_once_per_configuration_also_under_threads():
    made = []

    @specialised
    def factory(config):
        made.append(config)
        return lambda x: x * config.n

    configs = [tb.Config(n=n) for n in (2, 3)]
    with ThreadPoolExecutor(8) as pool:
        functions = list(pool.map(factory, configs * 20))
    assert {function(5) for function in functions} == {10, 15}
    assert len(made) == len(set(functions)) == 2


def test_values_that_are_equal_but_not_the_same_are_told_apart():
    kind = specialised(lambda config: type(config.n))
    assert [kind(tb.Config(n=n)) for n in (1, True, 1.0, 1)] == [int, bool, float, int]


def test_a_configuration_that_changes_is_looked_at_anew():
    double = specialised(lambda config: config["n"] * 2)
    config = {"n": 1}
    assert double(config) == 2
    config["n"] = 5
    assert double(config) == 10


def test_a_factory_that_fails_is_asked_again():
    answers = iter([ValueError("not yet"), "made"])

    @specialised
    def factory(config):
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    with pytest.raises(ValueError, match="not yet"):
        factory(tb.Config(n=1))
    assert factory(tb.Config(n=1)) == "made"


def test_editing_a_factory_makes_it_another_kernel():
    def kernel_with(factory):
        made = specialised(factory)

        @tb.tunable(space=[{"n": 1}], store=False)
        def kernel(x, *, config):
            return made(config)(x)

        return kernel.kernel.code_checksum

    one, same = kernel_with(lambda config: abs), kernel_with(lambda config: abs)  # on one line, they are the same text
    other = kernel_with(lambda config: round)
    assert one == same != other


def test_whole_functions_are_candidates_and_their_code_counts():
    def by_loop(x):
        return np.array([sum(row) for row in x])

    def by_numpy(x):
        return x.sum(axis=1)

    def kernel_choosing(**ways):
        @tb.tunable(space=tb.Space(way=list(ways)), reference=by_numpy, store=False)
        def sums(x, *, config):
            return ways[config.way](x)

        return sums

    x = np.arange(12.0).reshape(3, 4)
    sums = kernel_choosing(loop=by_loop, numpy=by_numpy)
    assert np.array_equal(sums(x), by_numpy(x))
    assert {m.config["v"]["way"]: m.failure for m in tb.tune(sums, x).measurements} == {"loop": None, "numpy": None}
    swapped = kernel_choosing(loop=by_numpy, numpy=by_loop)
    assert sums.kernel.code_checksum != swapped.kernel.code_checksum


def test_numba_compiles_ahead_and_gives_the_right_results():
    numba = pytest.importorskip("numba")

    @specialised
    def compiled(config):
        step = config.step

        def total(x):
            result = 0.0
            for start in range(step):
                for i in range(start, len(x), step):
                    result += x[i]
            return result

        return numba.njit("float64(float64[::1])", fastmath=config.fastmath)(total)

    compiled_before = []

    @tb.tunable(space=tb.Space(step=[1, 4], fastmath=[False, True]), compile=compiled, store=False)
    def total(x, *, config):
        compiled_before.append(len(compiled(config).signatures))
        return np.array([compiled(config)(x)])

    assert total(np.arange(10.0)) == [45.0]
    assert len(tb.tune(total, np.arange(10.0)).measurements) == 4
    assert set(compiled_before) == {1}


def test_the_code_of_a_numba_function_counts():
    numba = pytest.importorskip("numba")

    def kernel_calling(function):
        jitted = numba.njit(function)
        return code_checksum(lambda x: jitted(x) * 2)

    def one(x):
        return x + 1

    def two(x):
        return x + 2

    assert kernel_calling(one) == kernel_calling(one) != kernel_calling(two)


def test_the_options_that_numba_compiles_with_are_part_of_the_checksum():
    from numba import njit

    from tunebook._code.checksum import code_checksum

    def f(x):
        return x + 1.0

    assert code_checksum(njit(f)) != code_checksum(njit(fastmath=True)(f))
    assert code_checksum(njit(f)) == code_checksum(njit(f))
