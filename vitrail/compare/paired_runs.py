"""Finished runs side by side: means and spread over seeds, paired tests against a baseline, disagreement, classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitrail.compare.statistics import (
    Against,
    Comparison,
    Failure,
    Floats,
    Member,
    Price,
    StudyRow,
    disagreement,
    holm,
    paired_interval,
    pareto,
    sign_flip_p,
    sign_flip_p_whole,
)
from vitrail.data.dataset import UNLABELLED
from vitrail.measure.classification import MultiLabelFigures, classification
from vitrail.measure.few_labels import FEWEST, Correlation, Spread, early_and_final


def compare_members(
    name: str,
    members: Sequence[Member],
    baseline: str,
    *,
    failures: Sequence[Failure] = (),
    prices: Mapping[str, Price] | None = None,
    lengths: Mapping[str, str] | None = None,
    order: Sequence[str] = (),
    conditions: str = "",
    budget: str = "",
    notes: Sequence[str] = (),
) -> Comparison:
    """Put runs side by side; rows come in `order`, others behind. Raises `ValueError` without a finished run."""
    if not members:
        raise ValueError("there is nothing to compare: no run has finished")
    said = list(notes)
    figure = "top1" if all("top1" in m.figures for m in members) else "map"
    writers = [m.path for m in members if "perplexity" in m.figures]
    if writers:
        raise ValueError(f"{writers[0]} is a language model, and accuracies are compared; see its metrics.jsonl")
    blind = [m.path for m in members if m.classes == (UNLABELLED,)]
    if blind:
        raise ValueError(
            f"{blind[0]} learned from images without labels, and accuracies are compared; judge it on some that have "
            "labels: vitrail evaluate RUN --data LABELLED --protocol knn,linear"
        )
    lacking = [m.path for m in members if figure not in m.figures]
    if lacking:
        raise ValueError(f"{lacking[0]} has no {figure}: runs with one label and with several cannot be compared")
    names = list(dict.fromkeys([*order, *(m.variant for m in members), *(f.variant for f in failures)]))
    by = {n: tuple(sorted((m for m in members if m.variant == n), key=lambda m: m.seed)) for n in names}
    splits = {m.split for m in members}
    if len(splits) > 1:
        said.append(f"figures are of different splits ({', '.join(sorted(splits))}): they cannot be compared directly")
    sources = {m.data for m in members}
    if len(sources) > 1:
        said.append(f"runs were tested on different data ({', '.join(sorted(sources))})")
    silent = [m.path for m in members if m.predictions is None]
    if silent:
        said.append(
            f"{len(silent)} runs kept no predictions, so they have no paired test (first: {silent[0]}); "
            f"renew them with: vitrail train --resume {silent[0]}"
        )
    rows = [_row(n, by[n], [f for f in failures if f.variant == n], figure, prices or {}, lengths or {}) for n in names]
    rows = [
        row if row.variant == baseline else replace(row, against=_against(row.members, by.get(baseline, ()), figure))
        for row in rows
    ]
    rows = _on_front(_with_holm(rows))
    judged = tuple(n for n in names if any(m.predictions is not None for m in by[n]))
    first = next((m for n in (baseline, *names) for m in by.get(n, ()) if m.predictions is not None), None)
    same = {m.classes for m in members if m.predictions is not None}
    classes = first.classes if first is not None and len(same) == 1 else ()
    return Comparison(
        name=name,
        figure=figure,
        baseline=baseline,
        split=members[0].split,
        rows=tuple(rows),
        disagreement=disagreement_matrix([by[n] for n in judged]) if judged else None,
        judged=judged,
        classes=classes,
        class_scores={n: s for n in judged if classes and (s := _class_scores(by[n])) is not None},
        seed_study={n: seed_study(by[n], figure) for n in names if len(by[n]) > 1},
        conditions=conditions,
        budget=budget,
        notes=tuple(said),
    )


def disagreement_matrix(groups: Sequence[Sequence[Member]]) -> Floats:
    """[variants, variants] share of images on which two runs decide differently, mean over pairs of equal seeds.

    On the diagonal: two seeds of one variant, mean over all pairs; NaN with one seed. Also NaN where no two runs saw
    the same images. Where variants share no seed, all pairs count.
    """
    made = np.full((len(groups), len(groups)), np.nan)
    for i, first in enumerate(groups):
        for j, second in enumerate(groups):
            pairs = list(combinations(first, 2)) if i == j else [(a, b) for a in first for b in second]
            equal = [(a, b) for a, b in pairs if a.seed == b.seed]
            rates = [r for a, b in (equal if equal and i != j else pairs) if (r := _rate(a, b)) is not None]
            if rates:
                made[i, j] = float(np.mean(rates))
    return made


def seed_study(members: Sequence[Member], figure: str) -> dict[str, Any]:
    """Effect of the seed: spread of the final metric, correlations, early and final evaluations."""
    final = [float(m.figures[figure]) for m in members]
    courses = [m.course(figure) for m in members]
    sets = {members[0].split: final}
    if members[0].split != "val" and all(courses):
        sets["val"] = [course[max(course)] for course in courses]
    for uri in members[0].elsewhere:
        if all(uri in m.elsewhere for m in members):
            sets[uri] = [m.elsewhere[uri] for m in members]
    found: dict[str, Any] = {
        "seeds": [m.seed for m in members],
        "sets": {name: {**Spread.of(values).to_json(), "values": values} for name, values in sets.items()},
    }
    if len(members) >= FEWEST:
        found["between"] = [
            {"sets": [a, b], **Correlation.of(sets[a], sets[b]).to_json()} for a, b in combinations(sets, 2)
        ]
        found["early"] = [{"epoch": e, **c.to_json()} for e, c in early_and_final(courses, final).items()]
    return found


def _row(
    name: str,
    members: tuple[Member, ...],
    failures: Sequence[Failure],
    figure: str,
    prices: Mapping[str, Price],
    lengths: Mapping[str, str],
) -> StudyRow:
    def mean(values: Sequence[float | None]) -> float | None:
        known = [v for v in values if v is not None]
        return float(np.mean(known)) if known else None

    keys = set.intersection(*(set(m.figures) for m in members)) if members else set()
    price = prices.get(name)
    if price is not None:
        price = replace(price, seconds=mean([m.seconds for m in members]), epochs=mean([m.epochs for m in members]))
    return StudyRow(
        variant=name,
        members=members,
        failures=tuple(failures),
        spread=Spread.of([float(m.figures[figure]) for m in members]) if members else None,
        means={k: float(np.mean([m.figures[k] for m in members])) for k in sorted(keys)},
        price=price,
        length=lengths.get(name, ""),
    )


def _against(members: Sequence[Member], baseline: Sequence[Member], figure: str) -> Against | None:
    base = {m.seed: m for m in baseline}
    pairs = [(m, base[m.seed]) for m in members if m.seed in base]
    if not pairs and len(members) == len(baseline) == 1:  # single runs, compared although their seeds differ
        pairs = [(members[0], baseline[0])]
    if not pairs:
        return None
    gains = [float(a.figures[figure]) - float(b.figures[figure]) for a, b in pairs]
    by_image = _by_image(pairs) if figure == "top1" else None
    return Against(
        seeds=len(pairs),
        difference=float(np.mean(gains)),
        interval=None if by_image is None else paired_interval(by_image),
        p_seeds=sign_flip_p(gains) if len(pairs) > 1 else None,
        p_images=None if by_image is None else sign_flip_p_whole(by_image.sum(0)),
    )


def _by_image(pairs: Sequence[tuple[Member, Member]]) -> NDArray[np.int64] | None:
    """[seeds, images] what the first got right less what the second did, on images that all of them saw."""
    shared: NDArray[np.int64] | None = None
    for member in (m for pair in pairs for m in pair):
        if member.predictions is None or member.data != pairs[0][0].data or member.split != pairs[0][0].split:
            return None
        index = member.predictions.index.numpy()
        shared = index if shared is None else np.intersect1d(shared, index, assume_unique=True)
    if shared is None or not len(shared):
        return None

    def right(member: Member) -> NDArray[np.int64]:
        assert member.predictions is not None
        place = np.searchsorted(member.predictions.index.numpy(), shared)
        found: NDArray[np.int64] = member.predictions.right.numpy()[place]
        return found

    return np.stack([right(a) - right(b) for a, b in pairs])


def _rate(first: Member, second: Member) -> float | None:
    a, b = first.predictions, second.predictions
    if a is None or b is None or first.data != second.data or first.classes != second.classes:
        return None
    if a.multilabel != b.multilabel or first.split != second.split:
        return None
    _, here, there = np.intersect1d(a.index.numpy(), b.index.numpy(), assume_unique=True, return_indices=True)
    if not len(here):
        return None
    first_said, second_said = a.guess[here], b.guess[there]
    if a.multilabel:  # share of labels
        return float((first_said != second_said).double().mean())
    return disagreement({"first": first_said, "second": second_said}, a.target[here]).between("first", "second")


def _class_scores(members: Sequence[Member]) -> Floats | None:
    """[classes] recall (average precision where several labels hold), mean over seeds."""
    scores = []
    for member in members:
        if member.predictions is None:
            continue
        if member.predictions.multilabel:
            made = classification(member.predictions.logits.float(), member.predictions.target)
            assert isinstance(made, MultiLabelFigures)
            scores.append(made.average_precision)
        else:
            target, right = member.predictions.target.numpy(), member.predictions.right.numpy()
            count = np.bincount(target, minlength=len(member.classes))
            hits = np.bincount(target, weights=right, minlength=len(member.classes))
            scores.append(np.where(count > 0, hits / np.maximum(count, 1), np.nan))
    return np.mean(scores, axis=0) if scores else None


def _with_holm(rows: Sequence[StudyRow]) -> list[StudyRow]:
    tested = [row.against for row in rows if row.against is not None]
    by_seeds = iter(holm([a.p_seeds for a in tested if a.p_seeds is not None]))
    by_images = iter(holm([a.p_images for a in tested if a.p_images is not None]))
    made = []
    for row in rows:
        against = row.against
        if against is not None:
            against = replace(
                against,
                holm_seeds=None if against.p_seeds is None else next(by_seeds),
                holm_images=None if against.p_images is None else next(by_images),
            )
        made.append(replace(row, against=against))
    return made


def _on_front(rows: Sequence[StudyRow]) -> list[StudyRow]:
    known = [row for row in rows if row.price is not None and row.spread is not None]
    front = pareto(
        [row.price.macs for row in known if row.price is not None],
        [row.spread.mean for row in known if row.spread is not None],
    )
    best = {row.variant for row, on in zip(known, front, strict=True) if on}
    return [replace(row, front=row.variant in best) for row in rows]
