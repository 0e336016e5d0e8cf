"""What a recording's pages say of a stretch of time: the figures the simulator is held against."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct

from kneewatch.collector.captures.capture import CaptureReader

SERIES = re.compile(r"(?m)^vllm:(\w+)\{([^}]*)\} (\S+)$")
OWN_LABELS = frozenset({"engine", "model_name"})
Values = dict[str, float]


class Scrape(Struct, frozen=True):
    """A page's values by name, and by name and further labels (`name|label=value`)."""

    t_s: float
    values: Values


class Figures(Struct, frozen=True):
    """A stretch's figures. `None`: nothing to measure it by."""

    kv_usage_ratio: float
    running: float
    waiting: float
    deferred: float
    preemption_per_s: float
    hit_ratio: float | None
    acceptance_ratio: float | None
    ttft_s: float | None
    itl_s: float | None
    completed_per_s: float


def values_of(body: str) -> Values:
    """The values on a page; buckets and times of creation are left out."""
    values: Values = {}
    for name, labels, value in SERIES.findall(body):
        if name.endswith(("_bucket", "_created", "_info")):
            continue
        pairs = [part.split("=", 1) for part in labels.split(",")]
        rest = "".join(f"|{k}={v[1:-1]}" for k, v in pairs if k not in OWN_LABELS)
        values[name + rest] = float(value)
    return values


def scrapes(capture: Path) -> list[Scrape]:
    """All pages of a capture that could be had."""
    entries = CaptureReader(capture)
    return [Scrape(entry.t_s, values_of(entry.body)) for entry in entries if entry.body is not None]


def finished(values: Values) -> float:
    """Requests that were answered."""
    return sum(v for name, v in values.items() if name.startswith("request_success_total"))


def figures(stretch: Sequence[Scrape]) -> Figures:
    """The figures of at least two scrapes: means of gauges, rates and ratios of counters."""
    first, last = stretch[0], stretch[-1]
    over_s = last.t_s - first.t_s

    def mean(name: str) -> float:
        return sum(scrape.values.get(name, 0.0) for scrape in stretch) / len(stretch)

    def gained(name: str) -> float:
        return last.values.get(name, 0.0) - first.values.get(name, 0.0)

    def ratio(part: str, whole: str) -> float | None:
        return gained(part) / gained(whole) if gained(whole) > 0 else None

    ttft, itl = "time_to_first_token_seconds", "inter_token_latency_seconds"
    return Figures(
        mean("kv_cache_usage_perc"),
        mean("num_requests_running"),
        mean("num_requests_waiting"),
        mean("num_requests_waiting_by_reason|reason=deferred"),
        gained("num_preemptions_total") / over_s,
        ratio("prefix_cache_hits_total", "prefix_cache_queries_total"),
        ratio("spec_decode_num_accepted_tokens_total", "spec_decode_num_draft_tokens_total"),
        ratio(f"{ttft}_sum", f"{ttft}_count"),
        ratio(f"{itl}_sum", f"{itl}_count"),
        (finished(last.values) - finished(first.values)) / over_s,
    )
