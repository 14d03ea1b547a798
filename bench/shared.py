"""What a shared book costs a call: starts a redis-server on loopback, and writes results/shared.json.

It uses the servers of the tests, and needs what those need.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from servers import HOST, free_port, proxy, redis_server
from tables import report

from tunebook._selection.single_flight import acquire
from tunebook.stores import DirectoryStore, open_shared
from tunebook.testing import example_record


def median_us(step, rounds=200):
    times = []
    for n in range(rounds):
        began = time.perf_counter()
        step(n)
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e6, max(times) * 1e3


def record(n):
    return example_record(call_key=str(n))


def lease(store):
    def step(n):
        acquire(store.leases(), f"lease-{n}", look=lambda: None).release()

    return step


def with_a_server(root, port):
    url = f"redis://{HOST}:{port}/0"
    mine = open_shared(DirectoryStore(root / "a"), url, root=root / "a", key=None)
    theirs = open_shared(DirectoryStore(root / "b"), url, root=root / "b", key=None)
    local = DirectoryStore(root / "alone")
    yield "put, local book alone", median_us(lambda n: local.put(record(n)))
    yield "put, and sent", median_us(lambda n: mine.put(record(n)))
    yield "hit, local book alone", median_us(lambda n: local.get(record(n).problem))
    yield "hit, with a shared book behind", median_us(lambda n: mine.get(record(n).problem))
    yield "local miss, shared hit, kept", median_us(lambda n: theirs.get(record(n).problem))
    yield "miss in both", median_us(lambda n: theirs.get(record(-1 - n).problem))
    yield "the same again, within 5 s", median_us(lambda n: theirs.get(record(-1 - n).problem))
    yield "lease taken and given back", median_us(lease(mine))


def without(root, url, what):
    firsts, later = [], 0.0
    for attempt in range(20):
        home = root / f"{what}-{attempt}"
        store = open_shared(DirectoryStore(home), url, root=home, key=None)
        firsts.append(median_us(lambda n, store=store: store.get(record(n).problem), rounds=1)[1] * 1e3)
        later = median_us(lambda n, store=store: store.get(record(n).problem))[0]
    yield f"{what}: first call, of 20 stores", (statistics.median(firsts), max(firsts) / 1e3)
    yield f"{what}: later calls", (later, 0.0)


def main():
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as name, redis_server(Path(name, "redis")) as server, proxy(server.port) as hung:
        hung.mode = "hang"
        rows = [*with_a_server(Path(name), server.port)]
        rows += without(Path(name), f"redis://{HOST}:{free_port()}/0", "server down")
        rows += without(Path(name), f"redis://{HOST}:{hung.port}/0", "server hung")
    return report("shared", [row_of(what, *times) for what, times in rows], dict(rows), quick=False)


def row_of(what, median, worst):
    """Return a row of what, measured, target, kept: the first call without a server by its worst time."""
    if "first call" in what:
        return f"{what}: worst", f"{worst:.0f} ms", "<= 300 ms", worst <= 300
    return what, f"{median:.0f} us", "", True


if __name__ == "__main__":
    sys.exit(main())
