"""People who ask, in a process of their own: so many requests a second, over kept connections.

    python -m tests.soak.asking HOST:PORT PER_S FOR_S PATH...

Each request below /probe has a connection of its own, as the kubelet's have. Requests are made at
their times whether or not those before them are answered, and times count from when a request was
due: a server that stalls is not asked less. Prints as JSON the seconds that each took, and those by
which this process was late itself, which are part of them: on a busy machine the latter are no
fault of who is asked.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager

CONNECTIONS = 16
PROBE = "/probe"


async def one(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str, path: str
) -> None:
    """Ask and read the whole answer.

    Raises:
        AssertionError: it is not a 200, or of a probe a 503.
    """
    writer.write(f"GET {path} HTTP/1.1\r\nHost: {host}\r\nAccept: */*\r\n\r\n".encode())
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
    right = ("http/1.1 200 ", "http/1.1 503 ")[: 2 if path.startswith(PROBE) else 1]
    assert head.startswith(right), head
    length = next(line for line in head.split("\r\n") if line.startswith("content-length:"))
    assert await reader.readexactly(int(length.partition(":")[2]))


async def ask(
    host: str, paths: Sequence[str], *, per_s: float, for_s: float
) -> tuple[list[float], list[float]]:
    """Seconds that each request took, and seconds by which each was made late."""
    took_s: list[float] = []
    late_s: list[float] = []
    address, _, port = host.rpartition(":")
    waiting: asyncio.Queue[tuple[float, str] | None] = asyncio.Queue()

    async def connection() -> None:
        reader, writer = await asyncio.open_connection(address, int(port))
        while (due := await waiting.get()) is not None:
            if due[1].startswith(PROBE):
                writer.close()
                reader, writer = await asyncio.open_connection(address, int(port))
            await one(reader, writer, host, due[1])
            took_s.append(time.monotonic() - due[0])
        writer.close()

    async with asyncio.TaskGroup() as group:
        for _ in range(CONNECTIONS):
            group.create_task(connection())
        began_s = time.monotonic()
        for at in range(round(per_s * for_s)):
            due_s = began_s + at / per_s
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            late_s.append(time.monotonic() - due_s)
            waiting.put_nowait((due_s, paths[at % len(paths)]))
        for _ in range(CONNECTIONS):
            waiting.put_nowait(None)
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
    print(json.dumps(asyncio.run(ask(host, paths, per_s=float(per_s), for_s=float(for_s)))))


if __name__ == "__main__":
    main()
