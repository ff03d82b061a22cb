"""`vitrail app`."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated

from vitrail.console import fail
from vitrail.schema import Positional


@dataclass(frozen=True)
class AppCommand:
    """A local page to drop a picture on: prediction, a map over it, tokens kept, cost; two models side by side.

    Only this machine can see the page unless --host says otherwise; whoever can reach it can use the model. Pictures
    stay in memory and are never written.

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
        import webbrowser

        from vitrail.app.run import Viewer
        from vitrail.app.server import AppServer

        with AppServer(Viewer(self.runs, self.device, self.limit), self.host, self.port) as server:
            host = "127.0.0.1" if self.host == "0.0.0.0" else f"[{self.host}]" if ":" in self.host else self.host
            url = f"http://{host}:{server.server_port}"
            print(f"{' and '.join(server.viewer.names)}: {url} (Ctrl-C ends it)", flush=True)
            if self.host not in ("127.0.0.1", "localhost", "::1"):
                print(f"other machines can use this page: it listens at {self.host}", flush=True)
            if self.browser:
                webbrowser.open(url)
            with suppress(KeyboardInterrupt):
                server.serve_forever()
        return 0
