"""People who ask, in a process of their own: so many requests a second, over kept connections.

    python -m tests.soak.asking HOST:PORT PER_S FOR_S PATH...

Each request below /probe has a connection of its own, as the kubelet's have. Requests are made at
their times, in turn by threads that wait for their answers, and times count from when a request was
due: a server that stalls is not asked less. Prints as JSON the seconds that each took, and those by
which this process was late itself, which are part of them: on a busy machine the latter are no
fault of who is asked.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

CONNECTIONS = 16
PROBE = "/probe"
ANSWER_S = 60.0
HEAD_END = b"\r\n\r\n"


def ask_once(connection: socket.socket, host: str, path: str) -> None:
    """Ask and read the whole answer.

    Raises:
        AssertionError: it is not a 200, or of a probe a 503.
    """
    connection.sendall(f"GET {path} HTTP/1.1\r\nHost: {host}\r\nAccept: */*\r\n\r\n".encode())
    answer = b""
    while HEAD_END not in answer:
        answer += _received(connection)
    head, _, body = answer.partition(HEAD_END)
    right = (b"HTTP/1.1 200 ", b"HTTP/1.1 503 ")[: 2 if path.startswith(PROBE) else 1]
    assert head.startswith(right), head
    lines = head.lower().split(b"\r\n")
    length = next(line for line in lines if line.startswith(b"content-length:"))
    missing_bytes = int(length.partition(b":")[2]) - len(body)
    while missing_bytes > 0:
        missing_bytes -= len(_received(connection))


def _received(connection: socket.socket) -> bytes:
    data = connection.recv(1 << 18)
    assert data, "the connection was closed before its answer was complete"
    return data


def ask(
    host: str, paths: Sequence[str], *, per_s: float, for_s: float
) -> tuple[list[float], list[float]]:
    """Seconds that each request took, and seconds by which each was made late."""
    took_s: list[float] = []
    late_s: list[float] = []
    address, _, port = host.rpartition(":")
    began_s = time.monotonic()

    def opened() -> socket.socket:
        return socket.create_connection((address, int(port)), ANSWER_S)

    def asked_in_turn(first: int) -> None:
        connection = opened()
        for at in range(first, round(per_s * for_s), CONNECTIONS):
            due_s, path = began_s + at / per_s, paths[at % len(paths)]
            wait_s = due_s - time.monotonic()
            if wait_s > 0:
                time.sleep(wait_s)
                late_s.append(time.monotonic() - due_s)
            if path.startswith(PROBE):
                connection.close()
                connection = opened()
            ask_once(connection, host, path)
            took_s.append(time.monotonic() - due_s)
        connection.close()

    with ThreadPoolExecutor(CONNECTIONS) as pool:
        list(pool.map(asked_in_turn, range(CONNECTIONS)))
    return took_s, late_s


@contextmanager
def asking(
    host: str, paths: Sequence[str], *, per_s: float, for_s: float
) -> Generator[subprocess.Popen[str]]:
    """The process that asks; what it prints is its figures."""
    argv = [sys.executable, "-m", "tests.soak.asking", host, str(per_s), str(for_s), *paths]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def main() -> None:
    """Ask, print the figures."""
    host, per_s, for_s, *paths = sys.argv[1:]
    print(json.dumps(ask(host, paths, per_s=float(per_s), for_s=float(for_s))))


if __name__ == "__main__":
    main()
