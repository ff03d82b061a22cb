"""What the page of `vitrail app` shows of a model before any picture: accuracy, size, latency, rejection, examples."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from PIL import Image

from vitrail.data.dataset import BadImage
from vitrail.engine.run_folder import RunFolder
from vitrail.inspect.run import ModelSource, by_turns, data_of, run_of
from vitrail.measure.speed import throughput
from vitrail.measure.trust import Trust, threshold_for
from vitrail.model.classifier import Classifier
from vitrail.model.store import model_folder
from vitrail.quantities import amount, number, percent

KEEP = 0.95  # share of val images that pass the threshold of rejection


def trust_of(source: ModelSource) -> Trust | None:
    """None where nothing was fitted on held-out images."""
    with suppress(ValueError, OSError):
        return None if isinstance(source, Classifier) else Trust.read(model_folder(source))
    return None


def examples_of(source: ModelSource) -> list[tuple[Image.Image, str]]:
    """Images of a run's val split with their classes; none where the model is no run or its data are gone."""
    examples = []
    with suppress(ValueError, OSError):
        if run_of(source) is not None and "val" in (data := data_of(source, None)).splits and not data.unlabelled:
            for row in by_turns(data["val"].labels, 8):
                with suppress(BadImage):
                    examples.append((data["val"].read(row), data.label_text(data["val"].labels[row])))
    return examples


def facts_of(source: ModelSource, model: Classifier, trust: Trust | None) -> Iterator[tuple[str, str, str]]:
    """(name, value, remark): accuracy with its interval, classes, parameters, latency, rejected share of val."""
    run, size, device = run_of(source), model.preprocess.size, next(model.parameters()).device
    for line in RunFolder(run[0]).read_metrics()[-1:] if run else ():
        if "top1_low" in line:
            interval = f"95 %: {100 * line['top1_low']:.1f} to {100 * line['top1_high']:.1f}"
            yield f"{line['split']} top-1", percent(line["top1"]), interval
    yield "classes", f"{len(model.classes):,}", f"images of {size} px"
    yield "parameters", amount(sum(p.numel() for p in model.parameters())), ""
    speed = throughput(model, size, 1, device, seconds=0.1)["images_per_second"]
    yield "latency", f"{number(1000 / speed)} ms", f"one image, {device.type}"
    if trust is not None:
        share = float((trust.known < threshold_for(trust.known, KEEP)).double().mean())
        yield "rejected on val", percent(share), "unlike every class"
