"""The map of the package: imports go down the folders, and never round in a circle."""

from __future__ import annotations

import ast
import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import tunebook

ROOT = Path(tunebook.__file__).parent

# A module imports from its own folder and from the folders below it. This is the picture in CONTRIBUTING.md.
FOLDERS = {
    "_cli/_startup": "runs at the start of the Python processes under `tunebook run`",
    "_cli": "the `tunebook` command: one file per verb",
    "adapters": "one file per framework; nothing else imports a framework",
    "adapters/_jax": "parts of the JAX adapter",
    "adapters/_triton": "parts of the Triton adapter",
    "adapters/_cuda": "device timers and graphs for CUDA",
    "adapters/_source": "kernels given as source text: compilers, builds per configuration, the build cache",
    "fleet": "many machines: public names",
    "fleet/_farm": "tunes a recording on a cluster",
    "fleet/_agreement": "one configuration per problem for all ranks of a job",
    "_report": "the HTML report, its charts, and metrics",
    "testing": "the shipped test kit: contracts and pretend kernels",
    "_api": "@tunable, Executor, explain, TuneCache",
    "formats": "files of other tools; bundles that carry a book",
    "_hotpath": "the generated function that a warm call runs; its C accelerator",
    "_selection": "the tiers in order, each tier, single flight, recordings, which entries are trusted",
    "_tuning": "one tuning job: plan, run, search, re-verify, progress",
    "_measure": "times a run; restores arguments; worker processes; device lock; disturbances; compiles in parallel",
    "search": "search strategies, warm start, learned heuristics",
    "_kernel": "Kernel, Invocation, AutotunePolicy, output checks",
    "_statistics": "eliminates slow candidates; picks the winner; objectives; rooflines",
    "_keys": "call keys, their text, fast keys, buckets",
    "_space": "spaces of configurations, enumeration, choices",
    "_memo": "memory tier, overlays, and when memoised answers are invalid",
    "_code": "source and checksum of a kernel's code",
    "stores": "storage engines, one file each",
    "_arrays": "arrays of any library: describe, copy, restore, time; device fingerprints",
    "_base": "errors, vocabulary, environment variables, record format, configuration codec",
}
ORDER = list(FOLDERS)

# Imports by name, at run time. Each points up, or sideways, and each is wanted: the lower side must not depend on it.
BY_STRING = {
    ("_arrays/library", "adapters"): "an adapter is loaded when the first array of its library appears",
    ("_selection/selector", "_cli"): "a process of `tunebook run` reports to it",
    ("_selection/recording", "_arrays"): "the name of a class in saved recordings; not imported",
    ("_tuning/job", "_report"): "a notebook shows a result as a report",
    ("fleet/_agreement/agree", "adapters/_jax"): 'agree("jax") works without the adapter being imported first',
    ("adapters/_triton/remote_runs", "adapters/_triton"): "a spawned process loads this module by name",
    ("adapters/_triton/launch_recorder", "adapters/_triton"): "a recording names the module that finds its kernels",
    ("_cli/demo", "_cli"): "a second process loads this module by name",
    ("formats/__init__", "formats"): "a format is loaded when it is named",
    ("formats/_triton", "adapters/_triton"): "the name of a class in stored configurations; not imported",
    ("_cli/__init__", "_cli"): "a verb is loaded when it is called",
}


def name_of(path):
    return path.relative_to(ROOT).with_suffix("").as_posix()


MODULES = {name_of(path): path for path in sorted([*ROOT.rglob("*.py"), *ROOT.rglob("*.pyi")])}


def folder_of(name):
    return name.rpartition("/")[0]


def imports_of(path):
    """The modules of tunebook that a module imports: at the top, late in a function, or for types alone."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "tunebook":
            base = node.module.replace(".", "/").removeprefix("tunebook").removeprefix("/")
            for alias in node.names:
                inner = f"{base}/{alias.name}".removeprefix("/")
                package = f"{base}/__init__".removeprefix("/")
                yield next(name for name in (inner, base, package) if name in MODULES)
        elif isinstance(node, ast.Import):
            assert not any(a.name.startswith("tunebook") for a in node.names), f"{path}: write `from tunebook...`"


def may_import(me, other):
    if me == "__init__" or folder_of(me) == folder_of(other):
        return True
    if other == "__init__":
        return me == "_cli/__init__"  # the version
    return ORDER.index(folder_of(other)) > ORDER.index(folder_of(me))


def circle_in(graph):
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return None


def test_the_top_of_the_package_is_a_table_of_contents():
    inside = {path.name for path in ROOT.iterdir()} - {"__pycache__"}
    assert {name for name in inside if (ROOT / name).is_file()} == {"__init__.py", "__main__.py", "py.typed"}
    assert {folder_of(name) for name in MODULES} - {""} <= {*FOLDERS}, "a folder is missing in FOLDERS"


def test_the_map_in_contributing_is_this_one():
    page = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()
    width = max(map(len, FOLDERS)) + 2
    assert "\n".join(f" {folder:<{width}}{purpose}" for folder, purpose in FOLDERS.items()) in page


@pytest.mark.parametrize("me", set(MODULES) - {"__main__"}, ids=str)
def test_imports_go_down_the_folders(me):
    wrong = [other for other in imports_of(MODULES[me]) if not may_import(me, other)]
    assert wrong == [], f"{me} may import only from folders below its own"


def test_no_modules_import_each_other_in_a_circle():
    assert circle_in({name: {*imports_of(path)} - {name} for name, path in MODULES.items()}) is None


def test_the_rule_sees_a_circle_of_three_and_an_import_upwards():
    assert circle_in({"a": {"b"}, "b": {"c"}, "c": {"a"}}) is not None
    assert not may_import("_base/errors", "_keys/buckets")
    assert may_import("_keys/buckets", "_base/errors")


def test_imports_by_string_are_listed():
    found = set()
    for me, path in MODULES.items():
        for text in (n.value for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Constant)):
            if isinstance(text, str) and not re.search(r"\s", text.strip()):
                named = re.match(r"tunebook((?:\.\w+)+)", text)
                target = named and named[1][1:].replace(".", "/").partition(":")[0]
                while target and not (ROOT / target).is_dir():
                    target = folder_of(target)
                if target:
                    found.add((me, target))
    assert found <= {*BY_STRING}
