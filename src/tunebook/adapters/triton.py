"""Triton: `autotune` replaces `triton.autotune`, and takes the same arguments.

Candidates are compiled in parallel, raced on the device, and kept in the book for the next process. A tuned launch
costs about a microsecond more than a launch with a fixed configuration.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, cast

from triton import knobs
from triton.runtime.autotuner import Autotuner

from tunebook._api.explain import Explanation, explain_call
from tunebook._base.errors import DefinitionError, NoConfig
from tunebook._hotpath.dispatcher import Dispatcher
from tunebook._keys.buckets import unknown_name
from tunebook._memo.answer_memo import ConfigCache
from tunebook._memo.context_stack import Scope, find_overlay, overlay_op
from tunebook._selection.persistent_cache import PersistentCache, open_persistent
from tunebook._selection.selector import ConfigSelectorChain, Selection, policy_override
from tunebook._statistics.race import typical_s
from tunebook._tuning.job import Budget, Tuned, parse_budget
from tunebook._tuning.progress import Progress, progress_for
from tunebook.adapters._triton.candidate import Launch, LaunchConfig
from tunebook.adapters._triton.device import current_device, interface
from tunebook.adapters._triton.kernel import Hooks, TritonKernel
from tunebook.adapters._triton.launcher import Launcher
from tunebook.adapters._triton.tuner import DeviceTuner

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping, Sequence

    import triton

    from tunebook._base.vocabulary import Problem
    from tunebook._kernel.kernel import AutotunePolicy

    Store = str | os.PathLike[str] | PersistentCache[Any] | Literal[False] | None


class _More(NamedTuple):
    """The arguments of `autotune` that `triton.autotune` does not take, and `use_cuda_graph`, which Triton warns of."""

    graph: bool
    store: Store
    policy: AutotunePolicy | None
    heuristic: triton.Config | Callable[..., triton.Config] | None
    version: str
    processes: bool
    devices: Sequence[int] | Literal["all"]
    worker_setup: str


class TunedKernel(Autotuner):  # type: ignore[misc] # Triton has no types
    """A tuned kernel. It is an `Autotuner`, because other libraries look for one, and launches like one."""

    def __init__(self, fn: Any, given: Mapping[str, Any], more: _More) -> None:  # given: for `triton.autotune`
        for option in ("key", "reset_to_zero", "restore_value"):
            _check_names(fn, option, given[option])
        if more.policy is not None and more.policy.cache_miss_fallback in ("background", "incremental"):
            raise DefinitionError(
                f"cache_miss_fallback={more.policy.cache_miss_fallback!r} is not for Triton kernels, whose launches "
                "hold the user's own tensors; use 'autotune', or 'heuristics' with a heuristic="
            )
        super().__init__(fn, fn.arg_names, **given)
        self.use_cuda_graph = more.graph  # not through Triton, which warns that it is deprecated there
        hooks = Hooks(given["pre_hook"], given["post_hook"])
        self.kernel: Final = TritonKernel(self, hooks, more.heuristic, more.version)
        tuner = DeviceTuner(
            self.kernel,
            graph=more.graph,
            do_bench=given["do_bench"],
            processes=more.processes,
            devices=more.devices,
            must_isolate=lambda: self.selector.policy.isolate == "always",
            worker_setup=more.worker_setup,
            on_tuned=self._publish,
        )
        self.selector: Final[ConfigSelectorChain[LaunchConfig]] = ConfigSelectorChain(
            ConfigCache(), more.policy, tuner, open_persistent(self.kernel.op_id, more.store)
        )
        self._dispatcher = Dispatcher(
            self._implementation(),
            names=("facts",),
            layout=False,
            select=self._select,
            selector=self.selector,
            observe=lambda _problem, _arguments, _seconds: None,  # a launch's tensors cannot be made up again
            as_config=lambda config: config,
        )
        self._launcher = Launcher(
            self.kernel.function,
            self.kernel.names,
            key=self.keys,
            supplied=self.kernel.supplied,
            call=self._dispatcher.function,
            device=lambda: None if self.kernel.interpreted or interface().device_count() == 1 else current_device(),
        )

    def __getitem__(self, grid: Any) -> Any:
        """Return a function that launches on a grid."""
        return self._launcher.bind(grid)

    def run(self, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> Any:
        """Launch. Heuristics around this kernel call it by this name."""
        if warmup:
            return self.warmup(*args, grid=grid, **kwargs)
        return self._launcher.bind(grid)(*args, **kwargs)

    def warmup(self, *args: Any, grid: Any = None, **kwargs: Any) -> list[Any]:
        """Compile every candidate for a launch, as `triton.autotune` does, and return the compiled programs."""
        candidates = self.kernel.candidate_cfgs(self.kernel.invocation(Launch(grid, args, kwargs)))
        return [self.fn.warmup(*args, grid=grid, **kwargs, **c.meta) for c in candidates]

    def _implementation(self) -> Callable[..., Any]:
        fn, names = self.fn, self.kernel.names

        # As `TritonKernel.run`, written out: calling it would cost every launch a frame.
        def launch(call: tuple[Any, ...], facts: object, *, config: LaunchConfig) -> Any:  # noqa: ARG001 - looked up by
            grid, args, kwargs = call
            self.best_config = config.config
            if config.pre_hook is not None:
                config.pre_hook({**Launch(grid, args, kwargs).named(names), **config.meta})
            return fn.run(*args, grid=grid, warmup=False, **kwargs, **config.meta)

        return launch

    def _select(
        self, arguments: tuple[Any, ...], override: LaunchConfig | None, problem: Problem | None
    ) -> Selection[LaunchConfig]:
        launch = Launch(*arguments[0])
        inv = self.kernel.invocation(launch)
        if override is not None:
            raise DefinitionError("a launch takes no config=; write `with kernel.overlay(triton.Config(...)):`")
        both = launch.kwargs.keys() & {name for config in self.configs for name in config.kwargs}
        if both:
            raise DefinitionError(f"{', '.join(sorted(both))}: given by the call and by configurations; leave it out")
        if len(self.configs) == 1:
            known = problem or self.kernel.problem(inv)
            only = cast("LaunchConfig", find_overlay(known) or self.kernel.candidate(self.configs[0]))
            return Selection(known, only, "only candidate", "heuristics", None, remember=False, tried=())
        # While launches go into a CUDA graph, nothing may be measured or waited for.
        if not self.kernel.interpreted and interface().is_current_stream_capturing():
            selection = self._select_under_capture(launch, problem)
        else:
            selection = self.selector.select(inv, self.kernel, problem)
        key = self._triton_key(launch)
        if key not in self.cache and selection.level == "persistent":
            self._tell_listener(key, selection.config, cached=True)
        self.cache[key] = selection.config.config
        return selection

    def _select_under_capture(self, launch: Launch, problem: Problem | None) -> Selection[LaunchConfig]:
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
        arguments = launch.positional(self.arg_names) | launch.kwargs
        named = {name: value for name, value in arguments.items() if name in self.arg_names}
        values = [named[name] for name in self.keys if name in named]
        return (*values, *(str(x.dtype) for x in named.values() if getattr(x, "dtype", None) is not None))

    def _publish(self, launch: Launch, tuned: Tuned[LaunchConfig]) -> None:
        """Store the results where `triton.autotune` stores them, print them if asked to, and tell Triton's listener."""
        self.bench_time = tuned.seconds
        self.configs_timings = {
            tuned.configs[m.fingerprint].config: _quantiles_ms(m.valid_samples_s)
            for m in tuned.measurements
            if m.fingerprint in tuned.configs
        }
        key = self._triton_key(launch)
        if knobs.autotuning.print:
            sys.stdout.write(
                f"Triton autotuning for function {self.base_fn.__name__},\nwith key as {key},\n"
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
                configs_timings={} if cached else self.configs_timings,
                duration=None if cached else self.bench_time,
                cache_hit=cached,
            )

    def tune(
        self,
        *args: Any,
        grid: Any,
        budget: Budget | float | str | None = None,
        progress: Progress | bool | None = None,
        **kwargs: Any,
    ) -> Tuned[LaunchConfig]:
        """Tune a launch ahead of time, and return the measurements; stored measurements are not taken again."""
        inv = self.kernel.invocation(Launch(grid, args, kwargs))
        show = progress_for(progress, self.kernel.op_id)
        return self.selector.tune(inv, self.kernel, budget=parse_budget(budget), on_step=show)

    def explain(self, *args: Any, grid: Any = None, **kwargs: Any) -> Explanation:
        """Say which configuration a launch gets and why, without running or tuning anything."""
        return explain_call(self.selector, self.kernel.invocation(Launch(grid, args, kwargs)), self.kernel)

    def overlay(self, config: triton.Config) -> Scope:
        """Give this kernel one configuration inside a with-block, in this thread or task."""
        return overlay_op(self.kernel.op_id_v, self.kernel.candidate(config))


def _quantiles_ms(samples_s: Sequence[float]) -> list[float]:
    """Return the three numbers that Triton keeps of each configuration: typical, low and high."""
    if not samples_s:
        return [float("inf")] * 3
    ordered = sorted(samples_s)
    low, high = ordered[len(ordered) // 5], ordered[-1 - len(ordered) // 5]
    return [1e3 * typical_s(ordered), 1e3 * low, 1e3 * high]


def _check_names(fn: Any, option: str, names: Sequence[str] | None) -> None:
    if isinstance(names, str):
        raise DefinitionError(f"{option}={names!r}: write a list of names, e.g. [{names!r}]")
    for name in names or ():
        if name not in fn.arg_names:
            raise DefinitionError(f"{option}={list(names or ())!r}: {unknown_name(name, list(fn.arg_names))}")


def autotune(
    configs: Sequence[triton.Config],
    key: Sequence[str],
    prune_configs_by: Mapping[str, Any] | None = None,
    reset_to_zero: Sequence[str] | None = None,
    restore_value: Sequence[str] | None = None,
    pre_hook: Callable[..., Any] | None = None,
    post_hook: Callable[..., Any] | None = None,
    warmup: int | None = None,  # noqa: ARG001 - ignored, see below
    rep: int | None = None,  # noqa: ARG001 - ignored, see below
    use_cuda_graph: bool = False,  # noqa: FBT001, FBT002 - as in Triton
    do_bench: Callable[..., Any] | None = None,
    cache_results: bool = False,  # noqa: FBT001, FBT002 - as in Triton
    *,
    store: Store = None,
    policy: AutotunePolicy | None = None,
    heuristic: triton.Config | Callable[..., triton.Config] | None = None,
    version: str = "0",
    processes: bool = True,
    devices: Sequence[int] | Literal["all"] = (),
    worker_setup: str = "",
) -> Callable[[Any], TunedKernel]:
    """Tune a jitted function. All positional arguments are the arguments of `triton.autotune`.

    Results go to the user's book, also with `cache_results=False`; `store` is another place for them, or False for
    memory only. `warmup` and `rep` are ignored: they say how long to measure each configuration, but a race measures a
    configuration only as long as it may win. `use_cuda_graph` times replays of a graph.

    `heuristic` is a configuration, or a function of the arguments that returns one, for launches that cannot be tuned:
    while a CUDA graph is captured, or where the policy says so. `processes=False` compiles in threads only, without
    forks. `policy=AutotunePolicy(isolate="always")` runs candidates in a worker process, so that an illegal access or a
    hang costs one candidate; `worker_setup` names a "module:function" to call there first. `devices` are the indices of
    GPUs that share the candidates, or "all"; GPUs of another model are not used.
    """
    given = {
        "configs": configs,
        "key": list(key) if not isinstance(key, str) else key,
        "reset_to_zero": reset_to_zero,
        "restore_value": restore_value,
        "pre_hook": pre_hook,
        "post_hook": post_hook,
        "prune_configs_by": prune_configs_by,
        "do_bench": do_bench,
        "cache_results": cache_results,
    }
    more = _More(use_cuda_graph, store, policy, heuristic, version, processes, devices, worker_setup)
    return lambda fn: TunedKernel(fn, given, more)
