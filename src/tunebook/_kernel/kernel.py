"""A kernel, and one call of it."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from tunebook._arrays.describe import device_of, libraries_of
from tunebook._arrays.device_fingerprint import (
    device_fingerprint,
    driver_of,
    environment_fingerprint,
    get_device_platform,
)
from tunebook._arrays.framework import surroundings_of
from tunebook._base.errors import DefinitionError, Unsupported
from tunebook._base.hashing import blake2b
from tunebook._base.vocabulary import Problem
from tunebook._code.checksum import candidates_checksum, code_checksum
from tunebook._kernel.output_check import difference
from tunebook._keys.call_key import call_key
from tunebook._keys.fast_key import fast_key_of
from tunebook._statistics.objective import objective_name

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

    from tunebook._base.vocabulary import StrategyLike
    from tunebook._statistics.roofline import Roofline

Cfg = TypeVar("Cfg")
Out = TypeVar("Out")

# The kernels that this process has made, by their name, for recordings that are read from a file. The latest of a name
# counts: that is the one of the notebook cell that was run again.
LIVE: Final[weakref.WeakValueDictionary[str, Kernel[Any, Any]]] = weakref.WeakValueDictionary()

_WITH_VARIANTS: Final = ("run", "heuristic_cfg", "candidate_cfgs", "fwd_with_residuals", "vjp")
_MEMOISED: Final = 4096  # calls that keep changing must not grow a memo for ever
# Editing these, or their variants per platform, leaves every measurement valid.
_NOT_MEASURED: Final = (
    "heuristic_cfg", "candidate_cfgs", "prune_cfgs", "cfg_group", "cfg_priority", "enough_s", "objective", "strategy",
    "roofline", "__"
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Invocation(Generic[Cfg, Out]):
    """One call of a kernel: its arguments after `Kernel.prepare`, and how it is to be run.

    `surroundings` is what it depends on beside its arguments, if it was made elsewhere; None is what is in force here.
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
    surroundings: Mapping[str, Any] | None = None
    _key: list[str] = field(default_factory=list, init=False, repr=False, compare=False)

    @property
    def call_key(self) -> str:
        """The key of this call, made from its arguments; worked out once."""
        if not self._key:
            self._key.append(call_key(self._arguments()))
        return self._key[0]

    def make_key(self, key_builder: Callable[[Invocation[Cfg, Out]], str] | None = None) -> str:
        """Return `key_builder(self)`, or `call_key` if there is no builder."""
        if key_builder is None:
            return self.call_key
        key = key_builder(self)
        if not isinstance(key, str):
            raise DefinitionError(f"the key_builder of {self.op_id!r} must return a str, not {type(key).__name__}")
        return key

    def _arguments(self) -> dict[str, object]:
        arguments: dict[str, object] = {f"arg{i}": value for i, value in enumerate(self.args)}
        arguments.update(self.kwargs)
        # Only what differs from a plain call: a key must not change when this class gains a field.
        context = {"batch_axes": self.batch_axes, "method": self.method}
        if self.method is not None:
            context |= {"mesh": self.mesh, "in_specs": self.in_specs, "out_specs": self.out_specs}
        arguments.update({f"@{name}": value for name, value in context.items() if value is not None})
        arguments.update(self.beside())
        return arguments

    def beside(self) -> Mapping[str, Any]:
        """Return what this call depends on beside its arguments; empty for most."""
        return surroundings_of((self.args, self.kwargs)) if self.surroundings is None else self.surroundings

    def placement(self) -> dict[str, Any]:
        """Return how the call is spread over a mesh, as fields of an invocation; empty for most."""
        names = ("method", "mesh", "in_specs", "out_specs", "check_vma")
        return {} if self.method is None else {name: getattr(self, name) for name in names}

    @property
    def platform(self) -> str:
        """The kind of device that the arguments are on: "gpu", "tpu" or "cpu"."""
        return get_device_platform(device_of((self.args, self.kwargs)))

    @property
    def device(self) -> str:
        """The fingerprint of the device that the arguments are on."""
        return device_fingerprint(device_of((self.args, self.kwargs)))


class Kernel(Generic[Cfg, Out]):
    """One operation with a free configuration. Subclass it and define `run`; the rest is optional.

    `run`, `heuristic_cfg`, `candidate_cfgs`, `fwd_with_residuals` and `vjp` may have variants per platform and
    context (`run_gpu`, `candidate_cfgs_tpu`, `run_shard_map`, `run_shard_map_gpu`); the most specific one is used.
    """

    op_id: str
    version: str
    key_builder: Callable[[Invocation[Cfg, Out]], str] | None

    def __init__(
        self,
        op_id: str,
        version: str = "0",
        key_builder: Callable[[Invocation[Cfg, Out]], str] | None = None,
    ) -> None:
        if not op_id:
            raise DefinitionError("a kernel needs an op_id: a name that is unique among the kernels of a program")
        self.op_id = op_id
        self.version = version
        self.key_builder = key_builder
        LIVE[self.op_id_v] = self

    # ------------------------------------------------------------------------------------------ what authors define

    def prepare(self, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Normalise the arguments before they are keyed and run; by default they are left as they are."""
        return args, kwargs

    def run(self, *args: Any, cfg: Cfg, **kwargs: Any) -> Out:
        """Do the operation with this configuration."""
        raise Unsupported(f"kernel {self.op_id!r} defines no run(*args, cfg, **kwargs)")

    def heuristic_cfg(self, inv: Invocation[Cfg, Out]) -> Cfg:
        """Return a reasonable configuration without measuring anything."""
        raise Unsupported(f"kernel {self.op_id!r} defines no heuristic_cfg(inv)")

    def candidate_cfgs(self, inv: Invocation[Cfg, Out]) -> Iterable[Cfg]:
        """Return the configurations to try, beside the heuristic's; by default none."""
        return ()

    def fwd_with_residuals(self, *args: Any, cfg: Cfg, **kwargs: Any) -> tuple[Out, Any]:
        """Do the operation, and return what `vjp` needs beside its result."""
        raise Unsupported(f"kernel {self.op_id!r} has no backward pass: it defines no fwd_with_residuals")

    def vjp(self, residuals: Any, dy: Any, *args: Any, cfg: Cfg, **kwargs: Any) -> tuple[Any, ...]:
        """Return one gradient per positional argument."""
        raise Unsupported(f"kernel {self.op_id!r} has no backward pass: it defines no vjp")

    def create_shard_map_wrapper(self, fn: Callable[..., Out], *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Return `(wrapped, args)` or `(wrapped, args, finish)` for `Executor(..., method="shard_map")`.

        Keyword arguments are `mesh`, `in_specs`, `out_specs`, `check_vma`, and the call's own.
        """
        raise Unsupported(f"kernel {self.op_id!r} defines no create_shard_map_wrapper, so it cannot run in shard_map")

    compiles: bool = False
    checks: bool = True
    objective: str | Callable[[Sequence[float]], float] = "typical"
    """What makes a candidate the best: "typical", "median", "mean", "p95", or a function of its samples in seconds."""
    strategy: StrategyLike | None = None
    """How candidates are searched; None is to race them all, unless they are a `Space` too big for that."""
    prunes: bool = False
    """Whether `prune_cfgs` leaves some out, for which it needs the whole list."""

    def compile_cfg(self, inv: Invocation[Cfg, Out], cfg: Cfg) -> object:
        """Compile one candidate ahead of its first run; called from several threads at once, if `compiles` is True.

        If it returns the path of what it made, or bytes, candidates that compile to the same are measured once, unless
        they differ on axes that are set at launch (`Space.at_launch`).
        """

    def prune_cfgs(self, inv: Invocation[Cfg, Out], cfgs: Sequence[Cfg]) -> Iterable[Cfg]:
        """Return the candidates that are worth a try; the others are not compiled. By default all are."""
        return cfgs

    def cfg_group(self, inv: Invocation[Cfg, Out], cfg: Cfg) -> int:
        """Return the group of a candidate: one is tried only if none of a lower number gave a right result."""
        return 0

    def cfg_priority(self, inv: Invocation[Cfg, Out], cfg: Cfg) -> int:
        """Return when in its group a candidate is tried: the highest first, which counts if a budget ends it."""
        return 0

    def enough_s(self, inv: Invocation[Cfg, Out]) -> float:
        """Return the seconds at which a candidate is as good as any can be, which ends a tuning; 0 is never."""
        return 0.0

    def roofline(self, inv: Invocation[Cfg, Out]) -> Roofline | None:
        """Return the work of a call and what its device can do, for reports; None if that is not known."""
        return None

    def mutated(self, inv: Invocation[Cfg, Out]) -> Sequence[object] | None:
        """Return the arguments that runs write to, which are put back between runs; None is to find out."""
        return None

    def compare(self, output: Any, expected: Any) -> Any:
        """Return how an output differs from the one of the heuristic's configuration, or None if it does not.

        Used while tuning if `checks` is True and there is no `checker`.
        """
        return difference(output, expected)

    def make_inputs(self, inv: Invocation[Cfg, Out]) -> tuple[tuple[Any, ...], Mapping[str, Any]] | None:
        """Return arguments to tune on, where there are none: in a trace, or from a recording; None for made-up ones.

        `inv` has the made-up ones, of the right shapes and dtypes: random floats that are not zero, and integers from 1
        to 3.
        """
        return None

    def checker(self, inv: Invocation[Cfg, Out]) -> Callable[[Out], Any] | None:
        """Return what says why an output is wrong, or None to `compare` it with the heuristic's.

        Asked for once per tuning, before any candidate can write to the arguments, and called once per candidate,
        outside the timed window.
        """
        return None

    # ------------------------------------------------------------------------------------ what the library asks of it

    @property
    def argument_classes(self) -> tuple[object, ...]:
        """Classes and annotations of arguments, which alone may be built when a saved recording is read."""
        return ()

    @property
    def module(self) -> str:
        """The module to import so that this kernel is defined."""
        return type(self).__module__

    @property
    def op_id_v(self) -> str:
        """The op id with its version, as it stands in keys."""
        return f"{self.op_id}@v{self.version}"

    def problem(self, inv: Invocation[Cfg, Out]) -> Problem:
        """Return what this call's configuration is looked up by."""
        elsewhere = (inv.method, inv.batch_axes, inv.surroundings)
        if self.key_builder is not None or any(each is not None for each in elsewhere):
            return self._worked_out(inv)
        try:
            key = fast_key_of((inv.args, dict(inv.kwargs)))
            known = self._problems.get(key)
        except (TypeError, AttributeError):
            return self._worked_out(inv)
        if known is None:
            if len(self._problems) >= _MEMOISED:
                self._problems.clear()
            known = self._problems[key] = self._worked_out(inv)
        return known

    def _worked_out(self, inv: Invocation[Cfg, Out]) -> Problem:
        return Problem(inv.device, self.op_id_v, inv.make_key(self.key_builder))

    @cached_property
    def _problems(self) -> dict[Hashable, Problem]:
        """The problems that calls turned out to be: working one out takes 40 us, and is the same every time."""
        return {}

    def variant(self, name: str, inv: Invocation[Cfg, Out]) -> Callable[..., Any]:
        """Return the most specific definition of an operation for a call."""
        if name not in self._varied:  # most kernels; finding out the platform takes as long as all the rest of a call
            return getattr(self, name)  # type: ignore[no-any-return]
        parts = [part for part in (inv.method, inv.platform) if part]
        suffixes = ["_".join(parts), *parts] if len(parts) > 1 else parts
        for suffix in suffixes:
            found = getattr(self, f"{name}_{suffix}", None)
            if found is not None:
                return found  # type: ignore[no-any-return]
        return getattr(self, name)  # type: ignore[no-any-return]

    @cached_property
    def _varied(self) -> frozenset[str]:
        """The operations that have variants."""
        names = dir(self)
        return frozenset(op for op in _WITH_VARIANTS if any(name.startswith(f"{op}_") for name in names))

    def heuristic(self, inv: Invocation[Cfg, Out]) -> Cfg | None:
        """Return the heuristic's configuration, or None if the kernel has no heuristic."""
        try:
            return self.variant("heuristic_cfg", inv)(inv)  # type: ignore[no-any-return]
        except Unsupported:
            return None

    def candidates(self, inv: Invocation[Cfg, Out]) -> Iterable[Cfg]:
        """Return the candidates for a call."""
        return self.variant("candidate_cfgs", inv)(inv)  # type: ignore[no-any-return]

    def bind(self, inv: Invocation[Cfg, Out], cfg: Cfg, *, backward: bool = False) -> Callable[..., Any]:
        """Return what runs a call with a configuration, given its arguments; `backward` runs the gradient too."""
        if backward:
            return partial(self._forward_and_backward, inv, cfg)
        run = partial(self.variant("run", inv), cfg=cfg)
        return partial(self._sharded, inv, cfg, run) if inv.method == "shard_map" else run

    def has_backward(self, inv: Invocation[Cfg, Out]) -> bool:
        """Whether this kernel defines a backward pass for a call."""
        return all(
            getattr(self.variant(name, inv), "__func__", None) is not getattr(Kernel, name)
            for name in ("fwd_with_residuals", "vjp")
        )

    def _forward_and_backward(self, inv: Invocation[Cfg, Out], cfg: Cfg, *args: Any, **kwargs: Any) -> Any:
        out, residuals = self.variant("fwd_with_residuals", inv)(*args, cfg=cfg, **kwargs)
        # The output stands in for its own gradient: it has the right shape and dtype, and is no special value.
        return self.variant("vjp", inv)(residuals, out, *args, cfg=cfg, **kwargs)

    def _sharded(self, inv: Invocation[Cfg, Out], cfg: Cfg, run: Callable[..., Out], *args: Any, **kwargs: Any) -> Any:
        wrapped, call_args, *finish = self.create_shard_map_wrapper(
            run,
            *args,
            mesh=inv.mesh,
            in_specs=inv.in_specs,
            out_specs=inv.out_specs,
            check_vma=inv.check_vma,
            **kwargs,
        )
        out = wrapped(*call_args)
        return finish[0](out, cfg=cfg) if finish else out

    def environment(self, inv: Invocation[Cfg, Out]) -> str:
        """Return the software that a measurement of this call depends on."""
        arguments = inv.args, inv.kwargs
        return environment_fingerprint(libraries_of(arguments), driver_of(device_of(arguments)))

    def checksum(self, inv: Invocation[Cfg, Out]) -> str:
        """Return the digest over the kernel's code, its helpers, its version and its candidates for this call."""
        return self._checksum_over(self.candidates(inv))

    def _checksum_over(self, candidates: Iterable[Cfg]) -> str:
        # The objective is not code: a decision under another one is made from the same measurements.
        objective = "" if self.objective == "typical" else f"-{objective_name(self.objective)}"
        return f"{self.code_checksum}-{candidates_checksum(candidates)}{objective}"

    @cached_property
    def code_checksum(self) -> str:
        """The digest over the code that a measurement depends on: not the heuristic, not the list of candidates."""
        names = {
            name
            for kind in type(self).__mro__
            if issubclass(kind, Kernel) and kind is not Kernel
            for name, value in vars(kind).items()
            if callable(value) and not name.startswith(_NOT_MEASURED)
        }
        parts = [code_checksum(getattr(self, name), version=self.version) for name in sorted(names)]
        return blake2b("".join(parts).encode(), digest_size=16).hexdigest()
