"""Features of several stages of a network as one map (GA, Ryu et al. 2023, arXiv 2310.16483)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NARROWING = 4
"""Width of the map over that of the bottleneck: 4 gives the released 2.23 M parameters (tiny, 688 channels)."""


def stage_taps(depth: int, taps: int) -> list[int]:
    """Blocks (from 0) of a stage whose outputs are tapped: every floor(depth / (taps + 1)), its last not counted.

    >>> stage_taps(9, 2), stage_taps(27, 4)
    ([2, 5], [4, 9, 14, 19])
    """
    if taps < 0 or taps >= depth:
        raise ValueError(f"a stage of {depth} blocks has at most {depth - 1} taps before its output, not {taps}")
    step = depth // (taps + 1)
    return [step * (i + 1) - 1 for i in range(taps)]


class StageAggregation(nn.Module):
    """Feature maps `[batch, widths[i], rows_i, columns_i]` to one `[batch, width, *grid]`.

    Each map is brought to `grid` (averaged down, interpolated up), all are concatenated, and one residual bottleneck
    with squeeze-and-excitation (`squeeze`: its inner share) makes `width` channels of them. With s = sum(widths),
    m = width / 4 and r = m * squeeze there are

        s m + 9 m^2 + m width + s width   (convolutions)   + 2 m r + r + m   (squeeze)   + 4 m + 4 width   (norms)

    parameters: 2,233,119 for (96, 192, 3 x 384, 688) -> 688.
    """

    def __init__(self, widths: Sequence[int], width: int, squeeze: float = 0.25) -> None:
        super().__init__()
        inner = width // NARROWING
        squeezed = int(inner * squeeze)
        if not widths or squeezed < 1:
            raise ValueError(
                f"{len(widths)} maps cannot be aggregated to width {width} with squeeze {squeeze:g}: "
                f"at least one map is needed, and width / {NARROWING} * squeeze must be 1 or more"
            )
        self.widths, self.width = tuple(widths), width
        total = sum(widths)
        self.conv1 = nn.Conv2d(total, inner, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(inner)
        self.conv2 = nn.Conv2d(inner, inner, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(inner)
        self.squeeze = nn.Linear(inner, squeezed)
        self.excite = nn.Linear(squeezed, inner)
        self.conv3 = nn.Conv2d(inner, width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(width)
        self.shortcut = nn.Conv2d(total, width, 1, bias=False)
        self.shortcut_bn = nn.BatchNorm2d(width)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for conv in (self.conv1, self.conv2, self.conv3, self.shortcut):
            nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, maps: Sequence[Tensor], grid: tuple[int, int]) -> Tensor:
        found = tuple(int(m.shape[1]) for m in maps)
        if found != self.widths:
            raise ValueError(f"the maps have {found} channels, the aggregation was built for {self.widths}")
        x = torch.cat([to_grid(m, grid) for m in maps], dim=1)
        inner = F.relu(self.bn1(self.conv1(x)))
        inner = F.relu(self.bn2(self.conv2(inner)))
        gain = self.excite(F.relu(self.squeeze(inner.mean((2, 3))))).sigmoid()
        out = self.bn3(self.conv3(inner * gain[..., None, None]))
        return F.relu(out + self.shortcut_bn(self.shortcut(x)))


def to_grid(features: Tensor, grid: tuple[int, int]) -> Tensor:
    """A map `[batch, channels, rows, columns]` at another grid: averaged where finer, interpolated where coarser."""
    rows, columns = features.shape[-2:]
    if (rows, columns) == tuple(grid):
        return features
    features = F.adaptive_avg_pool2d(features, (min(rows, grid[0]), min(columns, grid[1])))
    if features.shape[-2:] == tuple(grid):
        return features
    return F.interpolate(features, grid, mode="bilinear", align_corners=False)
