"""`vitrail export`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from vitrail.console import output
from vitrail.files import reject_unwritable
from vitrail.schema import Positional, Range

FORMATS = {".pt2": "torch", ".onnx": "onnx", ".safetensors": "adapter"}


@dataclass(frozen=True)
class ExportCommand:
    """A trained model as one file for other programs, compared with the model before it is kept.

    Class names and preprocessing are in the file. An ONNX file in int8 or float16 is kept only where its accuracy on
    val is at most --lose points below that in float32; the blocks that int8 costs most may stay in float32.

    Example: vitrail export runs/demo model.onnx
    Example: vitrail export runs/demo deploy/model.onnx --int8 --with_predict
    Example: vitrail export runs/birds birds.safetensors --bits 4        (an adapter alone, in fewer bits)
    Example: vitrail export runs/demo hf:me/fashion        (a folder as the Hugging Face hub has it, with a model card)
    """

    run: Annotated[Path, Positional("RUN")]  # run folder or model folder
    out: Annotated[Path, Positional("FILE")]
    """file to write: .pt2 for torch, .onnx for onnx, .safetensors for an adapter; a folder for peft;
    hf:FOLDER for one in the hub's layout"""
    to: Literal["torch", "onnx", "adapter", "peft"] | None = None
    """torch (torch.export, read without vitrail), onnx, adapter or peft (none: by the file's ending)"""
    input: Literal["bytes", "float"] = "bytes"  # bytes (0 to 255, normalised inside) or float (already normalised)
    output: Literal["probabilities", "logits"] = "probabilities"  # probabilities or logits
    base: Path | None = None
    """of an adapter's run: where the weights are that it was trained on (default: where they were)"""
    bits: int | None = None
    """round the trained parameters of an adapter to so many bits, 2 to 8; its own file packs them"""
    int8: bool = False  # of .onnx: 8-bit integers
    fp16: bool = False  # of .onnx: 16-bit floats
    calibrate: str | None = None  # of --int8, --fp16: data with train and val images (default: the run's own)
    lose: Annotated[float, Range(0, 100)] = 0.3  # of --int8, --fp16: points of accuracy on val that may be lost
    with_predict: bool = False  # of .onnx: predict.py beside it, which needs numpy, pillow and onnxruntime only
    upload: bool = False  # of hf:OWNER/NAME: also upload the folder there (log in first: hf auth login)
    json: bool = False  # print one JSON object

    def __call__(self) -> int:
        from vitrail import load

        if str(self.out).startswith("hf:"):
            return self._hub(str(self.out).removeprefix("hf:"))
        if self.upload:
            raise ValueError(f"--upload is for the hub, and {self.out} is a file; name it hf:OWNER/NAME")
        to, out = self.to or FORMATS.get(self.out.suffix), self.out
        if to is None:
            raise ValueError(
                f"{out} ends neither in .pt2, .onnx nor .safetensors; say --to torch or --to onnx (an adapter: --to"
                " adapter, or --to peft for a folder)"
            )
        reject_unwritable(out, "choose another FILE", file=to != "peft")
        flags = [name for name in ("int8", "fp16", "with_predict") if getattr(self, name)]
        if flags and to != "onnx":
            raise ValueError(f"--{flags[0]} is for ONNX files, and {out} is for {to}; name a file that ends in .onnx")
        if (self.calibrate or self.lose != 0.3 or self.fp16) and self.int8 == self.fp16:
            raise ValueError("--calibrate and --lose are of --int8 or --fp16; name one of these two")
        if to in ("adapter", "peft"):
            return self._adapter(to)
        from vitrail.model.export import to_torch
        from vitrail.run.deploy import export_onnx

        model = load(self.run, base=self.base, bits=self.bits)
        shape: dict[str, Any] = {"input": self.input, "output": self.output}
        reduce: Any = "int8" if self.int8 else "fp16" if self.fp16 else None
        more = (self.run, reduce, self.calibrate, self.lose, self.with_predict)
        exported = export_onnx(model, out, *more, **shape) if to == "onnx" else to_torch(model, out, **shape)
        size, classes = model.preprocess.size, len(model.classes)
        gives = "values" if model.regression else self.output
        shapes = f"{self.input} [batch, {model.channels}, {size}, {size}] -> {gives} [batch, {classes}]"
        differences = ", ".join(f"{value:.1g} at batch {batch}" for batch, value in exported.differences.items())
        return output(
            self.json,
            exported.to_json(),
            f"{out}: {exported.bytes / 1e6:.1f} MB, {shapes}",
            f"largest difference of logits from the model: {differences}",
            *([_accuracy(exported.precision)] if exported.precision else []),
        )

    def _hub(self, name: str) -> int:
        """A folder of that name in the layout of the hub; with --upload also the repository."""
        from vitrail import load
        from vitrail.run.model_card import export_hub

        if self.upload and name.count("/") != 1:
            raise ValueError(f"--upload: {name!r} is no repository of the hub; name it hf:OWNER/NAME")
        reject_unwritable(Path(name), "choose another FOLDER")
        folder = export_hub(load(self.run), self.run, Path(name), name)
        if self.upload:
            from huggingface_hub import HfApi

            HfApi().create_repo(name, exist_ok=True)
            HfApi().upload_folder(repo_id=name, folder_path=str(folder))
        size = sum(file.stat().st_size for file in folder.iterdir())
        return output(
            self.json,
            {"out": str(folder), "to": "hub", "bytes": size, "uploaded": self.upload},
            f"{folder}: {size / 1e6:.1f} MB; README.md is its card, in which the licence is yours to fill in",
            f'load it with: vitrail.load("hf:{name}")',
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


def _accuracy(of: dict[str, Any]) -> str:
    before, after, low, high = (100 * share for share in (of["before"], of["after"], *of["interval"]))
    text = f"accuracy on {of['images']:,} val images: {before:.2f} % in float32, {after:.2f} % in {of['kind']} "
    text += f"(95 % interval of the change {low:+.2f} % to {high:+.2f} %)"
    return text + (f"; left in float32: {', '.join(of['float32'])}" if of["float32"] else "")
