"""Linear classifiers of a few images, many small problems at once: logistic regression, SVM, nearest prototype.

Shapes: features [problems, rows, width], labels [problems, rows] in 0..classes - 1, every class among them.

Both losses are convex with a ridge, so Newton's method finds their one minimum; all problems take their steps together,
each system is solved by conjugate gradients (no matrix of second derivatives is ever made), and float64 leaves nothing
to rounding. The weights lie in the span of a problem's rows, so wide features are first turned into that span: with
five images of width 2048 the work is that of width five.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

TOLERANCE = 1e-7  # of the gradient, against its size at zero weights
FLAT = 1e-13  # curvature of a direction of length 1 that is taken for none
NEWTON_STEPS = 100
INNER_STEPS = 500
HALVINGS = 40
SUFFICIENT = 1e-4  # share of the promised decrease that a step must reach (Armijo)

Bend = Callable[[Tensor], Tensor]  # a change of the scores -> change of the loss's slope there
Loss = Callable[[Tensor], tuple[Tensor, Tensor, Bend]]  # scores -> loss [problems], its slope at each score, its bend


@dataclass(frozen=True, eq=False)
class Linear:
    """One linear classifier per problem."""

    weight: Tensor  # [problems, width, classes]
    bias: Tensor  # [problems, classes]

    def scores(self, features: Tensor) -> Tensor:
        """[problems, rows, width] -> [problems, rows, classes]."""
        return features.to(self.weight.dtype) @ self.weight + self.bias[:, None]


def logistic_regression(features: Tensor, labels: Tensor, classes: int, strength: float = 1.0) -> Linear:
    """Multinomial logistic regression: least ||weight||² / 2 + strength * Σ cross entropy; the bias is not penalised.

    As scikit-learn's `LogisticRegression(C=strength)` for three classes and more; with two, scikit-learn penalises
    the difference of both weights alone, which is twice the strength here.
    """
    wanted = _one_hot(labels, classes)

    def loss(scores: Tensor) -> tuple[Tensor, Tensor, Bend]:
        logs = scores.log_softmax(-1)
        probability = logs.exp()

        def bend(change: Tensor) -> Tensor:
            moved = probability * change
            return strength * (moved - probability * moved.sum(-1, keepdim=True))

        return -strength * (wanted * logs).sum((1, 2)), strength * (probability - wanted), bend

    return _fit(features, classes, loss, bias_penalty=0.0)


def linear_svm(features: Tensor, labels: Tensor, classes: int, strength: float = 1.0) -> Linear:
    """One linear SVM per class against the rest: least (||weight||² + bias²) / 2 + strength * Σ max(0, 1 - margin)².

    As scikit-learn's `LinearSVC(C=strength)`, which penalises the bias, too.
    """
    side = 2 * _one_hot(labels, classes) - 1

    def loss(scores: Tensor) -> tuple[Tensor, Tensor, Bend]:
        short = (1 - side * scores).clamp(min=0)
        inside = (short > 0).to(scores.dtype)
        return strength * short.square().sum((1, 2)), -2 * strength * side * short, lambda v: 2 * strength * inside * v

    return _fit(features, classes, loss, bias_penalty=1.0)


def prototypes(features: Tensor, labels: Tensor, classes: int) -> Linear:
    """The class whose mean is nearest (Snell et al., 2017): -||x - mean||² but for ||x||², which all classes share."""
    wanted = _one_hot(labels, classes)
    mean = (wanted.mT @ features.double()) / wanted.sum(1)[..., None]  # [problems, classes, width]
    return Linear(2 * mean.mT, -mean.square().sum(-1))


CLASSIFIERS: dict[str, Callable[[Tensor, Tensor, int], Linear]] = {
    "logistic": logistic_regression,
    "svm": linear_svm,
    "prototype": prototypes,
}


def _one_hot(labels: Tensor, classes: int) -> Tensor:
    targets = F.one_hot(labels, classes).double()
    if not (targets.sum(1) > 0).all():
        raise ValueError(f"every one of the {classes} classes needs an image to learn from, and one has none")
    return targets


def _fit(features: Tensor, classes: int, loss: Loss, bias_penalty: float) -> Linear:
    rows = features.double()
    basis = None
    if rows.shape[2] > rows.shape[1]:
        basis, triangle = torch.linalg.qr(rows.mT)  # rows = triangle^T basis^T
        rows = triangle.mT
    design = torch.cat([rows, torch.ones_like(rows[..., :1])], 2)
    penalty = design.new_ones(design.shape[2], 1)
    penalty[-1] = bias_penalty
    solution = _minimise(design, penalty, classes, loss)
    weight, bias = solution[:, :-1], solution[:, -1]
    return Linear(weight if basis is None else basis @ weight, bias)


def _minimise(design: Tensor, penalty: Tensor, classes: int, loss: Loss) -> Tensor:
    """Weights [problems, columns, classes] of least Σ penalty * weight² / 2 + loss(design @ weights)."""

    def at(weights: Tensor) -> tuple[Tensor, Tensor, Bend]:
        value, slope, bend = loss(design @ weights)
        return value + (penalty * weights.square()).sum((1, 2)) / 2, slope, bend

    weights = design.new_zeros(len(design), design.shape[2], classes)
    value, slope, bend = at(weights)
    start = None
    for _ in range(NEWTON_STEPS):
        gradient = penalty * weights + design.mT @ slope
        size = _norm(gradient)
        if start is None:  # where classes cannot be told apart at all, the minimum is where it begins
            start = torch.maximum(size, 1e-4 * _norm(design)).clamp(min=1e-12)
        if bool((size <= TOLERANCE * start).all()):
            return weights

        def curvature(change: Tensor, bend: Bend = bend) -> Tensor:
            return penalty * change + design.mT @ bend(design @ change)

        # Far from the minimum a rough direction will do; near it the error must shrink faster than the gradient.
        step = _solve(curvature, -gradient, size * (size / start).sqrt().clamp(max=0.1))
        promised = (gradient * step).sum((1, 2))
        rate = torch.ones_like(value)
        for _ in range(HALVINGS):
            tried = weights + rate[:, None, None] * step
            new = at(tried)
            short = new[0] > value + SUFFICIENT * rate * promised + 1e-13 * value.abs()
            if not bool(short.any()):
                break
            rate = torch.where(short, rate / 2, rate)
        weights, (value, slope, bend) = tried, new
    raise ValueError(
        f"a linear classifier did not converge in {NEWTON_STEPS} steps; normalise the features to length 1"
    )


def _solve(matrix: Callable[[Tensor], Tensor], right: Tensor, tolerance: Tensor) -> Tensor:
    """Conjugate gradients: x with ||matrix(x) - right|| <= tolerance [problems]; those that are done wait.

    A direction without curvature is rounding: the same added to the bias of all classes changes no probability. A
    problem of which nothing else is left is done.
    """
    solution, left = torch.zeros_like(right), right
    along, size = left, left.square().sum((1, 2))
    for _ in range(INNER_STEPS):
        open_ = size.sqrt() > tolerance
        if not bool(open_.any()):
            break
        moved = matrix(along)
        curved = (along * moved).sum((1, 2))
        bent = curved > FLAT * along.square().sum((1, 2))
        tolerance = torch.where(open_ & ~bent, torch.inf, tolerance)
        length = torch.where(open_ & bent, size / curved.clamp(min=1e-300), 0.0)[:, None, None]
        solution, left = solution + length * along, left - length * moved
        new = left.square().sum((1, 2))
        along = left + (new / size.clamp(min=1e-300))[:, None, None] * along
        size = new
    return solution


def _norm(values: Tensor) -> Tensor:
    return values.square().sum((1, 2)).sqrt()
