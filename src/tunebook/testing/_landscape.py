"""Pretend kernels with known times and the noise of real devices, on a clock that only they move."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from random import Random
from typing import TYPE_CHECKING, Any, Final, final

from tunebook._base.errors import CompileError, DefinitionError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence

# Noise has the shape of a log-normal: runs bunch up just below the median, none is much faster, and a few are far
# slower. With 0.6 its skewness is 2.3, near an exponential's (2), but without the exponential's hard lower edge: with
# that edge, the minimum of a few runs would find the best configuration however large the noise is.
_SHAPE: Final = 0.6
_SPREAD: Final = math.sqrt(math.expm1(_SHAPE**2) * math.exp(_SHAPE**2))  # the standard deviation of that log-normal
_TAIL_INDEX: Final = 1.5  # of a Pareto distribution: below 2 the variance is infinite, and means never settle

_BEST_S: Final = 100e-6  # of the costs that are made up


@final
class Landscape:
    """Kernels that take known times, with disturbances; everything follows from the arguments. Not for threads.

    `costs` are the true seconds of each configuration: the median of its runs if only `cv` disturbs them. A number
    makes up that many configurations, 0 to n - 1, by the seed: one best, a few between 2 and 5 % slower, a few up to
    20 %, and the rest mostly 1.2 to 8 times slower. `Landscape(other.costs, seed=1)` is the same with other noise.

    - `cv`: standard deviation of a run as a part of its true time, skewed towards slow runs
    - `tail`: probability that the noise of a run has an infinite variance, which `cv` does not include
    - `spikes`: probability that a run takes `spike_factor` times as long
    - `drift`: how much slower everything becomes, linearly until `horizon_s`, and then stays
    - `ramp`: how much slower everything is at first; this fades by 1/e in each `ramp_s`
    - `first_run`: factor on the first run of each configuration
    - `bursts`: part of the time in which everything takes `burst_factor` times as long, for about `burst_s` each
    - `levels`: factors on everything, one at a time, each for about `level_s`: a device that changes its clock
    - `overhead_s`: added to every run
    - `compile_s`: passes when the function of a configuration is made for the first time
    - `failures`: errors raised instead of running, at no cost; a `CompileError` when the function is made

    `horizon_s` is by default the time of ten runs of everything, `ramp_s` and `burst_s` are a twentieth of it, and
    `level_s` is the time of ten runs of the fastest.

    >>> land = Landscape({"slow": 3e-3, "fast": 1e-3}, cv=0.05)
    >>> land.make_fn("slow")()
    >>> land.best, round(land.regret("slow")), land.samples, 2e-3 < land.elapsed_s < 5e-3
    ('fast', 2, 1, True)
    """

    def __init__(
        self,
        costs: Mapping[Any, float] | int,
        *,
        seed: int = 0,
        cv: float = 0.0,
        tail: float = 0.0,
        spikes: float = 0.0,
        spike_factor: float = 3.0,
        drift: float = 0.0,
        horizon_s: float | None = None,
        ramp: float = 0.0,
        ramp_s: float | None = None,
        first_run: float = 1.0,
        bursts: float = 0.0,
        burst_factor: float = 1.5,
        burst_s: float | None = None,
        levels: Sequence[float] = (),
        level_s: float | None = None,
        overhead_s: float = 0.0,
        compile_s: float = 0.0,
        failures: Mapping[Any, Exception] | None = None,
    ) -> None:
        self.costs: Final[Mapping[Hashable, float]] = (
            dict(costs) if isinstance(costs, Mapping) else _make_up_costs(costs, _stream("costs", seed))
        )
        self._failures: Final = dict(failures or {})
        _check(self.costs, self._failures, {"spikes": spikes, "tail": tail, "bursts": bursts}, levels)
        horizon_s = horizon_s or 10 * sum(self.costs.values())
        self._cv, self._tail = cv, tail
        self._spikes, self._spike_factor = spikes, spike_factor
        self._drift, self._horizon_s = drift, horizon_s
        self._ramp, self._ramp_s, self._first_run = ramp, ramp_s or horizon_s / 20, first_run
        # A stream of their own: how long a burst lasts must not depend on which candidates ran before it.
        self._bursts = _Steps(_bursts(_stream("bursts", seed), bursts, burst_factor, burst_s or horizon_s / 20))
        level_s = level_s or 10 * min(self.costs.values())
        self._levels = _Steps(_levels(_stream("levels", seed), levels, level_s))
        self._overhead_s, self._compile_s = overhead_s, compile_s
        self._random = _stream("runs", seed)
        self._made: set[Hashable] = set()
        self._now_ns = 0
        self.runs: Final[Counter[Hashable]] = Counter()

    @property
    def configs(self) -> tuple[Any, ...]:
        """Every configuration, also failing ones."""
        return tuple(self.costs)

    @property
    def best(self) -> Any:
        """The fastest configuration that works."""
        return min((c for c in self.costs if c not in self._failures), key=self.costs.__getitem__)

    @property
    def samples(self) -> int:
        """How many runs there were, including failed runs."""
        return self.runs.total()

    @property
    def elapsed_s(self) -> float:
        """The seconds that have passed on the clock."""
        return self._now_ns * 1e-9

    def clock_ns(self) -> int:
        """Return the time, which only compiling and running move."""
        return self._now_ns

    def true_s(self, config: Hashable) -> float:
        """Return the seconds of an undisturbed run."""
        return self.costs[config]

    def regret(self, config: Hashable) -> float:
        """Return how much slower a configuration is than the best: 0.02 is 2 %."""
        return self.costs[config] / self.costs[self.best] - 1

    def make_fn(self, config: Hashable) -> Callable[..., None]:
        """Return a function that takes any arguments; each call is one run."""
        error = self._failures.get(config)
        if config not in self._made:
            self._made.add(config)
            self._spend(self._compile_s)
        if isinstance(error, CompileError):
            raise error

        def run(*_args: object, **_kwargs: object) -> None:
            self.runs[config] += 1
            if error is not None:
                raise error
            self._spend(self._overhead_s + self.costs[config] * self._disturbance(first=self.runs[config] == 1))

        return run

    def _spend(self, seconds: float) -> None:
        self._now_ns += round(seconds * 1e9)

    def _disturbance(self, *, first: bool) -> float:
        now_s = self.elapsed_s
        if self._random.random() < self._tail:
            noise = self._random.paretovariate(_TAIL_INDEX)
        else:  # of median 0 and standard deviation 1
            noise = (self._random.lognormvariate(0.0, _SHAPE) - 1) / _SPREAD
        factor = max(1 + self._cv * noise, 0.1)  # only a cv beyond 0.7 gets there: every run takes some time
        factor *= 1 + self._drift * min(now_s / self._horizon_s, 1.0)
        factor *= 1 + self._ramp * math.exp(-now_s / self._ramp_s)
        if self._random.random() < self._spikes:
            factor *= self._spike_factor
        factor *= self._bursts.at(now_s)
        factor *= self._levels.at(now_s)
        return factor * self._first_run if first else factor


class _Steps:
    """A value that changes at random times; `at` is called with increasing times."""

    def __init__(self, steps: Iterator[tuple[float, float]]) -> None:
        self._steps = steps
        self._value, self._until_s = next(steps)

    def at(self, now_s: float) -> float:
        while now_s >= self._until_s:
            self._value, self._until_s = next(self._steps)
        return self._value


def _bursts(random: Random, part: float, factor: float, length_s: float) -> Iterator[tuple[float, float]]:
    """Yield the factors of calm times and of bursts in turn, each with the time at which it ends."""
    lengths_s = {True: length_s, False: length_s * (1 - part) / part if part else math.inf}
    burst, until_s = random.random() < part, 0.0
    while True:
        mean_s = lengths_s[burst]
        until_s += random.expovariate(1 / mean_s) if math.isfinite(mean_s) and mean_s > 0 else mean_s
        yield factor if burst else 1.0, until_s
        burst = not burst


def _levels(random: Random, factors: Sequence[float], length_s: float) -> Iterator[tuple[float, float]]:
    """Yield random levels of a device's clock, each with the time at which it ends."""
    until_s = 0.0 if factors else math.inf
    yield 1.0, until_s
    while True:
        factor = random.choice(factors)
        until_s += random.expovariate(1 / length_s)
        yield factor, until_s


def _stream(name: str, seed: int) -> Random:
    return Random(f"{name} {seed}")  # noqa: S311 - noise, not a secret


def _make_up_costs(count: int, random: Random) -> dict[Hashable, float]:
    close, near = count // 16, count // 10
    factors = [
        1.0,
        *(random.uniform(1.02, 1.05) for _ in range(close)),
        *(random.uniform(1.05, 1.20) for _ in range(near)),
        *(1.2 + random.lognormvariate(0.5, 0.8) for _ in range(count - close - near - 1)),  # median 2.8, 95 % below 8
    ][: max(count, 0)]
    random.shuffle(factors)  # position must not say anything
    return {config: _BEST_S * factor for config, factor in enumerate(factors)}


def _check(
    costs: Mapping[Hashable, float], failures: Iterable[Hashable], parts: Mapping[str, float], levels: Sequence[float]
) -> None:
    if not costs or not all(math.isfinite(cost) and cost > 0 for cost in costs.values()):
        raise DefinitionError(f"a landscape needs at least one configuration, each with its seconds > 0; got {costs!r}")
    for name, part in parts.items():
        if not 0 <= part <= 1:
            raise DefinitionError(f"{name}={part!r} is not a probability: write a number from 0 to 1")
    if not all(math.isfinite(level) and level > 0 for level in levels):
        raise DefinitionError(f"levels={levels!r}: each is a factor > 0 on all times")
    if unknown := [config for config in failures if config not in costs]:
        raise DefinitionError(f"failures of configurations that are not in costs: {unknown!r}")
