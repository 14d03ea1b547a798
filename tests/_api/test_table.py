"""tb.table: configurations that are asked for by numbers, far from the launch."""

from __future__ import annotations

import enum
import importlib
import inspect
import json
import subprocess
import sys
import textwrap
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from kernels import FakeClock, fake_tuner, note_in
from limits import HANG_S

import tunebook as tb
from tunebook._api import table as table_module
from tunebook._arrays import library as registry
from tunebook._arrays.library import ArrayLibrary
from tunebook._cli import main

pytestmark = pytest.mark.usefixtures("way")

KEY = ("E", "N", "M", "dtype")
SPACE = tb.Space(block=[16, 32, 64, 128])
GUESS = {"block": 16}


class Moe:
    """A table whose best block is the one nearest to M, by a clock that its runs move."""

    def __init__(self, **options):
        self.clock, self.ran, self.made, self.events = FakeClock(), [], [], []
        options = {"space": SPACE, "key": KEY, "heuristic": GUESS, "store": False, **options}
        options = {"run": self.run, "inputs": self.inputs, **options}
        self.table = tb.table("fused_moe", tuner=fake_tuner(self.clock), on_event=note_in(self.events), **options)

    def inputs(self, **numbers):
        self.made.append(numbers)
        return np.ones((numbers["M"], 2)), np.ones(numbers["E"])

    def run(self, x, experts, *, config):
        self.ran.append((x.shape, experts.shape, config))
        self.clock.spend(abs(config.block - x.shape[0]) + 1)
        return x

    def event_names(self):
        return [event for event, _ in self.events]


class EditedMoe(Moe):
    """The same table, with another `run`."""

    def run(self, x, experts, *, config):
        self.clock.spend(2 * abs(config.block - x.shape[0]) + 1)
        return x + 0


class TestAnswers:
    def test_numbers_are_tuned_once_on_the_inputs_that_are_made_of_them(self):
        moe = Moe()
        assert moe.table(E=8, N=4096, M=64, dtype="bf16").block == 64
        assert moe.made == [{"E": 8, "N": 4096, "M": 64, "dtype": "bf16"}]
        assert {(x, experts) for x, experts, _ in moe.ran} == {((64, 2), (8,))}
        moe.ran.clear()
        for _ in range(3):
            assert moe.table(8, 4096, 64, "bf16").block == 64
        assert moe.ran == []
        assert moe.table(8, 4096, 128, "bf16").block == 128

    def test_the_tiers_answer_in_their_order(self, monkeypatch):
        moe = Moe()
        numbers = (8, 4096, 64, "bf16")
        assert moe.table(*numbers, config={"block": 128}) == {"block": 128}
        with moe.table.overlay(block=16):
            assert moe.table(*numbers).block == 16
        monkeypatch.setenv("TUNEBOOK_PIN", "fused_moe:block=32")
        assert moe.table(*numbers).block == 32
        monkeypatch.delenv("TUNEBOOK_PIN")
        assert moe.table(*numbers).block == 64
        moe.table(*numbers)
        told = ["override", "overlay_hit", "pinned", "autotune_start", "autotune_finish", "cache_hit"]
        assert moe.event_names() == told

    def test_a_book_answers_another_process_of_the_same_program(self, tmp_path, monkeypatch):
        assert Moe(store=tmp_path).table(8, 4096, 64, "bf16").block == 64
        monkeypatch.setenv("TUNEBOOK_MODE", "replay")
        again = Moe(store=tmp_path)
        assert again.table(8, 4096, 64, "bf16").block == 64
        assert again.ran == []
        with pytest.raises(tb.NoConfig, match="replay"):
            again.table(8, 4096, 32, "bf16")

    def test_a_heuristic_gets_the_numbers_by_name(self):
        def guess(dtype, **numbers):
            return {"block": 128 if numbers["M"] > 100 else 16}

        moe = tb.table("moe", space=SPACE, key=KEY, store=False, heuristic=guess)
        assert [moe(8, 4096, m, "bf16").block for m in (1, 1000)] == [16, 128]

    def test_without_run_nothing_is_tuned_and_the_reason_is_told(self):
        moe = Moe(run=None, inputs=None)
        assert moe.table(8, 4096, 64, "bf16").block == 16
        assert moe.event_names() == ["heuristics"]
        with pytest.raises(tb.DefinitionError, match=r"'fused_moe' cannot be tuned: give its table run= and inputs="):
            moe.table.tune(8, 4096, 64, "bf16")
        alone = tb.table("moe", space=SPACE, key=("M",), store=False)
        with pytest.raises(tb.NoConfig, match="autotune"):
            alone(3)

    def test_a_table_without_run_takes_entries_of_the_program_that_tuned_them(self, tmp_path):
        Moe(store=tmp_path).table(8, 4096, 64, "bf16")
        served = Moe(run=None, inputs=None, store=tmp_path)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert served.table(8, 4096, 64, "bf16").block == 64

    def test_an_edit_of_run_is_noticed(self, tmp_path):
        Moe(store=tmp_path).table(8, 4096, 64, "bf16")
        edited = EditedMoe(store=tmp_path)
        edited.table(8, 4096, 64, "bf16")
        assert "autotune_start" in edited.event_names()

    def test_the_output_of_run_is_checked_against_the_reference_on_the_same_inputs(self):
        seen = []

        def reference(x, experts):
            seen.append((x.shape, experts.shape))
            return x

        def run(x, experts, *, config):
            moe.clock.spend(1)
            return x + (config.block != 32)

        moe = Moe(run=run, reference=reference)
        assert moe.table(8, 4096, 4, "bf16").block == 32
        assert set(seen) == {((4, 2), (8,))}

    def test_one_argument_need_not_be_in_a_tuple(self):
        seen = []
        clock = FakeClock()

        def run(x, *, config):
            seen.append(x.shape)
            clock.spend(config.block)

        one = tb.table(
            "one", space=SPACE, key=("shape",), store=False, run=run, inputs=np.ones, tuner=fake_tuner(clock)
        )
        assert one(3).block == 16
        assert set(seen) == {(3,)}

    def test_inputs_that_fail_leave_the_heuristic(self):
        moe = Moe(inputs=lambda **_: 1 / 0)
        with pytest.warns(tb.TunebookWarning, match="the function that makes inputs failed: ZeroDivisionError"):
            assert moe.table(8, 4096, 64, "bf16").block == 16

    def test_background_tuning_and_an_incremental_policy(self):
        moe = Moe(policy=tb.AutotunePolicy(cache_miss_fallback="background"))
        assert moe.table(8, 4096, 64, "bf16").block == 16
        assert tb.wait_for_background(HANG_S)
        assert moe.table(8, 4096, 64, "bf16").block == 64
        moe = Moe(policy=tb.AutotunePolicy(cache_miss_fallback="incremental"))
        with pytest.warns(tb.TunebookWarning, match="its calls run nothing"):
            assert moe.table(8, 4096, 64, "bf16").block == 16
        assert moe.ran == []


class TestNear:
    @pytest.fixture
    def moe(self, tmp_path):
        moe = Moe(store=tmp_path, near=("M",))
        for m in (16, 128):
            moe.table.tune(8, 4096, m, "bf16")
        moe.ran.clear()
        return moe

    def test_the_nearest_tuned_entry_answers_without_a_warning(self, moe):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert [moe.table(8, 4096, m, "bf16").block for m in (17, 100, 5000)] == [16, 128, 128]
        assert moe.ran == []
        assert "trusted     as 'near'" in str(moe.table.explain(8, 4096, 17, "bf16"))

    @pytest.mark.parametrize("numbers", [(4, 4096, 64, "bf16"), (8, 2048, 64, "bf16"), (8, 4096, 64, "fp8")])
    def test_another_number_is_never_near(self, moe, numbers):
        assert moe.table(*numbers).block == 64
        assert moe.ran

    def test_one_entry_answers_and_not_what_several_agree_on(self, tmp_path):
        moe = Moe(store=tmp_path, near=("M",))
        for m, block in ((16, 16), (32, 128), (64, 16), (256, 32)):
            problem = moe.table.problem(8, 4096, m, "bf16")
            moe.table.selector.persistent.put(*problem, tb.Config(block=block))
        asked = {1: 16, 31: 128, 33: 128, 63: 16, 128: 16, 129: 32, 9999: 32}  # 128 is as far from 64 as from 256
        assert {m: moe.table(8, 4096, m, "bf16").block for m in asked} == asked
        assert moe.ran == []

    @pytest.mark.parametrize(
        ("rule", "asked"),
        [
            # 40 is the mean of 16 and 64, and 160 of 64 and 256: the smaller one counts
            ("difference", {1: 16, 39: 16, 40: 16, 41: 32, 160: 32, 161: 64, 9999: 64, 0: 16}),
            ("below", {1: 16, 16: 16, 63: 16, 64: 32, 255: 32, 256: 64, 9999: 64}),
            ("ratio", {1: 16, 31: 16, 32: 16, 33: 32, 128: 32, 129: 64, 9999: 64}),
        ],
    )
    def test_the_author_chooses_how_nearness_is_measured(self, rule, asked, tmp_path):
        moe = Moe(store=tmp_path, near={"M": rule})
        for m, block in ((16, 16), (64, 32), (256, 64)):
            moe.table.selector.persistent.put(*moe.table.problem(8, 4096, m, "bf16"), tb.Config(block=block))
        assert {m: moe.table(8, 4096, m, "bf16").block for m in asked} == asked
        assert moe.ran == []

    def test_none_is_like_a_number_that_the_entry_lacks(self, tmp_path):
        moe = Moe(store=tmp_path, near=("M",))
        problem = moe.table.problem(8, 4096, 64, None)
        short = json.dumps({n: v for n, v in json.loads(problem.call_key).items() if v is not None})
        moe.table.selector.persistent.put(problem.device, problem.op, short, tb.Config(block=128))
        assert moe.table(8, 4096, 64, None).block == 128
        assert moe.table(8, 4096, 70, None).block == 128
        assert moe.ran == []

    def test_many_entries_are_taken_apart_once(self, tmp_path, monkeypatch):
        moe = Moe(store=tmp_path, near=("M",))
        for m in range(1, 40):
            moe.table.selector.persistent.put(*moe.table.problem(8, 4096, 100 * m, "bf16"), tb.Config(block=32))
        taken_apart = []
        parse = table_module.parsed
        monkeypatch.setattr(table_module, "parsed", lambda key: taken_apart.append(key) or parse(key))
        for asked in (150, 250, 350):
            assert moe.table(8, 4096, asked, "bf16").block == 32
        assert len(taken_apart) == 39 + 3

    def test_a_new_entry_counts_from_the_next_call_on(self, moe):
        assert moe.table(8, 4096, 70, "bf16").block == 128
        moe.table.tune(8, 4096, 64, "bf16")
        assert moe.table(8, 4096, 70, "bf16").block == 64

    def test_an_own_entry_goes_before_a_near_one_also_if_it_is_outdated(self, moe, tmp_path):
        edited = EditedMoe(store=tmp_path, near=("M",))
        edited.table(8, 4096, 16, "bf16")
        assert "autotune_start" in edited.event_names()

    @pytest.mark.parametrize("how", ["variable", "policy"])
    def test_who_asks_for_exact_entries_gets_no_near_ones(self, moe, how, monkeypatch):
        if how == "variable":
            monkeypatch.setenv("TUNEBOOK_TRUST", "exact")
        else:
            moe.table.selector.policy = tb.AutotunePolicy(trust="exact")
        assert moe.table(8, 4096, 64, "bf16").block == 64
        assert moe.ran

    def test_frozen_programs_and_programs_without_run_get_near_entries_too(self, moe, tmp_path, monkeypatch):
        served = Moe(run=None, inputs=None, store=tmp_path, near=["M"])
        assert served.table(8, 4096, 100, "bf16").block == 128
        monkeypatch.setenv("TUNEBOOK_MODE", "frozen")
        assert moe.table(8, 4096, 100, "bf16").block == 128

    def test_without_near_every_number_is_exact(self, moe, tmp_path):
        exact = Moe(store=tmp_path)
        assert exact.table(8, 4096, 64, "bf16").block == 64
        assert exact.ran

    def test_entries_of_another_device_are_not_near(self, moe, tmp_path):
        elsewhere = Moe(store=tmp_path, near=("M",), device="gpu:Another")
        assert elsewhere.table(8, 4096, 64, "bf16").block == 64
        assert elsewhere.ran


class Kind(enum.Enum):
    GATED = 1


class TestKeys:
    @pytest.mark.parametrize(
        ("call", "message"),
        [
            (lambda moe: moe(E=8, n=4096, M=64, dtype="bf16"), "unknown number 'n'.*Valid: E, N, M, dtype"),
            (lambda moe: moe(8, 4096, 64, "bf16", block=3), "unknown number 'block'"),
            (lambda moe: moe(8, 4096, 64, dtyp="bf16"), "did you mean 'dtype'"),
            (lambda moe: moe(8, 4096, dtype="bf16"), "asked by E, N, M, dtype; 'M' is missing"),
            (lambda moe: moe(), "'E' is missing"),
            (lambda moe: moe.explain(8, 4096, 64), "'dtype' is missing"),
            (lambda moe: moe.tune(8, 4096, 64, dtyp="bf16"), "did you mean 'dtype'"),
            (lambda moe: moe.config_for(8, 4096, 64, "bf16", 3), "too many positional arguments; it is asked by E, N"),
            (lambda moe: moe(8, 4096, np.ones(3), "bf16"), "M is a numpy.ndarray, which cannot be a key"),
            (lambda moe: moe(8, 4096, (1, [object()]), "bf16"), "M is a builtins.tuple, which cannot be a key"),
        ],
    )
    @pytest.mark.parametrize("warm", [False, True])
    def test_a_wrong_call_is_one_clear_error(self, call, message, warm):
        moe = Moe().table
        if warm:
            moe(8, 4096, 64, "bf16")
        with pytest.raises(tb.DefinitionError, match=message):
            call(moe)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"near": ("m",)}, "near=.*the arguments are 'E', 'N', 'M', 'dtype'"),
            ({"near": "M"}, "near= takes a tuple of names"),
            ({"near": {"M": "diff"}}, "near=.*'diff'.*ratio, difference, below"),
            ({"key": "M"}, r"key='M': give the names of the numbers as a tuple"),
            ({"key": ()}, "give the names of the numbers"),
            ({"key": ("M", "M")}, "duplicate parameter name: 'M'"),
            ({"key": ("M", "config")}, "duplicate parameter name: 'config'"),
            ({"key": ("M", "block shape")}, "'block shape' is not a valid parameter name"),
            ({"inputs": None}, "give both, or neither"),
            ({"run": None}, "give both, or neither"),
            ({"heuristics": {}}, r"table\(\): unknown option 'heuristics'; did you mean 'heuristic'"),
            ({"mutates": ("x",)}, "mutates= is not for tables"),
        ],
    )
    def test_a_wrong_definition_is_one_clear_error(self, options, message):
        with pytest.raises(tb.DefinitionError, match=message):
            Moe(**options)

    @pytest.mark.parametrize(
        "value", ["bf16", np.dtype("float16"), None, True, (128, 128), [128, 128], Kind.GATED, 0.5]
    )
    def test_plain_values_are_keys(self, value):
        moe = Moe()
        assert moe.table(8, 4096, 64, value) is moe.table(8, 4096, 64, value)
        assert moe.event_names().count("autotune_start") == 1

    def test_an_integer_of_numpy_is_the_same_number(self):
        moe = Moe()
        assert moe.table(np.int64(8), 4096, np.int32(64), "bf16") is moe.table(8, 4096, 64, "bf16")
        assert moe.table.problem(np.int64(8), 4096, 64, "bf16") == moe.table.problem(8, 4096, 64, "bf16")
        assert moe.event_names().count("autotune_start") == 1

    def test_a_bucket_lets_sizes_share_an_entry(self):
        moe = Moe(bucket={"M": tb.pow2})
        assert moe.table.problem(8, 4096, 33, "bf16") == moe.table.problem(8, 4096, 64, "bf16")

    def test_its_signature_is_its_key(self):
        parameters = inspect.signature(Moe().table).parameters
        assert [*parameters] == [*KEY, "config"]
        assert all(parameters[name].default is inspect.Parameter.empty for name in KEY)

    @pytest.mark.parametrize("name", ["vllm.fused_moe", "moe/fp8", "lambda"])
    def test_any_name_will_do(self, name):
        named = tb.table(name, space=SPACE, key=("M",), heuristic=GUESS, store=False)
        assert named(3) == GUESS
        assert named.problem(3).op == f"{name}@v0"


class TestDevices:
    def test_it_is_the_hosts_where_no_library_has_an_accelerator(self):
        assert Moe().table.problem(8, 4096, 64, "bf16").device == tb.device_fingerprint()

    @pytest.mark.parametrize(("device", "found"), [("cpu", None), ("gpu:NVIDIA H200", "gpu:NVIDIA H200")])
    def test_a_device_may_be_named(self, device, found):
        problem = Moe(device=device).table.problem(8, 4096, 64, "bf16")
        assert problem.device == (found or tb.device_fingerprint())

    def test_it_is_the_accelerator_of_a_loaded_library_before_jax_is_asked(self, monkeypatch):
        class Board:
            platform, name = "gpu", "Pretend 9000"

        def refuse():
            raise AssertionError("asked")

        known = {
            **{name: library._replace(accelerator=lambda: None) for name, library in registry._known.items()},
            "jax": ArrayLibrary("jax", accelerator=refuse),
            "hosted": ArrayLibrary("hosted"),
            "pretend": ArrayLibrary("pretend", accelerator=Board),
        }
        monkeypatch.setattr(registry, "_known", known)
        moe = Moe()
        assert moe.table.problem(8, 4096, 64, "bf16").device == "gpu:Pretend 9000"

    def test_no_framework_is_imported(self):
        program = """
            import sys
            import tunebook as tb
            moe = tb.table("moe", space=tb.Space(block=[1, 2]), key=("M",), heuristic={"block": 1}, store=False)
            moe(3)
            print(sorted({"torch", "jax", "cupy", "numpy", "triton"} & sys.modules.keys()))
        """
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == "[]"


class TestBeyondTheProcess:
    def test_a_recording_is_tuned(self, tmp_path):
        moe = Moe(store=tmp_path / "book")
        with tb.record() as recording:
            assert moe.table(8, 4096, np.int64(64), "bf16").block == 16
        assert moe.ran == []
        recording.save(tmp_path / "calls.json")
        (outcome,) = tb.tune_all(tb.Recording.load(tmp_path / "calls.json"))
        assert (outcome.status, outcome.config.block) == ("tuned", 64), outcome.detail
        assert moe.table(8, 4096, 64, "bf16").block == 64
        (again,) = tb.tune_all(recording)
        assert again.status == "known"

    def test_calls_are_tuned_together_and_verified(self, tmp_path):
        calls = [(8, 4096, m, "bf16") for m in (60, 70)]
        assert tb.tune_together(Moe().table, calls).config.block == 64
        moe = Moe(store=tmp_path)
        moe.table(*calls[0])
        assert tb.verify(moe.table, *calls[0]).held

    def test_tables_of_vllm_answer_and_are_written(self, tmp_path):
        names = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M", "num_warps", "num_stages")
        small = dict(zip(names, (16, 128, 128, 1, 4, 4), strict=True))
        large = dict(zip(names, (128, 256, 64, 16, 8, 4), strict=True))
        file = tmp_path / "E=8,N=7168,device_name=NVIDIA_H200,dtype=fp8_w8a8.json"
        file.write_text(json.dumps({"1": small, "16": small, "1024": large, "4096": large}))
        assert main(["import", "--format", "vllm", str(file)]) == 0
        axes = {name: sorted({small[name], large[name]}) for name in names}
        moe = tb.table("fused_moe", space=tb.Space(**axes), key=KEY, near=("M",), device="gpu:NVIDIA H200")
        answers = [moe(E=8, N=7168, M=m, dtype="fp8_w8a8") for m in (1, 3, 2000, 100_000)]
        assert answers == [small, small, large, large]
        with pytest.raises(tb.NoConfig):
            moe(E=16, N=7168, M=1, dtype="fp8_w8a8")
        assert main(["export", "--format", "vllm", str(tmp_path / "out"), "--kernel", "fused_moe"]) == 0
        assert json.loads((tmp_path / "out" / file.name).read_text()) == json.loads(file.read_text())

    def test_the_command_knows_its_entries_and_tunes_its_recordings(self, tmp_path, monkeypatch, capsys):
        (tmp_path / "served_moe.py").write_text(textwrap.dedent(PROGRAM))
        monkeypatch.syspath_prepend(tmp_path)
        program = importlib.import_module("served_moe")
        with tb.record() as recording:
            program.moe(64)
        recording.save(tmp_path / "calls.json")
        assert main(["tune", str(tmp_path / "calls.json")]) == 0
        assert program.moe(64).block == 64
        capsys.readouterr()
        for verb in (["ls"], ["show", "served_moe"], ["explain", "served_moe"]):
            assert main(verb) == 0
            assert "served_moe" in capsys.readouterr().out


PROGRAM = """
    import numpy as np
    from kernels import FakeClock, fake_tuner

    import tunebook as tb

    CLOCK = FakeClock()


    def run(x, *, config):
        CLOCK.spend(abs(config.block - len(x)) + 1)
        return x


    moe = tb.table(
        "served_moe",
        space=tb.Space(block=[16, 32, 64]),
        key=("M",),
        heuristic={"block": 16},
        run=run,
        inputs=lambda M: np.ones(M),
        tuner=fake_tuner(CLOCK),
    )
"""


class TestThreads:
    def test_the_answer_is_the_same_in_every_thread(self):
        moe = Moe()
        here = moe.table(8, 4096, 64, "bf16")
        with ThreadPoolExecutor(1) as other:
            assert other.submit(moe.table, 8, 4096, 64, "bf16").result() is here
        assert moe.event_names().count("autotune_start") == 1
