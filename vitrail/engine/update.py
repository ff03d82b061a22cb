"""One optimiser update that never waits for the device, and the averages of what is logged."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from vitrail.engine.distributed import Group


class Updater:
    """Clips, guards and applies gradients.

    A gradient with NaN or infinity anywhere skips the whole update on the device (`found_inf` of the fused optimisers
    and of Lamb); the counters say so at the next logging step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, clip: float) -> None:
        self.optimizer, self.clip = optimizer, clip
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        device = self.parameters[0].device
        self.skipped = torch.zeros((), device=device)  # updates skipped since the last look
        self.last_skipped = torch.full((), -1.0, device=device)  # the step of the last one

    def apply(self, step: int) -> tuple[Tensor, Tensor]:
        """Apply the gradients of `step` and drop them; returns their norm and 1 where the update was made, else 0."""
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        bad = (~torch.isfinite(norm)).float()
        if self.clip:
            torch.nn.utils.clip_grads_with_norm_(self.parameters, self.clip, norm)
        self.optimizer.found_inf = bad  # type: ignore[attr-defined]
        self.optimizer.grad_scale = None  # type: ignore[attr-defined]
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.skipped += bad
        self.last_skipped = torch.where(bad.bool(), float(step), self.last_skipped)
        return norm, 1 - bad

    def look(self) -> tuple[int, int]:
        """How many updates were skipped since the last look, and the step of the last (waits for the device)."""
        count, last = int(self.skipped.item()), int(self.last_skipped.item())
        self.skipped.zero_()
        return count, last


class Meter:
    """Running means of scalars on the device; steps whose update was skipped do not count."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}

    def add(self, values: Mapping[str, Tensor], good: Tensor) -> None:
        keep = good.bool()
        for name, value in {**values, "": torch.ones_like(good)}.items():
            masked = torch.where(keep, value.detach().float(), 0.0)
            self.sums[name] = self.sums[name] + masked if name in self.sums else masked

    def read(self, group: Group) -> dict[str, float]:
        """Means since the last reading, over all processes; empty where nothing counted."""
        if not self.sums:
            return {}
        names = sorted(self.sums)
        stacked = torch.stack([self.sums[n] for n in names])
        if group.world > 1:
            torch.distributed.all_reduce(stacked)
        values = dict(zip(names, stacked.tolist(), strict=True))
        self.sums = {}
        count = values.pop("")
        return {name: value / count for name, value in values.items()} if count else {}
