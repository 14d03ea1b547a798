"""A GPU that does not exist, at the edge where Triton talks to one: kernels are compiled for real, and then pretended.

Only kernels move its clock: `cost` maps their constants to a time. `effect` changes the tensors as the kernel would.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import time
from collections import defaultdict

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

FLUSH_S = 80e-6


class FakeEvent:
    def __init__(self, gpu):
        self._gpu, self.at_s, self._at = gpu, None, 0
        self._device = None  # the first one that it was recorded on: torch refuses any other

    def record(self, stream=None):
        self._device = self._gpu.device if self._device is None else self._device
        if self._device != self._gpu.device:
            raise RuntimeError(f"Event device {self._device} does not match the recording stream's {self._gpu.device}")
        assert stream is None or stream.handle == self._gpu.stream_handle, "recorded on a stream that is not current"
        self.at_s, self._at = self._gpu.clock_s, self._gpu.count
        self._gpu.records += 1

    def query(self):
        if self._gpu.capturing:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        self._gpu.queries += 1
        # This host is never late, and the device so many launches behind it.
        return self._gpu.behind is not None and self._gpu.count >= self._at + self._gpu.behind

    def elapsed_time(self, end):
        return (end.at_s - self.at_s) * 1e3


class FakeGraph:
    def __init__(self, gpu):
        self._gpu = gpu

    def capture_begin(self):
        self._gpu.captured = []

    def capture_end(self):
        self._launches, self._gpu.captured = self._gpu.captured, None

    def replay(self):
        self._gpu.replays += 1
        for launch in self._launches:
            launch()


class FakeCache:
    def __init__(self, gpu):
        self._gpu = gpu

    def zero_(self):
        self._gpu.clock_s += FLUSH_S
        self._gpu.flushes += 1


class FakeStream:
    def __init__(self, handle=0):
        self.handle = handle

    def wait_stream(self, other):
        pass


class FakeGpu:
    """A driver of Triton's, and the device interface that it gives out."""

    def __init__(self, cost, effect=None, names=("Fake GPU",)):
        self.cost, self.effect, self.names = cost, effect, names
        self._clocks_s = defaultdict(float)  # one per device
        self.launches = []  # constants of each kernel that ran
        self.flushes = self.replays = 0
        self.captured = None
        self.capturing = False
        self.behind = None  # launches; None: an event is passed only when the host waits for it
        self.waits = self.count = 0  # calls of `synchronize`, and launches
        self.records = self.queries = 0  # of events
        self.stream_handle = self.streams_asked = 0  # of the current stream; how often it was asked for as an object
        self.poisoned = False
        self._current = threading.local()  # as CUDA has it
        self.utils = self
        self.launcher_cls = self._launcher

    # ---- what Triton asks of a driver

    @property
    def clock_s(self):
        return self._clocks_s[self.device]

    @clock_s.setter
    def clock_s(self, seconds):
        self._clocks_s[self.device] = seconds

    @property
    def device(self):
        return getattr(self._current, "device", 0)

    @device.setter
    def device(self, device):
        self._current.device = device

    def get_current_device(self):
        return self.device

    def set_current_device(self, device):
        self.device = device

    def get_active_torch_device(self):
        return torch.device("cpu")

    def get_current_stream(self, device):
        return self.stream_handle

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_device_interface(self):
        return self

    def get_empty_cache_for_benchmark(self):
        return FakeCache(self)

    def get_benchmarker(self):
        def bench(call, quantiles, **_options):
            call()
            before_s = self.clock_s
            call()
            return [(self.clock_s - before_s) * 1e3] * len(quantiles)

        return bench

    def load_binary(self, name, kernel, shared, device):
        return object(), 1, 32, 0, 1024

    def unload_module(self, module):
        pass

    def get_device_properties(self, device):
        return {"max_shared_mem": 232448}

    def _launcher(self, src, metadata):
        names = src.fn.arg_names
        constants = {names[path[0]]: value for path, value in src.constants.items() if len(path) == 1}

        def launch(x, y, z, stream, function, packed, launch_metadata, enter, leave, *args):
            facts = {**constants, "num_warps": metadata.num_warps, "grid": (x, y, z), "device": self.device}
            run = lambda: self._run(facts, dict(zip(names, args, strict=True)))
            if self.captured is not None:
                self.captured.append(run)
            else:
                run()

        return launch

    def _run(self, facts, arguments):
        self.launches.append(facts)
        self.count += 1
        seconds = self.cost(facts)  # before the clock is touched: it may not return
        if isinstance(seconds, Exception):
            raise seconds
        self.clock_s += seconds
        if self.effect is not None:
            self.effect(facts, arguments)

    # ---- what the adapter asks of a device

    def Event(self, enable_timing=True):  # noqa: N802 - torch's name
        return FakeEvent(self)

    def CUDAGraph(self):  # noqa: N802 - as above
        return FakeGraph(self)

    def Stream(self):  # noqa: N802 - as above
        return FakeStream()

    def current_stream(self):
        self.streams_asked += 1
        return FakeStream(self.stream_handle)

    def stream(self, stream):
        return contextlib.nullcontext()

    def synchronize(self):
        self.waits += 1
        if self.poisoned:
            raise RuntimeError("an illegal memory access was encountered")

    def device_count(self):
        return len(self.names)

    def get_device_name(self, index):
        return self.names[index]

    def is_current_stream_capturing(self):
        return self.capturing

    def mem_get_info(self):
        return 1 << 40, 1 << 40


@contextlib.contextmanager
def installed(fake, *functions):
    """Let Triton have nothing but a fake GPU inside the block; it may compile `functions` there."""
    before = driver._active
    driver.set_active(fake)
    try:
        for function in functions:
            function.device_caches.clear()  # they hold programs that were loaded onto the GPU of another test
        yield fake
        for function in functions:
            function.device_caches.clear()
        gc.collect()  # programs are unloaded by the driver that is active then
    finally:
        driver.set_active(before)


def install_dangerous():
    """Install a GPU on which the warps of a kernel decide its behaviour: 1 crashes, 2 hangs, 8 poisons the device."""

    def cost(facts):
        warps = facts["num_warps"]
        if warps == 1:
            os.kill(os.getpid(), signal.SIGSEGV)
        if warps == 2:
            time.sleep(60)
        if warps == 8:
            gpu.poisoned = True
            return RuntimeError("device-side assert triggered")
        return warps * 1e-5

    gpu = FakeGpu(cost, effect=lambda _facts, arguments: arguments["x_ptr"].mul_(2))
    driver.set_active(gpu)
