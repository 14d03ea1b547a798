"""Lets the loaders of a released vLLM or SGLang read the tables that tunebook writes, and compares their answers.

    pip download --no-deps vllm sglang && unzip -q 'vllm-*.whl' '*.py' '*.json' -d unpacked
    python tools/check_loaders.py unpacked

The loaders are the release's own source, taken from its files; only the device, the settings and the folder are given.
So neither a GPU nor a framework is needed. Every table of the release is read and written again; a loader must return
the same rows from the written file as from its own. A loader of MoE tables must also find the table of a kernel that is
tuned here. Then `tb.table` is asked for every size of vLLM's MoE tables, and for sizes between, and must give the
configuration that vLLM gives.
"""

from __future__ import annotations

import ast
import functools
import json
import os
import sys
import warnings
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import tunebook as tb
from tunebook import formats

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Loader(NamedTuple):
    """A loader: its functions in a file of the release, the folder of its tables, and a call of it for a key."""

    tool: str
    file: str
    functions: tuple[str, ...]
    folder: str
    call: Callable[[dict[str, Any], dict[str, Any]], Any]


def _block(key: dict[str, Any]) -> list[int]:
    return json.loads(key.get("block_shape", "[0, 0]"))


def _moe(function: dict[str, Any], key: dict[str, Any]) -> Any:
    more = {"per_channel_quant": True} if "per_channel_quant" in key else {}
    more |= {"down_moe": True} if "down" in key else {}
    return function["get_moe_configs"](key["E"], key["N"], key.get("dtype"), *_block(key), **more)


def _fp8(function: dict[str, Any], key: dict[str, Any]) -> Any:
    return function["get_w8a8_block_fp8_configs"](key["N"], key["K"], *_block(key))


def _ssm(function: dict[str, Any], key: dict[str, Any]) -> Any:
    return function["get_ssm_configs"](key["headdim"], key["dstate"], key["cache_dtype"])


def _lora(function: dict[str, Any], key: dict[str, Any]) -> Any:
    return function["get_lora_configs"](key["op"].removeprefix("lora_"), key["K"], key["R"], key["S"])


def _collective(function: dict[str, Any], key: dict[str, Any]) -> Any:
    return function["_table"](key["world"], key["H"], None)["configs"]


def _front(function: dict[str, Any], key: dict[str, Any]) -> Any:
    return function["_table"](key["op"].removeprefix("moe_front_"), function["get_device_name"]())


_LAYERS = "vllm/model_executor/layers"
_MOE = ("get_config_file_name", "get_moe_configs")
_SSM = ("get_ssm_config_file_name", "get_ssm_device_name", "_canonical_cache_dtype", "get_ssm_configs")
LOADERS = (
    Loader("vllm", f"{_LAYERS}/fused_moe/fused_moe.py", (*_MOE, "try_get_optimal_moe_config"), "configs", _moe),
    Loader("vllm", f"{_LAYERS}/quantization/utils/fp8_utils.py", ("get_w8a8_block_fp8_configs",), "configs", _fp8),
    Loader("vllm", f"{_LAYERS}/mamba/ops/mamba_ssm.py", _SSM, "configs/selective_state_update", _ssm),
    Loader("sglang", "sglang/srt/layers/moe/moe_runner/triton_utils/fused_moe_triton_config.py", _MOE, "configs", _moe),
    Loader("sglang", "sglang/kernels/ops/gemm/fp8_kernel.py", ("get_w8a8_block_fp8_configs",), "configs", _fp8),
    Loader(
        "sglang",
        "sglang/kernels/ops/lora/dense/lora_tuning_config.py",
        ("get_lora_config_file_name", "get_lora_configs"),
        "csgmv_configs",
        _lora,
    ),
    Loader(
        "sglang",
        "sglang/kernels/ops/communication/sp_collective.py",
        ("_table", "_device_name"),
        "configs/sp_collective",
        _collective,
    ),
    Loader("sglang", "sglang/kernels/ops/moe/moe_front.py", ("_table",), "configs/moe_front", _front),
)


@functools.cache
def _source(file: Path, names: tuple[str, ...]) -> Any:
    """Return the functions of a file, compiled, without the rest of the file."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in names]
    missing = {*names} - {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    if missing:
        raise SystemExit(f"{file} has no {', '.join(sorted(missing))}: this is another release")
    for node in tree.body:
        node.returns = None
        for argument in (*node.args.args, *node.args.kwonlyargs):  # type: ignore[attr-defined]
            argument.annotation = None
    return compile(tree, str(file), "exec")


def functions_of(loader: Loader, release: Path, device: str, place: Path, triton: str = "0") -> dict[str, Any]:
    """Return the functions of a loader, on a device, with its tables below a place."""

    def quiet(*_args: Any, **_more: Any) -> None:
        pass

    logger = SimpleNamespace(**dict.fromkeys(("info", "warning", "info_once", "warning_once"), quiet))
    folder = str(place / loader.folder)
    names: dict[str, Any] = {
        "functools": functools,
        "json": json,
        "os": os,
        "logger": logger,
        "log_info_on_rank0": quiet,
        "envs": SimpleNamespace(VLLM_BATCH_INVARIANT=False, VLLM_TUNED_CONFIG_FOLDER=None),
        "get_exec": lambda: SimpleNamespace(deterministic=SimpleNamespace(enable_deterministic_inference=False)),
        "torch": SimpleNamespace(
            _dynamo=SimpleNamespace(is_compiling=lambda: False),
            cuda=SimpleNamespace(get_device_name=lambda _device: device),
        ),
        "triton": SimpleNamespace(__version__=triton),
        "get_device_name": lambda: device,
        "get_device_name_as_file_name": lambda: device,
        "_is_cuda": True,
        "_CONFIGS_DIR": folder,
        "_CONFIG_DIR": folder,
        "_TABLES": {},
        "_tables": {},
        "NUM_EXPERTS": 896,
        "TOPK": 16,
        "__file__": str(place / "loader.py"),
    }
    exec(_source(release / loader.file, loader.functions), names)  # noqa: S102 - the release's own functions
    return names


def tables_of(loader: Loader, release: Path) -> Iterator[tuple[Path, list[Any]]]:
    """Yield the tables of a loader's folder with their records; files of another form are left out."""
    for file in sorted((release / loader.file).parent.joinpath(loader.folder).rglob("*.json")):
        try:
            records = formats.read(loader.tool, file)
        except tb.CodecError:
            continue
        if records:
            yield file, records


def check(loader: Loader, release: Path) -> tuple[int, int, list[str]]:
    """Return how many tables the loader reads alike from both folders, how many it finds, and the others' names."""
    tables = list(tables_of(loader, release))
    theirs, differ, found = (release / loader.file).parent, [], 0
    with TemporaryDirectory() as place:
        formats.write(loader.tool, [r for _, records in tables for r in records], Path(place, loader.folder))
        for file, records in tables:
            problem = records[0].problem
            key = {**json.loads(problem.call_key), "op": problem.op.partition("@")[0]}
            device = problem.device.removeprefix("gpu:").replace(" ", "_")
            triton = file.parent.name.removeprefix("triton_").replace("_", ".")
            answers = [
                loader.call(functions_of(loader, release, device, where, triton), key)
                for where in (theirs, Path(place))
            ]
            if answers[0] is None:
                continue  # this loader does not look for the file
            found += 1
            if answers[0] != answers[1]:
                differ.append(file.name)
    return found - len(differ), found, differ


def finds_what_is_tuned_here(loader: Loader, release: Path) -> bool:
    """Return whether a loader finds the table of a kernel that takes arrays and is tuned here."""

    def moe_layer(x: Any, w1: Any, w2: Any, *, config: Any) -> Any:
        return x @ w1[0].T @ w2[0].T + 0 * config.BLOCK_SIZE_M

    with TemporaryDirectory() as place:
        space = tb.Space(BLOCK_SIZE_M=[16, 32], num_warps=[4, 8])
        moe = tb.tunable(space=space, bucket={"x": {0: tb.pow2}}, store=Path(place, "book"))(moe_layer)
        for rows in (16, 100):
            tb.tune(moe, np.ones((rows, 8)), np.ones((4, 6, 8)), np.ones((4, 8, 6)))
        sizes = {"E": "w1.shape[0]", "N": "w2.shape[2]", "M": "x.shape[0]", "dtype": "'fp8_w8a8'"}
        records = list(moe.selector.persistent.store.items(moe.kernel.op_id_v))
        version = "" if loader.tool == "vllm" else "triton_3_5_1"
        target = Path(place, loader.folder, version)
        formats.write(loader.tool, records, target, key={**sizes, "block_shape": "[128, 128]"})
        (file,) = target.iterdir()
        device = file.name.partition("device_name=")[2].partition(",")[0]
        functions = functions_of(loader, release, device, Path(place), "3.5.1")
        found = functions["get_moe_configs"](4, 6, "fp8_w8a8", 128, 128)
        return found == {int(name): row for name, row in json.loads(file.read_text()).items()} and set(found) == {
            16,
            128,
        }


def ask_both(
    loader: Loader, release: Path, file: Path, records: list[Any], place: Path
) -> Iterator[tuple[bool, bool | None]]:
    """Yield for sizes of a table whether the size is in the table, and whether `tb.table` and vLLM agree on it.

    In the middle of two sizes vLLM takes the first of the file, and `tb.table` the smaller: None where they differ.
    """
    key = json.loads(records[0].problem.call_key)
    sizes = sorted(json.loads(r.problem.call_key)["M"] for r in records)
    book = tb.PersistentCache("loaders", place)
    book.store.put_many(records)
    rows = {name: row for name, row in json.loads(file.read_text()).items() if name.isdecimal()}
    moe = tb.table(
        "fused_moe",
        space=list({json.dumps(row): row for row in rows.values()}.values()),
        key=tuple(key),
        near={"M": "difference"},
        device=records[0].problem.device,
        store=place,
    )
    device = records[0].problem.device.removeprefix("gpu:").replace(" ", "_")
    theirs = functions_of(loader, release, device, (release / loader.file).parent)["try_get_optimal_moe_config"]
    dtype, block = key.get("dtype"), _block(key) if "block_shape" in key else None
    width = key["N"] // 2 if dtype == "int4_w4a16" else key["N"]
    between = {(a + b) // 2 + step for a, b in pairwise(sizes) for step in (0, 1)}
    for size in sorted({1, *sizes, *between, 2 * sizes[-1]}):
        expected = theirs((key["E"], 2 * width, 64), (key["E"], 64, width), 2, dtype, size, block)
        agrees = dict(moe(**{**key, "M": size})) == expected
        apart = sorted(abs(size - each) for each in sizes)
        yield size in sizes, agrees or (None if apart[0] == apart[1] else False)


def main(release: Path) -> int:
    """Print the counts, and return 1 if a loader or `tb.table` differs."""
    warnings.simplefilter("ignore", tb.TunebookWarning)
    here = [loader for loader in LOADERS if (release / loader.file).is_file()]
    if not here:
        print(f"{release} has neither vllm/ nor sglang/: unpack a wheel there")
        return 2
    wrong = 0
    for loader in here:
        same, found, differ = check(loader, release)
        wrong += len(differ) + (not found)
        print(
            f"{loader.tool}  {Path(loader.file).stem}: {same} of {found} written tables are read as the release's own"
        )
        for name in differ[:5]:
            print(f"    differs: {name}")
        if loader.call is _moe:
            finds = finds_what_is_tuned_here(loader, release)
            wrong += not finds
            print(f"    {'also' if finds else 'not'} the table of a kernel that was tuned here")
    if here[0].tool == "vllm":
        sys.modules["vllm.model_executor.layers.fused_moe"] = stub = ModuleType("fused_moe")
        stub.__dict__["get_config"] = lambda: None
        asked = []
        for file, records in tables_of(here[0], release):
            if "backend" not in file.name:  # another loader's
                with TemporaryDirectory() as place:
                    asked += ask_both(here[0], release, file, records, Path(place))
        for name, tabled in (("in the table", True), ("between", False)):
            of = [agrees for inside, agrees in asked if inside is tabled]
            wrong += of.count(False)
            print(f"tb.table and vLLM agree for {of.count(True)} of {len(of)} sizes {name}")
            if middle := of.count(None):
                print(f"    {middle} others are in the middle of two sizes of a file whose sizes are not in order")
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1])))
