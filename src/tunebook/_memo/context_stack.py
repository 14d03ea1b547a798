"""Settings and overlays for the length of a with-block, in this thread or task only: one mechanism for all."""

from __future__ import annotations

from contextlib import suppress
from contextvars import ContextVar, Token
from typing import TYPE_CHECKING, Final, Self, TypeVar

from tunebook._arrays.library import load_adapters
from tunebook._base.errors import DefinitionError
from tunebook._memo.answer_memo import MEMO

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from tunebook._base.vocabulary import Problem

T = TypeVar("T")


class _Layer:
    """One setting, and the layer below it. It suspends the memo while *any* context refers to it.

    A task that was started inside the block keeps its copy of the context after the block has ended.
    """

    __slots__ = ("ended", "outer", "scope", "suspension", "token", "value")

    def __init__(self, scope: Scope, value: object, outer: _Layer | None) -> None:
        self.scope: Final = scope
        self.value = value
        self.outer: Final = outer
        self.token: Token[_Layer | None] | None = None  # for the context in which the block was entered
        self.ended = False  # by another context, while that one still refers to it
        self.suspension: Final = MEMO.suspend()


# None means that nothing is scoped here: one read tells the hot path's second level that memoised answers apply.
INNERMOST: Final[ContextVar[_Layer | None]] = ContextVar("tunebook_scope", default=None)


class Scope:
    """A with-block that sets one value; re-entrant, and may be entered by several threads at once."""

    __slots__ = ("_value",)

    def __init__(self, value: object) -> None:
        self._value = value

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: use it as `with ...:`>"

    def value(self) -> object:
        """Return the value to set for one block."""
        return self._value

    def __enter__(self) -> Self:
        load_adapters()
        outer, entered = INNERMOST.get(), False
        try:
            _begin(self, self.value())
            _tell()
            entered = True
        finally:
            if not entered:  # by an interrupt: the block does not begin, and so does not end either
                INNERMOST.set(outer)
        return self

    def __exit__(self, *_: object) -> None:
        _end(self)
        _tell()

    @property
    def token(self) -> object | None:
        """The layer of this block in this thread or task; None outside of the block."""
        return next((layer for layer in _layers() if layer.scope is self), None)


def _begin(scope: Scope, value: object) -> None:
    layer = _Layer(scope, value, INNERMOST.get())
    layer.token = INNERMOST.set(layer)


def _end(scope: Scope) -> None:
    """Remove the innermost layer of a scope, wherever it is: blocks in generators may end in any order."""
    layer, above = INNERMOST.get(), []
    while layer is not None and layer.scope is not scope:
        above.append(layer)
        layer = layer.outer
    if layer is None:
        return
    token, layer.token, entered_here = layer.token, None, False
    with suppress(ValueError):  # another context entered the block
        if token is not None:
            INNERMOST.reset(token)
            entered_here = True
    if not entered_here:
        # An async generator that was left early is closed in a task of the event loop's. The task that entered the
        # block keeps the layer, and must not see it any more.
        layer.ended = True
        INNERMOST.set(layer.outer)
    for each in reversed(above):
        _begin(each.scope, each.value)


_listeners: Final[list[Callable[[], None]]] = []
_fixed: Final[list[Callable[[], bool]]] = []


def when_scopes_change(told: Callable[[], None], fixed: Callable[[], bool] | None = None) -> None:
    """Call a function after every begin, change and end of a block, in its thread: for caches of other libraries.

    `fixed` says whether a block must stay as it is for now, because a program is being made under its content.
    """
    _listeners.append(told)
    if fixed is not None:
        _fixed.append(fixed)


def _tell() -> None:
    for told in _listeners:
        told()


def _layers() -> Iterator[_Layer]:
    layer = INNERMOST.get()
    while layer is not None:
        if not layer.ended:
            yield layer
        layer = layer.outer


def scoped(kind: type[T]) -> Iterator[T]:
    """Yield the values of a kind that are set in this thread or task, innermost first."""
    return (layer.value for layer in _layers() if isinstance(layer.value, kind))


class _Overlay:
    """Configurations by problem, as a mapping has them now; or one configuration for every problem of an operation."""

    __slots__ = ("_config", "_entries", "_mapping", "_op")

    def __init__(
        self, mapping: Mapping[tuple[str, str, str], object], op: str | None = None, config: object = None
    ) -> None:
        self._mapping, self._entries, self._op, self._config = mapping, dict(mapping), op, config

    def content(self) -> object:
        """Return a value that is equal for overlays with the same effect."""
        return sorted(self._entries.items(), key=lambda item: item[0]), self._op, self._config

    def find(self, problem: Problem) -> tuple[object | None, object | None]:
        """Return the configuration of a problem when `content` was made, and the one of now."""
        if problem.op == self._op:
            return self._config, self._config
        return self._entries.get(problem), self._mapping.get(problem)

    def renewed(self) -> _Overlay:
        """Return an overlay whose content is the mapping of now."""
        return _Overlay(self._mapping, self._op, self._config)


class overlay_cache(Scope):  # noqa: N801 - it is used like a function
    """Shadow memory and disk with `{(device, op_id, call_key): config}` inside a with-block.

    Blocks nest, the innermost wins, and other threads and tasks see nothing of it. A change of `mapping` counts from
    the next call on; functions under `jax.jit` see it at their next trace. Selectors look at overlays;
    `ConfigCache.get` does not.

    >>> with overlay_cache({("cpu", "matmul@v0", "f32[64,64]"): {"block": 16}}) as overlay:
    ...     len(overlay.mapping)
    1
    """

    __slots__ = ("mapping",)

    def __init__(self, mapping: Mapping[tuple[str, str, str], object]) -> None:
        for key in mapping:
            if not (isinstance(key, tuple) and len(key) == 3 and all(isinstance(part, str) for part in key)):
                raise DefinitionError(f"an overlay's keys are (device, op_id, call_key), three strings; found {key!r}")
        super().__init__(mapping)
        self.mapping: Final = mapping

    def value(self) -> object:
        """Return the entries that the mapping has now."""
        return _Overlay(self.mapping)


def overlay_op(op: str, config: object) -> Scope:
    """Give one configuration to every call of an operation inside a with-block."""
    return Scope(_Overlay({}, op, config))


def find_overlay(problem: Problem) -> object | None:
    """Return the configuration that the overlays of this thread or task give to a problem, or None."""
    for layer in _layers():
        if not isinstance(layer.value, _Overlay):
            continue
        config, now = layer.value.find(problem)
        if config is not now and not any(fixed() for fixed in _fixed):
            config, layer.value = now, layer.value.renewed()
            _tell()
        if config is not None:
            return config
    return None
