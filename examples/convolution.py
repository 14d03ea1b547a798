"""2-D convolution in C: the order of summation, the blocks and the compiler's optimisation level, all in one space."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import showing

import tunebook as tb
from tunebook.adapters.native import CLibrary, pointer

library = CLibrary(Path(__file__).with_name("convolution.c"), flags=("-march=native",))
space = tb.Space(
    ORDER=["by_pixel", "by_weight", "by_strip"],
    ROWS=[1, 16],
    COLUMNS=[64, 1024],
    STRIP=[16, 32, 64],
    cflags=[("-O2",), ("-O3",), ("-O3", "-ffast-math")],
).where(lambda c: c.ORDER == "by_strip" or c.STRIP == 16)  # the others do not read STRIP
default = tb.Config(ORDER="by_pixel", ROWS=16, COLUMNS=64, STRIP=16, cflags=("-O3",))


def reference(image, weights):
    """Convolve with numpy, in float64."""
    windows = np.lib.stride_tricks.sliding_window_view(image.astype(np.float64), weights.shape)
    return np.einsum("yxvu,vu->yx", windows, weights).astype(np.float32)


@tb.tunable(space=space, heuristic=default, reference=reference, compile=library.compile)
def convolve(image, weights, *, config):
    """Correlate a C-contiguous image of float32 with a window of weights; only where the whole window fits."""
    (height, width), (window_height, window_width) = image.shape, weights.shape
    if window_height > height or window_width > width or not image.dtype == weights.dtype == np.float32:
        raise ValueError(f"cannot convolve {image.dtype} {image.shape} with {weights.dtype} {weights.shape}")
    out = np.empty((height - window_height + 1, width - window_width + 1), np.float32)
    library(config).convolve(pointer(image), pointer(weights), pointer(out), height, width, window_height, window_width)
    return out


def operands(height, width, window, seed=0):
    """Return an image and a square window."""
    random = np.random.default_rng(seed)
    return random.random((height, width), np.float32), random.random((window, window), np.float32)


SHAPES = ((256, 256, 3), (512, 512, 5), (128, 2048, 9))


def main(shapes=SHAPES):
    """Tune every shape."""
    calls = {f"{h} x {w}, window {n} x {n}": operands(h, w, n) for h, w, n in shapes}
    showing.tune_and_show(convolve, calls, default)


if __name__ == "__main__":
    main()
