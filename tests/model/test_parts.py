"""Mixers, norms, gains, starts and folding: their identities."""

from __future__ import annotations

import math
from typing import Any, Literal

import pytest
import torch
import torchvision
from small import shake, small
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import vitrail
from vitrail.model.build import create_model
from vitrail.model.heads.config import AttentionPool, ClassAttention, ClassMlp, Mean
from vitrail.model.mixers.config import LinearPatches, NoMixing, PatchConv, PatchMlp, TalkingHeads
from vitrail.model.mixers.patches import GatedConvMixer, LinearPatchesMixer, PatchConvMixer
from vitrail.model.mixers.softmax import SoftmaxMixer, TalkingHeadsMixer
from vitrail.model.parts.block import (
    Affine,
    DropPath,
    LayerScale,
    ScalarGate,
    TokenBatchNorm,
)
from vitrail.model.parts.stems import SotEmbed, sinusoid
from vitrail.model.parts.tokens import Tokens

FOLDED = [
    ("deit3_tiny", {}),
    ("deit3_huge26x2", {}),
    ("cait_xxs24", {}),
    ("deit_tiny", {"gate": 0.5}),
    ("deit_tiny", {"start": "fixup"}),
    ("patchconvnet_s20", {"heads": 1}),
    ("resmlp_s12", {"heads": 1}),
    ("resmlp_s12_class_mlp", {"heads": 1}),
]


@pytest.mark.parametrize(("name", "changes"), FOLDED)
def test_folding_layerscale_changes_nothing(name: str, changes: dict[str, object]) -> None:
    model = small(name, **changes).double()
    images = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    with torch.no_grad():
        before = model(images)
        vitrail.fold_layerscale(model)
        torch.testing.assert_close(model(images), before, rtol=1e-10, atol=1e-10)
    left = [m for m in model.modules() if isinstance(m, (LayerScale, ScalarGate))]
    over_patches = "resmlp" in name
    assert bool(left) == over_patches  # a gain a channel cannot enter a product over patches
    with pytest.raises(ValueError, match="save it before folding"):
        model.save("nowhere")


@pytest.mark.parametrize("shift", [False, True])
def test_folding_affine_leaves_no_affine_and_no_gain(shift: bool) -> None:
    model = small("resmlp_s12", heads=1, layerscale_shift=shift).double()
    images = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    with torch.no_grad():
        before = model(images)
        vitrail.fold_affine(model)
        torch.testing.assert_close(model(images), before, rtol=1e-10, atol=1e-10)
    assert not [m for m in model.modules() if isinstance(m, (Affine, LayerScale))]


def test_resmlp_sees_the_order_of_patches_and_a_bag_of_patches_does_not() -> None:
    order = torch.randperm(16)
    for mixer, sees in ((LinearPatches(), True), (NoMixing(), False)):
        model = small("resmlp_s12", heads=1, mixer=mixer)
        tokens = model.trunk.embed(torch.randn(1, 3, 64, 64))
        with torch.no_grad():
            straight = model.head(model.trunk.encode(tokens)[0])
            shuffled = model.head(model.trunk.encode(tokens.but(tokens.sequence[:, order]))[0])
        assert (not torch.allclose(straight, shuffled, atol=1e-4)) is sees


@pytest.mark.parametrize("stored_map", ["always", "never"])
def test_talking_heads_equal_timms(stored_map: Literal["always", "never"]) -> None:
    from timm.models.cait import TalkingHeadAttn

    theirs = TalkingHeadAttn(48, num_heads=4, qkv_bias=True).eval()
    ours = TalkingHeadsMixer(48, 4, stored_map=stored_map).eval()
    shake(theirs)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 9, 48)
    torch.testing.assert_close(ours(x, Tokens(x, 0, (3, 3))), theirs(x))


@pytest.mark.parametrize("padded", [False, True])
def test_talking_heads_without_a_map_have_the_gradients_of_those_with_one(padded: bool) -> None:
    stored = TalkingHeadsMixer(48, 4, stored_map="always").double()
    shake(stored)
    free = TalkingHeadsMixer(48, 4, stored_map="never").double()
    free.load_state_dict(stored.state_dict())
    x, outputs, gradients = torch.randn(2, 9, 48, dtype=torch.float64, requires_grad=True), [], []
    real = torch.arange(9).expand(2, 9) < torch.tensor([[6], [9]]) if padded else torch.ones(2, 9, dtype=torch.bool)
    for mixer in (stored, free):
        out = mixer(x, Tokens(x, 0, (3, 3), mask=real if padded else None))
        outputs.append(out[real])
        loss = (out * torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out))[real].square().sum()
        gradients.append(torch.autograd.grad(loss, [x, *mixer.parameters()]))
    torch.testing.assert_close(*outputs)
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, atol=1e-10, rtol=1e-8)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA accelerator")
@pytest.mark.parametrize("width", [192, 288])  # with flash attention of all channels, and without
@pytest.mark.parametrize("tokens", [(14, 14), (24, 24)])
def test_talking_heads_on_cuda_equal_those_of_double_precision(width: int, tokens: tuple[int, int]) -> None:
    exact = TalkingHeadsMixer(width, width // 48, stored_map="always").double()
    shake(exact)
    exact.cuda()
    x, results = torch.randn(2, tokens[0] * tokens[1], width, device="cuda"), {}
    for kind, dtype in (("exact", torch.float64), ("always", torch.bfloat16), ("never", torch.bfloat16)):
        mixer = exact
        if kind != "exact":
            mixer = TalkingHeadsMixer(width, width // 48, stored_map=kind).to("cuda", dtype)  # type: ignore[arg-type]
            mixer.load_state_dict(exact.state_dict())
        inputs = x.to(dtype).requires_grad_()
        out = mixer(inputs, Tokens(inputs, 0, tokens))
        gradients = torch.autograd.grad(out.double().square().mean(), [inputs, *mixer.parameters()])
        results[kind] = [tensor.double() for tensor in (out, *gradients)]
    for number, true in enumerate(results["exact"]):
        stored, free = ((results[kind][number] - true).norm() for kind in ("always", "never"))
        assert free <= 2 * stored + 0.02 * true.norm()


@pytest.mark.parametrize(("tokens", "width", "training", "without"), [
    (196, 384, False, True), (195, 192, False, False), (324, 192, True, True), (196, 192, True, False),
    (576, 288, True, False),
])  # fmt: skip
def test_talking_heads_leave_the_map_out_where_that_was_measured_to_be_faster(
    tokens: int, width: int, training: bool, without: bool
) -> None:
    class OnCuda(Tensor):
        is_cuda = True  # type: ignore[assignment]

    q = torch.empty(1, width // 48, tokens, 48, requires_grad=training).as_subclass(OnCuda)
    assert TalkingHeadsMixer(width, width // 48)._stores_map(q) is not without
    assert TalkingHeadsMixer(width, width // 48)._stores_map(q.as_subclass(Tensor))


def test_talking_heads_without_a_map_make_none() -> None:
    mixer = TalkingHeadsMixer(32, 2, stored_map="never")
    x, sizes = torch.randn(1, 50, 32), []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            sizes.extend(t.numel() for t in (out if isinstance(out, tuple) else (out,)) if isinstance(t, Tensor))
            return out

    with Sizes():
        mixer(x, Tokens(x, 0, (5, 10)))
    assert max(sizes) < 2 * 50 * 50  # of two heads


def test_talking_heads_that_do_not_talk_are_plain_attention() -> None:
    talking, plain = TalkingHeadsMixer(32, 2), SoftmaxMixer(32, 2)
    shake(plain)
    talking.load_state_dict(plain.state_dict(), strict=False)
    for layer in (talking.proj_l, talking.proj_w):
        nn.init.eye_(layer.weight)
        nn.init.zeros_(layer.bias)
    x = torch.randn(2, 7, 32)
    mask = torch.arange(7).expand(2, 7) < torch.tensor([[5], [7]])
    for tokens in (Tokens(x, 0, (1, 7)), Tokens(x, 0, (1, 7), mask=mask)):
        torch.testing.assert_close(talking(x, tokens), plain(x, tokens))


def test_captured_talking_heads_are_what_was_used() -> None:
    model = small("cait_xxs24")
    images = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        found = model.outputs(images, want={"attention.0"})
        given = model.outputs(images, given={"attention.0": found.captured["attention.0"]})
    torch.testing.assert_close(found.stack, model.stack(images))
    torch.testing.assert_close(given.stack, found.stack)


def test_linear_patches_is_a_matrix_product_over_patches() -> None:
    mixer = LinearPatchesMixer((2, 3))
    shake(mixer)
    x = torch.randn(4, 6, 8)
    expected = torch.einsum("ij,bjd->bid", mixer.tokens.weight, x) + mixer.tokens.bias[:, None]
    torch.testing.assert_close(mixer(x, Tokens(x, 0, (2, 3))), expected)


@pytest.mark.parametrize("mixer", [LinearPatches(), PatchMlp()])
def test_fixed_patches_reject_another_size_in_words(mixer: LinearPatches | PatchMlp) -> None:
    model = small("resmlp_s12", heads=1, mixer=mixer)
    with pytest.raises(ValueError, match="mixes exactly 4x4 patches, the images have 5x5"):
        model(torch.randn(1, 3, 80, 80))


def test_patch_mixing_moves_to_another_grid_with_the_weights() -> None:
    from vitrail.model.timm_weights import load_weights

    model = small("resmlp_s12", heads=1)
    larger = create_model("resmlp_s12", classes=5, depth=2, width=64, heads=1, image_size=128, patch=16).eval()
    notes = load_weights(larger, model.state_dict())
    assert notes == ["patch mixing interpolated from 4x4 patches; fine-tune before you use it"]
    old, new = model.trunk.blocks[0].attn.tokens, larger.trunk.blocks[0].attn.tokens
    # A constant image: what the middle of the grid receives is about what it received before.
    assert new.weight.sum(1).mean().item() == pytest.approx(old.weight.sum(1).mean().item(), abs=0.05)


@pytest.mark.parametrize("style", ["full", "depthwise", "separable"])
def test_patch_convolutions_act_on_the_grid(style: str) -> None:
    mixer = PatchConvMixer(8, style)
    x = torch.randn(2, 12, 8)
    expected = mixer.point(mixer.conv(x.transpose(1, 2).reshape(2, 8, 3, 4))).flatten(2).transpose(1, 2)
    torch.testing.assert_close(mixer(x, Tokens(x, 0, (3, 4))), expected)
    with pytest.raises(ValueError, match="needs the whole grid"):
        mixer(x[:, :11], Tokens(x[:, :11], 0, (3, 4)))


def test_gated_convolution_is_what_the_paper_draws() -> None:
    mixer = GatedConvMixer(16, 0.25)
    shake(mixer)
    x = torch.randn(2, 16, 3, 4)
    h = nn.functional.gelu(mixer.fc1(x))
    h = nn.functional.gelu(nn.functional.conv2d(h, mixer.depthwise.weight, mixer.depthwise.bias, padding=1, groups=16))
    pooled = h.mean((2, 3))
    gate = torch.sigmoid(
        torch.relu(pooled @ mixer.squeeze.weight[:, :, 0, 0].T + mixer.squeeze.bias) @ mixer.excite.weight[:, :, 0, 0].T
        + mixer.excite.bias
    )
    torch.testing.assert_close(mixer.on_grid(x), mixer.fc2(h * gate[:, :, None, None]))
    assert mixer.squeeze.out_channels == 4


def test_patchconvnet_costs_by_area() -> None:
    model = create_model("patchconvnet_s60", device="meta")
    ratio = vitrail.cost(model, 384).macs / vitrail.cost(model, 224).macs
    assert ratio == pytest.approx(2.936, abs=0.0005)  # by closed form; the ratio of the areas is 2.939


def test_patchconvnet_takes_any_multiple_of_16_and_one_made_for_another_size_is_the_same_network() -> None:
    model, larger = small("patchconvnet_s20", heads=1), small("patchconvnet_s20", heads=1, image_size=96)
    larger.load_state_dict(model.state_dict())  # no parameter depends on the size
    for height, width in ((16, 16), (48, 80), (96, 96)):
        images = torch.randn(1, 3, height, width)
        torch.testing.assert_close(model(images), larger(images))
        assert model.head.maps(model.tokens(images)).shape == (1, 1, height * width // 256)


def test_class_attention_costs_linearly_and_self_attention_quadratically() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    model = create_model("deit_small", head=ClassAttention(layers=1), device="meta").requires_grad_(False)
    head = model.head.blocks[0].attn
    costs = []
    for patches in (196, 392):
        z = torch.empty(1, patches, 384, device="meta")
        with FlopCounterMode(display=False) as counter:
            head(z, None)
        costs.append(counter.get_total_flops() / 2 - 2 * 384**2)  # less the query and the output projection
    assert costs[1] == 2 * costs[0]
    block = model.trunk.blocks[0].attn
    costs = []
    for patches in (196, 392):
        z = torch.empty(1, patches, 384, device="meta")
        with FlopCounterMode(display=False) as counter:
            block(z, Tokens(z, 0, (1, patches)))
        costs.append(counter.get_total_flops() / 2 - 4 * patches * 384**2)  # less what every token costs alone
    assert costs == [2 * 196**2 * 384, 2 * 392**2 * 384]


def test_affine_is_a_gain_and_a_shift() -> None:
    affine = Affine(3)
    assert torch.equal(affine(torch.ones(2, 3)), torch.ones(2, 3))
    affine.alpha.data, affine.beta.data = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.0, 1.0, 0.0])
    assert torch.equal(affine(torch.full((1, 3), 2.0)), torch.tensor([[2.0, 5.0, 6.0]]))


def test_token_batchnorm_takes_statistics_over_all_tokens() -> None:
    norm = TokenBatchNorm(4)
    x = torch.randn(3, 5, 4)
    expected = (x - x.mean((0, 1))) / (x.var((0, 1), unbiased=False) + norm.eps).sqrt()
    torch.testing.assert_close(norm(x), expected)


def test_layerscale_starts() -> None:
    assert torch.equal(LayerScale(4, 0.1).gamma, torch.full((4,), 0.1))
    drawn = LayerScale(10_000, 0.1, "uniform").gamma
    assert drawn.min() >= 0
    assert drawn.max() <= 0.2
    assert drawn.mean().item() == pytest.approx(0.1, abs=0.002)
    assert not LayerScale(4, 0.1, learned=False).gamma.requires_grad


def test_rezero_begins_as_the_identity() -> None:
    model = create_model("deit_tiny", classes=5, depth=2, width=64, heads=2, image_size=64, gate=0.0)
    tokens = model.trunk.embed(torch.randn(1, 3, 64, 64))
    assert torch.equal(model.trunk.encode(tokens)[0].sequence, model.trunk.norm(tokens.sequence))


def test_fixup_begins_as_the_identity_and_scales_by_depth() -> None:
    options = {"classes": 5, "width": 64, "heads": 2, "image_size": 64, "start": "fixup"}
    for depth in (4, 16):
        torch.manual_seed(0)
        model = create_model("deit_tiny", depth=depth, **options)
        tokens = model.trunk.embed(torch.randn(1, 3, 64, 64))
        assert torch.equal(model.trunk.encode(tokens)[0].sequence, model.trunk.norm(tokens.sequence))
        assert model.trunk.blocks[0].mlp.fc1.weight.std().item() == pytest.approx(0.02 * depth**-0.5, rel=0.05)


def test_t_fixup_scales_values_and_projections() -> None:
    torch.manual_seed(0)
    model = create_model("deit_tiny", classes=5, width=64, heads=2, depth=16, image_size=64, start="t_fixup")
    attention = model.trunk.blocks[3].attn
    xavier = (2 / (64 + 64)) ** 0.5
    q, _, v = attention.qkv.weight.chunk(3)
    assert q.std().item() == pytest.approx(xavier, rel=0.05)
    assert v.std().item() == pytest.approx(xavier * 0.67 * 16**-0.25, rel=0.05)


def test_every_block_drops_at_its_own_rate() -> None:
    for rule, rates in (("linear", [0.0, 0.1, 0.2]), ("uniform", [0.2, 0.2, 0.2])):
        trunk = small("deit_tiny", depth=3, drop_path=0.2, drop_path_rule=rule).trunk
        assert [block.drop_path.rate for block in trunk.blocks] == pytest.approx(rates)
    pairs = small("deit3_huge26x2", drop_path=0.2).trunk.blocks[0]
    assert [branch.drop_path.rate for branch in (*pairs.attns, *pairs.ffns)] == [0.2] * 4


def test_a_late_class_token_leaves_earlier_blocks_without_it() -> None:
    model = small("deit_tiny", class_token_at=1, depth=3)
    images = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        found = model.outputs(images, want={"tokens.0", "tokens.1"})
    assert found.captured["tokens.0"].shape[1] == 16
    assert found.captured["tokens.1"].shape[1] == 17
    assert model.trunk.pos_embed.shape[1] == 16
    last = small("deit_tiny", class_token_at=2)
    assert last(images).shape == (1, 5)
    with pytest.raises(ValueError, match="only 2 blocks"):
        small("deit_tiny", class_token_at=3)


def test_parallel_blocks_add_their_branches() -> None:
    model = small("deit3_huge26x2")
    block = model.trunk.blocks[0]
    tokens = model.trunk.embed(torch.randn(1, 3, 64, 64))
    x = tokens.sequence
    with torch.no_grad():
        x = x + sum(b.ls(b.attn(b.norm(x), tokens)) for b in block.attns)
        x = x + sum(b.ls(b.mlp(b.norm(x))) for b in block.ffns)
        torch.testing.assert_close(block(tokens).sequence, x)


def test_parallel_blocks_equal_timms() -> None:
    from timm.models.vision_transformer import ParallelThingsBlock

    theirs = ParallelThingsBlock(64, 2, num_parallel=2, qkv_bias=True, init_values=1e-4).eval()
    shake(theirs)
    model = small("deit3_huge26x2")
    block = model.trunk.blocks[0]
    block.load_state_dict(theirs.state_dict())
    tokens = model.trunk.embed(torch.randn(1, 3, 64, 64))
    with torch.no_grad():
        torch.testing.assert_close(block(tokens).sequence, theirs(tokens.sequence))


def test_positions_of_sot_are_fixed_sinusoids() -> None:
    table = sinusoid(197, 240)[0]
    for place, channel in ((3, 0), (196, 1), (5, 120), (150, 239)):
        angle = place / 10000 ** (channel // 2 * 2 / 240)
        assert table[place, channel].item() == pytest.approx((math.sin, math.cos)[channel % 2](angle), abs=1e-6)
    trunk = create_model("sot_7_32").trunk
    assert "pos_embed" not in dict(trunk.named_parameters())
    assert torch.equal(trunk.pos_embed, sinusoid(65, 192))  # the class token has the first place


def test_the_class_token_of_sot_starts_as_its_weights_do() -> None:
    """Fixed positions give it no start of its own, so it is drawn with a deviation of 0.02."""
    assert create_model("sot_7_32").trunk.cls_token.std().item() == pytest.approx(0.02, rel=0.15)


def test_the_dense_embedding_is_torchvisions_layers_and_a_transition_without_relu() -> None:
    from torchvision.models.densenet import _DenseLayer

    embed = SotEmbed("densenet", 16, 24).eval()
    shake(embed)
    x = images = torch.randn(2, 3, 32, 48)
    with torch.no_grad():
        x = nn.functional.max_pool2d(embed.stem(x), 3, stride=2, padding=1)
        for block, width in zip(embed.blocks, (64, 128, 128), strict=True):
            for i in range(6):
                theirs = _DenseLayer(width + 16 * i, growth_rate=16, bn_size=2, drop_rate=0.0).eval()
                theirs.load_state_dict(block[i].state_dict())
                x = torch.cat([x, theirs(x)], 1)
            x = nn.functional.batch_norm(x, block[6].running_mean, block[6].running_var, block[6].weight, block[6].bias)
            x = nn.functional.avg_pool2d(nn.functional.conv2d(x, block[7].weight), 2)
        expected = embed.project(x)
        torch.testing.assert_close(embed(images), expected)
    assert expected.shape == (2, 24, 2, 3)
    assert SotEmbed("densenet", 8, 24)(images).shape == (2, 24, 4, 6)  # the last block keeps its size


def test_the_residual_embedding_is_torchvisions_bottleneck() -> None:
    from torchvision.models.resnet import Bottleneck

    embed = SotEmbed("resnet", 8, 24).eval()
    shake(embed)
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        x = nn.functional.max_pool2d(embed.stem(images), 3, stride=2, padding=1)
        for ours, inside, stride in zip(embed.blocks, (64, 256, 256), (2, 2, 1), strict=True):
            shortcut = None if stride == 1 else nn.Sequential(nn.Conv2d(inside, 256, 1, stride, bias=False), norm(256))
            theirs = Bottleneck(inside, 64, stride, shortcut, norm_layer=norm).eval()
            names = {k.replace("norm", "bn").replace("shortcut", "downsample"): v for k, v in ours.state_dict().items()}
            theirs.load_state_dict(names)
            x = theirs(x)
        torch.testing.assert_close(embed(images), embed.project(x))


def norm(width: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(width, eps=1e-3, momentum=0.01)


def test_the_inception_embedding_has_four_branches() -> None:
    block = SotEmbed("inception", 16, 24).eval().blocks[0]
    shake(block)
    x = torch.randn(2, 64, 16, 16)

    def conv(h: torch.Tensor, part: nn.Sequential, stride: int = 1) -> torch.Tensor:
        weight = part[0].weight
        h = nn.functional.conv2d(h, weight, stride=stride, padding=weight.shape[-1] // 2)
        values = (part[1].running_mean, part[1].running_var, part[1].weight, part[1].bias)
        return torch.relu(nn.functional.batch_norm(h, *values))

    with torch.no_grad():
        branches = [
            conv(x, block.point, 2),
            conv(conv(x, block.three[0]), block.three[1], 2),
            conv(conv(x, block.five[0]), block.five[1], 2),
            conv(nn.functional.max_pool2d(x, 3, 2, 1), block.pool[1]),
        ]
        torch.testing.assert_close(block(x), torch.cat(branches, 1))
    assert [b.shape[1] for b in branches] == [32, 64, 16, 16]
    assert [part[-1][0].kernel_size[0] for part in (block.three, block.five)] == [3, 5]


@pytest.mark.parametrize("head", ["class_token", "distilled", "second_order"])
def test_a_head_that_needs_a_class_token_is_refused_on_a_trunk_without(head: str) -> None:
    with pytest.raises(ValueError, match="use a head that pools patches: mean, class_attention"):
        small("resmlp_s12", heads=1, head=head)


@pytest.mark.parametrize("head", [Mean(), ClassAttention(heads=2), AttentionPool(), ClassMlp()])
@pytest.mark.parametrize("mixer", [LinearPatches(), PatchMlp(), PatchConv(), TalkingHeads()])
def test_mixers_and_heads_combine_freely(head: object, mixer: object) -> None:
    model = small("deit_tiny", mixer=mixer, head=head)
    assert model(torch.randn(2, 3, 64, 64)).shape == (2, 5)


@pytest.mark.parametrize("rate", [0.3, 1.0])
def test_drop_path_is_torchvisions_stochastic_depth_bit_for_bit(rate: float) -> None:
    branch = torch.randn(64, 3, 5)
    torch.manual_seed(3)
    expected = torchvision.ops.stochastic_depth(branch, rate, "row")
    torch.manual_seed(3)
    assert torch.equal(DropPath(rate).train()(branch), expected)
