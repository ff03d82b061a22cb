"""`vitrail attack`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from vitrail.cli.say import fail, print_json, show


def attack(
    run: Annotated[tyro.conf.Positional[Path | None], tyro.conf.arg(metavar="RUN")] = None,
    /,
    kind: Literal["patch", "perturbation"] = "patch",
    size: int | None = None,
    place: Annotated[str, tyro.conf.arg(metavar="top_left|centre|random|ROW,COLUMN")] = "top_left",
    eps: int = 16,
    loss: Literal["compute", "ntap", "tap", "random"] = "compute",
    task: Literal["none", "preserve", "destroy"] = "none",
    task_weight: float = 1.0,
    target: int = 0,
    prior: Literal["thesis", "released"] = "thesis",
    layer_weights: Annotated[tuple[float, ...], tyro.conf.arg(metavar="W ...")] = (),
    data: Annotated[str | None, tyro.conf.arg(metavar="URI")] = None,
    batch: int | None = None,
    steps: Annotated[int, tyro.conf.arg(name="optim.steps")] = 300,
    lr: Annotated[float, tyro.conf.arg(name="optim.lr")] = 0.2,
    seed: int = 0,
    device: str = "auto",
    workers: int | None = None,
    out: Path | None = None,
    resume: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None,
    json: bool = False,
) -> int:
    """Learn one patch for all images that makes an adaptive model spend its full compute, and judge it on test.

    It is learned on training images and pasted at the same place of every image; the model is not changed. The folder
    that is left holds patch.png, patch.safetensors and patch.json; `vitrail evaluate RUN --attack FOLDER` lays the
    patch on other images or another model.

    Example: vitrail attack runs/ats --size 8
    Example: vitrail attack runs/avit --kind perturbation --eps 16 --task preserve
    Example: vitrail attack runs/ats --loss ntap --data photos/ --json

    Args:
        run: run folder or model folder of an adaptive model (ats, avit or adavit)
        kind: a square of pixels, or a faint change of all
        size: side of the patch in pixels (default: as 64 of 224, in whole tokens)
        place: where the patch is
        eps: largest change of a perturbation, in levels of 255
        loss: compute, or for comparison: any wrong class, one class (--target), nothing learned
        task: whether accuracy is to stay or to go besides
        task_weight: how much that counts
        target: class of --loss tap, counted from 0
        prior: A-ViT: sign of its prior in the loss, as published or as released
        layer_weights: ATS: weight of every sampling block (default: 1)
        data: images to learn and judge on, with the model's classes (default: those of the run)
        batch: images a step (default: as the run, at most 128)
        steps: how long the patch is learned
        lr: learning rate in standard deviations of normalised images
        seed: of the start, of a random place and of the order of images
        device: auto, cpu, cuda
        workers: processes that decode
        out: folder to write (default: runs/attack-MODEL-DATA, numbered)
        resume: continue an interrupted attack, or judge a run of an attack recipe
        json: print one JSON object
    """
    if (run is None) == (resume is None):
        return fail("name one adaptive model, vitrail attack RUN, or continue with --resume FOLDER")
    from vitrail.engine.device import join, leave
    from vitrail.engine.loop import Stopped
    from vitrail.run import attack_run as attacking
    from vitrail.run.attack_run import attack_table

    try:
        if resume is not None:
            made = attacking.resume_attack(resume, quiet=json)
        else:
            assert run is not None
            objective: dict[str, Any] = {
                "change": kind,
                "place": place,
                "eps": eps,
                "loss": loss,
                "task": task,
                "task_weight": task_weight,
                "target": target,
                "prior": prior,
                "layer_weights": layer_weights,
                "seed": seed,
                **({} if size is None else {"size": size}),
            }
            values: dict[str, Any] = {
                "seed": seed,
                "objective": objective,
                "optim": {"steps": steps, "lr": lr},
                "engine": {"device": device},
            }
            source = {"uri": data, "batch": batch, "workers": workers}
            values["data"] = {name: value for name, value in source.items() if value is not None}
            made = attacking.attack(run, values, out=out, quiet=json)
        if join().main:
            if json:
                print_json(made.to_json())
            else:
                show(attack_table(made.rows, made.most, f"{made.split} of {made.data}"))
                print(f"patch: {made.folder / 'patch.png'}")
    except Stopped as stopped:
        print(
            f"stopped after step {stopped.step}; continue with: vitrail attack --resume {stopped.run}", file=sys.stderr
        )
        return 130
    finally:
        leave()
    return 0
