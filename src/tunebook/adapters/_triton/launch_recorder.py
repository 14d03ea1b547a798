"""Records the launches of a kernel as plain values, and makes launches from them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, final

from triton.runtime import driver

from tunebook._base.errors import Unsupported
from tunebook.adapters._triton import device
from tunebook.adapters._triton.candidate import OF_AUTHORS, Launch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tunebook._kernel.kernel import Invocation
    from tunebook.adapters._triton.candidate import LaunchConfig
    from tunebook.adapters._triton.kernel import TritonKernel


@final
class LaunchRecorder:
    """Records the launches of a kernel. It loads `launch_specs`, which needs torch, when it is used."""

    finder: Final = "tunebook.adapters._triton.recorded_kernels"

    def __init__(self, kernel: TritonKernel) -> None:
        self._kernel = kernel

    def describe(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, samples: bool
    ) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """Return a launch as plain values."""
        from tunebook.adapters._triton.launch_specs import describe_grid, describe_launch  # noqa: PLC0415 - see above

        launch: Launch = args[0]
        # A stream that is captured into a graph must not be waited for.
        waits = self._kernel.interpreted or not device.interface().is_current_stream_capturing()
        names = sorted({name for config in self._kernel.configs for name in config.kwargs})
        grid = describe_grid(launch.grid, names, self._metas(launch) if callable(launch.grid) else ())
        return (describe_launch(launch, grid, samples=samples and waits),), dict(kwargs)

    def _metas(self, launch: Launch) -> Sequence[Mapping[str, Any]]:
        """Return the arguments that the grid's function gets for each configuration."""
        metas: list[Mapping[str, Any]] = []

        def note(meta: Mapping[str, Any]) -> tuple[int, ...]:
            metas.append(meta)
            return (1,)

        for candidate in self._kernel.all_candidates():
            try:
                self._kernel.grid_of(Launch(note, launch.args, launch.kwargs), candidate)
            except OF_AUTHORS:  # a heuristic fails on a configuration that pruning would drop
                continue
        return metas

    def recall(self, inv: Invocation[LaunchConfig, Any], seed: int | None = None) -> Invocation[LaunchConfig, Any]:
        """Return a recorded launch on made-up tensors, or without a seed on tensors without memory."""
        from tunebook.adapters._triton import launch_specs  # noqa: PLC0415 - see above

        spec = inv.args[0].spec if isinstance(inv.args[0], Launch) else inv.args[0]
        if not self._kernel.interpreted:
            _require_gpu(self._kernel.op_id)
        if seed is None:
            return replace(inv, args=(launch_specs.without_memory(spec),))
        where = "cpu" if self._kernel.interpreted else driver.active.get_active_torch_device()
        launch = launch_specs.make_launch(spec, where, seed)
        return replace(inv, args=(launch,), values_from="samples" if launch_specs.keeps_values(spec) else "random")


def _require_gpu(op_id: str) -> None:
    try:
        device.current_device()
    except RuntimeError as error:
        raise Unsupported(
            f"{op_id} runs on a GPU, and Triton finds none here ({str(error).strip()}). Tune where the GPU is; "
            "`tunebook tune --target cuda:90` compiles without it"
        ) from error
