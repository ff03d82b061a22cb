"""Models of texts: `text:bert`, `text:gpt`, `text:resmlp` (small, vocabulary of the training texts), `text:FOLDER`.

A folder, or a name of the hub, is one that transformers reads: config.json, a tokenizer and, for `weights="hub"`, the
weights. It is read once; a saved model holds its architecture and its tokenizer itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor

from vitrail.data.sources.text import Text
from vitrail.data.tokenizer import END, PAD, TOKENIZER, word_tokenizer
from vitrail.files import parse_json
from vitrail.model.assemble import Parts, assemble, head_config
from vitrail.model.classifier import Classifier, Prediction
from vitrail.model.config import TextBackbone
from vitrail.model.heads.config import ClassToken, HeadConfig, NextToken
from vitrail.model.heads.head import writes_texts
from vitrail.model.store import DESCRIPTION
from vitrail.model.trunks.seq2seq import MODEL_TYPE, SequenceConfig
from vitrail.model.trunks.text_trunk import TextTrunk, transformers, transformers_config
from vitrail.schema import build, near, plain

SEQUENCES: dict[str, Literal["linear", "attention"]] = {"resmlp": "linear", "resmlp-attention": "attention"}
"""An encoder and a decoder of our own (`vitrail.model.trunks.seq2seq`), and what relates their positions."""
OWN_WORDS: dict[str, Literal["first", "last"]] = {"bert": "first", "gpt": "last", **dict.fromkeys(SEQUENCES, "last")}
"""Small architectures that need a vocabulary, and where their class token stands."""
SIZES = {"width": 128, "depth": 4, "heads": 4}
SEQUENCE_SIZES = {"drop": 0.15, "layerscale": 0.2}  # additional ones of `SEQUENCES`
HUB = ("hub", "hub:fetch")


def needs_words(name: str) -> Literal["first", "last"] | None:
    """Where the class token stands of a model that needs a vocabulary; none for one that brings its own."""
    return OWN_WORDS.get(name.removeprefix("text:")) if name.startswith("text:") else None


def own_words(name: str, texts: Iterable[Text]) -> dict[str, str]:
    """The option `tokenizer` of `create_text_model`, for names that need one; otherwise nothing."""
    class_token = needs_words(name)
    return {} if class_token is None else {"tokenizer": word_tokenizer(texts, class_token)}


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
    """A model of texts, with new weights; `overrides` are of `TextBackbone`, and width, depth and heads of `OWN_WORDS`.

    `tokenizer` is the JSON of one, in place of the folder's own; names in `OWN_WORDS` need it unless `weights`, with
    which the model is to be filled, is a run, whose own is taken. Raises `ValueError` where something is missing or
    does not fit.
    """
    source = name.removeprefix("text:")
    known = {f.name for f in fields(TextBackbone)} - {"kind", "name", "architecture"}
    known |= {*(SIZES if source in OWN_WORDS else ()), *(SEQUENCE_SIZES if source in SEQUENCES else ())}
    for key in overrides:
        if key not in known:
            raise ValueError(f"{name} has no part {key!r} (it has {', '.join(sorted(known))}){near(key, known)}")
    fetch = weights == "hub:fetch"
    stored = _tokenizer_of_run(weights) or tokenizer
    if source in OWN_WORDS:
        if stored is None:
            raise ValueError(
                f"{name} needs a vocabulary: give tokenizer=word_tokenizer(texts, {OWN_WORDS[source]!r}), or train it"
            )
        architecture = _small(source, stored, overrides)
    else:
        architecture = _plain(_read(source, fetch, lambda package: package.AutoConfig))
        stored = stored or _tokenizer(source, fetch)
    if source in SEQUENCES and isinstance(head, NextToken) and head.no_repeat:
        raise ValueError(f"model.head.no_repeat: {name} has no such rule; leave it at 0")
    chosen = {key: value for key, value in overrides.items() if key not in (*SIZES, *SEQUENCE_SIZES)}
    config = build(TextBackbone, {**plain(chosen), "name": source, "architecture": architecture})
    config = replace(config, class_token=config.class_token or _class_token(architecture))
    most = architecture.get("max_position_embeddings") or architecture.get("n_positions")
    if most is not None and config.length > int(most):
        raise ValueError(
            f"model.trunk.length: {name} has {most} positions, so texts of {config.length} tokens do not fit"
        )
    parts = Parts(config, ClassToken(drop=0.1) if head is None else head_config(head), name)
    model = assemble(parts, classes, multilabel, device=device)
    model.files = {TOKENIZER: stored}
    trunk = cast("TextTrunk", model.trunk)
    words, vocabulary = trunk.tokeniser(stored).words, int(cast("Any", trunk.backbone).config.vocab_size)
    if words > vocabulary:
        raise ValueError(
            f"{name}: its tokenizer has {words} tokens, its architecture {vocabulary}; they do not belong together"
        )
    return model


def load_text_weights(model: Classifier, weights: str, saved: Mapping[str, Tensor] | None) -> list[str]:
    """Fill a text model from `hub` or a folder of transformers; returns notes on what starts anew.

    `saved`: the state of a run or model folder of ours, where `weights` is one.
    """
    trunk, current = cast("TextTrunk", model.trunk), model.state_dict()
    if saved is None:
        if weights not in HUB and not Path(weights).is_dir():
            raise ValueError(f"model.weights: {weights} is neither a run nor a folder of a transformers model")
        saved = _published(
            trunk.config.name if weights in HUB else weights, weights == "hub:fetch", writes_texts(model)
        )
    fits = {key: saved[key] for key in current if key in saved and saved[key].shape == current[key].shape}
    anew = [key for key in current if key not in fits]
    if lacking := [key for key in anew if key.startswith("trunk.")]:
        raise ValueError(
            f"the weights of {weights} do not fit {trunk.config.name}: {len(lacking)} tensors are missing or of "
            f"another shape, {lacking[0].removeprefix('trunk.backbone.')} among them"
        )
    model.load_state_dict({**current, **fits})
    return [f"{key} starts anew" for key in anew]


def _published(source: str, fetch: bool, words: bool) -> dict[str, Tensor]:
    """Weights of a folder or a name by our names; `words`: with the matrix that makes logits of hidden states."""
    model = _read(source, fetch, lambda package: package.AutoModelForCausalLM if words else package.AutoModel)
    inner = model.base_model if words else model
    state = {f"trunk.backbone.{key}": value.float() for key, value in inner.state_dict().items()}
    return state | ({"head.fc.weight": model.get_output_embeddings().weight.detach().float()} if words else {})


def predict_texts(
    model: Classifier, texts: Iterable[str | tuple[str, str] | Text], *, top: int = 5, batch: int = 64
) -> list[Prediction]:
    """Predictions of a text model for sentences, or pairs of them."""
    trunk = model.trunk
    if not isinstance(trunk, TextTrunk):
        raise ValueError("this model classifies images; use model.predict")
    many = [Text(text) if isinstance(text, str) else Text(*text) for text in texts]
    if not many:
        return []
    encoded, was_training = trunk.tokeniser(model.files[TOKENIZER])(many), model.training
    rows = [range(start, min(start + batch, len(many))) for start in range(0, len(many), batch)]
    model.eval()
    try:
        return [prediction for some in rows for prediction in model.predictions(encoded.batch(some), top)]
    finally:
        model.train(was_training)


def _small(source: str, stored: str, overrides: Mapping[str, Any]) -> dict[str, Any]:
    width, depth, heads = (int(overrides.get(key, value)) for key, value in SIZES.items())
    if width % heads:
        raise ValueError(f"model.trunk.heads: width {width} cannot be cut into {heads} heads")
    values = parse_json(stored)
    ids = dict(values["model"]["vocab"]) | {t["content"]: t["id"] for t in values.get("added_tokens", ())}
    length, pad, end = int(overrides.get("length", TextBackbone.length)), ids.get(PAD, 0), ids.get(END, 0)
    if source in SEQUENCES:
        drop, layerscale = (float(overrides.get(key, value)) for key, value in SEQUENCE_SIZES.items())
        config = SequenceConfig(
            vocab_size=len(ids),
            hidden_size=width,
            intermediate_size=4 * width,
            num_layers=depth,
            num_attention_heads=heads,
            max_position_embeddings=length,
            mixer=SEQUENCES[source],
            pad_token_id=ids[PAD],
            eos_token_id=ids[END],
            drop=drop,
            layerscale=layerscale,
        )
        return asdict(config)
    sizes = {"vocab_size": len(ids), "hidden_size": width, "num_hidden_layers": depth, "num_attention_heads": heads}
    if source == "bert":
        longest = {"intermediate_size": 4 * width, "max_position_embeddings": length}
        return _plain(transformers().BertConfig(**sizes, **longest, pad_token_id=pad))
    sizes = dict(zip(("vocab_size", "n_embd", "n_layer", "n_head"), sizes.values(), strict=True))
    return _plain(
        transformers().GPT2Config(**sizes, n_positions=length, pad_token_id=pad, bos_token_id=end, eos_token_id=end)
    )


def _plain(config: Any) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(config.to_json_string(use_diff=True))
    for key in ("transformers_version", "architectures", "_name_or_path", "dtype", "torch_dtype"):
        values.pop(key, None)
    return {**values, "model_type": config.model_type}


def _read(source: str, fetch: bool, kind: Callable[[Any], Any]) -> Any:
    """An object of transformers from a folder, or from the hub's cache (the network only where asked)."""
    package = transformers()
    bars = package.utils.logging
    shown = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        return kind(package).from_pretrained(source, local_files_only=not fetch)
    except (OSError, ValueError, KeyError) as error:
        reason, folder = " ".join(str(error).split())[:160], Path(source).is_dir()
        where = "in the folder" if folder else "as a folder, nor in the cache of the hub"
        remedy = "" if fetch or folder else "; to ask the network, use --model.weights hub:fetch"
        raise ValueError(f"transformers finds no text model {source!r} {where} ({reason}){remedy}") from None
    finally:
        if shown:
            bars.enable_progress_bar()


def _tokenizer(source: str, fetch: bool) -> str:
    file = Path(source) / TOKENIZER
    if file.is_file():
        return file.read_text(encoding="utf-8")
    backend = getattr(_read(source, fetch, lambda package: package.AutoTokenizer), "backend_tokenizer", None)
    if backend is None:
        raise ValueError(f"text:{source} has no fast tokenizer ({TOKENIZER}); convert it with transformers first")
    return str(backend.to_str())


def _class_token(architecture: Mapping[str, Any]) -> Literal["first", "last"]:
    """Models of masked words read both ways and have a class token in front; the others end with it."""
    if architecture["model_type"] == MODEL_TYPE:
        return "last"
    masked = transformers().MODEL_FOR_MASKED_LM_MAPPING
    return "first" if type(transformers_config(architecture)) in masked else "last"


def _tokenizer_of_run(weights: str) -> str | None:
    """The tokenizer of a run or model folder of ours, where `weights` is one."""
    if weights in ("none", *HUB):
        return None
    for folder in (Path(weights), Path(weights) / "model"):
        if (folder / DESCRIPTION).is_file() and (folder / TOKENIZER).is_file():
            return (folder / TOKENIZER).read_text(encoding="utf-8")
    return None
