"""Feature maps of several stages as one."""

from __future__ import annotations

import pytest
import timm
import torch
import torch.nn.functional as F
from torchvision.ops import SqueezeExcitation

from vitrail.model.heads.config import Gramian
from vitrail.model.heads.gramian import GramianHead
from vitrail.model.parts.modules import reset
from vitrail.model.trunks.timm_trunk import StageAggregation, stage_taps, to_grid

RELEASED = [  # stage widths, blocks of stage 3, taps, final width, parameters in millions, of the authors' code
    ((96, 192, 384), 9, 2, 688, 47.82),
    ((96, 192, 384), 9, 2, 768, 54.35),
    ((96, 192, 384), 27, 4, 688, 70.12),
    ((96, 192, 384), 27, 4, 768, 76.73),
    ((128, 256, 512), 27, 4, 976, 123.69),
    ((128, 256, 512), 27, 4, 1024, 128.84),
]


@pytest.mark.parametrize(("widths", "depth", "taps", "width", "millions"), RELEASED)
def test_released_networks_have_their_parameters(
    widths: tuple[int, int, int], depth: int, taps: int, width: int, millions: float
) -> None:
    with torch.device("meta"):
        backbone = timm.models.convnext.ConvNeXt(depths=(3, 3, depth, 3), dims=(*widths, width), num_classes=0)
        backbone.head = torch.nn.Identity()  # the last stage is tapped before the norm of timm's classifier
        maps = (*widths[:2], *[widths[2]] * (taps + 1), width)
        parts = [backbone, StageAggregation(maps, width), GramianHead(Gramian(heads=5, gram_layer=True), width, 1000)]
    assert round(sum(p.numel() for part in parts for p in part.parameters()) / 1e6, 2) == millions


def test_the_released_aggregation_counts_as_its_closed_form() -> None:
    with torch.device("meta"):
        counted = sum(p.numel() for p in StageAggregation((96, 192, 384, 384, 384, 688), 688).parameters())
    s, m, r, C = 2128, 172, 43, 688
    assert counted == s * m + 9 * m * m + m * C + s * C + 2 * m * r + r + m + 4 * m + 4 * C == 2_233_119


def test_taps_lie_every_so_many_blocks_before_the_output() -> None:
    assert stage_taps(9, 2) == [2, 5]
    assert stage_taps(27, 4) == [4, 9, 14, 19]
    assert stage_taps(3, 0) == []
    with pytest.raises(ValueError, match="at most 8 taps"):
        stage_taps(9, 9)


def test_maps_are_averaged_down_and_interpolated_up() -> None:
    fine, coarse = torch.randn(2, 3, 8, 12), torch.randn(2, 3, 2, 3)
    torch.testing.assert_close(to_grid(fine, (4, 6)), fine.unflatten(2, (4, 2)).unflatten(4, (6, 2)).mean((3, 5)))
    torch.testing.assert_close(to_grid(coarse, (4, 6)), F.interpolate(coarse, scale_factor=2, mode="bilinear"))
    assert to_grid(fine, (8, 12)) is fine
    constant = torch.full((1, 1, 8, 2), 3.0)
    torch.testing.assert_close(to_grid(constant, (4, 4)), torch.full((1, 1, 4, 4), 3.0))


def test_it_equals_a_bottleneck_of_library_parts() -> None:
    part = StageAggregation((4, 8), 16).eval()
    for name, tensor in part.state_dict().items():
        if tensor.is_floating_point():
            tensor.uniform_(0.5, 2) if name.endswith("running_var") else tensor.normal_(0, 0.5)
    maps = [torch.randn(2, 4, 8, 8), torch.randn(2, 8, 4, 4)]
    squeeze = SqueezeExcitation(4, 1)
    squeeze.fc1.weight.data, squeeze.fc1.bias.data = part.squeeze.weight[..., None, None], part.squeeze.bias
    squeeze.fc2.weight.data, squeeze.fc2.bias.data = part.excite.weight[..., None, None], part.excite.bias
    x = torch.cat([F.avg_pool2d(maps[0], 2), maps[1]], dim=1)
    relu = torch.nn.ReLU()
    branch = torch.nn.Sequential(
        part.conv1, part.bn1, relu, part.conv2, part.bn2, relu, squeeze, part.conv3, part.bn3
    ).eval()
    expected = relu(branch(x) + part.shortcut_bn(part.shortcut(x)))
    torch.testing.assert_close(part(maps, (4, 4)), expected)
    assert expected.shape == (2, 16, 4, 4)


def test_wrong_maps_and_empty_insides_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\(8, 4\) channels"):
        StageAggregation((4, 8), 16)([torch.randn(1, 8, 4, 4), torch.randn(1, 4, 4, 4)], (4, 4))
    with pytest.raises(ValueError, match="must be 1 or more"):
        StageAggregation((4, 8), 8)
    with pytest.raises(ValueError, match="0 maps"):
        StageAggregation((), 64)


def test_built_on_meta_and_reset_it_runs() -> None:
    with torch.device("meta"):
        part = StageAggregation((4, 8), 16)
    reset(part.to_empty(device="cpu"))
    out = part([torch.randn(2, 4, 8, 8), torch.randn(2, 8, 2, 2)], (4, 4))
    assert out.isfinite().all()
    compiled = torch.compile(part.eval(), fullgraph=True, backend="eager")
    maps = [torch.randn(2, 4, 8, 8), torch.randn(2, 8, 2, 2)]
    torch.testing.assert_close(compiled(maps, (4, 4)), part(maps, (4, 4)))
