"""The work of a call of a jax program, apart from its time: functions called, compiled programs run, compilations.

Two calls whose work is equal take the same time but for noise: the same Python and C functions are called in the same
order, and XLA runs the same programs. So the difference between them is in the functions that were left out.
"""

from __future__ import annotations

import gc
import re
import sys
from collections import Counter
from contextlib import contextmanager
from hashlib import blake2b
from itertools import zip_longest
from typing import NamedTuple

import jax
from jax._src import pjit
from jax._src.interpreters import pxla

COMPILED = "/jax/core/compile/backend_compile_duration"
_METADATA = re.compile(r", metadata=\{[^}]*\}")  # lines of the source: they differ where programs do not


class Work(NamedTuple):
    """The functions called, in order; the digests of the programs run, in order; and how many were compiled."""

    calls: tuple[str, ...]
    programs: tuple[str, ...]
    compilations: int

    def summary(self):
        return {"calls": len(self.calls), "programs": len(self.programs), "compilations": self.compilations}


class Watch:
    """Sees the programs that jax runs, from its making on. All that was compiled before is compiled anew."""

    def __init__(self):
        self._executed, self._compiled, self._digests = [], 0, {}
        # Compiled code is run by jax's C++ code alone, which nobody can watch, unless jax has no data for this way.
        pjit._get_fastpath_data = lambda *_args, **_kwargs: None  # noqa: SLF001 - there is no option for it
        execute = pxla.ExecuteReplicated.__call__

        def watched(program, *args):
            self._executed.append(program)
            return execute(program, *args)

        pxla.ExecuteReplicated.__call__ = watched
        jax.monitoring.register_event_duration_secs_listener(self._note)
        jax.clear_caches()

    def _note(self, event, _seconds, **_facts):
        self._compiled += event == COMPILED

    def work_of(self, function, args, without):
        """Return the work of a call, without the functions that have one of these code objects, and all they call."""
        del self._executed[:]
        before = self._compiled
        with _calls_outside(without) as calls:
            jax.block_until_ready(function(*args))
        return Work(tuple(calls), tuple(map(self._digest, self._executed)), self._compiled - before)

    def _digest(self, program):
        """Return a digest of the machine-independent text of a compiled program."""
        if program not in self._digests:  # the key keeps the program alive, so that no other gets its identity
            texts = (module.to_string() for module in program.xla_executable.hlo_modules())
            text = "\n".join(_METADATA.sub("", text) for text in texts)
            self._digests[program] = f"{program.name} {blake2b(text.encode(), digest_size=8).hexdigest()}"
        return self._digests[program]


@contextmanager
def _calls_outside(without):
    """Give a list that gets a line per call of a Python or C function in this thread."""
    calls, skipped = [], []

    def note(frame, event, arg):
        if skipped:
            if event == "return" and frame is skipped[0]:
                skipped.clear()
        elif event == "call":
            if frame.f_code in without:
                skipped.append(frame)
            else:
                # Without the place of the packages, which is a matter of the machine.
                place = frame.f_code.co_filename.rpartition("site-packages/")[2]
                calls.append(f"{place}:{frame.f_code.co_qualname}")
        elif event == "c_call":
            calls.append(arg.__qualname__)

    collects = gc.isenabled()
    gc.collect()
    gc.disable()  # a collection calls the finalisers of earlier calls
    sys.setprofile(note)
    try:
        yield calls
    finally:
        sys.setprofile(None)
        if collects:
            gc.enable()
    if calls[-1:] == ["setprofile"]:
        calls.pop()


def more_calls(ours, theirs):
    """Return how many more functions are called on our side; None if other programs run, or others are compiled."""
    if ours.programs != theirs.programs or ours.compilations != theirs.compilations:
        return None
    return len(ours.calls) - len(theirs.calls)


def difference(ours, theirs):
    """Return the first differences between the work of two calls, in words; nothing if there are none."""
    found = []
    for what in ("calls", "programs"):
        pairs = zip_longest(getattr(ours, what), getattr(theirs, what))
        place, pair = next(((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1]), (None, None))
        if pair is not None:
            counts = Counter(getattr(ours, what)), Counter(getattr(theirs, what))
            found.append(
                f"{what} number {place}: {pair[0]} and not {pair[1]}; {sum((counts[0] - counts[1]).values())} more, "
                f"{sum((counts[1] - counts[0]).values())} fewer"
            )
    if ours.compilations != theirs.compilations:
        found.append(f"{ours.compilations} compilations and not {theirs.compilations}")
    return "; ".join(found)
