"""The app: what it says of a picture, without a page; then the page itself, in a browser."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from vitrail.app.page import NONE, answers, serve
from vitrail.app.run import SIDE, Viewer, kept_strip, picture_of
from vitrail.cli import run
from vitrail.measure.saliency import explain
from vitrail.model.build import create_model
from vitrail.model.classifier import Classifier
from vitrail.report.sheets import FADED, GROUND, enlarged, overlay

SMALL = {"image_size": 32, "patch": 8, "depth": 2, "width": 32, "heads": 2, "classes": ["<b>cat</b>", "dog", "owl"]}
ATS = {"kind": "ats", "layers": [0, 1], "cap": [0.6], "least": 2}


def model(seed: int = 0, **options: Any) -> Classifier:
    torch.manual_seed(seed)
    made = create_model("vit_tiny", **{**SMALL, **options}).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(3)  # as drawn, all classes are all but equally likely
    return made


@pytest.fixture
def photo(photos: Path) -> Path:
    return photos / "red" / "00.jpg"


# Without a page


def test_every_model_says_what_it_predicts(photo: Path) -> None:
    models = [model(0), model(1)]
    viewer = Viewer(models, "cpu")
    found = viewer.look(picture_of(photo), None)
    for one, made in zip(found, models, strict=True):
        expected = made.predict(photo)[0]
        assert one.label == expected.label
        assert [name for name, _ in one.top] == [name for name, _ in expected.top]
        assert [p for _, p in one.top] == pytest.approx([p for _, p in expected.top], rel=1e-5)
        assert one.over is one.kept is None


def test_the_map_is_the_one_that_was_chosen(photo: Path) -> None:
    made = model()
    viewer = Viewer([made], "cpu")
    assert viewer.kinds == ["attention", "rollout", "gradient_attention", "grad_cam"]
    image = picture_of(photo)
    one = viewer.look(image, "rollout")[0]
    from vitrail.data.preprocess import Preprocess

    pixels = Preprocess(made.preprocess)(image)
    seen = enlarged(pixels.permute(1, 2, 0).numpy(), SIDE)
    assert (one.picture == seen).all()
    assert (one.over == overlay(seen, explain(made, pixels[None], "rollout")[0])).all()


def test_an_adaptive_model_shows_what_it_keeps_and_spends_and_has_no_map(photo: Path) -> None:
    made = model(adaptive=ATS)
    viewer = Viewer([model(), made], "cpu")
    assert viewer.adaptive == [False, True]
    plain, one = viewer.look(picture_of(photo), "grad_cam")
    assert plain.over is not None
    assert one.over is None
    assert one.note == "no grad cam: tokens leave an adaptive model on the way; see what it keeps"
    assert one.kept is not None
    with torch.inference_mode():
        from vitrail.data.preprocess import Preprocess

        pixels = Preprocess(made.preprocess)(picture_of(photo))[None]
        kept = made.outputs(pixels, want={"kept.1"}).captured["kept.1"]
    assert f"{int((kept > 0).sum())} of 16 patches left" in one.cost
    assert "MACs of this image" in one.cost
    assert "parameters" in plain.cost


def test_the_strip_fades_what_is_gone() -> None:
    seen = np.zeros((32, 32, 3), dtype=np.uint8)
    kept = torch.ones(2, 4, dtype=torch.bool)
    kept[1, 0] = False
    strip = kept_strip(seen, kept, [0, 1], (2, 2))
    times = strip.shape[0] // 32
    small = strip[::times, ::times]
    assert (small[:, :32] == 0).all()
    assert (small[:, 32] == 255).all()
    assert small[0, 33] == pytest.approx(FADED * np.array(GROUND), abs=0.5)
    assert (small[0, 33 + 16 :] == 0).all()


def test_a_picture_that_cannot_be_read_is_said_in_one_sentence(photo: Path, tmp_path: Path) -> None:
    torn, words, large = tmp_path / "torn.jpg", tmp_path / "words.png", tmp_path / "large.bmp"
    torn.write_bytes(photo.read_bytes()[:300])
    words.write_text("no image at all", encoding="utf-8")
    Image.new("RGB", (700, 600)).save(large)
    viewer = Viewer([model()], "cpu", limit=1)
    for path, said in (
        (torn, "torn.jpg cannot be read: truncated"),
        (words, "words.png cannot be read: not an image"),
        (large, "large.bmp has 1.2 MiB; this page takes at most 1"),
        (tmp_path / "gone.png", "gone.png cannot be read: no such file"),
        (None, "drop a picture here"),
    ):
        assert answers(viewer, None if path is None else str(path), NONE) == [said, None, None, None, ""]


def test_two_models_that_disagree_are_both_named(photo: Path) -> None:
    first, other = model(0), model(1)
    with torch.no_grad():  # sure of a class that the first does not say
        other.head.fc.bias[(first.classes.index(first.predict(photo)[0].label) + 1) % 3] += 100
    said, *_ = answers(Viewer([first, other], "cpu"), str(photo), NONE)
    assert said == (
        f"vit_tiny (1) predicts {first.predict(photo)[0].label}; vit_tiny (2) predicts {other.predict(photo)[0].label}"
    )
    assert answers(Viewer([first, first], "cpu"), str(photo), NONE)[0] == first.predict(photo)[0].label


def test_what_cannot_be_shown_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="one model, or two side by side, not 3"):
        Viewer([model()] * 3)
    with pytest.raises(ValueError, match="limit is a number of MiB"):
        Viewer([model()], "cpu", limit=0)
    import builtins

    whole = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name == "gradio":
            raise ImportError(name)
        return whole(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    assert run(["app", "vit_tiny"]) == 2
    assert "pip install 'vitrail[app]'" in capsys.readouterr().err
    assert run(["app"]) == 2


# In a browser


@pytest.fixture
def browser() -> Iterator[Any]:
    """A headless Chromium."""
    for name in ("gradio", "playwright"):
        if find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    program = next((p for p in map(shutil.which, ("chromium", "chromium-browser", "google-chrome")) if p), None)
    if program is None:
        pytest.skip("there is no Chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        made = play.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        yield made
        made.close()


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def test_a_picture_is_dropped_and_the_prediction_read_back(browser: Any, photo: Path, tmp_path: Path) -> None:
    made, other, port = model(), model(1, adaptive=ATS), free_port()
    torn = tmp_path / "torn.jpg"
    torn.write_bytes(photo.read_bytes()[:300])
    shown = serve(Viewer([made, other], "cpu"), "127.0.0.1", port)
    try:
        page = browser.new_page()
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.goto(f"http://127.0.0.1:{port}")
        upload = page.locator("#upload input[type=file]")
        upload.set_input_files(str(photo))
        label = made.predict(photo)[0].label
        page.wait_for_function("document.querySelector('#said textarea').value != ''")
        page.wait_for_selector("#picture-0 img")
        said = page.locator("#said textarea").input_value()
        assert label in said
        assert label in page.locator("#label-0").inner_text()
        assert "MACs" in page.locator("#cost-0 textarea").input_value()
        assert "patches left" in page.locator("#cost-1 textarea").input_value()
        page.locator("#upload button[aria-label='Clear'], #upload button[aria-label='Remove this file']").first.click()
        page.wait_for_function("document.querySelector('#said textarea').value.includes('drop a picture')")
        page.locator("#upload input[type=file]").set_input_files(str(torn))
        page.wait_for_function("document.querySelector('#said textarea').value.includes('torn.jpg cannot be read')")
        outside = [url for url in asked if not url.startswith((f"http://127.0.0.1:{port}", "data:", "blob:"))]
        assert outside == []
        with pytest.raises(ValueError, match="taken or not allowed; choose another --port"):
            serve(Viewer([made], "cpu"), "127.0.0.1", port)
    finally:
        shown.close()
