"""What a trained model loses in 8 bits, and gains: files of `vitrail export` and of NNCF, on test images.

    python benchmarks/int8.py MODEL ... --data DATA [--threads 2] [--limit N] [--rounds 15] [--json FILE] [--smoke]

MODEL is a run or model folder; DATA has train images for calibration, val, and test (or val), each read once. Rows:

float32      the file of `vitrail export`, in onnxruntime; with `OpenVINO` the same file there, where it is installed
int8         all blocks in 8 bits (`--lose 100`), likewise
int8 kept    as `vitrail export --int8` keeps it: blocks may stay in float32, by accuracy on val; none where it rejects
NNCF         `nncf.quantize` of the float32 file, 256 images of train, run by OpenVINO; where both are installed

Top-1 is of single images, as files are deployed, and points are of the same images against float32, with a 95 %
interval (Agresti and Min). Latency is of one image, the median of all files of a model in turns; `of module` is that of
the PyTorch module over it. NNCF and OpenVINO are for comparison and are no dependencies.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from latency import onnxruntime_work, openvino_work
from rounds import in_turns, where
from torch import Tensor

from vitrail.data.dataset import DataSet
from vitrail.data.loading.loader import EvalLoader, auto_workers
from vitrail.data.preprocess import Preprocess
from vitrail.engine.device import keep_freed_memory
from vitrail.model.classifier import Classifier
from vitrail.model.export import read_onnx
from vitrail.model.parts.modules import placed
from vitrail.model.quantize import CALIBRATION, paired_interval
from vitrail.run.deploy import export_onnx
from vitrail.run.evaluate import load
from vitrail.run.run_data import open_for

CPU = torch.device("cpu")


def images_of(model: Classifier, data: DataSet, split: str, most: int) -> tuple[Tensor, Tensor]:
    """Up to so many images of a split, evenly spaced since folders are in order of classes, and their labels."""
    rows = data[split]
    rows = rows.take(np.linspace(0, len(rows) - 1, min(most, len(rows))).astype(int))
    with EvalLoader(rows, Preprocess(model.preprocess), batch=64, device=CPU, workers=auto_workers(rows)) as loader:
        batches = [(batch.views[0].clone(), batch.label.clone()) for batch in loader.received()]
    return torch.cat([images for images, _ in batches]), torch.cat([labels for _, labels in batches])


def with_nncf(file: Path, out: Path, calibration: Tensor, transformer: bool) -> None:
    """An OpenVINO model in 8 bits."""
    import nncf
    import openvino

    images = nncf.Dataset([image[None] for image in calibration.numpy()])
    kind = nncf.ModelType.TRANSFORMER if transformer else None
    model = openvino.Core().read_model(file)
    openvino.save_model(nncf.quantize(model, images, subset_size=len(calibration), model_type=kind), out)


def in_openvino(title: str) -> bool:
    return title == "NNCF" or title.endswith("OpenVINO")


def answers(file: Path, images: Tensor, title: str, threads: int) -> Tensor:
    """The class of every image, each computed alone."""
    if not in_openvino(title):
        run = read_onnx(file)
        return torch.cat([run(image[None]).argmax(1) for image in images])
    import openvino

    model = openvino.Core().read_model(file)
    model.reshape([1, *images.shape[1:]])
    request = openvino.compile_model(model, "CPU", {"INFERENCE_NUM_THREADS": threads}).create_infer_request()
    return torch.tensor(
        [int(np.argmax(next(iter(request.infer({0: image[None]}).values())))) for image in images.numpy()]
    )


def files_of(
    model: Classifier, run: Path, data: DataSet, folder: Path, say: Callable[[str], None]
) -> dict[str, tuple[Path, str]]:
    """The files of the table, and what is said of each."""
    files = {"float32": (folder / "float32.onnx", "")}
    export_onnx(model, files["float32"][0], run)
    for name, lose in (("int8", 100.0), ("int8 kept", 0.3)):
        path = folder / f"{name.replace(' ', '-')}.onnx"
        try:
            record = export_onnx(model, path, run, "int8", str(data.uri), lose).precision or {}
        except ValueError as error:
            say(f"{name}: {error}")
            continue
        kept = record.get("float32")
        files[name] = path, f"in float32: {', '.join(kept)}" if kept else ""
    if find_spec("openvino"):
        files |= {f"{name}, OpenVINO": files[name] for name in ("float32", "int8") if name in files}
        if find_spec("nncf"):
            calibration, _ = images_of(model, data, "train", CALIBRATION)
            transformer = any(isinstance(module, torch.nn.LayerNorm) for module in model.modules())
            with_nncf(files["float32"][0], folder / "nncf.xml", calibration, transformer)
            files["NNCF"] = folder / "nncf.xml", ""
    return files


def rows_of(run: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row per file of a model; prints what is rejected."""
    model = load(run).eval()
    data = open_for(model, options.data)
    split = "test" if "test" in data.splits else "val"
    images, labels = images_of(model, data, split, options.limit)
    with TemporaryDirectory() as name:
        files = files_of(model, run, data, Path(name), print)
        ways: dict[str, Callable[[], object]] = {}
        module, one = placed(model, CPU), images[:1]
        ways["module"] = lambda: module(one)
        for title, (file, _) in files.items():
            work = openvino_work if in_openvino(title) else onnxruntime_work
            ways[title] = partial(work(file, one, options.threads), 0)
        with torch.inference_mode():
            times = in_turns(ways, CPU, options.rounds)
        right = {
            title: (answers(file, images, title, options.threads) == labels).double()
            for title, (file, _) in files.items()
        }
        sizes = {
            title: sum(f.stat().st_size for f in file.parent.glob(f"{file.stem}.*"))
            for title, (file, _) in files.items()
        }
    rows = []
    for title, (_, note) in files.items():
        change = right[title] - right["float32"]
        row = {"model": run.name, "file": title, "split": split, "images": len(labels), "note": note}
        row |= {"top1": float(right[title].mean()), "change": float(change.mean()), "interval": paired_interval(change)}
        row |= {"ms": 1e3 * times.median(title), "module_ms": 1e3 * times.median("module"), "mb": sizes[title] / 1e6}
        rows.append(row)
    return rows


def printed(row: dict[str, Any]) -> str:
    low, high = (100 * end for end in row["interval"])
    change = "" if row["file"].startswith("float32") else f"{100 * row['change']:+.2f} ({low:+.2f} to {high:+.2f})"
    figures = (
        f"{100 * row['top1']:.2f}",
        change,
        f"{row['ms']:.2f}",
        f"{row['module_ms'] / row['ms']:.2f}",
        f"{row['mb']:.1f}",
    )
    return f"| {' | '.join((row['model'], row['file'], *figures, row['note']))} |"


def main() -> None:
    keep_freed_memory()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL", type=Path)
    parser.add_argument("--data", required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--limit", type=int, default=10_000, help="images of test at most")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, help="append rows to this file")
    parser.add_argument("--smoke", action="store_true", help="40 images and two rounds")
    options = parser.parse_args()
    if options.smoke:
        options.limit, options.rounds = 40, 2
    torch.set_num_threads(options.threads)
    print(f"{where(CPU)}, {options.threads} threads\n")
    print("| model | file | top-1, % | points | ms | of module | MB | |\n|---|---|---|---|---|---|---|---|")
    for run in options.models:
        for row in rows_of(run, options):
            print(printed(row), flush=True)
            if options.json:
                with options.json.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
