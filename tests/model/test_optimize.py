"""Models made ready for inference give the logits they gave before."""

from __future__ import annotations

import pytest
import torch

from vitrail.data.preprocess import Preprocess
from vitrail.model.build import create_model
from vitrail.model.config import ConvStem

NAMES = ["deit_tiny", "deit3_tiny", "cait_xxs24", "resmlp_s12", "patchconvnet_s20", "sot_7", "deit_tiny_distilled"]


def shaken(name: str, **changes: object) -> torch.nn.Module:
    """A model far from its start, where gains are small, norms are the identity and logits nearly 0."""
    torch.manual_seed(0)
    model = create_model(name, classes=5, image_size=32, depth=2, width=48, heads=3, patch=8, **changes)
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.1)
    for name_, buffer in model.named_buffers():
        if "running_mean" in name_:
            buffer.normal_()
        elif "running_var" in name_:
            buffer.uniform_(0.5, 2.0)
    return model.eval()


@pytest.mark.parametrize("name", NAMES)
def test_optimised_logits_equal_the_models(name: str) -> None:
    model = shaken(name)
    images = torch.randint(256, (3, 3, 32, 32), dtype=torch.uint8)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with torch.no_grad():
        expected = model(images)
    fast = model.optimize()
    assert fast.precision == "float32"
    # Folding moves factors from one side of a sum to the other: rounding of float32, as a share of the logits.
    assert (fast(images) - expected).abs().max() < 2e-5 * expected.abs().max()
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items()), "the model itself has changed"
    with torch.no_grad():
        floats = Preprocess(model.preprocess).normalize(images)
        assert (fast(floats) - expected).abs().max() < 2e-5 * expected.abs().max()


def test_the_batchnorm_of_a_stem_is_folded_away() -> None:
    model = shaken("patchconvnet_s20", stem=ConvStem(norm=True))
    assert any(isinstance(m, torch.nn.BatchNorm2d) for m in model.trunk.patch_embed.modules())
    fast = model.optimize()
    assert not any(isinstance(m, torch.nn.BatchNorm2d) for m in fast.model.trunk.patch_embed.modules())
    images = torch.randint(256, (3, 3, 32, 32), dtype=torch.uint8)
    with torch.no_grad():
        expected = model(images)
    assert (fast(images) - expected).abs().max() < 2e-5 * expected.abs().max()


def test_bf16_on_a_cpu_is_bf16() -> None:
    model = shaken("deit_tiny")
    images = torch.randint(256, (3, 3, 32, 32), dtype=torch.uint8)
    fast = model.optimize("bf16")
    assert next(fast.model.parameters()).dtype == torch.bfloat16
    with torch.no_grad():
        expected = model(images)
    gap = (fast(images) - expected).norm() / expected.norm()
    assert 1e-4 < gap < 0.05


def test_what_cannot_be_is_said() -> None:
    model = shaken("deit_tiny")
    with pytest.raises(ValueError, match="fp8 needs a CUDA accelerator"):
        model.optimize("fp8")
    with pytest.raises(ValueError, match="precision must be"):
        model.optimize("int4")


def test_bytes_are_normalised_as_the_preprocessing_says() -> None:
    model = shaken("deit_tiny")
    images = torch.randint(256, (2, 3, 32, 32), dtype=torch.uint8)
    assert torch.equal(model._images(images), Preprocess(model.preprocess).normalize(images))
