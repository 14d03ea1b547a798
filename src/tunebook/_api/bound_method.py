"""Tunable functions as methods: `layer.forward(x)`, and `layer.forward.explain(x)` about the same call.

A plain function would do for the calls, and saves 0.3 us of each; but the attributes of a plain bound method are the
attributes of its function, which do not know the object.
"""

from __future__ import annotations

from functools import partial, update_wrapper
from typing import TYPE_CHECKING, Any, Final

from tunebook._arrays.describe import is_compiling

if TYPE_CHECKING:
    import inspect
    from collections.abc import Callable

# The attributes of a tunable function that take the arguments of a call.
_ABOUT_A_CALL: Final = frozenset({"explain", "problem", "config_for"})


def is_method(function: Callable[..., Any], signature: inspect.Signature) -> bool:
    """Return whether a function is defined in a class, and takes the object as `self`."""
    owner = function.__qualname__.rpartition(".")[0].rpartition(".")[2]
    return owner not in ("", "<locals>") and next(iter(signature.parameters), None) == "self"


class TunableMethod:
    """A tunable function in a class: `Layer.forward` is the function itself, `layer.forward` is bound to the object."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function: Final = function
        update_wrapper(self, function)

    def __get__(self, instance: object, owner: type | None = None) -> Callable[..., Any]:
        if instance is None:
            return self.function
        # Torch's compiler cannot make an object of a class of partials.
        return partial(self.function, instance) if is_compiling() else BoundTunable(self.function, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


class BoundTunable(partial[Any]):
    # A tunable method of an object. A partial, because its call is C: a class with `__call__` adds 1 us to a call.

    __slots__ = ()
    __doc__ = property(lambda self: self.func.__doc__)  # the author's, for `help`

    @property
    def __self__(self) -> object:
        return self.args[0]

    @property
    def __func__(self) -> Callable[..., Any]:
        return self.func

    @property
    def __signature__(self) -> inspect.Signature:
        signature: inspect.Signature = self.func.__dict__["__signature__"]
        return signature.replace(parameters=list(signature.parameters.values())[1:])

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.func, name)
        return partial(found, self.__self__) if name in _ABOUT_A_CALL else found

    def __eq__(self, other: object) -> bool:
        same = isinstance(other, BoundTunable) and self.func is other.func and self.__self__ is other.__self__
        return same and (self.args[1:], self.keywords) == (other.args[1:], other.keywords)  # type: ignore[attr-defined]

    def __hash__(self) -> int:
        return hash((self.func, id(self.__self__)))
