"""Memory of a training run, estimated before it begins: what is stored, and what a step keeps for its backward pass.

Activations are counted in one forward pass of the objective on tensors without data (`FakeTensorMode`), which computes
nothing: autograd reports every tensor that it keeps. So autocast, fused attention, several views, teachers and frozen
layers count as they are. With activation checkpointing the inputs of blocks are kept, and what else a block keeps is
there while its own backward pass runs. It is an estimate of eager steps; `torch.compile` keeps less.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from vitrail.config import RunConfig, from_mapping
from vitrail.data.batch import Batch
from vitrail.data.dataset import DataSet, Split
from vitrail.engine.config import OptimConfig
from vitrail.engine.device import choose_device, training_precision
from vitrail.engine.optimizer import choose_tuned, make_schedule, parameter_groups
from vitrail.learn.objective import Objective, TrainingFacts, build_objective
from vitrail.model.assemble import class_names
from vitrail.model.build import create_model
from vitrail.model.parts.block import CheckpointedBlock
from vitrail.model.zoo import ZOO
from vitrail.quantities import duration, memory
from vitrail.run.run_data import open_run
from vitrail.run.train import Trainer, build_model

FLOATS = {"adamw": 2, "adam": 2, "lamb": 2, "adagrad": 1, "sgd": 1}  # of optimiser state, per parameter
LAMB_TEMPORARIES = 5  # copies of a parameter group while it is updated
MUON_TEMPORARIES = 3
SMALL_MODEL, SMALL_BATCH = 1_000_000, 2**23  # parameters; pixels. Below both, a run starts without an estimate
PLANNED_IMAGES = 10_000  # that stand for data which a plan does not name


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on the device of one process, in an eager training step."""

    parameters: int  # of the model that is trained, its buffers included
    gradients: int
    optimizer: int
    copies: int  # EMA weights, teachers, momentum encoders, projectors, memory banks, buckets of DDP
    images: int  # training images that stay on the device
    activations: int | None  # with the batch; none: not counted, for the reason in `note`
    backward: int  # the most that activations and gradients take together
    update: int  # gradients and temporaries of the optimiser and of the EMA
    batch: int  # images of a forward pass
    precision: str
    note: str = ""

    @property
    def peak(self) -> int | None:
        """The most that a step takes; none where activations were not counted."""
        stored = self.parameters + self.optimizer + self.copies + self.images
        return None if self.activations is None else stored + max(self.backward, self.update)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "peak": self.peak}

    def text(self) -> str:
        """One line, without the parts that a run does not have."""
        named = {"parameters": self.parameters, "gradients": self.gradients, "optimiser state": self.optimizer}
        named |= {"EMA, teachers and banks": self.copies, "training images": self.images}
        parts = [f"{name} {memory(size)}" for name, size in named.items() if size or name == "parameters"]
        if self.activations is None:
            return f"memory per process: {', '.join(parts)}; activations were not estimated: {self.note}"
        pass_of = f"{self.batch} images per pass, {self.precision}, eager; compiled steps take less"
        parts.append(f"activations {memory(self.activations)} of {pass_of}")
        return f"memory per process: about {memory(self.peak)} ({', '.join(parts)})"


def estimate_memory(
    objective: Objective,
    config: RunConfig,
    *,
    device: torch.device,
    autocast: torch.dtype | None,
    levels: int = 0,
    world: int = 1,
    images: int = 0,
) -> MemoryEstimate:
    """The memory of a training step of `objective`, which is neither moved nor changed, on one of `world` processes.

    `levels` are those of the data's taxonomy, `images` the bytes of training images that stay on the device.
    """
    pieces = config.engine.accumulate or 1
    model, trained = objective.model, [p for p in objective.parameters() if p.requires_grad]
    gradients = _size(trained)
    parameters = _size([*model.parameters(), *model.buffers()])
    average = parameters if config.engine.ema else 0
    others = _size([*objective.parameters(), *objective.buffers()]) - parameters
    buckets = gradients if world > 1 else 0
    optimizer, temporaries = _optimizer(objective, config.optim)
    batch = max(1, config.data.batch // (world * pieces))
    note = ""
    precision = "float32" if autocast is None else "bf16"
    activations: int | None = None
    backward = 0
    for place in dict.fromkeys((device, torch.device("cpu"))):  # our own kernels take no tensors without data
        try:
            activations, backward = _traced(objective, config, batch, place, autocast, levels, pieces)
            note = ""
            break
        except Exception as error:  # whatever it is, training can begin
            note = "they depend on the images" if "DataDependent" in type(error).__name__ else type(error).__name__
    update = max(gradients + temporaries, average)  # the average is updated when gradients are gone
    copies = average + others + buckets
    counted = (parameters, gradients, optimizer, copies, images, activations, backward, update, batch, precision)
    return MemoryEstimate(*counted, note)


def _size(tensors: Sequence[Tensor]) -> int:
    """Bytes of tensors, each counted once."""
    return sum(t.numel() * t.element_size() for t in {id(t): t for t in tensors}.values())


def _optimizer(objective: Objective, config: OptimConfig) -> tuple[int, int]:
    """Bytes of optimiser state, and of what an update allocates for its own time."""
    state, temporaries = 0, 0
    for group in parameter_groups(objective, config):
        size = _size(group["params"])
        if config.name == "muon":
            state += size * (1 if group["matrices"] else FLOATS["adamw"])
            temporaries = max(temporaries, MUON_TEMPORARIES * size if group["matrices"] else 0)
        elif config.name != "sgd" or config.momentum:
            state += size * FLOATS[config.name]
            temporaries = max(temporaries, LAMB_TEMPORARIES * size if config.name == "lamb" else 0)
    return state, temporaries


def _traced(
    objective: Objective,
    config: RunConfig,
    batch: int,
    device: torch.device,
    autocast: torch.dtype | None,
    levels: int,
    pieces: int,
) -> tuple[int, int]:
    """Bytes that a forward pass leaves behind, and the most that they and the gradients take during backward."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fake = _without_data(objective, mode, device)
    with torch.random.fork_rng(devices=[]), mode:
        examples = _batch(fake, config, batch, device, levels)
        stored = {*_storages(fake.parameters()), *_storages(fake.buffers()), *_storages(examples.tensors())}
        known, kept = set(stored), []  # storages are kept alive, so that none takes another's place
        events: list[tuple[int, tuple[Tensor, ...]]] = []  # bytes that autograd keeps, or parameters in use

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in known:
                known.add(storage._cdata)
                kept.append(storage)
                events.append((storage.nbytes(), ()))
            return tensor

        spans: dict[int, int] = {}  # of events inside blocks that are computed again: last -> first

        def enter(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            pack(getattr(inputs[0], "sequence", inputs[0]))
            spans[-1] = len(events)

        def leave(module: nn.Module, _: Any, __: Any) -> None:
            spans[len(events) - 1] = spans.pop(-1)

        for block in _computed_again(fake):
            block.register_forward_pre_hook(enter)
            block.register_forward_hook(leave)

        def used(module: nn.Module, _: Any, __: Any) -> None:
            if trained := tuple(p for p in module._parameters.values() if p is not None and p.requires_grad):
                events.append((0, trained))

        hook = nn.modules.module.register_module_forward_hook(used)
        try:
            with (
                torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
                torch.autocast(device.type, autocast, enabled=autocast is not None),
            ):
                fake(examples)
        finally:
            hook.remove()
        given = _size(examples.tensors())
        trained = [p for p in fake.parameters() if p.requires_grad]
    again = {last: sum(size for size, _ in events[first : last + 1]) for last, first in spans.items()}
    activations = sum(size for size, _ in events) - sum(again.values())
    gradients = _size(trained) if pieces > 1 else 0  # those of the pieces before
    now = most = activations + gradients
    seen: set[int] = set()
    for place, (size, parameters) in reversed(list(enumerate(events))):  # backward frees activations, makes gradients
        now += again.get(place, 0)
        fresh = [] if pieces > 1 else [p for p in parameters if id(p) not in seen]
        seen.update(map(id, fresh))
        now += _size(fresh) - size
        most = max(most, now)
    # Beside what is kept, the largest tensor's gradient.
    return given + activations, given + most + max((size for size, _ in events), default=0)


def _computed_again(objective: Objective) -> list[nn.Module]:
    """Blocks under activation checkpointing, which is switched off, so that what they keep is seen."""
    blocks: list[nn.Module] = [m for m in objective.modules() if isinstance(m, CheckpointedBlock) and m.recompute]
    for block in blocks:
        block.recompute = False  # type: ignore[assignment]
    for module in objective.modules():
        if getattr(module, "grad_checkpointing", False):  # timm's name
            cast("Any", module).grad_checkpointing = False
            blocks += getattr(module, "blocks", nn.ModuleList()).children()
    return blocks


def _storages(tensors: Any) -> Iterator[int]:
    return (t.untyped_storage()._cdata for t in tensors)


def _without_data(objective: Objective, mode: Any, device: torch.device) -> Objective:
    """A copy in training mode whose tensors are replaced while it is made."""
    memo: dict[int, Any] = {}
    with mode:
        for tensor in (*objective.parameters(), *objective.buffers()):
            empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
            is_parameter = isinstance(tensor, nn.Parameter)
            memo[id(tensor)] = nn.Parameter(empty, requires_grad=tensor.requires_grad) if is_parameter else empty
    return copy.deepcopy(objective, memo).train()


def _batch(objective: Objective, config: RunConfig, count: int, device: torch.device, levels: int) -> Batch:
    """A batch as the loader gives it: bytes, or normalised floats once images are mixed."""
    model, augment = objective.model, config.data.augment
    mixed = bool(augment.mixup or augment.cutmix)
    dtype = torch.float32 if mixed or model.preprocess.maximum > 255 else torch.uint8
    sides = [view.size or model.preprocess.size for view in objective.views.all()]
    views = tuple(torch.empty(count, model.channels, side, side, dtype=dtype, device=device) for side in sides)
    shape = (count, len(model.classes)) if model.multilabel else (count,)
    label = torch.zeros(shape, dtype=torch.int64, device=device)
    target = torch.zeros(count, len(model.classes), device=device) if mixed else label
    index = torch.zeros(count, dtype=torch.int64, device=device)
    beside = torch.zeros(count, levels, dtype=torch.int64, device=device) if levels else None
    return Batch(views, label, target, index, beside)


def worth_estimating(trainer: Trainer) -> bool:
    """Whether a run may be short of memory: a small model on few pixels starts at once."""
    pixels = trainer.config.data.batch * trainer.model.preprocess.size**2 * trainer.objective.views.views
    large = sum(p.numel() for p in trainer.objective.parameters()) >= SMALL_MODEL or pixels >= SMALL_BATCH
    return large and not trainer.data.holds_texts


def lines_before(trainer: Trainer) -> list[str]:
    """The estimate of a run as lines; none for texts, whose batches differ in length, and for small runs."""
    if not worth_estimating(trainer):
        return []
    device, held = trainer.device, getattr(trainer.module, "images", None)
    estimate = estimate_memory(
        trainer.objective,
        trainer.config,
        device=device,
        autocast=trainer.step_precision,
        levels=len(trainer.data.levels),
        world=trainer.group.world,
        images=0 if held is None else len(held.split) * 3 * trainer.model.preprocess.size**2,
    )
    lines = [estimate.text()]
    if device.type == "cuda" and estimate.peak is not None:
        total = torch.cuda.get_device_properties(device).total_memory
        if estimate.peak > total:
            lines.append(
                f"warning: {device} has {memory(total)}; where steps are not compiled, set --engine.accumulate auto or "
                "a smaller --data.batch"
            )
    return lines


@contextmanager
def _untrained_teacher(config: RunConfig) -> Iterator[RunConfig]:
    """The configuration with a published teacher replaced by one without its weights: nothing is fetched for a plan."""
    name = str(getattr(config.objective, "teacher", None) or "")
    if not name.startswith("timm:"):
        yield config
        return
    with tempfile.TemporaryDirectory() as folder:
        create_model(name).save(folder)
        yield from_mapping({"objective": {"teacher": folder}}, config)


def untrained(config: RunConfig) -> tuple[Objective, DataSet | None]:
    """The objective of a run with random weights, and its data; without `data.uri` classes are the model's own."""
    if config.model.name.startswith("text:"):
        raise ValueError(f"{config.model.name} reads texts, whose batches differ in length; a plan is for images")
    data = open_run(config.data) if config.data.uri else None
    named = ZOO[config.model.name].classes if config.model.name in ZOO else 1000
    every = np.arange(PLANNED_IMAGES)
    rows = Split("train", lambda _: Image.new("RGB", (1, 1)), every, [""] * len(every), every % named)
    stand_in = DataSet("", class_names(named), {"train": rows})
    model = build_model(replace(config.model, weights="none"), config, data or stand_in)
    if config.engine.activation_checkpointing == "blocks":
        model.trunk.checkpoint_blocks()
    choose_tuned(model, config.optim.tune)
    train = (data or stand_in)["train"]
    facts = TrainingFacts(train.labels, train.index, augment=config.data.augment, generated=train.generated)
    with _untrained_teacher(config) as resolved:
        return build_objective(resolved.objective, model, facts), data


def plan_run(config: RunConfig, images_per_second: float | None = None) -> dict[str, Any]:
    """Memory, steps and, at a measured rate, time of a run on this machine; no weights are read, nothing is trained."""
    objective, data = untrained(config)
    device, steps = choose_device(config.engine.device), config.optim.steps
    precision = training_precision(config.engine.precision, device, objective.model)
    if data is not None:
        steps = make_schedule(config.optim, config.data.batch, len(data["train"])).steps
    levels = 0 if data is None else len(data.levels)
    estimate = estimate_memory(objective, config, device=device, autocast=precision, levels=levels)
    seconds = None if steps is None or not images_per_second else steps * config.data.batch / images_per_second
    return {
        "device": str(device),
        "parameters": sum(p.numel() for p in objective.model.parameters()),
        "trained_parameters": sum(p.numel() for p in objective.parameters() if p.requires_grad),
        "memory": estimate.to_json(),
        "steps": steps,
        "images_per_second": images_per_second,
        "seconds": seconds,
    }


def plan_text(plan: Mapping[str, Any]) -> str:
    """A plan for people: two lines."""
    estimate = MemoryEstimate(**{name: value for name, value in plan["memory"].items() if name != "peak"})
    length = "steps: as many as the data give (--data URI)" if plan["steps"] is None else f"steps: {plan['steps']:,}"
    rate = plan["images_per_second"]
    if plan["seconds"] is not None:
        return f"{estimate.text()}\n{length}; about {duration(plan['seconds'])} at {rate:,.0f} images/s"
    return f"{estimate.text()}\n{length}; time: --measure trains a few steps of --data URI"
