"""One problem on several GPUs: each measures a share of the candidates, and the finalists meet on one."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from tunebook._base.errors import TuningFailed
from tunebook._tuning.job import Budget

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tunebook._base.vocabulary import Measurement
    from tunebook._tuning.job import Job, Tuned
    from tunebook.adapters._triton.candidate import Launch, LaunchConfig


def spread(
    job: Job[LaunchConfig], devices: Sequence[int], share: Callable[[int, Job[LaunchConfig]], Tuned[LaunchConfig]]
) -> Job[LaunchConfig]:
    """Measure all candidates, `share(device, job)` on each device at once; return the job that is left to do.

    Times on two devices of one model differ by more than finalists do, so those are raced again on one.
    """
    parts = [job._replace(candidates=job.candidates[i :: len(devices)], on_step=None) for i in range(len(devices))]
    with ThreadPoolExecutor(len(devices), thread_name_prefix="tunebook-device") as pool:
        found = [m for part in pool.map(_measured, [share] * len(devices), devices, parts) for m in part]
    lost = [m._replace(dropped=m.failure is None) for m in found if m.failure is not None or m.dropped]
    spent = job.budget if job.budget.seconds is None else Budget(job.budget.seconds / 2, job.budget.trials)
    return job._replace(history=job.history._replace(measurements=(*job.known, *lost)), budget=spent)


def _measured(
    share: Callable[[int, Job[LaunchConfig]], Tuned[LaunchConfig]], device: int, job: Job[LaunchConfig]
) -> Sequence[Measurement]:
    if job.budget.seconds is not None:
        job = job._replace(budget=Budget(job.budget.seconds / 2, job.budget.trials))
    if not job.candidates:
        return ()
    try:
        return share(device, job).measurements
    except TuningFailed as error:
        return error.measurements


def moved(launch: Launch, device: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a launch's arguments with its tensors copied to a device."""

    def there(value: Any) -> Any:
        return value.to(device, copy=True) if getattr(value, "untyped_storage", None) is not None else value

    return tuple(map(there, launch.args)), {name: there(value) for name, value in launch.kwargs.items()}
