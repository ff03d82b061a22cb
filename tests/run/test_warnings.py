"""What a person is told before or after a run that would otherwise mislead: leaks, rates, what is trained."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import vitrail
from vitrail.cli import run as command
from vitrail.config import RunConfig, from_mapping, validate
from vitrail.data.check.scan import copied_files, leak_notes
from vitrail.data.dataset import DataSet
from vitrail.data.open import open_data
from vitrail.engine.optimizer import choose_tuned, make_schedule
from vitrail.learn.config import SupervisedConfig, named_weights
from vitrail.learn.supervised import Supervised
from vitrail.measure.evaluator import Predictions
from vitrail.model.build import create_model
from vitrail.model.export import to_torch
from vitrail.model.weights import start_from
from vitrail.recipes import RECIPES, recipe, with_values
from vitrail.run.preflight import HIGH_RATES, one_answer, warnings_before
from vitrail.schema import ConfigError, parse_flags

TINY = (
    "--model.name vit_micro_28 --model.trunk.depth 2 --model.trunk.width 32 --model.trunk.heads 2 --data.batch 16 "
    "--optim.steps 2"
)


def configure(flags: str, base: str = "vit") -> RunConfig:
    return from_mapping(parse_flags(f"{TINY} {flags}".split())[1], recipe(base))


def tiny_model(**options: object) -> vitrail.model.classifier.Classifier:
    return create_model("vit_micro_28", classes=("a", "b", "c", "d"), depth=2, width=32, heads=2, **options)


# Copies between splits


@pytest.fixture
def leaky(photos: Path, tmp_path: Path) -> Path:
    """Two images of val are training images, one of them under another name."""
    for c in ("blue", "red"):
        for part, numbers in (("train", range(10)), ("val", range(10, 14))):
            (tmp_path / part / c).mkdir(parents=True)
            for i in numbers:
                shutil.copy(photos / c / f"{i:02d}.jpg", tmp_path / part / c / f"{i:02d}.jpg")
    shutil.copy(tmp_path / "train" / "red" / "03.jpg", tmp_path / "val" / "red" / "other.jpg")
    shutil.copy(tmp_path / "train" / "blue" / "05.jpg", tmp_path / "val" / "blue" / "05.jpg")
    return tmp_path


def test_copied_files_are_found_whatever_they_are_called(leaky: Path) -> None:
    found = copied_files(open_data(leaky))
    assert {name: set(pairs) for name, pairs in found.items()} == {
        "val": {("train/red/03.jpg", "val/red/other.jpg"), ("train/blue/05.jpg", "val/blue/05.jpg")}
    }


def test_files_of_equal_size_and_other_content_are_no_copies(tmp_path: Path) -> None:
    for part, byte in (("train", b"a"), ("val", b"b")):
        for c in "xy":
            (tmp_path / part / c).mkdir(parents=True)
            (tmp_path / part / c / "0.jpg").write_bytes(byte + c.encode() + b"0" * 100)
    assert copied_files(open_data(tmp_path)) == {}


def test_a_run_says_before_it_begins_that_its_figures_will_be_too_good(leaky: Path, tmp_path: Path, capsys) -> None:
    vitrail.train(configure(f"--data {leaky} --out {tmp_path / 'run'}"))
    said = capsys.readouterr().err
    assert "warning: 2 of 10 val images are copies of training images" in said
    assert said.index("copies of training") < said.index("val  top1")


def test_data_without_copies_or_files_are_not_warned_about(photos: Path) -> None:
    assert leak_notes(open_data(photos)) == ()
    assert leak_notes(open_data("synthetic:shapes?n=40&size=32")) == ()


# Learning rates


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--optim.lr 0.01 --optim.lr_batch none", "a learning rate of 0.01 is high for adamw"),
        ("--optim.lr 0.4 --optim.lr_batch 512", r"a learning rate of 0.0125 (0.4 scaled to a batch of 16) is high"),
        ("--optim.name sgd --optim.lr 50 --optim.lr_batch none", "a learning rate of 50 is high for sgd"),
    ],
)
def test_the_rate_that_is_reached_is_judged_by_the_optimiser(photos, tmp_path, capsys, flags: str, said: str) -> None:
    vitrail.train(configure(f"--data {photos} --out {tmp_path / 'run'} {flags}"))
    assert said in capsys.readouterr().err


def test_a_rate_that_scaling_makes_small_is_not_warned_about(photos: Path, tmp_path: Path, capsys) -> None:
    vitrail.train(configure(f"--data {photos} --out {tmp_path / 'run'} --optim.lr 0.02 --optim.lr_batch 512"))
    assert "is high" not in capsys.readouterr().err


def judged(name: str) -> bool:
    """A patch and the coefficients of an adapter want other rates, and are not judged."""
    config = recipe(name)
    return config.objective.kind != "attack" and getattr(config.model.adapter, "kind", "lora") == "lora"


@pytest.mark.parametrize("name", [name for name in RECIPES if judged(name)])
def test_no_recipe_has_a_rate_that_would_be_warned_about(name: str) -> None:
    config = recipe(name)
    assert make_schedule(config.optim, config.data.batch, 1000).peak < HIGH_RATES[config.optim.name][0]


# What is trained


def test_bias_tunes_biases_and_the_head_alone() -> None:
    model = tiny_model()
    tuned, total = choose_tuned(model, "bias")
    open_ = {name for name, p in model.named_parameters() if p.requires_grad}
    expected = {n for n, _ in model.named_parameters() if n.endswith(".bias") or n in model.head_parameters()}
    assert open_ == expected
    assert "trunk.blocks.0.attn.qkv.bias" in open_
    assert tuned == sum(p.numel() for n, p in model.named_parameters() if n in expected) < total / 10


def test_a_run_says_how_much_of_the_model_it_trains(photos: Path, tmp_path: Path, capsys) -> None:
    tiny_model().save(tmp_path / "start")
    flags = f"--data {photos} --model.weights {tmp_path / 'start'} --optim.tune head --out {tmp_path / 'run'}"
    run = vitrail.train(configure(flags))
    head = sum(p.numel() for n, p in run.model.named_parameters() if n in run.model.head_parameters())
    total = sum(p.numel() for p in run.model.parameters())
    assert f"tune head: {head:,} of {total:,} parameters are trained" in capsys.readouterr().err


# Class weights


def test_weights_by_name_multiply_the_loss_of_their_classes() -> None:
    model = tiny_model()
    ours = Supervised(model, SupervisedConfig(class_weights="b=3,d=0"), np.array([0, 1, 2, 3]))
    logits, target = torch.randn(6, 4), torch.tensor([0, 1, 2, 3, 1, 0])
    each = torch.nn.functional.cross_entropy(logits, target, reduction="none")
    factor = torch.tensor([1.0, 3.0, 1.0, 0.0, 3.0, 1.0])
    torch.testing.assert_close(ours.criterion(logits, target), (each * factor).mean())


def test_a_weight_for_a_class_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="the data have no class 'dd'; did you mean 'd'"):
        Supervised(tiny_model(), SupervisedConfig(class_weights="dd=2"), np.array([0]))


@pytest.mark.parametrize("text", ["auto", "cat", "cat=", "=3", "cat=-1", "cat=nan", "cat=1,,dog=2", ""])
def test_what_is_no_weight_is_refused_before_any_data_is_read(text: str) -> None:
    with pytest.raises(ValueError, match="is not none, balanced or NAME=WEIGHT"):
        named_weights(text)
    config = replace(recipe("vit"), objective=SupervisedConfig(class_weights=text))
    assert any(problem.startswith("objective.class_weights: ") for problem in validate(config))


def test_weights_nested_in_another_objective_are_checked_too() -> None:
    with pytest.raises(ConfigError, match=r"objective\.labels\.class_weights: 'auto' is not none"):
        from_mapping({"objective": {"kind": "distillation", "teacher": "x", "labels": {"class_weights": "auto"}}})


def test_an_equals_sign_may_be_in_a_name() -> None:
    assert named_weights("a=b=2, plain disc=0.5") == {"a=b": 2.0, "plain disc": 0.5}


# Figures


def test_all_labels_that_hold_are_predicted_however_few_were_asked_for() -> None:
    model = tiny_model(multilabel=True)
    said = model._prediction(torch.tensor([0.9, 0.6, 0.2, 0.7]), top=1)
    assert said.label == "a|d|b"
    assert [name for name, _ in said.top] == ["a", "d", "b"]
    nothing = model._prediction(torch.tensor([0.4, 0.3, 0.2, 0.1]), top=2)
    assert (nothing.label, [name for name, _ in nothing.top]) == ("", ["a", "b"])


def test_what_other_evaluators_found_is_printed_and_their_place_explained(photos: Path, tmp_path: Path, capsys) -> None:
    words = ["small-byol", "--data", str(photos), "--data.batch", "16", "--optim.steps", "2"]
    words += ["--out", str(tmp_path / "run"), "--json"]
    assert command(["train", *words]) == 0
    out, err = capsys.readouterr()
    told = json.loads(out)
    final = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert told["knn"] == final["knn"]
    assert "online linear probe" in err


@pytest.mark.parametrize(("guesses", "told"), [([1, 1, 1], True), ([1, 1, 2], False), ([1], False)])
def test_a_model_that_says_the_same_of_all_images_is_told(guesses: list[int], told: bool) -> None:
    logits = torch.eye(4)[guesses]
    said = one_answer(
        Predictions(torch.arange(len(guesses)), torch.zeros(len(guesses)), logits), DataSet("", tuple("abcd"), {})
    )
    assert [f"all {len(guesses)} images are predicted as 'b'" in text for text in said] == [True] * told


def test_several_labels_are_not_judged_by_their_likeliest() -> None:
    logits = torch.tensor([[0.0, 3.0], [0.0, 4.0]])
    assert one_answer(Predictions(torch.arange(2), torch.ones(2, 2), logits), DataSet("", ("a", "b"), {})) == []


def test_the_public_call_gives_a_map_of_every_image_without_a_layer_or_a_reshape() -> None:
    found = vitrail.explain(tiny_model().eval(), torch.randn(2, 3, 28, 28), "grad_cam")
    assert found.shape == (2, 4, 4)


def test_a_model_without_maps_says_what_it_has_instead() -> None:
    model = create_model("resmlp_s12", classes=3, image_size=32, depth=2, width=32, patch=8)
    with pytest.raises(
        ValueError, match=r"no intermediate 'attention\.1'.*; there are .*tokens.*; layers count from 0"
    ):
        model.outputs(torch.randn(1, 3, 32, 32), want={"attention.1"})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"objective": {"loss": "bce", "bce_threshold": 0.0, "smoothing": 0.1}}, "every class of smoothed targets"),
        (
            {
                "objective": {"kind": "attention_transfer", "mode": "copy", "teacher": "random"},
                "model": {"adapter": {"kind": "nola"}},
                "optim": {"name": "adamw"},
            },
            "copied attention takes the place of adapted layers",
        ),
    ],
)
def test_what_would_quietly_teach_something_else_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_mapping(values, recipe("demo"))


def test_smoothing_and_thresholds_that_agree_are_taken() -> None:
    for objective in ({"loss": "bce", "bce_threshold": 0.0}, {"loss": "bce", "smoothing": 0.1}):
        assert validate(from_mapping({"objective": objective}, recipe("demo"))) == []


def test_an_epoch_of_hardly_a_step_is_told(photos: Path) -> None:
    data = open_data(photos)
    told = [
        warnings_before(with_values(recipe("vit"), {"data.batch": batch}), data, 10, 10, 1e-4) for batch in (256, 16)
    ]
    assert any("so that an epoch has hardly a step; set --data.batch 16" in line for line in told[0])
    assert not any("hardly a step" in line for line in told[1])


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"model.name": "text:minilm"}, True),
        ({"model.name": "text:minilm", "model.weights": "hub"}, False),
        ({"model.name": "text:bert"}, False),
    ],
)
def test_published_weights_of_a_text_model_that_are_not_read_are_told(photos: Path, changes: dict, told: bool) -> None:
    said = warnings_before(with_values(recipe("text"), changes), open_data(photos), 10, 10, 1e-5)
    assert any("begins from random ones; --model.weights hub reads them" in line for line in said) == told


def test_weights_of_another_architecture_say_which(tmp_path: Path) -> None:
    folder = create_model("cifar_resnet20", classes=3).save(tmp_path / "m")
    with pytest.raises(ValueError, match=r"is a cifar_resnet20 and not a vit_micro_28: set --model\.name"):
        start_from(create_model("vit_micro_28", classes=3), "vit_micro_28", str(folder))


def test_a_model_without_classes_is_not_exported(tmp_path: Path) -> None:
    model = create_model("vit_micro_28", classes=("unlabelled",))
    with pytest.raises(ValueError, match="learned without labels and knows no classes"):
        to_torch(model, tmp_path / "m.pt2")
    assert not (tmp_path / "m.pt2").exists()
