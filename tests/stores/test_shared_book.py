"""A local book in front of a book that many machines share: questions, sending, and the cost of faults."""

from __future__ import annotations

import os
import random
import sys
import threading
import time

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from limits import HANG_S
from servers import HOST, free_port, proxy, redis_server
from shared_checks import (
    DATABASES,
    check_that_a_late_write_is_refused_everywhere,
    database_of,
    eventually,
    machine,
    marks,
)
from shared_processes import problem, record, start

import tunebook as tb
from tunebook._base.errors import CodecError, DefinitionError, MissingDependency, StoreError, TunebookWarning
from tunebook._base.vocabulary import Problem
from tunebook._selection.persistent_cache import PersistentCache, book_before, default_book, store_at
from tunebook._selection.single_flight import Busy, Lease, Maker, acquire, this_process
from tunebook.stores import DirectoryStore, MemoryStore, open_shared, open_store, problem_id
from tunebook.stores import _shared as shared_module
from tunebook.stores._remote import Breaker, Envelope, within
from tunebook.stores._shared import Outbox, SharedStore, decode_problem, encode_problem
from tunebook.testing import StoreContract, example_record

redis = pytest.importorskip("redis")

X = np.ones(8)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with redis_server(tmp_path_factory.mktemp("redis"), databases=DATABASES) as running:
        yield running


@pytest.fixture(autouse=True)
def _patience(request, monkeypatch):
    """Let a server take its time to answer, or to refuse: on a busy machine it may need more than a call waits."""
    if "impatient" not in request.fixturenames:
        monkeypatch.setattr(shared_module, "HOT_S", HANG_S)
    for moment in ("_ABSENT_S", "_URGENT_S"):  # within which an answer still holds
        monkeypatch.setattr(shared_module, moment, HANG_S)


@pytest.fixture
def impatient(monkeypatch):
    """A call waits 0.29 s, as for users; the client that it waits for would take very long to give up."""
    assert shared_module.HOT_S < 0.3
    monkeypatch.setattr(shared_module, "PATIENT_S", HANG_S)


@pytest.fixture
def left_alone(monkeypatch):
    """The thread behind the calls does not ask the server again while the test lasts."""
    monkeypatch.setattr("tunebook.stores._remote._PAUSES_S", (2 * HANG_S, 2 * HANG_S))


@pytest.fixture
def url(server, tmp_path):
    return database_of(server, tmp_path)


@pytest.fixture
def between(server):
    with proxy(server.port) as running:
        yield running


@pytest.fixture
def through(between, url):
    """The address of the test's database, by way of the proxy."""
    return f"redis://{HOST}:{between.port}/{url.rpartition('/')[2]}"


class TestSharedStore(StoreContract):
    @pytest.fixture(autouse=True)
    def _server(self, server):
        self.server = server

    def open(self, tmp_path):
        return machine(tmp_path, "book", database_of(self.server, tmp_path))


# ------------------------------------------------------------------------------------------------------------ reading


def test_an_entry_tuned_on_one_machine_is_found_and_kept_on_another(tmp_path, url):
    machine(tmp_path, "a", url).put(example_record())
    assert machine(tmp_path, "b", url).get(example_record().problem) == example_record()
    assert DirectoryStore(tmp_path / "b").get(example_record().problem) == example_record()


def test_a_local_hit_asks_nobody(tmp_path, between, through):
    DirectoryStore(tmp_path / "a").put(example_record())
    assert machine(tmp_path, "a", through).get(example_record().problem) == example_record()
    assert between.accepted == 0


def test_a_problem_that_the_shared_book_does_not_know_is_not_asked_for_at_every_call(tmp_path, server, url):
    store = machine(tmp_path, "a", url)
    with redis.Redis.from_url(url) as client:
        client.config_resetstat()
        for _ in range(20):
            assert store.get(problem("unknown")) is None
        assert client.info("commandstats")["cmdstat_hget"]["calls"] == 1


def test_a_caller_about_to_tune_asks_again_and_finds_an_entry_tuned_meanwhile(tmp_path, url):
    mine, theirs = machine(tmp_path, "a", url), machine(tmp_path, "b", url)
    assert mine.get(problem("k")) is None
    theirs.put(record("k", "theirs"))
    assert mine.get(problem("k")) is None, "it was asked a moment ago"
    mine.leases().generations(problem_id(problem("k")))
    assert mine.get(problem("k")) == record("k", "theirs")


def test_before_tuning_over_an_old_entry_the_shared_book_is_asked_for_a_newer_one(tmp_path, url):
    mine, theirs = machine(tmp_path, "a", url), machine(tmp_path, "b", url)
    mine.put(record("k", "old", 1))
    theirs.put(record("k", "new", 2))
    assert mine.get(problem("k")).head.config == "old", "a local hit asks nobody"
    mine.leases().generations(problem_id(problem("k")))
    assert mine.get(problem("k")).head.config == "new"
    assert DirectoryStore(tmp_path / "a").get(problem("k")).head.config == "new"


def test_measurements_of_both_machines_are_kept_when_their_records_meet(tmp_path, url):
    first, second = example_record(generation=1), example_record(generation=2)
    other = first.body.measurements[0]._replace(fingerprint="only here")
    mine, theirs = machine(tmp_path, "a", url), machine(tmp_path, "b", url)
    DirectoryStore(tmp_path / "a").put(first.replace(body=tb_body(first, other)))
    theirs.put(second)
    mine.leases().generations(problem_id(first.problem))
    assert {m.fingerprint for m in mine.get(first.problem).body.measurements} == {"f1", "f2", "only here"}


def tb_body(of, *more):
    from dataclasses import replace

    return replace(of.body, measurements=(*of.body.measurements, *more))


def test_items_are_the_local_ones_and_the_shared_ones_once(tmp_path, url):
    mine, theirs = machine(tmp_path, "a", url), machine(tmp_path, "b", url)
    mine.put(record("both", 1))
    theirs.put(record("theirs", 2))
    assert sorted(r.problem.call_key for r in mine.items("op")) == ["both", "theirs"]
    assert [r.problem.call_key for r in DirectoryStore(tmp_path / "a").items()] == ["both"]


def test_a_machine_without_a_home_shares_too(url, monkeypatch):
    book = open_shared(MemoryStore(), url, root=None, key=None)
    book.put(example_record())
    assert open_shared(MemoryStore(), url, root=None, key=None).get(example_record().problem) == example_record()


def test_a_local_book_that_cannot_be_written_still_reads_and_shares(tmp_path, url):
    machine(tmp_path, "a", url).put(record("theirs", 1))
    (tmp_path / "b").write_text("in the way")
    store = machine(tmp_path, "b", url)
    with pytest.warns(TunebookWarning, match="Move the file that is in the way"):
        assert store.get(problem("theirs")) == record("theirs", 1)
    with pytest.raises(StoreError, match="Move the file that is in the way"):
        store.put(record("mine", 2))
    assert machine(tmp_path, "c", url).get(problem("mine")) == record("mine", 2)


def test_a_frozen_process_reads_the_shared_book_and_writes_nothing(tmp_path, url, monkeypatch):
    machine(tmp_path, "a", url).put(example_record())
    monkeypatch.setenv("TUNEBOOK_MODE", "frozen")
    monkeypatch.setenv("TUNEBOOK_HOME", str(tmp_path / "b"))
    monkeypatch.setenv("TUNEBOOK_REMOTE", url)
    assert default_book().get(example_record().problem) == example_record()
    assert not (tmp_path / "b").exists()


# ------------------------------------------------------------------------------------------------------------- faults


@pytest.mark.promise("odd-remote-keys")
def test_a_key_of_another_type_does_not_cut_the_machine_off_from_the_shared_book(tmp_path, url):
    odd, other = example_record(), example_record(op="other")
    machine(tmp_path, "a", url).put(other)
    with redis.Redis.from_url(url) as client:
        client.set(f"tunebook:v1:record:{problem_id(odd.problem)}", "of another type")
    store = machine(tmp_path, "b", url)
    with pytest.warns(TunebookWarning, match="WRONGTYPE") as warned:
        assert store.get(odd.problem) is None
    assert len(warned) == 1
    assert not store.breaker.is_open
    assert store.get(other.problem) == other
    store.put(odd)
    assert machine(tmp_path, "c", url).get(odd.problem) == odd


@pytest.mark.usefixtures("left_alone")
def test_a_server_that_is_down_is_tried_once_and_warned_about_once(tmp_path, between, through):
    between.mode = "refuse"
    store = machine(tmp_path, "a", through)
    with pytest.warns(TunebookWarning, match=r"cannot be used.*Calls go on with the local book"):
        assert store.get(problem("k0")) is None
    for n in range(1, 50):
        assert store.get(problem(f"k{n}")) is None
        store.put(record(f"k{n}", n))
    assert between.accepted == 1


@pytest.mark.promise("server-never-fails-a-call")
@pytest.mark.usefixtures("impatient", "left_alone")
def test_a_hung_server_costs_one_call_0_3_s_and_later_ones_nothing(tmp_path, between, through):
    between.mode = "hang"
    store = machine(tmp_path, "a", through)
    began = time.perf_counter()
    with pytest.warns(TunebookWarning, match=r"shared book at redis://.* did not answer within 0.29 s"):
        assert store.get(problem("k0")) is None
    for n in range(1, 50):
        assert store.get(problem(f"k{n}")) is None
    assert time.perf_counter() - began < HANG_S / 4, "nobody waited for the client; bench/shared.py measures 0.30 s"
    assert between.accepted <= 1


def test_a_call_that_no_timeout_of_a_socket_ends_is_left_behind():
    never = threading.Event()
    with pytest.raises(StoreError, match=r"the shared book at there did not answer within 0.05 s"):
        within(0.05, "there", never.wait)
    never.set()


@pytest.mark.promise("unsent-records-kept")
def test_records_tuned_while_the_server_was_down_are_sent_when_it_is_back(tmp_path, between, through, url):
    between.mode = "refuse"
    store = machine(tmp_path, "a", through)
    with pytest.warns(TunebookWarning, match="are sent when it answers again"):
        store.put(record("k0", 0))
    store.put(record("k1", 1))
    assert len(marks(tmp_path / "a")) == 2
    between.mode = "pass"
    assert eventually(lambda: not marks(tmp_path / "a"))
    assert [machine(tmp_path, "b", url).get(problem(f"k{n}")) for n in (0, 1)] == [record("k0", 0), record("k1", 1)]
    store.put(record("k2", 2))
    assert open_store(url).get(problem("k2")) == record("k2", 2), "the server is asked by calls again"


@pytest.mark.promise("unsent-records-kept")
def test_a_record_that_one_process_could_not_send_is_sent_by_another(tmp_path, server, url):
    nobody = f"redis://{HOST}:{free_port()}/0"
    child = start("put", tmp_path / "a", url=nobody, keys=["k0", "k1"])
    assert "cannot be used" in child.communicate(timeout=HANG_S)[0]
    assert child.returncode == -9
    outbox = tmp_path / "a" / "v1" / "outbox"
    assert len(marks(tmp_path / "a")) == 2
    # The same machine, when the server has come up under that address: here, the outbox of another address.
    (there,) = outbox.iterdir()
    there.rename(Outbox(tmp_path / "a", url)._directory)
    store = machine(tmp_path, "a", url)
    assert store.get(problem("any")) is None
    assert eventually(lambda: not marks(tmp_path / "a"))
    assert {r.problem.call_key for r in open_store(url).items()} == {"k0", "k1"}


def test_bulk_writes_are_sent_behind_the_calls(tmp_path, url):
    store = machine(tmp_path, "a", url)
    store.put_many(record(f"k{n}", n) for n in range(100))
    assert eventually(lambda: not marks(tmp_path / "a"))
    assert len(list(open_store(url).items())) == 100


class DeletesWhileItSends:
    """The shared book of a machine whose user deletes a record while the thread behind the calls is sending it."""

    def __init__(self, remote):
        self._remote, self.machine = remote, None

    def __getattr__(self, name):
        return getattr(self._remote, name)

    def offer(self, record):
        assert self.machine.delete(record.problem)
        return self._remote.offer(record)


def test_a_record_that_is_deleted_while_it_is_sent_stays_deleted(tmp_path, url):
    front, remote = DirectoryStore(tmp_path / "a"), DeletesWhileItSends(open_store(url))
    store = remote.machine = SharedStore(front, remote, outbox=Outbox(tmp_path / "a", url))
    front.put(example_record())
    store._outbox.add(example_record())
    store.tend()
    assert list(open_store(url).items()) == []
    assert not marks(tmp_path / "a")


def test_the_outbox_is_bounded_and_says_so(tmp_path, between, through, monkeypatch):
    monkeypatch.setattr("tunebook.stores._shared._OUTBOX_LIMIT", 3)
    between.mode = "refuse"
    store = machine(tmp_path, "a", through)
    with pytest.warns(TunebookWarning, match="cannot be used"):
        store.put(record("k0", 0))
    store.put_many([record("k1", 1), record("k2", 2)])
    with pytest.warns(TunebookWarning, match="stays on this machine"):
        store.put(record("k3", 3))
    store.put(record("k4", 4))
    assert len(marks(tmp_path / "a")) == 3
    assert store.get(problem("k4")) == record("k4", 4)


def test_waiting_records_are_still_sent_after_the_password_was_changed(tmp_path):
    with redis_server(tmp_path / "redis", password="new") as running:
        store = machine(tmp_path, "a", running.url.replace("new", "old"))
        with pytest.warns(TunebookWarning, match="password"):
            store.put(record("k", 1))
        del store
        again = machine(tmp_path, "a", running.url)
        assert again.get(problem("any")) is None
        assert eventually(lambda: not marks(tmp_path / "a"))
        assert open_store(running.url).get(problem("k")) == record("k", 1)


def test_a_later_put_is_not_replaced_by_an_earlier_put(tmp_path, between, through, url):
    between.mode = "refuse"
    store = machine(tmp_path, "a", through)
    with pytest.warns(TunebookWarning, match="cannot be used"):
        store.put(record("k", "before"))
    store.put(record("k", "since"))
    _, since = store._outbox._ours
    store._outbox.done(since)
    between.mode = "pass"
    assert eventually(lambda: not marks(tmp_path / "a"))
    assert open_store(url).get(problem("k")) == record("k", "since")


def test_a_fault_that_a_thread_behind_the_calls_meets_is_told_to_the_next_call(tmp_path, between, through):
    store = machine(tmp_path, "a", through)
    assert store.get(problem("k")) is None
    between.mode = "refuse"
    between.drop_all()
    store.put_many([record("k", 1)])
    assert eventually(lambda: store.breaker.is_open)
    with pytest.warns(TunebookWarning, match="Calls go on with the local book"):
        assert store.get(problem("unknown")) is None


def test_a_mark_that_is_damaged_or_has_no_record_is_dropped(tmp_path, url):
    outbox = Outbox(tmp_path / "a", url)
    outbox.add(record("never written", 0))
    (outbox._directory / "torn.1").write_bytes(b"3 4")
    store = machine(tmp_path, "a", url)
    assert store.get(problem("any")) is None
    assert eventually(lambda: not marks(tmp_path / "a"))
    assert list(open_store(url).items()) == []


@given(st.tuples(*[st.text(st.characters(exclude_categories=()))] * 3))
def test_marks_name_any_problem(parts):
    assert decode_problem(encode_problem(Problem(*parts))) == Problem(*parts)


@given(st.binary() | st.from_regex(rb"[-+ 0-9]{1,8}\n[ab]{0,4}", fullmatch=True))
@example(b"00 0 0\n")
@example(b"1 1 -1\nab")
@example(b"1 1 1\nabcd")
def test_only_the_exact_content_of_a_mark_names_a_problem(content):
    found = decode_problem(content)
    assert found is None or encode_problem(found) == content


def test_a_mark_that_is_too_short_or_too_long_names_no_problem():
    content = encode_problem(Problem("gpu", "op", "{}"))
    assert decode_problem(content[:-1]) is None
    assert decode_problem(content + b"x") is None


@given(key=st.binary(min_size=1), other=st.binary(min_size=1), flipped=st.integers(min_value=0))
def test_a_signature_holds_for_its_key_and_its_bytes_alone(key, other, flipped):
    envelope = Envelope("here", key)
    content = envelope.seal(example_record())
    assert envelope.unseal(content) == example_record()
    altered = bytearray(content)
    altered[flipped % len(content)] ^= 1
    with pytest.raises(CodecError, match=r"signed|record"):
        envelope.unseal(bytes(altered))
    if other.rstrip(b"\0") != key.rstrip(b"\0"):  # HMAC pads a key with zeros
        with pytest.raises(CodecError, match="signed with another key"):
            Envelope("here", other).unseal(content)


def test_pauses_grow_to_a_minute():
    breaker = Breaker(jitter=lambda: 1.0)
    pauses = []
    for _ in range(9):
        breaker.trip()
        pauses.append(breaker.pause_s())
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    breaker.close()
    assert (breaker.is_open, breaker.pause_s()) == (False, 0)


def test_a_pause_does_not_disturb_the_random_numbers_of_the_program():
    before = random.getstate()
    breaker = Breaker()
    breaker.trip()
    assert 0.5 <= breaker.pause_s() <= 1
    assert random.getstate() == before


def test_a_server_that_comes_and_goes_is_left_alone_longer_each_time():
    now = [0.0]
    breaker = Breaker(clock=lambda: now[0], jitter=lambda: 1.0)
    pauses = []
    for answered_s in (1, 1, 1, 61, 1):
        breaker.trip()
        pauses.append(breaker.pause_s())
        breaker.close()
        now[0] += answered_s
    assert pauses == [1, 2, 4, 8, 1]


@pytest.mark.usefixtures("impatient")
def test_a_server_that_is_too_slow_for_calls_is_sent_to_all_the_same(tmp_path, between, through, url):
    between.mode, between.delay_s = "delay", 0.2  # there and back
    store = machine(tmp_path, "a", through)
    with pytest.warns(TunebookWarning, match=r"did not answer within 0.29 s"):
        store.put(record("k", 1))
    assert eventually(lambda: not marks(tmp_path / "a"))
    assert store.breaker.is_open
    assert open_store(url).get(problem("k")) == record("k", 1)


def test_a_store_that_nobody_uses_any_more_leaves_no_thread(tmp_path, between, through):
    between.mode = "refuse"
    store = machine(tmp_path, "a", through)
    with pytest.warns(TunebookWarning, match="cannot be used"):
        store.get(problem("k"))
    name = f"tunebook redis://{HOST}:{between.port}/{through.rpartition('/')[2]}"
    assert name in {thread.name for thread in threading.enumerate()}
    del store
    assert eventually(lambda: name not in {thread.name for thread in threading.enumerate()})


def test_a_forked_child_goes_on_with_the_shared_book(tmp_path, url):
    store = machine(tmp_path, "a", url)
    store.put(record("k0", 0))
    child = os.fork()
    if child == 0:
        try:
            store.put(record("k1", 1))
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert open_store(url).get(problem("k1")) == record("k1", 1)


# --------------------------------------------------------------------------------------------------- single flight


def hosts():
    """Two makers as two machines have them: neither can see whether the other's process is there."""
    return [Maker(host=f"host-{n}/pid:[1]", pid=this_process().pid, started="1") for n in (1, 2)]


def test_of_two_machines_one_holds_the_lease(tmp_path, url):
    first, second = hosts()
    a, b = machine(tmp_path, "a", url), machine(tmp_path, "b", url)
    held = acquire(a.leases(), "k", look=lambda: None, maker=first)
    assert isinstance(held, Lease)
    assert acquire(b.leases(), "k", look=lambda: None, maker=second, deadline_s=0.0) == Busy()
    held.release()
    with acquire(b.leases(), "k", look=lambda: None, maker=second, deadline_s=0.0) as again:
        assert isinstance(again, Lease)


@pytest.mark.parametrize("minutes", [-30, 30])
def test_clocks_that_are_minutes_apart_neither_shorten_nor_lengthen_a_lease(tmp_path, url, minutes, monkeypatch):
    first, second = hosts()
    a, b = machine(tmp_path, "a", url), machine(tmp_path, "b", url)
    skewed = lambda: time.monotonic() + 60 * minutes
    held = acquire(a.leases(), "k", look=lambda: None, lease_s=2.0, maker=first)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 60 * minutes)
    waiting = {"look": lambda: None, "lease_s": 2.0, "maker": second, "clock": skewed}
    assert acquire(b.leases(), "k", deadline_s=0.5, **waiting) == Busy()
    held.slip._withdrawn.set()  # its machine is gone: no more signs of life
    taken = acquire(b.leases(), "k", deadline_s=HANG_S, **waiting)
    assert taken.generation == 2
    taken.release()


def test_leases_are_local_while_the_server_is_down(tmp_path, between, through):
    between.mode = "refuse"
    one, other = machine(tmp_path, "a", through), machine(tmp_path, "a", through)
    with pytest.warns(TunebookWarning, match="cannot be used"):
        held = acquire(one.leases(), "k", look=lambda: None)
    assert held.generation == 1
    assert acquire(other.leases(), "k", look=lambda: None, deadline_s=0.0) == Busy()
    held.release()
    assert DirectoryStore(tmp_path / "a").leases().generations("k") == []


def test_a_lease_stays_where_it_was_made_when_the_server_comes_back(tmp_path, between, through, url):
    between.mode = "refuse"
    mine = machine(tmp_path, "a", through)
    with pytest.warns(TunebookWarning, match="cannot be used"):
        held = acquire(mine.leases(), "k", look=lambda: None)
    theirs = machine(tmp_path, "b", url).leases()
    theirs.create("k.1", b"another machine's")
    between.mode = "pass"
    assert eventually(lambda: not mine.breaker.is_open)
    assert held.slip.renew()
    held.release()
    assert theirs.read("k.1") == b"another machine's"
    assert DirectoryStore(tmp_path / "a").leases().generations("k") == []


def test_a_lease_outlives_a_server_that_is_away_for_a_moment(tmp_path, between, through, url):
    mine = machine(tmp_path, "a", through)
    held = acquire(mine.leases(), "k", look=lambda: None)
    between.mode = "refuse"
    between.drop_all()
    with pytest.warns(TunebookWarning, match="cannot be used"), pytest.raises(StoreError, match="cannot be reached"):
        held.slip.renew()
    between.mode = "pass"
    assert eventually(lambda: not mine.breaker.is_open)
    assert held.slip.renew()
    held.release()
    assert open_store(url).leases().generations("k") == []


def test_a_late_write_of_a_paused_holder_is_refused_everywhere(tmp_path, url):
    check_that_a_late_write_is_refused_everywhere(tmp_path, url)


def test_a_waiter_looks_less_often_the_longer_it_waits(tmp_path, url):
    now = [1000.0]

    def sleep(seconds):
        now[0] += seconds

    root = tmp_path / "b"
    waiting = SharedStore(DirectoryStore(root), open_store(url), outbox=Outbox(root, url), clock=lambda: now[0])
    with (
        redis.Redis.from_url(url) as client,
        acquire(machine(tmp_path, "a", url).leases(), "k", look=lambda: None, lease_s=1e6),
    ):
        client.config_resetstat()
        waits = {"lease_s": 1e6, "deadline_s": 60.0, "clock": lambda: now[0], "sleep": sleep}
        assert acquire(waiting.leases(), "k", look=lambda: waiting.get(problem("k")), **waits) == Busy()
        asked = client.info("commandstats")
    # A minute at a look every 50 ms would be 1200 of each.
    assert 60 < asked["cmdstat_hkeys"]["calls"] < 200
    assert asked["cmdstat_hget"]["calls"] < 400


def test_a_call_that_will_not_wait_is_not_made_to(tmp_path, url):
    store = machine(tmp_path, "b", url)
    with acquire(machine(tmp_path, "a", url).leases(), "k", look=lambda: None):
        slept = []
        for _ in range(50):
            outcome = acquire(store.leases(), "k", look=lambda: None, deadline_s=0.0, sleep=slept.append)
            assert outcome == Busy()
    assert slept == []


def test_a_machine_whose_record_is_refused_uses_the_standing_record(tmp_path, url):
    machine(tmp_path, "b", url).put(record("k", "later holder's", 2))
    machine(tmp_path, "a", url).put(record("k", "mine", 1))
    assert DirectoryStore(tmp_path / "a").get(problem("k")) == record("k", "later holder's", 2)
    assert open_store(url).get(problem("k")) == record("k", "later holder's", 2)


def test_the_same_when_it_could_be_sent_only_later(tmp_path, between, through, url):
    between.mode = "refuse"
    mine = machine(tmp_path, "a", through)
    with pytest.warns(TunebookWarning, match="cannot be used"):
        mine.put(record("k", "mine", 1))
    machine(tmp_path, "b", url).put(record("k", "later holder's", 2))
    between.mode = "pass"
    assert eventually(lambda: DirectoryStore(tmp_path / "a").get(problem("k")).head.config == "later holder's")
    assert open_store(url).get(problem("k")) == record("k", "later holder's", 2)


def test_the_lease_of_a_killed_process_is_taken_over(tmp_path, url):
    holder = start("hold", tmp_path / "a", url=url, key="k", lease_s=600)
    holder.stdout.readline()
    holder.kill()
    holder.communicate()
    held = acquire(machine(tmp_path, "b", url).leases(), problem_id(problem("k")), look=lambda: None, deadline_s=HANG_S)
    assert held.generation == 2
    held.release()


# ----------------------------------------------------------------------------------------------- through the front door


def tuned(store=None, *, name="shared", size=8):
    """Call a kernel that is tuned on first use; return whether this call tuned it."""
    events = []

    @tb.tunable(space=tb.Space(b=[1, 2]), name=name, store=store, on_event=lambda event, **data: events.append(event))
    def kernel(x, *, config):
        return x * 2

    assert (kernel(np.ones(size)) == 2).all()
    return "autotune_finish" in events


def on_machine(monkeypatch, tmp_path, name, url):
    monkeypatch.setenv("TUNEBOOK_HOME", str(tmp_path / name))
    monkeypatch.setenv("TUNEBOOK_REMOTE", url)


def test_with_tunebook_remote_a_second_machine_tunes_nothing(tmp_path, url, monkeypatch):
    on_machine(monkeypatch, tmp_path, "a", url)
    assert tuned()
    on_machine(monkeypatch, tmp_path, "b", url)
    assert not tuned()


def test_a_kernels_own_store_may_be_an_address(tmp_path, url, monkeypatch):
    monkeypatch.setenv("TUNEBOOK_HOME", str(tmp_path / "a"))
    assert tuned(url)
    monkeypatch.setenv("TUNEBOOK_HOME", str(tmp_path / "b"))
    assert not tuned(url)
    assert isinstance(tb.TuneCache("t", "cpu", root=url)._given, type(store_at(url)))


@pytest.mark.promise("server-never-fails-a-call")
@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("mode", ["refuse", "hang", "cut"])
def test_no_call_fails_whatever_the_connection_does_and_there_is_one_warning(
    tmp_path, between, through, monkeypatch, mode
):
    on_machine(monkeypatch, tmp_path, "a", through)
    between.mode = mode
    with pytest.warns(TunebookWarning, match="shared book at redis://"):
        assert tuned(name="spoilt", size=1)
    for size in range(2, 6):
        assert tuned(name="spoilt", size=size), "and no second warning, which would be an error here"
    assert not tuned(name="spoilt", size=1), "the local book has it"


def test_a_connection_that_goes_bad_while_it_is_used_fails_no_call(tmp_path, between, through, monkeypatch):
    on_machine(monkeypatch, tmp_path, "a", through)
    between.mode, between.delay_s = "delay", 0.002
    assert tuned(name="bad", size=1)
    between.mode = "cut"
    with pytest.warns(TunebookWarning, match="shared book at redis://"):
        assert tuned(name="bad", size=2)
    between.mode = "pass"
    between.drop_all()
    assert tuned(name="bad", size=3)


def test_a_server_that_answers_nonsense_fails_no_call(tmp_path, monkeypatch):
    import socket

    with socket.create_server((HOST, 0)) as listening:

        def answer():
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                connection.close()

        threading.Thread(target=answer, daemon=True).start()
        on_machine(monkeypatch, tmp_path, "a", f"redis://{HOST}:{listening.getsockname()[1]}/0")
        with pytest.warns(TunebookWarning, match="cannot be used"):
            assert tuned(name="nonsense")
        listening.shutdown(socket.SHUT_RDWR)


@pytest.mark.promise("no-secrets-shown")
def test_a_wrong_password_is_one_warning_that_does_not_show_it(tmp_path, monkeypatch):
    with redis_server(tmp_path / "redis", password="right") as running:
        on_machine(monkeypatch, tmp_path, "a", running.url.replace("right", "hunter2"))
        with pytest.warns(TunebookWarning, match="password") as caught:
            assert tuned(name="locked out")
    assert "hunter2" not in str(caught[0].message)


def test_tls_with_a_certificate_of_ones_own(tmp_path, monkeypatch):
    with redis_server(tmp_path / "redis", tls=True) as running:
        on_machine(monkeypatch, tmp_path, "a", running.url)
        assert tuned()
        on_machine(monkeypatch, tmp_path, "b", running.url)
        assert not tuned()


def test_with_a_signing_key_a_wrongly_signed_entry_is_tuned_anew(tmp_path, url, monkeypatch):
    on_machine(monkeypatch, tmp_path, "a", url)
    assert tuned()
    monkeypatch.setenv("TUNEBOOK_SIGNING_KEY", "secret")
    on_machine(monkeypatch, tmp_path, "b", url)
    with pytest.warns(TunebookWarning, match="not signed at all"):
        assert tuned()
    on_machine(monkeypatch, tmp_path, "c", url)
    assert not tuned()


@pytest.mark.parametrize("data", ["kept", "lost"])
def test_a_server_that_is_killed_and_restarted_loses_no_local_entry(tmp_path, monkeypatch, data):
    with redis_server(tmp_path / "redis") as running:
        on_machine(monkeypatch, tmp_path, "a", running.url)
        assert tuned(size=1)
        running.restart(keep_data=data == "kept")
        assert not tuned(size=1)
        assert tuned(size=2)
        on_machine(monkeypatch, tmp_path, "b", running.url)
        assert tuned(size=1) is (data == "lost")
        assert not tuned(size=2)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("mysql://host/db", "begins with one of redis://"),
        ("redis://host:port/0", "is not the address of a Redis server"),
        ("s3://", "is not the address of an object store"),
    ],
)
def test_a_wrong_address_is_an_error_with_an_example(monkeypatch, url, says):
    monkeypatch.setenv("TUNEBOOK_REMOTE", url)
    with pytest.raises(DefinitionError, match=says):
        default_book()
    with pytest.raises(DefinitionError, match=says):
        PersistentCache("op", url)


def test_an_address_that_went_through_pathlib_is_an_error_and_no_directory(tmp_path, monkeypatch):
    from pathlib import Path

    monkeypatch.chdir(tmp_path)
    with pytest.raises(DefinitionError, match="has lost a slash"):
        PersistentCache("op", Path("s3://bucket/book"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("url", "module", "extra"), [("redis://host/0", "redis", "redis"), ("s3://bucket/x", "obstore", "object")]
)
def test_a_missing_package_is_an_error_that_names_the_extra(monkeypatch, url, module, extra):
    monkeypatch.setitem(sys.modules, module, None)
    for name in ("_redis", "_object"):
        monkeypatch.delitem(sys.modules, f"tunebook.stores.{name}", raising=False)
    with pytest.raises(MissingDependency, match=rf"pip install 'tunebook\[{extra}\]'"):
        open_store(url)


def test_the_book_is_opened_once_per_process(url, monkeypatch):
    monkeypatch.setenv("TUNEBOOK_REMOTE", url)
    assert default_book() is default_book() is book_before(url)
    monkeypatch.delenv("TUNEBOOK_REMOTE")
    assert default_book() is not book_before(url)
