"""The app: predictions without a page; the page on a live server, for friends and for strangers; in a browser."""

from __future__ import annotations

import html
import json
import re
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hostile import make_hostile, png_claiming
from PIL import Image

from vitrail.app import AppCommand
from vitrail.app.page import NONE, answer_page, example_page, form_page
from vitrail.app.run import SIDE, Viewer, kept_strip, picture_of
from vitrail.app.server import AppServer
from vitrail.cli import run
from vitrail.measure.saliency import explain
from vitrail.measure.trust import Trust
from vitrail.model.build import create_model
from vitrail.model.classifier import Calibration, Classifier
from vitrail.model.weights import load_model
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


def image_of(path: Path) -> Image.Image:
    return picture_of(path.read_bytes(), path.name)


# Without a page


def test_every_model_says_what_it_predicts(photo: Path) -> None:
    models = [model(0), model(1)]
    viewer = Viewer(models, "cpu")
    found = viewer.look(image_of(photo), None)
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
    image = image_of(photo)
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
    plain, one = viewer.look(image_of(photo), "grad_cam")
    assert plain.over is not None
    assert one.over is None
    assert one.note == "no grad cam: tokens leave an adaptive model on the way; see what it keeps"
    assert one.kept is not None
    with torch.inference_mode():
        from vitrail.data.preprocess import Preprocess

        pixels = Preprocess(made.preprocess)(image_of(photo))[None]
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


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("words.png", b"no image at all", "words.png cannot be read: not an image"),
        ("empty.png", b"", "empty.png cannot be read: empty file"),
        ("", b"x", "the upload cannot be read: not an image"),
        ("../../etc/passwd", b"x", "../../etc/passwd cannot be read: not an image"),
        ("a\nb\u202e" + "x" * 500, b"x", "a\\nb\\u202e" + "x" * 49 + "… cannot be read: not an image"),
        ("bomb.png", png_claiming(60_000, 60_000), "bomb.png cannot be read: 3600000000 pixels, more than"),
    ],
)
def test_a_picture_that_cannot_be_read_is_one_sentence(name: str, content: bytes, sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}"):
        picture_of(content, name)


def test_two_models_that_disagree_are_both_named(photo: Path) -> None:
    first, other = model(0), model(1)
    with torch.no_grad():  # sure of a class that the first does not predict
        other.head.fc.bias[(first.classes.index(first.predict(photo)[0].label) + 1) % 3] += 100
    page = answer_page(Viewer([first, other], "cpu"), photo.read_bytes(), "a.jpg", NONE)
    labels = [html.escape(m.predict(photo)[0].label) for m in (first, other)]
    assert f"vit_tiny (1) predicts {labels[0]}; vit_tiny (2) predicts {labels[1]}" in page
    page = answer_page(Viewer([first, first], "cpu"), photo.read_bytes(), "a.jpg", NONE)
    assert f'id="said">{labels[0]}</p>' in page


def test_what_cannot_be_shown_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="one model, or two side by side, not 3"):
        Viewer([model()] * 3)
    with pytest.raises(ValueError, match="limit is a number of MiB"):
        Viewer([model()], "cpu", limit=0)
    for port in (-1, 70_000):
        with pytest.raises(ValueError, match="choose another --port"):
            AppServer(Viewer([model()], "cpu"), "127.0.0.1", port)
    assert run(["app"]) == 2
    assert AppCommand(("x",)).host == "127.0.0.1"


def test_the_command_prints_its_address_and_ends_with_ctrl_c(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def interrupted(server: AppServer) -> None:
        assert server.server_address[0] == "127.0.0.1"
        raise KeyboardInterrupt

    monkeypatch.setattr(AppServer, "serve_forever", interrupted)
    model().save(tmp_path / "model")
    assert run(["app", str(tmp_path / "model"), "--port", "0", "--device", "cpu"]) == 0
    assert re.fullmatch(r".+: http://127\.0\.0\.1:\d+ \(Ctrl-C ends it\)\n", capsys.readouterr().out)


# On a live server


class Reply(NamedTuple):
    status: int
    headers: dict[str, str]
    text: str


@contextmanager
def served(**options: Any) -> Iterator[AppServer]:
    viewer = Viewer([model()], "cpu", limit=1)
    with AppServer(viewer, "127.0.0.1", 0, **options) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def server() -> Iterator[AppServer]:
    with served() as live:
        yield live


def raw(server: AppServer, *pieces: bytes, pause: float = 0.0) -> Reply:
    """Send bytes, wait for the end of the answer."""
    with socket.create_connection(server.server_address[:2], timeout=30) as connection:
        with suppress(BrokenPipeError, ConnectionResetError):
            for piece in pieces:
                connection.sendall(piece)
                time.sleep(pause)
        answer = b""
        with suppress(ConnectionResetError):
            while block := connection.recv(65536):
                answer += block
    head, _, text = answer.decode().partition("\r\n\r\n")
    first, *lines = head.split("\r\n")
    return Reply(int(first.split()[1]) if first else 0, dict(line.split(": ", 1) for line in lines), text)


def form(content: bytes, name: str = "a.jpg", kind: str = NONE) -> bytes:
    rows = [
        f'--b\r\nContent-Disposition: form-data; name="picture"; filename="{name}"\r\n'
        "Content-Type: image/jpeg\r\n\r\n".encode(),
        content,
        f'\r\n--b\r\nContent-Disposition: form-data; name="map"\r\n\r\n{kind}\r\n--b--\r\n'.encode(),
    ]
    return b"".join(rows)


def post(server: AppServer, body: bytes, *, path: str = "/predict", **headers: str | None) -> Reply:
    """A form as a browser sends it; a header that is None is left out."""
    known: dict[str, str | None] = {
        "Host": f"127.0.0.1:{server.server_port}",
        "Content-Type": "multipart/form-data; boundary=b",
        "Content-Length": str(len(body)),
    }
    given = known | {name.replace("_", "-"): value for name, value in headers.items()}
    lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in given.items() if value is not None)]
    return raw(server, "\r\n".join([*lines, "", ""]).encode(), body)


def get(server: AppServer, path: str = "/", host: str = "localhost", method: str = "GET") -> Reply:
    return raw(server, f"{method} {path} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())


def test_the_form_and_its_answer(server: AppServer, photo: Path) -> None:
    page = get(server)
    assert page.status == 200
    assert 'action="/predict"' in page.text
    assert "<option selected>gradient attention</option>" in page.text
    assert get(server, "/style.css").headers["Content-Type"] == "text/css; charset=utf-8"
    answer = post(server, form(photo.read_bytes(), kind="rollout"), Origin=f"http://127.0.0.1:{server.server_port}")
    assert answer.status == 200
    label = server.viewer.models[0].predict(photo)[0].label
    assert f'id="said">{html.escape(label)}</p>' in answer.text
    assert "data:image/" in answer.text


def test_names_are_escaped_and_no_script_may_run(server: AppServer, photo: Path) -> None:
    for reply in (
        get(server),
        get(server, "/nowhere"),
        post(server, form(photo.read_bytes())),
        post(server, form(b"x", name="<script>alert(1)</script>")),
    ):
        policy = reply.headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'; img-src data:; style-src 'self';")
        assert "script-src" not in policy
        assert reply.headers["X-Content-Type-Options"] == "nosniff"
        assert "<b>cat" not in reply.text
        assert "<script" not in reply.text or reply.headers["Content-Type"].startswith("text/plain")


@pytest.mark.parametrize(
    "content", ["truncated.jpg", "bomb.png", "huge_bomb.png", "text.jpg", "scrambled.tif", "empty.jpg"]
)
def test_hostile_pictures_are_a_sentence(content: str, server: AppServer, tmp_path: Path) -> None:
    expected = make_hostile(tmp_path / "hostile")[content]
    reply = post(server, form((tmp_path / "hostile" / content).read_bytes(), name=content))
    assert reply.status == 422
    assert reply.text.startswith(f"{content} cannot be read: {expected}")
    assert reply.headers["Content-Type"].startswith("text/plain")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Content_Length": None}, 411),
        ({"Content_Length": None, "Transfer_Encoding": "chunked"}, 411),
        ({"Transfer_Encoding": "chunked"}, 411),
        ({"Content_Length": "-1"}, 411),
        ({"Content_Length": "1e3"}, 411),
        ({"Content_Length": "9" * 40}, 411),
        ({"Content_Length": str(10**12)}, 413),
        ({"Content_Type": "image/jpeg"}, 415),
        ({"Content_Type": None}, 415),
        ({"Content_Type": "multipart/form-data; boundary=" + "b" * 100}, 415),
        ({"Content_Type": "multipart/form-data; boundary=other"}, 400),
        ({"Host": "evil.example"}, 403),
        ({"Host": "evil.example:7860"}, 403),
        ({"Host": None}, 403),
        ({"Host": "[broken"}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://127.0.0.1:1"}, 403),
        ({"Sec_Fetch_Site": "cross-site"}, 403),
        ({"Sec_Fetch_Site": "same-site"}, 403),
        ({"path": "/"}, 404),
        ({"path": "/predict/../../etc/passwd"}, 404),
        ({"X_Large": "x" * 70_000}, 431),
    ],
)
def test_requests_that_no_form_of_ours_sends_are_rejected(
    headers: dict[str, Any], status: int, server: AppServer, photo: Path
) -> None:
    reply = post(server, form(photo.read_bytes()), **headers)
    assert reply.status == status
    assert reply.text.strip()
    assert post(server, form(photo.read_bytes())).status == 200


def test_many_headers_and_long_addresses_are_rejected(server: AppServer) -> None:
    many = "".join(f"X-{i}: 1\r\n" for i in range(300))
    assert raw(server, f"GET / HTTP/1.1\r\nHost: localhost\r\n{many}\r\n".encode()).status == 431
    assert get(server, "/" + "x" * 70_000).status == 414
    assert raw(server, b"\xff\x00 nonsense\r\n\r\n").status == 400


@pytest.mark.parametrize(
    "path", ["/../../etc/passwd", "/%2e%2e/etc/passwd", "//etc/passwd", "/style.css/../x", "/file=/etc/passwd"]
)
def test_there_are_no_other_pages(path: str, server: AppServer) -> None:
    assert get(server, path).status == 404


@pytest.mark.parametrize("method", ["HEAD", "PUT", "DELETE", "OPTIONS", "TRACE", "CONNECT", "PATCH", "BREW"])
def test_other_methods_are_rejected(method: str, server: AppServer) -> None:
    assert get(server, method=method).status == 405


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]:7860", "192.168.1.5:7860", "LOCALHOST:1"])
def test_addresses_and_the_local_name_are_served(host: str, server: AppServer) -> None:
    assert get(server, host=host).status == 200


def test_a_page_from_a_rebound_name_is_not_served(server: AppServer) -> None:
    assert get(server, host="evil.example").status == 403
    assert get(server, host="127.0.0.1.evil.example").status == 403


def test_an_upload_beyond_the_limit_is_rejected_however_it_is_sent(server: AppServer) -> None:
    large = form(bytes(2 * 2**20))
    reply = post(server, large)
    assert reply.status == 413
    assert reply.text == "the upload has 2.0 MiB; this page takes at most 1\n"
    cut = post(server, form(b"x")[:50], Content_Length="50")
    assert cut.status == 400


@pytest.mark.parametrize("sent", [b"POST /predict HTTP/1.1\r\nHost: localhost\r\n", b"GET /", b""])
def test_a_slow_sender_is_let_go(sent: bytes) -> None:
    with served(seconds=0.5) as slow:
        reply = raw(slow, sent, *[b"X"] * 8, pause=0.1)
        assert reply.status in (0, 400, 408)
        late = [b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 90\r\n\r\n", *[b"x"] * 8]
        assert raw(slow, *late, pause=0.1).status == 408


def test_only_so_many_requests_at_a_time_are_taken() -> None:
    with served(most=2) as live:
        waiting = [socket.create_connection(live.server_address[:2], timeout=30) for _ in range(2)]
        for one in waiting:
            one.sendall(b"GET / HTTP/1.1\r\n")
        time.sleep(0.3)
        busy = get(live)
        assert busy.status == 503
        assert busy.headers["Retry-After"] == "5"
        for one in waiting:
            one.close()
        replies = [get(live).status for _ in range(20) if not time.sleep(0.1)]
        assert 200 in replies


def test_nothing_is_written(photo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with served() as live:
        assert post(live, form(photo.read_bytes(), name="../x.jpg", kind="rollout")).status == 200
        assert post(live, form(b"x", name="../x.jpg")).status == 422
    assert list(tmp_path.iterdir()) == []


# Of a run: facts, examples, rejection


@pytest.fixture(scope="module")
def finished(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as a run leaves it: a calibrated model of the colours, its final metrics, and scores of val images."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    made = model(classes=sorted(path.name for path in photos.iterdir()))
    made.calibration = Calibration("temperature", 2.0)
    made.save(folder / "model")
    Trust({}, torch.linspace(-30.0, 30.0, 100), "max_logit").save(folder / "model")
    (folder / "config.yaml").write_text(f"data:\n  uri: {photos}\n")
    final = {"step": 1, "epoch": 1.0, "split": "test", "final": True, "top1": 0.5, "top1_low": 0.25, "top1_high": 0.75}
    (folder / "metrics.jsonl").write_text(json.dumps(final) + "\n")
    return folder


def test_the_page_has_the_facts_of_a_run(finished: Path) -> None:
    page = form_page(Viewer([str(finished)], "cpu"))
    tiles = dict(re.findall(r"<dt>([^<]+)</dt><dd>([^<]+)</dd>", page))
    made = load_model(finished)
    assert tiles["test top-1"] == "50.0 %"
    assert "95 %: 25.0 to 75.0" in page
    assert tiles["classes"] == f"{len(made.classes)}"
    assert tiles["rejected on val"] == "5.0 %"
    assert tiles["latency"].endswith(" ms")
    assert "<h1>Classify a picture with run</h1>" in page


def test_an_example_is_predicted_with_calibrated_probabilities_and_its_true_class(finished: Path) -> None:
    viewer = Viewer([str(finished)], "cpu")
    page, (image, truth) = example_page(viewer, 1), viewer.examples[1]
    expected = viewer.models[0].predict(image)[0]
    assert f"True class: {truth}" in page
    assert f'id="said">{expected.label}</p>' in page
    assert re.findall(r"<td>([\d.]+ %)</td>", page)[0] == f"{100 * expected.probability:.1f} %"
    assert ">calibrated probability<" in page
    assert len(re.findall('<img src="data:image/', page)) == 2  # the input, and the map next to it


def test_examples_are_of_val_and_of_different_classes(finished: Path) -> None:
    truths = [truth for _, truth in Viewer([str(finished)], "cpu").examples]
    assert set(truths) == set(load_model(finished).classes)


@pytest.mark.parametrize(("known", "rejected"), [((-1e6, 0.0), False), ((1e6, 2e6), True)])
def test_a_picture_below_the_threshold_of_val_is_rejected(
    known: tuple[float, float], rejected: bool, finished: Path, photo: Path
) -> None:
    viewer = Viewer([str(finished)], "cpu")
    viewer.trusts = [Trust({}, torch.linspace(*known, 100), "max_logit")]
    assert viewer.look(image_of(photo), None)[0].rejected is rejected


def test_a_model_alone_has_no_examples_and_rejects_nothing(photo: Path) -> None:
    viewer = Viewer([model()], "cpu")
    assert viewer.examples == []
    assert viewer.look(image_of(photo), None)[0].rejected is None
    assert ">probability, not calibrated<" in answer_page(viewer, photo.read_bytes(), "a.jpg", NONE)


def test_examples_are_served_to_our_own_page_alone(finished: Path) -> None:
    with AppServer(Viewer([str(finished)], "cpu"), "127.0.0.1", 0) as live:
        thread = threading.Thread(target=live.serve_forever, args=(0.05,))
        thread.start()
        try:
            count = len(live.viewer.examples)
            assert get(live, "/example/0").status == 200
            assert get(live, f"/example/{count}").status == 404
            assert get(live, "/example/-1").status == 404
            assert (
                raw(live, b"GET /example/0 HTTP/1.1\r\nHost: localhost\r\nSec-Fetch-Site: cross-site\r\n\r\n").status
                == 403
            )
        finally:
            live.shutdown()
            thread.join()


# In a browser


@pytest.fixture
def browser() -> Iterator[Any]:
    """A headless Chromium."""
    if find_spec("playwright") is None:
        pytest.skip("playwright is not installed")
    program = next((p for p in map(shutil.which, ("chromium", "chromium-browser", "google-chrome")) if p), None)
    if program is None:
        pytest.skip("there is no Chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        made = play.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        yield made
        made.close()


def test_a_picture_is_dropped_and_the_prediction_read_back(
    browser: Any, server: AppServer, photo: Path, tmp_path: Path
) -> None:
    torn, url = tmp_path / "torn.jpg", f"http://127.0.0.1:{server.server_port}"
    torn.write_bytes(photo.read_bytes()[:300])
    page = browser.new_page()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(url)
    page.locator("#picture").set_input_files(str(photo))
    page.get_by_role("button").click()
    answer = page.frame_locator("iframe")
    assert server.viewer.models[0].predict(photo)[0].label in answer.locator("#said").inner_text()
    assert "MACs" in answer.locator(".cost").inner_text()
    page.locator("#picture").set_input_files(str(torn))
    page.get_by_role("button").click()
    answer.get_by_text("torn.jpg cannot be read").wait_for()
    assert [one for one in asked if not one.startswith((url, "data:"))] == []
