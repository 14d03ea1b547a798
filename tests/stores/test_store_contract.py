"""Every store, ours or another's, passes the one contract."""

from __future__ import annotations

import zipfile
from typing import TYPE_CHECKING

import pytest

from tunebook._base.errors import DefinitionError
from tunebook.stores import (
    FILE_ENGINES,
    DirectoryStore,
    JsonStore,
    LayeredStore,
    MemoryStore,
    PackStore,
    open_store,
    write_pack,
)
from tunebook.stores._listing import Catalogue
from tunebook.stores._open import FileEngine
from tunebook.testing import ReadOnlyStoreContract, StoreContract, example_record, refuses_writes

if TYPE_CHECKING:
    from pathlib import Path

_in_memory: dict[Path, MemoryStore] = {}


class TestMemoryStore(StoreContract):
    def open(self, tmp_path):
        return _in_memory.setdefault(tmp_path, MemoryStore())


class TestDirectoryStore(StoreContract):
    def open(self, tmp_path):
        return DirectoryStore(tmp_path / "book")


class TestJsonStore(StoreContract):
    def open(self, tmp_path):
        return JsonStore(tmp_path / "book.json")


class TestLayeredStore(StoreContract):
    def open(self, tmp_path):
        return LayeredStore(DirectoryStore(tmp_path / "book"), lambda: ())


class TestPackStore(ReadOnlyStoreContract):
    def fill(self, tmp_path, records):
        write_pack(tmp_path / "records.db", records)
        return PackStore(tmp_path / "records.db")

    def test_nothing_can_be_written(self, tmp_path):
        assert refuses_writes(self.fill(tmp_path, []))


class TestPackInAZipFile(ReadOnlyStoreContract):
    def fill(self, tmp_path, records):
        write_pack(tmp_path / "records.db", records)
        with zipfile.ZipFile(tmp_path / "package.whl", "w") as archive:
            archive.write(tmp_path / "records.db", "package/records.db")
        return PackStore(zipfile.Path(tmp_path / "package.whl") / "package" / "records.db")

    def test_nothing_can_be_written(self, tmp_path):
        assert refuses_writes(self.fill(tmp_path, []))


class TestPackBehindADirectory(ReadOnlyStoreContract):
    def fill(self, tmp_path, records):
        write_pack(tmp_path / "records.db", records)
        return LayeredStore(DirectoryStore(tmp_path / "book"), lambda: [PackStore(tmp_path / "records.db")])


def test_a_new_engine_for_files_needs_one_row_in_the_table(tmp_path, monkeypatch):
    """It is opened by its suffix, and listed without a line of its own."""
    engine = FileEngine("memo", "a .memo file", lambda _path: MemoryStore(), lambda _path, _records: None)
    monkeypatch.setitem(FILE_ENGINES, ".memo", engine)
    store = open_store(tmp_path / "book.memo")
    store.put(example_record())
    assert [listed.record() for listed in Catalogue(store).entries(lambda _op, _device: True)] == [example_record()]
    (tmp_path / "file.txt").touch()
    with pytest.raises(DefinitionError, match=r"but not a \.db pack or a \.json file or a \.memo file"):
        open_store(tmp_path / "file.txt")
