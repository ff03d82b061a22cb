"""Few-shot episodes of the study of GeNIe: what made images add to a few labelled ones, all methods on the same ones.

Labelled images and queries are test images, which neither the backbone nor the diffusion model saw; both saw other
images of these classes, the backbone without labels and the diffusion model with them, as Stable Diffusion has. Images
are made once for the most shots: those of fewer shots are among them. Shapes:

    [episodes, way, way - 1, shot]   a class, each other class of its episode, each labelled image of that one
"""

from __future__ import annotations

from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from genie_models import Models
from torch import Tensor

from vitrail.generate.generation_methods import (
    CANDIDATES,
    METHODS,
    Request,
    Tools,
    ada_evaluations,
    equal_compute,
    generate,
)
from vitrail.measure.config import EpisodeConfig
from vitrail.measure.episodes import Episodes, Extra, FewShot, draw_episodes, few_shot
from vitrail.measure.hard_negatives import axis_position, hardness, largest_jump

CLASSIC = ("weak", "strong", "mixup", "cutmix")
ALONE, EQUAL = "labelled images alone", "txt2img, equal compute"
FIXED = {f"genie {r:g}": r for r in CANDIDATES}
ROWS = (ALONE, *CLASSIC, "txt2img", "img2img_low", "img2img_high", *FIXED, "genie_ada", EQUAL)
JUDGED_HARD = ("img2img_high", *FIXED, "genie_ada", "txt2img")
SHOTS, QUERIES = (1, 5), 16
SMOKE_SHOTS, SMOKE_QUERIES = (1, 2), 4


class FewShots:
    """Rows of `fewshot` and `hardness`."""

    def __init__(self, models: Models, episodes: int) -> None:
        self.models, self.runs, self.count = models, models.runs, episodes
        self.shots, self.queries = (SMOKE_SHOTS, SMOKE_QUERIES) if models.smoke else (SHOTS, QUERIES)
        self._features: dict[str, Tensor] = {}
        self._scored: dict[tuple[str, int], dict[str, FewShot]] = {}

    @cached_property
    def episodes(self) -> Episodes:
        """Of the most shots."""
        config = EpisodeConfig(shot=max(self.shots), queries=self.queries, episodes=self.count)
        return draw_episodes(self.runs["test"].labels, config)

    @cached_property
    def known(self) -> Tensor:
        """Features of all test images."""
        return self.models.embed(self.runs["test"].pixels)

    @cached_property
    def numbers(self) -> dict[tuple[int, ...], int]:
        """Which episode it is, by its queries: they do not change with the shots."""
        return {tuple(row): i for i, row in enumerate(self.episodes.queries.flatten(1).tolist())}

    @property
    def others(self) -> Tensor:
        """[way, way - 1]"""
        way = self.episodes.classes.shape[1]
        return torch.tensor([[o for o in range(way) if o != c] for c in range(way)], device=self.runs.device)

    @property
    def sources(self) -> Tensor:
        """Rows of the test split that images are made from, [episodes, way, way - 1, shot]."""
        return self.episodes.support[:, self.others]

    def request(self, copy: int = 0, *, shot: int | None = None, device: str | torch.device = "cpu") -> Request:
        """One image a place, flattened.

        Seeds are of the places of the most shots: part of a request is made as the whole.
        """
        source = self.sources
        own = self.episodes.support[:, :, None].expand_as(source)
        target = self.episodes.classes[:, :, None, None].expand_as(source)
        count = source.numel()
        seeds = torch.arange(copy * count, (copy + 1) * count, device=source.device).view(source.shape)
        source, own, target, seeds = (t[..., :shot].flatten().to(device) for t in (source, own, target, seeds))
        held = self.runs["test"]
        pool, labels = held.pixels.to(device), held.labels.to(device)
        return Request(pool, labels, source, own, target, seeds, self.runs.classes)

    def images(self, name: str, copy: int = 0, shot: int | None = None) -> Tensor:
        """What a method makes of all places (of `shot` images a class alone), [images, 3, 32, 32] bytes."""
        if name in CLASSIC:
            return generate(name, self.request()).images
        tools = Tools(self.models.diffuser, r=FIXED.get(name, 0.8))
        method = "genie" if name in FIXED else name
        assert method in METHODS
        return generate(method, self.request(copy, shot=shot, device=self.runs.device), tools).images

    def features(self, name: str) -> Tensor:
        """Of the images of a method, one a place: [episodes, way, way - 1, shot, 1, width]."""
        if name not in self._features:
            self._features[name] = self.models.embed(self.images(name)).view(*self.sources.shape, 1, -1)
        return self._features[name]

    def several(self, shot: int) -> Tensor:
        """Of as many images from noise alone as cost the same, [episodes, way, way - 1, shot, copies, width]."""
        made = [self.features("txt2img")[..., :shot, :, :]]
        for copy in range(1, self.copies):
            found = self.models.embed(self.images("txt2img", copy, shot))
            made.append(found.view(made[0].shape))
        return torch.cat(made, -2)

    @property
    def copies(self) -> int:
        """Images from noise alone for what one of GeNIe-Ada costs."""
        return equal_compute(self.evaluations("genie_ada"), self.evaluations("txt2img"))

    def evaluations(self, name: str) -> int:
        """Rows that the network sees for one image of a place."""
        diffuser = self.models.diffuser
        if name == EQUAL:
            return self.copies * diffuser.evaluations(1.0)
        if name == "genie_ada":
            return ada_evaluations(diffuser, CANDIDATES)
        r = FIXED.get(name) or {"img2img_low": 0.3, "img2img_high": 0.7, "txt2img": 1.0}.get(name, 0.0)
        return diffuser.evaluations(r) if r else 0

    def adapted(self, shot: int) -> tuple[Tensor, Tensor]:
        """GeNIe-Ada by the labelled images of each episode: features as `features`, and r, of `shot` images."""
        edited = torch.cat([self.features(name)[..., :shot, :, :] for name in FIXED], -2)
        labelled = F.normalize(self.known[self.episodes.support[:, :, :shot]], dim=-1)
        aim = labelled.mean(2)[:, :, None, None, None]  # where the class lies by what is known of it
        source = F.normalize(self.known[self.sources[..., :shot]], dim=-1)[..., None, :]
        place = largest_jump(axis_position(F.normalize(edited, dim=-1), source, aim))
        chosen = edited.gather(-2, place[..., None, None].expand(*place.shape, 1, edited.shape[-1]))
        return chosen, torch.tensor(CANDIDATES, device=place.device)[place]

    def made(self, name: str, shot: int) -> Tensor:
        """[episodes, way, extra, width]"""
        if name == EQUAL:
            return self.several(shot).flatten(2, -2)
        some = self.adapted(shot)[0] if name == "genie_ada" else self.features(name)[..., :shot, :, :]
        return some.flatten(2, -2)

    def hook(self, name: str, shot: int) -> Extra | None:
        if name == ALONE:
            return None
        made = self.made(name, shot).cpu()

        def extra(some: Episodes) -> Tensor:
            return made[[self.numbers[tuple(row)] for row in some.queries.flatten(1).tolist()]]

        return extra

    def scored(self, name: str, shot: int) -> dict[str, FewShot]:
        """Every classifier on every episode. On the CPU, which is faster at many small float64 problems."""
        if (name, shot) not in self._scored:
            whole = self.episodes
            episodes = Episodes(whole.classes.cpu(), whole.support[:, :, :shot].cpu(), whole.queries.cpu())
            self._scored[name, shot] = few_shot(self.known.cpu(), episodes, extra=self.hook(name, shot))
        return self._scored[name, shot]

    def judged(self, name: str, shot: int) -> dict[str, Any]:
        """Accuracy of the three classifiers, and the difference from weak augmentation, episode by episode."""
        found, weak = self.scored(name, shot), self.scored("weak", shot)["logistic"]
        logistic = found["logistic"]
        if name not in (ALONE, EQUAL) and logistic.extra != weak.extra:
            raise ValueError(
                f"{name} adds {logistic.extra} images to a class and weak {weak.extra}; budgets must agree"
            )
        row: dict[str, Any] = {"split": "test", "episodes": len(self.episodes), "extra": logistic.extra}
        for classifier, each in found.items():
            row |= {classifier: each.mean, f"{classifier}_interval": each.interval}
        gained = logistic.against(weak)
        row |= {"gain": gained.mean, "gain_interval": gained.interval, "evaluations": self.evaluations(name)}
        if name == "genie_ada":
            row["mean_r"] = float(self.adapted(shot)[1].mean())
        return row

    def hard(self, name: str) -> dict[str, Any]:
        """What an SVM of the labelled images alone thinks of made ones."""
        shot = max(self.shots)
        made = self.made(name, shot).flatten(1, 2)
        episodes, way = self.episodes.classes.shape
        shape = (episodes, way, way - 1, shot)
        source = self.others[None, :, :, None].expand(shape).flatten(1)
        target = torch.arange(way, device=made.device)[None, :, None, None].expand(shape).flatten(1)
        found = hardness(self.known[self.episodes.support], made, source, target).to_json()
        return {
            "split": "test",
            "overlap": found["overlap"],
            "p_source": found["source"],
            "p_target": found["target"],
            "histograms": [found["source_histogram"], found["target_histogram"]],
        }

    def run(self, seed: int) -> None:
        for shot in self.shots:
            for name in ROWS:
                if (name, shot) != (EQUAL, max(self.shots)):
                    self.models.row("fewshot", f"{shot}-shot", name, seed, partial(self.judged, name, shot))
        for name in JUDGED_HARD:
            self.models.row("hardness", f"{max(self.shots)}-shot", name, seed, partial(self.hard, name))

    def rest(self, seed: int) -> None:
        """What costs most and says least, when all else is done."""
        shot = max(self.shots)
        self.models.row("fewshot", f"{shot}-shot", EQUAL, seed, partial(self.judged, EQUAL, shot))
