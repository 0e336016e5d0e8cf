"""Causes in the workload and in what was bought for it: guide 9.2, 9.4. Pure."""

from __future__ import annotations

from kneewatch.diagnose.case import Facts
from kneewatch.diagnose.causes.record import (
    CauseRecord,
    Finds,
    Form,
    Level,
    Sidecar,
    SidecarHolds,
    term,
)
from kneewatch.diagnose.causes.signals import BATCH, SERVED, WINDOW_S
from kneewatch.diagnose.lengths import ENDLESS
from kneewatch.rules.baseline import LENGTHS, LOAD
from kneewatch.rules.conditions import ALWAYS, Number
from kneewatch.rules.model import Severity
from kneewatch.rules.quantities import Signal, Usually

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
SHIFT = Sidecar(lambda facts: facts.lengths.shift_ratio if facts.lengths else None, OF_LENGTHS)
SHIFT_CHANCE = Sidecar(
    lambda facts: facts.lengths.chance_ratio if facts.lengths else None, OF_LENGTHS
)
UNSHIFTED = SidecarHolds(
    lambda facts: (
        facts.lengths is not None and not (facts.lengths.real and facts.lengths.shift_ratio > 0)
    ),
    OF_LENGTHS,
)
BEYOND = Sidecar(lambda facts: facts.endless.shift_ratio if facts.endless else None, OF_PROFILE)
BEYOND_CHANCE = Sidecar(
    lambda facts: facts.endless.chance_ratio if facts.endless else None, OF_PROFILE
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
