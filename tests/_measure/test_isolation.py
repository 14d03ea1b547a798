"""Trap 12: a candidate that hangs, crashes, exits, prints without end or is wrong costs one candidate."""

from __future__ import annotations

import ctypes
import os
import re
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from limits import HANG_S

import tunebook as tb
from tunebook._tuning.progress import progress_text
from tunebook.adapters import native

ISOLATED = tb.AutotunePolicy(isolate="always", candidate_timeout_s=5.0)


def behave(way, x):  # noqa: C901 - a table of misdeeds
    if way == "hang":
        time.sleep(2 * HANG_S)
    elif way == "segfault":
        ctypes.string_at(0)
    elif way == "abort":
        os.abort()
    elif way == "exit":
        os._exit(3)
    elif way == "leave":
        sys.exit(4)
    elif way == "print":
        while True:
            sys.stdout.write("x" * 10_000)
    elif way == "raise":
        raise ValueError("no such tile")
    elif way == "memory":
        raise MemoryError("too big")
    elif way == "wrong":
        return x
    elif way == "nan":
        return x * np.nan
    else:
        time.sleep(0.02 if way == "slow" else 0.002)
    return x * 2


WAYS = ["slow", "good", "hang", "segfault", "abort", "exit", "leave", "print", "raise", "memory", "wrong", "nan"]


def make(policy, ways=WAYS, **options):
    @tb.tunable(
        space=tb.Space(way=ways), policy=policy, reference=lambda x: x * 2, name="hostile", store=False, **options
    )
    def kernel(x, *, config):
        return behave(config.way, x)

    return kernel


@pytest.mark.promise("isolated-candidates")
def test_the_right_candidate_wins_among_hostile_ones_and_each_loss_has_its_reason():
    kernel = make(ISOLATED)
    tuned = tb.tune(kernel, np.ones(8))
    assert tuned.config.way == "good"
    kinds = {tuned.configs[m.fingerprint].way: m.failure.kind for m in tuned.measurements if m.failure}
    assert kinds.pop("leave") in ("crash", "launch")
    assert kinds == {
        "hang": "timeout",
        "print": "timeout",
        "segfault": "crash",
        "abort": "crash",
        "exit": "crash",
        "raise": "launch",
        "memory": "memory",
        "wrong": "wrong-result",
        "nan": "nan",
    }
    assert (kernel(np.ones(8)) == 2).all()


def test_the_time_lost_is_bounded_by_the_timeouts():
    start = time.monotonic()
    tb.tune(make(ISOLATED, ["good", "hang", "slow"]), np.ones(8))
    assert time.monotonic() - start < HANG_S, "one timeout of 5 s, and not the time that it would take"


def children():
    return set(Path("/proc/self/task").joinpath(str(os.getpid()), "children").read_text().split())


def test_no_process_is_left_behind(tmp_path):
    before = children()  # other tests' pools and servers
    tb.tune(make(ISOLATED, ["good", "hang", "segfault"]), np.ones(8))
    assert children() <= before


def test_without_isolation_a_tuning_survives_candidates_that_raise():
    kernel = make(tb.AutotunePolicy(), ["good", "raise", "memory", "wrong", "nan"])
    assert tb.tune(kernel, np.ones(8)).config.way == "good"


@pytest.mark.parametrize("level", ["INFO", "WARNING"])
def test_a_candidate_that_hangs_is_named_while_it_runs(tmp_path, monkeypatch, caplog, level):
    monkeypatch.setattr("tunebook._measure.forked_worker._TOLD_S", 0.01)
    monkeypatch.setattr("tunebook._selection.tuning_watch.LONG_S", 0.0)
    caplog.set_level(level, logger="tunebook")
    hanging, lines = tmp_path / "hanging", []
    hanging.touch()

    def hold(x, *, config):
        deadline = time.monotonic() + HANG_S
        while config.way == "hang" and hanging.exists():
            assert time.monotonic() < deadline, "it was never told"
            time.sleep(0.001)
        return x

    def watch(step):
        lines.append(progress_text("hold", step))
        if step.running is not None and step.running["way"] == "hang" and step.running_s > 0:
            hanging.unlink(missing_ok=True)

    policy = tb.AutotunePolicy(isolate="always", candidate_timeout_s=2 * HANG_S)
    kernel = tb.tunable(hold, space=tb.Space(way=["good", "hang"]), policy=policy, name="hold", store=False)
    assert not tb.tune(kernel, 1, progress=watch).tally.count("failed")
    assert any(re.search(r"hold trying .*Config\(way='hang'\) has been running for \S+ \w*s  ", line) for line in lines)
    assert ("Config(way='hang') has been running for" in caplog.text) is (level == "INFO")
    assert level != "INFO" or f"candidate_timeout_s={2 * HANG_S:g} ends it" in caplog.text


def test_auto_isolates_only_kernels_compiled_ahead():
    auto = tb.AutotunePolicy(isolate="auto", candidate_timeout_s=5.0)
    library = native.CLibrary("void f(float *x, long n) { for (long i = 0; i < n; i++) x[CRASH * 100000000000] = 2; }")

    @tb.tunable(space=tb.Space(CRASH=[1, 0]), compile=library.compile, policy=auto, store=False)
    def crashes(x, *, config):
        out = x.copy()
        library(config).f(native.pointer(out), ctypes.c_long(out.size))
        return out

    assert (crashes(np.ones(4, np.float32)) != 1).any()
    pids = set()

    @tb.tunable(space=tb.Space(b=[1, 2]), policy=auto, store=False)
    def plain(x, *, config):
        pids.add(os.getpid())
        return x

    plain(np.ones(4))
    assert pids == {os.getpid()}


@pytest.mark.parametrize("wrong", [{"isolate": "sometimes"}, {"candidate_timeout_s": 0}])
def test_a_wrong_setting_is_refused(wrong):
    with pytest.raises(tb.DefinitionError, match=next(iter(wrong))):
        tb.AutotunePolicy(**wrong)
