"""Settings of attacks on the compute of adaptive models, and of adversarial training against them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from vitrail.learn.config import ObjectiveOptions, SupervisedConfig
from vitrail.schema import Count, Fraction, NotNegative, Positive, Range, Whole


@dataclass(frozen=True)
class AttackConfig(ObjectiveOptions):
    """A universal patch or perturbation that raises the compute of a frozen adaptive model (SlowFormer, Navaneet et
    al., 2023, arXiv 2310.02544).

    `optim.lr` is in standard deviations of normalised images, as published: 0.2 is about 11 of 255 levels.
    """

    kind: Literal["attack"] = "attack"
    change: Literal["patch", "perturbation"] = "patch"
    """A square that takes the place of pixels, or at most `eps` levels more or less of every pixel."""
    size: Count = 64
    """Side of the patch in pixels."""
    place: str = "top_left"
    """Where the patch is: top_left, centre, random (drawn once from `seed`), or ROW,COLUMN."""
    eps: Annotated[int, Range(1, 255)] = 16
    """Perturbation: levels of 255."""
    loss: Literal["compute", "ntap", "tap", "random"] = "compute"
    """`compute`: by the victim's policy. For comparison: `ntap`, any wrong class; `tap`, the class `target`;
    `random`, nothing is learned."""
    layer_weights: tuple[NotNegative, ...] = ()
    """ATS: weight of each sampling block (empty: 1)."""
    prior: Literal["thesis", "released"] = "thesis"
    """A-ViT: push halting away from its prior (default, as published) or towards it (the authors' released code)."""
    task: Literal["none", "preserve", "destroy"] = "none"
    """Whether accuracy is to stay or to go besides."""
    task_weight: NotNegative = 1.0
    """Of the cross entropy, where it counts; not published."""
    target: Whole = 0
    """`tap`: the class, counted from 0."""
    seed: Whole = 0
    """Of the patch's start and of a random place."""

    def problems(self, run: Any) -> list[str]:
        return super().problems(run) + _whole_model(self, run)


@dataclass(frozen=True)
class DefenceConfig(ObjectiveOptions):
    """Adversarial training: labels, on images that carry patches learned against the model during the run (SlowFormer's
    defence, arXiv 2310.02544)."""

    kind: Literal["defence"] = "defence"
    every: Count = 500
    """Steps between new patches; published: five per epoch."""
    inner_steps: Count = 500
    """Steps in which a patch is made."""
    inner_lr: Positive = 0.8
    """Their learning rate, in standard deviations of normalised images."""
    clean: Fraction = 0.0
    """Share of steps without a patch."""
    attack: AttackConfig = field(default_factory=AttackConfig)
    """How patches are made."""
    labels: SupervisedConfig = field(default_factory=SupervisedConfig)
    """How labels are learned."""

    def problems(self, run: Any) -> list[str]:
        return super().problems(run) + _whole_model(self, run)


def _whole_model(objective: ObjectiveOptions, run: Any) -> list[str]:
    """Attacks and their defence have no place for an adapter."""
    if run.model.adapter is None:
        return []
    return [f"model.adapter: {objective.kind} works on a whole model; leave the adapter out"]
