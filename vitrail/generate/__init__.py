"""`vitrail augment`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from vitrail.console import fail, output
from vitrail.schema import Positional


@dataclass(frozen=True)
class AugmentCommand:
    """Generate training images where a class has few, or is confused with others, and a data set of all of them.

    GeNIe noises an image of one class part of the way and denoises it under another class, whose label it gets: a
    hard negative of the first, a hard positive of the second. OUT/labels.csv is an ordinary data set (real and
    generated images), OUT/contact.png shows samples, OUT/manifest.jsonl lists source, method and seed of each.
    Interrupted, the same command goes on.

    Example: vitrail augment cifar10.npz more/ --model runs/diffusion --up_to 100
    Example: vitrail augment photos/ more/ --method genie_ada --model runs/diffusion --judge runs/vit --each 20
    Example: vitrail augment runs/vit better/ --loop --model runs/diffusion --each 50
    """

    data: Annotated[str, Positional("DATA|RUN")]  # images, or with --loop a finished run
    out: Annotated[Path, Positional("OUT")]  # folder to write
    method: str = "genie"  # weak, strong, mixup, cutmix, img2img_low, img2img_high, txt2img, genie or genie_ada
    model: Annotated[str, "RUN|pipeline:FOLDER"] = ""
    """generator: a run of small-diffusion, or a pipeline of diffusers in a folder"""
    each: int | None = None  # new images per class
    up_to: int | None = None  # as many as bring a class up to this
    below: int | None = None  # only classes with fewer images than this
    only: Annotated[tuple[str, ...], "CLASS ..."] = ()  # only these classes
    policy: Literal["all", "random", "confused"] | None = None
    """sources are all other classes in turn, random images, or the classes most confused (default: all; with --loop:
    confused)"""
    judge: Annotated[Path | None, "RUN"] = None
    """a trained classifier: its confusion matrix on val names the confused classes, its embeddings serve genie_ada"""
    top: int = 4  # how many confused classes
    r: float = 0.8  # noise level of genie, 0 to 1
    r_schedule: Literal["cosine", "scaled_linear"] | None = None
    """the noise schedule on which r is stated; scaled_linear is Stable Diffusion's, as in papers (default: that of the
    model)"""
    superclass: str | None = None  # for prompts: a photo of a CLASS, a type of SUPERCLASS
    loop: bool = False  # find the worst classes of a run, generate images for them, train it again, compare
    worst: int = 3  # how many classes of --loop
    real: bool = True  # generated images alone in OUT; without this flag it has the real ones, too
    seed: int = 0  # of all randomness
    batch: int = 64  # images at a time
    device: str = "auto"  # auto, cpu, cuda
    json: bool = False  # print one JSON object

    def __call__(self) -> int:
        from vitrail.engine.loop import Stopped
        from vitrail.generate import run as augmenting

        others = ("data", "out", "only", "loop", "worst", "real", "json")
        options = {name: value for name, value in vars(self).items() if value is not None and name not in others}
        results: dict[str, str] = {}
        if self.loop:
            if self.only or not self.real:
                return fail(
                    "--loop chooses classes itself and trains on real images, too; leave out --only and --no_real"
                )
            try:
                augmented, run, comparison = augmenting.failure_loop(
                    self.data, self.out, worst=self.worst, quiet=self.json, **options
                )
            except Stopped:
                return fail("stopped; the same command goes on where it was", 130)
            results = {"run": str(run), "comparison": str(comparison / "report.html")}
        else:
            augmented = augmenting.augment(
                self.data, self.out, only=self.only, real=self.real, quiet=self.json, **options
            )
        from rich.table import Table

        table = Table("class", "real", "generated", box=None, pad_edge=False)
        for name, (real, generated) in augmented.counts.items():
            if generated:
                table.add_row(name, f"{real:,}", f"{generated:,}")
        folder = augmented.folder
        text = f"{augmented.made:,} images in {folder}, {augmented.new:,} of them new; look at {folder / 'contact.png'}"
        paths = [f"{name}: {path}" for name, path in {"data": augmented.table, **results}.items()]
        return output(self.json, {**augmented.to_json(), **results}, table, text, *paths)
