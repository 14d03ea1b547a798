"""The policy for calls that miss."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Final, Literal, Self, SupportsFloat, get_args

from tunebook._base.errors import DefinitionError, did_you_mean, not_among
from tunebook._base.vocabulary import Trust
from tunebook._kernel.measure import check_measure
from tunebook._memo.answer_memo import MEMO

if TYPE_CHECKING:
    from tunebook._kernel.measure import Measure

MissFallback = Literal["autotune", "heuristics", "background", "incremental", "nearest", "predict"]
WhileTuning = Literal["wait", "heuristics"]
Isolate = Literal["never", "auto", "always"]
Reverify = Literal["never", "tuning", "behind"]
_SWITCHES: Final = ("allow_autotune", "allow_heuristics", "validate_backward", "strict")
# Amounts must be more than the first number, and at most the second.
_AMOUNTS: Final = {
    "candidate_timeout_s": (0, math.inf, "60.0 is a minute"),
    "regret_limit": (0, math.inf, "0.03 is 3 % slower than the best"),
    "incremental_slowdown": (1, 1e9, "1.5 lets calls take half as long again while candidates are tried"),
    "slowdown": (1, 1e9, "1.02 lets calls take 2 % longer"),
}
_LEAST_WINDOW: Final = 100  # calls: a shorter one is over before a candidate is compared


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and value >= least


@dataclass(slots=True, unsafe_hash=True)
class AutotunePolicy:
    """The rules for a call that misses. A field that is assigned counts from the next call on.

    `cache_miss_fallback` names the answer to a miss. "autotune" tunes in the call, which waits. All others let the
    heuristic answer. "heuristics" never tunes; nor does "nearest", which takes the best configuration of the nearest
    sizes in the book, or else the heuristic. "predict" learns a model of times from the book's entries of other sizes
    on the device, and answers by it, without a run, where its choice is at most `regret_limit` slower than the best in
    95 of 100 calls (0.03 is 3 %); else it tunes in the call, with the 8 to 16 candidates that may be the best. It needs
    numpy, and about 20 tuned sizes for a bound. "background" tunes in a thread of its own on made-up arrays, and later
    calls get the result. "incremental" tries one candidate per call, in the user's own calls. Together these take at
    most `incremental_slowdown` times as long as with the heuristic alone, except for a candidate that is slower than
    expected. It measures forward passes, and loses its measurements if the process ends before it is done. Both tune
    in the call if the kernel has no heuristic or the heuristic is not allowed. Both keep to the heuristic, with a
    warning, if an argument is neither an array nor a plain value.

    On a GPU, "incremental" times launches by device events and waits for none of them. Then any `slowdown_window` calls
    of a problem take at most `slowdown` times as long as with its first configuration. Some calls stand still for
    milliseconds, in which the host makes a fork or loads a candidate: of `calls_per_stall` calls of the process at most
    one, or as many as the host's share of the time allows if this is 0.

    If every candidate is rejected, the heuristic's configuration too, or the reference fails, the call warns once and
    runs with the heuristic's configuration. With `strict` it raises `TuningFailed` instead.

    `trust` says how far an entry of the book may be from a call that it answers at once: "exact"; "versions", made
    under other versions of libraries, Python or a driver; "candidates", when the kernel had other candidates; "code",
    when it had other code; "family", on another device of the same family; "near", for the nearest tuned size; "any".
    None is "exact", or "code" if a miss is not tuned in the call, or "family" where nothing is tuned at all.
    `reverify` says when such an entry is measured here: at the next "tuning" (`tune`, `tune_all`, `tunebook tune`);
    "behind" the first call that it answers, in the background, on made-up arrays; or "never", also by `tune_all`.

    `measure` is a `Measure`: how candidates are measured. It goes before the kernel's own, and after that of `tune`.
    Entries that are in the book answer, no matter how they were measured.

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
    slowdown: float = 1.02
    slowdown_window: int = 2000
    calls_per_stall: int = 0
    regret_limit: float = 0.03
    strict: bool = False
    trust: Trust | None = None
    reverify: Reverify = "tuning"
    measure: Measure | None = None
    _assignable: bool = field(init=False, repr=False, compare=False)  # missing while this is being made

    def __post_init__(self) -> None:
        choices: dict[str, Any] = {
            "cache_miss_fallback": MissFallback,
            "while_tuning": WhileTuning,
            "isolate": Isolate,
            "reverify": Reverify,
        }
        if self.trust is not None:
            choices["trust"] = Trust
        for name, valid in choices.items():
            if (value := getattr(self, name)) not in get_args(valid):
                raise DefinitionError(not_among(name, value, get_args(valid)))
        check_measure(self.measure)
        self._check_types()
        fewest = {"slowdown_window": _LEAST_WINDOW, "calls_per_stall": 0}
        for name in (name for name in fewest if not _is_count(getattr(self, name), fewest[name])):
            raise DefinitionError(f"{name}={getattr(self, name)!r} must be a number of calls, at least {fewest[name]}")
        if self.cache_miss_fallback == "incremental" and self.isolate == "always":
            raise DefinitionError(
                "cache_miss_fallback='incremental' runs candidates in the user's own calls, which isolate='always' "
                "does not allow; use cache_miss_fallback='background', or isolate='never'"
            )
        if self.cache_miss_fallback == "incremental" and self.measure is not None:
            raise DefinitionError(
                "cache_miss_fallback='incremental' measures the user's own calls as they are, which measure= cannot "
                "change; use cache_miss_fallback='background'"
            )
        object.__setattr__(self, "_assignable", True)

    def _check_types(self) -> None:
        for name in _SWITCHES:
            if (value := getattr(self, name)) not in (True, False):
                meant = f"; did you mean cache_miss_fallback={value!r}?" if value in get_args(MissFallback) else ""
                raise DefinitionError(f"{name}={value!r} must be True or False{meant}")
        for name, (above, most, example) in _AMOUNTS.items():
            value = getattr(self, name)
            if not isinstance(value, SupportsFloat) or not above < float(value) <= most:
                raise DefinitionError(f"{name}={value!r} must be a number, more than {above}: {example}")

    if not TYPE_CHECKING:  # a type checker would take this for leave to assign any name

        def __new__(cls, *_: object, **given: object) -> Self:
            names = [name for name, each in cls.__dataclass_fields__.items() if each.init]
            for name in given:
                if name not in names:
                    raise DefinitionError(did_you_mean("option of AutotunePolicy", name, names))
            return object.__new__(cls)

        def __setattr__(self, name: str, value: object) -> None:
            made = hasattr(self, "_assignable")
            if made:
                self._with({name: value})  # a wrong name or value is an error
            if made and not self._assignable:
                raise AttributeError(
                    f"this policy is for the length of a with-block, which would forget {name}={value!r}; write "
                    f"policy_override(selector, {name}={value!r})"
                )
            object.__setattr__(self, name, value)
            if made:
                MEMO.invalidate()

    def updated(self, updates: dict[str, Any]) -> AutotunePolicy:
        """Return a copy with some fields changed, whose fields stay as they are; an unknown name is an error."""
        made = self._with(updates)
        object.__setattr__(made, "_assignable", False)
        return made

    def _with(self, updates: dict[str, Any]) -> AutotunePolicy:
        names = [field.name for field in fields(self) if field.init]
        for name in updates:
            if name not in names:
                raise DefinitionError(did_you_mean("option of AutotunePolicy", name, names))
        return replace(self, **updates)
