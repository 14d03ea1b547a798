"""Doctests are collected only where the framework that a file imports is installed."""

from __future__ import annotations

from importlib.util import find_spec

_FILES = {
    "jax": ["src/tunebook/adapters/jax.py", "src/tunebook/adapters/_jax/*.py"],
    "torch": [
        "src/tunebook/adapters/torch.py",
        "src/tunebook/adapters/_triton/launch_specs.py",
        "src/tunebook/adapters/_triton/remote_runs.py",
        "tests/fake_gpu.py",
        "tests/live_package.py",
        "tests/recorded_triton_gpu.py",
        "tests/triton_packages.py",
    ],
    "triton": [
        "src/tunebook/adapters/triton.py",
        "src/tunebook/adapters/_triton/*.py",
        "tests/fake_gpu.py",
        "tests/triton_autotune_cache.py",
    ],
    "ejkernel": ["src/tunebook/adapters/ejkernel.py"],
    "pyopencl": ["src/tunebook/adapters/opencl.py"],
    "redis": ["src/tunebook/stores/_redis.py"],
    "obstore": ["src/tunebook/stores/_object.py"],
}
collect_ignore_glob = [
    "tests/agreement_ranks.py",  # a program, which reads its arguments when it is loaded
    *(pattern for package, patterns in _FILES.items() if find_spec(package) is None for pattern in patterns),
]
