"""A board in memory, and ranks in threads on it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from limits import HANG_S

import tunebook as tb
from tunebook._selection.selector import local_tiers
from tunebook.fleet._agreement.agreement_state import JobAgreement
from tunebook.fleet._agreement.round import AgreementOptions

# A lease that a busy machine does not mistake for a death, and a vote that all ranks come to.
QUICK = AgreementOptions(vote_s=HANG_S / 2, deadline_s=HANG_S, lease_s=2.0)
# A vote that some ranks do not come to.
SOME_VOTE = QUICK._replace(vote_s=0.15)


class Shared:
    """The state that the boards of one job's ranks share. `down` makes every call fail."""

    def __init__(self):
        self.values, self.topics, self.counts = {}, {}, {}
        self.changed = threading.Condition()
        self.down = False


class MemoryBoard:
    where = "a board in memory"

    def __init__(self, shared, rank=0, world=1):
        self._shared, self.rank, self.world = shared, rank, world
        self.messages = 0
        self.before = lambda _message: None

    def _enter(self):
        self.messages += 1
        self.before(self.messages)
        if self._shared.down:
            raise tb.StoreError("unreachable", self.where, f"{self.where} failed: it is down")
        return self._shared.changed

    def first(self, key, value):
        with self._enter():
            self._shared.changed.notify_all()
            return self._shared.values.setdefault(key, value)

    def wait(self, key, timeout_s):
        with self._enter():
            self._shared.changed.wait_for(lambda: key in self._shared.values, timeout_s)
            return self._shared.values.get(key)

    def post(self, topic, value):
        with self._enter():
            self._shared.topics.setdefault(topic, []).append(value)

    def posted(self, topic):
        with self._enter():
            return list(self._shared.topics.get(topic, ()))

    def add(self, key, amount):
        with self._enter():
            self._shared.counts[key] = self._shared.counts.get(key, 0) + amount
            return self._shared.counts[key]


class Rank:
    """One rank: a tunable function, and its agreement. `b` is the candidate that it would find the fastest."""

    def __init__(self, shared, rank, world, *, b=None, space=(10, 20, 30, 40), heuristic=10, agreeing=QUICK, **options):
        self.board = MemoryBoard(shared, rank, world)
        self.agreement = JobAgreement(self.board, agreeing)
        self.b, self.tuned, self.before_tuning = b, 0, lambda: None
        options = {"tuner": self, "store": False, "name": "shared", **options}
        given = None if heuristic is None else {"b": heuristic}
        self.kernel = tb.tunable(
            lambda x, *, config: (x, config.b), space=tb.Space(b=list(space)), heuristic=given, **options
        )

    def autotune(self, make_fn, args, kwargs, candidates):
        self.tuned += 1
        self.before_tuning()
        return next((c for c in candidates if c.b == self.b), candidates[0])

    def request(self, *args):
        kernel, selector = self.kernel.kernel, self.kernel.selector
        return selector.request(kernel.invocation(args), kernel), local_tiers(selector.tiers)

    def ask(self, *args):
        """Return the tier's answer: Found or Skipped."""
        return self.agreement.ask(*self.request(*(args or (1,))))

    def choose(self, *args):
        return self.ask(*args).config.b


def ranks(n, shared=None, **options):
    """Return ranks that would each find another candidate the fastest."""
    shared = shared or Shared()
    return [Rank(shared, rank, n, **{"b": 10 * (rank % 4 + 1), **options}) for rank in range(n)]


def at_once(calls):
    """Run each call in its own thread; return their results in order."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(timeout=HANG_S) for future in [pool.submit(call) for call in calls]]
