"""Families of devices: models so alike that a configuration which is best on one is a good answer on another."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from typing import Final

from tunebook._base.environment_variables import tell_of_new_setting
from tunebook._base.errors import DefinitionError

# By names as drivers give them. Members differ in memory, clocks or the number of cores, not in their instructions.
FAMILIES: Final = {
    "NVIDIA Ampere, data centre": r"\bA(100|800)\b",
    "NVIDIA Ada, data centre": r"\bL(20|40|40S)\b",
    "NVIDIA Hopper": r"\b(H20|H100|H200|H800|GH200)\b",
    "NVIDIA Blackwell, data centre": r"\bG?B(100|200|300)\b",
    "AMD CDNA 2": r"\bMI2(10|50X?)\b",
    "AMD CDNA 3": r"\bMI3(00[AX]?|08X|25X)\b",
    "AMD CDNA 4": r"\bMI35[05]X\b",
    "Intel Data Center GPU Max": r"\bData Center GPU Max\b",
}
_CORES: Final = re.compile(r" (\d+) cores ")
_alike: Final[dict[str, str]] = {}


def device_alias(device: str, like: str) -> None:
    """Let a device count as one of the family of another.

    Both are names as `tunebook ls` shows them, with or without the "gpu:" before them. The first may be a pattern, as
    "ACME 1*"; the latest that fits counts. An entry of the other device then answers where trust reaches "family".
    """
    for name in (device, like):
        if not isinstance(name, str) or not name:
            raise DefinitionError(f"invalid device {name!r}: give the name that `tunebook ls` shows")
    _alike.pop(_model(device), None)
    _alike[_model(device)] = _model(like)
    tell_of_new_setting()


def family_of(device: str) -> str:
    """Return the family of a device; a device of no known family is a family of its own.

    >>> family_of("gpu:NVIDIA H100 PCIe") == family_of("gpu:NVIDIA H200")
    True
    >>> family_of("gpu:NVIDIA A100-SXM4-40GB") == family_of("gpu:NVIDIA A10")
    False
    >>> family_of("cpu:GenuineIntel Xeon x86_64 4 cores isa-e3199c86")
    'GenuineIntel Xeon x86_64 isa-e3199c86'
    """
    model = _model(device)
    if model in _alike:
        model = _alike[model]
    elif _alike:
        model = next((like for names, like in reversed(_alike.items()) if fnmatchcase(model, names)), model)
    known = next((family for family, names in FAMILIES.items() if re.search(names, model)), None)
    return known or _CORES.sub(" ", model)  # a processor with fewer cores, in a container or a smaller server


def _model(device: str) -> str:
    kind, colon, name = device.partition(":")
    return name if colon and kind in ("gpu", "cpu", "tpu") else device
