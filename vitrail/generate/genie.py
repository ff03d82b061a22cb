"""GeNIe and GeNIe-Ada: hard negatives by diffusion, and the choice of the noise level per image (Abbasi Koohpayegani et
al., 2023, arXiv 2312.02548).

An image of one class is noised part of the way and denoised under another: it keeps its surroundings and shows the
other class, whose label it gets. Somewhere along r the class switches; GeNIe-Ada looks for the place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.generate.diffuser import Diffuser
from vitrail.measure.hard_negatives import axis_position, largest_jump

USUAL_R = 0.8
CANDIDATES = (0.5, 0.6, 0.7, 0.8, 0.9)
Embed = Callable[[Tensor], Tensor]  # images [batch, 3, height, width] -> [batch, features]
Formula = Literal["text", "box"]


def genie(diffuser: Diffuser, images: Tensor, target: Tensor, seeds: Tensor, *, r: float = USUAL_R) -> Tensor:
    """Images of other classes changed to show `target`."""
    return diffuser(images, target, r, seeds)


@dataclass(frozen=True)
class Chosen:
    """What GeNIe-Ada made, and why."""

    images: Tensor  # [batch, 3, height, width], the candidates that were chosen
    r: Tensor  # [batch] their noise
    place: Tensor  # [batch] their place among the candidates
    curve: Tensor  # [batch, candidates] how far along the way from source to target each candidate lies
    candidates: Tensor  # [candidates, batch, 3, height, width]


def genie_ada(
    diffuser: Diffuser,
    images: Tensor,
    target: Tensor,
    seeds: Tensor,
    *,
    embed: Embed,
    prototypes: Tensor,
    candidates: Sequence[float] = CANDIDATES,
    formula: Formula = "text",
    unit: bool = True,
) -> Chosen:
    """Every candidate r for every image, once, with the same noise; the one just after the largest jump is kept.

    `prototypes` [classes, features] says where each class lies (see `prototypes_of`). `unit` brings embeddings to unit
    length first, as the authors' code does. Raises `ValueError` unless there are two candidates or more, in order.
    """
    levels = list(candidates)
    if len(levels) < 2 or levels != sorted(set(levels)):
        raise ValueError(f"candidates must be at least two, from small to large, not {', '.join(map(str, levels))}")

    def seen(pictures: Tensor) -> Tensor:
        found = embed(pictures).float()
        return F.normalize(found, dim=-1) if unit else found

    target = torch.as_tensor(target).to(torch.int64)
    made = torch.stack([diffuser(images, target, r, seeds) for r in levels])
    source = seen(images)
    edited = torch.stack([seen(one) for one in made], 1)  # [batch, candidates, features]
    aim = prototypes.to(source)[target.to(source.device)]
    curve = axis_position(edited, source[:, None], aim[:, None], printed=formula == "box")
    place = largest_jump(curve).to(images.device)
    return Chosen(
        made[place.to(made.device), torch.arange(len(images), device=made.device)],
        torch.tensor(levels, device=place.device)[place],
        place,
        curve,
        made,
    )


def prototypes_of(embed: Embed, images: Tensor, labels: Tensor, classes: int, *, unit: bool = True) -> Tensor:
    """The mean embedding of each class's images, [classes, features]; raises `ValueError` for a class without any."""
    found = embed(images).float()
    found = F.normalize(found, dim=-1) if unit else found
    labels = labels.to(found.device)
    counts = torch.bincount(labels, minlength=classes)
    if int((counts == 0).sum()):
        empty = (counts == 0).nonzero()[:, 0].tolist()
        raise ValueError(f"classes {', '.join(map(str, empty[:5]))} have no image to make a prototype of")
    return found.new_zeros(classes, found.shape[1]).index_add(0, labels, found) / counts[:, None]


def ada_evaluations(diffuser: Diffuser, candidates: Sequence[float] = CANDIDATES) -> int:
    """What an image of GeNIe-Ada costs in rows that the network sees: the sum of its candidates."""
    return sum(diffuser.evaluations(r) for r in candidates)
