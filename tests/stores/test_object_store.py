"""A bucket as a book: the contract, the rule of generations, leases, faults; against a real S3 server."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from functools import partial

import pytest
from limits import HANG_S
from servers import HOST, proxy, s3_server, s3_store
from shared_checks import (
    PLANTED,
    check_that_a_late_write_is_refused_everywhere,
    check_that_a_planted_slip_keeps_nobody_waiting,
    check_that_a_wrongly_signed_record_is_refused,
    check_that_each_key_is_tuned_once,
    check_that_killed_tuners_cost_their_own_work_alone,
    check_that_one_thread_makes_the_slip,
    check_that_slips_behave_as_those_in_files,
    check_that_the_highest_generation_stands,
    eventually,
    machine,
    number_of,
)
from shared_processes import problem, record

from tunebook._base.errors import DefinitionError, StoreError, TunebookWarning
from tunebook.stores import open_store
from tunebook.testing import StoreContract, example_record

obstore = pytest.importorskip("obstore")

from tunebook.stores._object import ObjectStore  # noqa: E402 - it needs the package

BUCKET = "books"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with s3_server(tmp_path_factory.mktemp("s3")) as running:
        obstore.put(s3_store(running.endpoint, BUCKET), "made-with-this", b"")
        yield running


@pytest.fixture(autouse=True)
def _environment(server, monkeypatch):
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)


def url_for(tmp_path):
    """A place of its own for each test."""
    return f"s3://{BUCKET}/{number_of(tmp_path)}"


@pytest.fixture
def url(tmp_path):
    return url_for(tmp_path)


@pytest.fixture
def bucket(server, url):
    return s3_store(server.endpoint, BUCKET, url.rpartition("/")[2])


class TestObjectStore(StoreContract):
    def open(self, tmp_path):
        return ObjectStore(url_for(tmp_path))


class TestSignedObjectStore(TestObjectStore):
    def open(self, tmp_path):
        return ObjectStore(url_for(tmp_path), key=b"secret")


def paths_in(bucket):
    return [entry["path"] for page in obstore.list(bucket) for entry in page]


def only_object(bucket):
    (path,) = paths_in(bucket)
    return path, bytes(obstore.get(bucket, path).bytes())


def test_the_bytes_in_the_bucket_equal_the_bytes_of_every_other_store(url, bucket):
    ObjectStore(url).put(example_record())
    path, content = only_object(bucket)
    assert path.startswith("v1/records/matmul-1-")
    assert content == example_record().to_bytes()


def test_of_many_offers_at_once_the_highest_generation_stands(url):
    check_that_the_highest_generation_stands(lambda: ObjectStore(url, timeout_s=HANG_S), offers=32)


def test_a_late_record_is_refused_and_the_one_that_stands_is_returned(url):
    newer = example_record(config="newer", generation=2)
    ObjectStore(url).put(newer)
    assert ObjectStore(url).offer(example_record(config="late", generation=1)) == newer


def test_an_object_that_changed_since_it_was_read_is_not_replaced(url):
    objects = ObjectStore(url)._objects
    assert objects.put("x", b"1")
    seen = objects.read("x")
    assert objects.put("x", b"2", seen.version)
    assert not objects.put("x", b"3", seen.version)
    assert objects.read("x").data == b"2"


@pytest.mark.parametrize("damage", [b"", b"nonsense", b"x" * 17_000_000], ids=["empty", "nonsense", "huge"])
def test_a_damaged_record_is_a_miss_one_warning_and_is_replaced(url, bucket, damage):
    store = ObjectStore(url)
    store.put(example_record(generation=7))
    path, _ = only_object(bucket)
    obstore.put(bucket, path, damage)
    with pytest.warns(TunebookWarning, match="unreadable record in s3://"):
        assert store.get(example_record().problem) is None
    store.put(example_record())
    assert store.get(example_record().problem) == example_record()


@pytest.mark.promise("signed-only")
@pytest.mark.parametrize("written_with", [None, b"another"], ids=["unsigned", "another key"])
def test_a_wrongly_signed_record_is_refused_with_one_warning_and_can_be_replaced(url, written_with):
    check_that_a_wrongly_signed_record_is_refused(
        partial(ObjectStore, url), written_with, again=lambda store: store.get(example_record().problem)
    )


def test_slips_behave_like_slips_in_files(url):
    check_that_slips_behave_as_those_in_files(ObjectStore(url).leases())


@pytest.mark.promise("planted-leases")
@pytest.mark.parametrize("generation", PLANTED)
def test_a_planted_slip_keeps_nobody_waiting(url, generation, server):
    path = f"{url.rpartition('/')[2]}/v1/leases/k/{generation}"
    obstore.put(s3_store(server.endpoint, BUCKET), path, b"x")
    check_that_a_planted_slip_keeps_nobody_waiting(ObjectStore(url).leases(), "k")


def test_of_16_threads_one_makes_the_slip(url):
    # Patiently: for one key, this server makes some of 16 wait for seconds (see tests/servers.py).
    check_that_one_thread_makes_the_slip(ObjectStore(url, timeout_s=HANG_S).leases(), 16)


def test_a_store_that_nobody_answers_raises_and_names_the_place(monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{HOST}:1")
    with pytest.raises(StoreError, match="the shared book at s3://books/x cannot be used") as caught:
        ObjectStore("s3://books/x", timeout_s=0.3).get(example_record().problem)
    assert caught.value.kind == "remote"
    assert "\n" not in str(caught.value), "obstore appends a page of internals"


def test_nothing_is_tried_twice(server, monkeypatch):
    with proxy(server.port) as between:
        between.mode = "refuse"
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{HOST}:{between.port}")
        with pytest.raises(StoreError, match="cannot be used"):
            ObjectStore("s3://books/x", timeout_s=0.3).get(example_record().problem)
        assert between.accepted == 1


def test_a_wrong_secret_is_an_error_that_says_so(monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(StoreError, match="cannot be used"):
        ObjectStore("s3://books/x").put(example_record())


@pytest.mark.parametrize("url", ["s3://", "s3:///x", "az://container/path"])
def test_an_address_that_cannot_be_right_is_an_error_at_opening(url):
    with pytest.raises(DefinitionError, match="is not the address of an object store"):
        open_store(url)


def test_a_forked_child_of_a_process_that_used_it_is_told_instead_of_hanging(url):
    script = textwrap.dedent("""
        import os, sys
        from tunebook._base.errors import StoreError
        from tunebook.stores._object import ObjectStore
        from tunebook.testing import example_record
        store, fresh = ObjectStore(sys.argv[1]), ObjectStore(sys.argv[1])
        if sys.argv[2] == "used":
            store.get(example_record().problem)
        if os.fork() == 0:
            for each in (store, fresh):
                try:
                    each.get(example_record().problem)
                    print("answered")
                except StoreError as error:
                    print("spawn" in str(error))
            sys.stdout.flush()
            os._exit(0)
        os.wait()
        """)
    outcomes = {}
    for state in ("used", "unused"):
        done = subprocess.run(
            [sys.executable, "-c", script, url, state], capture_output=True, text=True, check=True, timeout=HANG_S
        )
        outcomes[state] = done.stdout.split()
    assert outcomes == {"used": ["True", "True"], "unused": ["answered", "answered"]}
    assert os.environ["AWS_ENDPOINT_URL"], "or the child would have asked somebody else"


@pytest.mark.promise("fleet-tunes-once")
@pytest.mark.parametrize(
    ("processes", "keys"),
    [pytest.param(4, 12, id="a few"), pytest.param(16, 200, id="many", marks=pytest.mark.slow)],
)
def test_each_key_is_tuned_once_among_machines(tmp_path, url, processes, keys):
    check_that_each_key_is_tuned_once(tmp_path, url, processes=processes, keys=keys)


@pytest.mark.parametrize(
    ("processes", "kills"), [pytest.param(3, 2, id="a few"), pytest.param(8, 20, id="many", marks=pytest.mark.slow)]
)
def test_killed_tuners_cost_their_own_work_alone(tmp_path, url, processes, kills):
    check_that_killed_tuners_cost_their_own_work_alone(tmp_path, url, processes=processes, kills=kills)


# -------------------------------------------------------------------------------------------- behind a local book


@pytest.mark.promise("server-never-fails-a-call")
def test_a_hung_bucket_costs_one_call_0_3_s_and_later_ones_nothing(tmp_path, server, url, monkeypatch):
    monkeypatch.setattr("tunebook.stores._shared.PATIENT_S", HANG_S)  # how long the client waits that a call waits for
    monkeypatch.setattr("tunebook.stores._remote._PAUSES_S", (2 * HANG_S, 2 * HANG_S))
    with proxy(server.port) as between:
        between.mode = "hang"
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{HOST}:{between.port}")
        store = machine(tmp_path, "a", url)
        began = time.perf_counter()
        with pytest.warns(TunebookWarning, match=r"did not answer within 0.29 s.*Calls go on with the local book"):
            assert store.get(problem("k0")) is None
        for n in range(1, 50):
            assert store.get(problem(f"k{n}")) is None
        assert time.perf_counter() - began < HANG_S / 4, "nobody waited for the client; bench/shared.py: 0.30 s"
        assert between.accepted <= 1


def test_records_tuned_while_the_bucket_was_away_are_sent_when_it_is_back(tmp_path, server, url, monkeypatch):
    with proxy(server.port) as between:
        between.mode = "refuse"
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{HOST}:{between.port}")
        store = machine(tmp_path, "a", url)
        with pytest.warns(TunebookWarning, match="are sent when it answers again"):
            store.put(record("k", 1))
        between.mode = "pass"
        assert eventually(lambda: ObjectStore(url).get(problem("k")) == record("k", 1))


def test_a_late_write_of_a_paused_holder_is_refused_everywhere(tmp_path, url):
    check_that_a_late_write_is_refused_everywhere(tmp_path, url)
