"""The attributes of a selector that can be set: its caches, its tuner, its listener."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Generic, Literal, TypeVar, get_args

from tunebook._base.errors import DefinitionError, did_you_mean, not_among
from tunebook._kernel.policy import AutotunePolicy, MissFallback
from tunebook._memo.answer_memo import MEMO
from tunebook._selection.tiers import AnyTuner, Memory, Parts
from tunebook._selection.trusted_entries import EntryGuard
from tunebook._tuning.tuner import Tuner

if TYPE_CHECKING:
    from collections.abc import Callable

    from tunebook._base.vocabulary import Problem
    from tunebook._memo.answer_memo import ConfigCache
    from tunebook._selection.persistent_cache import PersistentCache
    from tunebook._tuning.job import Tuned

C = TypeVar("C")

SETTINGS_OF_SELECTORS: Final = (
    "cache", "policy", "tuner", "persistent", "persist_autotune", "on_event", "forbid_reautotune"
)  # fmt: skip


def _checked_tuner(tuner: AnyTuner | Literal[False] | None) -> AnyTuner | None:
    """Return the tuner that `tuner=` asks for: a new one for None, and None for False."""
    if tuner is None:
        return Tuner()
    if tuner is False:
        return None
    if isinstance(tuner, type) or not callable(getattr(tuner, "autotune", None)):
        raise DefinitionError(f"invalid tuner={tuner!r}: give a Tuner(), None for the usual one, or False for none")
    return tuner


def as_policy(policy: AutotunePolicy | str) -> AutotunePolicy:
    """Return the policy that `policy=` asks for: one, or the name of its `cache_miss_fallback`."""
    if isinstance(policy, AutotunePolicy):
        return policy
    if policy not in get_args(MissFallback):
        raise DefinitionError(not_among("policy", policy, get_args(MissFallback), "an AutotunePolicy(...)"))
    return AutotunePolicy(cache_miss_fallback=policy)  # type: ignore[arg-type] # one of the literals


class SelectorSettings(Generic[C]):
    """The settings of a selector, which its tiers read at each call. Any other attribute is an error."""

    __slots__ = ("__weakref__", "_on_event", "_parts", "_persist", "_persistent")

    def __init__(
        self,
        cache: ConfigCache[C],
        tuner: AnyTuner | Literal[False] | None,
        persistent: PersistentCache[C] | None,
        on_event: Callable[..., None] | None,
        *,
        persist: bool,
        forbid_again: bool,
    ) -> None:
        book = EntryGuard(persistent, writes=persist)
        self._parts: Final = Parts(cache, book, _checked_tuner(tuner), forbid_again=forbid_again)
        self._persistent, self._persist = persistent, persist
        self.on_event = on_event

    if not TYPE_CHECKING:  # a type checker would take this for leave to assign any name

        def __setattr__(self, name: str, value: object) -> None:
            known = hasattr(type(self), name) or hasattr(self, "__dict__") or name.startswith("__")
            if not known:  # a misspelt setting would otherwise be taken, and have no effect
                raise AttributeError(did_you_mean("attribute of a selector", name, SETTINGS_OF_SELECTORS))
            super().__setattr__(name, value)

    def __repr__(self) -> str:
        book = "no book" if self._persistent is None else f"the book {self._persistent.where}"
        return f"<{type(self).__name__}: {self.cache!r}, {book}, tuner {self.tuner!r}>"

    @property
    def cache(self) -> ConfigCache[C]:
        """The answers in memory."""
        return self._parts.cache

    @cache.setter
    def cache(self, cache: ConfigCache[C]) -> None:
        self._parts.cache = cache
        for tier in self._parts.tiers:
            if isinstance(tier, Memory):
                tier.forget()
        MEMO.invalidate()

    @property
    def tuner(self) -> AnyTuner | None:
        """The tuner; None where nothing is tuned by itself."""
        return self._parts.tuner

    @tuner.setter
    def tuner(self, tuner: AnyTuner | Literal[False] | None) -> None:
        self._parts.tuner = _checked_tuner(tuner)
        MEMO.invalidate()

    @property
    def persistent(self) -> PersistentCache[C] | None:
        """The answers that outlive the process."""
        return self._persistent

    @persistent.setter
    def persistent(self, persistent: PersistentCache[C] | None) -> None:
        self._keep_in(persistent, writes=self._persist)

    @property
    def persist_autotune(self) -> bool:
        """Whether results are written into `persistent`."""
        return self._persist

    @persist_autotune.setter
    def persist_autotune(self, persist: bool) -> None:
        self._keep_in(self._persistent, writes=persist)

    def _keep_in(self, persistent: PersistentCache[C] | None, *, writes: bool) -> None:
        self._persistent, self._persist = persistent, writes
        self._parts.book = EntryGuard(persistent, writes=writes)
        MEMO.invalidate()

    def unwritten(self, problem: Problem) -> Tuned[C] | None:
        """Return the latest tuning of a problem in this process, if no book has it; explanations show it."""
        return self._parts.book.unwritten.get(problem)

    @property
    def forbid_reautotune(self) -> bool:
        """Whether a call that was tuned before gets that result, instead of being tuned again."""
        return self._parts.forbid_again

    @forbid_reautotune.setter
    def forbid_reautotune(self, forbid: bool) -> None:
        self._parts.forbid_again = forbid
        MEMO.invalidate()

    @property
    def on_event(self) -> Callable[..., None] | None:
        """The listener that the selector was made with; `listen` adds others."""
        return self._on_event

    @on_event.setter
    def on_event(self, listener: Callable[..., None] | None) -> None:
        if listener is not None and not callable(listener):
            raise DefinitionError(f"invalid on_event={listener!r}: give a function on_event(event, **data)")
        self._on_event = listener
        MEMO.invalidate()
