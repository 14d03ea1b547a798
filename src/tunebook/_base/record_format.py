"""A record: everything the book knows about one problem, as bytes that can tell whether they are whole.

Two lines of JSON, each behind its own checksum::

    9d1c2a04 {"call_key":...,"checksum":...,"config":...,"device":...,"op":...}
    5be1f7c3 {"measurements":[...],"provenance":{...}}

A hit needs the first line only, so the second is not even parsed then: a record with 500 measurements answers as
fast as one with none. Fields that this version does not know are kept, so that an older release can merge into a
newer one's record without losing what it does not understand.
"""

from __future__ import annotations

import json
import math
import zlib
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, TypeVar, cast, get_args

from tunebook._base.errors import CodecError
from tunebook._base.vocabulary import Failure, FailureKind, Json, Measurement, Origin, Problem

if TYPE_CHECKING:
    from collections.abc import Mapping

# A record above this is refused when written and not read at all when met: a 100 MB value is a mistake, and
# reading it would stall the call that met it.
MAX_RECORD_BYTES: Final = 8 << 20

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What a hit needs. `config` is encoded; `generation` is the lease that wrote it (see `_pending`).

    A `config` of None is no decision: all candidates failed, and the body says how. None, because no call can get
    it as its configuration, so that whoever does not know about such records takes them for a miss.
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
        """Whether there is a configuration in it."""
        return self.config is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """What explanations and later tunings need."""

    measurements: tuple[Measurement, ...] = ()
    provenance: Mapping[str, Json] = field(default_factory=dict)
    extra: Mapping[str, Json] = field(default_factory=dict)


class Record:
    """A head, and a body that is parsed when it is first asked for. Immutable; equal by content."""

    __slots__ = ("_body", "_data", "head")

    def __init__(self, head: Head, body: Body | None = None) -> None:
        self.head: Final = head
        self._body: Body | None = body or Body()
        self._data = b""  # only a record that was read has its bytes

    @classmethod
    def from_bytes(cls, data: bytes) -> Record:
        """Read a record back; `CodecError` if the bytes are not whole, or their first line is not a head."""
        if len(data) > MAX_RECORD_BYTES:
            raise CodecError(f"a record of {len(data)} bytes is over the limit of {MAX_RECORD_BYTES}")
        lines = data.split(b"\n")
        if len(lines) != 3 or lines[2]:
            raise CodecError(f"a record has two lines, each ended; this has {len(lines) - 1}")
        record = cls.__new__(cls)
        record.head = _head_from(_parse(lines[0]))  # type: ignore[misc] # Final, and this is the other constructor
        # The body's own checksum is verified here, its JSON parsed later: a wrong byte is found at once, for 1 us.
        _verify(lines[1])
        record._body = None  # noqa: SLF001 - this is the other constructor
        record._data = data  # noqa: SLF001 - as above
        return record

    @classmethod
    def from_fields(cls, head: dict[str, Json], body: dict[str, Json]) -> Record:
        """Make a record of what `to_fields` gave; `CodecError` if it is something else."""
        return cls(_head_from(dict(head)), _body_from(dict(body)))

    @property
    def problem(self) -> Problem:
        """The problem that this record answers."""
        return self.head.problem

    @property
    def body(self) -> Body:
        """Measurements and provenance; `CodecError` if the second line, though whole, does not hold them."""
        if self._body is None:
            self._body = _body_from(_parse(self._data.split(b"\n")[1]))
        return self._body

    @property
    def provenance(self) -> Mapping[str, Json]:
        """The provenance alone: measurements are most of a record, and who goes through 100,000 has no use for them."""
        if self._body is None:
            # Keys are in order, so it comes after the measurements; a quote inside a text would have a backslash.
            _, found, rest = self._data.rpartition(b'],"provenance":{')
            try:
                provenance = _decode(f'{{"provenance":{{{rest.decode("ascii")}')["provenance"] if found else None
            except (ValueError, RecursionError):
                provenance = None  # something in it, or behind it, has the same name
            if isinstance(provenance, dict):
                return provenance
        return self.body.provenance

    def to_fields(self) -> tuple[dict[str, Json], dict[str, Json]]:
        """Return head and body as JSON objects, for a store that keeps them in a file of its own form."""
        return _head_to(self.head), _body_to(self.body)

    def to_bytes(self) -> bytes:
        """Write the record down; the same record always gives the same bytes."""
        if self._data:  # it goes out as it came in: copying a book needs no body parsed, and alters nothing
            return self._data
        data = _line(_head_to(self.head)) + _line(_body_to(self.body))
        if len(data) > MAX_RECORD_BYTES:
            raise CodecError(
                f"the record of {self.problem.op!r} takes {len(data)} bytes, over the limit of {MAX_RECORD_BYTES}. "
                "Keep large values out of configurations: store a name or an index instead."
            )
        return data

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
    """Return the one text of a JSON value: sorted keys, no spaces, ASCII, no NaN; `CodecError` if it has none."""
    try:
        return json.dumps(value, separators=(",", ":"), sort_keys=True, ensure_ascii=True, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise CodecError(f"not a JSON value: {error}") from error


def _line(fields: dict[str, Json]) -> bytes:
    text = canonical_json(fields).encode("ascii")
    return b"%08x %s\n" % (zlib.crc32(text), text)


def _verify(line: bytes) -> bytes:
    mark, text = line[:9], line[9:]
    if mark != b"%08x " % zlib.crc32(text):
        raise CodecError("checksum does not match: the record was cut short or altered")
    return text


def _refuse_constant(name: str) -> None:
    raise CodecError(f"{name} is not JSON")


# `json.loads` would let NaN in, which `to_bytes` then could not write; and it builds a decoder per call, for 3 us.
_decode: Final = json.JSONDecoder(parse_constant=_refuse_constant).decode


def _parse(line: bytes) -> dict[str, Json]:
    try:
        fields = _decode(_verify(line).decode("ascii"))
    except (ValueError, RecursionError) as error:
        raise CodecError(f"not a record: {error}") from error
    if not isinstance(fields, dict):
        raise CodecError(f"a record holds JSON objects, not {type(fields).__name__}")
    return fields


def _take(fields: dict[str, Json], name: str, kind: type[T]) -> T:
    """Remove a field and return it; whatever is left over in the end is kept as unknown."""
    value = fields.pop(name, None)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise CodecError(f"field {name!r} should be {kind.__name__}, found {type(value).__name__}")
    return value


def _head_to(head: Head) -> dict[str, Json]:
    return {
        **head.extra,
        "device": head.problem.device,
        "op": head.problem.op,
        "call_key": head.problem.call_key,
        "config": head.config,
        "checksum": head.checksum,
        "origin": head.origin,
        "environment": head.environment,
        "generation": head.generation,
    }


def _head_from(fields: dict[str, Json]) -> Head:
    problem = Problem(_take(fields, "device", str), _take(fields, "op", str), _take(fields, "call_key", str))
    if "config" not in fields:
        raise CodecError("field 'config' is missing")
    config = fields.pop("config")
    generation = _take(fields, "generation", int)
    if not 0 <= generation < 1 << 63:  # a planted one could never be outlived, and packs hold 64 bits
        raise CodecError("field 'generation' is out of range")
    origin = _take(fields, "origin", str)
    if origin not in get_args(Origin):
        raise CodecError(f"origin {origin[:40]!r} is none of {get_args(Origin)}")
    return Head(
        problem=problem,
        config=config,
        checksum=_take(fields, "checksum", str),
        origin=cast("Origin", origin),
        environment=_take(fields, "environment", str),
        generation=generation,
        extra=fields,
    )


def _body_to(body: Body) -> dict[str, Json]:
    measurements: list[Json] = [_measurement_to(m) for m in body.measurements]
    return {**body.extra, "measurements": measurements, "provenance": dict(body.provenance)}


def _body_from(fields: dict[str, Json]) -> Body:
    measurements = []
    for entry in _take(fields, "measurements", list):
        if not isinstance(entry, dict):
            raise CodecError(f"a measurement is a JSON object, not {type(entry).__name__}")
        measurements.append(_measurement_from(dict(entry)))
    return Body(measurements=tuple(measurements), provenance=_take(fields, "provenance", dict), extra=fields)


def _measurement_to(m: Measurement) -> dict[str, Json]:
    fields: dict[str, Json] = {
        **m.extra,
        "config": m.config,
        "fingerprint": m.fingerprint,
        "code": m.code,
        "policy": m.policy,
        "environment": m.environment,
        # JSON has no NaN; None keeps the place of a sample that was not a time.
        "samples_s": [s if math.isfinite(s) else None for s in m.samples_s],
        "when": m.when,
    }
    if m.dropped:
        fields["dropped"] = True
    if m.compile_s is not None:
        fields["compile_s"] = m.compile_s
    if m.failure is not None:
        fields["failure"] = {"kind": m.failure.kind, "message": m.failure.message, "expires": m.failure.expires}
    return fields


def _measurement_from(fields: dict[str, Json]) -> Measurement:
    if "config" not in fields:
        raise CodecError("a measurement without 'config'")
    config = fields.pop("config")
    failure = fields.pop("failure", None)
    compile_s = fields.pop("compile_s", None)
    return Measurement(
        config=config,
        fingerprint=_take(fields, "fingerprint", str),
        code=_take(fields, "code", str),
        policy=_take(fields, "policy", str),
        environment=_take(fields, "environment", str),
        samples_s=_samples_from(_take(fields, "samples_s", list)),
        failure=None if failure is None else _failure_from(failure),
        compile_s=None if compile_s is None else _number(compile_s),
        when=_number(fields.pop("when", None)),
        dropped=fields.pop("dropped", False) is True,
        extra=fields,
    )


def _samples_from(values: list[Json]) -> tuple[float, ...]:
    # Nearly all of a record is samples, and nearly all samples are times: one look at their types, and not one each.
    if set(map(type, values)) <= {float}:
        return tuple(cast("list[float]", values))
    return tuple(math.nan if s is None else _number(s) for s in values)


def _failure_from(value: Json) -> Failure:
    if not isinstance(value, dict):
        raise CodecError(f"a failure is a JSON object, not {type(value).__name__}")
    kind = value.get("kind")
    if not isinstance(kind, str):
        raise CodecError(f"a failure's kind is a name, not {type(kind).__name__}")
    expires = value.get("expires")
    return Failure(
        # A newer release may know more kinds than we do; refusing one would hide every other measurement beside it.
        kind=cast("FailureKind", kind),
        message=str(value.get("message", "")),
        expires=None if expires is None else _number(expires),
    )


def _number(value: Json) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise CodecError(f"expected a number, found {type(value).__name__}")
    return float(value)


def merge(mine: Record, theirs: Record) -> Record:
    """Return one record with the measurements of both; head and provenance of the higher generation, then the later.

    A decision goes before none, and one that somebody pinned before one that was measured. Associative and
    commutative, so that books can be merged in any order.
    """
    by_identity = {identity(m): m for m in sorted((*mine.body.measurements, *theirs.body.measurements), key=_order)}
    newer = max(mine, theirs, key=_precedence)
    body = Body(
        measurements=tuple(sorted(by_identity.values(), key=_order)),
        provenance=newer.body.provenance,
        extra=_merge_unknown(mine.body.extra, theirs.body.extra),
    )
    return Record(replace(newer.head, extra=_merge_unknown(mine.head.extra, theirs.head.extra)), body)


def identity(m: Measurement) -> tuple[str, str, str, str]:
    """Return what makes two measurements the same one: configuration, code, policy, environment."""
    return m.fingerprint, m.code, m.policy, m.environment


def _order(m: Measurement) -> tuple[object, ...]:
    return (*identity(m), m.when, canonical_json(_measurement_to(m)))


def _precedence(record: Record) -> tuple[bool, bool, int, float, str, str]:
    """Order records by what the winner hands on whole; were the rest in it, merging twice would change the order."""
    provenance = dict(record.body.provenance)
    when = provenance.get("when")
    time = when if isinstance(when, (int, float)) else 0.0
    head = canonical_json(_head_to(replace(record.head, extra={})))
    pinned = record.head.origin == "pinned"
    # Of two pins the later counts: generations order tunings, and merging may raise that of a pin (`merge_into`).
    generation = 0 if pinned else record.head.generation
    return record.head.decided, pinned, generation, time, head, canonical_json(provenance)


def _merge_unknown(mine: Mapping[str, Json], theirs: Mapping[str, Json]) -> dict[str, Json]:
    """Keep every unknown field; of two values the greater text, since "the newer" depends on the order of merging."""
    both = {**mine, **theirs}
    for name in mine.keys() & theirs.keys():
        both[name] = max(mine[name], theirs[name], key=canonical_json)
    return both
