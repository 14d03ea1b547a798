"""Linear algebra in small pieces gives what numpy gives, and no piece is large enough for threads."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from tunebook.search._small_products import ALONE, inverse, product, solve_lower

SIZES = (1, 5, 31, 32, 33, 64, 100, 161)


def covariance(rng, *shape):
    """Return positive definite matrices, with a variance that a missing time has on one diagonal."""
    halves = rng.normal(size=(*shape, shape[-1]))
    found = halves @ np.swapaxes(halves, -1, -2) / shape[-1] + 0.04 * np.eye(shape[-1])
    found[..., -1, -1] += 1e6
    return found


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("batch", [(), (3,)])
def test_an_inverse_is_numpys(size, batch):
    matrices = covariance(np.random.default_rng(size), *batch, size)
    found = inverse(np, matrices)
    assert np.allclose(found @ matrices, np.eye(size), atol=1e-6)
    assert np.allclose(found, np.linalg.inv(matrices), atol=1e-9)


@pytest.mark.parametrize("size", SIZES)
def test_a_triangular_system_is_solved_as_by_numpy(size):
    rng = np.random.default_rng(size)
    root, right = np.linalg.cholesky(covariance(rng, size)), rng.normal(size=size)
    assert np.allclose(solve_lower(np, root, right), np.linalg.solve(root, right), atol=1e-9)


def seen_by_matmul(one, other):
    """Return a product, and how many multiplications each of its pieces took."""
    pieces = []

    def matmul(a, b):
        pieces.append(a.shape[-2] * a.shape[-1] * b.shape[-1])
        return np.matmul(a, b)

    own = SimpleNamespace(matmul=matmul, empty=np.empty, broadcast_shapes=np.broadcast_shapes)
    return product(own, one, other), pieces


@pytest.mark.parametrize("shapes", [((7, 5), (5, 3)), ((130, 300), (300, 300)), ((4, 160, 12), (4, 12, 160))])
def test_no_piece_of_a_product_is_large_enough_for_threads(shapes):
    rng = np.random.default_rng(0)
    one, other = (rng.normal(size=shape) for shape in shapes)
    found, pieces = seen_by_matmul(one, other)
    assert np.allclose(found, one @ other)
    assert max(pieces) <= ALONE


def test_a_product_keeps_its_precision_and_broadcasts_a_batch():
    one, other = np.ones((3, 70, 80), np.float32), np.ones((80, 90), np.float32)
    found = product(np, one, other)
    assert found.dtype == np.float32
    assert found.shape == (3, 70, 90)
    assert (found == 80).all()
