"""GeNIe at 32 pixels: are images that a diffusion model turns from one class into another good, hard, and of any use?

    vitrail compare studies/genie.yaml
    python studies/genie.py cifar10.npz [--runs runs/studies/genie/runs] [--oracle cifar10_resnet56.safetensors]
        [--diffusion diffusion-linear] [--out FOLDER] [--part oracle fewshot] [--episodes 100]

The first command trains the models and evaluates them; the second takes one process, and generated images stay on the
device. Rows are kept in FOLDER/rows.json as they come and printed as Markdown: the same command goes on where it was
stopped. Images themselves: `vitrail augment cifar10.npz OUT --model RUN --r 0.8 --r_schedule scaled_linear` leaves
OUT/contact.png.

Every r is stated as noise on Stable Diffusion's schedule, as in the paper, and converted to the time of the model's
schedule at which as much signal is left: 0.5, 0.6, 0.7, 0.8, 0.9 are 0.65, 0.74, 0.82, 0.88, 0.93 on the cosine.

The diffusion model has seen all training images of all ten classes with their labels, as Stable Diffusion has seen the
classes of its users. So few-shot rows say what such a model can lend to few labelled images, not what can be got from
these alone: they compare ways of generating images with one another at equal budgets, not with more data. Generated
images for rare classes: genie-tail.yaml.

Nothing is chosen by test metrics: r are all reported; guidance and steps of DPM-Solver++ are fixed before. Everything
reported is of test images, or of images made from them. Labelled images and queries of episodes are test images, which
neither the backbone nor the diffusion model saw. Shapes:

    [episodes, way, way - 1, shot]   a class, each other class of its episode, each labelled image of that one

Expected (GeNIe, arXiv 2312.02548): the oracle agrees more, and the source is further, with rising r; the class
switches in a jump; P(source) and P(target) overlap more at medium r than from noise alone; GeNIe-Ada >= the best fixed
r > weak, and small r hurt; cost in proportion to r; the way back ends further from the original the larger the first r.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from row_table import Rows
from torch import Tensor

from vitrail.data.config import PreprocessConfig
from vitrail.data.loading.device_loader import DeviceImages
from vitrail.data.open import open_data
from vitrail.data.preprocess import Preprocess
from vitrail.generate import generation_methods as methods
from vitrail.generate.diffusion_model import OwnDiffuser
from vitrail.generate.generation_methods import CANDIDATES
from vitrail.learn.teacher import features, load_teacher
from vitrail.measure.config import EpisodeConfig
from vitrail.measure.episodes import Episodes, Extra, FewShot, compare_few_shot, draw_episodes
from vitrail.measure.evaluator import evaluation_mode
from vitrail.measure.hard_negatives import axis_position, hardness, label_consistency, largest_jump
from vitrail.model.build import create_model
from vitrail.model.classifier import Classifier
from vitrail.model.config import NoiseScheduleName
from vitrail.run.evaluate import load

STEPS, SMOKE_STEPS = 50, 4  # of a whole run of the sampler
R_SCHEDULE: NoiseScheduleName = "scaled_linear"  # r means as much noise as in the paper, whatever the model's schedule
PROTOTYPE_IMAGES = 200  # of each class, at most
PARTS = ("oracle", "fewshot")
SWEEP = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
EDITED, RETURNED = (2000, 40), (1000, 10)  # test images that become another class, and those that come back; in smoke
BACK, FIRST = 0.5, (0.3, 0.5, 0.7, 0.9)  # noise of the way back and of the way there
CLASSIC = ("weak", "strong", "mixup", "cutmix")
ALONE, EQUAL = "labelled images alone", "txt2img, equal compute"
FIXED = {f"genie {r:g}": r for r in CANDIDATES}
ROWS = (ALONE, *CLASSIC, "txt2img", "img2img_low", "img2img_high", *FIXED, "genie_ada", EQUAL)
HARD = ("img2img_high", *FIXED, "genie_ada", "txt2img")
SHOTS, QUERIES = ((1, 5), (1, 2)), (16, 4)  # and in smoke runs


class Held(NamedTuple):
    """A split on the device."""

    pixels: Tensor  # [images, 3, 32, 32] bytes
    labels: Tensor  # [images]


class Models:
    """The three models, the splits, and the rows of the study."""

    def __init__(self, options: Any) -> None:
        """`options`: data, runs, out, oracle (weights, or none), diffusion (name of a run), guidance, smoke."""
        self.options, self.smoke = options, options.smoke
        self.data = open_data(options.data, limit=200 if self.smoke else None)
        self.classes = len(self.data.classes)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.fast = self.device.type == "cuda"
        self.autocast = torch.bfloat16 if self.fast else None
        self.rows = Rows(options.out / "rows.json")
        self._held: dict[str, Held] = {}

    def __getitem__(self, name: str) -> Held:
        """A split, at 32 pixels."""
        if name not in self._held:
            split = self.data[name]
            ready = Preprocess(PreprocessConfig(size=32, crop_ratio=1.0))
            pixels = DeviceImages(split, None, ready, device=self.device).pixels
            self._held[name] = Held(pixels, torch.from_numpy(split.labels).to(self.device))
        return self._held[name]

    def _run(self, name: str) -> Classifier:
        return load(Path(self.options.runs) / f"{name}-seed0", self.device).eval()

    @cached_property
    def oracle(self) -> Classifier:
        """Says what generated images show: weights that were given, or a run."""
        if self.options.oracle is None:
            return self._run("oracle")
        alike = create_model("cifar_resnet20", classes=self.data.classes)
        return load_teacher(str(self.options.oracle), alike).to(self.device).eval()

    @cached_property
    def backbone(self) -> Classifier:
        return self._run("backbone")

    @cached_property
    def diffuser(self) -> OwnDiffuser:
        """The sampler. All its batches have one shape on CUDA, where the network is compiled."""
        model = self._run(self.options.diffusion)
        if self.fast:
            model.to(memory_format=torch.channels_last)
            model.trunk.compile(dynamic=False)
        sampler = OwnDiffuser(
            model,
            steps=SMOKE_STEPS if self.smoke else STEPS,
            guidance=self.options.guidance,
            r_schedule=R_SCHEDULE,
            batch=1024,  # the network sees twice as many rows
            exact=self.fast,
            autocast=self.autocast,
        )
        if self.fast:
            sampler.txt2img(torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))  # compiles it
        return sampler

    def logits(self, model: Classifier, images: Tensor) -> Tensor:
        """[images, classes], of bytes."""
        return self._outputs(model, images, model)

    def embed(self, images: Tensor) -> Tensor:
        """By the backbone's trunk, before its projector: [images, width]."""
        return self._outputs(self.backbone, images, lambda part: features(self.backbone, part))

    @torch.no_grad()
    def _outputs(self, model: Classifier, images: Tensor, call: Callable[[Tensor], Tensor]) -> Tensor:
        with evaluation_mode(model), torch.autocast(self.device.type, self.autocast, enabled=self.fast):
            return torch.cat([call(part.to(self.device)).float() for part in images.split(1000)])


class Oracle:
    """Label consistency over r and from noise alone, of GeNIe-Ada, and what a round trip leaves."""

    def __init__(self, models: Models) -> None:
        self.models = models
        self.count, self.returned = EDITED[models.smoke], RETURNED[models.smoke]
        self._edited: dict[str, Tensor] = {}

    @cached_property
    def sources(self) -> Held:
        """Test images, equally spread over the split."""
        held = self.models["test"]
        rows = torch.linspace(0, len(held.labels) - 1, min(self.count, len(held.labels)), device=held.labels.device)
        return Held(*(part[rows.round().long()] for part in held))

    @property
    def targets(self) -> Tensor:
        """Another class for each, all equally often."""
        labels, classes = self.sources.labels, self.models.classes
        return (labels + 1 + torch.arange(len(labels), device=labels.device) % (classes - 1)) % classes

    def edited(self, name: str) -> Tensor:
        """Images generated with r (or from noise alone), with the same noise for all."""
        if name not in self._edited:
            diffuser, seeds = self.models.diffuser, torch.arange(len(self.targets))
            if name == "txt2img":
                self._edited[name] = diffuser.txt2img(self.targets, seeds).to(self.models.device)
            else:
                self._edited[name] = diffuser(self.sources.pixels, self.targets, float(name), seeds)
        return self._edited[name]

    def metrics(self, images: Tensor) -> dict[str, Any]:
        """What the oracle sees, among all classes, and how far the pixels are from the source's."""
        logits = self.models.logits(self.models.oracle, images)
        right = label_consistency(logits, self.targets)
        return {
            **{"split": "test", "consistent": right.share, "low": right.interval[0], "high": right.interval[1]},
            "of_source": float((logits.argmax(1) == self.sources.labels).double().mean()),
            "distance": float((images.float() - self.sources.pixels.float()).abs().mean() / 255),
        }

    def run(self) -> None:
        def plain(name: str, r: float) -> dict[str, Any]:
            return {**self.metrics(self.edited(name)), "evaluations": self.models.diffuser.evaluations(r)}

        row = self.models.rows.row
        for r in SWEEP:
            row("oracle", f"genie, r {r:g}", 0, partial(plain, str(r), r))
        row("oracle", f"genie_ada, r of {CANDIDATES[0]:g} to {CANDIDATES[-1]:g}", 0, self._adapted)
        row("oracle", "txt2img, r 1", 0, partial(plain, "txt2img", 1.0))
        for r in FIRST:
            row("round trip", f"genie and back, first r {r:g}", 0, partial(self._round_trip, r))

    def _adapted(self) -> dict[str, Any]:
        """GeNIe-Ada among the images of every candidate; classes lie where training images have them."""
        train, embed = self.models["train"], self.models.embed
        rows = torch.cat([(train.labels == c).nonzero()[:PROTOTYPE_IMAGES, 0] for c in range(self.models.classes)])
        aims = methods.prototypes_of(embed, train.pixels[rows], train.labels[rows], self.models.classes)
        images = torch.stack([self.edited(str(r)) for r in CANDIDATES], 1)  # [images, candidates, ...]
        embeddings = torch.stack([F.normalize(embed(images[:, i]), dim=-1) for i in range(len(CANDIDATES))], 1)
        source = F.normalize(embed(self.sources.pixels), dim=-1)
        curve = axis_position(embeddings, source[:, None], aims[self.targets][:, None])
        chosen, steps = largest_jump(curve), curve.diff(dim=1).abs()
        return {
            **self.metrics(images[torch.arange(len(images), device=images.device), chosen]),
            "mean_r": float(torch.tensor(CANDIDATES, device=chosen.device)[chosen].mean()),
            "jump": float((steps.amax(1) / steps.mean(1)).mean()),
            "evaluations": methods.ada_evaluations(self.models.diffuser, CANDIDATES),
            "curve": [round(float(v), 5) for v in curve.mean(0)],
        }

    def _round_trip(self, r: float) -> dict[str, Any]:
        """Made into another class and back into the first, with other noise."""
        there, back = self.sources.pixels[: self.returned], self.sources.labels[: self.returned]
        seeds = torch.arange(len(there))
        gone = self.models.diffuser(there, self.targets[: self.returned], r, seeds)
        again = self.models.diffuser(gone, back, BACK, seeds + len(there))
        return {"split": "test", "distance": float((again.float() - there.float()).abs().mean() / 255)}


class FewShots:
    """Rows of `fewshot` and `hardness`."""

    def __init__(self, models: Models, episodes: int) -> None:
        self.models, self.count = models, episodes
        self.shots, self.queries = SHOTS[models.smoke], QUERIES[models.smoke]
        self._features: dict[tuple[str, int, int | None], Tensor] = {}
        self._scores: dict[int, dict[str, dict[str, FewShot]]] = {}

    @cached_property
    def episodes(self) -> Episodes:
        """Of the most shots."""
        config = EpisodeConfig(shot=max(self.shots), queries=self.queries, episodes=self.count)
        return draw_episodes(self.models["test"].labels, config)

    @cached_property
    def known(self) -> Tensor:
        """Features of all test images."""
        return self.models.embed(self.models["test"].pixels)

    @cached_property
    def numbers(self) -> dict[tuple[int, ...], int]:
        """Which episode it is, by its queries: they do not change with the shots."""
        return {tuple(row): i for i, row in enumerate(self.episodes.queries.flatten(1).tolist())}

    @property
    def others(self) -> Tensor:
        """[way, way - 1]"""
        way = self.episodes.classes.shape[1]
        return torch.tensor([[o for o in range(way) if o != c] for c in range(way)], device=self.models.device)

    @property
    def sources(self) -> Tensor:
        """Rows of the test split that images are made from, [episodes, way, way - 1, shot]."""
        return self.episodes.support[:, self.others]

    def request(self, copy: int = 0, *, shot: int | None = None, device: str | torch.device = "cpu") -> methods.Request:
        """One image a place, flattened; seeds are those of the most shots, so that part of it is made as the whole."""
        source = self.sources
        own = self.episodes.support[:, :, None].expand_as(source)
        target = self.episodes.classes[:, :, None, None].expand_as(source)
        seeds = torch.arange(source.numel(), device=source.device).view(source.shape) + copy * source.numel()
        source, own, target, seeds = (t[..., :shot].flatten().to(device) for t in (source, own, target, seeds))
        pool, labels = (part.to(device) for part in self.models["test"])
        return methods.Request(pool, labels, source, own, target, seeds, self.models.classes)

    def features(self, name: str, copy: int = 0, shot: int | None = None) -> Tensor:
        """Of one generated image a place (of `shot` sources a class), [episodes, way, way - 1, shot, 1, width]."""
        if (name, copy, shot) not in self._features:
            request = self.request(copy, shot=shot, device="cpu" if name in CLASSIC else self.models.device)
            tools = methods.Tools() if name in CLASSIC else methods.Tools(self.models.diffuser, r=FIXED.get(name, 0.8))
            embeddings = self.models.embed(methods.generate("genie" if name in FIXED else name, request, tools).images)
            self._features[name, copy, shot] = embeddings.view(*self.sources[..., :shot].shape, 1, -1)
        return self._features[name, copy, shot]

    @property
    def copies(self) -> int:
        """Images from noise alone for what one of GeNIe-Ada costs."""
        diffuser = self.models.diffuser
        return methods.equal_compute(methods.ada_evaluations(diffuser, CANDIDATES), diffuser.evaluations(1.0))

    def adapted(self, shot: int) -> tuple[Tensor, Tensor]:
        """GeNIe-Ada by the labelled images of each episode: features as `features`, and r, of `shot` images."""
        edited = torch.cat([self.features(name)[..., :shot, :, :] for name in FIXED], -2)
        labelled = F.normalize(self.known[self.episodes.support[:, :, :shot]], dim=-1)
        aim = labelled.mean(2)[:, :, None, None, None]  # where the class lies by what is known of it
        source = F.normalize(self.known[self.sources[..., :shot]], dim=-1)[..., None, :]
        place = largest_jump(axis_position(F.normalize(edited, dim=-1), source, aim))
        chosen = edited.gather(-2, place[..., None, None].expand(*place.shape, 1, edited.shape[-1]))
        return chosen, torch.tensor(CANDIDATES, device=place.device)[place]

    def samples(self, name: str, shot: int) -> Tensor:
        """[episodes, way, extra, width]"""
        if name == EQUAL:  # as many images from noise alone as cost what one of GeNIe-Ada does
            first = self.features("txt2img")[..., :shot, :, :]
            more = [self.features("txt2img", copy, shot) for copy in range(1, self.copies)]
            return torch.cat([first, *more], -2).flatten(2, -2)
        some = self.adapted(shot)[0] if name == "genie_ada" else self.features(name)[..., :shot, :, :]
        return some.flatten(2, -2)

    def scores(self, shot: int) -> dict[str, dict[str, FewShot]]:
        """Every classifier with the images of every method, on the same episodes and at equal budgets.

        On the CPU, which is faster at many small float64 problems.
        """
        if shot not in self._scores:
            whole = self.episodes
            episodes = Episodes(whole.classes.cpu(), whole.support[:, :, :shot].cpu(), whole.queries.cpu())
            hooks: dict[str, Extra | None] = {ALONE: None}
            for name in ROWS[1:]:
                samples = self.samples(name, shot).cpu()
                hooks[name] = lambda some, s=samples: s[
                    [self.numbers[tuple(q)] for q in some.queries.flatten(1).tolist()]
                ]
            self._scores[shot] = compare_few_shot(self.known.cpu(), episodes, hooks, free=(ALONE, EQUAL))
        return self._scores[shot]

    def metrics(self, name: str, shot: int) -> dict[str, Any]:
        """Accuracy of the three classifiers, and the difference from weak augmentation, episode by episode."""
        scores, weak = self.scores(shot)[name], self.scores(shot)["weak"]["logistic"]
        logistic = scores["logistic"]
        row: dict[str, Any] = {"split": "test", "episodes": len(self.episodes), "extra": logistic.extra}
        for classifier, each in scores.items():
            row |= {classifier: each.mean, f"{classifier}_interval": each.interval}
        gained = logistic.against(weak)
        row |= {"gain": gained.mean, "gain_interval": gained.interval}
        if name == "genie_ada":
            row["mean_r"] = float(self.adapted(shot)[1].mean())
        return row

    def hard(self, name: str) -> dict[str, Any]:
        """What an SVM of the labelled images alone thinks of made ones."""
        shot = max(self.shots)
        made = self.samples(name, shot).flatten(1, 2)
        episodes, way = self.episodes.classes.shape
        shape = (episodes, way, way - 1, shot)
        source = self.others[None, :, :, None].expand(shape).flatten(1)
        target = torch.arange(way, device=made.device)[None, :, None, None].expand(shape).flatten(1)
        metrics = hardness(self.known[self.episodes.support], made, source, target).to_json()
        names = {"overlap": "overlap", "p_source": "source", "p_target": "target"}
        row = {"split": "test", **{name: metrics[key] for name, key in names.items()}}
        return row | {"histograms": [metrics["source_histogram"], metrics["target_histogram"]]}

    def run(self) -> None:
        row = self.models.rows.row
        for shot in self.shots:
            for name in ROWS:
                row("fewshot", f"{shot}-shot, {name}", 0, partial(self.metrics, name, shot))
        for name in HARD:
            row("hardness", f"{max(self.shots)}-shot, {name}", 0, partial(self.hard, name))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="?", default="cifar10.npz")
    parser.add_argument("--runs", type=Path, default=Path("runs/studies/genie/runs"), help="of genie.yaml")
    parser.add_argument("--part", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--out", type=Path, default=Path("runs/studies/genie"))
    parser.add_argument("--oracle", type=Path, help="weights of a CIFAR ResNet (none: the run `oracle`)")
    parser.add_argument("--diffusion", default="diffusion", help="variant of genie.yaml that generates")
    parser.add_argument("--episodes", type=int, default=100)
    parser.add_argument("--guidance", type=float, default=2.0)
    parser.add_argument("--smoke", action="store_true", help="few images and steps; metrics mean nothing")
    options = parser.parse_args()
    models = Models(options)
    about = {"r_schedule": R_SCHEDULE, **{name: vars(options)[name] for name in ("diffusion", "guidance", "smoke")}}
    if models.rows.row("about", f"{options.data}, settings", 0, lambda: about) != about:
        parser.error(f"{options.out} holds rows of other settings; name another folder with --out")
    if "oracle" in options.part:
        Oracle(models).run()
    if "fewshot" in options.part:
        FewShots(models, 2 if options.smoke else options.episodes).run()
    print(models.rows.markdown())


if __name__ == "__main__":
    main()
