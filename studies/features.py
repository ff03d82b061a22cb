"""Features, tokens and predictions of the runs of a finished study; Markdown, mean and spread over its seeds.

    python studies/features.py separability runs/studies/grafit --data cifar100.npz --only ce triplet ce-triplet
    python studies/features.py tokens runs/studies/distillation --data cifar10.npz --only token two-tokens
    python studies/features.py disagreement runs/studies/distillation --data cifar10.npz --teacher WEIGHTS

Separability (E18; Grafit, arXiv 2011.12982): the images of each coarse class are cut at random into two halves, and a
linear classifier is fitted to the resulting labels on frozen features; its *training* accuracy over ten cuts says how
much the features keep apart that the labels did not name. A trunk with random weights is the floor. 'conditioned' gives
the classifier the coarse class. Tokens (E8; DeiT, arXiv 2012.12877): cosine of class and distillation token as learned,
and of the two after the last block. Disagreement (E9; DeiT, table 4): the share of test images that a run and the
teacher classify differently (between variants and between seeds: the report of `vitrail compare`).
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import torch
import torch.nn.functional as F
from row_table import Rows
from torch import Tensor

from vitrail.data.dataset import DataSet
from vitrail.data.loading.loader import EvalLoader
from vitrail.data.open import open_data
from vitrail.data.preprocess import Preprocess
from vitrail.learn.teacher import load_teacher
from vitrail.measure.evaluator import predict_all
from vitrail.measure.linear_classifiers import logistic_regression
from vitrail.model.assemble import from_spec
from vitrail.model.classifier import Classifier
from vitrail.model.heads.pooled import MeanHead
from vitrail.run.evaluate import load

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def batches(model: Classifier, data: DataSet, split: str) -> EvalLoader:
    model.to(DEVICE).eval()
    return EvalLoader(data[split], Preprocess(model.preprocess), batch=500, device=DEVICE, workers=0)


@torch.inference_mode()
def pooled(model: Classifier, data: DataSet) -> tuple[Tensor, Tensor]:
    """Mean of the patches of every training image, and its coarsest class."""
    features, coarse = [], []
    for batch in batches(model, data, "train"):
        features.append(MeanHead.pool(model.tokens(batch.images)).float())
        assert batch.levels is not None, "separability needs data with coarse classes"
        coarse.append(batch.levels[:, -1])
    return torch.cat(features), torch.cat(coarse)


def separability(features: Tensor, coarse: Tensor, cuts: int) -> dict[str, float]:
    """Training accuracy over random halves of coarse classes, alone and with the coarse class known; means."""
    classes, width = int(coarse.max()) + 1, features.shape[1]
    scaled = F.normalize(features, dim=1)[None] * width**0.5
    alone, conditioned = [], []
    for cut in range(cuts):
        generator = torch.Generator().manual_seed(cut)
        half = torch.zeros_like(coarse)
        for c in range(classes):
            members = (coarse == c).nonzero()[:, 0]
            order = torch.randperm(len(members), generator=generator).to(members.device)
            half[members[order[: len(members) // 2]]] = 1
        labels = 2 * coarse + half
        classifier = logistic_regression(scaled, labels[None], 2 * classes, strength=5e4 / len(labels))  # weak decay
        logits = classifier.scores(scaled)[0]
        alone.append(float((logits.argmax(1) == labels).float().mean()))
        within = logits.gather(1, torch.stack([2 * coarse, 2 * coarse + 1], 1))
        conditioned.append(float((within.argmax(1) == half).float().mean()))
    return {"separable": statistics.mean(alone), "conditioned": statistics.mean(conditioned)}


@torch.inference_mode()
def token_cosines(model: Classifier, data: DataSet) -> dict[str, float]:
    """Cosine of the first two prefix tokens: as learned, and after the last block, mean over test images."""
    learned = model.trunk.cls_token
    if learned is None or learned.shape[1] < 2:
        raise SystemExit("tokens: the model has no second token; name a run of a distilled model")
    last, cosines = f"tokens.{len(model.trunk.blocks) - 1}", []
    for batch in batches(model, data, "test"):
        tokens = model.outputs(batch.images, want={last}).captured[last].float()
        cosines.append(F.cosine_similarity(tokens[:, 0], tokens[:, 1], dim=-1))
    first = float(F.cosine_similarity(learned[0, 0], learned[0, 1], dim=0))
    return {"as learned": first, "after the last block": float(torch.cat(cosines).mean())}


def predictions(model: Classifier, data: DataSet) -> tuple[Tensor, Tensor]:
    """Predicted and true classes of all test images."""
    outputs = predict_all(model, batches(model, data, "test"))
    return outputs.logits.argmax(1).cpu(), outputs.target.cpu()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("separability", "tokens", "disagreement"))
    parser.add_argument("study", type=Path, help="folder of a finished study")
    parser.add_argument("--data", required=True)
    parser.add_argument("--only", nargs="+", default=[], help="variants (none: all)")
    parser.add_argument("--teacher", help="of disagreement: a run, or a weights file of a CIFAR ResNet")
    parser.add_argument("--cuts", type=int, default=10)
    options = parser.parse_args()
    if options.what == "disagreement" and not options.teacher:
        parser.error("disagreement is with a --teacher")
    data, rows = open_data(options.data), Rows()
    table = json.loads((options.study / "table.json").read_text(encoding="utf-8"))["rows"]
    runs = {
        row["variant"]: {run["seed"]: options.study.parent / Path(run["path"]).name for run in row["runs"]}
        for row in table
    }
    if strangers := set(options.only) - set(runs):
        raise SystemExit(f"{options.study} has no variant {min(strangers)!r}; it has {', '.join(runs)}")
    if options.what == "disagreement":
        first = load(next(iter(next(iter(runs.values())).values())))
        of_teacher, _ = predictions(load_teacher(options.teacher, first), data)

    def metrics(model: Classifier) -> dict[str, float]:
        if options.what == "tokens":
            return token_cosines(model, data)
        if options.what == "separability":
            return separability(*pooled(model, data), options.cuts)
        predicted, labels = predictions(model, data)
        others = {"from the teacher": of_teacher, "from the labels": labels}
        return {name: float((predicted != other).float().mean()) for name, other in others.items()}

    for name in options.only or runs:
        for seed, path in runs[name].items():
            model = load(path)
            rows.row(options.what, name, seed, lambda m=model: metrics(m))
            if options.what == "separability":
                torch.manual_seed(seed)
                how = {"classes": model.classes, "multilabel": False, "preprocess": model.preprocess, "device": None}
                untrained = from_spec(model.spec, **how)
                rows.row(options.what, "random weights", seed, lambda m=untrained: metrics(m))
    print(rows.markdown())


if __name__ == "__main__":
    main()
