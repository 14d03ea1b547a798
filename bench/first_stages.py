"""What the first stages of a Triton compilation say about a program, beside the program that comes out of it.

    python bench/first_stages.py FILE.json.gz                       a recording like the H200 matmul
    python bench/first_stages.py FILE.json.gz --programs 60         and compiles some programs of fla-core to the end

The first part compiles every recorded configuration for sm_90 up to Triton's dialect for GPUs. Its buffers are compared
with the bytes in the recorded failures, and configurations that would be left out for their registers with the recorded
times. The second part needs fla-core: it compiles some configurations of two of its operations to machine code, and
reads the registers and the memory of these. It needs Triton, and no GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import tables
import torch
import triton.backends.nvidia
from gpu_kernels import matmul
from interleaved import Row, save, show
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.autotuner import Autotuner
from triton_packages import pretend_gpu

from tunebook.adapters._triton.resources import ALL_REGISTERS, resources_of

LIMIT = 232448  # bytes of shared memory of a block on an H200
CUOBJDUMP = Path(triton.backends.nvidia.__file__).with_name("bin") / "cuobjdump"
PER_KERNEL = 5  # configurations of a kernel of fla-core


class Done(BaseException):
    """Enough programs were compiled; not an error that a package may catch."""


def read_program(program):
    """Return the registers of a thread, and the bytes that it keeps in memory, of a compiled program."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(program)
        file.flush()
        command = [CUOBJDUMP, "-res-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return tuple(int(re.search(rf"{name}:(\d+)", said)[1]) for name in ("REG", "STACK"))


@contextlib.contextmanager
def noted(found, *, whole, most=10**9):
    """Note the resources of every program that is compiled inside the block, and end it after the first stages."""
    original = CUDABackend.add_stages

    def add_stages(self, stages, options, *more):
        original(self, stages, options, *more)
        make_ttgir, make_cubin = stages["ttgir"], stages["cubin"]
        began_s = time.perf_counter()

        def ttgir(source, metadata):
            module = make_ttgir(source, metadata)
            shared, carried = resources_of(str(module))
            first_s = time.perf_counter() - began_s
            found.append({"shared": shared, "carried": carried, "warps": options.num_warps, "first_s": first_s})
            if not whole:
                raise Done
            return module

        def cubin(source, metadata):
            program = make_cubin(source, metadata)
            registers, spilled = read_program(program)
            facts = {"name": metadata["name"], "real_shared": metadata["shared"], "registers": registers}
            found[-1] |= {**facts, "spilled": spilled, "seconds": time.perf_counter() - began_s}
            if len(found) >= most:
                raise Done
            return program

        stages["ttgir"], stages["cubin"] = ttgir, cubin

    with mock.patch.object(CUDABackend, "add_stages", add_stages):
        yield


def recorded(content):
    """Return the resources of every recorded configuration, with the bytes that it failed for, and its slowdowns."""
    bests = [min(statistics.median(row["t"]) for row in s["rows"].values()) for s in content["shapes"].values()]
    found = []
    tensor = torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta")
    strides = (4096, 1, 4096, 1, 4096, 1)
    for at, config in enumerate(content["space"]):
        values = {**config, "GROUP": config["GM"]}
        del values["GM"]
        with contextlib.suppress(Done), noted(found, whole=False):
            matmul.warmup(tensor, tensor, tensor, 4096, 4096, 4096, *strides, grid=(1,), **values)
        failure = content["failed"].get(str(at))
        found[-1]["failed_for"] = int(re.search(r"Required: (\d+)", failure)[1]) if failure else None
        rows = [shape["rows"].get(str(at)) for shape in content["shapes"].values()]
        found[-1]["slower"] = [statistics.median(r["t"]) / b for r, b in zip(rows, bests, strict=True) if r]
    return found


def some_configurations(self, *args, **kwargs):
    """Compile some configurations of an autotuned kernel, those with the fewest warps and the most, and run nothing."""
    configs = sorted(random.Random(1).sample(self.configs, len(self.configs)), key=lambda config: config.num_warps)
    for config in dict.fromkeys(configs[: PER_KERNEL - 2] + configs[-2:]):
        self.fn.run(*args, **{**kwargs, **config.all_kwargs(), "warmup": True})


def programs(most):
    """Return the resources of so many programs each of two operations of fla-core, compiled to the end."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # noqa: PLC0415 - only here
    from fla.ops.gla import chunk_gla  # noqa: PLC0415 - as above

    def tensors(many, width):
        return [torch.randn(1, 128, 2, width, dtype=torch.bfloat16, requires_grad=True) for _ in range(many)]

    def linear_attention():
        q, k, v = tensors(3, 128)
        return chunk_gla(q, k, v, -torch.rand(1, 128, 2, 128))[0]

    def delta_rule():
        q, k, v = tensors(3, 256)
        return chunk_gated_delta_rule(q, k, v, -torch.rand(1, 128, 2), torch.rand(1, 128, 2, dtype=torch.bfloat16))[0]

    found = []
    for operation in (linear_attention, delta_rule):
        part = []
        with contextlib.suppress(Done), noted(part, whole=True, most=most):
            operation().sum().backward()
        found += [each for each in part if "spilled" in each]
    return found


def rows_of_recording(found):
    """Return the rows of the recorded configurations."""
    failed = [each for each in found if each["failed_for"] is not None]
    ran = [each for each in found if each["failed_for"] is None]
    left_out = [each for each in ran if each["carried"] > ALL_REGISTERS * 4]
    exact = sum(each["shared"] == each["failed_for"] for each in failed)
    refused = sum(each["shared"] > LIMIT for each in ran)
    slower = [slowdown for each in left_out for slowdown in each["slower"]]
    first_s = statistics.mean(each["first_s"] for each in found)
    all_failed = {"unit": f"of {len(failed)}", "at_least": len(failed)}
    return [
        Row(what="recorded failures foreseen, to the byte", measured=exact, **all_failed),
        Row(what="candidates that ran and would be refused", measured=refused, unit=f"of {len(ran)}", at_most=0),
        Row(what="left out for their registers", measured=len(left_out), unit=f"of {len(ran)}"),
        Row(what="slower than the best, the least slow of them", measured=min(slower), unit="x", at_least=2),
        Row(what="slower than the best, the slowest of them", measured=max(slower), unit="x"),
        Row(what="the first stages, mean", measured=first_s, unit="s"),
    ]  # fmt: skip


def rows_of_programs(found):
    """Return the rows of the programs of fla-core."""
    many = f"of {len(found)}"
    left_out = [each for each in found if each["carried"] > ALL_REGISTERS * 4]
    wrong = sum(each["shared"] > each["real_shared"] for each in found)
    large = [each for each in found if each["real_shared"] > LIMIT]
    part = sum(each["first_s"] for each in found) / sum(each["seconds"] for each in found)
    rows = [
        ("need less shared memory than foreseen", wrong, many, 0),
        ("too large for shared memory", len(large), many, None),
        ("of these, foreseen", sum(each["shared"] > LIMIT for each in large), f"of {len(large)}", None),
        ("left out for their registers", len(left_out), many, None),
        ("of these, do not spill", sum(not each["spilled"] for each in left_out), f"of {len(left_out)}", 0),
        ("the first stages, of the time of the compiler", part, "of 1", None),
    ]
    return [Row(what=f"fla-core: {what}", measured=m, unit=unit, at_most=most) for what, m, unit, most in rows]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--programs", type=int, default=0)
    options = parser.parse_args()
    with contextlib.ExitStack() as patches:
        pretend_gpu(patches)
        patches.enter_context(mock.patch.object(Autotuner, "run", some_configurations))
        raw = {"recorded": recorded(json.loads(gzip.decompress(options.file.read_bytes())))}
        rows = rows_of_recording(raw["recorded"])
        if options.programs:
            raw["fla-core"] = programs(options.programs)
            rows += rows_of_programs(raw["fla-core"])
    show(rows)
    save("first_stages", rows, raw, ["triton", "fla-core"])
    tables.write(tables.read())
    return 0


if __name__ == "__main__":
    sys.exit(main())
