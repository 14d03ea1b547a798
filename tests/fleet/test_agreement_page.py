"""The code of docs/agreement.md runs, each section by itself, and each fault that it lists is a test."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from servers import free_port, redis_server

HERE = Path(__file__).parents[1]
PAGE = (HERE.parent / "docs" / "agreement.md").read_text()
NEEDED = {"PyTorch": "torch", "JAX": "jax", "Redis": "redis"}


def sections():
    for text in PAGE.split("\n## ")[1:]:
        blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
        if blocks:
            yield text.partition("\n")[0], "\n".join(blocks)


def run(title, tmp_path, **variables):
    """Run a section as the only rank of a job."""
    (tmp_path / "page.py").write_text(dict(sections())[title])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "RANK": "0", "WORLD_SIZE": "1", **variables}
    command = [sys.executable, "-W", "error", str(tmp_path / "page.py")]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_section_with_code_names_its_package():
    assert {title for title, _ in sections()} == NEEDED.keys()


def test_the_code_for_torch_runs(tmp_path):
    pytest.importorskip("torch")
    run("PyTorch", tmp_path, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))


def test_the_code_for_jax_runs(tmp_path):
    pytest.importorskip("jax")
    run("JAX", tmp_path, COORDINATOR=f"127.0.0.1:{free_port()}", JAX_PLATFORMS="cpu")


def test_the_code_for_redis_runs(tmp_path):
    pytest.importorskip("redis")
    with redis_server(tmp_path / "redis") as server:
        run("Redis", tmp_path, REDIS_URL=server.url)


def test_every_fault_of_the_table_is_a_test():
    rows = re.findall(r"^\| .* \| .* \| `(test_\w+)`(?: in `(test_\w+\.py)`)? \|$", PAGE, re.MULTILINE)
    assert len(rows) == 20
    for name, file in rows:
        assert f"def {name}(" in (HERE / "fleet" / (file or "test_agreement.py")).read_text(), name
