"""A real Prometheus that tests ask for its opinion.

Samples go in by remote write rather than as blocks, because it alone carries the staleness markers
that a scraping Prometheus writes where a series is gone or a scrape has failed.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import secrets
import socket
import struct
import subprocess
import tempfile
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from msgspec import Struct

from kneewatch.collector.page import Page, Series
from tests.waiting import PATIENCE_S

LOOPBACK = "127.0.0.1"
STALE = struct.pack("<Q", 0x7FF0000000000002)
"""The NaN that marks the end of a series (Prometheus, model/value/value.go)."""

SAMPLE = b"\x12\x10\x09"
"""Begins a sample, 16 bytes with a time of this century: the value (double), b"\\x10", then the
milliseconds (varint)."""

BLOCKS = "30d"
"""Longer than everything loaded: the head takes any order of targets and writes no block."""


class Target(Struct, frozen=True):
    """What one instance showed, oldest first: (milliseconds, page), None where a scrape failed."""

    instance: str
    scrapes: Sequence[tuple[int, Page | None]]


class Answer(Struct, frozen=True):
    """One sample of an answer."""

    labels: Mapping[str, str]
    value: float


class Prometheus:
    """A running Prometheus without scrape targets of its own."""

    def __init__(self, port: int) -> None:
        self.port = port
        self._http = http.client.HTTPConnection(LOOPBACK, port, timeout=60)

    def close(self) -> None:
        """Close the connection; the process is its starter's."""
        self._http.close()

    def load(self, targets: Iterable[Target]) -> int:
        """Write targets into it. Returns how many samples that were, markers included."""
        loaded = 0
        for target in targets:
            rows = _rows(target)
            loaded += sum(len(samples) for samples in rows.values())
            self.write(
                (
                    {**dict(series.labels), "__name__": series.name, "instance": target.instance},
                    b"".join(samples),
                )
                for series, samples in rows.items()
            )
        return loaded

    def write(self, series: Iterable[tuple[Mapping[str, str], bytes]]) -> None:
        """Write series: labels, and samples as remote write has them (`SAMPLE`)."""
        body = b"".join(_field(1, _labels(labels) + samples) for labels, samples in series)
        self._send("/api/v1/write", _snappy(body), "application/x-protobuf")

    def ask(self, query: str, t_ms: int) -> list[Answer]:
        """The samples that an instant query returns."""
        form = urlencode({"query": query, "time": f"{t_ms / 1000:.3f}"}).encode()
        text = self._send("/api/v1/query", form, "application/x-www-form-urlencoded")
        data: dict[str, Any] = json.loads(text)["data"]
        assert data["resultType"] == "vector", query
        return [Answer(row["metric"], float(row["value"][1])) for row in data["result"]]

    def is_ready(self) -> bool:
        """Whether it takes samples and queries."""
        try:
            self._http.request("GET", "/-/ready")
            response = self._http.getresponse()
            response.read()
        except OSError:
            self._http.close()
            return False
        return response.status == http.HTTPStatus.OK

    def _send(self, path: str, body: bytes, content_type: str) -> bytes:
        headers = {"Content-Type": content_type}
        if path.endswith("write"):
            headers |= {"Content-Encoding": "snappy", "X-Prometheus-Remote-Write-Version": "0.1.0"}
        self._http.request("POST", path, body, headers)
        response = self._http.getresponse()
        text = response.read()
        assert response.status < http.HTTPStatus.BAD_REQUEST, f"{path}: {text.decode()}"
        return text


@contextmanager
def running(
    program: str, *, rules: str = "", blocks: Path | None = None, port: int | None = None
) -> Generator[Prometheus]:
    """A Prometheus on a free port of the loopback, gone afterwards: empty, or with `blocks`.

    `rules` are evaluated every second; `port` is for one that comes back where it was.
    """
    with tempfile.TemporaryDirectory(prefix="kneewatch-oracle-") as folder:
        port = port or free_port()
        log = Path(folder, "log")
        with log.open("wb") as output:
            process = subprocess.Popen(
                _command(program, folder, port, rules, blocks), stdout=output, stderr=output
            )
        prometheus = Prometheus(port)
        try:
            give_up_s = time.monotonic() + PATIENCE_S
            while not prometheus.is_ready():
                if process.poll() is not None or time.monotonic() > give_up_s:
                    raise RuntimeError(f"{program} did not start: {log.read_text()[-2000:]}")
                time.sleep(0.05)
            yield prometheus
        finally:
            prometheus.close()
            process.kill()
            process.wait()


def _command(program: str, folder: str, port: int, rules: str, blocks: Path | None) -> list[str]:
    config = Path(folder, "prometheus.yml")
    Path(folder, "rules.yml").write_text(rules)
    config.write_text("rule_files: [rules.yml]\nscrape_configs: []\n" if rules else "")
    return [
        program,
        f"--config.file={config}",
        f"--storage.tsdb.path={blocks or f'{folder}/data'}",
        f"--storage.tsdb.min-block-duration={BLOCKS}",
        f"--storage.tsdb.max-block-duration={BLOCKS}",
        "--storage.tsdb.retention.time=100y",
        f"--web.listen-address={LOOPBACK}:{port}",
        "--web.enable-remote-write-receiver",
        "--log.level=warn",
    ]


def free_port() -> int:
    """A port of the loopback that nobody listens on, for a program that binds it later.

    It is below those that the kernel hands out (from 32768): no other test's socket takes it.
    """
    while True:
        port = 12_000 + secrets.randbelow(20_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((LOOPBACK, port))
            return port


def _rows(target: Target) -> dict[Series, list[bytes]]:
    """Each series' encoded samples: its values, and a marker where it vanishes."""
    rows: dict[Series, list[bytes]] = {}
    before: set[Series] = set()
    for t_ms, page in target.scrapes:
        shown = dict(page.samples()) if page is not None else {}
        for series, value in shown.items():
            rows.setdefault(series, []).append(sample(t_ms, value))
        for series in before.difference(shown):
            rows[series].append(sample(t_ms, None))
        before = set(shown)
    return rows


def sample(t_ms: int, value: float | None) -> bytes:
    """A sample as remote write has it; None marks the end of a series."""
    number = STALE if value is None else struct.pack("<d", value)
    return SAMPLE + number + b"\x10" + _varint(t_ms)


def _labels(labels: Mapping[str, str]) -> bytes:
    return b"".join(
        _field(1, _field(1, name.encode()) + _field(2, value.encode()))
        for name, value in sorted(labels.items())
    )


def _field(number: int, data: bytes) -> bytes:
    """A protobuf field of bytes or of a message."""
    return bytes((number << 3 | 2,)) + _varint(len(data)) + data


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _snappy(data: bytes) -> bytes:
    """Snappy's block format without compression: the length, then one literal."""
    return _varint(len(data)) + bytes((63 << 2,)) + (len(data) - 1).to_bytes(4, "little") + data
