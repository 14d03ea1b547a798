"""Functions on a GPU that are tuned while the program runs: their calls are timed by the array library's events."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from tunebook._arrays.describe import arrays_in, device_of, is_array, map_leaves, obstacle_to, timer_for
from tunebook._arrays.library import library_of
from tunebook._measure.stopwatch import AgainstModel, Launches, Stopwatch, first_trial
from tunebook._tuning.live_runs import LiveRuns

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping

    from tunebook._arrays.library import Timer
    from tunebook._kernel.kernel import Invocation, Kernel
    from tunebook._tuning.live_runs import LaunchWindow

C = TypeVar("C")

_MOST_BYTES: Final = 1 << 30  # of arguments that are copied twice, to check a candidate's first output


def function_runs(
    kernel: Kernel[C, Any],
    inv: Invocation[C, Any],
    model: C,
    detach: Callable[[Invocation[C, Any]], Invocation[C, Any]],
) -> FunctionRuns[C] | None:
    """Return how a function's calls are tried; None if its arrays' library has no events, and the host's clock times.

    `model` is the configuration whose output counts as correct; `detach` takes the arrays out of a call.
    """
    timer = timer_for((inv.args, inv.kwargs))
    windows = getattr(timer, "live_windows", None)
    return None if timer is None or windows is None else FunctionRuns(kernel, inv, model, detach, timer)


class FunctionRuns(LiveRuns[C]):
    """The calls of one problem of a function."""

    clock = "device-events"

    def __init__(
        self,
        kernel: Kernel[C, Any],
        inv: Invocation[C, Any],
        model: C,
        detach: Callable[[Invocation[C, Any]], Invocation[C, Any]],
        timer: Timer,
    ) -> None:
        self._kernel, self._model, self._detach = kernel, model, detach
        self._empty = replace(inv, args=(), kwargs={}, override_cfg=None)
        self._wait, self._windows = timer.wait, timer.live_windows()  # type: ignore[attr-defined] # see `function_runs`
        self._device = device_of((inv.args, inv.kwargs))
        self._bound: dict[int, tuple[C, Callable[..., Any]]] = {}

    def may_try(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether nothing forbids to run another candidate: another device, a CUDA graph that is captured, a trace."""
        # The timer enters the device of the first call, and events belong to one device.
        return device_of((args, kwargs)) == self._device and obstacle_to(self._call(args, kwargs)) is None

    def _call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Invocation[C, Any]:
        return replace(self._empty, args=args, kwargs=kwargs)

    def sizes(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Hashable:
        """Return the shapes of the arrays of a call."""
        return tuple(library_of(array).shape(array) for array in arrays_in((args, dict(kwargs))))

    def run(self, config: C, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run a call with a configuration."""
        known = self._bound.get(id(config))
        if known is None:
            known = self._bound[id(config)] = config, self._kernel.bind(self._empty, config)
        return known[1](*args, **kwargs)

    def timed(self, config: C, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, LaunchWindow]:
        """Run a call between two events."""
        return self._windows.around(partial(self.run, config, args, kwargs))  # type: ignore[no-any-return] # as above

    def load(self, config: C, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Run a candidate for the first time, on copies of the arguments, and check its output.

        It may compile something, and a check waits for the device: both count as loading. Arguments too big to be
        copied are left alone, and the candidate is not checked.
        """
        if sum(getattr(array, "nbytes", 0) for array in arrays_in((args, dict(kwargs)))) > _MOST_BYTES:
            return True
        args, kwargs = map_leaves(_copied, (args, dict(kwargs)))
        kernel, inv = self._kernel, self._call(args, kwargs)
        bind = partial(kernel.bind, self._empty)
        launches = Launches([self._model, config], bind, args, kwargs, kernel.mutated(inv))
        once = Stopwatch(warmup=1)._replace(wait=self._wait)
        check = kernel.checker(inv)
        if check is None and kernel.checks:
            model = AgainstModel(0, kernel.comparison(inv), once)
            model(launches, 0, launches(0)())
            launches.arguments.notice()
            check = partial(model, launches, 1)
        trial = first_trial(launches(1), once, check)
        if trial.failure is not None:
            raise trial.error or RuntimeError(trial.failure.message)
        return True

    def detached(self, inv: Invocation[C, Any]) -> Invocation[C, Any]:
        """Return the call with descriptions in place of its arrays."""
        return self._detach(inv)


def _copied(leaf: Any) -> Any:
    return library_of(leaf).copy(leaf) if is_array(leaf) else leaf
