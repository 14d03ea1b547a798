"""Agreement over the coordination service that every `jax.distributed` job has."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, final

import jax

from tunebook._base.errors import StoreError, Unsupported

if TYPE_CHECKING:
    from collections.abc import Callable


@final
class CoordinationBoard:
    """The service's keys and values. The first write of a key wins, in under a millisecond, also during a trace."""

    def __init__(self, client: Any, *, rank: int, world: int) -> None:
        self._client = client
        self.rank = rank
        self.world = world
        self.where = "jax's coordination service"

    def first(self, key: str, value: str) -> str:
        won, _ = self._do("ALREADY_EXISTS", self._client.key_value_set, key, value, False)  # noqa: FBT003 - no overwrite
        return value if won else str(self._do("", self._client.blocking_key_value_get, key, 1000)[1])

    def wait(self, key: str, timeout_s: float) -> str | None:
        there, value = self._do("DEADLINE_EXCEEDED", self._client.blocking_key_value_get, key, int(1000 * timeout_s))
        return str(value) if there else None

    def post(self, topic: str, value: str) -> None:
        self._do("", self._client.key_value_set, f"{topic}/{self.rank}", value, True)  # noqa: FBT003 - overwrite

    def posted(self, topic: str) -> list[str]:
        return [value for _, value in self._do("", self._client.key_value_dir_get, f"{topic}/")[1]]

    def add(self, key: str, amount: int) -> int:
        return int(self._do("", self._client.key_value_increment, key, amount)[1])

    def _do(self, expected: str, call: Callable[..., Any], *args: Any) -> tuple[bool, Any]:
        """Return whether a call succeeded, and its answer; raise `StoreError` for any error but the expected one."""
        try:
            return True, call(*args)
        except jax.errors.JaxRuntimeError as error:
            if expected and str(error).startswith(expected):
                return False, None
            raise StoreError("unreachable", self.where, f"{self.where} failed: {error}") from error


def jax_board() -> CoordinationBoard:
    """Return the board of this process's job."""
    # jax has no public name for this state. Its client is None before the job is initialised.
    state = importlib.import_module("jax._src.distributed").global_state
    if state.client is None:
        raise Unsupported(
            "agree() needs a jax.distributed job, and this process has not joined one; call "
            "jax.distributed.initialize(...) first"
        )
    return CoordinationBoard(state.client, rank=state.process_id, world=state.num_processes)


def agree() -> None:
    """Make all processes of this `jax.distributed` job use one configuration per problem: `fleet.agree("jax")`.

    Call it in each process after `jax.distributed.initialize`, and before the first tunable call.
    """
    from tunebook.fleet import agree as agree_over  # noqa: PLC0415 - only jobs need it

    agree_over("jax")
