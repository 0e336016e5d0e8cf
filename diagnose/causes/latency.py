"""Causes of high ITL and TTFT: guide 6.4, 8.1, 8.5, 9.3. Pure."""

from __future__ import annotations

from msgspec.structs import replace

from kneewatch.collector.engines.engine_kind import STEP_TOKENS, TENSOR_SPLIT
from kneewatch.diagnose.account_signals import COMPUTED, DEMAND
from kneewatch.diagnose.causes.bottleneck import (
    GPUS_WAIT_FOR_THE_HOST,
    LEVERS,
    MEDIAN_IS_MISSED,
    PREFILL_SPEED_RATIO,
    PREFILLS_SLOW_FROM,
    QUEUE_S,
    SLOW_STEPS_ALONE,
    SPEED_RATIO,
    WARMED_UP,
    bound_of,
    bound_terms,
)
from kneewatch.diagnose.causes.common_conditions import (
    ALONE,
    ARRIVALS,
    BATCH,
    FAR,
    FIRST_TOKENS_VERY_LATE,
    ITL_IS_MISSED,
    ITL_P50_S,
    ITL_P99_S,
    ITL_TARGET_S,
    KV_USAGE,
    LONG_S,
    MEAN_TTFT_GROWTH,
    NOT_EVICTING,
    PREFILL_BUSY,
    PREFILL_S,
    PREFILLS_REACH,
    SERVED,
    STALL_SHARE,
    TTFT_IS_MISSED,
    TTFT_P99_S,
    TTFT_TARGET_S,
    UNMOVED,
    USUAL_STALL_SHARE,
    USUAL_TTFT_MEAN_S,
    WINDOW_S,
    apart,
)
from kneewatch.diagnose.causes.evidence import Facts
from kneewatch.diagnose.causes.record import Computed, Form, cause, term
from kneewatch.rules.conditions import Check, FirstOf, Number
from kneewatch.rules.formatting import duration
from kneewatch.rules.quantities import BaselineValue, Live
from kneewatch.rules.rule import Severity

COUNT_ERROR = 0.5
"""Tolerance for a count computed from a rate: the rate extrapolates to the edges of its window."""

LONG_PER_S = Live("prefill_long_per_s").otherwise(0.0)
LONG_PREFILLS = LONG_PER_S * WINDOW_S
LONG_WERE_SEEN = LONG_PREFILLS >= 1.0 - COUNT_ERROR
"""At least one prefill in the window took half a second.

This is a count, because a quantile of a hundred requests rarely shows a single long prompt.
"""

STALLS_PER_S = Live("itl_stall_per_s")
LARGE_STEPS_PER_S = Live("large_step_per_s")
LARGE_STEPS_PAUSE = (LARGE_STEPS_PER_S * WINDOW_S >= 1.0 - COUNT_ERROR) & (
    LARGE_STEPS_PER_S * BATCH.at_least(1.0) >= 0.5 * STALLS_PER_S
)
"""Large steps cause at least half of the pauses: each pauses every stream of the batch once.

A step is large if it has more tokens than the smallest chunk. If a short prompt took half a second,
the machine was slow, and a smaller chunk would not help.
"""

PASSES_PER_S = Live("prefill_pass_per_s")
ROWS_PAUSE = ((PASSES_PER_S * BATCH >= 2.0 * STALLS_PER_S) & (PREFILL_BUSY >= 0.2)).assume(
    unknown=False
)
"""An engine that computes prompts apart from decodes has passes enough for two before each pause:
several short prompts in a row pause the streams as a long one does, in some windows by chance."""

NONE_ENDED = SERVED <= 0.0
"""No request ended in the window. vLLM counts a prefill only when the request ends."""

USUAL_ITL_S = FirstOf((BaselineValue("itl_p50_s"), ITL_P50_S))
STANDS_OUT = (USUAL_ITL_S <= 0.1).assume(unknown=True)
"""Half a second is at least five steps. If steps are longer, it is within their normal spread."""

# What is computed of a prompt is unknown while a prefill of unknown size is under way, maybe a long
# one.
PREFILLS_ARE_SLOW = (Live(COMPUTED) <= 1.5).assume(unknown=False) & (
    (PREFILL_SPEED_RATIO <= PREFILLS_SLOW_FROM).assume(unknown=False)
    | (
        (FirstOf((PREFILL_SPEED_RATIO, USUAL_TTFT_MEAN_S / PREFILL_S)) <= PREFILLS_SLOW_FROM)
        & (Live(DEMAND) <= 1.5)
    ).assume(unknown=False)
)
"""Prompts of nearly the same length are computed far slower than in quiet times: where no page
counts their tokens, far longer than first tokens took, at a demand at which as few overlap."""

SAME_PROMPTS = (
    (Live(COMPUTED) <= 1.2) & (Live(DEMAND) <= 1.2) & (BaselineValue("itl_p99_s") < 0.5)
).assume(unknown=False)
"""As many prompts of nearly the same length as in quiet times, when none paused a stream.

Then their length does not explain pauses: something is slow, or prefills wait as the streams do.
"""

MEDIAN_HOLDS = Live("itl_p50_drift_ratio") <= 1.6
ALL_STEPS_SLOW = (~MEDIAN_HOLDS & (SPEED_RATIO <= PREFILLS_SLOW_FROM)).assume(unknown=False)
"""Every step takes far longer than for the same work in quiet times: so does a step with a prompt,
which paused no stream before."""

STALLS = (
    (STALL_SHARE >= 0.05)
    & ~((SAME_PROMPTS & ~ROWS_PAUSE) | PREFILLS_ARE_SLOW | ALL_STEPS_SLOW)
    & PREFILLS_REACH
    & (STALLS_PER_S * WINDOW_S >= 3.0 - COUNT_ERROR)
    & (LONG_WERE_SEEN | ROWS_PAUSE | (NONE_ENDED & LARGE_STEPS_PAUSE))
    & LARGE_STEPS_PAUSE.assume(unknown=True)
    & STANDS_OUT
)
PROMPTS_WERE_COMPUTED = (
    (ARRIVALS + LARGE_STEPS_PER_S.otherwise(0.0)) * WINDOW_S >= 1.0 - COUNT_ERROR
).assume(unknown=True)
"""A prompt got its first token in the window, or a long prompt is under prefill.

Otherwise something else delays decoding.
"""

USUAL_TTFT_S = BaselineValue("ttft_p50_s")
LONG_AS_EVER = (
    (FirstOf((Live("prefill_p50_s"), USUAL_TTFT_S)) >= LONG_S)
    & (USUAL_TTFT_S >= LONG_S).assume(unknown=True)
    & ~Check(
        "more_prefill",
        ((Live(COMPUTED) > UNMOVED) | (Live(DEMAND) > UNMOVED)).assume(unknown=False),
        Number(45.0),  # a burst of requests stays in the account's samples for 30 s
        stretch=False,
    )
)
PAUSES_AS_EVER = (
    LONG_AS_EVER | ((STALL_SHARE < FAR * USUAL_STALL_SHARE) & (STALL_SHARE < 0.1))
).assume(unknown=False) & ~ITL_IS_MISSED.assume(unknown=False)
"""Most prompts take half a second or longer, now and in quiet times, and are not more or longer
than then; or pauses take little time, less than twice their usual share. No target says that they
harm: they are no news."""

LATE_FROM = Number(5.0)
LATE_BEHIND_PREFILLS = (
    (MEAN_TTFT_GROWTH >= LATE_FROM)
    & (Live("ttft_p99_drift_ratio") >= LATE_FROM)
    & (TTFT_P99_S >= 1.0)
    & (TTFT_P99_S >= TTFT_TARGET_S).assume(unknown=True)
    & (QUEUE_S >= 4.0 * USUAL_TTFT_MEAN_S)
    & LONG_WERE_SEEN
    & (Live("prefill_p99_s") >= QUEUE_S)
    & ~(SAME_PROMPTS | PREFILLS_ARE_SLOW)
    & (KV_USAGE < 0.8)
).assume(unknown=False)
"""First tokens are far later than usual, because requests queue for several times their usual TTFT
while prompts that are longer than usual are under prefill. The median request may not meet one."""

PREFILL_OF_WAIT = PREFILL_S / (PREFILL_S + QUEUE_S).at_least(1e-9)
MOST_OF_WAIT, NEARLY_ALL = 0.5, 0.75
PREFILL_BREAKS_TTFT = TTFT_IS_MISSED & ((PREFILL_OF_WAIT > NEARLY_ALL) | ALONE)
TAIL_ONLY = (
    ITL_IS_MISSED
    & (ITL_P50_S <= 0.5 * ITL_TARGET_S)
    & PROMPTS_WERE_COMPUTED
    & (~PREFILL_BREAKS_TTFT).assume(unknown=True)
)
"""Only the tail of ITL misses its target, because of prompts.

False if prefill also makes TTFT miss its target: smaller chunks would delay first tokens further,
so the two targets conflict.
"""

PREFILL_INTERFERENCE = cause(
    "prefill_interference",
    Form(
        gate=(STALLS | TAIL_ONLY)
        & WARMED_UP
        & (Live("preemption_per_s").otherwise(0.0) <= 0.0)
        & NOT_EVICTING,
        start=Number(-0.2),
        terms=(
            term(
                STALL_SHARE,
                0.05,
                1.8,
                "{itl_stall_per_s:inter-token gaps/s} exceed 0.5 s",
                when=STALLS,
            ),
            term(ITL_P99_S, ITL_TARGET_S, 1.5, "ITL P99 is {value:s}", when=TAIL_ONLY),
            term(ITL_P50_S, None, 0.6, "ITL P50 is near its quiet value", when=MEDIAN_HOLDS),
            term(ITL_P50_S, None, -0.6, "ITL P50 is above its quiet value too", when=~MEDIAN_HOLDS),
            term(
                LONG_PER_S,
                1.0 / WINDOW_S,
                0.8,
                "{long} of the window's prefills took 0.5 s or longer",
                when=LONG_WERE_SEEN,
            ),
            term(
                PASSES_PER_S,
                None,
                0.8,
                "{value:prefill passes/s} run apart from decodes, several in a row",
                when=ROWS_PAUSE & ~LONG_WERE_SEEN,
            ),
            term(
                Live("iteration_tokens_mean"),
                None,
                0.6,
                "steps have {value} tokens on average: prompts are under prefill, and no "
                "request ended",
                when=NONE_ENDED & LARGE_STEPS_PAUSE,
            ),
        ),
        levels=((Severity.CRITICAL, FIRST_TOKENS_VERY_LATE), (Severity.WARNING, ~PAUSES_AS_EVER)),
        severity=Severity.INFO,
        instead=(
            (
                STALLS,
                "Long prefills stall decoding: streams stall for more than 0.5 s in "
                "{itl_stall_time_ratio:%} of decode time, ITL P50 is {itl_p50_s:s}.",
            ),
        ),
        say="Prefills delay decoding: ITL P99 is {itl_p99_s:s} while ITL P50 is {itl_p50_s:s}.",
        words=(("long", LONG_PREFILLS.at_least(1.0)),),
        summary="Long prefills stall decoding",
        lever=apart(
            f"Enable chunked prefill or lower {STEP_TOKENS}",
            "; for strict ITL targets run prefill on its own servers (P/D disaggregation).",
        ),
        apart=PAUSES_AS_EVER,
    ),
    Form(
        # A burst of long prompts is over sooner, and is no fault.
        gate=Check("late_behind_prefills", LATE_BEHIND_PREFILLS, Number(120.0), stretch=False)
        & LATE_BEHIND_PREFILLS
        & WARMED_UP
        & NOT_EVICTING,
        terms=(
            term(
                MEAN_TTFT_GROWTH,
                LATE_FROM,
                1.2,
                "mean TTFT is {ttft_mean_s:s}, {value:.1f}x its usual value",
            ),
            term(
                QUEUE_S,
                None,
                0.8,
                "requests queue for {value:s} on average while prompts of up to "
                "{prefill_p99_s:s} are under prefill",
            ),
        ),
        say="Requests queue behind long prefills: TTFT P99 is {ttft_p99_s:s}, its mean "
        "{growth:.1f}x as long as usual; streams do not stall.",
        words=(("growth", MEAN_TTFT_GROWTH),),
        summary="Requests queue behind long prefills",
        lever="Let short prompts pass long ones (--long-prefill-token-threshold), or route "
        "long prompts to replicas of their own.",
        guide=("6.4", "8.5"),
    ),
    # A tail that only misses its target may be usual, and is the baseline for slow steps.
    unusual=(STALLS & ~PAUSES_AS_EVER) | LATE_BEHIND_PREFILLS,
    over=(STALLS_PER_S <= 0.0)
    & (ITL_P99_S <= ITL_TARGET_S).assume(unknown=True)
    & (MEAN_TTFT_GROWTH < LATE_FROM).assume(unknown=True)
    | ALL_STEPS_SLOW,
)

SLO_CONFLICT = cause(
    "slo_conflict",
    Form(
        gate=TTFT_IS_MISSED & ITL_IS_MISSED & NOT_EVICTING & ~SLOW_STEPS_ALONE,
        terms=(
            term(TTFT_P99_S, TTFT_TARGET_S, 1.0, "TTFT P99 {value:s}"),
            term(ITL_P99_S, ITL_TARGET_S, 1.0, "ITL P99 {value:s}"),
        ),
        severity=Severity.CRITICAL,
        say="TTFT P99 ({ttft_p99_s:s}) and ITL P99 ({itl_p99_s:s}) both exceed their "
        "targets: tuning for one worsens the other.",
        lever=apart(
            "Quantize weights or add replicas to take load off",
            "; if both targets still fail, separate prefill and decode (P/D disaggregation).",
        ),
    ),
)


def _prefill_lever(facts: Facts) -> str:
    bound = bound_of(facts)
    if bound is not None and bound.kind == "host":
        return LEVERS["host"]
    return _PREFILL_ACTION(facts)


_PREFILL_ACTION = apart(
    "Check the prefix hit ratio first; then raise the tensor-parallel degree or shorten prompts",
    "; then separate prefill and decode (P/D disaggregation).",
)


def _prefill_delays(facts: Facts) -> str:
    queue_s = facts.values.get("queue_mean_s")
    queue = "" if queue_s is None else f", mean queue time {duration(queue_s)}"
    prefill = duration(facts.get("prefill_mean_s"))
    return f"TTFT is over its target because of prefill: mean prefill {prefill}{queue}."


PREFILL_BOUND = cause(
    "prefill_bound",
    Form(
        gate=TTFT_IS_MISSED & ((PREFILL_OF_WAIT > MOST_OF_WAIT) | ALONE) & ~SLOW_STEPS_ALONE,
        terms=(
            term(TTFT_P99_S, TTFT_TARGET_S, 1.0, "TTFT P99 {value:s}"),
            term(
                PREFILL_S,
                TTFT_TARGET_S,
                1.5,
                "mean prefill is {value:s}, longer than the TTFT target",
                when=ALONE,
            ),
            term(PREFILL_OF_WAIT, MOST_OF_WAIT, 1.5, "{value:%} of TTFT is prefill", when=~ALONE),
            *bound_terms("compute"),
        ),
        say=_prefill_delays,
        lever=_prefill_lever,
    ),
)

DECODE_SHARE = Live("decode_share_ratio")


def _decode_lever(facts: Facts) -> str:
    bound = bound_of(facts)
    return LEVERS[bound.kind] if bound is not None else _DECODE_ACTION


_DECODE_ACTION = f"Quantize weights to FP8, raise {TENSOR_SPLIT}, or add replicas."

_DECODE = Form(
    gate=MEDIAN_IS_MISSED | SLOW_STEPS_ALONE,
    start=Number(0.3),
    terms=(
        term(ITL_P50_S, ITL_TARGET_S, 2.0, "ITL P50 {value:s}"),
        term(
            DECODE_SHARE, 0.5, 0.8, "{value:%} of request time is decode", when=DECODE_SHARE >= 0.5
        ),
        *bound_terms("memory")[:2],
    ),
    levels=((Severity.CRITICAL, SLOW_STEPS_ALONE),),
    instead=(
        (
            SLOW_STEPS_ALONE,
            "Slow steps put TTFT and ITL over their targets: ITL P50 is {itl_p50_s:s}, "
            "P99 {itl_p99_s:s} (target {target_s:s}); TTFT P99 is {ttft_p99_s:s}.",
        ),
    ),
    say="Decode is slow at every percentile: ITL P50 is {itl_p50_s:s} (target {target_s:s}).",
    words=(("target_s", ITL_TARGET_S),),
    summary="Decode is slow at every percentile",
    lever=_decode_lever,
)
_IDLE_GPUS = replace(
    _DECODE,
    gate=GPUS_WAIT_FOR_THE_HOST,
    terms=(*_DECODE.terms[:2], *bound_terms("host")[:1]),
    root=True,
    summary="Decode is slow at every percentile, and the GPUs idle meanwhile",
)
"""GPUs that idle while requests run are not the bottleneck.

Slow steps keep requests longer, so they fill the KV cache and a queue forms.
"""

DECODE_BOUND = cause("decode_bound", _IDLE_GPUS, _DECODE)

TAIL_DRIFT = Live("ttft_p99_p50_drift_ratio")
GROWTH = BATCH.otherwise(0.0) / BaselineValue("running_avg")
"""Batch size divided by its quiet size; unknown after a start until a baseline is learned."""

QUEUE_SHOWS = (Live("queue_share_ratio") >= 0.2) & (Live("waiting_avg") >= 1.0)
LEFT = (TAIL_DRIFT >= 2.0) & GROWTH.known & (TTFT_IS_MISSED | QUEUE_SHOWS)
IN_FLIGHT = Live("running_avg").otherwise(0.0) + Live("waiting_avg").otherwise(0.0)
KNEE = Computed(lambda facts: facts.knee.c_max.expected if facts.knee else None, "the learned knee")
PAST_KNEE_FROM = Computed(
    lambda facts: facts.knee.past_from if facts.knee else None,
    "the upper bound of the learned knee",
)
BEFORE_KNEE_TO = Computed(
    lambda facts: facts.knee.before_to if facts.knee else None,
    "the lower bound of the learned knee",
)
PAST = (IN_FLIGHT > PAST_KNEE_FROM).assume(unknown=False)
BEYOND = TTFT_IS_MISSED & PAST


def _knee(facts: Facts) -> str:
    knee = facts.knee
    if knee is None:
        return ""
    in_flight, c_max = facts.get("running_avg") + facts.get("waiting_avg"), knee.c_max
    return (
        f"{in_flight:.0f} requests in flight; the knee is at {c_max.expected:.0f} "
        f"({c_max.low:.0f} to {c_max.high:.0f}, learned from {knee.points} windows: {knee.basis})"
    )


PAST_KNEE = cause(
    "past_knee",
    Form(
        # After a start the quiet batch size is unknown for a while; a learned knee is enough.
        gate=NOT_EVICTING & (GROWTH >= 1.5).assume(unknown=True) & (LEFT | BEYOND),
        start=Number(-0.2),
        terms=(
            term(
                TAIL_DRIFT,
                2.0,
                1.2,
                "TTFT P99/P50 is {value:.1f}x its value in quiet times",
                when=LEFT,
                signal="ttft_p99_p50_ratio",
            ),
            term(GROWTH, 1.5, 0.6, "the batch is {value:.1f}x its quiet size"),
            term(TTFT_P99_S, TTFT_TARGET_S, 1.0, "TTFT P99 {value:s}", when=TTFT_IS_MISSED),
            term(IN_FLIGHT, KNEE, 1.2, _knee, when=PAST),
            term(IN_FLIGHT, None, -1.2, _knee, when=IN_FLIGHT <= BEFORE_KNEE_TO),
        ),
        levels=((Severity.WARNING, TTFT_IS_MISSED),),
        severity=Severity.INFO,
        instead=(
            (
                LEFT,
                "Past the knee: TTFT P99/P50 is {ttft_p99_p50_drift_ratio:.1f}x its quiet "
                "ratio with the batch at {growth:.1f}x its quiet size.",
            ),
        ),
        say="Past the knee: {in_flight} requests in flight, TTFT P99 is {ttft_p99_s:s} "
        "(target {target_s:s}).",
        words=(("growth", GROWTH), ("in_flight", IN_FLIGHT), ("target_s", TTFT_TARGET_S)),
        lever="Add replicas to take load off this one, or quantize to move the knee.",
    ),
)
