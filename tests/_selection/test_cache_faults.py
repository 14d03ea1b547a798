"""The cache never fails a call: records that are too large, stores and hosts with faults, failures that pass."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
from kernels import FakeClock, PretendKernel, Tiles, fake_tuner, invocation

import tunebook as tb
from tunebook._base.errors import CodecError, TunebookWarning
from tunebook._base.record_format import MAX_RECORD_BYTES, Record
from tunebook._base.vocabulary import Failure
from tunebook._measure.stopwatch import Trial
from tunebook._memo.answer_memo import BoundedDict
from tunebook._selection import trusted_entries
from tunebook._selection.persistent_cache import PersistentCache
from tunebook._tuning import job
from tunebook.testing import example_record


def make(costs, path=None, **options):
    clock = FakeClock()
    persistent = None if path is None else PersistentCache("pretend", path, cfg_type=Tiles)
    chain = tb.ConfigSelectorChain(tb.ConfigCache(), tuner=fake_tuner(clock), persistent=persistent, **options)
    return chain, PretendKernel(clock, costs)


# ------------------------------------------------------------------------------------------------ records too large


@pytest.mark.promise("cache-never-fails-a-call")
def test_long_messages_of_many_failures_are_cut_and_the_choice_is_kept(tmp_path):
    costs = {Tiles(m): RuntimeError(f"first {'x' * 30_000} last") for m in range(2, 402)}
    chain, kernel = make({Tiles(1): 0.1, **costs}, tmp_path)
    assert chain.choose(invocation(kernel, 1), kernel) == Tiles(1)
    record = chain.persistent.read(kernel.problem(invocation(kernel, 1)))
    messages = [m.failure.message for m in record.body.measurements if m.failure is not None]
    assert len(messages) == 400
    assert all(len(text) < 4200 for text in messages)
    assert all("first" in text and "left out" in text and text.endswith("last") for text in messages)


def test_an_entry_over_the_limit_loses_its_oldest_measurements_and_not_the_winner():
    winner = example_record().body.measurements[0]._replace(fingerprint="winner", when=0.0)
    others = [winner._replace(fingerprint=f"{age}", when=100.0 - age, config="x" * (1 << 20)) for age in range(10)]
    body = example_record().body
    body = type(body)(measurements=(*others, winner), provenance={"winner": "winner"})
    record = Record(example_record().head, body)
    with pytest.raises(CodecError, match="over the limit"):
        record.to_bytes()
    kept = record.fitted()
    assert [m.fingerprint for m in kept.body.measurements] == ["winner", "0", "1", "2", "3", "4", "5", "6"]
    assert len(kept.to_bytes()) <= MAX_RECORD_BYTES
    assert example_record().fitted() == example_record()


def test_a_choice_that_is_too_large_for_any_entry_is_used_after_one_warning(tmp_path):
    large = "x" * (MAX_RECORD_BYTES + 1)

    @tb.tunable(space=[{"name": large}], check=False, store=tmp_path)
    def kernel(x, *, config):
        return len(config.name)

    with pytest.warns(TunebookWarning, match="over the limit") as warned:
        assert kernel(1) == len(large)
    assert len(warned) == 1
    with pytest.raises(CodecError, match="over the limit"):
        PersistentCache("op", tmp_path).put("d", "o", "k", large)


# -------------------------------------------------------------------------------------------------- faults of stores


class FaultyStore:
    """A store of an author's own, which raises plain errors."""

    where = "faulty"

    def __init__(self, error):
        self.error = error

    def fail(self, *_):
        raise self.error

    get = put = items = leases = fail


FAULTS = [OSError("gone"), TimeoutError("late"), ValueError("embedded null byte"), CodecError("damaged")]


@pytest.mark.promise("cache-never-fails-a-call")
@pytest.mark.parametrize("error", FAULTS, ids=lambda error: type(error).__name__)
def test_any_fault_of_a_store_is_one_warning_and_the_call_works(error):
    cache = PersistentCache("pretend", cfg_type=Tiles)
    cache._given = FaultyStore(error)
    chain = tb.ConfigSelectorChain(tb.ConfigCache(), tuner=fake_tuner(clock := FakeClock()), persistent=cache)
    kernel = PretendKernel(clock, {Tiles(1): 0.1, Tiles(2): 0.2})
    with pytest.warns(TunebookWarning, match=str(error)) as warned:
        assert chain.choose(invocation(kernel, 1), kernel) == Tiles(1)
    assert len(warned) == 1


def test_a_wrong_setting_is_still_an_error(monkeypatch):
    monkeypatch.setenv("TUNEBOOK_REMOTE", "carrier-pigeon://host")
    _, kernel = make({Tiles(1): 0.1})
    chain = tb.ConfigSelectorChain(tb.ConfigCache(), tuner=fake_tuner(FakeClock()), persistent=PersistentCache("op"))
    with pytest.raises(tb.DefinitionError, match="unknown scheme"):
        chain.choose(invocation(kernel, 1), kernel)


def test_a_home_of_a_user_that_does_not_exist_is_one_warning(monkeypatch):
    monkeypatch.setenv("TUNEBOOK_HOME", "~no-such-user/book")
    with pytest.warns(TunebookWarning, match="no-such-user.*stay in memory") as warned:
        assert PersistentCache("op").get("d", "o", "k") is None
    assert len(warned) == 1


class UnprintableError(Exception):
    def __str__(self):
        return self.args[7]


@pytest.mark.promise("cache-never-fails-a-call")
def test_a_candidate_whose_error_cannot_be_printed_fails_alone(tmp_path):
    chain, kernel = make({Tiles(1): UnprintableError(), Tiles(2): 0.1}, tmp_path)
    assert chain.choose(invocation(kernel, 1), kernel) == Tiles(2)
    chain, kernel = make({Tiles(1): UnprintableError()}, tmp_path / "other")
    with pytest.raises(tb.NoConfig, match="UnprintableError: UnprintableError"):
        chain.choose(invocation(kernel, 1), kernel)


# -------------------------------------------------------------------------------------------------- failures that pass


@pytest.mark.promise("failures-keep-no-arrays")
def test_failures_keep_no_arrays_alive():
    @tb.tunable(space=[{"s": 1}, {"s": 2}], check=False, store=False)
    def kernel(x, *, config):
        doubled = x * 2
        raise ValueError(doubled)

    references = []
    for size in range(8, 12):
        array = np.ones(size)
        references.append(weakref.ref(array))
        for _ in range(2):  # the second call gets the remembered failure
            with pytest.raises(tb.NoConfig, match="all 2 candidates failed") as caught:
                kernel(array)
        assert isinstance(caught.value.__cause__, tb.TuningFailed)
        del array, caught
    gc.collect()
    assert [reference() for reference in references] == [None] * 4


def _failing_on(host, monkeypatch, kind):
    """Return the failure of a candidate as a host writes it."""
    monkeypatch.setattr(job, "host_name", lambda: host)
    candidates = job.CandidateSet(job.Conditions(), "policy", None, now_s=lambda: 1000.0)
    name = candidates.admit({"s": 1})
    return candidates.record(name, Trial(failure=Failure(kind, "said")))


@pytest.mark.promise("failures-do-not-travel")
@pytest.mark.parametrize(
    ("kind", "believed_here", "believed_elsewhere", "minutes"),
    [
        ("compile", True, True, 7 * 24 * 60),
        ("wrong-result", True, True, 7 * 24 * 60),
        ("nan", True, True, 7 * 24 * 60),
        ("launch", True, False, 10),
        ("timeout", True, False, 10),
        ("crash", True, False, 10),
        ("memory", False, False, 10),
    ],
)
def test_only_failures_of_the_code_itself_are_believed_on_other_hosts(
    kind, believed_here, believed_elsewhere, minutes, monkeypatch
):
    failed = _failing_on("a", monkeypatch, kind)
    assert failed.failure.expires == 1000.0 + 60 * minutes
    assert job.is_believed(failed) is believed_here
    monkeypatch.setattr(job, "host_name", lambda: "b")
    assert job.is_believed(failed) is believed_elsewhere


@pytest.mark.promise("failures-do-not-travel")
@pytest.mark.parametrize(("error", "tries"), [(MemoryError("busy"), True), (tb.CompileError("no such option"), False)])
def test_a_machine_tries_again_what_failed_on_another_for_a_passing_reason(error, tries, tmp_path, monkeypatch):
    busy, kernel = make({Tiles(1): error, Tiles(2): error}, tmp_path)
    with pytest.raises(tb.NoConfig, match="all 2 candidates failed"):
        busy.choose(invocation(kernel, 1), kernel)
    for module in (job, trusted_entries):
        monkeypatch.setattr(module, "host_name", lambda: "another host")
    healthy, again = make({Tiles(1): 0.1, Tiles(2): 0.2}, tmp_path)
    if tries:
        assert healthy.choose(invocation(again, 1), again) == Tiles(1)
        return
    with pytest.raises(tb.NoConfig, match="failed before"):
        healthy.choose(invocation(again, 1), again)
    assert again.runs == []


def test_a_process_tries_again_minutes_after_its_memory_ran_out():
    chain, kernel = make({Tiles(1): MemoryError("busy")})
    now_s = [0.0]
    chain._autotune._clock_s = lambda: now_s[0]
    for _ in range(2):
        with pytest.raises(tb.NoConfig, match="busy"):
            chain.choose(invocation(kernel, 1), kernel)
    assert len(kernel.runs) == 1
    now_s[0] = 601.0
    kernel.costs = {Tiles(1): 0.1}
    assert chain.choose(invocation(kernel, 1), kernel) == Tiles(1)


# ------------------------------------------------------------------------------------------------------------- bounds


def test_a_full_dict_drops_its_oldest_quarter():
    bounded = BoundedDict(8)
    for number in range(9):
        bounded[number] = number
    assert list(bounded) == [2, 3, 4, 5, 6, 7, 8]
    bounded[8] = 0
    assert len(bounded) == 7


@pytest.mark.promise("memory-bounded")
def test_a_problem_that_memory_dropped_comes_back_from_the_book(tmp_path):
    clock = FakeClock()
    persistent = PersistentCache("pretend", tmp_path, cfg_type=Tiles)
    events = []
    chain = tb.ConfigSelectorChain(
        tb.ConfigCache(capacity=4),
        tuner=fake_tuner(clock),
        persistent=persistent,
        on_event=lambda event, **data: events.append((event, data.get("level"))),
    )
    kernel = PretendKernel(clock, {Tiles(1): 0.1, Tiles(2): 0.2})
    for size in range(6):
        assert chain.choose(invocation(kernel, size), kernel) == Tiles(1)
    assert chain.cache.size() <= 4
    chain._autotune._decided.clear()  # it has a bound of its own
    runs = len(kernel.runs)
    assert chain.choose(invocation(kernel, 0), kernel) == Tiles(1)
    assert (len(kernel.runs), events[-1]) == (runs, ("cache_hit", "persistent"))
