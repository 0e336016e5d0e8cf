"""Causes of slow tokens and slow first tokens: guide 6.4, 8.1, 8.5, 9.3. Pure."""

from __future__ import annotations

from kneewatch.diagnose.case import Case, Cause, Facts
from kneewatch.diagnose.causes.bound import weigh_bound
from kneewatch.rules.model import Severity

STALL_S = 0.5
"""A prefill shorter than this cannot have caused a pause of half a second."""

LONG_MIN = 1.0
"""Longer ones in the window, however many short ones are between them: of a hundred requests a
quantile would tell one long prompt by chance."""

COUNTED_SHORT = 0.5
"""A rate extrapolates to its window's edges: what was counted comes out a little off."""

STALL_SHARE = 0.05
STALLS_MIN = 3.0
"""Pauses in the window from which their share is more than an accident."""

MEDIAN_HOLDS_DRIFT = 1.6
QUEUE_SMALL_SHARE = 0.25
KNEE_DRIFT = 2.0
KNEE_LOAD_GROWTH = 1.5

FEED = (
    "Look at the host first: CPU cores for the engine and its API servers, their clock, logging, "
    "guided decoding, an eager mode without CUDA graphs."
)
LEVERS = {
    "memory": "Weight quantization or an fp8 KV cache to move fewer bytes, or more bandwidth (more "
    "or newer GPUs); a smaller batch helps little.",
    "compute": "A smaller batch (--max-num-seqs or --max-num-batched-tokens), prefill on its own "
    "servers, or more GPUs: arithmetic is what is short.",
    "host": FEED,
}
"""What to do about slow decode, by what the GPU waits for."""


def prefill_interference(facts: Facts) -> Cause | None:
    """Decode steps stall behind long prefills: slow ITL buckets fill while the median stays."""
    share, per_s = facts.get("itl_stall_time_ratio"), facts.get("itl_stall_per_s")
    median_s, tail_s = facts.get("itl_p50_s"), facts.get("itl_p99_s")
    long, target_s = facts.get("prefill_long_per_s") * facts.window_s, facts.targets.itl_p99_s
    stalls = (
        share >= STALL_SHARE
        and per_s * facts.window_s >= STALLS_MIN - COUNTED_SHORT
        and long >= LONG_MIN - COUNTED_SHORT
        and _prompts_are_large(facts)
    )
    over = target_s is not None and tail_s > target_s and median_s <= target_s / 2
    if not (stalls or over) or facts.get("preemption_per_s") > 0 or facts.stage.number >= 2:
        return None
    case = Case(
        "prefill_interference",
        f"Decode stalls behind long prefills: {100 * share:.0f} % of decode time is pauses of "
        f"half a second and more, the median step takes {1000 * median_s:.0f} ms."
        if stalls
        else f"ITL P99 is {1000 * tail_s:.0f} ms while the median step takes "
        f"{1000 * median_s:.0f} ms: some steps wait behind prefills.",
        "Enable chunked prefill or lower --max-num-batched-tokens; for strict targets put prefill "
        "on its own servers.",
        ("6.4", "8.5", "9.3"),
        Severity.WARNING,
        log_odds=-0.2,
    )
    if stalls:
        case.weigh(
            "itl_stall_time_ratio",
            share,
            STALL_SHARE,
            1.8,
            f"{per_s:.1f} outputs a second come half a second late or later",
        )
    if over:
        case.weigh("itl_p99_s", tail_s, target_s, 1.5, f"ITL P99 is {1000 * tail_s:.0f} ms")
    drift = facts.values.get("itl_p50_drift_ratio")
    if drift is not None and drift <= MEDIAN_HOLDS_DRIFT:
        case.weigh("itl_p50_s", median_s, None, 0.6, "the median step is as quick as ever")
    elif drift is not None:
        case.weigh("itl_p50_s", median_s, None, -0.6, "the median step is slower too")
    if long >= LONG_MIN - COUNTED_SHORT:
        case.weigh(
            "prefill_long_per_s",
            long / facts.window_s,
            LONG_MIN / facts.window_s,
            0.8,
            f"prefills of {STALL_S:g} s and more in the window: {long:.0f}",
        )
    return case.close()


def _prompts_are_large(facts: Facts) -> bool:
    """Whether a step had more tokens than the smallest chunk; true where that is not known. A short
    prompt that took half a second waited for the machine, and a smaller chunk would not cure it."""
    per_s = facts.values.get("large_step_per_s")
    return per_s is None or per_s * facts.window_s >= LONG_MIN - COUNTED_SHORT


def slo_conflict(facts: Facts) -> Cause | None:
    """TTFT and ITL targets cannot both be met at this load."""
    targets = facts.targets
    if targets.ttft_p99_s is None or targets.itl_p99_s is None or facts.stage.number >= 2:
        return None
    ttft_s, itl_s = facts.get("ttft_p99_s"), facts.get("itl_p99_s")
    if ttft_s <= targets.ttft_p99_s or itl_s <= targets.itl_p99_s:
        return None
    case = Case(
        "slo_conflict",
        "Neither TTFT nor ITL meets its target at this load: what helps one hurts the other.",
        "Separate prefill and decode (P/D disaggregation), or take load away.",
        ("6.5", "8.5"),
        Severity.CRITICAL,
        log_odds=0.0,
    )
    case.weigh("ttft_p99_s", ttft_s, targets.ttft_p99_s, 1.0, f"TTFT P99 {ttft_s:.2f} s")
    case.weigh("itl_p99_s", itl_s, targets.itl_p99_s, 1.0, f"ITL P99 {1000 * itl_s:.0f} ms")
    return case.close()


def prefill_bound(facts: Facts) -> Cause | None:
    """TTFT is over its target, and it is prefill time, not queue time, or prefill alone is over."""
    target_s, ttft_s = facts.targets.ttft_p99_s, facts.get("ttft_p99_s")
    if target_s is None or ttft_s <= target_s:
        return None
    prefill_s, queue_s = facts.get("prefill_mean_s"), facts.get("queue_mean_s")
    share = prefill_s / max(prefill_s + queue_s, 1e-9)
    alone = prefill_s > target_s
    if share <= 1 - QUEUE_SMALL_SHARE and not alone:
        return None
    case = Case(
        "prefill_bound",
        f"First tokens are late because prefill takes {prefill_s:.2f} s; the queue takes "
        f"{queue_s:.2f} s.",
        "Check the prefix cache's hit ratio first, then a higher tensor-parallel degree, then P/D.",
        ("8.5", "9.3"),
        Severity.WARNING,
        log_odds=0.0,
    )
    case.weigh("ttft_p99_s", ttft_s, target_s, 1.0, f"TTFT P99 {ttft_s:.2f} s")
    if alone:
        text = "prefill alone takes longer than the target, in the mean"
        case.weigh("prefill_mean_s", prefill_s, target_s, 1.5, text)
    else:
        text = f"{100 * share:.0f} % of it is prefill"
        case.weigh("prefill_mean_s", share, 1 - QUEUE_SMALL_SHARE, 1.5, text)
    if weigh_bound(case, facts, wanted="compute") == "host":
        case.lever = FEED
    return case.close()


def decode_bound(facts: Facts) -> Cause | None:
    """ITL is high at every percentile."""
    target_s, median_s = facts.targets.itl_p99_s, facts.get("itl_p50_s")
    if target_s is None or median_s <= target_s:
        return None
    case = Case(
        "decode_bound",
        f"Decode is slow at every percentile: the median step takes {1000 * median_s:.0f} ms.",
        "A smaller batch (--max-num-seqs), weight quantization, or GPUs with more bandwidth.",
        ("3.3", "9.3"),
        Severity.WARNING,
        log_odds=0.3,
    )
    case.weigh("itl_p50_s", median_s, target_s, 2.0, f"ITL P50 {1000 * median_s:.0f} ms")
    share = facts.get("decode_share_ratio")
    if share >= 0.5:
        case.weigh(
            "decode_share_ratio", share, 0.5, 0.8, f"{100 * share:.0f} % of request time is decode"
        )
    short = weigh_bound(case, facts, wanted="memory")
    if short in LEVERS:
        case.lever = LEVERS[short]
    return case.close()


def past_knee(facts: Facts) -> Cause | None:
    """More load than the knee of this engine's own curve, where that is known, with P99 over its
    target; or P99 leaves P50 behind as concurrency rises."""
    target_s, tail_s = facts.targets.ttft_p99_s, facts.get("ttft_p99_s")
    over = target_s is not None and tail_s > target_s
    in_flight, knee = facts.get("running_avg") + facts.get("waiting_avg"), facts.knee
    drift, growth = facts.values.get("ttft_p99_p50_drift_ratio"), _batch_growth(facts)
    # A quiet batch is not known for a while after a start: the knee that is speaks without it.
    if facts.stage.number >= 2 or (growth is not None and growth < KNEE_LOAD_GROWTH):
        return None
    apart = growth is not None and drift is not None and drift >= KNEE_DRIFT
    left = apart and (over or _queue_shows(facts))
    beyond = over and knee is not None and knee.is_past(in_flight)
    if not (left or beyond):
        return None
    case = Case(
        "past_knee",
        f"The tail of TTFT has left its middle behind ({drift:.1f} times the quiet ratio) as "
        f"the batch grew to {growth:.1f} times its quiet size."
        if left
        else f"{in_flight:.0f} requests in flight are more than this engine carries: TTFT P99 is "
        f"{tail_s:.2f} s.",
        "Take load away from this replica: more replicas, or quantization to move the knee.",
        ("8.1", "8.5"),
        Severity.WARNING if over else Severity.INFO,
        log_odds=-0.2,
    )
    if left:
        case.weigh("ttft_p99_p50_ratio", drift, KNEE_DRIFT, 1.2, "P99 over P50 against quiet times")
    case.weigh("running_avg", growth, KNEE_LOAD_GROWTH, 0.6, "batch size against quiet times")
    if over:
        case.weigh("ttft_p99_s", tail_s, target_s, 1.0, f"TTFT P99 {tail_s:.2f} s is over target")
    _weigh_knee(case, facts, in_flight)
    return case.close()


def _batch_growth(facts: Facts) -> float | None:
    """The batch over its quiet size; None where that is not known."""
    quiet = facts.baseline.get("running_avg")
    return facts.get("running_avg") / quiet if quiet else None


def _weigh_knee(case: Case, facts: Facts, in_flight: float) -> None:
    """Where the load lies against the knee that this engine's own history has."""
    knee = facts.knee
    if knee is None or not (knee.is_past(in_flight) or knee.is_before(in_flight)):
        return
    past, c_max = knee.is_past(in_flight), knee.c_max
    text = (
        f"{in_flight:.0f} requests in flight; its knee is at {c_max.expected:.0f} "
        f"({c_max.low:.0f} to {c_max.high:.0f}, learned from {knee.points} windows: {knee.basis})"
    )
    case.weigh(
        "running_avg", in_flight, c_max.expected if past else None, 1.2 if past else -1.2, text
    )


def _queue_shows(facts: Facts) -> bool:
    return facts.get("queue_share_ratio") >= 0.2 and facts.get("waiting_avg") >= 1
