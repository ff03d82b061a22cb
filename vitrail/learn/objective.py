"""What every objective is: a module that turns a batch into losses."""

from __future__ import annotations

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
    capturable: bool = True
    """Whether forward and backward are the same device work in every step, so that a CUDA graph may replay them."""

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        raise NotImplementedError

    def after_step(self, step: int) -> None:
        """Momentum teachers, banks: what changes after optimiser step `step` (0 is the first); outside any graph."""
