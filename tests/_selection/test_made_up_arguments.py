"""Made-up arguments never overrule a caller's: not in the book, not in memory, not by success and not by failure."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest
from kernels import FakeClock, fake_tuner
from limits import HANG_S

import tunebook as tb
from tunebook._base.record_format import Record, merge
from tunebook._base.vocabulary import Measurement
from tunebook._cli import main
from tunebook._selection.recording import make_up, with_inputs

REAL = np.full((4, 4), 2.0)  # made-up floats are normal: some are negative
BACKGROUND = tb.AutotunePolicy(cache_miss_fallback="background")


class Root:
    """A kernel that fails on negative numbers, and whose two candidates change places on made-up ones."""

    def __init__(self, path, *, clock=None, valid=lambda a: a.min() >= 0, made_up_s=(2.0, 1.0), **options):
        self.clock = clock or FakeClock()
        self.ran_on = []

        def root(a, *, config):
            self.ran_on.append("call" if (a == 2).all() else "made up")
            if not valid(a):
                raise ValueError("a negative number has no root")
            self.clock.spend((1.0, 2.0)[config.way] if (a == 2).all() else made_up_s[config.way])
            return np.zeros(3)

        self.call = tb.tunable(
            root,
            name="root",
            space=tb.Space(way=[0, 1]),
            heuristic={"way": 1},
            store=path,
            tuner=fake_tuner(self.clock),
            **options,
        )

    @property
    def record(self):
        return self.call.selector.persistent.read(self.call.problem(REAL))

    def on_random(self):
        """Return the call on made-up arguments, as `tunebook verify` makes it."""
        return self.recorded(), self.call.kernel

    def recorded(self):
        with tb.record() as calls:
            self.call(REAL)
        (call,) = calls
        return make_up(self.call.kernel, call.invocation(self.call.kernel))


def anything(_a):
    return True


def data_of(record):
    return {m.values_from for m in record.body.measurements}


# -------------------------------------------------------------------------------------------------------- failures


@pytest.mark.promise("real-data-counts")
@pytest.mark.parametrize("pinned", [False, True])
def test_a_verification_that_fails_on_made_up_arguments_changes_nothing(tmp_path, pinned):
    kernel = Root(tmp_path)
    assert kernel.call(REAL) is not None
    if pinned:
        record = kernel.record
        kernel.call.selector.persistent.write(record.replace(head=replace(record.head, origin="pinned")))
    before = kernel.record.to_bytes()
    with pytest.raises(tb.TuningFailed) as failed:
        kernel.call.selector.verify(*kernel.on_random())
    assert failed.value.on_made_up
    assert kernel.record.to_bytes() == before
    kernel.call(REAL)
    assert kernel.call.explain(REAL).selection.config.way == 0


def test_a_choice_whose_output_is_wrong_on_made_up_arguments_alone_is_not_called_slower(tmp_path):
    clock = FakeClock()

    @tb.tunable(space=tb.Space(way=[0, 1]), heuristic={"way": 1}, name="root", store=tmp_path, tuner=fake_tuner(clock))
    def root(a, *, config):
        clock.spend((1.0, 2.0)[config.way])
        return np.sqrt(np.abs(a)) if config.way else np.sqrt(np.maximum(a, 0))

    root(REAL)
    with tb.record() as calls:
        root(REAL)
    (call,) = calls
    verified = root.selector.verify(make_up(root.kernel, call.invocation(root.kernel)), root.kernel)
    assert (verified.held, verified.kept, verified.config.way) == (False, True, 0)
    assert "faster" not in verified.reason
    assert verified.reason.startswith("the choice gave a wrong output on made-up arguments: ")
    assert "; it stands, because it was made on a caller's arguments. To verify it, give the kernel inputs=" in (
        verified.reason
    )


def test_the_verb_says_why_it_could_not_verify_and_what_to_give(tmp_path, monkeypatch, capsys):
    (tmp_path / "rooted.py").write_text(
        "import numpy as np, tunebook as tb\n"
        "@tb.tunable(space=tb.Space(way=[0, 1]), heuristic={'way': 0}, name='rooted')\n"
        "def rooted(a, *, config):\n"
        "    if a.min() < 0: raise ValueError('a negative number has no root')\n"
        "    return a\n"
    )
    monkeypatch.setenv("TUNEBOOK_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    import rooted  # the module that was just written

    rooted.rooted(REAL)
    before = rooted.rooted.selector.persistent.read(rooted.rooted.problem(REAL)).to_bytes()
    assert main(["verify", "--import", "rooted", "--json"]) == 1
    said = capsys.readouterr().out
    assert '"status": "skipped"' in said
    for part in ("made-up arguments", "a negative number has no root", "nothing changed", "inputs="):
        assert part in said
    assert rooted.rooted.selector.persistent.read(rooted.rooted.problem(REAL)).to_bytes() == before


def tune_recording(kernel):
    with tb.record() as calls:
        kernel.call(REAL)
    (outcome,) = tb.tune_all(calls)
    assert outcome.status == "failed"
    first = outcome.detail.partition("\n")[0]
    assert "a negative number has no root" in first
    assert "inputs=" in first


def tune_behind(kernel):
    with tb.policy_override(kernel.call.selector, cache_miss_fallback="background"):
        with pytest.warns(tb.TunebookWarning, match=r"(?s)on made-up arguments: .*no root.*inputs="):
            kernel.call(REAL), tb.wait_for_background(HANG_S)
        ran = len(kernel.ran_on)
        kernel.call(REAL)
        assert tb.wait_for_background(HANG_S)
        assert len(kernel.ran_on) == ran + 1, "the background does not try again at every call"


@pytest.mark.promise("real-data-counts")
@pytest.mark.parametrize("fail", [tune_recording, tune_behind])
@pytest.mark.parametrize("process", ["the same", "another"])
def test_a_failure_on_made_up_arguments_does_not_keep_a_call_from_tuning(tmp_path, fail, process):
    kernel = Root(tmp_path)
    fail(kernel)
    assert not kernel.record.head.decided
    assert data_of(kernel.record) == {"random"}
    assert "every candidate failed on made-up arguments" in str(kernel.call.explain(REAL))
    assert "\n  note " in str(kernel.call.explain(REAL))
    kernel = kernel if process == "the same" else Root(tmp_path)
    kernel.call(REAL)
    assert kernel.record.head.decided
    assert kernel.record.body.provenance["values_from"] == "call"
    assert kernel.call.explain(REAL).selection.config.way == 0
    assert "note" not in str(kernel.call.explain(REAL)), "the candidates have times now"


def test_a_failure_on_made_up_arguments_is_noted_while_the_candidate_has_no_time(tmp_path):
    kernel = Root(tmp_path)
    tune_recording(kernel)
    noted = "raised ValueError: a negative number has no root (only on made-up arguments: random floats, "
    assert f"\n  note       2 candidates {noted}" in str(kernel.call.explain(REAL))
    tb.tune(kernel.call, REAL, budget="1 trials", progress=False)
    assert f"\n  note       way=0  {noted}" in str(kernel.call.explain(REAL))
    edited = Root(tmp_path, version="1")
    edited.call(REAL)
    assert "note" not in str(edited.call.explain(REAL)), "nor of other code"


def test_a_later_process_does_not_repeat_a_failure_in_the_background(tmp_path):
    tune_behind(Root(tmp_path))
    tb._base.errors.forget_warnings()
    again = Root(tmp_path, policy=BACKGROUND)
    with pytest.warns(tb.TunebookWarning, match="failed before"):
        again.call(REAL), tb.wait_for_background(HANG_S)
    assert again.ran_on == ["call"]


def test_a_call_that_waits_for_a_background_tuning_is_not_failed_by_it(tmp_path):
    started, go_on = threading.Event(), threading.Event()

    def valid(a):
        if a.min() < 0:
            started.set()
            assert go_on.wait(HANG_S)
        return a.min() >= 0

    kernel = Root(tmp_path, valid=valid)
    behind = threading.Thread(target=lambda: tb.tune_all(calls))
    with tb.record() as calls:
        kernel.call(REAL)
    behind.start()
    assert started.wait(HANG_S)
    caller = threading.Thread(target=kernel.call, args=(REAL,))
    caller.start()
    go_on.set()
    caller.join(HANG_S)
    behind.join(HANG_S)
    assert kernel.record.body.provenance["values_from"] == "call"


# ------------------------------------------------------------------------------------------------------- successes


def test_measurements_say_on_which_arguments_and_these_are_not_mixed(tmp_path):
    kernel = Root(tmp_path, valid=anything)
    kernel.call(REAL)
    verified = kernel.call.selector.verify(*kernel.on_random())
    assert (verified.held, verified.kept, verified.config.way) == (False, True, 0)
    assert "because it was made on a caller's arguments" in verified.reason
    assert kernel.call.explain(REAL).selection.config.way == 0
    assert kernel.record.body.provenance["values_from"] == "call"
    assert "on         the caller's arguments" in str(kernel.call.explain(REAL))


@pytest.mark.parametrize("environment", ["old", "new"])
def test_a_choice_that_holds_on_made_up_arguments_still_rests_on_the_callers(tmp_path, environment):
    kernel = Root(tmp_path, valid=anything, made_up_s=(1.0, 2.0))
    kernel.call.kernel.environment = lambda _: "old"
    kernel.call(REAL)
    kernel.call.kernel.environment = lambda _: environment
    verified = kernel.call.selector.verify(*kernel.on_random())
    assert verified.held
    facts = kernel.record.body.provenance
    assert (facts["values_from"], facts["verified"]["values_from"]) == ("call", "random")
    assert kernel.record.head.environment == environment
    assert data_of(kernel.record) == {"call", "random"}


def test_after_an_update_made_up_arguments_leave_a_beaten_choice_to_the_next_call(tmp_path):
    kernel = Root(tmp_path, valid=anything)
    kernel.call.kernel.environment = lambda _: "old"
    kernel.call(REAL)
    later = Root(tmp_path, valid=anything)
    later.call.kernel.environment = lambda _: "new"
    inv, made = later.on_random()
    later.ran_on.clear()
    assert later.call.selector.tune(inv, made).config.way == 0
    assert (later.record.head.environment, set(later.ran_on)) == ("old", {"made up"})
    later.ran_on.clear()
    later.call(REAL)
    assert (later.record.head.environment, set(later.ran_on)) == ("new", {"call"})


def test_a_callers_arguments_replace_a_choice_on_made_up_ones(tmp_path):
    kernel = Root(tmp_path, valid=anything)
    with tb.record() as calls:
        kernel.call(REAL)
    assert [outcome.status for outcome in tb.tune_all(calls)] == ["tuned"]
    assert kernel.call.explain(REAL).selection.config.way == 1
    assert "on         made-up arguments: random" in str(kernel.call.explain(REAL))
    kernel.ran_on.clear()
    assert tb.tune(kernel.call, REAL).config.way == 0
    assert "call" in kernel.ran_on
    assert kernel.record.body.provenance["values_from"] == "call"


def test_a_record_of_an_older_release_counts_as_made_on_a_callers_arguments(tmp_path):
    kernel = Root(tmp_path, valid=anything)
    kernel.call(REAL)
    head, body = kernel.record.to_fields()
    del body["provenance"]["values_from"]
    kernel.call.selector.persistent.write(Record.from_fields(head, body))
    again = Root(tmp_path, valid=anything)
    again.call(REAL)
    assert again.ran_on == ["call"]
    assert again.call.selector.verify(*again.on_random()).kept
    assert "on  " not in str(again.call.explain(REAL)).partition("how")[2].partition("winner")[0]


def test_the_data_of_a_measurement_are_read_from_its_policy():
    m = Measurement(None, "f", "c", "host-clock/race/warmup=1/forward", "e")
    assert m.values_from == "call"
    assert m._replace(policy=f"{m.policy}/values=samples").values_from == "samples"
    assert m._replace(policy=f"{m.policy}/together=12/values=inputs").values_from == "inputs"


def test_of_two_books_the_choice_on_a_callers_arguments_goes_before_a_later_one(tmp_path):
    real, made_up = (Root(tmp_path / name, valid=anything) for name in ("real", "made_up"))
    real.call(REAL)
    with tb.record() as calls:
        made_up.call(REAL)
    tb.tune_all(calls)
    for pair in ((real.record, made_up.record), (made_up.record, real.record)):
        both = merge(*pair)
        assert both.body.provenance["values_from"] == "call"
        assert data_of(both) == {"call", "random"}


# ------------------------------------------------------------------------------------------- how arguments are made up


def behind(kernel):
    with tb.policy_override(kernel.call.selector, cache_miss_fallback="background"):
        kernel.call(REAL), tb.wait_for_background(HANG_S)


def recorded(kernel):
    with tb.record() as calls:
        kernel.call(REAL)
    assert [outcome.status for outcome in tb.tune_all(calls)] == ["tuned"]


@pytest.mark.parametrize("way", [behind, recorded])
def test_the_authors_inputs_are_used_wherever_a_callers_are_missing(tmp_path, way):
    kernel = Root(tmp_path, inputs=lambda a: (abs(a),))
    way(kernel)
    assert data_of(kernel.record) == {"inputs"}
    assert kernel.record.body.provenance["values_from"] == "inputs"


def test_a_rebuilt_call_has_the_authors_inputs_too(tmp_path):
    from tunebook._cli.verify import rebuild_call

    kernel = Root(tmp_path, inputs=lambda a: (abs(a),))
    kernel.call(REAL)
    inv = rebuild_call(kernel.call.kernel, kernel.call.problem(REAL))
    assert inv.values_from == "inputs"
    assert inv.args[0].min() > 0


@pytest.mark.parametrize(
    ("inputs", "error", "message"),
    [
        (lambda a: (a[:2],), tb.DefinitionError, r"another key \(a: .* there, .* here\)\. Return arrays of the same"),
        (lambda a: 1 / 0, tb.TuningFailed, "function that makes inputs for root failed"),
        (lambda a: (a, a), tb.DefinitionError, "returned 2 arguments; return one for each of a"),
    ],
)
def test_wrong_inputs_are_an_error_that_names_them(tmp_path, inputs, error, message):
    kernel = Root(tmp_path, inputs=inputs)
    with pytest.raises(error) as raised:
        kernel.recorded()
    assert raised.match(message) if error is tb.DefinitionError else message in str(raised.value)


def test_a_call_without_arrays_keeps_the_callers_values():
    @tb.tunable(space=[{"step": 1}], heuristic={"step": 1}, store=False)
    def total(n, *, config):
        return n

    with tb.record() as calls:
        total(5)
    (call,) = calls
    inv = make_up(total.kernel, call.invocation(total.kernel))
    assert (inv.args, inv.values_from) == ((5,), "call")
    assert with_inputs(total.kernel, inv) is inv


LIBRARIES = {
    "numpy": lambda: np,
    "jax": lambda: pytest.importorskip("jax.numpy"),
    "torch": lambda: pytest.importorskip("torch"),
}


@pytest.mark.promise("real-data-counts")
@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("saved", [False, True])
def test_recorded_integers_keep_their_values_so_that_indices_stay_in_range(tmp_path, library, saved):
    xp = LIBRARIES[library]()

    @tb.tunable(space=tb.Space(way=[0, 1]), heuristic={"way": 0}, name=f"gather_{library}", store=False)
    def gather(x, index, *, config):
        return x[index]

    x, index = xp.asarray([1.0, 2.0, 3.0, 4.0]), xp.asarray([[3, 0], [2, 1]]).T
    with tb.record() as calls:
        gather(x, index)
    if saved:
        calls.save(tmp_path / "calls.json")
        calls = tb.Recording.load(tmp_path / "calls.json")
    (call,) = calls
    inv = make_up(gather.kernel, call.invocation(gather.kernel))
    assert inv.values_from == "samples"
    assert np.asarray(inv.args[1]).tolist() == [[3, 2], [0, 1]]
    assert np.asarray(inv.args[0]).tolist() != [1.0, 2.0, 3.0, 4.0], "floats are made up"
    assert gather.kernel.problem(inv).call_key == call.problem.call_key


@pytest.mark.parametrize(
    "array",
    [np.arange(5000), np.arange(3.0), np.broadcast_to(np.arange(3), (4, 3)), np.zeros(0, int)],
    ids=["large", "float", "broadcast", "empty"],
)
def test_other_arrays_are_recorded_without_values(array):
    @tb.tunable(space=[{"step": 1}], heuristic={"step": 1}, store=False)
    def f(x, *, config):
        return x

    with tb.record() as calls:
        f(array)
    (call,) = calls
    assert call.args[0].values == ""
    assert make_up(f.kernel, call.invocation(f.kernel)).values_from == "random"


@pytest.mark.parametrize("values", ["AAAA", "!", "eJxjYGBgAAAABAAB"])
def test_values_that_do_not_fit_their_array_are_a_clear_error(values):
    spec = tb.ArraySpec("numpy", "int64", (3,), values=values)
    from tunebook._arrays.made_up import materialise

    with pytest.raises(tb.CodecError, match=r"recorded values of an array int64\[3\] cannot be read"):
        materialise(spec)


def test_a_failure_in_a_trace_of_jax_does_not_keep_an_eager_call_from_tuning(tmp_path):
    jax = pytest.importorskip("jax")

    clock = FakeClock()
    seen = []

    class Picky(tb.Kernel):
        def candidate_cfgs(self, inv):
            return [1, 2]

        def heuristic_cfg(self, inv):
            return 1

        def checker(self, inv):
            seen.append(inv.values_from)
            return lambda _output: None if inv.values_from == "call" else "not on made-up values"

        def run(self, x, *, cfg):
            return x + 1

    chain = tb.ConfigSelectorChain(tb.ConfigCache(), None, fake_tuner(clock), tb.PersistentCache("picky", tmp_path))
    execute, x, kernel = tb.Executor(chain), jax.numpy.ones(3), Picky("picky")
    with pytest.warns(tb.TunebookWarning, match=r"not on made-up values, on made-up arguments\. .*inputs="):
        jax.jit(lambda x: execute(kernel, x))(x)
    problem = kernel.problem(tb.Invocation("picky", (x,), {}))
    assert (seen, chain.persistent.read(problem).head.decided) == (["random"], False)
    jax.jit(lambda x: execute(kernel, x) * 2)(x)
    assert seen == ["random"], "another trace knows of the failure"
    clock.spend(1)
    execute(kernel, x)
    assert seen == ["random", "call"]


def test_a_tunable_function_is_tuned_after_a_trace_of_it_failed():
    jax = pytest.importorskip("jax")
    clock, tried = FakeClock(), []

    @tb.tunable(space=[{"b": 1}, {"b": 2}], heuristic={"b": 1}, store=False, tuner=fake_tuner(clock))
    def picky(x, *, config):
        tried.append(config.b)
        return x + 1  # compiled, it does not move the clock: no candidate has a valid time

    x = jax.numpy.ones(3)
    with pytest.warns(tb.TunebookWarning, match="on made-up arguments"):
        jax.jit(picky)(x)
    tried.clear()
    picky(x)
    assert 2 in tried, "the call with values of its own tried the candidates"
