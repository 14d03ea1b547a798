"""The tests that every store, and every search strategy, must pass."""
# ruff: noqa: S101 - a test kit is made of asserts, and the names of its tests are sentences

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tunebook._base.errors import CodecError, StoreError
from tunebook._base.record_format import MAX_RECORD_BYTES, Body, Head, Record
from tunebook._base.vocabulary import Failure, Json, Measurement, Problem
from tunebook._space.space import Config, Space
from tunebook.search import Observation, Start

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from tunebook.search import Strategy
    from tunebook.stores import Store

AWKWARD_NAMES = (
    "", ".", "..", "/", "a/b", "../../etc/passwd", "~", "tmp", "packs", "quarantine", "leases", "v1", "a|b", "a\0b",
    "a\nb", " ", "Case", "case", "é", "e\u0301", "行列", "\udc80", "CON", "x" * 10_000, "y" * 300, "-rf", "%s%n",
)  # fmt: skip
"""Names of devices, operations and keys that a store must keep apart."""


def example_record(
    device: str = "cpu",
    op: str = "matmul@1",
    call_key: str = "f32[128,128]",
    *,
    config: Json = None,
    generation: int = 0,
) -> Record:
    """Return a record that uses every field; records of equal arguments are equal."""
    chosen: Json = {"block": 64, "order": ["i", "j"], "unroll": True} if config is None else config
    measured = Measurement(chosen, "f1", "c0de", "hot", "python 3.11", samples_s=(1.5e-3, 1.25e-3), when=1.0)
    failure = Failure(kind="compile", message="no such block", expires=2.5)
    failed = measured._replace(config={"block": 0}, fingerprint="f2", samples_s=(), failure=failure, compile_s=0.5)
    problem = Problem(device, op, call_key)
    head = Head(
        problem=problem, config=chosen, checksum="abc", origin="tuned", environment="python 3.11", generation=generation
    )
    return Record(head, Body(measurements=(measured, failed), provenance={"when": 1.0, "host": "here"}))


class ReadOnlyStoreContract:
    """The promises of every store, also of a read-only store."""

    def fill(self, tmp_path: Path, records: Iterable[Record]) -> Store:
        """Return a store with exactly these records."""
        raise NotImplementedError

    def test_a_record_comes_back_equal(self, tmp_path: Path) -> None:
        record = example_record()
        found = self.fill(tmp_path, [record]).get(record.problem)
        assert found == record
        assert found is not None
        assert found.body == record.body

    def test_an_unknown_problem_is_none(self, tmp_path: Path) -> None:
        store = self.fill(tmp_path, [example_record()])
        for other in (example_record(device="gpu"), example_record(op="add@1"), example_record(call_key="f32[1]")):
            assert store.get(other.problem) is None

    def test_an_empty_store_has_nothing(self, tmp_path: Path) -> None:
        store = self.fill(tmp_path, [])
        assert store.get(example_record().problem) is None
        assert list(store.items()) == []

    def test_awkward_names_stay_apart(self, tmp_path: Path) -> None:
        records = [example_record(device=name, op=f"{name}@1", call_key=name, config=name) for name in AWKWARD_NAMES]
        store = self.fill(tmp_path, records)
        for record in records:
            assert store.get(record.problem) == record

    def test_keys_that_join_to_the_same_text_do_not_collide(self, tmp_path: Path) -> None:
        parts = [("a|b", "c", "d"), ("a", "b|c", "d"), ("a", "b", "c|d"), ("a/b", "c", "d"), ("a", "b/c", "d")]
        records = [example_record(*each, config={"index": index}) for index, each in enumerate(parts)]
        store = self.fill(tmp_path, records)
        assert [store.get(record.problem) for record in records] == records

    def test_items_of_one_operation_are_its_alone(self, tmp_path: Path) -> None:
        records = [example_record(op=op) for op in AWKWARD_NAMES]
        store = self.fill(tmp_path, records)
        for record in records:
            assert list(store.items(record.problem.op)) == [record]
        assert list(store.items("another")) == []

    def test_items_yields_every_record_once(self, tmp_path: Path) -> None:
        records = [example_record(op=f"op{n % 3}", call_key=str(n), config=n) for n in range(50)]
        found = list(self.fill(tmp_path, records).items())
        assert sorted(found, key=lambda record: int(record.problem.call_key)) == records

    def test_a_record_without_a_decision_is_kept_and_says_so(self, tmp_path: Path) -> None:
        decided = example_record()
        undecided = Record(replace(decided.head, config=None), decided.body)
        found = self.fill(tmp_path, [undecided]).get(undecided.problem)
        assert found == undecided
        assert found is not None
        assert (found.head.config, found.head.decided, decided.head.decided) == (None, False, True)

    def test_fields_of_a_newer_release_are_kept(self, tmp_path: Path) -> None:
        record = example_record()
        head = replace(record.head, extra={"head_of_tomorrow": [1, {"a": None}]})
        record = Record(head, replace(record.body, extra={"body_of_tomorrow": "x"}))
        found = self.fill(tmp_path, [record]).get(record.problem)
        assert found is not None
        assert found.head.extra == {"head_of_tomorrow": [1, {"a": None}]}
        assert found.body.extra == {"body_of_tomorrow": "x"}

    def test_configurations_keep_their_types(self, tmp_path: Path) -> None:
        nested: Json = {"a": {"b": [1, "|"]}}
        configs: list[Json] = [True, 1, 1.0, "1", [], {}, [None], 1e300, 0.1, -0.0, 2**60, nested, "é\0"]
        records = [example_record(call_key=str(n), config=config) for n, config in enumerate(configs)]
        store = self.fill(tmp_path, records)
        for record in records:
            found = store.get(record.problem)
            assert found is not None
            assert repr(found.head.config) == repr(record.head.config)

    def test_changing_a_returned_record_does_not_change_the_store(self, tmp_path: Path) -> None:
        record = example_record(config={"blocks": [1]})
        store = self.fill(tmp_path, [record])
        found = store.get(record.problem)
        assert found is not None
        assert isinstance(found.head.config, dict)
        found.head.config["blocks"] = "changed"
        assert store.get(record.problem) == example_record(config={"blocks": [1]})

    def test_threads_may_read_together(self, tmp_path: Path) -> None:
        records = [example_record(call_key=str(n), config=n) for n in range(20)]
        store = self.fill(tmp_path, records)
        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(lambda record: store.get(record.problem), records * 10)) == records * 10

    def test_a_store_says_where_it_is(self, tmp_path: Path) -> None:
        assert self.fill(tmp_path, []).where


class StoreContract(ReadOnlyStoreContract):
    """The promises of every store that can be written to.

    A store in memory must return the same store from `open` for the same `tmp_path`.
    """

    def open(self, tmp_path: Path) -> Store:
        """Open the store of a test; called more than once, it opens the same one again."""
        raise NotImplementedError

    def fill(self, tmp_path: Path, records: Iterable[Record]) -> Store:
        """Return a store with exactly these records."""
        store = self.open(tmp_path)
        store.put_many(records)
        return store

    def test_a_put_replaces_an_earlier_one(self, tmp_path: Path) -> None:
        store = self.fill(tmp_path, [example_record(config=1)])
        store.put(example_record(config=2))
        assert list(store.items()) == [example_record(config=2)]

    def test_a_higher_generation_is_not_replaced(self, tmp_path: Path) -> None:
        store = self.open(tmp_path)
        newer = example_record(config="newer", generation=7)
        store.put(newer)
        store.put(example_record(config="late", generation=6))
        store.put_many([example_record(config="late", generation=6)])
        assert store.get(newer.problem) == newer
        again = example_record(config="again", generation=7)
        store.put(again)
        assert store.get(newer.problem) == again

    def test_put_many_keeps_all_of_them(self, tmp_path: Path) -> None:
        records = [example_record(device=f"d{n % 2}", op=f"op{n % 30}", call_key=str(n), config=n) for n in range(100)]
        store = self.open(tmp_path)
        store.put_many(iter(records))
        assert [store.get(record.problem) for record in records] == records

    def test_put_many_without_records_changes_nothing(self, tmp_path: Path) -> None:
        store = self.open(tmp_path)
        store.put_many([])
        assert list(store.items()) == []

    def test_delete_removes_one_and_says_whether_it_was_there(self, tmp_path: Path) -> None:
        gone, stays = example_record(call_key="gone"), example_record(call_key="stays")
        store = self.fill(tmp_path, [gone, stays])
        assert store.delete(gone.problem) is True
        assert store.delete(gone.problem) is False
        assert store.get(gone.problem) is None
        assert list(store.items()) == [stays]

    def test_delete_in_an_empty_store_is_false(self, tmp_path: Path) -> None:
        assert self.open(tmp_path).delete(example_record().problem) is False

    def test_two_openings_keep_both_writes(self, tmp_path: Path) -> None:
        mine, yours = example_record(call_key="mine"), example_record(call_key="yours")
        one, other = self.open(tmp_path), self.open(tmp_path)
        assert one.get(yours.problem) is None
        one.put(mine)
        other.put(yours)
        for store in (one, other, self.open(tmp_path)):
            assert store.get(mine.problem) == mine
            assert store.get(yours.problem) == yours

    def test_an_opening_sees_records_that_another_replaces_and_deletes(self, tmp_path: Path) -> None:
        one, other = self.open(tmp_path), self.open(tmp_path)
        for config in (1, 2, 3):  # texts of equal length: a store must not tell them apart by size alone
            one.put(example_record(config=config))
            assert other.get(example_record().problem) == example_record(config=config)
        one.delete(example_record().problem)
        assert other.get(example_record().problem) is None

    def test_threads_may_write_together(self, tmp_path: Path) -> None:
        store = self.open(tmp_path)
        records = [example_record(call_key=str(n), config=n) for n in range(40)]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(store.put, records))
        assert sorted(store.items(), key=lambda record: int(record.problem.call_key)) == records

    def test_an_invalid_record_is_refused_and_changes_nothing(self, tmp_path: Path) -> None:
        store = self.fill(tmp_path, [example_record(config="before")])
        for config in (float("nan"), "x" * MAX_RECORD_BYTES, object()):
            try:
                store.put(example_record(config=config))  # type: ignore[arg-type] # the last is not JSON, on purpose
            except CodecError:
                continue
            raise AssertionError(f"a {type(config).__name__} that cannot be written was not refused")
        assert list(store.items()) == [example_record(config="before")]
        store.put(example_record(config="after"))
        assert store.get(example_record().problem) == example_record(config="after")

    def test_changing_a_configuration_after_put_does_not_change_the_store(self, tmp_path: Path) -> None:
        config: dict[str, Json] = {"block": 1}
        store = self.fill(tmp_path, [example_record(config=config)])
        config["block"] = 2
        assert store.get(example_record().problem) == example_record(config={"block": 1})

    def test_a_lease_is_held_once(self, tmp_path: Path) -> None:
        board, again = self.open(tmp_path).leases(), self.open(tmp_path).leases()
        if board is None or again is None:
            return
        assert board.create("k.1", b"one") is True
        assert again.create("k.1", b"two") is False
        assert again.read("k.1") == b"one"
        assert again.generations("k") == [1]
        board.remove("k.1")
        assert again.read("k.1") is None


def refuses_writes(store: Store) -> bool:
    """Whether every way of writing to a store raises `StoreError` of kind "read-only"."""
    record = example_record()
    for write in (lambda: store.put(record), lambda: store.put_many([record]), lambda: store.delete(record.problem)):
        try:
            write()
        except StoreError as error:
            if error.kind != "read-only":
                return False
        else:
            return False
    return True


class StrategyContract:
    """The promises of `tunebook.search.Strategy`, as tests.

    They search a space of 231 configurations to its end, which takes a strategy with a model a few seconds.
    """

    def make(self, space: Space, *, seed: int = 0, start: Start = Start()) -> Strategy:  # noqa: B008 - immutable
        """Return a new strategy for a space."""
        raise NotImplementedError

    @staticmethod
    def space() -> Space:
        """Return a space with a constraint, and with axes of several kinds."""
        space = Space(m=[16, 32, 64, 128, 256], n=[16, 32, 64, 128, 256], stages=[1, 2, 3, 4], mode=["a", "b", "c"])
        return space.where(lambda c: c.m * c.n <= 16384)

    @staticmethod
    def seconds_of(c: Any) -> float:
        """Return the time of a configuration: a valley with a ridge, and a mode that only pays with three stages."""
        valley: float = abs(math.log2(c.m / 64)) + abs(math.log2(c.n / 128)) + 0.3 * abs(c.stages - 3)
        return 1e-3 * (1 + valley + (0.5 if (c.mode == "b") != (c.stages == 3) else 0.0))

    @classmethod
    def search(
        cls, strategy: Strategy, trials: int, batch: int = 1, seconds_of: Callable[[Config], float | None] | None = None
    ) -> list[Config]:
        """Run a search in batches, and return its proposals in order."""
        proposed: list[Config] = []
        while len(proposed) < trials:
            found = strategy.propose(min(batch, trials - len(proposed)))
            assert len(found) <= batch, "propose(n) returns at most n configurations"
            if not found:
                break
            proposed += found
            strategy.observe([Observation(c, (seconds_of or cls.seconds_of)(c)) for c in found])
        return proposed

    def test_every_configuration_is_proposed_once_and_nothing_outside_the_space(self) -> None:
        space = self.space()
        proposed = self.search(self.make(space, seed=1), 10_000, batch=7)
        assert len(proposed) == len(set(proposed)) == len(space)
        assert set(proposed) == set(space)

    def test_the_same_seed_gives_the_same_proposals(self) -> None:
        one, other = (self.search(self.make(self.space(), seed=3), 60, batch=4) for _ in range(2))
        assert one == other

    def test_an_observed_configuration_is_not_proposed_again(self) -> None:
        space = self.space()
        known = list(space)[::2]
        strategy = self.make(space)
        strategy.observe([Observation(c, self.seconds_of(c)) for c in known])
        assert not set(self.search(strategy, 10_000)) & set(known)

    def test_the_first_of_the_start_come_first_and_the_last_come_last(self) -> None:
        space = self.space()
        configs = list(space)
        start = Start(first=configs[100:103], last=configs[:5])
        proposed = self.search(self.make(space, start=start), 10_000)
        assert proposed[:3] == configs[100:103]
        assert set(proposed[-5:]) == set(configs[:5])

    def test_failures_invalid_times_and_unknown_configurations_do_no_harm(self) -> None:
        strategy = self.make(self.space())
        unknown = {"m": 17, "n": 16, "stages": 1, "mode": "a"}
        strategy.observe([Observation({"other": 1}, 1.0), Observation(unknown, 1.0)])
        odd_times = {1: None, 2: math.nan, 3: 0.0}
        proposed = self.search(strategy, 100, seconds_of=lambda c: odd_times.get(c.stages, self.seconds_of(c)))
        assert len(proposed) == 100
