"""Make the files of CIFAR-10-C from any images of 32 x 32 pixels (Hendrycks and Dietterich, 2019, arXiv 1903.12261).

    python studies/make_cifar_c.py cifar10.npz OUT [--images 1000]
    vitrail evaluate RUN --data OUT --protocol cifar_c

The formulas and parameters are those of the published generator (github.com/hendrycks/robustness), with the operations
of OpenCV, scikit-image and ImageMagick that it calls rewritten. Frost is left out: it needs photographs that cannot be
distributed. Draws come in the generator's order from numpy's legacy stream, which no version of numpy changes, seeded
by (seed, kind, severity, image index).

Images are [32, 32, channels] with values 0 to 1; `c` are the parameters of a severity.
"""

from __future__ import annotations

import argparse
import io
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.random import RandomState
from numpy.typing import NDArray
from PIL import Image

from vitrail.data.counter import seed_of
from vitrail.data.open import open_data

SIDE, SEVERITIES = 32, (1, 2, 3, 4, 5)
Pixels = NDArray[Any]


def _filtered(image: Pixels, kernel: Pixels, mode: Any = "reflect") -> Pixels:
    """Correlation with an odd square kernel; `mode` of the border as in `numpy.pad`."""
    reach = len(kernel) // 2
    planes = torch.from_numpy(np.pad(image, ((reach, reach), (reach, reach), (0, 0)), mode)).movedim(2, 0)[:, None]
    return np.asarray(F.conv2d(planes, torch.from_numpy(kernel)[None, None])[:, 0].movedim(0, 2))


def _gaussian(image: Pixels, sigma: float, mode: str = "edge", truncate: float = 4) -> Pixels:
    reach = int(truncate * sigma + 0.5)
    weights = np.exp(-0.5 * (np.arange(-reach, reach + 1) / max(sigma, 1e-9)) ** 2)
    return _filtered(image, np.outer(weights, weights) / weights.sum() ** 2, mode)


def _sampled(image: Pixels, place: Pixels, centres: bool = True) -> Pixels:
    """Bilinear values at (column, row), mirrored at the centres of the outermost pixels, or else at their borders."""
    grid = torch.from_numpy(2 * place / (SIDE - 1) - 1 if centres else (2 * place + 1) / SIDE - 1)[None]
    planes = torch.from_numpy(image).movedim(2, 0)[None]
    return np.asarray(F.grid_sample(planes, grid, "bilinear", "reflection", centres)[0].movedim(0, 2))


def _zoomed(image: Pixels, factor: float) -> Pixels:
    kept = math.ceil(SIDE / factor)
    size = round(kept * factor)
    line = (SIDE - kept) // 2 + np.linspace(0, kept - 1, size)[(size - SIDE) // 2 :][:SIDE]
    return _sampled(image, np.stack(np.meshgrid(line, line), 2))


def _moved(image: Pixels, radius: int, sigma: float, degrees: float) -> Pixels:
    """ImageMagick's motion blur of grey levels: half a Gaussian along a line of whole pixels."""
    step, kernel = np.arange(2 * radius + 1), np.zeros((4 * radius + 1, 4 * radius + 1))
    line = tuple(np.ceil(step * f(np.deg2rad(degrees)) - 0.5).astype(int) + 2 * radius for f in (np.sin, np.cos))
    np.add.at(kernel, line, np.exp(-0.5 * (step / sigma) ** 2))
    return np.rint(_filtered(image, kernel / kernel.sum(), "edge"))


def _plasma(draw: RandomState, decay: float) -> Pixels:
    """Clouds of 0 to 1 [32, 32, 1] by the diamond-square algorithm on a torus."""
    grid, step, wobble = np.zeros((SIDE, SIDE)), SIDE, 100.0
    while step > 1:
        odd, even = slice(step // 2, None, step), slice(0, None, step)
        corner, middle = grid[even, even], grid[odd, odd]
        noise = wobble * draw.uniform(-wobble, wobble, (3, *corner.shape))
        below = corner + np.roll(corner, -1, 0)
        middle[:] = (below + np.roll(below, -1, 1)) / 4 + noise[0]
        grid[even, odd] = (middle + np.roll(middle, 1, 0) + corner + np.roll(corner, -1, 1)) / 4 + noise[1]
        grid[odd, even] = (middle + np.roll(middle, 1, 1) + corner + np.roll(corner, -1, 0)) / 4 + noise[2]
        step, wobble = step // 2, wobble / decay
    return ((grid - grid.min()) / np.ptp(grid))[..., None]


def _recoloured(x: Pixels, gain: float, saturation: float, value: float = 0) -> Pixels:
    """HSV saturation times `gain` plus `saturation`, and value plus `value`; grey has the hue of red."""
    most, spread = x.max(2, keepdims=True), np.ptp(x, 2, keepdims=True)
    share = np.where(spread > 0, (most - x) / np.where(spread > 0, spread, 1), (0, 1, 1))
    saturated = np.clip(spread / np.maximum(most, 1e-9) * gain + saturation, 0, 1)
    return np.clip(most + value, 0, 1) * (1 - saturated * share)


def _glass(x: Pixels, draw: RandomState, c: Any) -> Pixels:
    x, place = np.floor(_gaussian(x, c[0]) * 255), np.arange(2, SIDE)
    for _ in range(c[1]):  # pixels are meant to be swapped, but by views, so that each only becomes its neighbour
        column, row = np.moveaxis(draw.randint(-1, 1, (SIDE - 2, SIDE - 2, 2)), 2, 0)[:, ::-1, ::-1]
        x[2:, 2:] = x[place[:, None] + row, place + column]
    return _gaussian(x / 255, c[0])


def _snow(x: Pixels, draw: RandomState, c: Any) -> Pixels:
    layer = _zoomed(draw.normal(c[0], c[1], (SIDE, SIDE, 1)), c[2])
    flakes = np.floor(np.clip(layer * (layer >= c[3]), 0, 1) * 255)
    flakes = _moved(flakes, c[4], c[5], draw.uniform(-135, -45)) / 255
    pale = np.maximum(x, (x @ (0.299, 0.587, 0.114))[..., None] * 1.5 + 0.5)
    return c[6] * x + (1 - c[6]) * pale + flakes + np.rot90(flakes, 2)


def _elastic(x: Pixels, draw: RandomState, c: Any) -> Pixels:
    place, corners = np.stack(np.meshgrid(*[np.arange(SIDE)] * 2), 2), np.array(((26, 26), (26, 6), (6, 6)))
    moved = corners + draw.uniform(-c[2], c[2], (3, 2))
    affine = np.insert(place, 2, 1, 2) @ np.linalg.solve(np.insert(moved, 2, 1, 1), corners)
    x = _sampled(x, np.floor(affine * 32 + 0.5) / 32)  # OpenCV interpolates between 32 places per pixel
    field = _gaussian(np.moveaxis(draw.uniform(-1, 1, (2, SIDE, SIDE)), 0, 2), c[1], "symmetric", 3)
    return _sampled(x, place + c[0] * field, centres=False)


def _defocus(x: Pixels, draw: RandomState, c: Any) -> Pixels:
    disk = np.add.outer((1, 0, 1), (1, 0, 1)) <= c[0] ** 2
    return _gaussian(_filtered(x, disk / disk.sum()), c[1], "reflect", 1 / c[1])


def _pixelate(x: Pixels, draw: RandomState, c: float) -> Pixels:
    small = Image.fromarray(np.rint(x * 255).astype(np.uint8)).resize(
        (int(SIDE * c), int(SIDE * c)), Image.Resampling.BOX
    )
    return np.asarray(small.resize((SIDE, SIDE), Image.Resampling.BOX))


def _jpeg(x: Pixels, draw: RandomState, c: int) -> Pixels:
    stream = io.BytesIO()
    Image.fromarray(np.rint(x * 255).astype(np.uint8)).save(stream, "JPEG", quality=c)
    return np.asarray(Image.open(stream))


def _edges(image: Pixels) -> NDArray[np.bool_]:
    """[32, 32] Canny's edges by OpenCV's rules; thresholds 50 and 150 of the sum of both slopes."""
    sobel = np.outer((1.0, 2, 1), (-1, 0, 1))
    across, down = (_filtered(image, kernel, "edge")[..., 0] for kernel in (sobel, sobel.T))
    size, slope = abs(across) + abs(down), math.tan(math.pi / 8)
    flat, steep = abs(down) < slope * abs(across), abs(down) > (slope + 2) * abs(across)
    row = np.where(flat, 0, 1)
    column = np.where(flat, 1, np.where(steep, 0, np.where(across * down < 0, -1, 1)))
    padded, (i, j) = np.pad(size, 1), np.indices((SIDE, SIDE)) + 1
    before, after = padded[i - row, j - column], padded[i + row, j + column]
    peak = (size > 50) & (size > before) & ((size > after) | ((size == after) & (flat | steep)))
    edges, grown = np.zeros_like(peak), peak & (size > 150)
    while (edges != grown).any():
        edges, grown = grown, peak & (_filtered(1.0 * grown[..., None], np.ones((3, 3)), "constant")[..., 0] > 0)
    return edges


def _spatter(x: Pixels, draw: RandomState, c: Any) -> Pixels:
    liquid = _gaussian(draw.normal(c[0], c[1], (SIDE, SIDE, 1)), c[2])
    if c[5]:  # mud
        mask = _gaussian(1.0 * (liquid > c[3]), c[4])
        mask[mask < 0.8] = 0
        return x * (1 - mask) + np.array((63, 42, 20)) / 255 * mask
    liquid = np.floor(np.where(liquid < c[3], 0, liquid) * 255) % 256  # bytes of the generator wrap around
    # Distance to the nearest edge by steps (1, 0), (1, 1) and (2, 1), at most 20.
    away = np.sort(abs(np.indices((SIDE, SIDE)).reshape(2, -1, 1) - np.argwhere(_edges(liquid)).T[:, None]), 0)
    knights = np.minimum(away[0], away[1] - away[0])
    steps = 2.1969 * knights + 1.4 * (away[0] - knights) + (away[1] - away[0] - knights)
    around = np.ones((3, 3))
    distance = np.floor(_filtered(steps.min(1, initial=20).reshape(SIDE, SIDE, 1), around) / 9)
    levels, counts = np.unique(distance, return_counts=True)
    equalised = np.rint((counts.cumsum() - counts[0]) * 255 / max(1, SIDE * SIDE - counts[0]))
    shade = equalised[np.searchsorted(levels, distance)] if len(levels) > 1 else distance
    lit = np.clip(_filtered(shade, np.array(((-2.0, -1, 0), (-1, 1, 1), (0, 1, 2)))), 0, 255)
    water = liquid * np.rint(_filtered(lit, around) / 9)
    return x + water / max(water.max(), 1e-9) * c[4] * np.array((175, 238, 238)) / 255


KINDS: dict[str, Callable[[Pixels, RandomState, Any], Any]] = {
    "gaussian_noise": lambda x, draw, c: x + draw.normal(0, c, x.shape),
    "shot_noise": lambda x, draw, c: draw.poisson(x * c) / c,
    "impulse_noise": lambda x, draw, c: np.where(draw.random_sample(x.shape) < c, draw.random_sample(x.shape) < 0.5, x),
    "defocus_blur": _defocus,
    "glass_blur": _glass,
    "motion_blur": lambda x, draw, c: _moved(x * 255, *c, draw.uniform(-45, 45)).astype(np.uint8),
    "zoom_blur": lambda x, draw, c: np.mean([x, *(_zoomed(x, f) for f in np.arange(1, c, 0.01))], 0),
    "snow": _snow,
    "fog": lambda x, draw, c: (x + c[0] * _plasma(draw, c[1])) * x.max() / (x.max() + c[0]),
    "brightness": lambda x, draw, c: _recoloured(x, 1, 0, c),
    "contrast": lambda x, draw, c: (x - x.mean((0, 1))) * c + x.mean((0, 1)),
    "elastic_transform": _elastic,
    "pixelate": _pixelate,
    "jpeg_compression": _jpeg,
    "speckle_noise": lambda x, draw, c: x + x * draw.normal(0, c, x.shape),
    "gaussian_blur": lambda x, draw, c: _gaussian(x, c),
    "spatter": _spatter,
    "saturate": lambda x, draw, c: _recoloured(x, *c),
}

PARAMETERS: dict[str, Sequence[Any]] = {  # at severities 1 to 5
    "gaussian_noise": (0.04, 0.06, 0.08, 0.09, 0.10),
    "shot_noise": (500, 250, 100, 75, 50),
    "impulse_noise": (0.01, 0.02, 0.03, 0.05, 0.07),
    "defocus_blur": ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1)),  # radius, sigma of its soft edge
    "glass_blur": ((0.05, 1), (0.25, 1), (0.4, 1), (0.25, 2), (0.4, 2)),  # sigma, repetitions
    "motion_blur": ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5)),  # radius, sigma
    "zoom_blur": (1.06, 1.11, 1.16, 1.21, 1.26),
    "snow": (  # mean, deviation, zoom, threshold, radius and sigma of the motion blur, share of the image
        (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
        (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
        (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
        (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
        (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
    ),
    "fog": ((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75)),  # strength, decay of the clouds
    "brightness": (0.05, 0.1, 0.15, 0.2, 0.3),
    "contrast": (0.75, 0.5, 0.4, 0.3, 0.15),
    "elastic_transform": (  # strength and sigma of the field, reach of the affine map
        (0, 0, 2.56),
        (1.6, 6.4, 2.24),
        (2.56, 1.92, 1.92),
        (3.2, 1.28, 1.6),
        (3.2, 0.96, 0.96),
    ),
    "pixelate": (0.95, 0.9, 0.85, 0.75, 0.65),
    "jpeg_compression": (80, 65, 58, 50, 40),
    "speckle_noise": (0.06, 0.1, 0.12, 0.16, 0.2),
    "gaussian_blur": (0.4, 0.6, 0.7, 0.8, 1),
    "spatter": (  # mean, deviation, sigma, threshold, strength of water or sigma of mud, whether it is mud
        (0.62, 0.1, 0.7, 0.7, 0.5, False),
        (0.65, 0.1, 0.8, 0.7, 0.5, False),
        (0.65, 0.3, 1, 0.69, 0.5, False),
        (0.65, 0.1, 0.7, 0.69, 0.6, True),
        (0.65, 0.1, 0.5, 0.68, 0.6, True),
    ),
    "saturate": ((0.3, 0), (0.1, 0), (1.5, 0), (2, 0.1), (2.5, 0.2)),
}


def corrupt(image: NDArray[np.uint8], kind: str, severity: int, index: int = 0, seed: int = 0) -> NDArray[np.uint8]:
    """An image [32, 32, 3] with one corruption; `index` and `seed` decide what is random."""
    key = seed_of("cifar_c", seed, list(PARAMETERS).index(kind), severity, index)
    changed = KINDS[kind](image / 255.0, RandomState([key >> 32, key % 2**32]), PARAMETERS[kind][severity - 1])
    return changed if changed.dtype == np.uint8 else (np.clip(changed, 0, 1) * 255).astype(np.uint8)


def _severity(images: NDArray[np.uint8], index: Sequence[int], seed: int, variant: tuple[str, int]) -> Pixels:
    torch.set_num_threads(1)
    return np.stack([corrupt(image, *variant, i, seed) for image, i in zip(images, index, strict=True)])


def make(uri: str, out: Path, images: int | None = None, seed: int = 0) -> None:
    """Write KIND.npy [5 x images, 32, 32, 3] and labels.npy, of the test images of a data set. Raises `ValueError`."""
    split = open_data(uri)["test"]
    rows = range(min(len(split), images or len(split)))
    pixels = [np.asarray(split.read(row)) for row in rows]
    if other := {image.shape for image in pixels} - {(SIDE, SIDE, 3)}:
        raise ValueError(f"{uri} has images of {other.pop()[:2]}; CIFAR-10-C's corruptions are for 32 x 32 pixels")
    out.mkdir(parents=True)
    np.save(out / "labels.npy", np.tile(split.labels[: len(rows)], len(SEVERITIES)).astype(np.uint8))
    work = partial(_severity, np.stack(pixels), split.index[: len(rows)].tolist(), seed)
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as pool:
        for kind in KINDS:
            np.save(out / f"{kind}.npy", np.concatenate(list(pool.map(work, [(kind, s) for s in SEVERITIES]))))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("data", help="data set whose test images are corrupted")
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--images", type=int, help="only so many of them")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    make(given.data, given.out, given.images, given.seed)
