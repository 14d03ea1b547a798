"""Listing a book without reading it, and the terminal that shows it."""

from __future__ import annotations

import io
import os
from argparse import ArgumentTypeError
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunebook._base.errors import clean
from tunebook._base.record_format import Body, Record
from tunebook._cli._filters import Filters, age_s, age_text, size_bytes, size_text
from tunebook._cli._terminal import Terminal, TextColumn, text_width, wrapped
from tunebook.stores import JsonStore, MemoryStore, open_store, problem_id, write_pack
from tunebook.stores._listing import Catalogue, newest
from tunebook.testing import example_record


def everything(_op, _device):
    return True


def records(count, **fields):
    return [example_record(call_key=f"{n}", **fields) for n in range(count)]


class TestCatalogue:
    @pytest.mark.parametrize("kind", ["directory", "json", "pack", "memory"])
    def test_every_kind_of_store_lists_the_same(self, kind, tmp_path):
        wanted = [*records(5, op="Matmul@v0", device="gpu:H200"), *records(3, op="scale@v1")]
        path = tmp_path / {"directory": "book", "json": "book.json", "pack": "book.db", "memory": ""}[kind]
        if kind == "pack":
            write_pack(path, wanted)
        store = MemoryStore() if kind == "memory" else open_store(path)
        if kind != "pack":
            store.put_many(wanted)
        listed = list(Catalogue(store).entries(everything))
        assert {entry.id for entry in listed} == {problem_id(record.problem) for record in wanted}
        assert {entry.id: entry.record() for entry in listed} == {problem_id(r.problem): r for r in wanted}
        assert {(entry.op, entry.device) for entry in listed} == {(r.problem.op, r.problem.device) for r in wanted}
        found = Catalogue(store).find(problem_id(wanted[0].problem)[:9])
        assert [entry.record() for entry in found] == [wanted[0]]
        assert [e.op for e in Catalogue(store).entries(lambda op, _: op == "scale@v1")] == ["scale@v1"] * 3

    def test_a_problem_in_book_and_pack_is_listed_once_where_it_is_answered(self, tmp_path):
        store = open_store(tmp_path / "book")
        store.put_many(records(3))
        write_pack(tmp_path / "book" / "v1" / "packs" / "a.db", records(5))
        listed = list(Catalogue(open_store(tmp_path / "book")).entries(everything))
        assert len(listed) == 5
        assert sorted(Path(entry.where).name for entry in listed) == ["a.db"] * 2 + ["book"] * 3

    def test_a_prefix_of_any_length_finds_an_entry_in_a_pack(self, tmp_path):
        write_pack(tmp_path / "a.db", wanted := records(40))
        catalogue = Catalogue(open_store(tmp_path / "a.db"))
        for length in (1, 2, 3, 31, 32):
            prefix = problem_id(wanted[7].problem)[:length]
            expected = {problem_id(r.problem) for r in wanted if problem_id(r.problem).startswith(prefix)}
            assert {entry.id for entry in catalogue.find(prefix)} == expected

    def test_some_returns_at_most_the_number_asked_for_and_only_of_that_kernel(self, tmp_path):
        store = open_store(tmp_path / "book")
        store.put_many([*records(5, op="a"), *records(5, op="b", device="one"), *records(5, op="b", device="two")])
        write_pack(tmp_path / "book" / "v1" / "packs" / "a.db", records(9, op="b", device="three"))
        catalogue = Catalogue(open_store(tmp_path / "book"))
        assert [entry.op for entry in catalogue.some("b", 7)] == ["b"] * 7
        assert len({entry.id for entry in catalogue.some("b", 100)}) == 19

    def test_listing_is_not_using(self, tmp_path):
        store = open_store(tmp_path / "book")
        store.put_many(records(2))
        paths = list((tmp_path / "book").glob("v1/*/*/*.json"))
        for path in paths:
            os.utime(path, (1e9, 1e9))
        for entry in Catalogue(store).entries(everything):
            assert entry.record() is not None
        assert [path.stat().st_atime for path in paths] == [1e9, 1e9]

    def test_the_newest_are_found_without_looking_at_directories_that_are_older(self, tmp_path):
        store = open_store(tmp_path / "book")
        store.put_many([*records(4, op="old"), *records(4, op="new")])
        for path in (tmp_path / "book").glob("v1/*/old/*.json"):
            os.utime(path, (1000.0, 1000.0))
        for directory in (tmp_path / "book").glob("v1/*/old"):
            os.utime(directory, (1000.0, 1000.0))
        groups = Catalogue(store).groups(everything)
        assert {entry.op for entry in newest(groups, 4)} == {"new"}
        assert [entry.op for entry in newest(groups, 6)] == ["new"] * 4 + ["old"] * 2
        assert len(newest(groups, 100)) == 8

    @given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 50)), max_size=30), st.integers(1, 40))
    def test_newest_are_the_last_by_time(self, made, count):
        store = MemoryStore()
        for n, (op, when) in enumerate(made):
            record = example_record(call_key=str(n), op=op)
            store.put(Record(record.head, Body(provenance={"when": float(when)})))
        found = newest(Catalogue(store).groups(everything), count)
        expected = sorted((float(when) for _, when in made), reverse=True)[:count]
        assert [entry.written_s for entry in found] == expected

    def test_a_damaged_record_in_a_pack_does_not_hide_the_others(self, tmp_path):
        write_pack(tmp_path / "a.db", records(3))
        content = (tmp_path / "a.db").read_bytes()
        damaged = content.replace(b'"call_key":"1"', b'"call_key":"9"')
        assert damaged != content
        (tmp_path / "a.db").write_bytes(damaged)
        with pytest.warns(UserWarning, match="damaged"):
            found = [entry.record() for entry in Catalogue(open_store(tmp_path / "a.db")).entries(everything)]
        assert sum(record is not None for record in found) == 2

    def test_stray_files_and_directories_are_passed_over(self, tmp_path):
        store = open_store(tmp_path / "book")
        store.put_many(records(1))
        (tmp_path / "book" / "v1" / "stray").write_text("")
        (tmp_path / "book" / "v1" / "device" / "op").mkdir(parents=True)
        (tmp_path / "book" / "v1" / "device" / "op" / "x.txt").write_text("")
        assert len(list(Catalogue(store).entries(everything))) == 1

    def test_json_stores_list_by_when_they_were_measured(self, tmp_path):
        store = JsonStore(tmp_path / "b.json")
        store.put(Record(example_record().head, Body(provenance={"when": 5.0})))
        (entry,) = Catalogue(store).entries(everything)
        assert (entry.written_s, entry.used_s) == (5.0, 5.0)


class TestFilters:
    @pytest.mark.parametrize(
        ("kernel", "fits"),
        [("matmul", True), ("mat*", True), ("matmul@v0", True), ("mat", False), ("matmul@v1", False)],
    )
    def test_a_kernel_goes_by_its_name_with_or_without_version(self, kernel, fits):
        assert Filters(kernel=(kernel,)).takes_kernel("matmul@v0", "cpu") is fits

    def test_a_device_goes_by_any_part_of_its_name(self):
        assert Filters(device=("h200",)).takes_kernel("k", "gpu:NVIDIA H200")
        assert Filters(device=("NVIDIA*200",)).takes_kernel("k", "gpu:NVIDIA H200")
        assert not Filters(device=("h100",)).takes_kernel("k", "gpu:NVIDIA H200")

    @given(st.integers(0, 10**9))
    def test_ages_and_sizes_are_read_as_they_are_written(self, number):
        assert age_s(age_text(float(number)).replace(" ", "")) <= number + 1
        assert size_bytes(f"{number}kB") == number * 1024
        with pytest.raises(ArgumentTypeError, match="invalid size '10': write a number and B, kB, MB or GB"):
            size_bytes("10")
        assert size_bytes(size_text(number)) == pytest.approx(number, rel=0.06)


def drawn(columns, rows, width):
    out = io.StringIO()
    Terminal(out=out, width=width, colour=False).table(columns, rows)
    return out.getvalue().splitlines()


COLUMNS = (
    TextColumn("id"),
    TextColumn("name", give=1),
    TextColumn("much", "right", give=2),
    TextColumn("wide", from_width=60),
)
CELLS = st.text(st.characters(codec="utf-8", categories=("L", "N", "P", "S")), max_size=40)


class TestTerminal:
    @given(st.lists(st.tuples(st.just("deadbeef"), CELLS, CELLS, st.just("x")), min_size=1), st.integers(25, 140))
    def test_no_table_is_wider_than_the_terminal(self, rows, width):
        lines = drawn(COLUMNS, rows, width)
        assert len(lines) == len(rows) + 1
        assert max(map(text_width, lines)) <= width

    def test_a_golden_table_wide_and_narrow(self):
        rows = [("1a2b", "flash_attention", "12.5 us", "x"), ("3c4d", "行列", "1 ms", "y")]
        assert drawn(COLUMNS, rows, 80) == [
            "id    name                much  wide",
            "1a2b  flash_attention  12.5 us  x",
            "3c4d  行列                1 ms  y",
        ]
        assert drawn(COLUMNS, rows, 22) == [
            "id    name        much",
            "1a2b  flash_att…  12.…",
            "3c4d  行列        1 ms",
        ]

    def test_a_whole_column_goes_below_its_row_if_others_would_be_cut_to_the_same_text(self):
        columns = (TextColumn("call", give=1), TextColumn("config", whole=True))
        rows = [("x=float32[1000,1000]", "rows=256"), ("x=float32[1000,1000]:F", "rows=16")]
        assert drawn(columns, rows, 29) == ["call", rows[0][0], "    rows=256", rows[1][0], "    rows=16"]
        rows[1] = ("y=float32[1000,1000]:F", "rows=16")
        assert drawn(columns, rows, 30) == [
            "call                  config",
            "x=float32[1000,1000]  rows=256",
            "y=float32[1000,1000…  rows=16",
        ]

    def test_of_several_whole_columns_the_last_goes_below_first(self):
        columns = (TextColumn("time"), TextColumn("config", whole=True), TextColumn("reason", whole=True))
        rows = [("1 ms", "rows=256", ""), ("failed", "rows=16", "out of shared memory")]
        below = ["time    config", "1 ms    rows=256", "failed  rows=16", "    out of shared memory"]
        assert drawn(columns, rows, 30) == below
        assert drawn(columns, rows, 12) == [
            "time", "1 ms", "    rows=256", "failed", "    rows=16", "    out of", "    shared", "    memory",
        ]  # fmt: skip

    def test_a_dotted_name_loses_its_module_in_a_table_that_is_too_wide_if_names_stay_distinct(self):
        columns = (TextColumn("kernel", give=1, keeps_end=True), TextColumn("config", whole=True))
        assert drawn(columns, [("lib.add@v1.0", "rows=256")], 20)[1] == "add@v1.0  rows=256"
        assert drawn(columns, [("lib.add@v1.0", "rows=256")], 40)[1] == "lib.add@v1.0  rows=256"
        both = [("one.add@v0", "rows=256"), ("two.add@v0", "rows=256")]
        assert drawn(columns, both, 12)[1::2] == ["one.add@v0", "two.add@v0"]
        rest = [("a_long_module.softmax@v0", "rows=256")]
        assert drawn(columns, both + rest, 20)[1:] == [
            "one.add@v0  rows=256", "two.add@v0  rows=256", "softmax@v0  rows=256",
        ]  # fmt: skip

    def test_a_column_without_values_is_left_out(self):
        assert drawn(COLUMNS, [("1a2b", "", "1 ms", "x"), ("3c4d", "", "2 ms", "")], 80)[0] == "id    much  wide"

    def test_colour_only_where_it_is_wanted(self):
        assert Terminal(out=io.StringIO(), colour=True).styled("x", "red bold") == "\x1b[31;1mx\x1b[0m"
        assert Terminal(out=io.StringIO()).styled("x", "red bold") == "x"

    def test_values_are_streamed_as_one_json_list(self):
        out = io.StringIO()
        Terminal(out=out).values(iter([{"a": 1}, {"b": "ü"}]))
        assert out.getvalue() == '[\n{"a": 1},\n{"b": "ü"}\n]\n'

    @given(st.text())
    def test_clean_text_is_printable_and_printable_text_is_unchanged(self, text):
        assert clean(text).isprintable()
        assert clean(text) == text or not text.isprintable()

    @given(st.text(st.characters(codec="ascii", categories=("L", "Zs"))), st.integers(5, 40))
    def test_wrapped_lines_fit_and_lose_no_word(self, text, width):
        lines = wrapped(text, width)
        assert all(len(line) <= width for line in lines)
        assert "".join(lines).replace(" ", "") == text.replace(" ", "")
