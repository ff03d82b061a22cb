"""Toy detection: boxes by stable index, guesses of patches, overlap of boxes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from study_calls import STUDIES, call
from torch import Tensor

from studies.boxes import Boxes, BoxHead, BoxTransfer, box_iou, detector, evaluate_boxes
from vitrail.data.batch import Batch
from vitrail.data.config import AugmentConfig
from vitrail.data.dataset import DataSet
from vitrail.data.loading.loader import EvalLoader
from vitrail.data.open import open_data
from vitrail.data.preprocess import Preprocess
from vitrail.learn.attention_transfer import AttentionTransfer
from vitrail.learn.config import AttentionTransferConfig
from vitrail.measure.evaluator import Loaders
from vitrail.model.build import create_model
from vitrail.model.classifier import Classifier
from vitrail.model.parts.tokens import Tokens

STILL = AugmentConfig(crop="evaluation", flip=0.0)


@pytest.fixture(scope="module")
def shapes() -> DataSet:
    return open_data("synthetic:shapes?size=32&n=60")


def vit(seed: int = 0) -> Classifier:
    torch.manual_seed(seed)  # also what a new head over it begins with
    return create_model("vit_tiny_32", width=48, depth=2, heads=3, patch=8, classes=12)


def batch_of(data: DataSet, rows: list[int]) -> Batch:
    split = data["train"]
    images = torch.stack([torch.from_numpy(np.array(split.read(row))).permute(2, 0, 1) for row in rows])
    label = torch.from_numpy(split.labels[rows])
    return Batch((images,), label, label, torch.from_numpy(split.index[rows]))


def pixels(box: Tensor, side: int) -> set[tuple[int, int]]:
    left, top, right, bottom = (int(v) for v in box)
    return {(x, y) for x in range(side) for y in range(side) if left <= x < right and top <= y < bottom}


def test_overlap_is_that_of_counted_pixels() -> None:
    torch.manual_seed(0)
    first, second = torch.randint(0, 13, (2, 200, 4)).double()  # some are empty: right before left
    empty = 0
    for a, b, found in zip(first, second, box_iou(first, second), strict=True):
        one, other = pixels(a, 12), pixels(b, 12)
        wanted = len(one & other) / len(one | other) if one | other else 0.0
        empty += not one or not other
        assert float(found) == wanted  # the same two whole numbers are divided
    assert 0 < empty < 200


def test_one_patch_that_knows_gives_its_middle_and_its_guess() -> None:
    head = BoxHead(width=6, grid=(2, 3), prefix=1)
    head.guess.weight.data.zero_()
    head.guess.weight.data[4] = 1000.0  # a patch of ones knows, all others, of zeros, do not
    head.guess.bias.data = torch.tensor([-0.1, -0.2, 0.3, 0.4, 0.0])
    for patch in range(6):
        sequence = torch.zeros(1, 7, 6)
        sequence[0, 1 + patch] = 1.0
        x, y = (patch % 3 + 0.5) / 3, (patch // 3 + 0.5) / 2
        wanted = torch.tensor([[[x - 0.1, y - 0.2, x + 0.3, y + 0.4]]])
        torch.testing.assert_close(head(Tokens(sequence, 1, (2, 3))), wanted)


def test_patches_that_know_alike_give_the_mean() -> None:
    head = BoxHead(width=6, grid=(2, 3), prefix=0)
    head.guess.weight.data.zero_()
    head.guess.bias.data = torch.tensor([-0.1, -0.2, 0.3, 0.4, 7.0])
    found = head(Tokens(torch.randn(2, 6, 6), 0, (2, 3)))
    torch.testing.assert_close(found, torch.tensor([0.4, 0.3, 0.8, 0.9]).expand(2, 1, 4))


def test_the_loss_is_the_mean_distance_of_sides_of_the_boxes_of_those_images(shapes: DataSet) -> None:
    objective = Boxes(detector(vit()), shapes["train"], STILL).eval()
    rows = [7, 0, 31]
    batch = batch_of(shapes, rows)
    with torch.no_grad():
        guess = objective.model(batch.images).double().numpy()
    assert shapes["train"].boxes is not None
    wanted = np.abs(guess - shapes["train"].boxes[rows] / 32).mean()
    assert float(objective(batch)["loss"].detach()) == pytest.approx(wanted, rel=1e-6)  # float32


def test_every_side_pulls_as_strongly_whichever_way(shapes: DataSet) -> None:
    objective = Boxes(detector(vit()), shapes["train"], STILL)
    guess = torch.rand(5, 4, requires_grad=True)
    target = torch.rand(5, 4)
    objective.criterion(guess, target).backward()
    torch.testing.assert_close(guess.grad, (guess - target).sign().detach() / 20)


def test_transfer_adds_what_attention_transfer_adds(shapes: DataSet) -> None:
    config = AttentionTransferConfig(mode="distill", layers="first:1", weight=3.0)
    batch = batch_of(shapes, [1, 2, 3])
    alone = Boxes(detector(vit()), shapes["train"], STILL).eval()(batch)["loss"]
    by_class = AttentionTransfer(vit(), config, vit(seed=1)).eval()(batch)["loss_transfer"]
    made = BoxTransfer(detector(vit()), config, vit(seed=1), shapes["train"], STILL).eval()(batch)
    torch.testing.assert_close(made["loss_transfer"], by_class)
    torch.testing.assert_close(made["loss"], alone + 3 * by_class)


def test_a_copying_detector_looks_where_its_teacher_looks(shapes: DataSet) -> None:
    batch = batch_of(shapes, [1, 2])
    config = AttentionTransferConfig(mode="copy")
    guesses = []
    for seed in (1, 2):
        objective = BoxTransfer(detector(vit()), config, vit(seed=seed), shapes["train"], STILL).eval()
        guesses.append(objective.model(batch.images))
    assert not torch.allclose(guesses[0], guesses[1])


@pytest.mark.parametrize("change", [{"flip": 0.5}, {"crop": "resized"}])
def test_views_that_move_boxes_are_refused(shapes: DataSet, change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="change it"):
        Boxes(detector(vit()), shapes["train"], replace(STILL, **change))


def test_pictures_of_another_size_are_refused() -> None:
    with pytest.raises(ValueError, match=r"synthetic:shapes\?size=32"):
        Boxes(detector(vit()), open_data("synthetic:shapes?size=64&n=20")["train"], STILL)


def test_data_without_boxes_are_refused() -> None:
    with pytest.raises(ValueError, match="no boxes"):
        Boxes(detector(vit()), open_data("embedded:fashion", limit=20)["train"], STILL)


def test_the_mean_is_over_the_pictures_of_the_split(shapes: DataSet) -> None:
    split = shapes["test"]
    assert split.boxes is not None
    said = torch.tensor([8.0, 4.0, 24.0, 28.0])
    each = []
    for box in torch.from_numpy(split.boxes):
        one, other = pixels(said, 32), pixels(box, 32)
        each.append(len(one & other) / len(one | other))
    loader = EvalLoader(split, Preprocess(vit().preprocess), batch=4, device="cpu", workers=0)
    found = evaluate_boxes(lambda images: (said / 32).expand(len(images), 4), Loaders((), {"test": loader}, "test"))
    assert found["numbers"]["mean_iou"] == pytest.approx(np.mean(each), abs=1e-6)  # boxes are kept in float32
    assert found["numbers"]["iou_50"] == np.mean([value >= 0.5 for value in each])


def test_a_classifier_is_no_detector(shapes: DataSet) -> None:
    loader = EvalLoader(shapes["test"], Preprocess(vit().preprocess), batch=4, device="cpu", workers=0)
    with pytest.raises(ValueError, match="four sides"):
        evaluate_boxes(vit(), Loaders((), {"test": loader}, "test"))


def test_a_detector_learns_to_find_shapes() -> None:
    data = open_data("synthetic:shapes?size=32&n=400")
    batch = batch_of(data, list(range(len(data["train"]))))
    objective = Boxes(detector(vit()), data["train"], STILL)
    optimizer = torch.optim.AdamW(objective.parameters(), lr=2e-3)
    loader = EvalLoader(data["test"], Preprocess(vit().preprocess), batch=40, device="cpu", workers=0)
    for start in range(80):
        rows = torch.arange(start * 40, (start + 1) * 40) % len(batch)
        optimizer.zero_grad()
        objective(batch.changed(lambda x, rows=rows: x[rows]))["loss"].backward()
        optimizer.step()
    found = evaluate_boxes(objective.model, Loaders((), {"test": loader}, "test"))["numbers"]["mean_iou"]
    # Who has not seen the picture can only say one box for all: the best of the true ones is a good one.
    assert data["test"].boxes is not None
    truth = torch.from_numpy(data["test"].boxes).double()
    constant = max(float(box_iou(box.expand_as(truth), truth).mean()) for box in truth)
    assert found > constant + 0.05


@pytest.mark.slow
def test_the_script_trains_detectors_in_three_ways(tmp_path: Path) -> None:
    """After one step each, from a teacher that knows nothing."""
    create_model("vit_tiny_32", classes=12, depth=8, heads=6).save(tmp_path / "teacher")
    text = call(STUDIES / "boxes.py", str(tmp_path / "teacher"), "--seeds", "1", "--steps", "1")
    assert [line.split("|")[1].strip() for line in text.splitlines()[4:]] == ["scratch", "tune", "distill"]
