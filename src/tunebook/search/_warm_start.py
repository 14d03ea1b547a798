"""What the book knows already: the same kernel on other shapes and other devices."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from tunebook._base.config_codec import fingerprint_of
from tunebook._base.errors import CodecError
from tunebook._statistics.race import typical_s
from tunebook.search._protocol import Observation
from tunebook.search._trial_history import Start

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from tunebook._base.record_format import Record
    from tunebook._base.vocabulary import Json, Problem
    from tunebook._space.space import Config, Space

T = TypeVar("T")

# So many of the fastest of one record are worth a try elsewhere: one alone is unreliable, up to 20 times slower on
# another device than its best.
FROM_EACH: Final = 40
# So many times of one record are read: more say little that is new, and take longer to read.
_READ: Final = 1000
# So many records, the nearest ones, are looked at.
_RECORDS: Final = 8
# What another device's choice is taken to be worth before any problem was measured on both.
_UNKNOWN_AGREEMENT: Final = 0.5


class Times(NamedTuple):
    """One problem as it was measured: seconds by fingerprint, fastest first, and what failed."""

    problem: Problem
    seconds: Mapping[str, float]
    configs: Mapping[str, Json]
    failed: frozenset[str]


def times_of(record: Record) -> Times:
    """Return what a record says about configurations; of one that holds only a choice, that choice."""
    seconds: dict[str, float] = {}
    configs: dict[str, Json] = {}
    failed: set[str] = set()
    for m in record.body.measurements:
        configs[m.fingerprint] = m.config
        if m.failure is None and m.valid_samples_s:
            seconds[m.fingerprint] = min(typical_s(m.valid_samples_s), seconds.get(m.fingerprint, math.inf))
        elif m.failure is not None:
            failed.add(m.fingerprint)
    if record.head.decided and not seconds:
        chosen = fingerprint_of(record.head.config)
        seconds[chosen], configs[chosen] = math.nan, record.head.config
    ordered = dict(sorted(seconds.items(), key=lambda item: item[1]))
    return Times(record.problem, ordered, configs, frozenset(failed - seconds.keys()))


def agreement(here: Iterable[Times], there: Iterable[Times]) -> float:
    """Return what another device's choices are worth here: 1 if they are the best here too, 0.5 if twice as slow.

    It is measured on the problems that both have measured; a guess where there is none.
    """
    mine = {times.problem.call_key: times for times in here}
    worth = []
    for other in there:
        own = mine.get(other.problem.call_key)
        common = [fp for fp in other.seconds if own is not None and fp in own.seconds]
        if own is not None and common:
            worth.append(min(own.seconds.values()) / own.seconds[common[0]])
    return sum(worth) / len(worth) if worth else _UNKNOWN_AGREEMENT


def distance(one: str, other: str) -> float:
    """Return how far apart two call keys are: the sum over their numbers of how many times one doubles to the other.

    Infinite if anything but numbers differs: another dtype or layout is another kernel.

    >>> distance('{"a":{"$array":["numpy","float32",[512,64]]}}', '{"a":{"$array":["numpy","float32",[1024,64]]}}')
    1.0
    """
    if one == other:
        return 0.0
    try:
        mine, theirs = list(_leaves(json.loads(one))), list(_leaves(json.loads(other)))
    except (ValueError, RecursionError):
        return math.inf  # a key_builder may make keys of any form
    if len(mine) != len(theirs):
        return math.inf
    return sum(_apart(a, b) for a, b in zip(mine, theirs, strict=True))


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for name in sorted(value):
            yield name
            yield from _leaves(value[name])
    elif isinstance(value, list):
        yield len(value)
        for item in value:
            yield from _leaves(item)
    else:
        # A bucket is written with a mark before its size.
        number = value[1:] if isinstance(value, str) and value[:1] == "~" and value[1:].isdigit() else None
        yield int(number) if number is not None else value


def _apart(a: Any, b: Any) -> float:
    if type(a) is type(b) and a == b:
        return 0.0
    if type(a) is not int or type(b) is not int or min(a, b) <= 0:
        return math.inf
    return abs(math.log2(a / b))


class WarmStartRecord(NamedTuple):
    """A record that may help, and how much: what its device is worth here, halved with every doubling of a size."""

    times: Times
    worth: float


def sources(records: Iterable[Record], problem: Problem) -> list[WarmStartRecord]:
    """Return the records of a kernel that say something about a problem, the most helpful first."""
    by_device: dict[str, list[Times]] = defaultdict(list)
    for record in records:
        try:
            times = times_of(record)
        except CodecError:
            continue  # its second line is not what it should be: the first still answers calls
        if times.seconds or times.failed:
            by_device[times.problem.device].append(times)
    here = by_device.get(problem.device, [])
    found = []
    for device, all_times in by_device.items():
        agreed = 1.0 if device == problem.device else agreement(here, all_times)
        for times in all_times:
            far = distance(times.problem.call_key, problem.call_key)
            if times.problem != problem and math.isfinite(far):
                found.append(WarmStartRecord(times, agreed * 2.0**-far))
    found.sort(key=lambda source: (-source.worth, source.times.problem))
    return found


def start_from(records: Iterable[Record], problem: Problem, space: Space) -> Start:
    """Return where to begin a search: with what was fast elsewhere, the most helpful records in turn, and their times.

    What failed in one of them and was measured in none is tried last.
    """
    useful = sources(records, problem)[:_RECORDS]
    ranked = [list(source.times.seconds)[:FROM_EACH] for source in useful]
    places = [(place, number) for place in range(FROM_EACH) for number in range(len(ranked))]
    in_turn = {ranked[number][place]: number for place, number in places if place < len(ranked[number])}
    first = _configs(space, ((useful[number].times, fp) for fp, number in in_turn.items()))
    worked = {fp for source in useful for fp in source.times.seconds}
    failed = {fp: s.times for s in useful for fp in sorted(s.times.failed) if fp not in worked}
    last = _configs(space, ((times, fp) for fp, times in failed.items()))
    return Start(first, last, [observed for source in useful if (observed := _observed(space, source.times))])


def thinned(ranked: Sequence[T]) -> Sequence[T]:
    """Return the fastest of many, and some of the others, evenly.

    >>> len(thinned(range(300))), len(thinned(range(10_000)))
    (300, 1000)
    """
    half = _READ // 2
    step = max(1, -(-(len(ranked) - half) // half))
    return [*ranked[:half], *ranked[half::step]]


def _observed(space: Space, times: Times) -> list[Observation]:
    """Return the times of one record, if there are enough of them to compare."""
    timed = thinned([(fp, seconds) for fp, seconds in times.seconds.items() if math.isfinite(seconds)])
    found = ((space.decoded(times.configs[fp]), seconds) for fp, seconds in timed)
    observed = [Observation(config, seconds) for config, seconds in found if config is not None]
    return observed if len(observed) > 1 else []


def _configs(space: Space, wanted: Iterable[tuple[Times, str]]) -> Sequence[Config]:
    found = (space.decoded(times.configs[fp]) for times, fp in wanted)
    return [config for config in found if config is not None]
