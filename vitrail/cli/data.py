"""`vitrail check` and `vitrail pack`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import tyro

from vitrail.cli.say import fail, print_json, rate, show
from vitrail.files import refuse_unwritable


def check(
    data: tyro.conf.Positional[str],
    /,
    out: Path | None = None,
    strict: bool = False,
    json: bool = False,
) -> int:
    """Look for trouble in a data set: unreadable and odd images, duplicates, leaks between splits, rare classes.

    Exit code: 0 nothing serious, 1 warnings with --strict, 2 errors.

    Example: vitrail check photos/ --out sheet.png

    Args:
        data: folder, .csv, .parquet, .npz, .tar, hf:OWNER/NAME, torchvision:NAME, embedded:fashion, synthetic:shapes
        out: write a sheet of pictures to this PNG
        strict: warnings count, too
        json: print one JSON object
    """
    from rich.table import Table

    from vitrail.data.check.check import check_data, picture_sheet
    from vitrail.data.open import open_data
    from vitrail.engine.progress import Progress

    if out is not None:
        refuse_unwritable(out, file=True)
    opened = open_data(data)
    total = sum(len(split) for split in opened.splits.values())
    with Progress("check", total, quiet=json) as bar:
        report = check_data(opened, progress=lambda done, _: bar.advance(done - bar.done, f"{done} images"))
    if out is not None:
        picture_sheet(opened, out, report)
    if json:
        print_json(report.to_json())
    else:
        table = Table(title=data, box=None, title_justify="left", header_style="bold")
        for column in ("", "finding", "images", "where"):
            table.add_column(column, overflow="fold")
        for row in report.rows():
            table.add_row(*row)
        show(table)
        if out is not None:
            print(f"pictures: {out}")
    return report.exit_code(strict)


def pack(
    data: Annotated[tyro.conf.Positional[str | None], tyro.conf.arg(metavar="URI")] = None,
    out: Annotated[tyro.conf.Positional[Path | None], tyro.conf.arg(metavar="FOLDER")] = None,
    /,
    size: int = 256,
    workers: int | None = None,
    verify: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None,
    json: bool = False,
) -> int:
    """Decode a data set once into raw pixels, which every epoch then reads without decoding.

    Interrupted, the same command goes on where it was. Exit code: 1 where --verify finds damage.

    Example: vitrail pack photos/ packed/ --size 256        (then vitrail train vit --data packed/)

    Args:
        data: folder, .csv, .parquet, .npz, .tar, hf:OWNER/NAME, torchvision:NAME, embedded:fashion, synthetic:shapes
        out: folder to write
        size: longest shorter side, larger images are shrunk to it (0: keep as they are)
        workers: threads that decode (default: one a core, at most 16)
        verify: compare every byte of this packed folder with its checksum, and pack nothing
        json: print one JSON object
    """
    if verify is not None:
        from vitrail.data.sources.packed import verify as find_damage

        with rate("verify", "MB/s", 1e6, quiet=json) as told:
            faults = find_damage(verify, told)
        if json:
            print_json({"path": str(verify), "faults": faults})
        else:
            print("\n".join(faults) or f"{verify}: every byte is as it was written")
        return 1 if faults else 0
    if data is None or out is None:
        return fail("name a data set and a folder to pack it into, or a packed folder with --verify")
    refuse_unwritable(out, "name another FOLDER")
    from vitrail.data.open import open_source
    from vitrail.data.pack import pack as write_pack

    with rate("pack", "img/s", quiet=json) as told:
        made = write_pack(open_source(data), out, size, workers, told)
    if json:
        print_json(made.to_json())
        return 0
    for split, key, reason in made.skipped:
        print(f"left out of {split}: {key}: {reason}", file=sys.stderr)
    done = "already packed" if made.already else "packed"
    left_out = f", {len(made.skipped)} left out" if made.skipped else ""
    print(f"{done}: {made.images} images, {made.bytes / 1e6:.1f} MB in {out}{left_out}")
    return 0
