"""What to label next among images without labels, by the embeddings and predictions of a run, in rounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from vitrail.data.check.contact_sheet import Suspect
from vitrail.data.dataset import UNDIVIDED, DataSet, drop_unreadable
from vitrail.data.open import open_source
from vitrail.data.sources.table import read_text_table, write_csv
from vitrail.engine.device import choose_device, choose_precision
from vitrail.engine.progress import Progress
from vitrail.measure.config import CLASS_COUNTS
from vitrail.measure.evaluator import batches
from vitrail.measure.suggestion import FEW, suggest_rows
from vitrail.model.parts.modules import placed
from vitrail.run.data_module import evaluation_batches, reads_texts, reject_other_kind
from vitrail.run.evaluate import load

COLUMNS = ("path", "label", "round", "score")


def suggest(
    run: str, data: str, count: int, by: str = "both", labelled: Path | None = None, seed: int = 0, quiet: bool = True
) -> tuple[dict[str, Any], DataSet, list[Suspect]]:
    """The next `count` images to label: a function of images, model, rows of `labelled` that have a label, and seed.

    Of divided data these are training images. With the data, and which of them they are. Raises `ValueError`.
    """
    opened, device = drop_unreadable(open_source(data)), choose_device("auto")
    model = placed(load(run), device)
    model.reject_other("--suggest", rgb=True)
    reject_other_kind(reads_texts(model), opened)
    split = opened[UNDIVIDED if UNDIVIDED in opened.splits else "train"]
    known, number = _read_labelled(labelled, set(split.keys)) if labelled else ([], 1)
    classes = 0 if model.unlabelled or model.multilabel else len(model.classes)
    if by == "both" and classes and sum(model.stated.get(CLASS_COUNTS, ())) >= FEW * classes:
        by = "margin"  # the model learned from labels of other images
    pieces, where = [], {"device": device, "autocast": choose_precision("auto", device)}
    loader = evaluation_batches(model, split, model.preprocess, batch=None, device=device, workers=None)
    with loader, Progress("embed", len(split), quiet=quiet) as bar:
        for batch, images in batches(model, loader, **where, progress=bar.advance):  # type: ignore[arg-type]
            out = model.outputs(images)
            top = model.probabilities(model.fused(out.stack).float()).topk(min(2, len(model.classes)), dim=1).values
            pieces.append([batch.index.cpu(), out.representation.float().cpu(), top.cpu()])
    index, embeddings, top = (torch.cat(column) for column in zip(*pieces, strict=True))
    order = np.argsort(split.index)
    rows = order[np.searchsorted(split.index, index.numpy(), sorter=order)].tolist()  # without unreadable images
    labels = {row["path"]: row["label"] for row in known}
    have = torch.tensor([place for place, row in enumerate(rows) if split.keys[row] in labels], dtype=torch.int64)
    kinds = classes or len(set(labels.values())) or count  # where no class is known, as many as images
    places, scores, note = suggest_rows(by, embeddings, top if classes else None, have, count, kinds, seed)
    chosen = [(rows[place], float(f"{score:.6g}")) for place, score in zip(places, scores.tolist(), strict=True)]
    suggestions = [dict(zip(COLUMNS, (split.keys[row], "", number, score), strict=True)) for row, score in chosen]
    result = {"data": data, "round": number, "note": note, "labelled": known, "suggestions": suggestions}
    return result, opened, [Suspect(split.name, row, f"score {score:.3g}") for row, score in chosen]


def write_table(path: Path, result: dict[str, Any]) -> None:
    """What `labelled` is in the next round, once the suggestions have labels."""
    rows = ([row[name] for name in COLUMNS] for row in (*result["labelled"], *result["suggestions"]))
    write_csv(path, [COLUMNS, *rows])


def _read_labelled(path: Path, keys: set[str]) -> tuple[list[dict[str, Any]], int]:
    """Rows with a label, and the number of the next round."""
    columns = read_text_table(path, str(path)).columns
    if missing := [name for name in COLUMNS if name not in columns]:
        raise ValueError(f"{path} has no column {missing[0]!r}; give the table that --csv wrote, with labels in it")
    if strange := [key for key in columns["path"] if key not in keys]:
        raise ValueError(
            f"{path}: {strange[0]} is none of the images, nor are {len(strange) - 1} more; name their data"
        )
    rows = [dict(zip(COLUMNS, row, strict=True)) for row in zip(*(columns[name] for name in COLUMNS), strict=True)]
    rounds = [int(row["round"]) for row in rows if row["round"].isdecimal()]
    return [row for row in rows if row["label"]], max(rounds, default=0) + 1
