"""Tunes the launches of an `Autotuner`: of ours, or of any other library's.

An engine is built at the first launch, because a library decorates hundreds of kernels and launches few of them.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeVar, cast

from triton import TritonError, knobs

from tunebook._api.explain import Explanation, explain_call
from tunebook._base.config_codec import fingerprint
from tunebook._base.errors import CompileError, DefinitionError, NoConfig, TuningFailed, warn_once
from tunebook._base.locks import InterruptSafeLock
from tunebook._hotpath.dispatcher import Dispatcher
from tunebook._keys.buckets import Buckets, unknown_name
from tunebook._memo.answer_memo import CAPACITY, BoundedDict, ConfigCache
from tunebook._memo.context_stack import Scope, find_overlay, overlay_op
from tunebook._selection.persistent_cache import PersistentCache, open_persistent
from tunebook._selection.recording import observing
from tunebook._selection.selector import ConfigSelectorChain, Selection, policy_override
from tunebook._statistics.race import typical_s
from tunebook._tuning.job import Budget, Tuned, parse_budget
from tunebook._tuning.progress import Progress, progress_for
from tunebook.adapters._triton import key_ahead
from tunebook.adapters._triton.attributes import (
    ENGINE,
    LAUNCHER,
    MORE,
    Stored,
    Watched,
    WatchedCache,
    state_without_engine,
)
from tunebook.adapters._triton.buckets import fact_readers, kernel_buckets
from tunebook.adapters._triton.candidate import Launch, LaunchConfig, LiveConfig
from tunebook.adapters._triton.device import current_device, interface
from tunebook.adapters._triton.kernel import TritonKernel
from tunebook.adapters._triton.launch_recorder import LaunchRecorder
from tunebook.adapters._triton.launcher import Launcher
from tunebook.adapters._triton.tuner import DeviceTuner, replays

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import triton
    from triton.runtime.autotuner import Autotuner

    from tunebook._base.vocabulary import Problem, StrategyLike
    from tunebook._kernel.kernel import Invocation
    from tunebook._kernel.measure import Measure
    from tunebook._kernel.policy import AutotunePolicy
    from tunebook.adapters._triton.check import OutputCheck

    Store = str | os.PathLike[str] | PersistentCache[Any] | Literal[False] | None

_building: Final = InterruptSafeLock()  # re-entrant: building loads code of other libraries, which may launch


class _CurrentLauncher:
    """The launcher for `kernel[grid]`. Once it is in the instance, no launch asks this descriptor."""

    def __get__(self, autotuner: Autotuner | None, owner: type) -> Any:
        if autotuner is None:
            return self
        return vars(autotuner).setdefault(LAUNCHER, engine_of(autotuner).launcher())


# Attributes for a class of autotuners: set by `watched`, or by hand on a class that is not ours.
WATCHED: Final[dict[str, Any]] = {
    "cache": Watched("cache", WatchedCache),
    "configs": Watched("configs", mutable=True),
    "keys": Watched("keys", baked_in=True),
    "fn": Watched("fn", baked_in=True),
    "configs_timings": Stored("configs_timings"),
    "bench_time": Stored("bench_time"),
    LAUNCHER: _CurrentLauncher(),
    "__getstate__": state_without_engine,
}
T = TypeVar("T", bound=type)


def watched(kind: T) -> T:
    """Let a class of autotuners notice when a program writes to its attributes, or copies it."""
    for name, attribute in WATCHED.items():
        setattr(kind, name, attribute)
    return kind


class More(NamedTuple):
    """The arguments of `autotune` that `triton.autotune` does not take."""

    store: Store = None
    policy: AutotunePolicy | None = None
    heuristic: triton.Config | Callable[..., triton.Config] | Literal["first"] | None = None  # "first": candidate
    version: str = "0"
    processes: bool = True
    devices: Sequence[int] | Literal["all"] = ()
    worker_setup: str = ""
    bucket: Mapping[str, object] | None = None  # of arguments that are not in the key of this kernel too
    output_check: OutputCheck | None = None
    search: StrategyLike = "auto"
    on_event: Callable[..., None] | None = None
    representative: bool = True
    thorough: bool = False
    measure: Measure | None = None


def engine_of(autotuner: Autotuner, more: More | None = None) -> Engine:
    """Return the engine of an autotuner; the first call builds it, with the options `more`, and keeps the options."""
    engine: Engine | None = vars(autotuner).get(ENGINE)
    if engine is None or engine.autotuner is not autotuner:  # a copy of an autotuner has the engine of the original
        with _building:
            engine = vars(autotuner).get(ENGINE)
            if engine is None or engine.autotuner is not autotuner:
                setattr(autotuner, MORE, more or vars(autotuner).get(MORE) or More())
                engine = Engine(autotuner, vars(autotuner)[MORE])
                setattr(autotuner, ENGINE, engine)
    return engine


def drop_engine(autotuner: Autotuner) -> None:
    """Take the engine off an autotuner, with all that goes with it."""
    for name in (ENGINE, LAUNCHER, MORE):
        vars(autotuner).pop(name, None)


class Engine:
    """Tunes and launches for one autotuner. `launcher().bind(grid)` returns the function that launches."""

    def __init__(self, autotuner: Autotuner, more: More) -> None:
        self.autotuner: Final = autotuner
        self.kernel: Final = TritonKernel(autotuner, more.heuristic, more.version)
        own = {name: bucket for name, bucket in (more.bucket or {}).items() if name in self.kernel.key}
        self.kernel.buckets = kernel_buckets(own, self.kernel.key)
        self.kernel.representative, self.kernel.output_check = more.representative, more.output_check
        self.kernel.measure = more.measure
        self.kernel.make_live = partial(_live_launches, self.kernel, processes=more.processes)
        self.kernel.strategy = None if more.search == "auto" else more.search
        if not self.kernel.interpreted:
            key_ahead.begin()
        tuner = DeviceTuner(
            self.kernel,
            graph=replays(more.measure, graph=autotuner.use_cuda_graph, do_bench=(bench := _own_do_bench(autotuner))),
            do_bench=bench,
            processes=more.processes,
            devices=more.devices,
            must_isolate=lambda: self.selector.policy.isolate == "always",
            worker_setup=more.worker_setup,
            thorough=more.thorough,
            on_tuned=self._publish,
        )
        self.selector: Final[ConfigSelectorChain[LaunchConfig]] = ConfigSelectorChain(
            ConfigCache(),
            more.policy,
            tuner,
            open_persistent(self.kernel.op_id, more.store),
            forbid_reautotune=False,  # `kernel.cache.clear()` tunes again, as with Triton
            on_event=more.on_event,
        )
        self.kernel.selector, self.kernel.recorder = self.selector, LaunchRecorder(self.kernel)
        self._dispatcher: Final = Dispatcher(
            self._implementation(),
            names=("facts",),
            layout=False,
            select=self._select,
            selector=self.selector,
            observe=self._observe,
            as_config=lambda config, _arguments: config,
        )
        self._launchers: Final[dict[tuple[bool, bool], Launcher]] = {}
        self._pruned: Final[BoundedDict[Problem, list[LaunchConfig]]] = BoundedDict(CAPACITY)
        self.look_again = False  # whether the program may have written to the configurations
        self._stored: Problem | None = None  # the problem whose answer was found in the book last
        if not isinstance(autotuner.cache, WatchedCache):  # of a class that is not watched
            autotuner.cache = WatchedCache(autotuner, autotuner.cache)
        for option in ("reset_to_zero", "restore_value"):  # Triton checks them since 3.9
            for name in getattr(self.kernel, option):
                if name not in self.kernel.names:
                    raise DefinitionError(f"{option}: {name!r} is unknown; {unknown_name(name, self.kernel.names)}")
        unknown = [name for name in self.kernel.key if name not in self.kernel.names]
        if unknown:
            warn_once(
                "unknown-key",
                self.kernel.op_id,
                f"{self.kernel.op_id}: key={list(self.kernel.key)!r} names {', '.join(unknown)}, which the kernel does "
                f"not take, so it counts for nothing. Its arguments are {', '.join(self.kernel.names)}.",
            )

    def launcher(self, *, exact: bool = False) -> Launcher:
        """Return the launcher for the next launches; `exact` passes arguments as the call did, which takes longer."""
        if self.look_again:
            self.look_again = False
            if self.kernel.refresh():
                self._start_over()
        written = bool(self.autotuner.cache.written)
        exact = exact or self.kernel.sees_calls or written
        if (exact, written) not in self._launchers:
            self._launchers[exact, written] = Launcher(
                self.kernel.function,
                self.kernel.names,
                key=self.kernel.key,
                supplied=self.kernel.supplied,
                call=self._dispatcher.function,
                device=lambda: None if self.kernel.interpreted or interface().device_count() == 1 else current_device(),
                exact=exact,
                # The program writes configurations for single sizes, which then do not share their bucket's.
                buckets=fact_readers(Buckets() if written else self.kernel.buckets),
            )
        return self._launchers[exact, written]

    def forget(self, *, tuned: bool = False) -> None:
        """Select anew at the next launch of each kind; with `tuned`, from the book, or by tuning again."""
        vars(self.autotuner).pop(LAUNCHER, None)
        if tuned:
            self._pruned.clear()
            self.selector.cache.clear()
        self._dispatcher.forget()

    def _start_over(self) -> None:
        """Forget all that depends on the configurations."""
        self._launchers.clear()
        self.forget(tuned=True)

    def run(self, *args: Any, grid: Any = None, warmup: bool = False, **kwargs: Any) -> Any:
        """Launch, as `Autotuner.run` does."""
        if warmup:
            return self.warmup(*args, grid=grid, **kwargs)[0]
        return self.launcher(exact=True).bind(grid)(*args, **kwargs)

    def _implementation(self) -> Callable[..., Any]:
        autotuner, run, names = self.autotuner, self.kernel.direct.run, self.kernel.names

        # As `TritonKernel.run`, written out: calling it would cost every launch a frame.
        def launch(call: tuple[Any, ...], facts: object, *, config: Any) -> Any:
            grid, args, kwargs = call
            if config.pre_hook is not None and config.__class__ is LiveConfig:
                session = config.session
                if session.rest <= 0:
                    return session.run((call, facts), {})
                session.rest -= 1
                config = session.config
            autotuner.best_config = config.config
            if config.pre_hook is not None:
                config.pre_hook({**Launch(grid, args, kwargs).named(names), **config.meta})
            return run(config, grid, args, kwargs)

        return launch

    def _select(
        self, arguments: tuple[Any, ...], override: LaunchConfig | None, problem: Problem | None
    ) -> Selection[LaunchConfig]:
        if override is not None:
            raise DefinitionError("a launch takes no config=; write `with kernel.overlay(triton.Config(...)):`")
        launch = Launch(*arguments[0])
        self.autotuner.nargs = launch.positional(self.kernel.names)
        try:
            return self._select_for(launch, problem)
        except NoConfig as error:
            raise of_tritons_class(error) from error.__cause__
        finally:
            self.autotuner.nargs = None

    def _select_for(self, launch: Launch, problem: Problem | None) -> Selection[LaunchConfig]:
        if self.kernel.refresh(fields=False):
            self._start_over()
        inv = self.kernel.invocation(launch)
        known = problem or self.kernel.problem(inv)
        selection = self._fixed(known, inv)
        # While launches go into a CUDA graph, nothing may be measured or waited for; a live session does neither then.
        live = self.selector.policy.cache_miss_fallback == "incremental"
        if selection is None and not live and not self.kernel.interpreted and interface().is_current_stream_capturing():
            selection = self._select_under_capture(launch, known)
        selection = selection or self.selector.select(inv, self.kernel, known)
        if len(self.kernel.configs) > 1:
            key, shown = self._triton_key(launch), self.autotuner.cache
            if selection.level == "persistent":
                self._found(known)
                if key not in shown:
                    self._tell_listener(key, selection.config, cached=True)
            shown.publish(key, selection.config.config)
        key_ahead.finish()
        if selection.exploration is None:
            return selection
        # Under the key of the launch, so that the hot path finds the session as fast as a configuration.
        return selection._replace(config=cast("LaunchConfig", LiveConfig(selection.exploration)), exploration=None)

    def _observe(self, problem: Problem, arguments: tuple[Any, ...]) -> Callable[[float], None]:
        if len(self.kernel.configs) <= 1:  # nothing to tune
            return lambda _seconds: None
        return observing(problem, self.kernel, (Launch(*arguments[0]),))

    def _fixed(self, problem: Problem, inv: Invocation[LaunchConfig, Any]) -> Selection[LaunchConfig] | None:
        """Return the only configuration that a launch may have; None if it is to be selected."""
        source, only = "only candidate", self.kernel.configs[0]
        if len(self.kernel.configs) > 1:
            key, shown = self._triton_key(inv.args[0]), self.autotuner.cache
            if key in shown.written:
                source, only = "kernel.cache", shown[key]
            else:
                left = self._prune(problem, inv)
                if len(left) > 1:
                    return None
                only = left[0].config
        config = cast("LaunchConfig", find_overlay(problem) or self.kernel.candidate(only))
        return Selection(problem, config, source, "heuristics", None, remember=False, tried=())

    def _prune(self, problem: Problem, inv: Invocation[LaunchConfig, Any]) -> list[LaunchConfig]:
        """Return the candidates; the user's pruning is asked once for all launches of a problem, as Triton does it."""
        launch: Launch = inv.args[0]
        launch.candidates = self._pruned.get(problem)
        left, supplied = self.kernel.candidate_cfgs(inv), self.kernel.supplied_by_configs
        if launch.candidates is not None:  # which the user's pruning may have made
            self._pruned[problem] = left
            supplied = frozenset(name for candidate in left for name in candidate.config.kwargs)
        both = launch.kwargs.keys() & supplied
        if both:
            raise DefinitionError(f"{', '.join(sorted(both))}: given by the call and by configurations; leave it out")
        return left

    def _found(self, problem: Problem) -> None:
        """Let `configs_timings` and `bench_time` be read from the book when they are asked for."""
        self._stored = problem
        for name in ("configs_timings", "bench_time"):
            vars(self.autotuner).pop(name, None)

    def stored(self, name: str) -> Any:
        """Return an attribute that Triton sets where it tunes, from the record of the last answer from the book."""
        persistent = self.selector.persistent
        record = None if self._stored is None or persistent is None else persistent.read(self._stored)
        if record is None:
            raise AttributeError(f"{type(self.autotuner).__name__!r} object has no attribute {name!r}")
        if name == "bench_time":
            return record.body.provenance.get("seconds", 0.0)
        known = {fingerprint(candidate): candidate.config for candidate in self.kernel.all_candidates()}
        return {
            known[m.fingerprint]: _quantiles_ms(m.valid_samples_s)
            for m in record.body.measurements
            if m.fingerprint in known and m.code == self.kernel.code_checksum
        }

    def _select_under_capture(self, launch: Launch, problem: Problem) -> Selection[LaunchConfig]:
        """Choose without running anything: a known configuration, or the heuristic, or an error with a remedy."""
        try:
            with policy_override(self.selector, allow_autotune=False):
                selection = self.selector.select(self.kernel.invocation(launch), self.kernel, problem)
        except NoConfig as error:
            tried = [
                (tier, "off: a CUDA graph is being captured" if tier == "autotune" else said)
                for tier, said in error.tried
            ]
            remedy = "Call the kernel once with these arguments before the capture, or give autotune a heuristic=."
            raise NoConfig(error.op, tried, remedy) from None
        return selection._replace(transient=selection.source == "heuristics")

    def _triton_key(self, launch: Launch) -> tuple[Any, ...]:
        """Return the key that `triton.autotune` has for a launch."""
        names = self.autotuner.arg_names
        arguments = launch.positional(names) | launch.kwargs
        named = {name: value for name, value in arguments.items() if name in names}
        values = [named[name] for name in self.autotuner.keys if name in named]
        return (*values, *(str(x.dtype) for x in named.values() if hasattr(x, "dtype")))

    def _publish(self, launch: Launch, tuned: Tuned[LaunchConfig]) -> None:
        """Store the results where `triton.autotune` stores them, print them if asked to, and tell Triton's listener."""
        self.autotuner.bench_time = tuned.seconds
        self.autotuner.configs_timings = {
            tuned.configs[m.fingerprint].config: _quantiles_ms(m.valid_samples_s)
            for m in tuned.measurements
            if m.fingerprint in tuned.configs
        }
        key = self._triton_key(launch)
        if knobs.autotuning.print:
            sys.stdout.write(
                f"Triton autotuning for function {self.autotuner.base_fn.__name__},\nwith key as {key},\n"
                f"finished after {tuned.seconds:.2f}s,\nbest config selected: {tuned.config.config};\n"
            )
        self._tell_listener(key, tuned.config, cached=False)

    def _tell_listener(self, key: tuple[Any, ...], best: LaunchConfig, *, cached: bool) -> None:
        listener = getattr(knobs.autotuning, "listener", None)  # since Triton 3.7
        if listener is not None:
            listener(
                fn=self.kernel.chain[-2],
                key=key,
                best_config=best.config,
                configs_timings=self.stored("configs_timings") if cached else self.autotuner.configs_timings,
                duration=None if cached else self.autotuner.bench_time,
                cache_hit=cached,
            )

    def warmup(self, *args: Any, grid: Any = None, **kwargs: Any) -> list[Any]:
        """Compile every candidate for a launch, as `triton.autotune` does, and return the compiled programs."""
        candidates = self.kernel.candidate_cfgs(self.kernel.invocation(Launch(grid, args, kwargs)))
        return [self.kernel.fn.warmup(*args, grid=grid, **kwargs, **c.meta) for c in candidates]

    def tune(
        self,
        *args: Any,
        grid: Any,
        budget: Budget | float | str | None = None,
        progress: Progress | bool | None = None,
        again: bool = False,
        **kwargs: Any,
    ) -> Tuned[LaunchConfig]:
        """Tune a launch ahead of time, and return the measurements; stored ones are taken anew only if `again`."""
        inv = self.kernel.invocation(Launch(grid, args, kwargs))
        show = progress_for(progress, self.kernel.op_id)
        return self.selector.tune(inv, self.kernel, budget=parse_budget(budget), on_step=show, again=again)

    def tune_together(
        self,
        calls: Iterable[Sequence[Any]],
        *,
        progress: Progress | bool | None = None,
        **options: Any,
    ) -> Tuned[LaunchConfig]:
        """Find the configuration with the least time over several launches; `options` are those of the selector."""
        launches = []
        for call in calls:
            grid, args, *kwargs = call
            if not isinstance(args, (tuple, list)) or len(kwargs) > 1:
                raise DefinitionError(f"write a launch as (grid, arguments), as in (grid, (x, n)); got {call!r:.200}")
            launches.append(Launch(grid, tuple(args), *(kwargs or [{}])))
        show = progress_for(progress, self.kernel.op_id)
        invs = [self.kernel.invocation(launch) for launch in launches]
        return self.selector.tune_together(invs, self.kernel, on_step=show, **options)

    def config_for(self, *args: Any, grid: Any = None, **kwargs: Any) -> triton.Config | None:
        """Return the configuration of a launch; without a grid nothing is tuned, and None is an unknown launch."""
        if grid is not None:
            return self._select(((grid, args, kwargs),), None, None).config.config
        inv = self.kernel.invocation(Launch(grid, args, kwargs))
        problem = self.kernel.problem(inv)
        found = self._fixed(problem, inv) or self.selector.preview(inv, self.kernel, problem)
        if not isinstance(found, Selection) or found.would_tune:
            return None
        return found.config.config

    def explain(self, *args: Any, grid: Any = None, **kwargs: Any) -> Explanation:
        """Say which configuration a launch gets and why, without running or tuning anything."""
        inv = self.kernel.invocation(Launch(grid, args, kwargs))
        explained = explain_call(self.selector, inv, self.kernel)
        fixed = self._fixed(explained.problem, inv)
        return explained if fixed is None else replace(explained, selection=fixed)

    def overlay(self, config: triton.Config) -> Scope:
        """Give this kernel one configuration inside a with-block, in this thread or task."""
        return overlay_op(self.kernel.op_id_v, self.kernel.candidate(config))


def _live_launches(kernel: TritonKernel, *, processes: bool) -> object:
    from tunebook.adapters._triton.live import LiveLaunches  # noqa: PLC0415 - loaded late: few policies try

    return LiveLaunches(kernel, processes=processes)


def _own_do_bench(autotuner: Autotuner) -> Callable[..., Any] | None:
    """Return the user's `do_bench`; for the deprecated arguments, Triton puts a function of its own in its place."""
    deprecated = autotuner.use_cuda_graph or autotuner.num_warmups is not None or autotuner.num_reps is not None
    return None if deprecated else cast("Callable[..., Any] | None", autotuner._do_bench)  # noqa: SLF001 - Triton's


def of_tritons_class(error: NoConfig) -> NoConfig:
    """Return the same error, as one of Triton's class too where all candidates failed by Triton's own errors."""
    failed = error.__cause__.exceptions if isinstance(error.__cause__, TuningFailed) else ()
    causes = [each.__cause__ if isinstance(each, CompileError) else each for each in failed]
    first = next((cause for cause in causes if isinstance(cause, TritonError)), None)
    if first is None:
        return error
    made: NoConfig = _failure_class(cast("Any", type(first)))(*_parts(error))
    vars(made).update({name: value for name, value in vars(first).items() if name not in vars(made)})
    return made


@cache
def _failure_class(kind: Any) -> Any:
    # Its text is ours; a pickle has the plain class, because another process may not have Triton.
    plain: dict[str, Any] = {"__str__": Exception.__str__, "__reduce__": lambda self: (NoConfig, _parts(self))}
    return type("NoConfig", (NoConfig, kind), plain)


def _parts(error: NoConfig) -> tuple[object, ...]:
    return error.op, error.tried, error.remedy


def _quantiles_ms(samples_s: Sequence[float]) -> list[float]:
    """Return the three numbers that Triton keeps of each configuration: typical, low and high."""
    if not samples_s:
        return [float("inf")] * 3
    ordered = sorted(samples_s)
    low, high = ordered[len(ordered) // 5], ordered[-1 - len(ordered) // 5]
    return [1e3 * typical_s(ordered), 1e3 * low, 1e3 * high]
