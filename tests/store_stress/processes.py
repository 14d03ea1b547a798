"""Verbs that store tests run in other processes: killed writers, full disks, read-only mounts, other users.

`python processes.py VERB STORE [ARGUMENTS]`; each verb prints the values that the test compares.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import sys
import time
import warnings
from contextlib import suppress
from pathlib import Path

from tunebook._base.errors import StoreError
from tunebook.stores import open_store
from tunebook.testing import example_record

NOBODY = 65534


def config_of(prefix: str, number: int) -> dict:
    """Return a value of 0.3 to 3 kB that names its writer: halves of two values never make a third."""
    return {"prefix": prefix, "number": number, "filler": f"{prefix}{number}" * random.Random(number).randint(50, 500)}


def put(path: str, prefix: str, count: str) -> None:
    """Write records with keys of our own, and say so after each, when it is durable."""
    store = open_store(Path(path))
    for number in range(int(count)):
        record = example_record(call_key=f"{prefix}{number}", config=config_of(prefix, number))
        assert any(was_put(store, record) for _ in range(4)), "busy four times in a row"
        print(number, flush=True)


def was_put(store: object, record: object) -> bool:
    """Write a record; return False if another process kept the book locked, as on a disk that takes seconds to sync."""
    try:
        store.put(record)
    except StoreError as error:
        if error.kind != "busy":
            raise
        return False
    return True


def hammer(path: str, prefix: str) -> None:
    """Write the same few records over and over, until killed."""
    store = open_store(Path(path))
    for number in itertools.count():
        store.put(example_record(call_key=f"shared{number % 4}", config=config_of(prefix, number)))
        if number == 4:
            print("ready", flush=True)


def fill(path: str) -> None:
    """Write until the disk is full, then some more."""
    store = open_store(Path(path))
    kinds, kept = [], []
    for number in range(200):
        record = example_record(call_key=str(number), config=config_of("f", number))
        try:
            store.put(record)
            kept.append(record)
        except StoreError as error:
            kinds.append(error.kind)
            message = str(error)
    readable = sum(open_store(Path(path)).get(record.problem) == record for record in kept)
    left = sum(1 for file in Path(path).rglob("*") if file.parent.name == "tmp" or file.suffix == ".tmp")
    _report(kinds=sorted(set(kinds)), message=message, kept=len(kept), readable=readable, temporary_files_left=left)


def read_only(path: str) -> None:
    """Read the records, and try to write, in a place that cannot be written."""
    store = open_store(Path(path))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = store.get(example_record(call_key="good").problem)
        damaged = store.get(example_record(call_key="damaged").problem)
        damaged = damaged or store.get(example_record(call_key="damaged").problem)
    kinds = []
    for write in (store.put, lambda record: store.delete(record.problem)):
        try:
            write(example_record(call_key="good", config="new"))
        except StoreError as error:
            kinds.append(error.kind)
    found_again = store.get(example_record(call_key="good").problem)
    good = example_record(call_key="good")
    _report(found=found == good == found_again, damaged=damaged is not None, warnings=len(caught), kinds=kinds)


def as_nobody(path: str) -> None:
    """Try everything as a user without rights."""
    with suppress(OSError):
        os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    store = open_store(Path(path))
    answers = {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for name, ask in {
            "get": lambda: store.get(example_record().problem),
            "items": lambda: list(store.items()),
            "put": lambda: store.put(example_record(config="by nobody")),
        }.items():
            try:
                answer = ask()
                answers[name] = "something" if answer else "nothing"
            except StoreError as error:
                answers[name] = error.kind
    _report(**answers, warnings=[str(warning.message) for warning in caught])


def hold_lock(path: str) -> None:
    """Take the lock of a JSON store and keep it until killed."""
    import fcntl

    descriptor = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    print("ready", flush=True)
    time.sleep(60)


def _report(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    verb, *arguments = sys.argv[1:]
    globals()[verb](*arguments)
