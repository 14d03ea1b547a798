"""`bench/other_devices.py` on recorded spaces that are made up: the device that is left out is judged by the others."""

import gzip
import json
from itertools import product
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SIZES = [16, 32, 64, 128, 256]


@pytest.fixture
def bench(monkeypatch):
    pytest.importorskip("numpy")
    monkeypatch.syspath_prepend(ROOT / "bench")
    import other_devices

    monkeypatch.setattr(other_devices, "SEEDS", 2)
    return other_devices


def write_space(folder, device, time_of):
    """Write a recorded space of 100 configurations in the format of Kernel Tuner's cache files."""
    params = {"x": SIZES, "y": SIZES, "z": [1, 2, 3, 4]}
    entries = {}
    for x, y, z in product(*params.values()):
        ms = time_of(x, y, z)
        entries[f"{x},{y},{z}"] = {"x": x, "y": y, "z": z, "time": ms, "times": [ms] * 3, "compile_time": 100.0}
    content = {"tune_params_keys": list(params), "tune_params": params, "cache": entries}
    (folder / f"made_{device}.json.gz").write_bytes(gzip.compress(json.dumps(content).encode()))


def test_the_likest_device_chooses_and_a_search_starts_from_the_others(bench, tmp_path):
    usual = lambda x, y, z: 1 + abs(x - 64) / 64 + abs(y - 32) / 32 + z / 10
    write_space(tmp_path, "A100", usual)
    write_space(tmp_path, "A4000", lambda x, y, z: 3 * usual(x, y, z))
    write_space(tmp_path, "W6600", lambda x, y, z: 20 - usual(x, y, z))
    benches = [bench.search.Bench(bench.search_spaces.load(p), None, p) for p in sorted(tmp_path.glob("*.gz"))]
    found = {b.recorded.device: bench.left_out(b, [o for o in benches if o is not b]) for b in benches}
    assert (found["A100"]["by"], found["A4000"]["by"], found["W6600"]["by"]) == ("A4000", "A100", "A4000")
    assert found["A100"]["no_run"]["A4000"] == 0  # the same configuration is the best
    assert found["A100"]["no_run"]["W6600"] > 1
    assert found["A100"]["all"] == [0, 0]
    assert len(list(bench.rows_of(found.values()))) == 9
