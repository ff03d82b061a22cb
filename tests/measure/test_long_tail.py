"""Long tails: Many, Med and Few, and losses that know how frequent classes are."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

import vitrail
from vitrail.cli import run
from vitrail.data.batch import Batch
from vitrail.learn.config import DistillationConfig, GrafitConfig, SupervisedConfig
from vitrail.learn.objective import TrainingFacts, build_objective
from vitrail.learn.supervised import Supervised, prior_shift
from vitrail.measure.classification import classification
from vitrail.measure.config import CLASS_COUNTS, LongTailConfig
from vitrail.measure.evaluator import Loaders
from vitrail.measure.long_tail import class_groups, group_of, long_tail
from vitrail.model.build import create_model
from vitrail.model.classifier import Classifier
from vitrail.recipes import recipe, with_values
from vitrail.registry import part
from vitrail.schema import ConfigError

# Many, Med, Few


def test_a_hundred_and_twenty_images_are_med() -> None:
    counts = [1280, 101, 100, 99, 21, 20, 19, 5, 0]
    assert [group_of(n) for n in counts] == ["many"] * 2 + ["med"] * 4 + ["few"] * 3
    assert class_groups(counts).tolist() == [0, 0, 1, 1, 1, 1, 2, 2, 2]


def test_the_bounds_can_be_moved() -> None:
    assert class_groups([51, 50, 10, 9], LongTailConfig(many=50, few=10)).tolist() == [0, 1, 1, 2]
    with pytest.raises(ConfigError, match="overlap"):
        class_groups([1, 2], LongTailConfig(many=10, few=20))


def test_thirds_have_equally_many_classes_by_rank() -> None:
    counts = np.array([3, 90, 40, 7, 500, 2])
    assert class_groups(counts, LongTailConfig(groups="thirds")).tolist() == [2, 0, 1, 1, 0, 2]
    ten = class_groups(np.arange(10)[::-1], LongTailConfig(groups="thirds"))
    assert np.bincount(ten).tolist() == [4, 3, 3]


def said(seed: int = 0, images: int = 300, classes: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(images, classes, generator=generator), torch.randint(classes, (images,), generator=generator)


def test_accuracy_of_a_group_is_that_of_its_images() -> None:
    logits, target = said()
    counts = [200, 150, 100, 30, 10, 3]
    found = long_tail(classification(logits, target), counts).groups
    right = (logits.argmax(1) == target).numpy()
    for name, classes in {"many": (0, 1), "med": (2, 3), "few": (4, 5), "all": range(6)}.items():
        inside = np.isin(target.numpy(), list(classes))
        assert found[name].accuracy == pytest.approx(right[inside].mean())
        assert found[name].balanced == pytest.approx(np.mean([right[target == c].mean() for c in classes]))
        assert found[name].images == inside.sum()
    assert (found["few"].fewest, found["few"].most) == (3, 10)


def test_a_group_without_classes_is_absent_and_one_without_images_has_no_accuracy() -> None:
    logits, target = said()
    found = long_tail(classification(logits, target), [500] * 5 + [5]).groups
    assert set(found) == {"many", "few", "all"}
    some = target != 5
    assert long_tail(classification(logits[some], target[some]), [500] * 5 + [5]).groups["few"].accuracy is None


def test_counts_of_other_classes_and_several_labels_are_refused() -> None:
    logits, target = said()
    with pytest.raises(ValueError, match="6 classes, but training counts of 4"):
        long_tail(classification(logits, target), [1, 2, 3, 4])
    with pytest.raises(ValueError, match="one label per image"):
        long_tail(classification(logits, F.one_hot(target, 6)), [1] * 6)


# Losses that know how frequent classes are


def small(classes: int = 3, multilabel: bool = False) -> Classifier:
    torch.manual_seed(0)
    return create_model(
        "deit_tiny", classes=classes, multilabel=multilabel, image_size=32, patch=8, width=32, depth=2, heads=2
    )


def objective(counts: list[int], **options: object) -> Supervised:
    labels = np.repeat(np.arange(len(counts)), counts)
    return Supervised(small(len(counts)), SupervisedConfig(**options), labels)  # type: ignore[arg-type]


COUNTS_HERE = [70, 20, 10]
PRIOR = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)


def gaussians() -> tuple[Tensor, Tensor]:
    """log p(x | class) [points, classes] of three unit Gaussians on a line, and p(class | x) under PRIOR."""
    points = torch.linspace(-4, 4, 41, dtype=torch.float64)[:, None]
    likelihood = -0.5 * (points - torch.tensor([-1.0, 0.5, 2.0], dtype=torch.float64)) ** 2
    return likelihood, (likelihood + PRIOR.log()).softmax(1)


def slope(made: Supervised, logits: Tensor, target: Tensor) -> Tensor:
    """Derivative of the loss at every logit, times the number of rows."""
    logits = logits.float().requires_grad_()
    (found,) = torch.autograd.grad(made.criterion(logits, target.float()), logits)
    return found * len(logits)


def test_logit_adjustment_is_least_at_the_posterior_of_equally_frequent_classes() -> None:
    """softmax of log p(x | c) is that posterior; where the loss's slope is 0, a convex loss is least."""
    likelihood, posterior = gaussians()
    adjusted, plain = objective(COUNTS_HERE, logit_adjustment=1.0), objective(COUNTS_HERE)
    assert slope(adjusted, likelihood, posterior).abs().max() < 1e-6  # float32
    assert slope(plain, likelihood, posterior).abs().max() > 0.1
    assert slope(plain, likelihood + PRIOR.log(), posterior).abs().max() < 1e-6


def test_balanced_bce_is_least_at_the_odds_of_a_class_that_is_as_frequent_as_the_rest() -> None:
    likelihood, posterior = gaussians()
    joint = likelihood + PRIOR.log()
    rest = torch.stack([joint[:, [o for o in range(3) if o != c]].logsumexp(1) for c in range(3)], 1)
    odds = likelihood - (rest - (1 - PRIOR).log())  # log p(x | c) / p(x | not c)
    balanced = objective(COUNTS_HERE, loss="bce", bce_sum=True, logit_adjustment=1.0)
    assert slope(balanced, odds, posterior).abs().max() < 1e-6
    assert slope(objective(COUNTS_HERE, loss="bce", bce_sum=True), odds, posterior).abs().max() > 0.1


@pytest.mark.parametrize(("strength", "boundary"), [(0.0, math.log(9) / 2), (1.0, 0.0), (0.5, math.log(9) / 4)])
def test_the_boundary_between_unequal_gaussians_moves_to_the_middle(strength: float, boundary: float) -> None:
    """N(-1, 1) nine times as frequent as N(1, 1): log 9 + f_0 = f_1 at x = log(9) / 2 without adjustment."""
    counts = [900, 100]
    quantiles = [torch.erfinv(2 * (torch.arange(n) + 0.5) / n - 1) * math.sqrt(2) for n in counts]
    x = torch.cat([quantiles[0] - 1, quantiles[1] + 1])
    label = torch.arange(2).repeat_interleave(torch.tensor(counts))
    made = objective(counts, logit_adjustment=strength)
    weight, bias = torch.zeros(2, requires_grad=True), torch.zeros(2, requires_grad=True)
    solver = torch.optim.LBFGS([weight, bias], max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        solver.zero_grad()
        value = made.criterion(x[:, None] * weight + bias, label)
        value.backward()  # type: ignore[no-untyped-call]
        return value

    solver.step(loss)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        found = -float((bias[1] - bias[0]) / (weight[1] - weight[0]))
    assert found == pytest.approx(boundary, abs=0.05)  # 100 quantiles stand for a density


def test_balanced_bce_is_the_sum_over_classes_with_log_odds_added() -> None:
    logits = torch.randn(5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    target = torch.tensor([0, 1, 2, 0, 0])
    dense = F.one_hot(target, 3).double()
    chance = 1 / (1 + torch.exp(-logits) * (1 - PRIOR) / PRIOR)  # sigmoid(logit + log p - log(1 - p)), by hand
    by_hand = -(dense * chance.log() + (1 - dense) * (1 - chance).log()).mean() * 3
    made = objective(COUNTS_HERE, loss="bce", bce_sum=True, logit_adjustment=1.0)
    assert float(made.criterion(logits.float(), target)) == pytest.approx(float(by_hand), rel=1e-5)
    torch.testing.assert_close(slope(made, logits, dense), (chance - dense).float(), atol=1e-6, rtol=1e-5)


def test_logit_adjustment_has_the_gradient_of_a_shifted_softmax() -> None:
    logits = torch.randn(5, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    dense = torch.softmax(torch.randn(5, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64), 1)
    weighed = logits.exp() * PRIOR**1.5
    made = objective(COUNTS_HERE, logit_adjustment=1.5)
    torch.testing.assert_close(
        slope(made, logits, dense), (weighed / weighed.sum(1, keepdim=True) - dense).float(), atol=1e-6, rtol=1e-5
    )


def test_equal_frequencies_shift_every_logit_alike() -> None:
    """log 1 / (C - 1), so ranks stay; one half of the images is no shift at all (LiVT, arXiv 2212.02015)."""
    torch.testing.assert_close(prior_shift(np.full(5, 8), binary=True), torch.full((5,), math.log(1 / 4)))
    assert prior_shift(np.array([50, 50]), binary=True).tolist() == [0, 0]
    logits, labels = said(images=20, classes=4)
    plain, adjusted = objective([5] * 4), objective([5] * 4, logit_adjustment=1.0)
    torch.testing.assert_close(adjusted.criterion(logits, labels), plain.criterion(logits, labels))


def test_a_class_without_images_has_a_finite_loss() -> None:
    for options in ({}, {"loss": "bce"}):
        made = Supervised(small(), SupervisedConfig(logit_adjustment=1.0, **options), np.array([0, 0, 1]))  # type: ignore[arg-type]
        assert made.criterion(torch.zeros(2, 3), torch.tensor([0, 1])).isfinite()


def test_the_model_itself_predicts_without_the_shift() -> None:
    made = objective(COUNTS_HERE, logit_adjustment=1.0)
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(made.model.eval()(images), small(3).eval()(images))
    assert "shift" not in made.state_dict()


def test_several_labels_and_missing_labels_are_refused() -> None:
    config = SupervisedConfig(logit_adjustment=1.0)
    with pytest.raises(ValueError, match="one label per image"):
        Supervised(small(multilabel=True), config, np.eye(3, dtype=np.int64))
    with pytest.raises(ValueError, match="training labels"):
        Supervised(small(), config)


# Generated images


def facts(generated: NDArray[np.bool_] | None) -> TrainingFacts:
    labels = np.array([0] * 6 + [1] * 2 + [2] * 2 + [2] * 4)
    return TrainingFacts(labels, np.arange(14), generated=generated)


def test_generated_images_count_unless_told_otherwise() -> None:
    made = np.arange(14) >= 10
    for count, shares in ((True, (6, 2, 6)), (False, (6, 2, 2))):
        config = SupervisedConfig(logit_adjustment=1.0, count_generated=count)
        built = build_objective(config, small(), facts(made))
        assert isinstance(built, Supervised)
        assert built.shift is not None
        torch.testing.assert_close(built.shift, torch.tensor(shares).div(sum(shares)).log())
    assert len(facts(None).counted(SupervisedConfig(count_generated=False))) == 14


def test_objectives_with_labels_inside_count_alike(tmp_path: Path) -> None:
    made = np.arange(14) >= 10
    labels = SupervisedConfig(logit_adjustment=1.0, count_generated=False)
    teacher = small().save(tmp_path / "teacher")
    built = build_objective(DistillationConfig(teacher=str(teacher), labels=labels), small(), facts(made))
    assert isinstance(built, Supervised)
    assert built.shift is not None
    torch.testing.assert_close(built.shift, torch.tensor([0.6, 0.2, 0.2]).log())
    with pytest.raises(ValueError, match="count_generated"):
        build_objective(GrafitConfig(labels=labels), small(), facts(made))


@pytest.fixture
def table(tmp_path: Path) -> Path:
    lines = ["path,label,split,generated"]
    for i in range(24):
        name, split = f"{i}.png", "train" if i < 16 else "test"
        Image.new("RGB", (32, 32), (10 * i, 0, 100 * (i % 2))).save(tmp_path / name)
        lines.append(f"{name},{'rare' if i % 2 else 'usual'},{split},{int(i in (1, 3, 5, 7, 9, 11))}")
    path = tmp_path / "labels.csv"
    path.write_text("\n".join(lines))
    return path


def test_a_table_says_which_images_were_generated(table: Path) -> None:
    train = vitrail.open_data(str(table), val_fraction=0)["train"]
    assert train.generated is not None
    assert {Path(key).stem for key, made in zip(train.keys, train.generated, strict=True) if made} == set("13579") | {
        "11"
    }
    table.write_text(table.read_text().replace(",test,0", ",test,perhaps", 1))
    with pytest.raises(ValueError, match="generated 'perhaps' is not 0 or 1"):
        vitrail.open_data(str(table))


# A run


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    changes = {
        "out": str(tmp_path_factory.mktemp("runs") / "tail"),
        "data.uri": "synthetic:shapes?n=400&size=32",
        "data.long_tail": 8.0,
        "data.batch": 20,
        "data.workers": 0,
        "data.check": "off",
        "optim.steps": 2,
        "engine.device": "cpu",
        "model.trunk": {"depth": 1, "width": 48, "heads": 3, "patch": 8},
    }
    return vitrail.train(with_values(recipe("small-livt"), changes), quiet=True).path


def test_a_run_knows_its_training_counts_and_figures_by_group(trained: Path) -> None:
    data = vitrail.open_data("synthetic:shapes?n=400&size=32", long_tail=8.0)
    model = vitrail.load(trained)
    assert model.stated[CLASS_COUNTS] == np.bincount(data["train"].labels).tolist()
    final = json.loads((trained / "metrics.jsonl").read_text().splitlines()[-1])
    assert {"many_third", "med_third", "few_third", "few"} <= set(final)


def test_generated_images_make_no_class_frequent(table: Path, tmp_path: Path) -> None:
    changes = {
        "out": str(tmp_path / "run"),
        "data.uri": str(table),
        "data.val_fraction": 0.0,
        "data.batch": 8,
        "data.workers": 0,
        "optim.steps": 1,
        "engine.device": "cpu",
        "model.trunk": {"depth": 1, "width": 48, "heads": 3, "patch": 8},
    }
    made = vitrail.train(with_values(recipe("small-livt"), changes), quiet=True)
    assert dict(zip(made.model.classes, made.model.stated[CLASS_COUNTS], strict=True)) == {"rare": 2, "usual": 8}


def test_evaluate_shows_groups_where_training_counts_are_known(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["evaluate", str(trained), "--data", "synthetic:shapes?n=400&size=32", "--workers", "0", "--device", "cpu"]
    assert run([*words, "--groups", "thirds"]) == 0
    out = capsys.readouterr().out
    assert all(word in out for word in ("training images", "many", "med", "few", "all"))
    assert max(map(len, out.splitlines())) <= 80
    assert run([*words, "--many", "20", "--few", "5", "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert plain["long_tail"]["all"]["accuracy"] == pytest.approx(plain["top1"])
    assert run([*words, "--protocol", "long_tail", "--groups", "thirds", "--json"]) == 0
    judged = json.loads(capsys.readouterr().out)["protocols"]["long_tail"]
    assert judged["tables"]["long_tail"]["all"] == plain["long_tail"]["all"]
    assert run([*words, "--protocol", "long_tail_thirds"]) == 0
    assert "class mean" in capsys.readouterr().out


def test_a_model_that_does_not_know_its_counts_says_so() -> None:
    label = torch.arange(6) % 3
    data = Loaders(tuple("abc"), {"val": [Batch((torch.randn(6, 3, 32, 32),), label, label, torch.arange(6))]}, "val")
    for name in ("long_tail", "long_tail_thirds"):
        with pytest.raises(ValueError, match="how many images of each class"):
            part("evaluator", name)(small(), data)
    known = small()
    known.stated[CLASS_COUNTS] = [500, 50, 5]
    assert set(part("evaluator", "long_tail")(known, data)["numbers"]) == {"many", "med", "few"}
