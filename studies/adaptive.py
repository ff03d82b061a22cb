"""Adaptive models and attacks on what they save: token sampling, halting, gates; patches, perturbations, a defence.

    python studies/adaptive.py [--data cifar100.npz] [--pixels 32|56|128] [--seeds 3] [--jobs 3] [--out runs/studies]
                               [--part ats victims attacks transfer defence variations] [--ponder 0.0125] [--smoke]

Trains what is missing of adaptive.yaml, then A-ViT (its gate set for each plain model), a defended A-ViT and one
trained as long without patches; evaluates and attacks them. Rows are kept in OUT/adaptive/rows.json and printed as
Markdown, patches and runs lie in OUT: the same command goes on where it was stopped. Everything reported is of test
images. `--pixels` resizes images: 56 makes 196 tokens, 128 as many tokens as 32, of sixteen pixels a side. The weight
`--ponder` of A-ViT's ponder loss should save 30 to 50 % on val. Speed: `vitrail bench RUN RUN --data cifar100.npz`.

Expected (ATS, arXiv 2111.15667; SlowFormer, arXiv 2310.02544): sampling loses little without training, several blocks
lose less than one, the first block is the worst; the class token scores better than a random one, inverse sampling
better than the highest scores and than as many tokens drawn uniformly. A learned patch drives cost up where random,
targeted and untargeted patches do not; it grows with its area and with eps, keeps accuracy where it is asked to, and
helps little against other victims. A defence lowers its success, but not to nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from row_table import Row, Rows
from torch import Tensor

from vitrail.compare.run import compare_study
from vitrail.compare.study import Study, read_study, smoke
from vitrail.compare.tuning import merged
from vitrail.data.loading.loader import EvalLoader
from vitrail.data.preprocess import Preprocess
from vitrail.engine.device import choose_device, choose_precision
from vitrail.learn.attack import load_patch
from vitrail.measure.compute import spent, worst_case
from vitrail.model.adaptive.ats import AtsPolicy
from vitrail.model.adaptive.budget import matched_caps
from vitrail.model.build import make_adaptive
from vitrail.model.classifier import Classifier
from vitrail.model.config import Ats, Avit
from vitrail.model.cost import cost
from vitrail.recipes import recipe
from vitrail.run.attack_run import attack, evaluate_patch
from vitrail.run.evaluate import load
from vitrail.run.run_data import open_for
from vitrail.schema import plain

PARTS = ("ats", "victims", "attacks", "transfer", "defence", "variations")
VICTIMS = ("ats", "avit", "adavit")
SHARES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
BUDGETS = (0.65, 0.48)  # of the dense cost, for ablations: the paper's 3 of 4.6 GMACs, and less than a share of 1 costs
POINTS = (2, 4, 8, 64, 1024, 65536)  # where no number of points costs what is wanted
PATCH = {32: 4, 56: 4, 128: 16}  # side of a token by side of an image
OPTIONS: dict[str, dict[str, Any]] = {
    "class row, value norm, inverse, raster, from a quarter": {},
    "scores: column": {"score": "column"},
    "scores: random": {"score": "random"},
    "no value norm": {"value_norm": False},
    "sampling: nearest": {"sampling": "nearest"},
    "sampling: top": {"sampling": "top"},
    "sampling: inverse at random points": {"sampling": "random"},
    "sampling: uniform, no scores": {"sampling": "uniform"},
    "order: sorted": {"order": "sorted"},
    "class token may go": {"keep_class": False},
}
MAIN: dict[str, dict[str, Any]] = {"tap": {"loss": "tap"}, "ntap": {"loss": "ntap"}, "slowformer": {}}
VARIATIONS: dict[str, dict[str, Any]] = {
    "preserve": {"task": "preserve"},
    "destroy": {"task": "destroy"},
    **{f"size {size}": {"size": size} for size in (4, 12, 16)},  # of 32 pixels
    **{f"eps {eps}": {"change": "perturbation", "eps": eps} for eps in (8, 16, 32)},
}
OF_AVIT: dict[str, dict[str, Any]] = {  # SlowFormer varies these on A-ViT alone
    "released prior": {"prior": "released"},
    "centre": {"place": "centre"},
    "another start": {"seed": 1000},
}
ATTACKS = {**MAIN, **VARIATIONS, **OF_AVIT}
STEPS, DEFENCE_EPOCHS = 1000, 8  # of attacks; rate, batch and the weights of layers are those of the recipes
SMOKE_DATA = {"batch": 20, "check": "off"}
TINY = {"model": {"trunk": {"depth": 3, "width": 48, "heads": 3}}, "engine": {"device": "cpu"}}


class Adaptive:
    """All models and measurements, each made once."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.smoke, self.pixels = options, options.smoke, options.pixels
        study = read_study(Path(__file__).with_name("adaptive.yaml"))
        study = replace(study, base=replace(study.base, data=replace(study.base.data, uri=options.data)))
        self.study = self._sized(replace(study, seeds=range(options.seeds)))
        self.device = choose_device("cpu" if self.smoke else "auto")
        self.autocast = choose_precision("auto", self.device)
        self.folder = Path(options.out) / self.study.name
        self.rows = Rows(self.folder / "rows.json")
        self.row = self.rows.row

    def _sized(self, study: Study) -> Study:
        """The study with images of other pixels: the same crops; in smoke runs with tiny models."""
        changes: dict[str, Any] = TINY if self.smoke else {}
        if self.pixels != 32:
            padding = study.base.data.augment.padding * self.pixels // 32
            sized = {"model": {"image_size": self.pixels, "trunk": {"patch": PATCH[self.pixels]}}}
            changes = merged(changes, merged(sized, {"data": {"crop_ratio": 1.0, "augment": {"padding": padding}}}))
        self.changes = changes
        variants = {name: merged(each, changes) for name, each in study.variants.items()}
        name = study.name if self.pixels == 32 else f"{study.name}-{self.pixels}"
        return replace(study, name=name, variants=variants)

    def trained(self, study: Study) -> Path:
        """Train what is missing; the folder of the runs."""
        study = smoke(study) if self.smoke else study
        options = {"root": self.options.out, "jobs": self.options.jobs, "seconds": 0}
        return compare_study(study, **options)[1] / "runs"

    def single(self, name: str, seed: int, start: Path, policy: dict[str, Any], **changes: Any) -> Path:
        """One more run in the settings of the study, from the weights of another."""
        optim = {"epochs": 15.0, "lr": 3e-4, "warmup": 1.0}
        settings = {"model": {"weights": str(start), "trunk": {"adaptive": policy}}, "optim": optim}
        variants = {name: merged(merged(merged(settings, {"engine": {"compile": False}}), changes), self.changes)}
        study = replace(self.study, name=f"{self.study.name}-{name}", baseline=name, seeds=(seed,), variants=variants)
        return (self.trained(study) / f"{name}-seed{seed}").resolve()

    @cache  # noqa: B019
    def run(self, name: str, seed: int) -> Path:
        """The folder of a run, which is trained where it is not there."""
        if name in self.study.variants:
            return (self.trained(self.study) / f"{name}-seed{seed}").resolve()
        if name == "avit":
            policy = {"kind": "avit", **self.gate(seed), "ponder": self.options.ponder}
            return self.single(name, seed, self.run("plain", seed), policy)
        policy = plain(self.model("avit", seed).trunk.config.adaptive)  # type: ignore[union-attr]
        objective = plain(recipe("small-defence").objective)
        objective["attack"]["size"] = 8 * self.pixels // 32
        objective |= {"every": 1, "inner_steps": 1} if self.smoke else {}
        objective = objective if name == "defended" else objective["labels"]
        optim = {"epochs": DEFENCE_EPOCHS}
        return self.single(name, seed, self.run("avit", seed), policy, optim=optim, objective=objective)

    @cache  # noqa: B019
    def model(self, name: str, seed: int) -> Classifier:
        return load(self.run(name, seed)).to(self.device).eval()

    def gate(self, seed: int) -> dict[str, float]:
        """A gate of A-ViT through which nothing goes at the start, as far open as that allows.

        The published scale of 10 would leave a trained stream far out on the sigmoid, where nothing can be learned: the
        scale is one over the standard deviation of the first channel, and the centre the lowest that holds at least 99
        of 100 tokens until the last block.
        """
        model = self.model("plain", seed)
        names = [f"tokens.{i}" for i in range(len(model.trunk.blocks) - 1)]  # type: ignore[arg-type]
        with self.evaluating():
            captured = model.outputs(self.some("val"), want=set(names)).captured
        first = torch.stack([captured[name][..., 0].float() for name in names])  # [blocks, batch, tokens]
        scale = min(10.0, 1 / float(first.std().clamp(min=1e-3)))
        for above in range(1, 41):
            center = scale * float(first.mean()) + above / 4
            if float((torch.sigmoid(scale * first - center).sum(0) > 1 - Avit.eps).float().mean()) < 0.01:
                break
        return {"gate_scale": round(scale, 4), "gate_center": round(center, 4)}

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        with torch.no_grad(), torch.autocast(self.device.type, self.autocast, enabled=self.autocast is not None):
            yield

    def loader(self, model: Classifier, split: str) -> EvalLoader:
        rows = open_for(model, self.options.data)[split]
        rows = rows.take(range(min(40, len(rows)))) if self.smoke else rows
        return EvalLoader(rows, Preprocess(model.preprocess), batch=1000, device=self.device, workers=0)

    def some(self, split: str) -> Tensor:
        """One batch of images, as the model takes them."""
        model = self.model("plain", 0)
        return model._images(next(iter(self.loader(model, split))).images.to(self.device))

    def spend(self, model: Classifier) -> Row:
        """Accuracy and cost of an adaptive model on test images."""
        model.to(self.device).eval()
        result = spent(model, self.loader(model, "test"), autocast=self.autocast, device=self.device)
        tokens, share = sum(result.tokens) / len(result.tokens), result.macs / worst_case(model)
        return {"top1": result.top1, "macs": result.macs, "share": share, "tokens": tokens}

    def ats(self, seed: int) -> None:
        """Accuracy against cost over shares of sampling points, and ways of sampling at about equal cost."""
        untrained = make_adaptive(self.model("plain", seed), Ats())
        for state, model in (("without training", untrained), ("fine-tuned", self.model("ats", seed))):
            for share in (*SHARES, 1.0):  # at last the budget is as it was
                model.set_budget(ratio=share)
                self.row("shares", f"{state}, share {share:g}", seed, lambda m=model: self.spend(m))
        depth = len(untrained.trunk.blocks)  # type: ignore[arg-type]
        places = {"first block": [0], "at a quarter": [depth // 4], "at half": [depth // 2], "all": range(depth)}
        ways = {**OPTIONS, **{f"placement: {name}": {"layers": tuple(layers)} for name, layers in places.items()}}
        for budget, (name, chosen) in product(BUDGETS, ways.items()):
            # At random points no more are drawn than there are patches, which costs less than the first budget.
            if not (chosen.get("sampling") == "random" and budget > 0.5):
                make = partial(self._at_budget, chosen, budget, seed)
                self.row("sampling", f"{name}, {budget:.0%}", seed, lambda m=make: self.spend(m()))
        for budget, sampling in product(BUDGETS, ("uniform", "top")):  # as many tokens as the reference keeps, mean
            name = f"equal token counts: {sampling}, {budget:.0%}"
            self.row("sampling", name, seed, partial(self._at_equal_tokens, sampling, budget, seed))

    def _at_budget(self, options: dict[str, Any], budget: float, seed: int) -> Classifier:
        """A sampling model that costs as large a part of the dense one on validation images."""
        base, images = self.model("plain", seed), [self.some("val")]
        with self.evaluating():
            wanted = budget * cost(base).macs / 1e9
            model = make_adaptive(base, Ats(**options))
            try:
                model.set_budget(gmacs=wanted, images=images)
            except ValueError:  # nothing costs that: the nearest number of points, and the row says what it costs
                tried = {n: model.set_budget(tokens=n, images=images) or 0.0 for n in POINTS}
                model.set_budget(tokens=min(tried, key=lambda n: abs(tried[n] - wanted)))
        return model

    def _at_equal_tokens(self, sampling: Any, budget: float, seed: int) -> Row:
        with self.evaluating():
            caps = matched_caps(self._at_budget({}, budget, seed), [self.some("val")])
        return self.spend(make_adaptive(self.model("plain", seed), Ats(sampling=sampling, cap=caps)))

    def victims(self, seed: int) -> None:
        for kind in VICTIMS:
            self.row("victims", kind, seed, lambda k=kind: self.spend(self.model(k, seed)))

    def attacks(self, seed: int) -> None:
        for kind, what in product(VICTIMS, MAIN):
            self.attacked("attacks", kind, what, seed)

    def variations(self, seed: int) -> None:
        for kind, what in (*product(VICTIMS, VARIATIONS), *(("avit", what) for what in OF_AVIT)):
            self.attacked("attacks", kind, what, seed)

    def transfer(self, seed: int) -> None:
        for source in VICTIMS:
            self.attacked("attacks", source, "slowformer", seed)
            for kind in (k for k in VICTIMS if k != source):
                self.transferred("transfer", kind, source, seed)

    def defence(self, seed: int) -> None:
        """A defended model and one trained as long without patches: as they are, attacked anew, by the old patch."""
        self.attacked("attacks", "avit", "slowformer", seed)
        for kind in ("defended", "control"):
            self.attacked("defence", kind, "slowformer", seed)
            self.transferred("defence", kind, "avit", seed)

    def attacked(self, table: str, kind: str, what: str, seed: int) -> None:
        """A patch or perturbation learned against one victim; rows without attack and of a random one come with it."""

        def make() -> Row:
            config = recipe(f"small-attack-{kind if kind in VICTIMS else 'avit'}")
            model = self.model(kind, seed)
            objective = {**plain(config.objective), "seed": seed, **ATTACKS[what]}
            if what == "tap":  # another class with every seed
                objective["target"] = len(model.classes) * (seed % 3) // 3
            objective["size"] = objective["size"] * self.pixels // 32
            if isinstance(model.policy, AtsPolicy):
                objective["layer_weights"] = objective["layer_weights"][: len(model.policy.at)]
            data = {"batch": config.data.batch, "uri": self.options.data, **(SMOKE_DATA if self.smoke else {})}
            optim = {**plain(config.optim), "steps": 1 if self.smoke else STEPS}
            engine = {"device": self.device.type}
            values = {"objective": objective, "optim": optim, "seed": seed, "data": data, "engine": engine}
            result = attack(self.run(kind, seed), values, out=self.place(kind, what, seed), quiet=True)
            for done in result.rows[:2]:
                self.row(table, f"{kind}, {done.attack}", seed, lambda d=done: _of(d))
            return _of(result.rows[-1]) | self._attended(model, kind, what, seed)

        self.row(table, f"{kind}, {what}", seed, make)

    def transferred(self, table: str, kind: str, source: str, seed: int) -> None:
        """The patch that was learned on another victim."""

        def make() -> Row:
            patch, data = self.place(source, "slowformer", seed), self.options.data
            return _of(evaluate_patch(self.run(kind, seed), patch, data, device=self.device.type).rows[-1])

        self.row(table, f"{kind}, patch of {source}", seed, make)

    def place(self, kind: str, what: str, seed: int) -> Path:
        return self.folder / "patches" / f"{kind}-{what.replace(' ', '-')}-seed{seed}"

    def _attended(self, model: Classifier, kind: str, what: str, seed: int) -> Row:
        """Tokens that the class token attends to where tokens are sampled: exp of the entropy, mean."""
        if not isinstance(model.policy, AtsPolicy):
            return {}
        change = load_patch(self.place(kind, what, seed), model.preprocess)[0].to(self.device)
        with self.evaluating():
            names = {f"attention.{i}" for i in model.policy.at}
            captured = model.outputs(change(self.some("test")), want=names).captured
            rows = [captured[name][:, :, 0].float() for name in sorted(names)]
            entropies = torch.stack([-torch.xlogy(row, row).sum(-1).mean() for row in rows])
        return {"attended": float(entropies.exp().mean())}


def _of(row: Any) -> Row:
    success = {} if row.success is None else {"success": row.success}
    return {"top1": row.figures.top1, "macs": row.figures.macs, **success}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="cifar100.npz")
    parser.add_argument("--pixels", type=int, default=32, choices=PATCH, help="side to which images are resized")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, help="training runs at a time")
    parser.add_argument("--ponder", type=float, default=0.0125, help="weight of A-ViT's ponder loss")
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--out", type=Path, default=Path("runs/studies"))
    parser.add_argument("--smoke", action="store_true", help="tiny models, two steps each; figures mean nothing")
    options = parser.parse_args()
    study = Adaptive(options)
    for seed, part in product(range(options.seeds), options.part):
        getattr(study, part)(seed)
    print(study.rows.markdown())


if __name__ == "__main__":
    main()
