"""`tunebook tune`, and the devices of this machine as it finds them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import farm_gpu
import farm_kernels
import numpy as np
import pytest
from fake_driver import driver as driver  # noqa: PLC0414 - a fixture
from limits import HANG_S
from test_farm import HERE, alive, log, recorded, wait_for
from test_farm import stage as stage  # noqa: PLC0414 - a fixture

import tunebook as tb
from tunebook import fleet
from tunebook._base.config_codec import readable
from tunebook._cli import main
from tunebook._selection.persistent_cache import default_book
from tunebook.fleet._farm.clusters import LocalProcesses

PAGE = HERE.parent / "docs" / "fleet-tuning.md"
PAGE_BLOCK = re.compile(r"```python title=\"(\S+)\"\n(.*?)```", re.DOTALL)


@pytest.fixture
def gpus(driver, monkeypatch):
    """A driver with four GPUs, of which this process may use two."""
    monkeypatch.setenv("LD_LIBRARY_PATH", str(Path(driver).parent))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")


# ------------------------------------------------------------------------------------------------ devices of a machine


def test_each_gpu_has_a_process_and_the_processor_one(gpus):
    cluster = LocalProcesses(1)
    workers = cluster.workers()
    cluster.close(workers)
    assert sorted(worker.kind.partition(" A")[0] for worker in workers if worker.kind.startswith("gpu:")) == [
        "gpu:Made Up 1",
        "gpu:Made Up 3",
    ]
    assert [worker.kind[:4] for worker in workers].count("cpu:") == 1
    assert len({worker.device for worker in workers}) == len({worker.name for worker in workers}) == 3


def test_problems_go_to_gpus_of_their_kind_and_are_known_there_afterwards(tmp_path, gpus):
    with tb.record() as calls:
        for n in range(1, 5):
            farm_gpu.on_gpu(farm_gpu.Array((n,)))
        farm_kernels.quick(np.ones(5))
    for call in list(calls):
        if call.args[0].shape[0] in (2, 4):
            del calls._calls[call.problem]
            elsewhere = replace(call, problem=call.problem._replace(device="gpu:Made Up 1"))
            calls._calls[elsewhere.problem] = elsewhere
    (tmp_path / "log").unlink()
    report = fleet.tune_recording(calls)
    assert report.counts == {"tuned": 5}
    assert all(result.problem == result.tuned_as for result in report.results)
    ran = {(event, size) for event, size, *_ in log(tmp_path)}
    assert ran == {("gpu-3", "1"), ("gpu-1", "2"), ("gpu-3", "3"), ("gpu-1", "4"), ("run", "5")}
    assert fleet.tune_recording(calls).counts == {"known": 5}


def test_with_two_at_once_one_compiles_while_the_other_measures(tmp_path):
    (tmp_path / "first").mkdir()
    calls = recorded(tmp_path / "calls.json", farm_kernels.compiled, sizes=[1, 2])
    (tmp_path / "first").rmdir()
    report = fleet.tune_recording(calls, at_once=2)
    assert report.counts == {"tuned": 2}, report.results


@pytest.fixture
def _in_the_background():
    """A shell starts background jobs with Ctrl-C ignored; programs that a test starts then inherit that."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.promise("ctrl-c", "busy-machine")
@pytest.mark.usefixtures("_in_the_background")
def test_ctrl_c_ends_the_workers_at_once(tmp_path):
    (tmp_path / "go").touch()
    calls = recorded(tmp_path / "calls.json", farm_kernels.stuck, sizes=[1])
    (tmp_path / "go").unlink()
    (tmp_path / "log").unlink()
    parent = subprocess.Popen([sys.executable, HERE / "farm_parent.py", calls, "local"], stderr=subprocess.PIPE)
    wait_for(lambda: log(tmp_path))
    parent.send_signal(signal.SIGINT)
    said = parent.communicate(timeout=HANG_S)[1]
    assert b"KeyboardInterrupt" in said
    wait_for(lambda: not alive(int(log(tmp_path)[0][2])))


COMMAND = """import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # tests may run with it ignored
from tunebook._cli import main
if __name__ == "__main__":
    sys.exit(main())
"""


def half_stuck_calls(tmp_path):
    """Record a quick call, and one whose second candidate waits for the file `go`."""
    with tb.record() as calls:
        farm_kernels.quick(np.ones(1))
        (tmp_path / "go").touch()
        farm_kernels.half_stuck(np.ones(2))
    (tmp_path / "go").unlink()
    for call in list(calls):  # the quick one first
        calls._calls[call.problem] = replace(call, seconds=2.0 if call.problem.op == "farm.quick@v0" else 1.0)
    calls.save(tmp_path / "calls.json")
    return tmp_path / "calls.json"


def start_command(tmp_path, calls):
    """Start `tunebook tune` in a process group of its own, and return it when the stuck candidate runs."""
    words = [sys.executable, "-c", COMMAND, "tune", calls]
    pipe = subprocess.PIPE
    command = subprocess.Popen(words, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
    wait_for(lambda: any(event == "half_stuck" for event, *_ in log(tmp_path)))
    return command, next(int(pid) for event, _, pid, _ in log(tmp_path) if event == "half_stuck")


def half_stuck_entry():
    (record,) = default_book().items("farm.half_stuck@v0")
    return record


def assert_that_the_next_run_goes_on(tmp_path, calls):
    (tmp_path / "go").touch()
    report = fleet.tune_recording(calls)
    assert {r.problem.op: r.status for r in report.results} == {"farm.quick@v0": "known", "farm.half_stuck@v0": "tuned"}
    measured = half_stuck_entry().body.measurements
    assert [m.failure for m in measured] == [None, None], "no candidate is to blame for the end of its worker"


@pytest.mark.promise("ctrl-c", "busy-machine")
@pytest.mark.parametrize("deaf", [False, True])
def test_ctrl_c_in_a_terminal_blames_no_candidate_and_tells_how_to_go_on(tmp_path, deaf):
    calls = half_stuck_calls(tmp_path)
    if deaf:
        (tmp_path / "deaf").touch()
    command, _ = start_command(tmp_path, calls)
    os.killpg(command.pid, signal.SIGINT)
    out, err = command.communicate(timeout=HANG_S)
    assert command.returncode == 130
    assert re.search(r"farm\.quick.* tuned ", out)
    assert " ".join(err.split()) == (  # wrapped
        "tunebook: interrupted tunebook: 1 of 2 calls is done. Measurements of the other are kept: the same command "
        "goes on from there."
    )
    if not deaf:
        assert [readable(m.config) for m in half_stuck_entry().body.measurements] == ["n=10"], "it had been measured"
    assert_that_the_next_run_goes_on(tmp_path, calls)


@pytest.mark.promise("ctrl-c", "busy-machine")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_end_of_the_command_blames_no_candidate(tmp_path, number):
    calls = half_stuck_calls(tmp_path)
    command, worker = start_command(tmp_path, calls)
    command.send_signal(number)
    command.communicate(timeout=HANG_S)
    wait_for(lambda: not alive(worker))
    assert [readable(m.config) for m in half_stuck_entry().body.measurements] == ["n=10"], "it had been measured"
    assert_that_the_next_run_goes_on(tmp_path, calls)


# ------------------------------------------------------------------------------------------------ the verb


@pytest.fixture
def run(capsys, monkeypatch, tmp_path):
    """Return a function that runs the command, and returns its exit code, output and errors."""
    monkeypatch.chdir(tmp_path)

    def call(*words):
        code = main(["tune", *map(str, words)])
        said = capsys.readouterr()
        return code, said.out, said.err

    return call


def test_the_verb_lists_new_problems_in_a_dry_run_and_then_tunes_them(tmp_path, run):
    calls = recorded(tmp_path / "calls.json", sizes=[1, 2])
    code, out, _ = run(calls, "--dry-run")
    assert (code, out.count(" new\n"), "took" in out) == (0, 2, False)
    assert list(default_book().items()) == []
    code, out, err = run(calls, "--watch", "--budget", "1m")
    assert (code, out.count(" tuned ")) == (0, 2)
    assert "[2/2] tuned farm.quick@v0 x=float64[" in err
    code, out, _ = run(calls, "--json")
    assert code == 0
    assert [entry["status"] for entry in json.loads(out)] == ["known", "known"]
    assert {entry["id"] for entry in json.loads(out)} == {
        p.stem for p in Path(os.environ["TUNEBOOK_HOME"]).glob("v1/*/*/*.json")
    }


def test_again_tunes_known_calls_from_scratch_but_not_the_choices_of_a_program(tmp_path, run):
    calls = recorded(tmp_path / "calls.json", sizes=[1, 2])
    tb.tune(farm_kernels.quick, np.ones(1))  # the program's own; in this process, an earlier test may have tuned it
    assert run(calls)[0] == 0
    (tmp_path / "log").unlink()
    code, out, _ = run(calls, "--again", "--dry-run", "--json")
    assert (code, sorted(entry["status"] for entry in json.loads(out))) == (0, ["known", "new"])
    code, out, _ = run(calls, "--again", "--json")
    known, tuned = sorted(json.loads(out), key=lambda entry: entry["status"])
    assert (code, tuned["status"], tuned["measured"]) == (0, "tuned", 2)
    assert "tunebook.tune(..., again=True) in the program" in known["detail"]
    assert {size for _, size, *_ in log(tmp_path)} == {"2"}


def test_a_tuning_that_the_budget_ends_is_unfinished_and_spoils_no_finished_one(tmp_path, run, capsys):
    calls = recorded(tmp_path / "calls.json", sizes=[1, 2])
    code, out, _ = run(calls, "--budget", "1 trial")
    assert (code, out.count(" unfinished "), out.count("the budget is spent")) == (1, 1, 1)
    assert "1 unfinished, 1 skipped" in out
    assert main(["ls"]) == 0
    assert "  unfinished  " in capsys.readouterr().out
    assert run(calls)[0] == 0
    before = {record.problem: record for record in default_book().items()}
    code, out, _ = run(calls, "--again", "--budget", "1 trial", "--watch")
    assert "1 measured; the earlier choice stands" in out
    assert {record.problem: record for record in default_book().items()} == before
    assert main(["ls"]) == 0
    assert "unfinished" not in capsys.readouterr().out


def test_an_unfinished_call_makes_the_exit_code_1_and_is_no_new_one(tmp_path, run):
    calls = recorded(tmp_path / "calls.json", sizes=[1])
    code, out, _ = run(calls, "--budget", "1 trial")
    assert (code, out.splitlines()[-1].partition(",")[0]) == (1, "1 unfinished")
    code, out, _ = run(calls, "--dry-run")
    assert (code, out.splitlines()[-1].partition(",")[0]) == (0, "1 unfinished")
    (call,) = json.loads(run(calls, "--dry-run", "--json")[1])
    assert (call["status"], call["complete"]) == ("new", False)


def test_a_call_that_fails_makes_the_exit_code_1(tmp_path, run):
    with tb.record() as calls:
        farm_kernels.broken(np.ones(1))
    calls.save("calls.json")
    (tmp_path / "breaks").touch()
    code, out, _ = run("calls.json")
    assert code == 1
    assert "failed" in out
    assert "all 2 candidates failed" in out


def test_a_module_that_is_not_here_is_told_once_with_the_directory_to_run_in(tmp_path, run):
    calls = recorded(tmp_path / "calls.json", sizes=[1, 2, 3])
    calls.write_text(calls.read_text().replace('"module": "farm_kernels"', '"module": "conv"'))
    code, out, _ = run(calls)
    assert code == 1
    assert out.count("Run the command in the directory of conv.py, or set PYTHONPATH") == 1
    assert out.count("as above") == 2
    assert "on the worker" not in out


def test_failed_candidates_are_counted_beside_the_measured_ones(tmp_path, run):
    with tb.record() as calls:
        farm_kernels.half_wrong(np.ones(1))
    calls.save("calls.json")
    code, out, _ = run("calls.json")
    assert code == 0
    assert "4 tried, 2 of them failed (1 with a wrong output)" in out


def test_failures_of_an_earlier_part_of_a_tuning_are_counted_among_all_candidates(tmp_path, run):
    with tb.record() as calls:
        farm_kernels.half_wrong(np.ones(1))
    calls.save("calls.json")
    assert run("calls.json", "--budget", "3 trials")[0] == 1
    code, out, _ = run("calls.json")
    assert code == 0
    ran, known = map(int, re.search(r"(\d) tried, (\d) known; 2 of the 4 failed \(1 with", out).groups())
    assert (ran + known, known > 0) == (4, True)


def test_patterns_that_fit_nothing_and_files_that_are_none(tmp_path, run):
    recorded(tmp_path / "calls.json", sizes=[1])
    code, out, err = run("calls.json", "--kernel", "other*")
    assert (code, out, err.splitlines()[-1]) == (1, "", "no call of the recording matches")
    tb.Recording().save("empty.json")
    assert run("empty.json") == (1, "", "empty.json has no calls\n")
    assert run("missing.json")[0] == 3
    assert run("calls.json", "--over", "nowhere")[0] == 2
    assert run("calls.json", "--budget", "soon")[0] == 2


def test_kernels_of_the_working_directory_are_found(tmp_path, run):
    (tmp_path / "mine.py").write_text("""
import numpy as np
import tunebook as tb

@tb.tunable(space=tb.Space(n=[10, 1000]), check=False)
def kernel(x, *, config):
    return sum(range(config.n))

if __name__ == "__main__":
    with tb.record() as calls:
        kernel(np.ones(3))
    calls.save("calls.json")
""")
    subprocess.run([sys.executable, "mine.py"], cwd=tmp_path, check=True)
    code, out, _ = run("calls.json")
    assert code == 1
    assert "--import mine" in out
    assert run("calls.json", "--import", "mine")[0] == 0


# ------------------------------------------------------------------------------------------------ the page


def test_the_code_of_the_page_runs(tmp_path):
    blocks = dict(PAGE_BLOCK.findall(PAGE.read_text()))

    for name, code in blocks.items():
        (tmp_path / name).write_text(code)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{HERE.parent / 'src'}"}
    assert blocks.keys() == {"kernels.py", "program.py", "tune.py"}
    for script in ("program.py", "tune.py"):
        done = subprocess.run(
            [sys.executable, script], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
