"""`vitrail train`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

from vitrail.cli.say import fail, show
from vitrail.schema import parse_flags


def train(words: list[str]) -> int:
    """`vitrail train [RECIPE] [--config FILE] [--resume RUN] [--section.name value ...]`."""
    from vitrail.config import RunConfig, from_mapping, load_yaml
    from vitrail.recipes import recipe

    if "-h" in words or "--help" in words:
        from vitrail.cli.train_help import train_help

        return train_help(words)
    as_json = "--json" in words
    positional, values = parse_flags([w for w in words if w != "--json"])
    if len(positional) > 1:
        return fail(f"train takes one recipe, got {', '.join(positional)}; settings are --section.name value")
    config_file, resumed = values.pop("config", None), values.pop("resume", None)
    if sum(x is not None for x in (config_file, resumed)) + bool(positional) > 1:
        return fail("give one of: a recipe, --config FILE, --resume RUN")
    if isinstance(config_file, bool) or isinstance(resumed, bool):
        return fail("--config needs a file and --resume a run folder")
    if resumed is not None:
        return _run(lambda api: api.resume(resumed, values), as_json)
    base: RunConfig | None = None
    if config_file is not None:
        stored = {**load_yaml(config_file), "out": None}
        base = from_mapping(stored)
    else:
        base = recipe(positional[0] if positional else "vit", _model_name(values))
    config = from_mapping(values, base)
    return _run(lambda api: api.train(config), as_json)


def _model_name(values: Mapping[str, Any]) -> str | None:
    """The model that flags choose: what a recipe sets by size must know it."""
    model = values.get("model")
    name = model.get("name") if isinstance(model, Mapping) else None
    return name if isinstance(name, str) else None


def _run(work: Callable[[Any], Any], as_json: bool) -> int:
    import vitrail as api
    from vitrail.engine.device import join, leave
    from vitrail.engine.loop import Stopped
    from vitrail.report.tables import headline
    from vitrail.run.attack_run import is_attack, resume_attack

    try:
        done = work(api)
        patch = resume_attack(done.path, quiet=as_json) if is_attack(done.path) else None
        if join().main:
            if as_json:
                more = {} if done.adapter is None else {"adapter": done.adapter}
                more |= {} if patch is None else {"attack": patch.to_json()}
                figures = {**done.figures.scalars(), **done.others}
                print(json.dumps({"run": str(done.path), "split": done.split, **figures, **more}))
            else:
                show(headline(done.figures, f"{done.split}, {done.path}"))
                if done.reading:  # again, where the figures are
                    print(done.reading)
                if done.others:
                    print("  ".join(f"{name} {value:.4g}" for name, value in done.others.items()))
                if done.adapter is not None:
                    found = done.adapter
                    print(f"{found['kind']}: {found['trained']:,} numbers, a file of {found['bytes']:,} bytes")
                if patch is not None:
                    from vitrail.run.attack_run import attack_table

                    show(attack_table(patch.rows, patch.most, "under attack"))
                print(f"report: {done.report}")
    except Stopped as stopped:
        print(str(stopped), file=sys.stderr)
        return 130
    finally:
        leave()
    return 0
