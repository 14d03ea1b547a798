"""The jax examples run as they stand."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def examples(monkeypatch):
    for folder in ("examples", "bench"):
        monkeypatch.syspath_prepend(ROOT / folder)
    yield
    for name in ("jax_pallas", "jax_transformer", "jax_gpu"):
        sys.modules.pop(name, None)


def test_pallas_kernels_are_tuned_and_blocks_that_do_not_divide_are_caught(examples, capsys):
    import jax_pallas

    jax_pallas.main(64)
    printed = capsys.readouterr().out
    assert "matmul of (64, 64) and (64, 64)" in printed
    assert "softmax of (64, 64)" in printed
    if jax_pallas.INTERPRETED:  # compiled for a GPU, blocks are powers of two, and 48 is no candidate
        assert "wrong-result: output is off" in printed, "a block of 48 in a sum of 64"


def test_a_training_step_is_recorded_tuned_and_run(examples, capsys):
    import jax_transformer

    jax_transformer.main(batch=2, length=64)
    printed = capsys.readouterr().out
    assert "2 tunable calls in the step" in printed
    assert printed.count("tuned  jax_transformer.") == 2
    assert printed.count("loss ") == 3


def test_every_way_to_attend_computes_the_same(examples):
    import jax
    import jax_transformer
    import numpy as np

    q, k, v = (jax_transformer.random(np.zeros((2, 64, 8), np.float32), seed) for seed in range(3))
    with jax.default_matmul_precision("float32"):  # GPUs would take TF32, which is off by 1e-3
        expected = jax_transformer.whole_attention(q, k, v)
        for block in (16, 32, 64):
            assert np.allclose(jax_transformer.attention_in_blocks(q, k, v, block), expected, atol=1e-5)


@pytest.mark.slow
def test_the_benchmark_for_a_gpu_runs_on_a_cpu_with_and_without_a_profiler(examples, capsys, monkeypatch, tmp_path):
    import jax_gpu
    import jax_pallas

    from tunebook.adapters._jax.profiler import ProfilerTimer

    if not jax_pallas.INTERPRETED:
        pytest.skip("there is a GPU, on which the benchmark itself runs")
    monkeypatch.setattr(jax_gpu, "ROUNDS", 3)
    out = tmp_path / "found.json"
    assert jax_gpu.main(["--size", "32", "--limit", "0", "--out", str(out)]) == 0
    assert list(json.loads(out.read_text())["cases"]) == ["matmul 32 cubed"], "time was left for one"
    on_the_host = ProfilerTimer(counts=lambda plane, _line: plane == "/host:CPU")
    monkeypatch.setattr(jax_gpu, "timer_for", lambda _arguments: on_the_host)
    assert jax_gpu.main(["--size", "32", "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert len(found["cases"]) == 3
    for case in found["cases"].values():
        assert case["error"] < 1e-3
        assert set(case["clocks"]) == {"host-clock", "device-profiler"}
        assert min(case["best"]["us"], case["xla_us"]) > 0
    assert "matmul 32 cubed          device-profiler" in capsys.readouterr().out
