"""Names of the device (hardware) and of the environment (software) of a measurement, apart from each other."""

from __future__ import annotations

import os
import re
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from tunebook._arrays.describe import members_of, platform_of
from tunebook._arrays.device_properties import note_properties
from tunebook._arrays.library import library_named, root_module
from tunebook._base.errors import DefinitionError
from tunebook._base.record_format import blake2b, canonical_json

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

# The instruction sets that compilers and kernels choose code by. Not all flags: the rest are mitigations and kernel
# features that come and go with a boot or a microcode update, and would make it another machine each time.
_COMPUTE_FLAG: Final = re.compile(
    r"(sse|ssse|avx|fma|f16c|amx|bmi|popcnt|aes|sha|gfni|vaes|vpclmul|neon|asimd|sve|sme|bf16|i8mm|fphp|fp$|pmull|rv\d)"
)

_FIELDS: Final = {  # x86, ARM, POWER, RISC-V
    "vendor": ("vendor_id", "CPU implementer"),
    "name": ("model name", "Processor", "cpu", "uarch"),
    "family": ("cpu family", "CPU architecture"),
    "model": ("model", "CPU part"),
    "stepping": ("stepping", "CPU variant"),
    "flags": ("flags", "Features", "isa"),
}


def device_fingerprint(device: object = None) -> str:
    """Return the name of a kind of hardware, for people and for keys: two GPUs of the same model have the same name.

    None is the host's processor, a string stands for itself. A framework is asked only about its own accelerators.
    """
    if device is None:
        return host_cpu()
    if isinstance(device, str):
        if not device:
            raise DefinitionError('invalid device="": leave it out for the host, or name the device')
        return host_cpu() if device == "cpu" else device
    device = next(iter(members_of(device)), device)
    kind = platform_of(device)
    if kind == "cpu":
        return host_cpu()
    name = f"{kind or 'device'}:{_hardware_name(device)}"
    note_properties(name, library_named(root_module(type(device))).properties(device))
    return name


def get_device_platform(device: object = None) -> Literal["gpu", "tpu", "cpu"]:
    """Return which variants of a kernel apply to a device; "cpu" for the host and for names that say nothing."""
    kind = platform_of(device)
    return "gpu" if kind == "gpu" else "tpu" if kind == "tpu" else "cpu"


def _hardware_name(device: Any) -> str:
    for attribute in ("device_kind", "name"):  # jax, then pyopencl and numba
        name = getattr(device, attribute, None)
        if isinstance(name, (str, bytes)):
            return _text(name)
    kind = type(device)
    found = library_named(root_module(kind)).hardware(device)
    if found is None:
        name = f"{kind.__module__}.{kind.__qualname__}"
        raise DefinitionError(f"cannot name the hardware of a {name}; pass its name instead")
    return _text(found)


def _text(name: str | bytes) -> str:
    text = name.decode("utf-8", "replace") if isinstance(name, bytes) else name
    return " ".join(text.replace("\0", " ").split())


@cache
def host_cpu() -> str:
    """Return the fingerprint of this machine's processor; read once per process."""
    try:
        cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        machine = os.uname().machine
    except OSError:
        import platform  # noqa: PLC0415 - loaded late: 1.3 ms, and Linux does without

        # macOS and Windows. The processor's own words: "Intel64 Family 6 Model 142 Stepping 10, GenuineIntel".
        cpuinfo, machine = f"model name: {platform.processor()}", platform.machine()
    return cpu_fingerprint(cpuinfo, machine, os.cpu_count() or 1)


def cpu_fingerprint(cpuinfo: str, machine: str, cores: int) -> str:
    r"""Return the fingerprint of the processor that a text like Linux's /proc/cpuinfo describes.

    >>> cpu_fingerprint("vendor_id : GenuineIntel\nmodel name : Xeon(R) 2.0GHz\nflags : avx2 fma", "x86_64", 4)
    'cpu:GenuineIntel Xeon(R) 2.0GHz x86_64 4 cores isa-e3199c86'
    """
    values: dict[str, dict[str, None]] = {}  # of all cores: a phone has two or three kinds of them
    for line in cpuinfo.splitlines():
        key, colon, value = line.partition(":")
        if colon and value.strip():
            values.setdefault(key.strip(), {})[_text(value)] = None
    present = {name: next((key for key in keys if key in values), None) for name, keys in _FIELDS.items()}
    found = {name: "+".join(values[key]) for name, key in present.items() if key is not None}
    flags = sorted(flag for flag in found.pop("flags", "").split() if _COMPUTE_FLAG.match(flag))
    isa = blake2b(" ".join(flags).encode(), digest_size=4).hexdigest()
    numbers = "/".join(found[name] for name in ("family", "model", "stepping") if name in found)
    words = [found.get("vendor", ""), found.get("name", ""), numbers, machine, f"{cores} cores", f"isa-{isa}"]
    return "cpu:" + " ".join(word for word in words if word)


def environment(libraries: Iterable[str] = (), extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the software that a measurement depends on: Python, and the named libraries if they are loaded.

    `extra` adds facts that only the caller knows, for example a compiler's version. tunebook itself is left out.
    """
    python = f"{sys.implementation.name} {sys.version_info.major}.{sys.version_info.minor}"
    return {"python": python, **{name: library_version(name) for name in libraries}, **(extra or {})}


def driver_of(device: object) -> Mapping[str, str]:
    """Return the version of a device's driver, which is software too; empty for the host's processor."""
    own = library_named(root_module(type(device))).driver(device)
    return own if own is not None else gpu_driver() if platform_of(device) == "gpu" else {}


@cache
def gpu_driver(root: Path = Path("/")) -> dict[str, str]:
    """Return the version of the GPU driver on this machine, as `driver_of` gives it; empty if it cannot be seen."""
    try:
        text = (root / "proc/driver/nvidia/version").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return _driver_of_kernel(root)
    return {"driver": f"nvidia {nvidia_version(text)}"}


def _driver_of_kernel(root: Path) -> dict[str, str]:
    """Return the version of AMD's or Intel's driver: its own, or the kernel's if it came with the kernel."""
    for module in ("amdgpu", "xe", "i915"):
        folder = root / "sys/module" / module
        with suppress(OSError):
            return {"driver": f"{module} {(folder / 'version').read_text(encoding='utf-8').strip()}"}
        if folder.is_dir():
            return {"driver": f"{module} of Linux {os.uname().release}"}
    return {}


def nvidia_version(text: str) -> str:
    """Return the version that NVIDIA's driver gives itself in /proc.

    >>> nvidia_version("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.10  Release Build  (root@)")
    '570.86.10'
    """
    version = re.search(r"\s(\d+\.[\d.]+)\s", text)
    return "unknown" if version is None else version[1]


def environment_fingerprint(libraries: Iterable[str] = (), extra: Mapping[str, str] | None = None) -> str:
    """Return `environment` as a line of text, equal exactly when the environments are; `json.loads` reads it."""
    return canonical_json({**environment(libraries, extra)})


def library_version(name: str) -> str:
    """Return the version of a loaded library; "not loaded" otherwise, since asking must not import it."""
    module = sys.modules.get(name)
    if module is None:
        return "not loaded"
    version = getattr(module, "__version__", None)
    if isinstance(version, str):
        return version
    from importlib import metadata  # noqa: PLC0415 - 15 ms to import, for the few libraries without __version__

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "unknown"
