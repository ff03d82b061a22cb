"""Figures of the study of GeNIe (arXiv 2312.02548).

OUT/samples.png      images from noise alone, a row for each class
OUT/sweep.png        rows: images of one class; columns: the same made into another with rising noise r
OUT/trajectory.png   where the backbone sees them, in the two directions of most variance, and how far they have gone
OUT/density.png      what an SVM of few labelled images says of made ones: probability of source and of target
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from genie_models import Models
from numpy.typing import NDArray
from torch import Tensor

from vitrail.files import replacing
from vitrail.generate.generation_methods import prototypes_of
from vitrail.measure.hard_negatives import axis_position

SWEEP = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
SAMPLES, SHOWN, FOLLOWED = 10, 8, 40  # images of a class, sources of the sweep, sources of a trajectory
PAIRS = ((3, 5), (0, 1))  # source and target: cat to dog, airplane to automobile on CIFAR-10
NAMES = ("samples", "sweep", "trajectory", "density")


class Pictures:
    """Drawn once; what they show is of test images."""

    def __init__(self, models: Models, out: Path) -> None:
        self.models, self.runs, self.out = models, models.runs, out

    def run(self, seed: int) -> None:
        for name in NAMES:
            if name == "density" and not self._hard():
                continue  # the part fewshot makes its rows
            self.models.row("pictures", "png", name, seed, partial(self._drawn, name))

    def _drawn(self, name: str) -> dict[str, Any]:
        import matplotlib as mpl

        mpl.use("Agg")
        import matplotlib.pyplot as plt

        figure = getattr(self, f"_{name}")(plt)
        self.out.mkdir(parents=True, exist_ok=True)
        path = self.out / f"{name}.png"
        with replacing(path) as temporary:
            figure.savefig(temporary, dpi=90, format="png", bbox_inches="tight")
        plt.close(figure)
        return {"file": path.name, "bytes": path.stat().st_size}

    def _samples(self, plt: Any) -> Any:
        classes = self.runs.classes
        target = torch.arange(classes).repeat_interleave(SAMPLES)
        made = self.models.diffuser.txt2img(target, torch.arange(len(target)))
        figure, axis = plt.subplots(figsize=(6, 0.55 * classes + 0.2))
        _tiles(axis, made.view(classes, SAMPLES, *made.shape[1:]), self.runs.data.classes, [])
        return figure

    @cached_property
    def swept(self) -> list[Tensor]:
        """Of each pair [1 + levels, images, 3, side, side]: sources, then every level with the same noise."""
        held, pairs = self.runs["test"], self._pairs()
        sources = [held.pixels[(held.labels == first).nonzero()[:FOLLOWED, 0]] for first, _ in pairs]
        counts = [len(images) for images in sources]
        images = torch.cat(sources)  # of all pairs: the sampler makes whole batches
        aims = torch.cat([torch.full((n,), second) for n, (_, second) in zip(counts, pairs, strict=True)])
        made = [self.models.diffuser(images, aims, r, torch.arange(len(images))) for r in SWEEP]
        return list(torch.stack([images, *made]).split(counts, 1))

    def _sweep(self, plt: Any) -> Any:
        figure, axes = plt.subplots(1, len(PAIRS), figsize=(5 * len(PAIRS), 5.4))
        for axis, pair, swept in zip(axes, self._pairs(), self.swept, strict=True):
            rows = swept[:, :SHOWN].transpose(0, 1)
            _tiles(axis, rows.cpu(), [""] * len(rows), ["source", *(f"{r:g}" for r in SWEEP)])
            axis.set_title(self._said(pair), fontsize=9)
        return figure

    def _trajectory(self, plt: Any) -> Any:
        train = self.runs["train"]
        rows = torch.cat([(train.labels == c).nonzero()[:200, 0] for c in range(self.runs.classes)])
        aims = prototypes_of(self.models.embed, train.pixels[rows], train.labels[rows], self.runs.classes)
        figure, axes = plt.subplots(2, len(PAIRS), figsize=(5 * len(PAIRS), 7.5), squeeze=False)
        for column, (first, second) in enumerate(self._pairs()):
            swept = self.swept[column]
            seen = F.normalize(self.models.embed(swept.flatten(0, 1)), dim=-1).view(*swept.shape[:2], -1)
            flat = _two_directions(seen.flatten(0, 1), aims[[first, second]])
            points = flat[:-2].reshape(*swept.shape[:2], 2)
            above, below = axes[0, column], axes[1, column]
            colours = plt.get_cmap("viridis")(np.linspace(0, 1, len(SWEEP) + 1))
            for level, colour in enumerate(colours):
                name = "source" if level == 0 else f"r {SWEEP[level - 1]:g}"
                above.scatter(*points[level].T, s=9, color=colour, label=name)
            above.scatter(*flat[-2], marker="*", s=160, color="black")
            above.scatter(*flat[-1], marker="X", s=120, color="black")
            above.set_title(f"{self._said((first, second))}: star and cross are their means", fontsize=9)
            above.legend(fontsize=6)
            gone = axis_position(seen[1:], seen[0], aims[second].expand_as(seen[0])).cpu().numpy()
            below.plot(SWEEP, gone, color="grey", alpha=0.3, linewidth=0.8)
            below.plot(SWEEP, gone.mean(1), color="black", marker="o")
            below.set_xlabel("r")
            below.set_ylabel("way gone from source to target")
        figure.tight_layout()
        return figure

    def _hard(self) -> list[dict[str, Any]]:
        rows = self.models.rows.tables.get("hardness", {})
        return [{"what": name, **row} for name, seeds in rows.items() for row in seeds.values()]

    def _density(self, plt: Any) -> Any:
        rows = self._hard()
        figure, axes = plt.subplots(1, len(rows), figsize=(2.1 * len(rows), 2.4), sharey=True, squeeze=False)
        for axis, row in zip(axes[0], rows, strict=True):
            for values, label in zip(row["histograms"], ("P(source)", "P(target)"), strict=True):
                edges = np.linspace(0, 1, len(values) + 1)
                axis.stairs(values, edges, fill=True, alpha=0.5, label=label)
            axis.set_title(f"{row['what']}, overlap {row['overlap']:.2f}", fontsize=8)
            axis.set_xlabel("probability", fontsize=8)
        axes[0, 0].set_ylabel("share of episodes", fontsize=8)
        axes[0, 0].legend(fontsize=7)
        figure.tight_layout()
        return figure

    def _pairs(self) -> list[tuple[int, int]]:
        return [(a % self.runs.classes, b % self.runs.classes) for a, b in PAIRS]

    def _said(self, pair: tuple[int, int]) -> str:
        return " to ".join(self.runs.data.classes[c] for c in pair)


def _tiles(axis: Any, images: Tensor, rows: Sequence[str], columns: Sequence[str]) -> None:
    """Bytes [rows, columns, 3, side, side] as one picture with names at its sides."""
    height, width, _, side, _ = images.shape
    whole: NDArray[np.uint8] = images.permute(0, 3, 1, 4, 2).reshape(height * side, width * side, 3).numpy()
    axis.imshow(whole, interpolation="nearest")
    axis.set_yticks([side * (i + 0.5) for i in range(height)], rows, fontsize=7)
    axis.set_xticks([side * (i + 0.5) for i in range(len(columns))], columns, fontsize=7)
    axis.tick_params(length=0)


def _two_directions(points: Tensor, more: Tensor) -> NDArray[np.float32]:
    """Points [n, width], and `more` after them, in the two directions of most variance of the former."""
    centre = points.mean(0)
    _, _, directions = torch.linalg.svd((points - centre).double(), full_matrices=False)
    flat: NDArray[np.float32] = ((torch.cat([points, more]) - centre).double() @ directions[:2].T).cpu().float().numpy()
    return flat
