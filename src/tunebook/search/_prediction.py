"""A configuration for a problem that was never tuned, by a model of a kernel's times in a book."""

from __future__ import annotations

import math
import os
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tunebook._arrays.device_properties import cores_of
from tunebook._base.errors import CodecError, require
from tunebook._base.locks import InterruptSafeLock
from tunebook._memo.answer_memo import BoundedDict
from tunebook.search._kept_models import KeptModel, digests_of, keep_model, kept_model
from tunebook.search._key_numbers import kind_and_sizes
from tunebook.search._learned_heuristic import COVERED, Example, values_in
from tunebook.search._size_model import BOUNDED_FROM, SizeModel, modelled
from tunebook.search._tuned_sizes import TunedSizes
from tunebook.search._warm_start import times_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from tunebook._base.record_format import Record
    from tunebook._base.vocabulary import Json, Problem


class Prediction(NamedTuple):
    """A configuration for sizes that were not tuned; it should be `regret` slower than the best, where 0.01 is 1 %.

    The regret is at most `bound` in 95 of 100 problems like those that the model was learnt from; infinite if too few
    of the `problems` are `judges` of choices, or for the reason in `outside`. `worth_trying` has the configurations
    that may be the best, the likeliest first; `also` the fingerprints of others, of which the model knows too little.
    """

    config: Json
    regret: float
    bound: float
    worth_trying: tuple[Json, ...]
    problems: int
    judges: int
    outside: str = ""
    also: tuple[str, ...] = ()

    def __str__(self) -> str:
        if math.isfinite(self.bound):
            most = f"{'' if self.bound < _TINY else 'at most '}{_percent(self.bound)} in {COVERED:.0%} of such calls"
            expected = f"expected to be {_percent(self.regret)} slower than the best"
            return f"{expected}, {most}; learnt from {self.problems} tuned problems"
        if self.judges >= BOUNDED_FROM:
            return f"no bound: {self.outside}"
        tuned = f"{self.problems} tuned size{'s' * (self.problems != 1)}"
        fewer = "" if self.judges in {0, self.problems} else f" ({self.judges} of them show how good a choice is)"
        return f"{tuned}{fewer}, a bound needs {BOUNDED_FROM}"


def _percent(part: float) -> str:
    return f"<{_TINY:.1%}" if part < _TINY else f"{part:.1%}"


class _BookModel(NamedTuple):
    """A model of the times of `records`; `configs` has all that worked, and `tried` the sizes where each was tried.

    `moody` ones work at some sizes and fail at others. `kept` is the model as it is kept on disk. `areas` remembers the
    sizes of rarely tried ones.
    """

    model: SizeModel | None
    records: Sequence[Record]
    configs: Mapping[str, Json]
    tried: Mapping[str, Sequence[Mapping[str, float]]]
    moody: frozenset[str]
    areas: dict[str, TunedSizes]
    kept: KeptModel | None = None

    def has_tried(self, key: str, sizes: Mapping[str, float], problems: int) -> bool:
        """Whether a configuration was tried at half of the problems, or near these sizes."""
        where = self.tried.get(key, ())
        if 2 * len(where) >= problems or not where:
            return bool(where)
        if key not in self.areas:
            self.areas[key] = TunedSizes(require("numpy", feature="a prediction"), where)
        return not self.areas[key].outside(sizes)


# At most so many are learnt from, in 6 s for 72 configurations: more were never tried.
_MOST_PROBLEMS: Final = 700
_MOST_CONFIGS: Final = 100
_TINY: Final = 0.001  # smaller parts would be printed as 0.0%
# By the digests of the entries; and by the identities of records, because a book lists the same ones for a while, and
# to read 1500 of them for their digests takes longer than a prediction.
_LEARNT: Final[BoundedDict[frozenset[str], _BookModel]] = BoundedDict(16)
_LATELY: Final[BoundedDict[tuple[int, ...], _BookModel]] = BoundedDict(16)


class _Learning:
    """One thread learns at a time: the others most likely wait for the same model, and for the interpreter."""

    lock = InterruptSafeLock()

    @classmethod
    def renew(cls) -> None:
        """Take a new lock, in a forked child."""
        cls.lock = InterruptSafeLock()


os.register_at_fork(after_in_child=_Learning.renew)


def predict(
    records: Iterable[Record],
    problem: Problem,
    among: Callable[[Mapping[str, Json]], Collection[str]] | None = None,
    listed: Collection[str] = (),
) -> Prediction | None:
    """Return a configuration for a problem by the times of a kernel's other problems on the same device.

    `among` returns the fingerprints of the configurations that may be chosen; `listed` has those of all candidates, if
    they are no searched space: there is no bound if one of them was never tried near the sizes. None if nothing
    comparable was measured.
    """
    kind, sizes = kind_and_sizes(problem.call_key)
    used = [r for r in records if r.problem.device == problem.device and _has_kind(r, kind)]
    if not used or not sizes:
        return None
    learnt = _learnt_from(used, cores_of(problem.device))
    if learnt.model is None:
        return None
    found = learnt.model.predict(sizes, None if among is None else among(learnt.configs))
    if not found.keys:
        return None
    worth, problems = tuple(learnt.configs[key] for key in found.keys), learnt.model.problems
    new = [key for key in listed if not learnt.has_tried(key, sizes, problems)]
    unknown = f"{len(new)} candidate{'s were' if len(new) > 1 else ' was'} never tried near these sizes" if new else ""
    return Prediction(
        worth[0],
        found.regret,
        math.inf if unknown else found.bound,
        worth,
        problems,
        len(learnt.model.learnt.left_out),
        found.outside or unknown,
        (*new, *(key for key in listed if key in learnt.moody)),
    )


def _has_kind(record: Record, kind: str) -> bool:
    return record.head.decided and kind_and_sizes(record.problem.call_key)[0] == kind


def _learnt_from(records: Sequence[Record], cores: int) -> _BookModel:
    same = tuple(map(id, records))  # the model holds its records, so that no other object gets their identities
    found = _LATELY.get(same)
    if found is None:
        with _Learning.lock:
            entries = digests_of(records, cores)
            learnt = _LEARNT.get(entries) or _learn(records, entries, cores)
            _LEARNT[entries] = learnt
        _LATELY[same] = found = learnt._replace(records=records)
    return found


def _learn(records: Sequence[Record], entries: frozenset[str], cores: int) -> _BookModel:
    examples: list[Example] = []
    configs: dict[str, Json] = {}
    failed: set[str] = set()
    tried: defaultdict[str, list[Mapping[str, float]]] = defaultdict(list)
    ordered = sorted(records, key=lambda r: r.problem.call_key)
    many = min(len(ordered), _MOST_PROBLEMS)
    for record in (ordered[at * len(ordered) // many] for at in range(many)):
        try:
            times = times_of(record)
        except CodecError:
            continue  # its second line is damaged
        seconds = {key: s for key, s in times.seconds.items() if math.isfinite(s)}
        if seconds:
            whole = len(seconds) > 1 and not record.is_unfinished
            examples.append(Example(kind_and_sizes(record.problem.call_key)[1], seconds, whole))
            configs |= {key: times.configs[key] for key in seconds}
            failed |= times.failed
            for key in {*seconds, *times.failed}:
                tried[key].append(examples[-1].sizes)
    moody = frozenset(failed & configs.keys())
    best = {key: min(_slowness(key, example) for example in examples) for key in configs if key not in moody}
    kept = sorted(best, key=best.__getitem__)[:_MOST_CONFIGS]
    values: dict[str, Mapping[str, Any]] = {key: values_in(configs[key]) for key in kept}
    found = _BookModel(None, records, configs, tried, moody, {})
    if not modelled(examples, values):
        return found
    near = [each.kept for each in _LEARNT.values() if each.kept is not None and each.kept.is_near(entries)]
    known = kept_model(entries) or next(iter(near), None)
    is_same = known is not None and known.entries == entries
    learnt = None if known is None else known.learnt
    model = SizeModel(examples, values, cores=cores, learnt=learnt if is_same else None, parts_of=learnt)
    if known is None or model.learnt is not learnt:
        is_reused = known is not None and all(part in known.learnt.parts for part in model.learnt.parts)
        known = KeptModel(entries, known.parts_from if known is not None and is_reused else entries, model.learnt)
        keep_model(known)
    return found._replace(model=model, kept=known)


def _slowness(key: str, example: Example) -> float:
    return example.seconds[key] / min(example.seconds.values()) if key in example.seconds else math.inf
