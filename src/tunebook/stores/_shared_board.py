"""Leases of a shared book, and what becomes of them when its server comes and goes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, TypeVar, final

from tunebook._base.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tunebook.stores._protocol import LeaseBoard, Store
    from tunebook.stores._remote import RemoteStore

T = TypeVar("T")
U = TypeVar("U")

_LONGEST_PAUSE_S: Final = 1.0  # between two looks of a waiter at the leases
_LIMIT: Final = 4096  # a service that meets ever new problems must not grow without bound


class Unanswered(NamedTuple):
    """There was no answer."""


class Ask(Protocol):
    """How a call is put to the shared book."""

    def __call__(self, call: Callable[[], T], otherwise: U) -> T | U:
        """Return what the call returns, or what is given if it fails or is not made."""


class _Look(NamedTuple):
    """What was seen of a lease that others hold, by a wait that began at `since_s`; it is good until `until_s`."""

    since_s: float
    until_s: float
    generations: tuple[int, ...]
    slips: dict[str, bytes | None]


class Looks:
    """What waiters saw last, for a tenth of the time that they have waited and a second at most.

    At the 50 ms of a local book, a thousand machines that wait for one tuning would ask a server 60,000 times a second,
    and pay for each time at an object store. A slip changes every 2.5 s, so that a second does not hide its signs of
    life. Nothing here sleeps: who asks may be a call that will not wait.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._by_lease: dict[str, _Look] = {}

    def at(self, lease_id: str) -> _Look | None:
        """Return what was seen, if it is still good."""
        look = self._by_lease.get(lease_id)
        return look if look is not None and self._clock() < look.until_s else None

    def add(self, lease_id: str, generations: list[int]) -> None:
        """Remember the generations that were seen just now; that there are none is not worth remembering."""
        if not generations:
            self.drop(lease_id)
            return
        now_s = self._clock()
        before = self._by_lease.get(lease_id)
        ongoing = before is not None and now_s - before.until_s < _LONGEST_PAUSE_S
        since_s = before.since_s if before is not None and ongoing else now_s
        if len(self._by_lease) >= _LIMIT:
            self._by_lease.clear()
        until_s = now_s + min(_LONGEST_PAUSE_S, (now_s - since_s) / 10)
        self._by_lease[lease_id] = _Look(since_s, until_s, tuple(generations), {})

    def drop(self, lease_id: str) -> None:
        """Forget what was seen."""
        self._by_lease.pop(lease_id, None)


@final
class SharedBoard:
    """The shared book's leases while it answers, else the front's, which keep the processes of this machine apart.

    A lease that this process holds stays on the board where it was made, or its holder could neither keep it alive nor
    give it back when the server comes or goes meanwhile.
    """

    def __init__(
        self,
        ask: Ask,
        about_to_tune: Callable[[str], None],
        front: Store,
        remote: RemoteStore,
        looks: Looks,
    ) -> None:
        self._ask = ask
        self._about_to_tune = about_to_tune
        self._front = front
        self._remote = remote.leases()
        self._where = remote.where
        self._looks = looks
        self._held: dict[str, tuple[str, bool]] = {}  # by lease: our slip, and whether it is the shared book's

    def create(self, name: str, content: bytes) -> bool:
        """Make the slip, atomically; False if one of this name is there already."""
        made, shared = self._on_either(name, lambda board: board.create(name, content))
        if made:
            self._held[_lease_of(name)] = (name, shared)
        return made

    def read(self, name: str) -> bytes | None:
        """Return the slip's content, or None if there is none."""
        look = None if _lease_of(name) in self._held else self._looks.at(_lease_of(name))
        if look is not None and name in look.slips:
            return look.slips[name]
        content, _ = self._on_either(name, lambda board: board.read(name))
        if look is not None:
            look.slips[name] = content
        return content

    def rewrite(self, name: str, content: bytes) -> bool:
        """Replace the content of an existing slip; False, without making one, if it is gone."""
        return self._on_either(name, lambda board: board.rewrite(name, content))[0]

    def remove(self, name: str) -> None:
        """Take the slip away; no error if it is gone already."""
        self._looks.drop(_lease_of(name))
        try:
            self._on_either(name, lambda board: board.remove(name))
        finally:
            if self._held.get(_lease_of(name), ("", False))[0] == name:
                self._held.pop(_lease_of(name), None)

    def generations(self, lease_id: str) -> list[int]:
        """Return the generations present for an id, ascending."""
        look = None if lease_id in self._held else self._looks.at(lease_id)
        if look is not None:
            return list(look.generations)
        self._about_to_tune(lease_id)
        found, shared = self._on_either(f"{lease_id}.", lambda board: board.generations(lease_id))
        if shared:
            self._looks.add(lease_id, found)
        return found

    def _on_either(self, name: str, step: Callable[[LeaseBoard], T]) -> tuple[T, bool]:
        """Take a step on the board of a lease; return what it came to, and whether that was the shared book's."""
        held = self._held.get(_lease_of(name))
        if held is None or held[1]:
            answer = self._ask(lambda: step(self._remote), Unanswered())
            if not isinstance(answer, Unanswered):
                return answer, True
            if held is not None:
                raise self._away()
        local = self._front.leases()
        if local is None:
            raise self._away()
        return step(local), False

    def _away(self) -> StoreError:
        return StoreError("remote", self._where, f"the leases of the shared book at {self._where} cannot be reached.")


def _lease_of(name: str) -> str:
    return name.rpartition(".")[0]
