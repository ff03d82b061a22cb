"""`vitrail inspect`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from vitrail.console import fail, output
from vitrail.schema import Positional


@dataclass(frozen=True)
class InspectCommand:
    """Attention maps, kept tokens, embeddings and weights of one or several models: a page, pictures, and a table.

    Attention of the class token by layer and head, evidence for a class by several maps and how good they are, patches
    that adaptive models keep and their compute, gains and branches by depth, embeddings, neighbours, clusters, and the
    nearest images of a run's teacher; of two models also the similarity of their layers.

    Example: vitrail inspect runs/demo
    Example: vitrail inspect runs/ats runs/demo --layers 0 2
    Example: vitrail inspect runs/ats --attack runs/attack
    Example: vitrail inspect runs/demo --images cat.jpg photos/ --what evidence
    """

    models: Annotated[tuple[str, ...], Positional("RUN|MODEL ...")]
    """run folders, model folders, or names of models (untrained, for comparison)"""
    data: Annotated[str | None, "URI"] = None
    """images by URI (default: those of the first run; of a name alone embedded:fashion)"""
    images: Annotated[tuple[Path, ...], "PATH ..."] = ()  # image files or folders in place of data
    split: str | None = None  # train, val or test of the data (default: test, or val where there is none)
    count: int = 8  # images that become pictures
    over: int = 256  # images that metrics are means of
    layers: Annotated[tuple[int, ...], "LAYER ..."] = ()
    """layers that pictures show, counted from 0 (default: evenly chosen)"""
    judge: int | None = None
    """images on which maps of evidence are evaluated (default: as many as take about a minute; 0: none)"""
    what: Annotated[tuple[str, ...], "SECTION ..."] = ()
    """sections of the page, and nothing else is computed (default: all that apply): attention, heads, kept, saliency,
    evidence, judged, likeness, learned, embedding, neighbours, anchors, clusters"""
    projection: Literal["pca", "tsne", "umap"] = "pca"  # how embeddings become a map
    attack: Annotated[Path | None, "FOLDER"] = None
    """output of `vitrail attack`: tokens that adaptive models keep under its patch, too"""
    out: Path | None = None
    """folder for inspect.html and the pictures (default: RUN/inspect of one run, or runs/inspect)"""
    device: str = "auto"  # auto, cpu, cuda
    json: bool = False  # print one JSON object

    def __call__(self) -> int:
        from vitrail.inspect.page import inspection_tables
        from vitrail.inspect.run import inspect_models

        if not self.models:
            return fail("name at least one run or model to inspect")
        options = {name: value for name, value in vars(self).items() if name != "json"}
        inspection, folder = inspect_models(**options, quiet=self.json)
        report = folder / "inspect.html"
        values = {"folder": str(folder), "report": str(report), **inspection.to_json()}
        return output(self.json, values, inspection_tables(inspection), f"report: {report}")
