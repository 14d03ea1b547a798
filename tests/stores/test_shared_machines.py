"""Many processes share one book, each as a machine of its own: each key tuned once, some killed, the server killed."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import textwrap
import time

import pytest
from limits import HANG_S
from servers import redis_server
from shared_checks import (
    check_that_each_key_is_tuned_once,
    check_that_killed_tuners_cost_their_own_work_alone,
    eventually,
    marks,
)
from shared_processes import problem, start
from shared_stress import tune_together

from tunebook.stores import DirectoryStore, open_shared, open_store

pytest.importorskip("redis")

SOAK_S = float(os.environ.get("SOAK_S", "60"))


@pytest.fixture
def url(tmp_path):
    with redis_server(tmp_path / "redis") as running:
        yield running.url


def test_a_fleet_with_new_code_tunes_once_more_and_not_once_per_machine(tmp_path, url):
    source = textwrap.dedent("""
        import sys, numpy as np, tunebook as tb
        from tunebook.stores import _shared
        _shared.HOT_S = {patience_s}
        def body(x, *, config):
            return x * {factor}
        events = []
        kernel = tb.tunable(body, space=tb.Space(b=[1, 2]), name="fleet", on_event=lambda e, **d: events.append(e))
        kernel(np.ones(3))
        print("autotune_finish" in events)
        """)
    seen = []
    for factor, home in [(2, "a"), (2, "b"), (3, "a"), (3, "b")]:
        script = tmp_path / f"{home}{factor}.py"
        script.write_text(source.format(factor=factor, patience_s=HANG_S))
        environment = {**os.environ, "TUNEBOOK_HOME": str(tmp_path / home), "TUNEBOOK_REMOTE": url}
        done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=True)
        seen.append(done.stdout.strip())
    assert seen == ["True", "False", "True", "False"]


@pytest.mark.promise("fleet-tunes-once")
@pytest.mark.parametrize(
    ("processes", "keys"),
    [pytest.param(4, 12, id="a few"), pytest.param(16, 200, id="many", marks=pytest.mark.slow)],
)
def test_each_key_is_tuned_once_among_machines(tmp_path, url, processes, keys):
    check_that_each_key_is_tuned_once(tmp_path, url, processes=processes, keys=keys)


@pytest.mark.parametrize(
    ("processes", "kills"), [pytest.param(3, 2, id="a few"), pytest.param(8, 40, id="many", marks=pytest.mark.slow)]
)
def test_killed_tuners_cost_their_own_work_alone(tmp_path, url, processes, kills):
    check_that_killed_tuners_cost_their_own_work_alone(tmp_path, url, processes=processes, kills=kills)


@pytest.mark.parametrize("data", ["kept", "lost"])
def test_a_server_killed_while_machines_tune_fails_no_call(tmp_path, data):
    with redis_server(tmp_path / "redis") as running:
        outcome = tune_together(
            tmp_path,
            running.url,
            processes=4,
            keys=30,
            seconds=0.01,
            meanwhile=lambda: (_some_progress(tmp_path), running.restart(keep_data=data == "kept")),
        )
        assert outcome.done == 4
        assert outcome.ended.keys() == {str(key) for key in range(30)}
        # A machine that cannot reach the others tunes for itself.
        assert max(outcome.begun.values()) <= 4
        for number in range(4):
            assert len(list(DirectoryStore(tmp_path / f"home-{number}").items())) == 30


def _some_progress(tmp_path):
    assert eventually(lambda: (tmp_path / "log").exists() and (tmp_path / "log").read_text().count("\n") > 8)


@pytest.mark.slow
@pytest.mark.timeout(SOAK_S + 300)
def test_soak_nothing_grows_and_nothing_is_lost(tmp_path):
    """`SOAK_S=600 pytest -m slow -k soak` runs it for ten minutes."""
    keys = 50
    with redis_server(tmp_path / "redis") as running:
        workers = [
            start("work", tmp_path / f"home-{n}", url=running.url, seconds=SOAK_S, keys=keys, number=n)
            for n in range(4)
        ]
        for _ in range(5):  # killed now and then: one that never stays up would be left alone nearly all the time
            time.sleep(SOAK_S / 6)
            running.restart(keep_data=True)
        reports = [json.loads(worker.communicate(timeout=HANG_S)[0]) for worker in workers]
        for number, report in enumerate(reports):
            assert report["turns"] > 400
            growth = {what: report["ended"][what] - report["begun"][what] for what in report["begun"]}
            assert growth["files"] <= 8
            assert growth["threads"] <= 3
            # The one behind the calls may have something to send.
            assert set(report["threads"]) <= {"MainThread", f"tunebook {running.url}"}
            assert growth["kilobytes"] < 8192
            # Records that a server missed while it was away were sent since, or are sent at the next opening.
            home = tmp_path / f"home-{number}"
            store = open_shared(DirectoryStore(home), running.url, root=home, key=None)
            store.get(problem("any"))
            assert eventually(lambda home=home: not marks(home))
        for number, key in itertools.product(range(4), range(keys)):
            local = DirectoryStore(tmp_path / f"home-{number}").get(problem(f"{number}-{key}"))
            assert open_store(running.url).get(problem(f"{number}-{key}")) == local
