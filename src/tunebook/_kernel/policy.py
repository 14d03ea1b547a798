"""The policy of a selector."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

from tunebook._base.errors import DefinitionError, did_you_mean

MissFallback = Literal["autotune", "heuristics", "background", "incremental", "nearest"]
WhileTuning = Literal["wait", "heuristics"]
Isolate = Literal["never", "auto", "always"]


@dataclass(frozen=True, slots=True)
class AutotunePolicy:
    """The rules for a call that misses.

    `cache_miss_fallback` names the answer to a miss. "autotune" tunes in the call, which waits. All others let the
    heuristic answer. "heuristics" never tunes; nor does "nearest", which takes the best configuration of the nearest
    sizes in the book, or else the heuristic. "background" tunes in a thread of its own on made-up arrays, and later
    calls get the result. "incremental" tries one candidate per call, in the user's own calls. Together these take at
    most `incremental_slowdown` times as long as with the heuristic alone, except for a candidate that is slower than
    expected. It measures forward passes, and loses its measurements if the process ends before it is done. Both tune
    in the call if the kernel has no heuristic or the heuristic is not allowed. Both keep to the heuristic, with a
    warning, if an argument is neither an array nor a plain value.

    `while_tuning` is for a thread that meets a problem which another thread tunes: wait, or use the heuristic for now.
    `isolate` runs candidates in a worker process, which may crash or take longer than `candidate_timeout_s` over a
    candidate without harm; "auto" does so for kernels on the CPU that are compiled ahead (`compile=`). The worker is a
    fork, which does not suit a process that uses a GPU, or with threads that hold locks. Triton kernels have a worker
    that is started afresh, for "always" and "auto".
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
        choices = {"cache_miss_fallback": MissFallback, "while_tuning": WhileTuning, "isolate": Isolate}
        for name, valid in choices.items():
            if (value := getattr(self, name)) not in get_args(valid):
                raise DefinitionError(f"invalid {name}={value!r}; use one of {', '.join(map(repr, get_args(valid)))}")
        if not self.candidate_timeout_s > 0:
            raise DefinitionError(f"candidate_timeout_s={self.candidate_timeout_s!r} must be more than 0 seconds")
        if not 1 < self.incremental_slowdown < math.inf:
            raise DefinitionError(
                f"incremental_slowdown={self.incremental_slowdown!r} must be more than 1: 1.5 lets calls take half as "
                "long again while candidates are tried"
            )
        if self.cache_miss_fallback == "incremental" and self.isolate == "always":
            raise DefinitionError(
                "cache_miss_fallback='incremental' runs candidates in the user's own calls, which isolate='always' "
                "does not allow; use cache_miss_fallback='background', or isolate='never'"
            )

    def updated(self, updates: dict[str, Any]) -> AutotunePolicy:
        """Return a copy with some fields changed; `DefinitionError` for an unknown name."""
        names = [field.name for field in fields(self)]
        for name in updates:
            if name not in names:
                raise DefinitionError(did_you_mean("policy", name, names))
        return replace(self, **updates)
