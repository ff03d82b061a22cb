"""Models that may meet a budget, each measured on the target as the file that would be deployed."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import torch
from PIL.Image import Image

from vitrail.data.preprocess import Preprocess
from vitrail.engine.device import training_precision
from vitrail.fit.limits import Budget
from vitrail.fit.pictures import Pictures, median_seconds
from vitrail.model.build import create_model
from vitrail.model.classifier import Classifier
from vitrail.model.export import to_single_onnx
from vitrail.model.parts.modules import channels_last_works, is_convolutional
from vitrail.model.portable_predict import square
from vitrail.model.quantize import write_int8

SMALL = 64  # pixels up to which networks for small images are candidates
SIZES = (96, 128, 160, 192, 224)
SMALLER = (64, 48)  # where a processor is to learn from scratch, and the time is short
# Those first that learn most in minutes from scratch, as far as measured (docs/results/training.md, fit.md).
SMALL_NETWORKS = {  # and the multiple that an image size must be
    "resnet18_32": 4, "cifar_resnet56": 4, "cifar_resnet110": 4, "cifar_resnet32": 4, "cifar_resnet20": 4,
    "patchconvnet_t20_32": 4, "xcit_t12_32": 4, "vit_tiny_32": 4, "sot_7_32": 4, "vit_micro_28": 7, "resmlp_t12_32": 4,
}  # fmt: skip
PHOTO_NETWORKS = {  # and ImageNet's top-1 of published weights, about, which only orders them; 0 where there are none
    "timm:resnet26d": 76.7, "patchconvnet_s20": 0.0, "timm:resnet18": 71.5, "timm:efficientnet_lite0": 75.5,
    "timm:repvit_m0_9": 78.7, "timm:fastvit_t8": 76.2, "timm:mobilenetv4_conv_medium": 79.1,
    "timm:mobilenetv4_conv_small": 73.8, "resmlp_s12": 76.6, "xcit_t24_p16": 79.4, "timm:convnext_atto": 75.7,
    "deit_tiny": 72.2, "deit_small": 79.8, "timm:mobilenetv4_conv_small_050": 65.8,
}  # fmt: skip
MERGING = ("deit_tiny", "deit_small")  # that also come with merged tokens (ToMe)
TEACHERS = {"small": "resnet18_32", "photo": "timm:resnet50"}
Precision = Literal["float32", "int8"]
GAIN_OF_INT8 = 3.0  # times the budget: what int8 may still bring within it
HOPELESS = 15.0  # times the budget in eager PyTorch: the most that a runtime was seen to gain is 8.4 (MobileNetV4)
NEARLY = 0.5  # of enough images to learn from: time is measured roughly, and half as many are no end
SCALES = 3.0  # times more or less than by its pixels: seen were 0.6 to 3.4 (48 to 160 pixels, 14 networks)
STEP = 32  # images of a training step that is timed to tell what a processor can learn


@dataclass(frozen=True)
class Candidate:
    """A model at an image size, and what it differs in from the model of that name."""

    model: str
    size: int
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the model: {"head": {"kind": "attention_pool"}}
    precision: Precision = "float32"  # of the file

    @property
    def architecture(self) -> str:
        """What forms with other image sizes and precisions share."""
        return f"{self.model} {self.settings}"

    @property
    def name(self) -> str:
        """As a variant of a study and a file may be called."""
        parts = [*self.settings.values(), *self.settings.get("trunk", {}).values()]
        kinds = [str(part["kind"]) for part in parts if "kind" in part]
        kinds += ["int8"] * (self.precision == "int8")
        return "-".join([self.model.removeprefix("timm:"), str(self.size), *kinds])


@dataclass(frozen=True)
class Measured:
    """What a candidate costs; without a latency, why it was not measured."""

    candidate: Candidate
    latency: float | None = None  # seconds, median of single images
    bytes: int = 0
    reason: str = ""
    eager: float | None = None  # seconds in PyTorch, where that alone was far over the budget

    def meets(self, budget: Budget) -> bool:
        return self.latency is not None and budget.meets(self.latency, self.bytes)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "candidate": {**asdict(self.candidate), "settings": dict(self.candidate.settings)}}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Measured:
        return cls(**{**values, "candidate": Candidate(**values["candidate"])})


def candidates_for(side: int) -> list[Candidate]:
    """Candidates for images of this (median, shorter) side: photo networks in the nearest sizes, larger ones first."""
    if side <= SMALL:
        return [Candidate(name, max(2, side // of) * of) for name, of in SMALL_NETWORKS.items()]
    sizes = [size for size in SIZES if size <= 1.15 * side][:-4:-1] or list(SIZES[:1])
    merging = [  # 0.6 of the dense cost
        Candidate(name, size, {"trunk": {"adaptive": {"kind": "tome", "r": round(13 / 196 * (size // 16) ** 2, 2)}}})
        for name in MERGING
        for size in sizes
    ]
    return [*(Candidate(name, size) for name in PHOTO_NETWORKS for size in sizes), *merging]


def within_time(
    candidates: Sequence[Candidate], learns: Callable[[Candidate], float], smaller: Sequence[int] = SMALLER
) -> tuple[list[Candidate], list[Candidate]]:
    """Candidates that learn enough (1), photo networks at smaller sizes, too, or in their fastest form nearly enough;
    and the fastest forms of the others, those first that learn most."""
    chosen: list[Candidate] = []
    too_slow: list[Candidate] = []
    for architecture in dict.fromkeys(candidate.architecture for candidate in candidates):
        forms = [candidate for candidate in candidates if candidate.architecture == architecture]
        given, largest, least = len(forms), forms[0], min(candidate.size for candidate in forms)
        if largest.model in PHOTO_NETWORKS and not largest.settings:
            forms += [replace(largest, size=size) for size in smaller if size < least]
        enough = _enough(forms[::-1], learns)[::-1]
        if len(enough) == len(forms):
            enough = forms[:given]  # no need of smaller images
        elif not enough and learns(forms[-1]) >= NEARLY:
            enough = forms[-1:]
        chosen += enough
        too_slow += [] if enough else forms[-1:]
    return chosen, sorted(too_slow, key=learns, reverse=True)


def _enough(rising: Sequence[Candidate], learns: Callable[[Candidate], float]) -> list[Candidate]:
    """Of the sizes of an architecture, smallest first, those that learn enough. One is measured where the number of its
    pixels does not tell."""
    enough: list[Candidate] = []
    known: Candidate | None = None
    for candidate in rising:
        by_pixels = learns(known) * (known.size / candidate.size) ** 2 if known else math.nan
        if by_pixels < 1 / SCALES:
            break
        if not by_pixels >= SCALES:
            known = candidate
            if learns(candidate) < 1:
                break
        enough.append(candidate)
    return enough


def expected(candidate: Candidate, published: bool) -> float:
    """What is tried first where not all can be: larger is better. Merging tokens comes after what it is merged in."""
    names = [*SMALL_NETWORKS, *PHOTO_NETWORKS]
    place = names.index(candidate.model) if candidate.model in names else len(names)
    score = PHOTO_NETWORKS.get(candidate.model, 0.0) if published else -place
    return score - 0.5 * bool(candidate.settings)


def build(candidate: Candidate, classes: Sequence[str]) -> Classifier:
    """The candidate with random weights: its cost is that of the trained one."""
    settings = {**candidate.settings, "classes": classes, "image_size": candidate.size}
    return create_model(candidate.model, **settings.pop("trunk", {}), **settings).eval()


def measure(
    candidate: Candidate, classes: Sequence[str], budget: Budget, pictures: Pictures, folder: Path
) -> list[Measured]:
    """Cost of a candidate's file in float32, and in int8 where float32 is over the budget; or why there is none."""
    try:
        model = build(candidate, classes)
        model.preprocess = pictures.preprocess(model.preprocess)
        images = pictures.decoded(model.preprocess)
        if budget.on == "cuda":
            size = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
            return [Measured(candidate, accelerator_latency(model, images), size)]
        eager = _eager_latency(model, candidate.size) / budget.threads
        if eager > HOPELESS * budget.latency:
            reason = f"at least {1e3 * eager:.3g} ms in PyTorch, over {HOPELESS:g} times the budget"
            return [Measured(candidate, reason=reason, eager=eager)]
        path, small = (folder / f"{candidate.name}{end}.onnx" for end in ("", "-int8"))
        try:
            size = to_single_onnx(model, path)
            latency = file_latency(path, images, budget.threads)
            found = [Measured(candidate, latency, size)]
            if not budget.meets(latency, size) and latency < GAIN_OF_INT8 * budget.latency:
                found.append(_measure_int8(replace(candidate, precision="int8"), path, small, budget, images))
            return found
        finally:
            for file in (path, small):
                file.unlink(missing_ok=True)
    except Exception as error:  # exporters and runtimes have error classes of their own
        return [Measured(candidate, reason=_first_line(error))]


def _measure_int8(candidate: Candidate, path: Path, small: Path, budget: Budget, images: Sequence[Image]) -> Measured:
    try:
        write_int8(path, small, torch.randint(256, (1, 3, candidate.size, candidate.size), dtype=torch.uint8))
        return Measured(candidate, file_latency(small, images, budget.threads), small.stat().st_size)
    except Exception as error:  # some operators have no form for this processor
        return Measured(candidate, reason=f"cannot run in int8: {_first_line(error)}")


def known_without_measuring(candidate: Candidate, known: Sequence[Measured], budget: Budget) -> str:
    """Why the same model with larger images tells enough; empty where it does not."""
    for other in known:
        its = other.candidate
        if its.architecture != candidate.architecture or other.latency is None:
            continue
        if other.meets(budget):
            return f"{its.name} meets the budget with larger images"
        by_pixels = other.latency * (candidate.size / its.size) ** 2
        if its.precision == "float32" and by_pixels > GAIN_OF_INT8 * budget.latency:
            return f"{its.name} is far over the budget"
    return ""


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines() or [type(error).__name__]
    return lines[0] if len(lines[0]) <= 160 else f"{lines[0][:157]}..."


def others_at_work() -> str:
    """The load of the last minute where it is above half of the cores; empty where it is not, or not known."""
    cores = os.cpu_count() or 1
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    return f"load {load:.1f} on {cores} cores" if load > cores / 2 else ""


def file_latency(path: Path, pictures: Sequence[Image], threads: int) -> float:
    """Median seconds of a decoded picture through an ONNX file, alone: what predict.py does to it, and the network."""
    runtime = import_module("onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 4  # what fails is reported by the caller
    session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    preprocess = json.loads(session.get_modelmeta().custom_metadata_map["preprocess"])
    return median_seconds(lambda picture: session.run(None, {"images": square(picture, **preprocess)}), pictures)


def training_speed(candidate: Candidate, classes: Sequence[str]) -> float:
    """Images/s of forward and backward passes on this processor, of a few images and without loading."""
    model, times, cpu = build(candidate, classes).train(), [], torch.device("cpu")
    images = torch.zeros(STEP, 3, candidate.size, candidate.size, dtype=torch.uint8)
    precision = training_precision("auto", cpu, model)
    if is_convolutional(model) and channels_last_works(model, cpu):
        model.to(memory_format=torch.channels_last)
    for _ in range(3):
        began = time.perf_counter()
        with torch.autocast("cpu", precision, enabled=precision is not None):
            outputs = model(images)
        outputs.float().logsumexp(-1).sum().backward()
        times.append(time.perf_counter() - began)
    return STEP / min(times)


@torch.inference_mode()
def accelerator_latency(model: Classifier, pictures: Sequence[Image]) -> float:
    """Median seconds of a decoded picture through the optimised model on CUDA, from the host and back."""
    fast, prepare = model.to("cuda").optimize(), Preprocess(model.preprocess)
    return median_seconds(lambda picture: fast(prepare(picture)[None].cuda()).cpu(), pictures)


@torch.inference_mode()
def _eager_latency(model: Classifier, size: int) -> float:
    """Seconds with one thread: where others use the cores, two that wait for each other take 20 times as long."""
    images, times, threads = torch.zeros(1, 3, size, size, dtype=torch.uint8), [], torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for _ in range(4):
            began = time.perf_counter()
            model(images)
            times.append(time.perf_counter() - began)
    finally:
        torch.set_num_threads(threads)
    return min(times)
