"""`cache_miss_fallback="predict"`: answers for sizes that were never tuned, and tunings of a few candidates."""

import math
import shutil
from dataclasses import replace

import pytest
from kernels import FakeClock, fake_tuner, note_in

import tunebook as tb
from tunebook._arrays import device_families
from tunebook._base.errors import require
from tunebook._base.record_format import Record
from tunebook._selection import predictions
from tunebook.search import _prediction, _size_model, predict
from tunebook.stores import write_pack

pytest.importorskip("numpy")

CORES = 4
SPACE = [{"block": 2**power, "way": way} for power in range(3, 11) for way in ("a", "b", "c")]
TUNED = [round(24 * 1.2**step) for step in range(45)]
UNSEEN = [round(1.1 * size) for size in TUNED[::3]]
BEST = {"a": 1.0, "b": 1.1, "c": 1.3}


def spent_s(size, config):
    waves = math.ceil(math.ceil(size / config["block"]) / CORES)
    return BEST[config["way"]] * (1e-4 + waves * (2e-5 + 1e-6 * config["block"]))


class Bench:
    """A tunable function on a fake clock, which knows the configurations that ran."""

    def __init__(self, tmp_path, space=SPACE, **options):
        self.clock, self.ran, self.events = FakeClock(), [], []

        def blocks(n, *, config):
            self.ran.append(config)
            self.clock.spend(spent_s(n, config))
            return n

        self.function = tb.tunable(
            blocks, space=space, name="blocks", store=tmp_path, tuner=fake_tuner(self.clock),
            on_event=note_in(self.events), **options,
        )  # fmt: skip

    @property
    def tried(self):
        return {tuple(config.items()) for config in self.ran}


def predicting(tmp_path, **options):
    return Bench(tmp_path, policy=tb.AutotunePolicy(cache_miss_fallback="predict", **options))


@pytest.fixture(scope="module")
def book(tmp_path_factory):
    folder = tmp_path_factory.mktemp("book")
    tuned = Bench(folder).function
    for size in TUNED:
        tb.tune(tuned, size)
    return folder


def test_of_more_sizes_than_a_model_learns_from_all_parts_are_learnt(tmp_path, monkeypatch):
    tuned = TUNED[1:]  # models are kept in memory by their entries: those of other tests have all
    for size in tuned:
        tb.tune(Bench(tmp_path).function, size)
    monkeypatch.setattr(_prediction, "_MOST_PROBLEMS", 20)  # of 44
    learnt, build = [], _prediction.SizeModel

    def watched(examples, *args, **options):
        learnt.append(sorted(example.sizes["n"] for example in examples))
        return build(examples, *args, **options)

    monkeypatch.setattr(_prediction, "SizeModel", watched)
    predicting(tmp_path, regret_limit=1.0).function(UNSEEN[3])
    (sizes,) = learnt
    assert len(sizes) == 20
    assert sizes[0] <= tuned[3]
    assert sizes[-1] >= tuned[-4]


def test_sizes_never_tuned_are_answered_at_once_with_a_bound_that_they_keep(book):
    bench = predicting(book, regret_limit=1.0)
    for size in UNSEEN:
        bench.ran.clear()
        bench.function(size)
        assert len(bench.ran) == 1
        told = [data for name, data in bench.events if name == "predicted"][-1]
        regret = spent_s(size, bench.ran[0]) / min(spent_s(size, config) for config in SPACE) - 1
        assert told["problems"] == len(TUNED)
        assert 0 <= told["regret"] <= told["bound"] <= 1.0
        assert regret <= told["bound"]


def test_a_pack_is_enough_to_predict_from(book, tmp_path):
    write_pack(tmp_path / "shipped.db", Bench(book).function.selector.persistent.store.items())
    bench = Bench(tmp_path / "shipped.db", policy=tb.AutotunePolicy(cache_miss_fallback="predict", regret_limit=1.0))
    assert f"learnt from {len(TUNED)} tuned problems" in str(bench.function.explain(UNSEEN[3]))


def test_explain_says_what_is_expected_and_what_that_rests_on(book):
    said = str(predicting(book, regret_limit=1.0).function.explain(UNSEEN[3]))
    assert "from a prediction" in said
    assert "heuristics" not in said
    assert said.count("expected to be ") == said.count(" slower than the best, ") == 1
    assert "0.0%" not in said
    assert f"in 95% of such calls; learnt from {len(TUNED)} tuned problems" in said


def test_a_size_outside_of_the_tuned_ones_has_no_bound_and_is_tuned(book):
    bench = predicting(book, regret_limit=1.0)
    for size in (TUNED[0] - 1, TUNED[-1] + 1, 100 * TUNED[-1]):
        said = str(bench.function.explain(size))
        assert f"would tune now; predict: no bound: n is {size:.10g}, and was tuned from 24 to {TUNED[-1]:g}" in said


def test_explain_says_in_a_frozen_program_why_nothing_is_predicted(book, monkeypatch):
    monkeypatch.setenv("TUNEBOOK_MODE", "frozen")
    policy = tb.AutotunePolicy(cache_miss_fallback="predict", regret_limit=1.0)
    bench = Bench(book, heuristic=SPACE[0], policy=policy)
    assert "off: TUNEBOOK_MODE is frozen; predict: no bound: n is 9, and" in str(bench.function.explain(9))
    assert "predict: no bound" not in str(bench.function.explain(UNSEEN[3]))


def test_explain_says_how_many_sizes_a_bound_needs(tmp_path):
    for size in TUNED[:16]:
        tb.tune(Bench(tmp_path).function, size)
    said = str(predicting(tmp_path, regret_limit=1.0).function.explain(UNSEEN[3]))
    assert "would tune now; predict: 16 tuned sizes, a bound needs 19" in said
    for size in TUNED[16:19]:
        tb.tune(Bench(tmp_path).function, size)
    assert "learnt from 19 tuned problems" in str(predicting(tmp_path, regret_limit=1.0).function.explain(UNSEEN[3]))


def test_explain_says_which_limit_a_bound_is_beyond(book):
    said = str(predicting(book, regret_limit=1e-9).function.explain(UNSEEN[3]))
    assert "tuned problems; policy.regret_limit is 1e-09" in said


def test_a_call_whose_bound_is_too_loose_is_tuned_with_the_candidates_that_matter(tmp_path):
    for size in TUNED[:25:6]:
        Bench(tmp_path).function(size)
    bench = predicting(tmp_path)  # five sizes are too few for a bound
    bench.function(UNSEEN[4])
    assert 8 <= len(bench.tried) <= 16
    assert not [name for name, _ in bench.events if name == "predicted"]
    chosen = bench.function.explain(UNSEEN[4]).selection.config
    assert spent_s(UNSEEN[4], chosen) == min(spent_s(UNSEEN[4], config) for config in SPACE)


def test_tuning_on_demand_tries_every_candidate(tmp_path):
    for size in TUNED[:25:6]:
        Bench(tmp_path).function(size)
    bench = predicting(tmp_path)
    tb.tune(bench.function, UNSEEN[4])
    assert len(bench.tried) == len(SPACE)


def test_without_other_sizes_every_candidate_is_tried(tmp_path):
    bench = predicting(tmp_path)
    bench.function(100)
    assert len(bench.tried) == len(SPACE)


def test_entries_of_other_code_tell_nothing(book):
    other = tb.tunable(
        lambda n, *, config: n,
        space=SPACE,
        name="blocks",
        store=book,
        policy="predict",
        heuristic=SPACE[0],
        tuner=False,
    )
    assert "learnt from" not in str(other.explain(UNSEEN[3]))


def test_entries_of_other_versions_tell_nothing(book):
    bench = predicting(book, regret_limit=1.0)
    bench.function.kernel.environment = lambda _: "updated"
    assert "would tune now" in str(bench.function.explain(UNSEEN[3]))


def other_versions(bench):
    bench.function.kernel.environment = lambda _: "updated"
    return bench


def test_a_frozen_program_predicts_from_entries_of_other_versions_and_says_so(book, monkeypatch):
    monkeypatch.setenv("TUNEBOOK_MODE", "frozen")
    bench = other_versions(predicting(book, regret_limit=1.0))
    with pytest.warns(tb.TunebookWarning, match="trusted as 'versions'.* made under other versions"):
        bench.function(UNSEEN[2])
    assert [name for name, _ in bench.events] == ["predicted", "heuristics"]
    said = str(bench.function.explain(UNSEEN[3]))
    assert "trusted     as 'versions': it is learnt from entries that were made under other versions" in said
    assert f"learnt from {len(TUNED)} tuned problems" in said


def test_a_policy_that_trusts_other_versions_predicts_from_their_entries(book):
    bench = other_versions(predicting(book, regret_limit=1.0, trust="versions"))
    assert "from a prediction" in str(bench.function.explain(UNSEEN[3]))


def test_a_frozen_program_predicts_from_entries_of_other_code_and_refuses_them_if_told_so(book, monkeypatch):
    monkeypatch.setenv("TUNEBOOK_MODE", "frozen")
    policy = tb.AutotunePolicy(cache_miss_fallback="predict", regret_limit=1.0)
    edited = tb.tunable(
        lambda n, *, config: n, space=SPACE, name="blocks", store=book, policy=policy, heuristic=SPACE[0]
    )
    assert "trusted     as 'code'" in str(edited.explain(UNSEEN[3]))
    monkeypatch.setenv("TUNEBOOK_TRUST", "candidates")
    assert "from heuristics" in str(edited.explain(UNSEEN[3]))


def on_device(book, tmp_path, device):
    """Return a book in which the same entries were made on another device."""
    records = Bench(book).function.selector.persistent.store.items()
    moved = [Record(replace(r.head, problem=r.problem._replace(device=device)), r.body) for r in records]
    write_pack(tmp_path / "other.db", moved)
    return tmp_path / "other.db"


def test_a_frozen_program_predicts_from_a_device_of_its_family_and_from_no_other(book, tmp_path, monkeypatch):
    monkeypatch.setenv("TUNEBOOK_MODE", "frozen")
    here = tb.device_fingerprint()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_families, "_alike", {})
        tb.device_alias("ACME", here)
        kin = predicting(on_device(book, tmp_path, "gpu:ACME"), regret_limit=1.0)
        assert "as 'family': it is learnt from entries that were made on gpu:ACME" in str(
            kin.function.explain(UNSEEN[3])
        )
    stranger = predicting(on_device(book, tmp_path, "gpu:ACME"), regret_limit=1.0)
    assert "learnt from" not in str(stranger.function.explain(UNSEEN[3]))


def test_after_an_update_the_old_times_say_which_candidates_are_worth_trying(book, tmp_path):
    copied = shutil.copytree(book, tmp_path / "book")
    bench = other_versions(predicting(copied, regret_limit=1.0))
    bench.function(UNSEEN[4])
    assert 8 <= len(bench.tried) <= 16


def test_the_finalists_of_an_outdated_entry_are_measured_again_though_none_may_be_worth_a_try(tmp_path, monkeypatch):
    before = Bench(tmp_path)
    before.function.kernel.environment = lambda _: "before"
    winner = tb.tune(before.function, 100).config
    monkeypatch.setattr(predictions, "worth_trying", lambda *_: [SPACE[-1]])
    bench = predicting(tmp_path)
    bench.function(100)
    assert tuple(winner.items()) in bench.tried


def test_a_frozen_program_takes_the_prediction_too(book, monkeypatch):
    monkeypatch.setenv("TUNEBOOK_MODE", "frozen")
    bench = predicting(book, regret_limit=1.0)
    bench.function(UNSEEN[2])
    assert [name for name, _ in bench.events if name == "predicted"]


def test_where_nothing_may_be_guessed_the_call_is_tuned(book, tmp_path):
    bench = predicting(book, regret_limit=1.0, allow_heuristics=False)
    assert "would tune now" in str(bench.function.explain(UNSEEN[3]))


def test_a_model_that_fails_is_a_warning_and_the_call_is_tuned(book, tmp_path, monkeypatch):
    np = pytest.importorskip("numpy")

    def solve(*_):
        raise np.linalg.LinAlgError("Singular matrix")

    monkeypatch.setattr(np.linalg, "solve", solve)
    bench = predicting(shutil.copytree(book, tmp_path / "book"))
    with pytest.warns(tb.TunebookWarning, match=r"LinAlgError: Singular matrix.*tuned instead"):
        bench.function(UNSEEN[3])
    assert len(bench.tried) == len(SPACE)


def test_a_candidate_that_the_model_does_not_know_is_tried(book, tmp_path):
    added = {"block": 48, "way": "a"}
    policy = tb.AutotunePolicy(cache_miss_fallback="predict")
    bench = Bench(shutil.copytree(book, tmp_path / "book"), space=[*SPACE, added], policy=policy)
    bench.function(TUNED[-1] + 1)  # outside of the tuned sizes, so it is tuned
    assert tuple(added.items()) in bench.tried
    assert 9 <= len(bench.tried) <= 17


def test_explain_says_that_no_other_size_of_such_a_call_is_tuned(book, tmp_path):
    for folder, size in ((tmp_path, 100), (book, 100.5)):
        said = str(predicting(folder).function.explain(size))
        assert "would tune now; predict: no other size of such a call is tuned" in said


def test_without_numpy_the_call_is_tuned_with_a_warning(tmp_path, monkeypatch):
    Bench(tmp_path).function(100)
    bench = predicting(tmp_path)
    monkeypatch.setattr(_size_model, "require", lambda _name, **said: require("numpy_that_is_missing", **said))
    with pytest.warns(tb.TunebookWarning, match=r"numpy.*tuned instead"):
        bench.function(200)
    assert len(bench.tried) == len(SPACE)


def test_another_device_tells_nothing():
    assert predict([], tb.Problem("gpu", "blocks@v0", '{"n":3}')) is None


def test_a_size_of_zero_and_a_key_of_another_form_are_no_reason_to_fail(book):
    bench = predicting(book, regret_limit=1.0)
    bench.function(0)
    records = list(bench.function.selector.persistent.store.items())
    assert predict(records, records[0].problem._replace(call_key="not json")) is None
    odd = [Record(replace(r.head, problem=r.problem._replace(call_key="not json")), r.body) for r in records[:1]]
    assert predict(odd, odd[0].problem) is None


@pytest.mark.parametrize("limit", [0, -1, math.nan])
def test_a_limit_that_allows_nothing_is_an_error(limit):
    with pytest.raises(tb.DefinitionError, match="regret_limit"):
        tb.AutotunePolicy(cache_miss_fallback="predict", regret_limit=limit)
