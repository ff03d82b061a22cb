"""The same run under any number of processes: samples compared by hash, weights by their largest difference.

    python benchmarks/equality.py [--steps 8] [--quick] [--json FILE]

Every row is a training of the same tiny ViT on the same images, with mixup, CutMix and a batch that three or four
processes do not divide; it is compared with one process that is not interrupted. `processes` 4 -> 2 -> 3 -> 1 is a run
that is stopped and resumed under another number of processes. `samples` compares hashes of (step, image, augmented and
mixed pixels, target) of all steps; `weights` is the largest difference of any weight of the model, and of its moving
average, after the last step. gloo, CPU, float32, no drop path and no batch norm, one thread per process.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from vitrail.engine import checkpoint

TINY = {
    "data.uri": "synthetic:shapes?n=60&size=32",
    "data.batch": 10,
    "data.check": "off",
    "data.loader": "host",
    "data.augment.mixup": 0.8,
    "data.augment.cutmix": 1.0,
    "model.name": "vit_tiny_32",
    "model.trunk": {"depth": 2, "width": 32, "heads": 2, "patch": 8},
    "model.drop_path": 0.0,
    "optim.lr": 1e-3,
    "optim.warmup": 0.0,
    "optim.clip": 1.0,
    "engine.device": "cpu",
    "engine.ema": 0.9,
    "engine.evaluate_every": 0.0,
    "engine.checkpoint_every": 0.0,
    "engine.log_every": 2,
}
Ranks = Callable[..., None]


def one_rank(rank: int, world: int, folder: str, settings: dict[str, Any], stop: int | None) -> None:
    """One process of a run in `folder`, which begins or continues; it is asked to stop once `stop` steps are made.

    Settings are those of a run, and: `recipe`; `lost`, rows of training images that cannot be read.
    """
    import vitrail
    from vitrail.data.dataset import BadImage, Split
    from vitrail.engine.loop import Stopped
    from vitrail.engine.step import TrainStep
    from vitrail.recipes import recipe, with_values

    torch.set_num_threads(1)
    os.environ |= {"XDG_CACHE_HOME": f"{folder}/cache", "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
    if world > 1:
        meet, limit = f"file://{folder}/meet-{stop}", timedelta(seconds=60)
        torch.distributed.init_process_group("gloo", init_method=meet, rank=rank, world_size=world, timeout=limit)
    feed, read, rows = TrainStep.feed, Split.read, []
    lost = settings.get("lost", ())
    base = recipe(settings.get("recipe", "vit"))
    settings = {name: value for name, value in settings.items() if name not in ("lost", "recipe")}

    def partly(self: Split, row: int) -> Any:
        if self.name == "train" and row in lost:
            raise BadImage(self.keys[row], "no such file")
        return read(self, row)

    def watched(self: TrainStep, piece: Any) -> bool:
        for i, index in enumerate(piece.index.tolist()):
            digest = hashlib.sha256(piece.target[i].numpy().tobytes())
            for view in piece.views:
                digest.update(view[i].contiguous().numpy().tobytes())
            rows.append([piece.step, index, digest.hexdigest()])
        done = feed(self, piece)
        if done and self.step == stop:
            os.kill(os.getpid(), signal.SIGTERM)
        return done

    TrainStep.feed, Split.read = watched, partly  # type: ignore[method-assign]
    try:
        vitrail.train(with_values(base, {**TINY, **settings, "out": f"{folder}/run"}), quiet=True, continued=True)
    except Stopped:
        pass
    finally:
        TrainStep.feed, Split.read = feed, read  # type: ignore[method-assign]
        (Path(folder) / f"samples-{stop}-{rank}.json").write_text(json.dumps(rows))
        if world > 1:
            torch.distributed.destroy_process_group()


def train_cell(run_ranks: Ranks, folder: Path, parts: Sequence[tuple[int, int | None]], **settings: Any) -> Path:
    """A run in parts of (processes, step after which they stop; none: at the end)."""
    folder.mkdir(parents=True)
    for world, stop in parts:
        run_ranks(one_rank, world, str(folder), settings, stop, world=world)
    return folder


def samples(folder: Path) -> list[list[Any]]:
    """(step, image, hash) of every sample of the run, sorted; steps that were made twice count once."""
    every = [tuple(row) for file in folder.glob("samples-*.json") for row in json.loads(file.read_text())]
    return sorted(map(list, set(every)))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """The weights of the last step and their moving average, by name."""
    newest = max((folder / "run" / "checkpoint").glob("step-*"))
    state = checkpoint.read(newest)
    every = {f"{part}/{name}": t for part in ("objective", "ema") for name, t in state.part(part).items()}
    return {name: tensor for name, tensor in every.items() if name.startswith(("objective/model.", "ema/"))}


def difference(one: Path, other: Path) -> float:
    """The largest of any weight."""
    first, second = weights(one), weights(other)
    assert first
    assert first.keys() == second.keys()
    return max(float((first[name].double() - second[name].double()).abs().max()) for name in first)


def _forked(function: Callable[..., None], *args: Any, world: int) -> None:
    multiprocessing.get_context("forkserver").set_forkserver_preload(["torch._dynamo", "vitrail.run.train"])
    torch.multiprocessing.start_processes(function, args, nprocs=world, start_method="forkserver")


def cells(steps: int, quick: bool) -> list[tuple[list[tuple[int, int | None]], dict[str, Any]]]:
    """Parts and settings of every row."""
    moved: list[tuple[int, int | None]] = [(4, 2), (2, 4), (3, 6), (1, None)]
    rows: list[tuple[list[tuple[int, int | None]], dict[str, Any]]] = []
    worlds, counts = ((2, 3), (0,)) if quick else ((1, 2, 3, 4), (0, 1, 2))
    rows += [([(world, None)], {"data.workers": workers}) for world in worlds for workers in counts]
    rows += [(moved, {"data.workers": 0})] if quick else [(moved, {"data.workers": w}) for w in (0, 2)]
    rows += [([(2, None)], {"data.workers": 0, "engine.accumulate": 2})]
    full: dict[str, Any] = {"data.workers": 0, "engine.shard": "full"}
    for name in ("adamw", "lamb", "muon"):
        rows += [([(world, None)], {**full, "optim.name": name}) for world in ((2,) if quick else (2, 3, 4))]
    rows += [([(2, None)], {**full, "engine.accumulate": 2}), (moved, full)]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--quick", action="store_true", help="few rows")
    parser.add_argument("--json", help="append rows to this file")
    words = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as name:
        references: dict[str, Path] = {}
        print("| processes | sharding | optimizer | accumulate | workers | samples | largest difference of weights |")
        print("|---|---|---|---|---|---|---|")
        for number, (parts, settings) in enumerate(cells(words.steps, words.quick)):
            optim = settings.get("optim.name", "adamw")
            common = {"optim.steps": words.steps, "optim.name": optim}
            if optim not in references:
                alone = {**common, "data.workers": 0}
                references[optim] = train_cell(_forked, Path(name) / f"one-{optim}", [(1, None)], **alone)
            cell = train_cell(_forked, Path(name) / f"cell-{number}", parts, **{**settings, **common})
            row = {
                "processes": " -> ".join(str(world) for world, _ in parts),
                "sharding": settings.get("engine.shard", "none"),
                "optimizer": optim,
                "accumulate": settings.get("engine.accumulate", 1),
                "workers": settings["data.workers"],
                "samples": "same" if samples(cell) == samples(references[optim]) else "DIFFERENT",
                "weights": f"{difference(cell, references[optim]):.1e}",
            }
            print(f"| {' | '.join(map(str, row.values()))} |", flush=True)
            if words.json:
                with Path(words.json).open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
