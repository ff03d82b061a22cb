"""Adapters on disk: what a file holds, to the byte; what it refuses; the form of the peft package."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from vitrail.model.adapters.adapter_file import OtherBase, base_hash, load_adapter, packed, save_adapter, unpacked
from vitrail.model.adapters.apply import adapters_of, apply, quantise, remove, use
from vitrail.model.adapters.config import AdapterConfig, Lora, Nola, Pranc, read_header, summary
from vitrail.model.adapters.methods import rounded
from vitrail.model.adapters.peft import export_peft, import_peft
from vitrail.model.build import create_model
from vitrail.model.classifier import Classifier

WIDTH, DEPTH, CLASSES = 32, 2, 5
KINDS: list[AdapterConfig] = [
    Lora(rank=2),
    Nola(rank=2, coefficients=9, targets=("mlp",)),
    Nola(rank=2, coefficients=9, coefficients_in=6, shared=False, train_norms=True),
    Nola(rank=2, coefficients=9, head_coefficients=4, targets=("all",), train_head=False),
    Pranc(coefficients=5, head_coefficients=3, train_head=False),
]


def tiny(seed: int = 0, classes: int = CLASSES) -> Classifier:
    torch.manual_seed(seed)
    return create_model("vit_tiny_32", classes=classes, depth=DEPTH, width=WIDTH, heads=2).eval()


def images() -> Tensor:
    return torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def trained(config: AdapterConfig, name: str = "default", model: Classifier | None = None) -> Classifier:
    """A model whose adapter is away from its start."""
    model = apply(tiny() if model is None else model, config, name)
    torch.manual_seed(7)
    for parameter in adapters_of(model).adapter(name).parameters():  # type: ignore[union-attr]
        nn.init.normal_(parameter, std=0.5)
    return model


def data_bytes(path: Path) -> int:
    """Bytes of a safetensors file behind its header."""
    raw = path.read_bytes()
    return len(raw) - 8 - struct.unpack("<Q", raw[:8])[0]


@pytest.mark.parametrize("config", KINDS)
def test_a_file_brings_the_adapter_back_to_the_bit(config: AdapterConfig, tmp_path: Path) -> None:
    model = trained(config)
    save_adapter(model, "default", tmp_path / "a.safetensors")
    found = load_adapter(tiny(), tmp_path / "a.safetensors")
    assert torch.equal(found(images()), model(images()))


def test_an_adapter_of_two_configurations_comes_back_as_well(tmp_path: Path) -> None:
    model = trained(Nola(rank=2, coefficients=9, targets=("q",), seed=3))
    model = trained(Lora(rank=1, targets=("fc1",)), model=model)
    save_adapter(model, "default", tmp_path / "a.safetensors")
    assert torch.equal(load_adapter(tiny(), tmp_path / "a.safetensors")(images()), model(images()))


@pytest.mark.parametrize("k", [9, 50])
def test_a_nola_file_holds_coefficients_and_classifier_and_nothing_else(k: int, tmp_path: Path) -> None:
    """Four bytes a number: k + l for q and v of each block, and the classifier; the seed is in the header."""
    path = tmp_path / "a.safetensors"
    size = save_adapter(trained(Nola(rank=4, coefficients=k, coefficients_in=7)), "default", path)
    assert size == path.stat().st_size
    assert data_bytes(path) == 4 * (2 * DEPTH * (k + 7) + (WIDTH + 1) * CLASSES)
    assert size - data_bytes(path) < 2048  # the header: names and settings, as long for any k
    assert sorted(load_file(path)) == ["groups.0.alpha", "groups.0.beta", "own.head.fc.bias", "own.head.fc.weight"]


@pytest.mark.parametrize("bits", range(2, 9))
def test_packed_coefficients_take_their_bits_to_the_byte(bits: int, tmp_path: Path) -> None:
    """One scale of four bytes a layer and factor; the numbers of a factor of all layers without gaps."""
    path, layers = tmp_path / "a.safetensors", 2 * DEPTH
    save_adapter(trained(Nola(rank=4, coefficients=9, coefficients_in=7, train_head=False)), "default", path, bits=bits)
    assert data_bytes(path) == sum(math.ceil(bits * layers * many / 8) + 4 * layers for many in (9, 7))
    assert summary(read_header(path))["bits"] == bits


@pytest.mark.parametrize("bits", range(2, 9))
def test_packing_keeps_what_rounding_leaves(bits: int) -> None:
    values = torch.randn(3, 5, 2)
    data, scale = packed(values, bits)
    assert torch.equal(unpacked(data, scale, bits, (3, 5, 2)), rounded(values, bits))


@pytest.mark.parametrize("config", [Lora(rank=2), Nola(rank=2, coefficients=9)])
def test_a_packed_file_is_the_adapter_rounded_after_training(config: AdapterConfig, tmp_path: Path) -> None:
    model = trained(config)
    save_adapter(model, "default", tmp_path / "a.safetensors", bits=3)
    found = load_adapter(tiny(), tmp_path / "a.safetensors")
    assert torch.equal(found(images()), quantise(model, 3)(images()))


def test_an_adapter_that_was_trained_in_few_bits_is_stored_in_them(tmp_path: Path) -> None:
    model = trained(Nola(rank=2, coefficients=8, train_head=False, bits=4))
    save_adapter(model, "default", tmp_path / "a.safetensors")
    assert data_bytes(tmp_path / "a.safetensors") == 2 * (2 * DEPTH * 8 // 2 + 4 * 2 * DEPTH)
    found = load_adapter(tiny(), tmp_path / "a.safetensors")
    # Rounded values are rounded again in the forward pass, and the scale of that differs in its last bit.
    torch.testing.assert_close(found(images()), model(images()), rtol=1e-5, atol=1e-6)


def test_the_hash_of_a_base_is_that_of_its_weights_and_no_adapters() -> None:
    model = tiny()
    bare = base_hash(model, ["head.fc.weight", "head.fc.bias"])
    trained(Nola(rank=2, coefficients=5), model=model)
    assert base_hash(model) == bare
    use(model, None)
    with torch.no_grad():
        model.head.fc.bias.add_(1)
    assert base_hash(use(model, "default")) == bare  # the adapter has a classifier of its own
    with torch.no_grad():
        model.trunk.blocks[0].mlp.fc1.bias[0].add_(1e-3)
    assert base_hash(model) != bare


def test_another_base_is_refused_with_both_hashes_unless_forced(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    model = trained(Nola(rank=2, coefficients=5))
    save_adapter(model, "default", path)
    other = tiny(seed=1)
    with pytest.raises(OtherBase) as caught:
        load_adapter(other, path)
    assert base_hash(model) in str(caught.value)
    assert base_hash(other, ["head.fc.weight", "head.fc.bias"]) in str(caught.value)
    assert adapters_of(other) is None
    assert adapters_of(load_adapter(other, path, force=True)).active == "default"  # type: ignore[union-attr]


def test_two_files_share_one_base_and_are_switched(tmp_path: Path) -> None:
    expected = {}
    for name, config in (("birds", Nola(rank=2, coefficients=5)), ("cars", Lora(rank=1))):
        model = trained(config, name)
        expected[name] = model(images())
        save_adapter(model, name, tmp_path / name)
    model = load_adapter(load_adapter(tiny(), tmp_path / "birds"), tmp_path / "cars", "vans")
    assert torch.equal(use(model, "birds")(images()), expected["birds"])
    assert torch.equal(use(model, "vans")(images()), expected["cars"])
    assert torch.equal(remove(remove(model, "birds"), "vans")(images()), tiny()(images()))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def flipped(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-2] ^= 1
    path.write_bytes(raw)


def nothing(path: Path) -> None:
    path.write_bytes(b"")


def foreign(path: Path) -> None:
    save_file({"weight": torch.zeros(2)}, path)


def newer(path: Path) -> None:
    raw = path.read_bytes()
    path.write_bytes(raw.replace(b'\\"format\\": 1', b'\\"format\\": 9'))


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (cut, "is damaged: it has"),
        (flipped, "is damaged (its checksum does not match)"),
        (nothing, "is damaged or no adapter file"),
        (foreign, "is no adapter file of vitrail"),
        (newer, "was written by a later version of vitrail"),
        (Path.unlink, "no adapter at"),
    ],
)
def test_a_damaged_file_is_one_sentence(harm: Callable[[Path], None], said: str, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_adapter(trained(Nola(rank=2, coefficients=5)), "default", path)
    harm(path)
    model = tiny()
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        load_adapter(model, path)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert adapters_of(model) is None


def test_other_classes_other_layers_and_a_taken_name_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_adapter(trained(Nola(rank=2, coefficients=5)), "default", path)
    with pytest.raises(ValueError, match=r"for the classes 5 \(0, 1, 2, ...\), the model has 3 \(0, 1, 2\)"):
        load_adapter(tiny(classes=3), path)
    with pytest.raises(ValueError, match=r"adapts trunk.blocks.0.attn.qkv.q, which this model does not have"):
        load_adapter(create_model("cifar_resnet20", classes=CLASSES), path)
    model = load_adapter(tiny(), path)
    with pytest.raises(ValueError, match="has an adapter 'default' already"):
        load_adapter(model, path)


def test_a_file_describes_itself_without_its_base(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_adapter(trained(Nola(rank=2, coefficients=9, seed=11)), "default", path, bits=4)
    found = summary(read_header(path))
    head = (WIDTH + 1) * CLASSES
    assert (found["kind"], found["seed"], found["bits"], found["classes"]) == ("nola", 11, 4, CLASSES)
    assert (found["trained"], found["of_these_whole"], found["stored"]) == (72 + head, head, 72 + head + 1)
    assert found["base"] == {
        "architecture": "vit_tiny_32",
        "hash": base_hash(tiny(), ["head.fc.weight", "head.fc.bias"]),
    }
    assert found["bytes"] == path.stat().st_size


# The form of peft


def by_hand(folder: Path, **more: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """An adapter as peft writes it: rank 3 on a fused qkv, rank 2 on an MLP, a classifier."""
    torch.manual_seed(3)
    at, start = "base_model.model.", "trunk.blocks.1."
    tensors = {
        f"{at}{start}attn.qkv.lora_A.weight": torch.randn(3, WIDTH),
        f"{at}{start}attn.qkv.lora_B.weight": torch.randn(3 * WIDTH, 3),
        f"{at}{start}mlp.fc1.lora_A.weight": torch.randn(2, WIDTH),
        f"{at}{start}mlp.fc1.lora_B.weight": torch.randn(4 * WIDTH, 2),
        f"{at}head.fc.weight": torch.randn(CLASSES, WIDTH),
        f"{at}head.fc.bias": torch.randn(CLASSES),
    }
    config = {
        "peft_type": "LORA",
        "r": 3,
        "lora_alpha": 6,
        "rank_pattern": {"fc1": 2},
        "alpha_pattern": {"fc1": 5},
        "target_modules": ["qkv", "fc1"],
        "modules_to_save": ["head"],
        "bias": "none",
        **more,
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return tensors, config


@pytest.mark.parametrize("stabilised", [False, True])
def test_a_lora_of_peft_changes_weights_by_alpha_over_rank(stabilised: bool, tmp_path: Path) -> None:
    """With rank-stabilised scaling, by alpha over the root of the rank."""
    tensors, _ = by_hand(tmp_path, use_rslora=stabilised)
    expected = tiny()
    with torch.no_grad():
        for layer, alpha, rank in (("attn.qkv", 6, 3), ("mlp.fc1", 5, 2)):
            name = f"trunk.blocks.1.{layer}"
            a, b = (tensors[f"base_model.model.{name}.lora_{which}.weight"] for which in "AB")
            scale = alpha / math.sqrt(rank) if stabilised else alpha / rank
            expected.get_submodule(name).weight.add_(scale * b @ a)
        expected.head.fc.weight.copy_(tensors["base_model.model.head.fc.weight"])
        expected.head.fc.bias.copy_(tensors["base_model.model.head.fc.bias"])
    found = import_peft(tiny(), tmp_path)
    # Changes of size 30 beside weights of 0.02: rounding of float32 on logits of up to 100.
    torch.testing.assert_close(found(images()), expected(images()), rtol=1e-3, atol=1e-3)
    assert (found(images()) - tiny()(images())).abs().max() > 1


def test_names_of_timm_are_found_in_our_own_vit(tmp_path: Path) -> None:
    tensors, config = by_hand(tmp_path / "ours")
    theirs = {k.replace("model.trunk.", "model.").replace("head.fc.", "head."): v for k, v in tensors.items()}
    (tmp_path / "theirs").mkdir()
    save_file(theirs, tmp_path / "theirs" / "adapter_model.safetensors")
    (tmp_path / "theirs" / "adapter_config.json").write_text(json.dumps(config))
    one, other = (import_peft(tiny(), tmp_path / name) for name in ("ours", "theirs"))
    assert torch.equal(one(images()), other(images()))


@pytest.mark.parametrize("config", [Lora(rank=2, scale=3.0, targets=("qv", "mlp")), Nola(rank=2, coefficients=9)])
def test_what_goes_out_for_peft_comes_back_the_same(config: AdapterConfig, tmp_path: Path) -> None:
    model = trained(config)
    export_peft(model, "default", tmp_path)
    # Scales are in B now: one rounding more.
    torch.testing.assert_close(import_peft(tiny(), tmp_path)(images()), model(images()), rtol=1e-5, atol=1e-5)


def test_a_fused_layer_goes_out_as_one_module_with_the_ranks_of_its_pieces(tmp_path: Path) -> None:
    model = trained(Lora(rank=2, scale=4.0, targets=("qv",)))
    export_peft(model, "default", tmp_path)
    tensors, config = (
        load_file(tmp_path / "adapter_model.safetensors"),
        json.loads((tmp_path / "adapter_config.json").read_text()),
    )
    name = "base_model.model.trunk.blocks.0.attn.qkv.lora_"
    a, b = tensors[f"{name}A.weight"], tensors[f"{name}B.weight"]
    assert (a.shape, b.shape, config["r"], config["lora_alpha"]) == ((4, WIDTH), (3 * WIDTH, 4), 4, 4)
    assert b[WIDTH : 2 * WIDTH].abs().max() == 0  # keys are not adapted
    base = tiny().trunk.blocks[0].attn.qkv.weight
    torch.testing.assert_close(base + b @ a, model.trunk.blocks[0].attn.qkv.weight, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"use_dora": True}, "use_dora = True, which is more than LoRA"),
        ({"bias": "all"}, "bias = 'all', which is more than LoRA"),
        ({"peft_type": "IA3"}, "is IA3; only LORA"),
    ],
)
def test_more_than_lora_is_refused(more: dict[str, Any], said: str, tmp_path: Path) -> None:
    by_hand(tmp_path, **more)
    model = tiny()
    with pytest.raises(ValueError, match=said):
        import_peft(model, tmp_path)
    assert adapters_of(model) is None


def test_what_peft_cannot_express_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no factors"):
        export_peft(trained(Pranc(coefficients=5)), "default", tmp_path)
    with pytest.raises(ValueError, match=r"patch_embed\.proj is a convolution"):
        export_peft(trained(Lora(rank=2, targets=("all",))), "default", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"no adapter of peft: it has no adapter_config.json"):
        import_peft(tiny(), tmp_path / "nowhere")


@pytest.mark.skipif(find_spec("peft") is None, reason="the package peft is not installed")
def test_the_package_peft_gives_the_same_logits_both_ways(tmp_path: Path) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model

    options = {"rank_pattern": {"fc1": 2}, "alpha_pattern": {"fc1": 7}, "modules_to_save": ["head"]}
    theirs = get_peft_model(tiny(), LoraConfig(r=3, lora_alpha=5, target_modules=["qkv", "fc1"], **options)).eval()
    for parameter in theirs.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.3)
    theirs.save_pretrained(tmp_path / "in")
    torch.testing.assert_close(import_peft(tiny(), tmp_path / "in")(images()), theirs(images()), rtol=1e-4, atol=1e-5)
    for number, config in enumerate((Lora(rank=2, scale=3.0, targets=("qv", "mlp")), Nola(rank=2, coefficients=9))):
        model = trained(config)
        export_peft(model, "default", tmp_path / str(number))
        there = PeftModel.from_pretrained(tiny(), tmp_path / str(number)).eval()
        torch.testing.assert_close(there(images()), model(images()), rtol=1e-4, atol=1e-5)
