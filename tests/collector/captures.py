"""Captures to write and read."""

from __future__ import annotations

import json
from pathlib import Path

from kneewatch.collector.captures.capture import CaptureReader, CaptureWriter
from kneewatch.collector.captures.format import Entry

PAGE = "# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running 3.0\n" * 20
NAMES = ["a.jsonl.gz", "a.jsonl"]


def line(t_s: float, body: str = PAGE) -> bytes:
    return json.dumps({"t": t_s, "status": 200, "body": body, "took_s": 0.1}).encode() + b"\n"


def write(path: Path, *entries: Entry) -> Path:
    with CaptureWriter(path) as writer:
        for entry in entries:
            writer.write(entry)
    return path


def entry(number: int) -> Entry:
    return Entry(float(number), f"{PAGE}number {number}\n", status=200)


def times(path: Path) -> list[float]:
    return [page.t_s for page in CaptureReader(path)]
