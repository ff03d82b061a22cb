"""`vitrail export`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from vitrail.console import output
from vitrail.files import reject_unwritable
from vitrail.schema import Positional

FORMATS = {".pt2": "torch", ".onnx": "onnx", ".safetensors": "adapter"}


@dataclass(frozen=True)
class ExportCommand:
    """A trained model as one file for other programs, compared with the model before it is kept.

    Class names and preprocessing are in the file.

    Example: vitrail export runs/demo model.onnx
    Example: vitrail export runs/birds birds.safetensors --bits 4        (an adapter alone, in fewer bits)
    """

    run: Annotated[Path, Positional("RUN")]  # run folder or model folder
    out: Annotated[Path, Positional("FILE")]
    """file to write: .pt2 for torch, .onnx for onnx, .safetensors for an adapter; a folder for peft"""
    to: Literal["torch", "onnx", "adapter", "peft"] | None = None
    """torch (torch.export, read without vitrail), onnx, adapter or peft (none: by the file's ending)"""
    input: Literal["bytes", "float"] = "bytes"  # bytes (0 to 255, normalised inside) or float (already normalised)
    output: Literal["probabilities", "logits"] = "probabilities"  # probabilities or logits
    base: Path | None = None
    """of an adapter's run: where the weights are that it was trained on (default: where they were)"""
    bits: int | None = None
    """round the trained parameters of an adapter to so many bits, 2 to 8; its own file packs them"""
    json: bool = False  # print one JSON object

    def __call__(self) -> int:
        from vitrail import load

        to, out = self.to or FORMATS.get(self.out.suffix), self.out
        if to is None:
            raise ValueError(
                f"{out} ends neither in .pt2, .onnx nor .safetensors; say --to torch or --to onnx (an adapter: --to"
                " adapter, or --to peft for a folder)"
            )
        reject_unwritable(out, "choose another FILE", file=to != "peft")
        if to in ("adapter", "peft"):
            return self._adapter(to)
        from vitrail.model.export import to_onnx, to_torch

        model = load(self.run, base=self.base, bits=self.bits)
        exported = (to_onnx if to == "onnx" else to_torch)(model, out, input=self.input, output=self.output)
        size, classes = model.preprocess.size, len(model.classes)
        shapes = f"{self.input} [batch, 3, {size}, {size}] -> {self.output} [batch, {classes}]"
        differences = ", ".join(f"{value:.1g} at batch {batch}" for batch, value in exported.differences.items())
        return output(
            self.json,
            exported.to_json(),
            f"{out}: {exported.bytes / 1e6:.1f} MB, {shapes}",
            f"largest difference of logits from the model: {differences}",
        )

    def _adapter(self, to: str) -> int:
        """The adapter of a run alone: as a file of ours, or as a folder for peft."""
        from vitrail import load
        from vitrail.model.adapters.adapter_file import save_adapter
        from vitrail.model.adapters.apply import adapters_of
        from vitrail.model.adapters.config import read_header, summary
        from vitrail.model.adapters.peft import export_peft

        model, out = load(self.run, base=self.base, bits=self.bits if to == "peft" else None, merged=False), self.out
        adapters = adapters_of(model)
        if adapters is None or adapters.active is None:
            raise ValueError(f"{self.run} is a whole model, without an adapter; export it to torch or onnx")
        if to == "peft":
            export_peft(model, adapters.active, out)
            stored = {"bytes": sum(file.stat().st_size for file in out.iterdir())}
            text = f"{stored['bytes']:,} bytes, for peft"
        else:
            save_adapter(model, adapters.active, out, bits=self.bits)
            stored = summary(read_header(out))
            text = f"{stored['bytes']:,} bytes, {stored['stored']:,} parameters of {stored['kind']}"
            text += f", {stored['bits']} bits"
        return output(self.json, {"out": str(out), "to": to, **stored}, f"{out}: {text}")
