"""The proof that all ranks of a job hold the same decisions.

Every rank sends a digest of its decisions to the board, and the first rank to arrive compares them for all. Only where
digests differ do ranks send the decisions themselves, one rank per digest. A rank that is dead or never calls is named
after the timeout.
"""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from tunebook._base.config_codec import readable
from tunebook._base.errors import Disagreement, Unsupported
from tunebook._base.record_format import blake2b, canonical_json
from tunebook._base.vocabulary import Problem
from tunebook._selection.selector import agreement
from tunebook.fleet._agreement.agreement_state import JobAgreement
from tunebook.fleet._agreement.ballot import list_ranks
from tunebook.fleet._agreement.board import Board, poll

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tunebook._base.vocabulary import Json

Difference = tuple[Problem, str, tuple[int, ...]]


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
