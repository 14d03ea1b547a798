"""A configuration for a problem that was never tuned, by a model of a kernel's times in a book."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tunebook._arrays.device_families import cores_of
from tunebook._base.errors import CodecError
from tunebook._memo.answer_memo import BoundedDict
from tunebook.search._learned_heuristic import COVERED, Example, numbers_in, values_in
from tunebook.search._size_model import SizeModel
from tunebook.search._warm_start import distance, times_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from tunebook._base.record_format import Record
    from tunebook._base.vocabulary import Json, Problem


class Prediction(NamedTuple):
    """A configuration for sizes that were not tuned; it should be `regret` slower than the best, where 0.01 is 1 %.

    The regret is at most `bound` in 95 of 100 problems like those that the model was learnt from; infinite if these are
    too few to say. `worth_trying` has the configurations that may be the best, the likeliest first.
    """

    config: Json
    regret: float
    bound: float
    worth_trying: tuple[Json, ...]
    problems: int

    def __str__(self) -> str:
        known = (
            f"at most {self.bound:.1%} in {COVERED:.0%} of such calls" if math.isfinite(self.bound) else "no bound yet"
        )
        return f"{self.regret:.1%} slower than the best expected, {known}; learnt from {self.problems} tuned problems"


class _Learnt(NamedTuple):
    model: SizeModel
    configs: Mapping[str, Json]


# A model is learnt once for all calls of a process, until the book has other entries: that takes seconds.
_LEARNT: Final[BoundedDict[object, _Learnt]] = BoundedDict(16)


def predict(records: Iterable[Record], problem: Problem, candidates: Iterable[str] | None = None) -> Prediction | None:
    """Return a configuration for a problem by the times of a kernel's other problems on the same device.

    `candidates` are the fingerprints to choose from. None if nothing comparable was measured.
    """
    used = [r for r in records if r.problem.device == problem.device and _is_comparable(r, problem)]
    state = problem.device, frozenset((r.problem, r.head.generation, len(r.body.measurements)) for r in used)
    learnt = _LEARNT.get(state)
    if learnt is None:
        learnt = _learn(used)
        if learnt is None:
            return None
        _LEARNT[state] = learnt
    found = learnt.model.predict(dict(numbers_in(json.loads(problem.call_key))), candidates)
    if not found.keys:
        return None
    worth = tuple(learnt.configs[key] for key in found.keys)
    return Prediction(worth[0], found.regret, found.bound, worth, learnt.model.problems)


def _is_comparable(record: Record, problem: Problem) -> bool:
    return record.head.decided and math.isfinite(distance(record.problem.call_key, problem.call_key))


def _learn(records: Sequence[Record]) -> _Learnt | None:
    examples: list[Example] = []
    configs: dict[str, Json] = {}
    failed: set[str] = set()
    for record in records:
        try:
            times, sizes = times_of(record), dict(numbers_in(json.loads(record.problem.call_key)))
        except (CodecError, ValueError, RecursionError):
            continue  # damaged, or the key of a key_builder
        seconds = {key: s for key, s in times.seconds.items() if math.isfinite(s)}
        if len(seconds) > 1 and sizes:
            examples.append(Example(sizes, seconds))
            configs |= {key: times.configs[key] for key in seconds}
            failed |= times.failed  # may fail at other sizes too
    values: dict[str, Mapping[str, Any]] = {
        key: values_in(config) for key, config in configs.items() if key not in failed
    }
    if not examples or not values:
        return None
    model = SizeModel(examples, values, cores=cores_of(records[0].problem.device))
    return _Learnt(model, configs) if model.keys else None
