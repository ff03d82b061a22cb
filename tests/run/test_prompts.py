"""Visual prompts: beside timm's blocks and our own with every token put in by hand, as an adapter, in whole runs."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import test_adapter_training as runs
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import vitrail
from vitrail.cli import run as command
from vitrail.config import validate
from vitrail.engine import checkpoint
from vitrail.engine.config import OptimConfig
from vitrail.engine.optimizer import parameter_groups
from vitrail.learn.attention_teacher import readable
from vitrail.learn.config import SupervisedConfig
from vitrail.learn.supervised import Supervised
from vitrail.measure.attention_maps import layers_without_maps, map_layers, sima_layer
from vitrail.model.adapters.adapter_file import load_adapter, save_adapter
from vitrail.model.adapters.apply import adapters_of, apply, counts, merge, merged_copy, quantise, remove, route, use
from vitrail.model.adapters.config import Lora, Vpt, read_header, summary
from vitrail.model.adapters.peft import export_peft
from vitrail.model.build import create_model, make_adaptive, replace_head
from vitrail.model.classifier import Classifier
from vitrail.model.cost import cost
from vitrail.model.mixers import softmax
from vitrail.model.parts.tokens import Tokens
from vitrail.model.timm_weights import to_timm

WIDTH, DEPTH, PATCH, CLASSES, COUNT = 32, 3, 8, 5, 4
PATCHES = (32 // PATCH) ** 2
HEAD = CLASSES * (WIDTH + 1)
BOTH = pytest.mark.parametrize("deep", [False, True], ids=["shallow", "deep"])


def tiny(name: str = "vit_tiny_32", **options: Any) -> Classifier:
    torch.manual_seed(0)
    options = {"depth": DEPTH, "width": WIDTH, "heads": 2, "patch": PATCH, **options}
    return create_model(name, classes=CLASSES, **options).eval()


def prompted(deep: bool, model: Classifier | None = None, name: str = "default") -> Classifier:
    """A model with prompts that are long enough to be noticed, and a head that is not at its start."""
    model = apply(tiny() if model is None else model, Vpt(tokens=COUNT, deep=deep), name)
    torch.manual_seed(7)
    for parameter in adapters_of(model).adapter(name).parameters():  # type: ignore[union-attr]
        nn.init.normal_(parameter, std=0.5)
    return model


def values(model: Classifier, name: str = "default") -> Tensor:
    """[layers, count, width]"""
    return model.get_parameter(f"adapters.named.{name}.groups.0.values")


def images(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(1), dtype=dtype)


# What is computed


@BOTH
def test_logits_are_those_of_timms_blocks_with_prompts_put_in_by_hand(deep: bool) -> None:
    base = tiny(layerscale=0.1).double()
    vit: Any = to_timm(base)  # before the adapter: timm knows nothing of it
    model = prompted(deep, base).double()
    own = values(model)
    vit.load_state_dict({**vit.state_dict(), "head.weight": model.head.fc.weight, "head.bias": model.head.fc.bias})
    x = vit._pos_embed(vit.patch_embed(images(torch.float64)))
    for i, block in enumerate(vit.blocks):
        if i == 0:
            x = torch.cat([x[:, :1], own[0].expand(3, -1, -1), x[:, 1:]], 1)
        elif deep:
            x = torch.cat([x[:, :1], own[i].expand(3, -1, -1), x[:, 1 + COUNT :]], 1)
        x = block(x)
    expected = vit.head(vit.norm(x)[:, 0])
    # Two orders of the same sums, in float64.
    torch.testing.assert_close(model(images(torch.float64)), expected, rtol=0, atol=1e-12)
    assert (expected - use(model, None)(images(torch.float64))).abs().max() > 1e-3  # they do something


@BOTH
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("cait_xxs12_32", {}),
        ("deit3_tiny", {"image_size": 32}),
        ("vit_tiny_32", {"class_token_at": 2}),
        ("vit_tiny_32", {"mixer": "sima"}),
        ("vit_tiny_32", {"parallel": 2}),
        ("xcit_s12_p16", {"image_size": 32}),
    ],
    ids=["cait", "deit3", "late class token", "sima", "parallel", "xcit"],
)
def test_tokens_at_the_head_are_those_of_our_blocks_with_prompts_put_in_by_hand(
    name: str, options: dict[str, Any], deep: bool
) -> None:
    model = prompted(deep, tiny(name, **options)).double()
    trunk: Any = model.trunk
    own, late = values(model), trunk.config.class_token_at
    start = trunk.embed(images(torch.float64))
    first, prompts, patches = start.sequence[:, : start.prefix], own[0], start.patches
    for i, block in enumerate(trunk.blocks):
        if late and i == late:
            first = trunk.cls_token.expand(3, -1, -1)
        prompts = own[i] if deep else prompts
        x = torch.cat([first, prompts.expand(3, -1, -1), patches], 1)
        x = block(Tokens(x, first.shape[1] + COUNT, start.grid)).sequence
        first, prompts, patches = x.split([first.shape[1], COUNT, patches.shape[1]], 1)
    found = model.tokens(images(torch.float64))
    assert found.prefix == trunk.prefix
    torch.testing.assert_close(found.sequence, trunk.norm(torch.cat([first, patches], 1)), rtol=0, atol=1e-12)


HEADS = (
    *("class_token", "mean", "distilled", "projected", "second_order", "gramian", "attention_pool"),
    *("class_attention", "class_mlp", "branches"),
)


@BOTH
@pytest.mark.parametrize("head", HEADS)
def test_heads_see_as_many_tokens_as_without_prompts(head: str, deep: bool) -> None:
    model = tiny(head=head)
    before = model.outputs(images(), want={"tokens.1"})
    after = prompted(deep, model).outputs(images(), want={"tokens.1"})
    assert after.tokens.sequence.shape == before.tokens.sequence.shape
    assert after.tokens.prefix == before.tokens.prefix
    assert after.stack.shape == before.stack.shape
    assert after.embedding.shape == before.embedding.shape
    assert after.captured["tokens.1"].shape == before.captured["tokens.1"].shape
    assert (before.maps is None and after.maps is None) or after.maps.shape == before.maps.shape  # type: ignore[union-attr]
    assert not torch.allclose(after.tokens.sequence, before.tokens.sequence)


@BOTH
def test_the_fused_kernel_gets_all_tokens_and_no_mask(deep: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, inner = [], softmax.packed_attention

    def fused(qkv: Tensor, size: Tensor | None) -> Tensor:
        assert size is None
        seen.append(qkv.shape[1])
        return inner(qkv)

    monkeypatch.setattr(softmax, "packed_attention", fused)
    prompted(deep)(images())
    assert seen == [1 + COUNT + PATCHES] * DEPTH


@BOTH
def test_the_cost_is_that_of_more_tokens(deep: bool) -> None:
    plain, found = cost(tiny()), cost(prompted(deep))
    n, more = 1 + PATCHES, 1 + PATCHES + COUNT
    # A block of n tokens: 12 n width² of linear layers, 2 n² width of attention.
    block = 12 * (more - n) * WIDTH**2 + 2 * (more**2 - n**2) * WIDTH
    assert found.macs - plain.macs == DEPTH * block
    assert found.parameters - plain.parameters == (DEPTH if deep else 1) * COUNT * WIDTH
    assert found.trainable == (DEPTH if deep else 1) * COUNT * WIDTH + HEAD


def test_they_start_uniform_as_wide_as_patches_would() -> None:
    found = values(apply(tiny(), Vpt(tokens=200))).detach()
    bound = math.sqrt(6 / (3 * PATCH**2 + WIDTH))
    assert found.abs().max() <= bound
    # 6,400 draws: the standard error of their variance, bound² / 3, is about 1 %.
    assert found.var().item() == pytest.approx(bound**2 / 3, rel=0.06)
    assert found.abs().max() > 0.99 * bound


def test_dropout_zeroes_numbers_of_each_image_in_training_alone() -> None:
    model = apply(tiny(), Vpt(tokens=COUNT, drop=0.5))
    seen: list[Tensor] = []
    model.trunk.blocks[0].register_forward_pre_hook(lambda module, given: seen.append(given[0].sequence))  # type: ignore[union-attr, operator, index]
    model(images())
    model.train()(images())
    still, dropped = (x[:, 1 : 1 + COUNT] for x in seen)
    assert torch.equal(still, values(model).expand(3, -1, -1))
    assert torch.equal(dropped, torch.where(dropped == 0, 0, 2 * still))
    assert 0.3 < (dropped == 0).float().mean() < 0.7  # 384 fair coins: six standard deviations are 0.15
    assert not torch.equal(dropped[0], dropped[1])


# What is shown


@BOTH
def test_captured_tokens_lie_on_the_way_to_the_logits(deep: bool) -> None:
    model = prompted(deep)
    plain = model(images())
    out = model.outputs(images(), want={"tokens.0", "tokens.1"})
    torch.testing.assert_close(model.fused(out.stack), plain, rtol=0, atol=0)
    for name in ("tokens.0", "tokens.1"):
        (slope,) = torch.autograd.grad(out.stack.sum(), out.captured[name], retain_graph=True)
        assert slope.shape == (3, 1 + PATCHES, WIDTH)
        assert slope.abs().sum() > 0


@pytest.mark.parametrize(
    "asked", [{"want": {"attention.1"}}, {"want": {"q.0"}}, {"given": {"tokens.0": torch.zeros(1)}}]
)
def test_what_has_places_for_prompts_is_neither_shown_nor_replaced(asked: dict[str, Any]) -> None:
    model = prompted(deep=False)
    assert model.trunk.intermediates == [f"tokens.{i}" for i in range(DEPTH)]
    with pytest.raises(ValueError, match="a trunk with prompts shows tokens"):
        model.outputs(images(), **asked)
    use(model, None).outputs(images(), want={"attention.1"})  # the base shows all again


def test_pictures_leave_out_maps_and_say_why() -> None:
    model = prompted(deep=False)
    assert map_layers(model) == []
    assert layers_without_maps(model) == "with prompts, maps have tokens that are not patches, and are not shown"
    assert sima_layer(prompted(False, tiny(mixer="sima"))) is None
    assert sima_layer(tiny(mixer="sima")) == DEPTH - 1


def test_attention_is_transferred_neither_from_nor_to_a_prompted_model() -> None:
    with pytest.raises(ValueError, match="the student has prompts, and its attention places for them"):
        readable(tiny(prompts=2), "the student")


# What is trained


@BOTH
def test_only_prompts_and_classifier_get_gradients(deep: bool) -> None:
    model = apply(tiny(), Vpt(tokens=COUNT, deep=deep)).train()
    model(images()).square().sum().backward()
    moved = {name for name, p in model.named_parameters() if p.grad is not None}
    assert moved == {"adapters.named.default.groups.0.values", "head.fc.weight", "head.fc.bias"}
    own = values(model)
    assert own.grad is not None
    assert own.grad.abs().amax((1, 2)).min() > 0  # of every layer


@BOTH
def test_numbers_are_prompts_and_classifier(deep: bool) -> None:
    model = apply(tiny(), Vpt(tokens=COUNT, deep=deep))
    found = counts(model)
    assert found.adapter == (DEPTH if deep else 1) * COUNT * WIDTH
    assert (found.whole, found.stored) == (HEAD, found.adapter + HEAD)


def test_prompts_are_decayed_as_the_matrix_of_the_classifier() -> None:
    groups = parameter_groups(Supervised(prompted(deep=True), SupervisedConfig()), OptimConfig(weight_decay=0.1))
    decayed = {name for group in groups if group["decayed"] for name in group["names"]}
    assert decayed == {"model.adapters.named.default.groups.0.values", "model.head.fc.weight"}


# Beside other adapters


def test_each_sample_takes_its_own_prompts() -> None:
    model = prompted(False, prompted(True, tiny(), "deep"), "shallow")
    apply(model, Lora(rank=2), "lora")
    nn.init.normal_(model.get_parameter("adapters.named.lora.groups.0.up"))
    names = ["deep", None, "lora", "shallow"]
    x = torch.cat([images(), images()[:1]])
    found = route(model, names, x)
    for i, name in enumerate(names):
        torch.testing.assert_close(found[i], use(model, name)(x)[i], rtol=1e-5, atol=1e-6)  # another batch size


def test_without_them_the_model_is_what_it_was() -> None:
    model = tiny()
    before, kind = model(images()), type(model.trunk)
    remove(prompted(True, model), "default")
    assert torch.equal(model(images()), before)
    assert type(model.trunk) is kind
    assert all(p.requires_grad for p in model.parameters())


@BOTH
def test_a_prompted_model_compiles_as_one_graph(deep: bool) -> None:
    model = prompted(deep)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(images()), model(images()), rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        values(model).mul_(0.5)
    torch.testing.assert_close(compiled(images()), model(images()), rtol=1e-5, atol=1e-6)


def test_half_precision_takes_float32_prompts() -> None:
    model = prompted(True, tiny().to(torch.bfloat16))
    assert model(images().bfloat16()).dtype == torch.bfloat16
    assert values(model).dtype == torch.float32


# What is kept


@BOTH
@pytest.mark.parametrize("bits", [None, 4])
def test_a_file_holds_prompts_and_classifier_and_brings_them_back(deep: bool, bits: int | None, tmp_path: Path) -> None:
    model, path = prompted(deep), tmp_path / "birds.safetensors"
    save_adapter(model, "default", path, bits=bits)
    shapes = read_header(path)["tensors"]
    assert set(shapes) - {"groups.0.values.scale"} == {"groups.0.values", "own.head.fc.weight", "own.head.fc.bias"}
    again = load_adapter(tiny(), path)
    assert torch.equal(again(images()), (model if bits is None else quantise(model, bits))(images()))
    assert summary(read_header(path))["parts"] == [
        {"tokens": COUNT, "deep": deep, "drop": 0.0, "train_head": True, "train_norms": False}
    ]


@BOTH
@pytest.mark.parametrize("head", ["class_token", "branches"])
def test_a_merged_copy_keeps_them_in_its_trunk_and_is_saved_whole(deep: bool, head: str, tmp_path: Path) -> None:
    model = prompted(deep, tiny(head=head))
    expected = model(images())
    made = merged_copy(model)
    assert adapters_of(made) is None
    assert torch.equal(made(images()), expected)
    assert all(p.requires_grad for p in made.parameters())
    model.save(tmp_path / "whole")
    assert torch.equal(vitrail.load(tmp_path / "whole")(images()), expected)
    assert torch.equal(model(images()), expected)  # which itself stays as it is


def test_a_merged_copy_has_changes_of_weights_besides() -> None:
    model = prompted(True)
    apply(model, Lora(rank=2, train_head=False))  # the same adapter, extended
    nn.init.normal_(model.get_parameter("adapters.named.default.groups.1.up"), std=0.5)
    torch.testing.assert_close(merged_copy(model)(images()), model(images()), rtol=1e-5, atol=1e-6)


def test_prompts_that_are_trained_in_few_bits_are_rounded_merged_or_not() -> None:
    plain = prompted(True)
    model = apply(tiny(), Vpt(tokens=COUNT, deep=True, bits=3))
    model.load_state_dict(plain.state_dict())
    expected = quantise(plain, 3)(images())
    assert torch.equal(model(images()), expected)
    assert torch.equal(merged_copy(model)(images()), expected)


def test_another_head_stands_on_the_same_prompts() -> None:
    model = prompted(True, tiny(head="mean"))
    made, notes = replace_head(model, "mean", classes=9)
    assert torch.equal(made.tokens(images()).sequence, model.tokens(images()).sequence)
    assert notes == []


def test_weights_with_prompts_want_a_model_with_prompts(tmp_path: Path) -> None:
    model = prompted(True)
    model.save(tmp_path)
    with pytest.raises(ValueError, match=r"--model.trunk.prompts 4 --model.trunk.deep_prompts true"):
        tiny(weights=str(tmp_path))
    again = tiny(weights=str(tmp_path), prompts=COUNT, deep_prompts=True)
    assert torch.equal(again(images()), model(images()))


# What is refused


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("resmlp_s12", {"image_size": 32}, "the mixer linear_patches works on patches only"),
        ("patchconvnet_s20", {"image_size": 32, "heads": 1}, "the mixer gated_conv works on patches only"),
        ("vit_tiny_32", {"adaptive": "ats"}, "an adaptive policy chooses among patches"),
        ("vit_tiny_32", {"prompts": 2}, "has prompts of its own already"),
    ],
)
def test_trunks_that_take_no_prompts_are_told_and_left_alone(name: str, options: dict[str, Any], said: str) -> None:
    model = tiny(name, **options)
    with pytest.raises(ValueError, match=said):
        apply(model, Vpt())
    assert adapters_of(model) is None


@pytest.mark.parametrize("name", ["cifar_resnet20", "timm:vit_tiny_patch16_224"])
def test_other_blocks_than_ours_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"prompts go before our own blocks, and {name}"):
        apply(create_model(name, classes=3, device="meta"), Vpt())


def test_what_prompts_cannot_be_is_said(tmp_path: Path) -> None:
    model = prompted(deep=False)
    with pytest.raises(ValueError, match="tokens and cannot be added to weights"):
        merge(model)
    with pytest.raises(ValueError, match="timm's models have no prompts"):
        to_timm(model)
    with pytest.raises(ValueError, match="peft's LoRA cannot hold"):
        export_peft(model, "default", tmp_path)
    with pytest.raises(ValueError, match="does not know prompts"):
        make_adaptive(model, "ats")
    with pytest.raises(ValueError, match="has prompts already"):
        apply(model, Vpt(deep=True))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model__name": "timm:vit_tiny_patch16_224", "model__trunk": {}}, "before our own blocks"),
        ({"model__name": "cifar_resnet20", "model__trunk": {}}, "before our own blocks"),
        ({"objective": {"kind": "attention_transfer", "teacher": "random"}}, "attention has places for prompts"),
    ],
)
def test_a_run_that_cannot_be_is_refused_before_anything_is_read(
    changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    plain = runs.configure(tmp_path / "run", **{**changes, "model__adapter": None, "model__weights": "none"})
    assert not any("model.adapter" in problem for problem in validate(plain))
    found = validate(replace(plain, model=replace(plain.model, adapter=Vpt())))
    assert [problem for problem in found if problem.startswith("model.adapter") and said in problem]


# Whole runs


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of other classes."""
    torch.manual_seed(5)
    folder = tmp_path_factory.mktemp("prompts") / "base"
    create_model("vit_tiny_32", classes=7, **runs.TRUNK).save(folder)  # type: ignore[arg-type]
    return folder


def test_the_command_trains_prompts_keeps_them_alone_and_judges_them(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [f"--model.trunk.{name}={value}" for name, value in runs.TRUNK.items()]
    flags += ["--model.adapter.kind=vpt", f"--model.adapter.tokens={COUNT}", "--model.adapter.deep=true"]
    flags += ["--data.batch=12", "--data.workers=0", "--data.check=off", "--optim.steps=2", "--optim.warmup=0"]
    flags += ["--model.name=vit_tiny_32", f"--model.weights={base}", "--engine.device=cpu", f"--out={tmp_path / 'run'}"]
    assert command(["train", "small-transfer", "--data", runs.DATA, *flags]) == 0
    numbers = 2 * COUNT * WIDTH + runs.HEAD
    assert f"vpt: {numbers:,} numbers are trained" in capsys.readouterr().err
    stored = load_file(tmp_path / "run" / "model" / "adapter.safetensors")
    assert sum(t.numel() for t in stored.values()) == numbers
    assert command(["evaluate", str(tmp_path / "run"), "--data", runs.DATA, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    final = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()][-1]
    assert told["loss"] == pytest.approx(final["loss"], abs=1e-6)


def test_a_stopped_and_resumed_run_equals_one_that_never_stopped(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"model__weights": str(base), "model__adapter": Vpt(tokens=COUNT, deep=True, drop=0.1)}
    whole = vitrail.train(runs.configure(tmp_path / "whole", **changes), quiet=True)
    runs.stop_at_two(runs.configure(tmp_path / "stopped", **changes), monkeypatch)
    resumed = vitrail.resume(tmp_path / "stopped", quiet=True)
    one, two = (checkpoint.newest(run.path / "checkpoint")[0] for run in (whole, resumed))
    assert one is not None
    assert two is not None
    assert "ema/adapters.named.default.groups.0.values" in one.tensors
    assert [name for name, t in one.tensors.items() if not torch.equal(t, two.tensors[name])] == []
