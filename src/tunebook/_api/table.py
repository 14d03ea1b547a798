"""Tables: configurations that are asked for by numbers, far from the launch.

A table is a tunable function whose arguments are the numbers of its key, and whose result is the configuration. So the
tiers, the book, recordings and the hot path are those of `@tunable`. Only a tuning differs: it runs the author's `run`
on the arguments that the author's `inputs` makes of the numbers.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol, get_args

from tunebook._api.function_kernel import CONFIG, FunctionKernel, TunableOptions
from tunebook._api.option_checks import check_options
from tunebook._api.tunable import build, tune
from tunebook._api.tunable_types import Tunable
from tunebook._arrays.describe import accelerator, outside_of_traces, walk
from tunebook._arrays.device_fingerprint import device_fingerprint, driver_of, environment_fingerprint
from tunebook._arrays.library import load_adapters, root_module
from tunebook._base.errors import DefinitionError, did_you_mean
from tunebook._base.record_format import canonical_json
from tunebook._base.vocabulary import Nearness, computed_once
from tunebook._code.checksum import read_code
from tunebook._code.deferred import refuse_deferred
from tunebook._hotpath.dispatcher import MISSING
from tunebook._keys.call_key import is_plain, is_scalar
from tunebook._keys.key_text import parsed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tunebook._api.function_kernel import SpaceLike
    from tunebook._base.vocabulary import Problem, StrategyLike, Trust
    from tunebook._code.replay import CodeFacts
    from tunebook._kernel.kernel import Invocation
    from tunebook._tuning.job import Budget, Tuned
    from tunebook._tuning.progress import Progress

_INPUTS: Final = "inputs"
_OWN: Final = ("space", "near", "run", "device")
_SPLIT_KEYS: Final = 65_536  # 20 MB
_POINTLESS: Final = ("ignore", "layout", "mutates")  # options of `tunable` that are about arrays, or undo `key`


class ConfigTable(Tunable[Any], Protocol):
    """A table: called with the numbers of its key, in their order or by name, it returns the configuration."""

    def tune(
        self,
        *args: Any,
        budget: Budget | float | str | None = None,
        progress: Progress | bool | None = None,
        strategy: StrategyLike | None = None,
        again: bool = False,
        **kwargs: Any,
    ) -> Tuned[Any]:
        """Tune the entry of these numbers now, as `tunebook.tune` does for a call."""


class TableKernel(FunctionKernel):
    """The kernel of a table. The arguments of its calls are numbers; `ready` adds the arguments that `run` gets."""

    def __init__(
        self,
        function: Callable[..., Any],
        space: SpaceLike,
        name: str,
        options: TunableOptions,
        *,
        near: Iterable[str] | Mapping[str, Nearness],
        run: Callable[..., Any] | None,
        device: object,
    ) -> None:
        super().__init__(function, space, name, options)
        self._asked = self._signature
        # The author's functions get the numbers by name: the order of a key is easily mistaken.
        parameters = [p.replace(kind=p.KEYWORD_ONLY) for p in self.parameters.values()]
        self._signature = inspect.Signature(parameters)
        if (run is None) != (self._inputs is None):
            raise DefinitionError(
                f"{name!r}: run= is timed on the arguments that inputs= makes of the numbers; give both, or neither"
            )
        if run is not None:
            refuse_deferred(run, name)
        self._measured, self._device = run, device
        self._near = self._nearness(near)
        self._split: dict[str, tuple[tuple[str, ...], str]] = {}
        # Without `run` no entry can be measured again here.
        own: tuple[Trust, ...] = () if run is not None else ("versions", "candidates", "code")
        self.declared: tuple[Trust, ...] = (*own, "near") if self._near else own
        self.table = self

    def _nearness(self, near: Iterable[str] | Mapping[str, Nearness]) -> dict[str, Nearness]:
        """Return how the distance of each near number is measured."""
        names = self._known_names("near", near)
        given: dict[str, Nearness] = {name: near[name] if isinstance(near, Mapping) else "ratio" for name in names}
        for name, rule in given.items():
            if rule not in get_args(Nearness):
                known = ", ".join(get_args(Nearness))
                raise DefinitionError(f"{self.op_id!r}: near={{{name!r}: {rule!r}}}: expected one of {known}")
        return given

    # ----------------------------------------------------------------------------------------------------- a call

    def refuse(self, unknown: Mapping[str, Any]) -> None:
        """Raise `DefinitionError` for names that are not in the key."""
        for name in unknown:
            raise DefinitionError(f"{self.op_id!r}: {did_you_mean('number', name, self.parameters)}")

    def call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Invocation[Any, Any]:
        self.refuse({name: value for name, value in kwargs.items() if name not in self.parameters})
        try:
            bound = self._asked.bind_partial(*args, **kwargs)
        except TypeError as error:
            raise DefinitionError(f"{self.op_id!r}: {error}; it is asked by {', '.join(self.parameters)}") from None
        return self.invocation(tuple(bound.arguments.get(name, MISSING) for name in self.parameters))

    def invocation(self, arguments: tuple[Any, ...], override: object = None) -> Invocation[Any, Any]:
        for name, value in zip(self.parameters, arguments, strict=True):
            if value is MISSING:
                raise DefinitionError(f"{self.op_id!r} is asked by {', '.join(self.parameters)}; {name!r} is missing")
            if not all(map(is_plain, walk(value))):
                kind = f"{type(value).__module__}.{type(value).__qualname__}"
                raise DefinitionError(
                    f"{self.op_id!r}: {name} is a {kind}, which cannot be a key; pass a number, a text, a dtype, or a "
                    f"tuple of these, for example {name}=x.shape[0]"
                )
        return super().invocation(arguments, override)

    def _call_key(self, inv: Invocation[Any, Any]) -> str:
        # An integer of numpy's, as shapes and configuration files have them, asks for the same entry as Python's.
        numbers = tuple(value.item() if is_scalar(value) else value for value in inv.args)
        return super()._call_key(replace(inv, args=numbers, kwargs={}))

    def _make_problem(self, inv: Invocation[Any, Any]) -> Problem:
        return super()._make_problem(inv)._replace(device=device_fingerprint(self._where()))

    def _where(self) -> object | None:
        return accelerator() if self._device is None else self._device

    def environment(self, inv: Invocation[Any, Any]) -> str:  # noqa: ARG002 - the same for all numbers
        device = self._where()
        library = () if device is None or isinstance(device, str) else (root_module(type(device)),)
        return environment_fingerprint(library, {**self.code_facts.versions, **driver_of(device)})

    def distance(self, entry: str, asked: str) -> float:
        """Return how far an entry is from the numbers asked for; infinite if others than those of `near=` differ."""
        from tunebook.search._warm_start import distance  # noqa: PLC0415 - loaded late: few calls ask

        (near, rest), (near_asked, rest_asked) = self._parts(entry), self._parts(asked)
        if rest != rest_asked:
            return math.inf
        return math.fsum(map(distance, near, near_asked, self._near.values()))

    def _parts(self, call_key: str) -> tuple[tuple[str, ...], str]:
        """Return the near numbers of a call key, and the rest; kept, since every miss compares all entries."""
        known = self._split.get(call_key)
        if known is None:
            key = parsed(call_key) or {}
            near = tuple(canonical_json(key.pop(name, None)) for name in self._near)
            # None is like a number that is left out: a file without a dtype answers a call with dtype=None.
            known = near, canonical_json({name: value for name, value in key.items() if value is not None})
            if len(self._split) >= _SPLIT_KEYS:
                self._split.clear()
            self._split[call_key] = known
        return known

    # --------------------------------------------------------------------------------------------------- a tuning

    def ready(self, inv: Invocation[Any, Any]) -> Invocation[Any, Any]:
        """Return a call with the arguments that `run` gets; the key has the numbers alone."""
        if self._measured is None:
            raise DefinitionError(f"{self.op_id!r} cannot be tuned: give its table run= and inputs=")
        args, kwargs = self.make_inputs(inv)
        # The settings that count are those of the arrays, which were made here and now.
        return replace(inv, args=args, kwargs=kwargs, surroundings=None)

    def make_inputs(self, inv: Invocation[Any, Any]) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        with outside_of_traces():
            made = self._spread(self._inputs, inv) if self._inputs is not None else ()
        return inv.args, {_INPUTS: tuple(made) if isinstance(made, (tuple, list)) else (made,)}

    def run(self, *_numbers: Any, cfg: Any, **kwargs: Any) -> Any:
        return None if self._measured is None else self._measured(*kwargs[_INPUTS], config=cfg)

    def _spread(self, function: Callable[..., Any], inv: Invocation[Any, Any], *before: Any) -> Any:
        if function is self.reference:
            return function(*inv.kwargs[_INPUTS])
        return super()._spread(function, inv, *before)

    @computed_once
    def code_facts(self) -> CodeFacts:
        return read_code(self._measured, version=self.version, extra=[self._inputs])


def table(
    name: str,
    /,
    *,
    space: SpaceLike,
    key: Iterable[str],
    near: Iterable[str] | Mapping[str, Nearness] = (),
    heuristic: object = None,
    run: Callable[..., Any] | None = None,
    inputs: Callable[..., Any] | None = None,
    device: object = None,
    **options: Any,
) -> ConfigTable:
    """Make a table of configurations: called with the numbers of its `key`, it returns the configuration.

    `key` names the numbers (or texts, or dtypes), in the order of a call; a call may also name them. The tiers answer
    as for a call of `@tunable`. `heuristic` is a configuration, or a function that gets the numbers by name. `near`
    names the numbers in which the nearest tuned entry may answer, where these numbers have no entry of their own; a
    mapping of the names says how nearness is measured: by "ratio", by "difference", or "below" (at most the number).

    `run` is the function that is timed: `run(*arguments, config=config)`, with the arguments that `inputs` returns,
    which gets the numbers by name. Without these two nothing is tuned, and an entry made by any code answers.
    `device` is the device of the entries, or its name: by default the accelerator of torch, CuPy or JAX if the program
    has imported one of these, else the host. `options` are those of `tunable`; `reference` gets the arguments of `run`.

    >>> tiles = table("tiles", space=[{"tile": 16}, {"tile": 64}], key=("rows", "dtype"), store=False,
    ...               heuristic=lambda rows, dtype: {"tile": 16 if rows < 64 else 64})
    >>> tiles(512, "float32"), tiles(rows=8, dtype="float32").tile
    (Config(tile=64), 16)
    """
    check_options(options, (*_OWN, *TunableOptions.__annotations__), "table")
    for option in _POINTLESS:
        if option in options:
            raise DefinitionError(f"table(): {option}= is not for tables, whose calls have numbers and no arrays")
    names = key if isinstance(key, str) else tuple(key)
    given: Any = {**options, "key": names, "heuristic": heuristic, "inputs": inputs}
    if run is None:
        given["tuner"] = False
    load_adapters()
    module = sys._getframe(1).f_globals.get("__name__", "__main__")  # noqa: SLF001 - as namedtuple does
    kernel = TableKernel(_asked_by(name, names, module), space, name, given, near=near, run=run, device=device)
    made: Any = build(kernel, given)
    made.__dict__["tune"] = partial(tune, made)
    return made  # type: ignore[no-any-return] # a function with attributes


def _asked_by(name: str, key: str | tuple[str, ...], module: str) -> Callable[..., Any]:
    """Return a function with the signature of a table's calls. The hot path never calls it."""

    def answer(*_numbers: Any, config: Any) -> Any:
        """Return the configuration for these numbers."""
        return config

    if isinstance(key, str) or not key:
        raise DefinitionError(f"{name!r}: key={key!r}: give the names of the numbers as a tuple: key=('M', 'dtype')")
    try:
        numbers = [inspect.Parameter(each, inspect.Parameter.POSITIONAL_OR_KEYWORD) for each in key]
        signature = inspect.Signature([*numbers, inspect.Parameter(CONFIG, inspect.Parameter.KEYWORD_ONLY)])
    except (TypeError, ValueError) as error:
        raise DefinitionError(f"{name!r}: key={key!r}: {error}") from None
    made: Any = answer
    made.__name__ = made.__qualname__ = name.rpartition(".")[2]
    made.__module__, made.__signature__ = module, signature
    return answer
