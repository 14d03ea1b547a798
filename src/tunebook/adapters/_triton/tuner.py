"""Tuning a kernel of Triton's: what of a run is timed, and what is done around it."""

from __future__ import annotations

import math
import sys
import threading
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, cast, final

from tunebook._base.errors import Unsupported
from tunebook._measure.stopwatch import Stopwatch
from tunebook._tuning.tuner import Tuner
from tunebook.adapters._cuda.graph import Replay
from tunebook.adapters._cuda.timer import EventTimer
from tunebook.adapters._triton.candidate import Launch
from tunebook.adapters._triton.compile_ahead import FEWEST, CompileForks, is_worth_it
from tunebook.adapters._triton.device import (
    cold_cache,
    current_device,
    device_count,
    device_name,
    free_bytes,
    interface,
    tensor_device,
    use_device,
)
from tunebook.adapters._triton.kernel import Hooks, what_cannot_be_sent
from tunebook.adapters._triton.saved_tensors import SavedTensors
from tunebook.adapters._triton.spread_over_gpus import moved, spread

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tunebook._tuning.job import Job, Tuned
    from tunebook.adapters._triton.candidate import LaunchConfig
    from tunebook.adapters._triton.kernel import TritonKernel

# Two problems measured at once on one device would measure each other.
_measuring: Final[dict[int, threading.RLock]] = {}


@final
class BenchTimer:
    """Believes what the user's `do_bench` says: a run returns its seconds."""

    name: Final = "do_bench"
    is_device_clock: Final = False  # the user's function may read any clock

    def wait(self, _result: object) -> None:
        """Return at once: `do_bench` has waited."""

    def sample_s(self, launch: Callable[[], object], runs: int) -> float:  # noqa: ARG002 - it has seen to that
        """Return what the run says."""
        return cast("float", launch())


class DeviceTuner(Tuner):
    """Measures candidates on the device that the launch is for, by its events; or as the user's `do_bench` does.

    `processes` allows forks of this process that compile. Candidates are spread over `devices`. `must_isolate` says
    whether one that cannot be isolated is an error, where isolation is asked for; `worker_setup` is called in worker
    processes first, named as "module:function". `on_tuned(launch, tuned)` is told of every result.
    """

    def __init__(
        self,
        kernel: TritonKernel,
        *,
        graph: bool,
        do_bench: Callable[..., Any] | None,
        processes: bool = True,
        devices: Sequence[int] | Literal["all"] = (),
        must_isolate: Callable[[], bool] = lambda: True,
        worker_setup: str = "",
        on_tuned: Callable[[Launch, Tuned[LaunchConfig]], object] = lambda _launch, _tuned: None,
    ) -> None:
        self._kernel, self._graph, self._do_bench, self._on_tuned = kernel, graph, do_bench, on_tuned
        self._processes, self._spread, self._worker_setup = processes, devices, worker_setup
        self._must_isolate = must_isolate
        self._lock = threading.RLock()  # the timer is for one thread at a time
        self._timer: EventTimer | None = None
        if do_bench is None and not kernel.interpreted:
            way = "graph" if graph else "launch"
            self._timer = EventTimer(interface, cold_cache, windows=True, way=way)
        super().__init__(
            stopwatch=Stopwatch().by(self._timer if do_bench is None else BenchTimer()),
            # Who else uses the CPU does not disturb a device that times its own work.
            probes=None if self._timer is None else lambda _platform: (),
        )

    def tune(self, job: Job[LaunchConfig]) -> Tuned[LaunchConfig]:  # type: ignore[override] # of such kernels alone
        """Measure what is not known yet, and decide over all of it; the launch's arguments are as before then."""
        launch: Launch = job.parts[0].args[0]
        if self._kernel.interpreted:
            tuned = self._measured(job, launch)
        else:
            index = current_device()
            others = self._devices(index)
            if others:  # before the lock, which each of them takes for its own device
                job = spread(job, [index, *others], partial(self._share, launch))
            with self._lock, _measuring.setdefault(index, threading.RLock()):
                there = job._replace(setup=job.setup._replace(platform="gpu", ordinal=index))
                tuned = self._compiled_and_measured(there, launch, index)
        self._on_tuned(launch, tuned)
        return tuned

    def _compiled_and_measured(self, job: Job[LaunchConfig], launch: Launch, index: int) -> Tuned[LaunchConfig]:
        setup = job.setup
        if setup.compile is None:
            return self._measured(job, launch)
        compile_one = partial(_on_device, index, setup.compile)
        unknown = len(job.candidates) - sum(m.code == job.code for m in job.known)
        if self._processes and unknown >= FEWEST and is_worth_it(compile_one, job.candidates):
            extra = [] if job.heuristic is None else [job.heuristic]
            with CompileForks(compile_one, [*job.candidates, *extra]) as forks:
                return self._measured(job._replace(setup=setup._replace(compile=forks.compile)), launch)
        return self._measured(job._replace(setup=setup._replace(compile=compile_one)), launch)

    def _devices(self, index: int) -> list[int]:
        """Return the other devices that candidates may run on."""
        if self._spread == ():
            return []
        wanted = range(device_count()) if self._spread == "all" else self._spread
        return [i for i in wanted if i != index and device_name(i) == device_name(index)]

    def _share(self, launch: Launch, index: int, job: Job[LaunchConfig]) -> Tuned[LaunchConfig]:
        """Measure a share of a job's candidates on a device, in a thread of its own."""
        use_device(index)
        there = Launch(launch.grid, *moved(launch, tensor_device()))
        alone = DeviceTuner(self._kernel, graph=self._graph, do_bench=self._do_bench, processes=False)
        compile_one = partial(self._kernel.compile_cfg, self._kernel.invocation(there))
        part = job.parts[0]._replace(args=(there,))
        return alone.tune(job._replace(parts=[part], setup=job.setup._replace(compile=compile_one)))

    def _measured(self, job: Job[LaunchConfig], launch: Launch) -> Tuned[LaunchConfig]:
        if job.setup.isolate and not self._kernel.interpreted:
            obstacle = self._obstacle(job, launch)
            if obstacle is None:
                return self._isolated(job, launch)
            if self._must_isolate():
                raise Unsupported(
                    f"{self._kernel.op_id} cannot run in a worker process: {obstacle}. Use isolate='auto'."
                )
            job = job._replace(setup=job.setup._replace(isolate=False))
        runs = _Runs(self._kernel, launch, self._timer, graph=self._graph, do_bench=self._do_bench)
        best: LaunchConfig | None = None
        try:
            tuned = super().tune(job._replace(parts=[job.parts[0]._replace(make_fn=runs.make, args=(), kwargs={})]))
            best = tuned.config
            return tuned
        finally:
            runs.close(best)

    def _obstacle(self, job: Job[LaunchConfig], launch: Launch) -> str | None:
        """Return why candidates cannot run in a worker process, or None."""
        hooked = self._kernel.hooks != Hooks() or any(c.pre_hook is not None for c in job.candidates)
        if hooked or self._graph or self._do_bench is not None:
            return "it has hooks, or a do_bench= or use_cuda_graph= of its own"
        return what_cannot_be_sent(self._kernel, launch)

    def _isolated(self, job: Job[LaunchConfig], launch: Launch) -> Tuned[LaunchConfig]:
        from tunebook.adapters._triton.remote_runs import Remote  # noqa: PLC0415 - torch, which only these are sure to have

        def remote(candidates: Sequence[LaunchConfig]) -> Remote:
            return Remote(
                self._kernel,
                launch,
                candidates,
                device=current_device(),
                timeout_s=job.setup.timeout_s,
                setup=self._worker_setup,
            )

        tuned = super().tune(job._replace(setup=job.setup._replace(isolate=False, runner=remote)))
        for name in self._kernel.reset_to_zero:
            launch.named(self._kernel.names)[name].data.zero_()
        return tuned


def _on_device(index: int, compile_one: Callable[[LaunchConfig], object], candidate: LaunchConfig) -> object:
    use_device(index)
    return compile_one(candidate)


class _Runs:
    """The runs of one launch's candidates, each on arguments as the user brought them."""

    def __init__(
        self,
        kernel: TritonKernel,
        launch: Launch,
        timer: EventTimer | None,
        *,
        graph: bool,
        do_bench: Callable[..., Any] | None,
    ) -> None:
        self._kernel, self._launch, self._timer = kernel, launch, timer
        self._graph, self._do_bench = graph, do_bench
        self._named = launch.named(kernel.names)
        hooked = kernel.hooks.before is not None  # the user's own hook takes the place of what these would do
        self._kept = SavedTensors(
            self._named,
            () if hooked else kernel.reset_to_zero,
            () if hooked else kernel.restore_value,
            (lambda: math.inf) if kernel.interpreted else free_bytes,
        )

    def make(self, candidate: LaunchConfig) -> Callable[[], object]:
        """Return what runs a candidate once."""
        grid, args, kwargs = self._launch
        run: Callable[[], object] = partial(
            self._kernel.fn.run, *args, grid=grid, warmup=False, **kwargs, **candidate.meta
        )
        if self._graph and self._do_bench is None:
            run = Replay(run, interface())
        once = partial(self._run, run, candidate, {**self._named, **candidate.meta})
        return once if self._do_bench is None else _Benched(once, self._do_bench)

    def close(self, best: LaunchConfig | None) -> None:
        """Leave the arguments as the launch of the best candidate is to find them."""
        self._kept.restore()
        before = self._kernel.hooks.before
        if before is not None and best is not None:
            before({**self._named, **best.meta}, reset_only=True)
        if self._timer is not None:
            self._timer.release()

    def _run(self, run: Callable[[], object], candidate: LaunchConfig, arguments: dict[str, Any]) -> None:
        self._kept.restore()
        before, after = self._kernel.hooks
        if candidate.pre_hook is not None:
            candidate.pre_hook(arguments)
        if before is not None:
            before(arguments)
        finished = False
        try:
            self._in_window(run)
            finished = True
        finally:
            if after is not None:
                after(arguments, exception=None if finished else sys.exception())
        self._kept.notice()

    def _in_window(self, run: Callable[[], object]) -> None:
        if self._timer is None:
            run()
            return
        self._timer.begin()
        run()
        self._timer.end()


@final
class _Benched:
    """Runs a candidate once as it is; from then on each call returns the seconds that `do_bench` found, once."""

    def __init__(self, once: Callable[[], object], do_bench: Callable[..., Any]) -> None:
        self._once, self._do_bench = once, do_bench
        self._ran = False
        self._found_s = math.nan

    def __call__(self) -> float | None:
        if not self._ran:
            self._once()
            self._ran = True
            return None
        if math.isnan(self._found_s):
            found: float | Sequence[float] = self._do_bench(self._once, quantiles=(0.5, 0.2, 0.8))
            milliseconds = float(found) if isinstance(found, (int, float)) else float(found[0])
            if not 0 < milliseconds < math.inf:
                raise ValueError(f"do_bench returned {milliseconds}, which is no time")
            self._found_s = milliseconds * 1e-3
        return self._found_s
