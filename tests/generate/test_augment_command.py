"""Plans of images to be made, following them through interruptions, and the data set that is left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from vitrail.cli import run
from vitrail.data.open import open_data
from vitrail.generate import job as following
from vitrail.generate.job import Plan, make_plan
from vitrail.generate.run import augment, failure_loop
from vitrail.model.build import create_model
from vitrail.model.trunks.denoiser import equal_noise

CLASSES = ("ant", "bee", "cat", "dog")
LABELS = np.array([0] * 6 + [1] * 4 + [2] * 3 + [3] * 1)
SMALL = {"width": 8, "multipliers": (1, 2), "depth": 1, "heads": 2, "image_size": 8}


# Plans


def test_every_source_is_of_another_class_and_every_own_image_of_the_target() -> None:
    for policy in ("all", "random"):
        plan = make_plan(LABELS, CLASSES, each=9, policy=policy)  # type: ignore[arg-type]
        assert (LABELS[plan.source] != plan.target).all()
        assert (LABELS[plan.own] == plan.target).all()
        assert plan.counts(4).tolist() == [9] * 4


def test_all_others_take_turns() -> None:
    plan = make_plan(LABELS, CLASSES, each=9)
    for target in range(4):
        kinds = LABELS[plan.source[plan.target == target]]
        assert np.bincount(kinds, minlength=4).tolist() == [0 if c == target else 3 for c in range(4)]


def test_counts_are_filled_up_and_rich_classes_left_alone() -> None:
    assert make_plan(LABELS, CLASSES, up_to=5).counts(4).tolist() == [0, 1, 2, 4]
    assert make_plan(LABELS, CLASSES, each=2, below=4).counts(4).tolist() == [0, 0, 2, 2]
    assert make_plan(LABELS, CLASSES, each=2, only=[1]).counts(4).tolist() == [0, 2, 0, 0]


def test_confused_classes_are_those_mixed_up_in_either_direction() -> None:
    confusion = np.diag([9, 9, 9, 9])
    confusion[0, 2], confusion[3, 0], confusion[0, 1] = 5, 4, 1
    plan = make_plan(LABELS, CLASSES, each=8, only=[0], policy="confused", confusion=confusion, top=2)
    assert sorted(set(LABELS[plan.source].tolist())) == [2, 3]


def test_a_plan_follows_from_its_seed_and_longer_ones_begin_with_shorter() -> None:
    short, long = (make_plan(LABELS, CLASSES, each=n, only=[2], seed=3) for n in (4, 9))
    for name in ("source", "own", "target", "seeds"):
        assert getattr(long, name)[:4].tolist() == getattr(short, name).tolist()
    assert make_plan(LABELS, CLASSES, each=4, only=[2], seed=4).seeds.tolist() != short.seeds.tolist()
    assert len(set(long.seeds.tolist())) == 9
    again = Plan.from_json(json.loads(json.dumps(long.to_json())))
    assert again.to_json() == long.to_json()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "say how many images"),
        ({"each": 0}, "each is a number of images"),
        ({"up_to": 1}, "the plan is empty"),
        ({"each": 1, "policy": "confused"}, "needs a confusion matrix of 4 classes"),
        ({"each": 1, "policy": "best"}, "no policy 'best'"),
    ],
)
def test_impossible_plans_are_one_sentence(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make_plan(LABELS, CLASSES, **changes)


def test_a_class_without_images_cannot_be_made() -> None:
    with pytest.raises(ValueError, match="class dog has no training image"):
        make_plan(LABELS[:-1], CLASSES, each=1)


# Following them


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, generator = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for split, count in (("train", 5), ("val", 2), ("test", 2)):
        for name in ("blue", "green", "red"):
            (folder / split / name).mkdir(parents=True)
            for i in range(count):
                pixels = generator.integers(0, 256, (8, 8, 3), dtype=np.uint8)
                pixels[..., ("red", "green", "blue").index(name)] |= 128
                Image.fromarray(pixels).save(folder / split / name / f"{i}.png")
    return folder


@pytest.fixture(scope="module")
def denoiser(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = create_model("denoiser_32", classes=["blue", "green", "red"], **SMALL)
    return model.save(tmp_path_factory.mktemp("denoiser"))


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_what_is_left_is_a_data_set_with_real_and_made_images(photos: Path, denoiser: Path, tmp_path: Path) -> None:
    made = augment(photos, tmp_path / "out", model=denoiser, each=4, batch=5, device="cpu", quiet=True)
    assert (made.made, made.new) == (12, 12)
    data = open_data(made.table)
    assert {name: len(split) for name, split in data.splits.items()} == {"train": 27, "val": 6, "test": 6}
    train = data["train"]
    assert train.generated is not None
    assert int(train.generated.sum()) == 12
    assert data["test"].generated is None or not data["test"].generated.any()
    rows = [json.loads(line) for line in (tmp_path / "out" / "manifest.jsonl").read_text().splitlines()]
    assert [row["number"] for row in rows] == list(range(12))
    assert all(row["source_class"] != row["target"] and row["r"] == 0.8 for row in rows)
    originals = open_data(photos)["test"]
    for i in range(6):
        assert np.array_equal(np.asarray(data["test"].read(i)), np.asarray(originals.read(i)))


def test_an_interrupted_generation_goes_on_to_the_same_files(
    photos: Path, denoiser: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"model": denoiser, "each": 4, "batch": 5, "device": "cpu", "quiet": True}
    augment(photos, tmp_path / "whole", **options)
    write, count = following._write, [0]

    def killed(*given: Any) -> None:
        count[0] += 1
        if count[0] == 7:  # in the middle of the second batch
            raise KeyboardInterrupt
        write(*given)

    monkeypatch.setattr(following, "_write", killed)
    with pytest.raises(KeyboardInterrupt):
        augment(photos, tmp_path / "torn", **options)
    monkeypatch.setattr(following, "_write", write)
    again = augment(photos, tmp_path / "torn", **options)
    assert again.new == 6
    assert files(tmp_path / "torn") == files(tmp_path / "whole")
    assert augment(photos, tmp_path / "torn", **options).new == 0


def test_the_most_adaptive_r_is_noted_for_every_image(photos: Path, denoiser: Path, tmp_path: Path) -> None:
    judge = create_model("cifar_resnet20", classes=["blue", "green", "red"])
    options: dict[str, Any] = {"each": 2, "candidates": (0.3, 0.6, 0.9), "device": "cpu", "quiet": True}
    made = augment(photos, tmp_path / "out", method="genie_ada", model=denoiser, judge=judge, **options)
    rows = [json.loads(line) for line in (made.folder / "manifest.jsonl").read_text().splitlines()]
    assert {round(row["r"], 3) for row in rows} <= {0.6, 0.9}


def test_r_may_be_stated_on_stable_diffusions_schedule(photos: Path, denoiser: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"model": denoiser, "each": 1, "device": "cpu", "quiet": True}
    made = augment(photos, tmp_path / "stated", r=0.8, r_schedule="scaled_linear", **options)
    time = equal_noise(0.8, "scaled_linear", "cosine")
    own = augment(photos, tmp_path / "own", r=time, **options)
    rows = [[json.loads(line) for line in (m.folder / "manifest.jsonl").read_text().splitlines()] for m in (made, own)]
    assert all((row["r"], row["r_schedule"]) == (0.8, "scaled_linear") for row in rows[0])
    assert all(row["r"] == time and "r_schedule" not in row for row in rows[1])  # as before
    assert [row["evaluations"] for row in rows[0]] == [row["evaluations"] for row in rows[1]]
    for number in range(made.made):
        pixels = [np.asarray(Image.open(following.image_path(m.folder, number))) for m in (made, own)]
        assert np.array_equal(*pixels)
    with pytest.raises(ValueError, match="another plan"):
        augment(photos, tmp_path / "stated", r=0.8, **options)
    with pytest.raises(ValueError, match="adds no noise"):
        augment(photos, tmp_path / "weak", method="weak", each=1, r_schedule="scaled_linear", quiet=True)


def test_an_image_made_of_its_own_class_names_that_class(photos: Path, tmp_path: Path) -> None:
    made = augment(photos, tmp_path / "out", method="weak", each=2, real=False, device="cpu", quiet=True)
    rows = [json.loads(line) for line in (made.folder / "manifest.jsonl").read_text().splitlines()]
    train = open_data(photos)
    assert all(row["source_class"] == row["target"] for row in rows)
    assert all(train.classes[train["train"].labels[row["source"]]] == row["target"] for row in rows)


def test_classic_methods_need_no_model_and_keep_their_mixture(photos: Path, tmp_path: Path) -> None:
    made = augment(photos, tmp_path / "out", method="mixup", each=2, real=False, device="cpu", quiet=True)
    rows = [json.loads(line) for line in (made.folder / "manifest.jsonl").read_text().splitlines()]
    assert all(abs(sum(row["classes"].values()) - 1) < 1e-5 for row in rows if "classes" in row)
    assert not (made.folder / "real").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--each 1", "needs a model that makes images"),
        ("--each 1 --method geenie", "did you mean 'genie'"),
        ("--each 1 --method genie_ada --model x", "needs a trained classifier; name one with --judge"),
        ("--each 1 --method weak --only purple", "no class 'purple'"),
        ("--method weak", "say how many images"),
        ("--each 1 --model nowhere", "nowhere"),
    ],
)
def test_what_cannot_be_done_is_one_sentence(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: str, said: str
) -> None:
    assert run(["augment", str(photos), str(tmp_path / "out"), "--device", "cpu", *words.split()]) == 2
    told = capsys.readouterr().err.strip().splitlines()
    assert len(told) == 1
    assert said in told[0]
    assert not (tmp_path / "out").exists()


def test_another_plan_in_the_folder_is_refused(photos: Path, tmp_path: Path) -> None:
    augment(photos, tmp_path / "out", method="weak", each=1, device="cpu", quiet=True)
    with pytest.raises(ValueError, match="holds images of another plan"):
        augment(photos, tmp_path / "out", method="weak", each=2, device="cpu", quiet=True)


@pytest.mark.slow
def test_the_loop_makes_images_for_the_worst_class_and_compares(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = f"--data {photos} --model.name cifar_resnet20 --data.batch 4 --optim.steps 2 --engine.device cpu"
    first = tmp_path / "first"
    assert run(["train", "small-rsb", *flags.split(), "--out", str(first), "--data.workers", "0"]) == 0
    words = [
        "augment",
        str(first),
        str(tmp_path / "loop"),
        "--loop",
        "--method",
        "strong",
        "--each",
        "3",
        "--worst",
        "1",
    ]
    assert run([*words, "--device", "cpu", "--json"]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["made"] == 3
    assert sum(found["made"] > 0 for found in told["classes"].values()) == 1
    assert Path(told["comparison"]).is_file()
    made, again, _ = failure_loop(first, tmp_path / "loop", method="strong", each=3, worst=1, device="cpu", quiet=True)
    assert made.new == 0
    assert (again / "model").is_dir()


def test_photographs_of_many_sizes_are_cut_to_a_usual_square(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for name in ("a", "b"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for i in range(12):
            shape = (*rng.integers(30, 60, 2), 3)
            Image.fromarray(rng.integers(0, 256, shape, dtype=np.uint8)).save(tmp_path / "photos" / name / f"{i}.png")
    made = augment(tmp_path / "photos", tmp_path / "out", method="mixup", each=2, device="cpu", quiet=True)
    sides = {Image.open(path).size for path in (made.folder / "made").glob("*.png")}
    ((width, height),) = sides
    assert width == height
    assert 30 <= width < 60
