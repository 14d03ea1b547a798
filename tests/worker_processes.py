"""A process that is killed while its worker runs a candidate that never ends.

usage: worker_processes.py FILE     the worker's process id is written to FILE, once the candidate runs
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from tunebook._measure.forked_worker import ChildTask, ForkedWorker


def main(file):
    def forever():
        Path(file + ".new").write_text(str(os.getpid()))
        Path(file + ".new").rename(file)
        time.sleep(600)

    job = ChildTask(first=lambda _: forever(), sample=lambda _, __: [])
    with ForkedWorker(job, 600) as worker:
        worker.prepare(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
