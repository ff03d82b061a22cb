"""Sections on saliency maps: the evidence for a class by every kind of map, and the quality of those maps.

    pointing     share of images whose strongest patch has its middle in the object's box (Zhang et al. 2016)
    inside       share of the map that lies in the box
    deletion     area under the probability of the class while patches are taken away, strongest first: low is good
    insertion    area while they are put back into a blurred image, strongest first: high is good (Petsiuk et al. 2018)

Two controls that know nothing of the model stand beside every map: `random`, and `centre`, which only knows that
photographers aim. A map that is no better than those has not explained anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from vitrail.inspect.section import Card, InspectedModel, PagePart, Section
from vitrail.measure.evaluator import ResultTable, evaluation_mode
from vitrail.measure.saliency import HeadBranch, all_kinds, explain, head_branches, kinds_of
from vitrail.model.classifier import Classifier
from vitrail.model.cost import cost
from vitrail.quantities import percent, shorten
from vitrail.report.sheets import Cell, Pixels, Sheet, image_rows, overlay

CONTROLS = ("random", "centre")
STEPS = 16
LIKELIEST = 3
BATCH = 8
MACS = {"cuda": 4e15, "cpu": 4e12}  # of an evaluation on an unstated number of images: a minute or so
BRANCHES = (
    "Grad-CAM of the predicted class, through one branch of the head at a time; below, the prediction of that branch "
    "alone. The class token tends to read the whole scene, the patch tokens its telling parts."
)
QUALITY = {
    "pointing": "Pointing: the strongest patch is in the object's box.",
    "inside": "Inside: share of the map in the box.",
    "deletion": "Deletion: mean probability of the class while patches are removed, strongest first; low is good.",
    "insertion": "Insertion: while they are put back into a blurred image; high is good.",
    "map": "“random” and “centre” know nothing of the model: a map no better than they are explains nothing.",
}


@dataclass(frozen=True)
class Evidence:
    """Saliency maps of one model and their quality."""

    maps: dict[str, Tensor]  # kind -> [pictures, rows, columns], for the predicted class
    kind: str  # of the maps by class
    likeliest: Tensor  # [pictures, classes], their numbers, the most likely first
    by_class: Tensor  # [pictures, classes, rows, columns]
    quality: tuple[dict[str, Any], ...]  # one row per kind, controls last; none where nothing was evaluated
    notes: tuple[str, ...]
    branches: tuple[HeadBranch, ...] = ()  # class token, patch tokens and both, of a head that adds the two

    @property
    def best(self) -> dict[str, Any] | None:
        """The kind of map with the lowest deletion."""
        rows = [row for row in self.quality if row["kind"] not in CONTROLS]
        return min(rows, key=lambda row: float(row["deletion"]), default=None)

    def to_json(self) -> dict[str, Any]:
        return {"kinds": list(self.maps), "quality": list(self.quality), "notes": list(self.notes)}


class EvidenceSection(Section):
    """Saliency maps of the pictures, evaluated on some more images."""

    names: ClassVar = {"evidence": "maps of evidence for the class", "judged": "how good those maps are"}

    def finish(self) -> None:
        inspection = self.inspection
        judge = inspection.judge if "judged" in inspection.what else 0
        for subject in inspection.subjects:
            if not subject.model.unlabelled:
                pictures = inspection.count if "evidence" in inspection.what else 0
                subject.evidence = collect_evidence(
                    subject.model, subject.pixels, subject.boxes, pictures, inspection.device, judge
                )

    def parts(self) -> Iterator[PagePart]:
        inspection = self.inspection
        sheets: list[Sheet] = []
        for i, subject in enumerate(inspection.subjects):
            if subject.evidence is not None and subject.evidence.maps:
                sheets += evidence_sheets(subject, subject.evidence, inspection.captions, i)
        if sheets:
            cards = [Card(s.title, [s, BRANCHES] if s.name.startswith("voices") else [s]) for s in sheets]
            lead = "Where the evidence for a class is, by every map that the model has. Attention and rollout do not "
            lead += "know the class; Grad-CAM and gradient attention do."
            yield PagePart("evidence", "Saliency maps", lead, cards)
        if tables := list(self._quality()):
            present = {name for table in tables for name in table.columns}
            lead = " ".join(words for name, words in QUALITY.items() if name in present)
            yield PagePart("judged", "Quality of the saliency maps", lead, [Card(t.title, [t]) for t in tables], "pair")

    def verdict(self) -> Iterator[str]:
        for subject in self.inspection.subjects:
            if subject.evidence is not None and (best := subject.evidence.best):
                control = min(row["deletion"] for row in subject.evidence.quality if row["kind"] in CONTROLS)
                better = "is its best explanation" if best["deletion"] < control else "is no better than a control"
                yield (
                    f"{self.inspection.of(subject)}The {map_name(best['kind'])} map {better}: while its strongest "
                    f"patches are removed, the predicted class keeps {percent(best['deletion'])} probability on "
                    f"average ({percent(control)} with a map that ignores the model)."
                )

    def _quality(self) -> Iterator[ResultTable]:
        for subject in self.inspection.subjects:
            if subject.evidence is not None and subject.evidence.quality:
                rows = subject.evidence.quality
                names = [name for name in QUALITY if name in rows[0]]
                cells = [(map_name(row["kind"]), *(percent(row[name]) for name in names)) for row in rows]
                yield ResultTable(subject.name, ("map", *names), cells)

    def tables(self) -> Iterator[ResultTable | str]:
        evaluated = [s.evidence for s in self.inspection.subjects if s.evidence is not None and s.evidence.quality]
        for evidence, table in zip(evaluated, self._quality(), strict=True):
            images = f"{evidence.quality[0]['images']} images"
            title = f"{shorten(table.title, 30)}: quality of its maps, {images} (deletion: low is good)"
            yield table._replace(title=title)


def map_name(kind: str) -> str:
    """A kind of map as a person writes it."""
    return {"grad_cam": "Grad-CAM", "sima": "SimA"}.get(kind, kind.replace("_", " "))


def evidence_sheets(
    subject: InspectedModel, evidence: Evidence, captions: Sequence[str], number: int = 0
) -> Iterator[Sheet]:
    """Every kind of map for the predicted class; maps of the likeliest classes; maps by branch of the head."""
    maps, name = subject.attention, subject.name

    def by_kind(image: int, pixels: Pixels) -> list[Cell]:
        return [Cell(overlay(pixels, each[image])) for each in evidence.maps.values()]

    def by_class(image: int, pixels: Pixels) -> list[Cell]:
        cells = []
        for values, kind in zip(evidence.by_class[image], evidence.likeliest[image].tolist(), strict=True):
            words = f"{shorten(maps.classes[kind], 14)} {percent(float(maps.probabilities[image, kind]), 0)}"
            cells.append(Cell(overlay(pixels, values), words))
        return cells

    def by_branch(image: int, pixels: Pixels) -> list[Cell]:
        cells = []
        for branch in evidence.branches:
            share, kind = (float(v) for v in branch.probabilities[image].max(0))
            label = maps.classes[int(kind)]
            mark = ("✓ " if label == captions[image] else "✗ ") if captions[image] in maps.classes else ""
            cells.append(Cell(overlay(pixels, branch.maps[image]), f"{mark}{shorten(label, 12)} {percent(share, 0)}"))
        return cells

    rows = image_rows(subject.pixels, captions, by_kind, lambda image: f"predicted {maps.prediction(image)}")
    columns = ["image", *map(map_name, evidence.maps)]
    yield Sheet(f"evidence-{number}", f"Evidence for the predicted class, {name}", columns, rows)
    if evidence.by_class.numel():
        columns = ["image", *("likeliest", "second", "third")[: evidence.likeliest.shape[1]]]
        title = f"Evidence for the likeliest classes, {map_name(evidence.kind)}, {name}"
        yield Sheet(f"classes-{number}", title, columns, image_rows(subject.pixels, captions, by_class))
    if evidence.branches:
        columns = ["image", *(branch.name for branch in evidence.branches)]
        title = f"Class token, patch tokens and both, {name}"
        yield Sheet(f"voices-{number}", title, columns, image_rows(subject.pixels, captions, by_branch))


def collect_evidence(
    model: Classifier,
    pixels: Sequence[Pixels],
    boxes: Sequence[NDArray[np.float32] | None],
    pictures: int,
    device: torch.device,
    judge: int | None = None,
) -> Evidence | None:
    """Maps of the first `pictures` of `pixels` ([side, side, 3] each, as the model takes them), evaluated on `judge`.

    `judge` none: as many as take about a minute. `boxes` (left, top, right, bottom in sides) say where objects are,
    where that is known. None for a model without any map (adaptive ones, which show what they keep).
    """
    kinds = all_kinds(model)
    if not kinds:
        return None
    maps: dict[str, list[Tensor]] = {kind: [] for kind in kinds}
    by_class: list[Tensor] = []
    likeliest: list[Tensor] = []
    branches: list[list[HeadBranch]] = []
    class_kind = "head" if getattr(model.head, "per_class", False) else "grad_cam"
    for images, _ in _batches(pixels[:pictures], boxes, device):
        with evaluation_mode(model), torch.no_grad():
            top = model(images).topk(min(LIKELIEST, len(model.classes)), dim=1).indices
        for kind in kinds:
            maps[kind].append(explain(model, images, kind, top[:, 0]).cpu())
        if class_kind in kinds:
            each = [explain(model, images, class_kind, top[:, i]).cpu() for i in range(top.shape[1])]
            by_class.append(torch.stack(each, 1))
        likeliest.append(top.cpu())
        branches.append(head_branches(model, images, top[:, 0]))
    notes = [f"no {kind}: {why}" for kind, why in kinds_of(model).items() if why and kind in ("rollout", "grad_cam")]
    joined = {kind: torch.cat(parts) for kind, parts in maps.items() if parts}
    empty = [kind for kind, values in joined.items() if not values.any()]
    if empty:
        notes.append(f"{', '.join(empty)}: empty, as no patch changes the predicted class (a new classifier of zeros?)")
    count = min(len(pixels), _affordable(model, len(kinds), device) if judge is None else judge)
    if not count and judge is None:
        notes.append("maps were not evaluated: it would take long here; say on how many images with --judge")
    return Evidence(
        maps=joined,
        kind=class_kind,
        likeliest=torch.cat(likeliest) if likeliest else torch.zeros(0),
        by_class=torch.cat(by_class) if by_class else torch.zeros(0),
        quality=tuple(map_quality(model, _batches(pixels[:count], boxes[:count], device)) if count else ()),
        notes=tuple(notes),
        branches=tuple(_joined(parts) for parts in zip(*branches, strict=True)),
    )


def _joined(parts: Sequence[HeadBranch]) -> HeadBranch:
    """One branch over all batches."""
    maps, shares = (torch.cat([getattr(p, name).cpu() for p in parts]) for name in ("maps", "probabilities"))
    return HeadBranch(parts[0].name, maps, shares)


def _affordable(model: Classifier, kinds: int, device: torch.device) -> int:
    """Images whose maps are evaluated in about a minute."""
    passes = 2 * (STEPS + 1) * (kinds + len(CONTROLS))
    each = passes * max(1, cost(model, model.preprocess.size).macs)
    return int(MACS.get(device.type, MACS["cuda"]) // each)


def _batches(
    pixels: Sequence[Pixels], boxes: Sequence[NDArray[np.float32] | None], device: torch.device
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Images as the model takes them, and boxes where all of them have one."""
    for start in range(0, len(pixels), BATCH):
        images = np.stack(pixels[start : start + BATCH])
        known = [box for box in boxes[start : start + len(images)] if box is not None]
        there = torch.from_numpy(np.stack(known)) if len(known) == len(images) else None
        yield torch.from_numpy(images).permute(0, 3, 1, 2).contiguous().to(device), there


def map_quality(
    model: Classifier, batches: Iterator[tuple[Tensor, Tensor | None]], *, steps: int = STEPS, seed: int = 0
) -> list[dict[str, Any]]:
    """Quality of every kind of map that a model has, and of the two controls, over all images of `batches`.

    A batch is images as the model takes them and boxes [batch, 4] in sides of the image, or none. Maps and curves are
    of the predicted class. Nothing is kept of a batch but its metrics.
    """
    kinds = [*all_kinds(model), *CONTROLS]
    metrics: dict[str, dict[str, list[Tensor]]] = {kind: {} for kind in kinds}
    generator = torch.Generator().manual_seed(seed)
    count = 0
    for images, boxes in batches:
        count += len(images)
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
            values = {} if boxes is None else {"pointing": pointing(maps, boxes), "inside": inside(maps, boxes)}
            for name, insert in (("deletion", False), ("insertion", True)):
                values[name] = area(curve(model, images, maps, classes, insert=insert, steps=steps))
            for name, each in values.items():
                metrics[kind].setdefault(name, []).append(each.float().cpu())
    if not count:
        raise ValueError("there is nothing to judge maps on: no image was given")
    return [
        {"kind": kind, "images": count, **{name: float(torch.cat(parts).mean()) for name, parts in of_kind.items()}}
        for kind, of_kind in metrics.items()
    ]


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
    sharp = model._images(images)
    ground = blurred(sharp) if insert else torch.zeros_like(sharp)
    batch, rows, columns = maps.shape
    # Ties fall in raster order, on every device.
    rank = maps.flatten(1).argsort(dim=1, descending=True, stable=True).argsort(dim=1).view(batch, 1, rows, columns)
    values = []
    with evaluation_mode(model):
        for step in range(steps + 1):
            chosen = (rank < round(step / steps * rows * columns)).to(sharp.dtype)
            chosen = F.interpolate(chosen, sharp.shape[-2:], mode="nearest")
            changed = sharp * chosen + ground * (1 - chosen) if insert else ground * chosen + sharp * (1 - chosen)
            probabilities = model.probabilities(model(changed).float())
            values.append(probabilities.gather(1, classes.to(probabilities.device)[:, None])[:, 0])
    return torch.stack(values, 1)


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
