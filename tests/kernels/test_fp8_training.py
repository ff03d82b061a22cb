"""Linear layers trained in 8-bit floats: products, gradients, and which layers take part."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vitrail.kernels.fp8_training import Fp8TrainingLinear, train_in_fp8
from vitrail.model.adapters.apply import apply
from vitrail.model.adapters.config import Lora
from vitrail.model.build import create_model

FORWARD = torch.float8_e4m3fn


def rounded(x: Tensor, dtype: torch.dtype, dims: tuple[int, ...]) -> Tensor:
    """x in float64 as the format stores it, with one scale for all numbers along `dims`."""
    scale = x.detach().double().abs().amax(dims, keepdim=True) / torch.finfo(dtype).max
    return (x.detach().double() / scale).float().to(dtype).double() * scale


def half_steps(x: Tensor) -> Tensor:
    """The largest error of rounding each number of x, with one scale for each row."""
    scale = x.abs().amax(-1, keepdim=True) / torch.finfo(FORWARD).max
    return torch.maximum(x.abs() * 2.0**-4, scale * 2.0**-10) * 1.0001


def trained_layer(inputs: int, outputs: int) -> tuple[nn.Linear, Fp8TrainingLinear]:
    torch.manual_seed(0)
    plain = nn.Linear(inputs, outputs)
    ours: Any = copy.deepcopy(plain)
    ours.__class__ = Fp8TrainingLinear
    return plain, ours


def gradients(layer: nn.Linear, x: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    x = x.clone().requires_grad_()
    out = layer(x)
    return out, *torch.autograd.grad(out, (x, *layer.parameters()), grad)


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.detach() - expected.detach()).norm() / expected.detach().norm())


def test_products_with_a_scale_per_token_are_those_of_the_rounded_rows() -> None:
    _, ours = trained_layer(32, 48)
    x, grad = torch.randn(7, 32) * torch.logspace(-6, 0, 7)[:, None], torch.randn(7, 48)
    out, to_x, to_weight, to_bias = gradients(ours, x, grad)
    a, g = rounded(x, FORWARD, (1,)), rounded(grad, FORWARD, (1,))
    torch.testing.assert_close(out, (a @ rounded(ours.weight, FORWARD, (1,)).T).float() + ours.bias)
    torch.testing.assert_close(to_x, (g @ rounded(ours.weight, FORWARD, (0,))).float())
    torch.testing.assert_close(to_weight, grad.T @ x)  # not in 8 bits
    torch.testing.assert_close(to_bias, grad.sum(0))


def test_errors_stay_within_the_rounding_of_the_format() -> None:
    plain, ours = trained_layer(64, 32)
    x, grad = torch.randn(40, 64), torch.randn(40, 32) * 1e-6
    weight = plain.weight.detach()
    dx, dw, dg = half_steps(x), half_steps(weight), half_steps(grad)
    across = half_steps(weight.T).T  # the weight of the input's gradient has a scale for each input
    bounds = (dx @ weight.abs().T + (x.abs() + dx) @ dw.T, dg @ weight.abs() + (grad.abs() + dg) @ across)
    found, expected = gradients(ours, x, grad), gradients(plain, x, grad)
    for ours_of, theirs, bound in zip(found, expected, bounds, strict=False):
        assert ((ours_of - theirs).abs() <= bound * 1.001 + 1e-12).all()
        assert 0.005 < relative(ours_of, theirs) < 0.05


@pytest.mark.parametrize("size", [1e-20, 1e-9, 1e6])
def test_gradients_of_any_size_keep_their_direction(size: float) -> None:
    plain, ours = trained_layer(32, 16)
    x, grad = torch.randn(9, 32), torch.randn(9, 16)
    for found, expected in zip(gradients(ours, x, grad * size), gradients(plain, x, grad), strict=True):
        if found.shape != (9, 16):  # the output
            assert relative(found / size, expected) < 0.1


def test_zeros_give_zeros_and_nan_gives_nan() -> None:
    _, ours = trained_layer(32, 16)
    out, to_x, to_weight, _ = gradients(ours, torch.zeros(3, 32), torch.zeros(3, 16))
    assert torch.equal(out, ours.bias.expand(3, 16))
    assert not to_x.any()
    assert not to_weight.any()
    x = torch.zeros(3, 32)
    x[1, 2] = float("nan")
    assert gradients(ours, x, torch.ones(3, 16))[0][1].isnan().all()  # a step that the guard skips


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("autocast", [True, False])
def test_a_compiled_layer_is_the_plain_one(autocast: bool, bias: bool) -> None:
    """Without autocast products come in the type of the output, as they do under it on an accelerator."""
    _, ours = trained_layer(32, 16)
    if not bias:
        ours.bias = None  # type: ignore[assignment]
    kind = torch.bfloat16 if autocast else torch.float32
    x, grad = torch.randn(2, 5, 32), torch.randn(2, 5, 16).to(kind)
    torch._dynamo.reset()
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True, dynamic=False)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found, expected = gradients(compiled, x, grad), gradients(ours, x, grad)
    assert found[0].dtype == kind
    assert [t.dtype for t in found[1:]] == [torch.float32] * (2 + bias)
    assert all(t.any() for t in expected)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_under_autocast_the_weight_is_rounded_to_its_type_first() -> None:
    """So an accelerator casts tensors of one type only, and the copies in bf16 are those of an ordinary layer."""
    _, ours = trained_layer(64, 48)
    x, grad = torch.randn(6, 64).bfloat16(), torch.randn(6, 48).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        found = gradients(ours, x, grad)
        ours.weight.data = ours.weight.data.bfloat16().float()
        expected = gradients(ours, x, grad)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_evaluation_is_that_of_an_ordinary_layer() -> None:
    plain, ours = trained_layer(32, 16)
    x = torch.randn(4, 32)
    assert torch.equal(ours.eval()(x), plain(x))
    with torch.no_grad():
        assert torch.equal(ours.train()(x), plain(x))
    assert not torch.equal(ours(x), plain(x))


def test_layers_of_blocks_take_part_and_nothing_else_changes() -> None:
    model = create_model("vit_micro_28", classes=5, width=48, heads=3, depth=2)
    before = dict(model.named_parameters())
    train_in_fp8(model)
    taken = [name for name, m in model.named_modules() if type(m) is Fp8TrainingLinear]
    layers = ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
    assert taken == [f"trunk.blocks.{i}.{layer}" for i in range(2) for layer in layers]
    assert all(p is before[name] for name, p in model.named_parameters())
    assert list(model.state_dict()) == list(before)
    assert all(isinstance(m, nn.Linear) for m in model.modules() if type(m) is Fp8TrainingLinear)
    assert type(copy.deepcopy(model).trunk.blocks[0].mlp.fc1) is Fp8TrainingLinear  # type: ignore[union-attr]


def test_layers_that_do_not_qualify_are_left_alone() -> None:
    narrow = create_model("vit_micro_28", classes=5, width=40, heads=2, depth=1)  # 40 = 16 x 2.5; 160 = 16 x 10
    with pytest.raises(ValueError, match=r"^engine\.precision: fp8 is for linear layers .* has none; use bf16$"):
        train_in_fp8(narrow)
    assert not any(type(m) is Fp8TrainingLinear for m in narrow.modules())
    with pytest.raises(ValueError, match="has none; use bf16"):
        train_in_fp8(create_model("cifar_resnet20", classes=5))
    adapted = create_model("vit_micro_28", classes=5, width=32, heads=2, depth=1)
    apply(adapted, Lora(rank=2))
    kinds = {name: type(m) for name, m in adapted.named_modules() if type(m) is not nn.Linear}
    train_in_fp8(adapted)
    assert all(type(adapted.get_submodule(name)) is kind for name, kind in kinds.items())
