"""Triton: `autotune` replaces `triton.autotune`, and takes the same arguments.

Candidates are compiled in parallel, raced on the device, and kept in the book for the next process. A tuned launch
costs about a microsecond more than a launch with a fixed configuration.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Unpack

from triton.runtime.autotuner import Autotuner

from tunebook.adapters._triton.attributes import MORE
from tunebook.adapters._triton.engine import engine_of, watched
from tunebook.adapters._triton.options import read_options
from tunebook.adapters._triton.takeover import install, uninstall

__all__ = ["TunedKernel", "autotune", "install", "uninstall"]

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import triton

    from tunebook._api.explain import Explanation
    from tunebook._base.vocabulary import Combine
    from tunebook._memo.context_stack import Scope
    from tunebook._selection.selector import ConfigSelectorChain
    from tunebook._tuning.job import Budget, Tuned
    from tunebook._tuning.progress import Progress
    from tunebook.adapters._triton.candidate import LaunchConfig
    from tunebook.adapters._triton.engine import Engine, More
    from tunebook.adapters._triton.kernel import TritonKernel
    from tunebook.adapters._triton.options import AutotuneOptions


@watched
class TunedKernel(Autotuner):  # type: ignore[misc] # Triton has no types
    """A tuned kernel. It is an `Autotuner`, because other libraries look for one, and launches like one.

    Decorating costs as much as with Triton: the first launch builds all else.
    """

    def __init__(self, fn: Any, given: Mapping[str, Any], more: More) -> None:  # given: for `triton.autotune`
        super().__init__(fn, fn.arg_names, **given)
        setattr(self, MORE, more)

    @property
    def _engine(self) -> Engine:
        return engine_of(self)

    @property
    def kernel(self) -> TritonKernel:
        """The kernel of the core: its key, its candidates and its code."""
        return self._engine.kernel

    @property
    def selector(self) -> ConfigSelectorChain[LaunchConfig]:
        """The selector that chooses a configuration for each launch."""
        return self._engine.selector

    def __getitem__(self, grid: Any) -> Any:
        """Return a function that launches on a grid."""
        return self._tunebook_launcher.bind(grid)

    def run(self, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> Any:
        """Launch. Heuristics around this kernel call it by this name."""
        if warmup:
            return self.warmup(*args, grid=grid, **kwargs)[0]
        return self._tunebook_launcher.bind(grid)(*args, **kwargs)

    def warmup(self, *args: Any, grid: Any = None, **kwargs: Any) -> list[Any]:
        """Compile every candidate for a launch, as `triton.autotune` does, and return the compiled programs."""
        return self._engine.warmup(*args, grid=grid, **kwargs)

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
        return self._engine.tune(*args, grid=grid, budget=budget, progress=progress, again=again, **kwargs)

    def tune_together(
        self,
        calls: Iterable[Sequence[Any]],
        *,
        weights: Sequence[float] | None = None,
        combine: Combine = "mean",
        budget: Budget | float | str | None = None,
        progress: Progress | bool | None = None,
        again: bool = False,
    ) -> Tuned[LaunchConfig]:
        """Find the configuration with the least time over several launches, and use it for each of them.

        A launch is a tuple of its grid and its arguments, and may have a dict of keyword arguments as a third part.
        `weights` weigh the launches, for example by how often each happens. `combine`: see `tunebook.tune_together`.
        """
        return self._engine.tune_together(
            calls, weights=weights, combine=combine, budget=budget, progress=progress, again=again
        )

    def config_for(self, *args: Any, grid: Any = None, **kwargs: Any) -> triton.Config | None:
        """Return the configuration that a launch gets, tuned first if need be; nothing is launched for the caller.

        Without a grid nothing can be tuned: then the answer is None for a launch that would be tuned first.
        """
        return self._engine.config_for(*args, grid=grid, **kwargs)

    def explain(self, *args: Any, grid: Any = None, **kwargs: Any) -> Explanation:
        """Say which configuration a launch gets and why, without running or tuning anything."""
        return self._engine.explain(*args, grid=grid, **kwargs)

    def overlay(self, config: triton.Config) -> Scope:
        """Give this kernel one configuration inside a with-block, in this thread or task."""
        return self._engine.overlay(config)


def autotune(
    configs: Sequence[triton.Config],
    key: Sequence[str],
    prune_configs_by: Mapping[str, Any] | None = None,
    reset_to_zero: Sequence[str] | None = None,
    restore_value: Sequence[str] | None = None,
    pre_hook: Callable[..., Any] | None = None,
    post_hook: Callable[..., Any] | None = None,
    warmup: int | None = None,
    rep: int | None = None,
    use_cuda_graph: bool = False,  # noqa: FBT001, FBT002 - as in Triton
    do_bench: Callable[..., Any] | None = None,
    cache_results: bool = False,  # noqa: FBT001, FBT002 - as in Triton
    **options: Unpack[AutotuneOptions],
) -> Callable[[Any], TunedKernel]:
    """Tune a jitted function. All positional arguments are the arguments of `triton.autotune`.

    Results go to the user's book, also with `cache_results=False`; `store` is another place for them, or False for
    memory only. `warmup` and `rep` are ignored: they say how long to measure each configuration, but a race measures a
    configuration only as long as it may win. `use_cuda_graph` times replays of a graph, and so does
    `measure=Measure(launch="graph")`; `Measure(cache="warm")` leaves the L2 cache warm, which is else emptied.

    `heuristic` is a configuration, or a function of the arguments that returns one, for launches that cannot be tuned:
    while a CUDA graph is captured, or where the policy says so. `processes=False` compiles in threads only, without
    forks. `policy=AutotunePolicy(isolate="always")` runs candidates in a worker process, so that an illegal access or a
    hang costs one candidate; `worker_setup` names a "module:function" to call there first. `devices` are the indices of
    GPUs that share the candidates, or "all"; GPUs of another model are not used. `thorough=True` measures every
    candidate; otherwise those that would spill many registers may be left out.

    `bucket` makes launches with nearby values of a key argument share an entry: `bucket={"M": tunebook.pow2}`. A bucket
    is tuned at its representative size where that can be made up; `representative=False` tunes it at the size of the
    launch that comes first. `reference` is "first", a configuration, or a
    function of the kernel's arguments that returns the expected outputs; candidates with other outputs are rejected.
    `check` and `tolerance` are as for `tunable`; without any of the three, outputs are not checked.

    A list of more than 128 configurations is searched: 128 of them are tried, and fewer if the book knows the kernel's
    times for near sizes. `search="exhaustive"` races all of them; the other values are the strategies of `tunable`.
    `on_event` is called with each event of a choice.
    """
    given = {
        "configs": configs,
        "key": key,
        "reset_to_zero": reset_to_zero,
        "restore_value": restore_value,
        "pre_hook": pre_hook,
        "post_hook": post_hook,
        "prune_configs_by": prune_configs_by,
        "warmup": warmup,
        "rep": rep,
        "use_cuda_graph": use_cuda_graph,
        "do_bench": do_bench,
        "cache_results": cache_results,
    }
    more = read_options(options, key)
    return lambda fn: TunedKernel(fn, given, more)


def __dir__() -> list[str]:
    return sorted(__all__)
