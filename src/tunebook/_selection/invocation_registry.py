"""The calls that a process remembers for `get_invocations`."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import TYPE_CHECKING, Any, Final

from tunebook._base.vocabulary import Problem
from tunebook._selection.recording import RecordedCall, Recording, module_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

REGISTRY: Final = Recording()


def record_invocation(
    dev: str, op_id_v: str, call_key: str, kernel: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Remember a call in the process's registry, with specs in place of arrays; it replaces an earlier one of its key.

    An `Executor` does so for each of its calls, if `TUNEBOOK_RECORD=1`.
    """
    REGISTRY.observe(Problem(dev, op_id_v, call_key), kernel, tuple(args), kwargs, latest=True)


class Invocations(dict[str, dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]]]):
    """`{op: {call_key: (kernel, args, kwargs)}}`. `calls` also has counts and seconds, the most expensive first."""

    def __init__(self, calls: Iterable[RecordedCall]) -> None:
        super().__init__()
        self.calls: Final = tuple(calls)
        for call in self.calls:
            self.setdefault(call.problem.op, {})[call.problem.call_key] = (call.kernel, call.args, dict(call.kwargs))


def get_invocations(dev: str) -> Invocations:
    """Return the calls remembered for a device: `{op: {call_key: (kernel, args, kwargs)}}`."""
    return Invocations(call for call in REGISTRY if call.problem.device == dev)


def calls_in(recording: Iterable[RecordedCall] | str | PathLike[str] | Mapping[str, Any]) -> Iterable[RecordedCall]:
    """Return the calls of a recording, of a file that holds one, or of the result of `get_invocations`."""
    if isinstance(recording, (str, PathLike)):
        return Recording.load(recording)
    if isinstance(recording, Invocations):
        return recording.calls
    if not isinstance(recording, Mapping):
        return recording
    return [
        RecordedCall(
            problem=Problem("", op, key), kernel=kernel, args=tuple(args), kwargs=kwargs, module=module_of(kernel)
        )
        for op, calls in recording.items()
        for key, (kernel, args, kwargs) in calls.items()
    ]


def clear_invocations() -> None:
    """Forget the calls of `record_invocation`."""
    REGISTRY._calls.clear()  # noqa: SLF001 - the registry is this module's own
