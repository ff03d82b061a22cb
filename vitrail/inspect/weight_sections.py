"""Pictures of what models learned: rows of patch mixing, neighbours of images, clusters, as sheets.

Learned representations, as sections of a page and as rows of a table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray
from torch import Tensor

from vitrail.compare.study_charts import curves_chart
from vitrail.inspect.embeddings import ENERGY
from vitrail.inspect.heat_maps import likeness_chart, plane_chart
from vitrail.inspect.results import InspectedModel, Inspection
from vitrail.inspect.teacher_view import Anchors
from vitrail.inspect.weight_statistics import Learned
from vitrail.quantities import MISSING, number, percent, shorten
from vitrail.report.sheets import MOST_COLUMNS, Cell, Sheet, enlarged, evenly

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


def neighbour_sheet(found: Inspection, subject: InspectedModel, number: int = 0) -> Sheet | None:
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


def anchor_sheet(found: Inspection, subject: InspectedModel, number: int = 0) -> Sheet | None:
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


def cluster_sheet(found: Inspection, subject: InspectedModel, number: int = 0) -> Sheet | None:
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


def _learned(subject: InspectedModel) -> Learned:
    assert subject.learned is not None
    return subject.learned


def _ordinal(place: int) -> str:
    return ("nearest", "2nd", "3rd")[place] if place < 3 else f"{place + 1}th"


Values = Sequence[float | None]
WAYS = {"pca": "its first two principal components", "tsne": "t-SNE", "umap": "UMAP"}


def inner_charts(found: Inspection) -> list[tuple[str, Markup, str]]:
    """Heading, chart and a line on how to read it, for everything by depth that any model has."""
    made = []
    for heading, of, x_label, tell, hint in (
        (
            "Gains of branches (LayerScale)",
            lambda one: one.scales,
            "block",
            number,
            "Mean magnitude over channels. A branch with a small gain was hardly used.",
        ),
        (
            "Length of a branch beside the stream",
            lambda one: one.ratios,
            "block",
            _whole,
            "‖branch‖ / ‖stream‖, mean over images. Flat: every block does its share; near zero: a block could go.",
        ),
        (
            "Class token against distillation token",
            lambda one: {"cosine": one.cosines[:-1]} if one.cosines else {},
            "blocks passed",
            number,
            "Cosine: 0 learned apart, 1 the same vector. The first point is the two learned tokens themselves.",
        ),
        (
            "Sparsity of the matrices",
            lambda one: one.sparsity,
            "block",
            _whole,
            "Share of weights below 5 % of the largest: A mixes patches, B and C are the MLP.",
        ),
        (
            "Singular values of second-order features",
            lambda one: one.spectra,
            "number",
            number,
            "Over the largest, mean over images and heads. Normalisation lifts the tail: more directions count.",
        ),
    ):
        curves = _curves(found, of)
        if curves:
            axis = tell if tell is _whole else "{:g}".format
            chart = curves_chart(curves, title=heading, x_label=x_label, tell=tell, tell_axis=axis)
            made.append((heading, chart, hint))
    for subject in found.subjects:
        if subject.learned is not None and subject.learned.agreement is not None:
            heading = "Agreement of its classifiers" + (f", {subject.name}" if len(found.subjects) > 1 else "")
            table = subject.learned.agreement.numpy()
            chart = likeness_chart(table, "classifier", "classifier", title=heading, unit="classifier")
            made.append((heading, chart, "Share of images on which two classifiers of the head name the same class."))
    return made


def embedding_charts(found: Inspection) -> list[tuple[str, Markup, str]]:
    """PCA energy of all models in one chart, then a map of each."""
    made = []
    curves = {s.name: [_energy(s.learned)] for s in found.subjects if s.learned is not None and s.learned.energy}
    if curves:
        heading = "Variance held by the first principal components"
        colours = {s.name: i for i, s in enumerate(found.subjects)}
        chart = curves_chart(
            curves, title=heading, x_label="components", tell=_whole, tell_axis=_whole, colours=colours
        )
        made.append((heading, chart, "; ".join(components(s, found) for s in found.subjects if s.learned) + "."))
    for subject in found.subjects:
        learned = subject.learned
        if learned is None or learned.plane is None:
            continue
        way = WAYS[learned.way]
        heading = f"Map of {subject.name}" if len(found.subjects) > 1 else "Map of the images"
        chart = plane_chart(learned.plane.numpy(), learned.labels, found.classes, title=f"{heading}, {way}")
        hint = f"A point an image, by {way}."
        if learned.way == "pca":
            hint += f" The two hold {percent(learned.energy[min(1, len(learned.energy) - 1)], 0)} of the variance."
        else:
            hint += " Distances between far groups mean little."
        made.append((heading, chart, hint.replace(" %", "\N{NO-BREAK SPACE}%")))
    return made


def components(subject: InspectedModel, found: Inspection) -> str:
    """How many components hold 90 %, in words."""
    learned = subject.learned
    assert learned is not None
    who = f"{subject.name}: " if len(found.subjects) > 1 else ""
    few = "" if learned.images > learned.width else f", too few to tell of {learned.width} dimensions"
    share = percent(ENERGY, 0)
    noun = "component holds" if learned.components == 1 else "components hold"
    return f"{who}{learned.components} {noun} {share} of the variance of {learned.images} images{few}"


def depth_rows(learned: Learned) -> tuple[list[str], list[list[str]]]:
    """Names of columns, and a row of told numbers a block."""
    columns: dict[str, Values] = {}
    columns |= {f"gain {_short(name)}": values for name, values in learned.scales.items()}
    columns |= {f"ratio {_short(name)}": values for name, values in learned.ratios.items()}
    if learned.cosines:
        columns["cosine"] = learned.cosines[1:-1]
    columns |= {f"sparse {name}": values for name, values in learned.sparsity.items()}
    depth = max((len(values) for values in columns.values()), default=0)
    rows = []
    for i in range(depth):
        told = [f"{i}"]
        for name, values in columns.items():
            value = values[i] if i < len(values) else None
            tell: Callable[[float], str] = percent if name.startswith(("ratio", "sparse")) else number
            told.append(MISSING if value is None else tell(value))
        rows.append(told)
    return ["block", *columns], rows


def told(found: Inspection) -> list[str]:
    """Figures that are no table, in words, with the model they are of where there are several."""
    said = []
    for subject in found.subjects:
        learned, who = subject.learned, f"{subject.name}: " if len(found.subjects) > 1 else ""
        if subject.anchors is not None:
            one = subject.anchors
            said.append(
                f"{who}its teacher and it name the same likeliest anchor for {percent(one.same_first)} of images; "
                f"they diverge by {one.divergence:.2f} nats"
            )
        if learned is None:
            continue
        if learned.energy:
            said.append(components(subject, found))
        if learned.cosines:
            said.append(
                f"{who}class and distillation token have a cosine of {learned.cosines[0]:.2f} as learned and "
                f"{learned.cosines[-1]:.2f} at the end"
            )
        if learned.agreement is not None:
            count = len(learned.agreement)
            mean = (float(learned.agreement.sum()) - count) / (count * (count - 1))
            said.append(f"{who}two of its {count} classifiers agree on {percent(mean)} of images")
        if learned.clusters is not None and learned.clusters.purity is not None:
            many = len(learned.clusters.sizes)
            said.append(f"{who}{many} clusters have a purity of {percent(learned.clusters.purity)}")
    return said


def _curves(
    found: Inspection, of: Callable[[Learned], Mapping[str, Values]]
) -> dict[str, Sequence[Mapping[float, float]]]:
    several = sum(bool(s.learned and of(s.learned)) for s in found.subjects) > 1
    made: dict[str, Sequence[Mapping[float, float]]] = {}
    for subject in found.subjects:
        for name, values in of(subject.learned).items() if subject.learned is not None else ():
            known = {float(i): v for i, v in enumerate(values) if v is not None}
            if known:
                made[f"{subject.name} {name}" if several else name] = [known]
    return made


def _energy(learned: Learned) -> dict[float, float]:
    """From no component to those that hold nearly all."""
    enough = sum(value < 0.99 for value in learned.energy) + 1
    return {0.0: 0.0} | {float(i + 1): value for i, value in enumerate(learned.energy[:enough])}


def _short(name: str) -> str:
    return {"mixing": "mix", "channels": "MLP"}.get(name, name)


def _whole(share: float) -> str:
    return f"{100 * share:.3g} %"
