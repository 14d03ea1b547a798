"""The page about shipping, followed to the letter: a wheel with a pack serves its winners where nothing is tuned."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from functools import cache
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path

import pytest

import tunebook

pytest.importorskip("numpy")
# Not imported: before Python 3.12, setuptools fails to load after an import of pip, and the compiler of torch loads it.
if not any(distributions(name="pip")):
    pytest.skip("pip is not installed", allow_module_level=True)

PAGE = (Path(__file__).parents[2] / "docs" / "ship-defaults.md").read_text()
(CODE,) = re.findall(r"```python\n(# mykernels/ops.py\n.*?)```", PAGE, re.DOTALL)
PROJECTS = re.findall(r"```toml\n(\[build-system\].*?)```", PAGE, re.DOTALL)
(PACK_LINE,) = re.findall(r"^tunebook (pack mykernels\S+) --kernel '(\S+)' --import (\S+)$", PAGE, re.MULTILINE)
PACK = "mykernels/__tunebook__/h200.db"

# The clock of this machine must not choose the winner that the tests look for.
TUNE = """
from dataclasses import replace
import numpy as np, tunebook as tb, mykernels.ops as ops
for n in (10, 100, 1000):
    tb.tune(ops.scan, np.arange(n), progress=False)
book = ops.scan.selector.persistent
for record in list(book.store.items()):
    book.write(record.replace(head=replace(record.head, config=book.encode(tb.Config(step=4)))))
"""
SERVE = """
import json, sys, warnings, numpy as np
numpy_version, sys.argv = sys.argv[1], sys.argv[:1]
np.__version__ = numpy_version or np.__version__
import mykernels.ops as ops
warnings.simplefilter("always")
with warnings.catch_warnings(record=True) as caught:
    served = ops.scan.config_for(np.arange(100)).step
explained = ops.scan.explain(np.arange(100))
json.dump({
    "file": ops.__file__, "served": served, "explained": str(explained), "shipped_in": explained.shipped_in,
    "said": [str(w.message) for w in caught],
    "other size": ops.scan.config_for(np.arange(7)).step,
}, sys.stdout)
"""


def run(*line, cwd, path=(), **variables):
    """Run a command in a process of its own, which finds tunebook, and nothing of this project's."""
    source = str(Path(tunebook.__path__[0]).parent)
    ours = ("TUNEBOOK", "PIP", "PYTHON")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    environment |= {"PYTHONPATH": os.pathsep.join([*map(str, path), source]), **variables}
    command = [sys.executable, *line]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def pip(*words, cwd):
    return run("-m", "pip", "--disable-pip-version-check", "--no-input", *words, cwd=cwd)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """Return the folder of the library, with its pack."""
    root = tmp_path_factory.mktemp("library")
    (root / "mykernels").mkdir()
    (root / "mykernels" / "__init__.py").touch()
    (root / "mykernels" / "ops.py").write_text(CODE)
    (root / ".gitignore").write_text("*.db\n")
    book = {"TUNEBOOK_HOME": str(root / "book")}
    run("-c", TUNE, cwd=root, **book)
    verb, kernels, module = PACK_LINE
    said = run("-m", "tunebook", *verb.split(), "--kernel", kernels, "--import", module, cwd=root, **book)
    assert said.startswith(f"wrote 3 entries to {PACK}")
    return root


@pytest.fixture(scope="module")
def built(library):
    """Return a function that builds the wheel with a backend, as the page says."""

    @cache
    def build(backend):
        if find_spec(backend) is None:
            pytest.skip(f"{backend} is not installed")
        (project,) = (text for text in PROJECTS if f'"{backend}.' in text)
        (library / "pyproject.toml").write_text(project)
        out = library / backend
        pip("wheel", "--no-build-isolation", "--no-deps", "--no-index", "--wheel-dir", str(out), ".", cwd=library)
        (wheel,) = out.glob("*.whl")
        return wheel

    return build


@pytest.fixture(scope="module")
def site(built, tmp_path_factory):
    """Return a folder that the wheel is installed in."""
    folder = tmp_path_factory.mktemp("site")
    wheel = str(built("hatchling"))
    pip("install", "--target", str(folder), "--no-deps", "--no-index", "--no-compile", wheel, cwd=folder)
    return folder


def test_other_tests_may_import_setuptools_after_this_file():
    if find_spec("setuptools") is None:
        pytest.skip("setuptools is not installed")
    run("-c", f"import {Path(__file__).stem}, setuptools", cwd=Path(__file__).parent)


@pytest.mark.parametrize("backend", ["hatchling", "setuptools"])
def test_the_lines_for_each_backend_put_the_pack_into_the_wheel(built, backend):
    with zipfile.ZipFile(built(backend)) as wheel:
        files = [name for name in wheel.namelist() if ".dist-info/" not in name]
    assert sorted(files) == ["mykernels/__init__.py", PACK, "mykernels/ops.py"]


@pytest.mark.parametrize("numpy_version", ["", "99.0"], ids=["same versions", "other versions"])
def test_an_installed_wheel_serves_its_winners_where_nothing_is_tuned(site, tmp_path, numpy_version):
    home = tmp_path / "home"
    home.mkdir()
    variables = {"HOME": str(home), "TUNEBOOK_MODE": "frozen", "XDG_CACHE_HOME": "", "XDG_DATA_HOME": ""}
    found = json.loads(run("-c", SERVE, numpy_version, cwd=tmp_path, path=[site], **variables))
    assert found["file"] == str(site / "mykernels" / "ops.py")
    assert found["served"] == 4
    assert found["other size"] == 1, "the heuristic's"
    assert found["shipped_in"] == str(site / PACK)
    assert f"shipped in  {site / PACK}" in found["explained"]
    assert ("trusted     as 'versions': it was made under" in found["explained"]) is bool(numpy_version)
    assert len(found["said"]) == bool(numpy_version)
    assert list(home.iterdir()) == [], "nothing is written"
