"""Latency that changed although demand and work did not, and no cause explains it. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import inf

from msgspec.structs import replace

from kneewatch.diagnose.account_signals import (
    ANSWERS,
    COMPUTED,
    DEMAND,
    DRAFTS,
    LEARNED_FROM,
    PROMPTS,
    SPEED,
    STOP_DUE,
    STOPPED,
    STREAM,
)
from kneewatch.diagnose.cause import Cause
from kneewatch.diagnose.causes.bottleneck import GPUS_WAIT_FOR_THE_HOST, QUEUE_S, WARMED_UP
from kneewatch.diagnose.causes.common_conditions import (
    BATCH,
    FAR,
    FIRST_TOKENS_LATE,
    FIRST_TOKENS_VERY_LATE,
    ITL_DRIFT,
    ITL_P50_S,
    ITL_TARGET_S,
    KV_USAGE,
    LONG_S,
    MEAN_IS_LATE,
    NOT_EVICTING,
    PINNED,
    PREFILL_BUSY,
    PREFILL_S,
    PREFILLS_REACH,
    QUEUES,
    STALL_SHARE,
    TTFT_DRIFT,
    UNMOVED,
    UNTIL_THEN,
    USUAL_STALL_SHARE,
    USUAL_TTFT_MEAN_S,
    VERY_LATE_FROM,
)
from kneewatch.diagnose.causes.evidence import Facts
from kneewatch.diagnose.causes.record import CauseRecord, Form, cause, term
from kneewatch.rules.conditions import Check, Condition, Number
from kneewatch.rules.formatting import quantity
from kneewatch.rules.quantities import BaselineValue, Live
from kneewatch.rules.rule import ITL, TTFT, Severity

FAR_OFF_HELD, FAR_OFF_S = "far_off", 60.0

EQUAL_PROMPTS = Live(COMPUTED) <= UNMOVED
PROMPTS_AS_USUAL = ((Live(DEMAND) <= UNMOVED) & EQUAL_PROMPTS).assume(unknown=False)
ANSWERS_AS_USUAL = (Live(ANSWERS) <= UNMOVED).assume(unknown=True)
SAME_LOAD = PROMPTS_AS_USUAL & ANSWERS_AS_USUAL
"""Requests, their prompts and their answers are as usual: the load does not explain latency."""

BEYOND_PROMPTS = (
    (Live(DEMAND) <= UNMOVED)
    & (ITL_DRIFT * (1.0 - PREFILL_BUSY) >= UNMOVED * Live(PROMPTS).at_least(1.0))
).assume(unknown=False)
"""Tokens come later than longer prompts explain: a step takes at most as many times longer as its
contexts are, and prefills take their share of the time."""

TOKENS_ALONE = (PROMPTS_AS_USUAL | BEYOND_PROMPTS) & ANSWERS_AS_USUAL
"""The load does not explain late tokens."""

HAS_ROOM = (
    ~PINNED & (KV_USAGE < 0.8) & (PREFILL_BUSY <= 0.75) & (QUEUE_S >= 4.0 * PREFILL_S)
).assume(unknown=False)
"""Seats, KV cache and steps have room: requests that wait for several prefills' time wait for
something else than capacity."""

NO_CROWD = (
    (EQUAL_PROMPTS | (TTFT_DRIFT >= VERY_LATE_FROM * Live(COMPUTED)))
    & (ITL_DRIFT <= UNMOVED)
    & (~QUEUES | HAS_ROOM)
)
"""More requests delay first tokens only by a queue for capacity, or by slower steps; longer prompts
without either hardly by more than they grew."""

PAUSED_FROM = 0.02
STREAMS_PAUSE = (STALL_SHARE >= (FAR * USUAL_STALL_SHARE).at_least(PAUSED_FROM)) & (
    (BaselineValue("itl_p99_s") < 0.25) | (Live("itl_p99_drift_ratio") >= 1.5)
)
"""Pauses of half a second or more take twice their usual share of the streams' time, and are no
usual tail of long gaps. The share is a lower bound, at least 40% of what is lost to pauses of a
second."""

NONE_DRAFTED = (Live("spec_draft_tokens_per_s") <= 0.0).assume(unknown=True)
FEWER_A_STEP = (
    (Live(STREAM) <= 0.75) & (Live(DRAFTS) <= 0.75) & ((Live(STREAM) <= 1 / FAR) | NONE_DRAFTED)
).assume(unknown=False)
"""Streams get half of their usual tokens/s, or 3/4 if none is drafted, as steps yield fewer."""

BATCH_GREW = BATCH >= FAR * BaselineValue("running_avg")
TOKENS_LATE = (ITL_DRIFT >= FAR) & ((Live(SPEED) <= LEARNED_FROM) | BATCH_GREW) | FEWER_A_STEP
"""Tokens come late, and more work in a step (longer contexts) is not the reason. Nor is a larger
batch at an equal load: slow steps bring it about, and it may hide their loss from the account."""

PROMPTS_ARE_SHORT = (BaselineValue("ttft_p99_s") < LONG_S).assume(unknown=False)
"""Nearly all first tokens came sooner than a pause lasts: prompts pause no stream."""

PAUSES = STREAMS_PAUSE & (
    (PROMPTS_AS_USUAL & ((STALL_SHARE >= 0.05) | PROMPTS_ARE_SHORT))
    | (~PREFILLS_REACH).assume(unknown=False)
)
"""Streams pause, and more or longer prompts are not the reason. Longer answers never are."""

PAUSES_HELD = Check("pauses", PAUSES.assume(unknown=False), Number(75.0))
"""Pauses that come back: a single one leaves the window sooner."""

NOTICED_S = 0.1
NOTICED = (
    (Live("ttft_mean_s") - USUAL_TTFT_MEAN_S >= NOTICED_S) | (UNMOVED * Live(DEMAND) >= 1.0)
).assume(unknown=True)
"""Callers notice the delay. At a far lower load less is no news: idle GPUs lower their clocks, and
a first token then takes tens of milliseconds more."""


def _far_off(late: Condition) -> Condition:
    # No load explains that steps yield half of their tokens.
    tokens = TOKENS_LATE & TOKENS_ALONE | FEWER_A_STEP & ((Live(DRAFTS) <= 1 / FAR) | NONE_DRAFTED)
    return (late & (SAME_LOAD | NO_CROWD) & NOTICED | tokens).assume(unknown=False)


LATE_FOR_LONG = ((Live("ttft_mean_s") >= FAR_OFF_S) & FIRST_TOKENS_LATE).assume(unknown=False)
"""First tokens were late for so long before they came that nothing has to be waited for."""

RULED_OUT = (
    ("preemption_per_s", "preemptions"),
    ("waiting_by_capacity", "requests queued for capacity"),
    ("kv_usage_avg_ratio", "KV cache in use"),
    ("prefix_hit_ratio", "prefix hit ratio"),
    (SPEED, "engine speed at equal work"),
    ("gpu_engine_active_ratio", "GPU active"),
)
"""What other causes stand on, and its name."""


def _ruled_out(facts: Facts) -> str:
    """The measured values on which the causes that were ruled out would stand."""
    seen = [
        f"{name} {quantity(key, value)}"
        for key, name in RULED_OUT
        if (value := facts.values.get(key)) is not None
    ]
    return f"no other cause is concluded: {', '.join(seen) or 'nothing else was measured'}"


STOPS_RECUR = (Live(STOPPED) > 0.0).assume(unknown=False)
_STOPS_RECUR = STOPS_RECUR.python()
STOP_LATE_S = 15.0
"""Once the next stop is overdue by so much, they may have ended: a note until that is sure."""

CRAWLS_FROM_S = 0.5
CRAWLS = (
    ~ITL_TARGET_S.known
    & (ITL_P50_S >= CRAWLS_FROM_S)
    & (Live("itl_mean_s") >= CRAWLS_FROM_S)
    & (Live("iteration_tokens_mean") <= (2.0 * BATCH).at_least(128.0)).assume(unknown=True)
    & NOT_EVICTING
).assume(unknown=False)
"""Streams get two tokens a second or fewer, and no prompts in the steps are the reason: slow by any
measure, without a target and without a usual value."""

UNEXPLAINED_LATENCY = cause(
    "unexplained_latency",
    Form(
        gate=~GPUS_WAIT_FOR_THE_HOST
        & (
            (
                Check(FAR_OFF_HELD, _far_off(FIRST_TOKENS_LATE), Number(FAR_OFF_S), stretch=False)
                | LATE_FOR_LONG
            )
            & _far_off(MEAN_IS_LATE)
            | PAUSES_HELD & PAUSES.assume(unknown=False)
        ),
        start=Number(0.2),
        terms=(
            term(
                TTFT_DRIFT,
                FAR,
                1.2,
                "TTFT P50 is {ttft_p50_s:s}, {value:.1f}x its usual value",
                when=FIRST_TOKENS_LATE,
                signal="ttft_p50_s",
            ),
            term(
                ITL_DRIFT,
                FAR,
                1.2,
                "mean inter-token latency is {itl_mean_s:s}, {value:.1f}x its usual value",
                when=TOKENS_LATE & ~FEWER_A_STEP,
                signal="itl_mean_s",
            ),
            term(
                Live(STREAM),
                0.75,
                1.2,
                "a stream gets x{value:.2f} of its usual tokens/s, and a step yields "
                "x{drafts_moved_ratio:.2f} of its usual tokens: fewer draft tokens are "
                "accepted, or speculation is off",
                when=FEWER_A_STEP,
                below=True,
            ),
            term(
                STALL_SHARE,
                PAUSED_FROM,
                1.2,
                "streams pause for more than 0.5 s in {value:%} of decode time, and did not before",
                when=STREAMS_PAUSE,
            ),
            term(
                Live(DEMAND),
                None,
                0.0,
                "requests/s x{value:.1f}, computed prompt tokens x{computed_moved_ratio:.1f}: "
                "the load does not explain it",
            ),
            term(Live("kv_usage_avg_ratio"), None, 0.0, _ruled_out),
        ),
        levels=(
            (Severity.CRITICAL, FIRST_TOKENS_VERY_LATE | (STALL_SHARE >= 0.5) & STREAMS_PAUSE),
        ),
        instead=(
            (
                FIRST_TOKENS_LATE,
                "First tokens take {ttft_drift:.1f}x as long as usual, longer than the load "
                "explains, and no cause is found.",
            ),
            (
                STREAMS_PAUSE,
                "Streams pause for more than 0.5 s in {itl_stall_time_ratio:%} of decode time "
                "at an equal load, which is unusual, and no cause is found.",
            ),
            (
                FEWER_A_STEP,
                "Streams get x{stream_moved_ratio:.2f} of their usual tokens/s, because steps "
                "yield fewer tokens, and no cause is found.",
            ),
        ),
        say="Tokens take {itl_mean_drift_ratio:.1f}x as long as usual, longer than the "
        "load explains, and no cause is found.",
        words=(("ttft_drift", TTFT_DRIFT),),
        summary="Latency is far from usual, the load does not explain it, and no cause is found",
        lever="Look at vLLM's log (compilation, warnings), at the host (`top`) and the GPUs' "
        "clocks (`nvidia-smi -q -d CLOCK,PERFORMANCE`), and at what clients ask for since "
        "then. If vLLM was started with --profiler-config, record a trace: POST "
        "/start_profile, then /stop_profile. If this latency is fine, state a target: "
        "--slo-ttft 2s --slo-itl 100ms, or ttft_p99_s and itl_p99_s in [slo].",
    ),
    Form(
        gate=STOPS_RECUR,
        start=Number(0.2),
        terms=(
            term(
                Live(STOPPED),
                0.05,
                1.2,
                "the engine stops each {stops_every_s:s}, {value:%} of the time: requests run, "
                "no token comes, and no prompt is long enough to explain it",
            ),
            term(Live("kv_usage_avg_ratio"), None, 0.0, _ruled_out),
        ),
        levels=((Severity.WARNING, Live(STOP_DUE) >= -STOP_LATE_S),),
        severity=Severity.INFO,
        say="The engine stops again and again, each {stops_every_s:s} for "
        "{stopped_ratio:%} of that time, and no cause is found.",
        summary="The engine stops again and again, and no cause is found",
        lever="Look in vLLM's log at those times (compilation, NCCL, a KV connector). `py-spy "
        "dump` of the engine's process during a stop shows what it waits for.",
    ),
    Form(
        gate=CRAWLS & WARMED_UP,
        start=Number(0.2),
        terms=(
            term(
                Live("itl_mean_s"),
                CRAWLS_FROM_S,
                1.2,
                "mean inter-token latency is {value:s}; steps have {iteration_tokens_mean} "
                "tokens on average",
            ),
            term(Live("kv_usage_avg_ratio"), None, 0.0, _ruled_out),
        ),
        say="Streams get {per_s:.2g} tokens/s: a token takes {itl_mean_s:s}, and no cause "
        "is found.",
        words=(("per_s", 1.0 / Live("itl_mean_s")),),
        summary="Streams get two tokens/s or fewer, and no cause is found",
        lever="Look in vLLM's log for a fallback (attention backend, CPU offloading, eager "
        "mode), at `nvidia-smi` for the GPUs' clocks and other processes, and at the host's "
        "CPU (`top`). If this speed is fine, state a target: --slo-itl 2s.",
    ),
)

LEAVES_S = 40.0
"""So long after the window, the scrapes that bound it and the account's samples are gone, too."""

LOAD_MOVED = frozenset({"workload_drift", "runaway_generation"})
"""A load that changed explains latency though it is only a note; other notes do not."""

LATENCIES = ("itl_stall_time_ratio", "itl_mean_s", "ttft_mean_s")
_ARE_LATE = tuple(
    late.assume(unknown=False).python()
    for late in (STREAMS_PAUSE, ITL_DRIFT >= FAR, TTFT_DRIFT >= FAR)
)

STAYS = 0.9
"""Latency stays if each of these has at least this share of its value at a cause's end."""

LATE = frozenset({TTFT, ITL})
_latency_is_far = ((TTFT_DRIFT >= FAR) | (ITL_DRIFT >= FAR)).assume(unknown=False).python()


class Explained:
    """When other causes last explained latency: that long ago, or longer, it may be unexplained.

    The window still holds what such a cause did for one window after its end. Late tokens or first
    tokens that are as late after half a window are not what such a cause has left.
    """

    def __init__(self, records: Mapping[str, CauseRecord]) -> None:
        self._records = records
        self._last: dict[str, tuple[float, tuple[float, ...]]] = {}
        self._now: tuple[float, ...] = ()

    def lasting(self, concluded: Sequence[Cause], facts: Facts) -> Collection[str]:
        """Ids of causes that are not concluded, while latency is as late as when they were and
        nothing else explains it: noise hides such a cause for a moment."""
        self._now = tuple(map(facts.get, LATENCIES))
        others = [each for each in concluded if each.id != UNEXPLAINED_LATENCY.id]
        if any(self._explains(each, facts) for each in others) or not _latency_is_far(facts):
            return ()
        return [
            each
            for each, (_, then) in self._last.items()
            if all(now >= STAYS * left for now, left in zip(self._now, then, strict=False))
        ]

    def without(self, causes: Sequence[Cause], facts: Facts) -> list[Cause]:
        """The causes of the scrape of `lasting`, without unexplained latency if another one
        explains it. A load that changed is a note while, and soon after, another cause explains
        latency."""
        for each in causes:
            if each.seen_s in (None, facts.now_s) and self._explains(each, facts):
                self._last[each.id] = (facts.now_s, self._now)
        ours, load = UNEXPLAINED_LATENCY.id, "workload_drift"
        if {ours, load}.isdisjoint(cause.id for cause in causes):
            return list(causes)
        unexplained = self._is_left({ours}, facts) or _STOPS_RECUR(facts)
        noted = not self._is_left({ours, load}, facts)
        return [
            _as_note(cause) if noted and cause.id == load else cause
            for cause in causes
            if cause.id != ours or unexplained
        ]

    def _is_left(self, ids: Collection[str], facts: Facts) -> bool:
        """Whether latency is left to these causes: no other one explains it, or did lately."""
        others = (last for name, last in self._last.items() if name not in ids)
        last_s, then = max(others, default=(-inf, ()))
        over_s = facts.now_s - last_s
        stays = over_s > facts.window_s / 2 and any(
            is_late(facts) and now >= STAYS * left
            for is_late, now, left in zip(_ARE_LATE, self._now, then, strict=False)
        )
        return stays or over_s > facts.window_s + LEAVES_S

    def _explains(self, cause: Cause, facts: Facts) -> bool:
        """Whether it explains late tokens or first tokens."""
        record = self._records[cause.id]
        is_told = cause.severity >= Severity.WARNING or cause.id in LOAD_MOVED
        return is_told and not LATE.isdisjoint(record.moves) and record.is_unusual(facts)


def _as_note(cause: Cause) -> Cause:
    """A load that changed, beside the cause that explains latency: that cause tells of it."""
    evidence = tuple(each for each in cause.evidence if each.signal not in LATENCIES)
    summary, *latency = cause.summary.partition("; ")
    return replace(
        cause,
        severity=Severity.INFO,
        summary=f"{summary}." if any(latency) else summary,
        evidence=evidence,
        lever=cause.lever.replace(UNTIL_THEN, ""),
    )
