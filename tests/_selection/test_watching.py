"""A program can be watched: events that cannot break it, a log, a line on the terminal."""

from __future__ import annotations

import io
import logging
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
from kernels import FakeClock, fake_tuner, job

import tunebook as tb
from tunebook._base.vocabulary import Event
from tunebook._tuning.job import Step
from tunebook._tuning.progress import line_of_call

EVENTS_PAGE = Path(__file__).parents[2] / "docs" / "events.md"


def kernel(clock=None, **options):
    clock = clock or FakeClock()
    options = {"heuristic": {"b": 1}, "store": False, "name": "mm", "tuner": fake_tuner(clock), **options}

    @tb.tunable(space=tb.Space(b=[1, 2, 3]), **options)
    def matmul(n, *, config):
        if config.b == 3:
            raise ValueError("no shared memory")
        clock.spend(config.b * 1e-3)
        return n

    return matmul


class TestListeners:
    def test_an_error_in_a_listener_is_one_warning_and_the_call_goes_on(self):
        heard = []
        matmul = kernel(on_event=heard.append)  # takes no data: a TypeError each time
        matmul.selector.listen(lambda event, **_: heard.append(event))
        with pytest.warns(
            tb.TunebookWarning, match=r"a listener to events failed: TypeError.*on_event\(event, \*\*data\)"
        ):
            assert matmul(1) == 1
        for _ in range(3):
            assert matmul(1) == 1
        assert heard[0] == "autotune_start"
        assert heard[-1] == "cache_hit"

    def test_a_lone_listener_that_fails_does_not_fail_warm_calls(self):
        def listener(event, **_):
            if event == "cache_hit":
                raise KeyError("mine")

        matmul = kernel(on_event=listener)
        matmul(1)
        with pytest.warns(tb.TunebookWarning, match="KeyError.*test_watching.py:"):
            assert matmul(1) == 1
        assert [matmul(1) for _ in range(3)] == [1, 1, 1]

    def test_a_listener_that_cannot_be_called_is_named_with_its_own_line(self):
        def hears(event):
            pass

        line = hears.__code__.co_firstlineno
        with pytest.warns(
            tb.TunebookWarning, match=rf"TypeError.*\(test_watching\..*hears, .*test_watching\.py:{line}\)"
        ):
            kernel(on_event=hears)(1)

    def test_an_interrupt_in_a_listener_passes(self):
        def listener(event, **_):
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            kernel(on_event=listener)(1)


def documented():
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \|(.*)\|$", EVENTS_PAGE.read_text(), re.MULTILINE)
    return {event: {*re.findall(r"`(\w+)`", data)} for event, data in rows}


def test_the_page_of_events_has_them_all_and_their_data(tmp_path, monkeypatch):
    told = {}

    def listener(event, **data):
        told.setdefault(event, set()).update(data)

    matmul = kernel(on_event=listener, store=tmp_path)
    matmul(1)
    matmul.selector.cache.clear()
    matmul.selector.forbid_reautotune = False
    matmul(1)
    matmul(1, config={"b": 2})
    with matmul.overlay(b=2):
        matmul(1)
    monkeypatch.setenv("TUNEBOOK_PIN", "mm:b=2")
    matmul(1)
    monkeypatch.delenv("TUNEBOOK_PIN")
    with tb.policy_override(matmul.selector, cache_miss_fallback="nearest"):
        matmul(2)
    with tb.policy_override(matmul.selector, cache_miss_fallback="heuristics"):
        matmul(3)
    with (
        tb.policy_override(matmul.selector, allow_autotune=False, allow_heuristics=False),
        pytest.raises(tb.NoConfig),
    ):
        matmul(4)
    page = documented()
    assert set(page) == set(get_args(Event))
    # A fake clock is never disturbed, a prediction needs twenty sizes (tests/search/test_prediction.py), and the others
    # are of launches on a GPU: tests/adapters/test_triton_live.py.
    assert set(told) == set(get_args(Event)) - {"disturbed", "predicted", "live_progress", "rolled_back"}
    for event, names in told.items():
        always = {"device", "op_id", "call_key", "cfg", "called", "level"}
        assert names - always <= page[event], event
    assert all(field in EVENTS_PAGE.read_text() for field in Step._fields)


class TestLog:
    def test_a_tuning_is_told_at_info_and_candidates_at_debug(self, caplog):
        caplog.set_level(logging.INFO, logger="tunebook")
        kernel()(7)
        began, chose, failed = [record.getMessage() for record in caplog.records]
        assert began == "tuning mm@v0 (n: 7): 3 candidates"
        assert chose.startswith("chose Config(b=1) for mm@v0 (n: 7): 1 ms, fastest, 3 candidates, 1 failed, 3 tried")
        assert (
            failed
            == "mm@v0: 1 of 3 candidates (Config(b=3)) did not run and cannot be chosen: ValueError: no shared memory"
        )
        caplog.set_level(logging.DEBUG, logger="tunebook")
        caplog.clear()
        kernel()(8)
        assert "mm@v0: trying 1/3" in caplog.text
        assert "autotune_finish" in caplog.text

    def test_failures_of_different_kinds_have_a_line_each(self, caplog):
        caplog.set_level(logging.INFO, logger="tunebook")
        clock, errors = FakeClock(), {2: ValueError("small"), 3: MemoryError("full"), 4: ValueError("small")}

        @tb.tunable(space=tb.Space(b=[1, 2, 3, 4]), store=False, name="mm", tuner=fake_tuner(clock))
        def matmul(n, *, config):
            clock.spend(1e-3)
            if config.b in errors:
                raise errors[config.b]
            return n

        matmul(1)
        found = re.findall(r"(\d) of 4 candidates .* did not run and cannot be chosen: (.*)", caplog.text)
        assert sorted(found) == [("1", "MemoryError: full"), ("2", "ValueError: small")]

    def test_arguments_are_in_the_order_of_the_signature(self, caplog):
        caplog.set_level(logging.INFO, logger="tunebook")
        tb.tunable(lambda q, k, *, config: q, space=[{"b": 1}], store=False, name="mm")(1, 2)
        assert "tuning mm@v0 (q: 1; k: 2): 1 candidate" in caplog.text

    def test_a_tuning_after_an_interrupt_says_that_it_goes_on(self, caplog, tmp_path):
        caplog.set_level(logging.INFO, logger="tunebook")
        stops, clock = [True], FakeClock()

        @tb.tunable(space=tb.Space(b=[1, 2, 3]), store=tmp_path, name="mm", tuner=fake_tuner(clock))
        def matmul(n, *, config):
            if config.b == 3 and stops:
                stops.clear()
                raise KeyboardInterrupt
            clock.spend(config.b * 1e-3)
            return n

        with pytest.raises(KeyboardInterrupt):
            matmul(1)
        caplog.clear()
        steps = []
        tb.tune(matmul, 1, progress=steps.append)
        assert {step.known for step in steps} == {2}
        assert "tuning mm@v0 (n: 1): 3 candidates, going on from 2 measurements" in caplog.text

    @pytest.mark.parametrize(
        ("code", "values", "why"),
        [
            (2, [1, 2], "by other code (the kernel, or a function that it uses, was edited)"),
            (1, [1, 2, 4], "with other candidates"),
        ],
    )
    def test_a_tuning_of_a_call_that_was_tuned_before_says_why(self, caplog, tmp_path, code, values, why):
        def tuned(code, values):
            clock = FakeClock()

            @tb.tunable(space=tb.Space(b=values), store=tmp_path, name="mm", tuner=fake_tuner(clock))
            def matmul(n, *, config):
                clock.spend(config.b * code)
                return n

            matmul(1)

        caplog.set_level(logging.INFO, logger="tunebook")
        tuned(1, [1, 2])
        assert "the entry was made" not in caplog.text
        tuned(code, values)
        assert f"tuning mm@v0 (n: 1): {len(values)} candidates; the entry was made {why}" in caplog.text

    def test_a_tuning_that_fails_says_why(self, caplog):
        caplog.set_level(logging.INFO, logger="tunebook")
        clock = FakeClock()

        @tb.tunable(space=[{"b": 1}], store=False, name="bad", tuner=fake_tuner(clock))
        def bad(n, *, config):
            raise ValueError("never")

        with pytest.raises(tb.NoConfig):
            bad(1)
        assert "not tuned: bad@v0 (n: 1): the only candidate failed: ValueError: never" in caplog.text

    def test_warnings_are_in_the_log_too(self, caplog):
        with pytest.warns(tb.TunebookWarning):
            kernel(on_event=lambda event: None)(1)
        (record,) = [r for r in caplog.records if r.levelno == logging.WARNING]
        assert record.name == "tunebook"
        assert "a listener to events failed" in record.getMessage()

    def test_a_warning_points_at_the_line_of_the_program(self):
        matmul = kernel(on_event=lambda event: None)
        with pytest.warns(tb.TunebookWarning) as caught:
            matmul(1)
        assert caught[0].filename == __file__

    def test_also_one_that_is_given_inside_of_a_with_block_of_the_library(self):
        matmul = kernel(store="/proc/nowhere/book")
        with pytest.warns(tb.TunebookWarning, match="cannot write to /proc/nowhere") as caught:
            matmul(1)
        assert {each.filename for each in caught} == {__file__}


PROGRAM = """
import sys
import tunebook as tb
@tb.tunable(space=tb.Space(b=[1, 2]), store=False, name="mm")
def matmul(n, *, config):
    return n
matmul(1)
print("logging" in sys.modules)
"""


@pytest.mark.parametrize("level", ["", "info", "debug"])
def test_the_log_goes_to_standard_error_if_the_environment_asks(level, monkeypatch):
    monkeypatch.setenv("TUNEBOOK_LOG", level)
    ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert ("tuning mm@v0 (n: 1): 2 candidates" in ran.stderr) == bool(level)
    assert ("trying 1/2" in ran.stderr) == (level == "debug")
    assert level or ran.stderr == ""


def test_another_level_is_one_warning_that_lists_the_levels_and_the_program_runs(monkeypatch):
    monkeypatch.setenv("TUNEBOOK_LOG", "loud")
    ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert ran.stderr.count("invalid TUNEBOOK_LOG='loud'; use info or debug. Nothing is logged") == 1
    assert "<string>:" in ran.stderr


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_step_shows_the_configuration_and_the_reason():
    steps = []
    tb.tune(kernel(), 1, progress=steps.append)
    shown = [repr(step) for step in steps]
    assert any("b=3: failed, raised ValueError: no shared memory" in text for text in shown)


class TestLineOfACall:
    @pytest.fixture
    def open_terminal(self, monkeypatch, caplog):
        caplog.set_level(logging.WARNING, logger="tunebook")  # or the log would stand for the line
        monkeypatch.setitem(sys.modules, "rich.console", None)

        def opened():
            monkeypatch.setattr(sys, "stderr", Terminal())
            return sys.stderr

        return opened

    def test_it_appears_after_a_moment_and_goes_at_the_end(self, open_terminal):
        terminal = open_terminal()
        with line_of_call("mm", None, after_s=-1.0) as show:
            show(Step("trying", 1, 4, 2.0, left_s=9.0))
            show(Step("racing", 100, 100, 3.0))
        text = terminal.getvalue()
        assert "mm trying" in text
        assert "1/4  2 s  up to 9 s left" in text
        assert text.endswith("left\r\x1b[2K")

    def test_a_short_tuning_shows_nothing(self, open_terminal):
        terminal = open_terminal()
        with line_of_call("mm", None, after_s=60.0) as show:
            show(Step("racing", 100, 100, 3.0))
        assert terminal.getvalue() == ""

    def test_an_interrupt_leaves_a_whole_line(self, open_terminal):
        terminal = open_terminal()

        def interrupted():
            with line_of_call("mm", None, after_s=-1.0) as show:
                show(Step("trying", 1, 4, 2.0))
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            interrupted()
        assert terminal.getvalue().endswith("1/4  2 s\n")

    def test_a_caller_with_its_own_progress_or_without_a_terminal_gets_no_line(self, open_terminal, monkeypatch):
        open_terminal()
        with line_of_call("mm", print) as show:
            assert show is print
        monkeypatch.setattr(sys, "stderr", io.StringIO())
        with line_of_call("mm", None) as show:
            assert show is None
        monkeypatch.setattr(sys, "stderr", None)
        with line_of_call("mm", None) as show:
            assert show is None


def test_the_time_left_has_the_race_in_it_while_candidates_are_tried():
    steps, clock = [], FakeClock()
    tb.tune(kernel(clock), 1, progress=steps.append)
    trying = [step for step in steps if step.doing == "trying"]
    for step in trying:
        assert step.left_s >= (steps[-1].elapsed_s - step.elapsed_s) * 0.9


def test_the_time_left_is_seldom_too_short_while_candidates_of_all_speeds_are_tried():
    short, told = 0, 0
    for seed in range(8):
        rng, clock, steps = random.Random(seed), FakeClock(), []
        work, _ = job(clock, {n: 5e-3 * (1 + 20 * rng.random() ** 2) for n in range(48)}, on_step=steps.append)
        fake_tuner(clock).tune(work)
        trying = [step for step in steps if step.doing == "trying"][2:]
        told += len(trying)
        short += sum(step.left_s < steps[-1].elapsed_s - step.elapsed_s for step in trying)
    assert told > 300
    assert short <= 0.03 * told


def test_a_search_tells_the_time_and_the_failures_of_the_whole_search():
    steps, clock, wide = [], FakeClock(), list(range(40))

    @tb.tunable(space=tb.Space(a=wide, b=wide), store=False, name="mm", tuner=fake_tuner(clock), check=False)
    def matmul(n, *, config):
        if config.b == 3:
            raise ValueError("no")
        clock.spend(1e-3 * (1 + abs(config.a - 17) + abs(config.b - 5)))
        return n

    began_s = clock.seconds
    tuned = tb.tune(matmul, 1, progress=lambda step: steps.append((clock.seconds - began_s, step)))
    for now_s, step in steps:
        assert step.elapsed_s == pytest.approx(now_s)
    trying = [step for _, step in steps if step.doing == "trying"]
    assert len(trying) > 100
    assert [step.done for step in trying if step.left_s is None] == [1], "one time says nothing about the others"
    for step in trying[1:]:
        assert step.left_s >= tuned.seconds - step.elapsed_s
    best = [step.best_s for step in trying if step.best_s is not None]
    assert best == sorted(best, reverse=True)
    failed = [sum(step.failures.values()) for step in trying if step.total > 16]
    assert failed == sorted(failed)
    assert failed[-1] == sum(m.failure is not None for m in tuned.measurements)
