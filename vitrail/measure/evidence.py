"""Evidence of the chosen images by every kind of map that a model has, and how good those maps are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.measure.evaluate import evaluation_mode
from vitrail.measure.map_quality import CONTROLS, STEPS, judged_maps
from vitrail.measure.saliency import Voice, all_kinds, explain, kinds_of, voices
from vitrail.model.classifier import Classifier
from vitrail.model.cost import cost

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
