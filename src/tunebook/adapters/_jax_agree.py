"""Agreement over the coordination service that every `jax.distributed` job has."""

from __future__ import annotations

import importlib
from typing import Any, final

import jax

from tunebook._agreement import agree_over
from tunebook._errors import Unsupported


@final
class _CoordinationService:
    """The service's keys and values: the first one to write a key wins, in under a millisecond, also during a trace."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def first(self, key: str, value: str) -> str:
        try:
            self._client.key_value_set(key, value, False)  # noqa: FBT003 - allow_overwrite, by position as it takes it
        except jax.errors.JaxRuntimeError as error:
            if "ALREADY_EXISTS" not in str(error):
                raise
            return str(self._client.blocking_key_value_get(key, 1000))
        return value


def agree() -> None:
    """Have all processes of this `jax.distributed` job use one configuration per problem: the first that one chose.

    Call it in each of them after `jax.distributed.initialize`, and before the first tunable call.
    """
    # There is no public name for it; `None` before the job is initialised.
    client = importlib.import_module("jax._src.distributed").global_state.client
    if client is None:
        raise Unsupported("agree() needs a job; call jax.distributed.initialize(...) first")
    agree_over(_CoordinationService(client))
