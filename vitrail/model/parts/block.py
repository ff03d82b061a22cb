"""Blocks of residual branches: norms, gains and stochastic depth, MLP, local patch interaction, serial and parallel.

Initial weights other than the usual normal of 0.02 are those compared in CaiT (arXiv 2103.17239).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vitrail.kernels.gelu import Gelu
from vitrail.kernels.packing import pack
from vitrail.model.config import TrunkConfig
from vitrail.model.mixers.mixer import Mixer, QkvMixer, build_mixer
from vitrail.model.parts.modules import small_normal
from vitrail.model.parts.tokens import Probe, Tokens


class Affine(nn.Module):
    """A learned gain and shift per channel, without statistics (ResMLP, arXiv 2105.03404). Starts as the identity."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.empty(width))
        self.beta = nn.Parameter(torch.empty(width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.alpha)
        nn.init.zeros_(self.beta)

    def forward(self, x: Tensor) -> Tensor:  # [..., width]
        return torch.addcmul(self.beta, self.alpha, x)


class TokenBatchNorm(nn.BatchNorm1d):
    """BatchNorm over every token of the batch."""

    def forward(self, x: Tensor) -> Tensor:  # [batch, tokens, width]
        return super().forward(x.flatten(0, 1)).view_as(x)


def make_norm(kind: str, width: int, eps: float = 1e-6) -> nn.Module:
    """The norm of a name of `TrunkConfig.norm`."""
    if kind == "layernorm":
        return nn.LayerNorm(width, eps=eps)
    if kind == "batchnorm":
        return TokenBatchNorm(width)
    return Affine(width) if kind == "affine" else nn.Identity()


class LayerScale(nn.Module):
    """Learned per-channel gain on a residual branch (CaiT, Touvron et al. 2021, arXiv 2103.17239).

    Starts at `init`, so a deep stack begins close to the identity and still has gradients in every branch
    (a gain of exactly zero would not); or uniformly in [0, 2 init]. `learned=False` freezes it. `shift` adds a learned
    constant: the post-operation affine map of ResMLP's equations, which its published counts do not have.
    """

    def __init__(
        self,
        width: int,
        init: float,
        start: Literal["constant", "uniform"] = "constant",
        learned: bool = True,
        shift: bool = False,
    ) -> None:
        super().__init__()
        self.init, self.start = init, start
        self.gamma = nn.Parameter(torch.empty(width), requires_grad=learned)
        self.shift = nn.Parameter(torch.empty(width)) if shift else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.start == "uniform":
            nn.init.uniform_(self.gamma, 0.0, 2 * self.init)
        else:
            nn.init.constant_(self.gamma, self.init)
        if self.shift is not None:
            nn.init.zeros_(self.shift)

    def forward(self, branch: Tensor) -> Tensor:  # [..., width]
        return branch * self.gamma if self.shift is None else torch.addcmul(self.shift, branch, self.gamma)


class ScalarGate(nn.Module):
    """One learned scalar per branch: ReZero and SkipInit start it at 0, Fixup at 1 with a shift (compared in CaiT)."""

    def __init__(self, init: float, shift: bool = False) -> None:
        super().__init__()
        self.init = init
        self.gain = nn.Parameter(torch.empty(1))
        self.shift = nn.Parameter(torch.empty(1)) if shift else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.gain, self.init)
        if self.shift is not None:
            nn.init.zeros_(self.shift)

    def forward(self, branch: Tensor) -> Tensor:
        return branch * self.gain if self.shift is None else branch * self.gain + self.shift


class DropPath(nn.Module):
    """Drops the whole branch of a sample with probability `rate` in training and rescales the rest."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, branch: Tensor, keep: Tensor | None = None) -> Tensor:  # [batch, ...]
        if keep is not None:  # drawn by the caller and shared: 0, or 1 / (1 - rate)
            return branch * keep.to(branch.dtype)
        if self.rate == 0.0 or not self.training:
            return branch
        # As torchvision.ops.stochastic_depth, whose import costs seconds.
        keep = branch.new_empty(len(branch), *[1] * (branch.ndim - 1)).bernoulli_(1 - self.rate)
        return branch * (keep / (1 - self.rate) if self.rate < 1 else keep)

    def rows(self, tokens: Tokens) -> Tensor | None:
        """One draw per image for packed tokens, as `forward` takes it: [capacity, 1]; none where all is kept."""
        if self.rate == 0.0 or not self.training or tokens.offsets is None:
            return None
        keep = torch.rand(len(tokens.offsets) - 1, device=tokens.sequence.device) >= self.rate
        row = torch.arange(len(tokens.sequence), device=keep.device)
        image = torch.bucketize(row, tokens.offsets[1:], right=True).clamp(max=len(keep) - 1)
        return (keep / (1 - self.rate))[image, None]

    def extra_repr(self) -> str:
        return f"rate={self.rate:g}"


def drop_path_rates(rate: float, depth: int, rule: str) -> list[float]:
    """The rate of every block: rising linearly to `rate`, or the same everywhere."""
    if rule == "uniform" or depth == 1:
        return [rate] * depth
    return [rate * i / (depth - 1) for i in range(depth)]


class LocalPatchInteraction(nn.Module):
    """3x3 depth-wise convolution, activation, BatchNorm, 3x3 depth-wise convolution (XCiT, arXiv 2106.09681).

    The paper names BatchNorm before the activation; published weights have it after. Names follow timm's. Class tokens
    have no neighbours: they receive nothing.
    """

    def __init__(self, width: int, activation: nn.Module) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.act = activation
        self.bn = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, groups=width)

    def forward(self, x: Tensor, tokens: Tokens) -> Tensor:
        """x [batch, prefix + patches, width] -> the same. Raises `ValueError` where patches were dropped or padded."""
        rows, columns = tokens.grid
        batch, count, width = x.shape
        if tokens.mask is not None or count != tokens.prefix + rows * columns:
            raise ValueError("local patch interaction needs the whole grid: no dropped patches, no padding")
        image = x[:, tokens.prefix :].transpose(1, 2).reshape(batch, width, rows, columns)
        out = self.conv2(self.bn(self.act(self.conv1(image)))).flatten(2).transpose(1, 2)
        return torch.cat([torch.zeros_like(out[:, : tokens.prefix]), out], 1) if tokens.prefix else out


ACTIVATIONS: dict[str, type[nn.Module]] = {"gelu": Gelu, "relu": nn.ReLU, "silu": nn.SiLU}


def activation(name: str) -> nn.Module:
    """The activation of a name of `TrunkConfig.activation`."""
    return nn.GELU(approximate="tanh") if name == "gelu_tanh" else ACTIVATIONS[name]()


class Mlp(nn.Module):
    """Two linear layers with an activation between, applied to every token."""

    def __init__(self, width: int, hidden: int, act: str) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.act = activation(act)
        self.fc2 = nn.Linear(hidden, width)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        small_normal(self.fc1, self.fc2)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))


def branch_gain(config: TrunkConfig) -> nn.Module:
    """What multiplies a branch before it is added: LayerScale, a scalar, or nothing."""
    if config.start == "fixup":
        return ScalarGate(1.0 if config.gate is None else config.gate, shift=True)
    if config.gate is not None:
        return ScalarGate(config.gate)
    if config.layerscale is None:
        return nn.Identity()
    return LayerScale(
        config.width, config.layerscale, config.layerscale_start, config.layerscale_learned, config.layerscale_shift
    )


def added(x: Tensor, branch: Tensor) -> Tensor:
    """x + branch, in the precision of the stream `x` though gains may be kept in a higher one."""
    return (x + branch).to(x.dtype)


class CheckpointedBlock(nn.Module):
    """With `recompute`, activation checkpointing (Chen et al. 2016, arXiv 1604.06174): only the input and the state of
    random generators are kept, and backward computes the rest again. Where intermediates are asked for it does not."""

    recompute = False

    def compute(self, tokens: Tokens, probe: Probe | None = None) -> Tokens:
        raise NotImplementedError

    def forward(self, tokens: Tokens, probe: Probe | None = None) -> Tokens:
        if not self.recompute or probe is not None or not torch.is_grad_enabled():
            return self.compute(tokens, probe)
        return checkpoint(self.compute, tokens, use_reentrant=False)


class Block(CheckpointedBlock):
    """A mixing branch and a channel branch, each norm -> operation -> gain -> drop path -> add (pre-norm).

    The channel branch is absent where `mlp_ratio` is 0 (PatchConvNet). Between them stands local patch interaction
    where `local` is on (XCiT). Names follow timm's.
    """

    def __init__(self, config: TrunkConfig, grid: tuple[int, int], layer: int, drop_path: float) -> None:
        super().__init__()
        width = config.width
        self.layer = layer
        self.norm1 = make_norm(config.norm, width, config.norm_eps)
        self.attn = build_mixer(config.mixer, width, config.heads, grid)
        self.ls1 = branch_gain(config)
        self.drop_path = DropPath(drop_path)
        self.norm3, self.local_mp, self.ls3 = None, None, None
        if config.local:
            self.norm3 = make_norm(config.norm, width, config.norm_eps)
            self.local_mp = LocalPatchInteraction(width, activation(config.activation))
            self.ls3 = branch_gain(config)
        self.norm2, self.mlp, self.ls2 = None, None, None
        if config.mlp_ratio:
            self.norm2 = make_norm(config.norm, width, config.norm_eps)
            self.mlp = Mlp(width, int(width * config.mlp_ratio), config.activation)
            self.ls2 = branch_gain(config)

    @property
    def mixers(self) -> list[Mixer]:
        return [self.attn]

    def compute(self, tokens: Tokens, probe: Probe | None = None) -> Tokens:
        x = tokens.sequence
        keep = (None, None) if probe is None else probe.keep(self.layer)
        if tokens.offsets is not None:
            keep = (self.drop_path.rows(tokens), self.drop_path.rows(tokens))
        x = self.after_mixing(x, self._mixed(self.norm1(x), tokens, probe), keep[0])
        if self.local_mp is not None and self.norm3 is not None and self.ls3 is not None:
            x = added(x, self.drop_path(self.ls3(self.local_mp(self.norm3(x), tokens))))
        x = self.after_channels(x, keep[1])
        return tokens.but(x if probe is None else probe(f"tokens.{self.layer}", x))

    def _mixed(self, x: Tensor, tokens: Tokens, probe: Probe | None) -> Tensor:
        if tokens.offsets is None or self.attn.takes_packed:
            return self.attn(x, tokens, self.layer, probe)
        dense = tokens.but(x).padded()
        assert dense.mask is not None
        return pack(self.attn(dense.sequence, dense, self.layer, probe), dense.mask, len(x))[0]

    def after_mixing(self, x: Tensor, mixed: Tensor, keep: Tensor | None = None) -> Tensor:
        """x with the mixing branch added; `keep` is what drop path multiplies it by (none: it draws)."""
        return added(x, self.drop_path(self.ls1(mixed), keep))

    def after_channels(self, x: Tensor, keep: Tensor | None = None, gate: Tensor | None = None) -> Tensor:
        """x with the channel branch added, times `gate` where given; x itself where there is no such branch."""
        if self.mlp is None or self.norm2 is None or self.ls2 is None:
            return x
        branch = self.drop_path(self.ls2(self.mlp(self.norm2(x))), keep)
        return added(x, branch if gate is None else branch * gate)


class ParallelBranch(nn.Module):
    """One of several branches that stand side by side. Names follow timm's parallel block."""

    def __init__(self, config: TrunkConfig, operation: nn.Module, name: str, drop_path: float) -> None:
        super().__init__()
        self.norm = make_norm(config.norm, config.width, config.norm_eps)
        self.name = name
        self.add_module(name, operation)
        self.ls = branch_gain(config)
        self.drop_path = DropPath(drop_path)

    @property
    def operation(self) -> nn.Module:
        return self.get_submodule(self.name)

    def forward(self, x: Tensor, *context: Any) -> Tensor:
        return self.drop_path(self.ls(self.operation(self.norm(x), *context)))


class ParallelBlock(CheckpointedBlock):
    """Parallel mixing branches, then parallel channel branches (Touvron et al. 2022, arXiv 2203.09795).

    Captured and replaced intermediates are those of the first mixing branch.
    """

    def __init__(self, config: TrunkConfig, grid: tuple[int, int], layer: int, drop_path: float) -> None:
        super().__init__()
        if not config.mlp_ratio:
            raise ValueError("parallel blocks have channel branches: mlp_ratio must not be 0")
        if config.local:
            raise ValueError("local patch interaction stands between two branches: parallel must be 1")
        self.layer = layer
        mixers = (build_mixer(config.mixer, config.width, config.heads, grid) for _ in range(config.parallel))
        self.attns = nn.ModuleList(ParallelBranch(config, mixer, "attn", drop_path) for mixer in mixers)
        hidden = int(config.width * config.mlp_ratio)
        mlps = (Mlp(config.width, hidden, config.activation) for _ in range(config.parallel))
        self.ffns = nn.ModuleList(ParallelBranch(config, mlp, "mlp", drop_path) for mlp in mlps)

    @property
    def mixers(self) -> list[Mixer]:
        return [cast("Mixer", cast("ParallelBranch", branch).operation) for branch in self.attns]

    def compute(self, tokens: Tokens, probe: Probe | None = None) -> Tokens:
        x = tokens.sequence
        mixed = [branch(x, tokens, self.layer, None if i else probe) for i, branch in enumerate(self.attns)]
        x = added(x, torch.stack(mixed).sum(0))
        x = added(x, torch.stack([branch(x) for branch in self.ffns]).sum(0))
        return tokens.but(x if probe is None else probe(f"tokens.{self.layer}", x))


def _linear_layers(module: nn.Module) -> Iterator[tuple[nn.Linear, nn.Linear, bool]]:
    """First and last linear layer of every branch, and whether the first gives q, k and v."""
    for part in module.modules():
        if isinstance(part, QkvMixer):
            yield part.qkv, part.proj, True
        elif isinstance(part, Mlp):
            yield part.fc1, part.fc2, False


def xavier(module: nn.Module, depth: int) -> None:
    """Xavier weights in every linear layer. A deviation of 0.02 suits widths of several hundred; in a narrow model each
    layer would shrink its input several times, and learning starts slowly."""
    for first, last, fused in _linear_layers(module):
        for rows in first.weight.chunk(3 if fused else 1):
            nn.init.xavier_uniform_(rows)
        nn.init.xavier_uniform_(last.weight)


@torch.no_grad()
def fixup(module: nn.Module, depth: int) -> None:
    """Fixup: the last layer of every branch starts at 0, the others are scaled by depth^(-1/2).

    The exponent is -1/(2m - 2) for m = 2 layers per branch. Scalar gains of 1 and shifts stand in the block.
    """
    for first, last, _ in _linear_layers(module):
        first.weight.mul_(depth**-0.5)
        nn.init.zeros_(last.weight)


@torch.no_grad()
def t_fixup(module: nn.Module, depth: int) -> None:
    """T-Fixup: Xavier weights; values, projections and the channel branch scaled by 0.67 depth^(-1/4)."""
    xavier(module, depth)
    for first, last, fused in _linear_layers(module):
        for weight in (first.weight.chunk(3)[2] if fused else first.weight, last.weight):
            weight.mul_(0.67 * depth**-0.25)


STARTS: dict[str, Callable[[nn.Module, int], None]] = {"xavier": xavier, "fixup": fixup, "t_fixup": t_fixup}
"""By name of `TrunkConfig.start`; the default is what every module draws itself."""
