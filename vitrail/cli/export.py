"""`vitrail export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import tyro

from vitrail.cli.say import print_json


def export(
    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")],
    out: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="FILE")],
    /,
    to: Literal["torch", "onnx"] | None = None,
    input: Literal["bytes", "float"] = "bytes",  # noqa: A002, the word for it
    output: Literal["probabilities", "logits"] = "probabilities",
    json: bool = False,
) -> int:
    """A trained model as one file for other programs, compared with the model before it is kept.

    Class names and preprocessing are in the file. Example: vitrail export runs/demo model.onnx

    Args:
        run: run folder or model folder
        out: file to write: .pt2 for torch, .onnx for onnx
        to: torch (torch.export, read without vitrail) or onnx (none: by the file's ending)
        input: bytes (0 to 255, normalised inside) or float (already normalised)
        output: probabilities or logits
        json: print one JSON object
    """
    from vitrail import api
    from vitrail.model.export import to_onnx, to_torch

    kinds = {".pt2": "torch", ".onnx": "onnx"}
    if to is None and out.suffix not in kinds:
        raise ValueError(f"{out} ends neither in .pt2 nor in .onnx; say --to torch or --to onnx")
    model = api.load(run)
    write = to_onnx if (to or kinds[out.suffix]) == "onnx" else to_torch
    made = write(model, out, input=input, output=output)
    if json:
        print_json(made.to_json())
        return 0
    size, classes = model.preprocess.size, len(model.classes)
    print(f"{out}: {made.bytes / 1e6:.1f} MB, {input} [batch, 3, {size}, {size}] -> {output} [batch, {classes}]")
    figures = ", ".join(f"{value:.1g} at batch {batch}" for batch, value in made.differences.items())
    print(f"largest difference of logits from the model: {figures}")
    return 0
