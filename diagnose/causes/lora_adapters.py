"""Which LoRA adapters take turns in the slots, read off vLLM's info metric. Pure.

Each set of running adapters is a series of its own, whose value is the time at which it last ran:
between two scrapes several may have had their turn, and each left its time. A set that ran twice in
between leaves one, so turns are counted too low, never too high.
Source: vllm/v1/metrics/loggers.py (0.32), lora_requests_info.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from kneewatch.collector.window import Window

METRIC, RUNNING = "lora_requests_info", "running_lora_adapters"


@dataclass(frozen=True, slots=True)
class AdapterUse:
    """One adapter in the window. `turns`: how often it came into a slot, at least; `unseen_s`:
    since it last had one."""

    name: str
    turns: int
    unseen_s: float


def adapters_seen(window: Window) -> tuple[AdapterUse, ...]:
    """The adapters that ran in the window, those with the most turns first."""
    columns = {
        at: _names(dict(column.labels).get(RUNNING, ""))
        for column, at in window.history.gauges.by_metric.get(METRIC, ())
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


def _names(told: str) -> frozenset[str]:
    return frozenset(name.strip() for name in told.split(",") if name.strip())
