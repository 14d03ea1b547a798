"""Bundles of records, and merging them into a book."""

from __future__ import annotations

import gzip
import hashlib
import json
import subprocess
import sys
import threading
import tracemalloc
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tunebook as tb
from tunebook._arrays.device_fingerprint import environment
from tunebook._base.config_codec import encode
from tunebook._base.record_format import Body, Head, Record, merge
from tunebook._base.vocabulary import Measurement, Problem
from tunebook._cli import main
from tunebook._selection.single_flight import Lease, acquire
from tunebook.formats import _bundle
from tunebook.formats._bundle import export_bundle, import_bundle, merge_into
from tunebook.stores import DirectoryStore, MemoryStore, problem_id


def measurement(config, seconds, when=1.0, code="c"):
    return Measurement(config, f"f{config}", code, "p", "{}", (seconds,), when=when)


def record(key, config=1, *, origin="tuned", generation=1, when=1.0, measured=(), environment="{}"):
    head = Head(
        problem=Problem("cpu:x", "op@v0", key),
        config=config,
        checksum="",
        origin=origin,
        environment=environment,
        generation=generation,
    )
    return Record(head, Body(measurements=tuple(measured), provenance={"when": when}))


keys = st.sampled_from(["a", "b", "c"])
measured = st.builds(measurement, st.integers(0, 3), st.floats(1, 2), st.floats(0, 3))
records = st.builds(
    record,
    keys,
    st.one_of(st.none(), st.integers(0, 3)),
    origin=st.sampled_from(["tuned", "imported", "pinned"]),
    generation=st.integers(0, 3),
    when=st.floats(0, 3),
    measured=st.lists(
        st.builds(measurement, st.integers(0, 3), st.floats(1, 2), st.floats(0, 3)),
        max_size=3,
        unique_by=lambda m: m.config,
    ),
)


class TestBundles:
    @pytest.mark.parametrize("name", ["book.bundle", "book.bundle.gz"])
    @pytest.mark.parametrize("key", [None, b"secret"])
    def test_exported_records_are_imported(self, tmp_path, name, key):
        original = [record("a", measured=[measurement(1, 0.5)]), record("b", 2)]
        assert export_bundle(original, tmp_path / name, key=key) == 2
        bundle = import_bundle(tmp_path / name, key=key)
        assert list(bundle.records) == original
        assert bundle.signed is (key is not None)
        assert bundle.made > 0

    @given(st.lists(records))
    def test_any_records_come_back_as_they_were(self, tmp_path_factory, original):
        path = tmp_path_factory.mktemp("bundle") / "any"
        export_bundle(original, path, key=b"k")
        assert list(import_bundle(path, key=b"k").records) == original

    @pytest.mark.promise("signed-only")
    @pytest.mark.parametrize(
        ("made_with", "read_with", "says"),
        [
            (b"one", b"two", "signed with another key"),
            (None, b"two", "is not signed, and a key is set"),
            (b"one", None, "is signed, and no key is set"),
        ],
    )
    def test_a_signature_that_cannot_be_checked_is_refused(self, tmp_path, made_with, read_with, says):
        export_bundle([record("a")], tmp_path / "b", key=made_with)
        with pytest.raises(tb.CodecError, match=says):
            import_bundle(tmp_path / "b", key=read_with)

    @pytest.mark.parametrize(("made_with", "read_with"), [(None, b"two"), (b"one", None)])
    def test_unless_the_user_says_that_the_origin_does_not_matter(self, tmp_path, made_with, read_with):
        export_bundle([record("a")], tmp_path / "b", key=made_with)
        bundle = import_bundle(tmp_path / "b", key=read_with, allow_unsigned=True)
        assert (len(bundle.records), bundle.signed) == (1, False)

    def test_a_wrong_signature_is_refused_even_then(self, tmp_path):
        export_bundle([record("a")], tmp_path / "b", key=b"one")
        with pytest.raises(tb.CodecError, match="another key"):
            import_bundle(tmp_path / "b", key=b"two", allow_unsigned=True)

    @given(at=st.integers(0, 10_000), bit=st.integers(0, 7))
    def test_one_altered_bit_is_found_wherever_it_is(self, tmp_path_factory, at, bit):
        path = tmp_path_factory.mktemp("bundle") / "b"
        export_bundle([record("a", measured=[measurement(1, 0.5)])], path, key=b"k")
        content = bytearray(path.read_bytes())
        content[at % len(content)] ^= 1 << bit
        path.write_bytes(content)
        with pytest.raises(tb.CodecError, match=r"bundle|altered|signed"):
            import_bundle(path, key=b"k")

    @pytest.mark.parametrize("content", [b"", b"{}", b"[1]\n[2]\n", b'{"format":"other"}\n{}\n', b"\x1f\x8bnothing"])
    def test_another_file_is_a_clear_error(self, tmp_path, content):
        (tmp_path / "b").write_bytes(content)
        with pytest.raises((tb.CodecError, tb.StoreError), match="bundle"):
            import_bundle(tmp_path / "b")

    @pytest.mark.promise("bundles-bounded")
    @pytest.mark.parametrize(("members", "size"), [(1, 64 << 20), (3, 500_000), (40, 500_000)])
    def test_a_small_file_that_unpacks_to_a_large_one_is_refused_while_it_is_unpacked(
        self, tmp_path, monkeypatch, members, size
    ):
        monkeypatch.setattr(_bundle, "_MAX_BYTES", 1 << 20)
        (tmp_path / "b.gz").write_bytes(gzip.compress(b"\0" * size) * members)
        tracemalloc.start()
        with pytest.raises(tb.CodecError, match="not a bundle: its content takes over 1048576 bytes"):
            import_bundle(tmp_path / "b.gz", key=b"k")
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
        tracemalloc.stop()

    @pytest.mark.promise("bundles-bounded")
    def test_a_file_that_never_ends_is_refused(self, monkeypatch):
        monkeypatch.setattr(_bundle, "_MAX_BYTES", 1 << 20)
        with pytest.raises(tb.CodecError, match="its content takes over 1048576 bytes"):
            import_bundle("/dev/zero")

    def test_a_bundle_that_no_import_would_take_is_not_written(self, tmp_path, monkeypatch):
        monkeypatch.setattr(_bundle, "_MAX_BYTES", 100)
        with pytest.raises(tb.CodecError, match=r"over the limit of 100\. Export fewer entries, or a \.db pack"):
            export_bundle([record("a")], tmp_path / "b")
        assert [*tmp_path.iterdir()] == []

    def test_a_file_of_several_gzip_members_is_one_bundle(self, tmp_path):
        export_bundle([record("a"), record("b")], tmp_path / "b")
        whole = (tmp_path / "b").read_bytes()
        (tmp_path / "b.gz").write_bytes(gzip.compress(whole[:100]) + gzip.compress(whole[100:]) + b"\0" * 512)
        assert len(import_bundle(tmp_path / "b.gz").records) == 2

    @pytest.mark.promise("bundles-bounded")
    @pytest.mark.parametrize(
        ("about", "seal", "says"),
        [
            (b"[" * 100_000, b"{}", "is not a bundle"),
            (b'{"a":' * 100_000, b"{}", "is not a bundle"),
            (b"9" * 100_000, b"{}", "is not a bundle"),
            (None, b"[" * 100_000, "is not a bundle"),
            (None, {"signature": "\u00e9" * 64}, "signed with another key"),
            (None, {"signature": "\ud800" * 64}, "signed with another key"),
            (None, {"signature": [1]}, "is not signed"),
            (None, {"signature": ""}, "signed with another key"),
            ({"records": [[1]]}, {}, "is not signed"),
        ],
    )
    def test_a_hostile_file_is_an_error_of_ours(self, tmp_path, about, seal, says):
        if about is None or isinstance(about, dict):
            about = json.dumps({"format": "tunebook-bundle/1", "records": 0, **(about or {})}).encode()
        content = about + b"\n"
        if isinstance(seal, dict):
            digest = hashlib.sha256(content).hexdigest()
            seal = json.dumps({"digest": digest, "signature": None, **seal}).encode()
        (tmp_path / "b").write_bytes(content + seal + b"\n")
        with pytest.raises(tb.CodecError, match=says):
            import_bundle(tmp_path / "b", key=b"k")

    @pytest.mark.promise("bundles-bounded")
    @pytest.mark.parametrize("odd", [{"records": [[]]}, {"host": [[1]], "made": "x"}, {"records": "\x1b[2J"}])
    def test_odd_facts_of_an_unsigned_bundle_are_an_error_or_left_out(self, tmp_path, odd):
        content = json.dumps({"format": "tunebook-bundle/1", "records": 0, **odd}).encode() + b"\n"
        seal = json.dumps({"digest": hashlib.sha256(content).hexdigest(), "signature": None}).encode()
        (tmp_path / "b").write_bytes(content + seal + b"\n")
        if "records" in odd:
            with pytest.raises(tb.CodecError, match="its first line gives another number"):
                import_bundle(tmp_path / "b")
        else:
            assert import_bundle(tmp_path / "b") == ((), 0.0, "", False)

    def test_a_missing_file_and_a_missing_directory_are_named(self, tmp_path):
        with pytest.raises(tb.StoreError, match="cannot read the bundle"):
            import_bundle(tmp_path / "none")
        with pytest.raises(tb.StoreError, match="cannot write the bundle"):
            export_bundle([], tmp_path / "none" / "b")


class TestMerging:
    def test_it_reports_the_change_to_each_problem(self):
        store = MemoryStore()
        store.put_many([record("same"), record("old"), record("pinned", 5, origin="pinned")])
        merged = merge_into(store, [record("new"), record("same"), record("old", 2, when=9.0), record("pinned", 6)])
        assert [p.call_key for p in merged.added] == ["new"]
        assert [p.call_key for p in merged.changed] == ["old"]
        assert [p.call_key for p in merged.same] == ["same"]
        assert [p.call_key for p in merged.kept_pinned] == ["pinned"]
        assert store.get(record("old").problem).head.config == 2
        assert store.get(record("pinned").problem).head.config == 5

    def test_a_book_that_meets_itself_again_has_not_changed(self):
        store = MemoryStore()
        store.put(record("a", measured=[measurement(2, 0.5), measurement(1, 0.5)]))  # in the order of a race
        merged = merge_into(store, list(store.items()))
        assert [p.call_key for p in merged.same] == ["a"]
        assert not merged.changed

    def test_a_dry_run_changes_nothing(self):
        store = MemoryStore()
        store.put(record("old"))
        merged = merge_into(store, [record("new"), record("old", 2, when=9.0)], dry_run=True)
        assert (len(merged.added), len(merged.changed)) == (1, 1)
        assert [r.head.config for r in store.items()] == [1]

    def test_a_pin_wins_over_a_tuning_of_a_higher_generation_and_the_store_takes_it(self, tmp_path):
        store = DirectoryStore(tmp_path)
        store.put(record("a", 1, generation=7))
        merge_into(store, [record("a", 2, origin="pinned", generation=0)])
        assert store.get(record("a").problem).head.config == 2

    @given(*[st.lists(records).map(lambda listed: [r for r in listed if r.head.decided])] * 3)
    def test_books_can_be_merged_in_any_order_and_any_number_of_times(self, one, two, three):
        def merged(*books):
            store = MemoryStore()
            for book in books:
                merge_into(store, book)
            # The generation of a pin only has to satisfy the store, and depends on what that held.
            same = (r.replace(head=replace(r.head, generation=0)) for r in store.items())
            return {r.problem: merge(r, r) for r in same}  # in canonical order

        assert merged(one, two, three) == merged(three, one, two) == merged(one, two, three, two, one)

    @given(records, records, records)
    def test_merging_is_associative_and_commutative_with_pins(self, a, b, c):
        a, b, c = (r.replace(head=replace(r.head, problem=Problem("d", "op", "k"))) for r in (a, b, c))
        assert merge(a, b) == merge(b, a)
        assert merge(merge(a, b), c) == merge(a, merge(b, c))

    def test_a_problem_that_is_being_tuned_is_waited_for_and_the_others_are_not(self, tmp_path):
        store = DirectoryStore(tmp_path)
        busy = record("busy", measured=[measurement(1, 0.5)])
        lease = acquire(store.leases(), problem_id(busy.problem), look=lambda: None)
        assert isinstance(lease, Lease)
        merging = threading.Thread(target=merge_into, args=(store, [busy, record("free")]))
        merging.start()
        while store.get(record("free").problem) is None:
            assert merging.is_alive()
        store.put(record("busy", 3, generation=lease.generation, measured=[measurement(3, 0.1)]))
        lease.release()
        merging.join()
        both = store.get(busy.problem)
        assert {m.config for m in both.body.measurements} == {1, 3}

    def test_four_processes_that_merge_into_one_book_lose_nothing(self, tmp_path):
        for worker in range(4):
            mine = [record(f"k{i}", worker, measured=[measurement(worker, 1.0)]) for i in range(100)]
            export_bundle(mine, tmp_path / f"{worker}.bundle")
        script = (
            "import sys; from pathlib import Path; from tunebook.formats._bundle import *;"
            "from tunebook.stores import *;"
            "merge_into(DirectoryStore(Path(sys.argv[1])), import_bundle(sys.argv[2]).records)"
        )
        commands = [
            [sys.executable, "-c", script, str(tmp_path / "book"), str(tmp_path / f"{w}.bundle")] for w in range(4)
        ]
        running = [subprocess.Popen(command) for command in commands]
        assert [process.wait() for process in running] == [0] * 4
        merged = list(DirectoryStore(tmp_path / "book").items())
        assert len(merged) == 100
        assert all({m.config for m in r.body.measurements} == {0, 1, 2, 3} for r in merged)


def test_an_import_counts_entries_to_verify_here_with_the_most_frequent_reason_first(tmp_path, capsys):
    made = [
        record("a", environment=json.dumps({"pytest": pytest.__version__})),
        record("b", environment='{"pytest": "1.0"}'),
        record("c", environment='{"pytest": "1.0", "python": "2.7"}'),
        record("d", environment=""),
        record("e", environment='{"a compiler": "9"}'),  # cannot be told here, and so is no difference
    ]
    export_bundle(made, tmp_path / "x.bundle")
    assert main(["import", str(tmp_path / "x.bundle"), "--book", str(tmp_path / "book.json")]) == 0
    said = [line.split(" will be verified at their first call: ") for line in capsys.readouterr().out.splitlines()[1:]]
    assert said == [
        ["  2", f"pytest: 1.0 there, {pytest.__version__} here"],
        ["  1", f"python: 2.7 there, {environment()['python']} here"],
    ]


class TestPinnedRecords:
    def test_tuning_leaves_a_pinned_choice_and_keeps_its_measurements(self):
        @tb.tunable(space=tb.Space(block=[1, 2, 4]), heuristic=lambda n: {"block": 1})
        def spender(n, *, config):
            return n

        tb.tune(spender, 8, budget="2 trials")
        problem = spender.explain(8).problem
        store = spender.selector.persistent.store
        earlier = store.get(problem)
        other = next(m.config for m in earlier.body.measurements if m.config != earlier.head.config)
        store.put(earlier.replace(head=replace(earlier.head, config=other, origin="pinned")))
        tuned = tb.tune(spender, 8)
        stands = store.get(problem)
        assert (stands.head.origin, stands.head.config) == ("pinned", other)
        assert spender.selector.cache.get(*problem) == tuned.config
        assert encode(tuned.config) == other
        assert len(stands.body.measurements) == 3

    def test_a_pin_outside_the_space_stops_no_tuning_and_stays_until_it_is_unpinned(self):
        @tb.tunable(space=tb.Space(block=[1, 2]), heuristic=lambda n: {"block": 1})
        def spender(n, *, config):
            return n

        problem = spender.explain(8).problem
        store = spender.selector.persistent.store
        head = Head(problem=problem, config=encode(tb.Config(block=9)), checksum="", origin="pinned")
        store.put(Record(head, Body()))
        with pytest.warns(tb.TunebookWarning, match="is pinned to block=9, which is none of its candidates now"):
            spender(8)
        kept = store.get(problem)
        assert (kept.head.origin, kept.head.config) == ("pinned", head.config)
        assert {m.config["v"]["block"] for m in kept.body.measurements} == {1, 2}
