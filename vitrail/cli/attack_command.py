"""`vitrail attack`."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from vitrail.console import fail, output
from vitrail.schema import Positional


@dataclass(frozen=True)
class PatchOptim:
    """Optimisation of the patch."""

    steps: int = 300  # how long the patch is learned
    lr: float = 0.2  # learning rate in standard deviations of normalised images


@dataclass(frozen=True)
class AttackCommand:
    """Learn one patch for all images that makes an adaptive model spend its full compute, and evaluate it on test.

    It is learned on training images and pasted at the same position of every image; the model is not changed. The
    output folder holds patch.png, patch.safetensors and patch.json; `vitrail evaluate RUN --attack FOLDER` applies the
    patch to other images or another model.

    Example: vitrail attack runs/ats --size 8
    Example: vitrail attack runs/avit --kind perturbation --eps 16 --task preserve
    Example: vitrail attack runs/ats --loss ntap --data photos/ --json
    """

    run: Annotated[Path | None, Positional("RUN")] = None
    """run folder or model folder of an adaptive model (ats, avit or adavit)"""
    kind: Literal["patch", "perturbation"] = "patch"  # a square of pixels, or a faint change of all
    size: int | None = None  # side of the patch in pixels (default: as 64 of 224, in whole tokens)
    place: Annotated[str, "top_left|centre|random|ROW,COLUMN"] = "top_left"  # where the patch is
    eps: int = 16  # largest change of a perturbation, in levels of 255
    loss: Literal["compute", "ntap", "tap", "random"] = "compute"
    """compute, or for comparison: any wrong class, one class (--target), nothing learned"""
    task: Literal["none", "preserve", "destroy"] = "none"  # whether accuracy is to stay or to go besides
    task_weight: float = 1.0  # weight of that in the loss
    target: int = 0  # class of --loss tap, counted from 0
    prior: Literal["thesis", "released"] = "thesis"  # A-ViT: sign of its prior in the loss, as published or as released
    layer_weights: Annotated[tuple[float, ...], "W ..."] = ()  # ATS: weight of every sampling block (default: 1)
    data: Annotated[str | None, "URI"] = None
    """images to learn and evaluate on, with the model's classes (default: those of the run)"""
    batch: int | None = None  # images per step (default: as the run, at most 128)
    optim: PatchOptim = field(default_factory=PatchOptim)
    seed: int = 0  # of the start, of a random position and of the order of images
    device: str = "auto"  # auto, cpu, cuda
    workers: int | None = None  # processes that decode
    out: Path | None = None  # folder to write (default: runs/attack-MODEL-DATA, numbered)
    resume: Annotated[Path | None, "FOLDER"] = None
    """continue an interrupted attack, or evaluate a run of an attack recipe"""
    json: bool = False  # print one JSON object

    def __call__(self) -> int:
        if (self.run is None) == (self.resume is None):
            return fail("name one adaptive model, vitrail attack RUN, or continue with --resume FOLDER")
        from vitrail.engine.device import join, leave
        from vitrail.engine.loop import Stopped
        from vitrail.run.attack_run import attack, attack_table, resume_attack

        try:
            if self.run is None:
                assert self.resume is not None
                patch = resume_attack(self.resume, quiet=self.json)
            else:
                patch = attack(self.run, self._settings(), out=self.out, quiet=self.json)
            if join().main:
                table = attack_table(patch.rows, patch.most, f"{patch.split} of {patch.data}")
                output(self.json, patch.to_json(), table, f"patch: {patch.folder / 'patch.png'}")
        except Stopped as stopped:
            resumed = f"vitrail attack --resume {stopped.run}"
            print(f"stopped after step {stopped.step}; continue with: {resumed}", file=sys.stderr)
            return 130
        finally:
            leave()
        return 0

    def _settings(self) -> dict[str, Any]:
        names = ("place", "eps", "loss", "task", "task_weight", "target", "prior", "layer_weights", "seed")
        objective = {"change": self.kind, **{name: getattr(self, name) for name in names}}
        if self.size is not None:
            objective["size"] = self.size
        data = {"uri": self.data, "batch": self.batch, "workers": self.workers}
        return {
            "seed": self.seed,
            "objective": objective,
            "optim": asdict(self.optim),
            "engine": {"device": self.device},
            "data": {name: value for name, value in data.items() if value is not None},
        }
