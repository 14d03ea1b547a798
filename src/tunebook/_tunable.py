"""The everyday API: `@tunable`, `tune`, `tune_all`."""

from __future__ import annotations

import inspect
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, NamedTuple, ParamSpec, Protocol, TypeVar, cast, overload

from tunebook._arrays import ArraySpec, materialise
from tunebook._cache import ConfigCache
from tunebook._dispatch import Dispatcher
from tunebook._errors import DefinitionError, TunebookError
from tunebook._explain import Explanation, explain_call
from tunebook._function_kernel import FunctionKernel, as_config
from tunebook._kernel import Invocation
from tunebook._overlay import overlay_op
from tunebook._persistent import PersistentCache
from tunebook._progress import progress_for
from tunebook._registry import Recording, announce_kernel, recordings
from tunebook._selection import ConfigSelectorChain, NoSelection, Selection
from tunebook._tuner import Tuned, Tuner, parse_budget

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Mapping

    from tunebook._policy import AutotunePolicy
    from tunebook._progress import Progress
    from tunebook._registry import RecordedCall
    from tunebook._scope import Scope
    from tunebook._space import Space
    from tunebook._types import Problem

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


class Tunable(Protocol[R_co]):
    """A tunable function: called as the author wrote it, without `config`, or with one to override."""

    kernel: FunctionKernel
    selector: ConfigSelectorChain[Any]

    def __call__(self, *args: Any, **kwargs: Any) -> R_co:
        """Run with the best configuration known; on the first call of its kind, tune."""

    def explain(self, *args: Any, **kwargs: Any) -> Explanation:
        """Say which configuration a call gets and why, without running or tuning anything."""

    def overlay(self, config: object = None, /, **values: Any) -> Scope:
        """Give this function one configuration inside a with-block, in this thread or task."""

    def problem(self, *args: Any, **kwargs: Any) -> Problem:
        """Return what a call is looked up by."""


class _Tunable(Generic[R]):
    """Builds a generated function and what hangs on it."""

    def __init__(self, kernel: FunctionKernel, selector: ConfigSelectorChain[Any]) -> None:
        self.kernel: Final = kernel
        self.selector: Final = selector
        self.dispatcher: Final = Dispatcher(
            kernel.function,
            names=kernel.names,
            layout=kernel.layout,
            select=self.select,
            selector=selector,
            observe=self.observe,
            as_config=as_config,
        )

    def select(self, arguments: tuple[Any, ...], override: object, problem: Problem | None) -> Selection[Any]:
        return self.selector.select(self.kernel.invocation(arguments, override), self.kernel, problem)

    def observe(self, problem: Problem, arguments: tuple[Any, ...], seconds: float) -> None:
        for recording in recordings():
            recording.observe(problem, self.kernel, arguments, {}, seconds)

    def problem(self, *args: Any, **kwargs: Any) -> Problem:
        return self.kernel.problem(self.kernel.invocation(self.kernel.arguments(args, kwargs)))

    def explain(self, *args: Any, **kwargs: Any) -> Explanation:
        inv = self.kernel.invocation(self.kernel.arguments(args, kwargs))
        return explain_call(self.selector, inv, self.kernel)

    def overlay(self, config: object = None, /, **values: Any) -> Scope:
        if (config is None) == (not values):
            raise DefinitionError("overlay takes one configuration: overlay(block_m=32, ...) or overlay(config)")
        return overlay_op(self.kernel.op_id_v, as_config(values if config is None else config))

    def function(self) -> Tunable[R]:
        """Return the generated function, dressed as the author's.

        Attributes on a function, because a class with `__call__` would add half as much again to every tuned call.
        """
        call = self.dispatcher.function
        original = self.kernel.function
        call.__name__, call.__qualname__ = original.__name__, original.__qualname__
        call.__module__, call.__doc__ = original.__module__, original.__doc__
        call.__annotations__ = dict(original.__annotations__)
        attributes: dict[str, Any] = {
            "__wrapped__": original,
            "__signature__": _signature(original),
            "kernel": self.kernel,
            "selector": self.selector,
            "explain": self.explain,
            "overlay": self.overlay,
            "problem": self.problem,
        }
        call.__dict__.update(attributes)
        return cast("Tunable[R]", call)


def _signature(original: Callable[..., Any]) -> inspect.Signature:
    signature = inspect.signature(original)
    parameters = [
        p.replace(default=None, kind=p.KEYWORD_ONLY) if p.name == "config" else p for p in signature.parameters.values()
    ]
    parameters.sort(key=lambda p: p.kind)
    return signature.replace(parameters=parameters)


@overload
def tunable(function: Callable[..., R], /, *, space: Any, **options: Any) -> Tunable[R]: ...
@overload
def tunable(
    *,
    space: Space | Iterable[object] | Callable[..., Iterable[object]],
    heuristic: object = None,
    name: str | None = None,
    version: str = "0",
    key: Iterable[str] | None = None,
    ignore: Iterable[str] = (),
    bucket: Mapping[str, object] | None = None,
    layout: bool = True,
    reference: Callable[..., Any] | None = None,
    compile: Callable[[Any], object] | None = None,
    policy: AutotunePolicy | None = None,
    tuner: Tuner | None = None,
    store: str | os.PathLike[str] | PersistentCache[Any] | Literal[False] | None = None,
    on_event: Callable[..., None] | None = None,
) -> Callable[[Callable[..., R]], Tunable[R]]: ...
def tunable(
    function: Callable[..., Any] | None = None,
    /,
    *,
    policy: AutotunePolicy | None = None,
    tuner: Tuner | None = None,
    store: str | os.PathLike[str] | PersistentCache[Any] | Literal[False] | None = None,
    on_event: Callable[..., None] | None = None,
    **options: Any,
) -> Any:
    """Make a function that takes `config` choose it by itself, measured once and remembered.

    `space` is a `Space`, a list of configurations, or a function of the arguments that returns one. `heuristic` is a
    configuration, or a function of the arguments that returns one. `key` names the arguments that matter, `ignore`
    those that do not; `bucket` makes nearby sizes share an entry; `layout=False` leaves strides out of the key.
    `reference` computes the right output, against which every candidate is checked before its time counts. `compile`
    prepares one configuration, and is called for several at once. `store` is where decisions are kept: None for the
    user's own book, a path as for `PersistentCache`, or False for memory only.

    >>> @tunable(space=[{"step": 1}, {"step": 2}], heuristic={"step": 1}, store=False)
    ... def total(n, *, config):
    ...     return sum(range(0, n, config.step)) * 0 + n
    >>> total(100)
    100
    >>> total(100, config={"step": 1})
    100
    """
    if function is None:
        return partial(tunable, policy=policy, tuner=tuner, store=store, on_event=on_event, **options)
    kernel = FunctionKernel(function, **options)
    persistent = _persistent(kernel.op_id, store)
    selector: ConfigSelectorChain[Any] = ConfigSelectorChain(
        ConfigCache(), policy, tuner or Tuner(), persistent, on_event=on_event
    )
    built: _Tunable[Any] = _Tunable(kernel, selector)
    kernel.attach(built.dispatcher.run, selector)
    announce_kernel(kernel)
    return built.function()


def _persistent(op_id: str, store: Any) -> PersistentCache[Any] | None:
    if store is False:
        return None
    return store if isinstance(store, PersistentCache) else PersistentCache(op_id, store)


def tune(
    function: Tunable[Any],
    /,
    *args: Any,
    budget: float | str | None = None,
    progress: Progress | bool | None = None,
    **kwargs: Any,
) -> Tuned[Any]:
    """Tune one call ahead of time, and return the measurements; what was measured before is not measured again.

    `budget` is seconds or a string such as "30s". `progress` is True or False, a function of `Step`, or None to show a
    bar if standard error is a terminal.
    """
    kernel = _kernel_of(function)
    arguments = kernel.arguments(args, kwargs)
    show = progress_for(progress, kernel.op_id)
    return kernel.selector.tune(kernel.invocation(arguments), kernel, budget=budget, on_step=show)


def _kernel_of(function: object) -> FunctionKernel:
    kernel = getattr(function, "kernel", None)
    if not isinstance(kernel, FunctionKernel):
        raise DefinitionError(f"{function!r} is not tunable; decorate it with @tunebook.tunable(space=...)")
    return kernel


class Outcome(NamedTuple):
    """What `tune_all` did with one recorded call: "tuned", "known", "failed" or "skipped", and why."""

    call: RecordedCall
    status: Literal["tuned", "known", "failed", "skipped"]
    detail: str
    tuned: Tuned[Any] | None = None


def tune_all(
    recording: Recording,
    *,
    selector: ConfigSelectorChain[Any] | None = None,
    budget: float | str | None = None,
    progress: Progress | bool | None = None,
    seed: int = 0,
) -> list[Outcome]:
    """Tune every call of a recording that is not known yet, the most expensive first, on made-up arrays.

    The budget is shared: what is left over by one call goes to the next. One that fails does not stop the others.
    `selector` is for kernels that were run by an `Executor`; tunable functions have their own.
    """
    left_s = parse_budget(budget)
    outcomes = []
    for call in recording:
        outcome = _tune_recorded(call, selector, left_s, progress, seed)
        outcomes.append(outcome)
        if left_s is not None and outcome.tuned is not None:
            left_s = max(left_s - outcome.tuned.seconds, 0.0)
    return outcomes


def _tune_recorded(
    call: RecordedCall,
    selector: ConfigSelectorChain[Any] | None,
    left_s: float | None,
    progress: Progress | bool | None,  # noqa: FBT001 - passed on as it came
    seed: int,
) -> Outcome:
    kernel = call.kernel
    if kernel is None:
        return Outcome(call, "skipped", f"{call.problem.op} is not defined in this process; import {call.module} first")
    selector = kernel.selector if isinstance(kernel, FunctionKernel) else selector
    if selector is None:
        return Outcome(call, "skipped", f"{call.problem.op} was run by an Executor; pass its selector to tune_all")
    known = selector.preview(Invocation(kernel.op_id, call.args, call.kwargs), kernel)
    if not isinstance(known, NoSelection) and known.event == "cache_hit":
        return Outcome(call, "known", known.source)
    if left_s is not None and left_s <= 0:
        return Outcome(call, "skipped", "the budget is spent")
    try:
        inv: Invocation[Any, Any] = Invocation(kernel.op_id, _concrete(call.args, seed), _concrete(call.kwargs, seed))
        tuned = selector.tune(inv, kernel, budget=left_s, on_step=progress_for(progress, kernel.op_id))
    except TunebookError as error:
        return Outcome(call, "failed", str(error))
    return Outcome(call, "tuned", f"{tuned.ran} measured", tuned)


def _concrete(value: Any, seed: int) -> Any:
    """Return a value with every array spec in it replaced by an array."""
    if isinstance(value, ArraySpec):
        return materialise(value, seed)
    if isinstance(value, (tuple, list)):
        parts = [_concrete(item, seed) for item in value]
        return type(value)(parts) if type(value) in (tuple, list) else type(value)(*parts)
    if isinstance(value, dict):
        return {key: _concrete(item, seed) for key, item in value.items()}
    return value
