"""Settings and overlays for the length of a with-block, in this thread or task only: one mechanism for all."""

from __future__ import annotations

from contextlib import suppress
from contextvars import ContextVar, Token
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

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

    __slots__ = ("ended", "outer", "suspension", "token", "value")

    def __init__(self, value: object, outer: _Layer | None) -> None:
        self.value: Final = value
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

    def __enter__(self) -> None:
        load_adapters()
        outer, entered = INNERMOST.get(), False
        try:
            _begin(self._value)
            for told in _listeners:
                told()
            entered = True
        finally:
            if not entered:  # by an interrupt: the block does not begin, and so does not end either
                INNERMOST.set(outer)

    def __exit__(self, *_: object) -> None:
        _end(self._value)
        for told in _listeners:
            told()


def _begin(value: object) -> None:
    layer = _Layer(value, INNERMOST.get())
    layer.token = INNERMOST.set(layer)


def _end(value: object) -> None:
    """Remove the innermost layer with a value, wherever it is: blocks in generators may end in any order."""
    layer, above = INNERMOST.get(), []
    while layer is not None and layer.value is not value:
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
        _begin(each.value)


_listeners: Final[list[Callable[[], None]]] = []


def when_scopes_change(told: Callable[[], None]) -> None:
    """Call a function after every begin and end of a block, in its thread: for caches of other libraries."""
    _listeners.append(told)


def scoped(kind: type[T]) -> Iterator[T]:
    """Yield the values of a kind that are set in this thread or task, innermost first."""
    layer = INNERMOST.get()
    while layer is not None:
        if isinstance(layer.value, kind) and not layer.ended:
            yield layer.value
        layer = layer.outer


class _Overlay(NamedTuple):
    """Either configurations by problem, or one for every problem of an operation."""

    entries: Mapping[tuple[str, str, str], object]
    op: str | None = None
    config: object = None

    def content(self) -> object:
        """Return a value that is equal for overlays with the same effect."""
        return sorted(self.entries.items(), key=lambda item: item[0]), self.op, self.config

    def find(self, problem: Problem) -> object | None:
        return self.config if problem.op == self.op else self.entries.get(problem)


def overlay_cache(mapping: Mapping[tuple[str, str, str], object]) -> Scope:
    """Shadow memory and disk with `{(device, op_id, call_key): config}` inside a with-block.

    Blocks nest, the innermost wins, and other threads and tasks see nothing of it. The mapping is copied here.
    """
    for key in mapping:
        if not (isinstance(key, tuple) and len(key) == 3 and all(isinstance(part, str) for part in key)):
            raise DefinitionError(f"an overlay's keys are (device, op_id, call_key), three strings; found {key!r}")
    return Scope(_Overlay(dict(mapping)))


def overlay_op(op: str, config: object) -> Scope:
    """Give one configuration to every call of an operation inside a with-block."""
    return Scope(_Overlay({}, op, config))


def find_overlay(problem: Problem) -> object | None:
    """Return the configuration that the overlays of this thread or task give to a problem, or None."""
    answers = (overlay.find(problem) for overlay in scoped(_Overlay))
    return next((config for config in answers if config is not None), None)
