"""`vitrail check` and `vitrail pack`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from vitrail.console import fail, output, progress
from vitrail.files import reject_unwritable
from vitrail.schema import Positional


@dataclass(frozen=True)
class CheckCommand:
    """Look for trouble in a data set: unreadable and odd images, duplicates, leaks between splits, rare classes.

    Of a run, a model folder or a packed data set, every checksum is compared first. Exit code: 0 nothing serious, 1
    warnings with --strict, 2 errors.

    With --model classifiers that have not seen a label show whether it is probably wrong. --csv writes suspects to a
    table: put a class or `remove` into its column fix, and --apply writes the data set as a table with these fixes.

    Example: vitrail check photos/ --out sheet.png
    Example: vitrail check photos/ --model auto --csv suspects.csv
    Example: vitrail check cifar100.npz --model small-rsb --epochs 30 --csv suspects.csv
    Example: vitrail check photos/ --apply suspects.csv --out photos/corrected.csv
    Example: vitrail check runs/demo
    Example: vitrail check unlabelled/ --model runs/demo --suggest 100 --csv next.csv
    """

    data: Annotated[str, Positional("URI")]
    """folder, .csv, .parquet, .npz, .tar, hf:OWNER/NAME, torchvision:NAME, embedded:fashion, synthetic:shapes; or a
    run or model folder"""
    out: Path | None = None  # write a sheet of pictures to this PNG; with --apply a table to this CSV
    model: Annotated[str | None, "RUN|auto|RECIPE"] = None
    """find label errors by embeddings of this run or model folder, or of a network trained on the images without
    labels (auto); or by five trainings with labels, each without a fifth of the images (a recipe or a YAML file)"""
    epochs: int = 20  # of these trainings
    device: str = "auto"  # auto, cpu, cuda
    csv: Path | None = None  # write suspects, or with --suggest images to label, to this CSV
    apply: Path | None = None  # an edited CSV of suspects
    strict: bool = False  # warnings count, too
    suggest: int | None = None  # how many images to label next, by the embeddings of --model
    by: Literal["margin", "typical", "coverage", "both"] = "both"  # --suggest: from 10 labels per class, both is margin
    labelled: Annotated[Path | None, "CSV"] = None  # --suggest: the --csv of the round before, with labels in it
    channels: int = 3  # of images that are no RGB: pages and samples of TIFF files, the last axis of .npz arrays
    json: bool = False  # print one JSON object

    def __call__(self) -> int:
        from rich.table import Table

        if self.suggest is not None:
            return self._suggest(self.suggest)
        if self.labelled is not None:
            return fail("--labelled is the table of a round of --suggest; say how many images: --suggest 100")
        from vitrail.data.check.check import check_data, picture_sheet, write_suspects
        from vitrail.data.open import open_data
        from vitrail.data.sources.packed import is_packed
        from vitrail.data.sources.packed import verify as verify_packed
        from vitrail.data.sources.table import apply_fixes

        folder = Path(self.data)
        if any((folder / name).is_file() for name in ("config.yaml", "model.json", "model/model.json")):
            from vitrail.run.evaluate import verify

            return self._faults(verify(folder))
        if self.out is not None:
            reject_unwritable(self.out, file=True)
        if self.csv is not None:
            reject_unwritable(self.csv, "choose another --csv", file=True)
        opened = open_data(self.data, channels=self.channels)
        if self.apply is not None:
            if self.out is None or self.model is not None or self.csv is not None:
                return fail("--apply writes a table to --out CORRECTED.csv, and takes neither --model nor --csv")
            counts = apply_fixes(opened, self.apply, self.out)
            text = "{images} images, {changed} labels changed, {removed} images removed".format(**counts)
            return output(self.json, {"out": str(self.out), **counts}, f"{self.out}: {text}")
        if is_packed(folder) and (faults := verify_packed(folder)):
            return self._faults(faults)
        with progress("check", quiet=self.json) as bar:
            report = check_data(opened, progress=lambda done, total: bar(done, total, f"{done} images"))
        if self.model is not None:
            from vitrail.run.check_labels import check_labels

            report = check_labels(opened, report, self.model, self.epochs, self.device, self.json)
        if self.csv is not None:
            write_suspects(opened, report.suspects, self.csv)
        if self.out is not None:
            picture_sheet(opened, self.out, report)
        table = Table(title=self.data, box=None, title_justify="left", header_style="bold")
        for column in ("", "finding", "images", "where"):
            table.add_column(column, overflow="fold")
        for row in report.rows():
            table.add_row(*row)
        pictures = [] if self.out is None else [f"pictures: {self.out}"]
        output(self.json, report.to_json(), report.summary, *report.notes, table, *pictures)
        return report.exit_code(self.strict)

    def _suggest(self, count: int) -> int:
        from vitrail.data.check.contact_sheet import draw_sheet
        from vitrail.run.suggest import suggest, write_table

        if not self.model or self.model == "auto":
            return fail("--suggest needs the embeddings of a model; name a run or a model folder: --model RUN")
        for path in filter(None, (self.out, self.csv)):
            reject_unwritable(path, "name another file", file=True)
        result, opened, chosen = suggest(self.model, self.data, count, self.by, self.labelled, quiet=self.json)
        if self.csv is not None:
            write_table(self.csv, result)
        if self.out is not None:
            draw_sheet(opened, self.out, chosen, most_suspects=count)
        lines = [f"{row['score']:>10.4g}  {row['path']}" for row in result["suggestions"]]
        return output(self.json, result, f"round {result['round']}, {result['note']}", *lines)

    def _faults(self, faults: list[str]) -> int:
        sound = f"{self.data}: everything is as it was written"
        output(self.json, {"path": self.data, "faults": faults}, "\n".join(faults) or sound)
        return 2 if faults else 0


@dataclass(frozen=True)
class PackCommand:
    """Decode a data set once into raw pixels, which every epoch then reads without decoding.

    Interrupted, the same command goes on where it was. Exit code: 1 where --verify finds damage.

    Example: vitrail pack photos/ packed/ --size 256        (then vitrail train vit --data packed/)
    """

    data: Annotated[str | None, Positional("URI")] = None
    """folder, .csv, .parquet, .npz, .tar, hf:OWNER/NAME, torchvision:NAME, embedded:fashion, synthetic:shapes"""
    out: Annotated[Path | None, Positional("FOLDER")] = None  # folder to write
    size: int = 256  # maximum length of the shorter side; larger images are downscaled (0: none)
    workers: int | None = None  # threads that decode (default: one per core, at most 16)
    verify: Annotated[Path | None, "FOLDER"] = None
    """compare every byte of this packed folder with its checksum, and pack nothing"""
    json: bool = False  # print one JSON object

    def __call__(self) -> int:
        if self.verify is not None:
            return self._verify(self.verify)
        if self.data is None or self.out is None:
            return fail("name a data set and a folder to pack it into, or a packed folder with --verify")
        reject_unwritable(self.out, "name another FOLDER")
        from vitrail.data.open import open_source
        from vitrail.data.pack import pack

        with progress("pack", "img/s", quiet=self.json) as report:
            packed = pack(open_source(self.data), self.out, self.size, self.workers, report)
        for split, key, reason in () if self.json else packed.skipped:
            print(f"left out of {split}: {key}: {reason}", file=sys.stderr)
        done = "already packed" if packed.already else "packed"
        left_out = f", {len(packed.skipped)} left out" if packed.skipped else ""
        text = f"{done}: {packed.images} images, {packed.bytes / 1e6:.1f} MB in {self.out}{left_out}"
        return output(self.json, packed.to_json(), text)

    def _verify(self, folder: Path) -> int:
        from vitrail.data.sources.packed import verify

        with progress("verify", "MB/s", 1e6, quiet=self.json) as report:
            faults = verify(folder, report)
        sound = f"{folder}: every byte is as it was written"
        output(self.json, {"path": str(folder), "faults": faults}, "\n".join(faults) or sound)
        return 1 if faults else 0
