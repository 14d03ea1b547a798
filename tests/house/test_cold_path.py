"""A cold call goes a short way: few frames until the first candidate runs, and few files until the answer is stored."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

pytest.importorskip("numpy")

FRAMES, FILES = 20, 40


def test_a_cold_call_crosses_few_frames_and_files(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "bench")
    way = importlib.import_module("cold_path").trace()
    assert len(way.stack) <= FRAMES, "\n".join(way.stack)
    assert len(way.files) <= FILES, "\n".join(sorted(way.files))
