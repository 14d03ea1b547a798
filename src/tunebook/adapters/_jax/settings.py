"""Knows whether jax's settings are the same in all threads, so that a call need not read them.

Why: every key contains four settings of jax, and reading them takes 180 ns, two thirds of a tuned call. They hardly
ever change. So a number stands for them in the hot path's keys, and each change for the whole process takes a new one.
While a thread has a setting of its own, by `with jax.enable_x64(True)` or so, calls also read a number for its own.

How: jax has no public way to hear of changes. It calls two private hooks of each setting, for its own use; this module
puts functions in their place that call the old hook and then update the number.

When jax changes: `Settings.watch` changes each setting to its present value, and looks whether the hooks were called.
If not, the number stays 0, and every call reads the settings: right, but slower. The tests expect a number above 0.
"""

from __future__ import annotations

import gc
import itertools
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

import jax

from tunebook._base.locks import InterruptSafeLock
from tunebook._memo.answer_memo import MEMO

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

T = TypeVar("T")


class _ProcessState:
    """Holds `value`, the number for the settings of the whole process."""

    # Missing inside `Settings.held`, so that every call asks for it. A property would do that too, but takes 100 ns
    # always, since the accelerator has to run Python for it.
    value: int | str

    def __init__(self) -> None:
        self.number = 0
        self.ask: Callable[[], object] = lambda: None

    def __getattr__(self, name: str) -> str:
        if name != "value":
            raise AttributeError(name)
        return f"{self.number} {self.ask()}"


class _ThreadState(threading.local):
    """Holds the number for the settings that a thread has for itself; 0 if it has none."""

    value = 0


class Settings:
    """Settings of jax that are watched. `number[0]` stands for all of them; 0 says that they depend on the thread.

    Then `for_all` and `own` stand for them together, if `watch` has found that jax calls the hooks.
    """

    def __init__(self, states: Sequence[Any]) -> None:
        # A list, because the accelerator reads it in 2 ns, and generated code in 5.
        self.number: Final = [0]
        self.for_all: Final = _ProcessState()
        self.own: Final = _ThreadState()
        self._numbers: Final = itertools.count(1)
        self._own_numbers: Final[dict[tuple[Any, ...], int]] = {}
        self._states: Final = tuple(states)
        self._watching = False
        self._unset: list[object] = []
        self._own: Final[set[tuple[int, int]]] = set()
        self._holds = 0
        self.renew_lock()

    def renew_lock(self) -> None:
        """Take a new lock, also in a forked child."""
        # Re-entrant: the garbage collector may leave a block, and may run while this thread holds the lock.
        self._lock = InterruptSafeLock()

    def watch(self) -> bool:
        """Notice changes from now on; False if this jax does not call the hooks, or a thread is inside a block."""
        try:
            if not self._is_any_entered():
                self._unset = [state.get_local() for state in self._states]
                for place, state in enumerate(self._states):
                    here = partial(self._change_here, place)
                    state._update_global_hook = _call_both(state._update_global_hook, self._change_for_all)  # noqa: SLF001 - see top
                    state._update_thread_local_hook = _call_both(state._update_thread_local_hook, here)  # noqa: SLF001 - see top
                self._watching = all(map(self._is_hooked, self._states))
        except AttributeError:
            return False  # a jax without these hooks: calls read the settings, which is right everywhere
        self._change_for_all()
        return self._watching

    def _change_for_all(self) -> None:
        with self._lock:
            self.for_all.number = next(self._numbers)
            self._update_number()
        MEMO.invalidate()  # drops answers that are being worked out under the old number: see `AnswerMemo.remember`

    def _change_here(self, place: int) -> None:
        """Note whether this thread now has a value of its own: even an equal value does not follow the process's."""
        me = threading.get_ident(), place
        local = [state.get_local() for state in self._states]
        is_unset = [value is unset for value, unset in zip(local, self._unset, strict=True)]
        with self._lock:
            (self._own.discard if is_unset[place] else self._own.add)(me)
            # Equal values share a number, or every entry of a block would make its calls new ones.
            known = len(self._own_numbers) + 1
            self.own.value = 0 if all(is_unset) else self._own_numbers.setdefault((*local,), known)
            self._update_number()

    @contextmanager
    def held(self, ask: Callable[[], object]) -> Iterator[None]:
        """Make calls ask for a part of their keys during a block. All blocks use the same `ask`."""
        with self._lock:
            self.for_all.ask = ask
            self._holds += 1
            self._update_number()
        try:
            yield
        finally:
            with self._lock:
                self._holds -= 1
                self._update_number()

    def _update_number(self) -> None:
        number = self.for_all.number
        self.number[0] = number if self._watching and not self._own and not self._holds else 0
        if self._holds:
            vars(self.for_all).pop("value", None)
        else:
            self.for_all.value = number

    def _is_hooked(self, state: Any) -> bool:
        """Return whether jax calls our hooks, tried by changing a setting to its present value."""
        before = self.for_all.number
        jax.config.update(f"jax_{state.__name__}", state.get_global())
        with state(state.value):
            told = bool(self._own)
        return told and not self._own and self.for_all.number != before

    def _is_any_entered(self) -> bool:
        """Return whether a thread may already be inside a block that sets one of the settings."""
        unset = in_new_thread(lambda: [state.get_local() for state in self._states])
        if len(sys._current_frames()) == 1:  # noqa: SLF001 - its documented name
            return any(state.get_local() is not none for state, none in zip(self._states, unset, strict=True))
        block = type(self._states[0](self._states[0].value))
        # 50 ms, once. A block that was never entered, of a decorated function, has no value to go back to.
        alive = [x.state for x in gc.get_objects() if type(x) is block and hasattr(x, "prev")]
        return any(state is one for state in alive for one in self._states)


def in_new_thread(function: Callable[[], T]) -> T:
    """Return the result of a function in a thread of its own, which has no trace, no mesh and no settings."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def _call_both(hook: Callable[[Any], object] | None, then: Callable[[], object]) -> Callable[[Any], None]:
    def both(value: Any) -> None:
        if hook is not None:
            hook(value)
        then()

    return both


SETTINGS: Final = Settings((jax.enable_x64, jax.default_matmul_precision, jax.default_device, jax.default_prng_impl))
HOOKED: Final = SETTINGS.watch()
# A lock that another thread held at a fork would stay locked in the child for ever.
os.register_at_fork(after_in_child=SETTINGS.renew_lock)
