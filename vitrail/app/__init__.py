"""`vitrail app`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from vitrail.console import fail
from vitrail.schema import Positional


@dataclass(frozen=True)
class AppCommand:
    """A local page to drop a picture on: prediction, a map over it, tokens kept, cost; two models side by side.

    Needs the extra `app` (gradio). Only this machine can see the page unless --host says otherwise; whoever can reach
    it can use the model.

    Example: vitrail app runs/demo
    Example: vitrail app runs/ats runs/vit
    """

    runs: Annotated[tuple[str, ...], Positional("RUN [RUN2]")]
    """one or two run folders, model folders, or names of models (untrained)"""
    host: str = "127.0.0.1"  # address to listen at (0.0.0.0: every machine that reaches this one)
    port: int = 7860  # port to listen at
    limit: int = 20  # largest upload in MiB
    device: str = "auto"  # auto, cpu, cuda
    browser: bool = False  # open the page in a browser

    def __call__(self) -> int:
        if not self.runs:
            return fail("name one run, or two to see side by side")
        from vitrail.app.page import import_gradio, serve

        import_gradio()
        from vitrail.app.run import Viewer

        viewer = Viewer(self.runs, self.device, self.limit)
        page = serve(viewer, self.host, self.port, browser=self.browser)
        host = "127.0.0.1" if self.host == "0.0.0.0" else self.host
        print(f"{' and '.join(viewer.names)}: http://{host}:{self.port} (Ctrl-C ends it)", flush=True)
        if self.host not in ("127.0.0.1", "localhost", "::1"):
            print(f"other machines can use this page: it listens at {self.host}")
        page.block_thread()
        return 0
