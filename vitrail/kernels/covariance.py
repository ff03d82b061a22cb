"""Second-order statistics of tokens and their normalisations (SoT, Xie et al., 2021, arXiv 2104.10935; Gramian
attention heads, Ryu et al., 2023, arXiv 2310.16483).

A matrix Q is `[..., rows, columns]`; tokens are columns, `[..., channels, tokens]`, as the papers write them.

Everything is computed in float32 whatever autocast says (half inputs are raised and float32 comes back; float64 stays):
squares and small singular values do not survive bfloat16. Leading dimensions are batched.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

SPECTRUM_FLOOR = 1e-6
"""Exact svPN: singular values below this share of the largest are amplified as if they lay at it."""
ESTIMATE_FLOOR = 1e-6
"""Fast svPN: estimates below this are amplified as if they were this large."""
TRACE_FLOOR = 1e-6
"""Newton-Schulz: smallest trace by which a matrix is divided."""
ROOT_FLOOR = 1e-8
"""Signed root: added under the root (authors' code), so that the slope at zero is 1e4 and not infinite."""


def svpn(matrix: Tensor, alpha: float) -> Tensor:
    """Singular-value power normalisation, exact: sum_i s_i^alpha u_i v_i^T (SoT eq. 4-5).

    `[..., rows, columns]` to the same shape. Each singular value is multiplied by the gain s^(alpha - 1), which is held
    constant below `SPECTRUM_FLOOR` of the largest one: the result is continuous, null directions stay null, and the
    gradient is bounded. It is exact at repeated singular values. A zero matrix gives zeros and passes no gradient; a
    matrix that is not finite gives NaN, its neighbours in the batch are untouched.

    The gradient itself cannot be differentiated. `torch.linalg.svd` synchronises with an accelerator; on the meta
    device shapes come out right and counters of operations do not see the decomposition.

    >>> svpn(torch.diag(torch.tensor([4.0, 9.0])), 0.5).diagonal().tolist()
    [2.0, 3.0]
    """
    _check_alpha(alpha)
    with without_autocast(matrix):
        matrix = _raised(matrix)
        # One backward formula is enough: a wide matrix is a tall one on its side.
        wide = matrix.shape[-2] < matrix.shape[-1]
        normalized: Tensor = _ExactSvpn.apply(matrix.mT if wide else matrix, alpha)
        return normalized.mT if wide else normalized


class _ExactSvpn(torch.autograd.Function):
    """svPN of tall or square matrices, with the divided-difference gradient.

    The chain rule through U, S, V (SoT's Corollary 1) divides by s_i^2 - s_j^2. What is needed are only the
    quotients of f(s) = s^alpha, which stay finite when singular values meet.
    """

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, alpha: float) -> Tensor:
        finite = matrix.isfinite().all(-1, keepdim=True).all(-2, keepdim=True)
        # The decomposition raises for the whole batch on one NaN; here a bad matrix spoils only itself.
        U, s, Vh = torch.linalg.svd(torch.where(finite, matrix, 0), full_matrices=False)
        ctx.save_for_backward(U, s, Vh)
        ctx.alpha = alpha
        return torch.where(finite, (U * (s * _gain(s, alpha))[..., None, :]) @ Vh, torch.nan)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if torch.is_grad_enabled():  # once_differentiable would drop the second derivative in silence
            raise RuntimeError("exact svpn cannot be differentiated twice (create_graph=True); use svpn_fast")
        U, s, Vh = ctx.saved_tensors
        with without_autocast(grad):
            gain = _gain(s, ctx.alpha)
            GV = grad @ Vh.mT
            P = U.mT @ GV
            symmetric, skew = (P + P.mT) / 2, (P - P.mT) / 2
            inner = U @ (_difference_quotient(s, gain, ctx.alpha) * symmetric + _sum_quotient(s, gain) * skew)
            if U.shape[-2] > U.shape[-1]:  # what of the gradient lies outside the column space
                inner = inner + (GV - U @ P) * gain[..., None, :]
            return inner @ Vh, None


def _gain(s: Tensor, alpha: float) -> Tensor:
    """f(s) / s of descending singular values [..., k], constant below the floor, zero for a zero matrix."""
    largest = s[..., :1]
    gain = torch.maximum(s, SPECTRUM_FLOOR * largest).pow(alpha - 1)
    return torch.where(largest > torch.finfo(s.dtype).tiny, gain, 0)


def _difference_quotient(s: Tensor, gain: Tensor, alpha: float) -> Tensor:
    """(f_i - f_j) / (s_i - s_j), [..., k, k], to full precision however close s_i and s_j are.

    With f = s g and g_i the gain of the larger one, it is g_i - s_j (g_j - g_i) / (s_i - s_j); at s_i = s_j the slope.
    """
    floor = SPECTRUM_FLOOR * s[..., :1, None]
    large = torch.maximum(s[..., :, None], s[..., None, :])
    small = torch.minimum(s[..., :, None], s[..., None, :])
    # The larger a singular value, the smaller its gain.
    least = torch.minimum(gain[..., :, None], gain[..., None, :])
    most = torch.maximum(gain[..., :, None], gain[..., None, :])
    top = torch.maximum(large, floor).clamp(min=torch.finfo(s.dtype).tiny)
    below = (top - torch.maximum(small, floor)).clamp(min=0) / top
    # g_j - g_i of close values from their distance: their difference would cancel.
    rise = torch.where(below > 0.5, most - least, least * torch.expm1((alpha - 1) * torch.log1p(-below)))
    slope = torch.where(small >= floor, alpha * least, least)
    return torch.where(large > small, least - small * rise / torch.where(large > small, large - small, 1), slope)


def _sum_quotient(s: Tensor, gain: Tensor) -> Tensor:
    """(f_i + f_j) / (s_i + s_j), [..., k, k]; the gain itself where both singular values are zero."""
    f, total = s * gain, s[..., :, None] + s[..., None, :]
    quotient = (f[..., :, None] + f[..., None, :]) / torch.where(total > 0, total, 1)
    return torch.where(total > 0, quotient, gain[..., :, None])


def svpn_fast(matrix: Tensor, alpha: float, singular_values: int, iterations: int, start: Tensor) -> Tensor:
    """Singular-value power normalisation by power iteration with deflation (SoT eq. 6-8).

    `[..., rows, columns]` to the same shape; `start` `[columns]` is the first guess of every right singular vector.
    The first `singular_values - 1` estimated pairs are raised to `alpha`, what remains of the matrix is divided by
    (estimate of its largest)^(1 - alpha). With one singular value that is Q / estimate^(1 - alpha) and nothing is
    deflated. Gradients, also of `start`, are those of the iteration itself.

    Pair k starts from `start` rolled by k, so with several singular values `start` must not be constant. The authors
    restart every pair from the same vector; but after one iteration what remains is (I - u u^T) Q with u along Q start,
    which maps `start` to zero: their second pair consists of rounding errors, which is why two and three singular
    values are less accurate than one after a single iteration.

    Estimates below `ESTIMATE_FLOOR` are amplified as if they lay at it (the paper has no guard; the authors' code adds
    1e-5 to the divisor, which breaks svpn_fast(c Q) = c^alpha svpn_fast(Q)); an estimate of zero gives zeros and no
    gradient. Raises ValueError for more singular values than the matrix has.
    """
    _check_alpha(alpha)
    rows, columns = matrix.shape[-2:]
    if not 1 <= singular_values <= min(rows, columns) or iterations < 1:
        raise ValueError(
            f"matrices of {rows} x {columns} cannot be normalised with {singular_values} singular values and "
            f"{iterations} iterations; use 1 to {min(rows, columns)} singular values and at least one iteration"
        )
    with without_autocast(matrix):
        remainder = _raised(matrix)
        start = start.to(remainder.dtype)
        powers = []
        for k in range(singular_values - 1):
            u, s, v = _leading_pair(remainder, iterations, start.roll(k))
            pair = u[..., :, None] * (s * v)[..., None, :]
            powers.append(pair * _estimate_gain(s, alpha)[..., None])
            remainder = remainder - pair
        s = _leading_pair(remainder, iterations, start.roll(singular_values - 1))[1]
        normalized = remainder * _estimate_gain(s, alpha)[..., None]
        for power in powers:
            normalized = normalized + power
        return normalized


def _leading_pair(matrix: Tensor, iterations: int, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Estimates of the first left vector [..., rows], singular value [..., 1] and right vector [..., columns]."""
    image = matrix @ v  # one product for the whole batch: every matrix starts from the same vector
    for i in range(iterations):
        if i > 0:
            image = (matrix @ v[..., None]).squeeze(-1)
        u = F.normalize(image, dim=-1)
        back = (u[..., None, :] @ matrix).squeeze(-2)
        s = torch.linalg.vector_norm(back, dim=-1, keepdim=True)
        v = F.normalize(back, dim=-1)
    return u, s, v


def _estimate_gain(s: Tensor, alpha: float) -> Tensor:
    return torch.where(s > 0, s.clamp(min=ESTIMATE_FLOOR).pow(alpha - 1), 0)


def matrix_sqrt_newton_schulz(matrix: Tensor, steps: int) -> Tensor:
    """Square root of symmetric positive semi-definite matrices `[..., d, d]` by Newton-Schulz steps (iSQRT-COV, Li
    et al., 2017, arXiv 1712.01034).

    The matrix is divided by its trace, so that the steps converge, and the root multiplied by the trace's root. A trace
    below `TRACE_FLOOR` is taken as that: convergence is then slower and the limit the same; a zero matrix gives zeros.
    """
    with without_autocast(matrix):
        matrix = _raised(matrix)
        trace = matrix.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None].clamp(min=TRACE_FLOOR)
        identity = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
        root, inverse = matrix / trace, identity
        for step in range(steps):
            factor = 1.5 * identity - 0.5 * (root if step == 0 else inverse @ root)
            root = root @ factor
            inverse = factor if step == 0 else factor @ inverse
        return trace.sqrt() * root


def upper_triangle(matrix: Tensor) -> Tensor:
    """The upper triangle with diagonal of `[..., d, d]`, row by row, `[..., d(d+1)/2]`."""
    d = matrix.shape[-1]
    # Made where it is used: a device kernel of microseconds, no transfer, no cache that a compiled graph could poison.
    row, column = torch.triu_indices(d, d, device=matrix.device).unbind()
    return matrix.flatten(-2).index_select(-1, row * d + column)


def gram_vector(x: Tensor) -> Tensor:
    """Gram matrix over tokens as a unit vector: `[..., d, tokens]` to `[..., d(d+1)/2]`; zero tokens give zeros."""
    with without_autocast(x):
        # Token by token, as features lie in memory: the one copy that the batched product needs is no transposition.
        rows = _raised(x.mT).contiguous()
        triangle: Tensor = _GramTriangle.apply(rows.reshape(-1, *rows.shape[-2:]))
        return F.normalize(triangle.reshape(*rows.shape[:-2], triangle.shape[-1]), dim=-1)


class _GramTriangle(torch.autograd.Function):
    """Upper triangle of X^T X, `[n, tokens, d]` to `[n, d(d+1)/2]`.

    The gradient is one product with a symmetric matrix that is read from the triangle's gradient; autograd would
    scatter it into a matrix of zeros and multiply twice. It can be differentiated again.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return upper_triangle(x.mT @ x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        d = x.shape[-1]
        with without_autocast(grad):
            i = torch.arange(d, device=x.device)
            row, column = torch.minimum(i[:, None], i), torch.maximum(i[:, None], i)
            place = row * d - row * (row + 1) // 2 + column
            matrix = grad.index_select(-1, place.flatten()).unflatten(-1, (d, d))
            return x @ (matrix + torch.diag_embed(matrix.diagonal(dim1=-2, dim2=-1)))


def cross_covariance(x: Tensor, y: Tensor, mask: Tensor | None = None, center: str = "none") -> Tensor:
    """(1 / tokens) x y^T: x `[..., rows, tokens]`, y `[..., columns, tokens]` to `[..., rows, columns]`.

    `mask` `[..., tokens]` (broadcast over leading dimensions) is true where a token is real; the others are left out
    exactly, whatever they hold, and no real token at all gives zeros. `center` subtracts nothing ("none", the paper's
    formula), the mean of every channel ("channel", a true covariance) or one mean over channels and tokens ("scalar",
    the authors' code).
    """
    if center not in ("none", "channel", "scalar"):
        raise ValueError(f"center must be none, channel or scalar, not {center!r}")
    with without_autocast(x):
        x, y = _raised(x), _raised(y)
        if mask is None:
            count: Tensor | int = max(1, x.shape[-1])
        else:
            count = mask.sum(-1).clamp(min=1)[..., None, None]
        x, y = _centred(x, mask, count, center), _centred(y, mask, count, center)
        # Token by token, as projections lie in memory: the copy that the batched product needs is no transposition.
        return x.mT.contiguous().mT @ y.mT.contiguous() / count


def _centred(x: Tensor, mask: Tensor | None, count: Tensor | int, center: str) -> Tensor:
    if mask is not None:
        absent = ~mask[..., None, :]
        x = x.masked_fill(absent, 0)
    if center == "none":
        return x
    mean = x.sum(-1, keepdim=True) / count
    if center == "scalar":
        mean = mean.mean(-2, keepdim=True)
    return x - mean if mask is None else (x - mean).masked_fill(absent, 0)


def signed_root(x: Tensor) -> Tensor:
    """sign(x) sqrt(|x|), element by element, any shape; smooth at zero by `ROOT_FLOOR` under the root."""
    with without_autocast(x):
        x = _raised(x)
        return x * (x.abs() + ROOT_FLOOR).rsqrt()


def _check_alpha(alpha: float) -> None:
    if not 0 < alpha <= 1:
        raise ValueError(f"alpha is the power of singular values and must be more than 0 and at most 1, not {alpha}")


def _raised(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """A context in which operations keep the dtype of their inputs, on the device of `x`."""
    kind = x.device.type
    # Not torch.amp.is_autocast_available: torch 2.11 cannot trace it and cuts a compiled graph in two at every call.
    return nullcontext() if kind == "meta" else torch.autocast(kind, enabled=False)
