"""Adversarial training: patches learned against the current model are pasted on training images from then on (the
defence of SlowFormer, Navaneet et al., 2023, arXiv 2310.02544)."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from vitrail.data.batch import Batch
from vitrail.learn.attack import as_victim, attack_losses, make_change, reject_unfit
from vitrail.learn.attack_config import DefenceConfig
from vitrail.learn.objective import Objective, TrainingFacts
from vitrail.learn.supervised import Supervised
from vitrail.model.classifier import Classifier


class PatchTraining(Supervised):
    """Labels, and the model's own losses, on images that carry one of a growing set of patches.

    After every `every` steps the model of that moment is attacked on the images of the last step, and the patch joins
    the set. Each step pastes one of the set, the same on the whole batch, drawn evenly by (seed, step); before there is
    one, images stay as they are. Patches are part of a checkpoint. Raises `ValueError` for a model that cannot be
    attacked and for a run too short for a first patch.

    Published attacks take new images for each of their iterations; here they see one batch, since an objective sees no
    other, so it should be large.
    """

    patches: Tensor
    chosen: Tensor
    pasted: Tensor

    def __init__(
        self, model: Classifier, config: DefenceConfig, labels: NDArray[np.int64] | None = None, steps: int = 1
    ) -> None:
        super().__init__(model, config.labels, labels)
        reject_unfit(model, config.attack)
        self.room = (steps - 1) // config.every  # one that is made after the last step would never be seen
        if self.room < 1:
            raise ValueError(
                f"objective.every: a patch every {config.every} steps, but the run has {steps}; use fewer, or none at "
                "all would be made"
            )
        self.options = config
        self.change = make_change(config.attack, model.preprocess).requires_grad_(False)
        self.register_buffer("patches", torch.zeros(self.room, *self.change.shape, dtype=torch.int16))
        self.register_buffer("chosen", torch.zeros(1, dtype=torch.int64))
        self.register_buffer("pasted", torch.zeros((), dtype=torch.bool))
        self.last: Batch | None = None

    @classmethod
    def build(cls, model: Classifier, config: DefenceConfig, facts: TrainingFacts) -> Objective:
        return cls(model, config, facts.counted(config.labels), facts.steps)

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        # What changes from step to step lies in tensors that `after_step` fills: this is the same work in every step.
        self.last = batch
        images = self.model._images(batch.images)
        levels = self.patches.index_select(0, self.chosen)[0].to(torch.float32)
        images = torch.where(self.pasted, self.change.paste(images, levels), images)
        # A step that is read here would be compiled into the graph, and every step another one.
        return super().forward(replace(batch, views=(images, *batch.views[1:]), step=0))

    def after_step(self, step: int) -> None:
        number, rest = divmod(step + 1, self.options.every)
        if rest == 0 and 1 <= number <= self.room:
            assert self.last is not None
            self.patches[number - 1] = self.attack(self.last, self.options.attack.seed + number)
        self._draw(step + 1, min(number, self.room))

    def _draw(self, step: int, existing: int) -> None:
        """Choose what `step` pastes."""
        rng = np.random.default_rng((self.options.attack.seed, step))
        clean = rng.random() < self.options.clean
        self.pasted.fill_(existing > 0 and not clean)
        self.chosen.fill_(int(rng.integers(max(1, existing))))

    def attack(self, batch: Batch, seed: int) -> Tensor:
        """Levels [3, height, width] of a patch that makes the model as it is now spend the most on these images."""
        change = copy.deepcopy(self.change)
        change.set_levels(change.drawn(seed))
        change.value.requires_grad_(True)
        optimizer = torch.optim.AdamW([change.value], lr=self.options.inner_lr, weight_decay=0.0)
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        with as_victim(self.model), torch.enable_grad():
            for _ in range(self.options.inner_steps):
                loss = attack_losses(self.model, change, self.options.attack, batch)["loss"]
                (gradient,) = torch.autograd.grad(loss, [change.value])
                gradient = gradient.nan_to_num(0.0, 0.0, 0.0)
                if several:  # every process attacks on its own images, and all must have the same patch
                    dist.all_reduce(gradient)
                    gradient /= dist.get_world_size()
                change.value.grad = gradient
                optimizer.step()
                change.project()
        return change.levels
