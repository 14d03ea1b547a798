"""Fixtures of every test: its own book, and warnings that are given anew."""

from __future__ import annotations

import pytest

from tunebook import clear_invocations
from tunebook._base.errors import forget_warnings

pytest.register_assert_rewrite("shared_checks")


@pytest.fixture(autouse=True)
def _own_book(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("TUNEBOOK_HOME", str(tmp_path_factory.mktemp("book")))
    monkeypatch.setenv("TUNEBOOK_LOCKS", str(tmp_path_factory.mktemp("locks")))
    forget_warnings()
    clear_invocations()
