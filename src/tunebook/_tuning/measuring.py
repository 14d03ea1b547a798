"""The timing of a job, as the user's `Measure` and the device allow."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tunebook._arrays.describe import device_of, libraries_of, platform_of, timer_for
from tunebook._arrays.library import library_named
from tunebook._base.errors import DefinitionError
from tunebook._kernel.measure import Measure, measure_of
from tunebook._tuning.job import Timing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tunebook._arrays.library import Timer
    from tunebook._kernel.policy import AutotunePolicy
    from tunebook._tuning.job import Call


def measure_for(call: Call[Any], policy: AutotunePolicy) -> Measure:
    """Return how a call is measured: as `tune` was told, else as the policy says, else as the kernel does."""
    own = measure_of(call.kernel)
    asked = (call.measure or Measure()).over(policy.measure).over(own)
    if call.kernel.measures_by_itself and asked != (own or Measure()):
        raise DefinitionError(f"{call.problem.op} is measured as its definition says: give it measure={asked!r} there")
    return asked


def timing_for(measure: Measure, arguments: object) -> tuple[Timer | None, Timing]:
    """Return the timer of calls with these arguments, and all else about their timing.

    `DefinitionError` if the device or its library cannot measure in that way.
    """
    usual = timer_for(arguments)
    libraries = [library_named(name) for name in sorted(libraries_of(arguments))]
    by_device = usual is not None and usual.is_device_clock
    where = f"calls on {platform_of(device_of(arguments)) or 'cpu'} with {_listed(libraries)}"
    if measure.host is False and not by_device:
        raise DefinitionError(
            f"{measure!r} asks for the device's own clock, and {where} have none here; leave host=False out"
        )
    graph = None
    if measure.launch == "graph":
        graph = next(filter(None, (library.graph(arguments) for library in libraries)), None)
        if graph is None:
            raise DefinitionError(f"{measure!r}: {where} cannot be captured in a graph; leave launch='graph' out")
    timing = Timing(inputs=measure.inputs or 1, graph=graph)
    cold = measure.cache == "cold"
    if measure.host or not by_device:
        if cold and platform_of(device_of(arguments)) not in {"", "cpu"}:
            raise DefinitionError(f"{measure!r}: the host's clock cannot empty the caches of another device")
        return usual, timing._replace(by_host=bool(measure.host or cold), cold=cold)
    if measure.cache is None and graph is None:
        return usual, timing
    if measure.cache is None:
        cold = _timer_as(libraries, arguments, cold=True, graph=True) is not None
    timer = _timer_as(libraries, arguments, cold=cold, graph=graph is not None)
    if timer is None:
        how = "empty the caches" if cold else "leave the caches as they are"
        hint = " Add host=True: the host's clock can." if platform_of(device_of(arguments)) in {"", "cpu"} else ""
        raise DefinitionError(f"{measure!r}: the timer of {where} cannot {how}.{hint}")
    return timer, timing


def _timer_as(libraries: Sequence[Any], arguments: object, *, cold: bool, graph: bool) -> Timer | None:
    """Return the first timer of some libraries that measures in a way; None without one."""
    return next(filter(None, (library.timer_as(arguments, cold, graph) for library in libraries)), None)


def _listed(libraries: Sequence[Any]) -> str:
    return ", ".join(library.name for library in libraries) or "no arrays"
