"""The axes of a vmap, seen also by calls inside what jax makes a program of first.

`jax.vmap(jax.jit(f))` makes a program of f for one row, which it keeps, and then batches that program. A call in f can
be told of it only by an equation of its own, which the program must not have. So `vmap` traces the function twice: once
for shapes alone, with such equations in it, by whose batching rule the axes are found; and then as it is.
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
from tunebook.adapters._jax.settings import SETTINGS

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

T = TypeVar("T")

Site = tuple[tuple[tuple[int, ...], str, bool], ...]


_NUMBERS: Final = (bool, int, float, complex)


class Batch(NamedTuple):
    """One vmap around a call: `axes` has one for each array of the call, None for those that it does not batch."""

    axes: tuple[int | None, ...]
    size: int
    name: str | None


Findings = dict[Site, tuple[Batch, ...]]


class Looking:
    """Marks that axes are being looked for, and has what was found: the vmaps around calls, the innermost first."""

    def __init__(self) -> None:
        self._number = next(_numbers)
        self._found: dict[Site, set[tuple[Batch, ...]]] = {}

    def content(self) -> list[Any]:
        """Return what no trace has been made under: the rules of one that jit remembers would not be asked again."""
        return ["looking", self._number]

    def note(self, site: Site, batches: tuple[Batch, ...]) -> None:
        """Note what is around a call, as far as it is known."""
        self._found.setdefault(site, set()).add(batches)

    def found(self) -> Findings:
        """Return what is around each call; nothing of calls that look alike and of which that is not the same."""
        most = {site: [one for one in every if not _is_less(one, every)] for site, every in self._found.items()}
        return {site: every[0] for site, every in most.items() if len(every) == 1}


def _is_less(one: tuple[Batch, ...], every: set[tuple[Batch, ...]]) -> bool:
    """Return whether something was found before the rest of it: an outer vmap, or what a loop batches."""
    return any(other != one and _is_part(one, other) for other in every)


def _is_part(one: Sequence[Batch], other: Sequence[Batch]) -> bool:
    return len(one) <= len(other) and all(
        (a.size, a.name) == (b.size, b.name) and all(x in (None, y) for x, y in zip(a.axes, b.axes, strict=True))
        for a, b in zip(one, other, strict=False)
    )


class Seen:
    """Marks which vmaps there are around calls, by the arrays of the call."""

    def __init__(self, found: Findings) -> None:
        self.found: Final = found
        text = json.dumps([[site, batches] for site, batches in sorted(found.items(), key=str)], default=str)
        self.digest: Final = blake2b(text.encode(), digest_size=12).hexdigest()

    def content(self) -> list[str]:
        """Return what is equal for equal findings."""
        return ["vmaps", self.digest]


_numbers: Final = itertools.count()


@cache
def _look() -> Any:
    """Return an equation without outputs, which is batched as its inputs are. It is there while axes are looked for.

    It never runs. Made when it is first needed: nobody else is to depend on what jax has no public name for.
    """
    effects = importlib.import_module("jax._src.effects")
    # Without an effect it would be dropped where a program is differentiated, since nothing depends on it.
    kept = type("Kept", (effects.Effect,), {"__doc__": "That axes are being looked for."})
    for allowed in ("control_flow_allowed", "remat_allowed", "custom_derivatives_allowed", "partial_eval_kept"):
        getattr(effects, f"{allowed}_effects").add_type(kept)
    look = Primitive("tunebook_look")
    look.multiple_results = True
    look.def_effectful_abstract_eval(lambda *_avals, **_options: ([], {kept()}))
    batching.fancy_primitive_batchers[look] = _batched
    ad.primitive_jvps[look] = _differentiated
    return look


def _bind(arrays: Sequence[Any], site: Site, batches: tuple[Batch, ...]) -> None:
    for looking in scoped(Looking):
        looking.note(site, batches)
    _look().bind(*arrays, site=site, batches=batches)


def _batched(around: Any, arrays: Sequence[Any], axes: Sequence[Any], *, site: Site, batches: tuple[Batch, ...]) -> Any:
    name = around.name if isinstance(around.name, str) else None
    _bind(arrays, site, (*batches, Batch(tuple(axes), around.size, name)))
    return [], []


def _differentiated(arrays: Sequence[Any], _tangents: Any, *, site: Site, batches: tuple[Batch, ...]) -> Any:
    _bind(arrays, site, batches)
    return [], []


# ------------------------------------------------------------------------------------------------------- for the others


def vmaps_around(arrays: Sequence[Any]) -> tuple[Batch, ...]:
    """Return the vmaps that `vmap` found around a call with these arrays, the innermost first."""
    if INNERMOST.get() is None or not any(isinstance(x, jax.core.Tracer) for x in arrays):
        return ()
    site = tuple((tuple(x.shape), str(x.dtype), bool(getattr(x, "weak_type", False))) for x in arrays)
    if any(scoped(Looking)):
        _bind(arrays, site, ())
    # The outermost one has seen most.
    return next((seen.found[site] for seen in reversed([*scoped(Seen)]) if site in seen.found), ())


def seen_here() -> str | None:
    """Return what stands for all that was found and is in force here; None if there is nothing.

    It is never the same twice where axes are being looked for: there each call has to be asked about, however alike.
    """
    if INNERMOST.get() is None:
        return None
    if any(scoped(Looking)):
        return f"looking {next(_numbers)}"
    return " ".join(seen.digest for seen in scoped(Seen)) or None


def vmap(
    function: Callable[..., T],
    in_axes: Any = 0,
    out_axes: Any = 0,
    axis_name: Hashable | None = None,
    axis_size: int | None = None,
    spmd_axis_name: Any = None,
) -> Callable[..., T]:
    """Return `jax.vmap` of a function, whose axes are in the keys of all tunable calls inside.

    Those of `jax.vmap` are in the keys of calls with nothing but transformations in between. These are seen through
    jit, scan, cond, checkpoint and so on too. The function is traced once more for that, for its shapes alone, when it
    is called with arrays of new shapes.
    """
    axes = in_axes, out_axes, axis_name, axis_size, spmd_axis_name
    mapped: Callable[..., T] = jax.vmap(function, *axes)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> T:
        found = _found_in(function, str(axes), mapped, args, kwargs)
        if not any(found.values()):
            return mapped(*args, **kwargs)
        with SETTINGS.held(seen_here), Scope(Seen(found)):
            return mapped(*args, **kwargs)

    return call


_known: Final[weakref.WeakKeyDictionary[Any, dict[Hashable, Findings]]] = weakref.WeakKeyDictionary()


def _found_in(function: Any, axes: str, mapped: Callable[..., Any], args: Any, kwargs: Any) -> Findings:
    """Return what is around the calls in a function, looked for once for arrays of these shapes."""
    leaves, tree = jax.tree.flatten((args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, (jax.Array, np.ndarray, np.generic, *_NUMBERS))]
    constants = [None if i in places else leaf for i, leaf in enumerate(leaves)]
    key = axes, tree, (*constants,), tuple(jax.typeof(leaves[i]) for i in places), seen_here()
    try:
        known = _known.setdefault(function, {})
        found = known.get(key)
    except TypeError:
        known, found = {}, None  # no function or argument that can be told apart from others
    if found is None:

        def of_arrays(*arrays: Any) -> Any:
            filled = list(constants)
            for i, x in zip(places, arrays, strict=True):
                filled[i] = x
            given, named = jax.tree.unflatten(tree, filled)
            return mapped(*given, **named)

        found = _looked_for(of_arrays, [leaves[i] for i in places])
        if not any(scoped(Looking)):
            known[key] = found
    return found


def _looked_for(mapped: Callable[..., Any], arrays: Sequence[Any]) -> Findings:
    looking = Looking()
    with SETTINGS.held(seen_here), Scope(Apart()), Scope(looking):
        jax.eval_shape(mapped, *arrays)
    return looking.found()
