"""Makes plain functions with hyperparameters tunable."""

from __future__ import annotations

import inspect
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from tunebook._api.function_kernel import CONFIG
from tunebook._api.tunable import tunable
from tunebook._base.errors import DefinitionError
from tunebook._space.space import Config, Space

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping


def tune(
    function: Callable[..., Any] | None = None,
    /,
    *,
    hyperparams: Mapping[str | tuple[str, ...], Iterable[Any]],
    **options: Any,
) -> Any:
    """Make a function choose some of its keyword arguments by itself, measured once and remembered.

    `hyperparams` maps a name to a list of values, or a tuple of names to a list of tuples, of values that go together.
    A call overrides the choice by `config={...}`. If all hyperparameters have defaults, the defaults are the heuristic:
    others are chosen only if they were measured to be faster. `options` go to `tunebook.tunable`.

    >>> import jax.numpy as jnp
    >>> def scale(x, *, factor=1, times=2):
    ...     return x * factor * times
    >>> tuned = tune(scale, hyperparams={("factor", "times"): [(1, 2), (2, 1)]}, store=False)
    >>> float(tuned(jnp.float32(3)))
    6.0
    """
    if function is None:
        return partial(tune, hyperparams=hyperparams, **options)
    names = [name for key in hyperparams for name in ((key,) if isinstance(key, str) else key)]
    if not names or len(set(names)) < len(names):
        raise DefinitionError(f"hyperparams names each hyperparameter once; it names {', '.join(names) or 'none'}")
    parameters = inspect.signature(function).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for name in names:
        known = name in parameters and parameters[name].kind is not inspect.Parameter.POSITIONAL_ONLY
        if not known and not takes_any:
            raise DefinitionError(
                f"{getattr(function, '__name__', function)!r} takes no keyword argument {name!r}; hyperparams names "
                f"some of {', '.join(parameters)}"
            )
    defaults = {name: parameters[name].default for name in names if name in parameters}
    if len(defaults) == len(names) and inspect.Parameter.empty not in defaults.values():
        options.setdefault("heuristic", Config(**defaults))
    if all(isinstance(key, str) for key in hyperparams):
        space: Any = Space(**{cast("str", key): list(values) for key, values in hyperparams.items()})
    else:  # a list of all combinations where names go together, because an axis of a space has one name
        space = [{}]
        for key, values in hyperparams.items():
            each = [{key: v} if isinstance(key, str) else dict(zip(key, v, strict=True)) for v in values]
            space = [{**one, **more} for one in space for more in each]
    return tunable(_take_config(function, names), space=space, **options)


def _take_config(function: Callable[..., Any], names: list[str]) -> Callable[..., Any]:
    """Return a function that takes `config` in place of the hyperparameters."""
    signature = inspect.signature(function)
    positions = list(signature.parameters)
    first = min((positions.index(name) for name in names if name in positions), default=len(positions))
    kept = [p for name, p in signature.parameters.items() if name not in names]
    # Passed on by name: by position, a parameter behind a hyperparameter would be taken for the hyperparameter.
    behind = [p.name for p in kept[first:] if p.kind is p.POSITIONAL_OR_KEYWORD]

    def call(*args: Any, config: Any, **kwargs: Any) -> Any:
        return function(*args[:first], **dict(zip(behind, args[first:], strict=True)), **kwargs, **config)

    after = next((i for i, p in enumerate(kept) if p.kind is p.VAR_KEYWORD), len(kept))
    kept.insert(after, inspect.Parameter(CONFIG, inspect.Parameter.KEYWORD_ONLY))
    call.__dict__["__signature__"] = signature.replace(parameters=kept)
    call.__name__ = getattr(function, "__name__", "tuned")
    call.__qualname__ = getattr(function, "__qualname__", call.__name__)
    call.__module__, call.__doc__ = function.__module__, function.__doc__
    return call
