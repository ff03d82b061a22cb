"""Embeddings and labels of a split, computed once and kept for label_errors.py and suggestion.py.

    python benchmarks/embeddings.py RUN --data cifar10.npz --split train test --out FOLDER

RUN is a run or model folder; FOLDER/SPLIT.npz then holds `embedding` (float16 [images, width]) and `label`, in the
order of the split.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch

from vitrail.data.open import open_data
from vitrail.engine.device import choose_device, choose_precision
from vitrail.measure.retrieval import Rows, embed_all
from vitrail.run.data_module import evaluation_batches
from vitrail.run.evaluate import load


def embedded(model: str, uri: str, split: str, most: int | None, device: torch.device) -> Rows:
    """Of a model, or read from a folder of such files; of the first `most` images, whose order is random anyway."""
    stored = Path(model) / f"{split}.npz"
    if stored.is_file():
        with np.load(stored, allow_pickle=False) as file:
            return torch.from_numpy(file["embedding"][:most]).float(), torch.from_numpy(file["label"][:most])
    network = load(model).to(device)
    rows = open_data(uri, val_fraction=0.0)[split]
    rows = rows.take(range(min(most or len(rows), len(rows))))
    with evaluation_batches(network, rows, network.preprocess, batch=500, device=device, workers=None) as loader:
        found = embed_all(network, loader, device=device, autocast=choose_precision("auto", device))
    return found.embedding.cpu(), found.label.cpu()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("--data", required=True)
    parser.add_argument("--split", nargs="+", default=["train", "test"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for split in options.split:
        rows, labels = embedded(options.run, options.data, split, None, choose_device(options.device))
        np.savez(options.out / f"{split}.npz", embedding=rows.half().numpy(), label=labels.numpy())
        print(f"{options.out / split}.npz: {len(rows)} images, width {rows.shape[1]}")


if __name__ == "__main__":
    main()
