"""Threads never see a half-changed hot path: each answer is right while the code, the memo and the scopes change."""

from __future__ import annotations

import itertools
import os
import random
import sys
import threading
import time

import numpy as np
import pytest
from limits import HANG_S

import tunebook as tb
from tunebook._base.vocabulary import computed_once
from tunebook._hotpath import dispatcher
from tunebook._hotpath.codegen import find_pack, reader_for

pytestmark = [  # forks beside threads are the point; JAX, if another test has loaded it, warns too
    pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning"),
]

A, B = np.zeros(4), np.zeros((2, 3), np.float32)


@pytest.fixture(autouse=True, params=["accelerated", "pure"])
def _way(request, monkeypatch):
    if request.param == "accelerated" and find_pack(layout=True) is None:
        pytest.skip("the accelerator is not built: python hatch_build.py")
    monkeypatch.setenv("TUNEBOOK_PURE", "1" if request.param == "pure" else "")


@pytest.fixture
def _switch_often():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def expected(x, opt):
    """Return the answer to a call, which depends on the kind of each argument."""
    return x.ndim * 10 + ["int", "float", "bool", "list", "str", "NoneType"].index(type(opt).__name__)


def make():
    @tb.tunable(
        space=lambda x, opt: [{"s": expected(x, opt)}],
        heuristic=lambda x, opt: {"s": expected(x, opt)},
        store=False,
        check=False,
        policy=tb.AutotunePolicy(cache_miss_fallback="heuristics"),
    )
    def kernel(x, opt, *, config):
        return config.s

    return kernel


def other_policy(kernel):
    kernel.selector.policy = tb.AutotunePolicy(cache_miss_fallback="heuristics", while_tuning="heuristics")


def under_overlay(kernel):
    with kernel.overlay(tb.Config(s=-1)):
        assert kernel(A, 1) == -1
        assert [kernel(B, 1.5) for _ in range(3)] == [-1] * 3


def recorded(kernel):
    with tb.record() as calls:
        assert kernel(A, 1) == expected(A, 1)
    assert len(calls) >= 1


def forked(kernel):
    child = os.fork()
    if child == 0:
        os._exit(0 if kernel(A, [2]) == expected(A, [2]) else 1)
    assert os.waitpid(child, 0)[1] == 0


TRANSITIONS = {
    "an argument that cannot be packed": lambda kernel: kernel(A, [1]),
    "another kind of argument": lambda kernel: (kernel(A, "x"), kernel(B, None)),
    "another array": lambda kernel: kernel(B, 1),
    "a listener": lambda kernel: kernel.selector.listen(lambda event, **data: None),
    "an overlay": under_overlay,
    "another policy": other_policy,
    "an empty memory": lambda kernel: kernel.selector.cache.clear(),
    "a new entry": lambda kernel: kernel.selector.cache.put(*kernel.problem(A, 1), tb.Config(s=expected(A, 1))),
    "a recording": recorded,
    "a copy of the process": forked,
}
CALLS = [(A, 1), (A, 1), (B, 1), (A, 2.5), (B, True)]


def stress(seconds, rng):
    """Call kernels in four threads while this one makes every transition, in any order; return the wrong answers."""
    wrong, deadline, trials = [], time.monotonic() + seconds, 0
    while time.monotonic() < deadline or not trials:
        trials += 1
        kernel, stop = make(), threading.Event()

        def call(kernel=kernel, stop=stop):
            try:
                for x, opt in itertools.cycle(CALLS):
                    if (answer := kernel(x, opt)) != expected(x, opt):
                        wrong.append((x, opt, answer))
                    if stop.is_set():
                        return
            except Exception as error:  # noqa: BLE001 - any error is a wrong answer
                wrong.append(error)

        threads = [threading.Thread(target=call) for _ in range(4)]
        for thread in threads:
            thread.start()
        for name in rng.sample(list(TRANSITIONS), len(TRANSITIONS)):
            TRANSITIONS[name](kernel)
            time.sleep(0.002)
        stop.set()
        for thread in threads:
            thread.join()
    return trials, wrong


@pytest.mark.promise("hot-path-whole")
@pytest.mark.usefixtures("_switch_often")
def test_every_answer_is_right_while_the_hot_path_changes():
    trials, wrong = stress(1.5, random.Random(1))
    assert trials >= 1
    assert wrong == []


@pytest.mark.slow
@pytest.mark.usefixtures("_switch_often")
@pytest.mark.timeout(1800)
def test_every_answer_is_right_for_long():
    _, wrong = stress(float(os.environ.get("SOAK_S", "60")), random.Random())
    assert wrong == []


# ----------------------------------------------------------------------------------------------- forks and finalisers


def ends(call):
    """Return whether a call ends in another thread: it would wait for ever for a lock of its own."""
    done = []
    thread = threading.Thread(target=lambda: done.append(call()), daemon=True)
    thread.start()
    thread.join(HANG_S)
    return done


def test_a_finaliser_may_call_the_kernel_while_its_code_is_generated(monkeypatch):
    kernel, inner = make(), []

    def collect(value, **options):  # stands for the garbage collector, which may run anywhere
        if not inner:
            inner.append(None)
            inner.append(kernel(B, "x"))
        return reader_for(value, **options)

    monkeypatch.setattr(dispatcher, "reader_for", collect)
    assert ends(lambda: kernel(A, 1)) == [expected(A, 1)]
    assert inner == [None, expected(B, "x")]
    for x, opt in CALLS:
        assert kernel(x, opt) == kernel(x, opt) == expected(x, opt)


def test_a_child_that_is_forked_while_a_thread_generates_code_can_call_kernels(monkeypatch):
    kernel, begun, over = make(), threading.Event(), threading.Event()

    def slowly(value, **options):
        if threading.current_thread() is busy and not over.is_set():
            begun.set()
            over.wait(HANG_S)
        return reader_for(value, **options)

    monkeypatch.setattr(dispatcher, "reader_for", slowly)
    busy = threading.Thread(target=kernel, args=(A, 1))
    busy.start()
    begun.wait(HANG_S)
    child = os.fork()
    if child == 0:
        os._exit(0 if ends(lambda: kernel(B, [1])) == [expected(B, [1])] else 1)
    status = os.waitpid(child, 0)[1]
    over.set()
    busy.join()
    assert status == 0


def test_a_child_that_is_forked_while_a_thread_computes_an_attribute_can_compute_it():
    begun, over = threading.Event(), threading.Event()

    class Computing:
        @computed_once
        def attribute(self):
            if threading.current_thread() is busy:
                begun.set()
                over.wait(HANG_S)
            return 1

    busy = threading.Thread(target=lambda: Computing().attribute)
    busy.start()
    begun.wait(HANG_S)
    child = os.fork()
    if child == 0:
        os._exit(0 if ends(lambda: Computing().attribute) == [1] else 1)
    status = os.waitpid(child, 0)[1]
    over.set()
    busy.join()
    assert status == 0
