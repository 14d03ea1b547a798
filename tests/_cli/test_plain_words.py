"""The words of listings, the demo and the doctor, as people read them who do not know the library."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace

import pytest
from cli_fixtures import OnABook, stored

from tunebook._base.config_codec import decode
from tunebook._base.record_format import Body
from tunebook._base.vocabulary import Measurement
from tunebook._cli import demo
from tunebook._cli._terminal import Terminal
from tunebook._statistics.decide import decide
from tunebook._tuning.job import Tuned
from tunebook.stores import open_store


def interrupt(place, identifier):
    """Make an entry look as an interrupted tuning leaves it."""
    record = stored(place, identifier)
    facts = {"when": record.provenance["when"], "complete": False, "interrupted": True}
    body = Body(measurements=record.body.measurements[:2], provenance=facts)
    store = open_store(place / "home")
    store.delete(record.problem)
    store.put(record.replace(head=replace(record.head, config=None), body=body))


class TestListings(OnABook):
    def test_an_interrupted_tuning_is_neither_tuned_nor_without_a_winner(self, place, run, ids):
        (identifier,) = ids["matmul@v0"]
        interrupt(place, identifier)
        _, out, _ = run("ls", "--kernel", "matmul")
        assert re.search(r"matmul@v0 +interrupted ", out)
        assert not re.search("no winner|tuned", out)
        (entry,) = json.loads(run("ls", "--kernel", "matmul", "--json")[1])
        assert (entry["config"], entry["origin"]) == (None, "interrupted")
        _, out, _ = run("show", "matmul")
        assert re.search(r"^  config +interrupted$", out, re.MULTILINE)
        assert re.search(r"^  origin +interrupted ", out, re.MULTILINE)

    def test_an_interrupted_entry_is_interrupted_again_after_a_pin(self, place, run, ids):
        (identifier,) = ids["matmul@v0"]
        pinned = stored(place, identifier).head.config
        interrupt(place, identifier)
        values = [f"{name}={value}" for name, value in decode(pinned).items()]
        assert run("pin", identifier, *values)[0] == 0
        run("unpin", identifier)
        (entry,) = json.loads(run("ls", "--kernel", "matmul", "--json")[1])
        assert (entry["config"], entry["origin"]) == (None, "interrupted")

    def test_facts_are_shown_as_text_and_not_as_python(self, place, run, ids):
        (identifier,) = ids["matmul@v0"]
        record = stored(place, identifier)
        facts = {**record.provenance, "quiet": True, "disturbances": ["other work ran", "the clock was slow"]}
        open_store(place / "home").put(record.replace(body=replace(record.body, provenance=facts)))
        _, out, _ = run("show", "matmul")
        assert re.search(r"^  disturbances +other work ran; the clock was slow$", out, re.MULTILINE)
        assert re.search(r"^  quiet +yes$", out, re.MULTILINE)

    def test_a_pin_is_not_shown_as_chosen(self, place, run):
        run("pin", "matmul", "block=32")
        _, out, _ = run("show", "matmul")
        assert re.search(r"block=32 +pinned by hand", out)
        assert "chosen" not in out


def ranked(*times):
    """Return the result of a tuning: a configuration, its samples, and whether it left the race."""
    measured = [
        Measurement({"n": n}, str(n), "code", "policy", "here", samples_s=samples, dropped=dropped)
        for n, (samples, dropped) in enumerate(times)
    ]
    verdict = decide(measured, incumbent=None, heuristic=None)
    return Tuned({"n": 0}, verdict, tuple(measured), len(measured), complete=True, seconds=1.0, configs={})


def test_the_demo_marks_eliminated_candidates_and_counts_those_that_it_does_not_show():
    tuned = ranked(((1.0,) * 20, False), ((5.0,) * 20, False), *(((3.0 + n,) * 3, True) for n in range(6)))
    out = io.StringIO()
    demo._ranking(tuned, Terminal(out=out, width=80))
    text = out.getvalue()
    assert text.count(" eliminated\n") == 4
    assert "  ... 2 more\n" in text
    assert "chosen" in text


class TestTune(OnABook):
    @pytest.mark.parametrize(("name", "program"), [("serve.py", "serve.py"), ("calls.txt", "train.py")])
    def test_a_file_that_is_not_a_recording_gets_the_command_that_writes_one(
        self, tmp_path, monkeypatch, run, name, program
    ):
        monkeypatch.chdir(tmp_path)
        (tmp_path / name).write_text("import mykernels\n")
        code, _, err = run("tune", name)
        assert code == 3
        said = f"{name} is not a recording; `Recording.save` writes one, and so does "
        assert f"{said}`tunebook run --record calls.json -- python {program}`" in " ".join(err.split())

    def test_the_overview_says_that_run_records_any_kernel(self, run):
        assert "  run         run a command: tune its Triton kernels, or record any kernel\n" in run("--help")[1]


class TestDoctor(OnABook):
    @pytest.mark.parametrize(
        ("name", "value", "said"),
        [
            ("TUNEBOOK_LOG", "x", "invalid TUNEBOOK_LOG='x'; use info or debug"),
            ("TUNEBOOK_TRUST", "x", "invalid TUNEBOOK_TRUST='x'"),
        ],
    )
    def test_settings_at_which_programs_raise_are_bad(self, place, run, monkeypatch, name, value, said):
        monkeypatch.setenv(name, value)
        code, out, _ = run("doctor")
        assert code == 1
        assert re.search(rf"^✗ setting +{re.escape(said)}", out, re.MULTILINE)

    def test_a_pin_of_a_kernel_that_the_book_does_not_know_is_a_warning(self, place, run, monkeypatch):
        monkeypatch.setenv("TUNEBOOK_PIN", "matmull:block=32")
        code, out, _ = run("doctor")
        assert code == 0
        assert re.search(r"^! setting +TUNEBOOK_PIN=matmull:block=32", out, re.MULTILINE)
        assert "matmull" in out
        assert "did you mean 'matmul'?" in " ".join(out.split())
        monkeypatch.setenv("TUNEBOOK_PIN", "matmul:block=32")
        assert re.search(r"^✓ setting +TUNEBOOK_PIN=matmul:block=32", run("doctor")[1], re.MULTILINE)

    def test_a_misspelt_variable_is_named(self, place, run, monkeypatch):
        monkeypatch.setenv("TUNEBOOK_PINN", "matmul:block=32")
        code, out, _ = run("doctor")
        assert code == 0
        assert re.search(r"^! setting +unknown variable 'TUNEBOOK_PINN'; did you mean", out, re.MULTILINE)
        assert "TUNEBOOK_PIN" in out.replace("TUNEBOOK_PINN", "")
        monkeypatch.delenv("TUNEBOOK_HOME")
        assert "no TUNEBOOK_* variable is set" not in run("doctor", "--book", str(place / "home"))[1]

    def test_the_accelerator_is_not_taken_for_a_gpu(self, place, run):
        assert re.search(r"^. accelerator +C accelerator of the hot path: ", run("doctor")[1], re.MULTILINE)
