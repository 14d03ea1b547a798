"""Colours by what they mean, for light and dark. Lightness alone tells them apart, so that colour blindness does not.

They are made in OKLCH, where equal steps look equal: the scale of the heat maps changes lightness by the same amount at
each step, and its ends differ most from the paper where the time is best.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Final, NamedTuple

STEPS: Final = 16


class Theme(NamedTuple):
    """Colours as `#rrggbb`, by their names; `scale` is from the best to the worst."""

    named: dict[str, str]
    scale: tuple[str, ...]

    def on_scale(self, step: int) -> str:
        """Return the colour of text on a step of the scale."""
        return max("#111111", "#ffffff", key=lambda ink: contrast(ink, self.scale[step]))


def oklch(lightness: float, chroma: float, hue: float) -> str:
    """Return a colour as `#rrggbb`; what a screen cannot show loses chroma until it can.

    >>> oklch(1.0, 0.0, 0.0), oklch(0.0, 0.0, 0.0)
    ('#ffffff', '#000000')
    """
    while True:
        linear = _linear(lightness, chroma, hue)
        if chroma <= 0 or all(-1e-4 <= part <= 1 + 1e-4 for part in linear):
            return "#" + "".join(f"{round(255 * _gamma(min(max(part, 0.0), 1.0))):02x}" for part in linear)
        chroma = max(chroma - 0.005, 0.0)


def _linear(lightness: float, chroma: float, hue: float) -> tuple[float, float, float]:
    """From OKLab to linear sRGB: two matrices and a cube, as its author published them."""
    a, b = chroma * math.cos(math.radians(hue)), chroma * math.sin(math.radians(hue))
    long = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3
    middle = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3
    short = (lightness - 0.0894841775 * a - 1.2914855480 * b) ** 3
    return (
        4.0767416621 * long - 3.3077115913 * middle + 0.2309699292 * short,
        -1.2684380046 * long + 2.6097574011 * middle - 0.3413193965 * short,
        -0.0041960863 * long - 0.7034186147 * middle + 1.7076147010 * short,
    )


def _gamma(part: float) -> float:
    return 12.92 * part if part <= 0.0031308 else 1.055 * part ** (1 / 2.4) - 0.055


def contrast(one: str, other: str) -> float:
    """Return the contrast of two colours as WCAG defines it, from 1 to 21; text needs 4.5.

    >>> contrast("#000000", "#ffffff")
    21.0
    """
    darker, lighter = sorted((_luminance(one), _luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def _luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@cache
def themes() -> tuple[Theme, Theme]:
    """Return the light theme and the dark one."""
    return (
        Theme(
            {
                "paper": oklch(0.990, 0.002, 90),
                "card": oklch(1.0, 0.0, 0),
                "ink": oklch(0.24, 0.012, 260),
                "muted": oklch(0.50, 0.012, 260),
                "rule": oklch(0.915, 0.004, 260),
                "mark": oklch(0.72, 0.012, 260),
                "chosen": oklch(0.50, 0.15, 256),
                "default": oklch(0.545, 0.14, 48),
                "failed": oklch(0.50, 0.16, 22),
                "hover": oklch(0.965, 0.006, 256),
            },
            tuple(_scale(0.36, 0.955, 268, 100)),
        ),
        Theme(
            {
                "paper": oklch(0.19, 0.008, 260),
                "card": oklch(0.225, 0.009, 260),
                "ink": oklch(0.93, 0.006, 260),
                "muted": oklch(0.72, 0.010, 260),
                "rule": oklch(0.33, 0.010, 260),
                "mark": oklch(0.56, 0.012, 260),
                "chosen": oklch(0.76, 0.12, 245),
                "default": oklch(0.78, 0.13, 65),
                "failed": oklch(0.74, 0.13, 22),
                "hover": oklch(0.275, 0.012, 256),
            },
            tuple(_scale(0.93, 0.31, 104, 282)),
        ),
    )


def _scale(best: float, worst: float, first: float, last: float) -> list[str]:
    parts = [step / (STEPS - 1) for step in range(STEPS)]
    return [oklch(best + part * (worst - best), 0.125, first + part * (last - first)) for part in parts]


def style_sheet() -> str:
    """Return both themes as custom properties: as the system asks, or else the reader; always light on paper."""
    light, dark = (_properties(theme) for theme in themes())
    return (
        f":root{{color-scheme:light;{light}}}\n"
        f"@media (prefers-color-scheme:dark){{:root:not([data-theme=light]){{color-scheme:dark;{dark}}}}}\n"
        f":root[data-theme=dark]{{color-scheme:dark;{dark}}}\n"
        f"@media print{{:root,:root[data-theme]{{color-scheme:light;{light}}}}}\n"
        + "".join(f".q{step}{{fill:var(--q{step})}}.chart .t{step}{{fill:var(--t{step})}}" for step in range(STEPS))
    )


def _properties(theme: Theme) -> str:
    named = [f"--{name}:{colour}" for name, colour in theme.named.items()]
    scale = [f"--q{step}:{colour};--t{step}:{theme.on_scale(step)}" for step, colour in enumerate(theme.scale)]
    return ";".join([*named, *scale])
