from __future__ import annotations

import json
import math
import pickle
import warnings
import zlib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tunebook as tb
from tunebook._base import errors
from tunebook._base.errors import CodecError, TunebookWarning, TuningFailed
from tunebook._base.record_format import MAX_RECORD_BYTES, Body, Head, Record, canonical_json, identity, merge
from tunebook._base.vocabulary import Failure, Measurement, Problem
from tunebook.testing import example_record

names = st.text(max_size=8)
times = st.floats(0, 10, allow_nan=False)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False) | names,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=8,
)
# Few values, so that records meet: equal identities, equal generations, equal unknown fields.
few = st.sampled_from(["a", "b"])
unknown = st.dictionaries(st.sampled_from(["x1", "x2"]), st.integers(0, 2), max_size=2)
failures = st.builds(
    Failure, kind=st.sampled_from(["compile", "nan"]), message=names, expires=st.none() | st.floats(0, 9)
)
measurements = st.builds(
    Measurement,
    config=json_values,
    fingerprint=few,
    code=few,
    policy=st.just("p"),
    environment=st.just("e"),
    samples_s=st.lists(times, max_size=3).map(tuple),
    failure=st.none() | failures,
    compile_s=st.none() | times,
    when=st.sampled_from([0.0, 1.0]),
    extra=unknown,
)
heads = st.builds(
    Head,
    problem=st.builds(Problem, names, names, names),
    config=json_values,
    checksum=names,
    origin=st.sampled_from(["tuned", "imported", "pinned"]),
    environment=names,
    generation=st.integers(0, 2),
    extra=unknown,
)
provenances = st.dictionaries(st.sampled_from(["when", "host"]), st.integers(0, 2), max_size=2)
bodies = st.builds(
    Body, measurements=st.lists(measurements, max_size=4).map(tuple), provenance=provenances, extra=unknown
)
records = st.builds(Record, heads, bodies)


@given(records)
def test_a_record_comes_back_as_it_was(record):
    again = Record.from_bytes(record.to_bytes())
    assert again.head == record.head
    assert again.body == record.body
    assert again == record
    assert again.to_bytes() == record.to_bytes()


@given(records)
def test_fields_come_back_as_a_record(record):
    assert Record.from_fields(*json.loads(canonical_json(list(record.to_fields())))) == record


@given(records, records)
def test_merging_is_commutative(one, other):
    assert merge(one, other) == merge(other, one)


@given(records, records, records)
def test_merging_is_associative(one, two, three):
    assert merge(merge(one, two), three) == merge(one, merge(two, three))


@given(records, records)
def test_merging_again_changes_nothing(one, other):
    merged = merge(one, other)
    assert merge(merged, other) == merged
    assert merge(merged, merged) == merged


@given(records, records)
def test_merging_keeps_every_measurement_and_every_unknown_field(one, other):
    merged = merge(one, other)
    measured = {identity(m) for record in (one, other) for m in record.body.measurements}
    assert {identity(m) for m in merged.body.measurements} == measured
    assert merged.head.extra.keys() == one.head.extra.keys() | other.head.extra.keys()
    assert merged.body.extra.keys() == one.body.extra.keys() | other.body.extra.keys()


def test_merging_takes_the_head_of_the_higher_generation_then_the_later():
    old, new = example_record(config="old", generation=1), example_record(config="new", generation=2)
    assert merge(new, old).head.config == "new"
    early, late = (Record(example_record(config=n).head, Body(provenance={"when": n})) for n in (1, 2))
    assert merge(late, early).head.config == 2


def test_merging_prefers_a_decision_to_none_whatever_their_generations():
    decided = example_record(generation=1)
    undecided = Record(replace(decided.head, config=None, generation=9), decided.body)
    assert merge(decided, undecided).head == merge(undecided, decided).head == decided.head
    assert Record.from_bytes(undecided.to_bytes()).head.decided is False


def test_every_flipped_bit_is_noticed():
    data = example_record().to_bytes()
    for position in range(len(data)):
        for bit in range(8):
            damaged = bytearray(data)
            damaged[position] ^= 1 << bit
            with pytest.raises(CodecError, match=r"\w"):
                Record.from_bytes(bytes(damaged))


def test_every_truncation_is_noticed():
    data = example_record().to_bytes()
    for length in range(len(data)):
        with pytest.raises(CodecError, match=r"\w"):
            Record.from_bytes(data[:length])


@given(st.binary(max_size=200))
def test_random_bytes_are_not_a_record(data):
    with pytest.raises(CodecError, match=r"\w"):
        Record.from_bytes(data)


def _line(text):
    return b"%08x %s\n" % (zlib.crc32(text), text)


@given(json_values, json_values)
def test_whole_lines_of_something_else_raise_nothing_but_our_error(head, body):
    lines = [_line(canonical_json(value).encode()) for value in (head, body)]
    with pytest.raises(CodecError, match=r"\w"):
        Record.from_bytes(b"".join(lines))
    record = Record.from_bytes(example_record().to_bytes().split(b"\n")[0] + b"\n" + lines[1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TunebookWarning)
        assert isinstance(record.body, Body)


def test_the_body_is_not_parsed_for_a_hit():
    data = example_record().to_bytes().split(b"\n")[0] + b"\n" + _line(b"whole, but no JSON")
    record = Record.from_bytes(data)
    assert record.head == example_record().head
    assert record.to_bytes() == data
    with pytest.warns(TunebookWarning, match="not a record"):
        assert record.body == Body()


ODD_NUMBERS = {"infinite": "1e999", "minus infinite": "-1e999", "long": "9" * 400, "longest": "9" * 5000}


@pytest.mark.parametrize("number", ODD_NUMBERS.values(), ids=ODD_NUMBERS)
@pytest.mark.parametrize(
    "field", [b'"when":12345.0', b'"host":12345.0', b'"samples_s":[12345.0', b'"tomorrow":12345.0']
)
def test_a_number_out_of_range_leaves_a_record_without_measurements_and_says_so_once(field, number):
    measured = example_record().body.measurements[0]._replace(samples_s=(12345.0,), when=12345.0)
    body = Body(measurements=(measured,), provenance={"host": 12345.0}, extra={"tomorrow": 12345.0})
    head, line, _ = Record(example_record().head, body).to_bytes().split(b"\n")
    assert field in line
    altered = line[9:].replace(field, field.replace(b"12345.0", number.encode()))
    record = Record.from_bytes(head + b"\n" + _line(altered))
    with pytest.warns(TunebookWarning, match="count as missing.* out of range") as warned:
        assert record.body == Body()
    assert len(warned) == 1
    assert record.provenance == {}
    assert merge(record, example_record()).body.measurements
    Record(record.head, record.body).to_bytes()


@pytest.mark.parametrize("number", ODD_NUMBERS.values(), ids=ODD_NUMBERS)
def test_a_number_out_of_range_in_a_head_is_refused(number):
    head = example_record(config=12345).to_bytes().split(b"\n")[0][9:].replace(b"12345", number.encode())
    with pytest.raises(CodecError, match="out of range"):
        Record.from_bytes(_line(head) + _line(b"{}"))


@pytest.mark.parametrize("config", [math.nan, math.inf, object(), {1, 2}, {1: 2, "a": 3}, b"bytes"])
def test_a_value_outside_json_cannot_be_written(config):
    with pytest.raises(CodecError, match="not a JSON value"):
        example_record(config={"value": config}).to_bytes()


def test_a_value_that_contains_itself_cannot_be_written():
    config = []
    config.append(config)
    with pytest.raises(CodecError, match="not a JSON value"):
        example_record(config=config).to_bytes()


def test_nan_in_a_whole_line_is_refused():
    head = example_record(config=12345).to_bytes().split(b"\n")[0][9:].replace(b"12345", b"NaN")
    with pytest.raises(CodecError, match="NaN"):
        Record.from_bytes(_line(head) + _line(b"{}"))


@pytest.mark.parametrize("generation", [-1, 1 << 63])
def test_a_generation_that_no_lease_can_have_is_refused(generation):
    with pytest.raises(CodecError, match="out of range"):
        Record.from_bytes(example_record(generation=generation).to_bytes())


def test_a_record_that_is_too_large_is_refused_both_ways():
    with pytest.raises(CodecError, match="over the limit"):
        example_record(config="x" * MAX_RECORD_BYTES).to_bytes()
    with pytest.raises(CodecError, match="over the limit"):
        Record.from_bytes(b" " * (MAX_RECORD_BYTES + 1))


def test_a_sample_that_is_not_a_time_keeps_its_place():
    measured = example_record().body.measurements[0]._replace(samples_s=(1.0, math.nan, math.inf, 2.0))
    record = Record.from_bytes(Record(example_record().head, Body(measurements=(measured,))).to_bytes())
    samples = record.body.measurements[0].samples_s
    assert samples[0] == 1.0
    assert math.isnan(samples[1])
    assert math.isnan(samples[2])
    assert samples[3] == 2.0


def test_a_failure_of_a_kind_from_a_newer_release_is_read():
    failure = Failure(kind="moonlight", message="m")
    measured = example_record().body.measurements[0]._replace(failure=failure)
    record = Record.from_bytes(Record(example_record().head, Body(measurements=(measured,))).to_bytes())
    assert record.body.measurements[0].failure == failure


PUBLIC_ERRORS = [each for each in vars(errors).values() if isinstance(each, type) and each.__name__ in tb.__all__]


@pytest.mark.parametrize("kind", PUBLIC_ERRORS)
def test_an_error_has_the_name_that_users_import(kind):
    assert kind.__module__ == "tunebook"
    assert pickle.loads(pickle.dumps(kind)) is kind
    assert getattr(tb, kind.__name__) is kind


def test_a_tuning_that_failed_keeps_its_measurements_and_notes_in_a_pickle_and_in_parts():
    failed = example_record().body.measurements[1:]
    error = TuningFailed("all failed", [ValueError("a"), OSError("b")], failed)
    error.add_note("on a Monday")
    again = pickle.loads(pickle.dumps(error))
    assert (again.measurements, again.__notes__, str(again)) == (failed, error.__notes__, str(error))
    part, rest = again.split(ValueError)
    assert (part.measurements, [type(e) for e in rest.exceptions]) == (failed, [OSError])
    assert TuningFailed("none", [ValueError("a")]).measurements == ()
