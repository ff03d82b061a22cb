"""Output of `vitrail evaluate` for protocols, ensembles and subsets of the classes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from vitrail.cli.say import fail, print_json, show
from vitrail.measure.config import EpisodeConfig, LongTailConfig


def judge_otherwise(
    runs: Sequence[Path],
    data: str,
    options: dict[str, Any],
    protocol: Sequence[str],
    classes: Sequence[str],
    ensemble: bool,
    control: Sequence[Path],
    *,
    head: Literal["class", "distillation", "both"] | None,
    json: bool,
    per_class: bool,
    few_shot: EpisodeConfig,
    tail: LongTailConfig,
) -> int:
    """Carry out what was asked for instead of plain figures."""
    if control and not ensemble:
        return fail("--control is what an ensemble is compared with; add --ensemble")
    names = [name for joined in protocol for name in joined.split(",") if name]
    if names and (ensemble or (classes and names != ["episodes"])):
        return fail(
            "--protocol judges one run with all of its classes; leave out --classes (episodes alone take it) and "
            "--ensemble"
        )
    if ensemble:
        if head is not None:
            return fail("--ensemble takes every run as it predicts; leave out --head")
        return _ensemble(runs, control, classes, data, options, json)
    from vitrail.run.evaluate import load

    model = load(runs[0])
    if head is not None:
        model.use(head)
    if protocol:
        options |= {"episodes": few_shot, "tail": tail, "classes": classes}
        return _protocols(model, runs[0], names, data, options, json)
    return _some_classes(model, runs[0], classes, data, options, json, per_class)


def _protocols(model: Any, run: Path, names: Sequence[str], data: str, options: dict[str, Any], json: bool) -> int:
    """The named evaluators."""
    from vitrail.report.tables import protocol_tables
    from vitrail.run.protocols import judge

    found, split = judge(model, data, names, **options)
    if json:
        plain = {name: {"numbers": made["numbers"], "tables": made["tables"]} for name, made in found.items()}
        print_json({"run": str(run), "data": data, "split": split, "protocols": plain})
        return 0
    for table in protocol_tables(found, f"{split} of {data}"):
        show(table)
    return 0


def _ensemble(
    runs: Sequence[Path],
    control: Sequence[Path],
    classes: Sequence[str],
    data: str,
    options: dict[str, Any],
    json: bool,
) -> int:
    """Models as one, beside each of them and the control."""
    from vitrail.report.tables import ensemble_table
    from vitrail.run import protocols as api

    if len(runs) < 2:
        return fail("an ensemble needs at least two runs: vitrail evaluate RUN RUN --ensemble --data URI")
    made = api.ensemble(runs, data, control=control, classes=classes, **options)
    if json:
        print_json(made.to_json())
        return 0
    show(ensemble_table(made.runs, f"{made.split} of {made.data}"))
    if made.control is not None:
        show(ensemble_table(made.control, "control: seeds of one model"))
    return 0


def _some_classes(
    model: Any, run: Path, classes: Sequence[str], data: str, options: dict[str, Any], json: bool, per_class: bool
) -> int:
    """Figures where only these classes can be chosen, on the images that have one of them."""
    from vitrail.measure.classification import classification
    from vitrail.measure.evaluator import only_classes
    from vitrail.report import tables
    from vitrail.run.evaluate import evaluate

    _, said, split = evaluate(model, data, **options)
    kept = only_classes(said, model.classes, classes)
    figures = classification(kept.logits, kept.target, classes)
    if json:
        print_json(
            {"run": str(run), "data": data, "split": split, "left_out": len(said) - len(kept), **figures.to_json()}
        )
        return 0
    show(tables.headline(figures, f"{split} of {data}: {len(kept):,} of {len(said):,} images, {len(classes)} classes"))
    if per_class or len(classes) <= 20:
        show(tables.per_class(figures))
    return 0
