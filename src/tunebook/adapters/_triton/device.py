"""The device that Triton launches on, as Triton's driver knows it."""

from __future__ import annotations

from typing import Any, Final

from triton.runtime import driver

from tunebook.adapters._cuda.timer import EventTimer


def interface() -> Any:
    """Return the module with events, streams and properties: `torch.cuda`, or its like for other vendors."""
    return driver.active.get_device_interface()


def current_device() -> int:
    """Return the index of the device that this thread launches on."""
    return driver.active.get_current_device()  # type: ignore[no-any-return]


_MOST_STREAMS: Final = 64
_streams: Final[dict[tuple[int, int], Any]] = {}  # by device and handle


def current_stream() -> Any:
    """Return the stream that this thread launches on, as an object of `interface`.

    An event that gets no stream asks torch for it, which takes 7.5 of the 10.6 us of recording one on the host of an
    H200, and several times as long where the code is not in the processor's caches. Triton asks for the handle alone.
    """
    at = current_device()
    key = at, driver.active.get_current_stream(at)
    known = _streams.get(key)
    if known is None:
        if len(_streams) >= _MOST_STREAMS:  # of a program that makes ever new ones
            _streams.clear()
        known = _streams[key] = interface().current_stream()
    return known


def use_device(index: int) -> None:
    """Make this thread launch on a device; a new thread starts with the first one."""
    if current_device() != index:
        driver.active.set_current_device(index)


def device_name(index: int) -> str:
    """Return a device's name as it stands in keys; GPUs of the same model share it."""
    return f"gpu:{interface().get_device_name(index)}"


def event_timer(way: str = "launch", *, warm: bool = False) -> EventTimer:
    """Return a timer by device events for runs that open and close the timed window themselves."""
    make_cache = lambda: driver.active.get_empty_cache_for_benchmark()  # noqa: E731, PLW0108 - asked when it is used
    return EventTimer(interface, make_cache, windows=True, way=way, warm=warm)
