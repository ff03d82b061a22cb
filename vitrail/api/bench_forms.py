"""How a model is called when it is measured: eager or optimized, for inference or for a whole training step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.data.batch import Batch
from vitrail.engine.config import OptimConfig
from vitrail.engine.schedule import make_schedule
from vitrail.engine.step import WARM_UP_STEPS, TrainStep
from vitrail.learn.config import SupervisedConfig
from vitrail.learn.supervised import Supervised
from vitrail.measure.speed import Way
from vitrail.model.classifier import Classifier

Form = Literal["eager", "optimized"]
Call = Callable[[Tensor, Tensor], object]  # images [batch, 3, height, width], targets [batch] or [batch, classes]

OPTIM = OptimConfig(name="adamw", lr=1e-4, schedule="constant", warmup=0, steps=1_000_000)


@dataclass(frozen=True)
class Conditions:
    """What is the same for all models of one benchmark."""

    device: torch.device
    autocast: torch.dtype | None  # none: float32
    train: bool
    forms: tuple[Form, ...]

    def context(self) -> torch.autocast:
        return torch.autocast(self.device.type, self.autocast, enabled=self.autocast is not None)

    @property
    def dtype(self) -> torch.dtype:
        """Of the large products."""
        return self.autocast or torch.float32

    @property
    def warm_up(self) -> int:
        """Calls after which all that happens once has happened, the capture of a graph included."""
        return 1 if self.device.type == "cpu" else WARM_UP_STEPS + 2


@dataclass(frozen=True)
class Ready:
    """A model made ready and warm in one form."""

    way: Way
    peak_memory: int | None  # bytes: weights, one batch and all between; none where it is not measured


def make_call(model: nn.Module, form: Form, conditions: Conditions, multilabel: bool = False) -> Call:
    """What one call does: a forward pass, or a training step.

    Our models are optimized by `Classifier.optimize` and trained by the engine's own step; timm's, as anybody would who
    has only PyTorch: `torch.compile`, autocast, fused AdamW.
    """
    if conditions.train:
        model = copy.deepcopy(model) if owns_weights(model, form, conditions) else model
        return (_engine_step if isinstance(model, Classifier) else _plain_step)(model, form, conditions, multilabel)
    return _forward(model.eval(), form, conditions)


def owns_weights(model: nn.Module, form: Form, conditions: Conditions) -> bool:
    """Whether a form holds a copy of the weights: `optimize` makes one, a captured step wants no other beside it."""
    return form == "optimized" and (conditions.train or isinstance(model, Classifier))


def _forward(model: nn.Module, form: Form, conditions: Conditions) -> Call:
    if form == "optimized" and isinstance(model, Classifier):
        optimized = model.optimize("bf16" if conditions.autocast is torch.bfloat16 else "float32", compile=True)
        return lambda images, _: optimized(images)
    run = torch.compile(model, dynamic=False) if form == "optimized" else model

    def once(images: Tensor, _: Tensor) -> object:
        with torch.inference_mode(), conditions.context():
            return run(images)

    return once


def _engine_step(model: nn.Module, form: Form, conditions: Conditions, multilabel: bool) -> Call:
    assert isinstance(model, Classifier)
    assert model.multilabel == multilabel
    fast = form == "optimized"
    step = TrainStep(
        Supervised(model, SupervisedConfig()),
        OPTIM,
        make_schedule(OPTIM, batch=1, images=1),
        device=conditions.device,
        autocast=conditions.autocast,
        compile=fast,
        graph=fast,
    )

    def once(images: Tensor, targets: Tensor) -> object:
        return step.feed(Batch((images,), targets, targets, index=targets if targets.ndim == 1 else targets[:, 0]))

    return once


def _plain_step(model: nn.Module, form: Form, conditions: Conditions, multilabel: bool) -> Call:
    run = torch.compile(model.train(), dynamic=False) if form == "optimized" else model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=OPTIM.lr, betas=OPTIM.betas, fused=True)
    criterion = F.binary_cross_entropy_with_logits if multilabel else F.cross_entropy

    def once(images: Tensor, targets: Tensor) -> object:
        with conditions.context():
            loss = criterion(run(images), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return once
