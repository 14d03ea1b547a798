"""Records and measurements on their way from rank to rank, in one line each."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from tunebook._base.record_format import Body, Head, Record, canonical_json

if TYPE_CHECKING:
    from tunebook._base.vocabulary import Measurement, Problem


def record_text(record: Record) -> str:
    """Return a record in one line."""
    return canonical_json([*record.to_fields()])


def record_from(text: str) -> Record:
    """Return the record of a line."""
    return Record.from_fields(*json.loads(text))


def part_text(rank: int, problem: Problem, measurements: tuple[Measurement, ...]) -> str:
    """Return what a rank measured in one line."""
    head = Head(problem=problem, config=None, checksum="", origin="tuned")
    return f"{rank} {record_text(Record(head, Body(measurements=measurements)))}"


def part_from(text: str) -> tuple[int, tuple[Measurement, ...]]:
    """Return whose measurements those of a line are, and them."""
    rank, _, record = text.partition(" ")
    return int(rank), record_from(record).body.measurements
