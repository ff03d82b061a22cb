"""Write vitrail/model/counts.json: parameters and multiply-accumulates of every model of the zoo.

    python tools/count_models.py

`vitrail list models` reads this table so that it answers at once; a test recomputes every row.
"""

from __future__ import annotations

import json
from pathlib import Path

from vitrail.model.build import create_model
from vitrail.model.cost import cost
from vitrail.model.zoo import ZOO


def count(name: str) -> dict[str, int]:
    """Counts of a model at its native size, on the meta device; `macs_as_stated` in its source's convention."""
    model = create_model(name, device="meta")
    counted = cost(model)
    row = {"parameters": counted.parameters, "macs": counted.macs}
    if not ZOO[name].stated.attention_products:
        row["macs_as_stated"] = cost(model, attention_products=False).macs
    return row


if __name__ == "__main__":
    rows = [f"  {json.dumps(name)}: {json.dumps(count(name))}" for name in ZOO]
    table = Path(__file__).parents[1] / "vitrail" / "model" / "counts.json"
    table.write_text("{\n" + ",\n".join(rows) + "\n}\n")
    print(f"{len(rows)} models -> {table.name}")
