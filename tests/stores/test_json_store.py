"""One readable file for all records, safe between processes, and other tools' entries in it."""

from __future__ import annotations

import json
import os
import signal
import stat
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_stress.rounds import start

from tunebook._base.errors import StoreError, TunebookWarning, forget_warnings
from tunebook._base.vocabulary import Problem
from tunebook.stores import JsonStore, _json, problem_id
from tunebook.testing import example_record

EJKERNEL = {
    "gpu|NVIDIA H200|8|flash_attention@v3|b=1,h=32": {"block_q": 128, "block_k": 64},
    "cpu|matmul@v1|8x8": [1, 2],
    "cpu|none@v1|k": None,
}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "book.json"


def siblings(path):
    return sorted(file.name for file in path.parent.iterdir() if file.is_file())


# What the file looks like


def test_records_are_structured_for_the_eye(path):
    record = example_record(config={"block": 64})
    JsonStore(path).put(record)
    entry = json.loads(path.read_text())["tunebook"]["records"][problem_id(record.problem)]
    assert entry["head"]["config"] == {"block": 64}
    assert entry["body"]["measurements"][0]["samples_s"] == [1.5e-3, 1.25e-3]
    assert '          "config": {"block": 64},\n' in path.read_text()
    assert max(map(len, path.read_text().splitlines())) <= 110


def test_the_same_records_make_the_same_file_whatever_the_order(tmp_path):
    records = [example_record(op=f"op{n}") for n in range(5)]
    JsonStore(tmp_path / "one.json").put_many(records)
    for record in reversed(records):
        JsonStore(tmp_path / "other.json").put(record)
    assert (tmp_path / "one.json").read_bytes() == (tmp_path / "other.json").read_bytes()


def test_opening_and_reading_make_nothing(path):
    store = JsonStore(path)
    assert store.get(example_record().problem) is None
    assert store.delete(example_record().problem) is False
    assert list(path.parent.iterdir()) == []


def test_a_write_leaves_the_file_and_its_lock_and_nothing_else(path):
    (path.parent / "book.json.tmp").write_text("left by a process that was killed")
    JsonStore(path).put(example_record())
    assert siblings(path) == ["book.json", "book.json.lock"]


def test_unknown_content_is_kept(path):
    JsonStore(path).put(example_record())
    content = json.loads(path.read_text())
    content["comment"] = {"by": "hand"}
    content["tunebook"]["of_tomorrow"] = [1]
    path.write_text(json.dumps(content))
    JsonStore(path).put(example_record(op="another"))
    again = json.loads(path.read_text())
    assert again["comment"] == {"by": "hand"}
    assert again["tunebook"]["of_tomorrow"] == [1]
    assert len(again["tunebook"]["records"]) == 2


def test_a_write_keeps_the_mode_and_goes_through_a_link(path, tmp_path):
    target = tmp_path / "elsewhere.json"
    target.write_text("{}")
    target.chmod(0o600)
    path.symlink_to(target)
    JsonStore(path).put(example_record())
    assert path.is_symlink()
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    assert JsonStore(path).get(example_record().problem) == example_record()


def test_a_put_takes_two_syncs(path):
    path.write_text("{}")
    syncs = []
    JsonStore(path, sync=syncs.append).put(example_record())
    assert len(syncs) == 2


# Two openings, one file


def test_a_file_that_did_not_change_is_not_parsed_again(path):
    JsonStore(path).put(example_record())
    os.utime(path, (1, 1))
    store = JsonStore(path)
    store.get(example_record().problem)
    os.utime(path, (2, 1))  # the time of its last use only
    parsed = store._parsed
    store.get(example_record().problem)
    assert store._parsed is parsed


def test_a_file_that_changed_a_moment_ago_is_parsed_again(path):
    """Two changes within one tick of the clock can leave the same time, size and inode."""
    JsonStore(path).put(example_record(config=1))
    store = JsonStore(path)
    facts = path.stat()
    assert store.get(example_record().problem) == example_record(config=1)
    JsonStore(path).put(example_record(config=2))
    os.utime(path, ns=(facts.st_mtime_ns, facts.st_mtime_ns))
    assert store.get(example_record().problem) == example_record(config=2)


def test_a_killed_holder_of_the_lock_holds_nobody_up(path):
    holder = start("hold_lock", path)
    assert holder.stdout.readline() == "ready\n"
    holder.kill()
    holder.communicate()
    JsonStore(path).put(example_record())


def test_a_paused_holder_of_the_lock_is_an_error_and_not_a_hang(path, monkeypatch):
    monkeypatch.setattr(_json, "_LOCK_TRIES", 20)
    holder = start("hold_lock", path)
    assert holder.stdout.readline() == "ready\n"
    holder.send_signal(signal.SIGSTOP)
    with pytest.raises(StoreError, match="another process keeps") as caught:
        JsonStore(path).put(example_record())
    holder.kill()
    holder.communicate()
    assert caught.value.kind == "busy"


# Damage


DAMAGES = {
    "truncated": lambda text: text[:-30],
    "empty": lambda _: "",
    "an array": lambda _: "[1, 2]",
    "a number": lambda _: "1",
    "not text": lambda _: "\udcff\udcfe",
    "another tool's section": lambda _: '{"tunebook": "a book about tunes"}',
    "no version": lambda text: text.replace('"version": 1', '"edition": 1'),
    "version zero": lambda text: text.replace('"version": 1', '"version": 0'),
    "version true": lambda text: text.replace('"version": 1', '"version": true'),
    "records in a list": lambda _: '{"tunebook": {"version": 1, "records": []}}',
    "nested too deeply": lambda _: "[" * 100_000,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_file_reads_as_empty_and_is_moved_aside_by_the_next_write(path, damage):
    JsonStore(path).put(example_record())
    content = damage(path.read_text()).encode("utf-8", "surrogateescape")
    path.write_bytes(content)
    store = JsonStore(path)
    with pytest.warns(TunebookWarning, match="counts as empty") as caught:
        found = [store.get(example_record().problem), *store.items()]
    assert found == [None]
    assert len(caught) == 1
    assert path.read_bytes() == content
    with pytest.warns(TunebookWarning, match="was moved to"):
        store.put(example_record(op="new"))
    assert (path.parent / "book.json.damaged-1").read_bytes() == content
    assert list(store.items()) == [example_record(op="new")]


def test_no_damaged_file_is_ever_overwritten(path):
    for number in (1, 2, 3):
        forget_warnings()
        path.write_text(f"damage {number}")
        with pytest.warns(TunebookWarning, match=f"damaged-{number}"):
            JsonStore(path).put(example_record())
    assert [(path.parent / f"book.json.damaged-{n}").read_text()[-1] for n in (1, 2, 3)] == ["1", "2", "3"]


def test_a_delete_leaves_a_damaged_file_where_it_is(path):
    path.write_text("damaged")
    assert JsonStore(path).delete(example_record().problem) is False
    assert path.read_text() == "damaged"


def test_a_file_of_a_newer_version_is_neither_read_nor_written(path):
    content = '{"tunebook": {"version": 2, "records": {}}}'
    path.write_text(content)
    store = JsonStore(path)
    with pytest.warns(TunebookWarning, match="version 2 is newer"):
        assert store.get(example_record().problem) is None
    with pytest.raises(StoreError, match="Upgrade tunebook") as caught:
        store.put(example_record())
    assert caught.value.kind == "newer"
    assert path.read_text() == content
    assert siblings(path) == ["book.json", "book.json.lock"]


def test_a_file_that_is_too_large_is_neither_read_nor_written(path):
    with path.open("wb") as file:
        file.truncate(100 << 20)
    store = JsonStore(path)
    with pytest.warns(TunebookWarning, match="over the limit"):
        assert store.get(example_record().problem) is None
    with pytest.raises(StoreError, match="Use a directory"):
        store.put(example_record())
    assert path.stat().st_size == 100 << 20


def test_an_entry_damaged_by_hand_is_missed_and_the_others_are_not(path):
    store = JsonStore(path)
    store.put_many([example_record(op="good"), example_record(op="bad", config="spoil me")])
    path.write_text(path.read_text().replace("spoil me", "spoilt"))
    with pytest.warns(TunebookWarning, match="checksum does not match") as caught:
        found = [store.get(example_record(op=op).problem) for op in ("bad", "good", "bad")]
    assert found == [None, example_record(op="good"), None]
    assert len(caught) == 1
    store.put(example_record(op="another"))
    assert "spoilt" in path.read_text()  # still there to be mended


def test_an_entry_under_another_name_is_missed(path):
    mine, yours = example_record(call_key="mine"), example_record(call_key="yours")
    JsonStore(path).put(mine)
    path.write_text(path.read_text().replace(problem_id(mine.problem), problem_id(yours.problem)))
    with pytest.warns(TunebookWarning, match="another problem's name"):
        assert [JsonStore(path).get(record.problem) for record in (mine, yours)] == [None, None]


@given(content=st.binary(max_size=200) | st.text("{}[]\"':,tunebokvrsi01 \n", max_size=60).map(str.encode))
@settings(max_examples=150, deadline=None)
@pytest.mark.filterwarnings("ignore::tunebook._base.errors.TunebookWarning")
def test_random_bytes_in_the_file_never_raise_and_never_answer(content):
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "book.json")
        path.write_bytes(content)
        store = JsonStore(path)
        assert store.get(example_record().problem) is None
        assert all(record.head.origin == "imported" for record in store.items())


@pytest.mark.promise("damage-is-a-miss")
@pytest.mark.filterwarnings("ignore::tunebook._base.errors.TunebookWarning")
def test_no_flipped_bit_and_no_truncation_gives_a_wrong_value(path):
    record = example_record(config={"block": 1.5})
    JsonStore(path).put(record)
    data = path.read_bytes()
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 1 << position % 8
        for content in (bytes(damaged), data[:position]):
            path.write_bytes(content)
            assert JsonStore(path).get(record.problem) in (None, record)


# Other tools' entries


@pytest.fixture
def ejkernel(path):
    path.write_text(json.dumps(EJKERNEL))
    return JsonStore(path)


def test_ejkernel_entries_are_read_as_imported(ejkernel):
    record = ejkernel.get(Problem("gpu|NVIDIA H200|8", "flash_attention@v3", "b=1,h=32"))
    assert record.head.config == {"block_q": 128, "block_k": 64}
    assert record.head.origin == "imported"
    assert record.head.checksum == ""
    assert ejkernel.get(Problem("cpu", "none@v1", "k")).head.config is None


def test_a_name_that_could_mean_another_problem_is_not_answered(ejkernel):
    for problem in [
        Problem("gpu", "NVIDIA H200|8|flash_attention@v3", "b=1,h=32"),
        Problem("gpu|NVIDIA H200", "8|flash_attention@v3", "b=1,h=32"),
        Problem("cpu", "matmul@v1|8x8", ""),
        Problem("", "cpu", "matmul@v1|8x8"),
    ]:
        assert ejkernel.get(problem) is None


def test_ejkernel_entries_are_among_the_items(ejkernel):
    assert {"|".join(record.problem) for record in ejkernel.items()} == set(EJKERNEL)


def test_ejkernel_entries_stay_in_the_file_untouched(ejkernel, path):
    ejkernel.put(example_record())
    content = json.loads(path.read_text())
    del content["tunebook"]
    assert content == EJKERNEL
    assert list(content) == list(EJKERNEL)


def test_a_record_of_ours_comes_before_an_ejkernel_entry(ejkernel, path):
    tuned = example_record("cpu", "matmul@v1", "8x8", config="tuned")
    ejkernel.put(tuned)
    assert ejkernel.get(tuned.problem) == tuned
    assert [record for record in ejkernel.items() if record.problem == tuned.problem] == [tuned]
    assert json.loads(path.read_text())["cpu|matmul@v1|8x8"] == [1, 2]


def test_a_delete_removes_the_ejkernel_entry_too(ejkernel):
    assert ejkernel.delete(Problem("cpu", "none@v1", "k")) is True
    assert ejkernel.get(Problem("cpu", "none@v1", "k")) is None
    assert ejkernel.get(Problem("cpu", "matmul@v1", "8x8")) is not None


def test_an_ejkernel_entry_with_nan_is_a_miss_and_stays(path):
    path.write_text('{"cpu|op|k": {"scale": NaN}}')
    store = JsonStore(path)
    with pytest.warns(TunebookWarning, match="is not usable"):
        assert store.get(Problem("cpu", "op", "k")) is None
    store.put(example_record())
    assert '"cpu|op|k": {"scale": NaN}' in path.read_text()


def test_changing_an_imported_config_does_not_change_the_next_answer(ejkernel, path):
    os.utime(path, (1, 1))  # old enough for the parsed file to be kept
    problem = Problem("cpu", "matmul@v1", "8x8")
    ejkernel.get(problem).head.config.append("changed")
    assert ejkernel.get(problem).head.config == [1, 2]
