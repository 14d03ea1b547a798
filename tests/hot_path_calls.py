"""Run the calls of bench/hot_path.py in forked children, to have their instructions counted; see the test beside it.

Everything is imported and warmed up before the forks, so that children differ by their calls alone. Prints a line per
child: case, number of calls, process id.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))

from hot_path import arrays, hand_written, hand_written_with_layout, listener, overlay_elsewhere, three_arrays
from interleaved import Case, loop_for

FEW, MANY = 500, 2500


def cases() -> list[Case]:
    one = [(*arrays(3, (512, 512)), 3, True)]
    two = [*one, (*arrays(3, (1024, 384)), 3, True)]
    default = three_arrays()
    return [
        Case("hand-written", hand_written(), one),
        Case("hand-written-with-layout", hand_written_with_layout(), one),
        Case("layout=False", three_arrays(layout=False), one),
        Case("default", three_arrays(), one),
        Case("two-shapes", three_arrays(), two),
        Case("overlay-elsewhere", default, one, around=lambda: overlay_elsewhere(default)),
        Case("listener", three_arrays(on_event=listener), one),
    ]


def main() -> None:
    for case in cases():
        loop = loop_for(case)
        with case.around():
            loop(FEW)
            # The parent's own instructions between two forks are in the counts of the later child; in this order they
            # cancel.
            for n in (FEW, MANY, MANY, FEW):
                child = os.fork()
                if child == 0:
                    loop(n)
                    os._exit(0)
                os.waitpid(child, 0)
                print(case.name, n * len(case.calls), child, flush=True)


if __name__ == "__main__":
    main()
