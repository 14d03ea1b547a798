"""Checks that every book shared by machines must pass, on any server; and the machines of these tests."""

from __future__ import annotations

import itertools
import signal
import threading
import time
from typing import TYPE_CHECKING

import pytest
from limits import HANG_S
from servers import HOST, RedisServer
from shared_processes import problem, record, start
from shared_stress import tune_together

from tunebook._base.errors import TunebookWarning
from tunebook._selection.single_flight import Lease, acquire
from tunebook.stores import DirectoryStore, open_shared, open_store, problem_id
from tunebook.testing import example_record

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tunebook.stores import LeaseBoard
    from tunebook.stores._remote import RemoteStore
    from tunebook.stores._shared import SharedStore

DATABASES = 10_000

_numbers = itertools.count(1)
_by_directory: dict[Path, int] = {}


def number_of(tmp_path: Path) -> int:
    """Return a number of its own for each test."""
    return _by_directory.setdefault(tmp_path, next(_numbers))


def database_of(server: RedisServer, tmp_path: Path) -> str:
    """Return the address of a database of its own for each test."""
    return f"redis://{HOST}:{server.port}/{number_of(tmp_path)}"


def machine(tmp_path: Path, name: str, url: str, **options) -> SharedStore:
    """Return the view of one machine: its own local book before the shared one."""
    root = tmp_path / name
    return open_shared(DirectoryStore(root), url, root=root, **{"key": None, **options})


def marks(root: Path) -> list[Path]:
    """Return the files that mark records still to be sent from a local book."""
    return [path for path in (root / "v1" / "outbox").rglob("*") if path.is_file()]


def eventually(fact: Callable[[], object], patience_s: float = HANG_S) -> bool:
    """Return whether something becomes true before patience ends."""
    ends = time.monotonic() + patience_s
    while time.monotonic() < ends:
        if fact():
            return True
        time.sleep(0.02)
    return False


def together(count: int, work: Callable[[int], object]) -> None:
    """Let so many threads begin their work at one moment, and wait for all."""
    begin = threading.Barrier(count)

    def run(number: int) -> None:
        begin.wait()
        work(number)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


# ------------------------------------------------------------------------------------------------------------- checks


def check_that_the_highest_generation_stands(make: Callable[[], RemoteStore], offers: int) -> None:
    """Of many offers at once; `make` opens the store."""
    records = [example_record(config=n, generation=n) for n in range(1, offers + 1)]
    stores = [make() for _ in range(8)]
    together(8, lambda n: [stores[n].offer(each) for each in records[n::8]])
    assert make().get(records[0].problem) == records[-1]


def check_that_a_wrongly_signed_record_is_refused(
    make: Callable[..., RemoteStore], written_with: bytes | None, again: Callable[[RemoteStore], object]
) -> None:
    """With one warning, and can be replaced; `again` is a second lookup that must find nothing."""
    make(key=written_with).put(example_record(generation=2**62))
    store = make(key=b"secret")
    with pytest.warns(TunebookWarning, match="TUNEBOOK_SIGNING_KEY"):
        assert store.get(example_record().problem) is None
    assert not again(store), "and no second warning, which would be an error here"
    store.put(example_record(config="mine"))
    assert store.get(example_record().problem) == example_record(config="mine")


def check_that_slips_behave_as_those_in_files(board: LeaseBoard) -> None:
    """On a board that is empty."""
    assert not board.rewrite("k.1", b"x")
    assert board.create("k.1", b"one")
    assert board.create("k.10", b"ten")
    assert board.create("kk.2", b"another's")
    assert board.rewrite("k.1", b"two")
    assert (board.read("k.1"), board.generations("k")) == (b"two", [1, 10])
    board.remove("k.1")
    board.remove("k.1")
    assert (board.read("k.1"), board.generations("k")) == (None, [10])


PLANTED = ["9" * 19, str(2**62), "1" + "0" * 9, "9" * 9]


def check_that_a_planted_slip_keeps_nobody_waiting(board: LeaseBoard, lease_id: str) -> None:
    """On a board where somebody wrote one slip with an odd number, by hand."""
    clock = itertools.count(0.0, 0.01)
    for _ in range(2):
        claimed = acquire(
            board,
            lease_id,
            look=lambda: None,
            lease_s=0.2,
            deadline_s=HANG_S,
            clock=lambda: next(clock),
            sleep=lambda _: None,
        )
        assert isinstance(claimed, Lease)
        assert claimed.slip is not None, "without a lease, others would do the same work"
        assert 0 < claimed.generation < 2**40, "the generations of records are sums of these, and have 63 bits"
        claimed.release()
    assert board.generations(lease_id) == []


def check_that_one_thread_makes_the_slip(board: LeaseBoard, threads: int) -> None:
    """Of many that try at one moment."""
    made = []

    def compete(number: int) -> None:
        if board.create("k.1", b"%d" % number):
            made.append(b"%d" % number)

    together(threads, compete)
    assert made == [board.read("k.1")]


def check_that_a_late_write_is_refused_everywhere(tmp_path: Path, url: str) -> None:
    """Of a holder that was paused past its lease."""
    holder = start("hold", tmp_path / "a", url=url, key="k", lease_s=0.5)
    assert '"generation": 1' in holder.stdout.readline()
    holder.send_signal(signal.SIGSTOP)
    mine = machine(tmp_path, "b", url)
    # As another machine would: it cannot see the process, and waits until the lease has lapsed.
    held = acquire(mine.leases(), problem_id(problem("k")), look=lambda: None, lease_s=0.5, is_gone=lambda _: False)
    assert held.generation == 2
    mine.put(record("k", "mine", held.generation))
    held.release()
    holder.send_signal(signal.SIGCONT)
    out, _ = holder.communicate("publish\nrelease\n", timeout=HANG_S)
    assert '"stands": "mine"' in out
    assert open_store(url).get(problem("k")).head.config == "mine"
    assert DirectoryStore(tmp_path / "a").get(problem("k")).head.config == "mine"


def check_that_each_key_is_tuned_once(tmp_path: Path, url: str, *, processes: int, keys: int) -> None:
    """Among machines that all begin at once."""
    outcome = tune_together(tmp_path, url, processes=processes, keys=keys)
    assert (outcome.done, outcome.said) == (processes, "")
    assert outcome.begun == {str(key): 1 for key in range(keys)}
    assert len(list(open_store(url).items())) == keys


def check_that_killed_tuners_cost_their_own_work_alone(tmp_path: Path, url: str, *, processes: int, kills: int) -> None:
    """Each killed process leaves at most one tuning for another to do again."""
    keys = 20 + 5 * kills
    outcome = tune_together(tmp_path, url, processes=processes, keys=keys, seconds=0.01, kills=kills)
    assert (outcome.done, outcome.said) == (processes, "")
    assert outcome.begun.keys() == {str(key) for key in range(keys)}
    assert sum(outcome.begun.values()) - keys <= outcome.killed
    assert len(list(open_store(url).items())) == keys
