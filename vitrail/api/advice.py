"""Advice to the user where no setting is invalid: before a run, and on its results."""

from __future__ import annotations

import torch

from vitrail.config import RunConfig
from vitrail.data.source import DataSet
from vitrail.learn.config import AttackConfig
from vitrail.measure.evaluate import Predictions
from vitrail.model.config import OWN_TEXT
from vitrail.model.heads.config import Distilled
from vitrail.model.zoo import ZOO

FEW_IMAGES = 2000  # below this a transformer from scratch mostly memorises
FEW_STEPS, SMALL_BATCH = 3, 16  # an epoch of fewer steps is said, and this batch advised
HIGH_RATES = {  # optimiser -> learning rate from which a model seldom learns anything, and one that is usual
    "adam": (0.01, 1e-3),
    "adamw": (0.01, 1e-3),
    "lamb": (0.05, 4e-3),
    "muon": (0.2, 0.02),
    "sgd": (5.0, 0.1),
    "adagrad": (0.5, 0.01),
}


def before_training(config: RunConfig, data: DataSet, parameters: int, tuned: int, peak: float) -> list[str]:
    """What a person should hear before a run, though nothing is wrong; `peak` is the learning rate that is reached."""
    said = []
    count, adapter = len(data["train"]), config.model.adapter
    if adapter is not None:
        said.append(f"{adapter.kind}: {tuned:,} numbers are trained, {parameters:,} parameters stay as they are")
        if config.model.weights == "none":
            said.append(
                "warning: model.weights is none, so the adapter changes random weights; give a run or file to adapt one"
                " that was trained"
            )
    elif config.optim.tune != "full":
        said.append(f"tune {config.optim.tune}: {tuned:,} of {parameters:,} parameters are trained")
    elif config.model.name.startswith("text:") and config.model.name not in OWN_TEXT and config.model.weights == "none":
        said.append(
            f"warning: weights of {config.model.name} are not read and training begins from random ones; "
            "--model.weights hub reads them"
        )
    elif config.model.weights == "none" and count < FEW_IMAGES and parameters > 1_000_000:
        said.append(
            f"warning: {count} training {data.things} are few for {parameters / 1e6:.1f} M parameters from scratch; "
            "start from weights (vitrail train finetune, or --model.weights timm|RUN|PATH)"
        )
    if count < FEW_STEPS * config.data.batch and config.data.batch > 2 * SMALL_BATCH:
        said.append(
            f"warning: {count} training {data.things} are {count / config.data.batch:.2g} batches of "
            f"{config.data.batch}, so that an epoch has hardly a step; set --data.batch {SMALL_BATCH}"
        )
    own, chosen = ZOO.get(config.model.name), config.model.head
    if own is not None and isinstance(own.head, Distilled) and chosen is not None and not isinstance(chosen, Distilled):
        said.append(
            f"warning: model.head {chosen.kind} replaces what {config.model.name} is named for; keep its distillation "
            "token with --model.head.kind distilled"
        )
    learns_weights = not isinstance(config.objective, AttackConfig)  # a patch wants another rate
    learns_weights = learns_weights and (adapter is None or adapter.kind == "lora")  # as do coefficients
    high, usual = HIGH_RATES[config.optim.name]
    if learns_weights and config.optim.tune != "head" and peak >= high:
        scaled = "" if peak == config.optim.lr else f" ({config.optim.lr:g} scaled to a batch of {config.data.batch})"
        said.append(f"warning: a learning rate of {peak:g}{scaled} is high for {config.optim.name}; {usual:g} is usual")
    return said


def one_answer(predictions: Predictions, data: DataSet) -> list[str]:
    """A sentence where a model says the same of every image; several labels are not judged."""
    said = predictions.logits.argmax(1).unique() if not predictions.multilabel else torch.empty(0)
    if len(said) != 1 or len(predictions) < 2:
        return []
    return [
        f"warning: all {len(predictions):,} {data.things} are taken for {data.classes[int(said)]!r}, so nothing was "
        "learned; train longer, or with another optim.lr"
    ]
