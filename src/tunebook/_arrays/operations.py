"""How arrays of a library are copied, compared, put back and timed: one table, which adapters add to.

Describing an array needs nothing of its library (see `_arrays`). Reading and writing what is in it does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from tunebook._arrays.describe import is_array, libraries_of, root_module

if TYPE_CHECKING:
    from collections.abc import Callable


class Timer(Protocol):
    """Times runs by the clock of a device, on which they may end after the call that started them."""

    @property
    def name(self) -> str:
        """Its name in the measurement policy: times by different clocks are never compared."""

    @property
    def is_device_clock(self) -> bool:
        """Whether the device's own clock takes the times, which repeats better than the host's."""

    def sample_s(self, launch: Callable[[], object], runs: int) -> float:
        """Return the seconds of one run, as the mean of several that are timed together."""

    def wait(self, result: Any) -> None:
        """Block until everything that was started is done."""


def _host_clock(_arguments: object) -> None:
    """Say that a library's runs are timed by the host's clock."""


class ArrayOps(NamedTuple):
    """What can be done with arrays of a library. A copy shares no memory with the array, and may be elsewhere.

    `is_close(x, y, tolerance)` says by itself that two arrays agree, as `_check` would; False if it is not sure.
    """

    is_writable: Callable[[Any], bool]
    copy: Callable[[Any], Any]
    is_same: Callable[[Any, Any], bool]
    put_back: Callable[[Any, Any], object]
    to_numpy: Callable[[Any], Any]
    timer: Callable[[object], Timer | None] = _host_clock
    is_close: Callable[[Any, Any, float], bool] = lambda _x, _y, _tolerance: False


_known: Final[dict[str, ArrayOps]] = {}


def register_ops(library: str, access: ArrayOps) -> None:
    """Let arrays of a library be arguments that kernels write to, and outputs that are compared."""
    _known[library] = access


def ops_of(x: object) -> ArrayOps | None:
    """Return what can be done with an array; None if it is none, or of a library that has not said so."""
    return _known.get(root_module(type(x))) if is_array(x) else None


def timer_for(arguments: object) -> Timer | None:
    """Return what times calls with these arguments; None is the host's clock."""
    timers = (_known[library].timer(arguments) for library in sorted(libraries_of(arguments) & _known.keys()))
    return next(filter(None, timers), None)


def _put_back(array: Any, copy: Any) -> None:
    array[...] = copy


register_ops(
    "numpy",
    ArrayOps(
        # Not a subclass: what one of those holds beside its values is its own affair.
        is_writable=lambda x: bool(
            type(x).__name__ == "ndarray" and x.flags.writeable and x.size and not x.dtype.hasobject
        ),
        copy=lambda x: x.copy(),
        is_same=lambda x, copy: bool(x.tobytes() == copy.tobytes()),  # bytes: a NaN is not equal to itself
        put_back=_put_back,
        to_numpy=lambda x: x,
    ),
)
