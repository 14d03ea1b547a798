"""Measure the hot path: what a tuned call costs beside a hand-written lookup, and beside ejkernel's executor.

    python bench/hot_path.py [--no-peers] [--rounds 201]

Thread CPU time, interleaved rounds, medians; everything in this one process. Prints a table against the targets, and
writes bench/results/hot_path.json. The kernels do nothing, so that what is measured is the way to them. The exit status
is not zero if the peer is missing and `--no-peers` is not given; a target that is not met is printed, and is no error:
in CI the hot path is gated by instruction counts (tests/_hotpath/test_hot_path_instructions.py).

What an installation does by default is measured, that is with the accelerator if it was built, and beside it the
pure-Python way.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from contextlib import contextmanager
from contextvars import copy_context
from typing import Any

import numpy as np
from interleaved import Case, Row, interleave, ratio, save, show

import tunebook as tb
from tunebook._hotpath.codegen import find_pack

# Any number of candidates costs the same once tuned; none is measured here, because nothing depends on which one wins.
OPTIONS: dict[str, Any] = {
    "space": [{"block": 32}, {"block": 64}],
    "heuristic": {"block": 64},
    "policy": tb.AutotunePolicy(allow_autotune=False),
    "store": False,
}


@contextmanager
def pure():
    """Define kernels as if the accelerator had not been built."""
    os.environ["TUNEBOOK_PURE"] = "1"
    try:
        yield
    finally:
        del os.environ["TUNEBOOK_PURE"]


def three_arrays(**options):
    """A tunable kernel of three arrays, an int and a bool, which returns at once."""

    @tb.tunable(**OPTIONS, **options)
    def kernel(a, b, c, n, flag, *, config):
        return a

    return kernel


def pure_three_arrays(**options):
    with pure():
        return three_arrays(**options)


def implementation(a, b, c, n, flag, config):
    return a


def hand_written():
    """What an author would write: a key, a dict, a call."""
    book = {}

    def call(a, b, c, n, flag):
        key = (a.shape, a.dtype, b.shape, b.dtype, c.shape, c.dtype, n, flag)
        config = book.get(key)
        if config is None:
            config = book[key] = {"block": 64}
        return implementation(a, b, c, n, flag, config)

    return call


def hand_written_with_layout():
    """The same with the fact that tunebook's default adds: whether an array is contiguous."""
    book = {}

    def call(a, b, c, n, flag):
        # fmt: off
        key = (
            a.shape, a.dtype, a.flags.c_contiguous, b.shape, b.dtype, b.flags.c_contiguous,
            c.shape, c.dtype, c.flags.c_contiguous, n, flag,
        )
        # fmt: on
        config = book.get(key)
        if config is None:
            config = book[key] = {"block": 64}
        return implementation(a, b, c, n, flag, config)

    return call


def arrays(count: int, shape: tuple[int, ...]) -> list[np.ndarray]:
    return [np.ones(shape, np.float32) for _ in range(count)]


PURE = "pure Python: "  # before what a row says

Raw = dict[str, dict[str, list[float]]]


def against_hand_written(rounds: int) -> tuple[list[Row], Raw]:
    one = (*arrays(3, (512, 512)), 3, True)
    other = (*arrays(3, (1024, 384)), 3, True)
    short = interleave(
        [
            Case("hand-written", hand_written(), [one]),
            Case("tunebook", three_arrays(layout=False), [one]),
            Case("pure", pure_three_arrays(layout=False), [one]),
        ],
        rounds,
    )
    # Python keeps the ints up to 256 ready, so that such shapes are read faster, and the rest weighs more.
    tiny = (*arrays(3, (64, 128)), 3, True)
    small = interleave(
        [
            Case("hand-written", hand_written(), [tiny]),
            Case("tunebook", three_arrays(layout=False), [tiny]),
            Case("pure", pure_three_arrays(layout=False), [tiny]),
        ],
        rounds,
    )
    default = interleave(
        [
            Case("hand-written", hand_written(), [one]),
            Case("hand-written with layout", hand_written_with_layout(), [one]),
            Case("tunebook", three_arrays(), [one]),
            Case("pure", pure_three_arrays(), [one]),
        ],
        rounds,
    )
    shapes = interleave(
        [
            Case("one shape", three_arrays(), [one, one]),
            Case("two shapes in turn", three_arrays(), [one, other]),
            Case("pure, one shape", pure_three_arrays(), [one, one]),
            Case("pure, two shapes in turn", pure_three_arrays(), [one, other]),
        ],
        rounds,
    )
    rows = [
        Row(
            what="layout=False / hand-written key of the same facts",
            measured=ratio(short, "tunebook", "hand-written"),
            unit="x",
            at_most=1.15,
        ),
        Row(
            what="the same, no dimension above 256",
            measured=ratio(small, "tunebook", "hand-written"),
            unit="x",
            at_most=1.15,
        ),
        Row(
            what="default / hand-written key of the same facts (with contiguity)",
            measured=ratio(default, "tunebook", "hand-written with layout"),
            unit="x",
            at_most=1.15,
        ),
        Row(
            what="default / hand-written key without contiguity",
            measured=ratio(default, "tunebook", "hand-written"),
            unit="x",
        ),
        Row(what="warm hit, layout=False", measured=median(short, "tunebook"), unit="ns"),
        Row(what="warm hit, default", measured=median(default, "tunebook"), unit="ns"),
        Row(
            what="two shapes in turn / one shape",
            measured=ratio(shapes, "two shapes in turn", "one shape"),
            unit="x",
            at_most=1.1,
        ),
        Row(
            what=f"{PURE}layout=False / hand-written key of the same facts",
            measured=ratio(short, "pure", "hand-written"),
            unit="x",
            at_most=1.15,
        ),
        Row(
            what=f"{PURE}the same, no dimension above 256",
            measured=ratio(small, "pure", "hand-written"),
            unit="x",
            at_most=1.15,
        ),
        Row(
            what=f"{PURE}default / hand-written key of the same facts (with contiguity)",
            measured=ratio(default, "pure", "hand-written with layout"),
            unit="x",
            at_most=1.15,
        ),
        Row(what=f"{PURE}warm hit, layout=False", measured=median(short, "pure"), unit="ns"),
        Row(what=f"{PURE}warm hit, default", measured=median(default, "pure"), unit="ns"),
        Row(
            what=f"{PURE}two shapes in turn / one shape",
            measured=ratio(shapes, "pure, two shapes in turn", "pure, one shape"),
            unit="x",
            at_most=1.1,
        ),
    ]
    return rows, {"layout=False": short, "layout=False, small": small, "default": default, "alternating shapes": shapes}


def twelve_arguments(rounds: int) -> tuple[list[Row], Raw]:
    def kernels():
        @tb.tunable(**OPTIONS)
        def mixed(q, k, v, out, bias, lengths, window, heads, causal, packed, mode, scale, *, config):
            return q

        @tb.tunable(**OPTIONS)
        def all_arrays(a, b, c, d, e, f, g, h, i, j, k, l, *, config):  # noqa: E741 - twelve letters
            return a

        return mixed, all_arrays

    mixture = (*arrays(6, (512, 512)), 128, 8, True, False, "fwd", 0.125)
    dozen = tuple(arrays(12, (512, 512)))
    mixed, all_arrays = kernels()
    with pure():
        pure_mixed, pure_all_arrays = kernels()
    some, every = "warm hit, 12 arguments: 6 arrays + 6 scalars", "warm hit, 12 arguments: all of them arrays"
    measured = interleave(
        [
            Case(some, mixed, [mixture]),
            Case(every, all_arrays, [dozen]),
            Case(f"{PURE}{some}", pure_mixed, [mixture]),
            Case(f"{PURE}{every}", pure_all_arrays, [dozen]),
        ],
        rounds,
    )
    # A dozen arrays are more than Python code can read in that time.
    bounds = {some: 2, every: 2 if find_pack(layout=True) else None, f"{PURE}{some}": 2, f"{PURE}{every}": None}
    rows = [Row(what=name, measured=median(measured, name) / 1e3, unit="us", at_most=bounds[name]) for name in measured]
    return rows, {"twelve arguments": measured}


@contextmanager
def overlay_elsewhere(kernel):
    """Keep an overlay of this very kernel alive in another context, as a thread or a task would."""
    context, overlay = copy_context(), kernel.overlay(block=32)
    context.run(overlay.__enter__)
    try:
        yield
    finally:
        context.run(overlay.__exit__, None, None, None)


def listener(event, **data):
    """Somebody who wants to know about hits."""


def with_company(rounds: int) -> tuple[list[Row], Raw]:
    """What others cost: an overlay that is live elsewhere, somebody who listens."""
    call = (*arrays(3, (512, 512)), 3, True)
    kernel, watched = three_arrays(), three_arrays(on_event=listener)
    pure_kernel, pure_watched = pure_three_arrays(), pure_three_arrays(on_event=listener)
    inside, outside = kernel.overlay(block=32), three_arrays()
    measured = interleave(
        [
            Case("plain", kernel, [call]),
            Case("an overlay elsewhere", kernel, [call], around=lambda: overlay_elsewhere(kernel)),
            Case("a listener", watched, [call]),
            Case("inside its own overlay", kernel, [call], around=lambda: inside),
            Case("inside another kernel's overlay", outside, [call], around=lambda: inside),
            Case(f"{PURE}plain", pure_kernel, [call]),
            Case(f"{PURE}an overlay elsewhere", pure_kernel, [call], around=lambda: overlay_elsewhere(pure_kernel)),
            Case(f"{PURE}a listener", pure_watched, [call]),
        ],
        rounds,
    )
    rows = [
        Row(
            what=f"{way}{name} / plain warm hit",
            measured=ratio(measured, f"{way}{name}", f"{way}plain"),
            unit="x",
            at_most=3.5,
        )
        for way in ("", PURE)
        for name in ("an overlay elsewhere", "a listener")
    ]
    rows += [
        Row(what=name, measured=median(measured, name) / 1e3, unit="us")
        for name in ("inside its own overlay", "inside another kernel's overlay")
    ]
    return rows, {"company": measured}


class Nothing(tb.Kernel):
    """The kernel of hot_path_peers, for our own executor."""

    def run(self, a, b, c, n, flag, *, cfg):
        return a

    def heuristic_cfg(self, inv):
        return {"block": 64}

    def candidate_cfgs(self, inv):
        return [{"block": 32}, {"block": 64}]


def against_ejkernel(rounds: int) -> tuple[list[Row], Raw]:
    import jax.numpy as jnp  # noqa: PLC0415 - only here
    from hot_path_peers import check_memory_hit, ejkernel_executor  # noqa: PLC0415 - as above

    of_numpy = (*arrays(3, (512, 512)), 3, True)
    of_jax = (*(jnp.ones((512, 512), jnp.float32) for _ in range(3)), 3, True)
    names = ("a", "b", "c", "n", "flag")
    executor, kernel = ejkernel_executor()
    check_memory_hit(executor, kernel, of_jax)
    ours = tb.Executor(tb.ConfigSelectorChain(tb.ConfigCache(), tuner=tb.Tuner(warmup=1, iters=1)))
    measured = interleave(
        [
            Case("ejkernel", executor, [(kernel, *of_jax)]),
            Case("ejkernel, by keyword", executor, [(kernel, *of_jax)], by_name=names),
            # As ejkernel's own operations call it.
            Case("ejkernel, new object", lambda *args: executor(type(kernel)(), *args), [of_jax]),
            Case("Executor, new object, jax", lambda *args: ours(Nothing("bench_nothing"), *args), [of_jax]),
            Case("ejkernel chooses", lambda *args: executor.choose_config(type(kernel)(), *args), [of_jax]),
            Case("Executor chooses", lambda *args: ours.choose_config(Nothing("bench_nothing"), *args), [of_jax]),
            Case("hand-written", hand_written(), [of_numpy]),
            Case("numpy, layout=False", three_arrays(layout=False), [of_numpy]),
            Case("numpy, default", three_arrays(), [of_numpy]),
            # The author says what matters: the shape of one array stands for those of all.
            Case("numpy, key named", three_arrays(key=("a", "flag"), layout=False), [of_numpy]),
            Case("numpy, by keyword", three_arrays(), [of_numpy], by_name=names),
            Case("numpy, pure", pure_three_arrays(), [of_numpy]),
            Case("numpy, layout=False, pure", pure_three_arrays(layout=False), [of_numpy]),
            Case("jax", three_arrays(), [of_jax]),
            Case("Executor, jax", ours, [(Nothing("bench_nothing"), *of_jax)]),
            Case("Executor, numpy", ours, [(Nothing("bench_nothing"), *of_numpy)]),
        ],
        rounds,
    )

    def faster(what: str, name: str, than: str = "ejkernel", at_least: float | None = None) -> Row:
        return Row(what=what, measured=ratio(measured, than, name), unit="x", at_least=at_least)

    rows = [
        Row(what="ejkernel's executor, memory hit, jax arrays", measured=median(measured, "ejkernel") / 1e3, unit="us"),
        faster("ejkernel's executor / tunebook, numpy arrays, layout=False", "numpy, layout=False", at_least=150),
        faster("ejkernel's executor / tunebook, numpy arrays, key=('a', 'flag')", "numpy, key named", at_least=150),
        faster("ejkernel's executor / tunebook, numpy arrays, default", "numpy, default", at_least=150),
        faster(f"{PURE}ejkernel's executor / tunebook, numpy arrays, layout=False", "numpy, layout=False, pure"),
        faster(f"{PURE}ejkernel's executor / tunebook, numpy arrays, default", "numpy, pure"),
        faster("ejkernel's executor / hand-written lookup, numpy arrays", "hand-written"),
        faster(
            "ejkernel's executor / tunebook, default, both called by keyword",
            "numpy, by keyword",
            "ejkernel, by keyword",
        ),
        faster(
            "a new kernel object per call, jax arrays: ejkernel's executor / tunebook's Executor",
            "Executor, new object, jax",
            "ejkernel, new object",
            at_least=1,
        ),
        faster(
            "the same, choosing alone: ejkernel's executor / tunebook's Executor",
            "Executor chooses",
            "ejkernel chooses",
            at_least=5,
        ),
        Row(
            what="a new kernel object per call, jax arrays: tunebook's Executor chooses",
            measured=median(measured, "Executor chooses") / 1e3,
            unit="us",
            at_most=10,
        ),
        faster(
            "ejkernel's executor with a new kernel object per call / a tunable function, the same jax arrays",
            "jax",
            "ejkernel, new object",
            at_least=150,
        ),
        faster("one kernel object kept, jax arrays: ejkernel's executor / tunebook's Executor", "Executor, jax"),
        Row(
            what="tunebook's Executor, memory hit, numpy arrays",
            measured=median(measured, "Executor, numpy") / 1e3,
            unit="us",
        ),
    ]
    return rows, {"ejkernel": measured}


def median(measured: dict[str, list[float]], name: str) -> float:
    return statistics.median(measured[name])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--no-peers", action="store_true", help="leave ejkernel out")
    parser.add_argument("--rounds", type=int, default=201)
    options = parser.parse_args()
    if find_pack(layout=True) is None:
        print("the accelerator is not built, so that everything here is pure Python: pip install --editable .")
    parts = [against_hand_written, twelve_arguments, with_company]
    if not options.no_peers:
        try:
            import ejkernel  # noqa: F401, PLC0415 - to say at once that it is missing
        except ModuleNotFoundError as error:
            print(f"cannot compare: {error}. Run: pip install ejkernel==0.0.80 jax==0.10.2, or use --no-peers")
            return 1
        parts.append(against_ejkernel)
    rows: list[Row] = []
    raw: Raw = {}
    for part in parts:
        more, measured = part(options.rounds)
        rows += more
        raw |= measured
    show(rows)
    medians = {group: {name: round(median(each, name), 1) for name in each} for group, each in raw.items()}
    path = save(
        "hot_path",
        rows,
        {"median_ns": medians, "rounds": options.rounds, "accelerator": find_pack(layout=True) is not None},
        ["tunebook", "numpy", "jax", "ejkernel"],
    )
    print(f"\nwritten to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
