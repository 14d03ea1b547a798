"""The peer of bench/hot_path.py: ejkernel's executor, on calls whose configuration is in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

TESTED = "0.0.80"


@dataclass(frozen=True)
class Config:
    block: int = 64


def ejkernel_executor() -> tuple[Any, Any]:
    """Return an executor and a kernel that returns its first argument at once: what is left is the executor's time."""
    from ejkernel.ops import AutotunePolicy, ConfigCache, ConfigSelectorChain, Executor, Kernel, Tuner  # noqa: PLC0415 - optional

    class Nothing(Kernel):
        def __init__(self):
            super().__init__(op_id="bench_nothing")

        def run(self, a, b, c, n, flag, *, cfg):
            return a

        def heuristic_cfg(self, inv):
            return Config()

        def candidate_cfgs(self, inv):
            return [Config(32), Config(64)]

    # The default policy: with cache_miss_fallback="heuristics" the executor goes another way, past the memory tier.
    return Executor(ConfigSelectorChain(ConfigCache(), AutotunePolicy(), Tuner(warmup=1, iters=1))), Nothing()


def check_memory_hit(executor: Any, kernel: Any, arguments: tuple[Any, ...]) -> None:
    """Tune the call, and make sure that the next one is answered from memory: that is what will be timed."""
    seen = []
    executor(kernel, *arguments)
    executor.chooser.on_event = lambda event, **data: seen.append((event, data.get("level")))
    executor(kernel, *arguments)
    executor.chooser.on_event = None
    if seen != [("cache_hit", "memory")]:
        raise SystemExit(f"ejkernel did not answer from memory: {seen}")
