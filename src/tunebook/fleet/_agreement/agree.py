"""The public functions: `agree` joins the agreement of a job, and `assert_agreement` proves that all ranks hold it.

`agree` opens the board and installs a `JobAgreement`, which the selector asks for every new problem: see `log` for the
vote, and `round` for tuning and for ranks that die.

For the proof, every rank sends a digest of its decisions to the board, and the first rank to arrive compares them for
all. Only where digests differ do ranks send the decisions themselves, one rank per digest. A rank that is dead or never
calls is named after the timeout.
"""

from __future__ import annotations

import importlib
import json
import math
from collections import defaultdict
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

from tunebook._base.config_codec import readable
from tunebook._base.errors import DefinitionError, Disagreement, Unsupported, require
from tunebook._base.record_format import blake2b, canonical_json
from tunebook._base.vocabulary import Problem
from tunebook._selection.selector import agree_by, agreement
from tunebook._selection.single_flight import LEASE_S
from tunebook.fleet._agreement.agreement_state import JobAgreement
from tunebook.fleet._agreement.board import Board, RedisBoard, poll, torch_board
from tunebook.fleet._agreement.log import Share, list_ranks
from tunebook.fleet._agreement.round import AgreementOptions
from tunebook.stores._remote import without_secrets

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tunebook._base.vocabulary import Json

Difference = tuple[Problem, str, tuple[int, ...]]


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
        service, is_url, _ = over.partition("://")
        if is_url:
            if job and rank is not None and world is not None and 0 <= rank < world:
                return RedisBoard(over, job=job, rank=rank, world=world)
            raise DefinitionError(
                f"agree({service}://...) got job={job!r}, rank={rank!r}, world={world!r}; a server does not know the "
                "job, so write job='a name that no other run has', rank=..., world=... with 0 <= rank < world"
            )
        if over == "torch":
            return torch_board()
        if over == "jax":
            require("jax", extra="jax", feature="agree('jax')")
            # By name: adapters are above this package, and know it.
            board: Board = importlib.import_module("tunebook.adapters._jax.agree").jax_board()
            return board
    elif isinstance(over, Board):
        return over
    given = without_secrets(over) if isinstance(over, str) else over
    raise DefinitionError(
        f"agree({given!r}): ranks cannot agree over that; write 'jax', 'torch', 'redis://...' or a fleet.Board"
    )


def assert_agreement(timeout_s: float = 60.0) -> None:
    """Raise `Disagreement` in every rank if two ranks use different configurations for one problem, or one is missing.

    All ranks must call it, and equally often. Ranks compare digests, in four messages each; only if digests differ do
    some ranks send their decisions. A problem that only some ranks have met is not a difference. Configurations set by
    overrides, overlays and pins are not compared.
    """
    current = agreement()
    if not isinstance(current, JobAgreement):
        raise Unsupported("assert_agreement() compares the decisions of ranks; call fleet.agree(...) first")
    compare(current, timeout_s)


def compare(job: JobAgreement, timeout_s: float) -> None:
    """Compare this rank's decisions with the decisions of the other ranks."""
    _ComparisonRound(job.board, {problem: d.config for (problem, _), d in job.decisions.items()}, timeout_s).run()


class _ComparisonResult(NamedTuple):
    """The ranks that must send their decisions, the ranks that never called, and the differences."""

    show: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()
    differences: tuple[Difference, ...] = ()


class _ComparisonRound:
    """One call of `assert_agreement`, in one rank. The first rank to arrive compares for all."""

    def __init__(self, board: Board, decisions: Mapping[Problem, Json], timeout_s: float) -> None:
        self.board, self.timeout_s = board, timeout_s
        self.table = sorted([list(problem), canonical_json(config)] for problem, config in decisions.items())
        # Counted on the board, and not here: a rank that is started again goes on where it was.
        self.name = f"check/{board.add(f'check/{board.rank}', 1)}"

    def run(self) -> None:
        digest = blake2b(json.dumps(self.table).encode(), digest_size=16).hexdigest()
        mine = json.dumps([self.board.rank, digest])
        if self.board.first(f"{self.name}/first", mine) == mine:
            result = self._compare(digest)
        else:
            self.board.post(f"{self.name}/digests", mine)
            result = self._receive("result")
            if self.board.rank in result.show:
                self.board.post(f"{self.name}/tables", json.dumps([self.board.rank, self.table]))
            if result.show:
                result = self._receive("differences")
        self._raise(result)

    def _compare(self, digest: str) -> _ComparisonResult:
        digests = self._gather("digests", set(range(self.board.world)), {self.board.rank: digest})
        missing = tuple(sorted(set(range(self.board.world)) - digests.keys()))
        by_digest: dict[str, list[int]] = defaultdict(list)
        for rank in sorted(digests):
            by_digest[digests[rank]].append(rank)
        show = tuple(ranks[0] for ranks in by_digest.values()) if len(by_digest) > 1 else ()
        result = _ComparisonResult(show, missing)
        self.board.first(f"{self.name}/result", json.dumps(result))
        if not show:
            return result
        mine = {self.board.rank: self.table} if self.board.rank in show else {}
        tables = self._gather("tables", set(show), mine)
        differences = _differences(tables, {ranks[0]: ranks for ranks in by_digest.values()})
        result = _ComparisonResult((), missing or tuple(sorted(set(show) - tables.keys())), differences)
        self.board.first(f"{self.name}/differences", json.dumps(result))
        return result

    def _gather(self, topic: str, ranks: set[int], known: dict[int, Any]) -> dict[int, Any]:
        def look() -> dict[int, Any] | None:
            known.update(json.loads(text) for text in self.board.posted(f"{self.name}/{topic}"))
            return known if ranks <= known.keys() else None

        poll(look, self.timeout_s)
        return known

    def _receive(self, key: str) -> _ComparisonResult:
        # The rank that compares gives up after the timeout, and must then still publish its result.
        text = self.board.wait(f"{self.name}/{key}", self.timeout_s + 5.0)
        if text is None:
            raise Disagreement(f"no rank compared the decisions within {self.timeout_s:g} s: the first may have died")
        show, missing, differences = json.loads(text)
        listed = tuple((Problem(*problem), config, tuple(ranks)) for problem, config, ranks in differences)
        return _ComparisonResult(tuple(show), tuple(missing), listed)

    def _raise(self, result: _ComparisonResult) -> None:
        lines = []
        if result.differences:
            lines.append("ranks of this job use different configurations:")
        for problem, uses in groupby(result.differences, itemgetter(0)):
            lines.append(f"  {problem.op} on {problem.device}, {problem.call_key}")
            lines += [f"    {list_ranks(ranks)}: {readable(json.loads(config))}" for _, config, ranks in uses]
        if result.missing:
            lines.append(f"{list_ranks(result.missing)} of {self.board.world} did not call assert_agreement in time.")
        if lines:
            lines.append("Call fleet.agree(...) in every rank before its first tunable call.")
            raise Disagreement("\n".join(lines), result.differences, result.missing)


def _differences(tables: Mapping[int, Any], same: Mapping[int, list[int]]) -> tuple[Difference, ...]:
    """Return the problems with several configurations; `same` are the ranks that hold the table of a rank too."""
    uses: dict[Problem, dict[str, list[int]]] = {}
    for rank, table in sorted(tables.items()):
        for problem, config in table:
            uses.setdefault(Problem(*problem), {}).setdefault(config, []).extend(same[rank])
    return tuple(
        (problem, config, tuple(sorted(ranks)))
        for problem, configs in sorted(uses.items())
        if len(configs) > 1
        for config, ranks in sorted(configs.items(), key=lambda item: min(item[1]))
    )
