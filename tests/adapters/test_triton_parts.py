"""What a launch is looked up by, and how configurations are written: properties that must hold for all of them."""

# ruff: noqa: N803 - constexprs are written in capitals in Triton

from __future__ import annotations

import pytest

triton = pytest.importorskip("triton", reason="triton is not installed")
torch = pytest.importorskip("torch", reason="torch is not installed")

from hypothesis import given  # noqa: E402 - after the check that it is there
from hypothesis import strategies as st  # noqa: E402 - as above

from tunebook._base.config_codec import classes_of, decode, encode, fingerprint  # noqa: E402 - as above
from tunebook.adapters._triton.candidate import LaunchConfig, SavedTensors  # noqa: E402 - as above
from tunebook.adapters._triton.launcher import Launcher  # noqa: E402 - as above

# ------------------------------------------------------------------------------------------------------ configurations

VALUES = st.one_of(st.integers(), st.booleans(), st.none(), st.text("a,:{", max_size=5), st.floats(allow_nan=False))
NAMES = st.text("ABCDEFG", min_size=1, max_size=4)
CONFIGS = st.builds(
    triton.Config,
    st.dictionaries(NAMES, VALUES, max_size=4),
    num_warps=st.sampled_from([1, 2, 4, 8, None]),
    num_stages=st.integers(1, 6),
    maxnreg=st.none() | st.integers(16, 255),
)


@given(CONFIGS)
def test_a_configuration_comes_back_from_the_book_as_it_went_in(config):
    candidate = LaunchConfig(config)
    again = decode(encode(candidate), classes_of([candidate]))
    assert again.meta == candidate.meta
    assert fingerprint(again) == fingerprint(candidate)


@given(CONFIGS, CONFIGS)
def test_two_configurations_are_written_alike_only_if_a_launch_cannot_tell_them_apart(one, other):
    exact = lambda config: {name: (type(value), value) for name, value in config.all_kwargs().items()}
    assert (encode(LaunchConfig(one)) == encode(LaunchConfig(other))) <= (exact(one) == exact(other))


def test_hooks_tell_configurations_apart():
    plain = LaunchConfig(triton.Config({"BLOCK": 1}))
    hooked = LaunchConfig(triton.Config({"BLOCK": 1}, pre_hook=lambda arguments: arguments.clear()))
    other = LaunchConfig(triton.Config({"BLOCK": 1}, pre_hook=lambda arguments: arguments.copy()))
    assert len({fingerprint(candidate) for candidate in (plain, hooked, other)}) == 3


# -------------------------------------------------------------------------------------------------- tensors put back


def test_without_memory_for_copies_only_declared_tensors_are_put_back():
    declared, other = torch.ones(4), torch.ones(4)
    kept = SavedTensors({"x": declared, "y": other}, (), ("x",), 0.0)
    declared.zero_()
    other.zero_()
    kept.notice()
    kept.restore()
    assert torch.equal(declared, torch.ones(4))
    assert torch.equal(other, torch.zeros(4))


def test_a_tensor_that_the_first_run_did_not_write_to_is_not_copied_back_later():
    x, y = torch.ones(4), torch.ones(4)
    kept = SavedTensors({"x": x, "y": y, "n": 4}, (), (), 1e9)
    x.zero_()
    kept.notice()
    y.zero_()
    kept.restore()
    assert torch.equal(x, torch.ones(4))
    assert torch.equal(y, torch.zeros(4))


def test_a_tensor_whose_elements_share_a_place_is_left_alone():
    wide = torch.ones(1).expand(8)
    kept = SavedTensors({"x": wide}, ("x",), ("x",), 1e9)
    kept.restore()  # writing to it would raise
    assert torch.equal(wide, torch.ones(8))


# ------------------------------------------------------------------------------------------------------------- launches


class Array:
    def __init__(self, dtype):
        self.dtype = dtype


class Other(Array):
    pass


ARRAYS = st.builds(lambda kind, dtype: kind(dtype), st.sampled_from([Array, Other]), st.sampled_from(["f16", "f32"]))
SCALARS = st.one_of(st.integers(0, 2), st.booleans(), st.none(), st.sampled_from(["", "a"]), st.floats(0, 1))
CALLS = st.tuples(ARRAYS | st.none() | st.integers(0, 1), SCALARS, SCALARS, st.dictionaries(st.just("flag"), SCALARS))


def kernel(x_ptr, n, stride, BLOCK, flag=None):
    """A signature."""


def key_of(call):
    """What such a launch may be keyed by at least: the values named in the key, and the dtypes of the rest."""
    x, n, stride, named = call
    kind = lambda value: getattr(value, "dtype", None) or type(value)
    return kind(x), type(n), n, kind(stride), [(name, type(value), value) for name, value in named.items()]


def facts_of(launcher, seen, call):
    x, n, stride, named = call
    launcher.bind((1,))(x, n, stride, **named)
    return seen[-1][1]


@pytest.mark.parametrize("exact", [False, True])
@given(calls=st.lists(CALLS, min_size=2, max_size=6))
def test_equal_facts_mean_equal_keys_and_the_same_launch_gives_the_same_facts(exact, calls):
    seen = []
    launcher = Launcher(
        kernel,
        ["x_ptr", "n", "stride", "BLOCK", "flag"],
        key=["n", "flag"],
        supplied=frozenset({"BLOCK"}),
        call=lambda call, facts: seen.append((call, facts)),
        device=lambda: None,
        exact=exact,
    )
    found = [(call, facts_of(launcher, seen, call)) for call in [*calls, *calls]]
    for one, facts in found:
        for other, others in found:
            assert facts != others or key_of(one) == key_of(other)
    settled = [facts_of(launcher, seen, call) for call in calls]
    assert settled == [facts_of(launcher, seen, call) for call in calls]


@given(calls=st.lists(st.tuples(CALLS, st.permutations(["x_ptr", "n", "stride"])), min_size=2, max_size=6))
def test_equal_facts_mean_equal_keys_where_an_exact_launcher_gets_all_arguments_by_name(calls):
    seen = []
    launcher = Launcher(
        kernel,
        ["x_ptr", "n", "stride", "BLOCK", "flag"],
        key=["n", "flag"],
        supplied=frozenset({"BLOCK"}),
        call=lambda call, facts: seen.append((call, facts)),
        device=lambda: None,
        exact=True,
    )
    found = []
    for call, order in [*calls, *calls, *calls]:
        given = dict(zip(["x_ptr", "n", "stride"], call, strict=False))
        launcher.bind((1,))(**{name: given[name] for name in order}, **call[3])
        found.append(((order, key_of(call)), seen[-1][1]))
    assert all(one == other for one, facts in found for other, others in found if facts == others)
    last = found[-len(calls) :]
    assert [facts for _, facts in found[-2 * len(calls) : -len(calls)]] == [facts for _, facts in last]


def test_arguments_may_be_passed_by_name_and_defaults_are_filled_in():
    seen = []
    launcher = Launcher(
        lambda x, n=7, BLOCK=1: None,
        ["x", "n", "BLOCK"],
        key=["n"],
        supplied=frozenset({"BLOCK"}),
        call=lambda call, facts: seen.append(call),
        device=lambda: 3,
    )
    launcher.bind("grid")(x=1)
    launcher.bind("grid")(1, n=8, other=2)
    assert seen == [("grid", (1, 7), {}), ("grid", (1, 8), {"other": 2})]
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'x'"):
        launcher.bind("grid")()


def test_what_comes_behind_a_supplied_parameter_is_passed_on_by_name_only_if_it_was_given():
    seen = []
    launcher = Launcher(
        lambda x, BLOCK, size, flag=None: None,
        ["x", "BLOCK", "size", "flag"],
        key=["size"],
        supplied=frozenset({"BLOCK"}),
        call=lambda call, facts: seen.append((call[1:], facts)),
        device=lambda: None,
    )
    forms = [{"size": 4}, {"size": 5}, {"flag": True, "size": 4}, {"size": 4, "flag": None, "num_warps": 2}, {}]
    for named in [*forms, *forms, *forms]:
        launcher.bind("grid")(1, **named)
    assert [call for call, _ in seen] == [((1,), named) for named in [*forms, *forms, *forms]]
    assert len({facts for _, facts in seen[-len(forms) :]}) == len(forms)
    with pytest.raises(TypeError, match="positional"):
        launcher.bind("grid")(1, 64, 4)


def test_an_exact_launcher_passes_arguments_on_as_they_came():
    seen = []
    launcher = Launcher(
        lambda x, n=7, BLOCK=1: None,
        ["x", "n", "BLOCK"],
        key=["n"],
        supplied=frozenset({"BLOCK"}),
        call=lambda call, facts: seen.append((*call, facts)),
        device=lambda: None,
        exact=True,
    )
    forms = [
        ((1, 8), {}),
        ((1,), {"n": 8}),
        ((), {"n": 8, "x": 1}),
        ((1,), {}),
        ((1, 8, 2), {}),
        ((1, 8), {"other": 2}),
    ]
    for args, kwargs in [*forms, *forms, *forms]:
        launcher.bind("grid")(*args, **kwargs)
    assert [(args, kwargs) for _grid, args, kwargs, _facts in seen] == [*forms, *forms, *forms]
    assert len({facts for *_, facts in seen[-len(forms) :]}) == len(forms)


def test_two_devices_never_share_facts():
    seen, device = [], [0]
    launcher = Launcher(
        lambda x: None, ["x"], key=[], supplied=frozenset(), call=lambda _c, f: seen.append(f), device=lambda: device[0]
    )
    for device[0] in (0, 1, 0, 1):
        launcher.bind(())(5)
    assert seen[2] != seen[3]
