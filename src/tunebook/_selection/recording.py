"""Recorded calls: the problems of a program, without keeping its arrays alive."""

from __future__ import annotations

import inspect
import json
import sys
from collections import Counter
from contextlib import ContextDecorator, contextmanager, suppress
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tunebook._arrays.describe import (
    DeviceOrdinals,
    arrays_in,
    describe,
    device_of,
    is_array,
    map_leaves,
    mesh_classes,
    surroundings_of,
    walk,
)
from tunebook._arrays.device_fingerprint import device_fingerprint
from tunebook._arrays.library import ArraySpec
from tunebook._arrays.made_up import materialise, sampled
from tunebook._base.config_codec import classes_of, decode, encode
from tunebook._base.errors import CodecError, DefinitionError, StoreError
from tunebook._base.record_format import canonical_json
from tunebook._base.vocabulary import Json, Problem, ValuesFrom
from tunebook._kernel.kernel import LIVE, Invocation, Kernel
from tunebook._keys.call_key import explain_difference, is_plain
from tunebook._memo.answer_memo import MEMO
from tunebook._memo.context_stack import INNERMOST, scoped
from tunebook._tuning.plan import by_author
from tunebook.stores._files import replace_file

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from contextlib import AbstractContextManager
    from types import TracebackType

# A program with ever new shapes must not turn a recording into a leak. Calls beyond this are counted as dropped.
CAPACITY: Final = 10_000
# Nor must the integers in it: after so many characters of them, calls are recorded without values.
_MOST_SAMPLED: Final = 32 << 20

_NAMED: Final = 4  # kernels, in a `repr`
_FORMAT: Final = "tunebook-recording/1"
_OLD_NAMES: Final = ("tunebook._arrays.ArraySpec", "tunebook._arrays.describe.ArraySpec")  # of specs in older files


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedCall:
    """A kind of call that was seen: arrays as specs, how often, and the seconds that callers waited in total.

    A recording that was read in a process without the kernel has `kernel=None`. `placement` is `Invocation.placement`.
    `selector` chose the configuration, if an `Executor` made the call in this process.
    """

    problem: Problem
    kernel: Kernel[Any, Any] | None
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    module: str = ""
    finder: str = ""
    count: int = 1
    seconds: float = 0.0
    surroundings: Mapping[str, Any] = field(default_factory=dict)
    placement: Mapping[str, Any] = field(default_factory=dict)
    selector: Any = field(default=None, repr=False, compare=False)

    def invocation(self, kernel: Kernel[Any, Any]) -> Invocation[Any, Any]:
        """Return the call as an invocation of a kernel, with specs in place of arrays."""
        inv: Invocation[Any, Any]
        inv = Invocation(kernel.op_id, self.args, self.kwargs, surroundings=self.surroundings, **self.placement)
        return inv if kernel.recorder is None else kernel.recorder.recall(inv)


class Recording:
    """The calls of a program, one entry per problem, most expensive first. Bounded; safe to share between threads."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._calls: dict[Problem, RecordedCall] = {}
        self._sampled = 0
        self.dropped = 0

    def __iter__(self) -> Iterator[RecordedCall]:
        with MEMO.lock:
            calls = list(self._calls.values())
        return iter(sorted(calls, key=lambda call: (-call.seconds, call.problem)))

    def __len__(self) -> int:
        return len(self._calls)

    def __repr__(self) -> str:
        counts = Counter(call.problem.op for call in self)
        named = ", ".join(f"{op} ({count})" for op, count in counts.most_common(_NAMED))
        more = f" and {len(counts) - _NAMED} more kernels" if len(counts) > _NAMED else ""
        kinds = "1 kind of call" if len(self) == 1 else f"{len(self)} kinds of calls"
        lost = f"; {self.dropped} dropped" if self.dropped else ""
        return f"<Recording of {kinds}{f': {named}{more}' if named else ''}{lost}>"

    def observe(
        self,
        problem: Problem,
        kernel: Kernel[Any, Any] | None,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        seconds: float = 0.0,
        placement: Mapping[str, Any] = MappingProxyType({}),
        *,
        selector: Any = None,
        latest: bool = False,
    ) -> None:
        """Count one call; of calls of the same problem the first is kept, or else the `latest`."""
        new = self.describe(problem, kernel, args, kwargs, placement, selector=selector, latest=latest)
        self.count(problem, new, seconds, latest=latest)

    def describe(
        self,
        problem: Problem,
        kernel: Kernel[Any, Any] | None,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        placement: Mapping[str, Any] = MappingProxyType({}),
        *,
        selector: Any = None,
        latest: bool = False,
    ) -> RecordedCall | None:
        """Return the description of a call that is about to run and may write to its arguments; None if it has one."""
        if not latest and (problem in self._calls or len(self._calls) >= self._capacity):
            return None
        # Without the lock: to read integers from a GPU waits for its work.
        given, samples = (tuple(args), dict(kwargs)), self._sampled < _MOST_SAMPLED
        recorder = kernel.recorder if isinstance(kernel, Kernel) else None
        specs = abstract(given, samples=samples) if recorder is None else recorder.describe(*given, samples=samples)
        return RecordedCall(
            problem=problem,
            kernel=kernel,
            args=specs[0],
            kwargs=specs[1],
            module=module_of(kernel),
            finder="" if recorder is None else recorder.finder,
            count=0,
            surroundings=surroundings_of(given),
            placement=placement,
            selector=selector,
        )

    def count(self, problem: Problem, new: RecordedCall | None, seconds: float, *, latest: bool = False) -> None:
        """Count a call that has run; `new` is its description, from before it ran."""
        with MEMO.lock:
            seen = self._calls.get(problem)
            if seen is None and (new is None or len(self._calls) >= self._capacity):
                self.dropped += 1
                return
            count, total_s = (0, 0.0) if seen is None else (seen.count, seen.seconds)
            if new is not None and (seen is None or latest):
                self._sampled += _sampled(new) - (0 if seen is None else _sampled(seen))
                seen = new
            if seen is not None:
                self._calls[problem] = replace(seen, count=count + 1, seconds=total_s + seconds)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the recording to a JSON file, all or nothing."""
        _write(path, [_to_json(call) for call in self])

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Recording:
        """Read a recording; kernels are found among the kernels that this process has defined."""
        recording = cls()
        for entry in _entries(path):
            call = _from_json(entry, str(path))
            recording._calls[call.problem] = call
        return recording


def _sampled(call: RecordedCall) -> int:
    """Return how many values of arrays a call keeps."""
    texts = (x.values if isinstance(x, ArraySpec) else x for x in walk((call.args, call.kwargs)))
    return sum(len(text) for text in texts if isinstance(text, str))


def module_of(kernel: object) -> str:
    """Return the module that a kernel is defined in."""
    return kernel.module if isinstance(kernel, Kernel) else type(kernel).__module__


def _entries(path: str | os.PathLike[str]) -> list[Any]:
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise StoreError("read", str(path), f"cannot read the recording {path}: {error.strerror or error}") from error
    except ValueError as error:
        from shlex import quote  # noqa: PLC0415 - for a mistake only

        # Most often the program itself is named.
        program = quote(str(path)) if str(path).endswith(".py") else "train.py"
        how = f"`Recording.save` writes one, and so does `tunebook run --record calls.json -- python {program}`"
        raise CodecError(f"{path} is not a recording; {how}") from error
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise CodecError(f"{path} is not a recording of this version ({_FORMAT})")
    return list(content.get("calls", []))


def merge_recordings(paths: Iterable[str | os.PathLike[str]], into: str | os.PathLike[str]) -> int:
    """Write the calls of several recordings to one file, all or nothing; return how many kinds of calls there are."""
    merged: dict[str, Any] = {}
    for path in paths:
        for entry in _entries(path):
            known = merged.setdefault(canonical_json(entry["problem"]), entry)
            if known is not entry:
                known["count"] += entry["count"]
                known["seconds"] += entry["seconds"]
    _write(into, sorted(merged.values(), key=lambda entry: -entry["seconds"]))
    return len(merged)


def _write(path: str | os.PathLike[str], entries: list[Any]) -> None:
    text = json.dumps({"format": _FORMAT, "calls": entries}, indent=1)
    try:
        replace_file(Path(path), text.encode())
    except OSError as error:
        raise StoreError(
            "write", str(Path(path)), f"cannot save the recording {path}: {error.strerror or error}"
        ) from error


class SavedCall(NamedTuple):
    """A recorded call as text, for a process that need not know its kernel nor the classes of its arguments."""

    problem: Problem
    module: str
    finder: str
    times: int
    seconds: float
    text: str

    def restored(self) -> RecordedCall:
        """Return the call, in a process that defines its kernel."""
        return _from_json(json.loads(self.text), "the recording")


def saved_calls(recording: Recording | str | os.PathLike[str]) -> list[SavedCall]:
    """Return the calls of a recording, or of a recording's file, the most expensive first."""
    entries: list[Any]
    entries = [*map(_to_json, recording)] if isinstance(recording, Recording) else _entries(recording)
    calls = []
    for entry in entries:
        try:
            problem = Problem(*map(str, entry["problem"]))
            facts = str(entry["module"]), str(entry.get("finder", "")), int(entry["count"]), float(entry["seconds"])
        except (KeyError, TypeError, ValueError) as error:
            raise CodecError(f"{recording} holds a call that cannot be read ({error}): {repr(entry)[:200]}") from error
        calls.append(SavedCall(problem, *facts, json.dumps(entry)))
    return sorted(calls, key=lambda call: (-call.seconds, call.problem))


def abstract(value: Any, *, samples: bool = False) -> Any:
    """Return a value with every array in it replaced by its spec, so that nothing large stays alive.

    With `samples`, the specs of small arrays of integers have their values.
    """
    devices = DeviceOrdinals()

    def change(leaf: Any) -> Any:
        if not is_array(leaf):
            return leaf
        spec = describe(leaf, devices)
        return sampled(leaf, spec) if samples and spec is not leaf else spec

    return map_leaves(change, value)


def concrete(value: Any, seed: int = 0) -> Any:
    """Return a value with every array spec in it replaced by an array of made-up values; undoes `abstract`."""
    return map_leaves(lambda leaf: materialise(leaf, seed) if isinstance(leaf, ArraySpec) else leaf, value)


def values_in(value: Any) -> ValuesFrom:
    """Return where the values of a call are from after `concrete`; a call without arrays keeps the caller's values."""
    specs = [leaf for leaf in walk(value) if isinstance(leaf, ArraySpec)]
    if not specs:
        return "call"
    return "samples" if any(spec.values for spec in specs) else "random"


def make_up(kernel: Kernel[Any, Any], inv: Invocation[Any, Any], seed: int = 0) -> Invocation[Any, Any]:
    """Return a recorded call on arrays: by the author's function, else from recorded samples and random values."""
    if kernel.recorder is not None:
        return with_inputs(kernel, kernel.recorder.recall(inv, seed))
    given = inv.args, dict(inv.kwargs)
    args, kwargs = concrete(given, seed)
    return with_inputs(kernel, replace(inv, args=args, kwargs=kwargs, values_from=values_in(given)))


def with_inputs(kernel: Kernel[Any, Any], inv: Invocation[Any, Any]) -> Invocation[Any, Any]:
    """Return a call on made-up arrays with better ones, if the author says how they are made.

    `TuningFailed` if the author's function raises, `DefinitionError` if it returns arguments of another problem.
    """
    if inv.values_from == "call" or not kernel.makes_inputs:
        return inv
    made = by_author(f"the function that makes inputs for {kernel.op_id}", kernel.make_inputs, inv)
    if made is None:
        return inv
    better = replace(inv, args=made[0], kwargs=made[1], values_from="inputs")
    wanted, found = kernel.problem(inv).call_key, kernel.problem(better).call_key
    if found != wanted:
        raise DefinitionError(
            f"inputs= of {kernel.op_id!r} returned arguments with another key "
            f"({'; '.join(explain_difference(found, wanted))}). Return arrays of the same shapes, dtypes and layouts"
        )
    return better


def how_to_give_values(kernel: Kernel[Any, Any]) -> str:
    """Return the advice for a kernel that fails on made-up arguments, which its callers' arguments need not do."""
    better = "fix its inputs= function" if kernel.makes_inputs else "give it inputs=, a function that makes valid ones"
    return f"A caller's arguments may be valid where made-up ones are not: {better}, or tune it in a call."


def opaque_part(value: object) -> str | None:
    """Return the class of a part that may hold arrays, or change while another thread looks at it; None without one."""
    left = (leaf for leaf in walk(abstract(value)) if not isinstance(leaf, ArraySpec) and not is_plain(leaf))
    opaque = next(left, None)
    return None if opaque is None else f"{type(opaque).__module__}.{type(opaque).__qualname__}"


def _to_json(call: RecordedCall) -> Json:
    try:
        args, kwargs, placement = encode(call.args), encode(dict(call.kwargs)), encode(dict(call.placement))
    except CodecError as error:
        raise CodecError(f"the call of {call.problem.op!r} cannot be saved: {error}") from error
    return {
        "problem": list(call.problem),
        "module": call.module,
        **({"finder": call.finder} if call.finder else {}),
        "args": args,
        "kwargs": kwargs,
        "count": call.count,
        "seconds": call.seconds,
        "surroundings": dict(call.surroundings),
        **({"placement": placement} if call.placement else {}),
    }


def _from_json(entry: Any, path: str) -> RecordedCall:
    try:
        problem = Problem(*map(str, entry["problem"]))
        finder = str(entry.get("finder", ""))
        kernel = live_kernel(problem.op, str(entry["module"]), finder)
        classes = classes_of([ArraySpec, *(() if kernel is None else kernel.argument_classes)])
        classes |= dict.fromkeys(_OLD_NAMES, ArraySpec)
        placement = entry.get("placement")
        return RecordedCall(
            problem=problem,
            kernel=kernel,
            args=tuple(decode(entry["args"], classes)),
            kwargs=dict(decode(entry["kwargs"], classes)),
            module=str(entry["module"]),
            finder=finder,
            count=int(entry["count"]),
            seconds=float(entry["seconds"]),
            surroundings=dict(entry.get("surroundings", {})),
            placement={} if placement is None else dict(decode(placement, classes_of(mesh_classes()))),
        )
    except (KeyError, TypeError, ValueError) as error:
        text = canonical_json(entry)[:200] if isinstance(entry, dict) else repr(entry)[:200]
        raise CodecError(f"{path} holds a call that cannot be read ({error}): {text}") from error


# ------------------------------------------------------------------------------------ the kernels of this process


def live_kernel(op_id_v: str, module: str = "", finder: str = "") -> Kernel[Any, Any] | None:
    """Return the kernel that this process defines under a name, or None; `finder` is of its `CallRecorder`."""
    # One that is alive; else one of a class in `module`, if the class needs no arguments: a program may make a kernel
    # anew for every call.
    kernel = LIVE.get(op_id_v)
    if kernel is not None or module not in sys.modules:
        return kernel
    if finder.startswith("tunebook."):  # a recording must not choose the code that runs
        found: Kernel[Any, Any] | None = import_module(finder).find_kernel(op_id_v, module)
        return found
    kinds = [kind for kind in vars(sys.modules[module]).values() if _is_plain_kernel(kind, module)]
    return next((made for made in (kind() for kind in kinds) if made.op_id_v == op_id_v), None)


def _is_plain_kernel(kind: object, module: str) -> bool:
    if not isinstance(kind, type) or not issubclass(kind, Kernel) or kind.__module__ != module:
        return False
    needed = [p for p in inspect.signature(kind).parameters.values() if p.default is p.empty]
    return all(p.kind in {p.VAR_POSITIONAL, p.VAR_KEYWORD} for p in needed)


def problem_here(kernel: Kernel[Any, Any], inv: Invocation[Any, Any]) -> Problem:
    """Return the problem that a recorded call is on this machine."""
    # The specs of its arrays say "gpu", but not which: an array of no size is made to find out. One of each library,
    # for their versions count too, and a process that has just started need not have loaded them.
    specs = [x for x in arrays_in((inv.args, inv.kwargs)) if isinstance(x, ArraySpec)]
    # The last one of each library that is not on the host, if there is one.
    by_library = {spec.library: spec for spec in sorted(specs, key=lambda spec: spec.platform not in {"", "cpu"})}
    made = [materialise(replace(spec, shape=(), layout="C", variant="")) for spec in by_library.values()]
    problem = kernel.problem(inv)
    return problem._replace(device=device_fingerprint(device_of(made))) if made else problem


# --------------------------------------------------------------------------------------------- current recordings

_active: Final[list[Recording]] = []  # append and remove are atomic


class Apart:
    """Marks that calls are recorded apart, because they do not belong to the program."""

    def __init__(self) -> None:
        self.recording: Final = Recording()

    def content(self) -> str:
        """Return a text that is equal for all marks of this class."""
        return "recorded apart"


def recordings() -> tuple[Recording, ...]:
    """Return the recordings that are on here."""
    apart = None if INNERMOST.get() is None else next(scoped(Apart), None)
    return tuple(_active) if apart is None else (apart.recording,)


def observing(problem: Problem, kernel: Kernel[Any, Any], args: tuple[Any, ...]) -> Callable[[float], None]:
    """Describe a call that is about to run; call the result with its seconds after it has run."""
    described = [(recording, recording.describe(problem, kernel, args, {})) for recording in recordings()]

    def count(seconds: float) -> None:
        for recording, new in described:
            recording.count(problem, new, seconds)

    return count


class record(ContextDecorator):  # noqa: N801 - it is used like a function
    """Collect every tunable call of the program, in all its threads, without tuning anything while it lasts.

    Calls run with a known configuration, else with the heuristic, else with the first candidate. The with-block has a
    `Recording`.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        if capacity < 1:
            raise DefinitionError(f"a recording needs room for at least one call; got capacity={capacity}")
        self._capacity = capacity
        self._blocks: list[tuple[AbstractContextManager[Recording], Recording]] = []

    def __repr__(self) -> str:
        found = f": {self._blocks[-1][1]!r}" if self._blocks else ""
        return f"<record{found or ': use it as `with tunebook.record() as recording:`'}>"

    def __enter__(self) -> Recording:
        block = _recorded(self._capacity)
        self._blocks.append((block, block.__enter__()))
        return self._blocks[-1][1]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return self._blocks.pop()[0].__exit__(kind, error, trace)


@contextmanager
def _recorded(capacity: int) -> Iterator[Recording]:
    recording = Recording(capacity)
    suspension = None
    try:
        suspension = MEMO.suspend()
        # For the whole process on purpose: frameworks run backward passes in threads of their own.
        _active.append(recording)
        # Memoised answers are given without a look at recordings. While a recording is on, no answer is memoised.
        MEMO.invalidate()
        yield recording
    finally:
        with suppress(ValueError):
            _active.remove(recording)
        del suspension  # here, because the traceback of an error keeps this frame
