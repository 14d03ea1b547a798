"""Which decision stands if books differ: the rules of `merge_into`."""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tunebook as tb
from tunebook._base.config_codec import fingerprint_of
from tunebook._base.record_format import Body, Head, Record, identity, merge
from tunebook._base.vocabulary import Measurement, Problem
from tunebook.formats._bundle import Prefer, merge_all, merge_into
from tunebook.stores import MemoryStore

RULES = list(Prefer.__args__)
PROBLEM = Problem("cpu", "op@v0", "k")


def measured(config, seconds, *, when=1.0, environment="here"):
    return Measurement(config, fingerprint_of(config), "code", "hot", environment, samples_s=(seconds,) * 3, when=when)


def entry(config, times=(), *, when=1.0, **head):
    fields = {"checksum": "c", "origin": "tuned"} | head
    provenance = {"when": when} if config is None else {"when": when, "winner": fingerprint_of(config)}
    return Record(
        Head(problem=PROBLEM, config=config, **fields), Body(measurements=tuple(times), provenance=provenance)
    )


configs = st.sampled_from([1, 2, 3])
times = st.builds(
    measured, configs, st.sampled_from([1.0, 2.0, 3.0]), when=st.sampled_from([1.0, 2.0]),
    environment=st.sampled_from(["here", "there"]),
)  # fmt: skip
entries = st.builds(
    entry, st.none() | configs, st.lists(times, max_size=3), when=st.sampled_from([1.0, 2.0, 3.0]),
    generation=st.integers(0, 2), origin=st.sampled_from(["tuned", "tuned", "pinned"]),
)  # fmt: skip
few = st.lists(entries, min_size=1, max_size=4)


@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=40)
@given(books=few)
def test_the_order_of_the_books_does_not_matter(rule, books):
    merged = [merge_all(None, [*order], rule) for order in permutations(books)]
    assert all(each == merged[0] for each in merged)


@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=40)
@given(mine=entries, books=few)
def test_merging_again_changes_nothing(rule, mine, books):
    store = MemoryStore()
    store.put(mine)
    merge_into(store, books, prefer=rule)
    before = store.get(PROBLEM)
    again = merge_into(store, books, prefer=rule)
    assert (again.added, again.changed) == ((), ())
    assert store.get(PROBLEM) == before


@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=40)
@given(mine=entries, books=few)
def test_every_rule_keeps_the_same_measurements_of_all(rule, mine, books):
    found = merge_all(mine, books, rule).body.measurements
    assert found == merge_all(mine, books).body.measurements
    assert {identity(m) for m in found} == {identity(m) for each in (mine, *books) for m in each.body.measurements}


@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=40)
@given(mine=entries, books=few)
def test_a_decision_goes_before_none_and_a_pin_before_a_tuning(rule, mine, books):
    head = merge_all(mine, books, rule).head
    every = [mine, *books]
    assert head.decided == any(each.head.decided for each in every)
    if rule == "mine" and mine.head.decided:
        assert head.config == mine.head.config
    elif any(each.head.decided and each.head.origin == "pinned" for each in every):
        assert head.origin == "pinned"


@settings(max_examples=40)
@given(mine=entries, books=few)
def test_the_default_is_the_rule_of_merging_two_records(mine, books):
    whole = mine
    for each in books:
        whole = merge(whole, each)
    assert merge_all(mine, books) == whole


def by_brute_force(rule, books):
    chosen = [book.head.config for book in books]
    if rule == "newer":
        return {max(books, key=lambda book: book.body.provenance["when"]).head.config}
    if rule == "majority":
        return {config for config in chosen if chosen.count(config) == max(map(chosen.count, chosen))}
    times = {m.config: m.samples_s[0] for m in books[0].body.measurements}
    return {config for config in chosen if times[config] == min(times[each] for each in chosen)}


@pytest.mark.parametrize("rule", ["newer", "faster", "majority"])
@given(
    chosen=st.lists(configs, min_size=1, max_size=5),
    whens=st.permutations(range(5)),
    generations=st.lists(st.integers(0, 3), min_size=5, max_size=5),
    seconds=st.permutations([0.1, 0.2, 0.4]),
)
def test_each_rule_does_what_it_says(rule, chosen, whens, generations, seconds):
    all_times = [measured(config, time) for config, time in zip((1, 2, 3), seconds, strict=True)]
    facts = zip(chosen, whens, generations, strict=False)
    books = [entry(c, all_times, when=float(when), generation=g) for c, when, g in facts]
    assert merge_all(books[0], books[1:], rule).head.config in by_brute_force(rule, books)


def test_faster_looks_at_measurements_of_this_problem_alone():
    together = measured(1, 0.1)._replace(policy="hot/forward/together=1f2e")
    assert merge_all(entry(1, [measured(1, 3.0), together]), [entry(2, [measured(2, 2.0)])], "faster").head.config == 2
    assert merge_all(entry(1, [together]), [entry(2, [measured(2, 9.0)])], "faster").head.config == 2


def test_an_own_choice_stays_at_its_generation_and_only_gets_measurements():
    store = MemoryStore()
    store.put(entry(1, [measured(1, 1.0)]))
    merged = merge_into(store, [entry(2, [measured(2, 0.5)], generation=5, when=9.0)], prefer="mine")
    assert merged.changed == (PROBLEM,)
    kept = store.get(PROBLEM)
    assert (kept.head, len(kept.body.measurements)) == (entry(1).head, 2)
    assert merge_into(store, [entry(2, generation=5)], prefer="mine").same == (PROBLEM,)


def test_an_unknown_rule_is_an_error():
    with pytest.raises(tb.DefinitionError, match="prefer='best'; use one of 'generation', 'newer', 'faster'"):
        merge_into(MemoryStore(), [], prefer="best")


def test_a_store_takes_a_preferred_decision_of_a_lower_generation(tmp_path):
    from tunebook.stores import DirectoryStore

    store = DirectoryStore(tmp_path)
    store.put(entry(1, [measured(1, 2.0)], generation=7))
    merge_into(store, [entry(2, [measured(2, 1.0)])], prefer="faster")
    assert store.get(PROBLEM).head.config == 2
