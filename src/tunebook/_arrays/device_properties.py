"""Properties of devices by name: how alike two devices are, before anything was measured on both."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from tunebook._base.vocabulary import Json


class DeviceProperties(NamedTuple):
    """Resources of a device; 0 is unknown.

    `cores` are multiprocessors, compute units or cores: the blocks of work that run side by side. `shared_kb` is the
    shared memory that one block may use, `registers` are the 32-bit registers of a core.
    """

    maker: str = ""
    cores: int = 0
    clock_mhz: int = 0
    bandwidth_gb_s: int = 0
    l2_kb: int = 0
    shared_kb: int = 0
    registers: int = 0


def _nvidia(cores: int, clock_mhz: int, bandwidth_gb_s: int, l2_mb: int, shared_kb: int) -> DeviceProperties:
    return DeviceProperties("nvidia", cores, clock_mhz, bandwidth_gb_s, 1024 * l2_mb, shared_kb, 65_536)


def _amd(cores: int, clock_mhz: int, bandwidth_gb_s: int, l2_mb: int, registers: int) -> DeviceProperties:
    return DeviceProperties("amd", cores, clock_mhz, bandwidth_gb_s, 1024 * l2_mb, 64, registers)


# Published numbers, by names as drivers give them; the first that fits counts. Clocks are the highest ones. Devices are
# compared by ratios, so that a few per cent do not matter.
_KNOWN: Final = {
    r"\bH100 PCIe\b": _nvidia(114, 1755, 2039, 50, 227),
    r"\bH100 NVL\b": _nvidia(132, 1785, 3938, 50, 227),
    r"\bH20\b": _nvidia(78, 1980, 4000, 60, 227),
    r"\b(H200|GH200)\b": _nvidia(132, 1980, 4800, 50, 227),
    r"\b(H100|H800)\b": _nvidia(132, 1980, 3350, 50, 227),
    r"\b(A100|A800)\b.*80GB": _nvidia(108, 1410, 2039, 40, 163),
    r"\b(A100|A800)\b": _nvidia(108, 1410, 1555, 40, 163),
    r"\bA6000\b": _nvidia(84, 1800, 768, 6, 99),
    r"\bA4000\b": _nvidia(48, 1560, 448, 4, 99),
    r"\bA40\b": _nvidia(84, 1740, 696, 6, 99),
    r"\bA10\b": _nvidia(72, 1695, 600, 6, 99),
    r"\bL40S?\b": _nvidia(142, 2520, 864, 96, 99),
    r"\bL4\b": _nvidia(58, 2040, 300, 48, 99),
    r"\bT4\b": _nvidia(40, 1590, 320, 4, 64),
    r"\bV100\b": _nvidia(80, 1530, 900, 6, 96),
    r"\bG?B200\b": _nvidia(148, 1965, 8000, 126, 227),
    r"\bRTX 4090\b": _nvidia(128, 2520, 1008, 72, 99),
    r"\bRTX 3090\b": _nvidia(82, 1695, 936, 6, 99),
    r"\bRTX 5090\b": _nvidia(170, 2407, 1792, 96, 99),
    r"\bMI300X\b": _amd(304, 2100, 5300, 32, 131_072),
    r"\bMI250X\b": _amd(110, 1700, 1638, 8, 131_072),  # of one of its two dies, which are two devices
    r"\bMI250\b": _amd(104, 1700, 1638, 8, 131_072),
    r"\bW6600\b": _amd(28, 2903, 224, 2, 65_536),
    r"\bW7800\b": _amd(70, 2499, 576, 6, 98_304),
}
_MAKERS: Final = {
    "nvidia": r"\bNVIDIA\b|\bGeForce\b|\bTesla\b|\bQuadro\b",
    "amd": r"\bAMD\b|\bRadeon\b|\bgfx\d",
    "intel": r"\bIntel\b|GenuineIntel",
    "arm": r"\bARM\b|aarch64",
    "apple": r"\bApple\b",
}
_HUGE: Final = 2**40  # larger numbers in a record are no properties
_CPU_CORES: Final = re.compile(r" (\d+) cores ")

NOTED: Final[dict[str, DeviceProperties]] = {}  # by drivers, or in records


def note_properties(device: str, properties: DeviceProperties | None) -> None:
    """Let the numbers of a driver count for a device, before those that are known by its name."""
    if properties is not None:
        NOTED[device] = properties


def noted_properties(device: str) -> dict[str, Json]:
    """Return the numbers that are noted for a device, for the record of a tuning.

    Another machine that reads the record may know the device neither by its driver nor by its name.
    """
    return {name: number for name, number in NOTED[device]._asdict().items() if number}


def note_recorded(device: str, facts: Json) -> None:
    """Let the numbers in a record count for a device whose driver is not here."""
    if isinstance(facts, dict) and device not in NOTED:
        kinds = DeviceProperties()._asdict()
        known: Any = {name: found for name, found in facts.items() if _is_plausible(found, kinds.get(name))}
        note_properties(device, DeviceProperties(**known) if known else None)


def _is_plausible(found: Json, like: object) -> bool:
    return type(found) is type(like) and (not isinstance(found, int) or 0 < found < _HUGE)


def read_torch(found: object) -> DeviceProperties:
    """Return the properties in torch's description of a GPU; which of them there are depends on torch's version."""
    names = ("multi_processor_count", "L2_cache_size", "shared_memory_per_block_optin", "regs_per_multiprocessor")
    cores, l2, shared, registers = (int(getattr(found, name, 0)) for name in names)
    return DeviceProperties(cores=cores, l2_kb=l2 // 1024, shared_kb=shared // 1024, registers=registers)


def properties_of(device: str) -> DeviceProperties:
    """Return the properties of a device: each number comes from its driver, or else from the table of names.

    >>> properties_of("gpu:NVIDIA H200").cores, properties_of("cpu:GenuineIntel Xeon x86_64 4 cores isa-e3199c86").cores
    (132, 4)
    """
    maker = next((maker for maker, names in _MAKERS.items() if re.search(names, device)), "")
    stated = _CPU_CORES.search(device)
    unknown = DeviceProperties(maker, int(stated[1]) if stated else 0)
    by_name = next((known for names, known in _KNOWN.items() if re.search(names, device)), unknown)
    by_driver = NOTED.get(device, by_name)
    return by_name._replace(**{name: number for name, number in by_driver._asdict().items() if number})


def cores_of(device: str) -> int:
    """Return how many blocks of work a device runs side by side; 1 if that is unknown.

    >>> cores_of("gpu:NVIDIA H200"), cores_of("gpu:ACME")
    (132, 1)
    """
    return properties_of(device).cores or 1


def likeness(one: str, other: str) -> float | None:
    """Return how alike two devices are by their properties: 1 if they are equal; None if too little is known.

    It halves if properties differ by a factor of two on the mean, and again if the makers differ.
    """
    ours, theirs = properties_of(one), properties_of(other)
    apart = [abs(math.log2(a / b)) for a, b in zip(ours[1:], theirs[1:], strict=True) if a and b]
    if not apart or not ours.maker or not theirs.maker:
        return None
    return math.exp2(-math.fsum(apart) / len(apart) - (ours.maker != theirs.maker))
