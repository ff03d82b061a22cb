"""Quality and hardness of images generated from one class for another (GeNIe, arXiv 2312.02548)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from vitrail.measure.classification import wilson_interval
from vitrail.measure.linear_classifiers import linear_svm

BINS = 20

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Consistency:
    """Share of generated images that an oracle classifier assigns to their intended class."""

    share: float
    interval: tuple[float, float]  # Wilson's, 95 %
    images: int

    def to_json(self) -> dict[str, Any]:
        return {"share": self.share, "interval": list(self.interval), "images": self.images}


def label_consistency(logits: Tensor, target: Tensor, among: Tensor | None = None) -> Consistency:
    """Whether an oracle's `logits` [images, classes] are highest for the `target` [images]; of equals the first.

    `among` [images, some] are the classes that can be chosen for each image, the target among them, as the classes of
    an episode (none: all). Only generated images belong here: real ones are right anyway and hide the others.
    """
    if not len(logits):
        raise ValueError("there are no images whose labels could be checked")
    if among is None:
        right = logits.argmax(1) == target
    else:
        if not bool((among == target[:, None]).any(1).all()):
            raise ValueError("an image's own class is not among those that can be chosen for it")
        best = logits.gather(1, among).argmax(1, keepdim=True)
        right = among.gather(1, best)[:, 0] == target
    count = int(right.sum())
    return Consistency(count / len(right), wilson_interval(count, len(right)), len(right))


@dataclass(frozen=True, eq=False)
class Hardness:
    """Mean probability of the source and of the target class, over the generated images of each episode."""

    source: Floats  # [episodes]
    target: Floats  # [episodes]

    @property
    def overlap(self) -> float:
        """Of the two histograms."""
        return histogram_overlap(self.source, self.target)

    def to_json(self) -> dict[str, Any]:
        sides = {"source": self.source, "target": self.target}
        means = {name: float(side.mean()) for name, side in sides.items()}
        histograms = {f"{name}_histogram": _histogram(side, BINS).tolist() for name, side in sides.items()}
        return {"overlap": self.overlap, **means, "edges": np.linspace(0, 1, BINS + 1).tolist(), **histograms}


def hardness(support: Tensor, generated: Tensor, source: Tensor, target: Tensor, *, normalise: bool = True) -> Hardness:
    """Probabilities of generated images under an SVM fitted to real labelled images alone (softmax of its decisions).

    `support` [episodes, way, shot, width]; `generated` [episodes, images, width] from class `source` for class `target`
    [episodes, images], counted within the episode.
    """
    way, shot = support.shape[1:3]
    known, images = support.flatten(1, 2).double(), generated.double()
    if normalise:
        known, images = F.normalize(known, dim=-1), F.normalize(images, dim=-1)
    label = torch.arange(way, device=support.device).repeat_interleave(shot).expand(len(support), -1)
    probability = linear_svm(known, label, way).scores(images).softmax(-1)
    parts = (probability.gather(2, which[..., None])[..., 0].mean(1).cpu().numpy() for which in (source, target))
    return Hardness(*parts)


def histogram_overlap(first: Floats, second: Floats, bins: int = BINS) -> float:
    """Common area of the histograms of two sets of probabilities: 1 for the same, 0 for no bin in common."""
    return float(np.minimum(_histogram(first, bins), _histogram(second, bins)).sum())


def axis_position(moved: Tensor, source: Tensor, target: Tensor, *, printed: bool = False) -> Tensor:
    """Position of an embedding between source and target: 0 at the source, their distance at the target.

    `moved` [..., width] -> [...]: (moved - source) . (target - source) / ||target - source||. `printed` divides by
    ||moved - source|| instead, as GeNIe's algorithm box has it in error; `moved` equal to `source` is then at 0.
    """
    gone, axis = moved - source, target - source
    length = (gone if printed else axis).norm(dim=-1).expand(gone.shape[:-1])
    along = (gone * axis).sum(-1)
    if bool((axis.norm(dim=-1) == 0).any()):
        raise ValueError("source and target have the same embedding, so no axis leads from one to the other")
    return torch.where(length > 0, along / length.clamp(min=torch.finfo(length.dtype).tiny), torch.zeros_like(along))


def largest_jump(positions: Tensor) -> Tensor:
    """Which of the candidates [..., candidates], by rising noise, comes just after the largest jump; never the first.

    >>> largest_jump(torch.tensor([0.0, 0.1, 0.9, 1.0])).item()
    2
    """
    if positions.shape[-1] < 2:
        raise ValueError(f"a jump needs two candidates at least, not {positions.shape[-1]}")
    return positions.diff(dim=-1).abs().argmax(-1) + 1


def _histogram(values: Floats, bins: int) -> Floats:
    """Share of values in each of equally wide bins from 0 to 1."""
    if not len(values):
        raise ValueError("a histogram of no values is empty")
    return np.histogram(np.clip(values, 0, 1), bins, (0.0, 1.0))[0] / len(values)
