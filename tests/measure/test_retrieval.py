"""Embeddings of a split: the same in one process and in several, and no image is its own find."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from processes import run_ranks
from sklearn.metrics import average_precision_score
from torch import Tensor

from vitrail.data.batch import Batch
from vitrail.data.dataset import UNLABELLED
from vitrail.measure.probe import evaluate_few
from vitrail.measure.retrieval import Embedded, embed_all, evaluate_neighbours, evaluate_retrieval
from vitrail.model.build import create_model
from vitrail.registry import kinds, part
from vitrail.run.evaluate import figures_of

IMAGES = 11


def model() -> Any:
    torch.manual_seed(0)
    return create_model("vit_micro_28", classes=3, depth=1, width=16, heads=2)


def batches(rows: list[int]) -> list[Batch]:
    pixels = torch.randn(IMAGES, 3, 28, 28, generator=torch.Generator().manual_seed(1))
    made = []
    for start in range(0, len(rows), 4):
        some = torch.tensor(rows[start : start + 4])
        levels = torch.stack([some % 3, some % 2], 1)
        made.append(Batch((pixels[some],), some % 3, some % 3, 100 + some, levels=levels))
    return made


def found(rows: list[int]) -> dict[str, Tensor]:
    made = embed_all(model(), batches(rows))
    assert made.levels is not None
    apart = model()
    apart.classes = (UNLABELLED,)
    figures, _ = figures_of(apart, batches(rows), (UNLABELLED,), device=torch.device("cpu"), autocast=None)
    spread = torch.tensor([figures.count, figures.spread, figures.rank], dtype=torch.float64)
    return {"embedding": made.embedding, "label": made.label, "levels": made.levels, "spread": spread}


def one_rank(rank: int, folder: str, shares: list[list[int]]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    try:
        torch.save(found(shares[rank]), f"{folder}/{rank}.pt")
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "shares",
    [[list(range(0, IMAGES, 2)), list(range(1, IMAGES, 2))], [list(range(IMAGES)), []]],
    ids=["odd number of images", "a rank without images"],
)
def test_two_processes_have_the_images_of_both(tmp_path: Path, shares: list[list[int]]) -> None:
    run_ranks(one_rank, str(tmp_path), shares)
    alone = found(list(range(IMAGES)))
    for rank in range(2):
        together = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        for name, value in alone.items():
            torch.testing.assert_close(together[name], value, rtol=1e-6, atol=1e-6)  # of float32 embeddings


def kept(split: str) -> SimpleNamespace:
    """Data whose embeddings are there already: 40 vectors with labels at random."""
    rng = np.random.default_rng(0)
    vectors = torch.from_numpy(rng.normal(size=(40, 6))).float()
    coarse = torch.from_numpy(rng.integers(0, 2, 40))
    fine = 2 * coarse + torch.from_numpy(rng.integers(0, 2, 40))
    train = Embedded(vectors, fine, torch.stack([fine, coarse], 1))
    held = {"train": train, split: train}
    return SimpleNamespace(
        split=split, embedded=held, loaders={}, classes=("a", "b", "c", "d"), levels=("fine", "coarse")
    )


def test_an_image_of_the_memory_is_not_its_own_neighbour() -> None:
    data = kept("train")
    vectors, labels = data.embedded["train"].embedding.numpy(), data.embedded["train"].label.numpy()
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    cosines = unit @ unit.T
    np.fill_diagonal(cosines, -np.inf)
    right = labels[cosines.argmax(1)] == labels
    table = evaluate_neighbours(model(), data)["tables"]["knn"]  # type: ignore[arg-type]
    assert table["fine"]["1"] == pytest.approx(right.mean())
    itself = evaluate_neighbours(model(), kept("test"))["tables"]["knn"]  # type: ignore[arg-type]
    assert itself["fine"]["1"] == 1.0  # the same images as another split find themselves


def test_two_hundred_neighbours_vote_as_in_the_benchmarks_of_self_supervised_learning() -> None:
    generator = torch.Generator().manual_seed(3)
    memory, queries = (
        Embedded(torch.randn(n, 5, generator=generator), torch.randint(3, (n,), generator=generator), None)
        for n in (230, 40)
    )
    data = SimpleNamespace(split="test", embedded={"train": memory, "test": queries}, loaders={}, classes=tuple("abc"))
    q, m = (rows.embedding / rows.embedding.norm(dim=1, keepdim=True) for rows in (queries, memory))
    votes = torch.zeros(40, 3)
    for i, cosines in enumerate(q @ m.T):
        for j in cosines.argsort(descending=True)[:200].tolist():
            votes[i, memory.label[j]] += (cosines[j] / 0.1).exp()
    expected = (votes.argmax(1) == queries.label).float().mean()
    numbers = evaluate_neighbours(model(), data)["numbers"]  # type: ignore[arg-type]
    assert numbers["knn200"] == pytest.approx(float(expected))


def test_an_image_of_the_memory_is_not_its_own_find() -> None:
    data = kept("train")
    vectors, labels = data.embedded["train"].embedding.numpy(), data.embedded["train"].label.numpy()
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    precisions = []
    for i in range(len(unit)):
        others = np.arange(len(unit)) != i
        precisions.append(average_precision_score(labels[others] == labels[i], (unit @ unit[i])[others]))
    numbers = evaluate_retrieval(model(), data)["numbers"]  # type: ignore[arg-type]
    assert numbers["map"] == pytest.approx(np.mean(precisions), abs=1e-6)
    assert numbers["map_oracle"] > numbers["map"]


def test_images_that_are_labelled_are_not_judged() -> None:
    assert "few" in kinds("evaluator")
    with pytest.raises(ValueError, match="evaluate another split"):
        evaluate_few(model(), kept("train"))  # type: ignore[arg-type]


def test_recall_is_that_of_a_sorted_list() -> None:
    data = kept("train")
    vectors, labels = data.embedded["train"].embedding.numpy(), data.embedded["train"].label.numpy()
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    numbers = evaluate_retrieval(model(), data)["numbers"]  # type: ignore[arg-type]
    for k in (1, 2, 4, 8):
        hits = []
        for i in range(len(unit)):
            order = [j for j in np.argsort(-(unit @ unit[i])) if j != i][:k]
            hits.append(labels[i] in labels[order])
        assert numbers[f"recall{k}"] == pytest.approx(np.mean(hits))


def test_the_published_probe_has_one_rate_and_no_choice() -> None:
    from vitrail.measure.probe import LINEAR, linear_probe

    data = kept("test")
    train = data.embedded["train"]
    pair = (train.embedding, train.label)
    expected = linear_probe(pair, pair, 4, settings=LINEAR).accuracy
    found = part("evaluator", "linear_published")(model(), data)["numbers"]  # type: ignore[arg-type]
    assert found == {"linear_published": expected}
