"""A user's call never fails because the cache did: each system call of a call is refused once, with each error."""

from __future__ import annotations

import errno
import itertools
import os
import random
import shutil
import tempfile
import warnings
import zlib
from collections import Counter
from pathlib import Path

import pytest
from os_faults import ERRNOS, failing

import tunebook as tb
from tunebook._base.errors import forget_warnings
from tunebook._measure import device_lock
from tunebook._memo.answer_memo import MEMO
from tunebook._selection.single_flight import this_process
from tunebook.stores import DirectoryStore, MemoryStore, open_store, problem_id, write_pack
from tunebook.stores._files import LeaseFiles
from tunebook.stores._shared import Outbox, SharedStore


def kernel(store, code=1):
    """Return a kernel on a store; with other `code` an entry of it is tuned anew."""
    space = [{"s": 1}, {"s": 2}]
    tuner = tb.Tuner(device_wait_s=0.05)

    @tb.tunable(space=space, heuristic={"s": 1}, check=False, name="k", version=str(code), store=store, tuner=tuner)
    def k(n, *, config):
        return n + 0 * config.s

    return k


def new_book(root):
    return kernel(root / "book")


def tuned_book(root):
    kernel(root / "book")(100)
    return kernel(root / "book")


def edited_kernel(root):
    kernel(root / "book")(100)
    return kernel(root / "book", code=2)


def damaged_book(root):
    again = tuned_book(root)
    (record,) = (root / "book").glob("v1/*/*/*.json")
    record.write_bytes(b"damaged")
    return again


def dead_lease(root):
    again = kernel(root / "book")
    name = problem_id(again.problem(100))
    shard = root / "book" / "v1" / "leases" / f"{zlib.crc32(name.encode()) & 0xFF:02x}"
    shard.mkdir(parents=True)
    (shard / f"{name}.1").write_text(f"{this_process().host} 999999 5 {'0' * 16} {0:012d}\n")
    return again


def packed_book(root):
    kernel(root / "other")(100)
    records = list(open_store(root / "other").items())
    write_pack(root / "book" / "v1" / "packs" / "a.db", records)
    return kernel(root / "book")


def new_json_file(root):
    return kernel(root / "new" / "book.json")


def json_file(root):
    kernel(root / "book.json")(100)
    return kernel(root / "book.json")


def damaged_json_file(root):
    (root / "book.json").write_text("{damaged")
    return kernel(root / "book.json")


def users_book(_root):
    return kernel(None)


class PretendServer:
    """A shared book on another machine; its own faults are not the subject here."""

    where = "redis://pretend"

    def __init__(self, root):
        self._records, self._board = MemoryStore(), LeaseFiles(root / "server")
        self.get, self.items, self.delete = self._records.get, self._records.items, self._records.delete

    def offer(self, record):
        self._records.put(record)

    def leases(self):
        return self._board


def shared_book(root):
    cache = tb.PersistentCache("k", root / "book")
    server, outbox = PretendServer(root), Outbox(root / "book", PretendServer.where)
    cache._given = SharedStore(DirectoryStore(root / "book"), server, outbox=outbox)
    return kernel(cache)


SCENARIOS = [
    new_book, tuned_book, edited_kernel, damaged_book, dead_lease, packed_book, new_json_file, json_file,
    damaged_json_file, users_book, shared_book,
]  # fmt: skip


def attempt(scenario, monkeypatch, number=0, code=errno.EIO):
    """Run a call of a scenario with a fault; return its system calls, its warnings, and what went wrong."""
    root = Path(tempfile.mkdtemp(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
    monkeypatch.setenv("TUNEBOOK_HOME", str(root / "home"))
    monkeypatch.setenv("TUNEBOOK_LOCKS", str(root / "locks"))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        called = scenario(root)
        forget_warnings()
        warned.clear()
        wrong = ""
        try:
            with failing(number, code) as calls:
                answer = called(100)
            wrong = "" if answer == 100 and called(100) == 100 else f"returned {answer}"
        except Exception as error:  # noqa: BLE001 - any error is the finding
            wrong = f"{type(error).__name__}: {error}"
    if device_lock._held:
        wrong += " and left the device locked"
    if MEMO.suspended:
        wrong += " and left the memo suspended"
    shutil.rmtree(root)
    return calls, [str(each.message) for each in warned], wrong


def check(scenario, monkeypatch, choose):
    """Let the chosen system calls of a scenario fail, each by itself; return how many did."""
    attempt(scenario, monkeypatch)  # loads modules
    control, said, wrong = attempt(scenario, monkeypatch)
    assert not wrong
    assert control.count
    found, tried = Counter(), 0
    for number, code in choose(list(itertools.product(range(1, control.count + 1), ERRNOS))):
        calls, warned, wrong = attempt(scenario, monkeypatch, number, code)
        tried += bool(calls.where)  # a measurement may take fewer samples this time
        if not wrong and len(warned) > len(said) + 1:
            wrong = f"{len(warned)} warnings"
        if wrong:
            found[f"{calls.where}: {errno.errorcode[code]}: {wrong}"] += 1
    assert not found, "\n".join(found)
    return tried


@pytest.mark.promise("cache-never-fails-a-call")
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_a_call_survives_a_system_call_that_fails(scenario, monkeypatch):
    assert check(scenario, monkeypatch, lambda faults: random.Random(7).sample(faults, 5))


@pytest.mark.promise("cache-never-fails-a-call")
@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_a_call_survives_each_system_call_that_fails_with_each_error(scenario, monkeypatch):
    tried = check(scenario, monkeypatch, lambda faults: faults)
    print(f"{scenario.__name__}: {tried} faults")
