"""Processes of one job use one configuration, even when their measurements differ."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import pytest

import tunebook as tb
from tunebook._agreement import agree_over
from tunebook.adapters import jax as tbx

RANK = """
import json, sys, jax, jax.numpy as jnp
rank, port, agreeing = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "agree"
jax.distributed.initialize(f"localhost:{port}", 2, rank)
import tunebook as tb
from tunebook.adapters import jax as tbx
if agreeing:
    tbx.agree()

class Measures:  # each rank finds another candidate the fastest
    def autotune(self, make_fn, args, kwargs, candidates):
        return candidates[rank]

def make(name, **policy):
    return tb.tunable(lambda x, *, config: x * config.b, space=tb.Space(b=[10, 20]), heuristic={"b": 30}, name=name,
                      store=False, tuner=Measures(), policy=tb.AutotunePolicy(**policy))

x, tuned = jnp.float32(1.0), make("tuned")
mixed = make("mixed", cache_miss_fallback="heuristics" if rank else "autotune")
with mixed.overlay(b=7):
    own = float(jax.jit(lambda x: mixed(x))(x))
found = [float(jax.jit(lambda x, k=k: k(x))(x)) for k in (tuned, mixed)]
print(json.dumps([own, *found, float(tuned(x))]))
"""


def ranks(agreeing):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, "-c", RANK]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"}
    started = [
        subprocess.Popen([*command, str(rank), port, agreeing], env=environment, stdout=-1, stderr=-1, text=True)
        for rank in range(2)
    ]
    said = [process.communicate(timeout=60) for process in started]
    assert [process.returncode for process in started] == [0, 0], said
    return [json.loads(out.splitlines()[-1]) for out, _ in said]


def test_two_processes_agree_on_one_configuration():
    one, other = ranks("agree")
    assert one == other
    assert one[0] == 7, "an overlay is the caller's own"
    assert one[1] in (10, 20)
    assert one[2] in (10, 30), "one rank tuned and the other one had the heuristic"


def test_without_agreement_they_would_differ():
    one, other = ranks("alone")
    assert one[1:] == [10, 10, 10]
    assert other[1:] == [20, 30, 20]


def test_agreeing_without_a_job_says_what_to_call():
    with pytest.raises(tb.Unsupported, match=r"jax\.distributed\.initialize"):
        tbx.agree()


class Said:
    """A board on which another process has written."""

    def __init__(self, value):
        self.value = value

    def first(self, key, value):
        return self.value


def test_a_choice_that_is_no_candidate_here_is_warned_about(request):
    agree_over(Said('{"other": 1}'))
    request.addfinalizer(lambda: agree_over(None))
    k = tb.tunable(
        lambda x, *, config: x * config.b, space=tb.Space(b=[10]), heuristic={"b": 30}, name="odd", store=False,
        policy=tb.AutotunePolicy(allow_autotune=False),
    )  # fmt: skip
    with pytest.warns(tb.TunebookWarning, match="no candidate here"):
        assert k(1) == 30
