"""Strategies: one contract for all, and what each is for."""

from __future__ import annotations

import itertools
import math
import random
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tunebook import DefinitionError, Space
from tunebook.search import (
    Evolution,
    Exhaustive,
    Guided,
    Local,
    Observation,
    Portfolio,
    Random,
    Search,
    Start,
    check_strategy,
    listed,
)
from tunebook.search._model import Prior, TimeModel, load_numpy
from tunebook.search._strategy import TrialHistory
from tunebook.testing import StrategyContract

tiles, seconds_of, searched = StrategyContract.space, StrategyContract.seconds_of, StrategyContract.search


class OwnStrategyContract(StrategyContract):
    """The contract of strategies that say what is wrong with a list."""

    kind = None

    def make(self, space, **options):
        return self.kind(space, **options)

    def test_a_list_is_not_a_space(self):
        with pytest.raises(DefinitionError, match="listed"):
            self.kind([{"m": 1}])


class TestExhaustive(OwnStrategyContract):
    kind = Exhaustive


class TestRandom(OwnStrategyContract):
    kind = Random


class TestLocal(OwnStrategyContract):
    kind = Local


class TestEvolution(OwnStrategyContract):
    kind = Evolution


class TestGuided(OwnStrategyContract):
    kind = Guided


class TestPortfolio(OwnStrategyContract):
    kind = Portfolio


@pytest.mark.parametrize("kind", [Local, Evolution, Guided, Portfolio])
def test_a_search_finds_the_best_of_a_valley_well_before_random_would(kind):
    space = tiles()
    best = min(space, key=seconds_of)
    many = len(space) // 3
    found = sum(best in searched(kind(space, seed=seed), many) for seed in range(30))
    assert found >= 24  # random finds it in every third run


@pytest.mark.parametrize("kind", [Local, Guided])
def test_a_search_compiles_less_where_programs_are_shared(kind):
    space = Space(m=[16, 32, 64, 128], n=[16, 32, 64, 128], k=[16, 32, 64], warps=[1, 2, 4, 8], group=[1, 2, 4, 8])

    def cost(c, best):
        return 1e-3 * math.prod(1 + 0.25 * abs(math.log2(c[name] / value)) for name, value in best.items())

    def programs(space, seed):
        """Return how many programs were compiled by when the best was found."""
        best = random.Random(seed).choice(list(space))
        compiled, strategy = set(), kind(space, seed=seed)
        while (config := strategy.propose(1)[0]) != best:
            compiled.add((config.m, config.n, config.k))
            strategy.observe([Observation(config, cost(config, best))])
        return len(compiled)

    each = sum(programs(space, seed) for seed in range(20))
    shared = sum(programs(space.at_launch("warps", "group"), seed) for seed in range(20))
    assert shared < 0.9 * each


def test_other_launches_of_a_failed_program_count_as_not_compiled():
    space = Space(m=[16, 32, 64], warps=[1, 2, 4, 8]).at_launch("warps")
    history = TrialHistory(space, 0)
    history.add([Observation(space.config(m=16, warps=1), None), Observation(space.config(m=32, warps=1), 1e-3)])
    assert not history.is_compiled(space.point(space.config(m=16, warps=2)))
    assert history.is_compiled(space.point(space.config(m=32, warps=2)))


def test_the_best_of_each_region_elsewhere_is_tried_where_the_fastest_elsewhere_are_slow_here():
    # Elsewhere all of the fastest have mode "a"; here "c" is twice as fast, and its best there is the best here.
    space = tiles()

    def there(c):
        return seconds_of(c) * {"a": 1, "b": 2, "c": 3}[c.mode]

    def here(c):
        return seconds_of(c) * {"a": 2, "b": 2, "c": 1}[c.mode]

    ranked = sorted(space, key=there)
    start = Start(first=ranked[:40], elsewhere=[[Observation(c, there(c)) for c in ranked]])
    best = min(space, key=here)
    tries = [searched(Guided(space, seed=seed, start=start), 100, seconds_of=here).index(best) for seed in range(10)]
    assert sorted(tries)[5] < 30  # of 231, with 77 of this mode


def test_the_guide_learns_where_candidates_fail():
    space = tiles()
    proposed = searched(Guided(space, seed=0), 80, seconds_of=lambda c: None if c.m >= 128 else seconds_of(c))
    tried = sum(c.m >= 128 for c in proposed)
    among = sum(c.m >= 128 for c in space)
    assert tried / 80 < 0.7 * among / len(space)


def found_after(start, cost, seed, most=80):
    """How many proposals it takes to find the best."""
    space = tiles()
    best = min(cost(c) for c in space)
    strategy = Guided(space, seed=seed, start=start)
    for number in range(most):
        if best in [cost(c) for c in searched(strategy, 1, seconds_of=cost)]:
            return number
    return most


def median(values):
    ordered = sorted(values)
    return ordered[len(ordered) // 2]


def known(cost, every=1):
    return [Observation(c, cost(c)) for c in itertools.islice(tiles(), 0, None, every)]


def shifted(c):
    """As here, but for a device on which twice the stages are best."""
    return 3 * seconds_of(c) * (1 + 0.2 * abs(c.stages - 4))


def test_the_many_products_of_long_axes_share_places_on_the_line(monkeypatch):
    decomposed = []
    eigh = np.linalg.eigh
    monkeypatch.setattr(np.linalg, "eigh", lambda matrix: decomposed.append(len(matrix)) or eigh(matrix))
    strategy = Guided(Space(a=range(1, 60), b=range(1, 60)), seed=0)
    assert 0 < max(decomposed) <= 513
    assert len(strategy.propose(4)) == 4


def two_sizes_and_two_methods(seed):
    """Return a made-up space of 4092 points and its times: flat, and the pair of methods matters most."""
    rng = np.random.default_rng([77, seed])
    space = Space(block=range(32, 1024, 32), tile=[1, *range(2, 21, 2)], method=range(4), way=range(3))
    configs = list(space)
    block, tile, method, way = np.array([tuple(config.values()) for config in configs]).T
    by_method = np.exp(0.25 * (rng.normal(size=(4, 3)) + 0.5 * rng.normal(size=(4, 1)) + 0.5 * rng.normal(size=(1, 3))))
    registers = 20 + tile * rng.uniform(2, 5)
    busy = np.floor(np.minimum(65536 / (registers * block), 2048 / block)) * block / 2048
    times = by_method[method, way] * (1 + rng.uniform(0.3, 1) / tile) * (1 + 0.4 * np.maximum(0, 0.5 - busy))
    times = np.maximum(times, np.quantile(times, 0.004)) * np.exp(0.01 * rng.normal(size=len(times)))
    return space, dict(zip(configs, times.tolist(), strict=True))


def test_on_a_small_flat_space_a_search_is_not_worse_than_random_from_the_first_points_on():
    after = (2, 8, 30, 60)
    ratios = []
    for seed in range(24):
        space, times = two_sizes_and_two_methods(seed % 8)
        rank = {config: place for place, config in enumerate(sorted(times, key=times.__getitem__))}
        strategy, ranks = Guided(space, seed=seed), []
        for _ in range(after[-1]):
            (config,) = strategy.propose(1)
            strategy.observe([Observation(config, times[config])])
            ranks.append(rank[config])
        # The best of n random points has this rank on the mean: the size of the space divided by n + 1.
        ratios.append([(min(ranks[:n]) + 1) * (n + 1) / len(times) for n in after])
    assert all(sum(each) / len(each) < 1 for each in zip(*ratios, strict=True)), ratios


def sizes_up_to_960():
    """Return a space with many values above its largest power of two; a model without products is made sooner."""
    space = Space(block=range(64, 1024, 64), tile=[1, 2, 4, 6, 8, 10, 12], unroll=range(1, 8))
    return space.typed(block="ordered", tile="ordered", unroll="ordered")


@pytest.mark.parametrize("best", [0.0, 0.5, 1.0])
def test_the_first_points_are_not_worse_than_random_wherever_the_best_is(best):
    space = sizes_up_to_960()
    away = {c: sum(abs(at / last - best) for at, last in zip(space.point(c), (14, 6, 6), strict=True)) for c in space}
    rank = {config: place for place, config in enumerate(sorted(away, key=away.__getitem__))}
    runs = [
        [rank[c] for c in searched(Guided(space, seed=seed), 8, 1, lambda c: 1 + 0.3 * away[c])] for seed in range(100)
    ]
    for n in (1, 2, 4, 8):
        mean = sum(min(ranks[:n]) + 1 for ranks in runs) / len(runs)
        assert mean * (n + 1) / len(rank) < 1.2, n  # of random search it is 1, give or take 0.08


def test_the_first_points_of_a_flat_space_come_from_all_parts_of_an_axis():
    space = sizes_up_to_960()
    first = [c for seed in range(20) for c in searched(Guided(space, seed=seed), 8, 1, lambda _config: 1.0)]
    for name, values in space.axes.items():
        upper = sum(c[name] > sorted(values)[len(values) // 2] for c in first) / len(first)
        assert 0.35 < upper < 0.6, name


def drawn_at_random(strategy, time_of, count):
    """Return how many of so many proposals were drawn at random."""
    draw, drawn = strategy._history.random_point, []
    strategy._history.random_point = lambda: drawn.append(1) or draw()
    for place in range(count):
        (config,) = strategy.propose(1)
        strategy.observe([Observation(config, time_of(config, place))])
    return len(drawn)


@pytest.mark.parametrize(
    ("time_of", "least", "most"),
    [
        (lambda _config, place: 2.0 if place else 1.0, 45, 60),  # the first is the fastest
        (lambda _config, place: 2.0 - place / 200, 0, 30),  # each is faster than the last
    ],
)
def test_a_search_that_finds_nothing_faster_draws_every_second_point_at_random(time_of, least, most):
    strategy = Guided(tiles(), seed=0)
    assert least <= drawn_at_random(strategy, time_of, 140) <= most


def fastest_there(count):
    return sorted(tiles(), key=seconds_of)[:count]


class TestOneDeviceThatMisleads:
    """Where times of one other device are known, its fastest points are slow here, and all others are fast."""

    def test_points_unlike_its_fastest_are_tried_soon(self):
        slow_here = set(fastest_there(len(tiles()) // 4))
        strategy = Guided(tiles(), seed=0, start=Start(first=fastest_there(4), elsewhere=[known(seconds_of)]))
        proposed = searched(strategy, 5, 1, lambda config: 10.0 if config in slow_here else 1.0)
        assert not slow_here.issuperset(proposed)

    def test_near_sizes_of_the_same_device_are_believed(self):
        elsewhere = [known(seconds_of)]
        hedged, believed = (
            Guided(tiles(), seed=0, start=Start(fastest_there(4), (), elsewhere, near)) for near in (0, 1)
        )
        for strategy in (hedged, believed):
            for config in strategy.propose(2):
                strategy.observe([Observation(config, seconds_of(config))])
        assert hedged._is_hedging()
        assert not believed._is_hedging()

    def test_the_fastest_of_two_devices_that_differ_test_each_other(self):
        space = tiles()
        prior = Prior(space, [known(seconds_of), known(lambda c: 1 / seconds_of(c))], random.Random(0))
        fastest = [space.point(config) for config in (fastest_there(1)[0], fastest_there(10_000)[-1])]
        assert prior.is_untested(fastest[:1])
        assert not prior.is_untested(fastest)


def test_hopeless_points_are_still_told_apart():
    strategy = Guided(Space(a=range(1, 60), b=range(1, 60)), seed=0)
    space = strategy._history.space
    strategy.observe([Observation(c, 2.0**c.a) for c in random.Random(0).sample(list(space), 300)])
    strategy._fit()
    slower_and_slower = [space.point({"a": a, "b": 30}) for a in (5, 15, 25)]
    improvements = strategy._improvements(slower_and_slower)
    assert all(map(math.isfinite, improvements))
    assert improvements == sorted(improvements, reverse=True)
    assert len(set(improvements)) == 3


class TestTimesElsewhere:
    def test_the_first_point_of_a_search_from_nothing_is_near_the_middle(self):
        space = tiles()
        first = [space.point(Guided(space, seed=seed).propose(1)[0]) for seed in range(20)]
        assert all(0 < p[0] < 4 or 0 < p[1] < 4 for p in first)

    def test_the_first_two_points_are_round_and_in_different_regions(self):
        space = Space(x=[16, 24, 32, 40, 48, 56, 64], y=[1, 2, 3, 4, 5, 6], f=["a", "b"], g=[0, 1])
        pairs = [searched(Guided(space, seed=seed), 2, seconds_of=lambda c: c.x) for seed in range(20)]
        sizes = [size for pair in pairs for c in pair for size in (c.x, c.y)]
        assert sum(size.bit_count() == 1 for size in sizes) > 0.8 * len(sizes)  # of random ones, 0.46 are
        assert sum(one[name] != other[name] for one, other in pairs for name in "xyfg") >= 3 * len(pairs)

    def test_sizes_are_round_as_long_as_times_differ_and_as_drawn_where_they_are_alike(self):
        space = Space(x=range(16, 257, 16), y=range(16, 257, 16))

        def powers(seconds_of):
            first = [c for seed in range(20) for c in searched(Guided(space, seed=seed), 8, 1, seconds_of)[2:]]
            return sum(size.bit_count() == 1 for c in first for size in c.values()) / (2 * len(first))

        assert powers(lambda c: c.x**2 + c.y) > 0.9
        assert powers(lambda _config: 1.0) < 0.5  # of random sizes, 0.31 are

    def test_times_here_are_expected_to_differ_along_the_axes_on_which_devices_differ(self):
        space = Space(a=range(1, 9), b=range(1, 9))
        there = [[Observation(c, math.exp(c.a * tilt)) for c in space] for tilt in (0.3, -0.4)]
        prior = Prior(space, there, random.Random(0))
        ((points, values),) = prior.differences()
        assert len(points) == 32
        by_a = dict(sorted(zip((a for a, _ in points), values.tolist(), strict=True)))
        assert values.tolist() == pytest.approx([by_a[a] for a, _ in points])  # whatever b is
        assert list(by_a.values()) == sorted(by_a.values())
        model = TimeModel(space.grid, random.Random(0))
        model.set_usual_scales([(points, values)])
        assert model._scales[0] < model._scales[1]
        assert Prior(space, [], random.Random(0)).differences() == []

    def test_times_of_a_like_device_lead_to_the_best_sooner(self):
        cold = median(found_after(Start(), seconds_of, seed) for seed in range(5))
        warm = median(found_after(Start(elsewhere=[known(shifted)]), seconds_of, seed) for seed in range(5))
        assert warm < cold / 2

    def test_with_a_part_of_the_times_it_never_takes_as_long_as_with_none(self):
        cold = max(found_after(Start(), seconds_of, seed) for seed in range(5))
        warm = max(found_after(Start(elsewhere=[known(shifted, every=7)]), seconds_of, seed) for seed in range(5))
        assert warm < cold

    def test_times_that_mislead_cost_time_but_do_not_stop_a_search(self):
        wrong = known(lambda c: 1 / seconds_of(c))
        cold = median(found_after(Start(), seconds_of, seed) for seed in range(15))
        misled = median(found_after(Start(elsewhere=[wrong]), seconds_of, seed) for seed in range(15))
        assert misled < 2 * cold + 20

    def test_of_two_devices_the_like_one_is_believed(self):
        wrong, right = known(lambda c: 1 / seconds_of(c)), known(shifted)
        both = median(found_after(Start(elsewhere=[wrong, right]), seconds_of, seed) for seed in range(5))
        misled = median(found_after(Start(elsewhere=[wrong]), seconds_of, seed) for seed in range(5))
        assert both < misled

    def test_invalid_times_and_times_outside_this_space_do_no_harm(self):
        strange = [Observation({"other": 1}, 1.0), Observation(next(iter(tiles())), math.nan)]
        space = tiles()
        proposed = searched(Guided(space, start=Start(elsewhere=[strange, [], known(lambda _c: None)])), 10_000, 7)
        assert set(proposed) == set(space)

    def test_the_same_seed_and_times_give_the_same_proposals(self):
        start = Start(elsewhere=[known(shifted, every=3)])
        one, other = (searched(Guided(tiles(), seed=3, start=start), 60, batch=4) for _ in range(2))
        assert one == other


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32), cuts=st.lists(st.integers(1, 60), min_size=1, max_size=5))
def test_a_model_that_learns_bit_by_bit_predicts_as_one_that_learns_at_once(seed, cuts):
    space, rng = tiles(), random.Random(seed)
    every = [space.point(c) for c in space]
    points = rng.sample(every, min(sum(cuts), len(every) - 20))
    times = load_numpy().array([rng.gauss(0, 1) for _ in points])
    whole, steps = TimeModel(space.grid, random.Random(0)), TimeModel(space.grid, random.Random(0))
    whole.fit(points, times)
    for end in itertools.accumulate(cuts):
        steps.fit(points[:end], times[:end])
    assert steps._inverse.ravel().tolist() == pytest.approx(whole._inverse.ravel().tolist(), abs=1e-6)
    for one, other in zip(whole.predict(every[:50]), steps.predict(every[:50]), strict=True):
        assert one.tolist() == pytest.approx(other.tolist(), abs=1e-3)  # single precision


def test_predictions_in_single_precision_are_those_of_the_formula():
    space, rng = tiles(), random.Random(0)
    every = [space.point(c) for c in space]
    points, times = every[::3], np.array([rng.gauss(0, 1) for _ in every[::3]])
    model = TimeModel(space.grid, random.Random(0))
    model.fit(points, times)
    own = model._kernel(model._features(points), model._features(points))
    near = model._kernel(model._features(every), model._features(points))
    solved = np.linalg.solve(own + 0.01 * np.eye(len(own)), np.column_stack([times, near.T]))
    means, deviations = model.predict(every)
    assert means.tolist() == pytest.approx((near @ solved[:, 0]).tolist(), abs=1e-3)
    assert (deviations**2).tolist() == pytest.approx(
        (1.01 - np.einsum("ij,ji->i", near, solved[:, 1:])).tolist(), abs=1e-3
    )


def test_sizes_change_together_where_their_product_stays():
    history = TrialHistory(
        Space(x=[8, 16, 32, 64], y=[1, 2, 4, 8], f=["a", "b"]).where(lambda c: c.x * c.y == 64), seed=0
    )
    near = history.variations(history.space.point({"x": 16, "y": 4, "f": "a"}))
    assert {tuple(history.space.at(p).values()) for p in near} == {
        (16, 4, "b"), (8, 8, "a"), (32, 2, "a"), (64, 1, "a")
    }  # fmt: skip


def test_the_guide_goes_on_when_more_is_known_than_its_model_holds():
    space = Space(a=range(40), b=range(40), f=["x", "y"])
    strategy = Guided(space, seed=0)
    seen = random.Random(0).sample(list(space), 1500)
    strategy.observe([Observation(c, None if c.b > 30 else 1 + abs(c.a - 20) + abs(c.b - 20)) for c in seen])
    tried = searched(
        strategy, 60, batch=4, seconds_of=lambda c: None if c.b > 30 else 1 + abs(c.a - 20) + abs(c.b - 20)
    )
    assert len(tried) == 60
    assert not set(tried) & set(seen)
    best = sorted(abs(c.a - 20) + abs(c.b - 20) for c in space if c not in seen)
    assert median(abs(c.a - 20) + abs(c.b - 20) for c in tried) <= best[120]


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), cut=st.integers(1, 40))
def test_a_search_goes_on_after_a_break_without_repeating_itself(seed, cut):
    before = searched(Guided(tiles(), seed=seed), cut)
    after = Guided(tiles(), seed=seed)
    after.observe([Observation(c, seconds_of(c)) for c in before])
    assert not set(before) & set(searched(after, 30))


def test_the_default_goes_through_a_small_space_and_is_guided_in_a_big_one():
    assert Portfolio(Space(m=range(8))).chosen == "exhaustive"
    assert Portfolio(tiles()).chosen == "guided"
    assert Portfolio(tiles(), trials=300).chosen == "exhaustive"
    assert Portfolio(Space(m=[f"variant {i}" for i in range(100)])).chosen == "random"
    assert Portfolio(Space(m=range(1, 1500), n=[1, 2])).chosen == "evolution"  # a model took a minute, and 4 GB


def test_without_numpy_the_default_is_local_search_and_guided_search_names_the_remedy(monkeypatch):
    import tunebook.search._by_name as by_name

    monkeypatch.setattr(by_name, "find_spec", lambda _name: None)
    assert Portfolio(tiles()).chosen == "local"
    assert Portfolio(Space(m=range(1, 150), n=[1, 2])).chosen == "evolution"
    monkeypatch.setitem(__import__("sys").modules, "numpy", None)
    with pytest.raises(ImportError, match="pip install numpy"):
        Guided(tiles())


def test_an_unknown_strategy_is_an_error_that_lists_the_names():
    with pytest.raises(DefinitionError, match=r"invalid strategy='annealing'; use one of 'auto', 'guided'"):
        check_strategy("annealing")
    assert check_strategy("local") == "local"
    assert isinstance(Search(tiles(), Local, 10).begin(), Local)
    assert isinstance(Search(tiles(), "evolution", 10).begin(), Evolution)


def test_a_list_of_configurations_becomes_a_space_of_exactly_them():
    configs = [{"m": m, "n": n} for m in (1, 2, 3) for n in (1, 2) if m != n]
    space = listed(configs)
    assert {tuple(c.values()) for c in space} == {tuple(c.values()) for c in configs}
    assert listed([{"m": 1}, {"n": 1}]) is None
    assert listed([1, 2]) is None
    assert listed([{"m": [1]}]) is None


def test_a_model_of_many_categories_takes_little_memory():
    """720 orders of six loops took 3 GB."""
    space = Space(order=itertools.permutations("abcdef"), unroll=[1, 2, 4])
    tracemalloc.start()
    try:
        Guided(space, seed=0).propose(12)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 300e6
