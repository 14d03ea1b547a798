"""Run ejkernel's own operations on its selector and on tunebook's, in the same program: results, cold and warm times.

    python bench/ejkernel_ops.py [--rounds 101] [--samples 5] [--ops mean_pooling gla_attention]

Every operation is called as its users call it: a new kernel object in each call, eager, under jit and under grad. Each
cold call is timed in a process of its own with empty caches, in turn for both, because a second tuning in one process
finds compiled programs; the ratio is the median over the samples, five of them, or as many as fit into 6 s, and at
least two. These processes are forks of one that has imported jax and both libraries, and used neither. Importing
tunebook has a row of its own: ejkernel is imported either way. Warm calls are timed in one process per operation, in
turn, as CPU time of the process. A ratio with a target has the lower end of its interval beside it, because the same
program takes 0.9 to 1.1 x of itself.

Such a clock cannot tell 0.99 x from 1.01 x, so a whole warm call is also decided by its work:

* `same work` is 1 if, outside of choosing, a warm call on tunebook calls the same Python and C functions in the same
  order as on ejkernel, runs the same compiled programs in the same order, and compiles as many (see `jax_work.py`).
* Then the two calls differ in choosing alone. It is timed inside these calls, in turn: the CPU time of the thread from
  the moment that ejkernel's executor asks its selector until it has the configuration. Its last step is ejkernel's own:
  on a GPU, a configuration that says "auto" or "triton" is replaced.
* `warm, by work` is (rest + choosing on tunebook) / (rest + choosing on ejkernel), with the medians over all rounds.
  The rest of a call is the same work, so it is one number: the median over both sides. A call that does not choose, as
  under jit, gives exactly 1. Where tunebook chose another configuration that runs the same compiled programs, a few
  small functions differ (of 40,000); each that is called more on tunebook is counted with the mean time of the
  functions of a call, in which compiling and running programs is included. Where other programs run, the row is the
  ratio of the whole calls, as timed.

Writes bench/results/ejkernel_ops.json and summary.md; 15 minutes, and nothing else may run meanwhile. An operation that
fails has a row that says so, and the others go on.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import random as random_of_python
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import tables
from ejkernel.ops import ConfigSelectorChain, Executor, Tuner
from interleaved import RESULTS, Row, save, show
from jax import random
from jax_work import Watch, difference, more_calls

import tunebook
from tunebook.adapters import ejkernel

SIDES = "ejkernel", "tunebook"
CONTROL = "ejkernel again"  # beside itself: how far from 1 noise alone takes a ratio
WAYS = "eager", "jit", "grad"
FEWEST, LONGEST_S = 11, 4.0  # rounds of warm calls: some operations take 0.1 s when they are not jitted
COLD_FEWEST, COLD_LONGEST_S = 2, 6.0  # samples of a cold call: tuning an operation takes up to 20 s
CHOOSERS = (ConfigSelectorChain, "choose"), (Executor, "_choose_heuristics_only")  # ejkernel asks one of them
LAST_STEP = Executor._prefer_cuda_cfg  # noqa: SLF001 - it sees the configuration that was chosen
ATTEMPTS = 5  # pairs of calls whose work is compared: in the first ones, caches of Python's modules fill
SIZES = 1, 64, 2, 16  # batch, tokens, heads, head size: small, so that choosing weighs as much as it can


@cache
def operations():
    """Return the operations as functions of three arrays of floats."""
    import ejkernel.modules as ej  # noqa: PLC0415 - it reads the place of its caches from the environment

    _, _, heads, size = SIZES

    def gate(x):
        return jax.nn.sigmoid(x[..., 0])

    return {
        "attention": lambda q, k, v: ej.attention(q, k, v, causal=True)[0],
        "flash_attention": lambda q, k, v: ej.flash_attention(q, k, v, causal=True),
        "scaled_dot_product_attention": lambda q, k, v: ej.scaled_dot_product_attention(q, k, v, causal=True),
        "ring_attention": lambda q, k, v: ej.ring_attention(q, k, v, causal=True),
        "blocksparse_attention": lambda q, k, v: ej.blocksparse_attention(
            *(x.swapaxes(1, 2) for x in (q, k, v)), causal=True
        ),
        "mean_pooling": lambda q, k, v: ej.mean_pooling(q[:, :, 0]),
        "grouped_matmul": lambda q, k, v: ej.grouped_matmul(
            q.reshape(-1, 32), jnp.ones((4, 32, 16)), jnp.full(4, 16, jnp.int32)
        ),
        "recurrent_attention": ej.recurrent_attention,
        "lightning_attention": lambda q, k, v: ej.lightning_attention(q, k, v, layer_idx=0, num_layers=2),
        "gla_attention": ej.gla_attention,
        "gated_delta_rule": lambda q, k, v: ej.gated_delta_rule(q, k, v, gate(q)),
        "kda_attention": lambda q, k, v: ej.kda_attention(q, k, v, gate(q)),
        "rwkv4": lambda q, k, v: ej.rwkv4(jnp.full(size, -0.5), jnp.zeros(size), k[:, :, 0], v[:, :, 0]),
        "rwkv6": lambda q, k, v: ej.rwkv6(q, k, v, -jnp.abs(k), jnp.zeros((heads, size))),
        "rwkv7": lambda q, k, v: ej.rwkv7(q, -jnp.abs(k), k, v, k, v),
        "state_space_v2": lambda q, k, v: ej.state_space_v2(
            q, -jnp.ones(heads), k[:, :, :1], v[:, :, :1], jnp.ones(heads), jax.nn.softplus(q[..., 0])
        )[0],
    }


def arrays():
    return [random.normal(random.key(seed), SIZES) * 0.3 for seed in range(3)]


def program(name, way):
    """Return an operation as a program would call it."""
    operation = operations()[name]
    if way == "eager":
        return operation

    def call(*args):  # a new function each time: for the same one, jax finds the program that the other side has traced
        return operation(*args)

    return jax.jit(call) if way == "jit" else jax.grad(lambda *args: call(*args).sum())


def use(side):
    """Let ejkernel or tunebook choose from now on."""
    (ejkernel.install if side == "tunebook" else ejkernel.uninstall)()
    Executor._prefer_cuda_cfg = LAST_STEP  # noqa: SLF001 - as it was before it was timed


def cold(name, way, side):
    """Return the seconds of the first call in this process, whether it tuned, and the result."""
    use(side)
    tuned = []
    kind, method = (Tuner, "autotune") if side == "ejkernel" else (tunebook.Tuner, "tune")
    tune = getattr(kind, method)
    setattr(kind, method, lambda *args, **kwargs: tuned.append(tune(*args, **kwargs)) or tuned[-1])
    function, args = program(name, way), jax.block_until_ready(arrays())
    start, start_cpu = time.perf_counter(), time.process_time()
    out = jax.block_until_ready(function(*args))
    seconds, cpu_s = time.perf_counter() - start, time.process_time() - start_cpu
    tuned = any(each is not None for each in tuned)  # ejkernel returns None if every candidate failed
    return {"seconds": seconds, "cpu_s": cpu_s, "tuned": tuned, "result": np.asarray(out, np.float64).ravel().tolist()}


def in_a_fork(function, *case):
    """Return what a function returns in a fork of this process, which has not used jax."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        with os.fdopen(write, "w") as pipe:
            try:
                outcome = function(*case)
            except Exception as error:  # noqa: BLE001 - an operation of ejkernel may fail in any way
                outcome = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
            json.dump(outcome, pipe)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        said = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return json.loads(said) if said else {"error": f"the process ended with status {status}"}


def print_cold(names, samples):
    """Print a line per cold call: all operations once, then all of them again."""
    operations()
    spent_s = dict.fromkeys(((name, way) for name in names for way in WAYS), 0.0)
    for number in range(samples):
        for case in spent_s:
            if number >= COLD_FEWEST and spent_s[case] > COLD_LONGEST_S * len(SIDES):
                continue
            for side in SIDES if number % 2 else SIDES[::-1]:
                for path in Path(os.environ["BENCH_CACHES"]).rglob("*"):
                    if path.is_file():
                        path.unlink()
                outcome = in_a_fork(cold, *case, side)
                spent_s[case] += outcome.get("seconds", math.inf)  # a call that fails is not tried five times
                print(json.dumps([*case, side, outcome]), flush=True)


def caches_in(folder):
    """Return the environment that puts the caches of both libraries, and of compiled programs, into a folder."""
    return {
        "BENCH_CACHES": folder,
        "EJKERNEL_PERSISTENT_CACHE_DIR": f"{folder}/theirs",
        "COMPILE_FUNC_DIR": f"{folder}/programs",
        "TUNEBOOK_HOME": f"{folder}/ours",
    }


def measure_cold(names, samples):
    """Return the outcomes of cold calls by operation, way and side: a list of samples each."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        line = [sys.executable, __file__, "--cold", "--samples", str(samples), "--ops", *names]
        env = {**os.environ, **caches_in(folder)}
        with subprocess.Popen(line, env=env, stdout=subprocess.PIPE, text=True) as process:
            for said in filter(lambda said: said.startswith("["), process.stdout):
                name, way, side, outcome = json.loads(said)
                found.setdefault((name, way), {}).setdefault(side, []).append(outcome)
                took = outcome.get("error") or f"{outcome['seconds']:.2f} s"
                print(f"cold: {name}, {way}, on {side}: {took}", flush=True)
        if process.returncode:
            raise SystemExit("the process that times cold calls failed: see above")
    return found


IMPORT = """
import time, ejkernel.modules
start = time.perf_counter()
import tunebook.adapters.ejkernel
tunebook.adapters.ejkernel.install()
print(time.perf_counter() - start)
"""


def import_s(samples):
    """Return the seconds of importing tunebook, and of installing it, into programs that have imported ejkernel."""
    took = []
    for _ in range(samples):
        with tempfile.TemporaryDirectory() as folder:
            env = {**os.environ, **caches_in(folder)}
            done = subprocess.run([sys.executable, "-c", IMPORT], env=env, capture_output=True, text=True, check=True)
        took.append(float(done.stdout.splitlines()[-1]))
    return took


def failures(outcomes):
    """Return the last error of each library that failed."""
    return {side: outcome["error"] for side in SIDES for outcome in outcomes[side] if "error" in outcome}


def same_result(outcomes):
    """Return whether both libraries computed the same, and take the results out of the outcomes."""
    if failures(outcomes):
        return None
    every = [outcome.pop("result") for side in SIDES for outcome in outcomes[side]]
    return all(
        len(result) == len(every[0])
        and all(abs(a - b) <= 1e-5 + 1e-4 * abs(b) for a, b in zip(result, every[0], strict=True))
        for result in every
    )


def cold_rows(call, cold, same, **_warm):
    """Return the rows of a cold call: the results, and the times where both libraries did the same work."""
    failed = failures(cold)
    if failed:
        print(f"{call}: {failed}")
        return [
            Row(
                what=f"{call}: an error on tunebook alone",
                measured=float("ejkernel" not in failed),
                unit="",
                at_most=0.0,
            )
        ]
    theirs, ours = (any(outcome["tuned"] for outcome in cold[side]) for side in SIDES)
    times = {side: [outcome["seconds"] for outcome in cold[side]] for side in SIDES}
    what, at_most = {
        (True, True): ("cold, tuned by both", 1.0),
        # The same work: compiling the call itself. What remains is noise.
        (False, False): ("cold, nothing to tune", 1.05),
        (False, True): ("cold, tuned by tunebook alone", None),
        (True, False): ("cold, measured by ejkernel alone", 1.0),
    }[theirs, ours]
    return [
        Row(what=f"{call}: same result", measured=float(same), unit="", at_least=1.0),
        *ratio_rows(f"{call}: {what}", times, at_most),
    ]


def warm(name, way, rounds):
    """Return the CPU seconds of a warm call, and of choosing in it, by side: one number per round, in each round."""
    functions, args = {side: program(name, way) for side in SIDES}, arrays()
    times, chose = ({side: [] for side in (*SIDES, CONTROL)} for _ in range(2))
    for side, function in functions.items():
        use(side)
        jax.block_until_ready(function(*args))
    ends = time.monotonic() + LONGEST_S
    for number in range(rounds):
        if number >= FEWEST and time.monotonic() > ends:
            break
        for side in times if number % 2 else [*times][::-1]:
            user = side.removesuffix(" again")
            use(user)
            spent_ns = time_choosers()
            call_s(functions[user], args)  # changing sides has emptied the processor's caches
            del spent_ns[:]
            seconds, calls = call_s(functions[user], args)
            times[side].append(seconds)
            chose[side].append(sum(spent_ns) / 1e9 / calls)
    return {"warm": times, "chose": chose}


def time_choosers():
    """Time the functions that ejkernel asks for a configuration until sides change; return the list for the times."""
    spent_ns, clock = [], time.thread_time_ns

    def timed(choose):
        def choose_and_note(*args):
            start = clock()
            found = choose(*args)
            spent_ns.append(clock() - start)
            return found

        return choose_and_note

    for kind, method in (*CHOOSERS, (Executor, LAST_STEP.__name__)):
        setattr(kind, method, timed(getattr(kind, method)))
    return spent_ns


def call_s(function, args):
    """Return the CPU seconds of a call, the mean over 5 ms of them, and how many there were."""
    start, calls = time.process_time(), 0
    while calls < 1 or time.process_time() - start < 5e-3:
        jax.block_until_ready(function(*args))
        calls += 1
    return (time.process_time() - start) / calls, calls


def same_work(watch, name, way):
    """Return the work of a warm call outside of choosing, and how that on tunebook differs from that on ejkernel."""
    functions, args, choosers = {side: program(name, way) for side in SIDES}, arrays(), {LAST_STEP.__code__}
    for side in SIDES:
        use(side)
        choosers |= {getattr(kind, method).__code__ for kind, method in CHOOSERS}
    for _ in range(ATTEMPTS):
        found = {}
        for side, function in functions.items():
            use(side)
            found[side] = watch.work_of(function, args, choosers)
        other = difference(found["tunebook"], found["ejkernel"])
        if not other:
            break
    return {
        **found["tunebook"].summary(),
        "difference": other,
        "more calls": more_calls(*(found[s] for s in SIDES[::-1])),
    }


def choosing(name, rounds):
    """Return the CPU seconds of choosing alone, by side: the selector is asked with a new kernel object each time."""
    use("tunebook")
    asked = []

    def asks(place, choose):
        return lambda chooser, inv, kernel: asked.append((place, chooser, inv, kernel)) or choose(chooser, inv, kernel)

    for place in CHOOSERS:
        setattr(*place, asks(place, getattr(*place)))
    program(name, "eager")(*arrays())
    if not asked:
        return None  # the operation does not choose
    place, chooser, inv, kernel = asked[0]
    times = {side: [] for side in SIDES}
    for number in range(rounds):
        for side in SIDES if number % 2 else SIDES[::-1]:
            use(side)
            choose, kind = getattr(*place), type(kernel)
            choose(chooser, inv, kind())
            start = time.process_time()
            for _ in range(200):
                choose(chooser, inv, kind())
            times[side].append((time.process_time() - start) / 200)
    return times


def ratio(times, side="tunebook"):
    """Return how long a side takes beside ejkernel: the median of the ratios within a round."""
    return statistics.median(ours / theirs for theirs, ours in zip(times["ejkernel"], times[side], strict=True))


def ratio_rows(what, times, at_most):
    """Return the ratio, and its lower end: above the target, tunebook is slower, and not by the noise of a round."""
    return [
        Row(what=f"{what}, beside ejkernel", measured=ratio(times), unit="x", at_most=at_most),
        Row(what=f"{what}, at least", measured=lower_end(times), unit="x", at_most=at_most),
    ]


def lower_end(times):
    """Return the lower end of the interval of `ratio`, by drawing rounds again; 95 % sure for all rows together."""
    pairs = list(zip(times["ejkernel"], times["tunebook"], strict=True))
    draws = random_of_python.Random(0)
    found = sorted(statistics.median(b / a for a, b in draws.choices(pairs, k=len(pairs))) for _ in range(2000))
    return found[1]


def by_work(warm, chose, work):
    """Return how long a warm call takes beside ejkernel's, if they differ in little else than choosing; see above."""
    if work["more calls"] is None:
        return ratio(warm)
    calls = [pair for side in SIDES for pair in zip(warm[side], chose[side], strict=True)]
    rest = statistics.median(whole - choosing for whole, choosing in calls)
    theirs, ours = (statistics.median(chose[side]) for side in SIDES)
    return (rest * (1 + max(work["more calls"], 0) / work["calls"]) + ours) / (rest + theirs)


def warm_rows(call, warm, chose, work, **_cold):
    """Return the rows of a warm call."""
    if work["difference"]:
        print(f"{call}: the work differs: {work['difference']}")
    return [
        Row(what=f"{call}: same work outside of choosing", measured=float(not work["difference"]), unit="", at_least=1),
        Row(what=f"{call}: warm, by work, beside ejkernel", measured=by_work(warm, chose, work), unit="x", at_most=1.0),
        *ratio_rows(f"{call}: warm", warm, at_most=1.0),
    ]


def warm_and_choosing(name, ways, rounds):
    """Return the times of warm calls by way, of choosing, and the work of the calls, in one process."""
    found = {way: warm(name, way, rounds) for way in ways}
    chosen = choosing(name, rounds)
    watch = Watch()  # the last step, because calls take longer from now on
    return {
        "ways": {way: {**found[way], "work": same_work(watch, name, way)} for way in ways},
        "choosing": chosen,
    }


def warm_of(raw, name, ways):
    """Return the same from the last file of results."""
    kept = {way: {part: raw[f"{name}, {way}"][part] for part in ("warm", "chose", "work")} for way in ways}
    return {"ways": kept, "choosing": raw.get(f"{name}, choosing")}


def measure(names, rounds, samples, kept, cold_again):
    """Return rows and raw times. With `kept`, the content of the last file of results, cold times are taken from it.

    Not those of the operations in `cold_again`; and the warm times of operations that are not among `names` are.
    """
    raw, rows, ratios = ({"import": import_s(samples)} if kept is None else kept["raw"]), [], []
    decided = []
    took_ms = statistics.median(raw["import"]) * 1e3
    rows.append(Row(what="import tunebook.adapters.ejkernel, and install()", measured=took_ms, unit="ms"))
    show(rows)
    cold_of = names if kept is None else cold_again
    for (name, way), outcomes in (measure_cold(cold_of, samples) if cold_of else {}).items():
        raw[f"{name}, {way}"] = {**raw.get(f"{name}, {way}", {}), "cold": outcomes, "same": same_result(outcomes)}
    for name in names if kept is None else operations():
        worked = [way for way in WAYS if not failures(raw[f"{name}, {way}"]["cold"])]
        first = [row for way in WAYS for row in cold_rows(f"{name}, {way}", **raw[f"{name}, {way}"])]
        # A process of its own: XLA's programs are never unloaded, and a process may map 65,530 pieces of memory.
        found = in_a_fork(warm_and_choosing, name, worked, rounds) if name in names else warm_of(raw, name, worked)
        if "error" in found:
            print(f"{name}: warm calls: {found['error']}")
            first.append(Row(what=f"{name}: warm calls measured", measured=0.0, unit="", at_least=1.0))
        for way, measured in found.get("ways", {}).items():
            raw[f"{name}, {way}"] |= measured
            ratios.append((ratio(measured["warm"]), ratio(measured["warm"], CONTROL)))
            decided.append(by_work(**measured))
            first += warm_rows(f"{name}, {way}", **measured)
        chosen = found.get("choosing")
        if chosen is not None:
            raw[f"{name}, choosing"] = chosen
            ours = statistics.median(chosen["tunebook"]) * 1e6
            first += [
                Row(what=f"{name}: choosing, new kernel object per call", measured=ours, unit="us", at_most=10.0),
                Row(what=f"{name}: choosing, ejkernel / tunebook", measured=1 / ratio(chosen), unit="x", at_least=5.0),
            ]  # fmt: skip
        rows += first
        show(first)
    mean = statistics.geometric_mean(decided)
    rows.append(Row(what="warm, by work, beside ejkernel: mean", measured=mean, unit="x", at_most=1.0))
    rows.append(Row(what="warm, by work, beside ejkernel: largest", measured=max(decided), unit="x", at_most=1.0))
    for what, found in zip(("tunebook", CONTROL), zip(*ratios, strict=True), strict=True):
        mean, at_most = statistics.geometric_mean(found), 1.0 if what in SIDES else None
        rows.append(Row(what=f"warm, {what} beside ejkernel: mean", measured=mean, unit="x", at_most=at_most))
        rows.append(Row(what=f"warm, {what} beside ejkernel: largest", measured=max(found), unit="x"))
    show(rows[-6:])
    return rows, raw


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=101)
    parser.add_argument("--ops", nargs="+")
    parser.add_argument("--samples", type=int, default=5, help="cold calls of each kind")
    parser.add_argument(
        "--keep-cold", action="store_true", help="take cold times, and with --ops the others' too, from the last run"
    )
    parser.add_argument("--cold-again", nargs="+", default=[], help="with --keep-cold: but of these, take them again")
    parser.add_argument("--cold", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    if given.cold:
        print_cold(given.ops, given.samples)
        return
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= caches_in(folder)
        kept = json.loads((RESULTS / "ejkernel_ops.json").read_text()) if given.keep_cold else None
        rows, raw = measure(given.ops or list(operations()), given.rounds, given.samples, kept, given.cold_again)
    if given.keep_cold or not given.ops:
        save("ejkernel_ops", rows, raw, ["tunebook", "ejkernel", "jax", "jaxlib", "numpy"])
        (RESULTS / "summary.md").write_text(tables.summary(tables.read()))


if __name__ == "__main__":
    main()
