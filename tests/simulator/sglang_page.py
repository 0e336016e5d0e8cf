"""An engine's /metrics page as SGLang writes it.

The form is a page that SGLang's own collector classes wrote (its wheel, without a GPU). Series that
they create with the first observation are left out before it.
"""

from __future__ import annotations

import gzip
import re
from collections.abc import Mapping
from functools import cache
from itertools import accumulate

from tests.simulator.counters import Counters, Histogram
from tests.simulator.page import PAGES
from tests.simulator.shown import Shown

FORM = "sglang-0.5.23-rendered"
SAMPLE = re.compile(r"sglang:(\w+)\{(.*)\} (\S+)$")
LABEL = re.compile(r'(\w+)="([^"]*)"')
HISTOGRAMS = {
    "time_to_first_token_seconds": "time_to_first_token_seconds",
    "inter_token_latency_seconds": "inter_token_latency_seconds",
    "request_time_per_output_token_seconds": "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds": "e2e_request_latency_seconds",
    "queue_time_seconds": "request_queue_time_seconds",
    "per_stage_req_latency_seconds": "request_prefill_time_seconds",
    "prompt_tokens_histogram": "request_prompt_tokens",
    "generation_tokens_histogram": "request_generation_tokens",
    "uncached_prompt_tokens_histogram": "request_prefill_kv_computed_tokens",
}
"""The simulator's histogram for each of SGLang's."""

RANKS = {"engine_type", "model_name", "moe_ep_rank", "pp_rank", "tp_rank", "is_streaming"}


class SglangWriter:
    """Writes the pages of one engine, and gives its histograms SGLang's buckets."""

    def __init__(self, engine: Shown, *, model: str) -> None:
        self._engine, self._model = engine, model
        self._drafts = self._drafted = self._accepted = 0.0
        with_buckets(engine.counters)

    def page(self) -> str:
        """The page now."""
        values = _values(self._engine) | self._speculation()
        lines: list[str] = []
        for text in _form():
            match = SAMPLE.match(text)
            if match is None:
                lines.append(text)
                continue
            key = _key(match[1], match[2])
            labels = match[2].replace('"tiny"', f'"{self._model}"')
            if key in values:
                if values[key] is not None:
                    lines.append(f"sglang:{match[1]}{{{labels}}} {float(values[key] or 0.0)!r}")
            elif not match[1].startswith("per_stage_req_latency_seconds"):
                lines.append(f"sglang:{match[1]}{{{labels}}} {match[3]}")
        return "\n".join([*lines, ""])

    def _speculation(self) -> dict[str, float | None]:
        """The gauges of speculation, since the page before: SGLang's are those of some steps."""
        counts = self._engine.counters.counts
        now = [
            counts[f"spec_decode_num_{name}_total"]
            for name in ("drafts", "draft_tokens", "accepted_tokens")
        ]
        before = self._drafts, self._drafted, self._accepted
        self._drafts, self._drafted, self._accepted = now
        drafts, drafted, accepted = (new - old for new, old in zip(now, before, strict=True))
        if not drafts:
            return {}
        return {
            "spec_accept_length": 1 + accepted / drafts,
            "spec_accept_rate": accepted / drafted,
        }


def with_buckets(counters: Counters) -> None:
    """Replace the histograms with empty ones that have SGLang's buckets."""
    for name, edges in _edges().items():
        counters.histograms[HISTOGRAMS[name]] = Histogram(edges)


@cache
def _form() -> tuple[str, ...]:
    return tuple(gzip.decompress((PAGES / f"{FORM}.txt.gz").read_bytes()).decode().splitlines())


@cache
def _edges() -> Mapping[str, tuple[float, ...]]:
    found: dict[str, set[float]] = {}
    for text in _form():
        match = SAMPLE.match(text)
        family = "" if match is None else match[1].removesuffix("_bucket")
        if match is not None and family != match[1] and family in HISTOGRAMS:
            edge = dict(LABEL.findall(match[2]))["le"]
            found.setdefault(family, set()).update([float(edge)] if edge != "+Inf" else [])
    return {family: tuple(sorted(edges)) for family, edges in found.items()}


def _key(name: str, labels: str) -> str:
    own = {k: v for k, v in LABEL.findall(labels) if k not in RANKS}
    if "le" in own:
        own["le"] = repr(float(own["le"].replace("+Inf", "inf")))
    return name + "".join(f"|{k}={v}" for k, v in sorted(own.items()))


def _values(engine: Shown) -> dict[str, float | None]:
    """The values by name and labels; None for a series that does not exist yet."""
    scheduler, counts = engine.scheduler, engine.counters.counts
    pool = (engine.launch.num_gpu_blocks - 1) * engine.launch.block_size
    used = round(scheduler.blocks.usage_ratio * pool)
    waiting, deferred = len(scheduler.waiting), scheduler.deferred
    hits, queried = int(scheduler.hit_tokens), int(scheduler.queried_tokens)
    computed = counts["prompt_tokens_by_source_total|source=local_compute"]
    cached = counts["prompt_tokens_by_source_total|source=local_cache_hit"]
    finished = engine.counters.histograms["e2e_request_latency_seconds"]
    values: dict[str, float | None] = {
        "num_running_reqs": len(scheduler.running),
        "num_queue_reqs": max(0, waiting - deferred),
        "num_grammar_queue_reqs": deferred,
        "kv_used_tokens": used,
        "kv_available_tokens": pool - used,
        "token_usage": round(used / pool, 2),
        "full_token_usage": round(used / pool, 2),
        "max_total_num_tokens": pool,
        "page_size": engine.launch.block_size,
        "num_retracted_requests_total": counts["num_preemptions_total"] or None,
        "realtime_tokens_total|mode=prefill_compute": computed or None,
        "realtime_tokens_total|mode=prefill_cache": cached or None,
        "realtime_tokens_total|mode=decode": counts["generation_tokens_total"] or None,
        # Without a prefix cache all prompts are input.
        "prefill_effective_tokens_total|mode=input": queried - hits or int(computed),
        "prefill_effective_tokens_total|mode=device_hit": hits,
        "num_requests_total": sum(finished.own) or None,
        "num_aborted_requests_total": counts["request_success_total|finished_reason=abort"] or None,
    }
    for family, own in HISTOGRAMS.items():
        values |= _of_histogram(family, engine.counters.histograms[own])
    return values


def _of_histogram(family: str, histogram: Histogram) -> dict[str, float | None]:
    stage = "|stage=prefill_forward" if family.startswith("per_stage") else ""
    at_most = list(accumulate(histogram.own))
    seen = at_most[-1] > 0
    edges = (*histogram.edges, float("inf"))
    values: dict[str, float | None] = {
        f"{family}_bucket|le={float(edge)!r}{stage}": count if seen else None
        for edge, count in zip(edges, at_most, strict=True)
    }
    values[f"{family}_sum{stage}"] = histogram.sum if seen else None
    values[f"{family}_count{stage}"] = at_most[-1] if seen else None
    return values
