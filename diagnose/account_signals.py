"""The signals of an engine's account and of its open calls, for all that read them. Pure.

learned/account.py and learned/open_calls.py compute them.
"""

from __future__ import annotations

from collections.abc import Mapping

SPEED, SPEED_ERROR = "engine_speed_ratio", "engine_speed_error_ratio"
SPEED_SAMPLES, PREFILL_SPEED = "engine_speed_samples", "prefill_speed_ratio"
DEMAND, COMPUTED = "demand_moved_ratio", "computed_moved_ratio"
PROMPTS, ANSWERS = "prompts_moved_ratio", "answers_moved_ratio"
HITS, DRAFTS = "hits_moved_ratio", "drafts_moved_ratio"
STREAM = "stream_moved_ratio"
MOVED_FOR, SEATED = "moved_for_s", "running_queued_avg"
STREAM_RATE, STREAM_USUAL = "stream_tokens_per_s", "stream_usual_tokens_per_s"

ACCOUNT_SIGNALS: Mapping[str, str] = {
    SPEED: "time that a decode step of the same work took in quiet times over the time that it "
    "takes: 1 at every load of a healthy engine; no value for work that was never seen, and while "
    "nothing runs",
    SPEED_ERROR: "half of the range that engine_speed_ratio may have: by the noise of quiet times, "
    "and by how far the present work is from any work seen",
    SPEED_SAMPLES: "number of quiet samples that engine_speed_ratio stands on; a sample is "
    "10 seconds, or the time of 20 tokens",
    PREFILL_SPEED: "the same as engine_speed_ratio for prefills: time of a prefill of equal length "
    "in quiet times over the time that it takes",
    DEMAND: "requests/s over their usual rate",
    PROMPTS: "mean prompt tokens of a request over their usual number",
    COMPUTED: "mean computed prompt tokens of a request over their usual number",
    ANSWERS: "mean output tokens of a finished request over their usual number",
    HITS: "share of prompt tokens from the prefix cache over its usual share",
    DRAFTS: "tokens per sequence and step over their usual number: accepted draft tokens",
    STREAM: "tokens/s of a stream while it decodes over their usual rate: falls where steps take "
    "longer, and where they yield fewer accepted draft tokens",
    STREAM_RATE: "tokens/s of a stream while it decodes, mean over streams, two digits",
    STREAM_USUAL: "usual stream_tokens_per_s",
    MOVED_FOR: "seconds for which the speed, or without that another factor of the account, has "
    "been off its usual value; no value while none is",
    SEATED: "mean running requests of the scrapes in the last 30 s at which requests queued for "
    "capacity; no value while none do",
}
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


AT_THE_DOOR, CANCELLED, SILENT = "open_calls", "cancelled_ratio", "silent_s"
OPEN_CALLS_SIGNALS: Mapping[str, str] = {
    AT_THE_DOOR: "connections to the API server beyond their level while tokens flowed and beyond "
    "running and waiting requests, since the last token: calls that the engine does not show",
    CANCELLED: "1 if the calls of nearly all requests that the gauges show as running or waiting "
    "have ended unfinished, all within seconds of the last token: the gauges are stale",
    SILENT: "seconds without a request or a token since traffic ended from one scrape to the next, "
    "on a server that was never idle for so long within the last hour; no value otherwise",
}
"""Help texts of the signals of open calls."""

FALLS_ALONG = 0.5
"""Demand follows the speed if it fell by at least this share of the speed's fall (of their
logarithms)."""

ALL_CANCELLED = 0.9
"""From this share of cancelled requests on, none of those on the gauges is in flight."""
