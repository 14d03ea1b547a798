"""An answer without tuning, from the nearest tuned problems."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, NamedTuple

from tunebook._keys.call_key import spell_out
from tunebook.search._warm_start import rank_records

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tunebook._base.record_format import Record
    from tunebook._base.vocabulary import Json, Problem

_NEIGHBOURS: Final = 3


class Nearest(NamedTuple):
    """The configuration that near problems agree on. `confidence` is the expected part of the best speed, at most 1.

    It is the part that the configuration reached on the near problems, weighted by their distance and device.
    """

    config: Json
    confidence: float
    problem: Problem

    def __str__(self) -> str:
        near = ", ".join(spell_out(self.problem.call_key))
        return f"{self.confidence:.0%} of the best speed expected, from the nearest tuned problem ({near})"


def nearest(records: Iterable[Record], problem: Problem) -> Nearest | None:
    """Return the configuration that did best on the problems nearest to one; None if nothing near was tuned."""
    near = [source for source in rank_records(records, problem) if source.times.seconds][:_NEIGHBOURS]
    if not near:
        return None
    shares: dict[str, float] = {}
    total = math.fsum(source.worth for source in near)
    for source in near:
        best = next(iter(source.times.seconds.values()))
        for fp, seconds in source.times.seconds.items():
            # A record without times holds one choice, which counts as the best there.
            share = best / seconds if math.isfinite(seconds) else 1.0
            shares[fp] = shares.get(fp, 0.0) + share * source.worth / total
    chosen = max(sorted(shares), key=shares.__getitem__)
    config = next(source.times.configs[chosen] for source in near if chosen in source.times.configs)
    return Nearest(config, shares[chosen] * near[0].worth, near[0].times.problem)
