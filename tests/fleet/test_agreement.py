"""One decision per problem for all ranks of a job: the rules, and every way in which a rank can fail the others."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
import time
from contextlib import suppress
from functools import partial
from random import Random

import pytest
from agreement_board import QUICK, SOME_VOTE, MemoryBoard, Rank, Shared, at_once, ranks
from hypothesis import given
from hypothesis import strategies as st
from limits import HANG_S
from servers import proxy, redis_server

import tunebook as tb
from tunebook import fleet
from tunebook._base.vocabulary import Measurement
from tunebook._selection.selector import agreement
from tunebook._selection.tiers import Found, Skipped
from tunebook.fleet._agreement.agree import compare
from tunebook.fleet._agreement.agreement_state import AgreedDecision
from tunebook.fleet._agreement.board import RedisBoard
from tunebook.fleet._agreement.log import LogEntry, Vote, contenders, count_votes, entry_from, vote_from
from tunebook.fleet._agreement.round import AgreementOptions
from tunebook.stores import problem_id

# ------------------------------------------------------------------------------------------------------------- boards


@pytest.fixture(scope="module")
def redis(tmp_path_factory):
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(autouse=True)
def _no_open_connection(monkeypatch):
    """Close the connections of a test's boards: Python may collect a socket before its client, and warns then."""
    made, make = [], RedisBoard._client
    monkeypatch.setattr(RedisBoard, "_client", lambda *args: made.append(make(*args)) or made[-1])
    yield
    for client in made:
        client.connection_pool.disconnect()


def memory(tmp_path, redis):
    shared = Shared()
    return lambda rank: MemoryBoard(shared, rank, 16)


def over_redis(tmp_path, redis):
    pytest.importorskip("redis")
    return lambda rank: RedisBoard(redis.url, job=str(tmp_path), rank=rank, world=16)


def over_torch(tmp_path, redis):
    pytest.importorskip("torch")
    import torch.distributed as dist

    from tunebook.fleet._agreement.board import TorchBoard

    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return lambda rank: TorchBoard(dist.TCPStore("127.0.0.1", server.port), rank=rank, world=16)


def over_files(tmp_path, redis):
    pytest.importorskip("torch")
    import torch.distributed as dist

    from tunebook.fleet._agreement.board import TorchBoard

    return lambda rank: TorchBoard(dist.FileStore(str(tmp_path / "store"), 16), rank=rank, world=16)


@pytest.fixture(params=[memory, over_redis, over_torch, over_files])
def board_of(request, tmp_path, redis):
    return request.param(tmp_path, redis)


def test_of_16_ranks_that_write_a_key_all_see_the_same_first_one(board_of):
    boards = [board_of(rank) for rank in range(16)]
    seen = at_once([lambda b=b: b.first("key", f'["é", {b.rank}]') for b in boards])
    assert len(set(seen)) == 1
    assert boards[3].first("key", "late") == seen[0] == boards[4].wait("key", 0.0)


def test_a_wait_ends_with_the_value_or_with_the_time(board_of):
    one, other = board_of(0), board_of(1)
    assert one.wait("key", 0.0) is None
    assert one.wait("key", 0.05) is None
    later = threading.Timer(0.1, other.first, ("key", "value"))
    later.start()
    assert one.wait("key", HANG_S) == "value"
    later.join()  # it reads the answer of a server that ends with the test


def test_everything_posted_is_seen_and_counters_lose_nothing(board_of):
    boards = [board_of(rank) for rank in range(8)]
    assert boards[0].posted("topic") == []
    at_once([lambda b=b: b.post("topic", f"by {b.rank}") for b in boards])
    assert sorted(boards[0].posted("topic")) == [f"by {n}" for n in range(8)]
    at_once([lambda b=b: [b.add("n", 2) for _ in range(10)] for b in boards])
    assert boards[1].add("n", 0) == 160


def test_invalid_arguments_of_agree_are_refused_with_the_remedy(monkeypatch):
    with pytest.raises(tb.DefinitionError, match=r"'jax', 'torch', 'redis://\.\.\.' or a fleet\.Board"):
        fleet.agree("mpi")
    with pytest.raises(tb.DefinitionError, match=r"agree\('redis:/host'\)"):
        fleet.agree("redis:/:hunter2@host")
    with pytest.raises(tb.DefinitionError, match=r"agree\(3\)"):
        fleet.agree(3)
    with pytest.raises(tb.DefinitionError, match="job=None, rank=0, world=None"):
        fleet.agree("redis://127.0.0.1:1", rank=0)
    with pytest.raises(tb.DefinitionError, match="rank=2, world=2"):
        fleet.agree("redis://127.0.0.1:1", job="a", rank=2, world=2)
    with pytest.raises(tb.DefinitionError, match="'leader', 'split'"):
        fleet.agree(MemoryBoard(Shared()), share="all")
    with pytest.raises(tb.DefinitionError, match="0 <= vote_s < deadline_s"):
        fleet.agree(MemoryBoard(Shared()), vote_s=5, deadline_s=1)
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(tb.MissingDependency, match=r"tunebook\[redis\]"):
        fleet.agree("redis://127.0.0.1:1", job="a", rank=0, world=1)
    assert agreement() is None


# ----------------------------------------------------------------------------------------------------------- the vote

configs = st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=5) | st.booleans(), max_size=3)
votes = st.builds(Vote, st.integers(0, 5000), st.none() | configs, st.booleans(), st.sampled_from(["x", "x", "y"]))
kinds = st.sampled_from(["open", "lead", "left", "decided", "nothing"])
origins = st.sampled_from(["cache", "tuned", "heuristics", ""])
several = st.lists(votes, min_size=1, max_size=20, unique_by=lambda vote: vote.rank)


@given(votes)
def test_a_vote_is_read_as_it_was_cast(vote):
    assert vote_from(vote.text()) == vote
    assert "\n" not in vote.text()


@given(kinds, st.integers(0), st.text(), configs, origins, st.text(), st.lists(st.integers(0)).map(tuple))
def test_an_entry_is_read_as_it_was_written(kind, rank, by, config, origin, why, split):
    entry = LogEntry(kind, rank, by, config, origin, why, split)
    assert entry_from(entry.text()) == entry


@given(several, st.randoms())
def test_the_order_of_the_votes_does_not_matter(cast, random):
    shuffled = random.sample(cast, len(cast))
    assert count_votes({v.rank: v for v in cast}, by="a") == count_votes({v.rank: v for v in shuffled}, by="a")


@given(several, st.integers(1, 8))
def test_votes_are_counted_by_the_rules(cast, parts):
    found = count_votes({v.rank: v for v in cast}, by="a", parts=parts)
    hits = [v for v in sorted(cast) if v.hit is not None]
    able = [v.rank for v in sorted(cast) if v.able]
    if len({v.candidates for v in cast}) > 1:
        assert "different candidates" in found.why
    elif hits:
        assert (found.kind, found.rank, found.config) == ("decided", hits[0].rank, hits[0].hit)
    elif able:
        assert (found.kind, found.rank) == ("lead", able[0])
        assert found.split == (tuple(able[:parts]) if min(parts, len(able)) > 1 else ())
    else:
        assert "may not tune" in found.why


def measured(b, *samples_s, **fields):
    return Measurement(
        config={"b": b}, fingerprint=str(b), code="", policy="", environment="", samples_s=samples_s, **fields
    )


def test_of_several_parts_only_candidates_that_could_win_race_again():
    parts = [[measured(1, 1.0), measured(2, 1.2)], [measured(3, 1.3), measured(4, 1.1, dropped=True)], [measured(5)]]
    assert [m.config["b"] for m in contenders(parts) if not m.dropped] == [1, 2]
    assert contenders([]) == ()


# ------------------------------------------------------------------------------------------------ one configuration


@pytest.mark.promise("ranks-agree")
@pytest.mark.parametrize("n", [1, 2, 4, 16])
def test_ranks_that_would_measure_differently_use_one_configuration_and_one_of_them_tunes(n):
    job = ranks(n)
    assert len(set(at_once([rank.choose for rank in job]))) == 1
    assert sum(rank.tuned for rank in job) == 1
    assert all(rank.choose() == job[0].choose() for rank in job)


@pytest.mark.parametrize("hitting", [[0], [3], [2, 1]])
def test_if_some_ranks_hit_all_ranks_take_the_answer_of_the_lowest_hitting_rank(hitting):
    job = ranks(4)
    for rank in hitting:
        tb.tune(job[rank].kernel, 1)
    assert at_once([rank.choose for rank in job]) == [job[min(hitting)].b] * 4
    assert sum(rank.tuned for rank in job) == len(hitting), "nobody tunes what one of them knows"


def test_a_hit_that_comes_while_another_rank_tunes_ends_the_wait_for_it():
    slow, waiting, late = ranks(3, agreeing=SOME_VOTE)
    tb.tune(late.kernel, 1)
    tuning, over = threading.Event(), threading.Event()
    slow.before_tuning = lambda: (tuning.set(), over.wait(HANG_S))
    calls = [slow.choose, waiting.choose, lambda: (tuning.wait(HANG_S), late.choose(), over.set())]
    assert at_once(calls)[:2] == [late.b, late.b]


def test_a_rank_that_never_calls_is_waited_for_once_per_function():
    job = ranks(3, agreeing=SOME_VOTE)[:2]
    began = time.monotonic()
    assert len(set(at_once([rank.choose for rank in job]))) == 1
    assert time.monotonic() - began < QUICK.deadline_s / 2
    assert [rank.agreement.voters for rank in job if rank.agreement.voters] == [{"shared@v0": frozenset({0, 1})}]


def test_a_rank_that_has_not_voted_on_a_function_before_is_not_waited_for():
    job = ranks(3)[:2]
    for rank in job:
        rank.agreement.voters["shared@v0"] = frozenset({0, 1})
    began = time.monotonic()
    assert len(set(at_once([rank.choose for rank in job]))) == 1
    assert time.monotonic() - began < QUICK.vote_s


def test_ranks_that_come_in_different_orders_agree_on_each_problem():
    job = ranks(3, agreeing=SOME_VOTE)
    orders = [(1, 2, 3), (3, 1, 2), (2, 3, 1)]
    found = at_once([lambda r=r, o=o: {x: r.choose(x) for x in o} for r, o in zip(job, orders, strict=True)])
    assert found[0] == found[1] == found[2]


def test_threads_of_one_rank_vote_once():
    (rank,) = ranks(1)
    assert len(set(at_once([rank.choose] * 8))) == 1
    assert rank.tuned == 1


def test_a_rank_that_joins_late_or_again_takes_the_standing_decision():
    shared = Shared()
    (first,) = ranks(1, shared)
    stands = first.choose()
    again = Rank(shared, 0, 1, b=40)
    assert again.choose() == stands
    assert again.tuned == 0
    assert again.board.messages <= 5


def test_the_measurements_of_one_rank_reach_the_books_of_all_ranks(tmp_path):
    shared = Shared()
    books = [str(tmp_path / str(rank)) for rank in range(3)]
    job = [Rank(shared, rank, 3, b=20, store=books[rank], tuner=None) for rank in range(3)]
    stands = set(at_once([rank.choose for rank in job]))
    alone = [Rank(Shared(), 0, 1, store=book, tuner=None) for book in books]
    assert {rank.kernel.explain(1).selection.config.b for rank in alone} == stands
    assert {rank.kernel.explain(1).selection.source for rank in alone} == {"persistent"}
    assert len({len(rank.kernel.explain(1).record.body.measurements) for rank in alone} - {0}) == 1


def test_a_rank_that_may_not_tune_lets_another_one():
    policy = tb.AutotunePolicy(cache_miss_fallback="heuristics")
    shared = Shared()
    job = [Rank(shared, 0, 2, b=20, policy=policy), Rank(shared, 1, 2, b=30)]
    assert at_once([rank.choose for rank in job]) == [30, 30]


def test_where_nobody_may_tune_all_take_one_heuristic():
    job = ranks(3, policy=tb.AutotunePolicy(cache_miss_fallback="heuristics"))
    answers = at_once([rank.ask for rank in job])
    assert {(a.config.b, a.event, a.remember) for a in answers} == {(10, "heuristics", False)}


@pytest.mark.parametrize("fallback", ["background", "incremental"])
def test_tuning_beside_the_calls_changes_no_configuration_of_a_job(fallback, request):
    request.addfinalizer(lambda: fleet.agree(None))
    (rank,) = ranks(1, policy=tb.AutotunePolicy(cache_miss_fallback=fallback))
    fleet.agree(rank.board)
    assert [rank.kernel(1)[1] for _ in range(20)] == [10] * 20
    tb.wait_for_background()
    assert rank.kernel(1)[1] == 10


def test_ranks_with_different_candidates_fall_back_to_the_heuristic_together():
    shared = Shared()
    job = [Rank(shared, 0, 2, b=20), Rank(shared, 1, 2, b=50, space=[10, 50])]
    tb.tune(job[0].kernel, 1)
    with pytest.warns(
        tb.TunebookWarning, match="rank 1 and rank 0 have different candidates, so all take the heuristic"
    ):
        assert at_once([rank.choose for rank in job]) == [10, 10]


def test_a_late_rank_warns_if_the_choice_is_not_among_its_candidates():
    shared = Shared()
    job = [Rank(shared, 0, 2, b=20, agreeing=SOME_VOTE), Rank(shared, 1, 2, b=50, space=[10, 50])]
    assert job[0].choose() == 20
    with pytest.warns(tb.TunebookWarning, match="rank 0 chose .*20.*, which is not a candidate in this rank"):
        assert job[1].choose() == 10


def test_a_kernel_without_a_heuristic_has_its_first_candidate_where_tuning_fails():
    job = ranks(2, heuristic=None)
    for rank in job:
        rank.before_tuning = lambda: (_ for _ in ()).throw(tb.TuningFailed("all fail", [ValueError("no")]))
    assert at_once([rank.choose for rank in job]) == [10, 10]


def test_where_heuristics_are_not_allowed_all_say_that_there_is_nothing():
    job = ranks(2, policy=tb.AutotunePolicy(allow_autotune=False, allow_heuristics=False))
    answers = at_once([rank.ask for rank in job])
    assert all("nothing to use: off: policy.allow_autotune is False" in answer.reason for answer in answers)


class Unwritable:
    b = 10


def test_a_configuration_that_cannot_be_serialised_is_not_agreed_on_and_a_warning_says_so():
    (rank,) = ranks(1)
    rank.kernel = tb.tunable(lambda x, *, config: x, space=[Unwritable(), Unwritable()], store=False)
    with pytest.warns(tb.TunebookWarning, match="cannot be serialised, so ranks cannot agree on it"):
        assert isinstance(rank.ask(), Skipped)


def test_a_known_configuration_that_is_not_a_candidate_is_not_voted_for():
    job = ranks(2, b=30)
    for rank in job:
        rank.kernel.selector.cache.put(*rank.kernel.problem(1), next(iter(tb.Space(b=[7]))))
    assert at_once([rank.choose for rank in job]) == [30, 30]


def test_a_redefined_function_takes_the_standing_decision_if_it_is_a_candidate():
    shared = Shared()
    assert Rank(shared, 0, 1, b=30).choose() == 30
    rank = Rank(shared, 0, 1, b=20)
    assert rank.choose() == 30
    options = {"heuristic": {"b": 30}, "name": "shared", "store": False, "tuner": rank}
    rank.kernel = tb.tunable(lambda x, *, config: config.b, space=tb.Space(b=[20, 30]), **options)
    assert rank.choose() == 30
    rank.kernel = tb.tunable(
        lambda x, *, config: -config.b, space=tb.Space(b=[20]), **{**options, "heuristic": {"b": 20}}
    )
    with pytest.warns(tb.TunebookWarning, match="not a candidate in this rank"):
        assert rank.choose() == 20


# -------------------------------------------------------------------------------------------------- in parts


class Runs:
    """What ran in one rank, in which another candidate is the fastest than in the others."""

    def __init__(self, rank):
        self.rank, self.ran, self.ends = rank, [], False

    def run(self, b):
        if self.ends:
            raise SystemExit
        self.ran.append(b)
        time.sleep(0.0003 * (1 + (b // 10 + self.rank) % 4))

    def __tunebook_checksum__(self):
        return "the same code in every rank"


def splitting(n, agreeing=QUICK):
    job = ranks(n, agreeing=agreeing._replace(share="split"))
    for rank in job:
        runs = rank.runs = Runs(rank.board.rank)
        space = tb.Space(b=[10 * i for i in range(1, 9)])
        rank.kernel = tb.tunable(
            function_of(runs), space=space, heuristic={"b": 10}, name="split", check=False, store=False
        )
    return job


def function_of(runs):
    return lambda x, *, config: runs.run(config.b)


@pytest.mark.parametrize("n", [2, 4])
def test_ranks_that_share_the_candidates_measure_each_once_and_choose_one(n):
    job = splitting(n)
    assert len(set(at_once([rank.choose for rank in job]))) == 1
    others = [set(rank.runs.ran) - {10} for rank in job[1:]]
    assert set().union(*others) | set(job[0].runs.ran) == {10 * i for i in range(1, 9)}
    assert all(one.isdisjoint(two) for i, one in enumerate(others) for two in others[i + 1 :])
    assert all(0 < len(ran) <= 8 // n for ran in others), "each has its part, and the heuristic"


def test_the_part_of_a_rank_that_ends_while_it_measures_is_measured_by_the_leader():
    job = splitting(2, SOME_VOTE)
    job[1].runs.ends = True

    def dies():
        with suppress(SystemExit):
            job[1].choose()

    assert at_once([job[0].choose, dies])[0] in range(10, 90, 10)
    assert set(job[0].runs.ran) == {10 * i for i in range(1, 9)}


def test_a_tuner_of_another_kind_tunes_in_one_rank_though_it_is_to_be_split():
    job = ranks(3, agreeing=QUICK._replace(share="split"))
    assert len(set(at_once([rank.choose for rank in job]))) == 1
    assert sum(rank.tuned for rank in job) == 1


# -------------------------------------------------------------------------------------------------- what goes wrong


def opened_by_a_dead_rank(shared, rank):
    problem = problem_id(rank.kernel.problem(1))
    MemoryBoard(shared, 9, 10).first(f"agree/{problem}/0", LogEntry("open", 9, "dead").text())


def test_a_vote_whose_opener_is_dead_goes_on_after_its_lease():
    shared = Shared()
    job = ranks(3, shared)
    opened_by_a_dead_rank(shared, job[0])
    began = time.monotonic()
    assert len(set(at_once([rank.choose for rank in job]))) == 1
    assert QUICK.lease_s <= time.monotonic() - began < QUICK.deadline_s / 2
    assert sum(rank.tuned for rank in job) == 1


def test_a_rank_that_knows_decides_in_place_of_a_dead_one():
    shared = Shared()
    job = ranks(2, shared)
    tb.tune(job[1].kernel, 1)
    opened_by_a_dead_rank(shared, job[0])
    with_a_hit, without = at_once([job[1].choose, lambda: (time.sleep(0.05), job[0].choose())])
    assert with_a_hit == without[1]


def test_where_the_dead_one_was_the_only_one_that_could_tune_all_take_the_heuristic():
    shared = Shared()
    job = ranks(2, shared, policy=tb.AutotunePolicy(cache_miss_fallback="heuristics"))
    opened_by_a_dead_rank(shared, job[0])
    with pytest.warns(tb.TunebookWarning, match="rank 9 shows no life, .*so all ranks take the heuristic"):
        assert at_once([rank.choose for rank in job]) == [10, 10]


def test_a_leader_that_is_slow_but_alive_is_waited_for():
    job = ranks(2)
    for rank in job:
        rank.before_tuning = lambda: time.sleep(2.5 * QUICK.lease_s)
    assert len(set(at_once([rank.choose for rank in job]))) == 1
    assert sum(rank.tuned for rank in job) == 1


def test_after_the_deadline_all_take_the_heuristic_and_the_late_leader_too():
    job = ranks(3, agreeing=QUICK._replace(deadline_s=1.0), b=40)
    over = threading.Event()
    for rank in job:
        rank.before_tuning = lambda: over.wait(HANG_S)

    def call(rank):
        found = rank.choose()
        over.set()
        return found

    with pytest.warns(tb.TunebookWarning, match="did not tune it in 1 s, so all ranks take the heuristic"):
        assert at_once([lambda r=r: call(r) for r in job]) == [10, 10, 10]


def test_a_leader_whose_call_fails_leaves_the_tuning_to_another():
    job = ranks(2)
    job[0].before_tuning = lambda: (_ for _ in ()).throw(KeyboardInterrupt)

    def call(rank):
        try:
            return rank.choose()
        except KeyboardInterrupt:
            return None

    began = time.monotonic()
    assert at_once([lambda r=r: call(r) for r in job]) == [None, job[1].b]
    assert time.monotonic() - began < QUICK.deadline_s / 2
    assert job[0].choose() == job[1].b, "asked again, it takes what stands"
    assert job[0].tuned == 1


def chaos(seed):
    """Let ranks be late, slow, know something, or end at any message; return what the others chose."""
    random = Random(seed)
    share, deadline_s = random.choice(["leader", "split"]), random.choice([0.2, 5.0])
    options = AgreementOptions(share, vote_s=0.03, deadline_s=deadline_s, lease_s=0.08)
    job = ranks(random.randint(2, 6), agreeing=options)
    for rank in job:
        if random.random() < 0.3:
            tb.tune(rank.kernel, 1)
        ends = random.randint(1, 8) if random.random() < 0.4 and rank is not job[-1] else 0
        pauses = [random.choice([0.0, 0.0, 0.0, 0.01, 0.1]) for _ in range(20)]
        rank.before_tuning = partial(time.sleep, random.choice([0.0, 0.02, 0.3]))
        rank.board.before = partial(stumble, ends, pauses)

    def call(rank):
        with suppress(SystemExit):
            return rank.choose()

    return at_once([lambda r=r: call(r) for r in job])


def stumble(ends, pauses, message):
    if 0 < ends <= message:  # as after kill -9: nothing more is heard of it, from any of its threads
        in_the_call = not threading.current_thread().name.startswith("tunebook")
        raise SystemExit if in_the_call else tb.StoreError("gone", "here", "this rank has ended")
    time.sleep(pauses[message % len(pauses)])


@pytest.mark.promise("ranks-agree")
@pytest.mark.filterwarnings("ignore::tunebook.TunebookWarning")
@pytest.mark.parametrize("seed", range(12))
def test_whatever_happens_to_the_others_ranks_that_answer_use_one_configuration(seed):
    found = chaos(seed)
    assert found[-1] is not None
    assert len(set(found) - {None}) == 1


def test_a_candidate_that_calls_its_own_function_does_not_wait_for_itself():
    (rank,) = ranks(1)
    inner = []
    rank.before_tuning = lambda: inner.append(rank.ask())
    assert rank.choose() == 10
    assert inner == [Skipped("it is being agreed on", transient=True)]


def test_a_board_that_is_down_costs_one_warning_and_gives_the_heuristic(request):
    request.addfinalizer(lambda: fleet.agree(None))
    shared = Shared()
    rank = Rank(shared, 0, 2, b=40)
    shared.down = True
    fleet.agree(rank.board)
    began = time.monotonic()
    with pytest.warns(tb.TunebookWarning, match="a board in memory failed: it is down.*takes its heuristic"):
        assert rank.kernel(1)[1] == 10
    assert time.monotonic() - began < QUICK.deadline_s / 2
    asked = rank.board.messages
    assert rank.kernel(2)[1] == 10
    assert Rank(shared, 0, 2, b=40, heuristic=None, space=[30, 40]).kernel(1)[1] == 30, (
        "without one its first candidate"
    )
    assert rank.board.messages == asked, "it is not asked again for a while"


@pytest.mark.parametrize("fault", ["restart", "hang"])
def test_a_redis_that_fails_for_a_moment_costs_no_agreement(fault, tmp_path, monkeypatch):
    pytest.importorskip("redis")
    monkeypatch.setattr("tunebook.fleet._agreement.board._RETRY_S", HANG_S)  # a moment may be long on a busy machine
    with redis_server(tmp_path) as server:
        job = ranks(2)
        for rank in job:
            board = RedisBoard(server.url, job="a", rank=rank.board.rank, world=2)
            rank.agreement = type(rank.agreement)(board, QUICK)
            assert rank.board.world == board.world

        def interrupt():
            if fault == "restart":
                server.restart(keep_data=True)
            else:
                server.pause()
                threading.Timer(1.0, server.resume).start()

        job[0].before_tuning = job[1].before_tuning = interrupt
        assert len(set(at_once([rank.choose for rank in job]))) == 1


def test_a_redis_that_comes_back_without_its_data_lets_late_ranks_differ_and_that_is_found(tmp_path, monkeypatch):
    pytest.importorskip("redis")
    monkeypatch.setattr("tunebook.fleet._agreement.board._RETRY_S", HANG_S)
    with redis_server(tmp_path) as server:
        job = ranks(2, b=None)
        for rank in job:
            rank.b = 20 + 10 * rank.board.rank
            board = RedisBoard(server.url, job="a", rank=rank.board.rank, world=2)
            rank.agreement = type(rank.agreement)(board, SOME_VOTE)
        assert job[0].choose() == 20
        server.restart(keep_data=False)
        assert job[1].choose() == 30
        said = at_once([lambda r=r: raised(r.agreement) for r in job])
    assert {error.differences[0][2] for error in said} == {(0,)}


def raised(agreement):
    with pytest.raises(fleet.Disagreement, match="rank 0: b=20\n    rank 1: b=30") as caught:
        compare(agreement, HANG_S)
    return caught.value


def test_a_redis_that_is_gone_gives_the_heuristic_in_bounded_time(tmp_path):
    pytest.importorskip("redis")
    with redis_server(tmp_path) as server, proxy(server.port) as between:
        (rank,) = ranks(1)
        board = RedisBoard(f"redis://:secret@127.0.0.1:{between.port}/0", job="a", rank=0, world=2)
        assert "secret" not in board.where
        rank.agreement = type(rank.agreement)(board, QUICK)
        between.mode = "refuse"
        between.drop_all()
        began = time.monotonic()
        with pytest.warns(tb.TunebookWarning, match=r"Redis at 127\.0\.0\.1 failed"):
            assert isinstance(rank.ask(), Skipped)
        assert time.monotonic() - began < QUICK.deadline_s / 2


def test_a_redis_that_refuses_to_write_is_an_error_that_says_so(tmp_path):
    pytest.importorskip("redis")
    with redis_server(tmp_path) as server:
        board = RedisBoard(server.url, job="a", rank=0, world=1)
        board._quick.config_set("min-replicas-to-write", 1)
        with pytest.raises(tb.StoreError, match=r"refused: .*replicas"):
            board.first("key", "value")


# -------------------------------------------------------------------------------------------------- in the process


def test_an_overlay_wins_over_the_agreement_and_leaves_it_unchanged(request):
    request.addfinalizer(lambda: fleet.agree(None))
    (rank,) = ranks(1, b=30)
    fleet.agree(rank.board)
    with rank.kernel.overlay(tb.Config(b=40)):
        assert rank.kernel(1)[1] == 40
    assert rank.kernel(1)[1] == 30
    assert rank.kernel.explain(1).selection.source == "agreement"
    rank.kernel.selector.cache.put(*rank.kernel.problem(1), next(iter(tb.Space(b=[20]))))
    assert rank.kernel(1)[1] == 30, "what this process learns alone changes nothing"
    fleet.agree(None)
    assert rank.kernel.explain(1).selection.source != "agreement"


def test_a_known_call_sends_no_message(request):
    request.addfinalizer(lambda: fleet.agree(None))
    (rank,) = ranks(1)
    fleet.agree(rank.board)
    rank.kernel(1)
    sent = rank.board.messages
    for _ in range(100):
        rank.kernel(1)
    with rank.kernel.overlay(tb.Config(b=40)):
        assert rank.kernel(1)[1] == 40
    assert rank.board.messages == sent


def test_a_recording_settles_nothing(request):
    request.addfinalizer(lambda: fleet.agree(None))
    (rank,) = ranks(1, b=30)
    fleet.agree(rank.board)
    with tb.record():
        assert rank.kernel(1)[1] == 10
    assert rank.kernel(1)[1] == 30
    with tb.record():
        assert rank.kernel(1)[1] == 30


def test_listeners_are_told_of_an_agreed_configuration_as_of_a_hit():
    shared = Shared()
    one, other = ranks(2, shared)
    at_once([one.ask, other.ask])
    again = Rank(shared, 1, 2)
    assert again.ask()[1:4] == ("cache_hit", "agreement", True)
    assert again.ask()[1:4] == ("cache_hit", "memory", False)


FORKS = """
import os, sys
from agreement_board import MemoryBoard, Shared
from tunebook import fleet
from tunebook._selection.selector import agreement
fleet.agree(MemoryBoard(Shared()))
child = os.fork()
if child == 0:
    os._exit(0 if agreement() is None else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) + 2 * (agreement() is None))
"""


def test_a_forked_child_is_not_a_rank():
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", FORKS], env=environment, check=True, timeout=HANG_S)


# --------------------------------------------------------------------------------------------------- assert_agreement


def holding(shared, tables, timeout_s=HANG_S, first=None):
    """Let each rank hold a table of {argument: b}, and compare; return what each raised, and its messages.

    `first` is the rank that comes first.
    """

    def holder(rank, table):
        held = Rank(shared, rank, len(tables))
        if first is not None and rank != first:
            held.board.wait("check/1/first", HANG_S)
            held.board.messages = 0
        for x, b in table.items():
            problem = tb.Problem("cpu", "op", f"x={x}")
            held.agreement.decisions[problem, "code"] = AgreedDecision(Found(config=b, event="cache_hit"), {"b": b})
        try:
            compare(held.agreement, timeout_s)
        except fleet.Disagreement as error:
            return error, held.board.messages
        return None, held.board.messages

    return at_once([lambda r=r, t=t: holder(r, t) for r, t in enumerate(tables) if t is not None])


def test_ranks_that_hold_the_same_need_four_messages_each_to_know_it():
    said = holding(Shared(), [{1: 10, 2: 20}] * 8)
    assert all(error is None for error, _ in said)
    assert sorted(messages for _, messages in said)[:7] == [4] * 7


@pytest.mark.parametrize("first", range(5))
def test_a_problem_that_only_some_ranks_have_met_is_not_a_difference(first):
    tables = [{1: 10, 2: 20}, {1: 10}, {}, {3: 30}, {1: 10}]
    assert all(error is None for error, _ in holding(Shared(), tables, first=first))


@pytest.mark.parametrize("first", range(4))
def test_a_difference_is_an_error_in_every_rank_that_names_problem_ranks_and_configurations(first):
    said = holding(Shared(), [{1: 10, 2: 20}, {1: 10}, {1: 10, 2: 30}, {1: 10, 2: 20}], first=first)
    problem = tb.Problem("cpu", "op", "x=2")
    for error, messages in said:
        assert error.differences == ((problem, '{"b":20}', (0, 3)), (problem, '{"b":30}', (2,)))
        assert "op on cpu, x=2" in str(error)
        assert "ranks 0, 3: b=20" in str(error)
        assert "x=1" not in str(error)
        assert messages < 60
        copied = pickle.loads(pickle.dumps(error))
        assert (str(copied), copied.differences) == (str(error), error.differences)


def test_a_rank_that_does_not_ask_is_named():
    said = holding(Shared(), [{1: 10}, {1: 10}, None], timeout_s=0.3)
    assert {error.missing for error, _ in said} == {(2,)}
    assert "rank 2 of 3 did not call assert_agreement" in str(said[0][0])


def test_ranks_can_be_compared_again_and_a_rank_that_was_started_again_goes_on():
    shared = Shared()
    for b in (10, 20, 30):
        assert holding(shared, [{1: b}, {1: b}]) == [(None, pytest.approx(4, abs=30))] * 2
        assert all(error is not None for error, _ in holding(shared, [{1: b}, {1: b + 1}]))


def test_comparing_needs_an_agreement_and_compares_its_decisions(request):
    request.addfinalizer(lambda: fleet.agree(None))
    with pytest.raises(tb.Unsupported, match=r"call fleet\.agree\(\.\.\.\) first"):
        fleet.assert_agreement()
    (rank,) = ranks(1)
    fleet.agree(rank.board)
    rank.kernel(1)
    fleet.assert_agreement()
    assert [problem for problem, _ in agreement().decisions] == [rank.kernel.problem(1)]


def test_messages_per_rank_do_not_grow_with_their_number():
    few, many = ranks(2), ranks(32)
    for job in (few, many):
        at_once([rank.choose for rank in job])
    followers = [sorted(rank.board.messages for rank in job)[: len(job) // 2] for job in (few, many)]
    assert max(followers[1]) <= max(4, *followers[0])
