"""The pytest plugin of tunebook: `pytest --tunebook=replay`. Without the option, it does not even import tunebook."""

from __future__ import annotations

import pytest

_MODES = ("normal", "frozen", "replay", "off")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options `--tunebook` and `--tunebook-strict`."""
    group = parser.getgroup("tunebook", "tuned kernels")
    text = "use the book of tuned kernels as TUNEBOOK_MODE says: %(choices)s; report the kernels that the tests used"
    group.addoption("--tunebook", choices=_MODES, metavar="MODE", help=text)
    text = "fail the run if a kernel ran with a configuration that was not tuned, or had none"
    group.addoption("--tunebook-strict", action="store_true", help=text)


def pytest_configure(config: pytest.Config) -> None:
    """Begin the report, if the run asks for one."""
    mode, strict = config.getoption("tunebook"), config.getoption("tunebook_strict")
    if strict and mode in (None, "off"):
        raise pytest.UsageError("--tunebook-strict needs --tunebook=replay, --tunebook=frozen or --tunebook=normal")
    if mode is not None:
        from tunebook._cli._pytest_plugin import KernelReport  # noqa: PLC0415 - see above

        config.pluginmanager.register(KernelReport(config, mode, strict=strict), "tunebook-report")
