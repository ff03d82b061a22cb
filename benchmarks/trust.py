"""Whether answers of trained runs can be trusted: calibration, coverage of prediction sets, rejection of other images.

    python benchmarks/trust.py RUN ... --data cifar10.npz --near cifar100.npz --far embedded:fashion synthetic:shapes

Everything is fitted on val, ten times with other halves of it, and measured on test. Near and far images are those of
other data sets, none of which is seen before the reject score is chosen. `--json` prints rows.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vitrail.data.dataset import Split
from vitrail.data.open import open_source
from vitrail.engine.device import choose_device, choose_precision
from vitrail.measure.calibration import METHODS, ConformalRule, calibration_metrics, coverage_interval, set_metrics
from vitrail.measure.evaluator import draw_by_class
from vitrail.measure.trust import (
    SOFTMAX_SCORES,
    Trust,
    choose_calibration,
    fit_mahalanobis,
    fit_neighbours,
    outputs_of,
    rejection_metrics,
)
from vitrail.run.data_module import evaluation_batches
from vitrail.run.evaluate import load
from vitrail.run.run_data import open_for

SPLITS, COVERAGES = 10, (0.9, 0.95)


def rows_of(
    run: str, data: str, near: Sequence[str], far: Sequence[str], most: int, device: str
) -> list[dict[str, Any]]:
    chosen = choose_device(device)
    model = load(run).to(chosen)
    opened = open_for(model, data)

    def outputs(split: Split) -> list[Tensor]:
        with evaluation_batches(model, split, model.preprocess, batch=256, device=chosen, workers=None) as loader:
            return outputs_of(model, loader, device=chosen, autocast=choose_precision("auto", chosen))

    _, val_target, val, _ = outputs(opened["val"])
    _, test_target, test, test_embedding = outputs(opened["test"])
    rows = calibration_rows(val, val_target, test, test_target)
    _, target, _, memory = outputs(opened["train"])
    fitted = {"neighbours": fit_neighbours(memory), "mahalanobis": fit_mahalanobis(memory, target)}
    scores = [Trust({}, torch.empty(0), kind, fitted.get(kind)) for kind in (*SOFTMAX_SCORES, *fitted)]
    for distance, uris in (("near", near), ("far", far)):
        for uri in uris:
            other = open_source(uri)
            split = other.splits.get("test") or next(iter(other.splits.values()))
            _, _, logits, embedding = outputs(split.take(range(min(most, len(split)))))
            for score in scores:
                metrics = rejection_metrics(score.scores(test, test_embedding), score.scores(logits, embedding))
                rows.append({"what": "rejection", "of": f"{distance}: {uri}", "score": score.kind, **metrics})
    return [{"run": run, "data": data, **row} for row in rows]


def calibration_rows(val: Tensor, val_target: Tensor, test: Tensor, target: Tensor) -> list[dict[str, Any]]:
    """Before, and after each of ten halves of val; coverage and sizes of sets by the other half."""
    rows: list[dict[str, Any]] = [{"what": "uncalibrated", **calibration_metrics(test, target)}]
    after: list[dict[str, float]] = []
    covered: dict[tuple[str, float], list[dict[str, Any]]] = {}
    inside: dict[tuple[str, float], int] = {}
    for seed in range(SPLITS):
        half = torch.zeros(len(val), dtype=torch.bool)
        half[draw_by_class(val_target, lambda n: (n + 1) // 2, seed)] = True
        calibration = choose_calibration(val[half], val_target[half], seed)
        after.append({"vector": calibration.kind == "vector", **calibration_metrics(calibration(test), target)})
        chances, held = calibration(test).softmax(1), calibration(val[~half]).softmax(1)
        for method in METHODS:
            for coverage in COVERAGES:
                rule = ConformalRule(method, coverage, 0, 1)
                rule = rule.at(rule.label_scores(held, val_target[~half]))
                metrics = set_metrics(rule.sets(chances), target)
                low, high = coverage_interval(rule.images, coverage, len(target))
                inside[method, coverage] = inside.get((method, coverage), 0) + (low <= metrics["coverage"] <= high)
                covered.setdefault((method, coverage), []).append(metrics)
    rows.append({"what": "calibrated", **{name: statistics.mean(row[name] for row in after) for name in after[0]}})
    for (method, coverage), each in covered.items():
        means = {name: statistics.mean(row[name] for row in each) for name in ("coverage", "mean_size")}
        lowest = min(c for row in each for c in row["by_class"]["coverage"] if c is not None)
        row = {"what": "sets", "method": method, "asked": coverage, **means, "lowest class": lowest}
        rows.append({**row, "splits inside 99 %": inside[method, coverage]})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+")
    parser.add_argument("--data", required=True)
    parser.add_argument("--near", nargs="*", default=[])
    parser.add_argument("--far", nargs="*", default=[])
    parser.add_argument("--most", type=int, default=10_000, help="images of each other data set")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    for run in chosen.runs:
        for row in rows_of(run, chosen.data, chosen.near, chosen.far, chosen.most, chosen.device):
            if chosen.json:
                print(json.dumps(row), flush=True)
            else:
                shown = (f"{k} {v:.4f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items())
                print("  ".join(shown), flush=True)


if __name__ == "__main__":
    main()
