"""The progress line: on a terminal it is drawn over itself, elsewhere only its end is written."""

from __future__ import annotations

import io
from typing import get_args

import pytest

from tunebook._job import Step
from tunebook._progress import FAILED, progress_for, seconds_text
from tunebook._types import FailureKind


class Terminal(io.StringIO):
    def isatty(self):
        return True


STEPS = [
    Step("compiling", 2, 2, 1.0),
    Step("trying", 1, 2, 2.0, left_s=2.0),
    Step("racing", 100, 100, 3.0, failures={"timeout": 2, "nan": 1}, best_s=0.001, left_s=0.0),
]


def drawn(stream, asked):
    show = progress_for(asked, "matmul", stream)
    for step in STEPS if show else ():
        show(step)
    return stream.getvalue()


def test_on_a_terminal_each_step_is_drawn_over_the_last():
    text = drawn(Terminal(), None)
    assert text.count("\r") == 3
    assert text.count("\n") == 1
    assert "compiling" in text
    assert "1/2  2 s  about 2 s left" in text
    assert text.endswith("100/100  best 1 ms  1 gave NaN  2 timed out  3 s\n")


def test_elsewhere_it_is_quiet_unless_asked():
    assert drawn(io.StringIO(), None) == ""
    assert drawn(io.StringIO(), False) == ""
    assert drawn(io.StringIO(), True).count("\n") == 1


def test_every_kind_of_failure_has_words():
    assert set(FAILED) == set(get_args(FailureKind))


def test_a_function_is_used_as_it_is():
    assert progress_for(print, "matmul") is print


@pytest.mark.parametrize(("seconds", "text"), [(0.0, "0 ns"), (5e-9, "5 ns"), (0.99, "990 ms"), (59.5, "59.5 s")])
def test_durations_are_written_as_people_say_them(seconds, text):
    assert seconds_text(seconds) == text
