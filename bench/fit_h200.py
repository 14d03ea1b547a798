"""Learn a heuristic for a Triton matmul from measured shapes, and say how good it is on shapes it has not seen.

    python bench/fit_h200.py --measure FILE              on a GPU: 48 shapes, each with every configuration
    python bench/fit_h200.py --measure FILE --drawn 200  and so many more that are drawn at random
    python bench/fit_h200.py --measure FILE --drawn 40 --only-drawn --seed 1    those alone, and others
    python bench/fit_h200.py --fit FILE                  anywhere: learn, print the Python, write the results
    python bench/fit_h200.py --fit FILE --check FILE     and say how good it is on the shapes of another file

Every configuration is sampled twice on every shape; those within 1.5 times the best are sampled 25 times more, in
turn, and their median counts: with ten, the fastest of 68 is often the luckiest, and every choice looks worse than it
is. Outputs are checked once per configuration. Measuring stops when `--seconds` are over,
with the shapes that are done by then.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from tables import report

from tunebook.search import Example, fit
from tunebook.search._learned_heuristic import regret_of

# As training and serving have them: square, tall and flat, long and short in K, and a few rows for decoding.
SHAPES = [
    *[(s, s, s) for s in (256, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)],
    *[(m, n, k) for m in (16, 64, 256, 1024) for n, k in ((1024, 4096), (4096, 4096), (11008, 4096), (4096, 11008))],
    *[(m, n, k) for m in (2048, 8192) for n, k in ((1024, 1024), (4096, 1024), (1024, 4096), (5120, 5120))],
    *[(512, 512, 16384), (1024, 1024, 8192), (256, 4096, 512), (4096, 256, 512), (2048, 128, 2048), (128, 2048, 2048)],
    *[(768, 3072, 768), (3072, 768, 3072), (384, 384, 384), (640, 1280, 2560), (16, 32000, 4096), (64, 32000, 2048)],
    *[(1280, 10240, 1280), (5120, 5120, 512)],
]
BEHIND, MORE = 1.5, 25
WRONG = 2e-2  # of the largest value, in bfloat16


def drawn_shapes(many, seed):
    """Return shapes that nobody chose: each size any multiple of 16 up to 8192, small ones as likely as large ones."""
    rng = random.Random(seed)
    return [tuple(16 * round(2 ** rng.uniform(0, 9)) for _ in range(3)) for _ in range(many)]


def configurations():
    """Return the configurations: those of bench/gpu.py, and narrow ones for few rows."""
    import triton  # noqa: PLC0415 - as above
    from gpu_kernels import MATMUL_48  # noqa: PLC0415 - needs triton, which learning does not

    narrow = [
        triton.Config({"BM": m, "BN": n, "BK": k, "GROUP": 8}, num_warps=warps, num_stages=4)
        for m, n in ((16, 64), (16, 128), (32, 64), (32, 128), (64, 32))
        for k in (64, 128)
        for warps in (2, 4)
    ]
    return [*MATMUL_48, *narrow]


def plain(config):
    return {**config.kwargs, "num_warps": config.num_warps, "num_stages": config.num_stages}


class Gpu:
    """Launches the kernel and times it, with a cold second-level cache."""

    def __init__(self):
        import torch  # noqa: PLC0415 - learning needs none

        from tunebook.adapters.torch import CudaTimer  # noqa: PLC0415 - as above

        self.torch = torch
        self.timer = CudaTimer(torch.device("cuda"))

    def operands(self, shape):
        m, n, k = shape
        torch = self.torch
        a = torch.randn((m, k), device="cuda", dtype=torch.bfloat16)
        b = torch.randn((k, n), device="cuda", dtype=torch.bfloat16)
        return a, b, torch.empty((m, n), device="cuda", dtype=torch.bfloat16)

    def launch(self, config, operands):
        from gpu_kernels import matmul, matmul_grid  # noqa: PLC0415 - as above

        a, b, c = operands
        (m, k), n = a.shape, b.shape[1]
        matmul[matmul_grid](
            a, b, c, m, n, k, *a.stride(), *b.stride(), *c.stride(),
            **config.kwargs, num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip

    def sample_s(self, config, operands):
        # The library's: most of these launches take the host longer than the kernel runs, and it sees to that.
        return self.timer.sample_s(partial(self.launch, config, operands), 1)

    def works(self, config):
        """Whether a configuration compiles, runs and is right."""
        operands = self.operands((256, 512, 384))
        try:
            self.launch(config, operands)
        except Exception as error:  # noqa: BLE001 - whatever a compiler says, this one is left out
            print(f"left out: {plain(config)}: {str(error)[:80]}")
            return False
        a, b, c = operands
        expected = (a.float() @ b.float()).abs().max()
        return bool(((c.float() - a.float() @ b.float()).abs().max() / expected) < WRONG)


def seconds_on(gpu, configs, shape, rng):
    """Return the seconds of each configuration on one shape."""
    operands = gpu.operands(shape)
    gpu.sample_s(configs[0], operands)
    samples = [[min(gpu.sample_s(config, operands) for _ in range(2))] for config in configs]
    best = min(first for (first,) in samples)
    near = [i for i, (first,) in enumerate(samples) if first <= BEHIND * best]
    for _ in range(MORE):
        rng.shuffle(near)
        for i in near:
            samples[i].append(gpu.sample_s(configs[i], operands))
    return [statistics.median(taken) for taken in samples]


def measure(path, seconds, shapes):
    began, rng, gpu = time.monotonic(), random.Random(0), Gpu()
    configs = configurations()
    with ThreadPoolExecutor(16) as pool:  # compiles while others do, which is what takes long
        working = list(pool.map(gpu.works, configs))
    configs = [config for config, works in zip(configs, working, strict=True) if works]
    print(f"{len(configs)} configurations after {time.monotonic() - began:.0f} s", flush=True)
    shapes = list(shapes)
    rng.shuffle(shapes)
    rows = []
    for shape in shapes:
        if time.monotonic() - began > seconds:
            break
        rows.append({"shape": shape, "seconds": seconds_on(gpu, configs, shape, rng)})
        content = {"device": gpu.torch.cuda.get_device_name(), "configs": [plain(c) for c in configs], "rows": rows}
        path.write_text(json.dumps(content))
    print(f"{len(rows)} shapes after {time.monotonic() - began:.0f} s, in {path}")


def examples_of(path):
    """Return what was measured, as examples by the names of the configurations, and these."""
    content = json.loads(path.read_text())
    configs = {name_of(config): config for config in content["configs"]}
    examples = [
        Example(dict(zip("mnk", row["shape"], strict=True)), dict(zip(configs, row["seconds"], strict=True)))
        for row in content["rows"]
    ]
    return examples, configs, content["device"]


def name_of(config):
    return " ".join(f"{name}={value}" for name, value in config.items())


def learn(path, depth, check):
    examples, configs, device = examples_of(path)
    learnt = fit(examples, configs, name="matmul_config", depth=depth)
    print(learnt.source)
    fixed = min(statistics.mean(e.seconds[name] / min(e.seconds.values()) - 1 for e in examples) for name in configs)
    rows = [
        ("shapes", str(len(examples)), ">= 40", len(examples) >= 40),
        ("mean regret on held-out shapes", f"{learnt.held_out:.1%}", "<= 10 %", learnt.held_out <= 0.10),
        ("mean regret on all shapes", f"{learnt.regret:.1%}", "", True),
        ("the best single configuration, for comparison", f"{fixed:.1%}", "", True),
    ]
    raw = {"source": learnt.source, "held_out": learnt.held_out, "regret": learnt.regret, "one_config": fixed}
    if check is not None:
        others, _, _ = examples_of(check)
        raw["elsewhere"] = [regret_of(learnt.tree, example) for example in others]
        mean = statistics.mean(raw["elsewhere"])
        # The same target: a heuristic that ships meets shapes that nobody chose.
        what = f"mean regret on {len(others)} other shapes, drawn at random"
        rows.append((what, f"{mean:.1%}", "<= 10 %", mean <= 0.10))
        median = statistics.median(raw["elsewhere"])
        rows.append((f"median regret on {len(others)} other shapes, drawn at random", f"{median:.1%}", "", True))
    return report("fit_h200", rows, raw, quick=False, device=device)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--measure", type=Path, metavar="FILE")
    parser.add_argument("--fit", type=Path, metavar="FILE")
    parser.add_argument("--check", type=Path, metavar="FILE", help="shapes to try what was learnt on")
    parser.add_argument("--drawn", type=int, default=0, help="so many shapes more, drawn at random")
    parser.add_argument("--only-drawn", action="store_true", help="and none of those that were chosen")
    parser.add_argument("--seed", type=int, default=0, help="of drawing")
    parser.add_argument("--seconds", type=float, default=330.0, help="when to stop measuring")
    parser.add_argument("--depth", type=int, default=4, help="of the tree")
    options = parser.parse_args()
    if options.measure is None and options.fit is None:
        parser.error("say what to do: --measure FILE on a GPU, or --fit FILE")
    if options.measure is not None:
        chosen = [] if options.only_drawn else SHAPES
        measure(options.measure, options.seconds, [*chosen, *drawn_shapes(options.drawn, options.seed)])
    return 0 if options.fit is None else learn(options.fit, options.depth, options.check)


if __name__ == "__main__":
    sys.exit(main())
