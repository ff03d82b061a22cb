"""The pages of `vitrail app`: a form, and in a frame below it the answer. No scripts; all names are escaped."""

from __future__ import annotations

from vitrail.app.run import Viewer, picture_of
from vitrail.files import readable
from vitrail.report.html import render_page

NONE = "no map"
TEMPLATE = "app/app.html.jinja"


def kinds_shown(viewer: Viewer) -> list[str]:
    """Maps that can be chosen."""
    return [NONE, *(kind.replace("_", " ") for kind in viewer.kinds)]


def form_page(viewer: Viewer) -> str:
    """The page that takes a picture."""
    kinds = kinds_shown(viewer)
    first = next((kind for kind in ("gradient attention", "grad cam") if kind in kinds), NONE)
    model = viewer.models[0]
    facts = f"{len(model.classes):,} classes, images of {model.preprocess.size} pixels, on {viewer.device}"
    shown = {"names": viewer.names, "facts": facts, "limit": viewer.limit, "kinds": kinds, "first": first}
    return render_page(TEMPLATE, (), answers=None, said="", **shown)


def answer_page(viewer: Viewer, content: bytes, name: str, kind: str) -> str:
    """Predictions of every model for the bytes of a picture. Raises `ValueError`, one sentence, where it is none."""
    if kind not in kinds_shown(viewer):
        raise ValueError(f"there is no map {readable(kind[:40])!r}; choose one of the list")
    answers = viewer.look(picture_of(content, name), None if kind == NONE else kind.replace(" ", "_"))
    labels = {answer.label for answer in answers}
    said = answers[0].label if len(labels) == 1 else "; ".join(f"{a.name} predicts {a.label}" for a in answers)
    return render_page(TEMPLATE, (), names=viewer.names, answers=answers, said=said)
