"""What the study of adaptive computation found, as Markdown."""

from __future__ import annotations

from pathlib import Path

from found_tables import Forms, Layout, all_tables

FORMS: Forms = {
    "top1": ("top-1, %", lambda v: f"{100 * v:.1f}"),
    "macs": ("MMACs", lambda v: f"{v / 1e6:.0f}"),
    "share": ("of the whole, %", lambda v: f"{100 * v:.0f}"),
    "tokens": ("tokens a block", lambda v: f"{v:.1f}"),
    "success": ("success, %", lambda v: f"{100 * v:.0f}"),
    "train_success": ("on training images, %", lambda v: f"{100 * v:.0f}"),
    "attended": ("tokens attended to", lambda v: f"{v:.1f}"),
    "sampled_images_per_second": ("img/s", lambda v: f"{v:,.0f}"),
    "dense_images_per_second": ("dense img/s", lambda v: f"{v:,.0f}"),
    "gain": ("times dense", lambda v: f"{v:.2f}"),
    "points": ("points (up to 1: share)", lambda v: f"{v:.2f}"),
    "gate_scale": ("scale", lambda v: f"{v:.2f}"),
    "gate_center": ("centre", lambda v: f"{v:.2f}"),
    "halting": ("halting before the last block, %", lambda v: f"{100 * v:.1f}"),
    "seconds": ("seconds", lambda v: f"{v:.0f}"),
}
TABLES: Layout = (
    ("base", "The plain model", ("top1", "macs")),
    ("ats", "Token sampling: accuracy against cost", ("top1", "macs", "share", "tokens")),
    ("speed", "Token sampling: speed", ("sampled_images_per_second", "dense_images_per_second", "gain")),
    ("ablation", "Ways of sampling at about equal cost, without training", ("top1", "macs", "share", "points")),
    (
        "choice",
        "Choices for A-ViT, on validation images",
        ("top1", "share", "gate_scale", "gate_center", "halting"),
    ),
    ("victims", "Adaptive models", ("top1", "macs", "share", "tokens")),
    ("attacks", "Attacks", ("top1", "macs", "success", "train_success", "attended")),
    ("transfer", "Patches on other victims", ("top1", "macs", "success")),
    ("defence", "A-ViT defended, and trained as long without patches", ("top1", "macs", "share", "success")),
    ("training", "Training", ("seconds",)),
)


def tables(folder: Path) -> str:
    """All tables that have rows. Raises `SystemExit` where there is nothing."""
    return all_tables(folder, FORMS, TABLES)
