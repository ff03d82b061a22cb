"""Schedules of learning rate and weight decay, trainable parameters and their groups, and the optimiser."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.engine.config import OptimConfig
from vitrail.engine.lamb import Lamb
from vitrail.engine.muon import Muon
from vitrail.model.classifier import Classifier
from vitrail.model.parts.modules import hidden_matrices


@dataclass(frozen=True)
class Schedule:
    """A run's length and its curves, all in optimiser steps."""

    config: OptimConfig
    steps: int  # length of the run
    warmup: int
    cooldown: int
    drop_every: int  # steps between the drops of the step schedule
    peak: float  # learning rate after warm-up, scaled by batch

    def lr(self, step: int) -> float:
        """Learning rate of a step (0 is the first)."""
        if step < self.warmup:
            start = min(self.config.warmup_lr, self.peak)
            return start + (self.peak - start) * (step + 1) / (self.warmup + 1)
        floor = min(self.config.floor, self.peak)
        if self.config.schedule == "constant":
            return self.peak
        if self.config.schedule == "step":
            return self.peak * self.config.step_factor ** ((step - self.warmup) // self.drop_every)
        length = max(1, self.steps - self.warmup - self.cooldown)
        done = min(1.0, (step - self.warmup) / length)
        if self.config.schedule == "linear":
            return floor + (self.peak - floor) * (1 - done)
        return floor + (self.peak - floor) * 0.5 * (1 + math.cos(math.pi * done))

    def weight_decay(self, step: int) -> float:
        """Weight decay of a step: constant, or on a cosine to its end value."""
        start, end = self.config.weight_decay, self.config.weight_decay_end
        if end is None:
            return start
        done = min(1.0, step / max(1, self.steps - 1))
        return end + (start - end) * 0.5 * (1 + math.cos(math.pi * done))


def make_schedule(config: OptimConfig, batch: int, images: int) -> Schedule:
    """The schedule of a run on `images` training images; epochs become steps here, once."""
    steps = config.steps or max(1, math.ceil(config.epochs * images / batch - 1e-9))

    def in_steps(epochs: float) -> int:
        return round(epochs * images / batch)

    return Schedule(
        config=config,
        steps=steps,
        warmup=min(in_steps(config.warmup), steps // 2),
        cooldown=min(in_steps(config.cooldown), steps // 2),
        drop_every=max(1, in_steps(config.step_every)),
        peak=config.lr * (batch / config.lr_batch if config.lr_batch else 1.0),
    )


DECOUPLED = ("adamw", "muon")  # whose weight decay is a factor on the weights, apart from the gradient
TOKENS = ("cls_token", "dist_token", "pos_embed", "class_token")


def choose_tuned(model: Classifier, tune: str) -> tuple[int, int]:
    """Freeze everything that `tune` leaves out; returns (trainable, total) parameters.

    full, head, last:N (the last N blocks, final norm and head), norm, bias, attention (each with the head). An adapter
    has frozen what it does not train already. Raises `ValueError` where the model has no such part.
    """
    if getattr(model, "adapters", None) is not None:
        from vitrail.model.adapters.apply import counts

        if tune != "full":
            raise ValueError(f"optim.tune: {tune}, but the model has an adapter, which says what is trained; use full")
        size = counts(model)
        return size.trained, size.base
    head = model.head_parameters()
    kind, _, count = tune.partition(":")
    layers = model.layers

    def tuned(name: str) -> bool:
        if kind == "full" or name in head:
            return True
        if kind == "last":
            return model.layer_of(name) > layers - 1 - int(count)
        if kind == "norm":
            return any(part.startswith(("norm", "bn", "ls")) for part in name.split("."))
        if kind == "bias":
            return name.endswith("bias")
        return kind == "attention" and (".attn." in name or ".attention." in name)

    if kind == "last" and int(count) > layers - 1:
        raise ValueError(f"optim.tune: last:{count}, but the model has {layers - 1} blocks")
    chosen = {name for name, _ in model.named_parameters() if tuned(name)}
    if kind in ("norm", "bias", "attention") and chosen == head:
        raise ValueError(f"optim.tune: {kind}, but the model has no such parameters; use head or full")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in chosen)
    sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
    return sum(n for n, on in sizes if on), sum(n for n, _ in sizes)


def decays(name: str, parameter: Tensor) -> bool:
    """Weight decay falls on matrices, filters, LoRA's factors and prompts, not on norms, biases, gains, other tokens or
    coefficients.

    A coefficient of NOLA or PRANC that is 0 is no simpler than another one, and NOLA (arXiv 2310.02556) has no
    decay on them. VPT (arXiv 2203.12119) decays its prompts and searches how much.
    """
    coefficient = of_adapter(name) and name.endswith((".alpha", ".beta"))
    return parameter.ndim > 1 and not any(token in name for token in TOKENS) and not coefficient


def of_adapter(name: str) -> bool:
    """Whether a parameter is an adapter's coefficient, factor or prompt; its classifier and norms are the model's."""
    return "adapters.named." in name and ".groups." in name


def parameter_groups(
    objective: nn.Module, config: OptimConfig, muon: Collection[str] | None = None
) -> list[dict[str, Any]]:
    """Trainable parameters of an objective by (layer, decayed, matrix of Muon, head), each with its
    share of the learning rate.

    The share is layer_decay ** (layers below the head), and `head_rate` for the head; parts of the objective outside
    its model (projectors), and adapters, take the full learning rate. With Muon, `hidden_matrices` says which
    weights are matrices; `muon` (of a resumed run) names them instead.
    """
    matrices = hidden_matrices(objective) if config.name == "muon" else {}
    if muon is not None:
        matrices = {name: matrices.get(name, 1) for name in muon}
    model = getattr(objective, "model", None)
    groups: dict[tuple[int, bool, bool, bool], dict[str, Any]] = {}
    deepest = model.layers if isinstance(model, Classifier) else 0
    head: set[str] = set()
    if isinstance(model, Classifier) and config.head_rate != 1:
        head = {f"model.{name}" for name in model.head_parameters()}
    for name, parameter in objective.named_parameters():
        if not parameter.requires_grad:
            continue
        layer = deepest
        in_model = name.startswith("model.") and not of_adapter(name)
        if isinstance(model, Classifier) and in_model and config.layer_decay < 1:
            layer = model.layer_of(name.removeprefix("model."))
        key = (layer, config.decay_all or decays(name, parameter), name in matrices, name in head)
        if key not in groups:
            share = config.head_rate if key[3] else config.layer_decay ** (deepest - layer)
            groups[key] = {
                "params": [],
                "names": [],
                "parts": [],
                "share": share,
                "decayed": key[1],
                "matrices": key[2],
            }
        groups[key]["params"].append(parameter)
        groups[key]["names"].append(name)
        groups[key]["parts"].append(matrices.get(name, 1))
    if not groups:
        raise ValueError("nothing to train: every parameter is frozen")
    return [groups[key] for key in sorted(groups)]


def build_optimizer(
    objective: nn.Module, config: OptimConfig, muon: Collection[str] | None = None
) -> torch.optim.Optimizer:
    """The optimiser of a run. Learning rates are device tensors, so that changing them never waits for the device.

    `muon` names the weights that Muon takes, where a checkpoint says so (none: by their role).
    """
    groups = parameter_groups(objective, config, muon)
    for group in groups:
        device = group["params"][0].device
        group["lr"] = torch.full((), config.lr, device=device)
        group["weight_decay"] = config.weight_decay if group["decayed"] else 0.0
        if config.weight_decay_end is not None and config.name in DECOUPLED:
            # Fused optimisers take it from the host; `Updater` applies the device's, which a graph can replay.
            group["decay"] = torch.full((), group["weight_decay"], device=device)
            group["weight_decay"] = 0.0
    common: dict[str, Any] = {"lr": torch.full((), config.lr, device=groups[0]["params"][0].device)}
    if config.name == "lamb":
        return Lamb(groups, betas=config.betas, eps=config.eps, **common)
    if config.name == "sgd":
        sgd = torch.optim.SGD(
            groups, momentum=config.momentum, nesterov=config.nesterov and config.momentum > 0, fused=True, **common
        )
        if config.momentum:  # torch creates it in the first step, which may be skipped
            for group in sgd.param_groups:
                for parameter in group["params"]:
                    sgd.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        return sgd
    if config.name == "adagrad":
        return torch.optim.Adagrad(groups, eps=config.eps, fused=True, **common)
    kind = torch.optim.AdamW if config.name == "adamw" else torch.optim.Adam
    on_cuda = common["lr"].is_cuda  # there, steps may be captured as a graph
    if config.name == "muon":
        adam = {"betas": config.betas, "eps": config.eps, "fused": True, "capturable": on_cuda, **common}
        return Muon(groups, momentum=config.momentum, **adam)
    return kind(groups, betas=config.betas, eps=config.eps, fused=True, capturable=on_cuda, **common)


def optimizer_shares(name: str, groups: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """How many parameters each optimiser takes: one entry, or those of Muon and of AdamW."""
    shares: dict[str, int] = {}
    for group in groups:
        taker = name if name != "muon" or group["matrices"] else "adamw"
        shares[taker] = shares.get(taker, 0) + sum(p.numel() for p in group["params"])
    return {taker: shares[taker] for taker in sorted(shares, key=lambda each: each != name)}


def describe_shares(shares: Mapping[str, int]) -> str:
    """One line for a log.

    >>> describe_shares({"muon": 5_308_416, "adamw": 47_588})
    'optimizer: muon 5,308,416 parameters, adamw 47,588'
    """
    first, *others = (f"{name} {count:,}" for name, count in shares.items())
    return ", ".join([f"optimizer: {first} parameters", *others])


def set_step(optimizer: torch.optim.Optimizer, schedule: Schedule, step: int) -> float:
    """Give every group the learning rate and weight decay of `step`; returns the learning rate."""
    lr, decay = schedule.lr(step), schedule.weight_decay(step)
    for group in optimizer.param_groups:
        group["lr"].fill_(lr * group["share"])
        if "decay" in group:
            group["decay"].fill_(decay if group["decayed"] else 0.0)
        else:
            group["weight_decay"] = decay if group["decayed"] else 0.0
    return lr
