"""Exported ONNX files in fewer bits, int8 or float16, kept only where accuracy on held-out images stays.

Convolutions, and what lies between them, are quantised statically, with ranges from calibration images; linear layers
dynamically, by the range of each input, which is faster in transformers. Products of two activations (attention),
softmax and normalisation stay in float32; GELU takes its tanh form, which differs by at most 5e-4 in half the time.
Where int8 loses too much, the blocks that alone move most probability stay in float32: as few as suffice, at most half.
"""

from __future__ import annotations

import json
import logging
import platform
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from torch import Tensor

from vitrail.model.export import read_onnx

Precision = Literal["int8", "fp16"]
CALIBRATION, RANKING, BATCH = 256, 64, 16  # images for ranges of activations; of them, to rank blocks; at once
BETWEEN = ("Add", "Relu", "Clip", "MaxPool")  # operators that stay in int8 between convolutions


@dataclass(frozen=True, eq=False)
class Reduction:
    """Rewrites a float32 file in fewer bits and returns accuracy before and after: the `reduce` of `to_onnx`.

    Raises `ValueError` where more than `lose` points are lost on held-out images.
    """

    precision: Precision
    calibration: Tensor  # [images, 3, size, size], as the file takes them
    held_out: Callable[[], Iterable[tuple[Tensor, Tensor]]]  # gives batches of images and labels
    lose: float = 0.3
    say: Callable[[str], None] = print

    def __call__(self, path: Path) -> dict[str, Any]:
        import onnx

        whole, disabled = onnx.load(path), logging.root.manager.disable
        about = {entry.key: entry.value for entry in whole.metadata_props}
        logging.disable(logging.WARNING)  # advice of the quantiser
        try:
            with TemporaryDirectory() as folder:
                file = _File(whole, Path(folder), json.loads(about["output"]) == "logits")
                record = self._reduce(file, self._correct(path, file.logits))
                reduced = onnx.load(file.reduced)
        finally:
            logging.disable(disabled)
        onnx.helper.set_model_props(reduced, about | {"precision": json.dumps(record)})
        onnx.save(reduced, path)
        return record

    def _reduce(self, file: _File, before: Tensor) -> dict[str, Any]:
        file.quantize(file.blocks, self.calibration) if self.precision == "int8" else file.halve()
        record, lost = self._record(file, before)
        if not lost:
            return record
        if self.precision == "fp16":
            raise ValueError(f"since {lost}; use float32, or allow more")
        self.say(f"{lost}; measuring each of {len(file.blocks)} blocks")
        cost = file.costs(self.calibration[:RANKING])
        ranked = sorted(cost, key=lambda name: -cost[name])
        fewest, most, kept = 1, len(ranked) // 2, None
        while fewest <= most:  # bisection: the more blocks stay in float32, the less is lost
            count = (fewest + most) // 2
            file.quantize(ranked[count:], self.calibration)
            record, still = self._record(file, before)
            if still:
                fewest = count + 1
            else:
                kept, most = record | {"float32": ranked[:count], "cost": cost}, count - 1
                file.reduced.replace(file.kept)
        if kept is None:
            lost += f", and {-100 * record['change']:.2f} with {len(ranked) // 2} of {len(ranked)} blocks in float32"
            costly = ", ".join(f"{name} {100 * cost[name]:.1f} %" for name in ranked[:5])
            raise ValueError(f"since {lost}; a block alone moves this much probability: {costly}; use --fp16")
        file.kept.replace(file.reduced)
        return kept

    def _record(self, file: _File, before: Tensor) -> tuple[dict[str, Any], str]:
        """What is stated of the file; and where it loses too much, how much that is."""
        after = self._correct(file.reduced, file.logits)
        (low, high), lost = paired_interval(after - before), -100 * float((after - before).mean())
        shares = {"before": float(before.mean()), "after": float(after.mean()), "change": -lost / 100}
        record = {"kind": self.precision, "images": len(after), **shares, "interval": [low, high]}
        text = f"{self.precision} loses {lost:.2f} points on {len(after):,} val images (95 % interval "
        text += f"{-100 * high:.2f} to {-100 * low:.2f}) where --lose allows {self.lose:g}"
        return record | {"float32": [], "cost": {}}, "" if lost <= self.lose + 1e-9 else text

    def _correct(self, path: Path, logits: bool) -> Tensor:
        """The share of right labels of every held-out image: 0 or 1 where it has one label."""
        run, pieces = _one_by_one(path), []
        for images, target in self.held_out():
            outputs = run(images)
            held = outputs > (0.0 if logits else 0.5) if target.ndim == 2 else outputs.argmax(1)
            pieces.append((held == target).double().view(len(target), -1).mean(1) * outputs.isfinite().all(1))
        return torch.cat(pieces)


def write_int8(source: Path, target: Path, images: Tensor) -> None:
    """All blocks of a float32 file in int8, unchecked, to measure its speed; `images` are as the file takes them."""
    import onnx

    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with TemporaryDirectory() as folder:
            whole = onnx.load(source)
            file = _File(whole, Path(folder), logits=False)
            file.quantize(file.blocks, images)
            reduced = onnx.load(file.reduced)
            onnx.helper.set_model_props(reduced, {entry.key: entry.value for entry in whole.metadata_props})
            onnx.save(reduced, target)
    finally:
        logging.disable(disabled)


def paired_interval(change: Tensor) -> tuple[float, float]:
    """95 % interval of the mean of changes -1, 0 or 1 (Agresti and Min, 2005, Statistics in Medicine 24, 729-740)."""
    total, count = float(change.sum()), len(change) + 2
    spread = 1.96 * (float(change.square().sum()) + 1 - total**2 / count) ** 0.5 / count
    return total / count - spread, total / count + spread


def on_x86() -> bool:
    """Whether this machine multiplies unsigned by signed bytes: signed activations take 1.5 to 1.9 times as long."""
    return platform.machine().lower() in ("x86_64", "amd64")


def overflows() -> bool:
    """Whether sums of two 8-bit products overflow on this machine: x86 without VNNI. Weights then take 7 bits."""
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8") if Path("/proc/cpuinfo").is_file() else ""
    return on_x86() and "vnni" not in flags


class _File:
    """A float32 file, its blocks, and the file that is made of it."""

    def __init__(self, model: Any, folder: Path, logits: bool) -> None:
        self.model, self.blocks, self.logits = model, _blocks(model), logits
        self.source, self.reduced, self.kept = (folder / f"{name}.onnx" for name in ("source", "reduced", "kept"))

    def halve(self) -> None:
        """Write it in float16, with inputs and outputs as they are."""
        import onnx
        from onnxruntime.transformers.float16 import convert_float_to_float16

        onnx.save(convert_float_to_float16(self.model, keep_io_types=True), self.reduced)

    def quantize(self, blocks: Iterable[str], images: Tensor) -> None:
        """Write it with these blocks in int8."""
        import onnx
        from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_dynamic, quantize_static

        model, nodes = self.model, {node for block in blocks for node in self.blocks[block]}
        for node in model.graph.node:
            if node.op_type == "Gelu":
                del node.attribute[:]
                node.attribute.append(onnx.helper.make_attribute("approximate", "tanh"))
        del model.graph.value_info[:]  # shapes of weights, which the quantiser transposes without changing them
        onnx.save(model, self.source)
        options = {"per_channel": True, "weight_type": QuantType.QInt8, "reduce_range": overflows()}
        convolutions = {node.name for node in model.graph.node if node.op_type == "Conv"} & nodes
        if convolutions:
            batches = ({"images": batch.numpy()} for batch in images.split(BATCH))
            reader = type("Reader", (CalibrationDataReader,), {"get_next": lambda _: next(batches, None)})()
            known, static = {tensor.name for tensor in model.graph.initializer}, []
            for node in model.graph.node:  # convolutions, and the operators whose inputs all come from them
                between = node.op_type in BETWEEN and known.issuperset(filter(None, node.input))
                if between or node.name in convolutions:
                    known.update(node.output)
                    static.append(node.name)
            signs = {"activation_type": QuantType.QUInt8 if on_x86() else QuantType.QInt8}
            quantize_static(self.source, self.reduced, reader, nodes_to_quantize=static, **options, **signs)
            self.reduced.replace(self.source)
        if linear := nodes - convolutions:  # the quantiser makes a product of every Gemm, under the second name
            names = [name for node in linear for name in (node, f"{node}_MatMul")]
            quantize_dynamic(self.source, self.reduced, nodes_to_quantize=names, **options)
        else:
            self.source.replace(self.reduced)

    def costs(self, images: Tensor) -> dict[str, float]:
        """The share of probability that moves when a block alone is in int8, mean over images."""
        outputs = {}
        for block in ("", *self.blocks):  # first none
            self.quantize([block] if block else [], images)
            values = _one_by_one(self.reduced)(images).nan_to_num()
            outputs[block] = values.softmax(1) if self.logits else values
        return {block: float((outputs[block] - outputs[""]).abs().sum(1).mean() / 2) for block in self.blocks}


def _one_by_one(path: Path) -> Callable[[Tensor], Tensor]:
    """The file for a batch, one image at a time: ranges of dynamic quantisation are those of a whole batch."""
    run = read_onnx(path)
    return lambda images: torch.cat([run(image) for image in images.split(1)])


def _blocks(model: Any) -> dict[str, list[str]]:
    """Block -> its convolutions and linear layers, by the path of the module: up to its last number."""
    weights, blocks = {tensor.name for tensor in model.graph.initializer}, dict[str, list[str]]()
    for node in model.graph.node:
        if node.op_type in ("Conv", "Gemm", "MatMul") and node.input[1] in weights:
            scopes = {entry.key: entry.value for entry in node.metadata_props}.get("pkg.torch.onnx.name_scopes", "")
            path = (re.findall(r"'(\w[^']*)'", scopes)[:-1] or [node.name])[-1]
            block = re.match(r"(?:model\.)?(?:trunk\.)?((?:.*\.\d+(?=\.|$))|.*)", path)
            if path != "score" and block:
                blocks.setdefault(block[1], []).append(node.name)
    return blocks
