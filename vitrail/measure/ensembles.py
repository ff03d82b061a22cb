"""Ensembles: of the classifiers of one head (Gramian heads, arXiv 2310.16483; ONE, arXiv 1806.04606), and of models.

Functions of stack [images, classifiers, classes] (logits) and target [images] are pure, in float64 on the CPU; of equal
scores the lower class number comes first. Of several models (Li et al. 2024, arXiv 2411.09702) probabilities are
averaged, not logits, with equal weights. Two models of one recipe that differ in their seed gain too, so the gain of
two different models means little without that control.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Literal, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.measure.classification import Figures, SingleLabelFigures, classification
from vitrail.measure.evaluator import Findings, Loaders, Model, Predictions, Where, batches, evaluator
from vitrail.model.classifier import Classifier

MOST_FOR_ALL_SUBSETS = 12  # 4,095 subsets


@dataclass(frozen=True)
class Diversity:
    """Strength and correlation of an ensemble (Breiman 2001, section 2). Undefined metrics are NaN."""

    strength: float
    """Mean margin of the ensemble: share (or probability) of the true class minus that of the best other."""
    correlation: float
    """Variance of the ensemble's margin over the squared mean deviation of its members' margins; a member counts as
    its own partner too, as the bound needs."""
    between: float
    """Mean Pearson correlation of the margins of two different members."""

    @property
    def ratio(self) -> float:
        """correlation / strength^2, Breiman's c/s2: lower is better."""
        return self.correlation / self.strength**2 if self.strength > 0 else math.nan

    @property
    def bound(self) -> float:
        """correlation (1 - strength^2) / strength^2, above the error of the vote where strength is positive."""
        return self.ratio * (1 - self.strength**2)


def diversity(stack: Tensor, target: Tensor, votes: Literal["hard", "soft"] = "hard") -> Diversity:
    """Strength and correlation of the classifiers of `stack`, from their votes or their probabilities (`soft`)."""
    each = margins(stack, target, votes)
    deviation = each.std(0, correction=0)
    spread = float(deviation.mean()) ** 2
    variance = float(each.mean(1).var(correction=0))
    return Diversity(
        strength=float(each.mean()),
        correlation=variance / spread if spread > 0 else math.nan,
        between=_mean_off_diagonal(_correlations(each)),
    )


def margins(stack: Tensor, target: Tensor, votes: Literal["hard", "soft"] = "hard") -> Tensor:
    """Margins `[images, classifiers]`: of the true class over the other class that all together rank highest."""
    stack, target = _checked(stack, target)
    if votes not in ("hard", "soft"):
        raise ValueError(f"votes must be hard or soft, not {votes!r}")
    classes = stack.shape[-1]
    given = F.one_hot(stack.argmax(-1), classes).double() if votes == "hard" else stack.softmax(-1)
    together = given.mean(1).scatter(1, target[:, None], -math.inf)
    true = target[:, None, None].expand(-1, stack.shape[1], 1)
    rival = together.argmax(1)[:, None, None].expand(-1, stack.shape[1], 1)
    return (given.gather(2, true) - given.gather(2, rival)).squeeze(2)


def head_accuracy(stack: Tensor, target: Tensor) -> Tensor:
    """Top-1 accuracy of each classifier alone, `[classifiers]`."""
    stack, target = _checked(stack, target)
    return (stack.argmax(-1) == target[:, None]).double().mean(0)


def fused_accuracy(stack: Tensor, target: Tensor, heads: Sequence[int] | None = None) -> float:
    """Top-1 accuracy of the summed logits of `heads` (none: all)."""
    stack, target = _checked(stack, target)
    if heads is not None and (not heads or not all(0 <= k < stack.shape[1] for k in heads)):
        raise ValueError(f"heads must be numbers from 0 to {stack.shape[1] - 1}, at least one, not {list(heads)}")
    chosen = stack if heads is None else stack[:, list(heads)]
    return float((chosen.sum(1).argmax(-1) == target).double().mean())


def subset_accuracy(stack: Tensor, target: Tensor, sizes: Iterable[int] | None = None) -> dict[tuple[int, ...], float]:
    """Top-1 accuracy of the summed logits of every subset (of these sizes), smallest subsets first."""
    stack, target = _checked(stack, target)
    count = stack.shape[1]
    wanted = range(1, count + 1) if sizes is None else sorted(set(sizes))
    if sizes is None and count > MOST_FOR_ALL_SUBSETS:
        raise ValueError(f"{count} classifiers have {2**count - 1:,} subsets; say which sizes are wanted")
    if not all(1 <= size <= count for size in wanted):
        raise ValueError(f"subsets of {count} classifiers have sizes 1 to {count}, not {list(wanted)}")
    subsets = [subset for size in wanted for subset in combinations(range(count), size)]
    return {subset: fused_accuracy(stack, target, subset) for subset in subsets}


def best_subsets(stack: Tensor, target: Tensor) -> dict[int, tuple[int, ...]]:
    """The most accurate subset of each size; the first in order where several are. Choose on validation images."""
    best: dict[int, tuple[int, ...]] = {}
    accuracy = subset_accuracy(stack, target)
    for subset, value in accuracy.items():
        if len(subset) not in best or value > accuracy[best[len(subset)]]:
            best[len(subset)] = subset
    return best


def agreement(stack: Tensor) -> Tensor:
    """Share of images on which two classifiers name the same class, `[classifiers, classifiers]`."""
    said = _checked(stack)[0].argmax(-1)
    return (said[:, :, None] == said[:, None, :]).double().mean(0)


def _correlations(values: Tensor) -> Tensor:
    """Pearson correlations of columns, NaN where a column is constant."""
    centred = values - values.mean(0)
    covariance = centred.T @ centred
    deviation = covariance.diagonal().sqrt()
    return covariance / deviation.outer(deviation)


def _mean_off_diagonal(matrix: Tensor) -> float:
    other = ~torch.eye(len(matrix), dtype=torch.bool)
    return float(matrix[other].mean())  # NaN for a single classifier


def _checked(stack: Tensor, target: Tensor | None = None) -> tuple[Tensor, Tensor]:
    stack = stack.detach().double().cpu()
    if stack.ndim != 3 or 0 in stack.shape or stack.shape[-1] < 2:
        raise ValueError(
            f"the stack has shape {list(stack.shape)}: [images, classifiers, two classes or more] is needed"
        )
    if target is None:
        return stack, stack.new_zeros(len(stack), dtype=torch.long)
    target = target.detach().cpu()
    if target.ndim != 1 or len(target) != len(stack) or target.is_floating_point():
        raise ValueError(
            f"labels of shape {list(target.shape)} do not fit {len(stack)} images: class numbers are needed"
        )
    if int(target.min()) < 0 or int(target.max()) >= stack.shape[-1]:
        raise ValueError(f"labels must lie between 0 and {stack.shape[-1] - 1}")
    return stack, target.long()


@evaluator()
def evaluate_members(model: Model, data: Loaders, **where: Unpack[Where]) -> Findings:
    """Accuracy of each classifier and of their sum, strength and correlation (Breiman).

    A head with one classifier has a strength and no correlation; one that was trained with an auxiliary classifier also
    reports that one alone, all heads removed. Raises `ValueError` where several labels may hold.
    """
    if not isinstance(model, Classifier) or model.multilabel:
        raise ValueError("members: strength and correlation are of classifiers that name one class per image")
    stacks, targets = [], []
    for batch, images in batches(model, data.loaders[data.split], **where):
        stacks.append(model.stack(images).float().cpu())
        targets.append(batch.label.cpu())
    stack, target = torch.cat(stacks), torch.cat(targets)
    removed = {}
    if getattr(model.head, "auxiliary", None) is not None:  # it stands last and has no part in the sum
        removed["without_heads_top1"] = float(head_accuracy(stack, target)[-1])
        stack = stack[:, :-1]
    each, found = head_accuracy(stack, target), diversity(stack, target, votes="soft")
    numbers = {
        "members_top1": float(each.mean()),
        "members_together": fused_accuracy(stack, target),
        **removed,
        "strength": found.strength,
        "correlation": found.correlation if stack.shape[1] > 1 else float("nan"),
        "correlation_over_strength2": found.ratio if stack.shape[1] > 1 else float("nan"),
    }
    table = {"members": {str(i): float(v) for i, v in enumerate(each)}}
    known = {name: value for name, value in numbers.items() if value == value}  # noqa: PLR0124, NaN is no figure
    return {"numbers": known, "tables": {"members": table}, "pictures": {}}


def averaged(members: Sequence[Predictions]) -> Predictions:
    """What the mean of the members' probabilities says, as logits (float64); images may come in any order.

    Raises `ValueError` where members are not of the same images, labels and classes.
    """
    if not members:
        raise ValueError("an ensemble needs at least one model")
    orders = [made.index.argsort(stable=True) for made in members]
    first, total = members[0], None
    for made, order in zip(members, orders, strict=True):
        same = len(made) == len(first) and made.logits.shape == first.logits.shape
        if not same or not made.index[order].equal(first.index[orders[0]]):
            raise ValueError("the models of an ensemble must be evaluated on the same images with the same classes")
        if not made.target[order].equal(first.target[orders[0]]):
            raise ValueError("the models of an ensemble count their classes differently: labels of an image differ")
        logits = made.logits[order].double()
        shares = logits.sigmoid() if made.multilabel else logits.softmax(1)
        total = shares if total is None else total + shares
    assert total is not None
    mean = total / len(members)
    said = mean.logit() if first.multilabel else mean.log()
    lowest = math.log(torch.finfo(torch.float64).tiny)  # a probability of zero is no logit
    return Predictions(first.index[orders[0]], first.target[orders[0]], said.clamp(lowest, -lowest))


@dataclass(frozen=True)
class Together:
    """An ensemble beside its members."""

    members: dict[str, Figures]
    ensemble: Figures

    @property
    def key(self) -> str:
        """The figure that counts."""
        return "top1" if isinstance(self.ensemble, SingleLabelFigures) else "map"

    @property
    def best(self) -> float:
        """The best member alone."""
        return max(made.scalars()[self.key] for made in self.members.values())

    @property
    def gain(self) -> float:
        """Of the ensemble over its best member."""
        return self.ensemble.scalars()[self.key] - self.best

    @property
    def gain_over_mean(self) -> float:
        """Of the ensemble over its members' mean."""
        each = [made.scalars()[self.key] for made in self.members.values()]
        return self.ensemble.scalars()[self.key] - sum(each) / len(each)

    def to_json(self) -> dict[str, Any]:
        return {
            "members": {name: made.scalars() for name, made in self.members.items()},
            "ensemble": self.ensemble.scalars(),
            "gain": self.gain,
            "gain_over_mean": self.gain_over_mean,
        }


def together(members: Mapping[str, Predictions], classes: Sequence[str] | None = None) -> Together:
    """Figures of every named member and of their mean probabilities."""
    each = {name: classification(made.logits, made.target, classes) for name, made in members.items()}
    mean = averaged(list(members.values()))
    return Together(each, classification(mean.logits, mean.target, classes))
