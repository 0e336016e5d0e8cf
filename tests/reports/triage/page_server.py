"""A small server of the triage page, whose answer a test can change."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from kneewatch.reports.triage.page import ASSETS, CSP, asset, render
from kneewatch.reports.triage.view_model import TriageView

Answer = Callable[[str], TriageView]


class PageServer:
    """Serves `answer(path)` as the endpoint would, or `status` where it is not 200."""

    def __init__(self, answer: Answer) -> None:
        self.answer: Answer = answer
        self.status = 200
        self.asked: list[str] = []
        served = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                served.asked.append(self.path)
                name = self.path.partition("?")[0].removeprefix("/triage/")
                if name in ASSETS:
                    self._send(200, ASSETS[name], asset(name))
                else:
                    body = render(served.answer(self.path)).encode()
                    self._send(served.status, "text/html; charset=utf-8", body)

            def _send(self, status: int, kind: str, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.send_header("Content-Security-Policy", CSP)
                self.send_header("X-Content-Type-Options", "nosniff")
                self.end_headers()
                # A page that is closed does not wait for its answer.
                with suppress(ConnectionError):
                    self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Tests are quiet."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.origin = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.url = f"{self.origin}/triage"

    def show(self, view: TriageView) -> None:
        """From now on this is the answer."""
        self.answer = lambda _path: view


@contextmanager
def serving(answer: TriageView | Answer) -> Generator[PageServer]:
    """A server of one view, or of what a function makes of the path."""
    server = PageServer(answer if callable(answer) else lambda _: answer)
    thread = threading.Thread(target=server.server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.server.shutdown()
        server.server.server_close()
        thread.join()
