"""What a framework knows about a call that its arguments do not say: asked through here, imported when first met.

A jax function is called with tracers, under settings of its thread, batched by a vmap around it, on a part of a mesh.
All of that decides which program runs, so it is part of the call's key, and has to be there again when the call is
tuned: elsewhere, later, on arrays made for it. An adapter registers itself as a `Framework`, and the core asks it.
"""

from __future__ import annotations

import importlib
import operator
import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeVar

from tunebook._arrays.describe import libraries_of

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping
    from contextlib import AbstractContextManager

T = TypeVar("T")


class TuningSite(NamedTuple):
    """A call on arrays that exist, in the place where its candidates are to run.

    `inv` is the call as the kernel sees it. Candidates are called with `args` and `kwargs`, which are larger where the
    call is batched. `bind(kernel, inv, config)` returns a function that runs the call. Given what makes such functions
    from configurations, `programs(bind, backward)` returns what makes those that are measured, and what compiles them
    ahead, or None if that is the kernel's to say. `differentiable(function)` says whether a backward pass can be
    measured, `passes` what is then measured, and `in_place` whether candidates may write to their arguments.
    `one_of(output)` returns the part of an output that `inv` would give. `with_inputs(args, kwargs)` returns the stage
    with other arguments for the call; None where its arguments are the user's own.
    """

    inv: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    bind: Callable[[Any, Any, Any], Callable[..., Any]]
    programs: Callable[
        [Callable[[Any], Callable[..., Any]], bool], tuple[Callable[[Any], Any], Callable[[Any], Any] | None]
    ]
    differentiable: Callable[[Callable[..., Any]], bool]
    passes: str = "forward+backward"
    in_place: bool = False
    one_of: Callable[[Any], Any] = lambda output: output
    with_inputs: Callable[[tuple[Any, ...], Mapping[str, Any]], Any] | None = None


class CapturedCall(Protocol):
    """A call, kept without its arrays' data where that does not exist yet; may be tuned later and by any thread."""

    def site(self) -> AbstractContextManager[tuple[TuningSite, Callable[..., Any]]]:
        """Give the place where candidates may run, and `there(function, *args)`, which calls a function in it.

        The place may be another thread; the caller's settings are in force in it.
        """


class Framework(Protocol):
    """What an adapter answers. Its methods are called only with arguments among which are arrays of its library."""

    @property
    def hot_names(self) -> Mapping[str, object]:
        """What the generated code of `_signature` refers to, by name."""

    def leaf(self, x: Any) -> Hashable:
        """Return what is equal for two arrays only if calls with them here and now have the same key."""

    def surroundings(self, arguments: object) -> Mapping[str, Any]:
        """Return what a call depends on beside its arguments, for its key; empty for an ordinary call."""

    def obstacle(self, arguments: object) -> str | None:
        """Return why such a call cannot be tuned, or None."""

    def capture(self, inv: Any) -> CapturedCall:
        """Return a call so that it can be tuned, with the settings of this thread."""

    def bind(self, kernel: Any, inv: Any, cfg: Any) -> Callable[..., Any]:
        """Return what runs a call with a configuration, given its arguments, in the user's program."""

    def jitted(self, function: Callable[..., T]) -> Callable[..., T]:
        """Return a function compiled as a whole."""


_ADAPTERS: Final = {
    "cupy": "tunebook.adapters.cupy",
    "jax": "tunebook.adapters.jax",
    "pyopencl": "tunebook.adapters.opencl",
    "torch": "tunebook.adapters.torch",
}
_known: Final[dict[str, Framework]] = {}


def register_framework(library: str, framework: Framework) -> None:
    """Let a framework be asked about calls with arrays of its library."""
    _known[library] = framework


def framework_of(arguments: object) -> Framework | None:
    """Return the framework whose arrays are among some arguments, and import its adapter if need be."""
    loaded = [load_framework(library) for library in sorted(libraries_of(arguments) & _ADAPTERS.keys())]
    return next(filter(None, loaded), None)


def framework_for(library: str) -> Framework | None:
    """Return the framework of a library, or None if it needs no adapter; it is imported if need be."""
    return load_framework(library) if library in _ADAPTERS else None


def load_framework(library: str) -> Framework | None:
    """Import an adapter if that has not been done, and return what it registered: some have nothing to be asked."""
    if library not in _known:
        importlib.import_module(_ADAPTERS[library])
    return _known.get(library)


def load_frameworks() -> None:
    """Import the adapters of the frameworks that this process uses, before something changes for them."""
    for library in _ADAPTERS:
        module = sys.modules.get(library)
        # A package that is being imported is in there too, but does not have what is defined last in it.
        if library not in _known and getattr(module, "version", None) is not None:
            load_framework(library)


def surroundings_of(arguments: object) -> Mapping[str, Any]:
    """Return what a call depends on beside its arguments, for its key."""
    framework = framework_of(arguments)
    return {} if framework is None else framework.surroundings(arguments)


def obstacle_to(inv: Any) -> str | None:
    """Return why a call cannot be tuned at all, or None."""
    framework = framework_of((inv.args, inv.kwargs))
    return None if framework is None else framework.obstacle((inv.args, inv.kwargs))


def tuning_site(inv: Any) -> AbstractContextManager[tuple[TuningSite | None, Callable[..., Any]]]:
    """Give the place where candidates of a call may run, and `there(function, *args)`, which calls a function in it.

    Without a framework the place is None, and functions are called right here, in the caller's thread.
    """
    framework = framework_of((inv.args, inv.kwargs))
    return nullcontext((None, operator.call)) if framework is None else framework.capture(inv).site()


def at_tuning_site(inv: Any, work: Callable[[TuningSite | None], T]) -> T:
    """Call `work` with the place where candidates of a call may run, in that place."""
    with tuning_site(inv) as (site, there):
        return there(work, site)  # type: ignore[no-any-return] # a function of any kind


def is_compiling() -> bool:
    """Whether torch's compiler reads the running code to make a program of it, instead of running it."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.compiler.is_dynamo_compiling())


def hot_names() -> dict[str, object]:
    """Return what generated code may refer to."""
    return {name: value for framework in _known.values() for name, value in framework.hot_names.items()}


def mesh_classes() -> tuple[type, ...]:
    """Return the classes by which jax spreads a call over a mesh; its adapter says how they are written down."""
    load_framework("jax")
    sharding = sys.modules["jax"].sharding
    return sharding.Mesh, sharding.PartitionSpec


def jax_has_one_device() -> bool:
    """Whether all jax arrays of this process are on the same device; nothing but an array's aval counts then."""
    jax = sys.modules["jax"]
    # A process with an accelerator has the host as its second device, and names it second unless told otherwise.
    return (jax.config.jax_platforms or "cpu") == "cpu" and [device.platform for device in jax.devices()] == ["cpu"]
