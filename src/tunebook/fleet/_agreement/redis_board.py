"""A board on a Redis server, for processes that have no other service in common."""

from __future__ import annotations

import importlib
from typing import Any, Final, final

from tunebook._base.errors import DefinitionError, StoreError, require

# Longer than jobs run, so that a rank which joins late finds the decisions; but a server is not filled for ever.
_KEPT_S: Final = 30 * 24 * 3600
_ANSWER_S: Final = 2.0
_BLOCK_S: Final = 5.0


@final
class RedisBoard:
    """The keys of a job on a Redis or Valkey server.

    A value is the only entry of a stream, under an id that can be added once: any number of clients can wait at a
    stream in one command.
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
        # The first command fails if the stream has its entry already.
        _, entries, _ = self._send(key, ("xadd", {"v": value}, "1-1"), ("xrange", "-", "+", 1))
        return str(entries[0][1]["v"])

    def wait(self, key: str, timeout_s: float) -> str | None:
        left_s = timeout_s
        while True:
            # With no time left, do not block: 0 would block for ever, and the server ends a shorter block only at its
            # next tick, 100 ms later.
            block_ms = max(1, int(1000 * min(left_s, _BLOCK_S))) if left_s > 0 else None
            found = self._call(self._blocking.xread, {self._prefix + key: "0-0"}, count=1, block=block_ms)
            left_s -= _BLOCK_S
            if found:
                return str(found[0][1][0][1]["v"])
            if left_s <= 0:
                return None

    def post(self, topic: str, value: str) -> None:
        self._send(topic, ("rpush", value))

    def posted(self, topic: str) -> list[str]:
        return list(self._call(self._quick.lrange, self._prefix + topic, 0, -1))

    def add(self, key: str, amount: int) -> int:
        return int(self._send(key, ("incrby", amount))[0])

    def _client(self, url: str, timeout_s: float) -> Any:
        # The client's own retries would take a minute at a server that hangs; `RetryingBoard` gives up after seconds.
        retry = importlib.import_module("redis.retry").Retry(importlib.import_module("redis.backoff").NoBackoff(), 0)
        timeouts = {"socket_timeout": timeout_s, "socket_connect_timeout": _ANSWER_S}
        return self._redis.Redis.from_url(url, decode_responses=True, protocol=2, retry=retry, **timeouts)

    def _send(self, key: str, *commands: tuple[Any, ...]) -> list[Any]:
        """Send commands on a key, renew its expiry, and return the answers; an existing value is not an error."""
        with self._quick.pipeline(transaction=False) as pipe:
            for name, *arguments in (*commands, ("expire", _KEPT_S)):
                getattr(pipe, name)(self._prefix + key, *arguments)
            answers = list(self._call(pipe.execute, raise_on_error=False))
        for answer in answers:
            if isinstance(answer, self._redis.RedisError) and "equal or smaller" not in str(answer):
                raise StoreError("refused", self.where, f"{self.where} refused: {answer}") from answer
        return answers

    def _call(self, call: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except self._redis.RedisError as error:
            raise StoreError("unreachable", self.where, f"{self.where} failed: {error}") from error


def redis_board(url: str, *, job: str | None, rank: int | None, world: int | None) -> RedisBoard:
    """Return the board of a job that a user has named."""
    if not job or rank is None or world is None or not 0 <= rank < world:
        raise DefinitionError(
            f"agree({url.partition('://')[0]}://...) got job={job!r}, rank={rank!r}, world={world!r}; a server does "
            "not know the job, so write job='a name that no other run has', rank=..., world=... with 0 <= rank < world"
        )
    return RedisBoard(url, job=job, rank=rank, world=world)
