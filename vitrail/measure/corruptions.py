"""Image corruptions of ten kinds and five severities, and a model's accuracy on them.

A small set after ImageNet-C (Hendrycks and Dietterich, 2019): the same families, but metrics are comparable with each
other only. Images are [batch, 3, height, width] with values 0 to 255, on any device; what is random is a
function of (seed, image index, kind), not of severity, batch or device. Extents (of blur, blocks) follow the image's
side, so that a severity means the same at 32 and 224 pixels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Unpack

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from vitrail.data.augment.pixel_ops import luminance, normal_noise
from vitrail.data.counter import seed_of
from vitrail.measure.evaluator import NOTHING, Findings, Loaders, Model, ResultTable, Where, batches, evaluator
from vitrail.model.classifier import Classifier
from vitrail.quantities import percent

SEVERITIES = (1, 2, 3, 4, 5)
# Annex K of the JPEG standard, for brightness and for colour.
_LUMA = (
    (16, 11, 10, 16, 24, 40, 51, 61),
    (12, 12, 14, 19, 26, 58, 60, 55),
    (14, 13, 16, 24, 40, 57, 69, 56),
    (14, 17, 22, 29, 51, 87, 80, 62),
    (18, 22, 37, 56, 68, 109, 103, 77),
    (24, 35, 55, 64, 81, 104, 113, 92),
    (49, 64, 78, 87, 103, 121, 120, 101),
    (72, 92, 95, 98, 112, 100, 103, 99),
)
_CHROMA = (
    (17, 18, 24, 47, 99, 99, 99, 99),
    (18, 21, 26, 66, 99, 99, 99, 99),
    (24, 26, 56, 99, 99, 99, 99, 99),
    (47, 66, 99, 99, 99, 99, 99, 99),
    *(((99,) * 8,) * 4),
)
_TO_YCBCR = ((0.299, 0.587, 0.114), (-0.168736, -0.331264, 0.5), (0.5, -0.418688, -0.081312))


def gaussian_noise(images: Tensor, seeds: Tensor, deviation: float) -> Tensor:
    """Normal noise on every value; `deviation` as a share of the range."""
    return images + normal_noise(seeds, *images.shape[1:]) * (255 * deviation)


def shot_noise(images: Tensor, seeds: Tensor, photons: float) -> Tensor:
    """Counts of light: white gives `photons` on average, with as much variance.

    Poisson numbers by their square root, which is normal with deviation 1/2 (Anscombe, 1948); the mean is kept.
    """
    expected = images * (photons / 255)
    root = (expected + 0.375).sqrt() + normal_noise(seeds, *images.shape[1:]) / 2
    return (root.clamp(min=0).square() - 0.625).clamp(min=0) * (255 / photons)


def impulse_noise(images: Tensor, seeds: Tensor, share: float) -> Tensor:
    """A share of all values becomes black or white, one as often as the other."""
    noise = normal_noise(seeds, *images.shape[1:])
    beyond = math.sqrt(2) * float(torch.erfinv(torch.tensor(1 - share, dtype=torch.float64)))
    return torch.where(noise.abs() > beyond, torch.where(noise > 0, 255.0, 0.0), images)


def gaussian_blur(images: Tensor, seeds: Tensor, sigma: float) -> Tensor:
    """A Gaussian of `sigma` times the shorter side, cut at four of them; borders are repeated."""
    width = sigma * min(images.shape[-2:])
    reach = math.ceil(4 * width)
    weights = torch.arange(-reach, reach + 1, device=images.device).div(width).square().mul(-0.5).exp()
    weights = weights / weights.sum()
    padded = F.pad(images, (reach, reach, reach, reach), mode="replicate").flatten(0, 1)[:, None]
    across = F.conv2d(padded, weights.view(1, 1, 1, -1))
    return F.conv2d(across, weights.view(1, 1, -1, 1)).view_as(images)


def motion_blur(images: Tensor, seeds: Tensor, length: float) -> Tensor:
    """The mean along a line of `length` times the shorter side, in another direction for each image."""
    angle = torch.special.ndtr(normal_noise(seeds, 1, 1, 1).flatten()) * math.pi
    return mean_along(images, angle, length * min(images.shape[-2:]))


def mean_along(images: Tensor, angle: Tensor, length: float) -> Tensor:
    """Each image's mean along a centred line of `length` pixels at its `angle` [batch]; borders are repeated.

    Interpolated between pixels, at points no farther apart than one.
    """
    height, width = images.shape[-2:]
    taps = 2 * math.ceil(length / 2) + 1
    dx, dy = angle.cos() * (2 / width), angle.sin() * (2 / height)  # one pixel, where the image is 2 wide and high
    one, zero = torch.ones_like(dx), torch.zeros_like(dx)
    total = torch.zeros_like(images)
    for offset in torch.linspace(-length / 2, length / 2, taps).tolist():
        moved = torch.stack([one, zero, offset * dx, zero, one, offset * dy], 1).view(-1, 2, 3)
        grid = F.affine_grid(moved, list(images.shape), align_corners=False)
        total += F.grid_sample(images, grid, mode="bilinear", padding_mode="border", align_corners=False)
    return total / taps


def contrast(images: Tensor, seeds: Tensor, kept: float) -> Tensor:
    """Every value drawn to the image's mean grey; `kept` of its distance stays."""
    mean = luminance(images).mean((1, 2, 3), keepdim=True)
    return mean + kept * (images - mean)


def brightness(images: Tensor, seeds: Tensor, more: float) -> Tensor:
    """Everything lighter by a share of the range."""
    return images + 255 * more


def fog(images: Tensor, seeds: Tensor, share: float) -> Tensor:
    """Clouds of white: on average `share` of every image is replaced by them, more in some places than in others."""
    size = images.shape[-2:]
    cloud = torch.zeros(len(images), 1, *size, device=images.device)
    for octave in range(4):  # each twice as fine and half as strong
        coarse = normal_noise(seeds + octave, 1, 2 << octave, 2 << octave)
        cloud += F.interpolate(coarse, size=size, mode="bilinear", align_corners=True) / 2**octave
    density = share * 2 * cloud.sigmoid()
    return images + density.clamp(max=1) * (255 - images)


def pixelate(images: Tensor, seeds: Tensor, kept: float) -> Tensor:
    """Means of blocks: as an image with `kept` of the rows and columns, shown at its old size."""

    def means(side: int) -> Tensor:  # [side, side]: what a pixel takes from each of its line
        # Blocks do not overlap, as those of "area" interpolation do, which would blur and shift what is shown.
        block = torch.arange(side, device=images.device) * max(1, round(kept * side)) // side
        same = (block[:, None] == block).to(images.dtype)
        return same / same.sum(1, keepdim=True)

    return means(images.shape[-2]) @ images @ means(images.shape[-1])


def jpeg(images: Tensor, seeds: Tensor, quality: float) -> Tensor:
    """JPEG compression: frequencies of 8 x 8 blocks, rounded; colour at full resolution."""
    height, width = images.shape[-2:]
    matrix = torch.tensor(_TO_YCBCR, dtype=torch.float64)
    to, back = (m.to(images.device, torch.float32) for m in (matrix, matrix.inverse()))
    padded = F.pad(images, (0, -width % 8, 0, -height % 8), mode="replicate")
    coded = torch.einsum("ij,bjhw->bihw", to, padded)
    coded[:, 0] -= 128
    blocks = coded.round().unflatten(3, (-1, 8)).unflatten(2, (-1, 8)).transpose(3, 4)  # [batch, 3, down, across, 8, 8]
    scale = 5000 / quality if quality < 50 else 200 - 2 * quality
    tables = torch.tensor([_LUMA, _CHROMA, _CHROMA], device=images.device, dtype=torch.float32)
    steps = ((tables * scale + 50) / 100).floor().clamp(1, 255)[:, None, None]
    pixel = torch.arange(8, device=images.device, dtype=torch.float32)
    waves = torch.cos((2 * pixel + 1) * pixel[:, None] * (math.pi / 16)) / 2  # [frequency, pixel]
    waves[0] /= math.sqrt(2)
    rounded = (waves @ blocks @ waves.T / steps).round() * steps
    coded = (waves.T @ rounded @ waves).transpose(3, 4).flatten(4, 5).flatten(2, 3)
    coded[:, 0] += 128
    return torch.einsum("ij,bjhw->bihw", back, coded)[..., :height, :width]


class Corruption(NamedTuple):
    """A kind of corruption, and its strength at each severity."""

    apply: Callable[[Tensor, Tensor, float], Tensor]
    strengths: tuple[float, float, float, float, float]


CORRUPTIONS: dict[str, Corruption] = {
    "gaussian_noise": Corruption(gaussian_noise, (0.04, 0.08, 0.12, 0.18, 0.26)),
    "shot_noise": Corruption(shot_noise, (100, 50, 25, 12, 6)),
    "impulse_noise": Corruption(impulse_noise, (0.01, 0.03, 0.06, 0.10, 0.17)),
    "gaussian_blur": Corruption(gaussian_blur, (0.014, 0.018, 0.022, 0.027, 0.033)),
    "motion_blur": Corruption(motion_blur, (0.05, 0.08, 0.12, 0.16, 0.22)),
    "contrast": Corruption(contrast, (0.6, 0.45, 0.3, 0.2, 0.1)),
    "brightness": Corruption(brightness, (0.1, 0.2, 0.3, 0.4, 0.5)),
    "fog": Corruption(fog, (0.25, 0.35, 0.45, 0.55, 0.65)),
    "pixelate": Corruption(pixelate, (0.75, 0.6, 0.5, 0.4, 0.3)),
    "jpeg": Corruption(jpeg, (50, 30, 20, 12, 7)),
}


def corrupt(images: Tensor, index: Tensor, kind: str, severity: int, seed: int = 0) -> Tensor:
    """The images with one corruption, as whole grey levels in float32; bytes or floats of 0 to 255 are taken.

    `index` [batch] is each image's stable index: with the seed it decides what is random.
    """
    if kind not in CORRUPTIONS:
        raise ValueError(f"no corruption {kind!r}; there are {', '.join(CORRUPTIONS)}")
    if severity not in SEVERITIES:
        raise ValueError(f"severity {severity} does not exist; use 1 (least) to 5")
    chosen = CORRUPTIONS[kind]
    key = seed_of("corrupt", seed, list(CORRUPTIONS).index(kind)) >> 1  # 63 bits: tensors have no larger numbers
    seeds = index.to(images.device, torch.int64) * 16 + key % (1 << 62)  # 16: a few streams for each image
    return chosen.apply(images.float(), seeds, chosen.strengths[severity - 1]).round_().clamp_(0, 255)


def corruption_accuracy(
    model: Classifier,
    data: Loaders,
    *,
    kinds: Sequence[str] = tuple(CORRUPTIONS),
    severities: Sequence[int] = SEVERITIES,
    seed: int = 0,
    **where: Unpack[Where],
) -> tuple[float, dict[str, list[float]]]:
    """Top-1 on the clean images, and for each kind at every severity; every image is read once only.

    Results stay on the device until the end; in a process group all ranks get the metrics of all. Raises `ValueError`
    where there is nothing to evaluate, or images have several labels.
    """
    if model.multilabel:
        raise ValueError("corruptions: accuracy is of models that name one class per image")
    variants = [None, *((kind, severity) for kind in kinds for severity in severities)]
    preprocess = model.preprocess
    right, count = None, 0
    for batch, images in batches(model, data.loaders[data.split], **where):
        if right is None:
            moments = [torch.tensor(v, device=images.device).view(3, 1, 1) for v in (preprocess.mean, preprocess.std)]
            right = torch.zeros(len(variants), dtype=torch.int64, device=images.device)
        label, hits = batch.label.to(images.device), []
        with torch.autocast(images.device.type, enabled=False):
            pixels = as_pixels(images, *moments)
        for variant in variants:
            changed = images
            if variant is not None:
                with torch.autocast(images.device.type, enabled=False):
                    changed = as_input(corrupt(pixels, batch.index, *variant, seed), *moments)
            hits.append((model(changed).argmax(1) == label).sum())
        right += torch.stack(hits)
        count += len(batch)
    if right is None:  # a rank may have no images where others have some
        right = torch.zeros(len(variants), dtype=torch.int64, device=where.get("device"))
    totals = torch.cat([right, right.new_tensor([count])])
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(totals)
    if not int(totals[-1]):
        raise ValueError(NOTHING)
    clean, *rest = (totals[:-1].double() / totals[-1]).tolist()
    size = len(severities)
    return clean, {kind: rest[i * size : (i + 1) * size] for i, kind in enumerate(kinds)}


def as_pixels(images: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """A model's input as grey levels 0 to 255; bytes pass, and `as_input` of what comes out is the input again."""
    if images.dtype == torch.uint8:
        return images
    return images.float().mul(std).add_(mean).mul_(255).round_().clamp_(0, 255)


def as_input(pixels: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Grey levels 0 to 255 as a model wants them."""
    return pixels.div(255).sub_(mean).div_(std)


def corruption_table(kinds: Mapping[str, Any]) -> ResultTable:
    """Top-1 of every corruption, by severity."""
    rows = [
        (kind, *map(percent, row["severities"]), percent(row["mean"]), percent(row["relative"]))
        for kind, row in kinds.items()
    ]
    return ResultTable("top-1 by severity", ("corruption", "1", "2", "3", "4", "5", "mean", "of clean"), rows)


@evaluator(table=corruption_table)
def evaluate_corruptions(model: Model, data: Loaders, **where: Unpack[Where]) -> Findings:
    """Mean top-1 over all kinds and severities, and its ratio to that on clean images."""
    if not isinstance(model, Classifier):
        raise ValueError(f"corruptions need a classifier of ours, not {type(model).__name__}")
    clean, accuracies = corruption_accuracy(model, data, **where)
    by_kind = {kind: sum(values) / len(values) for kind, values in accuracies.items()}
    mean = sum(by_kind.values()) / len(by_kind)
    numbers = {"clean_top1": clean, "corrupted_top1": mean}
    if clean > 0:
        numbers["corrupted_relative"] = mean / clean
    table: dict[str, Any] = {
        kind: {"mean": by_kind[kind], "relative": by_kind[kind] / clean if clean > 0 else None, "severities": values}
        for kind, values in accuracies.items()
    }
    return {"numbers": numbers, "tables": {"corruptions": table}, "pictures": {}}
