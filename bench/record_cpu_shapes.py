"""Record the times of every configuration of the three C kernels of examples/ at many shapes, on this machine.

    python bench/record_cpu_shapes.py --out FILE.json.gz

For `bench/predict.py`, where there is no GPU. All configurations take turns in random order; those near the fastest get
more samples, and two medians are kept, each of half of the samples: their difference is the noise. The clock is that of
the process's CPU time, which other processes do not stretch.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

import convolution
import matmul
import transpose

from tunebook import device_fingerprint

SAMPLE_S = 200e-6  # the time of one sample, at least
FAR, FAR_SAMPLES, NEAR_SAMPLES = 1.3, 2, 14
MOST_S = 5e-3  # of the fastest configuration, roughly: larger shapes would take the time of many


def drawn(rng, low, high):
    """Return a size that is as likely to be small as large: two to a power from low to high."""
    return round(2 ** rng.uniform(low, high))


def matmul_shape(rng):
    m, n, k = (drawn(rng, 2, 11) for _ in range(3))
    return (m, n, k) if m * n * k < MOST_S * 2e10 else matmul_shape(rng)


def transpose_shape(rng):
    height, width = (drawn(rng, 4, 12) for _ in range(2))
    return (height, width) if height * width < MOST_S * 5e8 else transpose_shape(rng)


def convolution_shape(rng):
    height, width, window = drawn(rng, 4, 11), drawn(rng, 4, 11), rng.choice((3, 5, 7, 9, 11))
    fits = window < min(height, width) and height * width * window**2 < MOST_S * 5e9
    return (height, width, window) if fits else convolution_shape(rng)


KERNELS = {
    "C matmul": (("m", "n", "k"), matmul.matmul, matmul.space, matmul.operands, matmul_shape),
    "C transpose": (("height", "width"), transpose.transpose, transpose.space, transpose.operands, transpose_shape),
    "C convolution": (
        ("height", "width", "window"),
        convolution.convolve,
        convolution.space,
        convolution.operands,
        convolution_shape,
    ),
}


def sample_s(run, arguments, config, runs):
    began = time.process_time()
    for _ in range(runs):
        run(*arguments, config=config)
    return (time.process_time() - began) / runs


def times_at(run, arguments, configs, rng):
    """Return two medians of nanoseconds for each configuration at one shape."""
    first = [min(sample_s(run, arguments, config, 1) for _ in range(2)) for config in configs]
    runs = [max(1, round(SAMPLE_S / seconds)) for seconds in first]
    samples = [[] for _ in configs]
    taking = list(range(len(configs)))
    for turn in range(NEAR_SAMPLES):
        if turn == FAR_SAMPLES:
            best = min(min(taken) for taken in samples)
            taking = [at for at in taking if min(samples[at]) <= FAR * best]
        rng.shuffle(taking)
        for at in taking:
            samples[at].append(sample_s(run, arguments, configs[at], runs[at]))
    return [[round(statistics.median(taken[half::2]) * 1e9, 1) for half in (0, 1)] for taken in samples]


def record(name, many, seed):
    sizes, run, space, operands, draw = KERNELS[name]
    # The configurations are run as they are: neither the tuner nor the book has a part in this.
    configs, bare = list(space), run.__wrapped__
    rng = random.Random(f"{name} {seed}")
    shapes = list(dict.fromkeys(draw(rng) for _ in range(2 * many)))[:many]
    rows = [[list(shape), times_at(bare, operands(*shape), configs, rng)] for shape in shapes]
    plain = [{axis: v if isinstance(v, int | str) else str(v) for axis, v in config.items()} for config in configs]
    return {"sizes": sizes, "configs": plain, "failed": [], "rows": rows}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.json.gz")
    parser.add_argument("--shapes", type=int, default=160, help="per kernel")
    parser.add_argument("--seed", type=int, default=0, help="of drawing shapes")
    options = parser.parse_args()
    content = {"device": device_fingerprint(), "kernels": {}}
    for name in KERNELS:
        began = time.monotonic()
        content["kernels"][name] = record(name, options.shapes, options.seed)
        print(f"{name}: {options.shapes} shapes, {time.monotonic() - began:.0f} s", flush=True)
    options.out.write_bytes(gzip.compress(json.dumps(content, separators=(",", ":")).encode(), mtime=0))
    return 0


if __name__ == "__main__":
    sys.exit(main())
