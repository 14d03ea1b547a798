"""A list of candidates in the place of a space: the values of the candidates are its axes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar, cast

from tunebook._base.config_codec import encode, fingerprint_of
from tunebook._base.errors import DefinitionError
from tunebook._space.space import Config
from tunebook.search._by_name import listed

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from tunebook._base.vocabulary import Json
    from tunebook._space.space import Space

C = TypeVar("C")

_PLAIN: Final = (bool, int, float, str, type(None))


class CandidateList(Generic[C]):
    """A list of candidates in the place of a `Space`: finds a member by its encoding, or by its values on the axes."""

    def __init__(self, candidates: Iterable[C]) -> None:
        self._members: dict[str, C] = {}
        self._values: dict[str, Config] = {}  # as points of the space, by the fingerprint of the member
        encoded: dict[str, Mapping[str, Any]] = {}
        for candidate in candidates:
            as_json = encode(candidate)
            name = fingerprint_of(as_json)
            self._members[name] = candidate
            encoded[name] = _values_in(as_json)
        axes = dict.fromkeys(axis for values in encoded.values() for axis in values)
        for name, values in encoded.items():
            # With a prefix, because an axis cannot be called "items", and a constant can.
            self._values[name] = Config(**{f"x_{axis}": _plain(values.get(axis)) for axis in axes})
        self._of_point = {point: self._members[name] for name, point in self._values.items()}
        self._name_of = {id(member): name for name, member in self._members.items()}

    def __iter__(self) -> Iterator[C]:
        return iter(self._members.values())

    def __len__(self) -> int:
        return len(self._members)

    def space(self) -> Space:
        """Return the space whose configurations are exactly the members."""
        return cast("Space", listed(list(self._of_point)))

    def decoded(self, encoded: Json) -> C | None:
        """Return the member with this encoding; None if the list has none."""
        return self._members.get(fingerprint_of(encoded))

    def point(self, member: Any) -> Config:
        """Return a member as a configuration of the space."""
        return self._values[self._name_of[id(member)]]

    def member(self, point: Config) -> C:
        """Return the member at a configuration of the space."""
        return self._of_point[point]


def _values_in(encoded: Json) -> Mapping[str, Any]:
    inside = encoded.get("v", encoded) if isinstance(encoded, dict) else None
    if not isinstance(inside, dict):
        raise DefinitionError(f"the values of a candidate have no names: {encoded!r:.200}")
    return inside


def _plain(value: object) -> object:
    return value if isinstance(value, _PLAIN) else repr(value)
