"""Published accuracy of checkpoints, next to what is measured: ImageNet, ReaL (arXiv 2006.07159), ImageNet-V2.

`published.json` has percentages by timm's name of a checkpoint: `top1` as timm measured it at the image size and crop
that come with the weights, `real` and `v2` as the papers print them (matched-frequency images of ImageNet-V2).
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from vitrail.data.dataset import DataSet, Split
from vitrail.measure.classification import SingleLabelFigures, reassessed_top1, wilson_interval
from vitrail.model.classifier import Classifier
from vitrail.run.evaluate import IMAGENET_V2, evaluate

TIMM = "timm, results/results-imagenet.csv"
PAPERS = {  # of `real` and `v2`, by how names begin
    "deit_": "DeiT, arXiv 2012.12877, table 5",
    "deit3_": "DeiT III, arXiv 2204.07118",
    "cait_": "CaiT, arXiv 2103.17239",
    "resmlp_": "ResMLP, arXiv 2105.03404",
}


@dataclass(frozen=True)
class PublishedAccuracy:
    """A measured accuracy and the published one. Fractions, not percent."""

    model: str
    checkpoint: str
    data: str
    split: str
    metric: str  # top1, real or v2
    image_size: int
    crop_ratio: float
    count: int
    top1: float
    interval: tuple[float, float]  # Wilson's, 95 %
    images_per_s: float  # decoding included

    @property
    def published(self) -> float | None:
        known = published_figures().get(self.checkpoint, {}).get(self.metric)
        return None if known is None else known / 100

    @property
    def difference(self) -> float | None:
        return None if self.published is None else self.top1 - self.published

    @property
    def within(self) -> bool | None:
        """Whether the interval contains the published accuracy."""
        return None if self.published is None else self.interval[0] <= self.published <= self.interval[1]

    def to_json(self) -> dict[str, Any]:
        measured = asdict(self)
        measured["top1_low"], measured["top1_high"] = measured.pop("interval")
        paper = next((text for start, text in PAPERS.items() if self.checkpoint.startswith(start)), "")
        source = None if self.published is None else TIMM if self.metric == "top1" else paper
        compared = {"published": self.published, "source": source, "difference": self.difference}
        return {**measured, **compared, "within_interval": self.within}


@cache
def published_figures() -> dict[str, dict[str, float]]:
    """Percentages by checkpoint and metric."""
    text = (Path(__file__).parent / "published.json").read_text(encoding="utf-8")
    return dict(json.loads(text))


def compare_published(
    model: Classifier, name: str, data: DataSet, real: Sequence[Sequence[int]] | None = None, **options: Any
) -> list[PublishedAccuracy]:
    """Accuracy on `data`, and on reassessed labels where `real` has them. `options` as for `evaluate`."""
    if real is not None:  # rejected before images are read
        if len(model.classes) != len(IMAGENET_V2) or list(model.classes) != sorted(model.classes):
            raise ValueError(f"reassessed labels are of ImageNet's 1,000 classes in sorted order, {name} has others")
        chosen = options.get("split") or ("test" if "test" in data.splits else "val")
        labels = reassessed_labels(data[chosen], real)
    began = time.perf_counter()
    figures, predictions, split = evaluate(model, data, **options)
    speed = figures.count / (time.perf_counter() - began)
    if not isinstance(figures, SingleLabelFigures):
        raise ValueError(f"{data.uri} has not one label per image, so there is no top-1; name other data")

    def row(metric: str, count: int, top1: float, interval: tuple[float, float]) -> PublishedAccuracy:
        size, crop, checkpoint = model.preprocess.size, model.preprocess.crop_ratio, model.stated.get("published", "")
        where = (data.uri, split, metric)
        return PublishedAccuracy(name, checkpoint, *where, size, crop, count, top1, interval, speed)

    metric = "v2" if set(data.classes) == IMAGENET_V2 else "top1"
    rows = [row(metric, figures.count, figures.top1, figures.top1_interval)]
    if real is not None:
        known = [labels[image] for image in predictions.index.tolist()]
        right, count = reassessed_top1(predictions.guess.tolist(), known)
        if not count:
            raise ValueError(f"{data.uri}: none of the images has a reassessed label")
        rows.append(row("real", count, right / count, wilson_interval(right, count)))
    return rows


def reassessed_labels(split: Split, real: Sequence[Sequence[int]]) -> dict[int, Sequence[int]]:
    """The labels of images by their stable index; image ILSVRC2012_val_00000001 has the first of `real`."""
    labels = {}
    for image, key in zip(split.index.tolist(), split.keys, strict=True):
        named = re.search(r"ILSVRC2012_val_(\d{8})", key)
        if named is None or not 1 <= int(named[1]) <= len(real):
            raise ValueError(
                f"reassessed labels are of ILSVRC2012_val_00000001 to ILSVRC2012_val_{len(real):08d}, and "
                f"{key} is none of these; name ImageNet's validation images, under their own file names"
            )
        labels[image] = real[int(named[1]) - 1]
    return labels


def read_reassessed(path: Path) -> list[list[int]]:
    """`real.json`: a list of class numbers for each validation image. Raises `ValueError` for anything else."""
    try:
        labels = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        labels = None
    lists = isinstance(labels, list) and all(isinstance(known, list) for known in labels)
    if not lists or any(type(c) is not int or not 0 <= c < len(IMAGENET_V2) for known in labels for c in known):
        raise ValueError(
            f"{path} holds no reassessed labels: a list with a list of class numbers (0 to 999) for each image is "
            "expected, as real.json of github.com/google-research/reassessed-imagenet has it"
        )
    return list(labels)
