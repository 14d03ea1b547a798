"""Operations of the released ejkernel, measured as the user chooses and behind calls: run by `make compat`."""

from __future__ import annotations

import pytest

pytest.importorskip("ejkernel", reason="ejkernel is not installed; `make compat` runs these tests with it")

import ejkernel.modules as ej
import jax
import jax.numpy as jnp
import numpy as np
from ejkernel.modules.operations.pooling import MeanPoolingConfig, _mean_pooling_executor
from limits import HANG_S

import tunebook as tb
from tunebook.adapters import ejkernel as adapter


@pytest.fixture(autouse=True)
def selector(tmp_path, monkeypatch):
    """The selector of ejkernel's mean pooling, with an empty book."""
    monkeypatch.setenv("TUNEBOOK_HOME", str(tmp_path / "book"))
    monkeypatch.setenv("EJKERNEL_PERSISTENT_CACHE_DIR", str(tmp_path / "theirs"))
    adapter.install()
    found = adapter.selector_of(_mean_pooling_executor)
    found.cache.clear()
    yield found
    adapter.uninstall()


def tokens(n):
    return jnp.asarray(np.random.default_rng(0).standard_normal((1, n, 32)), dtype="float32")


def records(selector):
    return [selector.persistent.read(problem) for problem in selector.cache.keys()]  # noqa: SIM118 - not a dict


@pytest.mark.parametrize("way", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_an_operation_is_measured_with_cold_caches_on_arrays_that_take_turns(selector, way):
    size = 64 if way is jax.jit else 128
    with tb.policy_override(selector, measure=tb.Measure(cache="cold", inputs=3)):
        pooled = way(ej.mean_pooling)(tokens(size))
    assert np.allclose(pooled, tokens(size).mean(1), atol=1e-5)
    (record,) = records(selector)
    how = {m.policy for m in record.body.measurements if m.failure is None}
    assert all(each.startswith("host-clock/cold-cache/") and "/inputs=3" in each for each in how)
    assert how


def test_a_way_that_a_cpu_does_not_have_is_an_error_of_the_call(selector):
    with (
        tb.policy_override(selector, measure=tb.Measure(launch="graph")),
        pytest.raises(tb.DefinitionError, match="calls on cpu with jax cannot be captured in a graph"),
    ):
        ej.mean_pooling(tokens(192))


@pytest.mark.filterwarnings("ignore:.*trusted as 'near'")
def test_an_operation_answers_from_the_nearest_size_and_is_measured_behind_the_call(selector):
    ej.mean_pooling(tokens(256))
    heard = []
    selector.listen(lambda event, **data: heard.append((event, data.get("trust"))))
    with tb.policy_override(selector, trust="near", reverify="behind"):
        ej.mean_pooling(tokens(288))
    assert heard[0] == ("cache_hit", "near"), "the call did not wait"
    assert tb.wait_for_background(HANG_S)
    made = [record for record in records(selector) if "[1,288,32]" in record.problem.call_key]
    assert [record.body.provenance["values_from"] for record in made] == ["random"]


def pooling(book):
    """Their operation as a kernel whose lengths share entries: ejkernel's own selector makes an entry per length."""

    @tb.tunable(space=tb.Space(block_size=[32, 64, 128]), heuristic={"block_size": 64}, store=book, name="pooling",
                bucket={"x": {1: tb.pow2}})  # fmt: skip
    def pool(x, *, config):
        return ej.mean_pooling(x, cfg=MeanPoolingConfig(block_size=config.block_size))

    return pool


@pytest.mark.parametrize("first", [70, 100, 128])
@pytest.mark.parametrize("way", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_a_bucket_of_lengths_is_tuned_at_its_representative_whichever_comes_first(tmp_path, first, way):
    pool, x = pooling(tmp_path), tokens(first)
    assert np.allclose(way(pool)(x), x.mean(1), atol=1e-5)
    record = pool.selector.persistent.read(pool.problem(x))
    assert {m.policy.partition("/at:")[2].partition("/")[0] for m in record.body.measurements} == {"x=1x128x32"}
    assert "at         x=1x128x32: the representative of its bucket" in str(pool.explain(x))
