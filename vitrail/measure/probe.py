"""Linear probe on frozen features: a whole grid of learning rates and weight decays in one pass.

All points of the grid see the same batches, so their weights lie side by side, [grid * classes, features], and a step
is one matrix product for all of them. The best point is chosen on validation images, and test images are read once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.measure.evaluator import Findings, Loaders, Model, ResultTable, Where, draw_by_class, evaluator
from vitrail.measure.retrieval import embedded_split
from vitrail.quantities import percent

ROWS_AT_ONCE = 4096
STEPS = (3 / 8, 3 / 4)  # 15 and 30 of 40 epochs


@dataclass(frozen=True)
class ProbeSettings:
    """How probes are trained: SGD with momentum, every combination of learning rate and weight decay at once."""

    learning_rates: tuple[float, ...] = tuple(10 ** (-3 + i / 3) for i in range(10))  # 0.001 to 1
    weight_decays: tuple[float, ...] = (1e-6, 1e-4, 1e-2)
    epochs: int = 40
    batch: int = 256
    momentum: float = 0.9
    schedule: Literal["cosine", "steps"] = "cosine"  # steps: a tenth of the rate from 3/8 and 3/4 of the epochs on
    normalise: bool = True  # features to unit length
    standardise: bool = True  # then each to mean 0 and variance 1 over training images
    val_share: float = 0.1  # of training images, where none are given to choose by
    refit: bool = True  # train the chosen point again on training and validation images
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.learning_rates or not self.weight_decays:
            raise ValueError("a probe needs at least one learning rate and one weight decay")
        if self.epochs < 1 or self.batch < 1:
            raise ValueError(f"a probe of {self.epochs} epochs and batches of {self.batch} learns nothing")
        if not 0 < self.val_share < 1:
            raise ValueError(f"val_share {self.val_share:g} must lie between 0 and 1")

    @property
    def grid(self) -> list[tuple[float, float]]:
        """(learning rate, weight decay) of every point."""
        return [(rate, decay) for rate in self.learning_rates for decay in self.weight_decays]

    def factors(self, steps: int) -> list[float]:
        """What the learning rate is multiplied by at each of `steps` steps."""
        done = [step / steps for step in range(steps)]
        if self.schedule == "cosine":
            return [0.5 * (1 + math.cos(math.pi * share)) for share in done]
        return [0.1 ** sum(share >= at for at in STEPS) for share in done]


LINEAR = ProbeSettings(learning_rates=(0.01,), weight_decays=(1e-4,), schedule="steps")
"""The published protocol: one point, no choice (CompRes, ISD, MSF, CMSF)."""


@dataclass(frozen=True, eq=False)
class Probes:
    """A linear classifier for every point of a grid."""

    weight: Tensor  # [grid, classes, features]
    bias: Tensor  # [grid, classes]

    def logits(self, features: Tensor) -> Tensor:
        """[rows, features] -> [rows, grid, classes]."""
        flat = F.linear(features, self.weight.flatten(0, 1), self.bias.flatten())
        return flat.unflatten(1, self.bias.shape)

    def evaluate(self, features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Share of right answers and mean loss of every point, [grid] float64; one that diverged is never right."""
        right, loss = torch.zeros(2, len(self.bias), dtype=torch.float64, device=features.device)
        for rows, label in zip(features.split(ROWS_AT_ONCE), labels.split(ROWS_AT_ONCE), strict=True):
            said = self.logits(rows)
            finite = said.isfinite().all(2)
            right += ((said.argmax(2) == label[:, None]) & finite).sum(0)
            each = F.cross_entropy(said.transpose(1, 2), label[:, None].expand(finite.shape), reduction="none")
            loss += torch.where(finite, each, torch.inf).sum(0, dtype=torch.float64)
        return right / len(labels), loss / len(labels)


@dataclass(frozen=True)
class ProbeResult:
    """A linear probe and how it was chosen."""

    accuracy: float  # of the chosen point on the evaluated images
    learning_rate: float
    weight_decay: float
    tried: tuple[tuple[float, float, float], ...]  # learning rate, weight decay, validation accuracy; empty: no choice
    images: int  # that the evaluated probe was trained on

    def to_json(self) -> dict[str, Any]:
        names = ("learning_rate", "weight_decay", "val")
        return {
            "accuracy": self.accuracy,
            "learning_rate": self.learning_rate,
            "weight_decay": self.weight_decay,
            "images": self.images,
            "tried": [dict(zip(names, point, strict=True)) for point in self.tried],
        }


def prepared(train: Tensor, *others: Tensor, normalise: bool = True, standardise: bool = True) -> list[Tensor]:
    """Features of training images and of others, ready for a probe; statistics come from training images only.

    A feature that is constant over training images becomes zero there and is not scaled.
    """
    every = [features.float() for features in (train, *others)]
    if normalise:
        every = [F.normalize(features, dim=1) for features in every]
    if standardise:
        mean, deviation = every[0].mean(0), every[0].std(0, correction=0)
        # Rounding of the mean leaves a constant feature a deviation of about 1e-8 of its size.
        scale = torch.where(deviation > 1e-6 * mean.abs().clamp(min=1e-6), deviation, 1.0)
        every = [(features - mean) / scale for features in every]
    return every


def train_probes(features: Tensor, labels: Tensor, classes: int, settings: ProbeSettings) -> Probes:
    """Probes of every point of the grid, from zero weights, on `features` [rows, features] as they are given.

    Batches depend on the seed and the number of rows only; the last of an epoch may be smaller. Updates are those of
    `torch.optim.SGD`.
    """
    rows, grid, device = len(features), settings.grid, features.device
    if not rows:
        raise ValueError("a probe needs training images, and there are none")
    if int(labels.max()) >= classes:
        raise ValueError(f"label {int(labels.max())} is outside the {classes} classes")
    steps = settings.epochs * math.ceil(rows / settings.batch)
    rate, decay = (torch.tensor(v, dtype=torch.float64).view(-1, 1, 1) for v in zip(*grid, strict=True))
    factors = torch.tensor(settings.factors(steps), dtype=torch.float64).view(-1, 1, 1, 1)
    rates, decays = (factors * rate).float().to(device), decay.float().to(device)  # [steps, grid, 1, 1], [grid, 1, 1]
    weight = torch.zeros(len(grid), classes, features.shape[1], device=device, requires_grad=True)
    bias = torch.zeros(len(grid), classes, 1, device=device, requires_grad=True)
    moving = [torch.zeros_like(weight), torch.zeros_like(bias)]
    generator = torch.Generator().manual_seed(settings.seed)
    step = 0
    for _ in range(settings.epochs):
        order = torch.randperm(rows, generator=generator).to(device)
        for some in order.split(settings.batch):
            logits = F.linear(features[some], weight.flatten(0, 1), bias.flatten()).view(-1, classes)
            label = labels[some].repeat_interleave(len(grid))
            loss = F.cross_entropy(logits, label, reduction="sum") / len(some)
            gradients = torch.autograd.grad(loss, (weight, bias))
            with torch.no_grad():
                for value, gradient, momentum in zip((weight, bias), gradients, moving, strict=True):
                    momentum.mul_(settings.momentum).add_(gradient + decays * value)
                    value.sub_(rates[step] * momentum)
            step += 1
    return Probes(weight.detach(), bias.detach()[..., 0])


def linear_probe(
    train: tuple[Tensor, Tensor],
    test: tuple[Tensor, Tensor],
    classes: int,
    settings: ProbeSettings | None = None,
    val: tuple[Tensor, Tensor] | None = None,
) -> ProbeResult:
    """Accuracy on `test` of the point of the grid that is best on `val`; each is features [rows, width], labels [rows].

    Without `val` a stratified share of `train` takes its place; a grid of one point needs neither and is trained on
    `train` as it is. Of equally accurate points the one of least loss
    wins. Raises `ValueError` where no class has an image to spare.
    """
    settings = settings or ProbeSettings()
    options = {"normalise": settings.normalise, "standardise": settings.standardise}
    chosen, tried = settings.grid[0], []
    if len(settings.grid) > 1:
        learned, held = (train, val) if val is not None else _divided(*train, settings)
        ready = prepared(learned[0], held[0], **options)
        accuracy, loss = train_probes(ready[0], learned[1], classes, settings).evaluate(ready[1], held[1])
        tried = [(*point, value) for point, value in zip(settings.grid, accuracy.tolist(), strict=True)]
        # Few images make many points equally accurate, among them those that have hardly learned: the loss tells.
        chosen = settings.grid[min(range(len(tried)), key=lambda i: (-tried[i][2], float(loss[i])))]
        if settings.refit and val is not None:
            train = torch.cat([train[0], val[0]]), torch.cat([train[1], val[1]])
        elif not settings.refit:
            train = learned
    alone = ProbeSettings(**{**vars(settings), "learning_rates": (chosen[0],), "weight_decays": (chosen[1],)})
    features, tested = prepared(train[0], test[0], **options)
    probe = train_probes(features, train[1], classes, alone)
    return ProbeResult(float(probe.evaluate(tested, test[1])[0]), *chosen, tuple(tried), len(features))


def probe_table(results: Mapping[str, Any], most: int = 5) -> ResultTable | None:
    """The best settings of a grid; none where nothing was chosen."""
    best = sorted(results["tried"], key=lambda point: -point["val"])[:most]
    rows = [(f"{p['learning_rate']:.3g}", f"{p['weight_decay']:g}", percent(p["val"])) for p in best]
    columns = ("learning rate", "weight decay", "val top-1")
    return ResultTable("best settings of the linear probe on val", columns, rows) if rows else None


@evaluator("train", "embedding", table=probe_table)
def evaluate_linear(model: Model, data: Loaders, **where: Unpack[Where]) -> Findings:
    """A linear probe on the frozen embedding, its learning rate and decay chosen on val.

    Where val itself is evaluated, or there is none, a share of training images is held out to choose by.
    """
    train, test = (embedded_split(model, data, split, **where) for split in ("train", data.split))
    val = None
    if data.split == "test" and "val" in data.loaders:
        held = embedded_split(model, data, "val", **where)
        val = held.embedding, held.label
    found = linear_probe((train.embedding, train.label), (test.embedding, test.label), len(data.classes), val=val)
    return {"numbers": {"linear": found.accuracy}, "tables": {"linear": found.to_json()}, "pictures": {}}


@evaluator("train", "embedding")
def evaluate_published(model: Model, data: Loaders, **where: Unpack[Where]) -> Findings:
    """One rate and decay for all models and data, as CompRes to CMSF state it."""
    train, test = (embedded_split(model, data, split, **where) for split in ("train", data.split))
    found = linear_probe(
        (train.embedding, train.label), (test.embedding, test.label), len(data.classes), settings=LINEAR
    )
    return {"numbers": {"linear_published": found.accuracy}, "tables": {}, "pictures": {}}


def _divided(
    features: Tensor, labels: Tensor, settings: ProbeSettings
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """A stratified share held out to choose by; every class keeps an image to learn from."""
    held = draw_by_class(labels, lambda n: min(n - 1, max(1, round(n * settings.val_share))), settings.seed)
    if not len(held):
        raise ValueError(
            "every class has a single training image, so none can be held out to choose a learning rate by; give "
            "validation images, or one learning rate and one weight decay"
        )
    rest = torch.ones(len(labels), dtype=torch.bool, device=labels.device)
    rest[held] = False
    return (features[rest], labels[rest]), (features[held], labels[held])
