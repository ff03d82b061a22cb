"""A resumed run notices training images that were replaced, whatever their source, and nothing but their contents."""

from __future__ import annotations

import dataclasses
import gzip
import io
import json
import os
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from stopping import stop_after

import vitrail
from vitrail.cli import run as command
from vitrail.config import RunConfig, from_mapping
from vitrail.data.check import scan as scans
from vitrail.data.config import AugmentConfig, PreprocessConfig
from vitrail.data.open import open_data
from vitrail.data.pack import shrunk_copy
from vitrail.data.sources.folder import FileReader
from vitrail.data.sources.packed import pays_to_shrink, side_needed
from vitrail.engine import checkpoint
from vitrail.engine.device import ProcessGroup
from vitrail.engine.loop import Stopped
from vitrail.files import cache_folder
from vitrail.recipes import recipe
from vitrail.run import run_data
from vitrail.schema import parse_flags

TINY = (
    "--model.name vit_micro_28 --model.trunk.depth 1 --model.trunk.width 16 --model.trunk.heads 1 "
    "--data.workers 0 --data.loader host --data.augment.rand_ops 0 --data.batch 16 --optim.steps 4 --optim.warmup 0 "
    "--engine.evaluate_every 0 --engine.device cpu"
)
CHANGED = r"holds other training images than when the run began, the first that differs being {}; put them back"


def configured(flags: str) -> RunConfig:
    return from_mapping(parse_flags(f"{TINY} {flags}".split())[1], recipe("vit"))


def contents(uri: Path | str, check: str = "full") -> tuple[str, ...]:
    return run_data.read_data(configured(f"--data {uri} --data.check {check}"), ProcessGroup(), True)[0].contents


@pytest.fixture
def copied(photos: Path, tmp_path: Path) -> Path:
    shutil.copytree(photos, tmp_path / "photos")
    return tmp_path / "photos"


def stopped(flags: str, out: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    with monkeypatch.context() as patch:
        stop_after(2, patch)
        with pytest.raises(Stopped):
            vitrail.train(configured(f"{flags} --out {out}"), quiet=True)
    return out


def replace(path: Path, size: int | None = None) -> None:
    """Other pixels under the same name; padded to a size where one is given."""
    stream = io.BytesIO()
    Image.fromarray(np.random.default_rng(9).integers(0, 256, (8, 8, 3), np.uint8)).save(stream, "JPEG", quality=20)
    data = stream.getvalue()
    assert size is None or len(data) <= size
    path.write_bytes(data + bytes(max(0, (size or 0) - len(data))))


@pytest.mark.parametrize("check", ["full", "off"])
def test_a_replaced_image_is_named_on_resume(
    check: str, copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = stopped(f"--data {copied} --data.check {check}", tmp_path / "run", monkeypatch)
    key = open_data(copied)["train"].keys[7]
    before = (copied / key).read_bytes()
    replace(copied / key, len(before) if check == "full" else None)
    with pytest.raises(ValueError, match=CHANGED.format(key)):
        vitrail.resume(run, quiet=True)
    (copied / key).write_bytes(before)
    vitrail.resume(run, quiet=True)
    assert (run / "report.html").is_file()


def test_data_that_moved_or_were_copied_are_the_same(
    copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = stopped("--data photos", tmp_path / "run", monkeypatch)
    (tmp_path / "elsewhere").mkdir()
    shutil.move(copied, tmp_path / "elsewhere" / "photos")
    for path in (tmp_path / "elsewhere").rglob("*.jpg"):
        os.utime(path, (1, 1))
    replace(tmp_path / "elsewhere" / "photos" / open_data("elsewhere/photos")["val"].keys[0])  # not trained on
    monkeypatch.chdir(tmp_path / "elsewhere")
    vitrail.resume(run, quiet=True)
    assert (run / "report.html").is_file()


def test_a_checkpoint_of_an_earlier_version_has_no_contents(
    copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = stopped(f"--data {copied}", tmp_path / "run", monkeypatch)
    state, _ = checkpoint.newest(run / "checkpoint")
    assert state is not None
    assert len(state.facts.pop("contents")) == 48
    checkpoint.save(run / "checkpoint", state, 1)
    replace(copied / open_data(copied)["train"].keys[0])
    vitrail.resume(run, quiet=True)


def test_unreadable_images_and_the_number_of_threads_do_not_count(copied: Path, tmp_path: Path) -> None:
    data = open_data(copied)
    key = data["train"].keys[3]
    (copied / key).write_bytes(b"no image")
    once = configured(f"--data {copied} --data.bad_limit 0.5")
    first, bad = run_data.read_data(once, ProcessGroup(), True)
    assert [name for name, _ in bad] == [key]
    (copied / key).write_bytes(b"no image at all")
    assert run_data.read_data(once, ProcessGroup(), True)[0].contents == first.contents
    assert scans.examine(data, workers=1) == scans.examine(data, workers=3)


def test_of_many_files_a_sample_is_hashed_and_the_log_says_so(
    copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scans, "MOST_HASHED", 20)
    run = vitrail.train(configured(f"--data {copied} --out {tmp_path / 'run'}"), quiet=True)
    train = open_data(copied)["train"]
    _, digests = scans.examine(train)
    assert 10 < len(digests) < 30
    said = f"contents: {len(digests)} of 48 training images are hashed, for the comparison on resume"
    assert said in (run.path / "log.txt").read_text()
    before = contents(copied)
    hashed, other = (next(r for r in range(48) if (("train", int(train.index[r])) in digests) == h) for h in (1, 0))
    for row, changes in ((other, False), (hashed, True)):  # of equal size, so that the hash alone tells
        path = copied / train.keys[row]
        replace(path, path.stat().st_size)
        assert (contents(copied) != before) == changes


def test_of_more_than_a_thousand_images_the_group_is_named(monkeypatch: pytest.MonkeyPatch, copied: Path) -> None:
    monkeypatch.setattr(run_data, "GROUPS", 10)
    before, keys = contents(copied), open_data(copied)["train"].keys
    assert len(before) == 10
    replace(copied / keys[20])
    data, _ = run_data.read_data(configured(f"--data {copied}"), ProcessGroup(), True)
    with pytest.raises(ValueError, match=CHANGED.format(f"one from {keys[19]} to {keys[23]}")):
        run_data.check_contents(before, data, Path("run"))


def test_a_scan_remembered_by_an_earlier_version_is_used(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = contents(copied)
    cache = scans.cache_file(str(copied.absolute()))
    with gzip.open(cache, "rt") as stream:
        stored = json.load(stream)
    with gzip.open(cache, "wt") as stream:
        json.dump({**stored, "images": {path: fact[:3] for path, fact in stored["images"].items()}}, stream)
    assert contents(copied) == expected
    monkeypatch.setattr(scans, "decode", lambda *_, **__: pytest.fail("read again"))
    assert contents(copied) == expected


def arrays(folder: Path, changed: bool) -> Path:
    x = np.random.default_rng(0).integers(0, 256, (40, 8, 8, 3), np.uint8)
    x[0, 0, 0, 0] ^= changed
    np.savez(folder / "a.npz", x_train=x, y_train=np.arange(40) % 2, x_val=x, y_val=np.arange(40) % 2)
    return folder / "a.npz"


def encoded(i: int, changed: bool) -> bytes:
    """PNGs of equal size."""
    stream = io.BytesIO()
    Image.new("RGB", (4, 4), (i, 9 if changed and i == 0 else 7, 0)).save(stream, "PNG", compress_level=0)
    return stream.getvalue()


def tar(folder: Path, changed: bool) -> Path:
    for split in ("train", "val"):
        with tarfile.open(folder / f"{split}.tar", "w") as file:
            for i in range(12):
                for name, data in ((f"{i}.png", encoded(i, changed)), (f"{i}.cls", b"%d" % (i % 2))):
                    member = tarfile.TarInfo(name)
                    member.size = len(data)
                    file.addfile(member, io.BytesIO(data))
    return folder


def table(folder: Path, changed: bool) -> Path:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    images = [{"bytes": encoded(i, changed), "path": None} for i in range(12)]
    for split in ("train", "val"):
        pq.write_table(pa.table({"image": images, "label": [i % 2 for i in range(12)]}), folder / f"{split}.parquet")
    return folder


def packed(folder: Path, changed: bool) -> Path:
    assert command(["pack", str(arrays(folder, changed)), str(folder / "packed")]) == 0
    return folder / "packed"


@pytest.mark.parametrize("make", [arrays, tar, table, packed])
def test_every_source_has_contents(make: Callable[[Path, bool], Path], tmp_path: Path) -> None:
    found = []
    for name, changed in (("one", False), ("two", False), ("other", True)):
        (tmp_path / name).mkdir()
        found.append(contents(make(tmp_path / name, changed)))
    assert found[0] == found[1]  # wherever it is
    changed_groups = [i for i, (a, b) in enumerate(zip(found[0], found[2], strict=True)) if a != b]
    assert changed_groups == (list(range(40)) if make is packed else [0])  # the checksum is of a whole shard


def test_of_large_arrays_a_sample_is_hashed_and_packed_ones_have_their_checksums(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_data, "MOST_BYTES", 20 * 8 * 8 * 3)
    data, _ = run_data.read_data(configured(f"--data {arrays(tmp_path, False)}"), ProcessGroup(), True)
    assert any("of 40 training images are hashed" in note for note in data.notes)
    monkeypatch.setattr(run_data, "MOST_BYTES", 0)
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    assert contents(packed(tmp_path / "one", False)) != contents(packed(tmp_path / "other", True))


def test_images_that_are_drawn_have_no_contents() -> None:
    assert contents("synthetic:shapes?n=60&size=28") == ()


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """Photographs of 300 by 260 pixels, of which a network of 28 needs few."""
    for name, level in (("dark", 40), ("light", 160)):
        (tmp_path / "large" / name).mkdir(parents=True)
        for i in range(20):
            noise = np.random.default_rng([level, i]).integers(level, level + 60, (26, 30, 3), np.uint8)
            Image.fromarray(noise).resize((300, 260)).save(tmp_path / "large" / name / f"{i}.jpg")
    return tmp_path / "large"


def test_large_files_are_decoded_once_for_all_runs_and_a_replaced_one_again(
    large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = stopped(f"--data {large}", tmp_path / "run", monkeypatch)
    assert "decode: once" in (run / "config.yaml").read_text()
    copies = set((cache_folder() / "shrunk").iterdir())
    assert len(copies) == 2  # of train and val

    data, read = open_data(large), list[int]()
    rows = data["train"]
    copy = shrunk_copy(rows, 128)
    assert copy.labels.tolist() == rows.labels.tolist()
    for row in range(0, len(rows), 7):
        assert min(copy.read(row).size) == 128
        shrunk = rows.read(row).resize(copy.read(row).size, Image.Resampling.BICUBIC)
        assert np.abs(np.asarray(copy.read(row), float) - np.asarray(shrunk, float)).mean() < 2
    relabelled = shrunk_copy(dataclasses.replace(rows, labels=1 - rows.labels), 128)
    assert relabelled.reader.folder == copy.reader.folder  # type: ignore[attr-defined]

    monkeypatch.setattr(FileReader, "__call__", lambda self, i: read.append(i) or self.decoded(self.path(i), ""))
    vitrail.resume(run, quiet=True)
    assert set(read) == set(data["test"].index.tolist())
    assert vitrail.load(run).preprocess.reducing_gap == 2  # predictions from files need not decode all of them
    key = rows.keys[3]
    replace(large / key)
    old = min(copies)
    os.utime(old, (1, 1))  # not used for more than thirty days
    vitrail.train(configured(f"--data {large} --out {tmp_path / 'other'}"), quiet=True)
    assert len(set((cache_folder() / "shrunk").iterdir()) - copies) == 1
    assert not old.exists() or old.stat().st_mtime > 1  # val's is used again

    read.clear()
    vitrail.train(configured(f"--data {large} --data.decode always --out {tmp_path / 'always'}"), quiet=True)
    assert set(rows.index.tolist()) <= set(read)


def test_small_files_and_full_disks_have_no_copy(large: Path, photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert side_needed([AugmentConfig(crop="pad"), AugmentConfig(scale=(0.08, 1.0))], PreprocessConfig(size=100)) == 256
    assert pays_to_shrink(open_data(large)["train"], 128)
    assert not pays_to_shrink(open_data(large)["train"], 256)
    assert not pays_to_shrink(open_data(photos)["train"], 128)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=4_000_000))
    assert not pays_to_shrink(open_data(large)["train"], 128)


def test_where_no_copy_can_be_kept_files_are_decoded_in_every_epoch(
    large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("vitrail.data.pack.cache_folder", lambda: tmp_path / "file")
    run = vitrail.train(configured(f"--data {large} --out {tmp_path / 'run'}"), quiet=True)
    assert "decode: always" in (run.path / "config.yaml").read_text()
    assert vitrail.load(run.path).preprocess.reducing_gap is None
    with pytest.raises(OSError, match="Not a directory"):
        vitrail.train(configured(f"--data {large} --data.decode once --out {tmp_path / 'once'}"), quiet=True)
