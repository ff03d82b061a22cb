"""How a model is called when it is measured: eager or optimized, for inference or for a whole training step.

Who is measured: models by name or folder, and timm's model of the same architecture beside them.

Images of a data set for a benchmark, with a patch or without: what an adaptive model takes depends on them.
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
from vitrail.measure.speed import FRESH_SETS, Way
from vitrail.model.build import create_model
from vitrail.model.classifier import Classifier
from vitrail.model.config import TrunkConfig
from vitrail.model.cost import Cost, cost
from vitrail.model.store import load_model
from vitrail.model.timm_weights import to_timm
from vitrail.model.zoo import ZOO
from vitrail.run.data_module import reads_texts
from vitrail.schema import near

Form = Literal["eager", "optimized"]
Call = Callable[[Tensor, Tensor], object]  # images [batch, 3, height, width], targets [batch] or [batch, classes]

OPTIM = OptimConfig(name="adamw", lr=1e-4, schedule="constant", warmup=0, steps=1_000_000)


@dataclass(frozen=True)
class Conditions:
    """What is the same for all models of one benchmark."""

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


@dataclass(frozen=True)
class Ready:
    """A model made ready and warm in one form."""

    way: Way
    peak_memory: int | None  # bytes: weights, one batch and all between; none where it is not measured


def make_call(model: nn.Module, form: Form, conditions: Conditions, multilabel: bool = False) -> Call:
    """What one call does: a forward pass, or a training step.

    Our models are optimized by `Classifier.optimize` and trained by the engine's own step; timm's, as anybody would who
    has only PyTorch: `torch.compile`, autocast, fused AdamW.
    """
    if conditions.train:
        model = copy.deepcopy(model) if owns_weights(model, form, conditions) else model
        return (_engine_step if isinstance(model, Classifier) else _plain_step)(model, form, conditions, multilabel)
    return _forward(model.eval(), form, conditions)


def owns_weights(model: nn.Module, form: Form, conditions: Conditions) -> bool:
    """Whether a form holds a copy of the weights: `optimize` makes one, a captured step wants no other beside it."""
    return form == "optimized" and (conditions.train or isinstance(model, Classifier))


def _forward(model: nn.Module, form: Form, conditions: Conditions) -> Call:
    if form == "optimized" and isinstance(model, Classifier):
        optimized = model.optimize("bf16" if conditions.autocast is torch.bfloat16 else "float32", compile=True)
        return lambda images, _: optimized(images)
    run = torch.compile(model, dynamic=False) if form == "optimized" else model

    def once(images: Tensor, _: Tensor) -> object:
        with torch.inference_mode(), conditions.context():
            return run(images)

    return once


def _engine_step(model: nn.Module, form: Form, conditions: Conditions, multilabel: bool) -> Call:
    assert isinstance(model, Classifier)
    assert model.multilabel == multilabel
    fast = form == "optimized"
    step = TrainStep(
        Supervised(model, SupervisedConfig()),
        OPTIM,
        make_schedule(OPTIM, batch=1, images=1),
        device=conditions.device,
        autocast=conditions.autocast,
        compile=fast,
        graph=fast,
    )

    def once(images: Tensor, targets: Tensor) -> object:
        return step.feed(Batch((images,), targets, targets, index=targets if targets.ndim == 1 else targets[:, 0]))

    return once


def _plain_step(model: nn.Module, form: Form, conditions: Conditions, multilabel: bool) -> Call:
    run = torch.compile(model.train(), dynamic=False) if form == "optimized" else model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=OPTIM.lr, betas=OPTIM.betas, fused=True)
    criterion = F.binary_cross_entropy_with_logits if multilabel else F.cross_entropy

    def once(images: Tensor, targets: Tensor) -> object:
        with conditions.context():
            loss = criterion(run(images), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return once


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
    of: str = ""  # the data that this was of
    batch: int = 0
    change: Change | None = None  # laid on its images
    macs: int | None = None  # an image, where it depends on the images and was measured
    forms: dict[Form, Ready] = field(default_factory=dict)

    @cached_property
    def cost(self) -> Cost:
        return cost(self.module, self.size)


def twin_of(name: str) -> str | None:
    """timm's name of the same architecture, as `timm:NAME`; none where timm does not have it."""
    known = ZOO[name].timm if name in ZOO else None
    return None if known is None else f"timm:{known}"


def choose_subjects(
    names: Sequence[str],
    against: str | None,
    image_size: int | None,
    device: torch.device,
    given: Mapping[str, Classifier] | None = None,
) -> tuple[list[BenchSubject], list[str]]:
    """Every named model once, each with its twin behind it where that is asked for; and what a person should know.

    `given` has the models that are no names but themselves; copies of them are measured.
    """
    given = given or {}
    found: dict[str, BenchSubject] = {}
    notes = []
    for name in dict.fromkeys(names):
        if name not in found:  # a twin that was named, too
            own = given.get(name)
            found[name] = subject(name, image_size, device) if own is None else _copied(name, own, image_size, device)
        one = found[name]
        if against is None or one.family == "timm":
            continue
        one.twin = None if name in given else twin_of(name)
        if one.twin is None:
            named = name in ZOO and name not in given
            why = "timm has no model of this architecture" if named else "only names of the zoo have one"
            notes.append(f"{name} has no timm twin: {why}")
        elif one.twin not in found:
            found[one.twin] = twin(one, device)
    return list(found.values()), notes


def subject(name: str, image_size: int | None, device: torch.device) -> BenchSubject:
    """A model of the zoo, of timm, or of a folder. Raises `ValueError` with near matches."""
    if name.startswith("timm:"):
        return timm_subject(name, image_size, device)
    if name in ZOO:
        model = create_model(name, image_size=image_size, device=device)
    elif name.startswith("text:"):
        raise _reads_texts(name)
    elif Path(name).exists():
        model = load_model(name, device)
        if reads_texts(model):
            raise _reads_texts(name)
    else:
        raise ValueError(f"no model and no folder {name!r}{near(name, ZOO)} (`vitrail list models` names all)")
    return _of(name, model, image_size)


def _copied(name: str, model: Classifier, image_size: int | None, device: torch.device) -> BenchSubject:
    """A copy: training steps change weights, and the model may live elsewhere."""
    if reads_texts(model):
        raise _reads_texts(name)
    return _of(name, copy.deepcopy(model).to(device), image_size)


def _of(name: str, model: Classifier, image_size: int | None) -> BenchSubject:
    return BenchSubject(
        name,
        model,
        image_size or model.preprocess.size,
        len(model.classes),
        multilabel=model.multilabel,
        top1=model.stated.get("figures", {}).get("top1"),
        of=str(model.stated.get("data", "")),
    )


def _reads_texts(name: str) -> ValueError:
    return ValueError(
        f"{name} reads texts, and bench measures models of images; how fast it trained stands in metrics.jsonl of its "
        "run"
    )


def timm_subject(name: str, image_size: int | None, device: torch.device, **options: Any) -> BenchSubject:
    """timm's own module, without ours around it."""
    model = create_model(name, image_size=image_size, device=device, **options)
    return BenchSubject(name, to_timm(model), model.preprocess.size, len(model.classes), family="timm")


def twin(one: BenchSubject, device: torch.device) -> BenchSubject:
    """timm's model of the same architecture with the same image size, classes and drop path."""
    assert one.twin is not None
    trunk = ZOO[one.name].trunk
    options: dict[str, Any] = {"classes": one.classes}
    if isinstance(trunk, TrunkConfig) and trunk.drop_path:
        options["drop_path_rate"] = trunk.drop_path
    return timm_subject(one.twin, one.size, device, **options)


def attacked(chosen: Sequence[BenchSubject], folder: Path) -> list[BenchSubject]:
    """Every subject, and each adaptive model a second time behind itself, under the patch of `folder`.

    Raises `ValueError` where no model is adaptive or the patch does not fit one.
    """
    found: list[BenchSubject] = []
    for one in chosen:
        found.append(one)
        if isinstance(one.module, Classifier) and one.module.policy is not None:
            change = load_patch(folder, one.module.preprocess)[0].to(next(one.module.parameters()).device)
            found.append(replace(one, name=f"{one.name}, attacked", change=change, forms={}))
    if len(found) == len(chosen):
        raise ValueError("--attack: every model named spends the same on every image; name an adaptive one")
    return found


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

    def __call__(self, one: BenchSubject, device: torch.device) -> list[Tensor]:
        """Batches for a subject, changed as it says; its mean cost on them is noted where it is adaptive."""
        model = one.module
        if not isinstance(model, Classifier):
            raise ValueError(f"{one.name}: --data needs to know how images are prepared; name a model of ours")
        if one.size != model.preprocess.size:
            raise ValueError(
                f"{one.name}: --data is at the model's own {model.preprocess.size} pixels; leave image_size"
            )
        wanted = [int(i) % len(self.rows) for i in range(one.batch * FRESH_SETS)]
        rows = self.rows.take(wanted[: len(self.rows)])
        preprocess = Preprocess(model.preprocess)
        with EvalLoader(rows, preprocess, batch=one.batch, device=device, workers=0) as loader, torch.no_grad():
            read = [(model._images(batch.images), batch.label) for batch in loader]
            images, label = (torch.cat(parts) for parts in zip(*read, strict=True))
            images = images if one.change is None else one.change(images)
        if model.policy is not None:
            index = torch.arange(len(images), device=images.device)
            parts = zip(*(t.split(one.batch) for t in (images, label, index)), strict=True)
            one.macs = round(spent(model, (Batch((x,), y, y, i) for x, y, i in parts)).macs)
        return list(images[torch.tensor(wanted, device=images.device)].split(one.batch))
