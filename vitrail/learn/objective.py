"""The interface of objectives: a module that turns a batch into losses."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cached_property

import torch
from torch import Tensor, nn

from vitrail.data.batch import Batch, ViewSpec
from vitrail.model.classifier import Classifier


class Objective(nn.Module):
    """`forward(batch)` gives `"loss"` and any other scalar worth plotting. The engine knows nothing else.

    `model` is what is kept when training ends; `views` says which augmented views a batch must carry; modules named in
    `frozen` (teachers) are stored in a checkpoint by name and hash, not by weights.
    """

    model: Classifier
    views: ViewSpec = ViewSpec()
    frozen: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    """Notes for the user before the run, though nothing is wrong."""
    reading: str = ""
    """How to read the metrics of the model, where it is not trained to classify."""
    host_decision: str = ""
    """Why no CUDA graph may replay forward and backward (any module may say so); empty: they are the same device work
    in every step of a phase."""

    @property
    def phase(self) -> int:
        """Changes where steps become other device work, as when a cached teacher is no longer asked."""
        return 0

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        raise NotImplementedError

    @property
    def listening(self) -> list[nn.Parameter]:
        """Parameters that learn from the others and must not touch them, not even by the norm that clips gradients."""
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
