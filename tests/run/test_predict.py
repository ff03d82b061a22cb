"""Calibration, prediction sets, rejection and search: from training to `predict`, `evaluate` and `export`."""

from __future__ import annotations

import csv
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

import vitrail
from vitrail.cli import run as command
from vitrail.compare.study import Study, plan
from vitrail.config import RunConfig, from_mapping
from vitrail.data.batch import Batch
from vitrail.data.dataset import UNLABELLED, DataSet
from vitrail.data.open import open_data
from vitrail.files import LaterVersion
from vitrail.measure.calibration import calibration_metrics, choose_calibration, fit_conformal, set_metrics
from vitrail.measure.evaluator import Predictions, draw_by_class, read_predictions
from vitrail.measure.trust import FILE, MADE, SOFTMAX_SCORES, Trust, fit_trust, threshold_for
from vitrail.model.classifier import Calibration, Classifier
from vitrail.model.export import to_torch
from vitrail.recipes import recipe
from vitrail.run.evaluate import calibrate, evaluate, verify
from vitrail.run.predict import image_index, predict

URI = "synthetic:shapes?n=1600&size=16"
SETTINGS: dict[str, Any] = {
    "data": {"uri": URI, "batch": 50, "workers": 0},
    "model": {"name": "vit_micro_28", "image_size": 16, "trunk": {"depth": 1, "patch": 4}},
    "optim": {"epochs": 2},
    "engine": {"device": "cpu"},
}


def config(out: Path, **more: Any) -> RunConfig:
    return from_mapping({**SETTINGS, "out": str(out), **more}, recipe("vit"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vitrail.train(config(tmp_path_factory.mktemp("trust") / "run"), quiet=True).path


@pytest.fixture(scope="module")
def data() -> DataSet:
    return open_data(URI)


@pytest.fixture(scope="module")
def pictures(data: DataSet, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Five test images, and a file that is none."""
    folder = tmp_path_factory.mktemp("pictures")
    paths = [folder / f"{i}.png" for i in range(6)]
    for i, path in enumerate(paths):
        data["test"].read(i).save(path)
    paths[2].write_bytes(b"no image")
    return paths


def plain_logits(path: Path, data: DataSet, split: str) -> Predictions:
    model = vitrail.load(path)
    model.calibration = Calibration()
    predictions = evaluate(model, data, split=split)[1]
    assert isinstance(predictions, Predictions)
    return predictions


def halves(predictions: Predictions) -> tuple[Tensor, Tensor]:
    """Rows of the first half of val, and of the second."""
    order = predictions.index.argsort()
    first = draw_by_class(predictions.target[order], lambda n: (n + 1) // 2, 0)
    chosen = torch.zeros(len(order), dtype=torch.bool)
    chosen[order[first]] = True
    return chosen.nonzero()[:, 0], (~chosen).nonzero()[:, 0]


def test_training_calibrates_on_half_of_val_and_test_is_measured_once_before_and_after(
    trained: Path, data: DataSet
) -> None:
    model, val, test = vitrail.load(trained), *(plain_logits(trained, data, split) for split in ("val", "test"))
    first, _ = halves(val)
    wanted = choose_calibration(val.logits[first], val.target[first])
    assert model.calibration.kind == wanted.kind
    assert model.calibration.temperature == pytest.approx(wanted.temperature, rel=1e-4)
    assert model.calibration.temperature != 1
    facts = model.stated["trust"]
    assert facts["before"] == pytest.approx(calibration_metrics(test.logits, test.target), rel=1e-4)
    after = calibration_metrics(model.calibration(test.logits), test.target)
    assert facts["after"] == pytest.approx(after, rel=1e-4)
    assert model.stated["figures"]["loss"] == pytest.approx(after["loss"], rel=1e-4)


def test_every_user_of_a_model_gets_calibrated_probabilities(
    trained: Path, data: DataSet, pictures: list[Path], tmp_path: Path
) -> None:
    model, test = vitrail.load(trained), plain_logits(trained, data, "test")
    wanted = model.calibration(test.logits).softmax(1)
    assert not torch.allclose(wanted, test.logits.softmax(1), atol=1e-3)
    figures, predictions, _ = evaluate(trained, data, split="test")
    torch.testing.assert_close(predictions.probabilities, wanted)  # type: ignore[union-attr]
    assert figures.loss == pytest.approx(float(F.nll_loss(wanted.log(), test.target)), rel=1e-5)
    stored = read_predictions(trained)
    assert stored is not None
    assert stored.logits.float() == pytest.approx(model.calibration(test.logits), rel=1e-2, abs=1e-2)
    assert [p.probability for p in model.predict([pictures[0], pictures[5]])] == pytest.approx(
        wanted[[0, 5]].amax(1).tolist(), rel=1e-4
    )
    to_torch(model, tmp_path / "model.pt2")
    image = torch.from_numpy(np.array(Image.open(pictures[0]))).permute(2, 0, 1)[None]
    exported = torch.export.load(tmp_path / "model.pt2").module()(image)
    torch.testing.assert_close(exported[0], wanted[0], rtol=1e-3, atol=1e-5)


def test_vector_scaling_is_stored_exported_and_checked(trained: Path, tmp_path: Path, pictures: list[Path]) -> None:
    model = vitrail.load(trained)
    classes = len(model.classes)
    scale, bias = (tuple(torch.rand(classes).double().tolist()) for _ in range(2))
    model.calibration = Calibration("vector", 1.0, scale, bias)
    model.save(tmp_path / "model")
    again = vitrail.load(tmp_path / "model")
    assert again.calibration == model.calibration
    to_torch(again, tmp_path / "model.pt2")  # compares what the file gives with the model
    description = json.loads((tmp_path / "model/model.json").read_text())
    description["calibration"]["scale"] = description["calibration"]["bias"] = [1.0]
    (tmp_path / "model/model.json").write_text(json.dumps(description))
    with pytest.raises(ValueError, match="calibration is of 1 classes, not"):
        vitrail.load(tmp_path / "model")


def test_sets_of_the_second_half_cover_and_facts_tell_it(trained: Path, data: DataSet) -> None:
    model, val, test = vitrail.load(trained), *(plain_logits(trained, data, split) for split in ("val", "test"))
    _, second = halves(val)
    chances = model.calibration(val.logits[second]).softmax(1)
    trust = Trust.read(trained / "model")
    for method in ("lac", "aps", "raps"):
        rule = fit_conformal(chances, val.target[second], 0.9, method)
        assert trust.rule(0.9, method).quantile == pytest.approx(rule.quantile, abs=1e-5)
    row = next(row for row in model.stated["trust"]["sets"] if row["asked"] == 0.9)
    inside = trust.rule(0.9).sets(model.calibration(test.logits).softmax(1))
    assert row["coverage"] == pytest.approx(set_metrics(inside, test.target)["coverage"])
    assert row["single"] == pytest.approx(float((inside.sum(1) == 1).double().mean()))
    assert row["interval"][0] <= row["coverage"] <= row["interval"][1]


def test_without_test_images_each_half_of_val_is_calibrated_by_the_other(
    trained: Path, data: DataSet, tmp_path: Path
) -> None:
    run = vitrail.train(config(tmp_path / "run", data={**SETTINGS["data"], "judge": "val"}), quiet=True)
    val = plain_logits(run.path, data, "val")
    parts = halves(val)
    fits = [choose_calibration(val.logits[rows], val.target[rows]) for rows in reversed(parts)]
    losses = [
        F.cross_entropy(fit(val.logits[rows]), val.target[rows], reduction="sum")
        for rows, fit in zip(parts, fits, strict=True)
    ]
    assert {fit.kind for fit in fits} == {"temperature"}
    assert run.figures.loss == pytest.approx(float(sum(losses)) / len(val), rel=1e-4)
    assert run.split == "val"


def test_no_calibrate_too_few_images_and_studies_leave_probabilities_alone(tmp_path: Path) -> None:
    study = Study("s", config(tmp_path / "none"), {"plain": {}}, seeds=(0, 1))
    assert [one.config.calibrate for one in plan(study, {}, tmp_path)] == [False, False]
    small = {**SETTINGS["data"], "uri": "synthetic:shapes?n=300&size=16"}
    for name, more, note in (("off", {"calibrate": False}, False), ("few", {"data": small}, True)):
        run = vitrail.train(config(tmp_path / name, **more), quiet=True)
        assert run.model.calibration == Calibration()
        assert "trust" not in run.model.stated
        assert not (run.path / "model" / FILE).exists()
        assert any("too few" in text for text in run.notes) == note
        with pytest.raises(ValueError, match="vitrail evaluate RUN --calibrate"):
            Trust.read(run.path / "model")


def test_calibrate_fits_a_saved_model_again_as_training_did(trained: Path, tmp_path: Path, data: DataSet) -> None:
    run = vitrail.train(config(tmp_path / "run", calibrate=False), quiet=True).path
    facts = calibrate(run, URI)
    before, now = vitrail.load(trained), vitrail.load(run)
    assert now.calibration.temperature == pytest.approx(before.calibration.temperature, rel=1e-4)
    assert facts["after"] == pytest.approx(before.stated["trust"]["after"], rel=1e-3)
    assert now.stated["trust"]["after"] == facts["after"]
    known = [Trust.read(path / "model") for path in (run, trained)]
    assert known[0].kind == known[1].kind
    torch.testing.assert_close(known[0].known, known[1].known, rtol=1e-4, atol=1e-5)


def test_a_check_of_a_run_reads_what_was_fitted(trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained / "model", tmp_path / "model")
    assert verify(tmp_path / "model") == []
    (tmp_path / "model" / FILE).write_bytes((trained / "model" / FILE).read_bytes()[:-8])
    assert [FILE in fault for fault in verify(tmp_path / "model")] == [True]


def test_damage_to_what_was_fitted_is_one_sentence(trained: Path, tmp_path: Path) -> None:
    trust = Trust.read(trained / "model")
    trust.save(tmp_path)
    again = Trust.read(tmp_path)
    assert (again.kind, again.auroc) == (trust.kind, trust.auroc)
    replace(trust, kind="aura", embedding=None).save(tmp_path)
    with pytest.raises(ValueError, match="is damaged"):
        Trust.read(tmp_path)
    with pytest.MonkeyPatch.context() as later:
        later.setattr("vitrail.measure.trust.FORMAT_VERSION", 1_000_000)
        trust.save(tmp_path)
    with pytest.raises(LaterVersion, match="update vitrail"):
        Trust.read(tmp_path)
    (tmp_path / FILE).write_bytes(b"\0" * 20)
    with pytest.raises(ValueError, match="damaged"):
        Trust.read(tmp_path)


def test_sets_by_the_score_of_earlier_versions_are_fitted_again(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trust = Trust.read(trained / "model")
    with monkeypatch.context() as patch:
        patch.setattr("vitrail.measure.trust.EXCLUSIVE", None)  # as these stored it
        trust.save(tmp_path)
    earlier = Trust.read(tmp_path)
    assert earlier.rule(0.9).quantile == trust.rule(0.9).quantile
    for method in ("aps", "raps"):
        with pytest.raises(ValueError, match=f"fitted {method} sets of this model by another score.*--calibrate"):
            earlier.rule(0.9, method)


def batch_of(images: Tensor, label: Tensor) -> Batch:
    return Batch((images,), label, label, torch.arange(len(images)))


def test_made_outliers_are_the_same_tiles_in_another_order_and_means_of_two() -> None:
    images = torch.randint(0, 256, (3, 3, 18, 17), dtype=torch.uint8)
    jigsaw, means = (make(images) for make in MADE)
    assert jigsaw.shape == images.shape
    assert torch.equal(jigsaw[..., 16:, :], images[..., 16:, :])  # what tiles leave over
    assert torch.equal(jigsaw[..., 16:], images[..., 16:])

    def tiles(image: Tensor) -> set[bytes]:
        return {image[:, r : r + 4, c : c + 4].numpy().tobytes() for r in range(0, 16, 4) for c in range(0, 16, 4)}

    for made, image in zip(jigsaw, images, strict=True):
        assert tiles(made) == tiles(image)
        assert not torch.equal(made, image)
    wanted = (images.int() + images[[2, 0, 1]].int()) // 2
    assert torch.equal(means.int(), wanted)


def test_the_reject_score_is_the_best_against_given_outliers(trained: Path) -> None:
    model, rows = vitrail.load(trained), open_data(URI)
    val = torch.stack([torch.from_numpy(np.array(rows["val"].read(i))).permute(2, 0, 1) for i in range(100)])
    batch = batch_of(val, torch.from_numpy(rows["val"].labels[:100]))
    white = batch_of(torch.full_like(val[:40], 255), batch.label[:40])
    fitted = fit_trust(model, [batch], [batch], 0, outliers=[white])
    areas = fitted.trust.auroc
    assert set(areas) == {"max_probability", "max_logit", "energy", "neighbours", "mahalanobis"}
    logits = max(areas[kind] for kind in SOFTMAX_SCORES)
    assert max(areas.values()) > 0.9
    # Embeddings have to be worth their bytes.
    embeddings = max(areas["neighbours"], areas["mahalanobis"])
    assert areas[fitted.trust.kind] == (embeddings if embeddings > logits + 0.02 else logits)
    lean = fit_trust(model, [batch], [batch], 0, outliers=[white], compare=False).trust
    assert lean.auroc == {kind: areas[kind] for kind in SOFTMAX_SCORES}
    assert areas[lean.kind] == logits


def test_a_reject_score_of_embeddings_must_be_ahead_by_more_than_noise(trained: Path, monkeypatch) -> None:
    model, rows = vitrail.load(trained), open_data(URI)
    val = torch.stack([torch.from_numpy(np.array(rows["val"].read(i))).permute(2, 0, 1) for i in range(100)])
    batch = batch_of(val, torch.from_numpy(rows["val"].labels[:100]))
    for ahead, chosen in ((0.01, "energy"), (0.03, "mahalanobis")):
        areas = iter([0.7, 0.71, 0.75, 0.6, 0.75 + ahead])
        monkeypatch.setattr("vitrail.measure.trust.rejection_metrics", lambda *_, a=areas: {"auroc": next(a)})
        assert fit_trust(model, [batch], [batch], 0, outliers=[batch]).trust.kind == chosen


def test_predict_tells_sets_unknowns_and_bad_files(trained: Path, data: DataSet, pictures: list[Path]) -> None:
    model, trust = vitrail.load(trained), Trust.read(trained / "model")
    answers = list(predict(model, pictures, trust=trust, coverage=0.9, keep=0.5))
    assert [answer.path for answer in answers] == list(map(str, pictures))
    assert answers[2].prediction.error == "not an image"
    test, rule = plain_logits(trained, data, "test"), trust.rule(0.9)
    for i in (0, 1, 3, 4, 5):
        chances = model.calibration(test.logits[i : i + 1]).softmax(1)
        inside = rule.sets(chances)[0].nonzero()[:, 0].tolist()
        classes = answers[i].classes
        assert classes is not None
        assert {name for name, _ in classes} == {model.classes[c] for c in inside}
        assert [p for _, p in classes] == sorted((p for _, p in classes), reverse=True)
    images = torch.stack([torch.from_numpy(np.array(data["val"].read(i))).permute(2, 0, 1) for i in range(160)])
    with torch.no_grad():
        out = model.outputs(images)
    scores = trust.scores(model.fused(out.stack), out.embedding)
    limit = threshold_for(trust.known, 0.5)
    assert 0.35 < float((scores >= limit).double().mean()) < 0.65  # half of known images pass, all of val here
    with pytest.raises(ValueError, match=r"need `trust`"):
        next(predict(model, pictures, coverage=0.9))


def test_a_search_finds_the_image_itself_and_the_index_is_kept_until_something_changes(
    trained: Path, data: DataSet, pictures: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = vitrail.load(trained)
    index = image_index(model, trained, URI)
    answers = list(predict(model, pictures[:2], index=index, neighbours=4))
    keys = [data["test"].keys[i] for i in range(2)]
    for answer, key in zip(answers, keys, strict=True):
        assert answer.neighbours is not None
        assert answer.neighbours[0][0] == key
        assert answer.neighbours[0][2] == pytest.approx(1, abs=2e-3)  # stored in half precision
        assert len(answer.neighbours) == 4
    every = torch.cat([F.normalize(embedded(model, split), dim=1) for split in data.splits.values()])
    queries = F.normalize(embedded(model, data["test"].take([0, 1])), dim=1)
    nearest = (queries @ every.T).topk(4).values
    found = torch.tensor([[c for _, _, c in answer.neighbours or ()] for answer in answers])
    torch.testing.assert_close(found, nearest, rtol=2e-3, atol=2e-3)
    with monkeypatch.context() as patched:
        patched.setattr("vitrail.run.predict.embed_all", lambda *_, **__: pytest.fail("computed again"))
        image_index(model, trained, URI)
        with pytest.raises(pytest.fail.Exception):
            image_index(model, trained, f"{URI}&seed=1")


def embedded(model: Classifier, split: Any) -> Tensor:
    images = [torch.from_numpy(np.array(split.read(i))).permute(2, 0, 1) for i in range(len(split))]
    with torch.no_grad():
        return model.outputs(torch.stack(images)).representation


def test_the_command_writes_a_table_and_one_sentence_for_what_cannot_be(
    trained: Path, pictures: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["predict", str(trained), *map(str, pictures), "--coverage", "0.9", "--keep", "0.9", "--device", "cpu"]
    assert command([*words, "--csv", str(tmp_path / "p.csv"), "--json"]) == 1  # a file cannot be read
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    rows = list(csv.DictReader((tmp_path / "p.csv").open()))
    assert [row["path"] for row in rows] == list(map(str, pictures))
    for line, row in zip(lines, rows, strict=True):
        assert row["label"] == line.get("label", "")
        assert row["error"] == line.get("error", "")
        assert row["set"] == "|".join(name for name, _ in line.get("set", ()))
    assert command([*words, "--neighbours", "2"]) == 1
    assert "cannot be read: not an image" in capsys.readouterr().out
    for more in (["--coverage", "1"], ["--keep", "0"], ["--csv", "/"], ["--top", "0"], ["--head", "class"]):
        assert command([*words, *more]) == 2
        assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_the_report_says_whether_probabilities_can_be_believed(trained: Path) -> None:
    page = (trained / "report.html").read_text().replace("\N{NO-BREAK SPACE}", " ")
    facts = vitrail.load(trained).stated["trust"]
    assert f"{100 * facts['after']['ece']:.1f} % off on average ({100 * facts['before']['ece']:.1f} % before" in page
    assert "prediction sets that hold the label in 95 % of cases name one class for" in page


def test_several_labels_are_calibrated_each_by_its_sigmoid_and_have_no_sets(tmp_path: Path) -> None:
    noise, rows = np.random.default_rng(0), ["path,label"]
    (tmp_path / "images").mkdir()
    for i in range(240):
        held = noise.random(2) < 0.5
        pixels = noise.integers(0, 156, (16, 16, 3), dtype=np.uint8)
        pixels[..., [0, 2]] += (100 * held).astype(np.uint8)
        Image.fromarray(pixels).save(tmp_path / "images" / f"{i}.png")
        rows.append(f"images/{i}.png,{'|'.join(name for name, h in zip(('red', 'blue'), held, strict=True) if h)}|")
    (tmp_path / "table.csv").write_text("\n".join(rows))
    data = {"uri": str(tmp_path / "table.csv"), "batch": 24, "workers": 0, "val_fraction": 0.3, "test_fraction": 0.2}
    settings = {**SETTINGS, "data": data, "out": str(tmp_path / "run"), "objective": {"loss": "bce"}}
    run = vitrail.train(from_mapping(settings, recipe("vit")), quiet=True)
    model, facts = vitrail.load(run.path), vitrail.load(run.path).stated["trust"]
    assert model.multilabel
    assert model.calibration.kind == "temperature"
    assert facts["after"]["loss"] == pytest.approx(run.figures.loss, rel=1e-5)
    assert "sets" not in facts
    opened = open_data(str(tmp_path / "table.csv"), val_fraction=0.3, test_fraction=0.2)
    logits = plain_logits(run.path, opened, "test")
    wanted = (logits.logits / model.calibration.temperature).sigmoid()
    torch.testing.assert_close(evaluate(model, opened)[1].probabilities, wanted)  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="one label per image"):
        Trust.read(run.path / "model").rule(0.9)


def test_adaptive_models_are_calibrated_and_rejected_by_what_they_keep(data: DataSet) -> None:
    model = vitrail.create_model(
        "vit_micro_28", classes=data.classes, image_size=16, depth=2, patch=4, adaptive={"kind": "ats"}
    ).eval()
    images = torch.stack([torch.from_numpy(np.array(data["val"].read(i))).permute(2, 0, 1) for i in range(120)])
    batch = batch_of(images, torch.from_numpy(data["val"].labels[:120]))
    fitted = fit_trust(model, [batch], [batch], 0)
    with torch.no_grad():
        wanted = choose_calibration(model(images)[fitted.first], batch.label[fitted.first])
    assert fitted.calibration.temperature == pytest.approx(wanted.temperature, rel=1e-4)
    assert len(fitted.trust.known) == len(fitted.first)


def test_a_model_without_classes_can_be_searched_by_and_says_no_more(
    data: DataSet, pictures: list[Path], tmp_path: Path
) -> None:
    model = vitrail.create_model("vit_micro_28", classes=(UNLABELLED,), image_size=16, depth=1, patch=4).eval()
    model.save(tmp_path / "model")
    index = image_index(model, tmp_path / "model", URI)
    (answer,) = predict(model, pictures[:1], index=index, neighbours=2)
    assert answer.neighbours is not None
    assert answer.neighbours[0][0] == data["test"].keys[0]
    assert answer.prediction.top == ()
    with pytest.raises(ValueError, match="knows no classes"):
        next(predict(model, pictures[:1]))
