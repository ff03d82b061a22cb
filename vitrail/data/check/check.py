"""Problems of a data set: unreadable, odd, duplicate, leaked, mislabelled or imbalanced images (`vitrail check`)."""

from __future__ import annotations

import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from vitrail.data.check.contact_sheet import Suspect, draw_sheet
from vitrail.data.check.duplicates import Fingerprints, copies, near_copies, strangers, take_fingerprints
from vitrail.data.dataset import DataSet
from vitrail.data.sources.table import write_csv

Level = Literal["note", "warning", "error"]

TINY_CLASS = 10  # training images
IMBALANCE = 10.0  # largest class over smallest
SMALL_SIDE = 16  # pixels
LONG_ASPECT = 4.0
TRUST = 0.5  # least share of labels that neighbours or classifiers agree with, for these to accuse others
_STRAY_NAMES = ("thumbs", "__macosx", "new folder", "untitled folder", "desktop", "ipynb_checkpoints")
_ODD_MODES = {"CMYK": "CMYK", "1": "1 bit", "I": "32 bits", "F": "floating point", "LAB": "LAB", "YCbCr": "YCbCr"}


@dataclass(frozen=True)
class Finding:
    """One problem: how bad, what, how often, and examples."""

    check: str
    level: Level
    count: int
    text: str
    examples: tuple[str, ...] = ()


@dataclass(frozen=True)
class CheckReport:
    """All problems of a data set. Notes do not count against it."""

    uri: str
    images: dict[str, int]  # by split
    classes: int  # 0 where images have values
    findings: tuple[Finding, ...]
    suspects: tuple[Suspect, ...] = ()  # images a person should look at
    notes: tuple[str, ...] = ()  # what was ignored or held out as the data were read

    @property
    def summary(self) -> str:
        """How many images and classes there are."""
        splits = ", ".join(f"{count:,} {name}" for name, count in self.images.items())
        kind = f"{self.classes:,} classes" if self.classes else "values"
        return f"{sum(self.images.values()):,} images, {kind}: {splits}"

    @property
    def severity(self) -> Literal["ok", "warnings", "errors"]:
        levels = {finding.level for finding in self.findings}
        return "errors" if "error" in levels else "warnings" if "warning" in levels else "ok"

    def exit_code(self, strict: bool = False) -> int:
        """0: fine; 1: warnings, where `strict`; 2: errors."""
        return {"ok": 0, "warnings": int(strict), "errors": 2}[self.severity]

    def to_json(self) -> dict[str, Any]:
        """Plain values for `json.dump`."""
        return {"severity": self.severity, **asdict(self)}

    def rows(self) -> list[tuple[str, str, str, str]]:
        """(level, what was found, how many, examples) of each finding, the worst first."""
        order = ("error", "warning", "note")
        ordered = sorted(self.findings, key=lambda finding: order.index(finding.level))
        return [(f.level, f"{f.check}: {f.text}", *_count_and_examples(f)) for f in ordered]


def _count_and_examples(finding: Finding) -> tuple[str, str]:
    if finding.check == "class balance":  # the count would be that of all images, and one example of equal classes
        return "", ", ".join(finding.examples) if len(finding.examples) > 1 else ""
    more = [f"and {finding.count - 3:,} more"] if len(finding.examples) > 3 else []
    return f"{finding.count:,}", ", ".join([*finding.examples[:3], *more])


def check_data(
    data: DataSet,
    *,
    workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    bad_limit: float = 0.01,
) -> CheckReport:
    """Read every image once and report. `bad_limit` is the share of unreadable images that makes an error.

    Raises nothing for bad data; what is wrong is in the report.
    """
    images = {name: len(split) for name, split in data.splits.items()}
    suspects: list[Suspect] = []
    findings = [*_labels(data), *_names(data.classes), *_balance(data)]
    if any(images.values()):
        prints = take_fingerprints(data, workers, progress)
        findings += _unreadable(prints, bad_limit)
        findings += _oddities(prints)
        findings += _duplicates(prints, suspects)
        findings += _near_duplicates(prints, suspects)
        findings += _suspicious(prints, data.classes, suspects)
    classes = 0 if data.numeric else len(data.classes)
    return CheckReport(data.uri, images, classes, tuple(findings), tuple(suspects), tuple(data.notes))


def picture_sheet(data: DataSet, path: str | Path, report: CheckReport | None = None) -> Path:
    """Write one PNG with a few images per class and, where a report is given, its suspects in frames."""
    return draw_sheet(data, path, () if report is None else report.suspects)


def write_suspects(data: DataSet, suspects: Sequence[Suspect], path: Path) -> None:
    """Write a row for each suspect; the column `fix` is empty, for a class name or `remove`."""
    rows: list[tuple[object, ...]] = [("path", "index", "split", "label", "proposed", "score", "reason", "fix")]
    for s in suspects:
        split, score = data[s.split], "" if s.score is None else f"{s.score:.3g}"
        image = (split.keys[s.row], split.index[s.row], s.split, data.label_text(split.labels[s.row]))
        rows.append((*image, s.proposed, score, s.reason, ""))
    write_csv(path, rows)


def _labels(data: DataSet) -> Iterator[Finding]:
    for name, split in data.splits.items():
        high = 2 if split.labels.ndim == 2 else len(data.classes)
        wrong = (split.labels < 0) | (split.labels >= high)
        rows = np.flatnonzero(wrong if wrong.ndim == 1 else wrong.any(1))
        if len(rows):
            text = f"labels of {name} outside 0..{high - 1}"
            yield Finding("label range", "error", len(rows), text, tuple(split.keys[r] for r in rows[:10].tolist()))


def _names(classes: Sequence[str]) -> Iterator[Finding]:
    alike: dict[str, list[str]] = defaultdict(list)
    for name in classes:
        plain = unicodedata.normalize("NFKC", name).casefold()
        alike["".join(c for c in plain if c.isalnum()) or plain].append(name)
    twins = [names for names in alike.values() if len(names) > 1]
    if twins:
        text = "class names that differ only in case, spaces or punctuation; probably the same class"
        yield Finding("class names", "warning", len(twins), text, tuple(" = ".join(map(repr, t)) for t in twins[:10]))
    stray = [n for n in classes if n.strip(" ._").lower() in _STRAY_NAMES or n.startswith(".") or n != n.strip()]
    if stray:
        text = "class names that look like left-over folders, or begin or end in a space"
        yield Finding("class names", "warning", len(stray), text, tuple(map(repr, stray[:10])))


def _counts(labels: NDArray[np.int64], classes: int) -> NDArray[np.int64]:
    if labels.ndim == 2:
        return labels.sum(0)
    return np.bincount(labels[(labels >= 0) & (labels < classes)], minlength=classes)


def _balance(data: DataSet) -> Iterator[Finding]:
    counts = {name: _counts(split.labels, len(data.classes)) for name, split in data.splits.items()}
    for name, count in counts.items():
        missing = np.flatnonzero(count == 0).tolist()
        if missing:
            level: Level = "error" if name == "train" else "warning"
            names = tuple(data.classes[c] for c in missing[:10])
            yield Finding("missing classes", level, len(missing), f"classes without an image in {name}", names)
    train = counts.get("train")
    if train is None or not train.any():
        return
    tiny = [c for c in np.argsort(train, kind="stable").tolist() if 0 < train[c] < TINY_CLASS]
    if tiny:
        names = tuple(f"{data.classes[c]} ({train[c]})" for c in tiny[:10])
        text = f"classes with fewer than {TINY_CLASS} training images"
        yield Finding("tiny classes", "warning", len(tiny), text, names)
    if data.unlabelled or data.numeric:
        return
    present = train[train > 0]
    ratio = float(present.max() / present.min())
    largest, smallest = int(train.argmax()), int(np.where(train > 0, train, train.max() + 1).argmin())
    ends = dict.fromkeys((largest, smallest))
    example = tuple(f"{data.classes[c]} ({train[c]})" for c in ends)
    unbalanced = ratio >= IMBALANCE
    advice = "; consider --data.sampling balanced" if unbalanced else ""
    text = f"the largest class has {ratio:.1f} times the images of the smallest{advice}"
    text = text if len(ends) > 1 else "all classes have the same number of images"
    yield Finding("class balance", "warning" if unbalanced else "note", int(train.sum()), text, example)


def _unreadable(prints: Fingerprints, bad_limit: float) -> Iterator[Finding]:
    bad = np.flatnonzero(~prints.good).tolist()
    if bad:
        share = len(bad) / len(prints.keys)
        examples = tuple(f"{prints.name(i)} ({prints.reason[i]})" for i in bad[:10])
        level: Level = "error" if share > bad_limit else "warning"
        yield Finding("unreadable", level, len(bad), f"images ({100 * share:.2f} %) cannot be read", examples)


def _oddities(prints: Fingerprints) -> Iterator[Finding]:
    good = np.flatnonzero(prints.good)
    if not len(good):
        return

    def odd(check: str, level: Level, images: NDArray[np.int64], text: str) -> Iterator[Finding]:
        if len(images):
            yield Finding(check, level, len(images), text, tuple(prints.name(i) for i in images[:10].tolist()))

    modes = Counter(prints.mode[i] for i in good.tolist())
    for mode in sorted(modes):
        kind, _, pages = mode.partition(", ")
        words = "16 bits" if kind.startswith("I;16") else _ODD_MODES.get(kind, kind if pages else None)
        words = f"{words}, {pages}, of which RGB reads the first; see data.channels" if pages else words
        if words is not None and (modes[mode] < len(good) or pages):
            stored = good[[prints.mode[i] == mode for i in good.tolist()]]
            yield from odd("colour mode", "note", stored, f"stored as {words}")
    spread = prints.thumbnail[good].max(-1).astype(np.int16) - prints.thumbnail[good].min(-1)
    grey = good[spread.reshape(len(good), -1).max(1) <= 2]
    if len(grey) <= len(good) / 2:
        yield from odd("colour mode", "note", grey, "grey images among colour")
    short, long = prints.size[good].min(1), prints.size[good].max(1)
    if np.median(short) >= 2 * SMALL_SIDE:
        small = f"images less than {SMALL_SIDE} pixels wide or high"
        yield from odd("size", "warning", good[short < SMALL_SIDE], small)
    stretched = good[long > LONG_ASPECT * short]
    yield from odd("aspect", "warning", stretched, f"images more than {LONG_ASPECT:g} times as long as wide")


def _duplicates(prints: Fingerprints, suspects: list[Suspect]) -> Iterator[Finding]:
    within: list[NDArray[np.int64]] = []
    leaks: list[NDArray[np.int64]] = []
    conflicts: list[NDArray[np.int64]] = []
    for group in copies(prints):
        (leaks if len(set(prints.split[group].tolist())) > 1 else within).append(group)
        if (prints.labels[group] != prints.labels[group[0]]).any():
            conflicts.append(group)
            suspects += [_suspect(prints, i, "same picture, other label") for i in group.tolist()]

    def found(check: str, level: Level, groups: list[NDArray[np.int64]], text: str) -> Iterator[Finding]:
        if groups:
            examples = tuple(" = ".join(prints.name(i) for i in group[:3].tolist()) for group in groups[:10])
            yield Finding(check, level, sum(len(g) - 1 for g in groups), text, examples)

    yield from found("leak", "error", leaks, "exact copies of an image in another split: metrics would be too good")
    yield from found("duplicates", "warning", within, "exact copies of an image in the same split")
    yield from found("conflicting labels", "warning", conflicts, "copies of an image that carry another label")


def _near_duplicates(prints: Fingerprints, suspects: list[Suspect]) -> Iterator[Finding]:
    pairs = near_copies(prints)
    crossing = prints.split[pairs[:, 0]] != prints.split[pairs[:, 1]]
    other = np.array([(prints.labels[a] != prints.labels[b]).any() for a, b in pairs.tolist()], bool)
    suspects += [_suspect(prints, i, "near duplicate, other label") for i in np.unique(pairs[other]).tolist()]
    for check, some, text in (
        ("near duplicates", pairs[crossing], "nearly equal pairs across splits"),
        ("near duplicates", pairs[~crossing], "nearly equal pairs"),
        ("near-duplicates with different labels", pairs[other], "nearly equal pairs whose labels differ"),
    ):
        if len(some):
            examples = tuple(f"{prints.name(a)} ~ {prints.name(b)}" for a, b in some[:10].tolist())
            yield Finding(check, "warning", len(some), text, examples)


def _suspicious(prints: Fingerprints, classes: Sequence[str], suspects: list[Suspect]) -> Iterator[Finding]:
    if (prints.labels < 0).any() or (prints.labels >= max(len(classes), 2)).any():
        return  # reported as label range; neighbours cannot vote for classes that do not exist
    odd, trust = strangers(prints, len(classes))
    if not odd or trust < TRUST:
        return
    suspects += [_suspect(prints, image, f"looks like {classes[other]}", classes[other]) for image, other in odd]
    examples = tuple(
        f"{prints.name(i)} ({classes[int(prints.labels[i])]}, looks like {classes[other]})" for i, other in odd[:10]
    )
    text = (
        f"images whose thumbnails resemble one other class only (neighbours agree with {100 * trust:.0f} % of labels)"
    )
    yield Finding("suspicious labels", "warning", len(odd), text, examples)


def _suspect(prints: Fingerprints, image: int, reason: str, proposed: str = "") -> Suspect:
    return Suspect(prints.splits[prints.split[image]], int(prints.row[image]), reason, proposed)
