"""`vmap` whose axes are in the keys of tunable calls, also of calls inside jit, scan and so on.

`jax.vmap(jax.jit(f))` first makes a program of f for one row, keeps it, and then batches that program. Only an equation
in the program could tell a call in f about the vmap, and the user's program must not have it. So `vmap` traces the
function twice: first for shapes alone, with marker equations in it, whose batching rule finds the axes; then as it is.
"""

from __future__ import annotations

import importlib
import itertools
import json
import weakref
from functools import cache, wraps
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching

from tunebook._base.record_format import blake2b
from tunebook._memo.context_stack import INNERMOST, Scope, scoped
from tunebook._selection.recording import Apart
from tunebook.adapters._jax.context import FreshTraces
from tunebook.adapters._jax.kernel import FlatCall
from tunebook.adapters._jax.settings import SETTINGS

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

T = TypeVar("T")

Site = tuple[tuple[tuple[int, ...], str, bool], ...]  # shape, dtype and weak type of each array of a call


class Batch(NamedTuple):
    """One vmap around a call: `axes` has an axis for each array of the call, None for arrays that are not batched."""

    axes: tuple[int | None, ...]
    size: int
    name: str | None


Findings = dict[Site, tuple[Batch, ...]]

_numbers: Final = itertools.count()
_known: Final[weakref.WeakKeyDictionary[Any, dict[Hashable, Findings]]] = weakref.WeakKeyDictionary()


class AxisSearch(FreshTraces):
    """Collects the vmaps around calls, innermost first. jit does not ask the batching rules of old traces again."""

    def __init__(self) -> None:
        super().__init__()
        self._found: dict[Site, set[tuple[Batch, ...]]] = {}

    def note(self, site: Site, batches: tuple[Batch, ...]) -> None:
        """Note the vmaps around a call that are known so far."""
        self._found.setdefault(site, set()).add(batches)

    def found(self) -> Findings:
        """Return the vmaps around each call; calls that look alike but have different vmaps are left out."""
        # A call is noted several times: before an outer vmap is seen, and before a loop finds that a carry is batched.
        most = {
            site: [one for one in every if not any(other != one and _is_part(one, other) for other in every)]
            for site, every in self._found.items()
        }
        return {site: every[0] for site, every in most.items() if len(every) == 1}


def _is_part(one: Sequence[Batch], other: Sequence[Batch]) -> bool:
    return len(one) <= len(other) and all(
        (a.size, a.name) == (b.size, b.name) and all(x in (None, y) for x, y in zip(a.axes, b.axes, strict=True))
        for a, b in zip(one, other, strict=False)
    )


class FoundAxes:
    """Puts the result of a search in force: the vmaps around calls, by the arrays of the call."""

    def __init__(self, found: Findings) -> None:
        self.found: Final = found
        text = json.dumps([[site, batches] for site, batches in sorted(found.items(), key=str)], default=str)
        self.digest: Final = blake2b(text.encode(), digest_size=12).hexdigest()

    def content(self) -> list[str]:
        """Return equal values for equal findings."""
        return ["vmaps", self.digest]


@cache
def _marker() -> Any:
    """Return the primitive of marker equations, which never run, have no outputs, and are batched like their inputs."""
    # Made when it is first needed, so that programs without `vmap` do not depend on private names of jax.
    effects = importlib.import_module("jax._src.effects")
    # Without an effect the equation would be dropped where a program is differentiated: nothing depends on it.
    effect = type("AxisSearchEffect", (effects.Effect,), {"__doc__": "A search for axes."})
    for allowed in ("control_flow_allowed", "remat_allowed", "custom_derivatives_allowed", "partial_eval_kept"):
        getattr(effects, f"{allowed}_effects").add_type(effect)
    marker = Primitive("tunebook_look")
    marker.multiple_results = True
    marker.def_effectful_abstract_eval(lambda *_avals, **_options: ([], {effect()}))

    def batch(
        around: Any, arrays: Sequence[Any], axes: Sequence[Any], *, site: Site, batches: tuple[Batch, ...]
    ) -> Any:
        name = around.name if isinstance(around.name, str) else None
        _mark(arrays, site, (*batches, Batch(tuple(axes), around.size, name)))
        return [], []

    def differentiate(arrays: Sequence[Any], _tangents: Any, *, site: Site, batches: tuple[Batch, ...]) -> Any:
        _mark(arrays, site, batches)
        return [], []

    batching.fancy_primitive_batchers[marker] = batch
    ad.primitive_jvps[marker] = differentiate
    return marker


def _mark(arrays: Sequence[Any], site: Site, batches: tuple[Batch, ...]) -> None:
    for search in scoped(AxisSearch):
        search.note(site, batches)
    _marker().bind(*arrays, site=site, batches=batches)


def vmaps_around(arrays: Sequence[Any]) -> tuple[Batch, ...]:
    """Return the vmaps that `vmap` found around a call with these arrays, innermost first."""
    if INNERMOST.get() is None or not any(isinstance(x, jax.core.Tracer) for x in arrays):
        return ()
    site = tuple((tuple(x.shape), str(x.dtype), bool(getattr(x, "weak_type", False))) for x in arrays)
    if any(scoped(AxisSearch)):
        _mark(arrays, site, ())
    # The outermost vmap has seen most.
    return next((axes.found[site] for axes in reversed([*scoped(FoundAxes)]) if site in axes.found), ())


def seen_here() -> str | None:
    """Return a digest of all findings in force here; None without findings."""
    if INNERMOST.get() is None:
        return None
    if any(scoped(AxisSearch)):  # never the same twice: each call has to be asked about, even if calls look alike
        return f"looking {next(_numbers)}"
    return " ".join(axes.digest for axes in scoped(FoundAxes)) or None


def vmap(
    function: Callable[..., T],
    in_axes: Any = 0,
    out_axes: Any = 0,
    axis_name: Hashable | None = None,
    axis_size: int | None = None,
    spmd_axis_name: Any = None,
) -> Callable[..., T]:
    """Return `jax.vmap` of a function, whose axes are in the keys of all tunable calls inside.

    The axes of plain `jax.vmap` are in the keys of calls with only transformations in between. These axes are also seen
    through jit, scan, cond, checkpoint and so on. To find them, the function is traced once more, for shapes alone,
    when it is called with arrays of new shapes.
    """
    axes = in_axes, out_axes, axis_name, axis_size, spmd_axis_name
    mapped: Callable[..., T] = jax.vmap(function, *axes)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> T:
        found = _find_axes(function, str(axes), mapped, args, kwargs)
        if not any(found.values()):
            return mapped(*args, **kwargs)
        with SETTINGS.held(seen_here), Scope(FoundAxes(found)):
            return mapped(*args, **kwargs)

    return call


def _find_axes(function: Any, axes: str, mapped: Callable[..., Any], args: Any, kwargs: Any) -> Findings:
    """Return the vmaps around the calls in a function; searched once for arrays of the same shapes."""
    mapped_kinds = (jax.Array, np.ndarray, np.generic, bool, int, float, complex)
    flat = FlatCall.of(args, kwargs, lambda leaf: isinstance(leaf, mapped_kinds))
    constants = flat.without_arrays()
    key = axes, flat.tree, (*constants.leaves,), tuple(map(jax.typeof, flat.arrays)), seen_here()
    try:
        known = _known.setdefault(function, {})
        found = known.get(key)
    except TypeError:
        known, found = {}, None  # the function or an argument cannot be hashed
    if found is None:
        search = AxisSearch()
        with SETTINGS.held(seen_here), Scope(Apart()), Scope(search):
            jax.eval_shape(constants.of_arrays(mapped), *flat.arrays)
        found = search.found()
        if not any(scoped(AxisSearch)):
            known[key] = found
    return found
