"""Pictures of what models learned: rows of patch mixing, neighbours of images, clusters, as sheets."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from vitrail.measure.anchors import Anchors
from vitrail.measure.inspection import Inspection, Subject
from vitrail.measure.learned import Learned
from vitrail.show.looking import MOST_COLUMNS, Cell, Sheet, enlarged, evenly
from vitrail.show.quantities import percent, shorten

FRAME = 5  # pixels around a neighbour
SAME, RELATED, OTHER = (63, 125, 95), (214, 158, 46), (178, 58, 72)  # green, amber, red
MOST_NEIGHBOURS = 8  # images whose neighbours are shown
OF_CLUSTER = 10


def signed_colours(values: NDArray[np.floating], most: float) -> NDArray[np.uint8]:
    """[rows, columns] as colours [rows, columns, 3]: blue below zero, white at it, red above, full at `most`."""
    import matplotlib

    level = 0.5 + 0.5 * np.clip(values / most, -1, 1) if most > 0 else np.full(values.shape, 0.5)
    return np.rint(matplotlib.colormaps["RdBu_r"](level)[..., :3] * 255).astype(np.uint8)


def mosaic(rows: Tensor) -> NDArray[np.uint8]:
    """Rows of a matrix over patches [down, across, rows, columns] as tiles at the places of their patches.

    Each tile has its own scale, or the largest entries of a layer would hide all others.
    """
    down, across, height, width = rows.shape
    made = np.full((down * (height + 1) - 1, across * (width + 1) - 1, 3), 170, dtype=np.uint8)
    for y in range(down):
        for x in range(across):
            tile = rows[y, x].numpy()
            top, left = y * (height + 1), x * (width + 1)
            made[top : top + height, left : left + width] = signed_colours(tile, float(np.abs(tile).max()))
    return made


def mixing_sheet(found: Inspection) -> Sheet | None:
    """Rows of ResMLP's patch mixing, a column a layer, a row a model."""
    subjects = [s for s in found.subjects if s.learned is not None and s.learned.rows]
    if not subjects:
        return None
    deepest = max(len(_learned(s).rows) for s in subjects)
    layers = evenly(range(deepest), MOST_COLUMNS)
    rows: list[tuple[str, Sequence[Cell | None]]] = []
    for subject in subjects:
        known = _learned(subject).rows
        cells = [Cell(enlarged(mosaic(known[i]))) if i < len(known) else None for i in layers]
        rows.append((subject.name if len(found.subjects) > 1 else "", cells))
    return Sheet("mixing", "Rows of patch mixing", [f"layer {i}" for i in layers], rows)


def framed(picture: NDArray[np.uint8], colour: tuple[int, int, int]) -> NDArray[np.uint8]:
    """A picture [height, width, 3] with a border of one colour drawn over its edge."""
    made = picture.copy()
    for edge in (made[:FRAME], made[-FRAME:], made[:, :FRAME], made[:, -FRAME:]):
        edge[...] = colour
    return made


def neighbour_sheet(found: Inspection, subject: Subject, number: int = 0) -> Sheet | None:
    """The chosen images, and beside each the nearest others, framed by how far their classes agree."""
    learned = subject.learned
    if learned is None or learned.neighbours is None:
        return None
    rows: list[tuple[str, Sequence[Cell | None]]] = []
    for image, near in enumerate(learned.neighbours.rows.tolist()[:MOST_NEIGHBOURS]):
        first = Cell(enlarged(subject.pixels[image]), shorten(found.captions[image], 18))
        rows.append(("", [first, *(_neighbour(found, learned, image, row) for row in near)]))
    columns = ["image", *(_ordinal(i) for i in range(learned.neighbours.rows.shape[1]))]
    return Sheet(f"neighbours-{number}", f"Nearest images of {subject.name}", columns, rows)


def anchor_sheet(found: Inspection, subject: Subject, number: int = 0) -> Sheet | None:
    """The chosen images, and beside each those that the teacher holds for the likeliest, with both probabilities."""
    ranked = subject.anchors
    if ranked is None:
        return None
    rows: list[tuple[str, Sequence[Cell | None]]] = []
    for image, near in enumerate(ranked.rows.tolist()[:MOST_NEIGHBOURS]):
        cells: list[Cell | None] = [Cell(enlarged(subject.pixels[image]), shorten(found.captions[image], 18))]
        for place, row in enumerate(near):
            shares = (float(p[image, place]) for p in (ranked.teacher, ranked.student))
            said = " ".join(f"{who}\N{NO-BREAK SPACE}{share:.0%}" for who, share in zip("TS", shares, strict=True))
            cells.append(_neighbour(found, ranked, image, row, said))
        rows.append(("", cells))
    columns = ["image", *(_ordinal(i) for i in range(ranked.rows.shape[1]))]
    return Sheet(
        f"anchors-{number}",
        f"Anchors by the teacher of {subject.name}; T: its probability, S: the student's",
        columns,
        rows,
    )


def shared_level(learned: Learned | Anchors, one: int, other: int) -> int | None:
    """The finest level of the taxonomy at which two images have the same class; none where they have none in common.

    Without a taxonomy the only level is 0.
    """
    if learned.levels is not None:
        same = np.flatnonzero(learned.levels[one] == learned.levels[other])
        return int(same[0]) if len(same) else None
    assert learned.labels is not None
    return 0 if learned.labels[one] == learned.labels[other] else None


def cluster_sheet(found: Inspection, subject: Subject, number: int = 0) -> Sheet | None:
    """A row a cluster: those of its images that are nearest to its centre."""
    learned = subject.learned
    if learned is None or learned.clusters is None:
        return None
    clusters = learned.clusters
    rows: list[tuple[str, Sequence[Cell | None]]] = []
    for place, members in enumerate(clusters.members):
        pictures = [found.more.get(int(row)) for row in members[:OF_CLUSTER]]
        cells = [None if p is None else Cell(enlarged(p.pixels), shorten(p.caption, 18)) for p in pictures]
        name = "1 image" if clusters.sizes[place] == 1 else f"{clusters.sizes[place]:,} images"
        if clusters.shares:
            kind, share = clusters.shares[place]
            name = f"{percent(share, 0)} {shorten(found.classes[kind], 18)}, {name}"
        rows.append((name, cells + [None] * (min(OF_CLUSTER, max(clusters.sizes)) - len(cells))))
    columns = ["centre"] + [""] * (min(OF_CLUSTER, max(clusters.sizes)) - 1)
    return Sheet(f"clusters-{number}", f"Clusters of {subject.name}", columns, rows)


def learned_sheets(found: Inspection) -> dict[str, list[Sheet]]:
    """Every sheet that there is something for, by section."""
    mixing = mixing_sheet(found)
    near = [neighbour_sheet(found, s, i) for i, s in enumerate(found.subjects)]
    anchors = [anchor_sheet(found, s, i) for i, s in enumerate(found.subjects)]
    clusters = [cluster_sheet(found, s, i) for i, s in enumerate(found.subjects)]
    return {
        "learned": [mixing] if mixing is not None else [],
        "neighbours": [sheet for sheet in near if sheet is not None],
        "anchors": [sheet for sheet in anchors if sheet is not None],
        "clusters": [sheet for sheet in clusters if sheet is not None],
    }


def _neighbour(
    found: Inspection, learned: Learned | Anchors, image: int, row: int, said: str | None = None
) -> Cell | None:
    """One of the nearest, with its class or what is `said` of it below."""
    picture = found.more.get(row)
    if picture is None:
        return None
    pixels, told = enlarged(picture.pixels), shorten(picture.caption, 16) if said is None else said
    if learned.labels is None:
        return Cell(pixels, told)
    level = shared_level(learned, image, row)
    colour = OTHER if level is None else SAME if level == 0 else RELATED
    mark = "✗" if level is None else "✓" if level == 0 else "~"
    return Cell(framed(pixels, colour), f"{mark} {told}")


def _learned(subject: Subject) -> Learned:
    assert subject.learned is not None
    return subject.learned


def _ordinal(place: int) -> str:
    return ("nearest", "2nd", "3rd")[place] if place < 3 else f"{place + 1}th"
