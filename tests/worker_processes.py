"""A process that is killed while it has a worker.

usage: worker_processes.py running FILE     the worker runs a candidate that never ends
       worker_processes.py idle FILE        the worker waits, and another fork, which lives on, holds its pipes

The process ids of the worker and of the other fork are written to FILE, once that is so.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

from tunebook._measure.forked_worker import ChildTask, ForkedWorker


def tell(file, *pids):
    Path(file + ".new").write_text(" ".join(map(str, pids)))
    Path(file + ".new").rename(file)


def running(file):
    def forever():
        tell(file, os.getpid())
        time.sleep(600)

    job = ChildTask(first=lambda _: forever(), sample=lambda _, __: [])
    with ForkedWorker(job, 600) as worker:
        worker.prepare(0)


def idle(file):
    job = ChildTask(first=lambda _: [], sample=lambda _, __: [float(os.getpid())])
    worker, pids = ForkedWorker(job, 600, outlives_thread=True), []
    thread = threading.Thread(target=lambda: pids.extend(worker.sample(0, 1).samples_s))
    thread.start()
    thread.join()
    other = os.fork()
    if other:
        tell(file, int(pids[0]), other)
    time.sleep(600)


if __name__ == "__main__":
    {"running": running, "idle": idle}[sys.argv[1]](sys.argv[2])
