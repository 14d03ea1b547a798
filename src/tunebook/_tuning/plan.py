"""From a call to the tuning job for it."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, TypeVar

from tunebook._arrays.describe import libraries_of
from tunebook._arrays.operations import timer_for
from tunebook._base.errors import DefinitionError, TuningFailed
from tunebook._base.record_format import blake2b
from tunebook._memo.context_stack import Scope, scoped
from tunebook._space.space import Space
from tunebook._statistics.decide import objective_for
from tunebook._tuning.job import Job, Order

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tunebook._arrays.framework import TuningSite
    from tunebook._base.vocabulary import Problem, StrategyLike
    from tunebook._kernel.kernel import Invocation, Kernel
    from tunebook._kernel.policy import AutotunePolicy
    from tunebook._tuning.job import Budget, Call, History, Step
    from tunebook.search._by_name import Search

C = TypeVar("C")

# A space with more configurations than this is searched, and up to so many are tried unless a budget says otherwise.
# A race of 480 Triton kernels takes half a minute; a search is within 1 % of the best after a few hundred of 10,000.
RACED_WHOLE: Final = 1000
TRIALS: Final = 300


class _ForwardOnly:
    """Marks that backward passes are not measured."""

    def content(self) -> str:
        """Return what is equal for all of them."""
        return "forward only"


def forward_autotune_only() -> Scope:
    """Measure forward passes only inside a with-block, whatever `validate_backward` says."""
    return Scope(_ForwardOnly())


def is_forward_only() -> bool:
    """Whether this thread or task is inside such a block."""
    return any(scoped(_ForwardOnly))


def job_for(
    call: Call[C],
    policy: AutotunePolicy,
    history: History,
    budget: Budget,
    on_step: Callable[[Step], None] | None,
    stage: TuningSite | None = None,
) -> Job[C]:
    """Return what has to be measured to tune a call, given what is known; `stage` is where, if that is not here."""
    stage = _with_inputs(stage, call.kernel)
    call = call if stage is None else replace(call, inv=stage.inv)
    kernel, inv = call.kernel, call.inv
    job = outline(call, policy, history)
    forward = job.mode == "forward"
    if stage is not None and policy.validate_backward and not is_forward_only():
        forward = not job.candidates or not stage.differentiable(stage.bind(kernel, inv, job.candidates[0]))
    job = job._replace(
        platform=inv.platform,
        compile=partial(kernel.compile_cfg, inv) if kernel.compiles else None,
        check=kernel.checker(inv) if forward else None,
        compare=kernel.compare if kernel.checks and forward else None,
        mutated=kernel.mutated(inv),
        timer=timer_for((inv.args, inv.kwargs)),
        isolate=_isolates(policy, kernel, inv),
        timeout_s=policy.candidate_timeout_s,
        budget=budget,
        objective=objective_for(kernel.objective),
        enough_s=kernel.enough_s(inv) if forward else 0.0,
        roofline=kernel.roofline(inv) if forward else None,
        on_step=on_step,
    )
    return job if stage is None else _on_stage(job, stage, kernel, forward=forward)


def _with_inputs(stage: TuningSite | None, kernel: Kernel[Any, Any]) -> TuningSite | None:
    if stage is None or stage.with_inputs is None:
        return stage
    made = kernel.make_inputs(stage.inv)
    return stage if made is None else stage.with_inputs(*made)


def _on_stage(job: Job[C], stage: TuningSite, kernel: Kernel[C, Any], *, forward: bool) -> Job[C]:
    make_fn, compile_one = stage.programs(partial(stage.bind, kernel, stage.inv), not forward)
    check = job.check
    return job._replace(
        make_fn=make_fn,
        args=stage.args,
        kwargs=stage.kwargs,
        mode="forward" if forward else stage.passes,
        compile=compile_one or job.compile,
        check=None if check is None else lambda output: check(stage.one_of(output)),
        mutated=job.mutated if stage.in_place else (),
        isolate=False,  # a fork of a process with a framework's threads in it would wait for their locks for ever
    )


def together(problems: Sequence[Problem], jobs: Sequence[Job[C]], weights: Sequence[float]) -> Job[C]:
    """Return the job that finds one configuration for several problems, by the weighted mean of their times."""
    first, *rest = (job._replace(weight=weight) for job, weight in zip(jobs, weights, strict=True))
    share = [weight / math.fsum(weights) for weight in weights]
    bounds = [job.enough_s for job in jobs]
    parts = [f"{part:.6g} {problem.call_key}" for problem, part in zip(problems, share, strict=True)]
    return first._replace(
        others=[part for job in rest for part in job.parts],
        # Times of several problems are no times of one: the policy says so, and they are never compared.
        mode=f"{first.mode}/together={blake2b(';'.join(parts).encode(), digest_size=8).hexdigest()}",
        compile=None if first.compile is None else partial(_compile_for_all, [j.compile for j in jobs if j.compile]),
        roofline=None,
        enough_s=math.fsum(s * bound for s, bound in zip(share, bounds, strict=True)) if all(bounds) else 0.0,
    )


def _compile_for_all(compilers: Sequence[Callable[[C], object]], config: C) -> object:
    made = [compile_one(config) for compile_one in compilers]
    return made[0] if all(thing == made[0] for thing in made) else None


def search_for(kernel: Kernel[C, Any], inv: Invocation[C, Any], strategy: StrategyLike | None) -> Search | None:
    """Return how the candidates of a call are searched; None if they are few enough to be raced whole."""
    asked = strategy or kernel.strategy
    candidates = kernel.candidates(inv)
    if asked is None and not (isinstance(candidates, Space) and candidates.size > RACED_WHOLE):
        return None  # without a look at the candidates, which may be a generator
    from tunebook.search._by_name import Search, listed  # noqa: PLC0415 - only big spaces need it

    whole = isinstance(candidates, Space) and not kernel.prunes
    space = candidates if whole else listed(candidates_to_try(kernel, inv))
    if isinstance(space, Space) and isinstance(candidates, Space):
        space = space.at_launch(*candidates.launch_axes)
    if not isinstance(space, Space) or (asked is None and len(space) <= RACED_WHOLE):
        return None
    return Search(space, asked or "auto", min(TRIALS, len(space)))


def outline(call: Call[C], policy: AutotunePolicy, history: History) -> Job[C]:
    """Return as much of a job as tells what would have to run; the kernel's reference, which may be slow, does not."""
    kernel, inv = call.kernel, call.inv
    backward = policy.validate_backward and not is_forward_only() and kernel.has_backward(inv)
    search = search_for(kernel, inv, call.strategy)
    space = kernel.candidates(inv)
    return Job(
        make_fn=lambda config: kernel.bind(inv, config, backward=backward),
        args=inv.args,
        kwargs=inv.kwargs,
        candidates=candidates_to_try(kernel, inv) if search is None else _known_in(search, history),
        search=search,
        launch_axes=space.launch_axes if isinstance(space, Space) else frozenset(),
        heuristic=kernel.heuristic(inv),
        incumbent=history.winner,
        known=history.measurements,
        unfinished=not history.complete,
        code=kernel.code_checksum,
        environment=kernel.environment(inv),
        mode="forward+backward" if backward else "forward",
        order=Order(partial(kernel.cfg_group, inv), partial(kernel.cfg_priority, inv)),
    )


def _known_in(search: Search, history: History) -> list[Any]:
    """Return the configurations of a space that were measured before; any one if there are none."""
    known = (search.space.decoded(m.config) for m in history.measurements)
    return list(dict.fromkeys(c for c in known if c is not None)) or list(islice(search.space, 1))


def candidates_to_try(kernel: Kernel[C, Any], inv: Invocation[C, Any]) -> list[C]:
    """Return the candidates that the author's hook leaves; `TuningFailed` if that is none."""
    candidates = list(kernel.candidates(inv))
    left = list(kernel.prune_cfgs(inv, candidates))
    if candidates and not left:
        error = DefinitionError("let prune keep at least one")
        raise TuningFailed(f"prune left none of {len(candidates)} candidates", [error])
    return left


def _isolates(policy: AutotunePolicy, kernel: Kernel[Any, Any], inv: Invocation[Any, Any]) -> bool:
    if policy.isolate == "auto":
        # A fork of a process with a framework's threads in it would wait for their locks for ever.
        return kernel.compiles and inv.platform == "cpu" and libraries_of((inv.args, inv.kwargs)) <= {"numpy"}
    return policy.isolate == "always"
