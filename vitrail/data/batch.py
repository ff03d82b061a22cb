"""What a training step and an evaluation receive."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass
class Batch:
    """Some images, on the device, normalised and (in training) augmented and mixed."""

    views: tuple[Tensor, ...]  # each [batch, 3, height, width], float
    label: Tensor  # [batch] class, or [batch, classes] of 0/1 where several may hold
    target: Tensor  # what is learned: as `label`, or [batch, classes] of weights once images are mixed
    index: Tensor  # [batch] stable index of each image in its source
    coarse: Tensor | None = None  # [batch] coarse class
    step: int = 0  # optimiser step the batch belongs to

    @property
    def images(self) -> Tensor:
        """The first view."""
        return self.views[0]

    def __len__(self) -> int:
        return len(self.index)


@dataclass(frozen=True)
class ViewSpec:
    """Which augmented views of each image a batch must carry."""

    views: int = 1
