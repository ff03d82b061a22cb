"""What the page of `vitrail app` shows of a model before any picture: accuracy, size, latency, rejection, examples."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

import torch
from PIL import Image
from torch import Tensor

from vitrail.data.dataset import BadImage
from vitrail.engine.run_folder import RunFolder
from vitrail.inspect.run import ModelSource, by_turns, data_of, run_of
from vitrail.measure.trust import Trust, threshold_for
from vitrail.model.classifier import Classifier
from vitrail.model.store import model_folder
from vitrail.quantities import amount, number, percent

KEEP = 0.95  # share of val images that pass the threshold of rejection
PASSES = 5  # single images that are timed, after one that is not
MOST_EXAMPLES = 8

Tile = tuple[str, str, str]  # name, value, remark


@dataclass(frozen=True)
class Example:
    """An image of val and its class."""

    image: Image.Image
    truth: str


class Rejection:
    """The threshold below which an image counts as one of no known class, from scores of val images."""

    def __init__(self, trust: Trust) -> None:
        self.trust, self.threshold = trust, threshold_for(trust.known, KEEP)

    @property
    def share(self) -> float:
        """Of val images that are rejected."""
        return float((self.trust.known < self.threshold).double().mean())

    @torch.inference_mode()
    def __call__(self, model: Classifier, batch: Tensor) -> bool:
        """Whether the image of a batch of one is rejected."""
        out = model.outputs(batch)
        logits, embedding = model.fused(out.stack).float().cpu(), out.embedding.float().cpu()
        return float(self.trust.scores(logits, embedding, multilabel=model.multilabel)[0]) < self.threshold


def rejection_of(source: ModelSource) -> Rejection | None:
    """None where nothing was fitted on held-out images."""
    with suppress(ValueError, OSError):
        return None if isinstance(source, Classifier) else Rejection(Trust.read(model_folder(source)))
    return None


def examples_of(source: ModelSource) -> list[Example]:
    """Images of a run's val split, of different classes; none where the model is no run or its data are gone."""
    examples: list[Example] = []
    with suppress(ValueError, OSError):
        if run_of(source) is not None and "val" in (data := data_of(source, None)).splits and not data.unlabelled:
            for row in by_turns(data["val"].labels, MOST_EXAMPLES):
                with suppress(BadImage):
                    examples.append(Example(data["val"].read(row), data.label_text(data["val"].labels[row])))
    return examples


def facts_of(source: ModelSource, model: Classifier, reject: Rejection | None) -> Iterator[Tile]:
    """Tiles: accuracy with its interval, classes, parameters, latency, share of val images that are rejected."""
    run = run_of(source)
    final = [line for line in (RunFolder(run[0]).read_metrics() if run else []) if line.get("final")]
    if final and "top1" in final[-1]:
        last = final[-1]
        interval = f"95 %: {100 * last['top1_low']:.1f} to {100 * last['top1_high']:.1f}" if "top1_low" in last else ""
        yield f"{last['split']} top-1", percent(last["top1"]), interval
    elif final and "map" in final[-1]:
        yield f"{final[-1]['split']} mAP", percent(final[-1]["map"]), ""
    yield "classes", f"{len(model.classes):,}", f"images of {model.preprocess.size} px"
    yield "parameters", amount(sum(p.numel() for p in model.parameters())), ""
    device = next(model.parameters()).device
    yield "latency", f"{number(1000 * _seconds(model, device))} ms", f"one image, {device.type}"
    if reject is not None:
        yield "rejected on val", percent(reject.share), "unlike every class"


@torch.inference_mode()
def _seconds(model: Classifier, device: torch.device) -> float:
    """Median time of one image."""
    image, times = torch.zeros(1, 3, model.preprocess.size, model.preprocess.size, device=device), []
    for _ in range(PASSES + 1):
        began = time.perf_counter()
        model(image).sum().item()  # waits for the device
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])
