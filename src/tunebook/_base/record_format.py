"""A record: everything the book knows about one problem, as bytes that can tell whether they are whole.

Two lines of JSON, each behind its own checksum::

    9d1c2a04 {"call_key":...,"checksum":...,"config":...,"device":...,"op":...}
    5be1f7c3 {"measurements":[...],"provenance":{...}}

A hit needs the first line only, and does not parse the second: a record with 500 measurements answers as fast as an
empty record. Unknown fields are kept, so that an older release can merge into the record of a newer release without
losing them.
"""

from __future__ import annotations

import json
import math
import zlib
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast, get_args

from tunebook._base.errors import CodecError, warn_once
from tunebook._base.vocabulary import INTERRUPTED, Failure, FailureKind, Json, Measurement, Origin, Problem

try:
    # The same function as `hashlib.blake2b`. Importing `hashlib` loads OpenSSL, which takes 3 ms.
    from _blake2 import blake2b as blake2b  # noqa: PLC0414 - other modules import it from here
except ImportError:  # not CPython
    from hashlib import blake2b as blake2b  # noqa: PLC0414 - the same

if TYPE_CHECKING:
    from collections.abc import Mapping

# A record above this is refused when written and not read at all when met: a 100 MB value is a mistake, and
# reading it would stall the call that met it.
MAX_RECORD_BYTES: Final = 8 << 20
SEAL_BYTES: Final = 77

T = TypeVar("T")

_HEAD_FIELDS: Final[dict[str, type]] = {"checksum": str, "origin": str, "environment": str, "generation": int}
_IDENTITY: Final = ("fingerprint", "code", "policy", "environment")  # of a measurement
BLOCKS: Final = "blocks"  # in a measurement: how many blocks the launch had, if the kernel says so
CHECKED_BY: Final = "checked_by"  # in a measurement and a head: the digest of the check of the output


def unsealed(data: bytes) -> bytes:
    """Return the bytes of a record without the line after them, `hmac-sha256 <64 hex digits>`, that signs them."""
    return data[:-SEAL_BYTES] if data[-SEAL_BYTES - 1 : -SEAL_BYTES + 12] == b"\nhmac-sha256 " else data


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The part of a record that a hit needs. `config` is encoded; `generation` is the lease that wrote the record.

    A `config` of None means that all candidates failed; the body says how. No call can get None as its configuration,
    so a reader that does not know about failures takes the record for a miss.
    """

    problem: Problem
    config: Json
    checksum: str
    origin: Origin
    environment: str = ""
    generation: int = 0
    extra: Mapping[str, Json] = field(default_factory=dict)

    @property
    def decided(self) -> bool:
        """Whether the record holds a configuration."""
        return self.config is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """The part of a record that explanations and later tunings need."""

    measurements: tuple[Measurement, ...] = ()
    provenance: Mapping[str, Json] = field(default_factory=dict)
    extra: Mapping[str, Json] = field(default_factory=dict)


class Record:
    """A head, and a body that is parsed when it is first asked for. Immutable; equal by content."""

    __slots__ = ("_body", "_data", "head")

    def __init__(self, head: Head, body: Body | None = None, *, _data: bytes = b"") -> None:
        self.head: Final = head
        self._body = None if _data else body or Body()
        self._data = _data  # once it was read or written

    @classmethod
    def from_bytes(cls, data: bytes) -> Record:
        """Return the record in `data`; `CodecError` if the bytes are not whole, or the first line is not a head."""
        if len(data) > MAX_RECORD_BYTES:
            raise CodecError(f"a record of {len(data)} bytes is over the limit of {MAX_RECORD_BYTES}")
        lines = data.split(b"\n")
        if len(lines) != 3 or lines[2]:
            raise CodecError(f"a record has two lines, each with an end; found {len(lines) - 1}")
        head = _head_from(_parse(lines[0]))
        # The body's own checksum is verified here, its JSON parsed later: a wrong byte is found at once, for 1 us.
        _verify(lines[1])
        return cls(head, _data=data)

    @classmethod
    def from_fields(cls, head: dict[str, Json], body: dict[str, Json]) -> Record:
        """Return the record with these results of `to_fields`; `CodecError` for anything else."""
        return cls(_head_from(dict(head)), _body_from(dict(body)))

    @property
    def problem(self) -> Problem:
        """The problem that this record answers."""
        return self.head.problem

    @property
    def body(self) -> Body:
        """Measurements and provenance; empty, after one warning, if the second line is whole but does not hold them."""
        if self._body is None:
            try:
                self._body = _body_from(_parse(self._data.split(b"\n")[1]))
            except CodecError as error:
                # The head alone answers calls. An error would let one record of a shared book end every listing.
                message = f"the measurements of {self.problem.op[:80]!r} count as missing: {str(error)[:200]}"
                warn_once("unreadable", self.problem.op, message)
                self._body = Body()
        return self._body

    @property
    def is_unfinished(self) -> bool:
        """Whether a budget ended the tuning that chose, so that the next one goes on."""
        return self.head.origin == "tuned" and self.provenance.get("complete") is False

    @property
    def provenance(self) -> Mapping[str, Json]:
        """The provenance, read without the measurements, which are most of a record: for walks over 100,000 records."""
        if self._body is None:
            # Keys are sorted, so it comes after the measurements; a quote inside a text would have a backslash.
            _, found, rest = self._data.rpartition(b'],"provenance":{')
            try:
                provenance = decode_json(f'{{"provenance":{{{rest.decode("ascii")}')["provenance"] if found else None
            except (ValueError, RecursionError):
                provenance = None  # a field inside or behind it has the same name
            if isinstance(provenance, dict):
                return provenance
        return self.body.provenance

    def to_fields(self) -> tuple[dict[str, Json], dict[str, Json]]:
        """Return head and body as JSON objects, for a store with a file format of its own."""
        return _head_to(self.head), _body_to(self.body)

    def to_bytes(self) -> bytes:
        """Return the bytes of the record; equal records give equal bytes."""
        if self._data:  # unchanged since it was read: copying a book parses no body, and alters nothing
            return self._data
        data = _line(_head_to(self.head)) + _line(_body_to(self.body))
        if len(data) > MAX_RECORD_BYTES:
            raise CodecError(
                f"the record of {self.problem.op!r} takes {len(data)} bytes, over the limit of {MAX_RECORD_BYTES}. "
                "Keep large values out of configurations: store a name or an index instead."
            )
        self._data = data
        return data

    def fitted(self) -> Record:
        """Return the record with the winner's measurement and as many of the newest others as the limit allows.

        An entry that is tuned anew after every edit would pass the limit in the end, and then never be written again.
        """
        try:
            self.to_bytes()
        except CodecError:
            body, winner = self.body, self.body.provenance.get("winner")
            ordered = sorted(body.measurements, key=lambda m: (m.fingerprint != winner, -m.when))
            room = MAX_RECORD_BYTES - len(_line(_head_to(self.head)))
            room -= len(_line(_body_to(replace(body, measurements=()))))
            sizes = accumulate(len(canonical_json(_measurement_to(m))) + 1 for m in ordered)
            kept = tuple(m for m, size in zip(ordered, sizes, strict=True) if size <= room)
            return self.replace(body=replace(body, measurements=kept))
        return self

    def replace(self, *, head: Head | None = None, body: Body | None = None) -> Record:
        """Return a record with another head or body."""
        return Record(head or self.head, body or self.body)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Record) and self.to_bytes() == other.to_bytes()

    def __hash__(self) -> int:
        return hash(self.head.problem)

    def __repr__(self) -> str:
        return f"Record({self.head!r}, {len(self.body.measurements)} measurements)"


def canonical_json(value: Json) -> str:
    """Return the canonical text of a JSON value: sorted keys, no spaces, ASCII; `CodecError` for other values."""
    try:
        return json.dumps(value, separators=(",", ":"), sort_keys=True, ensure_ascii=True, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise CodecError(f"not a JSON value: {error}") from error


def _line(fields: dict[str, Json]) -> bytes:
    text = canonical_json(fields).encode("ascii")
    return b"%08x %s\n" % (zlib.crc32(text), text)


def _verify(line: bytes) -> bytes:
    if line[:9] != b"%08x " % zlib.crc32(line[9:]):
        raise CodecError("checksum does not match: the record was cut short or altered")
    return line[9:]


def _refuse_constant(name: str) -> None:
    raise CodecError(f"{name} is not JSON")


def _finite(text: str) -> float:
    """Return a number in a record; `CodecError` for 1e999, which would be read as infinity and is not JSON."""
    number = float(text)
    if not math.isfinite(number):
        raise CodecError(f"the number {text[:40]} is out of range")
    return number


def _integer(text: str) -> int:
    """Return an integer in a record; `CodecError` for an integer that no float can hold."""
    if len(text) > 300:  # the largest float has 309 digits
        raise CodecError(f"an integer of {len(text)} digits is out of range")
    return int(text)


# `json.loads` would accept NaN and 1e999, which `to_bytes` then could not write, and integers that overflow in every
# comparison with a time; and it builds a decoder per call, for 3 us.
decode_json: Final = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite, parse_int=_integer).decode


def _parse(line: bytes) -> dict[str, Json]:
    try:
        fields = decode_json(_verify(line).decode("ascii"))
    except (ValueError, RecursionError) as error:
        raise CodecError(f"not a record: {error}") from error
    if not isinstance(fields, dict):
        raise CodecError(f"a record holds JSON objects, not {type(fields).__name__}")
    return fields


def _take(fields: dict[str, Json], name: str, kind: type[T]) -> T:
    """Remove a field and return it; the fields that remain in the end are kept as unknown."""
    value = fields.pop(name, None)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise CodecError(f"field {name!r} should be {kind.__name__}, found {type(value).__name__}")
    return value


def _head_to(head: Head) -> dict[str, Json]:
    plain = {name: getattr(head, name) for name in (*_HEAD_FIELDS, "config")}
    return {**head.extra, **head.problem._asdict(), **plain}


def _head_from(fields: dict[str, Json]) -> Head:
    problem = Problem(*(_take(fields, name, str) for name in Problem._fields))
    if "config" not in fields:
        raise CodecError("field 'config' is missing")
    config = fields.pop("config")
    plain: dict[str, Any] = {name: _take(fields, name, kind) for name, kind in _HEAD_FIELDS.items()}
    if not 0 <= plain["generation"] < 1 << 63:  # no lease could outlive a planted huge one, and packs hold 64 bits
        raise CodecError("field 'generation' is out of range")
    if plain["origin"] not in get_args(Origin):
        raise CodecError(f"unknown origin {plain['origin'][:40]!r}; valid: {get_args(Origin)}")
    return Head(problem=problem, config=config, extra=fields, **plain)


def _body_to(body: Body) -> dict[str, Json]:
    measurements: list[Json] = [_measurement_to(m) for m in body.measurements]
    return {**body.extra, "measurements": measurements, "provenance": dict(body.provenance)}


def _body_from(fields: dict[str, Json]) -> Body:
    measurements = tuple(map(_measurement_from, _take(fields, "measurements", list)))
    return Body(measurements=measurements, provenance=_take(fields, "provenance", dict), extra=fields)


def _measurement_to(m: Measurement) -> dict[str, Json]:
    fields: dict[str, Json] = {
        **m.extra,
        **{name: getattr(m, name) for name in _IDENTITY},
        "config": m.config,
        # JSON has no NaN; None keeps the place of a sample that was not a time.
        "samples_s": [s if math.isfinite(s) else None for s in m.samples_s],
        "when": m.when,
    }
    if m.dropped:
        fields["dropped"] = True
    if m.compile_s is not None:
        fields["compile_s"] = m.compile_s
    if m.failure is not None:
        fields["failure"] = m.failure._asdict()
    return fields


def _measurement_from(entry: Json) -> Measurement:
    if not isinstance(entry, dict) or "config" not in entry:
        raise CodecError(f"a measurement is a JSON object with a 'config', not {str(entry)[:40]!r}")
    fields = dict(entry)
    samples = _take(fields, "samples_s", list)
    # Nearly all of a record is samples, and nearly all samples are times: look at the set of types, not at each.
    if not set(map(type, samples)) <= {float}:
        samples = [math.nan if s is None else _number(s) for s in samples]
    failure, compile_s = fields.pop("failure", None), fields.pop("compile_s", None)
    texts: dict[str, Any] = {name: _take(fields, name, str) for name in _IDENTITY}
    return Measurement(
        **texts,
        config=fields.pop("config"),
        samples_s=tuple(samples),
        failure=None if failure is None else _failure_from(failure),
        compile_s=None if compile_s is None else _number(compile_s),
        when=_number(fields.pop("when", None)),
        dropped=fields.pop("dropped", False) is True,
        extra=fields,
    )


def _failure_from(value: Json) -> Failure:
    if not isinstance(value, dict) or not isinstance(value.get("kind"), str):
        raise CodecError(f"a failure is a JSON object with a 'kind', not {str(value)[:40]!r}")
    expires = value.get("expires")
    # A newer release may know more kinds; refusing an unknown kind would hide every measurement beside it.
    kind = cast("FailureKind", value["kind"])
    return Failure(kind, str(value.get("message", "")), None if expires is None else _number(expires))


def _number(value: Json) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise CodecError(f"expected a number, found {type(value).__name__}")
    try:
        return float(value)
    except OverflowError as error:
        raise CodecError(f"a number is out of range: {error}") from error


def merge(mine: Record, theirs: Record) -> Record:
    """Return a record with the measurements of both, and the head and provenance of the higher generation.

    Of equal generations a decision on a caller's arguments counts before one on made-up arguments, one that was raced
    before one that was found in the calls of a running program, and then the later record. A record with a decision
    goes before a record without, and a pinned decision before a measured one. Associative and commutative, so that
    books can be merged in any order.
    """
    both = sorted(
        (*mine.body.measurements, *theirs.body.measurements),
        key=lambda m: (*identity(m), from_whole_tuning(m), _outlasts(m), m.when, canonical_json(_measurement_to(m))),
    )
    latest = {identity(m): m for m in both}  # in the order of the identities still
    newer = max(mine, theirs, key=precedence)
    extra = _merge_unknown(mine.body.extra, theirs.body.extra)
    body = Body(measurements=tuple(latest.values()), provenance=newer.body.provenance, extra=extra)
    merged = Record(replace(newer.head, extra=_merge_unknown(mine.head.extra, theirs.head.extra)), body)
    return merged.fitted()


def _outlasts(m: Measurement) -> bool:
    """Whether a measurement is worth more than a failure that may be gone by now, even a later one."""
    return m.failure is None or m.failure.is_lasting


def from_whole_tuning(m: Measurement) -> bool:
    """Return whether the tuning that a measurement is from came to its end: a choice may rest on it."""
    return INTERRUPTED not in m.extra


def identity(m: Measurement) -> tuple[str, str, str, str, str]:
    """Return the identity of a measurement: configuration, code, policy, environment, check of the output.

    A broken check must not replace the times of the candidates that it rejects.
    """
    return m.fingerprint, m.code, m.policy, m.environment, str(m.extra.get(CHECKED_BY, ""))


def precedence(record: Record) -> tuple[bool, bool, int, bool, bool, float, str, str]:
    """Return the sort key of a record. With fields that a merge alters, merging twice would change the order."""
    head, provenance = record.head, dict(record.body.provenance)
    when = provenance.get("when")
    time = when if isinstance(when, (int, float)) else 0.0
    pinned = head.origin == "pinned"
    # Of two pins the later counts: generations order tunings, and `merge_into` may raise the generation of a pin.
    generation = 0 if pinned else head.generation
    text = canonical_json(_head_to(replace(head, extra={})))
    on_real = provenance.get("values_from", "call") == "call"
    # A race of its own tells more than the calls of a running program do.
    raced = provenance.get("live") is not True
    return head.decided, pinned, generation, on_real, raced, time, text, canonical_json(provenance)


def _merge_unknown(mine: Mapping[str, Json], theirs: Mapping[str, Json]) -> dict[str, Json]:
    """Return every unknown field; of two values the greater text, since "newer" depends on the order of merging."""
    common = {name: max(mine[name], theirs[name], key=canonical_json) for name in mine.keys() & theirs.keys()}
    return {**mine, **theirs, **common}
