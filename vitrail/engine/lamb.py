"""LAMB: Adam with a trust ratio for every tensor (arXiv 1904.00962)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class Lamb(torch.optim.Optimizer):
    """Layer-wise adaptive Adam, decoupled from clipping (the engine clips by the global norm before it).

    The trust ratio ‖w‖ / ‖update‖ applies to tensors that are decayed, as in timm, whose recipes we follow; biases and
    norms take plain Adam steps. With `found_inf` set, a step with a non-finite gradient leaves weights and state as
    they were, without asking the host.
    """

    _step_supports_amp_scaling = True  # the engine may set `found_inf`

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        if closure is not None:
            raise ValueError("Lamb takes no closure")
        bad: Tensor | None = getattr(self, "found_inf", None)
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                self._step_group(group, params, bad)

    def _step_group(self, group: dict[str, Any], params: list[Tensor], bad: Tensor | None) -> None:
        for p in params:
            state = self.state[p]
            if not state:
                state["step"] = torch.zeros((), device=p.device)
                state["exp_avg"] = torch.zeros_like(p)
                state["exp_avg_sq"] = torch.zeros_like(p)
        first = [self.state[p]["exp_avg"] for p in params]
        second = [self.state[p]["exp_avg_sq"] for p in params]
        counts = [self.state[p]["step"] for p in params]
        grads = [p.grad for p in params if p.grad is not None]
        if bad is not None:  # a skipped step moves nothing: neither weights, moments nor the count
            keep = 1.0 - bad
            grads = [g.masked_fill(bad.bool(), 0.0) for g in grads]
        else:
            keep = torch.ones((), device=params[0].device)
        (beta1, beta2), eps = group["betas"], group["eps"]
        torch._foreach_add_(counts, [keep] * len(counts))  # a tensor alone would be asked for its number
        step = counts[0].clamp(min=1.0)  # all tensors of a group have taken the same steps
        difference = torch._foreach_sub(grads, first)
        torch._foreach_mul_(difference, keep * (1 - beta1))
        torch._foreach_add_(first, difference)
        square = torch._foreach_mul(grads, grads)
        torch._foreach_sub_(square, second)
        torch._foreach_mul_(square, keep * (1 - beta2))
        torch._foreach_add_(second, square)
        root = torch._foreach_sqrt(second)
        torch._foreach_div_(root, (1 - beta2**step).sqrt())
        torch._foreach_add_(root, eps)
        update = list(torch._foreach_div(first, root))
        torch._foreach_div_(update, 1 - beta1**step)
        if group["weight_decay"]:
            torch._foreach_add_(update, params, alpha=group["weight_decay"])
            weights, updates = torch._foreach_norm(params), torch._foreach_norm(update)
            ratios = [(w / u).masked_fill((w <= 0) | (u <= 0), 1.0) for w, u in zip(weights, updates, strict=True)]
            torch._foreach_mul_(update, ratios)
        torch._foreach_mul_(update, group["lr"] * keep)
        torch._foreach_sub_(params, update)
