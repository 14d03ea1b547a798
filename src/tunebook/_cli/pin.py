"""Set the configuration of an entry to one of its candidates, by hand.

Tuning, verifying and merging keep the choice until `tunebook unpin`; all measurements are kept too. For one run only,
set TUNEBOOK_PIN instead.
"""

from __future__ import annotations

import time
import warnings
from ast import literal_eval
from contextlib import contextmanager
from dataclasses import replace
from shlex import quote
from typing import TYPE_CHECKING, Any, Final

from tunebook._base.config_codec import encode, fingerprint_of
from tunebook._base.durations import ratio_text
from tunebook._base.errors import StoreError, TunebookWarning, clean, did_you_mean
from tunebook._base.record_format import Record
from tunebook._cli._entries import SHORT_ID, config_text, find_one, plain
from tunebook._cli._filters import FILTERS, book_of
from tunebook._cli._verb import DONE, ArgumentParser, Namespace, Terminal, UsageError, Verb
from tunebook._selection.env_pins import (
    fields_of,
    fits,
    nearest,
    parse_values,
    reason_against,
    respelled,
    values_in,
    written,
)
from tunebook._selection.recorded_decision import is_interrupted, names_in, of_candidates, verdict_of
from tunebook._selection.single_flight import Lease, acquire
from tunebook.stores import problem_id
from tunebook.stores._listing import Catalogue

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from tunebook._base.vocabulary import Json, Measurement, Problem
    from tunebook.stores import Store

_NAMED: Final = 3  # candidates of a message
_WAIT_S: Final = 10.0  # for a process that tunes the problem right now
DECISION: Final = ("config", "origin", "checksum", "environment")


def add_entry(parser: ArgumentParser) -> None:
    """Add the argument that names one entry."""
    parser.add_argument("what", metavar="ID_OR_KERNEL", help="first digits of an id, or a kernel with one entry")


def _arguments(parser: ArgumentParser) -> None:
    add_entry(parser)
    text = "the configuration, e.g. block_m=64; of a tuple without brackets: tile=4,4"
    parser.add_argument("values", metavar="NAME=VALUE", nargs="+", help=text)
    text = "pin it even if it failed, or was never measured; calls use it only if it is a candidate of the kernel"
    parser.add_argument("--force", action="store_true", help=text)


def _run(options: Namespace, terminal: Terminal) -> int:
    store = book_of(options)
    listed, record = find_one(Catalogue(store), options, otherwise=" (TUNEBOOK_PIN pins all of them, for one run)")
    wanted: dict[str, str] = {}
    for word in options.values:
        if not (named := parse_values(word)):
            raise UsageError(
                f"invalid value {word!r}: write NAME=VALUE, e.g. block_m=64; a tuple without spaces: tile=4,4"
            )
        for name, value in named:
            if name in wanted:
                raise UsageError(f"{name} is given twice, as {wanted[name]} and as {value}; name it once")
            wanted[name] = value
    config = choose(record, wanted, force=options.force)
    if not options.dry_run:
        with lock_problem(store, record.problem) as earlier:
            store.put(pin(earlier or record, config))
    does, short, names = "would pin" if options.dry_run else "pinned", listed.id[:SHORT_ID], names_in(record)
    terminal.result(
        {"id": listed.id, "pinned": plain(config), "was": plain(record.head.config)},
        f"{does} {listed.op} {short} to {config_text(config, names)}",
        f"  before: {_before(record, config)}",
        f"  undo with: tunebook unpin {short}",
    )
    if config not in (m.config for m in record.body.measurements):
        terminal.note("it was never measured; it has an effect only if it is a candidate of the kernel")
    return DONE


def _before(record: Record, config: Json) -> str:
    """Return the choice before, and how the pinned configuration compares with the winner, if both were measured."""
    if not record.head.decided:
        return "nothing was chosen yet"
    before = f"{config_text(record.head.config, names_in(record))}, {record.head.origin}"
    verdict = verdict_of(record)
    times = {} if verdict is None else {r.measurement.fingerprint: r.value_s for r in verdict.ranking}
    if verdict is None or (time_s := times.get(fingerprint_of(config))) is None:
        return before
    return f"{before}; the pinned configuration takes {ratio_text(time_s / verdict.winner.value_s)} the winner's time"


@contextmanager
def lock_problem(store: Store, problem: Problem) -> Iterator[Record | None]:
    """Prevent other processes from tuning a problem inside the block; yields the current record."""
    with warnings.catch_warnings():
        # A book without leases that can be written cannot be written either, which is the error of the write.
        warnings.simplefilter("ignore", TunebookWarning)
        # Nothing to look for: results of other processes do not end the wait.
        lease: object = acquire(store.leases(), problem_id(problem), look=lambda: None, deadline_s=_WAIT_S)
    if not isinstance(lease, Lease):
        raise StoreError("busy", store.where, f"{problem.op} is being tuned by another process; try again later")
    with lease:
        yield store.get(problem)


def choose(record: Record, wanted: Mapping[str, str], *, force: bool) -> Json:
    """Return the candidate with these values; with `force`, a configuration of these values if no candidate matches."""
    verdict = verdict_of(record)
    fastest = [] if verdict is None else [ranked.measurement for ranked in verdict.ranking]
    latest = {m.fingerprint: m for m in (*fastest, *sorted(of_candidates(record.body), key=lambda m: m.when))}
    # A candidate that failed would fail every call.
    known = {fingerprint: m.config for fingerprint, m in latest.items() if force or m.failure is None}
    axes = _axes(record, latest.values())
    for name in wanted if axes else ():
        if name not in axes:
            near = _typed(record, list(known.values()), respelled(wanted, axes)) if known else ""
            raise UsageError(did_you_mean("axis", name, axes) + (f". The nearest:{near}" if near else ""))
    _refuse_rejected(record, latest.values(), wanted, force=force)
    fitting = [config for config in known.values() if fits(config, wanted)]
    exact = [c for c in fitting if sum(not isinstance(v, dict) for v in fields_of(c).values()) == len(wanted)]
    if len(exact or fitting) == 1:
        return (exact or fitting)[0]
    if fitting:
        raise UsageError(f"{len(fitting)} candidates have these values; name one:{_typed(record, fitting, wanted)}")
    if force or not latest:
        return encode({name: _value(value, axes.get(name, ())) for name, value in wanted.items()})
    asked = ", ".join(f"{name}={value}" for name, value in wanted.items())
    failed = next((m.failure for m in latest.values() if m.failure is not None and fits(m.config, wanted)), None)
    why = f"it {failed.said}" if failed is not None else reason_against(wanted, axes)
    near = _typed(record, list(known.values()), wanted)
    # A program ignores a pin of a configuration outside of its candidates.
    in_space = all(any(fits(encode({"it": v}), {"it": t}) for v in axes.get(name, ())) for name, t in wanted.items())
    offer = "\nUse --force to pin it anyway." if in_space else ""
    raise UsageError(f"no working candidate has {asked}: {why}. The nearest:{near}{offer}")


def _axes(record: Record, measured: Iterable[Measurement]) -> dict[str, Sequence[object]]:
    """Return the values of each axis in order, the axes in the order of the space where the record knows it."""
    found = values_in(m.config for m in measured)
    ordered = {name: found[name] for name in names_in(record) if name in found} | found
    return {name: _in_order(values) for name, values in ordered.items()}


def _in_order(values: Sequence[object]) -> Sequence[object]:
    try:
        return sorted(values)  # type: ignore[type-var] # of one kind, if they compare
    except TypeError:
        return sorted(values, key=str)


def _typed(record: Record, configs: Sequence[Json], wanted: Mapping[str, str]) -> str:
    """Return the commands that pin candidates, those nearest to the wanted values first, quoted for a shell."""
    lines, names = "", names_in(record)
    for config in nearest(configs, wanted, _NAMED):
        fields = fields_of(config)
        ordered = {name: fields[name] for name in names} if fields.keys() == set(names) else fields
        words = " ".join(map(quote, written(ordered)))
        lines += f"\n  tunebook pin {problem_id(record.problem)[:SHORT_ID]} {clean(words)}"
    return lines + (f"\n  and {len(configs) - _NAMED} more" if len(configs) > _NAMED else "")


def _refuse_rejected(
    record: Record, measured: Iterable[Measurement], wanted: Mapping[str, str], *, force: bool
) -> None:
    """Raise `UsageError` if these values are those of a candidate that fails on every machine."""
    fitting = [m for m in measured if fits(m.config, wanted)]
    rejected = next((m for m in fitting if m.failure is not None and m.failure.is_lasting), None)
    if rejected is not None and rejected.failure is not None and len(fitting) == 1:
        anyway = ", and --force does not change that" if force else ""
        raise UsageError(
            f"{config_text(rejected.config, names_in(record))} was rejected: {rejected.failure.said}\n"
            f"It would fail, or give a wrong result, in every call{anyway}. To try it in one run, "
            "set TUNEBOOK_PIN; if the check is wrong, change it and call tunebook.tune(...) in the program."
        )


def _value(text: str, values: Iterable[object]) -> Any:
    """Return a value as the axis has it; a new one as Python reads it."""
    known = [value for value in values if fits(encode({"it": value}), {"it": text})]
    if known:
        return known[0]
    try:
        return literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def pin(record: Record, config: Json) -> Record:
    """Return a record with a pinned configuration, which holds for any code and version."""
    head, body = record.head, record.body
    facts = dict(body.provenance)
    if head.origin != "pinned" and (head.decided or is_interrupted(record)):
        facts["instead_of"] = {name: getattr(head, name) for name in DECISION}
    # Merging prefers the later of two pins by this time.
    facts |= {"when": time.time(), "measured": facts.get("measured", facts.get("when"))}
    new = replace(head, config=config, origin="pinned", checksum="", environment="")
    return Record(new, replace(body, provenance=facts))


VERB = Verb("tunebook pin matmul block=64 --dry-run", _run, (*FILTERS, "dry-run", "json"), _arguments, __doc__)
