"""`vitrail evaluate` and `vitrail predict`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import tyro

from vitrail.cli.say import fail, print_json, show


def evaluate(
    run: tyro.conf.Positional[Path],
    /,
    data: Annotated[tuple[str, ...], tyro.conf.arg(metavar="URI ...")],
    split: str | None = None,
    crop_ratio: Annotated[tuple[float, ...], tyro.conf.arg(metavar="R ...")] = (),
    image_size: Annotated[tuple[int, ...], tyro.conf.arg(metavar="PX ...")] = (),
    batch: int = 256,
    workers: int | None = None,
    device: str = "auto",
    json: bool = False,
    per_class: bool = False,
    head: Literal["class", "distillation", "both"] | None = None,
) -> int:
    """Figures of a trained model, as its last weights are, on any data with its classes.

    Several data sets, crop ratios or image sizes give one row for each combination: choose among them on --split val.
    Example: vitrail evaluate runs/demo --data embedded:fashion --crop_ratio 0.8 0.9 1.0

    Args:
        run: run folder or model folder
        data: folder, .csv, .parquet, .npz, torchvision:NAME, embedded:fashion, synthetic:shapes
        split: train, val or test (default: test, or val where there is none)
        crop_ratio: side of the centre crop over the shorter side (default: the model's own)
        image_size: side of the model's input in pixels (default: the model's own)
        batch: images at a time
        workers: processes that decode
        device: auto, cpu, cuda
        json: print one JSON object, or a list of them
        per_class: print every class, too
        head: which classifier of a distilled model predicts (default: both, fused)
    """
    from vitrail import api
    from vitrail.api.evaluation import sweep
    from vitrail.measure.classification import SingleLabelFigures
    from vitrail.show import tables
    from vitrail.show.sweep_table import sweep_table

    if not data:
        return fail("say on which images: --data URI")

    model = run if head is None else api.load(run).use(head)
    made = sweep(
        model,
        data,
        crop_ratios=crop_ratio,
        image_sizes=image_size,
        split=split,
        batch=batch,
        workers=workers,
        device=device,
        quiet=json,
    )
    chosen = {"run": str(run), **({} if head is None else {"head": head})}
    if len(made) != 1:
        if json:
            print_json([{**chosen, **one.to_json()} for one in made])
        else:
            show(sweep_table(made))
        return 0
    figures = made[0].figures
    if json:
        print_json({**chosen, **made[0].to_json(), **figures.to_json()})
        return 0
    show(tables.headline(figures, f"{made[0].split} of {made[0].data}"))
    if per_class or len(figures.classes) <= 20:
        show(tables.per_class(figures))
    if isinstance(figures, SingleLabelFigures):
        show(tables.confused(figures))
    return 0


def predict(
    run: tyro.conf.Positional[Path],
    images: tyro.conf.Positional[tuple[Path, ...]],
    /,
    top: int = 3,
    device: str = "auto",
    json: bool = False,
    head: Literal["class", "distillation", "both"] | None = None,
) -> int:
    """What a trained model says of some images; folders are searched for images.

    Example: vitrail predict runs/demo cat.jpg photos/ --json

    Args:
        run: run folder or model folder
        images: image files or folders
        top: how many classes to name
        device: auto, cpu, cuda
        json: print one JSON object a line
        head: which classifier of a distilled model predicts (default: both, fused)
    """
    from vitrail import api
    from vitrail.data.folder import image_files
    from vitrail.engine.device import choose_device

    if not images:
        return fail("name at least one image or folder")
    paths = [found for path in images for found in (image_files(path) if path.is_dir() else [path])]
    if not paths:
        return fail(f"no images in {', '.join(map(str, images))}")
    model = api.load(run, choose_device(device))
    if head is not None:
        model.use(head)
    bad = 0
    for start in range(0, len(paths), 256):
        chunk = paths[start : start + 256]
        for path, said in zip(chunk, model.predict(chunk, top=top, errors="return"), strict=True):
            bad += said.error is not None
            if json:
                print_json({"path": str(path), **said.to_json()})
            elif said.error is not None:
                print(f"{path}  cannot be read: {said.error}")
            else:
                print(f"{path}  " + "  ".join(f"{name} {p:.1%}" for name, p in said.top))
    return 1 if bad else 0
