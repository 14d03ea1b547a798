"""The failures of a call's candidates, by reason."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, NamedTuple

from tunebook._base.vocabulary import MADE_UP
from tunebook._tuning.progress import day_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from tunebook._base.vocabulary import Failure, Json, Measurement

_LONGEST: Final = 400  # characters of a failure: compilers print pages
_MESSAGES: Final = 6  # failures: each gets its own line; of more, messages that differ in numbers share one
_NUMBER: Final = re.compile(r"(?:\btolerance=)?\d+(?:\.\d+)?(?:e[+-]?\d+)?")


class FailureGroup(NamedTuple):
    """Candidates that failed for one reason; of many messages some differ in their numbers, and the first is given.

    `made_up`: on made-up arguments, which says nothing about the caller's.
    """

    reason: str
    configs: tuple[str, ...]
    made_up: bool = False

    @property
    def counted(self) -> str:
        """How many candidates failed, and the reason.

        >>> FailureGroup("raised ValueError: too large", ("b=1", "b=2")).counted
        '2 candidates raised ValueError: too large'
        """
        comma = "" if self.reason.startswith("raised ") else ","
        return f"{len(self.configs)} candidates{comma} {self.reason}"


def failure_groups(measured: Iterable[Measurement], readable: Callable[[Json], str]) -> tuple[FailureGroup, ...]:
    """Return the failures by reason, the most frequent first, and failures on made-up arguments last."""
    failed = [(m, m.failure) for m in measured if m.failure is not None]
    # Of many messages, those that differ in their numbers alone are one: "Required: 262144, limit: 232448".
    merged = len({failure.said for _, failure in failed}) > _MESSAGES
    groups: dict[tuple[str, str], list[tuple[str, Failure]]] = {}
    for m, failure in failed:
        key = (_cause(failure.said) if merged else failure.said, m.values_from)
        groups.setdefault(key, []).append((readable(m.config), failure))
    found = []
    for (_, values_from), group in groups.items():
        configs, failures = zip(*sorted(group, key=lambda each: each[0]), strict=True)
        found.append(FailureGroup(_reason(failures, values_from), configs, values_from != "call"))
    return tuple(sorted(found, key=lambda group: (group.made_up, -len(group.configs))))


def notes_beside(shown: Sequence[Measurement], known: Iterable[Measurement]) -> list[Measurement]:
    """Return the known failures on made-up arguments that an explanation adds to the measurements that it shows.

    A failure of other code, or of a candidate that has a time by now, says nothing any more.
    """
    conditions = {(m.code, m.environment) for m in shown}
    timed = {m.fingerprint for m in shown if m.failure is None}
    return [
        m
        for m in known
        if m.values_from != "call"
        and m not in shown
        and m.fingerprint not in timed
        and (not conditions or (m.code, m.environment) in conditions)
    ]


def _cause(said: str) -> str:
    """Return a message without its numbers. The hint about a tolerance stays: each candidate has its own."""
    return _NUMBER.sub(lambda found: found[0] if found[0].startswith("tolerance=") else "#", said)


def _reason(failures: Sequence[Failure], values_from: str) -> str:
    """Return the message of failures with one cause, the arguments they were met on, and for how long they count."""
    reason = _shortened(failures[0].said)
    if any(failure.said != failures[0].said for failure in failures):
        reason += " (numbers of the first)"
    if values_from != "call":
        reason += f" (only on {MADE_UP.get(values_from, values_from)})"
    expires = [failure.expires for failure in failures if failure.expires is not None]
    return f"{reason} (remembered until {day_text(min(expires))})" if expires else reason


def _shortened(text: str) -> str:
    """Return a message of a sane length, cut after a word."""
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST].rpartition(' ')[0]} ..."
