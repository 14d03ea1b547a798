"""Verification: after an update, or when asked, only those are measured again that could have won."""

from __future__ import annotations

import numpy as np
import pytest
from kernels import FakeClock, PretendKernel, Tiles, fake_tuner, invocation, note_in

import tunebook as tb
from tunebook._base.config_codec import encode
from tunebook._base.errors import TunebookWarning
from tunebook._base.vocabulary import Failure, Measurement
from tunebook._cli._entries import seconds_of
from tunebook._cli.pin import pin
from tunebook._cli.unpin import unpin
from tunebook._measure.stopwatch import Stopwatch
from tunebook._report.entry import entry_of
from tunebook._selection.recorded_decision import verdict_of
from tunebook._tuning.reverify import FEWEST, finalists
from tunebook.testing import Landscape

FAST, NEAR, GUESS, NEW = Tiles(64), Tiles(65), Tiles(32), Tiles(1)
SLOW = [Tiles(100 + n) for n in range(20)]
COSTS = {**{config: 0.5 + n / 10 for n, config in enumerate(SLOW)}, FAST: 0.001, NEAR: 0.0011, GUESS: 0.1}


def make(path, *, versions="driver 1", costs=COSTS, tuner=None, **options):
    clock = FakeClock()
    kernel = PretendKernel(clock, costs, heuristic=GUESS)
    kernel.environment = lambda _: versions
    events = []
    chain = tb.ConfigSelectorChain(
        tb.ConfigCache(),
        tuner=tuner or fake_tuner(clock),
        persistent=tb.PersistentCache("pretend", path, cfg_type=Tiles),
        on_event=note_in(events),
        **options,
    )
    return chain, kernel, events


def choose(chain, kernel):
    return chain.choose(invocation(kernel, 1), kernel)


def record_of(chain, kernel):
    return chain.persistent.read(kernel.problem(invocation(kernel, 1)))


def starts(events):
    return [(data["verifying"], data["candidates"]) for event, data in events if event == "autotune_start"]


@pytest.fixture
def tuned(tmp_path):
    """A book in which the choice was made under driver 1."""
    chain, kernel, events = make(tmp_path)
    assert choose(chain, kernel) == FAST
    assert starts(events) == [(False, len(COSTS))]
    return tmp_path


def test_after_an_update_only_finalists_and_the_heuristic_run_and_the_entry_is_stamped_anew(tuned):
    chain, kernel, events = make(tuned, versions="driver 2")
    before = record_of(chain, kernel)
    assert choose(chain, kernel) == FAST
    assert set(kernel.runs) <= {FAST, NEAR, GUESS}
    assert [verifying for verifying, _ in starts(events)] == [True]
    after = record_of(chain, kernel)
    assert (before.head.environment, after.head.environment) == ("driver 1", "driver 2")
    assert after.head.config == before.head.config
    kept = [m for m in after.body.measurements if m.environment == "driver 1"]
    assert sorted(kept, key=repr) == sorted(before.body.measurements, key=repr)
    fresh = {m.fingerprint for m in after.body.measurements if m.environment == "driver 2"}
    assert len(fresh) == len(set(kernel.runs))
    assert after.body.provenance["verified"]["environments"] == ["driver 1"]
    assert after.body.provenance["verified"]["when"] >= before.body.provenance["when"]


def test_a_process_after_the_verification_runs_nothing(tuned):
    choose(*make(tuned, versions="driver 2")[:2])
    chain, kernel, events = make(tuned, versions="driver 2")
    assert choose(chain, kernel) == FAST
    assert kernel.runs == []
    assert [(event, data.get("level")) for event, data in events] == [("cache_hit", "persistent")]


def test_back_under_the_old_versions_nothing_runs_either(tuned):
    choose(*make(tuned, versions="driver 2")[:2])
    chain, kernel, _ = make(tuned, versions="driver 1")
    assert choose(chain, kernel) == FAST
    assert kernel.runs == []


def test_going_to_and_fro_between_versions_never_runs_everything(tuned):
    for versions in ("driver 2", "driver 3", "driver 2", "driver 1", "driver 3"):
        chain, kernel, _ = make(tuned, versions=versions)
        assert choose(chain, kernel) == FAST
        assert set(kernel.runs) <= {FAST, NEAR, GUESS}


def test_if_another_is_faster_now_everything_is_tuned_and_the_new_choice_is_written_down(tuned):
    costs = {**COSTS, FAST: 0.3, NEAR: 0.01, SLOW[3]: 0.002}
    chain, kernel, events = make(tuned, versions="driver 2", costs=costs)
    assert choose(chain, kernel) == SLOW[3]
    assert [verifying for verifying, _ in starts(events)] == [True, False]
    assert set(kernel.runs) == set(costs)
    assert chain.persistent.get(*kernel.problem(invocation(kernel, 1))) == SLOW[3]
    assert "verified" not in record_of(chain, kernel).body.provenance


def test_a_choice_that_is_tied_now_stays(tuned):
    chain, kernel, events = make(tuned, versions="driver 2", costs={**COSTS, FAST: 0.001, NEAR: 0.000999})
    assert choose(chain, kernel) == FAST
    assert [verifying for verifying, _ in starts(events)] == [True]


def test_a_finalist_that_beats_the_choice_wins_though_the_rest_runs_after_it(tuned):
    chain, kernel, _ = make(tuned, versions="driver 2", costs={**COSTS, FAST: 0.3, NEAR: 0.01})
    assert choose(chain, kernel) == NEAR


def test_if_all_finalists_fail_everything_else_is_tried(tuned):
    broken = dict.fromkeys((FAST, NEAR, GUESS), RuntimeError("no such instruction"))
    chain, kernel, _ = make(tuned, versions="driver 2", costs={**COSTS, **broken})
    assert choose(chain, kernel) == SLOW[0]
    assert [kernel.runs.count(config) for config in broken] == [1, 1, 1]


@pytest.mark.filterwarnings("ignore:.*is not tuned")
def test_if_everything_fails_after_an_update_the_heuristic_answers(tuned):
    chain, kernel, _ = make(tuned, versions="driver 2", costs=dict.fromkeys(COSTS, RuntimeError("no driver")))
    assert choose(chain, kernel) == GUESS
    assert record_of(chain, kernel).head.environment == "driver 1"


def test_other_code_or_candidates_are_tuned_in_full(tuned):
    chain, kernel, events = make(tuned, versions="driver 2", costs={**COSTS, NEW: 0.2})
    assert choose(chain, kernel) == FAST
    assert starts(events) == [(False, len(COSTS) + 1)]


def test_a_candidate_added_after_a_verification_runs_against_the_choice_alone(tuned):
    choose(*make(tuned, versions="driver 2")[:2])
    chain, kernel, _ = make(tuned, versions="driver 2", costs={**COSTS, NEW: 0.2})
    assert choose(chain, kernel) == FAST
    assert set(kernel.runs) == {FAST, NEW}
    carried = [m for m in record_of(chain, kernel).body.measurements if "measured_under" in m.extra]
    assert len(carried) == len(SLOW)
    assert all(m.dropped for m in carried)


def test_with_tuning_off_an_outdated_entry_is_not_verified_and_used_only_if_trusted(tuned):
    policy = tb.AutotunePolicy(allow_autotune=False, trust="exact")
    chain, kernel, _ = make(tuned, versions="driver 2", policy=policy)
    assert choose(chain, kernel) == GUESS
    policy.trust = None
    with pytest.warns(TunebookWarning, match="trusted as 'versions'"):
        assert choose(chain, kernel) == FAST
    assert kernel.runs == []
    assert record_of(chain, kernel).head.environment == "driver 1"


def test_a_tuner_of_ones_own_tunes_in_full(tuned):
    class Last:
        def autotune(self, make_fn, args, kwargs, candidates):
            return list(candidates)[-1]

    chain, kernel, events = make(tuned, versions="driver 2", tuner=Last())
    assert choose(chain, kernel) == GUESS
    assert starts(events) == [(False, len(COSTS))]


# ---------------------------------------------------------------------------------------------------------- when asked


def test_a_trusted_choice_is_measured_again_when_asked(tuned):
    chain, kernel, events = make(tuned)
    verified = chain.verify(invocation(kernel, 1), kernel)
    assert (verified.held, verified.config) == (True, FAST)
    assert set(kernel.runs) <= {FAST, NEAR, GUESS}
    assert verified.tuned.ran == len(set(kernel.runs))
    assert [event for event, _ in events] == ["autotune_start", "autotune_finish"]
    assert choose(chain, kernel) == FAST
    assert len(record_of(chain, kernel).body.measurements) == len(COSTS)


def test_a_report_counts_the_candidates_that_a_verification_did_not_run_again(tmp_path):
    chain, kernel, _ = make(tmp_path, costs={**COSTS, NEW: ValueError("too large")})
    choose(chain, kernel)
    before = record_of(chain, kernel)
    assert chain.verify(invocation(kernel, 1), kernel).held
    numbers = [(entry.measured, dict(entry.failed)) for entry in map(entry_of, (before, record_of(chain, kernel)))]
    assert numbers == [(len(COSTS) + 1, {"launch": 1})] * 2


def test_a_choice_that_is_beaten_under_the_same_versions_is_tuned_again_in_full(tuned):
    costs = {**COSTS, FAST: 0.3, NEAR: 0.01, SLOW[3]: 0.002}
    chain, kernel, _ = make(tuned, costs=costs)
    verified = chain.verify(invocation(kernel, 1), kernel)
    assert (verified.held, verified.config) == (False, SLOW[3])
    assert verified.reason == f"{NEAR!r} is faster now than the choice"
    assert set(kernel.runs) == set(costs)
    assert verified.tuned.ran >= len(costs)


def test_where_nothing_is_known_verifying_is_tuning(tmp_path):
    chain, kernel, _ = make(tmp_path)
    verified = chain.verify(invocation(kernel, 1), kernel)
    assert (verified.held, verified.config) == (False, FAST)
    assert verified.reason == "there was no choice to verify"


def pin_to(chain, kernel, config):
    chain.persistent.write(pin(record_of(chain, kernel), encode(config)))


def test_a_pin_that_is_beaten_stands_and_does_not_hold(tuned):
    chain, kernel, _ = make(tuned)
    pin_to(chain, kernel, NEAR)
    verified = chain.verify(invocation(kernel, 1), kernel)
    assert (verified.held, verified.kept, verified.config) == (False, True, NEAR)
    assert verified.reason == f"the measured winner is {FAST!r}; the pin stands"
    again = chain.tune(invocation(kernel, 1), kernel)
    assert repr(again).startswith(f"<Tuned {NEAR!r}: the pin stands; measured winner {FAST!r}: 1 ms, ")


def test_after_an_unpin_a_listing_and_the_explanation_have_one_time(tuned):
    chain, kernel, _ = make(tuned, costs={**COSTS, FAST: 0.00101})
    pin_to(chain, kernel, NEAR)
    chain.verify(invocation(kernel, 1), kernel)
    record = unpin(record_of(chain, kernel))
    assert record.head.config == encode(FAST)
    assert seconds_of(record) == verdict_of(record).winner.value_s == pytest.approx(0.00101)


def test_a_tuning_of_a_pinned_entry_that_a_budget_ends_leaves_its_measured_winner(tuned):
    chain, kernel, _ = make(tuned)
    pin_to(chain, kernel, NEAR)
    before = record_of(chain, kernel)
    assert chain.tune(invocation(kernel, 1), kernel, again=True, budget="1 trial").config == NEAR
    assert record_of(chain, kernel) == before


def test_a_pin_of_the_winner_holds(tuned):
    chain, kernel, _ = make(tuned)
    pin_to(chain, kernel, FAST)
    verified = chain.verify(invocation(kernel, 1), kernel)
    assert (verified.held, verified.kept, verified.config) == (True, False, FAST)


def test_after_an_edit_the_reason_for_tuning_is_the_edit(tuned):
    chain, kernel, _ = make(tuned)
    kernel.checksum = lambda _: "edited-0"
    verified = chain.verify(invocation(kernel, 1), kernel)
    assert (verified.held, verified.config) == (False, FAST)
    assert "made by other code" in verified.reason


def test_a_budget_that_ends_before_the_finalists_are_measured_proves_nothing(tuned):
    chain, kernel, _ = make(tuned, costs={**COSTS, FAST: 0.3})
    verified = chain.verify(invocation(kernel, 1), kernel, budget="10ms")
    assert (verified.held, verified.tuned.complete) == (False, False)
    assert "budget ended" in verified.reason
    assert set(kernel.runs) <= {FAST, NEAR, GUESS}


def test_a_budget_that_is_spent_on_finalists_leaves_the_rest_for_later(tuned):
    chain, kernel, _ = make(tuned, costs={**COSTS, FAST: 0.3})
    verified = chain.verify(invocation(kernel, 1), kernel, budget="3 trials")
    assert (verified.held, verified.config, verified.tuned.complete) == (False, NEAR, False)
    assert set(kernel.runs) == {FAST, NEAR, GUESS}


def test_a_tunable_function_is_verified_and_explained(tmp_path, monkeypatch):
    clock = FakeClock()

    def make_kernel():
        @tb.tunable(
            space=tb.Space(b=range(1, 20)), heuristic={"b": 7}, tuner=fake_tuner(clock), name="v", store=tmp_path
        )
        def kernel(x, *, config):
            clock.spend(config.b)
            return x

        return kernel

    make_kernel()(np.ones(3))
    old = np.__version__
    monkeypatch.setattr(np, "__version__", "99.0")
    kernel = make_kernel()
    assert "must be verified first" in str(kernel.explain(np.ones(3)))
    verified = tb.verify(kernel, np.ones(3))
    assert (verified.held, verified.config.b) == (True, 1)
    said = str(kernel.explain(np.ones(3)))
    assert "under numpy 99.0" in said
    assert f"the finalists were measured again; the other times are from before, under numpy {old}" in said


def test_a_plain_function_cannot_be_verified():
    with pytest.raises(tb.DefinitionError, match="is not tunable"):
        tb.verify(len, [])


@pytest.mark.parametrize("seed", range(8))
def test_noise_does_not_break_the_order(tmp_path, seed):
    land = Landscape(40, seed=seed, cv=0.05, spikes=0.1)
    chosen = []
    for n in range(3):
        noisy = Landscape(land.costs, seed=100 * seed + n, cv=0.05, spikes=0.1)
        kernel = OnLandscape(noisy)
        kernel.environment = lambda _, n=n: f"driver {n}"
        tuner = tb.Tuner(stopwatch=noisy_stopwatch(noisy), clock_s=lambda noisy=noisy: noisy.elapsed_s)
        chain = tb.ConfigSelectorChain(tb.ConfigCache(), tuner=tuner, persistent=tb.PersistentCache("land", tmp_path))
        chosen.append(chain.choose(invocation(kernel, 1), kernel))
        if n:
            assert len(noisy.runs) <= 20, "not everything"
    assert all(land.regret(config) <= 0.02 for config in chosen)


def noisy_stopwatch(land):
    return Stopwatch(clock_ns=land.clock_ns)


class OnLandscape(tb.Kernel):
    def __init__(self, land):
        super().__init__("land")
        self.land = land

    def run(self, *args, cfg, **kwargs):
        return self.land.make_fn(cfg)()

    def candidate_cfgs(self, inv):
        return list(self.land.configs)


# ------------------------------------------------------------------------------------------------------- the finalists


def measured(fingerprint, seconds=1.0, **fields):
    m = Measurement(
        config=fingerprint, fingerprint=fingerprint, code="c", policy="p", environment="e", samples_s=(seconds,) * 3
    )
    return m._replace(**fields)


def among(*known, winner="w"):
    return finalists(known, code="c", environment="e", winner=winner)


def test_candidates_still_in_the_race_are_the_finalists():
    known = [measured(name, n) for n, name in enumerate("wabcd", 1)]
    assert among(*known, measured("late", 0.5, dropped=True)) == set("wabcd")


def test_failures_and_measurements_of_other_code_or_versions_are_not_finalists():
    odd = [
        measured("code", code="x"),
        measured("environment", environment="x"),
        measured("failed", failure=Failure(kind="nan", message=""), samples_s=()),
    ]
    assert among(measured("w"), *odd) == {"w"}


def test_a_choice_that_was_alone_in_the_end_is_measured_against_the_closest_candidates():
    dropped = [measured(name, seconds, dropped=True) for name, seconds in (("c", 3), ("a", 1), ("b", 2))]
    assert among(measured("w"), *dropped) == {"w", "a", "b"}
    assert FEWEST == 3


def test_the_choice_is_a_finalist_though_its_measurement_is_gone():
    assert among() == {"w"}
