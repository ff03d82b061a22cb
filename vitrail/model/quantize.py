"""Exported ONNX files in fewer bits, int8 or float16, kept only where accuracy on held-out images stays.

The quantiser is onnxruntime's. Convolutions are quantised statically: ranges of activations come from calibration
images, and additions, activations and poolings between convolutions stay in int8. Linear layers are quantised
dynamically, each call by the range of its input: in transformers that is the faster of the two. Products of two
activations (attention), softmax and normalisation stay in float32; GELU takes its tanh form, which differs by at most
5e-4 and needs half the time. Where int8 loses too much, each block is quantised alone, and those that move most
probability are left in float32: as few as suffice, at most half.
"""

from __future__ import annotations

import ast
import json
import logging
import math
import platform
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.model.export import read_onnx

Precision = Literal["int8", "fp16"]
CALIBRATION, RANKING, BATCH = 256, 64, 16  # images for ranges of activations; of them, to rank blocks; at once
BETWEEN = ("Add", "Relu", "Clip", "MaxPool")  # operators that stay in int8 between convolutions


@dataclass(frozen=True, eq=False)
class Reduction:
    """Rewrites an exported float32 file in fewer bits, in place: the `reduce` of `to_onnx`.

    Returns accuracy on held-out images before and after, with the paired 95 % interval of the change, and the blocks
    that stay in float32. Raises `ValueError` where more than `lose` points are lost.
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
                before = self._correct(path, file.logits)
                record = self._int8(file, before) if self.precision == "int8" else self._fp16(file, before)
                reduced = onnx.load(file.reduced)
        finally:
            logging.disable(disabled)
        reduced.producer_name, reduced.producer_version = whole.producer_name, whole.producer_version
        onnx.helper.set_model_props(reduced, about | {"precision": json.dumps(record)})
        onnx.save(reduced, path)
        return record

    def _fp16(self, file: _File, before: NDArray[np.float64]) -> dict[str, Any]:
        import onnx
        from onnxruntime.transformers.float16 import convert_float_to_float16

        onnx.save(convert_float_to_float16(file.copy(), keep_io_types=True), file.reduced)
        if not self._within(record := self._record(file, before)):
            raise ValueError(f"since {self._loss(record)}; use float32, or allow more")
        return record

    def _int8(self, file: _File, before: NDArray[np.float64]) -> dict[str, Any]:
        if not file.blocks:
            raise ValueError("since int8 is for convolutions and linear layers, and the model has none")
        file.quantize(file.blocks, self.calibration)
        if self._within(record := self._record(file, before)):
            return record
        whole = self._loss(record)
        self.say(f"{whole}; measuring each of {len(file.blocks)} blocks")
        cost = file.costs(self.calibration[:RANKING])
        ranked = sorted(cost, key=lambda name: -cost[name])
        fewest, most, kept = 1, len(ranked) // 2, None
        while fewest <= most:  # bisection: the more blocks stay in float32, the less is lost
            count = (fewest + most) // 2
            file.quantize(ranked[count:], self.calibration)
            record = self._record(file, before) | {"float32": ranked[:count], "cost": cost}
            if self._within(record):
                kept, most = record, count - 1
                file.reduced.replace(file.kept)
            else:
                fewest = count + 1
        if kept is None:
            costly = ", ".join(f"{name} {cost[name]:.1%}" for name in ranked[:5])
            raise ValueError(
                f"since {whole}, and {-100 * record['change']:.2f} with {len(ranked) // 2} of {len(ranked)}"
                f" blocks in float32; probability that moves when a block alone is quantised: {costly}; use --fp16, or "
                "allow more"
            )
        file.kept.replace(file.reduced)
        return kept

    def _within(self, record: Mapping[str, Any]) -> bool:
        return bool(-100 * record["change"] <= self.lose + 1e-9)

    def _loss(self, record: Mapping[str, Any]) -> str:
        high, low, lost = (-100 * value for value in (*record["interval"], record["change"]))
        text = f"{self.precision} loses {lost:.2f} points on {record['images']:,} val images"
        return f"{text} (95 % interval {low:.2f} to {high:.2f}) where --lose allows {self.lose:g}"

    def _record(self, file: _File, before: NDArray[np.float64]) -> dict[str, Any]:
        after = self._correct(file.reduced, file.logits)
        shares = {"before": float(before.mean()), "after": float(after.mean())}
        change = {"change": float((after - before).mean()), "interval": paired_interval(after - before)}
        return {"kind": self.precision, "images": len(before), **shares, **change, "float32": [], "cost": {}}

    def _correct(self, path: Path, logits: bool) -> NDArray[np.float64]:
        """The share of right labels of every held-out image: 0 or 1 where it has one label."""
        run, pieces = _one_by_one(path), []
        for images, target in self.held_out():
            outputs = run(images)
            held = outputs > (0.0 if logits else 0.5)
            right = held == target.bool() if target.ndim == 2 else outputs.argmax(1, True) == target[:, None]
            pieces.append(right.double().mean(1) * outputs.isfinite().all(1))
        return torch.cat(pieces).numpy()


def paired_interval(change: NDArray[np.float64]) -> tuple[float, float]:
    """95 % interval of the mean change of accuracy, from the -1, 0 or 1 of every image.

    Half an image is added to each of the four outcomes (Agresti and Min, 2005, Statistics in Medicine 24, 729-740).
    """
    total, count = float(change.sum()), len(change) + 2
    spread = 1.96 * math.sqrt(float((change**2).sum()) + 1 - total**2 / count) / count
    return total / count - spread, total / count + spread


def overflows() -> bool:
    """Whether sums of two 8-bit products overflow on this machine: x86 without VNNI. Weights then take 7 bits."""
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8") if Path("/proc/cpuinfo").is_file() else ""
    return platform.machine().lower() in ("x86_64", "amd64") and "vnni" not in flags


class _File:
    """A float32 file, its blocks, and the file that is made of it."""

    def __init__(self, model: Any, folder: Path, logits: bool) -> None:
        self.model, self.blocks, self.logits = model, _blocks(model), logits
        self.folder, self.reduced, self.kept = folder, folder / "reduced.onnx", folder / "kept.onnx"

    def copy(self) -> Any:
        return type(self.model).FromString(self.model.SerializeToString())

    def quantize(self, blocks: Iterable[str], images: Tensor) -> None:
        """Write it with these blocks in int8."""
        import onnx
        from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_dynamic, quantize_static

        model, nodes = self.copy(), {node for block in blocks for node in self.blocks[block]}
        for node in model.graph.node:
            if node.op_type == "Gelu":
                del node.attribute[:]
                node.attribute.append(onnx.helper.make_attribute("approximate", "tanh"))
        del model.graph.value_info[:]  # shapes of weights, which the quantiser transposes without changing them
        source = self.folder / "float.onnx"
        onnx.save(model, source)
        options = {"per_channel": True, "weight_type": QuantType.QInt8, "reduce_range": overflows()}
        convolutions = {node.name for node in model.graph.node if node.op_type == "Conv"} & nodes
        if convolutions:
            batches = ({"images": batch.numpy()} for batch in images.split(BATCH))
            reader = type("Reader", (CalibrationDataReader,), {"get_next": lambda _: next(batches, None)})()
            static = _with_operators_between(model, convolutions)
            quantize_static(source, self.reduced, reader, nodes_to_quantize=static, **options)
            source = self.reduced.replace(source)
        if linear := nodes - convolutions:  # the quantiser makes a product of every Gemm, under the second name
            names = [name for node in linear for name in (node, f"{node}_MatMul")]
            quantize_dynamic(source, self.reduced, nodes_to_quantize=names, **options)
        else:
            source.replace(self.reduced)

    def costs(self, images: Tensor) -> dict[str, float]:
        """The share of probability that moves when a block alone is in int8, of all classes, mean over images."""
        probabilities, cost = {}, {}
        for block in ("", *self.blocks):
            self.quantize([block] if block else [], images)
            outputs = _one_by_one(self.reduced)(images).nan_to_num()
            probabilities[block] = outputs.softmax(1) if self.logits else outputs
            cost[block] = float((probabilities[block] - probabilities[""]).abs().sum(1).mean() / 2)
        return {block: cost[block] for block in self.blocks}


def _one_by_one(path: Path) -> Callable[[Tensor], Tensor]:
    """The file for a batch, one image at a time: ranges of dynamic quantisation are those of a whole batch."""
    run = read_onnx(path)
    return lambda images: torch.cat([run(image) for image in images.split(1)])


def _blocks(model: Any) -> dict[str, list[str]]:
    """Block -> its convolutions and linear layers, by the path of the module: up to its last number."""
    weights, blocks = {tensor.name for tensor in model.graph.initializer}, dict[str, list[str]]()
    for node in model.graph.node:
        if node.op_type in ("Conv", "Gemm", "MatMul") and node.input[1] in weights:
            scopes = {entry.key: entry.value for entry in node.metadata_props}.get("pkg.torch.onnx.name_scopes", "[]")
            path = ([name for name in ast.literal_eval(scopes)[:-1] if name] or [node.name])[-1]
            if path != "score":
                block = re.match(r".*\.\d+(?=\.|$)", path)
                blocks.setdefault(re.sub(r"^model\.(trunk\.)?", "", block[0] if block else path), []).append(node.name)
    return blocks


def _with_operators_between(model: Any, convolutions: set[str]) -> list[str]:
    """Convolutions, and the operators whose inputs all come from them."""
    known, names = {tensor.name for tensor in model.graph.initializer}, []
    for node in model.graph.node:
        if node.name in convolutions or (node.op_type in BETWEEN and known.issuperset(filter(None, node.input))):
            known.update(node.output)
            names.append(node.name)
    return names
