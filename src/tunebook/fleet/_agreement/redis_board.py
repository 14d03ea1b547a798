"""Agreement over a Redis server, for processes that have no other service in common."""

from __future__ import annotations

import importlib
from typing import Any, Final, final

from tunebook._base.errors import DefinitionError, StoreError
from tunebook._base.optional import require

# Longer than jobs run, so that a rank which joins late finds what was decided; but a server is not filled for ever.
_KEPT_S: Final = 30 * 24 * 3600
_ANSWER_S: Final = 2.0
_BLOCK_S: Final = 5.0


@final
class RedisBoard:
    """The keys of one job on a Redis or Valkey server.

    A value is the one entry of a stream, under an id that can be added once: streams are what any number of clients can
    wait at in one command.
    """

    def __init__(self, url: str, *, job: str, rank: int, world: int) -> None:
        self._redis: Any = require("redis", extra="redis", feature="agreement over Redis")
        self.rank = rank
        self.world = world
        self._prefix = f"tunebook:{job}:"
        self._quick = self._client(url, _ANSWER_S)
        self._blocking = self._client(url, _BLOCK_S + _ANSWER_S)
        at = self._quick.connection_pool.connection_kwargs  # not the URL, which may hold a password
        self.where = f"Redis at {at.get('host') or at.get('path')}"

    def first(self, key: str, value: str) -> str:
        def commands(pipe: Any, name: str) -> None:
            pipe.xadd(name, {"v": value}, id="1-1")  # an error if it is there
            pipe.expire(name, _KEPT_S)
            pipe.xrange(name, count=1)

        return str(self._pipe(commands, key)[2][0][1]["v"])

    def wait(self, key: str, timeout_s: float) -> str | None:
        left_s = timeout_s
        while True:
            # Without a block where there is no time: 0 would be for ever, and the server ends a shorter one at its next
            # tick, 100 ms later.
            block_ms = max(1, int(1000 * min(left_s, _BLOCK_S))) if left_s > 0 else None
            found = self._do(self._blocking.xread, {self._prefix + key: "0-0"}, count=1, block=block_ms)
            left_s -= _BLOCK_S
            if found:
                return str(found[0][1][0][1]["v"])
            if left_s <= 0:
                return None

    def post(self, topic: str, value: str) -> None:
        def commands(pipe: Any, name: str) -> None:
            pipe.rpush(name, value)
            pipe.expire(name, _KEPT_S)

        self._pipe(commands, topic)

    def posted(self, topic: str) -> list[str]:
        return list(self._do(self._quick.lrange, self._prefix + topic, 0, -1))

    def add(self, key: str, amount: int) -> int:
        def commands(pipe: Any, name: str) -> None:
            pipe.incrby(name, amount)
            pipe.expire(name, _KEPT_S)

        return int(self._pipe(commands, key)[0])

    def _client(self, url: str, timeout_s: float) -> Any:
        retry = importlib.import_module("redis.retry").Retry(importlib.import_module("redis.backoff").NoBackoff(), 0)
        return self._redis.Redis.from_url(
            url,
            decode_responses=True,
            protocol=2,
            socket_timeout=timeout_s,
            socket_connect_timeout=_ANSWER_S,
            # Its own retries would take a minute at a server that hangs; ours have an end.
            retry=retry,
        )

    def _pipe(self, commands: Any, key: str) -> list[Any]:
        """Return the answers to some commands on a key, sent together; that a value is there already is no failure."""
        with self._quick.pipeline(transaction=False) as pipe:
            commands(pipe, self._prefix + key)
            answers = list(self._do(pipe.execute, raise_on_error=False))
        for answer in answers:
            if isinstance(answer, self._redis.RedisError) and "equal or smaller" not in str(answer):
                raise StoreError("refused", self.where, f"{self.where} refused: {answer}") from answer
        return answers

    def _do(self, call: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except self._redis.RedisError as error:
            raise StoreError("unreachable", self.where, f"{self.where} failed: {error}") from error


def redis_board(url: str, *, job: str | None, rank: int | None, world: int | None) -> RedisBoard:
    """Return the board of a job that a user has named."""
    if not job or rank is None or world is None or not 0 <= rank < world:
        raise DefinitionError(
            f"agree({url.partition('://')[0]}://...) got job={job!r}, rank={rank!r}, world={world!r}; a server does "
            "not know who asks, so write job='a name that no other run has', rank=..., world=... with 0 <= rank < world"
        )
    return RedisBoard(url, job=job, rank=rank, world=world)
