"""Kernels against their plain twins: Triton's in its interpreter, the others as they are."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F

from vitrail.kernels.attention import able, attention_by_map, packed_attention, plain_packed_attention, prefers_map
from vitrail.kernels.fp8 import LARGEST, Fp8Linear, gelu_quantise, plain_product, quantise
from vitrail.kernels.gelu import Gelu, few_operations_gelu, linear_gelu

INTERPRETED = """
import torch
from vitrail.kernels import attention_triton
from vitrail.kernels.fp8_triton import gelu_quantise
from vitrail.kernels.fp8 import quantise

torch.manual_seed(0)
for tokens, heads, dim in ((5, 2, 16), (16, 1, 32), (65, 2, 32), (64, 1, 64), (37, 2, 24), (128, 1, 16), (130, 1, 16)):
    qkv = torch.randn(2, tokens, 3, heads, dim, dtype=torch.float32, requires_grad=True)
    q, k, v = qkv.double().permute(2, 0, 3, 1, 4).unbind(0)
    expected = ((q @ k.transpose(-2, -1)) * dim**-0.5).softmax(-1).matmul(v).transpose(1, 2)
    grad = torch.randn_like(expected)
    (gradient,) = torch.autograd.grad(expected, qkv, grad)
    out, lse = attention_triton.forward(qkv.detach())
    made = attention_triton.backward(qkv.detach(), out, lse, grad.float().contiguous())
    sums = ((q @ k.transpose(-2, -1)) * dim**-0.5).logsumexp(-1)
    assert (out - expected).abs().max() < 2e-6, tokens
    assert (lse * 0.6931471805599453 - sums).abs().max() < 5e-6, tokens
    assert (made - gradient).abs().max() < 1e-5, tokens
    # Keys that count as several are as many keys.
    size = torch.randint(1, 4, (1, tokens))
    many_k, many_v = (part.repeat_interleave(size[0], 2) for part in (k, v))
    expected = ((q @ many_k.transpose(-2, -1)) * dim**-0.5).softmax(-1).matmul(many_v).transpose(1, 2)
    out, _ = attention_triton.forward(qkv.detach(), size.expand(2, -1).float().contiguous())
    assert (out - expected).abs().max() < 2e-6, tokens
print("attention is right")
x = torch.randn(9, 100) * 3
small, scale = gelu_quantise(x)
wide, wide_scale = quantise(torch.nn.functional.gelu(x))
assert (scale / wide_scale - 1).abs().max() < 1e-6
# The interpreter loses the carry when it rounds up to a power of two, and numbers below 2^-6; the rest must be right.
# (An accelerator shows all of them: test_gpu.py.)
sound = (torch.frexp(wide.float().abs())[0] != 0.5) & (wide.float().abs() > 2**-6)
assert sound.float().mean() > 0.3
assert torch.equal(small.float()[sound], wide.float()[sound])
print("quantisation is right")
"""


def test_triton_kernels_equal_float64_in_the_interpreter(interpreted: Callable[[str], str]) -> None:
    assert "attention is right\nquantisation is right\n" in interpreted(INTERPRETED)


def test_a_key_of_size_n_counts_as_n_equal_keys() -> None:
    qkv = torch.randn(2, 7, 3, 2, 8, generator=torch.Generator().manual_seed(0))
    size = torch.tensor([1, 3, 1, 2, 1, 5, 1])
    found = packed_attention(qkv, size.expand(2, -1).float())
    many = plain_packed_attention(qkv.repeat_interleave(size, 1))  # queries are repeated, too
    firsts = size.cumsum(0) - size
    torch.testing.assert_close(found, many[:, firsts], rtol=1e-5, atol=1e-5)


def test_kernels_of_triton_are_not_imported_on_a_cpu() -> None:
    script = (
        "import sys, torch, vitrail\n"
        "model = vitrail.create_model('vit_micro_28', classes=3)\n"
        "model(torch.zeros(2, 3, 28, 28)).sum().backward()\n"
        "model.optimize()(torch.zeros(2, 3, 28, 28))\n"
        "assert not any(name.startswith('vitrail') and name.endswith('_triton') for name in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_cpu_uses_the_plain_twin() -> None:
    qkv = torch.randn(2, 9, 3, 2, 16)
    assert not able(qkv)
    assert torch.equal(packed_attention(qkv), plain_packed_attention(qkv))
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    expected = ((q @ k.mT) / 4).softmax(-1) @ v
    torch.testing.assert_close(packed_attention(qkv), expected.transpose(1, 2))


def test_attention_with_a_stored_map_equals_float64_in_values_and_gradients() -> None:
    wide = torch.randn(2, 9, 3, 2, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    weights = torch.randn(2, 9, 2, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    results: dict[torch.dtype, tuple[torch.Tensor, torch.Tensor]] = {}
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        qkv = wide.to(dtype, copy=True).requires_grad_()
        out = attention_by_map(qkv)
        out.backward(weights.to(dtype))
        assert qkv.grad is not None
        results[dtype] = out.detach().double(), qkv.grad.double()
    q, k, v = wide.requires_grad_().permute(2, 0, 3, 1, 4).unbind(0)
    expected = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
    (slope,) = torch.autograd.grad(expected, wide, weights)
    for dtype, bound in ((torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 0.02)):
        for found, right in zip(results[dtype], (expected.detach(), slope), strict=True):
            assert (found - right).norm() < bound * right.norm(), dtype


def test_only_what_learns_in_bf16_on_a_cpu_stores_its_map() -> None:
    qkv = torch.zeros(1, 5, 3, 2, 16, dtype=torch.bfloat16, requires_grad=True)
    assert prefers_map(qkv)
    assert not prefers_map(qkv.detach())
    assert not prefers_map(qkv.float())
    assert not prefers_map(qkv.to("meta"))
    assert not prefers_map(qkv.expand(1, 5, 3, 2, 16).repeat(1, 100, 1, 1, 1))
    with torch.no_grad():
        assert not prefers_map(qkv)


def test_gelu_of_few_operations_and_its_slope_are_exact_to_float32() -> None:
    x = torch.cat([torch.linspace(-12, 12, 200_001), torch.tensor([-1e30, -0.0, 0.0, 1e30])]).requires_grad_()
    (slope,) = torch.autograd.grad(few_operations_gelu(x).sum(), x)
    wide = x.detach().double().requires_grad_()
    (expected_slope,) = torch.autograd.grad(F.gelu(wide).sum(), wide)
    ordinary = x.detach().abs() < 100
    error = (few_operations_gelu(x) - F.gelu(wide)).abs()
    assert error[ordinary].max() < 6e-7  # PyTorch's own, in float32: 1.2e-6
    assert (slope - expected_slope).abs()[ordinary].max() < 6e-7
    assert few_operations_gelu(x)[-4:].tolist() == [0.0, 0.0, 0.0, x[-1].item()]
    assert torch.equal(Gelu()(x), F.gelu(x))  # not compiled: PyTorch's


def test_linear_gelu_on_a_cpu_is_exact() -> None:
    x, weight, bias = torch.randn(2, 3, 8), torch.randn(5, 8), torch.randn(5)
    torch.testing.assert_close(linear_gelu(x, weight, bias), F.gelu(x @ weight.T + bias))


def test_quantised_rows_are_restored_within_the_format() -> None:
    x = torch.randn(50, 64) * torch.logspace(-6, 6, 50)[:, None]
    small, scale = quantise(x)
    assert small.dtype == torch.float8_e4m3fn
    assert torch.isfinite(small.float()).all()
    assert (small.float().abs().amax(1) == LARGEST).all()
    error = (small.float() * scale - x).abs()
    # Three bits of mantissa: half of a sixteenth of the number; below 2^-6 of the format, half of 2^-9 of it.
    allowed = torch.maximum(x.abs() / 16, scale * 2**-10)
    assert (error <= allowed * 1.001).all()
    assert torch.equal(quantise(torch.zeros(1, 4))[0].float(), torch.zeros(1, 4))
    assert torch.equal(gelu_quantise(x)[0].float(), quantise(F.gelu(x))[0].float())


def test_an_fp8_layer_is_the_product_of_its_quantised_parts() -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(32, 16)
    x = torch.randn(2, 5, 32)
    (weight, weight_scale), (rows, row_scale) = quantise(layer.weight.detach()), quantise(x.flatten(0, 1))
    expected = torch.zeros(10, 16, dtype=torch.float64)
    for i in range(10):
        for j in range(16):
            terms = rows[i].double() * weight[j].double()
            expected[i, j] = terms.sum() * row_scale[i, 0] * weight_scale[j, 0]
    found = Fp8Linear(layer)(x)
    torch.testing.assert_close(found, (expected.float() + layer.bias).view(2, 5, 16).detach())
    torch.testing.assert_close(plain_product(rows, weight, row_scale, weight_scale), expected.float())
    gap = (found - layer(x)).norm() / layer(x).norm()
    assert 0.005 < gap < 0.06  # two roundings of up to 6 %, of which most cancel
