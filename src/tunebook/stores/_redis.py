"""Records in Redis or Valkey: the shared book of machines that have a server already.

tunebook:v1:record:<id>    hash: `record`, the bytes of a record; `generation`, 19 digits
tunebook:v1:op:<op>        set: the ids of an operation's records
tunebook:v1:lease:<id>     hash: a slip of bytes per generation; gone a day after its last change

A release that writes records of another form uses `tunebook:v2:`. Neither release touches the keys of the other.
"""

from __future__ import annotations

import hashlib
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, final

from redis import Redis, SSLConnection
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError
from redis.retry import Retry

from tunebook._base.errors import DefinitionError, StoreError, warn_once
from tunebook._base.vocabulary import ShownByPlace
from tunebook.stores._files import generations_among, path_component, problem_id
from tunebook.stores._remote import Envelope, fault, without_secrets

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tunebook._base.record_format import Record
    from tunebook._base.vocabulary import Problem

_RECORD: Final = "tunebook:v1:record:"
_LEASE: Final = "tunebook:v1:lease:"
_WRONG_TYPE: Final = "wrong-type"  # the kind of the fault; the server itself is well
_BATCH: Final = 256  # commands per exchange: records of 4 kB make a megabyte
# Only a record that is not believed is replaced again, and each try that fails is a success of another machine.
_TRIES: Final = 32
# A holder changes its slip every few seconds; a slip this old was left by a machine that is gone.
_SLIP_LIFETIME_S: Final = 86_400

# Look and replace in one step. Generations are compared as 19 digits, because a number in Lua has only 53 bits. ARGV[3]
# is the digest of a record that stands there and may not: a damaged or forged record must not keep its place by number,
# nor a key of another type by its type.
_PUT: Final = """
if redis.call('TYPE', KEYS[1]).ok ~= 'hash' then redis.call('DEL', KEYS[1]) end
if redis.call('TYPE', KEYS[2]).ok ~= 'set' then redis.call('DEL', KEYS[2]) end
local generation = redis.call('HGET', KEYS[1], 'generation')
if generation and generation > ARGV[1] then
  local standing = redis.call('HGET', KEYS[1], 'record') or ''
  if redis.sha1hex(standing) ~= ARGV[3] then return standing end
end
redis.call('HSET', KEYS[1], 'generation', ARGV[1], 'record', ARGV[2])
redis.call('SADD', KEYS[2], ARGV[4])
return false
"""
_CREATE: Final = """
if redis.call('TYPE', KEYS[1]).ok ~= 'hash' then redis.call('DEL', KEYS[1]) end
local made = redis.call('HSETNX', KEYS[1], ARGV[1], ARGV[2])
if made == 1 then redis.call('EXPIRE', KEYS[1], ARGV[3]) end
return made
"""
_REWRITE: Final = """
if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 0 then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('EXPIRE', KEYS[1], ARGV[3])
return 1
"""


@final
class RedisStore(ShownByPlace):
    """Records in a Redis server. Safe to share between threads, and to carry over a fork.

    The address is redis-py's: `redis://[user:password@]host[:port][/database]`, `rediss://` with TLS, and options of
    a connection behind a question mark (`?ssl_ca_certs=/path`). A put is as durable as the server makes it.
    """

    def __init__(self, url: str, *, timeout_s: float = 5.0, key: bytes | None = None) -> None:
        self.where: Final = without_secrets(url)
        self._envelope = Envelope(self.where, key)
        # Half for connecting and half for the answer. redis-py's own are 5 s each.
        self._client: Any = connect(url, socket_connect_timeout=timeout_s / 2, socket_timeout=timeout_s / 2)

    def get(self, problem: Problem) -> Record | None:
        with _exchange(self.where):
            content = self._client.hget(f"{_RECORD}{problem_id(problem)}", "record")
        return self._envelope.open(content, problem)

    def put(self, record: Record) -> None:
        self.offer(record)

    def offer(self, record: Record) -> Record | None:
        content, forbidden = self._envelope.seal(record), ""
        for _ in range(_TRIES):
            with _exchange(self.where):
                standing = self._client.eval(_PUT, 2, *_put_arguments(record, content, forbidden))
            if standing is None:
                return None
            present = self._envelope.open(standing, record.problem)
            if present is not None and present.head.generation > record.head.generation:
                return present
            forbidden = hashlib.sha1(standing, usedforsecurity=False).hexdigest()
        raise StoreError("remote", self.where, f"a record in {self.where} changed at each of {_TRIES} tries.")

    def put_many(self, records: Iterable[Record]) -> None:
        remaining = iter(records)
        while batch := [(record, self._envelope.seal(record)) for record in islice(remaining, _BATCH)]:
            with _exchange(self.where):
                pipe = self._client.pipeline(transaction=False)
                for record, content in batch:
                    pipe.eval(_PUT, 2, *_put_arguments(record, content, ""))
                answers = pipe.execute()
            for (record, _), standing in zip(batch, answers, strict=True):
                if standing is not None:
                    self.offer(record)

    def delete(self, problem: Problem) -> bool:
        identifier = problem_id(problem)
        with _exchange(self.where):
            pipe = self._client.pipeline(transaction=True)
            pipe.delete(f"{_RECORD}{identifier}")
            pipe.srem(_index_key(problem.op), identifier)
            removed, _ = pipe.execute()
        return bool(removed)

    def items(self, op: str | None = None) -> Iterator[Record]:
        """Yield every readable record, or the records of an operation, in steps too small to hold up other clients."""
        seen: set[bytes] = set()
        found = self._keys(op)
        while batch := list(islice(found, _BATCH)):
            # A scan may name a key twice.
            fresh = [key for key in dict.fromkeys(batch) if key not in seen]
            seen.update(fresh)
            with _exchange(self.where):
                pipe = self._client.pipeline(transaction=False)
                for key in fresh:
                    pipe.hget(key, "record")
                contents = pipe.execute(raise_on_error=False)
            for content in contents:
                if isinstance(content, ResponseError):
                    refused = _refusal(self.where, content)
                    if refused.kind != _WRONG_TYPE:
                        raise refused
                    warn_once(refused.kind, refused.path, refused.message)
                    continue
                record = self._envelope.open(content)
                if record is not None and op in {None, record.problem.op}:
                    yield record

    def leases(self) -> RedisLeases:
        return RedisLeases(self._client, self.where)

    def ping(self) -> None:
        with _exchange(self.where):
            self._client.ping()

    def _keys(self, op: str | None) -> Iterator[bytes]:
        with _exchange(self.where):
            if op is None:
                yield from self._client.scan_iter(match=f"{_RECORD}*", count=_BATCH)
                return
            for identifier in self._client.sscan_iter(_index_key(op), count=_BATCH):
                yield f"{_RECORD}{identifier.decode('ascii', 'replace')}".encode()


@final
class RedisLeases:
    """Lease slips as fields of a small hash per lease, so that listing the generations is one exchange."""

    def __init__(self, client: Any, where: str) -> None:
        self._client, self._where = client, where

    def create(self, name: str, content: bytes) -> bool:
        with _exchange(self._where):
            return bool(self._client.eval(_CREATE, 1, *self._place(name), content, _SLIP_LIFETIME_S))

    def read(self, name: str) -> bytes | None:
        with _exchange(self._where):
            content: bytes | None = self._client.hget(*self._place(name))
        return content

    def rewrite(self, name: str, content: bytes) -> bool:
        with _exchange(self._where):
            return bool(self._client.eval(_REWRITE, 1, *self._place(name), content, _SLIP_LIFETIME_S))

    def remove(self, name: str) -> None:
        with _exchange(self._where):
            self._client.hdel(*self._place(name))

    def generations(self, lease_id: str) -> list[int]:
        try:
            with _exchange(self._where):
                names = self._client.hkeys(f"{_LEASE}{lease_id}")
        except StoreError as error:
            if error.kind != _WRONG_TYPE:
                raise
            names = []  # the first slip replaces the key
        return generations_among(name.decode("ascii", "replace") for name in names)

    def _place(self, name: str) -> tuple[str, str]:
        lease_id, _, generation = name.rpartition(".")
        return f"{_LEASE}{lease_id}", generation


def connect(url: str, *, decode_responses: bool = False, **timeouts_s: float) -> Any:
    """Return a client for an address, not connected yet: it tries everything once, and TLS checks the host's name.

    `DefinitionError` if the address is invalid.
    """
    # redis-py's own retries are ten, with growing pauses: one get from a hung server took 60 s. The third protocol
    # brings nothing here, and one exchange more before the first command.
    options: dict[str, Any] = {**timeouts_s, "retry": Retry(NoBackoff(), 0), "protocol": 2}
    scheme, separator, rest = url.partition("://")
    try:
        client = Redis.from_url(f"{scheme.lower().replace('valkey', 'redis')}{separator}{rest}", **options)
        given = client.connection_pool.connection_kwargs
        if "decode_responses" in given:
            raise ValueError("leave decode_responses out")  # noqa: TRY301 - one way out
        given["decode_responses"] = decode_responses
        if issubclass(client.connection_pool.connection_class, SSLConnection):
            # redis-py 5 takes a valid certificate of any host. Python refuses the check for a certificate that, by the
            # user's own wish, nothing checks.
            given.setdefault("ssl_check_hostname", given.get("ssl_cert_reqs") != "none")
        client.connection_pool.make_connection()  # unknown options are found out here, and nothing is connected yet
    except (TypeError, ValueError, RedisError) as error:
        example = "redis://:password@host:6379/0, or rediss://host:6380/0?ssl_ca_certs=/path/of/ca.pem for TLS"
        where = without_secrets(url)
        # The text that could not be read as a port may be a part of the password, if that has a slash or an @ in it.
        said = "write special characters of a password as %2F, %40 and so on" if "@" in url else error
        raise DefinitionError(f"{where!r} is not the address of a Redis server: {said}. Write {example}") from None
    return client


def _put_arguments(record: Record, content: bytes, forbidden: str) -> tuple[str | bytes, ...]:
    identifier = problem_id(record.problem)
    generation = f"{record.head.generation:019d}"
    return (f"{_RECORD}{identifier}", _index_key(record.problem.op), generation, content, forbidden, identifier)


def _index_key(op: str) -> str:
    return f"tunebook:v1:op:{path_component(op)}"


@contextmanager
def _exchange(where: str) -> Iterator[None]:
    """Turn every error of an exchange into a `StoreError`; TLS and the look-up of names raise plain `OSError`."""
    try:
        yield
    except StoreError:
        raise
    except ResponseError as error:
        raise _refusal(where, error) from error
    except (RedisError, OSError) as error:
        raise fault(where, error) from error


def _refusal(where: str, error: ResponseError) -> StoreError:
    """Return the server's refusal of a command; its kind tells a fault of one key from a fault of the server."""
    if not str(error).startswith("WRONGTYPE"):
        return fault(where, error)
    return StoreError(_WRONG_TYPE, where, f"a key in {where} is not used: {error}. A tuning here replaces it.")
