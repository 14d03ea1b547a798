"""A Triton kernel as a `Kernel` of the core: its key, its candidates, its code, and how a candidate is compiled."""

from __future__ import annotations

import inspect
import math
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.compiler.errors import CompilationError
from triton.runtime import JITFunction, driver
from triton.runtime.autotuner import Heuristics
from triton.runtime.errors import PTXASError

from tunebook._api.function_kernel import default_name
from tunebook._arrays.device_fingerprint import environment_fingerprint, gpu_driver, host_cpu
from tunebook._base.errors import CompileError, DefinitionError, UnkeyableError, Unsupported
from tunebook._base.locks import InterruptSafeLock
from tunebook._base.vocabulary import Problem, computed_once
from tunebook._code.checksum import checksum_beside, read_code
from tunebook._kernel.kernel import Invocation, Kernel
from tunebook._keys.buckets import Buckets
from tunebook._keys.call_key import call_key
from tunebook.adapters._triton.buckets import sizes_of, with_values
from tunebook.adapters._triton.candidate import OF_AUTHORS, Launch, LaunchConfig, after_hook
from tunebook.adapters._triton.device import current_device, device_name, interface
from tunebook.adapters._triton.direct_launch import DirectLaunches
from tunebook.adapters._triton.heuristic import heuristic_config
from tunebook.adapters._triton.kept_checksum import kept_facts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    import triton
    from triton.runtime.autotuner import Autotuner

    from tunebook._base.vocabulary import StrategyLike
    from tunebook._code.replay import CodeFacts
    from tunebook.adapters._triton.check import OutputCheck
    from tunebook.search import Search

# A list of at most this many configurations is raced whole: a search would save little.
RACED_WHOLE: Final = 128
_PART_OF_FREE: Final = 0.25  # of the memory, for the tensors of a tuning in the background
SCALARS: Final = (bool, int, float, str, type(None))


def _keyed(value: object) -> object:
    """Return a value for the book's key; Triton takes any object with a hash, and writes it down by its text."""
    try:
        call_key({"": value})
    except UnkeyableError:
        hash(value)
        return f"{type(value).__qualname__}: {value}"
    return value


class Hooks(NamedTuple):
    """The user's hooks around every run of a candidate; they replace resetting and restoring arguments."""

    before: Callable[..., object] | None = None
    after: Callable[..., object] | None = None


class TritonKernel(Kernel[LaunchConfig, Any]):
    """A kernel whose invocations hold one `Launch`, and which has the options of Triton's own `Autotuner`.

    The options are read from the autotuner each time, because a program may write to its attributes.
    """

    buckets = Buckets()
    representative = True  # whether a bucket is tuned at its representative size
    output_check: OutputCheck | None = None
    selector: Any = None  # of its engine
    measures_by_itself = True
    live_loads = 0  # of programs, by its `LiveLaunches` of all problems
    make_live: Callable[[], Any] | None = None  # makes the `LiveLaunches` of a problem; of its engine too
    checks = False  # `triton.autotune` has no reference, and none of its configurations is more right than the others

    def __init__(self, autotuner: Autotuner, heuristic: Any, version: str) -> None:
        self._autotuner: Final = autotuner
        self.fn: Final = autotuner.fn  # the jitted function, perhaps with heuristics around it
        self.direct: Final = DirectLaunches(self.fn)
        chain = [self.fn]  # a decorated function, then each function inside it, down to the user's own
        while not inspect.isfunction(chain[-1]):
            chain.append(chain[-1].fn)
        self.chain: Final = tuple(chain)
        self.function: Final = chain[-1]
        self.names: Final[tuple[str, ...]] = tuple(autotuner.arg_names)
        self.key: Final = tuple(autotuner.keys or ())
        self.heuristics: Final = [link.values for link in self.chain[:-2] if isinstance(link, Heuristics)]
        self.interpreted: Final = type(self.chain[-2]).__name__ == "InterpretedFunction"
        # Other libraries may tune objects of their own, or put one autotuner inside another.
        self.compiles = isinstance(self.chain[-2], JITFunction) and len(self.heuristics) == len(self.chain) - 2
        self._heuristic: triton.Config | Callable[..., triton.Config] | Literal["first"] | None = heuristic
        self._pruning: Final = InterruptSafeLock()  # Triton passes arguments to its pruning by an attribute
        self._known: dict[int, LaunchConfig] = {}
        self.refresh()
        super().__init__(default_name(self.function), version)

    @property
    def configs(self) -> Sequence[triton.Config]:
        """The configurations, as they are now."""
        # Not through a property of the autotuner, which tells the engine that its configurations may be changed.
        found: Sequence[triton.Config] | None = vars(self._autotuner).get("configs")
        return self._autotuner.configs if found is None else found

    def refresh(self, *, fields: bool = True) -> bool:
        """Return whether configurations have come or gone since the last time, or (`fields`) were written to."""
        before = self._known
        if not fields and [*before] == [*dict.fromkeys(map(id, self.configs))]:
            return False
        self._known = {id(config): self.candidate(config) for config in self.configs}
        if [*map(id, before.values())] == [*map(id, self._known.values())]:
            return False
        self.supplied_by_configs = frozenset(name for config in self.configs for name in config.kwargs)
        vars(self).pop("_static_checksum", None)
        return True

    @property
    def hooks(self) -> Hooks:
        """The user's own hooks; Triton's own, which restore arguments, are not needed here."""
        own = self._autotuner
        return Hooks(
            own.pre_hook if own.user_defined_pre_hook else None, own.post_hook if own.user_defined_post_hook else None
        )

    @property
    def reset_to_zero(self) -> tuple[str, ...]:
        """The arguments that are zero before every run."""
        return tuple(self._autotuner.reset_to_zero)

    @property
    def restore_value(self) -> tuple[str, ...]:
        """The arguments that are put back after every run."""
        return tuple(self._autotuner.restore_value)

    @property
    def sees_calls(self) -> bool:
        """Whether the kernel can tell arguments that a call passes by position, by name, or not at all."""
        # A pruning function gets them apart, and Triton's key holds arguments that are passed only.
        return self._defaults_in_key or self._autotuner.early_config_prune is not None

    @computed_once
    def _defaults_in_key(self) -> bool:
        parameters = inspect.signature(self.function).parameters.values()
        return any(p.name in self.key and p.default is not p.empty for p in parameters)

    def all_candidates(self) -> list[LaunchConfig]:
        """Return the configurations as candidates, without pruning."""
        return list(self._known.values())

    @property
    def _prunes(self) -> bool:
        return bool(self._autotuner.early_config_prune or self._autotuner.perf_model)

    @property
    def module(self) -> str:
        """The module to import so that this kernel is defined."""
        return self.function.__module__

    @property
    def supplied(self) -> frozenset[str]:
        """The parameters that configurations and heuristics give values to."""
        return self.supplied_by_configs.union(*self.heuristics)

    def invocation(self, launch: Launch) -> Invocation[LaunchConfig, Any]:
        """Return a launch as a call."""
        return Invocation(self.op_id, (launch,), {})

    def problem(self, inv: Invocation[LaunchConfig, Any]) -> Problem:
        """Return the problem of a launch: the device, and the parts of Triton's own key."""
        launch: Launch = inv.args[0]
        device = host_cpu() if self.interpreted else device_name(current_device())
        arguments = launch.positional(self.names) | launch.kwargs
        key = {name: _keyed(arguments[name]) for name in self.key if name in arguments}
        dtypes = {
            f"{name}.dtype": str(argument.dtype)
            for name, argument in sorted(arguments.items())
            if name in self.names and getattr(argument, "dtype", None) is not None
        }
        return Problem(device, self.op_id_v, call_key({**key, **dtypes}, buckets=self.buckets))

    def environment(self, inv: Invocation[LaunchConfig, Any]) -> str:  # noqa: ARG002 - the same for all
        """Return the software that a measurement depends on: Triton, its settings, and the driver."""
        versions = self.code_facts.versions
        if self.interpreted:
            return environment_fingerprint(["triton"], {**versions, "target": "interpreter"})
        knobs = {f"knob {name}": str(value) for name, value in get_cache_invalidating_env_vars().items()}
        target = driver.active.get_current_target()
        # Unknown in a container that hides it.
        facts = {**versions, "driver": "unknown", **gpu_driver(), "target": f"{target.backend}:{target.arch}", **knobs}
        return environment_fingerprint(["triton"], facts)

    @computed_once
    def code_facts(self) -> CodeFacts:
        """The digest over the function, the functions that it calls, their constants, and the heuristics."""
        work_out = partial(read_code, self.function, version=self.version, extra=self.heuristics)
        # Triton's key for the code does not have the heuristics in it.
        keep = self.compiles and not self.heuristics
        return kept_facts(self.chain[-2], self.version, work_out) if keep else work_out()

    @computed_once
    def check_checksum(self) -> str:
        """The digest over the check of outputs."""
        return "" if self.output_check is None else checksum_beside(self.function, self.output_check.options)

    def checksum(self, inv: Invocation[LaunchConfig, Any]) -> str:
        """Return the digest over code and candidates; worked out once unless the candidates depend on the launch."""
        return super().checksum(inv) if self._prunes else self._static_checksum

    @computed_once
    def _static_checksum(self) -> str:
        return self._checksum_over(self._known.values())

    def candidate_cfgs(self, inv: Invocation[LaunchConfig, Any]) -> list[LaunchConfig]:
        """Return the configurations that pruning leaves for a launch."""
        launch: Launch = inv.args[0]
        if not self._prunes:
            return list(self._known.values())
        if launch.candidates is None:
            launch.candidates = [self.candidate(config) for config in self._pruned(self._of_bucket(launch))]
        return launch.candidates

    def _of_bucket(self, launch: Launch) -> Launch:
        """Return the launch with the sizes of its bucket, so that all launches of a bucket have the same candidates."""
        if not self.buckets.whole:
            return launch
        return with_values(launch, self.names, sizes_of(launch, self.names, self.buckets)[1])

    def _pruned(self, launch: Launch) -> Sequence[triton.Config]:
        """Ask Triton's own pruning, whose rules differ from version to version."""
        own = self._autotuner
        with self._pruning:
            before, own.nargs = getattr(own, "nargs", None), launch.positional(self.names)
            try:
                left: Sequence[triton.Config] = own.prune_configs(launch.keywords)
            finally:
                own.nargs = before
        if not left:
            raise DefinitionError(f"top_k={own.configs_top_k!r} leaves none of {len(self.configs)} configurations")
        return left

    def search_cfgs(self, inv: Invocation[LaunchConfig, Any], strategy: StrategyLike | None) -> Search | None:
        """Return the search over a long list of configurations; None if all of them are raced."""
        candidates = list(self.candidates(inv))
        if strategy == "exhaustive" or (strategy in (None, "auto") and len(candidates) <= RACED_WHOLE):
            return None
        from tunebook.adapters._triton.list_search import list_search  # noqa: PLC0415 - loaded late: for long lists

        search = list_search(candidates, strategy)
        return None if search is None else search._replace(blocks=partial(self.blocks_of, inv.args[0]))

    def candidate(self, config: triton.Config) -> LaunchConfig:
        """Return a configuration as a candidate: the same object every time for a configuration of this kernel."""
        known = self._known.get(id(config))
        return known if known is not None and known.is_current() else LaunchConfig(config)

    def heuristic_cfg(self, inv: Invocation[LaunchConfig, Any]) -> LaunchConfig:
        """Return the configuration that the user gave as a heuristic, or the first candidate if "first" was given."""
        given = self._heuristic
        if inv.args[0].heuristic is not None:
            return inv.args[0].heuristic  # type: ignore[no-any-return] # a `Launch`
        if given is None:
            return super().heuristic_cfg(inv)
        if isinstance(given, str):
            return self.candidate_cfgs(inv)[0]
        made = self.candidate(heuristic_config(given, inv.args[0].named(self.names), self.names))
        return next((known for known in self.all_candidates() if known.meta == made.meta), made)

    def compile_cfg(self, inv: Invocation[LaunchConfig, Any], cfg: LaunchConfig) -> bytes | None:
        """Compile a candidate into Triton's own caches; return bytes that are equal for launches with equal effect."""
        launch = inv.args[0].measured
        compiled = self.program(launch, cfg)
        if compiled is None or cfg.pre_hook is not None or self.hooks != Hooks():
            return None
        # The program does not say how many instances of it run: a grid may depend on values that the code never reads.
        grid = self.grid_of(launch, cfg)
        return b"\0".join([compiled.kernel, repr((grid, compiled.packed_metadata)).encode()])

    def program(self, launch: Launch, cfg: LaunchConfig) -> Any:
        """Return the compiled program of a candidate, from Triton's caches if it is there; None if a launch must."""
        hooked = after_hook(launch, cfg, self.names)
        if hooked is None:
            return None
        try:
            return self.fn.warmup(*hooked.args, grid=hooked.grid, **hooked.kwargs, **cfg.meta)
        except (CompilationError, PTXASError) as error:
            raise CompileError(f"{type(error).__name__}: {error}") from error

    def live_runs(self, inv: Invocation[LaunchConfig, Any]) -> Any:  # noqa: ARG002 - for launches of any sizes
        """Return how candidates are tried in the launches of a program.

        None in Triton's interpreter, which has no events, and for outputs that are checked, which takes a second run.
        """
        if self.interpreted or self.output_check is not None or self.make_live is None:
            return None
        return self.make_live()

    def aside(self, inv: Invocation[LaunchConfig, Any]) -> AbstractContextManager[object]:
        """Return a stream of its own for a tuning in the background, if there is room for made-up tensors."""
        if self.interpreted:
            return nullcontext()
        torch_like, needed = interface(), sum(size for size, *_ in inv.args[0].spec["storages"])
        free = torch_like.mem_get_info()[0]
        if needed > _PART_OF_FREE * free:
            raise Unsupported(
                f"made-up tensors for a launch of {self.op_id} take {needed >> 20} MiB, more than a quarter of the "
                f"{free >> 20} MiB that are free; use cache_miss_fallback='incremental', which needs no memory"
            )
        return torch_like.stream(torch_like.Stream())  # type: ignore[no-any-return] # as `torch.cuda` has it

    def show_best(self, cfg: LaunchConfig) -> None:
        """Let the autotuner show a configuration as its best, as Triton does at each launch."""
        self._autotuner.best_config = cfg.config

    def detached(self, inv: Invocation[LaunchConfig, Any]) -> Invocation[LaunchConfig, Any]:
        """Return a launch without its arguments, which answers for its candidates and its heuristic as before."""
        launch = Launch(None, (), {})
        launch.candidates = self.candidate_cfgs(inv)
        launch.heuristic = self.heuristic(inv)
        return replace(inv, args=(launch,), override_cfg=None)

    def grid_of(self, launch: Launch, cfg: LaunchConfig) -> tuple[int, ...]:
        """Return the grid of a launch with a configuration."""
        return tuple(launch.grid(self._bind_names(launch, cfg)) if callable(launch.grid) else launch.grid)

    def blocks_of(self, launch: Launch, cfg: LaunchConfig) -> int | None:
        """Return how many blocks a launch has with a configuration; None if it has no grid, or the grid fails."""
        try:
            return None if launch.grid is None else math.prod(map(int, self.grid_of(launch.measured, cfg)))
        except OF_AUTHORS:
            return None

    def _bind_names(self, launch: Launch, cfg: LaunchConfig | None) -> dict[str, Any]:
        """Return the arguments by name, with defaults; with a configuration, also its values and the heuristics'."""
        parameters = inspect.signature(self.function).parameters.values()
        defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
        values = {**defaults, **launch.named(self.names)}
        if cfg is not None:
            values |= cfg.meta
            for heuristics in self.heuristics:
                for name, compute in heuristics.items():
                    values[name] = compute(values)
        return {name: value for name, value in values.items() if name in self.names}

    def variables(self, launch: Launch, cfg: LaunchConfig | None = None) -> dict[str, Any]:
        """Return the arguments by name that are not compiled in, with defaults."""
        constants = {parameter.name for parameter in self.chain[-2].params if parameter.is_constexpr}
        return {name: value for name, value in self._bind_names(launch, cfg).items() if name not in constants}

    def run(self, *call: Any, cfg: LaunchConfig, **_named: Any) -> Any:
        """Launch with a configuration; the first argument unpacks to grid, positional and keyword arguments."""
        grid, args, kwargs = call[0]
        if cfg.pre_hook is not None:
            cfg.pre_hook({**Launch(grid, args, kwargs).named(self.names), **cfg.meta})
        return self.direct.run(cfg, grid, args, kwargs)

    def mutated(self, inv: Invocation[LaunchConfig, Any]) -> Sequence[object]:  # noqa: ARG002 - see below
        """Return nothing: `SavedTensors` puts tensors back, outside of the timed window."""
        return ()
