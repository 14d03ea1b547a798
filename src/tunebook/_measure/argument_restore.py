"""Arguments that a kernel changes: noticed, and put back between its runs.

Candidates run on the arguments of the user's own call. A kernel that scales its input in place would otherwise scale it
once per sample, be timed on infinities, and leave the user with them; and a kernel that appends to a list would leave a
thousand items in it.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from types import FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any, Final, NamedTuple, Protocol

from tunebook._arrays.describe import ATOMS, is_array, key_function, parts_of, walk
from tunebook._arrays.library import library_of
from tunebook._base.errors import DefinitionError, TuningFailed, with_article
from tunebook._kernel.output_check import Comparison

# Their attributes are code and settings.
_CODE: Final = (type, ModuleType, FunctionType, MethodType)


class _Way(Protocol):
    """How a value is copied, compared with its copy, and put back: the record of an array library is one too."""

    @property
    def copy(self) -> Callable[[Any], Any]: ...
    @property
    def is_same(self) -> Callable[[Any, Any], bool]: ...
    @property
    def put_back(self) -> Callable[[Any, Any], object]: ...


class _ByItems(NamedTuple):
    """The way of a container. Items are compared by identity: an item that changes in itself has its own copy."""

    copy: Callable[[Any], Any]
    is_same: Callable[[Any, Any], bool]
    put_back: Callable[[Any, Any], object]


def _same_items(value: Any, copy: Any) -> bool:
    return len(value) == len(copy) and all(a is b for a, b in zip(value, copy, strict=True))


def _same_pairs(value: Any, copy: Mapping[Any, Any]) -> bool:
    return _same_items(value, copy) and _same_items(value.values(), copy.values())


def _set_items(value: Any, copy: Any) -> None:
    value[:] = copy


def _set_pairs(value: Any, copy: Mapping[Any, Any]) -> None:
    value.clear()
    for key, item in copy.items():
        value[key] = item


def _set_queue(value: Any, copy: Any) -> None:
    value.clear()
    value.extend(copy)


def _set_members(value: Any, copy: Any) -> None:
    value.clear()
    value.update(copy)


@lru_cache(1000)
def _slots(kind: type) -> tuple[str, ...]:
    """Return the attributes that a class and its bases keep outside of `__dict__`."""
    found = []
    for base in kind.__mro__:
        names = vars(base).get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            private = name.startswith("__") and not name.endswith("__")
            found.append(f"_{base.__name__.lstrip('_')}{name}" if private else name)
    return tuple(name for name in found if name not in ("__dict__", "__weakref__"))


def _state(value: Any) -> dict[str, Any]:
    try:
        found = object.__getattribute__(value, "__dict__")  # a proxy would run code of its own here
    except AttributeError:
        return {}
    return found if type(found) is dict else {}


def _attributes(value: Any) -> dict[str, Any]:
    kind: Any = type(value)
    slots = {name: getattr(value, name) for name in _slots(kind) if hasattr(value, name)}
    return {**slots, **_state(value)}


def _same_attributes(value: Any, copy: Mapping[str, Any]) -> bool:
    # A new attribute is the result of a `cached_property`, which may stay.
    now = _attributes(value)
    return all(name in now and now[name] is item for name, item in copy.items())


def _set_attributes(value: Any, copy: Mapping[str, Any]) -> None:
    kind: Any = type(value)
    slots, state = _slots(kind), _state(value)
    for name, item in copy.items():
        if name in slots:
            object.__setattr__(value, name, item)  # also in a frozen dataclass
        else:
            state[name] = item


def _counters(value: Any) -> dict[str, Any]:
    """Return the attributes that hold a number or a text; None may wait for a cache to be filled."""
    return {name: item for name, item in _attributes(value).items() if item is not None and type(item) in ATOMS}


def _set_memory(value: Any, copy: bytes) -> None:
    import ctypes  # noqa: PLC0415 - loaded late: few kernels take such arguments

    (ctypes.c_char * len(copy)).from_buffer(value).raw = copy


def _is_memory(value: Any) -> bool:
    """Return whether this is memory that a run may write to: of ctypes, a map, a view."""
    try:
        view = memoryview(value)
    except (TypeError, ValueError, BufferError):
        return False
    # An object of ctypes that refers to Python objects counts these references.
    return view.c_contiguous and not view.readonly and getattr(value, "_objects", None) is None


def _by_state(read: Callable[[Any], Any], write: Callable[[Any, Any], object]) -> _ByItems:
    exact = Comparison(exact=True)
    return _ByItems(read, lambda value, copy: exact(read(value), copy) is None, write)


_LIST: Final = _ByItems(list, _same_items, _set_items)
_BYTES: Final = _ByItems(bytes, lambda value, copy: bool(value == copy), _set_items)
_ATTRIBUTES: Final = _ByItems(_attributes, _same_attributes, _set_attributes)
_COUNTERS: Final = _ATTRIBUTES._replace(copy=_counters)
_CONTAINERS: Final[dict[type, _ByItems]] = {
    list: _LIST,
    dict: _ByItems(dict, _same_pairs, _set_pairs),
    set: _ByItems(set, lambda value, copy: bool(value == copy), _set_members),
    deque: _ByItems(list, _same_items, _set_queue),
    bytearray: _BYTES,
    array: _BYTES._replace(
        copy=lambda value: value[:], is_same=lambda value, copy: bool(value.tobytes() == copy.tobytes())
    ),
    # A view of a dict that cannot be written to: a change is noticed, and stops the tuning.
    MappingProxyType: _ByItems(dict, _same_pairs, lambda _value, _copy: None),
}

_MEMORY: Final = _ByItems(
    lambda value: memoryview(value).tobytes(), lambda value, copy: memoryview(value).tobytes() == copy, _set_memory
)
# Generators of random numbers: every run draws the same ones. By name, because their libraries may not be loaded.
_GENERATORS: Final[dict[str, _ByItems | None]] = {
    "random.SystemRandom": None,
    "random.Random": _by_state(lambda value: value.getstate(), lambda value, state: value.setstate(state)),
    "numpy.random.mtrand.RandomState": _by_state(
        lambda value: value.get_state(), lambda value, state: value.set_state(state)
    ),
    "numpy.random._generator.Generator": _by_state(
        lambda value: value.bit_generator.state, lambda value, state: setattr(value.bit_generator, "state", state)
    ),
    "torch._C.Generator": _by_state(lambda value: value.get_state(), lambda value, state: value.set_state(state)),
}


class _SavedValue(NamedTuple):
    """A value that a run may change, and its copy. `argument` is the position or the name of its argument."""

    value: Any
    way: _Way
    copy: Any
    argument: int | str
    at_end: bool = False

    @property
    def is_same(self) -> bool:
        return self.way.is_same(self.value, self.copy)

    def put_back(self) -> None:
        self.way.put_back(self.value, self.copy)


class Restorer:
    """Holds copies of the arguments that runs may change: of arrays, containers, and attributes of objects.

    `declared` are the arguments that runs write to: they are put back between runs without a comparison. An object
    without a key, for example a `self` that is ignored, is put back at the end only, and only its numbers, texts,
    lists, deques, arrays and generators of random numbers: the rest may be a cache, which would be filled anew in every
    timed run.
    """

    def __init__(self, arguments: object, declared: Sequence[object] | None = None) -> None:
        self._saved: list[_SavedValue] = []
        self._seen: dict[int, object] = {}  # by id: an array that is passed twice is copied once
        objects: list[tuple[Any, int | str]] = []
        for value in declared or ():
            self._save(value, "declared", objects)
        self._changed = set(range(len(self._saved)))
        for argument, value in _by_position(arguments):
            self._save(value, argument, objects)
        for value, argument in objects:
            for part, way in _inner_state(value):
                if id(part) not in self._seen or part is value:
                    self._seen[id(part)] = part
                    self._saved.append(_SavedValue(part, way, way.copy(part), argument, at_end=True))

    def _save(self, value: object, argument: int | str, objects: list[tuple[Any, int | str]]) -> None:
        """Copy everything in an argument that a run may change, however deep; objects without a key are listed."""
        stack: list[Any] = [value]
        while stack:
            found = stack.pop()
            if type(found) in ATOMS or id(found) in self._seen:
                continue
            self._seen[id(found)] = found
            ways = _ways(found)
            if ways is None:
                objects.append((found, argument))
                continue
            self._saved += [_SavedValue(found, way, way.copy(found), argument) for way in ways]
            inside = [*(parts_of(found) or {}).values(), *(_attributes(found).values() if _ATTRIBUTES in ways else ())]
            if is_array(found) and library_of(found).dtype(found) == "object":
                inside += found.flat
            stack.extend(reversed(inside))

    @property
    def has_changes(self) -> bool:
        """Whether runs change an argument, which is put back between them."""
        return bool(self._changed)

    def notice(self) -> None:
        """Find out which arguments a run changed, and put them back; `TuningFailed` if one cannot be put back."""
        self._put_back(self._find_changes())

    def put_back_all(self) -> None:
        """Put back all arguments, also objects without a key, and arrays that another process shares."""
        late = [saved for saved in self._saved if saved.at_end and not saved.is_same]
        self._put_back([*self._find_changes(), *late])

    def _find_changes(self) -> list[_SavedValue]:
        """Compare the arguments that were not seen to change yet, and return those that now are."""
        unchanged = (i for i, saved in enumerate(self._saved) if not saved.at_end and i not in self._changed)
        new = [i for i in unchanged if not self._saved[i].is_same]
        self._changed.update(new)
        return [self._saved[i] for i in new]

    def _put_back(self, new: Sequence[_SavedValue]) -> None:
        self.restore()
        for saved in new:
            saved.put_back()
            if not saved.is_same:
                kind = type(saved.value).__qualname__
                problem = f"a run changes argument {saved.argument}, and its {kind} cannot be put back"
                remedy = "return a new value instead, or switch tuning off: AutotunePolicy(allow_autotune=False)"
                raise TuningFailed(problem, [DefinitionError(remedy)])

    def written(self) -> dict[int, Any]:
        """Return copies of the arguments that the last run changed, by number."""
        return {i: saved.way.copy(saved.value) for i, saved in self._changed_now().items()}

    def changed(self) -> list[Any]:
        """Return the arguments that the last run changed."""
        return [saved.value for saved in self._changed_now().values()]

    def outcome(self, *, everything: bool) -> tuple[list[Any], list[Any]]:
        """Return the arguments that the last run changed, and copies of them; if it changed none, perhaps all."""
        changed = list(self._changed_now().values())
        if everything and not changed:
            changed = [saved for saved in self._saved if not saved.at_end]
        return [saved.value for saved in changed], [saved.way.copy(saved.value) for saved in changed]

    def _changed_now(self) -> dict[int, _SavedValue]:
        self._find_changes()
        return {i: self._saved[i] for i in sorted(self._changed) if not self._saved[i].is_same}

    def restore(self) -> None:
        """Put back the arguments that runs change."""
        for i in self._changed:
            self._saved[i].put_back()


def refuse_iterators(arguments: object) -> None:
    """Raise `TuningFailed` if a second run cannot get the same arguments, because the first uses one up."""
    for leaf in walk(arguments):
        if type(leaf) not in ATOMS and isinstance(leaf, Iterator):
            problem = f"{with_article(type(leaf).__qualname__)} among the arguments is used up by the first run"
            raise TuningFailed(problem, [DefinitionError("pass a list instead")])


def _by_position(arguments: object) -> list[tuple[int | str, Any]]:
    """Return the arguments of a call, given as `(args, kwargs)`, with their positions and names."""
    match arguments:
        case (tuple() as args, Mapping() as kwargs):
            return [*enumerate(args, 1), *kwargs.items()]
        case _:
            return [(1, arguments)]


def _ways(value: Any) -> list[_Way] | None:
    """Return the ways to put a value back, none for a value that cannot change; None for an object without a key."""
    kind: Any = type(value)
    if is_array(value):
        library = library_of(value)
        # A subclass has state beside its values: a mask, a unit.
        return [library, *([_ATTRIBUTES] if _state(value) else [])] if library.is_writable(value) else []
    if isinstance(value, _CODE):
        return []
    container = _container_way(kind) or (_MEMORY if _is_memory(value) else None)
    if container is None and parts_of(value) is None and key_function(kind) is None:
        return None
    return [*([] if container is None else [container]), *([_ATTRIBUTES] if _attributes(value) else [])]


@lru_cache(1000)
def _container_way(kind: type) -> _ByItems | None:
    return next((_CONTAINERS[base] for base in kind.__mro__ if base in _CONTAINERS), _generator_way(kind))


def _generator_way(kind: type) -> _ByItems | None:
    names = [f"{base.__module__}.{base.__qualname__}" for base in kind.__mro__]
    return next((_GENERATORS[name] for name in names if name in _GENERATORS), None)


def _inner_state(value: Any) -> Iterator[tuple[Any, _Way]]:
    """Yield the parts of an object without a key that are put back."""
    if _counters(value):
        yield value, _COUNTERS
    for item in _attributes(value).values():
        if type(item) in (list, bytearray, deque):
            yield item, _CONTAINERS[type(item)]
        elif (way := _generator_way(type(item))) is not None:
            yield item, way
        elif type(item) not in ATOMS and is_array(item) and library_of(item).is_writable(item):
            yield item, library_of(item)
