"""Books that others can write to are not believed: directories, files, and links to them."""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING

import pytest

import tunebook as tb
from tunebook._base.errors import StoreError, TunebookWarning
from tunebook._cli import main
from tunebook.stores import DirectoryStore, JsonStore, PackStore, open_store, write_pack
from tunebook.stores._layered import packs_in
from tunebook.testing import example_record

if TYPE_CHECKING:
    from pathlib import Path

NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
PROBLEM = example_record().problem


def make(path: Path) -> Path:
    """Make a book with one record; its name says of which kind."""
    if path.suffix == ".db":
        write_pack(path, [example_record()])
    else:
        open_store(path).put(example_record())
    return path


def give_away(path: Path) -> None:
    for each in (path, *path.rglob("*")):
        os.chown(each, NOBODY, NOBODY, follow_symlinks=False)


def found_in(store):
    """Return whether the record is found, and the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = [store.get(PROBLEM) is not None, store.get(PROBLEM) is not None, list(store.items()) != []]
    assert len(set(found)) == 1
    return found[0], [str(warning.message) for warning in caught]


@pytest.mark.promise("others-books")
@pytest.mark.parametrize("name", ["book", "book.json", "book.db"])
@pytest.mark.parametrize("mode", [0o020, 0o002])
def test_a_book_that_others_can_write_to_is_one_warning_with_the_command_that_mends_it(tmp_path, name, mode):
    path = make(tmp_path / name)
    path.chmod(path.stat().st_mode | mode)
    found, (message,) = found_in(open_store(path))
    assert not found
    assert f"the book at {path} is not used" in message
    assert f"chmod go-w {path}" in message
    path.chmod(path.stat().st_mode & ~0o022)
    assert found_in(open_store(path)) == (True, [])


@pytest.mark.promise("others-books")
@needs_root
@pytest.mark.parametrize("name", ["book", "book.json", "book.db"])
def test_a_book_of_another_user_is_one_warning_with_the_command_that_mends_it(tmp_path, name):
    path = make(tmp_path / name)
    give_away(path)
    found, (message,) = found_in(open_store(path))
    assert not found
    assert f"{path} belongs to another user (uid {NOBODY})" in message
    assert f"chown -R {os.geteuid()} {path}" in message


@pytest.mark.promise("others-books")
@needs_root
@pytest.mark.parametrize("name", ["book", "book.json", "book.db"])
@pytest.mark.parametrize("nested", [False, True])
def test_a_link_of_another_user_is_not_followed_wherever_it_leads(tmp_path, name, nested):
    (tmp_path / "mine").mkdir()
    make(tmp_path / "mine" / name)
    theirs = tmp_path / "theirs"
    theirs.symlink_to(tmp_path / "mine")
    given = theirs
    if nested:  # a link of mine that leads through theirs
        given = tmp_path / "link"
        given.symlink_to("theirs")
    assert found_in(open_store(given / name)) == (True, [])
    os.chown(theirs, NOBODY, NOBODY, follow_symlinks=False)
    found, (message,) = found_in(open_store(given / name))
    assert not found
    assert f"{theirs} is a link of another user (uid {NOBODY})" in message
    assert f"chown -h {os.geteuid()} {theirs}" in message


@pytest.mark.promise("others-books")
def test_a_root_is_looked_at_again_after_a_second_and_not_only_once(tmp_path):
    now = [100.0]
    store = DirectoryStore(make(tmp_path / "book"), clock=lambda: now[0])
    assert store.get(PROBLEM) == example_record()
    (tmp_path / "book").chmod(0o777)
    now[0] += 1.0
    with pytest.warns(TunebookWarning, match="chmod go-w"):
        assert store.get(PROBLEM) is None
    with pytest.raises(StoreError, match="chmod go-w"):
        store.put(example_record())
    (tmp_path / "book").chmod(0o755)
    assert store.get(PROBLEM) == example_record()


@pytest.mark.promise("others-books")
def test_a_json_file_is_looked_at_again_at_every_read_and_write(tmp_path):
    path = make(tmp_path / "book.json")
    store = JsonStore(path)
    assert store.get(PROBLEM) == example_record()
    path.chmod(0o666)
    with pytest.warns(TunebookWarning, match="chmod go-w"):
        assert store.get(PROBLEM) is None
    before = path.read_bytes()
    for write in (lambda: store.put(example_record(config=2)), lambda: store.delete(PROBLEM)):
        with pytest.raises(StoreError, match="chmod go-w") as caught:
            write()
        assert caught.value.kind == "unsafe"
    assert path.read_bytes() == before


@pytest.mark.promise("others-books")
def test_a_pack_in_the_book_is_checked_and_a_pack_of_a_package_is_trusted_like_its_code(tmp_path):
    (tmp_path / "book").mkdir(mode=0o755)
    pack = make(tmp_path / "book" / "v1" / "packs" / "theirs.db")
    pack.chmod(0o666)
    (store,) = packs_in(tmp_path / "book")
    assert found_in(store)[0] is False
    assert found_in(PackStore(pack, vouched=True)) == (True, [])


@pytest.mark.parametrize("name", ["book.json", "book.db"])
def test_a_call_works_beside_a_file_that_others_can_write_to(tmp_path, name):
    make(tmp_path / name).chmod(0o666)

    @tb.tunable(space=tb.Space(step=[1, 2]), heuristic={"step": 1}, store=tmp_path / name)
    def double(n, *, config):
        del config
        return 2 * n

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert [double(4), double(5)] == [8, 10]
    assert sum(f"chmod go-w {tmp_path / name}" in str(warning.message) for warning in caught) == 1


@pytest.mark.parametrize("name", ["book.json", "book.db"])
def test_the_command_refuses_such_a_file_as_a_book_and_imports_it(tmp_path, name, capsys):
    path = make(tmp_path / name)
    path.chmod(0o666)
    there = ("--book", str(tmp_path / "there"))
    assert [main(["ls", "--book", str(path)]), main(["merge", str(path), *there])] == [3, 3]
    assert capsys.readouterr().err.count(f"chmod go-w {path}") == 2
    assert main(["doctor", "--book", str(path)]) == 1
    assert f"chmod go-w {path}" in capsys.readouterr().out
    # The user who types the name of a file vouches for it.
    assert main(["import", str(path), *there]) == 0
    assert "1 new" in capsys.readouterr().out
