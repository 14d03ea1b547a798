"""Launches that are tuned while the program runs: events around a launch, and programs loaded between launches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tunebook._tuning.host_share import HOST
from tunebook._tuning.live_runs import LiveRuns
from tunebook.adapters._cuda.timer import LaunchWindows
from tunebook.adapters._triton import device
from tunebook.adapters._triton.call_kind import CallKinds
from tunebook.adapters._triton.candidate import Launch, LaunchConfig
from tunebook.adapters._triton.compile_beside import CompileBeside, may_fork_beside
from tunebook.adapters._triton.memory_only import compiling_nothing

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    from tunebook._kernel.kernel import Invocation
    from tunebook._tuning.live_runs import LaunchWindow
    from tunebook.adapters._triton.kernel import TritonKernel


class LiveLaunches(LiveRuns[LaunchConfig]):
    """The launches of one problem. A call is a launch (grid, arguments, keyword arguments) and its facts."""

    clock = "device-events"

    def __init__(self, kernel: TritonKernel, *, processes: bool) -> None:
        self._kernel, self._processes = kernel, processes
        self._windows = LaunchWindows(device.interface, stream=device.current_stream)
        self._is_capturing = device.interface().is_current_stream_capturing
        self._device = device.current_device()  # events and loaded programs belong to a device
        self._kinds = CallKinds(kernel.names, kernel.chain[-2])
        self._read: Any = None  # a compiled program that is not on the device yet

    def may_try(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:  # noqa: ARG002 - of any launch
        """Whether the launch is on the session's device, and no CUDA graph is captured."""
        return device.current_device() == self._device and not self._is_capturing()

    def sizes(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Hashable:  # noqa: ARG002 - a launch has none
        """Return the shapes of the tensors and the integers of a launch."""
        _, positional, named = args[0]
        values = (*positional, *named.values()) if named else positional
        # Other numbers than integers change from call to call, and say nothing about sizes. Shapes are tuples, but the
        # shape of a tensor descriptor may be a list.
        return tuple(
            [
                v
                if v.__class__ is int or v.__class__ is bool
                else each
                if (each := getattr(v, "shape", None)).__class__ is not list
                else tuple(each)
                for v in values
            ]
        )

    def kind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Hashable:  # noqa: ARG002 - as above
        """Return the facts about a launch that Triton compiles for."""
        _, positional, named = args[0]
        return self._kinds.of(positional, named)

    def run(self, config: LaunchConfig, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:  # noqa: ARG002 - as above
        """Launch with a configuration."""
        grid, positional, named = args[0]
        self._show(config, grid, positional, named)
        return self._kernel.direct.run(config, grid, positional, named)

    def _show(self, config: LaunchConfig, grid: Any, positional: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        """Show the configuration and call its hook, as Triton does before a launch."""
        self._kernel.show_best(config)
        if config.pre_hook is not None:
            config.pre_hook({**Launch(grid, positional, named).named(self._kernel.names), **config.meta})

    def timed(
        self,
        config: LaunchConfig,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],  # noqa: ARG002 - as above
    ) -> tuple[Any, LaunchWindow]:
        """Launch between two events; the hook of the configuration runs before them."""
        grid, positional, named = args[0]
        self._show(config, grid, positional, named)
        launch = self._kernel.direct.run
        return self._windows.around(lambda: launch(config, grid, positional, named))

    def glance(
        self,
        config: LaunchConfig,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],  # noqa: ARG002 - as above
    ) -> tuple[Any, LaunchWindow]:
        """Launch between two events, and ask nothing else of the device but whether it waited."""
        grid, positional, named = args[0]
        self._show(config, grid, positional, named)
        window = self._windows.opened()
        result = self._kernel.direct.run(config, grid, positional, named)
        window.late = bool(window.passed_start())
        window.close()
        return result, window

    def builds(self, configs: Mapping[str, LaunchConfig]) -> CompileBeside | None:
        """Compile candidates in forks, if this process may fork."""
        self._read = None
        if not (self._processes and self._kernel.compiles and may_fork_beside()):
            return None
        kernel = self._kernel

        def compile_one(candidate: LaunchConfig, call: tuple[Any, ...]) -> bytes | None:
            return kernel.compile_cfg(kernel.invocation(Launch(*call[0])), candidate)

        def recall(candidate: LaunchConfig, call: tuple[Any, ...]) -> bytes | None:
            with compiling_nothing():
                return compile_one(candidate, call)

        return CompileBeside(compile_one, configs, HOST, recall, lambda: kernel.live_loads)

    def load(self, config: LaunchConfig, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:  # noqa: ARG002 - as above
        """Load the program of a candidate; one that nobody has compiled is compiled here.

        In two calls: the first reads the program, which takes Triton milliseconds, and the next one loads it onto the
        device, which takes the driver as long.
        """
        if self._read is None:
            self._read = self._kernel.program(Launch(*args[0]), config)
            return self._read is None  # only a launch can compile it
        program, self._read = self._read, None
        _ = getattr(program, "run", None)  # a property, which loads the program
        self._kernel.live_loads += 1
        return True

    def detached(self, inv: Invocation[LaunchConfig, Any]) -> Invocation[LaunchConfig, Any]:
        """Return the launch without its tensors."""
        return self._kernel.detached(inv)
