"""Measure a tuned call on jax arrays, eager and while a program is traced, beside a hand-written lookup and the peers.

    python bench/jax_hot_path.py [--no-peers] [--rounds 101] [--tokamax PYTHON]

As bench/hot_path.py does it: kernels that do nothing, thread CPU time, interleaved rounds, medians, one process. Writes
bench/results/jax_hot_path.json. The hand-written lookup is a dict by the arrays' avals and the two plain values.
Some settings of jax change the program too (x64, the precision of products, the random generator): tunebook notices
when they change, and looks at each call only while some thread has its own. That is timed as well, beside the lookup
that reads them. tokamax needs Python 3.12: `--tokamax` names one that has it, in which it is timed in turn
with tunebook too.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from hot_path_peers import check_memory_hit, ejkernel_executor
from interleaved import RESULTS, Case, Row, interleave, ratio, save, show

import tunebook as tb

BY_HAND, BY_HAND_SETTINGS, OURS, OURS_READING, EJKERNEL, TUNE_JAX, TOKAMAX = (
    "hand-written",
    "hand-written, with settings",
    "tunebook",
    "tunebook, inside a block that sets one",
    "ejkernel",
    "tune-jax",
    "tokamax",
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
    x64, precision, generator = jax.enable_x64, jax.default_matmul_precision, jax.default_prng_impl

    def call(a, b, c, n, flag):
        key = (a.aval, b.aval, c.aval, n, flag, x64.value, precision.value, generator.value)
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


def tokamax(arguments):
    import pydantic  # noqa: PLC0415 - what it writes its configurations with
    import tokamax as library  # noqa: PLC0415 - optional
    from tokamax._src.ops import op as ops  # noqa: PLC0415 - as above

    @pydantic.dataclasses.dataclass(frozen=True)
    class Config:
        block: int = 64

    class Bench(ops.Op):
        config_cls = Config

        def _fwd(self, a, b, c, n, flag, *, return_residuals, config):
            return a, None

        # It reads them, and not as text.
        _fwd.__annotations__ |= dict.fromkeys("abc", jax.Array) | {"n": int, "flag": bool, "return_residuals": bool}

        def _get_heuristics_config(self, ba):
            return Config()

        def _get_autotuning_configs(self, ba):
            return {Config(32), Config(64)}

    op = Bench()
    with library.config.autotuning_cache_miss_fallback("autotune"):
        op(*arguments)
    with library.config.autotuning_cache_miss_fallback("error"):  # from here on it is known
        op(*arguments)
    return op


def with_tokamax(rounds):
    """Return the times of both, in this process: the one that has it."""
    del sys.argv[1:]  # its flags would be looked for among ours
    arguments = (*(jnp.ones((512, 512)) for _ in range(3)), 3, True)
    both = [Case(OURS, ours(), [arguments]), Case(TOKAMAX, tokamax(arguments), [arguments])]
    return interleave(both, rounds)


def tokamax_rows(python, rounds):
    """Yield what is measured in another Python, which has tokamax."""
    source = Path(tb.__file__).parent.parent
    environment = {**os.environ, "PYTHONPATH": f"{source}:{Path(__file__).parent}"}
    command = [python, __file__, "--rounds", str(rounds), "--only-tokamax"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    measured = json.loads(done.stdout.splitlines()[-1])
    yield Row(what="eager: tokamax / tunebook", measured=ratio(measured, TOKAMAX, OURS), unit="x")
    yield Row(what="eager: tokamax, warm hit", measured=statistics.median(measured[TOKAMAX]) / 1e3, unit="us")


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
    parser.add_argument("--tokamax", metavar="PYTHON", help="one that has tokamax")
    parser.add_argument("--only-tokamax", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only_tokamax:
        print(json.dumps(with_tokamax(options.rounds)))
        return 0
    peers = {} if options.no_peers else {EJKERNEL: ejkernel, TUNE_JAX: tune_jax}
    arguments = (*(jnp.ones((512, 512)) for _ in range(3)), 3, True)
    eager = interleave(cases(arguments, peers=peers), options.rounds)
    # A peer that tunes in the trace would tune the trace, or leave what it did in it: it gets a call that it knows.
    traced = in_a_trace(lambda args: interleave(cases(args, peers={}), options.rounds), arguments)
    others = [] if options.tokamax is None else tokamax_rows(options.tokamax, options.rounds)
    rows = [*rows_for("eager", eager), *rows_for("in a trace", traced), *others]
    show(rows)
    if not options.no_peers:
        raw = {"eager": eager, "in a trace": traced}
        path = save("jax_hot_path", rows, raw, ["jax", "jaxlib", "ejkernel", "tune_jax", "numpy"])
        print(f"\nwritten to {path.relative_to(RESULTS.parent.parent)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
