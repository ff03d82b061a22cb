"""Few images of rare classes: what made images of these add, and whether they replace what the logits can be told.

The training images are a long tail, drawn anew for every seed; images are made for the rarest third of the classes
alone, from images of the four classes that are most confused with them (on val, by the classifier without any of this).
All runs take equally many steps. Adjusted logits are the same model's minus the log of how often each class was among
its training images, made ones included (Menon and others 2021, after training).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from genie_models import LABELS, Held, Models
from numpy.typing import NDArray
from torch import Tensor

from vitrail.config import RunConfig
from vitrail.data.dataset import Split, make_long_tail
from vitrail.generate.generation_methods import Request, Samples, Tools, check_budgets, generate, prototypes_of
from vitrail.generate.job import make_plan
from vitrail.learn.supervised import prior_shift
from vitrail.measure.classification import SingleLabelFigures, classification
from vitrail.measure.config import LongTailConfig
from vitrail.measure.long_tail import class_groups, long_tail
from vitrail.recipes import with_values

FACTOR, EACH, STEPS = 100.0, 340, 1200  # images of three classes are one batch of the sampler
SMOKE_FACTOR, SMOKE_EACH = 4.0, 4
PLAIN, BALANCED, MIXED = "none", "balanced sampling", "mixup in training"
COPIED = {"weak copies": "weak", "strong copies": "strong"}  # of the rare images themselves, as many as are made
MADE = {
    **COPIED,
    **{"img2img_high": "img2img_high", "txt2img": "txt2img", "genie 0.8": "genie", "genie_ada": "genie_ada"},
}
ROWS = (PLAIN, BALANCED, MIXED, *MADE)
CHANGES: dict[str, dict[str, Any]] = {BALANCED: {"data.sampling": "balanced"}, MIXED: {"data.augment.mixup": 1.0}}
OFF, ON = "logits as learned", "logits adjusted"
THIRDS = LongTailConfig(groups="thirds")
PROTOTYPE_IMAGES = 200  # of each class, at most


@dataclass(frozen=True)
class Tail:
    """The training images of one seed."""

    split: Split
    held: Held
    counts: NDArray[np.int64]  # [classes]


class LongTails:
    """Rows of `tail`."""

    def __init__(self, models: Models) -> None:
        self.models, self.runs = models, models.runs
        self._tails: dict[int, Tail] = {}
        self._said: dict[tuple[str, int], tuple[Tensor, NDArray[np.int64]]] = {}
        self._made: dict[int, dict[str, Samples]] = {}
        self._confusion: dict[int, list[list[int]]] = {}  # [true, said] on val, of the classifier without any of this

    def tail(self, seed: int) -> Tail:
        if seed not in self._tails:
            runs = self.runs
            split = make_long_tail(runs.data, SMOKE_FACTOR if self.models.smoke else FACTOR, seed)["train"]
            where = {int(index): row for row, index in enumerate(runs.data["train"].index)}
            rows = torch.tensor([where[int(index)] for index in split.index], device=runs.device)
            whole = runs["train"]
            counts = np.bincount(split.labels, minlength=runs.classes)
            self._tails[seed] = Tail(split, Held(whole.pixels[rows], whole.labels[rows]), counts)
        return self._tails[seed]

    def config(self, name: str) -> RunConfig:
        base = with_values(LABELS, {"model.name": "cifar_resnet20", "optim.steps": STEPS})
        config = with_values(base, CHANGES.get(name, {}))
        return with_values(config, {"data.batch": 20, "optim.steps": 2}) if self.models.smoke else config

    def said(self, name: str, seed: int) -> tuple[Tensor, NDArray[np.int64]]:
        """Logits of test images by a classifier trained now, and how many images of each class it saw."""
        if (name, seed) not in self._said:
            tail = self.tail(seed)
            split, pixels = tail.split, tail.held.pixels
            if name in MADE:
                split, pixels = joined(split, pixels, self.made(name, seed))
            model = self.runs.trained(self.config(name), seed, split, pixels)
            counts = np.bincount(split.labels, minlength=self.runs.classes)
            self._said[name, seed] = self.runs.logits(model, self.runs["test"].pixels), counts
            if name == PLAIN:
                self._confusion[seed] = self._confused(self.runs.logits(model, self.runs["val"].pixels), "val")
        return self._said[name, seed]

    def _confused(self, logits: Tensor, split: str) -> list[list[int]]:
        figures = classification(logits.cpu(), self.runs[split].labels.cpu(), self.runs.data.classes)
        assert isinstance(figures, SingleLabelFigures)
        found: list[list[int]] = figures.confusion.tolist()
        return found

    def made(self, name: str, seed: int) -> Samples:
        """Images for the rarest third; all methods make equally many, which is checked."""
        made = self._made.setdefault(seed, {})
        if name not in made:
            tail, runs = self.tail(seed), self.runs
            plain = self.models.rows.tables["tail"][f"{OFF}, {PLAIN}"][str(seed)]
            rare = np.flatnonzero(class_groups(tail.counts, THIRDS) == 2).tolist()
            plan = make_plan(
                tail.split.labels,
                runs.data.classes,
                each=SMOKE_EACH if self.models.smoke else EACH,
                only=rare,
                policy="confused",
                confusion=np.asarray(plain["confusion"], np.int64),
                seed=seed,
            )
            parts = (plan.source, plan.own, plan.target, plan.seeds)
            source, own, target, seeds = (torch.from_numpy(part).to(runs.device) for part in parts)
            request = Request(tail.held.pixels, tail.held.labels, source, own, target, seeds, runs.classes)
            made[name] = generate(MADE[name], request, Tools() if name in COPIED else self._tools(tail))
            # Where the target was counted may differ, not what was counted.
            check_budgets({each: replace(one, target=one.target.cpu()) for each, one in made.items()})
        return made[name]

    def _tools(self, tail: Tail) -> Tools:
        return Tools(self.models.diffuser, embed=self.models.embed, prototypes=self._prototypes(tail), r=0.8)

    def _prototypes(self, tail: Tail) -> Tensor:
        rows = [(tail.held.labels == c).nonzero()[:PROTOTYPE_IMAGES, 0] for c in range(self.runs.classes)]
        some = torch.cat(rows)
        return prototypes_of(self.models.embed, tail.held.pixels[some], tail.held.labels[some], self.runs.classes)

    def judged(self, name: str, seed: int, adjusted: bool) -> dict[str, Any]:
        logits, counts = self.said(name, seed)
        if adjusted:
            logits = logits - prior_shift(counts).to(logits.device)
        figures = classification(logits.cpu(), self.runs["test"].labels.cpu(), self.runs.data.classes)
        tail = self.tail(seed)
        groups = long_tail(figures, tail.counts, THIRDS).groups
        row: dict[str, Any] = {"split": "test", **{each: group.balanced for each, group in groups.items()}}
        row |= {"real": int(tail.counts.sum()), "made": int(counts.sum() - tail.counts.sum())}
        if name in MADE:
            made = self.made(name, seed)
            row |= {"evaluations": made.evaluations, "consistent": self._consistent(made)}
        return row | ({"confusion": self._confusion[seed]} if name == PLAIN and not adjusted else {})

    def _consistent(self, made: Samples) -> float:
        said = self.runs.logits(self.models.oracle, made.images).argmax(1).cpu()
        return float((said == made.target.cpu()).double().mean())

    def run(self, seed: int) -> None:
        for name in ROWS:
            self.models.row("tail", OFF, name, seed, partial(self.judged, name, seed, False))
            if name != BALANCED:  # whose classes are equally frequent already
                self.models.row("tail", ON, name, seed, partial(self.judged, name, seed, True))


def joined(split: Split, pixels: Tensor, made: Samples) -> tuple[Split, Tensor]:
    """Real images and made ones, as one training split."""
    count, target = len(made.images), made.target.cpu().numpy()
    first = int(split.index.max()) + 1
    keys: Sequence[str] = [*split.keys, *(f"made {i}" for i in range(count))]
    whole = replace(
        split,
        index=np.concatenate([split.index, np.arange(first, first + count)]),
        keys=keys,
        labels=np.concatenate([split.labels, target]),
        levels=None,
        boxes=None,
        generated=np.concatenate([np.zeros(len(split), bool), np.ones(count, bool)]),
    )
    return whole, torch.cat([pixels, made.images.to(pixels.device)])
