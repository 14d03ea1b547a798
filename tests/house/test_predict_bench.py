"""`bench/record_shapes.py` and `bench/predict.py` without a GPU: the recording is read, and shapes are left out."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tunebook.search._size_model import Predicted

ROOT = Path(__file__).parents[2]


@pytest.fixture
def bench(monkeypatch):
    pytest.importorskip("numpy")
    monkeypatch.syspath_prepend(ROOT / "bench")
    import predict

    return predict


def test_a_recording_of_pretend_times_is_read_and_judged(bench, tmp_path):
    pytest.importorskip("triton", reason="triton is not installed")
    pytest.importorskip("torch", reason="torch is not installed")
    file = tmp_path / "shapes.json.gz"
    command = [sys.executable, str(ROOT / "bench" / "record_shapes.py"), "--dry-run", "--out", str(file)]
    command += ["--only", "softmax", "--shapes", "30", "--processes", "1"]
    source = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": source}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "softmax: 25 configurations, 30 shapes" in done.stdout
    examples, configs, device = bench.examples_of([file])
    assert device == "pretend"
    assert {len(example.seconds) for example in examples["softmax"]} == {25}  # two fail everywhere
    rows, _ = bench.unseen_shapes(examples["softmax"], configs["softmax"], cores=132)
    assert {row["sizes"] for row in rows} == {f"{e.sizes['rows']}x{e.sizes['columns']}" for e in examples["softmax"]}
    assert all(0 <= row["after_tries"] <= row["after_8"] <= row["regret"] for row in rows)


def test_no_shape_is_judged_by_a_model_that_has_seen_it(bench, monkeypatch):
    class Model:
        def __init__(self, known, _configs, cores):
            self.known = [example.sizes for example in known]

        def predict(self, sizes):
            assert sizes not in self.known
            return Predicted(["a"], 0.0, 0.0)

    monkeypatch.setattr(bench, "SizeModel", Model)
    examples = [bench.Example({"n": n}, {"a": 1.0, "b": 2.0}) for n in range(25)]
    rows, _ = bench.unseen_shapes(examples, {"a": {}, "b": {}}, cores=1)
    assert sorted(int(row["sizes"]) for row in rows) == list(range(25))
