"""One rank of a job that agrees: `agreement_ranks.py FRAMEWORK RANK WORLD PLACE`; prints its results as JSON.

`PLACE` is a port for jax, and for torch a file in which rank 0 writes one.

Every rank finds another candidate the fastest. At the end the last rank is killed, in a vote that it opened, and then,
of more than two, rank 1, which tunes for all.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time
from pathlib import Path

from limits import HANG_S

import tunebook as tb
from tunebook import fleet
from tunebook._selection.selector import agreement
from tunebook.fleet._agreement.log import LogEntry
from tunebook.stores import problem_id

FRAMEWORK, RANK, WORLD, PLACE = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
TERMS = {"vote_s": 2.0, "deadline_s": HANG_S, "lease_s": 2.0}
KILLED = "rank 1 is killed"
SPACE = [10 * n for n in range(1, 9)]
ALIVE = [0, 2] if WORLD > 2 else [0]
tuned = []


def join():
    if FRAMEWORK == "jax":
        import jax

        jax.distributed.initialize(f"127.0.0.1:{PLACE}", WORLD, RANK)
        return
    import torch.distributed as dist

    # On a port that the system gives, told by a file: one that was free a moment ago may be another's now.
    port = Path(PLACE)
    if RANK == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port.with_suffix(".new").write_text(str(store.port))
        port.with_suffix(".new").rename(port)
    else:
        while not port.exists():
            time.sleep(0.01)
        store = dist.TCPStore("127.0.0.1", int(port.read_text()))
    dist.init_process_group("gloo", store=store, rank=RANK, world_size=WORLD)


class Measures:
    def autotune(self, make_fn, args, kwargs, candidates):
        tuned.append(args)
        if args == (KILLED,) and RANK == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return candidates[RANK + 1]


def make(name, tuner=None, **policy):
    return tb.tunable(
        lambda x, *, config: (x, config.b), space=tb.Space(b=SPACE), heuristic={"b": 10}, name=name,
        tuner=tuner or Measures(), policy=tb.AutotunePolicy(**policy),
    )  # fmt: skip


def timed(call):
    began = time.monotonic()
    found = call()
    return [found[1], time.monotonic() - began]


def together(name):
    """Wait until all ranks are here."""
    board = agreement().board
    board.add(f"here/{name}", 1)
    while board.add(f"here/{name}", 0) < WORLD:
        time.sleep(0.01)


def one_hits():
    """Rank 0 has the entry in its book; the kernel object that also has it in memory is another one."""
    return timed(lambda: make("one hits")(1)), len(tuned)


def each_in_its_own_order():
    kernel = make("in any order")
    asked = sorted([1, 2, 3], key=lambda n: (n + RANK) % 3)
    return sorted([n, kernel(n)[1]] for n in asked)


def in_parts():
    """Measure for real: candidates sleep, and which of them sleeps the least is another one in each rank."""
    ran = []

    def sleeping(x, *, config):
        ran.append(config.b)
        # By `sys.argv`, whose content is no part of the code: to the book this is the same function in every rank.
        time.sleep(0.002 * (1 + (config.b // 10 + int(sys.argv[2])) % 8))
        return x, config.b

    fleet.agree(FRAMEWORK, share="split", **TERMS)
    kernel = tb.tunable(sleeping, space=tb.Space(b=SPACE), heuristic={"b": 10}, name="in parts", check=False)
    found = timed(lambda: kernel(1))
    fleet.agree(FRAMEWORK, **TERMS)
    return [*found, sorted(set(ran[:-1]))]


def rank_0_never_calls():
    kernel = make("rank 0 never calls")
    return [timed(lambda n=n: kernel(n)) for n in (1, 2, 3)] if RANK else []


def in_a_trace():
    if FRAMEWORK != "jax":
        return None
    import jax
    import jax.numpy as jnp

    kernel = tb.tunable(
        lambda x, *, config: x * config.b, space=tb.Space(b=SPACE), heuristic={"b": 10}, name="in a trace",
        tuner=Measures(), store=False,
    )  # fmt: skip
    x, jitted = jnp.float32(1.0), jax.jit(lambda x: kernel(x) + 0)
    with kernel.overlay(tb.Config(b=7)):
        own = float(jitted(x))
    return [own, float(jitted(x)), float(kernel(x))]


def killed_in_the_vote():
    """The last rank opens the vote, and is killed; the others come to it then."""
    kernel = make("killed in the vote")
    problem = problem_id(kernel.problem(1))
    if RANK == WORLD - 1:
        board = agreement().board
        board.first(f"agree/{problem}/0", LogEntry("open", RANK, "the one that is killed").text())
        board.first("opened", "yes")
        os.kill(os.getpid(), signal.SIGKILL)
    agreement().board.wait("opened", HANG_S)
    return timed(lambda: kernel(1))


def killed_while_it_tunes():
    """Rank 1 leads, as rank 0 may not, and is killed; rank 2 goes on."""
    return timed(
        lambda: make("killed while it tunes", cache_miss_fallback=("heuristics", "autotune")[RANK > 0])(KILLED)
    )


def main():
    faulthandler.dump_traceback_later(HANG_S, exit=True)
    if RANK == 0:
        make("one hits")(1)
    join()
    alone = make("alone")(1)[1]
    fleet.agree(FRAMEWORK, **TERMS)
    tuned.clear()
    together("start")
    said = {
        "rank": RANK,
        "alone": alone,
        "one hits": one_hits(),
        "measured": timed(lambda: make("measured")(1)),
        "in any order": each_in_its_own_order(),
        "in parts": in_parts(),
        "rank 0 never calls": rank_0_never_calls(),
        "in a trace": in_a_trace(),
    }
    began = time.monotonic()
    fleet.assert_agreement(timeout_s=HANG_S)
    said["compared in"] = time.monotonic() - began
    said["killed in the vote"] = killed_in_the_vote()
    if WORLD > 2:
        said["killed while it tunes"] = killed_while_it_tunes()
    print(json.dumps(said), flush=True)
    together_without_the_dead()
    os._exit(0)  # nobody waits for the dead


def together_without_the_dead():
    """Rank 0 has the job's service in it, and so goes last."""
    board = agreement().board
    board.add("done", 1)
    while RANK == 0 and board.add("done", 0) < len(ALIVE):
        time.sleep(0.01)


if __name__ == "__main__":
    main()
