"""Leases of a shared book, which fall back on the local book's leases while the server does not answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar, final

from tunebook._base.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tunebook.stores._protocol import LeaseBoard, Store
    from tunebook.stores._remote import RemoteStore

T = TypeVar("T")

_LONGEST_PAUSE_S: Final = 1.0  # between two looks of a waiter at the leases
_LIMIT: Final = 4096  # a service that meets ever new problems must not grow without bound


class Unanswered(NamedTuple):
    """The shared book did not answer."""


class _Look(NamedTuple):
    """The last sight of a lease that others hold, by a wait that began at `since_s`; it is good until `until_s`.

    It is good for a tenth of the time that the wait has lasted, and a second at most: at the 50 ms of a local book, a
    thousand machines that wait for one tuning would ask a server 60,000 times a second. A slip changes every 2.5 s, so
    that a second does not hide its signs of life. Nothing here sleeps: the caller may be a call that will not wait.
    """

    since_s: float
    until_s: float
    generations: tuple[int, ...]
    slips: dict[str, bytes | None]


@final
class SharedBoard:
    """The shared book's leases while it answers, else the front's, which keep the processes of this machine apart.

    A lease that this process holds stays on the board where it was made, or its holder could neither keep it alive nor
    give it back when the server comes or goes meanwhile.
    """

    def __init__(
        self,
        ask: Callable[[Callable[[], Any], Any], Any],
        about_to_tune: Callable[[str], None],
        front: Store,
        remote: RemoteStore,
        clock: Callable[[], float],
    ) -> None:
        self._ask, self._about_to_tune, self._clock = ask, about_to_tune, clock
        self._front, self._remote, self._where = front, remote.leases(), remote.where
        self._looks: dict[str, _Look] = {}  # by lease
        self._held: dict[str, tuple[str, bool]] = {}  # by lease: our slip, and whether it is the shared book's

    def create(self, name: str, content: bytes) -> bool:
        made, shared = self._on_either(name, lambda board: board.create(name, content))
        if made:
            self._held[_lease_of(name)] = (name, shared)
        return made

    def read(self, name: str) -> bytes | None:
        look = self._last_look(_lease_of(name))
        if look is not None and name in look.slips:
            return look.slips[name]
        content, _ = self._on_either(name, lambda board: board.read(name))
        if look is not None:
            look.slips[name] = content
        return content

    def rewrite(self, name: str, content: bytes) -> bool:
        return self._on_either(name, lambda board: board.rewrite(name, content))[0]

    def remove(self, name: str) -> None:
        self._looks.pop(_lease_of(name), None)
        try:
            self._on_either(name, lambda board: board.remove(name))
        finally:
            if self._held.get(_lease_of(name), ("", False))[0] == name:
                self._held.pop(_lease_of(name), None)

    def generations(self, lease_id: str) -> list[int]:
        look = self._last_look(lease_id)
        if look is not None:
            return list(look.generations)
        self._about_to_tune(lease_id)
        found, shared = self._on_either(f"{lease_id}.", lambda board: board.generations(lease_id))
        if shared and found:
            now_s, before = self._clock(), self._looks.get(lease_id)
            ongoing = before is not None and now_s - before.until_s < _LONGEST_PAUSE_S
            since_s = before.since_s if before is not None and ongoing else now_s
            if len(self._looks) >= _LIMIT:
                self._looks.clear()
            until_s = now_s + min(_LONGEST_PAUSE_S, (now_s - since_s) / 10)
            self._looks[lease_id] = _Look(since_s, until_s, tuple(found), {})
        elif shared:
            self._looks.pop(lease_id, None)
        return found

    def _last_look(self, lease_id: str) -> _Look | None:
        """Return the last sight of a lease, if it is still good and others hold the lease."""
        look = None if lease_id in self._held else self._looks.get(lease_id)
        return look if look is not None and self._clock() < look.until_s else None

    def _on_either(self, name: str, step: Callable[[LeaseBoard], T]) -> tuple[T, bool]:
        """Take a step on the board of a lease; return its result, and whether the board was the shared book's."""
        held = self._held.get(_lease_of(name))
        if held is None or held[1]:
            answer = self._ask(lambda: step(self._remote), Unanswered())
            if not isinstance(answer, Unanswered):
                return answer, True
        local = self._front.leases() if held is None or not held[1] else None
        if local is None:
            message = f"the leases of the shared book at {self._where} cannot be reached."
            raise StoreError("remote", self._where, message)
        return step(local), False


def _lease_of(name: str) -> str:
    return name.rpartition(".")[0]
