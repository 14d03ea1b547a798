"""Kernels in OpenCL C, through pyopencl: built with the configuration as macros, and timed by the device.

    program = CLProgram(context, Path(__file__).with_name("saxpy.cl"))

    @tunable(space=Space(GROUP=[32, 64, 128]), compile=program.compile, ignore=("a",))
    def saxpy(a, x, y, *, config):
        program(config).saxpy(x.queue, x.shape, (config.GROUP,), numpy.float32(a), x.data, y.data)

Every item of a configuration becomes `-DNAME=value`, except `cflags`, a tuple of further build options. Arguments are
`pyopencl.array.Array`s; if their queue was made with `PROFILING_ENABLE`, runs are timed by the device's own clock.
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple, final

import numpy as np
import pyopencl as cl
import pyopencl.array

from tunebook._arrays.describe import arrays_in, platform_of
from tunebook._arrays.library import ArrayLibrary, register_array_library
from tunebook._arrays.made_up import fill, strides_for
from tunebook._base.errors import CompileError, DefinitionError, Unsupported, with_article
from tunebook._base.locks import InterruptSafeLock
from tunebook._measure.stopwatch import Stopwatch
from tunebook.adapters._source.build_cache import PerConfig
from tunebook.adapters._source.c_source import Macros, complaint, digest, flags_of, macros_of, read_source

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from tunebook._arrays.library import ArraySpec

__all__ = ["CLProgram", "OpenCLKernel", "OpenCLKernels", "QueueTimer"]

# The compiler in the wheel of PoCL 3.0 is of 2022.
_NEWER_CPU: Final = (
    "This CPU is newer than the driver's compiler, which builds nothing on it. Install a newer driver. For Debian: "
    "apt-get install pocl-opencl-icd"
)
_PROFILING: Final = cl.command_queue_properties.PROFILING_ENABLE
# The contexts to make arrays in: a program can only use arrays of its own context.
_contexts: Final[dict[str, tuple[Any, Any]]] = {}
_TOO_BIG: Final = (cl.status_code.INVALID_WORK_GROUP_SIZE, cl.status_code.INVALID_WORK_ITEM_SIZE)


@final
class CLProgram:
    """One source, built once per configuration for a context. Safe to share between threads.

    `source` is OpenCL C text, or the `Path` of a file, which is read here and now; headers beside it that it includes
    by `"name"` belong to it. `options` go to the compiler in every configuration. pyopencl itself keeps built programs
    on disk.
    """

    def __init__(self, context: cl.Context, source: str | Path, *, options: Iterable[str] = ()) -> None:
        if not isinstance(context, cl.Context):
            raise DefinitionError(
                f"CLProgram takes a context and then the source, not {with_article(type(context).__name__)}; write "
                "CLProgram(pyopencl.create_some_context(interactive=False), source)"
            )
        self._context: Final = context
        for device in context.devices:
            _contexts[platform_of(device)] = context, device
        self._source: Final = read_source(source)
        self._options: Final = flags_of("options", options)
        self._built: Final = PerConfig(self._build, macros_of)

    def __call__(self, config: Mapping[str, Any]) -> OpenCLKernels:
        """Return the kernels of a configuration, built if need be; after that, in 0.2 us."""
        return self._built(config)

    def compile(self, config: Mapping[str, Any]) -> None:
        """Build a configuration ahead of its first run."""
        # Without a digest of the program: the launch chooses the size of a group, which need not be in the code, so
        # equal code does not mean equal candidates.
        self._built(config)

    def __tunebook_checksum__(self) -> str:
        """Return a digest of source, headers and options: editing one of them makes it another kernel."""
        return digest([self._source.text, [*self._source.headers], [*self._options]])

    def _build(self, config: Mapping[str, Any]) -> OpenCLKernels:
        macros = macros_of(config)
        for definition in macros.definitions:
            if any(c.isspace() for c in definition) or '"' in definition:
                raise DefinitionError(
                    f"{definition!r} cannot be a build option: spaces and quotes are not supported. Write the text in "
                    "the source, and choose it there by a number"
                )
        options = [*self._options, *(f"-D{definition}" for definition in macros.definitions), *macros.flags]
        if self._source.directory is not None:
            options += ["-I", str(self._source.directory)]
        try:
            program = cl.Program(self._context, self._source.text).build(options)
        except (cl.RuntimeError, cl.LogicError) as error:
            # Without the lines about the call of the compiler.
            said = [line for line in str(error).splitlines() if not line.startswith(("clBuildProgram", "Build on"))]
            said += [_NEWER_CPU] if "unknown target CPU" in str(error) else []
            raise CompileError(complaint("\n".join(said), f"{self._source.name} was not built", macros)) from error
        return OpenCLKernels(program, macros)


@final
class OpenCLKernels:
    """The kernels of a configuration, as attributes: `built.saxpy(queue, global_size, local_size, *args)`."""

    def __init__(self, program: cl.Program, macros: Macros) -> None:
        self._program, self._macros = program, macros

    def __getattr__(self, name: str) -> OpenCLKernel:
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            kernel = cl.Kernel(self._program, name)
        except cl.LogicError as error:
            names = self._program.get_info(cl.program_info.KERNEL_NAMES).replace(";", ", ")
            raise DefinitionError(f"this source has no kernel {name!r}; it has {names}") from error
        # Kept as an attribute, so that Python does not call this method again.
        return self.__dict__.setdefault(name, OpenCLKernel(kernel, name, self._macros))  # type: ignore[no-any-return]


@final
class OpenCLKernel:
    """One kernel. Safe to share between threads, unlike a pyopencl kernel, which holds its arguments."""

    __slots__ = ("_kernel", "_lock", "_macros", "_name")

    def __init__(self, kernel: cl.Kernel, name: str, macros: Macros) -> None:
        self._kernel, self._name, self._macros = kernel, name, macros
        self._lock = InterruptSafeLock()

    def __call__(
        self, queue: cl.CommandQueue, global_size: tuple[int, ...], local_size: tuple[int, ...] | None, *args: Any
    ) -> cl.Event:
        """Start the kernel, and return its event."""
        try:
            with self._lock:
                return self._kernel(queue, global_size, local_size, *args)
        except cl.LogicError as error:
            if error.code not in _TOO_BIG or local_size is None:
                raise
            limit = self._kernel.get_work_group_info(cl.kernel_work_group_info.WORK_GROUP_SIZE, queue.device)
            raise DefinitionError(
                f"{self._name} cannot run {tuple(global_size)} work-items in groups of {tuple(local_size)}: they must "
                f"divide evenly, and a group may have {limit} on this device ({self._macros})"
            ) from error


class QueueTimer(NamedTuple):
    """Times the work of a queue, from the end of earlier work to the end of the last run."""

    queue: Any

    @property
    def name(self) -> str:
        """The name of the clock: the device's, or the host's for a queue without profiling."""
        return "opencl-events" if self.is_device_clock else "host-clock"

    @property
    def is_device_clock(self) -> bool:
        """Whether the queue takes times by the device's clock."""
        return bool(self.queue.properties & _PROFILING)

    def sample_s(self, launch: Callable[[], object], runs: int) -> float:
        """Return the seconds of a run."""
        if not self.is_device_clock:
            return Stopwatch(wait=self.wait).sample_s(launch, runs)
        start = cl.enqueue_marker(self.queue)
        for _ in range(runs):
            launch()
        end = cl.enqueue_marker(self.queue)
        end.wait()
        return float(end.profile.end - start.profile.end) * 1e-9 / runs

    def wait(self, result: object) -> None:  # noqa: ARG002 - everything on the queue
        """Block until the queue is empty."""
        self.queue.finish()


def _timer(arguments: object) -> QueueTimer | None:
    queues = [x.queue for x in arrays_in(arguments) if isinstance(x, cl.array.Array) and x.queue is not None]
    return QueueTimer(queues[0]) if queues else None


def _extent(x: cl.array.Array) -> int:
    """Return how many bytes there are from an array's first element to its last."""
    steps = zip(x.shape, x.strides, strict=True)
    return int(sum((n - 1) * stride for n, stride in steps) + x.dtype.itemsize)


def _copy(x: cl.array.Array) -> cl.array.Array:
    """Return a copy with the same layout, made as bytes: pyopencl does not copy or read non-contiguous arrays."""
    size = _extent(x)
    data = cl.Buffer(x.context, cl.mem_flags.READ_WRITE, size)
    cl.enqueue_copy(x.queue, data, x.base_data, byte_count=size, src_offset=x.offset)
    return cl.array.Array(x.queue, x.shape, x.dtype, data=data, strides=x.strides)


def _put_back(x: cl.array.Array, copy: cl.array.Array) -> None:
    cl.enqueue_copy(x.queue, x.base_data, copy.base_data, byte_count=_extent(x), dst_offset=x.offset)


def _to_numpy(x: cl.array.Array) -> Any:
    memory: Any = np.empty(_extent(x) if x.size else 0, np.uint8)
    if x.size:
        cl.enqueue_copy(x.queue, memory, x.base_data, src_offset=x.offset)
    return np.ndarray(x.shape, x.dtype, memory, strides=x.strides)


def _is_same(x: cl.array.Array, copy: cl.array.Array) -> bool:
    return bool(_to_numpy(x).tobytes() == _to_numpy(copy).tobytes())


def _make(spec: ArraySpec, rng_seed: int) -> cl.array.Array:
    platform = spec.platform.partition("#")[0]
    if platform not in _contexts:
        raise Unsupported(
            f"cannot make an array for an OpenCL {platform or 'device'}: this process has no CLProgram for it. "
            "Define the program first, or pass live arrays"
        )
    context, device = _contexts[platform]
    queue = cl.CommandQueue(context, device, _PROFILING)
    strides, offset, extent = strides_for(spec.layout, spec.shape)
    if offset:
        raise Unsupported(f"cannot make an array of layout {spec.layout!r} for OpenCL; pass a live one")
    dtype = np.dtype(spec.dtype)
    values = fill(np, dtype, extent, np.random.default_rng(rng_seed))
    data = cl.Buffer(context, cl.mem_flags.READ_WRITE | cl.mem_flags.COPY_HOST_PTR, hostbuf=values)
    in_bytes = tuple(stride * dtype.itemsize for stride in strides)
    return cl.array.Array(queue, spec.shape, dtype, data=data, strides=in_bytes)


_KINDS: Final = ((2, "cpu"), (4, "gpu"), (8, "accelerator"))  # cl_device_type, a bit field


def _driver(device: Any) -> dict[str, str]:
    # OpenCL has several drivers for one chip, also for the host's.
    return {"driver": " ".join(f"{device.platform.name} {device.driver_version}".split())}


register_array_library(
    ArrayLibrary(
        name="pyopencl",
        device=lambda x: x.context.devices[0] if x.queue is None else x.queue.device,
        platform=lambda device: next((name for bit, name in _KINDS if device.type & bit), ""),
        driver=_driver,
        is_writable=lambda x: x.queue is not None and x.size > 0 and min(x.strides, default=0) >= 0,
        copy=_copy,
        is_same=_is_same,
        put_back=_put_back,
        to_numpy=_to_numpy,
        fast_key=attrgetter("shape", "dtype", "strides", "queue.device"),
        timer=_timer,
        timer_as=lambda arguments, cold, graph: None if cold or graph else _timer(arguments),
        make=_make,
    )
)


def __dir__() -> list[str]:
    return sorted(__all__)
