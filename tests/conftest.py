"""Fixtures of every test: its own book, warnings that are given anew, and nothing left of a test that failed."""

from __future__ import annotations

import subprocess
from contextlib import suppress

import pytest

from tunebook import clear_invocations
from tunebook._base.errors import forget_warnings
from tunebook._hotpath.codegen import find_pack

pytest.register_assert_rewrite("shared_checks")
# A busy machine may take any time over an example. The timeout of the whole test still holds.
with suppress(ModuleNotFoundError):  # a GPU machine may not have it, and runs the tests without properties
    from hypothesis import HealthCheck, settings

    settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("patient")

_FAILED = pytest.StashKey[bool]()


@pytest.fixture(autouse=True)
def _own_book(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("TUNEBOOK_HOME", str(tmp_path_factory.mktemp("book")))
    monkeypatch.setenv("TUNEBOOK_LOCKS", str(tmp_path_factory.mktemp("locks")))
    forget_warnings()
    clear_invocations()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    item.stash[_FAILED] = item.stash.get(_FAILED, False) or (call.when == "call" and report.failed)
    return report


@pytest.fixture(autouse=True)
def _no_process_of_a_failed_test(request, monkeypatch):
    """End the programs that a failed test started: they may be stopped, or hold a lock or a device."""
    started, begin = [], subprocess.Popen.__init__

    def init(process, *args, **options):
        started.append(process)
        begin(process, *args, **options)

    monkeypatch.setattr(subprocess.Popen, "__init__", init)
    yield
    for process in started if request.node.stash.get(_FAILED, False) else ():
        if process.poll() is None:
            with process:  # closes its pipes, too
                process.kill()


@pytest.fixture(scope="module", params=["accelerated", "pure"])
def way(request):
    """Run a module's tests on both hot paths, C and Python: `pytestmark = pytest.mark.usefixtures("way")`."""
    if request.param == "accelerated" and find_pack(layout=True) is None:
        pytest.skip("the accelerator is not built: python hatch_build.py")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TUNEBOOK_PURE", "1" if request.param == "pure" else "")
        yield request.param


@pytest.fixture(scope="module")
def compiled_once(tmp_path_factory):
    """Programs of Triton may be shared by the tests of a module, and by nothing else."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        patch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # without it, Triton 3.9 warns that the default will change
        yield
