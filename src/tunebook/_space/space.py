"""Configurations, and the spaces they come from."""

from __future__ import annotations

import keyword
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from numbers import Number
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Never, NoReturn, TypeAlias, final

from tunebook._base.config_codec import fingerprint, fingerprint_of, register_codec
from tunebook._base.errors import CodecError, DefinitionError, did_you_mean
from tunebook._base.vocabulary import computed_once
from tunebook._code.checksum import code_checksum
from tunebook._code.values import text_of
from tunebook._space.axis import Axis, axis_of
from tunebook._space.enumeration import MISTAKES, PartialConfig, SpaceWalk, Undecided

if TYPE_CHECKING:
    import random
    from collections.abc import ItemsView, KeysView, Sequence, ValuesView

    from tunebook._base.vocabulary import Json


@final
class Config(Mapping[str, Any]):
    """A point of a `Space`: frozen and hashable, read as `c.block_m`, `c["block_m"]` or `**c`.

    Equal to every mapping with equal items.

    >>> c = Config(block_m=64, block_n=32)
    >>> c.block_m, c["block_n"], dict(c) == c
    (64, 32, True)
    """

    __module__ = "tunebook"  # its name in the book, which must outlive the move of a file

    # The values alone are the instance's __dict__, so that reading an attribute costs as much as for any plain object;
    # a __getattr__ would cost 10 times as much inside a kernel's launch.
    __slots__ = ("__dict__", "__weakref__", "_hash")
    _hash: int

    def __init__(self, /, **values: Any) -> None:
        for name in values:
            check_axis_name(name)
        self.__dict__.update(values)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def __getitem__(self, name: str) -> Any:
        return self.__dict__[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.__dict__)

    def __len__(self) -> int:
        return len(self.__dict__)

    def __contains__(self, name: object) -> bool:
        return name in self.__dict__

    def keys(self) -> KeysView[str]:
        return self.__dict__.keys()

    def items(self) -> ItemsView[str, Any]:
        return self.__dict__.items()

    def values(self) -> ValuesView[Any]:
        return self.__dict__.values()

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Config):
            return self.__dict__ == other.__dict__
        return self.__dict__ == dict(other) if isinstance(other, Mapping) else NotImplemented

    def __hash__(self) -> int:
        try:
            return self._hash
        except AttributeError:
            # Regardless of the order of the names, as equality is.
            value = hash(frozenset(self.__dict__.items()))
            object.__setattr__(self, "_hash", value)
            return value

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"{self!r} is frozen; make another one: Config(**{{**config, {name!r}: {value!r}}})")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"{self!r} is frozen; {name!r} cannot be deleted")

    def __copy__(self) -> Config:
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> Config:
        return self

    def __reduce__(self) -> tuple[Callable[[dict[str, Any]], Config], tuple[dict[str, Any]]]:
        # Without the hash: strings hash differently in the next process.
        return _rebuild, (self.__dict__,)

    def __repr__(self) -> str:
        return f"Config({', '.join(f'{name}={value!r}' for name, value in self.__dict__.items())})"


def _rebuild(values: dict[str, Any]) -> Config:
    return Config(**values)


def _config_of(values: dict[str, Any]) -> Config:
    """Return a configuration that owns `values`, without checking their names."""
    config = object.__new__(Config)
    object.__setattr__(config, "__dict__", values)
    return config


register_codec(Config, dict, _rebuild)

# An axis with one of these names would hide the method, and `**config` would call a number.
_METHODS: Final = frozenset(name for name in dir(Config) if not name.startswith("_"))


def check_axis_name(name: str) -> None:
    """Raise `DefinitionError` unless `config.<name>` can be written and means the axis."""
    if not name.isidentifier() or keyword.iskeyword(name):
        raise DefinitionError(f"{name!r} cannot be the name of an axis: config.{name} is not valid Python")
    if name.startswith("_") or name in _METHODS:
        raise DefinitionError(
            f"{name!r} cannot be the name of an axis: it would hide a part of the configuration itself. "
            f"Rename it, for instance to {name.strip('_') + '_'!r}."
        )


# ----------------------------------------------------------------------------------------------------------- spaces

Predicate: TypeAlias = Callable[[Config], object]

Point: TypeAlias = tuple[int, ...]
"""A configuration as the positions of its values on the axes, each axis in canonical order (see `axis.py`)."""

# The number of random combinations to try before searching for a configuration, which finds one but not evenly.
_TRIES: Final = 300
# Values whose equality and type tell them apart as well as their fingerprint does, at a hundredth of the cost.
_PLAIN: Final = (int, str, bool, type(None))


@final
class Space:
    """The configurations that may be tried: every combination of the axes' values that all constraints accept.

    An axis is a list of values, or a function of the axes before it that returns one: `Space(m=[32, 64], n=lambda c:
    [c.m, 2 * c.m])`. Nothing is listed before its use, so a space may have any size. Two spaces with the same axes,
    values and constraints have the same `fingerprint`; the order of axes and values is only the order of iteration.

    >>> space = Space(block_m=[32, 64], block_n=[32, 64]).where(lambda c: c.block_m >= c.block_n)
    >>> len(space), next(iter(space))
    (3, Config(block_m=32, block_n=32))
    """

    def __init__(self, /, *given: Never, **axes: Iterable[Any] | Callable[[Any], Iterable[Any]]) -> None:
        if given:
            raise DefinitionError(f"a space takes its axes by name: write {_by_name(given[0])}")
        if not axes:
            raise DefinitionError("a space needs at least one axis, as in Space(block=[32, 64, 128])")
        self._axes: dict[str, tuple[Any, ...]] = {}
        self._values: dict[str, dict[str, Any]] = {}  # per axis: fingerprint -> value
        self._constraints: tuple[Predicate, ...] = ()
        for name, values in axes.items():
            check_axis_name(name)
            if callable(values):
                self._constraints = (*self._constraints, Among(name, values))
                self._values[name] = _distinct(name, _all_values(name, values, self._axes))
            else:
                self._values[name] = _distinct(name, _list_values(name, values))
            self._axes[name] = tuple(self._values[name].values())
        self._kinds: dict[str, str] = {}
        self.launch_axes: frozenset[str] = frozenset()

    def where(self, predicate: Predicate) -> Space:
        """Return the space of the configurations that `predicate`, a function of a `Config`, accepts too."""
        if not callable(predicate):
            raise DefinitionError(
                f"where({predicate!r}) needs a function of a configuration, as in where(lambda c: c.m <= c.n)"
            )
        return self._with(_constraints=(*self._constraints, predicate))

    def typed(self, /, **kinds: str) -> Space:
        """Return the space with other kinds of axes: "ordered", "log", "categorical" or "permutation".

        The kinds tell a search which values are near each other. By default they follow from the values: numbers that
        span a factor of 4 are "log", other numbers "ordered", tuples of the same things in other orders "permutation".
        """
        self._check_names(kinds)
        for name, kind in kinds.items():
            axis_of(name, self._axes[name], kind)
        return self._with(_kinds={**self._kinds, **kinds})

    def at_launch(self, /, *names: str) -> Space:
        """Return the space with axes that are set when a kernel is launched, and do not change its compiled program.

        Configurations that differ only on these axes are compiled once and measured each, so a search compiles less.
        Names add up. They change neither the configurations nor the fingerprint.
        """
        self._check_names(names)
        return self._with(launch_axes=self.launch_axes.union(names))

    def _check_names(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self._axes:
                raise DefinitionError(did_you_mean("axis", name, self._axes))

    def _with(self, **changes: Any) -> Space:
        space = object.__new__(Space)
        kept = ("_axes", "_values", "_constraints", "_kinds", "launch_axes")  # the rest is derived from these
        space.__dict__.update({name: self.__dict__[name] for name in kept}, **changes)
        return space

    @property
    def axes(self) -> Mapping[str, tuple[Any, ...]]:
        """The values of each axis, in the order given."""
        return MappingProxyType(self._axes)

    @property
    def size(self) -> int:
        """The number of combinations before constraints."""
        return math.prod(len(values) for values in self._axes.values())

    @property
    def constraints(self) -> tuple[Predicate, ...]:
        """The constraints on a configuration; a dependent axis adds one."""
        return self._constraints

    def __iter__(self) -> Iterator[Config]:
        """Go through the configurations in the order of the axes and their values; nothing is kept."""
        return map(_config_of, self._walk)

    def __len__(self) -> int:
        """Count the configurations, once; only axes that a constraint ties together are gone through."""
        return self._count

    @computed_once
    def _count(self) -> int:
        return self._walk.count() if self._constraints else self.size

    @computed_once
    def _walk(self) -> SpaceWalk:
        return SpaceWalk(self._axes, self._constraints, lambda values: self._find_refusal(_config_of(values)) is None)

    def __bool__(self) -> bool:
        return next(iter(self), None) is not None  # not by len, which lists all

    def __contains__(self, config: object) -> bool:
        if not isinstance(config, Mapping) or config.keys() != self._axes.keys():
            return False
        known = all(_key(config[name]) in values for name, values in self._values.items())
        return known and self._find_refusal(self._member(config)) is None

    def config(self, /, **values: Any) -> Config:
        """Return the configuration with these values; `DefinitionError` says which axis or constraint refuses it."""
        if values.keys() != self._axes.keys():
            missing = [name for name in self._axes if name not in values]
            unknown = [name for name in values if name not in self._axes]
            groups = ((missing, "missing"), (unknown, "unknown"))
            said = " and ".join(f"{', '.join(group)} {word}" for group, word in groups if group)
            raise DefinitionError(f"the axes of this space are {', '.join(self._axes)}; {said}")
        for name, value in values.items():
            if _key(value) in self._values[name]:
                continue
            message = f"{name}={value!r} is not a value of that axis; it has {_shorten(self._axes[name])}"
            for own in self._axes[name]:
                if isinstance(value, Number) and isinstance(own, Number) and own == value:
                    message += f". {own!r} is equal, but of type {type(own).__name__}, not {type(value).__name__}"
                    break
            raise DefinitionError(message)
        config = self._member(values)
        refusing = self._find_refusal(config)
        if refusing is not None:
            raise DefinitionError(f"{config!r} is outside the space: the constraint {text_of(refusing)} refuses it")
        return config

    def fingerprint(self) -> str:
        """Return a digest of axes, values and the code of the constraints; the same in every process."""
        return self._fingerprint

    @computed_once
    def _fingerprint(self) -> str:
        axes: dict[str, Json] = {name: [*sorted(values)] for name, values in self._values.items()}
        constraints: list[Json] = [*sorted({code_checksum(predicate) for predicate in self._constraints})]
        return fingerprint_of({"axes": axes, "constraints": constraints})

    # ------------------------------------------------------------------------------------------------- for searching

    @computed_once
    def grid(self) -> tuple[Axis, ...]:
        """The axes as a search sees them: with their kinds, and values in canonical order."""
        return tuple(axis_of(name, values, self._kinds.get(name)) for name, values in self._axes.items())

    @computed_once
    def _places(self) -> tuple[dict[tuple[type, Any], int], ...]:
        return tuple({_place(value): at for at, value in enumerate(axis.values)} for axis in self.grid)

    def at(self, point: Point) -> Config | None:
        """Return the configuration at a point, or None if a constraint refuses it."""
        config = _config_of({axis.name: axis.values[i] for axis, i in zip(self.grid, point, strict=True)})
        return config if self._find_refusal(config) is None else None

    def point(self, config: Mapping[str, Any]) -> Point | None:
        """Return the point of a configuration, or None if an axis lacks its value; constraints do not count."""
        if config.keys() != self._axes.keys():
            return None
        found = tuple(
            places.get(_place(config[axis.name]), -1) for axis, places in zip(self.grid, self._places, strict=True)
        )
        return None if -1 in found else found

    def decoded(self, encoded: Json) -> Config | None:
        """Return the configuration with this encoding, found by its digests; None if it is outside this space."""
        fields = encoded.get("v") if isinstance(encoded, dict) and encoded.get("t") == "tunebook.Config" else encoded
        if not isinstance(fields, dict) or fields.keys() != self._axes.keys():
            return None
        try:
            config = _config_of({name: own[fingerprint_of(fields[name])] for name, own in self._values.items()})
        except KeyError:
            return None
        return config if self._find_refusal(config) is None else None

    def sample(self, rng: random.Random) -> Config | None:
        """Return a random configuration, or None if the space is empty.

        All are equally likely if the constraints accept at least a few of a hundred combinations. Otherwise a search,
        axis by axis, finds one, and finds some configurations more often than others.
        """
        for _ in range(_TRIES if self._constraints else 1):
            drawn = {name: values[int(rng.random() * len(values))] for name, values in self._axes.items()}
            if self._find_refusal(_config_of(drawn)) is None:
                return _config_of(drawn)
        values = self._walk.one(lambda values: rng.sample(values, len(values)))
        return None if values is None else _config_of(values)

    def __repr__(self) -> str:
        axes = ", ".join(f"{name}={_shorten(values)}" for name, values in self._axes.items())
        return f"Space({axes})" + "".join(f".where({text_of(predicate)})" for predicate in self._constraints)

    def _member(self, values: Mapping[str, Any]) -> Config:
        """Return the configuration with the axes' own values, in the order of the axes."""
        return _config_of({name: own[_key(values[name])] for name, own in self._values.items()})

    def _find_refusal(self, config: Config) -> Predicate | None:
        """Return the first constraint that does not accept a configuration."""
        for predicate in self._constraints:
            try:
                if not predicate(config):
                    return predicate
            except MISTAKES as error:
                raise DefinitionError(
                    f"the constraint {text_of(predicate)} failed on {config!r}: {type(error).__name__}: {error}"
                ) from error
        return None


class Among:
    """The constraint of an axis with values that depend on other axes."""

    __slots__ = ("_function", "_name")

    def __init__(self, name: str, function: Callable[[Any], Iterable[Any]]) -> None:
        self._name, self._function = name, function

    def __call__(self, config: Any) -> bool:
        value = config[self._name]
        return any(type(own) is type(value) and own == value for own in self._function(config))

    def __tunebook_checksum__(self) -> str:
        return f"{self._name}:{code_checksum(self._function)}"

    def __repr__(self) -> str:
        return f"{self._name} in {text_of(self._function)}"


def _all_values(name: str, function: Callable[[Any], Iterable[Any]], before: Mapping[str, Sequence[Any]]) -> list[Any]:
    """Return all values of a dependent axis, over every combination of the axes that its function reads."""
    read: set[str] = set()
    parents: list[str] = []
    while True:
        found: dict[str, Any] = {}
        try:
            for values in SpaceWalk({p: before[p] for p in parents}, (), lambda _values: True) if parents else [{}]:
                for value in _list_values(name, function(PartialConfig(values, read))):
                    found.setdefault(_key(value), value)
        except Undecided:
            missing = [axis for axis in before if axis in read and axis not in parents]
            if not missing:
                raise DefinitionError(
                    f"axis {name!r} depends on {', '.join(sorted(read - set(before))) or 'a whole configuration'}; "
                    f"let it read axes that come before it: {', '.join(before) or 'it is the first'}"
                ) from None
            parents += missing
        else:
            return list(found.values())


def _place(value: Any) -> tuple[type, Any]:
    return (type(value), value) if type(value) in _PLAIN else (object, _key(value))


def _by_name(given: object) -> str:
    """Return how a space is written for which somebody passed a dict."""
    named = (
        isinstance(given, Mapping) and given and all(isinstance(name, str) and name.isidentifier() for name in given)
    )
    axes = given if isinstance(given, Mapping) and named else {"block": [32, 64]}
    return f"Space({', '.join(f'{name}={values!r}' for name, values in axes.items())})"


def _list_values(name: str, values: object) -> list[Any]:
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Iterable):
        raise DefinitionError(f"axis {name!r} needs a list of values; for one value write {name}=[{values!r}]")
    if isinstance(values, (set, frozenset)):
        # Strings hash differently in every process, and so would the order of the candidates.
        raise DefinitionError(f"axis {name!r} is a set, which has no order; write {name}=[...] or {name}=sorted(...)")
    listed = list(values)
    if not listed:
        raise DefinitionError(f"axis {name!r} has no values, so the space would be empty")
    return listed


def _distinct(name: str, values: list[Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for value in values:
        try:
            hash(value)
            key = fingerprint(value)
        except TypeError as error:
            raise DefinitionError(
                f"axis {name!r} has the value {value!r}, which is not hashable ({error}); write a tuple"
            ) from error
        except CodecError as error:
            raise DefinitionError(f"axis {name!r} has a value that cannot be written down: {error}") from error
        if key in found:
            raise DefinitionError(f"axis {name!r} has the value {value!r} twice")
        found[key] = value
    return found


def _key(value: object) -> str:
    try:
        return fingerprint(value)
    except CodecError:
        return ""  # no axis has a value that cannot be encoded


def _shorten(values: tuple[Any, ...]) -> str:
    if len(values) <= 8:
        return repr(list(values))
    return f"[{', '.join(map(repr, values[:6]))}, ... {len(values)} values]"
