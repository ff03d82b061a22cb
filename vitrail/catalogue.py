"""The catalogue of names: models with their counts, heads, mixers, adapters, recipes, data sources. No torch here."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from vitrail.config import RunConfig
from vitrail.files import parse_json
from vitrail.model.adapters.config import ADAPTER, AdapterConfig, read_header, summary
from vitrail.model.config import TrunkConfig
from vitrail.model.hub import cached_repositories
from vitrail.model.zoo import ZOO
from vitrail.recipes import RECIPES, about, configured, stated
from vitrail.registry import config_type, kinds, part
from vitrail.schema import members, near, plain

WIDE = 80  # columns of a terminal in which all that is known of models fits


@cache
def data_forms() -> dict[str, str]:
    """How data are named, with a line about each, as their sources describe them."""
    sources = [part("source", kind) for kind in kinds("source")]
    return {form: line for source in sources for form, line in source.forms.items()}


@cache
def counts() -> dict[str, dict[str, int]]:
    """Parameters and multiply-accumulates of every model, from the generated table (a test recomputes it)."""
    by_model: dict[str, dict[str, int]] = json.loads((files("vitrail.model") / "counts.json").read_text())
    return by_model


def names(what: str) -> list[str]:
    """Every name of a kind."""
    return {
        "models": list(ZOO),
        **{f"{family}s": kinds(family) for family in ("head", "mixer", "objective", "evaluator")},
        "adapters": list(_kinds(AdapterConfig)),
        "recipes": list(RECIPES),
        "data": list(data_forms()),
        "weights": [row["name"] for row in cached_repositories()],
    }[what]


def rows(what: str, pattern: str = "*") -> list[dict[str, Any]]:
    """One row for each name that matches."""
    if what == "weights":
        return [row for row in cached_repositories() if fnmatchcase(row["name"], pattern)]
    make = {"models": _model, "recipes": _recipe, "data": _data}.get(what, lambda name: _part(what, name))
    return [make(name) for name in names(what) if fnmatchcase(name, pattern)]


def _model(name: str) -> dict[str, Any]:
    spec, counted = ZOO[name], counts().get(name, {})
    stated = spec.stated.parameters
    parameters = counted.get("parameters")
    macs = counted.get("macs_as_stated", counted.get("macs"))

    def differs(counted: float | None, printed: float | None) -> float | None:
        return None if counted is None or printed is None else counted / printed - 1

    return {
        "name": name,
        "parameters": parameters,
        "macs": counted.get("macs"),
        "size": spec.trunk.image_size or 224,
        "head": spec.head.kind,
        "stated_parameters_millions": stated,
        "stated_macs_billions": spec.stated.macs,
        "stated_counts_attention_products": spec.stated.attention_products,
        "difference": differs(parameters, stated and stated * 1e6),
        "macs_difference": differs(macs, spec.stated.macs and spec.stated.macs * 1e9),
        "source": spec.source,
        "weights": None if spec.timm is None else f"timm:{spec.timm}",
    }


def _recipe(name: str) -> dict[str, Any]:
    return {"name": name, "about": about(name).splitlines()[0]}


def _data(name: str) -> dict[str, Any]:
    return {"name": name, "about": data_forms()[name]}


def _part(what: str, name: str) -> dict[str, Any]:
    if what == "evaluators":
        return {"name": name, "about": " ".join((part("evaluator", name).__doc__ or "").split("\n\n")[0].split())}
    cls = _kinds(AdapterConfig)[name] if what == "adapters" else config_type(what.removesuffix("s"), name)
    options = {name: value for name, value in plain(cls()).items() if name != "kind"}
    return {"name": name, "about": (cls.__doc__ or "").splitlines()[0], "options": options}


def _kinds(union: Any) -> dict[str, Any]:
    return {str(next(f.default for f in dataclasses.fields(m) if f.name == "kind")): m for m in members(union)}


def table(what: str, rows: Sequence[dict[str, Any]]) -> Any:
    """The rows as a rich table that fits a terminal."""
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 1, 0, 0))
    if what == "models":
        whole = shutil.get_terminal_size().columns >= WIDE
        shown = ("model", "parameters", "MACs", "px", "stated", "off", "MACs", "off")[: None if whole else 4]
        for column in shown:
            grid.add_column(column, justify="left" if column == "model" else "right", no_wrap=True)
        for row in rows:
            stated, macs = row["stated_parameters_millions"], row["stated_macs_billions"]
            cells = (
                row["name"],
                f"{row['parameters'] / 1e6:.2f} M",
                f"{row['macs'] / 1e9:.2f} G",
                str(row["size"]),
                "" if stated is None else f"{stated:g} M",
                "" if row["difference"] is None else f"{100 * row['difference']:+.1f} %",
                "" if macs is None else f"{macs:g} G",
                "" if row["macs_difference"] is None else f"{100 * row['macs_difference']:+.0f} %",
            )
            grid.add_row(*cells[: len(shown)])
        stated_too = "stated: what the source prints, and how far our count is off"
        grid.caption = stated_too if whole else f"{WIDE} columns also show what the source prints"
        grid.caption_justify = "left"
        return grid
    grid.add_column(what.rstrip("s"), no_wrap=True)
    grid.add_column("")
    for row in rows:
        options = ", ".join(f"{k}={v}" for k, v in row.get("options", {}).items())
        about = row.get("about") or f"{row['bytes'] / 1e6:.1f} MB, {row['file']}"
        grid.add_row(row["name"], Text(about + (f" ({options})" if options else "")))
    return grid


def describe(name: str, settings: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Everything about one model, recipe, head, mixer or kind of adapter, or about the adapter of a file or run.

    `settings` change a recipe, nested as flags are. Raises `ValueError` with near matches, `ConfigError` with every
    problem of the settings.
    """
    if settings and name not in RECIPES:
        raise ValueError(f"settings change a recipe, and {name!r} is none{near(name, RECIPES)}; leave them out")
    if name in ZOO:
        spec = ZOO[name]
        return {"model": _model(name), "trunk": plain(spec.trunk), "head": plain(spec.head)}
    if name in RECIPES:
        chosen = configured(name, settings or {})
        config = plain(chosen)
        return {
            "recipe": name,
            "about": about(name),
            "stated": beside(config, stated(name)),
            "resolved": resolved(chosen),
            "optimizer": optimizer_of(chosen),
            "config": config,
        }
    for what in ("heads", "mixers", "adapters"):
        if name in names(what):
            return {what.rstrip("s"): plain(_part(what, name))}
    if Path(name).exists():
        return {"adapter": _adapter_of(Path(name))}
    known = [*ZOO, *RECIPES, *names("heads"), *names("mixers"), *names("adapters")]
    raise ValueError(f"nothing is called {name!r}{near(name, known)}")


def _adapter_of(path: Path) -> dict[str, Any]:
    """What an adapter file holds, or that of a run or model folder, which knows where the base was."""
    if path.is_file():
        return summary(read_header(path))
    for folder in (path, path / "model"):
        if (folder / ADAPTER).is_file():
            header = summary(read_header(folder / ADAPTER))
            described = folder / "model.json"
            if described.is_file():
                recorded = parse_json(described.read_text(encoding="utf-8")).get("adapter", {})
                header["base"] = {**header["base"], **{k: v for k, v in recorded.items() if k in ("weights", "seed")}}
            return header
    raise ValueError(f"{path} holds no adapter: it is no run that trained one, and no model folder of one")


def resolved(config: RunConfig) -> dict[str, Any]:
    """Values that a run has where its settings leave them to the model or scale them, by setting."""
    rows: dict[str, Any] = {}
    spec = ZOO.get(config.model.name)
    if spec is not None and isinstance(spec.trunk, TrunkConfig):
        trunk = {**plain(spec.trunk), **config.model.trunk}
        for setting in ("drop_path", "image_size"):
            if getattr(config.model, setting) is None:
                rows[f"model.{setting}"] = trunk[setting]
    if config.optim.lr_batch is not None:
        rows["optim.lr"] = config.optim.lr * config.data.batch / config.optim.lr_batch
    return rows


def optimizer_of(config: RunConfig) -> dict[str, int] | None:
    """Parameters of the model that Muon and AdamW take (its classes as its source has them); none: one takes all."""
    if config.optim.name != "muon" or config.model.name not in ZOO:
        return None
    from vitrail.engine.optimizer import optimizer_shares, parameter_groups
    from vitrail.model.build import create_model

    chosen = config.model
    model = create_model(
        chosen.name, image_size=chosen.image_size, head=chosen.head, device="meta", **dict(chosen.trunk)
    )
    return optimizer_shares("muon", parameter_groups(model, config.optim))


def beside(config: dict[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """What a recipe's source prints beside what the recipe sets; empty where the source prints nothing."""
    if not said:
        return {}

    def value(path: str) -> Any:
        inner: Any = config
        for key in path.split("."):
            inner = inner.get(key) if isinstance(inner, dict) else None  # another kind of objective may not have it
        return inner

    rows = [{"setting": k, "source": v, "recipe": value(k)} for k, v in said.items() if k != "source"]
    return {"source": said["source"], "settings": rows}


def text(described: dict[str, Any]) -> str:
    """A description for people: YAML with the words on top."""
    if "recipe" in described:
        lines = described["about"].splitlines()
        if described["stated"]:
            lines += ["", f"{'setting':<28} {'source':<14} recipe    ({described['stated']['source']})"]
            for row in described["stated"]["settings"]:
                lines.append(f"{row['setting']:<28} {row['source']!s:<14} {row['recipe']}")
        if described["resolved"]:
            lines += ["", f"{'setting':<28} in the run (from the model, or scaled by the batch)"]
            lines += [f"{setting:<28} {value:.6g}" for setting, value in described["resolved"].items()]
        shares = described["optimizer"] or {described["config"]["optim"]["name"]: None}
        takes = ", ".join(f"{name} {'all' if n is None else f'{n:,}'}" for name, n in shares.items())
        lines += ["", f"parameters by optimiser: {takes}"]
        words = "\n".join(f"# {line}".rstrip() for line in lines)
        return f"{words}\n" + str(yaml.safe_dump(described["config"], sort_keys=False, allow_unicode=True))
    return str(yaml.safe_dump(described, sort_keys=False, allow_unicode=True))
