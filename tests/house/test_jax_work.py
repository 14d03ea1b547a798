"""`bench/jax_work.py`: two calls of jax programs do the same work, or the first difference is named."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"

# A process of its own, because a watch keeps jax's own fast path off.
SCRIPT = """
import json
import jax, jax.numpy as jnp
from jax_work import Watch, difference

@jax.jit
def scale(x, n):
    return x * n

def choose():
    return len([1, 2, 3])

def plain(x):
    return scale(x, 2.0)

def chooses(x):
    return scale(x, choose() - 1.0)

def calls_more(x):
    return scale(x, abs(2.0))

def another_program(x):
    return scale(x[:2], 2.0) if len(x) == 2 else scale(x, 2)

def twice(x):
    return scale(scale(x, 2.0), 2.0)

x, watch = jnp.arange(3.0), Watch()

def work(function):
    for _ in range(3):
        found = watch.work_of(function, (x,), {choose.__code__})
    return found

base = work(plain)
found = {f.__name__: difference(work(f), base) for f in (plain, calls_more, another_program, twice, chooses)}
choosing = difference(work(chooses), work(chooses))
cold = difference(watch.work_of(jax.jit(lambda x: x + 7), (x,), set()), base)
print(json.dumps({**found, "choosing": choosing, "cold": cold, **base.summary()}))
"""


@pytest.fixture(scope="module")
def found():
    pytest.importorskip("jax")
    code = f"import sys; sys.path.insert(0, {str(BENCH)!r})\n{SCRIPT}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def test_the_same_function_does_the_same_work(found):
    assert found["plain"] == ""
    assert (found["programs"], found["compilations"]) == (1, 0)


def test_a_function_that_is_left_out_is_not_compared(found):
    assert found["choosing"] == ""


@pytest.mark.parametrize(
    ("name", "said"),
    [("calls_more", "calls number"), ("another_program", "programs number"), ("twice", "1 more"), ("cold", "1 compil")],
)
def test_other_work_is_named(found, name, said):
    assert said in found[name]
