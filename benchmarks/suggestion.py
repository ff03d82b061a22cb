"""Which images to label: accuracy of a linear probe by rule and budget, and labels needed relative to random choice.

    python benchmarks/suggestion.py RUN --data cifar10.npz [--images 5000] [--seeds 5] [--json]

Embeddings of RUN (a run or a model folder) on the training images are computed once. Every rule of `vitrail check
--suggest` then chooses in rounds, from one budget to the next; margin takes the probabilities of the probe that the
labels so far gave, and begins with the random choice. The probe is that of the protocol `few`: unit length,
standardised, one learning rate. Take a model that learned without labels: with embeddings that have seen all of them,
as a teacher's, few labels are enough for any rule. The second line of a cell is the number of labels with which a rule
has the accuracy of random choice, over those of random choice, interpolated in the logarithm of the budget; below 1 is
better.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from vitrail.data.loading.loader import EvalLoader
from vitrail.data.preprocess import Preprocess
from vitrail.engine.device import choose_device
from vitrail.measure.probe import Labelled, prepared, train_probes
from vitrail.measure.retrieval import Rows, embed_all
from vitrail.measure.suggestion import suggest_rows
from vitrail.model.classifier import Classifier
from vitrail.run.evaluate import load
from vitrail.run.run_data import open_for

BUDGETS = (10, 20, 50, 100, 200, 500, 1000)
RULES = ("random", "margin", "typical", "coverage", "both")


def embedded(model: Classifier, uri: str, split: str, most: int | None, device: torch.device) -> Rows:
    """Embeddings and labels of a split on the CPU; of `most` of its images, evenly spaced."""
    rows = open_for(model, uri)[split]
    if most is not None and most < len(rows):
        rows = rows.take(np.linspace(0, len(rows) - 1, most).astype(np.int64))
    with EvalLoader(rows, Preprocess(model.preprocess), batch=256, device=device, workers=0) as loader:
        found = embed_all(model, loader, device=device)
    return found.embedding.cpu(), found.label.cpu()


def probed(pool: Rows, test: Rows, labelled: Tensor, classes: int, seed: int) -> tuple[float, Tensor]:
    """Accuracy on `test` of a probe on labelled rows, and the two highest probabilities of every row of the pool."""
    settings = replace(Labelled(shots=1).settings, seed=seed)
    known, every, tested = prepared(pool[0][labelled], pool[0], test[0])
    probe = train_probes(known, pool[1][labelled], classes, settings)
    top = probe.logits(every)[:, 0].softmax(1).topk(2, dim=1).values
    return float(probe.evaluate(tested, test[1])[0]), top


def curve(rule: str, pool: Rows, test: Rows, budgets: list[int], classes: int, seed: int) -> list[float]:
    """Accuracy at every budget, chosen in rounds."""
    order = torch.randperm(len(pool[0]), generator=torch.Generator().manual_seed(seed))
    labelled, top, accuracies = torch.zeros(0, dtype=torch.int64), None, []
    for budget in budgets:
        if rule == "random" or (rule == "margin" and top is None):
            labelled = order[:budget]
        else:
            count = budget - len(labelled)
            chosen = suggest_rows(rule, pool[0], top, labelled, count, classes, seed)[0]
            labelled = torch.cat([labelled, chosen])
        accuracy, top = probed(pool, test, labelled, classes, seed)
        accuracies.append(accuracy)
    return accuracies


def labels_for(accuracy: float, budgets: list[int], accuracies: list[float]) -> float | None:
    """The budget with which a curve reaches an accuracy; none where it never does.

    >>> labels_for(0.5, [10, 1000], [0.4, 0.6])
    100.0
    """
    best = np.maximum.accumulate(accuracies)
    if accuracy > best[-1]:
        return None
    at = int(np.searchsorted(best, accuracy))
    if at == 0:
        return float(budgets[0])
    share = (accuracy - best[at - 1]) / (best[at] - best[at - 1])
    return round(math.exp((1 - share) * math.log(budgets[at - 1]) + share * math.log(budgets[at])), 6)


def compared(pool: Rows, test: Rows, classes: int, budgets: list[int], seeds: int) -> dict[str, Any]:
    """Mean and deviation of each rule at each budget, and labels needed relative to random choice."""
    rows: dict[str, Any] = {}
    for rule in RULES:
        values = np.array([curve(rule, pool, test, budgets, classes, seed) for seed in range(seeds)])
        std = values.std(0, ddof=1).tolist() if seeds > 1 else [None] * len(budgets)
        rows[rule] = {"mean": values.mean(0).tolist(), "std": std}
    for row in rows.values():
        needed = [labels_for(accuracy, budgets, row["mean"]) for accuracy in rows["random"]["mean"]]
        row["relative"] = [None if n is None else n / budget for n, budget in zip(needed, budgets, strict=True)]
    return {"budgets": budgets, "seeds": seeds, "images": len(pool[0]), "tested": len(test[0]), "rules": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("--data", required=True)
    parser.add_argument("--images", type=int, help="of train, and at most as many of test (none: all)")
    parser.add_argument("--budgets", type=int, nargs="+", default=BUDGETS)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    device = choose_device(options.device)
    model = load(Path(options.run)).to(device)
    pool, test = (embedded(model, options.data, split, options.images, device) for split in ("train", "test"))
    budgets = sorted(budget for budget in options.budgets if budget <= len(pool[0]))
    result = compared(pool, test, int(pool[1].max()) + 1, budgets, options.seeds)
    result |= {"model": options.run, "data": options.data}
    if options.json:
        print(json.dumps(result))
        return
    table = Table(title=f"linear probe, top-1 in %, mean ± std of {options.seeds} seeds; labels relative to random")
    for name in ("rule", *map(str, budgets)):
        table.add_column(name, justify="right")
    for rule, row in result["rules"].items():
        cells = [
            f"{100 * mean:.1f}{'' if std is None else f' ± {100 * std:.1f}'}\n{'-' if part is None else f'{part:.2f}'}"
            for mean, std, part in zip(row["mean"], row["std"], row["relative"], strict=True)
        ]
        table.add_row(rule, *cells)
    Console(width=120).print(table)
    print(f"{result['images']:,} images to choose from, {result['tested']:,} tested; model: {options.run}")


if __name__ == "__main__":
    main()
