"""The tiers, one small class each. `_selection` says in which order they are asked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, Protocol, TypeVar

from tunebook._base.environment_variables import pins_text
from tunebook._memo.overlay import find_overlay
from tunebook._selection.recording import recordings
from tunebook._selection.trusted_entries import EntryGuard, Refused
from tunebook._tuning.job import Call

if TYPE_CHECKING:
    from collections.abc import Callable

    from tunebook._base.environment_variables import Mode
    from tunebook._base.vocabulary import Problem
    from tunebook._kernel.policy import AutotunePolicy
    from tunebook._memo.memory import ConfigCache
    from tunebook._tuning.in_call_session import InCallSession
    from tunebook._tuning.job import Step
    from tunebook.search import Nearest

C = TypeVar("C")
C_co = TypeVar("C_co", covariant=True)


# NamedTuples here and below, where dataclasses would do: a frozen dataclass takes 0.42 ms to define, a NamedTuple 0.06,
# and `import tunebook` has a budget.
class Found(NamedTuple, Generic[C_co]):
    """A tier's answer. `remember` puts it into memory; `level` says which cache hit, for the event.

    `guess` says what a configuration that was not measured for this problem is taken from.
    """

    config: C_co
    event: str
    level: str | None = None
    remember: bool = False
    guess: Nearest | None = None


class Skipped(NamedTuple):
    """Why a tier has no answer. `exploration` is what may run the call instead of whoever asked, to learn from it."""

    reason: str
    error: Exception | None = None
    transient: bool = False
    exploration: InCallSession[Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Request(Call[C]):
    """A call on its way through the tiers. `heard` says that somebody listens to what is told."""

    policy: AutotunePolicy
    tell: Callable[..., None]
    heard: bool = False
    on_step: Callable[[Step], None] | None = None
    mode: Mode = "normal"


class Tier(Protocol[C]):
    """One tier."""

    @property
    def name(self) -> str:
        """What explanations and errors call it."""

    def ask(self, request: Request[C]) -> Found[C] | Skipped:
        """Return a configuration, or why there is none."""


class Override(Generic[C]):
    """The configuration given with this very call. Never remembered: it was not measured."""

    name: Final = "override"

    def ask(self, request: Request[C]) -> Found[C] | Skipped:
        config = request.inv.override_cfg
        return Skipped("none given") if config is None else Found(config=config, event="override")


class Overlays(Generic[C]):
    name: Final = "overlay"

    def ask(self, request: Request[C]) -> Found[Any] | Skipped:
        config = find_overlay(request.problem)
        return Skipped("none in this context") if config is None else Found(config=config, event="overlay_hit")


class Pinned(Generic[C]):
    """The configuration that `TUNEBOOK_PIN` gives to a kernel in this process. Never remembered, like an override."""

    name: Final = "pinned"

    def ask(self, request: Request[C]) -> Found[Any] | Skipped:
        text = pins_text()
        if not text:
            return Skipped("TUNEBOOK_PIN is not set")
        from tunebook._selection.env_pins import pinned  # noqa: PLC0415 - only who pins needs it

        config = pinned(text, request.kernel, request.inv)
        return Skipped("not in TUNEBOOK_PIN") if config is None else Found(config=config, event="pinned")


def off(request: Request[Any]) -> Skipped:
    """Return what a tier says that the mode of the process has switched off."""
    return Skipped(f"off: TUNEBOOK_MODE is {request.mode}")


def key_of(request: Request[Any]) -> tuple[Problem, str]:
    """Return what is tuned once: a problem, for one version of the code. A notebook cell run again makes another."""
    return request.problem, request.kernel.code_checksum


class Memory(Generic[C]):
    name: Final = "memory"

    def __init__(self, cache: ConfigCache[C]) -> None:
        self._cache = cache
        self._code_of: dict[Problem, str] = {}

    def ask(self, request: Request[C]) -> Found[C] | Skipped:
        config = self._cache.get(*request.problem)
        if config is None:
            return Skipped(f"no entry among {self._cache.size()}")
        code = self._code_of.get(request.problem)
        if code is not None and code != request.kernel.code_checksum:
            return Skipped("the entry was made by other code of the same name")
        return Found(config=config, event="cache_hit", level="memory")

    def remember(self, request: Request[C], config: C) -> None:
        self._code_of[request.problem] = request.kernel.code_checksum
        self._cache.put(*request.problem, config)


class Persistent(Generic[C]):
    name: Final = "persistent"

    def __init__(self, book: EntryGuard[C] | None) -> None:
        self._book = book

    def ask(self, request: Request[C]) -> Found[C] | Skipped:
        if request.mode == "off":
            return off(request)
        if self._book is None:
            return Skipped("none given")
        entry = self._book.find(request)
        if isinstance(entry, Refused):
            return Skipped(entry.reason)
        return Found(config=entry.config, event="cache_hit", level="persistent", remember=True)


class Heuristics(Generic[C]):
    """A configuration that nobody measured for this problem: of the nearest one in the book, or the author's guess."""

    name: Final = "heuristics"

    def __init__(self, book: EntryGuard[C] | None = None) -> None:
        self._book = book

    def ask(self, request: Request[C]) -> Found[C] | Skipped:
        if request.mode == "replay":
            return off(request)
        if not request.policy.allow_heuristics:
            return Skipped("off: policy.allow_heuristics is False")
        if request.policy.cache_miss_fallback == "nearest" and self._book is not None and request.mode != "off":
            near = self._book.nearest(request)
            if near is not None:
                found, guess = near
                request.tell("nearest", cfg=found, confidence=guess.confidence, near=guess.problem.call_key)
                return Found(config=found, event="heuristics", guess=guess)
        config = request.kernel.heuristic(request.inv)
        return Skipped("the kernel has none") if config is None else Found(config=config, event="heuristics")


class FirstCandidate(Generic[C]):
    """While a recording is on, or tunebook is off, nothing is tuned and the program must run all the same."""

    name: Final = "first candidate"

    def ask(self, request: Request[C]) -> Found[C] | Skipped:
        if not recordings() and request.mode != "off":
            return Skipped("only while a recording is on")
        for config in request.kernel.candidates(request.inv):
            return Found(config=config, event="heuristics")
        return Skipped("the kernel has no candidates")
