"""Starts the ranks of `agreement_ranks.py`, and checks their output."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from limits import HANG_S
from servers import free_port

SCRIPT = Path(__file__).parent / "agreement_ranks.py"
LEASE_S, LONG_S = 2.0, HANG_S / 2  # the second is half of the deadline: nobody waited for it


def run_job(framework, world, tmp_path):
    """Return the output of each rank, None for a killed rank."""
    place = str(free_port()) if framework == "jax" else str(tmp_path / "port")
    started = [_start(framework, rank, world, place, tmp_path / f"{rank}.txt") for rank in range(world)]
    killed = {world - 1} | ({1} if world > 2 else set())
    expected = [-signal.SIGKILL if rank in killed else 0 for rank in range(world)]
    try:
        deadline = time.monotonic() + HANG_S
        while time.monotonic() < deadline and None in [process.poll() for process in started]:
            time.sleep(0.02)
        codes = [process.poll() for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    said = [(tmp_path / f"{rank}.txt").read_text() for rank in range(world)]
    assert codes == expected, "\n".join(f"rank {rank}: {text}" for rank, text in enumerate(said))
    return [None if rank in killed else json.loads(said[rank].splitlines()[-1]) for rank in range(world)]


def _start(framework, rank, world, place, output):
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "PYTHONFAULTHANDLER": "1",
        "JAX_PLATFORMS": "cpu",
        "TUNEBOOK_HOME": str(output.with_suffix("")),  # each has a book of its own, as on machines of their own
    }
    command = [sys.executable, str(SCRIPT), framework, str(rank), str(world), place]
    with output.open("wb") as file:
        return subprocess.Popen(command, env=environment, stdout=file, stderr=file)


def check_job(said):
    """Assert that the ranks that lived used one configuration for each problem, and waited for a bounded time."""
    alive = [ranks for ranks in said if ranks is not None]
    for one in alive:
        assert one["alone"] == 10 * (one["rank"] + 2), "without agreement each has its own"
        (b, _), tuned = one["one hits"]
        assert (b, tuned) == (20, 0), "rank 0 knew it, so nobody tuned"
        assert one["compared in"] < LONG_S
        _, seconds = one["killed in the vote"]
        assert LEASE_S <= seconds < LONG_S
        assert one["in parts"][1] < LONG_S
        assert one["in a trace"] is None or one["in a trace"][0] == 7, "an overlay is the caller's own"
    for name in ("measured", "in any order", "in parts", "in a trace", "killed in the vote", "killed while it tunes"):
        configs = [_configs(one.get(name)) for one in alive]
        assert all(each == configs[0] for each in configs), name
    for one in alive[1:]:
        assert [_ for _, seconds in one["rank 0 never calls"] if seconds > LONG_S] == []
        assert len(one["in parts"][2]) <= 4, "of 8 candidates and the heuristic, those of its part"
    if len(said) > 2:
        assert alive[0]["killed while it tunes"][0] == 40, "rank 2 went on for rank 1"


def _configs(found):
    """Return a result without its times."""
    if isinstance(found, list) and len(found) > 1 and isinstance(found[1], float):
        return found[0] if found[0] != 7 else found
    return found
