"""Exported files: the results of the model at any batch size, everything that belongs to it inside, or no file."""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from small import reduced_model, shake

import vitrail
from vitrail.data.config import PreprocessConfig
from vitrail.model import export
from vitrail.model.build import create_model
from vitrail.model.classifier import Classifier
from vitrail.model.config import SotStem
from vitrail.model.export import to_onnx, to_torch
from vitrail.model.heads.config import ClassAttention, SecondOrder

FAMILIES: dict[str, dict[str, Any]] = {  # with `tiny` every head; small, because torch takes seconds to trace any
    "deit_tiny_distilled_32": {},
    "cait_xxs12_32": {"depth": 1, "head": ClassAttention(layers=1)},
    "resmlp_s12_class_mlp": {"depth": 1},
    "patchconvnet_t20_32": {"depth": 1},
    "sot_7_32": {"depth": 1, "stem": SotStem(block="resnet")},
    "ga_vit_tiny_32": {"depth": 1},
    "cifar_resnet20": {},
    "timm:test_resnet": {"classes": 3, "image_size": 64},
}
ODD = ('comma, "quoted"', "Bärenkäfer's", "{'a': 1}\n\t", "猫")
STATED = {"weights": {"from": "über", "adapted": ["a, b"]}}
CLOSE = 2e-5
"""Of the largest logit: sums of float32 in another order came to at most 6e-6 of it here, a wrong layer to 1e-3."""

Run = Callable[[NDArray[Any]], NDArray[np.float32]]


def in_onnxruntime(path: Path) -> Run:
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return lambda images: session.run(None, {"images": images})[0]


def in_torch(path: Path) -> Run:
    module = torch.export.load(path).module()
    return lambda images: module(torch.from_numpy(images)).numpy()


TARGETS = {"onnx": (to_onnx, ".onnx", in_onnxruntime), "torch": (to_torch, ".pt2", in_torch)}


def need_onnx() -> None:
    for name in export.PACKAGES:
        pytest.importorskip(name, reason=f"{name} is not installed (extra: export)")


@pytest.fixture(scope="module")
def runtime() -> Any:
    need_onnx()
    import onnxruntime

    return onnxruntime


@pytest.fixture(scope="module", params=TARGETS)
def target(request: pytest.FixtureRequest) -> Any:
    """How to write, what such a file is called, how others run it."""
    if request.param == "onnx":
        request.getfixturevalue("runtime")
    return TARGETS[request.param]


def tiny(**options: Any) -> Classifier:
    """The quickest model there is (DeiT III, class token), with weights that were not left at 0 or 1."""
    preprocess = PreprocessConfig(size=16, mean=(0.1, 0.5, 0.9), std=(0.2, 0.3, 0.7))
    small = {"depth": 1, "width": 32, "heads": 2, "patch": 8, "image_size": 16, "classes": ODD, **options}
    model = create_model("deit3_tiny", preprocess=preprocess, **small).eval()
    shake(model)
    model.stated = STATED
    return model


@pytest.fixture(scope="module")
def written(target: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, export.Exported, Run]:
    """The tiny model in a file as it is written when nothing is asked for."""
    write, suffix, read = target
    path = tmp_path_factory.mktemp("written") / f"model{suffix}"
    return path, write(tiny(), path), read(path)


def images_of(model: Classifier, count: int) -> NDArray[np.uint8]:
    size = model.preprocess.size
    return np.random.default_rng(count).integers(0, 256, (count, 3, size, size), dtype=np.uint8)


def normalized(model: Classifier, images: NDArray[np.uint8]) -> NDArray[np.float32]:
    mean, std = (np.array(v).reshape(3, 1, 1) for v in (model.preprocess.mean, model.preprocess.std))
    return ((images / 255 - mean) / std).astype(np.float32)


def logits_of(model: Classifier, images: NDArray[Any]) -> NDArray[np.float32]:
    with torch.inference_mode():
        return model(torch.from_numpy(images)).numpy()


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_gives_the_models_logits_at_any_batch_size(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {} if name.startswith("timm:") else reduced_model(name)[0]
    model = create_model(name, **{**options, **FAMILIES[name]}).eval()
    shake(model)
    traced = export._traced(model, "bytes", "logits")  # the slow part, and the same for both
    monkeypatch.setattr(export, "_traced", lambda *_: traced)
    for write, suffix, read in (TARGETS["torch"], TARGETS["onnx"]):
        if suffix == ".onnx":
            need_onnx()
        write(model, tmp_path / f"model{suffix}", output="logits")
        run = read(tmp_path / f"model{suffix}")
        for batch in (1, 2, 7, 19):
            images = images_of(model, batch)
            expected = logits_of(model, images)
            assert np.abs(expected).max() > 0.1  # else there would be nothing to compare
            assert np.abs(run(images) - expected).max() <= CLOSE * np.abs(expected).max(), (suffix, batch)


@pytest.mark.parametrize("batch", [1, 2, 7])
def test_bytes_are_normalised_inside_and_become_a_softmax(written: Any, batch: int) -> None:
    _, _, run = written
    images = images_of(tiny(), batch)
    power = np.exp(logits_of(tiny(), normalized(tiny(), images)).astype(np.float64))
    np.testing.assert_allclose(run(images), power / power.sum(1, keepdims=True), rtol=0, atol=CLOSE)


def test_normalised_floats_go_in_and_several_labels_become_sigmoids(target: Any, tmp_path: Path) -> None:
    write, suffix, read = target
    model = tiny(multilabel=True)
    write(model, tmp_path / f"model{suffix}", input="float")
    images = normalized(model, images_of(model, 5))
    expected = 1 / (1 + np.exp(-logits_of(model, images).astype(np.float64)))
    np.testing.assert_allclose(read(tmp_path / f"model{suffix}")(images), expected, rtol=0, atol=CLOSE)


def check_description(found: dict[str, Any]) -> None:
    assert found["classes"] == list(ODD)
    assert found["preprocess"]["mean"] == [0.1, 0.5, 0.9]
    assert found["preprocess"]["interpolation"] == "bicubic"
    assert found["stated"] == STATED
    assert found["vitrail"] == vitrail.__version__
    assert (found["input"], found["output"], found["multilabel"]) == ("bytes", "probabilities", False)


@pytest.mark.parametrize("target", ["onnx"], indirect=True)
def test_onnx_tells_what_it_is(written: Any, runtime: Any) -> None:
    session = runtime.InferenceSession(written[0])
    check_description({key: json.loads(v) for key, v in session.get_modelmeta().custom_metadata_map.items()})
    (images,), (probabilities,) = session.get_inputs(), session.get_outputs()
    assert (images.name, images.type, images.shape) == ("images", "tensor(uint8)", ["batch", 3, 16, 16])
    assert (probabilities.name, probabilities.shape) == ("probabilities", ["batch", len(ODD)])


@pytest.mark.parametrize("target", ["torch"], indirect=True)
def test_pt2_tells_what_it_is(written: Any) -> None:
    extra = {"vitrail.json": ""}
    torch.export.load(written[0], extra_files=extra)
    check_description(json.loads(extra["vitrail.json"]))


def test_one_file_is_written_and_its_figures_told(written: Any) -> None:
    path, made, _ = written
    assert list(path.parent.iterdir()) == [path]
    found = json.loads(json.dumps(made.to_json()))
    differences = found.pop("differences")
    size = path.stat().st_size
    assert found == {"file": str(path), "bytes": size, "input": "bytes", "output": "probabilities"}
    assert list(differences) == ["1", "2", "7"]
    assert max(differences.values()) < CLOSE


def test_files_do_not_name_the_folders_of_the_machine(written: Any) -> None:
    held = written[0].read_bytes()  # neither format is compressed
    assert b"deit3_tiny" in held
    assert str(Path(vitrail.__file__).parent).encode() not in held
    assert str(Path(torch.__file__).parent).encode() not in held


@pytest.mark.parametrize("target", ["torch"], indirect=True)
def test_nothing_is_unpickled_to_read_a_pt2(written: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("something was unpickled")

    for place, name in ((torch, "load"), (pickle, "loads"), (pickle, "load"), (pickle, "Unpickler")):
        monkeypatch.setattr(place, name, refuse)
    images = images_of(tiny(), 2)
    np.testing.assert_array_equal(in_torch(written[0])(images), written[2](images))


def change(monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Classifier], Any]) -> None:
    """From now on, what is exported is another model than the one that was given."""
    fold = export.fold_affine

    def folded(model: Classifier) -> Classifier:
        with torch.no_grad():
            spoil(model)
        return fold(model)

    monkeypatch.setattr(export, "fold_affine", folded)


def test_a_file_that_differs_is_refused_and_the_old_one_kept(
    target: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, suffix, _ = target
    path = tmp_path / f"model{suffix}"
    path.write_bytes(b"old")
    change(monkeypatch, lambda model: model.head.fc.weight.mul_(1.001))
    with pytest.raises(ValueError, match=r"was not written.* at batch 1, .* at batch 2, .* at batch 7, where rounding"):
        write(tiny(), path, output="logits")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("multilabel", [False, True])
def test_a_mistake_is_found_where_probabilities_hardly_show_it(
    multilabel: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny(multilabel=multilabel)
    with torch.no_grad():
        model.head.fc.weight[:2] = 0
        model.head.fc.bias[:2] = torch.tensor([10, -4.2])  # close to 1, and beside it small
    change(monkeypatch, lambda model: model.head.fc.bias[1].add_(0.005))  # moves no probability by more than 7.5e-5
    with pytest.raises(ValueError, match="was not written"):
        to_torch(model, tmp_path / "model.pt2")
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("runtime")
@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (torch.onnx.errors.OnnxExporterError("advice"), r"^deit3_tiny cannot be written as ONNX \(no operator x\); "),
        (ImportError("advice"), r"do not fit this torch \(no operator x\): pip install --upgrade onnx onnxscript"),
        (OSError(28, "No space left"), "No space left"),
    ],
)
def test_where_torch_gives_up_the_reason_is_told_and_the_old_file_kept(
    error: Exception, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def give_up(*_: Any, **__: Any) -> None:
        raise error from ValueError("no operator x")

    monkeypatch.setattr(export, "_traced", lambda *_: None)
    monkeypatch.setattr(torch.onnx, "export", give_up)
    (tmp_path / "model.onnx").write_bytes(b"old")
    with pytest.raises((ValueError, OSError), match=sentence):
        to_onnx(tiny(), tmp_path / "model.onnx")
    assert (tmp_path / "model.onnx").read_bytes() == b"old"
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.usefixtures("runtime")
def test_a_file_that_cannot_be_read_back_is_not_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "_traced", lambda *_: None)
    monkeypatch.setattr(export, "_write_onnx", lambda _, path, __: path.write_bytes(b"no model"))
    with pytest.raises(ValueError, match=r"model\.onnx was not written, onnxruntime cannot read it \("):
        to_onnx(tiny(), tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())


def test_a_model_that_gives_no_numbers_is_refused(tmp_path: Path) -> None:
    model = tiny()
    model.head.fc.bias.data[0] = torch.nan
    with pytest.raises(ValueError, match="nan at batch 1"):
        to_torch(model, tmp_path / "model.pt2")
    assert not list(tmp_path.iterdir())


def test_the_model_itself_is_left_as_it_was(tmp_path: Path) -> None:
    model = tiny(drop_path=0.5).train()  # which the file must not have
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    to_torch(model, tmp_path / "model.pt2")
    assert model.training
    assert not model.folded
    assert all(p.requires_grad for p in model.parameters())
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_a_model_of_halves_becomes_a_file_of_float32(tmp_path: Path) -> None:
    model = tiny().bfloat16()
    to_torch(model, tmp_path / "model.pt2", output="logits")
    found = in_torch(tmp_path / "model.pt2")(images_of(model, 3))
    expected = logits_of(model.float(), images_of(model, 3))
    assert found.dtype == np.float32
    assert np.abs(found - expected).max() <= CLOSE * np.abs(expected).max()


EXACT = SecondOrder(normalization="svpn", rows=6, columns=6, heads=2)


def test_exact_svpn_goes_to_torch(tmp_path: Path) -> None:
    model = tiny(head=EXACT)
    to_torch(model, tmp_path / "model.pt2", output="logits")
    expected = logits_of(model, images_of(model, 3))
    found = in_torch(tmp_path / "model.pt2")(images_of(model, 3))
    assert np.abs(found - expected).max() <= CLOSE * np.abs(expected).max()


@pytest.fixture
def _no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(*_: Any) -> None:
        raise AssertionError("work was done first")

    monkeypatch.setattr(export, "_traced", work)


@pytest.mark.usefixtures("_no_work", "runtime")
def test_exact_svpn_is_refused_for_onnx_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"second_order .* svpn .* no operator; export to torch, or .* svpn_fast"):
        to_onnx(tiny(head=EXACT), tmp_path / "model.onnx")


@pytest.mark.usefixtures("_no_work", "runtime")
def test_a_billion_parameters_are_too_many_for_onnx(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^4\.1 GB of weights do not fit .* export to torch"):
        to_onnx(create_model("deit3_huge52", device="meta"), tmp_path / "model.onnx")


@pytest.mark.usefixtures("_no_work")
@pytest.mark.parametrize("name", export.PACKAGES)
def test_a_missing_package_is_named_with_the_remedy(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in export.PACKAGES:  # the others are there, on machines that have none of them, too
        monkeypatch.setitem(sys.modules, package, None if package == name else np)
    with pytest.raises(ValueError, match=rf'^ONNX files need {name}: pip install "vitrail\[export\]"$'):
        to_onnx(tiny(), tmp_path / "model.onnx")


@pytest.mark.usefixtures("_no_work")
@pytest.mark.parametrize(
    ("file", "words", "sentence"),
    [
        ("model.onnx", {}, "model.onnx does not end in .pt2"),
        ("", {}, "is a folder; name the .pt2 file"),
        ("model.pt2", {"input": "byte"}, "input must be bytes or float, not 'byte'"),
        ("model.pt2", {"output": "labels"}, "output must be probabilities or logits, not 'labels'"),
    ],
)
def test_what_cannot_be_asked_is_said_before_any_work(
    file: str, words: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=sentence):
        to_torch(tiny(), tmp_path / file, **words)
