"""Whole runs without labels equal plain loops that know nothing of banks, slow copies or steps: weights and losses."""

from __future__ import annotations

import copy
from collections import deque

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.config import OptimConfig
from vitrail.data.batch import Batch
from vitrail.engine.optimizer import make_schedule
from vitrail.engine.step import TrainStep
from vitrail.learn.config import ByolConfig, CmsfConfig, IsdConfig, MocoConfig, MsfConfig, ObjectiveConfig
from vitrail.learn.objective import TrainingFacts, build_objective
from vitrail.learn.selfsupervised import MomentumPair
from vitrail.model.build import create_model
from vitrail.model.classifier import Classifier

COUNT, IMAGES, CLASSES, STEPS, ROWS = 10, 40, 3, 9, 24
OPTIM = OptimConfig(name="sgd", lr=0.3, momentum=0.9, nesterov=False, weight_decay=0.01, warmup=0, epochs=5)
CONFIGS: dict[str, ObjectiveConfig] = {
    "byol": ByolConfig(predictor_hidden=16, momentum=0.9),
    "moco": MocoConfig(bank=ROWS, momentum=0.9, temperature=0.2),
    "isd": IsdConfig(bank=ROWS, predictor_hidden=16, momentum=0.9, temperature=0.2, teacher_temperature=0.05),
    "msf": MsfConfig(bank=ROWS, predictor_hidden=16, momentum=0.9, k=4),
    "cmsf": CmsfConfig(bank=ROWS, predictor_hidden=16, momentum=0.9, k=4, constraint="supervised"),
}


def batch_of(step: int) -> Batch:
    """Images that come by again, each seen as itself and some noise."""
    known = torch.Generator().manual_seed(100)
    images = torch.randn(IMAGES, 3, 28, 28, generator=known)
    rows = (torch.arange(COUNT) + step * COUNT) % IMAGES
    noise = torch.Generator().manual_seed(step)
    views = tuple(images[rows] + 0.5 * torch.randn(COUNT, 3, 28, 28, generator=noise) for _ in range(2))
    return Batch(views, rows % CLASSES, rows % CLASSES, rows, step=step)


def begun(name: str) -> MomentumPair:
    torch.manual_seed(1)
    head = {"kind": "projected", "width": 8, "hidden": 16, "norm": True}
    model = create_model("vit_micro_28", classes=CLASSES, depth=1, width=16, heads=2, head=head)
    facts = TrainingFacts(np.arange(IMAGES) % CLASSES, np.arange(IMAGES), STEPS)
    made = build_objective(CONFIGS[name], model, facts)
    assert isinstance(made, MomentumPair)
    return made


def loss_of(name: str, online: Tensor, target: Tensor, labels: Tensor, memory: deque[tuple[Tensor, int]]) -> Tensor:
    """One image at a time, over a list of (embedding, label), the oldest first."""
    losses = []
    if name in ("msf", "cmsf"):
        memory.extend((t, int(label)) for t, label in zip(target, labels, strict=True))
    first = len(memory) - len(target)
    for i, (said, own, label) in enumerate(zip(online, target, labels, strict=True)):
        if name == "byol":
            losses.append((said - own).square().sum())
            continue
        if name in ("msf", "cmsf"):
            allowed = [j for j, (_, other) in enumerate(memory) if name == "msf" or other == int(label)]
            near = sorted(allowed, key=lambda j: -1.0 if j == first + i else float((memory[j][0] - own).norm()))
            losses.append(torch.stack([(said - memory[j][0]).square().sum() for j in near[:4]]).mean())
            continue
        rows = torch.stack([row for row, _ in memory])
        if name == "moco":
            logits = torch.cat([(said @ own)[None], rows @ said]) / 0.2
            losses.append(F.cross_entropy(logits[None], torch.zeros(1, dtype=torch.int64)))
        else:
            p, q = (rows @ own / 0.05).softmax(0), (rows @ said / 0.2).log_softmax(0)
            losses.append((p * (p.log() - q)).sum())
    if name in ("moco", "isd"):
        memory.extend((t, int(label)) for t, label in zip(target, labels, strict=True))
    return torch.stack(losses).mean()


def embedded(model: Classifier, images: Tensor) -> Tensor:
    return model.head.projector(model.head.pooled(model.tokens(images)))  # type: ignore[operator]


@pytest.mark.parametrize("name", CONFIGS)
def test_a_whole_run_is_that_of_a_plain_loop(name: str) -> None:
    """Order of pushing, searching and following; which view is whose; what is decayed: all of it shows in the end."""
    ours, plain = begun(name), begun(name)
    step = TrainStep(ours, OPTIM, make_schedule(OPTIM, COUNT, IMAGES), device=torch.device("cpu"))
    model, predictor, slow = plain.model.train(), plain.predictor.train(), copy.deepcopy(plain.model).train()
    memory: deque[tuple[Tensor, int]] = deque(maxlen=ROWS)
    if hasattr(plain, "bank"):
        memory.extend((row.clone(), -1) for row in plain.bank.rows)
    trained = nn.ModuleDict({"model": model, "predictor": predictor})
    named = {n: p for n, p in trained.named_parameters() if "head.fc" not in n}
    weights, momentum = list(named.values()), [torch.zeros_like(p) for p in named.values()]
    decay = [0.01 * (p.ndim > 1 and "pos_embed" not in n and "token" not in n) for n, p in named.items()]
    for number in range(STEPS):
        batch = batch_of(number)
        step.feed(batch)
        online = F.normalize(predictor(embedded(model, batch.views[1])), dim=-1)
        with torch.no_grad():
            target = F.normalize(embedded(slow, batch.views[0]), dim=-1)
        loss = loss_of(name, online, target, batch.label, memory)
        told = step.meter.read(step.group)["loss"]
        assert told == pytest.approx(float(loss.detach()), rel=2e-4, abs=2e-5), number
        gradients = torch.autograd.grad(loss, weights)
        with torch.no_grad():
            for p, g, m, share in zip(weights, gradients, momentum, decay, strict=True):
                m.mul_(0.9).add_(g + share * p)
                p.sub_(step.lr * m)
            for p, q in zip(slow.parameters(), model.parameters(), strict=True):
                p.copy_(0.9 * p + 0.1 * q)
    for (key, p), q in zip(ours.model.named_parameters(), model.parameters(), strict=True):
        if "head.fc" not in key:
            torch.testing.assert_close(p, q, rtol=2e-3, atol=2e-4, msg=lambda m, k=key: f"{k}: {m}")
    assert any(
        (p - q).abs().max() > 1e-2 for p, q in zip(model.parameters(), begun(name).model.parameters(), strict=True)
    )
