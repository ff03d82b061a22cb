"""Adaptive models and attacks on what they save: token sampling, halting, gates; patches, perturbations, a defence.

    python studies/adaptive.py cifar100.npz --out FOLDER [--part base ats victims ...]
                                            [--pixels 32|56|128] [--seeds 3] [--minutes 9.5] [--models FOLDER]
    python studies/adaptive.py --table FOLDER        Markdown of what was found, mean and std over seeds
    python studies/adaptive.py --smoke --out FOLDER  all of it in a minute on a CPU; its figures mean nothing

Rows are appended to FOLDER/found.jsonl as they come, models and patches are kept beside it: the same command goes on
where a kill, or `--minutes`, ended it, and trains again what was lost. What matters most comes first, for all seeds;
variations of attacks follow, seed by seed. Choices are made on validation images, everything reported is of test
images; patches are learned on training images. `--of` takes ats, avit, adavit, defended and control. `speed` is to be
run with nothing else on the accelerator; all the rest took 13 minutes of one H200, cut nearly as in studies/plans.py,
with attacks of 300 steps instead of 1,000. `--pixels` resizes images (each size has a folder of its own): 56 for 196
tokens, 128 for 64 tokens with sixteen times the pixels, on which SlowFormer's patches of 64 of 224 pixels are learned.

Expected (ATS, arXiv 2111.15667; SlowFormer, arXiv 2310.02544): sampling loses little without training, several
blocks lose less than one, the first block is the worst; the class token scores better than a random one, inverse
sampling better than the highest scores and than as many tokens drawn uniformly. A learned patch drives cost up where
random, targeted and untargeted patches do not; it grows with its area and with eps, keeps accuracy where it is asked
to, and helps little against other victims. A defence lowers its success, but not to nothing.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from adaptive_models import PATCH, Models
from adaptive_tables import tables
from device_runs import DeviceRuns
from found import Found, Order, hardware, read_rows, study_parser, to_the_end

from vitrail.learn.attack import PROVENANCE, Attack, Universal, load_patch, make_change, save_patch
from vitrail.learn.attack_config import AttackConfig
from vitrail.measure.compute import attack_success
from vitrail.measure.speed import Way, in_turns
from vitrail.model.adaptive.ats import AtsPolicy
from vitrail.model.adaptive.budget import calibrate, matched_caps
from vitrail.model.build import make_adaptive
from vitrail.model.classifier import Classifier
from vitrail.model.config import Ats
from vitrail.model.cost import cost
from vitrail.recipes import recipe, with_values

PARTS = ("base", "ats", "victims", "attacks", "transfer", "defence", "variations", "speed")
VICTIMS = ("ats", "avit", "adavit")
SHARES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
COMPILED_SHARE = 0.7  # the one at which speed is measured compiled, too
POINTS = (2, 4, 8, 64, 1024, 65536)  # where no number of points costs what is wanted
BUDGETS = (0.65, 0.48)  # of the dense cost, for ablations: the paper's 3 of 4.6 GMACs, and less than a share of 1 costs

OPTIONS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("reference", "class row, value norm, inverse, raster, from a quarter", {}),
    ("score", "column", {"score": "column"}),
    ("score", "random", {"score": "random"}),
    ("value norm", "off", {"value_norm": False}),
    ("sampling", "nearest", {"sampling": "nearest"}),
    ("sampling", "top", {"sampling": "top"}),
    ("sampling", "inverse at random points", {"sampling": "random"}),
    ("sampling", "uniform, no scores", {"sampling": "uniform"}),
    ("order", "sorted", {"order": "sorted"}),
    ("class token", "may go", {"keep_class": False}),
)
EQUAL = {"uniform, no scores": "uniform", "top": "top"}  # as many tokens in every block as the reference keeps, mean
MAIN: dict[str, dict[str, Any]] = {
    "random": {"loss": "random"},
    "tap": {"loss": "tap"},
    "ntap": {"loss": "ntap"},
    "slowformer": {},
}
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
ATTACK = {"optim.steps": 1000}  # rate, batch and the weights of layers are those of the recipes
SMOKE_ATTACK = {"data.batch": 20, "optim.steps": 1}


class Study:
    """All measurements; each method makes the rows of one seed."""

    def __init__(self, models: Models) -> None:
        self.models, self.found, self.runs, self.smoke = models, models.found, models.runs, models.smoke

    def base(self, seed: int) -> None:
        """The plain model, and the same trained as much longer as victims are: what they are to be compared with."""

        def make(name: str) -> dict[str, Any]:
            model = self.models(name, seed)
            right = {f"{split}_top1": self.runs.top1(model, split) for split in ("val", "test")}
            return {"split": "test", "top1": right["test_top1"], **right, "macs": cost(model).macs}

        self.found.row("base", "vit", "plain", seed, partial(make, "base"))
        self.found.row("base", "vit", "trained longer", seed, partial(make, "longer"))

    def curves(self, seed: int) -> None:
        """Accuracy against cost over shares of sampling points, as it is and after fine-tuning at share 1."""
        for state, model in self._sampling(seed):
            for share in SHARES:
                self.found.row("ats", state, f"share {share:g}", seed, partial(self._at_share, model, share))

    def _sampling(self, seed: int) -> list[tuple[str, Classifier]]:
        free = make_adaptive(self.models("base", seed), Ats())
        return [("without training", free), ("fine-tuned", copy.deepcopy(self.models("ats", seed)))]

    def _at_share(self, model: Classifier, share: float) -> dict[str, Any]:
        model.set_budget(ratio=share)
        return self.models.spend(model)

    def speeds(self, seed: int, compiled: bool = False) -> None:
        """Images a second of optimised models, sampling (packed on CUDA) and dense in turns."""
        for state, model in self._sampling(seed)[int(compiled) :]:
            for share in (COMPILED_SHARE,) if compiled else SHARES:
                what = f"share {share:g}{', compiled' * compiled}"
                self.found.row("speed", state, what, seed, partial(self._speed, model, share, seed, compiled))

    def _speed(self, model: Classifier, share: float, seed: int, compiled: bool) -> dict[str, Any]:
        fast = self.runs.fast
        images = [batch.images for batch in self.runs.judged("test", model)]
        model.set_budget(ratio=share)
        if fast:
            with self.models.cast():
                calibrate(model, images, batch=len(images[0]))
        models = {"dense": self.models("base", seed), "sampled": model}
        ready = {name: m.optimize(compile=compiled and fast, graph=fast) for name, m in models.items()}
        ways = {
            name: Way(lambda i, run=run: run(images[i % len(images)]), len(images[0])) for name, run in ready.items()
        }
        with torch.inference_mode():
            timed = in_turns(ways, self.runs.device, seconds=0.3 if fast else 0.01, rounds=5 if fast else 2)
        rates = {f"{name}_images_per_second": t.images_per_second for name, t in timed.items()}
        return {**rates, "gain": rates["sampled_images_per_second"] / rates["dense_images_per_second"]}

    def ablations(self, seed: int) -> None:
        """Ways of sampling at about equal cost, without training."""
        depth = len(self.models("base", seed).trunk.blocks)  # type: ignore[arg-type]
        places = {
            "first block": (0,),
            "at a quarter": (depth // 4,),
            "at half": (depth // 2,),
            "all blocks": tuple(range(depth)),
        }
        options = [*OPTIONS, *(("placement", name, {"layers": layers}) for name, layers in places.items())]
        for budget in BUDGETS:
            at = f"{100 * budget:.0f} %"
            for group, value, chosen in options:
                if chosen.get("sampling") == "random" and budget > 0.5:
                    continue  # it draws no more points than there are patches, which costs less than that
                make = partial(self._spent_at, chosen, budget, seed)
                self.found.row("ablation", group, f"{value}, {at}", seed, make)
            for value, sampling in EQUAL.items():
                make = partial(self._at_equal_tokens, sampling, budget, seed)
                self.found.row("ablation", "equal token counts", f"{value}, {at}", seed, make)

    def _at_budget(self, options: dict[str, Any], budget: float, seed: int) -> Classifier:
        """A sampling model that costs as large a part of the dense one on validation images."""
        base, images = self.models("base", seed), [self.models.some("val")]
        with self.models.cast():
            wanted = budget * cost(base).macs / 1e9
            model = make_adaptive(base, Ats(**options))
            try:
                model.set_budget(gmacs=wanted, images=images)
            except ValueError:  # nothing costs that: the nearest number of points, and the row says what it costs
                tried = {n: model.set_budget(tokens=n, images=images) or 0.0 for n in POINTS}
                model.set_budget(tokens=min(tried, key=lambda n: abs(tried[n] - wanted)))
        return model

    def _spent_at(self, options: dict[str, Any], budget: float, seed: int) -> dict[str, Any]:
        model = self._at_budget(options, budget, seed)
        assert isinstance(model.policy, AtsPolicy)
        points = next(iter(model.policy.cap.values()))
        return {"budget": budget, "points": points, **self.models.spend(model)}

    def _at_equal_tokens(self, sampling: str, budget: float, seed: int) -> dict[str, Any]:
        """Another sampler that keeps as many tokens in every block as the reference does on validation images."""
        with self.models.cast():
            caps = matched_caps(self._at_budget({}, budget, seed), [self.models.some("val")])
        model = make_adaptive(self.models("base", seed), Ats(sampling=sampling, cap=caps))  # type: ignore[arg-type]
        return {"budget": budget, **self.models.spend(model)}

    def victims(self, seed: int) -> None:
        for kind in filter(self.found.wants, VICTIMS):
            self.found.row("victims", kind, "plain", seed, lambda k=kind: self.models.spend(self.models(k, seed)))

    def attacks(self, seed: int) -> None:
        for kind in filter(self.found.wants, VICTIMS):
            for what in MAIN:
                self.attacked("attacks", kind, what, seed)

    def transfers(self, seed: int) -> None:
        for source in VICTIMS:
            for kind in (k for k in VICTIMS if k != source):
                self.transferred("transfer", kind, source, seed)

    def variations(self, seed: int) -> None:
        for kind in filter(self.found.wants, VICTIMS):
            for what in (*VARIATIONS, *(OF_AVIT if kind == "avit" else ())):
                self.attacked("attacks", kind, what, seed)

    def defence(self, seed: int) -> None:
        """A defended model and one trained as long without patches: as they are, attacked anew, by the old patch."""
        for kind in filter(self.found.wants, ("defended", "control")):
            self.attacked("defence", kind, "slowformer", seed)
            self.transferred("defence", kind, "avit", seed)

    def attacked(self, table: str, kind: str, what: str, seed: int) -> None:
        """A row without attack where there is none yet, then that of one attack."""
        clean = self._clean(table, kind, seed)

        def make() -> dict[str, Any]:
            change = self._learned(kind, what, seed)
            made = self._judged(kind, seed, change, clean)
            if what == "slowformer":  # is it as good on images that it was not learned on?
                model = self.models(kind, seed)
                before, after = (self.models.spend(model, "train", c) for c in (None, change))
                made["train_success"] = _success(after["macs"], before)
            return made

        if clean is not None:
            self.found.row(table, kind, what, seed, make)

    def transferred(self, table: str, kind: str, source: str, seed: int) -> None:
        """The patch that was learned on another victim."""
        clean = self._clean("attacks" if table == "transfer" else table, kind, seed)

        def make() -> dict[str, Any]:
            folder = self._place(source, "slowformer", seed)
            if not (folder / PROVENANCE).is_file():
                self._learned(source, "slowformer", seed)
            change, _ = load_patch(folder, self.models(kind, seed).preprocess)
            return self._judged(kind, seed, change.to(self.runs.device), clean)

        if clean is not None:
            self.found.row(table, kind, f"patch of {source}", seed, make)

    def _clean(self, table: str, kind: str, seed: int) -> dict[str, Any] | None:
        return self.found.row(table, kind, "none", seed, lambda: self._judged(kind, seed, None, None))

    def _judged(self, kind: str, seed: int, change: Universal | None, clean: dict[str, Any] | None) -> dict[str, Any]:
        model = self.models(kind, seed)
        made = self.models.spend(model, change=change)
        if isinstance(model.policy, AtsPolicy):
            made["attended"] = self._attended(model, change)
        return made if clean is None else {**made, "success": _success(made["macs"], clean)}

    def _attended(self, model: Classifier, change: Universal | None) -> float:
        """Tokens that the class token attends to where tokens are sampled: exp of the entropy, mean (claim 27)."""
        assert isinstance(model.policy, AtsPolicy)
        with self.models.cast():
            images = model._images(self.models.some("test"))
            names = {f"attention.{i}" for i in model.policy.at}
            captured = model.outputs(images if change is None else change(images), want=names).captured
            rows = [captured[name][:, :, 0].float() for name in sorted(names)]
            return float(torch.stack([-torch.xlogy(row, row).sum(-1).mean() for row in rows]).exp().mean())

    def _learned(self, kind: str, what: str, seed: int) -> Universal:
        """A patch or perturbation against one victim, stored."""
        model = self.models(kind, seed)
        config = recipe(f"small-attack-{kind if kind in VICTIMS else 'avit'}")
        assert isinstance(config.objective, AttackConfig)
        options = {"seed": seed, **{**MAIN, **VARIATIONS, **OF_AVIT}[what]}
        if what == "tap":  # another class with every seed
            options["target"] = len(model.classes) * (seed % 3) // 3
        objective = replace(config.objective, **options)
        objective = replace(objective, size=objective.size * self.models.pixels // 32)
        if isinstance(model.policy, AtsPolicy):
            objective = replace(objective, layer_weights=objective.layer_weights[: len(model.policy.at)])
        config = replace(config, objective=objective)
        config = with_values(config, {**ATTACK, **(SMOKE_ATTACK if self.smoke else {})})
        if config.objective.loss == "random":
            change = make_change(config.objective, model.preprocess).to(self.runs.device)
        else:
            self.models.keep_resized(config)
            step, _ = self.runs.trained(config, seed, model=copy.deepcopy(model), compiled=False)
            assert isinstance(step.objective, Attack)
            change = step.objective.patch
        save_patch(self._place(kind, what, seed), change, {"victim": kind, "attack": what, "seed": seed})
        return change

    def _place(self, kind: str, what: str, seed: int) -> Path:
        place = self.models.folder / "patches" / f"{kind}-{what.replace(' ', '-')}-seed{seed}"
        place.mkdir(parents=True, exist_ok=True)
        return place

    def order(self, seeds: int) -> Order:
        """What matters most first."""
        every, first, others = range(seeds), range(1), range(1, seeds)
        return [
            ("base", self.base, every),
            ("ats", self.curves, every),
            ("victims", self.victims, every),
            ("attacks", self.attacks, every),
            ("transfer", self.transfers, every),
            ("ats", self.ablations, every),
            ("defence", self.defence, first),
            ("speed", self.speeds, first),
            ("variations", self.variations, first),
            ("defence", self.defence, others),
            ("speed", partial(self.speeds, compiled=True), first),
            ("variations", self.variations, others),
        ]


def _success(macs: float, clean: dict[str, Any]) -> float | None:
    most = clean["worst_case"]
    return attack_success(macs, clean["macs"], most) if most > clean["macs"] else None


def main() -> None:
    parser = study_parser(__doc__, "adaptive", PARTS)
    parser.add_argument("data", nargs="?")
    parser.add_argument("--pixels", type=int, default=32, choices=PATCH, help="side to which images are resized")
    options = parser.parse_args()
    if options.table is not None:
        print(tables(options.table))
        return
    if options.data is None and not options.smoke:
        parser.error("say which images to learn from: a .npz file, or another form of data")
    data, few = options.data or "embedded:fashion", options.smoke
    settings = {"pixels": options.pixels, "attack_steps": ATTACK["optim.steps"]}
    if any(row["table"] == "about" and settings.items() - row.items() for row in read_rows(options.out)):
        parser.error(f"{options.out} holds rows of other images or attacks; name another folder with --out")
    found = Found(options.out, options.minutes, options.of)
    runs = DeviceRuns(data, limit=200 if few else None, most=60 if few else None, batch=20 if few else 1000)
    found.row("about", data, f"{hardware(runs.fast)}", 0, lambda: {"smoke": few, **settings})
    if runs.fast:
        torch._dynamo.config.recompile_limit = 64  # all objectives are one piece of code to it
    with to_the_end(found, options.minutes):
        study = Study(Models(runs, options.models or options.out, found, few, options.pixels))
        found.through(study.order(options.seeds), options.part, options.only)


if __name__ == "__main__":
    main()
