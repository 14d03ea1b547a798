"""JAX: tunable calls inside jit, grad, vmap, scan and shard_map.

`@tunable` functions and `Kernel`s just work on jax arrays: this module is imported when it is needed. A call is tuned
on real arrays and compiled programs, also while it is being traced, and nothing of it stays in the user's program. The
settings, meshes, shardings and axes of vmaps are part of a call's key.
"""

from __future__ import annotations

import sys
from numbers import Integral
from types import NoneType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import jax
import numpy as np

from tunebook._arrays.describe import arrays_in, describe, platform_of
from tunebook._arrays.library import ArgumentReader, ArrayLibrary, register_array_library
from tunebook._base.config_codec import register_codec
from tunebook._base.errors import Unsupported
from tunebook._keys.call_key import register_key
from tunebook.adapters._jax.agree import agree as agree  # noqa: PLC0414 - public here
from tunebook.adapters._jax.context import jit as jit  # noqa: PLC0414 - public here
from tunebook.adapters._jax.context import record as record  # noqa: PLC0414 - public here
from tunebook.adapters._jax.context import refresh as refresh  # noqa: PLC0414 - public here
from tunebook.adapters._jax.facts import KEYED, TraceFacts, array_leaves, axes_of, facts_of, levels, mesh_like
from tunebook.adapters._jax.kernel import backward_autotune_only as backward_autotune_only  # noqa: PLC0414 - public here
from tunebook.adapters._jax.kernel import bind, jitted, labelled
from tunebook.adapters._jax.profiler import ProfilerTimer, timer_on
from tunebook.adapters._jax.settings import HOOKED, SETTINGS
from tunebook.adapters._jax.staging import TracedCall, made_up, weak
from tunebook.adapters._jax.tune import tune as tune  # noqa: PLC0414 - public here
from tunebook.adapters._jax.vmap import seen_here
from tunebook.adapters._jax.vmap import vmap as vmap  # noqa: PLC0414 - public here

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    from tunebook._arrays.library import ArraySpec
    from tunebook._base.vocabulary import Json
    from tunebook._kernel.kernel import Invocation

__all__ = ["agree", "backward_autotune_only", "jit", "record", "refresh", "tune", "vmap"]


def _class(module: str, name: str) -> type:
    """Return a class that jax does not export; in another jax, a class that no array has, and lookups are slower."""
    return getattr(sys.modules.get(module), name, NoneType)


_ARRAY: Final = _class("jaxlib._jax", "ArrayImpl")
_TRACER: Final = _class("jax._src.interpreters.partial_eval", "DynamicJaxprTracer")
_AROUND: Final = (*(getattr(jax, name) for name in KEYED), jax.default_device)


def _around() -> Hashable:
    """Return the state of jax that every call's key depends on, here and now."""
    return jax.sharding.get_abstract_mesh(), seen_here(), *(setting.value for setting in _AROUND)


# The hot path reads these when no number stands for the settings of all threads.
_READ: Final = SETTINGS.for_all, *((SETTINGS.own,) if HOOKED else (getattr(jax, name) for name in KEYED))


def _read() -> tuple[Hashable, ...]:
    # The default device cannot be packed. It matters only where there are several devices, which avals do not name.
    return *[setting.value for setting in _READ], jax.default_device.value


class _Jax:
    """Answers the core's questions about calls with jax arrays."""

    def surroundings(self, arguments: object) -> Mapping[str, Json]:
        found = facts_of(arguments).to_json()
        return {"@jax": found} if found else {}

    def obstacle(self, arguments: object) -> str | None:
        for x in array_leaves(arguments):
            if not all(isinstance(n, int) for n in x.shape):
                return f"the shape ({', '.join(map(str, x.shape))}) is symbolic, so there is nothing to measure on"
        return None

    def is_traced(self, arguments: object) -> bool:
        return any(isinstance(x, jax.core.Tracer) for x in array_leaves(arguments))

    def capture(self, inv: Invocation[Any, Any]) -> TracedCall:
        if inv.surroundings is not None:
            return TracedCall(inv, TraceFacts.from_json(inv.surroundings.get("@jax", {})))
        return TracedCall(inv, facts_of((inv.args, inv.kwargs)))

    bind = staticmethod(bind)
    jitted = staticmethod(jitted)
    labelled = staticmethod(labelled)


def _make(spec: ArraySpec, rng_seed: int) -> Any:
    dtype = jax.random.key(0).dtype if spec.dtype.startswith("key<") else jax.numpy.dtype(spec.dtype)
    if spec.variant == _WEAK:
        return weak(spec.shape, dtype)
    return made_up(spec.shape, dtype, rng_seed)


def _values(x: Any) -> Any:
    readable = not isinstance(x, jax.core.Tracer) and x.is_fully_addressable  # not on other hosts
    return np.asarray(x) if readable else None


def _placeholder(x: Any, shape: tuple[int, ...]) -> Any:
    if not isinstance(x, jax.core.Tracer):
        return None
    return jax.ShapeDtypeStruct(shape, x.dtype, weak_type=bool(_variant(x)))


def _duplicate(x: Any) -> Any:
    """Return a copy of an array in memory of its own, on the same devices."""
    if isinstance(x, jax.core.Tracer):
        raise Unsupported("an array in a trace has no values to copy")
    if _variant(x):
        return weak(x.shape, x.dtype)  # its values are Python numbers, which no program reads from memory
    return jax.numpy.copy(x)


def _timer(arguments: object) -> ProfilerTimer | None:
    """Return the clock of the device that a call with these arguments runs on; None is the host's."""
    arrays = [x for x in arrays_in(arguments) if isinstance(x, jax.Array)]
    devices = [device for x in arrays if not isinstance(x, jax.core.Tracer) for device in x.devices()]
    device = next(iter(devices or jax.devices()))
    return None if not arrays or device.platform == "cpu" else timer_on(device)


# -------------------------------------------------------------------------------------- how an array is described


class _MeshOf(NamedTuple):
    """Stands for several devices of the same kind that are not known."""

    device: Any
    size: int

    @property
    def members(self) -> list[Any]:
        return [self.device] * self.size


def _default_device() -> object:
    return jax.config.jax_default_device or jax.local_devices()[0]


def _accelerator() -> object | None:
    device = _default_device()
    return None if platform_of(device) == "cpu" else device


def _device(x: Any) -> object | None:
    """Return the device, or the sharding, of an array; for a traced or described one, the default device."""
    device: object | None = getattr(x, "device", None)
    if device is not None:
        return device
    sharding = getattr(getattr(x, "aval", x), "sharding", None)
    mesh = getattr(sharding, "mesh", None)
    default = _default_device()
    if mesh is None:
        return default if sharding is None else sharding
    local = mesh.empty or all(kind.name == "Manual" for kind in mesh.axis_types)  # inside shard_map: one device's part
    return default if local or mesh.size == 1 else _MeshOf(default, mesh.size)


_WEAK: Final = "weak"  # a weakly typed array takes the dtype of the array that it meets, which makes another program


def _variant(x: Any) -> str:
    return _WEAK if getattr(getattr(x, "aval", x), "weak_type", False) else ""


def _shape(x: Any) -> Any:
    # A symbol stands under its name: the heuristic may well answer a call with one.
    return tuple(int(n) if isinstance(n, Integral) else str(n) for n in x.shape)


def _fast_key(x: Any) -> Hashable:
    kind = type(x)
    if kind is _ARRAY:
        return x.aval, x.sharding, _around()
    if kind is _TRACER:
        return x.aval, _around()  # its aval says all; tracers of other classes hide a vmap
    where = tuple(levels(x)) if isinstance(x, jax.core.Tracer) else getattr(x, "sharding", None)
    return getattr(x, "aval", None) or describe(x), where, _around()


# Avals are interned, so that three of them cost as much as a numpy array. They do not say which device an array is
# on. A number stands for the settings until a thread has some of its own: see `_jax/settings.py`.
_SETTINGS: Final = "_tb_jax_settings[0] or _tb_jax_read(), "
_ON_ONE_DEVICE: Final = ArgumentReader(
    "(_tb_type({0}) is _tb_jax_array or _tb_type({0}) is _tb_jax_tracer)", "{0}.aval", settings=_SETTINGS
)
_READERS: Final = {  # a mesh has several devices
    _ARRAY: ArgumentReader(
        "_tb_type({0}) is _tb_jax_array", "{0}.aval, {0}.sharding", settings=f"{_SETTINGS}_tb_jax_mesh(), "
    ),
    _TRACER: ArgumentReader("_tb_type({0}) is _tb_jax_tracer", "{0}.aval", settings=f"{_SETTINGS}_tb_jax_mesh(), "),
}


def _reader(kind: type, _layout: bool) -> ArgumentReader | None:  # noqa: FBT001 - a field of the record
    found = _READERS.get(kind)
    return _ON_ONE_DEVICE if found is not None and _has_one_device() else found


def _has_one_device() -> bool:
    """Return whether all jax arrays of this process are on the same device; an array's aval then says all."""
    # A process with an accelerator has the host as its second device, and names it second unless told otherwise.
    return (jax.config.jax_platforms or "cpu") == "cpu" and [device.platform for device in jax.devices()] == ["cpu"]


register_array_library(
    ArrayLibrary(
        name="jax",
        shape=_shape,
        device=_device,
        accelerator=_accelerator,
        variant=_variant,
        # An array does not change. A tracer's class lives in jax, not in jaxlib: in a trace there is nothing to time.
        is_restorable=lambda x: type(x).__module__.startswith("jaxlib"),
        fast_key=_fast_key,
        reader=_reader,
        hot_names={
            "_tb_type": type,  # a tracer's `__class__` takes 50 ns to read
            "_tb_jax_array": _ARRAY,
            "_tb_jax_tracer": _TRACER,
            "_tb_jax_settings": SETTINGS.number,
            "_tb_jax_read": _read,
            "_tb_jax_mesh": jax.sharding.get_abstract_mesh,
        },
        packed=lambda: (_ARRAY, _TRACER, "aval", "value", SETTINGS.number, *_READ) if _has_one_device() else None,
        timer=_timer,
        timer_as=lambda arguments, cold, graph: None if cold or graph else _timer(arguments),
        duplicate=_duplicate,
        make=_make,
        values=_values,
        with_values=lambda _x, values: jax.numpy.asarray(values),
        placeholder=_placeholder,
        framework=_Jax(),
        mesh_classes=lambda: (jax.sharding.Mesh, jax.sharding.PartitionSpec),
    )
)
register_key(jax.sharding.Mesh, lambda mesh: (tuple(mesh.shape.items()), tuple(kind.name for kind in mesh.axis_types)))
register_key(
    jax.sharding.AbstractMesh, lambda mesh: (tuple(mesh.shape.items()), tuple(kind.name for kind in mesh.axis_types))
)
register_key(jax.sharding.PartitionSpec, tuple)
register_codec(jax.sharding.Mesh, lambda mesh: [list(axis) for axis in axes_of(mesh)], mesh_like)
register_codec(jax.sharding.PartitionSpec, list, lambda parts: jax.sharding.PartitionSpec(*parts))
register_key(jax.sharding.NamedSharding, lambda sharding: (sharding.mesh, sharding.spec))


def __dir__() -> list[str]:
    return sorted(__all__)
