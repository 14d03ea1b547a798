"""A tuning as people see it: lines in the log, and a warning about candidates with a wrong output."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, TypeVar

from tunebook._base.config_codec import fingerprint, readable
from tunebook._base.durations import LONG_S, seconds_text
from tunebook._base.environment_variables import log_setting
from tunebook._base.errors import CodecError, DefinitionError, TuningFailed, warn_once
from tunebook._base.log import listens, log, log_to_stderr
from tunebook._base.record_format import identity
from tunebook._keys.key_text import spell_out
from tunebook._tuning.job import REJECTED
from tunebook._tuning.plan import REFERENCE_FAILED

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tunebook._base.record_format import Record
    from tunebook._base.vocabulary import Measurement, Problem
    from tunebook._tuning.job import Call, Job, Step, Tuned

C = TypeVar("C")

FIX_OUTPUT: Final = "Fix the kernel, or its check with reference=, tolerance= or check="
_LONGEST: Final = 120  # characters of a call's arguments in a line
_LISTED: Final = 3  # candidates that a line names


def start_log() -> None:
    """Print the log to standard error if `TUNEBOOK_LOG` asks for it."""
    try:
        level = log_setting()
    except DefinitionError as error:  # no reason to end a program, unlike a setting that answers depend on
        warn_once("setting", "TUNEBOOK_LOG", f"{error}. Nothing is logged")
        return
    if level is not None:
        log_to_stderr(level)


def watched(
    asked: Call[C], job: Job[C], tune: Callable[[Job[C]], Tuned[C]], *, because: str = "", verifying: bool
) -> Tuned[C]:
    """Tune; write to the log how it begins and ends, and warn of candidates that were rejected for their output.

    `because` says why the choice that the call has does not answer.
    """
    problem = asked.problem
    if job.died is not None:
        _warn_of_a_death(problem, job)
    if not listens("info"):
        tuned = tune(job)
        tell_of_failures(problem, job, tuned)
        return tuned
    arguments = "; ".join(spell_out(problem.call_key, tuple(getattr(asked.kernel, "parameters", ()))))
    call = f"{problem.op} ({arguments if len(arguments) <= _LONGEST else f'{arguments[:_LONGEST]} ...'})"
    why = f"; {because}" if because else ""
    count = "1 candidate" if job.size == 1 else f"{job.size} candidates"
    log("info", f"{'verifying' if verifying else 'tuning'} {call}: {count}{_going_on(job)}{why}")
    job = job._replace(on_step=_logged(problem.op, job))
    try:
        tuned = tune(job)
    except TuningFailed as error:
        log("info", f"not tuned: {call}: {error.summary}")
        raise
    except KeyboardInterrupt:
        log("info", f"interrupted: {call}")
        raise
    verb = "measured as the fastest finalist:" if verifying else "chose"
    log("info", f"{verb} {tuned.config!r} for {call}: {tuned.summary}")
    tell_of_failures(problem, job, tuned)
    return tuned


def told_if_kept(problem: Problem, tuned: Tuned[C]) -> Tuned[C]:
    """Return a result, and log if an earlier choice stands instead of the measured winner."""
    if tuned.stands and listens("info"):
        disturbed = "; ".join(tuned.disturbances.reasons)
        why = f", because this tuning was disturbed: {disturbed}" if disturbed else ""
        log("info", f"kept {tuned.config!r} for {problem.op}: {tuned.stands}{why}")
    return tuned


def _going_on(job: Job[Any]) -> str:
    """Return from how many measurements a tuning goes on that was interrupted: they are kept without a choice."""
    count = job.history.unfinished
    return f", going on from {count} measurement{'' if count == 1 else 's'}" if count else ""


def tell_of_interrupt(
    error: KeyboardInterrupt, problem: Problem, kept: Sequence[Measurement], *, chosen: bool, joint: bool = False
) -> None:
    """Add a note to an interrupt: how many measurements were kept. `chosen`: an earlier tuning has made a choice."""
    count = "1 measurement is" if len(kept) == 1 else f"{len(kept)} measurements are"
    state, then = ("keeps its choice", "tuning") if chosen else ("is not tuned yet", "call")
    then = "tune_together" if joint else then
    error.add_note(f"tunebook: {problem.op} {state}. {count} kept; the next {then} goes on from there.")


def _logged(op: str, job: Job[Any]) -> Callable[[Step], None]:
    """Return a function that logs each candidate, and one that runs for long after 5 s, 10 s, 20 s, and so on."""
    due_s: dict[str, float] = {}
    each = listens("debug")

    def show(step: Step) -> None:
        if each and (m := step.latest) is not None:
            found = "failed" if m.failure is not None else seconds_text(min(m.samples_s, default=0.0))
            log("debug", f"{op}: {step.doing} {step.done}/{step.total}: {readable(m.config)}: {found}")
        if step.running is not None and step.running_s >= due_s.get(name := repr(step.running), LONG_S):
            due_s[name] = 2 * step.running_s
            limit = f"candidate_timeout_s={job.setup.timeout_s:g} ends it"
            log("info", f"{op}: {name} has been running for {seconds_text(step.running_s)}; {limit}")
        if job.on_step is not None:
            job.on_step(step)

    return show


def is_wrong(m: Measurement) -> bool:
    """Whether a candidate ran, and was rejected for its output."""
    return m.failure is not None and m.failure.kind in REJECTED


def remedy_for(error: TuningFailed) -> str:
    """Return how to get a configuration for a call whose tuning failed."""
    if error.message == REFERENCE_FAILED:
        return "Fix the kernel's reference=, or pass a configuration with the call."
    if error.measurements and all(map(is_wrong, error.measurements)):
        return f"{FIX_OUTPUT}; or pass a configuration with the call."
    return "Pass a configuration with the call, or give the kernel a candidate that works."


def _warn_of_a_death(problem: Problem, job: Job[Any]) -> None:
    """Warn that the process of the last tuning died, and name the candidate that ran then."""
    for config in job.candidates if job.heuristic is None else (job.heuristic, *job.candidates):
        with suppress(CodecError):
            if fingerprint(config) == job.died:
                warn_once(
                    "died",
                    f"{problem.op} {job.died}",
                    f"the last tuning of {problem.op} died while it ran {config!r}; it is skipped now. With "
                    'AutotunePolicy(isolate="always") such a candidate ends its worker alone',
                )
                return


def tell_of_failures(problem: Problem, job: Job[Any], tuned: Tuned[Any]) -> None:
    """Log the failures of this tuning by their kinds, and warn of wrong outputs, once per kernel and version of it."""
    # An edited kernel's are of other code; of the failures of a tuning that was interrupted nothing was told.
    known = set() if job.history.unfinished else {identity(m) for m in job.known}
    new = [m for m in tuned.measurements if m.failure is not None and identity(m) not in known]
    wrong = list(filter(is_wrong, new))
    kinds: dict[str, list[Measurement]] = {}
    for m in new:
        if m.failure is not None and not is_wrong(m):
            kinds.setdefault(m.failure.said.partition(":")[0], []).append(m)
    for rest in kinds.values():
        log("info", f"{problem.op}: {_some(rest, tuned)} did not run and cannot be chosen: {_reason(rest)}")
    # On made-up arguments an output may be wrong that is right on a caller's.
    if wrong and wrong[0].values_from == "call":
        warn_once(
            "wrong output",
            f"{problem.op} {job.code}",
            f"{problem.op}: {_some(wrong, tuned)} gave a wrong output and cannot be chosen: {_reason(wrong)}. "
            "explain(...) of the call lists every reason",
        )


def warn_of_rejected_pin(call: Call[C], record: Record | None, config: C, by: str) -> None:
    """Warn once that a pin gives a kernel a candidate that was rejected for the output of this very code."""
    code, name = call.kernel.code_checksum, _fingerprint(config)
    for m in () if record is None else record.body.measurements:
        if is_wrong(m) and m.values_from == "call" and (m.code, m.fingerprint) == (code, name):
            warn_once(
                "rejected pin",
                f"{call.problem.op} {code} {name}",
                f"{by} gives {call.problem.op} {config!r}, which was rejected when it was tuned: {_reason([m])}. It "
                "runs all the same, and its output may be wrong; take the pin away, or fix the kernel or its check",
            )
            return


def _fingerprint(config: object) -> str:
    with suppress(CodecError):
        return fingerprint(config)
    return ""  # it cannot be in a book


def _some(failed: Sequence[Measurement], tuned: Tuned[Any]) -> str:
    names = [repr(tuned.configs.get(m.fingerprint, m.config)) for m in failed[:_LISTED]]
    more = f" and {len(failed) - _LISTED} more" if len(failed) > _LISTED else ""
    return f"{len(failed)} of {len(tuned.measurements)} candidates ({', '.join(names)}{more})"


def _reason(failed: Sequence[Measurement]) -> str:
    return next(m.failure.message for m in failed if m.failure is not None).partition("\n")[0][:300]
