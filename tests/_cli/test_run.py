"""`tunebook run -- COMMAND`: programs that nobody edits, in real processes with Triton's interpreter."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import textwrap
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest

from tunebook._cli import main
from tunebook._cli.run import summary
from tunebook._report.run_log import RunEvent, RunLog, read_log

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")

# No tensors: the interpreter then works without torch, which takes seconds to import.
LIBRARY = """
    import triton
    import triton.language as tl
    from triton import autotune
    from triton.runtime.autotuner import Autotuner

    def bench(call, quantiles):
        call()
        return [1.0, 1.0, 1.0]

    CONFIGS = [triton.Config({"BLOCK": block}) for block in (16, 32)]

    @autotune(CONFIGS, key=["n"], do_bench=bench)
    @triton.jit
    def plain(n, BLOCK: tl.constexpr):
        tl.arange(0, BLOCK)

    class Cached(Autotuner):
        def run(self, *args, **kwargs):
            return super().run(*args, **kwargs)

    @triton.jit
    def cached(n, BLOCK: tl.constexpr):
        tl.arange(0, BLOCK)

    cached = Cached(cached, cached.arg_names, CONFIGS, ["n"], None, None, do_bench=bench)
"""
APP = """
    import multiprocessing, subprocess, sys
    from fastlib import cached, plain

    def work(n):
        plain[(1,)](n)

    if __name__ == "__main__":
        plain[(1,)](1)
        cached[(1,)](1)
        subprocess.run([sys.executable, "-m", "fastlib.child"], check=True)
        process = multiprocessing.get_context("spawn").Process(target=work, args=(3,))
        process.start()
        process.join()
        print("done", process.exitcode)
"""
CHILD = "from fastlib import plain; plain[(1,)](2)"
# Prints whether this process waits for Triton, and for how many folders it would look for modules in our own.
PROBE = """
    import sys
    waits = any(type(finder).__name__ == "_AfterImport" for finder in sys.meta_path)
    print("waits" if waits else "does not", sum("_startup" in place for place in sys.path), "tunebook" in sys.modules)
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Return the working directory, with a library, programs, and an executable."""
    files = {
        "fastlib/__init__.py": LIBRARY,
        "fastlib/child.py": CHILD,
        "app.py": APP,
        "probe.py": PROBE,
        "probes/__main__.py": PROBE,
        "probes/__init__.py": "",
        "console-probe": f"#!{sys.executable}\n{textwrap.dedent(PROBE)}",
        "parent.py": "import subprocess, sys; subprocess.run([sys.executable, 'probe.py'], check=True)",
        "test_probe.py": "def test(): import probe",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(textwrap.dedent(text))
    (tmp_path / "console-probe").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("PYTHONPATH", ":".join([str(tmp_path), *filter(None, sys.path)]))
    return tmp_path


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def run(capfd):
    """Return a function that runs the verb here, and its command in a process."""

    def call(*words):
        code = main(["run", *words])
        return Done(code, *capfd.readouterr())

    return call


# -------------------------------------------------------------------------------------------------- taking kernels over


@needs_triton
def test_kernels_of_a_program_and_of_all_its_processes_are_tuned_and_found_by_the_next_run(place, run):
    done = run("--", sys.executable, "app.py")
    assert (done.returncode, done.stdout) == (0, "done 0\n"), done.stderr
    first, tuned, more = done.stderr.splitlines()
    assert first == "tunebook: 2 kernels ran on tunebook, in 3 processes"
    assert tuned.startswith("  tuned    4 problems in ")
    assert more.startswith("  more     tunebook explain ")
    assert main(["explain", more.split()[3].rstrip(";")]) == 0
    again = run("--", "sh", "-c", f"{sys.executable} app.py")
    assert again.stderr.splitlines()[1:] == ["  found    4 problems in the book", "  more     tunebook ls"]


@needs_triton
def test_a_program_that_wraps_the_method_of_tritons_class_keeps_its_wrapper_and_is_tuned(place, run):
    Path("wraps.py").write_text(
        textwrap.dedent("""
            from fastlib import Autotuner, cached, plain
            inner, seen = Autotuner.run, []
            def wrapper(kernel, *args, **kwargs):
                seen.append(args)
                return inner(kernel, *args, **kwargs)
            Autotuner.run = wrapper
            for n in (1, 2, 1):
                plain[(1,)](n)
                cached[(1,)](n)
            print(len(seen), Autotuner.run is wrapper)
        """)
    )
    done = run("--", sys.executable, "wraps.py")
    assert (done.returncode, done.stdout) == (0, "6 True\n"), done.stderr
    assert done.stderr.startswith("tunebook: 2 kernels ran on tunebook")
    assert "  tuned    4 problems in " in done.stderr


@needs_triton
def test_a_program_that_installs_tunebook_itself_has_its_own_options(place, run):
    Path("installs.py").write_text(
        textwrap.dedent("""
            from fastlib import plain
            from tunebook.adapters.triton import install
            install("another")
            plain[(1,)](1)
            print(plain.best_config)
        """)
    )
    done = run("--", sys.executable, "installs.py")
    assert (done.returncode, done.stdout.split()[0]) == (0, "BLOCK:"), done.stderr
    assert done.stderr.startswith("tunebook: no kernel ran on tunebook")


@needs_triton
def test_options_reach_the_processes(place, run):
    done = run("--mode", "frozen", "--book", "other", "--packages", "fastlib", "--", "fastlib/child.py")
    assert done.returncode == 0, done.stderr
    assert "  guessed  1 problem ran untuned, with the heuristic or the first candidate" in done.stderr
    assert not (place / "other").exists(), "frozen writes nothing"
    left = run("--packages", "another", "--budget", "10m", "--", "fastlib/child.py")
    assert left.returncode == 0, left.stderr
    assert left.stderr.startswith("tunebook: no kernel ran on tunebook")
    assert run("--quiet", "--mode", "off", "--", "fastlib/child.py").stderr == ""


@needs_triton
def test_importing_triton_and_kernels_loads_nothing_of_tunebook(place, run):
    code = "import importlib.util as u, sys; u.find_spec('triton'); import fastlib; print('tunebook' in sys.modules)"
    assert run("--", sys.executable, "-c", code + "; import fastlib.child").stdout == "False\n"


@needs_triton
def test_a_process_that_is_killed_loses_nothing_and_gives_its_signal(place, run):
    Path("killed.py").write_text("import fastlib.child, os; os.kill(os.getpid(), 9)")
    done = run("--", sys.executable, "killed.py")
    assert done.returncode == 128 + 9
    assert "tuned    1 problem" in done.stderr


@needs_triton
def test_a_triton_that_is_too_old_keeps_its_own_tuner_with_a_warning(place, run, monkeypatch):
    old = place / "old" / "triton"
    (old / "runtime").mkdir(parents=True)
    (old / "__init__.py").write_text("from triton.runtime import autotuner")
    (old / "runtime" / "__init__.py").touch()
    (old / "runtime" / "autotuner.py").write_text("class Autotuner:\n def run(self): return 'theirs'")
    code = "import triton.runtime.autotuner as a; print(a.Autotuner().run(), a.Autotuner().run())"
    monkeypatch.setenv("PYTHONPATH", "old", prepend=":")
    done = run("--", sys.executable, "-c", code)
    assert done.stdout == "theirs theirs\n"
    assert done.stderr.count("RuntimeWarning: tunebook run: kernels of triton keep their own tuner in ") == 1


def test_operations_of_ejkernel_are_taken_over(place, run):
    files = {
        "__init__": "from ejkernel import ops",
        "ops/__init__": """
            class ConfigSelectorChain:
                def choose(self, inv, kernel): ...
            class Executor:
                def _choose_heuristics_only(self, inv, kernel): ...
        """,
        "ops/core": "",
        "ops/config/__init__": "",
        "ops/config/selection": "",
        "ops/config/cache": "",
    }
    for name, text in files.items():
        path = place / "ejkernel" / f"{name}.py"
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(textwrap.dedent(text))
    code = "import ejkernel; print(ejkernel.ops.ConfigSelectorChain.choose.__module__)"
    assert run("--", sys.executable, "-c", code).stdout == "tunebook.adapters.ejkernel\n"


def test_tunable_functions_are_reported_and_recorded(place, run):
    Path("tunables.py").write_text(
        textwrap.dedent("""
            import subprocess, sys
            import tunebook as tb

            @tb.tunable(space=[{"step": 1}, {"step": 2}])
            def total(n, *, config):
                return n

            total(int(sys.argv[1]))
            if sys.argv[2:]:
                subprocess.run([sys.executable, __file__, *sys.argv[2:]], check=True)
        """)
    )
    done = run("--record", "calls.json", "--", "tunables.py", "7", "7", "8")
    assert done.returncode == 0, done.stderr
    calls = json.loads(Path("calls.json").read_text())["calls"]
    assert sorted((json.loads(call["problem"][2])["n"], call["count"]) for call in calls) == [(7, 2), (8, 1)]
    assert done.stderr.splitlines()[0] == "tunebook: recorded 2 calls in calls.json; next: tunebook tune calls.json"
    assert "guessed  2 problems" in done.stderr
    assert "tunebook ls" not in done.stderr, "the book has none of them"
    assert max(map(len, done.stderr.splitlines())) <= 80


def test_a_recording_has_every_kind_of_kernel_that_runs_on_tunebook_and_is_tuned_later(place, run):
    Path("ops.py").write_text(
        textwrap.dedent("""
            import tunebook as tb

            SPACE = [{"step": 1}, {"step": 2}]
            lengths = tb.table("lengths", space=SPACE, key=("n",), run=lambda n, *, config: n, inputs=lambda n: (n,))

            @tb.tunable(space=SPACE)
            def total(n, *, config):
                return n

            class Walk(tb.Kernel):
                def run(self, n, *, cfg):
                    return n

                def candidate_cfgs(self, inv):
                    return SPACE

                def heuristic_cfg(self, inv):
                    return SPACE[0]

            walk = Walk("walk")
            execute = tb.Executor(tb.ConfigSelectorChain(tb.ConfigCache(), persistent=tb.PersistentCache("ops")))
        """)
    )
    program = "import ops; ops.total(3), ops.lengths(n=4), ops.execute(ops.walk, 5)"
    done = run("--record", "calls.json", "--", sys.executable, "-c", program)
    assert done.returncode == 0, done.stderr
    calls = json.loads(Path("calls.json").read_text())["calls"]
    assert sorted(call["problem"][1] for call in calls) == ["lengths@v0", "ops.total@v0", "walk@v0"], done.stderr
    tuned = subprocess.run(
        [sys.executable, "-m", "tunebook", "tune", "calls.json", "--json"], capture_output=True, text=True, check=False
    )
    assert {entry["status"] for entry in json.loads(tuned.stdout)} == {"tuned"}, tuned.stderr


# ------------------------------------------------------------------------------------------------- which programs work


@pytest.mark.parametrize(
    "command",
    [
        [sys.executable, "probe.py"],
        ["probe.py"],
        [sys.executable, "-m", "probes"],
        ["-m", "probes"],
        ["./console-probe"],
        [sys.executable, "parent.py"],
        ["sh", "-c", "exec ./console-probe"],
        [sys.executable, "-m", "tunebook", "run", "--quiet", "--", sys.executable, "probe.py"],
    ],
    ids=lambda command: " ".join(command).replace(sys.executable, "python"),
)
def test_each_python_process_waits_for_triton_without_a_trace_in_its_path(place, run, command):
    done = run("--", *command)
    assert (done.returncode, done.stdout) == (0, "waits 0 False\n"), done.stderr
    assert done.stderr.splitlines()[0].startswith("tunebook: no kernel ran on tunebook")


def test_a_run_of_pytest_waits_for_triton(place, run):
    done = run("--", sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", "test_probe.py")
    assert done.returncode == 0
    assert "waits 0 False" in done.stdout


@pytest.mark.parametrize("option", ["-E", "-I", "-S"])
def test_python_without_its_environment_runs_as_it_is(place, run, option):
    assert run("--", sys.executable, option, "probe.py").stdout.startswith("does not")


def test_a_sitecustomize_of_the_user_runs_and_the_path_stays(place, run, monkeypatch):
    Path("site").mkdir()
    Path("site/sitecustomize.py").write_text("mine = True")
    code = "import sys, sitecustomize; print(sitecustomize.mine, sitecustomize.__file__, sys.path[1])"
    site = str(place / "site")
    monkeypatch.setenv("PYTHONPATH", site, prepend=":")
    done = run("--", sys.executable, "-c", code)
    assert done.stdout == f"True {site}/sitecustomize.py {site}\n", done.stderr


def test_an_error_in_a_sitecustomize_of_the_user_is_shown_as_python_does(place, run, monkeypatch):
    Path("site").mkdir()
    Path("site/sitecustomize.py").write_text("import a_module_that_is_missing")
    monkeypatch.setenv("PYTHONPATH", "site", prepend=":")
    done = run("--", sys.executable, "-c", "print('runs')")
    assert done.stdout == "runs\n"
    assert "No module named 'a_module_that_is_missing'" in done.stderr


# -------------------------------------------------------------------------------- exit codes, signals, standard input


@pytest.mark.parametrize("code", [0, 3])
def test_the_exit_code_is_that_of_the_command_and_streams_are_its_own(place, code):
    script = f"import sys; print(sys.stdin.read()); sys.exit({code})"
    command = [sys.executable, "-m", "tunebook", "run", "--quiet", "--", sys.executable, "-c", script]
    done = subprocess.run(command, input="to the command", capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (code, "to the command\n", "")


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ([], 2, "the command is missing; e.g. tunebook run -- python train.py"),
        (["--", "no-such-command"], 127, "no-such-command: command not found"),
        (["--budget", "9 trials", "--", "true"], 2, "--budget 9 trials: write a time, e.g. 30s or 10m"),
        (["--budget", "soon", "--", "true"], 2, "invalid budget='soon'"),
        (["--", "./text.txt"], 127, "./text.txt: command not found"),
        (["--", "./empty"], 126, "./empty: Exec format error"),
    ],
)
def test_a_command_that_cannot_be_run_has_the_exit_code_of_a_shell(place, run, words, code, said):
    Path("text.txt").touch()
    Path("empty").touch(mode=0o755)
    done = run(*words)
    assert done.returncode == code
    assert done.stderr.startswith(f"tunebook: {said}")


WAITER = """
    import os, signal, sys
    def handle(number, frame):
        os.write(1, b"got %d\\n" % number)
        sys.exit(40 + number)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, handle)
    os.write(1, b"ready\\n")
    while True:
        signal.pause()
"""


@pytest.fixture
def usual_signals():
    """Signals as in a terminal: under nohup, or in the background of a script, some are ignored, also by children."""
    numbers = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    before = {number: signal.signal(number, signal.SIG_DFL) for number in numbers}
    before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.promise("busy-machine")
@pytest.mark.usefixtures("usual_signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_to_the_run_reaches_the_command(place, number):
    Path("waiter.py").write_text(textwrap.dedent(WAITER))
    command = [sys.executable, "-m", "tunebook", "run", "--quiet", "--", sys.executable, "waiter.py"]
    # In a session of its own, without a terminal whose keys would send signals to both.
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            assert process.stdout.readline() == "ready\n"
            process.send_signal(number)
            assert process.stdout.readline() == f"got {number}\n"
            assert process.wait() == 40 + number
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # a lost signal would let both wait for ever


def test_ctrl_c_reaches_the_command_through_the_terminal_once(place):
    Path("keys.py").write_text(
        textwrap.dedent("""
            import os, signal
            count = 0
            def handle(number, frame):
                global count
                count += 1
                os.write(1, b"interrupted\\n")
            signal.signal(signal.SIGINT, handle)
            os.write(1, b"ready\\n")
            line = os.read(0, 100)
            print("counted", count, line)
        """)
    )
    # Not by `pty.fork`: where an earlier test has imported jax, a fork is a warning.
    terminal, its_end = pty.openpty()
    command = ["setsid", "--ctty", sys.executable, "-m", "tunebook", "run", "--", sys.executable, "keys.py"]
    process = subprocess.Popen(command, stdin=its_end, stdout=its_end, stderr=its_end)
    os.close(its_end)
    with process, os.fdopen(terminal, "r+b", buffering=0) as screen:
        seen = b""

        def wait_for(text):
            nonlocal seen
            while text not in seen:
                seen += screen.read(1000)

        wait_for(b"ready")
        screen.write(b"\x03")
        wait_for(b"interrupted")
        screen.write(b"go on\n")
        wait_for(b"no kernel ran")
        assert b"counted 1 b'go on\\n'" in seen
        assert process.wait() == 0


# ------------------------------------------------------------------------------------------------------------- the log


def test_the_log_has_a_line_per_event_and_times_each_tuning_once(tmp_path):
    path, now_s = tmp_path / "log", iter([10.0, 12.5])
    path.touch()
    log = RunLog(path, clock_s=lambda: next(now_s))
    problem = {"device": "cpu", "op_id": "k@v0", "call_key": "{}", "cfg": None}
    for event in ("autotune_start", "autotune_start", "autotune_progress", "autotune_finish"):
        log.hear(event, **problem)
    for _ in range(3):
        log.hear("cache_hit", level="memory", **problem)
        log.hear("cache_hit", level="persistent", **problem)
    with path.open("a") as file:
        file.write('["tuned", 1')  # of a process that a full disk stopped
    assert [(event.what, event.seconds) for event in read_log(path)] == [("tuned", 2.5), ("found", 0.0)]


def test_a_log_whose_command_has_ended_is_not_written(tmp_path):
    RunLog(tmp_path / "gone" / "log").note("taken", "k@v0")
    assert list(tmp_path.iterdir()) == []


def test_the_summary_counts_a_problem_once_over_all_processes():
    events = [
        RunEvent("taken", 1, "a@v0", "", 0.0, ""),
        RunEvent("tuned", 1, "a@v0", "p1", 2.0, ""),
        RunEvent("found", 2, "a@v0", "p1", 0.0, ""),
        RunEvent("found", 2, "a@v0", "p2", 0.0, ""),
        RunEvent("found", 3, "a@v0", "p2", 0.0, ""),
        RunEvent("guessed", 3, "b@v0", "p3", 0.0, ""),
        RunEvent("failed", 3, "c@v0", "p4", 1.0, "TuningFailed: every \x1b[2J candidate failed"),
        *(RunEvent("left", 3, f"other{i}", "", 0.0, "Own overrides _bench") for i in range(5)),
    ]
    assert list(summary(events)) == [
        "3 kernels ran on tunebook, in 3 processes",
        "  tuned    1 problem in 3 s; slowest: a@v0 2 s",
        "  found    1 problem in the book",
        "  guessed  1 problem ran untuned, with the heuristic or the first candidate",
        "  failed   c@v0: TuningFailed: every \\x1b[2J candidate failed",
        *(f"  left     other{i}: Own overrides _bench" for i in range(3)),
        "  left     and 2 more",
        "  more     tunebook explain p1; tunebook ls",
    ]
