"""The exception tree, the import of optional packages, and the function by which the library warns.

TunebookError
├── NoConfig             (RuntimeError, LookupError)     no tier had a configuration
├── TuningFailed         (ExceptionGroup, RuntimeError)  every candidate failed; holds the real errors
│   └── NoGradient                                       gradients are to be measured, and there are none
├── DefinitionError      (ValueError)                    a kernel, space or setting is invalid
├── UnkeyableError       (TypeError)                     an argument cannot be part of a call key
├── CodecError           (ValueError)                    a value cannot be encoded, or data cannot be decoded
├── StoreError           (OSError)                       a store cannot be read or written
├── CompileError         (RuntimeError)                  a candidate did not compile
│   └── LeftOut                                          it would compile, and could not win
├── Unsupported          (NotImplementedError)           this kernel does not define the operation
├── Disagreement         (RuntimeError)                  ranks of a job use different configurations
└── MissingDependency    (ImportError)                   an optional package is not installed

Each error carries its facts as attributes and can be pickled, because tuning happens in other processes too.
"""

from __future__ import annotations

import contextlib
import sys
import typing
import warnings
from collections.abc import Mapping
from contextvars import ContextVar
from importlib import import_module
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

from tunebook._base.log import log

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tunebook._base.vocabulary import Measurement, Problem

E = TypeVar("E", bound=BaseException)


class TunebookError(Exception):
    """The base of all errors that this library raises on purpose."""


class NoConfig(TunebookError, RuntimeError, LookupError):  # noqa: N818 - named after the event, as LookupError is
    """No tier had a configuration for a call; `tried` holds (tier, reason), in the order asked."""

    def __init__(self, op: str, tried: Sequence[tuple[str, str]], remedy: str = "") -> None:
        self.op = op
        self.tried = tuple(tried)
        self.remedy = remedy or (
            "Pass a configuration with the call, give the kernel a heuristic, or allow tuning: "
            "policy_override(selector, allow_autotune=True)."
        )
        width = max((len(tier) for tier, _ in self.tried), default=0)
        below = "\n" + " " * (width + 4)
        lines = [f"  {tier:<{width}}  {clean_lines(said).replace(chr(10), below)}" for tier, said in self.tried]
        # By name: from Python 3.14 on, `super()` would be the class of another library that a subclass mixes in.
        Exception.__init__(self, "\n".join([f"no configuration for {op!r}. Asked in order:", *lines, self.remedy]))

    def __reduce__(self) -> tuple[type[NoConfig], tuple[object, ...]]:
        return type(self), (self.op, self.tried, self.remedy)


class TuningFailed(TunebookError, ExceptionGroup[Exception], RuntimeError):  # noqa: N818 - the same
    """Every candidate failed, or none was given.

    `exceptions` holds one error per candidate, each naming its configuration; the first alone if all raised alike.
    `measurements` hold the same failures as stored in the book, for a later tuning of these candidates.
    """

    measurements: tuple[Measurement, ...]

    # Both, because a group takes its arguments in `__new__`, and `__init__` keeps the arguments for pickling.
    def __new__(cls, message: str, exceptions: Sequence[Exception], measurements: Sequence[Measurement] = ()) -> Self:
        group = super().__new__(cls, message, exceptions)
        group.measurements = tuple(measurements)
        return group

    def __init__(self, message: str, exceptions: Sequence[Exception], measurements: Sequence[Measurement] = ()) -> None:
        del measurements  # taken by `__new__`
        super().__init__(message, exceptions)

    @property
    def on_made_up(self) -> bool:
        """Whether the candidates ran on made-up arguments, so that they may work on a caller's."""
        return bool(self.measurements) and all(m.values_from != "call" for m in self.measurements)

    @property
    def reason(self) -> str:
        """The most frequent error, in one line."""
        errors = [_named(e).partition("\n")[0] for e in self.exceptions]
        return max(errors, key=errors.count)

    @property
    def summary(self) -> str:
        """The message and the most frequent error, in one line."""
        return f"{self.message}: {self.reason}"

    def derive(self, excs: Sequence[Exception], /) -> TuningFailed:  # type: ignore[override] # errors only, no exits
        """Return a group of some of the errors, as `except*` needs it."""
        return type(self)(self.message, excs, self.measurements)

    def __str__(self) -> str:
        # The first note of an error names its candidate.
        notes = (": ".join([*getattr(e, "__notes__", ()), _named(e)]) for e in self.exceptions)
        return "\n".join([self.message, *(f"  {note}" for note in notes)])


class NoGradient(TuningFailed):
    """Gradients are to be measured, and the candidates have none, whatever the values of their arguments are."""


class DefinitionError(TunebookError, ValueError):
    """A kernel, a space or a setting is invalid; raised where it is defined, not where it is called."""


class UnkeyableError(TunebookError, TypeError):
    """An argument cannot be part of a call key."""


class CodecError(TunebookError, ValueError):
    """A value cannot be encoded, or data cannot be decoded here."""


class StoreError(TunebookError, OSError):
    """A store cannot be read or written; `kind` names the fault and `path` the place."""

    def __init__(self, kind: str, path: str, message: str) -> None:
        self.kind = kind
        self.path = path
        self.message = message
        super().__init__(message)

    def __reduce__(self) -> tuple[type[StoreError], tuple[object, ...]]:
        return type(self), (self.kind, self.path, self.message)


class CompileError(TunebookError, RuntimeError):
    """A candidate did not compile; the message holds the output of the compiler."""


class LeftOut(CompileError):  # noqa: N818 - the same
    """A candidate was not compiled to the end, because it could not win; the message says why."""


class Unsupported(TunebookError, NotImplementedError):  # noqa: N818 - the same
    """This kernel does not define the requested operation."""


class Disagreement(TunebookError, RuntimeError):  # noqa: N818 - the same
    """Ranks of a job use different configurations, or some did not answer.

    `differences` holds (problem, configuration as text, ranks that use it), `missing` the ranks that did not answer.
    """

    def __init__(
        self,
        message: str,
        differences: Sequence[tuple[Problem, str, tuple[int, ...]]] = (),
        missing: Sequence[int] = (),
    ) -> None:
        self.message = message
        self.differences = tuple(differences)
        self.missing = tuple(missing)
        super().__init__(message)

    def __reduce__(self) -> tuple[type[Disagreement], tuple[object, ...]]:
        return type(self), (self.message, self.differences, self.missing)


class MissingDependency(TunebookError, ImportError):  # noqa: N818 - the same
    """An optional package is not installed; the message ends with the command that installs it."""


def require(module: str, *, feature: str, extra: str | None = None) -> Any:
    """Return an optional module; `MissingDependency` with the command to type if its package is not installed."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        # Only "it is not installed" becomes our error. A package that is installed but broken must show its own
        # traceback, or its user reinstalls it for ever.
        if not f"{module}.".startswith(f"{error.name}."):
            raise
    package = module.partition(".")[0]
    command = f"pip install {package}" if extra is None else f"pip install 'tunebook[{extra}]'"
    raise MissingDependency(f"{feature} needs {package!r}, which is not installed. Run: {command}")


def did_you_mean(kind: str, name: str, valid: Iterable[str]) -> str:
    """Return a message about an unknown name, with the nearest valid name and all valid names.

    >>> did_you_mean("option", "blok", ["block", "name"])
    "unknown option 'blok'; did you mean 'block'? Valid: block, name"
    """
    names = list(valid)
    return f"unknown {kind} {name!r}{_nearest(name, names) or '.'} Valid: {', '.join(names)}"


def not_among(what: str, value: object, valid: Iterable[str], other: str = "") -> str:
    """Return a message about a value that is not valid, with the valid values, other kinds of values, and the nearest.

    >>> not_among("mode", "frosen", ["normal", "frozen"])
    "invalid mode='frosen'; use one of 'normal', 'frozen'; did you mean 'frozen'?"
    """
    names = list(valid)
    near = _nearest(value, names) if isinstance(value, str) else ""
    return f"invalid {what}={value!r}; use one of {', '.join(map(repr, names))}{other and f', or {other}'}{near}"


def _nearest(name: str, names: Iterable[str]) -> str:
    """Return the question about the nearest name, for the end of a message; empty if none is near."""
    from difflib import get_close_matches  # noqa: PLC0415 - 3 ms, for a mistake only

    return "".join(f"; did you mean {close!r}?" for close in get_close_matches(name, list(names), n=1, cutoff=0.6))


def with_article(kind: str) -> str:
    """Return the name of a class with its article.

    >>> with_article("int"), with_article("Space")
    ('an int', 'a Space')
    """
    return f"{'an' if kind[:1].lower() in 'aeiou' else 'a'} {kind}"


def clean(text: str) -> str:
    r"""Return a text without control characters: anybody may have written the names and messages in a book.

    >>> clean("matmul\x1b[2J")
    'matmul\\x1b[2J'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def clean_lines(text: str) -> str:
    """Return a text of several lines without control characters."""
    return "\n".join(map(clean, text.split("\n")))


class TunebookWarning(UserWarning):
    """A fault that must not fail the user's call; warned about once per place and kind."""


# Their names for users, in tracebacks and in pickles.
for _public in (
    TunebookError, NoConfig, TuningFailed, DefinitionError, UnkeyableError, CodecError, StoreError, CompileError,
    Unsupported, Disagreement, MissingDependency, TunebookWarning,
):  # fmt: skip
    _public.__module__ = "tunebook"

_PACKAGE: Final = __file__.removesuffix("_base/errors.py")
# Code that a call of the program goes through inside this package: its own, generated, and of the standard library the
# modules through which it enters blocks and makes generic objects.
_PASSED: Final = (_PACKAGE, "<tunebook ", contextlib.__file__, typing.__file__)
_WARNED_LIMIT: Final = 4096  # a service that meets new paths all the time must not grow without bound
_warned: Final[dict[tuple[str, str], object]] = {}
# The line that a warning points at in a thread of this package, which works for a call of another thread.
CALLED_FROM: Final[ContextVar[tuple[str, int] | None]] = ContextVar("tunebook_called_from", default=None)


def warn_once(kind: str, where: str, message: str) -> None:
    """Warn, unless this kind of fault at this place was warned about before in this process."""
    # A full disk would otherwise say so at every call (a prototype logged 99,000 lines). No lock: `setdefault` is
    # atomic, and a lock could be held by this very thread (in a finaliser) or by a thread that a fork did not copy.
    mine = object()
    if _warned.setdefault((kind, where), mine) is not mine:
        return
    if len(_warned) > _WARNED_LIMIT:
        _warned.clear()
    text = clean_lines(message)
    log("warning", text, warned=True)
    if (line := CALLED_FROM.get()) is None:
        warnings.warn(text, TunebookWarning, stacklevel=_caller()[0])
    else:
        warnings.warn_explicit(text, TunebookWarning, *line)


def line_of_caller() -> tuple[str, int] | None:
    """Return the file and the line of the program that this thread works for, as warnings name them."""
    _, frame = _caller()
    return CALLED_FROM.get() or (None if frame is None else (frame.f_code.co_filename, frame.f_lineno))


def _caller() -> tuple[int, FrameType | None]:
    """Return how many frames of this package are above the caller's own line, and the frame of that line."""
    level = 1
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - as warnings.warn itself does
    # At the end of a process there is no other frame; the warning then names no line.
    while frame is not None and frame.f_code.co_filename.startswith(_PASSED):
        level, frame = level + 1, frame.f_back
    return level, frame


def hide_own_frames(error: E) -> E:
    """Return an error whose traceback has the frames of the program alone, and none of this package's."""
    shown, trace = [], error.__traceback__
    while trace is not None:
        if not trace.tb_frame.f_code.co_filename.startswith(_PASSED):
            shown.append(trace)
        trace = trace.tb_next
    chain: TracebackType | None = None
    for each in reversed(shown):
        chain = TracebackType(chain, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return error.with_traceback(chain)


def is_own_fault(trace: TracebackType | None) -> bool:
    """Whether an error was raised by a line of this package."""
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_code.co_filename.startswith(_PASSED)


def text_of(error: BaseException) -> str:
    """Return the text of an error; its class's name if the text is empty, or `__str__` itself fails.

    >>> text_of(ValueError("too large")), text_of(MemoryError())
    ('too large', 'MemoryError')
    """
    # Not by `traceback`, which does the same: a process without free descriptors could not import it.
    try:
        return str(error) or type(error).__name__
    except (ArithmeticError, AttributeError, LookupError, NameError, OSError, RuntimeError, TypeError, ValueError):
        return type(error).__name__


def _named(error: BaseException) -> str:
    """Return the class and the text of an error, with the nearest name of a configuration if one is misspelt."""
    near = ""
    if isinstance(error, RememberedError):
        return text_of(error)
    if isinstance(error, AttributeError) and isinstance(error.obj, Mapping):
        near = _nearest(error.name or "", map(str, error.obj))
    return f"{type(error).__name__}: {text_of(error)}{near}"


# Made of a text alone. Not AttributeError, whose hint needs its object, nor OSError, whose text has a number.
_PLAIN: Final = (ArithmeticError, AssertionError, MemoryError, NotImplementedError, RuntimeError, TypeError, ValueError)


class RememberedError(RuntimeError):
    """An error that is known by its text alone, which begins with the name of its class if it had one."""


def remembered(message: str, note: str) -> RememberedError:
    """Return the error of an earlier tuning from its text in the book, with a note that names its candidate."""
    first, *rest = message.strip().split("\n", 1)
    error = RememberedError("\n".join([f"{first} (remembered from an earlier tuning)", *rest]))
    error.add_note(note)
    return error


def as_text(error: Exception) -> Exception:
    """Return an error of the same text that may be kept, and of the same class if that is one of Python's.

    An error itself holds the frames that it went through, and so the arrays of the call: 400 MB for 80 MB of arguments.
    """
    if not isinstance(error, TuningFailed):
        return type(error)(text_of(error)[:1000]) if type(error) in _PLAIN else RememberedError(_named(error)[:1000])
    texts: list[Exception] = []
    for each in error.exceptions:
        texts.append(as_text(each))
        texts[-1].__notes__ = list(getattr(each, "__notes__", ()))
    return type(error)(error.message, texts)


def forget_warnings() -> None:
    """Let every warning be given once more; for tests."""
    _warned.clear()
