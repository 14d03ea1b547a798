"""Measure how ranks agree: time and messages until all use one configuration, for 100, 300 and 1,000 ranks.

    python bench/agreement.py [--quick]

Prints a table against the targets of the design, and writes the raw numbers to bench/results/agreement.json. Ranks are
threads of one Python process against one redis-server (Debian's package): they share the interpreter's lock, so that
seconds are those of all ranks one after the other, where ranks in processes of their own would take one rank's and the
server's. Messages are round trips to the server.
"""

from __future__ import annotations

import argparse
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import redis
from agreement_board import Rank, Shared
from tables import report

import tunebook as tb
from tunebook.fleet._agreement.agree import compare
from tunebook.fleet._agreement.agreement_state import JobAgreement
from tunebook.fleet._agreement.board import RedisBoard
from tunebook.fleet._agreement.round import AgreementOptions

KINDS = ("cold", "hit", "compare")
ENOUGH_FILES = 8192  # two connections for each rank


class Counted:
    """A board that counts the messages of its rank."""

    def __init__(self, board):
        self._board, self.rank, self.world, self.where, self.messages = board, board.rank, board.world, board.where, 0

    def __getattr__(self, name):
        call = getattr(self._board, name)

        def counted(*args):
            self.messages += 1
            return call(*args)

        return counted


@contextmanager
def server(directory):
    """Start a redis-server on a socket in a directory; yield its address."""
    path = Path(directory) / "redis.sock"
    command = [shutil.which("redis-server") or "redis-server", "--port", "0", "--unixsocket", str(path), "--save", ""]
    running = subprocess.Popen(command, cwd=directory, stdout=subprocess.DEVNULL)
    try:
        while not path.exists():
            time.sleep(0.01)
        yield f"unix://{path}"
    finally:
        running.kill()
        running.wait()


def job(url, name, world):
    """Return the ranks of a job, each of which would choose another configuration."""
    ranks = [Rank(Shared(), rank, world, b=10 * (rank % 4 + 1)) for rank in range(world)]
    for rank in ranks:
        rank.board = Counted(RedisBoard(url, job=name, rank=rank.board.rank, world=world))
        rank.agreement = JobAgreement(rank.board, AgreementOptions())
    return ranks


def all_at_once(pool, calls):
    """Release all calls together; return what each returned, and the seconds until the last did."""
    gate = threading.Barrier(len(calls) + 1)

    def released(call):
        gate.wait()
        return call()

    futures = [pool.submit(released, call) for call in calls]
    gate.wait()
    began = time.perf_counter()
    found = [future.result() for future in futures]
    return found, time.perf_counter() - began


def measure(url, world, problems):
    """Return seconds per problem, messages per rank and problem, and those of `assert_agreement`."""
    ranks = job(url, f"{world} ranks", world)
    raw = {"ranks": world, "wrong": 0, "tuned_twice": 0}
    raw |= {f"{kind}_{what}_s": [] for kind in KINDS for what in ("wall", "rank_cpu", "server_cpu")}
    messages = {kind: [] for kind in KINDS}
    client = redis.Redis.from_url(url)

    def server_cpu_s():
        used = client.info("cpu")
        return used["used_cpu_user"] + used["used_cpu_sys"]

    def round_of(kind, calls):
        before = [rank.board.messages for rank in ranks]
        cpu, of_server = time.process_time(), server_cpu_s()
        found, seconds = all_at_once(pool, calls)
        raw[f"{kind}_wall_s"].append(seconds)
        raw[f"{kind}_rank_cpu_s"].append((time.process_time() - cpu) / world)
        raw[f"{kind}_server_cpu_s"].append(server_cpu_s() - of_server)
        sent = sorted(rank.board.messages - b for rank, b in zip(ranks, before, strict=True))
        messages[kind].append([statistics.median(sent), sent[-1]])
        raw["wrong"] += len(set(found)) - 1

    with ThreadPoolExecutor(world) as pool:
        at_once = [pool.submit(r.choose, -1) for r in ranks]  # opens the connections, and is not counted
        assert len({each.result() for each in at_once}) == 1
        for x in range(problems):
            before = sum(rank.tuned for rank in ranks)
            round_of("cold", [lambda r=r, x=x: r.choose(x) for r in ranks])
            raw["tuned_twice"] += sum(rank.tuned for rank in ranks) - before - 1
        for x in range(problems, 2 * problems):
            tb.tune(ranks[world // 2].kernel, x)
            round_of("hit", [lambda r=r, x=x: r.choose(x) for r in ranks])
        for _ in range(problems):
            round_of("compare", [lambda r=r: compare(r.agreement, 60.0) for r in ranks])
    return {
        **raw,
        "messages": {kind: [statistics.median(m) for m in zip(*of, strict=True)] for kind, of in messages.items()},
    }


def table(found):
    rows = []
    few, many = found[0], found[-1]
    names = {"cold": "all miss", "hit": "one hits", "compare": f"assert_agreement over {problems_of(few)} problems"}
    for kind, words in names.items():
        for each in found:
            median, most = each["messages"][kind]
            rank_ms, server_ms, wall_ms = (
                1e3 * statistics.median(each[f"{kind}_{what}_s"]) for what in ("rank_cpu", "server_cpu", "wall")
            )
            of = f"{each['ranks']:,} ranks, {words}"
            rows += [
                (f"{of}: messages per rank", f"{median:.0f}", "<= 5", median <= 5),
                (f"{of}: messages of the rank with the most", f"{most:.0f}", "<= 100", most <= 100),
                (f"{of}: CPU time per rank", f"{rank_ms:.2f} ms", "< 10 ms", rank_ms < 10),
                (
                    f"{of}: CPU time of the server",
                    f"{server_ms:.0f} ms",
                    f"< {each['ranks']} ms",
                    server_ms < each["ranks"],
                ),
                (f"{of}: until the last of all, in one process", f"{wall_ms:.0f} ms", "", True),
            ]
    growth = many["messages"]["cold"][0] / few["messages"]["cold"][0]
    name = f"messages per rank, {many['ranks']:,} ranks beside {few['ranks']:,}"
    rows.append((name, f"{growth:.2f} x", "<= 1.25 x", growth <= 1.25))
    wrong, twice = sum(each["wrong"] for each in found), sum(each["tuned_twice"] for each in found)
    rows.append(("ranks with another configuration than the rest", str(wrong), "0", wrong == 0))
    rows.append(("problems tuned by more than one rank", str(twice), "0", twice == 0))
    return rows


def problems_of(each):
    return len(each["cold_wall_s"]) + len(each["hit_wall_s"]) + 1


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="10, 30 and 100 ranks")
    quick = parser.parse_args().quick
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ENOUGH_FILES if hard == resource.RLIM_INFINITY else min(ENOUGH_FILES, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    threading.stack_size(256 * 1024)
    counts = [10, 30, 100] if quick else [100, 300, 1000]
    with tempfile.TemporaryDirectory(prefix="tunebook-bench-") as directory, server(directory) as url:
        found = [measure(url, count, problems=3 if quick else 5) for count in counts]
    return report("agreement", table(found), found, quick=quick)


if __name__ == "__main__":
    sys.exit(main())
