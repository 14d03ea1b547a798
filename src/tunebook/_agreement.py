"""One configuration per problem for all processes of a job: the first that any of them chose.

Processes that run one program together must run the same one, or the job hangs, or computes different things in each.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from tunebook._codec import encode, fingerprint_of
from tunebook._errors import CodecError, warn_once
from tunebook._gate import GATE
from tunebook._record import canonical_json
from tunebook._space import Space
from tunebook.stores import problem_id

if TYPE_CHECKING:
    from tunebook._book import Call

C = TypeVar("C")


class Board(Protocol):
    """What all processes of a job can read and write; safe to share between threads."""

    def first(self, key: str, value: str) -> str:
        """Write a value under a key unless there is one, and return the one that stands, which is the same for all."""


_board: Board | None = None


def agree_over(board: Board | None) -> None:
    """Agree with the other processes of the job on what is chosen from now on; None ends that."""
    global _board  # noqa: PLW0603 - a process is part of one job
    _board = board
    GATE.invalidate()


def agreed(call: Call[C], config: C) -> C:
    """Return the configuration that all processes use for a call, given what this one has chosen."""
    if _board is None:
        return config
    try:
        mine = canonical_json(encode(config))
    except CodecError as error:
        warn_once("agreement", call.problem.op, f"{call.problem.op}: not agreed upon with other processes: {error}")
        return config
    stands = _board.first(f"tunebook/{problem_id(call.problem)}", mine)
    return config if stands == mine else _live(call, stands, config)


def _live(call: Call[C], stands: str, config: C) -> C:
    """Return the live candidate that another process has written down."""
    encoded = json.loads(stands)
    wanted = fingerprint_of(encoded)
    heuristic: Any = call.kernel.heuristic(call.inv)
    candidates: Any = call.kernel.candidates(call.inv)
    if isinstance(candidates, Space):  # of any size, so it is not listed
        candidates = (member,) if (member := candidates.decoded(encoded)) is not None else ()
    for candidate in (*candidates, *(() if heuristic is None else (heuristic,))):
        if fingerprint_of(encode(candidate)) == wanted:
            return candidate  # type: ignore[no-any-return] # one of the kernel's own
    op = call.problem.op
    warn_once("agreement", op, f"{op}: another process chose {stands}, which is no candidate here; using {config!r}")
    return config
