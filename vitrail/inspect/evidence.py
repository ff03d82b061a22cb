"""How good a map of evidence is: does it point at the object, and does the model need what it marks?

    pointing     share of images whose strongest patch has its middle in the object's box (Zhang et al. 2016)
    inside       share of the map that lies in the box
    deletion     area under the probability of the class while patches are taken away, strongest first: low is good
    insertion    area while they are put back into a blurred image, strongest first: high is good (Petsiuk et al. 2018)

Two maps that know nothing of the model stand beside every other: `random`, and `centre`, which only knows that
photographers aim. A map that is no better than those has not explained anything.

Evidence of the chosen images by every kind of map that a model has, and how good those maps are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from vitrail.measure.evaluator import evaluation_mode
from vitrail.measure.saliency import Voice, all_kinds, explain, kinds_of, voices
from vitrail.model.classifier import Classifier
from vitrail.model.cost import cost

CONTROLS = ("random", "centre")
STEPS = 16


def pointing(maps: Tensor, boxes: Tensor) -> Tensor:
    """Whether the strongest patch of maps [batch, rows, columns] has its middle in boxes [batch, 4], in sides."""
    rows, columns = maps.shape[1:]
    best = maps.flatten(1).argmax(1)
    y, x = (best // columns + 0.5) / rows, (best % columns + 0.5) / columns
    left, top, right, bottom = boxes.to(maps.device).unbind(1)
    return (x >= left) & (x <= right) & (y >= top) & (y <= bottom)


def inside(maps: Tensor, boxes: Tensor) -> Tensor:
    """The share of each map in its box, patches on the border counted by their area in it: [batch]."""

    def overlap(count: int, low: Tensor, high: Tensor) -> Tensor:
        edges = torch.arange(count + 1, device=low.device) / count
        first, last = torch.maximum(edges[:-1], low[:, None]), torch.minimum(edges[1:], high[:, None])
        return (last - first).clamp(min=0) * count

    left, top, right, bottom = boxes.to(maps).unbind(1)
    share = overlap(maps.shape[1], top, bottom)[:, :, None] * overlap(maps.shape[2], left, right)[:, None]
    total = maps.sum((1, 2))
    return torch.where(total > 0, (maps * share).sum((1, 2)) / total.clamp_min(torch.finfo(maps.dtype).tiny), 0.0)


@torch.no_grad()
def curve(
    model: Classifier, images: Tensor, maps: Tensor, classes: Tensor, *, insert: bool, steps: int = STEPS
) -> Tensor:
    """Probability of an image's class with the strongest 0, 1/steps, ... 1 of its patches changed: [batch, steps + 1].

    `insert`: those patches alone are sharp in a blurred image; otherwise they are taken out, the mean colour of the
    training data in their place. `images` are as the model takes them.
    """
    ready = model._images(images)
    ground = blurred(ready) if insert else torch.zeros_like(ready)
    batch, rows, columns = maps.shape
    # Ties fall in raster order, on every device.
    rank = maps.flatten(1).argsort(dim=1, descending=True, stable=True).argsort(dim=1).view(batch, 1, rows, columns)
    found = []
    with evaluation_mode(model):
        for step in range(steps + 1):
            chosen = (rank < round(step / steps * rows * columns)).to(ready.dtype)
            chosen = F.interpolate(chosen, ready.shape[-2:], mode="nearest")
            seen = ready * chosen + ground * (1 - chosen) if insert else ground * chosen + ready * (1 - chosen)
            values = model.probabilities(model(seen).float())
            found.append(values.gather(1, classes.to(values.device)[:, None])[:, 0])
    return torch.stack(found, 1)


def area(curves: Tensor) -> Tensor:
    """Under curves [batch, steps + 1] over 0 to 1, by trapezoids: [batch].

    >>> area(torch.tensor([[1.0, 0.0]]))
    tensor([0.5000])
    """
    return torch.trapezoid(curves, dim=1) / (curves.shape[1] - 1)


def blurred(images: Tensor, share: float = 1 / 8) -> Tensor:
    """Gaussian blur with a standard deviation of `share` of the side; borders are reflected."""
    side = images.shape[-1]
    sigma = max(1.0, share * side)
    reach = min(side - 1, round(3 * sigma))
    offsets = torch.arange(-reach, reach + 1, device=images.device, dtype=images.dtype)
    weights = torch.exp(-(offsets**2) / (2 * sigma**2))
    weights = (weights / weights.sum()).expand(images.shape[1], 1, -1)
    wide = F.pad(images, (reach, reach, reach, reach), mode="reflect")
    wide = F.conv2d(wide, weights[:, :, None], groups=images.shape[1])
    return F.conv2d(wide, weights[..., None], groups=images.shape[1])


def centred(rows: int, columns: int) -> Tensor:
    """A map that is brightest in the middle, [rows, columns]."""
    y, x = ((torch.arange(n) + 0.5) / n - 0.5 for n in (rows, columns))
    return torch.exp(-4 * (y[:, None] ** 2 + x**2))


@dataclass
class Quality:
    """One kind of map over images."""

    kind: str
    values: dict[str, list[Tensor]] = field(default_factory=dict)

    def add(self, name: str, each: Tensor) -> None:
        self.values.setdefault(name, []).append(each.float().cpu())

    def means(self) -> dict[str, float]:
        return {name: float(torch.cat(parts).mean()) for name, parts in self.values.items()}


def judged_maps(
    model: Classifier,
    batches: Iterator[tuple[Tensor, Tensor | None]],
    *,
    steps: int = STEPS,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Every kind of map that a model has, and the two controls: figures over all images of `batches`.

    A batch is images as the model takes them and boxes [batch, 4] in sides of the image, or none. Maps and curves are
    of the class that the model says. Nothing is kept of a batch but its figures.
    """
    kinds = [*all_kinds(model), *CONTROLS]
    found = {kind: Quality(kind) for kind in kinds}
    generator = torch.Generator().manual_seed(seed)
    images_seen = 0
    for images, boxes in batches:
        images_seen += len(images)
        with evaluation_mode(model), torch.no_grad():
            out = model.outputs(images)
            classes = model.fused(out.stack).argmax(1)
        grid = out.tokens.grid
        for kind in kinds:
            if kind == "random":
                maps = torch.rand(len(images), *grid, generator=generator).to(images.device)
            elif kind == "centre":
                maps = centred(*grid).expand(len(images), -1, -1).to(images.device)
            else:
                maps = explain(model, images, kind, classes).to(images.device)
            one = found[kind]
            if boxes is not None:
                one.add("pointing", pointing(maps, boxes))
                one.add("inside", inside(maps, boxes))
            one.add("deletion", area(curve(model, images, maps, classes, insert=False, steps=steps)))
            one.add("insertion", area(curve(model, images, maps, classes, insert=True, steps=steps)))
    if not images_seen:
        raise ValueError("there is nothing to judge maps on: no image was given")
    return [{"kind": kind, "images": images_seen, **one.means()} for kind, one in found.items()]


LIKELIEST = 3
SOME = 8  # images at a time
JUDGED_MACS = {"cuda": 4e15, "cpu": 4e12}  # that judging may take where nobody says how many images: a minute or so


@dataclass(frozen=True)
class Evidence:
    """Maps of one model."""

    maps: dict[str, Tensor]  # kind -> [pictures, rows, columns], for the class that the model says
    kind: str  # of the maps by class
    likeliest: Tensor  # [pictures, classes], their numbers, the most likely first
    by_class: Tensor  # [pictures, classes, rows, columns]
    quality: tuple[dict[str, Any], ...]  # a row a kind, controls last; none where nothing was judged
    notes: tuple[str, ...]
    voices: tuple[Voice, ...] = ()  # class token, words and both, of a head that adds the two; all pictures

    def to_json(self) -> dict[str, Any]:
        return {"kinds": list(self.maps), "quality": list(self.quality), "notes": list(self.notes)}


def gather_evidence(
    model: Classifier,
    pixels: Sequence[NDArray[np.uint8]],
    boxes: Sequence[NDArray[np.float32] | None],
    pictures: int,
    device: torch.device,
    judge: int | None = None,
    show: bool = True,
) -> Evidence | None:
    """Maps of the first `pictures` of `pixels` ([side, side, 3] each, as the model takes them), judged on `judge`.

    `judge` none: as many as take about a minute. `boxes` (left, top, right, bottom in sides) say where objects are,
    where that is known. Without `show` maps are judged only. None for a model without any map (adaptive ones, which
    show what they keep).
    """
    kinds = all_kinds(model)
    if not kinds:
        return None
    found: dict[str, list[Tensor]] = {kind: [] for kind in kinds}
    by_class: list[Tensor] = []
    likeliest: list[Tensor] = []
    parts_of_head: list[list[Voice]] = []
    of_class = "head" if getattr(model.head, "per_class", False) else "grad_cam"
    for images in _batches(pixels[: pictures if show else 0], device):
        with evaluation_mode(model), torch.no_grad():
            top = model(images).topk(min(LIKELIEST, len(model.classes)), dim=1).indices
        for kind in kinds:
            found[kind].append(explain(model, images, kind, top[:, 0]).cpu())
        each = (
            [explain(model, images, of_class, top[:, i]).cpu() for i in range(top.shape[1])]
            if of_class in kinds
            else []
        )
        by_class += [torch.stack(each, 1)] if each else []
        likeliest.append(top.cpu())
        parts_of_head.append(voices(model, images, top[:, 0]))
    notes = [f"no {kind}: {why}" for kind, why in kinds_of(model).items() if why and kind in ("rollout", "grad_cam")]
    maps = {kind: torch.cat(parts) for kind, parts in found.items() if parts}
    empty = [kind for kind, values in maps.items() if not values.any()]
    if empty:
        notes.append(
            f"{', '.join(empty)}: empty, as no patch changes the class that it says (a new classifier of zeros?)"
        )
    count = _how_many(model, len(kinds), device, len(pixels)) if judge is None else min(judge, len(pixels))
    quality: list[dict[str, Any]] = []
    if count:
        several = zip(_batches(pixels[:count], device), _box_batches(boxes[:count]), strict=True)
        quality = judged_maps(model, several)
    elif judge is None:
        notes.append("maps were not judged: it would take long here; say on how many images with --judge")
    return Evidence(
        maps=maps,
        kind=of_class,
        likeliest=torch.cat(likeliest) if likeliest else torch.zeros(0),
        by_class=torch.cat(by_class) if by_class else torch.zeros(0),
        quality=tuple(quality),
        notes=tuple(notes),
        voices=tuple(_joined(some) for some in zip(*parts_of_head, strict=True)),
    )


def _joined(parts: Sequence[Voice]) -> Voice:
    """One voice over all batches."""
    maps, shares = (torch.cat([getattr(p, name).cpu() for p in parts]) for name in ("maps", "probabilities"))
    return Voice(parts[0].name, maps, shares)


def _how_many(model: Classifier, kinds: int, device: torch.device, most: int) -> int:
    passes = 2 * (STEPS + 1) * (kinds + len(CONTROLS))
    each = passes * max(1, cost(model, model.preprocess.size).macs)
    return int(min(most, JUDGED_MACS.get(device.type, JUDGED_MACS["cuda"]) // each))


def _batches(pixels: Sequence[NDArray[np.uint8]], device: torch.device) -> Iterator[Tensor]:
    for start in range(0, len(pixels), SOME):
        some = np.stack(pixels[start : start + SOME])
        yield torch.from_numpy(some).permute(0, 3, 1, 2).contiguous().to(device)


def _box_batches(boxes: Sequence[NDArray[np.float32] | None]) -> Iterator[Tensor | None]:
    for start in range(0, len(boxes), SOME):
        some = [box for box in boxes[start : start + SOME] if box is not None]
        yield torch.from_numpy(np.stack(some)) if len(some) == len(boxes[start : start + SOME]) else None
