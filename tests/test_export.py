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
from test_parts import shake
from test_registry import reduced

import vitrail
from vitrail.data.config import PreprocessConfig
from vitrail.model import export
from vitrail.model.build import create_model
from vitrail.model.classifier import Classifier
from vitrail.model.config import SotStem
from vitrail.model.export import to_onnx, to_torch
from vitrail.model.heads.config import SecondOrder

FAMILIES: dict[str, dict[str, Any]] = {  # every head of ours is among them
    "vit_tiny_32": {},
    "deit_tiny_distilled_32": {},
    "deit3_tiny_32": {},
    "cait_xxs12_32": {},
    "resmlp_t12_32": {},
    "resmlp_s12_class_mlp": {},
    "patchconvnet_t20_32": {},
    "sot_7_32": {"stem": SotStem(block="resnet")},  # the smallest of its stems: tracing takes time
    "ga_vit_tiny_32": {},
    "cifar_resnet20": {},
    "timm:test_resnet": {"classes": 3},
}
ODD = ('comma, "quoted"', "Bärenkäfer's", "{'a': 1}\n\t", "猫")
CLOSE = 2e-5
"""Of the largest logit: sums of float32 in another order came to at most 6e-6 of it here, a wrong layer to 1e-3."""


@pytest.fixture
def runtime() -> Any:
    for name in export.PACKAGES:
        pytest.importorskip(name, reason=f"{name} is not installed (extra: export)")
    import onnxruntime

    return onnxruntime


def family(name: str) -> Classifier:
    options = {} if name.startswith("timm:") else reduced(name)[0]
    model = create_model(name, **{**options, **FAMILIES[name]}).eval().requires_grad_(False)
    shake(model)
    return model


def tiny(**options: Any) -> Classifier:
    """The quickest model there is, with weights that were not left at 0 or 1."""
    preprocess = PreprocessConfig(size=16, mean=(0.1, 0.5, 0.9), std=(0.2, 0.3, 0.7))
    small = {"depth": 1, "width": 32, "heads": 2, "patch": 8, "image_size": 16, "classes": ODD, **options}
    model = create_model("deit3_tiny", preprocess=preprocess, **small).eval()
    shake(model)
    return model


def images_of(model: Classifier, count: int) -> NDArray[np.uint8]:
    size = model.preprocess.size
    return np.random.default_rng(count).integers(0, 256, (count, 3, size, size), dtype=np.uint8)


def normalized(model: Classifier, images: NDArray[np.uint8]) -> NDArray[np.float32]:
    mean, std = (np.array(v).reshape(3, 1, 1) for v in (model.preprocess.mean, model.preprocess.std))
    return ((images / 255 - mean) / std).astype(np.float32)


def logits_of(model: Classifier, images: NDArray[Any]) -> NDArray[np.float32]:
    with torch.inference_mode():
        return model(torch.from_numpy(images)).numpy()


Run = Callable[[NDArray[Any]], NDArray[np.float32]]


def in_onnxruntime(path: Path) -> Run:
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return lambda images: session.run(None, {"images": images})[0]


def in_torch(path: Path) -> Run:
    module = torch.export.load(path).module()
    return lambda images: module(torch.from_numpy(images)).numpy()


TARGETS = {"onnx": (to_onnx, "model.onnx", in_onnxruntime), "torch": (to_torch, "model.pt2", in_torch)}


@pytest.fixture(params=TARGETS)
def target(request: pytest.FixtureRequest) -> Any:
    if request.param == "onnx":
        request.getfixturevalue("runtime")
    return TARGETS[request.param]


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_gives_the_models_logits_at_any_batch_size(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runtime: Any
) -> None:
    model = family(name)
    assert np.abs(logits_of(model, images_of(model, 7))).max() > 0.1  # nothing to compare, otherwise
    traced = export._traced(model, "bytes", "logits")  # the slow part, and the same for both
    monkeypatch.setattr(export, "_traced", lambda *_: traced)
    for write, file, read in TARGETS.values():
        write(model, tmp_path / file, output="logits")
        run = read(tmp_path / file)
        for batch in (1, 2, 7, 19):
            expected = logits_of(model, images_of(model, batch))
            assert np.abs(run(images_of(model, batch)) - expected).max() <= CLOSE * np.abs(expected).max(), file


def test_bytes_are_normalised_inside_as_the_model_was_told(target: Any, tmp_path: Path) -> None:
    write, file, read = target
    model = tiny()
    images = images_of(model, 3)
    floats = normalized(model, images)
    expected = logits_of(model, floats)
    for kind, given in (("bytes", images), ("float", floats)):
        write(model, tmp_path / kind / file, input=kind, output="logits")
        found = read(tmp_path / kind / file)(given)
        np.testing.assert_allclose(found, expected, rtol=0, atol=CLOSE * np.abs(expected).max())


@pytest.mark.parametrize("multilabel", [False, True])
def test_probabilities_are_a_softmax_or_a_sigmoid_a_class(multilabel: bool, target: Any, tmp_path: Path) -> None:
    write, file, read = target
    model = tiny(multilabel=multilabel)
    write(model, tmp_path / file)
    images = images_of(model, 5)
    z = logits_of(model, images).astype(np.float64)
    expected = 1 / (1 + np.exp(-z)) if multilabel else np.exp(z) / np.exp(z).sum(1, keepdims=True)
    np.testing.assert_allclose(read(tmp_path / file)(images), expected, rtol=0, atol=CLOSE)


def test_onnx_tells_what_it_is(runtime: Any, tmp_path: Path) -> None:
    model = tiny(multilabel=True)
    model.stated = {"weights": {"from": "über", "adapted": ["a, b"]}}
    made = to_onnx(model, tmp_path / "model.onnx")
    session = runtime.InferenceSession(tmp_path / "model.onnx")
    found = {key: json.loads(value) for key, value in session.get_modelmeta().custom_metadata_map.items()}
    assert found["classes"] == list(ODD)
    assert found["preprocess"]["mean"] == [0.1, 0.5, 0.9]
    assert found["preprocess"]["interpolation"] == "bicubic"
    assert found["stated"] == model.stated
    assert found["vitrail"] == vitrail.__version__
    assert (found["input"], found["output"], found["multilabel"]) == ("bytes", "probabilities", True)
    (images,), (probabilities,) = session.get_inputs(), session.get_outputs()
    assert (images.name, images.type, images.shape) == ("images", "tensor(uint8)", ["batch", 3, 16, 16])
    assert (probabilities.name, probabilities.shape) == ("probabilities", ["batch", len(ODD)])
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]
    assert made.to_json() == {
        "file": str(tmp_path / "model.onnx"),
        "bytes": (tmp_path / "model.onnx").stat().st_size,
        "input": "bytes",
        "output": "probabilities",
        "differences": {str(batch): made.differences[batch] for batch in (1, 2, 7)},
    }


def test_pt2_tells_what_it_is_and_nothing_is_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("something was unpickled")

    for place, name in ((torch, "load"), (pickle, "loads"), (pickle, "load"), (pickle, "Unpickler")):
        monkeypatch.setattr(place, name, refuse)
    model = tiny()
    to_torch(model, tmp_path / "model.pt2", output="logits")
    extra = {"vitrail.json": ""}
    torch.export.load(tmp_path / "model.pt2", extra_files=extra)
    found = json.loads(extra["vitrail.json"])
    assert found["classes"] == list(ODD)
    assert found["preprocess"]["std"] == [0.2, 0.3, 0.7]
    assert (found["vitrail"], found["output"]) == (vitrail.__version__, "logits")


def test_files_do_not_name_the_folders_of_the_machine(target: Any, tmp_path: Path) -> None:
    write, file, _ = target
    write(tiny(), tmp_path / file)
    held = (tmp_path / file).read_bytes()  # neither format is compressed
    assert b"deit3_tiny" in held
    assert str(Path(vitrail.__file__).parent).encode() not in held
    assert str(Path(torch.__file__).parent).encode() not in held


def change(monkeypatch: pytest.MonkeyPatch, spoil: Any) -> None:
    """From now on, what is exported is another model than what was given."""
    fold = export.fold_affine

    def folded(model: Classifier) -> Classifier:
        with torch.no_grad():
            spoil(model)
        return fold(model)

    monkeypatch.setattr(export, "fold_affine", folded)


def test_a_file_that_differs_is_refused_and_the_old_one_kept(
    target: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, file, _ = target
    (tmp_path / file).write_bytes(b"old")
    change(monkeypatch, lambda model: model.head.fc.weight.mul_(1.001))
    with pytest.raises(ValueError, match=r"was not written.*at batch 1, .* at batch 2, .* at batch 7"):
        write(tiny(), tmp_path / file, output="logits")
    assert (tmp_path / file).read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == [file]


@pytest.mark.parametrize("multilabel", [False, True])
def test_one_wrong_logit_of_many_shows_in_probabilities(
    multilabel: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoil(model: Classifier) -> None:
        model.head.fc.bias[500] += 0.01  # changes the largest probability by less than 1e-4

    change(monkeypatch, spoil)
    with pytest.raises(ValueError, match="was not written"):
        to_torch(tiny(classes=1000, multilabel=multilabel), tmp_path / "model.pt2")


def test_a_model_that_gives_no_numbers_is_refused(tmp_path: Path) -> None:
    model = tiny()
    model.head.fc.bias.data[0] = torch.nan
    with pytest.raises(ValueError, match="nan at batch 1"):
        to_torch(model, tmp_path / "model.pt2")
    assert not list(tmp_path.iterdir())


def test_the_model_itself_is_left_as_it_was(tmp_path: Path) -> None:
    model = tiny().train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    to_torch(model, tmp_path / "model.pt2")
    assert model.training
    assert not model.folded
    assert all(p.requires_grad for p in model.parameters())
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_exact_svpn_goes_to_torch(tmp_path: Path) -> None:
    model = tiny(head=SecondOrder(normalization="svpn", rows=6, columns=6, heads=2))
    to_torch(model, tmp_path / "model.pt2", output="logits")
    expected = logits_of(model, images_of(model, 3))
    found = in_torch(tmp_path / "model.pt2")(images_of(model, 3))
    assert np.abs(found - expected).max() <= CLOSE * np.abs(expected).max()


def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(*_: Any) -> None:
        raise AssertionError("work was done first")

    monkeypatch.setattr(export, "_traced", work)


def test_exact_svpn_is_refused_for_onnx_before_any_work(
    runtime: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_work(monkeypatch)
    model = tiny(head=SecondOrder(normalization="svpn", rows=6, columns=6, heads=2))
    with pytest.raises(ValueError, match=r"second_order .* svpn .* no operator; export to torch, or .* svpn_fast"):
        to_onnx(model, tmp_path / "model.onnx")


def test_a_billion_parameters_are_too_many_for_onnx(runtime: Any, tmp_path: Path) -> None:
    model = create_model("deit3_huge52", device="meta")
    with pytest.raises(ValueError, match=r"^4\.1 GB of weights do not fit .* export to torch"):
        to_onnx(model, tmp_path / "model.onnx")


@pytest.mark.parametrize("name", export.PACKAGES)
def test_a_missing_package_is_named_with_the_remedy(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_work(monkeypatch)
    for package in export.PACKAGES:
        monkeypatch.setitem(sys.modules, package, None if package == name else sys)
    with pytest.raises(ValueError, match=rf'^ONNX files need {name}: pip install "vitrail\[export\]"$'):
        to_onnx(tiny(), tmp_path / "model.onnx")


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
    file: str, words: dict[str, Any], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_work(monkeypatch)
    with pytest.raises(ValueError, match=sentence):
        to_torch(tiny(), tmp_path / file, **words)
