"""Functions of released packages that nobody here wrote: how they are measured, at which sizes, and behind calls."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from limits import HANG_S

import tunebook as tb

signal = pytest.importorskip("scipy.signal", reason="scipy is not installed")
sparse = pytest.importorskip("scipy.sparse", reason="scipy is not installed")

RNG = np.random.default_rng(0)


def convolution(store, **options):
    """SciPy's convolution: by definition, or through a Fourier transform."""

    @tb.tunable(space=tb.Space(method=["direct", "fft"]), heuristic={"method": "direct"}, store=store, name="convolve",
                reference=signal.oaconvolve, **options)  # fmt: skip
    def convolve(x, h, *, config):
        return signal.convolve(x, h, method=config.method)

    return convolve


def policies(function, *args):
    record = function.selector.persistent.read(function.problem(*args))
    return {m.policy for m in record.body.measurements if m.failure is None}


# ------------------------------------------------------------------------------------------------- how it is measured


def test_a_convolution_is_measured_with_cold_caches_on_inputs_that_take_turns(tmp_path):
    convolve = convolution(tmp_path, measure=tb.Measure(cache="cold", inputs=3))
    x, h = RNG.standard_normal(3000), RNG.standard_normal(2000)
    before = x.copy()
    assert np.allclose(convolve(x, h), signal.oaconvolve(x, h))
    assert policies(convolve, x, h) == {"host-clock/cold-cache/race/warmup=1/forward/inputs=3"}
    warm = tb.tune(convolve, x, h, measure=tb.Measure(cache="warm", inputs=1))
    assert {m.policy for m in warm.measurements} == {"host-clock/race/warmup=1/forward"}
    assert np.array_equal(x, before)


def test_a_contraction_of_opt_einsum_is_measured_on_jax_arrays_that_take_turns():
    contract = pytest.importorskip("opt_einsum").contract
    jnp = pytest.importorskip("jax.numpy")

    @tb.tunable(space=tb.Space(optimize=["greedy", "dp"]), heuristic={"optimize": "greedy"}, store=False,
                measure=tb.Measure(inputs=4))  # fmt: skip
    def chain(a, b, c, *, config):
        return contract("ij,jk,kl->il", a, b, c, optimize=config.optimize)

    a, b, c = (jnp.asarray(RNG.standard_normal((8, 8)), dtype="float32") for _ in range(3))
    tuned = tb.tune(chain, a, b, c)
    assert {m.policy.partition("forward")[2] for m in tuned.measurements} == {"/inputs=4"}
    assert np.allclose(chain(a, b, c), a @ b @ c, rtol=1e-3, atol=1e-3)


# ------------------------------------------------------------------------------------------------ at which sizes


@pytest.mark.parametrize("first", [20_000, 32_768])
def test_a_bucket_of_convolutions_has_one_answer_whichever_comes_first(tmp_path, first):
    convolve = convolution(tmp_path, bucket={"x": {0: tb.pow2}, "h": {0: tb.pow2}})
    x, h = RNG.standard_normal(first), RNG.standard_normal(3000)
    assert np.allclose(convolve(x, h), signal.oaconvolve(x, h))
    assert policies(convolve, x, h) == {"host-clock/race/warmup=1/forward/at:x=32768,h=4096"}
    assert convolve.explain(x, h).selection.config.method == "fft"  # of these sizes, a hundred times faster
    assert "at         x=32768,h=4096: the representative of its bucket" in str(convolve.explain(x, h))


def product(store, **options):
    """The product of a matrix in compressed rows or columns, which SciPy makes from its parts, and checks."""

    @tb.tunable(space=tb.Space(kind=["csr", "csc"]), heuristic={"kind": "csr"}, store=store, name="product",
                bucket={"indptr": tb.pow2, "x": tb.pow2}, **options)  # fmt: skip
    def multiply(data, indices, indptr, x, *, config):
        matrix = sparse.csr_array((data, indices, indptr), shape=(indptr.size - 1, x.size))
        matrix.check_format(full_check=True)
        return matrix.asformat(config.kind) @ x

    return multiply


def parts(n=50, filled=0.1):
    matrix = sparse.random_array((n, n), density=filled, format="csr", rng=0)
    return matrix.data, matrix.indices, matrix.indptr, np.ones(n)


def test_parts_of_a_sparse_matrix_that_cannot_be_resized_are_measured_as_they_are(tmp_path):
    multiply, call = product(tmp_path), parts()
    assert np.allclose(multiply(*call), sparse.csr_array(call[:3]) @ call[3])
    record = multiply.selector.persistent.read(multiply.problem(*call))
    assert record.head.decided
    assert record.body.provenance["values_from"] == "call"
    said = str(multiply.explain(*call))
    assert "the caller's own size, because arguments of the representative size failed" in said
    assert "at         indptr=51,x=50: " in said


def test_the_authors_inputs_make_a_sparse_matrix_of_the_representative_size(tmp_path):
    def inputs(data, indices, indptr, x):
        rows = indptr.size - 1
        columns = np.resize(np.arange(x.size), indices.size).astype(indices.dtype)
        ends = np.linspace(0, data.size, rows + 1).astype(indptr.dtype)
        for start, end in pairwise(ends):
            columns[start:end].sort()
        return data, columns, ends, x

    multiply, call = product(tmp_path, inputs=inputs), parts()
    multiply(*call)
    said = str(multiply.explain(*call))
    assert "on         arguments made by inputs=" in said
    assert "indptr=64,x=64: the representative of its bucket" in said


# ------------------------------------------------------------------------------ an entry of a lower rung of trust


@pytest.mark.filterwarnings("ignore:.*trusted as 'near'")
def test_the_nearest_convolution_answers_at_once_and_is_measured_behind_the_call(tmp_path):
    near = RNG.standard_normal(30_000), RNG.standard_normal(4000)
    convolution(tmp_path)(*near)
    convolve = convolution(tmp_path, policy=tb.AutotunePolicy(trust="near", reverify="behind"))
    x, h = RNG.standard_normal(31_000), RNG.standard_normal(4000)
    heard = []
    convolve.selector.listen(lambda event, **data: heard.append((event, data.get("trust"))))
    assert np.allclose(convolve(x, h), signal.oaconvolve(x, h))
    assert heard[0] == ("cache_hit", "near"), "the call did not wait"
    assert tb.wait_for_background(HANG_S)
    record = convolve.selector.persistent.read(convolve.problem(x, h))
    assert record.body.provenance["values_from"] == "random"
    assert convolve.explain(x, h).selection.trust is None
    assert convolve.explain(x, h).selection.config.method == "fft"
