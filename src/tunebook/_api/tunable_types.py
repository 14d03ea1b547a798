"""The types of tunable functions, as type checkers and editors see them.

No type can say "the parameters of this function without `config`": a `ParamSpec` drops positional parameters only. But
a function whose `config` has a default takes the same arguments before and after decoration, so its type is kept as it
is. Of a function whose `config` has no default, the result is kept, and its arguments are not checked.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar, overload, runtime_checkable

from tunebook._api.bound_method import BoundTunable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from typing import Concatenate, ParamSpec, TypeAlias

    from typing_extensions import TypeVar as DefaultTypeVar

    from tunebook._api.explain import Explanation
    from tunebook._api.function_kernel import FunctionKernel
    from tunebook._base.vocabulary import Problem
    from tunebook._memo.context_stack import Scope
    from tunebook._selection.selector import ConfigSelectorChain
    from tunebook._space.space import Config, Space

    P = ParamSpec("P")
    # Callable without `config`. Whether a parameter may be left out can be asked only for a number of parameters.
    _Complete: TypeAlias = (
        Callable[[], Any]
        | Callable[[Any], Any]
        | Callable[[Any, Any], Any]
        | Callable[[Any, Any, Any], Any]
        | Callable[[Any, Any, Any, Any], Any]
        | Callable[[Any, Any, Any, Any, Any], Any]
        | Callable[[Any, Any, Any, Any, Any, Any], Any]
        | Callable[[Any, Any, Any, Any, Any, Any, Any], Any]
        | Callable[[Any, Any, Any, Any, Any, Any, Any, Any], Any]
        | Callable[[Any, Any, Any, Any, Any, Any, Any, Any, Any], Any]
        | Callable[[Any, Any, Any, Any, Any, Any, Any, Any, Any, Any], Any]
        | Callable[[Any, Any, Any, Any, Any, Any, Any, Any, Any, Any, Any], Any]
        | Callable[[Any, Any, Any, Any, Any, Any, Any, Any, Any, Any, Any, Any], Any]
    )
    F = TypeVar("F", bound=_Complete)
    # Any function. An overload with `G` follows the overload with `F`, and not one with `Callable[..., R]`: mypy
    # takes two type variables in the same place for equal, and so stays with the first overload that fits.
    # Otherwise a parameter with `Any` in it, as a bare `np.ndarray` has, would make the overloads ambiguous, and
    # the tunable function `Any`.
    G = TypeVar("G", bound=Callable[..., Any])
    G_co = TypeVar("G_co", bound=Callable[..., Any], covariant=True)
    C_co = DefaultTypeVar("C_co", covariant=True, default=Any)
    C = TypeVar("C")
    # The two kinds of `SpaceLike`: a mapping becomes a `Config`, and any other object keeps its type.
    MappingSpace: TypeAlias = Space | Iterable[Mapping[str, Any]] | Callable[..., Iterable[Mapping[str, Any]]]
    ObjectSpace: TypeAlias = Iterable[C] | Callable[..., Iterable[C]]
else:
    F = TypeVar("F")
    C_co = TypeVar("C_co", covariant=True)
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


class _Default(enum.Enum):
    """The default of a parameter `config`, by which type checkers keep the parameters of a tunable function."""

    CHOSEN = "chosen for each call"

    def __repr__(self) -> str:
        return self.name


CHOSEN: Final[Any] = _Default.CHOSEN


class TunableMembers(Protocol[C_co]):
    """All of a tunable function but the call itself."""

    kernel: FunctionKernel
    selector: ConfigSelectorChain[Any]

    def config_for(self, *args: Any, **kwargs: Any) -> C_co:
        """Return the configuration that a call gets, tuned first if need be; the function is not run for the caller."""

    def explain(self, *args: Any, **kwargs: Any) -> Explanation:
        """Say which configuration a call gets and why, without running or tuning anything."""

    def overlay(self, config: object = None, /, **values: Any) -> Scope:
        """Give this function one configuration inside a with-block, in this thread or task."""

    def problem(self, *args: Any, **kwargs: Any) -> Problem:
        """Return the key of a call in memory and in the book."""


@runtime_checkable
class Tunable(TunableMembers[C_co], Protocol[R_co, C_co]):
    """A tunable function, called without `config`, or with a `config` that overrides the choice.

    `R_co` is the type of its results, and `C_co` of its configurations.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> R_co:
        """Run with the best known configuration; tune on the first call of its kind."""

    if not TYPE_CHECKING:

        def __class_getitem__(cls, parameters: Any) -> Any:
            given = parameters if isinstance(parameters, tuple) else (parameters, Any)  # `C_co` may be left out
            return super().__class_getitem__(given)


# Its attributes are those of its function, which Python 3.12 does not look for.
Tunable.register(BoundTunable)


if TYPE_CHECKING:

    class TypedTunable(TunableMembers[C_co], Protocol[F, C_co]):
        """A tunable function that takes the arguments of the author's function, `F`."""

        @overload
        def __call__(self: TypedTunable[Callable[P, R], C_co], *args: P.args, **kwargs: P.kwargs) -> R: ...
        @overload
        def __call__(
            self: TypedTunable[Callable[..., R], Config], *args: Any, config: dict[str, Any], **kwargs: Any
        ) -> R: ...

        @overload
        def __get__(self, instance: None, owner: type, /) -> TypedTunable[F, C_co]: ...
        @overload
        def __get__(
            self: TypedTunable[Callable[Concatenate[Any, P], R], C_co], instance: object, owner: type, /
        ) -> TypedTunable[Callable[P, R], C_co]: ...

    class LooseTunable(TunableMembers[C_co], Protocol[G_co, C_co]):
        """A tunable function with the result of the author's function, `G_co`; its arguments are not checked."""

        def __call__(self: LooseTunable[Callable[..., R], C_co], *args: Any, **kwargs: Any) -> R: ...

    class Decorator(Protocol[C_co]):
        """The result of `tunable(space=...)`."""

        @overload
        def __call__(self, function: F, /) -> TypedTunable[F, C_co]: ...
        @overload
        def __call__(self, function: G, /) -> LooseTunable[G, C_co]: ...  # type: ignore[overload-cannot-match]  # see `G`
