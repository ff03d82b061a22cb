"""Gramian heads: all at once, in a loop, and what their arithmetic would cost at the rate of a trunk.

    python benchmarks/gramian.py [--device cuda --batch 128 --autocast]

Forward and backward on random features; medians of interleaved rounds. MACs are of the forward pass of one image. The
last column is the time that the row's MACs would take at the rate (MACs a second, forward and backward) that plain ViT
blocks of the same width and tokens reach in the same rounds: what is above it is overhead, not arithmetic.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from vitrail.kernels.second_order import gram_vector
from vitrail.model.heads.config import Gramian
from vitrail.model.heads.gramian import GramianHead
from vitrail.model.tokens import Tokens


class HeadWrittenOut(nn.Module):
    """One head in the order of the released code: keys and values of every token are formed, then attention."""

    def __init__(self, config: Gramian, width: int, classes: int) -> None:
        super().__init__()
        gram, self.many = config.gram_width, config.attention_heads
        inner = config.attention_width or max(self.many, width // 4 // self.many * self.many)
        self.groups = config.mlp_groups
        self.contract = nn.Sequential(nn.Conv1d(width, gram, 1), nn.BatchNorm1d(gram))
        vector = gram * (gram + 1) // 2
        self.token = nn.Sequential(
            nn.Conv1d(vector, width, 1, groups=config.embed_groups), nn.BatchNorm1d(width, eps=1e-5 / vector)
        )
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.keys = nn.Linear(width, inner, bias=False), nn.Linear(width, 2 * inner, bias=False)
        self.proj = nn.Linear(inner, width)
        self.fc1 = nn.Conv1d(width, 4 * width, 1, groups=self.groups)
        self.fc2 = nn.Conv1d(4 * width, width, 1, groups=self.groups)
        self.ls1, self.ls2 = (nn.Parameter(torch.full((width,), config.layerscale)) for _ in range(2))
        self.fc = nn.Linear(width, classes)

    def forward(self, tokens: Tokens) -> Tensor:
        x = tokens.patches
        t = self.token(gram_vector(self.contract(x.mT))[..., None]).squeeze(-1)
        u = self.norm1(torch.cat([t[:, None], x], dim=1))
        q = self.query(u[:, :1]).unflatten(-1, (self.many, -1)).transpose(1, 2)
        k, v = self.keys(u).unflatten(-1, (2, self.many, -1)).permute(2, 0, 3, 1, 4)
        t = t + self.ls1 * self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(1))
        h = F.gelu(self.fc1(self.norm2(t)[..., None]))
        h = h.unflatten(1, (self.groups, -1)).transpose(1, 2).flatten(1, 2)
        return self.fc(t + self.ls2 * self.fc2(h).squeeze(-1))[:, None]


class Loop(nn.Module):
    """Heads one after the other."""

    def __init__(self, heads: list[nn.Module]) -> None:
        super().__init__()
        self.each = nn.ModuleList(heads)

    def forward(self, tokens: Tokens) -> Tensor:
        return torch.cat([head(tokens) for head in self.each], dim=1)


class Blocks(nn.Module):
    """Two blocks of a plain ViT."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            *(timm.models.vision_transformer.Block(width, max(1, width // 64), qkv_bias=True) for _ in range(2))
        )

    def forward(self, tokens: Tokens) -> Tensor:
        return self.blocks(tokens.sequence)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--grid", type=int, default=14)
    parser.add_argument("--heads", type=int, default=5)
    parser.add_argument("--gram-width", type=int, default=192)
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--autocast", action="store_true", help="bfloat16")
    a = parser.parse_args()
    torch.manual_seed(0)
    config, one = (Gramian(heads=n, gram_width=a.gram_width) for n in (a.heads, 1))
    rows: dict[str, nn.Module] = {
        f"{a.heads} heads at once": GramianHead(config, a.width, a.classes),
        "loop over single heads": Loop([GramianHead(one, a.width, a.classes) for _ in range(a.heads)]),
        "loop, keys and values formed": Loop([HeadWrittenOut(one, a.width, a.classes) for _ in range(a.heads)]),
        "2 plain ViT blocks": Blocks(a.width),
    }
    macs = {name: count_macs(model, a.width, a.grid) for name, model in rows.items()}
    steps = {name: stepper(model.to(a.device).train(), a) for name, model in rows.items()}
    times: dict[str, list[float]] = {name: [] for name in rows}
    for i in range(a.rounds + 2):
        for name, step in steps.items():
            seconds = timed(step, a.device)
            if i >= 2:  # the first rounds choose kernels and fill memory pools
                times[name].append(seconds)
    median = {name: statistics.median(values) for name, values in times.items()}
    trunk = "2 plain ViT blocks"
    rate = macs[trunk] * a.batch / median[trunk]
    first = next(iter(rows))
    place = torch.cuda.get_device_name() if a.device == "cuda" else f"cpu, {torch.get_num_threads()} threads"
    kind = "bfloat16 autocast" if a.autocast else "float32"
    print(f"{place}, {kind}, torch {torch.__version__}; batch {a.batch}, {a.grid}x{a.grid} tokens of {a.width}")
    print(f"{'':30s} {'M MACs':>8s} {'ms':>9s} {'spread':>7s} {'ratio':>6s} {'ms at trunk rate':>17s}")
    for name in rows:
        spread = (max(times[name]) - min(times[name])) / median[name]
        print(
            f"{name:30s} {macs[name] / 1e6:8.1f} {1e3 * median[name]:9.2f} {spread:7.0%} "
            f"{median[name] / median[first]:6.2f} {1e3 * macs[name] * a.batch / rate:17.2f}"
        )


def count_macs(model: nn.Module, width: int, grid: int) -> int:
    """Multiply-accumulates of one image, forward."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model.eval()(Tokens(torch.zeros(1, grid * grid, width), 0, (grid, grid)))
    return int(counter.get_total_flops()) // 2


def stepper(model: nn.Module, a: argparse.Namespace) -> Callable[[], None]:
    """One forward and backward pass; the trunk's gradient is wanted too."""
    x = torch.randn(a.batch, a.grid * a.grid, a.width, device=a.device, requires_grad=True)

    def step() -> None:
        for parameter in model.parameters():
            parameter.grad = None
        with torch.autocast(a.device, torch.bfloat16, enabled=a.autocast):
            out = model(Tokens(x, 0, (a.grid, a.grid)))
        out.float().square().mean().backward()

    return step


def timed(step: Callable[[], None], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
