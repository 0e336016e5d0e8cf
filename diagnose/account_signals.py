"""The signals that are followed from scrape to scrape, for all that read them. Pure.

learned/account.py, learned/open_calls.py, learned/derived_signals.py and others compute them.
"""

from __future__ import annotations

from collections.abc import Mapping

from kneewatch.collector.packaged import packaged_tables

SPEED, SPEED_ERROR = "engine_speed_ratio", "engine_speed_error_ratio"
SPEED_SAMPLES, PREFILL_SPEED = "engine_speed_samples", "prefill_speed_ratio"
DEMAND, COMPUTED = "demand_moved_ratio", "computed_moved_ratio"
PROMPTS, ANSWERS = "prompts_moved_ratio", "answers_moved_ratio"
HITS, DRAFTS = "hits_moved_ratio", "drafts_moved_ratio"
STREAM = "stream_moved_ratio"
MOVED_FOR, SEATED = "moved_for_s", "running_queued_avg"
STREAM_RATE, STREAM_USUAL = "stream_tokens_per_s", "stream_usual_tokens_per_s"

_TABLES = packaged_tables("diagnose", "derived_signals.toml")
ACCOUNT_SIGNALS: Mapping[str, str] = _TABLES["account"]
"""Help texts of the account's signals."""

LEARNED_FROM = 0.85
"""An engine with a lower speed is slow: its samples are not learned."""

WARM_UP_S = 30.0
"""The first steps and prefills of a process are slow, for so long after its first token."""

CHANGED_FROM = 1.25
"""A factor that moved by less than this ratio counts as unchanged."""


def is_unchanged(ratio: float) -> bool:
    """Whether a value over its usual value counts as the usual value."""
    return 1 / CHANGED_FROM < ratio < CHANGED_FROM


GIVEN_UP_MAX = 0.2
"""If clients give up a larger share of calls, the work is unknown: vLLM counts no prompt tokens of
a request that has no first token."""

AT_THE_DOOR, CANCELLED, SILENT = "open_calls", "cancelled_ratio", "silent_s"
PILED, UNADMITTED = "piled_calls", "unadmitted_s"
STOPS_EVERY, STOPPED, STOP_DUE = "stops_every_s", "stopped_ratio", "stop_due_s"
OPEN_CALLS_SIGNALS: Mapping[str, str] = _TABLES["open_calls"]
"""Help texts of the signals of open calls and of stops."""

FALLS_ALONG = 0.5
"""Demand follows the speed if it fell by at least this share of the speed's fall (of their
logarithms)."""

ALL_CANCELLED = 0.9
"""From this share of cancelled requests on, none of those on the gauges is in flight."""

STALL, PREFILL_SILENCE, DRAINS = "stalled_s", "prefill_silence_s", "backlog_drains"
KV_UNACCOUNTED = "kv_unaccounted_ratio"
CAPACITY_USED = "capacity_used_ratio"
HIT_SPREAD = "prefix_hit_spread_sigmas"
