"""How a process joins the agreement of its job: `agree` opens the board and installs a `JobAgreement`.

From then on the selector asks the agreement for every new problem. See `ballot` for the vote, `round` for tuning and
for ranks that die, and `check` for the proof that all ranks hold the same decisions.
"""

from __future__ import annotations

import importlib
import math
from typing import Final, get_args

from tunebook._base.errors import DefinitionError, require
from tunebook._selection.selector import agree_by
from tunebook._selection.single_flight import LEASE_S
from tunebook.fleet._agreement.agreement_state import JobAgreement
from tunebook.fleet._agreement.ballot import Share
from tunebook.fleet._agreement.board import Board
from tunebook.fleet._agreement.redis_board import redis_board
from tunebook.fleet._agreement.round import AgreementOptions
from tunebook.fleet._agreement.torch_board import torch_board


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
    """Make all ranks of a job use one configuration per problem, from now on; None ends the agreement in this process.

    `over` is a service of the job: "jax" (after `jax.distributed.initialize`), "torch" (after `init_process_group`),
    the address of a Redis server with `job`, `rank` and `world`, or a `Board`. Call it in every rank before its first
    tunable call. A configuration that a rank knows wins over tuning; else one rank tunes (`share="leader"`), or each
    rank measures a part of the candidates ("split"). Ranks wait `vote_s` for votes, `lease_s` for a rank without a
    heartbeat, and `deadline_s` for a decision; after the deadline all use the heuristic.
    """
    if over is None:
        agree_by(None)
        return
    if share not in get_args(Share):
        raise DefinitionError(f"unknown share={share!r}; write one of {', '.join(map(repr, get_args(Share)))}")
    if not (0 <= vote_s < deadline_s and 0 < lease_s < math.inf):
        raise DefinitionError(
            f"vote_s={vote_s!r}, deadline_s={deadline_s!r}, lease_s={lease_s!r} are seconds: "
            "0 <= vote_s < deadline_s, and 0 < lease_s"
        )
    board = _open_board(over, job, rank, world)
    agree_by(JobAgreement(board, AgreementOptions(share, vote_s, deadline_s, lease_s)))


def _open_board(over: str | Board, job: str | None, rank: int | None, world: int | None) -> Board:
    if isinstance(over, str):
        if "://" in over:
            return redis_board(over, job=job, rank=rank, world=world)
        if over in _JOB_BOARDS:
            return _JOB_BOARDS[over]()
    elif isinstance(over, Board):
        return over
    raise DefinitionError(
        f"agree({over!r}): ranks cannot agree over that; write 'jax', 'torch', 'redis://...' or a fleet.Board"
    )


def _jax_board() -> Board:
    require("jax", extra="jax", feature="agree('jax')")
    # By name: adapters are above this package, and know it.
    board: Board = importlib.import_module("tunebook.adapters._jax.agree").jax_board()
    return board


_JOB_BOARDS: Final = {"jax": _jax_board, "torch": torch_board}
