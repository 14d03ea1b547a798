"""A CUDA driver of four made-up GPUs, compiled from C, for `cuda_names` and `cuda_uuid`."""

from __future__ import annotations

import subprocess

import pytest

DRIVER = r"""
#include <stdlib.h>
#include <string.h>
#include <stdio.h>
static int physical(int ordinal) {
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    if (!visible) return ordinal < 4 ? ordinal : -1;
    char copy[64]; strncpy(copy, visible, 63); copy[63] = 0;
    char *part = strtok(copy, ",");
    while (part && ordinal--) part = strtok(0, ",");
    return part ? atoi(part) : -1;
}
int cuInit(unsigned flags) { return 0; }
int cuDeviceGetCount(int *count) { for (*count = 0; physical(*count) >= 0; ++*count); return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = physical(ordinal); return *device < 0 ? 101 : 0; }
int cuDeviceGetName(char *name, int size, int device) { snprintf(name, size, "Made Up %d", device); return 0; }
int cuDeviceGetUuid_v2(unsigned char *uuid, int device) { memset(uuid, 0x10 + device, 16); return 0; }
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    path = tmp_path_factory.mktemp("driver")
    (path / "cuda.c").write_text(DRIVER)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", path / "libcuda.so.1", path / "cuda.c"], check=True)
    return str(path / "libcuda.so.1")
