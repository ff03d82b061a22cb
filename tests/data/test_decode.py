"""Every hostile image becomes the pixels a plain conversion gives, or one reason."""

from __future__ import annotations

import contextlib
import io
import threading
import warnings

import numpy as np
import pytest
from hostile import Expected, colour, encoded, make_hostile
from PIL import Image

from vitrail.data.dataset import BadImage
from vitrail.data.decode import decode, to_rgb


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile")
    return folder, make_hostile(folder)


def is_wrong(name: str, pixels: np.ndarray, wanted: Expected) -> bool:
    """JPEG rounds twice (to YCbCr and to coefficients), alpha once more than the reference; the rest is exact."""
    allowed = 4 if name.endswith(".jpg") else 1 if "alpha" in name else 0
    return pixels.shape != wanted.shape or np.abs(pixels.astype(int) - wanted.astype(int)).max() > allowed


def test_readable_images_have_the_pixels_of_a_plain_conversion(hostile):
    folder, expected = hostile
    readable = {name: wanted for name, wanted in expected.items() if not isinstance(wanted, str)}
    images = {name: decode(folder / name, name) for name in readable}
    assert {image.mode for image in images.values()} == {"RGB"}
    assert [name for name, wanted in readable.items() if is_wrong(name, np.asarray(images[name]), wanted)] == []


def test_unreadable_images_say_which_and_why(hostile):
    folder, expected = hostile
    for name, reason in expected.items():
        if isinstance(reason, str):
            with pytest.raises(BadImage) as bad:
                decode(folder / name, f"key of {name}")
            assert bad.value.key == f"key of {name}"
            assert bad.value.reason.startswith(reason), (name, bad.value.reason)
            assert len(bad.value.reason) < 120


def test_bytes_and_streams_decode_as_files_do(hostile):
    folder, _ = hostile
    content = (folder / "rotated.jpg").read_bytes()
    from_file = np.asarray(decode(folder / "rotated.jpg", "f"))
    assert np.array_equal(decode(content, "b"), from_file)
    assert np.array_equal(decode(io.BytesIO(content), "s"), from_file)


def test_no_warning_reaches_the_screen_and_filters_are_restored(hostile):
    folder, expected = hostile
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        before = list(warnings.filters)
        for name in expected:
            with contextlib.suppress(BadImage):
                decode(folder / name, name)
        assert list(warnings.filters) == before
    assert caught == []


def test_filters_are_restored_after_many_threads(hostile):
    folder, _ = hostile
    before = list(warnings.filters)
    threads = [
        threading.Thread(target=lambda: [decode(folder / "palette_alpha.png", "x") for _ in range(30)])
        for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert list(warnings.filters) == before


def test_a_pixel_limit_is_applied_before_decoding():
    content = encoded(Image.fromarray(colour()), "PNG")
    assert decode(content, "k", max_pixels=24 * 16).size == (24, 16)
    with pytest.raises(BadImage, match="24x16 pixels, more than the limit of 383"):
        decode(content, "k", max_pixels=24 * 16 - 1)


def test_at_least_shrinks_a_large_jpeg_but_never_below():
    ramp = np.add.outer(np.arange(400), np.arange(640)) % 256
    picture = Image.fromarray(ramp.astype(np.uint8)).convert("RGB").resize((640, 400), Image.Resampling.BOX)
    content = encoded(picture, "JPEG", quality=95)
    sizes = {least: decode(content, "k", at_least=least).size for least in (None, 401, 200, 100, 50)}
    assert sizes == {None: (640, 400), 401: (640, 400), 200: (320, 200), 100: (160, 100), 50: (80, 50)}
    assert decode(encoded(picture, "PNG"), "k", at_least=50).size == (640, 400)


def test_at_least_changes_a_smooth_photograph_only_slightly():
    y, x = np.mgrid[:256, :256]
    smooth = (127 + 60 * np.sin(x / 40) + 60 * np.cos(y / 50)).astype(np.uint8)
    content = encoded(Image.fromarray(smooth).convert("RGB"), "JPEG", quality=95)
    small = np.asarray(decode(content, "k", at_least=64)).astype(int)
    reference = np.asarray(decode(content, "k").resize((64, 64), Image.Resampling.BOX)).astype(int)
    assert np.abs(small - reference).max() <= 3


def test_truncation_is_seen_at_a_reduced_size_too(hostile):
    folder, _ = hostile
    with pytest.raises(BadImage, match="truncated"):
        decode(folder / "truncated.jpg", "k", at_least=8)


@pytest.mark.parametrize("value", [0, 1, 128, 257, 32767, 32896, 65534, 65535])
def test_16_bit_grey_is_rounded_to_the_nearest_of_256_levels(value):
    pixel = to_rgb(Image.fromarray(np.full((1, 1), value, np.uint16))).getpixel((0, 0))
    assert pixel == (round(value * 255 / 65535),) * 3


def test_bad_image_survives_a_process_boundary():
    import pickle

    again = pickle.loads(pickle.dumps(BadImage("a.jpg", "truncated")))
    assert (again.key, again.reason, str(again)) == ("a.jpg", "truncated", "a.jpg: truncated")
