"""Packs in folders `__tunebook__` beside the code of kernels: which are found, in which order, which are believed."""

from __future__ import annotations

import os
import sqlite3
import warnings

import pytest

from tunebook.stores import DirectoryStore, LayeredStore, PackStore, packs_beside, shipped_with, write_pack
from tunebook.stores import _layered as discovery
from tunebook.testing import example_record

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
NOBODY = 65534


def lay_out(root, *files):
    """Make the files of a library; a pack has one record, whose configuration is the name of the pack."""
    for name in files:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".db":
            write_pack(path, [example_record(config=name)])
        else:
            path.touch()


def found_beside(root, file, package):
    packs = packs_beside(str(root / file), package)
    return [os.path.relpath(pack.where, root) for pack in packs]


@pytest.mark.parametrize(
    ("file", "package", "packs", "found"),
    [
        pytest.param("a.py", "", ["__tunebook__/x.db"], ["__tunebook__/x.db"], id="script"),
        pytest.param("k/a.py", "", ["__tunebook__/x.db", "k/__tunebook__/y.db"], ["k/__tunebook__/y.db"], id="folder"),
        pytest.param(
            "lib/ops/a.py",
            "lib.ops",
            ["__tunebook__/no.db", "lib/__tunebook__/b.db", "lib/__tunebook__/a.db", "lib/ops/__tunebook__/z.db"],
            ["lib/ops/__tunebook__/z.db", "lib/__tunebook__/a.db", "lib/__tunebook__/b.db"],
            id="package",
        ),
        pytest.param("lib/ops/__init__.py", "lib.ops", ["lib/__tunebook__/b.db"], ["lib/__tunebook__/b.db"], id="init"),
        pytest.param("lib/a.py", "lib", ["lib/sub/__tunebook__/b.db"], [], id="not in other packages"),
        pytest.param("lib/a.py", "lib", [], [], id="nothing"),
    ],
)
def test_packs_are_found_beside_the_file_and_in_the_parent_packages(tmp_path, file, package, packs, found):
    lay_out(tmp_path, file, *packs)
    assert found_beside(tmp_path, file, package) == found


def test_other_files_in_the_folder_do_not_matter(tmp_path):
    lay_out(tmp_path, "a.py", "__tunebook__/x.db")
    for name in ("README.md", ".x.db.1234.tmp", "x.db-journal", "._x.db"):
        (tmp_path / "__tunebook__" / name).touch()
    assert found_beside(tmp_path, "a.py", "") == ["__tunebook__/x.db"]


def test_a_file_in_place_of_the_folder_is_nothing_to_find(tmp_path):
    lay_out(tmp_path, "a.py")
    (tmp_path / "__tunebook__").touch()
    assert found_beside(tmp_path, "a.py", "") == []


def test_each_folder_is_listed_once_for_all_kernels_of_a_process(tmp_path, monkeypatch):
    lay_out(tmp_path, *(f"lib/ops/{name}.py" for name in "abc"), "lib/__tunebook__/x.db")
    listed = []
    real = os.listdir
    monkeypatch.setattr(os, "listdir", lambda path: listed.append(os.path.relpath(path, tmp_path)) or real(path))
    for _ in range(3):
        for name in "abc":
            assert found_beside(tmp_path, f"lib/ops/{name}.py", "lib.ops") == ["lib/__tunebook__/x.db"]
    assert listed == ["lib/ops/__tunebook__", "lib/__tunebook__"]


# Which packs are believed


def got(root):
    """Return whether the pack beside a.py answers, and the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        packs = packs_beside(str(root / "a.py"), "")
        answers = [pack.get(example_record().problem) for pack in packs for _ in range(2)]
    return any(answers), [str(warning.message) for warning in caught]


@pytest.mark.parametrize(
    ("modes", "found"),
    [
        pytest.param({}, True, id="private"),
        pytest.param({"__tunebook__/x.db": 0o664}, False, id="the pack, and not the code"),
        pytest.param({"__tunebook__": 0o777}, False, id="the folder, and not the code"),
        pytest.param({".": 0o775, "__tunebook__": 0o775, "__tunebook__/x.db": 0o664}, True, id="the code too"),
        pytest.param({".": 0o775, "__tunebook__": 0o777}, False, id="the folder by others, the code by group"),
    ],
)
def test_a_pack_that_more_users_can_write_to_than_the_code_is_one_warning(tmp_path, modes, found):
    lay_out(tmp_path, "a.py", "__tunebook__/x.db")
    for name, mode in {".": 0o755, "__tunebook__": 0o755, "__tunebook__/x.db": 0o644, **modes}.items():
        (tmp_path / name).chmod(mode)
    answers, said = got(tmp_path)
    assert answers is found
    assert len(said) == (0 if found else 1)
    assert found or "chmod go-w" in said[0]


@needs_root
def test_a_pack_of_another_user_is_believed_only_beside_code_of_that_user(tmp_path):
    for place in ("theirs", "mine"):
        lay_out(tmp_path / place, "a.py", "__tunebook__/x.db")
        for name in ("__tunebook__", "__tunebook__/x.db", *(["."] if place == "theirs" else [])):
            os.chown(tmp_path / place / name, NOBODY, NOBODY)
    assert got(tmp_path / "theirs") == (True, [])
    answers, (said,) = got(tmp_path / "mine")
    assert not answers
    assert f"belongs to another user (uid {NOBODY})" in said


@pytest.mark.parametrize("damage", ["empty", "text", "foreign", "a directory", "a dead link"])
def test_a_damaged_pack_is_one_warning_and_the_next_one_answers(tmp_path, damage):
    lay_out(tmp_path, "a.py", "__tunebook__/b.db")
    bad = tmp_path / "__tunebook__" / "a.db"
    if damage == "foreign":
        with sqlite3.connect(bad) as connection:
            connection.execute("CREATE TABLE records (id BLOB)")
        connection.close()
    elif damage == "a directory":
        bad.mkdir()
    elif damage == "a dead link":
        bad.symlink_to(tmp_path / "nowhere")
    else:
        bad.write_text("not a pack" if damage == "text" else "")
    answers, said = got(tmp_path)
    assert answers
    assert len(said) == 1
    assert str(bad) in said[0]


def test_a_folder_that_may_not_be_listed_is_one_warning(tmp_path, monkeypatch):
    lay_out(tmp_path, "a.py", "__tunebook__/x.db")

    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "listdir", refuse)
    answers, said = got(tmp_path)
    assert not answers
    assert len(said) == 1
    assert "__tunebook__ are not used" in said[0]


# In the order of a call


def test_the_book_comes_first_then_its_packs_then_the_kernels_then_announced_ones(tmp_path, monkeypatch):
    lay_out(tmp_path, "own.db", "beside.db", "announced.db")
    own, beside, last = (PackStore(tmp_path / f"{name}.db") for name in ("own", "beside", "announced"))
    looked = []
    monkeypatch.setattr(discovery, "announced", lambda: looked.append(1) or (last,))
    front = DirectoryStore(tmp_path / "book")
    problem, stores = example_record().problem, [[own], [beside], []]

    def ask():
        store = LayeredStore(front, lambda: stores[0], shipped_with(lambda op: stores[1] if op == problem.op else ()))
        return store.get(problem).head.config, store.shipped_in(problem)

    assert ask() == ("own.db", str(tmp_path / "own.db"))
    stores[0] = []
    assert ask() == ("beside.db", str(tmp_path / "beside.db"))
    assert looked == [], "looking through the installed packages takes 40 ms"
    stores[1] = []
    assert ask() == ("announced.db", str(tmp_path / "announced.db"))
    front.put(example_record(config="tuned"))
    assert ask() == ("tuned", "")
