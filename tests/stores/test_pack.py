"""Packs: immutable files of records, found in the book and in installed packages."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import tempfile
import warnings
import zipfile
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_stress.rounds import environment

from tunebook._base.errors import CodecError, DefinitionError, StoreError, TunebookWarning
from tunebook._base.record_format import MAX_RECORD_BYTES, SEAL_BYTES, Record
from tunebook.stores import (
    DirectoryStore,
    JsonStore,
    LayeredStore,
    MemoryStore,
    PackStore,
    open_store,
    packs_in,
    write_pack,
)
from tunebook.stores import _layered as discovery
from tunebook.stores._listing import Catalogue
from tunebook.testing import example_record


@pytest.fixture
def path(tmp_path):
    return tmp_path / "records.db"


def records(count):
    return [example_record(call_key=str(n), config=n) for n in range(count)]


# Writing


def test_a_pack_says_how_many_records_it_has(path):
    assert write_pack(str(path), records(3)) == 3
    assert write_pack(path, iter([])) == 0


def test_the_higher_generation_is_kept_then_the_later(path):
    versions = [example_record(config=n, generation=g) for n, g in enumerate([1, 2, 2, 0])]
    assert write_pack(path, versions) == 1
    assert PackStore(path).get(versions[0].problem) == versions[2]


def test_a_pack_replaces_an_earlier_one_and_its_readers_go_on(path):
    write_pack(path, [example_record(config="old")])
    reader = PackStore(path)
    reader.get(example_record().problem)
    write_pack(path, [example_record(config="new")])
    assert reader.get(example_record().problem) == example_record(config="old")
    assert PackStore(path).get(example_record().problem) == example_record(config="new")


def test_a_pack_that_cannot_be_finished_leaves_the_earlier_one(path):
    write_pack(path, records(2))

    def failing():
        yield example_record(call_key="9")
        raise KeyError("no more")

    with pytest.raises(KeyError, match="no more"):
        write_pack(path, failing())
    assert len(list(PackStore(path).items())) == 2
    assert [file.name for file in path.parent.iterdir()] == ["records.db"]


def test_a_place_that_cannot_be_written_is_an_error_of_its_kind(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="Move the file") as caught:
        write_pack(tmp_path / "file" / "records.db", [])
    assert caught.value.kind == "not-a-directory"


def test_the_directory_of_a_pack_is_made(tmp_path):
    write_pack(tmp_path / "v1" / "packs" / "a.db", records(1))
    assert (tmp_path / "v1" / "packs" / "a.db").is_file()


# Reading


def test_items_goes_through_every_page(path):
    write_pack(path, records(1000))
    found = sorted(PackStore(path).items(), key=lambda record: int(record.problem.call_key))
    assert found == records(1000)


def test_a_name_with_signs_that_uris_use_is_a_name(tmp_path):
    path = tmp_path / "50%?mode=rw#x.db"
    write_pack(path, records(1))
    assert PackStore(path).get(records(1)[0].problem) == records(1)[0]
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_a_pack_is_read_without_being_touched(path):
    write_pack(path, records(1))
    path.chmod(0o444)
    path.parent.chmod(0o555)
    before = path.stat()
    list(PackStore(path).items())
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    assert [file.name for file in path.parent.iterdir()] == ["records.db"]


def test_a_pack_is_read_on_both_sides_of_a_fork(path):
    write_pack(path, records(1))
    code = (
        "import os, sys; from pathlib import Path; from tunebook.stores import PackStore\n"
        "from tunebook.testing import example_record\n"
        "store = PackStore(Path(sys.argv[1])); problem = example_record(call_key='0', config=0).problem\n"
        "assert store.get(problem)\n"
        "pid = os.fork(); found = store.get(problem) is not None\n"
        "sys.exit(not found) if pid == 0 else sys.exit(os.waitpid(pid, 0)[1] or not found)\n"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code, str(path)], env=environment(), check=False)
    assert done.returncode == 0


def test_a_connection_is_closed_with_its_store(path):
    write_pack(path, records(1))
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(5):
        PackStore(path).get(records(1)[0].problem)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


# Damage


def _database(path, *statements):
    connection = sqlite3.connect(path)
    for statement in statements:
        connection.execute(statement)
    connection.commit()
    connection.close()


def _rewritten(path, statement):
    write_pack(path, [example_record()])
    _database(path, statement)


MAKERS = {
    "empty": lambda path: path.write_bytes(b""),
    "text": lambda path: path.write_text("not a database" * 100),
    "foreign database": lambda path: _database(path, "CREATE TABLE records (id, generation, record)"),
    "newer version": lambda path: _rewritten(path, "PRAGMA user_version = 2"),
    "another application": lambda path: _rewritten(path, "PRAGMA application_id = 7"),
    "a trigger": lambda path: _rewritten(path, "CREATE TRIGGER t AFTER INSERT ON records BEGIN SELECT 1; END"),
    "text for bytes": lambda path: _rewritten(path, "UPDATE records SET record = 'text'"),
    "damaged record": lambda path: _rewritten(path, "UPDATE records SET record = x'00'"),
    "a directory": lambda path: path.mkdir(),
    "missing": lambda path: None,
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
def test_a_file_that_is_not_a_pack_answers_nothing_after_one_warning(path, make):
    make(path)
    store = PackStore(path)
    with pytest.warns(TunebookWarning, match="is not used") as caught:
        found = [store.get(example_record().problem) for _ in range(3)] + list(store.items())
    assert found == [None, None, None]
    assert len(caught) == 1


@pytest.mark.promise("damage-is-a-miss")
@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE records SET id = 'text'",
        "UPDATE records SET id = 7",
        # A name that looks whole, with an escape that JSON does not have.
        """UPDATE records SET record = CAST(replace(CAST(record AS TEXT), '"op":"matmul', '"op":"\\q') AS BLOB)""",
    ],
)
def test_a_damaged_pack_is_listed_as_far_as_it_can_be(path, damage):
    _rewritten(path, damage)
    catalogue = Catalogue(PackStore(path))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TunebookWarning)
        assert catalogue.groups(lambda _op, _device: True) == []
        assert catalogue.find("") == []
        assert list(PackStore(path).items()) == []


def test_a_record_over_the_limit_is_not_read(path):
    _rewritten(path, f"UPDATE records SET record = zeroblob({MAX_RECORD_BYTES + SEAL_BYTES + 1})")
    assert PackStore(path).get(example_record().problem) is None


def test_a_record_under_another_id_is_not_returned(path):
    _rewritten(path, "UPDATE records SET id = x'00112233445566778899aabbccddeeff'")
    store = PackStore(path)
    assert store.get(example_record().problem) is None
    assert list(store.items()) == []


@pytest.mark.promise("damage-is-a-miss")
@pytest.mark.filterwarnings("ignore::tunebook._base.errors.TunebookWarning")
@pytest.mark.parametrize("zipped", [False, True], ids=["file", "zip"])
@pytest.mark.parametrize("stride", [pytest.param(1, marks=pytest.mark.slow), 17])
def test_no_flipped_bit_and_no_truncation_gives_a_wrong_value(path, zipped, stride):
    record = example_record()
    write_pack(path, [record])
    data = path.read_bytes()
    for position in [*range(100), *range(100, len(data), stride)]:
        damaged = bytearray(data)
        damaged[position] ^= 1 << position % 8
        for content in (bytes(damaged), data[:position]):
            path.write_bytes(content)
            source = path if not zipped else Resource(content)
            assert PackStore(source).get(record.problem) in (None, record)
            assert list(PackStore(source).items()) in ([], [record])


class Resource:
    """What `importlib.resources` gives for a file that is not on disk."""

    def __init__(self, content):
        self._content = content

    def read_bytes(self):
        return self._content

    def __str__(self):
        return "package.zip/records.db"


@given(st.binary(max_size=300), st.booleans())
@settings(max_examples=100, deadline=None)
@pytest.mark.filterwarnings("ignore::tunebook._base.errors.TunebookWarning")
def test_random_bytes_never_raise_and_never_answer(content, with_header):
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "records.db")
        path.write_bytes(b"SQLite format 3\0" * with_header + content)
        for source in (path, Resource(path.read_bytes())):
            assert PackStore(source).get(example_record().problem) is None
            assert list(PackStore(source).items()) == []


def test_a_damaged_archive_is_one_warning(tmp_path, path):
    write_pack(path, records(50))
    archive = tmp_path / "package.zip"
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        file.write(path, "records.db")
    data = bytearray(archive.read_bytes())
    data[len(data) // 2] ^= 0xFF
    archive.write_bytes(data)
    store = PackStore(zipfile.Path(archive) / "records.db")
    with pytest.warns(TunebookWarning, match="archive is damaged"):
        assert store.get(records(1)[0].problem) is None


# Signatures


def test_a_signed_pack_is_read_without_the_key_and_an_altered_record_is_not_believed_with_it(path):
    write_pack(path, records(3), key=b"one secret")
    store = PackStore(path)
    assert store.get(records(3)[1].problem) == records(3)[1]
    assert len(list(store.items())) == 3
    store.require_signature(b"one secret")
    with pytest.raises(CodecError, match="another key"):
        store.require_signature(b"another secret")
    write_pack(path, records(3))
    with pytest.raises(CodecError, match="not signed, and a key is set"):
        PackStore(path).require_signature(b"one secret")


# Layers


def test_an_entry_tuned_here_comes_before_a_shipped_entry(path):
    write_pack(path, [example_record(config="shipped"), example_record(op="other", config="shipped")])
    store = LayeredStore(MemoryStore(), lambda: [PackStore(path)])
    assert store.get(example_record().problem) == example_record(config="shipped")
    store.put(example_record(config="tuned"))
    assert store.get(example_record().problem) == example_record(config="tuned")
    assert sorted(str(record.head.config) for record in store.items()) == ["shipped", "tuned"]


def test_a_record_without_a_decision_does_not_hide_a_shipped_one(tmp_path):
    shipped = example_record(config="shipped")
    write_pack(tmp_path / "shipped.db", [shipped])
    store = LayeredStore(MemoryStore(), lambda: [PackStore(tmp_path / "shipped.db")])
    failed, alone = (Record(replace(r.head, config=None), r.body) for r in (shipped, example_record(op="alone@1")))
    store.put_many([failed, alone])
    assert store.get(shipped.problem) == shipped
    assert store.get(alone.problem) == alone
    assert sorted(store.items(), key=repr) == sorted([shipped, alone], key=repr)


def test_packs_are_looked_for_once_and_not_before_a_miss():
    looked = []
    store = LayeredStore(MemoryStore(), lambda: looked.append(1) or ())
    store.put(example_record())
    store.get(example_record().problem)
    assert looked == []
    for _ in range(3):
        store.get(example_record(op="unknown").problem)
    assert looked == [1]


# Finding


def test_the_packs_of_a_book_are_found_in_the_order_of_their_names(tmp_path):
    for name in ("b.db", "a.db"):
        write_pack(tmp_path / "v1" / "packs" / name, [])
    (tmp_path / "v1" / "packs" / "notes.txt").touch()
    assert [Path(pack.where).name for pack in packs_in(tmp_path)] == ["a.db", "b.db"]


def test_no_packs_are_found_in_a_root_that_others_can_write_to(tmp_path):
    write_pack(tmp_path / "v1" / "packs" / "a.db", [])
    tmp_path.chmod(0o777)
    assert packs_in(tmp_path) == ()


def test_no_packs_are_found_where_there_is_nothing(tmp_path):
    assert packs_in(tmp_path / "nothing") == ()


def install(site, value, files, *, zipped=False):
    """Lay out an installed package whose entry point announces a pack."""
    info = "shipped-1.dist-info"
    content = {
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: shipped\nVersion: 1\n",
        f"{info}/entry_points.txt": f"[{discovery.GROUP}]\ndefaults = {value}\n".encode(),
        "shipped/__init__.py": b"raise ImportError('a kernel library takes seconds to import, and this one fails')",
        **files,
    }
    if zipped:
        with zipfile.ZipFile(site, "w") as archive:
            for name, data in content.items():
                archive.writestr(name, data)
        return
    for name, data in content.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_bytes(data)


ASK = (
    "import sys; from pathlib import Path; from tunebook.stores import open_store\n"
    "from tunebook.testing import example_record\n"
    "store = open_store(None, default_root=Path(sys.argv[1]))\n"
    "record = store.get(example_record().problem)\n"
    "assert 'shipped' not in sys.modules\n"
    "print(record.head.config if record else None)\n"
)


@pytest.mark.parametrize("zipped", [False, True], ids=["directory", "zip"])
@pytest.mark.parametrize(
    ("value", "file"), [("shipped:tuned.db", "shipped/tuned.db"), ("shipped.packs:h200.db", "shipped/packs/h200.db")]
)
def test_a_pack_of_an_installed_package_is_found_without_importing_it(tmp_path, path, value, file, zipped):
    write_pack(path, [example_record(config="shipped")])
    site = tmp_path / "site"
    install(site, value, {file: path.read_bytes()}, zipped=zipped)
    variables = environment()
    variables["PYTHONPATH"] += os.pathsep + str(site)
    line = [sys.executable, "-W", "error", "-c", ASK, str(tmp_path / "book")]
    done = subprocess.run(line, env=variables, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("shipped\n", "")


@pytest.mark.parametrize(
    "value",
    [
        "shipped:gone.db",
        "not_installed:tuned.db",
        "shipped",
        "shipped:",
        "..:x.db",
        "shipped:../../x.db",
        "sys:a.db",
        "",
    ],
)
def test_an_entry_point_that_leads_nowhere_is_a_warning(monkeypatch, tmp_path, value):
    install(tmp_path, "shipped:tuned.db", {})
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.warns(TunebookWarning, match="is not used"):
        assert discovery._resource(EntryPoint("defaults", value, discovery.GROUP)) is None


def test_packs_of_the_book_come_before_packs_of_packages(tmp_path, monkeypatch):
    write_pack(tmp_path / "v1" / "packs" / "a.db", [])
    announced = PackStore(tmp_path / "announced.db")
    monkeypatch.setattr(discovery, "announced", lambda: (announced,))
    layers = open_store(None, default_root=tmp_path).layers
    assert [Path(layer.where).name for layer in layers[1:]] == ["a.db", "announced.db"]


# What a path means


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("book", LayeredStore),
        ("book.v2", LayeredStore),
        ("book.json", JsonStore),
        ("BOOK.JSON", JsonStore),
        ("book.db", PackStore),
    ],
)
def test_a_path_that_does_not_exist_yet_is_opened_by_its_suffix(tmp_path, name, kind):
    assert isinstance(open_store(tmp_path / name), kind)
    assert list(tmp_path.iterdir()) == []


def test_an_existing_directory_is_a_book_whatever_its_name(tmp_path):
    (tmp_path / "book.json").mkdir()
    store = open_store(tmp_path / "book.json")
    store.put(example_record())
    assert DirectoryStore(tmp_path / "book.json").get(example_record().problem) == example_record()


@pytest.mark.parametrize("name", ["book.txt", "book"])
def test_a_file_of_another_kind_is_an_error_that_names_the_right_kinds(tmp_path, name):
    (tmp_path / name).touch()
    with pytest.raises(DefinitionError, match=r"ends in \.db or \.json"):
        open_store(tmp_path / name)


def test_the_users_own_book_needs_its_root():
    with pytest.raises(DefinitionError, match="default_root"):
        open_store(None)


def test_a_path_that_cannot_be_one_is_an_error():
    with pytest.raises(DefinitionError, match="cannot be a path"):
        open_store(Path("a\0b"))


def test_a_directory_reads_the_packs_in_it(tmp_path):
    write_pack(tmp_path / "v1" / "packs" / "a.db", [example_record()])
    assert open_store(tmp_path).get(example_record().problem) == example_record()
