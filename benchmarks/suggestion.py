"""Which images to label: accuracy of a linear probe by rule and budget, and labels needed relative to random choice.

    python benchmarks/suggestion.py RUN --data cifar10.npz [--images 5000] [--seeds 5] [--fine_tune 400] [--json]

Embeddings of RUN (a run or a model folder, or a folder of embeddings.py) on the training images are computed once.
Every rule of `vitrail check --suggest` then chooses in rounds, from one budget to the next; margin takes the
probabilities of the probe that the labels so far gave, and begins with the random choice. The probe is that of the
protocol `few`: unit length, standardised, one learning rate. With --fine_tune all weights of RUN are trained further on
the labelled images instead, for that many steps. Take a model that learned without labels: with embeddings that have
seen all of them, as a teacher's, few labels are enough for any rule. The second line of a cell is the number of labels
with which a rule has the accuracy of random choice, over those of random choice, interpolated in the logarithm of the
budget; below 1 is better.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
from dataclasses import replace
from multiprocessing import get_context
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from embeddings import embedded
from rich.console import Console
from rich.table import Table
from torch import Tensor

from vitrail.data.open import open_data
from vitrail.engine.device import choose_device, choose_precision
from vitrail.measure.probe import Labelled, prepared, train_probes
from vitrail.measure.retrieval import Rows
from vitrail.measure.suggestion import suggest_rows
from vitrail.run.data_module import evaluation_batches
from vitrail.run.evaluate import load

BUDGETS = (10, 20, 50, 100, 200, 500, 1000)
RULES = ("random", "margin", "typical", "coverage", "both")


def probed(pool: Rows, test: Rows, labelled: Tensor, classes: int, seed: int) -> tuple[float, Tensor]:
    """Accuracy on `test` of a probe on labelled rows, and the two highest probabilities of every row of the pool."""
    settings = replace(Labelled(shots=1).settings, seed=seed)
    known, every, tested = prepared(pool[0][labelled], pool[0], test[0])
    probe = train_probes(known, pool[1][labelled], classes, settings)
    top = probe.logits(every)[:, 0].softmax(1).topk(2, dim=1).values
    return float(probe.evaluate(tested, test[1])[0]), top


class FineTuning:
    """All weights of a run and a new linear classifier, trained on some images: SGD from 0.01 by a cosine, batches of
    64, shifts and flips."""

    def __init__(self, run: str, uri: str, steps: int, most: int | None, device: torch.device) -> None:
        self.model, self.steps, self.device = load(run).to(device), steps, device
        self.precision = choose_precision("auto", device)
        self.images, self.test = (self._images(uri, split, most) for split in ("train", "test"))

    def _images(self, uri: str, split: str, most: int | None) -> Tensor:
        rows = open_data(uri, val_fraction=0.0)[split]
        rows = rows.take(range(min(most or len(rows), len(rows))))
        loader = evaluation_batches(
            self.model, rows, self.model.preprocess, batch=500, device=self.device, workers=None
        )
        with loader:
            return torch.cat([batch.images.half() for batch in loader])

    def __call__(self, labels: Tensor, labelled: Tensor, classes: int, test: Tensor, seed: int) -> float:
        torch.manual_seed(seed)
        model = copy.deepcopy(self.model).train()
        width = model.outputs(self.images[:2].float()).representation.shape[1]
        layer = torch.nn.Linear(width, classes).to(self.device)
        groups = [{"params": model.parameters()}, {"params": layer.parameters(), "lr": 0.1}]
        optimizer = torch.optim.SGD(groups, lr=0.01, momentum=0.9, weight_decay=5e-4, nesterov=True)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.steps)
        images, labels = self.images[labelled.to(self.device)], labels[labelled].to(self.device)
        for _ in range(self.steps):
            rows = torch.randint(len(images), (64,), device=self.device)
            shift = torch.randint(-4, 5, (2,)).tolist()
            views = F.pad(images[rows].float(), (4,) * 4, mode="reflect").roll(shift, (2, 3))[:, :, 4:-4, 4:-4]
            flips = torch.rand(len(rows), 1, 1, 1, device=self.device) < 0.5
            with torch.autocast(self.device.type, self.precision, enabled=self.precision is not None):
                scores = layer(model.outputs(torch.where(flips, views.flip(3), views)).representation)
            F.cross_entropy(scores.float(), labels[rows]).backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        model.eval()
        with torch.no_grad(), torch.autocast(self.device.type, self.precision, enabled=self.precision is not None):
            scores = [layer(model.outputs(part.float()).representation) for part in self.test.split(1000)]
        return float((torch.cat(scores).argmax(1).cpu() == test).double().mean())


def curve(
    rule: str, pool: Rows, test: Rows, budgets: list[int], classes: int, seed: int, tuning: FineTuning | None
) -> list[float]:
    """Accuracy at every budget, chosen in rounds; margin takes probabilities of the probe in both regimes."""
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
        accuracies.append(accuracy if tuning is None else tuning(pool[1], labelled, classes, test[1], seed))
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


def curves(jobs: int, work: list[tuple[Any, ...]]) -> list[list[float]]:
    """`curve` of each entry, in so many processes."""
    if jobs <= 1:
        return [curve(*entry) for entry in work]
    threads = max(1, len(os.sched_getaffinity(0)) // jobs)
    with get_context("spawn").Pool(jobs, torch.set_num_threads, (threads,)) as pool:
        return pool.starmap(curve, work, chunksize=1)


def compared(
    pool: Rows,
    test: Rows,
    classes: int,
    budgets: list[int],
    seeds: int,
    rules: list[str],
    tuning: FineTuning | None = None,
    jobs: int = 1,
) -> dict[str, Any]:
    """Mean and deviation of each rule at each budget, and labels needed relative to random choice."""
    rows: dict[str, Any] = {}
    work = [(rule, pool, test, budgets, classes, seed, tuning) for rule in rules for seed in range(seeds)]
    of_all = np.array(curves(jobs, work)).reshape(len(rules), seeds, len(budgets))
    for rule, values in zip(rules, of_all, strict=True):
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
    parser.add_argument("--rules", nargs="+", choices=RULES, default=RULES)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--fine_tune", type=int, metavar="STEPS", help="train all weights of RUN, not a probe")
    parser.add_argument("--jobs", type=int, default=1, help="curves at a time, in processes of their own (probe)")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    device = choose_device(options.device)
    pool, test = (embedded(options.run, options.data, split, options.images, device) for split in ("train", "test"))
    budgets = sorted(budget for budget in options.budgets if budget <= len(pool[0]))
    steps, rules, tuning = options.fine_tune, ["random", *(rule for rule in options.rules if rule != "random")], None
    if steps is not None:
        if options.jobs > 1:
            parser.error("--jobs is for probes; fine-tuning runs are trained one after the other")
        tuning = FineTuning(options.run, options.data, steps, options.images, device)
    result = compared(pool, test, int(pool[1].max()) + 1, budgets, options.seeds, rules, tuning, options.jobs)
    result |= {"model": options.run, "data": options.data, "regime": "linear probe" if steps is None else "fine-tuning"}
    if options.json:
        print(json.dumps(result))
        return
    table = Table(
        title=f"{result['regime']}, top-1 in %, mean ± std of {options.seeds} seeds; labels relative to random"
    )
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
