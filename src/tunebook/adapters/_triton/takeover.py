"""Takes over kernels that `triton.autotune` made: `install` changes the class `Autotuner` and no kernel.

A change of the class reaches kernels of every library, whether they were made before or after it, and subclasses that
call `super().run`. The engine of a kernel is built at its first launch; importing a library costs nothing more.
"""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, final

from triton import knobs
from triton.runtime.autotuner import Autotuner

from tunebook._base.errors import DefinitionError, TunebookError, text_of, warn_once
from tunebook._base.locks import InterruptSafeLock
from tunebook._kernel.policy import AutotunePolicy
from tunebook._report.run_log import TuningTimes
from tunebook._selection.listeners import EVERYWHERE
from tunebook._tuning.job import Budget, parse_budget
from tunebook.adapters._triton import key_ahead
from tunebook.adapters._triton.attributes import LAUNCHER, WatchedCache
from tunebook.adapters._triton.engine import WATCHED, Engine, More, drop_engine, engine_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tunebook._base.vocabulary import Problem
    from tunebook.adapters._triton.engine import Store

_TAKEN: Final = "_tunebook_taken"  # the attribute of a kernel that was launched while it was taken over
# A subclass that overrides one of these measures or prunes in its own way, which an engine would leave out.
_OWN_WAYS: Final = ("_bench", "prune_configs", "check_disk_cache")
_lock: Final = InterruptSafeLock()  # re-entrant: building an engine may launch another kernel
_installed: Takeover | None = None


def install(
    packages: Sequence[str] | str | None = None,
    *,
    store: Store = None,
    policy: AutotunePolicy | None = None,
    budget: Budget | float | str | None = None,
    processes: bool = True,
    devices: Sequence[int] | Literal["all"] = (),
    on_kernel: Callable[[str, str, str], object] = lambda _what, _kernel, _why: None,
) -> None:
    """Tune the kernels of `triton.autotune` with tunebook from now on, whichever library made them, and when.

    `packages` are the packages whose kernels are taken over, e.g. `("fla",)`; None takes all. A kernel that cannot be
    taken over runs with Triton's own tuner, after one warning. `budget` is the time that this process may tune for,
    e.g. "10m": afterwards a launch that the book does not know runs with the first configuration. So does a launch
    under a policy or mode that does not tune, and in the capture of a CUDA graph. The other options are the options of
    `autotune`. `on_kernel(what, kernel, why)` is called once per kernel with "taken" or "left".

    A second call replaces the options of the first.
    """
    global _installed  # noqa: PLW0603 - Triton has one class `Autotuner` per process
    names = (packages,) if isinstance(packages, str) else None if packages is None else tuple(packages)
    limit = parse_budget(budget)
    if limit.trials is not None:
        raise DefinitionError(f'invalid budget={budget!r}: write a time, e.g. "30s" or "10m"')
    # A policy of its own for all engines: it is changed when the budget is spent.
    own = replace(policy or AutotunePolicy())
    more = More(store=store, policy=own, heuristic="first", processes=processes, devices=devices)
    if not knobs.runtime.interpret:
        key_ahead.begin()  # a library is imported next, which takes longer
    with _lock:
        if _installed is not None:
            _installed.end(keep=False)
        _installed = Takeover(names, more, on_kernel)
        _installed.begin(None if limit.seconds is None else _Allowance(own, limit.seconds))


def uninstall() -> None:
    """Let Triton tune again, also the kernels that were taken over; configurations that they have found stay."""
    global _installed  # noqa: PLW0603 - as above
    with _lock:
        if _installed is not None:
            _installed.end(keep=True)
            _installed = None


def is_installed() -> bool:
    """Return whether kernels of Triton are taken over now."""
    return _installed is not None


class _Taken(NamedTuple):
    """The attribute of a kernel: its engine, or None if Triton tunes it."""

    by: Takeover
    kernel: Autotuner  # a copy of a kernel has the attributes of the original
    engine: Engine | None


@final
class Takeover:
    """The options of one `install`."""

    def __init__(
        self, packages: tuple[str, ...] | None, more: More, on_kernel: Callable[[str, str, str], object]
    ) -> None:
        self._packages, self._more, self._on_kernel = packages, more, on_kernel
        self._kernels: Final[weakref.WeakSet[Autotuner]] = weakref.WeakSet()
        self._active = True
        self._put_back: Callable[[], None] = lambda: None
        self._allowance: _Allowance | None = None

    def begin(self, allowance: _Allowance | None) -> None:
        """Put our methods and attributes into the class."""
        ours = {**WATCHED, **self._methods()}
        before = {name: vars(Autotuner).get(name) for name in ours}

        def put_back() -> None:
            # A method that somebody else has replaced since calls ours, which calls Triton's from now on.
            for name, value in ours.items():
                if vars(Autotuner).get(name) is value:
                    delattr(Autotuner, name) if before[name] is None else setattr(Autotuner, name, before[name])

        self._put_back, self._allowance = put_back, allowance
        if allowance is not None:
            EVERYWHERE.listen_rarely(allowance.times.hear)
        for name, value in ours.items():
            setattr(Autotuner, name, value)

    def _methods(self) -> dict[str, Callable[..., Any]]:
        engine_for, their_run, their_getitem = self._engine_for, Autotuner.run, Autotuner.__getitem__

        def run(autotuner: Autotuner, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> Any:
            engine = engine_for(autotuner)
            if engine is None:
                return their_run(autotuner, *args, grid=grid, warmup=warmup, **kwargs)
            if warmup:
                return engine.run(*args, grid=grid, warmup=True, **kwargs)
            return getattr(autotuner, LAUNCHER).bind(grid)(*args, **kwargs)

        def getitem(autotuner: Autotuner, grid: Any) -> Any:
            # A subclass with a `run` of its own must get its launches.
            if type(autotuner).run is not run or engine_for(autotuner) is None:
                return their_getitem(autotuner, grid)
            return getattr(autotuner, LAUNCHER).bind(grid)

        return {"run": run, "__getitem__": getitem}

    def end(self, *, keep: bool) -> None:
        """Put Triton's methods back, and take the engines off the kernels, which may `keep` the engines' choices."""
        self._active = False
        self._put_back()
        if self._allowance is not None:
            EVERYWHERE.unlisten(self._allowance.times.hear)
        for autotuner in list(self._kernels):
            vars(autotuner).pop(_TAKEN, None)
            drop_engine(autotuner)
            cache: dict[Any, Any] = autotuner.cache
            if isinstance(cache, WatchedCache) and not keep:
                autotuner.cache = WatchedCache(autotuner, {key: cache[key] for key in cache.written})

    def _engine_for(self, autotuner: Autotuner) -> Engine | None:
        """Return the engine that tunes a kernel, or None if Triton does."""
        taken: _Taken | None = vars(autotuner).get(_TAKEN)
        if taken is None or taken.by is not self or taken.kernel is not autotuner:
            return self._take(autotuner) if self._active else None
        return taken.engine

    def _take(self, autotuner: Autotuner) -> Engine | None:
        with _lock:
            taken: _Taken | None = vars(autotuner).get(_TAKEN)
            if taken is None or taken.by is not self or taken.kernel is not autotuner:  # no other thread was first
                drop_engine(autotuner)  # of another kernel, if this one is a copy
                engine = self._make_engine(autotuner) if self._wants(autotuner) else None
                taken = _Taken(self, autotuner, engine)
                setattr(autotuner, _TAKEN, taken)
                self._kernels.add(autotuner)
            return taken.engine

    def _wants(self, autotuner: Autotuner) -> bool:
        module = f"{autotuner.base_fn.__module__}."
        return self._packages is None or any(module.startswith(f"{package}.") for package in self._packages)

    def _make_engine(self, autotuner: Autotuner) -> Engine | None:
        name = f"{autotuner.base_fn.__module__}.{autotuner.base_fn.__qualname__}"
        own = [way for way in _OWN_WAYS if getattr(type(autotuner), way, None) is not getattr(Autotuner, way, None)]
        if own:
            self._on_kernel("left", name, f"{type(autotuner).__qualname__} overrides {', '.join(own)}")
            return None
        try:
            engine = engine_of(autotuner, self._more)
        except (TunebookError, AttributeError, TypeError, ValueError) as error:
            # A program that nobody edited must not fail because of us.
            why = f"{type(error).__name__}: {text_of(error)}"
            warn_once("not taken over", name, f"{name} keeps Triton's own tuner: {why}")
            self._on_kernel("left", name, why)
            return None
        self._on_kernel("taken", engine.kernel.op_id_v, "")
        return engine


@final
class _Allowance:
    """The seconds that a process may tune for; its policy does not tune after that."""

    def __init__(self, policy: AutotunePolicy, seconds: float) -> None:
        self._policy, self._left_s = policy, seconds
        self.times: Final = TuningTimes(self._spend)

    def _spend(self, _problem: Problem, seconds: float, _error: object) -> None:
        self._left_s -= seconds
        if self._left_s <= 0:
            self._policy.allow_autotune = False
