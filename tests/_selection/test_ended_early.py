"""A tuning that is interrupted, or dies with its process, is not lost: the next one goes on, and names the culprit."""

from __future__ import annotations

import signal
import subprocess
import sys
import traceback
from collections import Counter
from pathlib import Path

import pytest
from kernels import Costs, FakeClock, fake_tuner
from limits import HANG_S

import tunebook as tb
from tunebook._base.record_format import identity, merge

PROGRAM = Path(__file__).parents[1] / "interrupted_program.py"
LIBRARY = str(Path(tb.__file__).parent)


def start(*arguments):
    command = [sys.executable, str(PROGRAM), *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run(*arguments):
    process = start(*arguments)
    out, err = process.communicate(timeout=HANG_S)
    return process.returncode, out, err


def interrupt_when(process, line):
    """Interrupt a process when it has printed a line; return its output."""
    out = []
    for printed in process.stdout:
        out.append(printed)
        if printed.strip() == line:
            process.send_signal(signal.SIGINT)
            break
    rest, err = process.communicate(timeout=HANG_S)
    return "".join(out) + rest, err


def test_ctrl_c_keeps_the_measurements_and_a_restart_uses_them(tmp_path):
    out, err = interrupt_when(start(tmp_path), "step trying 4 4")
    assert "done" not in out
    assert out.count("ran 5\n") == 1
    assert "KeyboardInterrupt" in err
    assert "tunebook: nap@v0 is not tuned yet. 4 measurements are kept; the next call goes on from there." in err
    assert err.count(LIBRARY) <= 2, "frames of the library hide the program's own"
    code, out, err = run(tmp_path)
    assert (code, err) == (0, "")
    assert "ran 5\n" not in out, "a candidate that failed is not run again"
    assert "ran 300\n" not in out, "nor one that was many times slower than the best"
    code, out, _ = run(tmp_path)
    assert out.count("ran") == 1, "and the third process finds the choice"


def test_a_candidate_that_kills_the_process_is_named_and_skipped_at_the_next_start(tmp_path):
    code, out, _ = run(tmp_path, 2)
    assert code == -signal.SIGKILL
    assert out.rstrip().endswith("ran 2")
    code, out, err = run(tmp_path, 2)
    assert code == 0
    assert "the last tuning of nap@v0 died while it ran Config(ms=2); it is skipped now" in err
    assert "ran 2\n" not in out
    code, out, err = run(tmp_path, 2)
    assert (code, err) == (0, ""), "told once"


def interrupted_kernel(store, at, heuristic=None):
    clock, runs, limit = FakeClock(), [], Costs(at)  # which is not a part of the code

    @tb.tunable(space=tb.Space(b=[1, 2, 4, 64]), heuristic=heuristic, store=store, tuner=fake_tuner(clock), name="mm")
    def matmul(n, *, config):
        runs.append(config.b)
        if len(runs) == limit.by_config:
            raise KeyboardInterrupt
        clock.spend(config.b * 1e-3)
        return n

    return matmul, runs


def test_the_traceback_of_an_interrupt_has_one_frame_of_the_library(tmp_path):
    matmul, _ = interrupted_kernel(tmp_path, 3)
    with pytest.raises(KeyboardInterrupt) as caught:
        matmul(1)
    places = [(Path(frame.filename).name, frame.name) for frame in traceback.extract_tb(caught.tb)]
    mine = Path(__file__).name
    test = "test_the_traceback_of_an_interrupt_has_one_frame_of_the_library"
    assert places == [(mine, test), ("<tunebook matmul>", "call"), (mine, "matmul")]


def test_an_error_of_a_heuristic_shows_the_lines_of_the_program_alone():
    @tb.tunable(space=tb.Space(b=[1, 2]), heuristic=lambda n: {"b": len(m)}, store=False)  # noqa: F821 - the mistake
    def matmul(n, *, config):
        return n

    with pytest.raises(NameError, match="'m' is not defined") as caught:
        matmul(1)
    places = [(Path(frame.filename).name, frame.name) for frame in traceback.extract_tb(caught.tb)]
    mine, test = Path(__file__).name, "test_an_error_of_a_heuristic_shows_the_lines_of_the_program_alone"
    assert places == [(mine, test), ("<tunebook matmul>", "call"), (mine, "<lambda>")]


def test_an_error_in_the_library_itself_shows_its_lines(monkeypatch):
    @tb.tunable(space=tb.Space(b=[1, 2]), store=False)
    def matmul(n, *, config):
        return n

    monkeypatch.setattr(matmul.kernel, "candidates", None)
    with pytest.raises(TypeError, match="not callable") as caught:
        matmul(1)
    assert len(traceback.extract_tb(caught.tb)) > 3


@pytest.mark.parametrize("runs_for_s", [2.0, 11.0])
def test_an_interrupt_names_a_candidate_that_has_been_running_for_long(tmp_path, runs_for_s):
    clock, runs, how_long = FakeClock(), [], Costs(runs_for_s)

    @tb.tunable(space=tb.Space(b=[1, 2, 4]), heuristic={"b": 1}, store=tmp_path, tuner=fake_tuner(clock), name="mm")
    def matmul(n, *, config):
        runs.append(config.b)
        clock.spend(1e-3 if len(runs) < 4 else how_long.by_config)
        if len(runs) == 4:
            raise KeyboardInterrupt
        return n

    with pytest.raises(KeyboardInterrupt) as caught:
        matmul(1)
    *named, kept = caught.value.__notes__
    assert "kept" in kept
    hint = 'with AutotunePolicy(isolate="always"), candidate_timeout_s=60 ends it.'
    said = f"tunebook: Config(b={runs[-1]}) had been running for 11 s; {hint}"
    assert named == ([said] if runs_for_s > 5 else [])


@pytest.mark.parametrize("at", [3, 12])
def test_the_explanation_of_an_interrupted_tuning_does_not_claim_a_choice(tmp_path, at):
    matmul, _ = interrupted_kernel(tmp_path, at)
    with pytest.raises(KeyboardInterrupt) as caught:
        matmul(1)
    assert "measurements are kept" in caught.value.__notes__[0]
    told = matmul.explain(1)
    assert told.verdict is None
    assert isinstance(told.selection.tried, tuple)
    text = str(told)
    assert "answer: none" in text
    assert "no decision yet: a tuning was interrupted after" in text
    assert "so far" in text
    assert not any(word in text for word in ("winner", "chosen as", "every candidate failed"))
    assert matmul(1) == 1
    assert "winner" in str(matmul.explain(1))


def test_an_interrupted_tuning_on_demand_leaves_the_choice_as_it_was(tmp_path):
    matmul, runs = interrupted_kernel(tmp_path, 10**9)
    before = tb.tune(matmul, 1).config
    again, runs = interrupted_kernel(tmp_path, 2)
    with pytest.raises(KeyboardInterrupt):
        tb.verify(again, 1)
    assert len(runs) == 2
    again.selector.cache.clear()
    assert again.explain(1).selection.config == before
    assert "winner" in str(again.explain(1))


@pytest.mark.parametrize("trials", [1, 3])
def test_a_budget_that_ends_a_tuning_from_scratch_leaves_a_finished_choice_and_its_times(tmp_path, trials):
    matmul, _ = interrupted_kernel(tmp_path, 10**9, heuristic={"b": 64})
    before = tb.tune(matmul, 1)
    problem = before.problem
    record = matmul.selector.persistent.read(problem)
    again = tb.tune(matmul, 1, again=True, budget=f"{trials} trials")
    assert (again.ran, again.complete, again.config) == (trials, False, before.config)
    assert matmul.selector.persistent.read(problem) == record
    assert "the earlier choice stands; measured winner Config(b=" in repr(again)
    assert f", {trials} candidate{'' if trials == 1 else 's'}, " in repr(again)
    assert tb.tune(matmul, 1, again=True).complete
    assert matmul.selector.persistent.read(problem) != record


def test_a_budget_that_ends_a_tuning_replaces_an_unfinished_choice(tmp_path):
    matmul, _ = interrupted_kernel(tmp_path, 10**9, heuristic={"b": 64})
    assert tb.tune(matmul, 1, budget="1 trial").config.b == 64
    assert tb.tune(matmul, 1, again=True, budget="2 trials").config.b != 64


class TestHowMuchIsRunAgain:
    """Half of these candidates take three times as long as the best: not hopeless at the first look."""

    def kernel(self, store, at=10**9):
        clock, runs, limit = FakeClock(), [], Costs(at)

        @tb.tunable(space=tb.Space(b=list(range(12))), store=store, tuner=fake_tuner(clock), name="mm", check=False)
        def matmul(n, *, config):
            runs.append(config.b)
            if len(runs) == limit.by_config:
                raise KeyboardInterrupt
            clock.spend((1.0 + config.b / 100) * (3e-3 if config.b % 2 else 1e-3))
            return n

        return matmul, runs

    def counts(self, store, at=None):
        """Return the runs of each candidate in a new tuning, and in one that goes on after so many, or at its end."""
        matmul, runs = self.kernel(False)
        matmul(1)
        new = Counter(runs)
        matmul, _ = self.kernel(store, at or sum(new.values()))
        with pytest.raises(KeyboardInterrupt):
            matmul(1)
        matmul, runs = self.kernel(store)
        matmul(1)
        assert matmul.config_for(1).b == 0
        return new, Counter(runs)

    def test_candidates_that_left_the_race_are_not_run_again(self, tmp_path):
        new, again = self.counts(tmp_path)
        assert not {b for b in again if b % 2}
        assert sum(again.values()) < 0.8 * sum(new.values())

    def test_candidates_that_were_twice_as_slow_in_their_only_run_are_not_measured_in_full(self, tmp_path):
        new, again = self.counts(tmp_path, 13)
        assert {again[b] for b in again if b % 2} == {2}
        assert all(again[b] < new[b] for b in again if b % 2)

    def test_a_slow_first_run_that_compiled_something_does_not_cost_a_candidate_the_race(self, tmp_path):
        clock, limit, made = FakeClock(), Costs(0), Costs(set())

        @tb.tunable(space=tb.Space(b=[1, 2, 3]), store=tmp_path, tuner=fake_tuner(clock), name="mm", check=False)
        def matmul(n, *, config):
            limit.by_config -= 1
            if limit.by_config == 0:
                raise KeyboardInterrupt
            if config.b not in made.by_config:
                made.by_config.add(config.b)
                clock.spend(config.b * 10e-3)
            clock.spend(1e-3 / config.b)
            return n

        limit.by_config = 4
        with pytest.raises(KeyboardInterrupt):
            matmul(1)
        made.by_config.clear()
        matmul(1)
        assert matmul.config_for(1).b == 3


def test_without_a_book_an_interrupt_promises_nothing():
    matmul, _ = interrupted_kernel(False, 3)
    with pytest.raises(KeyboardInterrupt) as caught:
        matmul(1)
    assert not getattr(caught.value, "__notes__", [])


class TestWithoutAReferenceOrAHeuristic:
    def kernel(self, wrong, values=(1, 2, 3, 4), **options):
        clock = FakeClock()

        @tb.tunable(space=tb.Space(b=list(values)), store=False, name="mm", tuner=fake_tuner(clock), **options)
        def matmul(n, *, config):
            clock.spend(1e-3 if config.b in wrong else config.b * 2e-3)  # the wrong ones are the fastest
            return n + 1 if config.b in wrong else n

        return matmul

    @pytest.mark.parametrize("wrong", [{1}, {3}, {4}])
    def test_the_output_of_most_candidates_counts_as_right(self, wrong):
        matmul = self.kernel(wrong)
        name = f"Config\\(b={next(iter(wrong))}\\)"
        with pytest.warns(tb.TunebookWarning, match=rf"1 of 4 candidates \({name}\) gave a wrong output.*reference="):
            assert matmul(5) == 5
        assert matmul.config_for(5).b not in wrong

    def test_of_equally_many_the_first_candidate_is_right(self):
        matmul = self.kernel({2, 4})
        with pytest.warns(tb.TunebookWarning, match="2 of 4 candidates"):
            assert matmul(5) == 5

    def test_outputs_that_may_differ_are_not_compared(self):
        assert self.kernel({3}, check=False)(5) == 6

    def test_candidates_that_agree_are_no_news(self):
        assert self.kernel(set())(5) == 5


def test_a_wrong_output_is_one_warning_per_kernel_that_names_the_candidates():
    clock = FakeClock()

    @tb.tunable(
        space=tb.Space(b=[1, 2, 3]), store=False, name="mm", tuner=fake_tuner(clock), reference=lambda n: n,
    )  # fmt: skip
    def matmul(n, *, config):
        clock.spend(1e-3)
        return n + (config.b == 2)

    with pytest.warns(
        tb.TunebookWarning, match=r"mm@v0: 1 of 3 candidates \(Config\(b=2\)\) gave a wrong output"
    ) as caught:
        matmul(1)
    matmul(2)
    assert len(caught) == 1


@pytest.mark.parametrize("store", [True, False])
def test_a_wrong_output_warns_again_after_an_edit(tmp_path, store):
    def kernel(code):
        clock = FakeClock()

        @tb.tunable(
            space=tb.Space(b=[1, 2]),
            store=store and tmp_path,
            name="mm",
            tuner=fake_tuner(clock),
            reference=lambda n: n,
        )
        def matmul(n, *, config):
            clock.spend(1e-3)
            return n + code * (config.b == 2)

        return matmul

    for code in (1, 2):
        with pytest.warns(
            tb.TunebookWarning, match=rf"1 of 2 candidates .* gave a wrong output.* is {code + 1}, expected 1"
        ):
            kernel(code)(1)


def test_wrong_outputs_before_an_interrupt_are_told_by_the_tuning_that_goes_on(tmp_path):
    clock, left = FakeClock(), Costs(5)

    @tb.tunable(space=tb.Space(b=[1, 2, 3]), store=tmp_path, name="mm", tuner=fake_tuner(clock), reference=lambda n: n)
    def matmul(n, *, config):
        left.by_config -= 1
        if left.by_config == 0:
            raise KeyboardInterrupt
        clock.spend(1e-3)
        return n + (config.b == 2)

    with pytest.raises(KeyboardInterrupt):
        matmul(1)
    with pytest.warns(tb.TunebookWarning, match=r"1 of 3 candidates \(Config\(b=2\)\) gave a wrong output"):
        matmul(1)


def test_two_notes_of_one_problem_and_a_note_that_is_cut_short_do_no_harm(tmp_path):
    # In a process of its own: with a mapped file, the second line of notes ended it by SIGBUS.
    program = (
        "import sys; from pathlib import Path\n"
        "from tunebook._tuning import job_run\n"
        "job_run.lock_root = lambda: Path(sys.argv[1])\n"
        "with job_run.RunningCandidate('x') as one, job_run.RunningCandidate('x') as other:\n"
        "    (note,) = Path(sys.argv[1]).iterdir()\n"
        "    note.write_bytes(b'')\n"
        "    one.note('a'), other.note('b')\n"
        "print('alive', list(Path(sys.argv[1]).iterdir()))\n"
    )
    done = subprocess.run([sys.executable, "-c", program, tmp_path], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "alive []\n"), done.stderr


class TestOfAnEditedKernel:
    """The entry has a choice of the old code, which says nothing about the new code."""

    def kernel(self, store, code, at=10**9):
        clock, runs, limit = FakeClock(), [], Costs(at)

        @tb.tunable(space=tb.Space(b=[1, 2, 3, 64]), store=store, tuner=fake_tuner(clock), name="mm", check=False)
        def matmul(n, *, config):
            runs.append(config.b)
            if len(runs) == limit.by_config:
                raise KeyboardInterrupt
            if config.b == 3:
                raise ValueError("no")
            clock.spend((code - config.b) ** 2 * 1e-3 + 1e-3)
            return n

        return matmul, runs

    def edited(self, store, at):
        """Tune a kernel, edit it, and interrupt its tuning; return the note of the interrupt."""
        self.kernel(store, 1)[0](1)
        matmul, _ = self.kernel(store, 2, at)
        with pytest.raises(KeyboardInterrupt) as caught:
            matmul(1)
        return getattr(caught.value, "__notes__", [""])[0]

    @pytest.mark.parametrize("at", [5, 15])
    def test_an_interrupt_keeps_the_measurements_for_the_next_call(self, tmp_path, at):
        assert "mm@v0 is not tuned yet. 4 measurements are kept; the next call goes on" in self.edited(tmp_path, at)
        matmul, runs = self.kernel(tmp_path, 2)
        assert "a tuning was interrupted after 4 measurements, and the next one goes on" in str(matmul.explain(1))
        matmul(1)
        assert not {3, 64} & set(runs), "a candidate that failed, and one that was many times slower"
        assert matmul.config_for(1).b == 2
        assert "interrupted" not in str(matmul.explain(1))

    def test_a_second_interrupt_keeps_them_too(self, tmp_path):
        self.edited(tmp_path, 5)
        matmul, _ = self.kernel(tmp_path, 2, 2)
        with pytest.raises(KeyboardInterrupt) as caught:
            matmul(1)
        assert "4 measurements are kept" in caught.value.__notes__[0]

    def test_the_old_code_keeps_its_choice_and_its_measurements(self, tmp_path):
        self.edited(tmp_path, 15)
        old, runs = self.kernel(tmp_path, 1)
        assert (old.config_for(1).b, runs) == (1, [])
        told = old.explain(1)
        assert told.verdict.winner.measurement.code == old.kernel.code_checksum
        assert "interrupted" not in str(told)

    def test_the_explanation_shows_the_new_code_so_far(self, tmp_path):
        self.edited(tmp_path, 15)
        told = self.kernel(tmp_path, 2)[0].explain(1)
        assert told.verdict is None
        assert "so far     4 candidates measured, 1 failed" in str(told)
        assert "fastest    1 ms  b=2; the next call decides" in str(told)

    def test_merging_books_never_puts_them_in_the_place_of_a_finished_tuning(self, tmp_path):
        matmul, _ = self.kernel(tmp_path / "b", 2)
        matmul(1)
        self.edited(tmp_path / "a", 15)
        whole = matmul.selector.persistent.read(matmul.problem(1))
        some = self.kernel(tmp_path / "a", 2)[0].selector.persistent.read(matmul.problem(1))
        assert len({identity(m) for m in some.body.measurements} & {identity(m) for m in whole.body.measurements}) == 4
        for merged in (merge(whole, some), merge(some, whole)):
            assert all(m in merged.body.measurements for m in whole.body.measurements)
