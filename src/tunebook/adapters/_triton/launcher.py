"""The launch of a tuned kernel: a function generated per kernel, which reads the key's parts and looks them up.

For `def add(x_ptr, y_ptr, n, BLOCK: tl.constexpr)` with `key=["n"]`, after its first call::

    def bind(grid):
        def launch(x_ptr, y_ptr, n, **kwargs):
            if x_ptr.__class__ is _Tensor and y_ptr.__class__ is _Tensor and n.__class__ is _int:
                return _call((grid, (x_ptr, y_ptr, n), kwargs), _facts((1, x_ptr.dtype, y_ptr.dtype, n)))
            return _other(grid, (x_ptr, y_ptr, n), kwargs)
        return launch

`_call` is the dispatcher's generated function: it looks the facts up, and launches with the configuration it finds.
Parameters behind BLOCK are keyword-only in it: a call can pass them by name alone, since it does not pass BLOCK.
"""

from __future__ import annotations

import inspect
from itertools import count, takewhile
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, cast, final

from tunebook._hotpath.codegen import keyed_by_value
from tunebook._keys.call_key import fast_key_of
from tunebook._memo.answer_memo import MEMO

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence


@final
class NotGiven:
    """The value of a parameter that a call does not pass by position."""


_NOT_GIVEN: Final = NotGiven()
_UNKNOWN: Final[set[type]] = {NotGiven}  # classes whose objects are keys themselves
_MOST_READERS: Final = 16  # a kernel is called with few sets of names; each takes 0.3 ms to generate
_PLAIN: Final = frozenset({int, bool, str, type(None), NotGiven})


@final
class LaunchFacts(tuple[Any, ...]):
    """The facts that a launch is looked up by; equal only if the launches have the same key."""

    __slots__ = ()


keyed_by_value(LaunchFacts)


@final
class Launcher:
    """Owns a kernel's generated function. `call` is the dispatcher's; `device()` returns None if there is only one.

    The function turns keyword arguments into positional ones, which is fastest. With `exact`, each argument is passed
    on as the call passed it, for kernels that can tell the difference.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        names: Sequence[str],
        *,
        key: Sequence[str],
        supplied: frozenset[str],
        call: Callable[..., Any],
        device: Callable[[], Hashable],
        buckets: Mapping[str, Callable[[Any], Hashable]] = MappingProxyType({}),
        exact: bool = False,
    ) -> None:
        self._exact = exact
        if exact:
            self._defaults: dict[str, Any] = dict.fromkeys(names, _NOT_GIVEN)
            self._names = list(names)
            self._positional = len(self._names)
        else:
            # A call may pass by position the parameters before the first one that a configuration supplies.
            usual = [
                (parameter.name, parameter.default)
                for parameter in inspect.signature(function).parameters.values()
                if parameter.kind is parameter.POSITIONAL_OR_KEYWORD and parameter.name in names
            ]
            self._positional = sum(1 for _ in takewhile(lambda pair: pair[0] not in supplied, usual))
            self._names = [name for name, _ in usual if name not in supplied]
            self._defaults = {
                name: default for name, default in usual[: self._positional] if default is not inspect.Parameter.empty
            } | dict.fromkeys(self._names[self._positional :], _NOT_GIVEN)
        self._key = frozenset(key)
        self._call, self._device, self._buckets = call, device, buckets
        self._seen: dict[str, type | None] = {}  # None: seen with several classes
        self._typed: set[str] = set()  # arguments with a dtype
        self._absent: set[str] = set()  # arguments that a call did not pass by position
        self._one_device: bool | None = None
        self._form = 0
        self._readers: dict[tuple[str, ...], Callable[..., tuple[Hashable, ...]]] = {}  # by names
        self._numbers = count()
        self.bind: Any = self._generate()

    def _generate(self) -> Any:
        namespace: dict[str, Any] = {
            "_tb_call": self._call,
            "_tb_facts": LaunchFacts,
            "_tb_other": self._launch_other,
            "_tb_value": value_of,
            "_tb_given": _given,
            "_tb_given_by_name": _given_by_name,
            "_tb_kind": kind_of,
            "_tb_named": self._named_facts,
            "_tb_device": self._device,
            **{f"_tb_default_{name}": default for name, default in self._defaults.items()},
            **{f"_tb_class_{name}": kind for name, kind in self._seen.items()},
            **{f"_tb_bucket_{name}": read for name, read in self._buckets.items()},
        }
        exec(compile(self._source(), "<tunebook launch>", "exec"), namespace)  # noqa: S102 - as dataclasses do
        return namespace["bind"]

    def _source(self) -> str:
        declared = [f"{name}=_tb_default_{name}" if name in self._defaults else name for name in self._names]
        if len(self._names) > self._positional:
            declared.insert(self._positional, "*")
        declared += ["/"] if self._exact and self._names else []
        guards = [f"{n}.__class__ is _tb_class_{n}" for n in self._names if self._seen.get(n) is not None]
        facts = [repr(self._tag(self._form)), *filter(None, map(self._expression, self._names))]
        facts += [] if self._one_device else ["_tb_device()"]
        facts += ["*(_tb_named(_tb_kwargs) if _tb_kwargs else ())"]
        arguments = f"({''.join(f'{name}, ' for name in self._names)})"
        fast = (" and ".join(guards) or "True") if self._form else "False"
        return "\n".join(
            [
                "def bind(_tb_grid):",
                f" def launch({', '.join([*declared, '**_tb_kwargs'])}):",
                f"  if {fast}:",
                f"   return _tb_call((_tb_grid, {self._passed()}), _tb_facts(({', '.join(facts)},)))",
                f"  return _tb_other(_tb_grid, {arguments}, _tb_kwargs)",
                " return launch",
            ]
        )

    def _passed(self) -> str:
        """Return the code for the positional and the keyword arguments of a launch."""
        first, last = self._names[: self._positional], self._names[self._positional :]
        unsure = {name for name in self._absent if self._seen.get(name) is None}  # some calls pass it, some do not
        if unsure.intersection(first):
            args = f"_tb_given(({''.join(f'{name}, ' for name in first)}))"
        else:
            args = f"({''.join(f'{n}, ' for n in first if self._seen.get(n) is not NotGiven)})"
        named = ", ".join(f"{name!r}: {name}" for name in last if self._seen.get(name) is not NotGiven)
        if unsure.intersection(last):
            return f"{args}, _tb_given_by_name({{{named}}}, _tb_kwargs)"
        return f"{args}, {{{named}, **_tb_kwargs}}" if named else f"{args}, _tb_kwargs"

    def _tag(self, form: int) -> Hashable:
        """Return the first fact: two forms of facts that have the same one have the same facts in the same places."""
        return f"exact {form}" if self._exact else form

    def _expression(self, name: str) -> str:
        """Return the code that reads an argument: a key's value, or a tensor's dtype; guards check other classes."""
        kind = self._seen.get(name)
        if name in self._key:
            value = f"_tb_bucket_{name}({name})" if name in self._buckets else name
            return value if kind is not None else f"_tb_value({value})"
        if kind is None:
            return f"_tb_kind({name})"
        return f"{name}.dtype" if name in self._typed else ""

    def _launch_other(self, grid: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Launch a call that the generated code does not cover yet: the first one, or arguments of other classes."""
        with MEMO.lock:  # re-entrant, for finalisers, and open in a forked child
            before = dict(self._seen)
            for name, value in zip(self._names, args, strict=True):
                kind = type(value) if name not in self._key or type(value) in _PLAIN else None
                known = self._seen.setdefault(name, kind)
                self._seen[name] = kind if known is kind else None
                if getattr(value, "dtype", None) is not None:
                    self._typed.add(name)
                if value is _NOT_GIVEN:
                    self._absent.add(name)
            if before != self._seen or not self._form:
                self._form += 1
                self._one_device = self._device() is None
                self.bind = self._generate()
        facts = [self._general(name, value) for name, value in zip(self._names, args, strict=True)]
        # With -1, because generated code counts its forms from 1, and puts other facts in other places.
        every = LaunchFacts((self._tag(-1), *facts, self._device(), *self._named_facts(kwargs)))
        named = dict(zip(self._names[self._positional :], args[self._positional :], strict=True))
        first = args[: self._positional]
        return self._call((grid, _given(first) if self._exact else first, _given_by_name(named, kwargs)), every)

    def _general(self, name: str, value: object) -> Hashable:
        if name in self._buckets:
            value = self._buckets[name](value)
        return value_of(value) if name in self._key else kind_of(value)

    def _named_facts(self, kwargs: Mapping[str, Any]) -> tuple[Hashable, ...]:
        names = tuple(kwargs)
        read = self._readers.get(names)
        if read is None:
            if names and len(self._readers) < _MOST_READERS:
                # Two threads may be here: the numbers of their readers must differ.
                self._readers[names] = self._reader(next(self._numbers), kwargs)
            return self._general_named_facts(kwargs)
        return read(*kwargs.values())

    def _general_named_facts(self, kwargs: Mapping[str, Any]) -> tuple[Hashable, ...]:
        key = self._key
        return (*kwargs, *[value_of(kwargs[name]) if name in key else kind_of(kwargs[name]) for name in kwargs])

    def _reader(self, number: int, kwargs: Mapping[str, Any]) -> Callable[..., tuple[Hashable, ...]]:
        """Return a function of arguments with these names, which reads their facts if their classes are these too.

        Its facts begin with a number, and general ones with a name. Of a kernel that gets 24 arguments by name, it
        takes 2 us of each launch instead of 9.
        """
        facts, namespace = [], {"_value": value_of, "_general": self._general_named_facts, "_zip": zip, "_dict": dict}
        namespace["_names"] = tuple(kwargs)
        for at, (name, value) in enumerate(kwargs.items()):
            namespace[f"_class{at}"] = type(value)
            if name in self._key:
                facts.append(f"x{at}" if type(value) in _PLAIN else f"_value(x{at})")
            elif getattr(value, "dtype", None) is not None:
                facts.append(f"x{at}.dtype")
        every = [f"x{at}" for at in range(len(kwargs))]
        guards = " and ".join(f"{x}.__class__ is _class{at}" for at, x in enumerate(every))
        source = [
            f"def read({', '.join(every)}):",
            f" if {guards}:",
            f"  return {''.join(f'{fact}, ' for fact in [str(number), *facts])}",
            f" return _general(_dict(_zip(_names, ({', '.join(every)},))))",
        ]
        exec(compile("\n".join(source), "<tunebook facts>", "exec"), namespace)  # noqa: S102 - as dataclasses do
        return cast("Callable[..., tuple[Hashable, ...]]", namespace["read"])


def _given(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments that were passed by position: all before the first that was not."""
    count = len(args)
    while count and args[count - 1] is _NOT_GIVEN:
        count -= 1
    return args[:count]


def _given_by_name(named: Mapping[str, Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {**{name: value for name, value in named.items() if value is not _NOT_GIVEN}, **kwargs}


def value_of(value: Any) -> Hashable:
    """Return the fact about an argument in the key: equal only for arguments with the same key."""
    kind = type(value)
    if kind not in _UNKNOWN:
        try:
            return fast_key_of(value)
        except TypeError:  # a key of Triton's may hold any object that has a hash
            hash(value)
            _UNKNOWN.add(kind)
    return kind, value


def kind_of(value: Any) -> Hashable:
    """Return a tensor's dtype, or the class of any other value."""
    dtype: Hashable = getattr(value, "dtype", None)
    return cast("Hashable", type(value)) if dtype is None else dtype  # not "or": numpy's dtypes are false
