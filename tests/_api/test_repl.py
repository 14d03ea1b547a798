"""In a REPL every public object shows in a few lines, and completion offers public names alone."""

from __future__ import annotations

import importlib
import types

import pytest
from kernels import FakeClock, PretendKernel, fake_tuner

import tunebook as tb
from tunebook import search, stores
from tunebook.adapters.numpy import specialised


def tuned_kernel(clock, store):
    @tb.tunable(
        space=tb.Space(block=list(range(1, 13))),
        heuristic={"block": 1},
        store=store,
        tuner=fake_tuner(clock),
        name="mm",
    )
    def matmul(n, *, config):
        if config.block == 7:
            raise ValueError("no")
        clock.spend(1e-3 + config.block * 1e-4)
        return n

    return matmul


def objects(tmp_path):
    matmul = tuned_kernel(FakeClock(), tmp_path / "book")
    tuned = tb.tune(matmul, 1)
    kernel = PretendKernel(FakeClock(), {1: 1.0})
    with tb.record() as recording:
        matmul(1)
    cache = tb.ConfigCache()
    chain = tb.ConfigSelectorChain(cache)
    ways = tb.choice(a=sum, b=max)
    space = tb.Space(block=list(range(1, 100)))
    return {
        "tuned": tuned,
        "measurement": tuned.measurements[0],
        "verdict": tuned.verdict,
        "verified": tb.verify(matmul, 1),
        "explanation": matmul.explain(1),
        "explanation of a miss": matmul.explain(2),
        "problem": matmul.problem(1),
        "recording": recording,
        "outcome": tb.tune_all(recording)[0],
        "record": tb.record(),
        "selector": matmul.selector,
        "chain": chain,
        "cache": cache,
        "persistent": tb.PersistentCache("x", tmp_path / "book"),
        "executor": tb.Executor(chain),
        "kernel": kernel,
        "function kernel": matmul.kernel,
        "tune cache": tb.TuneCache("x", "cpu", tmp_path / "tc"),
        "tuner": tb.Tuner(),
        "choice": ways,
        "option": tb.Option(sum),
        "policy": tb.AutotunePolicy(),
        "result": tb.AutotuningResult("cpu", []),
        "overlay": matmul.overlay(block=2),
        "policy override": tb.policy_override(chain, allow_autotune=False),
        "forward": tb.forward_autotune_only(),
        "overlays": tb.overlay_cache({}),
        "invocation": tb.Invocation("x", (list(range(10_000)),), {}),
        "space": space,
        "config": next(iter(space)),
        "table": tb.table("t", space=[{"a": 1}], key=("n",), store=False),
        "specialised": specialised(lambda config: config),
        "peak": tb.Peak(flops_per_s=1.0, bytes_per_s=1.0),
        "spec": tb.ArraySpec("numpy", "float32", (1,)),
        "directory": stores.open_store(tmp_path / "book"),
        "json": stores.open_store(tmp_path / "a.json"),
        "memory": stores.MemoryStore(),
        "random": search.Random(space),
        "guided": search.Guided(space),
        "portfolio": search.Portfolio(space),
    }


def test_every_public_object_shows_in_three_lines_and_says_what_it_is(tmp_path):
    for name, thing in objects(tmp_path).items():
        text = repr(thing)
        assert len(text.splitlines()) <= 3, name
        assert len(text) <= 600, (name, text)
        assert " object at 0x" not in text, (name, text)


def test_the_result_of_a_tuning_shows_its_choice_its_time_and_its_failures():
    matmul = tuned_kernel(FakeClock(), False)
    text = repr(tb.tune(matmul, 1))
    assert "Config(block=1): 1.1 ms, fastest, 12 candidates, 1 failed, 12 tried" in text
    assert repr(matmul.explain(1)) == "<Explanation of mm@v0: Config(block=1) from memory; print it for the reasons>"
    assert "from memory" in str(matmul.explain(1))


def test_an_outcome_names_the_call_its_status_and_its_configuration():
    matmul = tuned_kernel(FakeClock(), False)
    with tb.record() as calls:
        matmul(1)
        matmul("x")
    first, *rest = sorted(tb.tune_all(calls), key=lambda outcome: outcome.call.problem)
    assert repr(first) == "<Outcome mm@v0 n='x': tuned Config(block=1), 1.1 ms; 12 tried, 1 of them failed>"
    assert repr(tb.tune_all(calls)[0]).endswith(": known Config(block=1); memory>")
    failed = first._replace(status="failed", tuned=None, config=None, detail="every candidate failed: no\n  all")
    assert repr(failed) == "<Outcome mm@v0 n='x': failed; every candidate failed: no>"
    assert len(rest) == 1


def test_a_recording_names_its_kernels_before_in_and_after_its_block():
    matmul = tuned_kernel(FakeClock(), False)
    block = tb.record()
    assert repr(block) == "<record: use it as `with tunebook.record() as recording:`>"
    with block as recording:
        assert repr(recording) == "<Recording of 0 kinds of calls>"
        matmul(1)
        matmul(2)
        assert repr(block) == f"<record: {recording!r}>"
    assert repr(recording) == "<Recording of 2 kinds of calls: mm@v0 (2)>"
    assert len(recording) == 2


def test_a_recording_can_still_decorate_a_function():
    matmul = tuned_kernel(FakeClock(), False)

    @tb.record()
    def run():
        return matmul.explain(1).selection.tried

    assert dict(run())["autotune"] == "off: a recording is on"


PUBLIC = ["search", "stores", "formats", "fleet", "testing", *(f"adapters.{n}" for n in ("native", "numpy"))]


@pytest.mark.parametrize("name", PUBLIC)
def test_completion_offers_the_public_names_of_a_module_alone(name):
    module = importlib.import_module(f"tunebook.{name}")
    offered = [each for each in dir(module) if not each.startswith("_")]
    assert offered
    for each in offered:
        thing = getattr(module, each)
        assert not isinstance(thing, types.ModuleType), each
        home = getattr(thing, "__module__", "tunebook")
        assert isinstance(home, str)
        assert home.startswith("tunebook"), each


def test_metrics_and_the_package_offer_their_own_names():
    assert {"on", "off", "text", "serve"} <= set(dir(tb.metrics))
    assert not {"Any", "Final", "NamedTuple", "os", "threading"} & set(dir(tb.metrics))
    assert not [name for name in dir(tb) if name.startswith("_") and not name.startswith("__")]
