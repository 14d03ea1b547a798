"""Optional packages: the message says what to type, and a broken package shows its own error."""

from __future__ import annotations

import sys

import pytest

from tunebook import MissingDependency
from tunebook._base.errors import require


def test_an_installed_module_is_returned():
    assert require("json.decoder", feature="a test") is sys.modules["json.decoder"]


@pytest.mark.parametrize("module", ["no_such_package", "no_such_package.part"])
def test_a_missing_package_is_named_with_the_command(module):
    with pytest.raises(
        MissingDependency, match=r"colour needs 'no_such_package', .* Run: pip install 'tunebook\[rich\]'"
    ):
        require(module, feature="colour", extra="rich")
    with pytest.raises(MissingDependency, match=r"Run: pip install no_such_package\Z") as raised:
        require(module, feature="colour")
    assert raised.value.__context__ is None


def test_a_package_that_is_broken_shows_its_own_error(tmp_path, monkeypatch):
    (tmp_path / "broken_package.py").write_text("import missing_part_of_it\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="missing_part_of_it") as raised:
        require("broken_package", feature="a test")
    assert not isinstance(raised.value, MissingDependency)
