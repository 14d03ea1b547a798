"""A kernel made from one function: what `@tunable` gives to the selector."""

from __future__ import annotations

import inspect
import sys
import typing
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from tunebook._base.errors import DefinitionError
from tunebook._code.checksum import code_checksum
from tunebook._kernel.kernel import Invocation, Kernel
from tunebook._kernel.output_check import as_mismatch, comparison
from tunebook._keys.buckets import Buckets, as_buckets, unknown_name
from tunebook._keys.call_key import call_key
from tunebook._space.choice import Choice
from tunebook._space.pruning import Pruning
from tunebook._space.space import Config, Space
from tunebook._statistics.objective import objective_for
from tunebook._statistics.roofline import NEAR, Roofline, check_peak, peak_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tunebook._base.vocabulary import StrategyLike
    from tunebook._kernel.output_check import Compare, Tolerance
    from tunebook._selection.selector import ConfigSelectorChain
    from tunebook._statistics.roofline import Peak

CONFIG: Final = "config"
# An amount of work: a number, or a function of the call's arguments.
Amount: TypeAlias = "float | Callable[..., float]"
HOW_TO_DIFFER: Final = (
    "unlike the heuristic's configuration. Give a reference= to check against, or check=False if outputs may differ"
)


class FunctionKernel(Kernel[Any, Any]):
    """Its invocations hold one argument per parameter, in order, whatever way the caller passed them."""

    def __init__(
        self,
        function: Callable[..., Any] | Choice,
        *,
        space: Space | Iterable[object] | Callable[..., Iterable[object]] | None = None,
        heuristic: object = None,
        name: str | None = None,
        version: str = "0",
        key: Iterable[str] | None = None,
        ignore: Iterable[str] = (),
        bucket: Mapping[str, object] | None = None,
        layout: bool = True,
        reference: Callable[..., Any] | None = None,
        inputs: Callable[..., Iterable[Any]] | None = None,
        check: bool | str | Compare = True,
        tolerance: Tolerance | None = None,
        compile: Callable[[Any], object] | None = None,  # noqa: A002 - the word for it
        prune: Callable[..., Iterable[Any]] | None = None,
        cost: Callable[..., float] | None = None,
        keep: float | None = None,
        mutates: Iterable[str] | None = None,
        objective: str | Callable[[Sequence[float]], float] = "typical",
        flops: Amount | None = None,
        bytes: Amount | None = None,  # noqa: A002 - as above
        peak: Peak | None = None,
        strategy: StrategyLike | None = None,
    ) -> None:
        self._choice = function if isinstance(function, Choice) else None
        if isinstance(function, Choice):
            function, space, heuristic = _of_choice(function, name, space, heuristic)
        elif space is None:
            raise DefinitionError(f"{default_name(function)!r} needs a space: tunable(space=Space(block=[32, 64]))")
        self.function: Final = function
        self.parameters: Final = _parameters(function)
        super().__init__(name or default_name(function), version, self._call_key)
        self.names: Final = _names_that_count(self.op_id, list(self.parameters), key, ignore)
        self.buckets: Final[Buckets] = as_buckets(bucket, self.names)
        self.layout: Final = layout
        self.compiles = compile is not None
        self._space = space if isinstance(space, Space) or callable(space) else _configs(self.op_id, space)
        self._heuristic, self.reference, self._compile = heuristic, reference, compile
        self._inputs = inputs
        self._compare = comparison(check, tolerance)
        self.checks = self._compare is not None
        self._pruning = Pruning(self.op_id, prune, cost, keep)
        self.mutates = None if mutates is None else _known_names(self.op_id, "mutates", mutates, self.parameters)
        objective_for(objective)  # a name that is none is an error here
        self.objective = objective
        self._flops, self._bytes, self._peak = flops, bytes, check_peak(peak)
        self.strategy = _checked(strategy)
        self.prunes = self._choice is not None or prune is not None or cost is not None

    def attach(self, runner: Callable[..., Any], selector: ConfigSelectorChain[Any]) -> None:
        """Say what runs the function from one argument per parameter and a configuration, and who chooses that."""
        self._runner = runner
        self.selector = selector

    @property
    def module(self) -> str:
        """The module to import so that this kernel is defined."""
        return self.function.__module__

    @property
    def argument_classes(self) -> tuple[object, ...]:
        """The classes that the function's parameters are annotated with, or have as defaults."""
        try:
            hints = typing.get_type_hints(self.function)
        except (NameError, TypeError, AttributeError):
            hints = {}  # an annotation that cannot be resolved declares nothing
        defaults = [p.default for p in self.parameters.values() if p.default is not p.empty]
        return (*(hint for name, hint in hints.items() if name in self.parameters), *defaults)

    def invocation(self, arguments: tuple[Any, ...], override: object = None) -> Invocation[Any, Any]:
        """Return a call with one argument per parameter."""
        return Invocation(self.op_id, arguments, {}, override_cfg=override)

    def arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return one argument per parameter from a call as it was written."""
        signature = inspect.Signature(list(self.parameters.values()))
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return tuple(bound.arguments[name] for name in self.parameters)

    def run(self, *args: Any, cfg: Any, **kwargs: Any) -> Any:
        """Call the function; `args` are one per parameter."""
        return self._runner(*args, cfg, **kwargs)

    def heuristic_cfg(self, inv: Invocation[Any, Any]) -> Any:
        """Return the heuristic's configuration."""
        if self._heuristic is None:
            return super().heuristic_cfg(inv)
        given = self._spread(self._heuristic, inv) if callable(self._heuristic) else self._heuristic
        return as_config(given)

    def candidate_cfgs(self, inv: Invocation[Any, Any]) -> Iterable[Any]:
        """Return the candidates for a call."""
        if isinstance(self._space, (Space, tuple)):
            return self._space
        return _configs(self.op_id, self._spread(self._space, inv))

    def checksum(self, inv: Invocation[Any, Any]) -> str:
        """Return the digest over code and candidates; worked out once unless the candidates depend on the call."""
        return self._static_checksum if isinstance(self._space, (Space, tuple)) else super().checksum(inv)

    @cached_property
    def _static_checksum(self) -> str:
        return self._checksum_over(self._space)  # type: ignore[arg-type] # not a callable here

    @cached_property
    def code_checksum(self) -> str:
        """The digest over the function and the helpers it calls."""
        return code_checksum(self.function, version=self.version)

    def _call_key(self, inv: Invocation[Any, Any]) -> str:
        values = dict(zip(self.parameters, inv.args, strict=True))
        arguments = {n: values[n] for n in self.names}
        return call_key({**arguments, **inv.beside()}, buckets=self.buckets, layout=self.layout)

    def compile_cfg(self, inv: Invocation[Any, Any], cfg: Any) -> object:
        """Compile one candidate."""
        return None if self._compile is None else self._compile(cfg)

    def prune_cfgs(self, inv: Invocation[Any, Any], cfgs: Sequence[Any]) -> Iterable[Any]:
        """Return the candidates that the author's hook and cost model leave."""
        wanted = [cfg for cfg in cfgs if self._choice is None or self.cfg_priority(inv, cfg) >= 0]
        return self._pruning(wanted, lambda function, first: self._spread(function, inv, first))

    def cfg_group(self, inv: Invocation[Any, Any], cfg: Any) -> int:
        """Return the group of the way that a configuration names."""
        return 0 if self._choice is None else self._choice.option(cfg).group

    def cfg_priority(self, inv: Invocation[Any, Any], cfg: Any) -> int:
        """Return the priority of the way that a configuration names, for this call."""
        priority = 0 if self._choice is None else self._choice.option(cfg).priority
        return self._spread(priority, inv) if callable(priority) else priority

    def make_inputs(self, inv: Invocation[Any, Any]) -> tuple[tuple[Any, ...], Mapping[str, Any]] | None:
        """Return what the author's function makes of the made-up arguments."""
        if self._inputs is None:
            return None
        made = tuple(self._spread(self._inputs, inv))
        if len(made) != len(self.parameters):
            raise DefinitionError(
                f"inputs= of {self.op_id!r} returned {len(made)} arguments; return one for each of "
                f"{', '.join(self.parameters)}"
            )
        return made, {}

    def mutated(self, inv: Invocation[Any, Any]) -> Sequence[object] | None:
        """Return the arguments that the author declared to be written to."""
        if self.mutates is None:
            return None
        return [value for name, value in zip(self.parameters, inv.args, strict=True) if name in self.mutates]

    def enough_s(self, inv: Invocation[Any, Any]) -> float:
        """Return the seconds of a candidate that runs near what the device can do."""
        roofline = self.roofline(inv)
        return 0.0 if roofline is None else roofline.least_s / NEAR

    def roofline(self, inv: Invocation[Any, Any]) -> Roofline | None:
        """Return the work that the author stated, beside the peak that was given or is known of the device."""
        if self._flops is None and self._bytes is None:
            return None
        flops, moved = (self._spread(a, inv) if callable(a) else a for a in (self._flops, self._bytes))
        return Roofline(flops, moved, self._peak or peak_of(inv.device))

    def checker(self, inv: Invocation[Any, Any]) -> Callable[[Any], Any] | None:
        """Return what compares an output with the reference's."""
        if self.reference is None or self._compare is None:
            return None
        return partial(_swapped, self._compare, self._spread(self.reference, inv))

    def compare(self, output: Any, expected: Any) -> Any:
        """Return how an output differs from the one of the heuristic's configuration."""
        return as_mismatch(self._compare(output, expected), HOW_TO_DIFFER) if self._compare is not None else None

    def _spread(self, function: Callable[..., Any], inv: Invocation[Any, Any], *before: Any) -> Any:
        """Call a function of the author's with the arguments as the kernel's own signature takes them."""
        positional: list[Any] = [*before]
        named: dict[str, Any] = {}
        for parameter, value in zip(self.parameters.values(), inv.args, strict=True):
            if parameter.kind is parameter.VAR_POSITIONAL:
                positional.extend(value)
            elif parameter.kind is parameter.VAR_KEYWORD:
                named.update(value)
            elif parameter.kind is parameter.KEYWORD_ONLY:
                named[parameter.name] = value
            else:
                positional.append(value)
        return function(*positional, **named)


def _checked(strategy: StrategyLike | None) -> StrategyLike | None:
    if strategy is None:
        return None
    from tunebook.search._by_name import check_strategy  # noqa: PLC0415 - only who searches needs it

    return check_strategy(strategy)


def _swapped(compare: Compare, expected: object, output: object) -> Any:
    return compare(output, expected)


def _of_choice(
    ways: Choice, name: str | None, space: object, heuristic: object
) -> tuple[Callable[..., Any], tuple[Config, ...], object]:
    """Return the function, the space and the heuristic of a choice among implementations."""
    if space is not None:
        raise DefinitionError("a choice has its own space; give a way one with tunebook.Option(function, space=...)")
    if name is None:
        raise DefinitionError(f"a choice of {', '.join(ways.options)} needs a name: tunable(choice(...), name='mul')")
    return ways.function(name), tuple(ways), ways.default if heuristic is None else heuristic


def as_config(value: object) -> Any:
    """Return a plain dict as a `Config`; anything else is the author's own class and stays as it is."""
    return Config(**value) if type(value) is dict else value


def _configs(op_id: str, space: Any) -> tuple[Any, ...]:
    if isinstance(space, (str, bytes, Mapping)) or not isinstance(space, Iterable):
        raise DefinitionError(
            f"the space of {op_id!r} is a {type(space).__name__}; give a tunebook.Space(block=[32, 64]), "
            "a list of configurations, or a function of the arguments that returns one"
        )
    return tuple(as_config(config) for config in space)


def default_name(function: Callable[..., Any]) -> str:
    """Return the op id of a function that was given none: where it can be imported from."""
    module = function.__module__
    if module == "__main__":
        # Scripts are all called __main__; two of them with a `matmul` each must not share entries.
        module = Path(getattr(sys.modules["__main__"], "__file__", None) or "__main__").stem
    return f"{module}.{function.__qualname__}"


def _parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    parameters = dict(inspect.signature(function).parameters)
    config = parameters.pop(CONFIG, None)
    if config is None or config.kind is config.POSITIONAL_ONLY:
        raise DefinitionError(
            f"{function.__qualname__} takes no keyword argument 'config'; write "
            f"def {function.__name__}({', '.join([*parameters, '*', CONFIG])})"
        )
    return parameters


def _names_that_count(
    op_id: str, parameters: list[str], key: Iterable[str] | None, ignore: Iterable[str]
) -> tuple[str, ...]:
    if isinstance(key, str) or isinstance(ignore, str):
        raise DefinitionError(f"{op_id!r}: key= and ignore= take a tuple of names, such as ignore=('out',)")
    chosen = None if key is None else tuple(key)
    ignored = tuple(ignore)
    for option, names in (("key", chosen or ()), ("ignore", ignored)):
        _known_names(op_id, option, names, parameters)
    return tuple(n for n in parameters if (chosen is None or n in chosen) and n not in ignored)


def _known_names(op_id: str, option: str, names: Iterable[str], parameters: Iterable[str]) -> frozenset[str]:
    if isinstance(names, str):
        raise DefinitionError(f"{op_id!r}: {option}= takes a tuple of names, such as {option}=({names!r},)")
    given = tuple(names)
    for name in given:
        if name not in parameters:
            raise DefinitionError(f"{op_id!r}: {option}={given!r}: {unknown_name(name, list(parameters))}")
    return frozenset(given)
