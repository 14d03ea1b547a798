"""Candidates that hang, crash, exit, fill memory or print without end cost one candidate: with real processes."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from limits import HANG_S

from tunebook._base.errors import CompileError, Unsupported
from tunebook._base.vocabulary import Failure
from tunebook._measure.forked_worker import ChildTask, ForkedWorker

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
GOOD = 0


def times(launch, count):
    samples = []
    for _ in range(count):
        start = time.perf_counter_ns()
        launch()
        samples.append((time.perf_counter_ns() - start) * 1e-9)
    return samples


def run(launch):
    launch()
    return []


def worker_for(*candidates, timeout_s=HANG_S, first=run, sample=times):
    """A worker whose candidate 0 is good, and whose others are those given."""
    launches = [lambda: sum(range(1000)), *candidates]
    job = ChildTask(lambda index: first(launches[index]), lambda index, number: sample(launches[index], number))
    return ForkedWorker(job, timeout_s)


def number_of_child(worker):
    """The child's process id: a candidate's state is in the child, and only numbers come back."""
    return int(worker.sample(GOOD, 1).samples_s[0])


def child_number(_launch, _count):
    return [float(os.getpid())]


def is_gone(pid):
    """Whether a process has ended; one that nobody has collected yet has ended too."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return False


def becomes(condition):
    end = time.monotonic() + HANG_S
    while not (found := condition()) and time.monotonic() < end:
        time.sleep(0.01)
    return found


def descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


def children():
    """All children of this process, also those that have ended and were not collected."""
    found = set()
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # it ended while we looked, or is no process
            if int((process / "stat").read_text().rpartition(")")[2].split()[1]) == os.getpid():
                found.add(process.name)
    return found


def segfault():
    ctypes.string_at(0)


def spin():
    while True:
        pass


def print_forever():
    while True:
        print("x" * 10_000)


def print_a_lot_and_abort():
    for _ in range(2000):
        os.write(1, b"x" * 50_000)
    os.write(2, b"the last words")
    os.abort()


def raise_no_compile():
    raise CompileError("line 3: no")


def raise_value():
    raise ValueError("block of 48 does not divide 100")


def raise_memory():
    raise MemoryError("8 GiB of scratch")


def test_samples_are_seconds_and_a_check_alone_has_none():
    with worker_for() as worker:
        assert worker.prepare(GOOD) == ((), None, "")
        samples = worker.sample(GOOD, 5).samples_s
    assert len(samples) == 5
    assert all(type(s) is float and 0 < s < 60 for s in samples)


@pytest.mark.parametrize(
    ("candidate", "kind", "message"),
    [
        (segfault, "crash", "killed by SIGSEGV"),
        (os.abort, "crash", "killed by SIGABRT"),
        (lambda: os._exit(3), "crash", "the process exited with status 3"),
        (lambda: os._exit(0), "crash", "the process exited with status 0"),
        (lambda: sys.exit(3), "crash", "SystemExit: 3"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "memory", "killed by SIGKILL, as the system does"),
        (lambda: os.kill(os.getpid(), signal.SIGTERM), "crash", "killed by SIGTERM"),
        (lambda: os.closerange(3, 1000), "crash", "the process exited with status 1"),
        (raise_value, "launch", "ValueError: block of 48 does not divide 100"),
        (raise_no_compile, "compile", "CompileError: line 3: no"),
        (raise_memory, "memory", "MemoryError: 8 GiB of scratch"),
    ],
)
def test_a_failure_has_its_kind_and_reason_and_the_next_candidate_runs(candidate, kind, message):
    with worker_for(candidate) as worker:
        assert worker.prepare(GOOD).failure is None
        failure = worker.prepare(1).failure
        assert failure.kind == kind
        assert failure.message.startswith(message)
        assert len(worker.sample(GOOD, 3).samples_s) == 3


@pytest.mark.parametrize("candidate", [spin, print_forever, lambda: time.sleep(600)], ids=["spin", "print", "sleep"])
def test_one_that_never_ends_is_a_timeout_and_the_next_candidate_runs(candidate):
    with worker_for(candidate, timeout_s=4.5) as worker:
        answer = worker.prepare(1)
        assert answer.failure.kind == "timeout"
        assert answer.failure.message == "no answer within 4.5 s"
        assert len(answer.remote) <= 2048
        assert worker.prepare(GOOD).failure is None


def test_a_candidate_may_fail_at_any_run_and_not_only_at_the_first():
    runs = []

    def third_time_unlucky():
        runs.append(1)
        if len(runs) == 3:
            os.abort()

    with worker_for(third_time_unlucky) as worker:
        assert worker.prepare(1).failure is None
        assert worker.sample(1, 1).failure is None
        assert worker.sample(1, 1).failure.message == "killed by SIGABRT"


def test_a_crash_says_how_many_candidates_ran_before_it_in_the_same_process():
    with worker_for(os.abort) as worker:
        worker.prepare(GOOD)
        said = "killed by SIGABRT, in a process that had run 1 other candidate before"
        assert worker.prepare(1).failure.message == said


@LINUX
def test_a_memory_error_is_reported_even_while_the_hog_holds_on_to_its_memory():
    held = [None]

    def hog():
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + (64 << 20)
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
        for size in (100_000, 600, 1):  # ever smaller, so that there is no room left to report it in
            with contextlib.suppress(MemoryError):
                while True:
                    held[0] = (held[0], bytes(size))
        raise MemoryError

    with worker_for(hog) as worker:
        assert worker.prepare(GOOD).failure is None
        failure = worker.prepare(1).failure
        assert failure.kind == "memory"
        assert failure.message.startswith("MemoryError")
        assert worker.prepare(GOOD).failure is None
    assert held == [None], "what the child does, the parent does not see"


def test_a_hundred_megabytes_of_output_leave_the_last_two_kilobytes():
    with worker_for(print_a_lot_and_abort) as worker:
        answer = worker.prepare(1)
    assert answer.failure.message == "killed by SIGABRT"
    assert len(answer.remote) <= 2048
    assert "the last words" in answer.remote


def test_output_goes_neither_to_the_terminal_nor_to_the_test_runner(capfd):
    def chatty():
        print("from Python")
        os.write(2, b"from C")

    with worker_for(chatty) as worker:
        assert worker.prepare(1).failure is None
    assert capfd.readouterr() == ("", "")


def test_an_error_comes_back_with_its_traceback():
    with worker_for(raise_value) as worker:
        assert "in raise_value" in worker.prepare(1).remote


def wrong_if_seven(launch):
    return Failure(kind="wrong-result", message="is 7") if launch() == 7 else [0.25]


def test_the_result_of_the_first_run_comes_back_and_a_failed_candidate_is_never_sampled():
    with worker_for(lambda: 7, first=wrong_if_seven) as worker:
        assert worker.prepare(GOOD) == ((0.25,), None, "")
        assert worker.prepare(1) == ((), Failure(kind="wrong-result", message="is 7"), "")
        assert worker.sample(1, 3).failure.message == "is 7"


def test_a_candidate_is_prepared_once_before_it_is_sampled():
    did = []

    def first(index):
        did.append(1.0)
        return []

    with ForkedWorker(ChildTask(first, lambda _, number: [*did, number])) as worker:
        assert worker.sample(GOOD, 3).samples_s == (1.0, 3.0)
        assert worker.sample(GOOD, 4).samples_s == (1.0, 4.0)


def test_one_process_serves_until_it_is_lost():
    with worker_for(os.abort, raise_value, sample=child_number) as worker:
        first = number_of_child(worker)
        worker.prepare(2)
        assert number_of_child(worker) == first
        worker.prepare(1)
        assert number_of_child(worker) != first


def test_a_worker_lost_between_two_requests_fails_no_candidate():
    with worker_for(sample=child_number) as worker:
        lost = number_of_child(worker)
        os.kill(lost, signal.SIGKILL)
        assert becomes(lambda: is_gone(lost))
        assert number_of_child(worker) != lost


def test_processes_that_a_candidate_started_go_with_it(tmp_path):
    def parent_of_a_sleeper():
        sleeper = subprocess.Popen(["sleep", "600"])
        (tmp_path / "pid").write_text(str(sleeper.pid))
        sleeper.wait()

    with worker_for(parent_of_a_sleeper, timeout_s=10.0) as worker:
        assert worker.prepare(1).failure.kind == "timeout"
    sleeper = int((tmp_path / "pid").read_text())
    assert becomes(lambda: is_gone(sleeper))


def test_a_crash_is_noticed_though_a_forked_grandchild_holds_the_pipes(tmp_path):
    def fork_and_abort():
        pid = os.fork()
        if pid == 0:
            time.sleep(600)
        (tmp_path / "pid").write_text(str(pid))
        os.abort()

    with worker_for(fork_and_abort) as worker:
        assert worker.prepare(1).failure.message == "killed by SIGABRT"
    grandchild = int((tmp_path / "pid").read_text())
    assert becomes(lambda: is_gone(grandchild))


def test_a_candidate_that_forks_and_returns_twice_answers_once():
    with worker_for(os.fork) as worker:
        assert worker.prepare(1).failure is None
        assert len(worker.sample(1, 2).samples_s) == 2
        assert len(worker.sample(GOOD, 3).samples_s) == 3


@contextlib.contextmanager
def killed_parent(file, *, worker):
    """Yield the process ids that a program with a worker has written; it is killed by then."""
    command = [sys.executable, Path(__file__).parents[1] / "worker_processes.py", worker, file]
    with subprocess.Popen(command, env={"PYTHONPATH": ":".join(sys.path)}) as parent:
        assert becomes(file.exists)
        pids = [int(each) for each in file.read_text().split()]
        assert not any(map(is_gone, pids))
        parent.kill()
    yield pids


def test_a_worker_goes_with_a_parent_that_is_killed(tmp_path):
    with killed_parent(tmp_path / "pid", worker="running") as (worker,):
        assert becomes(lambda: is_gone(worker))


def test_a_worker_that_outlives_its_thread_goes_with_the_process_though_another_fork_holds_its_pipes(tmp_path):
    with killed_parent(tmp_path / "pids", worker="idle") as (worker, other):
        assert becomes(lambda: is_gone(worker))
        assert not is_gone(other)
        os.kill(other, signal.SIGKILL)


@LINUX
def test_a_worker_may_outlive_the_thread_that_forked_it():
    job = ChildTask(lambda _index: [], lambda _index, _number: child_number(None, 1))
    forked, pids = [], []

    def fork():
        forked.append(threading.get_native_id())
        pids.append(number_of_child(worker))

    with ForkedWorker(job, HANG_S, outlives_thread=True) as worker:
        thread = threading.Thread(target=fork)
        thread.start()
        thread.join()
        assert becomes(lambda: not Path(f"/proc/self/task/{forked[0]}").exists())
        assert number_of_child(worker) == pids[0]


@pytest.fixture
def heeds_ctrl_c():
    """Python raises nothing at Ctrl-C if it was started with that ignored, as background jobs of a shell are."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.promise("ctrl-c")
@pytest.mark.usefixtures("heeds_ctrl_c")
def test_ctrl_c_in_the_parent_ends_the_worker_and_is_the_parents(tmp_path):
    def sleep():
        (tmp_path / "pid").write_text(str(os.getpid()))
        os.kill(os.getppid(), signal.SIGINT)
        time.sleep(600)

    with worker_for(sleep) as worker:
        with pytest.raises(KeyboardInterrupt, match=r"^$"):
            worker.prepare(1)
        assert is_gone(int((tmp_path / "pid").read_text()))
        assert worker.prepare(GOOD).failure is None


@LINUX
def test_fifty_crashes_leave_no_descriptor_and_no_process():
    before = descriptors(), children()
    with worker_for(os.abort, lambda: os._exit(1)) as worker:
        worker.prepare(GOOD)
        assert len(children()) == len(before[1]) + 1, "the count sees a worker"
        for number in range(50):
            assert worker.prepare(1 + number % 2).failure.kind == "crash"
            assert (descriptors(), children()) == before


def test_a_program_that_ignores_its_children_still_learns_of_a_crash():
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with worker_for(os.abort) as worker:
            failure = worker.prepare(1).failure
            assert worker.prepare(GOOD).failure is None
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert (failure.kind, failure.message) == ("crash", "the process is gone; its status was collected elsewhere")


def test_closing_ends_the_process_and_closing_twice_is_fine():
    worker = worker_for(sample=child_number)
    child = number_of_child(worker)
    worker.close()
    worker.close()
    assert is_gone(child)


def output_of(script):
    """Run a script in which `kill_with(candidate)` returns how its worker died; warnings are errors there."""
    start = """
import atexit, ctypes, faulthandler, os, signal, warnings
from tunebook._measure.forked_worker import ChildTask, ForkedWorker
def kill_with(candidate):
    with ForkedWorker(ChildTask(first=lambda _: candidate(), sample=None)) as worker:
        return worker.prepare(0).failure.message
"""
    command = [sys.executable, "-W", "error", "-c", start + script]
    environment = {"PYTHONPATH": ":".join(sys.path)}
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert said.stderr == ""
    return said.stdout


def test_handlers_and_exit_functions_of_the_parent_are_not_the_childs():
    said = output_of("""
atexit.register(print, "exit handler", flush=True)
signal.signal(signal.SIGTERM, lambda *_: print("handled"))
print(kill_with(lambda: os.kill(os.getpid(), signal.SIGTERM)), flush=True)
""")
    assert said == "killed by SIGTERM\nexit handler\n"


def test_a_segfault_writes_nothing_to_the_parents_terminal():
    assert (
        output_of("""
faulthandler.enable(os.dup(2))
print(kill_with(lambda: ctypes.string_at(0)))
""")
        == "killed by SIGSEGV\n"
    )


def test_a_library_that_warns_of_forks_is_not_heard():
    assert (
        output_of("""
os.register_at_fork(before=lambda: warnings.warn("as JAX does", RuntimeWarning))
print(kill_with(os.abort))
""")
        == "killed by SIGABRT\n"
    )


def test_a_crash_leaves_no_core_file():
    with worker_for(first=lambda _: resource.getrlimit(resource.RLIMIT_CORE)) as worker:
        assert worker.prepare(GOOD).samples_s == (0, 0)


def test_garbage_of_the_parent_is_not_finalized_in_the_child(tmp_path):
    class Finalized:
        def __del__(self):
            (tmp_path / str(os.getpid())).touch()

    cycle = [Finalized()]
    cycle.append(cycle)
    del cycle
    with worker_for(gc.collect) as worker:
        worker.prepare(1)
    gc.collect()
    assert {file.name for file in tmp_path.iterdir()} <= {str(os.getpid())}


def test_a_thread_may_use_it_while_others_run():
    stop = threading.Event()
    bystander = threading.Thread(target=stop.wait)
    bystander.start()
    found = []

    def use():
        with worker_for(segfault) as worker:
            found.extend([worker.prepare(1).failure.message, worker.prepare(GOOD).failure])

    user = threading.Thread(target=use)
    user.start()
    user.join()
    stop.set()
    bystander.join()
    assert found == ["killed by SIGSEGV", None]


def test_numpy_results_are_right_in_the_child():
    np = pytest.importorskip("numpy")
    a = np.arange(10_000.0).reshape(100, 100)
    right = a @ a
    with worker_for(lambda: a @ a, first=lambda launch: [float(np.array_equal(launch(), right))]) as worker:
        assert worker.prepare(1).samples_s == (1.0,)


def test_a_platform_without_fork_is_an_error_that_names_the_remedy(monkeypatch):
    monkeypatch.delattr(os, "fork")
    with pytest.raises(Unsupported, match=r"which has no fork. Tune with isolate='never'"):
        worker_for()


# ------------------------------------------------------------------------------------------------- requests begun ahead


def test_a_request_that_was_begun_runs_once_and_its_reply_is_kept(tmp_path):
    runs = tmp_path / "runs"

    def counted():
        with runs.open("a") as file:
            file.write("x")

    with worker_for(counted) as worker:
        worker.begin(1)
        assert worker.has_answered(60.0)
        assert worker.prepare(1).failure is None
        assert worker.prepare(GOOD).failure is None
    assert runs.read_text() == "x"


def test_another_request_waits_for_the_one_that_was_begun_and_gets_its_own_reply():
    with worker_for(lambda: 1 / 0, first=run, sample=child_number) as worker:
        worker.begin(1)
        assert worker.prepare(GOOD).failure is None
        assert worker.prepare(1).failure.kind == "launch"


def test_a_request_that_was_begun_and_ends_the_child_is_reported_with_its_signal():
    with worker_for(lambda: os.kill(os.getpid(), signal.SIGSEGV)) as worker:
        worker.begin(1)
        assert worker.has_answered(60.0)
        assert "SIGSEGV" in worker.prepare(1).failure.message
        assert worker.prepare(GOOD).failure is None  # in another child


def test_a_worker_can_be_interrupted_while_another_thread_waits_for_its_reply():
    with worker_for(signal.pause) as worker:
        worker.begin(1)
        replies = []
        waiting = threading.Thread(target=lambda: replies.append(worker.prepare(1)))
        waiting.start()
        worker.interrupt()
        waiting.join(HANG_S)
        assert replies[0].failure.kind == "memory"  # as any SIGKILL is taken
