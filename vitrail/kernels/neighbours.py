"""Comparisons with every row of a memory, a part of it at a time: nothing as large as queries x memory is ever kept.

Rows are compared by cosine. Queries [queries, width], memory [rows, width]; both are normalised here.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.kernels.similarity import PART, parts, top_rows


class _LogSums(torch.autograd.Function):
    """Streaming log-sum-exps over all rows but the query's own, and over those of its class among them."""

    @staticmethod
    def forward(
        ctx: Any, queries: Tensor, memory: Tensor, labels: Tensor, memory_labels: Tensor, own: Tensor, part: int
    ) -> tuple[Tensor, Tensor]:
        every = torch.full((len(queries),), float("-inf"), dtype=torch.float32, device=queries.device)
        same = every.clone()
        for rows in parts(len(queries), len(memory), part):
            scores, kin = _scores(queries, memory, labels, memory_labels, own, rows)
            every = torch.logaddexp(every, scores.logsumexp(1))
            same = torch.logaddexp(same, scores.masked_fill(~kin, float("-inf")).logsumexp(1))
        ctx.save_for_backward(queries, memory, labels, memory_labels, own, every, same)
        ctx.part = part
        return every, same

    @staticmethod
    def backward(ctx: Any, grad_every: Tensor, grad_same: Tensor) -> tuple[Tensor | None, ...]:
        queries, memory, labels, memory_labels, own, every, same = ctx.saved_tensors
        grad = torch.zeros_like(queries, dtype=torch.float32)
        # Without anyone of its class a query has an empty sum, which no query moves.
        grad_same = torch.where(torch.isfinite(same), grad_same, 0.0)
        for rows in parts(len(queries), len(memory), ctx.part):
            scores, kin = _scores(queries, memory, labels, memory_labels, own, rows)
            weights = grad_every[:, None] * (scores - every[:, None]).exp()
            inner = (scores - torch.where(torch.isfinite(same), same, 0.0)[:, None]).masked_fill(~kin, float("-inf"))
            weights = weights + grad_same[:, None] * inner.exp()
            grad += weights @ memory[rows].float()
        return grad.to(queries.dtype), None, None, None, None, None


def _scores(
    queries: Tensor, memory: Tensor, labels: Tensor, memory_labels: Tensor, own: Tensor, rows: slice
) -> tuple[Tensor, Tensor]:
    scores = queries.float() @ memory[rows].float().T
    place = torch.arange(rows.start, rows.stop, device=own.device)
    scores = scores.masked_fill(place[None] == own[:, None], float("-inf"))
    return scores, labels[:, None] == memory_labels[None, rows]


def neighbour_loss(
    queries: Tensor,
    memory: Tensor,
    labels: Tensor,
    memory_labels: Tensor,
    own: Tensor,
    temperature: float,
    part: int = PART,
) -> Tensor:
    """NCA loss: -log probability that a neighbour drawn by exp(cos / temperature) has the query's class; batch mean.

    `own` [queries] is each query's own row, which is left out (-1: it has none). Queries without positives in the
    memory do not count. Gradients reach the queries only (the kNN loss of Grafit, Touvron et al., 2020, arXiv
    2011.12982).
    """
    unit = F.normalize(queries.float(), dim=-1) / temperature
    rows = F.normalize(memory.detach().float(), dim=-1)
    every, same = _LogSums.apply(unit, rows, labels, memory_labels, own, part)
    counts = torch.isfinite(same)
    return torch.where(counts, every - torch.where(counts, same, 0.0), 0.0).sum() / counts.sum().clamp(min=1)


def nearest(
    queries: Tensor, memory: Tensor, k: int, own: Tensor | None = None, part: int = PART
) -> tuple[Tensor, Tensor]:
    """Cosines and rows of the k nearest, nearest first: [queries, k] each; exact, whatever the part.

    `own` [queries] is each query's own row, which does not count. Raises `ValueError` where there are fewer rows.
    """
    itself = int(own is not None)
    unit, rows = F.normalize(queries.float(), dim=-1), F.normalize(memory.float(), dim=-1)
    cosines, found = top_rows(unit, rows, k + itself, own=own, part=part)
    return cosines[:, itself:], found[:, itself:]


def neighbour_probabilities(
    cosines: Tensor, rows: Tensor, memory_labels: Tensor, classes: int, temperature: float
) -> Tensor:
    """kNN class probabilities, neighbours weighted by exp(cos / temperature): [queries, classes] (Grafit, arXiv
    2011.12982)."""
    weights = (cosines.float() / temperature).softmax(1)
    shares = torch.zeros(len(cosines), classes, device=cosines.device)
    return shares.scatter_add_(1, memory_labels[rows], weights)
