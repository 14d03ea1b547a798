"""In how many of the 18 ways to call a function in a jax program is it tuned right, and what is left in the program?

    python bench/jax_trace.py [--python tokamax=PATH]... [--no-peers]

Two candidates: one traces fast and runs slowly. A way counts as right if the call works and the other one was chosen.
Equations are those of the user's program beyond those that the chosen candidate has, wrapping calls not counted. The
programs are those of tests/jax_scenarios.py; each peer runs in a process of its own, with 8 devices, and with another
Python where it needs one. A peer that is not installed is left out. Writes bench/results/jax_trace.json.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path

from interleaved import RESULTS, Row, save, show

HERE = Path(__file__).parent
PEERS = ("tunebook", "ejkernel", "tune-jax", "tokamax")


def one(name: str) -> None:
    """Run every scenario with one peer, and print what came of it, a line of JSON each."""
    sys.path.insert(0, str(HERE.parent / "tests"))
    import jax  # noqa: PLC0415 - only in the process that runs a peer
    import jax_peers  # noqa: PLC0415 - as above
    import jax_scenarios  # noqa: PLC0415 - as above

    sys.argv = sys.argv[:1]  # one of them reads its flags there
    print(json.dumps({"jax": jax.__version__, "version": _version(name)}), flush=True)
    for scenario, run in jax_scenarios.SCENARIOS.items():
        call, chosen = jax_peers.PEERS[name](jax_scenarios.work)
        try:
            program, _ = run(_of_one_array(call))
            way = chosen()
            plain, _ = run(_of_one_array(jax_scenarios.work, way))
            said = {"chosen": way, "extra": _equations(program) - _equations(plain)}
        except Exception as error:  # noqa: BLE001 - a peer may raise anything, which is its result
            said = {"chosen": None, "extra": 0, "error": f"{type(error).__name__}: {error}"[:200]}
        print(json.dumps({"scenario": scenario, **said}), flush=True)


def _of_one_array(function, *constants):
    """Return a function that takes an array and nothing else: custom_vjp asks for the signature."""

    def call(x):
        return function(x, *constants)

    return call


def _version(name: str) -> str:
    from importlib import metadata  # noqa: PLC0415 - as above

    return metadata.version(name) if name != "tunebook" else __import__("tunebook").__version__


def _equations(program: object) -> int:
    """Count what computes something: neither calls of functions nor what only marks how one is differentiated."""
    if isinstance(program, list):
        return len(program)
    lines = [line for line in str(program).splitlines() if " = " in line]
    return sum(not re.search(r" = (pjit|jit|custom_\w+_call|custom_vmap\w*|closed_call)\[", line) for line in lines)


def run(name: str, python: str) -> tuple[dict[str, str], list[dict[str, object]]] | None:
    """Return versions and outcomes of a peer, or None if it is not installed."""
    path = os.pathsep.join([str(HERE.parent / "src"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "PYTHONPATH": path}
    module = {"tune-jax": "tune_jax"}.get(name, name)
    there = subprocess.run([python, "-c", f"import jax, {module}"], env=environment, capture_output=True, check=False)
    if there.returncode:
        return None
    command = [python, str(HERE / "jax_trace.py"), "--one", name]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    first, *rest = (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))
    return first, rest


def main() -> int:
    """Run all that are there."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--python", action="append", default=[], help="NAME=PATH: the Python that has a peer")
    options = parser.parse_args()
    if options.one:
        one(options.one)
        return 0
    pythons = dict(each.split("=", 1) for each in options.python)
    rows, raw = [], {}
    for name in PEERS[:1] if options.no_peers else PEERS:
        found = run(name, pythons.get(name, sys.executable))
        if found is None:
            print(f"{name} is not installed")
            continue
        versions, outcomes = found
        raw[name] = {"versions": versions, "outcomes": outcomes}
        right = sum(each["chosen"] == "good" for each in outcomes)
        left = [int(each["extra"]) for each in outcomes]
        title = f"{name} {versions['version']}, jax {versions['jax']}"
        rows.append(Row(what=f"{title}: right, of 18", measured=right, unit="", **_wanted(name, at_least=18)))
        rows.append(
            Row(what=f"{title}: equations left, worst", measured=max(left), unit="", **_wanted(name, at_most=0))
        )
        rows.append(Row(what=f"{title}: equations left, median", measured=statistics.median(left), unit=""))
    show(rows)
    if not options.no_peers:
        print(f"\nwritten to {save('jax_trace', rows, raw, ['jax', 'numpy']).relative_to(RESULTS.parent.parent)}")
    return 0


def _wanted(name: str, **bound: float) -> dict[str, float]:
    return bound if name == "tunebook" else {}


if __name__ == "__main__":
    sys.exit(main())
