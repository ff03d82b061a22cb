"""One picture of a data set: a few images per class, and those worth a second look in a frame."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont, ImageOps

from vitrail.data.dataset import BadImage, DataSet, Split
from vitrail.files import readable, replacing

TILE, GAP, LABEL, LINE = 96, 6, 180, 16
CAPTION = 132  # width of what is written below a suspect
INK, PAPER, ALARM = (30, 30, 30), (255, 255, 255), (200, 30, 30)


@dataclass(frozen=True)
class Suspect:
    """An image that a person should look at, and why."""

    split: str
    row: int
    reason: str
    proposed: str = ""  # label; of several joined by |
    score: float | None = None  # how credible its label is, 0 to 1


def draw_sheet(
    data: DataSet,
    path: str | Path,
    suspects: Sequence[Suspect] = (),
    *,
    per_class: int = 8,
    most_classes: int = 50,
    most_suspects: int = 40,
) -> Path:
    """Write a PNG with the first training images of every class and, below, the suspects in red frames.

    Suspects that are among the classes' images are framed there too.
    """
    path = Path(path)
    train = data["train"] if "train" in data.splits else next(iter(data.splits.values()))
    shown = list(range(min(len(data.classes), most_classes)))
    framed = {(s.split, s.row) for s in suspects}
    columns = max(1, per_class)
    width = LABEL + columns * (TILE + GAP) + GAP
    class_height, suspect_height = TILE + GAP, TILE + 2 * LINE + GAP
    a_row = max(1, (width - GAP) // (CAPTION + GAP))
    listed = list(suspects[:most_suspects])
    top = GAP + len(shown) * class_height
    extra = (LINE * 2 + suspect_height * -(-len(listed) // a_row)) if listed else 0
    left_out = len(data.classes) - len(shown)
    sheet = Image.new("RGB", (width, top + extra + (2 * LINE if left_out else 0)), PAPER)
    pen = ImageDraw.Draw(sheet)
    font = _font(13)
    for line, c in enumerate(shown):
        y = GAP + line * class_height
        rows = np.flatnonzero(train.labels == c if train.labels.ndim == 1 else train.labels[:, c] > 0)
        pen.text((GAP, y), _fit(pen, data.classes[c], LABEL - 2 * GAP, font), INK, font)
        sample = f"a sample of {columns} of {len(rows):,}" if len(rows) > columns else f"all {len(rows)}"
        pen.text((GAP, y + LINE), f"{sample}\nin {train.name}", (120, 120, 120), font)
        for column, row in enumerate(rows[:columns].tolist()):
            _place(sheet, train, row, (LABEL + column * (TILE + GAP), y), (train.name, row) in framed)
    if listed:
        pen.text((GAP, top + GAP), f"worth a look ({len(listed)} of {len(suspects)})", ALARM, font)
    for number, suspect in enumerate(listed):
        x, y = GAP + number % a_row * (CAPTION + GAP), top + 2 * LINE + number // a_row * suspect_height
        split = data[suspect.split]
        _place(sheet, split, suspect.row, (x, y), framed=True)
        small = _font(11)
        name = Path(split.keys[suspect.row]).name
        pen.text(
            (x, y + TILE),
            _fit(pen, f"{data.label_text(split.labels[suspect.row])}: {name}", CAPTION, small),
            INK,
            small,
        )
        text = f"proposed: {suspect.proposed}" if suspect.proposed else suspect.reason
        pen.text((x, y + TILE + LINE - 2), _fit(pen, text, CAPTION, small), ALARM, small)
    if left_out:
        pen.text((GAP, sheet.height - 2 * LINE), f"and {left_out} more classes", INK, font)
    with replacing(path) as temporary:
        sheet.save(temporary, "PNG")
    return path


def _place(sheet: Image.Image, split: Split, row: int, corner: tuple[int, int], framed: bool) -> None:
    x, y = corner
    pen = ImageDraw.Draw(sheet)
    try:
        image = split.read(row)
    except BadImage as bad:
        pen.rectangle((x, y, x + TILE - 1, y + TILE - 1), (235, 235, 235), ALARM)
        font = _font(11)
        pen.text((x + 4, y + TILE // 2 - LINE // 2), _fit(pen, bad.reason, TILE - 8, font), ALARM, font)
        return
    enlarge = Image.Resampling.NEAREST if max(image.size) * 2 <= TILE else Image.Resampling.BICUBIC
    sheet.paste(ImageOps.pad(image, (TILE, TILE), enlarge, color=(235, 235, 235)), corner)
    if framed:
        pen.rectangle((x, y, x + TILE - 1, y + TILE - 1), None, ALARM, 4)


def _fit(pen: ImageDraw.ImageDraw, text: str, width: int, font: ImageFont.FreeTypeFont) -> str:
    text = readable(text)
    if pen.textlength(text, font) <= width:
        return text
    while text and pen.textlength(text + "\N{HORIZONTAL ELLIPSIS}", font) > width:
        text = text[:-1]
    return text + "\N{HORIZONTAL ELLIPSIS}"


def _font(size: int) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(str(Path(__file__).parents[2] / "report" / "DejaVuSans.ttf"), size)
