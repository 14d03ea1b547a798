"""Compiles and loads the candidates of a live session, between its calls, and leaves out the surely slow ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from tunebook._measure.stopwatch import Attempt, Trial
from tunebook.search._outlook import outlook_for

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    from tunebook._statistics.live_race import LiveRace
    from tunebook._tuning.host_share import HostShare
    from tunebook._tuning.live_runs import Builds, LiveRuns

C = TypeVar("C")

_POLL_EVERY: Final = 8  # calls: asking whether a compiler is done takes a microsecond
# Candidates that are loaded and have not run yet, at most, where times decide which others are worth loading.
_AHEAD: Final = 4


class LivePreparation(Generic[C]):
    """The candidates of one session that cannot run yet. Not for threads: its session has one turn at a time.

    With `calls_per_stall`, a call that forks or loads is one of so many of the process: see `HostShare.may_stall`. A
    program that is in memory, because a launch of other sizes has loaded it, needs neither.
    """

    def __init__(
        self,
        configs: Mapping[str, C],
        runs: LiveRuns[C],
        race: LiveRace,
        host: HostShare,
        *,
        likely: Sequence[str] = (),
        calls_per_stall: int = 0,
        failed: Callable[[str, Trial], object],
    ) -> None:
        """Prepare all but the first of `configs`, which serves meanwhile; `likely` ones first. `failed` is told."""
        self._configs, self._runs, self._race, self._host = configs, runs, race, host
        self._calls_per_stall, self._failed = calls_per_stall, failed
        self._outlook = outlook_for(configs, likely)
        order = list(configs) if self._outlook is None else self._outlook.worth_trying(configs, {})
        first = next(iter(configs))
        self.names: Final = [name for name in order if name != first]
        self._builds = runs.builds({name: configs[name] for name in self.names})
        self.to_build = list(self.names) if self._builds is not None else []
        self.to_load = [] if self._builds is not None else list(self.names)
        self._ready: set[str] = set()  # in memory
        self._loading: str | None = None
        self._news: tuple[int, ...] | None = None  # about which the outlook was asked last
        self._poll_at = 0  # calls
        self._products: dict[Hashable, str] = {}
        self.not_tried: Final[dict[str, str]] = {}  # why, by name
        self.same: Final[dict[str, str]] = {}  # candidates that compile to the program of another one
        self.loads = 0
        self.again: set[str] = set()  # candidates of the race that are prepared for calls of another kind

    @property
    def left(self) -> int:
        """How many candidates are still to be compiled or loaded."""
        return len(self.to_build) + len(self.to_load) + (self._loading is not None)

    @property
    def is_due(self) -> bool:
        """Whether candidates are to be compiled or loaded; or left out, because the account has held them up."""
        return bool(self.left) or (self._race.is_pressed and self._race.phase == "screening")

    @property
    def has_turn(self) -> bool:
        """Whether the next call of the process that may stand still is one of this session."""
        return bool(self._calls_per_stall and self.left) and self._host.is_preparing(self)

    def forget(self) -> None:
        """Prepare nothing any more, in a forked child: the compilers are the parent's."""
        self.to_build.clear()
        self.to_load.clear()
        self._builds = self._loading = None

    def renew(self) -> set[str]:
        """Prepare for calls of another kind, whose programs are others; return the candidates that are in the race.

        These come first, and no round begins before they are loaded.
        """
        if self._race.phase == "decided":
            return set()
        self.again, waiting = self._race.racing, set[str]()
        if self._race.phase == "screening":
            waiting = {*self.to_build, *self.to_load, *self.same, self._loading or ""} & {*self._configs}
            self.same.clear()
        order = list(self._configs)
        names = sorted(self.again | waiting, key=lambda name: (name not in self.again, order.index(name)))
        if self._builds is not None:
            self._builds.close()
        self._builds = self._runs.builds({name: self._configs[name] for name in names}) if names else None
        self.to_build, self.to_load = (names, []) if self._builds is not None else ([], names)
        self._ready.clear()
        self._products.clear()
        self._loading, self._news, self._poll_at = None, None, 0
        return set(self.again)

    def step(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Take over programs that were compiled beside, or load one: a call makes a fork or loads, and never both.

        Return whether it did.
        """
        calls, forked = self._race.account.calls, False
        may_stall = self._host.may_stall(self._calls_per_stall, self)
        if self._builds is not None and calls >= self._poll_at:
            self._poll_at = calls + _POLL_EVERY
            forked = self._take_builds(self._builds, args, may_fork=may_stall)
        loading = None if forked else self._next_to_load(may_stall=may_stall)
        if loading is not None:
            self._loading = loading
            with self._host.working("steps of loading"):
                self._load(loading, args, kwargs)
        if not self.left:
            if self._builds is not None:
                self._builds.close()
                self._builds = None
            self._host.has_prepared(self)
            self._race.complete()
        return forked or loading is not None

    def _take_builds(self, builds: Builds, args: tuple[Any, ...], *, may_fork: bool) -> bool:
        """Take over the compiled candidates; return whether this call has made a fork to compile others."""
        forks, began_s = builds.forks, self._host.clock_s()
        for build in builds.poll(args, may_fork=may_fork):
            if build.name not in self.to_build:
                continue
            self.to_build.remove(build.name)
            if build.name in self.again and (build.failure is not None or build.left_out):
                self.again.discard(build.name)  # it fails at its next launch, where the race learns of it
            elif build.failure is not None:
                self._failed(build.name, Trial(failure=build.failure))
            elif build.left_out:
                self._leave_out([build.name], build.left_out)
            elif build.product is not None and build.product in self._products:
                self.same[build.name] = self._products[build.product]  # an equal program is not loaded twice
                self.again.discard(build.name)
            else:
                if build.product is not None:
                    self._products[build.product] = build.name
                if build.in_memory:
                    self._ready.add(build.name)
                self.to_load.append(build.name)
        forked = builds.forks > forks
        self._host.spend(self._host.clock_s() - began_s, "forks" if forked else "choices")
        return forked

    def _next_to_load(self, *, may_stall: bool) -> str | None:
        """Return the candidate to load; none while others are to run first. Leave out those that are surely slow."""
        if self._loading is not None:
            return self._loading if may_stall else None
        if self._race.is_overdue and self._race.phase == "screening" and not self.again:
            self._leave_out([*self.to_load, *self.to_build, *self._race.untried])
            return None
        loadable = self.to_load if may_stall else [name for name in self.to_load if name in self._ready]
        if self._outlook is None or self.again:
            name = next(iter(loadable), None)
        elif loadable or self._race.is_pressed or (may_stall and self.to_build):
            name = next((name for name in self._worth_loading(len(loadable)) if name in loadable), None)
        else:
            return None
        if name is not None:
            self.to_load.remove(name)
        return name

    def _worth_loading(self, loadable: int) -> list[str]:
        """Return the candidates to load, the most promising first; none if nothing is new since the last time.

        Asking the model takes as long as several launches. `loadable`: how many this call could load.
        """
        race, untried, known = self._race, self._race.untried, self._race.known
        news = len(untried), len(known), loadable, len(self.to_load), len(self.to_build), race.is_pressed
        full = len(untried) >= _AHEAD and not race.is_pressed
        if full or race.phase != "screening" or news == self._news or self._outlook is None:
            return []
        self._news = news
        with self._host.working("outlooks"):
            waiting = [*self.to_load, *self.to_build]
            worth = self._outlook.worth_trying([*waiting, *untried], known, pressed=race.is_pressed)
            if race.is_pressed:
                self._leave_out([name for name in untried if name not in worth])
            if not any(name in worth for name in waiting) and not race.untried:
                self._leave_out(waiting)
            if self._builds is not None:
                self._builds.arrange([name for name in worth if name in self.to_build])
        return worth if len(race.untried) < _AHEAD else []

    def _leave_out(self, names: Sequence[str], reason: str = "") -> None:
        """Try no candidates that the outlook calls slow, or for which the limit on the slow-down has no room.

        Another `reason` may be given.
        """
        times = {} if self._outlook is None else self._outlook.predicted
        for name in filter(self._race.withdraw, names):
            slow = f"predicted to take {times[name]:.2g} times as long as the best" if name in times else ""
            self.not_tried[name] = f"not tried: {reason or slow or 'the limit on the slow-down had no room for it'}"
        self.to_load = [name for name in self.to_load if name not in self.not_tried]
        self.to_build = [name for name in self.to_build if name not in self.not_tried]

    def _load(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Load a candidate, or a half of it: the other half is for the next call.

        Where calls that stand still are counted, one call does all of it: its requests queue twice as long, and half as
        many calls stand still.
        """
        done = True
        with Attempt() as attempt:
            done = self._runs.load(self._configs[name], args, kwargs)
            if not done and (self._calls_per_stall or name in self._ready):
                done = self._runs.load(self._configs[name], args, kwargs)
            if done:
                self._race.admit(name)
        if done:
            self._loading = None
            self.loads += 1
        # A candidate of the race fails at its next launch, where the race learns of it.
        if attempt.trial.failure is not None and name not in self.again:
            self._failed(name, attempt.trial)
        if done:
            self.again.discard(name)
