"""The device that Triton launches on, as Triton's driver knows it."""

from __future__ import annotations

from typing import Any

from triton.runtime import driver

from tunebook.adapters._cuda.timer import EventTimer


def interface() -> Any:
    """Return the module with events, streams and properties: `torch.cuda`, or its like for other vendors."""
    return driver.active.get_device_interface()


def current_device() -> int:
    """Return the index of the device that this thread launches on."""
    return driver.active.get_current_device()  # type: ignore[no-any-return]


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
