"""Neighbours, instances, memory and retrieval against brute force (Grafit, arXiv 2011.12982)."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import average_precision_score
from sklearn.neighbors import NearestNeighbors

from vitrail.data.batch import Batch
from vitrail.kernels.similarity import nearest, neighbour_loss
from vitrail.learn.bank import ImageMemory
from vitrail.learn.config import GrafitConfig
from vitrail.learn.grafit import Grafit, instance_loss, triplet_loss
from vitrail.learn.objective import TrainingFacts, build_objective
from vitrail.learn.selfsupervised import MomentumCopy
from vitrail.measure.retrieval import (
    Embedded,
    average_precision,
    coarse_bonus,
    evaluate_retrieval,
    knn_accuracy,
    knn_probabilities,
    mean_average_precision,
)
from vitrail.model.build import create_model
from vitrail.model.classifier import Classifier


def by_hand(queries, memory, labels, memory_labels, own, temperature):
    terms = []
    for i in range(len(queries)):
        weights = {}
        for j in range(len(memory)):
            if j != own[i]:
                weights[j] = torch.exp(torch.cosine_similarity(queries[i], memory[j], dim=0) / temperature)
        kin = [w for j, w in weights.items() if memory_labels[j] == labels[i]]
        if kin:
            terms.append(-torch.log(torch.stack(kin).sum() / torch.stack(list(weights.values())).sum()))
    return torch.stack(terms).mean()


@pytest.mark.parametrize("part", [1 << 24, 20, 7])
def test_the_neighbour_loss_and_its_gradient_equal_brute_force(part: int) -> None:
    torch.manual_seed(0)
    queries = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    memory = torch.randn(11, 5, dtype=torch.float64)
    labels, memory_labels = torch.tensor([0, 1, 2, 0, 1, 9]), torch.randint(3, (11,))  # nobody else has class 9
    own = torch.tensor([0, 3, 10, -1, 5, -1])
    expected = by_hand(queries, memory, labels, memory_labels, own, 0.3)
    (expected_gradient,) = torch.autograd.grad(expected, queries)
    found = neighbour_loss(queries, memory, labels, memory_labels, own, 0.3, part)
    (gradient,) = torch.autograd.grad(found, queries)
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-5, atol=1e-6)


def test_a_single_class_has_no_neighbour_loss_and_nearer_kin_lower_it() -> None:
    torch.manual_seed(0)
    memory = torch.randn(9, 4)
    own = torch.full((3,), -1)
    zeros = torch.zeros(9, dtype=torch.int64)
    assert neighbour_loss(torch.randn(3, 4), memory, zeros[:3], zeros, own, 0.05) == pytest.approx(0, abs=1e-5)
    labels = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1, 1])
    far = neighbour_loss(memory[4:5], memory, labels[:1], labels, own[:1], 0.5)
    near = neighbour_loss(memory[0:1], memory, labels[:1], labels, own[:1], 0.5)
    assert near < far


def test_one_is_not_ones_own_neighbour() -> None:
    memory = F.normalize(torch.randn(4, 3), dim=-1)
    labels = torch.tensor([0, 1, 1, 1])  # class 0 has nobody but the query itself
    loss = neighbour_loss(memory[:1], memory, labels[:1], labels, torch.tensor([0]), 0.05)
    assert loss == 0  # so it does not count, where counting itself would have given nearly 0 and a gradient


@pytest.mark.parametrize("views", [2, 3, 5])
def test_the_instance_loss_is_the_mean_over_ordered_pairs(views: int) -> None:
    torch.manual_seed(0)
    online, target = torch.randn(4, views, 6, requires_grad=True), torch.randn(4, views, 6, requires_grad=True)
    pairs = [(i, j) for i in range(views) for j in range(views) if i != j]
    assert len(pairs) == views * (views - 1)
    cosines = [torch.cosine_similarity(online[:, i], target[:, j], dim=-1).mean() for i, j in pairs]
    found = instance_loss(online, target)
    torch.testing.assert_close(found, -torch.stack(cosines).mean())
    found.backward()
    assert target.grad is None
    assert online.grad is not None
    same = torch.randn(4, 1, 6).expand(4, views, 6)
    assert instance_loss(same, same) == pytest.approx(-1, abs=1e-6)
    assert instance_loss(same, -same) == pytest.approx(1, abs=1e-6)


def test_the_triplet_loss_takes_the_hardest_pair() -> None:
    torch.manual_seed(0)
    x, labels = torch.randn(7, 4), torch.tensor([0, 0, 0, 1, 1, 2, 2])
    terms = []
    for i in range(7):
        d = [1 - float(torch.cosine_similarity(x[i], x[j], dim=0)) for j in range(7)]
        hard_positive = max(d[j] for j in range(7) if j != i and labels[j] == labels[i])
        hard_negative = min(d[j] for j in range(7) if labels[j] != labels[i])
        terms.append(max(0.0, hard_positive - hard_negative + 0.2))
    assert triplet_loss(x, labels, 0.2) == pytest.approx(sum(terms) / 7, rel=1e-5)
    assert triplet_loss(x, torch.zeros(7), 0.2) == 0


def test_a_memory_row_becomes_the_average_of_old_and_new() -> None:
    index = np.array([40, 7, 12])
    bank = ImageMemory(index, 4, np.array([0, 1, 1]))
    before = bank.rows.clone()
    values = torch.randn(2, 4)
    bank.update(torch.tensor([12, 40]), values)
    torch.testing.assert_close(bank.rows[2], (before[2] + values[0]) / 2)
    torch.testing.assert_close(bank.rows[0], (before[0] + values[1]) / 2)
    assert torch.equal(bank.rows[1], before[1])
    bank.update(torch.tensor([7]), values[:1], share=1.0)  # a refresh
    assert torch.equal(bank.rows[1], values[0])
    assert "rows" in bank.state_dict()
    with pytest.raises(ValueError, match="one label and one index"):
        ImageMemory(np.array([1, 1]), 4, np.array([0, 0]))


def test_a_momentum_copy_follows_and_may_end_still() -> None:
    model = torch.nn.Linear(3, 2)
    copy = MomentumCopy(model, 0.9, steps=10)
    before = copy.module.weight.clone()
    with torch.no_grad():
        model.weight += 1
    copy.follow(model, 0)
    torch.testing.assert_close(copy.module.weight, before + 0.1)
    assert copy.decay_at(0) == pytest.approx(0.9)
    assert copy.decay_at(5) == pytest.approx(0.95)
    assert copy.decay_at(10) == pytest.approx(1.0)
    assert MomentumCopy(model, 0.9).decay_at(10) == 0.9
    assert not any(p.requires_grad for p in copy.parameters())


def projected(**head: object) -> Classifier:
    torch.manual_seed(0)
    options = {"kind": "projected", "width": 8, "hidden": 16, **head}
    return create_model("vit_micro_28", classes=3, depth=1, width=16, heads=2, head=options)


def batch_of(views: int, count: int = 6) -> Batch:
    generator = torch.Generator().manual_seed(0)
    images = tuple(torch.randn(count, 3, 28, 28, generator=generator) for _ in range(views))
    labels = torch.arange(count) % 3
    return Batch(images, labels, labels, torch.arange(count) * 2)


FACTS = TrainingFacts(np.arange(10) % 3, np.arange(10) * 2, 20)


def test_the_objective_is_the_sum_of_its_parts_and_updates_what_it_must() -> None:
    config = GrafitConfig(views=3, predictor_hidden=16, classification=0.5, triplet=0.25, instance=2.0)
    objective = build_objective(config, projected(), FACTS)
    assert isinstance(objective, Grafit)
    assert objective.views.views == 3
    batch = batch_of(3)
    rows = objective.bank.rows.clone()
    start = {n: p.clone() for n, p in objective.target.module.named_parameters()}
    losses = objective(batch)
    with torch.no_grad():  # in one call, as the objective: the predictor's BatchNorm sees all views together
        out = objective.model.outputs(torch.cat(batch.views))
        online = objective.predictor(out.embedding).unflatten(0, (3, 6))
        target = objective.target.classifier.outputs(torch.cat(batch.views)).embedding.unflatten(0, (3, 6))
        own = torch.arange(6)  # images 0, 2, ..., 10 are rows 0 to 5
        parts = {
            "neighbours": by_hand(out.embedding[:6], rows, batch.label, objective.bank.labels, own, 0.05),
            "instance": -torch.stack(
                [F.cosine_similarity(online[i], target[j], dim=-1).mean() for i in range(3) for j in range(3) if i != j]
            ).mean(),
            "classification": F.cross_entropy(out.stack[:6, 0], batch.label),
            "triplet": triplet_loss(out.embedding[:6], batch.label, 0.2),
        }
    for name, value in parts.items():
        torch.testing.assert_close(losses[name], value, rtol=1e-4, atol=1e-6)
    weights = {"neighbours": 1.0, "instance": 2.0, "classification": 0.5, "triplet": 0.25}
    torch.testing.assert_close(losses["loss"].detach(), sum(w * losses[name] for name, w in weights.items()))
    losses["loss"].backward()
    assert all(p.grad is None for p in objective.target.parameters())
    assert torch.equal(objective.bank.rows, rows), "the memory must not move before the step"
    with torch.no_grad():
        first = F.normalize(objective.model.outputs(batch.images).embedding, dim=-1)
        for p in objective.model.parameters():
            p.add_(0.1)
    objective.after_step(0)
    torch.testing.assert_close(objective.bank.rows[:6], (rows[:6] + first) / 2, rtol=1e-4, atol=1e-5)
    assert torch.equal(objective.bank.rows[6:], rows[6:])
    for name, p in objective.target.module.named_parameters():
        torch.testing.assert_close(p, start[name] + 0.01 * 0.1, rtol=1e-4, atol=1e-6)


def test_baselines_are_the_same_objective_with_other_weights() -> None:
    only = build_objective(GrafitConfig(neighbours=0, instance=0, classification=1), projected(projector="none"), FACTS)
    batch = batch_of(1)
    plain = F.cross_entropy(only.model(batch.images), batch.label)
    assert float(only(batch)["loss"].detach()) == pytest.approx(float(plain.detach()), rel=1e-6)
    assert only.views.views == 1
    assert not any(name.startswith(("bank", "target", "predictor")) for name in only.state_dict())


@pytest.mark.parametrize("only", ["neighbours", "instance", "triplet", "classification"])
def test_every_loss_over_embeddings_trains_the_projector_and_labels_alone_do_not(only: str) -> None:
    weights = {name: float(name == only) for name in ("neighbours", "instance", "triplet", "classification")}
    made = build_objective(GrafitConfig(views=2, **weights), projected(), FACTS)
    assert isinstance(made, Grafit)
    made(batch_of(2 if only == "instance" else 1))["loss"].backward()
    projector = dict(made.head.projector.named_parameters())
    assert projector
    found = {name: p.grad is not None and bool(p.grad.any()) for name, p in projector.items() if p.requires_grad}
    assert found == ({} if only == "classification" else dict.fromkeys(projector, True))


def test_sizes_of_the_projectors_are_those_of_the_thesis() -> None:
    """Grafit prints 23.5 M, 32.9 M with the MLP and 23.8 M with a linear map, which is one to 128."""
    trunk = 23_508_032
    for options, millions in (
        ({"projector": "mlp", "width": 256}, 32.945),
        ({"projector": "linear", "width": 128}, 23.770),
    ):
        model = create_model("timm:resnet50", classes=3, head={"kind": "projected", **options}, device="meta")
        projector = sum(p.numel() for p in model.head.projector.parameters())
        assert sum(p.numel() for p in model.trunk.parameters()) == trunk
        assert round((trunk + projector) / 1e6, 3) == millions


def test_what_does_not_fit_is_refused_with_the_remedy() -> None:
    plain = create_model("vit_micro_28", classes=3, depth=1)
    with pytest.raises(ValueError, match=r"--model\.head\.kind projected"):
        build_objective(GrafitConfig(), plain, FACTS)
    with pytest.raises(ValueError, match="use 2 or more"):
        build_objective(GrafitConfig(views=1), projected(), FACTS)


# Retrieval


def test_nearest_equals_scikit_learn_in_parts() -> None:
    rng = np.random.default_rng(0)
    queries, memory = rng.normal(size=(9, 6)), rng.normal(size=(57, 6))
    oracle = NearestNeighbors(n_neighbors=5, metric="cosine", algorithm="brute").fit(memory)
    distance, place = oracle.kneighbors(queries)
    for part in (1 << 24, 50):
        cosines, rows = nearest(torch.tensor(queries), torch.tensor(memory), 5, part=part)
        assert np.array_equal(rows.numpy(), place)
        assert np.allclose(1 - cosines.numpy(), distance, atol=1e-6)
    with pytest.raises(ValueError, match="the memory has 57 rows"):
        nearest(torch.tensor(queries), torch.tensor(memory), 58)


def test_neighbours_vote_by_their_nearness() -> None:
    torch.manual_seed(0)
    queries, memory, labels = torch.randn(4, 5), torch.randn(20, 5), torch.randint(3, (20,))
    found = knn_probabilities(queries, memory, labels, 3, 7, 0.1)
    for i in range(4):
        cosines = [float(torch.cosine_similarity(queries[i], m, dim=0)) for m in memory]
        best = sorted(range(20), key=lambda j: -cosines[j])[:7]
        votes = [sum(math.exp(cosines[j] / 0.1) for j in best if labels[j] == c) for c in range(3)]
        assert found[i].tolist() == pytest.approx([v / sum(votes) for v in votes], rel=1e-4, abs=1e-6)
    right = knn_accuracy(memory, labels, memory, labels, neighbours=(1, 5))
    assert right[1] == 1.0  # the nearest of each is itself


def test_average_precision_equals_scikit_learn() -> None:
    rng = np.random.default_rng(0)
    scores, relevant = rng.normal(size=(8, 40)), rng.random((8, 40)) < 0.2
    found = average_precision(torch.tensor(scores), torch.tensor(relevant))
    expected = [average_precision_score(r, s) for r, s in zip(relevant, scores, strict=True)]
    assert found.tolist() == pytest.approx(expected)


def test_conditioning_keeps_the_order_when_uniform_and_puts_the_true_coarse_class_first_when_certain() -> None:
    torch.manual_seed(0)
    memory_coarse = torch.randint(4, (30,))
    cosine = torch.rand(5, 30) * 2 - 1
    uniform = cosine + coarse_bonus(torch.full((5, 4), 0.25), memory_coarse)
    assert torch.equal(uniform.argsort(1), cosine.argsort(1))
    truth = torch.randint(4, (5,))
    oracle = cosine + coarse_bonus(F.one_hot(truth, 4).float(), memory_coarse)
    for i in range(5):
        ranked = memory_coarse[oracle[i].argsort(descending=True)] == truth[i]
        assert ranked[: int(ranked.sum())].all()


def test_random_embeddings_reach_the_prior_and_with_an_oracle_the_prior_within_the_coarse_class() -> None:
    """100 classes of 20, 5 to a coarse class: 1 % and 20 %, both a little above for small classes."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(100).repeat_interleave(60)
    coarse = labels // 5
    memory = torch.randn(6000, 16, generator=generator)
    rows = torch.arange(0, 6000, 30)
    queries = torch.randn(len(rows), 16, generator=generator)
    plain = mean_average_precision(queries, labels[rows], memory, labels)
    oracle = mean_average_precision(
        queries, labels[rows], memory, labels, coarse=F.one_hot(coarse[rows]).float(), memory_coarse=coarse, part=10**5
    )
    assert plain == pytest.approx(0.0100, abs=0.003)
    assert oracle == pytest.approx(0.201, abs=0.02)
    with pytest.raises(ValueError, match="a conditioned ranking needs"):
        mean_average_precision(queries, labels[rows], memory, labels, memory_coarse=coarse)


def test_retrieval_is_conditioned_on_the_coarse_class_that_neighbours_vote_for() -> None:
    """Grafit's conditioned score and kNN classifier image by image, ranked by scikit-learn."""
    torch.manual_seed(0)
    coarse_of = torch.tensor([0, 0, 1, 1, 1])
    fine, memory_fine = torch.randint(5, (12,)), torch.arange(60) % 5
    centres = torch.randn(5, 6)

    def seen(labels: torch.Tensor) -> Embedded:
        vectors = centres[labels] + 1.5 * torch.randn(len(labels), 6)
        return Embedded(vectors, labels, torch.stack([labels, coarse_of[labels]], 1))

    queries, memory = seen(fine), seen(memory_fine)
    data = SimpleNamespace(
        split="test", levels=("fine", "coarse"), embedded={"test": queries, "train": memory}, loaders={}
    )
    found = evaluate_retrieval(torch.nn.Identity(), data)["numbers"]
    expected: dict[str, list[float]] = {"map": [], "map_conditioned": [], "map_oracle": []}
    for query, label in zip(queries.embedding, fine.tolist(), strict=True):
        cosines = [float(torch.cosine_similarity(query, row, dim=0)) for row in memory.embedding]
        nearest_rows = sorted(range(60), key=lambda j: -cosines[j])[:30]
        votes = [sum(math.exp(cosines[j] / 0.05) for j in nearest_rows if coarse_of[j % 5] == c) for c in range(2)]
        for name, chances in (
            ("map", [0.5, 0.5]),
            ("map_conditioned", [v / sum(votes) for v in votes]),
            ("map_oracle", [float(coarse_of[label] == c) for c in range(2)]),
        ):
            sure = [min(max(p, 1e-6), 1 - 1e-6) for p in chances]
            scores = [c + math.log(sure[k] / (1 - sure[k])) for j, c in enumerate(cosines) for k in [coarse_of[j % 5]]]
            expected[name].append(average_precision_score((memory_fine == label).numpy(), scores))
    for name, values in expected.items():
        assert found[name] == pytest.approx(np.mean(values), rel=1e-5), name
    assert found["map"] < found["map_conditioned"] < found["map_oracle"]


def test_coarse_training_is_judged_on_fine_neighbours_and_can_be_evaluated_again(tmp_path: Path) -> None:
    import vitrail
    from vitrail.recipes import recipe, with_values

    config = with_values(
        recipe("small-grafit"),
        {
            "out": str(tmp_path / "run"),
            "data.uri": "synthetic:shapes?n=120&size=32",
            "data.batch": 24,
            "data.workers": 0,
            "optim.steps": 3,
            "engine.device": "cpu",
            "model.trunk": {"depth": 8},
            "evaluators": ("knn", "retrieval"),
        },
    )
    run = vitrail.train(config, quiet=True)
    data = vitrail.open_data("synthetic:shapes?n=120&size=32")
    fine, coarse = (level.classes for level in data.levels)
    assert run.model.classes == coarse
    assert len(fine) > len(coarse)
    final = json.loads((run.path / "metrics.jsonl").read_text().splitlines()[-1])
    assert {"knn", "knn_fine", "knn_coarse", "map", "map_conditioned", "map_oracle"} <= final.keys()
    assert final["knn"] == final["knn_fine"]
    assert final["map_oracle"] >= final["map"]
    again, _, split = vitrail.evaluate(run.path, "synthetic:shapes?n=120&size=32", device="cpu")
    assert split == "test"
    assert again.scalars()["top1"] == pytest.approx(run.figures.scalars()["top1"])
