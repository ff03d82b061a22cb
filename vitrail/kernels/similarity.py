"""Unit vectors compared with every row of a memory, block by block: softmax over it, and its nearest rows.

Nothing as large as queries x memory is kept, not for the backward pass either, and nothing is normalised or copied
there: the memory is read in place, in its own precision, and multiplied in float32 (a search in bfloat16 on CUDA: in
its own, summed in float32). Queries [queries, width], memory [rows, width]; `nearest` and what follows it normalise
both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor

PART = 1 << 24  # similarities that are held at once, with the rows they are of in float32
SEARCHED = 1 << 26  # the same of a search, which holds nothing else: larger parts, fewer kernels
GROUP = 256  # similarities of which the largest is compared first

Function = TypeVar("Function", bound=Callable[..., Any])


def parts(queries: int, rows: int, part: int) -> Iterator[slice]:
    """A memory of `rows` in pieces, of which `queries` have at most about `part` similarities."""
    size = max(1, part // max(1, queries))
    for first in range(0, rows, size):
        yield slice(first, min(first + size, rows))


def uncompiled(function: Function) -> Function:
    """Keep a function that reads or changes a memory out of compiled graphs.

    A compiler that holds both in one graph may compute a softmax anew for the backward pass, from the memory as it is
    by then: the gradient is silently another one (torch 2.15, backend `aot_eager`). The networks on either side, which
    are what costs, are compiled all the same.
    """
    return cast("Function", torch.compiler.disable(function))


@uncompiled
def attend(
    queries: Tensor, memory: Tensor, temperature: float, values: Tensor | None = None, part: int = PART
) -> tuple[Tensor, Tensor, Tensor]:
    """Means under p = softmax(queries @ memory.T / temperature), and its log-sum, without gradient.

    The mean under p of `values` [rows, any width] (none: of the memory itself), the log-sum of the softmax, and the
    mean under p of its scores: [queries, width], [queries] and [queries].
    """
    values = memory if values is None else values
    with torch.no_grad(), torch.autocast(queries.device.type, enabled=False):
        scaled = queries.float() / temperature
        highest = torch.full_like(scaled[:, 0], float("-inf"))
        total, score = torch.zeros_like(highest), torch.zeros_like(highest)
        mean = torch.zeros(len(queries), values.shape[1], device=queries.device)
        for rows in parts(len(queries), len(memory), part):
            held = memory[rows].float()
            scores = scaled @ held.T
            top = torch.maximum(highest, scores.amax(1))
            shrink, weights = (highest - top).exp(), (scores - top[:, None]).exp()
            total = total * shrink + weights.sum(1)
            score = score * shrink + (weights * scores).sum(1)
            mean = mean * shrink[:, None] + weights @ (held if values is memory else values[rows].float())
            highest = top
        return mean / total[:, None], highest + total.log(), score / total


Attend = Callable[..., tuple[Tensor, Tensor, Tensor]]
"""`attend`, or the same of a memory that is sharded over devices."""


class _LogSum(torch.autograd.Function):
    """The gradient of a log-sum is the mean row under its softmax, known with the log-sum itself.

    So nothing of the memory is saved, and it may change between the two passes.
    """

    @staticmethod
    def forward(ctx: Any, queries: Tensor, memory: Tensor, temperature: float, part: int, by: Attend) -> Tensor:
        mean, log_sum, _ = by(queries, memory, temperature, part=part)
        ctx.save_for_backward(mean)
        ctx.temperature, ctx.dtype = temperature, queries.dtype
        return log_sum

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (mean,) = ctx.saved_tensors
        return (grad[:, None] * mean / ctx.temperature).to(ctx.dtype), None, None, None, None


@uncompiled
def log_sum(queries: Tensor, memory: Tensor, temperature: float, part: int = PART, by: Attend = attend) -> Tensor:
    """log sum over rows of exp(query . row / temperature): [queries]. Gradients reach the queries only."""
    sums: Tensor = _LogSum.apply(queries, memory, temperature, part, by)
    return sums


@uncompiled
def relation_loss(
    student: Tensor,
    teacher: Tensor,
    anchors: Tensor,
    teacher_anchors: Tensor,
    temperature: float,
    teacher_temperature: float,
    part: int = PART,
    by: Attend = attend,
) -> Tensor:
    """KL(teacher || student) of their similarity distributions over the anchors, mean over queries.

    student, anchors [.., width], teacher, teacher_anchors [.., its width]; row j of both memories is one image. The
    widths may differ: only relations are compared (CompRess, arXiv 2010.14713; ISD, arXiv 2012.09259). Gradients reach
    `student` only.
    """
    expected, teacher_sum, teacher_score = by(teacher, teacher_anchors, teacher_temperature, anchors, part)
    # sum_j p_j log q_j = student . (sum_j p_j anchor_j) / temperature - log-sum: the products need not be kept.
    cross = log_sum(student, anchors, temperature, part, by) - (student.float() * expected).sum(1) / temperature
    return (teacher_score - teacher_sum + cross).mean()


def products(queries: Tensor, memory: Tensor) -> Tensor:
    """queries @ memory.T in float32: [queries, rows].

    On CUDA a memory of half precision is multiplied where it lies, with queries rounded as its rows are: a copy of it
    in float32 takes longer than the product.
    """
    if memory.is_cuda and memory.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(queries.to(memory.dtype), memory.T, out_dtype=torch.float32)
    return queries.float() @ memory.float().T


def largest(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """As `scores.topk(k, dim=1)` of scores [queries, rows], in less time where k is small.

    The k largest lie in the k groups whose largest are the k largest: the scores are read once, for the largest of
    every group, and only k groups are ranked.
    """
    rows = scores.shape[1]
    groups = rows // GROUP
    if groups < 4 * k:
        return scores.topk(k, dim=1)
    whole = groups * GROUP
    tiles = scores[:, :whole].unflatten(1, (groups, GROUP))
    near = tiles.amax(2).topk(k, dim=1, sorted=False).indices[..., None]
    inside = torch.arange(GROUP, device=scores.device)
    held = tiles.gather(1, near.expand(-1, -1, GROUP)).flatten(1)
    places = (near * GROUP + inside).flatten(1)
    if whole < rows:
        rest = torch.arange(whole, rows, device=scores.device)
        held, places = torch.cat([held, scores[:, whole:]], 1), torch.cat([places, rest.expand(len(scores), -1)], 1)
    top, order = held.topk(k, dim=1)
    return top, places.gather(1, order)


@uncompiled
def top_rows(
    queries: Tensor,
    memory: Tensor,
    k: int,
    own: Tensor | None = None,
    labels: Tensor | None = None,
    memory_labels: Tensor | None = None,
    part: int = SEARCHED,
) -> tuple[Tensor, Tensor]:
    """Products and rows of the k nearest, nearest first: [queries, k] each; exact, whatever the part.

    `own` [queries] is a row that comes first whatever its product, which is then infinite. With `labels` [queries] only
    rows of that label are taken (a negative one: any row); where they are fewer than k, the rest has a product of minus
    infinity. Raises `ValueError` where the memory has fewer than k rows.
    """
    if not 1 <= k <= len(memory):
        raise ValueError(f"k = {k}, but the memory has {len(memory)} rows")
    with torch.no_grad(), torch.autocast(queries.device.type, enabled=False):
        best = torch.zeros(len(queries), 0, device=queries.device)
        neighbours = torch.zeros(len(queries), 0, dtype=torch.int64, device=queries.device)
        for rows in parts(len(queries), len(memory), part):
            scores = products(queries, memory[rows])
            if labels is not None and memory_labels is not None:
                other = (labels[:, None] != memory_labels[None, rows]) & (labels[:, None] >= 0)
                scores.masked_fill_(other, float("-inf"))
            if own is not None:
                column = (own - rows.start).clamp(0, scores.shape[1] - 1)[:, None]
                here = ((own >= rows.start) & (own < rows.stop))[:, None]
                scores.scatter_(1, column, scores.gather(1, column).masked_fill(here, float("inf")))
            top, where = largest(scores, min(k, scores.shape[1]))
            del scores  # before the next ones come
            both, places = torch.cat([best, top], 1), torch.cat([neighbours, where + rows.start], 1)
            best, order = both.topk(min(k, both.shape[1]), dim=1)
            neighbours = places.gather(1, order)
        return best, neighbours


class _LogSums(torch.autograd.Function):
    """Streaming log-sum-exps over all rows but the query's own, and over those of its class among them."""

    @staticmethod
    def forward(
        ctx: Any, queries: Tensor, memory: Tensor, labels: Tensor, memory_labels: Tensor, own: Tensor, part: int
    ) -> tuple[Tensor, Tensor]:
        every = torch.full((len(queries),), float("-inf"), dtype=torch.float32, device=queries.device)
        same = every.clone()
        for rows in parts(len(queries), len(memory), part):
            scores, positive = _scores(queries, memory, labels, memory_labels, own, rows)
            every = torch.logaddexp(every, scores.logsumexp(1))
            same = torch.logaddexp(same, scores.masked_fill(~positive, float("-inf")).logsumexp(1))
        ctx.save_for_backward(queries, memory, labels, memory_labels, own, every, same)
        ctx.part = part
        return every, same

    @staticmethod
    def backward(ctx: Any, grad_every: Tensor, grad_same: Tensor) -> tuple[Tensor | None, ...]:
        queries, memory, labels, memory_labels, own, every, same = ctx.saved_tensors
        grad = torch.zeros_like(queries, dtype=torch.float32)
        # A query without positives has an empty sum, which no query moves.
        grad_same = torch.where(torch.isfinite(same), grad_same, 0.0)
        for rows in parts(len(queries), len(memory), ctx.part):
            scores, positive = _scores(queries, memory, labels, memory_labels, own, rows)
            weights = grad_every[:, None] * (scores - every[:, None]).exp()
            inner = scores - torch.where(torch.isfinite(same), same, 0.0)[:, None]
            weights = weights + grad_same[:, None] * inner.masked_fill(~positive, float("-inf")).exp()
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
    cosines, neighbours = top_rows(unit, rows, k + itself, own=own, part=part)
    return cosines[:, itself:], neighbours[:, itself:]


def neighbour_probabilities(
    cosines: Tensor, rows: Tensor, memory_labels: Tensor, classes: int, temperature: float
) -> Tensor:
    """kNN class probabilities, neighbours weighted by exp(cos / temperature): [queries, classes] (Grafit, arXiv
    2011.12982)."""
    weights = (cosines.float() / temperature).softmax(1)
    shares = torch.zeros(len(cosines), classes, device=cosines.device)
    return shares.scatter_add_(1, memory_labels[rows], weights)
