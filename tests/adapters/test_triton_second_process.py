"""The work that a process does before its first launch of a Triton kernel whose configuration is known."""

# ruff: noqa: N803 - constexprs are written in capitals in Triton

from __future__ import annotations

import threading

import pytest

triton = pytest.importorskip("triton", reason="triton is not installed")
torch = pytest.importorskip("torch", reason="torch is not installed")

import triton.language as tl  # noqa: E402 - after the check that it is there
from fake_gpu import FakeGpu, installed  # noqa: E402 - as above

from tunebook._code.checksum import code_checksum, read_code  # noqa: E402 - as above
from tunebook.adapters._triton import kept_checksum as kept  # noqa: E402 - as above
from tunebook.adapters._triton import kernel as kernels  # noqa: E402 - as above
from tunebook.adapters._triton import key_ahead  # noqa: E402 - as above
from tunebook.adapters.triton import autotune  # noqa: E402 - as above

FACTOR = tl.constexpr(2)
CONFIGS = [triton.Config({"BLOCK": size}, num_warps=4) for size in (64, 128)]


@triton.jit
def scale(x_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + at, tl.load(x_ptr + at, at < n) * FACTOR, at < n)


@triton.jit
def shift(x_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + at, tl.load(x_ptr + at, at < n) + FACTOR, at < n)


@pytest.fixture(autouse=True)
def gpu(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    with installed(FakeGpu(lambda facts: facts["BLOCK"] * 1e-6), scale, shift) as fake:
        yield fake


@pytest.fixture
def worked_out(monkeypatch):
    """The functions whose checksums were worked out."""
    functions = []

    def noted(function, **options):
        functions.append(function)
        return read_code(function, **options)

    monkeypatch.setattr(kernels, "read_code", noted)
    return functions


def checksum(jitted, **options):
    return autotune(CONFIGS, key=["n"], **options)(jitted).kernel.code_checksum


def test_a_checksum_is_worked_out_once_per_code_and_then_read(worked_out):
    first = checksum(scale)
    assert first == code_checksum(scale.fn, version="0")
    assert [checksum(scale), checksum(scale)] == [first, first]
    assert worked_out == [scale.fn]


@pytest.mark.parametrize("other", [lambda: checksum(shift), lambda: checksum(scale, version="1")])
def test_other_code_and_another_version_have_checksums_of_their_own(worked_out, other):
    assert checksum(scale) != other()
    assert len(worked_out) == 2


def test_a_changed_constant_changes_the_checksum(worked_out, monkeypatch):
    def another_process():  # Triton keeps the key of a function for the life of a process
        return triton.jit(scale.fn)

    first = checksum(another_process())
    monkeypatch.setitem(scale.fn.__globals__, "FACTOR", tl.constexpr(3))
    assert checksum(another_process()) != first
    assert len(worked_out) == 2


@pytest.mark.parametrize("text", ["", "half of a che", "<html>not found</html>", "\x00\x01" * 20])
def test_a_broken_file_is_not_believed(worked_out, tmp_path, text):
    first = checksum(scale)
    (file,) = tmp_path.rglob(kept._FILE)
    file.write_text(text)
    assert checksum(scale) == first
    assert len(worked_out) == 2
    assert file.read_text() == f"{first} triton"


def test_the_packages_that_the_code_uses_are_kept_with_the_checksum(worked_out):
    first, second = (autotune(CONFIGS, key=["n"])(scale).kernel.code_facts for _ in range(2))
    assert first == second == (first.checksum, {"triton": triton.__version__})
    assert worked_out == [scale.fn]


def test_a_cache_that_cannot_be_written_costs_no_launch(worked_out, monkeypatch):
    def refuses(_key):
        raise PermissionError("read-only")

    monkeypatch.setattr(kept, "get_cache_manager", refuses)
    assert checksum(scale) == code_checksum(scale.fn, version="0")


def test_heuristics_are_part_of_the_checksum_each_time(worked_out):
    def with_heuristic(value):
        return triton.heuristics({"BLOCK": lambda _args: value})(triton.jit(scale.fn))

    assert checksum(with_heuristic(64)) != checksum(with_heuristic(128))


def test_tritons_key_is_worked_out_once_and_a_launch_waits_for_it(monkeypatch, gpu):
    may_go_on, threads = threading.Event(), []

    class Key:
        """Stands for Triton's function, which keeps its result."""

        def __call__(self):
            threads.append(threading.current_thread().name)
            may_go_on.wait()
            return "key"

        def cache_info(self):
            return triton.runtime.cache.triton_key.cache_info()._replace(currsize=0)

    monkeypatch.setattr(key_ahead, "triton_key", Key())
    monkeypatch.setattr(key_ahead, "_begun", [])
    key_ahead.begin()
    key_ahead.begin()
    waiting = threading.Thread(target=key_ahead.finish)
    waiting.start()
    assert waiting.is_alive()
    may_go_on.set()
    waiting.join()
    assert threads == ["tunebook-triton-key"]
