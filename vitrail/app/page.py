"""The page of `vitrail app`, in Gradio (extra `app`): wiring only; what is shown comes from `vitrail.app.run`."""

from __future__ import annotations

from typing import Any

from vitrail.app.run import TOP, Viewer, picture_of

NONE = "no map"
CSS = ".gradio-container { width: 100% !important; max-width: 1100px !important; margin: 0 auto !important; }"
BUTTONS = ["fullscreen", "download"]  # of a picture; Gradio would also offer to share it with its makers


def import_gradio() -> Any:
    """Gradio; raises `ValueError` with what to do where it is not installed."""
    try:
        import gradio
    except ImportError:
        raise ValueError("the app needs gradio, which is not installed: pip install 'vitrail[app]'") from None
    return gradio


def answers(viewer: Viewer, path: str | None, kind: str) -> list[Any]:
    """The content of the page: one sentence, then for every model label, picture, kept strip and cost."""
    try:
        image = picture_of(path, viewer.limit)
    except ValueError as error:
        return [str(error), *[None, None, None, ""] * len(viewer.models)]
    predictions = viewer.look(image, None if kind == NONE else kind.replace(" ", "_"))
    labels = {prediction.label for prediction in predictions}
    content: list[Any] = [
        " ".join(labels) if len(labels) == 1 else "; ".join(f"{p.name} predicts {p.label}" for p in predictions)
    ]
    for prediction in predictions:
        words = f"{prediction.cost}. {prediction.note[:1].upper()}{prediction.note[1:]}".strip()
        content += [
            dict(prediction.top),
            prediction.picture if prediction.over is None else prediction.over,
            prediction.kept,
            words,
        ]
    return content


def build_page(viewer: Viewer) -> Any:
    """The page as Gradio's blocks."""
    gr = import_gradio()
    kinds = [NONE, *(kind.replace("_", " ") for kind in viewer.kinds)]
    first = next((k for k in ("gradient attention", "grad cam") if k in kinds), kinds[0])
    title = " and ".join(viewer.names)
    with gr.Blocks(title=f"vitrail: {title}", analytics_enabled=False, delete_cache=(600, 600)) as page:
        with gr.Row():
            upload = gr.File(label=f"A picture, at most {viewer.limit} MiB", type="filepath", elem_id="upload")
            with gr.Column():
                kind = gr.Dropdown(kinds, value=first, label="Saliency map", elem_id="map")
                said = gr.Textbox(label="Prediction", interactive=False, elem_id="said")
        shown: list[Any] = []
        with gr.Row():
            for i, name in enumerate(viewer.names):
                with gr.Column():
                    label = gr.Label(num_top_classes=TOP, label=name, elem_id=f"label-{i}")
                    over = gr.Image(
                        label="Input of the model", interactive=False, buttons=BUTTONS, elem_id=f"picture-{i}"
                    )
                    kept = gr.Image(
                        label="Kept patches", interactive=False, buttons=BUTTONS, visible=viewer.adaptive[i]
                    )
                    spent = gr.Textbox(label="Cost", interactive=False, lines=2, elem_id=f"cost-{i}")
                    shown += [label, over, kept, spent]

        def answer(path: str | None, chosen: str) -> list[Any]:
            return answers(viewer, path, chosen)

        gr.on([upload.change, kind.change], answer, [upload, kind], [said, *shown])
    return page


def serve(viewer: Viewer, host: str, port: int, *, browser: bool = False) -> Any:
    """Show the page and return it: `page.block_thread()` waits for an interruption, `page.close()` ends it.

    Raises `ValueError` where the port is not to be had.
    """
    gr = import_gradio()
    page = build_page(viewer)
    # Fonts of this machine: a page on a laptop in a train must not look for any on the network.
    theme = gr.themes.Default(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"])
    try:
        page.launch(
            server_name=host,
            server_port=port,
            share=False,
            inbrowser=browser,
            max_file_size=viewer.limit * 2**20,
            prevent_thread_lock=True,
            footer_links=[],
            theme=theme,
            css=CSS,
            quiet=True,
        )
    except OSError:
        raise ValueError(
            f"the page cannot be shown at {host}:{port}, which is taken or not allowed; choose another --port"
        ) from None
    return page
