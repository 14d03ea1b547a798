"""Whole records with numbers that no program can hold: each verb goes on with the other records, and says so."""

from __future__ import annotations

import json
import zlib

import pytest

from tunebook._cli import main
from tunebook.stores import open_store, problem_id
from tunebook.testing import example_record

NUMBER = 12345.5
# Each puts the number into a place of a body.
PLACES = {
    "unknown field": lambda body: body.update(later=NUMBER),
    "time of the decision": lambda body: body["provenance"].update(when=NUMBER),
    "time of a measurement": lambda body: body["measurements"][0].update(when=NUMBER),
    "sample": lambda body: body["measurements"][0].update(samples_s=[NUMBER]),
    "configuration of a candidate": lambda body: body["measurements"][0].update(config={"step": NUMBER}),
}
VERBS = [
    "ls", "ls --json", "ls --summary", "show {}", "show {} --json", "explain {}", "report -o r.html",
    "export b.bundle.gz", "export p.db", "export j.json", "pack q.db", "diff other --json", "merge other",
    "prune --dry-run --older-than 1d",
]  # fmt: skip


def _line(fields, number):
    text = json.dumps(fields, separators=(",", ":"), sort_keys=True).replace(str(NUMBER), number).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


@pytest.fixture
def ids(tmp_path, monkeypatch):
    """Make a book with one good record and the odd ones; return the ids of all."""
    monkeypatch.setenv("TUNEBOOK_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    store, found = open_store(tmp_path / "home"), {}
    for name, alter in {"good": lambda _body: None, **PLACES}.items():
        for number in ("1e999", "9" * 400):
            record = example_record(call_key=f"{name} {number}", op=f"{name}@1")
            store.put(record)
            found[record.problem.call_key] = problem_id(record.problem)
            (path,) = (tmp_path / "home").glob(f"v1/*/*/{problem_id(record.problem)}.json")
            head, body = record.to_fields()
            alter(body)
            path.write_bytes(_line(head, number) + _line(body, number))
    open_store("other").put_many([example_record(call_key=key, op=f"{key.rpartition(' ')[0]}@1") for key in found])
    return found


@pytest.mark.promise("odd-records-shown")
@pytest.mark.parametrize("words", VERBS)
def test_a_verb_goes_on_with_the_other_records_and_says_so(ids, words, capsys):
    asked = ids.values() if "{}" in words else [""]
    for identifier in asked:
        assert main(words.format(identifier).split()) in {0, 1}
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    if words in {"ls --json", "show {} --json"}:
        assert all(identifier in said.out for identifier in ids.values())
    if words == "show {}":
        assert "count as missing" in said.err
