"""A cold call does each thing once: it reads its record once, and lists its candidates once."""

from __future__ import annotations

import ast
import threading
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from kernels import FakeClock, fake_tuner

import tunebook as tb
from tunebook._base.config_codec import encode
from tunebook._base.record_format import Body, Head, Record
from tunebook._base.vocabulary import Event
from tunebook._selection.selector import ORDER, asked_tiers
from tunebook.stores import DirectoryStore

ROOT = Path(tb.__file__).parent


class CountingStore(DirectoryStore):
    """A book that counts how often a record is read."""

    def __init__(self, path):
        super().__init__(path)
        self.reads = 0

    def get(self, problem):
        self.reads += 1
        return super().get(problem)


class Book(tb.PersistentCache):
    """The persistent tier over a given store."""

    def __init__(self, store):
        super().__init__("counted")
        self.counted = store

    @property
    def store(self):
        return self.counted


def make(path, **options):
    clock, listed = FakeClock(), []

    def space(x):
        listed.append(threading.current_thread().name)
        return [{"b": 1}, {"b": 2}, {"b": 3}]

    @tb.tunable(space=space, heuristic={"b": 3}, tuner=fake_tuner(clock), name="counted", store=False, **options)
    def kernel(x, *, config):
        clock.spend(config.b)
        return x

    book = Book(CountingStore(path))
    chain = tb.ConfigSelectorChain(tb.ConfigCache(), kernel.selector.policy, fake_tuner(clock), book)
    return chain, kernel.kernel, book.store, listed


def select(chain, kernel):
    return chain.select(kernel.invocation((np.ones(4),)), kernel)


def test_a_cold_call_reads_its_record_once(tmp_path):
    chain, kernel, store, _ = make(tmp_path)
    assert select(chain, kernel).source == "autotune"
    assert store.reads == 1


def test_a_cold_call_with_a_record_of_other_code_reads_it_once(tmp_path):
    chain, kernel, store, _ = make(tmp_path)
    problem = kernel.problem(kernel.invocation((np.ones(4),)))
    store.put(Record(Head(problem=problem, config=encode(tb.Config(b=2)), checksum="other", origin="tuned"), Body()))
    assert select(chain, kernel).source == "autotune"
    assert store.reads == 1


@pytest.mark.parametrize("before", [False, True], ids=["a new record", "another record"])
def test_a_record_that_another_process_publishes_before_the_lease_is_held_is_read(tmp_path, before):
    chain, kernel, store, _ = make(tmp_path)
    problem, board = kernel.problem(kernel.invocation((np.ones(4),))), store.leases

    def publish(checksum=""):
        head = Head(problem=problem, config=encode(tb.Config(b=2)), checksum=checksum, origin="tuned")
        DirectoryStore(tmp_path).put(Record(head, Body()))

    def leases():  # asked for after the first look, before the lease
        publish()
        return board()

    if before:
        publish("of other code")
    store.leases = leases
    answer = select(chain, kernel)
    assert (answer.config, answer.level, store.reads) == (tb.Config(b=2), "persistent", 2)


def test_a_store_that_cannot_tell_its_state_is_read_again_under_the_lease(tmp_path):
    chain, kernel, store, _ = make(tmp_path)
    store.state = lambda _problem: None
    assert select(chain, kernel).source == "autotune"
    assert store.reads == 2


def test_tuning_on_demand_reads_the_record_once(tmp_path):
    chain, kernel, store, _ = make(tmp_path)
    chain.tune(kernel.invocation((np.ones(4),)), kernel)
    assert store.reads == 1
    chain.verify(kernel.invocation((np.ones(4),)), kernel)
    assert store.reads == 2


def test_a_tuning_lists_the_candidates_once(tmp_path):
    chain, kernel, _, listed = make(tmp_path)
    select(chain, kernel)
    assert len(listed) == 1


def test_threads_that_wait_for_a_tuning_do_not_list_the_candidates(tmp_path):
    chain, kernel, _, listed = make(tmp_path)
    begin, sources = threading.Barrier(8), []

    def call():
        begin.wait()
        sources.append(select(chain, kernel).source)

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # A thread that comes when the tuning is over finds the entry, and looks for its configuration among the candidates.
    assert len(listed) <= 1 + sources.count("persistent")


def test_a_pin_that_is_written_while_a_tuning_runs_without_a_lease_stands(tmp_path):
    chain, kernel, store, _ = make(tmp_path)
    store.leases = lambda: None
    problem = kernel.problem(kernel.invocation((np.ones(4),)))
    head = Head(problem=problem, config=encode(tb.Config(b=2)), checksum="", origin="pinned")

    def pin(event, **_):
        if event == "autotune_start":
            store.put(Record(head, Body()))

    chain.listen(pin)
    assert select(chain, kernel).config == tb.Config(b=2)


# ------------------------------------------------------------------------------------------------------------- events


def told_events():
    """The events that are told anywhere in the source: by `tell` of a request, also in a `partial`, and as `event=`."""
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                yield from (v.value for v in told_in(node) if isinstance(v, ast.Constant) and isinstance(v.value, str))


def told_in(call):
    match call:
        case ast.Call(func=ast.Attribute(value=ast.Name(id="request"), attr="tell"), args=[event, *_]):
            yield event
        case ast.Call(func=ast.Name(id="partial"), args=[ast.Attribute(attr="tell"), event, *_]):
            yield event
        case ast.Call(func=ast.Name(id="Found") | ast.Attribute(attr="Found" | "_replace"), keywords=keywords):
            yield from (keyword.value for keyword in keywords if keyword.arg == "event")


def test_every_event_that_is_told_is_in_the_vocabulary_and_every_one_there_is_told():
    assert set(told_events()) == set(get_args(Event))


@pytest.mark.parametrize("event", get_args(Event))
def test_every_event_is_documented(event):
    pages = ROOT.parents[1] / "docs"
    if not pages.is_dir():
        pytest.skip("only the source tree has the pages")
    assert f"`{event}`" in (pages / "events.md").read_text()


# -------------------------------------------------------------------------------------------------------- their order


def test_the_order_of_tiers_stands_in_one_place():
    names = [tier.name for tier in ORDER]
    assert names == [
        *("override", "overlay", "pinned", "agreement", "memory", "persistent", "autotune"),
        *("heuristics", "first candidate", "any candidate"),
    ]
    chain = tb.ConfigSelectorChain(tb.ConfigCache())
    assert [tier.name for tier in chain.tiers] == names
    assert [tier.name for tier in asked_tiers(chain.tiers)] == [t.name for t in ORDER if not t.in_jobs_only]
