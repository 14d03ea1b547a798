"""How fast a kernel could be at best: a candidate that reaches this bound ends the tuning."""

from __future__ import annotations

from typing import Final, NamedTuple

from tunebook._base.errors import DefinitionError

# A kernel that reaches this fraction of the device's peak counts as optimal: the rest is launch and tail.
NEAR: Final = 0.9


class Peak(NamedTuple):
    """The peak rates of a device: operations and bytes per second; None is unknown.

    >>> Peak(flops_per_s=1e12, bytes_per_s=1e11).least_s(flops=2e9, bytes_moved=1e9)
    0.01
    """

    flops_per_s: float | None = None
    bytes_per_s: float | None = None

    def least_s(self, flops: float | None, bytes_moved: float | None) -> float:
        """Return the lower bound of the seconds for some work; 0 if unknown."""
        needs = [(flops, self.flops_per_s), (bytes_moved, self.bytes_per_s)]
        return max((amount / rate for amount, rate in needs if amount and rate), default=0.0)


class Roofline(NamedTuple):
    """The work of a call and the peak of its device; an amount of None is unknown."""

    flops: float | None
    bytes_moved: float | None
    peak: Peak

    @property
    def least_s(self) -> float:
        """The lower bound of the seconds for this work; 0 if unknown."""
        return self.peak.least_s(self.flops, self.bytes_moved)


# By a part of the device's name, the most specific first. The makers' numbers for dense matrices in the narrowest
# floating-point format, so that no wider format can beat the bound. Where several memory sizes are sold, the fastest.
_PEAKS: Final = (
    ("b200", Peak(9000e12, 8.0e12)),
    ("h200", Peak(1979e12, 4.8e12)),
    ("h100", Peak(1979e12, 3.35e12)),
    ("h20", Peak(296e12, 4.0e12)),
    ("a100", Peak(312e12, 2.04e12)),
    ("l40s", Peak(733e12, 0.864e12)),
    ("l4", Peak(242e12, 0.3e12)),
    ("mi300x", Peak(2615e12, 5.3e12)),
)


def peak_of(device: str) -> Peak:
    """Return the peak of a device by its fingerprint; processors differ too much to be listed.

    >>> peak_of("cuda:NVIDIA H200:sm_90").bytes_per_s
    4800000000000.0
    """
    if device.startswith("cpu:"):
        return Peak()
    words = "".join(c if c.isalnum() else " " for c in device.lower()).split()
    return next((peak for name, peak in _PEAKS if name in words), Peak())


def check_peak(peak: object) -> Peak | None:
    """Return a user's peak; raise `DefinitionError` for any other value."""
    if peak is None or isinstance(peak, Peak):
        return peak
    raise DefinitionError(f"peak={peak!r}: write tunebook.Peak(flops_per_s=..., bytes_per_s=...)")
