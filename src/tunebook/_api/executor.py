"""Runs kernels with the configurations that a chooser gives them."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypeVar

from tunebook._arrays.describe import framework_of
from tunebook._base.environment_variables import recording_wanted, stamp_form
from tunebook._base.errors import DefinitionError
from tunebook._base.record_format import blake2b
from tunebook._hotpath.kernel_memo import KernelMemo
from tunebook._kernel.kernel import PLACEMENT, Invocation, Kernel
from tunebook._selection.invocation_registry import REGISTRY
from tunebook._selection.recording import recordings
from tunebook._selection.selector import ConfigSelectorChain

if TYPE_CHECKING:
    from collections.abc import Callable

Cfg = TypeVar("Cfg")
Out = TypeVar("Out")


class ConfigChooser(Protocol):
    """Returns the configuration for a call, as a selector does."""

    def choose(self, inv: Invocation[Any, Any], kernel: Kernel[Any, Any]) -> Any:
        """Return the configuration for a call."""


class Executor(Generic[Cfg, Out]):
    """Prepares a call, has its configuration chosen, and runs the kernel's variant for the platform at hand.

    With `TUNEBOOK_RECORD=1` in the environment, `get_invocations` returns its calls; `autotune_recorded` tunes them.
    """

    def __init__(self, chooser: ConfigChooser, stamp_prefix: str = "tunebook") -> None:
        self.chooser: Final = chooser
        self.stamp_prefix: Final = stamp_prefix
        self._memo = KernelMemo(chooser) if isinstance(chooser, ConfigSelectorChain) else None

    def __repr__(self) -> str:
        return f"<Executor of {self.chooser!r}>"

    def __call__(
        self,
        kernel: Kernel[Cfg, Out],
        *args: Any,
        cfg: Cfg | None = None,
        stamp: bool = True,
        method: str | None = None,
        mesh: Any = None,
        in_specs: Any = None,
        out_specs: Any = None,
        check_vma: bool = False,
        **kwargs: Any,
    ) -> Out:
        """Run a kernel. `cfg`, or `_cfg`, overrides the choice for this call.

        `method="shard_map"` needs mesh and specs. `stamp` puts a label around the kernel's operations in the compiled
        program, for profilers, where the environment variable `EJKERNEL_OPS_STAMP` asks for one: "hash" or "json".
        """
        inv = _invocation(
            kernel, args, kwargs, cfg,
            method=method, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma,
        )  # fmt: skip
        chosen, exploration = self._choose(inv, kernel)
        if exploration is not None:
            return exploration.run(inv.args, inv.kwargs)  # type: ignore[no-any-return]
        function = _bind(kernel, inv, chosen)
        if stamp and (form := stamp_form()) is not None:
            function = _stamped(function, _label(self.stamp_prefix, form, kernel, inv, chosen), inv)
        noted = (*recordings(), REGISTRY) if recording_wanted() else recordings()
        if not noted:
            return function(*inv.args, **inv.kwargs)  # type: ignore[no-any-return]
        problem = kernel.problem(inv)
        # Before the run, which may write to its arguments.
        call = problem, kernel, inv.args, inv.kwargs, inv.placement()
        new = [each.describe(*call, selector=self.chooser, latest=each is REGISTRY) for each in noted]
        start = time.perf_counter()
        out: Out = function(*inv.args, **inv.kwargs)
        seconds = time.perf_counter() - start
        for recording, described in zip(noted, new, strict=True):
            recording.count(problem, described, seconds, latest=recording is REGISTRY)
        return out

    def _choose(self, inv: Invocation[Cfg, Out], kernel: Kernel[Cfg, Out]) -> tuple[Any, Any]:
        """Return the configuration of a call and, while candidates are tried in calls, the session that runs it."""
        if self._memo is None:
            return self.chooser.choose(inv, kernel), None
        return self._memo.choose(inv, kernel)

    def choose_config(self, kernel: Kernel[Cfg, Out], *args: Any, cfg: Cfg | None = None, **kwargs: Any) -> Cfg:
        """Return the configuration of a call with these arguments, as `__call__` takes them; a miss is tuned."""
        placement = {name: kwargs.pop(name) for name in PLACEMENT if name in kwargs}
        chosen, _ = self._choose(_invocation(kernel, args, kwargs, cfg, **placement), kernel)
        return chosen  # type: ignore[no-any-return]

    def compile(
        self, kernel: Kernel[Cfg, Out], *example_args: Any, cfg: Cfg | None = None, **example_kwargs: Any
    ) -> Callable[..., Out]:
        """Choose once, for calls like the example, and return a function that runs with that choice and no lookup.

        A framework that compiles whole functions, as jax does, compiles the returned one.
        """
        inv = _invocation(kernel, example_args, example_kwargs, cfg)
        bound = _bind(kernel, inv, self.chooser.choose(inv, kernel))

        def run(*args: Any, **kwargs: Any) -> Out:
            args, kwargs = kernel.prepare(*args, **kwargs)
            return bound(*args, **kwargs)  # type: ignore[no-any-return]

        framework = framework_of((inv.args, inv.kwargs))
        return run if framework is None else framework.jitted(run)


def _bind(kernel: Kernel[Cfg, Out], inv: Invocation[Cfg, Out], cfg: Cfg) -> Callable[..., Any]:
    """Return the function that runs a call; in a framework with gradients it has the kernel's own backward pass."""
    special = inv.method is not None or kernel.has_backward(inv)
    framework = framework_of((inv.args, inv.kwargs)) if special else None  # not for most kernels: 2 us
    return kernel.bind(inv, cfg) if framework is None else framework.bind(kernel, inv, cfg)


def _invocation(
    kernel: Kernel[Cfg, Out], args: tuple[Any, ...], kwargs: dict[str, Any], cfg: Cfg | None, **placement: Any
) -> Invocation[Cfg, Out]:
    method = placement.get("method")
    if method is not None:
        if method != "shard_map":
            raise DefinitionError(f"method={method!r} is unknown; use None or 'shard_map'")
        missing = [name for name in ("mesh", "in_specs", "out_specs") if placement.get(name) is None]
        if missing:
            raise DefinitionError(f"method='shard_map' of {kernel.op_id!r} also needs {', '.join(missing)}")
    cfg = kwargs.pop("_cfg", cfg)
    args, kwargs = kernel.prepare(*args, **kwargs)
    return Invocation(kernel.op_id, args, kwargs, override_cfg=cfg, **placement)


def _label(prefix: str, form: str, kernel: Kernel[Any, Any], inv: Invocation[Any, Any], cfg: object) -> str:
    """Return the label of a call in a compiled program: its problem as a digest, or in full with the configuration."""
    problem = kernel.problem(inv)
    if form == "json":
        return f"{prefix}#{json.dumps({'op_id': problem.op, 'call_key': problem.call_key, 'cfg': repr(cfg)})}"
    return f"{prefix}#{problem.op}:{blake2b(problem.call_key.encode(), digest_size=8).hexdigest()}"


def _stamped(function: Callable[..., Any], label: str, inv: Invocation[Any, Any]) -> Callable[..., Any]:
    framework = framework_of((inv.args, inv.kwargs))
    return function if framework is None else framework.labelled(function, label)
