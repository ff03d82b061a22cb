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

from vitrail.measure.classification import Figures, SingleLabelFigures
from vitrail.measure.evaluator import Findings, Loaders, Model, Predictions, Where, batches, evaluator, metrics_of
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
    return _diversity(margins(stack, target, votes))


def _diversity(each: Tensor) -> Diversity:
    spread = float(each.std(0, correction=0).mean()) ** 2
    variance = float(each.mean(1).var(correction=0))
    centred = each - each.mean(0)
    covariance = centred.T @ centred
    deviations = covariance.diagonal().sqrt()
    others = ~torch.eye(len(covariance), dtype=torch.bool)
    between = float((covariance / deviations.outer(deviations))[others].mean())  # NaN for a single classifier
    return Diversity(float(each.mean()), variance / spread if spread > 0 else math.nan, between)


def margins(stack: Tensor, target: Tensor, votes: Literal["hard", "soft"] = "hard") -> Tensor:
    """Margins `[images, classifiers]`: of the true class over the other class that all together rank highest."""
    stack, target = _checked(stack, target)
    if votes not in ("hard", "soft"):
        raise ValueError(f"votes must be hard or soft, not {votes!r}")
    classes = stack.shape[-1]
    shares = F.one_hot(stack.argmax(-1), classes).double() if votes == "hard" else stack.softmax(-1)
    rival = shares.mean(1).scatter(1, target[:, None], -math.inf).argmax(1)
    true, other = (shares.take_along_dim(chosen[:, None, None], 2)[..., 0] for chosen in (target, rival))
    return true - other


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


def agreement(stack: Tensor) -> Tensor:
    """Share of images on which two classifiers name the same class, `[classifiers, classifiers]`."""
    guess = _checked(stack)[0].argmax(-1)
    return (guess[:, :, None] == guess[:, None, :]).double().mean(0)


def _checked(stack: Tensor, target: Tensor | None = None) -> tuple[Tensor, Tensor]:
    stack = stack.detach().double().cpu()
    if stack.ndim != 3 or 0 in stack.shape or stack.shape[-1] < 2:
        shape = list(stack.shape)
        raise ValueError(f"the stack has shape {shape}: [images, classifiers, two classes or more] is needed")
    if target is None:
        return stack, stack.new_zeros(len(stack), dtype=torch.long)
    target = target.detach().cpu()
    if target.ndim != 1 or len(target) != len(stack) or target.is_floating_point():
        shape = list(target.shape)
        raise ValueError(f"labels of shape {shape} do not fit {len(stack)} images: class numbers are needed")
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
    loader = batches(model, data.loaders[data.split], **where)
    auxiliary, parts = getattr(model.head, "auxiliary", None) is not None, []
    for batch, images in loader:  # each is reduced at once: a stack of many classes is large
        stack, target = _checked(model.stack(images), batch.label)
        members = stack[:, :-1] if auxiliary else stack  # it stands last and has no part in the sum
        fused = members.sum(1).argmax(-1) == target
        parts.append((stack.argmax(-1) == target[:, None], fused, margins(members, target, votes="soft")))
    right, right_fused, margin = (torch.cat(column) for column in zip(*parts, strict=True))
    each, spread = right.double().mean(0), _diversity(margin)
    removed = {}
    if auxiliary:
        removed["without_heads_top1"], each = float(each[-1]), each[:-1]
    numbers = {"members_top1": float(each.mean()), "members_together": float(right_fused.double().mean()), **removed}
    numbers["strength"] = spread.strength
    if len(each) > 1:
        numbers |= {"correlation": spread.correlation, "correlation_over_strength2": spread.ratio}
    table = {"members": {str(i): float(v) for i, v in enumerate(each)}}
    known = {name: value for name, value in numbers.items() if not math.isnan(value)}
    return {"numbers": known, "tables": {"members": table}, "pictures": {}}


def averaged(members: Sequence[Predictions]) -> Predictions:
    """Logits (float64) of the mean of the members' probabilities; images may come in any order.

    Raises `ValueError` where members are not of the same images, labels and classes.
    """
    if not members:
        raise ValueError("an ensemble needs at least one model")
    first, order = members[0], members[0].index.argsort(stable=True)
    index, target, multilabel = first.index[order], first.target[order], first.multilabel
    total = torch.zeros_like(first.logits, dtype=torch.float64)
    for member in members:
        order = member.index.argsort(stable=True)
        if member.logits.shape != first.logits.shape or not member.index[order].equal(index):
            raise ValueError("the models of an ensemble must be evaluated on the same images with the same classes")
        if not member.target[order].equal(target):
            raise ValueError("the models of an ensemble count their classes differently: labels of an image differ")
        logits = member.logits[order].double()
        total += logits.sigmoid() if multilabel else logits.softmax(1)
    mean = total / len(members)
    lowest = math.log(torch.finfo(torch.float64).tiny)  # a probability of zero has no finite logit
    return Predictions(index, target, (mean.logit() if multilabel else mean.log()).clamp(lowest, -lowest))


@dataclass(frozen=True)
class Together:
    """An ensemble and its members."""

    members: dict[str, Figures]
    ensemble: Figures

    @property
    def key(self) -> str:
        """The main metric."""
        return "top1" if isinstance(self.ensemble, SingleLabelFigures) else "map"

    @property
    def best(self) -> float:
        """The best member alone."""
        return max(self._each())

    @property
    def gain(self) -> float:
        """Of the ensemble over its best member."""
        return self.ensemble.scalars()[self.key] - self.best

    @property
    def gain_over_mean(self) -> float:
        """Of the ensemble over its members' mean."""
        return self.ensemble.scalars()[self.key] - sum(self._each()) / len(self.members)

    def _each(self) -> list[float]:
        return [metrics.scalars()[self.key] for metrics in self.members.values()]

    def to_json(self) -> dict[str, Any]:
        members = {name: metrics.scalars() for name, metrics in self.members.items()}
        gains = {"gain": self.gain, "gain_over_mean": self.gain_over_mean}
        return {"members": members, "ensemble": self.ensemble.scalars(), **gains}


def together(members: Mapping[str, Predictions], classes: Sequence[str] | None = None) -> Together:
    """Metrics of every named member and of their mean probabilities."""
    each = {name: metrics_of(member, classes) for name, member in members.items()}
    return Together(each, metrics_of(averaged(list(members.values())), classes))
