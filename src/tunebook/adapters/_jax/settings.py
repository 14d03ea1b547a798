"""Whether jax's settings are the same in all threads, so that a call need not look at them.

Reading those that are in every key takes 180 ns, two thirds of a tuned call. They hardly ever change, and jax calls
hooks when they do. So a number stands for them in the hot path's keys: another one after each change for the whole
process. While a thread has one of its own, by `with jax.enable_x64(True)` or so, calls also read the number that stands
for what the hooks of their own thread told. Where jax does not tell, they read the settings.
"""

from __future__ import annotations

import gc
import itertools
import os
import threading
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import jax

from tunebook._memo.answer_memo import MEMO

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_NEVER: Final = object()


class _ProcessState:
    """What stands for what is set for the whole process: `value`, the number.

    While something else is in force (see `Settings.held`) there is no such attribute, and what it is is asked for at
    each call. A property would do that too, but takes 100 ns always, since the accelerator has to run Python for it.
    """

    value: int | str

    def __init__(self) -> None:
        self.number = 0
        self.ask: Callable[[], object] = lambda: None

    def __getattr__(self, name: str) -> str:
        if name != "value":
            raise AttributeError(name)
        return f"{self.number} {self.ask()}"


class _ThreadState(threading.local):
    """The number that stands for what a thread has set for itself; 0 is nothing."""

    value = 0


class Settings:
    """Settings of jax that are watched. `number[0]` stands for them; 0 says that it depends on the thread.

    Then `for_all` and `own` stand for them together, if `watch` says that changes are told.
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
        # Re-entrant: a block may be left by the garbage collector, which may run while this thread holds the lock.
        self._lock = threading.RLock()

    def renew_lock(self) -> None:
        """Take a new lock, in a forked child."""
        self._lock = threading.RLock()

    def watch(self) -> bool:
        """Notice changes from now on, and say whether: if this jax tells of them and no thread may have made one."""
        try:
            self._watching = not self._is_any_entered() and self._is_told()
        except AttributeError:
            return False  # a jax of other ways: calls read the settings, which is right everywhere
        self._changed_for_all()
        return self._watching

    def _is_told(self) -> bool:
        """Have changes told, and say whether they are."""
        self._unset = [state.get_local() for state in self._states]
        for place, state in enumerate(self._states):
            # There is no public way. What jax has for its own settings of this kind are these two.
            state._update_global_hook = _both(state._update_global_hook, self._changed_for_all)  # noqa: SLF001 - as said
            here = partial(self._changed_here, place)
            state._update_thread_local_hook = _both(state._update_thread_local_hook, here)  # noqa: SLF001 - as said
        return all(map(self._is_told_of, self._states))

    def _changed_for_all(self) -> None:
        with self._lock:
            self.for_all.number = next(self._numbers)
            self._stand()
        MEMO.invalidate()  # what is being worked out under the number that was: see `Gate.remember`

    def _changed_here(self, place: int) -> None:
        """Note whether this thread has a value of its own now: even one like the others' will not follow theirs."""
        me = threading.get_ident(), place
        local = [state.get_local() for state in self._states]
        is_unset = [value is unset for value, unset in zip(local, self._unset, strict=True)]
        with self._lock:
            (self._own.discard if is_unset[place] else self._own.add)(me)
            # The same number for the same values, or each time that a block is entered, calls in it would be new ones.
            known = len(self._own_numbers) + 1
            self.own.value = 0 if all(is_unset) else self._own_numbers.setdefault((*local,), known)
            self._stand()

    @contextmanager
    def held(self, ask: Callable[[], object]) -> Iterator[None]:
        """Have calls ask for a block: something else that is in their keys is in force in it. All ask in one way."""
        with self._lock:
            self.for_all.ask = ask
            self._holds += 1
            self._stand()
        try:
            yield
        finally:
            with self._lock:
                self._holds -= 1
                self._stand()

    def _stand(self) -> None:
        number = self.for_all.number
        self.number[0] = number if self._watching and not self._own and not self._holds else 0
        if self._holds:
            vars(self.for_all).pop("value", None)
        else:
            self.for_all.value = number

    def _is_told_of(self, state: Any) -> bool:
        """Whether changes are told, tried out by changes to what is in force."""
        before = self.for_all.number
        jax.config.update(f"jax_{state.__name__}", state.get_global())
        with state(state.value):
            told = bool(self._own)
        return told and not self._own and self.for_all.number != before

    def _is_any_entered(self) -> bool:
        """Whether a thread may be inside a block that sets one, without having told."""
        block = type(self._states[0](self._states[0].value))
        # 20 ms, once. Those that were never entered, of decorated functions, do not know yet what to go back to.
        alive = [x.state for x in gc.get_objects() if type(x) is block and getattr(x, "prev", _NEVER) is not _NEVER]
        return any(state is one for state in alive for one in self._states)


def _both(hook: Callable[[Any], object] | None, then: Callable[[], object]) -> Callable[[Any], None]:
    def both(value: Any) -> None:
        if hook is not None:
            hook(value)
        then()

    return both


SETTINGS: Final = Settings((jax.enable_x64, jax.default_matmul_precision, jax.default_device, jax.default_prng_impl))
ARE_TOLD: Final = SETTINGS.watch()
# A lock that another thread held at a fork would stay locked in the child for ever.
os.register_at_fork(after_in_child=SETTINGS.renew_lock)
