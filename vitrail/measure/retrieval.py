"""Retrieval and kNN classification by embeddings, at every granularity (Grafit, arXiv 2011.12982), and the purity of
neighbourhoods (MSF, arXiv 2105.07269).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.data.batch import Batch
from vitrail.kernels.similarity import PART, nearest, neighbour_probabilities, parts, top_rows
from vitrail.measure.evaluator import Findings, Loaders, Model, Where, batches, evaluator, rows_of_all
from vitrail.model.classifier import Classifier

NEIGHBOURS = (10, 15, 20, 25, 30)
RANKS = (1, 2, 4, 8)  # of R@k
TEMPERATURE = 0.05
BENCHMARK = (200, 0.1)  # neighbours and temperature of the usual benchmarks of self-supervised learning (lightly)
Rows = tuple[Tensor, Tensor]  # features [rows, width] and labels [rows]
QUERIES = 1024  # whose votes for every class are counted at once
CERTAIN = 1e-6  # probabilities of a coarse class are kept this far from 0 and 1


@dataclass(frozen=True)
class Embedded:
    """Embeddings of images and their labels, on the device of the model."""

    embedding: Tensor  # [images, width]
    label: Tensor  # [images] class
    levels: Tensor | None  # [images, levels] class at every level of a taxonomy, finest first

    @property
    def rows(self) -> Rows:
        """Embeddings and labels."""
        return self.embedding, self.label

    def __len__(self) -> int:
        return len(self.label)


def embed_all(model: nn.Module, loader: Iterable[Batch], **where: Unpack[Where]) -> Embedded:
    """Embeddings of every image of `loader`, in evaluation mode; training flags are put back.

    In a process group all ranks get the images of all ranks, ordered by index.
    """
    if not isinstance(model, Classifier):
        raise ValueError(f"embeddings need a classifier of ours, not {type(model).__name__}")
    pieces: list[list[Tensor]] = []
    for batch, images in batches(model, loader, **where):
        known = [column for column in (batch.label, batch.levels) if column is not None]
        vectors = model.outputs(images).representation.float()
        pieces.append([batch.index.to(images.device), vectors, *(column.to(images.device) for column in known)])
    columns = rows_of_all([torch.cat(column) for column in zip(*pieces, strict=True)] or None)
    if columns is None:
        raise ValueError("there is nothing to embed: the loader gave no images; check that the split is not empty")
    return Embedded(columns[1], columns[2], columns[3] if len(columns) > 3 else None)


def embedded_split(model: Model, data: Loaders, split: str, **where: Unpack[Where]) -> Embedded:
    """Embeddings of a split, with one label per image; computed once where evaluators share them (`data.embedded`)."""
    kept: dict[str, Embedded] | None = data.embedded
    if kept is not None and split in kept:
        return kept[split]
    if split not in data.loaders:
        raise ValueError(
            f"neighbours and probes need {'training' if split == 'train' else split} images, of which there are none "
            "here; name data with such a split"
        )
    assert isinstance(model, nn.Module)
    embedded = embed_all(model, data.loaders[split], **where)
    if embedded.label.ndim == 2:
        raise ValueError("neighbours, probes and clusters need one label per image; these data have several")
    if kept is not None:
        kept[split] = embedded
    return embedded


def knn_probabilities(
    queries: Tensor,
    memory: Tensor,
    memory_labels: Tensor,
    classes: int,
    k: int,
    temperature: float = TEMPERATURE,
    own: Tensor | None = None,
) -> Tensor:
    """On-the-fly classification: [queries, classes] from the k nearest of the memory (Grafit).

    `own` [queries] is each query's own row of the memory, which is excluded.
    """
    cosines, rows = nearest(queries, memory, min(k, len(memory) - (own is not None)), own)
    return neighbour_probabilities(cosines, rows, memory_labels, classes, temperature)


def knn_accuracy(
    queries: Tensor,
    labels: Tensor,
    memory: Tensor,
    memory_labels: Tensor,
    *,
    neighbours: Sequence[int] = NEIGHBOURS,
    temperature: float = TEMPERATURE,
    own: Tensor | None = None,
) -> dict[int, float]:
    """Top-1 share of right answers for each number of neighbours; one search serves all.

    `own` [queries] is each query's own row of the memory, which is excluded.
    """
    classes = int(max(labels.max(), memory_labels.max())) + 1
    most = min(max(neighbours), len(memory) - (own is not None))
    if most < 1:
        raise ValueError("there are no neighbours: the memory has no other image")
    cosines, rows = nearest(queries, memory, most, own)
    accuracies = {}
    for k in neighbours:
        pieces = zip(cosines[:, :k].split(QUERIES), rows[:, :k].split(QUERIES), strict=True)
        shares = (neighbour_probabilities(*piece, memory_labels, classes, temperature) for piece in pieces)
        guess = torch.cat([piece.argmax(1) for piece in shares])
        accuracies[k] = float((guess == labels).float().mean())
    return accuracies


def recall_at(
    queries: Tensor,
    labels: Tensor,
    memory: Tensor,
    memory_labels: Tensor,
    *,
    ranks: Sequence[int] = RANKS,
    own: Tensor | None = None,
) -> dict[int, float]:
    """R@k: share of queries with an item of their label among the k nearest; `own` as for `knn_accuracy`."""
    most = min(max(ranks), len(memory) - (own is not None))
    hits = memory_labels[nearest(queries, memory, most, own)[1]] == labels[:, None]
    return {k: float(hits[:, :k].any(1).float().mean()) for k in ranks}


def average_precision(scores: Tensor, relevant: Tensor) -> Tensor:
    """Average precision of every query: scores and relevance [queries, items] -> [queries]; 0 without a relevant item.

    Items of equal score count as ranked in the order in which they lie.
    """
    order = scores.argsort(dim=1, descending=True, stable=True)
    hits = relevant.gather(1, order).float()
    ranks = torch.arange(1, hits.shape[1] + 1, device=hits.device)
    precision = hits.cumsum(1) / ranks
    return (precision * hits).sum(1) / hits.sum(1).clamp(min=1)


def coarse_bonus(probabilities: Tensor, memory_coarse: Tensor) -> Tensor:
    """log p / (1 - p) of each item's coarse class for each query: [queries, items] from [queries, coarse]."""
    sure = probabilities.double().clamp(CERTAIN, 1 - CERTAIN)
    return (sure.log() - (-sure).log1p()).float()[:, memory_coarse]


def mean_average_precision(
    queries: Tensor,
    labels: Tensor,
    memory: Tensor,
    memory_labels: Tensor,
    *,
    coarse: Tensor | None = None,
    memory_coarse: Tensor | None = None,
    own: Tensor | None = None,
    part: int = 1 << 24,
) -> float:
    """Mean over queries of the average precision of a ranking of the whole memory; relevant: the same label.

    With `coarse` [queries, coarse classes] the ranking is conditioned on those probabilities of the query and the
    known coarse class of each item; one-hot rows are the oracle: everything of the true coarse class comes first.
    `own` [queries] is each query's own item, which does not count.
    """
    if (coarse is None) != (memory_coarse is None):
        raise ValueError("a conditioned ranking needs coarse probabilities of queries and coarse classes of items")
    unit, rows = F.normalize(queries.float(), dim=-1), F.normalize(memory.float(), dim=-1)
    total = 0.0
    size = max(1, part // max(1, len(memory)))
    for first in range(0, len(queries), size):
        chosen = slice(first, first + size)
        scores = unit[chosen] @ rows.T
        if coarse is not None and memory_coarse is not None:
            scores = scores + coarse_bonus(coarse[chosen], memory_coarse)
        relevant = labels[chosen, None] == memory_labels[None]
        if own is not None:
            itself = own[chosen, None]
            scores, relevant = scores.scatter(1, itself, float("-inf")), relevant.scatter(1, itself, False)
        total += float(average_precision(scores, relevant).sum())
    return total / len(queries)


def _both(model: Model, data: Loaders, **where: Unpack[Where]) -> tuple[Embedded, Embedded]:
    return embedded_split(model, data, data.split, **where), embedded_split(model, data, "train", **where)


def own_rows(data: Loaders, queries: Embedded) -> Tensor | None:
    """Where each query is itself in the memory [queries]; none where the two are of different splits."""
    return torch.arange(len(queries), device=queries.label.device) if data.split == "train" else None


def _granularities(data: Loaders, queries: Embedded, memory: Embedded) -> dict[str, tuple[Tensor, Tensor]]:
    """Labels of queries and memory at every level, by its name; without a taxonomy those of the classes."""
    if queries.levels is None or memory.levels is None:
        return {"": (queries.label, memory.label)}
    names = getattr(data, "levels", ()) or [str(i) for i in range(queries.levels.shape[1])]
    return {f"_{n}": (queries.levels[:, i], memory.levels[:, i]) for i, n in enumerate(names)}


@evaluator("train", "embedding")
def evaluate_neighbours(model: Model, data: Loaders, **where: Unpack[Where]) -> Findings:
    """On-the-fly classification among training images, at every level of a taxonomy.

    The metric `knn` is that of the finest level with 20 neighbours, `knn200` that with 200 neighbours at temperature
    0.1, where there are so many training images; the table has all.
    """
    queries, memory = _both(model, data, **where)
    own = own_rows(data, queries)
    pairs = {
        name: (queries.embedding, labels, memory.embedding, memory_labels)
        for name, (labels, memory_labels) in _granularities(data, queries, memory).items()
    }
    accuracies = {name: knn_accuracy(*pair, neighbours=(1, *NEIGHBOURS), own=own) for name, pair in pairs.items()}
    numbers = {f"knn{name}": values[20] for name, values in accuracies.items()}
    first = next(iter(numbers.values()))
    table = {n.lstrip("_") or "classes": {str(k): v for k, v in values.items()} for n, values in accuracies.items()}
    many, temperature = BENCHMARK
    if len(memory) > many:
        finest = next(iter(pairs.values()))
        numbers["knn200"] = knn_accuracy(*finest, neighbours=(many,), temperature=temperature, own=own)[many]
    return {"numbers": {"knn": first, **numbers}, "tables": {"knn": table}, "pictures": {}}


@evaluator("train", "embedding")
def evaluate_retrieval(model: Model, data: Loaders, **where: Unpack[Where]) -> Findings:
    """MAP of ranking all training images for each query, at the finest level, and R@k.

    With a taxonomy also conditioned on the coarsest level as the neighbours predict it (Grafit takes a classifier's own
    probabilities where there is one), and with that level known.
    """
    queries, memory = _both(model, data, **where)
    levels = list(_granularities(data, queries, memory).values())
    (fine, memory_fine), (coarse, memory_coarse) = levels[0], levels[-1]
    pairs, own = (queries.embedding, fine, memory.embedding, memory_fine), own_rows(data, queries)
    numbers = {"map": mean_average_precision(*pairs, own=own)}
    if len(levels) > 1:
        classes = int(max(coarse.max(), memory_coarse.max())) + 1
        most = max(NEIGHBOURS)
        guessed = knn_probabilities(queries.embedding, memory.embedding, memory_coarse, classes, most, own=own)
        ranking = partial(mean_average_precision, *pairs, memory_coarse=memory_coarse, own=own)
        numbers["map_conditioned"] = ranking(coarse=guessed)
        numbers["map_oracle"] = ranking(coarse=F.one_hot(coarse, classes).float())
    numbers |= {f"recall{k}": value for k, value in recall_at(*pairs, own=own).items()}
    return {"numbers": numbers, "tables": {}, "pictures": {}}


POSITIVES = 5  # as many as CMSF evaluates


def neighbour_purity(
    queries: Tensor,
    labels: Tensor,
    memory: Tensor,
    memory_labels: Tensor,
    k: int,
    *,
    own: Tensor | None = None,
    part: int = PART,
) -> float:
    """Mean share of the k nearest that have the query's class; of all of them where the memory has fewer.

    Queries [queries, width], memory [rows, width], compared by cosine. `own` [queries] is each query's own row of the
    memory, which does not count.
    """
    unit, rows = F.normalize(queries.float(), dim=1), F.normalize(memory.float(), dim=1)
    most = min(k + (own is not None), len(memory))
    if most <= (own is not None):
        raise ValueError("there are no neighbours: the memory has no other image")
    total = 0.0
    size = max(1, part // most)
    for first in range(0, len(unit), size):
        chosen = slice(first, first + size)
        _, neighbours = top_rows(unit[chosen], rows, most, own=None if own is None else own[chosen], part=part)
        neighbours = neighbours if own is None else neighbours[:, 1:]
        total += float((memory_labels[neighbours] == labels[chosen, None]).double().mean(1).sum())
    return total / len(unit)


def positive_ranks(
    queries: Tensor, labels: Tensor, memory: Tensor, memory_labels: Tensor, k: int, *, part: int = PART
) -> Tensor:
    """Rank in the whole memory, from 1, of the k-th nearest image of the query's class; [those with k such images].

    Equally near images of other classes count as farther.
    """
    unit, rows = F.normalize(queries.float(), dim=1), F.normalize(memory.float(), dim=1)
    if k > len(rows):
        return torch.zeros(0, dtype=torch.int64, device=rows.device)
    positive = top_rows(unit, rows, k, labels=labels, memory_labels=memory_labels, part=part)[0][:, -1]
    nearer = torch.zeros(len(unit), dtype=torch.int64, device=unit.device)
    for chunk in parts(len(unit), len(rows), part):
        # The same parts and the same product as in the search: an image is not nearer than itself by rounding.
        nearer += (unit @ rows[chunk].T > positive[:, None]).sum(1)
    return nearer[positive.isfinite()] + 1


@evaluator("train", "embedding")
def evaluate_purity(model: Model, data: Loaders, **where: Unpack[Where]) -> Findings:
    """Of the 5 nearest training images, and of as many as it takes to reach 5 of the query's class.

    `median_rank` is the median over queries of the rank of the fifth image of their class; 5 is the best there is.
    """
    queries, memory = _both(model, data, **where)
    pairs, own = (*queries.rows, *memory.rows), own_rows(data, queries)
    numbers = {"purity": neighbour_purity(*pairs, POSITIVES, own=own)}
    itself = int(own is not None)  # an image is its own nearest
    ranks = positive_ranks(*pairs, POSITIVES + itself) - itself
    if len(ranks):
        numbers["median_rank"] = float(ranks.double().quantile(0.5))
        numbers["purity_at_median_rank"] = neighbour_purity(*pairs, max(1, round(numbers["median_rank"])), own=own)
    return {"numbers": numbers, "tables": {}, "pictures": {}}
