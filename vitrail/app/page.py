"""The pages of `vitrail app`: a form, and in a frame below it the answer. No scripts; all names are escaped."""

from __future__ import annotations

import numpy as np
from PIL import Image

from vitrail.app.facts import KEEP
from vitrail.app.run import Viewer, picture_of
from vitrail.files import readable
from vitrail.report.html import render_page
from vitrail.report.sheets import enlarged

NONE = "no map"
THUMBNAIL = 84  # side of an example, in pixels
TEMPLATE = "app/app.html.jinja"


def kinds_shown(viewer: Viewer) -> list[str]:
    """Maps that can be chosen."""
    return [NONE, *(kind.replace("_", " ") for kind in viewer.kinds)]


def form_page(viewer: Viewer) -> str:
    """The page that takes a picture."""
    kinds = kinds_shown(viewer)
    first = NONE if viewer.first_kind is None else viewer.first_kind.replace("_", " ")
    models = list(zip(viewer.names, viewer.facts, strict=True))
    examples = [(e.truth, enlarged(np.asarray(e.image.convert("RGB")), THUMBNAIL)) for e in viewer.examples]
    shown = {"models": models, "limit": viewer.limit, "kinds": kinds, "first": first, "examples": examples}
    return render_page(TEMPLATE, (), names=viewer.names, answers=None, **shown)


def answer_page(viewer: Viewer, content: bytes, name: str, kind: str) -> str:
    """Predictions of every model for the bytes of a picture. Raises `ValueError`, one sentence, where it is none."""
    if kind not in kinds_shown(viewer):
        raise ValueError(f"there is no map {readable(kind[:40])!r}; choose one of the list")
    return _answers(viewer, picture_of(content, name), None if kind == NONE else kind.replace(" ", "_"))


def example_page(viewer: Viewer, number: int) -> str:
    """Predictions of every model for an example. Raises `IndexError` where there is none of this number."""
    example = viewer.examples[number]
    return _answers(viewer, example.image, viewer.first_kind, example.truth)


def _answers(viewer: Viewer, image: Image.Image, kind: str | None, truth: str = "") -> str:
    answers = viewer.look(image, kind)
    labels = {answer.label for answer in answers}
    said = answers[0].label if len(labels) == 1 else "; ".join(f"{a.name} predicts {a.label}" for a in answers)
    calibrated = [model.calibration.kind != "identity" for model in viewer.models]
    shown = {"said": said, "truth": truth, "keep": KEEP, "kind": (kind or "").replace("_", " ")}
    return render_page(TEMPLATE, (), names=viewer.names, answers=list(zip(answers, calibrated, strict=True)), **shown)
