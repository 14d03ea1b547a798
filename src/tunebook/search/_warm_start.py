"""The times of the same kernel on other shapes and devices: where a search starts, or an answer without tuning."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tunebook._arrays.device_properties import cores_of, likeness, note_recorded
from tunebook._base.config_codec import fingerprint_of
from tunebook._base.errors import CodecError
from tunebook._base.record_format import BLOCKS
from tunebook._keys.call_key import spell_out
from tunebook._statistics.race import typical_s
from tunebook.search._key_numbers import bucket_in
from tunebook.search._strategy import Observation, Start
from tunebook.search._waves import power_of_waves, seconds_here, waves

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from tunebook._base.record_format import Record
    from tunebook._base.vocabulary import Json, Nearness, Problem
    from tunebook._space.space import Space

# This many of the fastest of a record are worth a try elsewhere: one alone is unreliable, up to 20 times slower on
# another device than its best.
FROM_EACH: Final = 40
# At most this many times of a record are read: more say little that is new, and take longer to read.
_READ: Final = 1000
# At most this many records, the nearest, are used.
_RECORDS: Final = 8
# The assumed worth of another device's choice before any problem was measured on both, if the devices' properties are
# not known either. It is the worth of a device whose properties differ by a factor of two.
_UNKNOWN_WORTH: Final = 0.5
# The sizes of problems that are alike differ by this many doublings in all. With two in each of three sizes, a matmul's
# best configuration for one problem was 42 % slower than the other's.
_ALIKE: Final = 2.0
# An answer without tuning comes from this many of the nearest problems.
_NEIGHBOURS: Final = 3


class Times(NamedTuple):
    """The measurements of a problem: seconds by fingerprint, fastest first, and the candidates that failed.

    `blocks` has how many blocks launches have, where that is known.
    """

    problem: Problem
    seconds: Mapping[str, float]
    configs: Mapping[str, Json]
    failed: frozenset[str]
    blocks: Mapping[str, int]


def times_of(record: Record) -> Times:
    """Return the times in a record; a record without measurements has one choice, of unknown time (nan)."""
    seconds: dict[str, float] = {}
    configs: dict[str, Json] = {}
    failed: set[str] = set()
    blocks: dict[str, int] = {}
    for m in record.body.measurements:
        configs[m.fingerprint] = m.config
        if m.failure is None and m.valid_samples_s:
            if isinstance(many := m.extra.get(BLOCKS), int) and many > 0:
                blocks[m.fingerprint] = many
            seconds[m.fingerprint] = min(typical_s(m.valid_samples_s), seconds.get(m.fingerprint, math.inf))
        elif m.failure is not None and m.values_from == "call":
            failed.add(m.fingerprint)
    if record.head.decided and not seconds:
        chosen = fingerprint_of(record.head.config)
        seconds[chosen], configs[chosen] = math.nan, record.head.config
    ordered = dict(sorted(seconds.items(), key=lambda item: item[1]))
    return Times(record.problem, ordered, configs, frozenset(failed - seconds.keys()), blocks)


def choices_worth(here: Iterable[Times], there: Iterable[Times], alike: float | None = None) -> float:
    """Return the worth of another device's choices here: 1 if they are the best here too, 0.5 if twice as slow.

    It is the mean over the problems that both devices have measured; if there are none, how alike the devices are.
    """
    mine = {times.problem.call_key: times.seconds for times in here}
    worth = []
    for other in there:
        own = mine.get(other.problem.call_key, {})
        choice = next((fp for fp in other.seconds if fp in own), None)
        if choice is not None:
            worth.append(min(own.values()) / own[choice])
    return sum(worth) / len(worth) if worth else _UNKNOWN_WORTH if alike is None else alike


def distance(one: str, other: str, nearness: Nearness = "ratio") -> float:
    """Return how far apart two call keys are: the sum over their numbers of how many times one doubles to the other.

    Infinite if anything but numbers differs: another dtype or layout is another kernel. `nearness` measures otherwise.

    >>> distance('{"a":{"$array":["numpy","float32",[512,64]]}}', '{"a":{"$array":["numpy","float32",[1024,64]]}}')
    1.0
    """
    return math.fsum(_doublings(one, other, nearness))


def _doublings(one: str, other: str, nearness: Nearness = "ratio") -> list[float]:
    """Return for each number of two call keys how many times one doubles to the other; infinite as for `distance`."""
    if one == other:
        return []
    try:
        leaves = list(zip_longest(_leaves(json.loads(one)), _leaves(json.loads(other)), fillvalue=math.nan))
    except (ValueError, RecursionError):
        return [math.inf]  # a key_builder may make keys of any form
    found = []
    for a, b in leaves:
        if type(a) is type(b) and a == b:
            continue
        if type(a) is not int or type(b) is not int:
            return [math.inf]
        found.append(_GAPS[nearness](a, b))
    return found


# From the number of an entry to the number asked for. Below is always nearer than above.
_GAPS: Final[dict[Nearness, Callable[[int, int], float]]] = {
    "ratio": lambda entry, asked: abs(math.log2(entry / asked)) if min(entry, asked) > 0 else math.inf,
    "difference": lambda entry, asked: abs(entry - asked),
    "below": lambda entry, asked: asked - entry if entry <= asked else entry + 2**62,
}


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
        bucket = bucket_in(value)
        yield value if bucket is None else bucket


def rank_records(records: Iterable[Record], problem: Problem) -> list[tuple[Times, float]]:
    """Return the times of a kernel's other problems and their worth for a problem, the most helpful first.

    The worth is that of the device's choices here, halved with every doubling of a size.
    """
    by_device: dict[str, list[Times]] = defaultdict(list)
    for record in records:
        try:
            times = times_of(record)
        except CodecError:
            continue  # its second line is damaged: the first still answers calls
        if times.seconds or times.failed:
            by_device[times.problem.device].append(times)
            note_recorded(times.problem.device, record.body.provenance.get("device"))
    here = by_device.get(problem.device, [])
    found = []
    for device, all_times in by_device.items():
        alike = likeness(device, problem.device)
        device_worth = 1.0 if device == problem.device else choices_worth(here, all_times, alike)
        for times in all_times:
            far = distance(times.problem.call_key, problem.call_key)
            if times.problem != problem and math.isfinite(far):
                found.append((times, device_worth * 2.0**-far))
    found.sort(key=lambda record: (-record[1], record[0].problem))
    return found


def start_from(
    records: Iterable[Record],
    problem: Problem,
    space: Space,
    blocks: Callable[[Any], int | None] = lambda _config: None,
) -> Start:
    """Return where to begin a search: the fastest elsewhere, from the most helpful records in turn, and all times.

    Candidates that failed in one record and were measured in none come last. `blocks` says how many blocks the launch
    of a configuration has here.
    """
    useful = _as_here([times for times, _ in rank_records(records, problem)[:_RECORDS]], problem, space, blocks)
    ranked = [list(times.seconds)[:FROM_EACH] for times in useful]
    configs = {fp: config for times in reversed(useful) for fp, config in times.configs.items()}
    first = [fp for place in zip_longest(*ranked) for fp in place if fp is not None]
    worked = {fp for times in useful for fp in times.seconds}
    last = [fp for times in useful for fp in sorted(times.failed) if fp not in worked]
    first_configs, last_configs = (
        [config for fp in dict.fromkeys(each) if (config := space.decoded(configs[fp])) is not None]
        for each in (first, last)
    )
    elsewhere = []
    for times in useful:
        timed = thin([(fp, seconds) for fp, seconds in times.seconds.items() if math.isfinite(seconds)])
        decoded = ((space.decoded(times.configs[fp]), seconds) for fp, seconds in timed)
        elsewhere.append([Observation(config, seconds) for config, seconds in decoded if config is not None])
    # One time tells nothing.
    measured = [(times, found) for times, found in zip(useful, elsewhere, strict=True) if len(found) > 1]
    measured.sort(key=lambda source: not _is_alike(source[0].problem, problem))
    alike = [times.problem for times, _ in measured if _is_alike(times.problem, problem)]
    near = sum(each.device == problem.device for each in alike)
    found = [observed for _, observed in measured]
    return Start(first_configs, last_configs, found, near, len(alike))


def _as_here(
    useful: Sequence[Times], problem: Problem, space: Space, blocks: Callable[[Any], int | None]
) -> list[Times]:
    """Return times, at near sizes of the same device as they would be here, if the numbers of blocks are known."""
    cores = cores_of(problem.device)
    near = [t for t in useful if t.blocks and t.problem.device == problem.device and _is_alike(t.problem, problem)]
    if cores == 1 or not near:
        return list(useful)
    members = {fp: space.decoded(times.configs[fp]) for times in near for fp in times.blocks}
    known = {fp: blocks(config) for fp, config in members.items() if config is not None}
    here = {fp: waves(many, cores) for fp, many in known.items() if many}
    there = {id(times): {fp: waves(many, cores) for fp, many in times.blocks.items()} for times in near}
    power = power_of_waves([(times.seconds, there[id(times)]) for times in near])
    return [
        times._replace(seconds=seconds_here(times.seconds, there[id(times)], here, power))
        if id(times) in there
        else times
        for times in useful
    ]


def _is_alike(one: Problem, other: Problem) -> bool:
    return distance(one.call_key, other.call_key) <= _ALIKE


def thin(ranked: Sequence[Any]) -> list[Any]:
    """Return the fastest of many, and some of the others, evenly.

    >>> len(thin(range(300))), len(thin(range(10_000)))
    (300, 1000)
    """
    half = _READ // 2
    step = max(1, -(-(len(ranked) - half) // half))
    return [*ranked[:half], *ranked[half::step]]


class Nearest(NamedTuple):
    """The configuration that near problems agree on. `confidence` is the expected part of the best speed, at most 1.

    It is the part that the configuration reached on the near problems, weighted by their distance and device.
    """

    config: Json
    confidence: float
    problem: Problem

    def __str__(self) -> str:
        near = ", ".join(spell_out(self.problem.call_key))
        return f"{self.confidence:.0%} of the best speed expected, from the nearest tuned problem ({near})"


def nearest_entry(
    records: Iterable[Record], problem: Problem, apart: Callable[[str, str], float] = distance
) -> Nearest | None:
    """Return the choice of the one entry that is nearest to a problem; of two as near, the one for smaller numbers."""
    apart_of = ((apart(r.problem.call_key, problem.call_key), r) for r in records if r.head.decided)
    ranked = [(far, r) for far, r in apart_of if math.isfinite(far)]

    def rank(entry: tuple[float, Record]) -> tuple[float, bool, int, str]:
        key = entry[1].problem.call_key
        return entry[0], entry[1].problem.device != problem.device, len(key), key

    if not ranked:
        return None
    _, record = min(ranked, key=rank)
    confidence = 2.0 ** -distance(record.problem.call_key, problem.call_key)
    return Nearest(record.head.config, confidence, record.problem)


def nearest(records: Iterable[Record], problem: Problem) -> Nearest | None:
    """Return the configuration that did best on the problems nearest to one; None if nothing near was tuned."""
    near = [(times, worth) for times, worth in rank_records(records, problem) if times.seconds][:_NEIGHBOURS]
    if not near:
        return None
    shares: dict[str, float] = {}
    total = math.fsum(worth for _, worth in near)
    for times, worth in near:
        best = next(iter(times.seconds.values()))
        for fp, seconds in times.seconds.items():
            # A record without times holds one choice, which counts as the best there.
            share = best / seconds if math.isfinite(seconds) else 1.0
            shares[fp] = shares.get(fp, 0.0) + share * worth / total
    chosen = max(sorted(shares), key=shares.__getitem__)
    config = next(times.configs[chosen] for times, _ in near if chosen in times.configs)
    nearest_times, nearest_worth = near[0]
    return Nearest(config, shares[chosen] * nearest_worth, nearest_times.problem)
