"""Planted label errors among as many suspects: our score, and those of cleanlab on the same out-of-fold probabilities.

    python benchmarks/label_errors.py DATA MODEL [--settings FILE.yaml --epochs 30] [--noise symmetric similar]
                                      [--share 0.05] [--images 10000] [--seeds 3] [--device auto] [--json FILE]

DATA is a URI, of which the first training images are taken; MODEL is a run or model folder, whose embeddings of them
are computed once, or a folder of embeddings.py. `symmetric` replaces a label by any other class, `similar` by the class
whose mean embedding is nearest. Probabilities are those of logistic regressions on the embeddings; with --settings (a
recipe, or a YAML file of a run) those of five trainings on the noisy labels, each without a fifth of the images. A cell
is the mean and standard deviation over seeds, in percent; `accuracy` is that of the out-of-fold probabilities on the
true labels. Where MODEL learned from the true labels of these images, the table is too good: it compares scores, and
says nothing of how many errors an embedding finds that has not seen labels. Self-confidence (cleanlab's default) and
margin are computed by us and equal cleanlab's, as tests show; its own number of suspects needs the package.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
import torch.nn.functional as F
from embeddings import embedded
from torch import Tensor

from vitrail.data.open import open_data
from vitrail.engine.device import choose_device
from vitrail.measure.label_errors import Blocks, out_of_fold, suspects
from vitrail.run.check_labels import cross_fitted, held_out


def trained(uri: str, labels: Tensor, settings: str, epochs: int, device: str) -> Blocks:
    """Probabilities by trainings on these labels of the first training images, which are written to a data set."""
    images, place = open_data(uri, val_fraction=0.0)["train"].take(range(len(labels))), choose_device(device)
    with TemporaryDirectory() as folder:
        file, names = Path(folder, "noisy.npz"), open_data(uri).classes
        pixels = np.stack([np.asarray(images.read(row)) for row in range(len(images))])
        np.savez(file, x_train=pixels, y_train=labels.cpu().numpy(), classes=np.array(names))
        data = open_data(str(file), val_fraction=0.0, test_fraction=0.0)
        runs = cross_fitted(data, settings, epochs, device, quiet=True)
        places = {("train", index): row for row, index in enumerate(data["train"].index.tolist())}
        blocks = [(rows.to(labels.device), p.to(labels.device)) for rows, p in held_out(data, runs, places, place)()]
    return lambda: blocks


def planted(embeddings: Tensor, truth: Tensor, kind: str, share: float, seed: int) -> tuple[Tensor, Tensor]:
    """Noisy labels, and which of them are wrong."""
    generator, classes = torch.Generator().manual_seed(seed), int(truth.max()) + 1
    wrong = (torch.rand(len(truth), generator=generator) < share).to(truth.device)
    away = torch.randint(1, classes, truth.shape, generator=generator).to(truth.device)
    means = torch.stack([F.normalize(embeddings, dim=1)[truth == c].mean(0) for c in range(classes)])
    nearest = (F.normalize(means, dim=1) @ F.normalize(means, dim=1).T).fill_diagonal_(-2).argmax(1)
    return torch.where(wrong, (truth + away) % classes if kind == "symmetric" else nearest[truth], truth), wrong


def row(blocks: Blocks, truth: Tensor, labels: Tensor, wrong: Tensor) -> dict[str, float]:
    """Share of planted errors that each ranking finds among as many images."""
    pieces = list(blocks())
    rows = torch.cat([rows for rows, _ in pieces]).argsort()
    probabilities = torch.cat([block for _, block in pieces])[rows].double().cpu().numpy()
    probabilities /= probabilities.sum(1, keepdims=True)
    given, planted = labels.cpu().numpy(), wrong.cpu().numpy()
    titles = {"noise": "noise (default)", "ratio": "ratio", "self_confidence": "self-confidence", "margin": "margin"}
    ranked = {title: suspects(blocks, labels, score) for score, title in titles.items()}
    orders = {title: np.argsort(result.scores.cpu().numpy(), kind="stable") for title, result in ranked.items()}
    found = {title: float(planted[order[: planted.sum()]].mean()) for title, order in orders.items()}
    result = ranked["noise (default)"]
    ours = np.isin(np.arange(len(given)), result.images.cpu().numpy())
    facts = {"accuracy": float((probabilities.argmax(1) == truth.cpu().numpy()).mean())}
    facts |= {"precision": float(planted[ours].mean()), "errors": int(planted.sum()), "suspects": int(ours.sum())}
    try:
        from cleanlab.filter import find_label_issues
    except ImportError:
        return {**found, **facts, "expected": result.expected}
    mask = find_label_issues(given, probabilities, n_jobs=1)
    facts |= {"cleanlab precision": float(planted[mask].mean()), "cleanlab suspects": int(mask.sum())}
    return {**found, **facts, "expected": result.expected}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("model")
    parser.add_argument("--settings", help="five trainings by this recipe or YAML file in place of regressions")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--noise", nargs="+", choices=("symmetric", "similar"), default=("symmetric", "similar"))
    parser.add_argument("--share", type=float, default=0.05)
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = choose_device(options.device)
    embeddings, truth = (t.to(device) for t in embedded(options.model, options.data, "train", options.images, device))
    tables = {}
    for kind in options.noise:
        rows = []
        for seed in range(options.seeds):
            labels, wrong = planted(embeddings, truth, kind, options.share, seed)
            began = time.perf_counter()
            if options.settings is None:
                blocks = out_of_fold(embeddings, labels, seed=seed)
            else:
                blocks = trained(options.data, labels, options.settings, options.epochs, options.device)
            rows.append({**row(blocks, truth, labels, wrong), "seconds": time.perf_counter() - began})
        tables[kind] = rows
        print(f"{kind}, {options.share:.0%} of {len(truth)} images, {options.seeds} seeds")
        for name in rows[0]:
            values = [each[name] for each in rows]
            scale = 100 if isinstance(values[0], float) and name not in ("expected", "seconds") else 1
            spread = statistics.stdev(values) if len(values) > 1 else 0.0
            print(f"  {name:<26}{scale * statistics.fmean(values):8.1f} ± {scale * spread:.1f}")
    if options.json is not None:
        facts = {**vars(options), "json": None, "images": len(truth)}
        options.json.write_text(json.dumps({"options": facts, "rows": tables}, indent=1))


if __name__ == "__main__":
    main()
