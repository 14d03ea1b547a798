"""Kernels in CUDA C, through CuPy: compiled with the configuration as macros or as template arguments.

    module = CudaModule(Path(__file__).with_name("saxpy.cu"), templates={"saxpy": "saxpy<{BLOCK}, float>"})

    @tunable(space=Space(BLOCK=[128, 256], UNROLL=[1, 4]), compile=module.compile, ignore=("a",))
    def saxpy(a, x, y, *, config):
        blocks = -(-x.size // (config.BLOCK * config.UNROLL))
        module(config).saxpy((blocks,), (config.BLOCK,), (numpy.float32(a), x, y, x.size))

An item of a configuration is an argument of the templates that name it. Any other item becomes `-DNAME=value`, except
`cflags`, a tuple of further options. Runs are timed by the GPU's own clock, with a cold cache.
"""

from __future__ import annotations

import importlib
import string
import sys
from collections.abc import Mapping
from functools import partial
from operator import attrgetter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, final

from tunebook._arrays.describe import arrays_in
from tunebook._arrays.device_properties import DeviceProperties
from tunebook._arrays.library import ArrayLibrary, register_array_library, root_module
from tunebook._arrays.made_up import fill, strides_for
from tunebook._base.errors import CompileError, DefinitionError, require
from tunebook.adapters._cuda.timer import CACHE_BYTES, EventTimer
from tunebook.adapters._source.build_cache import PerConfig
from tunebook.adapters._source.c_source import Macros, complaint, digest, flags_of, macros_of, read_source

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from tunebook._arrays.library import ArraySpec

__all__ = ["CudaKernels", "CudaModule", "CupyTimer"]


def _cupy() -> Any:
    """Return CuPy; it imports without a GPU, but takes a second."""
    return require("cupy", extra="cupy", feature="a CuPy kernel")


@final
class CudaModule:
    """One source, compiled once per configuration and GPU. Safe to share between threads.

    `source` is CUDA C text, or the `Path` of a file, which is read here and now; headers beside it that it includes by
    `"name"` belong to it. `templates` maps the name of a kernel to an instance of it, in which `{NAME}` stands for an
    item of the configuration. Other kernels must be `extern "C"`, unless `templates` names all kernels. `options` go to
    the compiler in every configuration. CuPy itself keeps compiled code on disk. `cupy` stands in for the package.
    """

    def __init__(
        self,
        source: str | Path,
        *,
        templates: Mapping[str, str] | None = None,
        options: Iterable[str] = ("-std=c++17",),
        cupy: Any = None,
    ) -> None:
        self._source: Final = read_source(source)
        self._templates: Final = dict(templates or {})
        self._arguments: Final = frozenset(name for text in self._templates.values() for name in _fields(text))
        self._options: Final = flags_of("options", options)
        self._cupy: Final = cupy or _cupy()
        self._built: Final = PerConfig(self._build, self._meaning)

    def __call__(self, config: Mapping[str, Any]) -> CudaKernels:
        """Return the kernels of a configuration; after the first time, in 0.2 us."""
        return self._built(config)

    def compile(self, config: Mapping[str, Any]) -> None:
        """Compile a configuration ahead of its first run."""
        # Without a digest of the program: the launch chooses the size of a block, which need not be in the code, so
        # equal code does not mean equal candidates.
        self._built(config).compile()

    def __tunebook_checksum__(self) -> str:
        """Return a digest of source, headers and options: editing one of them makes it another kernel."""
        return digest([self._source.text, [*self._source.headers], [*self._options], {**self._templates}])

    def __tunebook_versions__(self) -> Mapping[str, str]:
        """Return the version of the compiler."""
        return {"nvrtc": ".".join(map(str, self._cupy.cuda.nvrtc.getVersion()))}

    def _meaning(self, config: Mapping[str, Any]) -> tuple[Macros, tuple[tuple[str, str], ...]]:
        """Return the macros and the template instances of a configuration."""
        if not isinstance(config, Mapping):
            return macros_of(config), ()  # raises an error that names the right types
        missing = self._arguments - config.keys()
        if missing:
            raise DefinitionError(
                f"the templates name {', '.join(sorted(missing))}, which the configuration {dict(config)} does not have"
            )
        macros = macros_of({name: value for name, value in config.items() if name not in self._arguments})
        given = {name: config[name] for name in self._arguments}
        spelled = {name: str(x).lower() if isinstance(x, bool) else x for name, x in given.items()}
        values = dict(definition.split("=", 1) for definition in macros_of(spelled).definitions)
        return macros, tuple((name, text.format_map(values)) for name, text in self._templates.items())

    def _build(self, config: Mapping[str, Any]) -> CudaKernels:
        macros, instances = self._meaning(config)
        options = [*self._options, *(f"-D{definition}" for definition in macros.definitions), *macros.flags]
        if self._source.directory is not None:
            options.append(f"-I{self._source.directory}")
        expressions = [text for _, text in instances] or None
        module = self._cupy.RawModule(code=self._source.text, options=tuple(options), name_expressions=expressions)
        failures = self._cupy.cuda.compiler.CompileException, self._cupy.cuda.driver.CUDADriverError
        return CudaKernels(module, macros, dict(instances), self._source.name, failures)


def _fields(template: str) -> list[str]:
    try:
        return [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise DefinitionError(f"the template {template!r} cannot be read: {error}; write 'saxpy<{{BLOCK}}>'") from error


@final
class CudaKernels:
    """The kernels of a configuration, as attributes: `built.saxpy(grid, block, args, shared_mem=0)`."""

    def __init__(self, module: Any, macros: Macros, instances: Mapping[str, str], source: str, failures: Any) -> None:
        self._module, self._macros, self._instances = module, macros, instances
        self._source, self._failures = source, failures

    def compile(self) -> None:
        """Compile for the current GPU, unless that was done before."""
        try:
            self._module.compile()
        except self._failures as error:
            program = " ".join((str(self._macros), *self._instances.values()))
            raise CompileError(complaint(str(error), f"{self._source} was not compiled", program)) from error

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self.compile()
        try:
            kernel = self._module.get_function(self._instances.get(name, name))
        except self._failures as error:
            known = ", ".join(self._instances) or 'the kernels that are declared extern "C"'
            raise DefinitionError(f"{self._source} has no kernel {name!r}: {error}. It has {known}") from error
        # Kept as an attribute, so that Python does not call this method again.
        return self.__dict__.setdefault(name, kernel)


class CupyTimer(EventTimer):
    """Times runs on one GPU by its own clock. `cupy` is CuPy, or stands in for it."""

    def __init__(self, device: Any, cupy: Any, *, warm: bool = False) -> None:
        interface = SimpleNamespace(Event=partial(_Event, cupy), synchronize=cupy.cuda.runtime.deviceSynchronize)
        super().__init__(
            lambda: interface,
            lambda: SimpleNamespace(zero_=partial(cupy.empty(CACHE_BYTES, "int8").fill, 0)),
            warm=warm,
            on=lambda: device,
        )


class _Event:
    """A CuPy event with the methods of a torch event."""

    def __init__(self, cupy: Any, *, enable_timing: bool) -> None:
        self._cupy, self._event = cupy, cupy.cuda.Event(disable_timing=not enable_timing)

    def record(self, stream: Any = None) -> None:
        self._event.record(stream)

    def query(self) -> bool:
        return bool(self._event.done)

    def elapsed_time(self, end: _Event) -> float:
        return float(self._cupy.cuda.get_elapsed_time(self._event, end._event))


def _timer(arguments: object) -> CupyTimer | None:
    return _timer_as(arguments, True, False)  # noqa: FBT003 - as in the record


def _timer_as(arguments: object, cold: bool, graph: bool) -> CupyTimer | None:  # noqa: FBT001 - a field of the record
    arrays = [x for x in arrays_in(arguments) if root_module(type(x)) == "cupy"]
    return CupyTimer(arrays[0].device, sys.modules["cupy"], warm=not cold) if arrays and not graph else None


def _copy(x: Any) -> Any:
    cupy = sys.modules["cupy"]
    with x.device:
        free = cupy.cuda.runtime.memGetInfo()[0] + cupy.get_default_memory_pool().free_bytes()
        return x.copy(order="K") if 2 * x.nbytes <= free else x.get(order="A")


def _put_back(x: Any, copy: Any) -> None:
    with x.device:
        x[...] = sys.modules["cupy"].asarray(copy)  # from the host, if the GPU had too little memory for a copy


def _is_same(x: Any, copy: Any) -> bool:
    return bool(_to_numpy(x).tobytes() == _to_numpy(copy).tobytes())  # bytes: a NaN is not equal to itself


def _to_numpy(x: Any) -> Any:
    return sys.modules["cupy"].asnumpy(x)


def _with_values(x: Any, values: Any) -> Any:
    x[...] = sys.modules["cupy"].asarray(values)
    return x


def _make(spec: ArraySpec, rng_seed: int) -> Any:
    np, cupy = importlib.import_module("numpy"), _cupy()
    _, _, ordinal = spec.platform.partition("#")
    dtype = np.dtype(spec.dtype)
    strides, offset, extent = strides_for(spec.layout, spec.shape)
    values = fill(np, dtype, extent, np.random.default_rng(rng_seed))
    with cupy.cuda.Device(int(ordinal)) if ordinal else cupy.cuda.Device():
        memory = cupy.asarray(values).data + offset * dtype.itemsize
        return cupy.ndarray(spec.shape, dtype, memory, [stride * dtype.itemsize for stride in strides])


def _hardware(device: Any) -> Any:
    return sys.modules["cupy"].cuda.runtime.getDeviceProperties(device.id)["name"]


def _properties(device: Any) -> DeviceProperties:
    found = sys.modules["cupy"].cuda.runtime.getDeviceProperties(device.id)
    # Clocks are in kHz, and memory moves two words per cycle.
    bandwidth = 2 * found.get("memoryClockRate", 0) * 1e3 * found.get("memoryBusWidth", 0) / 8
    return DeviceProperties(
        cores=found.get("multiProcessorCount", 0),
        clock_mhz=found.get("clockRate", 0) // 1000,
        bandwidth_gb_s=round(bandwidth / 1e9),
        l2_kb=found.get("l2CacheSize", 0) // 1024,
        shared_kb=found.get("sharedMemPerBlockOptin", 0) // 1024,
        registers=found.get("regsPerMultiprocessor", 0),
    )


def _accelerator() -> object | None:
    cupy = sys.modules.get("cupy")  # not there if this module was imported for its own sake
    return cupy.cuda.Device() if cupy is not None and cupy.cuda.is_available() else None


register_array_library(
    ArrayLibrary(
        name="cupy",
        platform=lambda _device: "gpu",
        hardware=_hardware,
        properties=_properties,
        accelerator=_accelerator,
        is_writable=lambda x: (
            x.size > 0 and all(stride or n == 1 for stride, n in zip(x.strides, x.shape, strict=True))
        ),
        copy=_copy,
        is_same=_is_same,
        put_back=_put_back,
        to_numpy=_to_numpy,
        fast_key=attrgetter("shape", "dtype", "strides", "device.id"),  # its devices have no hash
        timer=_timer,
        timer_as=_timer_as,
        make=_make,
        values=_to_numpy,
        with_values=_with_values,
    )
)


def __dir__() -> list[str]:
    return sorted(__all__)
