"""`vitrail export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import tyro

from vitrail.cli.say import print_json
from vitrail.files import refuse_unwritable


def export(
    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")],
    out: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="FILE")],
    /,
    to: Literal["torch", "onnx", "adapter", "peft"] | None = None,
    input: Literal["bytes", "float"] = "bytes",  # noqa: A002, the word for it
    output: Literal["probabilities", "logits"] = "probabilities",
    base: Annotated[Path | None, tyro.conf.arg(metavar="PATH")] = None,
    bits: int | None = None,
    json: bool = False,
) -> int:
    """A trained model as one file for other programs, compared with the model before it is kept.

    Class names and preprocessing are in the file.

    Example: vitrail export runs/demo model.onnx
    Example: vitrail export runs/birds birds.safetensors --bits 4        (an adapter alone, in fewer bits)

    Args:
        run: run folder or model folder
        out: file to write: .pt2 for torch, .onnx for onnx, .safetensors for an adapter; a folder for peft
        to: torch (torch.export, read without vitrail), onnx, adapter or peft (none: by the file's ending)
        input: bytes (0 to 255, normalised inside) or float (already normalised)
        output: probabilities or logits
        base: of an adapter's run: where the weights are that it was trained on (default: where they were)
        bits: round what an adapter trained to so many bits, 2 to 8; its own file packs them
        json: print one JSON object
    """
    from vitrail import api

    kinds = {".pt2": "torch", ".onnx": "onnx", ".safetensors": "adapter"}
    if to is None and out.suffix not in kinds:
        raise ValueError(
            f"{out} ends neither in .pt2, .onnx nor .safetensors; say --to torch or --to onnx (an adapter: --to"
            " adapter, or --to peft for a folder)"
        )
    refuse_unwritable(out, "choose another FILE", file=to != "peft")
    if (to or kinds[out.suffix]) in ("adapter", "peft"):
        return _adapter(run, out, to or "adapter", base, bits, json)
    from vitrail.model.export import to_onnx, to_torch

    model = api.load(run, base=base, bits=bits)
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


def _adapter(run: Path, out: Path, to: str, base: Path | None, bits: int | None, json: bool) -> int:
    """The adapter of a run alone: as a file of ours, or as a folder for peft."""
    from vitrail import api
    from vitrail.model.adapters.adapter_file import save_adapter
    from vitrail.model.adapters.apply import adapters_of
    from vitrail.model.adapters.config import read_header, summary
    from vitrail.model.adapters.peft import export_peft

    model = api.load(run, base=base, bits=bits if to == "peft" else None, merged=False)
    adapters = adapters_of(model)
    if adapters is None or adapters.active is None:
        raise ValueError(f"{run} is a whole model, without an adapter; export it to torch or onnx")
    if to == "peft":
        export_peft(model, adapters.active, out)
        size = sum(file.stat().st_size for file in out.iterdir())
        if json:
            print_json({"out": str(out), "to": to, "bytes": size})
        else:
            print(f"{out}: {size:,} bytes, for peft")
        return 0
    save_adapter(model, adapters.active, out, bits=bits)
    found = summary(read_header(out))
    if json:
        print_json({"out": str(out), "to": to, **found})
    else:
        print(f"{out}: {found['bytes']:,} bytes, {found['stored']:,} numbers of {found['kind']}, {found['bits']} bits")
    return 0
