"""What became of a recommendation: whether it was followed, and whether its promise held. Pure.

A change is followed where the engine's own labels show it, or, for flags that no label shows,
where its signals can only come from the change. Nothing is concluded from a restart alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

OPEN, APPLIED, KEPT, MISSED = "open", "applied", "kept", "missed"
WORSENED, LAPSED = "worsened", "lapsed"

LAPSED_S = 24 * 3600.0
"""A change that shows within this long of its recommendation was made for it."""

SETTLED_S = 120.0
"""After a restart caches are cold, and the window still fills."""

NEAR_RATIO = 0.15
"""As near as this a prediction was right."""

GROWN_RATIO = 1.02

Means = Mapping[str, float | None]
Change = Mapping[str, Any]
"""A change as a document has it: flag, from, to."""


@dataclass(frozen=True, slots=True)
class Measure:
    """The signal that measures a predicted number, and how near is right whatever the ratio."""

    signal: str
    near: float
    more_is_better: bool = False


MEASURES: Mapping[str, Measure] = {
    "kv_capacity_tokens": Measure("kv_capacity_tokens", 64, more_is_better=True),
    "kv_usage_ratio": Measure("kv_usage_avg_ratio", 0.03),
    "preemption_per_s": Measure("preemption_per_s", 0.05),
    "waiting": Measure("waiting_avg", 1),
    "waiting_deferred": Measure("waiting_deferred_avg", 1),
    "queue_wait_s": Measure("queue_mean_s", 0.05),
    "ttft_s": Measure("ttft_mean_s", 0.02),
    "itl_s": Measure("itl_mean_s", 0.002),
    "prefill_mean_s": Measure("prefill_mean_s", 0.01),
    "itl_stall_per_s": Measure("itl_stall_per_s", 0.05),
    "itl_stall_time_ratio": Measure("itl_stall_time_ratio", 0.01),
    "spec_acceptance_ratio": Measure("spec_acceptance_ratio", 0.05, more_is_better=True),
    "lora_max": Measure("lora_max", 0, more_is_better=True),
}

FELT: Mapping[str, frozenset[str]] = {
    "preemption_per_s": frozenset(),
    "ttft_s": frozenset({"waiting", "queue_wait_s", "prefill_mean_s"}),
    "itl_s": frozenset({"itl_stall_per_s", "itl_stall_time_ratio"}),
}
"""What users feel: worse than before is harm also where nothing was predicted of it, by itself or
by one of those numbers."""

EVIDENT = frozenset({"--max-loras", "--speculative-config", "--max-num-seqs"})
"""Flags that no label shows, and that signals can."""

EVIDENCE = ("running_max", "lora_max", "spec_draft_tokens_per_s", "running_avg", "waiting_avg")
SIGNALS = tuple(dict.fromkeys([*(m.signal for m in MEASURES.values()), *EVIDENCE]))
"""All that is to be known of before and after."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The verdict, and the predicted numbers that could be measured."""

    word: str
    measured: Mapping[str, float]


def evident(change: Change, before: Means, after: Means) -> bool:
    """Whether signals show a change that no label shows."""
    flag, was, wanted = change["flag"], change["from"], change["to"]
    if flag == "--max-loras":
        return bool(after.get("lora_max") == wanted)
    if flag == "--speculative-config" and wanted is None:
        drafted = "spec_draft_tokens_per_s"
        return bool(before.get(drafted)) and not after.get(drafted)
    if flag == "--max-num-seqs" and isinstance(wanted, int | float):
        running, most = before.get("running_max"), after.get("running_max")
        if running is None or most is None:
            return False
        if wanted < (running if was is None else was):
            queued = (after.get("waiting_avg") or 0.0) >= 1
            return most <= wanted and queued and running > wanted
        return wanted >= most > GROWN_RATIO * max(running, float(was or 0.0))
    return False


def judged(document: Mapping[str, Any], before: Means, after: Means) -> Outcome | None:
    """What a recommendation that was followed has done; None where nothing it predicted can be
    measured.

    kept: every number is as predicted or better. worsened: one of them, or one of what users feel,
    is worse than it was before, and not because that was predicted. missed: the rest.
    """
    measured: dict[str, float] = {}
    right, worse = True, False
    predicted = document["predicted"]
    for key, measure in MEASURES.items():
        wanted, now = predicted.get(key), after.get(measure.signal)
        if wanted is None or now is None:
            continue
        measured[key] = now
        if _worse(measure, now, wanted):
            right = False
            worse = worse or _grew_worse(measure, before, now)
    if not measured:
        return None
    for key, parts in FELT.items():
        measure, now = MEASURES[key], after.get(MEASURES[key].signal)
        told = predicted.keys() & {key, *parts}
        if not told and now is not None and _grew_worse(measure, before, now):
            measured[key], worse = now, True
    return Outcome(WORSENED if worse else KEPT if right else MISSED, measured)


def _grew_worse(measure: Measure, before: Means, now: float) -> bool:
    was = before.get(measure.signal)
    return was is not None and _worse(measure, now, was)


def _worse(measure: Measure, now: float, than: float) -> bool:
    apart = than - now if measure.more_is_better else now - than
    return apart > max(measure.near, NEAR_RATIO * abs(than))
