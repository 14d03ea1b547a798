"""A configuration for a problem that was never tuned, by a model of a kernel's times in a book."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tunebook._arrays.device_properties import cores_of
from tunebook._base.errors import CodecError
from tunebook._memo.answer_memo import BoundedDict
from tunebook.search._kept_models import keep_model, kept_model, state_of_entries
from tunebook.search._learned_heuristic import COVERED, Example, numbers_in, values_in
from tunebook.search._size_model import BOUNDED_FROM, SizeModel
from tunebook.search._warm_start import distance, times_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from tunebook._base.record_format import Record
    from tunebook._base.vocabulary import Json, Problem


class Prediction(NamedTuple):
    """A configuration for sizes that were not tuned; it should be `regret` slower than the best, where 0.01 is 1 %.

    The regret is at most `bound` in 95 of 100 problems like those that the model was learnt from; infinite if these are
    too few to say, or if a size is outside of theirs: `outside` then says which. `worth_trying` has the configurations
    that may be the best, the likeliest first.
    """

    config: Json
    regret: float
    bound: float
    worth_trying: tuple[Json, ...]
    problems: int
    outside: str = ""

    def __str__(self) -> str:
        if not math.isfinite(self.bound):
            few = f"{self.problems} tuned sizes, a bound needs {BOUNDED_FROM}" if self.problems < BOUNDED_FROM else ""
            return few or f"no bound: {self.outside}"
        most = f"{'' if self.bound < _TINY else 'at most '}{_percent(self.bound)} in {COVERED:.0%} of such calls"
        expected = f"expected to be {_percent(self.regret)} slower than the best"
        return f"{expected}, {most}; learnt from {self.problems} tuned problems"


def _percent(part: float) -> str:
    return f"<{_TINY:.1%}" if part < _TINY else f"{part:.1%}"


class _BookModel(NamedTuple):
    model: SizeModel | None
    configs: Mapping[str, Json]


# At most so many are learnt from, in 6 s for 72 configurations: more were never tried.
_MOST_PROBLEMS: Final = 700
_MOST_CONFIGS: Final = 100
_TINY: Final = 0.001  # smaller parts would be printed as 0.0%
# A model is learnt once for all calls of a process, until the book has other entries: that takes seconds.
_LEARNT: Final[BoundedDict[str, _BookModel]] = BoundedDict(16)


def predict(
    records: Iterable[Record],
    problem: Problem,
    among: Callable[[Mapping[str, Json]], Collection[str]] | None = None,
) -> Prediction | None:
    """Return a configuration for a problem by the times of a kernel's other problems on the same device.

    `among` returns the fingerprints of the configurations that may be chosen. None if nothing comparable was measured.
    """
    used = [r for r in records if r.problem.device == problem.device and _is_comparable(r, problem)]
    state = state_of_entries(used, cores_of(problem.device))
    learnt = _LEARNT.get(state)
    if learnt is None:
        learnt = _LEARNT[state] = _learn(used, state)
    sizes = _sizes_of(problem)
    if learnt.model is None or not all(size > 0 for size in sizes.values()):
        return None
    found = learnt.model.predict(sizes, None if among is None else among(learnt.configs))
    if not found.keys:
        return None
    worth = tuple(learnt.configs[key] for key in found.keys)
    return Prediction(worth[0], found.regret, found.bound, worth, learnt.model.problems, found.outside)


def _sizes_of(problem: Problem) -> dict[str, float]:
    """Return the sizes in a call key; empty for the key of a key_builder, which may have any form."""
    try:
        return dict(numbers_in(json.loads(problem.call_key)))
    except (ValueError, RecursionError):
        return {}


def _is_comparable(record: Record, problem: Problem) -> bool:
    return record.head.decided and math.isfinite(distance(record.problem.call_key, problem.call_key))


def _learn(records: Sequence[Record], state: str) -> _BookModel:
    examples: list[Example] = []
    configs: dict[str, Json] = {}
    failed: set[str] = set()
    ordered = sorted(records, key=lambda r: r.problem.call_key)
    many = min(len(ordered), _MOST_PROBLEMS)
    for record in (ordered[at * len(ordered) // many] for at in range(many)):
        sizes = _sizes_of(record.problem)
        try:
            times = times_of(record)
        except CodecError:
            continue  # its second line is damaged
        seconds = {key: s for key, s in times.seconds.items() if math.isfinite(s)}
        if len(seconds) > 1 and sizes:
            examples.append(Example(sizes, seconds))
            configs |= {key: times.configs[key] for key in seconds}
            failed |= times.failed  # may fail at other sizes too
    best = {key: min(_slowness(key, example) for example in examples) for key in configs if key not in failed}
    kept = sorted(best, key=best.__getitem__)[:_MOST_CONFIGS]
    values: dict[str, Mapping[str, Any]] = {key: values_in(configs[key]) for key in kept}
    if not values:
        return _BookModel(None, configs)
    known = kept_model(state)
    model = SizeModel(examples, values, cores=cores_of(records[0].problem.device), learnt=known)
    if known is None:
        keep_model(state, model.learnt)
    return _BookModel(model if model.keys else None, configs)


def _slowness(key: str, example: Example) -> float:
    return example.seconds[key] / min(example.seconds.values()) if key in example.seconds else math.inf
