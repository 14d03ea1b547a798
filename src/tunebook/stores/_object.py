"""Records as objects: the shared book of machines that have S3, Google Cloud Storage or Azure Blob Storage.

<address>/v1/records/<op>/<id>.json      the bytes of a record
<address>/v1/leases/<id>/<generation>    a slip of bytes

It needs conditional puts (create if absent, replace if unchanged), which all three have.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, NamedTuple, final

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError
from obstore.store import from_url

from tunebook._base.errors import DefinitionError, StoreError
from tunebook._base.record_format import MAX_RECORD_BYTES
from tunebook._base.vocabulary import ShownByPlace
from tunebook.stores._files import generations_among, path_component, problem_id
from tunebook.stores._remote import Envelope, fault, without_secrets

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tunebook._base.record_format import Record
    from tunebook._base.vocabulary import Problem

# Each try that fails is a success of another machine: this many fail in a row only if something is wrong.
_TRIES: Final = 32
# An object takes tens of milliseconds, whatever its size: in bulk, several are under way at once.
_AT_A_TIME: Final = 16
_BATCH: Final = 256


class _ObjectContent(NamedTuple):
    """The bytes of an object, and the version that a put must name to replace exactly these bytes."""

    data: bytes
    version: dict[str, str]


class _Objects:
    """An obstore client that raises `StoreError`. Every use of obstore's threads goes through here."""

    # obstore's threads do not exist in a forked child, where a call then never returns, or crashes.
    _used_in: int | None = None

    def __init__(self, client: Any, where: str) -> None:
        self._client = client
        self.where: Final = where

    def read(self, path: str) -> _ObjectContent | None:
        with self._exchange(), suppress(FileNotFoundError):
            found = obstore.get(self._client, path)
            # An ETag, and a version where the store has versions (GCS).
            version = {name: found.meta[name] for name in ("e_tag", "version") if found.meta.get(name) is not None}
            # Too much is not read at all: it would take longer than a call may, and cannot be a record.
            return _ObjectContent(b"" if found.meta["size"] > 2 * MAX_RECORD_BYTES else bytes(found.bytes()), version)
        return None

    def put(self, path: str, data: bytes, version: dict[str, str] | None = None) -> bool:
        """Create an object, or replace this version of it; False if it exists, or is gone or changed meanwhile."""
        with self._exchange():
            try:
                obstore.put(
                    self._client, path, data, mode="create" if version is None else version, use_multipart=False
                )
            except (AlreadyExistsError, PreconditionError):
                return False
            except FileNotFoundError as error:
                if version is None:  # for a new object it means that the bucket is missing
                    raise fault(self.where, error) from error
                return False
        return True

    def remove(self, path: str) -> None:
        with self._exchange(), suppress(FileNotFoundError):
            obstore.delete(self._client, path)

    def exists(self, path: str) -> bool:
        with self._exchange(), suppress(FileNotFoundError):
            obstore.head(self._client, path)
            return True
        return False

    def paths(self, prefix: str) -> Iterator[str]:
        with self._exchange():
            for page in obstore.list(self._client, prefix):
                yield from (entry["path"] for entry in page)

    @contextmanager
    def _exchange(self) -> Iterator[None]:
        if _Objects._used_in not in {None, os.getpid()}:
            remedy = "Start the process with multiprocessing's 'spawn' or 'forkserver', not with 'fork'."
            message = f"the shared book at {self.where} cannot be used in a forked process. {remedy}"
            raise StoreError("remote", self.where, message)
        _Objects._used_in = os.getpid()
        try:
            yield
        except FileNotFoundError:
            raise
        except (BaseError, OSError, ValueError) as error:
            raise fault(self.where, error) from error


@final
class ObjectStore(ShownByPlace):
    """Records in a bucket. Safe to share between threads; raises in a forked child of a process that used it.

    The address is `s3://bucket/path`, `gs://bucket/path` or `az://container/path`; credentials and the rest come from
    the environment, under the names that the clouds' own tools use (`AWS_*`, `GOOGLE_*`, `AZURE_STORAGE_*`).
    """

    def __init__(self, url: str, *, timeout_s: float = 5.0, key: bytes | None = None) -> None:
        self.where: Final = without_secrets(url)
        self._envelope = Envelope(self.where, key)
        self._objects = _Objects(_client(url, timeout_s), self.where)

    def get(self, problem: Problem) -> Record | None:
        content = self._objects.read(_record_path(problem))
        return None if content is None else self._envelope.open(content.data, problem)

    def put(self, record: Record) -> None:
        self.offer(record)

    def offer(self, record: Record) -> Record | None:
        path, data = _record_path(record.problem), self._envelope.seal(record)
        for _ in range(_TRIES):
            if self._objects.put(path, data):
                return None
            present = self._objects.read(path)
            if present is None:
                continue  # deleted in between
            standing = self._envelope.open(present.data, record.problem)
            if standing is not None and standing.head.generation > record.head.generation:
                return standing
            if self._objects.put(path, data, present.version):
                return None
        message = f"{self.where}/{path} changed at each of {_TRIES} tries to replace it."
        raise StoreError("remote", self.where, message)

    def put_many(self, records: Iterable[Record]) -> None:
        """Store many records, several at a time. After an error some may be stored, each of them whole."""
        remaining = iter(records)
        with ThreadPoolExecutor(_AT_A_TIME) as pool:
            while batch := list(islice(remaining, _BATCH)):
                list(pool.map(self.offer, batch))

    def delete(self, problem: Problem) -> bool:
        present = self._objects.exists(_record_path(problem))
        if present:
            self._objects.remove(_record_path(problem))
        return present

    def items(self, op: str | None = None) -> Iterator[Record]:
        paths = self._objects.paths("v1/records" if op is None else f"v1/records/{path_component(op)}")
        with ThreadPoolExecutor(_AT_A_TIME) as pool:
            while batch := list(islice(paths, _BATCH)):
                for content in pool.map(self._objects.read, batch):
                    record = None if content is None else self._envelope.open(content.data)
                    if record is not None and op in {None, record.problem.op}:
                        yield record

    def leases(self) -> ObjectLeases:
        return ObjectLeases(self._objects)

    def ping(self) -> None:
        self._objects.exists("v1/ping")  # it need not exist


@final
class ObjectLeases:
    """Lease slips as objects, made and changed by conditional puts."""

    def __init__(self, objects: _Objects) -> None:
        self._objects = objects

    def create(self, name: str, content: bytes) -> bool:
        return self._objects.put(_lease_path(name), content)

    def read(self, name: str) -> bytes | None:
        found = self._objects.read(_lease_path(name))
        return None if found is None else found.data

    def rewrite(self, name: str, content: bytes) -> bool:
        found = self._objects.read(_lease_path(name))
        return found is not None and self._objects.put(_lease_path(name), content, found.version)

    def remove(self, name: str) -> None:
        self._objects.remove(_lease_path(name))

    def generations(self, lease_id: str) -> list[int]:
        return generations_among(path.rpartition("/")[2] for path in self._objects.paths(f"v1/leases/{lease_id}"))


def _client(url: str, timeout_s: float) -> Any:
    milliseconds = f"{timeout_s * 1000:.0f}ms"
    try:
        return from_url(
            url,
            # A plain http:// endpoint is used only if the user configured it.
            client_options={"timeout": milliseconds, "connect_timeout": milliseconds, "allow_http": True},
            # obstore's own ten tries take up to 180 s.
            retry_config={"max_retries": 0},
        )
    except (BaseError, ValueError) as error:
        said = str(error).partition("\n")[0]
        example = "s3://bucket/path, gs://bucket/path or az://container/path"
        raise DefinitionError(
            f"{without_secrets(url)!r} is not the address of an object store: {said}. Write {example}, and give "
            "credentials in the environment (AWS_*, GOOGLE_*, AZURE_STORAGE_*)"
        ) from error


def _record_path(problem: Problem) -> str:
    return f"v1/records/{path_component(problem.op)}/{problem_id(problem)}.json"


def _lease_path(name: str) -> str:
    lease_id, _, generation = name.rpartition(".")
    return f"v1/leases/{lease_id}/{generation}"
