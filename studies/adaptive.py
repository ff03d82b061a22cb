"""Adaptive models and attacks on what they save: token sampling, halting, gates; patches, perturbations, a defence.

    python studies/adaptive.py [--data cifar100.npz] [--pixels 32|56|128] [--seeds 3] [--jobs 3] [--out runs/studies]
                               [--part ats victims attacks transfer defence variations speed] [--smoke]

Trains what is missing of adaptive.yaml, then A-ViT (its gate set for each plain model, the weight of its ponder loss
chosen on validation images so that it saves 30 to 50 %), a defended A-ViT and one trained as long without patches;
measures and attacks them. Rows are kept in OUT/adaptive/rows.json and printed as Markdown, patches and runs lie in OUT:
the same command goes on where it was stopped. Everything reported is of test images. `--pixels` resizes images: 56
makes 196 tokens, 128 as many tokens as 32, of sixteen pixels a side. `speed` wants the accelerator for itself.

Expected (ATS, arXiv 2111.15667; SlowFormer, arXiv 2310.02544): sampling loses little without training, several blocks
lose less than one, the first block is the worst; the class token scores better than a random one, inverse sampling
better than the highest scores and than as many tokens drawn uniformly. A learned patch drives cost up where random,
targeted and untargeted patches do not; it grows with its area and with eps, keeps accuracy where it is asked to, and
helps little against other victims. A defence lowers its success, but not to nothing.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
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
from vitrail.learn.attack_config import AttackConfig
from vitrail.measure.compute import spent, worst_case
from vitrail.measure.speed import Way, in_turns
from vitrail.model.adaptive.ats import AtsPolicy
from vitrail.model.adaptive.budget import calibrate, matched_caps
from vitrail.model.build import make_adaptive
from vitrail.model.classifier import Classifier
from vitrail.model.config import Ats, Avit
from vitrail.model.cost import cost
from vitrail.recipes import recipe
from vitrail.run.attack_run import attack, evaluate_patch
from vitrail.run.evaluate import load
from vitrail.run.run_data import open_for
from vitrail.schema import plain

PARTS = ("ats", "victims", "attacks", "transfer", "defence", "variations", "speed")
VICTIMS = ("ats", "avit", "adavit")
SHARES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
BUDGETS = (0.65, 0.48)  # of the dense cost, for ablations: the paper's 3 of 4.6 GMACs, and less than a share of 1 costs
POINTS = (2, 4, 8, 64, 1024, 65536)  # where no number of points costs what is wanted
PATCH = {32: 4, 56: 4, 128: 16}  # side of a token by side of an image
FIRST_PONDER, FURTHER, TRIES, SAVED = 0.05, 4.0, 4, (0.3, 0.5)  # of the search for a ponder weight
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
STEPS, DEFENCE_EPOCHS = 1000, 8  # of attacks; rate, batch and the weights of layers are those of the recipes
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
        self._kept: dict[tuple[str, int], Classifier] = {}
        self._runs: dict[tuple[str, int], Path] = {}

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

    def run(self, name: str, seed: int) -> Path:
        """The folder of a run, which is trained where it is not there."""
        if (name, seed) not in self._runs:
            self._runs[name, seed] = self._run(name, seed)
        return self._runs[name, seed]

    def _run(self, name: str, seed: int) -> Path:
        if name in self.study.variants:
            return (self.trained(self.study) / f"{name}-seed{seed}").resolve()
        if name == "avit":
            return self.avit(seed, self.ponder())
        victim = self.run("avit", seed)
        objective = plain(recipe("small-defence").objective)
        objective["attack"]["size"] = 8 * self.pixels // 32
        objective |= {"every": 1, "inner_steps": 1} if self.smoke else {}
        return self.single(
            name,
            seed,
            victim,
            plain(load(victim).trunk.config.adaptive),  # type: ignore[union-attr]
            optim={"epochs": float(DEFENCE_EPOCHS)},
            objective=objective if name == "defended" else objective["labels"],
        )

    def avit(self, seed: int, ponder: float) -> Path:
        policy = {"kind": "avit", **self.gate(seed), "ponder": ponder}
        return self.single("avit", seed, self.run("plain", seed), policy)

    def model(self, name: str, seed: int) -> Classifier:
        if (name, seed) not in self._kept:
            self._kept[name, seed] = load(self.run(name, seed)).to(self.device).eval()
        return self._kept[name, seed]

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

    def ponder(self) -> float:
        """A weight of the ponder loss that saves 30 to 50 % of the cost; seed 0, validation images."""
        weight, low, high, tried = FIRST_PONDER, 0.0, math.inf, dict[float, float]()
        for _ in range(TRIES):
            row = self.row("ponder", f"{weight:.4g}", 0, lambda w=weight: self.spend(load(self.avit(0, w)), "val"))
            tried[weight] = saved = 1 - row["share"]
            if SAVED[0] <= saved <= SAVED[1]:
                break
            low, high = (weight, high) if saved < SAVED[0] else (low, weight)
            weight = math.sqrt(low * high) if low and high < math.inf else FURTHER * low or high / FURTHER
        return min(tried, key=lambda w: abs(tried[w] - sum(SAVED) / 2))

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        with torch.no_grad(), torch.autocast(self.device.type, self.autocast, enabled=self.autocast is not None):
            yield

    def loader(self, model: Classifier, split: str) -> EvalLoader:
        rows = open_for(model, self.options.data)[split]
        rows = rows.take(range(min(40, len(rows)))) if self.smoke else rows
        batch = min(1000, len(rows))
        return EvalLoader(rows, Preprocess(model.preprocess), batch=batch, device=self.device, workers=0)

    def some(self, split: str) -> Tensor:
        """One batch of images, as the model takes them."""
        model = self.model("plain", 0)
        return model._images(next(iter(self.loader(model, split))).images.to(self.device))

    def spend(self, model: Classifier, split: str = "test") -> Row:
        """Accuracy and cost of an adaptive model on a split."""
        model.to(self.device).eval()
        result, most = (
            spent(model, self.loader(model, split), autocast=self.autocast, device=self.device),
            worst_case(model),
        )
        tokens = sum(result.tokens) / len(result.tokens)
        return {"top1": result.top1, "macs": result.macs, "share": result.macs / most, "tokens": tokens}

    def ats(self, seed: int) -> None:
        """Accuracy against cost over shares of sampling points, and ways of sampling at about equal cost."""
        for state, model in self._sampling(seed):
            for share in SHARES:
                self.row("shares", f"{state}, share {share:g}", seed, lambda m=model, s=share: self._at_share(m, s))
        depth = len(self.model("plain", seed).trunk.blocks)  # type: ignore[arg-type]
        places = {
            "first block": (0,),
            "at a quarter": (depth // 4,),
            "at half": (depth // 2,),
            "all": tuple(range(depth)),
        }
        ways = {**OPTIONS, **{f"placement: {name}": {"layers": layers} for name, layers in places.items()}}
        for budget in BUDGETS:
            for name, chosen in ways.items():
                if chosen.get("sampling") == "random" and budget > 0.5:
                    continue  # it draws no more points than there are patches, which costs less than that
                self.row(
                    "sampling",
                    f"{name}, {budget:.0%}",
                    seed,
                    lambda c=chosen, b=budget: self.spend(self._at_budget(c, b, seed)),
                )
            for sampling in ("uniform", "top"):  # as many tokens in every block as the reference keeps, mean
                self.row(
                    "sampling",
                    f"equal token counts: {sampling}, {budget:.0%}",
                    seed,
                    lambda s=sampling, b=budget: self._at_equal_tokens(s, b, seed),
                )

    def _sampling(self, seed: int) -> list[tuple[str, Classifier]]:
        return [
            ("without training", make_adaptive(self.model("plain", seed), Ats())),
            ("fine-tuned", self.model("ats", seed)),
        ]

    def _at_share(self, model: Classifier, share: float) -> Row:
        model.set_budget(ratio=share)
        row = self.spend(model)
        model.set_budget(ratio=1.0)
        return row

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
        for kind in VICTIMS:
            for what, options in MAIN.items():
                self.attacked("attacks", kind, what, options, seed)

    def variations(self, seed: int) -> None:
        for kind in VICTIMS:
            for what, options in {**VARIATIONS, **(OF_AVIT if kind == "avit" else {})}.items():
                self.attacked("attacks", kind, what, options, seed)

    def transfer(self, seed: int) -> None:
        for source in VICTIMS:
            self.attacked("attacks", source, "slowformer", {}, seed)
            for kind in (k for k in VICTIMS if k != source):
                self.transferred("transfer", kind, source, seed)

    def defence(self, seed: int) -> None:
        """A defended model and one trained as long without patches: as they are, attacked anew, by the old patch."""
        self.attacked("attacks", "avit", "slowformer", {}, seed)
        for kind in ("defended", "control"):
            self.attacked("defence", kind, "slowformer", {}, seed)
            self.transferred("defence", kind, "avit", seed)

    def attacked(self, table: str, kind: str, what: str, options: dict[str, Any], seed: int) -> None:
        """A patch or perturbation learned against one victim; rows without attack and of a random one come with it."""

        def make() -> Row:
            config = recipe(f"small-attack-{kind if kind in VICTIMS else 'avit'}")
            assert isinstance(config.objective, AttackConfig)
            model = self.model(kind, seed)
            objective = {**plain(config.objective), "seed": seed, **options}
            if what == "tap":  # another class with every seed
                objective["target"] = len(model.classes) * (seed % 3) // 3
            objective["size"] = objective["size"] * self.pixels // 32
            if isinstance(model.policy, AtsPolicy):
                objective["layer_weights"] = objective["layer_weights"][: len(model.policy.at)]
            optim = {**plain(config.optim), "steps": 1 if self.smoke else STEPS}
            values = {
                "objective": objective,
                "optim": optim,
                "seed": seed,
                "data": {"batch": config.data.batch, "uri": self.options.data},
            }
            if self.smoke:
                values["data"] |= {"batch": 20, "check": "off"}
            result = attack(
                self.run(kind, seed),
                {**values, "engine": {"device": self.device.type}},
                out=self.place(kind, what, seed),
                quiet=True,
            )
            for done in result.rows[:2]:
                self.row(table, f"{kind}, {done.attack}", seed, lambda d=done: _of(d, None))
            return _of(result.rows[-1], self._attended(model, kind, what, seed))

        self.row(table, f"{kind}, {what}", seed, make)

    def transferred(self, table: str, kind: str, source: str, seed: int) -> None:
        """The patch that was learned on another victim."""
        place = self.place(source, "slowformer", seed)

        def make() -> Row:
            result = evaluate_patch(self.run(kind, seed), place, self.options.data, device=self.device.type)
            return _of(result.rows[-1], None)

        self.row(table, f"{kind}, patch of {source}", seed, make)

    def place(self, kind: str, what: str, seed: int) -> Path:
        return self.folder / "patches" / f"{kind}-{what.replace(' ', '-')}-seed{seed}"

    def _attended(self, model: Classifier, kind: str, what: str, seed: int) -> float | None:
        """Tokens that the class token attends to where tokens are sampled: exp of the entropy, mean."""
        if not isinstance(model.policy, AtsPolicy):
            return None
        from vitrail.learn.attack import load_patch

        change = load_patch(self.place(kind, what, seed), model.preprocess)[0].to(self.device)
        with self.evaluating():
            names = {f"attention.{i}" for i in model.policy.at}
            captured = model.outputs(change(self.some("test")), want=names).captured
            rows = [captured[name][:, :, 0].float() for name in sorted(names)]
            return float(torch.stack([-torch.xlogy(row, row).sum(-1).mean() for row in rows]).exp().mean())

    def speed(self, seed: int) -> None:
        """Images/s of optimised models, sampling (packed on CUDA) and dense in turns; one share compiled, too."""
        for state, model in self._sampling(seed):
            for share, compiled in (
                *((share, False) for share in SHARES),
                *([(0.7, True)] if state == "fine-tuned" else []),
            ):
                self.row(
                    "speed",
                    f"{state}, share {share:g}{', compiled' * compiled}",
                    seed,
                    lambda m=model, s=share, c=compiled: self._speed(m, s, seed, c),
                )

    def _speed(self, model: Classifier, share: float, seed: int, compiled: bool) -> Row:
        fast, dense = self.device.type == "cuda", self.model("plain", seed)
        images = [batch.images.to(self.device) for batch in self.loader(dense, "test")]
        model.set_budget(ratio=share)
        if fast:
            with self.evaluating():
                calibrate(model, images, batch=len(images[0]))
        ready = {
            n: m.optimize(compile=compiled and fast, graph=fast) for n, m in (("dense", dense), ("sampled", model))
        }
        ways = {n: Way(lambda i, run=run: run(images[i % len(images)]), len(images[0])) for n, run in ready.items()}
        with torch.inference_mode():
            timed = in_turns(ways, self.device, seconds=0.3 if fast else 0.01, rounds=5 if fast else 2)
        rates = {name: t.images_per_second for name, t in timed.items()}
        return {**rates, "times dense": rates["sampled"] / rates["dense"]}


def _of(row: Any, attended: float | None) -> Row:
    values = {"top1": row.figures.top1, "macs": row.figures.macs, "success": row.success, "attended": attended}
    return {name: value for name, value in values.items() if value is not None}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="cifar100.npz")
    parser.add_argument("--pixels", type=int, default=32, choices=PATCH, help="side to which images are resized")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, help="training runs at a time")
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--out", type=Path, default=Path("runs/studies"))
    parser.add_argument("--smoke", action="store_true", help="tiny models, two steps each; figures mean nothing")
    options = parser.parse_args()
    study = Adaptive(options)
    for seed in range(options.seeds):
        for part in options.part:
            getattr(study, part)(seed)
    print(study.rows.markdown())


if __name__ == "__main__":
    main()
