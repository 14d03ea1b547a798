"""`tunebook report`: writes the page, says where, and nothing if there is nothing."""

from __future__ import annotations

import json

import pytest
from report_records import record

from tunebook._cli import main
from tunebook.stores import DirectoryStore


@pytest.fixture
def book(tmp_path):
    store = DirectoryStore(tmp_path / "book")
    store.put_many([record(), record(size=32), record(op="softmax@v1", device="cuda:h200")])
    return str(tmp_path / "book")


def test_it_writes_the_page_and_says_where(book, tmp_path, capsys):
    path = tmp_path / "page.html"
    assert main(["report", "--book", book, "-o", str(path), "--title", "All of it"]) == 0
    assert capsys.readouterr().out.startswith(f"{path}: 3 entries, ")
    page = path.read_text(encoding="utf-8")
    assert "<h1>All of it</h1>" in page
    assert f"{book} ·" in page


def test_filters_choose_the_entries(book, tmp_path, capsys):
    path = tmp_path / "page.html"
    assert main(["report", "--book", book, "-o", str(path), "--kernel", "matmul*", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said == {"path": str(path), "entries": 2, "bytes": path.stat().st_size}
    assert "softmax" not in path.read_text(encoding="utf-8")


def test_a_picture_is_asked_for_by_its_name(book, tmp_path):
    pytest.importorskip("matplotlib")
    assert main(["report", "--book", book, "-o", str(tmp_path / "page.png")]) == 0
    assert (tmp_path / "page.png").read_bytes().startswith(b"\x89PNG")


def test_nothing_to_report_on_exits_with_1_and_writes_nothing(book, tmp_path, capsys):
    path = tmp_path / "page.html"
    assert main(["report", "--book", book, "-o", str(path), "--kernel", "nothing"]) == 1
    assert "nothing to report on" in capsys.readouterr().err
    assert not path.exists()


@pytest.mark.parametrize(
    ("output", "said", "code"),
    [("page.pdf", r".html or .png", 2), ("nowhere/page.html", "nowhere does not exist", 3)],
)
def test_an_output_path_of_no_report_is_wrong_usage_and_one_of_no_directory_is_3(
    book, tmp_path, capsys, output, said, code
):
    assert main(["report", "--book", book, "-o", str(tmp_path / output)]) == code
    assert said in capsys.readouterr().err


def test_a_missing_book_cannot_be_read(tmp_path, capsys):
    assert main(["report", "--book", str(tmp_path / "nowhere"), "-o", str(tmp_path / "page.html")]) == 3
    assert "no book at" in capsys.readouterr().err
