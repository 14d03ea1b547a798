"""A parent process that the test kills: tunes a recording, and prints its progress.

usage: farm_parent.py RECORDING OVER
"""

from __future__ import annotations

import sys

from tunebook import fleet

if __name__ == "__main__":
    report = fleet.tune_recording(
        sys.argv[1],
        over=sys.argv[2],
        on_step=lambda step: print(step.latest.status if step.latest else "sent", flush=True),
    )
    print(report.counts, flush=True)
