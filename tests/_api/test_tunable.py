"""@tunable from a user's side: what a call does, what the decorator refuses, what hangs on the function."""

from __future__ import annotations

import inspect
import os
import pickle
import re
import subprocess
import sys
import textwrap
import threading
import typing
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
from kernels import FakeClock, fake_tuner
from limits import HANG_S

import tunebook as tb

CLOCK = FakeClock()
SPACE = tb.Space(block=[16, 32, 64])


def make(*, cost=lambda block, n: abs(block - n) + 1, events=None, **options):
    """A kernel whose best block is the one nearest to its first dimension."""
    clock = FakeClock()
    runs = []
    options = {"space": SPACE, "heuristic": {"block": 16}, "store": False, **options}

    @tb.tunable(tuner=fake_tuner(clock), name="pretend", on_event=events, **options)
    def kernel(x, scale=1, *, causal=False, config):
        """Pretend."""
        runs.append(config)
        clock.spend(cost(config["block"], x.shape[0]))
        return x * scale

    return kernel, runs


def test_the_first_call_tunes_and_later_calls_only_run():
    kernel, runs = make()
    x = np.ones((64, 2))
    assert (kernel(x, 3) == 3 * x).all()
    runs.clear()
    for _ in range(5):
        kernel(x, 3)
    assert runs == [{"block": 64}] * 5


def test_each_kind_of_call_has_its_own_answer():
    kernel, runs = make()
    for n in (16, 32, 64) * 3:
        kernel(np.ones(n))
        assert runs[-1].block == n


def test_an_override_is_used_and_forgotten():
    kernel, runs = make()
    kernel(np.ones(64), config={"block": 16})
    assert runs == [{"block": 16}]
    kernel(np.ones(64))
    assert runs[-1].block == 64


def test_an_override_that_is_a_config_may_be_outside_the_space():
    kernel, runs = make()
    kernel(np.ones(64), config=tb.Config(block=999))
    assert runs == [{"block": 999}]


def test_an_overlay_is_obeyed_even_when_the_call_is_hot():
    kernel, runs = make()
    x = np.ones(64)
    for _ in range(4):
        kernel(x)
    with kernel.overlay(block=16):
        kernel(x)
        assert runs[-1].block == 16
    kernel(x)
    assert runs[-1].block == 64
    for _ in range(3):
        kernel(x)
    assert runs[-1].block == 64


def test_an_overlay_in_one_thread_leaves_another_threads_hot_calls_alone():
    kernel, runs = make()
    x = np.ones(64)
    for _ in range(4):
        kernel(x)
    inside, done = threading.Event(), threading.Event()

    def hold():
        with kernel.overlay(block=16):
            inside.set()
            assert done.wait(HANG_S)

    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(hold)
        assert inside.wait(HANG_S)
        for _ in range(4):
            kernel(x)
            assert runs[-1].block == 64
        done.set()
        held.result()


@pytest.mark.parametrize("same", [(True, 1, 1.0), (0.0, -0.0), (0, False)])
def test_scalars_that_are_equal_but_differ_in_type_or_sign_do_not_share_an_answer(same):
    problems = set()
    seen = []
    kernel, _ = make(events=lambda event, **data: seen.append((event, data["call_key"])))
    for _ in range(4):
        for scale in same:
            kernel(np.ones(64), scale)
            problems.add(seen[-1][1])
    assert len(problems) == len(same)


def test_hot_calls_tell_equal_scalars_apart():
    kernel, runs = make(cost=lambda block, n: 1)
    chosen = {}
    for scale, block in ((True, 16), (1, 32), (1.0, 64)):
        problem = kernel.problem(np.ones(64), scale)
        kernel.selector.cache.put(*problem, tb.Config(block=block))
        chosen[type(scale)] = block
    for _ in range(5):
        for scale in (True, 1, 1.0):
            kernel(np.ones(64), scale)
            assert runs[-1].block == chosen[type(scale)]


def test_layouts_have_their_own_answers_unless_told_otherwise():
    c = np.ones((64, 64))
    kernel, _ = make()
    assert kernel.problem(c) != kernel.problem(c.T) != kernel.problem(c[:, ::2])
    blind, _ = make(layout=False)
    assert blind.problem(c) == blind.problem(c.T)


def test_hot_calls_tell_layouts_apart():
    kernel, runs = make()
    c = np.ones((64, 64))
    kernel.selector.cache.put(*kernel.problem(c), tb.Config(block=16))
    kernel.selector.cache.put(*kernel.problem(c.T), tb.Config(block=32))
    for _ in range(5):
        kernel(c)
        assert runs[-1].block == 16
        kernel(c.T)
        assert runs[-1].block == 32


class OnDevice:
    """An array of another library, on a device with hardware of its own."""

    class Device:
        platform = "gpu"

        def __init__(self, kind):
            self.device_kind = kind

    def __init__(self, n, kind):
        self.shape, self.dtype, self.device = (n,), np.dtype("float32"), self.Device(kind)

    def __mul__(self, other):
        return self


def test_two_devices_in_one_process_have_two_answers_also_when_hot():
    kernel, runs = make(cost=lambda block, n: 1)
    first, second, host = OnDevice(64, "H200"), OnDevice(64, "A100"), np.ones(64, np.float32)
    for array, block in ((first, 16), (second, 32), (host, 64)):
        kernel.selector.cache.put(*kernel.problem(array), tb.Config(block=block))
    assert len({kernel.problem(a).device for a in (first, second, host)}) == 3
    for _ in range(4):
        for array, block in ((first, 16), (second, 32), (host, 64)):
            kernel(array)
            assert runs[-1].block == block


def test_arguments_may_be_passed_by_name_or_position():
    kernel, runs = make()
    x = np.ones(64)
    assert kernel.problem(x, 2, causal=True) == kernel.problem(scale=2, causal=True, x=x)
    assert kernel.problem(x) == kernel.problem(x, 1, causal=False)
    kernel(x=x, scale=2)
    runs.clear()
    kernel(x, 2)
    assert len(runs) == 1


def test_key_and_ignore_choose_the_arguments_of_a_key():
    by_key, _ = make(key=("x",))
    assert by_key.problem(np.ones(64), 1) == by_key.problem(np.ones(64), 2)
    ignoring, _ = make(ignore=("scale",))
    assert ignoring.problem(np.ones(64), 1) == ignoring.problem(np.ones(64), 2)
    assert ignoring.problem(np.ones(64), causal=True) != ignoring.problem(np.ones(64), causal=False)


def test_buckets_share_an_answer():
    kernel, runs = make(bucket={"x": {0: tb.pow2}})
    kernel(np.ones(64))
    runs.clear()
    kernel(np.ones(50))
    assert len(runs) == 1
    assert kernel.problem(np.ones(64)) != kernel.problem(np.ones(65))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"key": ("x", "causl")}, "causal"),
        ({"ignore": ("scal",)}, "scale"),
        ({"bucket": {"y": {0: tb.pow2}}}, "y"),
        ({"key": ("z",)}, r"key=\('z',\) names 'z', but the arguments are 'x', 'scale', 'causal'"),
        ({"key": "x"}, "tuple of names"),
        ({"space": "block"}, "tunebook.Space"),
        ({"space": 3}, "tunebook.Space"),
    ],
)
def test_a_typo_is_an_error_where_the_kernel_is_defined(options, says):
    with pytest.raises(tb.DefinitionError, match=says):
        make(**options)


def test_a_function_without_config_is_refused_with_a_signature_to_write():
    with pytest.raises(tb.DefinitionError, match=r"def f\(x, \*, config\)"):
        tb.tunable(lambda_like, space=SPACE)


def lambda_like(x):
    return x


lambda_like.__name__ = "f"


def test_an_argument_that_cannot_be_keyed_is_an_error_that_names_it():
    kernel, _ = make()
    with pytest.raises(tb.UnkeyableError, match="scale"):
        kernel(np.ones(4), object())


def test_the_function_looks_like_the_authors():
    kernel, _ = make()
    assert str(inspect.signature(kernel)) == "(x, scale=1, *, causal=False, config=None)"
    assert (kernel.__name__, kernel.__doc__, inspect.isfunction(kernel)) == ("kernel", "Pretend.", True)
    with pytest.raises(TypeError, match="x"):
        kernel()


def test_a_store_of_another_kind_is_one_clear_error():
    with pytest.raises(tb.DefinitionError, match=r"store= takes a path, an address.*found the list"):
        tb.tunable(space=[{"b": 1}], store=["a", "b"])(lambda x, *, config: x)


@tb.tunable(space=[{"step": 1}], heuristic={"step": 1}, store=False)
def at_module_level(x, *, config):
    return x


def test_a_tunable_at_module_level_pickles_by_name():
    assert pickle.loads(pickle.dumps(at_module_level)) is at_module_level


def test_every_kind_of_parameter_is_passed_on():
    @tb.tunable(space=[{"b": 1}, {"b": 2}], store=False)
    def f(a, /, b, *rest, c=3, config, **more):
        return a, b, rest, c, more, config.b

    for _ in range(4):
        assert f(1, 2, 3, 4, c=5, d=6)[:5] == (1, 2, (3, 4), 5, {"d": 6})
    assert f(1, b=2)[:5] == (1, 2, (), 3, {})
    assert f(1, 2, config={"b": 2})[5] == 2


@pytest.mark.promise("methods-work")
def test_a_method_is_tunable_when_self_is_ignored():
    class Layer:
        @tb.tunable(space=[{"b": 1}], ignore=("self",), store=False)
        def forward(self, x, *, config):
            return x + config.b

    assert Layer().forward(1) == 2


def test_mixed_kinds_of_one_argument_are_answered_right():
    kernel, runs = make(cost=lambda block, n: 1)
    values = [1, None, "s", 2.5, (1, 2), [1], {"a": 1}, np.float32, np.dtype("int8"), np.float32(2), b"x", 1, None]
    for value in values:
        kernel(np.ones(64), 1, causal=value)
    runs.clear()
    for _ in range(3):
        for value in values:
            kernel(np.ones(64), 1, causal=value)
    assert len(runs) == 3 * len(values)


def test_an_error_of_the_kernel_is_raised_without_our_own_errors_in_between():
    @tb.tunable(space=[{"b": 1}], heuristic={"b": 1}, store=False, policy=tb.AutotunePolicy(allow_autotune=False))
    def f(x, *, config):
        raise KeyError("mine")

    for _ in range(3):
        with pytest.raises(KeyError, match="mine") as caught:
            f(1)
        assert caught.value.__context__ is None


def test_a_listener_sees_every_call_and_leaving_it_out_costs_nothing():
    events = []
    kernel, _ = make(events=lambda event, **data: event == "autotune_progress" or events.append(event))
    for _ in range(5):
        kernel(np.ones(64))
    assert events == ["autotune_start", "autotune_finish", *["cache_hit"] * 4]


def test_a_listener_added_later_sees_hot_calls_too():
    kernel, _ = make()
    for _ in range(5):
        kernel(np.ones(64))
    events = []
    kernel.selector.listen(lambda event, **data: events.append((event, data["level"])))
    kernel(np.ones(64))
    assert events == [("cache_hit", "memory")]


def test_putting_a_config_into_memory_changes_hot_calls():
    kernel, runs = make()
    x = np.ones(64)
    for _ in range(5):
        kernel(x)
    kernel.selector.cache.put(*kernel.problem(x), tb.Config(block=32))
    kernel(x)
    assert runs[-1].block == 32


def test_changing_the_policy_changes_hot_calls():
    kernel, runs = make(policy=tb.AutotunePolicy(cache_miss_fallback="heuristics"))
    x = np.ones(64)
    for _ in range(5):
        kernel(x)
    assert runs[-1].block == 16
    kernel.selector.policy = tb.AutotunePolicy()
    kernel(x)
    assert runs[-1].block == 64


def test_forbidding_heuristics_in_a_block_reaches_hot_calls():
    kernel, _ = make(policy=tb.AutotunePolicy(allow_autotune=False))
    x = np.ones(64)
    for _ in range(5):
        kernel(x)
    with tb.policy_override(kernel.selector, allow_heuristics=False), pytest.raises(tb.NoConfig, match="heuristics"):
        kernel(x)
    kernel(x)


@pytest.mark.parametrize(
    "form", [lambda x: x.T, lambda x: (x.T, [x.T]), lambda x: {"out": x.T}], ids=["array", "list", "dict"]
)
def test_a_reference_that_returns_views_of_its_arguments_still_finds_a_candidate_that_spoils_them(form):
    @tb.tunable(space=tb.Space(wrong=[True, False]), reference=form, store=False)
    def kernel(x, *, config):
        if config.wrong:
            x *= 2
        return form(x)

    tuned = tb.tune(kernel, np.arange(6.0).reshape(2, 3))
    assert not tuned.config.wrong
    assert [m.failure.kind for m in tuned.measurements if m.failure] == ["wrong-result"]


@pytest.mark.promise("wrong-never-wins")
def test_a_wrong_result_is_never_chosen():
    @tb.tunable(space=tb.Space(wrong=[True, False]), reference=lambda x: x + 1, store=False)
    def f(x, *, config):
        return x if config.wrong else x + 1

    assert (f(np.zeros(8)) == 1).all()


def test_candidates_may_depend_on_the_call():
    @tb.tunable(space=lambda x: [{"b": b} for b in (1, 2, 4) if x.shape[0] % b == 0], store=False)
    def f(x, *, config):
        return config.b

    assert f(np.ones(3)) == 1


@pytest.mark.promise("one-tuning-per-problem")
def test_many_threads_calling_get_right_answers_and_tune_once():
    events = []
    kernel, _ = make(events=None)
    kernel.selector.listen(lambda event, **data: events.append(event))

    def call(i):
        n = (16, 32, 64)[i % 3]
        return kernel(np.ones(n)).shape[0] == n

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(call, range(300)))
    assert events.count("autotune_start") == 3


@pytest.mark.promise("memory-bounded")
def test_the_memo_does_not_grow_without_bound():
    kernel, _ = make(policy=tb.AutotunePolicy(allow_autotune=False))
    from tunebook._memo.answer_memo import CAPACITY

    for n in range(CAPACITY + 100):
        kernel(np.empty((n, 0)))
    answers = next(a for a in gate_answers() if a.known and len(a.known) > 50)
    assert len(answers.fast) <= CAPACITY
    assert len(answers.known) <= CAPACITY


def gate_answers():
    from tunebook._memo.answer_memo import MEMO

    return list(MEMO._all)


def test_tune_returns_the_measurements_and_shows_progress():
    kernel, _ = make()
    steps = []
    tuned = tb.tune(kernel, np.ones(64), budget="1h", progress=steps.append)
    assert tuned.config == {"block": 64}
    assert [(s.done, s.total) for s in steps if s.doing == "trying"] == [(1, 3), (2, 3), (3, 3)]
    assert steps[-1].best == {"block": 64}
    assert len(tuned.measurements) == 3


def test_tune_of_a_plain_function_is_an_error_with_the_decorator_to_write():
    with pytest.raises(tb.DefinitionError, match=r"@tunebook\.tunable"):
        tb.tune(print, 1)


def test_a_second_process_finds_the_answer(tmp_path):
    script = tmp_path / "user.py"
    script.write_text(
        textwrap.dedent("""
        import numpy as np, tunebook as tb
        events = []
        @tb.tunable(space=tb.Space(block=[1, 2]), on_event=lambda event, **d: events.append((event, d.get("level"))))
        def double(x, *, config):
            return x * 2
        double(np.ones(8))
        print(events[-1])
        """)
    )
    said = [subprocess.run([sys.executable, script], capture_output=True, text=True, check=True).stdout for _ in "ab"]
    assert said == ["('autotune_finish', None)\n", "('cache_hit', 'persistent')\n"]


@pytest.mark.promise("edits-noticed")
@pytest.mark.parametrize("edit", ["kernel", "helper", "candidate"])
def test_after_an_edit_the_entry_is_not_trusted_and_only_new_candidates_are_measured(tmp_path, edit):
    text = textwrap.dedent("""
        import numpy as np, tunebook as tb
        from kernels import FakeClock, fake_tuner  # a tuning that the machine disturbs would measure all of them
        clock, runs, events = FakeClock(), set(), []
        def helper(x):
            return x * 2
        def note(event, **d):
            events.append((event, len(runs)))
        @tb.tunable(space=tb.Space(block=[1, 2]), tuner=fake_tuner(clock), on_event=note)
        def double(x, *, config):
            runs.add(config.block)
            clock.spend(config.block * 1e-3)
            return helper(x)
        double(np.ones(8))
        print(*events[-1])
        """)
    edits = {
        "kernel": text.replace("return helper(x)", "return helper(x) + 0"),
        "helper": text.replace("return x * 2", "return x + x"),
        "candidate": text.replace("[1, 2]", "[1, 2, 3]"),
    }
    script = tmp_path / "user.py"
    script.write_text(text)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    run = lambda: subprocess.run([sys.executable, script], env=env, capture_output=True, text=True, check=True).stdout
    run()
    script.write_text("# moved down by a comment\n" + text)
    assert run() == "cache_hit 0\n"
    script.write_text(edits[edit])
    expected = {"kernel": 2, "helper": 2, "candidate": 2}  # with a new candidate: that one and the incumbent
    assert run() == f"autotune_finish {expected[edit]}\n"
    assert run() == "cache_hit 0\n"


def test_an_unknown_option_is_named_with_the_nearest_and_all_that_exist():
    with pytest.raises(tb.DefinitionError, match=r"unknown option 'polcy'; did you mean 'policy'") as raised:
        tb.tunable(space=SPACE, polcy=None)
    assert all(name in str(raised.value) for name in ("space", "name", "heuristic", "reference", "on_event"))


def test_every_option_is_described_in_the_docstring():
    for option in tb.TunableOptions.__annotations__:
        assert re.search(rf"`{option}[`=]", tb.tunable.__doc__), option


def test_every_declared_option_can_be_given():
    given = dict.fromkeys(tb.TunableOptions.__annotations__) | {"version": "1", "ignore": (), "layout": True}
    given |= {"check": True, "objective": "typical", "store": False}
    assert tb.tunable(lambda x, *, config: x, space=[{"block": 1}], **given)(3) == 3


def test_type_checkers_are_told_every_option_by_every_overload():
    signatures = [inspect.signature(each) for each in typing.get_overloads(tb.tunable)]
    assert len(signatures) == 7  # a function, a choice, or neither; with and without types of its own
    assert {s.parameters["options"].annotation for s in signatures} == {"Unpack[TunableOptions]"}


class TestConfigFor:
    def test_it_is_the_configuration_of_the_call_and_runs_nothing_for_the_caller(self):
        ran = []

        @tb.tunable(space=[{"step": 1}, {"step": 2}], heuristic={"step": 1}, store=False, check=False)
        def scale(x, factor=2, *, config):
            ran.append(factor)
            return config.step

        config = scale.config_for(np.ones(4), factor=3)  # tunes, as the call would
        tuned = len(ran)
        assert scale.config_for(np.ones(4), factor=3) is config
        assert len(ran) == tuned
        assert scale(np.ones(4), 3) == config.step
        assert scale(np.ones(4), 3, config=config) == config.step

    def test_the_answer_is_the_same_in_another_thread(self):
        @tb.tunable(space=[{"step": 1}, {"step": 2}], heuristic={"step": 1}, store=False, check=False)
        def scale(x, *, config):
            return config.step

        here = scale.config_for(np.ones(4))
        with ThreadPoolExecutor(1) as backward:
            assert backward.submit(scale.config_for, np.ones(4)).result() is here

    def test_a_method_is_asked_about_its_object(self):
        class Layer:
            @tb.tunable(space=[{"step": 1}, {"step": 2}], heuristic={"step": 1}, store=False, check=False, key=["x"])
            def forward(self, x, *, config):
                return config.step

        layer = Layer()
        assert layer.forward(np.ones(4)) == layer.forward.config_for(np.ones(4)).step

    def test_overlays_and_incremental_tuning_are_heeded(self):
        policy = tb.AutotunePolicy(cache_miss_fallback="incremental")

        @tb.tunable(space=[{"step": 1}, {"step": 2}], heuristic={"step": 1}, store=False, check=False, policy=policy)
        def scale(x, *, config):
            return config.step

        scale(np.ones(4))
        assert scale.config_for(np.ones(4)).step == 1
        with scale.overlay(step=2):
            assert scale.config_for(np.ones(4)).step == 2

    def test_arguments_that_do_not_fit_are_the_error_of_a_call(self):
        @tb.tunable(space=[{"step": 1}], store=False)
        def scale(x, *, config):
            return config.step

        with pytest.raises(TypeError, match=r"scale\(\): got an unexpected keyword argument 'y'"):
            scale.config_for(np.ones(4), y=1)
        for ask in (scale.explain, scale.problem, scale.config_for, partial(tb.tune, scale), partial(tb.verify, scale)):
            with pytest.raises(TypeError, match=r"scale\(\): missing a required argument: 'x'"):
                ask()
        with pytest.raises(TypeError, match=r"'config'; config= is for the call itself: scale\(\.\.\., config="):
            scale.config_for(np.ones(4), config={"step": 1})


class Layer:
    @tb.tunable(space=[{"n": 1}, {"n": 2}], heuristic={"n": 1}, store=False)
    def forward(self, x, *, config):
        return x


def test_a_tunable_function_and_a_tunable_method_are_instances_of_tunable():
    @tb.tunable(space=[{"n": 1}], store=False)
    def f(x, *, config):
        return x

    assert all(isinstance(each, tb.Tunable) for each in (f, Layer.forward, Layer().forward))
    assert not isinstance(len, tb.Tunable)
    assert tb.Tunable[int].__args__[0] is int


def test_a_config_with_a_default_is_still_chosen():
    @tb.tunable(space=[{"n": 1}], store=False, heuristic={"n": 1})
    def f(x, scale=2, *, config=tb.CHOSEN):
        return x * scale * config.n

    assert (f(3), f(3, 1), f(3, config=tb.Config(n=5))) == (6, 3, 30)
    assert str(inspect.signature(f)) == "(x, scale=2, *, config=None)"


class TestRawErrors:
    @pytest.mark.parametrize("given", [tb.Space(a=[1]), [{"a": 1}], "matmul"])
    def test_a_space_in_the_place_of_the_function(self, given):
        says = rf"tunable\(\) takes a function first, not a {type(given).__name__}; write tunable\(space="
        with pytest.raises(tb.DefinitionError, match=says):
            tb.tunable(given)

    def test_a_builtin_without_a_signature(self):
        with pytest.raises(tb.DefinitionError, match="has no signature that can be read; decorate a Python function"):
            tb.tunable(space=[{"b": 1}])(int)

    def test_a_heuristic_that_cannot_take_the_arguments_names_the_kernel(self):
        @tb.tunable(space=tb.Space(b=[1, 2]), heuristic=lambda: {"b": 1}, store=False, name="mm")
        def mm(x, y, *, config):
            return x

        with pytest.raises(
            tb.DefinitionError, match=r"'mm': the heuristic cannot be called with .*, \(x, y\): .*lambda"
        ):
            mm(1, 2)

    def test_a_heuristic_that_takes_names_only_gets_the_arguments_by_name(self):
        @tb.tunable(space=tb.Space(b=[1, 2]), heuristic=lambda *, y, **_: {"b": y}, store=False, policy="heuristics")
        def mm(x, y, *, config):
            return config.b

        assert mm(1, 2) == 2
        assert mm(2, y=1) == 1
        with pytest.raises(TypeError, match="unsupported operand"):
            tb.tunable(mm.kernel.function, space=[{"b": 1}], heuristic=lambda *, x, y: x + y, store=False)(1, "a")

    def test_an_error_inside_a_heuristic_stays_its_own(self):
        @tb.tunable(space=tb.Space(b=[1, 2]), heuristic=len, store=False, name="mm")
        def mm(x, *, config):
            return x

        with pytest.raises(TypeError, match="has no len"):
            mm(1)

    def test_a_misspelt_field_of_a_policy(self):
        with pytest.raises(tb.DefinitionError, match="'cache_mis_fallback'; did you mean 'cache_miss_fallback'"):
            tb.AutotunePolicy(cache_mis_fallback="heuristics")
