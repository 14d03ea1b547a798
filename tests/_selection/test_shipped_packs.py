"""Kernels find the packs that were shipped with their code, however the code was loaded."""

from __future__ import annotations

import importlib
import os
import runpy
import sys
import warnings
import zipfile
from importlib.util import module_from_spec, spec_from_file_location
from types import SimpleNamespace

import pytest
from cli_fixtures import python

import tunebook as tb
from tunebook.stores import PackStore, write_pack
from tunebook.testing import example_record

LIBRARY = """
import functools
import tunebook as tb

OPTIONS = {"space": tb.Space(step=[1, 2, 4]), "heuristic": {"step": 1}}


def scan(n, *, config):
    return n, config.step


def logged(function):
    @functools.wraps(function)
    def call(*args, **kwargs):
        return function(*args, **kwargs)
    return call


decorated = tb.tunable(logged(scan), name="shipped_lib.decorated", **OPTIONS)
chosen = tb.tunable(tb.choice(one=lambda n: (n, 1), four=lambda n: (n, 4)), name="shipped_lib.chosen")
scan = tb.tunable(scan, **OPTIONS)


class Sum(tb.Kernel):
    def __init__(self):
        super().__init__("shipped_lib.sum")

    def run(self, n, cfg):
        return n, cfg["step"]

    def heuristic_cfg(self, inv):
        return {"step": 1}

    def candidate_cfgs(self, inv):
        return [{"step": 1}, {"step": 2}, {"step": 4}]


run = tb.Executor(tb.ConfigSelectorChain(tb.ConfigCache(), persistent=tb.PersistentCache("sum")))
"""
FOUR = (8, 4)


@pytest.fixture
def root(tmp_path, monkeypatch):
    """Return a folder on the path, under which modules `shipped_lib` are looked for and forgotten after the test."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("TUNEBOOK_MODE", "frozen")
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "shipped_lib"]:
        del sys.modules[name]


def write(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(LIBRARY)


def ship(module, path, tmp_path):
    """Write a pack for calls of the kernels of a module with 8, in which 4 is best."""
    book = tb.PersistentCache("x", tmp_path / "author's book")
    for kernel in (module.scan, module.decorated):
        book.put(*kernel.problem(8), tb.Config(step=4))
    book.put(*module.chosen.problem(8), tb.Config(way="four"))
    book.put(*module.Sum().problem(tb.Invocation("shipped_lib.sum", (8,), {})), {"step": 4})
    write_pack(path, book.store.items())


def answers(module):
    return [module.scan(8), module.decorated(8), module.chosen(8), module.run(module.Sum(), 8)]


def by_path(path, name):
    spec = spec_from_file_location(name, path)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def as_script(path, _name):
    return SimpleNamespace(**runpy.run_path(str(path), run_name="__main__"))


def imported(_path, name):
    return importlib.import_module(name)


@pytest.mark.parametrize(
    ("files", "name", "load", "pack"),
    [
        pytest.param(["shipped_lib.py"], "shipped_lib", imported, "__tunebook__/h200.db", id="folder of kernels"),
        pytest.param(["shipped_lib.py"], "plugin", by_path, "__tunebook__/h200.db", id="loaded by its path"),
        pytest.param(["shipped_lib.py"], "", as_script, "__tunebook__/h200.db", id="script"),
        pytest.param(
            ["shipped_lib/__init__.py"], "shipped_lib", imported, "shipped_lib/__tunebook__/h200.db", id="package"
        ),
        pytest.param(
            ["shipped_lib/ops/a.py", "shipped_lib/ops/__init__.py", "shipped_lib/__init__.py"],
            "shipped_lib.ops.a",
            imported,
            "shipped_lib/ops/__tunebook__/h200.db",
            id="module in a package",
        ),
        pytest.param(
            ["shipped_lib/ops/a.py", "shipped_lib/ops/__init__.py", "shipped_lib/__init__.py"],
            "shipped_lib.ops.a",
            imported,
            "shipped_lib/__tunebook__/h200.db",
            id="pack of the parent package",
        ),
        pytest.param(
            ["shipped_lib/ops/a.py"],
            "shipped_lib.ops.a",
            imported,
            "shipped_lib/__tunebook__/h200.db",
            id="namespace package",
        ),
    ],
)
def test_the_pack_beside_the_code_answers(root, tmp_path, files, name, load, pack):
    for file in files:
        write(root / file)
    module = load(root / files[0], name)
    ship(module, root / pack, tmp_path)
    choice = FOUR if load is imported else (8, 1)  # it knows its module by name alone
    assert answers(module) == [FOUR, FOUR, choice, FOUR]
    explained = module.scan.explain(8)
    assert explained.shipped_in == str(root / pack)
    assert f"shipped in  {root / pack}" in str(explained)


@pytest.mark.parametrize("inner", ["", "shipped_lib/ops/"], ids=["top", "package"])
def test_a_pack_inside_a_zip_answers(root, tmp_path, monkeypatch, inner):
    write(root / "author" / "shipped_lib.py")
    pack = tmp_path / "h200.db"
    name = f"{inner}a".replace("/", ".") if inner else "shipped_lib"
    file = f"{inner}{'a' if inner else 'shipped_lib'}.py"
    with zipfile.ZipFile(tmp_path / "lib.zip", "w") as archive:
        for made in {file, *(f"{'/'.join(inner.split('/')[:n])}/__init__.py" for n in range(1, inner.count("/") + 1))}:
            archive.writestr(made, LIBRARY if made == file else "")
        monkeypatch.syspath_prepend(tmp_path / "lib.zip")
    ship(importlib.import_module(name), pack, tmp_path)
    with zipfile.ZipFile(tmp_path / "lib.zip", "a") as archive:
        archive.write(pack, f"{inner}__tunebook__/h200.db")
    assert answers(sys.modules[name]) == [FOUR] * 4


def test_a_zip_without_packs_is_an_ordinary_miss(root, tmp_path, monkeypatch):
    with zipfile.ZipFile(tmp_path / "lib.zip", "w") as archive:
        archive.writestr("shipped_lib.py", LIBRARY)
    monkeypatch.syspath_prepend(tmp_path / "lib.zip")
    assert importlib.import_module("shipped_lib").scan(8) == (8, 1)


def test_the_users_own_entry_comes_first(root, tmp_path):
    write(root / "shipped_lib.py")
    module = importlib.import_module("shipped_lib")
    ship(module, root / "__tunebook__" / "h200.db", tmp_path)
    tb.PersistentCache("mine").put(*module.scan.problem(8), tb.Config(step=2))
    assert module.scan(8) == (8, 2)
    assert module.scan.explain(8).shipped_in == ""


def test_a_user_without_a_home_gets_the_shipped_entry(root, tmp_path, monkeypatch):
    write(root / "shipped_lib.py")
    module = importlib.import_module("shipped_lib")
    ship(module, root / "__tunebook__" / "h200.db", tmp_path)
    monkeypatch.setenv("TUNEBOOK_HOME", "")
    monkeypatch.setattr("tunebook._selection.persistent_cache.book_root", lambda: None)
    with pytest.warns(tb.TunebookWarning, match="stay in memory"):
        assert module.scan(8) == FOUR


def test_a_book_that_the_kernel_names_is_read_alone(root, tmp_path):
    write(root / "shipped_lib.py")
    module = importlib.import_module("shipped_lib")
    ship(module, root / "__tunebook__" / "h200.db", tmp_path)
    own = tb.tunable(module.scan.__wrapped__, name="shipped_lib.scan", store=tmp_path / "book", **module.OPTIONS)
    assert own.problem(8) == module.scan.problem(8)
    assert own(8) == (8, 1)


def test_a_damaged_pack_is_one_warning_and_the_heuristic_answers(root, tmp_path):
    write(root / "shipped_lib.py")
    module = importlib.import_module("shipped_lib")
    (root / "__tunebook__").mkdir()
    (root / "__tunebook__" / "h200.db").write_bytes(b"SQLite format 3\0" + b"\xff" * 4096)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert answers(module)[0] == (8, 1)
        assert module.scan(9) == (9, 1)
    assert [str(w.message).count("h200.db is not used") for w in caught] == [1]


def test_a_warm_call_looks_nowhere_and_a_cold_one_reads_one_row(root, tmp_path, monkeypatch):
    write(root / "shipped_lib.py")
    module = importlib.import_module("shipped_lib")
    ship(module, tmp_path / "some.db", tmp_path)
    others = [example_record(op="shipped_lib.other@v0", call_key=str(n)) for n in range(500)]
    write_pack(root / "__tunebook__" / "h200.db", [*PackStore(tmp_path / "some.db").items(), *others])
    rows, listed = [], []
    ask, listdir = PackStore._query, os.listdir

    def counted(store, *given):
        found = ask(store, *given)
        rows.extend(found)
        return found

    monkeypatch.setattr(PackStore, "_query", counted)
    monkeypatch.setattr(os, "listdir", lambda path=".": listed.append(str(path)) or listdir(path))
    assert module.scan(8) == FOUR
    assert len(rows) == 1
    assert [path for path in listed if path.endswith("__tunebook__")] == [str(root / "__tunebook__")]
    listed.clear()
    assert [module.scan(8) for _ in range(3)] == [FOUR] * 3
    assert len(rows) == 1
    assert listed == []


def test_code_typed_into_a_prompt_has_no_folder():
    names = {"__name__": "__console__", "tb": tb}
    typed = "@tb.tunable(space=tb.Space(step=[1, 2]), heuristic={'step': 2})\ndef f(n, *, config): return config.step"
    exec(typed, names)
    with tb.policy_override(names["f"].selector, allow_autotune=False):
        assert names["f"](3) == 2


def test_sqlite_is_not_loaded_for_a_kernel_without_packs():
    code = (
        "import sys, tunebook as tb\n"
        "options = {'name': 'f', 'space': tb.Space(step=[1, 2]), 'heuristic': {'step': 2}}\n"
        "f = tb.tunable(lambda n, *, config: config.step, **options)\n"
        "assert f(3) == 2\nassert 'sqlite3' not in sys.modules"
    )
    done = python("-c", code, env={"TUNEBOOK_MODE": "frozen"})
    assert done.returncode == 0, done.stderr
