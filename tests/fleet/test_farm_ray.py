"""Recordings tuned on Ray: `make ray` runs this, in a network namespace of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import pytest
from fake_driver import DRIVER

HERE = Path(__file__).parents[1]
NAMESPACE = """
ip link set lo up && ip addr add 10.99.0.1/32 dev lo && ip route add default dev lo src 10.99.0.1 && exec "$@"
"""

pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed"),
    pytest.mark.skipif(shutil.which("unshare") is None, reason="there is no unshare to make a network namespace"),
]


@pytest.fixture(scope="module")
def said():
    """What the script says, which takes its time once."""
    # Not pytest's directory: the path of a socket may have 107 characters.
    with tempfile.TemporaryDirectory(prefix="ray-") as directory:
        stage = Path(directory)
        (stage / "cuda.c").write_text(DRIVER)
        subprocess.run(["cc", "-shared", "-fPIC", "-o", stage / "libcuda.so.1", stage / "cuda.c"], check=True)
        environment = {
            **os.environ,
            "FARM_TEST": directory,
            "LD_LIBRARY_PATH": directory,
            "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent / "src")]),
            "RAY_TMPDIR": str(stage / "t"),
            "TUNEBOOK_HOME": str(stage / "book"),
            "TUNEBOOK_LOCKS": str(stage / "locks"),
        }
        user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
        # With processes of its own too: what Ray starts goes with it, and nothing of another cluster is touched.
        own = ["--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
        inside = ["unshare", *own, *user, "sh", "-c", NAMESPACE, "sh"]
        script = [sys.executable, HERE / "farm_ray_process.py", directory]
        done = subprocess.run([*inside, *script], env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-4000:]
        return json.loads(done.stdout.splitlines()[-1])


def test_actors_tune_and_the_results_come_home(said):
    assert said["first"]["counts"] == {"tuned": 3}
    assert said["records"] == 3
    assert said["again"]["counts"] == {"known": 3}


def test_an_actor_that_always_dies_costs_its_problem_two_tries_and_the_rest_goes_on(said):
    assert said["deadly"]["counts"] == {"tuned": 1, "failed": 1}
    assert said["deadly"]["tries"] == [1, 2]
    assert any("ActorDiedError" in detail for detail in said["deadly"]["details"])


def test_a_worker_that_is_killed_from_outside_costs_one_try(said):
    assert said["killed"]["counts"] == {"tuned": 1}
    assert said["killed"]["tries"] == [2]


def test_each_gpu_has_one_actor_and_the_processor_one(said):
    assert said["workers"] == [["cpu", "cpu"], ["gpu", f"gpu-{'10' * 16}"], ["gpu", f"gpu-{'11' * 16}"]]


def test_a_call_goes_to_the_actor_with_its_kind_of_device(said):
    assert said["wrong platform"]["details"] == ["recorded on a gpu, but this worker has a cpu for it"]


def test_a_cluster_is_reached_through_its_client_server_too(said):
    assert said["from outside"]["counts"] == {"known": 3}
