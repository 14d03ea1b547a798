"""Describes the autotuned kernels of a released package, on Triton's tuner or on ours, as JSON; a process per package.

    python tests/triton_packages.py PACKAGE triton|tunebook

The GPU is made up, and no kernel is compiled or run. The launches have made-up arguments.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import inspect
import itertools
import json
import sys
import zlib
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import triton.testing
from fake_gpu import FakeGpu
from torch.overrides import TorchFunctionMode
from triton.runtime import JITFunction, driver
from triton.runtime.autotuner import Autotuner, Heuristics

FACTORIES = {  # functions that make kernels when they are first called
    "torchao.kernel.blockwise_quantization": "_get_triton_impls"
}
TUNERS = ("autotune", "fla_cache_autotune")
FLAGS = ("USE_", "IS_", "HAS_", "HAVE_", "STORE_", "SAVE_", "OUTPUT_", "REVERSE", "EVEN_")
TENSORS = {"Q", "K", "V", "O", "X", "Y", "A", "B", "C", "E", "W"}
SIZES = {"cut_cross_entropy": {"B", "V", "D"}}  # in this package
BY_PRUNERS = {"EVEN_M", "EVEN_N", "EVEN_K", "NUM_STAGES"}  # the names that gemlite's pruners add to configurations
NUMBERS = ("stride", "scale", "eps", "num", "n_", "seed", "size", "len", "total", "alpha", "dim", "rows", "cols")

H200 = SimpleNamespace(
    name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, total_memory=141 << 30, warp_size=32,
    shared_memory_per_block=49152, shared_memory_per_block_optin=232448, shared_memory_per_multiprocessor=233472,
    max_threads_per_multi_processor=2048, regs_per_multiprocessor=65536, L2_cache_size=50 << 20, gcnArchName="",
)  # fmt: skip


class MadeUpH200(FakeGpu):
    """A driver of Triton's that knows the properties which packages read."""

    def get_device_properties(self, device):
        return {
            "max_shared_mem": 232448, "multiprocessor_count": 132, "max_num_regs": 65536, "warpSize": 32,
            "sm_clock_rate": 1980000, "mem_clock_rate": 2619000, "mem_bus_width": 6144,
        }  # fmt: skip

    def get_benchmarker(self):
        return lambda _call, quantiles: [1.0 for _ in quantiles]  # every configuration takes the same time


class OnTheHost(TorchFunctionMode):
    """Makes tensors on the host that are asked for on the GPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


def pretend_gpu(patches):
    """Give torch and Triton an H200, as far as packages look at one while they are imported and while they prune."""
    driver.set_active(MadeUpH200(lambda _facts: 1e-6, names=(H200.name,)))
    facts = {
        "is_available": True, "device_count": 1, "current_device": 0, "get_device_properties": H200,
        "get_device_capability": (9, 0), "get_device_name": H200.name,
    }  # fmt: skip
    for name, value in facts.items():
        patches.enter_context(mock.patch.object(torch.cuda, name, lambda *_, value=value: value))
    patches.enter_context(mock.patch.object(triton.testing, "nvsmi", lambda attributes: [1980 for _ in attributes]))
    patches.enter_context(OnTheHost())


# ----------------------------------------------------------------------------------------------------- the source code


def called_by(node):
    """Return the name of a call of a tuner, or None."""
    name = ast.unparse(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""
    return name if name in TUNERS else None


def modules_of(package):
    """Return for each module of a package that calls a tuner: the lines of decorated functions, and other calls."""
    root = Path(importlib.util.find_spec(package).submodule_search_locations[0])
    found = {}
    for path in sorted(root.rglob("*.py")):
        tree = ast.parse(path.read_text())
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        decorated = [f for f in functions if any(called_by(d) for d in f.decorator_list)]
        calls = sum(called_by(node) is not None for node in ast.walk(tree))
        if calls:
            name = ".".join((package, *path.relative_to(root).with_suffix("").parts)).removesuffix(".__init__")
            decorators = sum(called_by(d) is not None for f in decorated for d in f.decorator_list)
            # The line of a function in the bytecode is the line of its first decorator.
            lines = sorted(f.decorator_list[0].lineno for f in decorated)
            found[name] = {"path": str(path), "lines": lines, "other calls": calls - decorators}
    return found


# -------------------------------------------------------------------------------------------------- made-up arguments


def supplied_by(autotuner):
    """Return the names that configurations and heuristics give values to."""
    names, link = {name for config in autotuner.configs for name in config.kwargs}, autotuner.fn
    while not isinstance(link, JITFunction):
        names |= set(link.values) if isinstance(link, Heuristics) else set()
        link = link.fn
    return names | BY_PRUNERS


def made_up(autotuner, dtype, size_of):
    """Return arguments for a kernel by name: the ones to pass by position, and the ones to pass by keyword."""
    supplied, positional, keywords = supplied_by(autotuner), {}, {}
    tensors = {*autotuner.reset_to_zero, *autotuner.restore_value}
    letters = TENSORS - SIZES.get(autotuner.base_fn.__module__.partition(".")[0], set())
    for name, parameter in inspect.signature(autotuner.base_fn).parameters.items():
        short = name.isupper() and len(name) <= 2 and name not in letters
        if name in supplied:
            continue
        if "constexpr" in str(parameter.annotation):
            keywords[name] = True if name.startswith(FLAGS) else size_of(name)
        elif name not in tensors and (short or name in autotuner.keys or any(part in name.lower() for part in NUMBERS)):
            positional[name] = size_of(name)
        else:
            positional[name] = torch.empty(64, 64, dtype=dtype, device="meta")
    return positional, keywords


def launches(autotuner):
    """Return the ways of launching a kernel that are compared: positional and keyword arguments."""
    sizes = {"sizes of 128": lambda _name: 128, "sizes by name": lambda name: 16 << zlib.crc32(name.encode()) % 4}
    for (what, size_of), dtype in zip(sizes.items(), (torch.float16, torch.bfloat16), strict=True):
        positional, keywords = made_up(autotuner, dtype, size_of)
        every = positional | keywords
        for way, named in (("by position", positional), ("constants too", every), ("by keyword", {})):
            # An argument can be passed by position if everything before it is.
            head = list(itertools.takewhile(lambda name, named=named: name in named, autotuner.arg_names))
            rest = {name: value for name, value in every.items() if name not in head}
            yield f"{what}, {way}", [every[name] for name in head], rest


# -------------------------------------------------------------------------------------------------------- the kernels


def said(error):
    return f"{type(error).__name__}: {error}"


def text_of(config):
    return f"{config}{', with a hook' if config.pre_hook else ''}"


def describe(autotuner):
    """Return the options of a kernel as plain values."""
    return {
        "class": type(autotuner).__name__,
        "arguments": autotuner.arg_names,
        "keys": list(autotuner.keys),
        "configs": [text_of(config) for config in autotuner.configs],
        "reset_to_zero": list(autotuner.reset_to_zero),
        "restore_value": list(autotuner.restore_value),
        "hooks": [autotuner.user_defined_pre_hook, autotuner.user_defined_post_hook],
        "prunes": [autotuner.early_config_prune is not None, autotuner.perf_model is not None, autotuner.configs_top_k],
        "cache_results": autotuner.cache_results,
        "use_cuda_graph": autotuner.use_cuda_graph,
    }


def launch(autotuner, positional, keywords):
    """Launch a kernel that does nothing, and return the key that it is remembered under."""
    autotuner.cache.clear()
    try:
        autotuner[(1,)](*positional, **keywords)
    except Exception as error:  # noqa: BLE001 - whatever a package's own functions raise on made-up arguments
        return said(error)
    return [repr(key) for key in autotuner.cache]


def pruned_by_triton(autotuner, positional, keywords):
    autotuner.nargs = dict(zip(autotuner.arg_names, positional, strict=False))
    try:
        return list(autotuner.prune_configs(keywords))
    finally:
        autotuner.nargs = None


def pruned_by_us(autotuner, positional, keywords):
    from tunebook.adapters._triton.candidate import Launch
    from tunebook.adapters._triton.engine import engine_of

    kernel = engine_of(autotuner).kernel
    call = kernel.invocation(Launch((1,), tuple(positional), keywords))
    return [candidate.config for candidate in kernel.candidate_cfgs(call)]


def prune(pruned_by, autotuner, positional, keywords):
    """Return the configurations that are worth a try for a launch."""
    try:
        return [text_of(config) for config in pruned_by(autotuner, positional, keywords)]
    except Exception as error:  # noqa: BLE001 - as above
        return said(error)


def do_nothing(*_args, **_kwargs):
    """Stand in for a launch on the GPU."""


def main(package, tuner):
    """Print the kernels of a package as one line of JSON."""
    made, taken, left, failed = [], [], [], {}
    with contextlib.ExitStack() as patches:
        pretend_gpu(patches)
        init = Autotuner.__init__

        def note(autotuner, *args, **kwargs):
            init(autotuner, *args, **kwargs)
            made.append(autotuner)

        patches.enter_context(mock.patch.object(Autotuner, "__init__", note))
        patches.enter_context(mock.patch.object(JITFunction, "run", do_nothing))
        if tuner == "tunebook":
            take_over(taken, left)
        modules = modules_of(package)
        for name in modules:
            try:
                module = importlib.import_module(name)
                getattr(module, FACTORIES.get(name, ""), lambda: None)()
            except Exception as error:  # noqa: BLE001 - whatever is missing on this machine
                failed[name] = said(error)
        pruned_by = pruned_by_us if tuner == "tunebook" else pruned_by_triton
        kernels = []
        for autotuner in made:
            ways = list(launches(autotuner))
            entry = {"path": autotuner.base_fn.__code__.co_filename, "line": autotuner.base_fn.__code__.co_firstlineno}
            entry |= {"name": autotuner.base_fn.__name__, "options": describe(autotuner)}
            entry["key"] = {way: launch(autotuner, args, kwargs) for way, args, kwargs in ways}
            entry["pruned"] = {
                way: prune(pruned_by, autotuner, args, {**kwargs, "grid": (1,), "warmup": False})
                for way, args, kwargs in ways
            }
            kernels.append(entry)
    found = {"modules": modules, "failed": failed, "kernels": kernels, "taken": len(taken), "left": left}
    sys.stdout.write("\n" + json.dumps(found) + "\n")


def take_over(taken, left):
    import tunebook as tb
    from tunebook.adapters.triton import install

    def note(what, kernel, why):
        (taken if what == "taken" else left).append(f"{kernel}: {why}")

    # Nothing is measured: a launch that the book does not know gets the first configuration.
    install(store=False, policy=tb.AutotunePolicy(allow_autotune=False), on_kernel=note)


if __name__ == "__main__":
    main(*sys.argv[1:])
