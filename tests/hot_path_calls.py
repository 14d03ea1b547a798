"""Run the calls of bench/hot_path.py in forked children, to have their instructions counted; see the test beside it.

Everything is imported and warmed up before the forks, so that children differ by their calls alone. Prints a line per
child: case, number of calls, process id.
"""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))

from hot_path import arrays, hand_written, hand_written_with_layout, listener, overlay_elsewhere, pure, three_arrays
from interleaved import Case, loop_for

FEW, MANY = 500, 2500

ONE = [(*arrays(3, (512, 512)), 3, True)]
TWO = [*ONE, (*arrays(3, (1024, 384)), 3, True)]


def cases() -> list[Case]:
    return [
        Case("hand-written", hand_written(), ONE),
        Case("hand-written-with-layout", hand_written_with_layout(), ONE),
        *tuned("accelerated", nullcontext()),
        *tuned("pure", pure()),
    ]


def tuned(way, defining) -> list[Case]:
    """Return the calls of kernels that are defined in a with-block."""
    with defining:
        default = three_arrays()
        return [
            Case(f"{way}:layout=False", three_arrays(layout=False), ONE),
            Case(f"{way}:default", three_arrays(), ONE),
            Case(f"{way}:two-shapes", three_arrays(), TWO),
            Case(f"{way}:overlay-elsewhere", default, ONE, around=lambda: overlay_elsewhere(default)),
            Case(f"{way}:listener", three_arrays(on_event=listener), ONE),
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
