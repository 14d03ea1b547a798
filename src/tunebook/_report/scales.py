"""From values to places on a chart, and round numbers for its axes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, NamedTuple

from tunebook._tuning.progress import seconds_text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

TIMES: Final = "\u00d7"  # the sign, and not the letter


class Scale(NamedTuple):
    """Maps a range of values to a range of pixels, linear or logarithmic; values outside map to the edge."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        value = max(value, self.low) if self.log else value
        low, high, at = (math.log(v) if self.log else v for v in (self.low, self.high, value))
        part = (at - low) / (high - low) if high > low else 0.5
        return self.start + min(max(part, 0.0), 1.0) * (self.end - self.start)

    def ticks(self, about: int = 5) -> list[float]:
        """Return round values inside the range."""
        return _log_ticks(self.low, self.high, about) if self.log else linear_ticks(self.low, self.high, about)


def linear_ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Return about so many round values from low to high.

    >>> linear_ticks(0, 10.3)
    [0.0, 2.5, 5.0, 7.5, 10.0]
    """
    if not high > low:
        return [low]
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(s * power for s in (1, 2, 2.5, 5, 10) if s * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    digits = 12 - math.floor(math.log10(step))
    return [round(n * step, digits) for n in range(first, math.floor(high / step + 1e-9) + 1)]


def _log_ticks(low: float, high: float, about: int) -> list[float]:
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ((1, 1.5, 2, 3, 5, 7), (1, 2, 5), (1, 3), (1,)):
        found = [s * 10.0**d for d in decades for s in steps if low * 0.999 <= s * 10.0**d <= high * 1.001]
        if len(found) <= about + 2:
            break
    if len(found) > about + 2:
        found = found[:: math.ceil(len(found) / about)]
    return found if len(found) > 1 else linear_ticks(low, high, about)


def time_text(seconds: float) -> str:
    """Return a duration with the sign for micro."""
    return seconds_text(seconds).replace(" us", " µs")


def time_axis(high: float) -> Callable[[float], str]:
    """Return a function that formats the ticks of an axis of time, all in one unit."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if high >= size:
            return lambda seconds: f"{seconds / size:.4g} {unit}"
    return lambda seconds: f"{seconds * 1e9:.4g} ns"


def ratio_text(ratio: float) -> str:
    """Return a ratio as text.

    >>> [ratio_text(ratio)[:-2] for ratio in (1.042, 13.6, 240.2)]
    ['1.04', '13.6', '240']
    """
    digits = 2 if ratio < 10 else 1 if ratio < 100 else 0
    return f"{ratio:.{digits}f} {TIMES}"


def amount_text(amount: float, unit: str) -> str:
    """Return an amount with a metric prefix.

    >>> amount_text(3.21e12, "B/s")
    '3.21 TB/s'
    """
    for prefix, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if amount >= size:
            return f"{amount / size:.3g} {prefix}{unit}"
    return f"{amount:.3g} {unit}"


def quantile(ordered: Sequence[float], part: float) -> float:
    """Return a quantile of sorted values, interpolated between neighbours.

    >>> quantile([1.0, 2.0, 4.0], 0.5), quantile([1.0, 2.0], 0.25)
    (2.0, 1.25)
    """
    at = part * (len(ordered) - 1)
    below = math.floor(at)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (at - below) * (ordered[above] - ordered[below])
