"""Published weights on stand-ins of ImageNet, ImageNet-V2 and reassessed labels; nothing is fetched."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from small import shake
from torch import nn

from vitrail.cli import run
from vitrail.measure.classification import reassessed_top1
from vitrail.model.config import TrunkConfig
from vitrail.model.heads import config as heads
from vitrail.model.weights import checkpoint_of, published_classifier
from vitrail.model.zoo import ZOO, Spec
from vitrail.run.evaluate import _with_classes_of
from vitrail.run.published import PAPERS, PublishedAccuracy, published_figures
from vitrail.run.run_data import open_whole

IDS = timm.data.ImageNetInfo("imagenet-1k").label_names()
NAME, CHECKPOINT = "test_vit", "test_vit.r160_in1k"  # 160 px, 0.4 M parameters, 1,000 classes
TRUNK = TrunkConfig(width=64, depth=6, heads=2, mlp_ratio=3, image_size=160)
FAST = ("--device", "cpu", "--workers", "0", "--batch", "64")


@pytest.fixture(scope="module")
def theirs() -> nn.Module:
    model = timm.create_model(NAME).eval()
    shake(model)
    for name, parameter in model.named_parameters():  # so that predictions depend on images
        if name in ("pos_embed", "cls_token") or name.endswith("bias"):
            parameter.data.zero_()
    return model


@pytest.fixture(scope="module")
def file(theirs: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "test_vit.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in theirs.state_dict().items()}, path)
    return path


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(ZOO, "vit_test", Spec(TRUNK, heads.ClassToken(), "of this test", timm=NAME))
    return "vit_test"


def picture(number: int) -> Image.Image:
    rng = np.random.default_rng(number)
    return Image.fromarray((rng.uniform(0, 256, 3) + rng.uniform(-60, 60, (2, 2, 3))).clip(0, 255).astype(np.uint8))


def validation(folder: Path, labels: dict[int, str]) -> Path:
    """Images by number, each in the folder of its label."""
    for number, label in labels.items():
        path = folder / label / f"ILSVRC2012_val_{number:08d}.JPEG"
        path.parent.mkdir(parents=True, exist_ok=True)
        picture(number).save(path, "PNG")  # no loss, whatever it is called
    return folder


@pytest.fixture(scope="module")
def imagenet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixteen images of five of the 1,000 classes; the file names count otherwise than the folders."""
    chosen = [IDS[c] for c in (999, 3, 500, 0, 42)]
    return validation(tmp_path_factory.mktemp("imagenet") / "val", {n: chosen[n % 5] for n in range(1, 17)})


def guess(theirs: nn.Module, numbers: list[int]) -> list[int]:
    """The classes that timm predicts, through its own preprocessing."""
    settings = timm.data.resolve_model_data_config(theirs)
    transform = timm.data.create_transform(**settings)
    with torch.no_grad():
        return theirs(torch.stack([transform(picture(n)) for n in numbers])).argmax(1).tolist()


def ask(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    code = run(["evaluate", *map(str, words), *FAST])
    return code, *capsys.readouterr()


def answer(capsys: pytest.CaptureFixture[str], *words: object) -> Any:
    code, out, err = ask(capsys, *words, "--json")
    assert code == 0, err
    return json.loads(out)


@pytest.mark.parametrize("form", ["timm", "zoo", "state_dict"])
def test_weights_of_a_file_predict_as_timm_does(form: str, theirs: nn.Module, file: Path, ours: str) -> None:
    if form == "state_dict":
        file = file.with_suffix(".pth")
        torch.save({"state_dict": theirs.state_dict()}, file)
    model = published_classifier(ours if form == "zoo" else f"timm:{NAME}", str(file))
    images = torch.randn(3, 3, 160, 160, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(model(images), theirs(images), rtol=1e-4, atol=1e-4)
    assert model.classes == tuple(IDS)
    assert (model.preprocess.size, model.preprocess.crop_ratio) == (160, 0.95)


def test_classes_are_the_ids_in_sorted_order() -> None:
    assert len(IDS) == 1000
    assert sorted(IDS) == IDS


@pytest.mark.parametrize("form", ["timm", "zoo"])
def test_every_image_of_an_undivided_folder_counts_and_missing_classes_are_allowed(
    form: str, theirs: nn.Module, file: Path, ours: str, imagenet: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = ours if form == "zoo" else f"timm:{NAME}"
    numbers = list(range(1, 17))
    predicted = guess(theirs, numbers)
    data = validation(imagenet.parent / f"right-{form}", {n: IDS[c] for n, c in zip(numbers, predicted, strict=True)})
    made = answer(capsys, name, "--weights", file, "--data", data)
    assert (made["count"], made["split"], made["top1"]) == (16, "val", 1.0)
    made = answer(capsys, name, "--weights", file, "--data", imagenet)
    chosen = [(999, 3, 500, 0, 42)[n % 5] for n in numbers]
    assert made["top1"] == np.mean([c == p for c, p in zip(chosen, predicted, strict=True)])
    assert made["image_size"] == 160


def test_published_and_measured_accuracy_stand_next_to_each_other(
    file: Path, imagenet: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, theirs: nn.Module
) -> None:
    monkeypatch.setitem(published_figures(), CHECKPOINT, {"top1": 55.0, "real": 20.0})
    predicted = guess(theirs, list(range(1, 17)))
    labels = {n: IDS[c if n % 2 else (c + 1) % 1000] for n, c in enumerate(predicted, 1)}
    data = validation(imagenet.parent / "half", labels)
    words = (f"timm:{NAME}", "--weights", file, "--data", data, "--expect")
    (row,) = answer(capsys, *words)
    assert (row["metric"], row["top1"], row["published"], row["checkpoint"]) == ("top1", 0.5, 0.55, CHECKPOINT)
    assert row["difference"] == pytest.approx(-0.05)
    assert row["within_interval"] is True
    assert row["images_per_s"] > 0
    monkeypatch.setitem(published_figures(), CHECKPOINT, {"top1": 80.0})
    assert answer(capsys, *words)[0]["within_interval"] is False
    code, out, _ = ask(capsys, *words)
    assert code == 0
    assert {"160", "0.95", "80.00", "50.00", "-30.00", "no"} <= set(out.split())
    assert max(map(len, out.splitlines())) <= 80


def test_a_model_without_a_published_figure_is_measured_all_the_same(
    file: Path, imagenet: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (row,) = answer(capsys, f"timm:{NAME}", "--weights", file, "--data", imagenet, "--expect")
    assert [row[key] for key in ("published", "source", "difference", "within_interval")] == [None] * 4
    assert ask(capsys, f"timm:{NAME}", "--weights", file, "--data", imagenet, "--expect")[0] == 0


@pytest.mark.usefixtures("hub_answers")
def test_several_models_give_one_table(
    theirs: nn.Module, ours: str, imagenet: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    state, create = theirs.state_dict(), timm.create_model

    def cached(name: str, pretrained: bool = False, **options: Any) -> nn.Module:
        if pretrained:
            options["pretrained_cfg_overlay"] = {"state_dict": state}
        return create(name, pretrained=pretrained, **options)

    monkeypatch.setattr(timm, "create_model", cached)
    rows = answer(capsys, f"timm:{NAME}", ours, "--data", imagenet, imagenet)
    assert [row["model"] for row in rows] == [f"timm:{NAME}"] * 2 + [ours] * 2
    assert len({row["top1"] for row in rows}) == 1
    assert {row["checkpoint"] for row in rows} == {CHECKPOINT}
    code, out, _ = ask(capsys, f"timm:{NAME}", ours, "--data", imagenet)
    assert code == 0
    assert out.count("images/s") == 1


def test_reassessed_accuracy_is_that_of_a_count_by_hand() -> None:
    rng = np.random.default_rng(0)
    predicted = rng.integers(0, 5, 200).tolist()
    labels = [rng.choice(5, size, replace=False).tolist() for size in rng.integers(0, 4, 200)]
    right = count = 0
    for row in range(200):
        if len(labels[row]) > 0:
            count += 1
            for label in labels[row]:
                right += label == predicted[row]
    assert reassessed_top1(predicted, labels) == (right, count)
    assert 0 < right < count < 200


def test_reassessed_labels_belong_to_images_by_their_number(
    theirs: nn.Module, file: Path, imagenet: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    predicted = guess(theirs, list(range(1, 17)))
    assert len(set(predicted)) > 8  # else their order would not matter
    labels = [
        [(c + 1) % 1000, c] if n % 4 == 0 else [] if n % 4 == 1 else [(c + 1) % 1000] for n, c in enumerate(predicted)
    ]
    (tmp_path / "real.json").write_text(json.dumps(labels))
    top1, real = answer(capsys, f"timm:{NAME}", "--weights", file, "--data", imagenet, "--real", tmp_path / "real.json")
    assert (top1["metric"], top1["count"]) == ("top1", 16)
    assert (real["metric"], real["count"], real["top1"]) == ("real", 12, 4 / 12)


@pytest.mark.parametrize("text", ["{}", "[1, 2]", "[[1000]]", "[[true]]", "[[0.5]]", "not json", "[" * 100_000])
def test_what_is_no_list_of_label_lists_is_rejected(
    text: str, imagenet: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "real.json").write_text(text)
    code, _, err = ask(capsys, f"timm:{NAME}", "--data", imagenet, "--real", tmp_path / "real.json")
    assert code == 2
    assert "holds no reassessed labels" in err


def test_reassessed_labels_need_the_names_of_imagenets_files(
    file: Path, imagenet: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "real.json").write_text(json.dumps([[0]] * 15))  # the sixteenth image has none
    code, _, err = ask(capsys, f"timm:{NAME}", "--weights", file, "--data", imagenet, "--real", tmp_path / "real.json")
    assert code == 2
    assert "ILSVRC2012_val_00000016.JPEG is none of these" in err


@pytest.mark.parametrize("backwards", [False, True])
def test_numbered_folders_are_classes_in_sorted_order(backwards: bool, file: Path, tmp_path: Path) -> None:
    data = open_whole(str(validation(tmp_path / "v2", {n + 1: str(n) for n in range(1000)})))
    model = published_classifier(f"timm:{NAME}", str(file))
    model.classes = tuple(IDS[::-1]) if backwards else tuple(IDS)
    split = _with_classes_of(model, data)["val"]
    numbers = [int(Path(key).parent.name) for key in split.keys]
    assert sorted(numbers) == list(range(1000))
    assert [model.classes[c] for c in split.labels] == [IDS[n] for n in numbers]


@pytest.mark.slow
def test_accuracy_on_numbered_folders_is_compared_with_that_on_imagenet_v2(
    theirs: nn.Module, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(published_figures(), CHECKPOINT, {"top1": 55.0, "v2": 40.0})
    predicted = guess(theirs, list(range(1, 31)))
    right = {n: str(c) for n, c in enumerate(predicted, 1)}
    others = {n + 100: str(n) for n in range(1000) if str(n) not in right.values()}
    data = validation(tmp_path / "v2", right | others)
    wrong = sum(str(c) != others[n] for n, c in zip(others, guess(theirs, list(others)), strict=True))
    (row,) = answer(capsys, f"timm:{NAME}", "--weights", file, "--data", data, "--expect")
    assert (row["metric"], row["count"], row["published"]) == ("v2", 30 + len(others), 0.4)
    assert row["top1"] == (row["count"] - wrong) / row["count"]


def test_some_numbered_folders_are_rejected(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = validation(tmp_path / "digits", {n + 1: str(n) for n in range(10)})
    code, _, err = ask(capsys, f"timm:{NAME}", "--weights", file, "--data", data)
    assert code == 2
    assert "0 to 999, all of them" in err
    assert "WordNet ids" in err


@pytest.mark.parametrize("nested", [False, True])
def test_a_flat_folder_of_validation_images_gets_the_usual_remedy(
    nested: bool, file: Path, imagenet: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "val").mkdir()
    picture(1).save(tmp_path / "val" / "ILSVRC2012_val_00000001.JPEG", "PNG")
    if nested:
        validation(tmp_path / "train", {1: IDS[0], 2: IDS[1]})
    data = tmp_path if nested else tmp_path / "val"
    code, _, err = ask(capsys, f"timm:{NAME}", "--weights", file, "--data", data)
    assert code == 2
    assert "valprep.sh" in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("timm:nonsense --data DATA --expect", "has no model 'nonsense'"),
        ("timm:deit_small_patch16_224.nonsense --data DATA --expect", "it has deit_small_patch16_224.fb_in1k"),
        ("vit_huge --data DATA --expect", "with the 1,000 classes of ImageNet"),
        ("cait_b12 --data DATA --expect", "no published weights for cait_b12"),
        ("timm:test_vit --expect", "--data imagenet/val"),
        ("timm:test_vit --data DATA --weights /nowhere.pth", "no weights file at /nowhere.pth"),
        ("timm:test_vit timm:test_vit2 --data DATA --weights FILE", "one model by name"),
        ("timm:test_vit2 --data DATA --weights FILE", "does not hold the weights of timm:test_vit2"),
        ("timm:test_vit /nowhere --data DATA --expect", "no model at /nowhere"),
        ("timm:test_vit --weights FILE --data DATA /nowhere --expect", "no data at '/nowhere'"),
        ("timm:test_vit --data DATA --protocol knn", "go without --protocol"),
        ("timm:test_vit --data DATA --expect --crop_ratio 1", "leave these flags out"),
    ],
)
def test_what_cannot_be_is_one_sentence(
    words: str, message: str, file: Path, imagenet: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {"DATA": imagenet, "FILE": file}
    code, _, err = ask(capsys, *(places.get(word, word) for word in words.split()))
    assert code == 2
    assert message in err
    assert len(err.splitlines()) == 1


@pytest.mark.usefixtures("hub_answers")
def test_weights_that_cannot_be_fetched_are_one_sentence(
    imagenet: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def offline(*_: Any, **__: Any) -> None:
        raise OSError("no network. Try later.")

    monkeypatch.setattr(timm, "create_model", offline)
    code, _, err = ask(capsys, f"timm:{NAME}", "--data", imagenet)
    assert code == 2
    assert "could not be fetched (no network)" in err
    assert "--weights FOLDER/model.safetensors" in err


def test_a_model_that_timm_does_not_have_takes_a_file_that_fills_all_of_it(
    theirs: nn.Module, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ZOO, "vit_apart", Spec(TRUNK, heads.ClassToken(), "of this test"))
    images = torch.randn(2, 3, 160, 160, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(
            published_classifier("vit_apart", str(file))(images), theirs(images), rtol=1e-4, atol=1e-4
        )
    trunk = {name: tensor for name, tensor in theirs.state_dict().items() if not name.startswith("head.")}
    torch.save(trunk, tmp_path / "trunk.pth")
    with pytest.raises(ValueError, match=r"does not fill the whole of vit_apart: head\.fc"):
        published_classifier("vit_apart", str(tmp_path / "trunk.pth"))


def test_a_saved_model_is_compared_as_the_named_one_is(
    file: Path, imagenet: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    published_classifier(f"timm:{NAME}", str(file)).save(tmp_path / "saved")
    (named,) = answer(capsys, f"timm:{NAME}", "--weights", file, "--data", imagenet, "--expect")
    (saved,) = answer(capsys, tmp_path / "saved", "--data", imagenet, "--expect")
    unlike = ("model", "images_per_s")
    assert all(saved[key] == named[key] for key in named if key not in unlike)


def test_a_folder_comes_before_a_name(
    tmp_path: Path, imagenet: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "deit_tiny").mkdir()
    monkeypatch.chdir(tmp_path)
    code, _, err = ask(capsys, "deit_tiny", "--data", imagenet)
    assert code == 2
    assert "no model at deit_tiny" in err


def test_every_checkpoint_of_the_zoo_has_a_published_figure() -> None:
    missing = {}
    for name, spec in ZOO.items():
        if spec.timm and name != "vit_huge":  # no checkpoint of it has a classifier
            checkpoint = checkpoint_of(name)
            missing |= {} if checkpoint in published_figures() else {name: checkpoint}
    assert missing == {}


def test_published_figures_are_of_checkpoints_that_timm_has() -> None:
    for checkpoint, figures in published_figures().items():
        assert checkpoint_of(f"timm:{checkpoint}") == checkpoint
        assert figures.keys() <= {"top1", "real", "v2"}
        assert figures.get("v2", 0) < figures["top1"] < figures.get("real", 100)
        if len(figures) > 1:
            assert checkpoint.startswith(tuple(PAPERS))


def test_figures_of_papers_name_the_paper() -> None:
    row = PublishedAccuracy(
        "m", "deit_tiny_patch16_224.fb_in1k", "d", "val", "real", 224, 0.9, 4, 0.5, (0.15, 0.85), 1.0
    )
    assert row.within
    assert row.to_json()["source"] == "DeiT, arXiv 2012.12877, table 5"
    assert math.isclose(row.published or 0, 0.801)
