"""Colours by their meaning, for light and dark. They differ in lightness, so that colour-blind readers see them apart.

They are made in OKLCH, where equal steps look equal: the scale of the heat maps changes lightness by the same amount at
each step, and the best time contrasts most with the paper.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Final

STEPS: Final = 16
WINNERS: Final = 9  # colours of winners by size: a letter each, and one for all others


def oklch(lightness: float, chroma: float, hue: float) -> str:
    """Return a colour as `#rrggbb`; a colour outside of sRGB loses chroma until it is inside.

    >>> oklch(1.0, 0.0, 0.0), oklch(0.0, 0.0, 0.0)
    ('#ffffff', '#000000')
    """
    while True:
        # Two matrices and a cube, as the author of OKLab published them, give linear sRGB.
        a, b = chroma * math.cos(math.radians(hue)), chroma * math.sin(math.radians(hue))
        long = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3
        middle = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3
        short = (lightness - 0.0894841775 * a - 1.2914855480 * b) ** 3
        linear = (
            4.0767416621 * long - 3.3077115913 * middle + 0.2309699292 * short,
            -1.2684380046 * long + 2.6097574011 * middle - 0.3413193965 * short,
            -0.0041960863 * long - 0.7034186147 * middle + 1.7076147010 * short,
        )
        if chroma <= 0 or all(-1e-4 <= part <= 1 + 1e-4 for part in linear):
            parts = (min(max(part, 0.0), 1.0) for part in linear)
            gamma = (12.92 * p if p <= 0.0031308 else 1.055 * p ** (1 / 2.4) - 0.055 for p in parts)
            return "#" + "".join(f"{round(255 * part):02x}" for part in gamma)
        chroma = max(chroma - 0.005, 0.0)


def contrast(one: str, other: str) -> float:
    """Return the contrast of two colours as WCAG defines it, from 1 to 21; text needs 4.5.

    >>> contrast("#000000", "#ffffff")
    21.0
    """
    luminances = []
    for colour in (one, other):
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
        luminances.append(0.2126 * red + 0.7152 * green + 0.0722 * blue)
    return (max(luminances) + 0.05) / (min(luminances) + 0.05)


# Lightness, chroma and hue of each colour, for light and for dark.
_COLOURS: Final = {
    "paper": ((0.990, 0.002, 90), (0.19, 0.008, 260)),
    "card": ((1.0, 0.0, 0), (0.225, 0.009, 260)),
    "ink": ((0.24, 0.012, 260), (0.93, 0.006, 260)),
    "muted": ((0.50, 0.012, 260), (0.72, 0.010, 260)),
    "rule": ((0.915, 0.004, 260), (0.33, 0.010, 260)),
    "mark": ((0.72, 0.012, 260), (0.56, 0.012, 260)),
    "chosen": ((0.50, 0.15, 256), (0.76, 0.12, 245)),
    "heuristic": ((0.545, 0.14, 48), (0.78, 0.13, 65)),
    "failed": ((0.50, 0.16, 22), (0.74, 0.13, 22)),
    "shade": ((0.80, 0.008, 260), (0.45, 0.012, 260)),
    "hover": ((0.965, 0.006, 256), (0.275, 0.012, 256)),
}


# Lightness of the best and the worst time, and their hues, for light and for dark.
_SCALES: Final = ((0.36, 0.955, 268, 100), (0.93, 0.31, 104, 282))


@cache
def themes() -> tuple[dict[str, str], ...]:
    """Return the colours of the light and the dark theme by name, as `#rrggbb`.

    `q0` to `q15` are the scale from the best to the worst time, `t3` is the colour of text on `q3`. `w0` to `w8` are
    the colours of winners, `l3` is the colour of text on `w3`.
    """
    found = []
    for at, (best, worst, first, last) in enumerate(_SCALES):
        theme = {name: oklch(*pair[at]) for name, pair in _COLOURS.items()}
        for step in range(STEPS):
            part = step / (STEPS - 1)
            ground = oklch(best + part * (worst - best), 0.125, first + part * (last - first))
            ink = "#111111" if contrast("#111111", ground) >= contrast("#ffffff", ground) else "#ffffff"
            theme |= {f"q{step}": ground, f"t{step}": ink}
        for winner in range(WINNERS):
            # Hues far apart, and lightness in turn: neighbours differ also for colour-blind readers.
            grey = winner == WINNERS - 1
            ground = oklch((0.45, 0.72, 0.58)[winner % 3], 0.0 if grey else 0.12, 256 + winner * 137.5)
            ink = "#111111" if contrast("#111111", ground) >= contrast("#ffffff", ground) else "#ffffff"
            theme |= {f"w{winner}": ground, f"l{winner}": ink}
        found.append(theme)
    return tuple(found)


def _rules_of(step: int) -> str:
    fill, stroke = f"fill:var(--q{step})", f"stroke:var(--q{step})"
    return f".q{step}{{{fill}}}\n.s{step}{{{stroke}}}\n.chart .t{step}{{fill:var(--t{step})}}\n"


def style_sheet() -> str:
    """Return both themes as CSS: the system's choice, then the reader's choice; always light when printed."""
    light, dark = (";".join(f"--{name}:{value}" for name, value in theme.items()) for theme in themes())
    return (
        f":root{{color-scheme:light;{light}}}\n"
        f"@media (prefers-color-scheme:dark){{:root:not([data-theme=light]){{color-scheme:dark;{dark}}}}}\n"
        f":root[data-theme=dark]{{color-scheme:dark;{dark}}}\n"
        f"@media print{{:root,:root[data-theme]{{color-scheme:light;{light}}}}}\n"
        + "".join(_rules_of(step) for step in range(STEPS))
        + "".join(f".w{at}{{fill:var(--w{at})}}\n.chart .l{at}{{fill:var(--l{at})}}\n" for at in range(WINNERS))
    )
