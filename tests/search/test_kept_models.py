"""Models of times that are kept for the next process: the same answers, and never the answer of a damaged file."""

import itertools
import json
import math
import os
from dataclasses import replace

import pytest

import tunebook as tb
from tunebook._base.config_codec import fingerprint_of
from tunebook._base.record_format import Body, Head, Record
from tunebook._base.vocabulary import Measurement
from tunebook.search import _prediction, _size_model, predict
from tunebook.search._kept_models import _MOST, KeptModel, digests_of, keep_model, kept_model
from tunebook.search._part_model import LearntPart
from tunebook.search._size_model import BOUNDED_FROM, Learnt
from tunebook.search._structures import Block, Structure

pytest.importorskip("numpy")

HERE = tb.Problem("cpu:made up", "tiles@v0", "")
TILES = [{"block": block, "way": way} for block, way in itertools.product((16, 32, 64, 128), "ab")]


def tiled_s(n, config):
    return (
        1e-6 * (5 + math.ceil(n / config["block"]) * (1 + config["block"] / 40)) * (1.1 if config["way"] == "b" else 1)
    )


def slower_s(n, config):
    return 2 * tiled_s(n, config)


def record(n, seconds=tiled_s):
    facts = {"code": "code", "policy": "host-clock", "environment": ""}
    measured = [
        Measurement(config=c, fingerprint=fingerprint_of(c), samples_s=(seconds(n, c),) * 3, **facts) for c in TILES
    ]
    best = min(TILES, key=lambda config: seconds(n, config))
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
    learnt, learn = [], _size_model._learn_parts
    monkeypatch.setattr(_prediction, "_LEARNT", {})
    monkeypatch.setattr(_prediction, "_LATELY", {})
    monkeypatch.setattr(_size_model, "_learn_parts", lambda *given: learnt.append(1) or learn(*given))
    return learnt


def test_the_next_process_learns_nothing_and_answers_the_same(folder, monkeypatch):
    as_another_process(monkeypatch)
    before = predict(ENTRIES, ASKED)
    assert math.isfinite(before.bound)
    learnt = as_another_process(monkeypatch)
    assert predict(reversed(ENTRIES), ASKED) == before
    assert not learnt


def edited(entry):
    return Record(replace(entry.head, generation=entry.head.generation + 1), entry.body)


@pytest.mark.parametrize("same_process", [True, False])
def test_a_model_serves_until_an_eighth_of_the_entries_is_new_or_gone(folder, monkeypatch, same_process):
    learnt = as_another_process(monkeypatch)
    assert predict(ENTRIES, ASKED).problems == 40
    later = [record(n) for n in (50, 150, 250, 350, 450, 550)]
    nearly = [[*ENTRIES, *later[:5]], ENTRIES[4:], [*map(edited, ENTRIES[:2]), *ENTRIES[2:]]]
    for entries in nearly:
        learnt = learnt if same_process else as_another_process(monkeypatch)
        learnt.clear()
        found = predict(entries, ASKED)
        assert not learnt
        assert found.problems == len(entries)  # their times count, new or not
    for entries in ([*ENTRIES, *later], ENTRIES[6:], [*map(edited, ENTRIES[:3]), *ENTRIES[3:]]):
        learnt = as_another_process(monkeypatch)
        predict(entries, ASKED)
        assert learnt


def test_what_new_entries_say_is_told_at_once(folder, monkeypatch):
    as_another_process(monkeypatch)
    assert predict(ENTRIES, ASKED).config == {"block": 128, "way": "a"}
    otherwise = [record(n, lambda n, c: tiled_s(n, c) * c["block"]) for n in (330, 331, 334, 335)]
    assert predict([*ENTRIES, *otherwise], ASKED).config["block"] != 128


def test_a_model_without_a_bound_is_learnt_anew_as_soon_as_there_may_be_one(folder, monkeypatch):
    as_another_process(monkeypatch)
    assert predict(ENTRIES[::2][: BOUNDED_FROM - 1], ASKED).bound == math.inf
    assert predict(ENTRIES[::2][:BOUNDED_FROM], ASKED).bound < math.inf


def test_a_model_without_a_bound_serves_as_long(folder, monkeypatch):
    learnt = as_another_process(monkeypatch)
    cut = [Record(r.head, replace(r.body, provenance={"complete": False})) for r in ENTRIES]
    for many in range(36, 41):
        assert predict(cut[:many], ASKED).bound == math.inf
    assert learnt == [1]


def test_what_was_learnt_about_other_configurations_or_sizes_is_not_used(folder, monkeypatch):
    as_another_process(monkeypatch)
    predict(ENTRIES, ASKED)
    fewer = [Record(r.head, replace(r.body, measurements=r.body.measurements[:-1])) for r in ENTRIES]
    learnt = as_another_process(monkeypatch)
    predict(fewer, ASKED)
    assert learnt


def test_where_no_model_can_be_kept_a_process_uses_its_own(tmp_path, monkeypatch):
    (tmp_path / "home").write_text("a file in place of the folder")
    monkeypatch.setenv("TUNEBOOK_HOME", str(tmp_path / "home"))
    learnt = as_another_process(monkeypatch)
    predict(ENTRIES[1:], ASKED)
    predict(ENTRIES, ASKED)
    assert learnt == [1]


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
    learnt = Learnt(("n", "m"), ("one", "two"), (LearntPart(structure, {"noise": 0.04}, (1, 2), 3e6),), 1.0)
    models = [KeptModel(frozenset({f"{number}"}), frozenset({"0"}), learnt) for number in range(_MOST + 5)]
    for number, model in enumerate(models):
        before = set(folder.iterdir()) if number else set()
        keep_model(model)
        (new,) = set(folder.iterdir()) - before
        os.utime(new, (number, number))
    assert len(list(folder.iterdir())) == _MOST
    assert kept_model(models[3].entries) is None
    assert kept_model(models[-1].entries) == models[-1]


def test_digests_follow_entries_times_cores_and_device_and_not_their_order():
    digests = digests_of(ENTRIES, 4)
    retimed = [Record(r.head, record(json.loads(r.problem.call_key)["n"], slower_s).body) for r in ENTRIES]
    assert digests.isdisjoint(digests_of(retimed, 4))
    assert digests == digests_of(reversed(ENTRIES), 4)
    moved = [Record(replace(r.head, problem=r.problem._replace(device="other")), r.body) for r in ENTRIES]
    for others in (digests_of(ENTRIES, 8), digests_of(moved, 4), digests_of(map(edited, ENTRIES), 4)):
        assert digests.isdisjoint(others)
