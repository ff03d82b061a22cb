"""Decorrelation of Gramian heads: as strong beside every task loss as in the authors' pairing."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.data.batch import Batch
from vitrail.learn.config import SupervisedConfig
from vitrail.learn.supervised import Supervised
from vitrail.model.build import create_model
from vitrail.model.classifier import Outputs
from vitrail.model.heads.config import Gramian
from vitrail.model.parts.tokens import Tokens

TASKS = [
    SupervisedConfig(loss="bce"),
    SupervisedConfig(loss="bce", classifier_loss="mean"),
    SupervisedConfig(loss="bce", bce_sum=True),
    SupervisedConfig(),
    SupervisedConfig(classifier_loss="mean"),
]


def published_strength(stack: Tensor, target: Tensor) -> float:
    """The authors' pairing at the logits: both terms are means over images and classes, heads are summed."""
    anchor, dense = stack.detach().mean(1).softmax(-1), F.one_hot(target, stack.shape[-1]).float()
    apart = [-0.8 * F.kl_div(z.log_softmax(-1), anchor, reduction="sum") / z.numel() for z in stack.unbind(1)]
    task = [F.binary_cross_entropy_with_logits(z, dense) for z in stack.unbind(1)]
    slopes = [torch.autograd.grad(torch.stack(terms).sum(), stack)[0] for terms in (apart, task)]
    return float(slopes[0].norm() / slopes[1].norm())


@pytest.mark.parametrize("task", TASKS, ids=lambda t: f"{t.loss}-{t.classifier_loss}-{t.bce_sum}")
def test_decorrelation_is_as_strong_beside_every_loss_as_beside_the_authors(task: SupervisedConfig) -> None:
    """Norm of its gradient at the logits over that of the task, where five heads of 100 classes begin to differ."""
    generator = torch.Generator().manual_seed(0)
    shared, own = torch.randn(32, 1, 100, generator=generator), torch.randn(32, 5, 100, generator=generator)
    stack = (0.5 * shared + 0.63 * own - math.log(99) - 0.3).requires_grad_()
    target = torch.arange(32)
    assert published_strength(stack, target) == pytest.approx(0.057, rel=0.1)

    def slope(weight: float) -> Tensor:
        head = Gramian(decorrelation=weight, gram_width=16, attention_width=16, attention_heads=2, embed_groups=2)
        model = create_model("vit_tiny", classes=100, head=head, width=32, depth=1, heads=2, image_size=32)
        objective = Supervised(model, task)
        model.outputs = lambda images: Outputs(stack, Tokens(stack, 0, (1, 5)), model.head)
        loss = objective(Batch((torch.zeros(32, 3, 32, 32),), target, target, target))["loss"]
        return torch.autograd.grad(loss, stack)[0]

    alone = slope(0.0)
    assert float((slope(-0.8) - alone).norm() / alone.norm()) == pytest.approx(0.057, rel=0.2)
