"""Record the times of every configuration of four Triton kernels at more than 100 shapes each, on a GPU.

    python bench/record_shapes.py --out FILE.json.gz --seconds 55
    python bench/record_shapes.py --out FILE.json.gz --only softmax --seconds 20 --shapes 120

A launch is timed inside a CUDA graph of equal launches, with warm caches: without the graph, a short launch takes the
host longer than the device. All configurations take turns in random order; those near the fastest get more samples,
and two medians are kept, each of half of the samples: their difference is the noise. `bench/predict.py` reads the file.
"""

from __future__ import annotations

import argparse
import gzip
import json
import multiprocessing
import os
import random
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shape_kernels import Config, Launcher, Recorded, Sizes

REPLAY_S = 200e-6  # the time of one sample, at least: shorter ones are as noisy as the events that take them
MOST_LAUNCHES = 40
FAR, FAR_SAMPLES, NEAR_SAMPLES = 1.3, 2, 14
WRONG = 3e-2  # of the largest value, in bfloat16


def compiled(name: str, sizes: Sizes, config: Config) -> str:
    """Compile a configuration into Triton's cache on disk; return the error, or an empty text."""
    import torch  # noqa: PLC0415 - in each process that compiles
    from shape_kernels import ALL  # noqa: PLC0415

    try:
        ALL[name].on(lambda *shape: torch.empty(shape, dtype=torch.bfloat16, device="meta"), sizes).compile(config)
    except Exception as error:  # noqa: BLE001 - the launch says it again, where it is recorded
        return f"{type(error).__name__}: {str(error)[:200]}"
    return ""


class Gpu:
    """Times launches on the current CUDA device."""

    def __init__(self) -> None:
        import torch  # noqa: PLC0415 - a dry run uses another class

        self.torch, self.stream = torch, torch.cuda.Stream()
        self.name = torch.cuda.get_device_name()

    def make(self, *shape: int) -> Any:
        return self.torch.randn(shape, device="cuda", dtype=self.torch.bfloat16)

    def run(self, launcher: Launcher, config: Config) -> None:
        launcher.launch(config)
        self.torch.cuda.synchronize()

    def replay(self, launcher: Launcher, config: Config, launches: int) -> Any:
        """Return a graph of so many launches. Its kernel was loaded by an earlier launch: a capture may not do that."""
        graph = self.torch.cuda.CUDAGraph()
        with self.torch.cuda.stream(self.stream):
            graph.capture_begin(capture_error_mode="thread_local")
            for _ in range(launches):
                launcher.launch(config)
            graph.capture_end()
        return graph

    def samples_s(self, graphs: list[Any]) -> list[float]:
        """Return the seconds of each graph, replayed in this order without a pause between them."""
        event = self.torch.cuda.Event
        with self.torch.cuda.stream(self.stream):
            marks = [(event(enable_timing=True), event(enable_timing=True)) for _ in graphs]
            for graph, (begin, end) in zip(graphs, marks, strict=True):
                begin.record()
                graph.replay()
                end.record()
            self.stream.synchronize()
        return [begin.elapsed_time(end) / 1e3 for begin, end in marks]


class Pretend:
    """The same without a GPU: a made-up time for each configuration and shape, with noise."""

    name = "pretend"

    def __init__(self) -> None:
        self.rng = random.Random(0)

    def make(self, *shape: int) -> Any:
        import torch  # noqa: PLC0415 - as above

        return torch.empty(shape, dtype=torch.bfloat16, device="meta")

    def run(self, launcher: Launcher, config: Config) -> None:
        if config.get("BLOCK") == 8192:
            raise RuntimeError("out of resources")

    def replay(self, launcher: Launcher, config: Config, launches: int) -> Any:
        (x, *_), grid = launcher.arguments, launcher.grid(config)
        return launches * (2e-6 + 1e-12 * x.numel() + 1e-9 * max(grid) * sum(config.values()))

    def samples_s(self, graphs: list[Any]) -> list[float]:
        return [graph * self.rng.gauss(1, 0.005) for graph in graphs]


def works(gpu: Gpu, recorded: Recorded, config: Config) -> str:
    """Return why a configuration is left out: its error, or that its outputs are wrong; else an empty text."""
    for sizes in recorded.checked_at:
        launcher = recorded.on(gpu.make, sizes)
        try:
            gpu.run(launcher, config)
        except Exception as error:  # noqa: BLE001 - out of resources, or anything else that a compiler says
            return f"{type(error).__name__}: {str(error)[:200]}"
        if isinstance(gpu, Gpu):
            found, right = launcher.outputs()
            if not bool((found - right).abs().max() <= WRONG * right.abs().max()):
                return "wrong outputs"
    return ""


def times_at(gpu: Gpu, launcher: Launcher, configs: list[Config], rng: random.Random) -> list[list[float] | None]:
    """Return two medians of nanoseconds for each configuration at one shape; None for one that fails there."""
    alive = []
    for number, config in enumerate(configs):
        try:
            gpu.run(launcher, config)
        except Exception:  # noqa: BLE001 - as above
            continue
        alive.append(number)
    first = dict(zip(alive, gpu.samples_s([gpu.replay(launcher, configs[at], 3) for at in alive]), strict=True))
    launches = {at: max(1, min(MOST_LAUNCHES, round(REPLAY_S / (first[at] / 3)))) for at in alive}
    graphs = {at: gpu.replay(launcher, configs[at], launches[at]) for at in alive}
    samples: dict[int, list[float]] = {at: [] for at in alive}
    taking = list(alive)
    for turn in range(NEAR_SAMPLES):
        if turn == FAR_SAMPLES:
            best = min(min(samples[at]) for at in alive)
            taking = [at for at in alive if min(samples[at]) <= FAR * best]
        rng.shuffle(taking)
        for at, seconds in zip(taking, gpu.samples_s([graphs[at] for at in taking]), strict=True):
            samples[at].append(seconds / launches[at])
    halves = {at: [statistics.median(taken[half::2]) * 1e9 for half in (0, 1)] for at, taken in samples.items()}
    return [[round(t, 1) for t in halves[at]] if at in halves else None for at in range(len(configs))]


def record(gpu: Gpu, name: str, options: argparse.Namespace, write: Any, waiting: list[Any]) -> dict[str, Any]:
    from shape_kernels import ALL  # noqa: PLC0415 - needs Triton

    recorded, began = ALL[name], time.monotonic()
    for error in filter(None, (result.get() for result in waiting)):
        print(f"{name}: not compiled: {error}", flush=True)
    built_s = time.monotonic() - began
    left_out = {number: works(gpu, recorded, config) for number, config in enumerate(recorded.configs)}
    configs = [config for number, config in enumerate(recorded.configs) if not left_out[number]]
    failed = [{**recorded.configs[number], "error": error} for number, error in left_out.items() if error]
    kernel: dict[str, Any] = {"sizes": recorded.sizes, "configs": configs, "failed": failed, "rows": []}
    write(name, kernel)
    rng = random.Random(options.seed)
    for many, sizes in enumerate(recorded.shapes(options.shapes, f"{name} {options.seed}"), start=1):
        if time.monotonic() - began > options.seconds:
            break
        kernel["rows"].append([list(sizes), times_at(gpu, recorded.on(gpu.make, sizes), configs, rng)])
        if many % 20 == 0:
            write(name, kernel)
    write(name, kernel)
    took = f"{time.monotonic() - began:.0f} s, of which {built_s:.0f} waiting for compilers"
    print(f"{name}: {len(configs)} configurations, {len(kernel['rows'])} shapes, {took}", flush=True)
    return kernel


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.json.gz")
    parser.add_argument("--only", help="kernels, separated by commas")
    parser.add_argument("--seconds", type=float, default=55.0, help="per kernel, with the wait for its compilers")
    parser.add_argument("--shapes", type=int, default=160, help="per kernel, if the seconds allow")
    parser.add_argument("--seed", type=int, default=0, help="of drawing shapes")
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--dry-run", action="store_true", help="pretend times, without a GPU")
    options = parser.parse_args()
    from shape_kernels import ALL  # noqa: PLC0415 - needs Triton

    names = options.only.split(",") if options.only else list(ALL)
    if unknown := set(names) - set(ALL):
        parser.error(f"unknown kernel {', '.join(sorted(unknown))}; there are {', '.join(ALL)}")
    gpu: Any = Pretend() if options.dry_run else Gpu()
    content: dict[str, Any] = {"device": gpu.name, "kernels": {}}

    def write(name: str, kernel: dict[str, Any]) -> None:
        content["kernels"][name] = kernel
        temporary = options.out.with_suffix(".part")
        temporary.write_bytes(gzip.compress(json.dumps(content, separators=(",", ":")).encode(), mtime=0))
        temporary.replace(options.out)

    # The compilers go on with the next kernel while one is timed.
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        waiting = {
            name: [
                pool.apply_async(compiled, (name, sizes, config))
                for config in ([] if options.dry_run else ALL[name].configs)
                for sizes in ALL[name].checked_at
            ]
            for name in names
        }
        for name in names:
            record(gpu, name, options, write, waiting[name])
    return 0


if __name__ == "__main__":
    sys.exit(main())
