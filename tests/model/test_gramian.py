"""Gramian attention heads: against one head written out with convolutions, and what the papers promise of them."""

from __future__ import annotations

import copy
import math

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.kernels.covariance import gram_vector
from vitrail.model.heads.config import Gramian
from vitrail.model.heads.gramian import GramianHead, mean_divergence
from vitrail.model.heads.pooled import MeanHead
from vitrail.model.parts.modules import reset
from vitrail.model.parts.tokens import Tokens
from vitrail.model.trunks.cifar_resnet import CifarResNetTrunk

WIDTH, CLASSES, GRID = 32, 5, (3, 4)
SMALL = Gramian(heads=3, gram_width=8, attention_width=16, attention_heads=4, embed_groups=4, mlp_groups=4)


def small(width: int = WIDTH, classes: int = CLASSES, **changes: object) -> GramianHead:
    return GramianHead(Gramian(**{**vars(SMALL), **changes}), width, classes)


def shaken(head: GramianHead) -> GramianHead:
    """Random weights and statistics everywhere: small starts of LayerScale would hide what a branch does."""
    generator = torch.Generator().manual_seed(3)
    for name, tensor in head.state_dict().items():
        if name.endswith("running_var"):
            tensor.uniform_(0.5, 2, generator=generator)
        elif tensor.is_floating_point():
            tensor.normal_(0, 0.5, generator=generator)
    return head


def some_tokens(batch: int = 4, prefix: int = 0, width: int = WIDTH, grid: tuple[int, int] = GRID) -> Tokens:
    return Tokens(torch.randn(batch, prefix + grid[0] * grid[1], width), prefix, grid)


def one_head_written_out(head: GramianHead, k: int, x: Tensor, grid: tuple[int, int]) -> Tensor:
    """Logits of head k as in Gramian heads (arXiv 2310.16483): convolutions, explicit keys and values, no folding."""
    config, training = head.config, head.training
    own = {n: t.chunk(head.heads)[k].clone() if t.ndim else t for n, t in head.state_dict().items()}
    batch, d = len(x), config.gram_width

    def conv(h: Tensor, name: str, groups: int = 1) -> Tensor:  # h [batch, channels, ...]
        weight = own[f"{name}.weight"][..., None]
        return F.conv1d(h.reshape(*h.shape[:2], -1), weight, own.get(f"{name}.bias"), groups=groups)

    def batch_norm(h: Tensor, name: str, eps: float) -> Tensor:
        values = (own[f"{name}.running_mean"], own[f"{name}.running_var"], own[f"{name}.weight"], own[f"{name}.bias"])
        return F.batch_norm(h, *values, training=training, eps=eps)

    def layer_norm(h: Tensor, name: str) -> Tensor:
        return F.layer_norm(h, h.shape[-1:], own[f"{name}.weight"], own[f"{name}.bias"], eps=1e-6)

    a = batch_norm(conv(x.mT, "contract"), "contract_norm", 1e-5)
    if config.gram_layer:
        h = F.conv2d(
            a.unflatten(-1, grid), own["gram_layer.conv.weight"], own["gram_layer.conv.bias"], padding=3, groups=d
        )
        h = layer_norm(h.flatten(2).mT, "gram_layer.norm")
        h = F.gelu(F.linear(h, own["gram_layer.fc1.weight"], own["gram_layer.fc1.bias"]))
        h = F.linear(h, own["gram_layer.fc2.weight"], own["gram_layer.fc2.bias"])
        a = a + (h * own["gram_layer.ls.gamma"]).mT
    gram = torch.einsum("bin,bjn->bij", a, a) / a.shape[-1]
    g = torch.stack([gram[:, i, j] for i in range(d) for j in range(i, d)], dim=1)
    g = g / g.norm(dim=1, keepdim=True)
    t = batch_norm(conv(g[..., None], "token", config.embed_groups).squeeze(-1), "token_norm", 1e-5 / g.shape[1])

    u = layer_norm(torch.cat([t[:, None], x], dim=1), "attention.norm")
    q = F.linear(u[:, :1], own["attention.query.weight"]).unflatten(-1, (config.attention_heads, -1)).transpose(1, 2)
    keys = F.linear(u, own["attention.key.weight"]).unflatten(-1, (config.attention_heads, -1)).transpose(1, 2)
    values = F.linear(u, own["attention.value.weight"]).unflatten(-1, (config.attention_heads, -1)).transpose(1, 2)
    out = F.scaled_dot_product_attention(q, keys, values).transpose(1, 2).reshape(batch, -1)
    t = t + own["ls1.gamma"] * F.linear(out, own["attention.proj.weight"], own["attention.proj.bias"])
    h = F.gelu(conv(layer_norm(t, "mlp.norm")[..., None], "mlp.fc1", config.mlp_groups))
    h = torch.channel_shuffle(h[..., None], config.mlp_groups)
    t = t + own["ls2.gamma"] * conv(h, "mlp.fc2", config.mlp_groups).squeeze(-1)
    return F.linear(t, own["fc.weight"], own["fc.bias"])


@pytest.mark.parametrize("gram_layer", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_heads_together_equal_each_head_written_out_with_convolutions(gram_layer: bool, training: bool) -> None:
    head = shaken(small(gram_layer=gram_layer)).double().train(training)
    tokens = some_tokens(prefix=1)
    tokens = tokens.but(tokens.sequence.double())
    expected = [one_head_written_out(head, k, tokens.patches, GRID) for k in range(3)]
    torch.testing.assert_close(head(tokens), torch.stack(expected, dim=1))


@pytest.mark.parametrize("training", [False, True])
def test_heads_together_equal_separate_single_heads_and_so_do_their_gradients(training: bool) -> None:
    head = shaken(small()).double().train(training)
    tokens = some_tokens()
    alone = [head.keep([k]) for k in range(3)]
    x, y = (tokens.sequence.double().requires_grad_() for _ in range(2))
    together, apart = head(tokens.but(x)), torch.cat([one(tokens.but(y)) for one in alone], dim=1)
    torch.testing.assert_close(together, apart)
    slope = torch.randn_like(together)
    together.backward(slope)
    apart.backward(slope)
    torch.testing.assert_close(x.grad, y.grad)
    for k, one in enumerate(alone):
        for name, parameter in one.named_parameters():
            torch.testing.assert_close(head.get_parameter(name).grad.chunk(3)[k], parameter.grad)


def test_running_statistics_are_those_of_separate_heads() -> None:
    head = shaken(small()).train()
    alone = [head.keep([k]) for k in range(3)]
    tokens = some_tokens()
    head(tokens)
    for k, one in enumerate(alone):
        one(tokens)
        for name, buffer in one.named_buffers():
            whole = head.get_buffer(name)
            torch.testing.assert_close(whole.chunk(3)[k] if whole.ndim else whole, buffer)


@pytest.mark.parametrize(
    ("width", "attention_width", "gram_layer", "count"),
    [(768, 192, True, 4_782_760), (688, 168, True, 4_140_472), (768, 192, False, 4_476_712)],
)
def test_parameters_of_a_head_follow_the_closed_form(
    width: int, attention_width: int, gram_layer: bool, count: int
) -> None:
    with torch.device("meta"):
        five = GramianHead(Gramian(heads=5, gram_layer=gram_layer), width, 1000)
    C, d, E = width, 192, attention_width
    closed = C * d + 3 * d + d * (d + 1) // 2 * C // 8 + 3 * C + 4 * C * E + 7 * C + 8 * C * C // 4 + 5 * C
    closed += (C + 1) * 1000 + (8 * d * d + 58 * d if gram_layer else 0)
    assert closed == count
    assert sum(p.numel() for p in five.parameters()) == 5 * count


def test_gram_vector_ignores_scale_and_order_of_tokens() -> None:
    x = torch.randn(2, 6, 20, dtype=torch.float64)
    torch.testing.assert_close(gram_vector(7.3 * x), gram_vector(x))
    torch.testing.assert_close(gram_vector(x[..., torch.randperm(20)]), gram_vector(x))


def test_logits_do_not_depend_on_the_order_of_tokens() -> None:
    head = shaken(small()).double().eval()
    tokens = some_tokens()
    x = tokens.sequence.double()
    moved = head(tokens.but(x[:, torch.randperm(x.shape[1])]))
    torch.testing.assert_close(moved, head(tokens.but(x)))


def test_without_gains_the_classified_vector_is_the_gram_token() -> None:
    head = shaken(small()).eval()
    tokens = some_tokens()
    gram = head.gram_token(tokens)
    assert not torch.allclose(head.embed(tokens), gram)
    torch.nn.init.zeros_(head.ls1.gamma)
    torch.nn.init.zeros_(head.ls2.gamma)
    assert torch.equal(head.embed(tokens), gram)


def test_maps_are_the_attention_to_the_patches() -> None:
    head = shaken(small()).eval()
    tokens = some_tokens(prefix=1)
    found = head.maps(tokens)
    assert found.shape == (4, 12, 12)
    gram, attention = head.gram_token(tokens), head.attention
    for k in range(3):
        t = gram[:, k * WIDTH : (k + 1) * WIDTH]
        gain, shift = (p.chunk(3)[k] for p in (attention.norm.weight, attention.norm.bias))
        u = F.layer_norm(torch.cat([t[:, None], tokens.patches], dim=1), (WIDTH,), gain, shift, 1e-6)
        q = F.linear(u[:, 0], attention.query.weight.chunk(3)[k])
        keys = F.linear(u, attention.key.weight.chunk(3)[k])
        for h in range(4):
            scores = torch.einsum("be,bne->bn", q[:, 4 * h : 4 * h + 4], keys[..., 4 * h : 4 * h + 4]) / 2
            weights = scores.softmax(-1)[:, 1:]
            torch.testing.assert_close(found[:, 4 * k + h], weights / weights.sum(-1, keepdim=True))


def test_prefix_and_masked_tokens_change_nothing() -> None:
    head = shaken(small()).eval()
    tokens = some_tokens()
    expected = head(tokens)
    padded = torch.cat([torch.randn(4, 1, WIDTH), tokens.sequence, 1e3 * torch.randn(4, 5, WIDTH)], dim=1)
    mask = torch.ones(4, 18, dtype=torch.bool)
    mask[:, 13:] = False
    torch.testing.assert_close(head(Tokens(padded, 1, GRID, mask)), expected)


def test_float32_gram_is_a_thousand_times_finer_than_bfloat16_features() -> None:
    x = torch.randn(2, 192, 196, dtype=torch.float64)
    exact = gram_vector(x)
    single = (gram_vector(x.float()).double() - exact).norm(dim=-1).max()
    rounded = (gram_vector(x.bfloat16().double()) - exact).norm(dim=-1).max()
    assert single < 1e-6
    assert rounded > 1000 * single


def test_autocast_stays_finite_and_keeps_the_gram_token_in_float32() -> None:
    head = small(gram_layer=True).train()
    tokens = some_tokens(batch=8)
    tokens = tokens.but(300 * tokens.sequence)
    with torch.autocast("cpu", torch.bfloat16):
        assert head.gram_token(tokens).dtype == torch.float32
        stack = head(tokens)
        loss = F.cross_entropy(stack.flatten(0, 1).float(), torch.zeros(24, dtype=torch.long))
        loss = loss + head.losses(stack, torch.zeros(8, dtype=torch.long))["decorrelation"]
    loss.backward()
    assert stack.isfinite().all()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in head.parameters())


def test_a_model_of_bfloat16_follows_the_float32_one() -> None:
    head = small().eval()
    tokens = some_tokens()
    with torch.no_grad():
        exact, half = head(tokens), copy.deepcopy(head).bfloat16()(tokens.but(tokens.sequence.bfloat16()))
    assert half.dtype == torch.bfloat16
    assert (half.float() - exact).norm() < 0.05 * exact.norm()


def test_fuse_averages_the_heads_without_the_auxiliary() -> None:
    head = shaken(small(auxiliary=True)).eval()
    tokens = some_tokens()
    stack = head(tokens)
    assert stack.shape == (4, 4, CLASSES)
    assert head.classifiers == 4
    torch.testing.assert_close(head.fuse(stack), (stack[:, 0] + stack[:, 1] + stack[:, 2]) / 3)
    torch.testing.assert_close(stack[:, 3], head.auxiliary(tokens)[:, 0])


def divergence_by_torch(stack: Tensor) -> Tensor:
    """Sum over heads and mean over images of KL(anchor || head)."""
    anchor = stack.mean(1).softmax(-1)
    return sum(F.kl_div(stack[:, k].log_softmax(-1), anchor, reduction="batchmean") for k in range(stack.shape[1]))


@pytest.mark.parametrize("reduction", ["mean", "batch"])
def test_decorrelation_is_the_weighted_divergence(reduction: str) -> None:
    head = small(reduction=reduction, decorrelation=-0.02)
    stack = torch.randn(6, 3, CLASSES)
    target = torch.randint(CLASSES, (6,))
    expected = -0.02 * divergence_by_torch(stack) / (CLASSES if reduction == "mean" else 1)
    torch.testing.assert_close(head.losses(stack, target)["decorrelation"], expected)
    soft = F.one_hot(target, CLASSES).float()
    torch.testing.assert_close(head.losses(stack, soft)["decorrelation"], expected)


def test_the_anchor_passes_no_gradient() -> None:
    stack = torch.randn(6, 3, CLASSES, dtype=torch.float64, requires_grad=True)
    anchor = stack.detach().mean(1, keepdim=True).softmax(-1)
    (slope,) = torch.autograd.grad(mean_divergence(stack), stack)
    torch.testing.assert_close(slope, (stack.detach().softmax(-1) - anchor) / 18)  # p_k - anchor, anchor held


@pytest.mark.parametrize("weight", [-0.8, 0.8])
def test_a_step_against_the_gradient_parts_heads_for_negative_weights(weight: float) -> None:
    head = small(decorrelation=weight)
    stack = torch.randn(16, 3, CLASSES, requires_grad=True)
    target = torch.randint(CLASSES, (16,))
    (slope,) = torch.autograd.grad(head.losses(stack, target)["decorrelation"], stack)
    change = float(divergence_by_torch(stack.detach() - 0.1 * slope) - divergence_by_torch(stack.detach()))
    assert change * weight < 0


def test_one_head_or_no_weight_has_no_decorrelation_at_all() -> None:
    assert mean_divergence(torch.randn(6, 1, CLASSES)) == 0
    assert small(heads=1).losses(torch.randn(6, 1, CLASSES), torch.zeros(6, dtype=torch.long)) == {}
    assert small(decorrelation=0.0).losses(torch.randn(6, 3, CLASSES), torch.zeros(6, dtype=torch.long)) == {}


def test_decorrelation_takes_back_at_most_its_limit_and_keeps_its_direction() -> None:
    stack = (4 * torch.randn(6, 3, CLASSES)).requires_grad_()
    target = torch.randint(CLASSES, (6,))
    free, held = small(decorrelation=-0.001), small(decorrelation=-50.0, reduction="batch", limit=0.25)
    (wanted,) = torch.autograd.grad(free.losses(stack, target)["decorrelation"], stack)
    loss = held.losses(stack, target)["decorrelation"]
    (slope,) = torch.autograd.grad(loss, stack)
    cross = sum(F.cross_entropy(stack[:, k], target) for k in range(3))
    dense = F.one_hot(target, CLASSES).float()
    binary = sum(F.binary_cross_entropy_with_logits(stack[:, k], dense) for k in range(3))
    torch.testing.assert_close(loss.detach(), -0.25 * torch.minimum(cross, CLASSES * binary).detach())
    torch.testing.assert_close(F.cosine_similarity(slope.flatten(), wanted.flatten(), dim=0), torch.tensor(1.0))


@pytest.mark.parametrize("loss", ["cross_entropy", "bce"])
def test_the_limit_keeps_free_logits_from_running_away(loss: str) -> None:
    target = torch.arange(8) % 3

    def trained(limited: bool) -> Tensor:
        head = small(classes=3, decorrelation=-20.0, reduction="batch")
        head.loss_scale = 1 / 3 if loss == "bce" else 1.0
        stack = torch.randn(8, 3, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
        for _ in range(300):
            dense = F.one_hot(target, 3).float()[:, None].expand(-1, 3, -1)
            if loss == "bce":
                task = 3 * F.binary_cross_entropy_with_logits(stack, dense)
            else:
                task = -(dense * stack.log_softmax(-1)).sum(-1).mean(0).sum()
            extra = head.losses(stack, target)["decorrelation"] if limited else -20.0 * 3 * mean_divergence(stack)
            (slope,) = torch.autograd.grad(task + extra, stack)
            stack = (stack - 0.5 * slope).detach().requires_grad_()
        return stack.detach()

    fused = trained(True).sum(1)
    assert (fused.argmax(-1) == target).all()
    assert trained(True).abs().max() < 50
    assert trained(False).abs().max() > 200


def test_kept_heads_are_smaller_and_give_their_own_logits() -> None:
    head = shaken(small(auxiliary=True)).eval()
    head.fc.bias.requires_grad_(False)
    tokens = some_tokens()
    stack = head(tokens)
    kept = head.keep([2, 0])
    assert isinstance(kept, GramianHead)
    torch.testing.assert_close(kept(tokens), stack[:, [2, 0]])
    torch.testing.assert_close(kept.fuse(kept(tokens)), (stack[:, 2] + stack[:, 0]) / 2)
    per_head = sum(p.numel() for n, p in head.named_parameters() if not n.startswith("auxiliary")) // 3
    assert sum(p.numel() for p in kept.parameters()) == 2 * per_head
    held = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in kept.parameters()}
    assert sum(held.values()) == 2 * per_head * 4  # no view of the large tensors
    assert kept.config.heads == 2
    assert not kept.training
    assert not kept.fc.bias.requires_grad
    assert kept.fc.weight.requires_grad
    again = GramianHead(kept.config, WIDTH, CLASSES).eval()
    again.load_state_dict(kept.state_dict())
    torch.testing.assert_close(again(tokens), stack[:, [2, 0]])


@pytest.mark.parametrize("indices", [[3], [-1], [0, 0]])
def test_keeping_what_is_no_head_is_refused(indices: list[int]) -> None:
    with pytest.raises(ValueError, match="from 0 to 2"):
        small().keep(indices)


def test_without_heads_the_trained_auxiliary_classifier_remains() -> None:
    head = shaken(small(auxiliary=True)).eval()
    tokens = some_tokens()
    left = head.keep([])
    assert isinstance(left, MeanHead)
    torch.testing.assert_close(left(tokens)[:, 0], head(tokens)[:, 3])


def test_without_heads_and_auxiliary_a_new_classifier_says_that_it_is_new() -> None:
    with pytest.warns(UserWarning, match="train the new one"):
        left = small().keep([])
    assert isinstance(left, MeanHead)
    assert left(some_tokens()).shape == (4, 1, CLASSES)


def test_built_on_meta_and_reset_it_starts_like_any_other() -> None:
    with torch.device("meta"):
        empty = small(gram_layer=True, auxiliary=True)
    made, direct = empty.to_empty(device="cpu"), small(gram_layer=True, auxiliary=True)
    for head in (made, direct):
        torch.manual_seed(5)
        reset(head)
    for name, tensor in direct.state_dict().items():
        assert torch.equal(made.state_dict()[name], tensor), name
    assert math.isclose(float(made.fc.weight.detach().std()), 0.02, rel_tol=0.2)


def test_it_compiles_whole_with_its_losses() -> None:
    head = shaken(small(gram_layer=True, auxiliary=True)).train()
    target = torch.zeros(4, dtype=torch.long)

    def step(sequence: Tensor) -> tuple[Tensor, Tensor]:
        stack = head(Tokens(sequence, 1, GRID))
        return stack, head.losses(stack, target)["decorrelation"]

    x = torch.randn(4, 13, WIDTH)
    expected = step(x)
    torch.compiler.reset()
    found = torch.compile(step, fullgraph=True, backend="eager")(x)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"embed_groups": 3}, r"embed_groups = 3 .* use one of 1, 2, 4$"),
        ({"mlp_groups": 5}, r"mlp_groups = 5 .* use one of 1, 2, 4, 8, 16, 32$"),
        ({"attention_heads": 3}, r"attention_heads = 3 .* use one of 1, 2, 4, 8, 16$"),
    ],
)
def test_groups_that_do_not_divide_name_those_that_do(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small(**changes)


def test_one_image_cannot_be_trained_on_but_classified() -> None:
    head = small()
    with pytest.raises(ValueError, match="at least 2 images"):
        head.train()(some_tokens(batch=1))
    assert head.eval()(some_tokens(batch=1)).shape == (1, 3, CLASSES)


def test_the_gram_layer_asks_for_the_whole_grid() -> None:
    head = small(gram_layer=True).eval()
    with pytest.raises(ValueError, match="all 3 x 4 patches"):
        head(Tokens(torch.randn(2, 7, WIDTH), 0, GRID))


@pytest.mark.parametrize("kind", ["timm", "cifar"])
def test_it_trains_convolutional_networks_through_their_last_map(kind: str) -> None:
    images = torch.randn(2, 3, 64, 64)
    if kind == "timm":
        trunk = timm.create_model("resnet18", num_classes=0, channels=(8, 16, 32, 64))
        last = trunk.forward_features(images)
        tokens = Tokens(last.flatten(2).transpose(1, 2), 0, (2, 2))
    else:
        trunk = CifarResNetTrunk(8)
        tokens = trunk.embed(images)
    head = small(width=64, gram_width=16, gram_layer=True, embed_groups=8, attention_width=None)
    F.cross_entropy(head.fuse(head(tokens)), torch.tensor([0, 1])).backward()
    for name, parameter in (*trunk.named_parameters(), *head.named_parameters()):
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
