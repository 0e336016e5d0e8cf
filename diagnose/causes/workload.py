"""Causes in the workload: drift from the profile, runaway generation, unused capacity. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import copysign

from kneewatch.diagnose.causes.common_conditions import BATCH, SERVED, WINDOW_S
from kneewatch.diagnose.causes.evidence import Case, Cause, Facts
from kneewatch.diagnose.causes.record import (
    CauseRecord,
    Finds,
    Form,
    Level,
    Sidecar,
    SidecarHolds,
    term,
)
from kneewatch.diagnose.learned.live_workload import RATE, SHIFTS, LiveWorkload
from kneewatch.diagnose.learned.output_lengths import ENDLESS
from kneewatch.diagnose.workload.drift import FALSE_ALARM, Departure, more_than_chance
from kneewatch.diagnose.workload.stated_workload import KEYS, RATE_MIN, WORDS
from kneewatch.rules.baseline import LENGTHS, LOAD
from kneewatch.rules.conditions import ALWAYS, Number
from kneewatch.rules.quantities import Signal, Usually
from kneewatch.rules.rule import Severity

NAMES = ("p50", "p95", "p99")


def workload_drift(facts: Facts) -> Cause | None:
    """Lengths of prompts or answers, or a rate held, that are not the stated profile's."""
    live = facts.workload
    if live is None:
        return None
    # The signals are looked at, so that turning them back tells what the cause hangs on.
    moved = {
        side: replace(one, shift_ratio=copysign(facts.get(SHIFTS[side]), one.shift_ratio))
        for side, one in live.lengths.items()
    }
    left = {side: one for side, one in moved.items() if one.real}
    rate = facts.get(RATE)
    more = rate >= RATE_MIN and more_than_chance(rate * live.expected, live.expected)
    if not left and not more:
        return None
    case = Case(
        "workload_drift",
        "The workload left the profile that the size was computed for: "
        f"{told_of(left, rate if more else None)}.",
        _lever(live, tuple(left), more=more),
        ("9.1",),
        Severity.INFO,
        log_odds=0.4,
    )
    when = _span(live.span_s)
    for side, one in left.items():
        text = departure_words(one, WORDS[side], when)
        case.weigh(SHIFTS[side], abs(one.shift_ratio), one.least_ratio, 1.2, text)
    if more:
        text = (
            f"{live.requests / live.span_s:.3g} requests/s over {when}; its share of the peak "
            f"in {live.origin} is {live.expected / live.span_s:.3g}"
        )
        case.weigh(RATE, rate, RATE_MIN, 1.2, text)
    return case.close()


def told_of(left: Mapping[str, Departure], rate: float | None) -> str:
    """In a few words, what left the profile: lengths by side, and the rate over the stated peak."""
    told: list[str] = []
    for word, longer in (("longer", True), ("shorter", False)):
        sides = [WORDS[side] for side, one in left.items() if (one.shift_ratio > 0) == longer]
        told += [f"{' and '.join(sides)} are {word}"] if sides else []
    told += [] if rate is None else [f"arrivals are {rate:.1f} times its peak"]
    return ", ".join(told)


def departure_words(one: Departure, what: str, when: str) -> str:
    """What is seen, what is stated, and what chance may make of it."""
    longer = one.shift_ratio > 0
    tokens = one.point.most if longer else one.point.least
    return (
        f"{100 * one.seen_ratio:.0f} % of the {what} of {when} are "
        f"{'above' if longer else 'at or below'} {one.edge:g} tokens, where the profile has "
        f"{100 * one.may_ratio:.0f} % {'above' if longer else 'below'} its "
        f"P{100 * one.point.ratio:.0f} of {tokens:g}; chance adds {100 * one.chance_ratio:.0f} % "
        f"at most but once in {1 / FALSE_ALARM:,.0f}"
    )


def _span(span_s: float) -> str:
    return f"{span_s:.0f} s" if span_s < 120 else f"{span_s / 60:.0f} min"


def _lever(live: LiveWorkload, sides: Sequence[str], *, more: bool) -> str:
    anew = [
        f"{KEYS[side]}_{name}_tokens = {_rounded(tokens)}"
        for side in sides
        for name, tokens in zip(NAMES, live.live[side], strict=True)
        if tokens is not None and not live.grown
    ]
    anew += ["the lengths of a session's first call measured anew"] if sides and live.grown else []
    anew += ["peak_requests_per_s of a week measured anew"] if more else []
    return f"Size again: kneewatch size --plan {live.origin}, in it {', '.join(anew)}."


def _rounded(tokens: float) -> str:
    """To two digits: within a bucket nobody knows more."""
    return f"{float(f'{tokens:.2g}'):.0f}"


WORKLOAD_DRIFT = CauseRecord(
    id="workload_drift",
    title="Workload left its profile",
    means="Lengths of prompts or answers, or a rate, are not the stated profile's.",
    judge=workload_drift,
    fleet=True,
    sidecar="the profile that the size was computed for (workload_profile) is no series",
)


# --- Causes in the workload and in what was bought for it: guide 9.2, 9.4 -------------------------


AT_LIMIT, AT_LIMIT_BEFORE = Signal("finished_length_ratio"), Usually("finished_length_ratio")
MORE_AT_LIMIT = Signal("finished_length_drift_points")
LENGTH_POINTS = 0.2
MANY_FINISHED = SERVED * WINDOW_S >= 40.0
"""Of fewer requests a share swings by more than that by chance."""

RAMBLING = MORE_AT_LIMIT >= LENGTH_POINTS
"""More outputs than in quiet times end at their limit, by so much that it matters."""

CAPPED = AT_LIMIT >= LENGTH_POINTS
"""So many end at their limit that it would matter if it were new."""

OF_LENGTHS = "lengths are compared as whole histograms, over time"
OF_PROFILE = "the stated workload_profile is no series"
SHIFT = Sidecar(
    lambda facts: facts.lengths.shift_ratio if facts.lengths else None,
    OF_LENGTHS,
    "the share of outputs that got longer",
)
SHIFT_CHANCE = Sidecar(
    lambda facts: facts.lengths.chance_ratio if facts.lengths else None,
    OF_LENGTHS,
    "the share that chance explains",
)
UNSHIFTED = SidecarHolds(
    lambda facts: (
        facts.lengths is not None and not (facts.lengths.real and facts.lengths.shift_ratio > 0)
    ),
    OF_LENGTHS,
    "the distribution of output lengths is known and has not moved up",
)
BEYOND = Sidecar(
    lambda facts: facts.endless.shift_ratio if facts.endless else None,
    OF_PROFILE,
    "the share of outputs far beyond the stated profile",
)
BEYOND_CHANCE = Sidecar(
    lambda facts: facts.endless.chance_ratio if facts.endless else None,
    OF_PROFILE,
    "the share that chance explains",
)
LONGER = Signal("output_tokens_mean") / Usually("output_tokens_mean")
ALWAYS_SO = (MORE_AT_LIMIT < LENGTH_POINTS).assume(unknown=False)
LEVER = (
    "Look for prompts that make the model ramble or repeat; cap outputs per use case at the "
    "gateway."
)


def _longer(facts: Facts) -> str:
    shift = facts.lengths
    if shift is None:
        return ""
    return (
        f"{shift.shift_ratio:.0%} more outputs than in quiet times are above {shift.edge:g} "
        f"tokens; chance explains at most {shift.chance_ratio:.0%}"
    )


def _stated(facts: Facts) -> str:
    beyond = facts.endless
    if beyond is None:
        return ""
    point = beyond.point
    return (
        f"{facts.get('finished_length_ratio'):.0%} of requests hit their output limit, and "
        f"{beyond.seen_ratio:.0%} of the answers exceed twice the stated P{100 * point.ratio:.0f} "
        f"of {point.most / ENDLESS:g} tokens."
    )


def _beyond(facts: Facts) -> str:
    beyond = facts.endless
    if beyond is None:
        return ""
    return (
        f"{beyond.seen_ratio:.0%} of the answers are above {beyond.edge:g} tokens; the profile has "
        f"{beyond.may_ratio:.0%} above {beyond.point.most / ENDLESS:g}, and chance explains at "
        f"most {beyond.chance_ratio:.0%} more"
    )


RUNAWAY_GENERATION = CauseRecord(
    id="runaway_generation",
    title="Outputs ran into their limit",
    means="Outputs hit their limit far more often than before, and are longer; or they go far "
    "beyond what is stated of them, which shows from the start on.",
    forms=(
        Form(
            gate=MANY_FINISHED & CAPPED & (BEYOND >= LENGTH_POINTS) & (BEYOND >= BEYOND_CHANCE),
            start=Number(-0.3),
            terms=(
                term(AT_LIMIT, LENGTH_POINTS, 1.2, "{value:%} of requests end at their limit"),
                term(BEYOND, BEYOND_CHANCE, 0.9, _beyond, signal="output_tokens_mean"),
                term(
                    AT_LIMIT_BEFORE,
                    None,
                    -0.6,
                    "{value:%} did in quiet times: the profile may be another workload's",
                    when=ALWAYS_SO,
                    signal="finished_length_ratio",
                ),
            ),
            levels=(Level(Severity.WARNING, ~ALWAYS_SO), Level(Severity.INFO)),
            say=((ALWAYS, _stated),),
            summary="Far more requests than stated run into their output limit",
            lever=LEVER,
            guide=("9.4",),
            name="stated",
            sidecar=OF_PROFILE,
        ),
        Form(
            gate=MANY_FINISHED & RAMBLING & ~UNSHIFTED,
            start=Number(-0.3),
            terms=(
                term(
                    MORE_AT_LIMIT,
                    LENGTH_POINTS,
                    1.5,
                    "{points} points more of the requests end at their limit",
                    signal="finished_length_ratio",
                ),
                term(
                    SHIFT,
                    SHIFT_CHANCE,
                    0.6,
                    _longer,
                    signal="output_tokens_mean",
                    sidecar=OF_LENGTHS,
                ),
                term(
                    LONGER,
                    1.3,
                    1.2,
                    "outputs are {value:.1f}x as long as in quiet times",
                    when=LONGER >= 1.3,
                    signal="output_tokens_mean",
                ),
                term(
                    LONGER,
                    1.3,
                    -1.0,
                    "outputs are {value:.1f}x as long as in quiet times",
                    when=LONGER < 1.3,
                    below=True,
                    signal="output_tokens_mean",
                ),
            ),
            levels=(Level(Severity.WARNING),),
            say=(
                (
                    ALWAYS,
                    "{finished_length_ratio:%} of requests hit their output limit, {before:%} in "
                    "quiet times.",
                ),
            ),
            words=(("before", AT_LIMIT_BEFORE), ("points", 100.0 * MORE_AT_LIMIT)),
            summary="Far more requests than before run into their output limit",
            lever=LEVER,
            guide=("9.4",),
        ),
    ),
    explains=("underused", "workload_drift", "slo_conflict"),
    covers=("OUTPUT-CAP",),
    moves=(LENGTHS, LOAD),
    levers=("output_cap",),
)

OF_HOURS = "it is a matter of hours: the findings' alerts and the weekly report have it"
GPU_BUSY = Signal("gpu_engine_active_ratio")
KV_PEAK = Signal("kv_usage_max_ratio")

UNDERUSED = CauseRecord(
    id="underused",
    title="Underused",
    means="Paid for and idle, for hours; a note on a live view.",
    forms=(
        Form(
            gate=Finds("IDLE-HOURS") | Finds("FLEET-LOW"),
            start=Number(0.5),
            terms=(
                term(
                    BATCH.otherwise(0.0),
                    0.5,
                    1.0,
                    "{value:.2f} requests in the batch",
                    below=True,
                    signal="running_avg",
                ),
                term(GPU_BUSY, 0.4, 1.0, "GPU {value:%} busy", when=GPU_BUSY < 0.4, below=True),
                term(GPU_BUSY, 0.4, -1.0, "GPU {value:%} busy", when=GPU_BUSY >= 0.4),
            ),
            levels=(Level(Severity.INFO),),
            say=(
                (
                    ALWAYS,
                    "Idle for hours: {running:.1f} requests run on average.",
                ),
            ),
            words=(("running", BATCH.otherwise(0.0)),),
            summary="Idle for hours",
            lever="Fill the hours with batch work, consolidate, or keep fewer replicas warm.",
            guide=("9.2", "9.3"),
        ),
    ),
    levers=("fewer_replicas",),
    fleet=True,
    sidecar=OF_HOURS,
)

KV_OVERPROVISIONED = CauseRecord(
    id="kv_overprovisioned",
    title="KV cache larger than needed",
    means="KV memory that is never used at the peak, for hours.",
    forms=(
        Form(
            gate=Finds("KV-UNUSED"),
            start=Number(0.5),
            terms=(
                term(
                    KV_PEAK.otherwise(0.0),
                    0.5,
                    1.0,
                    "{value:%} at the window's peak",
                    below=True,
                    signal="kv_usage_max_ratio",
                ),
            ),
            levels=(Level(Severity.INFO),),
            say=(
                (
                    ALWAYS,
                    "The KV cache has been at most half full for hours (now {peak:%} at its peak).",
                ),
            ),
            words=(("peak", KV_PEAK.otherwise(0.0)),),
            summary="The KV cache has been at most half full for hours",
            lever="Allow more sequences, or serve from fewer or smaller GPUs.",
            guide=("7.7", "9.3"),
        ),
    ),
    levers=("fewer_replicas",),
    sidecar=OF_HOURS,
)
