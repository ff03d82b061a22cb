"""`check_data` finds each planted fault, and nothing in clean data."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hostile import make_hostile
from PIL import Image

from vitrail.data.check import contact_sheet
from vitrail.data.check.check import CheckReport, Finding, check_data, picture_sheet
from vitrail.data.check.contact_sheet import ALARM, TILE, Suspect
from vitrail.data.check.duplicates import (
    NEAR_BITS,
    NEAR_LEVELS,
    Fingerprints,
    copies,
    near_copies,
    strangers,
    take_fingerprints,
)
from vitrail.data.dataset import DataSet, Split
from vitrail.data.open import open_data


def scene(seed: int, size: tuple[int, int] = (48, 40)) -> Image.Image:
    """A smooth random colour picture, unlike any other."""
    coarse = np.random.default_rng(seed).integers(0, 256, (6, 6, 3), np.uint8)
    return Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC)


def clean(root: Path, counts: dict[str, int]) -> Path:
    seed = 0
    for name, count in counts.items():
        (root / name).mkdir(parents=True, exist_ok=True)
        for i in range(count):
            seed += 1
            scene(seed).save(root / name / f"{i}.png")
    return root


def named(report: CheckReport, check: str) -> list[Finding]:
    return [finding for finding in report.findings if finding.check == check]


def test_clean_data_is_ok(tmp_path):
    report = check_data(open_data(clean(tmp_path, {"a": 20, "b": 20})))
    assert report.severity == "ok"
    assert report.exit_code(strict=True) == 0
    assert [finding.level for finding in report.findings] == ["note"]


def test_a_copy_across_splits_is_an_error_and_within_one_a_warning(tmp_path):
    clean(tmp_path / "train", {"a": 15, "b": 15})
    for name in "ab":
        (tmp_path / "val" / name).mkdir(parents=True)
        for i in range(12):
            scene(1000 + i + 100 * (name == "b")).save(tmp_path / "val" / name / f"{i}.png")
    train = open_data(tmp_path)
    assert check_data(train).exit_code() == 0
    scene(1000).save(tmp_path / "train/a/other_format.bmp")  # the same pixels in another file format
    scene(1).save(tmp_path / "train/a/again.png")
    report = check_data(open_data(tmp_path))
    (leak,), (twice,) = named(report, "leak"), named(report, "duplicates")
    assert (leak.level, leak.count, twice.level, twice.count) == ("error", 1, "warning", 1)
    assert "val: val/a/0.png" in leak.examples[0]
    assert "other_format.bmp" in leak.examples[0]
    assert (report.severity, report.exit_code()) == ("errors", 2)


def test_copies_with_another_label_conflict(tmp_path):
    clean(tmp_path, {"a": 20, "b": 20})
    scene(1).save(tmp_path / "b/a_in_b.png")
    report = check_data(open_data(tmp_path, val_fraction=0, test_fraction=0))
    assert named(report, "conflicting labels")[0].count == 1
    assert {s.reason for s in report.suspects} == {"same picture, other label"}


def test_a_recompressed_and_a_resized_copy_are_near_duplicates(tmp_path):
    clean(tmp_path, {"a": 20, "b": 20})
    scene(1).save(tmp_path / "a/jpeg.jpg", quality=80)
    scene(2).resize((96, 80), Image.Resampling.BICUBIC).save(tmp_path / "a/large.png")
    (near,) = named(check_data(open_data(tmp_path, val_fraction=0, test_fraction=0)), "near duplicates")
    assert near.level == "warning"
    assert near.count == 2
    assert {"train: a/0.png ~ train: a/jpeg.jpg", "train: a/1.png ~ train: a/large.png"} == set(near.examples)


def test_near_duplicates_with_another_label_are_suspects(tmp_path):
    clean(tmp_path, {"a": 20, "b": 20})
    scene(1).save(tmp_path / "b/a_in_b.jpg", quality=80)
    scene(2).save(tmp_path / "a/same_label.jpg", quality=80)
    data = open_data(tmp_path, val_fraction=0, test_fraction=0)
    report = check_data(data)
    (finding,) = named(report, "near-duplicates with different labels")
    assert (finding.level, finding.count) == ("warning", 1)
    assert finding.examples == ("train: a/0.png ~ train: b/a_in_b.jpg",)
    suspects = {data["train"].keys[s.row] for s in report.suspects if s.reason == "near duplicate, other label"}
    assert suspects == {"a/0.png", "b/a_in_b.jpg"}


def test_unreadable_images_are_an_error_beyond_the_limit(tmp_path):
    expected = make_hostile(tmp_path / "a")
    clean(tmp_path, {"b": 40})
    bad = sum(isinstance(reason, str) for reason in expected.values()) - 2  # a folder and a missing file are not listed
    data = open_data(tmp_path)
    (finding,) = named(check_data(data), "unreadable")
    assert (finding.count, finding.level) == (bad, "error")
    assert named(check_data(data, bad_limit=0.9), "unreadable")[0].level == "warning"
    kinds = {f.text for f in named(check_data(data), "colour mode")}
    assert {"stored as CMYK", "stored as 16 bits", "stored as 1 bit", "grey images among colour"} <= kinds


def test_odd_sizes_are_named(tmp_path):
    clean(tmp_path, {"a": 20, "b": 20})
    scene(900, (8, 8)).save(tmp_path / "a/small.png")
    scene(901, (300, 40)).save(tmp_path / "b/long.png")
    report = check_data(open_data(tmp_path, val_fraction=0, test_fraction=0))
    assert named(report, "size")[0].examples == ("train: a/small.png",)
    assert named(report, "aspect")[0].examples == ("train: b/long.png",)


def test_balance_tiny_and_missing_classes(tmp_path):
    clean(tmp_path / "train", {"a": 60, "b": 5, "c": 12})
    clean(tmp_path / "val", {"a": 2, "b": 2})
    report = check_data(open_data(tmp_path))
    assert named(report, "tiny classes")[0].examples == ("b (5)",)
    (balance,) = named(report, "class balance")
    assert "12.0 times" in balance.text
    assert balance.level == "warning"
    (missing,) = named(report, "missing classes")
    assert (missing.level, missing.examples) == ("warning", ("c",))


def test_classes_of_one_size_are_said_to_be_so(tmp_path):
    report = check_data(open_data(clean(tmp_path, {"a": 12, "b": 12}), val_fraction=0, test_fraction=0))
    (balance,) = named(report, "class balance")
    assert (balance.level, balance.count, balance.examples) == ("note", 24, ("a (12)",))
    assert balance.text == "all classes have the same number of images"


def test_names_that_are_nearly_equal_or_left_over_are_suspicious(tmp_path):
    folders = ["Red fox", "red_fox", "wolf", "Thumbs", "lynx"]
    report = check_data(open_data(clean(tmp_path, dict.fromkeys(folders, 12)), val_fraction=0, test_fraction=0))
    twins, stray = named(report, "class names")
    assert twins.examples == ("'Red fox' = 'red_fox'",)
    assert stray.examples == ("'Thumbs'",)


def test_labels_out_of_range_are_an_error():
    split = Split("train", scene, np.arange(30), [str(i) for i in range(30)], np.arange(30) % 3)
    report = check_data(DataSet("made", ("a", "b"), {"train": split}))
    (finding,) = named(report, "label range")
    assert (finding.level, finding.count) == ("error", 10)


def test_an_image_among_strangers_is_suspicious():
    rng = np.random.default_rng(0)
    prototypes = rng.integers(0, 256, (2, 8, 8, 3))
    labels = np.arange(80) % 2
    pictures = np.clip(prototypes[labels] + rng.normal(0, 20, (80, 8, 8, 3)), 0, 255).astype(np.uint8)
    labels[6] = 1  # it looks like class 0
    split = Split("train", lambda i: Image.fromarray(pictures[i]), np.arange(80), [str(i) for i in range(80)], labels)
    report = check_data(DataSet("made", ("zero", "one"), {"train": split}))
    (finding,) = named(report, "suspicious labels")
    assert finding.examples == ("train: 6 (one, looks like zero)",)
    assert [(s.split, s.row) for s in report.suspects] == [("train", 6)]


def test_neighbours_accuse_nobody_where_thumbnails_say_nothing():
    assert named(check_data(open_data("synthetic:shapes?n=400")), "suspicious labels") == []


def random_prints(n: int, seed: int) -> Fingerprints:
    rng = np.random.default_rng(seed)
    centres = rng.integers(0, 2**63, 8).astype(np.uint64)
    outline = centres[rng.integers(0, 8, n)]
    for _ in range(2):  # up to two bits away from a centre
        outline = outline ^ (np.uint64(1) << rng.integers(0, 64, n).astype(np.uint64))
    return Fingerprints(
        splits=("train",),
        split=np.zeros(n, np.int64),
        row=np.arange(n),
        keys=[str(i) for i in range(n)],
        labels=rng.integers(0, 3, n),
        reason=["" if i % 7 else "truncated" for i in range(n)],
        mode=[""] * n,
        size=np.ones((n, 2), np.int64),
        digest=rng.integers(0, n, n).astype(np.uint64),
        outline=outline,
        thumbnail=(128 + rng.integers(-9, 10, (n, 16, 16, 3)) * rng.integers(0, 2, (n, 1, 1, 1))).astype(np.uint8),
    )


@pytest.mark.parametrize("seed", [0, 1])
def test_copies_and_near_copies_equal_comparing_all_pairs(seed):
    prints = random_prints(150, seed)
    good = [i for i in range(150) if not prints.reason[i]]
    by_digest: dict[int, list[int]] = {}
    for i in good:
        by_digest.setdefault(int(prints.digest[i]), []).append(i)
    assert [g.tolist() for g in copies(prints)] == [g for g in by_digest.values() if len(g) > 1]

    first_of_each = sorted(group[0] for group in by_digest.values())
    wanted = []
    for n, i in enumerate(first_of_each):
        for j in first_of_each[n + 1 :]:
            bits = bin(int(prints.outline[i]) ^ int(prints.outline[j])).count("1")
            levels = np.abs(prints.thumbnail[i].astype(float) - prints.thumbnail[j]).mean()
            if bits <= NEAR_BITS and levels <= NEAR_LEVELS:
                wanted.append([i, j])
    assert wanted
    assert near_copies(prints).tolist() == wanted


def test_strangers_equal_scikit_learn_neighbours():
    from sklearn.neighbors import NearestNeighbors

    data = open_data("embedded:fashion", val_fraction=0, limit=400)
    prints = take_fingerprints(DataSet(data.uri, data.classes, {"train": data["train"]}))
    small = prints.thumbnail.astype(float).reshape(400, 8, 2, 8, 2, 3).mean((2, 4)).reshape(400, -1)
    small -= small.mean(1, keepdims=True)
    small /= np.linalg.norm(small, axis=1, keepdims=True)
    nearest = NearestNeighbors(n_neighbors=11).fit(small).kneighbors(small)[1][:, 1:]
    votes = prints.labels[nearest]
    wanted = [(i, int(votes[i, 0])) for i in range(400) if len(set(votes[i])) == 1 and votes[i, 0] != prints.labels[i]]
    assert wanted
    assert strangers(prints, 10)[0] == wanted


def test_a_report_is_json_and_rows():
    report = check_data(open_data("synthetic:shapes?n=60"))
    stored = json.loads(json.dumps(report.to_json()))
    assert stored["severity"] == report.severity
    assert stored["images"] == {"train": 48, "val": 6, "test": 6}
    assert len(report.rows()) == len(report.findings)
    levels = [row[0] for row in report.rows()]
    assert levels == sorted(levels, key=("error", "warning", "note").index)
    assert all(isinstance(cell, str) for row in report.rows() for cell in row)


def test_exit_codes_follow_severity():
    def report(*levels):
        return CheckReport("x", {}, 2, tuple(Finding("c", level, 1, "t") for level in levels))

    assert [report(*levels).exit_code() for levels in ((), ("note",), ("warning",), ("warning", "error"))] == [
        0,
        0,
        0,
        2,
    ]
    assert [report(*levels).exit_code(strict=True) for levels in ((), ("note",), ("warning",), ("error",))] == [
        0,
        0,
        1,
        2,
    ]


def test_the_sheet_names_given_and_proposed_label(tmp_path, monkeypatch):
    data = open_data(clean(tmp_path / "data", {"a": 12, "b": 12}), val_fraction=0, test_fraction=0)
    fit, texts = contact_sheet._fit, []
    monkeypatch.setattr(contact_sheet, "_fit", lambda pen, text, *how: texts.append(text) or fit(pen, text, *how))
    suspects = (Suspect("train", 0, "probably mislabelled", "b", 0.1), Suspect("train", 1, "unlike all others"))
    picture_sheet(data, tmp_path / "sheet.png", CheckReport("x", {}, 2, (), suspects))
    assert texts[2:] == ["a: 0.png", "proposed: b", "a: 1.png", "unlike all others"]


def test_the_sheet_says_that_it_shows_a_sample(tmp_path, monkeypatch):
    data = open_data(clean(tmp_path / "data", {"a": 12, "b": 5}), val_fraction=0, test_fraction=0)
    draw, texts = contact_sheet.ImageDraw.ImageDraw.text, []
    monkeypatch.setattr(
        contact_sheet.ImageDraw.ImageDraw,
        "text",
        lambda pen, at, text, *how, **more: texts.append(text) or draw(pen, at, text, *how, **more),
    )
    picture_sheet(data, tmp_path / "sheet.png")
    assert texts == ["a", "a sample of 8 of 12\nin train", "b", "all 5\nin train"]


def test_the_sheet_frames_suspects_and_only_them(tmp_path):
    data = open_data(clean(tmp_path / "data", {"a": 12, "猫 & <b>": 12}), val_fraction=0, test_fraction=0)

    def red(path: Path) -> int:
        return int((np.asarray(Image.open(path)) == ALARM).all(-1).sum())

    assert red(picture_sheet(data, tmp_path / "plain.png")) == 0
    frame = TILE**2 - (TILE - 8) ** 2
    report = CheckReport("x", {}, 2, (), (Suspect("train", 1, "looks like b"),))
    sheet = picture_sheet(data, tmp_path / "deep/framed.png", report)
    assert red(sheet) >= 2 * frame  # once among its class, once below
    assert [p.name for p in sheet.parent.iterdir()] == ["framed.png"]


def test_the_sheet_shows_unreadable_images_as_such(tmp_path):
    clean(tmp_path / "data", {"a": 12, "b": 12})
    (tmp_path / "data/a/0.png").write_bytes(b"")
    data = open_data(tmp_path / "data", val_fraction=0, test_fraction=0)
    assert picture_sheet(data, tmp_path / "sheet.png").is_file()


def test_multilabel_data_are_checked_too(tmp_path):
    for i in range(30):
        scene(i).save(tmp_path / f"{i}.png")
    rows = "".join(f"{i}.png,{['x', 'x|y', 'y|z'][i % 3]}\n" for i in range(30))
    (tmp_path / "t.csv").write_text(f"path,label\n{rows}")
    data = open_data(tmp_path / "t.csv")
    report = check_data(data)
    assert report.severity in ("ok", "warnings")
    assert picture_sheet(data, tmp_path / "sheet.png", report).is_file()


def test_the_report_says_how_much_there_is_what_was_ignored_and_how_many_more(tmp_path):
    clean(tmp_path, {"a": 12, "b": 12})
    (tmp_path / "empty").mkdir()
    for number in range(5):
        (tmp_path / "a" / f"broken{number}.jpg").write_bytes(b"\xff\xd8junk")
    report = check_data(open_data(tmp_path, val_fraction=0, test_fraction=0))
    assert report.summary == "29 images, 2 classes: 29 train"
    assert "ignored folders without images: empty" in report.notes
    cells = {row[1].partition(":")[0]: row[2:] for row in report.rows()}
    assert cells["unreadable"][0] == "5"
    assert cells["unreadable"][1].endswith(", and 2 more")
