"""Tunes a Triton kernel: which part of a run is timed, and the work around it."""

from __future__ import annotations

import math
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, cast, final

from triton import knobs
from triton.runtime import driver

from tunebook._base.errors import CompileError, DefinitionError, LeftOut, TuningFailed, Unsupported, with_article
from tunebook._base.locks import InterruptSafeLock
from tunebook._base.record_format import BLOCKS
from tunebook._measure.stopwatch import Stopwatch
from tunebook._tuning.job import Budget, CandidateSet, Job, Part, Tuned
from tunebook._tuning.tuner import Tuner
from tunebook.adapters._cuda.timer import EventTimer, Replay
from tunebook.adapters._triton import device
from tunebook.adapters._triton.buckets import standing_in
from tunebook.adapters._triton.candidate import Launch, LaunchConfig, SavedTensors
from tunebook.adapters._triton.compile_ahead import CompileForks, compile_forks, longest_first, may_fork
from tunebook.adapters._triton.kernel import SCALARS, Hooks, TritonKernel
from tunebook.adapters._triton.resources import Spills

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from contextlib import AbstractContextManager

    from tunebook._base.vocabulary import Measurement
    from tunebook._kernel.measure import Measure

# Two problems measured at once on one device would measure each other.
_measuring: Final[dict[int, InterruptSafeLock]] = {}


@final
class BenchTimer:
    """A `Timer` for the user's `do_bench`, where each run returns its own seconds."""

    name: Final = "do_bench"
    is_device_clock: Final = False  # the user's function may read any clock

    def wait(self, _result: object) -> None:
        """Return at once: `do_bench` has waited."""

    def sample_s(self, launch: Callable[[], object], runs: int) -> float:  # noqa: ARG002 - do_bench decides
        """Return the seconds that the run returns."""
        return cast("float", launch())


def replays(measure: Measure | None, *, graph: bool, do_bench: object) -> bool:
    """Return whether graphs are timed, with `use_cuda_graph=graph`; `DefinitionError` if options contradict it."""
    if measure is not None and do_bench is not None:
        raise DefinitionError(f"do_bench= measures in its own way, and not as {measure!r} says; leave one of them out")
    if measure is not None and graph and measure.launch == "eager":
        raise DefinitionError(f"use_cuda_graph=True contradicts {measure!r}; leave one of them out")
    return graph or (measure is not None and measure.launch == "graph")


def _is_warm(kernel: TritonKernel) -> bool:
    return kernel.measure is not None and kernel.measure.cache == "warm"


class DeviceTuner(Tuner):
    """Measures candidates on the launch's device, by device events or by the user's `do_bench`.

    `processes` allows forks that compile. `devices` share the candidates. `must_isolate()` says whether a kernel that
    cannot run in a worker process is an error. `thorough` leaves no candidate out. `on_tuned(launch, tuned)` gets every
    result.
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
        thorough: bool = False,
        on_tuned: Callable[[Launch, Tuned[LaunchConfig]], object] = lambda _launch, _tuned: None,
    ) -> None:
        self._kernel, self._graph, self._do_bench, self._on_tuned = kernel, graph, do_bench, on_tuned
        self._processes, self._devices, self._worker_setup = processes, devices, worker_setup
        self._must_isolate, self._thorough = must_isolate, thorough
        self._lock = InterruptSafeLock()  # the timer is for one thread at a time
        self._timer: EventTimer | None = None
        self._spills = Spills()
        if do_bench is None and not kernel.interpreted:
            self._timer = device.event_timer("graph" if graph else "launch", warm=_is_warm(kernel))
        super().__init__(
            # A `do_bench` chooses its number of runs itself.
            stopwatch=Stopwatch().by(self._timer) if do_bench is None else Stopwatch(shortest_s=0.0).by(BenchTimer()),
            # Other programs on the CPU do not disturb a device that times its own work.
            probes=None if self._timer is None else lambda _platform: (),
        )

    def tune(self, job: Job[LaunchConfig]) -> Tuned[LaunchConfig]:  # type: ignore[override] # Triton kernels only
        """Measure the candidates that are not known yet, and decide over all; the launch's arguments stay unchanged."""
        with self._standing_in(job) as there:
            if there.search is not None:
                from tunebook.adapters._triton.list_search import with_trials  # noqa: PLC0415 - for long lists

                there = with_trials(there)  # noqa: PLW2901 - the job of the block
            tuned = self._with_blocks(self._tune_there(there), there.parts)
        for part in job.parts:
            self._on_tuned(part.args[0], tuned)
        return tuned

    def _with_blocks(self, tuned: Tuned[LaunchConfig], parts: Sequence[Part[LaunchConfig]]) -> Tuned[LaunchConfig]:
        """Return a result whose measurements say how many blocks were launched, for searches at other sizes."""
        if len(parts) > 1:  # as many numbers as launches
            return tuned
        named: list[Measurement] = []
        for m in tuned.measurements:
            known = m.failure is None and m.fingerprint in tuned.configs
            blocks = self._kernel.blocks_of(parts[0].args[0], tuned.configs[m.fingerprint]) if known else None
            named.append(m if blocks is None else m._replace(extra={**m.extra, BLOCKS: blocks}))
        return tuned._replace(measurements=tuple(named))

    def foregone(self, job: Job[LaunchConfig]) -> TuningFailed | None:  # type: ignore[override] # Triton kernels only
        """Return the error of a tuning whose candidates are all known to fail; None if something would run."""
        with self._standing_in(job) as there:
            return super().foregone(there)

    def _standing_in(self, job: Job[LaunchConfig]) -> AbstractContextManager[Job[LaunchConfig]]:
        kernel = self._kernel
        grid_of = partial(kernel.grid_of, cfg=kernel.candidate(kernel.configs[0]))
        resize = kernel.representative
        return standing_in(job, kernel.names, kernel.buckets, grid_of, self._free_bytes, resize=resize)

    def _free_bytes(self) -> float:
        return math.inf if self._kernel.interpreted else device.interface().mem_get_info()[0]

    def _tune_there(self, job: Job[LaunchConfig]) -> Tuned[LaunchConfig]:
        if self._kernel.interpreted:
            tuned = self._measure(job)
        else:
            index = device.current_device()
            wanted = range(device.interface().device_count()) if self._devices == "all" else self._devices
            others = [i for i in wanted if i != index and device.device_name(i) == device.device_name(index)]
            if others and job.search is None:  # before the lock: each device has a lock of its own
                job = self._share_out(job, [index, *others])
            with self._lock, _measuring.setdefault(index, InterruptSafeLock()):
                there = job._replace(setup=job.setup._replace(platform="gpu", ordinal=index))
                limit = self._max_shared_bytes(job, index)
                tuned = self._compile_and_measure(there, index, limit)
        return tuned

    def _max_shared_bytes(self, job: Job[LaunchConfig], index: int) -> int | None:
        """Return the shared memory that a block can have; None if no candidate may be left out."""
        # A thread of NVIDIA's GPUs has 255 registers, others have more. A comparison needs the heuristic first.
        if self._thorough or job.goal.compare is not None or driver.active.get_current_target().backend != "cuda":
            return None
        return int(driver.active.utils.get_device_properties(index)["max_shared_mem"])

    def _compile_and_measure(self, job: Job[LaunchConfig], index: int, limit: int | None) -> Tuned[LaunchConfig]:
        setup, compile_on = job.setup, job.setup.compile
        if compile_on is None:
            return self._measure(job)

        def compile_one(candidate: LaunchConfig) -> object:
            device.use_device(index)
            return compile_on(candidate)

        if job.search is not None:
            tuned = self._search(job, compile_one, limit)
            return self._compile_and_measure(job, index, None) if tuned is None else tuned
        done = {m.fingerprint for m in job.known if m.code == job.code}
        named = CandidateSet(job.conditions, "", job.heuristic)
        for candidate in job.candidates:
            named.admit(candidate)
        unknown = longest_first(candidate for name, candidate in named.configs.items() if name not in done)
        if not self._processes or not may_fork(len(unknown)):
            return self._measure(job._replace(setup=setup._replace(compile=compile_one)))
        self._kernel.chain[-2].cache_key  # noqa: B018 - kept by Triton: worked out here, once, and not in each fork
        # In the order of the tuner; known candidates at the end, because they are rarely measured again.
        first = [] if job.heuristic is None else [job.heuristic]
        needed = list(dict.fromkeys([*first, *unknown, *named.configs.values()]))
        place = {id(candidate): -number for number, candidate in enumerate(needed)}
        order = setup.order._replace(priority=lambda candidate: place[id(candidate)])
        with compile_forks(compile_one, needed, max_shared_bytes=limit, heuristic=job.heuristic) as forks:
            self._spills = Spills()
            reason_against = None if limit is None else partial(self._reason_against, forks, job.heuristic)
            setup = setup._replace(compile=forks, order=order, reason_against=reason_against)
            tuned = self._measure_some(job._replace(setup=setup), forks)
        return self._compile_and_measure(job, index, None) if tuned is None else tuned

    def _measure_some(self, job: Job[LaunchConfig], forks: CompileForks) -> Tuned[LaunchConfig] | None:
        """Measure the candidates that are not left out; return None if nothing else runs."""
        try:
            return self._measure(job)
        except TuningFailed:
            if not forks.has_left_out:
                raise
            return None

    def _reason_against(
        self, forks: CompileForks, heuristic: LaunchConfig | None, candidate: LaunchConfig
    ) -> str | None:
        """Return why a candidate is left out, after others have run, and stop its compiler; None if it is not."""
        reason = None if candidate is heuristic else self._spills.reason_against(candidate)
        if reason is not None:
            forks.leave_out(candidate)
        return reason

    def _search(
        self, job: Job[LaunchConfig], compile_one: Callable[[LaunchConfig], object], limit: int | None
    ) -> Tuned[LaunchConfig] | None:
        """Measure the candidates that a search proposes as it goes: each of the whole list may be asked for.

        None if nothing runs but the candidates that are left out.
        """
        from tunebook.adapters._triton.list_search import with_trials  # noqa: PLC0415 - for long lists

        setup, listed = job.setup, list(cast("Iterable[LaunchConfig]", job.search.space)) if job.search else []
        if not self._processes or not may_fork(len(listed)):
            return self._measure(job._replace(setup=setup._replace(compile=compile_one)))
        needed = [*listed, *([] if job.heuristic is None else [job.heuristic])]
        with compile_forks(compile_one, needed, ahead=False, max_shared_bytes=limit, heuristic=job.heuristic) as forks:
            job = job._replace(setup=setup._replace(compile=forks))
            if limit is not None:
                self._spills = Spills()
                foresee = partial(self._foresee, forks, job.heuristic)
                job = with_trials(job._replace(setup=job.setup._replace(foresee=foresee)), foreseen=True)
            return self._measure_some(job, forks)

    def _foresee(
        self, forks: CompileForks, heuristic: LaunchConfig | None, candidates: Sequence[LaunchConfig]
    ) -> list[CompileError | None]:
        """Return why candidates are not worth compiling, by programs that ran, or by the first stages of their own."""
        reasons = [None if each is heuristic else self._spills.reason_against(each) for each in candidates]
        asked = [each for each, reason in zip(candidates, reasons, strict=True) if reason is None]
        foreseen = iter(forks.foresee(asked))
        return [next(foreseen) if reason is None else LeftOut(reason) for reason in reasons]

    def _measure(self, job: Job[LaunchConfig]) -> Tuned[LaunchConfig]:
        if job.setup.isolate and not self._kernel.interpreted:
            obstacle = self._isolation_obstacle(job)
            if obstacle is None:
                return self._measure_isolated(job)
            if self._must_isolate():
                raise Unsupported(
                    f"{self._kernel.op_id} cannot run in a worker process: {obstacle}. Use isolate='auto'."
                )
            job = job._replace(setup=job.setup._replace(isolate=False))
        kernel = self._kernel
        before = kernel.hooks.before  # the user's own hook replaces resetting and restoring
        zeroed, restored = ((), ()) if before else (kernel.reset_to_zero, kernel.restore_value)
        launches: list[Launch] = [part.args[0].measured for part in job.parts]
        named = [launch.named(kernel.names) for launch in launches]
        saved = [SavedTensors(arguments, zeroed, restored, self._free_bytes()) for arguments in named]
        best: LaunchConfig | None = None
        try:
            parts = [self._part(*each) for each in zip(job.parts, launches, named, saved, strict=True)]
            tuned = super().tune(job._replace(parts=parts))
            best = tuned.config
            return tuned
        finally:  # leave the arguments in the state that the launch of the best candidate expects
            for tensors in saved:
                tensors.restore()
            if before is not None and best is not None:
                for arguments in named:
                    before({**arguments, **best.meta}, reset_only=True)
            if self._timer is not None:
                self._timer.release()

    def _part(
        self, part: Part[LaunchConfig], launch: Launch, named: dict[str, Any], saved: SavedTensors
    ) -> Part[LaunchConfig]:
        """Return a part of a job whose runs are checked, if the kernel has a check."""
        make_run = partial(self._make_run, launch, named, saved)
        check = self._kernel.output_check
        if check is None:
            return part._replace(make_fn=partial(make_run, None), args=(), kwargs={})
        from tunebook.adapters._triton.check import LaunchCheck  # noqa: PLC0415 - for few kernels

        candidates = list(self._kernel.candidates(self._kernel.invocation(launch)))
        checked = LaunchCheck(check, launch, saved, make_run, candidates, self._free_bytes())
        # A run returns what the check says, because the next run overwrites the outputs.
        return part._replace(make_fn=partial(make_run, checked), args=(), kwargs={}, check=lambda said: said)

    def _make_run(
        self,
        launch: Launch,
        named: dict[str, Any],
        saved: SavedTensors,
        check: Callable[[], object] | None,
        candidate: LaunchConfig,
    ) -> Callable[[], object]:
        """Return a function that runs a candidate once, on arguments as the user passed them.

        Its first call returns the result of `check`, which is called while the outputs are there.
        """
        if knobs.autotuning.print:
            sys.stdout.write(f"Autotuning kernel {self._kernel.function.__name__} with config {candidate.config}\n")
        grid, args, kwargs = launch
        run: Callable[[], object] = partial(
            self._kernel.fn.run, *args, grid=grid, warmup=False, **kwargs, **candidate.meta
        )
        if self._graph and self._do_bench is None:
            run = Replay(run, device.interface())
        arguments = {**named, **candidate.meta}
        before, after = self._kernel.hooks
        timer, spills, checks = self._timer, self._spills, iter(() if check is None else (check,))

        def once() -> object:
            saved.restore()
            if candidate.pre_hook is not None:
                candidate.pre_hook(arguments)
            if before is not None:
                before(arguments)
            finished = False
            try:
                if timer is not None:
                    timer.begin()
                program = run()
                if timer is not None:
                    timer.end()
                finished = True
            finally:
                if after is not None:
                    after(arguments, exception=None if finished else sys.exception())
            said = next((check() for check in checks), None)
            saved.notice()
            spills.note(candidate, program)
            return said

        return once if self._do_bench is None else _benched(once, self._do_bench)

    def _isolation_obstacle(self, job: Job[LaunchConfig]) -> str | None:
        """Return why candidates cannot run in a worker process, or None."""
        if len(job.parts) > 1:
            return "it is tuned for several launches together"
        if self._kernel.output_check is not None:
            return "its outputs are checked, which this process does"
        hooked = self._kernel.hooks != Hooks() or any(c.pre_hook is not None for c in job.candidates)
        if hooked or self._graph or self._do_bench is not None or _is_warm(self._kernel):
            return "it has hooks, or a do_bench=, use_cuda_graph= or measure= of its own"
        for name, value in self._kernel.variables(job.parts[0].args[0].measured).items():
            if not isinstance(value, SCALARS) and getattr(value, "untyped_storage", None) is None:
                return f"{name} is {with_article(type(value).__name__)}, and only tensors and numbers can be sent there"
        return None

    def _measure_isolated(self, job: Job[LaunchConfig]) -> Tuned[LaunchConfig]:
        from tunebook.adapters._triton.remote_runs import Remote  # noqa: PLC0415 - needs torch, others may not have it

        launch, index, timeout_s = job.parts[0].args[0].measured, device.current_device(), job.setup.timeout_s
        remote = partial(Remote, self._kernel, launch, device=index, timeout_s=timeout_s, setup=self._worker_setup)
        tuned = super().tune(job._replace(setup=job.setup._replace(isolate=False, runner=remote)))
        for name in self._kernel.reset_to_zero:
            launch.named(self._kernel.names)[name].data.zero_()
        return tuned

    def _share_out(self, job: Job[LaunchConfig], devices: Sequence[int]) -> Job[LaunchConfig]:
        """Measure a share of the candidates on each device at once; return the job left for the first device."""
        # Two GPUs of the same model differ by more than finalists do, so the finalists are raced again on one GPU. Half
        # of the time budget is for the shares.
        if job.budget.seconds is not None:
            job = job._replace(budget=Budget(job.budget.seconds / 2, job.budget.trials))
        parts = [job._replace(candidates=job.candidates[i :: len(devices)], on_step=None) for i in range(len(devices))]
        with ThreadPoolExecutor(len(devices), thread_name_prefix="tunebook-device") as pool:
            found = [m for part in pool.map(self._measure_share, devices, parts) for m in part]
        lost = [m._replace(dropped=m.failure is None) for m in found if m.failure is not None or m.dropped]
        return job._replace(history=job.history._replace(measurements=(*job.known, *lost)))

    def _measure_share(self, index: int, job: Job[LaunchConfig]) -> Sequence[Measurement]:
        """Measure candidates on copies of the tensors on another device, in a thread of its own."""
        if not job.candidates:
            return ()
        device.use_device(index)
        part, where = job.parts[0], driver.active.get_active_torch_device()
        launch: Launch = part.args[0].measured

        def move(value: Any) -> Any:
            return value.to(where, copy=True) if getattr(value, "untyped_storage", None) is not None else value

        kwargs = {name: move(value) for name, value in launch.kwargs.items()}
        moved = Launch(launch.grid, tuple(map(move, launch.args)), kwargs)
        tuner = DeviceTuner(self._kernel, graph=self._graph, do_bench=self._do_bench, processes=False)
        compile_one = partial(self._kernel.compile_cfg, self._kernel.invocation(moved))
        try:
            setup = job.setup._replace(compile=compile_one)
            return tuner.tune(job._replace(parts=[part._replace(args=(moved,))], setup=setup)).measurements
        except TuningFailed as error:
            return error.measurements


def _benched(once: Callable[[], object], do_bench: Callable[..., Any]) -> Callable[[], object]:
    """Return a function that runs a candidate at its first call; later calls return the seconds that do_bench found."""
    ran, found_s = False, math.nan

    def run() -> object:
        nonlocal ran, found_s
        if not ran:
            ran = True
            return once()
        if math.isnan(found_s):
            found: float | Sequence[float] = do_bench(once, quantiles=(0.5, 0.2, 0.8))
            milliseconds = float(found) if isinstance(found, (int, float)) else float(found[0])
            if not 0 < milliseconds < math.inf:
                raise ValueError(f"do_bench returned {milliseconds}: expected milliseconds above zero")
            found_s = milliseconds * 1e-3
        return found_s

    return run
