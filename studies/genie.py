"""GeNIe at 32 pixels: are images that a diffusion model turns from one class into another good, hard, and of any use?

    python studies/genie.py cifar10.npz --out FOLDER [--oracle cifar10_resnet56.safetensors] [--part diffusion ...]
                            [--episodes 100] [--seeds 3] [--factor 1.0] [--schedule cosine|scaled_linear] [--guidance 2]
    python studies/genie.py --smoke --out FOLDER  all of it in a minute on a CPU; its figures mean nothing

One process; made images stay in memory, on the device. Rows are kept in FOLDER/rows.json as they come, printed as
Markdown at the end, and models are runs in FOLDER/runs: the same command goes on where it was stopped. Estimates for
one H200, not measured (a U-Net of 14 M parameters: 7k images/s in training, 30k rows/s in sampling, both compiled);
`--factor` multiplies the epochs of the three models where these turn out otherwise:

    part         what                                                                    rows, k     seconds
    diffusion    the U-Net, 30 epochs of 45,000 images, and its validation loss; reading           -         240
    classifiers  the oracle (given, or 25 s more), a backbone without labels, 8 epochs             -          60
    oracle       2,000 test images at seven r and from noise; GeNIe-Ada; round trips             600          60
    fewshot      100 episodes: fifteen ways to add images to one and to five labelled ones     2,400         110
    pictures     samples, sweeps over r, trajectories, densities                                 250          12
    longtail     three seeds of nine ways, a ResNet-20 of 1,200 steps each                       750         110
    fewshot      five labelled ones with images from noise at equal compute, last                800          27

That is ten minutes. Seconds of all parts that
sample are for 20 steps of the sampler; with the 50 that it takes now they are two and a half times as many.

Every r is stated as noise on Stable Diffusion's schedule, as in the paper, and converted to the time of the model's
schedule at which as much signal is left: 0.5, 0.6, 0.7, 0.8, 0.9 are 0.65, 0.74, 0.82, 0.88, 0.93 on the cosine.

What the diffusion model has seen: all training images of all ten classes with their labels, as Stable Diffusion has
seen the classes of its users. So few-shot rows say what such a model can lend to few labelled images, not what can be
got from these alone; and in the long tail, whose left-out images it saw, made images bring back some of what was taken
away. Both compare ways of making images with one another at equal budgets; neither compares them with more data.

Nothing is chosen by test figures: r are all reported; guidance and steps of DPM-Solver++ are fixed before. Whom a
rare class is confused with is found on val. Everything reported is of test images, or of images made from them.

Expected (GeNIe, arXiv 2312.02548): the oracle agrees more, and the source is further, with rising r; the class
switches in a jump; P(source) and P(target) overlap more at medium r than from noise alone; GeNIe-Ada >= the best fixed
r > weak, and small r hurt; images for the rarest classes lift these and cost the others about a point; cost in
proportion to r; the way back ends further from the original the larger the first r.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from genie_fewshot import FewShots
from genie_models import R_SCHEDULE, Held, Models, Runs
from genie_pictures import SWEEP, Pictures
from genie_tail import LongTails
from torch import Tensor

from vitrail.generate.generation_methods import CANDIDATES, ada_evaluations, prototypes_of
from vitrail.measure.denoising import evaluate_denoising
from vitrail.measure.evaluator import Loaders
from vitrail.measure.hard_negatives import axis_position, label_consistency, largest_jump
from vitrail.measure.retrieval import knn_accuracy

PARTS = ("diffusion", "classifiers", "oracle", "fewshot", "pictures", "longtail")
MOVED = 2000  # test images that are made into another class
BACK, FIRST = 0.5, (0.3, 0.5, 0.7, 0.9)  # noise of the way back and of the way there
RETURNED = 1000  # images that come back
SMOKE_MOVED, SMOKE_RETURNED = 40, 10
PROTOTYPE_IMAGES = 200  # of each class


class Study:
    """The first three parts; the others have files of their own."""

    def __init__(self, models: Models) -> None:
        self.models, self.runs = models, models.runs
        self.count, self.returned = (SMOKE_MOVED, SMOKE_RETURNED) if models.smoke else (MOVED, RETURNED)
        self._moved: dict[str, tuple[Tensor, float]] = {}

    def diffusion(self, seed: int) -> None:
        """The training loss on validation images, with fixed noise; without guidance."""

        def make() -> dict[str, Any]:
            data = Loaders(self.runs.data.classes, {"val": self.runs.batches("val")}, "val")
            found = evaluate_denoising(self.models("diffusion"), data, autocast=self.runs.autocast)["numbers"]
            return {"split": "val", **{name.removeprefix("denoising_"): value for name, value in found.items()}}

        self.models.row("diffusion", "small-diffusion", "all classes", seed, make)

    def classifiers(self, seed: int) -> None:
        test = self.runs["test"]

        def judged() -> dict[str, Any]:
            said = self.runs.logits(self.models.oracle, test.pixels).argmax(1)
            return {"split": "test", "top1": float((said == test.labels).double().mean())}

        def embedded() -> dict[str, Any]:
            train = self.runs["train"]
            near = knn_accuracy(
                self.models.embed(test.pixels),
                test.labels,
                self.models.embed(train.pixels),
                train.labels,
                neighbours=(20,),
            )
            return {"split": "test", "knn20": near[20]}

        what = "trained here" if self.models.weights is None else self.models.weights.name
        self.models.row("classifiers", "oracle", what, seed, judged)
        self.models.row("classifiers", "backbone", "MoCo, no labels", seed, embedded)

    # Images of one class made into another

    @cached_property
    def sources(self) -> Held:
        """Test images, equally spread over the split."""
        held = self.runs["test"]
        rows = torch.linspace(0, len(held.labels) - 1, min(self.count, len(held.labels)), device=self.runs.device)
        return Held(*(part[rows.round().long()] for part in held))

    @property
    def targets(self) -> Tensor:
        """Another class for each, all equally often."""
        labels, classes = self.sources.labels, self.runs.classes
        return (labels + 1 + torch.arange(len(labels), device=labels.device) % (classes - 1)) % classes

    def moved(self, name: str) -> tuple[Tensor, float]:
        """Images made by r (or by noise alone), with the same noise for all, and images a second."""
        if name not in self._moved:
            diffuser, count = self.models.diffuser, len(self.targets)
            seeds = torch.arange(count)

            def work() -> Tensor:
                if name == "txt2img":
                    return diffuser.txt2img(self.targets, seeds).to(self.runs.device)
                return diffuser(self.sources.pixels, self.targets, float(name), seeds)

            images, seconds = self.runs.timed(work)
            self._moved[name] = images, count / seconds
        return self._moved[name]

    def shown(self, images: Tensor) -> dict[str, Any]:
        """What the oracle sees, among all classes, and how far the pixels are from the source's."""
        logits = self.runs.logits(self.models.oracle, images)
        right = label_consistency(logits, self.targets)
        away = (images.float() - self.sources.pixels.float()).abs().mean() / 255
        return {
            "split": "test",
            "consistent": right.share,
            "low": right.interval[0],
            "high": right.interval[1],
            "of_source": float((logits.argmax(1) == self.sources.labels).double().mean()),
            "distance": float(away),
        }

    def oracle(self, seed: int) -> None:
        """Label consistency over r and from noise alone, of GeNIe-Ada, and what a round trip leaves."""

        def plain(name: str, r: float) -> dict[str, Any]:
            images, rate = self.moved(name)
            evaluations = self.models.diffuser.evaluations(r)
            return {**self.shown(images), "images_per_second": rate, "evaluations": evaluations}

        for r in SWEEP:
            self.models.row("oracle", "genie", f"r {r:g}", seed, partial(plain, str(r), r))
        self.models.row("oracle", "genie_ada", f"r of {CANDIDATES[0]:g} to {CANDIDATES[-1]:g}", seed, self._adapted)
        self.models.row("oracle", "txt2img", "r 1", seed, partial(plain, "txt2img", 1.0))
        for r in FIRST:
            self.models.row("round trip", "genie and back", f"first r {r:g}", seed, partial(self._returned, r))

    def _adapted(self) -> dict[str, Any]:
        """GeNIe-Ada among the images of every candidate; classes lie where training images have them."""
        train = self.runs["train"]
        rows = torch.cat([(train.labels == c).nonzero()[:PROTOTYPE_IMAGES, 0] for c in range(self.runs.classes)])
        aims = prototypes_of(self.models.embed, train.pixels[rows], train.labels[rows], self.runs.classes)
        made = torch.stack([self.moved(str(r))[0] for r in CANDIDATES], 1)  # [images, candidates, ...]
        seen = [F.normalize(self.models.embed(made[:, i]), dim=-1) for i in range(len(CANDIDATES))]
        source = F.normalize(self.models.embed(self.sources.pixels), dim=-1)
        curve = axis_position(torch.stack(seen, 1), source[:, None], aims[self.targets][:, None])
        place = largest_jump(curve)
        steps = curve.diff(dim=1).abs()
        return {
            **self.shown(made[torch.arange(len(made), device=made.device), place]),
            "mean_r": float(torch.tensor(CANDIDATES, device=place.device)[place].mean()),
            "jump": float((steps.amax(1) / steps.mean(1)).mean()),
            "evaluations": ada_evaluations(self.models.diffuser, CANDIDATES),
            "curve": [round(float(v), 5) for v in curve.mean(0)],
        }

    def _returned(self, r: float) -> dict[str, Any]:
        """Made into another class and back into the first, with other noise."""
        there, back = self.sources.pixels[: self.returned], self.sources.labels[: self.returned]
        seeds = torch.arange(len(there))
        gone = self.models.diffuser(there, self.targets[: self.returned], r, seeds)
        again = self.models.diffuser(gone, back, BACK, seeds + len(there))
        return {"split": "test", "distance": float((again.float() - there.float()).abs().mean() / 255)}

    def run(self, parts: Sequence[str], episodes: int, seeds: int) -> None:
        shots, tails = FewShots(self.models, episodes), LongTails(self.models)
        work: list[tuple[str, Callable[[int], None], int]] = [
            ("diffusion", self.diffusion, 1),
            ("classifiers", self.classifiers, 1),
            ("oracle", self.oracle, 1),
            ("fewshot", shots.run, 1),
            ("pictures", Pictures(self.models, self.models.folder / "pictures").run, 1),
            ("longtail", tails.run, seeds),
            ("fewshot", shots.rest, 1),
        ]
        for part, make, count in work:
            for seed in range(count if part in parts else 0):
                make(seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="?", default="cifar10.npz")
    parser.add_argument("--part", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--out", type=Path, default=Path("runs/studies/genie"))
    parser.add_argument("--oracle", type=Path, help="weights of a CIFAR ResNet that judges (none: one is trained)")
    parser.add_argument("--episodes", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--factor", type=float, default=1.0, help="times the epochs of the three models")
    parser.add_argument("--schedule", choices=("cosine", "scaled_linear"), default="cosine", help="of the noise")
    parser.add_argument("--guidance", type=float, default=2.0)
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    runs = Runs(options.data, limit=200, most=120) if options.smoke else Runs(options.data)
    settings = {name: getattr(options, name) for name in ("factor", "smoke", "schedule", "guidance")}
    models = Models(runs, options.out, weights=options.oracle, **settings)
    about = {"r_schedule": R_SCHEDULE, **settings}
    if models.row("about", options.data, "settings", 0, lambda: about) != about:
        parser.error(f"{options.out} holds rows of other settings; name another folder with --out")
    if options.smoke:
        options.episodes, options.seeds = 2, 1
    Study(models).run(options.part, options.episodes, options.seeds)
    print(models.rows.markdown())


if __name__ == "__main__":
    main()
