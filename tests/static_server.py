"""A server of plain files on the loopback address that knows ranges, and faults that are injected on request."""

from __future__ import annotations

import hashlib
import re
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class StaticServer(ThreadingHTTPServer):
    """Serves `files` by path; each request for a path takes the next of its `faults`, as long as there are any.

    A fault is a status, `truncated` (half of the body, then the end), `silent` (nothing for a second) or `slow`.
    """

    daemon_threads = True

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files = files
        self.faults: dict[str, deque[int | str]] = {}
        self.requests: Counter[str] = Counter()
        self.bytes_sent: Counter[str] = Counter()
        self.queries: set[str] = set()
        self.ranges = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that hang up are part of the tests."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # headers and a short body are two writes
    server: StaticServer

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        self.server.requests[path] += 1
        self.server.queries.add(query)
        faults = self.server.faults.get(path)
        fault = faults.popleft() if faults else None
        content = self.server.files.get(path)
        if isinstance(fault, int) or content is None:
            self.send_response(fault if isinstance(fault, int) else 404)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        if fault == "silent":
            time.sleep(1)
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")) if self.server.ranges else None
        start, end = (int(asked[1]), min(int(asked[2]) + 1, len(content))) if asked else (0, len(content))
        self.send_response(206 if asked else 200)
        if asked:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(content)}")
        self.send_header("ETag", f'"{hashlib.md5(content).hexdigest()}"')
        self.send_header("Content-Length", str(end - start))
        self.end_headers()
        body = content[start:end]
        if fault == "truncated":
            self.wfile.write(body[: len(body) // 2])
            self.close_connection = True
            return
        for first in range(0, len(body), 4096 if fault == "slow" else len(body) or 1):
            self.wfile.write(body[first : first + (4096 if fault == "slow" else len(body))])
            time.sleep(0.05 if fault == "slow" else 0)
        self.server.bytes_sent[path] += len(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Nothing is printed."""


@contextmanager
def serving(files: dict[str, bytes]) -> Iterator[StaticServer]:
    server = StaticServer(files)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)
