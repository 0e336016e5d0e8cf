"""Causes of a full KV cache and of a queue: guide 7.4, 8.1, 9.3. Pure."""

from __future__ import annotations

from kneewatch.collector.engines.engine_kind import MEMORY_SHARE, SEATS
from kneewatch.diagnose.account_signals import CHANGED_FROM, DEMAND, LEARNED_FROM
from kneewatch.diagnose.causes.bottleneck import BATCH_GROWTH, SPEED_RATIO, is_bound
from kneewatch.diagnose.causes.common_conditions import (
    BATCH_MOST,
    EVICTING,
    FAR,
    FEW_FILL_THE_CACHE,
    GIANT,
    GIANT_FROM,
    GIANTS_BLOCK,
    GROWING,
    HELD_EACH,
    ITL_DRIFT,
    ITL_P50_S,
    KV_CLAIMED,
    KV_HAS_ROOM,
    KV_TAKEN,
    KV_USAGE,
    NOT_EVICTING,
    ONE_MORE_FITS,
    PINNED,
    PREFILL_BUSY,
    QUEUE,
    QUEUED,
    SERVED,
    SLOPE_PER_S,
    SOME_GIVEN_UP,
    STALL_SHARE,
    TTFT_P99_S,
    TTFT_TARGET_S,
    WAIT_S,
    pool_of,
    queued_for,
)
from kneewatch.diagnose.causes.evidence import Facts
from kneewatch.diagnose.causes.record import Finds, Form, Say, cause, term
from kneewatch.rules.cascade import EMPTIED_BELOW_RATIO, EVICT_WARNING_PER_S, FORECAST, SEVERITY
from kneewatch.rules.conditions import ALWAYS, Condition, Number, Quantity
from kneewatch.rules.formatting import duration, percent, plural, rate
from kneewatch.rules.quantities import BaselineValue, Live
from kneewatch.rules.rule import Severity

PREEMPTIONS = Live("preemption_per_s")
QUEUE_HELD = queued_for(10.0)

UNSERVED = (SERVED <= 0.0) & ~WAIT_S.known
"""No request left the queue within the window."""

USUAL_TTFT_S = BaselineValue("ttft_p99_s")
HURTS = (
    (WAIT_S >= 0.5 * TTFT_TARGET_S)
    | (
        ~TTFT_TARGET_S.known
        & (WAIT_S >= 0.2 * Live("e2e_mean_s").otherwise(0.0))
        & ((WAIT_S >= 1.0) | ((TTFT_P99_S >= 1.0) & (QUEUE >= 10.0)).assume(unknown=False))
        & (WAIT_S >= USUAL_TTFT_S.otherwise(3.0))
    )
    | ~WAIT_S.known
)
"""The queue's wait is long: against the TTFT target or, without one, against a request's duration
and the TTFT P99 of quiet times; below a second, where first tokens take one and ten queue, not few.

While the usual one is unknown, less than 3 s harms nobody for sure.

An unknown wait also counts: it usually means that no request leaves the queue.
"""

UNUSUAL = ~TTFT_TARGET_S.known & (WAIT_S >= (10.0 * USUAL_TTFT_S).at_least(20.0))
"""Without a target, the wait is at least ten times the TTFT P99 of quiet times, and at least 20 s.

Shorter waits also occur in bursts on healthy days.
"""

A_MINUTE = (
    (WAIT_S >= 60.0)
    & (WAIT_S >= TTFT_TARGET_S).assume(unknown=True)
    & (TTFT_TARGET_S.known | (WAIT_S >= 2.0 * USUAL_TTFT_S).assume(unknown=True))
)
"""Clients wait a minute or more, which is neither within the target nor usual."""

AHEAD_S = 120.0
WAIT_AHEAD_S = WAIT_S * (1.0 + AHEAD_S * SLOPE_PER_S / Live("waiting_avg"))
"""The wait two minutes from now, if the queue grows on as over the window."""


def _soon(usual_s: Quantity, ahead_s: float) -> Condition:
    """The wait is at least three times as long as usual, and soon ten times."""
    return (WAIT_S >= (3.0 * usual_s).at_least(ahead_s / 3)) & (
        WAIT_AHEAD_S >= (10.0 * usual_s).at_least(ahead_s)
    )


STILL_GROWS = (Live("waiting") >= Live("waiting_avg")).assume(unknown=True)
"""A queue that is shorter than its mean drains, though its slope is still positive."""

GROWS_HARMFUL = (GROWING & STILL_GROWS) & (
    _soon(TTFT_TARGET_S, 0.0)
    | (
        ~TTFT_TARGET_S.known
        & (
            _soon(USUAL_TTFT_S, 15.0)
            | (~USUAL_TTFT_S.known & (WAIT_S >= 10.0) & (WAIT_AHEAD_S >= 20.0))
        )
    )
)
"""More requests arrive than are served, and the wait is leaving what callers are used to.

If that is unknown, a wait of 10 s that grows to 20 s within two minutes counts.
"""

SUFFERS = (
    A_MINUTE
    | (WAIT_S >= 10.0 * TTFT_TARGET_S)
    | UNUSUAL
    | GROWS_HARMFUL
    | (UNSERVED & queued_for(60.0, stretch=False))
)
"""Clients wait very long.

That is a minute, ten times the target, or ten times the usual wait, or soon so in a queue that
grows; or no request has left the queue for a minute.
"""

FULL_AT_TIMES = (KV_USAGE >= 0.9) & (Live("kv_usage_max_ratio") >= 0.97)
"""The KV cache is full at times. Usage falls when a long request ends, so its mean is below
0.95."""

STEADY_BY_DESIGN = (
    ~TTFT_TARGET_S.known
    & ~USUAL_TTFT_S.known
    & (60.0 * SLOPE_PER_S <= 0.1 * QUEUE)
    & (-60.0 * SLOPE_PER_S <= 0.1 * QUEUE)
    & (SERVED > 0.0)
    & (Live(DEMAND) > 1 / CHANGED_FROM).assume(unknown=True)
).assume(unknown=False)
"""The queue moves as fast as usual, and neither grows nor drains, and no quiet time was seen:
callers that wait for their turn, as those of a batch do. Nothing says that they expect less."""

FULL_BY_CLAIMS = ((KV_CLAIMED >= 0.95) & (KV_USAGE < 0.85)).assume(unknown=False)

PROMPTS_COME_FIRST = (
    Live("prefill_pass_per_s").known
    & (PREFILL_BUSY >= 1.0)
    & (ITL_P50_S <= 0.25 * Live("itl_mean_s"))
).assume(unknown=False)
"""An engine that computes prompts apart from decodes computes prompts most of the time. Running
requests then fill the KV cache because they wait for their steps: a larger one would fill too."""

KV_BINDS = (
    ((KV_TAKEN >= 0.95) & ~PROMPTS_COME_FIRST) | FULL_AT_TIMES | GIANTS_BLOCK | FEW_FILL_THE_CACHE
) & QUEUE_HELD


def _evicting(facts: Facts) -> str:
    more = {3: " and requests are queueing", 4: " and throughput collapses"}
    per_s, stage = facts.get("preemption_per_s"), facts.stage.level
    preempts = f"preempts {rate(per_s, 'requests')}" if per_s else "has preempted requests"
    return f"KV cache full: vLLM {preempts}{more.get(stage, '')}."


def _more_kv(facts: Facts) -> str:
    pin = " Pin sessions to their decode server: what it evicts is prefilled again."
    return (
        f"Enlarge the KV cache (fp8 KV cache, higher {MEMORY_SHARE}), lower "
        f"{SEATS}, or add replicas.{pin * (pool_of(facts) == 'decode')}"
    )


BY_THE_ENGINE = tuple(
    term(Live(key), None, 0.0, text, when=Live(key) >= least)
    for key, least, text in (
        ("kv_window_pool_ratio", 0.85, "the blocks of sliding-window layers are {value:%} in use"),
        ("kv_state_pool_ratio", 0.85, "the slots for Mamba states are {value:%} in use"),
        ("preempted_tokens_per_s", 1.0, "preempted requests lose the KV cache of {value:tokens/s}"),
        ("gpu_left_gib", 0.0, "{value:.1f} GiB of GPU memory were free after the start"),
    )
)
"""What some engines show of their memory; vLLM does not."""

KV_PRESSURE = cause(
    "kv_pressure",
    Form(
        gate=EVICTING | KV_BINDS,
        terms=(
            *(
                term(
                    PREEMPTIONS.otherwise(0.0),
                    None,
                    -0.5,
                    text,
                    when=~EVICTING.assume(unknown=False) & counted,
                )
                for text, counted in (
                    ("no request is preempted yet", PREEMPTIONS.known),
                    ("preemptions are not reported", ~PREEMPTIONS.known),
                )
            ),
            term(
                Live("preemption_ratio_per_s").otherwise(0.0),
                EVICT_WARNING_PER_S,
                2.0,
                "{value:%} of running requests are preempted every second",
                when=EVICTING,
            ),
            term(KV_USAGE, 0.9, 2.0, "KV cache {value:%} full (mean)", when=KV_USAGE >= 0.85),
            term(
                KV_USAGE,
                0.9,
                -1.5,
                "KV cache {value:%} full (mean)",
                when=(KV_USAGE < 0.85) & ~FULL_BY_CLAIMS,
                below=True,
            ),
            term(
                KV_CLAIMED,
                0.95,
                2.0,
                "KV cache {kv_usage_avg_ratio:%} full (mean), {value:%} with what is kept free "
                "for what requests may still generate",
                when=FULL_BY_CLAIMS,
            ),
            term(QUEUE, 1.0, 1.0, "{value} requests queued for capacity", when=QUEUE >= 1.0),
            term(
                GIANT,
                GIANT_FROM,
                3.5,
                "the longest 1% of prompts take {value:%} of the KV cache each",
                when=GIANT >= GIANT_FROM,
            ),
            term(
                HELD_EACH,
                GIANT_FROM,
                3.0,
                "a running request holds {value:%} of the KV cache on average",
                when=FEW_FILL_THE_CACHE,
            ),
            term(
                STALL_SHARE,
                0.02,
                0.5,
                "streams stall for more than 0.5 s in {value:%} of decode time",
                when=(STALL_SHARE > 0.02) & EVICTING,
            ),
            *BY_THE_ENGINE,
        ),
        levels=(
            (Severity.CRITICAL, (SEVERITY >= 3.0) | (QUEUE_HELD & SUFFERS)),
            (Severity.WARNING, (SEVERITY >= 2.0) | (ITL_DRIFT >= FAR) | NOT_EVICTING),
        ),
        severity=Severity.INFO,
        instead=(
            (EVICTING, _evicting),
            (
                GIANT >= GIANT_FROM,
                "Giant requests block the queue: the longest 1% of prompts take "
                "{prompt_p99_kv_share_ratio:%} of the KV cache each, {waiting_by_capacity} "
                "requests queued, expected wait {expected_wait_s:s}.",
            ),
            (
                FEW_FILL_THE_CACHE,
                "Requests queue for KV blocks: {waiting_by_capacity} requests queued, a "
                "running one holds {held_each:%} of the KV cache on average, and "
                "{kv_usage_avg_ratio:%} is in use.",
            ),
            (
                FULL_BY_CLAIMS,
                "Requests queue for KV blocks: {waiting_by_capacity} requests queued, "
                "{kv_usage_avg_ratio:%} of the KV cache is in use, {kv_claimed_ratio:%} with "
                "what is kept free for what they may still generate.",
            ),
            (~PREEMPTIONS.known, "KV cache full: requests are queueing for blocks."),
        ),
        say="KV cache full: requests are queueing for blocks, none preempted yet.",
        words=(("held_each", HELD_EACH),),
        lever=_more_kv,
    ),
    over=KV_USAGE < EMPTIED_BELOW_RATIO,
)

EXHAUSTED_IN_S = Live(FORECAST)

KV_EXHAUSTION_AHEAD = cause(
    "kv_exhaustion_ahead",
    Form(
        gate=Finds("KV-EXHAUST") & EXHAUSTED_IN_S.known,
        terms=(
            term(
                EXHAUSTED_IN_S,
                None,
                1.0,
                "at its trend KV demand reaches the cache's capacity in {value:s}",
            ),
            term(
                Live("kv_peak_demand_ratio"),
                0.5,
                1.0,
                "KV demand is {value:%} of the cache at its likely peaks",
            ),
        ),
        instead=(
            (
                EXHAUSTED_IN_S < 1.0,
                "The KV cache is about to be exhausted: demand is {kv_peak_demand_ratio:%} of "
                "it at its likely peaks and climbs.",
            ),
        ),
        say="The KV cache will be exhausted in about {kv_exhausted_in_s:s}: demand is "
        "{kv_peak_demand_ratio:%} of it at its likely peaks and climbs.",
        lever="Add replicas or enlarge the KV cache before vLLM preempts.",
    ),
    over=QUEUED,
)

RUNS = (BATCH_MOST > 0.0).assume(unknown=True)
"""The engine runs requests. A queue before an engine that runs none is a stall (engine_stalled)."""

MORE_REPLICAS = "Add replicas; the KV cache is not the limit."
BEHIND_A_PREFILL = (
    "A long prompt is under prefill and holds the others back: --long-prefill-token-threshold lets "
    "shorter ones pass it. More replicas take some of the others."
)

SLOW_FROM_DRIFT = 1.6
"""Steps count as slow from this ratio of inter-token latency to its quiet mean on."""

MEDIAN_IS_SHORT = ITL_P50_S < 0.1
STEPS_ARE_SHORT = (MEDIAN_IS_SHORT | (BATCH_MOST <= 1.0)) & (PREFILL_BUSY < 0.75)
"""Steps count as fast; used only if no quiet baseline is known to compare them with.

The median step is short, or the batch has one request: its steps mostly read weights, so a second
request adds little time. Prompts take less than three quarters of the time, so a third more
requests fit before prompts are the limit. Stalls behind a few long prompts do not matter, because a
larger batch does not lengthen them.
"""

SEATS_PAY = (1.0 - 1.0 / ITL_DRIFT <= 0.5 * (1.0 - 1.0 / BATCH_GROWTH)).assume(unknown=False) & (
    SPEED_RATIO >= LEARNED_FROM
).assume(unknown=True)
"""At most half of a step grows with the batch, by the batch and the steps of quiet times: twice the
batch generates a third more tokens/s. And the engine does not lose speed at equal work."""

STEPS_ARE_FAST = (
    (ITL_DRIFT < SLOW_FROM_DRIFT) | SEATS_PAY | (~ITL_DRIFT.known & STEPS_ARE_SHORT)
) & ~(is_bound("compute") | is_bound("memory"))

BATCH_LIMIT_BINDS = (PINNED & KV_HAS_ROOM & STEPS_ARE_FAST).assume(unknown=False)
"""The batch stays at its maximum, although the KV cache has room and steps are fast.

If one of these was not measured, the cause is queue_saturation instead.
"""

_UNSERVED, _KV_HAS_ROOM = UNSERVED.python(), KV_HAS_ROOM.python()

GROWS_FROM_PER_S = 0.1
GROWS, IS_QUEUED = SLOPE_PER_S > GROWS_FROM_PER_S, QUEUE > 0.0
"""From this growth of the queue (requests/s) on, more requests arrive than are served.

A smaller growth may be noise of a steady queue.
"""


def _steps(facts: Facts) -> str:
    drift = facts.get("itl_mean_drift_ratio")
    slow = ": steps are slow" if drift >= SLOW_FROM_DRIFT else ""
    return f"inter-token latency is {drift:.1f}x its quiet mean{slow}"


def _more_replicas(facts: Facts) -> str:
    if facts.values.get("generation_tokens_per_s") == 0 and facts.get("running") >= 1:
        return BEHIND_A_PREFILL
    return MORE_REPLICAS if _KV_HAS_ROOM(facts) else "Add replicas."


FAST_STEPS = (
    term(
        ITL_DRIFT,
        SLOW_FROM_DRIFT,
        0.6,
        "inter-token latency is {value:.1f}x its quiet mean: steps are fast",
        below=True,
    ),
    term(
        ITL_P50_S,
        0.1,
        0.3,
        "ITL P50 is {value:s} and prefill runs {prefill_busy_ratio:%} of the time: most steps are "
        "fast",
        when=~ITL_DRIFT.known & MEDIAN_IS_SHORT,
        below=True,
    ),
)
"""Evidence that steps have time for a larger batch."""


def _expected_wait(facts: Facts) -> str:
    queued, wait_s = (
        f"{plural(round(facts.get('waiting_by_capacity')), 'request')} queued",
        facts.values.get("expected_wait_s"),
    )
    if wait_s is not None:
        return f"{queued}, expected wait {duration(wait_s)}"
    return f"{queued}, none finished in the window" if _UNSERVED(facts) else queued


def _wait_beside_usual(facts: Facts) -> str:
    usual_s = facts.baseline.get("ttft_p99_s")
    usual = "unknown" if usual_s is None else f"TTFT P99 {duration(usual_s)}"
    return f"expected wait {duration(facts.get('expected_wait_s'))}; usual: {usual}"


def _overloaded(facts: Facts) -> str:
    given_up = facts.get("given_up_ratio")
    lost = (
        f"; clients give up {percent(given_up)} of the calls" if given_up >= SOME_GIVEN_UP else ""
    )
    grows = facts.get("waiting_slope_per_s") > GROWS_FROM_PER_S
    state = "Overloaded" if grows or lost else "Requests queue for capacity"
    return f"{state}: {_expected_wait(facts)}{lost}."


def _pinned(facts: Facts) -> str:
    batch, queued = (round(facts.get(key)) for key in ("running_max", "waiting_by_capacity"))
    fast = " and fast steps" if batch != 1 else ""
    return (
        f"Batch pinned at {plural(batch, 'request')} with room in the KV cache{fast}: "
        f"{plural(queued, 'request')} queued."
    )


def _queue(gate: Condition, *, pinned: bool, say: Say, lever: Say) -> Form:
    """The form for a queue that neither preemption nor a full cache explains.

    With `pinned`, the batch limit explains it.
    """
    return Form(
        # A streak outlasts one scrape without a queue, and the wait is the window's mean.
        gate=QUEUE_HELD & IS_QUEUED & RUNS & HURTS & NOT_EVICTING & gate,
        start=Number(0.3),
        terms=(
            term(QUEUE, 2.0, 1.2, _expected_wait),
            term(
                KV_USAGE,
                0.8,
                1.0,
                "KV cache {value:%} full (mean)",
                when=ALWAYS if pinned else KV_HAS_ROOM,
                below=True,
            ),
            term(
                SLOPE_PER_S,
                GROWS_FROM_PER_S,
                0.6,
                "the queue grows by {value:requests/s}",
                when=GROWS,
            ),
            term(WAIT_S, None, 0.0, _wait_beside_usual),
            term(
                WAIT_AHEAD_S,
                None,
                0.0,
                "at this growth the wait is {value:s} in two minutes",
                when=GROWS_HARMFUL,
                signal="waiting_slope_per_s",
            ),
            *(FAST_STEPS if pinned else (term(ITL_DRIFT, SLOW_FROM_DRIFT, 0.6, _steps),)),
        ),
        levels=((Severity.CRITICAL, SUFFERS & ~STEADY_BY_DESIGN),),
        say=say,
        lever=lever,
    )


QUEUE_SATURATION = cause(
    "queue_saturation",
    _queue(
        ~BATCH_LIMIT_BINDS
        & ((KV_TAKEN < 0.95).assume(unknown=True) | PROMPTS_COME_FIRST)
        & ~FEW_FILL_THE_CACHE,
        pinned=False,
        say=_overloaded,
        lever=_more_replicas,
    ),
)

ADMISSION_LIMIT = cause(
    "admission_limit",
    _queue(
        BATCH_LIMIT_BINDS & ONE_MORE_FITS,
        pinned=True,
        say=_pinned,
        lever=f"Raise {SEATS}; check ITL as the batch grows.",
    ),
)
