"""Moments and durations as people write them."""

from __future__ import annotations

import time


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

    >>> seconds_text(0.00123), seconds_text(0.25), seconds_text(75)
    ('1.23 ms', '250 ms', '1 min 15 s')
    """
    if 60 <= seconds < 1e9:
        return f"{int(seconds // 60)} min {int(seconds % 60)} s"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"
