"""The device that Triton launches on, through Triton's own driver: the one place that asks it."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any, Final

from triton.runtime import driver

from tunebook.adapters._cuda.graph import is_capturing

_NVIDIA: Final = Path("/proc/driver/nvidia/version")


def interface() -> Any:
    """Return what has events, streams and properties: `torch.cuda`, or its like for other vendors."""
    return driver.active.get_device_interface()


def current_device() -> int:
    """Return the index of the device that this thread launches on."""
    return driver.active.get_current_device()  # type: ignore[no-any-return]


def use_device(index: int) -> None:
    """Make this thread launch on a device; a new thread starts with the first one."""
    if current_device() != index:
        driver.active.set_current_device(index)


def device_count() -> int:
    """Return how many devices this process may use."""
    return int(interface().device_count())


def device_name(index: int) -> str:
    """Return a device's name as it stands in keys; two of one model have the same."""
    return _device_name(driver.active, index)


@cache
def _device_name(active: Any, index: int) -> str:
    return f"gpu:{active.get_device_interface().get_device_name(index)}"


def architecture(index: int) -> str:
    """Return what programs are compiled for."""
    return _architecture(driver.active, index)


@cache
def _architecture(active: Any, _index: int) -> str:
    target = active.get_current_target()
    return f"{target.backend}:{target.arch}"


def under_capture() -> bool:
    """Return whether launches of this thread go into a graph."""
    return is_capturing(interface())


def free_bytes() -> float:
    """Return how much memory of this thread's device nobody uses."""
    return float(interface().mem_get_info()[0])


def tensor_device() -> Any:
    """Return this thread's device as torch names it."""
    return driver.active.get_active_torch_device()


def cold_cache() -> Any:
    """Return a buffer that fills the device's caches when it is written."""
    return driver.active.get_empty_cache_for_benchmark()


@cache
def driver_version() -> str:
    """Return the version of the GPU's driver, or "unknown"; read once per process."""
    try:
        found = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", _NVIDIA.read_text())
    except OSError:  # another vendor, or a container that hides it
        return "unknown"
    return found[1] if found else "unknown"
