"""How the runs of candidates are measured, as far as that is the user's choice."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal, TypeAlias

from tunebook._base.errors import DefinitionError

Cache: TypeAlias = Literal["warm", "cold"]
LaunchWay: TypeAlias = Literal["eager", "graph"]

_CHOICES: dict[str, tuple[object, ...]] = {
    "cache": ("warm", "cold", None),
    "launch": ("eager", "graph", None),
    "host": (True, False, None),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """How candidates are measured; None is the way that is usual for the device. Times taken differently never compare.

    `cache`: "cold" empties the caches before each run, "warm" leaves them full of the run before. By default the L2 of
    a GPU that is timed by events is emptied, and all other caches are warm. `inputs`: the number of copies of the
    arguments that take turns, so that no run finds its own arguments in a cache. `launch`: "graph" replays a run from
    a CUDA graph, which leaves the cost of launches out; "eager" calls the function. `host`: True times a call from
    its start until its result is ready, by the host's clock; False times the device's work alone, by its own clock.

    >>> Measure(cache="cold", inputs=4)
    Measure(cache='cold', inputs=4)
    """

    cache: Cache | None = None
    inputs: int | None = None
    launch: LaunchWay | None = None
    host: bool | None = None

    def __post_init__(self) -> None:
        for name, valid in _CHOICES.items():
            if (value := getattr(self, name)) not in valid or type(value) is int:
                listed = ", ".join(repr(each) for each in valid if each is not None)
                raise DefinitionError(f"Measure({name}={value!r}): use one of {listed}")
        if self.inputs is not None and (type(self.inputs) is not int or self.inputs < 1):
            raise DefinitionError(f"Measure(inputs={self.inputs!r}): write how many copies of the arguments take turns")

    def __repr__(self) -> str:
        given = (f"{name}={value!r}" for name, value in _given(self).items())
        return f"Measure({', '.join(given)})"

    def over(self, other: Measure | None) -> Measure:
        """Return this with the fields of `other` where it leaves a field open.

        >>> Measure(cache="cold").over(Measure(cache="warm", inputs=2))
        Measure(cache='cold', inputs=2)
        """
        return self if other is None else Measure(**{**_given(other), **_given(self)})


def _given(measure: Measure) -> dict[str, Any]:
    values = {field.name: getattr(measure, field.name) for field in fields(measure)}
    return {name: value for name, value in values.items() if value is not None}


def measure_of(kernel: Any) -> Measure | None:
    """Return how a kernel wants to be measured; a class of a user's may have another attribute of that name."""
    return kernel.measure if isinstance(kernel.measure, Measure) else None


def check_measure(measure: object, option: str = "measure") -> Measure | None:
    """Return the value of an option; `DefinitionError` if it is neither a `Measure` nor None."""
    if measure is None or isinstance(measure, Measure):
        return measure
    raise DefinitionError(f'invalid {option}={measure!r}: write {option}=tunebook.Measure(cache="cold")')
