"""How the winner of a kernel changes with the size of its calls."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Final, NamedTuple

from tunebook._keys.call_key import size_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tunebook._report.entry import ReportEntry

LINES: Final = 12  # kernels and devices that are shown, those with the most sizes first
POINTS: Final = 24  # sizes on a line; of more, neighbours share a point
_READ: Final = 400  # entries of a kernel and device whose sizes are read
LETTERS: Final = "ABCDEFGH"
OTHERS: Final = "+"  # the letter of all rarer winners


class SizePoint(NamedTuple):
    """Entries of about one size: the most frequent winner, as a letter, and the time of the fastest of them."""

    size: float
    letter: str
    config: str
    best_s: float | None
    entries: int


class SizeLine(NamedTuple):
    """The winners of a kernel on a device by size. `winners` has the configuration of each letter."""

    op: str
    device: str
    points: tuple[SizePoint, ...]
    winners: tuple[tuple[str, str], ...]


def lines_of(entries: Iterable[ReportEntry]) -> tuple[SizeLine, ...]:
    """Return a line for each kernel and device with winners of at least two sizes, the most sizes first."""
    members: dict[tuple[str, str], list[ReportEntry]] = defaultdict(list)
    for entry in entries:
        if entry.config:
            members[entry.problem.op, entry.problem.device].append(entry)
    largest = sorted(members.items(), key=lambda item: -len(item[1]))[: 2 * LINES]
    found = (_line(op, device, each) for (op, device), each in largest)
    lines = [line for line in found if len(line.points) > 1]
    return tuple(sorted(lines, key=lambda line: (-len(line.points), line.op, line.device))[:LINES])


def _line(op: str, device: str, entries: Sequence[ReportEntry]) -> SizeLine:
    some = entries[:: -(-len(entries) // _READ)]
    sized = [(size, entry) for entry in some if (size := size_of(entry.problem.call_key)) is not None]
    sized.sort(key=lambda pair: pair[0])
    counts = Counter(entry.config for _, entry in sized)
    letters = {config: letter for letter, (config, _) in zip(LETTERS, counts.most_common(), strict=False)}
    sizes = sorted({size for size, _ in sized})
    place = {size: index * min(POINTS, len(sizes)) // len(sizes) for index, size in enumerate(sizes)}
    groups: dict[int, list[tuple[float, ReportEntry]]] = defaultdict(list)
    for size, entry in sized:
        groups[place[size]].append((size, entry))
    points = []
    for each in groups.values():
        ((config, _),) = Counter(entry.config for _, entry in each).most_common(1)
        best_s = min((entry.best_s for _, entry in each if entry.best_s), default=None)
        points.append(SizePoint(each[len(each) // 2][0], letters.get(config, OTHERS), config, best_s, len(each)))
    return SizeLine(op, device, tuple(points), tuple((letter, config) for config, letter in letters.items()))
