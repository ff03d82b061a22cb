"""`vitrail augment`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from vitrail.cli.say import fail, print_json, show


def augment(
    data: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="DATA|RUN")],
    out: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="OUT")],
    /,
    method: str = "genie",
    model: Annotated[str, tyro.conf.arg(metavar="RUN|pipeline:FOLDER")] = "",
    each: int | None = None,
    up_to: int | None = None,
    below: int | None = None,
    only: Annotated[tuple[str, ...], tyro.conf.arg(metavar="CLASS ...")] = (),
    policy: Literal["all", "random", "confused"] | None = None,
    judge: Annotated[Path | None, tyro.conf.arg(metavar="RUN")] = None,
    top: int = 4,
    r: float = 0.8,
    r_schedule: Literal["cosine", "scaled_linear"] | None = None,
    superclass: str | None = None,
    loop: bool = False,
    worst: int = 3,
    real: bool = True,
    seed: int = 0,
    batch: int = 64,
    device: str = "auto",
    json: bool = False,
) -> int:
    """Make training images where a class has few, or is confused with others, and a data set of all of them.

    GeNIe noises a picture of one class part of the way and takes the noise away under another, whose label it gets: a
    hard negative of the first, a hard positive of the second. OUT/labels.csv is an ordinary data set (real images
    beside made ones), OUT/contact.png shows some, OUT/manifest.jsonl says what each was made of. Interrupted, the same
    command goes on.

    Example: vitrail augment cifar10.npz more/ --model runs/diffusion --up_to 100
    Example: vitrail augment photos/ more/ --method genie_ada --model runs/diffusion --judge runs/vit --each 20
    Example: vitrail augment runs/vit better/ --loop --model runs/diffusion --each 50

    Args:
        data: images, or with --loop a finished run
        out: folder to write
        method: weak, strong, mixup, cutmix, img2img_low, img2img_high, txt2img, genie or genie_ada
        model: what makes images: a run of small-diffusion, or a pipeline of diffusers in a folder
        each: new images a class
        up_to: as many as bring a class up to this
        below: only classes with fewer images than this
        only: only these classes
        policy: sources are all other classes in turn, random images, or the classes most confused (default: all; with
            --loop: confused)
        judge: a trained classifier: says what is confused, on val, and embeds for genie_ada
        top: how many confused classes
        r: how much noise of genie, 0 to 1
        r_schedule: the noise schedule on which r is stated; scaled_linear is Stable Diffusion's, as in papers (default:
            that of the model)
        superclass: for prompts: a photo of a CLASS, a type of SUPERCLASS
        loop: find the worst classes of a run, make images for them, train it again, compare
        worst: how many classes of --loop
        real: made images alone in OUT; without this flag the real ones are beside them
        seed: of everything that is drawn
        batch: images at a time
        device: auto, cpu, cuda
        json: print one JSON object
    """
    from vitrail.generate import run as augmenting

    options: dict[str, Any] = {"method": method, "model": model, "each": each, "up_to": up_to, "below": below}
    options |= {
        "top": top,
        "r": r,
        "r_schedule": r_schedule,
        "superclass": superclass,
        "seed": seed,
        "batch": batch,
        "device": device,
    }
    if policy is not None:
        options["policy"] = policy
    if judge is not None:
        options["judge"] = judge
    if loop:
        if only or not real:
            return fail("--loop chooses classes itself and trains on real images, too; leave --only and --no-real")
        made, again, comparison = augmenting.failure_loop(data, out, worst=worst, quiet=json, **options)
        told = {"run": str(again), "comparison": str(comparison / "report.html")}
    else:
        made = augmenting.augment(data, out, only=only, real=real, quiet=json, **options)
        told = {}
    if json:
        print_json({**made.to_json(), **told})
        return 0
    from rich.table import Table

    table = Table("class", "real", "made", box=None, pad_edge=False)
    for name, (have, more) in made.counts.items():
        if more:
            table.add_row(name, f"{have:,}", f"{more:,}")
    show(table)
    print(
        f"{made.made:,} images in {made.folder}, {made.new:,} of them made now; look at {made.folder / 'contact.png'}"
    )
    print(f"data: {made.table}")
    for name, where in told.items():
        print(f"{name}: {where}")
    return 0
