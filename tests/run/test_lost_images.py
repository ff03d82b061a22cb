"""Images that one of two processes cannot read any more: both go on, or both end with a sentence; nothing hangs."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection
from contextlib import redirect_stderr
from datetime import timedelta
from io import StringIO
from pathlib import Path

import pytest
import torch
from processes import run_ranks
from safetensors.torch import load_file, save_file

from vitrail.cli import run as command
from vitrail.data.dataset import BadImage
from vitrail.data.open import open_data
from vitrail.data.sources.folder import FileReader
from vitrail.engine import device
from vitrail.engine.loop import Loop, LoopResult

SMALL = (
    "--data.workers 0 --data.loader {loader} --data.batch 16 --optim.steps 6 --optim.warmup 0 --engine.log_every 2 "
    "--engine.evaluate_every 0 --engine.device cpu --data.augment.rand_ops 0"
)
VIT = "vit --model.name vit_micro_28 --model.trunk.depth 1 --model.trunk.width 16 --model.trunk.heads 1"
BANK = f"{VIT} --objective.kind moco --objective.bank 64 --model.head.kind projected"
ENDED = "another process of this run ended, so this one cannot go on"


def one_of_two(rank: int, folder: str, words: list[str], lost: Collection[str]) -> None:
    """A command on one of two processes; the second cannot read some images once they were scanned."""
    torch.set_num_threads(1)
    os.environ |= {"WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "XDG_CACHE_HOME": f"{folder}/cache"}
    limit = timedelta(seconds=60)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2, timeout=limit
    )
    read, lost_peer = FileReader.__call__, device.lost_peer

    def gone(self: FileReader, index: int) -> object:
        if rank == 1 and self.names[index] in lost:
            raise BadImage(self.names[index], "no such file")
        return read(self, index)

    def noted(error: RuntimeError) -> bool:
        assert "timed out" not in str(error).lower()  # it waited in vain
        return lost_peer(error)

    def kept(self: Loop) -> LoopResult:
        result = trained(self)
        save_file(self.work.objective.model.state_dict(), Path(folder) / f"weights-{rank}.safetensors")
        return result

    trained = Loop.run
    FileReader.__call__, device.lost_peer, Loop.run = gone, noted, kept  # type: ignore[method-assign, assignment]
    with redirect_stderr(StringIO()) as errors:
        code = command(words)
    (Path(folder) / f"rank-{rank}").write_text(f"{code}\n{' '.join(errors.getvalue().split())}")


def both(folder: Path, photos: Path, recipe: str, lost: Collection[str], loader: str = "host") -> list[tuple[int, str]]:
    """Exit code and messages of each process."""
    words = ["train", *recipe.split(), *SMALL.format(loader=loader).split()]
    return ended(folder, [*words, "--data", str(photos), "--out", str(folder / "run")], lost)


def ended(folder: Path, words: list[str], lost: Collection[str] = ()) -> list[tuple[int, str]]:
    run_ranks(one_of_two, str(folder), words, lost)
    texts = [(folder / f"rank-{rank}").read_text().partition("\n") for rank in range(2)]
    return [(int(code), said) for code, _, said in texts]


@pytest.fixture
def keys(photos: Path) -> list[str]:
    return list(open_data(photos)["train"].keys)


@pytest.mark.parametrize("loader", ["host", "device"])
def test_both_go_on_and_the_report_lists_what_the_other_process_left_out(
    loader: str, photos: Path, keys: list[str], tmp_path: Path
) -> None:
    evaluated = open_data(photos)["test"].keys[1]
    lost = [*keys[::4], evaluated]
    assert [code for code, _ in both(tmp_path, photos, VIT, lost, loader)] == [0, 0]
    page = (tmp_path / "run" / "report.html").read_text()
    assert any(key in page for key in lost[:-1])
    assert evaluated in page
    assert "no such file" in page
    one, other = (load_file(tmp_path / f"weights-{rank}.safetensors") for rank in range(2))
    assert all(torch.equal(value, other[name]) for name, value in one.items())


def test_a_process_that_can_read_nothing_ends_both(photos: Path, keys: list[str], tmp_path: Path) -> None:
    (first, waited), (second, said) = both(tmp_path, photos, VIT, keys)
    assert (first, second) == (2, 2)
    assert ENDED in waited
    assert "none of the 8 images of a batch of step 0 could be read" in said
    assert "Traceback" not in waited + said


def test_processes_that_share_a_bank_end_before_their_batches_differ(
    photos: Path, keys: list[str], tmp_path: Path
) -> None:
    (first, waited), (second, said) = both(tmp_path, photos, BANK, keys[::4])
    assert (first, second) == (2, 2), waited + said
    assert ENDED in waited
    assert "cannot be read any more (no such file)" in said
    assert "need equally many images each; put it back, then resume the run" in said
    assert "Traceback" not in waited + said


def test_both_processes_notice_an_image_that_was_replaced(photos: Path, keys: list[str], tmp_path: Path) -> None:
    copied, again = tmp_path / "photos", tmp_path / "again"
    shutil.copytree(photos, copied)
    again.mkdir()
    assert [code for code, _ in both(tmp_path, copied, VIT, ())] == [0, 0]
    (copied / keys[5]).write_bytes((copied / keys[6]).read_bytes())
    for code, said in ended(again, ["train", "--resume", str(tmp_path / "run")]):
        assert code == 2
        assert f"the first that differs being {keys[5]}; put them back" in said
