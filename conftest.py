"""Doctests are collected only where the framework that a file imports is installed."""

from __future__ import annotations

from importlib.util import find_spec

_FILES = {
    "jax": ["src/tunebook/adapters/*jax*.py"],
    "torch": ["src/tunebook/adapters/*torch*.py"],
    "triton": ["src/tunebook/adapters/*triton*.py", "tests/fake_gpu.py"],
    "pyopencl": ["src/tunebook/adapters/opencl.py"],
}
collect_ignore_glob = [
    pattern for package, patterns in _FILES.items() if find_spec(package) is None for pattern in patterns
]
