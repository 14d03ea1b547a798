"""The site: it builds without a warning, and every public name and every page has its place in it."""

from __future__ import annotations

import html
import json
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import pytest
from doc_pages import fences

import tunebook
from tunebook._cli import ls

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))


def test_the_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    environment = {"NO_MKDOCS_2_WARNING": "1", "PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    api = (tmp_path / "site" / "api.html").read_text()
    assert "Make a function that takes" in api, "docstrings are in it"
    assert "TUNEBOOK_PIN" in (tmp_path / "site" / "environment.html").read_text()
    assert broken_links(tmp_path / "site") == []
    fetched = re.findall(r'(?:<script[^>]*src|<link[^>]*href|<img[^>]*src)="(https?:[^"]+)"', api)
    assert fetched == [], "a page that is read fetches nothing from elsewhere"


def broken_links(site):
    """Return the links, pictures, styles and scripts that are missing when the site is opened from a folder."""
    pages = [page for page in site.rglob("*.html") if page.name != "404.html"]  # only a server shows that one
    assert len(pages) >= len(PAGES)
    broken = []
    for page in pages:
        text = page.read_text()
        for target in re.findall(r'(?:href|src)="([^"]+)"', text):
            path, _, anchor = unquote(html.unescape(target)).partition("#")
            if re.match(r"[a-z]+:|//", path):
                continue
            there = (page.parent / path) if path else page
            if not there.is_file() or (
                anchor and there.suffix == ".html" and f'id="{anchor}"' not in there.read_text()
            ):
                broken.append(f"{page.name}: {target}")
    return broken


def test_every_option_of_tunable_is_in_the_table():
    page = (ROOT / "docs" / "options.md").read_text()
    listed = {name for row in re.findall(r"^\| (`.*?) \|", page, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    assert listed == {"space", "name", *tunebook.TunableOptions.__annotations__}


def test_every_public_name_is_on_the_page_of_the_api():
    page = (ROOT / "docs" / "api.md").read_text()
    modules = {"adapters", "fleet", "formats", "metrics", "search", "stores", "testing"}
    names = {name for name in dir(tunebook) if not name.startswith("_")} - modules
    listed = set(re.findall(r"^::: tunebook\.([a-zA-Z]\w*)$", page, re.MULTILINE)) - modules
    assert listed == names


def test_every_error_is_on_the_page_of_errors():
    page = (ROOT / "docs" / "errors.md").read_text()
    public = {name: getattr(tunebook, name) for name in dir(tunebook)}
    errors = [n for n, o in public.items() if isinstance(o, type) and issubclass(o, tunebook.TunebookError)]
    assert len(errors) > 8
    assert [name for name in errors if f"`{name}`" not in page] == []


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text()
    assert [page.name for page in PAGES if f": {page.name}" not in navigation] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_lines_that_people_read_are_not_too_long(page):
    prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    assert [line for line in prose.splitlines() if len(line) > 140 and not line.startswith(("|", "::: ", "!["))] == []


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: page.stem)
def test_code_that_people_copy_uses_public_names_only(page):
    code = "\n".join(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
    assert re.findall(r"tunebook(?:\.\w+)*\._\w+|import _\w+", code) == []


@pytest.mark.parametrize("who", ["tunebook", "tokamax", "tune-jax", "ejkernel"])
def test_the_times_on_the_page_of_jax_match_the_last_bench(who):
    table = json.loads((ROOT / "bench" / "results" / "jax_hot_path.json").read_text())["table"]
    name = "eager: warm hit" if who == "tunebook" else f"eager: {who}, warm hit"
    (measured,) = (row["measured"] for row in table if row["what"] == name)
    (shown,) = re.findall(rf"^\| {who}\b.*\| ([\d.]+) us\b", (ROOT / "docs" / "jax.md").read_text(), re.MULTILINE)
    number, unit = measured.split()
    assert float(shown) == pytest.approx(float(number) * {"ns": 1e-3, "us": 1.0}[unit], rel=0.05)


def test_listings_on_the_pages_have_the_columns_of_the_command():
    names = [column.title for column in ls._COLUMNS]
    heads = {
        page.stem: fence.text.splitlines()[0].split()
        for page in PAGES
        for fence in fences(page)
        if fence.language == "text" and fence.title.startswith("tunebook ls") and "--" not in fence.title
    }
    assert "tutorial" in heads
    for page, head in heads.items():
        assert head == [name for name in names if name in head], page
