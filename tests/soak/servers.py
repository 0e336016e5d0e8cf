"""Many metrics endpoints in one process: real sockets, pages that grow, and every way to be ill.

    python -m tests.soak.servers KIND:COUNT...

Prints the ports of each kind as JSON, serves until killed. Any of them tells at /served how many
pages of each port have gone out whole. Its CPU is not the scraper's.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import resource
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import cycle
from typing import cast

from tests.collector.dcgm_pages import node
from tests.soak.growing import STEP_S, Growing

RECORDINGS = (
    "healthy_light",
    "prefix_good",
    "long_output_decode_heavy",
    "burst",
    "healthy_light",
    "knee_sweep",
    "queue_overload",
    "kv_pressure_cascade",
)
"""A node of eight: most are well most of the time, one is always in trouble."""

APART = 11
"""Steps between two servers with the same recording."""

GPUS = {"gpu": 8, "gpus": 5_000}
"""GPUs on the page of each kind of exporter."""

HUGE_SERIES = 150_000
HUGE_LABEL = "x" * 165
HEAD = (
    "HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n"
    "Content-Length: {}\r\n{}\r\n"
)
GZIP_MAGIC = b"\x1f\x8b"

Pages = Callable[[], bytes]
Ports = Mapping[str, Sequence[int]]

served: Counter[int] = Counter()


def answer(body: bytes) -> bytes:
    """A whole answer. A body that is packed is said to be."""
    packed = "Content-Encoding: gzip\r\n" if body.startswith(GZIP_MAGIC) else ""
    return HEAD.format(len(body), packed).encode() + body


class Well(asyncio.Protocol):
    """A connection to a server that is well."""

    def __init__(self, port: Callable[[], int], pages: Pages) -> None:
        self.port, self.pages = port, pages
        self.answered = 0
        self._asked = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Somebody is there."""
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Answer every request that is complete."""
        self._asked += data
        while b"\r\n\r\n" in self._asked:
            request, _, self._asked = self._asked.partition(b"\r\n\r\n")
            if request.startswith(b"GET /served "):
                self.transport.write(answer(json.dumps(served).encode()))
            else:
                self.give()
                self.answered += 1

    def give(self) -> None:
        """Give the page."""
        self.transport.write(answer(self.pages()))
        served[self.port()] += 1


class Hanging(Well):
    """It takes requests and says nothing."""

    def give(self) -> None:
        """Nothing."""


class Vanishing(Well):
    """It answers once on each connection, then it is gone without a word: a half-open socket."""

    def give(self) -> None:
        """The page, once."""
        if not self.answered:
            super().give()


class Stopping(Well):
    """It stops in the middle of the page."""

    def give(self) -> None:
        """Half of it."""
        whole = answer(self.pages())
        self.transport.write(whole[: len(whole) // 2])


class Dripping(Well):
    """It says one byte a second."""

    def give(self) -> None:
        """The page, for half a day."""
        self._task = asyncio.ensure_future(self._drip(answer(self.pages())))

    async def _drip(self, whole: bytes) -> None:
        for at in range(len(whole)):
            if self.transport.is_closing():
                return
            self.transport.write(whole[at : at + 1])
            await asyncio.sleep(1.0)


ILL: Mapping[str, type[Well]] = {
    "hang": Hanging,
    "vanish": Vanishing,
    "stop": Stopping,
    "drip": Dripping,
}


def by_time(growing: Growing, offset: int) -> Pages:
    """The page of the moment: who asks twice at once gets the same."""
    start_s = time.monotonic()
    return lambda: growing.page(offset + int((time.monotonic() - start_s) / STEP_S))


FREEZES_S = 10.0


def frozen(growing: Growing, offset: int) -> Pages:
    """The page of the moment, for 10 seconds: then the engine hangs with its requests."""
    start_s = time.monotonic()

    def page() -> bytes:
        return growing.page(offset + int(min(FREEZES_S, time.monotonic() - start_s) / STEP_S))

    return page


def by_turn(growing: Growing, offset: int) -> Pages:
    """The next page with every request."""
    turn = iter(range(offset, sys.maxsize))
    return lambda: growing.page(next(turn))


def huge(growing: Growing) -> Pages:
    """A page of 30 MB, within the limits on series."""
    more = "".join(
        f'vllm_soak_total{{at="{at}",more="{HUGE_LABEL}"}} {at}\n' for at in range(HUGE_SERIES)
    )
    whole = growing.page(0) + more.encode()
    return lambda: whole


def engines(growing: Growing) -> Pages:
    """A page that claims 10,000 engines."""
    more = "".join(
        f'vllm:num_requests_running{{model_name="m",engine="{at}"}} 1\n' for at in range(10_000)
    )
    return lambda: growing.page(0) + more.encode()


def labels(growing: Growing) -> Pages:
    """A page whose configuration has 60 labels of 15 kB, all others with every request."""
    turn = iter(range(sys.maxsize))

    def page() -> bytes:
        at = next(turn)
        named = ",".join(f'l{label}="{at:05}{"x" * 15_000}"' for label in range(60))
        own = f'vllm:cache_config_info{{engine="0",model_name="m",{named}}} 1\n'
        return growing.page(at) + own.encode()

    return page


def blank(_growing: Growing) -> Pages:
    """A page of 15 MB of line ends."""
    return lambda: b"\n" * 15_000_000


def wide(growing: Growing) -> Pages:
    """A page of 49 MB and 199,000 series, beyond both limits."""
    more = "".join(f'vllm_soak_total{{at="{at}",more="{"x" * 210}"}} 1\n' for at in range(199_000))
    whole = growing.page(0) + more.encode()
    return lambda: whole


def packed(growing: Growing) -> Pages:
    """64 kB that unpack to a page and 63 MB of line ends."""
    whole = gzip.compress(growing.page(0) + b"\n" * 63_000_000)
    return lambda: whole


HOSTILE = {
    "huge": huge,
    "engines": engines,
    "labels": labels,
    "blank": blank,
    "wide": wide,
    "packed": packed,
}


def pages_of(kind: str, count: int) -> list[Pages]:
    """The pages of so many servers of a kind."""
    recordings = {name: Growing(name) for name in RECORDINGS[: max(count, 1)]}
    turns = zip(range(count), cycle(RECORDINGS), strict=False)
    if kind in GPUS:
        page = node(GPUS[kind]).encode()
        return [lambda: page] * count
    if kind in HOSTILE:
        return [HOSTILE[kind](recordings[name]) for _, name in turns]
    if kind == "frozen":
        return [frozen(Growing("queue_overload"), APART * at) for at in range(count)]
    steps = by_turn if kind == "turn" else by_time
    return [steps(recordings[name], APART * at) for at, name in turns]


async def serve(kinds: Mapping[str, int]) -> None:
    """Serve for ever."""
    loop = asyncio.get_running_loop()
    ports: dict[str, list[int]] = {}
    for kind, count in kinds.items():
        for pages in pages_of(kind, count):
            own = [0]
            new_protocol = partial(ILL.get(kind, Well), partial(own.__getitem__, 0), pages)
            server = await loop.create_server(new_protocol, "127.0.0.1", 0, backlog=64)
            own[0] = server.sockets[0].getsockname()[1]
            ports.setdefault(kind, []).append(own[0])
    print(json.dumps(ports), flush=True)
    await asyncio.Event().wait()


@contextmanager
def servers(**kinds: int) -> Generator[dict[str, list[str]]]:
    """The addresses of so many servers of each kind; they end with the context."""
    argv = [sys.executable, "-m", "tests.soak.servers", *(f"{k}:{n}" for k, n in kinds.items())]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            ports: Ports = json.loads(process.stdout.readline())
            yield {
                kind: [f"http://127.0.0.1:{port}" for port in ports.get(kind, ())] for kind in kinds
            }
        finally:
            process.kill()


def served_by(url: str) -> dict[str, int]:
    """How many pages each address has given whole."""
    with urllib.request.urlopen(f"{url}/served", timeout=30) as got:
        return {f"http://127.0.0.1:{port}": n for port, n in json.loads(got.read()).items()}


def main() -> None:
    """Serve what the command line names."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 65_536), hard))
    words = [word.partition(":") for word in sys.argv[1:]]
    asyncio.run(serve({kind: int(count) for kind, _, count in words}))


if __name__ == "__main__":
    main()
