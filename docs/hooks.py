"""What pages show that the code knows: filled in when the site is built, so that it cannot get old."""

from __future__ import annotations

from tunebook._base.environment_variables import SETTINGS

SETTINGS_MARK = "<!-- settings -->"


def on_page_markdown(markdown: str, **_: object) -> str:
    """Put the table of settings in the place of its mark."""
    return markdown.replace(SETTINGS_MARK, settings_table())


def settings_table() -> str:
    """Return the settings that the environment may hold, as a table."""
    rows = [f"| `{s.name}` | {s.values} | {s.default} | {s.meaning} |" for s in SETTINGS]
    return "\n".join(["| variable | values | without it | what it does |", "| --- | --- | --- | --- |", *rows])
