"""Device time from jax's profiler: what is read from a profile, and how samples are taken by it."""

from __future__ import annotations

import itertools
import threading
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from limits import HANG_S

import tunebook as tb
from tunebook._arrays.describe import timer_for
from tunebook._measure.stopwatch import Stopwatch
from tunebook.adapters._jax import profiler
from tunebook.adapters._jax.profiler import CANDIDATE, ProfilerTimer, busy_ns, read_spans, record_profile, timer_on

GPU, STREAM = "/device:GPU:0", "Stream #13(Compute)"

on_cpu = pytest.mark.skipif(jax.default_backend() != "cpu", reason="it is about a process without an accelerator")


def on_the_host(plane, _line):
    """Where a CPU's programs are in a profile: among all that the host does, with the name of their module."""
    return plane == "/host:CPU"


def event(start_ns, duration_ns, module=CANDIDATE, name="fusion"):
    stats = [("correlation_id", 7), ("hlo_module", module)] if module else []
    return SimpleNamespace(name=name, start_ns=start_ns, duration_ns=duration_ns, stats=stats)


def profile(*events, plane=GPU, line=STREAM, more=()):
    lines = [SimpleNamespace(name=line, events=events)]
    return SimpleNamespace(planes=[SimpleNamespace(name=plane, lines=lines), *more])


# -------------------------------------------------------------------------------------------------------- reading one


@on_cpu
def test_a_real_profile_has_the_time_of_the_programs_in_it():
    x = jnp.ones((200, 200))
    candidate = jax.jit(lambda x: jnp.tanh(x @ x))
    candidate(x).block_until_ready()

    def named(x):
        return jnp.tanh(x @ x)

    named.__name__ = CANDIDATE.removeprefix("jit_")
    mine = jax.jit(named)
    mine(x).block_until_ready()
    alone = record_profile(lambda: [candidate(x).block_until_ready() for _ in range(3)])
    both = record_profile(lambda: [(candidate(x) + mine(x)).block_until_ready() for _ in range(3)])
    found = [span for plane in both.planes for span in read_spans(plane, on_the_host)]
    assert {CANDIDATE, "jit__lambda"} <= {program for _, _, program in found}
    assert any(program == CANDIDATE and end_ns > start_ns for start_ns, end_ns, program in found)
    assert busy_ns(both, on_the_host) > 0
    assert busy_ns(alone, on_the_host) > 0
    assert busy_ns(both) == 0, "a CPU is no device"


def test_programs_of_other_threads_do_not_count():
    assert busy_ns(profile(event(0, 10), event(20, 5, "jit_other"), event(30, 7))) == 17


def test_where_no_candidate_is_seen_everything_counts():
    assert busy_ns(profile(event(0, 10, "jit_f"), event(20, 5, None))) == 15


def test_a_program_of_a_tpu_is_known_by_its_name():
    mine, other = event(0, 10, None, f"{CANDIDATE}(42)"), event(10, 90, None, "jit_other(7)")
    assert busy_ns(profile(mine, other, plane="/device:TPU:0", line="XLA Modules")) == 10


def test_the_slowest_device_decides():
    slow = SimpleNamespace(name="/device:GPU:1", lines=[SimpleNamespace(name=STREAM, events=[event(0, 30)])])
    assert busy_ns(profile(event(0, 10), more=[slow])) == 30


@pytest.mark.parametrize(("plane", "line"), [("/host:CPU", "python"), (GPU, "Steps"), ("/device:CUSTOM:x", STREAM)])
def test_lines_that_show_no_device_do_not_count(plane, line):
    assert busy_ns(profile(event(0, 10), plane=plane, line=line)) == 0


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=12))
def test_work_at_the_same_time_counts_once(spans):
    covered = {t for start, duration in spans for t in range(start, start + duration)}
    assert busy_ns(profile(*(event(*span) for span in spans))) == len(covered)


# ------------------------------------------------------------------------------------------------------ taking samples


class FakeProfiler:
    """Records runs that take a device so long, and the host longer."""

    def __init__(self, device_ns, host_ns=100_000):
        self.device_ns, self.host_ns, self.now_ns, self.runs = device_ns, host_ns, 0, 0

    def clock_ns(self):
        return self.now_ns

    def launch(self):
        self.now_ns += self.host_ns
        self.runs += 1

    def record(self, work):
        before = self.runs
        work()
        starts = itertools.count(0, self.host_ns)
        return profile(*(event(next(starts), self.device_ns) for _ in range(self.runs - before)))


@pytest.mark.parametrize(("host_ns", "asked", "runs"), [(1000, 1, 8), (1000, 20, 20), (900_000, 1, 3), (10**8, 1, 1)])
def test_a_sample_is_of_several_runs_unless_they_are_long(host_ns, asked, runs):
    fake = FakeProfiler(500, host_ns)
    timer = ProfilerTimer(fake.record, fake.clock_ns)
    assert timer.sample_s(fake.launch, asked) == pytest.approx(500e-9)
    assert fake.runs == runs


def test_a_run_that_the_profiler_did_not_see_is_an_error():
    fake = FakeProfiler(0)
    with pytest.raises(RuntimeError, match="saw nothing of a run"):
        ProfilerTimer(fake.record, fake.clock_ns).sample_s(fake.launch, 1)


def test_times_of_the_profiler_are_not_compared_with_times_of_the_host():
    assert Stopwatch().by(ProfilerTimer()).name == "device-profiler/warm-cache/race/warmup=1"
    assert Stopwatch().name.startswith("host-clock/")


def test_a_function_is_tuned_by_the_profiler():
    watch = Stopwatch().by(ProfilerTimer(counts=on_the_host))
    k = tb.tunable(
        lambda x, *, config: jax.lax.fori_loop(0, config.n, lambda _, y: jnp.sin(y), x), space=tb.Space(n=[400, 1]),
        heuristic={"n": 400}, check=False, store=False, name="profiled", tuner=tb.Tuner(stopwatch=watch),
    )  # fmt: skip
    tuned = tb.tune(k, jnp.ones((64, 64)))
    assert tuned.config == {"n": 1}
    assert {m.policy for m in tuned.measurements} == {f"{watch.name}/forward"}


def test_a_candidate_that_raises_leaves_no_profile_running():
    def fail():
        raise ValueError("no such block")

    for _ in range(2):
        with pytest.raises(ValueError, match="no such block"):
            record_profile(fail)
    record_profile(lambda: None)


def test_a_profile_of_the_users_own_is_waited_for(tmp_path):
    jax.profiler.start_trace(tmp_path)
    with pytest.raises(RuntimeError, match="already been started"):
        record_profile(lambda: None)
    done = []
    thread = threading.Thread(target=lambda: done.append(record_profile(lambda: None, patience_s=HANG_S)))
    thread.start()
    thread.join(0.2)
    assert not done
    jax.profiler.stop_trace()
    thread.join()
    assert len(done) == 1


# ----------------------------------------------------------------------------------------------------- whether it pays


@on_cpu
def test_on_a_cpu_the_hosts_clock_is_used():
    assert timer_for((jnp.ones(3), 2)) is None
    seen = []
    jax.jit(lambda x: seen.append(timer_for((x,))) or x)(jnp.ones(3))
    assert seen == [None]


@pytest.fixture
def affordable(monkeypatch):
    """What a process has found out about its devices: nothing yet."""
    monkeypatch.setattr(profiler, "_affordable", {})
    return profiler._affordable


@on_cpu
@pytest.mark.parametrize(
    ("device_ns", "took_ns", "wanted"), [(100, 10**7, True), (100, 10**8, False), (0, 10**7, False)]
)
def test_the_profiler_is_used_where_it_sees_the_device_and_is_fast_enough(affordable, device_ns, took_ns, wanted):
    times = itertools.count(0, took_ns)
    profiles = []

    def record(work):
        work()
        profiles.append(profile(event(0, device_ns, "jit_probe")))
        return profiles[-1]

    for _ in range(2):
        assert (timer_on(jax.devices()[0], record, lambda: next(times)) is not None) is wanted
    assert len(profiles) == 2, "it is tried out once"
    assert affordable == {"cpu": wanted}


def test_while_the_user_profiles_the_hosts_clock_is_used_and_nothing_remembered(affordable):
    def busy(_work):
        raise RuntimeError("Profile has already been started")

    assert timer_on(jax.devices()[0], busy) is None
    assert not affordable


def test_it_can_be_tried_out_while_something_is_traced(affordable):
    def record(work):
        work()
        return profile(event(0, 100))

    def traced(x):
        assert timer_on(jax.devices()[0], record) is not None
        return x

    assert not jax.make_jaxpr(traced)(1.0).eqns
