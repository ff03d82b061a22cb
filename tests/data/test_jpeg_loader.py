"""The JPEG loader gives the host loader's rows and the device policies' draws, whatever the images are."""

from __future__ import annotations

import io
import json
import sys
import tarfile
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from study_calls import call, script_module

from vitrail.config import RunConfig
from vitrail.data import jpeg, nvjpeg
from vitrail.data.augment.device_augment import DeviceAugment, draw
from vitrail.data.augment.flat_images import FlatImages
from vitrail.data.augment.host import Augment
from vitrail.data.batch import Batch, ViewSpec
from vitrail.data.config import AugmentConfig, DataConfig, PreprocessConfig
from vitrail.data.dataset import BadImage, DataSet, Split
from vitrail.data.jpeg import EncodedImages, jpeg_header
from vitrail.data.loading import jpeg_loader
from vitrail.data.loading.device_loader import DeviceEvalLoader, DeviceLoader
from vitrail.data.loading.jpeg_loader import JpegLoader, compared_with_host
from vitrail.data.loading.loader import EvalLoader, LoaderSpec, TrainLoader
from vitrail.data.loading.sampler import BatchSampler
from vitrail.data.open import open_data, open_source
from vitrail.data.preprocess import RESAMPLING, Preprocess, as_tensor
from vitrail.engine.device import ProcessGroup
from vitrail.model.build import create_model
from vitrail.run import data_module
from vitrail.run.data_module import ImageModule

SMALL = PreprocessConfig(size=16, crop_ratio=1.0)
CROP = AugmentConfig(crop="resized")
BUSY = AugmentConfig(crop="resized", three=True, rand_ops=2, jitter=0.3, erasing=0.5)
MIXED = replace(CROP, mixup=0.8, cutmix=1.0)
SEED = 5
CUDA = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")])
DEVICES = pytest.mark.parametrize("device", ["cpu", CUDA])


def picture(number: int, width: int = 40, height: int = 32) -> Image.Image:
    """Smooth, so that a decoder's rounding shows as little as in a photograph."""
    coarse = np.random.default_rng(number).integers(0, 256, (4, 5, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def encoded(image: Image.Image, form: str = "JPEG", **options) -> bytes:
    stream = io.BytesIO()
    # 4:4:4: accelerators interpolate subsampled colours in their own way, which is measured apart from the rest.
    image.save(stream, form, **({"quality": 92, "subsampling": 0} | options if form == "JPEG" else options))
    return stream.getvalue()


def exif(orientation: int) -> bytes:
    tags = Image.Exif()
    tags[0x0112] = orientation
    return tags.tobytes()


def written(folder: Path, files: dict[str, bytes]) -> Split:
    """Two classes; rows and stable indices are not the same thing."""
    for name, data in files.items():
        place = folder / "ab"[len(name) % 2] / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data)
    whole = open_source(str(folder))["all"]
    return whole.take(np.arange(len(whole))[::-1].copy())


@pytest.fixture
def photos_split(tmp_path: Path) -> Split:
    """Unequal sizes, some of them turned."""
    sizes = ((40, 32), (32, 40), (24, 24), (70, 20))
    return written(
        tmp_path / "photos",
        {f"{i:0{2 + i % 2}d}.jpg": encoded(picture(i, *sizes[i % 4]), exif=exif(1 + i % 8)) for i in range(13)},
    )


@pytest.fixture
def squares(tmp_path: Path) -> Split:
    return written(tmp_path / "squares", {f"{i:0{2 + i % 2}d}.jpg": encoded(picture(i)) for i in range(11)})


def train(augment: AugmentConfig, split: Split, batch: int = 4, kind=JpegLoader, preprocess=SMALL, **more):
    settings = {"classes": 2, "device": "cpu", "stop": 6} | more
    order = BatchSampler(len(split), batch, SEED, repeats=settings.pop("repeats", 1))
    images = [settings.pop("encoded")] if "encoded" in settings else []
    spec = LoaderSpec(split, order, Augment(augment, preprocess), Preprocess(preprocess), seed=SEED, **settings)
    return kind(spec, *images)


def batch_of(data: list[torch.Tensor], headers: list[tuple[int, int, int]]) -> np.ndarray:
    """What a decoder is given, while the tensors live."""
    return np.array([(each.data_ptr(), len(each), *header) for each, header in zip(data, headers, strict=True)])


def on_host(batches: list[Batch]) -> list[Batch]:
    return [batch.changed(lambda tensor: tensor.cpu()) for batch in batches]


def assert_close(ours: list[Batch], theirs: list[Batch], share: float = 0.0) -> None:
    """Equal but for pixels, of which a share may be one level apart: sums of other lengths round differently."""
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a.index, b.index)
        for x, y in zip(a.views, b.views, strict=True):
            apart = (x.to(torch.int16) - y.to(torch.int16)).abs()
            assert int(apart.max()) <= 1
            assert float((apart > 0).float().mean()) <= share


# order, draws and pixels


@DEVICES
@pytest.mark.parametrize("augment", [CROP, MIXED, BUSY])
def test_rows_labels_targets_and_indices_are_those_of_the_host_loader(augment, device, photos_split):
    settings = {"views": 2, "split": photos_split}
    ours = on_host(list(train(augment, device=device, **settings)))
    for a, b in zip(ours, train(augment, kind=TrainLoader, **settings), strict=True):
        assert a.step == b.step
        assert [view.shape for view in a.views] == [view.shape for view in b.views]
        assert torch.equal(a.index, b.index)
        assert torch.equal(a.label, b.label)
        torch.testing.assert_close(a.target, b.target)


def test_pixels_are_those_of_the_device_policies_on_each_image_alone(photos_split):
    change, order = DeviceAugment(CROP, SMALL), BatchSampler(len(photos_split), 4, SEED)
    apart = []
    for step, batch in enumerate(train(CROP, photos_split, views=2)):
        for place, drawn in enumerate(order.draws(step)):
            pixels = as_tensor(np.asarray(photos_split.read(drawn.row)))[None]
            for view in range(2):
                key = np.array([[SEED, drawn.epoch, int(photos_split.index[drawn.row]), view, drawn.repeat]])
                apart.append((change(pixels, key)[0].int() - batch.views[view][place].int()).abs())
    assert int(torch.stack(apart).max()) <= 1
    assert float((torch.stack(apart) > 0).float().mean()) < 1e-3


def test_draws_and_pixels_are_those_of_the_device_loader_for_images_of_one_size(squares):
    assert_close(list(train(CROP, squares, views=2)), list(train(CROP, squares, views=2, kind=DeviceLoader)), 1e-3)


@pytest.mark.parametrize("crop", ["simple", "pad"])
def test_windows_of_a_reflected_border_have_the_pixels_of_the_host(crop, photos_split):
    config = AugmentConfig(crop=crop, padding=3, flip=0.0)
    order = BatchSampler(len(photos_split), 4, SEED)
    for step, batch in enumerate(train(config, photos_split)):
        for place, drawn in enumerate(order.draws(step)):
            image = photos_split.read(drawn.row)
            key = np.array([[SEED, drawn.epoch, int(photos_split.index[drawn.row]), 0, drawn.repeat]])
            scale = 16 / min(image.size)
            short = image.resize((int(image.width * scale), int(image.height * scale)), RESAMPLING["bicubic"])
            columns = draw(config, 16, key, short.height, short.width).columns
            top, left = int(columns["crop_top"][0]) + 3, int(columns["crop_left"][0]) + 3
            padded = np.pad(np.asarray(short), ((3, 3), (3, 3), (0, 0)), mode="reflect")[
                top : top + 16, left : left + 16
            ]
            apart = np.abs(batch.views[0][place].permute(1, 2, 0).numpy().astype(int) - padded)
            assert apart.max() <= 1


@DEVICES
@pytest.mark.parametrize(
    ("interpolation", "most", "share"), [("bilinear", 2, 0.03), ("bicubic", 1, 0.02), ("lanczos", 1, 0.02)]
)
def test_a_crop_has_the_pixels_of_pillow_for_the_window_of_its_key(interpolation, most, share, device, photos_split):
    config, preprocess = replace(CROP, flip=0.0), replace(SMALL, interpolation=interpolation)
    order, how, all_apart = BatchSampler(len(photos_split), 4, SEED), RESAMPLING[interpolation], []
    for step, batch in enumerate(on_host(list(train(config, photos_split, preprocess=preprocess, device=device)))):
        for place, drawn in enumerate(order.draws(step)):
            image = photos_split.read(drawn.row)
            key = np.array([[SEED, drawn.epoch, int(photos_split.index[drawn.row]), 0, drawn.repeat]])
            box = draw(config, 16, key, image.height, image.width).columns
            top, left, height, width = (int(box[f"crop_{side}"][0]) for side in ("top", "left", "height", "width"))
            window = image.crop((left, top, left + width, top + height))
            expected = np.asarray(window.resize((16, height), how).resize((16, 16), how)).astype(int)
            apart = np.abs(batch.views[0][place].permute(1, 2, 0).numpy() - expected)
            all_apart.append(apart)
    # As for the device policies, which Pillow's fixed point rounds off a half in either pass: of bilinear weights many
    # sums are halves. Decoders of an accelerator differ by a few levels themselves.
    assert np.max(all_apart) <= (most if device == "cpu" else 8)
    assert device == "cuda" or (np.array(all_apart) > 0).mean() < share


@pytest.mark.parametrize("crop", ["resized", "simple"])
def test_pixels_do_not_depend_on_how_windows_are_grouped(crop, photos_split, monkeypatch):
    whole = list(train(AugmentConfig(crop=crop), photos_split, batch=13))
    monkeypatch.setattr("vitrail.data.augment.flat_images.TOGETHER", 2)
    monkeypatch.setattr("vitrail.data.augment.flat_images._MOST_BYTES", 12 * 40 * 30)
    assert_close(list(train(AugmentConfig(crop=crop), photos_split, batch=13)), whole, 1e-3)


@DEVICES
@pytest.mark.parametrize("orientation", range(1, 9))
def test_every_orientation_comes_upright(orientation, device, tmp_path):
    split = written(tmp_path, {"0.jpg": encoded(picture(3, 20, 12), exif=exif(orientation))})
    upright = as_tensor(np.asarray(split.read(0)))
    data, header = EncodedImages(split, "cpu").get(0)
    assert header == (12, 20, orientation)
    pixels = torch.empty(3 * 12 * 20, dtype=torch.uint8, device=device)
    assert jpeg.jpeg_decoder(torch.device(device))(batch_of([data], [header]), pixels) == []
    images = FlatImages(pixels, np.array([0]), np.array([[12, 20, orientation]]))
    height, width = upright.shape[1:]
    assert images.sizes.tolist() == [[height], [width]]
    for top, left in ((0, 0), (height - 12, width - 12)):
        window = images.resampled(np.array([[top], [left], [12], [12]], float), 12, "nearest")
        apart = (window[0].cpu() - upright[:, top : top + 12, left : left + 12].float()).abs().max()
        assert float(apart) <= (0 if device == "cpu" else 8)


def test_a_resumed_run_sees_the_same_pixels(photos_split):
    for repeat in range(2):
        whole = list(train(BUSY, photos_split, views=2, accumulate=2, stop=7))
        resumed = list(train(BUSY, photos_split, views=2, accumulate=2, start=3, stop=7))
        assert [batch.step for batch in resumed] == [3, 3, 4, 4, 5, 5, 6, 6]
        for a, b in zip(resumed, whole[6:], strict=True):
            assert all(torch.equal(x, y) for x, y in zip(a.views, b.views, strict=True)), repeat


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_resumed_run_on_an_accelerator_sees_the_same_pixels(photos_split):
    whole = on_host(list(train(BUSY, photos_split, views=2, stop=40, device="cuda")))
    for start in (0, 7):
        resumed = on_host(list(train(BUSY, photos_split, views=2, start=start, stop=40, device="cuda")))
        for a, b in zip(resumed, whole[start:], strict=True):
            assert all(torch.equal(x, y) for x, y in zip(a.views, b.views, strict=True))


def test_ranks_and_pieces_partition_the_global_batch(photos_split):
    whole = list(train(CROP, photos_split, batch=8, stop=3))
    ranks = [list(train(CROP, photos_split, batch=8, stop=3, rank=r, world=2, accumulate=2)) for r in range(2)]
    for step in range(3):
        pieces = [batch for rank in ranks for batch in rank[2 * step : 2 * step + 2]]
        merged = torch.cat([piece.views[0] for piece in pieces])
        assert torch.equal(torch.cat([piece.index for piece in pieces]), whole[step].index)
        assert int((merged.int() - whole[step].views[0].int()).abs().max()) <= 1


def test_an_image_is_decoded_once_a_batch_for_all_views_and_repeats(photos_split, monkeypatch):
    counts = []

    def counted(device, made=jpeg.jpeg_decoder):
        decode = made(device)
        return lambda data, pixels: counts.append(len(data)) or decode(data, pixels)

    monkeypatch.setattr(jpeg_loader, "jpeg_decoder", counted)
    batches = list(train(CROP, photos_split, batch=6, views=3, repeats=2, stop=2))
    assert counts == [3, 3]
    for batch in batches:
        assert len(batch.views) == 3
        assert not torch.equal(batch.views[0], batch.views[1])
        index = batch.index.tolist()
        first, second = (n for n, i in enumerate(index) if i == index[0])
        assert not torch.equal(batch.views[0][first], batch.views[0][second])


# what the accelerator does not decode


def unusual() -> dict[str, bytes]:
    photo = picture(1)
    adobe_rgb = encoded(photo, keep_rgb=True)
    return {
        "00.png": encoded(photo, "PNG"),
        "001.jpg": encoded(photo.convert("CMYK")),
        "02.jpg": encoded(photo.convert("L")),
        "003.jpg": adobe_rgb,
        "04.jpg": encoded(photo)[:-200],
        "005.jpg": b"",
        "06.jpg": b"\xff\xd8\xff\xd9",
        "007.jpg": encoded(photo) + b"\0\0",
        "08.jpg": b"no image at all",
    }


@DEVICES
def test_what_the_accelerator_does_not_decode_comes_from_the_host_or_is_skipped_as_there(device, tmp_path):
    split = written(tmp_path, unusual() | {"09.jpg": encoded(picture(9)), "010.jpg": encoded(picture(10))})
    (tmp_path / "a" / "09.jpg").unlink(missing_ok=True)
    (tmp_path / "b" / "09.jpg").unlink(missing_ok=True)
    images = EncodedImages(split, "cpu")
    decoded_there = [Path(split.keys[row]).name for row in range(len(split)) if images.get(row) is not None]
    assert decoded_there == ["010.jpg"]
    ours, theirs = train(CROP, split, batch=11, device=device), train(CROP, split, batch=11, kind=TrainLoader)
    for a, b in zip(on_host(list(ours)), theirs, strict=True):
        assert torch.equal(a.index, b.index)
        assert len(a) == 6
    assert sorted(ours.skipped) == sorted(theirs.skipped)
    assert {reason for _, reason in ours.skipped} >= {"truncated", "empty file", "no such file", "not an image"}


def test_pixels_from_the_host_are_those_of_its_decoder(tmp_path):
    files = {name: data for name, data in unusual().items() if name in ("00.png", "001.jpg", "02.jpg", "003.jpg")}
    split = written(tmp_path, files)
    change = DeviceAugment(CROP, SMALL)
    (batch,) = train(CROP, split, stop=1)
    for place, drawn in enumerate(BatchSampler(4, 4, SEED).draws(0)):
        pixels = as_tensor(np.asarray(split.read(drawn.row)))[None]
        expected = change(pixels, np.array([[SEED, drawn.epoch, int(split.index[drawn.row]), 0, drawn.repeat]]))
        assert int((batch.views[0][place].int() - expected[0].int()).abs().max()) <= 1


def test_headers_of_what_an_accelerator_decodes():
    photo = picture(1, 40, 32)
    assert jpeg_header(encoded(photo)) == (32, 40, 1)
    assert jpeg_header(encoded(photo, progressive=True, exif=exif(6))) == (32, 40, 6)
    wide = bytearray(encoded(photo))
    at = wide.index(b"\xff\xc0")
    wide[at + 4] = 12  # bits
    assert jpeg_header(bytes(wide)) is None
    wide[at + 4 : at + 9] = b"\x08\xff\xff\xff\xff"  # more pixels than are allowed
    assert jpeg_header(bytes(wide)) is None
    plain = encoded(photo)
    frame = plain[at : at + 2 + int.from_bytes(plain[at + 2 : at + 4])]
    for marker in (0xC0, 0xC2, 0xC9):  # a second one: decoders may differ in which of two sizes they take
        assert jpeg_header(plain[:at] + bytes([0xFF, marker]) + frame[2:] + plain[at:]) is None
    for cut in range(2, at + 20):
        assert jpeg_header(encoded(photo)[:cut] + b"\xff\xd9") is None


def test_colours_are_told_apart_as_libjpeg_does():
    plain = encoded(picture(1)).replace(b"JFIF\0", b"none\0")

    def marked(transform: int) -> bytes:
        return plain[:2] + b"\xff\xee\x00\x0eAdobe" + bytes([0, 100, 0, 0, 0, 0, transform]) + plain[2:]

    for data in (plain, marked(0), marked(1)):
        with Image.open(io.BytesIO(data)) as image:
            assert image.mode == "RGB"
    ycc, rgb = (np.asarray(Image.open(io.BytesIO(marked(transform)))) for transform in (1, 0))
    assert not np.array_equal(ycc, rgb)
    assert jpeg_header(plain) == jpeg_header(marked(1)) == (32, 40, 1)
    assert jpeg_header(marked(0)) is None


@pytest.mark.parametrize("answer", [None, torch.zeros(3, 8, 8, dtype=torch.uint8)])
def test_an_image_that_the_decoder_rejects_comes_from_the_host_ever_after(squares, monkeypatch, answer):
    asked, first = [], EncodedImages(squares, "cpu").get(0)[0].clone()

    def counted(device, made=jpeg.jpeg_decoder):
        decode = made(device)
        return lambda data, pixels: asked.append(len(data)) or decode(data, pixels)

    monkeypatch.setattr(jpeg_loader, "jpeg_decoder", counted)
    monkeypatch.setattr(jpeg_loader, "DECODERS", 1)
    decoded = jpeg._by_pillow
    monkeypatch.setattr(jpeg, "_by_pillow", lambda data: answer if torch.equal(data, first) else decoded(data))
    ours = list(train(CROP, squares, batch=11, stop=3))
    assert asked == [11, 10, 10, 10]  # the first batch once more
    monkeypatch.undo()
    assert_close(ours, list(train(CROP, squares, batch=11, stop=3)))


@pytest.mark.parametrize("installed", [False, True])
@pytest.mark.filterwarnings("ignore:JPEG is decoded by torchvision")
def test_of_a_batch_that_nvjpeg_rejects_the_one_at_fault_is_found(installed, monkeypatch):
    calls = []

    def decode_jpeg(images, mode, device):
        calls.append(len(images))
        assert (mode, device) == ("colour", torch.device("cuda", 1))
        if any(len(image) == 3 for image in images):
            raise RuntimeError("Error while decoding JPEG images")
        return [image[:1].expand(3, 1, 1) for image in images]

    here = SimpleNamespace(decode_jpeg=decode_jpeg, ImageReadMode=SimpleNamespace(RGB="colour"))
    monkeypatch.setitem(sys.modules, "torchcodec", here if installed else None)
    monkeypatch.setitem(sys.modules, "torchcodec.decoders", here if installed else None)
    if not installed:
        monkeypatch.setitem(sys.modules, "torchvision.io", here)
    monkeypatch.setattr(nvjpeg, "nvjpeg_library", lambda: None)
    decode = jpeg.jpeg_decoder(torch.device("cuda", 1))
    images = [torch.full((length,), length, dtype=torch.uint8) for length in (2, 3, 4)]
    pixels = torch.zeros(6, dtype=torch.uint8)
    assert decode(batch_of(images, [(1, 1, 1)] * 3), torch.zeros(9, dtype=torch.uint8)) == [1]
    assert calls == [3, 1, 1, 1]
    assert decode(batch_of([images[0], images[2]], [(1, 1, 1)] * 2), pixels) == []
    assert pixels.tolist() == [2, 2, 2, 4, 4, 4]
    assert calls[4:] == [2]


def test_images_inside_tar_files_are_decoded_there_and_arrays_are_not(squares, tmp_path):
    with tarfile.open(tmp_path / "photos.tar", "w") as tar:
        for key in squares.keys:
            tar.add(Path(squares.reader.root) / key, key)
    inside = EncodedImages(open_source(str(tmp_path / "photos.tar"))["all"], "cpu")
    assert inside.share() == 1
    assert inside.get(0)[1] == (32, 40, 1)
    assert EncodedImages(open_data("synthetic:shapes?n=60&size=32")["train"], "cpu").share() == 0


def test_a_batch_of_which_nothing_can_be_read_names_an_image(tmp_path):
    split = written(tmp_path, {f"{i:0{1 + i}d}.jpg": b"none" for i in range(4)})
    with pytest.raises(ValueError, match=r"none of the 2 images .*\.jpg \(not an image\)"):
        list(train(CROP, split, batch=2))


def test_the_evaluation_crop_is_refused_in_a_sentence(squares):
    with pytest.raises(ValueError, match=r"--data\.loader host"):
        train(AugmentConfig(crop="evaluation"), squares)


# threads and memory


@dataclass(frozen=True)
class Failing:
    """A reader with a fault of its own."""

    def __call__(self, index: int) -> Image.Image:
        raise ZeroDivisionError("of the reader") if index == 2 else BadImage("x", "y")


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("vitrail-")]


@DEVICES
def test_an_exception_of_a_thread_arrives_with_the_name_of_the_image(device, squares):
    split = replace(squares, reader=Failing())
    with pytest.raises(RuntimeError, match=rf"{split.keys[8]} could not be decoded: of the reader"):
        list(train(CROP, split, batch=11, device=device))
    assert threads() == []


@DEVICES
def test_no_thread_is_left_behind(device, squares):
    batches = iter(train(CROP, squares, device=device, stop=50))
    next(batches)
    assert threads() != []
    del batches
    assert threads() == []
    with train(CROP, squares, device=device, stop=50) as loader:
        batches = iter(loader)
        next(batches)
    assert threads() == []
    assert len(list(train(CROP, squares, device=device))) == 6
    assert threads() == []


def test_only_a_few_batches_are_made_ahead(squares, monkeypatch):
    made = []
    decoded = JpegLoader._decoded
    monkeypatch.setattr(
        JpegLoader, "_decoded", lambda self, *given: made.append(given[1].step) or decoded(self, *given)
    )
    loader = train(CROP, squares, stop=50)
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    loader.close()
    assert max(made) < 3 + jpeg_loader.AHEAD * jpeg_loader.DECODERS


def test_images_are_read_once_as_far_as_memory_is_given(squares, monkeypatch):
    read = []
    monkeypatch.setattr(jpeg, "_encoded", lambda split, row, get=jpeg._encoded: read.append(row) or get(split, row))
    monkeypatch.setattr(jpeg, "_CHUNK", 3000)
    data = [(Path(squares.reader.root) / key).read_bytes() for key in squares.keys]
    assert sum(map(len, data)) > 6000 > 2 * max(map(len, data))
    for most, again in ((0, 11), (3000, None), (10**9, 0)):
        images = EncodedImages(squares, "cpu", most)
        for _ in range(2):
            read.clear()
            for row, stored in enumerate(data):
                tensor, header = images.get(row)
                assert bytes(tensor.numpy()) == stored
                assert header == (32, 40, 1)
        assert len(read) == again if again is not None else 0 < len(read) < 11
    twice = EncodedImages(squares.take([0, 1, 0, 0]), "cpu")
    read.clear()
    assert [twice.get(row)[1] for row in range(4)] == [(32, 40, 1)] * 4
    assert read == [0, 1]


def test_many_rows_are_looked_up_at_once(squares):
    images = EncodedImages(squares.take([3, 4, 3, 7, 9]), "cpu")
    assert (images.lookup(np.arange(5))[:, 0] < 0).all()
    images.get(0)
    images.get(3)
    images.reject(4)
    table = images.lookup(np.arange(5))
    assert [state >= 0 for state in table[:, 0]] == [True, False, True, True, False]
    for row in (0, 2, 3):
        data, header = images.get(row)
        assert (data.data_ptr(), len(data), *header) == tuple(table[row, 1:])


# in a run


def module(
    data: DataSet, loader: str = "auto", device: str = "cpu", group: ProcessGroup | None = None, **augment
) -> ImageModule:
    model = create_model("vit_tiny_32", classes=data.classes, depth=1, width=32, heads=2)
    chosen = DataConfig(loader=loader, workers=0, batch=4, augment=AugmentConfig(**augment))
    made = ImageModule(RunConfig(data=chosen), data, model, torch.device("cpu"), group or ProcessGroup())
    made.device = torch.device(device)
    made.prepare(ViewSpec(), BatchSampler(len(data["train"]), 4, 0))
    return made


@pytest.fixture
def data(photos: Path) -> DataSet:
    return open_data(photos)


def test_a_run_trains_by_it_and_evaluates_with_the_pixels_of_the_host(data):
    made = module(data, "jpeg")
    assert made.notes == ()
    with made.batches(0, 3) as loader:
        assert isinstance(loader, JpegLoader)
        assert len(list(loader)) == 3
        assert made.batches(0, 1).encoded is loader.encoded
    ours, theirs = made.evaluation("val"), module(data, "host").evaluation("val")
    assert isinstance(ours, DeviceEvalLoader)
    assert type(theirs) is EvalLoader
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a.images, b.images)


@pytest.mark.parametrize(
    ("fits", "share", "faster", "crop", "chosen", "reason"),
    [
        (True, 1.0, True, "resized", "device", "fit"),
        (False, 1.0, True, "resized", "jpeg", "5 images/s"),
        (False, 1.0, False, "resized", "host", "5 images/s"),
        (False, 0.5, True, "resized", "host", "50 %"),
        (False, 1.0, True, "evaluation", "host", "do not fit on cuda"),
    ],
)
def test_auto_takes_what_fits_and_what_is_faster_and_says_why(
    data, monkeypatch, fits, share, faster, crop, chosen, reason
):
    monkeypatch.setattr(data_module, "fits", lambda *_: fits)
    monkeypatch.setattr(EncodedImages, "share", lambda self: share)
    monkeypatch.setattr(jpeg_loader, "compared_with_host", lambda *_: (faster, "5 images/s"))
    made = module(data, device="cuda", crop=crop)
    assert made.config.data.loader == chosen
    assert len(made.notes) == 1
    assert chosen in made.notes[0]
    assert reason in made.notes[0]
    assert (made.encoded is not None) == (chosen == "jpeg")


def test_auto_takes_the_host_where_the_accelerator_decodes_no_jpeg_or_processes_would_have_to_agree(data, monkeypatch):
    def without_nvjpeg(*_):
        raise RuntimeError("decode_jpegs_cuda: torchvision not compiled with nvJPEG support\nmore")

    monkeypatch.setattr(data_module, "fits", lambda *_: False)
    monkeypatch.setattr(EncodedImages, "share", lambda self: 1.0)
    monkeypatch.setattr(jpeg_loader, "compared_with_host", without_nvjpeg)
    made = module(data, device="cuda")
    assert made.config.data.loader == "host"
    assert made.notes[0].endswith("decodes no JPEG (decode_jpegs_cuda: torchvision not compiled with nvJPEG support)")
    made = module(data, device="cuda", group=ProcessGroup(world=2))
    assert made.config.data.loader == "host"
    assert "several processes do not measure" in made.notes[0]


def test_auto_on_a_processor_takes_the_host_where_images_do_not_fit(data, monkeypatch):
    monkeypatch.setattr(data_module, "fits", lambda *_: False)
    made = module(data)
    assert made.config.data.loader == "host"
    assert type(made.batches(0, 1)) is TrainLoader


def test_a_share_counts_what_an_accelerator_decodes(squares, tmp_path):
    assert EncodedImages(squares, "cpu").share() == 1
    mixed = written(tmp_path / "more", {"0.jpg": encoded(picture(0)), "1.png": encoded(picture(1), "PNG")})
    assert EncodedImages(mixed, "cpu").share() == 0.5


def test_the_comparison_with_the_host_gives_both_speeds(photos_split):
    spec = train(CROP, photos_split).spec
    faster, speeds = compared_with_host(spec, EncodedImages(photos_split, "cpu"))
    assert isinstance(faster, bool)
    assert "images/s" in speeds
    assert threads() == []


# the benchmark


BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "jpeg.py"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize(("subsampling", "mean", "most"), [(0, 1.0, 4.0), (2, 3.0, 24.0)])
def test_decoders_of_an_accelerator_and_of_the_host_give_nearly_the_same_pixels(subsampling, mean, most):
    images = [encoded(picture(i, 160, 120), subsampling=subsampling) for i in range(16)]
    apart = script_module(BENCHMARK, "jpeg_benchmark").pixel_difference(images, torch.device("cuda"))
    assert apart[0] < mean
    assert apart[1] <= most
    assert apart == script_module(BENCHMARK, "jpeg_benchmark").pixel_difference(images, torch.device("cuda"))


def test_the_difference_of_pixels_is_none_where_both_are_decoded_by_the_host():
    images = [encoded(picture(i)) for i in range(3)]
    assert script_module(BENCHMARK, "jpeg_benchmark").pixel_difference(images, torch.device("cpu")) == (0, 0)


@pytest.mark.slow
def test_the_benchmark_compares_all_loaders(tmp_path):
    call(BENCHMARK, "--smoke", "--json", str(tmp_path / "rows.jsonl"))
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    ways = ["synthetic", "host", "timm", "jpeg", "decode only, jpeg", "pixels 4:4:4", "pixels 4:2:0"]
    assert [row["way"] for row in rows] == ways
    assert all(row["images_per_second"] > 0 for row in rows[:5])
    assert list(rows[3]["milliseconds"]) == ["decode call", "rest of the decode stage", "augment stage"]
    assert all(ms > 0 for ms in rows[3]["milliseconds"].values())
