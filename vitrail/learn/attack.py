"""Attacks on the compute of adaptive models: one universal patch, learned on a frozen victim (SlowFormer, Navaneet et
al., 2023, arXiv 2310.02544).

The objective's model is the victim, the patch its only trainable parameter.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.data.batch import Batch
from vitrail.learn.config import AttackConfig
from vitrail.learn.objective import Objective
from vitrail.learn.patch import Universal, UniversalPatch, UniversalPerturbation, make_change
from vitrail.model.adaptive.adavit import AdavitPolicy
from vitrail.model.adaptive.ats import AtsPolicy
from vitrail.model.adaptive.avit import AvitPolicy
from vitrail.model.adaptive.trace import Trace
from vitrail.model.classifier import Classifier

__all__ = ["Attack", "UniversalPatch", "UniversalPerturbation", "attack_losses", "compute_loss", "refuse_unfit"]


class Attack(Objective):
    """Minimise `attack_losses` over the pixels of the patch alone.

    The victim is in evaluation mode, gets no gradients and keeps its weights; a checkpoint holds the patch and the
    victim's hash. The learning rate is in standard deviations of normalised images (see `Universal`). Raises
    `ValueError` for a victim that cannot be attacked.
    """

    frozen = ("model",)

    def __init__(self, model: Classifier, config: AttackConfig) -> None:
        super().__init__()
        refuse_unfit(model, config)
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
        found = policy.losses(trace)
        sign = 1.0 if config.prior == "thesis" else -1.0
        return -(found["ponder"] + sign * found["prior"]) / policy.config.ponder
    assert isinstance(policy, AdavitPolicy)
    shares = torch.stack([trace.losses[name] for name in ("patches", "heads", "branches")])  # [3, batch]
    shares = shares.mean(1) if policy.config.usage_of == "batch" else shares
    return -(shares.square().sum(0).mean())


def refuse_unfit(model: Classifier, config: AttackConfig) -> None:
    """Raises `ValueError`, one sentence, where a model cannot be a victim."""
    policy = model.policy
    if policy is None:
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
        before = policy.differentiable
        policy.differentiable = True
        return {"differentiable": before}
    if (
        isinstance(policy, AtsPolicy) and policy.config.form == "packed"
    ):  # packed batches never compute the class token's row
        config = policy.config
        policy.config = replace(config, form="auto")
        return {"config": config}
    return {}


def _task(model: Classifier, logits: Tensor, label: Tensor) -> Tensor:
    if model.multilabel:
        return F.binary_cross_entropy_with_logits(logits, label.float())
    return F.cross_entropy(logits, label)
