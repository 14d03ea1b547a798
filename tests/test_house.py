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
__main__ _cli
testing
_landscape
adapters.jax adapters._jax_record adapters._jax_tune adapters._jax_stage adapters._jax_kernel adapters._jax_context
adapters._jax_backward adapters._jax_programs
adapters._jax_facts adapters._jax_vmap adapters._jax_settings adapters._jax_profiler adapters._jax_agree
adapters.torch adapters.cupy adapters.opencl adapters._torch_kernel
adapters.triton adapters._triton_tuner adapters._triton_remote adapters._triton_spread adapters._triton_compile
adapters._triton_kernel adapters._triton_candidate adapters._triton_dispatch adapters._triton_restore
adapters._triton_device adapters._cuda_graph adapters._cuda_worker
adapters._build_cache adapters._per_config adapters.native adapters.numpy adapters._c_source adapters._cuda_timer
fleet formats _report _metrics _bundle
_explain _function_kernel _signature _dispatch _tunable _executor
_registry _book _sources _pins _autotune _exploration _not_blocking _selection _tune_cache _agreement
_planning _verify
_tuner _searching _run _job _pending _persistent _background
_runner _restore _worker _measure _compile _decide _incremental _progress _device_lock stores search
_kernel
_objective _race _ground _roofline _pruning _check _choice
_overlay _cache _scope _policy _accelerator _settings
_leaf _keys _key_text _fingerprint _frameworks _access _space _points _axes _checksum _code _buckets _arrays
_codec _record
_gate _packed
_types
_errors _digest
"""
PACKAGES = ("stores", "search", "fleet", "formats", "_report", "_cli")
ROWS = [row.split() for row in LAYERS.split("\n") if row]


def name_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts[0] if parts[0] in PACKAGES else ".".join(parts)


def imports_of(path):
    """The tunebook modules that a module imports when it runs; imports for type checking alone do not count."""
    tree = ast.parse(path.read_text())
    checking = [n for n in ast.walk(tree) if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n.test)]
    skipped = {id(inner) for block in checking for inner in ast.walk(block)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and id(node) not in skipped and (node.module or "").startswith("tunebook."):
            module = node.module.removeprefix("tunebook.")
            package = module.partition(".")[0]
            yield package if package in PACKAGES else module


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
    return other not in PACKAGES and me in set(imports_of(ROOT / (other.replace(".", "/") + ".py")))


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
        if path.name != "_settings.py":
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
