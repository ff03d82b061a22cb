"""Predictions of a saved model for pictures: labels, prediction sets, rejection, nearest images of a data set."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.data.dataset import BadImage, DataSet
from vitrail.data.preprocess import Preprocess
from vitrail.engine.progress import Progress
from vitrail.kernels.similarity import top_rows
from vitrail.measure.retrieval import embed_all
from vitrail.measure.trust import Trust, threshold_for
from vitrail.model.classifier import Classifier, Prediction
from vitrail.model.store import DESCRIPTION, model_folder, read_tensors, write_tensors
from vitrail.run.data_module import evaluation_batches
from vitrail.run.run_data import contents, open_for

UNKNOWN = "unknown"
NOTHING = Prediction("", 0.0, ())  # of a model without classes
BATCH = 64


@dataclass(frozen=True)
class ImageAnswer:
    """What is told of one picture."""

    path: str
    prediction: Prediction
    classes: tuple[tuple[str, float], ...] | None = None  # the prediction set, most probable first
    unknown: bool | None = None  # whether it is unlike the images of every class
    neighbours: tuple[tuple[str, str, float], ...] | None = None  # image, its class, cosine

    def to_json(self) -> dict[str, Any]:
        more = {"set": self.classes, "unknown": self.unknown, "neighbours": self.neighbours}
        told = {name: value for name, value in more.items() if value is not None}
        return {"path": self.path, **self.prediction.to_json(), **({} if self.prediction.error else told)}

    def text(self) -> str:
        """The answer on a line of a terminal, neighbours below it."""
        if self.prediction.error:
            return f"cannot be read: {self.prediction.error}"
        words = "  ".join(f"{label} {100 * p:.1f} %" for label, p in self.prediction.top)
        words = words if self.prediction.value is None else self.prediction.label
        if self.classes is not None:
            words = f"{{{', '.join(label for label, _ in self.classes)}}}  {words}"
        below = [f"\n  {cosine:.3f}  {label}  {key}" for key, label, cosine in self.neighbours or ()]
        return "".join([f"{UNKNOWN}  {words}" if self.unknown else words, *below])


def csv_rows(answers: Sequence[ImageAnswer]) -> list[tuple[object, ...]]:
    """The rows of a table, its header first: path, label, probability, set and unknown where asked for, error."""
    rows: list[tuple[object, ...]] = [("path", "label", "probability", "set", "unknown", "error")]
    for answer in answers:
        told, held = answer.prediction, "|".join(label for label, _ in answer.classes or ())
        unknown = "" if answer.unknown is None else str(answer.unknown).lower()
        rows.append((answer.path, told.label, f"{told.probability:.6g}", held, unknown, told.error or ""))
    return rows


@dataclass(frozen=True, eq=False)
class ImageIndex:
    """Embeddings of all images of a data set, by which pictures are searched."""

    memory: Tensor  # [images, width] float16, of unit length
    keys: Sequence[str]
    labels: Sequence[str]

    def nearest(self, embeddings: Tensor, count: int) -> list[tuple[tuple[str, str, float], ...]]:
        """The `count` nearest images of each embedding [pictures, width], nearest first: key, class, cosine."""
        unit = F.normalize(embeddings.float(), dim=1)
        cosines, rows = top_rows(unit, self.memory, min(count, len(self.memory)))
        pairs = zip(cosines.tolist(), rows.tolist(), strict=True)
        return [tuple((self.keys[r], self.labels[r], c) for c, r in zip(*pair, strict=True)) for pair in pairs]


def image_index(model: Classifier, run: str | Path, uri: str, *, quiet: bool = True) -> ImageIndex:
    """The index of a data set by the model of a run; computed once, and stored in the folder `index` of the model.

    It is computed again where the model, the images or their labels have changed.
    """
    data, folder = open_for(model, uri), model_folder(run)
    keys = [key for split in data.splits.values() for key in split.keys]
    file = folder / "index" / f"{_digest(data, folder)}.safetensors"
    device = next(model.parameters()).device
    if not file.is_file():
        pieces = []
        with Progress("index", len(keys), quiet=quiet) as bar:
            for split in data.splits.values():
                with evaluation_batches(
                    model, split, model.preprocess, batch=None, device=device, workers=None
                ) as loader:
                    found = embed_all(model, loader, device=device, progress=bar.advance)
                    if loader.skipped:
                        key, reason = loader.skipped[0]
                        raise ValueError(
                            f"{key} cannot be read ({reason}); `vitrail check {uri}` lists all such images"
                        )
                pieces.append(F.normalize(found.embedding, dim=1).half().cpu())
        write_tensors(file, {"memory": torch.cat(pieces)})
    memory = read_tensors(file)["memory"].to(device)
    labels = [data.label_text(label) for split in data.splits.values() for label in split.labels]
    return ImageIndex(memory, keys, labels)


def _digest(data: DataSet, folder: Path) -> str:
    digest = hashlib.sha256((folder / DESCRIPTION).read_bytes())  # it has the checksum of the weights
    for split in data.splits.values():
        digest.update(repr((split.name, contents(split, {})[0])).encode())
        digest.update(split.index.tobytes() + split.labels.tobytes())
    return digest.hexdigest()[:16]


def predict(
    model: Classifier,
    paths: Sequence[str | Path],
    *,
    top: int = 3,
    trust: Trust | None = None,
    coverage: float | None = None,
    sets: str = "lac",
    keep: float | None = None,
    index: ImageIndex | None = None,
    neighbours: int = 10,
) -> Iterator[ImageAnswer]:
    """What a model tells of image files, one by one; of a file that cannot be read, why.

    With a `coverage`, a set of classes that holds the right one with that probability (`sets`: by which method); with
    `keep`, whether the image is unlike all classes, by a threshold that such a share of known images passes. Both need
    what was fitted on held-out images: `Trust.read(model_folder(run))`. With an `index`, the nearest images.
    """
    if index is None or not model.unlabelled:  # embeddings are enough for a search
        model.check_classifies_images()
    if (coverage is not None or keep is not None) and trust is None:
        raise ValueError("prediction sets and rejection need `trust`: Trust.read(model_folder(run))")
    rule = None if trust is None or coverage is None else trust.rule(coverage, sets)
    limit = None if trust is None or keep is None else threshold_for(trust.known, keep)
    preprocess, device = Preprocess(model.preprocess), next(model.parameters()).device
    model.eval()
    for start in range(0, len(paths), BATCH):
        pixels: list[Tensor] = []
        read: list[tuple[str, str]] = []  # path, and why it cannot be read
        for path in map(str, paths[start : start + BATCH]):
            try:
                pixels.append(preprocess(model.opened(Path(path), path)))
                read.append((path, ""))
            except BadImage as error:
                read.append((path, error.reason))
        answers: Iterator[ImageAnswer] = iter(())
        if pixels:
            with torch.inference_mode():
                outputs = model.outputs(torch.stack(pixels).to(device))
                logits = model.fused(outputs.stack).float()
                chances = model.probabilities(logits).cpu()
                predictions = [NOTHING] * len(pixels) if model.unlabelled else model.told(chances, top)
                answers = iter([ImageAnswer("", prediction) for prediction in predictions])
                if rule is not None:
                    answers = _with_sets(answers, rule.sets(chances), chances, model.classes)
                if limit is not None and trust is not None:
                    scores = trust.scores(logits.cpu(), outputs.embedding.float().cpu(), multilabel=model.multilabel)
                    answers = (replace(a, unknown=s < limit) for a, s in zip(answers, scores.tolist(), strict=True))
                if index is not None:
                    found = index.nearest(outputs.representation, neighbours)
                    answers = (replace(a, neighbours=n) for a, n in zip(answers, found, strict=True))
        for path, reason in read:
            bad = ImageAnswer(path, Prediction("", 0.0, (), reason))
            yield bad if reason else replace(next(answers), path=path)


def _with_sets(
    answers: Iterator[ImageAnswer], inside: Tensor, chances: Tensor, classes: Sequence[str]
) -> Iterator[ImageAnswer]:
    for answer, held, row in zip(answers, inside, chances, strict=True):
        chosen = sorted(held.nonzero()[:, 0].tolist(), key=lambda c: -float(row[c]))
        yield replace(answer, classes=tuple((classes[c], float(row[c])) for c in chosen))
