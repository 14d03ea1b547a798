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
    assert not any(row["taken_for_transferable"] or row["is_predicted"] for row in found.values())
    assert len(list(bench.rows_of_all(found.values()))) == 4


def test_an_optimum_is_taken_for_transferable_where_devices_that_differ_as_much_agree(bench, tmp_path):
    usual = lambda x, y, z: 1 + abs(x - 64) / 64 + abs(y - 32) / 32 + z / 10
    for device in ("A100", "A4000", "W6600"):
        write_space(tmp_path, device, usual)
    benches = [bench.search.Bench(bench.search_spaces.load(p), None, p) for p in sorted(tmp_path.glob("*.gz"))]
    found = {b.recorded.device: bench.left_out(b, [o for o in benches if o is not b]) for b in benches}
    taken = {device: row["taken_for_transferable"] for device, row in found.items()}
    # A4000 and W6600 are of two makers, and say more than enough about two of one maker; not the other way round.
    assert taken == {"A100": True, "A4000": True, "W6600": False}
    whats = [row[0] for row in bench.rows_of_all(list(found.values()))]
    assert "of these: mean regret with no run" in whats
