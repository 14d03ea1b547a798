"""Tuners of other libraries."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from tunebook._base.errors import DefinitionError
from tunebook._tuning.job import Job, Timing, Tuned

if TYPE_CHECKING:
    from tunebook._selection.tiers import AnyTuner

C = TypeVar("C")


class ForeignTuner:
    """A tuner of another library, which runs jobs like ours."""

    def __init__(self, tuner: AnyTuner) -> None:
        self._tuner = tuner

    def tune(self, job: Job[C]) -> Tuned[C]:
        if job.setup.timing != Timing():
            kind = type(self._tuner).__qualname__
            raise DefinitionError(f"measure= cannot change how a {kind} measures; leave it out, or use tunebook.Tuner")
        candidates = job.candidates if job.search is None else job.search.first(job.size)
        config: C = self._tuner.autotune(*job.parts[0][:3], candidates)
        return Tuned(
            config=config, verdict=None, measurements=(), ran=len(candidates), complete=True, seconds=0.0, configs={}
        )
