"""`vitrail app`."""

from __future__ import annotations

from typing import Annotated

import tyro

from vitrail.cli.say import fail


def app(
    runs: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="RUN [RUN2]")],
    /,
    host: str = "127.0.0.1",
    port: int = 7860,
    limit: int = 20,
    device: str = "auto",
    browser: bool = False,
) -> int:
    """A local page to drop a picture on: prediction, a map over it, tokens kept, cost; two models side by side.

    Needs the extra `app` (gradio). Only this machine can see the page unless --host says otherwise; whoever can reach
    it can use the model.

    Example: vitrail app runs/demo
    Example: vitrail app runs/ats runs/vit

    Args:
        runs: one or two run folders, model folders, or names of models (untrained)
        host: address to listen at (0.0.0.0: every machine that reaches this one)
        port: port to listen at
        limit: largest upload in MiB
        device: auto, cpu, cuda
        browser: open the page in a browser
    """
    if not runs:
        return fail("name one run, or two to see side by side")
    from vitrail.app.page import import_gradio, serve

    import_gradio()
    from vitrail.app.run import Viewer

    viewer = Viewer(runs, device, limit)
    page = serve(viewer, host, port, browser=browser)
    print(
        f"{' and '.join(viewer.names)}: http://{'127.0.0.1' if host == '0.0.0.0' else host}:{port} (Ctrl-C ends it)",
        flush=True,
    )
    if host not in ("127.0.0.1", "localhost", "::1"):
        print(f"other machines can use this page: it listens at {host}")
    page.block_thread()
    return 0
