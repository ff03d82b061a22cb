"""One optimiser update that never waits for the device, and the averages of what is logged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from vitrail.engine.distributed import Group


class Updater:
    """Clips, guards and applies gradients.

    Parameters that only listen to the others are clipped by a norm of their own: they may not make the others' steps
    smaller. The norm that is told is the others'. A gradient with NaN or infinity anywhere skips the whole update on
    the device (`found_inf` of the fused optimisers and of Lamb); the counters say so at the next logging step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, clip: float, listening: Sequence[Tensor] = ()) -> None:
        self.optimizer, self.clip = optimizer, clip
        apart = {id(p) for p in listening}
        every = [p for group in optimizer.param_groups for p in group["params"]]
        self.parameters = [p for p in every if id(p) not in apart]
        self.listening = [p for p in every if id(p) in apart]
        device = every[0].device
        self.clock = torch.zeros((), device=device)  # the step that is being made
        self.skipped = torch.zeros((), device=device)  # updates skipped since the last look
        self.last_skipped = torch.full((), -1.0, device=device)  # the step of the last one

    def apply(self) -> tuple[Tensor, Tensor]:
        """Apply the gradients and drop them; returns their norm and 1 where the update was made, else 0."""
        groups = [part for part in (self.parameters, self.listening) if part]
        norms = [torch.nn.utils.get_total_norm([p.grad for p in part if p.grad is not None]) for part in groups]
        norm, bad = norms[0], (~torch.isfinite(torch.stack(norms)).all()).float()
        if self.clip:
            for part, own in zip(groups, norms, strict=True):
                torch.nn.utils.clip_grads_with_norm_(part, self.clip, own)
        self.optimizer.found_inf = bad  # type: ignore[attr-defined]
        self.optimizer.grad_scale = None  # type: ignore[attr-defined]
        self._decay(1 - bad)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.skipped += bad
        self.last_skipped.copy_(torch.where(bad.bool(), self.clock, self.last_skipped))
        return norm, 1 - bad

    @torch.no_grad()
    def _decay(self, good: Tensor) -> None:
        """Decoupled weight decay of groups whose decay changes in the course of the run, as AdamW applies it."""
        for group in self.optimizer.param_groups:
            weights = [p for p in group["params"] if p.grad is not None] if "decay" in group else []
            if weights:
                torch._foreach_mul_(weights, 1 - group["lr"] * group["decay"] * good)

    def look(self) -> tuple[int, int]:
        """How many updates were skipped since the last look, and the step of the last (waits for the device)."""
        count, last = int(self.skipped.item()), int(self.last_skipped.item())
        self.skipped.zero_()
        return count, last


class Statistics:
    """Running statistics of batch norms, which a forward pass moves before anybody knows whether its step counts."""

    def __init__(self, module: nn.Module) -> None:
        self.buffers = [
            b for norm in batch_norms(module) for b in (norm.running_mean, norm.running_var) if b is not None
        ]
        self._before: Tensor | None = None

    def keep(self) -> None:
        """Remember them as they are before a step."""
        if self.buffers:
            self._before = self._now()

    def settle(self, good: Tensor) -> None:
        """As the step left them where it is good (1), as they were before where it was skipped (0)."""
        if self._before is not None:
            self._write(torch.where(good.bool(), self._now(), self._before))
            self._before = None

    def agree(self, group: Group) -> None:
        """The mean over processes, each of which saw other images (all must call it)."""
        if group.world > 1 and self.buffers:
            mean = self._now()
            torch.distributed.all_reduce(mean)
            self._write(mean / group.world)

    def _now(self) -> Tensor:
        return torch.cat([b.flatten() for b in self.buffers])

    def _write(self, flat: Tensor) -> None:
        parts = flat.split([b.numel() for b in self.buffers])
        torch._foreach_copy_(self.buffers, [part.view_as(b) for part, b in zip(parts, self.buffers, strict=True)])


def batch_norms(module: nn.Module) -> list[nn.modules.batchnorm._BatchNorm]:
    """Every batch norm of a module, of any number of dimensions."""
    return [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]


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
