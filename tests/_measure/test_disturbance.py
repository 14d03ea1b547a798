"""Disturbances of a measurement: other users of the CPU, the state of the GPU, and drifting samples."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from fake_driver import driver as driver  # noqa: PLC0414 - a fixture
from hypothesis import given
from hypothesis import strategies as st
from kernels import Costs, FakeClock, PretendKernel, Tiles, fake_tuner, invocation, job_of

import tunebook as tb
from tunebook._api.explain import explain_call
from tunebook._base.config_codec import fingerprint
from tunebook._base.vocabulary import Failure
from tunebook._measure.device_lock import cuda_uuid, physical_name
from tunebook._measure.disturbance import (
    DRIFT,
    CpuProbe,
    CpuReading,
    Disturbances,
    DisturbanceWatch,
    NvmlProbe,
    Thread,
    cpu_disturbances,
    drift,
    nvml_probe,
    probes_for,
    read_cpu,
)
from tunebook._statistics.race import median_s
from tunebook._tuning.job import DIED
from tunebook.testing import Landscape

START = CpuReading(wall_s=100.0, cores=4, busy_s=50.0, own_s=10.0, stolen_s=1.0)


def after(*, wall_s=10.0, busy_s=0.0, own_s=0.0, stolen_s=0.0):
    return START._replace(
        wall_s=START.wall_s + wall_s,
        busy_s=START.busy_s + busy_s,
        own_s=START.own_s + own_s,
        stolen_s=START.stolen_s + stolen_s,
    )


@pytest.mark.parametrize(
    ("reading", "said"),
    [
        (after(busy_s=10.0, own_s=10.0), []),
        (after(busy_s=18.0, own_s=10.0), []),  # a fifth of four cores
        (after(busy_s=25.0, own_s=10.0), ["other processes used 38% of the CPU"]),
        (after(busy_s=40.0, own_s=40.0), []),
        (after(busy_s=10.0, own_s=12.0), []),  # counted at different moments
        (after(busy_s=10.0, own_s=10.0, stolen_s=2.0), ["the hypervisor took 5% of the CPU"]),
        (after(wall_s=0.1, busy_s=0.4), []),  # shorter than the counters are good for
    ],
)
def test_the_cpu_is_busy_if_others_leave_too_little_of_it(reading, said):
    assert cpu_disturbances(START, reading) == said


def waiting(ran_s, waited_s, *, wall_s=1.0, **others):
    """Readings before and after a time in which this thread, and others, ran and waited for so long."""
    threads = {"thread-self": Thread(ran_s, waited_s), **others}
    idle = dict.fromkeys(threads, Thread(0.0, 0.0))
    return CpuReading(0.0, 4, threads=idle), CpuReading(wall_s, 4, threads=threads)


@pytest.mark.parametrize(
    ("readings", "said"),
    [
        (waiting(0.97, 0.03), []),
        (waiting(0.8, 0.2), ["runs waited for a CPU 20% of the time"]),
        (waiting(0.008, 0.002, wall_s=0.01), []),  # one turn of somebody else's
        # The worker runs the candidates, and we wait for it; who else of ours waits is of no interest.
        (waiting(0.01, 0.0, worker=Thread(0.7, 0.3)), ["runs waited for a CPU 30% of the time"]),
        (waiting(0.9, 0.0, loader=Thread(0.1, 0.9)), []),
    ],
)
def test_the_cpu_is_busy_if_runs_wait_for_it(readings, said):
    assert cpu_disturbances(*readings) == said


def test_a_child_that_came_or_went_meanwhile_is_not_compared():
    before, later = waiting(0.9, 0.0, worker=Thread(9.0, 9.0))
    assert cpu_disturbances(before._replace(threads={"gone": Thread(1.0, 1.0)}), later) == []


def test_unreadable_cpu_counters_are_not_judged(tmp_path):
    unknown = read_cpu(tmp_path)
    assert (unknown.busy_s, unknown.own_s, dict(unknown.threads)) == (None, None, {})
    assert cpu_disturbances(unknown, after(busy_s=40.0)) == []
    assert cpu_disturbances(START, unknown) == []


def test_this_thread_is_seen_to_run():
    before, begun = read_cpu(), time.thread_time()
    while time.thread_time() < begun + 0.05:
        pass
    ran_s = read_cpu().threads["thread-self"].ran_s - before.threads["thread-self"].ran_s
    assert ran_s == pytest.approx(0.05, abs=0.04)


def test_only_the_cores_that_we_may_use_count(tmp_path):
    ours, other = min(os.sched_getaffinity(0)), max(os.sched_getaffinity(0)) + 1
    (tmp_path / "stat").write_text(
        f"cpu  9 9 9 9 9 9 9 9 0 0\ncpu{ours} 1 2 3 4 5 6 7 8 0 0\ncpu{other} 100 0 0 0 0 0 0 0 0 0\nintr 1\n"
    )
    reading = read_cpu(tmp_path, lambda: 7.0)
    tick_s = 1 / os.sysconf("SC_CLK_TCK")
    assert reading.wall_s == 7.0
    assert reading.busy_s == pytest.approx((1 + 2 + 3 + 6 + 7) * tick_s)
    assert reading.stolen_s == pytest.approx(8 * tick_s)


def test_the_work_of_living_children_is_our_own():
    busy = "import sys, time\nwhile time.process_time() < 0.3: pass\nprint(); sys.stdout.flush(); sys.stdin.read()"
    before = read_cpu()
    with subprocess.Popen([sys.executable, "-c", busy], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        alive = read_cpu()
        child.stdin.close()
    gone = read_cpu()
    assert alive.own_s - before.own_s > 0.25
    assert gone.own_s - before.own_s > 0.25
    assert alive.threads[str(child.pid)].ran_s > 0.25
    assert str(child.pid) not in gone.threads


@pytest.mark.promise("cache-never-fails-a-call")
def test_a_child_that_ends_while_it_is_read_does_not_count(tmp_path):
    (tmp_path / "stat").write_text("cpu0 1 2 3 4 5 6 7 8\n")
    (tmp_path / "self" / "task" / "1").mkdir(parents=True)
    (tmp_path / "self" / "task" / "1" / "children").write_text("77 78 ")  # and there is no directory 77, nor 78
    assert set(read_cpu(tmp_path, lambda: 7.0).threads) == {"thread-self", "77", "78"}


def test_a_probe_compares_its_two_readings():
    readings = iter([START, after(busy_s=30.0)])
    probe = CpuProbe(lambda: next(readings))
    probe.start()
    assert list(probe.disturbances()) == ["other processes used 75% of the CPU"]


def test_a_watch_collects_disturbances_from_its_probes_and_the_samples():
    probe = FakeProbe("a burning GPU")
    found = DisturbanceWatch([probe]).disturbances([[1.0] * 20 + [1.5] * 20])
    assert probe.started
    assert found.reasons == ("a burning GPU", "everything became at least 50% slower during the race")
    assert not found.quiet
    assert DisturbanceWatch([]).disturbances([[1.5] * 20 + [1.0] * 20]).reasons == (
        "everything became at least 33% faster during the race",
    )
    assert DisturbanceWatch([FakeProbe()]).disturbances([]) == Disturbances() == Disturbances(())
    assert Disturbances().quiet


class FakeProbe:
    def __init__(self, *reasons):
        self.reasons, self.started = reasons, False

    def start(self):
        self.started = True

    def disturbances(self):
        return self.reasons


# --------------------------------------------------------------------------------------------------------------- drift


def lanes(*, cv, drifts=0.0, spikes=0.0, seed=0, rounds=36, costs=(1e-3, 1.01e-3, 1.05e-3)):
    """Samples of finalists, taken in turn, while the machine gets slower."""
    land = Landscape(
        dict(enumerate(costs)), cv=cv, spikes=spikes, drift=drifts, seed=seed, horizon_s=rounds * sum(costs)
    )
    taken = {config: [] for config in land.configs}
    for _ in range(rounds):
        for config, samples in taken.items():
            begun = land.clock_ns()
            land.make_fn(config)()
            samples.append((land.clock_ns() - begun) * 1e-9)
    return list(taken.values())


@pytest.mark.parametrize(("cv", "spikes"), [(0.0, 0.0), (0.01, 0.1), (0.05, 0.1), (0.10, 0.1)])
def test_noise_alone_is_not_drift(cv, spikes):
    assert all(abs(drift(lanes(cv=cv, spikes=spikes, seed=seed))) < DRIFT for seed in range(50))


@pytest.mark.parametrize("cv", [0.01, 0.05])
def test_even_drift_of_five_percent_is_borne_and_of_thirty_noticed(cv):
    for seed in range(20):
        assert abs(drift(lanes(cv=cv, drifts=0.05, seed=seed))) <= DRIFT
        assert drift(lanes(cv=cv, drifts=0.3, spikes=0.1, seed=seed)) > DRIFT


def test_a_few_samples_show_no_drift():
    assert drift([]) == drift([[]]) == drift([[1.0, 2.0]]) == drift([[1.0] * 10 + [9.0] * 10]) == 0.0


def test_one_moving_lane_among_many_is_not_drift_of_the_machine():
    quiet = [[1.0 + 0.001 * (n % 3) for n in range(36)] for _ in range(5)]
    assert drift([*quiet, [1.0] * 18 + [2.0] * 18]) == 0.0


samples = st.lists(st.floats(1e-9, 1e3), min_size=1, max_size=60)


@given(st.lists(samples, max_size=5), st.floats(1e-3, 1e3))
def test_drift_does_not_depend_on_the_unit_and_never_raises(taken, unit):
    assert drift([[s * unit for s in lane] for lane in taken]) == pytest.approx(drift(taken), abs=1e-6)


@given(samples)
def test_the_median_has_as_many_above_as_below(taken):
    middle = median_s(taken)
    assert sum(s < middle for s in taken) <= len(taken) / 2
    assert sum(s > middle for s in taken) <= len(taken) / 2


# ----------------------------------------------------------------------------------------------------------------- GPU


class FakeNvml:
    """As much of `pynvml` as is used."""

    class NVMLError(Exception):
        pass

    def __init__(self, *, throttled=0, used=None):
        self.throttled, self.used = throttled, used

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle):  # noqa: N802 - its name there
        if self.throttled is None:
            raise self.NVMLError
        return self.throttled

    def nvmlDeviceGetProcessUtilization(self, handle, since_us):  # noqa: N802 - as above
        assert since_us > 1e15, "microseconds since 1970"
        if self.used is None:
            raise self.NVMLError
        return [SimpleNamespace(pid=pid, smUtil=percent) for pid, percent in self.used]


@pytest.mark.parametrize(
    ("nvml", "said"),
    [
        (FakeNvml(), []),
        (FakeNvml(throttled=None), []),
        (FakeNvml(throttled=0x04), []),  # its power limit, at which many devices run all day
        (FakeNvml(throttled=0x20), ["the GPU is slowed down by heat"]),
        (
            FakeNvml(throttled=0x48),
            ["the GPU is slowed down by heat", "the GPU is slowed down by its power supply or its board"],
        ),
        (FakeNvml(used=[(1, 90), (2, 10)]), []),
        (FakeNvml(used=[(1, 50), (2, 60), (2, 40)]), ["other processes used 50% of the GPU"]),
        (FakeNvml(used=[(7, 50), (8, 50)]), []),  # in a container: which of them is us?
    ],
)
def test_a_gpu_that_is_slowed_down_or_shared_is_noticed(nvml, said):
    probe = NvmlProbe(nvml, "handle", pid=1)
    probe.start()
    assert list(probe.disturbances()) == said


class FourGpus(FakeNvml):
    """NVML on a host with four GPUs, numbered as in `fake_driver`, of which each handle is the index."""

    def nvmlInit(self):  # noqa: N802 - its name there
        pass

    def nvmlDeviceGetCount(self):  # noqa: N802 - as above
        return 4

    def nvmlDeviceGetHandleByUUID(self, uuid):  # noqa: N802 - as above
        kind, _, digits = uuid.partition("-")
        if kind != "GPU":
            raise self.NVMLError
        assert [len(part) for part in digits.split("-")] == [8, 4, 4, 4, 12]
        return int(digits[:2], 16) - 0x10

    def nvmlDeviceGetHandleByIndex(self, index):  # noqa: N802 - as above
        return index

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle):  # noqa: N802 - as above
        return 0x20 if handle == self.throttled else 0


@pytest.mark.promise("measured-gpu-watched")
@pytest.mark.parametrize(("visible", "said"), [(None, [0, 1, 0]), ("3,1,2", [0, 1, 0]), ("1,3", [1, 0]), ("2", [0])])
def test_the_gpu_that_is_measured_is_watched(driver, monkeypatch, visible, said):
    """The second of four GPUs is hot, and each process numbers the GPUs that it sees."""
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    nvml = FourGpus(throttled=1)
    names = [f"gpu-{cuda_uuid(ordinal, driver)}" for ordinal in range(len(said))]
    probes = [probes_for("gpu", [name], nvml) for name in names]
    assert [sum(isinstance(probe, NvmlProbe) for probe in found) for found in probes] == [1] * len(said)
    assert [len(DisturbanceWatch(found[1:]).disturbances().reasons) for found in probes] == said


def test_a_gpu_without_a_uuid_is_watched_if_it_is_the_only_one(monkeypatch):
    nvml = FourGpus(throttled=0)
    assert nvml_probe("gpu-0", nvml) is None
    monkeypatch.setattr(nvml, "nvmlDeviceGetCount", lambda: 1)
    watch = DisturbanceWatch([nvml_probe("gpu-0", nvml)])
    assert watch.disturbances().reasons == ("the GPU is slowed down by heat",)


@pytest.mark.promise("measured-gpu-watched")
def test_a_tuner_watches_the_gpu_of_the_job(monkeypatch):
    asked = []
    monkeypatch.setattr("tunebook._tuning.tuner.probes_for", lambda *about: asked.append(about) or [])
    tb.Tuner().tune(job_of(lambda n: lambda: sum(range(n)), [1000, 10], platform="gpu", ordinal=1))
    assert asked == [("gpu", (physical_name("gpu", 1),))]


def test_without_nvml_nothing_is_said_about_gpus(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert [type(probe) for probe in probes_for("gpu", ["gpu-0"])] == [CpuProbe]


def test_nvml_without_a_driver_watches_nothing():
    class NoDriver(FakeNvml):
        def nvmlInit(self):  # noqa: N802 - its name there
            raise self.NVMLError

    assert nvml_probe("gpu-0", NoDriver()) is None


# ------------------------------------------------------------------------------------------------- what comes of it

FAST, SLOW, GUESS = Tiles(64), Tiles(16), Tiles(32)
COSTS = {SLOW: 0.5, FAST: 0.001, GUESS: 0.1}
OTHER = {SLOW: 0.001, FAST: 0.5, GUESS: 0.1}
BUSY = "other processes used 75% of the CPU"


def make(path, *reasons, costs=COSTS, versions="driver 1", **options):
    clock, events = FakeClock(), []
    kernel = PretendKernel(clock, costs, heuristic=GUESS)
    kernel.environment = lambda _: versions
    chain = tb.ConfigSelectorChain(
        tb.ConfigCache(),
        tuner=fake_tuner(clock, probes=lambda _: [FakeProbe(*reasons)]),
        persistent=tb.PersistentCache("pretend", path, cfg_type=Tiles),
        on_event=lambda event, **data: events.append((event, data)),
        **options,
    )
    return chain, kernel, events


def tune(chain, kernel, **options):
    return chain.tune(invocation(kernel, 1), kernel, **options)


def stored(chain, kernel):
    record = chain.persistent.read(kernel.problem(invocation(kernel, 1)))
    return chain.persistent.config_of(record), record.body.provenance.get("disturbances")


@pytest.mark.promise("disturbances-noticed")
def test_a_record_from_a_disturbed_says_so_and_answers_all_the_same(tmp_path):
    chain, kernel, events = make(tmp_path, BUSY)
    assert chain.choose(invocation(kernel, 1), kernel) == FAST
    assert stored(chain, kernel) == (FAST, [BUSY])
    (told,) = [data for event, data in events if event == "disturbed"]
    assert (told["cfg"], told["measured"], told["reasons"]) == (FAST, FAST, (BUSY,))
    assert chain.choose(invocation(kernel, 1), kernel) == FAST
    assert f"disturbed  {BUSY}" in str(explain_call(chain, invocation(kernel, 1), kernel))


def test_on_quiet_ground_nothing_is_said(tmp_path):
    chain, kernel, events = make(tmp_path)
    assert tune(chain, kernel).disturbances.quiet
    assert stored(chain, kernel) == (FAST, None)
    assert "disturbed" not in [event for event, _ in events]
    assert "disturbed" not in str(explain_call(chain, invocation(kernel, 1), kernel))


@pytest.mark.promise("disturbances-noticed")
def test_a_decision_on_a_disturbed_machine_does_not_replace_one_from_a_quiet_machine(tmp_path):
    tune(*make(tmp_path)[:2])
    chain, kernel, events = make(tmp_path, BUSY, costs=OTHER)
    before = chain.persistent.read(kernel.problem(invocation(kernel, 1)))
    verified = chain.verify(invocation(kernel, 1), kernel)
    assert not verified.held
    assert verified.tuned.ranking[0][0] == SLOW
    assert (verified.config, chain.choose(invocation(kernel, 1), kernel)) == (FAST, FAST)
    assert chain.persistent.read(kernel.problem(invocation(kernel, 1))) == before
    (told,) = [data for event, data in events if event == "disturbed"]
    assert (told["cfg"], told["measured"]) == (FAST, SLOW)


def test_a_decision_on_a_disturbed_machine_replaces_one_that_a_budget_cut_short(tmp_path):
    tune(*make(tmp_path)[:2], budget="1 trials")
    chain, kernel, _ = make(tmp_path, BUSY)
    tune(chain, kernel)
    record = chain.persistent.read(kernel.problem(invocation(kernel, 1)))
    assert record.body.provenance["complete"], "or each later tuning would begin again"
    assert stored(chain, kernel) == (FAST, [BUSY])


@pytest.mark.parametrize("change", [{"versions": "driver 2"}, {"costs": {**OTHER, Tiles(1): 3.0}}])
def test_a_decision_on_a_disturbed_machine_replaces_an_outdated_entry(tmp_path, change):
    tune(*make(tmp_path)[:2])
    chain, kernel, _ = make(tmp_path, BUSY, **{"costs": OTHER, **change})
    config = chain.choose(invocation(kernel, 1), kernel)
    assert stored(chain, kernel) == (config, [BUSY])


def test_a_later_tuning_on_quiet_ground_measures_the_finalists_again_and_replaces_it(tmp_path):
    tune(*make(tmp_path, BUSY)[:2])
    chain, kernel, _ = make(tmp_path)
    assert tune(chain, kernel).config == FAST
    assert FAST in kernel.runs
    assert SLOW not in kernel.runs
    assert stored(chain, kernel) == (FAST, None)
    again, same, _ = make(tmp_path)
    tune(again, same)
    assert same.runs == [], "undisturbed measurements stay"


@pytest.mark.parametrize("then", [COSTS, {**COSTS, SLOW: RuntimeError("the driver was gone")}])
def test_again_repairs_a_choice_because_no_earlier_measurement_excludes_a_candidate(tmp_path, then):
    tune(*make(tmp_path, BUSY, costs=then)[:2])
    chain, kernel, _ = make(tmp_path, costs=OTHER)
    assert tune(chain, kernel).config == GUESS, "the fastest now, SLOW, left the disturbed race or failed in it"
    tuned = tune(chain, kernel, again=True)
    assert (tuned.config, tuned.ran) == (SLOW, 3)
    assert stored(chain, kernel) == (SLOW, None)
    assert chain.choose(invocation(kernel, 1), kernel) == SLOW


def test_again_does_not_run_a_candidate_that_ended_the_process(tmp_path):
    chain, kernel, _ = make(tmp_path)
    tune(chain, kernel)
    record = chain.persistent.read(kernel.problem(invocation(kernel, 1)))
    died = Failure("crash", DIED, expires=1e12)
    measured = [m._replace(failure=died) if m.fingerprint == fingerprint(SLOW) else m for m in record.body.measurements]
    chain.persistent.write(record.replace(body=replace(record.body, measurements=tuple(measured))))
    kernel.runs.clear()
    tune(chain, kernel, again=True)
    assert set(kernel.runs) == {FAST, GUESS}


def test_the_line_about_a_disturbance_says_what_to_type_against_it(tmp_path):
    clock = FakeClock()
    tuner = fake_tuner(clock, probes=lambda _: [FakeProbe(*reasons)])
    reasons, costs = [BUSY], Costs({1: 0.001, 2: 0.5})

    @tb.tunable(space=[1, 2], name="pages.draw", store=tmp_path, tuner=tuner)
    def draw(n, *, config):
        clock.spend(costs.by_config[config])
        return n

    draw(7)
    said = next(line for line in str(draw.explain(7)).splitlines() if "disturbed" in line)
    assert said.endswith("measure anew: tunebook.tune(draw, ..., again=True)")
    reasons.clear()
    costs.by_config = {1: 0.5, 2: 0.001}
    assert tb.tune(draw, 7, again=True).config == 2
    assert "disturbed" not in str(draw.explain(7))


def test_a_second_tuning_on_disturbed_may_replace_the_first(tmp_path):
    tune(*make(tmp_path, BUSY)[:2])
    chain, kernel, _ = make(tmp_path, "heat", costs={**COSTS, FAST: 0.3, GUESS: 0.01})
    chain.verify(invocation(kernel, 1), kernel)
    assert stored(chain, kernel) == (GUESS, ["heat"])


def test_an_entry_that_holds_on_disturbed_after_an_update_is_marked(tmp_path):
    tune(*make(tmp_path)[:2])
    chain, kernel, _ = make(tmp_path, BUSY, versions="driver 2")
    assert chain.choose(invocation(kernel, 1), kernel) == FAST
    assert stored(chain, kernel) == (FAST, [BUSY])
    assert chain.verify(invocation(kernel, 1), kernel).tuned.disturbances.reasons == (BUSY,)


def test_a_probe_is_asked_about_the_platform_of_the_call(tmp_path):
    asked = []
    chain, kernel, _ = make(tmp_path)
    tuner = fake_tuner(kernel.clock, probes=lambda platform: asked.append(platform) or [])
    chain = tb.ConfigSelectorChain(tb.ConfigCache(), tuner=tuner)
    tune(chain, kernel)
    assert asked == ["cpu"]


def test_on_disturbed_the_finalists_are_sampled_twice_as_often(tmp_path):
    counts = []
    for reasons in ((), (BUSY,)):
        chain, kernel, _ = make(tmp_path / str(len(reasons)), *reasons, costs={**COSTS, Tiles(2): 0.00101})
        best = tune(chain, kernel).verdict.winner.measurement
        counts.append(len(best.samples_s))
    assert counts[1] == 2 * counts[0]


def test_measuring_longer_ends_with_the_budget(tmp_path):
    chain, kernel, _ = make(tmp_path, BUSY, costs={FAST: 0.01, SLOW: 0.0101, GUESS: 0.0102})
    tuned = chain.tune(invocation(kernel, 1), kernel, budget=0.16)
    assert not tuned.complete
    assert 0.16 <= tuned.seconds < 0.18


def test_a_clock_of_ones_own_says_nothing_about_the_machine(tmp_path, monkeypatch):
    monkeypatch.setattr("tunebook._tuning.tuner.probes_for", lambda *_: [FakeProbe(BUSY)])
    kernel = PretendKernel(FakeClock(), COSTS)
    by_fake_clock = tb.ConfigSelectorChain(tb.ConfigCache(), tuner=fake_tuner(kernel.clock))
    assert tune(by_fake_clock, kernel).disturbances.quiet
    assert tune(tb.ConfigSelectorChain(tb.ConfigCache(), tuner=tb.Tuner()), kernel).disturbances.reasons[:1] == (BUSY,)
