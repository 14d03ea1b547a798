"""The attributes of a selector and of a policy: they can be read and set, and setting them works."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
from kernels import FakeClock, PretendKernel, Tiles, fake_tuner, invocation, note_in

import tunebook as tb

FAST, SLOW, GUESS = Tiles(64), Tiles(16), Tiles(32)
COSTS = {SLOW: 0.5, FAST: 0.001, GUESS: 0.1}


def make(clock=None, **options):
    clock = clock or FakeClock()
    options.setdefault("tuner", fake_tuner(clock))
    return tb.ConfigSelectorChain(tb.ConfigCache(), **options), PretendKernel(clock, COSTS, heuristic=GUESS)


class LastCandidate:
    """A tuner of another library."""

    def autotune(self, make_fn, args, kwargs, candidates):
        return [*candidates][-1]


def test_a_selector_of_cache_and_policy_tunes():
    selector, kernel = make(tuner=None, policy=tb.AutotunePolicy())
    assert isinstance(selector.tuner, tb.Tuner)
    events = []
    selector.on_event = note_in(events)
    assert selector.choose(invocation(kernel, 1), kernel) in COSTS  # the real clock sees no difference between them
    assert [event for event, _ in events if event.startswith("autotune")] == ["autotune_start", "autotune_finish"]


def test_without_a_tuner_nothing_is_tuned_by_itself():
    selector, kernel = make(tuner=False)
    assert selector.tuner is None
    assert selector.choose(invocation(kernel, 1), kernel) == GUESS
    assert kernel.runs == []


def test_a_tunable_function_without_a_tuner_tunes_nothing():
    @tb.tunable(space=[{"a": 1}, {"a": 2}], heuristic={"a": 2}, store=False, tuner=False)
    def f(x, *, config):
        return config.a

    assert f(1) == 2
    assert "no tuner given" in str(f.explain(1))


@pytest.mark.parametrize("wrong", [True, tb.Tuner, "tuner", 3], ids=str)
def test_an_object_that_cannot_tune_is_refused(wrong):
    with pytest.raises(tb.DefinitionError, match=r"invalid tuner=.*False for none"):
        make(tuner=wrong)
    selector, _ = make()
    with pytest.raises(tb.DefinitionError, match=r"invalid tuner="):
        selector.tuner = wrong


def test_settings_are_as_given():
    listener, tuner, cache, policy = print, LastCandidate(), tb.ConfigCache(), tb.AutotunePolicy(validate_backward=True)
    book = tb.PersistentCache("x", "unused.json")
    selector = tb.ConfigSelectorChain(cache, policy, tuner, book, False, listener, False)
    assert (selector.cache, selector.policy, selector.tuner, selector.persistent) == (cache, policy, tuner, book)
    assert (selector.persist_autotune, selector.on_event, selector.forbid_reautotune) == (False, listener, False)
    plain = tb.ConfigSelectorChain(cache)
    assert (plain.persistent, plain.on_event, plain.persist_autotune, plain.forbid_reautotune) == (
        None,
        None,
        True,
        True,
    )


def test_a_tuner_that_is_set_tunes_the_next_miss():
    selector, kernel = make(tuner=False)
    selector.choose(invocation(kernel, 1), kernel)
    selector.tuner = LastCandidate()
    assert selector.choose(invocation(kernel, 1), kernel) == [*COSTS][-1]
    selector.tuner = False
    assert selector.choose(invocation(kernel, 2), kernel) == GUESS
    selector.tuner = None
    assert isinstance(selector.tuner, tb.Tuner)


def test_a_listener_that_is_set_takes_the_place_of_the_first_one():
    first, second, added = [], [], []
    selector, kernel = make(on_event=note_in(first))
    selector.listen(note_in(added))
    selector.on_event = note_in(second)
    selector.choose(invocation(kernel, 1), kernel)
    assert (first, len(second), len(added)) == ([], 2, 2)
    selector.on_event = None
    selector.choose(invocation(kernel, 1), kernel)
    assert (len(second), len(added)) == (2, 3)
    with pytest.raises(tb.DefinitionError, match="invalid on_event=3"):
        selector.on_event = 3


def test_a_listener_that_is_set_hears_calls_that_were_answered_by_the_hot_path():
    @tb.tunable(space=[{"a": 1}], heuristic={"a": 1}, store=False, policy=tb.AutotunePolicy(allow_autotune=False))
    def f(x, *, config):
        return config.a

    heard = []
    for _ in range(3):
        f(1)
    f.selector.on_event = lambda event, **data: heard.append((event, data["platform"], data["method"]))
    for _ in range(3):
        f(1)
    assert heard == [("heuristics", "cpu", None)] * 3


def test_whether_results_are_written_can_be_set(tmp_path):
    book = tb.PersistentCache("pretend", tmp_path, cfg_type=Tiles)
    selector, kernel = make(persistent=book, persist_autotune=False)
    one, two = invocation(kernel, 1), invocation(kernel, 2)
    selector.choose(one, kernel)
    assert book.get(*kernel.problem(one)) is None
    selector.persist_autotune = True
    selector.choose(two, kernel)
    assert book.get(*kernel.problem(two)) == FAST


def test_another_book_and_another_cache_can_be_set(tmp_path):
    first, second = (tb.PersistentCache("pretend", tmp_path / name, cfg_type=Tiles) for name in "ab")
    selector, kernel = make(persistent=first)
    inv = invocation(kernel, 1)
    second.put(*kernel.problem(inv), SLOW)
    assert selector.choose(inv, kernel) == FAST
    selector.forbid_reautotune = False
    selector.persistent = second
    selector.cache = tb.ConfigCache()
    assert selector.choose(inv, kernel) == SLOW
    assert selector.persistent is second
    assert selector.cache.size() == 1


def test_tuning_again_can_be_allowed():
    selector, kernel = make()
    inv = invocation(kernel, 1)
    selector.choose(inv, kernel)
    runs = len(kernel.runs)
    selector.cache.clear()
    selector.choose(inv, kernel)
    assert len(kernel.runs) == runs
    selector.cache.clear()
    selector.forbid_reautotune = False
    selector.choose(inv, kernel)
    assert len(kernel.runs) > runs


@pytest.mark.parametrize(
    ("name", "near"), [("on_evnt", "on_event"), ("tunr", "tuner"), ("forbid_retune", "forbid_reautotune")]
)
def test_a_misspelt_setting_is_an_error_that_names_the_right_one(name, near):
    selector, _ = make()
    with pytest.raises(AttributeError, match=f"unknown attribute of a selector {name!r}; did you mean {near!r}"):
        setattr(selector, name, None)


def test_a_subclass_may_have_attributes_of_its_own():
    class Named(tb.ConfigSelectorChain):
        pass

    selector = Named(tb.ConfigCache())
    selector.title = "mine"
    assert selector.title == "mine"


def test_a_selector_may_be_annotated_with_configurations_and_outputs():
    for kind in (tb.ConfigSelectorChain[Tiles, float], tb.ConfigSelectorChain[Tiles], tb.ConfigSelectorChain[Any, Any]):
        assert isinstance(kind(tb.ConfigCache()), tb.ConfigSelectorChain)


def test_events_name_the_platform_and_the_method():
    events = []
    selector, kernel = make(on_event=note_in(events))
    selector.choose(invocation(kernel, 1), kernel)
    selector.policy.allow_autotune = False
    selector.choose(invocation(kernel, 2), kernel)
    selector.policy.allow_heuristics = False
    with pytest.raises(RuntimeError, match="no configuration"):
        selector.choose(invocation(kernel, 3), kernel)
    facts = dict(events)
    for event in ("autotune_start", "autotune_finish", "heuristics"):
        assert (facts[event]["platform"], facts[event]["method"]) == ("cpu", None)
    assert facts["error"]["reason"] == "no_config"


# ------------------------------------------------------------------------------------------------------------ policies


def test_a_policy_that_is_assigned_to_counts_from_the_next_call_on():
    policy = tb.AutotunePolicy(allow_autotune=False)

    @tb.tunable(space=[{"a": 1}], heuristic={"a": 1}, store=False, policy=policy)
    def f(x, *, config):
        return config.a

    for _ in range(3):
        assert f(1) == 1  # and so the hot path has the answer
    policy.allow_heuristics = False
    with pytest.raises(tb.NoConfig, match="allow_heuristics is False"):
        f(1)
    f.selector.policy.allow_heuristics = True
    assert (f(1), policy.allow_heuristics) == (1, True)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("cache_miss_fallback", "tune", "invalid cache_miss_fallback='tune'"),
        ("alow_autotune", True, "did you mean 'allow_autotune'"),
    ],
)
def test_a_policy_refuses_wrong_names_and_values_and_stays_as_it_was(name, value, message):
    policy = tb.AutotunePolicy()
    with pytest.raises(tb.DefinitionError, match=message):
        setattr(policy, name, value)
    assert policy == tb.AutotunePolicy()


def test_the_policy_of_a_block_is_not_assigned_to_because_the_block_would_forget_it():
    selector, _ = make()
    with tb.policy_override(selector, allow_autotune=False):
        with pytest.raises(AttributeError, match=r"write policy_override\(selector, allow_heuristics=False\)"):
            selector.policy.allow_heuristics = False
        assert selector.policy == tb.AutotunePolicy(allow_autotune=False)


def test_making_or_copying_a_policy_forgets_no_answers():
    before = tb._memo.answer_memo.MEMO.epoch
    policy = tb.AutotunePolicy(validate_backward=True)
    assert copy.copy(policy) == pickle.loads(pickle.dumps(policy)) == policy
    assert hash(policy) == hash(copy.copy(policy))
    assert tb._memo.answer_memo.MEMO.epoch == before


# -------------------------------------------------------------------------------------------------------------- blocks


def test_blocks_are_classes_whose_objects_a_with_statement_names():
    selector, _ = make()
    mapping = {("d", "o", "k"): 1}
    with tb.overlay_cache(mapping) as overlay, tb.policy_override(selector, allow_autotune=False) as override:
        assert isinstance(overlay, tb.overlay_cache)
        assert overlay.mapping is mapping
        assert overlay.token is not None
        assert isinstance(override, tb.policy_override)
        assert (override.selector, dict(override.updates)) == (selector, {"allow_autotune": False})
    assert overlay.token is None
    with tb.forward_autotune_only() as forward:
        assert isinstance(forward, tb.forward_autotune_only)


def test_a_cache_itself_does_not_look_at_overlays():
    cache = tb.ConfigCache()
    cache.put("dev1", "op1", "key1", "original_config")
    with tb.overlay_cache({("dev1", "op1", "key1"): "override_config"}):
        assert cache.get("dev1", "op1", "key1") == "original_config"
