"""How alike the models of the study of attention transfer are inside: what `vitrail inspect` finds of pairs of them.

OUT/cka.png        likeness of every layer to that of the fine-tuned model
OUT/jsd.png        divergence of attention maps from the autoencoder's, heads matched one to one
OUT/attention.png  what the class token attends to, models side by side
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from attention_models import Models

from vitrail.inspect.run import inspect_models
from vitrail.inspect.section import Inspection

TO_TUNED = ("mae", "scratch", "copy", "distill")
TO_MAE = ("tune", "scratch", "distill", "copy-q", "copy-k")
SIDE_BY_SIDE = ("mae", "distill", "scratch", "tune")
MATCHINGS = ("direct", "bipartite", "minimum", "averaged")
IMAGES = 256
TITLES = {
    "mae": "autoencoder",
    "tune": "fine-tuned",
    "copy-q": "copied q",
    "copy-k": "copied k",
    "distill": "distilled",
}


class Pictures:
    """Rows of `cka` and `jsd`, and pictures of them."""

    def __init__(self, models: Models, out: Path) -> None:
        self.models, self.found, self.out = models, models.found, out
        self._made: dict[str, Inspection] = {}

    def draw(self, seed: int) -> None:
        likeness = {name: self._row("cka", name, "tune", "one to one", seed) for name in TO_TUNED}
        matched = {
            matching: {name: self._row("jsd", name, "mae", matching, seed) for name in TO_MAE} for matching in MATCHINGS
        }
        self.found.row("pictures", "png", "cka, jsd, attention", seed, lambda: self._drawn(likeness, matched, seed))

    def _row(self, table: str, first: str, second: str, what: str, seed: int) -> list[float]:
        """One value a layer; the row also has means of thirds."""
        subject = TITLES.get(first, first)
        row = self.found.row(table, subject, what, seed, lambda: self._compared(table, first, second, what, seed))
        return [] if row is None else row["layers"]

    def _compared(self, table: str, first: str, second: str, what: str, seed: int) -> dict[str, Any]:
        found, _ = self._inspected((first, second), seed, count=1)
        values = found.cka_diagonal if table == "cka" else found.divergence[what]
        layers = [round(v, 5) for v in values if v is not None]
        ends = [len(layers) * i // 3 for i in range(4)]
        thirds = [layers[a:b] for a, b in pairwise(ends)]
        means = {n: sum(v) / len(v) for n, v in zip(("early", "middle", "late"), thirds, strict=True) if v}
        return {"split": "test", **means, "layers": layers}

    def _inspected(self, names: Sequence[str], seed: int, count: int) -> tuple[Inspection, Path]:
        """What is found of some models, the first two compared, and where its own pictures are."""
        key = "-".join((*names, str(count)))
        folder = self.models.folder / "inspect" / key
        if key not in self._made:
            self._made[key], _ = inspect_models(
                [self.models.folder_of(name, seed) for name in names],
                data=self.models.data.few.data,
                split="test",
                count=count,
                over=12 if self.models.smoke else IMAGES,
                what=("attention", "likeness") if len(names) > 1 else ("attention",),
                out=folder,
                device=self.models.device.type,
            )
        return self._made[key], folder

    def _drawn(
        self, likeness: dict[str, list[float]], matched: dict[str, dict[str, list[float]]], seed: int
    ) -> dict[str, Any]:
        import matplotlib as mpl

        mpl.use("Agg")
        import matplotlib.pyplot as plt

        self.out.mkdir(parents=True, exist_ok=True)
        figure, axis = plt.subplots(figsize=(5, 3.2))
        _lines(axis, likeness, "CKA to the fine-tuned model")
        axis.set_ylim(0, 1)
        axis.legend(fontsize=7)
        _save(figure, self.out / "cka.png")
        figure, axes = plt.subplots(1, len(matched), figsize=(3 * len(matched), 3.2), sharey=True)
        for axis, (matching, curves) in zip(axes, matched.items(), strict=True):
            _lines(axis, curves, "divergence from the autoencoder, nats" if axis is axes[0] else "")
            axis.set_title(matching, fontsize=9)
        axes[-1].legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))  # beside the curves, once for all
        _save(figure, self.out / "jsd.png")
        _, folder = self._inspected(SIDE_BY_SIDE, seed, count=4)
        shutil.copyfile(folder / "attention.png", self.out / "attention.png")
        return {"files": sorted(path.name for path in self.out.glob("*.png"))}


def _lines(axis: Any, curves: dict[str, list[float]], label: str) -> None:
    for name, values in curves.items():
        axis.plot(range(len(values)), values, marker=".", label=TITLES.get(name, name))
    axis.set_xlabel("layer")
    axis.set_ylabel(label)


def _save(figure: Any, path: Path) -> None:
    import matplotlib.pyplot as plt

    figure.tight_layout()
    figure.savefig(path, dpi=90)
    plt.close(figure)
