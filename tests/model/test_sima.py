"""SimA and the attentions it is compared with: identities, and the kernel against float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from vitrail.kernels.sima_attention import able, normalised, plain_sima, product, ragged_sima, sima
from vitrail.model.build import create_model
from vitrail.model.heads.class_attention import ClassSimaMixer
from vitrail.model.heads.config import ClassAttention
from vitrail.model.mixers.config import CosFormer, Efficient, EluKernel, MixerConfig, Sima, Xca
from vitrail.model.mixers.mixer import Mixer, build_mixer
from vitrail.model.parts.tokens import Tokens
from vitrail.model.zoo import ZOO

LINEAR: list[MixerConfig] = [
    *(Sima(), Sima(norm="l2"), Xca(), EluKernel(), Efficient(), CosFormer(), CosFormer(reweight=True))
]


def spelled_out(qkv: Tensor, p: int = 1) -> Tensor:
    """SimA (Koohpayegani and Pirsiavash 2022, arXiv 2206.08898) in float64, by torch's own normalisation."""
    q, k, v = qkv.double().permute(2, 0, 3, 1, 4).unbind(0)
    return (F.normalize(q, p=p, dim=-2) @ F.normalize(k, p=p, dim=-2).mT @ v).transpose(1, 2)


def shaken(config: MixerConfig, width: int = 32, heads: int = 2) -> Mixer:
    torch.manual_seed(0)
    mixer = build_mixer(config, width, heads, (3, 3)).double()
    for parameter in mixer.parameters():
        nn.init.normal_(parameter, std=0.3)
    return mixer


@pytest.mark.parametrize("tokens", [7, 16, 40])
@pytest.mark.parametrize("norm", ["l1", "l2"])
def test_sima_is_algorithm_1_in_both_orders(tokens: int, norm: str) -> None:
    qkv = torch.randn(2, tokens, 3, 2, 16, dtype=torch.float64)
    expected = spelled_out(qkv, int(norm[1]))
    for order in ("auto", "qk_first", "kv_first"):
        torch.testing.assert_close(sima(qkv, norm, order), expected, rtol=1e-12, atol=1e-15)


def test_the_cheaper_order_is_chosen_on_both_sides_of_the_crossover() -> None:
    for tokens, dim in ((16, 64), (63, 64), (65, 64), (197, 64)):
        q = torch.empty(1, tokens, dim, device="meta")
        counts = {}
        for order in ("auto", "qk_first", "kv_first"):
            with FlopCounterMode(display=False) as counter:
                product(q, q, q, order)
            counts[order] = counter.get_total_flops() // 2
        assert counts["qk_first"] == 2 * tokens**2 * dim
        assert counts["kv_first"] == 2 * tokens * dim**2
        assert counts["auto"] == min(counts.values())


def test_entries_of_the_map_are_bounded_and_so_is_their_sum() -> None:
    dim = 8
    q, k = torch.randn(2, 20, 12, dim, dtype=torch.float64).unbind(0)
    attention = normalised(q, "l1") @ normalised(k, "l1").mT
    assert (attention < 0).any()
    assert attention.abs().max() <= dim
    assert attention.abs().sum((-2, -1)).max() <= dim


def test_the_bound_is_attained_by_one_token() -> None:
    q = torch.zeros(5, 8, dtype=torch.float64)
    q[2] = torch.rand(8, dtype=torch.float64) + 0.1
    attention = normalised(q, "l1") @ normalised(3 * q, "l1").mT
    assert attention[2, 2].item() == pytest.approx(8, rel=1e-12)
    assert attention.sum().item() == pytest.approx(8, rel=1e-12)


def test_rescaling_a_channel_of_q_or_k_changes_nothing() -> None:
    qkv = torch.randn(1, 20, 3, 2, 16, dtype=torch.float64)
    gain = torch.ones(3, 2, 16, dtype=torch.float64)
    gain[:2] = 10 ** torch.empty(2, 2, 16, dtype=torch.float64).uniform_(-3, 3)
    torch.testing.assert_close(sima(qkv * gain), sima(qkv), rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("config", [c for c in LINEAR if c != CosFormer(reweight=True)], ids=repr)
def test_permuted_tokens_give_permuted_outputs(config: MixerConfig) -> None:
    mixer, x, order = shaken(config), torch.randn(2, 9, 32, dtype=torch.float64), torch.randperm(9)
    straight = mixer(x, Tokens(x, 0, (3, 3)))
    torch.testing.assert_close(mixer(x[:, order], Tokens(x, 0, (3, 3))), straight[:, order], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["deit_small_sima", "xcit_s12_p16_sima"])
def test_with_relu_nothing_exponential_is_in_the_graph(name: str) -> None:
    def operations(**changes: object) -> str:
        head = ZOO[name].head
        head = replace(head, heads=2) if isinstance(head, ClassAttention) else head
        model = create_model(name, classes=3, depth=2, width=32, heads=2, image_size=64, head=head, **changes).eval()
        graph = torch.export.export(model, (torch.zeros(1, 3, 64, 64),)).graph
        return " ".join(str(node.target) for node in graph.nodes)

    exponential = ("exp.", "softmax", "gelu", "erf", "sigmoid", "tanh", "scaled_dot_product", "elu.")
    found = operations(activation="relu")
    assert "relu" in found
    assert not [word for word in exponential if word in found.replace("relu.", "")]
    assert "gelu" in operations()
    assert "scaled_dot_product" in operations(activation="relu", mixer="softmax")


def test_float16_stays_right_where_norms_and_the_product_of_q_and_k_overflow() -> None:
    torch.manual_seed(0)
    qkv = torch.randn(1, 400, 3, 2, 64)
    qkv[:, :, :2] *= 300
    half = qkv.half()
    q, k, _ = half.permute(2, 0, 3, 1, 4).unbind(0)
    assert not torch.isfinite(q @ k.mT).all()
    assert not torch.isfinite(q.abs().sum(-2)).any()
    for order in ("qk_first", "kv_first"):
        error = (plain_sima(half, "l1", order).double() - spelled_out(half)).norm() / spelled_out(half).norm()
        assert error < 2e-3  # four roundings to 11 bits: 2^-11 = 5e-4 each


@pytest.mark.parametrize("tokens", [40, 4096])
def test_bfloat16_keeps_its_precision_at_any_length(tokens: int) -> None:
    torch.manual_seed(0)
    qkv = torch.randn(1, tokens, 3, 1, 16).bfloat16()
    expected = spelled_out(qkv)
    error = (sima(qkv).double() - expected).norm() / expected.norm()
    assert error < 1e-2  # four roundings to 8 bits: 2^-9 = 2e-3 each


def test_a_channel_of_zeros_gives_zeros_and_finite_gradients() -> None:
    qkv = torch.randn(1, 9, 3, 1, 4)
    qkv[..., :2, :, 1] = 0
    qkv.requires_grad_()
    for norm in ("l1", "l2"):
        out = sima(qkv, norm)
        (gradient,) = torch.autograd.grad(out.sum(), qkv)
        assert torch.isfinite(out).all()
        assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("config", LINEAR, ids=repr)
def test_a_padded_image_is_mixed_as_it_is_alone(config: MixerConfig) -> None:
    mixer, x = shaken(config), torch.randn(2, 9, 32, dtype=torch.float64)
    index = torch.stack([torch.randperm(9) for _ in range(2)])
    lengths = (5, 8)
    mask = torch.arange(9).expand(2, 9) < torch.tensor(lengths)[:, None]
    garbage = torch.where(mask[..., None], x, 1e3)
    padded = mixer(garbage, Tokens(garbage, 0, (3, 3), mask=mask, index=index))
    for i, length in enumerate(lengths):
        alone = x[i : i + 1, :length]
        expected = mixer(alone, Tokens(alone, 0, (3, 3), index=index[i : i + 1, :length]))
        torch.testing.assert_close(padded[i : i + 1, :length], expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("token_in_keys", [True, False])
def test_class_attention_by_sima_reads_each_images_own_tokens(token_in_keys: bool) -> None:
    torch.manual_seed(0)
    mixer = ClassSimaMixer(32, 2, token_in_keys).double()
    for parameter in mixer.parameters():
        nn.init.normal_(parameter, std=0.3)
    z = torch.randn(2, 8, 32, dtype=torch.float64)
    alone = mixer(z[:1, :5], None)
    first = 0 if token_in_keys else 1
    q, k, v = (layer(z[:1, :5]).unflatten(-1, (2, 16)).transpose(1, 2) for layer in (mixer.q, mixer.k, mixer.v))
    q, k = F.normalize(q, p=1, dim=-2), F.normalize(k[:, :, first:], p=1, dim=-2)
    expected = mixer.proj((q @ k.mT @ v[:, :, first:]).transpose(1, 2).flatten(2)[:, :1])
    torch.testing.assert_close(alone, expected)
    mask = torch.arange(8).expand(2, 8) < torch.tensor([[5], [8]])
    torch.testing.assert_close(mixer(z, mask)[:1], alone, rtol=1e-10, atol=1e-12)


def test_a_ragged_batch_is_its_images_one_by_one() -> None:
    qkv = torch.randn(20, 3, 2, 16, dtype=torch.float64, requires_grad=True)
    offsets = torch.tensor([0, 5, 5, 17])
    found = ragged_sima(qkv, offsets)
    images = [spelled_out(qkv[None, a:b])[0] for a, b in ((0, 5), (5, 17))]
    torch.testing.assert_close(found[:17], torch.cat(images), rtol=1e-12, atol=1e-15)
    assert torch.equal(found[17:], torch.zeros(3, 2, 16, dtype=torch.float64))


INTERPRETED = """
import torch
import torch.nn.functional as F
from vitrail.kernels import sima as declared
from vitrail.kernels import sima_triton

torch.manual_seed(0)

def spelled_out(qkv, p):
    q, k, v = qkv.double().permute(2, 0, 3, 1, 4).unbind(0)
    return (F.normalize(q, p=p, dim=-2) @ F.normalize(k, p=p, dim=-2).mT @ v).transpose(1, 2)

def close(found, expected, what):
    assert (found - expected).abs().max() < 3e-6 * expected.abs().max(), what

sizes = ((5, 2, 16, 1, 1), (65, 2, 32, 1, 2), (37, 2, 24, 1, 1), (130, 1, 48, 2, 1), (200, 1, 16, 3, 2))
for tokens, heads, dim, split, p in sizes:
    qkv = torch.randn(2, tokens, 3, heads, dim, requires_grad=True)
    expected = spelled_out(qkv, p)
    grad = torch.randn(expected.shape, dtype=torch.float64)
    (gradient,) = torch.autograd.grad(expected, qkv, grad)
    for ahead in (False, True):
        cut = {"split": split, "ahead": ahead}
        close(sima_triton.forward(qkv.detach(), None, p, **cut), expected, (tokens, p, cut))
        close(sima_triton.backward(qkv.detach(), grad.float(), None, p, **cut), gradient, (tokens, p, cut, "gradient"))
qkv, offsets = torch.randn(80, 3, 2, 16), torch.tensor([0, 5, 5, 75])
made, grad = sima_triton.forward(qkv, offsets), torch.randn(80, 2, 16)
gradient = sima_triton.backward(qkv, grad, offsets)
for a, b in ((0, 5), (5, 75)):
    image = qkv[None, a:b].clone().requires_grad_()
    expected = spelled_out(image, 1)
    close(made[a:b], expected[0], "ragged")
    close(gradient[a:b], torch.autograd.grad(expected, image, grad[None, a:b].double())[0][0], "ragged gradient")
assert not made[75:].any() and not gradient[75:].any()
dead = torch.randn(1, 9, 3, 1, 16)
dead[..., :2, :, 1] = 0
assert torch.isfinite(sima_triton.backward(dead, torch.randn(1, 9, 1, 16))).all()


# The operator itself, with its autograd and its optional offsets; a CPU has no kernel of it outside of this test.
declared._sima.register_kernel("cpu")(lambda x, o, p: sima_triton.forward(x.contiguous(), o, p))
declared._sima_backward.register_kernel("cpu")(lambda x, g, o, p: sima_triton.backward(x, g.contiguous(), o, p))
qkv.requires_grad_()
for bounds in (offsets, None):
    shaped = qkv if bounds is not None else qkv.view(2, 40, 3, 2, 16)
    out = torch.ops.vitrail.sima(shaped, bounds, 1)
    (found,) = torch.autograd.grad(out, qkv, grad.view_as(out))
    if bounds is not None:
        close(found, gradient, "operator, ragged")
    else:
        expected = torch.autograd.grad(spelled_out(shaped, 1), qkv, grad.view_as(out).double())[0]
        close(found, expected, "operator")
print("sima is right")
"""


def test_the_kernel_equals_float64_in_the_interpreter(interpreted: Callable[[str], str]) -> None:
    assert "sima is right\n" in interpreted(INTERPRETED)


def test_a_cpu_uses_the_plain_twin() -> None:
    qkv = torch.randn(2, 9, 3, 2, 16).bfloat16()
    assert not able(qkv)
    assert torch.equal(sima(qkv), plain_sima(qkv))


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA accelerator")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("tokens", "dim"), [(5, 16), (65, 32), (197, 64), (197, 48), (577, 64), (1025, 128), (4097, 64)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_kernel_and_its_gradient_equal_float64(tokens: int, dim: int, dtype: torch.dtype, compiled: bool) -> None:
    torch.manual_seed(tokens)
    qkv = torch.randn(2, tokens, 3, 2, dim, device="cuda").to(dtype).requires_grad_()
    assert able(qkv)
    exact = qkv.detach().double().requires_grad_()
    expected = spelled_out(exact)
    grad = torch.randn(expected.shape, device="cuda").to(dtype)
    (expected_gradient,) = torch.autograd.grad(expected, exact, grad.double())
    found = (torch.compile(sima, dynamic=False) if compiled else sima)(qkv)
    (gradient,) = torch.autograd.grad(found, qkv, grad)
    plain = plain_sima(qkv)
    (plain_gradient,) = torch.autograd.grad(plain, qkv, grad)
    # As near as PyTorch's own operations come in the same precision, with a little room.
    assert relative(found, expected) < 1.2 * relative(plain, expected) + 1e-4
    assert relative(gradient, expected_gradient) < 1.2 * relative(plain_gradient, expected_gradient) + 1e-4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA accelerator")
@pytest.mark.parametrize(("tokens", "dim"), [(197, 64), (577, 64), (1025, 128), (4097, 64)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_kernel_gives_the_same_bits_whatever_runs_beside_it(tokens: int, dim: int, dtype: torch.dtype) -> None:
    torch.manual_seed(tokens)
    qkv = torch.randn(2, tokens, 3, 2, dim, device="cuda").to(dtype).requires_grad_()
    grad = torch.randn(2, tokens, 2, dim, device="cuda").to(dtype)
    beside, busy = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda")
    made = []
    for _ in range(50):
        with torch.cuda.stream(beside):
            busy @ busy  # takes turns on the multiprocessors, so that warps are late by chance
        out = sima(qkv)
        made.append((out, *torch.autograd.grad(out, qkv, grad)))
    first = made[0]
    assert all(torch.equal(a, b) for other in made for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("name", ["deit_small", "cait_xxs24", "xcit_t12_p8"])
@pytest.mark.parametrize("heads", [1, 2])
def test_any_family_takes_sima_by_name(name: str, heads: int) -> None:
    options = {"classes": 3, "depth": 2, "width": 32, "heads": heads, "image_size": 32, "patch": 8}
    model = create_model(name, mixer="sima", **options)
    assert model.trunk.config.mixer == Sima()
    assert model.trunk.blocks[1].attn.heads == heads
    model(torch.randn(2, 3, 32, 32)).sum().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())


@pytest.mark.parametrize("config", LINEAR, ids=repr)
def test_what_is_captured_is_what_was_computed(config: MixerConfig) -> None:
    options = {"classes": 3, "depth": 2, "width": 32, "heads": 2, "image_size": 32, "patch": 8}
    model = create_model("deit_tiny", mixer=config, **options).eval().double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    names = model.trunk.intermediates
    with torch.no_grad():
        found = model.outputs(images, want=names)
        torch.testing.assert_close(found.stack, model.stack(images), rtol=1e-9, atol=1e-10)
        for name, value in found.captured.items():
            again = model.outputs(images, given={name: value})
            torch.testing.assert_close(again.stack, found.stack, rtol=1e-9, atol=1e-10)
            assert not torch.allclose(
                model.outputs(images, given={name: value + torch.randn_like(value)}).stack, found.stack
            )


def one_head(mixer: Mixer, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (x @ mixer.qkv.weight.T + mixer.qkv.bias).chunk(3, -1)
    return q, k, v


def test_the_elu_kernel_is_attention_with_its_similarity() -> None:
    mixer, x = shaken(EluKernel(), heads=1), torch.randn(1, 9, 32, dtype=torch.float64)
    q, k, v = one_head(mixer, x)
    f = [torch.where(t > 0, t + 1, t.exp()) for t in (q, k)]
    similarity = torch.einsum("bid,bjd->bij", *f)
    expected = mixer.proj(similarity / similarity.sum(-1, keepdim=True) @ v)
    torch.testing.assert_close(mixer(x, Tokens(x, 0, (3, 3))), expected)


def test_efficient_attention_has_rows_that_sum_to_one() -> None:
    mixer, x = shaken(Efficient(), heads=1), torch.randn(1, 9, 32, dtype=torch.float64)
    tokens = Tokens(x, 0, (3, 3))
    q, k, v = one_head(mixer, x)
    attention = torch.einsum("bid,bjd->bij", q.softmax(2), k.softmax(1))
    torch.testing.assert_close(attention.sum(-1), torch.ones(1, 9, dtype=torch.float64))
    torch.testing.assert_close(mixer(x, tokens), mixer.proj(attention @ v))


@pytest.mark.parametrize("prefix", [0, 1])
@pytest.mark.parametrize("reweight", [False, True])
def test_cosformer_is_relu_attention_weighed_by_cosines_of_distances(reweight: bool, prefix: int) -> None:
    rows, columns = 2, 4
    mixer = shaken(CosFormer(reweight=reweight), heads=1)
    x = torch.randn(1, prefix + 8, 32, dtype=torch.float64)
    q, k, v = one_head(mixer, x)
    similarity = torch.einsum("bid,bjd->bij", q.relu(), k.relu())
    places = [(0.5, 0.5)] * prefix + [(r / rows, c / columns) for r in range(rows) for c in range(columns)]
    if reweight:
        for i, (r, c) in enumerate(places):
            for j, (s, d) in enumerate(places):
                similarity[0, i, j] *= math.cos(math.pi / 2 * (r - s)) * math.cos(math.pi / 2 * (c - d))
    expected = mixer.proj(similarity / similarity.sum(-1, keepdim=True) @ v)
    torch.testing.assert_close(mixer(x, Tokens(x, prefix, (rows, columns))), expected)
