"""Which LoRA adapters take turns in the slots, from vLLM's info metric. Pure.

Each set of running adapters is a series; its value is the time when the set last ran. So all sets
that ran between two scrapes are visible. A set that ran twice in between is visible once, so turns
are undercounted, never overcounted.

Source: vllm/v1/metrics/loggers.py (0.32), lora_requests_info.
"""

from __future__ import annotations

from collections import Counter

from msgspec import Struct

from kneewatch.collector.window import Window

LORA_INFO, RUNNING = "lora_requests_info", "running_lora_adapters"


class AdapterUse(Struct, frozen=True):
    """One adapter in the window.

    `turns`: it got a slot at least this many times. `unseen_s`: seconds since it last ran.
    """

    name: str
    turns: int
    unseen_s: float


def adapters_seen(window: Window) -> tuple[AdapterUse, ...]:
    """The adapters that ran in the window, most turns first."""
    columns = {
        at: _names(dict(column.labels).get(RUNNING, ""))
        for column, at in window.history.gauges.by_metric.get(LORA_INFO, ())
    }
    since_s = window.now_s - window.range_s
    moments = sorted(
        {
            (t_s, at)
            for frame in window.frames
            for at, names in columns.items()
            if names and since_s <= (t_s := frame.gauges[at]) <= window.now_s
        }
    )
    turns, last_s = Counter[str](), dict[str, float]()
    before: frozenset[str] = frozenset()
    for t_s, at in moments:
        turns.update(columns[at] - before)
        last_s.update(dict.fromkeys(columns[at], t_s))
        before = columns[at]
    return tuple(
        AdapterUse(name, count, window.now_s - last_s[name])
        for name, count in sorted(turns.items(), key=lambda pair: (-pair[1], pair[0]))
    )


def _names(label: str) -> frozenset[str]:
    return frozenset(name.strip() for name in label.split(",") if name.strip())
