"""Which candidates are worth a try, by the times of others: on made-up times with the structure of tile sizes."""

from __future__ import annotations

import math
import random

import pytest

from tunebook._space.space import Config
from tunebook.search._outlook import FIRST, Outlook, nearest, outlook_for

TILES, WARPS, STAGES = (16, 32, 64, 128), (1, 2, 4, 8), (2, 3, 4)


def made_up(seed):
    """Return candidates by name, and their times: tiles have a best size, which decides the best number of warps."""
    pick = random.Random(seed)
    m, n, warps = pick.uniform(4, 7), pick.uniform(4, 7), pick.uniform(0, 3)
    weights = [pick.uniform(0.05, 0.3) for _ in range(4)]
    configs, times = {}, {}
    for tile_m in TILES:
        for tile_n in TILES:
            for count in WARPS:
                for stages in STAGES:
                    off_m, off_n = math.log2(tile_m) - m, math.log2(tile_n) - n
                    off_warps = math.log2(count) - warps - 0.5 * (off_m + off_n)
                    log = weights[0] * off_m**2 + weights[1] * off_n**2 + weights[2] * off_warps**2
                    log += weights[3] * 0.2 * abs(stages - 3) + pick.gauss(0, 0.02)
                    name = f"{tile_m} {tile_n} {count} {stages}"
                    configs[name] = Config(BM=tile_m, BN=tile_n, num_warps=count, num_stages=stages)
                    times[name] = math.exp(log)
    return configs, times


def tried_by(configs, times, likely=()):
    outlook, tried = Outlook(configs, likely), []
    while worth := outlook.worth_trying([n for n in times if n not in tried], {name: times[name] for name in tried}):
        tried.append(worth[0])
    return tried


def test_half_of_the_candidates_are_tried_and_the_best_of_them_is_as_good():
    within, tried, count = 0, 0, 0
    for seed in range(40):
        configs, times = made_up(seed)
        found = tried_by(configs, times)
        within += min(times[name] for name in found) <= 1.01 * min(times.values())
        tried, count = tried + len(found), count + len(times)
    assert within >= 38
    assert tried <= 0.5 * count


def test_times_that_follow_nothing_leave_out_no_candidate_near_the_best():
    for seed in range(10):
        configs, times = made_up(seed)
        mixed = dict(zip(times, random.Random(seed).sample([*times.values()], len(times)), strict=True))
        found = tried_by(configs, mixed)
        assert min(mixed[name] for name in found) <= 1.05 * min(mixed.values())


def test_candidates_that_are_fast_elsewhere_come_first():
    configs, times = made_up(0)
    best = sorted(times, key=times.__getitem__)[:3]
    assert tried_by(configs, times, best)[:3] == best


def test_the_first_ones_are_the_nearest_to_the_one_that_serves_meanwhile():
    configs, _ = made_up(0)
    serving = next(iter(configs.values()))
    first = [configs[name] for name in Outlook(configs).worth_trying(list(configs)[1:], {})[:FIRST]]
    for config in first:
        assert sum(config[name] != serving[name] for name in config) <= 2


def test_if_pressed_only_candidates_that_are_predicted_to_be_the_best_are_tried():
    configs, times = made_up(3)
    known = {name: times[name] for name in list(times)[::9]}
    best = min(known.values())
    outlook, others = Outlook(configs), [name for name in times if name not in known]
    usual, pressed = outlook.worth_trying(others, known), outlook.worth_trying(others, known, pressed=True)
    assert set(pressed) < set(usual)
    assert pressed == [name for name in usual if outlook.predicted[name] <= 1]
    assert min(times[name] for name in pressed) < best


def test_nothing_is_predicted_from_few_times():
    configs, times = made_up(0)
    known = dict(list(times.items())[: FIRST - 1])
    assert len(Outlook(configs).worth_trying(configs, known)) == len(configs)


def test_the_nearest_points_are_the_fewest_steps_away_from_the_first():
    assert nearest({"a": (0, 0), "b": (2, 1), "c": (1, 1), "d": (0, 1)}, 2) == ["d", "c"]


@pytest.mark.parametrize("configs", [{str(at): at for at in range(20)}, {str(at): Config(a=at) for at in range(FIRST)}])
def test_candidates_without_named_values_and_few_candidates_have_no_outlook(configs):
    assert outlook_for(configs) is None
