"""Overlays, policies and new results meet jit's cache: traced again when the content differs, and only then."""

from __future__ import annotations

import asyncio
import contextvars
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import pytest
from limits import HANG_S
from test_jax_trace import python

import tunebook as tb
from tunebook._memo.answer_memo import EPOCH
from tunebook.adapters import jax as tbx

X = jnp.ones(4)


def make(name="k", **options):
    return tb.tunable(
        lambda x, *, config: x * config.b, space=tb.Space(b=[1, 2, 3]), heuristic={"b": 1}, name=name, store=False,
        policy=tb.AutotunePolicy(cache_miss_fallback="heuristics"), **options,
    )  # fmt: skip


class Traced:
    """A jitted function that counts its traces."""

    def __init__(self, function, jit=jax.jit):
        self.count = 0

        def counted(x):
            self.count += 1
            return function(x)

        self._jitted = jit(counted)

    def __call__(self, x=X):
        return float(self._jitted(x)[0])


def test_an_overlay_reaches_a_jitted_function_and_ends_with_its_block():
    k = make()
    f = Traced(k)
    assert f() == 1
    with k.overlay(tb.Config(b=2)):
        assert f() == 2
        with k.overlay(tb.Config(b=3)):
            assert f() == 3
        assert f() == 2
    assert (f(), f.count) == (1, 3)


def test_equal_content_shares_a_trace():
    k = make()
    f = Traced(k)
    for _ in range(10):
        with k.overlay(tb.Config(b=2)):
            assert f() == 2
        with tb.overlay_cache({k.problem(X): tb.Config(b=3)}):
            assert f() == 3
        assert f() == 1
    assert f.count == 3


def test_a_changed_mapping_never_leaves_a_program_under_its_old_content():
    k = make()
    eager, f, g = Traced(k, jit=lambda f: f), Traced(k), Traced(k)
    mapping = {k.problem(X): tb.Config(b=2)}
    with tb.overlay_cache(mapping):
        assert f() == 2
        mapping[k.problem(X)] = tb.Config(b=3)
        assert g() == 2, "traced under the content that the block began with"
        assert eager() == 3
        assert (f(), g()) == (3, 3)
    with tb.overlay_cache({k.problem(X): tb.Config(b=2)}):
        assert (f(), g()) == (2, 2)


def test_functions_outside_of_overlays_are_never_traced_again():
    k, unrelated = make(), Traced(lambda x: x + 1)
    unrelated()
    for i in range(20):
        with k.overlay(tb.Config(b=i)):
            pass
        unrelated()
    assert unrelated.count == 1


def test_an_unrelated_function_is_traced_once_per_content_at_most():
    k, unrelated = make(), Traced(lambda x: x + 1)
    for _ in range(10):
        with k.overlay(tb.Config(b=2)):
            unrelated()
    assert unrelated.count == 1


def test_stacks_of_the_same_overlays_in_another_order_differ():
    k = make()
    f = Traced(k)
    with k.overlay(tb.Config(b=2)), k.overlay(tb.Config(b=3)):
        assert f() == 3
    with k.overlay(tb.Config(b=3)), k.overlay(tb.Config(b=2)):
        assert f() == 2


def test_many_overlays_never_run_a_stale_configuration():
    k = make()
    f = Traced(k)
    for i in range(60):
        with k.overlay(tb.Config(b=i % 20)):
            assert f() == i % 20
    assert f.count == 20


def test_configurations_that_cannot_be_written_down_are_told_apart():
    k = tb.tunable(lambda x, *, config: config(x), space=[abs], heuristic=abs, name="functions", store=False)
    f = Traced(k)
    with k.overlay(lambda x: x * 5):
        assert f() == 5
    with k.overlay(lambda x: x * 7):
        assert f() == 7


def test_a_policy_for_a_block_reaches_a_jitted_function():
    k = make(check=False)
    f = Traced(k)
    with pytest.raises(tb.NoConfig), tb.policy_override(k.selector, allow_heuristics=False):
        f()
    assert f() == 1
    traces = f.count
    for _ in range(3):
        with tb.policy_override(k.selector, validate_backward=True):
            assert f() == 1
    assert f.count == traces + 1


def test_threads_have_overlays_of_their_own():
    k = make()
    f = Traced(k)
    together = threading.Barrier(4)

    def run(b):
        found = []
        for _ in range(20):
            together.wait()
            if b == 1:
                found.append(f())
                continue
            with k.overlay(tb.Config(b=b)):
                found.append(f())
        return found

    with ThreadPoolExecutor(4) as pool:
        assert [set(found) for found in pool.map(run, [1, 2, 3, 4])] == [{1}, {2}, {3}, {4}]


async def keep_asking(k, f, b):
    if b == 1:
        for _ in range(20):
            await asyncio.sleep(0)
            assert f() == 1
        return
    with k.overlay(tb.Config(b=b)):
        for _ in range(20):
            await asyncio.sleep(0)
            assert f() == b


@pytest.mark.parametrize("jit", [jax.jit, tbx.jit], ids=["jax", "ours"])
def test_tasks_that_take_turns_have_overlays_of_their_own(jit):
    k = make()
    f = Traced(k, jit)

    async def main():
        await asyncio.gather(*(keep_asking(k, f, b) for b in (1, 2, 3, 1, 2)))

    asyncio.run(main())
    assert f.count == 3
    assert f() == 1, "nothing of it is left when the loop has ended"


def test_the_first_overlay_of_a_process_in_a_task_is_followed_too():
    said = python("""
import asyncio, jax, tunebook as tb
from test_jax_context import Traced, keep_asking, make
k = make()
f = Traced(k)
async def main():
    await asyncio.gather(*(keep_asking(k, f, b) for b in (2, 1, 3)))
asyncio.run(main())
print(f.count)
    """)
    assert said == ["3"]


def test_asyncio_gets_its_own_method_back_some_time_after_the_last_overlay_of_a_task():
    said = python("""
import asyncio
from test_jax_context import Traced, keep_asking, make
k, original = make(), asyncio.Handle._run
f, during = Traced(k), []
async def watch():
    for _ in range(5):
        await asyncio.sleep(0)
        during.append(asyncio.Handle._run is original)
async def main():
    await asyncio.gather(keep_asking(k, f, 2), keep_asking(k, f, 3), watch())
    for _ in range(1010):
        await asyncio.sleep(0)
    during.append(asyncio.Handle._run is original)
for _ in range(2):
    asyncio.run(main())
    print(set(during[:5]), during[5], asyncio.Handle._run is original)
    during.clear()
    """)
    assert said == ["{False} True True"] * 2


def test_a_wrapper_that_another_library_put_around_ours_is_left_in_place():
    said = python("""
import asyncio
from test_jax_context import Traced, keep_asking, make
k = make()
f, calls = Traced(k), []
async def wrap():
    await asyncio.sleep(0)
    ours = asyncio.Handle._run
    def theirs(handle):
        calls.append(handle)
        return ours(handle)
    asyncio.Handle._run = theirs
    return theirs
async def main():
    _, theirs = await asyncio.gather(keep_asking(k, f, 2), wrap())
    for _ in range(1010):
        await asyncio.sleep(0)
    return theirs
theirs = asyncio.run(main())
before = len(calls)
asyncio.run(main())
print(asyncio.Handle._run is not theirs, len(calls) > before > 0, f.count)
    """)
    assert said == ["True True 1"]


def test_a_task_that_never_leaves_its_overlay_leaves_nothing_behind():
    k = make()
    f = Traced(k)

    async def stays():
        with k.overlay(tb.Config(b=2)):
            assert f() == 2
            await asyncio.sleep(3600)

    async def main():
        task = asyncio.create_task(stays())
        await asyncio.sleep(0)
        assert f() == 1
        task.cancel()

    asyncio.run(main())
    assert f() == 1


@pytest.mark.skipif(sys.version_info < (3, 12), reason="tasks of older Pythons are never eager")
def test_with_eager_tasks_our_jit_is_exact_and_jaxs_is_warned_about():
    said = python("""
import asyncio, warnings
from test_jax_context import Traced, make
import tunebook as tb
from tunebook.adapters import jax as tbx
k = make()
f = Traced(k, tbx.jit)
async def waits():
    with k.overlay(tb.Config(b=2)):
        await asyncio.sleep(0)
        return f()
async def main():
    asyncio.get_running_loop().set_task_factory(asyncio.eager_task_factory)
    task = asyncio.create_task(waits())
    return f(), await task, f()
with warnings.catch_warnings(record=True) as warned:
    print(asyncio.run(main()))
print(len(warned), "tunebook.adapters.jax.jit" in str(warned[0].message))
    """)
    assert said == ["(1.0, 2.0, 1.0)", "1 True"]


def test_on_other_event_loops_our_jit_is_exact_and_jaxs_is_warned_about(monkeypatch):
    class Other(asyncio.AbstractEventLoop):
        """Takes turns on its own terms."""

        def get_task_factory(self):
            return None

    k = make()
    f = Traced(k, tbx.jit)
    monkeypatch.setattr(asyncio, "get_running_loop", Other)
    other_task = contextvars.copy_context()
    overlay = k.overlay(tb.Config(b=2))
    with pytest.warns(tb.TunebookWarning, match=r"Use tunebook\.adapters\.jax\.jit"):
        overlay.__enter__()
    assert [f(), other_task.run(f), f()] == [2, 1, 2]
    overlay.__exit__(None, None, None)


def test_an_overlay_inside_a_jitted_function_is_part_of_it():
    k = make()

    def inside(x):
        with k.overlay(tb.Config(b=2)):
            return k(x)

    f = Traced(inside)
    assert [f(), f(), f.count] == [2, 2, 1]
    with k.overlay(tb.Config(b=3)):
        assert f() == 2


def test_a_running_program_adopts_new_configurations_when_told_to():
    k = make()
    f = Traced(k)
    assert f() == 1
    k.selector.cache.put(*k.problem(X), tb.Config(b=3))
    assert f() == 1, "a trace keeps what it was made with"
    tbx.refresh()
    assert (f(), f(), f.count) == (3, 3, 2)


def test_a_refresh_reaches_threads_and_overlays():
    k = make()
    f = Traced(k)
    with k.overlay(tb.Config(b=2)):
        assert f() == 2
    assert f() == 1
    k.selector.cache.put(*k.problem(X), tb.Config(b=3))
    tbx.refresh()
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(f).result() == 3
    with k.overlay(tb.Config(b=2)):
        assert f() == 2
    assert f() == 3


def test_results_of_the_background_are_adopted_by_a_refresh():
    k = tb.tunable(
        lambda x, *, config: x * config.b, space=tb.Space(b=[1, 2]), heuristic={"b": 1}, name="behind", store=False,
        policy=tb.AutotunePolicy(cache_miss_fallback="background"), reference=lambda x: x * 2,
    )  # fmt: skip
    f = Traced(k)
    assert f() == 1
    assert tb.wait_for_background(HANG_S)
    tbx.refresh()
    assert f() == 2


def test_an_epoch_is_adopted_once_however_often_it_is_announced():
    k = make()
    f, unrelated = Traced(k), Traced(lambda x: x + 1)
    counts = []
    for b in (2, 3):
        f(), unrelated()
        k.selector.cache.put(*k.problem(X), tb.Config(b=b))
        EPOCH.advance()
        for told in (tb.epoch(), tb.epoch(), tb.epoch() - 1):
            tbx.refresh(told)
            counts.append((f(), f.count, unrelated(), unrelated.count))
    assert counts == [(2, 2, 2, 1)] * 3 + [(3, 3, 2, 1)] * 3


def test_a_running_program_adopts_the_results_of_background_tuning():
    k = tb.tunable(
        lambda x, *, config: x * config.b, space=tb.Space(b=[1, 2]), heuristic={"b": 1}, name="adopted", store=False,
        policy=tb.AutotunePolicy(cache_miss_fallback="background"), reference=lambda x: x * 2,
    )  # fmt: skip
    f, unrelated = Traced(k), Traced(lambda x: x + 1)
    stop = tb.on_epoch(tbx.refresh)
    try:
        assert (unrelated(), f()) == (2, 1)  # in this order: a refresh during its trace would have it traced again
        assert tb.wait_for_background(HANG_S)
        assert [(f(), unrelated()) for _ in range(5)] == [(2, 2)] * 5
        assert (f.count, unrelated.count) == (2, 1)
    finally:
        stop()


def test_functions_are_not_traced_again_while_nobody_refreshes():
    k, unrelated = make(), Traced(lambda x: x + 1)
    f = Traced(k)
    for b in (1, 2, 3):
        f(), unrelated()
        k.selector.cache.put(*k.problem(X), tb.Config(b=b))
        tb.tune(k, X)
    assert (f.count, unrelated.count) == (1, 1)


def test_an_overlay_that_was_entered_before_the_adapter_was_loaded_counts():
    said = python("""
import sys, tunebook as tb
k = tb.tunable(lambda x, *, config: x * config.b, space=tb.Space(b=[1, 2]), heuristic={"b": 1}, name="k", store=False,
               policy=tb.AutotunePolicy(cache_miss_fallback="heuristics"))
import jax
f = jax.jit(k)
assert "tunebook.adapters.jax" not in sys.modules
with k.overlay(tb.Config(b=2)):
    print(float(f(1.0)))
print(float(f(1.0)))
    """)
    assert said == ["2.0", "1.0"]
