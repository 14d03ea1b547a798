"""What `make demo` shows: two kernels in C are tuned, and a second process finds the answers."""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import matmul
import showing
import transpose

import tunebook as tb

KERNELS = (
    (matmul, matmul.matmul, "256 x 256 times 256 x 256", matmul.operands(256, 256, 256)),
    (transpose, transpose.transpose, "1024 x 1024", transpose.operands(1024, 1024)),
)
SHOWN = 5
BAR = 6  # characters: rows fit into 80 columns
BUDGET_S = 12  # a quiet machine needs half of it; a busy one chooses among the candidates that it got to


def main():
    """Run the demo, or its second half."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--home", type=Path, help="keep the book here; by default it is thrown away afterwards")
    parser.add_argument("--again", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.again:
        second_process()
        return
    with tempfile.TemporaryDirectory(prefix="tunebook-demo-") as temporary:
        home = options.home or Path(temporary)
        # Before the first call: that is when the book is looked for.
        os.environ["TUNEBOOK_HOME"] = str(home)
        print(f"The book: {home}\n" if options.home else f"A new book, thrown away afterwards: {home}\n")
        started = time.perf_counter()
        for kernel in KERNELS:
            first_process(*kernel)
        print(f"A second Python process makes the same calls\n{'-' * 44}", flush=True)
        subprocess.run([sys.executable, __file__, "--again"], check=True)
        print(f"\nAll of this took {time.perf_counter() - started:.0f} s. More of it: {command_of('matmul.py')}")


def command_of(example):
    """Return the command that runs an example with this interpreter, with paths relative to the working directory."""
    paths = Path(sys.executable), Path(__file__).resolve().with_name(example)
    here = Path.cwd()
    return shlex.join(str(path.relative_to(here) if path.is_relative_to(here) else path) for path in paths)


def first_process(module, function, title, arguments):
    """Tune a call and show what was tried."""
    heading = f"{function.__name__} (examples/{module.__name__}.c), {title}"
    print(f"{heading}\n{'-' * len(heading)}")
    candidates = f"{len(module.space)} configurations, compiled {os.cpu_count()} at a time"
    print(f"{candidates}, for {BUDGET_S} s at most", flush=True)
    tuned = tb.tune(function, *arguments, progress=True, budget=BUDGET_S)
    print(f"\n{len(tuned.ranking)} were measured. Each was checked against numpy before it was measured:\n")
    show_ranking(showing.times_of(tuned), showing.spelled(tuned.config), showing.spelled(module.default))
    print(f"\nWhy this one? print({function.__name__}.explain(...)) says:\n\n{function.explain(*arguments)}\n")


def show_ranking(times, chosen, heuristic):
    """Print the fastest few, the chosen one, the heuristic's and the slowest, with a bar as long as they are fast."""
    last = 0
    for rank, (name, seconds) in enumerate(times.items(), 1):
        factor = seconds / times[chosen]
        # A candidate with a lower time than the chosen one was slower than it in the rounds that both ran.
        notes = {heuristic: "heuristic", chosen: "chosen"}
        note = notes.get(name, "eliminated" if factor < 1 else "")
        if rank > SHOWN and name not in notes and rank < len(times):
            continue
        if rank > last + 1:
            print("   ...")
        last = rank
        bar = "#" * min(round(BAR / factor), BAR)
        row = f"{rank:3}  {showing.duration(seconds):>8} {showing.ratio(factor):>7}  {bar:{BAR}}  {name}  {note}"
        print(row.rstrip())


def second_process():
    """Make the same calls in a process that has tuned nothing."""
    for _, function, title, arguments in KERNELS:
        events = Counter()
        function.selector.listen(lambda event, seen=events, **facts: seen.update([event, facts.get("level")]))
        first_s = elapsed_s(function, arguments)
        tier = "persistent" if events["persistent"] else "another"
        print(f"{function.__name__}, {title}")
        print(f"  answered by  the {tier} tier, after {events['autotune_start']} tunings")
        print(f"  first call   {showing.duration(first_s)}: reads the book, loads the compiled library, runs")
        print(f"  later calls  {showing.call_time(function, arguments)}")


def elapsed_s(function, arguments):
    """Return the seconds that one call takes."""
    started = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
