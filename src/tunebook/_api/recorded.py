"""Tuning the calls that an `Executor` noted, and the result of it as an overlay."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tunebook._api.tunable import Outcome, tune_all
from tunebook._arrays.device_fingerprint import device_fingerprint
from tunebook._memo.context_stack import overlay_cache
from tunebook._selection.invocation_registry import REGISTRY, Invocations

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tunebook._selection.selector import ConfigSelectorChain
    from tunebook._tuning.job import Budget


class Entry(NamedTuple):
    """The configuration of one call, by its operation and call key; `device` if it is not the result's."""

    op_id_v: str
    call_key: str
    cfg: Any
    device: str = ""


class AutotuningResult(overlay_cache):
    """The configurations that `autotune_recorded` found. Inside a with-block, each call gets its own of them.

    `outcomes` says for every recorded call if it was tuned, known, skipped or failed, and why.
    """

    __slots__ = ("device", "entries", "outcomes")

    def __init__(self, device: str, entries: Iterable[Entry], outcomes: Iterable[Outcome] = ()) -> None:
        self.device: Final = device
        self.entries: Final = tuple(entries)
        self.outcomes: Final = tuple(outcomes)
        super().__init__({(e.device or device, e.op_id_v, e.call_key): e.cfg for e in self.entries})

    def __repr__(self) -> str:
        return f"<AutotuningResult: {len(self.entries)} configurations for {len(self.outcomes)} recorded calls>"

    def as_overlay(self) -> dict[tuple[str, str, str], Any]:
        """Return the configurations by (device, op_id, call_key), as `overlay_cache` takes them."""
        return dict(self.mapping)


def autotune_recorded(
    selector: ConfigSelectorChain[Any] | None = None,
    *,
    show_progress: bool = False,
    repetition_count: int = 1,
    device: str | None = None,
    budget: Budget | float | str | None = None,
) -> AutotuningResult:
    """Tune every call in the registry that is not known yet, and return the configurations of all of them.

    The calls are those of `get_invocations(device)`; None takes the calls on every device of this process. `selector`
    is for calls that were noted by hand. `repetition_count` is ignored: candidates race for as long as they differ.
    """
    del repetition_count
    calls = [call for call in REGISTRY if device in {None, call.problem.device}]
    outcomes = tune_all(Invocations(calls), selector=selector, budget=budget, progress=show_progress)
    found = [(outcome.call.problem, outcome.config) for outcome in outcomes if outcome.config is not None]
    here = device or next((call.problem.device for call in calls), device_fingerprint())
    return AutotuningResult(here, [Entry(p.op, p.call_key, config, p.device) for p, config in found], outcomes)


def benchmark(fn: Any, *args: Any, warmup: int = 1, iters: int = 5, **kwargs: Any) -> float:
    """Return the mean seconds of a run of a function, as `Tuner(warmup, iters).measure` does.

    >>> benchmark(sum, [1, 2]) > 0
    True
    """
    from tunebook._tuning.tuner import Tuner  # noqa: PLC0415 - loaded late: for measuring only

    return Tuner(warmup, iters).measure(fn, *args, **kwargs)
