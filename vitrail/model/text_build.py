"""Models of texts: `text:bert`, `text:gpt`, `text:resmlp` (small, words of the training texts) and `text:FOLDER`.

A folder, or a name of the hub, is one that transformers reads: config.json, a tokenizer and, for `weights="hub"`, the
weights. It is read once; a saved model holds its architecture and its tokenizer itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor

from vitrail.data.sources.text import Text
from vitrail.data.tokenizer import END, PAD, TOKENIZER, word_tokenizer
from vitrail.model.classifier import Classifier, Prediction
from vitrail.model.config import TextBackbone
from vitrail.model.heads.config import ClassToken, HeadConfig, NextToken, writes_texts
from vitrail.model.trunks.seq2seq import MODEL_TYPE, SequenceConfig
from vitrail.model.trunks.text_trunk import TextTrunk, transformers
from vitrail.schema import build, near, plain

SEQUENCES: dict[str, Literal["linear", "attention"]] = {"resmlp": "linear", "resmlp-attention": "attention"}
"""An encoder and a decoder of our own (`vitrail.model.trunks.seq2seq`), and what relates their positions."""
OWN_WORDS: dict[str, Literal["first", "last"]] = {"bert": "first", "gpt": "last", **dict.fromkeys(SEQUENCES, "last")}
"""Small architectures that need a vocabulary, and where their class token stands."""
SIZES = {"width": 128, "depth": 4, "heads": 4}
SEQUENCE_SIZES = {"drop": 0.15, "layerscale": 0.2}  # besides, of `SEQUENCES`
HUB = ("hub", "hub:fetch")


def needs_words(name: str) -> Literal["first", "last"] | None:
    """Where the class token stands of a model whose vocabulary must be made; none for one that brings its own."""
    return OWN_WORDS.get(name.removeprefix("text:")) if name.startswith("text:") else None


def create_text_model(
    name: str,
    *,
    classes: Sequence[str],
    head: str | HeadConfig | None = None,
    weights: str = "none",
    device: str | torch.device | None = None,
    multilabel: bool = False,
    tokenizer: str | None = None,
    **overrides: Any,
) -> Classifier:
    """A model of texts; `overrides` are of `TextBackbone`, and width, depth and heads of names in `OWN_WORDS`.

    `tokenizer` is the JSON of one, in place of the folder's own; names in `OWN_WORDS` need it unless `weights` is a
    run, whose own is taken. Raises `ValueError` where something is missing or does not fit.
    """
    from vitrail.model.build import Parts, _assemble, head_config

    place = name.removeprefix("text:")
    _refuse_unknown(name, overrides)
    fetch = weights == "hub:fetch"
    stored = _of_run(weights) or tokenizer
    if place in OWN_WORDS:
        if stored is None:
            raise ValueError(
                f"{name} needs a vocabulary: give tokenizer=word_tokenizer(texts, {OWN_WORDS[place]!r}), or train it"
            )
        architecture = _small(place, stored, overrides)
    else:
        architecture = _described(place, fetch)
        stored = stored or _tokenizer(place, fetch)
    if place in SEQUENCES and isinstance(head, NextToken) and head.no_repeat:
        raise ValueError(f"model.head.no_repeat: {name} has no such rule; leave it at 0")
    chosen = {key: value for key, value in overrides.items() if key not in (*SIZES, *SEQUENCE_SIZES)}
    config = build(TextBackbone, {**plain(chosen), "name": place, "architecture": architecture})
    config = replace(config, class_token=config.class_token or _class_token(architecture))
    _refuse_too_long(name, config)
    parts = Parts(config, ClassToken(drop=0.1) if head is None else head_config(head), name)
    model = _assemble(parts, classes, multilabel, None, device)
    model.files = {TOKENIZER: stored}
    trunk = cast("TextTrunk", model.trunk)
    words, known = trunk.tokeniser(stored).words, int(cast("Any", trunk.backbone).config.vocab_size)
    if words > known:
        raise ValueError(
            f"{name}: its tokenizer has {words} tokens, its architecture {known}; they do not belong together"
        )
    if weights != "none":
        from vitrail.model.weights import start_from

        start_from(model, name, weights)
    return model


def load_text_weights(model: Classifier, weights: str) -> list[str]:
    """Fill a text model from `hub`, a folder of transformers, a run or a model folder; returns what starts anew."""
    from vitrail.model.store import DESCRIPTION, load_model, model_folder

    trunk, path = cast("TextTrunk", model.trunk), Path(weights)
    own = model.state_dict()
    if weights not in HUB and any((path / place / DESCRIPTION).is_file() for place in ("", "model")):
        state = load_model(model_folder(path)).state_dict()
    else:
        place = trunk.config.name if weights in HUB else weights
        if weights not in HUB and not path.is_dir():
            raise ValueError(f"model.weights: {weights} is neither a run nor a folder of a transformers model")
        state = _published(place, weights == "hub:fetch", writes_texts(model))
    fits = {key: state[key] for key in own if key in state and state[key].shape == own[key].shape}
    anew = [key for key in own if key not in fits]
    lacking = [key for key in anew if key.startswith("trunk.")]
    if lacking:
        raise ValueError(
            f"the weights of {weights} do not fit {trunk.config.name}: {len(lacking)} tensors are missing or of "
            f"another shape, {lacking[0].removeprefix('trunk.backbone.')} among them"
        )
    model.load_state_dict({**own, **fits})
    return [f"{key} starts anew" for key in anew]


def _published(place: str, fetch: bool, words: bool) -> dict[str, Tensor]:
    """Weights of a folder or a name by our names; `words`: with the matrix that makes logits of hidden states."""

    def read(package: Any, how: Mapping[str, Any]) -> Any:
        return (package.AutoModelForCausalLM if words else package.AutoModel).from_pretrained(place, **how)

    found = _read(place, fetch, read)
    inner = found.base_model if words else found
    state = {f"trunk.backbone.{key}": value.float() for key, value in inner.state_dict().items()}
    if words:
        state["head.fc.weight"] = found.get_output_embeddings().weight.detach().float()
    return state


def predict_texts(
    model: Classifier, texts: Iterable[str | tuple[str, str] | Text], *, top: int = 5, batch: int = 64
) -> list[Prediction]:
    """What a text model says of sentences, or pairs of them."""
    trunk = model.trunk
    if not isinstance(trunk, TextTrunk):
        raise ValueError("this model classifies images; use model.predict")
    many = [Text(text) if isinstance(text, str) else Text(*text) for text in texts]
    if not many:
        return []
    encoded = trunk.tokeniser(model.files[TOKENIZER])(many)
    place, was_training = next(model.parameters()).device, model.training
    model.eval()
    try:
        found: list[Prediction] = []
        for start in range(0, len(many), batch):
            rows = range(start, min(start + batch, len(many)))
            with torch.inference_mode():
                logits = model(encoded.batch(rows).to(place))
            found += [model._prediction(row, top) for row in model.probabilities(logits.float()).cpu()]
        return found
    finally:
        model.train(was_training)


def own_words(name: str, texts: Iterable[Text]) -> dict[str, str]:
    """The option `tokenizer` of `create_text_model`, for names that need one; otherwise nothing."""
    place = needs_words(name)
    return {} if place is None else {"tokenizer": word_tokenizer(texts, place)}


def _refuse_unknown(name: str, overrides: Mapping[str, Any]) -> None:
    known = {f.name for f in fields(TextBackbone)} - {"kind", "name", "architecture"}
    known |= set(SIZES) if name.removeprefix("text:") in OWN_WORDS else set()
    known |= set(SEQUENCE_SIZES) if name.removeprefix("text:") in SEQUENCES else set()
    for key in overrides:
        if key not in known:
            raise ValueError(f"{name} has no part {key!r} (it has {', '.join(sorted(known))}){near(key, known)}")


def _small(place: str, stored: str, overrides: Mapping[str, Any]) -> dict[str, Any]:
    sizes = SIZES | {key: overrides[key] for key in SIZES if key in overrides}
    width, depth, heads = (int(sizes[key]) for key in ("width", "depth", "heads"))
    if width % heads:
        raise ValueError(f"model.trunk.heads: width {width} cannot be cut into {heads} heads")
    numbers = _numbers(stored)
    length = int(overrides.get("length", TextBackbone.length))
    if place in SEQUENCES:
        drop, layerscale = (float(overrides.get(key, value)) for key, value in SEQUENCE_SIZES.items())
        return asdict(
            SequenceConfig(
                vocab_size=len(numbers),
                hidden_size=width,
                intermediate_size=4 * width,
                num_layers=depth,
                num_attention_heads=heads,
                max_position_embeddings=length,
                mixer=SEQUENCES[place],
                pad_token_id=numbers[PAD],
                eos_token_id=numbers[END],
                drop=drop,
                layerscale=layerscale,
            )
        )
    package = transformers()
    if place == "bert":
        made = package.BertConfig(
            vocab_size=len(numbers),
            hidden_size=width,
            num_hidden_layers=depth,
            num_attention_heads=heads,
            intermediate_size=4 * width,
            max_position_embeddings=length,
            pad_token_id=numbers.get(PAD, 0),
        )
    else:
        made = package.GPT2Config(
            vocab_size=len(numbers),
            n_embd=width,
            n_layer=depth,
            n_head=heads,
            n_positions=length,
            pad_token_id=numbers.get(PAD, 0),
            bos_token_id=numbers.get(END, 0),
            eos_token_id=numbers.get(END, 0),
        )
    return _plain(made)


def _numbers(stored: str) -> dict[str, int]:
    """Number of every token."""
    values = json.loads(stored)
    found = dict(values["model"]["vocab"])
    return found | {token["content"]: token["id"] for token in values.get("added_tokens", ())}


def _plain(config: Any) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(config.to_json_string(use_diff=True))
    for key in ("transformers_version", "architectures", "_name_or_path", "dtype", "torch_dtype"):
        values.pop(key, None)
    return {**values, "model_type": config.model_type}


def _read(place: str, fetch: bool, read: Any) -> Any:
    """What transformers reads from a folder, or from the hub's cache (the network only where asked)."""
    package = transformers()
    bars = package.utils.logging
    shown = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        return read(package, {"local_files_only": not fetch})
    except (OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())[:160]
        where = "in the folder" if Path(place).is_dir() else "as a folder, nor in the cache of the hub"
        asked = "" if fetch or Path(place).is_dir() else "; to ask the network, use --model.weights hub:fetch"
        raise ValueError(f"transformers finds no text model {place!r} {where} ({reason}){asked}") from None
    finally:
        if shown:
            bars.enable_progress_bar()


def _described(place: str, fetch: bool) -> dict[str, Any]:
    return _plain(_read(place, fetch, lambda package, how: package.AutoConfig.from_pretrained(place, **how)))


def _tokenizer(place: str, fetch: bool) -> str:
    file = Path(place) / TOKENIZER
    if file.is_file():
        return file.read_text(encoding="utf-8")
    found = _read(place, fetch, lambda package, how: package.AutoTokenizer.from_pretrained(place, **how))
    backend = getattr(found, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(f"text:{place} has no fast tokenizer ({TOKENIZER}); convert it with transformers first")
    return str(backend.to_str())


def _class_token(architecture: Mapping[str, Any]) -> Literal["first", "last"]:
    """Those that guess masked words read both ways and have a class token in front; the others end with it."""
    if architecture["model_type"] == MODEL_TYPE:
        return "last"
    package = transformers()
    values = dict(architecture)
    described = package.AutoConfig.for_model(str(values.pop("model_type")), **values)
    return "first" if type(described) in package.MODEL_FOR_MASKED_LM_MAPPING else "last"


def _refuse_too_long(name: str, config: TextBackbone) -> None:
    most = config.architecture.get("max_position_embeddings") or config.architecture.get("n_positions")
    if most is not None and config.length > int(most):
        raise ValueError(
            f"model.trunk.length: {name} has {most} positions, so texts of {config.length} tokens do not fit"
        )


def _of_run(weights: str) -> str | None:
    """The tokenizer of a run or model folder of ours, where `weights` is one."""
    from vitrail.model.store import DESCRIPTION

    if weights in ("none", *HUB):
        return None
    for place in ("", "model"):
        folder = Path(weights) / place
        if (folder / DESCRIPTION).is_file() and (folder / TOKENIZER).is_file():
            return (folder / TOKENIZER).read_text(encoding="utf-8")
    return None
