"""One process at a time measures on a device: by turns, and never for ever."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from contextvars import copy_context
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from fake_driver import driver as driver  # noqa: PLC0414 - a fixture
from limits import HANG_S

import tunebook as tb
from tunebook._base.errors import TunebookWarning
from tunebook._measure.device_lock import DeviceTurn, cuda_names, cuda_uuid, physical_devices, physical_name
from tunebook._selection.persistent_cache import default_book

SCRIPT = Path(__file__).parents[1] / "farm_lock_process.py"


@pytest.fixture(autouse=True)
def _own_locks(tmp_path, monkeypatch):
    monkeypatch.setenv("TUNEBOOK_LOCKS", str(tmp_path / "locks"))


@pytest.fixture
def start(tmp_path):
    """Starts a process of the script, and ends it after the test."""
    started = []

    def run(command, *arguments):
        process = subprocess.Popen(
            [sys.executable, SCRIPT, command, str(tmp_path), *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


PATIENT = tb.Tuner(device_wait_s=10 * HANG_S)  # longer than a test may take: a wait for the device fails it


def turn(tmp_path, wait_s=HANG_S, names=("cpu",), **options):
    return DeviceTurn(names, wait_s, root=tmp_path / "locks", **options)


def events(tmp_path):
    return [(e, int(p), int(b), int(t)) for e, p, b, t in map(str.split, (tmp_path / "log").read_text().splitlines())]


def overlaps(tmp_path):
    """Return how many intervals of different processes overlap, of how many processes."""
    intervals = sorted((began, ended, pid) for event, pid, began, ended in events(tmp_path) if event == "had")
    latest, found = (0, 0), 0
    for began, ended, pid in intervals:
        found += began < latest[0] and pid != latest[1]
        latest = max(latest, (ended, pid))
    return found, len({pid for _, _, pid in intervals})


def test_turns_of_processes_do_not_overlap(tmp_path, start):
    processes = [start("turns", 8, 0.003) for _ in range(4)]
    assert [process.communicate(timeout=HANG_S)[0] for process in processes] == ["ready\n"] * 4
    assert [process.returncode for process in processes] == [0] * 4
    assert overlaps(tmp_path) == (0, 4)
    assert Counter(event for event, *_ in events(tmp_path))["had"] == 32


@pytest.mark.parametrize("isolate", ["never", "always"])
def test_processes_that_tune_do_not_run_candidates_at_the_same_time(tmp_path, start, isolate):
    processes = [start("tune", 3, isolate) for _ in range(2)]
    for process in processes:
        process.stdout.readline()
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    assert [process.communicate(timeout=HANG_S)[0] for process in processes] == ["", ""]
    found, pids = overlaps(tmp_path)
    assert found == 0
    assert pids >= 2


def test_a_process_that_takes_many_turns_does_not_keep_others_waiting(tmp_path, start):
    greedy = start("turns", 100_000, 0.001)
    greedy.stdout.readline()
    modest = start("turns", 10, 0.001)
    assert modest.communicate(timeout=HANG_S)[0] == "ready\n"
    waited = []
    for event, pid, *_ in events(tmp_path):
        if pid == modest.pid and event == "want":
            waited.append(0)
        elif waited and event == "have":
            waited[-1] += pid == greedy.pid
    assert sorted(waited[:-1])[len(waited) // 2] <= 3


def test_killing_the_holder_of_the_device_frees_it(tmp_path, start):
    holder = start("hold")
    holder.stdout.readline()
    waiter = start("turns", 1, 0)
    waiter.stdout.readline()
    while not (tmp_path / "log").exists():
        time.sleep(0.01)
    holder.kill()
    waiter.communicate(timeout=HANG_S)
    assert [event for event, *_ in events(tmp_path)] == ["want", "have", "had"]


def test_a_forked_child_does_not_have_the_device(tmp_path, start):
    holder = start("hold_and_fork")
    child = int(holder.stdout.readline())
    holder.kill()
    holder.wait()
    try:
        mine = turn(tmp_path)
        with mine.taken(HANG_S):
            os.kill(child, 0)
            assert mine.disturbances() == ()
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_child_that_comes_back_from_a_turn_leaves_the_parents_alone(tmp_path, start):
    holder = start("fork_back")
    assert holder.stdout.readline() == "ready\n"
    late = turn(tmp_path, 0.0)
    with late.taken(0.0):
        assert str(holder.pid) in late.disturbances()[0]


def test_a_process_that_waited_too_long_measures_anyway_and_both_processes_report_it(tmp_path, start):
    holder = start("hold_and_tell")
    assert holder.stdout.readline() == "()\n"
    late = turn(tmp_path, 0.05)
    with late.taken(60.0):
        said = f"process {holder.pid} measured on cpu at the same time, and was not waited for any longer"
        assert late.disturbances() == (said,)
        assert holder.communicate("go\n")[0] == "('another process measured on cpu meanwhile',)\n"


def test_a_tuning_waits_for_the_device_once_and_not_for_each_candidate(tmp_path, start):
    assert start("hold").stdout.readline() == "ready\n"
    slept = [0.0]
    late = turn(tmp_path, 10.0, clock_s=lambda: sum(slept), sleep=slept.append)
    waited = []
    for _ in range(3):
        with late.taken(60.0):
            assert "was not waited for any longer" in late.disturbances()[0]
            waited.append(round(sum(slept), 6))
    assert waited == [10.0] * 3


def test_a_shared_ground_is_written_down(tmp_path, start):
    start("hold").stdout.readline()

    @tb.tunable(space=tb.Space(n=[10, 20]), name="shared", check=False, tuner=tb.Tuner(device_wait_s=0.0))
    def kernel(x, *, config):
        return sum(range(config.n))

    tuned = tb.tune(kernel, 1)
    assert any("measured on cpu at the same time" in reason for reason in tuned.disturbances.reasons)
    assert default_book().get(kernel.problem(1)).body.provenance["disturbances"] == list(tuned.disturbances.reasons)


def test_a_budget_is_not_spent_on_waiting(tmp_path, start):
    start("hold").stdout.readline()

    @tb.tunable(space=tb.Space(n=[10, 20]), name="hurried", check=False, store=False, tuner=PATIENT)
    def kernel(x, *, config):
        return sum(range(config.n))

    tuned = tb.tune(kernel, 1, budget="500ms")
    assert tuned.ran >= 1
    assert tuned.seconds < HANG_S


def test_the_holder_of_the_device_and_the_holder_of_the_lease_do_not_deadlock(start):
    processes = [start("ring", role) for role in ("outer", "inner")]
    assert [process.communicate(timeout=HANG_S)[0] for process in processes] == ["1\n", "1\n"]


def never(_seconds):
    pytest.fail("it waits for itself")


def test_a_call_from_within_does_not_wait_for_itself(tmp_path):
    inner = turn(tmp_path, sleep=never)
    with turn(tmp_path).taken(1.0):
        with inner.taken(1.0):
            assert inner.disturbances() == ()
        within = copy_context()
    assert within.run(claims_of, turn(tmp_path)) == ["cpu"], "the context has outlived the turn, and has nothing"


def claims_of(mine):
    with mine.taken(1.0):
        return [claim.name for claim in mine._claims]


@pytest.mark.promise("nested-kernels")
def test_a_tunable_kernel_that_calls_another_is_tuned_without_waiting(tmp_path):
    @tb.tunable(space=tb.Space(n=[10, 20]), name="inner", check=False, store=False, tuner=PATIENT)
    def inner(x, *, config):
        return sum(range(config.n))

    @tb.tunable(space=tb.Space(n=[1, 2]), name="outer", check=False, store=False, tuner=PATIENT)
    def outer(x, *, config):
        return [inner(x) for _ in range(config.n)]

    assert outer(1) in ([45], [45, 45], [190], [190, 190])


def test_threads_take_turns_and_different_devices_do_not_wait(tmp_path):
    with turn(tmp_path, names=["gpu-0"]).taken(1.0):
        other = turn(tmp_path, names=["gpu-1"], sleep=never)
        same = turn(tmp_path, names=["gpu-1", "gpu-0"], wait_s=0.01)
        said = []

        def ask():
            with other.taken(1.0):
                said.append(other.disturbances())
            with same.taken(1.0):
                said.append(same.disturbances())

        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
    assert said == [(), ("another thread of this process measured on gpu-0 at the same time",)]


def test_where_there_can_be_no_lock_one_warning_and_no_waiting(tmp_path):
    (tmp_path / "locks").mkdir()
    (tmp_path / "locks").chmod(0o777)
    mine = turn(tmp_path)
    with pytest.warns(TunebookWarning, match="TUNEBOOK_LOCKS"), mine.taken(1.0):
        assert mine.disturbances() == ()
    with mine.taken(1.0):
        pass


def test_nothing_is_left_open(tmp_path):
    before = len(list(Path("/proc/self/fd").iterdir()))
    for wait_s in (0.0, 1.0):
        for _ in range(20):
            with turn(tmp_path, wait_s).taken(1.0):
                pass
    assert len(list(Path("/proc/self/fd").iterdir())) == before


# -------------------------------------------------------------------------------------------------- which device it is


def test_a_gpu_has_one_name_whatever_number_it_has_in_a_process(driver, monkeypatch):
    assert cuda_names(driver) == ("Made Up 0", "Made Up 1", "Made Up 2", "Made Up 3")
    third = cuda_uuid(2, driver)
    code = (
        "import sys; from tunebook._measure.device_lock import *;"
        "print(cuda_uuid(0, sys.argv[1]), cuda_names(sys.argv[1]))"
    )
    seen = subprocess.run(
        [sys.executable, "-c", code, driver],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "2"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert seen.stdout == f"{third} ('Made Up 2',)\n"
    assert third == "12" * 16
    assert cuda_uuid(9, driver) is None


def test_without_a_driver_no_gpu_is_found():
    assert (cuda_names("libnothing.so"), cuda_uuid(0, "libnothing.so")) == ((), None)


def test_calls_on_the_host_share_its_processor():
    assert physical_devices((np.ones(3),), "cpu") == ("cpu",)


@pytest.fixture
def _no_driver(monkeypatch):
    monkeypatch.setattr("tunebook._measure.device_lock.cuda_uuid", lambda ordinal: None)
    physical_name.cache_clear()  # where there is a GPU, its id is known by now
    yield
    physical_name.cache_clear()


@pytest.mark.usefixtures("_no_driver")
def test_every_device_that_an_array_is_spread_over_is_taken():

    class Gpu:
        platform = "gpu"

        def __init__(self, number):
            self.id = self.local_hardware_id = number

    spread = SimpleNamespace(shape=(4,), dtype="float32", device=SimpleNamespace(device_set={Gpu(1), Gpu(0)}))
    assert physical_devices([spread, np.ones(2)], "gpu") == ("gpu-0", "gpu-1")
    assert physical_devices((), "gpu", 3) == ("gpu-3",)
    assert physical_devices((), "gpu") == ("gpu-0",)
