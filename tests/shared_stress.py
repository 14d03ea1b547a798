"""Many "machines", each a process with a local book of its own, that tune the same keys into one shared book."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from limits import HANG_S

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

SCRIPT = Path(__file__).with_name("tuning_process.py")
# Many processes and their server on two cores: now and then an answer takes longer than a call should wait, and who
# gives up on the server says so and tunes for itself. That has tests of its own; here the question is who tunes what.
PATIENT = f"""
import runpy, sys
from tunebook.stores import _shared
_shared.HOT_S = {HANG_S}
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


class Outcome(NamedTuple):
    """How often each key was begun and ended, how many processes came to their end, and their output."""

    begun: Counter[str]
    ended: Counter[str]
    done: int
    killed: int
    said: str
    seconds: float


def tune_together(
    tmp_path: Path,
    url: str,
    *,
    processes: int,
    keys: int,
    seconds: float = 0.002,
    environment: Mapping[str, str] | None = None,
    kills: int = 0,
    meanwhile: Callable[[], None] = lambda: None,
) -> Outcome:
    """Start them all at once; kill some that are at work, if told to, and start another in the place of each."""
    log = tmp_path / "log"
    began = time.monotonic()

    def start(name: str) -> subprocess.Popen[str]:
        variables = {**os.environ, **(environment or {}), "TUNEBOOK_HOME": str(tmp_path / name)}
        command = [sys.executable, "-c", PATIENT, str(SCRIPT), url, str(log), str(keys), str(seconds)]
        return subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    running = [start(f"home-{n}") for n in range(processes)]
    victims = []
    for number in range(kills):
        _wait_for_lines(log, 5 * (number + 1))
        victim = running.pop(random.randrange(len(running)))
        victim.kill()
        victim.communicate()
        victims.append(victim)
        running.append(start(f"another-{number}"))
    meanwhile()
    said = [process.communicate(timeout=HANG_S)[0] for process in running]
    lines = [line.split() for line in log.read_text().splitlines()]
    return Outcome(
        begun=Counter(key for event, key in lines if event == "begin"),
        ended=Counter(key for event, key in lines if event == "end"),
        done=sum(each.endswith("done\n") for each in said),
        killed=sum(victim.returncode == -9 for victim in victims),
        said="".join(said).replace("done\n", ""),
        seconds=time.monotonic() - began,
    )


def _wait_for_lines(log: Path, count: int) -> None:
    ends = time.monotonic() + HANG_S
    while time.monotonic() < ends and (not log.exists() or log.read_text().count("\n") < count):
        time.sleep(0.005)
