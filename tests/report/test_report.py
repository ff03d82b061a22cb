"""The report holds every part, escapes everything, needs nothing from outside."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import io
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vitrail.measure.classification import classification
from vitrail.measure.evaluator import Mistake
from vitrail.report.html import AttentionPicture, DataSummary, ErrorPicture, ModelCost, Report, render, write_report
from vitrail.report.sheets import data_uri

VOID = {"meta", "img", "br", "link", "input", "hr"}
HOSTILE = ["<b>bold</b>", 'quo"te', "</script><script>alert(1)</script>", "🪑 émoji & co", "x" * 60, "{{ 7 * 7 }}"]
SECTIONS = {
    "history": ("training curves", "Training curves"),
    "errors": ("most confident errors", "Most confident errors"),
    "attention": ("attention maps", "Attention maps"),
    "cost": ("cost", "Cost"),
    "data": ("data", "Data"),
    "config": ("configuration", "Configuration"),
}
OF_FIGURES = {
    "confusion matrix": "Confusion matrix",
    "per-class metrics": "Per-class metrics",
    "calibration": "Calibration",
}


class Page(HTMLParser):
    """Checks that tags are balanced and collects headings, tags and text."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.headings: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "h2":
            self.headings.append(data)
        if not self.open or self.open[-1] not in ("style", "script"):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def test_a_class_without_images_has_no_recall_on_the_page_and_is_left_out_of_averages() -> None:
    scores, target = torch.eye(3), torch.tensor([0, 0, 1])
    figures = classification(scores, target, ["cat", "dog", "boxer"])  # boxer is predicted once
    text = Page(render(Report("t", figures=figures))).text
    assert "1 of 3 classes have no images here; macro averages are over the 2 present" in text
    assert "boxer 0 0.0 % no images" in text


def picture(side: int = 28) -> np.ndarray:
    return np.random.default_rng(side).integers(0, 255, (side, side, 3), dtype=np.uint8)


def sample(classes: list[str], multilabel: bool = False, count: int = 60) -> Report:
    generator = torch.Generator().manual_seed(0)
    target = torch.randint(len(classes), (count,), generator=generator)
    logits = torch.randn(count, len(classes), generator=generator)
    logits[torch.arange(count), target] += 1.5
    if multilabel:
        target = (torch.rand(count, len(classes), generator=generator) < 0.4).long()
    history = []
    for epoch in range(1, 5):
        history.append({"step": 10 * epoch, "epoch": epoch - 0.5, "split": "train", "loss": 1 / epoch, "lr": 0.001})
        quality = {"map": 0.2 * epoch} if multilabel else {"top1": 0.2 * epoch, "top5": 0.9, "ece": 0.1}
        history.append({"step": 20 * epoch, "epoch": float(epoch), "split": "val", "loss": 1.2 / epoch, **quality})
    history[2]["loss"] = None
    mistake = Mistake(7, (0,), 1, 0.91, 0.04)
    return Report(
        title="deit_tiny on embedded:fashion",
        figures=classification(logits, target, classes),
        history=history,
        cost=ModelCost(5_526_346, 1.08e9, 1843.2, 412 * 2**20, 725, "batch 128", [("training speed", "912 images/s")]),
        errors=[ErrorPicture.of(mistake, classes, picture(), "test/7.png")],
        attention=[AttentionPicture(picture(120), Image.fromarray(picture(120)), "Trouser", 0.29, "Dress", True)],
        data=DataSummary(
            "embedded:fashion",
            classes,
            {"train": [9] * len(classes), "val": [3] * len(classes)},
            notes=["val was held out from train"],
            skipped=[(f"bad/{i}.jpg", "truncated") for i in range(60)],
        ),
        config="model:\n  name: deit_tiny\n",
        environment={"torch": "2.15.0", "hardware": {"cpu": "two cores"}},
        command="vitrail train",
        created="2026-01-02",
    )


CLASSES = ["coat", "bag", "shirt"]


@pytest.mark.parametrize("multilabel", [False, True])
def test_a_full_report_has_every_section_and_balanced_tags(multilabel: bool) -> None:
    text = render(sample(CLASSES, multilabel))
    page = Page(text)
    expected = [heading for _, heading in SECTIONS.values()] + ["Per-class metrics", "Environment"]
    expected += [] if multilabel else ["Confusion matrix", "Calibration"]
    assert sorted(page.headings) == sorted(expected)
    for said in ("5.53 M", "1.08 G", "412 MiB", "12 min 5 s", "912 images/s", "two cores", "vitrail train"):
        assert said in page.text
    assert "name: deit_tiny" in text
    assert "val was held out from train" in page.text
    assert "and 10 more" in page.text
    assert ("test mAP" if multilabel else "test top-1") in page.text


def test_headline_figures_are_those_measured() -> None:
    report = sample(CLASSES)
    page = Page(render(report))
    scalars = report.figures.scalars()  # type: ignore[union-attr]
    low, high = (f"{100 * scalars[k]:.1f}" for k in ("top1_low", "top1_high"))
    assert f"{100 * scalars['top1']:.1f} %" in page.text
    assert f"95 %: {low} to {high}" in page.text


@pytest.mark.parametrize("part", SECTIONS)
def test_an_absent_part_is_left_out_and_named(part: str) -> None:
    field = next(f for f in dataclasses.fields(Report) if f.name == part)
    empty = field.default if field.default is not dataclasses.MISSING else field.default_factory()  # type: ignore[misc]
    name, heading = SECTIONS[part]
    page = Page(render(dataclasses.replace(sample(CLASSES), **{part: empty})))
    assert heading not in page.headings
    assert name in page.text.split("Left out, because this run has none:")[1]


def test_a_report_without_figures_keeps_the_rest() -> None:
    page = Page(render(dataclasses.replace(sample(CLASSES), figures=None)))
    assert not set(OF_FIGURES.values()) & set(page.headings)
    assert "Training curves" in page.headings
    assert "not been tested" in page.text


def test_a_report_of_nothing_is_still_a_page() -> None:
    page = Page(render(Report("empty")))
    assert page.headings == []
    assert "confusion matrix" in page.text


@pytest.mark.parametrize("multilabel", [False, True])
def test_hostile_class_names_are_shown_as_text(multilabel: bool) -> None:
    plain = Page(render(sample([f"c{i}" for i in range(len(HOSTILE))], multilabel)))
    page = Page(render(dataclasses.replace(sample(HOSTILE, multilabel), title=HOSTILE[2], config=HOSTILE[0])))
    for name in HOSTILE:
        assert " ".join(name.split()) in page.text
    for tag in ("script", "b", "style"):
        count = [t for t, _ in page.tags].count(tag)
        assert count == [t for t, _ in plain.tags].count(tag)
    assert "49" not in [w.strip() for w in page.words]


@pytest.mark.parametrize("classes", [2, 10, 100])
def test_nothing_is_fetched_from_outside_and_the_page_stays_small(classes: int) -> None:
    text = render(sample([f"class {i}" for i in range(classes)], count=400))
    page = Page(text)
    assert "http://" not in text
    assert "https://" not in text
    assert "url(" not in text
    assert "@import" not in text
    for tag, attributes in page.tags:
        source = attributes.get("src") or attributes.get("href") or ""
        assert not source or source.startswith("data:image/" if tag == "img" else "#")
        assert tag not in ("link", "iframe", "object", "embed")
    assert len(text) < 1_500_000


def test_every_link_of_the_menu_leads_to_a_section() -> None:
    page = Page(render(sample(CLASSES)))
    ids = {a["id"] for t, a in page.tags if t == "section"}
    assert {a["href"][1:] for t, a in page.tags if t == "a" and a.get("href")} == ids


def test_every_picture_and_chart_has_words() -> None:
    page = Page(render(sample(CLASSES)))
    assert all(a.get("alt") for t, a in page.tags if t == "img")
    assert all(a.get("aria-label") or a.get("aria-hidden") for t, a in page.tags if t == "svg")


@pytest.mark.parametrize(("truth", "missed"), [((0, 1), True), ((0,), False)])
def test_a_multi_label_error_says_whether_a_label_was_missed(truth: tuple[int, ...], missed: bool) -> None:
    made = ErrorPicture.of(Mistake(3, truth, 1, 0.1, 0.1), CLASSES, picture())
    assert made.missed is missed
    page = Page(render(dataclasses.replace(sample(CLASSES, True), errors=[made])))
    assert ("missed bag" in page.text) is missed


def test_writing_replaces_the_file_in_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.html"
    write_report(path, Report("first"))
    assert "first" in path.read_text(encoding="utf-8")

    def fails(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("vitrail.files.os.fsync", fails)
    with pytest.raises(OSError, match="disk full"):
        write_report(path, Report("second"))
    assert "first" in path.read_text(encoding="utf-8")
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]


@pytest.mark.parametrize(("side", "kind"), [(28, "png"), (400, "jpeg")])
def test_thumbnails_are_small_and_tiny_images_are_exact(side: int, kind: str) -> None:
    uri = data_uri(picture(side), 160)
    match = re.fullmatch(rf"data:image/{kind};base64,(.*)", uri)
    assert match
    image = Image.open(io.BytesIO(base64.b64decode(match[1])))
    assert max(image.size) == min(side, 160)
    if side == 28:
        np.testing.assert_array_equal(np.asarray(image), picture(28))


def test_no_script_but_the_pages_own_may_run() -> None:
    """Its content security policy names the script by its hash, so that one that came with a name would not run."""
    page = render(Report("<script>alert(1)</script>", config="<script>alert(2)</script>"))
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(scripts[0].encode()).digest()).decode()
    assert len(scripts) == 1
    assert f"script-src 'sha256-{digest}'" in page
    assert "script-src 'unsafe-inline'" not in page


def test_every_attention_map_has_its_true_class() -> None:
    pair = (np.zeros((8, 8, 3), np.uint8),) * 2
    page = render(Report("t", attention=[AttentionPicture(*pair, "Sandal", 0.29, "T-shirt/top", True)]))
    caption = page.split("<figcaption>")[1].split("</figcaption>")[0]
    assert re.findall(r"<span>([^<]+)</span>", caption) == ["Sandal", "29 %", "is T-shirt/top"]
    assert 'class="said"' in caption  # as errors are
