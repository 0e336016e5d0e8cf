"""Workload causes: drift from the profile, runaway generation, unused capacity. Pure.

Guide 9.1, 9.2, 9.4.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import copysign, inf

from msgspec.structs import replace

from kneewatch.diagnose.account_signals import (
    ANSWERS,
    CHANGED_FROM,
    COMPUTED,
    DEMAND,
    MOVED_FOR,
    PROMPTS,
    SPEED,
)
from kneewatch.diagnose.cause import Cause
from kneewatch.diagnose.causes.common_conditions import (
    BATCH,
    FAR,
    ITL_DRIFT,
    ITL_TARGET_S,
    MEAN_IS_LATE,
    MEAN_TTFT_GROWTH,
    QUEUES,
    SERVED,
    TTFT_DRIFT,
    TTFT_TARGET_S,
    UNMOVED,
    UNTIL_THEN,
    VERY_LATE_S,
    WINDOW_S,
    at_hour,
)
from kneewatch.diagnose.causes.evidence import Case, Facts
from kneewatch.diagnose.causes.record import Computed, Finds, Form, cause, term
from kneewatch.diagnose.lengths import (
    ENDLESS,
    KEYS,
    LENGTH_POINTS,
    RATE,
    RATE_MIN,
    SHIFTS,
    WORDS,
    Departure,
    LiveWorkload,
    more_than_chance,
)
from kneewatch.diagnose.slow_quantities import SPEC_ACCEPTED, STEPS, WORK_GROWTH, goes_on, straight
from kneewatch.rules.conditions import Check, Number
from kneewatch.rules.formatting import duration, figure, number, percent, span
from kneewatch.rules.quantities import BaselineValue, Live
from kneewatch.rules.rule import Severity

NAMES = ("p50", "p95", "p99")

TTFT_MEAN_S, ITL_MEAN_S = Live("ttft_mean_s"), Live("itl_mean_s")

MORE_WORK = {
    DEMAND: "{:.1f}x as many requests/s arrive as usual",
    PROMPTS: "prompts are {:.1f}x as long as usual",
    COMPUTED: "{:.1f}x as many prompt tokens are computed for each request as usual",
    ANSWERS: "answers are {:.1f}x as long as usual",
}

GREW_FOR_S = 60.0
LONGER_FROM = {DEMAND: inf, PROMPTS: 3.0, COMPUTED: inf, ANSWERS: 3.0}
"""Without a profile, prompts or answers that are so many times as long as usual, for so long, are
another workload."""

LATE_TTFT_S, LATE_ITL_S = 1.0, 0.1
"""Latency that a change of the load makes far longer harms from these means on: people wait for the
first words, and read faster than tokens come."""

CROWD = QUEUES | (ITL_DRIFT >= UNMOVED)
"""More load delays first tokens by a queue for capacity, or by slower steps."""

HURTS = Check(
    "load_hurts",
    (
        (
            (MEAN_IS_LATE & (TTFT_MEAN_S >= LATE_TTFT_S) & CROWD)
            | ((MEAN_TTFT_GROWTH >= FAR) & (TTFT_MEAN_S >= VERY_LATE_S))
        ).assume(unknown=False)
        & ~TTFT_TARGET_S.known
        | ((ITL_DRIFT >= FAR) & (ITL_MEAN_S >= LATE_ITL_S) & ~ITL_TARGET_S.known).assume(
            unknown=False
        )
    ),
    Number(60.0),
    stretch=False,
)
"""For a minute latency has been far longer than usual, and longer than people like: longer prompts
alone explain that up to a wait that nobody likes."""

SLOWED = (Live(SPEED) * CHANGED_FROM <= 1.0).assume(unknown=False)
"""The engine's own speed explains later tokens."""

_hurts = (HURTS & ~SLOWED).python()
LATE = (
    ("first tokens take", TTFT_MEAN_S, TTFT_DRIFT.read(), LATE_TTFT_S),
    ("tokens take", ITL_MEAN_S, ITL_DRIFT.read(), LATE_ITL_S),
)


def workload_drift(facts: Facts) -> Cause | None:
    """Prompt or answer lengths, or the arrival rate, exceed the stated profile. Without a profile:
    lengths are far above their usual ones."""
    live = facts.workload
    if live is None:
        return _more_work(facts)
    # Read from the signals, so that counterfactuals can vary them.
    shifts = {
        side: replace(shift, shift_ratio=copysign(facts.get(SHIFTS[side]), shift.shift_ratio))
        for side, shift in live.lengths.items()
    }
    left = {side: shift for side, shift in shifts.items() if shift.real}
    rate = facts.get(RATE)
    more = rate >= RATE_MIN and more_than_chance(rate * live.expected, live.expected)
    if not left and not more:
        return None
    case = Case(
        "workload_drift",
        "The workload no longer matches its sizing profile: "
        f"{drift_text(left, rate if more else None)}.",
        _lever(live, tuple(left), more=more),
        Severity.INFO,
        log_odds=0.4,
    )
    period = f"the last {span(live.span_s)}"
    for side, shift in left.items():
        text = departure_text(shift, WORDS[side], period)
        case.weigh(SHIFTS[side], abs(shift.shift_ratio), shift.least_ratio, 1.2, text)
    if more:
        text = (
            f"{number(live.requests / live.span_s)} requests/s in {period}; this engine's share of "
            f"the peak in {live.origin} is {number(live.expected / live.span_s)}"
        )
        case.weigh(RATE, rate, RATE_MIN, 1.2, text)
    return case.close()


def _more_work(facts: Facts) -> Cause | None:
    hurts = _hurts(facts)
    grew = [
        (key, ratio, words.format(ratio))
        for key, words in MORE_WORK.items()
        if (ratio := facts.get(key)) >= (UNMOVED if hurts else LONGER_FROM[key])
    ]
    if not grew or facts.get(MOVED_FOR) < GREW_FOR_S:
        return None
    late = [
        (
            signal.key,
            facts.get(signal.key),
            from_s,
            f"{words} {figure(round(times, 1))}x as long as usual",
        )
        for words, signal, growth, from_s in LATE
        if hurts and (times := growth(facts) or 0.0) >= FAR
    ]
    case = Case(
        "workload_drift",
        f"Requests ask for more work: {' and '.join(text for *_, text in grew)}"
        f"{'; ' * bool(late)}{' and '.join(text for *_, text in late)}.",
        "Find the client, template or model version that changed"
        f"{UNTIL_THEN * bool(late)}. If it stays, put the measured lengths into a profile and "
        "size again: kneewatch size --plan PROFILE.",
        Severity.WARNING if late else Severity.INFO,
        log_odds=0.4,
    )
    for key, ratio, text in grew:
        case.weigh(key, ratio, UNMOVED if hurts else LONGER_FROM[key], 1.2, text)
    for key, value_s, from_s, text in late:
        case.weigh(key, value_s, from_s, 1.2, f"{text}: {duration(value_s)} (mean)")
    return case.close()


def drift_text(left: Mapping[str, Departure], rate: float | None) -> str:
    """What differs from the profile: lengths by side, and the rate against the peak."""
    parts: list[str] = []
    for word, longer in (("longer", True), ("shorter", False)):
        sides = [WORDS[side] for side, shift in left.items() if (shift.shift_ratio > 0) == longer]
        parts += [f"{' and '.join(sides)} are {word}"] if sides else []
    parts += [] if rate is None else [f"arrivals are {rate:.1f}x its peak"]
    return ", ".join(parts)


def departure_text(shift: Departure, what: str, period: str) -> str:
    """The share of requests beyond a length, the profile's share, and what chance explains.

    `what` is prompts or answers; `period` is the time in which they were counted.
    """
    longer = shift.shift_ratio > 0
    tokens = shift.point.most if longer else shift.point.least
    return (
        f"{percent(shift.seen_ratio)} of {what} in {period} are "
        f"{'above' if longer else 'at or below'} {shift.edge:g} tokens; the profile has "
        f"{percent(shift.may_ratio)} {'above' if longer else 'below'} its "
        f"P{100 * shift.point.ratio:.0f} of {tokens:g}, and chance explains at most "
        f"{percent(shift.chance_ratio)} more"
    )


def _lever(live: LiveWorkload, sides: Sequence[str], *, more: bool) -> str:
    changes = [
        f"{KEYS[side]}_{name}_tokens = {_rounded(tokens)}"
        for side in sides
        for name, tokens in zip(NAMES, live.live[side], strict=True)
        if tokens is not None and not live.grown
    ]
    changes += ["newly measured lengths of a session's first call"] if sides and live.grown else []
    changes += ["the newly measured weekly peak_requests_per_s"] if more else []
    return (
        f"Update {live.origin} with {', '.join(changes)}; then run kneewatch size --plan "
        f"{live.origin}."
    )


def _rounded(tokens: float) -> str:
    """Rounds to two digits: a histogram's buckets are no more exact."""
    return f"{float(f'{tokens:.2g}'):.0f}"


WORKLOAD_DRIFT = cause("workload_drift", judge=workload_drift, unusual=HURTS)


# --- Runaway generation ---------------------------------------------------------------------------

AT_LIMIT, AT_LIMIT_BEFORE = Live("finished_length_ratio"), BaselineValue("finished_length_ratio")
MORE_AT_LIMIT = Live("finished_length_drift_points")
MANY_FINISHED = SERVED * WINDOW_S >= 40.0
"""With fewer finished requests, the share varies by more than LENGTH_POINTS by chance."""

RAMBLING = MORE_AT_LIMIT >= LENGTH_POINTS
"""Far more outputs end at their limit than in quiet times."""

CAPPED = AT_LIMIT >= LENGTH_POINTS
"""Many outputs end at their limit, either now or always."""

BEYOND = Computed(
    lambda facts: facts.endless.shift_ratio if facts.endless else None,
    "the share of outputs far beyond the stated profile",
)
BEYOND_CHANCE = Computed(
    lambda facts: facts.endless.chance_ratio if facts.endless else None,
    "the share that chance explains",
)
LONGER, MORE_REQUESTS = Live(ANSWERS), Live(DEMAND) >= 1.3
ALWAYS_SO = (MORE_AT_LIMIT < LENGTH_POINTS).assume(unknown=False)
LEVER = (
    "Look for prompts that make the model ramble or repeat; cap outputs per use case at the "
    "gateway."
)


def _stated(facts: Facts) -> str:
    beyond = facts.endless
    if beyond is None:
        return ""
    point = beyond.point
    return (
        f"{percent(facts.get('finished_length_ratio'))} of requests hit their output limit, and "
        f"{percent(beyond.seen_ratio)} of the answers exceed twice the stated "
        f"P{100 * point.ratio:.0f} of {point.most / ENDLESS:g} tokens."
    )


def _beyond(facts: Facts) -> str:
    beyond = facts.endless
    if beyond is None:
        return ""
    return (
        f"{percent(beyond.seen_ratio)} of the answers are above {beyond.edge:g} tokens; the "
        f"profile has {percent(beyond.may_ratio)} above {beyond.point.most / ENDLESS:g}, and "
        f"chance explains at most {percent(beyond.chance_ratio)} more"
    )


RUNAWAY_GENERATION = cause(
    "runaway_generation",
    Form(
        gate=MANY_FINISHED & CAPPED & (BEYOND >= LENGTH_POINTS) & (BEYOND >= BEYOND_CHANCE),
        start=Number(-0.3),
        terms=(
            term(AT_LIMIT, LENGTH_POINTS, 1.2, "{value:%} of requests hit their output limit"),
            term(BEYOND, BEYOND_CHANCE, 0.9, _beyond, signal="output_tokens_mean"),
            term(
                AT_LIMIT_BEFORE,
                None,
                -0.6,
                "{value:%} hit it in quiet times too: the profile may be of another workload",
                when=ALWAYS_SO,
                signal="finished_length_ratio",
            ),
        ),
        levels=((Severity.WARNING, ~ALWAYS_SO),),
        severity=Severity.INFO,
        say=_stated,
        summary="Answers are far longer than stated, and many hit their output limit",
        lever=LEVER,
        apart=ALWAYS_SO,
    ),
    Form(
        gate=MANY_FINISHED & RAMBLING & (LONGER >= 1.1).assume(unknown=True),
        start=Number(-0.3),
        terms=(
            term(
                MORE_AT_LIMIT,
                LENGTH_POINTS,
                1.5,
                "{points} percentage points more requests than in quiet times hit their "
                "output limit",
                signal="finished_length_ratio",
            ),
            term(
                LONGER,
                1.3,
                1.2,
                "outputs are {value:.1f}x as long as in quiet times",
                signal="output_tokens_mean",
            ),
        ),
        say="{finished_length_ratio:%} of requests hit their output limit, {before:%} in "
        "quiet times.",
        words=(("before", AT_LIMIT_BEFORE), ("points", 100.0 * MORE_AT_LIMIT)),
        summary="Far more requests than usual hit their output limit",
        lever=LEVER,
        # A queue has another reason where answers are hardly longer, or requests are more.
        apart=((LONGER < 1.3) | MORE_REQUESTS).assume(unknown=False),
    ),
)


# --- Unused capacity ------------------------------------------------------------------------------

GPU_BUSY = Live("gpu_engine_active_ratio")
KV_PEAK = Live("kv_usage_max_ratio")

UNDERUSED = cause(
    "underused",
    Form(
        gate=Finds("IDLE-HOURS") | Finds("FLEET-LOW"),
        start=Number(0.5),
        terms=(
            term(
                BATCH.otherwise(0.0),
                0.5,
                1.0,
                "{value:.2f} requests running on average",
                below=True,
            ),
            term(GPU_BUSY, 0.4, 1.0, "GPU {value:%} busy", when=GPU_BUSY < 0.4, below=True),
            term(GPU_BUSY, 0.4, -1.0, "GPU {value:%} busy", when=GPU_BUSY >= 0.4),
        ),
        severity=Severity.INFO,
        instead=((BATCH.known, "Underused for hours: {running_avg:.1f} requests running now."),),
        say="Underused for hours.",
        lever="Fill the hours with batch work, consolidate, or keep fewer replicas warm.",
    ),
)

KV_OVERPROVISIONED = cause(
    "kv_overprovisioned",
    Form(
        gate=Finds("KV-UNUSED"),
        start=Number(0.5),
        terms=(
            term(
                KV_PEAK.otherwise(0.0),
                0.5,
                1.0,
                "KV cache {value:%} full at the window's peak",
                below=True,
            ),
        ),
        severity=Severity.INFO,
        instead=((KV_PEAK.known, "KV cache at most half full for hours (peak now {peak:%})."),),
        say="KV cache at most half full for hours.",
        words=(("peak", KV_PEAK),),
        lever="Allow more sequences, or serve from fewer or smaller GPUs.",
    ),
)


# --- Draft acceptance that decays over hours ------------------------------------------------------

ACCEPTED, USUAL_ACCEPTED = Live(SPEC_ACCEPTED.signal), Live("spec_accepted_usual_tokens")
ACCEPTED_TREND_S = STEPS * SPEC_ACCEPTED.span_s
FALL = -1.0 * Live(SPEC_ACCEPTED.growth) / Live(SPEC_ACCEPTED.before)
SAME_TRAFFIC = ((WORK_GROWTH <= 0.25) & (WORK_GROWTH >= -0.25)).assume(unknown=True)
"""The load changed by at most a quarter over the last hours.

Without a weekly pattern, a larger change may mean that users ask for something else.
"""

UNUSUAL = (ACCEPTED < 0.97 * USUAL_ACCEPTED) | (~USUAL_ACCEPTED.known & SAME_TRAFFIC)


def _decayed(facts: Facts) -> str:
    before, level = facts.get(SPEC_ACCEPTED.before), facts.get(SPEC_ACCEPTED.level)
    return (
        f"{before:.2f} draft tokens accepted per draft at "
        f"{at_hour(facts.now_s - ACCEPTED_TREND_S)}, {level:.2f} in the last hour"
    )


SPEC_ACCEPTANCE_DRIFT = cause(
    "spec_acceptance_drift",
    Form(
        gate=goes_on(SPEC_ACCEPTED) & (FALL >= 0.05) & UNUSUAL,
        terms=(
            term(FALL, 0.05, 1.2, _decayed),
            straight(SPEC_ACCEPTED, "decay"),
            term(USUAL_ACCEPTED, None, 0.5, "at this hour of earlier weeks it was {value:.2f}"),
            term(
                ACCEPTED,
                None,
                0.0,
                "this hour in earlier weeks is not known: a daily pattern is not ruled out",
                when=~USUAL_ACCEPTED.known,
            ),
        ),
        severity=Severity.INFO,
        say=lambda facts: f"Draft acceptance decays: {_decayed(facts)}.",
        lever="Compare the prompts of both hours. Retrain or replace the draft for the new "
        "traffic, or draft fewer tokens, before speculation stops paying.",
    ),
)
