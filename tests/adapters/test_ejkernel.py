"""ejkernel's operations on tunebook's selector: run by `make compat` against the released package."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace

import pytest

pytest.importorskip("ejkernel", reason="ejkernel is not installed; `make compat` runs these tests with it")

import ejkernel.modules as ej
import jax
import jax.numpy as jnp
import numpy as np
from ejkernel import ops

import tunebook as tb
from tunebook._base.record_format import Record
from tunebook._code import checksum
from tunebook.adapters import ejkernel as adapter
from tunebook.stores import open_store

THEIR_CHOOSE = ops.ConfigSelectorChain.choose


@pytest.fixture(autouse=True)
def _installed(tmp_path, monkeypatch):
    monkeypatch.setenv("EJKERNEL_PERSISTENT_CACHE_DIR", str(tmp_path / "theirs"))
    adapter.install()
    yield
    adapter.uninstall()


@dataclass(frozen=True)
class Block:
    """A configuration, as ejkernel's are: a dataclass with the fields that its executor looks at."""

    size: int
    platform: str = "auto"
    backend: str = "any"


class Doubled(ops.Kernel):
    """A user's own kernel of ejkernel."""

    factor = 2.0

    def __init__(self):
        super().__init__("doubled")

    def run(self, x, scale=1.0, *, cfg):
        return x * self.factor * scale + 0.0 * cfg.size

    def heuristic_cfg(self, inv):
        return Block(1)

    def candidate_cfgs(self, inv):
        return [Block(1), Block(2)]


def executor(events=None, persistent=None, **policy):
    listen = None if events is None else lambda event, **data: events.append((event, data))
    chain = ops.ConfigSelectorChain(
        ops.ConfigCache(), ops.AutotunePolicy(**policy), ops.Tuner(warmup=1, iters=3), persistent, on_event=listen
    )
    return ops.Executor(chain)


X = jnp.arange(12.0).reshape(3, 4)


def names(events):
    """Return the events that every tuning has, also on a busy machine."""
    return [event for event, _ in events if event not in ("autotune_progress", "disturbed")]


def test_a_new_object_per_call_is_tuned_once():
    events = []
    run = executor(events)
    for _ in range(4):
        assert np.allclose(run(Doubled(), X), 2 * X)
    assert names(events) == ["autotune_start", "autotune_finish", "cache_hit", "cache_hit", "cache_hit"]


class Alone(Doubled):
    def candidate_cfgs(self, inv):
        return [Block(1)]


@pytest.mark.parametrize(
    ("policy", "told"),
    [
        ({}, ["heuristics"]),  # nothing is measured where nothing can be chosen
        ({"allow_heuristics": False}, ["autotune_start", "autotune_finish"]),
    ],
)
def test_a_single_candidate_that_is_the_heuristics_is_not_measured(policy, told):
    events = []
    assert executor(events, **policy).choose_config(Alone(), X) == Block(1)
    assert names(events) == told


class Elsewhere(Doubled):
    def heuristic_cfg(self, inv):
        return Block(7)


@pytest.mark.parametrize(
    ("policy", "measured"),
    [
        ({"validate_backward": True}, {1, 2}),  # as ejkernel does
        ({}, {1, 2, 7}),  # outputs are compared with the heuristic's
    ],
)
def test_a_heuristic_that_is_not_among_the_candidates_is_measured_only_to_compare_with(policy, measured):
    events = []
    executor(events, **policy).choose_config(Elsewhere(), X)
    steps = [data["step"].latest for event, data in events if event == "autotune_progress"]
    assert {step.config["v"]["size"] for step in steps if step is not None} == measured


def test_a_warm_call_reads_no_code(monkeypatch):
    run = executor()
    for _ in range(2):  # the call after a tuning finds the new entry, and is memoised
        run(Doubled(), X)
    monkeypatch.setattr(checksum, "_CodeWalk", None)  # a walk over code would raise
    for _ in range(3):
        run(Doubled(), X)


@pytest.mark.parametrize("given", ["cfg", "_cfg"])
def test_a_given_configuration_is_used_for_its_call_alone(given):
    events = []
    run = executor(events, cache_miss_fallback="heuristics")
    run(Doubled(), X, **{given: Block(7)})
    assert run.choose_config(Doubled(), X) == Block(1)
    assert names(events) == ["override", "heuristics"]


def test_policies_are_theirs_and_may_change():
    events = []
    run = executor(events, allow_autotune=False)
    assert run.choose_config(Doubled(), X) == Block(1)
    with ops.policy_override(run.chooser, allow_heuristics=False), pytest.raises(RuntimeError):
        run.choose_config(Doubled(), X[:1])
    assert run.choose_config(Doubled(), X[:1]) == Block(1)
    assert names(events) == ["heuristics", "error", "heuristics"]


def test_their_overlays_and_entries_are_honoured():
    run = executor(cache_miss_fallback="heuristics")
    inv = ops.Invocation("doubled", (X,), {})
    key = (ops.device_fingerprint(), "doubled@v0", inv.make_key())
    with ops.overlay_cache({key: Block(9)}):
        # The executor of ejkernel asks its own overlays under this policy, and its selector under all others.
        assert run.choose_config(Doubled(), X) == Block(9)
    assert run.choose_config(Doubled(), X) == Block(1)


def test_a_listener_that_is_set_later_hears_events():
    events = []
    run = executor(cache_miss_fallback="heuristics")
    run(Doubled(), X)
    run.chooser.on_event = lambda event, **data: events.append((event, data))
    run(Doubled(), X)
    run.chooser.on_event = None
    run(Doubled(), X)
    assert len(events) == 1


def test_the_book_remembers_for_the_next_process(tmp_path):
    run = executor(persistent=ops.PersistentCache("doubled"))
    run(Doubled(), X)
    events = []
    again = executor(events, ops.PersistentCache("doubled"))
    again(Doubled(), X)
    assert names(events) == ["cache_hit"]
    assert events[0][1]["level"] == "persistent"
    Doubled.factor = 3.0
    try:
        edited = []
        executor(edited, ops.PersistentCache("doubled"))(Doubled(), X)
    finally:
        Doubled.factor = 2.0
    assert names(edited)[0] != "cache_hit", "the kernel computes something else now"


def test_uninstall_puts_the_selector_back():
    adapter.install()  # twice is like once
    assert ops.ConfigSelectorChain.choose is not THEIR_CHOOSE
    adapter.uninstall()
    assert ops.ConfigSelectorChain.choose is THEIR_CHOOSE


@pytest.mark.parametrize("first", ["ejkernel.modules", "tunebook.adapters.ejkernel"])
def test_it_may_be_installed_before_or_after_the_operations_are_imported(first, tmp_path):
    second = {"ejkernel.modules", "tunebook.adapters.ejkernel"} - {first}
    code = f"""
import json, sys, jax.numpy as jnp, {first}, {second.pop()}
import tunebook.adapters.ejkernel as adapter
adapter.install()
loaded = set(sys.modules)
ejkernel.modules.mean_pooling(jnp.ones((1, 8, 4)))
assert not [name for name in set(sys.modules) - loaded if name.startswith("tunebook.adapters")]
selector = adapter.selector_of(ejkernel.modules.operations.pooling._mean_pooling_executor)
print(json.dumps([problem.op for problem in selector.cache.keys()]))
"""
    env = {**os.environ, "TUNEBOOK_HOME": str(tmp_path / "book")}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == ["mean_pooling@v0"]


def bench_operations():
    sys.path.insert(0, os.fspath(importlib.resources.files("tunebook")) + "/../../bench")
    return importlib.import_module("ejkernel_ops")


QUICK = ["attention", "mean_pooling", "flash_attention", "scaled_dot_product_attention", "grouped_matmul", "rwkv4"]


@pytest.mark.parametrize("name", QUICK)
@pytest.mark.parametrize("way", ["eager", "jit", "grad"])
def test_operations_compute_the_same(name, way):
    bench = bench_operations()
    args = bench.arrays()
    ours = bench.program(name, way)(*args)
    adapter.uninstall()
    theirs = bench.program(name, way)(*args)
    assert np.allclose(np.asarray(ours, np.float32), np.asarray(theirs, np.float32), rtol=1e-4, atol=1e-5)


def test_an_operation_spread_over_a_mesh_is_tuned(recwarn):
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, columns = jax.sharding.PartitionSpec("d", None), jax.sharding.PartitionSpec(None, "d")
    x, y = jnp.arange(128.0).reshape(8, 16), jnp.arange(128.0).reshape(16, 8)
    out = ej.all_gather_matmul(x, y, "d", mesh=mesh, in_specs=(rows, columns), out_specs=columns)
    assert np.allclose(out, x @ y)
    assert [each for each in recwarn if issubclass(each.category, tb.TunebookWarning)] == []


def test_the_selector_of_an_executor_explains_itself():
    run = executor()
    run(Doubled(), X)
    selector = adapter.selector_of(run)
    assert isinstance(selector, tb.ConfigSelectorChain)
    assert [problem.op for problem in list(selector.cache.keys())] == ["doubled@v0"]


class WithoutGradient(Doubled):
    def run(self, x, *, cfg):
        return jax.pure_callback(lambda x: np.asarray(x) * 2, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def test_where_gradients_are_asked_for_and_missing_the_heuristic_answers_and_stays():
    events = []
    run = executor(events, validate_backward=True)
    with pytest.warns(tb.TunebookWarning, match="doubled@v0 is not tuned: .*no gradient"):
        assert run.choose_config(WithoutGradient(), X) == Block(1)
    told = names(events)
    assert "autotune_start" not in told, "nothing is measured, as in ejkernel"
    run.choose_config(WithoutGradient(), X)
    assert names(events)[len(told) :] == ["heuristics"]
    assert len(adapter._answerer(run.chooser)._memo._answers.known) == 1


@pytest.mark.parametrize("name", ["attention", "scaled_dot_product_attention"])
def test_a_warm_call_under_grad_makes_fewer_calls_than_ejkernels(name):
    bench = bench_operations()
    function, args = bench.program(name, "grad"), bench.arrays()
    counts = {}
    for side in bench.SIDES:
        bench.use(side)
        for _ in range(4):
            function(*args)
        calls = []

        def note(frame, event, _arg, calls=calls):
            module = frame.f_globals.get("__name__", "").partition(".")[0]
            if event == "call" and module in ("ejkernel", "tunebook"):
                calls.append(frame.f_code.co_name)

        sys.setprofile(note)
        try:
            function(*args)
        finally:
            sys.setprofile(None)
        counts[side] = len(calls)
    assert 0 < counts["tunebook"] < counts["ejkernel"]


@pytest.mark.filterwarnings("ignore:.* is not tuned. no gradient")
@pytest.mark.parametrize("way", ["eager", "grad"])
@pytest.mark.parametrize("name", ["recurrent_attention", "lightning_attention"])
def test_an_operation_whose_candidates_have_no_gradient_does_not_ask_the_tiers_in_each_call(name, way, monkeypatch):
    bench = bench_operations()
    function, args = bench.program(name, way), bench.arrays()
    for _ in range(2):
        function(*args)
    monkeypatch.setattr(tb.ConfigSelectorChain, "select", None)  # asking the tiers again would raise
    function(*args)


@pytest.mark.parametrize(
    ("ours", "more", "expected"),
    [
        (1.0, 0, 11 / 12),  # the same work: choosing alone decides
        (4.0, 0, 14 / 12),
        (1.0, 5, 11.5 / 12),  # 5 of 100 calls more cost 5 % of the rest
        (1.0, -5, 11 / 12),  # fewer calls count as none fewer
        (0.0, None, 1.5),  # other programs run: the calls as timed decide
    ],
)
def test_the_bench_decides_a_warm_call_by_choosing_and_by_the_calls_that_it_makes_more(ours, more, expected):
    warm = {"ejkernel": [12.0] * 3, "tunebook": [18.0 if more is None else 10.0 + ours] * 3}
    chose = {"ejkernel": [2.0] * 3, "tunebook": [ours] * 3}
    assert bench_operations().by_work(warm, chose, {"calls": 100, "more calls": more}) == pytest.approx(expected)


@pytest.mark.filterwarnings("ignore:.*os.fork")  # these children do not use jax
def test_the_bench_goes_on_after_a_process_that_died():
    bench = bench_operations()
    assert bench.in_a_fork(os._exit, 3) == {"error": "the process ended with status 3"}
    assert bench.in_a_fork(int, "x")["error"].startswith("ValueError")


# ------------------------------------------------------------------------------------------- shipped, and trusted

PROGRAM = """
import json, os, sys
import jax, jax.numpy as jnp
jax.__version__ = os.environ.get("PRETEND_JAX", jax.__version__)
import ejkernel.modules as ej
from ejkernel.modules.operations import pooling
import tunebook.adapters.ejkernel as adapter

adapter.install()
said = []

def listen(event, **data):
    if event in ("cache_hit", "heuristics", "autotune_start"):
        said.append([event, data.get("level"), data.get("trust"), str(data["cfg"]) if "cfg" in data else ""])

matmuls = sys.modules["ejkernel.modules.operations.grouped_matmul"]  # its package has a function of this name
for executor in (pooling._mean_pooling_executor, matmuls._grouped_matmul_executor):
    executor.chooser.on_event = listen

def test_the_operations():
    pooled = ej.mean_pooling(jnp.ones((1, 64, 16)))
    assert pooled.shape == (1, 16)
    made = ej.grouped_matmul(jnp.ones((64, 32)), jnp.ones((4, 32, 16)), jnp.full(4, 16, jnp.int32))
    assert made.shape == (64, 16)

if __name__ == "__main__":
    test_the_operations()
    print(json.dumps(said))
"""


class Shipped:
    """A program of ejkernel's operations, and books that it runs with."""

    def __init__(self, folder):
        self.folder = folder
        (folder / "test_program.py").write_text(PROGRAM)

    def do(self, *command, home="own", **variables):
        env = {**os.environ, "TUNEBOOK_HOME": str(self.folder / home), "PYTHONWARNINGS": "ignore", **variables}
        env["EJKERNEL_PERSISTENT_CACHE_DIR"] = str(self.folder / "theirs")
        return subprocess.run(
            [sys.executable, *command], cwd=self.folder, env=env, capture_output=True, text=True, check=False
        )

    def events(self, **options):
        done = self.do("test_program.py", **options)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    def tunebook(self, *arguments, **options):
        done = self.do("-m", "tunebook", *arguments, **options)
        assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def shipped(tmp_path_factory):
    """Two of ejkernel's operations, tuned into the book `own`, and packed into the book `server`."""
    made = Shipped(tmp_path_factory.mktemp("shipped"))
    assert [event for event, *_ in made.events()] == ["autotune_start", "autotune_start"]
    made.tunebook("pack", "server/v1/packs/ejkernel.db")
    return made


@pytest.mark.parametrize(("jax_version", "rung"), [(None, None), ("99.0", "versions")])
def test_a_pack_of_operations_is_served_by_frozen_programs_also_after_an_update_of_jax(shipped, jax_version, rung):
    before = {} if jax_version is None else {"PRETEND_JAX": jax_version}
    events = shipped.events(home="server", TUNEBOOK_MODE="frozen", **before)
    assert [event[:3] for event in events] == [["cache_hit", "persistent", rung]] * 2
    assert shipped.events(home="empty", TUNEBOOK_MODE="frozen")[0][0] == "heuristics"


def test_books_of_operations_are_merged_by_the_preferred_rule(shipped):
    own = open_store(shipped.folder / "own")
    (record,) = [r for r in own.items() if r.problem.op.startswith("mean_pooling")]
    halved = {name: v // 2 if name.startswith("block") else v for name, v in record.head.config["v"].items()}
    there = replace(record.head, config={**record.head.config, "v": halved})  # another machine chose other blocks
    later = {**record.body.provenance, "when": record.body.provenance["when"] + 60}
    open_store(shipped.folder / "other").put(Record(there, replace(record.body, provenance=later)))
    for rule, expected in (("newer", there.config), ("mine", record.head.config)):
        shipped.tunebook("merge", "own", home=rule)
        shipped.tunebook("merge", "other", "--prefer", rule, home=rule)
        assert open_store(shipped.folder / rule).get(record.problem).head.config == expected


@pytest.mark.parametrize(
    ("home", "mode", "code", "said"),
    [
        ("server", "frozen", 0, "2 kernels"),
        ("server", "replay", 0, "2 kernels"),
        ("empty", "frozen", 1, "the run fails: the book does not answer these problems"),
    ],
)
def test_a_test_run_of_operations_says_whether_the_pack_covers_them(shipped, home, mode, code, said):
    strict = ["--tunebook-strict", "-p", "pytest_tunebook"]
    done = shipped.do("-m", "pytest", "-q", f"--tunebook={mode}", *strict, "test_program.py", home=home)
    assert (done.returncode, said in done.stdout) == (code, True), done.stdout


@pytest.mark.parametrize("combine", ["mean", "geomean", "relative", "max"])
def test_calls_of_an_operation_are_tuned_together(combine):
    from ejkernel.modules.operations import pooling

    events = []
    run = executor(events)
    arrays = [jnp.ones((1, rows, 16)) for rows in (32, 64)]
    rest = {"chunk_size": 32, "cu_seqlens": None, "platform": None}
    invs = [tb.Invocation("mean_pooling", (), {"x": x, **rest}) for x in arrays]
    selector, kernel = adapter.selector_of(run), adapter.kernel_of(pooling.MeanPooling())
    chosen = selector.tune_together(invs, kernel, combine=combine).config
    events.clear()
    for x in arrays:
        assert run.choose_config(pooling.MeanPooling(), x=x, **rest) == chosen
    assert names(events) == ["cache_hit", "cache_hit"]
