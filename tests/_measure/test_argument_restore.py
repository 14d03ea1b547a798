"""Trap 13: a kernel that writes to its arguments is timed on what the user passed, and leaves it as one call would."""

from __future__ import annotations

import ctypes
import mmap
from array import array
from collections import Counter, OrderedDict, UserDict, UserList, defaultdict, deque
from dataclasses import dataclass
from functools import partial
from queue import Queue
from random import Random, SystemRandom
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

import tunebook as tb
from tunebook._arrays.describe import arrays_in
from tunebook._measure.argument_restore import Restorer


@pytest.fixture(params=["never", "always"])
def policy(request):
    return tb.AutotunePolicy(isolate=request.param)


@pytest.mark.promise("arguments-left-alone")
def test_an_argument_that_is_scaled_in_place_is_scaled_once(policy):
    @tb.tunable(space=tb.Space(b=[1, 2, 3]), heuristic={"b": 1}, store=False, policy=policy)
    def double(x, *, config):
        x *= 2
        return x

    x = np.ones(100)
    out = double(x)
    assert (x == 2).all()
    assert out is x
    double(x)
    assert (x == 4).all()


def test_every_candidate_sees_the_arguments_as_they_were(policy):
    @tb.tunable(space=tb.Space(b=[1, 2, 3]), reference=lambda x, out: x.sum(), store=False, policy=policy)
    def total(x, out, *, config):
        out += x.sum()  # right only if `out` was zero
        return out[0]

    out = np.zeros(1)
    total(np.ones(10), out)
    assert out[0] == 10


def test_the_reference_is_computed_before_anything_is_written_to(policy):
    @tb.tunable(space=tb.Space(b=[1, 2, 3]), reference=lambda x: x * 2, store=False, policy=policy)
    def double(x, *, config):
        x *= 2
        return x

    x = np.ones(100)
    double(x)
    assert (x == 2).all()


def test_arrays_deep_in_containers_are_put_back_too():
    @tb.tunable(space=tb.Space(b=[1, 2]), ignore=("state",), store=False)
    def step(x, state, *, config):
        state["count"][0] += 1
        state["all"][0].fill(7)
        return x

    state = {"count": np.zeros(1), "all": (np.ones(3),)}
    step(np.ones(2), state)
    assert state["count"][0] == 1


@dataclass
class State:
    x: Any


@dataclass(frozen=True, slots=True)
class FrozenState:
    x: Any


class Pair(NamedTuple):
    x: Any
    n: int


class Sub(np.ndarray):
    """A class of the user's own."""


class Keyed:
    """A class of the user's own, keyed by its array."""

    def __init__(self, x):
        self.x = x


tb.register_key(Keyed, lambda keyed: (keyed.x,))


def ten_lists_deep(x):
    for _ in range(10):
        x = [x]
    return x


HOLDERS = {
    "a dataclass": State,
    "a frozen dataclass": FrozenState,
    "a read-only mapping": lambda x: MappingProxyType({"x": x}),
    "an ordered dict": lambda x: OrderedDict(x=x),
    "a NamedTuple": lambda x: Pair(x, 1),
    "ten lists": ten_lists_deep,
    "a dataclass in a mapping in a dataclass": lambda x: State(MappingProxyType({"x": (State(x),)})),
    "a class with a registered key": lambda x: [Keyed(x)],
    "a partial": lambda x: partial(print, x),
}


@pytest.mark.promise("arguments-left-alone")
@pytest.mark.parametrize("hold", HOLDERS.values(), ids=HOLDERS)
def test_an_array_in_any_container_sees_exactly_one_run(policy, hold):
    @tb.tunable(space=tb.Space(w=[1, 2]), heuristic={"w": 1}, store=False, check=False, policy=policy)
    def bump(holder, *, config):
        next(arrays_in(holder))[:] += 1

    x = np.zeros(4)
    bump(hold(x))
    assert x.tolist() == [1, 1, 1, 1]
    bump(hold(x))
    assert x.tolist() == [2, 2, 2, 2]


def test_an_array_in_two_places_is_copied_once():
    x = np.zeros(4)
    restorer = Restorer(((x, [x]), {"x": x}))
    x += 1
    assert [copy.tolist() for copy in restorer.written().values()] == [[1, 1, 1, 1]]


def test_aliased_and_strided_arguments_are_put_back():
    base = np.arange(12.0).reshape(3, 4)

    @tb.tunable(space=tb.Space(b=[1, 2]), store=False)
    def add(x, y, *, config):
        x += 1
        return x

    add(base[:, ::2], base.T)
    assert base[0].tolist() == [1, 1, 3, 3]


@pytest.mark.promise("arguments-left-alone")
def test_a_tuning_that_fails_leaves_the_arguments_as_they_were():
    @tb.tunable(space=tb.Space(b=[1, 2]), store=False)
    def breaks(x, *, config):
        x += 1
        raise ValueError("after writing")

    x = np.zeros(3)
    with pytest.raises(tb.NoConfig, match="after writing"):
        breaks(x)
    assert (x == 0).all()


def test_nothing_is_restored_that_was_not_written_to():
    x, y = np.zeros(3), np.zeros(3)
    restorer = Restorer((x, [y]))
    restorer.notice()
    assert not restorer.has_changes
    y[0] = 1
    restorer.notice()
    assert restorer.has_changes
    assert y[0] == 0
    x[0] = 5
    restorer.restore()
    assert x[0] == 5


# ------------------------------------------------------------------------------------------------ arrays of every kind


def tuned(function, **options):
    """Return a function with three candidates that do the same, tuned at its first call."""
    options = {"heuristic": {"w": 1}, "store": False, "check": False, **options}
    return tb.tunable(function, space=tb.Space(w=[1, 2, 3]), name="tuned", **options)


def on_disk(path):
    return np.memmap(path / "x", "f8", "w+", shape=(4,))


ARRAYS = {
    "a memory map": on_disk,
    "a masked array": lambda _: np.ma.zeros(4),
    "a masked array with a mask": lambda _: np.ma.masked_array(np.zeros(4), [0, 0, 0, 1]),
    "a matrix": lambda _: np.zeros((2, 2)).view(np.matrix),
    "a subclass": lambda _: np.zeros(4).view(Sub),
    "objects": lambda _: np.array([0, 0], object),
    "texts of any length": lambda _: np.array([""], np.dtypes.StringDType()),
    "a strided view": lambda _: np.zeros((3, 8))[:, ::2],
    "big endian": lambda _: np.zeros(4, ">f8"),
    "no dimensions": lambda _: np.zeros(()),
}


@pytest.mark.promise("arguments-left-alone")
@pytest.mark.parametrize("make", ARRAYS.values(), ids=ARRAYS)
def test_an_array_of_any_class_sees_exactly_one_run(tmp_path, make):
    def add(x, *, config):
        x += "1" if x.dtype.kind == "T" else 1

    x = make(tmp_path)
    tuned(add)(x)
    assert np.asarray(x).flat[0] == ("1" if x.dtype.kind == "T" else 1)


def test_a_mask_is_put_back():
    def hide(x, *, config):
        x[np.argmin(x)] = np.ma.masked

    x = np.ma.masked_array(np.arange(8.0))
    tuned(hide)(x)
    assert np.ma.getmaskarray(x).tolist() == [True] + [False] * 7


def test_a_read_only_view_that_is_written_through_its_base_is_put_back():
    base = np.zeros(4)
    view = base.view()
    view.setflags(write=False)

    def through(x, *, config):
        x.base[...] += 1

    tuned(through)(view)
    assert base.tolist() == [1, 1, 1, 1]


@pytest.mark.promise("arguments-left-alone")
def test_an_argument_that_mutates_does_not_name_is_put_back():
    def add(x, y, *, config):
        x += 1
        y += 1

    x, y = np.zeros(4), np.zeros(4)
    tuned(add, mutates=("y",))(x, y)
    assert x.tolist() == y.tolist() == [1, 1, 1, 1]


@pytest.mark.slow  # 800 MB
def test_a_big_array_is_compared_after_the_first_run_of_every_candidate():
    def add(x, *, config):
        if config.w == 3:
            x[-1] += 1

    x = np.zeros((256 << 20) // 8 + 1)
    tuned(add)(x)
    assert x[-1] <= 1  # 1 if the candidate that writes has won


@pytest.mark.promise("arguments-left-alone")
@pytest.mark.parametrize("crash", [False, True])
@pytest.mark.parametrize("make", [on_disk, lambda _: np.frombuffer(mmap.mmap(-1, 32), "f8")])
def test_memory_that_a_worker_shares_with_the_program_is_put_back(tmp_path, make, crash):
    x = make(tmp_path)

    def add(x, *, config):
        x += 1
        if crash and config.w == 2:
            raise SystemExit

    kernel = tuned(add, policy=tb.AutotunePolicy(isolate="always"))
    tb.tune(kernel, x)
    assert x.tolist() == [0, 0, 0, 0]


def test_a_candidate_that_writes_elsewhere_does_not_make_the_others_wrong():
    def out(x, y, *, config):
        x[:] = 1
        if config.w == 2:
            y[:] = 1

    x, y = np.zeros(4), np.zeros(4)
    done = tb.tune(tuned(out, check=True), x, y)
    failures = {done.configs[m.fingerprint]["w"]: m.failure and m.failure.kind for m in done.measurements}
    assert failures == {1: None, 2: "wrong-result", 3: None}


# ------------------------------------------------------------------------------------------------------ other arguments


class Slotted:
    __slots__ = ("__n", "x")

    def __init__(self, x):
        self.x, self.__n = x, 0

    def bump(self):
        self.__n += 1
        return self.__n


tb.register_key(Slotted, lambda slotted: len(slotted.x))


class Struct(ctypes.Structure):
    _fields_ = (("n", ctypes.c_int),)


def drew_once(draw, like):
    """Return a function that says whether a generator goes on as one like it does after one number."""
    draw(like)
    following = draw(like)
    return lambda generator: draw(generator) == following


CHANGES = {
    "a list grows": (list, lambda x: x.append(1), lambda x: x == [1]),
    "an item of a list": (lambda: [0], lambda x: x.__setitem__(0, x[0] + 1), lambda x: x == [1]),
    "a list of lists": (lambda: [[]], lambda x: x[0].append(1), lambda x: x == [[1]]),
    "a list of the user's own": (UserList, lambda x: x.append(1), lambda x: x == [1]),
    "a dict": (dict, lambda x: x.update({len(x): 1}), lambda x: x == {0: 1}),
    "an ordered dict": (OrderedDict, lambda x: x.update({len(x): 1}), lambda x: x == {0: 1}),
    "a counter": (Counter, lambda x: x.update("a"), lambda x: x == {"a": 1}),
    "a dict with a default": (lambda: defaultdict(int), lambda x: x[len(x)], lambda x: x == {0: 0}),
    "a dict of the user's own": (UserDict, lambda x: x.update({len(x): 1}), lambda x: x == {0: 1}),
    "a set": (set, lambda x: x.add(len(x)), lambda x: x == {0}),
    "a queue": (deque, lambda x: x.append(1), lambda x: list(x) == [1]),
    "bytes": (lambda: bytearray(1), lambda x: x.extend(b"x"), lambda x: x == b"\0x"),
    "an array of the standard library": (lambda: array("d", [0]), lambda x: x.append(1), lambda x: len(x) == 2),
    "a field": (lambda: State(0), lambda x: setattr(x, "x", x.x + 1), lambda x: x.x == 1),
    "a slot": (lambda: Slotted([]), lambda x: x.x.append(x.bump()), lambda x: x.x == [1]),
    "a registered object": (lambda: Keyed(np.zeros(1)), lambda x: setattr(x, "x", x.x + 1), lambda x: x.x[0] == 1),
    "a list in an array of objects": (
        lambda: np.array([[], None], object),
        lambda x: x[0].append(1),
        lambda x: x[0] == [1],
    ),
    "a queue of a library": (Queue, lambda x: x.put(1), lambda x: (x.qsize(), x.unfinished_tasks) == (1, 1)),
    "memory of C": (ctypes.c_float * 4, lambda x: x.__setitem__(0, x[0] + 1), lambda x: x[0] == 1),
    "a struct of C": (Struct, lambda x: setattr(x, "n", x.n + 1), lambda x: x.n == 1),
    "a number of C": (ctypes.c_int, lambda x: setattr(x, "value", x.value + 1), lambda x: x.value == 1),
    "mapped memory": (lambda: mmap.mmap(-1, 8), lambda x: x.__setitem__(0, (x[0] + 1) % 256), lambda x: x[0] == 1),
    "a view of memory": (
        lambda: memoryview(bytearray(1)),
        lambda x: x.__setitem__(0, (x[0] + 1) % 256),
        lambda x: x[0] == 1,
    ),
    "random numbers": (lambda: Random(0), Random.random, drew_once(Random.random, Random(0))),
    "random numbers of numpy": (
        lambda: np.random.default_rng(0),
        np.random.Generator.random,
        drew_once(np.random.Generator.random, np.random.default_rng(0)),
    ),
    "another algorithm": (
        lambda: np.random.Generator(np.random.MT19937(0)),
        np.random.Generator.random,
        drew_once(np.random.Generator.random, np.random.Generator(np.random.MT19937(0))),
    ),
    "old random numbers of numpy": (
        lambda: np.random.RandomState(0),
        np.random.RandomState.rand,
        drew_once(np.random.RandomState.rand, np.random.RandomState(0)),
    ),
    "random numbers of an object": (
        lambda: SimpleNamespace(rng=Random(0)),
        lambda x: x.rng.random(),
        lambda x: drew_once(Random.random, Random(0))(x.rng),
    ),
    "random numbers of the system": (SystemRandom, SystemRandom.random, lambda x: 0 <= x.random() < 1),
    "a list in a partial": (lambda: partial(print, []), lambda x: x.args[0].append(1), lambda x: x.args[0] == [1]),
}


@pytest.mark.promise("arguments-left-alone")
@pytest.mark.parametrize(("make", "change", "is_right"), CHANGES.values(), ids=CHANGES)
def test_a_change_to_any_argument_is_made_once(make, change, is_right):
    def kernel(x, state, *, config):
        change(state)
        return x

    state = make()
    tuned(kernel, ignore=("state",))(np.zeros(2), state)
    assert is_right(state)


def test_generators_of_torch_are_put_back():
    torch = pytest.importorskip("torch")

    def kernel(x, generator, *, config):
        return x + torch.rand(2, generator=generator)

    like, generator = (torch.Generator().manual_seed(0) for _ in range(2))
    tuned(kernel, ignore=("generator",))(torch.zeros(2), generator)
    torch.rand(2, generator=like)
    assert torch.equal(like.get_state(), generator.get_state())


def test_every_candidate_draws_the_random_numbers_of_the_reference():
    def noisy(x, rng, *, config):
        return x + rng.random(2) * config.factor

    space = [{"factor": factor} for factor in (1.0, 2.0, 1 + 1e-12)]
    call = tb.tunable(
        noisy, space=space, ignore=("rng",), reference=lambda x, rng: x + rng.random(2), store=False, name="noisy"
    )
    result = tb.tune(call, np.zeros(2), np.random.default_rng(0), progress=False)
    passed = {result.configs[m.fingerprint].factor for m in result.measurements if m.failure is None}
    assert passed == {1.0, 1 + 1e-12}


class Layer:
    """An object without a key, which is ignored: a `self`."""

    def __init__(self):
        self.calls, self.log, self.plan, self.plans, self.buffer = 0, [], None, {}, np.zeros(2)

    def step(self, config):
        self.calls += 1
        self.log.append(config.w)
        self.plan = self.plan or object()
        self.plans.setdefault(config.w, object())
        self.buffer += 1


def test_counters_lists_and_arrays_of_an_object_are_put_back_and_its_caches_stay():
    layer, plans = Layer(), []

    def kernel(layer, x, *, config):
        layer.step(config)
        plans.append(layer.plan)
        return x

    tuned(kernel, ignore=("layer",))(layer, np.zeros(2))
    assert (layer.calls, len(layer.log), layer.buffer.tolist()) == (1, 1, [1, 1])
    assert len(set(map(id, plans))) == 1  # it was made by the first run only
    assert set(layer.plans) == {1, 2, 3}


@pytest.mark.promise("arguments-left-alone")
def test_a_change_that_cannot_be_put_back_stops_the_tuning_with_a_warning():
    inside = {"n": 0}

    def count(x, state, *, config):
        inside["n"] += 1
        return x

    kernel = tuned(count, ignore=("state",))
    with pytest.warns(
        tb.TunebookWarning,
        match="a run changes argument 2, and its mappingproxy cannot be put back: .*return a",
    ):
        kernel(np.zeros(2), MappingProxyType(inside))
    assert inside["n"] == 2  # the first run, and the call itself


def test_an_iterator_is_left_to_the_call():
    def consume(x, items, *, config):
        return list(items)

    kernel = tuned(consume, ignore=("items",))
    with pytest.warns(
        tb.TunebookWarning,
        match="a list_iterator among the arguments is used up by the first run: .*pass a list",
    ):
        assert kernel(np.zeros(2), iter([1, 2])) == [1, 2]
