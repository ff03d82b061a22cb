"""Attention transfer with few labels: what a student gets from where a pre-trained model looks, and what it does not.

    python studies/attention_transfer.py cifar100.npz --other cifar10.npz --out FOLDER [--part main targets ...]
                                         [--seeds 3] [--fraction 0.1] [--minutes 9.5] [--models FOLDER]
    python studies/attention_transfer.py --table FOLDER        Markdown of what was found, mean and std over seeds
    python studies/attention_transfer.py --smoke --out FOLDER  all of it in a minute on a CPU; its figures mean nothing

One process. A masked autoencoder learns from all training images without labels; everything else from a tenth of them
with labels, the same images for all seeds. Rows are appended to FOLDER/found.jsonl as they come, models are kept beside
it: the same command goes on where a kill, or `--minutes`, ended it, and trains again what was lost. What matters most
comes first, for all seeds; averages, sweeps, other data and mixtures for one seed, and for the others where time is
left. Learning rates are chosen on validation images; everything reported is of test images.

Expected (arXiv 2411.09702): scratch < distill <= fine-tune; random teachers hurt, copied ones more; a fine-tuned
teacher is no worse; copied q beats copied k and v, distilled q and features lose to distilled maps; averages over
examples or queries hurt most; last layers matter more than first ones, more heads are better; a teacher from other data
costs copies more than fine-tuning; under shift distillation loses more than fine-tuning; an ensemble of the two gains
more than two seeds of fine-tuning; on boxes distillation lies between scratch and fine-tuning.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from attention_models import AUTOENCODERS, FAMILIES, ON_BOXES, STILL, Data, Models
from attention_pictures import Pictures
from attention_tables import tables
from boxes import Boxes, BoxTransfer, detector, evaluate_boxes
from found import Found, Order, hardware, study_parser, to_the_end

from vitrail.learn.attention_teacher import load_source
from vitrail.learn.config import AttentionTransferConfig
from vitrail.learn.objective import Objective
from vitrail.measure.corruptions import corruption_accuracy
from vitrail.measure.ensembles import together
from vitrail.measure.evaluator import Loaders, Predictions, predict_all
from vitrail.model.classifier import Classifier
from vitrail.recipes import with_values

BY_WAY = (
    "main",
    "targets",
    "averages",
    "layers",
    "heads",
    "weights",
    "other",
    "mix",
)  # parts of which each row is a way
PARTS = ("teachers", *BY_WAY, "shift", "ensemble", "boxes", "pictures")
SEVERITIES = (1, 3, 5)
CORRUPTED = 2000  # test images; ten corruptions of each at three severities
PAIRS = (  # averaged; + 1: with the next seed
    ("distill", "tune", 0),
    ("copy", "tune", 0),
    ("scratch", "tune", 0),
    ("tune", "tune", 1),
    ("distill", "distill", 1),
    ("scratch", "scratch", 1),
)
NAMES = {"tune": "fine-tune"}


class Study:
    """All measurements; each method makes the rows of one seed."""

    def __init__(self, models: Models, seeds: int) -> None:
        self.models, self.found, self.data, self.seeds = models, models.found, models.data, seeds
        self._said: dict[tuple[str, int], Predictions] = {}

    def teachers(self, seed: int) -> None:
        """The autoencoders, which later parts would train where they need them."""
        for name in filter(self.found.wants, AUTOENCODERS):
            if name != "mae-other" or self.data.other_uri is not None:
                self.models(name, seed)

    def taught(self, part: str, seed: int) -> None:
        """Accuracy of every student of a part."""

        def make(name: str) -> dict[str, Any]:
            model, runs = self.models(name, seed), self.data.few
            found = {"split": "test", "top1": runs.top1(model, "test"), "val_top1": runs.top1(model, "val")}
            return {**found, "rate": self.models.rate(self.models.ways[name].family)}

        for name, way in self.models.ways.items():
            needs_other = "mae-other" in (way.teacher, way.start)
            if way.part == part and self.found.wants(name) and not (needs_other and self.data.other_uri is None):
                self.found.row(part, way.subject, way.what, seed, partial(make, name))

    def shift(self, seed: int) -> None:
        """Accuracy on corrupted test images, beside that on the same images as they were."""

        def make(name: str) -> dict[str, Any]:
            model, runs = self.models(name, seed), self.data.few
            loader = runs.judged("test", model, min(CORRUPTED, runs.most or CORRUPTED))
            data = Loaders(runs.data.classes, {"test": loader}, "test")
            clean, found = corruption_accuracy(model, data, severities=SEVERITIES, autocast=runs.autocast)
            kinds = {kind: round(sum(values) / len(values), 5) for kind, values in found.items()}
            mean = sum(kinds.values()) / len(kinds)
            relative = {"relative": mean / clean} if clean else {}
            return {"split": "test", "clean": clean, "corrupted": mean, **relative, "kinds": kinds}

        for name in (*FAMILIES, "copy-tuned", "distill-tuned"):
            way = self.models.ways[name]
            self.found.row("shift", way.subject, way.what, seed, partial(make, name))

    def ensemble(self, seed: int) -> None:
        """Two models with their probabilities averaged; two seeds of one way are the control."""

        def make(first: str, second: str, further: int) -> dict[str, Any]:
            after = (seed + further) % max(2, self.seeds)
            both = together({"first": self._predicted(first, seed), "second": self._predicted(second, after)})
            return {
                "split": "test",
                "top1": both.ensemble.scalars()["top1"],
                "best": both.best,
                "gain": both.gain,
                "gain_over_mean": both.gain_over_mean,
            }

        for first, second, further in PAIRS:
            one, other = (NAMES.get(name, name) for name in (first, second))
            what = "another seed of it" if further else other
            self.found.row("ensemble", one, what, seed, partial(make, first, second, further))

    def _predicted(self, name: str, seed: int) -> Predictions:
        if (name, seed) not in self._said:
            model = self.models(name, seed)
            loader = self.data.few.judged("test", model)
            self._said[name, seed] = predict_all(model, loader, autocast=self.data.few.autocast)
        return self._said[name, seed]

    def boxes(self, seed: int) -> None:
        """The box of a shape: from scratch, from an autoencoder's weights, and from its attention."""
        for name in ("scratch", "tune", "distill"):
            way = self.models.ways[name]
            self.found.row("boxes", way.subject, way.what, seed, partial(self._boxed, name, seed))

    def _boxed(self, name: str, seed: int) -> dict[str, Any]:
        runs, models = self.data.boxed, self.models
        teacher = "" if name == "scratch" else models.folder_of("mae-shapes", seed)
        config = with_values(models.config("scratch", models.rate(name), seed), {} if models.smoke else ON_BOXES)
        config = replace(config, data=replace(config.data, augment=replace(config.data.augment, **STILL)))
        if name == "tune":
            config = with_values(config, {"model.weights": teacher, "optim.layer_decay": 0.75})
        known, still = runs.data["train"], config.data.augment
        options = models.ways["distill"].options

        def objective(model: Classifier) -> Objective:
            if name != "distill":
                return Boxes(detector(model), known, still)
            transfer = AttentionTransferConfig(teacher=teacher, **options)
            return BoxTransfer(detector(model), transfer, load_source(teacher, model), known, still)

        model = runs.trained(config, seed, compiled=False, objective=objective)[0].model
        assert isinstance(model, Classifier)
        loader = runs.judged("test", model)
        found = evaluate_boxes(model, Loaders(model.classes, {"test": loader}, "test"), autocast=runs.autocast)
        return {"split": "test", **found["numbers"]}

    def order(self, out: Path) -> Order:
        """What matters most first."""
        every, first, others = range(self.seeds), range(1), range(1, self.seeds)
        pictures = Pictures(self.models, out / "pictures")
        once = ("averages", "layers", "heads", "weights", "other", "mix")
        return [
            ("teachers", self.teachers, first),
            ("main", partial(self.taught, "main"), every),
            ("targets", partial(self.taught, "targets"), every),
            ("ensemble", self.ensemble, every),
            ("shift", self.shift, every),
            ("averages", partial(self.taught, "averages"), first),
            ("boxes", self.boxes, every),
            *((part, partial(self.taught, part), first) for part in once[1:]),
            ("pictures", pictures.draw, first),
            *((part, partial(self.taught, part), others) for part in once),
        ]


def main() -> None:
    parser = study_parser(__doc__, "attention-transfer", PARTS)
    parser.add_argument("data", nargs="?")
    parser.add_argument("--other", help="other images, of another autoencoder (none: what needs it is left out)")
    parser.add_argument("--fraction", type=float, default=0.1, help="of the training images, with labels")
    options = parser.parse_args()
    if options.table is not None:
        print(tables(options.table))
        return
    if options.data is None and not options.smoke:
        parser.error("say which images to learn from: a .npz file, or another form of data")
    uri, other = options.data or "embedded:fashion", options.other
    if options.smoke:
        other, options.fraction = other or "synthetic:shapes?size=32&n=150", 0.5
    if other is None:
        print("no --other images: teachers from other data are left out", file=sys.stderr)
    found = Found(options.out, options.minutes, options.of)
    data = Data(uri, other, options.fraction, options.smoke)
    count = len(data.few.data["train"])
    found.row("about", uri, f"{count} labels, {hardware(data.few.fast)}", 0, lambda: {"smoke": options.smoke})
    if data.few.fast:
        torch._dynamo.config.recompile_limit = 64  # all objectives are one piece of code to it
    with to_the_end(found, options.minutes):
        study = Study(Models(data, options.models or options.out, found), options.seeds)
        found.through(study.order(options.out), options.part, options.only)


if __name__ == "__main__":
    main()
