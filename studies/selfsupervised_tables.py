"""What the study of learning without labels found, as Markdown: mean and standard deviation over seeds."""

from __future__ import annotations

from pathlib import Path

from found import read_rows
from found_tables import Forms, Layout, all_tables


def percent(value: float) -> str:
    return f"{100 * value:.1f}"


FORMS: Forms = {
    "top1": ("top-1, %", percent),
    "knn1": ("1-NN, %", percent),
    "knn20": ("20-NN, %", percent),
    "linear": ("linear, %", percent),
    "knn1_rare": ("1-NN of rare, %", percent),
    "knn20_rare": ("20-NN of rare, %", percent),
    "val_knn20": ("20-NN of validation images, %", percent),
    "target_knn20": ("20-NN of the slow copy, %", percent),
    "rank": ("rank", lambda v: f"{v:.0f}"),
    "epochs": ("epochs", lambda v: f"{v:.0f}"),
    "images_per_second": ("img/s", lambda v: f"{v:,.0f}"),
    "seconds": ("seconds", lambda v: f"{v:.0f}"),
}
WORTH = ("knn1", "knn20", "linear")
COST = ("epochs", "images_per_second", "seconds")
TABLES: Layout = (
    ("settings", "Settings, ResNet-18, by validation images", ("val_knn20", "epochs")),
    ("main", "Without labels, ResNet-18", (*WORTH, "target_knn20", "rank", *COST)),
    ("vit", "Without labels, a small ViT", (*WORTH, "target_knn20", "rank", *COST)),
    ("cifar10", "Without labels, CIFAR-10, ResNet-18", (*WORTH, "target_knn20", "rank", *COST)),
    ("noise", "Wrong labels, ResNet-18; judged with true ones", ("top1", *WORTH, *COST)),
    ("coarse", "Coarse labels, ResNet-18; judged with fine ones", (*WORTH, *COST)),
    ("rates", "Students, by validation images", ("val_knn20", "epochs")),
    ("students", "A small student of a ResNet-18", (*WORTH, *COST)),
    ("tail", "Unbalanced data, ResNet-18; judged with all images", ("knn1", "knn1_rare", "knn20", "knn20_rare", *COST)),
    ("attention", "Attention of a ViT that was trained without labels", ("top1", *COST)),
    ("time", "Steps with nothing beside them", ("images_per_second",)),
    ("teacher", "Teachers trained again, because they were lost", COST),
)


def tables(folder: Path) -> str:
    """All tables that have rows. Raises `SystemExit` where there is nothing."""
    text = all_tables(folder, FORMS, TABLES)
    rows = [row for row in read_rows(folder) if "seconds" in row]
    return f"{text}\n\nAll rows together: {sum(row['seconds'] for row in rows) / 60:.1f} minutes."
