"""What the selector may do."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

from tunebook._base.errors import DefinitionError

MissFallback = Literal["autotune", "heuristics", "background", "incremental", "nearest"]
WhileTuning = Literal["wait", "heuristics"]
Isolate = Literal["never", "auto", "always"]


@dataclass(frozen=True, slots=True)
class AutotunePolicy:
    """What happens on a miss.

    `cache_miss_fallback` is "autotune" to tune in the call that misses, which waits for it; or one of those that let
    the heuristic answer. "heuristics" never tunes; nor does "nearest", which takes what was best for the nearest sizes
    that the book knows, and the heuristic if it knows none. "background" tunes in a thread of its own, on made-up
    arrays, and calls that come after it get the result. "incremental" tries one candidate per call, in the user's own
    calls, which take at most `incremental_slowdown` times as long together as the heuristic alone would, but for the
    one candidate that takes longer than expected; it measures forward passes, and loses what it measured if the process
    ends before.
    Both tune in the call after all if the kernel has no heuristic, or it is not allowed. Both keep to the heuristic,
    with a warning, if an argument is neither an array nor a plain value.

    `while_tuning` says what a thread does when another one is tuning the same problem: wait for it, or take the
    heuristic for now. `isolate` runs candidates in a worker process, which may crash or take longer than
    `candidate_timeout_s` over one without harm; "auto" does so for kernels that are compiled ahead (`compile=`) and run
    on the CPU. The worker is a fork, which does not suit a process that uses a GPU, or whose threads hold locks; only
    Triton kernels have one that is started afresh, for "always" and "auto".
    """

    allow_autotune: bool = True
    allow_heuristics: bool = True
    cache_miss_fallback: MissFallback = "autotune"
    validate_backward: bool = False
    while_tuning: WhileTuning = "wait"
    isolate: Isolate = "never"
    candidate_timeout_s: float = 60.0
    incremental_slowdown: float = 1.5

    def __post_init__(self) -> None:
        _one_of("cache_miss_fallback", self.cache_miss_fallback, get_args(MissFallback))
        _one_of("while_tuning", self.while_tuning, get_args(WhileTuning))
        _one_of("isolate", self.isolate, get_args(Isolate))
        if not self.candidate_timeout_s > 0:
            raise DefinitionError(f"candidate_timeout_s={self.candidate_timeout_s!r} must be more than 0 seconds")
        if not 1 < self.incremental_slowdown < math.inf:
            raise DefinitionError(
                f"incremental_slowdown={self.incremental_slowdown!r} is a factor on the time of a call, and must be "
                "more than 1: 1.5 lets calls take half as long again while candidates are tried"
            )
        if self.cache_miss_fallback == "incremental" and self.isolate == "always":
            raise DefinitionError(
                "cache_miss_fallback='incremental' runs candidates in the user's own calls, which isolate='always' "
                "does not allow; use cache_miss_fallback='background', or isolate='never'"
            )

    def updated(self, updates: dict[str, Any]) -> AutotunePolicy:
        """Return a copy with some fields changed; an unknown name is an error that lists the known ones."""
        names = [field.name for field in fields(self)]
        for name in updates:
            if name not in names:
                raise DefinitionError(f"no policy is called {name!r}; there are {', '.join(names)}")
        return replace(self, **updates)


def _one_of(name: str, value: object, valid: tuple[str, ...]) -> None:
    if value not in valid:
        raise DefinitionError(f"{name}={value!r} is not a policy; use one of {', '.join(map(repr, valid))}")
