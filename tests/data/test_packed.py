"""A packed set is its source, decoded once: same pixels, same splits; nothing killed or damaged passes for whole."""

from __future__ import annotations

import csv
import errno
import json
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hostile import make_hostile
from PIL import Image
from torchvision.transforms import InterpolationMode
from torchvision.transforms.functional import resize

from vitrail.cli import run
from vitrail.data import pack as shard
from vitrail.data.augment.host import Augment
from vitrail.data.check.scan import drop_bad, scan
from vitrail.data.config import AugmentConfig, PreprocessConfig
from vitrail.data.dataset import BadImage, DataSet, Split
from vitrail.data.decode import decode
from vitrail.data.loading.loader import LoaderSpec, TrainLoader
from vitrail.data.loading.sampler import BatchSampler
from vitrail.data.open import open_data, open_source
from vitrail.data.pack import PackReport, pack
from vitrail.data.preprocess import Preprocess
from vitrail.data.sources.packed import PackedReader, verify

SMALL_SHARD = 12_000  # bytes: a few of the images below


def picture(path: Path, width: int = 24, height: int = 20, seed: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng([seed, width, height]).integers(0, 256, (height, width, 3), np.uint8)
    Image.fromarray(pixels).save(path)
    return path


def tree(root: Path, sizes: dict[str, int], suffix: str = ".png") -> Path:
    for c, (name, count) in enumerate(sizes.items()):
        for i in range(count):
            picture(root / name / f"{i}{suffix}", seed=100 * c + i)
    return root


def packed(uri: str | Path, out: Path, size: int = 0, **options) -> PackReport:
    return pack(open_source(str(uri)), out, size, 2, **options)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.name != ".lock"}


def touched(folder: Path) -> dict[str, tuple[int, int]]:
    return {p.name: (p.stat().st_ino, p.stat().st_mtime_ns) for p in folder.iterdir() if p.suffix == ".bin"}


def same(one: DataSet, other: DataSet) -> None:
    """Everything but pixels, reader and notes is equal."""
    assert (one.classes, one.levels, one.multilabel) == (other.classes, other.levels, other.multilabel)
    assert list(one.splits) == list(other.splits)
    for name, split in one.splits.items():
        assert list(split.keys) == list(other[name].keys)
        for field in ("index", "labels", "levels", "generated"):
            np.testing.assert_array_equal(getattr(split, field), getattr(other[name], field))


# pixels


@pytest.mark.parametrize("suffix", [".png", ".jpg"])
def test_pixels_are_those_of_decoding_and_torchvisions_antialiased_resize(tmp_path, suffix):
    for i, (width, height) in enumerate([(40, 30), (30, 40), (33, 33), (90, 16), (17, 50), (15, 60), (16, 16)]):
        picture(tmp_path / f"photos/{'ab'[i % 2]}/{i}{suffix}", width, height)
    packed(tmp_path / "photos", tmp_path / "packed", size=16)
    split = open_source(str(tmp_path / "packed"))["all"]
    assert len(split) == 7
    for row, key in enumerate(split.keys):
        image = decode(tmp_path / "photos" / key, key)
        if min(image.size) > 16:
            image = resize(image, 16, InterpolationMode.BICUBIC, antialias=True)
        np.testing.assert_array_equal(np.asarray(split.read(row)), np.asarray(image))
        assert split.read(row).mode == "RGB"


@pytest.mark.parametrize("size", [0, 24, 1000])
def test_images_that_are_small_enough_are_kept_as_decoded(tmp_path, size):
    root = tree(tmp_path / "photos", {"a": 3, "b": 3}, ".jpg")
    packed(root, tmp_path / "packed", size)
    split = open_source(str(tmp_path / "packed"))["all"]
    for row, key in enumerate(split.keys):
        np.testing.assert_array_equal(np.asarray(split.read(row)), np.asarray(Image.open(root / key).convert("RGB")))


def test_odd_images_come_out_as_decode_gives_them_and_bad_ones_are_listed_with_reasons(tmp_path):
    expected = make_hostile(tmp_path / "photos/odd")
    bad = {f"odd/{name}": reason for name, reason in expected.items() if isinstance(reason, str)}
    tree(tmp_path / "photos", {"even": 3})
    report = packed(tmp_path / "photos", tmp_path / "packed", shard_bytes=SMALL_SHARD)
    listed = {key: reason for _, key, reason in report.skipped}
    split = open_source(str(tmp_path / "packed"))["all"]
    listed_keys = {key for key in split.keys if key in bad}
    assert listed_keys
    assert set(listed) == listed_keys
    assert all(listed[key].startswith(bad[key]) for key in listed)
    assert report.images == len(split) - len(listed)
    stored = json.loads((tmp_path / "packed/pack.json").read_text())["splits"][0]["skipped"]
    assert {key: reason for _, key, reason in stored} == listed
    source = open_source(str(tmp_path / "photos"))["all"]
    for row, key in enumerate(split.keys):
        if key in listed:
            with pytest.raises(BadImage) as error:
                split.read(row)
            assert (error.value.key, error.value.reason) == (key, listed[key])
        else:
            np.testing.assert_array_equal(np.asarray(split.read(row)), np.asarray(source.read(row)))


def test_boxes_are_scaled_with_the_image_and_rounded_outwards(tmp_path):
    uri = "synthetic:shapes?n=20&size=64"
    packed(uri, tmp_path / "whole", size=64)
    packed(uri, tmp_path / "half", size=32)
    source, whole, half = (open_data(u) for u in (uri, tmp_path / "whole", tmp_path / "half"))
    for name, split in source.splits.items():
        assert split.boxes is not None
        np.testing.assert_array_equal(whole[name].boxes, split.boxes)
        left, top, right, bottom = split.boxes.T
        np.testing.assert_array_equal(half[name].boxes.T, [left // 2, top // 2, (right + 1) // 2, (bottom + 1) // 2])


# splits


def undivided(root: Path) -> Path:
    return tree(root, {"a": 17, "b": 25, "c": 8})


def divided(root: Path) -> Path:
    tree(root / "train", {"a": 12, "b": 14})
    tree(root / "test", {"a": 3, "b": 2})
    return root


def table(root: Path) -> Path:
    tree(root, {"x": 30})
    rows = [(f"x/{i}.png", ("red", "blue", "red|blue", "green|")[i % 4], ("warm", "cold")[i % 2]) for i in range(30)]
    with (root / "labels.csv").open("w", newline="") as stream:
        csv.writer(stream).writerows([("path", "label", "coarse"), *rows])
    return root / "labels.csv"


def partly_generated(root: Path) -> Path:
    tree(root, {"x": 30})
    rows = [(f"x/{i}.png", ("red", "blue")[i % 2], int(i % 3 == 0)) for i in range(30)]
    with (root / "labels.csv").open("w", newline="") as stream:
        csv.writer(stream).writerows([("path", "label", "generated"), *rows])
    return root / "labels.csv"


def arrays(root: Path) -> Path:
    root.mkdir()
    random = np.random.default_rng(0)
    parts = {f"x_{s}": random.integers(0, 256, (n, 8, 8, 3), np.uint8) for s, n in (("train", 40), ("test", 10))}
    labels = {f"y_{s}": np.arange(n) % 3 for s, n in (("train", 40), ("test", 10))}
    np.savez(root / "a.npz", **parts, **labels, coarse_train=np.arange(40) % 2, coarse_test=np.arange(10) % 2)
    return root / "a.npz"


def with_unreadable(root: Path) -> Path:
    undivided(root)
    for name in ("a/3.png", "a/4.png", "b/0.png", "c/7.png", "b/24.png"):
        (root / name).write_bytes((root / name).read_bytes()[:100])
    return root


@pytest.mark.parametrize("make", [undivided, divided, table, partly_generated, arrays, with_unreadable])
@pytest.mark.parametrize("limit", [None, 20])
def test_a_packed_set_is_divided_exactly_as_its_source(tmp_path, make, limit):
    uri = make(tmp_path / "source")
    packed(uri, tmp_path / "packed", shard_bytes=SMALL_SHARD)
    for seed in (0, 7):
        options = {"val_fraction": 0.2, "split_seed": seed, "limit": limit}
        source = open_data(uri, **options)
        bad = scan(source)
        if make is with_unreadable and limit is None:
            assert len(bad) == 5
        same(open_data(tmp_path / "packed", **options), drop_bad(source, bad))


def test_a_packed_set_tells_generated_images_from_real_ones(tmp_path):
    packed(partly_generated(tmp_path / "source"), tmp_path / "packed")
    whole = open_source(str(tmp_path / "packed"))["all"]
    assert {key for key, made in zip(whole.keys, whole.generated, strict=True) if made} == {
        f"x/{i}.png" for i in range(0, 30, 3)
    }


def test_training_batches_are_those_of_the_source(tmp_path):
    uri = undivided(tmp_path / "source")
    packed(uri, tmp_path / "packed")
    preprocess = PreprocessConfig(size=16)

    def batches(data: DataSet) -> list[np.ndarray]:
        split = data["train"]
        with TrainLoader(
            LoaderSpec(
                split,
                BatchSampler(len(split), 8, 0),
                Augment(AugmentConfig(), preprocess),
                Preprocess(preprocess),
                classes=3,
                multilabel=False,
                seed=1,
                device="cpu",
                workers=0,
                start=0,
                stop=3,
            )
        ) as loader:
            return [batch.images.numpy() for batch in loader]

    for one, other in zip(batches(open_data(tmp_path / "packed")), batches(open_data(uri)), strict=True):
        np.testing.assert_array_equal(one, other)


def test_keys_and_classes_may_hold_any_character(tmp_path):
    names = ['it\'s, "x"\n2', "猫", "a b"]
    root = tree(tmp_path / "photos", dict.fromkeys(names, 3))
    packed(root, tmp_path / "packed")
    same(open_source(str(tmp_path / "packed")), open_source(str(root)))


def test_a_packed_set_can_be_packed_again(tmp_path):
    root = with_unreadable(tmp_path / "photos")
    first = packed(root, tmp_path / "large")
    second = packed(tmp_path / "large", tmp_path / "small", size=10)
    assert second.skipped == first.skipped
    same(open_data(tmp_path / "small"), open_data(tmp_path / "large"))
    assert open_data(tmp_path / "small")["train"].read(0).size == (12, 10)


# reading


def test_a_reader_travels_as_little_more_than_its_place(tmp_path):
    packed(undivided(tmp_path / "photos"), tmp_path / "packed", shard_bytes=SMALL_SHARD)
    split = open_data(tmp_path / "packed")["train"]
    before = [np.asarray(split.read(row)) for row in range(len(split))]
    sent = pickle.dumps(split.reader)
    assert len(sent) < 400 + len(str(tmp_path))
    reader = pickle.loads(sent)
    for row, index in enumerate(split.index):
        np.testing.assert_array_equal(np.asarray(reader(int(index))), before[row])


def test_dense_arrays_hold_every_image_where_rows_says(tmp_path):
    packed(with_unreadable(tmp_path / "photos"), tmp_path / "packed", shard_bytes=SMALL_SHARD)
    for split in open_data(tmp_path / "packed").splits.values():
        assert isinstance(split.reader, PackedReader)
        dense = split.reader.dense()
        assert dense is not None
        assert len(dense) > 2
        assert all(part.shape[1:] == (20, 24, 3) and not part.flags.owndata for part in dense)
        whole = np.concatenate(dense)
        assert len(whole) == 45
        for row, place in enumerate(split.reader.rows(split.index)):
            np.testing.assert_array_equal(np.asarray(split.read(row)), whole[place])
    picture(tmp_path / "photos/a/wide.png", 40, 20)
    packed(tmp_path / "photos", tmp_path / "other")
    assert open_source(str(tmp_path / "other"))["all"].reader.dense() is None


def test_stable_indices_need_not_be_consecutive(tmp_path):
    source = open_source(str(undivided(tmp_path / "photos")))
    some: Split = source["all"].take([40, 3, 17, 4, 30])
    pack(DataSet("some", source.classes, {"train": some}), tmp_path / "packed", 0, 1)
    split = open_source(str(tmp_path / "packed"))["train"]
    assert split.index.tolist() == [40, 3, 17, 4, 30]
    for row in range(5):
        np.testing.assert_array_equal(np.asarray(split.read(row)), np.asarray(some.read(row)))
    assert split.reader.rows(np.array([4, 40])).tolist() == [3, 0]
    for strange in (5, 99, -1):
        with pytest.raises(IndexError, match=f"no image number {strange} in train"):
            split.reader(strange)


# interruption


KILLED = """
import os, signal, sys
from pathlib import Path
from vitrail.data.open import open_source
from vitrail.data.pack import pack

def progress(done, total):
    if done >= 32:
        os.kill(os.getpid(), signal.SIGKILL)

pack(open_source(sys.argv[1]), Path(sys.argv[2]), 0, 2, progress, shard_bytes=int(sys.argv[3]))
"""


def test_a_kill_between_the_listing_and_the_last_removal_leaves_nothing(tmp_path):
    root = with_unreadable(tmp_path / "photos")
    packed(root, tmp_path / "whole")
    before = files(tmp_path / "whole")
    (tmp_path / "whole" / "pack-unfinished.json").write_text("{}")
    packed(root, tmp_path / "whole")
    assert files(tmp_path / "whole") == before


def test_after_kill_9_the_same_call_keeps_finished_shards_and_ends_as_if_never_killed(tmp_path):
    root = with_unreadable(tmp_path / "photos")
    words = [sys.executable, "-c", KILLED, str(root), str(tmp_path / "cut"), str(SMALL_SHARD)]
    killed = subprocess.run(words, check=False)
    assert killed.returncode == -signal.SIGKILL
    with pytest.raises(ValueError, match="was not packed to its end") as error:
        open_data(tmp_path / "cut")
    assert "\n" not in str(error.value)
    before = touched(tmp_path / "cut")
    assert len(before) > 2
    assert list((tmp_path / "cut").glob(".*.tmp"))  # the shard that was being written
    counted: list[tuple[int, int]] = []
    packed(root, tmp_path / "cut", shard_bytes=SMALL_SHARD, progress=lambda *at: counted.append(at))
    packed(root, tmp_path / "whole", shard_bytes=SMALL_SHARD)
    assert files(tmp_path / "cut") == files(tmp_path / "whole")
    assert before.items() <= touched(tmp_path / "cut").items()
    assert counted[0][0] == 0
    assert counted[-1] == (counted[0][1], counted[0][1])
    assert 50 - 32 <= counted[0][1] < 50


@pytest.mark.parametrize("harm", ["cut", "gone", "flipped", "record"])
def test_a_damaged_shard_of_an_unfinished_set_is_made_again_and_no_other(tmp_path, harm, monkeypatch):
    root = undivided(tmp_path / "photos")
    out = tmp_path / "packed"
    packed(root, out, shard_bytes=SMALL_SHARD)
    whole, before = files(out), touched(out)
    (out / "pack.json").rename(out / "pack-unfinished.json")
    victim = out / "all-00002.bin"
    if harm == "cut":
        victim.write_bytes(victim.read_bytes()[:-1])
    elif harm == "gone":
        victim.unlink()
    elif harm == "flipped":
        victim.write_bytes(bytes([victim.read_bytes()[0] ^ 1]) + victim.read_bytes()[1:])
    else:
        victim.with_suffix(".json").write_text('{"start": 0')
    assert not packed(root, out, shard_bytes=SMALL_SHARD).already
    assert files(out) == whole
    after = touched(out)
    again = {name for name in before if before[name] != after[name]}
    assert "all-00002.bin" in again
    if harm != "record":  # without its record nothing tells where the next shard begins
        assert again == {"all-00002.bin"}


def test_a_finished_set_is_recognised_and_mended_where_a_shard_is_gone(tmp_path):
    root = undivided(tmp_path / "photos")
    out = tmp_path / "packed"
    first = packed(root, out, shard_bytes=SMALL_SHARD)
    whole, before = files(out), touched(out)
    second = packed(root, out)
    assert (first.already, second.already) == (False, True)
    assert (second.images, second.bytes, second.shards) == (50, 50 * 24 * 20 * 3, first.shards)
    assert touched(out) == before
    (out / "all-00001.bin").unlink()
    assert not packed(root, out).already  # whatever size new shards would have
    assert files(out) == whole


def test_a_full_disk_is_said_plainly_and_finished_shards_stay(tmp_path, monkeypatch):
    root, out = undivided(tmp_path / "photos"), tmp_path / "packed"
    real = shard.replacing

    @contextmanager
    def full(path: Path) -> Iterator[Path]:
        with real(path) as temporary:
            yield temporary
            if path.name == "all-00003.bin":
                raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shard, "replacing", full)
    with pytest.raises(OSError, match=r"no space left for .*run the same command again") as error:
        packed(root, out, shard_bytes=SMALL_SHARD)
    assert "\n" not in str(error.value)
    assert sorted(touched(out)) == ["all-00000.bin", "all-00001.bin", "all-00002.bin"]
    assert not list(out.glob(".*.tmp"))
    monkeypatch.undo()
    before = touched(out)
    packed(root, out, shard_bytes=SMALL_SHARD)
    assert before.items() <= touched(out).items()
    same(open_data(out), open_data(root))


@pytest.mark.parametrize("finished", [True, False])
def test_another_size_or_source_is_refused_in_one_sentence(tmp_path, finished):
    root, other, out = undivided(tmp_path / "photos"), undivided(tmp_path / "others"), tmp_path / "packed"
    packed(root, out, size=16)
    if not finished:
        (out / "pack.json").rename(out / "pack-unfinished.json")  # it holds all that an unfinished plan holds
    before = files(out)
    for uri, size, words in [(root, 8, "at size 16, not .* at size 8"), (other, 16, "photos at size 16, not .*others")]:
        with pytest.raises(ValueError, match=words) as error:
            packed(uri, out, size)
        assert "\n" not in str(error.value)
    picture(root / "a/0.png", 30, 30)
    with pytest.raises(ValueError, match="is not what it was"):
        packed(root, out, size=16)
    assert files(out) == before


def test_a_place_that_cannot_be_packed_into_is_refused(tmp_path):
    root = undivided(tmp_path / "photos")
    before = {path: path.read_bytes() for path in root.rglob("*.png")}
    with pytest.raises(ValueError, match="holds other files"):
        packed(root, root)
    with pytest.raises(ValueError, match="is a file"):
        packed(root, root / "a/0.png")
    with pytest.raises(ValueError, match="size -1 must be"):
        packed(root, tmp_path / "new", size=-1)
    assert {path: path.read_bytes() for path in root.rglob("*.png")} == before


def test_two_processes_do_not_write_to_one_folder(tmp_path):
    root, out = undivided(tmp_path / "photos"), tmp_path / "packed"
    out.mkdir()
    hold = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.lockf(f, fcntl.LOCK_EX); print('held', flush=True)"
    words = [sys.executable, "-c", f"{hold}; input()", str(out / ".lock")]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(FileExistsError, match="another process is packing"):
            packed(root, out)
        holder.communicate(b"\n")
    assert packed(root, out).images == 50


def test_nothing_readable_is_an_error(tmp_path):
    for name in ("a/0.jpg", "b/0.jpg"):
        (tmp_path / "photos" / name).parent.mkdir(parents=True)
        (tmp_path / "photos" / name).write_text("no image")
    with pytest.raises(ValueError, match=r"none of the images .* a/0.jpg \(not an image\)"):
        packed(tmp_path / "photos", tmp_path / "packed")


# damage


@pytest.mark.parametrize("name", ["all-00001.bin", "all-labels.npy", "all-keys.json"])
def test_a_file_that_is_missing_or_of_another_size_is_named_when_the_set_is_opened(tmp_path, name):
    packed(undivided(tmp_path / "photos"), tmp_path / "packed", shard_bytes=SMALL_SHARD)
    path = tmp_path / "packed" / name
    right = path.read_bytes()
    for harm, words in [(right[:-3], f"instead of {len(right)}"), (right + b"\0", "instead of"), (None, "is missing")]:
        path.unlink() if harm is None else path.write_bytes(harm)
        with pytest.raises(ValueError, match=words) as error:
            open_data(tmp_path / "packed")
        assert name in str(error.value)
        assert "\n" not in str(error.value)


def test_verify_names_every_file_with_a_changed_byte(tmp_path):
    packed(undivided(tmp_path / "photos"), tmp_path / "packed", shard_bytes=SMALL_SHARD)
    out = tmp_path / "packed"
    counted: list[tuple[int, int]] = []
    assert verify(out, lambda *at: counted.append(at)) == []
    covered = sum(p.stat().st_size for p in out.iterdir() if p.suffix in (".bin", ".npy") or p.name == "all-keys.json")
    assert counted[-1] == (covered, covered)
    foreign = out / "all-00001.bin"
    foreign.write_bytes((out / "all-00002.bin").read_bytes())
    labels = out / "all-labels.npy"
    labels.write_bytes(labels.read_bytes()[:-8] + b"\1" + labels.read_bytes()[-7:])
    (out / "all-00003.bin").unlink()
    faults = verify(out)
    assert [fault.split()[0] for fault in faults] == [str(foreign), str(out / "all-00003.bin"), str(labels)]


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("labels", lambda a: a + 3),
        ("offsets", lambda a: a + 1),
        ("heights", lambda a: a * 0 - 20),
        ("widths", lambda a: np.where(np.arange(len(a)) == 5, 25, a)),
        ("index", lambda a: a.astype(np.float64)),
    ],
)
def test_arrays_that_do_not_fit_are_refused_before_anything_is_read_through_them(tmp_path, what, change):
    packed(undivided(tmp_path / "photos"), tmp_path / "packed")
    path = tmp_path / f"packed/all-{what}.npy"
    np.save(path, change(np.load(path)).astype(np.load(path).dtype if what != "index" else np.float64))
    with pytest.raises(ValueError, match=r"does not fit the rest") as error:
        open_data(tmp_path / "packed")
    assert "all-" in str(error.value)


def test_pickled_arrays_are_never_loaded(tmp_path):
    packed(undivided(tmp_path / "photos"), tmp_path / "packed")
    path = tmp_path / "packed/all-labels.npy"
    np.save(path, np.array([print] * 50, object), allow_pickle=True)
    listing = json.loads((tmp_path / "packed/pack.json").read_text())
    entry = next(a for a in listing["splits"][0]["arrays"] if a["file"] == path.name)
    entry["bytes"] = path.stat().st_size
    (tmp_path / "packed/pack.json").write_text(json.dumps(listing))
    with pytest.raises(ValueError, match=r"all-labels.npy is no plain array"):
        open_data(tmp_path / "packed")


def test_a_listing_that_is_torn_later_or_hostile_is_refused_in_one_sentence(tmp_path):
    packed(undivided(tmp_path / "photos"), tmp_path / "packed")
    path = tmp_path / "packed/pack.json"
    good = path.read_text()
    later = json.dumps({**json.loads(good), "format": 3})
    outside = good.replace('"all-00000.bin"', '"../all-00000.bin"')
    for text, words in [
        (good[:200], "cannot be used"),
        ("{}", "missing"),
        (later, "later version"),
        (outside, "outside"),
    ]:
        path.write_text(text)
        with pytest.raises(ValueError, match=words) as error:
            open_data(tmp_path / "packed")
        assert "pack.json" in str(error.value)
        assert "\n" not in str(error.value)


# the command


def test_the_command_packs_prints_what_it_left_out_and_verifies(tmp_path, capsys):
    root, out = with_unreadable(tmp_path / "photos"), tmp_path / "packed"
    assert run(["pack", str(root), str(out), "--size", "16", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["images"], said["already"], len(said["skipped"])) == (45, False, 5)
    assert said["skipped"][0] == {"split": "all", "key": "a/3.png", "reason": "truncated"}
    assert run(["pack", str(root), str(out), "--size", "16"]) == 0
    printed = capsys.readouterr()
    assert "already packed: 45 images" in printed.out
    assert "a/3.png: truncated" in printed.err
    assert run(["pack", "--verify", str(out)]) == 0
    (out / "all-00000.bin").write_bytes(b"\0" * (out / "all-00000.bin").stat().st_size)
    capsys.readouterr()
    assert run(["pack", "--verify", str(out), "--json"]) == 1
    assert "all-00000.bin has other bytes" in json.loads(capsys.readouterr().out)["faults"][0]
    assert run(["pack", str(root)]) == 2
    assert "name a data set and a folder" in capsys.readouterr().err
