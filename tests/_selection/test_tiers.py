"""The selection chain: every row of the contract's table that is about tiers."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from kernels import FakeClock, PretendKernel, Tiles, fake_tuner, invocation, note_in
from limits import HANG_S

import tunebook as tb
from tunebook._selection.selector import ORDER
from tunebook.stores import problem_id

FAST, SLOW, GUESS = Tiles(64), Tiles(16), Tiles(32)
COSTS = {SLOW: 0.5, FAST: 0.001, GUESS: 0.1}


def make(*, costs=None, heuristic=GUESS, path=None, clock=None, **options):
    clock = clock or FakeClock()
    kernel = PretendKernel(clock, costs or COSTS, heuristic=heuristic)
    persistent = None if path is None else tb.PersistentCache("pretend", path, cfg_type=Tiles)
    events = []
    chain = tb.ConfigSelectorChain(
        tb.ConfigCache(),
        tuner=fake_tuner(clock),
        persistent=persistent,
        on_event=note_in(events),
        **options,
    )
    return chain, kernel, events


def names(events):
    return [event for event, _ in events]


def overlay_of(kernel, inv, config):
    return tb.overlay_cache({kernel.problem(inv): config})


def test_a_miss_is_tuned_once_and_then_found_in_memory():
    chain, kernel, events = make()
    assert chain.choose(invocation(kernel, 1), kernel) == FAST
    runs = len(kernel.runs)
    assert chain.choose(invocation(kernel, 1), kernel) == FAST
    assert len(kernel.runs) == runs
    assert names(events) == ["autotune_start", "autotune_finish", "cache_hit"]
    assert events[-1][1]["level"] == "memory"


def test_events_carry_the_key_and_the_config():
    chain, kernel, events = make()
    inv = invocation(kernel, 1)
    chain.choose(inv, kernel)
    event, data = events[-1]
    problem = kernel.problem(inv)
    assert (event, data["cfg"]) == ("autotune_finish", FAST)
    assert (data["device"], data["op_id"], data["call_key"]) == problem
    assert problem.op == "pretend@v0"
    assert problem.device == tb.device_fingerprint()


def test_an_override_is_used_for_this_call_and_never_remembered(tmp_path):
    chain, kernel, events = make(path=tmp_path)
    inv = invocation(kernel, 1, override=SLOW)
    assert chain.choose(inv, kernel) == SLOW
    assert names(events) == ["override"]
    assert chain.cache.size() == 0
    assert list(chain.persistent.store.items()) == []
    assert chain.choose(invocation(kernel, 1), kernel) == FAST


@pytest.mark.promise("blocks-end")
def test_an_overlay_shadows_memory_and_disk_and_ends_with_its_block(tmp_path):
    chain, kernel, events = make(path=tmp_path)
    inv = invocation(kernel, 1)
    chain.choose(inv, kernel)
    with overlay_of(kernel, inv, SLOW):
        assert chain.choose(inv, kernel) == SLOW
    assert chain.choose(inv, kernel) == FAST
    assert names(events)[-2:] == ["overlay_hit", "cache_hit"]


def test_the_innermost_overlay_wins_and_overlays_are_reentrant():
    chain, kernel, _ = make()
    inv = invocation(kernel, 1)
    outer, inner = overlay_of(kernel, inv, SLOW), overlay_of(kernel, inv, GUESS)
    with outer, inner, outer:
        assert chain.choose(inv, kernel) == SLOW
    with outer:
        with inner:
            assert chain.choose(inv, kernel) == GUESS
        assert chain.choose(inv, kernel) == SLOW


def test_a_change_of_an_overlays_mapping_counts_from_the_next_call_on():
    chain, kernel, _ = make()
    inv, other = invocation(kernel, 1), invocation(kernel, 2)
    mapping = {kernel.problem(inv): SLOW}
    with tb.overlay_cache(mapping), tb.overlay_cache({kernel.problem(other): GUESS}):
        assert chain.choose(inv, kernel) == SLOW
        mapping[kernel.problem(inv)] = GUESS
        assert chain.choose(inv, kernel) == GUESS
        mapping.clear()
        assert chain.choose(inv, kernel) == FAST


def test_an_overlay_with_other_keys_is_refused_where_it_is_made():
    with pytest.raises(tb.DefinitionError, match="three strings"):
        tb.overlay_cache({"matmul": FAST})


@pytest.mark.promise("blocks-end")
def test_an_overlay_is_seen_in_its_own_thread_only():
    chain, kernel, _ = make()
    inv = invocation(kernel, 1)
    chain.choose(inv, kernel)
    with overlay_of(kernel, inv, SLOW), ThreadPoolExecutor(1) as pool:
        assert pool.submit(chain.choose, inv, kernel).result() == FAST


@pytest.mark.promise("blocks-end")
def test_overlays_of_interleaved_tasks_do_not_mix():
    chain, kernel, _ = make()
    inv = invocation(kernel, 1)

    async def inside(config):
        with overlay_of(kernel, inv, config):
            for _ in range(20):
                await asyncio.sleep(0)
                assert chain.choose(inv, kernel) == config

    async def outside():
        for _ in range(20):
            await asyncio.sleep(0)
            assert chain.choose(inv, kernel) == FAST

    async def main():
        await asyncio.gather(inside(SLOW), outside(), inside(GUESS), outside())

    asyncio.run(main())


def test_a_task_started_in_a_block_keeps_its_overlay_after_the_block():
    chain, kernel, _ = make()
    inv = invocation(kernel, 1)

    async def later():
        await asyncio.sleep(0)
        return chain.choose(inv, kernel)

    async def main():
        with overlay_of(kernel, inv, SLOW):
            task = asyncio.create_task(later())
        return chain.choose(inv, kernel), await task

    assert asyncio.run(main()) == (FAST, SLOW)


def test_a_second_selector_finds_the_entry_of_the_first(tmp_path):
    first, kernel, _ = make(path=tmp_path)
    first.choose(invocation(kernel, 1), kernel)
    second, again, events = make(path=tmp_path)
    assert second.choose(invocation(again, 1), again) == FAST
    assert again.runs == []
    assert [(e, d.get("level")) for e, d in events] == [("cache_hit", "persistent")]
    second.choose(invocation(again, 1), again)
    assert events[-1][1]["level"] == "memory"


def test_persist_autotune_false_writes_nothing(tmp_path):
    chain, kernel, _ = make(path=tmp_path, persist_autotune=False)
    assert chain.choose(invocation(kernel, 1), kernel) == FAST
    assert list(chain.persistent.store.items()) == []


def test_a_heuristic_is_never_written_down(tmp_path):
    chain, kernel, events = make(path=tmp_path, policy=tb.AutotunePolicy(cache_miss_fallback="heuristics"))
    assert chain.choose(invocation(kernel, 1), kernel) == GUESS
    assert names(events) == ["heuristics"]
    assert (chain.cache.size(), list(chain.persistent.store.items())) == (0, [])


def test_after_the_cache_is_cleared_the_remembered_decision_is_used_again():
    chain, kernel, events = make()
    inv = invocation(kernel, 1)
    chain.choose(inv, kernel)
    runs = len(kernel.runs)
    chain.cache.clear()
    assert chain.choose(inv, kernel) == FAST
    assert (len(kernel.runs), chain.cache.size()) == (runs, 1)
    assert names(events).count("autotune_start") == 1


def test_with_forbid_reautotune_off_a_cleared_key_is_tuned_again():
    chain, kernel, events = make(forbid_reautotune=False)
    chain.choose(invocation(kernel, 1), kernel)
    chain.cache.clear()
    chain.choose(invocation(kernel, 1), kernel)
    assert names(events).count("autotune_start") == 2


@pytest.mark.parametrize(
    ("policy", "heuristic", "expected"),
    [
        ({"allow_autotune": False}, GUESS, GUESS),
        ({"cache_miss_fallback": "heuristics"}, GUESS, GUESS),
        ({"allow_heuristics": False}, GUESS, FAST),
        ({"allow_autotune": False, "allow_heuristics": False}, GUESS, None),
        ({"cache_miss_fallback": "heuristics", "allow_heuristics": False}, GUESS, None),
        ({"allow_autotune": False}, None, None),
    ],
)
def test_every_policy_is_honoured_on_every_path(policy, heuristic, expected):
    chain, kernel, events = make(heuristic=heuristic, policy=tb.AutotunePolicy(**policy))
    if expected is None:
        with pytest.raises(tb.NoConfig, match="Asked in order"):
            chain.choose(invocation(kernel, 1), kernel)
        assert names(events)[-1] == "error"
    else:
        assert chain.choose(invocation(kernel, 1), kernel) == expected


def test_no_answer_lists_every_tier_and_a_way_out():
    chain, kernel, _ = make(heuristic=None, policy=tb.AutotunePolicy(allow_autotune=False))
    with pytest.raises(RuntimeError) as caught:
        chain.choose(invocation(kernel, 1), kernel)
    message = str(caught.value)
    assert [tier for tier, _ in caught.value.tried] == [tier.name for tier in ORDER if not tier.in_jobs_only]
    assert "allow_autotune is False" in message
    assert "the kernel has none" in message
    assert message.endswith("policy_override(selector, allow_autotune=True).")


@pytest.mark.promise("blocks-end")
def test_a_policy_override_ends_with_its_block_and_nests():
    chain, kernel, _ = make()
    inv = invocation(kernel, 1)
    with tb.policy_override(chain, allow_autotune=False):
        assert chain.choose(inv, kernel) == GUESS
        with tb.policy_override(chain, allow_autotune=True):
            assert chain.policy.allow_autotune
        assert not chain.policy.allow_autotune
    assert chain.choose(inv, kernel) == FAST


def test_a_policy_override_is_not_seen_by_another_thread_nor_selector():
    chain, kernel, _ = make()
    other, _, _ = make()
    with tb.policy_override(chain, allow_autotune=False), ThreadPoolExecutor(1) as pool:
        assert other.policy.allow_autotune
        assert pool.submit(lambda: chain.policy.allow_autotune).result()
        assert pool.submit(chain.choose, invocation(kernel, 1), kernel).result() == FAST


@pytest.mark.parametrize(
    ("updates", "says"),
    [({"alow_autotune": False}, "did you mean 'allow"), ({"cache_miss_fallback": "x"}, "one of")],
)
def test_a_wrong_policy_is_an_error_where_it_is_written(updates, says):
    chain, _, _ = make()
    with pytest.raises(tb.DefinitionError, match=says):
        tb.policy_override(chain, **updates)


@pytest.mark.filterwarnings("ignore:.*is not tuned")
def test_all_candidates_failing_gives_the_heuristic_and_persists_nothing(tmp_path):
    costs = {FAST: ValueError("no shared memory"), SLOW: MemoryError("too big"), GUESS: OSError("gone")}
    chain, kernel, events = make(costs=costs, path=tmp_path)
    assert chain.choose(invocation(kernel, 1), kernel) == GUESS
    assert names(events) == ["autotune_start", "autotune_finish", "heuristics"]
    assert events[1][1]["cfg"] is None
    assert chain.persistent.get(*kernel.problem(invocation(kernel, 1))) is None
    assert [record.head.decided for record in chain.persistent.store.items()] == [False]
    runs = len(kernel.runs)
    chain.choose(invocation(kernel, 1), kernel)
    assert len(kernel.runs) == runs, "a failure is remembered, not paid for at every call"


FAILING = {FAST: ValueError("no shared memory"), SLOW: RuntimeError("too big"), GUESS: OSError("gone")}


@pytest.mark.filterwarnings("ignore:.*is not tuned")
@pytest.mark.parametrize("book", ["book", "book.json"])
def test_another_process_does_not_repeat_a_failed_tuning_and_says_why(tmp_path, book):
    first, kernel, _ = make(costs=FAILING, path=tmp_path / book)
    first.choose(invocation(kernel, 1), kernel)
    second, again, events = make(costs=FAILING, path=tmp_path / book, policy=tb.AutotunePolicy(allow_heuristics=False))
    with pytest.raises(tb.NoConfig, match=r"failed before: all 3 candidates failed(\n.*)*no shared memory") as caught:
        second.choose(invocation(again, 1), again)
    assert isinstance(caught.value.__cause__, tb.TuningFailed)
    assert ("persistent", "no decision, because every candidate failed") in caught.value.tried
    assert (again.runs, names(events)) == ([], ["error"])
    with pytest.raises(tb.TuningFailed, match="all 3 candidates failed"):
        second.tune(invocation(again, 1), again)
    assert again.runs == []


@pytest.mark.filterwarnings("ignore:.*is not tuned")
def test_a_caller_that_waits_for_a_failing_tuning_does_not_repeat_it(tmp_path):
    first, kernel, _ = make(costs=FAILING, path=tmp_path)
    second, waiting, _ = make(costs=FAILING, path=tmp_path)
    begun, go_on = threading.Event(), threading.Event()

    class Held(dict):
        def __getitem__(self, config):
            begun.set()
            assert go_on.wait(HANG_S)
            return super().__getitem__(config)

    kernel.costs = Held(FAILING)
    with ThreadPoolExecutor(2) as pool:
        failing = pool.submit(first.choose, invocation(kernel, 1), kernel)
        assert begun.wait(HANG_S)
        waiter = pool.submit(second.choose, invocation(waiting, 1), waiting)
        go_on.set()
        assert (failing.result(), waiter.result()) == (GUESS, GUESS)
    assert waiting.runs == []


@pytest.mark.filterwarnings("ignore:.*is not tuned")
def test_only_a_new_candidate_is_tried_where_all_others_failed(tmp_path):
    first, kernel, _ = make(costs=FAILING, path=tmp_path)
    first.choose(invocation(kernel, 1), kernel)
    new = Tiles(8)
    second, again, _ = make(costs={**FAILING, new: 0.2}, path=tmp_path)
    assert second.choose(invocation(again, 1), again) == new
    assert set(again.runs) == {new}
    assert second.persistent.get(*again.problem(invocation(again, 1))) == new


@pytest.mark.filterwarnings("ignore:.*is not tuned")
def test_a_failure_that_has_expired_is_tried_again(tmp_path):
    first, kernel, _ = make(costs=FAILING, path=tmp_path)
    first.choose(invocation(kernel, 1), kernel)
    record = first.persistent.read(kernel.problem(invocation(kernel, 1)))
    old = [m._replace(failure=m.failure._replace(expires=1.0)) for m in record.body.measurements]
    first.persistent.write(record.replace(body=replace(record.body, measurements=tuple(old))))
    second, again, _ = make(path=tmp_path)
    assert second.choose(invocation(again, 1), again) == FAST


@pytest.mark.filterwarnings("ignore:.*is not tuned")
def test_failing_under_new_versions_leaves_the_decision_of_the_old_ones_in_the_book(tmp_path, monkeypatch):
    first, kernel, _ = make(path=tmp_path)
    problem = kernel.problem(invocation(kernel, 1))
    first.choose(invocation(kernel, 1), kernel)
    monkeypatch.setattr(PretendKernel, "environment", lambda *_: "updated")
    second, again, _ = make(costs=FAILING, path=tmp_path)
    assert second.choose(invocation(again, 1), again) == GUESS
    assert second.persistent.get(*problem) == FAST
    third, later, _ = make(costs=FAILING, path=tmp_path)
    assert third.choose(invocation(later, 1), later) == GUESS
    assert later.runs == []
    monkeypatch.undo()
    fourth, back, _ = make(path=tmp_path)
    assert fourth.choose(invocation(back, 1), back) == FAST
    assert back.runs == []


def test_a_heuristic_that_cannot_be_written_is_not_remembered_as_one_of_the_others(tmp_path):
    odd = object()
    chain, kernel, _ = make(costs={FAST: 0.1, SLOW: 0.5}, heuristic=odd, path=tmp_path)
    kernel.costs = {**kernel.costs, odd: OSError("gone")}
    kernel.candidate_cfgs = lambda _: [FAST, SLOW]
    assert chain.choose(invocation(kernel, 1), kernel) == FAST
    (record,) = chain.persistent.store.items()
    assert len(record.body.measurements) == 2


@pytest.mark.filterwarnings("ignore:.*is not tuned")
@pytest.mark.parametrize("cost", [0.1, OSError("gone")], ids=["works", "fails"])
@pytest.mark.filterwarnings("ignore:pretend@v0. tuned, but not written down")
def test_candidates_that_cannot_be_written_are_tuned_and_stay_in_memory(tmp_path, cost):
    chain, kernel, _ = make(costs={FAST: cost, object(): OSError("gone")}, heuristic=GUESS, path=tmp_path)
    kernel.costs = {**kernel.costs, GUESS: OSError("gone")}
    for _ in range(2):
        assert chain.choose(invocation(kernel, 1), kernel) == (FAST if cost == 0.1 else GUESS)
    assert list(chain.persistent.store.items()) == []


def test_all_candidates_failing_without_a_heuristic_names_each_failure():
    costs = {FAST: ValueError("no shared memory"), SLOW: MemoryError("too big")}
    chain, kernel, _ = make(costs=costs, heuristic=None)
    with pytest.raises(tb.NoConfig, match="no shared memory") as caught:
        chain.choose(invocation(kernel, 1), kernel)
    group = caught.value.__cause__
    assert isinstance(group, tb.TuningFailed)
    assert {type(error) for error in group.exceptions} == {ValueError, MemoryError}
    assert "Tiles(m=16" in str(caught.value)


@pytest.mark.promise("wrong-never-wins")
def test_one_failing_candidate_costs_itself_only():
    chain, kernel, _ = make(costs={FAST: RuntimeError("boom"), SLOW: 0.5, GUESS: 0.1})
    assert chain.choose(invocation(kernel, 1), kernel) == GUESS


def test_a_kernel_with_a_heuristic_alone_is_not_tuned_and_its_guess_is_not_written_down(tmp_path):
    class Guessing(PretendKernel):
        def candidate_cfgs(self, inv):
            return []

    kernel = Guessing(FakeClock(), COSTS, heuristic=GUESS)
    cache = tb.PersistentCache("pretend", tmp_path, cfg_type=Tiles)
    chain = tb.ConfigSelectorChain(tb.ConfigCache(), tuner=tb.Tuner(), persistent=cache)
    assert chain.choose(invocation(kernel, 1), kernel) == GUESS
    assert (kernel.runs, list(cache.store.items())) == ([], [])


def test_a_tuner_of_ones_own_needs_autotune_only(tmp_path):
    class First:
        def autotune(self, make_fn, args, kwargs, candidates):
            return next(iter(candidates))

    kernel = PretendKernel(FakeClock(), COSTS)
    cache = tb.PersistentCache("pretend", tmp_path, cfg_type=Tiles)
    chain = tb.ConfigSelectorChain(tb.ConfigCache(), tuner=First(), persistent=cache)
    assert chain.choose(invocation(kernel, 1), kernel) == SLOW
    assert cache.get(*kernel.problem(invocation(kernel, 1))) == SLOW


def test_threads_that_ask_for_one_key_tune_it_once():
    chain, kernel, events = make()
    barrier = threading.Barrier(16)

    def ask(_):
        barrier.wait()
        return chain.choose(invocation(kernel, 1), kernel)

    with ThreadPoolExecutor(16) as pool:
        assert set(pool.map(ask, range(16))) == {FAST}
    assert names(events).count("autotune_start") == names(events).count("autotune_finish") == 1
    assert names(events).count("cache_hit") == 15


def test_a_thread_may_take_the_heuristic_while_another_tunes():
    chain, kernel, _ = make(policy=tb.AutotunePolicy(while_tuning="heuristics"))
    tuning, asked = threading.Event(), threading.Event()
    spend = kernel.clock.spend

    def slow_spend(seconds):
        tuning.set()
        assert asked.wait(HANG_S)
        spend(seconds)

    kernel.clock.spend = slow_spend
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(chain.choose, invocation(kernel, 1), kernel)
        assert tuning.wait(HANG_S)
        assert chain.choose(invocation(kernel, 1), kernel) == GUESS
        asked.set()
        assert first.result() == FAST
    assert chain.choose(invocation(kernel, 1), kernel) == FAST


@pytest.mark.promise("late-writer-refused")
def test_a_holder_that_was_paused_past_its_lease_does_not_undo_its_successors_result(tmp_path):
    paused, kernel, _ = make(path=tmp_path)
    inv = invocation(kernel, 1)
    successor, other, _ = make(path=tmp_path, costs={SLOW: 0.001, FAST: 0.5})
    spend = kernel.clock.spend

    def pause_once(seconds):
        kernel.clock.spend = spend
        board = paused.persistent.leases()
        board.remove(f"{problem_id(kernel.problem(inv))}.1")  # as if the lease had lapsed
        assert successor.choose(invocation(other, 1), other) == SLOW
        record = successor.persistent.read(kernel.problem(inv))
        successor.persistent.write(record.replace(head=replace(record.head, generation=2)))
        spend(seconds)

    kernel.clock.spend = pause_once
    assert paused.choose(inv, kernel) == FAST
    assert paused.persistent.get(*kernel.problem(inv)) == SLOW


def test_two_versions_of_a_kernel_have_two_entries():
    clock = FakeClock()
    old = PretendKernel(clock, COSTS, version="1")
    new = PretendKernel(clock, {FAST: 0.5, SLOW: 0.001}, version="2")
    chain = tb.ConfigSelectorChain(tb.ConfigCache(), tuner=fake_tuner(clock))
    assert chain.choose(invocation(old, 1), old) == FAST
    assert chain.choose(invocation(new, 1), new) == SLOW


def test_code_edited_under_the_same_name_and_version_is_not_answered_from_memory():
    class Edited(PretendKernel):
        def run(self, *args, cfg, **kwargs):
            return super().run(*args, cfg=cfg, **kwargs), "edited"

    clock = FakeClock()
    chain = tb.ConfigSelectorChain(tb.ConfigCache(), tuner=fake_tuner(clock))
    before = PretendKernel(clock, COSTS)
    after = Edited(clock, {FAST: 0.5, SLOW: 0.001})
    assert chain.choose(invocation(before, 1), before) == FAST
    assert chain.choose(invocation(after, 1), after) == SLOW


@pytest.mark.parametrize("backward", [False, True])
def test_forward_autotune_only_leaves_the_backward_pass_out(backward):
    class WithGradient(PretendKernel):
        def fwd_with_residuals(self, *args, cfg, **kwargs):
            self.clock.spend(0.001)
            return cfg, None

        def vjp(self, residuals, dy, *args, cfg, **kwargs):
            self.clock.spend({FAST: 1.0, SLOW: 0.001}[cfg])  # the other way round than forward
            return (dy,)

    clock = FakeClock()
    kernel = WithGradient(clock, {FAST: 0.001, SLOW: 0.5})
    chain = tb.ConfigSelectorChain(tb.ConfigCache(), tb.AutotunePolicy(validate_backward=True), tuner=fake_tuner(clock))
    if backward:
        assert chain.choose(invocation(kernel, 1), kernel) == SLOW
    else:
        with tb.forward_autotune_only():
            assert chain.choose(invocation(kernel, 1), kernel) == FAST
