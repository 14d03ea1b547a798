"""Recordings: every call is seen, nothing large is kept, and what was seen can be tuned later."""

from __future__ import annotations

import enum
import gc
import json
import subprocess
import sys
import textwrap
import threading
import weakref
from dataclasses import dataclass

import numpy as np
import pytest
from kernels import FakeClock, PretendKernel, Tiles, fake_tuner

import tunebook as tb
from tunebook._arrays.made_up import materialise


def make(**options):
    clock = FakeClock()
    runs = []

    @tb.tunable(space=tb.Space(block=[1, 2]), tuner=fake_tuner(clock), name="recorded", store=False, **options)
    def kernel(x, flag=False, *, config):
        runs.append(config.block)
        clock.spend(config.block)
        return x

    return kernel, runs


def test_a_recording_sees_every_call_and_tunes_nothing():
    kernel, runs = make(heuristic={"block": 2})
    with tb.record() as calls:
        for n in (8, 8, 4):
            kernel(np.ones(n))
    assert runs == [2, 2, 2]
    assert sorted(call.count for call in calls) == [1, 2]
    assert all(call.seconds > 0 for call in calls)


def fill_with_sevens(x, *, config=None, cfg=None):
    x.fill(7)


class FillWithSevens(tb.Kernel):
    def run(self, x, *, cfg):
        fill_with_sevens(x)

    def candidate_cfgs(self, inv):
        return [1]

    def heuristic_cfg(self, inv):
        return 1


@pytest.mark.parametrize("call", [
    tb.tunable(space=[1, 2], name="sevens", store=False)(fill_with_sevens),
    lambda x: tb.Executor(tb.ConfigSelectorChain(tb.ConfigCache()))(FillWithSevens("sevens"), x),
])  # fmt: skip
def test_integers_are_recorded_before_the_call_changes_them(call):
    with tb.record() as calls:
        call(np.arange(5))
    (recorded,) = calls
    assert materialise(recorded.args[0]).tolist() == [0, 1, 2, 3, 4]


def test_without_a_heuristic_the_first_candidate_keeps_the_program_running():
    kernel, runs = make()
    with tb.record():
        kernel(np.ones(8))
    assert runs == [1]


def test_hot_calls_are_recorded_too_and_are_hot_again_afterwards():
    kernel, runs = make()
    for _ in range(5):
        kernel(np.ones(8))
    with tb.record() as calls:
        kernel(np.ones(8))
        kernel(np.ones(8), config=tb.Config(block=7))
    assert [call.count for call in calls] == [2]
    assert runs[-1] == 7
    kernel(np.ones(8))
    assert len(calls) == 1


def test_calls_of_other_threads_are_recorded():
    kernel, _ = make()
    with tb.record() as calls:
        thread = threading.Thread(target=kernel, args=(np.ones(8),))
        thread.start()
        thread.join()
    assert len(calls) == 1


def test_nothing_is_pinned_in_memory():
    kernel, _ = make()

    class Array(np.ndarray):
        pass

    with tb.record() as calls:
        x = np.ones(1000).view(Array)
        kernel(x, flag=[x, {"deep": (x,)}])
        gone = weakref.ref(x)
        del x
        gc.collect()
        assert gone() is None
    assert next(iter(calls)).args[0].shape == (1000,)


def test_a_recording_is_bounded():
    kernel, _ = make()
    with tb.record(capacity=3) as calls:
        for n in range(10):
            kernel(np.ones(n))
    assert (len(calls), calls.dropped) == (3, 7)
    with pytest.raises(tb.DefinitionError, match="capacity=0"), tb.record(capacity=0):
        pass


def test_tune_all_takes_the_path_of_a_saved_recording(tmp_path):
    kernel, _ = make(heuristic={"block": 2})
    with tb.record() as calls:
        kernel(np.ones(8))
    calls.save(tmp_path / "calls.json")
    assert [outcome.call.problem for outcome in tb.tune_all(tmp_path / "calls.json")] == [kernel.problem(np.ones(8))]
    assert len(tb.tune_all(str(tmp_path / "calls.json"))) == 1
    with pytest.raises(OSError, match=r"missing\.json"):
        tb.tune_all("missing.json")


def test_tune_all_tunes_unknown_problems_and_the_program_then_uses_the_results():
    kernel, runs = make(heuristic={"block": 2})
    kernel(np.ones(4))
    with tb.record() as calls:
        kernel(np.ones(8))
        kernel(np.ones(4))
    outcomes = {outcome.call.args[0].shape: outcome.status for outcome in tb.tune_all(calls)}
    assert outcomes == {(8,): "tuned", (4,): "known"}
    runs.clear()
    kernel(np.ones(8))
    assert runs == [1]
    assert {outcome.status for outcome in tb.tune_all(calls)} == {"known"}


@dataclass
class Batch:
    x: object
    scale: float = 2.0


def test_an_array_in_a_dataclass_is_recorded_as_its_spec_and_made_up_for_tuning():
    kernel, runs = make(heuristic={"block": 2})
    data = np.ones(8)
    with tb.record() as calls:
        kernel(Batch([data]))
    (call,) = calls
    assert call.args[0] == Batch([tb.ArraySpec("numpy", "float64", (8,), "C", "cpu")])
    assert [result.status for result in tb.tune_all(calls)] == ["tuned"]
    kernel(Batch([data]))
    assert runs[-1] == 1


def test_a_spent_budget_skips_the_rest_and_says_so():
    kernel, _ = make()
    with tb.record() as calls:
        for n in range(1, 5):
            kernel(np.ones(n))
    outcomes = tb.tune_all(calls, budget=5.0)
    assert outcomes[0].status == "tuned"
    assert [o.detail for o in outcomes if o.status == "skipped"][-1] == "the budget is spent"


def test_one_failing_kernel_does_not_stop_the_others():
    @tb.tunable(space=[{"b": 1}], name="breaks", store=False)
    def breaks(x, *, config):
        if calls_are_over:
            raise ValueError("broken")

    calls_are_over = False
    kernel, _ = make()
    with tb.record() as calls:
        breaks(np.ones(3))
        kernel(np.ones(3))
    calls_are_over = True
    statuses = {outcome.call.problem.op: outcome for outcome in tb.tune_all(calls)}
    assert statuses["recorded@v0"].status == "tuned"
    assert statuses["breaks@v0"].status == "failed"
    assert "broken" in statuses["breaks@v0"].detail


def test_a_recording_survives_a_file(tmp_path):
    kernel, _ = make()
    with tb.record() as calls:
        kernel(np.ones((8, 2), np.float32).T, flag=(1, {"a": None}))
    calls.save(tmp_path / "calls.json")
    loaded = tb.Recording.load(tmp_path / "calls.json")
    assert list(loaded) == list(calls)
    assert {o.status for o in tb.tune_all(loaded)} == {"tuned"}


class Mode(enum.Enum):
    CAUSAL = 1
    FULL = 2


@dataclass(frozen=True)
class Window:
    left: int
    modes: tuple[Mode, ...] = ()


@pytest.mark.parametrize("name", ["tunebook._arrays.ArraySpec", "tunebook._arrays.describe.ArraySpec"])
def test_a_recording_of_an_older_release_is_read(tmp_path, name):
    kernel, _ = make(heuristic={"block": 2})
    with tb.record() as calls:
        kernel(np.ones(8))
    path = tmp_path / "calls.json"
    calls.save(path)
    path.write_text(path.read_text().replace("tunebook.ArraySpec", name))
    (call,) = tb.Recording.load(path)
    assert call.args == (tb.ArraySpec("numpy", "float64", (8,), "C", "cpu"), False)


def test_arguments_of_declared_classes_survive_a_file(tmp_path):
    @tb.tunable(space=tb.Space(b=[1, 2]), name="declared", store=False)
    def kernel(x, window: Window | None = None, mode=Mode.FULL, *, config):
        return x

    with tb.record() as calls:
        kernel(np.ones(3), Window(4, (Mode.CAUSAL,)), Mode.CAUSAL)
    calls.save(tmp_path / "calls.json")
    (call,) = tb.Recording.load(tmp_path / "calls.json")
    assert call.args[1:] == (Window(4, (Mode.CAUSAL,)), Mode.CAUSAL)


def test_an_argument_of_a_class_that_nothing_declares_is_a_clear_error(tmp_path):
    kernel, _ = make()
    with tb.record() as calls:
        kernel(np.ones(3), Mode.CAUSAL)
    calls.save(tmp_path / "calls.json")
    with pytest.raises(tb.CodecError, match=r"test_recording\.Mode"):
        tb.Recording.load(tmp_path / "calls.json")


def test_a_recording_is_tuned_in_another_process_that_imports_the_kernel(tmp_path):
    (tmp_path / "mylib.py").write_text(
        textwrap.dedent("""
        import tunebook as tb
        @tb.tunable(space=tb.Space(b=[1, 2]))
        def f(x, *, config):
            return x
        """)
    )
    script = (
        "import numpy, mylib, tunebook as tb\nwith tb.record() as calls: mylib.f(numpy.ones(3))\ncalls.save('c.json')"
    )
    tune = "import {0}, tunebook as tb\nfor o in tb.tune_all(tb.Recording.load('c.json')): print(o.status, o.detail)"
    run = lambda code: (
        subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    )
    run(script)
    assert "import mylib first" in run(tune.format("numpy"))
    assert run(tune.format("numpy, mylib")) == "tuned 2 measured\n"
    assert run(tune.format("numpy, mylib")) == "known persistent\n"


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"format": "other"}', '{"format": "tunebook-recording/1", "calls": [1]}']
)
def test_a_broken_recording_is_a_clear_error(tmp_path, text):
    (tmp_path / "c.json").write_text(text)
    with pytest.raises(tb.CodecError, match=r"c\.json"):
        tb.Recording.load(tmp_path / "c.json")


def test_a_missing_recording_is_a_clear_error(tmp_path):
    with pytest.raises(tb.StoreError, match="cannot read"):
        tb.Recording.load(tmp_path / "none.json")


def test_a_call_that_cannot_be_saved_is_named(tmp_path):
    tb.register_key(Opaque, lambda _: "opaque")
    kernel, _ = make()
    with tb.record() as calls:
        kernel(np.ones(3), flag=Opaque())
    with pytest.raises(tb.CodecError, match="recorded@v0"):
        calls.save(tmp_path / "c.json")
    assert not list(tmp_path.iterdir())


class Opaque:
    """Not made of plain values."""

    def __init__(self, *args):
        pass


def test_the_executor_records_and_its_calls_are_tuned_through_a_selector():
    clock = FakeClock()
    kernel = PretendKernel(clock, {Tiles(1): 1.0, Tiles(2): 0.5}, heuristic=Tiles(1))
    selector = tb.ConfigSelectorChain(tb.ConfigCache(), tuner=fake_tuner(clock))
    run = tb.Executor(selector)
    with tb.record() as calls:
        assert run(kernel, np.ones(4)) == Tiles(1)
    (outcome,) = tb.tune_all(calls)
    assert (outcome.status, outcome.config) == ("tuned", Tiles(2))
    assert run(kernel, np.ones(4)) == Tiles(2)
    (outcome,) = tb.tune_all(calls, selector=selector)
    assert (outcome.status, outcome.config) == ("known", Tiles(2))


@pytest.fixture
def registry():
    tb.clear_invocations()
    yield
    tb.clear_invocations()


@pytest.fixture
def noted(registry):
    """A kernel, and the executor that has run it with recording on."""
    clock = FakeClock()
    kernel = PretendKernel(clock, {Tiles(1): 1.0, Tiles(2): 0.5}, heuristic=Tiles(1))
    policy = tb.AutotunePolicy(allow_autotune=False)
    run = tb.Executor(tb.ConfigSelectorChain(tb.ConfigCache(), policy, fake_tuner(clock)))
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TUNEBOOK_RECORD", "1")
        for size in (4, 4, 8):
            run(kernel, np.ones(size))
    return kernel, run


@pytest.mark.parametrize(("variable", "value", "count"), [
    ("TUNEBOOK_RECORD", "1", 1), ("EJKERNEL_OPS_RECORD", "1", 1), ("TUNEBOOK_RECORD", "0", 0), ("UNKNOWN", "1", 0),
])  # fmt: skip
def test_the_executor_fills_the_registry_when_the_environment_asks_for_it(
    registry, monkeypatch, variable, value, count
):
    monkeypatch.setenv(variable, value)
    kernel = PretendKernel(FakeClock(), {Tiles(1): 1.0}, heuristic=Tiles(1))
    tb.Executor(tb.ConfigSelectorChain(tb.ConfigCache(), tuner=False))(kernel, np.ones(4))
    assert len(tb.get_invocations(tb.device_fingerprint())) == count


def test_the_registry_counts_the_calls_of_an_executor(noted):
    kernel, _ = noted
    found = tb.get_invocations(tb.device_fingerprint())
    assert {len(calls) for calls in found.values()} == {2}
    for held, args, kwargs in found[kernel.op_id_v].values():
        assert (held, type(args[0]), kwargs) == (kernel, tb.ArraySpec, {})
    assert sorted(call.count for call in found.calls) == [1, 2]


@pytest.mark.parametrize("copy", [lambda found: found, dict], ids=["as returned", "copied"])
def test_all_calls_of_the_registry_are_tuned_together(noted, copy):
    kernel, run = noted
    calls = copy(tb.get_invocations(tb.device_fingerprint()))
    outcomes = tb.tune_all(calls, selector=run.chooser)
    assert [(outcome.status, outcome.config) for outcome in outcomes] == [("tuned", Tiles(2))] * 2
    assert run(kernel, np.ones(8)) == Tiles(2)


def test_the_registry_knows_the_selector_of_each_call(noted):
    assert [outcome.status for outcome in tb.tune_all(tb.get_invocations(tb.device_fingerprint()))] == ["tuned"] * 2


def test_autotune_recorded_returns_an_overlay_of_all_choices(noted):
    kernel, run = noted
    result = tb.autotune_recorded(run.chooser)
    assert result.device == tb.device_fingerprint()
    assert {(entry.op_id_v, entry.cfg) for entry in result.entries} == {(kernel.op_id_v, Tiles(2))}
    assert set(result.as_overlay()) == {kernel.problem(tb.Invocation("x", (np.ones(size),), {})) for size in (4, 8)}
    run.chooser.cache.clear()
    run.chooser.forbid_reautotune = False
    assert run(kernel, np.ones(4)) == Tiles(1), "the heuristic"
    with result as inside:
        assert inside is result
        assert run(kernel, np.ones(4)) == Tiles(2)
    assert run(kernel, np.ones(4)) == Tiles(1)


def test_autotune_recorded_of_known_calls_and_of_none(noted):
    _, run = noted
    tb.autotune_recorded(run.chooser)
    again = tb.autotune_recorded(run.chooser, show_progress=False, repetition_count=1)
    assert [outcome.status for outcome in again.outcomes] == ["known", "known"]
    assert len(again.entries) == 2
    assert tb.autotune_recorded(run.chooser, device="elsewhere").entries == ()


def test_a_call_that_is_noted_by_hand_without_a_kernel_or_selector_is_skipped_with_the_reason(registry):
    tb.record_invocation("dev", "op@v1", "key", object(), [1], {})
    (outcome,) = tb.tune_all(tb.get_invocations("dev"))
    assert (outcome.status, "not with a Kernel" in outcome.detail) == ("skipped", True)
    kernel = PretendKernel(FakeClock(), {Tiles(1): 1.0}, heuristic=Tiles(1))
    tb.record_invocation("dev", "op@v1", "key", kernel, [1], {})
    (outcome,) = tb.tune_all(tb.get_invocations("dev"))
    assert (outcome.status, "pass its selector" in outcome.detail) == ("skipped", True)


def test_recording_a_key_again_replaces_its_call_and_copies_its_arguments(registry):
    given, named = [1, 2], {"flag": True}
    tb.record_invocation("dev", "op@v1", "key", "first", (0,), {})
    tb.record_invocation("dev", "op@v1", "key", "second", given, named)
    given.append(3)
    named.clear()
    assert tb.get_invocations("dev") == {"op@v1": {"key": ("second", (1, 2), {"flag": True})}}


def test_record_invocation_keeps_specs_by_device():
    kernel = object()
    tb.record_invocation("dev", "op@v1", "key", kernel, (np.ones((2, 3)), 7), {"flag": True})
    tb.record_invocation("dev", "op@v1", "key2", kernel, (), {})
    tb.record_invocation("other", "op@v1", "key", kernel, (), {})
    found = tb.get_invocations("dev")
    assert set(found["op@v1"]) == {"key", "key2"}
    kept, args, kwargs = found["op@v1"]["key"]
    assert (kept, args[0].shape, args[1], kwargs) == (kernel, (2, 3), 7, {"flag": True})
    assert isinstance(args[0], tb.ArraySpec)
    assert tb.get_invocations("nowhere") == {}


def test_recordings_are_json_that_people_can_read(tmp_path):
    kernel, _ = make()
    with tb.record() as calls:
        kernel(np.ones(3))
    calls.save(tmp_path / "c.json")
    content = json.loads((tmp_path / "c.json").read_text())
    assert content["calls"][0]["problem"][1] == "recorded@v0"


class PretendGpu:
    platform, device_kind, id = "gpu", "Pretend 9000", 0


class PretendArray:
    """An array of a library of which the core knows nothing but how to make one."""

    def __init__(self, shape):
        self.shape, self.dtype, self.device = shape, "float32", PretendGpu()


def test_a_known_gpu_problem_is_not_tuned_again():
    made = []

    def make_array(spec, _seed):
        made.append(spec.shape)
        return PretendArray(spec.shape)

    tb.register_array_library(tb.ArrayLibrary("test_recording", make=make_array))
    kernel, _ = make(heuristic={"block": 2})
    with tb.record() as calls:
        kernel(PretendArray((1000, 1000)))
    assert [call.problem.device for call in calls] == ["gpu:Pretend 9000"]
    assert tb.tune_all(calls)[0].status == "tuned"
    made.clear()
    assert tb.tune_all(calls)[0].status == "known"
    assert made == [()], "and no array of its size is made to find that out"


def test_a_budget_that_ended_a_tuning_leaves_it_to_the_next(tmp_path):
    clock = FakeClock()

    @tb.tunable(space=tb.Space(block=[1, 2]), tuner=fake_tuner(clock), name="unfinished", store=tmp_path / "book")
    def kernel(x, *, config):
        clock.spend(config.block)
        return x

    with tb.record() as calls:
        kernel(np.ones(8))
    assert tb.tune_all(calls, budget="1 trial")[0].detail == "1 measured"
    assert [outcome.status for _ in range(2) for outcome in tb.tune_all(calls)] == ["tuned", "known"]


class Constructed(tb.Kernel):
    def __init__(self, op_id="test.constructed"):
        super().__init__(op_id)

    def run(self, x, *, cfg):
        return x

    def candidate_cfgs(self, inv):
        return [1, 2]


@pytest.mark.parametrize("keep", [True, False])
def test_kernels_for_an_executor_are_found_by_recordings_from_files(tmp_path, keep):
    """Those that are alive, and those of a class that needs no arguments."""
    kernel = Constructed("test.kept" if keep else "test.constructed")
    selector = tb.ConfigSelectorChain(tb.ConfigCache(), None, fake_tuner(FakeClock()))
    with tb.record() as calls:
        tb.Executor(selector)(kernel, np.ones(3))
    calls.save(tmp_path / "calls.json")
    calls, kernel = None, kernel if keep else None
    gc.collect()
    (call,) = tb.Recording.load(tmp_path / "calls.json")
    assert type(call.kernel) is Constructed
    assert keep == (call.kernel is kernel)
