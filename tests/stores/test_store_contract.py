"""Every store, ours or another's, passes the one contract."""

from __future__ import annotations

import zipfile
from typing import TYPE_CHECKING

from tunebook.stores import DirectoryStore, JsonStore, LayeredStore, MemoryStore, PackStore, write_pack
from tunebook.testing import ReadOnlyStoreContract, StoreContract, refuses_writes

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
