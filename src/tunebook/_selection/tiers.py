"""The tiers that run nothing, one small class each. `selector.ORDER` holds the order of all tiers."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, NamedTuple, Protocol, TypeVar

from tunebook._arrays.device_fingerprint import get_device_platform
from tunebook._base.environment_variables import mode, pins_text, trust_setting
from tunebook._base.log import listens, log
from tunebook._kernel.policy import AutotunePolicy
from tunebook._memo.answer_memo import CAPACITY, BoundedDict
from tunebook._memo.context_stack import find_overlay
from tunebook._selection.listeners import listener_failed
from tunebook._selection.recorded_decision import why_undecided
from tunebook._selection.recording import recordings
from tunebook._selection.trusted_entries import Refused, reach_of
from tunebook._selection.tuning_watch import warn_of_rejected_pin
from tunebook._tuning.job import Call

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from tunebook._base.environment_variables import Mode
    from tunebook._base.record_format import Record
    from tunebook._base.vocabulary import Event, Problem, Trust
    from tunebook._memo.answer_memo import ConfigCache
    from tunebook._selection.trusted_entries import EntryGuard, Trusted
    from tunebook._tuning.job import Step
    from tunebook.search import Nearest, Prediction

C = TypeVar("C")
C_co = TypeVar("C_co", covariant=True)

DEFERRED: Final = frozenset({"background", "incremental"})  # policies by which a call does not wait for its tuning
NO_CANDIDATES: Final = "the kernel has no candidates"
WATCHED: Final = 1024  # sessions that watch a winner; one holds no arrays, about 20 kB for 60 candidates


class Session(Protocol):
    """Runs the calls of one problem, to learn from them."""

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run a call and return its result."""


# NamedTuples here and below, where dataclasses would do: a frozen dataclass takes 0.42 ms to define, a NamedTuple 0.06,
# and `import tunebook` has a budget.
class Found(NamedTuple, Generic[C_co]):
    """A tier's answer. `remember` puts it into memory; `level` says which cache hit.

    `guess` and `trust` are as in `Selection`.
    """

    config: C_co
    event: Event
    level: str | None = None
    remember: bool = False
    guess: Nearest | Prediction | None = None
    trust: tuple[Trust, str] | None = None
    exploration: Session | None = None


class Skipped(NamedTuple):
    """Why a tier has no answer. `exploration` may run the call in place of the caller, to learn from it."""

    reason: str
    error: Exception | None = None
    transient: bool = False
    exploration: Session | None = None


_PLACED: Final = frozenset({"autotune_start", "autotune_finish", "heuristics"})


def event_data(
    problem: Problem, event: Event, *, level: str | None = None, method: str | None = None, **data: Any
) -> dict[str, Any]:
    """Return the data that a listener gets with an event."""
    told = {"device": problem.device, "op_id": problem.op, "call_key": problem.call_key, **data}
    if event in _PLACED:
        told |= {"platform": get_device_platform(problem.device), "method": method}
    return told if level is None else {**told, "level": level}


def has_log() -> bool:
    """Whether the program may have a log: without `logging` nothing listens, and its module is not even entered."""
    return "logging" in sys.modules


class Teller:
    """Tells the listeners the events of a request. Left by an error, it ends the tuning that has begun and not ended.

    Leaving it twice does no harm, so it is entered twice, as a flight is.
    """

    __slots__ = ("_began", "_listeners", "_method", "_problem")

    def __init__(
        self, problem: Problem, listeners: Callable[[], Sequence[Callable[..., object]]], method: str | None = None
    ) -> None:
        self._problem, self._listeners, self._method, self._began = problem, listeners, method, False

    def __call__(self, event: Event, **data: Any) -> None:
        self._began = self._began or event == "autotune_start"
        if listeners := self._listeners():
            told = event_data(self._problem, event, method=self._method, **data)
            for listener in listeners:
                try:
                    listener(event, **told)
                except Exception as error:  # noqa: BLE001 - a listener may raise anything
                    listener_failed(error, listener)
        if has_log() and event != "autotune_progress" and listens("debug"):
            facts = " ".join(f"{name}={value!r}" for name, value in data.items())
            log("debug", f"{self._problem.op}: {event} {facts}")
        self._began = self._began and event != "autotune_finish"

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if self._began and error is not None:
            self("autotune_finish", cfg=None, error=error, called=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request(Call[C]):
    """A call on its way through the tiers. `heard` says that a listener gets the events, `silent` that nobody does.

    `on_demand` is a tuning that the program asked for: it tries every candidate, no matter what the policy predicts.
    `looks` has the entry that the persistent tier found, if it was asked, after the state that the book was in before.
    """

    policy: AutotunePolicy
    tell: Teller
    heard: bool = False
    silent: bool = False
    on_demand: bool = False
    on_step: Callable[[Step], None] | None = None
    mode: Mode = "normal"
    looks: list[tuple[object, Trusted[C] | Refused[C]]] = field(default_factory=list)


def tell_steps(request: Request[Any], on_step: Callable[[Step], None] | None) -> Callable[[Step], None] | None:
    """Return a function that tells the steps of a tuning to the listeners of a request, and to `on_step`."""
    if not request.heard:
        return on_step

    def tell(step: Step) -> None:
        request.tell("autotune_progress", step=step)
        if on_step is not None:
            on_step(step)

    return tell


class AnyTuner(Protocol):
    """The least that a selector needs of a tuner. Ours also reuses measurements, and says why it chose."""

    def autotune(
        self,
        make_fn: Callable[[Any], Callable[..., object]],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        candidates: Iterable[Any],
    ) -> Any:
        """Return the best candidate."""


class OfflineEntry(NamedTuple):
    """A problem and its record in a book; `outdated` names the versions that differ from this machine's."""

    problem: Problem
    record: Record | None
    where: str
    outdated: tuple[str, ...]


class Parts(Generic[C]):
    """The parts that the tiers of a selector share; `tiers` is filled when all of them are made."""

    def __init__(
        self, cache: ConfigCache[C], book: EntryGuard[C], tuner: AnyTuner | None, *, forbid_again: bool = True
    ) -> None:
        self.cache, self.book, self.tuner, self.forbid_again = cache, book, tuner, forbid_again
        self.tiers: tuple[Tier[C], ...] = ()
        # The sessions that watch a configuration that was found in the calls of this process.
        self.watched: Final[BoundedDict[Problem, tuple[Session, C]]] = BoundedDict(WATCHED)


class Tier(ABC, Generic[C]):
    """One tier. `name` stands in explanations and errors, `offline` in explanations without the program.

    All ranks of a job must get the same answer from a tier that `needs_agreement`; it is not asked while an agreement
    answers. A tier that is `in_jobs_only` is asked only then. A tier that `guesses` answers without any measurement.
    A tier that `runs_candidates` may take long.
    """

    name: ClassVar[str]
    offline: ClassVar[str] = ""
    needs_agreement: ClassVar[bool] = False
    runs_candidates: ClassVar[bool] = False
    in_jobs_only: ClassVar[bool] = False
    guesses: ClassVar[bool] = False

    def __init__(self, parts: Parts[C]) -> None:
        self._parts = parts

    @abstractmethod
    def ask(self, request: Request[C]) -> Found[Any] | Skipped:
        """Return a configuration, or the reason why this tier has no answer."""

    def preview(self, request: Request[C]) -> Found[Any] | Skipped:
        """Return the answer of `ask` without running, telling or remembering anything."""
        return self.ask(request)

    def reverify(self, request: Request[C], config: C) -> str:  # noqa: ARG002 - for other tiers
        """Measure behind a call the configuration that answers it without having been measured here; say how far it is.

        A silent request measures nothing.
        """
        return "nothing measures it"

    @classmethod
    def ask_offline(cls, entry: OfflineEntry) -> Found[Any] | Skipped | None:  # noqa: ARG003 - for other tiers
        """Return the answer in a new process, without the kernel's program; None if nothing can be said."""
        return Skipped(cls.offline) if cls.offline else None


class Override(Tier[C]):
    """The configuration given with this very call. Never remembered: it was not measured."""

    name = "override"
    offline = "only the program knows: config= of a call"

    def ask(self, request: Request[C]) -> Found[Any] | Skipped:
        config = request.inv.override_cfg
        return Skipped("none given") if config is None else Found(config=config, event="override")


class Overlays(Tier[C]):
    name = "overlay"
    offline = "only the program knows: overlays around the call"

    def ask(self, request: Request[C]) -> Found[Any] | Skipped:
        config: Any = find_overlay(request.problem)
        if config is None:
            return Skipped("none in this context")
        return Found(config=request.kernel.whole_cfg(request.inv, config), event="overlay_hit")


class Pinned(Tier[C]):
    """The configuration that `TUNEBOOK_PIN` gives to a kernel in this process. Never remembered, like an override."""

    name = "pinned"

    def __init__(self, parts: Parts[C]) -> None:
        super().__init__(parts)
        self._checked: BoundedDict[Problem, C] = BoundedDict(CAPACITY)  # a book is not read at every call

    def ask(self, request: Request[C]) -> Found[Any] | Skipped:
        text = pins_text()
        if not text:
            return Skipped("TUNEBOOK_PIN is not set")
        from tunebook._selection.env_pins import pinned  # noqa: PLC0415 - loaded late: few processes pin

        config = pinned(text, request.kernel, request.inv)
        if config is None:
            return Skipped("not in TUNEBOOK_PIN")
        if request.problem not in self._checked and request.mode != "off" and not request.silent:
            self._checked[request.problem] = config
            warn_of_rejected_pin(request, self._parts.book.find(request).record, config, "TUNEBOOK_PIN")
        return Found(config=config, event="pinned")

    @classmethod
    def ask_offline(cls, entry: OfflineEntry) -> Found[Any] | Skipped:
        from tunebook._selection.env_pins import names_of, parse_pins  # noqa: PLC0415 - loaded late: few processes pin

        pins = parse_pins(pins_text())
        wanted = next((pins[name] for name in names_of(entry.problem.op) if name in pins), {})
        pin = ", ".join(f"{name}={value}" for name, value in wanted.items())
        return Found(config=pin, event="pinned") if pin else Skipped("not in TUNEBOOK_PIN")


def off(request: Request[Any]) -> Skipped:
    """Return the answer of a tier that the mode of the process has switched off."""
    return Skipped(f"off: TUNEBOOK_MODE is {request.mode}")


def key_of(request: Request[Any]) -> tuple[Problem, str]:
    """Return the key of a tuning: a problem, and a version of the code. A notebook cell run again makes another."""
    return request.problem, request.kernel.code_checksum


class Memory(Tier[C]):
    name = "memory"
    offline = "empty in a new process"
    needs_agreement = True

    def __init__(self, parts: Parts[C]) -> None:
        super().__init__(parts)
        self._code_of: dict[Problem, str] = {}

    def ask(self, request: Request[C]) -> Found[C] | Skipped:
        config = self._parts.cache.get(*request.problem)
        if config is None:
            return Skipped("no entry for this call and this code")
        code = self._code_of.get(request.problem)
        if code is not None and code != request.kernel.code_checksum:
            return Skipped("the entry was made by other code of the same name")
        session, found = self._parts.watched.get(request.problem, (None, None))
        watching = session if found is config else None
        return Found(config=config, event="cache_hit", level="memory", exploration=watching)

    def forget(self) -> None:
        """Forget which code the entries were made by, because they are in another cache now."""
        self._code_of.clear()

    def remember(self, request: Request[C], config: C) -> None:
        """Answer calls of this problem with a configuration, as long as the kernel's code is the same."""
        codes, cache = self._code_of, self._parts.cache
        codes[request.problem] = request.kernel.code_checksum
        cache.put(*request.problem, config)
        if len(codes) > cache.size() + CAPACITY:  # the cache has dropped its oldest entries
            for problem in set(codes.copy()).difference(cache.keys()):
                codes.pop(problem, None)


class Persistent(Tier[C]):
    name = "persistent"
    needs_agreement = True

    def ask(self, request: Request[C]) -> Found[C] | Skipped:
        if request.mode == "off":
            return off(request)
        state = self._parts.book.state(request.problem)  # before the read, so that no change after it is missed
        entry = self._parts.book.find(request)
        request.looks[:] = [(state, entry)]
        if not isinstance(entry, Refused):
            if entry.record.head.origin == "pinned" and not request.silent:
                warn_of_rejected_pin(request, entry.record, entry.config, "`tunebook pin`")
            return Found(config=entry.config, event="cache_hit", level="persistent", remember=True)
        trusted = None if _is_verified_behind(request) else _trusted_answer(self._parts.book, request)
        if trusted is None or trusted.trust is None or request.policy.reverify != "behind":
            return trusted or Skipped(entry.reason)
        rung, reason = trusted.trust
        (autotune,) = (tier for tier in self._parts.tiers if tier.runs_candidates)
        return trusted._replace(trust=(rung, f"{reason}; {autotune.reverify(request, trusted.config)}"))

    @classmethod
    def ask_offline(cls, entry: OfflineEntry) -> Found[Any] | Skipped:
        if entry.record is None:
            return Skipped(f"no entry in {entry.where}")
        if not entry.record.head.decided:
            return Skipped(why_undecided(entry.record))
        if entry.outdated and reach_of(AutotunePolicy(), mode()) == "exact":
            return Skipped(f"{'; '.join(entry.outdated)}: its finalists are measured again first")
        trust: tuple[Trust, str] | None = ("versions", "; ".join(entry.outdated)) if entry.outdated else None
        return Found(config=entry.record.head.config, event="cache_hit", level="persistent", remember=True, trust=trust)


def _is_verified_behind(request: Request[Any]) -> bool:
    """Whether a background tuning verifies an outdated entry, which a later tier answers with meanwhile."""
    return request.mode == "normal" and request.policy.cache_miss_fallback == "background"


def _trusted_answer(book: EntryGuard[C], request: Request[C]) -> Found[C] | None:
    """Return the answer of an entry that was not made for this very call here, if such an entry is trusted."""
    reach = reach_of(request.policy, request.mode)
    entry = request.looks[-1][1] if request.looks else book.find(request)
    table = None if trust_setting() or request.policy.trust else request.kernel.table
    declared = () if table is None else table.declared
    if (reach == "exact" and not declared) or not isinstance(entry, Refused):
        return None
    from tunebook._selection.trust import climb, warn_of_trust  # noqa: PLC0415 - loaded late: for misses

    found = climb(book, request, entry, reach, declared)
    if found is None:
        return None
    if not request.silent and found.rung not in declared:
        behind = request.policy.reverify == "behind" and request.mode == "normal"
        warn_of_trust(request.problem.op, found.rung, found.reason, behind=behind)
    return Found(
        config=found.config, event="cache_hit", level="persistent", guess=found.guess, trust=(found.rung, found.reason)
    )


class Heuristics(Tier[C]):
    """A configuration that was not measured for this problem: of the nearest problem in the book, or the author's."""

    name = "heuristics"
    guesses = True

    def ask(self, request: Request[C]) -> Found[C] | Skipped:
        if request.mode == "replay":
            return off(request)
        if not request.policy.allow_heuristics:
            return Skipped("off: policy.allow_heuristics is False")
        if _is_verified_behind(request) and (trusted := _trusted_answer(self._parts.book, request)) is not None:
            return trusted
        book, asked = self._parts.book, None if request.mode == "off" else request.policy.cache_miss_fallback
        if asked == "nearest" and (near := book.nearest(request)) is not None:
            found, guess = near
            request.tell("nearest", cfg=found, confidence=guess.confidence, near=guess.problem.call_key)
            return Found(config=found, event="heuristics", guess=guess)
        if asked == "predict" and (predicted := _predicted_answer(book, request)) is not None:
            return predicted
        config = stand_in_for(book, request)
        return Skipped("the kernel has none") if config is None else Found(config=config, event="heuristics")


def _predicted_answer(book: EntryGuard[C], request: Request[C]) -> Found[C] | None:
    """Return the answer of a prediction that is sure enough, and tell of it."""
    from tunebook._selection.predictions import sure_prediction  # noqa: PLC0415 - loaded late: few policies ask
    from tunebook._selection.trust import warn_of_trust  # noqa: PLC0415 - loaded late: as above

    policy = request.policy
    sure = sure_prediction(book, request, reach_of(policy, request.mode), policy.regret_limit)
    if sure is None:
        return None
    found, told = sure.candidates[0], sure.prediction
    request.tell("predicted", cfg=found, regret=told.regret, bound=told.bound, problems=told.problems)
    if sure.rung == "exact":
        return Found(config=found, event="heuristics", guess=told)
    if not request.silent:
        warn_of_trust(request.problem.op, sure.rung, sure.reason, behind=False)
    return Found(config=found, event="heuristics", guess=told, trust=(sure.rung, sure.reason))


def stand_in_for(book: EntryGuard[C], request: Request[C]) -> C | None:
    """Return the configuration that answers while a call is tuned later: the heuristic's, if there is one.

    A launch that is not waited for gets the best configuration of the nearest sizes in the book, or else the first
    candidate: kernels of other libraries seldom have a heuristic.
    """
    config = request.kernel.heuristic(request.inv)
    later = request.policy.allow_autotune and request.policy.cache_miss_fallback in DEFERRED
    if config is not None or not later or request.kernel.recorder is None or request.mode != "normal":
        return config
    near = book.nearest(request)
    return near[0] if near is not None else next(iter(request.kernel.candidates(request.inv)), None)


class FirstCandidate(Tier[C]):
    """While a recording is on, or tunebook is off, nothing is tuned and the program must run all the same."""

    name = "first candidate"
    guesses = True

    def ask(self, request: Request[C]) -> Found[C] | Skipped:
        if not recordings() and request.mode != "off":
            return Skipped("only while a recording is on")
        return _first_candidate(request)


def _first_candidate(request: Request[C]) -> Found[C] | Skipped:
    for config in request.kernel.candidates(request.inv):
        return Found(config=config, event="heuristics")
    return Skipped(NO_CANDIDATES)


class AnyCandidate(Tier[C]):
    """The last resort of a rank that could not ask the others: candidates have the same order in every rank."""

    name = "any candidate"
    in_jobs_only = True
    guesses = True

    def ask(self, request: Request[C]) -> Found[C] | Skipped:
        if not request.policy.allow_heuristics or request.mode == "replay":
            return Skipped("off: nothing is to be guessed")
        if request.kernel.heuristic(request.inv) is not None:
            return Skipped("the kernel has a heuristic")
        return _first_candidate(request)


class BookLookup(Generic[C]):
    """Reads the entry of a request, and keeps it: under the lease it stays as it is.

    It reads nothing if the book is in the state in which another tier has found the entry.
    """

    def __init__(self, book: EntryGuard[C], request: Request[C]) -> None:
        self._book, self._request = book, request
        unread: Refused[C] = Refused("not read yet")
        self._state, self.entry = request.looks[-1] if request.looks else (None, unread)

    def __call__(self) -> Found[C] | None:
        before, self._state = self._state, self._book.state(self._request.problem)
        if before is None or before != self._state:
            self.entry = self._book.find(self._request)
        if isinstance(self.entry, Refused):
            return None
        return Found(config=self.entry.config, event="cache_hit", level="persistent", remember=True)
