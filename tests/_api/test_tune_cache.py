"""TuneCache: hits, unchecked entries, pending, misses."""

from __future__ import annotations

import math

import pytest

import tunebook as tb
from tunebook import (
    AutotuneError,
    AutotuneOutcome,
    AutotuneResult,
    Hit,
    Match,
    Miss,
    NoMatch,
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
    cache.mark_pending("k")
    assert cache.fastest("k") == Pending()
    cache.cache_insert("k", 2)
    assert cache.fastest("k") == Hit(2)


def test_memory_inserts_are_not_written_down(root):
    TuneCache("matmul", "gpu0", root).cache_insert("k", 2)
    assert TuneCache("matmul", "gpu0", root).fastest("k") == Miss()


def test_an_entry_from_disk_is_unchecked_until_its_checksum_is_validated_once(root):
    TuneCache("matmul", "gpu0", root).persistent_cache_insert("k", "sum", 2, RESULTS)
    cache = TuneCache("matmul", "gpu0", root)
    assert cache.fastest("k") == Unchecked()
    assert cache.fastest("k") == Unchecked()
    assert cache.validate_checksum("k", "sum") == Match()
    assert cache.fastest("k") == Hit(2)
    assert cache.validate_checksum("k", "another") == Match(), "validated once"


def test_another_checksum_makes_it_a_miss(root):
    TuneCache("matmul", "gpu0", root).persistent_cache_insert("k", "sum", 2, RESULTS)
    cache = TuneCache("matmul", "gpu0", root)
    assert cache.validate_checksum("k", "edited") == NoMatch()
    assert cache.fastest("k") == Miss()
    cache.persistent_cache_insert("k", "edited", 1, RESULTS)
    assert cache.fastest("k") == Hit(1)


def test_validating_an_unknown_key_returns_none(root):
    cache = TuneCache("matmul", "gpu0", root)
    assert cache.validate_checksum("k", "sum") is None
    cache.mark_pending("k")
    assert cache.validate_checksum("k", "sum") is None


def test_results_and_errors_are_written_down(root):
    TuneCache("matmul", "gpu0", root).persistent_cache_insert("k", "sum", 2, RESULTS)
    naive, failed, tiled = TuneCache("matmul", "gpu0", root).results("k")
    assert naive == RESULTS[0]
    assert str(failed.outcome) == "out of shared memory"
    assert tiled.outcome.computation[0] == 0.1
    assert math.isnan(tiled.outcome.computation[1])


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
    with pytest.warns(tb.TunebookWarning, match="1 is kept"):
        cache.persistent_cache_insert("k", "s", 2, [])
    assert cache.fastest("k") == Hit(1)
    again = TuneCache("matmul", "gpu0", root)
    again.validate_checksum("k", "s")
    assert again.fastest("k") == Hit(1)


def test_two_that_agree_or_are_of_two_processes_do_not_warn(root):
    one, two = TuneCache("matmul", "gpu0", root), TuneCache("matmul", "gpu0", root)
    one.persistent_cache_insert("k", "s", 1, [])
    one.persistent_cache_insert("k", "s", 1, [])
    two.persistent_cache_insert("k", "s", 2, [])
    assert len(list(TuneCache("matmul", "gpu0", root)._store.items())) == 1


def test_a_key_may_be_any_storable_value(root):
    cache = TuneCache("matmul", "gpu0", root)
    cache.cache_insert((1, "f32"), 3)
    assert cache.fastest((1, "f32")) == Hit(3)
    assert cache.fastest([1, "f32"]) == Miss()


@pytest.mark.parametrize("index", [-1, True, 1.0, None, "0"])
def test_an_invalid_index_is_refused(root, index):
    with pytest.raises(tb.DefinitionError, match="fastest_index"):
        TuneCache("matmul", "gpu0", root).cache_insert("k", index)
