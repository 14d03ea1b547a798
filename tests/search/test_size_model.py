"""The model of times over sizes: its choices for sizes it has not seen, and the bound of their regret."""

import itertools
import math
import random

import pytest

from tunebook.search import Example, SizeModel
from tunebook.search._part_model import PartModel
from tunebook.search._size_model import BOUNDED_FROM, FEWEST, MOST, best_average

CORES = 16
TILES = {f"{m}x{n}": {"BM": m, "BN": n, "num_warps": 4} for m, n in itertools.product((16, 32, 64, 128), repeat=2)}


def tiled_s(m, n, tile, rng=None):
    """Return the time of a made-up matmul: waves of tiles on the cores, each with an overhead of its own."""
    waves = math.ceil(math.ceil(m / tile["BM"]) * math.ceil(n / tile["BN"]) / CORES)
    noise = 1.0 if rng is None else math.exp(rng.gauss(0, 0.002))
    return (2e-6 + waves * (1e-6 + 1e-9 * tile["BM"] * tile["BN"] / (1 + tile["BN"] / 64))) * noise


def examples(many, seed):
    rng = random.Random(seed)
    shapes = [(round(2 ** rng.uniform(3, 11)), round(2 ** rng.uniform(3, 11))) for _ in range(many)]
    return [
        Example({"m": m, "n": n}, {key: tiled_s(m, n, tile, rng) for key, tile in TILES.items()}) for m, n in shapes
    ]


@pytest.fixture(scope="module")
def model():
    pytest.importorskip("numpy")
    return SizeModel(examples(60, 0), TILES, cores=CORES)


def regret(example, key):
    return example.seconds[key] / min(example.seconds.values()) - 1


def test_choices_for_sizes_never_seen_are_near_the_best_and_far_better_than_one_for_all(model):
    unseen = examples(100, 1)
    chosen = [regret(e, model.predict(e.sizes).keys[0]) for e in unseen]
    one = min(sum(regret(e, key) for e in unseen) for key in TILES)
    assert sum(chosen) < 0.2 * one
    assert sum(chosen) / len(chosen) < 0.02


def test_the_bound_holds_for_as_many_sizes_as_it_says(model):
    found = [(example, model.predict(example.sizes)) for example in examples(300, 2)]
    inside = [(example, each) for example, each in found if not each.outside]
    held = [regret(example, each.keys[0]) <= each.bound for example, each in inside]
    assert sum(held) / len(held) >= 0.90
    assert len(inside) > len(found) / 2
    assert all(each.bound < math.inf for _, each in inside)
    assert all(each.bound == math.inf for _, each in found if each.outside)


def rough_examples(many, seed, kernel):
    """Return examples of a kernel that no sum of products explains: each tile has times of its own over sizes."""
    draw = {key: random.Random(f"{key} {kernel}").uniform for key in TILES}
    waves = {key: [uniform(0, 6) for _ in range(4)] for key, uniform in draw.items()}

    def rough_s(sizes, key, seconds):
        a, b, c, d = waves[key]
        return seconds * math.exp(
            0.2 * math.sin(a * math.log2(sizes["m"]) + b) * math.sin(c * math.log2(sizes["n"]) + d)
        )

    return [e._replace(seconds={k: rough_s(e.sizes, k, s) for k, s in e.seconds.items()}) for e in examples(many, seed)]


def test_the_bound_holds_with_few_sizes_too():
    pytest.importorskip("numpy")
    held = []
    for kernel in range(16):
        model = SizeModel(rough_examples(40, 100 + kernel, kernel), TILES, cores=CORES)
        found = [(e, model.predict(e.sizes)) for e in rough_examples(60, 500 + kernel, kernel)]
        held += [regret(e, each.keys[0]) <= each.bound for e, each in found if not each.outside]
    assert len(held) > 500
    assert sum(held) / len(held) >= 0.98  # 0.973 with the quantile itself


def test_a_bound_is_never_a_small_part_of_the_usual_regret(model):
    """Where the model is sure by mistake, the regret that it believes in is near zero."""
    bounds = [found.bound for e in examples(300, 2) if not (found := model.predict(e.sizes)).outside]
    usual = sum(model.learnt.left_out) / len(model.learnt.left_out)
    assert min(bounds) >= model.learnt.factor * usual / 4


def test_the_best_is_among_the_configurations_worth_trying(model):
    found = [(e, model.predict(e.sizes).keys) for e in examples(100, 3)]
    assert all(FEWEST <= len(keys) <= MOST for _, keys in found)
    assert sum(min(regret(e, key) for key in keys) < 0.005 for e, keys in found) >= 97


def test_it_finds_which_axis_is_the_block_of_which_size(model):
    blocks = {(block.axes, block.size, block.role) for block in model.learnt.parts[0].structure.blocks}
    assert {(("BM",), 0, "launch"), (("BN",), 1, "launch")} <= blocks


def test_parts_are_averaged_whose_errors_cancel_out_and_a_part_that_chooses_badly_is_left_out():
    np = pytest.importorskip("numpy")
    rng = np.random.default_rng(0)
    slower = np.abs(rng.normal(0, 0.1, (6, 200)))
    slower -= slower.min(0)
    error = rng.normal(0, 0.1, slower.shape)
    bad = rng.normal(0, 0.1, slower.shape)
    assert sorted(best_average(np, [slower + error, bad, slower - error], slower)) == [0, 2]


def test_a_configuration_that_failed_is_no_choice_when_parts_are_compared():
    np = pytest.importorskip("numpy")
    slower = np.array([[0.0, np.inf], [0.5, 0.0]])
    right, wrong = np.array([[0.0, -9.0], [1.0, 0.0]]), np.array([[1.0, 0.0], [0.0, 1.0]])
    assert best_average(np, [wrong, right], slower) == [1]


def test_parts_are_not_chosen_by_few_problems(monkeypatch):
    pytest.importorskip("numpy")
    calls = []
    monkeypatch.setattr("tunebook.search._size_model.best_average", lambda *told: calls.append(told) or [0])
    for many, choices in ((39, 0), (40, 1)):
        SizeModel(examples(many, 0), TILES, cores=CORES)
        assert len(calls) == choices


def split_s(m, n, lanes, vectors, rows):
    """Return the time of a made-up matmul in C: whole tiles are fast, the rest at the edges is slow."""
    columns = lanes * vectors
    whole = (m // rows) * (n // columns) * (3 + rows * columns / 8)
    return 1e-9 * (500 + whole + 2 * (m % rows) * n + (m * 5 + 2 * m * (n % columns)) * (n % columns > 0))


def test_it_finds_blocks_of_two_axes_and_the_rest_that_they_leave():
    pytest.importorskip("numpy")
    grid = itertools.product((4, 8, 16), (1, 2, 4), (1, 2, 4))
    configs = {f"{la} {v} {r}": {"LANES": la, "VECTORS": v, "ROWS": r} for la, v, r in grid}
    rng, known = random.Random(0), []
    for _ in range(120):
        m, n = (round(2 ** rng.uniform(2, 9)) for _ in range(2))
        seconds = {key: split_s(m, n, c["LANES"], c["VECTORS"], c["ROWS"]) for key, c in configs.items()}
        known.append(Example({"m": m, "n": n}, seconds))
    model = SizeModel(known[:80], configs)
    blocks = {(block.axes, block.size, block.role) for block in model.learnt.parts[0].structure.blocks}
    assert {(("LANES", "VECTORS"), 1, "split"), (("ROWS",), 0, "split")} <= blocks
    chosen = [regret(e, model.predict(e.sizes).keys[0]) for e in known[80:]]
    one = min(sum(regret(e, key) for e in known[80:]) for key in configs)
    assert sum(chosen) < 0.1 * one


WINDOWS = (3, 5, 7, 9, 11)
WAYS = {f"{strip} {rows}": {"STRIP": strip, "ROWS": rows} for strip, rows in itertools.product((4, 8, 16, 32), (1, 4))}


def windowed_s(height, width, window, strip, rows):
    """Return the time of a made-up convolution in C: whole strips of results are fast, the rest is slow."""
    places, lines = width - window + 1, height - window + 1
    work = lines * window**2 * (places // strip * (2 + strip / 6) + 3 * (places % strip))
    return 1e-9 * (300 + 8 * math.ceil(lines / rows) + work)


def windowed_examples(many):
    rng, found = random.Random(0), []
    while len(found) < many:
        height, width, window = round(2 ** rng.uniform(4, 9)), round(2 ** rng.uniform(4, 9)), rng.choice(WINDOWS)
        seconds = {key: windowed_s(height, width, window, way["STRIP"], way["ROWS"]) for key, way in WAYS.items()}
        found.append(Example({"height": height, "width": width, "window": window}, seconds))
    return found


def test_it_finds_the_window_that_moves_along_a_size():
    pytest.importorskip("numpy")
    known = windowed_examples(120)
    model = SizeModel(known[:80], WAYS)
    assert (1, 2) in model.learnt.parts[0].structure.windows
    chosen = [regret(e, model.predict(e.sizes).keys[0]) for e in known[80:]]
    one = min(sum(regret(e, key) for e in known[80:]) for key in WAYS)
    assert sum(chosen) < 0.1 * one


def test_a_window_larger_than_what_it_moves_along_is_predicted_without_an_error():
    pytest.importorskip("numpy")
    known = windowed_examples(40)
    smallest = min(e.sizes["width"] for e in known)
    assert SizeModel(known, WAYS).predict({"height": 100, "width": smallest, "window": 10 * smallest}).keys


@pytest.mark.parametrize("many", [1, 2])
def test_configurations_that_always_take_as_long_as_each_other_are_learnt_in_a_moment(many):
    pytest.importorskip("numpy")
    configs = {str(block): {"block": block} for block in (16, 32)[:many]}
    alike = [Example({"n": 2**power}, dict.fromkeys(configs, 1e-6 * 2**power)) for power in range(12)]
    assert SizeModel(alike, configs).predict({"n": 100}).keys[0] in configs


def test_problems_are_left_out_as_if_they_had_never_been_measured(model):
    np = pytest.importorskip("numpy")
    part, data = model._parts[0], model._data
    left_out = np.arange(3, len(data.sizes), 8)
    others = np.setdiff1d(np.arange(len(data.sizes)), left_out)
    learnt = PartModel(data.some(np.arange(len(model.keys)), others), part.part)
    logs, variances = part.left_out(left_out)
    for place, problem in enumerate(left_out):
        expected, uncertain = learnt.predict(data.sizes[problem : problem + 1])
        assert np.allclose(logs[:, place], expected, atol=1e-6)
        assert np.allclose(variances[:, place], uncertain, atol=1e-6)


def test_with_few_sizes_there_is_no_bound_but_a_choice():
    pytest.importorskip("numpy")
    for many in (1, 2, 5, 10, BOUNDED_FROM - 1):
        found = SizeModel(examples(many, 4), TILES, cores=CORES).predict({"m": 500, "n": 70})
        assert found.bound == math.inf
        assert found.keys[0] in TILES


def test_only_candidates_are_chosen_and_rarely_measured_ones_are_not():
    pytest.importorskip("numpy")
    few = [
        e._replace(seconds={k: s for k, s in e.seconds.items() if k != "16x16" or at == 0})
        for at, e in enumerate(examples(9, 5))
    ]
    found = SizeModel(few, TILES, cores=CORES)
    assert "16x16" not in found.keys
    assert set(found.predict({"m": 64, "n": 64}, ["32x32", "64x64"]).keys) == {"32x32", "64x64"}
    assert found.predict({"m": 64, "n": 64}, []).keys == []
