"""XCiT: part by part and whole against timm's, and what may be changed in it."""

from __future__ import annotations

from functools import partial

import pytest
import timm
import torch
from timm.models.xcit import LPI, XCA, ClassAttentionBlock, PositionalEncodingFourier
from torch import nn

import vitrail
from vitrail.model.build import create_model
from vitrail.model.cost import cost
from vitrail.model.heads.class_attention import ClassAttentionMixer, XcitClassBlock
from vitrail.model.heads.config import ClassAttention
from vitrail.model.mixers.linear_attention import XcaMixer
from vitrail.model.parts.block import LayerScale, LocalPatchInteraction, activation
from vitrail.model.parts.stems import FourierPositions
from vitrail.model.parts.tokens import Tokens
from vitrail.model.timm_weights import load_weights, to_timm
from vitrail.model.zoo import ZOO

REDUCED = {"depth": 2, "width": 64, "heads": 2, "image_size": 64}
PUBLISHED = [name for name in ZOO if name.startswith("xcit") and ZOO[name].timm]


def shake(model: nn.Module) -> None:
    """Random weights and statistics under which every branch and every image makes a difference."""
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_(0, 0.2, generator=generator)
        elif parameter.squeeze().ndim < 2:  # gains and temperatures
            parameter.data.uniform_(0.5, 1.5, generator=generator)
        else:
            parameter.data.normal_(0, parameter[0].numel() ** -0.5, generator=generator)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.3, generator=generator)
            module.running_var.uniform_(0.5, 1.5, generator=generator)


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("size", [64, 96])
def test_logits_equal_timm_at_any_size(name: str, size: int) -> None:
    theirs = timm.create_model(ZOO[name].timm, depth=3, embed_dim=64, num_heads=2, num_classes=7).eval()
    shake(theirs)
    ours = create_model(name, classes=7, depth=3, width=64, heads=2, image_size=64).eval()
    assert load_weights(ours, theirs.state_dict()) == []
    ours, theirs = ours.double(), theirs.double()
    images = torch.randn(2, 3, size, size + 32, dtype=torch.float64)
    with torch.no_grad():
        expected = theirs(images)
        # Logits that hardly depended on the image would prove nothing: 10^7 times what is tolerated below.
        assert expected.std(0).max() > 1e-3
        torch.testing.assert_close(ours(images), expected, rtol=1e-10, atol=1e-10)


def test_logits_equal_timm_at_full_size() -> None:
    theirs = timm.create_model("xcit_small_12_p16_224").eval()
    shake(theirs)
    ours = create_model("xcit_s12_p16").eval()
    load_weights(ours, theirs.state_dict())
    images = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        expected = theirs(images)
        assert (ours(images) - expected).abs().max() < 1e-4 * expected.abs().max()


def test_to_timm_and_back() -> None:
    ours = create_model("xcit_s12_p16", classes=7, **REDUCED).eval()
    shake(ours)
    theirs = to_timm(ours)
    images = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    back = create_model("xcit_s12_p16", classes=7, **REDUCED).eval()
    load_weights(back, theirs.state_dict())
    with torch.no_grad():
        expected = ours.double()(images)
        torch.testing.assert_close(theirs.double()(images), expected, rtol=1e-10, atol=1e-10)
        assert torch.equal(back.double()(images), expected)


@pytest.mark.parametrize("changes", [{"local": False}, {"positions": "none"}, {"head": "mean"}, {"activation": "relu"}])
def test_an_xcit_of_other_parts_is_not_handed_to_timm(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="other parts cannot be handed over"):
        to_timm(create_model("xcit_s12_p16", **{**REDUCED, **changes}))


def test_xca_equals_timms() -> None:
    theirs, ours = XCA(32, num_heads=4, qkv_bias=True).double(), XcaMixer(32, 4).double()
    shake(theirs)
    state = theirs.state_dict()
    ours.load_state_dict({**state, "temperature": state["temperature"].flatten()})
    x = torch.randn(2, 9, 32, dtype=torch.float64)
    torch.testing.assert_close(ours(x, Tokens(x, 0, (3, 3))), theirs(x), rtol=1e-10, atol=1e-12)


def test_xcas_temperature_is_not_decayed() -> None:
    from vitrail.engine.optimizer import decays

    model = create_model("xcit_s12_p16", device="meta", **REDUCED)
    found = {name: decays(name, p) for name, p in model.named_parameters() if "temperature" in name}
    assert len(found) == 2
    assert not any(found.values())


@pytest.mark.parametrize("training", [True, False])
def test_local_patch_interaction_equals_timms_and_passes_by_class_tokens(training: bool) -> None:
    theirs = LPI(16).double().train(training)
    shake(theirs)
    ours = LocalPatchInteraction(16, activation("gelu")).double().train(training)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 2 + 12, 16, dtype=torch.float64)
    found = ours(x, Tokens(x, 2, (3, 4)))
    torch.testing.assert_close(found[:, 2:], theirs(x[:, 2:], 3, 4), rtol=1e-10, atol=1e-12)
    assert not found[:, :2].any()


def test_local_patch_interaction_refuses_a_torn_grid() -> None:
    local, x = LocalPatchInteraction(16, nn.ReLU()), torch.randn(1, 9, 16)
    for tokens in (Tokens(x, 0, (3, 4)), Tokens(x, 0, (3, 3), mask=torch.ones(1, 9, dtype=torch.bool))):
        with pytest.raises(ValueError, match="needs the whole grid"):
            local(x, tokens)


def test_local_patch_interaction_stands_in_no_parallel_block() -> None:
    with pytest.raises(ValueError, match="parallel must be 1"):
        create_model("xcit_s12_p16", parallel=2, **REDUCED)


@pytest.mark.parametrize("grid", [(3, 5), (1, 1), (14, 14)])
def test_fourier_positions_equal_timms(grid: tuple[int, int]) -> None:
    theirs, ours = PositionalEncodingFourier(dim=24), FourierPositions(24)
    ours.load_state_dict(theirs.state_dict())
    torch.testing.assert_close(ours(grid), theirs(1, *grid).flatten(2).transpose(1, 2))


def test_the_class_block_equals_timms_patches_included() -> None:
    theirs = ClassAttentionBlock(
        32, 4, qkv_bias=True, eta=1.0, tokens_norm=True, norm_layer=partial(nn.LayerNorm, eps=1e-6)
    )
    theirs = theirs.double()
    shake(theirs)
    ours = XcitClassBlock(ClassAttentionMixer(32, 4, True), 32, 4.0, "layernorm", 1.0).double()
    ours.load_state_dict(
        {k.replace("gamma1", "ls1.gamma").replace("gamma2", "ls2.gamma"): v for k, v in theirs.state_dict().items()}
    )
    x = torch.randn(2, 10, 32, dtype=torch.float64)
    found = torch.cat(ours(x[:, :1], x[:, 1:], None), 1)
    torch.testing.assert_close(found, theirs(x), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["xcit_s12_p16", "xcit_s12_p16_sima"])
def test_folding_layerscale_changes_nothing(name: str) -> None:
    model = create_model(name, classes=5, **REDUCED).eval()
    shake(model)
    model.double()
    images = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    with torch.no_grad():
        before = model(images)
        vitrail.fold_layerscale(model)
        torch.testing.assert_close(model(images), before, rtol=1e-10, atol=1e-10)
    trunk = [m for m in model.trunk.modules() if isinstance(m, LayerScale)]
    assert not trunk


@pytest.mark.parametrize("name", [n.removesuffix("_sima") for n in ZOO if n.startswith("xcit") and n.endswith("_sima")])
def test_sima_in_the_place_of_xca_only_takes_its_temperatures_away(name: str) -> None:
    config = ZOO[name].trunk
    before, after = (cost(create_model(n, device="meta")).parameters for n in (name, f"{name}_sima"))
    assert before - after == config.depth * config.heads


def test_macs_of_an_xcit_follow_their_closed_form() -> None:
    width, depth, heads, n, classes = 64, 3, 2, 16, 7
    stem = sum(9 * a * b * (64 // s) ** 2 for a, b, s in ((3, 8, 2), (8, 16, 4), (16, 32, 8), (32, 64, 16)))
    block = 4 * n * width**2 + 2 * n * width**2 // heads + 2 * 9 * n * width + 8 * n * width**2
    keys = n + 1
    layer = 2 * width**2 + 2 * keys * width**2 + 2 * keys * width + 8 * width**2
    expected = stem + 64 * width * n + depth * block + 2 * layer + width * classes
    options = {"depth": depth, "width": width, "heads": heads, "image_size": 64, "classes": classes}
    assert cost(create_model("xcit_s12_p16", device="meta", **options)).macs == expected
    sima = create_model("xcit_s12_p16", device="meta", mixer="sima", **options)
    fewer = 2 * n**2 * width - 2 * n * width**2 // heads  # 16 tokens, 32 channels: the map is the smaller product
    assert cost(sima).macs == expected + depth * fewer


@pytest.mark.parametrize("attention", ["softmax", "sima"])
def test_where_the_head_looks_is_shown_only_where_it_is_a_distribution(attention: str) -> None:
    head = ClassAttention(heads=2, style="xcit", attention=attention)
    model = create_model("xcit_s12_p16", classes=3, head=head, **REDUCED).eval()
    maps = model.head.maps(model.tokens(torch.randn(1, 3, 64, 64)))
    if attention == "sima":
        assert maps is None
    else:
        torch.testing.assert_close(maps.sum(-1), torch.ones(1, 2))
