"""The answers in memory, and whether one may be given without asking the tiers again.

A tuned kernel's hot path is one dict lookup with no other check (see `_hotpath/dispatcher.py`). That is exact only
because every change that could change an answer is in the dict's key, or comes here. It *suspends* the memo for as long
as it lasts (a live overlay or policy override in any context, a recording), which empties the dicts and keeps them from
filling; or it *invalidates* the answers that are in them (a changed policy, a new entry, a new listener).
"""

from __future__ import annotations

import os
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from tunebook._base.environment_variables import on_new_setting
from tunebook._base.locks import InterruptSafeLock
from tunebook._base.vocabulary import Problem

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

C = TypeVar("C")
K = TypeVar("K")
V = TypeVar("V")

# Shapes that keep changing must not grow the memo for ever; 4096 signatures of a kernel are about 2 MB.
CAPACITY: Final = 4096
# The same for the memory tier of a selector, whose entries take 0.5 kB: 34 MB at most.
_PROBLEMS: Final = 65_536


class BoundedDict(dict[K, V]):
    """A dict of at most `capacity` items: a new item of a full dict drops the oldest quarter."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self._capacity = capacity

    def __setitem__(self, key: K, value: V) -> None:
        if len(self) >= self._capacity and key not in self:
            # A quarter at once, because finding the oldest item passes over all that were dropped before it. From a
            # copy, which is made in one step, because other threads write meanwhile.
            for oldest in list(self.copy())[: max(1, self._capacity // 4)]:
                self.pop(oldest, None)
        super().__setitem__(key, value)


class Answers:
    """The memoised answers of a kernel: `fast` is read by the hot path, `known` by the path that checks its context.

    `told` has those of `known` that come with listeners to tell. `explored` holds the session that runs a call.
    `problems` holds the problem of each call, which depends on the call alone and never becomes wrong. All are read
    without a lock, and written under the memo's.
    """

    __slots__ = ("__weakref__", "explored", "fast", "keys_of", "known", "problems", "told")

    def __init__(self) -> None:
        self.fast: Final[dict[Hashable, Any]] = {}
        self.known: Final[dict[Hashable, Any]] = {}
        self.told: Final[dict[Hashable, Any]] = {}
        self.explored: Final[dict[Hashable, Any]] = {}
        self.problems: Final[dict[Hashable, Problem]] = {}
        self.keys_of: Final[dict[Problem, list[Hashable]]] = {}

    def clear(self) -> None:
        """Forget every answer."""
        for memo in (self.fast, self.known, self.told, self.explored, self.keys_of):
            memo.clear()

    def drop(self, problem: Problem) -> None:
        """Forget the answers to one problem."""
        for key in self.keys_of.pop(problem, ()):
            for memo in (self.known, self.told, self.explored, self.fast):
                memo.pop(key, None)


class Suspension:
    """Suspends the memo for as long as it lives."""

    __slots__ = ("__weakref__",)


class AnswerMemo:
    """The switch over every kernel's memoised answers. One per process: `MEMO`."""

    def __init__(self) -> None:
        # Re-entrant: a finaliser may call a kernel while this thread holds the lock.
        self.lock = InterruptSafeLock()
        self._all: weakref.WeakSet[Answers] = weakref.WeakSet()
        # References to all that live. Not a count: an interrupt between a change of a count and the note that it was
        # changed would leave it wrong for good.
        self.suspended: Final[set[weakref.ref[Suspension]]] = set()
        self.epoch = 0

    def renew_lock(self) -> None:
        """Take a new lock, in a forked child: if another thread held it at the fork, it would stay locked."""
        self.lock = InterruptSafeLock()

    def register(self, answers: Answers) -> None:
        """Put a kernel's answers under this switch."""
        with self.lock:
            self._all.add(answers)

    def suspend(self) -> Suspension:
        """Keep every hot path from answering by itself while the result lives; then they fill with the next calls."""
        suspension = Suspension()
        with self.lock:
            # `discard` is one step, which cannot be interrupted as Python code can.
            self.suspended.add(weakref.ref(suspension, self.suspended.discard))
            self.epoch += 1
            for each in self._all:
                each.fast.clear()
        return suspension

    def invalidate(self, problem: Problem | None = None) -> None:
        """Forget the answers to one problem, or all answers."""
        with self.lock:
            self.epoch += 1
            for each in self._all:
                if problem is None:
                    each.clear()
                else:
                    each.drop(problem)

    def forget(self, answers: Answers, *, wrong: bool = False) -> None:
        """Forget one kernel's answers, because their keys have a new form, or because they are wrong by now."""
        with self.lock:
            if wrong:  # so that a selection that is under way is not memoised
                self.epoch += 1
            answers.clear()
            answers.problems.clear()

    def note(self, answers: Answers, key: Hashable, problem: Problem) -> None:
        """Memoise which problem a call is."""
        with self.lock:
            if len(answers.problems) >= CAPACITY:
                answers.problems.clear()
            answers.problems[key] = problem

    def remember(
        self, answers: Answers, problem: Problem, key: Hashable, answer: Any, *, epoch: int, explored: bool = False
    ) -> None:
        """Memoise an answer (or, `explored`, a session), unless something changed since `epoch` was read before it."""
        with self.lock:
            if epoch != self.epoch:
                return
            memo = answers.explored if explored else answers.known
            if len(memo) >= CAPACITY:
                answers.clear()
            memo[key] = answer
            if answer.tell is not None and not explored:
                answers.told[key] = answer
            answers.keys_of.setdefault(problem, []).append(key)

    def open_fast(self, answers: Answers, key: Hashable, answer: Any) -> None:
        """Let the hot path give an answer by itself, unless the memo is suspended or has another answer by now."""
        with self.lock:
            known = answers.known.get(key)
            if known is not None and known is answer and not self.suspended:
                answers.fast[key] = known.config


class Epoch:
    """Counts the answers that were replaced by better ones while the program ran. One per process: `EPOCH`."""

    def __init__(self) -> None:
        self._listeners: Final[list[Callable[[int], object]]] = []  # append and remove are atomic
        self.number = 0

    def advance(self) -> None:
        """Count one more, and tell the listeners."""
        with MEMO.lock:
            self.number += 1
            number = self.number
        for listener in tuple(self._listeners):
            listener(number)

    def listen(self, listener: Callable[[int], object]) -> Callable[[], None]:
        """Tell one more listener from now on; return the function that ends that."""
        mine = partial(listener)  # an object of its own: a function may listen twice, and stop once
        self._listeners.append(mine)
        return partial(self._unlisten, mine)

    def _unlisten(self, listener: Callable[[int], object]) -> None:
        if listener in self._listeners:
            self._listeners.remove(listener)


MEMO: Final = AnswerMemo()
EPOCH: Final = Epoch()
on_new_setting(MEMO.invalidate)
os.register_at_fork(after_in_child=MEMO.renew_lock)


class ConfigCache(Generic[C]):
    """Configurations by (device, op_id, call_key), for as long as the process lives.

    Reads take no lock. Each write is one dict operation, which is atomic with and without the GIL. Above `capacity`
    problems the oldest are dropped; a selector then asks its next tiers again, so that a tuned configuration comes back
    from the book.

    >>> cache = ConfigCache()
    >>> cache.put("cpu", "matmul@v0", "f32[64,64]", {"block": 32})
    >>> cache.get("cpu", "matmul@v0", "f32[64,64]")
    {'block': 32}
    >>> cache.size()
    1
    """

    __slots__ = ("_entries",)

    def __init__(self, capacity: int = _PROBLEMS) -> None:
        self._entries: BoundedDict[Problem, C] = BoundedDict(capacity)

    def __repr__(self) -> str:
        return f"<ConfigCache: {self.size()} in memory>"

    def get(self, dev: str, op_id: str, call_key: str) -> C | None:
        """Return the configuration, or None."""
        return self._entries.get(Problem(dev, op_id, call_key))

    def put(self, dev: str, op_id: str, call_key: str, cfg: C) -> None:
        """Keep a configuration; it answers the calls of its problem from now on."""
        problem = Problem(dev, op_id, call_key)
        self._entries[problem] = cfg
        MEMO.invalidate(problem)

    def clear(self) -> None:
        """Forget everything."""
        self._entries.clear()
        MEMO.invalidate()

    def size(self) -> int:
        """Return how many configurations there are."""
        return len(self._entries)

    def keys(self) -> list[Problem]:
        """Return the problems that have a configuration, as they are now."""
        return list(self._entries)


def epoch() -> int:
    """Return a number that grows when tuning in the background, or by the user's calls, has changed an answer.

    A program that keeps something made from an answer, for example a compiled function, then makes it anew.
    """
    return EPOCH.number


def on_epoch(callback: Callable[[int], object]) -> Callable[[], None]:
    """Call `callback(epoch)` whenever the epoch grows, in the thread that changed it; return a function to end that."""
    return EPOCH.listen(callback)
