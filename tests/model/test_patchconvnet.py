"""PatchConvNet as its authors have it: their weights give their logits, and earlier layouts of ours still load."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from torch import Tensor, nn

import vitrail
from vitrail.config import DataConfig, EngineConfig, ModelConfig, OptimConfig, RunConfig
from vitrail.engine import checkpoint
from vitrail.model.build import create_model
from vitrail.model.classifier import Classifier
from vitrail.model.config import ConvStem
from vitrail.model.heads.config import AttentionPool
from vitrail.model.mixers.patches import GatedConvMixer
from vitrail.model.timm_weights import load_weights
from vitrail.model.zoo import ZOO
from vitrail.run.train import resume

WIDTH, DEPTH, CLASSES = 32, 2, 5


class Squeeze(nn.Module):
    """A gate for each channel from the mean of all pixels; names as in the published files."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv_reduce, self.conv_expand = nn.Conv2d(width, width // 4, 1), nn.Conv2d(width // 4, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        mean = x.flatten(2).mean(2)[..., None, None]
        return x * torch.sigmoid(self.conv_expand(self.conv_reduce(mean).clamp(min=0)))


class Theirs(nn.Module):
    """The published architecture in small, written from its description, with the names of its files."""

    def __init__(self, many: bool) -> None:
        super().__init__()
        self.many, widths = many, (3, WIDTH // 8, WIDTH // 4, WIDTH // 2, WIDTH)
        stem: list[nn.Module] = []
        for i in range(4):
            stem += [nn.Sequential(nn.Conv2d(widths[i], widths[i + 1], 3, 2, 1, bias=False)), nn.GELU()]
        self.patch_embed = nn.Module()
        self.patch_embed.proj = nn.Sequential(*stem[:-1])
        self.cls_token = nn.Parameter(torch.randn(1, CLASSES if many else 1, WIDTH))
        self.blocks = nn.ModuleList(self._block() for _ in range(DEPTH))
        self.blocks_token_only = nn.ModuleList([self._pool()])
        self.norm = nn.LayerNorm(WIDTH, eps=1e-6)
        one = [nn.Linear(WIDTH, 1) for _ in range(CLASSES)]
        self.head = nn.ModuleList(one) if many else nn.Linear(WIDTH, CLASSES)

    @staticmethod
    def _block() -> nn.Module:
        block = nn.Module()
        block.norm1, block.attn = nn.LayerNorm(WIDTH, eps=1e-6), nn.Module()
        block.gamma_1 = nn.Parameter(torch.rand(WIDTH))
        spread = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH)
        point = [nn.Conv2d(WIDTH, WIDTH, 1) for _ in range(2)]
        block.attn.qkv_pos = nn.Sequential(point[0], nn.GELU(), spread, nn.GELU(), Squeeze(WIDTH), point[1])
        return block

    @staticmethod
    def _pool() -> nn.Module:
        pool = nn.Module()
        pool.norm1, pool.norm2 = nn.LayerNorm(WIDTH, eps=1e-6), nn.LayerNorm(WIDTH, eps=1e-6)
        pool.attn, pool.mlp = nn.Module(), nn.Module()
        for name in ("q", "k", "v", "proj"):
            setattr(pool.attn, name, nn.Linear(WIDTH, WIDTH))
        pool.mlp.fc1, pool.mlp.fc2 = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)
        pool.gamma_1, pool.gamma_2 = nn.Parameter(torch.rand(WIDTH)), nn.Parameter(torch.rand(WIDTH))
        return pool

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch_embed.proj(images)
        for block in self.blocks:
            rows = x.permute(0, 2, 3, 1)
            out = block.attn.qkv_pos(block.norm1(rows).permute(0, 3, 1, 2))
            x = x + block.gamma_1[:, None, None] * out
        patches, pool = x.flatten(2).transpose(1, 2), self.blocks_token_only[0]
        token = self.cls_token.expand(len(images), -1, -1)
        asked, read = pool.norm1(token), pool.norm1(patches if self.many else torch.cat([token, patches], 1))
        scores = pool.attn.q(asked) @ pool.attn.k(read).transpose(1, 2) / WIDTH**0.5
        token = token + pool.gamma_1 * pool.attn.proj(scores.softmax(-1) @ pool.attn.v(read))
        hidden = nn.functional.gelu(pool.mlp.fc1(pool.norm2(token)))
        token = self.norm(token + pool.gamma_2 * pool.mlp.fc2(hidden))
        if self.many:
            return torch.cat([self.head[c](token[:, c]) for c in range(CLASSES)], 1)
        return self.head(token[:, 0])


def ours(**changes: object) -> Classifier:
    return create_model("patchconvnet_s60", classes=CLASSES, width=WIDTH, depth=DEPTH, image_size=64, **changes).eval()


@pytest.mark.parametrize("many", [False, True], ids=["one map", "a map for each class"])
def test_weights_under_the_authors_names_give_their_logits(many: bool) -> None:
    torch.manual_seed(0)
    theirs = Theirs(many).eval()
    model = ours(head=AttentionPool(queries="per_class", qkv_bias=True)) if many else ours()
    assert load_weights(model, theirs.state_dict()) == []  # nothing is left over, nothing starts anew
    images = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(model.stack(images)[:, 0], theirs(images), rtol=1e-5, atol=1e-5)


def test_layerscale_starts_as_in_the_authors_code() -> None:
    starts = {name: ZOO[f"patchconvnet_{name}"].trunk.layerscale for name in ("s60", "s120", "b60", "b120", "l60")}
    assert starts == {"s60": 1e-4, "s120": 1e-6, "b60": 1e-6, "b120": 1e-6, "l60": 1e-6}


def test_convolutions_start_as_torch_starts_them() -> None:
    """Uniform within 1 / sqrt(inputs of a weight): a std of 1 / sqrt(3 * inputs), and biases likewise."""
    torch.manual_seed(0)
    mixer = GatedConvMixer(384, 0.25)
    for layer, inputs in ((mixer.depthwise, 9), (mixer.fc1, 384), (mixer.squeeze, 384), (mixer.excite, 96)):
        for values in (layer.weight, layer.bias):
            assert values.abs().max() <= inputs**-0.5
            assert values.std().item() == pytest.approx((3 * inputs) ** -0.5, rel=0.15)


EARLIER = {"stem": ConvStem(norm=True), "head": AttentionPool()}


def test_models_saved_in_the_earlier_layout_load(tmp_path: Path) -> None:
    """Their stored description names the stem's BatchNorm and knows no biases of the pooling."""
    torch.manual_seed(0)
    old = ours(**EARLIER)
    old.spec["head"].pop("qkv_bias")
    old.save(tmp_path)
    again = vitrail.load(tmp_path)
    assert "trunk.patch_embed.norms.0.running_mean" in again.state_dict()
    assert "head.blocks.0.attn.q.bias" not in again.state_dict()
    images = torch.randn(2, 3, 64, 64)
    assert torch.equal(again.stack(images), old.stack(images))


def test_a_run_that_began_in_the_earlier_layout_goes_on_in_it(tmp_path: Path) -> None:
    """Its settings say the name alone, which stands for another layout now; its checkpoint says which."""
    tiny = {"depth": 1, "width": 16}
    config = RunConfig(
        data=DataConfig(uri="synthetic:shapes?n=60&size=32", batch=10, workers=0),
        model=ModelConfig("patchconvnet_t20_32", trunk={**tiny, "stem": EARLIER["stem"]}, head=EARLIER["head"]),
        optim=OptimConfig(name="adamw", lr=1e-3, steps=2),
        engine=EngineConfig(device="cpu", compile=False),
        out=str(tmp_path / "run"),
    )
    vitrail.train(config, quiet=True)
    before = vitrail.load(tmp_path / "run").state_dict()
    settings = tmp_path / "run" / "config.yaml"
    said = yaml.safe_load(settings.read_text())
    said["model"] |= {"trunk": tiny, "head": None}
    settings.write_text(yaml.safe_dump(said))
    state, _ = checkpoint.newest(tmp_path / "run" / "checkpoint")
    del state.facts["config"]  # checkpoints did not keep the settings then
    checkpoint.save(tmp_path / "run" / "checkpoint", state, 1)
    resume(tmp_path / "run", quiet=True)
    after = vitrail.load(tmp_path / "run").state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], value) for name, value in before.items())
