"""A parent process that the test kills: tunes a recording, and prints its progress.

usage: farm_parent.py RECORDING OVER
"""

from __future__ import annotations

import signal
import sys

from tunebook import fleet

if __name__ == "__main__":
    # A shell starts background jobs with Ctrl-C ignored, and children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    report = fleet.tune_recording(
        sys.argv[1],
        over=sys.argv[2],
        on_step=lambda step: print(step.latest.status if step.latest else "sent", flush=True),
    )
    print(report.counts, flush=True)
