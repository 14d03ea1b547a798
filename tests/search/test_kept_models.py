"""Models of times that are kept for the next process: the same answers, and never the answer of a damaged file."""

import itertools
import math
import os
from dataclasses import replace

import pytest

import tunebook as tb
from tunebook._base.config_codec import fingerprint_of
from tunebook._base.record_format import Body, Head, Record
from tunebook._base.vocabulary import Measurement
from tunebook.search import _prediction, predict
from tunebook.search._kept_models import _MOST, keep_model, kept_model, state_of_entries
from tunebook.search._part_model import LearntPart
from tunebook.search._size_model import Learnt, SizeModel
from tunebook.search._structures import Block, Structure

pytest.importorskip("numpy")

HERE = tb.Problem("cpu:made up", "tiles@v0", "")
TILES = [{"block": block, "way": way} for block, way in itertools.product((16, 32, 64, 128), "ab")]


def tiled_s(n, config):
    return (
        1e-6 * (5 + math.ceil(n / config["block"]) * (1 + config["block"] / 40)) * (1.1 if config["way"] == "b" else 1)
    )


def record(n):
    facts = {"code": "code", "policy": "host-clock", "environment": ""}
    measured = [
        Measurement(config=c, fingerprint=fingerprint_of(c), samples_s=(tiled_s(n, c),) * 3, **facts) for c in TILES
    ]
    best = min(TILES, key=lambda config: tiled_s(n, config))
    problem = HERE._replace(call_key=f'{{"n":{n}}}')
    return Record(Head(problem=problem, config=best, checksum="code-", origin="tuned"), Body(measurements=measured))


ENTRIES = [record(round(20 * 1.11**step)) for step in range(40)]
ASKED = HERE._replace(call_key='{"n":333}')


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TUNEBOOK_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "models"


def as_another_process(monkeypatch):
    """Forget the models of this process; return whether a model is learnt from then on."""
    learnt, learn = [], SizeModel._learn
    monkeypatch.setattr(_prediction, "_LEARNT", {})
    monkeypatch.setattr(SizeModel, "_learn", lambda *given: learnt.append(1) or learn(*given))
    return learnt


def test_the_next_process_learns_nothing_and_answers_the_same(folder, monkeypatch):
    as_another_process(monkeypatch)
    before = predict(ENTRIES, ASKED)
    assert math.isfinite(before.bound)
    learnt = as_another_process(monkeypatch)
    assert predict(reversed(ENTRIES), ASKED) == before
    assert not learnt


def test_another_state_of_the_entries_is_learnt_anew(folder, monkeypatch):
    as_another_process(monkeypatch)
    predict(ENTRIES, ASKED)
    edited = replace(ENTRIES[0].head, generation=7)
    for entries in (ENTRIES[1:], [Record(edited, ENTRIES[0].body), *ENTRIES[1:]]):
        learnt = as_another_process(monkeypatch)
        predict(entries, ASKED)
        assert learnt


@pytest.mark.parametrize("spoil", ["cut", "flipped", "empty", "other text", "a folder", "a pipe"])
def test_a_damaged_file_is_not_believed(folder, monkeypatch, spoil):
    as_another_process(monkeypatch)
    before = predict(ENTRIES, ASKED)
    (path,) = folder.iterdir()
    content = path.read_bytes()
    damaged = {"cut": content[:-20], "flipped": content.replace(b"0.0", b"9.0"), "empty": b"", "other text": b"{}\n{}"}
    assert damaged["flipped"] != content
    path.unlink()
    if spoil in damaged:
        path.write_bytes(damaged[spoil])
    else:
        path.mkdir() if spoil == "a folder" else os.mkfifo(path)
    learnt = as_another_process(monkeypatch)
    assert predict(ENTRIES, ASKED) == before
    assert learnt


def test_a_home_that_cannot_be_written_or_that_others_write_to_costs_time_alone(folder, monkeypatch):
    folder.parent.write_text("a file in place of the folder")
    assert predict(ENTRIES, ASKED) is not None
    folder.parent.unlink()
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    as_another_process(monkeypatch)
    predict(ENTRIES, ASKED)
    assert not list(folder.iterdir())


def test_only_the_latest_models_are_kept(folder):
    structure = Structure((Block(("A", "B"), 0, "launch"),), frozenset({1}), frozenset({(0, 2), (1, 2)}))
    model = Learnt((LearntPart(structure, {"noise": 0.04}, (1, 2), 3e6),), 1.0)
    for number in range(_MOST + 5):
        keep_model(f"{number}", model)
        os.utime(folder / f"{number}.json", (number, number))
    assert len(list(folder.iterdir())) == _MOST
    assert kept_model("3") is None
    assert kept_model(f"{_MOST + 4}") == model


def test_the_state_counts_entries_cores_and_device_but_not_their_order():
    state = state_of_entries(ENTRIES, 4)
    assert state == state_of_entries(reversed(ENTRIES), 4)
    assert state != state_of_entries(ENTRIES, 8)
    moved = [Record(replace(r.head, problem=r.problem._replace(device="other")), r.body) for r in ENTRIES]
    assert state != state_of_entries(moved, 4)
