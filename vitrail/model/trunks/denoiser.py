"""A small class-conditional U-Net that predicts the noise in an image, and classifies by the smallest error.

images [batch, 3, height, width] in -1..1; time [batch] in 0..1; label [batch], `classes` standing for no class at all

    stem -> levels of residual blocks, each at half the side of the one before -> middle -> the same levels back,
    each block of which also reads the output of a block on the way down

Time and class reach every residual block as a scale and a shift of its second norm (Dhariwal and Nichol 2021). At time
t, between 0 (the image) and 1 (next to pure noise), the input is z = signal(t) x + noise(t) n, with signal² + noise² =
1. The network predicts the noise (`eps`) or the velocity v = signal n - noise x (Salimans and Ho 2022).
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.data.augment.pixel_ops import normal_noise
from vitrail.model.config import DenoiserConfig, NoisePrediction, NoiseScheduleName
from vitrail.model.heads.head import Head
from vitrail.model.parts.tokens import Tokens
from vitrail.model.trunks.base import BaseTrunk

SCALED_LINEAR = (0.00085, 0.012, 1000)  # first and last variance, steps: Stable Diffusion's
LAST_ANGLE = math.pi / 2 * 0.999  # at time 1 a signal of 0.0016 is left: `eps` divides by it


class NoiseSchedule:
    """Signal and noise at any time.

    `cosine`: an angle that grows evenly. `scaled_linear`: Stable Diffusion's thousand steps; time t is step 1000 t, in
    between the logarithm is interpolated, so that every step has exactly its published signal level.
    """

    def __init__(self, name: NoiseScheduleName = "cosine", prediction: NoisePrediction = "v") -> None:
        self.name, self.prediction = name, prediction

    def levels(self, time: Tensor) -> tuple[Tensor, Tensor]:
        """Signal and noise at times of any shape, float32 unless times are float64."""
        kind = torch.float64 if time.dtype == torch.float64 else torch.float32
        if self.name == "cosine":
            angle = time.to(torch.float64) * LAST_ANGLE
            return angle.cos().to(kind), angle.sin().to(kind)
        first, last, steps = SCALED_LINEAR
        # Made where it is used, by a few small kernels: a table on the host would have to be copied.
        betas = torch.linspace(first**0.5, last**0.5, steps, dtype=torch.float64, device=time.device).square()
        kept = torch.log1p(-betas).cumsum(0)
        step = (time.to(torch.float64) * steps).clamp(0, steps - 1)
        low = step.floor().clamp(max=steps - 2).to(torch.int64)
        log = kept[low] + (kept[low + 1] - kept[low]) * (step - low)
        return (log / 2).exp().to(kind), (-torch.expm1(log)).sqrt().to(kind)

    def noised(self, images: Tensor, noise: Tensor, time: Tensor) -> Tensor:
        """Images [batch, ...] at times [batch]."""
        signal, share = self._per_image(time, images)
        return signal * images + share * noise

    def target(self, images: Tensor, noise: Tensor, time: Tensor) -> Tensor:
        """The network's prediction target."""
        signal, share = self._per_image(time, images)
        return noise if self.prediction == "eps" else signal * noise - share * images

    def clean(self, seen: Tensor, predicted: Tensor, time: Tensor) -> Tensor:
        """The image that follows from a noised one and the network's prediction."""
        signal, share = self._per_image(time, seen)
        return (seen - share * predicted) / signal if self.prediction == "eps" else signal * seen - share * predicted

    def noise(self, seen: Tensor, predicted: Tensor, time: Tensor) -> Tensor:
        """The noise that follows from a noised image and the network's prediction."""
        signal, share = self._per_image(time, seen)
        return predicted if self.prediction == "eps" else share * seen + signal * predicted

    def signal_to_noise(self, time: Tensor) -> Tensor:
        """signal² / noise² at times of any shape."""
        signal, share = self.levels(time)
        return (signal / share.clamp_min(1e-6)).square()

    def time_at(self, signal_to_noise: float) -> float:
        """When signal² / noise² is this; 0 or 1 where it is never so large, or so small."""
        low, high = 0.0, 1.0
        for _ in range(50):
            middle = (low + high) / 2
            more = float(self.signal_to_noise(torch.tensor(middle, dtype=torch.float64))) > signal_to_noise
            low, high = (middle, high) if more else (low, middle)
        return high

    def _per_image(self, time: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        signal, share = self.levels(time)
        shape = (-1,) + (1,) * (like.ndim - 1)
        return signal.to(like.dtype).view(shape), share.to(like.dtype).view(shape)


def equal_noise(r: float, stated: NoiseScheduleName, used: NoiseScheduleName) -> float:
    """The time of the schedule `used` with the signal-to-noise ratio that `stated` has at time r.

    Papers state r on Stable Diffusion's schedule, which leaves less of an image at equal times than the cosine: GeNIe's
    r of 0.8 (Koohpayegani et al. 2023, arXiv 2312.02548) is 0.88 on the cosine. Raises `ValueError` for an r outside
    of 0 to 1.

    >>> [round(equal_noise(r, "scaled_linear", "cosine"), 2) for r in (0.5, 0.6, 0.7, 0.8, 0.9)]
    [0.65, 0.74, 0.82, 0.88, 0.93]
    """
    if not 0 <= r <= 1:
        raise ValueError(f"r is a share of the noise, so {r:g} must lie between 0 and 1")
    if stated == used:
        return r
    ratio = NoiseSchedule(stated).signal_to_noise(torch.tensor(r, dtype=torch.float64))
    return NoiseSchedule(used).time_at(float(ratio))


ROWS_AT_ONCE = 2560  # images that the network sees in one call when all classes are tried


class Denoiser(BaseTrunk):
    """`network(images, time, label)` predicts noise or velocity, [batch, 3, height, width] in float32.

    As the trunk of a `Classifier` it classifies, too: noise is added to an image, at fixed times and with fixed noise,
    and the likeliest class is the one under which that noise is predicted best (Li et al. 2023, "Your diffusion model
    is secretly a zero-shot classifier"). That takes `classes * draws` calls per image.
    """

    edge_layers = ("last",)
    opaque = "a denoiser gives no intermediates by name; it is a diffusion model, not a ViT"

    def __init__(self, config: DenoiserConfig, classes: int) -> None:
        super().__init__()
        self.config, self.classes = config, classes
        self.schedule = NoiseSchedule(config.schedule, config.prediction)
        self.width = classes  # of the tokens that the head sees
        widths = [config.width * m for m in config.multipliers]
        sides = [config.image_size >> level for level in range(len(widths))]
        if over := config.image_size % self.shrinks:
            low = config.image_size - over
            raise ValueError(
                f"model.image_size: {config.image_size} pixels cannot be halved {len(widths) - 1} times; use "
                f"{low or self.shrinks} or {low + self.shrinks}"
            )
        if any(width % config.heads for width in widths):
            raise ValueError(
                f"model.trunk.heads: widths {', '.join(map(str, widths))} cannot be cut into {config.heads} heads"
            )
        inner = 2 * config.width
        self.time = nn.Sequential(nn.Linear(config.width, inner), nn.SiLU(), nn.Linear(inner, inner))
        self.label = nn.Embedding(classes + 1, inner)  # the last one: no class

        def unit(inputs: int, level: int) -> Unit:
            attends = sides[level] in config.attention
            return Unit(inputs, widths[level], inner, config.drop, config.heads if attends else 0)

        self.stem = nn.Conv2d(3, widths[0], 3, padding=1)
        self.down, self.shrink = nn.ModuleList(), nn.ModuleList()
        left = [widths[0]]  # widths of the skip connections
        for level, width in enumerate(widths):
            for _ in range(config.depth):
                self.down.append(unit(left[-1], level))
                left.append(width)
            if level < len(widths) - 1:
                self.shrink.append(nn.Conv2d(width, width, 3, stride=2, padding=1))
                left.append(width)
        channels = widths[-1]
        middle = [Unit(channels, channels, inner, config.drop, heads) for heads in (config.heads, 0)]
        self.middle = nn.ModuleList(middle)
        self.up, self.grow = nn.ModuleList(), nn.ModuleList()
        for level in reversed(range(len(widths))):
            for _ in range(config.depth + 1):
                self.up.append(unit(channels + left.pop(), level))
                channels = widths[level]
            if level:
                self.grow.append(nn.Conv2d(channels, channels, 3, padding=1))
        self.norm = norm(channels)
        self.last = nn.Conv2d(channels, 3, 3, padding=1)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.label.weight, std=0.02)
        zeros(self.last)

    @property
    def shrinks(self) -> int:
        """How many times smaller the middle is: sides of images must be multiples of it."""
        return 1 << (len(self.config.multipliers) - 1)

    @property
    def no_class(self) -> int:
        """The label that stands for no class."""
        return self.classes

    def forward(self, images: Tensor, time: Tensor, label: Tensor) -> Tensor:
        if images.shape[-1] % self.shrinks or images.shape[-2] % self.shrinks:
            raise ValueError(
                f"images of {images.shape[-2]}x{images.shape[-1]} pixels do not fit this denoiser: sides must be "
                f"multiples of {self.shrinks}; resize them"
            )
        given = F.silu(self.time(waves(time, self.config.width)) + self.label(label))
        x = self.stem(images)
        left, depth = [x], self.config.depth
        for i, block in enumerate(self.down):
            x = block(x, given)
            left.append(x)
            if (i + 1) % depth == 0 and i + 1 < len(self.down):
                x = self.shrink[i // depth](x)
                left.append(x)
        for block in self.middle:
            x = block(x, given)
        for i, block in enumerate(self.up):
            x = block(torch.cat([x, left.pop()], 1), given)
            if (i + 1) % (depth + 1) == 0 and i + 1 < len(self.up):
                x = self.grow[i // (depth + 1)](F.interpolate(x, scale_factor=2.0, mode="nearest"))
        return self.last(F.silu(self.norm(x))).float()

    def errors(self, images: Tensor, label: Tensor, time: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Mean squared errors [batch] of the prediction and of the noise that follows from it, in float32."""
        images, noise = images.float(), noise.float()
        predicted = self(self.schedule.noised(images, noise, time), time, label)
        error = (predicted - self.schedule.target(images, noise, time)).square().mean((1, 2, 3))
        if self.schedule.prediction == "eps":
            return error, error
        return error, error * self.schedule.levels(time)[0].square()  # noise = share * seen + signal * predicted

    def embed(self, images: Tensor) -> Tokens:
        """One token per image: for each class, minus the squared error of the noise, a mean over fixed draws."""
        batch, draws = len(images), self.config.draws
        at_once = max(1, ROWS_AT_ONCE // max(1, batch))
        errors = []
        for first in range(0, self.classes, at_once):
            label = torch.arange(first, min(first + at_once, self.classes), device=images.device)
            rows = images.repeat_interleave(len(label), 0)
            total = torch.zeros(len(rows), device=images.device)
            for draw in range(draws):
                time = torch.full((len(rows),), (draw + 0.5) / draws, device=images.device)
                seed = torch.full((1,), draw, dtype=torch.int64, device=images.device)
                noise = normal_noise(seed, *images.shape[1:]).expand(len(rows), -1, -1, -1)
                total = total + self.errors(rows, label.repeat(batch), time, noise)[1]
            errors.append(total.view(batch, -1) / draws)
        return Tokens(-torch.cat(errors, 1)[:, None] * images[0].numel(), 0, (1, 1))


class DenoisingHead(Head):
    """The denoiser's token already holds a number for each class."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.features = classes

    def embed(self, tokens: Tokens) -> Tensor:
        return tokens.sequence[:, 0]

    def forward(self, tokens: Tokens) -> Tensor:
        return tokens.sequence


class Unit(nn.Module):
    """A residual block of two convolutions, and self-attention after it where `heads` is not 0.

    Last layers start at zero, so each begins as the identity (or as the 1x1 convolution where widths differ).
    """

    def __init__(self, inputs: int, width: int, given: int, drop: float, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = norm(inputs), norm(width)
        self.conv1 = nn.Conv2d(inputs, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)
        self.given = nn.Linear(given, 2 * width)
        self.drop = nn.Dropout(drop)
        self.shortcut = nn.Identity() if inputs == width else nn.Conv2d(inputs, width, 1)
        self.attention = SelfAttention(width, heads) if heads else nn.Identity()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        zeros(self.conv2)

    def forward(self, x: Tensor, given: Tensor) -> Tensor:  # [batch, inputs, rows, columns], [batch, given]
        branch = self.norm2(self.conv1(F.silu(self.norm1(x))))
        scale, shift = self.given(given)[..., None, None].chunk(2, 1)
        branch = self.conv2(self.drop(F.silu(branch * (1 + scale) + shift)))
        return self.attention(self.shortcut(x) + branch)


class SelfAttention(nn.Module):
    """Every position attends to every other: [batch, width, rows, columns] to the same."""

    fused_layers: ClassVar[dict[str, int]] = {"qkv": 3}

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = norm(width)
        self.qkv = nn.Conv2d(width, 3 * width, 1)
        self.proj = nn.Conv2d(width, width, 1)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        zeros(self.proj)

    def forward(self, x: Tensor) -> Tensor:
        batch, width, rows, columns = x.shape
        qkv = self.qkv(self.norm(x)).view(batch, 3, self.heads, width // self.heads, rows * columns)
        q, k, v = qkv.transpose(-1, -2).unbind(1)
        mixed = F.scaled_dot_product_attention(q, k, v)
        return x + self.proj(mixed.transpose(-1, -2).reshape(batch, width, rows, columns))


def zeros(layer: nn.Module) -> None:
    """Start all parameters of a layer at zero."""
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)


def norm(width: int) -> nn.GroupNorm:
    """GroupNorm of at most 32 groups, as many as divide the width."""
    return nn.GroupNorm(math.gcd(32, width), width)


def waves(time: Tensor, width: int) -> Tensor:
    """Sines and cosines [batch, width] of times in 0..1, from one turn in 2π thousandths to a fraction of one in all.

    In float32: half precision cannot tell neighbouring times apart.
    """
    half = width // 2
    speed = torch.exp(torch.arange(half, device=time.device) * (-math.log(10_000.0) / max(1, half - 1)))
    angle = 1000 * time.float()[:, None] * speed
    return F.pad(torch.cat([angle.sin(), angle.cos()], 1), (0, width - 2 * half))
