"""Whole records with odd values in them: no verb of the command ends, and no `explain`."""

from __future__ import annotations

import json
import zlib

import pytest

import tunebook as tb
from tunebook._base.record_format import Record
from tunebook._cli import main
from tunebook.stores import open_store, problem_id
from tunebook.testing import example_record

INFINITE, LONG, DEEP = "@infinite@", "@long@", "@deep@"
TEXTS = {f'"{INFINITE}"': "1e999", f'"{LONG}"': "9" * 4000, f'"{DEEP}"': "[" * 400 + "]" * 400}
CONTROL = "\x1b[2J\x9b\u202e\ud800"


def _first(body):
    return body["measurements"][0]


def _failed(body, **failure):
    _first(body).update(samples_s=[], failure={"kind": "launch", "message": "m", "expires": None} | failure)


def _all_samples(body, samples):
    for measured in body["measurements"]:
        measured.update(samples_s=samples)


# Each alters the fields of a head and a body.
ODD = {
    "infinite unknown field": lambda _head, body: body.update(later=INFINITE),
    "infinite time of the decision": lambda _head, body: body["provenance"].update(when=INFINITE),
    "infinite sample": lambda _head, body: _first(body).update(samples_s=[INFINITE]),
    "infinite value in a candidate": lambda _head, body: _first(body).update(config={"step": INFINITE}),
    "long time of the decision": lambda _head, body: body["provenance"].update(when=LONG),
    "long time of a measurement": lambda _head, body: _first(body).update(when=LONG),
    "time of the decision in the far future": lambda _head, body: body["provenance"].update(when=1e300),
    "time of the decision in the far past": lambda _head, body: body["provenance"].update(when=-1e18),
    "time of a measurement in the far future": lambda _head, body: _first(body).update(when=1e300),
    "failure that expires in the far future": lambda _head, body: _failed(body, expires=1e300),
    "failure of an odd kind": lambda _head, body: _failed(body, kind=f"<b>\n{CONTROL}", message=CONTROL),
    "failure without a word": lambda _head, body: _failed(body, kind="", message=""),
    "deep unknown field": lambda _head, body: body.update(later=DEEP),
    "deep configuration": lambda head, _body: head.update(config=DEEP),
    "deep environment": lambda head, _body: head.update(environment="[" * 100_000),
    "environment that is a list": lambda head, _body: head.update(environment="[1,2]"),
    "environment with control characters": lambda head, _body: head.update(environment=json.dumps({"a": CONTROL})),
    "control characters": lambda _head, body: body["provenance"].update(host=CONTROL, rule=CONTROL),
    "winner that is a list": lambda _head, body: body["provenance"].update(winner=[1]),
    "disturbances of odd types": lambda _head, body: body["provenance"].update(disturbances=[{"a": 1}, None]),
    "verification of odd types": lambda _head, body: body["provenance"].update(
        verified={"environments": [1], "when": "x"}
    ),
    "summary that is a number": lambda _head, body: body["provenance"].update(found=3),
    "summary of odd types": lambda _head, body: body["provenance"].update(found={"tried": "x", "best_s": "y"}),
    "roofline of odd types": lambda _head, body: body["provenance"].update(roofline={"flops": "x"}),
    "roofline of zeros": lambda _head, body: body["provenance"].update(roofline={"flops": 0, "flops_per_s": 0}),
    "default that is an object": lambda _head, body: body["provenance"].update(default={}, rule={}),
    "texts for numbers": lambda _head, body: body["provenance"].update(seconds="x", ran={}, waiting_s=[]),
    "samples of zero": lambda _head, body: _all_samples(body, [0.0, 0.0]),
    "samples that are tiny": lambda _head, body: _all_samples(body, [5e-324]),
    "samples that are huge": lambda _head, body: _all_samples(body, [1e308, 1e308, 1e308]),
    "samples that are both": lambda _head, body: _all_samples(body, [1e-320, 1e308] * 8),
    "measurements that are missing": lambda _head, body: body.update(measurements=[]),
    "configuration with an unknown tag": lambda _head, body: _first(body).update(config={"$": "nope"}),
    "configuration with a broken tag": lambda head, _body: head.update(config={"$": "tuple", "v": 3}),
}


def _line(fields):
    text = json.dumps(fields, separators=(",", ":"), sort_keys=True)
    for mark, odd in TEXTS.items():
        text = text.replace(mark, odd)
    return b"%08x %s\n" % (zlib.crc32(text.encode()), text.encode())


@pytest.fixture
def ids(tmp_path, monkeypatch):
    """Make a book with one good record and every odd one; return the ids of all, by name."""
    monkeypatch.setenv("TUNEBOOK_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    store = open_store(tmp_path / "home")
    found = {}
    for name, alter in {"good": lambda _head, _body: None, **ODD}.items():
        record = example_record(call_key=name)
        store.put(record)
        found[name] = problem_id(record.problem)
        (path,) = (tmp_path / "home").glob(f"v1/*/*/{found[name]}.json")
        head, body = record.to_fields()
        alter(head, body)
        path.write_bytes(_line(head) + _line(body))
    return found


VERBS = [
    "ls", "ls --json", "ls --summary", "report -o r.html", "export b.bundle.gz", "export p.db", "export j.json",
    "diff home --json", "merge other --dry-run", "prune --dry-run --older-than 1d",
]  # fmt: skip


@pytest.mark.promise("odd-records-shown")
@pytest.mark.parametrize("words", VERBS)
def test_a_verb_over_a_book_with_odd_records_goes_on_with_the_others(ids, words, capsysbinary):
    open_store("other").put(example_record(call_key="good"))
    assert main(words.split()) in {0, 1}
    said = capsysbinary.readouterr()
    assert not set(said.out.decode()) & {"\x1b", "\x9b", "\u202e"}
    if words == "ls --json":
        assert ids["good"] in said.out.decode()


@pytest.mark.promise("odd-records-shown")
@pytest.mark.promise("no-control-characters")
@pytest.mark.parametrize("words", ["show", "show --json", "explain"])
def test_every_odd_record_is_shown(ids, words, capsysbinary):
    for name, identifier in ids.items():
        code = main([*words.split(), identifier])
        said = capsysbinary.readouterr()
        # A head that is damaged is a record that is missing.
        assert code == 0 or (code == 1 and name == "deep configuration"), (name, said.err)
        text = said.out.decode()
        assert not set(text) & {"\x1b", "\x9b", "\u202e"}, name
        if words == "show --json":
            assert json.loads(text)


@pytest.mark.promise("odd-records-shown")
@pytest.mark.promise("no-control-characters")
def test_an_explanation_of_an_odd_record_is_printed_without_control_characters(tmp_path):
    @tb.tunable(space=[{"step": 1}, {"step": 2}], heuristic={"step": 1}, check=False, store=tmp_path)
    def kernel(n, *, config):
        return n

    kernel(100)
    (path,) = tmp_path.glob("v1/*/*/*.json")
    tuned = Record.from_bytes(path.read_bytes())
    for name, alter in ODD.items():
        head, body = tuned.to_fields()
        alter(head, body)
        path.write_bytes(_line(head) + _line(body))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("warnings.warn", lambda *_args, **_options: None)
            text = str(kernel.explain(100))
        assert "answer" in text, name
        assert not set(text) & {"\x1b", "\x9b", "\u202e", "\ud800"}, name
