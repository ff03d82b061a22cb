"""`vitrail evaluate` and `vitrail predict`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro

from vitrail.cli.say import fail, print_json, show


def evaluate(
    run: tyro.conf.Positional[Path],
    /,
    data: Annotated[str, tyro.conf.arg(metavar="URI")],
    split: str | None = None,
    batch: int = 256,
    workers: int | None = None,
    device: str = "auto",
    json: bool = False,
    per_class: bool = False,
) -> int:
    """Figures of a trained model on any data with its classes.

    Example: vitrail evaluate runs/demo --data embedded:fashion --json

    Args:
        run: run folder or model folder
        data: folder, .csv, .parquet, .npz, torchvision:NAME, embedded:fashion, synthetic:shapes
        split: train, val or test (default: test, or val where there is none)
        batch: images at a time
        workers: processes that decode
        device: auto, cpu, cuda
        json: print one JSON object
        per_class: print every class, too
    """
    from vitrail import api
    from vitrail.measure.classification import SingleLabelFigures
    from vitrail.show import tables

    figures, _, used = api.evaluate(run, data, split=split, batch=batch, workers=workers, device=device, quiet=json)
    if json:
        print_json({"run": str(run), "data": data, "split": used, **figures.scalars(), **figures.to_json()})
        return 0
    show(tables.headline(figures, f"{used} of {data}"))
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
) -> int:
    """What a trained model says of some images; folders are searched for images.

    Example: vitrail predict runs/demo cat.jpg photos/ --json

    Args:
        run: run folder or model folder
        images: image files or folders
        top: how many classes to name
        device: auto, cpu, cuda
        json: print one JSON object a line
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
