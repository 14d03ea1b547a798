"""A kernel made from one function, and the options of `@tunable`."""

from __future__ import annotations

import inspect
import math
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypedDict

from tunebook._arrays.describe import is_traced
from tunebook._base.config_codec import annotations_of
from tunebook._base.errors import DefinitionError, TuningFailed
from tunebook._base.vocabulary import computed_once
from tunebook._code.checksum import checksum_beside, read_code
from tunebook._code.deferred import refuse_deferred
from tunebook._kernel.kernel import Invocation, Kernel
from tunebook._kernel.measure import check_measure
from tunebook._kernel.output_check import Comparison, as_mismatch, comparison
from tunebook._keys.buckets import Buckets, as_buckets, unknown_name
from tunebook._keys.call_key import call_key
from tunebook._measure.stopwatch import Attempt
from tunebook._space.choice import Choice
from tunebook._space.space import Space
from tunebook._space.written_config import WrittenConfigs, as_config
from tunebook._statistics.decide import objective_for
from tunebook._statistics.roofline import NEAR, Roofline, check_peak, peak_of
from tunebook._tuning.plan import asked_of, left_by

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence
    from typing import Literal

    from tunebook._base.vocabulary import Problem, StrategyLike
    from tunebook._code.replay import CodeFacts
    from tunebook._kernel.measure import Measure
    from tunebook._kernel.output_check import Compare, Tolerance
    from tunebook._kernel.policy import AutotunePolicy, MissFallback
    from tunebook._kernel.rounded_call import RoundedCall
    from tunebook._measure.reference_check import ReferenceCheck
    from tunebook._selection.persistent_cache import PersistentCache
    from tunebook._selection.selector import ConfigSelectorChain, Selection
    from tunebook._statistics.roofline import Peak
    from tunebook._tuning.tuner import Tuner

CONFIG: Final = "config"
HOW_TO_DIFFER: Final = "Give a reference= to check against, or check=False if outputs may differ"
# An amount of work: a number, or a function of the call's arguments.
Amount: TypeAlias = "float | Callable[..., float]"
SpaceLike: TypeAlias = "Space | Iterable[object] | Callable[..., Iterable[object]]"


class TunableOptions(TypedDict, total=False):
    """The options of `@tunable` beside `space` and `name`; the docstring of `tunable` describes each of them."""

    heuristic: object
    version: str
    key: Iterable[str] | None
    ignore: Iterable[str]
    bucket: Mapping[str, object] | None
    representative: bool
    layout: bool
    reference: Callable[..., Any] | None
    check: bool | str | Compare
    tolerance: Tolerance | None
    mutates: Iterable[str] | None
    inputs: Callable[..., Iterable[Any]] | None
    compile: Callable[[Any], object] | None
    prune: Callable[..., Iterable[Any]] | None
    cost: Callable[..., float] | None
    keep: float | None
    objective: str | Callable[[Sequence[float]], float]
    measure: Measure | None
    flops: Amount | None
    bytes: Amount | None
    peak: Peak | None
    strategy: StrategyLike | None
    policy: AutotunePolicy | MissFallback | None
    tuner: Tuner | Literal[False] | None
    store: str | os.PathLike[str] | PersistentCache[Any] | Literal[False] | None
    on_event: Callable[..., None] | None


class FunctionKernel(Kernel[Any, Any]):
    """A kernel made from one function. Its invocations hold one argument per parameter, in order of the signature."""

    runner: Callable[..., Any]  # takes one argument per parameter, and a configuration
    selector: ConfigSelectorChain[Any]
    refuse: Callable[[dict[str, Any]], object] | None = None  # as for a `Dispatcher`

    def __init__(
        self, function: Callable[..., Any] | Choice, space: SpaceLike | None, name: str | None, options: TunableOptions
    ) -> None:
        self._heuristic = options.get("heuristic")
        self._choice = function if isinstance(function, Choice) else None
        if isinstance(function, Choice):
            if space is not None:
                raise DefinitionError(
                    "a choice has its own space; give one to an Option: tunebook.Option(function, space=...)"
                )
            if name is None:
                ways = ", ".join(function.options)
                raise DefinitionError(f"a choice of {ways} needs a name: tunable(choice(...), name='mul')")
            if self._heuristic is None:
                self._heuristic = function.default
            space, function = tuple(function), function.function(name)
        elif space is None:
            raise DefinitionError(f"{default_name(function)!r} needs a space: tunable(space=Space(block=[32, 64]))")
        refuse_deferred(function, name)
        self.function: Final = function
        self.parameters: Final = _parameters(function)
        self._signature = inspect.Signature(list(self.parameters.values()))
        super().__init__(name or default_name(function), options.get("version", "0"), self._call_key)
        self._space = space if isinstance(space, Space) or callable(space) else _configs(self.op_id, space)
        self._written = WrittenConfigs(self.op_id, self._space)
        if self._heuristic is not None and not callable(self._heuristic):
            self._heuristic = self._written.check_heuristic(self._heuristic)
        self._checksum: str | None = None
        key, mutates = options.get("key"), options.get("mutates")
        keyed = self._known_names("key", self.parameters if key is None else key)
        keyed -= self._known_names("ignore", options.get("ignore", ()))
        self.names: Final = tuple(name for name in self.parameters if name in keyed)
        self.buckets: Final[Buckets] = as_buckets(options.get("bucket"), self.names)
        self.has_buckets = bool(self.buckets.whole or self.buckets.by_dimension)
        self._representative = options.get("representative", True)
        self.layout: Final = options.get("layout", True)
        self.reference: Final = options.get("reference")
        self._check, self._tolerance = options.get("check", True), options.get("tolerance")
        self._compare = comparison(self._check, self._tolerance, self.op_id)
        self.checks = self._compare is not None
        self.mutates = None if mutates is None else self._known_names("mutates", mutates)
        self._inputs, self._compile = options.get("inputs"), options.get("compile")
        self.compiles = self._compile is not None
        self._prune, self._cost, self._keep = options.get("prune"), options.get("cost"), options.get("keep")
        self._check_keep()
        self.prunes = any(each is not None for each in (self._choice, self._prune, self._cost))
        self.objective = options.get("objective", "typical")
        objective_for(self.objective)  # an unknown name is an error here
        self.measure = check_measure(options.get("measure"))
        self._flops, self._bytes = options.get("flops"), options.get("bytes")
        self._peak = check_peak(options.get("peak"))
        self.strategy = options.get("strategy")
        if self.strategy is not None:
            from tunebook.search._by_name import check_strategy  # noqa: PLC0415 - loaded late: 20 ms

            check_strategy(self.strategy)

    def _check_keep(self) -> None:
        if (self._cost is None) != (self._keep is None):
            raise DefinitionError(f"{self.op_id!r}: cost= ranks candidates and keep= says how many remain; give both")
        if self._keep is not None and not self._keep > 0:
            raise DefinitionError(f"{self.op_id!r}: keep={self._keep!r}: write a number of candidates, or a part: 0.25")

    def _known_names(self, option: str, names: Iterable[str]) -> frozenset[str]:
        if isinstance(names, str):
            raise DefinitionError(f"{self.op_id!r}: {option}= takes a tuple of names: {option}=({names!r},)")
        given = tuple(names)
        for name in given:
            if name not in self.parameters:
                unknown = unknown_name(name, list(self.parameters))
                raise DefinitionError(f"{self.op_id!r}: {option}={given!r} names {name!r}, but {unknown}")
        return frozenset(given)

    @property
    def module(self) -> str:
        return self.function.__module__

    @property
    def argument_classes(self) -> tuple[object, ...]:
        hints = annotations_of(self.function)
        defaults = [p.default for p in self.parameters.values() if p.default is not p.empty]
        return (*(hint for name, hint in hints.items() if name in self.parameters), *defaults)

    def invocation(self, arguments: tuple[Any, ...], override: object = None) -> Invocation[Any, Any]:
        """Return a call with one argument per parameter."""
        return Invocation(self.op_id, arguments, {}, override_cfg=override)

    def select(self, arguments: tuple[Any, ...], override: object, problem: Problem | None) -> Selection[Any]:
        """Return the answer of the tiers to a call with one argument per parameter."""
        return self.selector.select(self.invocation(arguments, override), self, problem)

    def call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Invocation[Any, Any]:
        """Return a call with these arguments, passed as the function's signature takes them."""
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as error:
            name = self.function.__name__
            remedy = f"; {CONFIG}= is for the call itself: {name}(..., {CONFIG}=...)" if CONFIG in kwargs else ""
            raise TypeError(f"{name}(): {error}{remedy}") from None
        bound.apply_defaults()
        return self.invocation(tuple(bound.arguments[name] for name in self.parameters))

    def run(self, *args: Any, cfg: Any, **kwargs: Any) -> Any:
        return self.runner(*args, cfg, **kwargs)

    def heuristic_cfg(self, inv: Invocation[Any, Any]) -> Any:
        if self._heuristic is None:
            return super().heuristic_cfg(inv)
        if not callable(self._heuristic):
            return self._written.tell_of_heuristic(self._heuristic) if self._written.outside else self._heuristic
        try:
            found = self._spread(self._heuristic, inv)
        except TypeError as error:
            if _takes(self._heuristic, self._passed(self._heuristic, inv)):
                raise
            raise DefinitionError(
                f"{self.op_id!r}: the heuristic cannot be called with the arguments of the kernel, "
                f"({', '.join(self.parameters)}): {error}"
            ) from None
        return self._written.tell_of_heuristic(self._written.check_heuristic(found))

    def whole_cfg(self, inv: Invocation[Any, Any], cfg: Any) -> Any:
        return self._written.whole("overlay", cfg, partial(self.heuristic, inv))

    def overlay_cfg(self, cfg: object) -> Any:
        """Return the configuration of an overlay, which may have a part of the names; each must be in the space."""
        if isinstance(cfg, dict) and not callable(self._heuristic):
            return self._written.whole("overlay", cfg, lambda: self._heuristic)
        self._written.check_names("overlay", cfg)
        return as_config(cfg)

    def override_cfg(self, cfg: object, arguments: tuple[Any, ...] | None) -> Any:
        """Return the configuration that `config=` of a call gives; the rest of a part is the heuristic's."""

        def heuristic() -> Any:
            # A program that is compiled has no arguments yet: a heuristic that is a function cannot be asked.
            return self._heuristic if arguments is None else self.heuristic(self.invocation(arguments))

        return self._written.whole(CONFIG, cfg, heuristic)

    def candidate_cfgs(self, inv: Invocation[Any, Any]) -> Iterable[Any]:
        if isinstance(self._space, (Space, tuple)):
            return self._space
        return _configs(self.op_id, self._spread(self._space, inv))

    def checksum(self, inv: Invocation[Any, Any]) -> str:
        """Return the digest over code and candidates, made once unless the candidates depend on the call."""
        if not isinstance(self._space, (Space, tuple)):
            return super().checksum(inv)
        if self._checksum is None:
            self._checksum = self._checksum_over(self._space)
        return self._checksum

    @computed_once
    def code_facts(self) -> CodeFacts:
        return read_code(self.function, version=self.version)

    def _call_key(self, inv: Invocation[Any, Any]) -> str:
        arguments = {n: value for n, value in zip(self.parameters, inv.args, strict=True) if n in self.names}
        return call_key({**arguments, **inv.beside()}, buckets=self.buckets, layout=self.layout)

    def compile_cfg(self, inv: Invocation[Any, Any], cfg: Any) -> object:
        return None if self._compile is None else self._compile(cfg)

    def prune_cfgs(self, inv: Invocation[Any, Any], cfgs: Sequence[Any]) -> Iterable[Any]:
        """Return the candidates that remain after `prune`, `cost` and `keep`."""
        left = [cfg for cfg in cfgs if self._choice is None or self.cfg_priority(inv, cfg) >= 0]
        arguments = ", ".join(self.parameters)
        if self._prune is not None:
            what, prune = f"prune= of {self.op_id!r}", partial(self._spread, self._prune, inv)
            left = left_by(what, f"configs, {arguments}", prune, left, left)
        if self._cost is None or self._keep is None:
            return left
        # A cost of NaN says that the model does not know: the candidate goes last.
        costs = {i: self._cost_of(inv, cfg, f"config, {arguments}") for i, cfg in enumerate(left)}
        order = sorted(costs, key=lambda i: math.inf if math.isnan(costs[i]) else costs[i])
        kept = set(order[: math.ceil(self._keep * len(left)) if self._keep < 1 else int(self._keep)])
        return [cfg for i, cfg in enumerate(left) if i in kept]

    def _cost_of(self, inv: Invocation[Any, Any], cfg: Any, takes: str) -> float:
        what = f"cost= of {self.op_id!r}"
        cost = asked_of(what, takes, self._spread, self._cost, inv, cfg)
        try:
            return float(cost)
        except (TypeError, ValueError):
            raise DefinitionError(f"{what} returned {cost!r:.200} for {cfg!r}; return a number") from None

    def cfg_group(self, inv: Invocation[Any, Any], cfg: Any) -> int:
        return 0 if self._choice is None else self._choice.option(cfg).group

    def cfg_priority(self, inv: Invocation[Any, Any], cfg: Any) -> int:
        priority = 0 if self._choice is None else self._choice.option(cfg).priority
        return self._spread(priority, inv) if callable(priority) else priority

    @property
    def makes_inputs(self) -> bool:
        return self._inputs is not None

    def make_inputs(self, inv: Invocation[Any, Any]) -> tuple[tuple[Any, ...], Mapping[str, Any]] | None:
        if self._inputs is None:
            return None
        made = tuple(self._spread(self._inputs, inv))
        if len(made) != len(self.parameters):
            raise DefinitionError(
                f"inputs= of {self.op_id!r} returned {len(made)} arguments; return one for each of "
                f"{', '.join(self.parameters)}"
            )
        return made, {}

    def rounded(self, inv: Invocation[Any, Any]) -> tuple[Invocation[Any, Any], RoundedCall] | None:
        if not self.has_buckets:
            return None
        refused = "" if self._representative else "representative=False"
        found = self._rounded(inv, refused)
        if found is None or not found.changed:
            return None if found is None else (inv, found)
        settings = inv.beside() if is_traced(inv) else inv.surroundings
        made = replace(inv, args=tuple(found.arguments.values()), surroundings=settings)
        if self.problem(made).call_key != self.problem(inv).call_key:
            refused = "the representative size of its bucket is in another bucket"
        elif self.checksum(made) != self.checksum(inv):
            refused = "its candidates depend on the size"
        own = self._rounded(inv, refused)
        return (made, found) if not refused or own is None else (inv, own)

    def _rounded(self, inv: Invocation[Any, Any], refused: str) -> RoundedCall | None:
        from tunebook._kernel.rounded_call import rounded_call  # noqa: PLC0415 - for kernels with buckets

        return rounded_call(dict(zip(self.parameters, inv.args, strict=True)), self.names, self.buckets, refused)

    def own_sizes(self, inv: Invocation[Any, Any]) -> str:
        """Return the sizes of a call that have buckets; "" if they are not known."""
        if not self.has_buckets:
            return ""
        with Attempt():  # a fault in describing the sizes must not fail the call
            found = self._rounded(inv, "its own")
            return "" if found is None else found.sizes
        return ""

    def mutated(self, inv: Invocation[Any, Any]) -> Sequence[object] | None:
        if self.mutates is None:
            return None
        return [value for name, value in zip(self.parameters, inv.args, strict=True) if name in self.mutates]

    def enough_s(self, inv: Invocation[Any, Any]) -> float:
        """Return the seconds of a candidate that runs near the peak of the device."""
        roofline = self.roofline(inv)
        return 0.0 if roofline is None else roofline.least_s / NEAR

    def roofline(self, inv: Invocation[Any, Any]) -> Roofline | None:
        if self._flops is None and self._bytes is None:
            return None
        flops, moved = (self._spread(a, inv) if callable(a) else a for a in (self._flops, self._bytes))
        return Roofline(flops, moved, self._peak or peak_of(inv.device))

    def checker(self, inv: Invocation[Any, Any]) -> Callable[[Any], Any] | None:
        if self.reference is None or self._compare is None:
            return None
        return self._ask(self.reference, inv)

    def _ask(self, reference: Callable[..., Any], inv: Invocation[Any, Any]) -> ReferenceCheck:
        from tunebook._measure.reference_check import ReferenceCheck  # noqa: PLC0415 - loaded late: for tuning only

        run, compare = partial(self._spread, reference, inv), self._compare_on(inv)
        return ReferenceCheck(
            run,
            (inv.args, inv.kwargs),
            self.mutated(inv),
            lambda output, expected: as_mismatch(compare(output, expected), "unlike the reference"),
        )

    @computed_once
    def check_checksum(self) -> str:
        given = [self.reference, self._check, repr(self._tolerance)]
        return checksum_beside(self.function, given) if given != [None, True, "None"] else ""

    def blame(self, inv: Invocation[Any, Any], error: TuningFailed) -> TuningFailed:
        kinds = {m.failure.kind for m in error.measurements if m.failure is not None}
        if self.reference is None or not kinds or not kinds <= {"wrong-result", "nan"}:
            return error
        once = self._ask(self.reference, inv)
        unlike = as_mismatch(once.difference(self._ask(self.reference, inv)))
        if unlike is None or as_mismatch(once.difference(once)) is not None:  # an output that cannot be compared
            return error
        # Without the measurements: the candidates may be right.
        said = "the reference returns another output each time, so no output can be checked against it"
        return TuningFailed(f"{said}. Fix its random seed, or give another check=", [ValueError(unlike.message)])

    def comparison(self, inv: Invocation[Any, Any]) -> Compare:
        compare = self._compare_on(inv)
        unlike = "most other candidates" if self._heuristic is None else "the heuristic's configuration"
        return lambda output, expected: as_mismatch(compare(output, expected), f"unlike {unlike}. {HOW_TO_DIFFER}")

    def _compare_on(self, inv: Invocation[Any, Any]) -> Compare:
        compare = self._compare
        if compare is None:
            return lambda _output, _expected: None
        return compare.on((inv.args, inv.kwargs)) if isinstance(compare, Comparison) else compare

    def _spread(self, function: Callable[..., Any], inv: Invocation[Any, Any], *before: Any) -> Any:
        """Call `function` with `before` and the arguments."""
        args, kwargs = self._passed(function, inv)
        return function(*before, *args, **kwargs)

    def _passed(
        self, function: Callable[..., Any], inv: Invocation[Any, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments by name for a function that takes names only, else as the kernel's signature does."""
        arguments = OrderedDict(zip(self.parameters, inv.args, strict=True))
        if _takes_names_only(function):
            return (), arguments
        bound = inspect.BoundArguments(self._signature, arguments)
        return bound.args, bound.kwargs


def _takes_names_only(function: Callable[..., Any]) -> bool:
    try:
        kinds = {parameter.kind for parameter in inspect.signature(function).parameters.values()}
    except (TypeError, ValueError):  # a built-in function without a signature
        return False
    return bool(kinds) and kinds <= {inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD}


def _takes(function: Callable[..., Any], arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> bool:
    """Whether a function takes some arguments, as far as its signature tells."""
    args, kwargs = arguments
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError:
        return False
    except ValueError:  # some builtins have no signature
        return True
    return True


def _configs(op_id: str, space: Any) -> tuple[Any, ...]:
    if isinstance(space, (str, bytes, Mapping)) or not isinstance(space, Iterable):
        raise DefinitionError(
            f"the space of {op_id!r} is of type {type(space).__name__}; give a tunebook.Space(block=[32, 64]), "
            "a list of configurations, or a function of the arguments that returns one"
        )
    return tuple(as_config(config) for config in space)


def default_name(function: Callable[..., Any]) -> str:
    """Return the default op id of a function: the place to import it from."""
    module = function.__module__
    if module == "__main__":
        # Scripts are all called __main__; two of them with a `matmul` each must not share entries.
        module = Path(getattr(sys.modules["__main__"], "__file__", None) or "__main__").stem
    return f"{module}.{function.__qualname__}"


def _parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    try:
        parameters = dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        raise DefinitionError(
            f"{function!r} has no signature that can be read; decorate a Python function that calls it: "
            f"def run(x, *, config)"
        ) from None
    config = parameters.pop(CONFIG, None)
    if config is None or config.kind is config.POSITIONAL_ONLY:
        own = inspect.Parameter(CONFIG, inspect.Parameter.KEYWORD_ONLY)
        plain = [p.replace(annotation=p.empty) for p in parameters.values()]
        signature = inspect.Signature(sorted([*plain, own], key=lambda p: p.kind))
        raise DefinitionError(
            f"{function.__qualname__} does not take a keyword argument 'config'; write "
            f"def {function.__name__}{signature}, and read the values that are tuned as config.NAME"
        )
    return parameters
