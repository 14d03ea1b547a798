"""Whole records with odd values in them: they end no verb and no explanation, and do not control the terminal."""

from __future__ import annotations

import copy
import json
import zlib

import pytest
from cli_fixtures import OnABook

from tunebook._api.explain import explain_entry
from tunebook._base.record_format import Record
from tunebook.stores import open_store
from tunebook.stores._listing import Catalogue

# Erases the screen, sets the title, moves the cursor, turns the direction of writing round, and cannot be encoded.
HOSTILE = "\x1b[2J\x1b]0;owned\x07\r\x7f\x85\x9b31m\u202eevil\u2066\u200b\u2028\ud800\U000e0001"
DEEP = "@deep"  # in place of lists that the encoder of the test cannot write
VERBS = [
    ("ls",), ("ls", "--json"), ("ls", "--summary"), ("ls", "--summary", "--json"), ("show", "{id}"), ("show", "matmul"),
    ("show", "{id}", "--json"), ("explain", "{id}"), ("explain", "{id}", "--json"), ("report", "-o", "r.html"),
    ("export", "x.bundle"), ("export", "x.db"), ("diff", "other_book.json"), ("diff", "other_book.json", "--json"),
    ("pack", "y.db"), ("pack", "y.db", "--json"), ("pack", "y.db", "--check"),
    ("merge", "other_book.json", "--dry-run"), ("prune", "--newer-than", "1d", "--dry-run"), ("doctor",),
    ("prune", "--newer-than", "1d", "--dry-run", "--json"), ("prune", "--other-versions", "--dry-run"),
    ("doctor", "--json"), ("pin", "{id}", "block=32"), ("unpin", "{id}"),
]  # fmt: skip


def every(value):
    """Return an edit that puts a value into all places for a text."""

    def edit(head, body):
        head.update(checksum=value, environment=value, unknown=value)
        body.update(unknown=[value, {value: value}])
        body["provenance"].update(host=value, rule=value, objective=value, disturbances=[value], tool=value)
        for m in body["measurements"][:2]:
            m.update(failure={"kind": value, "message": value, "expires": 4e9}, samples_s=[])
        for m in body["measurements"]:
            m.update(policy=value, environment=value)

    return edit


def of(part, **fields):
    """Return an edit of the head, the provenance or each measurement."""

    def edit(head, body):
        for each in {"head": [head], "provenance": [body["provenance"]], "measurement": body["measurements"]}[part]:
            each.update(copy.deepcopy(fields))

    return edit


ODD = {
    "hostile texts": every(HOSTILE),
    "a hostile configuration": of("head", config={"block": HOSTILE}),
    "a hostile name in a configuration": of("head", config={HOSTILE: 1}),
    "hostile names of versions": of("head", environment=json.dumps({HOSTILE: HOSTILE})),
    "when 1e300": of("provenance", when=1e300, verified={"when": 1e300, "environments": [1, {}]}),
    "when -1e18": of("provenance", when=-1e18, seconds=-5, ran=-1),
    "when an integer of 300 digits": of("provenance", when=10**299, seconds=10**299, ran=10**299),
    "measured at 1e300": of("measurement", when=1e300, failure=None),
    "a failure until 1e300": of("measurement", failure={"kind": "x", "message": "", "expires": 1e300}, samples_s=[]),
    "an empty failure": of("measurement", failure={"kind": "", "message": "", "expires": None}, samples_s=[]),
    "samples of 0": of("measurement", samples_s=[0.0, 0.0]),
    "the shortest samples": of("measurement", samples_s=[5e-324] * 9),
    "the longest samples": of("measurement", samples_s=[1.7e308] * 9),
    "samples of both kinds": of("measurement", samples_s=[5e-324, 1.7e308] * 9),
    "no samples": of("measurement", samples_s=[]),
    "an environment without a number": of("head", environment='{"numpy":NaN}'),
    "an environment beyond all numbers": of("head", environment='{"numpy":1e999}'),
    "a deep environment": of("head", environment="[" * 100_000),
    "a deep environment of names": of("head", environment='{"a":' * 100_000),
    "a deep version": of("head", environment=f'{{"numpy":{"[" * 400 + "]" * 400}}}'),
    "a huge version": of("head", environment='{"numpy":' + "9" * 5000 + "}"),
    "a list for an environment": of("head", environment="[1,2]"),
    "deep unknown fields": of("head", unknown=DEEP),
    "deep provenance": of("provenance", unknown=DEEP, disturbances=[DEEP], found=DEEP, verified=DEEP, rule=DEEP),
    "a deep configuration": of("head", config=DEEP),
    "deep configurations of candidates": of("measurement", config=DEEP),
    "summaries of other types": of(
        "provenance", winner=[1], ground=[{"a": 1}, None], found={"tried": "x", "failed": [], "best_s": "y"}, rule={},
        default={}, roofline={"flops": "x"}, seconds="x", ran={}, waiting_s=[], values={"a": "b"}, band="x", host=[1],
    ),
    "a roofline of zeros": of("provenance", roofline={"flops": 0, "bytes": 0, "flops_per_s": 0, "bytes_per_s": 0}),
    "a huge roofline": of("provenance", roofline={"flops": 1e300, "bytes": 1e-300, "flops_per_s": 1e-300}),
    "huge summaries": of("provenance", found={"tried": 1e300, "best_s": 1e-300, "default_s": 1e300, "compile_s": 9e9}),
    "a configuration of another form": of("head", config={"$": "nope"}),
}  # fmt: skip


def line(fields):
    text = json.dumps(fields, separators=(",", ":"), sort_keys=True)
    text = text.replace(f'"{DEEP}"', "[" * 850 + "]" * 850).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def replace_record(place, identifier, edit):
    """Write the record with an id again, with an odd value in it and the right checksums."""
    (path,) = (place / "home").glob(f"v1/*/*/{identifier}.json")
    head, body = Record.from_bytes(path.read_bytes()).to_fields()
    edit(head, body)
    path.write_bytes(line(head) + line(body))
    return Record.from_bytes(path.read_bytes())


def is_clean(text):
    return all(line.isprintable() for line in text.split("\n"))


@pytest.mark.filterwarnings("ignore::tunebook.TunebookWarning")
class TestOddRecords(OnABook):
    @pytest.mark.promise("odd-records-shown", "no-control-characters")
    @pytest.mark.parametrize("odd", ODD)
    def test_every_verb_shows_it_or_names_the_fault(self, odd, place, run, ids):
        (identifier,) = ids["matmul@v0"]
        replace_record(place, identifier, ODD[odd])
        for words in VERBS:
            code, out, err = run(*(word.format(id=identifier) for word in words))
            assert code in {0, 1, 2, 3}, words
            assert is_clean(out), words
            assert is_clean(err), words
            out.encode()
            if words[-1] == "--json" and code in {0, 1}:
                json.loads(out)
        assert (place / "r.html").stat().st_size > 1000

    @pytest.mark.parametrize("odd", [name for name in ODD if name.startswith("an environment")])
    def test_versions_that_are_not_json_stay_text(self, odd, place, run, ids):
        (identifier,) = ids["matmul@v0"]
        record = replace_record(place, identifier, ODD[odd])
        code, out, _ = run("ls", "--json", "--kernel", "matmul")
        (entry,) = json.loads(out)
        assert (code, entry["environment"]) == (0, record.head.environment)

    @pytest.mark.promise("no-control-characters")
    def test_hostile_texts_are_shown_escaped(self, place, run, ids):
        (identifier,) = ids["matmul@v0"]
        replace_record(place, identifier, ODD["hostile texts"])
        code, out, _ = run("show", identifier)
        assert (code, r"\x1b[2J\x1b]0;owned\x07" in out) == (0, True)
        shown = json.loads(run("show", identifier, "--json")[1])
        assert shown["provenance"]["host"] == HOSTILE

    @pytest.mark.promise("odd-records-shown", "no-control-characters")
    @pytest.mark.parametrize("odd", ODD)
    def test_its_explanation_is_printed(self, odd, place, ids):
        (identifier,) = ids["matmul@v0"]
        record = replace_record(place, identifier, ODD[odd])
        explanation = explain_entry(Catalogue(open_store(place / "home")), record.problem, record)
        for text in (str(explanation), repr(explanation), explanation._repr_html_(), repr(record)):
            assert is_clean(text)
            text.encode()
