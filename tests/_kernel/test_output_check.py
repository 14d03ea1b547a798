"""Comparing outputs: what counts as right."""

from __future__ import annotations

import re
from collections import OrderedDict
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tunebook._kernel.output_check import difference

ONES = np.ones(4, np.float32)


@dataclass
class Output:
    x: Any


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (ONES, ONES * (1 + 1e-6)),
        (27095.49303258, 27095.49303190),
        (np.array([np.nan, np.inf]), np.array([np.nan, np.inf])),
        (np.zeros(0), np.zeros(0)),
        ((ONES, [ONES]), (ONES, [ONES])),
        ({"a": ONES}, {"a": ONES}),
        (Output(ONES), Output(ONES * (1 + 1e-6))),
        (OrderedDict(a=[Output(ONES)]), MappingProxyType({"a": (Output(ONES),)})),
        ({1, 2}, {2, 1}),
        (np.array([1e-9, 1.0]), np.array([0.0, 1.0])),
        (ONES.astype(ml_dtypes.bfloat16), ONES),
        (None, None),
        ("x", "x"),
        (np.array([True, False]), np.array([True, False])),
    ],
    ids=repr,
)
def test_an_output_close_enough_to_the_expected_one_is_right(output, expected):
    assert difference(output, expected) is None


@pytest.mark.parametrize(
    ("output", "expected", "says"),
    [
        (ONES * 1.1, ONES, r"off by up to 0\.1 in 4 of 4"),
        (np.full(4, np.nan, np.float32), ONES, "4 NaN of 4"),
        (np.full(4, np.inf, np.float32), ONES, "off by up to inf"),
        (ONES[:2], ONES, r"shape \(2,\), expected \(4,\)"),
        (np.arange(3), np.arange(3) + 1, "differs in 3 of 3"),
        ((ONES,), (ONES, ONES), "2 parts"),
        ((ONES, ONES * 2), (ONES, ONES), r"output\[1\] is off"),
        ({"a": 1}, {"b": 1}, "keys"),
        (1, 2, "is 1, expected 2"),
        (1.5, 1.0, "off by up to"),
        (float("nan"), 1.0, "NaN"),
        (None, ONES, "shape"),
    ],
    ids=repr,
)
def test_the_message_for_a_wrong_output_says_how_far_off_it_is(output, expected, says):
    assert re.search(says, difference(output, expected).message)


@pytest.mark.parametrize(
    ("output", "expected", "message"),
    [
        (Output(ONES), Output(ONES * 2), "output['x'] is off by up to 1 in 4 of 4 values"),
        (ONES, Output(ONES), "output should have the keys ['x']"),
        (MappingProxyType({"a": [ONES]}), {"a": [ONES * 2]}, "output['a'][0] is off by up to 1 in 4 of 4 values"),
        ({1}, {2}, "output should have the keys ['2']"),
    ],
    ids=repr,
)
def test_parts_of_any_container_are_compared(output, expected, message):
    assert difference(output, expected).message == message
