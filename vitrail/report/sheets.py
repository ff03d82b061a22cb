"""Pictures small enough to live inside a page.

Attention as pictures: where a model looked, laid over the image.

Pictures of where models look and which patches they keep, as sheets: grids with names of columns and rows.

Made images beside what they were made from: a sheet to look at before anything is trained on them.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from vitrail.files import replacing
from vitrail.inspect.results import InspectedModel, Inspection
from vitrail.measure.attention_maps import Looks
from vitrail.quantities import shorten

Picture = Image.Image | NDArray[np.uint8]  # an image, or uint8 [height, width, 3]

TINY = 48  # pixels; JPEG spoils images of this side or less, and PNG keeps them small


def data_uri(picture: Picture, side: int = 160) -> str:
    """`picture` as the text of an `<img>` source, its longer side at most `side` pixels; never enlarged."""
    image = picture if isinstance(picture, Image.Image) else Image.fromarray(picture)
    image = image.convert("RGB")
    image.thumbnail((side, side), Image.Resampling.LANCZOS)
    kind = "png" if max(image.size) <= TINY else "jpeg"
    stored = io.BytesIO()
    image.save(stored, kind, quality=82, optimize=True)
    return f"data:image/{kind};base64,{base64.b64encode(stored.getvalue()).decode()}"


STRENGTH = 0.55  # share of the colours in an overlay; the rest is the image in grey


def overlay(image: NDArray[np.uint8], attention: Tensor | NDArray[np.floating]) -> NDArray[np.uint8]:
    """`attention` [rows, columns] as colours over `image` [height, width, 3]: dark is least, bright is most.

    The map is enlarged bilinearly and stretched to its own lowest and highest value; a constant map is all dark.
    """
    import matplotlib

    grid = np.asarray(torch.as_tensor(attention).detach().cpu().float())
    if grid.ndim != 2 or not np.isfinite(grid).all():
        raise ValueError(f"an attention map must be finite numbers [rows, columns], got shape {list(grid.shape)}")
    height, width = image.shape[:2]
    large = np.asarray(Image.fromarray(grid).resize((width, height), Image.Resampling.BILINEAR))
    low, high = float(large.min()), float(large.max())
    level = (large - low) / (high - low) if high > low else np.zeros_like(large)
    colours = matplotlib.colormaps["inferno"](level)[..., :3] * 255
    grey = image.astype(np.float64).mean(2, keepdims=True)
    return np.rint((1 - STRENGTH) * grey + STRENGTH * colours).astype(np.uint8)


SIDE = 112  # of a picture of a sheet, in pixels, at least
MOST_COLUMNS = 12  # of layers or blocks; beyond, evenly chosen ones
MOST_HEADS = 16
HEAD_PICTURES = 3  # images whose heads are shown one by one
FADED = 0.85  # share of the ground colour in a patch that was dropped
GROUND = (146, 168, 208)  # a blue that neither dark nor white images have
T = TypeVar("T")


@dataclass(frozen=True)
class Cell:
    """A picture uint8 [height, width, 3] and a few words below it."""

    picture: NDArray[np.uint8]
    caption: str = ""


@dataclass(frozen=True)
class Sheet:
    """Pictures in rows and columns; a cell may be empty."""

    name: str  # of its file, without suffix
    title: str
    columns: Sequence[str]
    rows: Sequence[tuple[str, Sequence[Cell | None]]]

    @property
    def named(self) -> bool:
        """Whether rows have names."""
        return any(name for name, _ in self.rows)


def enlarged(image: NDArray[np.uint8], side: int = SIDE) -> NDArray[np.uint8]:
    """The image with its longer side about `side`: small ones by whole factors, pixel by pixel."""
    longer = max(image.shape[:2])
    if longer < side:
        times = -(-side // longer)
        return image.repeat(times, 0).repeat(times, 1)
    picture = Image.fromarray(image)
    picture.thumbnail((side, side), Image.Resampling.LANCZOS)
    return np.asarray(picture)


def dimmed(image: NDArray[np.uint8], kept: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """`image` [height, width, 3] with the patches that are not `kept` [rows, columns] faded to a blue ground."""
    height, width = image.shape[:2]
    rows, columns = kept.shape
    there = kept[np.arange(height) * rows // height][:, np.arange(width) * columns // width]
    faded = np.rint((1 - FADED) * image.astype(np.float64) + FADED * np.array(GROUND)).astype(np.uint8)
    return np.where(there[..., None], image, faded)


def evenly(items: Sequence[T], most: int) -> list[T]:
    """At most `most` of the items, evenly spaced, the first and the last among them.

    >>> evenly(range(24), 4)
    [0, 8, 15, 23]
    """
    if len(items) <= most:
        return list(items)
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


def attention_sheet(found: Inspection) -> Sheet | None:
    """What the class token attends to, mean over heads: a column a layer; models below each other for every image."""
    subjects = [s for s in found.subjects if s.looks.layers or s.looks.head_maps is not None]
    if not subjects:
        return None
    known = sorted({layer.layer for s in subjects for layer in s.looks.layers})
    layers = list(found.layers) or evenly(known, MOST_COLUMNS)
    heads = any(s.looks.head_maps is not None for s in subjects)
    rows: list[tuple[str, Sequence[Cell | None]]] = []
    for image, caption in enumerate(found.captions):
        for place, subject in enumerate(subjects):
            pixels, looks = enlarged(subject.pixels[image]), subject.looks
            at = {layer.layer: i for i, layer in enumerate(looks.layers)}
            cells: list[Cell | None] = [Cell(pixels, shorten(caption, 18)) if place == 0 else None]
            for layer in layers:
                mean = looks.class_maps[image, at[layer]].mean(0) if layer in at else None
                cells.append(None if mean is None else Cell(_over(pixels, mean, looks.grid)))
            if heads:
                seen = looks.head_maps
                cells.append(None if seen is None else Cell(_over(pixels, seen[image], looks.grid)))
            rows.append((_row_name(subject, image, len(subjects) > 1), cells))
    columns = ["image", *(f"layer {i}" for i in layers), *(["head"] if heads else [])]
    return Sheet("attention", "What the class token attends to, mean over heads", columns, rows)


def head_sheets(found: Inspection) -> list[Sheet]:
    """One sheet a model: for a few images, a row a layer and a column a head."""
    sheets = []
    for number, subject in enumerate(s for s in found.subjects if s.looks.layers):
        looks = subject.looks
        at = {layer.layer: i for i, layer in enumerate(looks.layers)}
        layers = [i for i in found.layers if i in at] or evenly(list(at), 3)
        heads = looks.class_maps.shape[2]
        shown = evenly(range(heads), MOST_HEADS)
        rows: list[tuple[str, Sequence[Cell | None]]] = []
        for image in range(min(HEAD_PICTURES, len(found.captions))):
            pixels = enlarged(subject.pixels[image])
            for place, layer in enumerate(layers):
                maps = looks.class_maps[image, at[layer]]
                first = Cell(pixels, shorten(found.captions[image], 18)) if place == 0 else None
                rows.append((f"layer {layer}", [first, *(Cell(_over(pixels, maps[h], looks.grid)) for h in shown)]))
        columns = ["image", *(f"head {h}" for h in shown)]
        title = f"Head by head, {subject.name}" + (f" ({len(shown)} of {heads} heads)" if len(shown) < heads else "")
        sheets.append(Sheet(f"heads-{number}", title, columns, rows))
    return sheets


def kept_sheet(
    subject: InspectedModel, captions: Sequence[str], number: int = 0, most: int = MOST_COLUMNS
) -> Sheet | None:
    """The image, then what is left of it after each stage (AdaViT: what each block worked on), with counts.

    Where the model was also looked at under an attack, that stands below each image.
    """
    if subject.looks.kept is None:
        return None
    stages = evenly(subject.stages, most)
    rows: list[tuple[str, Sequence[Cell | None]]] = []
    for image, caption in enumerate(captions):
        cells = _kept_cells(subject.looks, subject.pixels[image], image, stages)
        rows.append(
            (f"says {subject.says(image)}", [Cell(enlarged(subject.pixels[image]), shorten(caption, 18)), *cells])
        )
        if subject.attacked is not None:
            pixels = subject.attacked_pixels[image]
            cells = _kept_cells(subject.attacked, pixels, image, stages)
            said = f"attacked, says {subject.says(image, subject.attacked)}"
            rows.append((said, [Cell(enlarged(pixels), "patched"), *cells]))
    return Sheet(f"kept-{number}", f"What {subject.name} keeps", _stage_columns(subject, stages), rows)


def selection_sheet(subject: InspectedModel, captions: Sequence[str], number: int = 0) -> Sheet | None:
    """What is kept by the model's own rule of drawing tokens, and below it by another."""
    beside = subject.selection
    if beside is None:
        return None
    stages = evenly(subject.stages, MOST_COLUMNS)
    rows: list[tuple[str, Sequence[Cell | None]]] = []
    for image, caption in enumerate(captions):
        pixels = subject.pixels[image]
        first: Cell | None = Cell(enlarged(pixels), shorten(caption, 18))
        for rule, looks in ((beside.own, subject.looks), (beside.other, beside.looks)):
            cells = _kept_cells(looks, pixels, image, stages)
            rows.append((f"{rule}, says {subject.says(image, looks)}", [first, *cells]))
            first = None
    title = f"{beside.own[:1].upper()}{beside.own[1:]} beside {beside.other}, {subject.name}"
    return Sheet(f"selection-{number}", title, _stage_columns(subject, stages), rows)


def _kept_cells(looks: Looks, pixels: NDArray[np.uint8], image: int, stages: Sequence[int]) -> list[Cell]:
    assert looks.kept is not None
    made = []
    for stage in stages:
        kept = looks.kept[image, stage]
        grid = kept.reshape(looks.grid).numpy().astype(bool)
        made.append(Cell(enlarged(dimmed(pixels, grid)), f"{int(kept.sum())} of {kept.numel()}"))
    return made


def _stage_columns(subject: InspectedModel, stages: Sequence[int]) -> list[str]:
    word = "in" if subject.kind == "adavit" else "after"
    return ["image", *(f"{word} block {i}" for i in stages)]


def saliency_sheet(subject: InspectedModel, captions: Sequence[str], number: int = 0) -> Sheet | None:
    """Norms of q̂ and k̂ of SimA's last layer over the image (Abbasi Koohpayegani and Pirsiavash, 2022, arXiv
    2206.08898)."""
    looks = subject.looks
    if looks.saliency is None:
        return None
    rows: list[tuple[str, Sequence[Cell | None]]] = []
    for image, caption in enumerate(captions):
        pixels = enlarged(subject.pixels[image])
        over = [Cell(_over(pixels, values[image], looks.grid)) for values in looks.saliency]
        rows.append((f"says {subject.says(image)}", [Cell(pixels, shorten(caption, 18)), *over]))
    return Sheet(f"saliency-{number}", f"Saliency of {subject.name}", ["image", "length of q̂", "length of k̂"], rows)


def map_name(kind: str) -> str:
    """A kind of map as a person writes it."""
    return {"grad_cam": "Grad-CAM", "sima": "SimA"}.get(kind, kind.replace("_", " "))


def evidence_sheet(subject: InspectedModel, captions: Sequence[str], number: int = 0) -> Sheet | None:
    """Every kind of map that the model has, for the class that it says."""
    found = subject.evidence
    if found is None or not found.maps:
        return None
    rows: list[tuple[str, Sequence[Cell | None]]] = []
    for image, caption in enumerate(captions):
        pixels = enlarged(subject.pixels[image])
        over = [Cell(overlay(pixels, maps[image])) for maps in found.maps.values()]
        rows.append((f"says {subject.says(image)}", [Cell(pixels, shorten(caption, 18)), *over]))
    columns = ["image", *map(map_name, found.maps)]
    return Sheet(f"evidence-{number}", f"Evidence for what {subject.name} says", columns, rows)


def classes_sheet(subject: InspectedModel, captions: Sequence[str], number: int = 0) -> Sheet | None:
    """The evidence for the most likely classes, side by side."""
    found = subject.evidence
    if found is None or not found.by_class.numel():
        return None
    rows: list[tuple[str, Sequence[Cell | None]]] = []
    for image, caption in enumerate(captions):
        pixels = enlarged(subject.pixels[image])
        cells: list[Cell | None] = [Cell(pixels, shorten(caption, 18))]
        for place, kind in enumerate(found.likeliest[image].tolist()):
            share = float(subject.looks.probabilities[image, kind])
            told = f"{shorten(subject.classes[kind], 14)} {share:.0%}"
            cells.append(Cell(overlay(pixels, found.by_class[image, place]), told))
        rows.append(("", cells))
    ranks = ("likeliest", "second", "third")[: found.likeliest.shape[1]]
    title = f"Evidence for the likeliest classes, {map_name(found.kind)}, {subject.name}"
    return Sheet(f"classes-{number}", title, ["image", *ranks], rows)


def voices_sheet(subject: InspectedModel, captions: Sequence[str], number: int = 0) -> Sheet | None:
    """Grad-CAM through the class token, through the words and through both, with what each says by itself."""
    found = subject.evidence
    if found is None or not found.voices:
        return None
    rows: list[tuple[str, Sequence[Cell | None]]] = []
    for image, caption in enumerate(captions):
        pixels = enlarged(subject.pixels[image])
        cells: list[Cell | None] = [Cell(pixels, shorten(caption, 18))]
        for voice in found.voices:
            share, kind = (float(v) for v in voice.probabilities[image].max(0))
            name = subject.classes[int(kind)]
            mark = ("✓ " if name == caption else "✗ ") if caption in subject.classes else ""
            cells.append(Cell(overlay(pixels, voice.maps[image]), f"{mark}{shorten(name, 12)} {share:.0%}"))
        rows.append(("", cells))
    title = f"Class token, words and both, {subject.name}"
    return Sheet(f"voices-{number}", title, ["image", *(voice.name for voice in found.voices)], rows)


def all_sheets(found: Inspection) -> dict[str, list[Sheet]]:
    """Every sheet that the models have something for, by section."""
    first = attention_sheet(found)
    kept = [make(s, found.captions, i) for i, s in enumerate(found.subjects) for make in (kept_sheet, selection_sheet)]
    salient = [saliency_sheet(s, found.captions, i) for i, s in enumerate(found.subjects)]
    evidence = [
        make(s, found.captions, i)
        for i, s in enumerate(found.subjects)
        for make in (evidence_sheet, classes_sheet, voices_sheet)
    ]
    return {
        "attention": [first] if first is not None else [],
        "evidence": [sheet for sheet in evidence if sheet is not None],
        "heads": head_sheets(found),
        "kept": [sheet for sheet in kept if sheet is not None],
        "saliency": [sheet for sheet in salient if sheet is not None],
    }


def sheet_picture(sheet: Sheet, gap: int = 8) -> Image.Image:
    """A sheet as one picture, for a file."""
    import matplotlib

    font = ImageFont.truetype(str(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"), 12)
    cells = [cell for _, row in sheet.rows for cell in row if cell is not None]
    wide = max((cell.picture.shape[1] for cell in cells), default=SIDE)
    high = max((cell.picture.shape[0] for cell in cells), default=SIDE)
    foot = 20 if any(cell.caption for cell in cells) else 0
    name = max(int(font.getlength(text)) for text, _ in sheet.rows) + gap if sheet.named else 0
    size = (
        gap + name + len(sheet.columns) * (wide + gap),
        56 + len(sheet.rows) * (high + foot + gap),
    )
    made = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(made)
    draw.text((gap, 8), sheet.title, fill="#1c1e24", font=font)
    for column, text in enumerate(sheet.columns):
        middle = gap + name + column * (wide + gap) + wide // 2
        draw.text((middle, 34), text, fill="#5b606b", font=font, anchor="ma")
    for row, (text, some) in enumerate(sheet.rows):
        top = 54 + row * (high + foot + gap)
        draw.text((gap, top + high // 2), text, fill="#5b606b", font=font, anchor="lm")
        for column, cell in enumerate(some):
            if cell is None:
                continue
            left = gap + name + column * (wide + gap)
            made.paste(Image.fromarray(cell.picture), (left, top))
            draw.text((left + wide // 2, top + high + 3), cell.caption, fill="#5b606b", font=font, anchor="ma")
    return made


def _over(pixels: NDArray[np.uint8], values: Tensor, grid: tuple[int, int]) -> NDArray[np.uint8]:
    return overlay(pixels, values.float().reshape(grid))


def _row_name(subject: InspectedModel, image: int, several: bool) -> str:
    says = f"says {subject.says(image)}"
    return f"{subject.name} {says}" if several else says


PAIRS = 4  # in a row


@dataclass(frozen=True)
class Pair:
    """An image, what was made of it, and what is known of that."""

    source: NDArray[np.uint8] | None  # none: made of noise alone
    made: NDArray[np.uint8]
    facts: dict[str, Any]


def contact_sheet(folder: Path, pairs: Sequence[Pair], *, title: str) -> Path:
    """Write `contact.png`: source and result side by side, with both classes and the noise."""
    cells: list[Cell | None] = []
    for pair in pairs:
        r = pair.facts.get("r")
        noise = "" if r is None else f", r {r:g}"
        before = None if pair.source is None else enlarged(pair.source)
        cells.append(None if before is None else Cell(before, shorten(str(pair.facts["source_class"]), 16)))
        cells.append(Cell(enlarged(pair.made), shorten(f"→ {pair.facts['target']}{noise}", 18)))
    width = 2 * PAIRS
    cells += [None] * (-len(cells) % width)
    rows = [("", cells[i : i + width]) for i in range(0, len(cells), width)]
    sheet = Sheet("contact", title, ["source", "made"] * PAIRS, rows)
    path = folder / "contact.png"
    with replacing(path) as temporary:
        sheet_picture(sheet).save(temporary, "png", optimize=True)
    return path
