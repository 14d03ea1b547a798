"""How a list of 480 Triton configurations is tuned: candidates compiled, seconds, and regret, on recorded times.

    python bench/list_search.py FILE.json.gz            a recording like the H200 matmul of three shapes
    python bench/list_search.py results/list_480.json.gz    more shapes, that bench/gpu.py has recorded

A recording with near shapes is tuned cold and with three near shapes in the book, which were tuned one after the other.

It runs the search, the race and the decision of `tunebook.adapters.triton`, on a clock that recorded times move: 20
samples and the seconds of the compiler for each configuration. A batch takes as long as 16 cores need to compile it,
and as its runs, one after the other; the first stages of a compilation take 0.13 s. Each shape is tuned cold, and with
the entries of the other shapes in the book, several times, with another order of the list and other samples. Beside it
stand random candidates. A configuration is not compiled if the recording says that it needs too much shared memory, or
if its accumulators are more than the registers of its threads hold: the same as the first stages say on sm_90. It
needs no GPU, and no Triton.
"""

from __future__ import annotations

import argparse
import gzip
import heapq
import json
import math
import random
import statistics
import sys
from pathlib import Path

import tables
from interleaved import Row, save, show

import tunebook as tb
from tunebook._base.errors import CompileError, LeftOut
from tunebook._base.record_format import BLOCKS, Body, Head, Record
from tunebook._base.vocabulary import Problem
from tunebook._measure.stopwatch import Stopwatch
from tunebook._space.space import Config
from tunebook._tuning.job import Conditions, Job, Part, Setup
from tunebook.adapters._triton.list_search import list_search, with_trials
from tunebook.search._warm_start import start_from

CORES = 16
FIRST_STAGES_S = 0.13  # the mean of 480 candidates of a matmul for sm_90, Triton 3.9
CACHED_S = 0.01  # 13 configurations were in Triton's cache when the others were recorded; they count as the median
FLUSH_S = 80e-6  # to empty the L2 cache before a run
REGISTERS = 255
WITHIN = 1.01


class Recording:
    """A kernel's times at one shape, and the clock that its runs and its compilers move."""

    def __init__(self, content, shape, seed):
        self.seed, self.rng = seed, random.Random(seed)
        self.configs = [Config(**each) for each in content["space"]]
        usual_s = statistics.median(content["compile_s"].values())
        seconds = (content["compile_s"][str(at)] for at in range(len(self.configs)))
        self.compile_s = {c: s if s > CACHED_S else usual_s for c, s in zip(self.configs, seconds, strict=True)}
        self.failed = {self.configs[int(at)]: text for at, text in content["failed"].items()}
        rows = content["shapes"][shape]["rows"]
        self.samples_s = {self.configs[int(at)]: [t * 1e-3 for t in row["t"]] for at, row in rows.items()}
        self.true_s = {config: statistics.median(samples) for config, samples in self.samples_s.items()}
        self.best_s = min(self.true_s.values())
        self.sizes = tuple(map(int, shape.split("x")))
        key = json.dumps(dict(zip("MNK", self.sizes, strict=True)))
        self.problem = Problem("gpu:NVIDIA H200", "matmul", key)
        self.now_s = 0.0
        self.compiled = []
        self.refused = 0
        self.reached_s = math.inf

    def clock_ns(self):
        return round(self.now_s * 1e9)

    def make_fn(self, config):
        def run():
            seconds = self.rng.choice(self.samples_s[config])
            self.now_s += seconds + FLUSH_S
            return seconds

        if config in self.failed:
            raise RuntimeError(self.failed[config])
        return run

    def blocks_of(self, config):
        """Return how many blocks a launch has."""
        return math.ceil(self.sizes[0] / config.BM) * math.ceil(self.sizes[1] / config.BN)

    def foresee(self, configs):
        """Return why configurations are not compiled, which takes the first stages of their compilation."""
        self.now_s += FIRST_STAGES_S * -(-len(configs) // CORES)
        found = [self.refusal(config) for config in configs]
        self.refused += sum(refusal is not None for refusal in found)
        return found

    def compile(self, config):
        if self.refusal(config) is not None:
            raise self.refusal(config)

    def refusal(self, config):
        if config in self.failed:
            return CompileError(self.failed[config])
        spills = REGISTERS * 32 * config.num_warps < config.BM * config.BN
        return LeftOut("its loop carries more than the registers hold") if spills else None

    def batch_ended(self, configs):
        """Move the clock by the time in which all cores compile a batch, and note whether the best is among all."""
        new = [config for config in configs if config not in self.compiled]
        cores = [0.0] * CORES
        for config in new:
            heapq.heappush(cores, heapq.heappop(cores) + self.compile_s[config])
        self.now_s += max(cores)
        self.compiled += new
        if min((self.true_s.get(c, math.inf) for c in self.compiled), default=math.inf) <= WITHIN * self.best_s:
            self.reached_s = min(self.reached_s, self.now_s)


class Watched:
    """A strategy that tells a recording of the batches that were measured."""

    def __init__(self, inner, recording, *, refuses):
        self._inner, self._recording, self._refuses = inner, recording, refuses

    def propose(self, n):
        return self._inner.propose(n)

    def observe(self, observations):
        observed, refusal = list(observations), self._recording.refusal
        self._recording.batch_ended([c for c, _ in observed if not self._refuses or refusal(c) is None])
        self._inner.observe(observed)


class RecordedTimer:
    """A `Timer` that returns the seconds of a recorded run."""

    name = "recorded"
    is_device_clock = True

    def wait(self, result):
        pass

    def sample_s(self, launch, runs):
        return launch()


def job_for(recording, others, strategy, trials, *, refuses):
    """Return the job of the adapter for a list, on a machine with 16 cores."""
    listed = recording.rng.sample(recording.configs, len(recording.configs))
    search = list_search(listed, strategy)
    start = start_from(others, recording.problem, search.space, recording.blocks_of)
    compile_one, foresee = (recording.compile, recording.foresee) if refuses else (lambda _config: None, None)
    setup = Setup(compile=compile_one, foresee=foresee)
    parts, conditions = [Part(recording.make_fn)], Conditions("code")
    job = Job(parts, [], search=search._replace(start=start, batch=CORES), setup=setup, conditions=conditions)
    job = with_trials(job, foreseen=refuses)

    def begin(space, *, seed, start, inner=job.search.strategy):
        return Watched(inner(space, seed=seed, start=start), recording, refuses=refuses)

    trials = job.search.trials if trials is None else trials
    return job._replace(search=job.search._replace(strategy=begin, seed=recording.seed, trials=trials))


def tune(content, shape, seed, others=(), *, strategy=None, trials=None, refuses=True):
    """Tune a shape; return its entry for the book, and the numbers."""
    recording = Recording(content, shape, seed)
    stopwatch = Stopwatch(shortest_s=0.0, clock_ns=recording.clock_ns).by(RecordedTimer())
    tuner = tb.Tuner(stopwatch=stopwatch, clock_s=lambda: recording.now_s, probes=lambda _: (), compile_threads=1)
    tuned = tuner.tune(job_for(recording, others, strategy, trials, refuses=refuses))
    winner = next(m for m in tuned.measurements if tuned.configs[m.fingerprint] == tuned.config)
    head = Head(problem=recording.problem, config=winner.config, checksum="", origin="tuned")
    configs = tuned.configs
    counted = [m._replace(extra={BLOCKS: recording.blocks_of(configs[m.fingerprint])}) for m in tuned.measurements]
    return Record(head, Body(measurements=tuple(counted))), {
        "shape": shape,
        "seed": seed,
        "compiled": len(recording.compiled),
        "refused": recording.refused,
        "reached_s": recording.reached_s if math.isfinite(recording.reached_s) else None,
        "seconds": recording.now_s,
        "regret": recording.true_s[tuned.config] / recording.best_s - 1,
    }


COLD, OTHERS, THREE = "cold", "the other two shapes in the book", "three near shapes in the book"
NEAR, KNOWN = 2.0, 3  # doublings of sizes in all; shapes in the book
WAYS = {
    COLD: {},
    "cold, nothing foreseen": {"refuses": False},
    "guided, 48 compiled": {"strategy": "guided", "trials": 48},
    "random, 48 compiled": {"strategy": "random", "trials": 48},
    "random, 48 compiled, nothing foreseen": {"strategy": "random", "trials": 48, "refuses": False},
}
WITH_OTHERS = {OTHERS: {}, f"{OTHERS}, 16 compiled": {"trials": 16}}


def measure(content, seeds):
    """Return the numbers of every way, shape and seed."""
    found = {name: [] for name in (*WAYS, *WITH_OTHERS)}
    for seed in range(seeds):
        entries = {}
        for shape in content["shapes"]:
            for name, options in WAYS.items():
                entry, numbers = tune(content, shape, seed, **options)
                found[name].append(numbers)
                entries.setdefault(shape, entry)
        for shape in content["shapes"]:
            others = [entry for other, entry in entries.items() if other != shape]
            for name, options in WITH_OTHERS.items():
                found[name].append(tune(content, shape, seed, others, **options)[1])
    return found


def near_in(content, shape):
    """Return the shapes of a recording whose sizes differ from a shape's by a factor of 4 in all."""
    sizes = {other: tuple(map(int, other.split("x"))) for other in content["shapes"]}

    def doublings(other):
        return sum(abs(math.log2(a / b)) for a, b in zip(sizes[other], sizes[shape], strict=True))

    return [other for other in sizes if other != shape and doublings(other) <= NEAR]


def measure_near(content, seeds):
    """Return the numbers of shapes cold, and with three near ones in the book."""
    found = {COLD: [], THREE: []}
    for seed in range(seeds):
        rng = random.Random(seed)
        for shape in content["shapes"]:
            near = near_in(content, shape)
            if len(near) < KNOWN:
                continue
            book = []
            for other in rng.sample(near, KNOWN):
                book.append(tune(content, other, seed, list(book))[0])
            found[COLD].append(tune(content, shape, seed)[1])
            found[THREE].append(tune(content, shape, seed, book)[1])
    return found


def rows_of(name, numbers):
    """Return the rows of a way to tune; the targets are of all shapes."""
    targets = {COLD: (48, 5.0, 1.0), THREE: (16, 1.5, 1.0)}.get(name, (None,) * 3)
    reached = [each["reached_s"] for each in numbers if each["reached_s"] is not None]
    regrets = [100 * each["regret"] for each in numbers]
    found = [
        ("configurations compiled, at most", max(each["compiled"] for each in numbers), "of 480", targets[0]),
        ("until one within 1 % of the best is compiled", statistics.median(reached or [math.inf]), "s", targets[1]),
        ("configurations compiled, mean", statistics.mean(each["compiled"] for each in numbers), "of 480", None),
        ("none within 1 %", 1 - len(reached) / len(numbers), "of 1", None),
        ("in all", statistics.median(each["seconds"] for each in numbers), "s", None),
        ("regret, mean", statistics.mean(regrets), "%", targets[2]),
        ("regret, worst", max(regrets), "%", None),
    ]
    return [Row(what=f"{name}: {what}", measured=m, unit=unit, at_most=most) for what, m, unit, most in found]


def all_rows(found):
    """Return the rows of all ways, and of each shape for two of them."""
    rows = [row for name, numbers in found.items() for row in rows_of(name, numbers)]
    for name in (COLD, *(name for name in (OTHERS, THREE) if name in found)):
        for shape in dict.fromkeys(each["shape"] for each in found[name]):
            _, reached, _, _, _, *regret = rows_of(f"{name}, {shape}", [n for n in found[name] if n["shape"] == shape])
            rows += [reached, *regret]
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--seeds", type=int, default=16)
    options = parser.parse_args()
    content = json.loads(gzip.decompress(options.file.read_bytes()))
    is_near = any(len(near_in(content, shape)) >= KNOWN for shape in content["shapes"])
    found = (measure_near if is_near else measure)(content, options.seeds)
    rows = all_rows(found)
    show(rows)
    save("list_search_near" if is_near else "list_search", rows, found, ["numpy"])
    tables.write(tables.read())
    return 0


if __name__ == "__main__":
    sys.exit(main())
