"""Weights of the hub without a network: the cache, folders that were copied, and the message without either."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import nn

import vitrail
from vitrail.cli import run as command
from vitrail.model.build import create_model
from vitrail.model.hub import cached_weights, unreachable, weights_in

TINY = {"depth": 2, "embed_dim": 64, "num_heads": 2}
OURS = {"depth": 2, "width": 64, "heads": 2}
REPOSITORY = "timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub, and no network."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path / "hub"


@pytest.fixture(scope="module")
def theirs() -> nn.Module:
    torch.manual_seed(1)
    return timm.create_model("vit_tiny_patch16_224", **TINY).eval()


def put(cache: Path, repository: str, state: dict[str, torch.Tensor], revision: str = "0a1b") -> Path:
    """Files as huggingface_hub lays them out."""
    folder = cache / f"models--{repository.replace('/', '--')}"
    snapshot = folder / "snapshots" / revision
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir(exist_ok=True)
    (folder / "refs" / "main").write_text(revision)
    (snapshot / "config.json").write_text(json.dumps({"architecture": "vit_tiny_patch16_224"}))
    save_file(state, snapshot / "model.safetensors")
    return folder


def test_the_hub_is_not_asked_where_the_environment_says_offline(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(*_: object, **__: object) -> None:
        raise AssertionError("asked")

    monkeypatch.setattr("urllib.request.urlopen", asked)
    assert unreachable() == "HF_HUB_OFFLINE is set"


def test_a_name_that_takes_long_to_look_up_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr("vitrail.model.hub.WAIT", 0.05)
    monkeypatch.setattr("urllib.request.urlopen", lambda *_, **__: time.sleep(0.5) or io.BytesIO())
    assert unreachable() == "no answer from https://huggingface.co"


def test_the_cache_is_looked_up_as_huggingface_hub_does(cache: Path, theirs: nn.Module) -> None:
    from huggingface_hub import try_to_load_from_cache

    put(cache, REPOSITORY, theirs.state_dict())
    expected = try_to_load_from_cache(REPOSITORY, "model.safetensors", cache_dir=cache)
    assert cached_weights(REPOSITORY) == Path(str(expected))


def test_offline_training_ends_before_data_are_read_with_the_file_and_the_commands(
    cache: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert command(["train", "finetune", "--data", str(photos), "--engine.device", "cpu", "--out", str(out)]) == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1
    assert "hf download timm/deit_small_patch16_224.fb_in1k model.safetensors --local-dir FOLDER" in err
    assert "vitrail train ... --model.weights FOLDER" in err
    assert "HF_HUB_OFFLINE is set" in err
    assert not out.exists()


def test_cached_weights_of_timm_need_no_network(cache: Path) -> None:
    published = timm.create_model("test_vit")
    repository = timm.get_pretrained_cfg("test_vit").hf_hub_id
    put(cache, repository, published.state_dict())
    model = create_model("timm:test_vit", classes=3, weights="timm")
    assert torch.equal(model.trunk.backbone.patch_embed.proj.weight, published.patch_embed.proj.weight)
    total = len(published.state_dict())
    loaded = model.stated["weights"]["loaded"]
    assert loaded == f"loaded {total - 2} of {total} tensors from {repository}; the head for 1000 classes was replaced"


@pytest.mark.parametrize("form", ["snapshot", "bin", "repository", "cache"])
def test_a_folder_of_the_hub_is_a_source_of_weights(form: str, cache: Path, theirs: nn.Module, tmp_path: Path) -> None:
    folder = put(cache, REPOSITORY, theirs.state_dict())
    places = {"snapshot": folder / "snapshots" / "0a1b", "repository": folder, "cache": cache, "bin": tmp_path / "bin"}
    if form == "bin":
        places[form].mkdir()
        torch.save(theirs.state_dict(), places[form] / "pytorch_model.bin")
    model = create_model("vit_tiny", weights=str(places[form]), **OURS).eval()
    images = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        torch.testing.assert_close(model(images), theirs(images), atol=1e-4, rtol=1e-4)


def test_a_pickled_program_in_a_folder_of_the_hub_is_not_run(tmp_path: Path) -> None:
    class Program:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return Path.touch, (tmp_path / "ran",)  # type: ignore[return-value]

    torch.save({"weight": Program()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="cannot be loaded"):
        create_model("vit_tiny", weights=str(tmp_path), **OURS)
    assert not (tmp_path / "ran").exists()


def test_a_load_reports_tensors_positions_and_the_replaced_head(theirs: nn.Module, tmp_path: Path) -> None:
    save_file(theirs.state_dict(), tmp_path / "model.safetensors")
    model = create_model("vit_tiny", classes=3, image_size=128, weights=str(tmp_path), **OURS)
    total = len(theirs.state_dict())
    assert model.stated["weights"]["loaded"] == (
        f"loaded {total - 2} of {total} tensors from {tmp_path / 'model.safetensors'}; positions resized 14x14 -> 8x8; "
        "the head for 1000 classes was replaced"
    )


@pytest.mark.parametrize("head", [None, "mean"])
def test_a_timm_trunk_takes_a_file_of_its_own_names_at_another_size(
    head: str | None, theirs: nn.Module, tmp_path: Path
) -> None:
    save_file(theirs.state_dict(), tmp_path / "a.safetensors")
    weights = str(tmp_path / "a.safetensors")
    model = create_model("timm:vit_tiny_patch16_224", classes=3, image_size=64, head=head, weights=weights, **TINY)
    overlay = {"file": weights}
    kept = timm.create_model(
        "vit_tiny_patch16_224", pretrained=True, img_size=64, num_classes=3, pretrained_cfg_overlay=overlay, **TINY
    )
    for name in ("pos_embed", "blocks.1.attn.qkv.weight", "norm.bias"):
        assert torch.equal(model.trunk.backbone.state_dict()[name], kept.state_dict()[name])
    assert "positions resized 14x14 -> 4x4" in model.stated["weights"]["loaded"]


def test_list_weights_names_what_is_cached(cache: Path, theirs: nn.Module, capsys: pytest.CaptureFixture[str]) -> None:
    folder = put(cache, REPOSITORY, theirs.state_dict())
    (cache / "models--someone--empty").mkdir()
    assert command(["list", "weights", "--json"]) == 0
    file = folder / "snapshots" / "0a1b" / "model.safetensors"
    (row,) = json.loads(capsys.readouterr().out)
    assert row == {"name": REPOSITORY.replace("/", ":"), "file": str(file), "bytes": file.stat().st_size}


def test_list_weights_of_an_empty_cache_says_where_it_looked(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["list", "weights"]) == 2
    assert str(cache) in capsys.readouterr().err


def test_the_weights_of_a_folder_without_any_are_none(tmp_path: Path) -> None:
    assert weights_in(tmp_path) is None


NEWER = {  # name: patch size, class tokens that heads of ours can take
    "vit_small_patch16_dinov3": (16, 1),  # rotary positions, four registers
    "vit_base_patch16_siglip_224": (16, 0),  # attention pooling, no class token
    "naflexvit_base_patch16_gap": (16, 0),  # four registers, no class token
    "naflexvit_base_patch16_siglip": (16, 0),
    "eva02_tiny_patch14_224": (14, 1),  # rotary positions
    "vit_small_patch14_reg4_dinov2": (14, 1),
}


@pytest.mark.parametrize("head", [None, "mean", "attention_pool"])
@pytest.mark.parametrize("name", NEWER)
def test_newer_backbones_train_and_are_saved_and_loaded(name: str, head: str | None, tmp_path: Path) -> None:
    if not timm.is_model(name):
        pytest.skip(f"timm {timm.__version__} has no {name}")
    size = 4 * NEWER[name][0]
    model = create_model(f"timm:{name}", classes=3, image_size=size, head=head, **TINY)
    images, labels = torch.randn(4, 3, size, size), torch.tensor([0, 1, 2, 0])
    optimizer, losses = torch.optim.AdamW(model.parameters(), 1e-3), []
    for _ in range(3):
        losses.append(nn.functional.cross_entropy(model(images), labels))
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert losses[2] < losses[0]
    assert model.outputs(images).tokens.grid == (4, 4)
    again = vitrail.load(model.eval().save(tmp_path))
    with torch.no_grad():
        assert torch.equal(again(images), model(images))


@pytest.mark.parametrize("name", [name for name, (_, tokens) in NEWER.items() if not tokens])
def test_registers_are_no_class_tokens(name: str) -> None:
    with pytest.raises(ValueError, match="has 0 class tokens, the head class_token needs 1"):
        create_model(f"timm:{name}", classes=3, image_size=64, head="class_token", **TINY)
