"""Make the pictures of the docs: a book is tuned, and shown on a terminal and in a browser.

    python docs/screenshots.py [--into DIRECTORY]

Needs a C compiler, Debian's chromium and chromium-driver, and the packages selenium, rich, torch and transformers. It
takes a minute. The times in the pictures are those of the machine that it runs on.
"""

from __future__ import annotations

import argparse
import base64
import io
import os
import pty
import re
import select
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage", "--hide-scrollbars",
)  # fmt: skip
COLUMNS = 110
TUNE = """
import sys
sys.path.insert(0, "examples")
import matmul, transpose
import tunebook as tb
for shape in ((256, 256, 256), (64, 512, 512), (1024, 16, 1024), (512, 512, 64)):
    tb.tune(matmul.matmul, *matmul.operands(*shape), progress=False, budget="8s")
for shape in ((1024, 1024), (512, 2048)):
    tb.tune(transpose.transpose, *transpose.operands(*shape), progress=False, budget="8s")
"""
WATCH = """
import sys
sys.path.insert(0, "examples")
import matmul
import tunebook as tb
tuned = tb.tune(matmul.matmul, *matmul.operands(300, 300, 300))
print(tuned.config)
"""
WINDOW = """<!doctype html><meta charset="utf-8"><style>
body {{ margin: 0; padding: 20px; background: transparent; display: inline-block }}
div {{ background: #14171c; color: #e4e7eb; border-radius: 10px; padding: 14px 20px 18px; display: inline-block }}
h1 {{ font: 13px system-ui, sans-serif; color: #8b929b; margin: 0 0 10px; font-weight: 500 }}
pre {{ font: 14px/1.45 "DejaVu Sans Mono", monospace; margin: 0; min-width: 60ch }}
</style><div><h1>{title}</h1><pre>{code}</pre></div>"""


def on_terminal(words: list[str], environment: dict[str, str]) -> str:
    """Run a command on a terminal, and return what it wrote, with its colours."""
    leader, follower = pty.openpty()
    process = subprocess.Popen(  # noqa: S603 - commands of this file
        words, cwd=ROOT, env=environment, stdin=follower, stdout=follower, stderr=follower
    )
    os.close(follower)
    written = b""
    while True:
        ready, _, _ = select.select([leader], [], [], 120)
        try:
            part = os.read(leader, 65536) if ready else b""
        except OSError:  # the other side is closed
            part = b""
        if not part:
            break
        written += part
    os.close(leader)
    process.wait()
    # What was drawn over is not seen any more.
    lines = [
        line.rpartition("\x1b[2K")[2] for line in written.decode(errors="replace").replace("\r\n", "\n").split("\n")
    ]
    return "\n".join(lines)


def run(words: list[str], environment: dict[str, str]) -> None:
    """Run a command in the root of the repository."""
    subprocess.run(words, cwd=ROOT, env=environment, check=True)  # noqa: S603 - commands of this file


def window(title: str, written: str) -> str:
    """Return a page that shows what a terminal showed."""
    from rich.console import Console  # noqa: PLC0415 - only pictures need it
    from rich.terminal_theme import SVG_EXPORT_THEME  # noqa: PLC0415 - as above
    from rich.text import Text  # noqa: PLC0415 - as above

    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi(written.rstrip("\n")), soft_wrap=True)
    code = console.export_html(inline_styles=True, code_format="{code}", theme=SVG_EXPORT_THEME)
    return WINDOW.format(title=title, code=code)


class Camera:
    """A browser that takes pictures."""

    def __init__(self, profile: Path) -> None:
        from selenium import webdriver  # noqa: PLC0415 - as above
        from selenium.webdriver.chrome.service import Service  # noqa: PLC0415 - as above

        options = webdriver.ChromeOptions()
        options.binary_location = shutil.which("chromium") or ""
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        self._driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))

    def open(self, page: Path, width: int, *, dark: bool = False) -> None:
        """Open a page in a window of this width."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self._driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self._driver.get(page.as_uri())
        time.sleep(1)

    def take(self, path: Path, first: str, last: str | None = None, margin: int = 24) -> None:
        """Take a picture from one element to the end of another."""
        script = (
            "const [a, b] = [...arguments].map(s => document.querySelector(s).getBoundingClientRect());"
            "return [a.left + scrollX, a.top + scrollY, a.width, b.bottom - a.top]"
        )
        x, y, width, height = self._driver.execute_script(script, first, last or first)
        clip = {
            "x": max(x - margin, 0),
            "y": max(y - margin, 0),
            "width": width + 2 * margin,
            "height": height + 2 * margin,
        }
        request = {"format": "png", "clip": {**clip, "scale": 1}, "captureBeyondViewport": True}
        taken = self._driver.execute_cdp_cmd("Page.captureScreenshot", request)
        path.write_bytes(base64.b64decode(taken["data"]))
        print(path, f"{path.stat().st_size // 1024} kB")

    def close(self) -> None:
        """Let the browser go."""
        self._driver.quit()


def main() -> None:
    """Make all of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--into", type=Path, default=Path(__file__).with_name("images"))
    into = parser.parse_args().into.resolve()
    into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="tunebook-pictures-") as temporary:
        scratch = Path(temporary)
        environment = {
            **os.environ,
            "TUNEBOOK_HOME": str(scratch / "tunebook"),
            "PYTHONPATH": str(ROOT / "src"),
            "COLUMNS": str(COLUMNS),
            "TERM": "xterm-256color",
        }
        run([sys.executable, "-c", TUNE], environment)
        camera = Camera(scratch / "profile")
        try:
            terminals(camera, scratch, into, environment)
            reports(camera, scratch, into, environment)
            model(camera, scratch, into, environment)
        finally:
            camera.close()


def terminals(camera: Camera, scratch: Path, into: Path, environment: dict[str, str]) -> None:
    """Take pictures of commands."""
    tunebook = [sys.executable, "-m", "tunebook"]
    commands = {
        "terminal-ls": ("tunebook ls", [*tunebook, "ls"]),
        "terminal-help": ("tunebook", tunebook),
        "terminal-watch": ("tb.tune(matmul, a, b)", [sys.executable, "-c", WATCH]),
    }
    for name, (title, words) in commands.items():
        page = scratch / f"{name}.html"
        written = on_terminal(words, environment).replace(str(scratch), "~/.cache")
        page.write_text(window(title, written), encoding="utf-8")
        camera.open(page, 1400)
        camera.take(into / f"{name}.png", "div", margin=0)


def reports(camera: Camera, scratch: Path, into: Path, environment: dict[str, str]) -> None:
    """Take pictures of the report on the book."""
    page = scratch / "report.html"
    words = [sys.executable, "-m", "tunebook", "report", "--output", str(page), "--title", "The kernels of examples/"]
    run(words, environment)
    run([*words[:5], str(into / "report-plot.png"), *words[6:]], environment)
    # The book of a user has a shorter path.
    page.write_text(page.read_text(encoding="utf-8").replace(str(scratch), "~/.cache"), encoding="utf-8")
    camera.open(page, 1180)
    camera.take(into / "report.png", "header", "main > figure:nth-of-type(3)")
    camera.take(into / "report-tuning.png", "details[open]", margin=8)
    camera.open(page, 1180, dark=True)
    camera.take(into / "report-dark.png", "details[open] .pair", margin=28)
    camera.open(page, 390)
    camera.take(into / "report-phone.png", "header", "main > figure:nth-of-type(1)", margin=0)


def model(camera: Camera, scratch: Path, into: Path, environment: dict[str, str]) -> None:
    """Take the picture of docs/model.md, with the code of that page."""
    folder = scratch / "model"
    folder.mkdir()
    for name, code in re.findall(
        r'```python title="(\S+)"\n(.*?)```', (ROOT / "docs" / "model.md").read_text(), re.DOTALL
    ):
        (folder / name).write_text(code)
    own = {**environment, "TUNEBOOK_HOME": str(folder / "tunebook")}
    run([sys.executable, str(folder / "tune.py")], own)
    page = folder / "model.html"
    run([sys.executable, "-m", "tunebook", "report", "--output", str(page), "--title", "Llama, 4 layers"], own)
    page.write_text(page.read_text(encoding="utf-8").replace(str(folder), "~/.cache"), encoding="utf-8")
    camera.open(page, 1180)
    camera.take(into / "report-model.png", "header", "main > figure:nth-of-type(1)", margin=12)


if __name__ == "__main__":
    main()
