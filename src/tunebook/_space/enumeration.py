"""Walking through a space without listing it: a constraint is asked as soon as the axes that it reads are set."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

# The errors of a constraint written in Python. Any other error is not about the configuration, and is not caught.
MISTAKES: Final = (ArithmeticError, AssertionError, AttributeError, LookupError, NameError, TypeError, ValueError)
# The number of configurations on which a constraint is watched, to see which axes it reads.
_WATCHED: Final = 8


class Undecided(BaseException):
    """A constraint reads an axis that is not set yet. Not an Exception, so that a constraint does not catch it."""


class PartialConfig:
    """Some axes of a configuration. Reading any other axis, or the configuration as a whole, raises `Undecided`."""

    __slots__ = ("_read", "_values")

    def __init__(self, values: Mapping[str, Any], read: set[str] | None = None) -> None:
        object.__setattr__(self, "_values", values)
        object.__setattr__(self, "_read", read)

    def __getattr__(self, name: str) -> Any:
        return self[name]

    def __getitem__(self, name: str) -> Any:
        if self._read is not None:
            self._read.add(name)
        try:
            return self._values[name]
        except KeyError:
            raise Undecided from None

    def get(self, name: str, _default: object = None) -> Any:
        return self[name]

    def _whole(self, *_args: object) -> NoReturn:
        raise Undecided

    # `**config`, a set of configurations or a comparison need all of it.
    keys = values = items = _whole
    __iter__ = __len__ = __contains__ = __repr__ = __eq__ = __hash__ = __setattr__ = _whole


class SpaceWalk:
    """Enumerates the points that some constraints accept, axis by axis in the order given.

    A constraint must be a pure function: its answer about some axes must not depend on the other axes. `accepts` is
    asked about whole configurations; it raises the error of a constraint with a mistake in it.
    """

    def __init__(
        self,
        axes: Mapping[str, Sequence[Any]],
        constraints: Sequence[Callable[[Any], object]],
        accepts: Callable[[dict[str, Any]], bool],
    ) -> None:
        self._axes = axes
        self._constraints = constraints
        self._accepts = accepts
        self._reads = [self._read_by(constraint) for constraint in constraints]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self._descend([*self._axes], range(len(self._constraints)), whole=True)

    def count(self) -> int:
        """Return the number of points: the product over groups of axes that no constraint ties together."""
        groups: list[tuple[set[str], list[int]]] = [({name}, []) for name in self._axes]
        for number, read in enumerate(self._reads):
            tied = [group for group in groups if group[0] & read] or groups[:1]
            merged = (set().union(*(g[0] for g in tied)), [*(c for g in tied for c in g[1]), number])
            groups = [merged, *(g for g in groups if g not in tied)]
        total = 1
        for tied_names, constraints in groups:
            names = [name for name in self._axes if name in tied_names]
            if not constraints:
                total *= math.prod(len(self._axes[name]) for name in names)
                continue
            try:
                total *= sum(1 for _ in self._descend(names, constraints, whole=False))
            except Undecided:
                return sum(1 for _ in self)  # a constraint reads more axes than it was seen to read
        return total

    def one(self, shuffled: Callable[[Sequence[Any]], Sequence[Any]]) -> dict[str, Any] | None:
        """Return the first point if axes are gone through in the order of `shuffled`; None if the space is empty."""
        return next(self._descend([*self._axes], range(len(self._constraints)), whole=True, order=shuffled), None)

    def _read_by(self, constraint: Callable[[Any], object]) -> frozenset[str]:
        """Return the axes that a constraint was seen to read; all axes if it looks at the configuration as a whole."""
        read: set[str] = set()
        for turn in range(_WATCHED):
            values = {name: own[(turn * len(own)) // _WATCHED] for name, own in self._axes.items()}
            try:
                constraint(PartialConfig(values, read))
            except (Undecided, *MISTAKES):
                return frozenset(self._axes)
        return frozenset(read & self._axes.keys())

    def _descend(
        self,
        names: Sequence[str],
        constraints: Sequence[int],
        *,
        whole: bool,
        order: Callable[[Sequence[Any]], Sequence[Any]] = lambda values: values,
    ) -> Iterator[dict[str, Any]]:
        due: dict[str, list[int]] = {name: [] for name in names}
        for number in constraints:
            reads = [name for name in names if name in self._reads[number]]
            due[reads[-1] if reads else names[-1]].append(number)
        values: dict[str, Any] = {}

        def below(depth: int, waiting: list[int]) -> Iterator[dict[str, Any]]:
            """Yield the points with the values so far; `waiting` are the constraints that could not decide on them."""
            name = names[depth]
            asked = waiting + due[name]
            for value in order(self._axes[name]):
                values[name] = value
                later: list[int] = []
                if depth == len(names) - 1:
                    if self._accepts(values) if whole else all(self._ask(n, values) for n in asked):
                        yield dict(values)
                elif self._may_go_on(asked, values, later):
                    yield from below(depth + 1, later)
            del values[name]

        return below(0, [])

    def _may_go_on(self, asked: list[int], values: dict[str, Any], later: list[int]) -> bool:
        for number in asked:
            try:
                if not self._ask(number, values):
                    return False
            except Undecided:
                later.append(number)
        return True

    def _ask(self, number: int, values: dict[str, Any]) -> bool:
        try:
            return bool(self._constraints[number](PartialConfig(values)))
        except MISTAKES as error:  # raised again on the whole configuration
            raise Undecided from error
