"""Models that are measured: by name, folder or object, with timm's model of the same architecture compared with them.

A model is called eager or optimized, for inference or for a whole training step, on random images or on those of a
data set, with an attacker's patch or without: the compute of an adaptive model depends on them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.data.batch import Batch
from vitrail.data.loading.loader import EvalLoader
from vitrail.data.open import open_data
from vitrail.data.preprocess import Preprocess
from vitrail.engine.config import OptimConfig
from vitrail.engine.optimizer import make_schedule
from vitrail.engine.step import WARM_UP_STEPS, TrainStep
from vitrail.learn.attack import load_patch
from vitrail.learn.config import SupervisedConfig
from vitrail.learn.supervised import Supervised
from vitrail.measure.compute import Change, spent
from vitrail.measure.speed import FRESH_SETS, Work
from vitrail.model.build import create_model
from vitrail.model.classifier import Classifier
from vitrail.model.config import TrunkConfig
from vitrail.model.cost import Cost, cost
from vitrail.model.timm_weights import to_timm
from vitrail.model.weights import load_model
from vitrail.model.zoo import ZOO
from vitrail.run.data_module import reads_texts
from vitrail.schema import near

Form = Literal["eager", "optimized"]
Call = Callable[[Tensor, Tensor], object]  # images [batch, 3, height, width], targets [batch] or [batch, classes]

OPTIM = OptimConfig(name="adamw", lr=1e-4, schedule="constant", warmup=0, steps=1_000_000)


@dataclass(frozen=True)
class Conditions:
    """The same for all models of one benchmark."""

    device: torch.device
    autocast: torch.dtype | None  # none: float32
    train: bool
    forms: tuple[Form, ...]

    def context(self) -> torch.autocast:
        return torch.autocast(self.device.type, self.autocast, enabled=self.autocast is not None)

    @property
    def dtype(self) -> torch.dtype:
        """Of the large products."""
        return self.autocast or torch.float32

    @property
    def warm_up(self) -> int:
        """Calls after which all that happens once has happened, the capture of a graph included."""
        return 1 if self.device.type == "cpu" else WARM_UP_STEPS + 2


@dataclass
class BenchSubject:
    """One model that is measured."""

    name: str
    module: nn.Module
    size: int  # of the images
    classes: int
    family: str = "vitrail"
    twin: str | None = None  # name of the timm model that is its reference
    multilabel: bool = False
    top1: float | None = None  # as its folder states
    data: str = ""  # that top1 was measured on
    batch: int = 0
    change: Change | None = None  # applied to its images
    macs: int | None = None  # per image, where it depends on the images and was measured
    work: dict[Form, Work] = field(default_factory=dict)  # of each form that is ready and warm
    peak_memory: dict[Form, int | None] = field(default_factory=dict)
    """Bytes of weights, one batch and all between; none where it is not measured."""

    @cached_property
    def cost(self) -> Cost:
        return cost(self.module, self.size)

    def targets(self, batch: int, device: torch.device) -> Tensor:
        """Random labels."""
        if self.multilabel:
            return torch.randint(2, (batch, self.classes), device=device).float()
        return torch.randint(self.classes, (batch,), device=device)


def make_call(model: nn.Module, form: Form, conditions: Conditions, multilabel: bool = False) -> Call:
    """A forward pass, or a training step.

    Our models are optimized by `Classifier.optimize` and trained by the engine's own step; timm's, as anybody would who
    has only PyTorch: `torch.compile`, autocast, fused AdamW.
    """
    if conditions.train:
        model = copy.deepcopy(model) if owns_weights(model, form, conditions) else model
        return (_engine_step if isinstance(model, Classifier) else _plain_step)(model, form, conditions, multilabel)
    model = model.eval()
    if form == "optimized" and isinstance(model, Classifier):
        optimized = model.optimize("bf16" if conditions.autocast is torch.bfloat16 else "float32", compile=True)
        return lambda images, _: optimized(images)
    forward = torch.compile(model, dynamic=False) if form == "optimized" else model

    def call(images: Tensor, _: Tensor) -> object:
        with torch.inference_mode(), conditions.context():
            return forward(images)

    return call


def owns_weights(model: nn.Module, form: Form, conditions: Conditions) -> bool:
    """Whether a form holds a copy of the weights: `optimize` makes one, a captured step wants no other beside it."""
    return form == "optimized" and (conditions.train or isinstance(model, Classifier))


def _engine_step(model: nn.Module, form: Form, conditions: Conditions, multilabel: bool) -> Call:
    assert isinstance(model, Classifier)
    assert model.multilabel == multilabel
    optimized = form == "optimized"
    step = TrainStep(
        Supervised(model, SupervisedConfig()),
        OPTIM,
        make_schedule(OPTIM, batch=1, images=1),
        device=conditions.device,
        autocast=conditions.autocast,
        compile=optimized,
        graph=optimized,
    )

    def call(images: Tensor, targets: Tensor) -> object:
        return step.feed(Batch((images,), targets, targets, index=targets if targets.ndim == 1 else targets[:, 0]))

    return call


def _plain_step(model: nn.Module, form: Form, conditions: Conditions, multilabel: bool) -> Call:
    forward = torch.compile(model.train(), dynamic=False) if form == "optimized" else model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=OPTIM.lr, betas=OPTIM.betas, fused=True)
    criterion = F.binary_cross_entropy_with_logits if multilabel else F.cross_entropy

    def call(images: Tensor, targets: Tensor) -> object:
        with conditions.context():
            loss = criterion(forward(images), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return call


def choose_subjects(
    names: Sequence[str],
    against: str | None,
    image_size: int | None,
    device: torch.device,
    models: Mapping[str, Classifier],
) -> tuple[list[BenchSubject], list[str]]:
    """Every named model once, each with its twin behind it where that is asked for; and notes for the reader.

    `models` has those that were given themselves; copies of them are measured.
    """
    subjects: dict[str, BenchSubject] = {}
    notes = []
    for name in dict.fromkeys(names):
        if name not in subjects:  # it may be another one's twin
            subjects[name] = load_subject(name, image_size, device, models.get(name))
        subject = subjects[name]
        if against is None or subject.family == "timm":
            continue
        subject.twin = None if name in models else twin_of(name)
        if subject.twin is None:
            known = name in ZOO and name not in models
            reason = "timm has no model of this architecture" if known else "only names of the zoo have one"
            notes.append(f"{name} has no timm twin: {reason}")
        elif subject.twin not in subjects:
            subjects[subject.twin] = twin(subject, device)
    return list(subjects.values()), notes


def load_subject(
    name: str, image_size: int | None, device: torch.device, model: Classifier | None = None
) -> BenchSubject:
    """A model of the zoo, of timm, of a folder, or a copy of `model`. Raises `ValueError` with near matches."""
    if model is not None:  # training steps change weights, and the model may be on another device
        model = copy.deepcopy(model)
    elif name.startswith("timm:"):
        return _timm_subject(name, image_size, device)
    elif name in ZOO:
        model = create_model(name, image_size=image_size, device=device)
    elif Path(name).exists():
        model = load_model(name, device)
    elif not name.startswith("text:"):
        raise ValueError(f"no model and no folder {name!r}{near(name, ZOO)} (`vitrail list models` names all)")
    if model is None or reads_texts(model):
        raise ValueError(
            f"{name} reads texts, and bench measures models of images; how fast it trained stands in metrics.jsonl of "
            "its run"
        )
    return BenchSubject(
        name,
        model.to(device),
        image_size or model.preprocess.size,
        len(model.classes),
        multilabel=model.multilabel,
        top1=model.stated.get("figures", {}).get("top1"),
        data=str(model.stated.get("data", "")),
    )


def _timm_subject(name: str, image_size: int | None, device: torch.device, **options: Any) -> BenchSubject:
    """timm's own module, without ours around it."""
    model = create_model(name, image_size=image_size, device=device, **options)
    return BenchSubject(name, to_timm(model), model.preprocess.size, len(model.classes), family="timm")


def twin_of(name: str) -> str | None:
    """timm's name of the same architecture, as `timm:NAME`; none where timm does not have it."""
    known = ZOO[name].timm if name in ZOO else None
    return None if known is None else f"timm:{known}"


def twin(subject: BenchSubject, device: torch.device) -> BenchSubject:
    """timm's model of the same architecture with the same image size, classes and drop path."""
    assert subject.twin is not None
    trunk = ZOO[subject.name].trunk
    options: dict[str, Any] = {"classes": subject.classes}
    if isinstance(trunk, TrunkConfig) and trunk.drop_path:
        options["drop_path_rate"] = trunk.drop_path
    return _timm_subject(subject.twin, subject.size, device, **options)


def with_attacked(subjects: Sequence[BenchSubject], folder: Path) -> list[BenchSubject]:
    """Every subject, and behind each adaptive model a second one, under the patch of `folder`.

    Raises `ValueError` where no model is adaptive or the patch does not fit one.
    """
    rows: list[BenchSubject] = []
    for subject in subjects:
        rows.append(subject)
        model = subject.module
        if isinstance(model, Classifier) and model.policy is not None:
            change = load_patch(folder, model.preprocess)[0].to(next(model.parameters()).device)
            rows.append(replace(subject, name=f"{subject.name}, attacked", change=change, work={}, peak_memory={}))
    if len(rows) == len(subjects):
        raise ValueError("--attack: every model named spends the same on every image; name an adaptive one")
    return rows


class RealImages:
    """Images of the test split (val where there is none) as each model sees them."""

    def __init__(self, uri: str) -> None:
        data = open_data(uri)
        if data.things != "images":
            raise ValueError(f"--data {uri} holds {data.things}, and bench measures on images; name a set of images")
        split = next((s for s in ("test", "val") if s in data.splits and len(data[s])), None)
        if split is None:
            raise ValueError(f"{uri} has neither test nor val images to measure on")
        self.rows = data[split]

    def __call__(self, subject: BenchSubject, device: torch.device) -> list[Tensor]:
        """Batches for a subject, with its patch; sets the subject's mean MACs on them where it is adaptive."""
        model = subject.module
        if not isinstance(model, Classifier):
            raise ValueError(f"{subject.name}: --data needs to know how images are prepared; name a model of ours")
        if subject.size != model.preprocess.size:
            raise ValueError(
                f"{subject.name}: --data is at the model's own {model.preprocess.size} pixels; leave image_size"
            )
        wanted = [i % len(self.rows) for i in range(subject.batch * FRESH_SETS)]
        rows = self.rows.take(wanted[: len(self.rows)])
        preprocess = Preprocess(model.preprocess)
        with EvalLoader(rows, preprocess, batch=subject.batch, device=device, workers=0) as loader, torch.no_grad():
            batches = [(model._images(batch.images), batch.label) for batch in loader]
            images, label = (torch.cat(parts) for parts in zip(*batches, strict=True))
            images = images if subject.change is None else subject.change(images)
        if model.policy is not None:
            index = torch.arange(len(images), device=images.device)
            parts = zip(*(t.split(subject.batch) for t in (images, label, index)), strict=True)
            subject.macs = round(spent(model, (Batch((x,), y, y, i) for x, y, i in parts)).macs)
        return list(images[torch.tensor(wanted, device=images.device)].split(subject.batch))
