"""Rules of the house, checked: sizes, names, and that nothing unfinished is left."""

from __future__ import annotations

import ast
import importlib
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


def broad_excepts_in(text):
    """The lines of `except Exception`, `except BaseException`, a bare `except` and `suppress(Exception)`."""
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        caught = []
        if isinstance(node, ast.ExceptHandler):
            caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
        elif isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) == "suppress":
            caught = node.args
        if any(kind is None or getattr(kind, "id", "") in {"Exception", "BaseException"} for kind in caught):
            yield lines[node.lineno - 1]


def test_broad_excepts_are_few_and_explained():
    broad = [line for path in MODULES for line in broad_excepts_in(path.read_text())]
    assert len(broad) <= 4
    assert all(re.search(r"# (?:noqa: BLE001 - )?\w+ \w+", line) for line in broad), "each with its reason"


def test_the_rule_sees_every_form_of_a_broad_except():
    text = (
        "import contextlib\n"
        "try: f()\nexcept Exception: a\n"
        "try: f()\nexcept (OSError, BaseException) as error: b\n"
        "try: f()\nexcept: c\n"
        "try: f()\nexcept ValueError: pass\n"
        "with contextlib.suppress(Exception): d\n"
        "with suppress(OSError, Exception): e\n"
        "with suppress(OSError): pass\n"
    )
    assert [line[-1] for line in broad_excepts_in(text)] == ["a", "b", "c", "d", "e"]


def test_a_kernel_has_few_methods_for_authors_to_read():
    own = [name for name, value in vars(tunebook.Kernel).items() if callable(value) or isinstance(value, property)]
    assert len(own) <= 20


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


def test_locks_for_blocks_survive_an_interrupt():
    """Sessions that ask for their turn without waiting have plain locks: nobody waits for those."""
    asked = {"_tuning/in_call_session", "_tuning/live_session", "_base/locks"}
    plain = re.compile(r"threading\.(R?Lock\b|Condition\(\))|with self\._changed\b")
    assert [name_of(path) for path in MODULES if name_of(path) not in asked and plain.search(path.read_text())] == []


def test_nothing_unfinished_is_left():
    for path in MODULES:
        assert not re.search(r"TODO|FIXME|XXX|\bpass  # stub", path.read_text()), path


def test_every_public_name_is_documented():
    public = [name for name in dir(tunebook) if not name.startswith("_")]
    assert len(public) > 70
    assert [name for name in public if not (getattr(tunebook, name).__doc__ or "").strip()] == []


def imports_for_type_checkers():
    """The imports under `if TYPE_CHECKING` at the top of the package, as (name, module, name in the module)."""
    block = next(n for n in ast.parse((ROOT / "__init__.py").read_text()).body if isinstance(n, ast.If))
    return [(alias.asname, node.module, alias.name) for node in block.body for alias in node.names]


def test_type_checkers_see_every_name_that_is_loaded_late_and_no_other():
    imports = imports_for_type_checkers()
    assert sorted(name for name, _, _ in imports) == sorted(tunebook.__all__)
    for name, module, original in imports:
        assert name == original, "only `X as X` makes a name public to a type checker"
        package = importlib.import_module(module)
        found = getattr(package, original, None) or importlib.import_module(f"{module}.{original}")
        assert getattr(tunebook, name) is found, name


def test_public_names_can_be_listed_imported_with_a_star_and_shown_by_help():
    code = """
import pydoc, tunebook
assert "Space" not in vars(tunebook)
public = {name for name in dir(tunebook) if not name.startswith("_")}
namespace = {}
exec("from tunebook import *", namespace)
assert public <= {*namespace}
assert "class Space" in pydoc.render_doc(tunebook, renderer=pydoc.plaintext)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'tunebook' has no attribute 'tuneable'"):
        tunebook.tuneable  # noqa: B018 - the access is the test


def test_importing_costs_less_than_importing_asyncio():
    code = "import time; start = time.process_time_ns(); import {}; print(time.process_time_ns() - start)"

    def cpu_ns(module):
        run = subprocess.run([sys.executable, "-c", code.format(module)], capture_output=True, text=True, check=True)
        return int(run.stdout)

    pairs = [(cpu_ns("tunebook"), cpu_ns("asyncio")) for _ in range(3)]
    assert min(ours for ours, _ in pairs) <= min(theirs for _, theirs in pairs)


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


def test_pyproject_names_files_that_exist():
    root = Path(__file__).parents[2]
    named = re.findall(r"(?:[\w*]+/)+[\w*]+\.py\b", (root / "pyproject.toml").read_text())
    assert named
    places = (root, root / "src" / "tunebook", root / "src")
    assert [name for name in named if not any([*place.glob(name)] for place in places)] == []


def test_no_two_modules_of_tests_share_a_name():
    """Pytest imports a test module by its bare name: a second `conftest.py` ends the collection on some machines."""
    names = Counter(path.name for path in Path(__file__).parents[1].rglob("*.py"))
    assert [name for name, times in names.items() if times > 1 and name != "__init__.py"] == []


# A wait of a second or more that ends after a number of seconds, which a busy machine may need for anything.
LIMITED = re.compile(r"(?:\.(?:wait|join|result|wait_for_background)\(|\btimeout=)[1-9][0-9]*(?:\.[0-9]+)?\s*[,)]")


def test_waits_of_tests_have_the_one_limit_of_all_tests():
    tests = sorted(Path(__file__).parents[1].rglob("*.py"))
    limited = {path.name: LIMITED.findall(path.read_text()) for path in tests if path != Path(__file__)}
    limited.pop("servers.py")  # each try to reach a server that starts has a limit of its own, and is repeated
    assert {name: found for name, found in limited.items() if found} == {}, "write HANG_S of tests/limits.py"
    assert LIMITED.search("done.wait(30)")
    assert LIMITED.search("subprocess.run(command, check=True, timeout=60)")
    assert not LIMITED.search("done.wait(0) or done.wait(HANG_S)")
