"""Kernel objects made anew for every call: they find the answer of the last one, and nothing else's."""

from __future__ import annotations

import enum
import math

import numpy as np
import pytest

import tunebook as tb


class Mode(enum.Enum):
    FAST = 1
    EXACT = 2


class Plain(tb.Kernel):
    """Returns its configuration, and counts the questions that cost time."""

    asked = 0

    def run(self, *args, cfg, **kwargs):
        return cfg

    def heuristic_cfg(self, inv):
        type(self).asked += 1
        return type(self).asked


@pytest.fixture
def executor():
    Plain.asked = 0
    policy = tb.AutotunePolicy(cache_miss_fallback="heuristics")
    return tb.Executor(tb.ConfigSelectorChain(tb.ConfigCache(), policy, tb.Tuner()))


X = np.ones((3, 4), np.float32)

DIFFERENT = [
    ((X,), {}),
    ((X[:2],), {}),
    ((X.astype(np.float64),), {}),
    ((X.T,), {}),
    ((X, 1), {}),
    ((X, True), {}),
    ((X, 1.0), {}),
    ((X, 0.0), {}),
    ((X, -0.0), {}),
    ((X, "1"), {}),
    ((X, None), {}),
    ((X, Mode.FAST), {}),
    ((X, Mode.EXACT), {}),
    ((X, np.float32), {}),
    ((X, np.float64), {}),
    ((X,), {"n": 1}),
    ((X,), {"m": 1}),
    ((X, (1, 2)), {}),
    ((X, (1,), 2), {}),
    ((X, [1, 2]), {}),
    ((X, math.nan), {}),
]


def test_a_new_object_per_call_finds_the_answer_of_the_last_one(executor):
    first = [executor(Plain("plain"), *args, **kwargs) for args, kwargs in DIFFERENT]
    assert first == list(range(1, len(DIFFERENT) + 1)), "every call is a problem of its own"
    again = [executor(Plain("plain"), *args, **kwargs) for args, kwargs in DIFFERENT]
    assert again == first


def test_other_kernels_and_versions_have_their_own_answers(executor):
    assert [executor(Plain(name, version), X) for name in "ab" for version in "01"] == [1, 2, 3, 4]
    assert [executor(Plain(name, version), X) for name in "ab" for version in "01"] == [1, 2, 3, 4]


def test_a_key_builder_decides_alone(executor):
    build = lambda inv: str(inv.args[0].ndim)

    executor.chooser.cache.put(*Plain("built", key_builder=build).problem(tb.Invocation("built", (X,), {})), 77)
    assert executor(Plain("built", key_builder=build), X[:1]) == 77


@pytest.mark.parametrize("given", ["cfg", "_cfg"])
def test_a_given_configuration_is_used_for_its_call_alone(executor, given):
    assert executor(Plain("given"), X, **{given: 99}) == 99
    assert executor(Plain("given"), X, stamp=False) == 1


def test_a_changed_entry_a_policy_and_an_overlay_are_noticed(executor):
    problem = Plain("changes").problem(tb.Invocation("changes", (X,), {}))
    assert executor(Plain("changes"), X) == 1
    with tb.overlay_cache({problem: 50}):
        assert executor(Plain("changes"), X) == 50
    assert executor(Plain("changes"), X) == 1
    executor.chooser.cache.put(*problem, 60)
    assert executor(Plain("changes"), X) == 60
    executor.chooser.cache.clear()
    executor.chooser.policy = tb.AutotunePolicy(allow_heuristics=False, allow_autotune=False)
    with pytest.raises(tb.NoConfig):
        executor(Plain("changes"), X)


def test_listeners_hear_every_call(executor):
    executor(Plain("heard"), X)
    heard = []
    executor.chooser.listen(lambda event, **data: heard.append(event))
    for _ in range(3):
        executor(Plain("heard"), X)
    assert len(heard) == 3


def test_a_recording_sees_warm_calls(executor):
    executor(Plain("recorded"), X)
    executor(Plain("recorded"), X)
    with tb.record() as calls:
        executor(Plain("recorded"), X)
    assert [call.problem.op for call in calls] == ["recorded@v0"]


def test_variants_of_one_object_are_used(executor):
    kernel = Plain("own")
    kernel.run_cpu = lambda x, *, cfg: ("cpu", cfg)
    assert executor(kernel, X) == ("cpu", 1)
    assert executor(Plain("own"), X) == 1


def test_an_argument_without_a_cheap_key_goes_the_long_way(executor):
    class Odd:
        """An object that only its class describes."""

        __tunebook_checksum__ = staticmethod(lambda: "odd")

    tb.register_key(Odd, lambda odd: "odd")
    assert executor(Plain("odd"), Odd()) == executor(Plain("odd"), Odd())
