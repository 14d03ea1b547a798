"""The vocabulary: problems, measurements, failures; and attributes that are computed once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Generic, Literal, NamedTuple, Protocol, Self, TypeAlias, TypeVar, overload

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"

Origin: TypeAlias = Literal["tuned", "imported", "pinned"]
"""The origin of a stored configuration. A heuristic is missing here, since a guess is never stored."""

# "check" is an error of the check of outputs itself, seen in calls that try candidates; it ends any other tuning.
FailureKind: TypeAlias = Literal["compile", "launch", "timeout", "crash", "memory", "wrong-result", "nan", "check"]

# How far an entry may be from the call that it answers, the nearest first.
Nearness: TypeAlias = Literal["ratio", "difference", "below"]  # how a table measures the distance of two numbers
Trust: TypeAlias = Literal["exact", "versions", "candidates", "code", "family", "near", "any"]

ValuesFrom: TypeAlias = Literal["call", "inputs", "samples", "random"]
# How the times of several calls make one.
Combine: TypeAlias = Literal["mean", "geomean", "max", "relative"]
"""Where the values of a call's arguments are from: the caller, or made up by the author's function (`inputs=`), from
recorded integers, or at random."""

MADE_UP: Final[Mapping[str, str]] = {
    "call": "the caller's arguments",
    "inputs": "arguments made by inputs=",
    "samples": "made-up arguments: recorded integers, random floats",
    "random": "made-up arguments: random floats, integers from 1 to 3",
}

Event: TypeAlias = Literal[
    "override",
    "overlay_hit",
    "pinned",
    "cache_hit",
    "autotune_start",
    "autotune_progress",
    "autotune_finish",
    "disturbed",
    "live_progress",
    "rolled_back",
    "nearest",
    "predicted",
    "heuristics",
    "error",
]
"""The events of a selector, which its listeners get; docs/events.md says which data come with each."""

StrategyLike: TypeAlias = "str | Callable[..., Any]"
"""A search strategy: its name, or a class or function called with (space, seed=..., start=...)."""


# In a policy: launches between other work of a program, on warm caches, never compare with the samples of a race.
LIVE: Final = "/live"
_SHORT: Final = 120  # characters of a reason in one line
# In the facts of a record without a choice, and in measurements beside a choice: a tuning was interrupted.
INTERRUPTED: Final = "interrupted"
# How the names of a `TuneCache` begin in the book: of its keys, and of their entries by checksum.
TUNE_CACHES: Final = ("tune-cache/", "tune-cache-versions/")
VALUES: Final = "/values="  # in a policy, before the origin of made-up arguments; times on these never compare


class ShownByOp:
    """Shows as its class and its op id: its arguments may be arrays of any size."""

    __slots__ = ()
    op_id: str

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.op_id}>"


class ShownByPlace:
    """Shows as its class and the place of its records."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {getattr(self, 'where', '')}>"


class Problem(NamedTuple):
    """The key of a configuration. A NamedTuple, because it is hashed on every lookup."""

    device: str
    op: str
    call_key: str


class CallRecorder(Protocol):
    """Records the calls of a kernel as plain values."""

    @property
    def finder(self) -> str:
        """The module of tunebook whose `find_kernel(op_id_v, module)` finds the kernel after its module is imported."""

    def describe(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, samples: bool
    ) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """Return the arguments of a call that is about to run; with `samples`, integers may be kept."""

    def recall(self, inv: Any, seed: int | None = None) -> Any:
        """Return a recorded invocation on made-up arguments, or without a seed on arguments without memory."""


class NumberTable(Protocol):
    """Configurations that are asked for by numbers: a call runs nothing, so candidates run on arguments made for it."""

    declared: tuple[
        Trust, ...
    ]  # rungs that may answer where neither the policy nor the user says how far trust reaches

    def distance(self, entry: str, asked: str) -> float:
        """Return how far the call key of an entry is from the one asked for; infinite if the entry may not answer."""

    def ready(self, inv: Any) -> Any:
        """Return a call with the arguments that its candidates run on."""


class Failure(NamedTuple):
    """The reason why a candidate has no time. After the Unix time `expires` it may be tried again."""

    kind: FailureKind
    message: str
    expires: float | None = None

    @property
    def said(self) -> str:
        """The reason in one line.

        >>> Failure("launch", "ValueError: no room").said, Failure("memory", "too large").said
        ('raised ValueError: no room', 'memory: too large')
        """
        first = self.message.strip().partition("\n")[0]
        name, colon, _ = first.partition(":")
        raised = self.kind == "launch" and colon and name.replace(".", "").isidentifier()
        return f"raised {first}" if raised else f"{self.kind}: {first}"

    @property
    def is_lasting(self) -> bool:
        """Whether the same candidate fails tomorrow and on equal machines too: memory, time and a device may not."""
        return self.kind in {"compile", "wrong-result", "nan"}


class Measurement(NamedTuple):
    """The samples, or the failure, of a configuration on a problem, under a policy and in an environment.

    `config` is the encoded configuration (see `config_codec`), so that a measurement can be kept, merged and compared
    without the class of the configuration. `code` is the checksum of the kernel's code alone: adding a candidate
    changes the kernel's checksum, but leaves every known measurement valid. `dropped` marks a candidate that left its
    race behind others: its samples are early ones, not taken in turn with the finalists, and must not win against them.
    """

    config: Json
    fingerprint: str
    code: str
    policy: str
    environment: str
    samples_s: tuple[float, ...] = ()
    failure: Failure | None = None
    compile_s: float | None = None
    when: float = 0.0
    dropped: bool = False
    extra: Mapping[str, Json] = {}  # never written to; a read-only view could not be pickled

    def __repr__(self) -> str:
        # As it is encoded, because the codec is above this module.
        fields = self.config.get("v", self.config) if isinstance(self.config, dict) else self.config
        named = isinstance(fields, dict) and fields.items()
        config = ", ".join(f"{name}={value!r}" for name, value in named) if named else repr(fields)
        found = f"{len(self.samples_s)} samples" if self.failure is None else f"failed, {self.failure.said[:_SHORT]}"
        return f"<Measurement of {config}: {found}{', dropped' if self.dropped else ''}, {self.policy}>"

    @property
    def values_from(self) -> str:
        """Where the arguments' values were from, as in `ValuesFrom`. It is a part of the policy."""
        return self.policy.partition(VALUES)[2].partition("/")[0] or "call"

    @property
    def valid_samples_s(self) -> tuple[float, ...]:
        """The samples that can be times; a NaN, an infinity, zero or less never wins anything, nor do thirty years."""
        return tuple(s for s in self.samples_s if 0 < s < 1e9)


T_co = TypeVar("T_co", covariant=True)


class computed_once(Generic[T_co]):  # noqa: N801 - a decorator, written as functools.cached_property is
    """An attribute that is computed when it is first read: functools.cached_property without a lock.

    In Python 3.11 that has one lock for all objects of a class, and a fork while another thread computes an attribute
    leaves it locked in the child. Here two threads may both compute an attribute, and both get the first result.
    """

    def __init__(self, compute: Callable[[Any], T_co]) -> None:
        self._compute, self.__doc__ = compute, compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...
    @overload
    def __get__(self, instance: object, owner: type) -> T_co: ...
    def __get__(self, instance: object, owner: type) -> Self | T_co:
        if instance is None:
            return self
        found: T_co = vars(instance).setdefault(self._name, self._compute(instance))
        return found
