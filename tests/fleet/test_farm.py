"""Recordings tuned on many devices: everything once, nothing lost, and a worker that dies costs one try."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path

import farm_kernels
import numpy as np
import pytest
from limits import HANG_S

import tunebook as tb
from tunebook import fleet
from tunebook._selection.persistent_cache import default_book
from tunebook._selection.recording import saved_calls
from tunebook.fleet._farm.clusters import FarmWorker, gpus_here
from tunebook.fleet._farm.farm import fits
from tunebook.fleet._farm.task import Task, describe_worker, tune_call

HERE = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def stage(tmp_path, monkeypatch):
    """Where kernels find what they are to do, and workers find kernels."""
    monkeypatch.setenv("FARM_TEST", str(tmp_path))
    monkeypatch.setenv("TUNEBOOK_LOCKS", str(tmp_path / "locks"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), str(HERE.parent / "src")]))
    return tmp_path


def recorded(path, kernel=farm_kernels.quick, sizes=range(1, 4)):
    with tb.record() as calls:
        for n in sizes:
            kernel(np.ones(n))
    calls.save(path)
    return path


def log(stage):
    return [line.split() for line in (stage / "log").read_text().splitlines()] if (stage / "log").exists() else []


def wait_for(condition):
    deadline = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


# ------------------------------------------------------------------------------------------------ on this machine


def test_everything_is_tuned_on_this_machine_and_known_the_next_time(tmp_path):
    calls = recorded(tmp_path / "calls.json")
    steps = []
    first = fleet.tune_recording(calls, on_step=steps.append)
    assert (first.counts, first.ok) == ({"tuned": 3}, True)
    assert [s.done for s in steps if s.latest] == [1, 2, 3]
    assert all(result.worker and result.ran == 2 for result in first.results)
    assert {result.worker for result in first.results} != {f"{os.uname().nodename}:{os.getpid()}"}
    again = fleet.tune_recording(calls)
    assert again.counts == {"known": 3}
    assert len(list(default_book().items())) == 3


def test_the_program_uses_the_tuned_entry(tmp_path):
    fleet.tune_recording(recorded(tmp_path / "calls.json", sizes=[7]))
    assert farm_kernels.quick.selector.preview(
        farm_kernels.quick.kernel.invocation((np.ones(7),)), farm_kernels.quick.kernel
    ).source == "persistent"  # fmt: skip


def test_patterns_choose_the_problems_tuned_from_a_recording_in_memory(tmp_path):
    with tb.record() as calls:
        farm_kernels.quick(np.ones(5))
        farm_kernels.deadly(np.ones(5))
    assert [r.problem.op for r in fleet.tune_recording(calls, kernel="*.quick").results] == ["farm.quick@v0"]
    assert fleet.tune_recording(calls, device="gpu:*").results == ()


def test_a_dry_run_counts_new_problems_and_measures_nothing(tmp_path):
    calls = recorded(tmp_path / "calls.json", sizes=[1])
    fleet.tune_recording(calls)
    runs = len(log(tmp_path))
    calls = recorded(tmp_path / "calls.json", sizes=[1, 2])
    before = len(log(tmp_path))
    report = fleet.tune_recording(calls, dry_run=True)
    assert report.counts == {"known": 1, "new": 1}
    assert len(log(tmp_path)) == before > runs


def test_kernels_that_are_made_for_every_call_are_found(tmp_path):
    with tb.record() as calls:
        farm_kernels.executor(farm_kernels.PerCall(), np.ones(3))
    calls.save(tmp_path / "calls.json")
    assert tb.Recording.load(tmp_path / "calls.json")._calls.popitem()[1].kernel is not None
    assert fleet.tune_recording(tmp_path / "calls.json").counts == {"tuned": 1}
    assert fleet.tune_recording(tmp_path / "calls.json").counts == {"known": 1}


def test_a_problem_that_cannot_be_tuned_says_why_and_does_not_stop_the_rest(tmp_path):
    with tb.record() as calls:
        farm_kernels.quick(np.ones(1))
        farm_kernels.forgetful(np.ones(2))
        farm_kernels.broken(np.ones(3))
    calls.save(tmp_path / "calls.json")
    (tmp_path / "breaks").touch()
    text = (tmp_path / "calls.json").read_text()
    results = {r.problem.op: r for r in fleet.tune_recording(tmp_path / "calls.json").results}
    assert results["farm.quick@v0"].status == "tuned"
    assert results["farm.forgetful@v0"][1:3] == ("skipped", "it keeps nothing (store=False), so it would be lost")
    assert results["farm.broken@v0"].status == "failed"
    assert "it does not work" in results["farm.broken@v0"].detail
    for module, said in (
        (
            "no_such_module",
            "cannot be imported: No module named 'no_such_module'.*in the directory of no_such_module.py",
        ),
        ("__main__", "recorded in a script.*--import"),
        ("json", "json does not define farm.elsewhere@v0"),
    ):
        other = text.replace("farm_kernels", module).replace("farm.quick", "farm.elsewhere")
        (tmp_path / "other.json").write_text(other)
        (failed,) = fleet.tune_recording(tmp_path / "other.json", kernel="farm.elsewhere").results
        assert (failed.status, failed.tries) == ("failed", 1)
        assert re.search(said, failed.detail), failed.detail


def test_modules_that_are_named_define_kernels_too(tmp_path):
    calls = recorded(tmp_path / "calls.json", sizes=[1])
    calls.write_text(calls.read_text().replace('"module": "farm_kernels"', '"module": "__main__"'))
    assert fleet.tune_recording(calls, modules=["farm_kernels"]).counts == {"tuned": 1}


def test_a_call_from_another_kind_of_device_is_not_tuned_for_this_one(tmp_path):
    calls = recorded(tmp_path / "calls.json", sizes=[1])
    (call,) = saved_calls(calls)
    calls.write_text(calls.read_text().replace(call.problem.device, "gpu:Made Up"))
    (result,) = fleet.tune_recording(calls).results
    assert result[1:3] == ("skipped", "recorded on a gpu, but this worker has a cpu for it")


def test_a_worker_that_dies_costs_one_try(tmp_path):
    with tb.record() as calls:
        for n in (1, 2):
            farm_kernels.quick(np.ones(n))
        farm_kernels.deadly(np.ones(3))
    calls.save(tmp_path / "calls.json")
    (tmp_path / "deaths").write_text("1")
    report = fleet.tune_recording(tmp_path / "calls.json")
    assert report.counts == {"tuned": 3}
    assert {r.problem.op: r.tries for r in report.results} == {"farm.quick@v0": 1, "farm.deadly@v0": 2}


def test_a_call_that_always_kills_its_worker_fails_and_the_rest_goes_on(tmp_path):
    with tb.record() as calls:
        for n in (1, 2):
            farm_kernels.quick(np.ones(n))
        farm_kernels.deadly(np.ones(3))
    (tmp_path / "deaths").write_text("100")
    report = fleet.tune_recording(calls)
    assert report.counts == {"tuned": 2, "failed": 1}
    (failed,) = (r for r in report.results if r.status == "failed")
    assert (failed.tries, failed.problem.op) == (2, "farm.deadly@v0")
    assert "BrokenProcessPool" in failed.detail
    assert len([event for event, *_ in log(tmp_path) if event == "die"]) == 2


def test_killing_the_parent_ends_its_workers_and_finished_tunings_are_not_repeated(tmp_path):
    with tb.record() as calls:
        farm_kernels.quick(np.ones(1))
        (tmp_path / "go").touch()
        farm_kernels.stuck(np.ones(2))
    (tmp_path / "go").unlink()
    (tmp_path / "log").unlink()
    for call in list(calls):  # the quick one first
        calls._calls[call.problem] = replace(call, seconds=2.0 if call.problem.op == "farm.quick@v0" else 1.0)
    calls.save(tmp_path / "calls.json")
    parent = subprocess.Popen(
        [sys.executable, HERE / "farm_parent.py", tmp_path / "calls.json", "local"], stdout=subprocess.DEVNULL
    )
    wait_for(lambda: any(event == "stuck" for event, *_ in log(tmp_path)))
    worker = next(int(pid) for event, _, pid, _ in log(tmp_path) if event == "stuck")
    parent.kill()
    parent.wait()
    wait_for(lambda: not alive(worker))
    (tmp_path / "go").touch()
    report = fleet.tune_recording(tmp_path / "calls.json")
    assert {r.problem.op: r.status for r in report.results} == {"farm.quick@v0": "known", "farm.stuck@v0": "tuned"}


def alive(pid):
    with suppress(ProcessLookupError, FileNotFoundError):
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def test_two_at_once_on_a_device_do_not_measure_at_the_same_time(tmp_path):
    calls = recorded(tmp_path / "calls.json", sizes=range(1, 7))
    (tmp_path / "log").unlink()
    assert fleet.tune_recording(calls, at_once=2).counts == {"tuned": 6}
    assert len({pid for _, _, pid, _ in log(tmp_path)}) == 2
    said = [record.body.provenance.get("disturbances", ()) for record in default_book().items()]
    assert not any("measured on cpu" in reason for reasons in said for reason in reasons)


def test_a_spent_budget_skips_the_rest_and_the_next_run_goes_on(tmp_path):
    calls = recorded(tmp_path / "calls.json", sizes=range(1, 4))
    first = fleet.tune_recording(calls, budget="2 trials")
    assert sum(r.ran for r in first.results) == 2
    assert [r.detail for r in first.results if r.status == "skipped"] == ["the budget is spent"]
    assert fleet.tune_recording(calls).counts == {"tuned": 3}, "one candidate each is no finished tuning"
    assert fleet.tune_recording(calls).counts == {"known": 3}


def test_a_spent_budget_skips_all_calls_that_are_left(tmp_path):
    calls = recorded(tmp_path / "calls.json", sizes=range(1, 5))
    report = fleet.tune_recording(calls, budget="1 trial")
    assert report.counts == {"tuned": 1, "skipped": 3}
    assert {r.detail for r in report.results if r.status == "skipped"} == {"the budget is spent"}
    assert [r.complete for r in report.results if r.status == "tuned"] == [False]


# ------------------------------------------------------------------------------------------------ any other executor


def test_any_executor_will_do(tmp_path):
    calls = recorded(tmp_path / "calls.json")
    with ThreadPoolExecutor(2) as executor:
        assert fleet.tune_recording(calls, over=executor, at_once=2).counts == {"tuned": 3}
        assert fleet.tune_recording(calls, over=executor).counts == {"known": 3}
    assert fleet.tune_recording(calls, over=executor).counts == {"failed": 3}, "it was shut down"


def test_a_pool_of_the_users_own_that_breaks_is_reported(tmp_path):
    calls = recorded(tmp_path / "calls.json", farm_kernels.deadly, sizes=[1])
    (tmp_path / "deaths").write_text("100")
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as executor:
        (result,) = fleet.tune_recording(calls, over=executor).results
    assert (result.status, result.tries) == ("failed", 2)


def test_an_unknown_cluster_is_an_error_that_lists_the_known_ones(tmp_path):
    calls = recorded(tmp_path / "calls.json", sizes=[1])
    with pytest.raises(
        tb.DefinitionError, match=r"cluster over='slurm://x'; use 'local', 'dask://host:port'.*Executor"
    ):
        fleet.tune_recording(calls, over="slurm://x")
    with pytest.raises(tb.DefinitionError, match=r"unknown cluster over='dask'"):
        fleet.tune_recording(calls, over="dask")
    with pytest.raises(tb.DefinitionError, match="at_once=0"):
        fleet.tune_recording(calls, at_once=0)


def test_results_go_into_the_book_that_is_named(tmp_path):
    calls = recorded(tmp_path / "calls.json", sizes=[1])
    fleet.tune_recording(calls, book=tmp_path / "team")
    there = tb.PersistentCache("x", tmp_path / "team").store
    (record,) = there.items()
    assert record.head.decided
    assert record.body.measurements


def test_an_entry_known_only_to_a_worker_reaches_the_book(tmp_path, monkeypatch):
    """As after a parent that was killed before it could keep a result."""
    calls = recorded(tmp_path / "calls.json", sizes=[1])
    assert tune_call(Task(*saved_calls(calls))).status == "tuned"
    report = fleet.tune_recording(calls, book=tmp_path / "team")
    assert report.counts == {"known": 1}
    assert len(list(tb.PersistentCache("x", tmp_path / "team").store.items())) == 1


def test_entries_of_the_book_travel_to_workers_without_them(tmp_path, monkeypatch):
    calls = recorded(tmp_path / "calls.json", sizes=[1])
    fleet.tune_recording(calls, book=tmp_path / "team")
    monkeypatch.setenv("TUNEBOOK_HOME", str(tmp_path / "another machine's home"))
    assert fleet.tune_recording(calls, book=tmp_path / "team").counts == {"known": 1}


# ------------------------------------------------------------------------------------------------ workers and devices


def worker(name, device, kind):
    return FarmWorker(name, None, device, kind)


def fitting(workers, device):
    return [each.name for each in workers if fits(each, workers, device)]


def test_problems_go_to_devices_of_their_kind_then_of_their_platform():
    workers = [worker("a", "1", "gpu:H100"), worker("b", "2", "gpu:H200"), worker("c", "3", "cpu:X")]
    assert fitting(workers, "gpu:H200") == ["b"]
    assert fitting(workers, "gpu:A100") == ["a", "b"]
    assert fitting(workers, "cpu:Y") == ["c"]
    assert fitting(workers, "tpu:v5") == ["c"], "which finds out that it has none, or has one that nobody knew of"
    assert fitting([worker("d", "", "")], "gpu:H200") == ["d"]


def test_a_worker_describes_its_host_and_devices():
    host, devices = describe_worker()
    assert host.startswith(os.uname().nodename)
    assert devices[-1][1] == "cpu"
    assert devices[-1][0].startswith("cpu:")


def test_only_gpus_visible_to_the_process_are_listed(tmp_path, monkeypatch):
    for n in range(3):
        (tmp_path / "gpus" / f"0000:{n}").mkdir(parents=True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpus_here(tmp_path / "gpus") == ["0", "1", "2"]
    assert gpus_here(tmp_path / "none") == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,GPU-1")
    assert gpus_here(tmp_path / "gpus") == ["2", "GPU-1"]


# ------------------------------------------------------------------------------------------------ Dask


@pytest.fixture(scope="module")
def cluster():
    """Two workers on loopback, each with a nanny that starts it again."""
    distributed = pytest.importorskip("distributed")
    from dask import config

    path = os.pathsep.join([str(HERE), str(HERE.parent / "src")])
    # A worker that a busy machine holds up is not a lost one.
    waits = {"distributed.comm.timeouts.connect": f"{HANG_S}s", "distributed.comm.timeouts.tcp": f"{HANG_S}s"}
    with (
        config.set({**waits, "distributed.scheduler.worker-ttl": None}),
        distributed.LocalCluster(
            n_workers=2,
            threads_per_worker=1,
            processes=True,
            dashboard_address=":0",  # None is port 8787 for some releases, which another run of the tests may have
            host="127.0.0.1",
            silence_logs=50,
            memory_limit=None,
            env={"PYTHONPATH": path},
        ) as cluster,
    ):
        yield cluster


@pytest.fixture
def dask(cluster, stage, monkeypatch):
    """The address; workers are told where this test's stage and book are."""
    from distributed import Client

    given = {name: os.environ[name] for name in ("FARM_TEST", "TUNEBOOK_LOCKS", "TUNEBOOK_HOME")}
    given["TUNEBOOK_HOME"] = str(stage / "workers")  # another book than the parent's, as on another machine
    with Client(cluster, set_as_default=False) as client:
        # The scheduler may not know yet that a worker is gone, which then answers with an error.
        wait_for(lambda: [*client.run(_set_environment, given, on_error="return").values()] == [None, None])
    return cluster.scheduler_address.replace("tcp://", "dask://")


def _set_environment(given):
    os.environ.update(given)


def test_dask_workers_tune_and_the_results_come_home(tmp_path, dask):
    calls = recorded(tmp_path / "calls.json")
    report = fleet.tune_recording(calls, over=dask)
    assert report.counts == {"tuned": 3}
    assert len(list(default_book().items())) == 3
    assert fleet.tune_recording(calls, over=dask).counts == {"known": 3}
    assert len({r.worker for r in report.results}) == 1, "one worker for the host's one processor"


def test_a_dask_worker_that_dies_costs_one_try_and_another_takes_its_place(tmp_path, dask):
    with tb.record() as calls:
        farm_kernels.quick(np.ones(1))
        farm_kernels.deadly(np.ones(3))
    (tmp_path / "deaths").write_text("1")
    report = fleet.tune_recording(calls, over=dask)
    assert report.counts == {"tuned": 2}
    assert {r.problem.op: r.tries for r in report.results}["farm.deadly@v0"] == 2


def test_an_executor_of_dasks_own_will_do_too(tmp_path, dask):
    from distributed import Client

    calls = recorded(tmp_path / "calls.json")
    with Client(dask.replace("dask://", "tcp://"), set_as_default=False) as client:
        report = fleet.tune_recording(calls, over=client.get_executor(pure=False), at_once=2)
    assert report.counts == {"tuned": 3}


def test_an_unreachable_scheduler_is_an_error_that_names_its_address(tmp_path):
    pytest.importorskip("distributed")
    import dask

    calls = recorded(tmp_path / "calls.json", sizes=[1])
    with (
        dask.config.set({"distributed.comm.timeouts.connect": "1s"}),
        pytest.raises(tb.Unsupported, match=r"cannot reach a Dask scheduler at 127\.0\.0\.1:1"),
    ):
        fleet.tune_recording(calls, over="dask://127.0.0.1:1")


# ------------------------------------------------------------------------------------------------ MPI


@pytest.mark.skipif(find_spec("mpi4py") is None, reason="mpi4py is not installed")
def test_ranks_of_mpi_tune(tmp_path):
    calls = recorded(tmp_path / "calls.json")
    mpiexec = Path(sys.executable).with_name("mpiexec")
    command = [mpiexec if mpiexec.exists() else "mpiexec", "-n", "3", sys.executable, "-m", "mpi4py.futures"]
    command += [HERE / "farm_parent.py", calls, "mpi"]
    # Open MPI refuses to run for root, as containers do, unless it is told twice. MPICH does not look.
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    done = subprocess.run(
        command, env={**os.environ, **allowed}, capture_output=True, text=True, timeout=HANG_S, check=False
    )
    assert done.stdout.splitlines()[-1:] == ["{'tuned': 3}"], done.stderr
    assert len(list(default_book().items())) == 3


# ------------------------------------------------------------------------------------------------ for long


@pytest.mark.slow
def test_workers_that_are_killed_all_the_time_lose_nothing_that_was_reported(tmp_path):
    calls = recorded(tmp_path / "calls.json", farm_kernels.lazy, sizes=range(1, 41))
    (tmp_path / "log").unlink()
    over = threading.Event()

    def kill_every_third():
        """Kill whoever begins every third attempt at a problem."""
        seen = []
        while not over.wait(0.01):
            for event, size, pid, _ in log(tmp_path):
                if event == "lazy" and (size, pid) not in seen:
                    seen.append((size, pid))
                    if len(seen) % 3 == 0:
                        with suppress(ProcessLookupError):
                            os.kill(int(pid), signal.SIGKILL)

    killer = threading.Thread(target=kill_every_third)
    killer.start()
    try:
        report = fleet.tune_recording(calls)
    finally:
        over.set()
        killer.join()
    assert len(report.results) == 40
    kept = {record.problem for record in default_book().items() if record.head.decided}
    assert {r.problem for r in report.results if r.status == "tuned"} <= kept
    assert all(r.tries == 2 for r in report.results if r.status == "failed")
    assert sum(r.tries for r in report.results) > 40, "some were killed"
    again = fleet.tune_recording(calls)
    assert again.ok
    assert again.counts["known"] >= report.counts["tuned"]
