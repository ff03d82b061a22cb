"""Toy detection: the one box of each image, predicted from patch tokens.

Attention transfer was also evaluated on COCO detection (Li et al., 2024, arXiv 2411.09702); `synthetic:shapes` with one
object per image is the smallest task of that kind. A detector is a classifier whose four "logits" are the sides of a
box, so every objective of classifiers trains it, attention transfer included.

    vitrail train small-mae --data "synthetic:shapes?size=32&n=10000" --model.name vit_tiny_32 --model.drop_path 0 \\
      --model.trunk.depth 8 --model.trunk.heads 6 --optim.epochs 150 --out runs/mae-shapes
    python studies/boxes.py runs/mae-shapes [--seeds 3] [--steps N]

trains detectors of 800 pictures for 80 epochs: from scratch, from the weights of that autoencoder, and by its attention
in six of eight layers; settings are those of attention-transfer.yaml, with the learning rates that it chose.

boxes [batch, 4]: left, top, right, bottom in sides of the picture
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from vitrail.compare.study import read_study
from vitrail.data.batch import Batch
from vitrail.data.config import AugmentConfig, PreprocessConfig
from vitrail.data.dataset import Split
from vitrail.data.loading.loader import EvalLoader
from vitrail.learn.attention_teacher import Source, load_source
from vitrail.learn.attention_transfer import AttentionTransfer
from vitrail.learn.config import AttentionTransferConfig, SupervisedConfig
from vitrail.learn.supervised import Supervised
from vitrail.learn.teacher import reject_moving_views
from vitrail.measure.evaluator import Findings, Loaders, Model, Where, evaluator, predict_all
from vitrail.model.classifier import Classifier
from vitrail.model.heads.head import Head
from vitrail.model.parts.tokens import Tokens
from vitrail.model.trunks.vit import Trunk
from vitrail.recipes import with_values

PICTURES, KNOWN = "synthetic:shapes?size=32&n=10000", 800  # pictures in all, and those whose boxes are known
SIDES = ("left", "top", "right", "bottom")
RATES = {"scratch": 5e-4, "tune": 1.5e-3, "distill": 1.5e-3}
STILL = {"crop": "evaluation", "flip": 0.0, "mixup": 0.0, "cutmix": 0.0}  # boxes stay where they are


def box_table(split: Split, preprocess: PreprocessConfig) -> NDArray[np.float32]:
    """[largest index + 1, 4] left, top, right, bottom in sides of the picture; NaN where no image has that index.

    Raises `ValueError` where a split has no boxes, or where preprocessing would move them.
    """
    if split.boxes is None:
        raise ValueError(f"{split.name} has no boxes to learn from; synthetic:shapes has one for every picture")
    side, size = preprocess.size, split.read(0).size
    if size != (side, side) or preprocess.crop_ratio < 1:
        raise ValueError(
            f"boxes are in pixels of pictures of {size[0]}x{size[1]}, and a model that takes {side}x{side} (crop ratio "
            f"{preprocess.crop_ratio:g}) sees them elsewhere; use synthetic:shapes?size={side} and data.crop_ratio 1"
        )
    table = np.full((int(split.index.max()) + 1, 4), np.nan, np.float32)
    table[split.index] = split.boxes / side
    return table


class BoxHead(Head):
    """Patch tokens to one box, [batch, 1, 4]: one linear layer, so that all else must come from the trunk.

    Every patch predicts how far from its middle the four sides are, and a weight: the box is the mean of the
    predictions under the softmax of the weights.
    """

    edge_layers = ("guess",)
    middles: Tensor

    def __init__(self, width: int, grid: tuple[int, int], prefix: int) -> None:
        super().__init__()
        self.prefix, self.features = prefix, width
        self.guess = nn.Linear(width, 5)
        nn.init.trunc_normal_(self.guess.weight, std=0.02)
        nn.init.zeros_(self.guess.bias)
        rows, columns = ((torch.arange(n) + 0.5) / n for n in grid)
        place = torch.cartesian_prod(rows, columns).reshape(-1, 2).flip(1)  # x, y of every patch, in raster order
        self.register_buffer("middles", torch.cat([place, place], 1), persistent=False)

    def _guesses(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        found = self.guess(tokens.patches).float()  # bf16 has too few digits for places of whole pictures
        return found[..., :4] + self.middles, found[..., 4].softmax(1)

    def forward(self, tokens: Tokens) -> Tensor:
        sides, weights = self._guesses(tokens)
        return (weights[..., None] * sides).sum(1)[:, None]

    def embed(self, tokens: Tokens) -> Tensor:
        weights = self._guesses(tokens)[1]
        return (weights[..., None] * tokens.patches).sum(1)


def detector(model: Classifier) -> Classifier:
    """The same trunk, weights included, under a new box head; `detector(model)(images)` gives boxes [batch, 4].

    It is not made to be saved: no name of a head stands for it. Raises `ValueError` for a trunk without patches.
    """
    trunk = model.trunk
    if not isinstance(trunk, Trunk):
        raise ValueError("boxes are guessed from the patches of a trunk of ours; use a ViT (vit_*, deit_*)")
    head = BoxHead(trunk.width, trunk.grid, trunk.prefix).to(next(model.parameters()).device)
    spec = {**model.spec, "head": {"kind": "boxes"}}
    return Classifier(trunk, head, spec=spec, classes=SIDES, preprocess=model.preprocess).train(model.training)


class Boxes(Supervised):
    """The mean distance of the four sides from where they are: boxes of the split `known`, by stable index.

    Raises `ValueError` where pictures have no boxes, or `augment` would move them.
    """

    boxes: Tensor

    def __init__(self, model: Classifier, known: Split, augment: AugmentConfig) -> None:
        super().__init__(model, SupervisedConfig())
        self._know(known, augment)

    def _know(self, known: Split, augment: AugmentConfig) -> None:
        reject_moving_views(augment)
        self.register_buffer("boxes", torch.from_numpy(box_table(known, self.model.preprocess)), persistent=False)

    def criterion(self, logits: Tensor, target: Tensor) -> Tensor:
        return F.l1_loss(logits.float(), target)

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        return super().forward(replace(batch, target=self.boxes[batch.index]))


class BoxTransfer(Boxes, AttentionTransfer):
    """Boxes in place of labels, and the attention of a teacher."""

    def __init__(
        self, model: Classifier, config: AttentionTransferConfig, teacher: Source, known: Split, augment: AugmentConfig
    ) -> None:
        AttentionTransfer.__init__(self, model, config, teacher)
        self._know(known, augment)


def box_iou(first: Tensor, second: Tensor) -> Tensor:
    """Intersection over union [...] of pairs of boxes [..., 4]: left, top, right, bottom.

    A box whose right is left of its left, or whose bottom is above its top, is empty: 0 with any other.

    >>> box_iou(torch.tensor([0.0, 0, 2, 2]), torch.tensor([1.0, 0, 3, 2]))
    tensor(0.3333)
    """
    low, high = torch.maximum(first[..., :2], second[..., :2]), torch.minimum(first[..., 2:], second[..., 2:])
    common = (high - low).clamp(min=0).prod(-1)
    areas = [(box[..., 2:] - box[..., :2]).clamp(min=0).prod(-1) for box in (first, second)]
    union = areas[0] + areas[1] - common
    return torch.where(union > 0, common / union, 0.0)


@evaluator()
def evaluate_boxes(model: Model, data: Loaders, **where: Unpack[Where]) -> Findings:
    """Mean intersection over union, and the share of pictures where it is at least one half.

    `model` gives boxes [batch, 4] in sides of the picture. Raises `ValueError` where pictures have no boxes.
    """
    loader = data.loaders[data.split]
    assert isinstance(loader, EvalLoader), "boxes are known for the pictures of a split"
    truth = torch.from_numpy(box_table(loader.split, loader.preprocess.config))
    said = predict_all(model, loader, **where)
    if said.logits.shape[1:] != (4,):
        raise ValueError(f"a box has four sides, and the model gives {said.logits.shape[1]} numbers; use a detector")
    found = box_iou(said.logits.double(), truth[said.index].double())
    numbers = {"mean_iou": float(found.mean()), "iou_50": float((found >= 0.5).double().mean())}
    return {"numbers": numbers, "tables": {}, "pictures": {}}


def train_detector(runs: Any, name: str, seed: int, autoencoder: str, steps: int | None) -> dict[str, float]:
    """Metrics on test pictures of a detector trained in one of three ways."""
    study = read_study(Path(__file__).with_name("attention-transfer.yaml"))
    weights = autoencoder if name == "tune" else "none"
    changes = {"optim.lr": RATES[name], "data.batch": 100, "optim.epochs": 80.0, "model.weights": weights}
    config = with_values(study.configs["tune" if name == "tune" else "scratch"], {**changes, "optim.steps": steps})
    augment = replace(config.data.augment, **STILL)  # type: ignore[arg-type]
    config = replace(config, data=replace(config.data, uri=PICTURES, limit=None, augment=augment))
    known = runs.data["train"]

    def objective(model: Classifier) -> Boxes:
        if name != "distill":
            return Boxes(detector(model), known, augment)
        transfer = AttentionTransferConfig(teacher=autoencoder, mode="distill", layers="first:6")
        return BoxTransfer(detector(model), transfer, load_source(autoencoder, model), known, augment)

    model = runs.trained(config, seed, compiled=False, objective=objective)[0].model
    loaders = Loaders(SIDES, {"test": runs.loader("test", model)}, "test")
    return evaluate_boxes(model, loaders, autocast=runs.autocast)["numbers"]  # type: ignore[no-any-return]


def main() -> None:
    from device_runs import DeviceRuns
    from row_table import Rows

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("autoencoder", help="run folder")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="of training, in place of 80 epochs")
    options = parser.parse_args()
    runs, rows = DeviceRuns(PICTURES, limit=KNOWN), Rows()
    for name, seed in product(RATES, range(options.seeds)):
        make = partial(train_detector, runs, name, seed, options.autoencoder, options.steps)
        rows.row("boxes", name, seed, make)
    print(rows.markdown())


if __name__ == "__main__":
    main()
