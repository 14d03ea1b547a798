"""Where a prediction must not be believed: kinds of calls, sizes and configurations that its model does not know."""

import json
import math
import threading

import pytest

import tunebook as tb
from tunebook._base.config_codec import fingerprint_of
from tunebook._base.record_format import Body, Head, Record
from tunebook._base.vocabulary import Failure, Measurement
from tunebook.search import Example, SizeModel, _prediction, _size_model
from tunebook.search._key_numbers import kind_and_sizes
from tunebook.search._prediction import predict
from tunebook.search._size_model import BOUNDED_FROM

pytest.importorskip("numpy")

HERE = tb.Problem("cpu:made up", "sums@v0", "")
TILES = [{"block": 2**power, "way": way} for power in range(4, 10) for way in "ab"]
STEPS = [round(20 * 1.11**step) for step in range(48)]
ARRAY = '{{"x":{{"$array":["numpy","float32",[{n},64],"C","cpu"]}},"size":{{"$tuple":[{k},{k}]}}}}'


def tiled_s(n, config):
    """Return the time of a made-up kernel whose best block grows with its size, and whose way changes at 1000."""
    slower = 1.2 if (config["way"] == "b") == (n < 1000) else 1.0
    return 1e-6 * slower * (5 + math.ceil(n / config["block"]) * (1 + config["block"] / 40))


def record(key, seconds, among=TILES, *, complete=True):
    facts = {"code": "code", "policy": "host-clock", "environment": ""}
    tried = [Measurement(config=c, fingerprint=fingerprint_of(c), samples_s=(seconds(c),) * 3, **facts) for c in among]
    head = Head(problem=HERE._replace(call_key=key), config=min(among, key=seconds), checksum="c-", origin="tuned")
    return Record(head, Body(measurements=tried, provenance={} if complete else {"complete": False}))


def sized(n, among=TILES, **options):
    return record(json.dumps({"n": n}), lambda config: tiled_s(n, config), among, **options)


def asked(key):
    return HERE._replace(call_key=key if isinstance(key, str) else json.dumps(key))


# ------------------------------------------------------------------------------------------ the call


def test_a_size_in_a_container_is_a_size():
    entries = [record(ARRAY.format(n=n, k=3), lambda c, n=n: tiled_s(n, c)) for n in STEPS]
    assert math.isfinite(predict(entries, asked(ARRAY.format(n=333, k=3))).bound)
    beyond = predict(entries, asked(ARRAY.format(n=333, k=15)))
    assert beyond.bound == math.inf
    assert beyond.outside == "size[0] is 15, and was always 3"


@pytest.mark.parametrize(
    ("same", "other"),
    [
        ('"axis":0', '"axis":1'),
        ('"axis":-1', '"axis":-2'),
        ('"alpha":0.0', '"alpha":1.0'),
        ('"causal":true', '"causal":false'),
        ('"ys":[]', '"ys":[7]'),
        ('"pad":{"$tuple":[0,-3]}', '"pad":{"$tuple":[2,-3]}'),
    ],
)
def test_numbers_that_are_no_sizes_must_be_equal(same, other):
    entries = [record(f'{{"n":{n},{same}}}', lambda c, n=n: tiled_s(n, c)) for n in STEPS]
    assert math.isfinite(predict(entries, asked(f'{{"n":333,{same}}}')).bound)
    assert predict(entries, asked(f'{{"n":333,{other}}}')) is None


def test_numpy_integers_and_buckets_are_sizes():
    keys = (
        '{"n":{"$scalar":["int64",%d]}}',
        '{"n":{"$bucket":%d}}',
        '{"x":{"$array":["numpy","f",["~%d"],"C","cpu"]}}',
    )
    for key in keys:
        entries = [record(key % n, lambda c, n=n: tiled_s(n, c)) for n in STEPS]
        assert math.isfinite(predict(entries, asked(key % 333)).bound)


def test_calls_of_one_kind_differ_in_sizes_alone():
    kind, sizes = kind_and_sizes('{"flag":true,"n":5,"x":{"$array":["numpy","float32",["~8",2],"C","cpu"]}}')
    assert sizes == {"n": 5, "x.shape[0]": 8, "x.shape[1]": 2}
    for other in ("float64", "F", "jax"):
        changed = '{"flag":true,"n":6,"x":{"$array":["numpy","float32",["~8",2],"C","cpu"]}}'
        assert kind_and_sizes(changed)[0] == kind
        swapped = {"float64": "float32", "F": "C", "jax": "numpy"}[other]
        assert kind_and_sizes(changed.replace(f'"{swapped}"', f'"{other}"'))[0] != kind
    assert kind_and_sizes("any text") == ("any text", {})


# ----------------------------------------------------------------------------------------- the sizes


def test_sizes_that_were_always_equal_say_nothing_about_calls_where_they_differ():
    entries = [record(json.dumps({"a": n, "b": n}), lambda c, n=n: tiled_s(n, c)) for n in STEPS]
    assert math.isfinite(predict(entries, asked({"a": 333, "b": 333})).bound)
    apart = predict(entries, asked({"a": 1500, "b": 35}))
    assert apart.bound == math.inf
    assert "doublings away" in apart.outside


def test_in_a_wide_gap_between_tuned_sizes_there_is_no_bound():
    entries = [sized(n) for n in (*STEPS, 100 * STEPS[-1])]
    assert math.isfinite(predict(entries, asked({"n": 333})).bound)
    gap = predict(entries, asked({"n": 10 * STEPS[-1]}))
    assert gap.bound == math.inf
    assert str(gap).startswith("no bound: the nearest tuned sizes are 3.3 doublings away, and usually within 0.1")


# --------------------------------------------------------------------------------- the configurations


def test_a_configuration_that_is_the_best_at_rare_sizes_is_not_forgotten():
    """Calls that were tuned with few candidates outnumber those that were tuned with all."""
    small = [sized(n, TILES[:4]) for n in range(21, 160)]
    entries = [*map(sized, STEPS), *small]
    found = predict(entries, asked({"n": 2000}))
    assert tiled_s(2000, found.config) <= 1.05 * min(tiled_s(2000, config) for config in TILES)


def test_regrets_are_counted_from_the_best_that_was_measured_also_if_it_cannot_be_predicted():
    """A configuration that fails somewhere is never chosen; it may be the best elsewhere all the same."""
    fast = {"block": 1024, "way": "c"}
    often = [
        record(json.dumps({"n": n}), lambda c, n=n: tiled_s(n, c) if c != fast else 1e-7, [*TILES, fast]) for n in STEPS
    ]
    failed = Measurement(
        config=fast, fingerprint=fingerprint_of(fast), samples_s=(), code="code", policy="host-clock", environment="",
        failure=Failure("launch", "out of resources"),
    )  # fmt: skip
    once = sized(25)
    once = Record(once.head, Body(measurements=(*once.body.measurements, failed)))
    found = predict([*often, once], asked({"n": 333}))
    assert found.config != fast
    assert found.bound > 1


def test_entries_of_tunings_that_a_budget_ended_do_not_judge_choices():
    cut = [sized(n, TILES[:3], complete=False) for n in STEPS]
    found = predict(cut, asked({"n": 333}))
    assert found.bound == math.inf
    assert str(found) == f"{len(STEPS)} tuned sizes, a bound needs {BOUNDED_FROM}"
    some = predict([*cut[:35], *map(sized, STEPS[35:])], asked({"n": 1500}))
    assert some.bound == math.inf
    assert f"{len(STEPS)} tuned sizes ({len(STEPS) - 35} of them show how good a choice is), a bound" in str(some)


def test_a_bound_rests_on_all_present_entries():
    """The parts of a model may be learnt from former entries."""
    before = predict([*map(sized, STEPS)], asked({"n": 333}))
    chosen = before.config
    refuted = [
        record(json.dumps({"n": n}), lambda c, n=n: tiled_s(n, c) * (5 if c == chosen else 1))
        for n in range(300, 370, 12)
    ]
    after = predict([*map(sized, STEPS), *refuted], asked({"n": 390}))
    assert before.bound < 0.01
    assert after.bound > 0.1


def test_a_candidate_that_was_tried_at_other_sizes_alone_is_tried_and_there_is_no_bound():
    late = {"block": 1024, "way": "a"}
    entries = [*map(sized, STEPS), *(sized(n, [*TILES, late]) for n in range(25, 65, 5))]
    listed = [fingerprint_of(config) for config in (*TILES, late)]
    near, far = (predict(entries, asked({"n": n}), listed=listed) for n in (42, 1500))
    assert math.isfinite(near.bound)
    assert near.also == ()
    assert far.bound == math.inf
    assert far.also == (fingerprint_of(late),)
    assert str(far) == "no bound: 1 candidate was never tried near these sizes"


def test_a_candidate_that_fails_at_some_sizes_and_works_at_others_is_tried_wherever_a_call_is_tuned():
    moody = {"block": 1024, "way": "a"}
    failure = Failure("launch", "too small")
    failed = Measurement(
        config=moody, fingerprint=fingerprint_of(moody), samples_s=(), code="code", policy="host-clock", environment="",
        failure=failure,
    )  # fmt: skip
    small = [sized(n) for n in STEPS[:20]]
    entries = [Record(r.head, Body(measurements=(*r.body.measurements, failed))) for r in small]
    entries += [sized(n, [*TILES, moody]) for n in STEPS[20:]]
    listed = [fingerprint_of(config) for config in (*TILES, moody)]
    assert predict(entries, asked({"n": 1500}), listed=listed).also == (fingerprint_of(moody),)


def test_candidates_that_differ_from_size_to_size_are_no_error():
    entries = [
        record(json.dumps({"n": n}), lambda c, n=n: tiled_s(n, c), [{"block": n // 2, "way": "a"}]) for n in STEPS
    ]
    assert predict(entries, asked({"n": 333})) is None
    entries = [sized(n, [{"block": n // part, "way": "a"} for part in (4, 8, 16)]) for n in STEPS]
    found = predict(entries, asked({"n": 333}))
    assert found is None or found.bound == math.inf


def test_a_model_needs_a_configuration_that_was_measured_often():
    examples = [Example({"n": n}, {f"{n}": 1e-6}) for n in range(1, 40)]
    with pytest.raises(tb.DefinitionError, match="measured at half of the problems"):
        SizeModel(examples, {f"{n}": {"block": n} for n in range(1, 40)})


def test_one_tuned_size_is_spoken_of_in_the_singular():
    assert str(predict([sized(300)], asked({"n": 333}))) == f"1 tuned size, a bound needs {BOUNDED_FROM}"


# ---------------------------------------------------------------------------------------- the program


def test_threads_that_ask_at_once_learn_once(monkeypatch, tmp_path):
    monkeypatch.setenv("TUNEBOOK_HOME", str(tmp_path))
    monkeypatch.setattr(_prediction, "_LEARNT", {})
    monkeypatch.setattr(_prediction, "_LATELY", {})
    learnt, learn, found = [], _size_model._learn_parts, []
    monkeypatch.setattr(_size_model, "_learn_parts", lambda *given: learnt.append(1) or learn(*given))
    entries, begin = [*map(sized, STEPS)], threading.Barrier(4)

    def ask():
        begin.wait()
        found.append(predict(entries, asked({"n": 333})))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(map(str, found))) == 1
    assert learnt == [1]
