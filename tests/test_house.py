"""Rules of the house, checked: layers, sizes, names, and that nothing unfinished is left."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tunebook

ROOT = Path(tunebook.__file__).parent
MODULES = sorted(ROOT.rglob("*.py"))

# Imports go strictly downwards: a module may import from the rows below its own, and from earlier ones in its row.
LAYERS = """
testing
_landscape
adapters._build_cache adapters._per_config adapters.native adapters.numpy
_explain _function_kernel _signature _dispatch _tunable _executor
_registry _book _sources _selection _tune_cache
_tuner _pending _persistent
_runner _restore _worker _measure _check _decide _race _progress stores
_kernel
_overlay _cache _scope _policy
_leaf _keys _key_text _fingerprint _space _checksum _code _buckets _arrays
_codec _record
_gate
_types
_errors
"""
ROWS = [row.split() for row in LAYERS.split("\n") if row]


def name_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return "stores" if parts[0] == "stores" else ".".join(parts)


def imports_of(path):
    """The tunebook modules that a module imports when it runs; imports for type checking alone do not count."""
    tree = ast.parse(path.read_text())
    checking = [n for n in ast.walk(tree) if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n.test)]
    skipped = {id(inner) for block in checking for inner in ast.walk(block)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and id(node) not in skipped and (node.module or "").startswith("tunebook."):
            module = node.module.removeprefix("tunebook.")
            yield "stores" if module.startswith("stores") else module


def row_of(name):
    found = [i for i, row in enumerate(ROWS) if name in row]
    assert found, f"{name} has no place in the layers of tests/test_house.py"
    return found[0]


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_go_down_the_layers(path):
    me = name_of(path)
    if me in ("__init__", "adapters.__init__"):
        return
    for other in set(imports_of(path)) - {me}:
        below = row_of(other) > row_of(me)
        beside = row_of(other) == row_of(me) and not imports_back(other, me)
        assert below or beside, f"{me} must not import {other}, which is above it or imports it"


def imports_back(other, me):
    return other != "stores" and me in set(imports_of(ROOT / (other.replace(".", "/") + ".py")))


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
    assert len(broad) <= 3
    assert all("# " in line for line in broad), "each with its reason"


def test_only_policy_reads_the_environment_and_nothing_prints():
    for path in MODULES:
        text = path.read_text()
        if path.name != "_policy.py":
            assert "os.environ" not in text, path
            assert "getenv" not in text, path
        assert not re.search(r"^\s*print\(", text, re.MULTILINE), path


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
