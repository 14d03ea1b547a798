"""Record search spaces on a GPU: seven CUDA kernels, three problems each, every configuration measured.

    python bench/record_spaces.py FOLDER [--only KERNEL,...]
    python bench/search.py --data FOLDER --name search_h200 --no-peers

Writes cache files in Kernel Tuner's format, `kernel_problem.json.gz`, which `bench/search.py` replays: to choose a
search on spaces that it is not reported on. A problem takes the place of a device there. Outputs are not checked: what
counts is how times differ. Needs CuPy; 21,000 configurations take seven minutes with 16 cores and an H200.
"""

from __future__ import annotations

import argparse
import gzip
import json
import multiprocessing
import sys
import time
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

KERNELS = Path(__file__).parent / "kernels"
RUNS = 7
SHARED_MEMORY = 48 * 1024  # what a block may have without asking
MOST_SHARED_MEMORY = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


class Launch(NamedTuple):
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared: int = 0
    steps: int = 1  # a launch does so many of what counts


class Problem(NamedTuple):
    """A problem: its name, its arguments, and how a configuration is launched on it."""

    name: str
    arguments: tuple[Any, ...]
    launch: Callable[[dict[str, int]], Launch]


class Kernel(NamedTuple):
    """A kernel: its free parameters, which of their combinations are valid, and problems; arrays are made by `make`."""

    axes: dict[str, list[int]]
    is_valid: Callable[[dict[str, int]], bool]
    problems: Callable[[Callable[[int], Any]], list[Problem]]

    def configurations(self) -> Iterator[dict[str, int]]:
        combinations = (dict(zip(self.axes, values, strict=True)) for values in product(*self.axes.values()))
        return filter(self.is_valid, combinations)


def up(size: int, by: int) -> int:
    return -(-size // by)


def tiles(width: int, height: int) -> Callable[[dict[str, int]], Launch]:
    return lambda c: Launch(
        (up(width, c["BX"] * c["TX"]), up(height, c["BY"] * c["TY"])), (c["BX"], c["BY"]), steps=c.get("TF", 1)
    )


def stencil_is_valid(c: dict[str, int]) -> bool:
    cells = (c["BX"] * c["TX"] + 2 * c["TF"]) * (c["BY"] * c["TY"] + 2 * c["TF"])
    return 64 <= c["BX"] * c["BY"] <= 1024 and cells * 4 * (3 if c["SHPOW"] else 2) <= SHARED_MEMORY


def stencils(make: Callable[[int], Any]) -> list[Problem]:
    return [Problem(f"{n}", (make(n * n), make(n * n), make(n * n), n), tiles(n, n)) for n in (1024, 4096, 8192)]


def sgemm_is_valid(c: dict[str, int]) -> bool:
    rows, columns = c["MWG"] / c["MD"], c["NWG"] / c["ND"]
    loads = c["MWG"] * c["KWG"] / c["VW"]
    return rows >= 1 and columns >= 1 and rows * columns <= 64 and loads >= c["MD"] * c["ND"] / 2


def sgemms(make: Callable[[int], Any]) -> list[Problem]:
    shapes = ((512, 512, 4096), (2048, 2048, 1024), (8192, 256, 512))
    return [
        Problem(
            f"{m}x{n}x{k}",
            (make(k * m), make(k * n), make(m * n), m, n, k),
            lambda c, m=m, n=n: Launch((m // c["MWG"], n // c["NWG"]), (c["MD"] * c["ND"],)),
        )
        for m, n, k in shapes
    ]


def nbody_is_valid(c: dict[str, int]) -> bool:
    return (c["SHM"] or c["SMUL"] == 1) and 3072 % (c["BS"] * c["SMUL"]) == 0 and c["OU"] * c["IU"] <= 96


def nbodies(make: Callable[[int], Any]) -> list[Problem]:
    return [
        Problem(
            f"{n}",
            (*(make(n) for _ in range(4)), make(4 * n), make(3 * n), n),
            lambda c, n=n: Launch((up(n, c["BS"] * c["OU"]),), (c["BS"],)),
        )
        for n in (3072, 12288, 49152)
    ]


def softmax_is_valid(c: dict[str, int]) -> bool:
    return 64 <= c["BX"] * c["BY"] <= 1024 and (not c["KEEP"] or c["BY"] <= 4)


def softmaxes(make: Callable[[int], Any]) -> list[Problem]:
    return [
        Problem(
            f"{rows}x{n}",
            (make(rows * n), make(rows * n), rows, n),
            lambda c, rows=rows, n=n: Launch(
                (up(rows, c["BY"] * c["RP"]),), (c["BX"], c["BY"]), n * 4 * c["BY"] if c["KEEP"] else 0
            ),
        )
        for rows, n in ((8192, 512), (2048, 4096), (128, 12288))
    ]


def delays_is_valid(c: dict[str, int]) -> bool:
    without_sense = (c["TX"] == 1 and c["SX"]) or (c["TY"] == 1 and c["SY"])
    sums = c["TX"] * c["TY"]
    return not without_sense and 64 <= c["BX"] * c["BY"] <= 1024 and sums <= 32 and sums * c["UC"] <= 128


def delayed(make: Callable[[int], Any]) -> list[Problem]:
    found = []
    for channels, samples, dms, slope in ((256, 8192, 256, 2.0), (64, 32768, 128, 0.2), (1024, 2048, 512, 8.0)):
        padded = samples + int(slope * dms) + 2048
        arrays = (make(channels * padded), make(dms * samples), make(channels) * slope)
        arguments = (*arrays, samples, padded, dms, channels)
        found.append(Problem(f"{channels}x{samples}x{dms}", arguments, tiles(samples, dms)))
    return found


def transpose_is_valid(c: dict[str, int]) -> bool:
    fits = c["BX"] <= c["TX"] and c["BY"] <= c["TX"] and c["TX"] * (c["TX"] + c["PAD"]) * 4 <= SHARED_MEMORY
    return 32 <= c["BX"] * c["BY"] <= 1024 and fits and (c["SHM"] or c["PAD"] == 0)


def transposed(make: Callable[[int], Any]) -> list[Problem]:
    return [
        Problem(
            f"{w}x{h}",
            (make(w * h), make(w * h), w, h),
            lambda c, w=w, h=h: Launch((w // c["TX"], h // c["TX"]), (c["BX"], c["BY"])),
        )
        for w, h in ((1536, 1536), (6144, 6144), (768, 49152))
    ]


def filter_is_valid(c: dict[str, int]) -> bool:
    shared = (c["BX"] * c["TX"] + 44) * (c["BY"] * c["TY"] + 12) * 4
    pixels = c["TX"] * c["TY"]
    fits = 32 <= c["BX"] * c["BY"] <= 1024 and shared <= SHARED_MEMORY
    return fits and (c["SHM"] or not c["PAD"]) and pixels <= (8 if c["UF"] else 16)


def filtered(make: Callable[[int], Any]) -> list[Problem]:
    return [
        Problem(f"{w}x{h}", (make((w + 8) * (h + 8)), make(w * h), w, h), tiles(w, h))
        for w, h in ((768, 768), (4096, 4096), (16384, 512))
    ]


ALL = {
    "stencil": Kernel(
        {"BX": [16, 32, 64, 128, 256], "BY": [1, 2, 4, 8, 16, 32], "TX": [1, 2, 3, 4, 8], "TY": [1, 2, 3, 4, 8]}
        | {"TF": [1, 2, 3, 4, 6], "SHPOW": [0, 1]},
        stencil_is_valid,
        stencils,
    ),
    "sgemm": Kernel(
        {"MWG": [16, 32, 64, 128], "NWG": [16, 32, 64, 128], "KWG": [8, 32], "MD": [8, 16, 32], "ND": [8, 16, 32]}
        | {"VW": [1, 4], "KU": [1, 8], "STRM": [0, 1], "STRN": [0, 1]},
        sgemm_is_valid,
        sgemms,
    ),
    "nbody": Kernel(
        {"BS": [32, 64, 96, 128, 256, 384, 512, 1024], "OU": [1, 2, 3, 4, 8], "IU": [1, 2, 4, 8, 16]}
        | {"SOA": [0, 1], "SHM": [0, 1], "SMUL": [1, 2], "RS": [0, 1]},
        nbody_is_valid,
        nbodies,
    ),
    "softmax": Kernel(
        {"BX": [32, 64, 96, 128, 192, 256, 512, 1024], "BY": [1, 2, 4, 8, 16], "VW": [1, 2, 4], "UN": [1, 2, 4]}
        | {"ONLINE": [0, 1], "KEEP": [0, 1], "RP": [1, 2, 4]},
        softmax_is_valid,
        softmaxes,
    ),
    "delays": Kernel(
        {"BX": [4, 8, 16, 32, 64, 128, 256], "BY": [1, 2, 4, 8, 16, 32, 64], "TX": [1, 2, 3, 4, 8], "TY": [1, 2, 4, 8]}
        | {"UC": [1, 4], "SX": [0, 1], "SY": [0, 1]},
        delays_is_valid,
        delayed,
    ),
    "transpose": Kernel(
        {"BX": [4, 8, 16, 32, 64], "BY": [1, 2, 4, 8, 16, 32], "TX": [16, 32, 64, 96], "UN": [1, 2, 4, 8]}
        | {"SHM": [0, 1], "PAD": [0, 1, 2, 4], "DIAG": [0, 1]},
        transpose_is_valid,
        transposed,
    ),
    "filter": Kernel(
        {"BX": [16, 32, 48, 64, 96, 128, 256], "BY": [1, 2, 4, 8, 16, 32], "TX": [1, 2, 3, 4, 6, 8]}
        | {"TY": [1, 2, 3, 4, 5, 8], "SHM": [0, 1], "PAD": [0, 1], "UF": [0, 1]},
        filter_is_valid,
        filtered,
    ),
}


class Built(NamedTuple):
    """What a configuration compiled to, or why it did not, and the seconds of processor time that took."""

    number: int
    code: bytes | None
    error: str
    seconds: float


def built(job: tuple[int, str, str, dict[str, int]]) -> Built:
    from cupy.cuda import compiler  # noqa: PLC0415 - in each process that compiles

    number, architecture, source, macros = job
    defined = "".join(f"#define {name} {value}\n" for name, value in macros.items())
    began = time.process_time()
    try:
        code, *_ = compiler.compile_using_nvrtc(
            defined + source, ("--std=c++14", "--use_fast_math"), architecture, f"{number}.cu"
        )
    except compiler.CompileException as error:
        return Built(number, None, str(error)[:200], time.process_time() - began)
    return Built(number, code, "", time.process_time() - began)


def timed_ms(cupy: Any, function: Any, problem: Problem, config: dict[str, int]) -> list[float]:
    """Return the milliseconds of some runs, after two that do not count."""
    import numpy as np  # noqa: PLC0415 - comes with CuPy

    launch = problem.launch(config)
    if launch.shared > SHARED_MEMORY:
        cupy.cuda.driver.funcSetAttribute(function.ptr, MOST_SHARED_MEMORY, launch.shared)
    arguments = tuple(np.int32(a) if isinstance(a, int) else a for a in problem.arguments)
    grid, block = ((*size, 1, 1)[:3] for size in (launch.grid, launch.block))
    events = [(cupy.cuda.Event(), cupy.cuda.Event()) for _ in range(RUNS + 2)]
    for begin, end in events:
        begin.record()
        function(grid, block, arguments, launch.shared)
        end.record()
    events[-1][1].synchronize()
    return [round(cupy.cuda.get_elapsed_time(begin, end) / launch.steps, 6) for begin, end in events[2:]]


def entry_of(cupy: Any, made: Built, function: Any, problem: Problem, config: dict[str, int]) -> dict[str, Any]:
    """Return what Kernel Tuner would have written of a configuration."""
    entry: dict[str, Any] = {**config, "compile_time": made.seconds * 1e3}
    if function is None:
        return {**entry, "time": "CompilationFailedConfig"}
    try:
        times = timed_ms(cupy, function, problem, config)
    except cupy.cuda.driver.CUDADriverError:
        return {**entry, "time": "RuntimeFailedConfig"}
    return {**entry, "time": sum(times) / RUNS, "times": times}


def record(cupy: Any, pool: Any, name: str, folder: Path) -> None:
    """Measure every configuration of a kernel on its problems, and write a file of each."""
    kernel, began = ALL[name], time.perf_counter()
    configs = list(kernel.configurations())
    problems = kernel.problems(lambda size: cupy.random.random(size, dtype=cupy.float32))
    source = (KERNELS / f"{name}.cu").read_text()
    entries: dict[str, dict[str, Any]] = {problem.name: {} for problem in problems}
    architecture = cupy.cuda.Device().compute_capability
    jobs = [(number, architecture, source, config) for number, config in enumerate(configs)]
    for made in pool.imap_unordered(built, jobs, chunksize=4):
        module = cupy.cuda.function.Module()
        if made.code is not None:
            module.load(made.code)
        function = None if made.code is None else module.get_function("k")
        config = configs[made.number]
        for problem in problems:
            key = ",".join(map(str, config.values()))
            entries[problem.name][key] = entry_of(cupy, made, function, problem, config)
    for problem_name, cache in entries.items():
        document = {"tune_params_keys": list(kernel.axes), "tune_params": kernel.axes, "cache": cache}
        with gzip.open(folder / f"{name}_{problem_name}.json.gz", "wt") as file:
            json.dump(document, file)
    print(f"{name}: {len(configs)} configurations, {time.perf_counter() - began:.0f} s", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default=",".join(ALL), help="kernels, separated by commas")
    parser.add_argument("--processes", type=int, default=max(1, multiprocessing.cpu_count() - 1))
    options = parser.parse_args()
    unknown = set(options.only.split(",")) - set(ALL)
    if unknown:
        parser.error(f"no kernel is called {', '.join(sorted(unknown))}; there are {', '.join(ALL)}")
    import cupy  # noqa: PLC0415 - only to record

    options.folder.mkdir(parents=True, exist_ok=True)
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        for name in options.only.split(","):
            record(cupy, pool, name, options.folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
