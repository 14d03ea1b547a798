"""Runs a function by replaying a CUDA graph of its launches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

if TYPE_CHECKING:
    from collections.abc import Callable


@final
class Replay:
    """Captures the launches of a function at its second call; from then on each call replays them.

    The first call runs the function as it is, because loading a module may not happen during a capture. `device` is an
    interface like `torch.cuda`.
    """

    def __init__(self, function: Callable[[], object], device: Any) -> None:
        self._function, self._device = function, device
        self._ran = False
        self._graph: Any = None

    def __call__(self) -> None:
        """Run the function once."""
        if not self._ran:
            self._function()
            self._ran = True
            return
        if self._graph is None:
            self._graph = self._capture()
        self._graph.replay()

    def _capture(self) -> Any:
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
