"""From a call to the tuning job for it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from tunebook._arrays.describe import is_traced, libraries_of, timer_for
from tunebook._base.errors import DefinitionError, NoGradient, TunebookError, TuningFailed, hide_own_frames
from tunebook._base.record_format import blake2b
from tunebook._kernel.measure import Measure
from tunebook._measure.argument_restore import refuse_iterators
from tunebook._measure.stopwatch import Attempt, combined_s
from tunebook._memo.context_stack import Scope, scoped
from tunebook._space.space import Space
from tunebook._space.written_config import as_config
from tunebook._statistics.decide import objective_for
from tunebook._tuning.job import Conditions, Goal, Job, Order, Part, Setup, Timing
from tunebook._tuning.measuring import measure_for, timing_for

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tunebook._arrays.library import TuningSite
    from tunebook._base.vocabulary import Combine, Problem, StrategyLike, ValuesFrom
    from tunebook._kernel.kernel import Invocation, Kernel
    from tunebook._kernel.policy import AutotunePolicy
    from tunebook._tuning.job import Budget, Call, History, Step, Tuned
    from tunebook.search._by_name import Search

C = TypeVar("C")
R = TypeVar("R")

# A space with more configurations than this is searched, and TRIALS of them are tried unless a budget says otherwise.
# A race of 480 Triton kernels takes half a minute; a search is within 1 % of the best after a few hundred of 10,000.
RACED_WHOLE: Final = 1000
TRIALS: Final = 300
_SEARCHED_IN_CALLS: Final = 64
REFERENCE: Final = "the reference"  # as `by_author` names it
REFERENCE_FAILED: Final = f"{REFERENCE} failed"
TOGETHER: Final = "/together="  # in the policy of measurements: times of several problems


class _ForwardOnly:
    """Marks that backward passes are not measured."""

    def content(self) -> str:
        return "forward only"  # all of these blocks are alike


class forward_autotune_only(Scope):  # noqa: N801 - it is used like a function
    """Measure forward passes only inside a with-block, also if `validate_backward` is set."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(_ForwardOnly())


def is_forward_only() -> bool:
    """Whether this thread or task is inside a block of `forward_autotune_only`."""
    return any(scoped(_ForwardOnly))


def job_for(
    call: Call[C],
    policy: AutotunePolicy,
    history: History,
    budget: Budget,
    on_step: Callable[[Step], None] | None,
    site: TuningSite | None = None,
) -> Job[C]:
    """Return the job that tunes a call, given its history; `site` is the place of its runs, if it is not here."""
    kernel = call.kernel
    values_from = values_for(call)
    if site is not None and site.with_inputs is not None and call.inv.values_from == "call":
        made = by_author("the function that makes inputs", kernel.make_inputs, site.inv)
        values_from = "random" if made is None else "inputs"
        site = site if made is None else site.with_inputs(*made)
    if site is not None:
        call = replace(call, inv=replace(site.inv, values_from=values_from))
    job = outline(call, policy, history)
    timing, inv = job.setup.timing, call.inv
    if site is not None and timing.inputs > 1 and site.rotating is not None:
        site = site.rotating(timing.inputs)
        timing, inv = timing._replace(inputs=1), site.inv
    forward = job.conditions.mode == "forward"
    if site is not None and policy.validate_backward and not is_forward_only():
        bind = partial(site.bind, kernel, inv)
        forward = not job.candidates or not site.differentiable(bind, job.candidates[0])
        if forward and not kernel.measures_without_gradient():
            error = DefinitionError("the candidates have no gradient to measure")
            raise NoGradient("no gradient", [error])
    refuse_iterators((inv.args, inv.kwargs))  # before the reference uses one up
    check = by_author(REFERENCE, kernel.checker, inv) if forward else None
    isolate = policy.isolate == "always"
    if policy.isolate == "auto":  # numpy only: a fork would wait for ever for the locks of a framework's threads
        isolate = kernel.compiles and inv.platform == "cpu" and libraries_of((inv.args, inv.kwargs)) <= {"numpy"}
    job = job._replace(
        parts=[job.parts[0]._replace(check=check, mutated=kernel.mutated(inv), copies=timing.inputs)],
        setup=job.setup._replace(
            compile=partial(kernel.compile_cfg, inv) if kernel.compiles else None,
            platform=inv.platform,
            timer=job.setup.timer or timer_for((inv.args, inv.kwargs)),
            isolate=isolate,
            timeout_s=policy.candidate_timeout_s,
        ),
        goal=Goal(
            objective=objective_for(kernel.objective),
            enough_s=kernel.enough_s(inv) if forward else 0.0,
            compare=kernel.comparison(inv) if kernel.checks and forward else None,
            roofline=kernel.roofline(inv) if forward else None,
        ),
        budget=budget,
        on_step=on_step,
    )
    return job if site is None else _at_site(job, site, kernel, forward=forward)


def by_author(what: str, function: Callable[..., R], *args: Any) -> R:
    """Call a function of the kernel's author, whose error ends the tuning and not the call: `TuningFailed`.

    An invalid definition is an error of the call too.
    """
    with Attempt() as attempt:
        return function(*args)
    error = cast("Exception", attempt.trial.error)
    raise error if isinstance(error, DefinitionError) else TuningFailed(f"{what} failed", [error])


def values_for(call: Call[Any]) -> ValuesFrom:
    """Return where the values of the arguments are from when a call is tuned: a call in a trace has none."""
    inv = call.inv
    if inv.values_from != "call" or not is_traced(inv):
        return inv.values_from
    return "inputs" if call.kernel.makes_inputs else "random"


def _at_site(job: Job[C], site: TuningSite, kernel: Kernel[C, Any], *, forward: bool) -> Job[C]:
    make_fn, compile_one = site.programs(partial(site.bind, kernel, site.inv), not forward)
    (part,) = job.parts
    check = part.check
    part = Part(
        make_fn,
        site.args,
        site.kwargs,
        check=None if check is None else lambda output: check(site.one_of(output)),
        mutated=part.mutated,
        copies=part.copies,
    )
    return job._replace(
        parts=[part],
        conditions=job.conditions._replace(mode="forward" if forward else site.passes),
        # Never in a fork, as above.
        setup=job.setup._replace(compile=compile_one or job.setup.compile, isolate=False),
    )


def together(
    problems: Sequence[Problem], jobs: Sequence[Job[C]], weights: Sequence[float], combine: Combine = "mean"
) -> Job[C]:
    """Return the job that finds one configuration for several problems, by their combined times."""
    first = jobs[0]
    share = [weight / math.fsum(weights) for weight in weights]
    bounds = [job.goal.enough_s for job in jobs]
    texts = [f"{part:.6g} {problem.call_key}" for problem, part in zip(problems, share, strict=True)]
    texts += [] if combine == "mean" else [combine]
    compilers = [job.setup.compile for job in jobs if job.setup.compile]

    def compile_for_all(config: C) -> object:
        made = [compile_one(config) for compile_one in compilers]
        return made[0] if all(product == made[0] for product in made) else None

    made_up: ValuesFrom = next(
        (job.conditions.values_from for job in jobs if job.conditions.values_from != "call"), "call"
    )
    # Times of several problems never compare with a single problem's, so the mode, a part of the policy, differs.
    mode = f"{first.conditions.mode}{TOGETHER}{blake2b(';'.join(texts).encode(), digest_size=8).hexdigest()}"
    return first._replace(
        parts=[job.parts[0]._replace(weight=weight) for job, weight in zip(jobs, weights, strict=True)],
        conditions=first.conditions._replace(
            mode=mode, values_from=made_up, at=";".join(filter(None, (job.conditions.at for job in jobs)))
        ),
        setup=first.setup._replace(compile=compile_for_all if first.setup.compile else None),
        goal=first.goal._replace(
            roofline=None,
            combine=combine,
            enough_s=combined_s(combine, bounds, share) if all(bounds) else 0.0,
        ),
    )


def search_for(kernel: Kernel[C, Any], inv: Invocation[C, Any], strategy: StrategyLike | None) -> Search | None:
    """Return the search over the candidates of a call; None if they are few enough to race all of them."""
    asked = strategy or kernel.strategy
    # Only the kernel knows the values of candidates that are not mappings, as Triton's.
    search_cfgs: Callable[..., Search | None] = getattr(kernel, "search_cfgs", lambda _inv, _asked: None)
    own = search_cfgs(inv, asked)
    if own is not None:
        return own
    candidates = kernel.candidates(inv)
    if asked is None and not (isinstance(candidates, Space) and candidates.size > RACED_WHOLE):
        return None  # without a look at the candidates, which may be a generator
    from tunebook.search._by_name import Search, listed  # noqa: PLC0415 - loaded late: for big spaces only

    whole = isinstance(candidates, Space) and not kernel.prunes
    space = candidates if whole else listed(candidates_to_try(kernel, inv))
    if isinstance(space, Space) and isinstance(candidates, Space):
        space = space.at_launch(*candidates.launch_axes)
    if not isinstance(space, Space) or (asked is None and len(space) <= RACED_WHOLE):
        return None
    return Search(space, asked or "auto", min(TRIALS, len(space)))


def outline(call: Call[C], policy: AutotunePolicy, history: History) -> Job[C]:
    """Return the part of a job that tells which candidates would run, without the reference, which may be slow."""
    kernel, inv = call.kernel, call.inv
    backward = policy.validate_backward and not is_forward_only() and kernel.has_backward(inv)
    search = search_for(kernel, inv, call.strategy)
    space = kernel.candidates(inv)
    order = Order(partial(kernel.cfg_group, inv), partial(kernel.cfg_priority, inv))
    mode = "forward+backward" if backward else "forward"
    if search is None:
        candidates = candidates_to_try(kernel, inv)
    else:  # the measured configurations of its space, or else the first one
        known = (search.space.decoded(m.config) for m in history.measurements)
        decoded = list(dict.fromkeys(c for c in known if c is not None)) or list(islice(search.space, 1))
        candidates = cast("list[C]", decoded)
    timer, timing = None, Timing()
    if any(given is not None for given in (call.measure, policy.measure, kernel.measure)):
        measure = measure_for(call, policy)
        if measure != Measure() and not kernel.measures_by_itself:
            timer, timing = timing_for(measure, (inv.args, inv.kwargs))
    return Job(
        parts=[Part(lambda config: kernel.bind(inv, config, backward=backward), inv.args, inv.kwargs)],
        candidates=candidates,
        heuristic=kernel.baseline(inv),
        search=search,
        history=history,
        conditions=Conditions(
            kernel.code_checksum,
            kernel.environment(inv),
            mode,
            values_for(call),
            kernel.own_sizes(inv),
            checked_by=lambda: kernel.check_checksum,
        ),
        setup=Setup(
            order=order,
            launch_axes=space.launch_axes if isinstance(space, Space) else frozenset(),
            timer=timer,
            timing=timing,
        ),
    )


def candidates_to_try(kernel: Kernel[C, Any], inv: Invocation[C, Any]) -> list[C]:
    """Return the candidates that the author's hook leaves; raise `TuningFailed` if it leaves none."""
    candidates = list(kernel.candidates(inv))
    left = left_by(f"prune_cfgs of {kernel.op_id!r}", "inv, cfgs", kernel.prune_cfgs, candidates, inv, candidates)
    if candidates and not left:
        error = DefinitionError("let prune keep at least one")
        raise TuningFailed(f"{kernel.op_id}: prune left none of {len(candidates)} candidates", [error])
    return left


def left_by(what: str, takes: str, prune: Callable[..., Any], candidates: list[C], *args: Any) -> list[C]:
    """Return the candidates that a function of the author leaves; `DefinitionError` if it returns anything else."""
    given: object = asked_of(what, takes, prune, *args)
    if given is candidates:
        return candidates
    known = {id(config) for config in candidates}
    how = "return the candidates to try, as [config for config in configs if ...]"
    if not isinstance(given, Iterable):
        raise DefinitionError(f"{what} returned {given!r:.200}; {how}")
    left: list[Any] = asked_of(what, takes, list, given)  # it may be a generator
    for place, config in enumerate(left):
        if id(config) not in known:  # a copy, unless it is wrong
            if (own := as_config(config)) not in candidates:
                raise DefinitionError(f"{what} returned {config!r:.200}, which is not one of the candidates; {how}")
            left[place] = candidates[candidates.index(own)]
    return left


def asked_of(what: str, takes: str, function: Callable[..., R], *args: Any) -> R:
    """Call a function of the author; an error of it becomes a `DefinitionError` that says how it is called."""
    with Attempt() as attempt:
        return function(*args)
    error = cast("Exception", attempt.trial.error)
    if isinstance(error, TunebookError):
        raise error
    said = f"{what} raised {type(error).__name__}: {error}; it is called with ({takes})"
    raise DefinitionError(said) from hide_own_frames(error)


def is_without_data(call: Call[Any], error: Exception | None) -> bool:
    """Whether a failure was met on made-up arguments, and a call has its caller's."""
    return isinstance(error, TuningFailed) and error.on_made_up and values_for(call) == "call"


def best_s(tuned: Tuned[Any]) -> float:
    """Return the best time of a problem that was tuned alone."""
    best_s = tuned.ranking[0][1] if tuned.ranking else 0.0
    if not 0.0 < best_s < math.inf:
        raise DefinitionError(f'combine="max" and "relative" need a positive time for each call, not {best_s!r}')
    return best_s


def first_group(kernel: Kernel[C, Any], inv: Invocation[C, Any], strategy: StrategyLike | None) -> list[C]:
    """Return the candidates to try in calls: a later group is for when nothing before it is valid.

    Of a space too big to race, calls try as many as a strategy that knows nothing proposes at first.
    """
    search = search_for(kernel, inv, strategy)
    candidates = candidates_to_try(kernel, inv) if search is None else search.first(_SEARCHED_IN_CALLS)
    first = min((kernel.cfg_group(inv, config) for config in candidates), default=0)
    return [config for config in candidates if kernel.cfg_group(inv, config) == first]
