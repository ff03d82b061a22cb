"""Patches that training leaves out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from timm.layers import PatchDropout

from vitrail.model.build import create_model
from vitrail.model.classifier import Classifier
from vitrail.model.parts.tokens import gather, random_order

SIZE = {"classes": 3, "depth": 2, "width": 32, "heads": 2}


def model_of(drop: float, **more: Any) -> Classifier:
    torch.manual_seed(0)
    return create_model("vit_tiny_32", **{**SIZE, "patch_drop": drop, **more})


@pytest.mark.parametrize(
    "more", [{}, {"class_token_at": 1}, {"prompts": 2}, {"head": "mean"}, {"head": "class_attention"}]
)
def test_training_equals_evaluation_of_the_patches_that_are_left(more: dict[str, Any]) -> None:
    model, images = model_of(0.25, **more), torch.randn(4, 3, 32, 32)
    torch.manual_seed(7)
    trained = model.train()(images)
    torch.manual_seed(7)
    index, _ = random_order(4, 64, 48, images.device)
    trunk = model.eval().trunk
    tokens = trunk.embed(images)
    left = torch.cat([tokens.sequence[:, : tokens.prefix], gather(tokens.patches, index)], 1)
    encoded, _ = trunk.encode(replace(tokens, sequence=left, index=index))
    torch.testing.assert_close(trained, model.head.fuse(model.head(encoded)), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(model(images), model_of(0.0, **more).eval()(images), rtol=0, atol=0)


@pytest.mark.parametrize("drop", [0.1, 0.3, 0.5, 0.99])
def test_as_many_patches_are_left_as_by_timm(drop: float) -> None:
    model, lengths = model_of(drop).train(), []
    model.trunk.blocks[0].register_forward_pre_hook(lambda _, inputs: lengths.append(inputs[0].sequence.shape[1]))
    model(torch.randn(2, 3, 32, 32))
    assert lengths == [PatchDropout(drop, num_prefix_tokens=1).train()(torch.randn(2, 65, 4)).shape[1]]


def test_masked_autoencoding_and_what_is_captured_know_nothing_of_it() -> None:
    model = model_of(0.5)
    tokens = model.train().trunk.embed(torch.randn(2, 3, 32, 32))
    index = torch.arange(16).expand(2, -1)
    chosen = replace(tokens, sequence=tokens.sequence[:, :17], index=index)
    assert model.trunk.encode(chosen)[0].sequence.shape[1] == 17
    with pytest.raises(ValueError, match=r"trunk\.patch_drop 0"):
        model.outputs(torch.randn(2, 3, 32, 32), want={"attention.0"})
    assert "attention.0" in model.eval().outputs(torch.randn(2, 3, 32, 32), want={"attention.0"}).captured


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"mixer": {"kind": "linear_patches"}, "head": "mean"}, "the mixer"),
        ({"local": True}, "a convolution"),
        ({"adaptive": {"kind": "evit"}}, "an adaptive policy"),
    ],
)
def test_parts_that_need_every_patch_say_so(more: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=f"but {reason}"):
        model_of(0.5, **more)
