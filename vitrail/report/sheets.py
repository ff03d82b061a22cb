"""Pictures of a page: images with maps laid over them, and sheets of them in named rows and columns."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from vitrail.data.stack import composite
from vitrail.files import readable, replacing
from vitrail.measure.attention_maps import AttentionMaps
from vitrail.quantities import shorten

Pixels = NDArray[np.uint8]  # [height, width, 3]
Picture = Image.Image | Pixels
T = TypeVar("T")

HERE = Path(__file__).parent
TINY = 48  # pixels; JPEG spoils images of this side or less, and PNG keeps them small
STRENGTH = 0.55  # share of the colours in an overlay; the rest is the image in grey
SIDE = 112  # of a picture of a sheet, in pixels, at least
MOST_COLUMNS = 12  # of layers or blocks; beyond, evenly chosen ones
FADED = 0.85  # share of the ground colour in a patch that was dropped
GROUND = (146, 168, 208)  # a blue that neither dark nor white images have
PAIRS = 4  # in a row of a contact sheet


def data_uri(picture: Picture, side: int = 160) -> str:
    """`picture` as the text of an `<img>` source, its longer side at most `side` pixels; never enlarged."""
    image = picture if isinstance(picture, Image.Image) else Image.fromarray(picture)
    image = image.convert("RGB")
    image.thumbnail((side, side), Image.Resampling.LANCZOS)
    kind = "png" if max(image.size) <= TINY else "jpeg"
    stored = io.BytesIO()
    image.save(stored, kind, quality=82, optimize=True)
    return f"data:image/{kind};base64,{base64.b64encode(stored.getvalue()).decode()}"


@cache
def _colormaps() -> dict[str, NDArray[np.float64]]:
    """Colour maps of matplotlib by name, [256, 3] each."""
    with np.load(HERE / "colormaps.npz") as stored:
        return dict(stored)


def colours(levels: NDArray[np.floating], name: str) -> NDArray[np.float64]:
    """Levels [...] from 0 to 1 as colours [..., 3] from 0 to 255 of the map `name`: inferno or RdBu_r."""
    return _colormaps()[name][(levels * 256).astype(int).clip(0, 255)] * 255


def overlay(image: Pixels, attention: Tensor | NDArray[np.floating]) -> Pixels:
    """`attention` [rows, columns] as colours over `image`: dark is least, bright is most.

    The map is enlarged bilinearly and stretched to its own lowest and highest value; a constant map is all dark.
    """
    grid = np.asarray(torch.as_tensor(attention).detach().cpu().float())
    if grid.ndim != 2 or not np.isfinite(grid).all():
        raise ValueError(f"an attention map must be finite numbers [rows, columns], got shape {list(grid.shape)}")
    height, width = image.shape[:2]
    large = np.asarray(Image.fromarray(grid).resize((width, height), Image.Resampling.BILINEAR))
    low, high = float(large.min()), float(large.max())
    level = (large - low) / (high - low) if high > low else np.zeros_like(large)
    grey = image.astype(np.float64).mean(2, keepdims=True)
    return np.rint((1 - STRENGTH) * grey + STRENGTH * colours(level, "inferno")).astype(np.uint8)


@dataclass(frozen=True)
class Cell:
    """A picture and a few words below it."""

    picture: Pixels
    caption: str = ""


Row = tuple[str, Sequence[Cell | None]]


@dataclass(frozen=True)
class Sheet:
    """Pictures in rows and columns; a cell may be empty."""

    name: str  # of its file, without suffix
    title: str
    columns: Sequence[str]
    rows: Sequence[Row]

    @property
    def named(self) -> bool:
        """Whether rows have names."""
        return any(name for name, _ in self.rows)

    @property
    def halves(self) -> list[Sequence[Row]]:
        """Rows for a page: two halves to stand side by side where columns are few; rows of one image stay together."""
        starts = [i for i, (_, cells) in enumerate(self.rows) if cells[0] is not None]
        if len(self.columns) > 5 or len(starts) < 2:
            return [self.rows]
        middle = starts[-(-len(starts) // 2)]
        return [self.rows[:middle], self.rows[middle:]]

    def save(self, path: Path) -> None:
        """Write the sheet as a PNG; a reader sees the old file or the new one."""
        with replacing(path) as temporary:
            sheet_picture(self).save(temporary, "png", optimize=True)


def image_rows(
    pixels: Sequence[Pixels],
    captions: Sequence[str],
    cells: Callable[[int, Pixels], Sequence[Cell | None]],
    name: Callable[[int], str] = lambda image: "",
) -> list[Row]:
    """One row per image: the image and its caption, then `cells` of its number and its enlarged pixels."""
    rows: list[Row] = []
    for image, (picture, caption) in enumerate(zip(pixels, captions, strict=False)):
        large = enlarged(picture)
        rows.append((name(image), [Cell(large, shorten(caption, 18)), *cells(image, large)]))
    return rows


def enlarged(image: Pixels, side: int = SIDE) -> Pixels:
    """The image, RGB for display, with its longer side about `side`: small ones by whole factors, pixel by pixel."""
    image = composite(image)
    longer = max(image.shape[:2])
    if longer < side:
        times = -(-side // longer)
        return image.repeat(times, 0).repeat(times, 1)
    picture = Image.fromarray(image)
    picture.thumbnail((side, side), Image.Resampling.LANCZOS)
    return np.asarray(picture)


def dimmed(image: Pixels, kept: NDArray[np.bool_]) -> Pixels:
    """`image` with the patches that are not `kept` [rows, columns] faded to a blue ground."""
    height, width = image.shape[:2]
    rows, columns = kept.shape
    mask = kept[np.arange(height) * rows // height][:, np.arange(width) * columns // width]
    faded = np.rint((1 - FADED) * image.astype(np.float64) + FADED * np.array(GROUND)).astype(np.uint8)
    return np.where(mask[..., None], image, faded)


def evenly(items: Sequence[T], most: int) -> list[T]:
    """At most `most` of the items, evenly spaced, the first and the last among them.

    >>> evenly(range(24), 4)
    [0, 8, 15, 23]
    """
    if len(items) <= most:
        return list(items)
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


def stage_columns(maps: AttentionMaps, most: int = MOST_COLUMNS) -> dict[str, int]:
    """Stages of an adaptive policy that are shown, by the name of their column."""
    word = "in" if maps.policy == "adavit" else "after"
    return {f"{word} block {stage}": stage for stage in evenly(maps.stages, most)}


def kept_cells(maps: AttentionMaps, pixels: Pixels, image: int, stages: Sequence[int]) -> list[Cell]:
    """What is left of an image after some of the stages, with the number of patches."""
    assert maps.kept is not None
    masks = [maps.kept[image, stage].reshape(maps.grid).numpy().astype(bool) for stage in stages]
    return [Cell(enlarged(dimmed(pixels, mask)), f"{mask.sum()} of {mask.size}") for mask in masks]


def kept_sheet(
    name: str,
    maps: AttentionMaps,
    pixels: Sequence[Pixels],
    captions: Sequence[str],
    *,
    number: int = 0,
    most: int = MOST_COLUMNS,
    attacked: tuple[AttentionMaps, Sequence[Pixels]] | None = None,
) -> Sheet:
    """The image, then what is left of it after each stage (AdaViT: what each block worked on), with counts.

    `attacked` are the same images with a patch on them, shown below each.
    """
    columns = stage_columns(maps, most)
    rows: list[Row] = []
    for image, caption in enumerate(captions):
        views = [(maps, pixels[image], caption, "")]
        views += [(attacked[0], attacked[1][image], "patched", "attacked, ")] if attacked is not None else []
        for view, picture, words, before in views:
            first = Cell(enlarged(picture), shorten(words, 18))
            cells = kept_cells(view, picture, image, list(columns.values()))
            rows.append((f"{before}predicted {view.prediction(image)}", [first, *cells]))
    return Sheet(f"kept-{number}", f"Kept patches, {name}", ["image", *columns], rows)


def sheet_picture(sheet: Sheet, gap: int = 8) -> Image.Image:
    """A sheet as one picture, for a file."""
    font = ImageFont.truetype(str(HERE / "DejaVuSans.ttf"), 12)
    cells = [cell for _, row in sheet.rows for cell in row if cell is not None]
    wide = max((cell.picture.shape[1] for cell in cells), default=SIDE)
    high = max((cell.picture.shape[0] for cell in cells), default=SIDE)
    foot = 20 if any(cell.caption for cell in cells) else 0
    margin = gap + (max(int(font.getlength(readable(name))) for name, _ in sheet.rows) + gap if sheet.named else 0)
    picture = Image.new(
        "RGB", (margin + len(sheet.columns) * (wide + gap), 56 + len(sheet.rows) * (high + foot + gap)), "white"
    )
    draw = ImageDraw.Draw(picture)
    draw.text((gap, 8), readable(sheet.title), fill="#1c1e24", font=font)
    for column, heading in enumerate(sheet.columns):
        draw.text(
            (margin + column * (wide + gap) + wide // 2, 34), readable(heading), fill="#5b606b", font=font, anchor="ma"
        )
    for row, (name, several) in enumerate(sheet.rows):
        top = 54 + row * (high + foot + gap)
        draw.text((gap, top + high // 2), readable(name), fill="#5b606b", font=font, anchor="lm")
        for column, cell in enumerate(several):
            if cell is None:
                continue
            left = margin + column * (wide + gap)
            picture.paste(Image.fromarray(cell.picture), (left, top))
            draw.text(
                (left + wide // 2, top + high + 3), readable(cell.caption), fill="#5b606b", font=font, anchor="ma"
            )
    return picture


@dataclass(frozen=True)
class Pair:
    """A source image, the image generated from it, and its settings."""

    source: Pixels | None  # none: generated from noise alone
    made: Pixels
    facts: dict[str, Any]


def contact_sheet(folder: Path, pairs: Sequence[Pair], *, title: str) -> Path:
    """Write `contact.png`: source and result side by side, with both classes and the noise."""
    cells: list[Cell | None] = []
    for pair in pairs:
        r, facts = pair.facts.get("r"), pair.facts
        noise = "" if r is None else f", r {r:g}"
        source = None if pair.source is None else enlarged(pair.source)
        cells.append(None if source is None else Cell(source, shorten(str(facts["source_class"]), 16)))
        cells.append(Cell(enlarged(pair.made), shorten(f"→ {facts['target']}{noise}", 18)))
    width = 2 * PAIRS
    cells += [None] * (-len(cells) % width)
    rows = [("", cells[i : i + width]) for i in range(0, len(cells), width)]
    path = folder / "contact.png"
    Sheet("contact", title, ["source", "made"] * PAIRS, rows).save(path)
    return path
