"""Runs kernels with the configurations that a chooser gives them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypeVar

from tunebook._arrays.describe import framework_of
from tunebook._base.environment_variables import recording_wanted
from tunebook._base.errors import DefinitionError
from tunebook._kernel.kernel import PLACEMENT, Invocation, Kernel
from tunebook._selection.recording import REGISTRY, recordings
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

    def __init__(self, chooser: ConfigChooser) -> None:
        self.chooser: Final = chooser

    def __call__(
        self,
        kernel: Kernel[Cfg, Out],
        *args: Any,
        cfg: Cfg | None = None,
        method: str | None = None,
        mesh: Any = None,
        in_specs: Any = None,
        out_specs: Any = None,
        check_vma: bool = False,
        **kwargs: Any,
    ) -> Out:
        """Run a kernel; `cfg` overrides the choice for this call. `method="shard_map"` needs mesh and specs."""
        inv = _invocation(
            kernel, args, kwargs, cfg,
            method=method, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma,
        )  # fmt: skip
        if isinstance(self.chooser, ConfigSelectorChain):
            selection = self.chooser.select(inv, kernel)
            if selection.exploration is not None:
                return selection.exploration.run(inv.args, inv.kwargs)  # type: ignore[no-any-return]
            chosen: Cfg = selection.config
        else:
            chosen = self.chooser.choose(inv, kernel)
        noted = recordings()
        if recording_wanted():
            noted = (*noted, REGISTRY)
        if not noted:
            return _bind(kernel, inv, chosen)(*inv.args, **inv.kwargs)  # type: ignore[no-any-return]
        start = time.perf_counter()
        out: Out = _bind(kernel, inv, chosen)(*inv.args, **inv.kwargs)
        call = kernel.problem(inv), kernel, inv.args, inv.kwargs, time.perf_counter() - start, inv.placement()
        for recording in noted:
            recording.observe(*call, selector=self.chooser, latest=recording is REGISTRY)
        return out

    def choose_config(self, kernel: Kernel[Cfg, Out], *args: Any, cfg: Cfg | None = None, **kwargs: Any) -> Cfg:
        """Return the configuration of a call with these arguments, as `__call__` takes them; a miss is tuned."""
        placement = {name: kwargs.pop(name) for name in PLACEMENT if name in kwargs}
        return self.chooser.choose(_invocation(kernel, args, kwargs, cfg, **placement), kernel)  # type: ignore[no-any-return]

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
    args, kwargs = kernel.prepare(*args, **kwargs)
    return Invocation(kernel.op_id, args, kwargs, override_cfg=cfg, **placement)
