"""A recording continued at constant rates, with any queue: an overload that lasts.

    python -m tests.continued [SEEDS [FIRST]]

prints which replicas and blocks are recommended under random queues, open and closed loops.
"""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from kneewatch.agent.captures import PageReader
from kneewatch.agent.stream import TargetStream
from kneewatch.collector.captures.capture import CaptureReader
from kneewatch.collector.captures.format import Entry
from kneewatch.collector.exposition import Limits
from kneewatch.diagnose.diagnosis_config import Profile
from kneewatch.diagnose.recommend.advice import Value
from kneewatch.diagnose.verdict import Verdict

SAMPLE = re.compile(r"^([a-z_:]+?)(\{[^}]*\})? (\S+)$", re.MULTILINE)
COUNTED = ("_total", "_count", "_sum", "_bucket")
FROM_S, AT_S = 92.0, 110.0
"""The seconds of the shipped recording whose rates go on; the queue has jumped before them."""

KV_USAGE = 0.96
WINDOW_S, EVERY_S = 15.0, 2.0


class Load(Struct, frozen=True):
    """How the load goes on: a queue that starts with `waiting` and grows.

    A closed loop's callers are constant: its queue only trades places with the batch.
    """

    waiting: float = 76.0
    growth_per_s: float = 1.5
    seed: int | None = None
    is_closed: bool = False


def judged(capture: Path, load: Load, *, until_s: float) -> list[tuple[float, Verdict]]:
    """The verdicts over the recording and its continuation, each with its second."""
    stream = TargetStream("r1", Profile(window_s=WINDOW_S), Limits())
    reader = PageReader(Limits())
    entries = list(CaptureReader(capture))
    first_s = entries[0].t_s
    before = [entry for entry in entries if entry.t_s <= first_s + AT_S]
    more = _continued(before, load, until_s=first_s + until_s)
    return [
        (entry.t_s - first_s, verdict)
        for entry in (*before, *more)
        for verdict in stream.judge(entry.t_s, reader.read(entry))
    ]


def _continued(before: list[Entry], load: Load, *, until_s: float) -> Iterator[Entry]:
    last = before[-1]
    start = min(before, key=lambda entry: abs(entry.t_s - (last.t_s - AT_S + FROM_S)))
    old, values = _values(start.body or ""), _values(last.body or "")
    rates = {
        key: max(0.0, (value - old.get(key, value)) / (last.t_s - start.t_s))
        for key, value in values.items()
        if key.split("{")[0].endswith(COUNTED)
    }
    chance = random.Random(load.seed)
    queue, batch = load.waiting, 19.0
    t_s = last.t_s
    while (t_s := t_s + EVERY_S) <= until_s:
        pace, swing = 1.0, 0.0
        if load.seed is not None:
            # About 6 requests end and up to 9 arrive between two scrapes.
            pace, swing = max(0.3, chance.gauss(1.0, 0.25)), chance.gauss(0.0, 3.5)
        for key, rate in rates.items():
            values[key] += rate * pace * EVERY_S
        if load.is_closed:
            running = batch + (swing if load.seed is not None else 0.0)
            waiting = load.waiting + batch - running
        else:
            queue = max(1.0, queue + load.growth_per_s * EVERY_S + swing)
            running, waiting = batch, queue
        yield replace(
            last, t_s=t_s, body=_page(last.body or "", values, round(running), round(waiting))
        )


def _values(body: str) -> dict[str, float]:
    return {f"{name}{labels or ''}": float(value) for name, labels, value in SAMPLE.findall(body)}


def _page(body: str, values: dict[str, float], running: int, waiting: int) -> str:
    def now(match: re.Match[str]) -> str:
        name, labels = match[1], match[2] or ""
        value = values[f"{name}{labels}"]
        if name == "vllm:num_requests_running":
            value = running
        elif name == "vllm:num_requests_waiting" or 'reason="capacity"' in labels:
            value = waiting
        elif name == "vllm:kv_cache_usage_perc":
            value = KV_USAGE
        return f"{name}{labels} {value!r}"

    return SAMPLE.sub(now, body)


def _words(sizes: set[tuple[str, Value]]) -> str:
    return ", ".join(sorted(f"{name} {after}" for name, after in sizes)) or "nothing"


def main(seeds: str = "20", first: str = "0") -> int:
    """Print what is recommended up to two minutes after the recording, and from then on."""
    capture, failed = Path(__file__).parent / "fixtures/captures/kv_pressure_cascade.jsonl.gz", 0
    for seed in range(int(first), int(first) + int(seeds)):
        chance = random.Random(seed)
        waiting, closed = 20.0 * 100 ** chance.random(), chance.random() < 0.5
        growth_per_s = 0.0 if closed else chance.uniform(0.5, 1.5)
        load = Load(round(waiting), growth_per_s, seed, is_closed=closed)
        early, late = set[tuple[str, Value]](), set[tuple[str, Value]]()
        for t_s, verdict in judged(capture, load, until_s=500.0):
            for each in verdict.recommendations:
                if each.id in ("replicas", "kv-blocks"):
                    (late if t_s >= AT_S + 120 else early).add((each.id, each.changes[0].after))
        wrong = len(late) > len({name for name, _ in late}) or any(
            name == "replicas" and after not in (2, 3) for name, after in early | late
        )
        failed += wrong
        print(f"{'WRONG' if wrong else 'right'} {load}: {_words(early)}, then {_words(late)}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
