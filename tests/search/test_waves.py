"""Times at other sizes are moved by the waves of blocks that launches need, with a power that the times tell."""

from __future__ import annotations

import math

import pytest

pytest.importorskip("numpy", reason="numpy is not installed")

from tunebook import Space
from tunebook._base.config_codec import encode, fingerprint
from tunebook._base.record_format import BLOCKS, Body, Head, Record
from tunebook._base.vocabulary import Measurement, Problem
from tunebook.search import Observation, Start
from tunebook.search._listed import ListSearch
from tunebook.search._warm_start import start_from
from tunebook.search._waves import power_of_waves, seconds_here, waves

DEVICE, CORES = "gpu:NVIDIA H200", 132
TILES = Space(m=[16, 32, 64, 128, 256], n=[16, 32, 64, 128, 256], k=[32, 64, 128])


def test_a_wave_is_as_many_blocks_as_there_are_cores():
    assert [waves(blocks, CORES) for blocks in (1, 132, 133, 264)] == [1, 1, 2, 2]


@pytest.mark.parametrize("power", [0.0, 0.3, 0.8])
def test_times_at_two_sizes_tell_how_they_grow_with_waves(power):
    there = {str(place): 1 + place % 7 for place in range(40)}
    here = {str(place): 2 + place % 5 for place in range(40)}
    one = {name: 1.0 + place / 1000 for place, name in enumerate(there)}  # all are about as fast at one size
    other = {name: one[name] * (here[name] / there[name]) ** power for name in one}
    assert power_of_waves([(one, there), (other, here)]) == pytest.approx(power, abs=0.1)


def test_a_power_without_times_at_two_sizes_is_usual_and_no_power_is_out_of_bounds():
    assert power_of_waves([({"a": 1.0}, {"a": 2})]) == 0.4
    one, two = {"a": 1, "b": 1}, {"a": 1, "b": 9}
    assert power_of_waves([({"a": 1.0, "b": 1.0}, one), ({"a": 1.0, "b": 1.1e9}, two)]) <= 1.0
    assert power_of_waves([({"a": 1.0, "b": 1.1e9}, one), ({"a": 1.0, "b": 1.0}, two)]) == 0.0


def test_a_configuration_that_needs_more_waves_here_falls_behind():
    there, here = {"large": 1, "small": 4}, {"large": 4, "small": 4}
    moved = seconds_here({"large": 1.0, "small": 1.1, "unknown": 1.2}, there, here, power=0.5)
    assert list(moved) == ["small", "unknown", "large"]
    assert moved["large"] == pytest.approx(2.0)
    assert moved["unknown"] == pytest.approx(1.2 * math.sqrt(2.0))


def blocks_at(rows, config):
    return -(-rows // config.m) * -(-4096 // config.n)


def seconds_at(rows, config):
    """A pretended matmul: small tiles need more waves, and large ones longer for each."""
    return 1e-5 * math.sqrt(waves(blocks_at(rows, config), CORES)) * (config.m * config.n / 512) ** 0.45 / config.k**0.1


def record_at(rows, *, counted=True):
    measured = [
        Measurement(
            config=encode(config),
            fingerprint=fingerprint(config),
            code="c",
            policy="p",
            environment="",
            samples_s=(seconds_at(rows, config),) * 3,
            extra={BLOCKS: blocks_at(rows, config)} if counted else {},
        )
        for config in TILES
    ]
    best = min(measured, key=lambda m: m.samples_s)
    problem = Problem(DEVICE, "matmul", f'{{"m":{rows}}}')
    head = Head(problem=problem, config=best.config, checksum="c", origin="tuned")
    return Record(head, Body(measurements=tuple(measured)))


ASKED = Problem(DEVICE, "matmul", '{"m":96}')


def blocks_here(config):
    return blocks_at(96, config)


def start_here(*, counted=True, asked=ASKED):
    records = [record_at(rows, counted=counted) for rows in (48, 192)]
    return start_from(records, asked, TILES, blocks_here)


def test_times_of_near_sizes_are_as_they_would_be_here():
    ranked = sorted(TILES, key=lambda config: seconds_at(96, config))
    for source in start_here().elsewhere:
        moved = [config for config, _ in source]
        assert len({*moved[:6]} & {*ranked[:6]}) >= 5
        assert [seconds for _, seconds in source] == sorted(seconds for _, seconds in source)


def test_times_stay_as_they_are_where_blocks_are_unknown_or_the_device_is():
    recorded = [sorted(seconds_at(rows, config) for config in TILES) for rows in (48, 192)]
    elsewhere = Problem("gpu:ACME", "matmul", ASKED.call_key)
    for start in (start_here(counted=False), start_here(asked=elsewhere)):
        assert sorted([seconds for _, seconds in source] for source in start.elsewhere) == sorted(recorded)


def test_a_search_tries_members_that_no_near_size_has_measured():
    fast = [config for config in TILES if config.k == 32 or config.m * config.n > 1 << 13]
    times = [Observation(config, seconds_at(96, config)) for config in fast]
    strategy = ListSearch(TILES, start=Start(first=fast[:3], elsewhere=[times, times, times], near=3, alike=3))
    proposed = strategy.propose(16)
    assert proposed[:3] == fast[:3]
    assert len(set(proposed) - set(fast)) >= 4


@pytest.mark.parametrize("sign", [1, -1])
def test_a_search_knows_whether_times_at_near_sizes_mislead_it(sign):
    times = [Observation(config, seconds_at(96, config)) for config in TILES]
    strategy = ListSearch(TILES, start=Start(elsewhere=[times, times, times], near=3, alike=3))
    assert strategy.is_misled  # nothing was measured yet
    strategy.observe([Observation(config, seconds_at(96, config) ** sign) for config in strategy.propose(16)])
    assert strategy.is_misled is (sign < 0)
    assert not ListSearch(TILES).is_misled
