"""Parquet files with images inside, as the Hugging Face hub stores data sets."""

from __future__ import annotations

import io
import json
import pickle
from collections import Counter
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from vitrail.data.check.scan import scan
from vitrail.data.dataset import BadImage
from vitrail.data.open import open_data, open_source

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

NAMES = ["wren", "crow", "auk"]


def png(red: int) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (6, 4), (red, 0, 0)).save(stream, "PNG")
    return stream.getvalue()


def write(
    path: Path, reds: list[int], labels: list[object], names: list[str] | None = NAMES, **columns: object
) -> Path:
    """A table as the hub's own writer leaves it: bytes and path in one column, class names in the schema."""
    path.parent.mkdir(parents=True, exist_ok=True)
    images = [{"bytes": png(red), "path": f"{red}.png"} for red in reds]
    table = pa.table({"image": images, "label": labels, **columns})
    if names is not None:
        features = {"label": {"names": names, "_type": "ClassLabel"}, "image": {"_type": "Image"}}
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    pq.write_table(table, path, row_group_size=4)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "data" / "train-00000-of-00002.parquet", list(range(10)), [i % 3 for i in range(10)])
    write(tmp_path / "data" / "train-00001-of-00002.parquet", list(range(10, 16)), [i % 3 for i in range(10, 16)])
    write(tmp_path / "data" / "test-00000-of-00001.parquet", list(range(20, 25)), [i % 3 for i in range(20, 25)])
    return tmp_path


def test_every_row_keeps_its_image_label_and_split(folder: Path) -> None:
    data = open_source(str(folder))
    assert data.classes == tuple(NAMES)
    seen = {}
    for name, split in data.splits.items():
        seen[name] = [split.read(row).getpixel((0, 0))[0] for row in range(len(split))]
        assert split.labels.tolist() == [red % 3 for red in seen[name]]
    assert seen == {"train": list(range(16)), "test": list(range(20, 25))}


def test_rows_are_read_in_any_order_and_in_other_processes(folder: Path) -> None:
    split = open_source(str(folder))["train"]
    reader = pickle.loads(pickle.dumps(split.reader))
    order = np.random.default_rng(0).permutation(len(split))
    assert [reader(int(split.index[row])).getpixel((0, 0))[0] for row in order] == order.tolist()


def test_one_file_is_a_data_set_and_a_table_of_paths_stays_one(folder: Path, tmp_path: Path) -> None:
    assert len(open_source(str(folder / "data" / "train-00001-of-00002.parquet"))["train"]) == 6
    (tmp_path / "a.png").write_bytes(png(7))
    pq.write_table(pa.table({"path": ["a.png"] * 2, "label": ["x", "y"]}), tmp_path / "paths.parquet")
    assert open_source(str(tmp_path / "paths.parquet")).classes == ("x", "y")


def test_other_columns_are_chosen_in_the_uri(tmp_path: Path) -> None:
    file = write(tmp_path / "a.parquet", [1, 2], [0, 1], None, colour=["red", "blue"])
    assert open_source(f"{file}?label=colour").classes == ("blue", "red")
    with pytest.raises(
        ValueError, match=r"has no column 'hue'; choose one with \?label=NAME \(it has image, label, col"
    ):
        open_source(f"{file}?label=hue")


def test_files_whose_labels_are_hidden_are_left_out_and_told(folder: Path) -> None:
    write(folder / "data" / "test-00000-of-00001.parquet", [20, 21], [-1, -1])
    data = open_source(str(folder))
    assert set(data.splits) == {"train"}
    assert any("left out test-00000-of-00001.parquet: its labels are hidden" in note for note in data.notes)


def test_labels_beyond_the_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="label goes from 0 to 3, and there are names for 3 classes"):
        open_source(str(write(tmp_path / "a.parquet", [1, 2], [0, 3])))


def test_a_row_without_bytes_is_a_bad_image(tmp_path: Path) -> None:
    images = [{"bytes": png(1), "path": None}, {"bytes": None, "path": "gone.png"}]
    pq.write_table(pa.table({"image": images, "label": ["a", "b"]}), tmp_path / "a.parquet")
    split = open_source(str(tmp_path / "a.parquet"))["all"]
    with pytest.raises(BadImage, match="no bytes in the table"):
        split.read(1)


def test_a_name_of_the_hub_is_fetched_and_opened(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def fetched(name: str, **options: object) -> str:
        asked.append((name, options["repo_type"]))
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetched)
    assert len(open_source("hf:birds/small")["train"]) == 16
    assert asked == [("birds/small", "dataset")]


def test_without_a_network_the_sentence_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> str:
        raise ConnectionError("no route\nand more")

    monkeypatch.setattr("huggingface_hub.snapshot_download", refused)
    with pytest.raises(ValueError, match=r"hf:birds/small could not be fetched \(no route\); connect once"):
        open_source("hf:birds/small")


def table_of(path: Path, **columns: object) -> Path:
    """Twelve images with these columns in place of the usual label."""
    images = [{"bytes": png(i), "path": None} for i in range(12)]
    pq.write_table(pa.table({"image": images, **columns}), path, row_group_size=4)
    return path


ODD_LABELS: list[tuple[list[object], str]] = [
    ([None, *[1] * 11], "row 0 has no label; remove it, or choose another"),
    ([[1], *[[2]] * 11], "label of row 0 is a list, no class; change it, or choose another"),
    ([{"a": 1}] * 12, "label of row 0 is a dict, no class"),
    ([b"cat"] * 12, "label of row 0 is a bytes, no class"),
    ([0.0, 0.5, *[1.0] * 10], "label of row 1 is a float, no class"),
    ([1.0, float("nan"), *[1.0] * 10], "label of row 1 is a float, no class"),
    ([datetime(2020, 1, 1)] * 12, "label of row 0 is a datetime, no class"),
    (["a" * 3_000_000, *["b"] * 11], "label of row 0 is a text of 3000000 characters, no class"),
]


@pytest.mark.parametrize(("labels", "sentence"), ODD_LABELS, ids=lambda value: value if isinstance(value, str) else "")
def test_labels_are_text_or_whole_numbers(labels: list[object], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=sentence) as caught:
        open_source(str(table_of(tmp_path / "a.parquet", label=labels)))
    assert len(str(caught.value)) < 400


def test_names_of_classes_differ_and_numbers_fit_them(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="two classes of label are called 'wren'; rename one"):
        open_source(str(write(tmp_path / "a.parquet", [1, 2], [0, 1], ["wren", "wren"])))
    huge = pa.array([0, 2**64 - 1], pa.uint64())
    with pytest.raises(
        ValueError, match="label goes from 0 to 18446744073709551615, and there are names for 3 classes"
    ):
        open_source(str(write(tmp_path / "a.parquet", [1, 2], huge)))


def test_images_that_are_none_are_bad_and_no_other_type_is_taken_for_them(tmp_path: Path) -> None:
    images = [{"bytes": png(1), "path": None}, None, {"bytes": b"", "path": None}, {"bytes": b"text", "path": None}]
    pq.write_table(pa.table({"image": images, "label": ["a", "b", "a", "b"]}), tmp_path / "a.parquet")
    bad = dict(scan(open_source(str(tmp_path / "a.parquet"))))
    assert list(bad.values()) == ["no bytes in the table", "no bytes in the table", "not an image"]
    table_of(tmp_path / "b.parquet", label=["a", "b"] * 6, other=["x"] * 12)
    split = open_source(f"{tmp_path / 'b.parquet'}?image=other")["all"]
    with pytest.raises(BadImage, match="no bytes in the table"):
        split.read(0)
    pq.write_table(pa.table({"image": [{"bytes": 5}] * 2, "label": ["a", "b"]}), tmp_path / "c.parquet")
    with pytest.raises(ValueError, match="has no column 'path'"):
        open_source(str(tmp_path / "c.parquet"))


def test_a_damaged_file_of_several_is_named(folder: Path) -> None:
    files = sorted((folder / "data").iterdir())
    whole = {file: file.read_bytes() for file in files}
    assert files[0].name.startswith("test")  # the first of all is damaged, too
    for file, data in whole.items():
        for harmed in (data[:-20], b"PAR1", b"", b"no table at all, but a text of some length" * 9):
            file.write_bytes(harmed)
            with pytest.raises(
                ValueError, match=rf"{file.name} cannot be read as Parquet: .*; write or fetch it again"
            ):
                open_source(str(folder))
        file.write_bytes(data)
    for file in files:
        file.write_bytes(b"PAR1 ... PAR1")
    with pytest.raises(ValueError, match="cannot be read as Parquet"):
        open_source(str(folder))
    with pytest.raises(ValueError, match="cannot be read as Parquet"):
        open_source(str(files[0]))


def test_files_lack_no_column_that_others_have(folder: Path) -> None:
    file = folder / "data" / "train-00001-of-00002.parquet"
    pq.write_table(pa.table({"image": [{"bytes": png(1), "path": None}] * 2}), file)
    with pytest.raises(ValueError, match=rf"{file.name} cannot be read as Parquet: it has no column 'label', which"):
        open_source(str(folder))


def test_images_beside_a_damaged_table_are_a_folder(tmp_path: Path) -> None:
    for kind in ("a", "b"):
        (tmp_path / kind).mkdir()
        (tmp_path / kind / "0.png").write_bytes(png(1))
    (tmp_path / "stray.parquet").write_bytes(b"PAR1")
    assert open_source(str(tmp_path)).classes == ("a", "b")


def test_a_group_of_rows_that_lies_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "a.parquet", list(range(10)), [i % 3 for i in range(10)])  # groups of 4, 4 and 2
    reader = open_source(str(file))["all"].reader
    beyond = replace(reader, row=reader.row + 4)
    with pytest.raises(BadImage, match="damaged"):
        beyond(0)
    with monkeypatch.context() as patch:
        groups = [SimpleNamespace(num_rows=rows) for rows in (14, -8, 4)]
        patch.setattr(pq.ParquetFile, "metadata", property(lambda _: SimpleNamespace(row_group=groups.__getitem__)))
        with pytest.raises(ValueError, match="it claims 26 rows, and has 10 labels"):
            open_source(str(file))
    read = pq.ParquetFile.read
    monkeypatch.setattr(pq.ParquetFile, "read", lambda file, columns: read(file, columns).slice(1))
    with pytest.raises(ValueError, match="it claims 10 rows, and has 9 labels"):
        open_source(str(file))


def test_a_group_of_rows_that_cannot_be_read_is_tried_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "a.parquet", list(range(10)), [i % 3 for i in range(10)])
    data = open_source(str(file))
    tried = []

    def fails(_: object, number: int, columns: list[str]) -> object:
        tried.append((number, columns))
        raise MemoryError("much too much")

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", fails)
    assert {reason for _, reason in scan(data, workers=1)} == {
        "a.parquet cannot be read as Parquet: much too much; write or fetch it again"
    }
    assert tried == [(0, ["image"]), (1, ["image"]), (2, ["image"])]


PATHS: list[tuple[dict[str, list[object]], str]] = [
    ({"path": ["0.png", "x" * 5_000_000]}, r"row 2: no file x{199}"),
    ({"path": ["0.png", "a\0b"]}, "row 2: no file"),
    ({"path": ["0.png", "a" * 300 + "/b"]}, "row 2: no file"),
    ({"path": ["0.png", None]}, "row 2: empty path"),
    ({"label": ["a", None]}, "row 2: empty label"),
    ({"label": [1.0, float("nan")]}, "row 2: empty label"),
    ({"label": [{"a": 1}, {"a": 2}]}, "row 1: empty label"),
    ({"label": [b"a", b"b"]}, "row 1: empty label"),
    ({"split": ["train", "x" * 1_000_000]}, "row 2: split 'x{59}"),
]


@pytest.mark.parametrize(("columns", "sentence"), PATHS)
def test_faulty_rows_of_a_table_of_paths_are_listed(
    columns: dict[str, list[object]], sentence: str, tmp_path: Path
) -> None:
    (tmp_path / "0.png").write_bytes(png(1))
    table = {"path": ["0.png", "0.png"], "label": ["a", "b"], "embedding": [b"\xff", b"\xfe"]}
    pq.write_table(pa.table({**table, **columns}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=sentence) as caught:
        open_source(str(tmp_path / "a.parquet"))
    assert len(str(caught.value)) < 1000


def test_text_that_is_no_text_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "0.png").write_bytes(png(1))
    file = tmp_path / "a.parquet"
    pq.write_table(pa.table({"path": ["0.png"] * 2, "label": ["aaaaaaaa", "b"]}), file, compression="none")
    file.write_bytes(file.read_bytes().replace(b"aaaaaaaa", b"\xff\xfe\xfd\xfc\xff\xfe\xfd\xfc"))
    with pytest.raises(ValueError, match=r"cannot be read as Parquet: .*utf-8"):
        open_source(str(file))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A table of images and one of paths, beside the images."""
    place = tmp_path_factory.mktemp("whole")
    hub = write(place / "hub.parquet", list(range(12)), [i % 3 for i in range(12)])
    paths = {"path": [f"{i}.png" for i in range(12)], "label": [NAMES[i % 3] for i in range(12)]}
    pq.write_table(pa.table(paths), place / "paths.parquet")
    return {"images": hub.read_bytes(), "paths": (place / "paths.parquet").read_bytes()}


@pytest.mark.parametrize("kind", ["images", "paths"])
@pytest.mark.parametrize("seed", range(3))
def test_flipped_bytes_are_used_or_rejected_in_a_sentence(
    kind: str, seed: int, whole: dict[str, bytes], tmp_path: Path
) -> None:
    """A hundred cases each, half of them in the footer, where the columns are described."""
    for i in range(12):
        (tmp_path / f"{i}.png").write_bytes(png(i))
    draw = np.random.default_rng(seed)
    outcomes = Counter[str]()
    for case in range(100):
        raw = bytearray(whole[kind])
        footer = int.from_bytes(raw[-8:-4], "little") + 8
        for _ in range(draw.choice([1, 2, 30])):
            place = int(draw.integers(len(raw)) if case % 2 else len(raw) - 1 - draw.integers(footer))
            raw[place] ^= 1 << int(draw.integers(8))
        file = tmp_path / f"{case}.parquet"  # groups of rows are remembered by their file
        file.write_bytes(raw[: int(draw.integers(len(raw)))] if case % 10 == 9 else raw)
        try:
            bad = scan(open_data(str(file)))
            outcomes["bad images" if bad else "read"] += 1
        except (ValueError, OSError) as error:
            outcomes["rejected" if 20 < len(str(error)) < 3000 else f"bad sentence {error}"] += 1
    assert set(outcomes) <= {"read", "bad images", "rejected"}
    assert outcomes["rejected"] > 20
    assert outcomes["read"] + outcomes["bad images"] > 5
