"""The call that candidates run on: a caller's, or for a call in a bucket the call of the representative size."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from tunebook._arrays.describe import is_traced, tuning_site
from tunebook._base.config_codec import encode, fingerprint_of
from tunebook._base.errors import CodecError, DefinitionError, TuningFailed, text_of
from tunebook._measure.stopwatch import Attempt
from tunebook._selection.recording import with_inputs
from tunebook._tuning.job import Budget, History
from tunebook._tuning.plan import by_author, job_for

if TYPE_CHECKING:
    from tunebook._selection.tiers import Request
    from tunebook._tuning.tuner import Tuner

C = TypeVar("C")


class MeasuredCall(NamedTuple, Generic[C]):
    """The call that candidates run on, and its caller's. For a call in a bucket, `sizes` are those of its arguments.

    `reason`: why these are the caller's own, and not the representative of the bucket.
    """

    measured: Request[C]
    callers: Request[C]
    sizes: str = ""
    reason: str = ""
    is_rounded: bool = False  # whether candidates run on other arguments than the caller's


def ready(request: Request[C]) -> Request[C]:
    """Return a request whose call has the arguments that candidates run on."""
    table = request.kernel.table
    if table is None:
        return request
    return replace(request, inv=by_author("the function that makes inputs", table.ready, request.inv))


def measured_call(request: Request[C]) -> MeasuredCall[C]:
    """Return the call of the representative size for a call in a bucket, if it can be made; else the call itself."""
    request = ready(request)
    kernel = request.kernel
    with Attempt() as attempt:  # the author's functions and an array library may raise anything
        found = kernel.rounded(request.inv)
        if found is None:
            return MeasuredCall(request, request)
        inv, rounded = found
        if inv is request.inv:
            return MeasuredCall(request, request, rounded.sizes, rounded.reason)
        if is_traced(request.inv):  # its arrays are made where it is tuned, by the author's function if there is one
            inv = replace(inv, values_from="call" if kernel.makes_inputs else "random")
        elif kernel.makes_inputs:
            inv = with_inputs(kernel, replace(inv, values_from="random"))
        return MeasuredCall(replace(request, inv=inv), request, rounded.sizes, is_rounded=True)
    return callers_own(request, attempt.trial.error)


def callers_own(request: Request[C], error: Exception | None) -> MeasuredCall[C]:
    """Return a call in a bucket as its caller made it, because arguments of the representative size failed."""
    said = error.summary if isinstance(error, TuningFailed) else "" if error is None else text_of(error)
    sizes = request.kernel.own_sizes(request.inv)
    return MeasuredCall(request, request, sizes, f"arguments of the representative size failed: {said}")


def check_for_caller(tuner: Tuner, request: Request[C], config: C) -> None:
    """Run the winner of a bucket once more at the caller's size; `TuningFailed` if it fails there."""
    with tuning_site(request.inv) as (site, there):
        job = there(job_for, request, request.policy, History(), Budget(), None, site)
        tuned = there(tuner.tune, job._replace(candidates=[config], search=None, brief=True))
    try:
        name = fingerprint_of(encode(config))
    except CodecError:
        return
    failed = [m.failure for m in tuned.measurements if m.fingerprint == name and m.failure is not None]
    if failed:
        error = DefinitionError(failed[0].message)
        raise TuningFailed(f"its winner {config!r} fails at the caller's size", [error])


class MeasuredAt(NamedTuple):
    """As it stands in a record: the sizes that a bucket was measured at, and why these were the caller's."""

    sizes: str
    reason: str

    def __str__(self) -> str:
        why = f"the caller's own size, because {self.reason}" if self.reason else "the representative of its bucket"
        return f"{self.sizes}: {why}"


def measured_at(facts: Any) -> MeasuredAt | None:
    """Return the sizes that a record's bucket was measured at; None if it is not of a bucket, or does not say."""
    found = facts.get("at")
    if not isinstance(found, dict) or not isinstance(found.get("sizes"), str):
        return None
    return MeasuredAt(found["sizes"], str(found.get("reason", "")))
