"""Parquet files with images inside, as the Hugging Face hub stores data sets."""

from __future__ import annotations

import io
import json
import pickle
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vitrail.data.dataset import BadImage
from vitrail.data.open import open_source

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
