"""Frozen teachers: classifiers with their cached outputs, and embedders, whose classes do not matter."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from vitrail.data.batch import Batch
from vitrail.data.config import AugmentConfig, PreprocessConfig
from vitrail.learn.bank import ImageMemory
from vitrail.model.assemble import class_names
from vitrail.model.build import create_model
from vitrail.model.classifier import Classifier
from vitrail.model.heads.pooled import ProjectedHead
from vitrail.model.store import read_tensors
from vitrail.model.trunks.cifar_resnet import load_reference
from vitrail.model.weights import load_model

# Fields of an augmentation that say how something is done and not that it is done.
SETTINGS = ("scale", "ratio", "padding", "rand_magnitude", "rand_style", "rand_std", "auto_policy", "mix_switch")


class Teacher(nn.Module):
    """A frozen classifier that sees a student's batch in its own normalisation and size.

    Bytes are normalised as the teacher wants them; floats, which the student's mean and deviation made, are brought to
    the teacher's. Where sizes differ the batch is then resized (bicubic, antialiased) on its device. Always in
    evaluation mode, without gradient, under whatever autocast surrounds it.
    """

    scale: Tensor
    shift: Tensor

    def __init__(self, model: Classifier, student: PreprocessConfig, name: str = "", size: int | None = None) -> None:
        super().__init__()
        self.model, self.name = model.requires_grad_(False), name
        teacher = model.preprocess
        self.size = size or teacher.size
        self.same = teacher.mean == student.mean and teacher.std == student.std
        moments = (student.mean, student.std, teacher.mean, teacher.std)
        mean_s, std_s, mean_t, std_t = (torch.tensor(v, dtype=torch.float64).view(3, 1, 1) for v in moments)
        # (x std_s + mean_s - mean_t) / std_t, as one gain and one shift.
        self.register_buffer("scale", (std_s / std_t).float(), persistent=False)
        self.register_buffer("shift", ((mean_s - mean_t) / std_t).float(), persistent=False)
        self.train(False)

    def train(self, mode: bool = True) -> Teacher:
        """A teacher never trains: its norms and drop-outs stay as at evaluation."""
        return super().train(False)

    def seen(self, images: Tensor) -> Tensor:
        """A student's batch [batch, 3, height, width] in the teacher's normalisation and size."""
        if images.dtype == torch.uint8:
            if images.shape[-2:] == (self.size, self.size):
                return images  # the classifier normalises it
            images = self.model._images(images)
        elif not self.same:
            images = images * self.scale + self.shift
        if images.shape[-2:] == (self.size, self.size):
            return images
        return F.interpolate(images, (self.size, self.size), mode="bicubic", antialias=True)

    def forward(self, images: Tensor) -> Tensor:
        """Logits [batch, classes] in float32."""
        with torch.no_grad():
            return cast("Tensor", self.model(self.seen(images))).float()


class TeacherCache(nn.Module):
    """Cached logits of a teacher for each image, by stable index, on the device.

    Rows fill as images come by. `complete` is decided on the host, between steps: from then on the teacher is not run.
    It is not part of checkpoints: a resumed run fills it again.
    """

    logits: Tensor
    known: Tensor

    def __init__(self, index: NDArray[np.int64], classes: int) -> None:
        super().__init__()
        rows = int(index.max()) + 1
        self.register_buffer("logits", torch.zeros(rows, classes), persistent=False)
        self.register_buffer("known", torch.zeros(rows, dtype=torch.bool), persistent=False)
        self.wanted = len(np.unique(index))
        self.complete = False

    def write(self, index: Tensor, logits: Tensor) -> None:
        """Store logits [batch, classes] of images [batch]."""
        self.logits[index] = logits
        self.known[index] = True

    def read(self, index: Tensor) -> Tensor:
        """Logits [batch, classes] of images [batch] that are known."""
        return self.logits[index]

    def look(self) -> None:
        """Check whether every image has come by (waits for the device)."""
        self.complete = int(self.known.sum()) == self.wanted


def load_teacher(name: str, student: Classifier, size: int | None = None) -> Classifier:
    """A teacher by name: a run or model folder, timm:NAME, or a weights file of a CIFAR ResNet.

    Raises one sentence where there is none, or where a published one has other classes than the student (before its
    weights are fetched).
    """
    if not name:
        raise ValueError("objective.teacher: name one: a run folder, timm:NAME, or a weights file of a CIFAR ResNet")
    if name.startswith("timm:"):
        return _published(name, student, size)
    if not Path(name).exists():
        raise FileNotFoundError(f"objective.teacher: no run or model folder, and no weights file, at {name}")
    return _cifar_resnet(Path(name)) if Path(name).is_file() else load_model(name)


def _published(name: str, student: Classifier, size: int | None) -> Classifier:
    import timm

    bare = name.removeprefix("timm:")
    settings = timm.get_pretrained_cfg(bare) if timm.is_model(bare) else None
    classes = 1000 if settings is None else settings.num_classes
    if not classes:
        raise ValueError(f"objective.teacher: the published {name} has no classifier; fine-tune it on this data first")
    reject_other_classes(class_names(classes), student.classes, name)
    return _timm(name, size, classes=classes)


def _timm(name: str, size: int | None, **options: Any) -> Classifier:
    try:
        return create_model(name, weights="timm", image_size=size, **options)
    except ValueError as error:
        raise ValueError(f"objective.teacher: {error}") from None


def _cifar_resnet(path: Path) -> Classifier:
    """The CIFAR ResNet whose weights a file of the usual ports holds; its depth is read from their names."""
    tensors = {name.removeprefix("module."): tensor for name, tensor in read_tensors(path).items()}
    count = len({name.split(".")[1] for name in tensors if name.startswith("layer1.")})
    if not count or "linear.weight" not in tensors:
        raise ValueError(
            f"objective.teacher: {path} holds no CIFAR ResNet; give a run or model folder, which say what they are"
        )
    bottleneck = "layer1.0.conv3.weight" in tensors
    model = create_model(
        "cifar_resnet20",
        depth=(9 if bottleneck else 6) * count + 2,
        block="bottleneck" if bottleneck else "basic",
        shortcut="project" if "layer2.0.shortcut.0.weight" in tensors else "pad",
        classes=len(tensors["linear.weight"]),
    )
    model.load_state_dict(load_reference(model.state_dict(), tensors))
    return model


def reject_other_classes(teacher: tuple[str, ...], student: tuple[str, ...], name: str) -> str | None:
    """Nothing where classes are the same; a note where only their number can be compared; else `ValueError`."""
    if teacher == student:
        return None
    if len(teacher) != len(student):
        what = f"has {len(teacher)} classes, the data have {len(student)}"
    elif class_names(len(student)) in (teacher, student):
        return f"note: only the number of classes of the teacher {name} could be compared, {len(teacher)}, not names"
    else:
        i, one, other = next((i, a, b) for i, (a, b) in enumerate(zip(teacher, student, strict=True)) if a != b)
        what = f"calls class {i} {one!r}, the data call it {other!r}"
    weights = "timm" if name.startswith("timm:") else name or "TEACHER"
    model = f" --model.name {name}" if name.startswith("timm:") else ""
    raise ValueError(
        f"objective.teacher: {name or 'the teacher'} {what}; fine-tune the teacher on this data first "
        f"(vitrail train finetune --data DATA{model} --model.weights {weights}) and name that run as the teacher"
    )


def reject_moving_views(augment: AugmentConfig | None) -> None:
    """Raises `ValueError` unless an image is the same every time it is drawn."""
    if augment is None:
        raise ValueError("objective.cache: how images are augmented is not known here, so answers cannot be kept")
    fixed = vars(replace(AugmentConfig(), crop="evaluation", flip=0.0))
    moving = {n: value for n, value in vars(augment).items() if n not in SETTINGS and value != fixed[n]}
    if moving:
        changes = ", ".join(f"{name} {value}" for name, value in moving.items())
        remedy = " ".join(f"--data.augment.{name} {fixed[name]}" for name in moving)
        raise ValueError(
            f"objective.cache: answers can be kept only where an image always looks the same, but {changes} change it; "
            f"use {remedy}, or leave cache out"
        )


LOOK_EVERY = 16  # steps between checks whether every embedding is cached


def load_embedder(name: str, student: Classifier, size: int | None = None) -> Classifier:
    """A teacher by name, as for distillation, but a published one may have any classes, or none."""
    return _timm(name, size) if name.startswith("timm:") else load_teacher(name, student, size)


def features(model: Classifier, images: Tensor) -> Tensor:
    """Features of the trunk, [batch, width]: before a projector, which served its own training only."""
    tokens = model.tokens(images)
    return model.head.pooled(tokens) if isinstance(model.head, ProjectedHead) else model.head.embed(tokens)


class Embedder(nn.Module):
    """The teacher's embeddings of a batch [batch, width], in float32 and without gradient.

    With `index`, the stable indices of all training images, each is computed once, and that of an image's first
    view is cached (CompRess, arXiv 2010.14713, caches the un-augmented image's, which batches do not carry). The cache
    is stored in checkpoints, so a resumed run continues as it would have.
    """

    def __init__(
        self,
        teacher: Classifier,
        student: Classifier,
        name: str = "",
        size: int | None = None,
        index: NDArray[np.int64] | None = None,
    ) -> None:
        super().__init__()
        self.teacher = Teacher(teacher, student.preprocess, name, size)
        side = self.teacher.size
        with torch.no_grad():  # one small pass gives the width, and rejects sizes that the teacher cannot take
            probe = self.teacher.seen(torch.zeros(1, 3, side, side, dtype=torch.uint8))
            self.width = features(self.teacher.model, probe).shape[1]
        self.cache = None if index is None else ImageMemory(index, self.width, empty=True)
        self.complete = False

    def ask(self, images: Tensor) -> Tensor:
        with torch.no_grad():
            return features(self.teacher.model, self.teacher.seen(images)).float()

    def forward(self, batch: Batch) -> Tensor:
        if self.cache is None:
            return self.ask(batch.images)
        kept = self.cache.rows[self.cache.where(batch.index)]
        if self.complete:
            return kept
        embedding = torch.where(self.cache.known(batch.index)[:, None], kept, self.ask(batch.images))
        self.cache.update(batch.index, embedding, share=1.0)
        return embedding

    def after_step(self, step: int) -> None:
        """Check now and then whether every image is known (waits for the device)."""
        if self.cache is not None and not self.complete and (step + 1) % LOOK_EVERY == 0:
            self.complete = bool(self.cache.rows.any(1).all())
