"""What the study of adapters found, as Markdown: mean and standard deviation over seeds."""

from __future__ import annotations

from pathlib import Path

from found_tables import Forms, Layout, all_tables


def percent(value: float) -> str:
    return f"{100 * value:.1f}"


def whole(value: float) -> str:
    return f"{value:,.0f}"


FORMS: Forms = {
    "top1": ("top-1, %", percent),
    "val_top1": ("val, %", percent),
    "loss": ("training loss", lambda v: f"{v:.3f}"),
    "train_top1": ("of training images, %", percent),
    "trained": ("numbers trained", whole),
    "adapter": ("without classifier and norms", whole),
    "stored": ("stored", whole),
    "bytes": ("bytes of the file", whole),
    "train_seconds": ("seconds of training", lambda v: f"{v:.1f}"),
    "memory": ("memory, MiB", lambda v: f"{v / 2**20:.0f}"),
    "step_ms": ("ms a step", lambda v: f"{v:.2f}"),
    "seconds": ("seconds", lambda v: f"{v:.1f}"),
}
NUMBERS = ("trained", "adapter", "stored", "bytes")
COST = ("train_seconds", "memory")
TABLES: Layout = (
    ("main", "From CIFAR-100 to CIFAR-10 (the second data set)", ("top1", "val_top1", *NUMBERS, *COST)),
    ("other", "From CIFAR-100 to the other images", ("top1", "val_top1", *NUMBERS, *COST)),
    ("bits", "Few bits a coefficient (32: first table)", ("top1", "bytes")),
    ("shots", "A few images a class, over samplings", ("top1", *NUMBERS[:2])),
    ("scratch", "From scratch, ResNet-20", ("top1", "val_top1", *NUMBERS, *COST)),
    ("toy", "784-256-10 on the embedded Fashion-MNIST", ("loss", "train_top1", "top1", "trained", *COST)),
    ("time", "A step of 500 images, one graph, not compiled", ("step_ms",)),
    ("choice", "Learning rates, on validation images", ("top1",)),
    ("few choice", "Learning rates with few images, on other classes", ("top1",)),
    ("training", "The base", ("seconds",)),
)


def tables(folder: Path) -> str:
    """All tables that have rows. Raises `SystemExit` where there is nothing."""
    return all_tables(folder, FORMS, TABLES)
