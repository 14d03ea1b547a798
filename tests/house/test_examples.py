"""The examples run as they stand, and every configuration that they try computes the right thing."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import tunebook as tb
from tunebook._kernel.output_check import difference

EXAMPLES = Path(__file__).parents[2] / "examples"

# Sizes of every kind: whole tiles, remainders, smaller than a tile, one row, one column.
OPERANDS = {
    "matmul": [(16, 64, 8), (33, 70, 600), (3, 5, 2), (1, 129, 17), (40, 1, 9)],
    "convolution": [(32, 80, 3), (20, 1100, 5), (7, 7, 7), (5, 9, 1)],
    "transpose": [(64, 64), (70, 33), (1, 100), (100, 1), (3, 2)],
    "numba_stencil": [(20, 600), (3, 3), (70, 5)],
}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """One book for all tests of this file, so that every library is compiled once."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture
def example(home, monkeypatch):
    monkeypatch.setenv("TUNEBOOK_HOME", str(home))
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module


def kernel_of(module):
    (kernel,) = (value for value in vars(module).values() if hasattr(value, "explain"))
    return kernel


def load(example, name):
    if name == "numba_stencil":
        pytest.importorskip("numba")
    return example(name)


def test_the_demo_shows_a_second_process_finding_the_answers(home):
    command = [sys.executable, "-W", "error", str(EXAMPLES / "demo.py"), "--home", str(home)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("answered by  the persistent tier, after 0 tunings") == 2
    for shown in ("chosen", "heuristic", "winner", "runner-up", "first call", "later calls"):
        assert shown in done.stdout
    assert "matmul.matmul" in done.stderr, "the progress bar"
    command = done.stdout.splitlines()[-1].partition("More of it: ")[2]
    assert [Path(word).absolute() for word in command.split()] == [Path(sys.executable), EXAMPLES / "matmul.py"]


def test_the_ranking_of_the_demo_is_in_the_order_of_times_and_fits_into_80_columns(example, capsys):
    names = [f"ROWS={rows} VECTORS=4 LANES=16 PACK=False" for rows in range(1, 10)]
    configs = [tb.Config(ROWS=rows, VECTORS=4, LANES=16, PACK=False) for rows in range(1, 10)]
    # As `Tuned.ranking` has them: finalists first, and then the candidates that left the race.
    seconds = [3e-4, 9e-4, 2.9e-4, 4e-4, 5e-4, 6e-4, 7e-4, 8e-4, 2.75e-2]
    tuned = SimpleNamespace(ranking=list(zip(configs, seconds, strict=True)))
    times = example("showing").times_of(tuned)
    example("demo").show_ranking(times, names[0], names[6])
    rows = capsys.readouterr().out.splitlines()
    assert [row.split()[0] for row in rows] == ["1", "2", "3", "4", "5", "6", "...", "9"]
    assert rows[0].endswith("ROWS=3 VECTORS=4 LANES=16 PACK=False  eliminated")
    assert rows[1].split()[1:5] == ["300", "us", "1", "x"]
    assert rows[1].endswith("chosen")
    assert rows[5].endswith("heuristic")
    assert max(map(len, rows)) <= 80


@pytest.mark.parametrize("name", OPERANDS)
def test_configurations_agree_with_numpy_on_sizes_of_every_kind(example, name):
    module = load(example, name)
    kernel = kernel_of(module)
    reference = {"matmul": np.matmul, "transpose": np.transpose}.get(name) or module.reference
    for size in OPERANDS[name]:
        arguments = module.operands(*size)
        expected = reference(*arguments)
        for config in module.space:
            wrong = difference(kernel(*arguments, config=config), expected)
            assert wrong is None, f"{size} {config}: {wrong}"


@pytest.mark.parametrize("name", OPERANDS)
def test_an_example_prints_its_table_and_explains_its_choice(example, name, capsys):
    module = load(example, name)
    module.main(OPERANDS[name][:2])
    printed = capsys.readouterr().out
    for shown in ("best", "default", "worst", " x ", "Why", "winner", "From now on"):
        assert shown in printed
    kernel, chosen = kernel_of(module), printed.splitlines()[-1].partition(" runs with ")[2].partition(" for this")[0]
    assert chosen == example("showing").spelled(kernel.config_for(*module.operands(*OPERANDS[name][0])))
    assert kernel.explain(*module.operands(*OPERANDS[name][0])).selection.source == "memory"


def test_there_are_enough_configurations_and_the_default_is_one_of_them(example):
    matmul = example("matmul")
    assert len(matmul.space) >= 48
    assert len(matmul.space) < matmul.space.size, "constrained"
    for name in ("matmul", "convolution", "transpose"):
        assert example(name).default in example(name).space


@pytest.mark.parametrize("name", ["matmul", "convolution", "transpose"])
def test_arrays_that_c_would_misread_are_refused(example, name):
    module = example(name)
    arguments = [array.astype(np.float64) for array in module.operands(*OPERANDS[name][0])]
    with pytest.raises(ValueError, match=r"cannot .* float64"):
        kernel_of(module)(*arguments, config=module.default)
    transposed = [array.T for array in module.operands(*OPERANDS[name][0])][:1] * len(arguments)
    with pytest.raises(ValueError, match=r"cannot|not C-contiguous"):
        kernel_of(module)(*transposed, config=module.default)


SECOND = """
import sys
sys.path.insert(0, sys.argv[1])
import convolution
convolution.library._run_compiler = None  # would fail if it were called
events = []
convolution.convolve.selector.listen(lambda event, **facts: events.append((event, facts.get("level"))))
convolution.convolve(*convolution.operands(30, 40, 3))
print(events)
"""


def test_a_second_process_neither_tunes_nor_compiles(example, home):
    convolution = example("convolution")
    tb.tune(convolution.convolve, *convolution.operands(30, 40, 3))
    done = subprocess.run([sys.executable, "-c", SECOND, EXAMPLES], capture_output=True, text=True, check=True)
    assert done.stdout == "[('cache_hit', 'persistent')]\n"


def test_implementations_are_measured_once_by_all_threads_of_all_processes(tmp_path):
    def run():
        command = [sys.executable, "-W", "error", str(EXAMPLES / "implementations.py")]
        environment = {**os.environ, "TMPDIR": str(tmp_path), "TUNEBOOK_HOME": str(tmp_path / "book")}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("fastest") == 4
        return done.stdout

    assert "4 measurements for 4 kinds of calls" in run()
    assert "0 measurements for 4 kinds of calls" in run()
    assert not (tmp_path / "book").exists(), "the user's own book is left alone"
