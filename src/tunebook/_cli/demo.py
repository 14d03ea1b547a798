"""Tune a sieve of Eratosthenes in plain Python, show its best candidates, and explain the choice.

A second process then finds the answer in the book. Takes a few seconds, needs no other package, and does not touch your
own book.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tunebook._api.tunable import tunable, tune
from tunebook._base.config_codec import readable
from tunebook._base.durations import ratio_text
from tunebook._cli._terminal import TextColumn, wrapped
from tunebook._cli._verb import DONE, ArgumentParser, Namespace, Terminal, Verb
from tunebook._cli.explain import write
from tunebook._cli.show import EARLY
from tunebook._space.space import Space
from tunebook._tuning.progress import progress_for, seconds_text

if TYPE_CHECKING:
    from tunebook._api.tunable_types import Tunable
    from tunebook._tuning.job import Tuned

LIMIT: Final = 2_000_000
_SHOWN: Final = 6  # candidates, beside the chosen one and the heuristic's
DEFAULT: Final = {"segment": 16384, "skip_even": False}
_ABOUT: Final = (
    "A sieve in plain Python with 10 configurations: the length of its segments, and whether it skips even numbers. "
    "Each configuration is run, checked against the one of its heuristic, and timed in turns."
)
# Not `-m`: functions in `__main__` count as the user's code, functions of an installed package do not, so the second
# process would see a changed kernel, and tune again.
_SECOND: Final = "import sys; from tunebook._cli.demo import answer; answer(sys.argv[1])"
_COLUMNS: Final = (
    TextColumn("#", "right", style="dim"),
    TextColumn("time", "right", style="bold"),
    TextColumn("", style="green", from_width=100),
    TextColumn("configuration"),
    TextColumn("", style="cyan", give=1),
)


def sieve_in(book: Path) -> Tunable[int]:
    """Return the kernel, with its entries in a book."""

    # Short segments need more turns of the loop, long segments do not fit into the processor's cache. Skipping even
    # numbers halves the work, for a little more arithmetic.
    @tunable(
        name="sieve",
        space=Space(segment=[4096, 16384, 65536, 262144, 1048576], skip_even=[False, True]),
        heuristic=DEFAULT,
        store=book,
    )
    def sieve(limit: int, *, config: Any) -> int:
        step = 2 if config.skip_even else 1
        base = [n for n in range(2, int(limit**0.5) + 2) if all(n % d for d in range(2, int(n**0.5) + 1))]
        count = 1 if config.skip_even else 0
        for low in range(3 if config.skip_even else 2, limit, config.segment * step):
            size = -(-(min(limit, low + config.segment * step) - low) // step)
            marks = bytearray(b"\1") * size
            for prime in base:
                if config.skip_even and prime == 2:
                    continue
                first = max(prime * prime, -(-low // prime) * prime)
                first += prime if config.skip_even and first % 2 == 0 else 0
                start = (first - low) // step
                if start < size:
                    marks[start::prime] = bytes(len(range(start, size, prime)))
            count += marks.count(1)
        return count

    return sieve


def _arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--keep", metavar="DIRECTORY", help="keep the book there (default: delete it)")


def _run(options: Namespace, terminal: Terminal) -> int:
    with tempfile.TemporaryDirectory(prefix="tunebook-demo-") as made:
        book = Path(options.keep or made).expanduser()
        terminal.line(f"How many primes are there below {LIMIT:,}?", "bold")
        sieve = sieve_in(book)
        terminal.lines([*wrapped(_ABOUT, min(terminal.width, 90)), ""])
        tuned = tune(sieve, LIMIT, progress=progress_for(True, "sieve", terminal.out))  # noqa: FBT003 - as users write it
        terminal.line()
        _ranking(tuned, terminal)
        terminal.line("\nsieve.explain(...) explains the choice:\n", "bold")
        write(sieve.explain(LIMIT), terminal)
        terminal.line("\nA second process makes the same call:", "bold")
        terminal.flush()
        second = [sys.executable, "-c", _SECOND, str(book)]
        terminal.line(subprocess.run(second, capture_output=True, text=True, check=True).stdout)  # noqa: S603 - our own module
        if options.keep:
            terminal.line(f"The book is kept in {book}. List it with:  tunebook ls --book {book}", "dim")
        else:
            terminal.line("The book of this demo was deleted; keep it with  tunebook demo --keep DIRECTORY", "dim")
    return DONE


def _ranking(tuned: Tuned[Any], terminal: Terminal) -> None:
    ranking = () if tuned.verdict is None else tuned.verdict.ranking
    rows, left_out = [], 0
    for rank, ranked in enumerate(ranking, 1):
        factor = ranked.value_s / ranking[0].value_s
        config = readable(ranked.measurement.config)
        notes = ["chosen"] if config == readable({**tuned.config}) else []
        notes += [f"heuristic, {ratio_text(factor)}"] if config == readable({**DEFAULT}) else []
        bar = "━" * max(1, min(round(14 / factor), 20))
        if rank <= _SHOWN or notes:
            shown = (config, "bold" if notes else "")
            notes += ["eliminated"] if ranked.measurement.dropped else []
            number = "" if ranked.measurement.dropped else str(rank)
            rows.append((number, seconds_text(ranked.value_s), bar, shown, ", ".join(notes)))
        else:
            left_out += 1
    terminal.table(_COLUMNS, rows, "  ")
    if left_out:
        terminal.line(f"  ... {left_out} more", "dim")
    if any(ranked.measurement.dropped for ranked in ranking):
        terminal.lines(["", *wrapped(EARLY, min(terminal.width, 90))])


def answer(book: str) -> None:
    """Call the kernel in the second process."""
    terminal = Terminal()
    sieve = sieve_in(Path(book))
    events: list[str] = []
    sieve.selector.listen(lambda event, **data: events.append(f"{event} {data.get('level') or ''}".strip()))
    started = time.perf_counter()
    count = sieve(LIMIT)
    took = seconds_text(time.perf_counter() - started)
    again = time.perf_counter()
    sieve(LIMIT)
    later = seconds_text(time.perf_counter() - again)
    found = "in the book, without tuning" if events[0] == "cache_hit persistent" else events[0]
    terminal.lines([f"  {count:,} primes; the configuration was found {found}", f"  first call {took}, later {later}"])


VERB = Verb("tunebook demo", _run, (), _arguments, __doc__)
