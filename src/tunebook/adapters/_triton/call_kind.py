"""The kind of a launch: launches of the same kind share compiled programs.

Triton compiles for facts about arguments that are not in a kernel's key, and that may change from call to call: whether
a tensor begins at a multiple of 16 bytes, and whether an integer is 1, a multiple of 16, or longer than 32 bits. Kinds
may differ where programs do not: then one more program is asked for, which Triton has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple, final

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

_CONSTANTS: Final = (int, bool, float, str, type(None))


class _Facts(NamedTuple):
    """The facts about one parameter that its programs depend on."""

    is_constant: bool = False
    value: bool = True
    alignment: bool = True


@final
class CallKinds:
    """The kinds of the launches of a `JITFunction`, or of another function, of which nothing is known."""

    def __init__(self, names: Sequence[str], function: Any) -> None:
        self._facts: Final = dict.fromkeys(names, _Facts())
        for each in getattr(function, "params", ()):
            aligned = not (each.do_not_specialize or each.do_not_specialize_on_alignment)
            self._facts[each.name] = _Facts(each.is_constexpr, not each.do_not_specialize, aligned)
        self._by_position: Final = [self._facts[name] for name in names]

    def of(self, positional: Sequence[Any], named: Mapping[str, Any]) -> Hashable:
        """Return the kind of a launch with these arguments."""
        found = [_fact_of(value, facts) for value, facts in zip(positional, self._by_position, strict=False)]
        found += [_fact_of(value, self._facts.get(name, _OPTION)) for name, value in named.items()]
        return tuple(found)


_OPTION: Final = _Facts(is_constant=True)


def _fact_of(value: Any, facts: _Facts) -> Hashable:
    kind: type = value.__class__
    if facts.is_constant:
        return kind, value if kind in _CONSTANTS else None
    if kind is int:
        length = -0x80000000 <= value <= 0x7FFFFFFF or value >> 63
        return facts.value and value == 1, facts.alignment and value % 16 == 0, length
    if kind is tuple:
        return tuple([_fact_of(each, facts) for each in value])
    pointer = getattr(value, "data_ptr", None)
    return kind if pointer is None else facts.alignment and pointer() % 16 == 0
