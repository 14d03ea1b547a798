"""A Ray cluster of one node with two GPUs that do not exist, and recordings tuned on it. Prints one JSON object.

To be run inside a network namespace of its own: Ray replaces 127.0.0.1 by the address of an interface.

usage: farm_ray_process.py STAGE
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import farm_kernels
import numpy as np

import tunebook as tb
from tunebook import fleet
from tunebook._selection.persistent_cache import default_book
from tunebook.fleet._farm.clusters import RayCluster


def tuned(calls, over="ray://auto"):
    report = fleet.tune_recording(calls, over=over)
    return {
        "counts": report.counts,
        "tries": sorted(r.tries for r in report.results),
        "details": [r.detail for r in report.results],
    }


def kill_the_stuck(stage):
    """Kill the worker that is stuck from outside, and let the next one through."""
    while not (stage / "log").exists() or "stuck" not in (stage / "log").read_text():
        time.sleep(0.05)
    line = next(line for line in (stage / "log").read_text().splitlines() if line.startswith("stuck"))
    os.kill(int(line.split()[2]), signal.SIGKILL)
    (stage / "go").touch()


def from_outside(calls):
    """Tune through the client server, which gives itself 30 s to start, and on a busy machine may need more."""
    said = []
    for _ in range(3):
        try:
            return tuned(calls, "ray://10.99.0.1:10001")
        except tb.Unsupported as error:
            said.append(str(error))
    return {"counts": said}


def scenes(stage):
    with tb.record() as calls:
        for n in range(1, 4):
            farm_kernels.quick(np.ones(n))
    yield "first", tuned(calls)
    yield "records", len(list(default_book().items()))
    yield "again", tuned(calls)
    known = calls

    with tb.record() as calls:
        farm_kernels.deadly(np.ones(1))
        farm_kernels.quick(np.ones(9))
    (stage / "deaths").write_text("100")
    yield "deadly", tuned(calls)

    (stage / "go").touch()
    with tb.record() as calls:
        farm_kernels.stuck(np.ones(1))
    (stage / "go").unlink()
    (stage / "log").unlink()
    killer = threading.Thread(target=kill_the_stuck, args=(stage,))
    killer.start()
    yield "killed", tuned(calls)
    killer.join()

    with tb.record() as calls:
        farm_kernels.quick(np.ones(20))
    (call,) = calls
    calls._calls = {call.problem: replace(call, problem=call.problem._replace(device="gpu:Made Up 1"))}
    yield "wrong platform", tuned(calls)

    yield "from outside", from_outside(known)

    cluster = RayCluster("auto")
    yield (
        "workers",
        sorted([worker.kind.partition(":")[0], worker.device.split()[-1]] for worker in cluster.workers()),
    )
    cluster.close([])


if __name__ == "__main__":
    limits = ["--num-cpus=4", "--num-gpus=2", "--object-store-memory=80000000", "--include-dashboard=false"]
    start = [Path(sys.executable).with_name("ray"), "start", "--head", f"--temp-dir={os.environ['RAY_TMPDIR']}"]
    subprocess.run([*start, *limits, "--disable-usage-stats"], check=True, stdout=subprocess.DEVNULL)
    print(json.dumps(dict(scenes(Path(sys.argv[1])))))
