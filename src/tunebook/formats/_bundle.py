"""Bundles: records in one signed file, to carry entries to another machine; and merging them into a book."""

from __future__ import annotations

import gzip
import hashlib
import hmac
import json
import math
import os
import time
import zlib
from contextlib import ExitStack
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias, get_args

from tunebook._base.config_codec import fingerprint_of
from tunebook._base.errors import CodecError, DefinitionError, StoreError, not_among
from tunebook._base.record_format import Record, canonical_json, merge, precedence
from tunebook._selection.recorded_decision import winner_of
from tunebook._selection.single_flight import Lease, acquire
from tunebook._statistics.race import typical_s
from tunebook._tuning.plan import TOGETHER
from tunebook.stores import problem_id
from tunebook.stores._files import replace_file
from tunebook.stores._listing import measured_s

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from tunebook._base.vocabulary import Json, Measurement, Problem
    from tunebook.stores import Store

Prefer: TypeAlias = Literal["generation", "newer", "faster", "majority", "mine"]  # see `merge_into`
_FORMAT: Final = "tunebook-bundle/1"
# A bundle is read into memory before its signature can be checked. Some 300,000 entries fit; a pack has no limit.
_MAX_BYTES: Final = 512 << 20
# Each problem's lease is held while it is merged, with a thread to keep it alive: so many at a time, and one sync.
_AT_ONCE: Final = 64


class Bundle(NamedTuple):
    """The content of a bundle. `signed` says that its signature was checked with the key."""

    records: tuple[Record, ...]
    made: float
    host: str
    signed: bool


def export_bundle(records: Iterable[Record], path: str | os.PathLike[str], *, key: bytes | None = None) -> int:
    """Write records to one file, all or nothing, and return how many; a name that ends in .gz is compressed.

    With a key the bundle is signed: an import with the same key proves that nobody else wrote it.
    """
    lines = [record.to_bytes() for record in records]
    host = os.uname().nodename
    about: dict[str, Json] = {"format": _FORMAT, "made": time.time(), "host": host, "records": len(lines)}
    content = b"".join([canonical_json(about).encode() + b"\n", *lines])
    content += canonical_json(_seal(content, key)).encode() + b"\n"
    target = Path(path)
    if len(content) > _MAX_BYTES:
        remedy = "Export fewer entries, or a .db pack"
        raise CodecError(f"{target} would take {len(content)} bytes, over the limit of {_MAX_BYTES}. {remedy}")
    try:
        # mtime=0: the same records give the same file.
        replace_file(target, gzip.compress(content, mtime=0) if target.suffix == ".gz" else content)
    except OSError as error:
        raise StoreError("write", str(target), f"cannot write the bundle {target}: {error}") from error
    return len(lines)


def import_bundle(path: str | os.PathLike[str], *, key: bytes | None = None, allow_unsigned: bool = False) -> Bundle:
    """Read a bundle; `CodecError` if it is another file, was altered, or is not signed with the key.

    Without a key a signed bundle is not read either, unless `allow_unsigned` says that its origin does not matter.
    """
    content = _read(path)
    body, newline, seal = content.removesuffix(b"\n").rpartition(b"\n")
    about = _object(content.partition(b"\n")[0], path)
    if about.get("format") != _FORMAT:
        raise CodecError(f"{path} is not a bundle of this version ({_FORMAT})")
    signed = _check(body + newline, _object(seal, path), key, str(path), allow_unsigned=allow_unsigned)
    lines = body.split(b"\n")[1:]
    records = tuple(Record.from_bytes(b"\n".join([*lines[at : at + 2], b""])) for at in range(0, len(lines), 2))
    if len(records) != about.get("records"):
        raise CodecError(f"{path} has {len(records)} records, and its first line gives another number")
    made, host = about.get("made"), about.get("host")
    return Bundle(records, made if isinstance(made, float) else 0.0, host if isinstance(host, str) else "", signed)


def _read(path: str | os.PathLike[str]) -> bytes:
    """Return the content of a bundle, unpacked; `CodecError` if it is cut short, or larger than any bundle."""
    try:
        with Path(path).open("rb") as file:
            raw = file.read(_MAX_BYTES + 1)
        content = _unpacked(raw) if raw[:2] == b"\x1f\x8b" else raw
    except OSError as error:
        raise StoreError("read", str(path), f"cannot read the bundle {path}: {error}") from error
    except (EOFError, zlib.error) as error:
        raise CodecError(f"{path} is not a whole bundle: {error}") from error
    if len(content) > _MAX_BYTES:
        raise CodecError(f"{path} is not a bundle: its content takes over {_MAX_BYTES} bytes")
    return content


def _unpacked(raw: bytes) -> bytes:
    """Return the content of a gzip file, but little more than a bundle may have: 1 MB can unpack to 1 GB."""
    parts, left = [], _MAX_BYTES + 1
    while raw and left > 0:
        member = zlib.decompressobj(wbits=31)  # a gzip file may have several
        parts.append(member.decompress(raw, left))
        left -= len(parts[-1])
        if not member.eof and left > 0:
            raise EOFError("it ends too early")
        raw = member.unused_data.lstrip(b"\0")
    return b"".join(parts)


def _seal(content: bytes, key: bytes | None) -> dict[str, Any]:
    signature = None if key is None else hmac.new(key, content, hashlib.sha256).hexdigest()
    return {"digest": hashlib.sha256(content).hexdigest(), "signature": signature}


def _check(content: bytes, seal: Mapping[str, Any], key: bytes | None, path: str, *, allow_unsigned: bool) -> bool:
    """Return whether a bundle's signature was checked; `CodecError` if the digest or the signature is invalid."""
    if seal.get("digest") != hashlib.sha256(content).hexdigest():
        raise CodecError(f"{path} was cut short or altered: its digest does not match")
    signature = seal.get("signature")
    if key is not None and isinstance(signature, str):
        # As bytes, because texts that are not ASCII cannot be compared in this way.
        expected = str(_seal(content, key)["signature"]).encode()
        if not hmac.compare_digest(signature.encode("utf-8", "surrogatepass"), expected):
            raise CodecError(f"{path} is signed with another key than TUNEBOOK_SIGNING_KEY")
        return True
    if allow_unsigned or (key is None and signature is None):
        return False
    found, wanted = ("signed", "no key is set") if key is None else ("not signed", "a key is set")
    raise CodecError(
        f"{path} is {found}, and {wanted}. Set TUNEBOOK_SIGNING_KEY to the key that it was made with, "
        "or say that its origin does not matter: allow_unsigned=True, --allow-unsigned"
    )


def _object(line: bytes, path: str | os.PathLike[str]) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise CodecError(f"{path} is not a bundle: it is not JSON") from error
    if not isinstance(value, dict):
        raise CodecError(f"{path} is not a bundle: it has {type(value).__name__} where an object should be")
    return value


# --------------------------------------------------------------------------------------------------------- merging


class Merged(NamedTuple):
    """The result of merging, or of trying to: the problems, by the change to their entry."""

    added: tuple[Problem, ...] = ()
    changed: tuple[Problem, ...] = ()
    same: tuple[Problem, ...] = ()
    kept_pinned: tuple[Problem, ...] = ()  # the configuration pinned here stays


def merge_into(
    store: Store, records: Iterable[Record], *, dry_run: bool = False, prefer: Prefer = "generation"
) -> Merged:
    """Merge records into a store: the measurements of all, and of the decisions about a problem the preferred one.

    `prefer` is the rule. "generation": the decision that was tuned more often, and of equal ones the decision on a
    caller's arguments, then the later one. "newer": the latest. "faster": the decision whose configuration has the
    smaller typical time, of all its measurements on this problem alone. "majority": the configuration that most
    of the records chose, of which the store's own is one. "mine": the store's own. Ties go by "generation". A pinned
    configuration goes before the others, except with "mine".
    Each problem is merged under its lease, so that no tuning is lost; problems that are being tuned come last.
    """
    if prefer not in get_args(Prefer):
        raise DefinitionError(not_among("prefer", prefer, get_args(Prefer)))
    found: dict[str, list[Problem]] = {name: [] for name in Merged._fields}
    by_id: dict[str, list[Record]] = {}
    for record in records:
        by_id.setdefault(problem_id(record.problem), []).append(record)
    ordered = [by_id[identifier] for identifier in sorted(by_id)]  # as everywhere, so that nobody waits in a ring
    busy: list[list[Record]] = []
    for at in range(0, len(ordered), _AT_ONCE):
        group = ordered[at : at + _AT_ONCE]
        busy += _merge_group(store, group, found, prefer, dry_run=dry_run, wait=False)
    for alike in busy:
        _merge_group(store, [alike], found, prefer, dry_run=dry_run, wait=True)
    return Merged(**{name: tuple(problems) for name, problems in found.items()})


def _merge_group(
    store: Store,
    group: Sequence[list[Record]],
    found: dict[str, list[Problem]],
    prefer: Prefer,
    *,
    dry_run: bool,
    wait: bool,
) -> list[list[Record]]:
    """Merge the records of some problems, and return those whose problem another process is working on."""
    board = None if dry_run else store.leases()
    busy, ready = [], []
    with ExitStack() as held:
        for theirs in group:
            problem, deadline_s = theirs[0].problem, None if wait else 0.0
            lease: object = acquire(board, problem_id(problem), look=lambda: None, deadline_s=deadline_s)
            if not isinstance(lease, Lease):
                busy.append(theirs)
                continue
            held.enter_context(lease)
            outcome, merged = _merge_one(store.get(problem), theirs, prefer)
            found[outcome].append(problem)
            if merged is not None:
                ready.append(merged)
        if ready and not dry_run:
            store.put_many(ready)
    return busy


def _merge_one(mine: Record | None, theirs: Sequence[Record], prefer: Prefer) -> tuple[str, Record | None]:
    """Return the field of `Merged` for a problem, and the record to write, if any."""
    all_of_them = merge_all(mine, theirs, prefer)
    if mine is None:
        return "added", all_of_them
    other = any(record.head.decided and record.head.config != mine.head.config for record in theirs)
    kept = mine.head.origin == "pinned" and other and all_of_them.head.config == mine.head.config
    # A store refuses a record of a lower generation than its own; the preferred decision may have one.
    generation = max(mine.head.generation, all_of_them.head.generation)
    all_of_them = all_of_them.replace(head=replace(all_of_them.head, generation=generation))
    if all_of_them == merge(mine, mine):  # as it is, though its measurements may be in another order
        return ("kept_pinned" if kept else "same"), None
    return ("kept_pinned" if kept else "changed"), all_of_them


def merge_all(mine: Record | None, theirs: Sequence[Record], prefer: Prefer = "generation") -> Record:
    """Return a record with the measurements of all records of a problem, and the decision that a rule prefers."""
    every = [*theirs] if mine is None else [mine, *theirs]
    whole = reduce(merge, every)
    if prefer == "generation":
        return whole
    chosen = mine if prefer == "mine" else None
    if chosen is None or not chosen.head.decided:
        chosen = _preferred(every, whole.body.measurements, prefer)
    body = replace(whole.body, provenance=chosen.body.provenance)
    return Record(replace(chosen.head, extra=whole.head.extra), body).fitted()


def _preferred(records: Sequence[Record], measured: Sequence[Measurement], prefer: Prefer) -> Record:
    decided = [record for record in records if record.head.decided] or records
    among = [record for record in decided if record.head.origin == "pinned"] or decided
    ranks: list[float] = [0.0] * len(among)
    if prefer == "newer":
        ranks = [measured_s(record) for record in among]
    elif prefer == "faster":
        ranks = [-_least_s(record, measured) for record in among]
    elif prefer == "majority":
        texts = [canonical_json(record.head.config) for record in among]
        ranks = [float(texts.count(text)) for text in texts]
    return max(zip(ranks, among, strict=True), key=lambda ranked: (ranked[0], precedence(ranked[1])))[1]


def _least_s(record: Record, measured: Sequence[Measurement]) -> float:
    """Return the least typical time of a record's choice, in any of the books; infinite if it was not measured."""
    winner = None if record.head.origin == "pinned" else winner_of(record.body)
    choice = winner or fingerprint_of(record.head.config)
    return min(
        (
            typical_s(m.valid_samples_s)
            for m in measured
            if m.fingerprint == choice and m.failure is None and m.valid_samples_s and TOGETHER not in m.policy
        ),
        default=math.inf,
    )
