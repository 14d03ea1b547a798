"""Where the other processes of a job come in: the tier that asks them, while there is an agreement (see `fleet`).

Processes that run one program together must run the same one, or the job hangs, or computes different things in each.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, Protocol, TypeVar

from tunebook._memo.answer_memo import MEMO
from tunebook._selection.tiers import Found, Skipped

if TYPE_CHECKING:
    from tunebook._selection.autotune_tier import AutotuneTier
    from tunebook._selection.deferred_tier import DeferredTier
    from tunebook._selection.tiers import Request, Tier

C = TypeVar("C")


class LocalTiers(NamedTuple, Generic[C]):
    """The tiers by which a process answers alone: what it knows, what it can find out, and what it would guess."""

    known: tuple[Tier[C], ...]
    tuning: DeferredTier[C]
    autotune: AutotuneTier[C]
    guesses: tuple[Tier[C], ...]


class Agreement(Protocol):
    """One answer per problem for all processes of a job; safe to share between threads."""

    def ask(self, request: Request[C], alone: LocalTiers[C]) -> Found[C] | Skipped:
        """Return what all processes use; if there is nothing, this one guesses, as the others do."""

    def known(self, request: Request[C]) -> Found[C] | Skipped:
        """Return what all processes use, if this one has learned it already; nobody is asked."""


_agreement: Agreement | None = None


def agree_by(agreement: Agreement | None) -> None:
    """Answer what is not set by a call itself by an agreement from now on; None ends that."""
    global _agreement  # noqa: PLW0603 - a process is part of one job
    _agreement = agreement
    MEMO.invalidate()


def agreement() -> Agreement | None:
    """Return what this process answers by, or None if it answers alone."""
    return _agreement


# A forked child (an isolated candidate, a data loader) is no rank, and its parent's connections are not its own.
os.register_at_fork(after_in_child=lambda: agree_by(None))


class AgreementTier(Generic[C]):
    """The tier in the place of those of `alone`, but for the guesses. `silent` asks nobody."""

    name: Final = "agreement"

    def __init__(self, agreement: Agreement, alone: LocalTiers[C], *, silent: bool = False) -> None:
        self._agreement, self._alone, self._silent = agreement, alone, silent

    def ask(self, request: Request[C]) -> Found[C] | Skipped:
        return self._agreement.known(request) if self._silent else self._agreement.ask(request, self._alone)


class AnyCandidate(Generic[C]):
    """The last resort of a rank that could not ask the others, of a kernel without a heuristic: it must not tune alone.

    Its candidates are in the same order in every rank.
    """

    name: Final = "any candidate"

    def ask(self, request: Request[C]) -> Found[C] | Skipped:
        if not request.policy.allow_heuristics or request.mode == "replay":
            return Skipped("off: nothing is to be guessed")
        if request.kernel.heuristic(request.inv) is not None:
            return Skipped("the kernel has a heuristic")
        for config in request.kernel.candidates(request.inv):
            return Found(config=config, event="heuristics")
        return Skipped("the kernel has no candidates")


def guesses_of(alone: LocalTiers[C]) -> tuple[Tier[C], ...]:
    """Return the tiers that answer where ranks have not agreed: all of them guess alike."""
    return *alone.guesses, AnyCandidate()


def tiers_of(own: tuple[Tier[C], ...], alone: LocalTiers[C], *, silent: bool = False) -> tuple[Tier[Any], ...] | None:
    """Return the tiers of a call in a job, given those for what is set in this process; None if it answers alone.

    If nobody is to be asked, this process's own tiers say what it would put forward.
    """
    if _agreement is None:
        return None
    agreed = AgreementTier(_agreement, alone, silent=silent)
    return (*own, agreed, *(*alone.known, alone.tuning) * silent, *guesses_of(alone))
