"""Arrays on a GPU that the driver of `test_device_lock` makes up: the first one that the process may see."""

from __future__ import annotations

import os

from farm_kernels import note

import tunebook as tb
from tunebook._measure.device_lock import cuda_names


class Device:
    platform = "gpu"
    id = 0

    @property
    def device_kind(self):
        return (cuda_names() or ["Made Up 3"])[0]


class Array:
    def __init__(self, shape, dtype="float32"):
        self.shape, self.dtype, self.device = shape, dtype, Device()


tb.register_array_library(tb.ArrayLibrary("farm_gpu", make=lambda spec, seed: Array(spec.shape, spec.dtype)))


@tb.tunable(space=tb.Space(n=[10, 1000]), name="farm.on_gpu", check=False)
def on_gpu(x, *, config):
    note(f"gpu-{os.environ.get('CUDA_VISIBLE_DEVICES')}", x.shape[0])
    return sum(range(config.n))
