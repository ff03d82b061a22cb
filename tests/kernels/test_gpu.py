"""What only an accelerator can show: kernels, captured steps and optimised models against their plain twins."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from vitrail.data.augment.host import Augment
from vitrail.data.batch import Batch
from vitrail.data.config import AugmentConfig, PreprocessConfig
from vitrail.data.loading.device_loader import DeviceLoader
from vitrail.data.loading.loader import LoaderSpec
from vitrail.data.loading.sampler import BatchSampler
from vitrail.data.open import open_data
from vitrail.data.preprocess import Preprocess
from vitrail.engine.config import OptimConfig
from vitrail.engine.optimizer import make_schedule
from vitrail.engine.step import TrainStep
from vitrail.kernels.attention import able, packed_attention, plain_packed_attention
from vitrail.kernels.fp8 import quantise, supports_fp8
from vitrail.kernels.fp8_training import Fp8TrainingLinear, product
from vitrail.learn.config import (
    ByolConfig,
    CmsfConfig,
    DinoConfig,
    GrafitConfig,
    IsdConfig,
    MocoConfig,
    MsfConfig,
    ProtonwConfig,
    SupconConfig,
    SupervisedConfig,
)
from vitrail.learn.objective import TrainingFacts, build_objective
from vitrail.learn.supervised import Supervised
from vitrail.model.build import create_model
from vitrail.model.heads.config import Projected

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA accelerator"),
]


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    found, expected = found.detach().double(), expected.detach().double()
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("dim", [64, 32, 48])
@pytest.mark.parametrize("tokens", [5, 64, 65, 100, 128, 129, 197, 256])
def test_attention_and_its_gradient_equal_float64(tokens: int, dim: int) -> None:
    torch.manual_seed(tokens)
    qkv = torch.randn(3, tokens, 3, 2, dim, device="cuda").to(torch.bfloat16).requires_grad_()
    assert able(qkv)
    exact = qkv.detach().double().requires_grad_()
    q, k, v = exact.permute(2, 0, 3, 1, 4).unbind(0)
    expected = ((q @ k.transpose(-2, -1)) * dim**-0.5).softmax(-1).matmul(v).transpose(1, 2)
    grad = torch.randn_like(expected)
    (expected_gradient,) = torch.autograd.grad(expected, exact, grad)
    found = packed_attention(qkv)
    (gradient,) = torch.autograd.grad(found, qkv, grad.to(torch.bfloat16))
    plain = plain_packed_attention(qkv)
    (plain_gradient,) = torch.autograd.grad(plain, qkv, grad.to(torch.bfloat16))
    # As near as PyTorch's own kernels come in the same precision, with a little room.
    assert relative(found, expected) < 1.2 * relative(plain, expected) + 1e-4
    assert relative(gradient, expected_gradient) < 1.2 * relative(plain_gradient, expected_gradient) + 1e-4


def gradients(autocast: torch.dtype | None, compiled: bool) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    objective = Supervised(create_model("vit_tiny_32", classes=10, depth=3), SupervisedConfig(smoothing=0.1)).cuda()
    for parameter in objective.parameters():  # away from the start, where many gradients are nearly 0
        parameter.data.add_(torch.randn_like(parameter) * 0.02)
    if compiled:
        objective.compile(dynamic=False)
    generator = torch.Generator().manual_seed(1)
    images = torch.randint(256, (64, 3, 32, 32), dtype=torch.uint8, generator=generator).cuda()
    labels = torch.randint(10, (64,), generator=generator).cuda()
    batch = Batch((images,), labels, labels, torch.arange(64, device="cuda"))
    with torch.autocast("cuda", autocast, enabled=autocast is not None):
        objective(batch)["loss"].backward()
    return {name: p.grad.detach().clone() for name, p in objective.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("autocast", "most"), [(None, 1e-4), (torch.bfloat16, 0.05)])
def test_compiled_gradients_equal_plain_ones(autocast: torch.dtype | None, most: float) -> None:
    torch.set_float32_matmul_precision("highest")
    plain, made = gradients(None, False), gradients(autocast, True)
    for name, expected in plain.items():
        width = len(expected) // 3
        kept = [i for i in range(3 * width) if not width <= i < 2 * width] if name.endswith("qkv.bias") else slice(None)
        assert relative(made[name][kept], expected[kept]) < most, name  # keys' biases have no gradient but rounding


def steps_of(
    autocast: torch.dtype | None, compiled: bool, graph: bool, fp8: bool = False
) -> tuple[list[float], dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = create_model("vit_tiny_32", classes=10, depth=3)
    optim = OptimConfig(lr=1e-3, clip=1.0, warmup=0, schedule="constant")
    step = TrainStep(
        Supervised(model, SupervisedConfig(smoothing=0.1)),
        optim,
        make_schedule(optim, 64, 640),
        device=torch.device("cuda"),
        autocast=autocast,
        fp8=fp8,
        compile=compiled,
        graph=graph,
        ema=0.9,
    )
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(8):
        images = torch.randint(256, (64, 3, 32, 32), dtype=torch.uint8, generator=generator).cuda()
        labels = (images.float().mean((1, 2, 3)) * 3).long() % 10
        step.feed(Batch((images,), labels, labels, torch.arange(64, device="cuda")))
        losses.append(step.meter.read(step.group)["loss"])
    assert graph == step.captured, step.why_no_graph
    return losses, {k: v.detach().clone() for k, v in step.model.state_dict().items()}


def test_a_captured_compiled_step_equals_the_plain_one_in_float32() -> None:
    torch.set_float32_matmul_precision("highest")
    plain, plain_weights = steps_of(None, False, False)
    fast, fast_weights = steps_of(None, True, True)
    assert fast == pytest.approx(plain, rel=1e-4)
    moved = relative(
        torch.cat([fast_weights[k].flatten() for k in plain_weights]),
        torch.cat([v.flatten() for v in plain_weights.values()]),
    )
    assert moved < 1e-3  # eight steps of Adam, whose first steps have the sign of each gradient alone


def test_a_graph_alone_changes_no_bit() -> None:
    plain, plain_weights = steps_of(torch.bfloat16, False, False)
    fast, fast_weights = steps_of(torch.bfloat16, False, True)
    assert fast == plain
    assert all(torch.equal(fast_weights[k], v) for k, v in plain_weights.items())


def test_pieces_of_other_sizes_before_and_after_capture_change_no_bit() -> None:
    def steps(graph: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
        torch.manual_seed(0)
        optim = OptimConfig(lr=1e-3, warmup=0, schedule="constant")
        objective = Supervised(create_model("vit_tiny_32", classes=10, depth=1), SupervisedConfig())
        step = TrainStep(
            objective,
            optim,
            make_schedule(optim, 8, 800),
            device=torch.device("cuda"),
            autocast=torch.bfloat16,
            graph=graph,
        )
        generator = torch.Generator().manual_seed(1)
        losses, captured = [], []
        for count in (5, 8, 8, 3, 8, 8, 8, 8, 5, 8, 8):
            images = torch.randint(256, (count, 3, 32, 32), dtype=torch.uint8, generator=generator).cuda()
            labels = torch.arange(count, device="cuda")
            step.feed(Batch((images,), labels, labels, labels))
            losses.append(step.meter.read(step.group)["loss"])
            captured.append(step.captured)
        assert captured == [graph and number >= 7 for number in range(11)]  # after three of eight images in a row
        return losses, {k: v.detach().clone() for k, v in step.model.state_dict().items()}

    (plain, weights), (fast, fast_weights) = steps(False), steps(True)
    assert fast == plain
    assert all(torch.equal(fast_weights[k], v) for k, v in weights.items())


class Looking(Supervised):
    """Reads its loss back, which no captured step can."""

    def forward(self, batch: Batch) -> dict[str, torch.Tensor]:
        found = super().forward(batch)
        return {**found, "seen": torch.tensor(float(found["loss"]), device="cuda")}


def test_a_step_that_cannot_be_captured_says_what_to_do() -> None:
    optim = OptimConfig(lr=1e-3, warmup=0, schedule="constant")
    objective = Looking(create_model("vit_tiny_32", classes=10, depth=1), SupervisedConfig())
    step = TrainStep(objective, optim, make_schedule(optim, 8, 80), device=torch.device("cuda"), graph=True)
    labels = torch.arange(8, device="cuda")
    batch = Batch((torch.zeros(8, 3, 32, 32, dtype=torch.uint8, device="cuda"),), labels, labels, labels)
    for _ in range(3):
        step.feed(batch)
    with pytest.raises(RuntimeError, match=r"cannot be captured as a CUDA graph.*--engine\.graph false"):
        step.feed(batch)
    assert step.step == 3
    torch.cuda.synchronize()
    assert torch.ones(2, device="cuda").sum() == 2  # the device is as it was


UNLABELLED: dict[str, Any] = {
    "byol": ByolConfig(predictor_hidden=64, momentum_end=1.0),
    "moco": MocoConfig(bank=200),
    "isd": IsdConfig(bank=200, predictor_hidden=64),
    "msf": MsfConfig(bank=200, predictor_hidden=64, k=3),
    "cmsf self": CmsfConfig(bank=200, predictor_hidden=64, k=3, pool=5),
    "cmsf supervised": CmsfConfig(bank=200, predictor_hidden=64, k=3, constraint="supervised"),
    "supcon": SupconConfig(),
    "protonw": ProtonwConfig(bank=200, predictor_hidden=64),
    "moco symmetric": MocoConfig(bank=200, symmetric=True),
    "cmsf semi": CmsfConfig(bank=200, predictor_hidden=64, k=3, constraint="semi", labelled=0.5),
    "dino": DinoConfig(prototypes=64, local_views=0, freeze_last=0.3),
    "grafit": GrafitConfig(views=2, predictor_hidden=64),
}


def steps_without_labels(config: Any, graph: bool, compiled: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    head = Projected(width=32, hidden=64, norm=True)
    model = create_model("vit_tiny_32", classes=10, depth=2, head=head)
    facts = TrainingFacts(np.arange(640) % 10, np.arange(640), 10)
    objective = build_objective(config, model, facts)
    optim = OptimConfig(lr=1e-3, warmup=0, schedule="constant")
    step = TrainStep(
        objective,
        optim,
        make_schedule(optim, 64, 640),
        device=torch.device("cuda"),
        autocast=torch.bfloat16,
        compile=compiled,
        graph=graph,
    )
    generator = torch.Generator().manual_seed(1)
    losses = []
    for number in range(8):  # the bank of 200 rows comes round in the fourth
        views = [torch.randint(256, (64, 3, 32, 32), dtype=torch.uint8, generator=generator).cuda() for _ in range(2)]
        index = torch.arange(64, device="cuda") + 64 * number
        label = index % 10  # one tensor twice, as loaders give it
        step.feed(Batch(tuple(views), label, label, index))
        losses.append(step.meter.read(step.group)["loss"])
    assert graph == step.captured, step.why_no_graph
    return losses, {k: v.detach().clone() for k, v in objective.state_dict().items()}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", UNLABELLED)
def test_a_graph_changes_no_bit_of_banks_and_slow_copies(name: str, compiled: bool) -> None:
    # Class means are sums by atomic additions, whose order is another each time unless it is asked for.
    torch.use_deterministic_algorithms(name == "protonw", warn_only=True)
    try:
        plain, state = steps_without_labels(UNLABELLED[name], False, compiled)
        fast, captured = steps_without_labels(UNLABELLED[name], True, compiled)
    finally:
        torch.use_deterministic_algorithms(False)
    assert fast == plain
    assert all(torch.equal(captured[k], v) for k, v in state.items())


def test_bf16_steps_follow_float32_ones() -> None:
    plain, _ = steps_of(None, False, False)
    fast, _ = steps_of(torch.bfloat16, True, True)
    assert fast == pytest.approx(plain, rel=0.02)


fp8_only = pytest.mark.skipif(
    not (torch.cuda.is_available() and supports_fp8(torch.device("cuda"))), reason="needs products of 8-bit floats"
)


@fp8_only
def test_a_product_in_fp8_equals_float64() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(591, 1024, device="cuda"), torch.randn(768, 1024, device="cuda")
    (small, scale), (weight, w_scale) = quantise(a), quantise(b)
    found = product(small, weight, scale, w_scale)
    expected = (small.double() * scale) @ (weight.double() * w_scale).T
    assert found.isfinite().all()
    assert relative(found, expected) < 0.005  # bf16
    assert not product(torch.zeros_like(small), weight, scale, w_scale).any()


def results_of_a_layer(device: str, backend: str) -> dict[str, torch.Tensor]:
    """Output and gradients of a layer under autocast; its weight has numbers of bf16."""
    generator = torch.Generator().manual_seed(0)
    layer: Any = torch.nn.Linear(768, 2304)
    layer.weight.data = (torch.randn(2304, 768, generator=generator) / 28).to(torch.bfloat16).float()
    layer.bias.data = torch.randn(2304, generator=generator)
    x = torch.randn(7, 197, 768, generator=generator).to(device, torch.bfloat16).requires_grad_()
    grad = torch.randn(7, 197, 2304, generator=generator).to(device, torch.bfloat16) * 1e-5
    layer.__class__ = Fp8TrainingLinear
    layer.to(device)
    if backend != "none":
        torch._dynamo.reset()
        layer.compile(backend=backend, dynamic=False, fullgraph=True)
    with torch.autocast(device, torch.bfloat16):
        out = layer(x)
    tensors = (out, *torch.autograd.grad(out, (x, layer.weight, layer.bias), grad))
    names = ("output", "gradient of the input", "gradient of the weight", "gradient of the bias")
    return {name: tensor.detach().cpu() for name, tensor in zip(names, tensors, strict=True)}


def assert_near(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], most: float) -> None:
    for name, tensor in found.items():
        assert expected[name].isfinite().all(), f"{name}: the expected one is not finite"
        assert tensor.isfinite().all(), f"{name}: {int((~tensor.isfinite()).sum())} numbers are not finite"
        assert tensor.any(), f"{name} is zero"
        assert tensor.dtype == expected[name].dtype, name
        assert relative(tensor, expected[name]) < most, name


@fp8_only
@pytest.mark.parametrize("backend", ["none", "aot_eager", "inductor"])
def test_an_fp8_training_layer_equals_its_plain_twin(backend: str) -> None:
    # bf16 results; one number in thousands falls to another side.
    assert_near(results_of_a_layer("cuda", backend), results_of_a_layer("cpu", "none"), 0.005)


@fp8_only
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_gradients_of_a_compiled_fp8_layer_equal_eager_ones(backend: str) -> None:
    assert_near(results_of_a_layer("cuda", backend), results_of_a_layer("cuda", "none"), 0.003)


@fp8_only
def test_fp8_steps_follow_bf16_ones() -> None:
    bf16, _ = steps_of(torch.bfloat16, True, True)
    fast, _ = steps_of(torch.bfloat16, True, True, fp8=True)
    assert fast != bf16
    assert fast == pytest.approx(bf16, rel=0.05)


@fp8_only
def test_a_graph_changes_no_bit_of_fp8_steps() -> None:
    plain, weights = steps_of(torch.bfloat16, False, False, fp8=True)
    captured, captured_weights = steps_of(torch.bfloat16, False, True, fp8=True)
    assert captured == plain
    different = [k for k, v in weights.items() if not torch.equal(captured_weights[k], v)]
    assert not different


def losses_on_one_batch(fp8: bool, fast: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    """A ViT of two blocks and width 768 learns 16 images by heart; its losses, and how far parameters went."""
    torch.manual_seed(0)
    model = create_model("vit_tiny_32", classes=10, width=768, heads=12, depth=2)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optim = OptimConfig(lr=1e-4, clip=1.0, warmup=0, schedule="constant")
    step = TrainStep(
        Supervised(model, SupervisedConfig(smoothing=0.1)),
        optim,
        make_schedule(optim, 16, 640),
        device=torch.device("cuda"),
        autocast=torch.bfloat16,
        fp8=fp8,
        compile=fast,
        graph=fast,
    )
    generator = torch.Generator().manual_seed(1)
    images = torch.randint(256, (16, 3, 32, 32), dtype=torch.uint8, generator=generator).cuda()
    labels = torch.randint(10, (16,), generator=generator).cuda()
    losses = []
    for _ in range(16):
        step.feed(Batch((images,), labels, labels, torch.arange(16, device="cuda")))
        losses.append(step.meter.read(step.group)["loss"])
    assert fast == step.captured, step.why_no_graph
    return losses, {name: (p.detach().cpu() - before[name]).norm() for name, p in model.named_parameters()}


@fp8_only
@pytest.mark.parametrize("fast", [False, True])
def test_a_wide_model_learns_in_fp8_as_in_bf16(fast: bool) -> None:
    bf16, _ = losses_on_one_batch(False, fast)
    losses, moved = losses_on_one_batch(True, fast)
    assert all(torch.isfinite(torch.tensor(losses))), losses
    assert losses[-1] < 0.6 * losses[0], losses
    assert losses == pytest.approx(bf16, rel=0.1), (losses, bf16)  # 0.045 in the emulation of a CPU
    assert not [name for name, distance in moved.items() if not distance > 0]  # all had gradients


@pytest.mark.parametrize("name", ["deit_tiny", "deit3_small"])
def test_an_fp8_model_is_as_near_to_float32_as_its_plain_twin(name: str) -> None:
    """The twin has the same 8-bit weights and rounds inputs as the accelerator does, but multiplies in float32."""
    torch.manual_seed(0)
    model = create_model(name, classes=10, depth=4).cuda().eval()
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.03)
    images = torch.randint(256, (7, 3, 224, 224), dtype=torch.uint8, device="cuda")
    with torch.no_grad():
        expected = copy.deepcopy(model)(images)
        twin = copy.deepcopy(model.optimize("fp8", compile=False, graph=False).model).cpu().float()
        plain = relative(twin(images.cpu()).cuda(), expected)
    # bf16 between the layers moves some inputs over a rounding boundary of e4m3, so errors differ, but not in size.
    assert relative(model.optimize("fp8")(images), expected) < 1.3 * plain


@pytest.mark.parametrize(("precision", "most"), [("float32", 1e-4), ("bf16", 0.02)])
@pytest.mark.parametrize("name", ["deit_tiny", "deit3_small"])
def test_an_optimised_model_gives_the_same_logits(name: str, precision: str, most: float) -> None:
    torch.set_float32_matmul_precision("highest")
    torch.manual_seed(0)
    model = create_model(name, classes=10, depth=4).cuda().eval()
    for parameter in model.parameters():  # far from the start, where logits are nearly 0
        parameter.data.add_(torch.randn_like(parameter) * 0.03)
    images = torch.randint(256, (7, 3, 224, 224), dtype=torch.uint8, device="cuda")
    with torch.no_grad():
        expected = copy.deepcopy(model)(images)
    fast = model.optimize(precision)  # type: ignore[arg-type]
    assert relative(fast(images), expected) < most
    again = torch.randint(256, (2, 3, 224, 224), dtype=torch.uint8, device="cuda")
    with torch.no_grad():
        assert relative(fast(again), model(again)) < most
    assert relative(fast(images), expected) < most  # a graph's own memory was not disturbed


def test_gelu_compiled_is_gelu() -> None:
    from vitrail.kernels.gelu import Gelu

    x = torch.linspace(-8, 8, 4096, device="cuda", requires_grad=True)
    made = torch.compile(Gelu())(x)
    (gradient,) = torch.autograd.grad(made.sum(), x)
    (expected,) = torch.autograd.grad(F.gelu(x.double()).sum(), x)
    assert (made - F.gelu(x.double())).abs().max() < 2e-6
    assert (gradient - expected).abs().max() < 2e-6


def test_gelu_and_quantisation_in_one_pass() -> None:
    from vitrail.kernels.fp8 import gelu_quantise

    torch.manual_seed(0)
    x = (torch.randn(333, 1536, device="cuda") * 3).to(torch.bfloat16)
    small, scale = gelu_quantise(x)
    expected, expected_scale = quantise(F.gelu(x.float()))
    torch.testing.assert_close(scale, expected_scale, rtol=1e-5, atol=0)
    # The last bit may fall to the other side where a number lies between two of the format.
    assert (small.float() != expected.float()).float().mean() < 0.002


def test_batches_made_ahead_and_together_hold_the_bytes_of_a_processor() -> None:
    train = open_data("embedded:fashion", val_fraction=0.1)["train"]
    shape = PreprocessConfig(size=28, crop_ratio=1.0)
    augment = Augment(AugmentConfig(crop="pad", padding=4, rand_ops=2), shape)

    def batches(device: str, start: int = 0) -> list[Batch]:
        order = BatchSampler(len(train), 40, 3)
        settings: dict[str, Any] = {"classes": 10, "multilabel": False, "seed": 3, "workers": 0, "views": 2}
        loader = DeviceLoader(
            LoaderSpec(train, order, augment, Preprocess(shape), device=device, start=start, stop=60, **settings)
        )
        kept = []
        for batch in loader:
            torch.cuda._sleep(1_000_000)  # a step that is still at work when the next batches are made
            kept.append(Batch(tuple(v + 0 for v in batch.views), batch.label + 0, batch.target, batch.index, None, 0))
        return kept

    ours, resumed, theirs = batches("cuda"), batches("cuda", 47), batches("cpu")
    assert len(ours) == len(theirs) == 60
    for one, other in [*zip(ours, theirs, strict=True), *zip(resumed, theirs[47:], strict=True)]:
        assert torch.equal(one.label.cpu(), other.label)
        assert all(torch.equal(a.cpu(), b) for a, b in zip(one.views, other.views, strict=True))
