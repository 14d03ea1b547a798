"""Redis as a book: the contract, the rule of generations, leases, faults; against a real server."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import partial

import pytest
from servers import HOST, proxy, redis_server
from shared_checks import (
    DATABASES,
    PLANTED,
    check_that_a_planted_slip_keeps_nobody_waiting,
    check_that_a_wrongly_signed_record_is_refused,
    check_that_one_thread_makes_the_slip,
    check_that_slips_behave_as_those_in_files,
    check_that_the_highest_generation_stands,
    database_of,
)

from tunebook._base.errors import DefinitionError, StoreError, TunebookWarning
from tunebook._base.record_format import Record
from tunebook.fleet._agreement.board import RedisBoard
from tunebook.stores import open_store, problem_id
from tunebook.testing import StoreContract, example_record

redis = pytest.importorskip("redis")

from tunebook.stores._redis import RedisStore  # noqa: E402 - it needs the package


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with redis_server(tmp_path_factory.mktemp("redis"), databases=DATABASES) as running:
        yield running


@pytest.fixture
def url(server, tmp_path):
    return database_of(server, tmp_path)


@pytest.fixture
def client(url):
    with redis.Redis.from_url(url) as opened:
        yield opened


class TestRedisStore(StoreContract):
    @pytest.fixture(autouse=True)
    def _server(self, server):
        self.server = server

    def open(self, tmp_path):
        return RedisStore(database_of(self.server, tmp_path))


class TestSignedRedisStore(TestRedisStore):
    def open(self, tmp_path):
        return RedisStore(database_of(self.server, tmp_path), key=b"secret")


def record_key(record):
    return f"tunebook:v1:record:{problem_id(record.problem)}"


def test_the_bytes_in_the_server_equal_the_bytes_of_every_other_store(url, client):
    RedisStore(url).put(example_record())
    assert client.hget(record_key(example_record()), "record") == example_record().to_bytes()


def test_every_key_begins_with_the_version_so_that_another_release_can_live_beside(url, client):
    store = RedisStore(url)
    store.put(example_record())
    store.leases().create("k.1", b"x")
    assert {key.rpartition(b":")[0] for key in client.scan_iter()} == {
        b"tunebook:v1:record",
        b"tunebook:v1:op",
        b"tunebook:v1:lease",
    }


def test_generations_are_compared_exactly_beyond_the_53_bits_of_a_lua_number(url):
    store = RedisStore(url)
    newer = example_record(config="newer", generation=2**62 + 1)
    store.put(newer)
    assert store.offer(example_record(config="late", generation=2**62)) == newer
    assert store.get(newer.problem) == newer


def test_of_many_offers_at_once_the_highest_generation_stands(url):
    check_that_the_highest_generation_stands(lambda: RedisStore(url), offers=64)


@pytest.mark.parametrize("damage", [b"", b"nonsense", b"x" * 9_000_000], ids=["empty", "nonsense", "huge"])
def test_a_damaged_record_is_a_miss_one_warning_and_is_replaced_whatever_its_generation(url, client, damage):
    store = RedisStore(url)
    client.hset(record_key(example_record()), mapping={"generation": "9" * 19, "record": damage})
    with pytest.warns(TunebookWarning, match="unreadable record in redis://"):
        assert store.get(example_record().problem) is None
    store.put(example_record())
    assert store.get(example_record().problem) == example_record()


def test_a_record_of_another_problem_in_its_place_is_a_miss(url, client):
    other = example_record(op="other@1")
    client.hset(record_key(example_record()), mapping={"generation": "0", "record": other.to_bytes()})
    with pytest.warns(TunebookWarning, match="belongs elsewhere"):
        assert RedisStore(url).get(example_record().problem) is None


@pytest.mark.promise("signed-only")
@pytest.mark.parametrize("written_with", [None, b"another"], ids=["unsigned", "another key"])
def test_a_wrongly_signed_record_is_refused_with_one_warning_and_can_be_replaced(url, written_with):
    check_that_a_wrongly_signed_record_is_refused(
        partial(RedisStore, url), written_with, again=lambda store: list(store.items())
    )


def test_a_machine_without_a_key_reads_signed_records(url):
    RedisStore(url, key=b"secret").put(example_record())
    assert RedisStore(url).get(example_record().problem) == example_record()


def test_an_altered_signed_record_is_refused(url, client):
    RedisStore(url, key=b"secret").put(example_record())
    signed = client.hget(record_key(example_record()), "record")
    forged = example_record(config="forged").to_bytes() + signed.split(b"\n", 2)[2]
    client.hset(record_key(example_record()), "record", forged)
    with pytest.warns(TunebookWarning, match="signed with another key, or was altered"):
        assert RedisStore(url, key=b"secret").get(example_record().problem) is None


def test_listing_goes_by_index_and_in_steps_that_do_not_block_the_server(url, client):
    store = RedisStore(url)
    store.put_many(example_record(op=f"op{n % 2}", call_key=str(n)) for n in range(600))
    client.config_resetstat()
    assert len(list(store.items("op1"))) == 300
    used = client.info("commandstats")
    assert {"cmdstat_keys", "cmdstat_smembers", "cmdstat_scan"}.isdisjoint(used)
    assert used["cmdstat_sscan"]["calls"] >= 1
    assert used["cmdstat_hget"]["calls"] == 300


def test_a_deleted_record_leaves_nothing_behind(url, client):
    store = RedisStore(url)
    store.put(example_record())
    store.delete(example_record().problem)
    assert client.keys() == []


def test_slips_behave_like_slips_in_files(url):
    check_that_slips_behave_as_those_in_files(RedisStore(url).leases())


def test_slips_that_nobody_came_back_for_do_not_stay_for_ever(url, client):
    board = RedisStore(url).leases()
    board.create("k.1", b"x")
    client.expire("tunebook:v1:lease:k", 5)
    board.rewrite("k.1", b"y")
    assert 3600 < client.ttl("tunebook:v1:lease:k") <= 86_400


@pytest.mark.promise("planted-leases")
@pytest.mark.parametrize("generation", PLANTED)
def test_a_planted_slip_keeps_nobody_waiting(url, client, generation):
    client.hset("tunebook:v1:lease:k", generation, b"x")
    check_that_a_planted_slip_keeps_nobody_waiting(RedisStore(url).leases(), "k")


def test_of_32_threads_one_makes_the_slip(url):
    check_that_one_thread_makes_the_slip(RedisStore(url).leases(), 32)


def test_a_store_that_nobody_answers_raises_and_names_the_place_without_the_password():
    store = RedisStore(f"redis://:hunter2@{HOST}:1/0", timeout_s=0.3)
    with pytest.raises(StoreError, match=rf"the shared book at redis://{HOST}:1/0 cannot be used") as caught:
        store.get(example_record().problem)
    assert caught.value.kind == "remote"
    assert "hunter2" not in f"{caught.value} {store.where}"


def test_nothing_is_tried_twice_and_the_timeouts_add_up_to_the_given_one(server):
    with proxy(server.port) as between:
        between.mode = "refuse"
        store = RedisStore(f"redis://{HOST}:{between.port}/0", timeout_s=0.3)
        with pytest.raises(StoreError, match="cannot be used"):
            store.get(example_record().problem)
        assert between.accepted == 1
        options = store._client.connection_pool.connection_kwargs
        assert options["socket_connect_timeout"] + options["socket_timeout"] <= 0.3
        assert options["retry"]._retries == 0


def test_a_store_reconnects_to_a_server_that_was_restarted(tmp_path):
    with redis_server(tmp_path) as server:
        store = RedisStore(server.url)
        store.put(example_record())
        server.restart(keep_data=True)
        assert store.get(example_record().problem) == example_record()
        server.restart(keep_data=False)
        assert store.get(example_record().problem) is None
        store.put(example_record())
        assert store.get(example_record().problem) == example_record()


def test_an_answer_cut_in_the_middle_is_an_error_and_never_half_a_record(server):
    with proxy(server.port) as between:
        store = RedisStore(f"redis://{HOST}:{between.port}/0", timeout_s=2.0)
        record = Record(replace(example_record().head, config="x" * 50_000))
        store.put(record)
        between.mode = "cut"
        with pytest.raises(StoreError, match="cannot be used"):
            store.get(record.problem)
        between.mode = "pass"
        assert store.get(record.problem) == record


def test_a_password_and_tls_with_a_certificate_of_ones_own(tmp_path):
    with redis_server(tmp_path, password="pass word", tls=True) as server:
        store = RedisStore(server.url)
        store.put(example_record())
        assert store.get(example_record().problem) == example_record()
        with pytest.raises(StoreError, match=r"(?i)certificate"):
            RedisStore(server.url.partition("?")[0]).get(example_record().problem)
        with pytest.raises(StoreError, match="password"):
            RedisStore(server.url.replace("pass%20word", "wrong")).get(example_record().problem)


@pytest.mark.promise("tls-host-name")
@pytest.mark.parametrize(
    ("url", "checked"),
    [
        ("rediss://host:6380/0", True),
        ("valkeys://host", True),
        ("rediss://host?ssl_cert_reqs=required&ssl_ca_certs=/ca.pem", True),
        ("rediss://host?ssl_cert_reqs=optional", True),
        # Not for a certificate that nothing checks, as the user asked: Python refuses the two together.
        ("rediss://host?ssl_cert_reqs=none", False),
        ("redis://host", None),
    ],
)
def test_tls_checks_the_name_of_the_host_with_every_release_of_redis_py(url, checked):
    boards = RedisBoard(url, job="a", rank=0, world=1)
    for client in (RedisStore(url)._client, boards._quick, boards._blocking):
        # redis-py 5 has False for a default, and newer ones True.
        assert client.connection_pool.connection_kwargs.get("ssl_check_hostname") is checked


@pytest.mark.parametrize(
    "url",
    [
        "redis://host:port/0",
        "redis://host:6379/0?no_such_option=1",
        "redis://host:6379/0?socket_timeout=long",
        "redis://host:6379/0?decode_responses=true",
    ],
)
def test_an_address_that_cannot_be_right_is_an_error_at_opening(url):
    with pytest.raises(DefinitionError, match="is not the address of a Redis server"):
        open_store(url)


@pytest.mark.promise("no-secrets-shown")
@pytest.mark.parametrize("password", ["hun/ter2", "hun@ter2", "hun:ter2/"])
def test_no_part_of_a_password_is_in_the_error_about_an_address(password):
    with pytest.raises(DefinitionError, match="%2F") as caught:
        open_store(f"redis://:{password}@host:port/0")
    assert "hun" not in str(caught.value)
    assert "ter2" not in str(caught.value)


@pytest.mark.parametrize("scheme", ["redis", "valkey", "REDIS"])
def test_the_names_of_the_scheme(server, tmp_path, scheme):
    store = open_store(database_of(server, tmp_path).replace("redis:", f"{scheme}:"))
    store.put(example_record())
    assert store.get(example_record().problem) == example_record()


def test_a_store_may_be_carried_over_a_fork(url):
    import os

    store = RedisStore(url)
    store.put(example_record())
    child = os.fork()
    if child == 0:
        with suppress(BaseException):
            store.put(example_record(call_key="from the child"))
            os._exit(0 if store.get(example_record().problem) == example_record() else 1)
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert len(list(store.items())) == 2


@pytest.mark.promise("odd-remote-keys")
def test_a_key_of_another_type_costs_its_own_problem_only_until_it_is_written_again(url, client):
    store, ours, other = RedisStore(url), example_record(generation=3), example_record(op="other", generation=3)
    store.put_many([ours, other])
    identifier = problem_id(ours.problem)
    for key in (f"tunebook:v1:record:{identifier}", f"tunebook:v1:lease:{identifier}"):
        client.delete(key)
        client.set(key, "of another type")
    with pytest.raises(StoreError, match="WRONGTYPE") as error:
        store.get(ours.problem)
    assert error.value.kind == "wrong-type"
    with pytest.warns(TunebookWarning, match="WRONGTYPE"):
        assert list(store.items()) == [other]
    assert store.leases().generations(identifier) == []
    assert store.leases().create(f"{identifier}.1", b"slip")
    assert store.leases().generations(identifier) == [1]
    store.put(ours)
    assert store.get(ours.problem) == ours


def test_an_index_of_another_type_is_made_anew(url, client):
    store, record = RedisStore(url), example_record()
    store.put(record)
    (index,) = client.keys("tunebook:v1:op:*")
    client.delete(index)
    client.set(index, "of another type")
    store.put(record)
    assert list(store.items(record.problem.op)) == [record]
