"""A network of 784-256-10 with 32 parameters per layer: all weights, PRANC and NOLA on the embedded Fashion-MNIST.

    python studies/adapter_toy.py [--seeds 3] [--epochs 200]

Prints Markdown, mean and standard deviation over seeds; seconds are of training with nothing else on the device, each
step one CUDA graph where there is CUDA.

Expected (NOLA, arXiv 2310.02556, on MNIST): the loss is lower and the time shorter with NOLA than with PRANC.
"""

from __future__ import annotations

import argparse
import time
from itertools import product

import numpy as np
import torch
import torch.nn.functional as F
from row_table import Row, Rows
from torch import Tensor, nn

from vitrail.data.open import open_data
from vitrail.measure.speed import as_one_graph
from vitrail.model.adapters.apply import apply
from vitrail.model.adapters.config import AdapterConfig, Nola, Pranc

METHODS: dict[str, AdapterConfig | None] = {
    "dense": None,
    "PRANC": Pranc(coefficients=32, targets=("*",), train_head=False),
    "NOLA, rank 4": Nola(rank=4, coefficients=16, targets=("*",), train_head=False),
}
BATCH, RATE, DENSE_RATE = 512, 0.05, 1e-3
Images = tuple[Tensor, Tensor]  # [images, 784] in 0..1, [images] labels


def fashion(split: str, device: torch.device) -> Images:
    rows = open_data("embedded:fashion")[split]
    pixels = np.stack([np.asarray(rows.read(row).convert("L")) for row in range(len(rows))])
    return torch.from_numpy(pixels).to(device).flatten(1) / 255, torch.from_numpy(rows.labels.copy()).to(device)


@torch.enable_grad()
def train(
    config: AdapterConfig | None, seed: int, images: Tensor, labels: Tensor, epochs: int
) -> tuple[nn.Module, float]:
    """The network after training, and its seconds."""
    device = images.device
    fast = device.type == "cuda"
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10)).to(device)
    if config is not None:
        apply(model, config)
    trained = [p for p in model.parameters() if p.requires_grad]
    rate = DENSE_RATE if config is None else RATE
    optimizer = torch.optim.Adam(trained, lr=rate, fused=fast, capturable=fast)
    rows = torch.arange(BATCH, device=device)

    def step() -> None:
        F.cross_entropy(model(images[rows]), labels[rows]).backward()
        optimizer.step()
        optimizer.zero_grad()

    again = as_one_graph(step) if fast else step  # launches would be all the time of a network this small
    began = time.monotonic()
    for _ in range(epochs):
        order = torch.randperm(len(images), device=device)
        for chosen in order[: len(order) // BATCH * BATCH].split(BATCH):
            rows.copy_(chosen)
            again()
    if fast:
        torch.cuda.synchronize()
    return model, time.monotonic() - began


@torch.no_grad()
def metrics(config: AdapterConfig | None, seed: int, train_set: Images, test_set: Images, epochs: int) -> Row:
    model, seconds = train(config, seed, *train_set, epochs)
    row: Row = {"parameters": sum(p.numel() for p in model.parameters() if p.requires_grad), "seconds": seconds}
    row["training loss"] = float(F.cross_entropy(model(train_set[0]), train_set[1]))
    for name, (images, labels) in (("training", train_set), ("test", test_set)):
        row[f"{name} top1"] = float((model(images).argmax(1) == labels).float().mean())
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=200)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sets, rows = [fashion(split, device) for split in ("train", "test")], Rows()
    for (name, config), seed in product(METHODS.items(), range(options.seeds)):
        rows.row("Fashion-MNIST", name, seed, lambda c=config, s=seed: metrics(c, s, *sets, options.epochs))
    print(rows.markdown())


if __name__ == "__main__":
    main()
