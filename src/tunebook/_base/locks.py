"""A lock for `with` blocks that Ctrl-C never leaves locked.

Who waits for a condition locks its lock, and not the condition: that unlocks in Python code, which can be interrupted.
"""

from __future__ import annotations

import sys
import threading
from typing import Literal

if sys.version_info[:2] == (3, 14):
    from _thread import RLock

    class InterruptSafeLock(RLock):
        """A re-entrant lock for `with`.

        Python 3.14 may handle a signal between the return of `__enter__` and the block (gh-148874; 3.13 does not, 3.15
        does no more). In a test, every second Ctrl-C left a lock locked, and other threads waited for it for ever. A
        signal that is handled inside this `__enter__` unlocks it again; none is handled when a method written in Python
        returns. `__exit__` stays the one in C: a method in Python could be interrupted before it unlocks.
        """

        def __enter__(self) -> Literal[True]:
            held, entered = self._recursion_count(), False
            try:
                self.acquire()
                entered = True
            finally:
                if not entered and self._recursion_count() > held:  # the signal came after the lock had been taken
                    self.release()
            return True

else:
    InterruptSafeLock = threading.RLock
