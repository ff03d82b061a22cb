"""The batch that training steps and evaluations receive."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor


@dataclass
class Batch:
    """Some images, on the device, and (in training) augmented and mixed."""

    views: tuple[Tensor, ...]  # each [batch, 3, height, width]: bytes, which a model normalises, or normalised floats
    label: Tensor  # [batch] class, or [batch, classes] of 0/1 where several may hold
    target: Tensor  # what is learned: as `label`, or [batch, classes] of weights once images are mixed
    index: Tensor  # [batch] stable index of each image in its source
    levels: Tensor | None = None  # [batch, levels] class at each level of the taxonomy, finest first
    step: int = 0  # optimiser step the batch belongs to

    def changed(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """The batch with every tensor changed."""
        return replace(
            self,
            views=tuple(change(view) for view in self.views),
            label=change(self.label),
            target=change(self.target),
            index=change(self.index),
            levels=None if self.levels is None else change(self.levels),
        )

    def tensors(self) -> list[Tensor]:
        """Every tensor, in a fixed order."""
        levels = [] if self.levels is None else [self.levels]
        return [*self.views, self.label, self.target, self.index, *levels]

    @property
    def images(self) -> Tensor:
        """The first view."""
        return self.views[0]

    def __len__(self) -> int:
        return len(self.index)


@dataclass(frozen=True)
class View:
    """How one view of an image is made."""

    weak: bool = False  # by `data.weak` instead of `data.augment`
    size: int | None = None  # side in pixels; none: the model's
    scale: tuple[float, float] | None = None  # share of the area that a random resized crop covers; none: as set


@dataclass(frozen=True)
class ViewSpec:
    """Which augmented views of each image a batch must carry."""

    views: int = 1
    each: tuple[View, ...] = ()  # how; empty: all alike

    @classmethod
    def of(cls, *each: View) -> ViewSpec:
        """These views, in this order."""
        return cls(len(each), each)

    def all(self) -> tuple[View, ...]:
        """How each of the views is made."""
        return self.each or (View(),) * self.views
