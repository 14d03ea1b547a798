"""Tuning by search: batches, budgets, resuming, and starting from what the book knows."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from kernels import FakeClock, fake_tuner, note_in
from limits import HANG_S

import tunebook as tb
from tunebook import AutotunePolicy, Config, DefinitionError, Space, TuningFailed
from tunebook._arrays import device_properties
from tunebook._arrays.device_properties import DeviceProperties
from tunebook._base.record_format import Body, Head, Record
from tunebook._base.vocabulary import Failure, Measurement, Problem
from tunebook._selection import trusted_entries
from tunebook._tuning.plan import RACED_WHOLE, TRIALS
from tunebook.search import nearest
from tunebook.search._warm_start import choices_worth, distance, start_from, times_of

BIG = Space(m=range(20), n=range(20), k=[1, 2, 4, 8, 16]).where(lambda c: c.m + c.n < 36)


class Bench:
    """A tunable function over a big space on a fake clock; it knows which configurations ran."""

    def __init__(self, tmp_path, *, best=(7, 3, 4), space=BIG, fails=lambda _c: False, **options):
        self.clock, self.ran, self.events = FakeClock(), [], []

        def run(x, *, config):
            self.ran.append(config)
            if fails(config):
                raise ValueError("it does not fit")
            far = abs(config.m - best[0]) + abs(config.n - best[1]) + abs(config.k - best[2])
            self.clock.spend(1e-4 * (1 + far))
            return x

        options = {"heuristic": {"m": 19, "n": 0, "k": 1}, **options}
        self.tuner = fake_tuner(self.clock)
        heard = note_in(self.events)
        self.function = tb.tunable(
            run, space=space, name="searched", store=tmp_path, tuner=self.tuner, on_event=heard, **options
        )

    @property
    def tried(self):
        return set(self.ran)


def test_a_space_too_big_to_race_is_searched_and_the_best_is_found(tmp_path):
    bench = Bench(tmp_path)
    assert len(BIG) > RACED_WHOLE
    bench.function(1)
    tuned = tb.tune(bench.function, 1)
    assert tuned.config == Config(m=7, n=3, k=4)
    assert len(bench.tried) <= TRIALS + 1
    assert tuned.complete
    assert ("autotune_start", TRIALS) in [(name, data.get("candidates")) for name, data in bench.events]


def test_losers_stop_after_a_few_runs(tmp_path):
    bench = Bench(tmp_path)
    bench.function(1)
    slow = [config for config in bench.tried if config.m + config.n > 20]
    assert max(bench.ran.count(config) for config in slow) <= 8
    assert bench.ran.count(Config(m=7, n=3, k=4)) > 8


def test_a_small_space_is_raced_whole_unless_a_strategy_is_asked_for(tmp_path):
    options = {"space": Space(m=range(20), n=range(5), k=[4]), "heuristic": {"m": 19, "n": 0, "k": 4}}
    whole, searched = Bench(tmp_path / "a", **options), Bench(tmp_path / "b", **options, strategy="local")
    whole.function(1)
    assert len(whole.tried) == 100
    tb.tune(searched.function, 1, budget="30 trials")
    assert len(searched.tried) <= 31


def test_a_budget_of_trials_is_kept_and_the_next_tuning_goes_on_from_there(tmp_path):
    first = Bench(tmp_path)
    once = tb.tune(first.function, 1, budget="40 trials")
    assert once.ran == 40
    second = Bench(tmp_path)
    twice = tb.tune(second.function, 1, budget="40 trials")
    again = [m for m in twice.measurements if m.fingerprint in {m.fingerprint for m in once.measurements}]
    assert len(twice.measurements) >= 80
    assert len(again) >= 40
    # Only finalists and newcomers run.
    assert len(second.tried) <= 40 + 16 + 2


def test_a_budget_of_seconds_ends_a_search_which_says_so(tmp_path):
    bench = Bench(tmp_path)
    tuned = tb.tune(bench.function, 1, budget=0.2)
    assert not tuned.complete
    assert len(bench.tried) < TRIALS
    assert tuned.config in BIG


def test_a_decision_in_a_big_space_is_found_by_the_next_process_without_listing_it(tmp_path):
    Bench(tmp_path).function(1)
    later = Bench(tmp_path)
    assert later.function.explain(1).selection.source == "persistent"
    later.function(1)
    assert later.tried == {Config(m=7, n=3, k=4)}
    assert later.function.explain(1).selection.source == "memory"


def test_failures_are_data_and_all_failing_is_an_error_with_each(tmp_path):
    bench = Bench(tmp_path, fails=lambda c: c.m < 10, best=(12, 3, 4))
    bench.function(1)
    assert tb.tune(bench.function, 1).config == Config(m=12, n=3, k=4)
    hopeless = Bench(tmp_path / "b", fails=lambda _c: True, heuristic=None, strategy="random")
    with pytest.raises(TuningFailed, match="candidates failed"):
        tb.tune(hopeless.function, 1, budget="20 trials")


def test_an_unknown_strategy_is_an_error_where_the_kernel_is_defined(tmp_path):
    with pytest.raises(DefinitionError, match="invalid strategy='best'; use one of"):
        Bench(tmp_path, strategy="best")


def test_an_own_strategy_is_used(tmp_path):
    proposed = []

    class First:
        def __init__(self, space, *, seed, start):
            self.left = iter(space)

        def propose(self, n):
            found = list(itertools.islice(self.left, n))
            proposed.extend(found)
            return found

        def observe(self, observations):
            list(observations)

    bench = Bench(tmp_path)
    tb.tune(bench.function, 1, strategy=First, budget="20 trials")
    assert bench.tried >= set(proposed)
    assert len(proposed) == 20


# ------------------------------------------------------------------------------------------------- what is known


def record(device, key, times, op="searched@v0"):
    """A record with seconds by configuration; None is a failure."""
    measurements = []
    for values, seconds in times.items():
        config = Config(m=values[0], n=values[1], k=values[2])
        failure = Failure(kind="launch", message="no") if seconds is None else None
        measurements.append(
            Measurement(
                config=tb_encode(config),
                fingerprint=tb_fingerprint(config),
                code="c",
                policy="p",
                environment="e",
                samples_s=() if seconds is None else (seconds,) * 3,
                failure=failure,
            )
        )
    best = min((t, v) for v, t in times.items() if t is not None)[1]
    config = tb_encode(Config(m=best[0], n=best[1], k=best[2]))
    head = Head(problem=Problem(device, op, key), config=config, checksum="", origin="tuned")
    return Record(head, Body(measurements=tuple(measurements)))


def tb_encode(config):
    from tunebook._base.config_codec import encode

    return encode(config)


def tb_fingerprint(config):
    from tunebook._base.config_codec import fingerprint

    return fingerprint(config)


def test_a_search_begins_with_the_best_of_the_nearest_shape_and_ends_with_failed_candidates(tmp_path):
    records = [
        record("gpu", '{"n":1024}', {(1, 1, 1): 1.0, (2, 2, 2): 2.0, (5, 5, 1): None}),
        record("gpu", '{"n":8192}', {(3, 3, 4): 1.0, (1, 1, 1): 5.0}),
    ]
    start = start_from(records, Problem("gpu", "searched@v0", '{"n":2048}'), BIG)
    assert [dict(c) for c in start.first][:2] == [{"m": 1, "n": 1, "k": 1}, {"m": 3, "n": 3, "k": 4}]
    assert [dict(c) for c in start.last] == [{"m": 5, "n": 5, "k": 1}]


def test_times_elsewhere_are_handed_to_the_search_record_by_record():
    records = [
        record("other", '{"n":1024}', {(1, 1, 1): 1.0, (2, 2, 2): 2.0, (99, 1, 1): 1.0}),
        record("third", '{"n":1024}', {(3, 3, 4): 1.0}),  # one time alone says nothing about others
    ]
    start = start_from(records, Problem("gpu", "searched@v0", '{"n":1024}'), BIG)
    assert [[(dict(o.config)["m"], o.seconds) for o in source] for source in start.elsewhere] == [[(1, 1.0), (2, 2.0)]]


def test_records_are_alike_by_the_product_of_their_sizes_and_come_first():
    times = {(1, 1, 1): 1.0, (2, 2, 2): 2.0}
    keys = {"far": '{"m":256,"n":256}', "other": '{"m":64,"n":64}', "near": '{"m":32,"n":128}'}
    records = [record("gpu" if name != "other" else "third", key, times) for name, key in keys.items()]
    start = start_from(records, Problem("gpu", "searched@v0", '{"m":64,"n":64}'), BIG)
    assert (len(start.elsewhere), start.alike, start.near) == (3, 2, 1)


def test_devices_are_ranked_by_the_speed_of_their_choices_here():
    here = [record("here", '{"n":1}', {(1, 1, 1): 1.0, (2, 2, 2): 4.0})]
    alike = record("alike", '{"n":1}', {(1, 1, 1): 9.0, (2, 2, 2): 20.0})
    unlike = record("unlike", '{"n":1}', {(1, 1, 1): 9.0, (2, 2, 2): 2.0})
    times = lambda records: [times_of(r) for r in records]
    assert choices_worth(times(here), times([alike])) == 1.0
    assert choices_worth(times(here), times([unlike])) == 0.25
    new = '{"n":64}'
    there = [record("unlike", new, {(4, 4, 4): 1.0}), record("alike", new, {(9, 9, 8): 1.0})]
    start = start_from([*here, alike, unlike, *there], Problem("here", "searched@v0", new), BIG)
    assert dict(start.first[0]) == {"m": 9, "n": 9, "k": 8}


def test_devices_without_a_common_problem_are_ranked_by_their_properties():
    asked = Problem("gpu:AMD Radeon PRO W6600", "searched@v0", '{"n":64}')
    there = [
        record("gpu:NVIDIA A100-PCIE-40GB", asked.call_key, {(4, 4, 4): 1.0}),
        record("gpu:NVIDIA RTX A4000", asked.call_key, {(9, 9, 8): 1.0}),
    ]
    assert dict(start_from(there, asked, BIG).first[0]) == {"m": 9, "n": 9, "k": 8}
    measured = [record(each.problem.device, '{"n":1}', {(1, 1, 1): 1.0, (2, 2, 2): 4.0}) for each in there]
    here = record(asked.device, '{"n":1}', {(1, 1, 1): 1.0, (2, 2, 2): 2.0})
    worse = record("gpu:NVIDIA RTX A4000", '{"n":1}', {(1, 1, 1): 5.0, (2, 2, 2): 2.0})
    start = start_from([*there, here, measured[0], worse], asked, BIG)
    assert dict(start.first[0]) == {"m": 4, "n": 4, "k": 4}  # what was measured on both counts more than properties


def test_a_record_tells_the_properties_of_its_device_where_the_driver_is_not(tmp_path, monkeypatch):
    monkeypatch.setattr(device_properties, "NOTED", noted := {})
    monkeypatch.setattr(trusted_entries, "NOTED", noted)
    device_properties.note_properties(tb.device_fingerprint(), DeviceProperties("nvidia", 48, 1560, 448, 4096))
    kernel = tb.tunable(lambda n, *, config: n, space=[{"a": 1}, {"a": 2}], store=tmp_path, check=False)
    tb.tune(kernel, 1)
    (found,) = kernel.selector.persistent.store.items()
    noted.clear()
    asked = Problem("gpu:NVIDIA RTX A4000", "searched@v0", '{"n":64}')
    there = [record(device, asked.call_key, {at: 1.0}) for device, at in (("Z1", (4, 4, 4)), ("Z9", (9, 9, 8)))]
    there[1] = Record(there[1].head, replace(there[1].body, provenance=found.body.provenance))
    assert dict(start_from(there, asked, BIG).first[0]) == {"m": 9, "n": 9, "k": 8}


def test_keys_are_near_by_their_sizes_and_unlike_in_anything_else():
    key = '{"a":{"$array":["numpy","%s",[%s,64],"C"]}}'
    assert distance(key % ("float32", 128), key % ("float32", 512)) == 2.0
    assert distance(key % ("float32", 128), key % ("float16", 128)) == float("inf")
    assert distance(key % ("float32", 128), "not ours") == float("inf")


def test_a_tuning_starts_from_another_shape_in_the_book(tmp_path):
    first = Bench(tmp_path)
    first.function(1)
    second = Bench(tmp_path)
    tb.tune(second.function, 2, budget="8 trials")
    assert second.function.selector.choose(second.function.kernel.invocation((2,)), second.function.kernel) == Config(
        m=7, n=3, k=4
    )


def test_a_search_still_runs_where_the_book_cannot_be_listed(tmp_path, monkeypatch):
    bench = Bench(tmp_path)
    store = bench.function.selector.persistent.store

    def broken(_op=None):
        raise tb.StoreError("read", "here", "the shelf is gone")

    monkeypatch.setattr(type(store), "items", lambda _self, op=None: broken(op))
    with pytest.warns(match="the shelf is gone"):
        assert tb.tune(bench.function, 1, budget="20 trials").ran == 20


# --------------------------------------------------------------------------------------------------------- nearest


def test_nearest_answers_an_unseen_size_from_its_neighbours_and_says_how_sure_it_is(tmp_path):
    Bench(tmp_path).function(1024)
    bench = Bench(tmp_path, policy=AutotunePolicy(cache_miss_fallback="nearest"))
    bench.function(2048)
    assert bench.tried == {Config(m=7, n=3, k=4)}
    told = next(data for name, data in bench.events if name == "nearest")
    assert told["confidence"] == pytest.approx(0.5)  # one doubling away
    assert told["near"] == '{"x":1024}'


def test_a_nearest_answer_says_how_sure_it_is():
    near = [record("gpu", '{"n":1024}', {(1, 1, 1): 1.0, (2, 2, 2): 2.0})]
    found = nearest(near, Problem("gpu", "searched@v0", '{"n":2048}'))
    assert str(found) == "50% of the best speed expected, from the nearest tuned problem (n: 1024)"


def test_nearest_is_the_heuristic_where_nothing_near_is_known(tmp_path):
    bench = Bench(tmp_path, policy=AutotunePolicy(cache_miss_fallback="nearest"))
    bench.function(2048)
    assert bench.tried == {Config(m=19, n=0, k=1)}
    assert nearest([], Problem("d", "o", "{}")) is None


def test_a_tuner_that_is_not_ours_gets_as_many_candidates_as_a_search_would_try(tmp_path):
    class First:
        def autotune(self, make_fn, args, kwargs, candidates):
            self.given = list(candidates)
            return self.given[0]

    bench = Bench(tmp_path)
    theirs = First()
    selector = tb.ConfigSelectorChain(tb.ConfigCache(), tuner=theirs)
    kernel = bench.function.kernel
    assert selector.choose(kernel.invocation((1,)), kernel) in BIG
    assert len(theirs.given) == TRIALS


def test_calls_that_try_one_candidate_each_go_through_a_few_of_a_big_space(tmp_path):
    policy = AutotunePolicy(cache_miss_fallback="incremental")
    bench = Bench(tmp_path, policy=policy)
    for _ in range(400):
        bench.function(1)
    assert tb.wait_for_background(HANG_S), "its result is written behind the calls, and must not reach the next test"
    assert 10 < len(bench.tried) <= 65


def test_a_search_goes_on_while_nothing_has_worked(tmp_path):
    """Without a configuration, the call would fail for good, though one of the space works."""
    bench = Bench(tmp_path, fails=lambda c: (c.m, c.n, c.k) != (5, 17, 2), heuristic=None)
    bench.function(1)
    assert len(bench.tried) > TRIALS
    assert Config(m=5, n=17, k=2) in bench.tried


def test_a_search_in_which_nothing_works_ends(tmp_path):
    bench = Bench(tmp_path, fails=lambda _c: True, heuristic=None)
    with pytest.raises(TuningFailed):
        tb.tune(bench.function, 1)
    assert TRIALS < len(bench.tried) < 1100 < len(BIG)


def test_a_budget_of_trials_ends_a_search_in_which_nothing_has_worked(tmp_path):
    bench = Bench(tmp_path, fails=lambda _c: True, heuristic=None)
    with pytest.raises(TuningFailed):
        tb.tune(bench.function, 1, budget="20 trials")
    assert len(bench.tried) == 20


@pytest.mark.parametrize("facts", [{"cores": -5}, {"cores": 10**400}, {"cores": True}, {"cores": "8"}, ["cores"]])
def test_strange_properties_of_a_device_in_a_record_are_left_out(facts, monkeypatch):
    monkeypatch.setattr(device_properties, "NOTED", {})
    device_properties.note_recorded("gpu:ACME", facts)
    assert device_properties.likeness("gpu:ACME", "gpu:NVIDIA H200") is None
    assert device_properties.cores_of("gpu:ACME") == 1
