"""`vitrail list` and `vitrail show`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from vitrail.console import fail, output
from vitrail.schema import Positional, near

MEASURED_SECONDS, MEASURED_STEPS = 3.0, 2  # after the first steps; steps per line
What = Literal["models", "heads", "mixers", "objectives", "evaluators", "adapters", "recipes", "data", "weights"]


@dataclass(frozen=True)
class ListCommand:
    """Names of models, heads, mixers, objectives, evaluators, adapters, recipes, data sources or cached weights.

    Example: vitrail list models "deit*" --json
    Example: vitrail list weights        (downloaded before: names for --model.name with --model.weights timm)
    """

    what: Annotated[What, Positional("WHAT")] = "models"
    """models, heads, mixers, objectives, evaluators, adapters, recipes, data or weights"""
    pattern: Annotated[str, Positional("PATTERN")] = "*"  # only names that match this shell pattern
    json: bool = False  # print one JSON list

    def __call__(self) -> int:
        from vitrail import catalogue
        from vitrail.model.hub import hub_cache

        rows = catalogue.rows(self.what, self.pattern)
        if not rows and not self.json:
            where = f" in {hub_cache()} (HF_HUB_CACHE names another cache)" if self.what == "weights" else ""
            return fail(f"no {self.what} match {self.pattern!r}{where}{near(self.pattern, catalogue.names(self.what))}")
        return output(self.json, rows, catalogue.table(self.what, rows))


@dataclass(frozen=True)
class ShowCommand:
    """One model, recipe, head, mixer or adapter in full; or the adapter of a file or run.

    A recipe takes any setting of `train` and is shown as that run would have it: values that depend on the model's size
    follow --model.name.

    Example: vitrail show deit_small
    Example: vitrail show deit3-1k-400 --model.name deit3_large
    Example: vitrail show finetune --data photos/ --plan        (memory, steps and time of that run on this machine)
    Example: vitrail show runs/birds        (what its adapter trained and stores, and on which base)
    """

    names: Annotated[tuple[str, ...], Positional("NAME")]
    """a name of `vitrail list`, an adapter's file, a run folder or model folder"""
    settings: Annotated[Mapping[str, Any], "--section.name value ..."] = field(default_factory=dict)
    """settings of a recipe, as for `vitrail train`"""
    plan: bool = False  # a recipe's memory per process, steps and time on this machine, instead of its settings
    measure: bool = False  # with --plan and --data: train for some seconds, and expect time at that rate
    json: bool = False  # print one JSON object

    def __call__(self) -> int:
        from vitrail import catalogue

        if len(self.names) != 1:
            return fail(f"show takes one name, got {', '.join(self.names) or 'none'}; `vitrail list` gives them")
        if self.plan or self.measure:
            return self._plan()
        description = catalogue.describe(self.names[0], self.settings)
        return output(self.json, description, catalogue.text(description))

    def _plan(self) -> int:
        from vitrail.compare.budgets import probe
        from vitrail.recipes import configured
        from vitrail.run.estimate import plan_run, plan_text

        config = configured(self.names[0], self.settings)
        if self.measure and not config.data.uri:
            return fail("--measure trains some steps: name the images with --data URI")
        try:
            measured = probe(config, MEASURED_SECONDS, MEASURED_STEPS) if self.measure else None
        except RuntimeError as error:  # the steps ran in a process, which failed with this sentence
            return fail(str(error))
        plan = plan_run(config, measured)
        return output(self.json, {"recipe": self.names[0], **plan}, plan_text(plan))
