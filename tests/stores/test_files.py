"""Files that are replaced whole, and locks."""

from __future__ import annotations

import fcntl
import gc
import os
import stat
from concurrent.futures import ThreadPoolExecutor

import pytest

import tunebook as tb
from tunebook import formats
from tunebook._base.errors import StoreError
from tunebook.formats._bundle import export_bundle
from tunebook.stores._files import FileLock, opened, read_file, replace_file


def names(directory):
    return [path.name for path in directory.iterdir()]


def test_a_file_is_made_and_replaced_and_nothing_is_left_beside_it(tmp_path):
    path = tmp_path / "file"
    for content in (b"one", b"two" * 100_000, b""):
        replace_file(path, content)
        assert path.read_bytes() == content
    assert names(tmp_path) == ["file"]


def test_a_new_file_has_the_mode_of_the_umask_and_a_replaced_one_its_own(tmp_path):
    path, umask = tmp_path / "file", os.umask(0o027)
    try:
        replace_file(path, b"")
        assert path.stat().st_mode & 0o777 == 0o640
        path.chmod(0o604)
        replace_file(path, b"new")
        assert path.stat().st_mode & 0o777 == 0o604
    finally:
        os.umask(umask)


@pytest.mark.parametrize("fault", ["sync", "in the way"])
def test_a_failed_write_leaves_the_old_file_and_nothing_beside_it(fault, tmp_path):
    path = tmp_path / "file"
    path.mkdir() if fault == "in the way" else path.write_text("old")

    def full(_descriptor):
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left" if fault == "sync" else "directory"):
        replace_file(path, b"new", sync=full if fault == "sync" else None)
    assert names(tmp_path) == ["file"]
    assert path.is_dir() or path.read_text() == "old"


def test_the_content_is_synced_before_the_name_and_the_name_before_it_returns(tmp_path):
    path, seen = tmp_path / "file", []

    def sync(descriptor):
        seen.append((stat.S_ISDIR(os.fstat(descriptor).st_mode), path.exists()))

    replace_file(path, b"x", sync=sync)
    assert seen == [(False, False), (True, True)]


def test_threads_that_write_one_file_do_not_meet_in_a_temporary_one(tmp_path):
    contents = [bytes([65 + n]) * 200_000 for n in range(8)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda content: replace_file(tmp_path / "file", content), contents * 20))
    assert (tmp_path / "file").read_bytes() in contents
    assert names(tmp_path) == ["file"]


def saved(path):
    with tb.record() as calls:
        pass
    calls.save(path)


@pytest.mark.parametrize("write", [lambda p: export_bundle([], p), saved, lambda p: formats.write("ejkernel", [], p)])
def test_a_user_file_that_cannot_be_written_is_our_error_and_leaves_nothing(write, tmp_path):
    (tmp_path / "out").mkdir()
    with pytest.raises(StoreError, match=r"cannot (write|save)"):
        write(tmp_path / "out")
    assert names(tmp_path) == ["out"]


@pytest.mark.promise("short-reads")
@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 20_000])
def test_a_file_is_read_whole_though_each_read_returns_a_part(tmp_path, monkeypatch, size):
    (tmp_path / "file").write_bytes(content := os.urandom(size))
    read = os.read
    monkeypatch.setattr(os, "read", lambda descriptor, count: read(descriptor, min(count, 64)))
    assert read_file(str(tmp_path / "file"), limit_bytes=1 << 20) == content


def test_a_lock_that_an_interrupt_left_behind_does_not_unlock_another_file(tmp_path):
    first = os.open(tmp_path, os.O_RDONLY)
    lock = FileLock(first, 1)
    assert lock.__enter__()
    os.close(first)
    (tmp_path / "file").touch()
    other = os.open(tmp_path / "file", os.O_RDONLY)
    assert other == first, "the system gives the number again"
    fcntl.flock(other, fcntl.LOCK_EX)
    del lock
    gc.collect()
    try:
        with opened(tmp_path / "file", os.O_RDONLY) as again, FileLock(again, 1) as is_ours:
            assert not is_ours
    finally:
        os.close(other)
