"""`vitrail inspect`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import tyro

from vitrail.cli.say import fail, print_json, show


def inspect(
    models: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="RUN|MODEL ...")],
    /,
    data: str | None = None,
    images: Annotated[tuple[Path, ...], tyro.conf.arg(metavar="PATH ...")] = (),
    split: str | None = None,
    count: int = 8,
    over: int = 256,
    layers: Annotated[tuple[int, ...], tyro.conf.arg(metavar="LAYER ...")] = (),
    judge: int | None = None,
    what: Annotated[tuple[str, ...], tyro.conf.arg(metavar="SECTION ...")] = (),
    projection: Literal["pca", "tsne", "umap"] = "pca",
    attack: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None,
    out: Path | None = None,
    device: str = "auto",
    json: bool = False,
) -> int:
    """Where one or several models look, which tokens they keep, what they learned: a page, pictures, and a table.

    Attention of the class token by layer and head, evidence for a class by several maps and how good they are, patches
    that adaptive models keep and what they spend, gains and branches by depth, embeddings, neighbours, clusters, and
    what a run's teacher holds for near; of two models also how alike their layers are.

    Example: vitrail inspect runs/demo
    Example: vitrail inspect runs/ats runs/demo --layers 0 2
    Example: vitrail inspect runs/ats --attack runs/attack
    Example: vitrail inspect runs/demo --images cat.jpg photos/ --what evidence

    Args:
        models: run folders, model folders, or names of models (untrained, for comparison)
        data: images by URI (default: those of the first run; of a name alone embedded:fashion)
        images: image files or folders in place of data
        split: train, val or test of the data (default: test, or val where there is none)
        count: images that become pictures
        over: images that figures are means of
        layers: layers that pictures show, counted from 0 (default: evenly chosen)
        judge: images on which maps of evidence are judged (default: as many as take about a minute; 0: none)
        what: sections of the page, and nothing else is computed (default: all that apply): attention, heads, kept,
            saliency, evidence, judged, likeness, learned, embedding, neighbours, anchors, clusters
        projection: how embeddings become a map
        attack: what `vitrail attack` left: what adaptive models keep under its patch, too
        out: folder for inspect.html and the pictures (default: RUN/inspect of one run, or runs/inspect)
        device: auto, cpu, cuda
        json: print one JSON object
    """
    from vitrail.inspect.page import inspection_tables
    from vitrail.inspect.run import inspect_models

    if not models:
        return fail("name at least one run or model to inspect")
    found, folder = inspect_models(
        models,
        data=data,
        images=images,
        split=split,
        count=count,
        over=over,
        layers=layers,
        judge=judge,
        what=what,
        projection=projection,
        attack=attack,
        out=out,
        device=device,
        quiet=json,
    )
    if json:
        print_json({"folder": str(folder), "report": str(folder / "inspect.html"), **found.to_json()})
    else:
        show(inspection_tables(found))
        print(f"report: {folder / 'inspect.html'}")
    return 0
