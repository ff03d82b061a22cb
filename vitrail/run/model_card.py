"""A trained model as a folder in the layout of the Hugging Face hub: weights, description, and a model card.

`vitrail.load("hf:OWNER/NAME")` reads such a repository, `vitrail.load("hf:FOLDER")` a folder.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from vitrail.config import from_mapping, load_yaml
from vitrail.files import parse_json, write_text
from vitrail.model.classifier import Classifier
from vitrail.model.cost import cost
from vitrail.model.store import model_folder

CARD = """---
library_name: vitrail
pipeline_tag: image-classification
license: other  # fill in: that of the data and of the weights it started from
tags: [image-classification, vitrail]
---

# {name}

{model}, {count} classes, {parameters} parameters, {macs} multiply-accumulates per image of {size} pixels.

```python
import vitrail

model = vitrail.load("hf:{name}")
print(model.predict("photo.jpg"))  # probabilities are {calibrated}
```

## Training

- Data: `{data}`
- Recipe: `{recipe}`, {length}, seed {seed}; `vitrail train --config config.yaml` repeats it
- Started from: {weights}

## Metrics

{metrics}

## Limits

- It knows these classes and no others: {classes}.
- Metrics are of images like those it was trained on; other cameras, places or preparation may do worse.
{more}
"""


def export_hub(model: Classifier, run: Path, out: Path, name: str = "") -> Path:
    """Write the files of a run's model, its configuration and a card into `out`; `name`: what it is called there."""
    model.reject_other("hf:")
    source, folder = model_folder(run), Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    for file in sorted(source.iterdir()):
        if file.is_file():
            shutil.copyfile(file, folder / file.name)
    if (run / "config.yaml").is_file():
        shutil.copyfile(run / "config.yaml", folder / "config.yaml")
    write_text(folder / "README.md", model_card(model, run, name or folder.name))
    return folder


def model_card(model: Classifier, run: Path, name: str) -> str:
    """The card of a run's model, from what the run recorded; what is not known is said to be so."""
    config = from_mapping({**load_yaml(run / "config.yaml"), "out": None}) if (run / "config.yaml").is_file() else None
    spent, unknown = cost(model), "not recorded"
    shown = ", ".join(model.classes[:20]) + (f", and {len(model.classes) - 20} more" if len(model.classes) > 20 else "")
    calibration = model.calibration
    return CARD.format(
        name=name,
        model=unknown if config is None else config.model.name,
        count=len(model.classes),
        parameters=f"{sum(p.numel() for p in model.parameters()):,}",
        macs=f"{spent.macs:,}",
        size=model.preprocess.size,
        calibrated="not calibrated" if calibration is None else "calibrated on held-out images",
        data=unknown if config is None else config.data.uri,
        recipe=unknown if config is None else config.recipe or "none",
        length=unknown if config is None else _length(config),
        seed=unknown if config is None else config.seed,
        weights=unknown
        if config is None
        else {"none": "random weights"}.get(config.model.weights, config.model.weights),
        metrics=_metrics(run),
        classes=shown,
        more="- Several labels may hold of one image." if model.multilabel else "- Every image gets one label.",
    )


def _length(config: Any) -> str:
    return f"{config.optim.epochs:g} epochs" if config.optim.steps is None else f"{config.optim.steps:,} steps"


def _metrics(run: Path) -> str:
    """The metrics of the finished run as a table, with the interval where it has one."""
    file = run / "metrics.jsonl"
    lines = [parse_json(line) for line in file.read_text("utf-8").splitlines()] if file.is_file() else []
    final = next((line for line in reversed(lines) if line.get("final")), None)
    if final is None:
        return "No metrics were recorded next to this model."
    rows = ["| metric | value | 95 % interval |", "|---|---|---|"]
    for name, value in final.items():
        if name in ("step", "epoch", "split", "final") or name.endswith(("_low", "_high")) or value is None:
            continue
        low, high = final.get(f"{name}_low"), final.get(f"{name}_high")
        rows.append(f"| {name} | {value:.4g} | {'' if low is None else f'{low:.4g} to {high:.4g}'} |")
    return f"On the {final['split']} images, evaluated once:\n\n" + "\n".join(rows)
