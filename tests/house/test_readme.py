"""The code and the commands of the README and of the docs run as they are printed."""

from __future__ import annotations

import importlib
import importlib.util
import re
from pathlib import Path

import pytest
from doc_pages import PAGES, README, ROOT, commands, fences, run, script_of, write_files

# The code of these is run elsewhere: it needs a server, or is run in parts.
ELSEWHERE = {
    "agreement": "fleet/test_agreement_page.py",
    "metrics": "_report/test_report_docs.py",
    "report": "_report/test_report_docs.py",
    "shared-book": "stores/test_shared_page.py",
}
# Pages whose code needs a package, or a device, that a machine may not have.
NEEDED = {
    "cupy": "cupy", "jax": "jax", "model": "transformers", "numba": "numba", "opencl": "pyopencl", "torch": "torch",
    "triton": "triton",
}  # fmt: skip
# Files that a page presumes.
PRESUMED = {
    "environment": {
        "train.py": "import tunebook as tb\n"
        "@tb.tunable(space=tb.Space(block_m=[32, 64], block_n=[32, 64]))\n"
        "def matmul(n, *, config): return n\n"
        "@tb.tunable(space=tb.Space(rows=[2, 4]))\n"
        "def softmax(n, *, config): return n\n"
        "assert matmul.config_for(8).block_m == 64\n"
        "softmax(8)\n"
    },
    "events": {
        "train.py": "import tunebook as tb\n"
        "@tb.tunable(space=tb.Space(rows=[2, 4]), heuristic={'rows': 2}, name='softmax')\n"
        "def softmax(n, *, config): return n\n"
        "softmax(8)\n"
    },
    "ship-defaults": {
        "kernels/attention.py": "import tunebook as tb\n"
        "@tb.tunable(space=tb.Space(rows=[2, 4]), heuristic={'rows': 2})\n"
        "def attention(n, *, config): return n\n"
        "if __name__ == '__main__': attention(8)\n"
    },
}
# Commands that are not run here, by page and beginning, and why.
NOT_RUN = {
    ("README", "python3 -m venv"): "the tests run in an environment that has it installed",
    ("README", "pip install"): "as above",
    ("index", "pip install"): "as above",
    ("tutorial", "pip install"): "as above",
    ("model", "pip install"): "as above",
    ("gallery", "python examples/"): "tests/house/test_gallery.py runs each in a process of its own",
    ("cli", "tunebook import --format triton"): "needs a cache of Triton: tests/formats read recorded ones",
    ("cli", "tunebook export --format vllm"): "needs entries of fused_moe: tests/formats write such tables",
    ("fleet-tuning", "tunebook tune calls.json --over"): "needs a cluster: tests/fleet/test_farm.py starts real ones",
    ("fleet-tuning", "mpiexec"): "the same",
    ("formats", "tunebook import --format vllm"): "needs vLLM's files: tests/formats read recorded ones",
    ("formats", "tunebook export --format vllm moe_configs --kernel fused_moe"): "needs their entries",
    ("no-stall", "tunebook run"): "needs a GPU and a program: tests/adapters/test_triton_live.py runs one without",
    ("report", "tunebook report"): "opens a browser: tests/_report/test_report_page.py drives one",
    ("triton", "tunebook run"): "needs a GPU and a program: tests/_cli/test_run.py runs one without",
    ("triton", "tunebook ci"): "needs the sources of a released package: tests/_cli/test_ci.py",
    ("tune-offline", "tunebook tune calls.json --target"): "needs kernels of Triton: test_triton_recording.py",
    ("without-a-gpu", "TUNEBOOK_HOME=tests/book pytest"): "needs a project: tests/_cli/test_pytest_plugin.py makes one",
}  # fmt: skip


def skipped(page, command):
    return any(name == page.stem and command.startswith(start) for name, start in NOT_RUN)


def need(page):
    package = NEEDED.get(page.stem)
    if package and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    if page.stem == "cupy" and not Path("/proc/driver/nvidia/version").exists():
        pytest.skip("there is no NVIDIA GPU")


@pytest.mark.parametrize(("page", "test"), ELSEWHERE.items())
def test_the_code_of_the_other_pages_is_run_elsewhere(page, test):
    assert f"{page}" in (ROOT / "tests" / test).read_text()


def test_every_exception_is_of_a_command_that_is_shown():
    shown = {page.stem: commands(page) for page in (README, *PAGES)}
    assert [(n, s) for n, s in NOT_RUN if not any(line.startswith(s) for line in shown[n])] == []


def to_run(page):
    """Return the commands of a page, after the one that runs the code which the page puts in no file."""
    code = page.stem not in ELSEWHERE and any(f.language == "python" and not f.title for f in fences(page))
    return [f"python {script_of(page)}"] * code + [line for line in commands(page) if not skipped(page, line)]


@pytest.mark.parametrize("page", [page for page in (README, *PAGES) if to_run(page)], ids=lambda page: page.stem)
def test_the_code_and_the_commands_of_a_page_run_as_they_are_printed(page, tmp_path, tmp_path_factory):
    need(page)
    for name, text in PRESUMED.get(page.stem, {}).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    write_files(page, tmp_path)
    done = run("\n".join(["set -x", *to_run(page)]), tmp_path, tmp_path_factory.mktemp("tools"))
    assert done.returncode == 0, done.stderr
    missing = labels(page) - {line.split()[0] for line in f"{done.stdout}{done.stderr}".splitlines() if line.strip()}
    assert not missing, f"shown, but not printed: {missing}\n{done.stdout}"


def labels(page):
    """Return the first words of the lines of `explain` that a page shows, except those that depend on luck."""
    shown = [fence.text for fence in fences(page) if fence.language == "text" and "\n  winner  " in fence.text]
    words = {word for text in shown for word in re.findall(r"^  (\w[\w-]*)  ", text, re.MULTILINE)}
    return words - {"as", "but", "disturbed", "spread"} if page.stem in {"README", "tutorial"} else set()


@pytest.mark.parametrize("page", [README, *PAGES], ids=lambda page: page.stem)
def test_comments_in_code_are_not_cut_off_by_the_page(page):
    code = [line for fence in fences(page) if fence.language == "python" for line in fence.text.splitlines()]
    assert [line for line in code if re.search(r"(^|\s)# ", line) and len(line) > 85] == []


def test_the_numbers_match_the_last_bench(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "bench")
    tables = importlib.import_module("tables")
    measured = tables.read()
    assert tables.split(tables.README)[1] == tables.for_readme(measured)
    assert tables.split(tables.PAGE)[1] == tables.for_page(measured)
    assert (ROOT / "bench" / "results" / "summary.md").read_text() == tables.summary(measured)


def test_the_readme_shows_five_numbers(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "bench")
    tables = importlib.import_module("tables")
    assert len(tables.split(tables.README)[1].splitlines()) == 2 + 5


def test_the_first_example_is_short_and_the_readme_fits_a_few_screens():
    first = next(fence for fence in fences(README) if fence.language == "python")
    assert len(first.text.strip().splitlines()) <= 21
    assert len(README.read_text().splitlines()) <= 130


def test_every_link_and_picture_of_the_readme_is_there():
    targets = re.findall(r"\]\((?!https?:)([^)#]+)", README.read_text())
    assert len(targets) > 20
    assert [target for target in targets if not (ROOT / target).exists()] == []
