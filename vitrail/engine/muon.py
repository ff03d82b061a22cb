"""Muon: orthogonalised momentum for the hidden weight matrices of a network, AdamW for everything else.

K. Jordan and others, "Muon: an optimizer for hidden layers in neural networks" (2024). Updates are scaled to the size
of AdamW's (J. Liu and others, arXiv 2502.16982), so that both share one learning rate and weight decay.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from vitrail.engine.shard import like, whole

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # a quintic that lifts singular values of (0, 1] quickly to about 1
STEPS = 5
ADAM_SIZE = 0.2  # root mean square of a usual AdamW update


def orthogonalised(matrices: Tensor, steps: int = STEPS) -> Tensor:
    """Near-orthogonal factors of matrices [n, rows, columns]: U Vᵀ with singular values within about 0.7 to 1.2.

    Newton-Schulz iterations in bf16, as published: noise on an update is harmless, and products are all there is. On a
    CPU they keep their precision: few CPUs multiply bf16, and on the others it is slower by far.
    """
    a, b, c = COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x if x.device.type == "cpu" else x.to(torch.bfloat16)
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).to(matrices.dtype)


class Muon(torch.optim.AdamW):
    """AdamW whose groups with `matrices=True` take Muon's step instead.

    Every weight of such a group is flattened to [out, rest] and is a stack of as many matrices as its entry of the
    group's `parts` says (q, k and v of a fused layer, groups of a convolution; none: 1 each). Matrices of one shape are
    orthogonalised together; sharded ones are gathered for that, one shape after the other. With `found_inf` set, a step
    with a non-finite gradient leaves weights and state as they were.
    """

    def __init__(self, params: Any, *, momentum: float = 0.95, **adam: Any) -> None:
        super().__init__(params, **adam)
        for group in self.param_groups:
            group.setdefault("matrices", False)
            group.setdefault("momentum", momentum)
            group.setdefault("parts", [1] * len(group["params"]))
            if group["matrices"]:
                for p in group["params"]:
                    self.state[p]["momentum_buffer"] = torch.zeros_like(p)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        groups = self.param_groups
        self.param_groups = [g for g in groups if not g["matrices"]]
        try:
            if self.param_groups:
                super().step(closure)
        finally:
            self.param_groups = groups
        bad: Tensor | None = getattr(self, "found_inf", None)
        for group in groups:
            if group["matrices"]:
                self._step_matrices(group, bad)

    def _step_matrices(self, group: dict[str, Any], bad: Tensor | None) -> None:
        trained = [(p, parts) for p, parts in zip(group["params"], group["parts"], strict=True) if p.grad is not None]
        if not trained:
            return
        params = [p for p, _ in trained]
        keep = torch.ones((), device=params[0].device) if bad is None else 1.0 - bad
        grads = [p.grad for p in params if p.grad is not None]
        if bad is not None:  # a skipped step moves nothing
            grads = [torch.where(bad.bool(), 0.0, g) for g in grads]
        buffers = [self.state[p]["momentum_buffer"] for p in params]
        away = torch._foreach_sub(grads, buffers)
        torch._foreach_mul_(away, keep * (1 - group["momentum"]))
        torch._foreach_add_(buffers, away)
        ahead = torch._foreach_lerp(grads, buffers, group["momentum"])  # Nesterov
        torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"] * keep)
        by_shape: dict[tuple[int, int], list[int]] = defaultdict(list)
        for i, (p, parts) in enumerate(trained):
            by_shape[p.shape[0] // parts, p.shape[1:].numel()].append(i)
        for (rows, columns), members in by_shape.items():
            stacked = torch.cat([whole(ahead[i]).reshape(-1, rows, columns) for i in members])
            scale = ADAM_SIZE * max(rows, columns) ** 0.5 * group["lr"] * keep
            updates = (orthogonalised(stacked) * scale).split([trained[i][1] for i in members])
            shaped = [
                like(update.reshape(params[i].shape), params[i]) for i, update in zip(members, updates, strict=True)
            ]
            torch._foreach_sub_([params[i] for i in members], shaped)
