"""Fixtures of the hot path: with the accelerator, and in pure Python."""

from __future__ import annotations

import pytest

from tunebook._hotpath.codegen import find_pack


@pytest.fixture(scope="module", params=["accelerated", "pure"])
def way(request):
    """Run a module's tests both ways: `pytestmark = pytest.mark.usefixtures("way")`."""
    if request.param == "accelerated" and find_pack(layout=True) is None:
        pytest.skip("the accelerator is not built: python hatch_build.py")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TUNEBOOK_PURE", "1" if request.param == "pure" else "")
        yield request.param
