"""A kernel, and one call of it."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from tunebook._arrays.describe import device_of, libraries_of, surroundings_of
from tunebook._arrays.device_fingerprint import (
    device_fingerprint,
    driver_of,
    environment_fingerprint,
    get_device_platform,
)
from tunebook._base.errors import DefinitionError, Unsupported
from tunebook._base.vocabulary import Problem, ShownByOp, computed_once
from tunebook._code.checksum import candidates_checksum, read_members
from tunebook._code.deferred import refuse_deferred
from tunebook._code.values import measured_names
from tunebook._kernel.measure import measure_of
from tunebook._kernel.output_check import Comparison, OwnCheck, difference
from tunebook._keys.call_key import call_key, fast_key_of
from tunebook._statistics.decide import objective_name

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from tunebook._base.errors import TuningFailed
    from tunebook._base.vocabulary import CallRecorder, NumberTable, StrategyLike, ValuesFrom
    from tunebook._code.replay import CodeFacts
    from tunebook._kernel.measure import Measure
    from tunebook._kernel.output_check import Compare
    from tunebook._kernel.rounded_call import RoundedCall
    from tunebook._statistics.roofline import Roofline

Cfg = TypeVar("Cfg")
"""The type of a kernel's configurations, for annotations: `Kernel[Cfg, Out]`."""

Out = TypeVar("Out")
"""The type of a kernel's output, for annotations."""

# The kernels of this process by name, for recordings that are read from a file. The latest kernel of a name counts: a
# notebook cell that runs again defines it anew.
LIVE: Final[weakref.WeakValueDictionary[str, Kernel[Any, Any]]] = weakref.WeakValueDictionary()

PLACEMENT: Final = ("method", "mesh", "in_specs", "out_specs", "check_vma")  # fields that spread a call over a mesh

_WITH_VARIANTS: Final = ("run", "heuristic_cfg", "candidate_cfgs", "fwd_with_residuals", "vjp")
# Calls that keep changing must not grow a memo without bound; the key of a thousand plain values is longer than this.
_MEMOISED, _LONG_KEY = 4096, 2000
# Facts about classes, because a program may make a kernel object per call: the operations that have variants (`dir`
# takes 30 us), and the problem of each kind of call so far (making one takes 40 us).
_VARIED: Final[weakref.WeakKeyDictionary[type, frozenset[str]]] = weakref.WeakKeyDictionary()
_CHECKED: Final[weakref.WeakSet[type]] = weakref.WeakSet()  # their `run` returns a result, and not a coroutine
_PROBLEMS: Final[weakref.WeakKeyDictionary[type, dict[Hashable, Problem]]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, slots=True, repr=False)
class Invocation(ShownByOp, Generic[Cfg, Out]):
    """One call of a kernel: its arguments after `Kernel.prepare`, and how to run it.

    `values_from` is "call" for the caller's own arguments; a call that is tuned without them has made-up arguments.
    """

    op_id: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    override_cfg: Cfg | None = None
    batch_axes: Mapping[str, int] | None = None
    method: str | None = None
    mesh: Any = None
    in_specs: Any = None
    out_specs: Any = None
    check_vma: bool = False
    surroundings: Mapping[str, Any] | None = None  # as `beside` returns them, for a call that was made elsewhere
    values_from: ValuesFrom = "call"
    _key: list[str] = field(default_factory=list, init=False, repr=False, compare=False)
    _listed: list[Any] = field(default_factory=list, init=False, repr=False, compare=False)

    @property
    def call_key(self) -> str:
        """The key of this call, made from its arguments once."""
        if not self._key:
            arguments: dict[str, object] = {f"arg{i}": value for i, value in enumerate(self.args)}
            # Only the differences from a plain call: a key must not change when this class gains a field.
            context = {"batch_axes": self.batch_axes, "method": self.method}
            if self.method is not None:
                context |= {"mesh": self.mesh, "in_specs": self.in_specs, "out_specs": self.out_specs}
            given = {f"@{name}": value for name, value in context.items() if value is not None}
            self._key.append(call_key({**arguments, **self.kwargs, **given, **self.beside()}))
        return self._key[0]

    def make_key(self, key_builder: Callable[[Invocation[Cfg, Out]], str] | None = None) -> str:
        """Return `key_builder(self)`, or `call_key` without a builder."""
        if key_builder is None:
            return self.call_key
        key = key_builder(self)
        if not isinstance(key, str):
            raise DefinitionError(f"the key_builder of {self.op_id!r} must return a str, not {type(key).__name__}")
        return key

    def beside(self) -> Mapping[str, Any]:
        """Return the settings that this call depends on beside its arguments; empty for most calls."""
        return surroundings_of((self.args, self.kwargs)) if self.surroundings is None else self.surroundings

    def placement(self) -> dict[str, Any]:
        """Return the fields that spread this call over a mesh; empty for most calls."""
        return {} if self.method is None else {name: getattr(self, name) for name in PLACEMENT}

    @property
    def platform(self) -> str:
        """The platform of the arguments: "gpu", "tpu" or "cpu"."""
        return get_device_platform(device_of((self.args, self.kwargs)))

    @property
    def device(self) -> str:
        """The fingerprint of the device of the arguments."""
        return device_fingerprint(device_of((self.args, self.kwargs)))


class KernelOperations(ShownByOp, Generic[Cfg, Out]):
    """The operations that the library derives from the definitions in a `Kernel`: its key, its checksum, its run."""

    op_id: str
    version: str
    key_builder: Callable[[Invocation[Cfg, Out]], str] | None
    objective: str | Callable[[Sequence[float]], float]
    measure: Measure | None

    @property
    def op_id_v(self) -> str:
        """The op id with its version, as keys contain it."""
        return f"{self.op_id}@v{self.version}"

    @property
    def module(self) -> str:
        """The module to import so that this kernel is defined."""
        return type(self).__module__

    @property
    def argument_classes(self) -> tuple[object, ...]:
        """Classes and annotations of arguments. Reading a saved recording builds instances of these alone."""
        return ()

    def problem(self, inv: Invocation[Cfg, Out]) -> Problem:
        """Return the problem of a call: the key of its configuration in memory and in the book."""
        given = (self.key_builder, inv.method, inv.batch_axes, inv.surroundings)
        if any(each is not None for each in given):
            return self._make_problem(inv)
        try:
            key = self.op_id, self.version, fast_key_of((inv.args, dict(inv.kwargs)))
            problems = _PROBLEMS.setdefault(type(self), {})
            known = problems.get(key)
        except (TypeError, AttributeError):
            return self._make_problem(inv)
        if known is None:
            if len(problems) >= _MEMOISED:
                problems.clear()
            known = problems[key] = self._make_problem(inv)
        return known

    def _make_problem(self, inv: Invocation[Cfg, Out]) -> Problem:
        key = inv.make_key(self.key_builder)
        if len(key) > _LONG_KEY:
            from tunebook._keys.key_advice import warn_of_a_long_key  # noqa: PLC0415 - for few kernels

            warn_of_a_long_key(self.op_id_v, key)
        return Problem(inv.device, self.op_id_v, key)

    def variant(self, name: str, inv: Invocation[Cfg, Out]) -> Callable[..., Any]:
        """Return the most specific definition of an operation for a call."""
        if self._has_variants(name):  # few kernels; the platform takes as long to find out as the rest of a call
            parts = [part for part in (inv.method, inv.platform) if part]
            for suffix in ["_".join(parts), *parts]:
                found = getattr(self, f"{name}_{suffix}", None)
                if found is not None:
                    return found  # type: ignore[no-any-return]
        return getattr(self, name)  # type: ignore[no-any-return]

    def _has_variants(self, op: str) -> bool:
        """Whether the class or the object defines variants of an operation."""
        kind = type(self)
        varied = _VARIED.get(kind)
        if varied is None:
            names = dir(kind)
            varied = frozenset(op for op in _WITH_VARIANTS if any(name.startswith(f"{op}_") for name in names))
            _VARIED[kind] = varied
        return op in varied or any(name.startswith(f"{op}_") for name in vars(self))

    def heuristic(self, inv: Invocation[Cfg, Out]) -> Cfg | None:
        """Return the heuristic's configuration, or None if the kernel has no heuristic."""
        try:
            return self.variant("heuristic_cfg", inv)(inv)  # type: ignore[no-any-return]
        except Unsupported:
            return None

    def baseline(self, inv: Invocation[Cfg, Out]) -> Cfg | None:
        """Return the configuration that is measured beside the candidates, whose output theirs are compared with."""
        return self.heuristic(inv)

    def measures_without_gradient(self) -> bool:
        """Whether a call is tuned by its forward pass where its gradient is asked for, and jax finds none."""
        return True

    def candidates(self, inv: Invocation[Cfg, Out]) -> Iterable[Cfg]:
        """Return the candidates for a call. The author's function is called once per invocation."""
        known = inv._listed  # noqa: SLF001 - written here only
        if not known or known[0] is not self:
            found = self.variant("candidate_cfgs", inv)(inv)
            known[:] = self, tuple(found) if isinstance(found, Iterator) else found
        return known[1]  # type: ignore[no-any-return]

    def bind(self, inv: Invocation[Cfg, Out], cfg: Cfg, *, backward: bool = False) -> Callable[..., Any]:
        """Return a function of the arguments that runs a call with `cfg`; `backward` runs the gradient too."""
        if backward:
            return partial(_run_with_gradient, self, inv, cfg)
        run = partial(self.variant("run", inv), cfg=cfg)
        return partial(_run_sharded, self, inv, cfg, run) if inv.method == "shard_map" else run

    def has_backward(self, inv: Invocation[Cfg, Out]) -> bool:
        """Whether this kernel defines a backward pass for a call."""
        return all(
            getattr(self.variant(name, inv), "__func__", None) is not getattr(Kernel, name)
            for name in ("fwd_with_residuals", "vjp")
        )

    @property
    def makes_inputs(self) -> bool:
        """Whether the author says how arguments are made up."""
        return getattr(type(self), "make_inputs", None) is not Kernel.make_inputs

    def comparison(self, inv: Invocation[Cfg, Out]) -> Compare:
        """Return how outputs of a call are compared: by `compare`, if the author defines it."""
        own: Compare | None = getattr(self, "compare", None)
        if own is None or getattr(own, "__func__", None) is Kernel.compare:
            return Comparison().on((inv.args, inv.kwargs))
        return OwnCheck(own, f"compare of {self.op_id!r}")

    @property
    def check_checksum(self) -> str:
        """The digest over the check of outputs, as far as `code_checksum` does not cover it."""
        return ""

    def blame(self, inv: Invocation[Cfg, Out], error: TuningFailed) -> TuningFailed:
        """Return the error of a tuning that rejected every candidate; another one if the check itself is at fault."""
        return error

    def environment(self, inv: Invocation[Cfg, Out]) -> str:
        """Return the fingerprint of the software that a measurement of this call depends on."""
        arguments = inv.args, inv.kwargs
        versions = {**self.code_facts.versions, **driver_of(device_of(arguments))}
        return environment_fingerprint(libraries_of(arguments), versions)

    def checksum(self, inv: Invocation[Cfg, Out]) -> str:
        """Return the digest over the kernel's code, its helpers, its version and its candidates for this call."""
        return self._checksum_over(self.candidates(inv))

    def _checksum_over(self, candidates: Iterable[Cfg]) -> str:
        # The objective is not code: a decision under another one is made from the same measurements.
        objective = "" if self.objective == "typical" else f"-{objective_name(self.objective)}"
        # Nor is the way to measure.
        measure = "" if self.measure is None or (own := measure_of(self)) is None else f"-{own!r}"
        return f"{self.code_checksum}-{candidates_checksum(candidates)}{objective}{measure}"

    @property
    def code_checksum(self) -> str:
        """The digest over the code that a measurement depends on: not the heuristic, not the list of candidates."""
        return self.code_facts.checksum

    @computed_once
    def code_facts(self) -> CodeFacts:
        """The digest over that code, and the versions of the packages that it uses."""
        return read_members(self, _names_below_kernel, version=self.version)

    def whole_cfg(self, inv: Invocation[Cfg, Out], cfg: Cfg) -> Cfg:
        """Return the configuration of an overlay for a call, completed if it is a part; by default it is whole."""
        return cfg

    def rounded(self, inv: Invocation[Cfg, Out]) -> tuple[Invocation[Cfg, Out], RoundedCall] | None:
        """Return a call at the representative sizes of its buckets; None if the kernel has no buckets."""
        return None

    def own_sizes(self, inv: Invocation[Cfg, Out]) -> str:
        """Return the sizes of a call that have buckets."""
        return ""

    def aside(self, inv: Invocation[Cfg, Out]) -> AbstractContextManager[object]:
        """Return the context of a tuning in the background; `Unsupported` if there is no room for its arguments."""
        return nullcontext()

    def live_runs(self, inv: Invocation[Cfg, Out]) -> Any:
        """Return the `LiveRuns` that try candidates in the calls of a running program; None if the core makes them."""
        return None


def _names_below_kernel(kernel: object, _: None) -> tuple[str, ...]:
    return measured_names(kernel, Kernel)


def _run_with_gradient(kernel: Any, inv: Invocation[Any, Any], cfg: Any, *args: Any, **kwargs: Any) -> Any:
    out, residuals = kernel.variant("fwd_with_residuals", inv)(*args, cfg=cfg, **kwargs)
    # The output stands in for its own gradient: the shape and the dtype are right, and the values are ordinary.
    return kernel.variant("vjp", inv)(residuals, out, *args, cfg=cfg, **kwargs)


def _run_sharded(kernel: Any, inv: Any, cfg: Any, run: Any, *args: Any, **kwargs: Any) -> Any:
    placement = {name: getattr(inv, name) for name in PLACEMENT if name != "method"}
    wrapped, call_args, *finish = kernel.create_shard_map_wrapper(run, *args, **placement, **kwargs)
    out = wrapped(*call_args)
    return finish[0](out, cfg=cfg) if finish else out


class Kernel(KernelOperations[Cfg, Out]):
    """One operation with a free configuration. Subclass it and define `run`; the rest is optional.

    `run`, `heuristic_cfg`, `candidate_cfgs`, `fwd_with_residuals` and `vjp` may have variants per platform and
    context (`run_gpu`, `candidate_cfgs_tpu`, `run_shard_map`, `run_shard_map_gpu`). A call uses the most specific one.
    """

    compiles: bool = False
    """Whether `compile_cfg` compiles a candidate ahead of its first run."""
    checks: bool = True
    """Whether outputs are checked while tuning."""
    objective: str | Callable[[Sequence[float]], float] = "typical"
    """The quantity to minimise: "typical", "median", "mean", "p95", or a function of samples in seconds."""
    measure: Measure | None = None
    """How candidates are measured; None is the way that is usual for the device."""
    measures_by_itself: bool = False  # its tuner measures as `measure` says, and in no other way
    strategy: StrategyLike | None = None
    """The search strategy. None races all candidates, unless they are a `Space` too big for that."""
    has_buckets: bool = False
    """Whether calls of several sizes share an entry, so that `rounded` is asked."""
    prunes: bool = False
    """Whether `prune_cfgs` drops candidates. It then gets the whole list."""
    recorder: CallRecorder | None = None
    """How calls are recorded, if the specs of their arrays do not say enough."""
    table: NumberTable | None = None  # for a kernel whose calls get a configuration, and run nothing

    def __init__(
        self, op_id: str, version: str = "0", key_builder: Callable[[Invocation[Cfg, Out]], str] | None = None
    ) -> None:
        if not op_id:
            raise DefinitionError("a kernel needs an op_id: a name that is unique among the kernels of a program")
        if type(self) not in _CHECKED:
            refuse_deferred(type(self).run, op_id)
            _CHECKED.add(type(self))
        self.op_id, self.version, self.key_builder = op_id, version, key_builder
        LIVE[self.op_id_v] = self

    def prepare(self, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Normalise the arguments before they are keyed and run; by default they stay unchanged."""
        return args, kwargs

    def run(self, *args: Any, cfg: Cfg, **kwargs: Any) -> Out:
        """Do the operation with this configuration."""
        raise Unsupported(f"kernel {self.op_id!r} does not define run(*args, cfg, **kwargs)")

    def heuristic_cfg(self, inv: Invocation[Cfg, Out]) -> Cfg:
        """Return a reasonable configuration without measuring anything."""
        raise Unsupported(f"kernel {self.op_id!r} does not define heuristic_cfg(inv)")

    def candidate_cfgs(self, inv: Invocation[Cfg, Out]) -> Iterable[Cfg]:
        """Return the configurations to try beside the heuristic's; by default an empty tuple."""
        return ()

    def fwd_with_residuals(self, *args: Any, cfg: Cfg, **kwargs: Any) -> tuple[Out, Any]:
        """Do the operation; return its result and the residuals for `vjp`."""
        raise Unsupported(f"kernel {self.op_id!r} has no backward pass: define fwd_with_residuals(*args, cfg)")

    def vjp(self, residuals: Any, dy: Any, *args: Any, cfg: Cfg, **kwargs: Any) -> tuple[Any, ...]:
        """Return one gradient per positional argument."""
        raise Unsupported(f"kernel {self.op_id!r} has no backward pass: define vjp(residuals, dy, *args, cfg)")

    def create_shard_map_wrapper(self, fn: Callable[..., Out], *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Return `(wrapped, args)` or `(wrapped, args, finish)` for `Executor(..., method="shard_map")`.

        Keyword arguments are `mesh`, `in_specs`, `out_specs`, `check_vma`, and the keyword arguments of the call.
        """
        raise Unsupported(f"kernel {self.op_id!r} cannot run in shard_map: define create_shard_map_wrapper(fn, *args)")

    def compile_cfg(self, inv: Invocation[Cfg, Out], cfg: Cfg) -> object:
        """Compile one candidate ahead of its first run; called from several threads at once, if `compiles` is True.

        It may return the path or the bytes of the build. Candidates with equal builds are measured once, unless they
        differ on axes that are set at launch (`Space.at_launch`).
        """

    def prune_cfgs(self, inv: Invocation[Cfg, Out], cfgs: Sequence[Cfg]) -> Iterable[Cfg]:
        """Return the candidates that are worth a try; the others are not compiled. By default all are."""
        return cfgs

    def cfg_group(self, inv: Invocation[Cfg, Out], cfg: Cfg) -> int:
        """Return the group of a candidate. A group is tried only if all groups with lower numbers failed."""
        return 0

    def cfg_priority(self, inv: Invocation[Cfg, Out], cfg: Cfg) -> int:
        """Return the priority of a candidate in its group: the highest is tried first, before a budget ends."""
        return 0

    def enough_s(self, inv: Invocation[Cfg, Out]) -> float:
        """Return the seconds at which a candidate is fast enough to end a tuning; 0 for never."""
        return 0.0

    def roofline(self, inv: Invocation[Cfg, Out]) -> Roofline | None:
        """Return the work of a call and the peak of its device, for reports; None if they are not known."""
        return None

    def mutated(self, inv: Invocation[Cfg, Out]) -> Sequence[object] | None:
        """Return arguments that runs write to, which are put back between runs; the others are compared with copies."""
        return None

    def compare(self, output: Any, expected: Any) -> Any:
        """Return None or True if an output agrees with the heuristic's output, else False or a text with the reason.

        Used while tuning if `checks` is True and `checker` returns None. By default numbers may differ by a tolerance
        that follows from the dtypes and sizes of the arguments.
        """
        return difference(output, expected)

    def make_inputs(self, inv: Invocation[Cfg, Out]) -> tuple[tuple[Any, ...], Mapping[str, Any]] | None:
        """Return arguments to tune on where the caller's are missing; None to use made-up arrays.

        A trace, a recording, the background and the command line have no arrays of a caller. `inv` holds made-up
        arrays of the right shapes and dtypes: random floats that are not zero; integers that were recorded, or from 1
        to 3. The returned arguments must have the same call key.
        """
        return None

    def checker(self, inv: Invocation[Cfg, Out]) -> Callable[[Out], Any] | None:
        """Return a function that says why an output is wrong, or None to `compare` it with the heuristic's output.

        Called once per tuning, before any candidate can write to the arguments. The function is called once per
        candidate, outside the timed window.
        """
        return None
