"""The proof that all ranks of a job hold the same decisions."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from tunebook._base.config_codec import readable
from tunebook._base.errors import Disagreement, Unsupported
from tunebook._base.record_format import blake2b, canonical_json
from tunebook._base.vocabulary import Problem
from tunebook._selection.selector import agreement
from tunebook.fleet._agreement.agreement_state import JobAgreement
from tunebook.fleet._agreement.ballot import named
from tunebook.fleet._agreement.board import Board, poll

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tunebook._base.vocabulary import Json

T = TypeVar("T")

Difference = tuple[Problem, str, tuple[int, ...]]


def assert_agreement(timeout_s: float = 60.0) -> None:
    """Raise `Disagreement` in every rank if two use different configurations for one problem, or if one does not ask.

    To be called by all ranks, as often by each. Digests are compared, in four messages per rank; only ranks whose
    digests differ show what they hold, one of each kind. A problem that one rank has met and another has not is no
    difference. What overrides, overlays and pins have set is not compared.
    """
    held = agreement()
    if not isinstance(held, JobAgreement):
        raise Unsupported("assert_agreement() compares what ranks have agreed on; call fleet.agree(...) first")
    compare(held, timeout_s)


def compare(held: JobAgreement, timeout_s: float) -> None:
    """Compare what one rank holds with what the others do."""
    decisions = {problem: settled.config for (problem, _), settled in held.settled.items()}
    _Round(held.board, decisions, timeout_s).run()


class _Said(NamedTuple):
    """What the first rank to ask found: which ranks must show what they hold, which never asked, and what differs."""

    show: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()
    differences: tuple[Difference, ...] = ()

    def text(self) -> str:
        return json.dumps(self)


def _said_from(text: str) -> _Said:
    show, missing, differences = json.loads(text)
    listed = tuple((Problem(*problem), config, tuple(ranks)) for problem, config, ranks in differences)
    return _Said(tuple(show), tuple(missing), listed)


class _Round:
    """One call of `assert_agreement`, in one rank. The first rank to come compares for all."""

    def __init__(self, board: Board, decisions: Mapping[Problem, Json], timeout_s: float) -> None:
        self.board, self.timeout_s = board, timeout_s
        self.table = sorted([list(problem), canonical_json(config)] for problem, config in decisions.items())
        # Counted on the board, and not here: a rank that is started again goes on where it was.
        self.name = f"check/{board.add(f'check/{board.rank}', 1)}"

    def run(self) -> None:
        digest = blake2b(json.dumps(self.table).encode(), digest_size=16).hexdigest()
        mine = json.dumps([self.board.rank, digest])
        if self.board.first(f"{self.name}/first", mine) == mine:
            said = self._compare(digest)
        else:
            self.board.post(f"{self.name}/digests", mine)
            said = self._hear("said")
        if said.show:
            said = self._show(said)
        self._raise(said)

    def _compare(self, digest: str) -> _Said:
        digests = self._gather("digests", set(range(self.board.world)), {self.board.rank: digest})
        missing = tuple(sorted(set(range(self.board.world)) - digests.keys()))
        by_digest = _ranks_by(digests)
        show = tuple(ranks[0] for ranks in by_digest.values()) if len(by_digest) > 1 else ()
        said = _Said(show, missing)
        self.board.first(f"{self.name}/said", said.text())
        if not show:
            return said
        mine = {self.board.rank: self.table} if self.board.rank in show else {}
        tables = self._gather("tables", set(show), mine)
        differences = _differences(tables, {ranks[0]: ranks for ranks in by_digest.values()})
        said = _Said((), missing or tuple(sorted(set(show) - tables.keys())), differences)
        self.board.first(f"{self.name}/differences", said.text())
        return said

    def _show(self, said: _Said) -> _Said:
        if self.board.rank in said.show:
            self.board.post(f"{self.name}/tables", json.dumps([self.board.rank, self.table]))
        return self._hear("differences")

    def _gather(self, topic: str, ranks: set[int], known: dict[int, Any]) -> dict[int, Any]:
        def all_in() -> dict[int, Any] | None:
            known.update(json.loads(text) for text in self.board.posted(f"{self.name}/{topic}"))
            return known if ranks <= known.keys() else None

        poll(all_in, self.timeout_s)
        return known

    def _hear(self, what: str) -> _Said:
        # The one who compares gives up after the timeout, and then has to say so.
        text = self.board.wait(f"{self.name}/{what}", self.timeout_s + 5.0)
        if text is None:
            raise Disagreement(f"no rank has compared what the ranks hold in {self.timeout_s:g} s: it may have ended")
        return _said_from(text)

    def _raise(self, said: _Said) -> None:
        lines = []
        if said.differences:
            lines.append("ranks of this job use different configurations:")
        for problem, texts in _by_problem(said.differences).items():
            lines.append(f"  {problem.op} on {problem.device}, {problem.call_key}")
            lines += [f"    {named(ranks)}: {readable(json.loads(config))}" for config, ranks in texts]
        if said.missing:
            lines.append(f"{named(said.missing)} of {self.board.world} did not call assert_agreement in time.")
        if lines:
            lines.append("Call fleet.agree(...) in every rank before its first tunable call.")
            raise Disagreement("\n".join(lines), said.differences, said.missing)


def _ranks_by(digests: Mapping[int, str]) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for rank in sorted(digests):
        found[digests[rank]] = (*found.get(digests[rank], ()), rank)
    return found


def _by_problem(differences: tuple[Difference, ...]) -> dict[Problem, list[tuple[str, tuple[int, ...]]]]:
    found: dict[Problem, list[tuple[str, tuple[int, ...]]]] = {}
    for problem, config, ranks in differences:
        found.setdefault(problem, []).append((config, ranks))
    return found


def _differences(tables: Mapping[int, Any], like: Mapping[int, tuple[int, ...]]) -> tuple[Difference, ...]:
    """Return who uses what where that differs; `like` are the ranks that hold the same as the one with a table."""
    uses: dict[Problem, dict[str, list[int]]] = {}
    for rank, table in sorted(tables.items()):
        for problem, config in table:
            uses.setdefault(Problem(*problem), {}).setdefault(config, []).extend(like[rank])
    return tuple(
        (problem, config, tuple(sorted(ranks)))
        for problem, configs in sorted(uses.items())
        if len(configs) > 1
        for config, ranks in sorted(configs.items(), key=lambda item: min(item[1]))
    )
