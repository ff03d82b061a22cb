"""The binding of libnvjpeg, with a library that decodes by Pillow in its place: memory, rejection and threads."""

from __future__ import annotations

import ctypes
import io
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from vitrail.data import jpeg, nvjpeg
from vitrail.data.augment.host import Augment
from vitrail.data.config import AugmentConfig, PreprocessConfig
from vitrail.data.dataset import Split
from vitrail.data.jpeg import jpeg_decoder
from vitrail.data.loading import jpeg_loader
from vitrail.data.loading.jpeg_loader import JpegLoader
from vitrail.data.loading.loader import LoaderSpec
from vitrail.data.loading.sampler import BatchSampler
from vitrail.data.nvjpeg import NvJpeg, nvjpeg_library
from vitrail.data.open import open_source
from vitrail.data.preprocess import Preprocess

SIZES = ((40, 32), (17, 23), (8, 8), (33, 16), (9, 50))


class FakeLibrary:
    """Decodes by Pillow what it is not told to reject; no two calls of a handle may overlap."""

    def __init__(
        self, rejects: tuple[bytes, ...] = (), status: int = 4, create: int = 0, together: int = 1, state: int = 0
    ):
        self.rejects, self.status, self.create, self.state = rejects, status, create, state
        self.meeting = threading.Barrier(together)  # calls that wait for each other
        self.batches: dict[int, int] = {}
        self.calls: list[int] = []
        self.busy, self.living, self.made = set[int](), list[str](), 0

    def nvjpegCreateEx(self, backend, device_memory, host_memory, flags, handle):  # noqa: N802
        assert (backend, device_memory, host_memory, flags) == (3, None, None, 0)
        self.made += 1
        handle._obj.value = self.made
        self.living += [f"handle {self.made}"] if not self.create else []
        return self.create

    def nvjpegJpegStateCreate(self, handle, state):  # noqa: N802
        state._obj.value = 100 + handle.value
        return self.state

    def nvjpegDecodeBatchedInitialize(self, handle, state, count, threads, form):  # noqa: N802
        assert (state.value, form) == (100 + handle.value, 3)
        self.batches[state.value] = count
        return 0

    def nvjpegDecodeBatched(self, handle, state, data, lengths, images, stream):  # noqa: N802
        count = self.batches[state.value]
        self.calls.append(count)
        assert handle.value not in self.busy
        self.busy.add(handle.value)
        self.meeting.wait(20)
        addresses, sizes = ((ctypes.c_uint64 * count).from_address(each.value) for each in (data, lengths))
        planes = (ctypes.c_uint64 * (8 * count)).from_address(images.value)
        files = [ctypes.string_at(address, size) for address, size in zip(addresses, sizes, strict=True)]
        bad = any(file in self.rejects for file in files)
        for number, file in enumerate(files if not bad else ()):
            pixels = np.asarray(Image.open(io.BytesIO(file)))
            for channel in range(3):
                assert planes[8 * number + 4 + channel] == pixels.shape[1]
                plane = np.ascontiguousarray(pixels[..., channel])
                ctypes.memmove(planes[8 * number + channel], plane.ctypes.data, plane.size)
        self.busy.remove(handle.value)
        return self.status if bad else 0

    def nvjpegDestroy(self, handle):  # noqa: N802
        self.living.remove(f"handle {handle.value}")


def files(count: int = 5) -> list[bytes]:
    streams = [io.BytesIO() for _ in range(count)]
    for number, stream in enumerate(streams):
        coarse = np.random.default_rng(number).integers(0, 256, (4, 5, 3), dtype=np.uint8)
        image = Image.fromarray(coarse).resize(SIZES[number % 5], Image.Resampling.BICUBIC)
        image.save(stream, "JPEG", subsampling=0)
    return [stream.getvalue() for stream in streams]


def batch(data: list[bytes]) -> NDArray[np.int64]:
    """What a decoder is given, while the files live."""
    return np.array([(np.frombuffer(d, np.uint8).ctypes.data, len(d), *jpeg.jpeg_header(d)) for d in data])


def bytes_of(encoded: NDArray[np.int64]) -> int:
    return int(jpeg.first_bytes(encoded[:, 2:])[-1])


def test_a_batch_is_decoded_into_one_buffer_and_not_beyond_it():
    encoded = batch(data := files())
    ours, theirs = (torch.full((bytes_of(encoded) + 7,), 99, dtype=torch.uint8) for _ in range(2))
    library = FakeLibrary()
    assert NvJpeg(library)(encoded, ours) == []
    assert jpeg_decoder(torch.device("cpu"))(encoded, theirs[:-7]) == []
    assert torch.equal(ours, theirs)
    assert library.calls == [len(data)]


@pytest.mark.parametrize("bad", [(2,), (0, 4), (1, 2, 3), tuple(range(5))])
def test_images_at_fault_are_found_by_halving(bad):
    data = files()
    library = FakeLibrary(tuple(data[number] for number in bad))
    decoder, encoded = NvJpeg(library), batch(data)
    assert decoder(encoded, torch.zeros(bytes_of(encoded), dtype=torch.uint8)) == list(bad)
    if bad == (2,):
        assert library.calls == [5, 2, 3, 1, 2]
    if len(bad) < 5:
        good = batch([each for number, each in enumerate(data) if number not in bad])
        assert decoder(good, torch.zeros(bytes_of(good), dtype=torch.uint8)) == []


def test_what_is_no_fault_of_an_image_is_said_in_a_sentence():
    data = files()
    encoded = batch(data)
    with pytest.raises(RuntimeError, match=r"nvJPEG decodes no more \(no memory\); use --data\.loader host"):
        NvJpeg(FakeLibrary((data[0],), status=5))(encoded, torch.zeros(bytes_of(encoded), dtype=torch.uint8))


def test_without_engines_torchvision_decodes_and_one_sentence_says_so(monkeypatch):
    with pytest.raises(OSError, match=r"no JPEG engines here \(status 7\)"):
        NvJpeg(FakeLibrary(create=7))
    with pytest.raises(OSError, match=r"no memory for a decoder here \(status 5\)"):
        NvJpeg(library := FakeLibrary(state=5))
    assert library.living == []
    monkeypatch.setattr(torch.cuda, "device", lambda device: threading.Lock())  # any context
    monkeypatch.setattr(nvjpeg, "nvjpeg_library", lambda: FakeLibrary(create=7))
    with pytest.warns(UserWarning, match="decoded by torchvision, one batch at a time, since libnvjpeg opens no JPEG"):
        assert not isinstance(jpeg_decoder(torch.device("cuda", 0)), NvJpeg)
    monkeypatch.setattr(nvjpeg, "nvjpeg_library", FakeLibrary)
    assert isinstance(jpeg_decoder(torch.device("cuda", 0)), NvJpeg)


def test_the_library_of_the_packages_comes_before_that_of_the_system(monkeypatch, tmp_path):
    def opened(name: str) -> str:
        if name in missing:
            raise OSError(name)
        return name

    ours = [
        tmp_path / "torchvision.libs" / "libnvjpeg.12ab.so.13",
        tmp_path / "nvidia" / "cu13" / "lib/libnvjpeg.so.13",
    ]
    for file in ours:
        file.parent.mkdir(parents=True)
        file.touch()
    monkeypatch.setattr(nvjpeg, "torch", SimpleNamespace(__file__=str(tmp_path / "torch" / "__init__.py")))
    monkeypatch.setattr(nvjpeg.ctypes, "CDLL", opened)
    missing: list[str] = []
    for name in [*map(str, ours), "libnvjpeg.so.13", "libnvjpeg.so.12"]:
        assert nvjpeg_library.__wrapped__() == name
        missing.append(name)
    with pytest.raises(OSError, match="libnvjpeg is not installed"):
        nvjpeg_library.__wrapped__()


# in the loader


@pytest.fixture
def split(tmp_path: Path) -> Split:
    (tmp_path / "a").mkdir()
    for number, data in enumerate(files(12)):
        (tmp_path / "a" / f"{number:02d}.jpg").write_bytes(data)
    return open_source(str(tmp_path))["all"]


def loader(split: Split, stop: int = 9) -> JpegLoader:
    config = PreprocessConfig(size=16, crop_ratio=1.0)
    order, augment = BatchSampler(len(split), 4, 5), Augment(AugmentConfig(crop="resized"), config)
    return JpegLoader(LoaderSpec(split, order, augment, Preprocess(config), classes=1, seed=5, device="cpu", stop=stop))


def test_three_batches_are_decoded_at_the_same_time_and_come_in_order(split, monkeypatch):
    expected = list(loader(split))
    library = FakeLibrary(together=jpeg_loader.DECODERS)  # fewer would wait for ever
    monkeypatch.setattr(jpeg_loader, "jpeg_decoder", lambda device: NvJpeg(library))
    ours = list(loader(split))
    assert len(library.calls) == 9
    assert library.made == jpeg_loader.DECODERS == 3
    for a, b in zip(ours, expected, strict=True):
        assert a.step == b.step
        assert torch.equal(a.index, b.index)
        assert torch.equal(a.images, b.images)


def test_decoders_are_used_again_when_a_loader_is_closed(split, monkeypatch):
    library = FakeLibrary()
    monkeypatch.setattr(jpeg_loader, "jpeg_decoder", lambda device: NvJpeg(library))
    for _ in range(3):
        with loader(split, stop=50) as made:
            batches = iter(made)
            next(batches)
        batches.close()
    assert library.made == jpeg_loader.DECODERS
    both = NvJpeg(library), NvJpeg(library)
    assert both[0]._handle.value != both[1]._handle.value


def test_an_image_that_a_decoder_rejects_comes_from_the_host_ever_after(split, monkeypatch):
    expected = list(loader(split))
    library = FakeLibrary((files(12)[3],))
    monkeypatch.setattr(jpeg_loader, "jpeg_decoder", lambda device: NvJpeg(library))
    made = loader(split)
    ours = list(made)
    assert made.encoded.lookup(np.arange(12))[:, 0].tolist().count(jpeg.OF_HOST) == 1
    for a, b in zip(ours, expected, strict=True):
        assert torch.equal(a.images, b.images)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_engines_give_the_pixels_of_torchvision():
    from torchvision.io import ImageReadMode, decode_jpeg

    data, device = files(64), torch.device("cuda")
    encoded = batch(data)
    decoder = jpeg_decoder(device)
    if not isinstance(decoder, NvJpeg):
        pytest.skip("no JPEG engines")
    pixels = torch.empty(bytes_of(encoded), dtype=torch.uint8, device=device)
    assert decoder(encoded, pixels) == []
    stored = [torch.frombuffer(bytearray(each), dtype=torch.uint8) for each in data]
    images = decode_jpeg(stored, mode=ImageReadMode.RGB, device=device)
    apart = pixels.short() - torch.cat([image.flatten() for image in images]).short()
    assert int(apart.abs().max()) <= 3
