"""Made images beside what they were made from: a sheet to look at before anything is trained on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitrail.files import replacing
from vitrail.show.looking import Cell, Sheet, enlarged, sheet_picture
from vitrail.show.quantities import shorten

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
