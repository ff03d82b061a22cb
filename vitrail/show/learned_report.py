"""Learned representations, as sections of a page and as rows of a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from markupsafe import Markup

from vitrail.measure.embeddings import ENERGY
from vitrail.measure.inspection import Inspection, Subject
from vitrail.measure.learned import Learned
from vitrail.show.compare_charts import curves_chart
from vitrail.show.learned_charts import plane_chart
from vitrail.show.looking_charts import likeness_chart
from vitrail.show.quantities import MISSING, number, percent

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


def components(subject: Subject, found: Inspection) -> str:
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
