"""The interface of objectives: a module that turns a batch into losses."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vitrail.data.batch import Batch, ViewSpec
from vitrail.data.config import AugmentConfig
from vitrail.learn.config import ObjectiveConfig, SupervisedConfig
from vitrail.model.classifier import Classifier
from vitrail.registry import part


@dataclass(frozen=True)
class TrainingFacts:
    """Facts about the training images that an objective may use."""

    labels: NDArray[np.int64]  # [images] class, or [images, classes] of 0/1
    index: NDArray[np.int64]  # [images] stable index of each: what `Batch.index` holds
    steps: int = 1  # of the run
    augment: AugmentConfig | None = None  # how views are made; none: not known
    images: Callable[[], Iterable[Batch]] | None = None  # this process's share of them, once, as evaluation sees them
    generated: NDArray[np.bool_] | None = None  # [images] which of them a model made; none: all are real

    def counted(self, config: SupervisedConfig) -> NDArray[np.int64]:
        """Labels of the images by which class frequencies are counted."""
        return self.labels if self.generated is None or config.count_generated else self.labels[~self.generated]


def build_objective(config: ObjectiveConfig, model: Classifier, facts: TrainingFacts) -> Objective:
    """The objective of a configuration, by its kind.

    Raises `ValueError`, with the remedy, where it does not fit the model or the data.
    """
    objective: Objective = part("objective", config.kind).build(model, config, facts)
    return objective


class Objective(nn.Module):
    """`forward(batch)` gives `"loss"` and any other scalar worth plotting. The engine knows nothing else.

    `model` is what is kept when training ends; `views` says which augmented views a batch must carry; modules named in
    `frozen` (teachers) are stored in a checkpoint by name and hash, not by weights.
    """

    model: Classifier
    views: ViewSpec = ViewSpec()
    frozen: tuple[str, ...] = ()
    groups: NDArray[np.int64] | None = None  # [images] of which each is drawn as often; none: as data.sampling says
    notes: tuple[str, ...] = ()
    """Notes for the user before the run, though nothing is wrong."""
    reading: str = ""
    """How to read the metrics of the model, where it is not trained to classify."""
    host_decision: str = ""
    """Why no CUDA graph may replay forward and backward (any module may say so); empty: they are the same device work
    in every step of a phase."""

    @classmethod
    def build(cls, model: Classifier, config: Any, facts: TrainingFacts) -> Objective:
        """The objective that `config` describes, for `model` and the training images of which `facts` tells."""
        return cls(model, config)

    @property
    def phase(self) -> int:
        """Changes where steps become other device work, as when a cached teacher is no longer asked."""
        return 0

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        raise NotImplementedError

    @property
    def probe_parameters(self) -> list[nn.Parameter]:
        """Parameters of a detached online linear probe, which must not affect the others, not even by clipping."""
        return []

    @cached_property
    def identities(self) -> dict[str, str]:
        """Name and hash of every frozen module: a run goes on only with those that it began with."""
        modules = {name: self.get_submodule(name) for name in self.frozen}
        return {name: f"{getattr(m, 'name', '')} {weights_hash(m)}".strip() for name, m in modules.items()}

    def alarm(self, means: Mapping[str, float], done: float) -> str:
        """A warning for the user at a logging step, given the means of what `forward` gave; empty: nothing.

        `done` is the share of the run so far. It is logged once per kind of sentence (the part before its colon).
        """
        return ""

    def before_step(self, step: int) -> None:
        """Write what depends on the number of optimiser step `step` to device tensors; outside any graph."""

    def after_step(self, step: int) -> None:
        """Momentum teachers, banks: what changes after optimiser step `step` (0 is the first); outside any graph."""


def weights_hash(module: nn.Module) -> str:
    """Changes with any weight or buffer that a module stores, wherever it lies."""
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]
