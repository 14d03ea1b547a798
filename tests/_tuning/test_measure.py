"""`Measure`: how candidates are measured is the user's choice, and a part of a measurement's identity."""

from __future__ import annotations

import numpy as np
import pytest
from kernels import FakeClock, fake_tuner, job_of

import tunebook as tb
from tunebook._arrays.made_up import duplicate
from tunebook._measure.host_caches import cache_bytes, empty_caches
from tunebook._measure.stopwatch import Launches, Stopwatch
from tunebook._tuning.job import Timing


class Runs:
    """A kernel of two configurations on a fake clock; notes the memory that each run got, and emptied caches."""

    def __init__(self, **options):
        self.clock, self.got, self.notes = FakeClock(), [], []
        stopwatch = Stopwatch(clock_ns=self.clock, empty_caches=lambda: self.notes.append("emptied"))
        tuner = tb.Tuner(stopwatch=stopwatch, clock_s=lambda: self.clock.seconds)
        space = tb.Space(step=[1, 2])
        options = {"store": False, **options}

        @tb.tunable(space=space, heuristic={"step": 1}, name="runs", tuner=tuner, check=False, **options)
        def runs(x, *, config):
            self.got.append(id(x))
            self.notes.append("ran")
            self.clock.spend(config.step)
            return config.step

        self.call = runs


def policies(tuned):
    return {m.policy for m in tuned.measurements}


X = np.arange(24.0).reshape(4, 6)


@pytest.mark.promise("measured-as-told")
def test_the_way_to_measure_is_part_of_a_measurements_identity(tmp_path):
    kernel = Runs(store=tmp_path)
    usual = policies(tb.tune(kernel.call, X))
    assert usual == policies(tb.tune(kernel.call, X, measure=tb.Measure(cache="warm", launch="eager", inputs=1)))
    ran = len(kernel.got)
    tuned = tb.tune(kernel.call, X, measure=tb.Measure(cache="cold", inputs=3))
    assert policies(tuned) == {"host-clock/cold-cache/race/warmup=1/forward/inputs=3"}
    assert len(kernel.got) > ran, "times that were taken in another way are not used again"
    assert "how        host-clock/cold-cache/race/warmup=1/forward/inputs=3" in str(kernel.call.explain(X))
    ran = len(kernel.got)
    tb.tune(kernel.call, X, measure=tb.Measure(cache="cold", inputs=3))
    assert len(kernel.got) == ran, "and those that were taken in the same way are"


@pytest.mark.parametrize("where", ["decorator", "policy", "kernel class"])
def test_the_decorator_and_the_policy_and_a_kernel_class_can_say_how(where):
    measure = tb.Measure(inputs=2)
    if where == "kernel class":

        class Summed(tb.Kernel):
            checks, measure = False, tb.Measure(inputs=2)

            def candidate_cfgs(self, inv):
                return [1, 2]

            def run(self, x, *, cfg):
                clock.spend(cfg)

        clock = FakeClock()
        chain = tb.ConfigSelectorChain(tb.ConfigCache(), None, fake_tuner(clock))
        tuned = chain.tune(tb.Invocation("summed", (X,), {}), Summed("summed"))
    else:
        given = {"measure": measure} if where == "decorator" else {"policy": tb.AutotunePolicy(measure=measure)}
        tuned = tb.tune(Runs(**given).call, X)
    assert policies(tuned) == {"host-clock/race/warmup=1/forward/inputs=2"}


def test_a_kernel_class_with_a_method_of_that_name_is_measured_as_usual():
    class Measuring(tb.Kernel):
        checks = False

        def candidate_cfgs(self, inv):
            return [1, 2]

        def run(self, x, *, cfg):
            clock.spend(cfg)

        def measure(self, x):
            """A method of the user's own."""

    clock, kernel, inv = FakeClock(), Measuring("measuring"), tb.Invocation("measuring", (X,), {})
    tuned = tb.ConfigSelectorChain(tb.ConfigCache(), None, fake_tuner(clock)).tune(inv, kernel)
    assert policies(tuned) == {"host-clock/race/warmup=1/forward"}
    assert kernel.checksum(inv) == Measuring("measuring").checksum(inv)


def test_tune_goes_before_the_policy_and_the_policy_before_the_kernel_field_by_field():
    policy = tb.AutotunePolicy(measure=tb.Measure(cache="cold", inputs=4))
    kernel = Runs(measure=tb.Measure(cache="warm", inputs=2, launch="eager"), policy=policy)
    assert policies(tb.tune(kernel.call, X)) == {"host-clock/cold-cache/race/warmup=1/forward/inputs=4"}
    tuned = tb.tune(kernel.call, X, measure=tb.Measure(inputs=3))
    assert policies(tuned) == {"host-clock/cold-cache/race/warmup=1/forward/inputs=3"}


def test_an_entry_of_a_kernel_that_now_measures_otherwise_is_tuned_anew(tmp_path):
    Runs(store=tmp_path).call(X)
    again = Runs(store=tmp_path)
    again.call(X)
    assert len(again.got) == 1
    other = Runs(store=tmp_path, measure=tb.Measure(inputs=2))
    other.call(X)
    assert len(other.got) > 2


@pytest.mark.promise("measured-as-told")
def test_caches_are_emptied_before_each_sample_and_outside_of_its_time():
    kernel = Runs(measure=tb.Measure(cache="cold"))
    kernel.call.selector.tuner.stopwatch = kernel.call.selector.tuner.stopwatch._replace(
        empty_caches=lambda: (kernel.notes.append("emptied"), kernel.clock.spend(100))
    )
    tuned = tb.tune(kernel.call, X)
    assert [m.samples_s[0] for m in tuned.measurements] == [1.0, 2.0]
    checked, sampled = kernel.notes[:2], kernel.notes[2:]
    assert checked == ["ran", "ran"]
    assert sampled == ["emptied", "ran"] * (len(sampled) // 2)


def test_to_empty_the_hosts_caches_reads_more_than_they_hold():
    assert cache_bytes(8 << 20) == 16 << 20
    empty_caches()


# ----------------------------------------------------------------------------------------------------- rotating inputs


def jax_arrays():
    jnp = pytest.importorskip("jax.numpy")
    return [jnp.ones((4, 6)), jnp.asarray(1.5, dtype=jnp.bfloat16)]


def torch_tensors():
    torch = pytest.importorskip("torch")
    x = torch.arange(24.0).reshape(4, 6)
    return [x, x.T, x[:, ::2], torch.ones(3, 1).expand(3, 4), torch.ones(3, requires_grad=True)]


def opencl_arrays():
    cl = pytest.importorskip("pyopencl")
    pytest.importorskip("tunebook.adapters.opencl")
    try:
        queue = cl.CommandQueue(cl.create_some_context(interactive=False))
    except cl.Error as error:
        pytest.skip(f"no OpenCL device: {error}")
    return [cl.array.to_device(queue, X)]


def numpy_arrays():
    return [X, X.T, X[:, ::2], X[::-1], np.broadcast_to(X[0], (3, 6)), np.ma.masked_array(X[0], X[0] > 2)]


LIBRARIES = {"numpy": numpy_arrays, "torch": torch_tensors, "jax": jax_arrays, "opencl": opencl_arrays}


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_copy_has_the_values_and_the_layout_of_an_array_in_memory_of_its_own(library):
    from tunebook._arrays.describe import describe
    from tunebook._arrays.library import library_of

    for x in LIBRARIES[library]():
        copy = duplicate(x)
        assert copy is not x
        assert describe(copy) == describe(x)
        to_numpy = library_of(x).to_numpy
        assert np.array_equal(np.asarray(to_numpy(copy)), np.asarray(to_numpy(x)))
        if library == "jax":
            assert copy.unsafe_buffer_pointer() != x.unsafe_buffer_pointer()
        if library == "numpy":
            assert not np.shares_memory(copy, x)


@pytest.mark.promise("measured-as-told")
def test_samples_take_the_copies_in_turn_and_checked_runs_get_the_callers_own():
    kernel = Runs(measure=tb.Measure(inputs=3))
    tb.tune(kernel.call, X)
    checked, sampled = kernel.got[:2], kernel.got[2:]
    assert set(checked) == {id(X)}
    assert len(set(sampled)) == 3
    assert sampled == (sampled[:3] * len(sampled))[: len(sampled)]


@pytest.mark.parametrize("eager", [False, True])
def test_jax_arrays_take_turns_though_they_cannot_be_written_to(eager):
    jax = pytest.importorskip("jax")
    seen = set()

    def look(x):
        seen.add(x.unsafe_buffer_pointer())

    @tb.tunable(space=tb.Space(step=[1, 2]), heuristic={"step": 1}, store=False, measure=tb.Measure(inputs=4))
    def double(x, *, config):
        if eager:
            look(x)  # which no tracer has: the function runs as it is
        return x * 2

    x = jax.numpy.arange(1024.0)
    tuned = tb.tune(double, x)
    assert policies(tuned) == {"host-clock/race/warmup=1/forward/inputs=4"}
    assert not eager or len(seen) == 4
    assert eager or np.array_equal(jax.jit(double)(x), x * 2)


def test_an_argument_that_runs_write_to_is_put_back_in_every_copy():
    seen = []
    launches = Launches([1], lambda _: _scale(seen), (np.ones(3),), {}, copies=3)
    launches(0)()
    launches.arguments.notice()
    for _ in range(7):
        assert launches.ready()
        launches.in_turn(0)()
    assert seen == [[1.0, 1.0, 1.0]] * 8


def _scale(seen):
    def scale(x):
        seen.append(x.tolist())
        x *= 2

    return scale


def test_an_array_that_cannot_be_copied_is_an_error_that_names_it():
    class Opaque:
        shape, dtype = (3,), np.dtype("float32")

    @tb.tunable(space=tb.Space(step=[1, 2]), store=False, measure=tb.Measure(inputs=2), check=False)
    def f(x, *, config):
        return x

    with pytest.raises(tb.DefinitionError, match=r"cannot copy a .*Opaque for Measure"):
        tb.tune(f, Opaque())


# ------------------------------------------------------------------------------------------------------------ graphs


class Graphs:
    """Stands in for a device's graphs: the second call of a replayed function captures, and later calls replay."""

    def __init__(self):
        self.captured = []

    def __call__(self, function):
        def replay():
            self.captured.append(function)
            return function()

        return replay


def test_a_run_is_captured_after_its_check_and_replayed_in_samples():
    graphs, ran = Graphs(), []
    job = job_of(lambda c: lambda: ran.append(c), [1], timing=Timing(graph=graphs))
    tuned = tb.Tuner(stopwatch=Stopwatch(clock_ns=_ticking())).tune(job)
    assert {m.policy for m in tuned.measurements} == {"host-clock/graph/race/warmup=1/forward"}
    assert len(ran) == len(graphs.captured) + 1, "only the checked run was not replayed"


def _ticking():
    now = iter(range(10**9))
    return lambda: next(now) * 1000


def test_a_run_that_cannot_be_captured_costs_its_candidate_only():
    def graph(function):
        raise RuntimeError("operation not permitted when stream is capturing")

    job = job_of(lambda c: lambda: None, [1], timing=Timing(graph=graph))
    with pytest.raises(tb.TuningFailed, match="the only candidate failed") as failed:
        tb.Tuner().tune(job)
    assert "stream is capturing" in str(failed.value.exceptions[0])


# ------------------------------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"cache": "hot"}, "cache='hot'.: use one of 'warm', 'cold'"),
        ({"inputs": 0}, "inputs=0.: write how many"),
        ({"inputs": True}, "inputs=True.: write how many"),
        ({"launch": "later"}, "use one of 'eager', 'graph'"),
        ({"host": 1}, "host=1.: use one of True, False"),
    ],
)
def test_a_wrong_value_is_an_error_where_it_is_written(fields, message):
    with pytest.raises(tb.DefinitionError, match=message):
        tb.Measure(**fields)


@pytest.mark.promise("measured-as-told")
@pytest.mark.parametrize(
    ("measure", "message"),
    [
        (tb.Measure(launch="graph"), "calls on cpu with numpy cannot be captured in a graph; leave launch='graph' out"),
        (tb.Measure(host=False), "calls on cpu with numpy have none here; leave host=False out"),
    ],
)
def test_a_way_that_the_device_does_not_have_is_an_error_and_not_silence(measure, message):
    for kernel in (Runs(measure=measure), Runs(policy=tb.AutotunePolicy(measure=measure))):
        with pytest.raises(tb.DefinitionError, match=message):
            kernel.call(X)


def test_other_values_than_a_measure_are_refused_everywhere():
    with pytest.raises(tb.DefinitionError, match=r"invalid measure=.cold.: write measure=tunebook.Measure\(cache="):
        tb.AutotunePolicy(measure="cold")
    with pytest.raises(tb.DefinitionError, match="invalid measure="):
        Runs(measure="cold")
    with pytest.raises(tb.DefinitionError, match="invalid measure="):
        tb.tune(Runs().call, X, measure={"cache": "cold"})


def test_tuning_in_the_users_calls_cannot_choose_how():
    measure = tb.Measure(cache="cold")
    with pytest.raises(tb.DefinitionError, match="measures the user's own calls as they are"):
        tb.AutotunePolicy(cache_miss_fallback="incremental", measure=measure)
    kernel = Runs(measure=measure, policy=tb.AutotunePolicy(cache_miss_fallback="incremental"))
    with pytest.warns(tb.TunebookWarning, match="its calls are measured as they are, and not as Measure"):
        kernel.call(X)
    assert not kernel.call.selector.pending


def test_a_timer_of_the_users_own_and_a_way_to_measure_exclude_each_other():
    class Mine:
        name, is_device_clock = "mine", False

        def wait(self, result):
            pass

        def sample_s(self, launch, runs):
            return 1.0

    tuner = tb.Tuner(stopwatch=Stopwatch().by(Mine()))
    kernel = Runs(measure=tb.Measure(cache="cold"))
    kernel.call.selector.tuner = tuner
    with pytest.raises(tb.DefinitionError, match="the tuner has a timer of its own"):
        kernel.call(X)


def test_an_opencl_queue_with_the_devices_clock_cannot_be_cold_but_the_hosts_clock_can():
    cl = pytest.importorskip("pyopencl")
    pytest.importorskip("tunebook.adapters.opencl")
    try:
        context = cl.create_some_context(interactive=False)
    except cl.Error as error:
        pytest.skip(f"no OpenCL device: {error}")
    queue = cl.CommandQueue(context, properties=cl.command_queue_properties.PROFILING_ENABLE)
    x = cl.array.to_device(queue, X)

    @tb.tunable(space=tb.Space(step=[1, 2]), heuristic={"step": 1}, store=False)
    def double(x, *, config):
        return x * 2

    with pytest.raises(tb.DefinitionError, match=r"cannot empty the caches\. Add host=True"):
        tb.tune(double, x, measure=tb.Measure(cache="cold"))
    (how,) = policies(tb.tune(double, x, measure=tb.Measure(cache="cold", host=True)))
    assert how.startswith("host-clock/cold-cache/")
    (how,) = policies(tb.tune(double, x, measure=tb.Measure(host=False, cache="warm", inputs=2)))
    assert how == "opencl-events/race/warmup=1/forward/inputs=2"


# -------------------------------------------------------------------------------------------- a device with a clock


class DeviceTimer:
    """Stands in for the timer of a device."""

    is_device_clock = True

    def __init__(self, name):
        self.name = name

    def wait(self, result):
        pass

    def sample_s(self, launch, runs):
        for _ in range(runs):
            launch()
        return 1.0


class DeviceArray:
    """An array of a library whose device has a clock, caches that can be emptied, and graphs."""

    def __init__(self):
        self.shape, self.dtype, self.device = (3,), np.dtype("float32"), "gpu:Pretend"


@pytest.fixture
def device_library():
    from tunebook._arrays import library

    graphs = Graphs()
    record = tb.ArrayLibrary(
        "pretend",
        (DeviceArray,),
        timer=lambda _: DeviceTimer("cold-l2/launch"),
        timer_as=lambda _, cold, graph: DeviceTimer(
            f"{'cold' if cold else 'warm'}-l2/{'graph' if graph else 'launch'}"
        ),
        graph=lambda _: graphs,
        duplicate=lambda _: DeviceArray(),
    )
    tb.register_array_library(record)
    yield graphs
    for known in (library._known, library._listed):
        for key in [key for key, value in known.items() if value is record]:
            del known[key]
    library._by_class.clear()


@pytest.mark.parametrize(
    ("measure", "clock"),
    [
        (None, "device-clock/cold-l2/launch"),
        (tb.Measure(cache="cold", host=False), "device-clock/cold-l2/launch"),
        (tb.Measure(cache="warm"), "device-clock/warm-l2/launch"),
        (tb.Measure(launch="graph"), "device-clock/cold-l2/graph"),
        (tb.Measure(launch="graph", cache="warm"), "device-clock/warm-l2/graph"),
        (tb.Measure(host=True), "host-clock"),
        (tb.Measure(host=True, launch="graph"), "host-clock/graph"),
    ],
)
def test_a_device_with_a_clock_measures_as_it_is_told(device_library, measure, clock):
    @tb.tunable(space=tb.Space(step=[1, 2]), heuristic={"step": 1}, store=False, check=False)
    def run(x, *, config):
        return None

    (how,) = policies(tb.tune(run, DeviceArray(), measure=measure))
    assert how == f"{clock}/race/warmup=1/forward"
    assert bool(device_library.captured) == (measure is not None and measure.launch == "graph")


def test_the_hosts_clock_cannot_empty_the_caches_of_another_device(device_library):
    @tb.tunable(space=tb.Space(step=[1, 2]), heuristic={"step": 1}, store=False, check=False)
    def run(x, *, config):
        return None

    with pytest.raises(tb.DefinitionError, match="cannot empty the caches of another device"):
        tb.tune(run, DeviceArray(), measure=tb.Measure(host=True, cache="cold"))
