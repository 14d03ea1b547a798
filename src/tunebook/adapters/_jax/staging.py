"""Where a jax call is tuned: on arrays that exist, in a thread without a trace, under the caller's settings.

Inside `jax.jit` even `jnp.ones` returns a tracer, and timing there would time tracing: a peer chose a candidate 1000 x
slower in that way, and left 15,856 equations in the user's program. A thread of our own has no trace. It also has none
of the caller's settings, so they are taken along.
"""

from __future__ import annotations

import gc
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from itertools import cycle
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from tunebook._arrays.library import TuningSite
from tunebook._arrays.made_up import duplicate, fill
from tunebook._base.config_codec import fingerprint
from tunebook._base.errors import CodecError, CompileError
from tunebook._base.locks import InterruptSafeLock
from tunebook._measure.stopwatch import Attempt
from tunebook.adapters._jax.context import CONTEXT, apply_scopes
from tunebook.adapters._jax.facts import CAPTURED, KEYED, MeshAxis, TraceFacts, mesh_like
from tunebook.adapters._jax.kernel import FlatCall, backward_alone, bind, both, is_inexact, is_jax_array, only_backward
from tunebook.adapters._jax.settings import in_new_thread
from tunebook.adapters._source.build_cache import PerConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

    from tunebook._kernel.kernel import Invocation

T = TypeVar("T")

# Making a normal number takes 10 ns, so a gigabyte of them would take longer to make than to tune on. The numbers
# repeat after this many: an odd count, so that rows are not all alike.
_DISTINCT: Final = (1 << 20) + 7
# The values of weakly typed arrays. A Python number takes the dtype of the array that it meets, so a strongly typed
# array in its place would make another program.
_WEAK: Final = {"b": True, "i": 3, "u": 3, "f": 1.5, "c": 1.5 + 0.5j}


class TracedCall:
    """A call, and the settings of the thread that made it. `eager` says that it was made outside of any trace."""

    def __init__(self, inv: Invocation[Any, Any], facts: TraceFacts) -> None:
        self._inv = inv
        flat = FlatCall.of(inv.args, inv.kwargs)
        self._flat = flat.with_arrays(map(_without_trace, flat.arrays))
        made = any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in self._flat.leaves)
        self.eager: Final = not made and inv.surroundings is None
        self._facts = facts
        self._settings = {name: getattr(jax, name).value for name in CAPTURED} | KEYED | dict(facts.settings)
        self._user_contexts = _user_contexts_here()
        self._context = copy_context()
        self._mesh = _mesh_for(facts.mesh)
        self._mesh_of_arrays = _mesh_for(facts.array_mesh or facts.mesh)
        self._depths = sorted({level.depth for _, level in facts.vmap}, reverse=True)

    @contextmanager
    def site(self) -> Iterator[tuple[TuningSite, Callable[..., Any]]]:
        """Give this call on real arrays, and a function that calls others in the thread where they are."""
        stopped = threading.Event()
        pool = ThreadPoolExecutor(1, thread_name_prefix="tunebook-jax")

        def there(function: Callable[..., T], *args: Any) -> T:
            return pool.submit(self._context.run, self._run_here, function, *args).result()

        try:
            yield there(self._make_site, self._flat, stopped), there
        except KeyboardInterrupt:
            stopped.set()  # the thread cannot be interrupted, but ends before its next run of a candidate
            raise
        finally:
            pool.shutdown(wait=False)

    def _make_site(self, flat: FlatCall, stopped: threading.Event, inputs: int = 1) -> TuningSite:
        arrays = [self._make(x, place) for place, x in enumerate(flat.arrays)]
        first = list(arrays)  # the part of each batched array that one call of the kernel gets
        for place in range(len(arrays)):
            for axis, _ in reversed(self._added_axes(place)):
                first[place] = first[place][(slice(None),) * axis + (0,)]
        args, kwargs = flat.fill(first)
        call_args, call_kwargs = flat.fill(arrays)
        copies = [[duplicate(x) for x in arrays] for _ in range(inputs - 1)]
        staged = _StagedCall(self, flat.with_arrays(arrays), stopped, {}, copies)

        def with_inputs(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> TuningSite:
            return self._make_site(FlatCall.of(args, kwargs), stopped)

        return TuningSite(
            inv=replace(self._inv, args=args, kwargs=kwargs),
            args=call_args,
            kwargs=call_kwargs,
            bind=bind,
            programs=staged.programs,
            differentiable=staged.is_differentiable,
            passes="backward" if only_backward() else "forward+backward",
            one_of=self._one_of,
            with_inputs=None if self.eager else with_inputs,
            rotating=partial(self._make_site, flat, stopped),
        )

    def _run_here(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function under the caller's settings."""
        with ExitStack() as stack:
            for name, value in self._settings.items():
                stack.enter_context(getattr(jax, name)(value))
            for context, value in self._user_contexts:
                stack.enter_context(context(value))
            stack.enter_context(apply_scopes())
            if self._mesh is not None and any(axis.kind != "Manual" for axis in self._facts.mesh):
                stack.enter_context(jax.set_mesh(self._mesh))
            return function(*args)

    def run_as_caller(self, function: Callable[[Any], T], argument: Any) -> T:
        """Call a function under the caller's settings and overlays, in any thread."""
        # A copy, because several threads compile, and only one of them can enter a context at a time.
        return self._context.copy().run(self._run_here, function, argument)

    def _added_axes(self, place: int) -> tuple[tuple[int, int], ...]:
        """Return the axes that vmaps add to an array, innermost first."""
        return tuple((level.axis, level.size) for i, level in self._facts.vmap if i == place)

    def _make(self, leaf: Any, place: int) -> Any:
        """Return the array that a candidate gets for an array of the call, batched in the same way."""
        if isinstance(leaf, jax.ShapeDtypeStruct):
            shape = list(leaf.shape)
            for axis, size in self._added_axes(place):
                shape.insert(axis, size)
            x = weak(tuple(shape), leaf.dtype) if leaf.weak_type else made_up(tuple(shape), leaf.dtype, place)
        elif self.eager:
            return leaf  # the user's own array, already where it belongs
        else:
            x = leaf
            for axis, size in self._added_axes(place):
                x = np.repeat(np.expand_dims(x, axis), size, axis)
        spec = dict(self._facts.sharding).get(place)
        if spec is None or self._mesh_of_arrays is None or not any(isinstance(part, (str, tuple)) for part in spec):
            return x
        return jax.device_put(x, NamedSharding(self._mesh_of_arrays, PartitionSpec(*spec)))

    def _one_of(self, output: Any) -> Any:
        """Return the part of an output that one call of the kernel gives; vmap adds its axes in front."""
        first = (0,) * len(self._depths)
        return jax.tree.map(lambda x: x[first] if is_jax_array(x) else x, output) if first else output

    def transform(self, function: Callable[..., Any], arrays: Sequence[Any]) -> Callable[..., Any]:
        """Return a function of all arrays under the same vmaps and the same shard_map as the user's call."""
        for depth in self._depths:
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
        return jax.shard_map(  # type: ignore[no-any-return] # jax is not seen by mypy
            function, mesh=self._mesh, in_specs=every, out_specs=every, axis_names=manual, check_vma=False
        )


def _user_contexts_here() -> list[tuple[Any, Any]]:
    """Return the user contexts that this thread has set, with their values; not ours."""
    config: Any = sys.modules["jax._src.config"]
    own = CONTEXT.value is not CONTEXT.get_global()
    try:
        pairs = zip(config.trace_context(), in_new_thread(config.trace_context), strict=True)
        # Most programs set none, and then a trace here finds the same values as a trace in a new thread.
        if sum(here is not there for here, there in pairs) <= own:
            return []
    except (AttributeError, ValueError):
        pass  # a jax with another way to tell
    # jax keeps no list of user contexts that may be read; the garbage collector does: 50 ms in a big program.
    contexts = [x for x in gc.get_objects() if type(x) is type(CONTEXT) and x is not CONTEXT]
    return [(x, x.value) for x in contexts if x.value is not x.get_global()]


def _without_trace(x: Any) -> Any:
    if not isinstance(x, jax.core.Tracer):
        return x
    return jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype, weak_type=bool(getattr(x.aval, "weak_type", False)))


def _mesh_for(axes: Sequence[MeshAxis]) -> Any:
    """Return a mesh of this process's devices like the call's mesh; None if there are not enough devices."""
    size = int(np.prod([axis.size for axis in axes]))
    if not axes or size > len(jax.local_devices()):
        return None
    return mesh_like([axis._replace(kind="Auto") if axis.kind == "Manual" else axis for axis in axes])


def weak(shape: tuple[int, ...], dtype: Any) -> Any:
    """Return a weakly typed array."""
    return jax.numpy.broadcast_to(_WEAK[np.dtype(dtype).kind], shape)


def made_up(shape: tuple[int, ...], dtype: Any, seed: int) -> Any:
    """Return an array of harmless values: never zeros, and the same for the same seed."""
    if jax.numpy.issubdtype(dtype, jax.dtypes.prng_key):
        return jax.random.split(jax.random.key(seed), shape)
    size = int(np.prod(shape))
    values = fill(np, np.dtype(dtype), min(size, _DISTINCT), np.random.default_rng(seed))
    return jax.numpy.asarray(np.resize(values, shape) if size else np.zeros(shape, dtype))


class _Traced(NamedTuple):
    """The traced program of a candidate, its arrays, and the parts of its result that are not arrays."""

    program: Any
    arrays: list[Any]
    shape: list[Any]


class _Executables:
    """Compiles each program once, also if several threads ask for it at the same time."""

    def __init__(self) -> None:
        self._made: dict[bytes, Any] = {}
        self._locks: dict[bytes, InterruptSafeLock] = {}

    def of(self, lowered: Any) -> tuple[bytes, Any]:
        """Return the digest of a program, and its executable."""
        # Constants are written out in the text, so programs with different constants differ.
        digest = blake2b(lowered.as_text().encode(), digest_size=16).digest()
        with self._locks.setdefault(digest, InterruptSafeLock()):
            if digest not in self._made:
                try:
                    self._made[digest] = lowered.compile()
                except jax.errors.JaxRuntimeError as error:
                    raise CompileError(str(error)) from error
        return digest, self._made[digest]


def _key_of(config: Any) -> Hashable:
    try:
        return fingerprint(config)
    except CodecError:
        return id(config)  # unique: the job holds all configurations


class _StagedCall(NamedTuple):
    """A captured call with real arrays in place; `copies` of all arrays take turns with them."""

    call: TracedCall
    flat: FlatCall
    stopped: threading.Event
    traced: dict[Hashable, _Traced]
    copies: Sequence[list[Any]] = ()

    def _check(self) -> None:
        if self.stopped.is_set():
            raise InterruptedError("the caller was interrupted")

    def _of_arrays(self, function: Callable[..., Any], shape: list[Any]) -> Callable[..., Any]:
        """Return a function of the arrays that returns arrays alone; `shape` gets the rest of its result."""
        kinds = (jax.Array, np.ndarray, np.generic)

        def flat(*arrays: Any) -> list[Any]:
            out, tree = jax.tree.flatten(self.flat.of_arrays(function)(*arrays))
            shape[:] = [tree, [None if isinstance(x, kinds) else x for x in out]]
            return [x for x in out if isinstance(x, kinds)]

        return flat

    def is_differentiable(self, bind_one: Callable[[Any], Callable[..., Any]], config: Any) -> bool:
        """Return whether a candidate has a gradient with respect to one of the call's arrays."""
        if not any(map(is_inexact, self.flat.arrays)):
            return False
        # Without a derivative jax raises one of several errors; a function that refuses tracers raises its own.
        with Attempt() as attempt:
            traced = self._trace(bind_one(config), backward=True, alone=False)
            if not only_backward():
                self.traced[_key_of(config)] = traced  # it is compiled later, and tracing takes as long as compiling
        return attempt.trial.error is None

    def _trace(self, function: Callable[..., Any], *, backward: bool, alone: bool) -> _Traced:
        """Trace the program of a candidate, with gradients if `backward`, and without the forward pass if `alone`."""
        arrays, shape = self.flat.arrays, list[Any]()
        flat = self._of_arrays(function, shape)
        whole = self.call.transform(both(flat) if backward and not alone else flat, arrays)
        if backward and alone:
            whole, arrays = backward_alone(whole, arrays)

        def candidate(*arrays: Any) -> Any:  # the name is part of a program's text, and the profiler looks for it
            return whole(*arrays)

        return _Traced(jax.jit(candidate).trace(*arrays), arrays, shape)

    def programs(
        self,
        bind_one: Callable[[Any], Callable[..., Any]],
        backward: bool,  # noqa: FBT001 - as in `TuningSite`
    ) -> tuple[Callable[[Any], Callable[..., Any]], Callable[[Any], bytes | None]]:
        """Return a function that makes a candidate's launch function, and a function that compiles it ahead."""
        executables = _Executables()

        def make(config: Any) -> tuple[bytes | None, Callable[..., Any]]:
            known = self.traced.pop(_key_of(config), None) if backward and not only_backward() else None
            return self._compile(bind_one(config), executables, known, backward=backward)

        made = PerConfig(partial(self.call.run_as_caller, make), _key_of)
        return (lambda config: made(config)[1]), (lambda config: made(config)[0])

    def _compile(
        self, function: Callable[..., Any], executables: _Executables, known: _Traced | None, *, backward: bool
    ) -> tuple[bytes | None, Callable[..., Any]]:
        """Return a candidate's program, behind its digest. Equal programs have equal digests; None if it is unknown."""
        with Attempt() as attempt:
            traced, arrays, shape = known or self._trace(function, backward=backward, alone=only_backward())
            lowered = traced.lower()
        if attempt.trial.error is not None:
            if not self.call.eager or backward:
                raise attempt.trial.error

            # A function that looks at values, is compiled already, or refuses tracers, runs outside of a trace. If
            # the error is one of the function itself, its run raises it again.
            others = cycle([None, *map(self.flat.fill, self.copies)])

            def run(*args: Any, **kwargs: Any) -> Any:
                self._check()
                args, kwargs = next(others) or (args, kwargs)
                return jax.block_until_ready(function(*args, **kwargs))

            return None, run
        digest, executable = executables.of(lowered)
        # The arrays of a backward pass alone are the results of its forward pass, and made for each candidate.
        copies = self.copies if not (backward and only_backward()) else [[*map(duplicate, arrays)] for _ in self.copies]
        shardings = executable.input_shardings[0]
        placed = cycle(
            [[jax.device_put(x, s) for x, s in zip(each, shardings, strict=True)] for each in (arrays, *copies)]
        )

        # `placed` are the arrays of the arguments; taking them out of the arguments again would be timed too.
        def launch(*_args: Any, **_kwargs: Any) -> Any:
            self._check()
            out = jax.block_until_ready(executable(*next(placed)))
            if backward:
                return out
            tree, others = shape
            found = iter(out)
            return jax.tree.unflatten(tree, [next(found) if x is None else x for x in others])

        return digest, launch
