"""The fastest of several implementations of one operation, measured once by all threads of all processes.

    python examples/implementations.py

A `TuneCache` holds the index of the fastest implementation for each kind of call. The first caller of a kind claims it,
measures, and publishes the result; the others wait for it. A second run finds the results on disk, in a directory for
temporary files; without `root` they would be in your own book. The checksum changes with the code of the
implementations: an edited program measures again, and the old one keeps its results.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import tempfile
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np

import tunebook as tb


def by_slices(values, width):
    """Return the moving mean, summed up one shifted slice at a time."""
    count = len(values) - width + 1
    return sum(values[shift : shift + count] for shift in range(width)) / width


def by_running_sum(values, width):
    """Return the moving mean, from differences of a running sum."""
    running = np.cumsum(np.concatenate([[0.0], values]))
    return (running[width:] - running[:-width]) / width


def by_convolution(values, width):
    """Return the moving mean, as a convolution."""
    return np.convolve(values, np.full(width, 1 / width), mode="valid")


IMPLEMENTATIONS = by_slices, by_running_sum, by_convolution
CHECKSUM = hashlib.sha256("".join(map(inspect.getsource, IMPLEMENTATIONS)).encode()).hexdigest()
ROOT = Path(tempfile.gettempdir(), f"tunebook-implementations-{os.getuid()}")
CACHE = tb.TuneCache("moving-mean", tb.device_fingerprint(), root=ROOT)
measured = []  # the kinds of calls that this process has measured


def moving_mean(values, width):
    """Return the moving mean, by the fastest implementation for calls of this size."""
    return IMPLEMENTATIONS[fastest((len(values), width), values, width)](values, width)


def fastest(kind, *arguments):
    """Return the index of the fastest implementation for a kind of call."""
    while True:
        match CACHE.fastest(kind):
            case tb.Hit(index):
                return index
            case tb.Unchecked():  # on disk, perhaps by another version of this program
                CACHE.validate_checksum(kind, CHECKSUM)
            case tb.Pending() as pending:
                pending.wait()
            case tb.Miss():
                if CACHE.mark_pending(kind):
                    measure(kind, *arguments)


def measure(kind, *arguments):
    """Measure all implementations for a kind of call, and publish the result."""
    measured.append(kind)
    results = []
    for index, implementation in enumerate(IMPLEMENTATIONS):
        try:
            seconds = tb.Tuner().measure(implementation, *arguments)
        except (ValueError, MemoryError) as error:
            results.append(tb.AutotuneResult.error(tb.AutotuneError(str(error))))
        else:
            outcome = tb.AutotuneOutcome(implementation.__name__, index, (seconds,))
            results.append(tb.AutotuneResult.success(outcome))
    ran = [result.outcome for result in results if isinstance(result.outcome, tb.AutotuneOutcome)]
    if not ran:
        CACHE.clear_pending(kind)  # or the others would wait for ever
        raise ValueError(f"no implementation can run {kind}: {results[0].outcome}")
    best = min(ran, key=lambda outcome: outcome.computation)
    CACHE.cache_insert(kind, best.index)
    CACHE.persistent_cache_insert(kind, CHECKSUM, best.index, results)


KINDS = [(1000, 4), (1000, 200), (100_000, 4), (100_000, 200)]


def work(_number):
    """Make every kind of call in four threads at once; return the process, and the kinds that it has measured."""
    arrays = {size: np.arange(float(size)) for size, _ in KINDS}
    with ThreadPoolExecutor(4) as threads:
        for mean, (size, width) in zip(
            threads.map(lambda k: moving_mean(arrays[k[0]], k[1]), KINDS * 4), KINDS * 4, strict=True
        ):
            np.testing.assert_allclose(mean[:1], (width - 1) / 2, err_msg=f"{size} {width}")
    return os.getpid(), measured


def main():
    """Call from three processes at once, and print which of them measured."""
    with ProcessPoolExecutor(3, mp_context=get_context("spawn")) as processes:
        done = dict(processes.map(work, range(6)))
    for pid, kinds in done.items():
        print(f"process {pid} measured {sorted(kinds) or 'nothing'}")
    print(f"{sum(map(len, done.values()))} measurements for {len(KINDS)} kinds of calls")
    for kind in KINDS:
        for result in CACHE.results(kind):
            outcome = result.outcome
            if isinstance(outcome, tb.AutotuneOutcome):
                best = fastest(kind) == outcome.index
                print(f"  {kind!s:15} {outcome.name:15} {outcome.computation[0] * 1e6:8.1f} us {'fastest' * best}")


if __name__ == "__main__":
    main()
