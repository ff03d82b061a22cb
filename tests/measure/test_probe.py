"""A grid of linear probes is as many plain loops, and its accuracy is that of a converged logistic regression."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler, normalize
from torch import Tensor

from vitrail.measure.evaluator import draw_by_class
from vitrail.measure.probe import LINEAR, ProbeSettings, linear_probe, prepared, train_probes


def blobs(rows: int, classes: int, width: int, noise: float, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(classes, width, generator=torch.Generator().manual_seed(99))
    label = torch.arange(rows) % classes
    return centres[label] + noise * torch.randn(rows, width, generator=generator), label


def plain_loop(features: Tensor, labels: Tensor, classes: int, settings: ProbeSettings) -> tuple[Tensor, Tensor]:
    """One linear layer, one learning rate, no grid."""
    layer = torch.nn.Linear(features.shape[1], classes)
    for value in layer.parameters():
        torch.nn.init.zeros_(value)
    (rate,), (decay,) = settings.learning_rates, settings.weight_decays
    moving = [torch.zeros_like(v) for v in layer.parameters()]
    generator = torch.Generator().manual_seed(settings.seed)
    total, step = settings.epochs * math.ceil(len(features) / settings.batch), 0
    for _ in range(settings.epochs):
        for some in torch.randperm(len(features), generator=generator).split(settings.batch):
            layer.zero_grad()
            F.cross_entropy(layer(features[some]), labels[some]).backward()
            now = rate * 0.5 * (1 + math.cos(math.pi * step / total))
            with torch.no_grad():
                for value, moved in zip(layer.parameters(), moving, strict=True):
                    assert value.grad is not None
                    moved.mul_(settings.momentum).add_(value.grad + decay * value)
                    value.sub_(now * moved)
            step += 1
    return layer.weight.detach(), layer.bias.detach()


def test_a_grid_of_one_is_a_plain_loop_bit_for_bit() -> None:
    features, labels = blobs(90, 4, 12, 1.0, 0)
    settings = ProbeSettings(learning_rates=(0.07,), weight_decays=(3e-3,), epochs=5, batch=32)
    probes = train_probes(features, labels, 4, settings)
    weight, bias = plain_loop(features, labels, 4, settings)
    assert probes.weight[0].equal(weight)
    assert probes.bias[0].equal(bias)


def test_every_point_of_a_grid_is_its_own_plain_loop() -> None:
    features, labels = blobs(90, 4, 12, 1.0, 0)
    grid = ProbeSettings(learning_rates=(0.01, 0.3), weight_decays=(0.0, 0.01), epochs=5, batch=32)
    probes = train_probes(features, labels, 4, grid)
    for point, (rate, decay) in enumerate(grid.grid):
        alone = ProbeSettings(learning_rates=(rate,), weight_decays=(decay,), epochs=5, batch=32)
        weight, _ = plain_loop(features, labels, 4, alone)
        # A wider product sums in another order: some float32 roundings over 15 steps.
        torch.testing.assert_close(probes.weight[point], weight, rtol=1e-5, atol=1e-6)


def test_updates_are_those_of_torch_sgd() -> None:
    features, labels = blobs(64, 3, 8, 1.0, 1)
    settings = ProbeSettings(learning_rates=(0.1,), weight_decays=(0.02,), epochs=1, batch=64, schedule="steps")
    layer = torch.nn.Linear(8, 3)
    for value in layer.parameters():
        torch.nn.init.zeros_(value)
    optimiser = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9, weight_decay=0.02)
    for share in (1.0, 1.0, 0.1, 0.01):  # four epochs of one step: a tenth from 3/8 on, a hundredth from 3/4
        optimiser.param_groups[0]["lr"] = 0.1 * share
        optimiser.zero_grad()
        F.cross_entropy(layer(features), labels).backward()
        optimiser.step()
    probes = train_probes(features, labels, 3, ProbeSettings(**{**vars(settings), "epochs": 4}))
    torch.testing.assert_close(probes.weight[0], layer.weight.detach(), rtol=1e-5, atol=1e-7)  # order of sums only


def test_a_converged_probe_is_logistic_regression() -> None:
    features, labels = blobs(300, 4, 6, 1.6, 2)
    decay = 0.01
    settings = ProbeSettings(learning_rates=(0.5,), weight_decays=(decay,), epochs=600, batch=300)
    probes = train_probes(features, labels, 4, settings)
    # The bias decays as the weights do, so it is a weight of a constant feature; C is per image, not per mean.
    with_one = np.concatenate([features.double().numpy(), np.ones((300, 1))], 1)
    oracle = LogisticRegression(C=1 / (300 * decay), fit_intercept=False, tol=1e-10, max_iter=5000)
    oracle.fit(with_one, labels.numpy())
    found = torch.cat([probes.weight[0], probes.bias[0][:, None]], 1)
    np.testing.assert_allclose(found.numpy(), oracle.coef_, atol=1e-4)  # float32 against float64, both converged


def test_accuracy_is_that_of_logistic_regression_on_noisy_data() -> None:
    train, test = blobs(600, 5, 10, 1.6, 2), blobs(1000, 5, 10, 1.6, 3)
    found = linear_probe(train, test, 5, ProbeSettings(normalise=False, epochs=60))
    scaler = StandardScaler().fit(train[0].numpy())
    oracle = LogisticRegression(max_iter=2000).fit(scaler.transform(train[0].numpy()), train[1].numpy())
    score = oracle.score(scaler.transform(test[0].numpy()), test[1].numpy())
    assert 0.6 < score < 0.95  # neither trivial nor separable
    # The same convex loss but for the decay, which is chosen: they may differ on images at the border, some of 1000.
    assert found.accuracy == pytest.approx(score, abs=0.015)


def test_of_equally_accurate_points_the_one_of_least_loss_is_chosen() -> None:
    train = blobs(200, 4, 16, 0.05, 4)
    settings = ProbeSettings(learning_rates=(0.001, 0.1), weight_decays=(0.0,), epochs=10)
    found = linear_probe(train, train, 4, settings)
    assert [accuracy for *_, accuracy in found.tried] == [1.0, 1.0]
    assert found.learning_rate == 0.1  # the other has hardly begun


def test_separable_data_are_separated() -> None:
    train, test = blobs(200, 4, 16, 0.05, 4), blobs(200, 4, 16, 0.05, 5)
    for settings in (ProbeSettings(epochs=10), ProbeSettings(**{**vars(LINEAR), "epochs": 10})):
        assert linear_probe(train, test, 4, settings).accuracy == 1.0


def test_preparation_is_that_of_scikit_learn_and_leaves_constants_alone() -> None:
    train, test = blobs(50, 3, 6, 1.0, 0)[0], blobs(20, 3, 6, 1.0, 1)[0]
    found = prepared(train, test)
    scaler = StandardScaler().fit(normalize(train.double().numpy()))
    np.testing.assert_allclose(found[1].numpy(), scaler.transform(normalize(test.double().numpy())), atol=1e-4)
    constant = torch.cat([train, torch.full((50, 1), 0.3)], 1)
    ready = prepared(constant, constant, normalise=False)
    assert all(values.isfinite().all() for values in ready)
    assert ready[0][:, -1].abs().max() < 1e-6


def test_the_best_point_is_chosen_on_val_and_not_on_test() -> None:
    train, val = blobs(120, 3, 8, 0.3, 0), blobs(60, 3, 8, 0.3, 1)
    settings = ProbeSettings(learning_rates=(0.0, 0.1), weight_decays=(0.0,), epochs=8)
    test = val[0], (val[1] + 1) % 3  # a test set on which a probe that learned nothing is the best
    found = linear_probe(train, test, 3, settings, val=val)
    assert found.learning_rate == 0.1
    assert [round(accuracy, 2) for *_, accuracy in found.tried] == [0.33, 1.0]
    assert found.accuracy == 0.0
    assert found.images == 180  # trained again on train and val
    assert linear_probe(train, test, 3, ProbeSettings(**{**vars(settings), "refit": False}), val=val).images == 120


def test_a_point_that_diverges_is_not_chosen() -> None:
    train = blobs(100, 3, 8, 1.0, 0)
    settings = ProbeSettings(
        learning_rates=(1e30, 0.1), weight_decays=(1.0,), epochs=5, batch=10, normalise=False, standardise=False
    )
    found = linear_probe(train, train, 3, settings)
    assert found.learning_rate == 0.1
    assert found.tried[0][2] == 0.0


def test_the_seed_decides_everything() -> None:
    train, test = blobs(100, 4, 6, 1.5, 0), blobs(80, 4, 6, 1.5, 1)
    runs = [linear_probe(train, test, 4, ProbeSettings(epochs=3, batch=16, seed=seed)) for seed in (1, 1, 2)]
    assert runs[0] == runs[1]
    assert runs[0].tried != runs[2].tried


def test_one_class_no_images_and_a_class_without_training_images() -> None:
    features = torch.randn(12, 4)
    alone = torch.zeros(12, dtype=torch.int64)
    assert linear_probe((features, alone), (features, alone), 1, ProbeSettings(epochs=1)).accuracy == 1.0
    known = (torch.arange(12) % 2) * 2  # classes 0 and 2 of three
    found = linear_probe((features, known), (features, torch.ones(12, dtype=torch.int64)), 3, ProbeSettings(epochs=40))
    assert found.accuracy == 0.0
    with pytest.raises(ValueError, match="needs training images"):
        train_probes(features[:0], alone[:0], 1, LINEAR)
    with pytest.raises(ValueError, match="label 2 is outside the 2 classes"):
        train_probes(features, known, 2, LINEAR)
    with pytest.raises(ValueError, match="single training image"):
        linear_probe((features[:3], torch.arange(3)), (features, known), 3, ProbeSettings(epochs=1))


def test_constant_features_give_the_most_frequent_class() -> None:
    labels = torch.tensor([1] * 30 + [0] * 10)
    constant = torch.ones(40, 5)
    found = linear_probe((constant, labels), (constant, labels), 2, ProbeSettings(epochs=20, batch=8))
    assert found.accuracy == 0.75


def test_draws_have_the_wanted_number_of_each_class_and_grow() -> None:
    labels = torch.tensor([0] * 10 + [2] * 3 + [3] * 20)[torch.randperm(33, generator=torch.Generator().manual_seed(0))]
    five, eight = (draw_by_class(labels, lambda _, n=n: n, seed=7) for n in (5, 8))
    assert torch.bincount(labels[five], minlength=4).tolist() == [5, 0, 3, 5]
    assert set(five.tolist()) <= set(eight.tolist())
    assert not five.equal(draw_by_class(labels, lambda _: 5, seed=8))


@pytest.mark.parametrize(
    "wrong", [{"learning_rates": ()}, {"epochs": 0}, {"batch": 0}, {"val_share": 0.0}, {"weight_decays": ()}]
)
def test_impossible_settings_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        ProbeSettings(**wrong)  # type: ignore[arg-type]
