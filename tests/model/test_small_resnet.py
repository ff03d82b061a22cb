"""ResNet-18 for 32-pixel images: the zoo's row is the network of the studies, and old names of it still work."""

from __future__ import annotations

from pathlib import Path

import timm
import torch
from torch import Tensor, nn

import vitrail
from vitrail.config import ModelConfig, RunConfig
from vitrail.model.build import create_model
from vitrail.model.classifier import Classifier
from vitrail.model.cost import cost
from vitrail.run.preflight import missing_parts


def of_studies(classes: int) -> nn.Module:
    """timm's ResNet-18 with the smaller stem, as studies built it before it had a name here."""
    model = timm.create_model("resnet18", num_classes=classes)
    model.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
    model.maxpool = nn.Identity()
    return model


def weights_of(model: Classifier) -> dict[str, Tensor]:
    """State under timm's names."""
    renamed = {n.replace("trunk.backbone.", "").replace("head.fc.", "fc."): t for n, t in model.state_dict().items()}
    return {n: t for n, t in renamed.items() if isinstance(t, Tensor)}


def test_parameters_are_those_that_cifar_code_elsewhere_gives() -> None:
    # By hand: stem, four stages of two blocks of two 3x3 convolutions, three projections, classifier.
    widths, count, before = (64, 128, 256, 512), 27 * 64 + 128, 64
    for width in widths:
        count += 9 * before * width + 27 * width * width + 4 * 2 * width
        count += (before * width + 2 * width) * (before != width)
        before = width
    for classes in (10, 100):
        assert cost(create_model("resnet18_32", classes=classes)).parameters == count + 513 * classes
    assert count + 513 * 10 == 11_173_962
    assert create_model("resnet18_32").tokens(torch.zeros(1, 3, 32, 32)).grid == (4, 4)


def test_same_weights_give_the_outputs_and_gradients_of_the_network_of_the_studies() -> None:
    torch.manual_seed(0)
    ours, theirs = create_model("resnet18_32", classes=7), of_studies(7)
    theirs.load_state_dict(weights_of(ours))
    images = torch.randn(4, 3, 32, 32)
    for training in (True, False):
        ours.train(training), theirs.train(training)
        torch.testing.assert_close(ours.stack(images)[:, 0], theirs(images))
    ours.train(), theirs.train()
    ours.stack(images).square().sum().backward(), theirs(images).square().sum().backward()
    torch.testing.assert_close(ours.trunk.backbone.conv1.weight.grad, theirs.conv1.weight.grad, rtol=1e-4, atol=1e-5)


def test_the_start_is_timms() -> None:
    torch.manual_seed(0)
    expected = of_studies(0).state_dict()
    torch.manual_seed(0)
    ours = create_model("resnet18_32", classes=7).trunk.backbone.state_dict()
    assert all(torch.equal(ours[name], value) for name, value in expected.items())


def test_models_and_settings_of_the_old_name_still_load(tmp_path: Path) -> None:
    """Studies called it `timm:resnet18_32` and stored that in their models."""
    small = {"layers": (1, 1, 1, 1), "channels": (8, 16, 24, 32)}
    old = create_model("timm:resnet18_32", classes=3, image_size=32, head="mean", **small).eval()
    old.save(tmp_path / "model")
    images = torch.randn(2, 3, 32, 32)
    again = vitrail.load(tmp_path / "model")
    assert torch.equal(again.stack(images), old.stack(images))
    new = create_model("resnet18_32", classes=3, options=small).eval()
    new.load_state_dict(old.state_dict())
    assert torch.equal(new.stack(images), old.stack(images))
    assert missing_parts(RunConfig(model=ModelConfig(name="timm:resnet18_32"))) == []


def test_whole_small_images_are_its_input() -> None:
    preprocess = create_model("resnet18_32").preprocess
    assert (preprocess.size, preprocess.crop_ratio) == (32, 1.0)
