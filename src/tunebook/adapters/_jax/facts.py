"""What a jax call depends on beside its arguments: settings, the mesh, batching by vmap, shardings.

It is part of the call's key, and enough to stage the call again where it is tuned. An ordinary call has none of it::

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

from tunebook._arrays.describe import ArraySpec, is_array
from tunebook.adapters._jax.vmap import vmaps_around

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tunebook._base.vocabulary import Json

# The settings that decide which program a call of the same arguments is. jax names them as the functions that set them
# for a block, which are also what says how they are set now.
KEYED: Final = {"enable_x64": False, "default_matmul_precision": None, "default_prng_impl": "threefry2x32"}
# These have to be there too when the call runs elsewhere.
CAPTURED: Final = (*KEYED, "default_device", "numpy_dtype_promotion", "numpy_rank_promotion")


class Level(NamedTuple):
    """One vmap around a call, as one array sees it: `depth` is how many vmaps there are around that one."""

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
    """What a call depends on beside its arguments; `array_mesh` is that of its arrays, if another one is in force."""

    settings: tuple[tuple[str, Json], ...] = ()
    mesh: tuple[MeshAxis, ...] = ()
    array_mesh: tuple[MeshAxis, ...] = ()
    vmap: tuple[tuple[int, Level], ...] = ()
    sharding: tuple[tuple[int, tuple[Any, ...]], ...] = ()

    def to_json(self) -> dict[str, Json]:
        """Return it for a key; empty for an ordinary call."""
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
        """Read what `to_json` made."""
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


def is_jax_array(x: object) -> bool:
    """Return whether this is an array to jax: one of its own, one of a trace, one of numpy's, or a description."""
    return isinstance(x, (jax.Array, jax.ShapeDtypeStruct)) or is_array(x)


def array_leaves(arguments: object) -> list[Any]:
    """Return the arrays among some arguments, in the order in which jax finds them."""
    return [leaf for leaf in jax.tree.leaves(arguments) if is_jax_array(leaf)]


def facts_of(arguments: object) -> TraceFacts:
    """Return what a call with these arguments depends on, here and now."""
    arrays = array_leaves(arguments)
    mesh = _axes([jax.sharding.get_abstract_mesh()])
    array_mesh = _axes([_mesh_of(x) for x in arrays])
    return TraceFacts(
        settings=settings_facts(),
        mesh=mesh,
        array_mesh=() if array_mesh == mesh else array_mesh,
        vmap=tuple(max(_found_by_vmap(arrays), _batching(arrays), key=_depths)),
        sharding=tuple(_shardings(arrays)),
    )


def settings_facts() -> tuple[tuple[str, Json], ...]:
    """Return the settings that are not as jax comes."""
    values = {name: getattr(jax, name).value for name in KEYED}
    return tuple((name, value) for name, value in values.items() if value != KEYED[name])


# ------------------------------------------------------------------------------------------------------------- vmap


def _found_by_vmap(arrays: Sequence[Any]) -> list[tuple[int, Level]]:
    """Return the vmaps around a call as our own `vmap` has found them, in the order of `_batching`."""
    batches = vmaps_around(arrays)
    return [
        (index, Level(-place, axis, batch.size, batch.name))
        for index in range(len(arrays))
        for place, batch in enumerate(batches)
        if (axis := batch.axes[index]) is not None
    ]


def _batching(arrays: Iterable[Any]) -> list[tuple[int, Level]]:
    return [(index, level) for index, x in enumerate(arrays) for level in levels(x)]


def _depths(found: Iterable[tuple[int, Level]]) -> int:
    return len({level.depth for _, level in found})


def levels(x: Any) -> list[Level]:
    """Return the vmaps that an array is batched by, the innermost first."""
    found = []
    while isinstance(x, jax.core.Tracer):
        inner: Any = getattr(x, "primal", None)  # under a grad
        if type(x).__name__ == "BatchTracer":
            inner = x.val
            if isinstance(x.batch_dim, int):
                found.append(_level(x, inner.shape[x.batch_dim]))
        if inner is None:
            break
        x = inner
    return found


def _level(x: Any, size: int) -> Level:
    name = getattr(getattr(x._trace, "axis_data", None), "name", None)  # noqa: SLF001 - vmap has no public way to ask
    return Level(_depth(x._trace), x.batch_dim, size, name if isinstance(name, str) else None)  # noqa: SLF001 - as above


def _depth(trace: Any) -> int:
    depth, outer = 0, getattr(trace, "parent_trace", None)
    while outer is not None:
        depth, outer = depth + 1, getattr(outer, "parent_trace", None)
    return depth


# ----------------------------------------------------------------------------------------------------- mesh, sharding


def _axes(meshes: Sequence[Any]) -> tuple[MeshAxis, ...]:
    """Return the axes of the first mesh of several devices."""
    mesh = next((m for m in meshes if m is not None and not m.empty and m.size > 1), None)
    return () if mesh is None else axes_of(mesh)


def axes_of(mesh: Any) -> tuple[MeshAxis, ...]:
    """Return the axes of a mesh."""
    kinds = [kind.name for kind in mesh.axis_types]
    return tuple(MeshAxis(str(n), int(mesh.shape[n]), kind) for n, kind in zip(mesh.axis_names, kinds, strict=True))


def mesh_like(axes: Iterable[Sequence[Any]]) -> Any:
    """Return a mesh with such axes, of this process's devices; one without devices if there are not enough."""
    names, sizes, kinds = zip(*axes, strict=True)
    devices = jax.local_devices()[: math.prod(sizes)]
    types = tuple(AxisType[kind] for kind in kinds)
    if len(devices) < math.prod(sizes):
        return jax.sharding.AbstractMesh(sizes, names, axis_types=types)
    return jax.make_mesh(sizes, names, axis_types=types, devices=devices)


def _mesh_of(x: Any) -> Any:
    sharding = _sharding_of(x)
    return sharding.mesh if isinstance(sharding, NamedSharding) else None


def _sharding_of(x: Any) -> Any:
    # The data of a real array are where its own sharding says; its type says so for an explicit mesh only.
    return getattr(x.aval if isinstance(x, jax.core.Tracer) else x, "sharding", None)


def _shardings(arrays: Iterable[Any]) -> Iterable[tuple[int, tuple[Any, ...]]]:
    for index, x in enumerate(arrays):
        sharding = None if isinstance(x, ArraySpec) else _sharding_of(x)
        if isinstance(sharding, NamedSharding) and sharding.mesh.size == 1:
            continue
        if isinstance(sharding, NamedSharding):
            parts = tuple(sharding.spec) + (None,) * (len(x.shape) - len(sharding.spec))
            if any(part is not None for part in parts):
                yield index, tuple(_part(part) for part in parts)
        elif sharding is not None and len(sharding.device_set) > 1:
            yield index, tuple(int(n) for n in sharding.shard_shape(x.shape))


def _part(part: Any) -> Any:
    if part is PartitionSpec.UNCONSTRAINED:
        return "*"
    return tuple(map(str, part)) if isinstance(part, tuple) else part
