"""`pytest --tunebook=MODE`, in real runs of a small project with a book."""

from __future__ import annotations

import json
import re
import sys
import textwrap
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest
from cli_fixtures import OnABook, change_environment, python

TESTS = """
    import subprocess
    import sys
    import pytest
    from mykernels import scale

    @pytest.mark.parametrize("n", [8, 16])
    def test_known(n):
        assert scale(n) == n

    def test_unknown():
        assert scale(9) == 9

    def test_that_tunes(monkeypatch):
        monkeypatch.setenv("TUNEBOOK_MODE", "normal")
        assert scale(10) == 10

    def test_in_a_process():
        subprocess.run([sys.executable, "-c", "from mykernels import scale; scale(32)"], check=True)
"""
FAILS = "the run fails"
PROJECT = Path(__file__).parents[2] / "pyproject.toml"


class TestThePlugin(OnABook):
    @pytest.fixture(autouse=True)
    def project(self, place, monkeypatch):
        (place / "test_project.py").write_text(textwrap.dedent(TESTS))
        (place / "pytest.ini").write_text("[pytest]\n")
        for name in ("TUNEBOOK_RUN", "TUNEBOOK_MODE", "PYTEST_ADDOPTS"):
            monkeypatch.delenv(name, raising=False)

    @pytest.fixture
    def test(self, place):
        """Return a function that runs pytest on the project, and returns its exit code and the section of tunebook."""

        def call(*words, installed=False):
            # Plugins that are installed here would take longer to import than all the rest.
            env = {} if installed else {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
            plugins = [] if installed else ["-p", "pytest_tunebook"]
            done = python("-m", "pytest", "-q", "-p", "no:cacheprovider", *plugins, *words, cwd=place, env=env)
            output = done.stdout + done.stderr
            section = re.search(r"(?sm)^=+ tunebook, (.*?)(?=^=+ |\Z|^\d+ (?:passed|failed))", output)
            return done.returncode, "" if section is None else section[1], output

        return call

    @pytest.mark.parametrize(
        ("words", "tests", "code", "lines"),
        [
            (["--tunebook=replay"], "test_known", 0, ["1 kernel ran on tunebook", "found    2 problems in the book"]),
            (["--tunebook=replay", "--tunebook-strict"], "test_known", 0, ["found    2 problems in the book"]),
            (["--tunebook=frozen"], "test_unknown", 0, ["guessed  1 problem ran untuned"]),
            (["--tunebook=frozen", "--tunebook-strict"], "test_unknown", 1, ["guessed  scale@v0 ", ": n=9", FAILS]),
            (["--tunebook=replay"], "test_unknown", 1, ["failed   scale@v0: no configuration"]),
            (["--tunebook=normal"], "test_unknown", 0, ["tuned    1 problem in "]),
            (["--tunebook=frozen"], "test_that_tunes", 1, ["tuned    1 problem in ", FAILS]),
            (["--tunebook=off"], "test_known", 0, ["guessed  2 problems"]),
            (["--tunebook=replay"], "test_in_a_process", 0, ["in 1 process", "found    1 problem in the book"]),
        ],
    )  # fmt: skip
    def test_the_mode_decides_and_the_section_reports(self, test, words, tests, code, lines):
        found, section, output = test(*words, "-k", tests)
        assert found == code, output
        assert [line for line in lines if line not in section] == [], output
        assert (FAILS in section) == (FAILS in lines)

    def test_the_section_names_the_rung_of_trust(self, test, place, ids):
        for identifier in ids["scale@v0"]:
            change_environment(place, identifier, python="3.1")
        _, section, output = test("--tunebook=frozen", "-k", "test_known")
        assert "found    2 problems in the book, 2 trusted as versions" in section, output

    def test_without_the_option_tunebook_is_not_imported_and_the_environment_stays(self, test, place):
        (place / "test_project.py").write_text(
            "import os, sys\ndef test(): assert 'tunebook' not in sys.modules and 'TUNEBOOK_RUN' not in os.environ"
        )
        code, section, output = test()
        assert (code, section) == (0, ""), output

    @pytest.mark.parametrize("words", [[], ["--tunebook=off"]])
    def test_strict_needs_a_mode_that_reads_the_book(self, test, words):
        code, _, output = test("--tunebook-strict", *words)
        assert code == pytest.ExitCode.USAGE_ERROR
        assert "--tunebook-strict needs --tunebook=replay" in output

    def test_failed_tests_keep_their_exit_code_and_runs_in_one_process_leave_nothing_behind(self, place):
        script = """
            import os, pytest
            def ours():
                return {name: value for name, value in os.environ.items() if "TUNEBOOK" in name or name == "PYTHONPATH"}
            before = ours()
            words = ["-q", "-p", "no:cacheprovider", "-p", "pytest_tunebook", "--tunebook=frozen"]
            for more in (["-k", "test_known"], ["-k", "test_that_tunes"], ["no_such_file.py"]):
                print("code", int(pytest.main([*words, *more])), ours() == before)
        """
        done = python("-c", textwrap.dedent(script), cwd=place)
        said = [line for line in done.stdout.splitlines() if line.startswith("code")]
        assert said == ["code 0 True", "code 1 True", "code 4 True"], done.stdout + done.stderr

    def test_an_installed_tunebook_brings_the_plugin(self, test, place):
        (name, module), *rest = tomllib.loads(PROJECT.read_text())["project"]["entry-points"]["pytest11"].items()
        assert (name, rest) == (module, []), "with the same name, `-p` and the entry point are one plugin"
        metadata = place / "anything-1.dist-info"
        metadata.mkdir()
        (metadata / "entry_points.txt").write_text(f"[pytest11]\n{name} = {module}\n")
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: anything\nVersion: 1\n")
        code, section, output = test("--tunebook=replay", "-k", "test_known", installed=True)
        assert (code, "found    2 problems" in section) == (0, True), output

    def test_a_run_of_pytest_reports_where_pytest_itself_loads_the_modules_of_tunebook(self, place):
        # As of every installed package with a plugin: its finder goes before all others.
        metadata = place / "anything-1.dist-info"
        metadata.mkdir()
        (metadata / "entry_points.txt").write_text("[pytest11]\npytest_tunebook = pytest_tunebook\n")
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: anything\nVersion: 1\n")
        (metadata / "RECORD").write_text("tunebook/__init__.py,,\ntunebook/_selection/selector.py,,\n")
        words = ["-m", "tunebook", "run", "--", sys.executable, "-m", "pytest", "-q", "-k", "known"]
        assert "found    2 problems in the book" in python(*words, "--no-header", cwd=place).stderr

    def test_under_tunebook_run_both_report(self, test, place):
        words = ["-m", "tunebook", "run", "--", sys.executable, "-m", "pytest", "-q", "-p", "pytest_tunebook"]
        done = python(*words, "--tunebook=frozen", "-k", "known", cwd=place)
        assert done.stdout.count("found    2 problems in the book") == 1, done.stdout
        assert done.stderr.count("found    2 problems in the book") == 1, done.stderr

    @pytest.mark.skipif(find_spec("xdist") is None, reason="pytest-xdist is not installed")
    @pytest.mark.parametrize("place_of", [["-n", "2"], ["--dist=load", "--tx", "2*popen//env:TUNEBOOK_RUN="]])
    def test_workers_of_xdist_report_to_one_section(self, test, place_of):
        code, section, output = test("-p", "xdist", *place_of, "--tunebook=frozen", "--tunebook-strict", "-k", "known")
        assert code == 1, output
        assert "found    2 problems in the book" in section, output
        assert "guessed  1 problem" in section, output

    def test_the_log_of_a_worker_on_another_machine_is_sent(self, test, place):
        # Without pytest-xdist: a worker that has its inputs but not the variables of the process that started it.
        (place / "conftest.py").write_text(
            textwrap.dedent("""
                import json, pathlib, types, pytest
                @pytest.hookimpl(tryfirst=True)
                def pytest_configure(config):
                    if config.getoption("tunebook") == "frozen":
                        config.workeroutput = {}
                def pytest_sessionfinish(session):
                    config, sent = session.config, pathlib.Path("sent.json")
                    if hasattr(config, "workeroutput"):
                        config.add_cleanup(lambda: sent.write_text(json.dumps(config.workeroutput)))
                    else:
                        node = types.SimpleNamespace(workeroutput=json.loads(sent.read_text()))
                        config.pluginmanager.get_plugin("tunebook-report").pytest_testnodedown(node)
            """)
        )
        test("--tunebook=frozen", "-k", "test_unknown")
        assert json.loads(json.loads((place / "sent.json").read_text())["tunebook"].splitlines()[0])[0] == "guessed"
        code, section, output = test("--tunebook=replay", "--tunebook-strict", "-k", "test_known")
        assert (code, "guessed  1 problem" in section) == (1, True), output
