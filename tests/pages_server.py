"""A metrics endpoint that serves the pages of a recording in turn, in a process of its own.

Usage: python -m tests.pages_server CAPTURE [FIRST [LAST]]; prints its port, serves until killed.
Its CPU is not the scraper's: benchmarks run it apart from what they measure.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from kneewatch.collector.captures.capture import CaptureReader

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def serve(bodies: list[bytes]) -> None:
    """Serve the bodies at /metrics, one after the other and round again."""
    turn = itertools.cycle(bodies)

    class Pages(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        # One segment for headers and body: delayed acknowledgements would cost 40 ms a page.
        wbufsize = 1 << 20
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            body = next(turn) if self.path == "/metrics" else b""
            self.send_response(200 if body else 404)
            self.send_header("Content-Type", CONTENT_TYPE)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            del format, args

    server = ThreadingHTTPServer(("127.0.0.1", 0), Pages)
    print(server.server_address[1], flush=True)
    server.serve_forever()


@contextmanager
def pages_server(capture: Path, first: int = 0, last: int | None = None) -> Generator[str]:
    """The URL of a server of a recording's pages; it ends with the context."""
    argv = [sys.executable, "-m", "tests.pages_server", str(capture), str(first)]
    with subprocess.Popen(
        argv if last is None else [*argv, str(last)], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            yield f"http://127.0.0.1:{int(process.stdout.readline())}/metrics"
        finally:
            process.kill()


def main() -> None:
    """Serve what the command line names."""
    first = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    last = int(sys.argv[3]) if len(sys.argv) > 3 else None
    pages = [e.body.encode() for e in CaptureReader(sys.argv[1]) if e.body is not None]
    serve(pages[first:last])


if __name__ == "__main__":
    main()
