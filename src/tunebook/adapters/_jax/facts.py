"""The facts that a jax call depends on beside its arguments: settings, the mesh, batching by vmap, shardings.

They are part of the call's key, and enough to stage the call again where it is tuned. An ordinary call has none::

    {"settings": {"enable_x64": true}, "mesh": [["data", 8, "Manual"]],
     "vmap": [[0, 0, 0, 16, "i"]], "sharding": [[0, ["data", null]]]}

A row of "vmap" is the argument's place among the arrays, the level counted from the innermost vmap, the axis, its size,
and its name.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from tunebook.adapters._jax.kernel import is_jax_array
from tunebook.adapters._jax.vmap import vmaps_around

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tunebook._base.vocabulary import Json

# The settings that decide which program a call with the same arguments is, and their values in a fresh jax. jax names
# each setting like the function that sets it for a block; the function also has the present value.
KEYED: Final = {"enable_x64": False, "default_matmul_precision": None, "default_prng_impl": "threefry2x32"}
# The settings that a call also needs when it runs elsewhere.
CAPTURED: Final = (*KEYED, "default_device", "numpy_dtype_promotion", "numpy_rank_promotion")


class Level(NamedTuple):
    """One vmap around a call, as one array sees it: `depth` is the number of vmaps around that vmap."""

    depth: int
    axis: int
    size: int
    name: str | None


class MeshAxis(NamedTuple):
    """An axis of a mesh; `kind` is "Auto", "Explicit" or, inside shard_map, "Manual"."""

    name: str
    size: int
    kind: str


class TraceFacts(NamedTuple):
    """The facts of a call; `array_mesh` is the mesh of its arrays, if it differs from the mesh in force."""

    settings: tuple[tuple[str, Json], ...] = ()
    mesh: tuple[MeshAxis, ...] = ()
    array_mesh: tuple[MeshAxis, ...] = ()
    vmap: tuple[tuple[int, Level], ...] = ()
    sharding: tuple[tuple[int, tuple[Any, ...]], ...] = ()

    def to_json(self) -> dict[str, Json]:
        """Return the facts for a key; empty for an ordinary call."""
        depths = sorted({level.depth for _, level in self.vmap}, reverse=True)
        found: dict[str, Json] = {
            "settings": dict(self.settings),
            "mesh": [list(axis) for axis in self.mesh],
            "array_mesh": [list(axis) for axis in self.array_mesh],
            "vmap": [[i, depths.index(v.depth), v.axis, v.size, v.name] for i, v in self.vmap],
            "sharding": [[i, [list(p) if isinstance(p, tuple) else p for p in spec]] for i, spec in self.sharding],
        }
        return {name: value for name, value in found.items() if value}

    @classmethod
    def from_json(cls, found: Any) -> TraceFacts:
        """Return the facts that `to_json` wrote."""
        return cls(
            settings=tuple(found.get("settings", {}).items()),
            mesh=tuple(MeshAxis(*axis) for axis in found.get("mesh", ())),
            array_mesh=tuple(MeshAxis(*axis) for axis in found.get("array_mesh", ())),
            vmap=tuple((i, Level(-level, axis, size, name)) for i, level, axis, size, name in found.get("vmap", ())),
            sharding=tuple(
                (i, tuple(tuple(p) if isinstance(p, list) else p for p in spec))
                for i, spec in found.get("sharding", ())
            ),
        )


def array_leaves(arguments: object) -> list[Any]:
    """Return the arrays among some arguments, in the order in which jax finds them."""
    return [leaf for leaf in jax.tree.leaves(arguments) if is_jax_array(leaf)]


def facts_of(arguments: object) -> TraceFacts:
    """Return the facts of a call with these arguments, here and now."""
    arrays = array_leaves(arguments)
    settings = {name: getattr(jax, name).value for name in KEYED}
    mesh = _axes([jax.sharding.get_abstract_mesh()])
    # The sharding of a real array says where its data are; its type says so for an explicit mesh only.
    shardings = [getattr(x.aval if isinstance(x, jax.core.Tracer) else x, "sharding", None) for x in arrays]
    array_mesh = _axes([s.mesh for s in shardings if isinstance(s, NamedSharding)])
    batches = vmaps_around(arrays)
    by_our_vmap = [
        (index, Level(-place, axis, batch.size, batch.name))
        for index in range(len(arrays))
        for place, batch in enumerate(batches)
        if (axis := batch.axes[index]) is not None
    ]
    by_tracers = [(index, level) for index, x in enumerate(arrays) for level in levels(x)]
    seen_most = max(by_our_vmap, by_tracers, key=lambda found: len({level.depth for _, level in found}))
    return TraceFacts(
        settings=tuple((name, value) for name, value in settings.items() if value != KEYED[name]),
        mesh=mesh,
        array_mesh=() if array_mesh == mesh else array_mesh,
        vmap=tuple(seen_most),
        sharding=tuple(_parts(arrays, shardings)),
    )


def levels(x: Any) -> list[Level]:
    """Return the vmaps that an array is batched by, innermost first."""
    found = []
    while isinstance(x, jax.core.Tracer):
        inner: Any = getattr(x, "primal", None)  # under a grad
        if type(x).__name__ == "BatchTracer":
            inner, trace = x.val, x._trace  # noqa: SLF001 - vmap has no public way to ask
            if isinstance(x.batch_dim, int):
                name = getattr(getattr(trace, "axis_data", None), "name", None)
                depth = -1
                while trace is not None:
                    depth, trace = depth + 1, getattr(trace, "parent_trace", None)
                size = inner.shape[x.batch_dim]
                found.append(Level(depth, x.batch_dim, size, name if isinstance(name, str) else None))
        if inner is None:
            break
        x = inner
    return found


def _axes(meshes: Sequence[Any]) -> tuple[MeshAxis, ...]:
    """Return the axes of the first mesh of several devices."""
    mesh = next((m for m in meshes if not m.empty and m.size > 1), None)
    return () if mesh is None else axes_of(mesh)


def axes_of(mesh: Any) -> tuple[MeshAxis, ...]:
    """Return the axes of a mesh."""
    kinds = [kind.name for kind in mesh.axis_types]
    return tuple(MeshAxis(str(n), int(mesh.shape[n]), kind) for n, kind in zip(mesh.axis_names, kinds, strict=True))


def mesh_like(axes: Iterable[Sequence[Any]]) -> Any:
    """Return a mesh with these axes, of this process's devices; a mesh without devices if there are not enough."""
    names, sizes, kinds = zip(*axes, strict=True)
    devices = jax.local_devices()[: math.prod(sizes)]
    types = tuple(AxisType[kind] for kind in kinds)
    if len(devices) < math.prod(sizes):
        return jax.sharding.AbstractMesh(sizes, names, axis_types=types)
    return jax.make_mesh(sizes, names, axis_types=types, devices=devices)


def _parts(arrays: Sequence[Any], shardings: Sequence[Any]) -> Iterable[tuple[int, tuple[Any, ...]]]:
    """Yield the place and the partition of each array that is spread over several devices."""
    for index, (x, sharding) in enumerate(zip(arrays, shardings, strict=True)):
        if isinstance(sharding, NamedSharding):
            parts = tuple(sharding.spec) + (None,) * (len(x.shape) - len(sharding.spec))
            if sharding.mesh.size > 1 and any(part is not None for part in parts):
                named = ["*" if part is PartitionSpec.UNCONSTRAINED else part for part in parts]
                yield index, tuple(tuple(map(str, part)) if isinstance(part, tuple) else part for part in named)
        elif sharding is not None and len(sharding.device_set) > 1:
            yield index, tuple(int(n) for n in sharding.shard_shape(x.shape))
