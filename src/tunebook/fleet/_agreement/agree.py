"""How a process joins the agreement of its job."""

from __future__ import annotations

import importlib
import math
from typing import get_args

from tunebook._base.errors import DefinitionError
from tunebook._base.optional import require
from tunebook._selection.selector import agree_by
from tunebook._selection.single_flight import LEASE_S
from tunebook.fleet._agreement.agreement_state import JobAgreement
from tunebook.fleet._agreement.ballot import Share
from tunebook.fleet._agreement.board import Board
from tunebook.fleet._agreement.round import Terms


def agree(
    over: str | Board | None,
    *,
    share: Share = "leader",
    vote_s: float = 1.0,
    deadline_s: float = 300.0,
    lease_s: float = LEASE_S,
    job: str | None = None,
    rank: int | None = None,
    world: int | None = None,
) -> None:
    """Have all ranks of a job use one configuration per problem, from now on; None ends that in this process.

    `over` is what the job has in common: "jax" (after `jax.distributed.initialize`), "torch" (after
    `init_process_group`), the address of a Redis server with `job`, `rank` and `world`, or a `Board`. Call it in every
    rank before its first tunable call. What a rank knows goes before tuning; else one tunes (`share="leader"`), or each
    measures a part of the candidates ("split"). Ranks wait `vote_s` for each other's votes, `lease_s` for one that
    shows no life, and `deadline_s` for a decision, after which all take the heuristic.
    """
    if over is None:
        agree_by(None)
        return
    agree_by(JobAgreement(_board(over, job, rank, world), _checked(Terms(share, vote_s, deadline_s, lease_s))))


def _checked(terms: Terms) -> Terms:
    if terms.share not in get_args(Share):
        raise DefinitionError(f"share={terms.share!r} is none of {', '.join(map(repr, get_args(Share)))}")
    if not (0 <= terms.vote_s < terms.deadline_s and 0 < terms.lease_s < math.inf):
        raise DefinitionError(
            f"vote_s={terms.vote_s!r}, deadline_s={terms.deadline_s!r}, lease_s={terms.lease_s!r} are seconds: "
            "0 <= vote_s < deadline_s, and 0 < lease_s"
        )
    return terms


def _board(over: str | Board, job: str | None, rank: int | None, world: int | None) -> Board:
    if isinstance(over, str):
        if "://" in over:
            from tunebook.fleet._agreement.redis_board import redis_board  # noqa: PLC0415 - an optional package

            return redis_board(over, job=job, rank=rank, world=world)
        return _board_of_the_job(over)
    if isinstance(over, Board):
        return over
    raise _nothing_to_agree_over(over)


def _board_of_the_job(over: str) -> Board:
    if over == "jax":
        return _jax_board()
    if over == "torch":
        from tunebook.fleet._agreement.torch_board import torch_board  # noqa: PLC0415 - an optional package

        return torch_board()
    raise _nothing_to_agree_over(over)


def _jax_board() -> Board:
    require("jax", extra="jax", feature="agree('jax')")
    # By name: adapters are above this package, and know it.
    made: Board = importlib.import_module("tunebook.adapters._jax.agree").jax_board()
    return made


def _nothing_to_agree_over(over: object) -> DefinitionError:
    return DefinitionError(
        f"agree({over!r}): ranks cannot agree over that; write 'jax', 'torch', 'redis://...' or a fleet.Board"
    )
