"""A kernel made from one function: what `@tunable` gives to the selector."""

from __future__ import annotations

import inspect
import sys
import typing
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tunebook._buckets import Buckets, as_buckets, unknown_name
from tunebook._check import difference
from tunebook._checksum import candidates_checksum, code_checksum
from tunebook._errors import DefinitionError
from tunebook._kernel import Invocation, Kernel
from tunebook._keys import call_key
from tunebook._space import Config, Space

if TYPE_CHECKING:
    from tunebook._selection import ConfigSelectorChain

CONFIG: Final = "config"


class FunctionKernel(Kernel[Any, Any]):
    """Its invocations hold one argument per parameter, in order, whatever way the caller passed them."""

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        space: Space | Iterable[object] | Callable[..., Iterable[object]],
        heuristic: object = None,
        name: str | None = None,
        version: str = "0",
        key: Iterable[str] | None = None,
        ignore: Iterable[str] = (),
        bucket: Mapping[str, object] | None = None,
        layout: bool = True,
        reference: Callable[..., Any] | None = None,
        compile: Callable[[Any], object] | None = None,  # noqa: A002 - the word for it
    ) -> None:
        self.function: Final = function
        self.parameters: Final = _parameters(function)
        super().__init__(name or default_name(function), version, self._call_key)
        self.names: Final = _names_that_count(self.op_id, list(self.parameters), key, ignore)
        self.buckets: Final[Buckets] = as_buckets(bucket, self.names)
        self.layout: Final = layout
        self.compiles = compile is not None
        self._space = space if isinstance(space, Space) or callable(space) else _configs(self.op_id, space)
        self._heuristic, self._reference, self._compile = heuristic, reference, compile

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
        return f"{self.code_checksum}-{candidates_checksum(self._space)}"  # type: ignore[arg-type] # not a callable here

    @cached_property
    def code_checksum(self) -> str:
        """The digest over the function and the helpers it calls."""
        return code_checksum(self.function, version=self.version)

    def _call_key(self, inv: Invocation[Any, Any]) -> str:
        values = dict(zip(self.parameters, inv.args, strict=True))
        return call_key({n: values[n] for n in self.names}, buckets=self.buckets, layout=self.layout)

    def compile_cfg(self, inv: Invocation[Any, Any], cfg: Any) -> None:
        """Compile one candidate."""
        if self._compile is not None:
            self._compile(cfg)

    def checker(self, inv: Invocation[Any, Any]) -> Callable[[Any], str | None] | None:
        """Return what compares an output with the reference's."""
        return None if self._reference is None else partial(_compare, self._spread(self._reference, inv))

    def _spread(self, function: Callable[..., Any], inv: Invocation[Any, Any]) -> Any:
        """Call a function of the author's with the arguments as the kernel's own signature takes them."""
        positional: list[Any] = []
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


def _compare(expected: object, output: object) -> str | None:
    return difference(output, expected)


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
        for name in names:
            if name not in parameters:
                raise DefinitionError(f"{op_id!r}: {option}={names!r}: {unknown_name(name, parameters)}")
    return tuple(n for n in parameters if (chosen is None or n in chosen) and n not in ignored)
