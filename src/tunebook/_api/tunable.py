"""The everyday API: `@tunable`, `tune`, `tune_all`, `verify`."""

from __future__ import annotations

import inspect
from functools import partial, update_wrapper
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, Unpack, cast, overload

from tunebook._api.bound_method import TunableMethod, is_method
from tunebook._api.function_kernel import FunctionKernel, TunableOptions
from tunebook._api.option_checks import check_function, check_options
from tunebook._arrays.library import load_adapters
from tunebook._base.errors import (
    DefinitionError,
    TunebookError,
    TuningFailed,
    clean,
    did_you_mean,
    with_article,
)
from tunebook._base.vocabulary import MADE_UP
from tunebook._hotpath.dispatcher import Dispatcher, ProgramsLines
from tunebook._kernel.kernel import Kernel
from tunebook._kernel.measure import check_measure
from tunebook._keys.call_key import explain_difference, in_short
from tunebook._memo.answer_memo import ConfigCache
from tunebook._memo.context_stack import overlay_op
from tunebook._selection.invocation_registry import calls_in
from tunebook._selection.persistent_cache import open_persistent
from tunebook._selection.recording import how_to_give_values, make_up, observing, problem_here
from tunebook._selection.selector import ConfigSelectorChain, NoSelection, Selection
from tunebook._space.choice import Choice
from tunebook._tuning.job import Budget, Tuned, parse_budget
from tunebook._tuning.progress import progress_for, seconds_text

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from tunebook._api.explain import Explanation
    from tunebook._api.function_kernel import SpaceLike
    from tunebook._api.tunable_types import (
        Decorator,
        F,
        G,
        LooseTunable,
        MappingSpace,
        ObjectSpace,
        Tunable,
        TypedTunable,
    )
    from tunebook._base.vocabulary import Combine, Problem, StrategyLike
    from tunebook._kernel.kernel import Invocation
    from tunebook._kernel.measure import Measure
    from tunebook._memo.context_stack import Scope
    from tunebook._selection.recording import RecordedCall, Recording
    from tunebook._space.space import Config
    from tunebook._tuning.progress import Progress
    from tunebook._tuning.reverify import Verified

C = TypeVar("C")


def build(kernel: FunctionKernel, options: TunableOptions) -> Tunable[Any]:
    """Return the generated function with the name, the docstring and the signature of the author's function."""
    persistent = open_persistent(kernel.op_id, options.get("store"))
    policy, tuner, on_event = options.get("policy"), options.get("tuner"), options.get("on_event")
    selector = ConfigSelectorChain[Any](ConfigCache(), policy, tuner, persistent, on_event=on_event)

    def observe(problem: Problem, arguments: tuple[Any, ...]) -> Callable[[float], None]:
        return observing(problem, kernel, arguments)

    def problem(*args: Any, **kwargs: Any) -> Problem:
        return kernel.problem(kernel.call(args, kwargs))

    def explain(*args: Any, **kwargs: Any) -> Explanation:
        from tunebook._api.explain import explain_call  # noqa: PLC0415 - loaded late: 3 ms

        with ProgramsLines():
            return explain_call(selector, kernel.call(args, kwargs), kernel)

    def overlay(config: object = None, /, **values: Any) -> Scope:
        if (config is None) == (not values):
            raise DefinitionError("overlay takes one configuration: overlay(block_m=32, ...) or overlay(config)")
        with ProgramsLines():
            return overlay_op(kernel.op_id_v, kernel.overlay_cfg(values if config is None else config))

    dispatcher = Dispatcher(
        kernel.function, names=kernel.names, layout=kernel.layout,
        select=kernel.select, selector=selector, observe=observe, as_config=kernel.override_cfg, refuse=kernel.refuse,
    )  # fmt: skip
    kernel.runner, kernel.selector = dispatcher.run, selector

    def config_for(*args: Any, **kwargs: Any) -> Any:
        with ProgramsLines():
            arguments = kernel.call(args, kwargs).args
            config, exploration = dispatcher.choose(arguments)
            # A candidate that is tried in a call of the user's is measured there; anywhere else the usual one serves.
            return config if exploration is None else kernel.select(arguments, None, None).config

    signature = inspect.signature(kernel.function)
    given = signature.parameters.values()
    parameters = [p.replace(default=None, kind=p.KEYWORD_ONLY) if p.name == "config" else p for p in given]
    call = update_wrapper(dispatcher.function, kernel.function)
    # Attributes on a function: a class with `__call__` would make every tuned call half as slow again.
    call.__dict__.update(
        kernel=kernel, selector=selector, config_for=config_for, explain=explain, overlay=overlay, problem=problem,
        __signature__=signature.replace(parameters=sorted(parameters, key=lambda p: p.kind)),
    )  # fmt: skip
    return cast("Tunable[Any]", TunableMethod(call) if is_method(kernel.function, signature) else call)


@overload
def tunable(
    function: F, /, *, space: MappingSpace, name: str | None = None, **options: Unpack[TunableOptions]
) -> TypedTunable[F, Config]: ...
@overload
def tunable(
    function: F, /, *, space: ObjectSpace[C], name: str | None = None, **options: Unpack[TunableOptions]
) -> TypedTunable[F, C]: ...
@overload
def tunable(  # type: ignore[overload-cannot-match]  # it is matched: see `G`
    function: G, /, *, space: MappingSpace, name: str | None = None, **options: Unpack[TunableOptions]
) -> LooseTunable[G, Config]: ...
@overload
def tunable(  # type: ignore[overload-cannot-match]  # it is matched: see `G`
    function: G, /, *, space: ObjectSpace[C], name: str | None = None, **options: Unpack[TunableOptions]
) -> LooseTunable[G, C]: ...
@overload
def tunable(function: Choice, /, *, name: str, **options: Unpack[TunableOptions]) -> Tunable[Any, Config]: ...
@overload
def tunable(
    *, space: MappingSpace, name: str | None = None, **options: Unpack[TunableOptions]
) -> Decorator[Config]: ...
@overload
def tunable(*, space: ObjectSpace[C], name: str | None = None, **options: Unpack[TunableOptions]) -> Decorator[C]: ...
def tunable(
    function: Callable[..., Any] | Choice | None = None,
    /,
    *,
    space: SpaceLike | None = None,
    name: str | None = None,
    **options: Unpack[TunableOptions],
) -> Any:
    """Make a function that takes `config` choose it by itself, measured once and remembered.

    `space` is a `Space`, a list of configurations, or a function of the arguments that returns a list. `heuristic`
    is a configuration, or a function of the arguments that returns one. `name` and `version` identify the function in
    the book; by default the name is the place to import it from. `key` names the arguments that matter, `ignore` the
    arguments that do not; `bucket` makes nearby sizes share an entry, which is measured at the representative size of
    the bucket where arguments of that size can be made; with `representative=False`, at the size of the call that comes
    first. `layout=False` leaves strides out of the key.
    `store` is the place of the book: None for the user's own book, a path as for `PersistentCache`, or False for
    memory only. `policy` is an `AutotunePolicy`, or the name of its `cache_miss_fallback`, as "background"; `tuner` is
    a `Tuner`, or False to tune nothing; `on_event` is called with each event of a choice (see docs/events.md).

    The output of every candidate is checked before its time counts: against the output of `reference`, or else of the
    heuristic's configuration, or else of most candidates. `tolerance` is relative to the largest value: one number, or
    one per name of a dtype. `check="exact"` asks for equal bits, and False checks nothing. A function of the output and
    the expected output returns True if the output is right, and False or a text with the reason if it is wrong.
    `mutates` names arguments that runs write to; the others are compared with copies. `inputs` is a function of made-up
    arguments that returns valid ones, for tuning without a caller's: in a trace, from a recording, in the background,
    or by `tunebook verify`.

    `compile` prepares one configuration; several calls of it run at once while other candidates are measured. `prune`
    gets the candidates and the arguments, and returns the candidates worth a try. Of these the `keep` cheapest are
    tried, by `cost`, a function of a configuration and the arguments. `objective` is the quantity to minimise:
    "typical" (a mean of the faster half), "median", "mean", "p95", or a function of samples. `measure` is a `Measure`:
    cold or warm caches, arguments that take turns, graphs, the host's or the device's clock. `flops` and `bytes` are
    the work of a call, as numbers or functions of the arguments: near the `peak` of the device, tuning ends.

    `strategy` searches the candidates instead of racing them all: "auto", "guided", "local", "evolution", "random",
    "exhaustive", or a class from `tunebook.search`. A `Space` of more than 1000 is searched by "auto" anyway.

    >>> @tunable(space=[{"step": 1}, {"step": 2}], heuristic={"step": 1}, store=False)
    ... def total(n, *, config):
    ...     return sum(range(0, n, config.step)) * 0 + n
    >>> total(100)
    100
    >>> total(100, config={"step": 1})
    100
    """
    check_options({"name": name, **options}, ("space", "name", *TunableOptions.__annotations__))
    if function is None:
        return partial(tunable, space=space, name=name, **options)
    if not isinstance(function, Choice):
        check_function(function)
    # Here, and not in the middle of a call: jax makes its user contexts while nothing else goes on, or not safely.
    load_adapters()
    return build(FunctionKernel(function, space, name, options), options)


def tune(
    function: Tunable[Any, C],
    /,
    *args: Any,
    budget: Budget | float | str | None = None,
    progress: Progress | bool | None = None,
    strategy: StrategyLike | None = None,
    measure: Measure | None = None,
    again: bool = False,
    **kwargs: Any,
) -> Tuned[C]:
    """Tune one call ahead of time and return the measurements; earlier measurements are used again.

    `again=True` measures all candidates anew instead, also those that failed or left an earlier race. It repairs a
    choice that was made on a disturbed machine; but no disturbed race replaces an undisturbed one.

    `budget` is seconds, or a string: "30s", "200 trials". `progress` is True or False, a function of `Step`,
    or None to show a bar if standard error is a terminal. `strategy` and `measure` are as for `tunable`, for this
    call; `measure` goes before the policy's and the kernel's.
    """
    kernel, bound = _kernel_of(function)
    show = progress_for(progress, kernel.op_id)
    inv = _call_of(kernel, (*bound, *args), kwargs, tune)
    with ProgramsLines():
        return kernel.selector.tune(
            inv, kernel, budget=budget, on_step=show, strategy=strategy, measure=check_measure(measure), again=again
        )


def tune_together(
    function: Tunable[Any, C],
    calls: Iterable[tuple[Any, ...]],
    /,
    *,
    weights: Sequence[float] | None = None,
    combine: Combine = "mean",
    budget: Budget | float | str | None = None,
    progress: Progress | bool | None = None,
    again: bool = False,
) -> Tuned[C]:
    """Find the configuration with the least time over several calls, and use it for each of them.

    `weights` weigh the calls, for example by how often each happens. A call is a tuple of positional arguments. For
    shapes that change all the time, or where switching configurations costs something.

    `combine` says which time is to be small: the weighted "mean" or geometric mean ("geomean") of the calls' times, the
    weighted mean of their times "relative" to the best time of each call, or the largest of these ("max", without
    weights). For the last two, each call is tuned alone first; measurements in the book are reused, unless `again`.
    """
    kernel, bound = _kernel_of(function)
    invs = [kernel.call((*bound, *args), {}) for args in calls]
    show = progress_for(progress, kernel.op_id)
    with ProgramsLines():
        return kernel.selector.tune_together(
            invs, kernel, weights, combine=combine, budget=budget, on_step=show, again=again
        )


def verify(
    function: Tunable[Any, C],
    /,
    *args: Any,
    budget: Budget | float | str | None = None,
    progress: Progress | bool | None = None,
    **kwargs: Any,
) -> Verified[C]:
    """Measure again only the candidates that could win a call, and keep its choice if it still wins or ties.

    If it does not, or the call has no choice yet, the call is tuned as by `tune`. After an update of a driver or a
    library this happens by itself, at the first call.
    """
    kernel, bound = _kernel_of(function)
    show = progress_for(progress, kernel.op_id)
    inv = _call_of(kernel, (*bound, *args), kwargs, verify)
    with ProgramsLines():
        return kernel.selector.verify(inv, kernel, budget=budget, on_step=show)


def _kernel_of(function: Any) -> tuple[FunctionKernel, tuple[object, ...]]:
    """Return the kernel of a tunable function, and the object that it is bound to, if it is a method of one."""
    kernel = getattr(function, "kernel", None)
    if not isinstance(kernel, FunctionKernel):
        remedy = "is not tunable; decorate it with @tunebook.tunable(space=...)"
        if isinstance(function, Kernel):
            remedy = "is a Kernel, which the selector of its Executor tunes: selector.tune(invocation, kernel)"
        elif callable(getattr(function, "tune", None)):
            remedy = "has methods of its own for this, as .tune(...)"
        raise DefinitionError(f"{function!r} {remedy}")
    return kernel, (function.__self__,) if hasattr(function, "__self__") else ()


def _call_of(
    kernel: FunctionKernel, args: tuple[Any, ...], kwargs: Mapping[str, Any], verb: Callable[..., object]
) -> Invocation[Any, Any]:
    """Return a call of a kernel; a name that neither it nor the verb has is an error that names the nearest one."""
    try:
        return kernel.call(args, kwargs)
    except TypeError:
        for name in kwargs:
            if name not in kernel.parameters:
                given = inspect.signature(verb).parameters.values()
                options = [each.name for each in given if each.kind is each.KEYWORD_ONLY]
                known = did_you_mean("argument", name, [*kernel.parameters, *options])
                raise TypeError(f"tunebook.{verb.__name__}({kernel.op_id}, ...): {known}") from None
        raise


class Outcome(NamedTuple):
    """The result of `tune_all` for one recorded call: "tuned", "known", "failed" or "skipped", and the reason.

    `config` is the configuration that the call has now, if it is tuned or known.
    """

    call: RecordedCall
    status: Literal["tuned", "known", "failed", "skipped"]
    detail: str
    tuned: Tuned[Any] | None = None
    config: Any = None

    def __repr__(self) -> str:
        # The fields hold the kernel, the arguments and every sample: 600 characters and more.
        verdict = None if self.tuned is None else self.tuned.verdict
        time = "" if verdict is None else f", {seconds_text(verdict.winner.value_s)}"
        config = "" if self.config is None else f" {self.config!r}{time}"
        call = f"{self.call.problem.op} {in_short(self.call.problem.call_key)}"
        return clean(f"<Outcome {call}: {self.status}{config}; {self.detail.partition(chr(10))[0]}>")


def tune_all(
    recording: Recording
    | str
    | os.PathLike[str]
    | Mapping[str, Mapping[str, tuple[Any, tuple[Any, ...], Mapping[str, Any]]]],
    *,
    selector: ConfigSelectorChain[Any] | None = None,
    budget: Budget | float | str | None = None,
    progress: Progress | bool | None = None,
    seed: int = 0,
    again: bool = False,
) -> list[Outcome]:
    """Tune every call of a recording that is not known yet, the most expensive first, on made-up arrays.

    `again=True` tunes the known calls too, and measures all candidates anew. A choice that was made on a program's own
    arguments stays: `tune(..., again=True)` in the program replaces it.

    `recording` may also be the path of a saved one, or the result of `get_invocations`. All calls share the budget: the
    rest of a call goes to the next. A call that fails does not stop the others. `selector` is for kernels that an
    `Executor` ran in another process; in this one the selector is known, and tunable functions have their own.
    """
    left = parse_budget(budget)
    outcomes = []
    for call in calls_in(recording):
        outcome = tune_recorded(call, selector, left, progress, seed, again=again)
        outcomes.append(outcome)
        if outcome.tuned is not None:
            left = left.less(outcome.tuned)
    return outcomes


def tune_recorded(
    call: RecordedCall,
    selector: ConfigSelectorChain[Any] | None,
    left: Budget,
    progress: Progress | bool | None = None,  # noqa: FBT001 - passed on unchanged
    seed: int = 0,
    *,
    again: bool = False,
) -> Outcome:
    """Tune one recorded call within the budget `left`, unless the call is known, or `again` if it is."""
    kernel = call.kernel
    if not isinstance(kernel, Kernel):
        reason = f"was noted with {with_article(type(kernel).__name__)}, not with a Kernel"
        reason = f"is not defined in this process; import {call.module} first" if kernel is None else reason
        return Outcome(call, "skipped", f"{call.problem.op} {reason}")
    selector = getattr(kernel, "selector", None) or selector or call.selector
    if not isinstance(selector, ConfigSelectorChain):
        return Outcome(call, "skipped", f"{call.problem.op} was run by an Executor; pass its selector to tune_all")
    try:
        inv = call.invocation(kernel)
        known = _known_by(selector, inv, kernel, _same_problem(call, kernel, inv), again=again)
        if known is None and left.is_spent:
            return Outcome(call, "skipped", "the budget is spent")
        if known is None:
            inv = make_up(kernel, inv, seed)
            # Asked again: the description of an array need not hold its device and driver, and the array does.
            known = _known_by(selector, inv, kernel, kernel.problem(inv), again=again)
        if known is not None:
            there = "; tunebook.tune(..., again=True) in the program measures its candidates anew" if again else ""
            return Outcome(call, "known", f"{known.source}{there}", config=known.config)
        tuned = selector.tune(inv, kernel, budget=left, on_step=progress_for(progress, kernel.op_id), again=again)
    except TunebookError as error:
        return Outcome(call, "failed", _reason(error, kernel))
    detail = "; ".join(filter(None, (tuned.tally, tuned.stands)))
    return Outcome(call, "tuned", detail, tuned, tuned.config)


def _same_problem(call: RecordedCall, kernel: Kernel[Any, Any], inv: Invocation[Any, Any]) -> Problem:
    """Return the problem of a recorded call here; `DefinitionError` if its program would not find it any more."""
    problem = problem_here(kernel, inv)
    if call.finder and problem.call_key != call.problem.call_key:
        changed = "; ".join(explain_difference(call.problem.call_key, problem.call_key))
        raise DefinitionError(
            f"{call.problem.op} has another key than when it was recorded ({changed}). Record it again: its key= or "
            "its arguments have changed"
        )
    return problem


def _reason(error: TunebookError, kernel: Kernel[Any, Any]) -> str:
    """Return why a recorded call could not be tuned; the first line says it all."""
    if not isinstance(error, TuningFailed):
        return str(error)
    made_up = MADE_UP[error.measurements[0].values_from] if error.on_made_up else ""
    hint = f" (on {made_up}). {how_to_give_values(kernel)}" if made_up else ""
    return f"{error.summary}{hint}\n{error}"


def _known_by(
    selector: ConfigSelectorChain[Any], inv: Invocation[Any, Any], kernel: Kernel[Any, Any], problem: Problem,
    *, again: bool,
) -> Selection[Any] | None:  # fmt: skip
    """Return the known answer to a call; None without one, if a budget cut its tuning short, or to tune it `again`."""
    known = selector.preview(inv, kernel, problem)
    if isinstance(known, NoSelection) or known.event != "cache_hit":
        return None
    if known.trust is not None and selector.policy.reverify != "never":
        return None
    record = None if selector.persistent is None else selector.persistent.read(problem)
    facts = {} if record is None else record.body.provenance
    # A tuning on a caller's arguments can be neither finished nor replaced on made-up ones.
    made_up = facts.get("values_from", "call") != "call"
    return None if made_up and (again or facts.get("complete") is False) else known
