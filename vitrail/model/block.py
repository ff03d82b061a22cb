"""Residual branches and the block that stacks them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torchvision.ops import stochastic_depth

from vitrail.model.config import TrunkConfig
from vitrail.model.mixers.softmax import SoftmaxMixer
from vitrail.model.tokens import Probe, Tokens

ACTIVATIONS: dict[str, type[nn.Module]] = {"gelu": nn.GELU, "relu": nn.ReLU, "silu": nn.SiLU}


def activation(name: str) -> nn.Module:
    """The activation of a name of `TrunkConfig.activation`."""
    return nn.GELU(approximate="tanh") if name == "gelu_tanh" else ACTIVATIONS[name]()


class LayerScale(nn.Module):
    """Learned per-channel gain on a residual branch (CaiT, eq. 3.7).

    Starts at `init`, so a deep stack begins close to the identity and still has gradients in every branch
    (a gain of exactly zero would not).
    """

    def __init__(self, width: int, init: float) -> None:
        super().__init__()
        self.init = init
        self.gamma = nn.Parameter(torch.empty(width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.gamma, self.init)

    def forward(self, branch: Tensor) -> Tensor:  # [..., width]
        return branch * self.gamma


class DropPath(nn.Module):
    """Drops the whole branch of a sample with probability `rate` in training and rescales the rest."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, branch: Tensor) -> Tensor:  # [batch, ...]
        if self.rate == 0.0 or not self.training:
            return branch
        return stochastic_depth(branch, self.rate, "row", True)

    def extra_repr(self) -> str:
        return f"rate={self.rate:g}"


class Mlp(nn.Module):
    """Two linear layers, applied to every token (architectures-and-training §2.3)."""

    def __init__(self, width: int, hidden: int, act: str) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.act = activation(act)
        self.fc2 = nn.Linear(hidden, width)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for layer in (self.fc1, self.fc2):
            nn.init.trunc_normal_(layer.weight, std=0.02)
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))


class Block(nn.Module):
    """A mixing branch and a channel branch, each norm -> operation -> scale -> drop path -> add (pre-norm, eq. 3.5)."""

    def __init__(self, config: TrunkConfig, layer: int, drop_path: float) -> None:
        super().__init__()
        width = config.width
        self.layer = layer
        self.norm1 = nn.LayerNorm(width, eps=config.norm_eps)
        self.attn = SoftmaxMixer(width, config.heads, config.mixer.qkv_bias, config.mixer.attention_drop)
        self.ls1 = nn.Identity() if config.layerscale is None else LayerScale(width, config.layerscale)
        self.norm2 = nn.LayerNorm(width, eps=config.norm_eps)
        self.mlp = Mlp(width, int(width * config.mlp_ratio), config.activation)
        self.ls2 = nn.Identity() if config.layerscale is None else LayerScale(width, config.layerscale)
        self.drop_path = DropPath(drop_path)

    def forward(self, tokens: Tokens, probe: Probe | None = None) -> Tokens:
        x = tokens.sequence
        x = x + self.drop_path(self.ls1(self.attn(self.norm1(x), tokens, self.layer, probe)))
        x = x + self.drop_path(self.ls2(self.mlp(self.norm2(x))))
        return tokens.but(x if probe is None else probe(f"tokens.{self.layer}", x))


def drop_path_rates(config: TrunkConfig) -> list[float]:
    """The rate of every block: rising linearly to `drop_path`, or the same everywhere."""
    if config.drop_path_rule == "uniform" or config.depth == 1:
        return [config.drop_path] * config.depth
    return [config.drop_path * i / (config.depth - 1) for i in range(config.depth)]
