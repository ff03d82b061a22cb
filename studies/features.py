"""What trained trunks hold, looked at from outside.

    python studies/features.py separability RUN ... --data cifar100.npz
    python studies/features.py tokens RUN ... --data cifar10.npz

Separability (E18, T2.1): the images of each coarse class are cut at random into two halves, and a linear classifier is
fitted to the resulting labels on frozen features; its *training* accuracy, mean and spread over ten cuts, says how much
the features keep apart that the labels did not name. A trunk with random weights is the floor. 'conditioned' gives the
classifier the coarse class. Tokens (E8, section 3.3): cosine of class and distillation token as learned, and of the two
after each block.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.api.evaluation import load
from vitrail.data.loader import EvalLoader
from vitrail.data.open import open_data
from vitrail.data.preprocess import Preprocess
from vitrail.data.source import DataSet
from vitrail.model.build import from_spec
from vitrail.model.classifier import Classifier
from vitrail.model.heads.mean import MeanHead


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("separability", "tokens"))
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--data", required=True)
    parser.add_argument("--cuts", type=int, default=10)
    parser.add_argument("--most", type=int, help="at most so many images")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data = open_data(options.data)
    if options.what == "tokens":
        for run in options.runs:
            values = token_cosines(load(run), data, device, options.most)
            print(f"{run}: learned {values[0]:.3f}; after blocks " + " ".join(f"{v:.3f}" for v in values[1:]))
        return
    models = {str(run): load(run) for run in options.runs}
    first = next(iter(models.values()))
    torch.manual_seed(0)
    models["random"] = from_spec(
        first.spec, classes=first.classes, multilabel=False, preprocess=first.preprocess, device=None
    )
    for name, model in models.items():
        alone, conditioned = separability(*pooled(model, data, device, options.most), options.cuts)
        parts = [f"{statistics.mean(v):.1%} ± {statistics.stdev(v):.1%}" for v in (alone, conditioned)]
        print(f"{name}: {parts[0]}, conditioned {parts[1]} over {options.cuts} cuts", flush=True)


if __name__ == "__main__":
    main()
