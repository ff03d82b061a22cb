"""ONNX files that need more than the model: images of its data, for fewer bits, or what was fitted on held-out ones."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.data.counter import seed_of, uniform
from vitrail.data.dataset import Split
from vitrail.data.loading.loader import EvalLoader, auto_workers
from vitrail.data.preprocess import Preprocess
from vitrail.files import write_text
from vitrail.measure.trust import FILE, LABEL_SCORES, SOFTMAX_SCORES, MahalanobisScore, NeighbourScore, Trust
from vitrail.model.classifier import Classifier
from vitrail.model.export import Exported, to_onnx
from vitrail.model.quantize import CALIBRATION, Precision, Reduction
from vitrail.model.store import model_folder
from vitrail.run.evaluate import _with_classes_of
from vitrail.run.run_data import open_for, own_data_of

TEMPLATE = Path(__file__).parents[1] / "model" / "portable_predict.py"
HELD_OUT = 10_000  # val images on which accuracy is measured; some, where there are more


def export_onnx(
    model: Classifier,
    path: Path,
    run: Path,
    precision: Precision | None = None,
    data: str | None = None,
    lose: float = 0.3,
    with_predict: bool = False,
    **options: Any,
) -> Exported:
    """The model of a `run` as an ONNX file, in fewer bits where accuracy allows, with a `predict.py` beside it.

    `data` (none: what the run was trained on) has train images for calibration, and val; `options` are of `to_onnx`.
    """
    script, text = path.with_name("predict.py"), TEMPLATE.read_text(encoding="utf-8")
    if with_predict:
        model.reject_other("--with_predict", rgb=True)
        if not {("input", "float"), ("output", "logits")}.isdisjoint(options.items()):
            raise ValueError("predict.py takes a file of bytes and probabilities; leave out --input and --output")
        if script.exists() and script.read_text("utf-8", "replace")[:50] != text[:50]:
            raise ValueError(f"{script} is not one that vitrail wrote; export into another folder")
        trust = Trust.read(model_folder(run)) if (model_folder(run) / FILE).is_file() else None
        note = "nothing was fitted on held-out images: vitrail evaluate RUN --calibrate, and export again"
        fitted: dict[str, Any] = {"labels": {}, "known": [], "note": note}
        if trust is not None:  # sorted scores of held-out images, for any threshold
            labels = {kind: scores.sort().values.tolist() for kind, scores in trust.labels.items()}
            note = (
                f"the file has a reject score, {trust.kind}, and prediction sets by {', '.join(labels) or 'no method'}"
            )
            fitted = {"labels": labels, "known": trust.known.sort().values.tolist(), "note": note}
        options |= {"score": trust and RejectScore(trust, model.multilabel), "more": {"trust": fitted}}
    if precision is not None:
        model.reject_other(f"--{precision}")
        options["reduce"] = _reduction(model, run, data, precision, lose, options.get("input") == "float")
    exported = to_onnx(model, path, **options)
    if with_predict:
        write_text(script, text)
    return exported


class RejectScore(nn.Module):
    """The reject score of `Trust`, from logits and embeddings, as a part of an exported graph."""

    def __init__(self, trust: Trust, multilabel: bool) -> None:
        super().__init__()
        self.fitted, self.score = trust.embedding, (LABEL_SCORES if multilabel else SOFTMAX_SCORES).get(trust.kind)
        for name, tensor in trust.embedding.tensors().items() if trust.embedding else ():
            self.register_buffer(name, tensor)

    def forward(self, logits: Tensor, embeddings: Tensor) -> Tensor:  # [batch], in float64 as those of `Trust`
        if isinstance(self.fitted, NeighbourScore):
            memory, unit = self.get_buffer("memory"), F.normalize(embeddings.double(), dim=1)
            farthest = (unit.float() @ memory.T).topk(self.fitted.k).indices[:, -1]
            return -(unit - memory[farthest]).square().sum(1).sqrt()
        if isinstance(self.fitted, MahalanobisScore):
            whitened = embeddings.double() @ self.get_buffer("whitening").T
            return -(whitened[:, None] - self.get_buffer("means")).square().sum(2).amin(1)
        return self.score(logits.double())  # type: ignore[misc]


def _reduction(
    model: Classifier, run: Path, data: str | None, precision: Precision, lose: float, floats: bool
) -> Reduction:
    if not (uri := data or model.stated.get("data")):
        raise ValueError(f"{run} does not say which data it learned from; name them: --calibrate DATA")
    with own_data_of(run, "name them with --calibrate DATA, "):
        opened = _with_classes_of(model, open_for(model, uri))
    if not {"train", "val"} <= opened.splits.keys():
        raise ValueError(f"{uri} has no train images to calibrate on, or no val images to measure accuracy on")

    def images_of(rows: Split, most: int) -> Iterator[tuple[Tensor, Tensor]]:
        chosen = uniform(seed_of("deploy", int(model.stated.get("seed", 0))), rows.index).argsort(kind="stable")[:most]
        rows, preprocess = rows.take(chosen), Preprocess(model.preprocess)
        with EvalLoader(rows, preprocess, batch=64, device="cpu", workers=auto_workers(rows)) as loader:
            for batch in loader.received():
                for images in batch.views:
                    yield preprocess.normalize(images) if floats else images, batch.label

    calibration = torch.cat([images for images, _ in images_of(opened["train"], CALIBRATION)])
    held_out = partial(images_of, opened["val"], HELD_OUT)
    return Reduction(precision, calibration, held_out, lose, partial(print, file=sys.stderr))
