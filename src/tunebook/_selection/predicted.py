"""Answers of the model of times: for calls whose sizes were never tuned, and which candidates a tuning tries."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from tunebook._base.config_codec import fingerprint_of
from tunebook._base.errors import MissingDependency, warn_once

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from tunebook._base.vocabulary import Json
    from tunebook._selection.trusted_entries import EntryGuard
    from tunebook._tuning.job import Call, Job
    from tunebook.search import Prediction

C = TypeVar("C")


def sure_prediction(book: EntryGuard[C], call: Call[C], limit: float) -> tuple[C, Prediction] | None:
    """Return the predicted candidate of a call, if the bound of its regret is within a limit."""
    found = _predicted(book, call)
    if found is None or found[1].bound > limit:
        return None
    members, prediction = found
    return members[fingerprint_of(prediction.config)], prediction


def narrowed(book: EntryGuard[C], call: Call[C], job: Job[C]) -> Job[C]:
    """Return a job that tries only the candidates worth it, if other sizes are known."""
    found = None if job.search is not None else _predicted(book, call)
    if found is None:
        return job
    members, prediction = found
    worth = [members[fingerprint_of(config)] for config in prediction.worth_trying]
    left = [config for config in worth if config in job.candidates]
    return job._replace(candidates=left) if left else job


def _predicted(book: EntryGuard[C], call: Call[C]) -> tuple[dict[str, Any], Prediction] | None:
    """Return the candidates of a call by their fingerprints, and a prediction of the best of them."""
    from tunebook.search._prediction import predict  # noqa: PLC0415 - loaded late: few policies ask

    code = f"{call.kernel.code_checksum}-"
    records = [record for record in book.records(call.problem.op) if record.head.checksum.startswith(code)]
    if not records or call.kernel.table is not None:
        return None
    members: dict[str, Any] = {}

    def among(configs: Mapping[str, Json]) -> Collection[str]:
        members.update(book.members(call, configs))
        return members

    try:
        prediction = predict(records, call.problem, among)
    except MissingDependency as error:
        warn_once("predict", call.problem.op, f"{call.problem.op}: {error}. Its calls are tuned instead")
        return None
    return None if prediction is None else (members, prediction)
