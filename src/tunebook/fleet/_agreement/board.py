"""The board: the five operations through which ranks communicate, on the services that jobs have.

Votes, log entries, heartbeats and shared measurements all travel over the board: a Redis server, the store of
torch.distributed, or the coordination service of JAX (in its adapter). `RetryingBoard` outlasts a short outage; after
that, ranks fall back to their heuristics.
"""

from __future__ import annotations

import importlib
import time
from typing import TYPE_CHECKING, Any, Final, ParamSpec, Protocol, TypeVar, final, runtime_checkable

from tunebook._base.errors import StoreError, Unsupported, require

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")
P = ParamSpec("P")

# A server that restarts is back by then. An outage costs the first problem this long, and later problems nothing.
_RETRY_S: Final = 3.0
# Keys on a Redis server are kept longer than jobs run, so that a rank which joins late finds the decisions; but a
# server is not filled for ever.
_KEPT_S: Final = 30 * 24 * 3600
_ANSWER_S: Final = 2.0
_BLOCK_S: Final = 5.0


@runtime_checkable
class Board(Protocol):
    """The shared state of all ranks of a job; safe to share between threads. Failures are `StoreError`s."""

    @property
    def rank(self) -> int:
        """This process's number in the job, from 0."""

    @property
    def world(self) -> int:
        """How many ranks the job has."""

    @property
    def where(self) -> str:
        """The name of the board in messages."""

    def first(self, key: str, value: str) -> str:
        """Write a value unless the key has one, and return the value of the key, which is the same for all ranks."""

    def wait(self, key: str, timeout_s: float) -> str | None:
        """Return the value of a key as soon as it has one; None after the timeout."""

    def post(self, topic: str, value: str) -> None:
        """Add a text without line breaks to a topic; of two texts by one rank, the board keeps the last or both."""

    def posted(self, topic: str) -> list[str]:
        """Return the texts of a topic so far, in any order."""

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, which starts at 0, and return its value."""


class RetryingBoard:
    """Repeats each operation of a board for a while when it fails; every operation may safely run twice."""

    def __init__(self, board: Board) -> None:
        self.rank: Final = board.rank
        self.world: Final = board.world
        self.where: Final = board.where
        self.first: Final = _retrying(board.first)
        self.wait: Final = _retrying(board.wait)
        self.post: Final = _retrying(board.post)
        self.posted: Final = _retrying(board.posted)
        self.add: Final = _retrying(board.add)


def _retrying(call: Callable[P, T]) -> Callable[P, T]:
    def retry(*args: P.args, **kwargs: P.kwargs) -> T:
        gives_up_s = time.monotonic() + _RETRY_S
        pause_s = 0.05
        while True:
            try:
                return call(*args, **kwargs)
            except StoreError:
                if time.monotonic() + pause_s > gives_up_s:
                    raise
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.5)

    return retry


def poll(look: Callable[[], T | None], timeout_s: float) -> T | None:
    """Call `look` until it returns a value, ever less often; None after the timeout."""
    # A value is noticed late by at most a tenth of the time waited: a wait ten times as long costs 24 more calls.
    began_s = time.monotonic()
    while (found := look()) is None:
        waited_s = time.monotonic() - began_s
        if waited_s >= timeout_s:
            return None
        time.sleep(min(max(waited_s / 10, 0.001), 1.0, timeout_s - waited_s))
    return found


@final
class TorchBoard:
    """A `torch.distributed` store of the job, or of a group of ranks that agree among themselves."""

    def __init__(self, store: Any, *, rank: int, world: int) -> None:
        self._store, self.rank, self.world = store, rank, world
        self.where = f"torch.distributed's {type(store).__name__}"

    def first(self, key: str, value: str) -> str:
        return self._call(self._store.compare_set, key, "", value).decode()  # type: ignore[no-any-return] # bytes

    def wait(self, key: str, timeout_s: float) -> str | None:
        # The store's own wait occupies the job's one connection, and prints two lines when it times out.
        return poll(lambda: self._get(key), timeout_s)

    def post(self, topic: str, value: str) -> None:
        self._call(self._store.append, topic, f"{value}\n")

    def posted(self, topic: str) -> list[str]:
        return (self._get(topic) or "").splitlines()

    def add(self, key: str, amount: int) -> int:
        return int(self._call(self._store.add, key, amount))

    def _get(self, key: str) -> str | None:
        return self._call(self._store.get, key).decode() if self._call(self._store.check, [key]) else None

    def _call(self, call: Callable[..., Any], *args: Any) -> Any:
        try:
            return call(*args)
        except RuntimeError as error:  # DistError and the errors of older stores
            raise StoreError("unreachable", self.where, f"{self.where} failed: {error}") from error


def torch_board() -> TorchBoard:
    """Return the board of this process's job."""
    distributed = require("torch", extra="torch", feature="agree('torch')").distributed
    if not distributed.is_available():
        raise Unsupported("agree('torch') needs torch.distributed, which this build of torch does not have")
    if not distributed.is_initialized():
        raise Unsupported(
            "agree('torch') needs a process group, and this process has not joined one; call "
            "torch.distributed.init_process_group(...) first"
        )
    store = importlib.import_module("torch.distributed.distributed_c10d")._get_default_store()  # noqa: SLF001 - torch has no public name
    prefixed = distributed.PrefixStore("tunebook", store)
    return TorchBoard(prefixed, rank=distributed.get_rank(), world=distributed.get_world_size())


@final
class RedisBoard:
    """The keys of a job on a Redis or Valkey server."""

    def __init__(self, url: str, *, job: str, rank: int, world: int) -> None:
        self._redis: Any = require("redis", extra="redis", feature="agreement over Redis")
        self.rank, self.world = rank, world
        self._prefix = f"tunebook:{job}:"
        self._quick = self._client(url, _ANSWER_S)
        self._blocking = self._client(url, _BLOCK_S + _ANSWER_S)
        at = self._quick.connection_pool.connection_kwargs  # not the URL, which may hold a password
        self.where = f"Redis at {at.get('host') or at.get('path')}"

    def first(self, key: str, value: str) -> str:
        # A value is the only entry of a stream, because any number of clients can wait at a stream in one command.
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
        from tunebook.stores._redis import connect  # noqa: PLC0415 - it needs redis, which takes 0.2 s

        return connect(url, decode_responses=True, socket_timeout=timeout_s, socket_connect_timeout=_ANSWER_S)

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
