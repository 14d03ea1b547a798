"""Predictions for calls of released packages on this machine: scipy, numba, scikit-learn, blosc2 and zstandard.

    pip install scipy numba scikit-learn blosc2 zstandard
    python bench/predict_packages.py [--sizes 25 60] [--calls 40]

Each package is tuned at so many sizes in a book of its own. Then it is called at other sizes with
`cache_miss_fallback="predict"`. A call that is answered at once is judged by runs of all candidates in turn: one half
of the rounds names the fastest, and the other half says how much slower the choice is, so that noise chooses no winner.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import statistics
import sys
import tempfile
import time
from importlib.metadata import version

import blosc2
import numba
import numpy as np
import zstandard
from scipy.spatial.distance import cdist
from sklearn.neighbors import KDTree
from tables import report

import tunebook as tb

ROUNDS = 24
PACKAGES = ("scipy", "numba", "scikit-learn", "blosc2", "zstandard")
SPACES = {
    "scipy: cdist in chunks": tb.Space(chunk=[1, 4, 16, 64, 256, 1024]),
    "numba: transposition in blocks": tb.Space(rows=[4, 16, 64, 256], columns=[4, 16, 64, 256]),
    "scikit-learn: leaves of a KDTree": tb.Space(leaf_size=[2, 8, 32, 128, 512]),
    "blosc2: codec and block": tb.Space(codec=["LZ4", "ZSTD", "BLOSCLZ"], block=[4096, 16384, 65536, 262144]),
    "zstandard: level and strategy": tb.Space(level=[-5, 1, 3, 5], strategy=[1, 2, 3]),
}


def nearest(a, b, *, config):
    return np.concatenate([cdist(a[at : at + config.chunk], b).argmin(1) for at in range(0, len(a), config.chunk)])


@numba.njit(fastmath=True)
def blocked(a, out, rows, columns):
    n, m = a.shape
    for top in range(0, n, rows):
        for left in range(0, m, columns):
            for j in range(left, min(left + columns, m)):
                for i in range(top, min(top + rows, n)):
                    out[j, i] = a[i, j]


def transposed(a, *, config):
    out = np.empty((a.shape[1], a.shape[0]), a.dtype)
    blocked(a, out, config.rows, config.columns)
    return out


def neighbours(points, asked, *, config):
    return KDTree(points, leaf_size=config.leaf_size).query(asked, k=3)[0]


def there_and_back(x, *, config):
    codec = blosc2.Codec[config.codec]
    packed = blosc2.compress2(x, codec=codec, clevel=1, typesize=x.itemsize, nthreads=1, blocksize=config.block)
    return np.frombuffer(blosc2.decompress2(packed), x.dtype)


def squeezed(x, *, config):
    chosen = zstandard.ZstdCompressionParameters.from_level(config.level, strategy=config.strategy)
    packed = zstandard.ZstdCompressor(compression_params=chosen).compress(x)
    return np.frombuffer(zstandard.ZstdDecompressor().decompress(packed), x.dtype)


def drawn(rng, low, high):
    return round(math.exp(rng.uniform(math.log(low), math.log(high))))


def arguments(name, rng):
    """Return the arguments of a call of some size."""
    values = np.random.default_rng(rng.randrange(2**32))
    match name.partition(":")[0]:
        case "scipy":
            wide = drawn(rng, 2, 32)
            return values.random((drawn(rng, 50, 1500), wide)), values.random((drawn(rng, 50, 1500), wide))
        case "numba":
            return (values.random((drawn(rng, 64, 1500), drawn(rng, 64, 1500))),)
        case "scikit-learn":
            wide = drawn(rng, 2, 12)
            return values.random((drawn(rng, 200, 8000), wide)), values.random((drawn(rng, 10, 300), wide))
        case "blosc2":
            return (np.cumsum(values.integers(0, 5, drawn(rng, 2000, 400_000))).astype(np.int32),)
    return (np.cumsum(values.integers(0, 3, drawn(rng, 1000, 300_000))).astype(np.uint8),)


FUNCTIONS = dict(zip(SPACES, (nearest, transposed, neighbours, there_and_back, squeezed), strict=True))


def regret(function, given, configs, chosen):
    """Return how much slower a choice is than the fastest candidate; noise may make it less than 0."""
    taken = {config: [] for config in configs}
    rng = random.Random(0)
    for _ in range(ROUNDS):
        for config in rng.sample(configs, len(configs)):
            began = time.perf_counter()
            function(*given, config=config)
            taken[config].append(time.perf_counter() - began)
    halves = [{config: min(times[half::2]) for config, times in taken.items()} for half in (0, 1)]
    found = [other[chosen] / other[min(half, key=half.__getitem__)] - 1 for half, other in (halves, halves[::-1])]
    return statistics.fmean(found)


def judge(name, sizes, calls):
    """Return a row for each call at a size that was not tuned."""
    told, rng = [], random.Random(f"{name} {sizes}")
    function = tb.tunable(
        FUNCTIONS[name], space=SPACES[name], name=name.partition(":")[0].replace("-", "_"), policy="predict",
        on_event=lambda event, **data: told.append((event, data)),
    )  # fmt: skip
    for _ in range(sizes):
        tb.tune(function, *arguments(name, rng))
    rows = []
    for _ in range(calls):
        given = arguments(name, rng)
        told.clear()
        function(*given)
        answer = next((data for event, data in told if event == "predicted"), None)
        rows.append({"sizes": [list(each.shape) for each in given], "at_once": answer is not None})
        if answer is not None:
            found = regret(function, given, list(SPACES[name]), answer["cfg"])
            rows[-1] |= {"regret": found, "bound": answer["bound"], "config": dict(answer["cfg"])}
    return rows


def line(name, sizes, rows):
    regrets = [row["regret"] for row in rows if row["at_once"]]
    if not regrets:
        return (f"{name}, {sizes} tuned sizes", f"none of {len(rows)} at once", "", True)
    held = sum(row["regret"] <= row["bound"] for row in rows if row["at_once"])
    mean, high = statistics.fmean(regrets), float(np.quantile(regrets, 0.95))
    said = f"{len(regrets)} of {len(rows)} at once, {mean:.1%} slower, 95 % within {high:.1%}; within the bound {held}"
    return (f"{name}, {sizes} tuned sizes", said, "", True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[25, 60])
    parser.add_argument("--calls", type=int, default=40)
    options = parser.parse_args()
    rows, raw = [], {}
    for name in SPACES:
        for sizes in options.sizes:
            with tempfile.TemporaryDirectory() as home:
                os.environ["TUNEBOOK_HOME"] = home
                raw[f"{name}, {sizes}"] = found = judge(name, sizes, options.calls)
            rows.append(line(name, sizes, found))
            print(*rows[-1][:2], flush=True)
    versions = {package: version(package) for package in PACKAGES}
    return report("predict_packages", rows, {"versions": versions, "calls": raw}, quick=False)


if __name__ == "__main__":
    sys.exit(main())
