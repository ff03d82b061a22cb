"""A trunk and a head: images in, logits out, with the preprocessing and class names that belong to them."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from vitrail.data.config import PreprocessConfig
from vitrail.data.dataset import UNLABELLED
from vitrail.data.preprocess import Preprocess
from vitrail.model.heads.head import Head
from vitrail.model.parts.tokens import AdaptivePolicy, Given, Tokens, Trace
from vitrail.model.trunks.base import BaseTrunk

if TYPE_CHECKING:
    from vitrail.model.optimize import Optimized

CALIBRATIONS = ("identity", "temperature", "vector")
Picture = str | Path | Image.Image | NDArray[Any] | Tensor


@dataclass(frozen=True)
class Calibration:
    """Logits to calibrated logits, in float32 at least: divided by a temperature, or by class times scale plus bias.
    Minus infinity stays so."""

    kind: str = "identity"
    temperature: float = 1.0  # of vector scaling: the one it is regularised towards
    scale: tuple[float, ...] = ()  # [classes] of vector scaling
    bias: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in CALIBRATIONS:
            raise ValueError(f"{self.kind!r} is no kind of calibration; there are {', '.join(CALIBRATIONS)}")
        if not (self.temperature > 0 and all(map(math.isfinite, (self.temperature, *self.scale, *self.bias)))):
            raise ValueError("temperature, scale and bias of a calibration must be finite, the temperature above 0")
        if len(self.scale) != len(self.bias) or (self.kind == "vector") != bool(self.scale):
            raise ValueError("vector scaling, and no other calibration, has a scale and a bias of every class")

    def __call__(self, logits: Tensor) -> Tensor:
        if self.kind == "identity":
            return logits
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.kind == "temperature":
            return wide / self.temperature
        if wide.shape[-1] != len(self.scale):
            raise ValueError(f"logits of {wide.shape[-1]} classes, but the calibration is of {len(self.scale)} classes")
        scale, bias = wide.new_tensor(self.scale), wide.new_tensor(self.bias)
        return torch.where(wide == -math.inf, wide, wide * scale + bias)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "scale": list(self.scale), "bias": list(self.bias)}

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Calibration:
        """The calibration that `to_json` wrote. Raises `ValueError`, one sentence, where it is damaged."""
        try:
            vectors = (tuple(map(float, stored[name])) for name in ("scale", "bias"))
            return cls(stored["kind"], float(stored["temperature"]), *vectors)
        except (TypeError, KeyError, ValueError) as error:
            raise ValueError(f"this is no stored calibration ({error}); fit it again") from None


@dataclass
class Outputs:
    """Outputs of one forward pass."""

    stack: Tensor  # [batch, classifiers, classes]
    tokens: Tokens
    head: Head
    captured: dict[str, Tensor] = field(default_factory=dict)
    policy: AdaptivePolicy | None = None

    @property
    def trace(self) -> Trace | None:
        """The compute that an adaptive trunk spent on each image; none for others."""
        return self.tokens.trace

    def losses(self, target: Tensor) -> dict[str, Tensor]:
        """Losses of the model itself, by name: of its head (decorrelation and the like) and of an adaptive policy."""
        losses = self.head.losses(self.stack, target)
        return losses if self.policy is None or self.trace is None else {**losses, **self.policy.losses(self.trace)}

    @cached_property
    def embedding(self) -> Tensor:
        """The vector that is classified, [batch, features]; computed when it is asked for."""
        return self.head.embed(self.tokens)

    @cached_property
    def representation(self) -> Tensor:
        """The representation that kNN, linear probes and clustering use, [batch, width]."""
        return self.head.represent(self.tokens)

    @cached_property
    def maps(self) -> Tensor | None:
        """Attention maps of the head, [batch, maps, patches]; none where it has none."""
        return self.head.maps(self.tokens)


@dataclass(frozen=True)
class Prediction:
    """Prediction of a model for one image."""

    label: str
    probability: float
    top: tuple[tuple[str, float], ...]  # most likely classes first; where several may hold, those above one half
    error: str | None = None  # why the image could not be read
    value: float | None = None  # of a regression, in the units of its data; there are no classes then

    def to_json(self) -> dict[str, Any]:
        if self.error is not None:
            return {"error": self.error}
        if self.value is not None:
            return {"value": self.value}
        return {"label": self.label, "probability": self.probability, "top": [list(pair) for pair in self.top]}


class Classifier(nn.Module):
    """`model(images)` gives logits `[batch, classes]`; byte images are normalised, float images taken as they are."""

    def __init__(
        self,
        trunk: BaseTrunk,
        head: Head,
        *,
        spec: dict[str, Any],
        classes: Sequence[str],
        preprocess: PreprocessConfig,
        multilabel: bool = False,
    ) -> None:
        super().__init__()
        self.trunk, self.head = trunk, head
        self.spec = spec  # what `vitrail.model.assemble` needs to build the same architecture again
        self.classes, self.preprocess, self.multilabel = tuple(classes), preprocess, multilabel
        self.folded = False  # parts were merged for inference: no longer what `spec` describes
        self.chosen: int | None = None  # classifier of the stack that predicts (none: the head fuses them)
        self.calibration = Calibration()  # of fused logits, fitted on held-out images
        self.stated: dict[str, Any] = {}  # facts about these weights, saved with them
        self.files: dict[str, str] = {}  # name -> text that is saved with the weights: the tokenizer of a text model

    def _images(self, images: Tensor) -> Tensor:
        if images.dtype not in (torch.uint8, torch.uint16):
            return images
        # As `Preprocess.normalize`, but nothing is copied to the device, so a graph can be captured, and torch.compile
        # makes all of it part of the first kernel.
        channel = torch.arange(self.channels, device=images.device).view(-1, 1, 1)

        def by_channel(values: tuple[float, ...]) -> Tensor:
            wide = torch.full_like(channel, values[0], dtype=torch.float32)
            for number, value in enumerate(values[1:], 1):
                wide = wide.masked_fill(channel == number, value)
            return wide

        scaled = images.to(torch.float32) / self.preprocess.maximum
        normalized = (scaled - by_channel(self.preprocess.mean)) / by_channel(self.preprocess.std)
        return normalized.to(next(self.parameters()).dtype)

    @property
    def channels(self) -> int:
        """Of an input image."""
        return len(self.preprocess.mean)

    @property
    def takes_rgb(self) -> bool:
        """Whether images are RGB of eight bits."""
        return self.channels == 3 and self.preprocess.maximum == 255

    def opened(self, source: Path | bytes, key: str) -> Image.Image:
        """An image file as the model takes it: RGB, or its own channels in their depth. Raises `BadImage`."""
        from vitrail.data.decode import decode
        from vitrail.data.stack import StackForm, read_pixels

        if self.takes_rgb:
            return decode(source, key, at_least=Preprocess(self.preprocess).at_least)
        return StackForm(self.channels, self.preprocess.maximum).image(read_pixels(source, key), key)

    def tokens(self, images: Tensor) -> Tokens:
        """Final tokens of a batch of images, in a form that the head takes."""
        return self._at_head(self.trunk.encode(self.trunk.embed(self._images(images)))[0])

    def _at_head(self, tokens: Tokens) -> Tokens:
        return tokens if self.head.takes_packed else tokens.padded()

    def stack(self, images: Tensor) -> Tensor:
        """The logits of every classifier of the head, `[batch, classifiers, classes]`."""
        return cast("Tensor", self.head(self.tokens(images)))

    @property
    def policy(self) -> AdaptivePolicy | None:
        """The policy that decides how much of the trunk an image gets; none where every image gets all of it."""
        return cast("AdaptivePolicy | None", getattr(self.trunk, "policy", None))

    def forward(self, images: Tensor) -> Tensor:
        return self.fused(self.stack(images))

    def fused(self, stack: Tensor) -> Tensor:
        """The logits that count, `[batch, classes]`: as the head fuses them, or of the one classifier in `use`."""
        return self.head.fuse(stack) if self.chosen is None else stack[:, self.chosen]

    def use(self, head: Literal["class", "distillation", "both"]) -> Classifier:
        """Let one classifier of a distilled head predict, or both fused, in place (DeiT, arXiv 2012.12877).

        Raises `ValueError` for a head without a distillation token.
        """
        chosen = {"class": 0, "distillation": 1, "both": None}
        if head not in chosen:
            raise ValueError(f"a distilled head predicts by class, distillation or both, not {head!r}")
        if not hasattr(self.head, "fc_dist"):
            raise ValueError(
                f"this model has no distillation token, so there is no {head} classifier to choose; leave head out"
            )
        self.chosen = chosen[head]
        return self

    def outputs(self, images: Tensor, want: Collection[str] = (), given: Mapping[str, Given] | None = None) -> Outputs:
        """A forward pass with intermediates: `want={"attention.3"}` captures, `given={"q.0": t}` replaces."""
        tokens, captured = self.trunk.encode(self.trunk.embed(self._images(images)), want, given)
        tokens = self._at_head(tokens)
        return Outputs(self.head(tokens), tokens, self.head, captured, self.policy)

    def feature_maps(self, images: Tensor, levels: int | Sequence[int] | None = None) -> list[Tensor]:
        """Dense features `[batch, channels, rows, columns]` for detection and segmentation; see `model/dense.py`.

        `levels=4` gives maps at the trunk's own stride or strides, `levels=(4, 8, 16, 32)` a pyramid.
        """
        from vitrail.model.dense import feature_maps

        return feature_maps(self, images, levels)

    def calibrated(self, logits: Tensor) -> Tensor:
        """The logits of calibrated probabilities; those of one classifier in `use` were never calibrated, and stay."""
        return self.calibration(logits) if self.chosen is None else logits

    def probabilities(self, logits: Tensor) -> Tensor:
        """Calibrated: softmax, or one sigmoid per class where several classes may hold. Of a regression the value."""
        logits = self.calibrated(logits)
        if self.regression:
            return logits
        return logits.sigmoid() if self.multilabel else logits.softmax(-1)

    @property
    def regression(self) -> bool:
        """Whether its one output is a value, and no class."""
        return "regression" in self.stated

    def reject_other(self, what: str, rgb: bool = False) -> None:
        """Raises `ValueError` where `what` needs classes, or `rgb` of eight bits, and the model has others."""
        if self.regression:
            raise ValueError(f"{what}: it needs classes, and this model predicts values (objective regression)")
        if rgb and not self.takes_rgb:
            raise ValueError(
                f"{what}: it reads RGB of eight bits, and this model takes {self.channels} channels of its own"
            )

    @property
    def unlabelled(self) -> bool:
        """Whether it learned from images without labels, and so knows no classes."""
        return tuple(self.classes) == (UNLABELLED,)

    def check_classifies_images(self) -> None:
        """Raises `ValueError` for a model of texts, and for one without classes."""
        if hasattr(self.trunk, "tokeniser"):
            raise ValueError("this model classifies texts; use vitrail.model.text_build.predict_texts(model, texts)")
        if self.unlabelled:
            raise ValueError(
                "this model learned from images without labels and knows no classes; train one on it first: vitrail "
                "train small-transfer --data LABELLED --model.weights RUN --model.name NAME (as its config.yaml says)"
            )

    def predict(
        self, images: Picture | Sequence[Picture], *, top: int = 5, batch: int = 64, errors: str = "raise"
    ) -> list[Prediction]:
        """Classify paths, PIL images, byte arrays `[height, width(, 3)]` or byte tensors `[3, height, width]`; a model
        of other channels takes arrays and tensors of those, in their depth.

        Each is preprocessed as the model was evaluated. `errors="return"` reports unreadable files in their place
        instead of raising `BadImage`.
        """
        from vitrail.data.dataset import BadImage

        self.check_classifies_images()
        if top < 1:
            raise ValueError(f"top: {top} classes are none to tell; ask for at least 1")
        if errors not in ("raise", "return"):
            raise ValueError(f"errors must be 'raise' or 'return', not {errors!r}")
        pictures, preprocess = _as_list(images), Preprocess(self.preprocess)
        predictions: list[Prediction] = []
        was_training = self.training
        self.eval()
        try:
            for start in range(0, len(pictures), batch):
                pixels: list[Tensor] = []
                failures: dict[int, str] = {}
                for i, picture in enumerate(pictures[start : start + batch]):
                    try:
                        pixels.append(preprocess(self._picture(picture)))
                    except BadImage as error:
                        if errors == "raise":
                            raise
                        failures[i] = error.reason
                batched = iter(self.predictions(torch.stack(pixels), top) if pixels else ())
                for i in range(len(pixels) + len(failures)):
                    failed = i in failures
                    predictions.append(Prediction("", 0.0, (), failures[i]) if failed else next(batched))
        finally:
            self.train(was_training)
        return predictions

    def _picture(self, picture: Picture) -> Image.Image:
        if isinstance(picture, (str, Path)):
            return self.opened(Path(picture), str(picture))
        if self.takes_rgb or isinstance(picture, Image.Image):
            return _open(picture)
        from vitrail.data.stack import StackForm

        pixels = picture.cpu().permute(1, 2, 0).numpy() if isinstance(picture, Tensor) else picture
        return StackForm(self.channels, self.preprocess.maximum).image(pixels, "the array")

    def predictions(self, inputs: Tensor, top: int) -> list[Prediction]:
        """Predictions of one batch of inputs as the trunk takes them, on any device. Raises `ValueError` for NaN."""
        with torch.inference_mode():
            logits = self(inputs.to(next(self.parameters()).device))
        return self.told(self.probabilities(logits.float()).cpu(), top)

    def told(self, probabilities: Tensor, top: int) -> list[Prediction]:
        """Predictions from probabilities [images, classes]. Raises `ValueError` for NaN."""
        if not probabilities.isfinite().all():
            raise ValueError("the model predicts NaN: its weights have diverged or are damaged; train it again")
        return [self._prediction(row, top) for row in probabilities]

    def _prediction(self, row: Tensor, top: int) -> Prediction:
        if self.regression:
            return Prediction(f"{float(row[0]):.6g}", 1.0, (), value=float(row[0]))
        held = int((row > 0.5).sum()) if self.multilabel else 0  # all that hold are listed, however few were asked for
        best = row.topk(min(max(top, held), len(row)))
        pairs = tuple((self.classes[int(c)], float(p)) for p, c in zip(best.values, best.indices, strict=True))
        if self.multilabel:
            return Prediction("|".join(name for name, _ in pairs[:held]), pairs[0][1], pairs[:held] or pairs)
        return Prediction(pairs[0][0], pairs[0][1], pairs)

    def save(self, folder: str | Path) -> Path:
        """Write weights (safetensors) and description (JSON) into `folder`; `vitrail.load` reads them back.

        An adapter in use is merged into what is written; `save_adapter` writes it alone.
        """
        from vitrail.model.store import save_model

        if self.folded:
            raise ValueError("a folded model is for inference only; save it before folding")
        return save_model(self, Path(folder))

    def optimize(
        self,
        precision: Literal["auto", "float32", "bf16", "fp8"] = "auto",
        compile: bool | None = None,  # noqa: A002, torch's word
        graph: bool | None = None,
    ) -> Optimized:
        """A copy for fast inference: folded, cast, compiled, one CUDA graph per batch size. See `model/optimize.py`."""
        from vitrail.model.optimize import optimize

        return optimize(self, precision, compile, graph)

    def set_budget(
        self,
        *,
        tokens: int | None = None,
        ratio: float | None = None,
        gmacs: float | None = None,
        share: float | None = None,
        images: Iterable[Tensor] | None = None,
    ) -> float | None:
        """Let a model with ATS, ToMe or EViT spend less or more, in place; see `model/adaptive/budget.py`."""
        from vitrail.model.adaptive.budget import set_budget

        return set_budget(self, tokens=tokens, ratio=ratio, gmacs=gmacs, share=share, images=images)

    def keep_heads(self, indices: Sequence[int]) -> Classifier:
        """Leave only these of several heads, in place; with none, a mean-pooling classifier remains.

        That classifier is the auxiliary one where it was trained along; otherwise it is new: train it on the frozen
        trunk (a linear probe) or with it (fine-tuning). Raises `ValueError` where the head has no parts to leave out.
        """
        if "adapters" in self._modules:
            raise ValueError("heads are left out of a model without adapters; take merged_copy(model) first")
        keep = getattr(self.head, "keep", None)
        if keep is None:
            raise ValueError(f"the head {self.spec['head']['kind']} has no heads to choose from; gramian has")
        self.head, self.calibration = keep(list(indices)), Calibration()
        kept = {**self.spec["head"], "heads": len(indices), "auxiliary": False} if indices else {"kind": "mean"}
        self.spec = {**self.spec, "head": kept}
        return self

    def head_parameters(self) -> set[str]:
        """Names of the parameters that belong to the classifier itself; none where it is the trunk's word embedding."""
        if not self.head.begins_anew:
            return set()
        prefixes = ("head.", *(f"trunk.{prefix}." for prefix in self.trunk.own_head))
        return {name for name, _ in self.named_parameters() if name.startswith(prefixes)}

    def layer_of(self, name: str) -> int:
        """Depth of a parameter for layer-wise decay; the head is deepest."""
        if name.startswith("head.") or name in self.head_parameters():
            return self.layers
        return self.trunk.layer_of(name.removeprefix("trunk."))

    @property
    def layers(self) -> int:
        """The head's depth for layer-wise decay."""
        return self.trunk.layers + 1


def _as_list(images: Picture | Sequence[Picture]) -> list[Picture]:
    if isinstance(images, (str, Path, Image.Image)):
        return [images]
    if isinstance(images, (Tensor, np.ndarray)):
        return list(images) if images.ndim == 4 else [images]
    return list(images)


def _open(picture: Image.Image | NDArray[Any] | Tensor) -> Image.Image:
    if isinstance(picture, Tensor):
        if picture.dtype != torch.uint8:
            raise ValueError("predict takes byte tensors (uint8); call the model itself on float images")
        picture = picture.cpu().permute(1, 2, 0).numpy() if picture.ndim == 3 else picture.cpu().numpy()
    if isinstance(picture, Image.Image):
        return picture.convert("RGB")
    if picture.dtype != np.uint8:
        raise ValueError(
            f"predict takes byte arrays (uint8), not {picture.dtype}; call the model itself on float images"
        )
    return Image.fromarray(picture.squeeze()).convert("RGB")
