"""Names and values are checked where they are written: options, `config=`, `overlay(...)`, `heuristic=`."""

from __future__ import annotations

import re
import traceback
from dataclasses import dataclass

import pytest

import tunebook as tb

SPACE = tb.Space(block=[16, 32, 64], inplace=[False, True])


def kernel(**options):
    options = {"space": SPACE, "heuristic": {"block": 32, "inplace": True}, "store": False, "name": "mm", **options}

    @tb.tunable(**options)
    def matmul(n, *, config):
        return config

    return matmul


def says(*parts):
    return "(?s)" + ".*".join(parts)


WRONG = [
    ({"blok": 64}, ["config=", "unknown axis 'blok'; did you mean 'block'", "Valid: block, inplace"]),
    ({"block": 48}, ["block=48 is not in the space; it has 16, 32, 64", "pass a tunebook.Config"]),
    ({"block": 16.0}, ["block=16.0 is not in the space; it has 16"]),
    ({"block": [16]}, [r"block=\[16\]|write a tuple"]),
    (5, ["config=5 is not a configuration; write {'block': ..., 'inplace': ...}"]),
    ("fast", ["config='fast' is not a configuration"]),
]


@pytest.mark.parametrize(("config", "parts"), WRONG)
def test_a_wrong_config_of_a_call_is_named_before_the_kernel_runs(config, parts):
    with pytest.raises(tb.DefinitionError, match=says(*parts)):
        kernel()(1, config=config)


@pytest.mark.parametrize(("config", "parts"), WRONG[:3])
def test_an_overlay_is_checked_where_it_is_written(config, parts):
    with pytest.raises(tb.DefinitionError, match=says(*parts).replace("config=", "overlay=")):
        kernel().overlay(**config)


def test_the_rest_of_a_part_comes_from_the_heuristic():
    matmul = kernel()
    assert matmul(1, config={"block": 64}) == tb.Config(block=64, inplace=True)
    with matmul.overlay(inplace=False):
        assert matmul(1) == tb.Config(block=32, inplace=False)
        assert matmul.explain(1).selection.config == tb.Config(block=32, inplace=False)


def test_the_rest_of_a_part_comes_from_a_heuristic_that_depends_on_the_call():
    matmul = kernel(heuristic=lambda n: {"block": 16 if n < 10 else 64, "inplace": True})
    assert matmul(1, config={"inplace": False}) == tb.Config(block=16, inplace=False)
    with matmul.overlay(inplace=False):
        assert [matmul(n).block for n in (1, 100)] == [16, 64]


def test_without_a_heuristic_a_part_is_refused():
    with pytest.raises(tb.DefinitionError, match=says("inplace is missing", "no heuristic=")):
        kernel(heuristic=None)(1, config={"block": 64})


def test_a_config_object_may_have_values_outside_the_space_but_no_unknown_names():
    matmul = kernel()
    assert matmul(1, config=tb.Config(block=48, inplace=False)).block == 48
    with pytest.raises(tb.DefinitionError, match="did you mean 'block'"):
        matmul(1, config=tb.Config(blok=48))


def test_a_constraint_that_refuses_the_whole_is_named():
    matmul = kernel(space=SPACE.where(lambda c: not c.inplace or c.block < 64))
    with pytest.raises(tb.DefinitionError, match=r"the constraint .* refuses it"):
        matmul(1, config={"block": 64})


def test_lists_and_choices_are_checked_too():
    listed = kernel(space=[{"block": 16}, {"block": 64}], heuristic={"block": 16})
    with pytest.raises(tb.DefinitionError, match="did you mean 'block'"):
        listed(1, config={"blok": 16})
    with pytest.raises(tb.DefinitionError, match="block=32 is not in the space; it has 16, 64"):
        listed(1, config={"block": 32})
    ways = tb.tunable(tb.choice(numpy=lambda n: n, scipy=lambda n: n), name="ways", store=False)
    assert ways(3, config={"way": "scipy"}) == 3
    with pytest.raises(tb.DefinitionError, match="unknown value 'scypi'; did you mean 'scipy'"):
        ways(3, config={"way": "scypi"})


def test_configurations_of_another_class_are_taken_as_they_are():
    @dataclass(frozen=True)
    class Tile:
        m: int

    matmul = kernel(space=[Tile(1), Tile(2)], heuristic=Tile(1))
    assert matmul(1, config=Tile(7)) == Tile(7)
    assert kernel(space=[1, 2], heuristic=1)(1, config=7) == 7
    anything = kernel(space=lambda n: [{"block": n}], heuristic=None)
    assert anything(1, config={"other": 7}) == tb.Config(other=7)


def test_a_heuristic_has_the_names_of_the_space_and_may_have_other_values():
    with pytest.raises(tb.DefinitionError, match=r"heuristic=.*unknown axis 'blok'; did you mean 'block'"):
        kernel(heuristic={"blok": 1, "inplace": True})
    with pytest.raises(tb.DefinitionError, match=r"heuristic=.*inplace is missing"):
        kernel(heuristic={"block": 16})
    with pytest.warns(tb.TunebookWarning, match="block=48 is not in the space"):
        assert kernel(heuristic={"block": 48, "inplace": True}, tuner=False)(1).block == 48
    with pytest.raises(tb.DefinitionError, match="did you mean 'block'"):
        kernel(heuristic=lambda n: {"blok": 16, "inplace": True}, tuner=False)(1)


EMPTY = [
    ([], "'mm': the space is empty, so every call runs with heuristic={'block': 16}"),
    (
        tb.Space(block=[16, 32]).where(lambda c: c.block > 64),
        "'mm': `where` leaves out all 2 combinations of the space",
    ),
]


@pytest.mark.parametrize(("space", "message"), EMPTY)
def test_a_space_without_candidates_is_what_the_warning_is_about(space, message):
    matmul = kernel(space=space, heuristic={"block": 16}, tuner=False)
    with pytest.warns(tb.TunebookWarning, match=says(message)) as caught:
        assert matmul(1) == tb.Config(block=16)
    assert len(caught) == 1


@pytest.mark.parametrize("heuristic", [{"tile": [1, 2]}, lambda n: {"tile": [1, 2]}], ids=["dict", "function"])
def test_a_list_in_a_heuristic_is_the_same_error_as_in_a_call(heuristic):
    with pytest.raises(tb.DefinitionError, match=r"heuristic={'tile': \[1, 2\]}: .*write a tuple"):
        kernel(space=tb.Space(tile=[(1, 2), (3, 4)]), heuristic=heuristic)(1)


OUTSIDE = [
    ({}, {"block": 48, "inplace": True}, "block=48 is not in the space; it has 16, 32, 64"),
    ({"space": tb.Space(way=["numpy", "scipy"])}, {"way": "scypi"}, "unknown value 'scypi'; did you mean 'scipy'"),
    ({"space": SPACE.where(lambda c: c.block < 64)}, {"block": 64, "inplace": True}, r"the constraint .* refuses it"),
    ({"space": [{"a": 1, "b": 2}, {"a": 2, "b": 1}]}, {"a": 1, "b": 1}, "no candidate has these values together"),
]


@pytest.mark.parametrize("given", ["dict", "function"])
@pytest.mark.parametrize(("options", "heuristic", "message"), OUTSIDE)
def test_a_heuristic_outside_the_space_warns_once_and_says_what_happens(given, options, heuristic, message):
    forms = {"dict": heuristic, "function": lambda n: dict(heuristic)}
    matmul = kernel(**options, heuristic=forms[given], tuner=False)
    with pytest.warns(tb.TunebookWarning, match=says("'mm': heuristic=", message, "It is used all the same")) as caught:
        assert [matmul(n) for n in range(3)] == [tb.Config(**heuristic)] * 3
    assert len(caught) == 1
    assert "test_written_names.py" in caught[0].filename


@pytest.mark.parametrize("given", ["Config", "function"])
@pytest.mark.parametrize(("options", "heuristic", "message"), OUTSIDE)
def test_a_config_object_as_the_heuristic_may_be_outside_the_space(given, options, heuristic, message):
    forms = {"Config": tb.Config(**heuristic), "function": lambda n: tb.Config(**heuristic)}
    assert kernel(**options, heuristic=forms[given], tuner=False)(1) == tb.Config(**heuristic)


def test_a_heuristic_inside_the_space_is_no_news():
    kernel(tuner=False)(1)
    kernel(heuristic=lambda n: {"block": 16, "inplace": n > 1}, tuner=False)(1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"spcae": SPACE}, "unknown option 'spcae'; did you mean 'space'"),
        ({"heuristics": {}}, "unknown option 'heuristics'; did you mean 'heuristic'"),
        ({"policy": "backgruond"}, "policy='backgruond'; use one of .* an AutotunePolicy.*did you mean 'background'"),
        ({"policy": 3}, "policy=3; use one of .* or an AutotunePolicy"),
        ({"name": ""}, "name='': give a text that is not empty"),
        ({"version": 3}, 'version=3: give a text, as version="2"'),
        ({"compile": "gcc"}, "compile='gcc': give a function"),
        ({"reference": 1}, "reference=1: give a function"),
        ({"inputs": 1}, "inputs=1: give a function"),
        ({"prune": "all"}, "prune='all': give a function"),
        ({"cost": 1, "keep": 2}, "cost=1: give a function"),
        ({"flops": "many"}, "flops='many': give a number, or a function"),
        ({"layout": "no"}, "layout='no': give True or False"),
        ({"key": 5}, "key=5: give a tuple of names"),
        ({"ignore": 5}, "ignore=5: give a tuple of names"),
        ({"mutates": 5}, "mutates=5: give a tuple of names"),
        ({"bucket": 5}, "bucket=5 must say which argument"),
        ({"store": 5}, "store= takes a path, an address.*found the int 5"),
        ({"on_event": 5}, "on_event=5: give a function on_event"),
        ({"tolerance": "1e-3"}, "tolerance='1e-3': write a number"),
        ({"tolerance": {"flaot32": 1e-3}}, "unknown dtype 'flaot32'; did you mean 'float32'"),
        ({"check": "yes"}, "check='yes': write True"),
        ({"objective": "fast"}, "objective='fast'|'fast'"),
        ({"strategy": "guess"}, "'guess'"),
        ({"tuner": "none"}, "tuner='none'"),
        ({"peak": 1}, "peak=1: write"),
    ],
)
def test_a_wrong_option_is_one_clear_error_where_it_is_written(options, message):
    with pytest.raises(tb.DefinitionError, match=message):
        kernel(**options)


@pytest.mark.parametrize(("given", "kind"), [(3, "an int"), (SPACE, "a Space")])
def test_a_value_in_place_of_the_function_is_named_with_its_article(given, kind):
    with pytest.raises(tb.DefinitionError, match=rf"takes a function first, not {kind}; write tunable\(space="):
        tb.tunable(given, space=SPACE)


def test_a_policy_may_be_the_name_of_its_fallback():
    matmul = kernel(policy="heuristics")
    assert matmul.selector.policy == tb.AutotunePolicy(cache_miss_fallback="heuristics")
    matmul.selector.policy = "background"
    assert matmul.selector.policy.cache_miss_fallback == "background"


@pytest.mark.parametrize("verb", [tb.tune, tb.verify])
def test_a_slip_in_an_option_of_a_tuning_names_the_option(verb):
    matmul = kernel()
    with pytest.raises(
        TypeError, match=rf"tunebook.{verb.__name__}\(mm, ...\): unknown argument 'budgt'; did you mean 'budget'"
    ):
        verb(matmul, 1, budgt=1)
    with pytest.raises(TypeError, match=r"unknown argument 'm'.*Valid: n, budget, progress"):
        verb(matmul, m=1)
    with pytest.raises(TypeError, match="missing a required argument: 'n'"):
        verb(matmul)


@pytest.mark.parametrize(
    ("option", "meant"),
    [({"policy": "backgroud"}, "background"), ({"strategy": "gided"}, "guided"), ({"objective": "p59"}, "p95")],
)
def test_a_misspelt_value_of_an_option_is_an_error_with_the_nearest_value(option, meant):
    with pytest.raises(tb.DefinitionError, match=f"; did you mean '{meant}'"):
        tb.tunable(lambda n, *, config: n, space=[{"n": 1}], **option)


def _overlaid(matmul):
    with matmul.overlay(blok=64):
        matmul(1)


MISTAKES = {
    "config": (None, lambda matmul: matmul(1, config={"blok": 64})),
    "overlay": (None, _overlaid),
    "pin": ("TUNEBOOK_PIN=mm:blok=64", lambda matmul: matmul(1)),
    "pin, config_for": ("TUNEBOOK_PIN=mm:blok=64", lambda matmul: matmul.config_for(1)),
    "pin, explain": ("TUNEBOOK_PIN=mm:blok=64", lambda matmul: matmul.explain(1)),
    "mode": ("TUNEBOOK_MODE=frosen", lambda matmul: matmul(1)),
    "mode, config_for": ("TUNEBOOK_MODE=frosen", lambda matmul: matmul.config_for(1)),
    "mode, tune": ("TUNEBOOK_MODE=frosen", lambda matmul: tb.tune(matmul, 1)),
    "mode, verify": ("TUNEBOOK_MODE=frosen", lambda matmul: tb.verify(matmul, 1)),
    "mode, tune_together": ("TUNEBOOK_MODE=frosen", lambda matmul: tb.tune_together(matmul, [(1,)])),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_of_the_program_shows_the_lines_of_the_program_alone(mistake, monkeypatch):
    setting, make = MISTAKES[mistake]
    if setting is not None:
        monkeypatch.setenv(*setting.split("=", 1))
    with pytest.raises(tb.DefinitionError, match=r"blok|frosen") as failed:
        make(kernel())
    printed = "".join(traceback.format_exception(failed.value))
    assert "test_written_names.py" in printed
    assert not re.findall(r"tunebook/_.*", printed)


def test_the_errors_of_an_authors_function_show_its_lines_alone():
    def broken(*_):
        raise KeyError("mine")

    for option in ("prune", "check"):
        with pytest.raises(tb.DefinitionError, match=f"{option}= of 'mm' raised KeyError: 'mine'") as failed:
            kernel(**{option: broken})(1)
        printed = "".join(traceback.format_exception(failed.value))
        assert "in broken" in printed
        assert "\ntunebook.DefinitionError: " in printed
        assert not re.findall(r"tunebook/_.*", printed)
