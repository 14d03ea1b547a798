"""CUDA graphs: whether one is being captured, and runs as replays of one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

if TYPE_CHECKING:
    from collections.abc import Callable


def is_capturing(device: Any) -> bool:
    """Return whether launches go into a graph just now, where nothing may be measured or waited for."""
    return bool(device.is_current_stream_capturing())


@final
class Replay:
    """A function whose launches are captured after its first call; from then on it replays them.

    The first call runs it as it is, because loading a module may not happen during a capture. `device` has what
    `torch.cuda` has.
    """

    def __init__(self, function: Callable[[], object], device: Any) -> None:
        self._function, self._device = function, device
        self._ran = False
        self._graph: Any = None

    def __call__(self) -> None:
        """Run it once."""
        if not self._ran:
            self._function()
            self._ran = True
            return
        if self._graph is None:
            self._graph = self._captured()
        self._graph.replay()

    def _captured(self) -> Any:
        # Not by `torch.cuda.graph`: it collects garbage and empties the allocator's cache, 100 ms for each candidate.
        device = self._device
        graph, side = device.CUDAGraph(), device.Stream()
        side.wait_stream(device.current_stream())
        with device.stream(side):
            graph.capture_begin()
            try:
                self._function()
            finally:
                graph.capture_end()
        device.current_stream().wait_stream(side)
        return graph
