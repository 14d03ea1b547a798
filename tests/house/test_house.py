"""Rules of the house, checked: sizes, names, and that nothing unfinished is left."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import tunebook

ROOT = Path(tunebook.__file__).parent
MODULES = sorted(ROOT.rglob("*.py"))


def name_of(path):
    return path.relative_to(ROOT).with_suffix("").as_posix()


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_module_has_at_most_500_lines_and_a_function_60(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 500
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert node.end_lineno - node.lineno < 60, f"{path.name}: {node.name}"


def test_broad_excepts_are_few_and_explained():
    broad = [
        line
        for path in MODULES
        for line in path.read_text().splitlines()
        if re.search(r"except (Base)?Exception|except:", line)
    ]
    assert len(broad) <= 4
    assert all("# " in line for line in broad), "each with its reason"


def test_only_settings_reads_the_environment_and_nothing_prints():
    for path in MODULES:
        text = path.read_text()
        if path.name != "environment_variables.py":
            assert "os.environ" not in text, path
            assert "getenv" not in text, path
        assert not re.search(r"^\s*print\(", text, re.MULTILINE), path


def test_a_class_name_means_one_thing():
    names = Counter(
        node.name.lstrip("_")
        for path in MODULES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    )
    assert [name for name, count in names.items() if count > 1] == []


def test_nothing_unfinished_is_left():
    for path in MODULES:
        assert not re.search(r"TODO|FIXME|XXX|\bpass  # stub", path.read_text()), path


def test_every_public_name_is_documented():
    public = [name for name in vars(tunebook) if not name.startswith("_")]
    objects = [getattr(tunebook, name) for name in public]
    undocumented = [n for n, o in zip(public, objects, strict=True) if callable(o) and not (o.__doc__ or "").strip()]
    assert undocumented == []


def test_importing_loads_no_framework():
    frameworks = ["numpy", "jax", "torch", "numba", "cupy", "triton", "pyopencl", "redis", "pydantic", "rich"]
    code = f"import sys, tunebook; print([m for m in {frameworks!r} if m in sys.modules])"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout == "[]\n"


def test_importing_needs_no_home_and_no_readable_book(tmp_path):
    (tmp_path / "v1").write_text("not a directory")
    for home in (str(tmp_path), "/proc/nonexistent", ""):
        environment = {"TUNEBOOK_HOME": home, "PYTHONPATH": ":".join(sys.path)}
        subprocess.run([sys.executable, "-c", "import tunebook"], env=environment, check=True)
