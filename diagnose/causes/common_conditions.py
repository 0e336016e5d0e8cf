"""Quantities and conditions that several causes use. Pure."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

from kneewatch.diagnose.account_signals import COMPUTED, KV_UNACCOUNTED, SEATED
from kneewatch.diagnose.causes.evidence import Facts
from kneewatch.diagnose.causes.record import term
from kneewatch.diagnose.lengths import SHORT_PROMPT_TOKENS
from kneewatch.rules.conditions import Check, FirstOf, Number
from kneewatch.rules.quantities import BaselineValue, Live, Target, WindowSeconds
from kneewatch.rules.rule import QUEUED_MIN, QUEUED_SHARE, QUIET_WAITING

WINDOW_S = WindowSeconds()
STAGE = Live("cascade_stage")
EVICTING = STAGE >= 2.0
NOT_EVICTING = (STAGE < 2.0).assume(unknown=True)

RUNNING, WAITING = Live("running"), Live("waiting")
BATCH, BATCH_MOST = Live("running_avg"), Live("running_max")
QUEUE = Live("waiting_by_capacity")
ARRIVALS, SERVED = Live("arrival_per_s"), Live("completed_per_s")
KV_USAGE, KV_CLAIMED = Live("kv_usage_avg_ratio"), Live("kv_claimed_ratio")
KV_TAKEN = FirstOf((KV_CLAIMED, KV_USAGE))
"""What admission counts as taken: some engines keep blocks free for what requests may generate."""

KV_HAS_ROOM = KV_TAKEN < 0.8

TTFT_P99_S, ITL_P50_S, ITL_P99_S = Live("ttft_p99_s"), Live("itl_p50_s"), Live("itl_p99_s")
TTFT_TARGET_S, ITL_TARGET_S = Target("ttft_p99_s"), Target("itl_p99_s")
TTFT_IS_MISSED, ITL_IS_MISSED = TTFT_P99_S > TTFT_TARGET_S, ITL_P99_S > ITL_TARGET_S
TTFT_DRIFT, ITL_DRIFT = Live("ttft_p50_drift_ratio"), Live("itl_mean_drift_ratio")
USUAL_TTFT_MEAN_S = BaselineValue("ttft_mean_s")
MEAN_TTFT_GROWTH = Live("ttft_mean_s") / USUAL_TTFT_MEAN_S
FAR = 2.0
"""Latency is far off its usual value from this ratio on."""

FIRST_TOKENS_LATE = (TTFT_DRIFT >= FAR * Live(COMPUTED).at_least(1.0)) & (
    Live("ttft_p99_drift_ratio") >= 1.3
)
"""First tokens are far later than the growth of prompts explains."""

MEAN_IS_LATE = FIRST_TOKENS_LATE & (MEAN_TTFT_GROWTH >= FAR).assume(unknown=True)
"""The mean is as far off as the median, which jumps from bucket to bucket."""

UNTIL_THEN = ", and limit its requests or their max_tokens until then"
"""What to do besides about a larger load that is the problem itself."""

UNMOVED = 1.3
"""A ratio to the usual value that is no larger counts as usual."""

STALL_SHARE = Live("itl_stall_time_ratio")
USUAL_STALL_SHARE = BaselineValue("itl_stall_time_ratio")
PREFILL_BUSY = Live("prefill_busy_ratio")
"""Mean number of prompts under prefill."""
PREFILL_S = Live("prefill_mean_s").otherwise(0.0)
LONG_S = 0.5
"""A prefill that takes so long pauses streams for as long as `STALL_SHARE` counts."""
ALONE = PREFILL_S > TTFT_TARGET_S
"""The prefill of a single request takes longer than the TTFT target."""
_ALONE = ALONE.python()

PREFILLS_REACH = (PREFILL_BUSY >= 0.5 * STALL_SHARE).assume(unknown=True)
"""Prefills took at least half as long as each stream paused: shorter ones do not explain pauses."""

VERY_LATE_FROM, VERY_LATE_S = 10.0, 10.0
FIRST_TOKENS_VERY_LATE = Check(
    "first_tokens_very_late",
    (
        ~TTFT_TARGET_S.known
        & (TTFT_DRIFT >= VERY_LATE_FROM)
        & (Live("ttft_p99_drift_ratio") >= VERY_LATE_FROM / 2)
        & (TTFT_P99_S >= VERY_LATE_S)
    )
    | (Live("ttft_p50_s") >= VERY_LATE_FROM * TTFT_TARGET_S),
    Number(30.0),
)
"""Most callers wait ten times as long as usual (or as promised), and some 10 s and more: harm that
is critical, whatever its cause. Without a target or a baseline, nothing is known about it."""

QUEUED = QUEUE >= (QUEUED_SHARE * RUNNING).at_least(QUEUED_MIN)
"""A queue that is longer than what the next step admits."""

WAIT_S, SLOPE_PER_S = Live("expected_wait_s"), Live("waiting_slope_per_s")
GROWING = Check(
    "queue_grows",
    QUEUED & (60.0 * SLOPE_PER_S >= (0.1 * QUEUE).at_least(2.0)),
    Number(60.0),
    stretch=False,
)
"""The queue has grown for a minute: a burst that drains has a shorter growth."""


def queued_for(for_s: float, *, stretch: bool = True) -> Check:
    """The condition that a queue has lasted for `for_s` seconds."""
    return Check("queued", QUEUED, Number(for_s), stretch)


DEFERRED_AVG = Live("waiting_deferred_avg")
QUEUES = Live("waiting_avg") - DEFERRED_AVG >= QUIET_WAITING
"""Requests wait for capacity, more of them than in quiet times."""

DEFERRED_GROWS = Check(
    "deferred_grows",
    (Live("waiting_deferred") >= (0.5 * BATCH).at_least(4.0))
    & (60.0 * SLOPE_PER_S >= (0.1 * DEFERRED_AVG).at_least(2.0)),
    Number(90.0),
    stretch=False,
)
"""More and more requests are held back beside those that run: they are never served."""

DEFERRED_HELD = Check("deferred", Live("waiting_deferred") >= 1.0, Number(10.0))
"""Requests have been held back for some time although there is capacity."""

EXPIRED = Live("kv_expired_per_s")
EXPIRED_PER_MIN = ("expired_per_min", 60.0 * EXPIRED)
KV_EXPIRES = term(
    EXPIRED,
    None,
    0.6,
    "KV of {expired_per_min:.1f} requests/min expired here before it was fetched",
    when=EXPIRED > 0.0,
)
"""Evidence of a transfer whose receiver never came; its sentence needs `EXPIRED_PER_MIN`."""

GIANT = Live("prompt_p99_kv_share_ratio")
GIANT_FROM = 0.2
"""From this share of the KV cache on, a prompt counts as a giant.

It is a quarter, minus what interpolation between the histogram's bounds may hide.
"""

STEPS_HAVE_ROOM = (Live("iteration_tokens_mean") <= 128.0).assume(unknown=False)
"""Most steps have fewer tokens than any usual token budget: they could admit more."""

SEATS_ARE_FREE = (
    (BATCH < 0.9 * BATCH_MOST) | (BATCH_MOST <= 0.0) | (BATCH_MOST < BaselineValue("running_avg"))
).assume(unknown=False)
"""The batch is smaller than it was before: it has free seats."""

KV_FREE = 1.0 - KV_USAGE
OWN_USAGE = (KV_USAGE - Live(KV_UNACCOUNTED).otherwise(0.0)).at_least(0.0)
HELD_EACH = OWN_USAGE / BATCH.at_least(1.0)
"""Mean share of the KV cache that a running request holds; what none of them holds is left out."""

ONE_MORE_FITS = (HELD_EACH <= KV_FREE).assume(unknown=False)
"""The free part of the KV cache is at least as large as a running request's mean part."""

PINNED = ((BATCH_MOST >= 1.0) & (FirstOf((Live(SEATED), BATCH)) >= 0.9 * BATCH_MOST)).assume(
    unknown=False
)
"""The batch stays at its maximum while requests queue."""

GIANTS_BLOCK = (GIANT >= GIANT_FROM) & (
    ((GIANT > KV_FREE) & ~(PINNED & (GIANT <= KV_FREE + HELD_EACH)).assume(unknown=False))
    | (STEPS_HAVE_ROOM & SEATS_ARE_FREE)
).assume(unknown=False)
"""Giant prompts do not fit into the free KV cache and block the queue, which vLLM serves in order.

False if the batch stays at its maximum and the giant fits once a request ends: it then waits for a
seat, not for blocks.

The gauges may not show a giant: they are read at the end of a step, but a giant holds its blocks
from the start of its long first step. So the condition is also true if requests wait although seats
and steps have room: they then wait for blocks.
"""

FEW_FILL_THE_CACHE = (
    (HELD_EACH >= GIANT_FROM)
    & (HELD_EACH > KV_FREE)
    & (Live("generation_tokens_per_s") > 0.0).assume(unknown=True)
).assume(unknown=False)
"""Few requests run, and one more does not fit into the KV cache.

False while no tokens are generated: running requests are then still under prefill, and the others
wait for their steps.
"""


def at_hour(t_s: float) -> str:
    """A UTC time to the minute: `Sun 22 Nov 19:00 UTC`."""
    return f"{datetime.fromtimestamp(t_s, UTC):%a %d %b %H:%M} UTC"


SOME_GIVEN_UP = 0.1
"""From this share of accepted calls on, clients give up. Below it, users may just stop answers that
they have read."""


# --- Separate servers for prefill and decode (P/D) ---

DECODES_FROM = 0.5
"""A server belongs to the decode pool if at least this share of prompt tokens is computed
elsewhere."""

ONE_TOKEN = 1.5
"""A server belongs to the prefill pool up to this mean of output tokens: it generates one per
request."""


def pool_of(facts: Facts) -> str:
    """`prefill` or `decode` for a server of a disaggregated (P/D) fleet; otherwise empty."""
    if facts.get("kv_external_share_ratio") >= DECODES_FROM:
        return "decode"
    sends_kv = facts.values.get("kv_expired_per_s") is not None
    length = facts.values.get("output_tokens_mean")
    return "prefill" if sends_kv and length is not None and length <= ONE_TOKEN else ""


def why_together(facts: Facts) -> str:
    """Why separate servers for prefill and decode (P/D) would not help; empty if they may."""
    tokens = facts.values.get("prompt_tokens_mean")
    if pool := pool_of(facts):
        return f"this is a {pool} server of separate pools already"
    if tokens is None:
        return "the length of prompts is unknown"
    if tokens < SHORT_PROMPT_TOKENS:
        return f"prompts have {tokens:.0f} tokens, and it pays from about {SHORT_PROMPT_TOKENS} on"
    if _ALONE(facts):
        return "the prefill of a single request exceeds the target"
    return ""


def apart(action: str, when: str) -> Callable[[Facts], str]:
    """The action, followed by when to separate prefill and decode or by why that does not help."""

    return lambda facts: (
        action
        + (f". P/D disaggregation does not help: {why}." if (why := why_together(facts)) else when)
    )
