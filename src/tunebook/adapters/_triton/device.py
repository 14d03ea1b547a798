"""The device that Triton launches on. Only this module asks Triton's driver."""

from __future__ import annotations

from typing import Any

from triton.runtime import driver

from tunebook._arrays.device_fingerprint import nvidia_driver


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


def device_count() -> int:
    """Return how many devices this process may use."""
    return int(interface().device_count())


def device_name(index: int) -> str:
    """Return a device's name as it stands in keys; GPUs of the same model share it."""
    return f"gpu:{interface().get_device_name(index)}"


def architecture() -> str:
    """Return the architecture that programs of this thread are compiled for."""
    target = driver.active.get_current_target()
    return f"{target.backend}:{target.arch}"


def under_capture() -> bool:
    """Return whether launches of this thread go into a CUDA graph, where nothing may be measured or waited for."""
    return bool(interface().is_current_stream_capturing())


def free_bytes() -> float:
    """Return how much memory of this thread's device is unused."""
    return float(interface().mem_get_info()[0])


def tensor_device() -> Any:
    """Return this thread's device as torch names it."""
    return driver.active.get_active_torch_device()


def cold_cache() -> Any:
    """Return a buffer that fills the device's caches when it is written."""
    return driver.active.get_empty_cache_for_benchmark()


def driver_version() -> str:
    """Return the version of NVIDIA's driver; "unknown" for other vendors, or in a container that hides it."""
    return nvidia_driver().get("driver", "unknown").removeprefix("nvidia ")
