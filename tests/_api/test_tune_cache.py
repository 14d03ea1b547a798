"""TuneCache: hits, unchecked entries, pending, misses."""

from __future__ import annotations

import math
import multiprocessing
import threading
import typing

import pytest
from limits import HANG_S

import tunebook as tb
from tunebook import (
    AutotuneError,
    AutotuneOutcome,
    AutotuneResult,
    Hit,
    Miss,
    Pending,
    TuneCache,
    Unchecked,
)

RESULTS = [
    AutotuneResult.success(AutotuneOutcome("naive", 0, (0.5, 0.6))),
    AutotuneResult.error(AutotuneError("out of shared memory")),
    AutotuneResult.success(AutotuneOutcome("tiled", 2, (0.1, math.nan))),
]


@pytest.fixture(params=["book", "book.json"])
def root(request, tmp_path):
    return tmp_path / request.param


def test_nothing_known_is_a_miss(root):
    assert TuneCache("matmul", "gpu0", root).fastest("k") == Miss()


def test_pending_then_hit(root):
    cache = TuneCache("matmul", "gpu0", root)
    assert cache.mark_pending("k") is True
    assert cache.mark_pending("k") is False
    assert cache.fastest("k") == Pending()
    cache.cache_insert("k", 2)
    assert cache.fastest("k") == Hit(2)
    assert cache.mark_pending("k") is False, "the result is there"


def test_memory_inserts_are_not_written_down(root):
    TuneCache("matmul", "gpu0", root).cache_insert("k", 2)
    assert TuneCache("matmul", "gpu0", root).fastest("k") == Miss()


def test_an_entry_from_disk_is_unchecked_until_its_checksum_is_validated_once(root):
    TuneCache("matmul", "gpu0", root).persistent_cache_insert("k", "sum", 2, RESULTS)
    cache = TuneCache("matmul", "gpu0", root)
    assert cache.fastest("k") == Unchecked()
    assert cache.fastest("k") == Unchecked()
    assert cache.validate_checksum("k", "sum") == Hit(2)
    assert cache.fastest("k") == Hit(2)
    assert cache.validate_checksum("k", "another") == Hit(2), "validated once"


def test_another_checksum_makes_it_a_miss(root):
    TuneCache("matmul", "gpu0", root).persistent_cache_insert("k", "sum", 2, RESULTS)
    cache = TuneCache("matmul", "gpu0", root)
    assert cache.validate_checksum("k", "edited") == Miss()
    assert cache.fastest("k") == Miss()
    assert cache.validate_checksum("k", "sum") == Miss(), "a later checksum does not revive it"
    assert cache.mark_pending("k")
    cache.cache_insert("k", 1)
    assert cache.fastest("k") == Hit(1)


def test_validating_an_unknown_or_pending_key_changes_nothing(root):
    cache = TuneCache("matmul", "gpu0", root)
    assert cache.validate_checksum("k", "sum") == Miss()
    cache.mark_pending("k")
    assert cache.validate_checksum("k", "sum") == Pending()


def test_two_versions_of_a_program_keep_both_entries(root):
    TuneCache("matmul", "gpu0", root).persistent_cache_insert("k", "sum1", 1, RESULTS[:1])
    TuneCache("matmul", "gpu0", root).persistent_cache_insert("k", "sum2", 2, RESULTS)
    for checksum, expected, results in (("sum1", Hit(1), 1), ("sum2", Hit(2), 3), ("sum3", Miss(), 0)):
        cache = TuneCache("matmul", "gpu0", root)
        assert cache.fastest("k") == Unchecked()
        assert cache.validate_checksum("k", checksum) == expected
        assert len(cache.results("k", checksum)) == results
    assert TuneCache("matmul", "gpu0", root).load() == 1, "one key"


def test_a_record_without_versions_is_still_read(root):
    written = TuneCache("matmul", "gpu0", root)
    written.persistent_cache_insert("k", "sum", 2, RESULTS)
    (version,) = written._store.items("tune-cache-versions/matmul")
    written._store.delete(version.problem)  # as an older tunebook left it
    cache = TuneCache("matmul", "gpu0", root)
    assert cache.fastest("k") == Unchecked()
    assert cache.validate_checksum("k", "sum") == Hit(2)
    assert cache.results("k")[1:2] == RESULTS[1:2]
    other = TuneCache("matmul", "gpu0", root)
    assert other.validate_checksum("k", "edited") == Miss()


def test_writing_to_disk_leaves_memory_alone_except_for_a_claim(root):
    cache = TuneCache("matmul", "gpu0", root)
    cache.cache_insert("k", 1)
    cache.persistent_cache_insert("k", "sum", 2, [])
    assert cache.fastest("k") == Hit(1)
    assert TuneCache("matmul", "gpu0", root).validate_checksum("k", "sum") == Hit(2)
    cache.persistent_cache_insert("unknown", "sum", 3, [])
    assert cache.fastest("unknown") == Unchecked()
    cache.mark_pending("claimed")
    cache.persistent_cache_insert("claimed", "sum", 4, [])
    assert cache.fastest("claimed") == Hit(4)


def test_results_and_errors_are_written_down(root):
    TuneCache("matmul", "gpu0", root).persistent_cache_insert("k", "sum", 2, RESULTS)
    naive, failed, tiled = TuneCache("matmul", "gpu0", root).results("k")
    assert (naive, failed) == (RESULTS[0], RESULTS[1])
    assert str(failed.outcome) == "out of shared memory"
    assert tiled.outcome.computation[0] == 0.1
    assert math.isnan(tiled.outcome.computation[1])


def test_outcomes_are_compared_by_content_and_all_errors_are_equal():
    one, other = AutotuneResult.success(AutotuneOutcome("a", 0)), AutotuneResult.success(AutotuneOutcome("a", 1))
    failed, failed_too = AutotuneResult.error(AutotuneError("x")), AutotuneResult.error(AutotuneError("y"))
    assert one == AutotuneResult.success(AutotuneOutcome("a", 0))
    assert failed == failed_too
    assert len({one, other, failed, failed_too}) == 3
    assert one != AutotuneOutcome("a", 0)


def test_loading_is_logged(root, caplog):
    TuneCache("matmul", "gpu0", root).persistent_cache_insert("a", "s", 1, [])
    with caplog.at_level("INFO", logger="tunebook"):
        TuneCache("matmul", "gpu0", root).load()
    assert [record.name for record in caplog.records] == ["tunebook", "tunebook"]
    assert "read 1 entries" in caplog.text


def test_load_reads_everything_of_this_name_and_device(root):
    TuneCache("matmul", "gpu0", root).persistent_cache_insert("a", "s", 1, [])
    TuneCache("matmul", "gpu0", root).persistent_cache_insert("b", "s", 1, [])
    TuneCache("matmul", "gpu1", root).persistent_cache_insert("c", "s", 1, [])
    TuneCache("softmax", "gpu0", root).persistent_cache_insert("d", "s", 1, [])
    cache = TuneCache("matmul", "gpu0", root)
    assert cache.load() == 2
    assert [type(cache.fastest(k)) for k in "abcd"] == [Unchecked, Unchecked, Miss, Miss]


def test_devices_and_names_are_apart(root):
    TuneCache("matmul", "gpu0", root).persistent_cache_insert("k", "s", 1, [])
    assert TuneCache("matmul", "gpu1", root).fastest("k") == Miss()
    assert TuneCache("softmax", "gpu0", root).fastest("k") == Miss()


def test_two_that_disagree_in_one_process_keep_the_first_and_warn(root):
    cache = TuneCache("matmul", "gpu0", root)
    cache.persistent_cache_insert("k", "s", 1, [])
    with pytest.warns(tb.TunebookWarning, match="was fastest with 1 and now with 2; 1 is kept"):
        cache.persistent_cache_insert("k", "s", 2, [])
    assert TuneCache("matmul", "gpu0", root).validate_checksum("k", "s") == Hit(1)


def test_two_that_agree_or_are_of_two_processes_do_not_warn(root):
    one, two = TuneCache("matmul", "gpu0", root), TuneCache("matmul", "gpu0", root)
    one.persistent_cache_insert("k", "s", 1, [])
    one.persistent_cache_insert("k", "s", 1, [])
    two.persistent_cache_insert("k", "s", 2, [])
    assert TuneCache("matmul", "gpu0", root).validate_checksum("k", "s") == Hit(1), "the first one is kept"


def test_a_key_may_be_any_storable_value(root):
    cache = TuneCache("matmul", "gpu0", root)
    cache.cache_insert((1, "f32"), 3)
    assert cache.fastest((1, "f32")) == Hit(3)
    assert cache.fastest([1, "f32"]) == Miss()


@pytest.mark.parametrize("index", [-1, True, 1.0, None, "0"])
def test_an_invalid_index_is_refused(root, index):
    with pytest.raises(tb.DefinitionError, match="fastest_index"):
        TuneCache("matmul", "gpu0", root).cache_insert("k", index)


def test_the_unions_are_public():
    assert set(typing.get_args(tb.TuneCacheResult)) == {Hit, Unchecked, Pending, Miss}
    assert set(typing.get_args(tb.ChecksumState)) == {tb.Match, tb.NoMatch, tb.ToBeVerified}
    assert set(typing.get_args(tb.CacheEntry)) == {tb.Done, Pending}


# ------------------------------------------------------------------------------------------- one measures, others wait


def run_at_once(threads, work):
    """Run a function in several threads that begin together, and return their results."""
    barrier, results = threading.Barrier(threads), []

    def run():
        barrier.wait()
        results.append(work())

    running = [threading.Thread(target=run) for _ in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(HANG_S)
    return results


def fastest_of(cache, key, measured):
    """Return the index of a key as the reference's callers do; `measured` notes who measures."""
    while True:
        match cache.fastest(key):
            case Hit(index):
                return index
            case Pending() as pending:
                assert pending.wait(HANG_S)
            case Unchecked():
                cache.validate_checksum(key, "sum")
            case Miss():
                if cache.mark_pending(key):
                    measured.append(key)
                    cache.cache_insert(key, 3)
                    cache.persistent_cache_insert(key, "sum", 3, [])


def test_eight_threads_measure_each_of_200_keys_once(tmp_path):
    cache = TuneCache("matmul", "gpu0", tmp_path)
    for round_ in range(200):
        measured = []
        assert run_at_once(8, lambda: fastest_of(cache, f"k{round_}", measured)) == [3] * 8  # noqa: B023 - run in its round
        assert measured == [f"k{round_}"]


def test_a_thread_that_waits_is_woken_by_the_result(root):
    cache = TuneCache("matmul", "gpu0", root)
    cache.mark_pending("k")
    pending = cache.fastest("k")
    assert pending.wait(0.0) is False
    found = []
    waiter = threading.Thread(target=lambda: found.append((pending.wait(HANG_S), cache.fastest("k"))))
    waiter.start()
    cache.cache_insert("k", 2)
    waiter.join(HANG_S)
    assert found == [(True, Hit(2))]


def test_a_claim_that_is_given_up_goes_to_another_caller(root):
    cache = TuneCache("matmul", "gpu0", root)
    cache.mark_pending("k")
    pending = cache.fastest("k")
    cache.clear_pending("k")
    assert pending.wait(0.0)
    assert cache.fastest("k") == Miss()
    assert cache.mark_pending("k")


def test_an_interrupt_while_a_key_is_claimed_leaves_it_free(root, monkeypatch):
    cache = TuneCache("matmul", "gpu0", root)

    def interrupt(*_args, **_options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(tb._api.tune_cache, "acquire", interrupt)
        with pytest.raises(KeyboardInterrupt):
            cache.mark_pending("k")
    assert cache.fastest("k") == Miss()
    assert cache.mark_pending("k")


def test_a_claim_counts_for_other_processes_that_share_the_store(root):
    one, two = TuneCache("matmul", "gpu0", root), TuneCache("matmul", "gpu0", root)
    assert one.mark_pending("k")
    assert two.mark_pending("k") is False
    pending = two.fastest("k")
    assert pending == Pending()
    assert pending.wait(0.0) is False
    one.cache_insert("k", 1)
    assert two.fastest("k") == Pending(), "not on disk yet"
    one.persistent_cache_insert("k", "sum", 1, [])
    assert pending.wait(HANG_S)
    assert two.fastest("k") == Unchecked()
    assert two.validate_checksum("k", "sum") == Hit(1)


def test_a_claim_ends_by_itself_if_the_result_is_never_written_to_disk(root, monkeypatch):
    monkeypatch.setattr(tb._api.tune_cache, "_GRACE_S", 0.0)
    one, two = TuneCache("matmul", "gpu0", root), TuneCache("matmul", "gpu0", root)
    one.mark_pending("k")
    two.mark_pending("k")
    pending = two.fastest("k")
    one.cache_insert("k", 1)
    assert pending.wait(HANG_S)
    assert two.fastest("k") == Miss()


def test_a_claim_that_another_process_gives_up_is_free(root):
    one, two = TuneCache("matmul", "gpu0", root), TuneCache("matmul", "gpu0", root)
    one.mark_pending("k")
    two.mark_pending("k")
    pending = two.fastest("k")
    one.clear_pending("k")
    assert pending.wait(HANG_S)
    assert two.fastest("k") == Miss()
    assert two.mark_pending("k")


def test_a_version_does_not_wait_for_the_entry_of_another_version(root):
    TuneCache("matmul", "gpu0", root).persistent_cache_insert("k", "old", 1, [])
    one, two = TuneCache("matmul", "gpu0", root), TuneCache("matmul", "gpu0", root)
    for cache in (one, two):
        assert cache.validate_checksum("k", "new") == Miss()
    assert one.mark_pending("k")
    assert two.mark_pending("k") is False
    assert two.fastest("k") == Pending()
    one.persistent_cache_insert("k", "new", 2, [])
    assert two.fastest("k") == Unchecked()
    assert two.validate_checksum("k", "new") == Hit(2)


def claim_and_die(root):
    assert TuneCache("matmul", "gpu0", root).mark_pending("k")


def test_the_claim_of_a_process_that_has_ended_is_free(root):
    process = multiprocessing.get_context("spawn").Process(target=claim_and_die, args=(root,))
    process.start()
    process.join(HANG_S)
    assert process.exitcode == 0
    cache = TuneCache("matmul", "gpu0", root)
    assert cache.mark_pending("k")


@pytest.mark.filterwarnings("ignore:.*fork")  # JAX and Python 3.12 warn of forks in processes with threads
def test_a_forked_child_does_not_wait_for_a_thread_that_it_does_not_have(root):
    cache = TuneCache("matmul", "gpu0", root)
    cache.mark_pending("k")

    def child(found):
        found.put(repr(cache.fastest("k")))
        found.put(cache.fastest("k").wait(0.0))

    context = multiprocessing.get_context("fork")
    found = context.Queue()
    process = context.Process(target=child, args=(found,))
    process.start()
    assert [found.get(timeout=HANG_S), found.get(timeout=HANG_S)] == ["Pending()", False]
    process.join(HANG_S)
