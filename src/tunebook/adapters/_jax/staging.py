"""Where a jax call is tuned: on arrays that exist, in a thread that no trace has touched, under the caller's settings.

Inside `jax.jit` even `jnp.ones` returns a tracer, and timing there would time tracing: a peer chose a candidate 1000 x
slower in that way, and left 15,856 equations in the user's program. A thread of our own has no trace; but it also has
none of the caller's settings, so they are taken along.
"""

from __future__ import annotations

import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from tunebook._arrays.describe import fill
from tunebook._arrays.framework import TuningSite
from tunebook._base.config_codec import fingerprint
from tunebook._base.errors import CodecError, CompileError
from tunebook.adapters._jax.backward import backward_alone, both, is_backward_only, is_inexact
from tunebook.adapters._jax.context import CONTEXT
from tunebook.adapters._jax.context import entered as overlays_entered
from tunebook.adapters._jax.facts import CAPTURED, KEYED, TraceFacts, is_jax_array, mesh_like
from tunebook.adapters._jax.kernel import bind
from tunebook.adapters._source.per_config import PerConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
    from contextvars import Context

    from tunebook._kernel.kernel import Invocation
    from tunebook.adapters._jax.facts import MeshAxis

T = TypeVar("T")

# A function that looks at values cannot be compiled as a whole. Called outside of a trace, it runs all the same.
_UNTRACEABLE: Final = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerBoolConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)
# Making a normal number takes 10 ns, so a gigabyte would take longer to make than to tune on. An odd number, so that
# rows are not all alike.
_DISTINCT: Final = (1 << 20) + 7
# What a number of Python's becomes: it takes the dtype of what it meets, so that another array in its place would make
# another program.
_WEAK: Final = {"b": True, "i": 3, "u": 3, "f": 1.5, "c": 1.5 + 0.5j}


class ArrayLike(NamedTuple):
    """An array that a trace stands for."""

    shape: tuple[int, ...]
    dtype: Any
    weak_type: bool


class TracedCall:
    """A call and the settings of the thread that made it."""

    def __init__(self, inv: Invocation[Any, Any], facts: TraceFacts) -> None:
        self._inv = inv
        leaves, self._tree = jax.tree.flatten((inv.args, dict(inv.kwargs)))
        self._leaves = [_without_trace(leaf) for leaf in leaves]
        made = any(isinstance(leaf, (ArrayLike, jax.ShapeDtypeStruct)) for leaf in self._leaves)
        self._eager = not made and inv.surroundings is None
        self._facts = facts
        self._settings = {name: getattr(jax, name).value for name in CAPTURED} | KEYED | dict(facts.settings)
        self._user_contexts = _user_contexts()
        self._context = copy_context()
        self._mesh = _mesh_for(facts.mesh)
        self._mesh_of_arrays = _mesh_for(facts.array_mesh or facts.mesh)

    @contextmanager
    def site(self) -> Iterator[tuple[TuningSite, Callable[..., Any]]]:
        """Give this call on real arrays, and a function that calls others in the thread where they are."""
        stopped = threading.Event()
        pool = ThreadPoolExecutor(1, thread_name_prefix="tunebook-jax")

        def there(function: Callable[..., T], *args: Any) -> T:
            return pool.submit(self._context.run, self._call_entered, function, *args).result()

        try:
            yield there(self._stage, self._leaves, self._tree, stopped), there
        except KeyboardInterrupt:
            stopped.set()  # the thread cannot be interrupted, but ends before its next run of a candidate
            raise
        finally:
            pool.shutdown(wait=False)

    def _call_entered(self, function: Callable[..., T], *args: Any) -> T:
        with self.entered():
            return function(*args)

    def _stage(self, leaves: Sequence[Any], tree: Any, stopped: threading.Event) -> TuningSite:
        arrays = [i for i, leaf in enumerate(leaves) if is_array_or_like(leaf)]
        as_seen, given = list(leaves), list(leaves)
        for place, i in enumerate(arrays):
            given[i] = self._made(leaves[i], place)
            as_seen[i] = self._first(given[i], place)

        def with_inputs(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> TuningSite:
            found, like = jax.tree.flatten((args, dict(kwargs)))
            return self._stage(found, like, stopped)

        args, kwargs = jax.tree.unflatten(tree, as_seen)
        call_args, call_kwargs = jax.tree.unflatten(tree, given)
        frame = _Frame(self, tree, given, arrays, stopped)
        return TuningSite(
            inv=replace(self._inv, args=args, kwargs=kwargs),
            args=call_args,
            kwargs=call_kwargs,
            bind=bind,
            programs=partial(_programs, frame),
            differentiable=partial(_differentiable, frame),
            passes="backward" if is_backward_only() else "forward+backward",
            one_of=self._one_of,
            with_inputs=None if self._eager else with_inputs,
        )

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Make the settings of the caller those of this thread."""
        with ExitStack() as stack:
            for name, value in self._settings.items():
                stack.enter_context(getattr(jax, name)(value))
            for context, value in self._user_contexts:
                stack.enter_context(context(value))
            stack.enter_context(overlays_entered())
            if self._mesh is not None and any(axis.kind != "Manual" for axis in self._facts.mesh):
                stack.enter_context(jax.set_mesh(self._mesh))
            yield

    # ------------------------------------------------------------------------------------------------------- arrays

    def _sizes(self, place: int) -> tuple[tuple[int, int], ...]:
        """Return the axes that vmaps add to an array, the innermost first."""
        return tuple((level.axis, level.size) for i, level in self._facts.vmap if i == place)

    def _made(self, leaf: Any, place: int) -> Any:
        """Return the array that a candidate gets for one of the call, batched as that is."""
        if isinstance(leaf, (ArrayLike, jax.ShapeDtypeStruct)):
            shape = list(leaf.shape)
            for axis, size in self._sizes(place):
                shape.insert(axis, size)
            weak = isinstance(leaf, ArrayLike) and leaf.weak_type
            made = jax.numpy.broadcast_to(_WEAK[np.dtype(leaf.dtype).kind], shape) if weak else None
            return self._placed(made_up(tuple(shape), leaf.dtype, place) if made is None else made, place)
        if self._eager:
            return leaf  # the user's own, and where it belongs
        for axis, size in self._sizes(place):
            leaf = np.repeat(np.expand_dims(leaf, axis), size, axis)
        return self._placed(leaf, place)

    def _first(self, x: Any, place: int) -> Any:
        """Return the part of a batched array that one call of the kernel gets."""
        for axis, _ in reversed(self._sizes(place)):
            x = x[(slice(None),) * axis + (0,)]
        return x

    def _one_of(self, output: Any) -> Any:
        """Return the part of an output that one call of the kernel gives; vmap puts what it adds in front."""
        depth = len({level.depth for _, level in self._facts.vmap})
        return jax.tree.map(lambda x: x[(0,) * depth] if is_jax_array(x) else x, output) if depth else output

    def _placed(self, x: Any, place: int) -> Any:
        spec = dict(self._facts.sharding).get(place)
        if spec is None or self._mesh_of_arrays is None or not any(isinstance(part, (str, tuple)) for part in spec):
            return x
        return jax.device_put(x, NamedSharding(self._mesh_of_arrays, PartitionSpec(*spec)))

    # ----------------------------------------------------------------------------------------------------- programs

    def transformed(self, function: Callable[..., Any], arrays: Sequence[Any]) -> Callable[..., Any]:
        """Return a function of all arrays under the vmaps and the shard_map that the user's call is under."""
        depths = sorted({level.depth for _, level in self._facts.vmap}, reverse=True)
        for depth in depths:
            axes: list[int | None] = [None] * len(arrays)
            name = None
            for place, level in self._facts.vmap:
                if level.depth == depth:
                    axes[place], name = level.axis, level.name
            function = jax.vmap(function, in_axes=tuple(axes), **({} if name is None else {"axis_name": name}))
        manual = {axis.name for axis in self._facts.mesh if axis.kind == "Manual"}
        if not manual or self._mesh is None:
            return function
        every = PartitionSpec()
        mapped: Callable[..., Any] = jax.shard_map(
            function, mesh=self._mesh, in_specs=every, out_specs=every, axis_names=manual, check_vma=False
        )
        return mapped

    def context(self) -> Context:
        """Return a copy of the caller's context: of its overlays, for tunable functions that are called in this one."""
        return self._context.copy()

    @property
    def eager(self) -> bool:
        """Whether the user's call was made outside of any trace."""
        return self._eager


def is_array_or_like(leaf: object) -> bool:
    """Return whether a leaf of a captured call is an array, real or to be made."""
    return isinstance(leaf, ArrayLike) or is_jax_array(leaf)


def _without_trace(leaf: Any) -> Any:
    if not isinstance(leaf, jax.core.Tracer):
        return leaf
    return ArrayLike(tuple(leaf.aval.shape), leaf.aval.dtype, bool(getattr(leaf.aval, "weak_type", False)))


def _mesh_for(axes: Sequence[MeshAxis]) -> Any:
    """Return a mesh of this process's devices like the one of the call; None if there are not enough."""
    size = int(np.prod([axis.size for axis in axes]))
    if not axes or size > len(jax.local_devices()):
        return None
    return mesh_like([axis._replace(kind="Auto") if axis.kind == "Manual" else axis for axis in axes])


def _user_contexts() -> list[tuple[Any, Any]]:
    """Return the user contexts that are set in this thread, with their values; a new thread has none of them.

    jax keeps no list of them that may be read, the garbage collector does: 20 ms, once per tuning.
    """
    kind = type(CONTEXT)
    found = [x for x in gc.get_objects() if type(x) is kind and x is not CONTEXT]
    return [(context, context.value) for context in found if context.value is not context.get_global()]


def made_up(shape: tuple[int, ...], dtype: Any, seed: int) -> Any:
    """Return an array of values that no kernel trips over: never zeros, the same for the same seed."""
    if jax.numpy.issubdtype(dtype, jax.dtypes.prng_key):
        return jax.random.split(jax.random.key(seed), shape)
    size = int(np.prod(shape))
    values = fill(np, np.dtype(dtype), min(size, _DISTINCT), np.random.default_rng(seed))
    return jax.numpy.asarray(np.resize(values, shape) if size else np.zeros(shape, dtype))


# ---------------------------------------------------------------------------------------------------------- programs


class _Frame(NamedTuple):
    """A captured call with its arrays in place."""

    call: TracedCall
    tree: Any
    leaves: list[Any]
    arrays: list[int]
    stopped: threading.Event


class _JaxProgram(NamedTuple):
    """What runs a candidate. `digest` is equal for those that are the same program; None if that is not known."""

    digest: bytes | None
    launch: Callable[..., Any]


def _programs(
    frame: _Frame,
    bind_one: Callable[[Any], Callable[..., Any]],
    backward: bool,  # noqa: FBT001 - as in `TuningSite`
) -> tuple[Callable[[Any], Callable[..., Any]], Callable[[Any], bytes | None]]:
    """Return what makes a candidate's function, and what compiles it ahead."""
    executables: dict[bytes, Any] = {}

    def make(config: Any) -> _JaxProgram:
        with frame.call.entered():
            return _compiled(frame, bind_one(config), executables, backward=backward)

    # Several threads compile, and a context can be entered by one of them at a time.
    made = PerConfig(lambda config: frame.call.context().run(make, config), _config_key)
    return (lambda config: made(config).launch), (lambda config: made(config).digest)


def _config_key(config: Any) -> Hashable:
    try:
        return fingerprint(config)
    except CodecError:
        return id(config)  # the job holds them all, so that no other can get the same


def _compiled(
    frame: _Frame, function: Callable[..., Any], executables: dict[bytes, Any], *, backward: bool
) -> _JaxProgram:
    arrays = [frame.leaves[i] for i in frame.arrays]
    shape: list[Any] = []
    flat = _flat(function, frame.tree, frame.leaves, frame.arrays, shape)
    whole = frame.call.transformed(both(flat) if backward and not is_backward_only() else flat, arrays)
    if backward and is_backward_only():
        whole, arrays = backward_alone(whole, arrays)
    try:
        lowered = jax.jit(_named(whole)).lower(*arrays)
    except _UNTRACEABLE:
        if not frame.call.eager or backward:
            raise
        return _JaxProgram(None, partial(_run_as_it_is, frame, function))
    # Constants are written out in it, so that programs of different ones differ.
    digest = blake2b(lowered.as_text().encode(), digest_size=16).digest()
    if digest not in executables:
        try:
            executables[digest] = lowered.compile()
        except jax.errors.JaxRuntimeError as error:
            raise CompileError(str(error)) from error
    executable = executables[digest]
    placed = [jax.device_put(x, s) for x, s in zip(arrays, executable.input_shardings[0], strict=True)]
    return _JaxProgram(digest, partial(_run_compiled, executable, placed, shape, frame.stopped, rebuild=not backward))


def _differentiable(frame: _Frame, function: Callable[..., Any]) -> bool:
    """Whether a function has a gradient with respect to one of the call's arrays."""
    arrays = [frame.leaves[i] for i in frame.arrays]
    flat = _flat(function, frame.tree, frame.leaves, frame.arrays, [])
    try:
        jax.eval_shape(frame.call.transformed(both(flat), arrays), *arrays)
    except (TypeError, ValueError, NotImplementedError):  # what jax raises where there is no derivative
        return False
    return any(map(is_inexact, arrays))


def _named(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function whose name is the same for all candidates: the name is part of a program's text.

    The profiler knows them by it too.
    """

    def candidate(*arrays: Any) -> Any:
        return function(*arrays)

    return candidate


def _flat(
    function: Callable[..., Any], tree: Any, leaves: Sequence[Any], arrays: Sequence[int], shape: list[Any]
) -> Callable[..., Any]:
    """Return a function of the arrays alone, which returns arrays alone; `shape` gets what its result is made of."""

    def flat(*given: Any) -> list[Any]:
        filled = list(leaves)
        for i, x in zip(arrays, given, strict=True):
            filled[i] = x
        args, kwargs = jax.tree.unflatten(tree, filled)
        out, out_tree = jax.tree.flatten(function(*args, **kwargs))
        shape[:] = [out_tree, [None if _is_output(x) else x for x in out]]
        return [x for x in out if _is_output(x)]

    return flat


def _is_output(x: object) -> bool:
    return isinstance(x, (jax.Array, np.ndarray, np.generic))


def _run_compiled(
    executable: Any,
    arrays: Sequence[Any],
    shape: Sequence[Any],
    stopped: threading.Event,
    *_args: Any,
    rebuild: bool,
    **_kwargs: Any,
) -> Any:
    # The arguments are those that the arrays were taken from; taking them out again would be timed too.
    if stopped.is_set():
        raise InterruptedError("the caller was interrupted")
    out = jax.block_until_ready(executable(*arrays))
    if not rebuild:
        return out
    tree, others = shape
    found = iter(out)
    return jax.tree.unflatten(tree, [next(found) if x is None else x for x in others])


def _run_as_it_is(frame: _Frame, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if frame.stopped.is_set():
        raise InterruptedError("the caller was interrupted")
    return jax.block_until_ready(function(*args, **kwargs))
