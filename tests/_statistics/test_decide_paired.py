"""Finalists are compared run by run when the device moved under them: a decision from samples in the order taken."""

from __future__ import annotations

import random

import pytest

from tunebook._base.config_codec import encode, fingerprint
from tunebook._base.vocabulary import Measurement
from tunebook._statistics.decide import decide
from tunebook._statistics.race import median_s, typical_s

LEVELS = (0.80, 0.87, 1.00, 1.03)  # of a recorded A4000


def measured(config, samples, *, dropped=False):
    return Measurement(
        config=encode(config), fingerprint=fingerprint(config), code="c", policy="p", environment="e",
        samples_s=tuple(samples), dropped=dropped,
    )  # fmt: skip


def raced(costs, rounds, seed, cv=0.002):
    """Samples of finalists that ran in rounds, while the clock of the device moved every eight runs or so."""
    rng, level = random.Random(seed), 1.0
    samples = {config: [] for config in costs}
    for _ in range(rounds):
        for config in rng.sample(list(costs), len(costs)):
            level = rng.choice(LEVELS) if rng.random() < 1 / 8 else level
            samples[config].append(costs[config] * level * (1 + cv * rng.lognormvariate(0, 0.6)))
    return samples


def winner_of(samples, **options):
    return decide([measured(*pair) for pair in samples.items()], **options).winner.measurement.config


def test_finalists_on_a_clock_that_moves_are_told_apart_by_their_rounds():
    many = [raced({"a": 1.03, "z": 1.0}, 48, seed) for seed in range(1000)]
    wrong = sum(winner_of(samples) == "a" for samples in many)
    wrong_by_samples = sum(typical_s(samples["a"]) < typical_s(samples["z"]) for samples in many)
    assert 5 * wrong <= wrong_by_samples


def test_the_winner_leads_a_ranking_with_times_as_they_were_measured():
    for seed in range(20):
        samples = raced({"a": 1.03, "b": 1.1, "z": 1.0}, 48, seed)
        verdict = decide([measured(*pair) for pair in samples.items()])
        values = [r.value_s for r in verdict.ranking]
        assert values == sorted(values)
        assert [r.measurement.config for r in verdict.ranking] == ["z", "a", "b"]
        assert values[0] == pytest.approx(typical_s(samples["z"]), rel=0.1)


def test_the_order_of_measurements_does_not_matter():
    rng = random.Random(1)
    for seed in range(20):
        measurements = [measured(*pair) for pair in raced({"a": 1.01, "b": 1.02, "z": 1.0}, 24, seed).items()]
        assert decide(measurements) == decide(rng.sample(measurements, 3))


def test_another_objective_sees_the_samples_as_they_are():
    samples = raced({"a": 1.03, "z": 1.0}, 24, 3)
    verdict = decide([measured(*pair) for pair in samples.items()], objective=median_s)
    assert {r.measurement.config: r.value_s for r in verdict.ranking} == {c: median_s(s) for c, s in samples.items()}


def test_candidates_with_the_same_samples_stay_equal():
    samples = raced({"a": 1.03, "z": 1.0}, 48, 4)
    verdict = decide([measured(*pair) for pair in (samples | {"twin": samples["z"]}).items()])
    assert len({r.value_s for r in verdict.ranking if r.measurement.config in {"twin", "z"}}) == 1
    assert verdict.winner.measurement.config == "twin"  # the first by the alphabet


def test_a_dropped_candidate_stays_behind_the_finalists():
    samples = raced({"a": 1.03, "z": 1.0}, 48, 5)
    verdict = decide([*(measured(*pair) for pair in samples.items()), measured("early", [0.5] * 48, dropped=True)])
    assert [r.measurement.config for r in verdict.ranking] == ["z", "a", "early"]


@pytest.mark.parametrize(
    ("clock", "rule"),
    [
        ("host-clock", "tie, kept the heuristic"),
        ("do_bench", "tie, kept the heuristic"),
        ("device-events/cold-l2/launch", "tie, first by its values"),
        ("device-profiler/warm-cache", "tie, first by its values"),
        ("opencl-events", "tie, first by its values"),  # as records have it
        ("device-clock/quartz", "tie, first by its values"),
    ],
)
def test_times_by_any_device_clock_get_the_narrow_tolerance(clock, rule):
    """A heuristic 1.2 % behind the fastest, with no clear gap between them, is kept on a host clock only."""
    measurements = [
        measured(name, [1 + 0.003 * place] * 16)._replace(policy=f"{clock}/race/warmup=1/forward")
        for place, name in enumerate("abcde")
    ]
    assert decide(measurements, heuristic=fingerprint("e")).rule == rule


@pytest.mark.parametrize(("typical_us", "cv"), [(3.7, 0.028), (6.1, 0.02), (10.6, 0.013), (340.0, 0.001)])
@pytest.mark.promise("heuristic-wins-ties")
def test_short_kernels_that_are_alike_are_tied_by_a_device_clock(typical_us, cv):
    """With the noise and the ticks of 32 ns that an H200's events show, for four kernels that are the same."""
    rng, tick = random.Random(7), 32e-9
    kept = 0
    for _ in range(80):
        samples = {
            name: [tick * round(typical_us * 1e-6 * rng.gauss(1, cv) / tick) for _ in range(48)] for name in "abcd"
        }
        measurements = [measured(*pair)._replace(policy="device-events/cold-l2/race") for pair in samples.items()]
        kept += decide(measurements, heuristic=fingerprint("c")).winner.measurement.config == "c"
    assert kept >= 79
