"""What the study of GeNIe found, as Markdown."""

from __future__ import annotations

from pathlib import Path

from found_tables import Forms, Layout, Row, all_tables


def _percent(v: float) -> str:
    return f"{100 * v:.1f}"


FORMS: Forms = {
    "loss": ("validation loss", lambda v: f"{v:.4f}"),
    "loss_early": ("little noise", lambda v: f"{v:.4f}"),
    "loss_middle": ("some", lambda v: f"{v:.4f}"),
    "loss_late": ("much", lambda v: f"{v:.4f}"),
    "top1": ("test top-1, %", _percent),
    "knn20": ("20 neighbours, test, %", _percent),
    "consistent": ("label right by the oracle, %", _percent),
    "consistent_interval": ("± 95 %", _percent),
    "of_source": ("still the source, %", _percent),
    "distance": ("pixel distance to the source", lambda v: f"{v:.3f}"),
    "mean_r": ("mean r", lambda v: f"{v:.2f}"),
    "jump": ("largest step over mean step", lambda v: f"{v:.2f}"),
    "logistic": ("logistic, %", _percent),
    "logistic_interval": ("± 95 %", _percent),
    "gain": ("against weak, points", lambda v: f"{100 * v:+.1f}"),
    "gain_interval": ("± 95 %", _percent),
    "svm": ("SVM, %", _percent),
    "prototype": ("prototype, %", _percent),
    "extra": ("images added a class", lambda v: f"{v:.0f}"),
    "episodes": ("episodes", lambda v: f"{v:.0f}"),
    "overlap": ("overlap", lambda v: f"{v:.2f}"),
    "p_source": ("P(source)", lambda v: f"{v:.3f}"),
    "p_target": ("P(target)", lambda v: f"{v:.3f}"),
    "many": ("Many, %", _percent),
    "med": ("Med, %", _percent),
    "few": ("Few, %", _percent),
    "all": ("all, %", _percent),
    "real": ("real images", lambda v: f"{v:.0f}"),
    "made": ("made", lambda v: f"{v:.0f}"),
    "evaluations": ("network evaluations", lambda v: f"{v:.0f}"),
    "images_per_second": ("images/s", lambda v: f"{v:.0f}"),
    "seconds": ("seconds", lambda v: f"{v:.1f}"),
}
TABLES: Layout = (
    (
        "diffusion",
        "The diffusion model, of all classes",
        ("loss", "loss_early", "loss_middle", "loss_late"),
    ),
    ("classifiers", "Who judges and who embeds", ("top1", "knn20")),
    (
        "oracle",
        "What made images show",
        (
            "consistent",
            "consistent_interval",
            "of_source",
            "distance",
            "mean_r",
            "jump",
            "evaluations",
            "images_per_second",
        ),
    ),
    ("round trip", "To another class and back with r 0.5", ("distance",)),
    (
        "fewshot",
        "Few labelled images (the same episodes for all rows; ± is over episodes)",
        (
            "logistic",
            "logistic_interval",
            "gain",
            "gain_interval",
            "svm",
            "prototype",
            "extra",
            "mean_r",
            "evaluations",
            "episodes",
        ),
    ),
    ("hardness", "What an SVM of the labelled images says of made ones", ("overlap", "p_source", "p_target")),
    (
        "tail",
        "A long tail, images made for its rarest third",
        ("many", "med", "few", "all", "real", "made", "consistent", "evaluations"),
    ),
    ("training", "Training", ("seconds",)),
)


def tables(folder: Path) -> str:
    """All tables that have rows. Raises `SystemExit` where there is nothing."""
    return all_tables(folder, FORMS, TABLES, _with_width)


def _with_width(rows: list[Row]) -> list[Row]:
    """Half the width of an interval, where both its ends are known."""
    return [
        {**row, "consistent_interval": (row["high"] - row["low"]) / 2} if {"low", "high"} <= row.keys() else row
        for row in rows
    ]
