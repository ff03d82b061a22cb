"""The web server of `vitrail app`, for strangers' requests: everything has a limit, and nothing is written."""

from __future__ import annotations

import ipaddress
import re
import socket
import socketserver
import sys
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Semaphore, Timer
from typing import Any
from urllib.parse import urlsplit

from vitrail.app.page import answer_page, example_page, form_page
from vitrail.app.run import Viewer
from vitrail.report.html import style_sheets

MOST_REQUESTS = 16  # at a time; predictions are made one after another
SECONDS = 60.0  # in which a request must have arrived
FORM = 4096  # bytes of a form besides the picture
MOST_PARTS = 4
EXAMPLE = re.compile(r"/example/([0-9]{1,2})", re.ASCII)
MULTIPART = re.compile(r"multipart/form-data\s*;\s*boundary=\"?([-\w'()+,./:=? ]{1,70})\"?", re.ASCII)
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; img-src data:; style-src 'self'; form-action 'self'; "
    "frame-src 'self'; frame-ancestors 'self'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "SAMEORIGIN",
    "Referrer-Policy": "same-origin",  # with no-referrer browsers would send our own form as from nowhere
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class RejectedRequest(Exception):
    """A request that is answered with a status and one sentence."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


class AppServer(ThreadingHTTPServer):
    """Serves the pages of a viewer. Raises `ValueError` where the address is not to be had.

    `seconds` is the time in which a request must have arrived, `most` the number of requests at a time.
    """

    daemon_threads = True

    def __init__(
        self, viewer: Viewer, host: str, port: int, *, seconds: float = SECONDS, most: int = MOST_REQUESTS
    ) -> None:
        self.viewer, self.host, self.seconds = viewer, host, seconds
        self.predicting, self._free = Lock(), Semaphore(most)
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            super().__init__((host, port), AppHandler)
        except (OSError, OverflowError):
            raise ValueError(
                f"the page cannot be shown at {host}:{port}, which is taken or not allowed; choose another --port"
            ) from None

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)  # that of HTTPServer asks the network for this machine's name
        self.server_name, self.server_port = self.host, self.server_address[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
            return
        with suppress(OSError):
            request.setblocking(False)
            request.sendall(b"HTTP/1.0 503 Busy\r\nRetry-After: 5\r\n\r\ntoo many requests at a time; try again\n")
            request.recv(65536)  # closing with something unread would take the answer back
        self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], OSError):  # the other end has gone
            super().handle_error(request, client_address)


class AppHandler(BaseHTTPRequestHandler):
    """One request, which ends its connection."""

    server: AppServer
    server_version, sys_version, default_request_version = "vitrail", "", "HTTP/1.0"

    def setup(self) -> None:
        super().setup()
        self.connection.settimeout(2 * self.server.seconds)  # of each wait; the timer counts all waits for the request
        self.late = False
        self.timer = Timer(self.server.seconds, self._stop_reading)
        self.timer.daemon = True
        self.timer.start()

    def finish(self) -> None:
        super().finish()
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)
            left = 4 * 2**20 * self.server.viewer.limit
            while left > 0 and (block := self.connection.recv(65536)):  # a sender reads the answer only when it is done
                left -= len(block)
        self.timer.cancel()

    def _stop_reading(self) -> None:
        self.late = True
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RD)

    def do_GET(self) -> None:
        def page() -> tuple[str, str]:
            path = urlsplit(self.path).path
            if path == "/style.css":
                return style_sheets("report/report.css", "app/app.css"), "text/css"
            example = EXAMPLE.fullmatch(path)
            if example and int(example[1]) < len(self.server.viewer.examples):
                self._reject_foreign()
                with self.server.predicting:
                    return example_page(self.server.viewer, int(example[1])), "text/html"
            if path != "/":
                raise RejectedRequest(404, "there is no such page; the form is at /")
            return form_page(self.server.viewer), "text/html"

        self._answer(page)

    def do_POST(self) -> None:
        self._answer(self._predict)

    def _predict(self) -> tuple[str, str]:
        if self.path != "/predict":
            raise RejectedRequest(404, "there is no such page; the form is at /")
        self._reject_foreign()
        fields = form_fields(self._body(), self.headers.get("Content-Type", ""))
        if "picture" not in fields or "map" not in fields:
            raise RejectedRequest(400, "the form lacks its picture or its map; send both")
        name, content = fields["picture"]
        with self.server.predicting:  # one picture in memory at a time
            kind = fields["map"][1].decode(errors="replace")
            return answer_page(self.server.viewer, content, name, kind), "text/html"

    def _reject_foreign(self) -> None:
        origin, site = self.headers.get("Origin"), self.headers.get("Sec-Fetch-Site", "same-origin")
        if origin not in (None, f"http://{self.headers['Host']}") or site not in ("same-origin", "none"):
            raise RejectedRequest(403, "this request comes from another page; open the form itself")

    def _body(self) -> bytes:
        lengths = self.headers.get_all("Content-Length", [])
        if "Transfer-Encoding" in self.headers or len(lengths) != 1 or not re.fullmatch(r"[0-9]{1,18}", lengths[0]):
            raise RejectedRequest(411, "the length of the upload must be given, once, in Content-Length")
        length, most = int(lengths[0]), self.server.viewer.limit
        if length > most * 2**20 + FORM:
            raise RejectedRequest(413, f"the upload has {length / 2**20:.1f} MiB; this page takes at most {most}")
        body = self.rfile.read(length)
        if len(body) < length:
            self._reject_late()
            raise RejectedRequest(400, "the upload ended before its length; send it again")
        return body

    def _reject_late(self) -> None:
        if self.late:
            raise RejectedRequest(408, f"the request took more than {self.server.seconds:g} s; send it again")

    def _answer(self, page: Callable[[], tuple[str, str]]) -> None:
        try:
            self._reject_late()
            if not own_name(self.headers.get_all("Host", []), self.server.host):
                raise RejectedRequest(403, "this name is not that of the page; use the address that vitrail printed")
            self._send(200, *page())
        except RejectedRequest as problem:
            self.send_error(problem.status, str(problem))
        except ValueError as error:  # of the picture
            self.send_error(422, str(error))

    def _send(self, status: int, text: str, kind: str) -> None:
        content = text.encode(errors="readable")
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        if code == 501:
            code, message = 405, "this page takes GET and POST only"
        self._send(code, f"{message or explain or code}\n", "text/plain")

    def end_headers(self) -> None:
        for name, value in HEADERS.items():
            self.send_header(name, value)
        super().end_headers()

    def log_message(self, *_: Any) -> None:
        """Nothing: what strangers send is not for the terminal."""


def own_name(hosts: list[str], bound: str) -> bool:
    """Whether the Host of a request is an address, localhost or the name that the page was started with.

    A stranger's page can make its own name lead to this machine (DNS rebinding); the browser then sends that name.
    """
    try:
        name = urlsplit(f"//{hosts[0]}").hostname or ""
    except (IndexError, ValueError):
        return False
    with suppress(ValueError):
        return len(hosts) == 1 and bool(ipaddress.ip_address(name))
    return len(hosts) == 1 and name in ("localhost", bound.lower())


def form_fields(body: bytes, content_type: str) -> dict[str, tuple[str, bytes]]:
    """Fields of a form by name: name of the file, content. Raises `RejectedRequest` for anything else."""
    boundary = MULTIPART.fullmatch(content_type.strip())
    if boundary is None:
        raise RejectedRequest(415, "a picture is sent as multipart/form-data, as the form does")
    fields = {}
    for part in (b"\r\n" + body).split(f"\r\n--{boundary[1]}".encode(), MOST_PARTS)[1:]:
        head, _, content = part.partition(b"\r\n\r\n")
        names = dict(re.findall(rb'\b(name|filename)="([^"\r\n]*)"', head[:FORM]))
        if b"name" in names:
            file = names.get(b"filename", b"").decode(errors="surrogateescape")
            fields[names[b"name"].decode(errors="replace")] = file, content
    return fields
