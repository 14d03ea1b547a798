"""The stopwatch: the name of its measurement policy."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from tunebook._measure.stopwatch import Stopwatch
from tunebook._statistics.decide import DEVICE_CLOCKS


class NamedTimer(NamedTuple):
    name: str
    is_device_clock: bool

    def wait(self, result):
        pass


@pytest.mark.parametrize(
    ("timer", "clock"),
    [
        (None, "host-clock"),
        (NamedTimer("do_bench", is_device_clock=False), "do_bench"),
        (NamedTimer("opencl-events", is_device_clock=True), "opencl-events"),
        (NamedTimer("device-events/warm-l2/graph", is_device_clock=True), "device-events/warm-l2/graph"),
        (NamedTimer("quartz", is_device_clock=True), "device-clock/quartz"),
    ],
)
def test_the_policy_says_whether_a_device_clock_took_the_times(timer, clock):
    policy = Stopwatch(warmup=2).by(timer).name
    assert policy == f"{clock}/race/warmup=2"
    assert policy.startswith(DEVICE_CLOCKS) is (timer is not None and timer.is_device_clock)
