"""Measure a tuned call on jax arrays, eager and while a program is traced, beside a hand-written lookup and the peers.

    python bench/jax_hot_path.py [--no-peers] [--rounds 101]

As bench/hot_path.py does it: kernels that do nothing, thread CPU time, interleaved rounds, medians, one process. Writes
bench/results/jax_hot_path.json. The hand-written lookup is a dict by the arrays' avals and the two plain values.
Two settings of jax, x64 and the precision of products, change the program too: tunebook notices when they change, and
reads them at each call only while some thread has its own. That is timed as well, beside the lookup that reads them.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from hot_path_peers import check_memory_hit, ejkernel_executor
from interleaved import RESULTS, Case, Row, interleave, ratio, save, show

import tunebook as tb

BY_HAND, BY_HAND_SETTINGS, OURS, OURS_READING, EJKERNEL, TUNE_JAX = (
    "hand-written",
    "hand-written, with settings",
    "tunebook",
    "tunebook, inside a block that sets one",
    "ejkernel",
    "tune-jax",
)


def implementation(a, b, c, n, flag, config):
    return a


def by_hand():
    book: dict[Any, Any] = {}

    def call(a, b, c, n, flag):
        key = (a.aval, b.aval, c.aval, n, flag)
        config = book.get(key)
        if config is None:
            config = book[key] = {"block": 64}
        return implementation(a, b, c, n, flag, config)

    return call


def by_hand_with_settings():
    book: dict[Any, Any] = {}
    x64, precision = jax.enable_x64, jax.default_matmul_precision

    def call(a, b, c, n, flag):
        key = (a.aval, b.aval, c.aval, n, flag, x64.value, precision.value)
        config = book.get(key)
        if config is None:
            config = book[key] = {"block": 64}
        return implementation(a, b, c, n, flag, config)

    return call


def ours():
    @tb.tunable(
        space=[{"block": 32}, {"block": 64}],
        heuristic={"block": 64},
        policy=tb.AutotunePolicy(allow_autotune=False),
        store=False,
    )
    def kernel(a, b, c, n, flag, *, config):
        return a

    return kernel


def ejkernel(arguments):
    executor, kernel = ejkernel_executor()
    check_memory_hit(executor, kernel, arguments)
    return lambda *args: executor(kernel, *args)


def tune_jax(arguments):
    import tune_jax as library  # noqa: PLC0415 - optional

    library.logger.setLevel(logging.CRITICAL)
    # Already jitted, or it would jit it: what is left beside its own time is one call of a jitted function.
    jitted = jax.jit(lambda a, b, c, n, flag, block: a, static_argnames=("block",))
    tuned = library.tune(jitted, hyperparams={"block": [32, 64]})
    tuned(*arguments)
    return tuned


def cases(arguments, *, peers):
    found = [
        Case(BY_HAND, by_hand(), [arguments]),
        Case(BY_HAND_SETTINGS, by_hand_with_settings(), [arguments]),
        Case(OURS, ours(), [arguments]),
        Case(OURS_READING, ours(), [arguments], around=partial(jax.default_matmul_precision, "highest")),
    ]
    return found + [Case(name, make(arguments), [arguments]) for name, make in peers.items()]


def in_a_trace(function, arguments):
    """Call a function of the same arguments, in which the arrays are those of a trace."""
    arrays, rest = arguments[:3], arguments[3:]
    found = []
    jax.eval_shape(lambda *traced: (found.append(function((*traced, *rest))), traced[0])[1], *arrays)
    return found[0]


def rows_for(where, measured):
    yield Row(
        what=f"{where}: tunebook / hand-written key of avals and values",
        measured=ratio(measured, OURS, BY_HAND),
        unit="x",
        at_most=1.15,
    )
    yield Row(
        what=f"{where}, reading settings: tunebook / hand-written key of all that",
        measured=ratio(measured, OURS_READING, BY_HAND_SETTINGS),
        unit="x",
        at_most=1.15,
    )
    yield Row(what=f"{where}: warm hit", measured=statistics.median(measured[OURS]), unit="ns")
    for name, target in ((EJKERNEL, 150), (TUNE_JAX, 30)):
        if name in measured:
            yield Row(
                what=f"{where}: {name} / tunebook", measured=ratio(measured, name, OURS), unit="x", at_least=target
            )
            yield Row(what=f"{where}: {name}, warm hit", measured=statistics.median(measured[name]) / 1e3, unit="us")


def main() -> int:
    """Measure both."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--rounds", type=int, default=101)
    options = parser.parse_args()
    peers = {} if options.no_peers else {EJKERNEL: ejkernel, TUNE_JAX: tune_jax}
    arguments = (*(jnp.ones((512, 512)) for _ in range(3)), 3, True)
    eager = interleave(cases(arguments, peers=peers), options.rounds)
    # A peer that tunes in the trace would tune the trace, or leave what it did in it: it gets a call that it knows.
    traced = in_a_trace(lambda args: interleave(cases(args, peers={}), options.rounds), arguments)
    rows = [*rows_for("eager", eager), *rows_for("in a trace", traced)]
    show(rows)
    if not options.no_peers:
        raw = {"eager": eager, "in a trace": traced}
        path = save("jax_hot_path", rows, raw, ["jax", "jaxlib", "ejkernel", "tune_jax", "numpy"])
        print(f"\nwritten to {path.relative_to(RESULTS.parent.parent)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
