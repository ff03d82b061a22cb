"""Planted label errors among as many suspects: our scores, and cleanlab's on the same out-of-fold probabilities.

    python benchmarks/label_errors.py DATA MODEL [--noise symmetric similar] [--share 0.05] [--images 10000]
                                      [--seeds 3] [--device auto] [--json FILE]

DATA is a URI, of which the first training images are taken; MODEL is a run or model folder, whose embeddings of them
are computed once. `symmetric` replaces a label by any other class, `similar` by the class whose mean embedding is
nearest. A cell is the mean and standard deviation over seeds, in percent; `accuracy` is that of the out-of-fold
probabilities on the true labels. Where MODEL learned from the true labels of these images, the table is too good: it
compares scores, and says nothing of how many errors an embedding finds that has not seen labels.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from cleanlab.filter import find_label_issues
from cleanlab.rank import get_label_quality_scores
from torch import Tensor

from vitrail.data.open import open_data
from vitrail.engine.device import choose_device
from vitrail.measure.label_errors import out_of_fold, suspects
from vitrail.measure.retrieval import embed_all
from vitrail.run.data_module import evaluation_batches
from vitrail.run.evaluate import load


def embedded(uri: str, model: Path, images: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Embeddings and true labels of training images."""
    network = load(model, device)
    split = open_data(uri, val_fraction=0.0, limit=images)["train"]
    with evaluation_batches(network, split, network.preprocess, batch=256, device=device, workers=None) as loader:
        return embed_all(network, loader, device=device).rows


def planted(embeddings: Tensor, truth: Tensor, kind: str, share: float, seed: int) -> tuple[Tensor, Tensor]:
    """Noisy labels, and which of them are wrong."""
    generator, classes = torch.Generator().manual_seed(seed), int(truth.max()) + 1
    wrong = (torch.rand(len(truth), generator=generator) < share).to(truth.device)
    away = torch.randint(1, classes, truth.shape, generator=generator).to(truth.device)
    means = torch.stack([F.normalize(embeddings, dim=1)[truth == c].mean(0) for c in range(classes)])
    nearest = (F.normalize(means, dim=1) @ F.normalize(means, dim=1).T).fill_diagonal_(-2).argmax(1)
    return torch.where(wrong, (truth + away) % classes if kind == "symmetric" else nearest[truth], truth), wrong


def row(embeddings: Tensor, truth: Tensor, labels: Tensor, wrong: Tensor, seed: int) -> dict[str, float]:
    """Share of planted errors that each ranking finds among as many images."""
    began = time.perf_counter()
    blocks = out_of_fold(embeddings, labels, seed=seed)
    result = suspects(blocks, labels)
    seconds = time.perf_counter() - began
    pieces = list(blocks())
    rows = torch.cat([rows for rows, _ in pieces]).argsort()
    probabilities = torch.cat([block for _, block in pieces])[rows].double().cpu().numpy()
    probabilities /= probabilities.sum(1, keepdims=True)
    given, planted = labels.cpu().numpy(), wrong.cpu().numpy()
    rankings = {
        "ratio": np.argsort(result.scores.cpu().numpy()),
        "cleanlab self-confidence": np.argsort(get_label_quality_scores(given, probabilities)),
        "cleanlab margin": np.argsort(get_label_quality_scores(given, probabilities, method="normalized_margin")),
    }
    found = {name: float(planted[order[: planted.sum()]].mean()) for name, order in rankings.items()}
    mask = find_label_issues(given, probabilities, n_jobs=1)
    ours = np.isin(np.arange(len(given)), result.images.cpu().numpy())
    accuracy = float((probabilities.argmax(1) == truth.cpu().numpy()).mean())
    facts = {"precision": float(planted[ours].mean()), "cleanlab precision": float(planted[mask].mean())}
    counts = {"errors": int(planted.sum()), "suspects": int(ours.sum()), "cleanlab suspects": int(mask.sum())}
    return {**found, "accuracy": accuracy, **facts, **counts, "expected": result.expected, "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("model", type=Path)
    parser.add_argument("--noise", nargs="+", choices=("symmetric", "similar"), default=("symmetric", "similar"))
    parser.add_argument("--share", type=float, default=0.05)
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    embeddings, truth = embedded(options.data, options.model, options.images, choose_device(options.device))
    tables = {}
    for kind in options.noise:
        rows = []
        for seed in range(options.seeds):
            labels, wrong = planted(embeddings, truth, kind, options.share, seed)
            rows.append(row(embeddings, truth, labels, wrong, seed))
        tables[kind] = rows
        print(f"{kind}, {options.share:.0%} of {len(truth)} images, {options.seeds} seeds")
        for name in rows[0]:
            values = [each[name] for each in rows]
            scale = 100 if isinstance(values[0], float) and name not in ("expected", "seconds") else 1
            spread = statistics.stdev(values) if len(values) > 1 else 0.0
            print(f"  {name:<26}{scale * statistics.fmean(values):8.1f} ± {scale * spread:.1f}")
    if options.json is not None:
        facts = {**vars(options), "model": str(options.model), "json": None, "images": len(truth)}
        options.json.write_text(json.dumps({"options": facts, "rows": tables}, indent=1))


if __name__ == "__main__":
    main()
