"""Moments, durations and their ratios as people write them."""

from __future__ import annotations

import time
from typing import Final

LONG_S: Final = 5.0  # of a candidate that runs: then people are told its name


def day_text(when: object) -> str:
    """Return a moment for people, in local time; "unknown" for a value that is not one, as a book may hold.

    >>> day_text("yesterday"), day_text(1e300)
    ('unknown', 'unknown')
    """
    try:
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(when)) if isinstance(when, (int, float)) else "unknown"
    except (OverflowError, ValueError, OSError):
        return "unknown"


def seconds_text(seconds: float) -> str:
    """Return a duration for people.

    >>> seconds_text(0.00123), seconds_text(0.25), seconds_text(0.9999), seconds_text(75)
    ('1.23 ms', '250 ms', '1 s', '1 min 15 s')
    """
    if 60 <= seconds < 1e9:
        return f"{int(seconds // 60)} min {int(seconds % 60)} s"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= 0.9995 * size:  # else three digits of 999.9 ms would be 1e+03 ms
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def ratio_text(factor: float) -> str:
    """Return how many times one duration is another, in three digits.

    >>> ratio_text(1.018), ratio_text(16.08), ratio_text(143.2)
    ('1.02 x', '16.1 x', '143 x')
    """
    digits = 2 if factor < 9.995 else 1 if factor < 99.95 else 0
    return f"{factor:.{digits}f} x"
