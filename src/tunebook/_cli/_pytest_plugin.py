"""The part of the pytest plugin that runs under `pytest --tunebook=MODE`; `pytest_tunebook` loads it.

The processes of a test run report as the processes of `tunebook run` do, but their Triton kernels are not taken over.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tunebook._base.environment_variables import RunOptions, run_options, settings_under
from tunebook._cli.ci import shortfall_lines
from tunebook._cli.run import STARTUP, folder_of_run, summary
from tunebook._report.run_log import LOG, RunLog, read_log, shortfalls
from tunebook._selection.listeners import EVERYWHERE

if TYPE_CHECKING:
    from tunebook._base.environment_variables import Mode
    from tunebook._report.run_log import RunEvent


class KernelReport:
    """Sets the mode for a test run, and reports the kernels that it used: by all workers, and processes of tests."""

    def __init__(self, config: pytest.Config, mode: Mode, *, strict: bool) -> None:
        self._config, self._mode, self._strict = config, mode, strict
        at_end = ExitStack()
        config.add_cleanup(at_end.close)
        variables = at_end.enter_context(pytest.MonkeyPatch.context())
        options = run_options()
        # A worker of pytest-xdist has the variables of the process that started it; so has a run inside of another.
        self._reports_alone = options is None
        if options is None:
            options = RunOptions(str(at_end.enter_context(folder_of_run())), packages=())
            for name, value in settings_under(options, STARTUP, mode=mode).items():
                variables.setenv(name, value)
            log = RunLog(Path(options.folder, LOG))
            EVERYWHERE.listen_rarely(log.hear)
            at_end.callback(EVERYWHERE.unlisten, log.hear)
        else:
            variables.setenv("TUNEBOOK_MODE", mode)
        self._log = Path(options.folder, LOG)
        self._start = self._log.stat().st_size if self._log.exists() else 0

    def _events(self) -> list[RunEvent]:
        return read_log(self._log, self._start) if self._log.exists() else []

    def _wrong(self) -> list[RunEvent]:
        """Return the events for which the run fails."""
        short = shortfalls(self._events(), "any")
        forbidden = {"tuned"} if self._mode in ("frozen", "replay") else set()
        forbidden |= {"guessed", "failed"} if self._strict else set()
        return [event for event in short if event.what in forbidden]

    # After the workers have ended, whose plugin ends them in the same hook.
    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Let the run fail, or send the log of a worker on another machine."""
        output: dict[str, Any] | None = getattr(self._config, "workeroutput", None)
        if output is None:
            if session.exitstatus == pytest.ExitCode.OK and self._wrong():
                session.exitstatus = pytest.ExitCode.TESTS_FAILED
        elif self._reports_alone:
            output["tunebook"] = self._log.read_text(encoding="utf-8", errors="replace")

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Take the log of a worker on another machine; pytest-xdist calls this."""
        with self._log.open("a", encoding="utf-8") as log:
            log.write((getattr(node, "workeroutput", None) or {}).get("tunebook", ""))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Write the section of tunebook."""
        terminalreporter.section(f"tunebook, {self._mode}")
        first, *rest = summary(self._events())
        terminalreporter.write_line(first if rest else "no kernel ran on tunebook")
        for line in rest:
            terminalreporter.write_line(line)
        if wrong := self._wrong():
            said = "the run fails: the book does not answer these problems; tune them in a run with --tunebook=normal"
            for line in (said, *shortfall_lines(wrong)):
                terminalreporter.write_line(line, red=True)
