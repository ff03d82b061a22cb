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
        self.clock = torch.zeros((), device=device)  # the step that is being made
        self.skipped = torch.zeros((), device=device)  # updates skipped since the last look
        self.last_skipped = torch.full((), -1.0, device=device)  # the step of the last one

    def apply(self) -> tuple[Tensor, Tensor]:
        """Apply the gradients and drop them; returns their norm and 1 where the update was made, else 0."""
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
        self.last_skipped.copy_(torch.where(bad.bool(), self.clock, self.last_skipped))
        return norm, 1 - bad

    def look(self) -> tuple[int, int]:
        """How many updates were skipped since the last look, and the step of the last (waits for the device)."""
        count, last = int(self.skipped.item()), int(self.last_skipped.item())
        self.skipped.zero_()
        return count, last


class Meter:
    """Running means of scalars on the device; steps whose update was skipped do not count."""

    def __init__(self) -> None:
        self.names: tuple[str, ...] = ()
        self.totals: Tensor | None = None  # [names + 1], the count last; always the same memory

    def add(self, values: Mapping[str, Tensor], good: Tensor) -> None:
        names = tuple(sorted(values))
        if self.totals is None:
            self.names = names
            self.totals = torch.zeros(len(values) + 1, device=good.device)
        if names != self.names:
            raise ValueError(f"an objective gave {', '.join(self.names)} first and then {', '.join(names)}")
        now = torch.stack([*(values[name].detach().float() for name in names), torch.ones_like(good)])
        self.totals += torch.where(good.bool(), now, 0.0)

    def read(self, group: Group) -> dict[str, float]:
        """Means since the last reading, over all processes; empty where nothing counted."""
        if self.totals is None:
            return {}
        summed = self.totals.clone()
        if group.world > 1:
            torch.distributed.all_reduce(summed)
        *sums, count = summed.tolist()
        self.totals.zero_()
        return {name: value / count for name, value in zip(self.names, sums, strict=True)} if count else {}

    def state(self) -> dict[str, Tensor]:
        """Sums by name, the count as `count`; empty before the first step."""
        return {} if self.totals is None else dict(zip((*self.names, "count"), self.totals.unbind(), strict=True))

    def restore(self, state: Mapping[str, Tensor], device: torch.device) -> None:
        if not state:
            return
        self.names = tuple(name for name in sorted(state) if name != "count")
        self.totals = torch.stack([*(state[n] for n in self.names), state["count"]]).to(device, torch.float32)
