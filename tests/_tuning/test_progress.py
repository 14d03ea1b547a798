"""What is seen of a tuning: on a terminal a line drawn over itself, in a notebook a changing output, else a log."""

from __future__ import annotations

import io
import os
import re
import struct
import sys
import time
from contextlib import contextmanager
from typing import get_args

import pytest
from limits import HANG_S

from tunebook._base.vocabulary import FailureKind
from tunebook._tuning.job import Step
from tunebook._tuning.progress import (
    FAILED,
    line_of_call,
    log_lines,
    progress_for,
    progress_line,
    progress_text,
    seconds_text,
)

STYLE = re.compile(r"\x1b\[[\d;]*m")


class Terminal(io.StringIO):
    def isatty(self):
        return True


STEPS = [
    Step("compiling", 2, 2, 1.0),
    Step("trying", 1, 2, 2.0, left_s=2.0),
    Step("racing", 100, 100, 3.0, failures={"timeout": 2, "nan": 1}, best_s=0.001, left_s=0.0),
]
END = "tuned  best 1 ms  1 gave NaN  2 timed out  3 s\n"


def drawn(stream, asked):
    show = progress_for(asked, "matmul", stream)
    for step in STEPS if show else ():
        show(step)
    return stream.getvalue()


def test_on_a_terminal_each_step_is_drawn_over_the_last():
    terminal = Terminal()
    line = progress_line("matmul", terminal)
    for step in STEPS:
        line(step)
    text = terminal.getvalue()
    assert text.count("\r") == 3
    assert text.count("\n") == 1
    assert "compiling" in text
    assert "1/2  2 s  up to 2 s left" in text
    assert text.endswith(END)


def test_where_rich_is_not_installed_the_line_is_plain(monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    plain, found = Terminal(), Terminal()
    for step in STEPS:
        progress_line("matmul", plain)(step)
        progress_for(None, "matmul", found)(step)
    assert found.getvalue() == plain.getvalue()


def test_with_rich_it_is_in_colour_and_says_the_same(monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    text = drawn(Terminal(), None)
    assert "\x1b[32mbest 1 ms" in text
    assert STYLE.sub("", text).endswith("\r\x1b[2K" + progress_text("matmul", STEPS[-1]) + "\n")
    assert "\x1b[?25l" not in text, "a cursor that is hidden stays hidden if the tuning fails"


def test_with_rich_it_is_cut_to_the_width_of_the_terminal(monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERM", "xterm-256color")
    last = STYLE.sub("", drawn(Terminal(), True)).rpartition("\x1b[2K")[2]
    assert len(last.rstrip("\n")) <= 40
    assert last.startswith("matmul tuned  best 1 ms")


LONG = "mypackage.layers.a_kernel_of_some_length@v0"
FAILURES = {"launch": 12, "wrong-result": 3}


@pytest.mark.parametrize("rich", [True, False])
@pytest.mark.parametrize("columns", [80, 60, 24])
def test_a_line_fits_into_one_row_of_the_terminal(columns, rich, monkeypatch):
    if rich:
        pytest.importorskip("rich")
    else:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    steps = [Step(doing, 33, 48, 75.0, FAILURES, 1.234e-3, left_s=75.0) for doing in ("compiling", "trying", "racing")]
    with open_pty(columns) as (reader, terminal):
        show = progress_for(None, LONG, terminal)
        for step in steps:
            show(step)
            time.sleep(0.06)  # it is drawn at most every 50 ms
        drawn = seen(reader, terminal)
    lines = STYLE.sub("", drawn).split("\r\x1b[2K")[1:]
    assert len(lines) == len(steps)
    assert all(0 < len(line) < columns for line in lines), lines
    assert "\n" not in drawn


def test_the_line_of_a_call_leaves_nothing_on_the_terminal(monkeypatch):
    with open_pty(60) as (reader, terminal):
        monkeypatch.setattr(sys, "stderr", terminal)
        with line_of_call("matmul", None, after_s=-1.0) as show:
            for step in STEPS:
                show(step)
        drawn = seen(reader, terminal)
    assert "matmul trying" in STYLE.sub("", drawn) or "matmul compiling" in STYLE.sub("", drawn)
    assert "\n" not in drawn
    assert drawn.endswith("\r\x1b[2K")


@contextmanager
def open_pty(columns):
    """Open a terminal that has so many columns; yield its end that a person sees, and its end that a program writes."""
    fcntl, pty, termios = (pytest.importorskip(name) for name in ("fcntl", "pty", "termios"))
    reader, writer = pty.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    with os.fdopen(writer, "w", encoding="utf-8") as terminal:
        yield reader, terminal
    os.close(reader)


def seen(reader, terminal):
    """Return all that was written to a terminal."""
    terminal.write("<end>")
    terminal.flush()
    drawn = b""
    while not drawn.endswith(b"<end>"):
        drawn += os.read(reader, 10_000)
    return drawn.decode().removesuffix("<end>")


def test_a_race_claims_neither_a_share_nor_a_time_left():
    text = progress_text("matmul", Step("racing", 16, 100, 3.0, best_s=0.001))
    assert text == "matmul racing the fastest  best 1 ms  3 s"


def test_a_tuning_that_was_interrupted_says_that_it_goes_on():
    text = progress_text("matmul", Step("trying", 1, 2, 3.0, known=12))
    assert text.endswith("1/2  3 s  going on from 12 measurements")


def test_elsewhere_it_is_quiet_unless_asked():
    assert drawn(io.StringIO(), None) == ""
    assert drawn(io.StringIO(), False) == ""
    assert drawn(io.StringIO(), True) == f"matmul {END}"


def test_a_log_has_a_line_every_ten_seconds_and_one_at_the_end():
    stream, now = io.StringIO(), [0.0]
    log = log_lines("matmul", stream, lambda: now[0])
    for second in range(35):
        now[0] = float(second)
        log(Step("trying", second, 35, float(second)))
    log(STEPS[-1])
    lines = stream.getvalue().splitlines()
    assert [line.split()[2] for line in lines[:-1]] == ["10/35", "20/35", "30/35"]
    assert lines[-1] == f"matmul {END.rstrip()}"
    assert "\x1b" not in stream.getvalue()
    assert "━" not in stream.getvalue()


CELL = """
import tunebook as tb

@tb.tunable(space=[{"step": 1}, {"step": 2}], heuristic={"step": 1}, store=False)
def scale(n, *, config):
    return n

tuned = tb.tune(scale, 7)
"""


def test_in_a_notebook_one_output_changes():
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CELL)])
    nbclient.NotebookClient(notebook, timeout=int(HANG_S), kernel_name="python3").execute()
    (output,) = notebook.cells[0].outputs
    assert output.output_type == "display_data"
    assert "scale tuned" in output.data["text/plain"]


def test_every_kind_of_failure_has_words():
    assert set(FAILED) == set(get_args(FailureKind))


def test_a_kind_of_failure_from_a_newer_release_stands_as_it_is():
    assert "3 melted" in progress_text("matmul", Step("trying", 1, 2, 1.0, failures={"melted": 3}))


def test_a_function_is_used_as_it_is():
    assert progress_for(print, "matmul") is print


@pytest.mark.parametrize(("seconds", "text"), [(0.0, "0 ns"), (5e-9, "5 ns"), (0.99, "990 ms"), (59.5, "59.5 s")])
def test_durations_are_written_as_people_say_them(seconds, text):
    assert seconds_text(seconds) == text
