"""The part of `tunebook run` in the processes of its command: `_startup/sitecustomize.py` and the selector call it."""

from __future__ import annotations

import atexit
import os
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tunebook._base.environment_variables import RunOptions, run_options
from tunebook._base.errors import StoreError, warn_once
from tunebook._kernel.policy import AutotunePolicy
from tunebook._report.run_log import LOG, RunLog, recording_path
from tunebook._selection.recording import record

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tunebook._selection.listeners import Everywhere
    from tunebook._selection.recording import Recording


def _nothing() -> None:
    pass


def _prepare_triton() -> Callable[[], object]:
    if (options := run_options()) is None or options.packages == ():
        return _nothing
    from tunebook.adapters._triton.takeover import is_installed  # noqa: PLC0415 - a program may have only one library
    from tunebook.adapters.triton import install  # noqa: PLC0415 - as above

    if is_installed():  # by the program, with its own options
        return _nothing
    policy = AutotunePolicy(cache_miss_fallback="incremental") if options.live else None
    return partial(install, options.packages, policy=policy, budget=options.budget, on_kernel=_log_of(options).note)


def _prepare_ejkernel() -> Callable[[], object]:
    if (options := run_options()) is not None and options.packages == ():
        return _nothing
    from tunebook.adapters.ejkernel import install  # noqa: PLC0415 - as above

    return install


def report(everywhere: Everywhere) -> None:
    """Report the events of this process to the command from now on, and record calls if asked to."""
    if (options := run_options()) is not None:
        everywhere.listen_rarely(_log_of(options).hear)
        if options.record:
            _record_until_exit(Path(options.folder))


@cache
def _log_of(options: RunOptions) -> RunLog:
    return RunLog(Path(options.folder, LOG))


def _record_until_exit(folder: Path) -> None:
    block = ExitStack()
    atexit.register(_save, block, block.enter_context(record()), folder, os.getpid())


def _save(block: ExitStack, recording: Recording, folder: Path, process: int) -> None:
    if os.getpid() != process:
        return  # a forked child has the calls of its parent, which saves them itself
    with block:
        try:
            recording.save(recording_path(folder))
        except StoreError as error:
            # On another host, or after the end of the command.
            warn_once("not recorded", str(folder), f"tunebook run lost {len(recording)} recorded calls: {error}")


# By library: imports the adapter, and returns the function that takes the library over.
PREPARE: Final[Mapping[str, Callable[[], Callable[[], object]]]] = {
    "triton": _prepare_triton,
    "ejkernel": _prepare_ejkernel,
}
