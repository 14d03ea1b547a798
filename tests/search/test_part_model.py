"""What one part of a model of times finds out: blocks that share a core, the edge of a cache, the nearest problems."""

import itertools
import math
import random

import pytest

from tunebook.search import Example, SizeModel
from tunebook.search._local_process import LocalProcess, alike, first_scales
from tunebook.search._part_model import blocks_at_once, learn_part
from tunebook.search._structures import Block, Structure, touched

np = pytest.importorskip("numpy")

CORES = 16
TILES = {f"{tile} {way}": {"TILE": tile, "way": way} for tile, way in itertools.product((16, 32, 64, 128), (1, 3, 4))}
LAUNCHED = Structure((Block(("TILE",), 0, "launch"),))


def resident_s(m, n, tile):
    """Return the time of a made-up kernel: a core runs `way` blocks at once, each as fast as one."""
    rounds = math.ceil(math.ceil(m / tile["TILE"]) / (CORES * tile["way"]))
    return 1e-6 + rounds * tile["TILE"] * n * tile["way"] ** 0.8 * 1e-9


def cached_s(m, n, tile):
    """Return the time of a made-up kernel: beyond 2**16 elements, large tiles are slower."""
    beyond = 1 / (1 + (2**16 / (m * n)) ** 6)
    return 1e-6 + m * n * 1e-9 * (1 + 16 / tile["TILE"]) * (1 + beyond * tile["TILE"] / 100) * (1 + tile["way"] / 20)


def data_of(seconds, many, seed=0):
    rng = random.Random(seed)
    shapes = [(round(2 ** rng.uniform(5, 13)), round(2 ** rng.uniform(3, 7))) for _ in range(many)]
    examples = [
        Example({"m": m, "n": n}, {key: seconds(m, n, tile) * rng.gauss(1, 0.002) for key, tile in TILES.items()})
        for m, n in shapes
    ]
    return SizeModel(examples[: many // 2], TILES, cores=CORES), examples[many // 2 :]


def test_it_finds_how_many_blocks_a_core_runs_at_once():
    model, _ = data_of(resident_s, 200)
    part = learn_part(model._data, LAUNCHED, blocks_at_once(model._data, LAUNCHED), 0)
    found = dict(zip(model.keys, part.resident, strict=True))
    # Where every problem has few blocks, the number cannot be told.
    assert [found[key] for key in TILES if TILES[key]["TILE"] <= 32] == [1, 3, 4] * 2


def test_it_finds_the_edge_of_a_cache_and_chooses_by_it():
    model, unseen = data_of(cached_s, 400)
    part = learn_part(model._data, LAUNCHED, (), 0)
    assert 2**15 < part.cache < 2**17
    chosen = [e.seconds[model.predict(e.sizes).keys[0]] / min(e.seconds.values()) - 1 for e in unseen]
    assert sum(chosen) / len(chosen) < 0.01


def test_parts_of_large_models_are_learnt_from_different_problems():
    model, _ = data_of(resident_s, 400)
    found = [learn_part(model._data, LAUNCHED, (), place).scales for place in (0, 1)]
    assert found[0] != found[1]


def test_the_bound_of_many_problems_comes_from_some_of_them():
    model, _ = data_of(resident_s, 800)
    assert 200 <= len(model.learnt.left_out) <= 256


def test_configurations_with_the_same_inputs_share_one_covariance():
    places = np.arange(4)[:, None, None] // 2 * np.ones((4, 5, 1))
    measured = np.ones((4, 5), bool)
    assert [each.tolist() for each in alike(np, places, measured)] == [[0, 2], [0, 0, 1, 1]]
    measured[1, 3] = False
    assert [each.tolist() for each in alike(np, places, measured)] == [[0, 1, 2], [0, 1, 2, 2]]


def test_the_nearest_problems_predict_as_well_as_all(monkeypatch):
    rng = np.random.default_rng(0)
    size = np.sort(rng.uniform(0, 10, 300))[None]
    inputs, targets = {"size 0": size}, np.sin(size)
    process = LocalProcess(np, inputs, np.ones((1, 300), bool), first_scales(inputs))
    near, _ = process.predict({"size 0": size[:, 150:151]}, targets, [150])
    monkeypatch.setattr("tunebook.search._local_process._NEAREST", 299)
    exact, _ = process.predict({"size 0": size[:, 150:151]}, targets, [150])
    assert near == pytest.approx(exact, abs=0.01)


def test_a_problem_touches_as_many_elements_as_its_matrices_have():
    assert touched(np.array([[2.0, 3.0, 5.0]])).tolist() == [6 + 10 + 15]
    assert touched(np.array([[7.0]])).tolist() == [7]
