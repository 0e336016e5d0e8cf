"""What a Prometheus, or what stands in its place, sends to a query."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping, Sequence
from urllib.parse import parse_qs

from tests.collector.servers import Serve

Vector = Sequence[tuple[Mapping[str, str], float]]


def json_answer(document: object, *headers: str, status: str = "200 OK") -> bytes:
    body = json.dumps(document).encode()
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join([*lines, "Content-Type: application/json", "", ""]).encode() + body


def vector(rows: Vector, *, warnings: Sequence[str] = ()) -> bytes:
    result = [{"metric": dict(labels), "value": [1.0, str(value)]} for labels, value in rows]
    document = {"status": "success", "data": {"resultType": "vector", "result": result}}
    return json_answer(document | ({"warnings": list(warnings)} if warnings else {}))


def failed(status: str, error: str, kind: str = "execution") -> bytes:
    return json_answer({"status": "error", "errorType": kind, "error": error}, status=status)


def in_turn(*answers: bytes) -> Serve:
    """The nth request gets the nth answer, later ones the last."""

    def serve(sock: socket.socket, request: bytes, number: int) -> bool:
        read_form(sock, request)
        sock.sendall(answers[min(number, len(answers) - 1)])
        return True

    return serve


def dripping(data: bytes, every_s: float) -> Serve:
    """A byte now and then."""

    def serve(sock: socket.socket, request: bytes, _number: int) -> bool:
        read_form(sock, request)
        for byte in data:
            sock.sendall(bytes((byte,)))
            time.sleep(every_s)
        return True

    return serve


def read_form(sock: socket.socket, request: bytes) -> dict[str, str]:
    """The form that a request posts; its rest is read from the socket."""
    head, _, body = request.partition(b"\r\n\r\n")
    length = next(
        int(line.split(b":")[1])
        for line in head.lower().split(b"\r\n")
        if line.startswith(b"content-length:")
    )
    while len(body) < length:
        part = sock.recv(65_536)
        assert part, "the request was cut short"
        body += part
    return {name: values[0] for name, values in parse_qs(body.decode()).items()}
