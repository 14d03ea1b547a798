"""Arrays on several devices; the checks are in jax_on_a_mesh.py, and run in one process with 8 devices."""

from __future__ import annotations

import json
from pathlib import Path

import jax_on_a_mesh
import pytest
from test_jax_trace import python

NAMES = [check.__name__ for check in jax_on_a_mesh.CHECKS]


@pytest.fixture(scope="module")
def outcomes():
    return dict(map(json.loads, python(str(Path(jax_on_a_mesh.__file__)))))


@pytest.mark.parametrize("name", NAMES)
def test_on_several_devices(outcomes, name):
    assert outcomes[name] == "ok", outcomes[name]


def test_there_are_checks():
    assert len(NAMES) >= 10
