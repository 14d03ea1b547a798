"""Each behaviour of `triton.autotune` is one row: it runs on Triton's tuner and on ours, and both must say the same."""

# ruff: noqa: N803 - constexprs are written in capitals in Triton

from __future__ import annotations

import copy
import pickle
import re
import threading
import warnings

import pytest

triton = pytest.importorskip("triton", reason="triton is not installed")
torch = pytest.importorskip("torch", reason="torch is not installed")

import triton.language as tl  # noqa: E402 - after the check that it is there
from fake_gpu import FakeGpu, installed  # noqa: E402 - as above
from triton.runtime.errors import OutOfResources  # noqa: E402 - as above

import tunebook as tb  # noqa: E402 - as above
from tunebook.adapters import triton as adapter  # noqa: E402 - as above
from tunebook.adapters._triton.engine import engine_of  # noqa: E402 - as above

pytestmark = pytest.mark.usefixtures("compiled_once")


@triton.jit
def add(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(x_ptr + at, at < n) + tl.load(y_ptr + at, at < n), at < n)


@triton.jit
def scale(x_ptr, n, factor=2, BLOCK: tl.constexpr = 16, UNUSED: tl.constexpr = 0):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + at, tl.load(x_ptr + at, at < n) * factor, at < n)


@triton.jit
def maybe(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if x_ptr is not None:
        tl.store(out_ptr + at, tl.load(x_ptr + at, at < n), at < n)
    else:
        tl.store(out_ptr + at, at, at < n)


COST = {16: 80e-6, 32: 60e-6, 64: 40e-6, 128: 20e-6, 256: 10e-6, 512: 30e-6}
GRID = (1,)
OUT_OF_MEMORY = OutOfResources(1 << 20, 1 << 10, "shared memory")


def blocks(*sizes, **options):
    return [triton.Config({"BLOCK": size}, **options) for size in sizes]


def tensors(n=256, dtype=torch.float32):
    return torch.ones(n, dtype=dtype), torch.ones(n, dtype=dtype), torch.zeros(n, dtype=dtype), n


class Odd(int):
    """An argument of a class that nobody knows."""


def ours(*given, **named):
    """Ours, which keeps results for another process only where Triton does."""
    store = None if named.get("cache_results") else False
    return adapter.autotune(*given, store=store, **named)


def error_of(function, *args, **kwargs):
    """The error that a call raises, or None. Where Triton raises one, ours must be of its class."""
    try:
        function(*args, **kwargs)
    except Exception as error:  # noqa: BLE001 - which one is the observation
        return error
    return None


def launched(gpu):
    """The block of the last launch, which is the user's."""
    return gpu.launches[-1]["BLOCK"]


ROWS = []


def row(function):
    ROWS.append(function)
    return function


# ----------------------------------------------------------------------------------------------------- configurations


@row
def no_configurations_are_one_default(autotune, gpu):
    kernel = autotune([], key=["n"])(scale)
    kernel[GRID](torch.ones(16), 16)
    return [str(c) for c in kernel.configs], str(kernel.best_config), launched(gpu), len(gpu.launches)


@row
def one_configuration_is_not_measured(autotune, gpu):
    kernel = autotune(blocks(128), key=["n"])(add)
    kernel[GRID](*tensors())
    return len(gpu.launches), kernel.cache, kernel.best_config, hasattr(kernel, "bench_time")


@row
def configurations_may_be_a_tuple_and_equal_ones_count_once(autotune, gpu):
    kernel = autotune(tuple(blocks(128, 256, 256, 128)), key=["n"])(add)
    kernel[GRID](*tensors())
    return kernel.best_config, len(kernel.configs_timings)


@row
def a_hook_of_a_configuration_gets_every_argument_at_every_launch(autotune, gpu):
    seen = []
    configs = [triton.Config({"BLOCK": b}, pre_hook=lambda named: seen.append(set(named))) for b in (128, 256)]
    kernel = autotune(configs, key=["n"])(add)
    kernel[GRID](*tensors()[:3], n=256)
    before = len(seen)
    kernel[GRID](*tensors())
    return len(seen) - before, {frozenset(names) for names in seen}


@row
def a_configuration_may_give_options_of_the_compiler_in_its_values(autotune, gpu):
    kernel = autotune([triton.Config({"BLOCK": b, "num_warps": 2}) for b in (128, 256)], key=["n"])(add)
    kernel[GRID](*tensors())
    return gpu.launches[-1]["num_warps"], str(kernel.best_config)


# ---------------------------------------------------------------------------------------------------------------- keys


@row
def keys_are_names_in_any_iterable(autotune, gpu):
    said = []
    for key in (["n"], ("n",), "n", [], ()):
        kernel = autotune(blocks(128, 256), key=key)(add)
        kernel[GRID](*tensors())
        said.append((list(kernel.keys), list(kernel.cache)))
    return said


@row
def names_that_are_not_arguments(autotune, gpu):
    def made_and_launched(**given):
        autotune(blocks(128, 256), **{"key": ["n"], **given})(add)[GRID](*tensors())

    return [error_of(made_and_launched, key=key) for key in (["m"], ["n", "m"], "nm")]


@row
def no_key_at_all(autotune, gpu):
    return [error_of(lambda b=b: autotune(blocks(*b), key=None)(add)[GRID](*tensors())) for b in ((128,), (128, 256))]


@row
def what_is_in_the_cache_after_launches_of_each_form(autotune, gpu):
    kernel = autotune(blocks(128, 256), key=["n", "x_ptr"][:1])(add)
    x, y, out, n = tensors()
    kernel[GRID](x, y, out, n)
    kernel[GRID](x, y, out, n=512)
    kernel[GRID](x_ptr=x.half(), y_ptr=y, out_ptr=out, n=n)
    kernel.run(x, y, out.double(), n=n, grid=GRID, warmup=False)
    return kernel.cache


@row
def a_default_is_not_in_the_key_unless_it_is_passed(autotune, gpu):
    kernel = autotune(blocks(128, 256), key=["n", "factor"])(scale)
    kernel[GRID](torch.ones(256), 256)
    kernel[GRID](torch.ones(256), 256, 2)
    kernel[GRID](torch.ones(256), n=256, factor=3)
    return list(kernel.cache)


@row
def a_type_of_tritons_in_the_key(autotune, gpu):
    kernel = autotune(blocks(128, 256), key=["UNUSED"])(scale)
    for kind in (tl.float32, tl.float32, tl.float16, tl.float32):
        kernel[GRID](torch.ones(256), 256, UNUSED=kind)
    said = list(kernel.cache), launched(gpu)
    positional = autotune(blocks(128, 256), key=["factor"])(scale)
    for factor in (2, Odd(2), Odd(2), Odd(3), 2.5):
        error_of(positional[GRID], torch.ones(256), 256, factor)  # some are not for the compiler
    return said, len(positional.cache)


@row
def a_key_that_cannot_be_hashed(autotune, gpu):
    return error_of(autotune(blocks(128, 256), key=["n"])(add)[GRID], *tensors()[:3], [256])


# ------------------------------------------------------------------------------------------------------------- pruning


def pruned(autotune, gpu, calls=(((0, 1, 2, 3), ()),), blocks_=(64, 128, 256), **prune):
    """Launch with arguments by position and by name; return the error, if any, and the block launched."""
    kernel = autotune(blocks(*blocks_), key=["n"], prune_configs_by=prune)(add)
    names = ["x_ptr", "y_ptr", "out_ptr", "n"]
    for positions, named in calls:
        values = tensors()
        error = error_of(
            kernel[GRID], *(values[i] for i in positions), **{name: values[names.index(name)] for name in named}
        )
        if error is not None:
            return error
    return launched(gpu)


@row
def early_pruning_gets_arguments_as_the_call_passed_them(autotune, gpu):
    seen = []

    def early(configs, named, **rest):
        seen.append(
            (list(configs), list(named), {name: value for name, value in rest.items() if name in ("n", "warmup")})
        )
        return configs

    kernel = autotune(blocks(128, 256), key=["n"], prune_configs_by={"early_config_prune": early})(add)
    x, y, out, n = tensors()
    for at in (n, n, 2 * n, 3 * n):
        kernel[GRID](x, y, out, at)
    for at in (4 * n, 4 * n, 5 * n):
        kernel[GRID](x, y, out, n=at)
    kernel[GRID](n=6 * n, out_ptr=out, x_ptr=x, y_ptr=y)
    kernel[GRID](x, y, out, 7 * n)
    kernel[GRID](x, y, out_ptr=out, n=n)  # known
    return seen, list(kernel.cache)


@row
def early_pruning_may_return_one_or_make_or_change_configurations(autotune, gpu):
    def changed(configs, _named, **_rest):
        for config in configs:
            config.kwargs["BLOCK"] //= 2
        return configs

    rules = [
        lambda configs, _named, **_rest: configs[:1],
        lambda _configs, _named, **_rest: blocks(512),
        lambda _configs, _named, **_rest: blocks(512, 32),
        lambda configs, _named, **_rest: tuple(configs[:2]),
        changed,
    ]
    return [pruned(autotune, gpu, early_config_prune=rule) for rule in rules]


@row
def early_pruning_may_read_a_table_that_changes(autotune, gpu):
    table = {256: 64}
    early = lambda _configs, named, **_rest: blocks(table.get(named["n"], 512))
    kernel = autotune(blocks(128, 256), key=["n"], prune_configs_by={"early_config_prune": early})(add)
    said = []
    for n in (256, 512):
        kernel[GRID](*tensors(n))
        said.append(launched(gpu))
    table[256] = 128
    kernel[GRID](*tensors(256))
    return said, launched(gpu)


@row
def pruning_that_fails(autotune, gpu):
    broken = lambda _configs, named, **_rest: named["no such argument"]
    keyword = lambda configs, _named, n, **_rest: configs
    return [
        pruned(autotune, gpu, early_config_prune=lambda *_, **__: []),
        pruned(autotune, gpu, early_config_prune=broken),
        pruned(autotune, gpu, early_config_prune=keyword),
        pruned(autotune, gpu, early_config_prune=keyword, calls=[((0, 1, 2), ("n",))]),
    ]


@row
def a_performance_model_gets_everything_by_name(autotune, gpu):
    seen = []

    def model(**named):
        seen.append((frozenset(named), named["BLOCK"], named["num_warps"], named["n"]))
        return -named["BLOCK"]

    return [
        pruned(autotune, gpu, perf_model=model, top_k=1, calls=[(c)])
        for c in [((0, 1, 2, 3), ()), ((0, 1), ("out_ptr", "n"))]
    ], seen


@row
def the_number_that_a_model_keeps(autotune, gpu):
    model = lambda **named: -named["BLOCK"]
    kept = (1, 2, 3, 10, 0, 1.0, 0.4, 0.3, 0.0, 1.5, "x", None)
    said = []
    for top_k in kept:
        gpu.launches.clear()
        error = pruned(autotune, gpu, perf_model=model, top_k=top_k)
        said.append(error if isinstance(error, Exception) else sorted({facts["BLOCK"] for facts in gpu.launches}))
    both = pruned(
        autotune,
        gpu,
        early_config_prune=lambda c, *_, **__: c[:2],
        perf_model=model,
        top_k=0.5,
        blocks_=(64, 128, 256, 512),
    )
    return said, both


@row
def the_positional_arguments_are_an_attribute_while_pruning(autotune, gpu):
    seen = []

    def early(configs, named, **_rest):
        seen.append(kernel.nargs == named)
        return configs

    kernel = autotune(blocks(128, 256), key=["n"], prune_configs_by={"early_config_prune": early})(add)
    kernel[GRID](*tensors())
    return seen, kernel.nargs


# --------------------------------------------------------------------------------------------------------------- hooks


def hooked(autotune, gpu, **given):
    calls = []

    def before(named, reset_only=False):
        calls.append(("before", frozenset(named), reset_only))

    def after(named, exception):
        calls.append(("after", frozenset(named), type(exception).__name__))

    both = {"pre_hook": before, "post_hook": after}
    kernel = autotune(blocks(128, 256), key=["n"], **{name: both[name] for name in given.pop("hooks")}, **given)(add)
    x, y, out, n = tensors()
    out.fill_(7)
    kernel[GRID](x, y, out, n=n)
    tuning = len(calls)
    kernel[GRID](x, y, out, n=n)
    return calls[0], calls[tuning - 1], set(calls), len(calls) - tuning, out.sum().item()


@row
def the_users_hooks_run_around_candidates_and_not_around_launches(autotune, gpu):
    return [hooked(autotune, gpu, hooks=names) for names in (["pre_hook"], ["pre_hook", "post_hook"], ["post_hook"])]


@row
def a_hook_before_replaces_resetting(autotune, gpu):
    gpu.effect = lambda _facts, arguments: arguments["out_ptr"].add_(0)
    return hooked(autotune, gpu, hooks=["pre_hook"], reset_to_zero=["out_ptr"])[-1]


@row
def the_hook_after_gets_the_error_of_a_candidate(autotune, gpu):
    gpu.cost = lambda facts: OUT_OF_MEMORY if facts["BLOCK"] == 256 else COST[facts["BLOCK"]]
    return {kind for _when, _names, kind in hooked(autotune, gpu, hooks=["pre_hook", "post_hook"])[2]}


@row
def hooks_are_attributes(autotune, gpu):
    hook = lambda *_args, **_named: None
    plain = autotune(blocks(128), key=["n"])(add)
    given = autotune(blocks(128), key=["n"], pre_hook=hook, post_hook=hook)(add)
    return [(k.user_defined_pre_hook, k.user_defined_post_hook, k.pre_hook is hook) for k in (plain, given)]


@row
def tensors_are_reset_and_restored(autotune, gpu):
    gpu.effect = lambda _facts, arguments: arguments["x_ptr"].add_(1)
    said = []
    for declared in ({"reset_to_zero": ["x_ptr"]}, {"restore_value": ["x_ptr"]}):
        for named in ({}, {"n": 256}):
            x = torch.full((256,), 7.0)
            kernel = autotune(blocks(128, 256), key=["n"], **declared)(scale)
            kernel[GRID](x, *(() if named else (256,)), **named)
            first = x.sum().item()
            kernel[GRID](x, *(() if named else (256,)), **named)
            said.append((first, x.sum().item()))
    return said


# ---------------------------------------------------------------------------------------------------------- heuristics


@row
def heuristics_stand_below_and_above(autotune, gpu):
    values = {"n": lambda named: named["x_ptr"].numel()}
    below = autotune(blocks(128, 256), key=["n"])(triton.heuristics(values)(add))
    above = triton.heuristics(values)(autotune(blocks(128, 256), key=["n"])(add))
    twice = triton.heuristics(values)(
        autotune(blocks(128, 256), key=["n"])(triton.heuristics({"UNUSED": lambda named: named["BLOCK"]})(scale))
    )
    x, y, out, _ = tensors()
    said = []
    for kernel, args in ((below, (x, y, out)), (above, (x, y, out)), (twice, (x,))):
        kernel[GRID](*args)
        said.append((launched(gpu), gpu.launches[-1].get("UNUSED")))
    return said, list(below.cache), list(above.fn.cache), list(twice.fn.cache), below.base_fn.__name__


# -------------------------------------------------------------------------------------------------------- wrong calls


@row
def values_that_call_and_configuration_both_give(autotune, gpu):
    many, one = (autotune(blocks(*sizes), key=["n"])(add)[GRID] for sizes in ((128, 256), (128,)))
    return [error_of(launch, *tensors(), BLOCK=64) for launch in (many, one)]


@row
def calls_with_too_few_or_too_many_arguments(autotune, gpu):
    launch = autotune(blocks(128, 256), key=["n"])(add)[GRID]
    return [
        error_of(launch, *tensors()[:3]),
        error_of(launch, *tensors(), 64, 64),
        error_of(launch, *tensors(), x_ptr=1),
    ]


@row
def all_candidates_need_too_much(autotune, gpu):
    gpu.cost = lambda _facts: OUT_OF_MEMORY
    return error_of(autotune(blocks(128, 256), key=["n"])(add)[GRID], *tensors())


@row
def no_candidate_compiles(autotune, gpu):
    return error_of(autotune(blocks(100, 101), key=["n"])(add)[GRID], *tensors())


# ------------------------------------------------------------------------------------------------ the cache is written


@row
def a_written_configuration_is_launched(autotune, gpu):
    kernel = autotune(blocks(128, 256), key=["n"])(add)
    dtypes = ("torch.float32",) * 3
    kernel.cache[256, *dtypes] = blocks(64)[0]  # before the first launch, and not among the configurations
    kernel[GRID](*tensors())
    said = [launched(gpu), len(gpu.launches), kernel.best_config]
    kernel[GRID](*tensors(512))
    said.append(launched(gpu))
    launch = kernel[GRID]
    kernel.cache[512, *dtypes] = kernel.configs[0]  # while warm
    kernel[GRID](*tensors(512))
    said.append(launched(gpu))
    kernel.cache.update({(512, *dtypes): blocks(32)[0]})
    launch(*tensors(512))
    said.append(launched(gpu))
    kernel.cache = {(512, *dtypes): blocks(16)[0]}
    kernel[GRID](*tensors(512))
    said.append(launched(gpu))
    kernel[GRID](*tensors(256))  # measured at last
    said.append(launched(gpu))
    kernel.cache.clear()
    kernel[GRID](*tensors(512))
    return said, launched(gpu), list(kernel.cache)


@row
def a_written_configuration_counts_for_every_form_of_the_call(autotune, gpu):
    kernel = autotune(blocks(128, 256), key=["n"])(add)
    x, y, out, n = tensors()
    kernel.cache[n, "torch.float64", "torch.float32", "torch.float32"] = blocks(64)[0]
    kernel[GRID](n=n, y_ptr=y.double(), x_ptr=x, out_ptr=out)  # the order of the call counts, for Triton
    said = [launched(gpu)]
    kernel[GRID](x, y.double(), out, n)
    said.append(launched(gpu))
    kernel[GRID](x.double(), y, out, n=n)
    return said, launched(gpu)


@row
def removing_a_written_configuration_measures(autotune, gpu):
    kernel = autotune(blocks(128, 256), key=["n"])(add)
    key = (256, *("torch.float32",) * 3)
    said = []
    for remove in (
        lambda: kernel.cache.pop(key),
        lambda: kernel.cache.__delitem__(key),
        kernel.cache.popitem,
    ):
        kernel.cache[key] = blocks(64)[0]
        kernel[GRID](*tensors())
        said.append(launched(gpu))
        remove()
        kernel[GRID](*tensors())
        said.append(launched(gpu))
    return said


@row
def the_cache_is_a_dict_that_can_be_copied(autotune, gpu):
    kernel = autotune(blocks(128, 256), key=["n"])(add)
    kernel[GRID](*tensors())
    copies = dict(kernel.cache), kernel.cache.copy(), copy.deepcopy(kernel.cache), kernel.cache | {}
    return copies, {type(each) for each in copies}, kernel.cache.setdefault(next(iter(kernel.cache)), None)


# --------------------------------------------------------------------------------------- the configurations are written


def written(autotune, gpu, change):
    kernel = autotune(blocks(64, 128, 256), key=["n"])(add)
    kernel[GRID](*tensors())
    change(kernel)
    kernel.cache.clear()
    kernel[GRID](*tensors())
    return launched(gpu), kernel.best_config.kwargs, len(kernel.configs)


@row
def configurations_are_replaced(autotune, gpu):
    def sliced(kernel):
        kernel.configs = kernel.configs[:2]

    def single(kernel):
        kernel.configs = kernel.configs[:1]

    def other(kernel):
        kernel.configs = blocks(16, 32)

    return [written(autotune, gpu, change) for change in (sliced, single, other)]


@row
def configurations_are_changed_in_place(autotune, gpu):
    def fields(kernel):
        for config in kernel.configs:
            config.kwargs["BLOCK"] //= 2

    changes = (
        lambda kernel: kernel.configs.pop(),
        lambda kernel: kernel.configs.extend(blocks(16)),
        lambda kernel: kernel.configs.__setitem__(slice(None), blocks(16, 32)),
        fields,
    )
    return [written(autotune, gpu, change) for change in changes]


@row
def one_configuration_is_replaced_without_touching_the_cache(autotune, gpu):
    kernel = autotune(blocks(64, 128, 256), key=["n"])(add)
    kernel[GRID](*tensors())
    kernel.configs = kernel.configs[:1]
    kernel[GRID](*tensors())
    said = [launched(gpu)]
    kernel.configs[0] = blocks(32)[0]
    kernel[GRID](*tensors())
    return said, launched(gpu)


@row
def the_key_and_the_function_are_replaced(autotune, gpu):
    kernel = autotune(blocks(128, 256), key=["n"])(add)
    kernel[GRID](*tensors())
    kernel.keys = []
    kernel[GRID](*tensors())
    said = list(kernel.cache)
    kernel.fn = triton.heuristics({"n": lambda named: named["x_ptr"].numel()})(add)
    kernel[GRID](*tensors()[:3])
    return said, list(kernel.cache)


@row
def the_list_of_configurations_is_the_users_own(autotune, gpu):
    configs = blocks(128, 256)
    kernel = autotune(configs, key=["n"])(add)
    before = kernel.configs is configs
    kernel[GRID](*tensors())
    return before, kernel.configs is configs, type(kernel.configs)


# ------------------------------------------------------------------------------------------------------ results to read


def shape(timings):
    return {
        str(config): (type(times), len(times), all(isinstance(t, float) for t in times))
        for config, times in timings.items()
    }


@row
def results_are_attributes(autotune, gpu):
    gpu.cost = lambda facts: OUT_OF_MEMORY if facts["BLOCK"] == 128 else COST[facts["BLOCK"]]
    kernel = autotune(blocks(64, 128, 256), key=["n"])(add)
    names = ("best_config", "bench_time", "configs_timings", "nargs")
    before = [hasattr(kernel, name) for name in names]
    kernel[GRID](*tensors())
    lost = [times for config, times in kernel.configs_timings.items() if config.kwargs["BLOCK"] == 128]
    return before, shape(kernel.configs_timings), type(kernel.bench_time), str(kernel.best_config), lost, kernel.nargs


@row
def another_process_finds_results(autotune, gpu):
    told = []
    said = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton.knobs.autotuning, "listener", lambda **facts: told.append(facts), raising=False)
        for _process in range(2):
            gpu.launches.clear()
            kernel = autotune(blocks(64, 128, 256), key=["n"], cache_results=True)(add)
            kernel[GRID](*tensors())
            said.append((kernel.best_config, kernel.cache, shape(kernel.configs_timings), kernel.cache_results))
        said.append(len(gpu.launches))
    told = [
        (f["fn"] is add, f["key"], f["best_config"], shape(f["configs_timings"]), f["cache_hit"], type(f["duration"]))
        for f in told
    ]
    return said, told if hasattr(triton.knobs.autotuning, "listener") else []


@row
def attributes_that_other_libraries_read(autotune, gpu):
    prune = {"perf_model": len, "top_k": 3, "early_config_prune": min}
    bench = lambda _call, quantiles: [1.0] * len(quantiles)
    kernel = autotune(
        blocks(128, 256), ["n"], prune, ["out_ptr"], ["x_ptr"], None, None, None, None, False, bench, False
    )(add)
    names = (
        "arg_names keys reset_to_zero restore_value perf_model configs_top_k early_config_prune fn base_fn "
        "num_warmups num_reps use_cuda_graph cache_results do_bench cache configs"
    )
    return [getattr(kernel, name) for name in names.split() if name != "do_bench"], kernel.do_bench is bench


@row
def what_is_printed(autotune, gpu):
    with pytest.MonkeyPatch.context() as patch:
        lines = []
        patch.setattr(triton.knobs.autotuning, "print", True)
        patch.setattr(
            "sys.stdout",
            type("Lines", (), {"write": lambda _self, text: lines.append(text), "flush": lambda _self: None})(),
        )
        kernel = autotune(blocks(64, 128, 256), key=["n"])(add)
        kernel[GRID](*tensors())
        kernel[GRID](*tensors())
    text = re.sub(r"after [0-9.]+s", "after s", "".join(lines))
    return sorted(text.splitlines())


@row
def deprecated_options_warn(autotune, gpu):
    said = []
    for options in ({}, {"warmup": 5}, {"rep": 5}, {"use_cuda_graph": True}):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            kernel = autotune(blocks(128, 256), key=["n"], **options)(add)
        said.append(
            ([(w.category, str(w.message)) for w in caught], kernel.num_warmups, kernel.num_reps, kernel.use_cuda_graph)
        )
    return said


# -------------------------------------------------------------------------------------------------------- how to launch


@row
def the_users_benchmark_measures(autotune, gpu):
    asked = []

    def bench(call, quantiles):
        call()
        asked.append((launched(gpu), tuple(quantiles)))
        return [COST[launched(gpu)] * 1e3] * len(quantiles)

    said = []
    for measure in (bench, lambda call, quantiles: bench(call, quantiles)[0]):
        kernel = autotune(blocks(64, 128, 256), key=["n"], do_bench=measure)(add)
        kernel[GRID](*tensors())
        said.append((sorted(asked), kernel.best_config))
        asked.clear()
    return said


@row
def every_way_to_launch(autotune, gpu):
    kernel = autotune(blocks(128, 256), key=["n"])(add)
    results = [
        kernel[GRID](*tensors()),
        kernel.run(*tensors(), grid=GRID, warmup=False),
        kernel[lambda m: (m["BLOCK"],)](*tensors()),
    ]
    compiled = kernel.warmup(*tensors(), grid=GRID)
    above = triton.heuristics({"n": lambda named: named["x_ptr"].numel()})(kernel)
    results.append(above.warmup(*tensors()[:3], grid=GRID))
    return [type(r) for r in results], gpu.launches[-1]["grid"], [type(c) for c in compiled], len(compiled)


@row
def options_of_the_compiler_given_by_the_call(autotune, gpu):
    kernel = autotune([triton.Config({"BLOCK": b}, num_warps=None) for b in (128, 256)], key=["n"])(add)
    kernel[GRID](*tensors(), num_warps=2)
    return gpu.launches[-1]["num_warps"], launched(gpu)


@row
def a_copy_is_a_kernel_of_its_own(autotune, gpu):
    kernel = autotune(blocks(128, 256), key=["n"])(add)
    kernel[GRID](*tensors())
    again = copy.copy(kernel)
    again.configs = blocks(64)
    again[GRID](*tensors())
    said = launched(gpu)
    kernel[GRID](*tensors())
    return said, launched(gpu), again.best_config, kernel.best_config


@row
def threads_launch_at_once(autotune, gpu):
    kernel = autotune(blocks(128), key=["n"])(add)
    threads = [threading.Thread(target=kernel[GRID], args=tensors()) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [facts["BLOCK"] for facts in gpu.launches]


@row
def torch_compile_takes_it_for_one_of_tritons(autotune, gpu):
    gpu.effect = lambda _facts, arguments: arguments["out_ptr"].fill_(5)
    said = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.utils._triton.has_triton", lambda: True)  # it looks for a GPU
        patch.setattr("warnings.warn", lambda *_args, **_named: None)  # torch's own, of its own code
        for options in (
            {"restore_value": ["x_ptr"]},
            {"prune_configs_by": {"early_config_prune": lambda c, _n, **_k: c[1:]}},
        ):
            kernel = autotune(blocks(128, 256), key=["n"], **options)(add)

            def program(x, kernel=kernel):
                out = torch.zeros_like(x)
                kernel[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, x, out, x.numel())
                return out + 1

            torch._dynamo.reset()
            result = torch.compile(program, fullgraph=True, backend="eager")(torch.ones(64))
            said.append((result.sum().item(), launched(gpu)))
    return said


# ------------------------------------------------------------------------------------------------------------ the test


def observe(function, autotune):
    with installed(FakeGpu(lambda facts: COST[facts["BLOCK"]]), add, scale, maybe) as gpu, warnings.catch_warnings():
        warnings.simplefilter("ignore", tb.TunebookWarning)
        return function(autotune, gpu)


def same(theirs, mine):
    """Equal; an error of Triton's is matched by an error that is one of its kind."""
    if isinstance(theirs, Exception):
        assert isinstance(mine, type(theirs)), f"Triton raises {theirs!r}, and this raises {mine!r}"
    elif isinstance(theirs, (list, tuple)) and any(isinstance(item, (list, tuple, Exception)) for item in theirs):
        assert len(theirs) == len(mine)
        for one, other in zip(theirs, mine, strict=True):
            same(one, other)
    else:
        assert mine == theirs


@pytest.mark.parametrize("function", ROWS, ids=lambda function: function.__name__)
def test_it_does_as_triton_does(function):
    same(observe(function, triton.autotune), observe(function, ours))


# ------------------------------------------------------------------------------------------ beyond the installed Triton


@pytest.fixture
def gpu():
    with installed(FakeGpu(lambda facts: COST[facts["BLOCK"]]), add, scale, maybe) as fake:
        yield fake


def test_a_name_in_the_key_that_triton_ignores_is_ignored_with_one_warning(gpu):
    kernel = ours(blocks(128, 256), key=["n"])(add)
    kernel.keys = ["n", "m"]  # as Triton before 3.9 lets a program write it
    with pytest.warns(tb.TunebookWarning, match=r"names m, which the kernel does not take.*x_ptr"):
        kernel[GRID](*tensors(256))
    kernel[GRID](*tensors(512))  # a second warning would be an error here
    assert [key[0] for key in kernel.cache] == [256, 512]


@pytest.mark.parametrize("declared", [{"reset_to_zero": ["x_ptr"]}, {"restore_value": ["x_ptr"]}])
@pytest.mark.parametrize("named", [True, False])
def test_none_needs_no_reset_and_no_restoring(gpu, declared, named):
    kernel = ours(blocks(128, 256), key=["n"], **declared)(maybe)
    out = torch.zeros(256)
    if named:
        kernel[GRID](x_ptr=None, out_ptr=out, n=256)
    else:
        kernel[GRID](None, out, 256)
    assert launched(gpu) == 256


class Subclass(triton.runtime.Autotuner):
    """As other libraries have one: it loads a configuration into the cache, and goes on."""

    loaded = None

    def run(self, *args, **kwargs):
        if self.loaded is not None:
            self.cache[self.loaded] = blocks(32)[0]
            self.loaded = None
        return engine_of(self).run(*args, **kwargs)


def test_an_autotuner_of_another_library_launches_through_an_engine(gpu):
    kernel = Subclass(add, add.arg_names, blocks(128, 256), ["n"], None, None)
    kernel[GRID](*tensors())
    assert (launched(gpu), kernel.best_config.kwargs) == (256, {"BLOCK": 256})
    assert list(kernel.cache) == [(256, *("torch.float32",) * 3)]
    kernel.loaded = (256, *("torch.float32",) * 3)
    kernel[GRID](*tensors())
    assert launched(gpu) == 32
    assert engine_of(kernel) is engine_of(kernel)


def test_an_autotuner_around_an_object_of_another_library_is_tuned_too(gpu):
    ran = []

    class Kernel:
        fn = staticmethod(lambda: None)

        def run(self, **named):
            ran.append(named["BLOCK"])

    bench = lambda call, quantiles: [call() or ran[-1]] * len(quantiles)
    prune = {"early_config_prune": lambda c, *_, **__: c[:3], "perf_model": lambda **named: named["BLOCK"], "top_k": 2}
    kernel = triton.runtime.Autotuner(
        Kernel(), [], blocks(16, 32, 64, 128), [], None, None, do_bench=bench, prune_configs_by=prune
    )
    engine_of(kernel).run()
    assert sorted(set(ran)) == [16, 32]
    assert ran[-1] == 16


def test_an_overlay_stands_before_a_written_configuration_and_leaves_it(gpu):
    kernel = ours(blocks(128, 256), key=["n"])(add)
    kernel.cache[256, *("torch.float32",) * 3] = blocks(64)[0]
    with kernel.overlay(blocks(32)[0]):
        kernel[GRID](*tensors())
    kernel[GRID](*tensors())
    assert [facts["BLOCK"] for facts in gpu.launches] == [32, 64]


def test_explain_says_that_the_program_gave_the_configuration(gpu):
    kernel = ours(blocks(128, 256), key=["n"])(add)
    kernel.cache[256, *("torch.float32",) * 3] = blocks(64)[0]
    said = kernel.explain(*tensors(), grid=GRID)
    assert (said.selection.source, said.selection.config.config.kwargs) == ("kernel.cache", {"BLOCK": 64})


def test_a_failure_of_all_candidates_is_an_error_of_both_libraries(gpu):
    gpu.cost = lambda _facts: OUT_OF_MEMORY
    with pytest.raises(tb.NoConfig, match="all 2 candidates failed") as caught:
        ours(blocks(128, 256), key=["n"])(add)[GRID](*tensors())
    assert caught.value.required == OUT_OF_MEMORY.required
    assert type(pickle.loads(pickle.dumps(caught.value))) is tb.NoConfig
