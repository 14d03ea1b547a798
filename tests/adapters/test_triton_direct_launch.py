"""Launches that find their program without Triton: the same program and the same arguments as Triton's own launch."""

# ruff: noqa: N803 - constexprs are written in capitals in Triton

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

triton = pytest.importorskip("triton", reason="triton is not installed")
torch = pytest.importorskip("torch", reason="torch is not installed")

import triton.language as tl  # noqa: E402 - after the check that it is there
from fake_gpu import FakeGpu, installed  # noqa: E402 - as above
from hypothesis import HealthCheck, given, settings  # noqa: E402 - as above
from hypothesis import strategies as st  # noqa: E402 - as above
from triton import knobs  # noqa: E402 - as above
from triton.runtime import JITFunction  # noqa: E402 - as above

from tunebook.adapters._triton import direct_launch  # noqa: E402 - as above
from tunebook.adapters._triton.candidate import LaunchConfig  # noqa: E402 - as above
from tunebook.adapters._triton.direct_launch import DirectLaunches  # noqa: E402 - as above

pytestmark = pytest.mark.usefixtures("compiled_once")
FACTOR = tl.constexpr(2)


@triton.jit
def scale(x_ptr, out_ptr, n, step, factor, other, COUNT: tl.constexpr, BLOCK: tl.constexpr, offset=0):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, at < n, 0.0)
    tl.store(out_ptr + at, x * factor * COUNT, at < n)


@triton.jit
def doubled(x_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + at, tl.load(x_ptr + at, at < n) * FACTOR, at < n)


@triton.jit
def twice(x):
    return x * 2


@triton.jit
def mapped(x_ptr, n, BLOCK: tl.constexpr, FUNCTION: tl.constexpr = twice):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + at, FUNCTION(tl.load(x_ptr + at, at < n)), at < n)


CONFIG = LaunchConfig(triton.Config({"BLOCK": 64}, num_warps=1))
FUNCTIONS = (scale, doubled, mapped)


class RecordingGpu(FakeGpu):
    """Keeps what each launch is told."""

    def __init__(self):
        super().__init__(lambda _facts: 1e-6)
        self.told = []

    def _launcher(self, src, metadata):
        theirs = super()._launcher(src, metadata)

        def launch(*told):
            *where, function, packed, metadata, entered, _left = told[:9]
            if entered is not None:  # as Triton's launcher does
                entered(metadata)
            self.told.append((where, function, packed, [(type(each), each) for each in told[9:]]))
            return theirs(*told)

        return launch


@pytest.fixture
def gpu():
    fake = RecordingGpu()
    with installed(fake, *FUNCTIONS):
        yield fake


def asked(function):
    """Return a list that grows with each launch for which Triton itself looks for the program."""
    found = []
    (device, (cache, keys, target, backend, binder)) = next(iter(function.device_caches.items()))

    def counted(*args, **kwargs):
        found.append(args)
        return binder(*args, **kwargs)

    function.device_caches[device] = cache, keys, target, backend, counted
    return found


@pytest.fixture
def launched(gpu):
    """Return a function that launches `doubled`, of which Triton has found the program."""
    direct, x = DirectLaunches(doubled), torch.zeros(64)
    launch = lambda: direct.run(CONFIG, (1,), (x, 64), {})
    launch()
    launch.asked = asked(doubled)
    return launch


# ---------------------------------------------------------------------------------------------------- the same launch

DTYPES = (torch.float16, torch.float32, torch.int64)
INTEGERS = st.sampled_from([0, 1, 2, 15, 16, 17, -16, 2**31 - 1, 2**31, -(2**31) - 1, 2**62, 2**63, 2**64 - 1])
SCALARS = st.one_of(INTEGERS, st.booleans(), st.floats(allow_nan=False), st.none())


@st.composite
def tensors(draw):
    return torch.zeros(80, dtype=draw(st.sampled_from(DTYPES)))[draw(st.sampled_from([0, 1, 2, 8])) :]


ARGUMENTS = st.fixed_dictionaries(
    {
        "x_ptr": tensors(),
        "out_ptr": tensors() | st.builds(torch.nn.Parameter, st.just(torch.zeros(80))),
        "n": INTEGERS,
        "step": SCALARS,
        "factor": st.floats(allow_nan=False) | st.integers(1, 64),
        "other": SCALARS | tensors(),
        "COUNT": st.sampled_from([1, 2, True, 1.0, 0.5]),
    },
    optional={"offset": SCALARS},
)
NAMES = st.sets(st.sampled_from(scale.arg_names), min_size=1, max_size=2)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(one=ARGUMENTS, other=ARGUMENTS, changed=NAMES, positional=st.integers(0, 7), by_grid=st.booleans())
def test_every_launch_is_the_one_that_triton_would_make(gpu, one, other, changed, positional, by_grid):
    calls = [one, {**one, **{name: other[name] for name in changed if name in other}}]
    direct, metas = DirectLaunches(scale), []

    def grid(meta):
        metas.append({name: (type(value), value) for name, value in meta.items()})
        return 3, 2

    for named in calls * 2:
        names = [name for name in scale.arg_names if name in named][:positional]
        args, kwargs = tuple(named[name] for name in names), {n: v for n, v in named.items() if n not in names}
        gpu.told.clear()
        metas.clear()
        shown = [
            direct.run(CONFIG, grid if by_grid else (3,), args, kwargs),
            scale.run(*args, grid=grid if by_grid else (3,), warmup=False, **kwargs, **CONFIG.meta),
        ]
        assert shown[0] is shown[1]
        assert metas[:1] == metas[1:]
        (ours, theirs) = gpu.told
        # Tensors are compared by identity, and the rest by class and value.
        same = [
            a is b if isinstance(a, torch.Tensor) else (kind, a) == (other, b)
            for (kind, a), (other, b) in zip(ours[3], theirs[3], strict=True)
        ]
        assert ours[:3] == theirs[:3]
        assert all(same)


def test_values_that_a_grid_writes_are_launched_and_a_stream_that_it_changes_is_for_later_launches(gpu):
    direct, x = DirectLaunches(doubled), torch.zeros(64)

    def grid(meta):
        meta["n"], gpu.stream_handle = 32, gpu.stream_handle + 1
        return (1,)

    for _ in range(2):
        direct.run(CONFIG, grid, (x, 64), {})
    doubled.run(x, 64, grid=grid, warmup=False, **CONFIG.meta)
    assert [told[0][3] for told in gpu.told] == [0, 1, 2]
    assert [told[3][1] for told in gpu.told] == [(int, 32)] * 3


def test_a_default_and_an_argument_of_another_class_have_programs_of_their_own(gpu):
    direct, x = DirectLaunches(scale), torch.zeros(64)
    args = x, x, 64, 16, 2.0, None, 2
    assert direct.run(CONFIG, (1,), args, {}) is not direct.run(CONFIG, (1,), args, {"offset": False})


def test_launches_of_a_known_kind_do_not_ask_triton(launched):
    launched()
    assert launched.asked == []


# ------------------------------------------------------------------------------------ whatever changes what Triton does


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_a_hook_of_launches_is_called_and_then_forgotten(launched, name):
    told = []
    chain = getattr(knobs.runtime, name)
    chain.add(told.append)
    try:
        launched()
    finally:
        chain.remove(told.append)
    assert len(launched.asked) == 1
    launched()
    assert len(launched.asked) == 1


class Falsy(list):
    def __call__(self, _metadata):
        self.append(1)


class Counter:
    calls = 0

    def __call__(self, _metadata):
        self.calls += 1


@pytest.mark.parametrize(("hook", "count"), [(Falsy(), len), (Counter(), lambda hook: hook.calls)])
def test_a_hook_in_the_place_of_tritons_chain_is_called(launched, monkeypatch, hook, count):
    monkeypatch.setattr(knobs.runtime, "launch_enter_hook", hook)
    launched()
    launched()
    assert count(hook) == 2


def test_a_hook_before_runs_is_called(launched):
    told = []
    doubled.add_pre_run_hook(lambda *args, **kwargs: told.append(kwargs))
    try:
        launched()
    finally:
        doubled.pre_run_hooks.clear()
    assert [each["BLOCK"] for each in told] == [64]


def test_a_launch_through_triton_has_its_program_when_triton_has_dropped_it(gpu, launched):
    doubled.device_caches.clear()
    before = len(gpu.told)
    assert launched() is next(iter(doubled.device_caches[0][0].values()))
    assert len(gpu.told) == before + 1


def test_a_changed_global_variable_is_an_error_as_in_triton(launched):
    with (
        mock.patch.dict(doubled.__globals__, FACTOR=tl.constexpr(3)),
        pytest.raises(RuntimeError, match="FACTOR has changed"),
    ):
        launched()


def test_another_setting_is_another_program(launched):
    plain = launched()
    with mock.patch.object(knobs.runtime, "debug", True):
        checked = launched()
        assert launched() is checked
    assert checked is not plain
    assert launched() is plain


def test_a_run_that_somebody_replaced_is_called(launched, monkeypatch):
    told, theirs = [], JITFunction.run

    def run(self, *args, **kwargs):
        told.append(kwargs["BLOCK"])
        return theirs(self, *args, **kwargs)

    monkeypatch.setattr(JITFunction, "run", run)
    launched()
    assert told == [64]


PATCHED = """
import functools
import torch, triton, triton.language as tl
from fake_gpu import FakeGpu, installed
from triton.runtime import JITFunction

told, theirs = [], JITFunction.run
{replaced}
from tunebook.adapters._triton.candidate import LaunchConfig
from tunebook.adapters._triton.direct_launch import DirectLaunches

@triton.jit
def store(x_ptr, n, BLOCK: tl.constexpr):
    tl.store(x_ptr, n)

config = LaunchConfig(triton.Config({{"BLOCK": 64}}))
with installed(FakeGpu(lambda _facts: 1e-6), store):
    launches, x = DirectLaunches(store), torch.zeros(64)
    for _ in range(3):
        launches.run(config, (1,), (x, 64), {{}})
print(len(told))
"""
BY_A_FUNCTION = """
def watch(theirs, tell):
    @functools.wraps(theirs)
    def run(self, *args, **kwargs):
        tell(self)
        return theirs(self, *args, **kwargs)
    JITFunction.run = run
watch(theirs, told.append)
"""
BY_AN_OBJECT = """
class Run:
    def __get__(self, function, _kind):
        return self if function is None else functools.partial(self, function)
    def __call__(self, *args, **kwargs):
        told.append(self)
        return theirs(*args, **kwargs)
JITFunction.run = Run()
"""


@pytest.mark.parametrize("replaced", [BY_A_FUNCTION, BY_AN_OBJECT])
def test_a_run_that_somebody_replaced_before_tunebook_was_imported_is_called(tmp_path, replaced):
    (tmp_path / "program.py").write_text(PATCHED.format(replaced=replaced))
    places = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    command = [sys.executable, str(tmp_path / "program.py")]
    environment = {**os.environ, "PYTHONPATH": places}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["3"], done.stderr


def test_another_device_has_a_program_of_its_own(gpu):
    direct, x = DirectLaunches(doubled), torch.zeros(64)
    first = direct.run(CONFIG, (1,), (x, 64), {})
    gpu.set_current_device(1)
    assert direct.run(CONFIG, (1,), (x, 64), {}) is not first
    gpu.set_current_device(0)
    assert direct.run(CONFIG, (1,), (x, 64), {}) is first


# ----------------------------------------------------------------------------------------------- what only Triton knows


class Wrapped(torch.Tensor):
    pass


class Pointer:
    """An array of another library."""

    dtype = "fp32"

    def data_ptr(self):
        return 4096


@pytest.mark.parametrize("x", [torch.zeros(64).as_subclass(Wrapped), Pointer()])
def test_arrays_of_other_classes_go_through_triton(gpu, x):
    direct = DirectLaunches(doubled)
    direct.run(CONFIG, (1,), (x, 64), {})
    found = asked(doubled)
    direct.run(CONFIG, (1,), (x, 64), {})
    assert len(found) == 1


def test_options_among_the_arguments_go_through_triton(gpu):
    direct, x = DirectLaunches(doubled), torch.zeros(64)
    plain = direct.run(CONFIG, (1,), (x, 64), {})
    assert direct.run(CONFIG, (1,), (x, 64), {"debug": True}) is not plain
    assert direct.run(CONFIG, (1,), (x, 64), {}) is plain


@pytest.mark.parametrize(
    ("args", "kwargs"), [((), {}), ((1, 2, 3, 4), {}), ((1, 2), {"n": 3}), ((1, 2), {"BLOCK": 32}), ((1,), {"m": 3})]
)
def test_wrong_arguments_raise_what_triton_raises(gpu, args, kwargs):
    with pytest.raises(Exception) as theirs:  # noqa: PT011 - whatever Triton raises
        doubled.run(*args, grid=(1,), warmup=False, **kwargs, **CONFIG.meta)
    with pytest.raises(theirs.type) as ours:
        DirectLaunches(doubled).run(CONFIG, (1,), args, kwargs)
    assert str(ours.value) == str(theirs.value)


@pytest.mark.parametrize("n", [2**64, -(2**63) - 1])
def test_an_integer_that_is_too_large_raises_the_error_of_triton(gpu, n):
    direct, x = DirectLaunches(doubled), torch.zeros(64)
    for known in (2**63, -(2**63) + 1):
        direct.run(CONFIG, (1,), (x, known), {})
    with pytest.raises(OverflowError, match="too large"):
        direct.run(CONFIG, (1,), (x, n), {})


def test_a_default_that_is_a_function_goes_through_triton_because_its_code_may_change(gpu):
    direct, x = DirectLaunches(mapped), torch.zeros(64)
    direct.run(CONFIG, (1,), (x, 64), {})
    found = asked(mapped)
    direct.run(CONFIG, (1,), (x, 64), {})
    assert len(found) == 1


def test_launches_are_direct_on_the_installed_triton():
    # If this fails on a new Triton, compare its `JITFunction.run`, and how it describes arguments, with what is here.
    assert direct_launch._IS_KNOWN


def test_a_version_that_reads_more_launches_through_triton(gpu, monkeypatch):
    monkeypatch.setattr(direct_launch, "_IS_KNOWN", False)
    direct, x = DirectLaunches(doubled), torch.zeros(64)
    direct.run(CONFIG, (1,), (x, 64), {})
    found = asked(doubled)
    direct.run(CONFIG, (1,), (x, 64), {})
    assert len(found) == 1
