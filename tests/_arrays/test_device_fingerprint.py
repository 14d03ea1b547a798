from __future__ import annotations

import json
import os
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest

from tunebook._arrays.device_fingerprint import (
    cpu_fingerprint,
    device_fingerprint,
    driver_of,
    environment,
    environment_fingerprint,
    get_device_platform,
    gpu_driver,
)
from tunebook._base.errors import DefinitionError

EPYC = """\
processor	: 0
vendor_id	: AuthenticAMD
cpu family	: 25
model		: 17
model name	: AMD EPYC 9B14
stepping	: 1
cpu MHz		: 2600.000
flags		: fpu sse sse2 avx2 fma avx512f constant_tsc hypervisor
bugs		: spectre_v1

processor	: 1
vendor_id	: AuthenticAMD
model name	: AMD EPYC 9B14
cpu MHz		: 3100.000
flags		: fpu sse sse2 avx2 fma avx512f constant_tsc hypervisor
"""

PHONE = """\
processor	: 0
Features	: fp asimd aes
CPU implementer	: 0x41
CPU architecture: 8
CPU variant	: 0x1
CPU part	: 0xd05

processor	: 1
Features	: fp asimd aes
CPU implementer	: 0x41
CPU architecture: 8
CPU variant	: 0x4
CPU part	: 0xd0a
"""


def device(module: str, **fields: object) -> object:
    return type("Device", (SimpleNamespace,), {"__module__": module})(**fields)


def test_a_processor_is_named_by_vendor_model_and_instruction_sets():
    assert cpu_fingerprint(EPYC, "x86_64", 2).startswith("cpu:AuthenticAMD AMD EPYC 9B14 25/17/1 x86_64 2 cores isa-")


def test_a_processor_with_several_kinds_of_cores_names_them_all():
    assert "0x41 8/0xd05+0xd0a/0x1+0x4 aarch64 8 cores" in cpu_fingerprint(PHONE, "aarch64", 8)


@pytest.mark.parametrize("edit", [("cpu MHz", "cpu mhz"), ("constant_tsc", "ibrs ibpb"), ("spectre_v1", "mmio")])
def test_clock_mitigations_and_bugs_do_not_make_it_another_machine(edit):
    assert cpu_fingerprint(EPYC.replace(*edit), "x86_64", 2) == cpu_fingerprint(EPYC, "x86_64", 2)


@pytest.mark.parametrize(
    "edit", [("avx512f", ""), ("9B14", "7B13"), ("stepping	: 1", "stepping	: 2"), (": 25", ": 26")]
)
def test_instruction_sets_and_model_do(edit):
    assert cpu_fingerprint(EPYC.replace(*edit), "x86_64", 2) != cpu_fingerprint(EPYC, "x86_64", 2)


def test_cores_and_machine_do():
    assert len({cpu_fingerprint(EPYC, m, n) for m in ("x86_64", "i686") for n in (2, 4)}) == 4


def test_a_system_without_cpuinfo_still_has_a_name():
    text = "model name: Intel64 Family 6 Model 142 Stepping 10, GenuineIntel"
    assert "Intel64 Family 6 Model 142" in cpu_fingerprint(text, "AMD64", 8)
    assert cpu_fingerprint("", "arm64", 8).startswith("cpu:arm64 8 cores isa-")


def test_the_host_is_the_same_in_every_process():
    code = "from tunebook._arrays.device_fingerprint import device_fingerprint; print(device_fingerprint())"
    env = {**os.environ, "PYTHONHASHSEED": "7"}
    other = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=env).stdout
    assert other.strip() == device_fingerprint()


@pytest.mark.parametrize(
    "host",
    [None, "cpu", device("jaxlib._jax", platform="cpu", device_kind="cpu"), device("torch", type="cpu", index=None)],
)
def test_the_host_is_one_device_whatever_library_names_it(host):
    assert device_fingerprint(host) == device_fingerprint()
    assert get_device_platform(host) == "cpu"


def test_an_opencl_device_on_the_processor_is_the_processor():
    one = device("pyopencl", type=2, name="cpu-haswell", platform=SimpleNamespace(name="PoCL"))
    assert device_fingerprint(one) == device_fingerprint()


class NoGpu(ModuleType):
    @property
    def cuda(self):
        raise AssertionError("the GPU was asked about")


def test_nothing_asks_the_gpu_when_the_device_is_the_processor(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", NoGpu("torch"))
    assert device_fingerprint(device("torch", type="cpu", index=None)) == device_fingerprint()


def test_a_torch_device_is_named_by_its_properties(monkeypatch):
    torch = pytest.importorskip("torch")
    names = {0: "NVIDIA H200", 1: "NVIDIA A100"}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda d: SimpleNamespace(name=names[d.index]))
    one, two = (device("torch", type="cuda", index=i) for i in (0, 1))
    assert (device_fingerprint(one), device_fingerprint(two)) == ("gpu:NVIDIA H200", "gpu:NVIDIA A100")
    assert device_fingerprint(device("torch", type="mps", index=0)) == "gpu:mps"


def test_a_cupy_device_is_named_by_the_runtime(monkeypatch):
    cupy = ModuleType("cupy")
    cupy.cuda = SimpleNamespace(runtime=SimpleNamespace(getDeviceProperties=lambda i: {"name": b"NVIDIA H200\0"}))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    assert device_fingerprint(device("cupy.cuda.device", id=0)) == "gpu:NVIDIA H200"


def test_one_model_has_one_name_in_every_library():
    jax = device("jaxlib._jax", platform="gpu", device_kind="NVIDIA H200", id=3)
    opencl = device("pyopencl", type=4, name="NVIDIA H200", platform=SimpleNamespace(name="CUDA"))
    assert device_fingerprint(jax) == device_fingerprint(opencl) == "gpu:NVIDIA H200"


def test_two_devices_in_one_process_have_two_names():
    devices = [device("jaxlib._jax", platform=p, device_kind=k) for p, k in (("gpu", "H200"), ("tpu", "v5e"))]
    assert len({device_fingerprint(d) for d in (None, *devices)}) == 3


def test_a_sharding_is_named_by_its_first_device():
    members = [device("jaxlib._jax", platform="tpu", device_kind="TPU v5e", id=i) for i in (1, 0)]
    assert device_fingerprint(device("jax.sharding", device_set=members)) == "tpu:TPU v5e"


def test_a_string_stands_for_itself():
    assert device_fingerprint("my accelerator|2") == "my accelerator|2"
    with pytest.raises(DefinitionError, match="invalid device"):
        device_fingerprint("")


def test_a_device_without_a_name_is_an_error_that_names_the_remedy():
    with pytest.raises(DefinitionError, match="pass its name instead"):
        device_fingerprint(object())


@pytest.mark.parametrize(
    ("given", "platform"),
    [
        ("gpu:NVIDIA H200", "gpu"),
        ("cuda:1", "gpu"),
        ("tpu", "tpu"),
        ("something", "cpu"),
        (device("jaxlib._jax", platform="rocm", device_kind="MI300"), "gpu"),
        (device("jaxlib._jax", platform="tpu", device_kind="v5e"), "tpu"),
        (device("torch", type="meta", index=None), "cpu"),
    ],
)
def test_the_platform_is_one_of_three(given, platform):
    assert get_device_platform(given) == platform


# -------------------------------------------------------------------------------------------------- the environment


def test_the_environment_names_python_and_the_loaded_libraries(monkeypatch):
    library = ModuleType("somelibrary")
    library.__version__ = "1.2.3"
    monkeypatch.setitem(sys.modules, "somelibrary", library)
    found = environment(["somelibrary", "notloaded"], {"cc": "gcc 12.2"})
    assert found["python"].split()[1] == f"{sys.version_info.major}.{sys.version_info.minor}"
    assert (found["somelibrary"], found["notloaded"], found["cc"]) == ("1.2.3", "not loaded", "gcc 12.2")
    assert "notloaded" not in sys.modules


def test_a_library_without_a_version_attribute_is_looked_up(monkeypatch):
    monkeypatch.setitem(sys.modules, "hypothesis", ModuleType("hypothesis"))
    monkeypatch.setitem(sys.modules, "somescript", ModuleType("somescript"))
    found = environment(["hypothesis", "somescript"])
    assert found["hypothesis"][0].isdigit()
    assert found["somescript"] == "unknown"


def test_the_driver_of_a_device_of_opencl_is_named_also_on_the_host():
    kind = type("Device", (SimpleNamespace,), {"__module__": "pyopencl._cl"})
    device = kind(type=2, name="EPYC", driver_version="5.0 ", platform=SimpleNamespace(name="PoCL"))
    assert driver_of(device) == {"driver": "PoCL 5.0"}
    assert driver_of("cpu") == driver_of(None) == {}


def test_the_fingerprint_is_the_environment_in_one_line():
    assert json.loads(environment_fingerprint(["numpy"])) == environment(["numpy"])
    assert environment_fingerprint(["numpy"]) != environment_fingerprint(["numpy"], {"cc": "gcc"})
    assert environment_fingerprint(["a", "b"]) == environment_fingerprint(["b", "a"])


@pytest.mark.parametrize(
    ("files", "driver"),
    [
        ({"proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64  570.86.10  Release"}, "nvidia 570.86.10"),
        ({"sys/module/amdgpu/version": "6.10.5\n"}, "amdgpu 6.10.5"),
        ({"sys/module/amdgpu/refcnt": "1"}, f"amdgpu of Linux {os.uname().release}"),
        ({"sys/module/xe/refcnt": "1"}, f"xe of Linux {os.uname().release}"),
        ({"sys/module/i915/version": "1.25\n", "proc/driver/nvidia/version": "X  550.54  Y"}, "nvidia 550.54"),
    ],
)
def test_the_driver_of_each_maker_is_named(files, driver, tmp_path):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert gpu_driver(tmp_path) == {"driver": driver}


def test_a_machine_without_a_gpu_has_no_driver(tmp_path):
    assert gpu_driver(tmp_path) == {}
