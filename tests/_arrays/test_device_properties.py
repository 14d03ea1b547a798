"""Properties of devices: by name, by the driver, and how alike two devices are."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from tunebook._arrays import device_properties
from tunebook._arrays.device_fingerprint import device_fingerprint
from tunebook._arrays.device_properties import (
    DeviceProperties,
    cores_of,
    likeness,
    note_properties,
    note_recorded,
    noted_properties,
    properties_of,
)

A100, A4000, W6600 = "gpu:NVIDIA A100-PCIE-40GB", "gpu:NVIDIA RTX A4000", "gpu:AMD Radeon PRO W6600"


@pytest.fixture(autouse=True)
def _nothing_noted(monkeypatch):
    monkeypatch.setattr(device_properties, "NOTED", {})


def test_a_device_is_like_itself_and_less_like_others_the_more_they_differ():
    assert likeness(A100, A100) == 1
    assert likeness(A4000, A100) == likeness(A100, A4000)
    assert 0 < likeness(W6600, A100) < likeness(W6600, A4000) < likeness(A100, A4000) < 1


@pytest.mark.parametrize("other", ["gpu:ACME 9000", "cpu:Xeon", ""])
def test_of_a_device_without_known_properties_nothing_is_said(other):
    assert likeness(A100, other) is None
    assert cores_of(other) == 1


def test_the_driver_counts_before_the_name_number_by_number():
    note_properties(A100, DeviceProperties(cores=42))  # a part of it, as MIG gives
    assert properties_of(A100) == properties_of("gpu:A100")._replace(cores=42)
    note_properties("gpu:NVIDIA Z9", DeviceProperties(cores=10, l2_kb=1024))
    assert properties_of("gpu:NVIDIA Z9") == DeviceProperties("nvidia", 10, l2_kb=1024)
    note_properties(A4000, None)
    assert cores_of(A4000) == 48


def test_the_driver_of_cupy_is_asked_when_a_device_is_named(monkeypatch):
    numbers = {"name": b"NVIDIA Z9", "multiProcessorCount": 7, "clockRate": 1_500_000, "l2CacheSize": 2**21}
    numbers |= {"memoryClockRate": 1_000_000, "memoryBusWidth": 256, "regsPerMultiprocessor": 65_536}
    cupy = ModuleType("cupy")
    cupy.cuda = SimpleNamespace(runtime=SimpleNamespace(getDeviceProperties=lambda _id: numbers))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    device = type("Device", (), {"__module__": "cupy.cuda.device", "id": 0})()
    assert properties_of(device_fingerprint(device)) == DeviceProperties("nvidia", 7, 1500, 64, 2048, 0, 65_536)


def test_the_driver_of_torch_is_asked_when_a_device_is_named(monkeypatch):
    torch = pytest.importorskip("torch")
    found = SimpleNamespace(name="NVIDIA Z9", multi_processor_count=7, L2_cache_size=2**21)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: found)
    assert properties_of(device_fingerprint(torch.device("cuda", 0))) == DeviceProperties("nvidia", 7, l2_kb=2048)


def test_a_record_takes_the_numbers_of_a_driver_to_machines_without_it(monkeypatch):
    note_properties("gpu:NVIDIA Z9", DeviceProperties("nvidia", 100, l2_kb=40_000))
    written = noted_properties("gpu:NVIDIA Z9")
    monkeypatch.setattr(device_properties, "NOTED", {})
    assert likeness("gpu:NVIDIA Z9", A100) is None
    note_recorded("gpu:NVIDIA Z9", written)
    assert likeness("gpu:NVIDIA Z9", A100) > 0.9
    note_recorded("gpu:NVIDIA Z9", {"cores": 1})
    assert cores_of("gpu:NVIDIA Z9") == 100


@pytest.mark.parametrize("facts", [None, [], "cores", {}, {"cores": "7"}, {"cores": True}, {"tentacles": 8}])
def test_numbers_of_another_form_in_a_record_are_passed_over(facts):
    note_recorded("gpu:ACME 9000", facts)
    assert likeness(A100, "gpu:ACME 9000") is None
