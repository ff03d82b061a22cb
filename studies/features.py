"""What the runs of a finished study hold, looked at from outside; Markdown, mean and spread over the study's seeds.

    python studies/features.py separability runs/studies/grafit --data cifar100.npz --only ce triplet ce-triplet
    python studies/features.py tokens runs/studies/distillation --data cifar10.npz --only token two-tokens
    python studies/features.py disagreement runs/studies/distillation --data cifar10.npz --teacher WEIGHTS

Separability (E18; Grafit, arXiv 2011.12982): the images of each coarse class are cut at random into two halves, and a
linear classifier is fitted to the resulting labels on frozen features; its *training* accuracy over ten cuts says how
much the features keep apart that the labels did not name. A trunk with random weights is the floor. 'conditioned' gives
the classifier the coarse class. Tokens (E8; DeiT, arXiv 2012.12877): cosine of class and distillation token as learned,
and of the two after the last block. Disagreement (E9; DeiT, table 4): the share of test images on which two decide
differently; every variant against the teacher and the labels.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.compare.statistics import LABELS, disagreement
from vitrail.data.dataset import DataSet
from vitrail.data.loading.loader import EvalLoader
from vitrail.data.open import open_data
from vitrail.data.preprocess import Preprocess
from vitrail.learn.teacher import load_teacher
from vitrail.measure.evaluator import read_predictions
from vitrail.model.assemble import from_spec
from vitrail.model.classifier import Classifier
from vitrail.model.heads.pooled import MeanHead
from vitrail.run.evaluate import load


def batches(model: Classifier, data: DataSet, split: str, device: torch.device, most: int | None) -> EvalLoader:
    rows = data[split] if most is None else data[split].take(range(min(most, len(data[split]))))
    return EvalLoader(rows, Preprocess(model.preprocess), batch=500, device=device, workers=0)


@torch.inference_mode()
def pooled(model: Classifier, data: DataSet, device: torch.device, most: int | None) -> tuple[Tensor, Tensor]:
    """Mean of the patches of every training image, and its coarsest class."""
    model.to(device).eval()
    features, coarse = [], []
    for batch in batches(model, data, "train", device, most):
        features.append(MeanHead.pool(model.tokens(batch.images)).float())
        assert batch.levels is not None, "separability needs data with coarse classes"
        coarse.append(batch.levels[:, -1])
    return torch.cat(features), torch.cat(coarse)


def fitted(features: Tensor, labels: Tensor, classes: int, iterations: int = 60) -> Tensor:
    """Logits of a linear classifier fitted to the labels (multinomial logistic regression, weak decay)."""
    x = F.normalize(features, dim=1) * features.shape[1] ** 0.5
    x = torch.cat([x, torch.ones(len(x), 1, device=x.device)], 1)
    weight = torch.zeros(classes, x.shape[1], device=x.device, requires_grad=True)
    solver = torch.optim.LBFGS([weight], lr=1.0, max_iter=iterations, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        solver.zero_grad()
        loss = F.cross_entropy(x @ weight.T, labels) + 1e-5 * weight.square().sum()
        loss.backward()
        return loss

    solver.step(closure)
    return (x @ weight.T).detach()


def separability(features: Tensor, coarse: Tensor, cuts: int) -> tuple[list[float], list[float]]:
    """Training accuracy over random halves of coarse classes, alone and with the coarse class known."""
    classes = int(coarse.max()) + 1
    alone, conditioned = [], []
    for cut in range(cuts):
        generator = torch.Generator().manual_seed(cut)
        half = torch.zeros_like(coarse)
        for c in range(classes):
            members = (coarse == c).nonzero()[:, 0]
            order = torch.randperm(len(members), generator=generator).to(members.device)
            half[members[order[: len(members) // 2]]] = 1
        labels = 2 * coarse + half
        logits = fitted(features, labels, 2 * classes)
        alone.append(float((logits.argmax(1) == labels).float().mean()))
        own = logits.gather(1, torch.stack([2 * coarse, 2 * coarse + 1], 1))
        conditioned.append(float((own.argmax(1) == half).float().mean()))
    return alone, conditioned


@torch.inference_mode()
def token_cosines(model: Classifier, data: DataSet, device: torch.device, most: int | None) -> list[float]:
    """Cosine of the first two prefix tokens: as learned, then after each block, mean over images."""
    model.to(device).eval()
    learned = model.trunk.cls_token
    if learned is None or learned.shape[1] < 2:
        raise SystemExit("tokens: the model has no second token; name a run of a distilled model")
    found = [float(F.cosine_similarity(learned[0, 0], learned[0, 1], dim=0))]
    names = [f"tokens.{i}" for i in range(len(model.trunk.blocks))]
    sums, count = torch.zeros(len(names)), 0
    for batch in batches(model, data, "test", device, most):
        captured = model.outputs(batch.images, want=set(names)).captured
        each = [F.cosine_similarity(captured[n][:, 0].float(), captured[n][:, 1].float(), dim=-1).sum() for n in names]
        sums += torch.stack(each).cpu()
        count += len(batch)
    return [*found, *(sums / count).tolist()]


@torch.inference_mode()
def decided(model: Classifier, data: DataSet, device: torch.device, most: int | None) -> dict[int, int]:
    """What a model says of each test image: its class number, by the image's index."""
    model.to(device).eval()
    said: dict[int, int] = {}
    for batch in batches(model, data, "test", device, most):
        said |= dict(zip(batch.index.tolist(), model(batch.images).argmax(1).tolist(), strict=True))
    return said


def variants(folder: Path, only: Sequence[str]) -> Iterator[tuple[str, list[Path]]]:
    """Names of a finished study's variants, and the folders of their runs."""
    made = json.loads((folder / "table.json").read_text(encoding="utf-8"))
    names = [row["variant"] for row in made["rows"]]
    if strangers := set(only) - set(names):
        raise SystemExit(f"{folder} has no variant {sorted(strangers)[0]!r}; it has {', '.join(names)}")
    for row in made["rows"]:
        if not only or row["variant"] in only:
            yield row["variant"], [folder.parent / Path(run["path"]).name for run in row["runs"]]


def over(values: Iterable[float], form: str = ".1%") -> str:
    """Mean and, of several, standard deviation."""
    many = list(values)
    spread = f" ± {statistics.stdev(many):{form}}" if len(many) > 1 else ""
    return f"{statistics.mean(many):{form}}{spread}"


def row(*cells: str) -> None:
    print(f"| {' | '.join(cells)} |", flush=True)


def table(*heads: str) -> None:
    row(*heads)
    print("|---" * len(heads) + "|")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("separability", "tokens", "disagreement"))
    parser.add_argument("study", type=Path, help="folder of a finished study")
    parser.add_argument("--data", required=True)
    parser.add_argument("--only", nargs="+", default=[], help="variants (none: all)")
    parser.add_argument("--teacher", help="of whom disagreement is asked: a run, or a weights file of a CIFAR ResNet")
    parser.add_argument("--cuts", type=int, default=10)
    parser.add_argument("--most", type=int, help="at most so many images")
    options = parser.parse_args()
    if options.what == "disagreement" and not options.teacher:
        parser.error("disagreement is with a --teacher")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data, most = open_data(options.data), options.most
    chosen = list(variants(options.study, options.only))

    if options.what == "tokens":
        table("variant", "cosine of the tokens as learned", "after the last block", "seeds")
        for name, runs in chosen:
            cosines = [token_cosines(load(run), data, device, most) for run in runs]
            row(name, over((c[0] for c in cosines), ".3f"), over((c[-1] for c in cosines), ".3f"), str(len(runs)))
        return

    first = load(chosen[0][1][0])
    if options.what == "disagreement":
        said = decided(load_teacher(options.teacher, first), data, device, most)
        table("variant", "differs from the teacher", "from the labels", "from another seed", "seeds")
        for name, runs in chosen:
            kept = [stored for run in runs if (stored := read_predictions(run)) is not None]
            known = torch.tensor([int(i) in said for i in kept[0].index])
            of_teacher = torch.tensor([said[int(i)] for i in kept[0].index[known]])
            guesses = {f"seed {n}": stored.guess[known] for n, stored in enumerate(kept)}
            rates = disagreement({"teacher": of_teacher, **guesses}, kept[0].target[known])
            others = [rates.between(a, b) for a, b in combinations(guesses, 2)]
            row(
                name,
                over(rates.between("teacher", seed) for seed in guesses),
                over(rates.between(LABELS, seed) for seed in guesses),
                over(others) if others else "",
                str(len(kept)),
            )
        row("the teacher", "", f"{rates.between(LABELS, 'teacher'):.1%}", "", "")
        return

    def separable(model: Classifier) -> tuple[float, float]:
        alone, conditioned = separability(*pooled(model, data, device, most), options.cuts)
        return statistics.mean(alone), statistics.mean(conditioned)

    table("variant", f"separable, mean of {options.cuts} cuts", "conditioned", "seeds")
    for name, runs in chosen:
        parts = [separable(load(run)) for run in runs]
        row(name, over(alone for alone, _ in parts), over(known for _, known in parts), str(len(runs)))
    parts = []
    for seed in range(len(chosen[0][1])):
        torch.manual_seed(seed)
        untrained = from_spec(
            first.spec, classes=first.classes, multilabel=False, preprocess=first.preprocess, device=None
        )
        parts.append(separable(untrained))
    row("random weights", over(alone for alone, _ in parts), over(known for _, known in parts), str(len(parts)))


if __name__ == "__main__":
    main()
