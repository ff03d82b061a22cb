"""Attacks on the compute of adaptive models: a universal patch, or a bounded perturbation of every pixel, learned on a
frozen victim (SlowFormer, Navaneet et al., 2023, arXiv 2310.02544).

images [batch, 3, height, width] are a model's input, normalised; levels [3, height, width] are whole numbers on the
scale of bytes, 0 to 255. The objective's model is the victim, the patch its only trainable parameter.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from vitrail.data.batch import Batch
from vitrail.data.config import PreprocessConfig
from vitrail.files import FORMAT_VERSION, json_text, parse_json, reject_later, replacing, write_text
from vitrail.learn.attack_config import AttackConfig
from vitrail.learn.objective import Objective
from vitrail.model.adaptive.adavit import AdavitPolicy
from vitrail.model.adaptive.ats import AtsPolicy
from vitrail.model.adaptive.avit import AvitPolicy
from vitrail.model.classifier import Classifier
from vitrail.model.parts.tokens import Trace
from vitrail.model.store import read_tensors, write_tensors

PICTURE, LEVELS, PROVENANCE = "patch.png", "patch.safetensors", "patch.json"
FORMAT = 1
GREY = 128  # of a picture of a perturbation, where it changes nothing


class Universal(nn.Module):
    """A learned `value` [3, height, width], and the `levels` that are really used.

    `value` is in units of the standard deviation of normalised images, as published learning rates are (0.2 is about 11
    of 255 levels). It keeps fractions of a level, so that small steps add up; what is used is clipped and rounded, and
    gradients go straight through both.
    """

    value: nn.Parameter
    mean: Tensor
    std: Tensor
    shift: Tensor

    def __init__(
        self, shape: tuple[int, int], low: int, high: int, centred: bool, preprocess: PreprocessConfig
    ) -> None:
        super().__init__()
        self.shape, self.low, self.high, self.image_size = (3, *shape), low, high, preprocess.size
        mean, std = (torch.tensor(v).view(3, 1, 1) for v in (preprocess.mean, preprocess.std))
        for name, moment in {"mean": mean, "std": std, "shift": torch.zeros_like(mean) if centred else mean}.items():
            self.register_buffer(name, moment, persistent=False)
        self.value = nn.Parameter(torch.empty(self.shape))

    def drawn(self, seed: int) -> Tensor:
        """Levels drawn independently and evenly, on the CPU."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(self.low, self.high + 1, self.shape, generator=generator).float()

    @torch.no_grad()
    def set_levels(self, levels: Tensor) -> None:
        """Begin from these. Raises `ValueError` for another shape."""
        if levels.shape != self.shape:
            raise ValueError(f"levels of shape {list(levels.shape)} do not fit {list(self.shape)}")
        self.value.copy_((levels.to(self.value) / 255 - self.shift) / self.std)

    def soft_levels(self) -> Tensor:
        """The levels, through which gradients reach `value`."""
        raw = (self.value * self.std + self.shift) * 255
        levels = raw.detach().clamp(self.low, self.high).round()
        return levels + (raw - raw.detach())

    @property
    def levels(self) -> Tensor:
        """The levels that are used, whole numbers as int16."""
        return self.soft_levels().detach().to(torch.int16)

    @torch.no_grad()
    def project(self) -> None:
        """Clamp `value` to the range of the levels; to be called after every step."""
        low, high = ((end / 255 - self.shift) / self.std for end in (self.low, self.high))
        self.value.clamp_(low, high)

    def forward(self, images: Tensor) -> Tensor:
        return self.paste(images, self.soft_levels())

    def paste(self, images: Tensor, levels: Tensor) -> Tensor:
        """Changed images; `levels` need not be those of this module."""
        if images.shape[-2:] != (self.image_size, self.image_size):
            raise ValueError(
                f"the {self.word} was made for images of {self.image_size} pixels and cannot be laid on those of "
                f"{images.shape[-2]} x {images.shape[-1]}"
            )
        return self._paste(images, levels)

    def _paste(self, images: Tensor, levels: Tensor) -> Tensor:
        raise NotImplementedError

    word = "change"

    def picture(self) -> np.ndarray:
        """Bytes [height, width, 3] of a picture."""
        raise NotImplementedError

    def describe(self) -> dict[str, Any]:
        """Everything, but for the levels, that it is built from."""
        raise NotImplementedError


class UniversalPatch(Universal):
    """A square of `size` pixels that takes the place of what every image has there; all other pixels stay.

    `place`: top_left, centre, random (drawn once from `seed`), or ROW,COLUMN of its first pixel. Raises `ValueError`
    where it does not fit.
    """

    word = "patch"

    def __init__(
        self,
        size: int,
        place: str = "top_left",
        image_size: int = 224,
        seed: int = 0,
        preprocess: PreprocessConfig | None = None,
    ) -> None:
        preprocess = _preprocess(preprocess, image_size, self.word)
        if not 1 <= size <= image_size:
            raise ValueError(f"a patch of {size} pixels does not fit images of {image_size}; use a smaller size")
        super().__init__((size, size), 0, 255, False, preprocess)
        self.size = size
        self.row, self.column = corner(place, size, image_size, seed)
        self.set_levels(self.drawn(seed))

    def _paste(self, images: Tensor, levels: Tensor) -> Tensor:
        # The same operations in the same order as a model's own normalisation, so that a pasted byte is that byte.
        inside = (levels / 255 - self.mean) / self.std
        out = images.clone()
        out[..., self.row : self.row + self.size, self.column : self.column + self.size] = inside.to(images.dtype)
        return out

    def picture(self) -> np.ndarray:
        return self.levels.permute(1, 2, 0).to("cpu", torch.uint8).numpy()

    def describe(self) -> dict[str, Any]:
        place = f"{self.row},{self.column}"
        return {"change": "patch", "size": self.size, "place": place, "image_size": self.image_size}


class UniversalPerturbation(Universal):
    """At most `eps` levels more or less at every pixel of every image, which stays within 0 to 255."""

    word = "perturbation"

    def __init__(
        self, eps: int, image_size: int = 224, seed: int = 0, preprocess: PreprocessConfig | None = None
    ) -> None:
        preprocess = _preprocess(preprocess, image_size, self.word)
        if not 1 <= eps <= 255:
            raise ValueError(f"eps: {eps} levels; it must be from 1 to 255")
        super().__init__((image_size, image_size), -eps, eps, True, preprocess)
        self.eps = eps
        self.set_levels(self.drawn(seed))

    def _paste(self, images: Tensor, levels: Tensor) -> Tensor:
        pixels = (images.to(levels.dtype) * self.std + self.mean) * 255
        changed = (pixels + levels).clamp(0, 255)
        return ((changed / 255 - self.mean) / self.std).to(images.dtype)

    def picture(self) -> np.ndarray:
        return (self.levels + GREY).clamp(0, 255).permute(1, 2, 0).to("cpu", torch.uint8).numpy()

    def describe(self) -> dict[str, Any]:
        return {"change": "perturbation", "eps": self.eps, "image_size": self.image_size}


def _preprocess(given: PreprocessConfig | None, image_size: int, word: str) -> PreprocessConfig:
    if given is not None and given.size != image_size:
        raise ValueError(f"the {word} is for images of {image_size} pixels, the model takes {given.size}")
    return given or PreprocessConfig(size=image_size)


def make_change(config: AttackConfig, preprocess: PreprocessConfig) -> Universal:
    """The change that a configuration describes, at its random start."""
    if config.change == "perturbation":
        return UniversalPerturbation(config.eps, preprocess.size, config.seed, preprocess)
    return UniversalPatch(config.size, config.place, preprocess.size, config.seed, preprocess)


def corner(place: str, size: int, image_size: int, seed: int) -> tuple[int, int]:
    """Row and column of the first pixel of a patch."""
    free = image_size - size
    if place == "top_left":
        return 0, 0
    if place == "centre":
        return free // 2, free // 2
    if place == "random":  # another stream than that of the levels
        row, column = np.random.default_rng((seed, 1)).integers(0, free + 1, 2)
        return int(row), int(column)
    parts = place.split(",")
    if len(parts) != 2 or not all(part.strip().isdecimal() for part in parts):
        raise ValueError(f"place: {place!r} is not top_left, centre, random or ROW,COLUMN")
    row, column = (int(part) for part in parts)
    if max(row, column) > free:
        raise ValueError(
            f"place: a patch of {size} pixels at {row},{column} leaves an image of {image_size}; use 0 to {free}"
        )
    return row, column


def save_patch(folder: Path, change: Universal, provenance: Mapping[str, Any]) -> None:
    """A picture in `patch.png` (a perturbation around grey), exact levels in `patch.safetensors`, and provenance."""
    write_tensors(folder / LEVELS, {"levels": change.levels})
    with replacing(folder / PICTURE) as temporary:
        Image.fromarray(change.picture()).save(temporary, format="png")
    facts = {"format": FORMAT, "format_version": FORMAT_VERSION, **change.describe(), **provenance}
    write_text(folder / PROVENANCE, json_text(facts, indent=1))


def load_patch(folder: Path, preprocess: PreprocessConfig) -> tuple[Universal, dict[str, Any]]:
    """A stored patch for a model with this preprocessing, and its provenance.

    Raises `FileNotFoundError` or `ValueError`, one sentence, where there is none, it is damaged or does not fit.
    """
    path = folder / PROVENANCE
    if not path.is_file():
        raise FileNotFoundError(f"no patch in {folder} (it has no {PROVENANCE}); make one with: vitrail attack RUN")
    try:
        facts: dict[str, Any] = parse_json(path.read_text(encoding="utf-8"))
        reject_later(path, facts, FORMAT)
        change: Universal
        if facts["change"] == "perturbation":
            change = UniversalPerturbation(facts["eps"], facts["image_size"], 0, preprocess)
        else:
            change = UniversalPatch(facts["size"], facts["place"], facts["image_size"], 0, preprocess)
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({type(error).__name__}: {error})") from None
    levels = read_tensors(folder / LEVELS).get("levels")
    if levels is None or levels.shape != change.shape or levels.min() < change.low or levels.max() > change.high:
        raise ValueError(f"{folder / LEVELS} does not belong to the {PROVENANCE} next to it")
    change.set_levels(levels)
    return change.requires_grad_(False), facts


class Attack(Objective):
    """Minimise `attack_losses` over the pixels of the patch alone.

    The victim is in evaluation mode, gets no gradients and keeps its weights; a checkpoint holds the patch and the
    victim's hash. The learning rate is in standard deviations of normalised images (see `Universal`). Raises
    `ValueError` for a victim that cannot be attacked.
    """

    frozen = ("model",)

    def __init__(self, model: Classifier, config: AttackConfig) -> None:
        super().__init__()
        reject_unfit(model, config)
        self.config = config
        self.model = model.requires_grad_(False).eval()
        _prepare(model)
        self.patch = make_change(config, model.preprocess)

    def train(self, mode: bool = True) -> Attack:
        super().train(mode)
        self.model.eval()
        return self

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        return attack_losses(self.model, self.patch, self.config, batch)

    def after_step(self, step: int) -> None:
        self.patch.project()


def attack_losses(model: Classifier, change: Universal, config: AttackConfig, batch: Batch) -> dict[str, Tensor]:
    """The attacker's `loss` on changed images, its parts, and the number of tokens that blocks process."""
    out = model.outputs(change(model._images(batch.images)))
    assert out.trace is not None
    losses = {"tokens": torch.stack([use.entering for use in out.trace.blocks]).mean()}
    logits = model.fused(out.stack).float()
    if config.loss == "random":
        # Nothing to learn: the gradient is zero, also where the logits are NaN.
        return {"loss": 0.0 * change.value.sum(), **losses}
    if config.loss == "ntap":
        return {"loss": -_task(model, logits, batch.label), **losses}
    if config.loss == "tap":
        aim = torch.full_like(batch.index, config.target)
        return {"loss": F.cross_entropy(logits, aim), **losses}
    spent = compute_loss(model, out.trace, config)
    if config.task == "none":
        return {"loss": spent, **losses}
    task = _task(model, logits, batch.label)
    sign = 1.0 if config.task == "preserve" else -1.0
    parts = {"loss_compute": spent.detach(), "loss_task": task.detach()}
    return {"loss": spent + sign * config.task_weight * task, **parts, **losses}


def compute_loss(model: Classifier, trace: Trace, config: AttackConfig) -> Tensor:
    """The loss of SlowFormer (arXiv 2310.02544): the lower, the more compute the victim uses.

    ATS: squared distance of the class token's attention from a uniform one, summed over heads, weighted per layer.
    A-ViT: -(ponder + prior), the victim's own losses in their training proportion, scaled so that the ponder loss has
    weight 1: Adam is invariant to the scale, and a task loss can be weighted relative to it. AdaViT: minus the squared
    shares of patches, heads and branches that are kept.
    """
    policy = model.policy
    if isinstance(policy, AtsPolicy):
        weights = config.layer_weights or (1.0,) * len(policy.at)
        terms = [w * trace.losses[f"uniform.{i}"].mean() for w, i in zip(weights, policy.at, strict=True)]
        return torch.stack(terms).sum()
    if isinstance(policy, AvitPolicy):
        losses = policy.losses(trace)
        sign = 1.0 if config.prior == "thesis" else -1.0
        return -(losses["ponder"] + sign * losses["prior"]) / policy.config.ponder
    assert isinstance(policy, AdavitPolicy)
    shares = torch.stack([trace.losses[name] for name in ("patches", "heads", "branches")])  # [3, batch]
    shares = shares.mean(1) if policy.config.usage_of == "batch" else shares
    return -(shares.square().sum(0).mean())


def reject_unfit(model: Classifier, config: AttackConfig) -> None:
    """Raises `ValueError`, one sentence, where a model cannot be a victim."""
    policy = model.policy
    if policy is None or policy.same_cost:
        raise ValueError(
            "the model spends the same on every image, so its compute cannot be attacked; take one with an adaptive "
            "policy (--model.trunk.adaptive ats, avit or adavit)"
        )
    weights = config.layer_weights
    if isinstance(policy, AtsPolicy) and weights and len(weights) != len(policy.at):
        raise ValueError(
            f"objective.layer_weights: {len(weights)} weights, but the model samples in {len(policy.at)} blocks "
            f"({', '.join(map(str, policy.at))})"
        )
    if isinstance(policy, AvitPolicy) and not policy.config.ponder:
        raise ValueError("the model's ponder loss weighs 0, so nothing says how the prior is to be weighed against it")
    if config.loss == "tap" and config.target >= len(model.classes):
        raise ValueError(f"objective.target: class {config.target}, but the model has {len(model.classes)}")
    if config.loss == "tap" and model.multilabel:
        raise ValueError("a targeted patch aims at one class, but this model may say several; use ntap")
    for name, p in model.named_parameters():
        if not p.is_meta and not bool(p.isfinite().all()):
            raise ValueError(f"the model's weights are no numbers ({name} holds NaN or infinity); train it again")


@contextmanager
def as_victim(model: Classifier) -> Iterator[None]:
    """The model in evaluation mode, without gradients of its own, with decisions that pass them on; then as it was."""
    training = [(m, m.training) for m in model.modules()]
    learning = [(p, p.requires_grad) for p in model.parameters()]
    model.requires_grad_(False).eval()
    undo = _prepare(model)
    try:
        yield
    finally:
        for name, value in undo.items():
            setattr(model.policy, name, value)
        for p, on in learning:
            p.requires_grad_(on)
        for m, on in training:
            m.training = on


def _prepare(model: Classifier) -> dict[str, Any]:
    """Let gradients reach pixels through the policy's decisions; returns what to put back."""
    policy = model.policy
    if isinstance(policy, AdavitPolicy):
        before, policy.differentiable = policy.differentiable, True
        return {"differentiable": before}
    if isinstance(policy, AtsPolicy) and policy.config.form == "packed":  # it never computes the class token's row
        config, policy.config = policy.config, replace(policy.config, form="auto")
        return {"config": config}
    return {}


def _task(model: Classifier, logits: Tensor, label: Tensor) -> Tensor:
    if model.multilabel:
        return F.binary_cross_entropy_with_logits(logits, label.float())
    return F.cross_entropy(logits, label)
