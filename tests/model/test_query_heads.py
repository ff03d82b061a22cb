"""Attention pooling and class attention are one layer; files that were written when they were two still load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import vitrail
from vitrail.engine import checkpoint
from vitrail.model.build import create_model
from vitrail.model.heads.config import AttentionPool, ClassAttention
from vitrail.model.parts.block import LayerScale, Mlp, make_norm
from vitrail.model.parts.tokens import Tokens
from vitrail.model.store import current_names, read_tensors, write_tensors

WIDTH, CLASSES = 24, 5


class EarlierPool(nn.Module):
    """Attention pooling as it was, parameters and forward pass."""

    def __init__(self, config: AttentionPool, width: int, classes: int, start: float) -> None:
        super().__init__()
        self.per_class, self.heads = config.queries == "per_class", config.heads
        self.token_in_keys, self.own_logits = config.token_in_keys, config.per_class_logit == "own"
        self.query = nn.Parameter(torch.empty(1, classes if self.per_class else 1, width))
        self.norm1, self.norm2, self.norm = (nn.LayerNorm(width, eps=1e-6) for _ in range(3))
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.proj = nn.Linear(width, width)
        self.ls1, self.ls2 = LayerScale(width, start), LayerScale(width, start)
        self.mlp = Mlp(width, int(width * config.mlp_ratio), "gelu")
        self.fc = nn.Linear(width, 1 if self.per_class and not self.own_logits else classes)

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def _parts(self, tokens: Tokens) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        patches = tokens.patches
        token = self.query.expand(len(patches), -1, -1).to(patches.dtype)
        read = torch.cat([token, patches], 1) if self.token_in_keys else patches
        read = self.norm1(read)
        asked = self.norm1(token)
        mask = None
        if tokens.mask is not None:
            mask = tokens.mask[:, tokens.prefix :]
            if self.token_in_keys:
                mask = torch.cat([mask.new_ones(len(mask), 1), mask], 1)
            mask = mask[:, None, None]
        return token, self._split(self.q(asked)), self._split(self.k(read)), self._split(self.v(read)), mask

    def pooled(self, tokens: Tokens) -> Tensor:
        token, q, k, v, mask = self._parts(tokens)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        token = token + self.ls1(self.proj(out.transpose(1, 2).flatten(2)))
        token = token + self.ls2(self.mlp(self.norm2(token)))
        return self.norm(token)

    def forward(self, tokens: Tokens) -> Tensor:
        pooled = self.pooled(tokens)
        if not self.per_class:
            return self.fc(pooled)
        if self.own_logits:
            return torch.einsum("bcw,cw->bc", pooled, self.fc.weight.to(pooled))[:, None] + self.fc.bias.to(pooled)
        return self.fc(pooled).transpose(1, 2)

    def maps(self, tokens: Tokens) -> Tensor:
        _, q, k, _, mask = self._parts(tokens)
        scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
        scores = scores if mask is None else scores.masked_fill(~mask, float("-inf"))
        return scores[..., -tokens.patches.shape[1] :].softmax(-1).flatten(1, 2)


class EarlierDecoder(nn.Module):
    """Class attention as it was: layers of a class token, norm, classifier."""

    def __init__(self, config: ClassAttention, width: int, classes: int, start: float, heads: int) -> None:
        super().__init__()
        self.heads, self.token_in_keys = heads, config.token_in_keys
        self.cls_token = nn.Parameter(torch.empty(1, 1, width))
        self.blocks = nn.ModuleList()
        for _ in range(config.layers):
            block = nn.Module()
            block.norm1, block.norm2 = make_norm("layernorm", width), make_norm("layernorm", width)
            block.attn = nn.Module()
            for name in ("q", "k", "v", "proj"):
                setattr(block.attn, name, nn.Linear(width, width))
            block.mlp = Mlp(width, int(width * config.mlp_ratio), "gelu")
            block.ls1, block.ls2 = LayerScale(width, start), LayerScale(width, start)
            self.blocks.append(block)
        self.norm = make_norm("layernorm", width)
        self.fc = nn.Linear(width, classes)

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def _mix(self, attn: Any, z: Tensor, mask: Tensor | None) -> Tensor:
        read = z if self.token_in_keys else z[:, 1:]
        q, k, v = self._split(attn.q(z[:, :1])), self._split(attn.k(read)), self._split(attn.v(read))
        seen = None if mask is None else (mask if self.token_in_keys else mask[:, 1:])[:, None, None]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return attn.proj(out.transpose(1, 2).flatten(2))

    def forward(self, tokens: Tokens) -> Tensor:
        patches, mask = tokens.patches, None
        if tokens.mask is not None:
            real = tokens.mask[:, tokens.prefix :]
            mask = torch.cat([real.new_ones(len(real), 1), real], 1)
        token = self.cls_token.expand(len(patches), -1, -1).to(patches.dtype)
        for block in self.blocks:
            z = block.norm1(torch.cat([token, patches], 1))
            token = token + block.ls1(self._mix(block.attn, z, mask))
            token = token + block.ls2(block.mlp(block.norm2(token)))
        return self.fc(self.norm(token)[:, 0])[:, None]


def randomised(module: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5, generator=generator)
    return module


def sample(masked: bool) -> Tokens:
    torch.manual_seed(1)
    mask = None
    if masked:
        mask = torch.arange(9).expand(2, -1) < torch.tensor([[9], [6]])
    return Tokens(torch.randn(2, 9, WIDTH), 0, (3, 3), mask=mask)


def earlier_model(head: AttentionPool | ClassAttention, folder: Path) -> nn.Module:
    """A saved model of an earlier version: today's trunk, and the head's parameters as they were. Gives its head."""
    model = create_model("deit_tiny", classes=CLASSES, width=WIDTH, depth=1, heads=2, image_size=48, head=head)
    model.save(folder)
    was = (
        EarlierPool(head, WIDTH, CLASSES, 0.5)
        if isinstance(head, AttentionPool)
        else EarlierDecoder(head, WIDTH, CLASSES, 0.5, 2)
    )
    trunk = {n: t for n, t in model.state_dict().items() if n.startswith("trunk.")}
    write_tensors(
        folder / "model.safetensors", trunk | {f"head.{n}": t for n, t in randomised(was).state_dict().items()}
    )
    described = json.loads((folder / "model.json").read_text())
    described["spec"]["head"].pop("qkv_bias", None)  # had no name yet
    described["bytes"] = (folder / "model.safetensors").stat().st_size
    del described["checksum"]  # earlier versions had none
    (folder / "model.json").write_text(json.dumps(described))
    return was.eval()


POOLS = [
    AttentionPool(layerscale=0.5),
    AttentionPool(heads=2, token_in_keys=True, layerscale=0.5),
    AttentionPool(queries="per_class", layerscale=0.5),
    AttentionPool(queries="per_class", per_class_logit="shared", heads=2, layerscale=0.5),
]
DECODERS = [ClassAttention(layerscale=0.5), ClassAttention(layers=1, token_in_keys=False, layerscale=0.5)]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("head", [*POOLS, *DECODERS], ids=str)
def test_saved_models_of_both_heads_load_and_give_the_same_logits_and_maps(
    head: AttentionPool | ClassAttention, masked: bool, tmp_path: Path
) -> None:
    was = earlier_model(head, tmp_path)
    now = vitrail.load(tmp_path).head
    tokens = sample(masked)
    torch.testing.assert_close(now(tokens), was(tokens), rtol=1e-6, atol=1e-6)
    if isinstance(was, EarlierPool):
        torch.testing.assert_close(now.maps(tokens), was.maps(tokens), rtol=1e-6, atol=1e-6)


def test_weights_of_an_earlier_model_start_another_one(tmp_path: Path) -> None:
    was = earlier_model(POOLS[1], tmp_path)
    started = create_model(
        "deit_tiny",
        classes=CLASSES,
        width=WIDTH,
        depth=1,
        heads=2,
        image_size=48,
        head=POOLS[1],
        weights=str(tmp_path),
    )
    assert started.stated["weights"]["adapted"] == []
    tokens = sample(False)
    torch.testing.assert_close(started.head(tokens), was(tokens), rtol=1e-6, atol=1e-6)


def test_names_in_an_earlier_checkpoint_are_those_of_now(tmp_path: Path) -> None:
    """Weights, their average and the optimiser's state; other heads keep names that look alike."""
    torch.manual_seed(0)
    model = create_model("deit_tiny", classes=CLASSES, width=WIDTH, depth=1, heads=2, head=AttentionPool())
    was = EarlierPool(AttentionPool(), WIDTH, CLASSES, 0.5)
    of_head = [f"head.{n}" for n, _ in was.named_parameters()]
    trunk = [n for n, _ in model.named_parameters() if n.startswith("trunk.")]
    names = [*trunk, *of_head]
    stored = {f"objective/model.{n}": torch.zeros(1) for n in names} | {f"ema/{n}": torch.zeros(1) for n in names}
    stored |= {f"optimizer/model.{n}/exp_avg": torch.zeros(1) for n in names}
    stored |= {"objective/other.head.ls1.gamma": torch.zeros(1), "rng/0/cpu": torch.zeros(1)}
    checkpoint.save(tmp_path, checkpoint.State(3, stored), keep=1)
    state, _ = checkpoint.newest(tmp_path)
    assert state is not None
    now = {n for n, _ in model.named_parameters()}
    assert set(state.part("ema")) == now
    assert set(state.part("objective")) == {f"model.{n}" for n in now} | {"other.head.ls1.gamma"}
    assert set(state.part("optimizer")) == {f"model.{n}/exp_avg" for n in now}


def test_current_names_stay_as_they_are(tmp_path: Path) -> None:
    for head in ("attention_pool", "class_attention", "gramian", "second_order"):
        model = create_model("deit_tiny", classes=3, width=64, depth=1, heads=2, head=head)
        state = model.state_dict()
        assert list(current_names(state)) == list(state)
    write_tensors(tmp_path / "w.safetensors", state)
    assert set(read_tensors(tmp_path / "w.safetensors")) == set(state)
