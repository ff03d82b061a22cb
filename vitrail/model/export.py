"""A classifier as one file for other programs: torch.export's `.pt2`, or ONNX.

The file takes images [batch, channels, size, size], in batches of any size, and gives [batch, classes]. What belongs to
the model travels along: class names, preprocessing, what it states of itself. Every file is read back and compared with
the model before it gets its name.
"""

from __future__ import annotations

import copy
import io
import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.fx import GraphModule

from vitrail.data.preprocess import Preprocess
from vitrail.files import replacing
from vitrail.model.adapters.apply import merged_copy
from vitrail.model.classifier import Classifier
from vitrail.model.heads.second_order import PowerNorm
from vitrail.model.optimize import fold_affine
from vitrail.schema import plain
from vitrail.version import __version__

Input = Literal["bytes", "float"]
Output = Literal["probabilities", "logits"]
Runner = Callable[[Tensor], Tensor]

BATCHES = (1, 2, 7)
"""Sizes at which a file is compared with its model: the most common one, that of the example, and neither."""
TOLERANCE = 1e-4
"""Largest difference that is accepted, as a share of the largest logit.

Right programs differ in the order of their float32 sums: by 1e-7 to 6e-6 in the models of the zoo, at depth 2 and at
full size. More than ten times that leaves room for other processors and for trained weights, whose activations are
larger. Mistakes lie above: in DeiT-S, tanh for erf in GELU gives 3e-4, another epsilon in LayerNorm 3e-3.
"""
ROUNDING = 1e-6
"""Accepted besides, where all logits are close to zero: a few roundings of numbers around 1."""
OPSET = 20
"""Version of the ONNX operators: the first with GELU as one; onnxruntime reads it since 1.17."""
ONNX_LIMIT = 1536 * 2**20
"""Bytes of weights that go into one ONNX file; beyond, torch would put them into a second one beside it."""
PACKAGES = ("onnx", "onnxscript", "onnxruntime")
DESCRIPTION = "vitrail.json"
"""Name of the description among the `extra_files` of a `.pt2`."""


@dataclass(frozen=True)
class Exported:
    """A file that was written, and how far it is from the model."""

    path: Path
    bytes: int
    input: Input
    output: Output
    differences: dict[int, float]
    """Largest absolute difference from the model for each batch size, in logits (in logarithms of probabilities, or
    their logits where several classes may hold, if those are what the file gives)."""
    precision: dict[str, Any] | None = None  # of a file in fewer bits: accuracy before and after

    def to_json(self) -> dict[str, Any]:
        return {
            "file": str(self.path),
            "bytes": self.bytes,
            "input": self.input,
            "output": self.output,
            "differences": {str(batch): value for batch, value in self.differences.items()},
            **({} if self.precision is None else {"precision": self.precision}),
        }


def to_torch(
    model: Classifier,
    path: str | Path,
    *,
    input: Input = "bytes",  # noqa: A002, as on the command line
    output: Output = "probabilities",
) -> Exported:
    """Write `model` as `.pt2`, for `torch.export.load(path).module()`; reading it takes torch and no vitrail.

    With `input="bytes"` the file takes uint8 (uint16, where the model does) and normalises it, with `"float"` it
    takes normalised float32. It computes in float32 on the CPU; the model itself is left as it is. The description
    is JSON, `extra_files["vitrail.json"]`.
    Example inputs would be a pickle and are left out: AOTInductor wants them set again (`program.example_inputs`).

    Raises `ValueError`, and leaves a file of that name as it was, where the result would differ from the model.
    """
    _check_request(path, ".pt2", input, output)
    return _export(model, Path(path), input, output, _write_torch, _read_torch)


def to_onnx(
    model: Classifier,
    path: str | Path,
    *,
    input: Input = "bytes",  # noqa: A002, as on the command line
    output: Output = "probabilities",
    reduce: Callable[[Path], dict[str, Any]] | None = None,
    score: nn.Module | None = None,
    more: Mapping[str, Any] | None = None,
) -> Exported:
    """Write `model` as `.onnx`: one input `images`, one output `probabilities` or `logits`.

    As `to_torch`. Every part of the description is JSON in the file's metadata, which onnxruntime gives as
    `session.get_modelmeta().custom_metadata_map`; `more` is added to it. `score`, of logits and embeddings, becomes a
    second output [batch]. `reduce` rewrites the checked file in fewer bits, and returns what is stated of that. Raises
    `ValueError` before any work where packages are missing, or where ONNX cannot hold the model.
    """
    _check_request(path, ".onnx", input, output)
    _check_onnx(model)
    return _export(model, Path(path), input, output, _write_onnx, read_onnx, reduce, score, more)


def to_single_onnx(model: Classifier, path: Path) -> int:
    """Write `model` for one image and unchecked, to measure its speed, sooner than `to_onnx`; returns bytes."""
    _check_onnx(model)
    path.parent.mkdir(parents=True, exist_ok=True)
    model = merged_copy(model).to("cpu", torch.float32).eval()
    computed = _Program(fold_affine(copy.deepcopy(model)), "probabilities", None).eval().requires_grad_(False)
    with torch.no_grad():
        program = torch.export.export(computed, (_random_images(model, 1, "bytes"),), strict=False)
    _write_onnx(program, path, describe(model, "bytes", "probabilities"), None)
    return path.stat().st_size


def describe(model: Classifier, takes: Input, gives: Output) -> dict[str, Any]:
    """What a file tells of itself: as a model folder does, and what goes in and comes out."""
    return {
        "vitrail": __version__,
        "input": takes,
        "output": "values" if model.regression and gives == "probabilities" else gives,
        "classes": list(model.classes),
        "multilabel": model.multilabel,
        "preprocess": plain(model.preprocess),
        "spec": model.spec,
        "stated": model.stated,
    }


def _check_request(path: str | Path, suffix: str, takes: str, gives: str) -> None:
    for what, word, known in (("input", takes, get_args(Input)), ("output", gives, get_args(Output))):
        if word not in known:
            raise ValueError(f"{what} must be {' or '.join(known)}, not {word!r}")
    if Path(path).is_dir():
        raise ValueError(f"{path} is a folder; name the {suffix} file to write")
    if Path(path).suffix != suffix:
        raise ValueError(f"{path} does not end in {suffix}, as such a file must for others to know it")


def _check_onnx(model: Classifier) -> None:
    if missing := [name for name in PACKAGES if find_spec(name) is None]:
        raise ValueError(f'ONNX files need {", ".join(missing)}: pip install "vitrail[export]"')
    if any(isinstance(module, PowerNorm) for module in model.modules()):
        raise ValueError(
            "the head second_order with normalization svpn takes singular values, for which ONNX has no operator; "
            "export to torch, or train with normalization svpn_fast"
        )
    size = 4 * sum(tensor.numel() for tensor in (*model.parameters(), *model.buffers()))
    if size > ONNX_LIMIT:
        most = ONNX_LIMIT / 1e9
        raise ValueError(f"{size / 1e9:.1f} GB of weights do not fit into an ONNX file ({most:.1f}); export to torch")


def _export(
    model: Classifier,
    path: Path,
    takes: Input,
    gives: Output,
    write: Callable[[ExportedProgram, Path, dict[str, Any]], None],
    read: Callable[[Path], Runner],
    reduce: Callable[[Path], dict[str, Any]] | None = None,
    score: nn.Module | None = None,
    more: Mapping[str, Any] | None = None,
) -> Exported:
    if hasattr(model.trunk, "tokeniser"):
        raise ValueError(
            f"{path} was not written: the model reads texts, and such files take images; use the run folder itself, "
            "with vitrail predict or vitrail.load"
        )
    if model.unlabelled:
        raise ValueError(
            f"{path} was not written: the model learned without labels and knows no classes; train a classifier on it "
            "first, or use model.outputs(images).representation"
        )
    policy = getattr(model.policy, "config", None)
    if {getattr(policy, "sampling", ""), getattr(policy, "score", "")} & {"random", "uniform"}:
        raise ValueError(
            f"{path} was not written: the model draws tokens at random, so that a file cannot be compared with it; "
            "set adaptive.sampling to inverse or top, and adaptive.score to class or column"
        )
    model = merged_copy(model).to("cpu", torch.float32).eval()
    program = _traced(model, takes, gives, *([] if score is None else [score]))
    with replacing(path) as temporary:
        write(program, temporary, describe(model, takes, gives) | dict(more or {}))
        try:
            differences = _compare(model, read(temporary), takes, gives)
            precision = None if reduce is None else reduce(temporary)
            if reduce is not None:
                differences = _compare(model, read(temporary), takes, gives, check=False)
        except ValueError as error:
            raise ValueError(f"{path} was not written, {error}") from error
        size = temporary.stat().st_size
    return Exported(path, size, takes, gives, differences, precision)


class _Program(nn.Module):
    """The computation of the file."""

    def __init__(self, model: Classifier, gives: Output, score: nn.Module | None) -> None:
        super().__init__()
        self.model, self.gives, self.score = model, gives, score

    def forward(self, images: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        tokens = self.model.tokens(images)
        logits = self.model.fused(self.model.head(tokens))
        result = logits if self.gives == "logits" else self.model.probabilities(logits)
        return result if self.score is None else (result, self.score(logits, self.model.head.embed(tokens)))


def _traced(model: Classifier, takes: Input, gives: Output, score: nn.Module | None = None) -> ExportedProgram:
    """The graph of the folded model, for a batch of any size."""
    computed = _Program(fold_affine(copy.deepcopy(model)), gives, score).eval().requires_grad_(False)
    # Two images: one is a size that torch treats as a constant.
    example = (_random_images(model, 2, takes),)
    try:
        # Strict, because `len(images)` would otherwise be a plain number and the example's batch the only one.
        with torch.no_grad():
            program = torch.export.export(computed, example, dynamic_shapes=({0: Dim("batch")},), strict=True)
    except Exception as error:  # of many kinds, and none that says just this
        raise ValueError(f"{_name(model)} cannot be traced for a file: {_reason(error)}") from error
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, GraphModule) else ():
            node.meta.pop("stack_trace", None)  # no paths of this machine in the file
    return program


def _write_torch(program: ExportedProgram, path: Path, about: dict[str, Any]) -> None:
    program.example_inputs = None
    packed = io.BytesIO()  # not straight to the disk: torch aborts the whole process where that is full
    torch.export.save(program, packed, extra_files={DESCRIPTION: json.dumps(about)})
    path.write_bytes(packed.getbuffer())


def _read_torch(path: Path) -> Runner:
    # Safe for our own files only: graph and description are JSON, weights raw bytes. `torch.export.load` would also
    # unpickle, without restriction, example inputs and tensors of special kinds that a foreign file may bring.
    with path.open("rb") as file:
        return torch.export.load(file).module()


def _write_onnx(
    program: ExportedProgram,
    path: Path,
    about: dict[str, Any],
    dynamic: tuple[dict[int, str]] | None = ({0: "batch"},),
) -> None:
    name = about["spec"].get("name") or "the model"
    try:
        with warnings.catch_warnings():  # torch 2.11 warns of itself, once for every file
            warnings.simplefilter("ignore", FutureWarning)
            made = torch.onnx.export(
                program,
                dynamo=True,
                opset_version=OPSET,
                input_names=["images"],
                output_names=[about["output"], *(["score"] if about.get("trust", {}).get("known") else [])],
                dynamic_shapes=dynamic,
                external_data=False,
                verbose=False,
            )
    except ImportError as error:
        remedy = f"pip install --upgrade {' '.join(PACKAGES)}"
        raise ValueError(f"the packages for ONNX files do not fit this torch ({_reason(error)}): {remedy}") from error
    except torch.onnx.errors.OnnxExporterError as error:
        raise ValueError(f"{name} cannot be written as ONNX ({_reason(error)}); export to torch") from error
    assert made is not None
    if any(node.attributes.get_string("reduction", "none") != "none" for node in made.model.graph):
        # github.com/microsoft/onnxruntime/issues/18048
        raise ValueError(
            f"{name} adds into places of a tensor, where threads of onnxruntime lose sums; export to torch"
        )
    made.model.producer_name, made.model.producer_version = "vitrail", __version__
    made.model.metadata_props.update({key: json.dumps(value) for key, value in about.items()})
    made.save(path)


def read_onnx(path: Path) -> Runner:
    """The first output of an ONNX file, by onnxruntime on the CPU. Raises `ValueError` where it cannot be read."""
    runtime = import_module("onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    try:
        session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # it has a dozen kinds of its own
        raise ValueError(f"onnxruntime cannot read it ({_reason(error)}); export to torch") from error
    return lambda images: torch.from_numpy(session.run(None, {"images": images.numpy()})[0])


def _random_images(model: Classifier, count: int, takes: Input) -> Tensor:
    """Fields of colour under noise: to noise alone a model may answer the same whatever it holds."""
    size = model.preprocess.size
    generator = torch.Generator().manual_seed(count)
    channels, most = model.channels, int(model.preprocess.maximum)
    fields = torch.randint(0, most + 1, (count, channels, 4, 4), generator=generator)
    side = -(-size // 4)
    spread = fields.repeat_interleave(side, -2).repeat_interleave(side, -1)[..., :size, :size]
    reach = (most + 1) // 4
    noise = torch.randint(-reach, reach + 1, (count, channels, size, size), generator=generator)
    images = (spread + noise).clamp(0, most).to(torch.uint8 if most <= 255 else torch.uint16)
    return images if takes == "bytes" else Preprocess(model.preprocess).normalize(images)


@torch.inference_mode()
def _compare(model: Classifier, run: Runner, takes: Input, gives: Output, check: bool = True) -> dict[int, float]:
    """Largest absolute difference at each of `BATCHES`; `ValueError` where one is more than rounding (`check`)."""
    differences, largest = {}, 0.0
    for batch in BATCHES:
        images = _random_images(model, batch, takes)
        logits = model(images)
        wanted = _as_logits(model, logits if gives == "logits" else model.probabilities(logits), gives)
        try:
            differences[batch] = float((_as_logits(model, run(images), gives) - wanted).abs().max())
        except Exception as error:  # of torch or of onnxruntime
            raise ValueError(f"it would fail at batch {batch}: {_reason(error)}") from error
        largest = max(largest, float(wanted.abs().max()))
    allowed = TOLERANCE * largest + ROUNDING
    if check and not all(value <= allowed for value in differences.values()):  # in these words NaN is rejected, too
        figures = ", ".join(f"{value:.2g} at batch {batch}" for batch, value in differences.items())
        raise ValueError(
            f"its results differ from those of {_name(model)} by {figures}, where rounding explains {allowed:.2g}; "
            "try the other of torch and onnx, and report this"
        )
    return differences


def _as_logits(model: Classifier, values: Tensor, gives: Output) -> Tensor:
    """Results on the scale of logits.

    Probabilities as they are hide mistakes: of a thousand classes each has a thousandth, and near 0 and 1 nothing
    moves. They are cut off where float32 cannot go back: below 1e-20; sigmoids, below 0.01 and above 0.99.
    """
    if gives == "logits" or model.regression:
        return values
    return values.logit(eps=0.01) if model.multilabel else values.clamp(min=1e-20).log()


def _name(model: Classifier) -> str:
    return str(model.spec.get("name") or "the model")


def _reason(error: BaseException) -> str:
    while error.__cause__ is not None:  # torch wraps what happened in several layers of advice to its developers
        error = error.__cause__
    return " ".join(str(error).split())[:300]
