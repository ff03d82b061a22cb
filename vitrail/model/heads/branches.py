"""Branches of the last layers and a gate that weighs them: the multi-branch network of ONE."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.model.config import TrunkConfig
from vitrail.model.heads.config import Branches
from vitrail.model.heads.head import Head
from vitrail.model.parts.block import STARTS, Block, ParallelBlock, drop_path_rates, make_norm
from vitrail.model.parts.modules import small_normal
from vitrail.model.parts.tokens import Tokens
from vitrail.model.trunks.cifar_resnet import STAGE_WIDTHS, CifarResNetTrunk
from vitrail.model.trunks.vit import Trunk


class Branch(nn.Module):
    """Last layers of a network: tokens [batch, patches, width] to one vector per image, [batch, features]."""

    features: int

    def forward(self, tokens: Tokens) -> Tensor:
        raise NotImplementedError


class BlockBranch(Branch):
    """The last `count` blocks of a trunk, its final norm, and the mean of the patches."""

    def __init__(self, config: TrunkConfig, grid: tuple[int, int], count: int) -> None:
        super().__init__()
        self.config, self.features = config, config.width
        kind = Block if config.parallel == 1 else ParallelBlock
        rates = list(enumerate(drop_path_rates(config.drop_path, config.depth, config.drop_path_rule)))
        self.blocks = nn.ModuleList(kind(config, grid, i, rate) for i, rate in rates[-count:])
        self.norm = make_norm(config.norm, config.width, config.norm_eps)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.config.start != "default" and not next(self.parameters()).is_meta:
            STARTS[self.config.start](self.blocks, self.config.depth)

    def forward(self, tokens: Tokens) -> Tensor:
        for block in self.blocks:
            tokens = block(tokens)
        return self.norm(tokens.sequence).mean(1)


class StageBranch(Branch):
    """The last stage of a CIFAR ResNet and the mean of its map."""

    def __init__(self, network: CifarResNetTrunk) -> None:
        super().__init__()
        self.stage, self.features = network.layer3, network.width
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, tokens: Tokens) -> Tensor:
        rows, columns = tokens.grid
        return self.stage(tokens.patches.transpose(1, 2).unflatten(2, (rows, columns))).mean((2, 3))


class BranchesHead(Head):
    """Several copies of a network's last layers, each with a classifier, and their gated ensemble (ONE).

    The stack holds the branches' logits and, last, those of the ensemble, sum_k gate_k z_k, which is the prediction.
    The gate reads the mean of the shared features: a linear layer, BatchNorm, ReLU and softmax, as ONE has it (Lan, Zhu
    and Gong 2018, arXiv 1806.04606, section 3.2). The embedding is the concatenation of the branches' vectors.
    """

    own_norm = True
    edge_layers = ("fc", "gate")

    @classmethod
    def build(
        cls, config: Any, width: int, classes: int, trunk: TrunkConfig | None = None
    ) -> Head:  # takes layers from its trunk, so `vitrail.model.build` makes both at once
        raise ValueError("a timm model cannot be cut into branches; the head branches works with models of the zoo")

    def __init__(self, branches: list[Branch], width: int, classes: int) -> None:
        super().__init__()
        count, features = len(branches), branches[0].features
        self.classifiers = count + 1
        self.features = count * features
        self.branches = nn.ModuleList(branches)
        self.fc = nn.ModuleList(nn.Linear(features, classes) for _ in branches)
        self.gate = nn.Linear(width, count)
        self.gate_norm = nn.BatchNorm1d(count)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        small_normal(*self.fc)

    def weights(self, tokens: Tokens) -> Tensor:
        """How much each branch counts, [batch, branches]; rows sum to 1."""
        return F.relu(self.gate_norm(self.gate(tokens.patches.mean(1)))).softmax(-1)

    def embed(self, tokens: Tokens) -> Tensor:
        return torch.cat([branch(tokens) for branch in self.branches], -1)

    def forward(self, tokens: Tokens) -> Tensor:
        each = torch.stack([fc(branch(tokens)) for fc, branch in zip(self.fc, self.branches, strict=True)], 1)
        together = (self.weights(tokens)[:, :, None] * each).sum(1, keepdim=True)
        return torch.cat([each, together], 1)

    def biases(self) -> list[list[Tensor]]:
        """The ensemble has none: where all branches agree, their weighted mean equals each of them."""
        branches: list[list[Tensor]] = [[layer.bias] for layer in self.fc if isinstance(layer, nn.Linear)]
        return [*branches, []]

    def fuse(self, stack: Tensor) -> Tensor:
        return stack[:, -1]


def branch_blocks(config: TrunkConfig, head: Branches, classes: int) -> tuple[Trunk, BranchesHead]:
    """A trunk that ends where branches begin, and those. The trunk keeps the depths that its blocks had."""
    count = head.blocks or max(1, config.depth // 3)
    if count >= config.depth:
        raise ValueError(
            f"branches of {count} blocks leave nothing to share of a trunk of {config.depth}; "
            "use fewer (--model.head.blocks) or a deeper trunk"
        )
    trunk = Trunk(config, prefix=0, final_norm=False)
    trunk.blocks = trunk.blocks[: config.depth - count]
    if trunk.prompts is not None:  # branches have none
        trunk.prompts.values = nn.Parameter(trunk.prompts.values.detach()[: len(trunk.blocks)].clone())
    branches: list[Branch] = [BlockBranch(config, trunk.grid, count) for _ in range(head.branches)]
    return trunk, BranchesHead(branches, config.width, classes)


def branch_stages(
    make: Callable[[], CifarResNetTrunk], head: Branches, classes: int
) -> tuple[CifarResNetTrunk, BranchesHead]:
    """The first two stages of a CIFAR ResNet, and branches of the third: the split that gives the printed counts.

    As in Table D of Ryu et al. 2023 (arXiv 2310.16483): with 100 classes and three branches depth 32 has 1.186 M
    parameters (1.19 stated). Depth 110 with bottlenecks has 2.962 M (2.96 stated; with plain blocks it would be 4.37 M,
    so the R110 of that table has bottlenecks).
    """
    if head.blocks is not None:
        raise ValueError("a CIFAR ResNet branches at its last stage; leave --model.head.blocks out")
    trunk = make()
    branches: list[Branch] = [StageBranch(make()) for _ in range(head.branches)]
    trunk.layer3 = nn.Sequential()
    trunk.width = trunk.width // STAGE_WIDTHS[2] * STAGE_WIDTHS[1]
    return trunk, BranchesHead(branches, trunk.width, classes)
