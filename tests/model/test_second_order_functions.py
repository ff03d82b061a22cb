"""Second-order tensor functions against closed forms, numpy's SVD and explicit loops (SoT, arXiv 2104.10935)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from decimal import Decimal, localcontext
from itertools import product

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from vitrail.kernels.covariance import (
    SPECTRUM_FLOOR,
    _difference_quotient,
    _gain,
    cross_covariance,
    gram_vector,
    matrix_sqrt_newton_schulz,
    signed_root,
    svpn,
    svpn_fast,
    upper_triangle,
)

SHAPES = [(5, 5), (7, 4), (4, 7), (1, 1), (1, 6), (6, 1)]
Matrix = NDArray[np.float64]


def random_matrix(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype)


def random_orthogonal(size: int) -> Tensor:
    return torch.linalg.qr(random_matrix(size, size))[0]


def by_numpy(matrix: Matrix, alpha: float) -> Matrix:
    """The definition."""
    U, s, Vh = np.linalg.svd(matrix, full_matrices=False)
    return (U * s**alpha) @ Vh


def by_differences(f: Callable[[Matrix], Matrix], matrix: Matrix, weights: Matrix, step: float = 1e-6) -> Matrix:
    """Gradient of sum(weights * f(matrix)) by central differences."""
    grad = np.zeros_like(matrix)
    for place in np.ndindex(*matrix.shape):
        moved = np.zeros_like(matrix)
        moved[place] = step
        grad[place] = (weights * (f(matrix + moved) - f(matrix - moved))).sum() / (2 * step)
    return grad


def gradient(f: Callable[[Tensor], Tensor], matrix: Tensor, weights: Tensor) -> Tensor:
    leaf = matrix.clone().requires_grad_()
    (f(leaf) * weights).sum().backward()
    assert leaf.grad is not None
    return leaf.grad


def relative(found: Matrix, expected: Matrix) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def corollary(matrix: Matrix, weights: Matrix, alpha: float) -> Matrix:
    """The paper's Corollary 1 as printed, with the thin SVD."""
    G = weights
    U, s, Vh = np.linalg.svd(matrix, full_matrices=False)
    V, S, inverse = Vh.T, np.diag(s), np.diag(1 / s)
    to_u, to_v = G @ V @ np.diag(s**alpha), G.T @ U @ np.diag(s**alpha)
    to_s = alpha * np.diag(s ** (alpha - 1)) @ U.T @ G @ V
    squares = s[:, None] ** 2 - s[None, :] ** 2
    K = np.where(np.eye(len(s), dtype=bool), 0, 1 / (squares + np.eye(len(s))))
    inner = K.T * (V.T @ (to_v - V @ inverse @ to_u.T @ U @ S))
    diagonal = np.diag(np.diag(to_s - U.T @ to_u @ inverse))
    return to_u @ inverse @ V.T + U @ diagonal @ V.T + 2 * U @ S @ ((inner + inner.T) / 2) @ V.T


# Exact svPN


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("alpha", [0.3, 0.5, 1.0])
def test_svpn_raises_singular_values_to_alpha(shape: tuple[int, int], alpha: float) -> None:
    Q = random_matrix(2, 3, *shape)
    expected = np.stack([[by_numpy(q, alpha) for q in row] for row in Q.numpy()])
    np.testing.assert_allclose(svpn(Q, alpha).numpy(), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("shape", SHAPES)
def test_svpn_gradient_is_exact_for_every_shape(shape: tuple[int, int]) -> None:
    assert torch.autograd.gradcheck(lambda q: svpn(q, 0.5), random_matrix(2, *shape).requires_grad_())


@pytest.mark.parametrize("shape", [(8, 8), (12, 8)])
def test_corollary_1_holds_for_tall_and_square_matrices(shape: tuple[int, int]) -> None:
    Q, G = random_matrix(*shape), random_matrix(*shape)
    paper = corollary(Q.numpy(), G.numpy(), 0.5)
    assert relative(paper, by_differences(lambda q: by_numpy(q, 0.5), Q.numpy(), G.numpy())) < 1e-6
    assert relative(gradient(lambda q: svpn(q, 0.5), Q, G).numpy(), paper) < 1e-10


def test_corollary_1_fails_for_wide_matrices_where_svpn_does_not() -> None:
    Q, G = random_matrix(8, 12), random_matrix(8, 12)
    truth = by_differences(lambda q: by_numpy(q, 0.5), Q.numpy(), G.numpy())
    assert relative(corollary(Q.numpy(), G.numpy(), 0.5), truth) > 0.1
    assert relative(gradient(lambda q: svpn(q, 0.5), Q, G).numpy(), truth) < 1e-6


@pytest.mark.parametrize("shape", [(5, 5), (7, 5), (5, 7)])
def test_svpn_gradient_is_exact_at_repeated_singular_values(shape: tuple[int, int]) -> None:
    middle = torch.zeros(shape, dtype=torch.float64)
    middle.diagonal().copy_(torch.tensor([2.0, 2.0, 2.0, 0.5, 0.5]))
    Q, G = random_orthogonal(shape[0]) @ middle @ random_orthogonal(shape[1]), random_matrix(*shape)
    truth = by_differences(lambda q: by_numpy(q, 0.5), Q.numpy(), G.numpy())
    assert relative(gradient(lambda q: svpn(q, 0.5), Q, G).numpy(), truth) < 1e-7


def test_svpn_gradient_keeps_precision_at_nearly_equal_singular_values() -> None:
    values = torch.tensor([1.0, 1.0 - 3e-7, 0.5, 0.5 - 1e-7, 0.25], dtype=torch.float64)
    Q, G = (random_orthogonal(5) * values) @ random_orthogonal(5), random_matrix(5, 5)
    single = gradient(lambda q: svpn(q, 0.5), Q.float(), G.float())
    assert relative(single.double().numpy(), gradient(lambda q: svpn(q, 0.5), Q, G).numpy()) < 3e-6


def test_svpn_of_a_matrix_of_low_rank_has_its_rank() -> None:
    u, v = random_matrix(6, 2), random_matrix(5, 2)
    Q = u @ v.mT
    U, s, Vh = np.linalg.svd(Q.numpy())
    expected = (U[:, :2] * s[:2] ** 0.5) @ Vh[:2]
    np.testing.assert_allclose(svpn(Q, 0.5).numpy(), expected, atol=1e-9)
    # Rounding noise of 1e-7 in float32 is amplified at most 1000-fold, not to its root.
    np.testing.assert_allclose(svpn(Q.float(), 0.5).numpy(), expected, atol=3e-4)


def test_svpn_holds_the_gain_below_its_floor() -> None:
    tiny = 1e-9
    Q = torch.diag(torch.tensor([4.0, tiny, 0.0], dtype=torch.float64))
    gain = (SPECTRUM_FLOOR * 4) ** -0.5
    np.testing.assert_allclose(svpn(Q, 0.5).diagonal().numpy(), [2, tiny * gain, 0], rtol=1e-12, atol=1e-15)
    # Slopes of the diagonal: alpha s^(alpha - 1) above the floor, the held gain below; towards zero f(4) / 4.
    ones = torch.ones(3, 3, dtype=torch.float64)
    found = gradient(lambda q: svpn(q, 0.5), Q, ones)
    np.testing.assert_allclose(found.diagonal().numpy(), [0.25, gain, gain], rtol=1e-9)
    np.testing.assert_allclose(found[0, 2], 0.5, rtol=1e-12)


def test_svpn_gradient_is_right_for_a_pair_on_both_sides_of_the_floor() -> None:
    s = torch.tensor([1.0, 2e-6, 3e-7], dtype=torch.float64)
    held = SPECTRUM_FLOOR**-0.5
    f = [1.0, (2e-6) ** 0.5, 3e-7 * held]
    symmetric = torch.zeros(3, 3, dtype=torch.float64)
    symmetric[1, 2] = symmetric[2, 1] = 1.0
    found = gradient(lambda q: svpn(q, 0.5), torch.diag(s), symmetric)
    np.testing.assert_allclose(found[1, 2], (f[1] - f[2]) / (s[1] - s[2]), rtol=1e-9)
    skew = symmetric.triu() - symmetric.tril()
    found = gradient(lambda q: svpn(q, 0.5), torch.diag(s), skew)
    np.testing.assert_allclose(found[1, 2], (f[1] + f[2]) / (s[1] + s[2]), rtol=1e-9)


def test_svpn_gradient_in_the_null_space_is_the_held_gain() -> None:
    Q = torch.diag(torch.tensor([4.0, 0.0, 0.0], dtype=torch.float64))
    inside = torch.zeros(3, 3, dtype=torch.float64)
    inside[1:, 1:] = random_matrix(2, 2)
    expected = inside * (SPECTRUM_FLOOR * 4) ** -0.5
    torch.testing.assert_close(gradient(lambda q: svpn(q, 0.5), Q, inside), expected)


def test_svpn_of_zero_is_zero_and_passes_no_gradient() -> None:
    Q = torch.zeros(2, 4, 3)
    Q[1] = torch.randn(4, 3)
    grad = gradient(lambda q: svpn(q, 0.5), Q, torch.ones_like(Q))
    assert svpn(Q, 0.5)[0].abs().max() == 0
    assert grad[0].abs().max() == 0
    assert grad[1].isfinite().all()
    assert grad[1].abs().max() > 0


def test_a_bad_matrix_spoils_only_itself() -> None:
    Q = random_matrix(3, 4, 4)
    Q[1, 2, 2] = torch.inf
    normalized = svpn(Q, 0.5)
    assert normalized[1].isnan().all()
    torch.testing.assert_close(normalized[[0, 2]], svpn(Q[[0, 2]], 0.5), rtol=0, atol=0)


def test_svpn_gradient_cannot_be_differentiated() -> None:
    Q = random_matrix(3, 3).requires_grad_()
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        torch.autograd.grad(svpn(Q, 0.5).sum(), Q, create_graph=True)


def test_proposition_1_successive_maxima_rebuild_svpn() -> None:
    """u^T Q v is maximised over unit vectors orthogonal to earlier ones, by climbing alone; no decomposition."""
    generator = np.random.default_rng(0)
    Q = generator.normal(size=(6, 4))
    us, vs, rebuilt = np.zeros((6, 0)), np.zeros((4, 0)), np.zeros((6, 4))
    for k in range(4):
        best = (-np.inf, np.zeros(6), np.zeros(4))
        for _ in range(5):
            v = generator.normal(size=4)
            for _ in range(2000):
                u = Q @ v
                u -= us @ (us.T @ u)
                u /= np.linalg.norm(u)
                v = Q.T @ u
                v -= vs @ (vs.T @ v)
                v /= np.linalg.norm(v)
            best = max(best, (u @ Q @ v, u, v), key=lambda found: found[0])
        maximum, u, v = best
        np.testing.assert_allclose(maximum, np.linalg.svd(Q)[1][k], rtol=1e-9)
        rebuilt += maximum**0.5 * np.outer(u, v)
        us, vs = np.column_stack([us, u]), np.column_stack([vs, v])
    np.testing.assert_allclose(svpn(torch.from_numpy(Q), 0.5).numpy(), rebuilt, atol=1e-8)


@pytest.mark.parametrize("factor", [1e-3, 7.0])
def test_svpn_is_homogeneous_of_degree_alpha(factor: float) -> None:
    Q, start = random_matrix(3, 5, 4), random_matrix(4)
    torch.testing.assert_close(svpn(factor * Q, 0.3), factor**0.3 * svpn(Q, 0.3))
    for r in (1, 3):
        fast = svpn_fast(factor * Q, 0.3, r, 2, start)
        torch.testing.assert_close(fast, factor**0.3 * svpn_fast(Q, 0.3, r, 2, start))


def test_svpn_commutes_with_rotations() -> None:
    Q, A, B, start = random_matrix(5, 4), random_orthogonal(5), random_orthogonal(4), random_matrix(4)
    torch.testing.assert_close(svpn(A @ Q @ B.mT, 0.5), A @ svpn(Q, 0.5) @ B.mT)
    rotated = svpn_fast(A @ Q @ B.mT, 0.5, 1, 3, B @ start)
    torch.testing.assert_close(rotated, A @ svpn_fast(Q, 0.5, 1, 3, start) @ B.mT)


def test_svpn_of_a_positive_matrix_is_its_power() -> None:
    X = random_matrix(6, 20)
    S = X @ X.mT / 20
    values, vectors = np.linalg.eigh(S.numpy())
    np.testing.assert_allclose(svpn(S, 0.7).numpy(), (vectors * values**0.7) @ vectors.T, atol=1e-10)


# Fast svPN


def by_power_iteration(matrix: Matrix, alpha: float, iterations: int, starts: Sequence[Matrix]) -> Matrix:
    """Equations 6-8 of SoT, one matrix, loop by loop, as many singular values as starts."""
    rest, total = matrix.copy(), np.zeros_like(matrix)
    for start in starts[:-1]:
        u, s, v = power_iteration(rest, start, iterations)
        total += s**alpha * np.outer(u, v)
        rest = rest - s * np.outer(u, v)
    return total + rest / power_iteration(rest, starts[-1], iterations)[1] ** (1 - alpha)


def power_iteration(matrix: Matrix, v: Matrix, iterations: int) -> tuple[Matrix, float, Matrix]:
    for _ in range(iterations):
        u = matrix @ v / np.linalg.norm(matrix @ v)
        v = matrix.T @ u / np.linalg.norm(matrix.T @ u)
    return u, float(u @ matrix @ v), v


@pytest.mark.parametrize("shape", [(5, 5), (7, 4), (4, 7)])
@pytest.mark.parametrize("setting", [(1, 1), (1, 3), (2, 1), (3, 2)])
def test_svpn_fast_equals_the_papers_iteration(shape: tuple[int, int], setting: tuple[int, int]) -> None:
    Q, start, (r, iterations) = random_matrix(2, 3, *shape), random_matrix(shape[1]), setting
    starts = [np.roll(start.numpy(), k) for k in range(r)]
    expected = np.stack([[by_power_iteration(q, 0.4, iterations, starts) for q in row] for row in Q.numpy()])
    np.testing.assert_allclose(svpn_fast(Q, 0.4, r, iterations, start).numpy(), expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("setting", [(1, 1), (1, 2), (3, 2)])
def test_svpn_fast_gradients_are_exact(setting: tuple[int, int]) -> None:
    inputs = (random_matrix(2, 4, 3).requires_grad_(), random_matrix(3).requires_grad_())
    assert torch.autograd.gradcheck(lambda q, v: svpn_fast(q, 0.5, *setting, v), inputs)


def test_estimates_stay_below_the_largest_singular_value_and_reach_it() -> None:
    Q, start = random_matrix(50, 6, 6), random_matrix(6)
    largest = torch.linalg.matrix_norm(Q, 2)

    def estimate(iterations: int) -> Tensor:  # with one singular value the output is Q / estimate^(1 - alpha)
        return (Q / svpn_fast(Q, 0.5, 1, iterations, start)).square().mean((-1, -2))

    before = estimate(1)
    assert (before < largest).all()
    after = estimate(2000)
    assert (after <= largest * (1 + 1e-12)).all()
    torch.testing.assert_close(after, largest, rtol=1e-6, atol=0)


@pytest.mark.parametrize("shape", [(4, 4), (6, 4), (4, 6)])
def test_all_singular_values_and_many_iterations_give_exact_svpn(shape: tuple[int, int]) -> None:
    middle = torch.zeros(shape, dtype=torch.float64)
    middle.diagonal().copy_(torch.tensor([4.0, 2.0, 1.0, 0.5]))
    Q = random_orthogonal(shape[0]) @ middle @ random_orthogonal(shape[1])
    torch.testing.assert_close(svpn_fast(Q, 0.5, 4, 100, random_matrix(shape[1])), svpn(Q, 0.5))


def test_deflation_after_one_iteration_annihilates_the_start() -> None:
    """Why pairs do not share their start: the second would iterate on rounding errors."""
    Q, start = random_matrix(6, 5).numpy(), random_matrix(5).numpy()
    u, s, v = power_iteration(Q, start, 1)
    assert np.linalg.norm((Q - s * np.outer(u, v)) @ start) < 1e-13 * np.linalg.norm(Q @ start)
    assert np.linalg.norm((Q - s * np.outer(u, v)) @ np.roll(start, 1)) > 1e-2 * np.linalg.norm(Q @ start)


def median_errors(fast: Callable[[Matrix, int, Matrix], Matrix]) -> list[float]:
    """Median relative error against exact svPN with 1, 2 and 3 singular values, over 10 starts."""
    Q = decaying_covariances()
    exact = svpn(Q, 0.5).numpy()
    medians = []
    for r in (1, 2, 3):
        found = np.stack([fast(Q.numpy(), r, start) for start in random_matrix(10, 14).numpy()])
        errors = np.linalg.norm(found - exact, axis=(-1, -2)) / np.linalg.norm(exact, axis=(-1, -2))
        medians.append(float(np.median(errors)))
    return medians


def decaying_covariances() -> Tensor:
    """40 cross-covariances of 196 tokens whose channels have size k^-0.5."""
    scale = torch.arange(1, 15, dtype=torch.float64)[:, None] ** -0.5
    return cross_covariance(scale * random_matrix(40, 14, 196), scale * random_matrix(40, 14, 196))


def covariances_of_projected_tokens(decay: float, count: int = 100, shared: bool = False) -> Tensor:
    """Of two random projections to 14 channels of 196 tokens, of whose 128 channels the k-th has size k^-decay."""
    scale = torch.arange(1, 129, dtype=torch.float64)[:, None] ** -decay
    tokens = scale * random_matrix(count, 128, 196)
    W, R = (random_matrix(1 if shared else count, 14, 128) for _ in range(2))
    return cross_covariance(W @ tokens, R @ tokens)


def share_of_largest(matrices: Tensor, start: Tensor) -> Tensor:
    """The estimate after one iteration over the true largest singular value, [matrices]."""
    estimate = (matrices / svpn_fast(matrices, 0.5, 1, 1, start)).square().mean((-1, -2))
    return estimate / torch.linalg.matrix_norm(matrices, 2)


@pytest.mark.parametrize(
    ("decay", "errors", "share"),
    [
        (0.0, (0.245, 0.281, 0.289, 0.259, 0.224), None),
        (0.5, (0.393, 0.416, 0.418, 0.298, 0.232), 0.794),
        (1.0, (0.368, 0.368, 0.369, 0.219, 0.155), None),
    ],
)
def test_errors_against_exact_svpn_are_those_of_the_table(
    decay: float, errors: tuple[float, ...], share: float | None
) -> None:
    """Errors of an independent numpy computation, for all rows in which it does not matter where a second pair starts.

    The width of its tokens is not recorded, which moves errors by 0.01 (64 to 240 channels were tried).
    """
    Q, starts = covariances_of_projected_tokens(decay), random_matrix(20, 14)
    exact = svpn(Q, 0.5)
    for (r, iterations), expected in zip(((1, 1), (1, 3), (1, 5), (2, 100), (3, 100)), errors, strict=True):
        found = torch.stack([svpn_fast(Q, 0.5, r, iterations, v) for v in starts[: 20 if r == 1 else 1]])
        relative_errors = torch.linalg.matrix_norm(found - exact) / torch.linalg.matrix_norm(exact)
        assert float(relative_errors.median()) == pytest.approx(expected, abs=0.015), (r, iterations)
    if share is not None:
        shares = torch.cat([share_of_largest(Q, v) for v in starts])
        assert float(shares.median()) == pytest.approx(share, abs=0.03)


def test_a_shared_start_along_the_usual_first_vector_makes_one_iteration_nearly_enough() -> None:
    """Computed independently: a median of 0.9998 of the largest singular value, 0.907 from a random start, for one
    draw of projections; of eight draws the first was 0.9968 or more and the second 0.88 or less."""
    Q = covariances_of_projected_tokens(0.5, shared=True)
    first = torch.linalg.svd(Q)[2][:, 0]
    aligned = first * (first @ first[0]).sign()[:, None]
    assert float(share_of_largest(Q, aligned.mean(0)).median()) > 0.995
    assert float(torch.cat([share_of_largest(Q, v) for v in random_matrix(20, 14)]).median()) < 0.9


def test_error_table_at_one_iteration_with_the_authors_shared_start() -> None:
    """(1,1) < (3,1) < (2,1), the order of the errors above, from the paper's equations alone."""
    one, two, three = median_errors(
        lambda many, r, start: np.stack([by_power_iteration(one, 0.5, 1, [start] * r) for one in many])
    )
    assert one < three < two


@pytest.mark.parametrize("iterations", [1, 100])
def test_more_singular_values_are_closer_to_exact_with_starts_of_their_own(iterations: int) -> None:
    one, two, three = median_errors(
        lambda many, r, start: svpn_fast(torch.from_numpy(many), 0.5, r, iterations, torch.from_numpy(start)).numpy()
    )
    assert three < two < one


@pytest.mark.parametrize("setting", [(1, 1), (1, 3), (2, 1), (3, 3)])
def test_svpn_fast_of_zero_is_zero_and_passes_no_gradient(setting: tuple[int, int]) -> None:
    start = torch.randn(3, requires_grad=True)
    Q = torch.zeros(2, 4, 3, requires_grad=True)
    normalized = svpn_fast(Q, 0.5, *setting, start)
    normalized.sum().backward()
    assert normalized.abs().max() == 0
    assert Q.grad is not None
    assert Q.grad.abs().max() == 0
    assert start.grad is not None
    assert start.grad.abs().max() == 0


@pytest.mark.parametrize("size", [1e-30, 1e-10, 1e-5, 1e5])
@pytest.mark.parametrize("setting", [(1, 1), (2, 2)])
def test_svpn_fast_stays_finite_for_tiny_large_and_rank_one_matrices(size: float, setting: tuple[int, int]) -> None:
    Q = size * torch.randn(5, 1) @ torch.randn(1, 4)
    grad = gradient(lambda q: svpn_fast(q, 0.5, *setting, torch.ones(4)), Q, torch.ones_like(Q))
    assert svpn_fast(Q, 0.5, *setting, torch.ones(4)).isfinite().all()
    assert grad.isfinite().all()


def test_too_many_singular_values_and_wrong_powers_are_errors() -> None:
    with pytest.raises(ValueError, match="1 to 3 singular values"):
        svpn_fast(torch.randn(5, 3), 0.5, 4, 1, torch.randn(3))
    for alpha in (0.0, 1.5):
        with pytest.raises(ValueError, match="alpha"):
            svpn(torch.randn(3, 3), alpha)


# Square root, Gram vector, covariance, signed root


def test_newton_schulz_converges_to_the_square_root() -> None:
    X = random_matrix(2, 6, 30)
    S = X @ X.mT / 30
    values, vectors = np.linalg.eigh(S.numpy())
    root = np.einsum("bik,bk,bjk->bij", vectors, values**0.5, vectors)
    errors = [relative(matrix_sqrt_newton_schulz(S, steps).numpy(), root) for steps in (1, 3, 5, 8, 20)]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-10


@pytest.mark.parametrize("steps", [1, 2, 3, 5])
def test_newton_schulz_takes_the_steps_of_isqrt(steps: int) -> None:
    """As SoT writes it, one matrix: few steps do not converge, so what they are decides the feature."""
    X = random_matrix(6, 30).numpy()
    S, identity = X @ X.T / 30, np.eye(6)
    Y, Z = S / np.trace(S), identity
    for _ in range(steps):
        Y, Z = 0.5 * Y @ (3 * identity - Z @ Y), 0.5 * (3 * identity - Z @ Y) @ Z
    found = matrix_sqrt_newton_schulz(torch.from_numpy(S), steps).numpy()
    np.testing.assert_allclose(found, np.trace(S) ** 0.5 * Y, rtol=1e-9, atol=1e-12)


def test_newton_schulz_gradient_is_exact_and_safe_at_zero() -> None:
    X = random_matrix(4, 9)
    assert torch.autograd.gradcheck(lambda s: matrix_sqrt_newton_schulz(s, 3), (X @ X.mT / 9).requires_grad_())
    zero = torch.zeros(2, 3, 3, requires_grad=True)
    root = matrix_sqrt_newton_schulz(zero, 3)
    root.sum().backward()
    assert root.abs().max() == 0
    assert zero.grad is not None
    assert zero.grad.isfinite().all()


def test_gram_vector_is_the_unit_upper_triangle() -> None:
    x = random_matrix(2, 4, 7)
    for b in range(2):
        entries = [float((x[b, i] * x[b, j]).sum()) / 7 for i in range(4) for j in range(i, 4)]
        np.testing.assert_allclose(gram_vector(x)[b].numpy(), entries / np.linalg.norm(entries), rtol=1e-12)
    torch.testing.assert_close(gram_vector(x[0]), gram_vector(x)[0])


def test_gram_vector_ignores_scale_and_token_order_and_is_safe_at_zero() -> None:
    x = random_matrix(3, 5, 8)
    torch.testing.assert_close(gram_vector(11 * x[..., torch.randperm(8)]), gram_vector(x))
    zero = torch.zeros(3, 5, 8, requires_grad=True)
    gram_vector(zero).sum().backward()
    assert gram_vector(zero).abs().max() == 0
    assert zero.grad is not None
    assert zero.grad.isfinite().all()


def test_gram_vector_gradients_are_exact_and_can_be_differentiated() -> None:
    x = random_matrix(2, 3, 4, 6).transpose(0, 1).requires_grad_()
    assert torch.autograd.gradcheck(gram_vector, x)
    assert torch.autograd.gradgradcheck(gram_vector, x)


def test_upper_triangle_follows_numpy() -> None:
    S = random_matrix(2, 3, 5, 5)
    np.testing.assert_array_equal(upper_triangle(S).numpy(), S.numpy()[(..., *np.triu_indices(5))])


def test_cross_covariance_without_centring_is_the_mean_of_outer_products() -> None:
    x, y = random_matrix(2, 3, 5, 9), random_matrix(2, 3, 4, 9)
    expected = np.einsum("bhit,bhjt->bhij", x.numpy(), y.numpy()) / 9
    np.testing.assert_allclose(cross_covariance(x, y).numpy(), expected, rtol=1e-12)


def test_channel_centring_is_numpys_covariance_and_scalar_centring_takes_one_mean() -> None:
    x, y = random_matrix(5, 9) + 2, random_matrix(4, 9) - 1
    block = np.cov(x.numpy(), y.numpy(), bias=True)[:5, 5:]
    np.testing.assert_allclose(cross_covariance(x, y, center="channel").numpy(), block, rtol=1e-10)
    scalar = (x - x.mean()).numpy() @ (y - y.mean()).numpy().T / 9
    np.testing.assert_allclose(cross_covariance(x, y, center="scalar").numpy(), scalar, rtol=1e-10)


@pytest.mark.parametrize("center", ["none", "channel", "scalar"])
def test_masked_tokens_are_left_out_whatever_they_hold(center: str) -> None:
    x, y = random_matrix(2, 3, 5, 9), random_matrix(2, 3, 4, 9)
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[0, [1, 8]] = False
    expected = cross_covariance(x[0, ..., mask[0]], y[0, ..., mask[0]], center=center)
    x[0, ..., 1], y[0, ..., 8] = torch.nan, torch.inf
    found = cross_covariance(x, y, mask[:, None], center)
    torch.testing.assert_close(found[0], expected)
    torch.testing.assert_close(found[1], cross_covariance(x[1], y[1], center=center))


def test_no_real_token_gives_zeros() -> None:
    mask = torch.zeros(2, 6, dtype=torch.bool)
    found = cross_covariance(torch.randn(2, 3, 6), torch.randn(2, 4, 6), mask, "channel")
    assert found.abs().max() == 0


@pytest.mark.parametrize("normalize", ["svpn", "fast"])
def test_constant_tokens_have_no_covariance_and_no_nan(normalize: str) -> None:
    x = torch.randn(2, 4, 1).expand(2, 4, 6).clone().requires_grad_()
    Q = cross_covariance(x, x, center="channel")
    out = svpn(Q, 0.5) if normalize == "svpn" else svpn_fast(Q, 0.5, 1, 1, torch.randn(4))
    out.sum().backward()
    assert out.abs().max() < 1e-3
    assert x.grad is not None
    assert x.grad.isfinite().all()


def test_signed_root_keeps_signs_and_has_a_finite_slope_at_zero() -> None:
    x = torch.tensor([-4.0, 0.0, 9.0], requires_grad=True)
    signed_root(x).sum().backward()
    torch.testing.assert_close(signed_root(x), torch.tensor([-2.0, 0.0, 3.0]))
    assert x.grad is not None
    torch.testing.assert_close(x.grad, torch.tensor([0.25, 1e4, 1 / 6]))


def test_an_unknown_centring_is_an_error() -> None:
    with pytest.raises(ValueError, match="none, channel or scalar"):
        cross_covariance(torch.randn(2, 3), torch.randn(2, 3), center="median")


# Precision, compilation, meta

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "svpn": lambda q: svpn(q, 0.5),
    "fast": lambda q: svpn_fast(q, 0.5, 1, 1, torch.ones(q.shape[-1], device=q.device)),
    "fast22": lambda q: svpn_fast(q, 0.5, 2, 2, torch.ones(q.shape[-1], device=q.device)),
    "root": lambda q: matrix_sqrt_newton_schulz(cross_covariance(q, q), 3),
    "gram": gram_vector,
    "covariance": lambda q: cross_covariance(q, q, center="channel"),
    "signed_root": signed_root,
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_inputs_are_computed_in_float32(name: str, dtype: torch.dtype) -> None:
    Q = torch.randn(2, 4, 5).to(dtype)
    found = FUNCTIONS[name](Q)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, FUNCTIONS[name](Q.float()), rtol=0, atol=0)
    grad = gradient(FUNCTIONS[name], Q, torch.ones(()))
    assert grad.dtype == dtype
    assert grad.isfinite().all()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_autocast_changes_nothing(name: str) -> None:
    Q = torch.randn(2, 4, 5)
    with torch.autocast("cpu", torch.bfloat16):
        assert (Q @ Q.mT).dtype == torch.bfloat16  # the region is real
        found = FUNCTIONS[name](Q)
        grad = gradient(FUNCTIONS[name], Q, torch.ones(()))
    torch.testing.assert_close(found, FUNCTIONS[name](Q), rtol=0, atol=0)
    if name in ("svpn", "gram"):  # their backward is ours; that of the others is torch's
        torch.testing.assert_close(grad, gradient(FUNCTIONS[name], Q, torch.ones(())), rtol=0, atol=0)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_one_graph_compiles(name: str) -> None:
    torch.compiler.reset()
    Q = torch.randn(2, 4, 5)
    compiled = torch.compile(FUNCTIONS[name], fullgraph=True, backend="eager")
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(compiled(Q), FUNCTIONS[name](Q))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_shapes_come_out_on_the_meta_device(name: str) -> None:
    Q = torch.randn(2, 4, 5)
    found = FUNCTIONS[name](Q.to("meta"))
    assert found.is_meta
    assert found.shape == FUNCTIONS[name](Q).shape


def test_one_singular_value_keeps_the_direction() -> None:
    Q = random_matrix(10, 5, 6)
    fast = svpn_fast(Q, 0.5, 1, 1, random_matrix(6))
    torch.testing.assert_close(F.cosine_similarity(fast.flatten(1), Q.flatten(1)), torch.ones(10, dtype=torch.float64))


@pytest.mark.parametrize("alpha", [0.05, 0.3, 0.5, 1.0])
def test_slopes_between_singular_values_hold_to_fifty_digits(alpha: float) -> None:
    """(f(a) - f(b)) / (a - b) in decimals: apart, all but equal, equal, on both sides of the floor, below it, zero."""
    floor = SPECTRUM_FLOOR * 2.0
    s = [2.0, 2.0 * (1 - 1e-9), 1.0, 1.0, 0.3, 4 * floor, 1.5 * floor, 0.5 * floor, 0.4 * floor, 0.4 * floor, 0.0]
    values = torch.tensor([s], dtype=torch.float64)
    found = _difference_quotient(values, _gain(values, alpha), alpha)[0]
    with localcontext() as context:
        context.prec = 50
        power, least = Decimal(alpha), Decimal(float(SPECTRUM_FLOOR * values[0, 0]))

        def raised(x: Decimal) -> Decimal:
            return x * max(x, least) ** (power - 1)

        for i, j in product(range(len(s)), repeat=2):
            a, b = Decimal(s[i]), Decimal(s[j])
            held = max(a, least) ** (power - 1)
            slope = (power * held if a > least else held) if a == b else (raised(a) - raised(b)) / (a - b)
            assert float(found[i, j]) == pytest.approx(float(slope), rel=1e-12), (s[i], s[j])
