"""The peers of the jax benchmarks, each with one function of one array and a choice that it has to tune.

A maker takes `work(x, way)` and returns the tuned function, and what says which way was chosen, or None if nothing was.
"""

# ruff: noqa: PLC0415 - each is optional

from __future__ import annotations

import logging
from dataclasses import dataclass

import jax

WAYS = ("decoy", "good")


def tunebook(work):
    import tunebook as tb

    @tb.tunable(space=tb.Space(way=list(WAYS)), heuristic={"way": "decoy"}, store=False, name="bench")
    def call(x, *, config):
        return work(x, config.way)

    def chosen():
        found = {call.selector.cache.get(*problem).way for problem in list(call.selector.cache.keys())}
        return found.pop() if len(found) == 1 else None

    return call, chosen


def ejkernel(work):
    from ejkernel.ops import AutotunePolicy, ConfigCache, ConfigSelectorChain, Executor, Kernel, Tuner

    @dataclass(frozen=True)
    class Config:
        way: str = "decoy"

    class Bench(Kernel):
        def __init__(self):
            super().__init__(op_id="bench")

        def run(self, x, *, cfg):
            return work(x, cfg.way)

        def heuristic_cfg(self, inv):
            return Config()

        def candidate_cfgs(self, inv):
            return [Config(way) for way in WAYS]

    found = []
    chain = ConfigSelectorChain(ConfigCache(), AutotunePolicy(), Tuner(warmup=1, iters=3))
    chain.on_event = lambda event, **data: found.append(data.get("cfg"))
    executor, kernel = Executor(chain), Bench()

    def call(x):
        return executor(kernel, x)

    return call, lambda: next((cfg.way for cfg in reversed(found) if cfg is not None), None)


def tune_jax(work):
    import tune_jax as library

    library.logger.setLevel(logging.CRITICAL)
    call = library.tune(lambda x, way: work(x, way), hyperparams={"way": list(WAYS)})  # noqa: PLW0108 - its own function
    return call, lambda: call.optimal_hyperparams.get("way")


def tokamax(work):
    import pydantic
    import tokamax as library
    from tokamax._src.ops import op as ops

    @pydantic.dataclasses.dataclass(frozen=True)
    class Config:
        way: str = "decoy"

    class Bench(ops.Op):
        config_cls = Config

        def _fwd(self, x, *, return_residuals, config):
            used.append(config.way)
            return work(x, config.way), None

        _fwd.__annotations__ |= {"x": jax.Array, "return_residuals": bool}  # it reads them, and not as text

        def _get_heuristics_config(self, ba):
            return Config()

        def _get_autotuning_configs(self, ba):
            return {Config(way) for way in WAYS}

    op, used = Bench(), []

    def call(x):
        with library.config.autotuning_cache_miss_fallback("autotune"):
            return op(x)

    return call, lambda: used[-1] if used else None  # the last to be traced is what the user's program gets


PEERS = {"tunebook": tunebook, "ejkernel": ejkernel, "tune-jax": tune_jax, "tokamax": tokamax}
