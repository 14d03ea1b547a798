"""Launches that are tuned while the program runs, on a GPU that does not exist; compilation for sm_90 is real."""

# ruff: noqa: N803 - constexprs are written in capitals in Triton

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
from limits import HANG_S

triton = pytest.importorskip("triton", reason="triton is not installed")
torch = pytest.importorskip("torch", reason="torch is not installed")

import triton.language as tl  # noqa: E402 - after the check that it is there
from fake_gpu import FakeGpu, installed  # noqa: E402 - as above
from triton import knobs  # noqa: E402 - as above
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402 - as above

import tunebook as tb  # noqa: E402 - as above
from tunebook._base.record_format import Record, merge  # noqa: E402 - as above
from tunebook._cli import main  # noqa: E402 - as above
from tunebook._selection.listeners import EVERYWHERE  # noqa: E402 - as above
from tunebook._tuning import host_share, live_session  # noqa: E402 - as above
from tunebook.adapters._triton import compile_beside, live, memory_only  # noqa: E402 - as above
from tunebook.adapters.triton import autotune  # noqa: E402 - as above

pytestmark = pytest.mark.usefixtures("compiled_once")
LIVE = tb.AutotunePolicy(cache_miss_fallback="incremental")


@triton.jit
def add(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    tl.store(out_ptr + at, tl.load(x_ptr + at, inside) + tl.load(y_ptr + at, inside), inside)


@triton.jit
def count(x_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + at, tl.load(x_ptr + at, at < n) + 1, at < n)


@triton.jit
def described(x, n, BLOCK: tl.constexpr):
    x.store([0, 0], x.load([0, 0]) * BLOCK)


def blocks(*sizes, **options):
    return [triton.Config({"BLOCK": size}, num_warps=4, **options) for size in sizes]


CONFIGS = blocks(64, 128, 256, 512)
COST = {64: 40e-6, 128: 20e-6, 256: 10e-6, 512: 30e-6}
# The host works for nothing: how long it takes here says nothing.
FREELY = host_share.HostShare(1e9)


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(live_session, "HOST", FREELY)
    monkeypatch.setattr(live, "HOST", FREELY)
    with installed(FakeGpu(lambda facts: COST[facts["BLOCK"]]), add, count, described) as fake:
        fake.behind = 2
        yield fake
        tb.wait_for_background(HANG_S)  # what the test left running needs the driver too


def grid(meta):
    return (triton.cdiv(meta["n"], meta["BLOCK"]),)


def tensors(n=1024):
    return torch.ones(n), torch.ones(n), torch.zeros(n), n


def live_kernel(function=add, configs=CONFIGS, **options):
    return autotune(configs, key=["n"], policy=LIVE, **{"processes": False, **options})(function)


def raise_next(errors):
    raise next(errors)


def launched(gpu):
    return [facts["BLOCK"] for facts in gpu.launches]


def call_until_decided(kernel, *arguments, most=2000):
    for _ in range(most):
        kernel[grid](*arguments)
        tb.wait_for_background(HANG_S)
        if any(found for *_, found in [(s, s.is_finished) for s in sessions(kernel)]):
            return
    raise AssertionError("\n".join(map(str, kernel.selector.pending)))


def sessions(kernel):
    return [*kernel.selector.pending, *(session for session, _ in kernel.selector._parts.watched.values())]


# ----------------------------------------------------------------------------------------------------------- converging


def test_the_first_launch_runs_at_once_with_the_first_candidate(gpu):
    live_kernel()[grid](*tensors())
    assert launched(gpu) == [64]


def test_the_first_launch_runs_with_the_heuristic_if_there_is_one(gpu):
    live_kernel(heuristic=CONFIGS[3])[grid](*tensors())
    assert launched(gpu) == [512]


def test_the_first_launch_runs_with_the_best_of_the_nearest_sizes(gpu):
    autotune(CONFIGS, key=["n"])(add).tune(*tensors(2048), grid=grid)
    gpu.launches.clear()
    live_kernel()[grid](*tensors(1024))
    assert launched(gpu) == [256]


def test_launches_converge_to_the_fastest_and_none_waits_for_the_device(gpu):
    kernel = live_kernel()
    call_until_decided(kernel, *tensors())
    assert gpu.waits == gpu.flushes == 0
    gpu.launches.clear()
    for _ in range(50):
        kernel[grid](*tensors())
    assert set(launched(gpu)) == {256}
    assert kernel.best_config.kwargs == {"BLOCK": 256}


def test_each_call_launches_once_so_kernels_that_accumulate_are_safe(gpu):
    gpu.effect = lambda _facts, arguments: arguments["x_ptr"].add_(1)
    kernel, x = live_kernel(count), torch.zeros(1024)
    for calls in range(1, 200):
        kernel[grid](x, 1024)
        assert float(x[0]) == calls


def test_a_tensor_descriptor_whose_shape_is_a_list_is_tuned_too(gpu):
    kernel = live_kernel(described)
    call_until_decided(kernel, TensorDescriptor(torch.zeros(64, 64), [64, 64], [64, 1], [32, 32]), 64)
    assert kernel.best_config.kwargs == {"BLOCK": 256}


@pytest.mark.promise("live-limit")
def test_any_window_of_launches_keeps_to_the_limit(gpu):
    kernel = live_kernel(heuristic=CONFIGS[2])  # it is the best already: nothing is saved
    for _ in range(3000):
        kernel[grid](*tensors())
    extra = [COST[block] / COST[256] - 1 for block in launched(gpu)]
    assert max(sum(extra[start : start + 2000]) for start in range(1000)) <= 0.02 * 2000
    assert {64, 128, 512} <= set(launched(gpu))


def test_another_process_finds_the_choice_in_the_book(gpu):
    call_until_decided(live_kernel(), *tensors())
    tb.wait_for_background()
    gpu.launches.clear()
    fresh = live_kernel()
    for _ in range(20):
        fresh[grid](*tensors())
    assert set(launched(gpu)) == {256}
    assert sessions(fresh) == []
    assert "/live/forward" in str(fresh.explain(*tensors(), grid=grid))


def test_a_candidate_that_cannot_be_launched_costs_nothing(gpu):
    gpu.cost = lambda facts: RuntimeError("out of resources") if facts["BLOCK"] == 512 else COST[facts["BLOCK"]]
    kernel = live_kernel()
    call_until_decided(kernel, *tensors())
    assert launched(gpu).count(512) == 1
    assert "out of resources" in str(kernel.explain(*tensors(), grid=grid))


def test_an_error_of_the_call_itself_is_raised(gpu):
    kernel = live_kernel()
    kernel[grid](*tensors())
    gpu.cost = lambda _facts: RuntimeError("the call is at fault")
    with pytest.raises(RuntimeError, match="the call is at fault"):
        kernel[grid](*tensors())


def test_two_gpus_of_one_model_share_a_session_which_tries_candidates_on_the_first(gpu):
    gpu.names = ("Fake GPU", "Fake GPU")
    kernel = live_kernel()
    for call in range(800):
        gpu.set_current_device(call % 2)
        kernel[grid](*tensors())
        tb.wait_for_background(HANG_S)
    (session,) = sessions(kernel)
    assert session.is_finished
    assert kernel.best_config.kwargs == {"BLOCK": 256}
    assert {facts["BLOCK"] for facts in gpu.launches if facts["device"] == 0} == set(COST)


def test_a_candidate_whose_first_launch_is_interrupted_by_ctrl_c_is_tried_again(gpu):
    kernel, errors = live_kernel(), iter([KeyboardInterrupt])
    kernel[grid](*tensors())
    gpu.cost = lambda facts: raise_next(errors) if facts["BLOCK"] == 256 else COST[facts["BLOCK"]]
    with pytest.raises(KeyboardInterrupt):
        call_until_decided(kernel, *tensors())
    gpu.cost = lambda facts: COST[facts["BLOCK"]]
    call_until_decided(kernel, *tensors())
    assert kernel.best_config.kwargs == {"BLOCK": 256}


def test_a_candidate_whose_first_launch_fails_as_the_leaders_does_is_tried_again(gpu):
    kernel, errors = live_kernel(), iter([ValueError("cpu tensor?"), ValueError("cpu tensor?")])
    kernel[grid](*tensors())
    gpu.cost = lambda facts: raise_next(errors) if 256 in launched(gpu) else COST[facts["BLOCK"]]
    with pytest.raises(ValueError, match="cpu tensor"):
        call_until_decided(kernel, *tensors())
    gpu.cost = lambda facts: COST[facts["BLOCK"]]
    call_until_decided(kernel, *tensors())
    assert kernel.best_config.kwargs == {"BLOCK": 256}


def test_the_tensors_of_a_call_are_not_kept(gpu):
    kernel, x = live_kernel(), torch.ones(1024)
    kernel[grid](x, x, x, 1024)
    gone = weakref.ref(x)
    del x
    kernel[grid](*tensors())
    gc.collect()
    assert gone() is None


# -------------------------------------------------------------------------------------------------- capture and pauses


def test_nothing_is_tried_while_a_graph_is_captured(gpu):
    kernel = live_kernel()
    kernel[grid](*tensors())
    gpu.capturing = True
    gpu.launches.clear()
    for _ in range(100):
        kernel[grid](*tensors())
    assert set(launched(gpu)) == {64}
    gpu.capturing = False
    call_until_decided(kernel, *tensors())


def test_nothing_is_tried_or_loaded_while_tuning_is_paused(gpu):
    kernel = live_kernel()
    kernel[grid](*tensors())
    gpu.launches.clear()
    with tb.pause_tuning():
        for _ in range(100):
            kernel[grid](*tensors())
    assert set(launched(gpu)) == {64}
    assert next(iter(add.device_caches.values()))[0].__len__() == 1, "one program is loaded"
    call_until_decided(kernel, *tensors())


@pytest.fixture
def watched(gpu):
    """Return a kernel whose winner is watched, while the device has not passed the event of a launch."""
    kernel = live_kernel()
    call_until_decided(kernel, *tensors())
    (session,) = sessions(kernel)
    while session._look is None:
        kernel[grid](*tensors())
        tb.wait_for_background(HANG_S)
    return kernel


def test_no_event_is_asked_for_while_a_graph_is_captured(gpu, watched):
    gpu.capturing = True  # the fake raises the error that ends a capture
    for _ in range(100):
        watched[grid](*tensors())
    gpu.capturing = False
    asked = gpu.queries
    for _ in range(100):
        watched[grid](*tensors())
    assert gpu.queries > asked


def test_no_event_is_asked_for_while_tuning_is_paused(gpu, watched):
    asked = gpu.queries
    with tb.pause_tuning():  # another thread captures a graph, say, and forbids it to all threads
        for _ in range(100):
            watched[grid](*tensors())
        assert gpu.queries == asked


# ----------------------------------------------------------------------------------------------------------- the book


def test_an_offline_tuning_outranks_a_live_one(gpu):
    call_until_decided(live_kernel(), *tensors())
    tb.wait_for_background()
    gpu.cost = lambda facts: {**COST, 128: 5e-6}[facts["BLOCK"]]
    offline = autotune(CONFIGS, key=["n"])(add)
    offline.tune(*tensors(), grid=grid)
    kernel = live_kernel()
    kernel[grid](*tensors())
    assert kernel.best_config.kwargs == {"BLOCK": 128}


def test_a_live_tuning_does_not_replace_an_offline_one_of_meanwhile(gpu):
    kernel = live_kernel()
    kernel[grid](*tensors())
    gpu.cost = lambda facts: {**COST, 128: 5e-6}[facts["BLOCK"]]
    autotune(CONFIGS, key=["n"])(add).tune(*tensors(), grid=grid)
    gpu.cost = lambda facts: COST[facts["BLOCK"]]
    for _ in range(300):
        kernel[grid](*tensors())
        tb.wait_for_background()
    gpu.launches.clear()
    kernel[grid](*tensors())
    assert launched(gpu) == [128]


def test_a_merge_prefers_the_offline_tuning_of_two_equal_generations(gpu):
    kernel = live_kernel()
    call_until_decided(kernel, *tensors())
    tb.wait_for_background()
    problem = kernel.kernel.problem(kernel.kernel.invocation(live.Launch(grid, tensors(), {})))
    found = kernel.selector.persistent.read(problem)
    assert found.body.provenance["live"] is True
    raced = {**found.body.provenance, "when": 0.0}
    del raced["live"]
    offline = Record(found.head, replace(found.body, provenance=raced))
    assert merge(found, offline).body.provenance == merge(offline, found).body.provenance == raced


def test_candidates_that_were_not_tried_stand_in_the_book_and_a_tuning_ahead_tries_them(gpu):
    def cost(facts):
        return 1e-5 * (1 + abs(facts["BLOCK"].bit_length() - 9)) * (1 + abs(facts["num_warps"].bit_length() - 3))

    gpu.cost = cost
    configs = [
        triton.Config({"BLOCK": block}, num_warps=warps) for block in (32, 64, 128, 256, 512) for warps in (1, 2, 4, 8)
    ]
    kernel = live_kernel(configs=configs)
    call_until_decided(kernel, *tensors())
    tb.wait_for_background(HANG_S)
    assert kernel.best_config.all_kwargs() == {**kernel.best_config.all_kwargs(), "BLOCK": 256, "num_warps": 4}
    problem = kernel.kernel.problem(kernel.kernel.invocation(live.Launch(grid, tensors(), {})))
    not_tried = kernel.selector.persistent.read(problem).body.provenance["not_tried"]
    assert 0 < len(not_tried) == len(configs) - len(next(iter(add.device_caches.values()))[0])
    assert f"{len(not_tried)} that the times of others called slower" in str(kernel.explain(*tensors(), grid=grid))
    ahead = autotune(configs, key=["n"], processes=False)(add)
    assert ahead.tune(*tensors(), grid=grid).ran == len(configs)
    assert "not tried" not in str(ahead.explain(*tensors(), grid=grid))


# ------------------------------------------------------------------------------------------------------------- watching


@pytest.mark.promise("live-rollback")
def test_a_winner_that_becomes_slower_is_rolled_back_with_an_event_within_50_launches(gpu):
    told = []
    kernel = live_kernel(on_event=lambda event, **data: told.append((event, data)))
    call_until_decided(kernel, *tensors())
    tb.wait_for_background()
    for _ in range(40):
        kernel[grid](*tensors())
    gpu.cost = lambda facts: {**COST, 256: 100e-6}[facts["BLOCK"]]
    for _ in range(50):
        kernel[grid](*tensors())
    (data,) = [data for event, data in told if event == "rolled_back"]
    assert (data["beaten"].config, data["cfg"].config) == (CONFIGS[2], CONFIGS[1])
    gpu.launches.clear()
    for _ in range(1000):
        kernel[grid](*tensors())
    assert launched(gpu).count(128) > 800


def test_events_are_recorded_on_the_stream_of_the_launch_and_torch_is_asked_for_it_once(gpu):
    kernel = live_kernel()
    gpu.stream_handle = 7
    call_until_decided(kernel, *tensors())
    recorded, gpu.streams_asked = gpu.records, 0
    gpu.stream_handle = 8  # the program launches on another stream; the fake refuses events on a former one
    for _ in range(23 * 20):
        kernel[grid](*tensors())
    assert gpu.records > recorded
    assert gpu.streams_asked <= 1


def test_nothing_is_rolled_back_when_the_whole_device_slows_down(gpu):
    told = []
    kernel = live_kernel(on_event=lambda event, **_data: told.append(event))
    call_until_decided(kernel, *tensors())
    gpu.cost = lambda facts: 3 * COST[facts["BLOCK"]]
    for _ in range(500):
        kernel[grid](*tensors())
    assert "rolled_back" not in told
    assert kernel.best_config.kwargs == {"BLOCK": 256}


def test_after_the_decision_a_launch_does_nothing_but_launch_except_for_two_of_23(gpu, monkeypatch):
    kernel = live_kernel()
    call_until_decided(kernel, *tensors())
    tb.wait_for_background(HANG_S)
    for _ in range(50):
        kernel[grid](*tensors())
    (session,) = sessions(kernel)
    asked, ask = [], session.run
    monkeypatch.setattr(live_session.LiveSession, "run", lambda _self, *call: asked.append(1) or ask(*call))
    threads, count, recorded = threading.active_count(), session.race.account.calls, gpu.records
    for _ in range(23 * 20):
        kernel[grid](*tensors())
    assert 2 * 19 <= len(asked) <= 2 * 21
    assert 2 * 19 <= gpu.records - recorded <= 2 * 21
    assert session.race.account.calls == count  # counted when somebody asks
    assert threading.active_count() <= threads
    assert count + 23 * 19 <= int(str(session).partition("; ")[2].split()[0]) <= count + 23 * 22


def test_memory_is_asked_for_programs_again_only_after_a_load():
    asked, loads, in_memory = [], [0], {}
    configs = dict(zip("abc", CONFIGS, strict=False))

    def recall(config, _call):
        asked.append(config)
        return in_memory.get(config)

    beside = compile_beside.CompileBeside(lambda *_: None, configs, FREELY, recall, lambda: loads[0])
    for _ in range(20):
        assert beside.poll((), may_fork=False) == []
    assert asked == CONFIGS[:1]
    loads[0], in_memory[CONFIGS[0]] = 1, b"program"
    assert [build.name for build in beside.poll((), may_fork=False)] == ["a"]
    for _ in range(20):
        assert beside.poll((), may_fork=False) == []
    assert asked[1:] == [CONFIGS[0], CONFIGS[1], CONFIGS[1]]


def test_a_grid_that_refuses_a_candidate_whose_program_is_in_memory_fails_no_call(gpu, monkeypatch):
    call_until_decided(live_kernel(store=False), *tensors())
    gpu.launches.clear()
    monkeypatch.setattr(live, "may_fork_beside", lambda: True)
    kernel = live_kernel(processes=True, store=False)

    def strict(meta):
        assert meta["BLOCK"] == 64, "these sizes take one block"
        return (1,)

    while not any(session.is_finished for session in sessions(kernel)):
        kernel[strict](*tensors())
        tb.wait_for_background(HANG_S)
    assert set(launched(gpu)) == {64}
    assert "these sizes take one block" in str(kernel.explain(*tensors(), grid=strict))


@pytest.mark.filterwarnings("ignore:.*os.fork")  # the child does not use jax, which other tests have loaded
def test_a_forked_child_goes_on_with_the_winner_and_without_the_parents_events(gpu):
    kernel = live_kernel()
    call_until_decided(kernel, *tensors())
    tb.wait_for_background(HANG_S)
    (session,) = sessions(kernel)
    for _ in range(50):
        kernel[grid](*tensors())
        if session._look is not None:
            break
    session._turn.acquire()  # a thread of the parent has the turn
    child = os.fork()
    if child == 0:
        left = session._look is None and session._turn.acquire(blocking=False)
        os._exit(0 if left else 1)
    session._turn.release()
    assert os.waitpid(child, 0)[1] == 0
    assert session._look is not None


# ---------------------------------------------------------------------------------------------------------------- forks


@pytest.mark.timeout(300)
def test_candidates_are_compiled_in_forks_beside_the_program(gpu, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compile_beside, "may_fork_beside", lambda: True)
    monkeypatch.setattr(live, "may_fork_beside", lambda: True)
    builds = []
    take = compile_beside.CompileBeside._take
    monkeypatch.setattr(compile_beside.CompileBeside, "_take", lambda *given: builds.append(take(*given)) or builds[-1])
    kernel = live_kernel(processes=True)
    call_until_decided(kernel, *tensors(), most=10**6)
    assert len(builds) == 3
    assert all(build.failure is None and build.product is not None for build in builds)
    assert kernel.best_config.kwargs == {"BLOCK": 256}


@pytest.fixture
def compilers(gpu):
    """Return `beside(compile_one)`, the compilers of one candidate, and a list: the time, which moves only by hand."""
    now_s, made = [time.monotonic() + 1e3], []  # forks of other tests wait in vain
    host = host_share.HostShare(1e9, lambda: 0.0)  # forks of a big process may take long

    def beside(compile_one):
        configs = {"a": CONFIGS[0]}
        made.append(compile_beside.CompileBeside(compile_one, configs, host, clock_s=lambda: now_s[0]))
        return made[-1]

    yield beside, now_s
    for each in made:
        each.close()


def polled(beside):
    """Return the first compilation that has ended."""
    while not (found := beside.poll(())):
        time.sleep(0.001)
    return found[0]


def test_a_fork_whose_session_asks_no_more_makes_room_for_others(compilers):
    new, now_s = compilers
    gone = []
    while not gone or gone[-1].forks:
        gone.append(new(lambda *_: b"program"))
        gone[-1].poll(())
    later = gone.pop()
    assert all(worker.has_answered(HANG_S) for each in gone for worker in each._busy)
    later.poll(())
    assert later.forks == 0
    now_s[0] += 11
    later.poll(())
    assert later.forks == 1
    assert polled(later) == polled(gone[0]), "a session that asks again gets another fork"


def test_a_candidate_whose_compiler_was_not_done_in_time_is_compiled_by_another_fork(compilers, tmp_path):
    new, now_s = compilers
    may_end = tmp_path / "may end"

    def compile_one(*_):
        while not may_end.exists():
            time.sleep(0.01)
        return b"program"

    beside = new(compile_one)
    for forks, seconds in enumerate([301, 601], 1):
        assert beside.poll(()) == []
        assert beside.forks == forks
        now_s[0] += seconds
    assert beside.poll(()) == []
    may_end.touch()
    build = polled(beside)
    assert build.product is not None
    assert (beside.forks, build.failure, build.left_out) == (3, None, "")


def test_a_candidate_whose_compilers_are_never_done_in_time_is_left_out_and_has_not_failed(compilers):
    new, now_s = compilers
    beside = new(lambda *_: time.sleep(HANG_S))
    for seconds in (301, 601, 1201):
        assert beside.poll(()) == []
        now_s[0] += seconds
    (build,) = beside.poll(())
    assert build.failure is None
    assert "not done in time, 3 times" in build.left_out


@pytest.mark.timeout(300)
def test_candidates_are_compiled_for_launches_of_threads_that_end(gpu, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(live, "may_fork_beside", lambda: True)
    kernel = live_kernel(processes=True)
    while not any(session.is_finished for session in sessions(kernel)):
        thread = threading.Thread(target=lambda: kernel[grid](*tensors()))
        thread.start()
        thread.join()
        tb.wait_for_background(HANG_S)
    assert kernel.best_config.kwargs == {"BLOCK": 256}
    assert "killed" not in str(kernel.explain(*tensors(), grid=grid))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("offset_of", [lambda call: call % 2, lambda call: call > 100], ids=["in turn", "from now on"])
def test_no_call_compiles_a_candidate_though_tensors_begin_elsewhere(gpu, monkeypatch, tmp_path, offset_of):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(live, "may_fork_beside", lambda: True)
    monkeypatch.setattr(live, "HOST", host_share.HostShare(1e9, lambda: 0.0))  # forks of a big process may take long
    kernel = live_kernel(processes=True, heuristic=CONFIGS[2])  # the best serves from the start
    compiled, x, call = [], torch.zeros(1025), 0
    monkeypatch.setattr(knobs.compilation, "listener", lambda **told: told["cache_hit"] or compiled.append(call))
    while not any(session.is_finished for session in sessions(kernel)):
        at = int(offset_of(call))
        kernel[grid](x[at : at + 1024], x[at : at + 1024], x[at : at + 1024], 1024)
        tb.wait_for_background(HANG_S)
        call += 1
    assert {facts["BLOCK"] for facts in gpu.launches} == set(COST)
    assert compiled == [0, next(each for each in range(call) if offset_of(each))]


@pytest.mark.timeout(300)
def test_sizes_of_the_same_kind_share_compiled_programs_and_need_no_forks(gpu, monkeypatch):
    monkeypatch.setattr(live, "may_fork_beside", lambda: True)
    kernel = live_kernel(processes=True)
    call_until_decided(kernel, *tensors(1024), most=10**6)
    programs = next(iter(add.device_caches.values()))[0]
    loaded, forks = len(programs), []
    monkeypatch.setattr(compile_beside.CompileBeside, "_fork", lambda *given: forks.append(given))
    for _ in range(300):
        kernel[grid](*tensors(2048))
    assert len(programs) == loaded == len(CONFIGS)
    assert forks == []
    for _ in range(20):
        kernel[grid](*tensors(2049))  # not divisible by 16: other programs
    assert forks


def test_triton_is_asked_for_programs_in_memory_alone_and_other_threads_are_left_alone(gpu):
    others, theirs = [], lambda **_facts: others.append(1)
    before, triton.knobs.runtime.jit_cache_hook = triton.knobs.runtime.jit_cache_hook, theirs
    try:
        with memory_only.compiling_nothing():
            assert add.warmup(*tensors(), grid=grid, BLOCK=64) is None
            thread = threading.Thread(target=lambda: add.warmup(*tensors(), grid=grid, BLOCK=128))
            thread.start()
            thread.join()
            assert add.warmup(*tensors(), grid=grid, BLOCK=128) is not None
        assert triton.knobs.runtime.jit_cache_hook is theirs
    finally:
        triton.knobs.runtime.jit_cache_hook = before
    assert others == [1]


def test_progress_and_cost_stand_in_the_explanation(gpu):
    kernel = live_kernel()
    for _ in range(20):
        kernel[grid](*tensors())
    text = str(kernel.explain(*tensors(), grid=grid))
    assert "trying one candidate per call" in text
    assert "calls took" in text
    assert EVERYWHERE.listeners == []


# ----------------------------------------------------------------------------------------------------------- background


def test_the_background_tunes_on_made_up_tensors_and_leaves_the_callers_alone(gpu):
    gpu.effect = lambda _facts, arguments: arguments["x_ptr"].add_(1)
    policy = tb.AutotunePolicy(cache_miss_fallback="background")
    kernel, x = autotune(CONFIGS, key=["n"], policy=policy, processes=False)(count), torch.zeros(1024)
    kernel[grid](x, 1024)
    assert tb.wait_for_background(HANG_S)
    assert float(x[0]) == 1
    kernel[grid](x, 1024)
    assert float(x[0]) == 2
    assert launched(gpu)[0] == 64
    assert launched(gpu)[-1] == 256
    assert "/values=" in str(kernel.explain(x, 1024, grid=grid))


def test_the_background_takes_no_more_than_a_quarter_of_the_free_memory(gpu):
    gpu.mem_get_info = lambda: (4096 * 4 - 1, 1 << 40)
    policy = tb.AutotunePolicy(cache_miss_fallback="background")
    kernel = autotune(CONFIGS, key=["n"], policy=policy, processes=False)(count)

    def call_and_wait():
        kernel[grid](torch.zeros(1024), 1024)
        assert tb.wait_for_background(HANG_S)

    with pytest.warns(tb.TunebookWarning, match="more than a quarter of the .* use cache_miss_fallback='incremental'"):
        call_and_wait()
    kernel[grid](torch.zeros(1024), 1024)
    assert launched(gpu) == [64, 64]


# ---------------------------------------------------------------------------------------------------------- watching it


def test_metrics_count_live_calls_their_cost_and_rollbacks(gpu):
    tb.metrics.reset()
    tb.metrics.on()
    try:
        kernel = live_kernel()
        call_until_decided(kernel, *tensors())
        gpu.cost = lambda facts: {**COST, 256: 100e-6}[facts["BLOCK"]]
        for _ in range(3200):  # calls are told after each 1,024, and a thread decides when these begin
            kernel[grid](*tensors())
        counts = tb.metrics.counts()
    finally:
        tb.metrics.off()
        tb.metrics.reset()
    by = (kernel.kernel.op_id_v, "gpu:Fake GPU")
    assert counts["tunebook_live_calls"][by] > 1000
    assert counts["tunebook_live_extra_seconds"][by] != 0
    assert counts["tunebook_rollbacks"][by] == 1


def test_the_explanation_of_a_winner_says_that_it_is_watched(gpu):
    kernel = live_kernel()
    call_until_decided(kernel, *tensors())
    tb.wait_for_background()
    text = str(kernel.explain(*tensors(), grid=grid))
    assert "watching the winner, which was found after" in text


# --------------------------------------------------------------------------------------------------------- tunebook run

PROGRAM = """
import time
import recorded_triton_gpu  # a GPU on which fewer warps are faster
import torch, triton, triton.language as tl
from triton.runtime import driver

gpu = driver.active
gpu.behind = 2

@triton.autotune([triton.Config({"BLOCK": 128}, num_warps=warps) for warps in (8, 4, 2, 1)], key=["n"])
@triton.jit
def twice(x_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + at, tl.load(x_ptr + at, at < n) * 2, at < n)

x, began_s = torch.zeros(256), time.monotonic()
while time.monotonic() - began_s < 120 and [f["num_warps"] for f in gpu.launches[-300:]] != [1] * 300:
    twice[(2,)](x, 256)
print(gpu.launches[0]["num_warps"], gpu.launches[-1]["num_warps"], gpu.waits)
"""


@pytest.mark.timeout(300)
def test_a_program_that_nobody_edited_is_tuned_while_it_runs(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "tunebook", "run", "--live", "--book", str(tmp_path / "book"), "--"]
    places = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*command, sys.executable, str(tmp_path / "program.py")],
        env={**os.environ, "PYTHONPATH": places},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == ["8", "1", "0"], done.stderr
    assert "1 kernel ran on tunebook" in done.stderr


def test_a_budget_and_live_tuning_exclude_each_other(capsys):
    assert main(["run", "--live", "--budget", "10m", "--", "true"]) == 2
    assert "--live takes no --budget" in capsys.readouterr().err
