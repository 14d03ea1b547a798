"""A user's call never fails because the cache did: the fault table, through the front door."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

import tunebook as tb

X = np.ones(8)


def make(store, *, name="faulty", values=(1, 2), **options):
    events = []

    @tb.tunable(
        space=tb.Space(b=list(values)),
        name=name,
        store=store,
        on_event=lambda event, **data: events.append((event, data.get("level"))),
        **options,
    )
    def kernel(x, *, config):
        return x * 2

    return kernel, events


def records(root):
    return [path for path in Path(root).rglob("*.json") if "quarantine" not in path.parts]


def is_tuned_again(store):
    kernel, events = make(store)
    assert (kernel(X) == 2).all()
    return ("autotune_finish", None) in events


def test_the_second_opening_finds_the_entry(tmp_path):
    make(tmp_path)[0](X)
    assert not is_tuned_again(tmp_path)


@pytest.mark.promise("cache-never-fails-a-call")
@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[: len(data) // 2],
        lambda data: os.urandom(len(data)),
        lambda data: b"[]\n",
        lambda data: data.replace(b'"b"', b'"c"'),
        lambda data: bytes([data[0] ^ 1]) + data[1:],
        lambda data: data + b"x",
        lambda data: b"\x00" * 9_000_000,
    ],
    ids=["empty", "truncated", "random", "other JSON", "altered", "bit flip", "longer", "huge"],
)
def test_a_damaged_record_is_a_miss_one_warning_and_is_tuned_again(tmp_path, damage):
    make(tmp_path)[0](X)
    (record,) = records(tmp_path)
    record.write_bytes(damage(record.read_bytes()))
    with pytest.warns(tb.TunebookWarning, match="unreadable record"):
        assert is_tuned_again(tmp_path)
    assert len(list((tmp_path / "v1" / "quarantine").iterdir())) == 1
    assert not is_tuned_again(tmp_path)


@pytest.mark.promise("cache-never-fails-a-call")
def test_a_root_that_is_a_file_is_one_warning_and_the_call_works(tmp_path):
    (tmp_path / "book").mkdir()
    kernel, _ = make(tmp_path / "book" / "here")
    (tmp_path / "book" / "here").write_text("in the way")
    with pytest.warns(tb.TunebookWarning, match="Move the file that is in the way"):
        assert (kernel(X) == 2).all()
    for n in range(5):
        assert (kernel(np.ones(n)) == 2).all(), "and no second warning, which would be an error here"


@pytest.mark.promise("others-books")
def test_a_book_that_others_can_write_to_is_not_used_and_the_warning_says_how_to_mend_it(tmp_path):
    book = tmp_path / "book"
    make(book)[0](X)
    book.chmod(0o777)
    with pytest.warns(tb.TunebookWarning, match="chmod go-w"):
        assert is_tuned_again(book)
    book.chmod(0o755)
    assert not is_tuned_again(book)


@pytest.mark.promise("full-disk")
def test_a_full_disk_is_one_warning_and_the_call_works(tmp_path):
    script = textwrap.dedent("""
        import resource, signal, sys, warnings
        import numpy as np, tunebook as tb
        kernel = tb.tunable(lambda x, *, config: x * 2, space=tb.Space(b=[1, 2]), name="full", store=sys.argv[1])
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for n in range(1, 20):
                assert kernel(np.ones(n)).sum() == 2 * n
        print(len(caught))
        """)
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "book")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert 1 <= int(done.stdout) <= 2, "at most one for leases and one for records"


@pytest.mark.parametrize("name", ["a/b/../c", "x" * 10_000, "..", "ünï|cödé", " ", "CON"])
def test_any_name_of_an_operation_is_fine(tmp_path, name):
    make(tmp_path, name=name)[0](X)
    kernel, events = make(tmp_path, name=name)
    kernel(X)
    assert events == [("cache_hit", "persistent")]


def test_nan_in_a_configuration_is_fine(tmp_path):
    make(tmp_path, values=[float("nan"), 1.0])[0](X)
    kernel, events = make(tmp_path, values=[float("nan"), 1.0])
    kernel(X)
    assert events == [("cache_hit", "persistent")]


@pytest.mark.promise("cache-never-fails-a-call")
def test_a_configuration_that_cannot_be_written_is_used_and_warned_about_once(tmp_path):
    kernel = tb.tunable(lambda x, *, config: x * 2, space=[object()], name="opaque", store=tmp_path)
    with pytest.warns(tb.TunebookWarning, match="not written down"):
        assert (kernel(X) == 2).all()
    for n in range(3):
        assert (kernel(np.ones(n)) == 2).all()


def test_a_read_only_pack_answers_and_other_problems_are_tuned_in_memory(tmp_path):
    make(tmp_path / "book")[0](X)
    store = tb.PersistentCache("x", tmp_path / "book").store
    tb.write_pack(tmp_path / "shipped.db", store.items())
    kernel, events = make(tmp_path / "shipped.db")
    kernel(X)
    assert events == [("cache_hit", "persistent")]
    with pytest.warns(tb.TunebookWarning, match="read-only|immutable|pack"):
        kernel(np.ones(3))
    assert events[-1] == ("autotune_finish", None)


def test_a_pack_beside_the_book_is_read_and_the_book_comes_first(tmp_path):
    make(tmp_path / "theirs")[0](X)
    packs = tmp_path / "book" / "v1" / "packs"
    packs.mkdir(parents=True)
    tb.write_pack(packs / "shipped.db", tb.PersistentCache("x", tmp_path / "theirs").store.items())
    assert not is_tuned_again(tmp_path / "book")
