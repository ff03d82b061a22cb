"""The record that two versions are compared by."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

from guard import differences, plain


def test_a_record_leaves_out_times_and_folders_and_keeps_the_rest() -> None:
    told = {"top1": 0.5, "seconds": 3.0, "train_seconds": 1, "rows": [{"file": "/x/run/a", "images_per_second": 2}]}
    assert plain(told, "/x/run") == {"top1": 0.5, "rows": [{"file": "FOLDER/a"}]}


def test_differences_name_their_place() -> None:
    before = {"a": [1, {"b": 2}], "gone": 0}
    assert differences(before, before) == []
    after = {"a": [1, {"b": 3}], "new": 0}
    assert differences(before, after) == ["/a/1/b: '2' -> '3'", "/gone: only before", "/new: only after"]
    assert differences([1], [1, 2]) == [": '[1]' -> '[1, 2]'"]
